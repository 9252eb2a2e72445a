//! Waiting, once for every primitive: *it is yours, or wait at most this long*.
//!
//! A request that is refused joins the line of the object that it asks for. Only the first in a line
//! asks the store; the others wait for their turn without a single command. The first subscribes
//! and asks again behind the subscription, so that no release after that goes unheard, and then
//! sleeps until it hears one, until the holder's lease would have ended, or until its own patience
//! does.

use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use crate::error::Result;
use crate::lease::Patience;
use crate::step::Outcome;

mod line;

use line::{Line, Turn};
pub(crate) use line::{Lines, Queue, WaitingRoom};

/// Added to what the store says of the holder's remaining lease, which it cuts to whole
/// milliseconds: asking a moment early would be asking twice.
const ROUNDING: Duration = Duration::from_millis(1);

/// How long the first in a line waits before the log says so. Longer than the default lease: a holder that
/// died is passed over by then.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// Something that can be asked for again and again until it is had.
pub(crate) trait Attempt: Send {
    /// What there is when it is had.
    type Won: Send;

    /// The channel on which the store tells that asking again makes sense.
    fn channel(&self) -> &str;

    /// Key of the requested object. Two objects may share a channel, but a waiter never waits behind
    /// a waiter for another object.
    fn object(&self) -> &str;

    /// Which of the object's queues to wait in.
    fn queue(&self) -> Queue {
        Queue::Exclusive
    }

    /// Asks once, subscribing to the channel first if told to.
    fn ask(&mut self, subscribe: bool) -> impl Future<Output = Result<Outcome<Self::Won>>> + Send;

    /// Whether the last [`Attempt::ask`] came so far as to subscribe, if it was told to.
    fn has_subscribed(&self) -> bool {
        true
    }

    /// How long what was won keeps everybody else in the queue from having it too. `None`: it does
    /// not, or nobody will say when it ends; the next one asks at once.
    fn keeps_others_out(&self) -> Option<Duration>;

    /// Instead of listening to the channel: how long to sleep before asking again.
    fn pause(&mut self) -> Option<Duration> {
        None
    }

    /// Logs which owner holds what is waited for, after a long wait. Runs beside the waiting.
    fn report(&self, since: Instant) -> impl Future<Output = ()> + Send + 'static {
        let _ = since;
        std::future::ready(())
    }
}

impl WaitingRoom {
    /// Asks until it is had or patience ends (`None`).
    ///
    /// Cancel-safe: who is dropped leaves the line, and the next one asks.
    pub(crate) async fn obtain<A: Attempt>(
        &self,
        attempt: &mut A,
        patience: Patience,
    ) -> Result<Option<A::Won>> {
        let queue = attempt.queue();
        let present = match patience {
            Patience::None => None,
            _ => self.line(attempt.channel(), attempt.object(), queue),
        };
        let line = match present {
            Some(line) => line,
            // Nobody waits here: most likely it is free, and one round trip is all it takes.
            None => match attempt.ask(false).await? {
                Outcome::Done(won) => return Ok(Some(won)),
                Outcome::Wait(_) if matches!(patience, Patience::None) => return Ok(None),
                Outcome::Wait(_) => self.join(attempt.channel(), attempt.object(), queue),
            },
        };
        in_line(line, attempt, patience).await
    }

    /// The same for who has asked before: waits for its turn, and then asks.
    pub(crate) async fn obtain_in_line<A: Attempt>(
        &self,
        attempt: &mut A,
        patience: Patience,
    ) -> Result<Option<A::Won>> {
        let line = self.join(attempt.channel(), attempt.object(), attempt.queue());
        in_line(line, attempt, patience).await
    }
}

async fn in_line<A: Attempt>(
    line: Line,
    attempt: &mut A,
    patience: Patience,
) -> Result<Option<A::Won>> {
    let end = patience.end();
    let Some(turn) = before(end, line.turn()).await else {
        return Ok(None);
    };
    let since = Instant::now();
    let report = attempt.report(since);
    let waiting = pin!(first_in_line(&line, turn, attempt, end));
    reported(since, report, waiting).await
}

/// Waits, and reports once when that takes long.
async fn reported<W: Future>(
    since: Instant,
    report: impl Future<Output = ()>,
    mut waiting: Pin<&mut W>,
) -> W::Output {
    tokio::select! {
        biased;
        done = &mut waiting => return done,
        () = async {
            sleep_until(since + LONG_WAIT).await;
            report.await;
        } => {}
    }
    waiting.await
}

async fn first_in_line<A: Attempt>(
    line: &Line,
    mut turn: Turn<'_>,
    attempt: &mut A,
    end: Option<Instant>,
) -> Result<Option<A::Won>> {
    // Whoever had the turn before won, and the line hears every release since: nothing to ask yet.
    let mut next = match turn.take_handed_on() {
        Some(at) if line.is_subscribed() => Next::At(at),
        _ => Next::Now,
    };
    loop {
        let wake = match next {
            Next::Now => None,
            Next::At(at) => Some(end.map_or(at, |end| end.min(at))),
            Next::Called => Some(end.unwrap_or_else(far_future)),
        };
        if let Some(wake) = wake {
            tokio::select! {
                biased;
                () = line.called() => {}
                () = sleep_until(wake) => {
                    if end.is_some_and(|end| Instant::now() >= end) {
                        return Ok(None);
                    }
                }
            }
        }
        // What was heard until now cannot matter to an answer that comes after it.
        line.forget_calls();
        let asked = Instant::now();
        let pause = attempt.pause();
        let outcome = if pause.is_some() {
            attempt.ask(false).await?
        } else {
            let subscribed = line.is_subscribed();
            line.subscribing();
            let outcome = attempt.ask(!subscribed).await?;
            if attempt.has_subscribed() {
                line.subscribed();
            }
            outcome
        };
        next = match (outcome, pause) {
            (Outcome::Done(won), _) => {
                if let Some(held) = attempt.keeps_others_out() {
                    turn.hand_on(asked + held + ROUNDING);
                }
                return Ok(Some(won));
            }
            (Outcome::Wait(_), Some(pause)) => Next::after(pause),
            (Outcome::Wait(left), None) => {
                tracing::trace!(channel = line.channel(), ?left, "waiting");
                Next::after(left.saturating_add(ROUNDING))
            }
        };
    }
}

/// When the first in line asks again, unless it is called before.
enum Next {
    Now,
    At(Instant),
    Called,
}

impl Next {
    /// After so long. What the clock cannot hold is never.
    fn after(pause: Duration) -> Next {
        Instant::now()
            .checked_add(pause)
            .map_or(Next::Called, Next::At)
    }
}

/// Later than anybody waits.
fn far_future() -> Instant {
    Instant::now() + crate::lease::MAX_LEASE
}

async fn before<T>(end: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match end {
        Some(end) => timeout_at(end, work).await.ok(),
        None => Some(work.await),
    }
}
