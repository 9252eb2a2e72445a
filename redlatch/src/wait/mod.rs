//! Waiting, once for every primitive: *it is yours, or wait at most this long*.
//!
//! Who finds that somebody is in the way joins the line of the channel. Only the first in a line
//! asks the store; the others wait for their turn without a single command. The first subscribes
//! and asks again behind the subscription, so that no release after that goes unheard, and then
//! sleeps until it hears one, until the holder's lease would have ended, or until its own patience
//! does.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use crate::error::Result;
use crate::lease::Patience;
use crate::step::Outcome;

mod line;

use line::{Line, Turn};
pub(crate) use line::{Lines, WaitingRoom};

/// Added to what the store says of the holder's remaining lease, which it cuts to whole
/// milliseconds: asking a moment early would be asking twice.
const ROUNDING: Duration = Duration::from_millis(1);

/// Something that can be asked for again and again until it is had.
pub(crate) trait Attempt: Send {
    /// The channel on which the store tells that asking again makes sense.
    fn channel(&self) -> &str;

    /// Asks once, subscribing to the channel first if told to.
    fn ask(&mut self, subscribe: bool) -> impl Future<Output = Result<Outcome>> + Send;

    /// How long what was won is held before anybody needs to look at it again.
    fn lease(&self) -> Duration;
}

impl WaitingRoom {
    /// Asks until it is had (`true`) or patience ends (`false`).
    ///
    /// Cancel-safe: who is dropped leaves the line, and the next one asks.
    pub(crate) async fn obtain<A: Attempt>(
        &self,
        attempt: &mut A,
        patience: Patience,
    ) -> Result<bool> {
        let line = match patience {
            Patience::None => return Ok(attempt.ask(false).await? == Outcome::Done),
            _ => match self.line(attempt.channel()) {
                Some(line) => line,
                // Nobody waits here: most likely it is free, and one round trip is all it takes.
                None if attempt.ask(false).await? == Outcome::Done => return Ok(true),
                None => self.join(attempt.channel()),
            },
        };
        let end = patience.end();
        let Some(turn) = before(end, line.turn()).await else {
            return Ok(false);
        };
        first_in_line(&line, turn, attempt, end).await
    }
}

async fn first_in_line<A: Attempt>(
    line: &Line,
    mut turn: Turn<'_>,
    attempt: &mut A,
    end: Option<Instant>,
) -> Result<bool> {
    // Whoever had the turn before won, and the line hears every release since: nothing to ask yet.
    let mut look_again = turn.take_handed_on();
    loop {
        if let Some(at) = look_again {
            let wake = end.map_or(at, |end| end.min(at));
            tokio::select! {
                biased;
                () = line.called() => {}
                () = sleep_until(wake) => {
                    if end.is_some_and(|end| Instant::now() >= end) {
                        return Ok(false);
                    }
                }
            }
        }
        // What was heard until now cannot matter to an answer that comes after it.
        line.forget_calls();
        let subscribed = line.is_subscribed();
        line.subscribing();
        let asked = Instant::now();
        let outcome = attempt.ask(!subscribed).await?;
        line.subscribed();
        match outcome {
            Outcome::Done => {
                turn.hand_on(asked + attempt.lease() + ROUNDING);
                return Ok(true);
            }
            Outcome::Wait(left) => {
                tracing::trace!(channel = line.channel(), ?left, "waiting");
                look_again = Some(Instant::now() + left + ROUNDING);
            }
        }
    }
}

async fn before<T>(end: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match end {
        Some(end) => timeout_at(end, work).await.ok(),
        None => Some(work.await),
    }
}
