//! Waiting, once for every primitive: *it is yours, or wait at most this long*.
//!
//! A request that is refused joins the line of the object that it asks for. Only the first in a line
//! asks the store; the others wait for their turn without a single command. The first subscribes
//! and asks again behind the subscription, so that no release after that goes unheard, and then
//! sleeps until it hears one, or until the holder's lease would have ended.
//!
//! Limits are kept outside of all that, for the whole request: at the wait limit the request is dropped,
//! also during an outage, and steps that may be in flight are settled as after any drop. An outage of the
//! store interrupts the request; it leaves its line, pauses, and begins again, until the outage limit.

use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::Boxed;
use crate::error::{Error, Result};
use crate::step::Outcome;
use crate::store::{Sent, Word};

mod limits;
mod line;

pub(crate) use limits::{Limits, Request};

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

    /// News of the steps of this request.
    fn sent(&self) -> &Sent;

    /// Whether the store that it asks is the one that the others in its line wait for, and no other. Then
    /// an error means that they cannot ask it either.
    fn asks_for_line(&self) -> bool {
        true
    }

    /// How long what was won keeps everybody else in the queue from having it too. `None`: it does
    /// not, or nobody will say when it ends; the next one asks at once.
    fn keeps_others_out(&self) -> Option<Duration>;

    /// Instead of listening to the channel: how long to sleep before asking again.
    fn pause(&mut self) -> Option<Duration> {
        None
    }

    /// Logs after a long wait which owner holds the object. Runs beside the waiting.
    fn report(&self, since: Instant) -> impl Future<Output = ()> + Send + 'static {
        let _ = since;
        std::future::ready(())
    }
}

impl WaitingRoom {
    /// Asks until it is acquired; or, if it does not wait, once (`None`: another owner has it).
    ///
    /// Cancel-safe: who is dropped leaves the line, and the next one asks.
    pub(crate) async fn obtain<A: Attempt>(
        &self,
        attempt: &mut A,
        waits: bool,
    ) -> Result<Option<A::Won>> {
        let queue = attempt.queue();
        let present = match waits {
            false => None,
            true => self.line(attempt.channel(), attempt.object(), queue),
        };
        let line = match present {
            Some(line) => line,
            // Nobody waits here: most likely it is free, and one round trip is all it takes.
            None => match attempt.ask(false).await? {
                Outcome::Done(won) => return Ok(Some(won)),
                Outcome::Wait(_) if !waits => return Ok(None),
                Outcome::Wait(_) => self.join(attempt.channel(), attempt.object(), queue),
            },
        };
        in_line(line, attempt).await.map(Some)
    }

    /// The same for who has asked before: waits for its turn, and then asks.
    pub(crate) async fn obtain_in_line<A: Attempt>(&self, attempt: &mut A) -> Result<A::Won> {
        let line = self.join(attempt.channel(), attempt.object(), attempt.queue());
        in_line(line, attempt).await
    }
}

/// Boxed: most requests do not wait, and would have to carry this about.
fn in_line<'a, A: Attempt>(line: Line, attempt: &'a mut A) -> Boxed<'a, Result<A::Won>> {
    Box::pin(async move {
        attempt.sent().joined(line.news());
        let turn = tokio::select! {
            biased;
            (since, error) = line.failed() => {
                attempt.sent().asks_by_itself();
                attempt.sent().failed(since, error.clone());
                return Err(error);
            }
            turn = line.turn() => turn,
        };
        attempt.sent().asks_by_itself();
        let since = Instant::now();
        let report = attempt.report(since);
        let waiting = pin!(first_in_line(&line, turn, attempt));
        reported(since, report, waiting).await
    })
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
) -> Result<A::Won> {
    // Whoever had the turn before won, and the line hears every release since: nothing to ask yet.
    let mut next = match turn.take_handed_on() {
        Some(at) if line.is_subscribed() && Instant::now() < at && !line.forget_calls() => {
            // No release has arrived since the previous waiter acquired it, so another owner still holds it. This counts
            // as the store's answer to this request.
            attempt.sent().answered();
            Next::At(at)
        }
        _ => Next::Now,
    };
    loop {
        match next {
            Next::Now => {}
            Next::Called => line.called().await,
            Next::At(at) => tokio::select! {
                biased;
                () = line.called() => {}
                () = sleep_until(at) => {}
            },
        }
        // What was heard until now cannot matter to an answer that comes after it.
        line.forget_calls();
        let asked = Instant::now();
        let pause = attempt.pause();
        let outcome = if pause.is_some() {
            ask_for_line(line, attempt, false).await?
        } else {
            let subscribed = line.is_subscribed();
            line.subscribing();
            let outcome = ask_for_line(line, attempt, !subscribed).await?;
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
                return Ok(won);
            }
            (Outcome::Wait(_), Some(pause)) => Next::after(pause),
            (Outcome::Wait(left), None) => {
                tracing::trace!(channel = line.channel(), ?left, "waiting");
                Next::after(left.saturating_add(ROUNDING))
            }
        };
    }
}

/// Asks, and shares with the whole line what the store said. If it could not be asked, all fail together:
/// otherwise each would find out by itself, one response timeout after the other.
async fn ask_for_line<A: Attempt>(
    line: &Line,
    attempt: &mut A,
    subscribe: bool,
) -> Result<Outcome<A::Won>> {
    if !attempt.asks_for_line() {
        let answer = attempt.ask(subscribe).await;
        if answer.is_ok() {
            line.heard(Some(Word::Answered));
        }
        return answer;
    }
    line.asking();
    let answer = attempt.ask(subscribe).await;
    line.heard(attempt.sent().word());
    if answer.as_ref().is_err_and(Error::is_outage) {
        line.fail_together();
    }
    answer
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

#[cfg(test)]
mod tests;
