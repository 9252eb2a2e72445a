//! Waiting, implemented once for all primitives. A request either acquires its object or learns how long
//! to wait at most.
//!
//! 1. A request first asks the store once. If it is refused, it joins the line of the object. If there is a
//!    line at the channel already, it joins without asking.
//! 2. Only the first in a line sends requests. The others wait for their turn and send nothing.
//! 3. Unless the line is subscribed already, the first subscribes and sends its request behind the
//!    subscription, in one round trip, so that it misses no later release.
//! 4. It then sleeps until a message arrives or the holder's lease ends, and repeats its request.
//! 5. When it acquires the object, it passes the turn on, together with the end of its own lease. The next
//!    waiter sends nothing before then unless a message arrives.
//! 6. If the store cannot be reached, all waiters of the line fail together.
//!
//! The limits in `limits` apply to the whole request. At the wait limit the request is dropped, even during
//! an outage, and steps that may be in flight are settled as after any drop. An outage interrupts the
//! request: it leaves its line, pauses, and starts again, until the outage limit.

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

/// Added to the holder's remaining lease, which the store truncates to whole milliseconds. Without it the
/// waiter could be early and have to ask twice.
const ROUNDING: Duration = Duration::from_millis(1);

/// How long the first in a line waits before that is logged. Longer than the default lease: the lock of a
/// holder that died is free by then.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// A resource that is requested repeatedly until it is acquired.
pub(crate) trait Attempt: Send {
    /// Result of the acquisition.
    type Won: Send;

    /// The channel on which the store publishes that a retry makes sense.
    fn channel(&self) -> &str;

    /// Key of the requested object. Two objects may share a channel, but a waiter never waits behind a
    /// waiter for another object.
    fn object(&self) -> &str;

    /// Which of the object's queues to wait in.
    fn queue(&self) -> Queue {
        Queue::Exclusive
    }

    /// Sends the request once, behind a subscription to the channel if `subscribe` is set.
    fn ask(&mut self, subscribe: bool) -> impl Future<Output = Result<Outcome<Self::Won>>> + Send;

    /// Returns whether the last [`Attempt::ask`] has sent the subscription, if one was requested.
    fn has_subscribed(&self) -> bool {
        true
    }

    /// News of the steps of this request.
    fn sent(&self) -> &Sent;

    /// Returns whether the request uses exactly the store for which the others in its line wait. If so, an
    /// error means that they cannot reach it either.
    fn asks_for_line(&self) -> bool {
        true
    }

    /// How long the acquisition excludes the other waiters in the queue. `None`: it does not, or its end is
    /// not announced, so the next waiter asks at once.
    fn keeps_others_out(&self) -> Option<Duration>;

    /// Pause before the next request, for attempts that poll instead of subscribing.
    fn pause(&mut self) -> Option<Duration> {
        None
    }

    /// Logs after a long wait which owner holds the object. Runs concurrently with the waiting.
    fn report(&self, since: Instant) -> impl Future<Output = ()> + Send + 'static {
        let _ = since;
        std::future::ready(())
    }
}

impl WaitingRoom {
    /// Repeats the request until it acquires the object. If it does not wait, sends it once (`None`:
    /// another owner holds the object).
    ///
    /// Cancel-safe: a dropped waiter leaves the line, and the next one takes its turn.
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
            // No waiters here: the object is probably free, and one round trip is enough.
            None => match attempt.ask(false).await? {
                Outcome::Done(won) => return Ok(Some(won)),
                Outcome::Wait(_) if !waits => return Ok(None),
                Outcome::Wait(_) => self.join(attempt.channel(), attempt.object(), queue),
            },
        };
        in_line(line, attempt).await.map(Some)
    }

    /// Like `obtain`, for a request that was refused before: waits for its turn first.
    pub(crate) async fn obtain_in_line<A: Attempt>(&self, attempt: &mut A) -> Result<A::Won> {
        let line = self.join(attempt.channel(), attempt.object(), attempt.queue());
        in_line(line, attempt).await
    }
}

/// Boxed: most requests do not wait and should not carry this future.
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

/// Waits, and reports once if that takes long.
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
    // The waiter that had the turn before acquired the object, and the line has received every release
    // since: there is no need to ask yet.
    let mut next = match turn.take_handed_on() {
        Some(at) if line.is_subscribed() && Instant::now() < at && !line.forget_calls() => {
            // No release has arrived since the previous waiter acquired it, so another owner still holds
            // it. This counts as the store's answer to this request.
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
        // Earlier messages do not matter to an answer that comes after them.
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

/// Sends the request, and shares the store's news with the whole line. If the store cannot be reached, all
/// fail together. Otherwise each would take another response timeout to fail.
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

/// When the first in line repeats its request, unless a message arrives before.
enum Next {
    Now,
    At(Instant),
    Called,
}

impl Next {
    /// After this pause; never, if the clock cannot represent that.
    fn after(pause: Duration) -> Next {
        Instant::now()
            .checked_add(pause)
            .map_or(Next::Called, Next::At)
    }
}

#[cfg(test)]
mod tests;
