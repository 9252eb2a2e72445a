//! Waiting, implemented once for all primitives. A request either acquires its object or learns how
//! long to wait at most.
//!
//! 1. A request is first sent once. If it is refused, it joins the wait queue of the object. If
//!    this client already has waiters or a subscription on the channel, the request joins without
//!    being sent first.
//! 2. Only the first waiter of a queue sends requests. The others wait for their turn and send
//!    nothing.
//! 3. Unless the channel is subscribed to already, the first waiter subscribes and sends its
//!    request behind the subscription, in one round trip, so that it misses no later release.
//! 4. It then sleeps until a message arrives or the time in the reply has passed (usually the
//!    holder's remaining lease), and repeats its request. A spin lock pauses instead of
//!    subscribing.
//! 5. When it acquires the object, it passes the turn on, together with the end of its own lease.
//!    The next waiter sends nothing before that end unless a message arrives. So a turn costs one
//!    acquisition and one release.
//! 6. If the store cannot be reached, all waiters for the object fail together.
//! 7. A request of this client that releases the object may offer its hold to the first waiter,
//!    which takes it instead of sending a request (`session/handoff`).
//!
//! The limits in `limits` apply to the whole request. At the wait limit the request is dropped,
//! even during an outage, and steps that may be in flight are settled as after any drop. An outage
//! interrupts the request: it leaves its queue, pauses, and starts again, until the outage limit.
//!
//! What must not happen, and what prevents it:
//!
//! - *A waiter sleeps on a free lock.* Point 3. A broken connection counts as a message for every
//!   queue, and the end of a subscription for those of its channel. The remaining lease is the
//!   fallback. Mutants `disconnect-does-not-wake-waiters`, `subscription-not-restored`,
//!   `apart-subscription-not-renewed`, `disconnection-is-forgotten`.
//! - *An owner waits behind those that wait for its release.* An owner that holds the object, or
//!   the other side of its read-write lock, waits in no queue. It sends its request out of turn,
//!   also for a multi-lock (`HoldRef::hold_period`).
//! - *A reader waits behind a writer, or a waiter behind one for another object.* Each object has
//!   two queues. The waiters of a fair lock have a channel each.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use crate::client_registry::{REGISTERED_AFTER, RegisteredWait};
use crate::error::{Error, Result};
use crate::hold::{QueueKind, Share};
use crate::join::Boxed;
use crate::step::Outcome;
use crate::store::{LastContact, Progress};

mod limits;
mod observe;
mod queue;
mod subscription;
mod waiter;

pub(crate) use limits::{Limits, Request};
use queue::{Next, ROUNDING, Turn};
pub(crate) use subscription::ChannelMap;
use waiter::Waiter;
pub(crate) use waiter::{Claim, ClaimedWaiter, Offer, WaitQueues, private_object};

/// How long the first waiter of a queue waits before that is logged. Not shorter than the default
/// lease: the lock of a holder that died is free by then.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// A request as the wait queues see it: they repeat [`Attempt::send`], which makes one attempt,
/// until the object is acquired.
pub(crate) trait Attempt: Send {
    /// Result of the acquisition.
    type Grant: Send;

    /// The channel on which the store publishes that the object may be free.
    fn channel(&self) -> &str;

    /// Key of the requested object. Two objects may share a channel, but a waiter never waits
    /// behind a waiter for another object.
    fn object(&self) -> &str;

    /// Returns in which of the object's queues to wait.
    fn queue_kind(&self) -> QueueKind {
        QueueKind::Exclusive
    }

    /// Makes one attempt. If `subscribe` is true, its first step to the store of the channel is
    /// sent behind a subscription, which the store reports: the attempt may also end before that
    /// step.
    fn send(
        &mut self,
        subscribe: bool,
    ) -> impl Future<Output = Result<Outcome<Self::Grant>>> + Send;

    /// Returns the record of whether the steps of this request were sent, and with which outcome.
    fn progress(&self) -> &Progress;

    /// Returns whether all waiters for the object fail if this request cannot reach the store.
    /// False if the request also uses other stores.
    fn shares_outcome(&self) -> bool {
        true
    }

    /// Returns how long the acquisition excludes the other waiters in the queue. `None`: it does
    /// not, or its end is not known, so the next waiter sends its request at once.
    fn excludes_waiters_for(&self) -> Option<Duration>;

    /// Handles a message that arrived while the object was acquired. It is mostly of an earlier
    /// release, but the object may have been released meanwhile. If so, this wakes the waiters.
    fn doubt(&mut self) {}

    /// Returns whether this may take a hold that another request of the client hands over.
    fn takes_offers(&self) -> bool {
        false
    }

    /// Returns what a release of this client needs to know to acquire the object for this request.
    /// `None`: it cannot, or this takes over holds.
    fn claim(&self) -> Option<Claim> {
        None
    }

    /// Returns how much of the object this requests.
    fn share(&self) -> Share {
        Share::Whole
    }

    /// Takes what was offered. Returns the grant, and when its lease ends without a renewal; `None`
    /// for the latter if the acquisition does not exclude the other waiters. `None` if this request
    /// cannot use the offer, which is released then.
    fn take(&mut self, offer: Offer, now: Instant) -> Option<(Self::Grant, Option<Instant>)> {
        drop((offer, now));
        None
    }

    /// Accepts a hold that the store has granted to the latest request, as this message reports.
    /// Returns when it ends unless it is renewed. `None` if the message reports no such hold, or it
    /// has to be requested.
    fn accept(
        &mut self,
        message: i64,
    ) -> impl Future<Output = Option<(Self::Grant, Instant)>> + Send {
        let _ = message;
        std::future::ready(None)
    }

    /// Returns the pause before the next request, for attempts that poll instead of subscribing.
    fn pause(&mut self) -> Option<Duration> {
        None
    }

    /// Returns a function that registers a wait since the given time, as long as its result exists.
    /// `None`: it is not registered.
    fn registrar(&self) -> impl FnOnce(Instant) -> Option<RegisteredWait> + Send + 'static {
        |_| None
    }

    /// Returns a function that logs which owner holds the object, for a waiter that has waited long
    /// since the given time. The future runs concurrently with the waiting.
    fn reporter(&self) -> impl FnOnce(Instant) -> Boxed<'static, ()> + Send + 'static {
        |_| Box::pin(std::future::ready(()))
    }
}

impl WaitQueues {
    /// Repeats the request until it acquires the object. If it does not wait, sends it once
    /// (`None`: the store refused it).
    ///
    /// Cancel-safe: a dropped waiter leaves the queue, and the next one gets the turn.
    pub(crate) async fn acquire<A: Attempt>(
        &self,
        attempt: &mut A,
        waits: bool,
    ) -> Result<Option<A::Grant>> {
        if waits && let Some(waiter) = self.join_existing(attempt) {
            return wait_in_queue(&waiter, attempt).await.map(Some);
        }
        // Either this client has no waiters, so that the object is probably free and one round trip
        // is enough, or the request does not wait.
        match attempt.send(false).await? {
            Outcome::Done(grant) => Ok(Some(grant)),
            Outcome::Wait(_) if !waits => Ok(None),
            Outcome::Wait(_) => {
                let waiter = self.join(attempt, true);
                wait_in_queue(&waiter, attempt).await.map(Some)
            }
        }
    }

    /// Like `acquire`, for a request that was refused before or that found a queue: waits for its
    /// turn first.
    pub(crate) async fn acquire_in_turn<A: Attempt>(&self, attempt: &mut A) -> Result<A::Grant> {
        // A request for several objects may get here before it was sent. Then the store has not
        // answered it, although it joins an existing queue.
        let last = attempt.progress().last_contact();
        let answered = matches!(last, Some(LastContact::Answered));
        let existing = self.join_existing(attempt);
        let waiter = existing.unwrap_or_else(|| self.join(attempt, answered));
        wait_in_queue(&waiter, attempt).await
    }
}

/// Waits for the turn, and then as the first waiter of the queue.
async fn wait_in_queue<A: Attempt>(waiter: &Waiter, attempt: &mut A) -> Result<A::Grant> {
    attempt
        .progress()
        .join_queue(waiter.contacts(), waiter.joined);
    let mut now = Some(waiter.joined);
    let turn = loop {
        match waiter.turn(now.take()).await {
            Turn::Register => waiter.register(|since| attempt.registrar()(since)),
            Turn::Sleep => continue,
            turn => break turn,
        };
    };
    attempt.progress().leave_queue();
    match turn {
        Turn::Fail { since, error } => {
            attempt.progress().record_failure(since, error.clone());
            return Err(error);
        }
        Turn::First { relies: true } => attempt.progress().record_answer(),
        _ => {}
    }
    // Boxed: of many waiters, one is the first.
    Box::pin(async {
        let (report, register) = (attempt.reporter(), attempt.registrar());
        let mut waiting = pin!(wait_as_first(waiter, attempt));
        let long_wait = async {
            let remind = async {
                sleep_until(waiter.joined + REGISTERED_AFTER).await;
                if waiter.register(register) {
                    loop {
                        waiter.remind_others();
                        sleep(REGISTERED_AFTER).await;
                    }
                }
            };
            let report = async {
                let since = Instant::now();
                sleep_until(since + LONG_WAIT).await;
                report(since).await;
            };
            tokio::join!(remind, report);
            std::future::pending().await
        };
        tokio::select! {
            biased;
            done = waiting.as_mut() => done,
            never = long_wait => never,
        }
    })
    .await
}

/// Waits as the first waiter of the queue: repeats the request when it may succeed.
async fn wait_as_first<A: Attempt>(waiter: &Waiter, attempt: &mut A) -> Result<A::Grant> {
    waiter.subscription.ended().await;
    loop {
        let (next, now) = waiter.next().await;
        let (message, woken_at) = match next {
            Next::Take(offer) => {
                let Some((grant, until)) = offer.end(|offer| attempt.take(offer, now)) else {
                    continue;
                };
                waiter.queue(|queue| queue.took(until));
                return Ok(grant);
            }
            Next::Ask { message, woken_at } => (message, woken_at),
            Next::Drop(_) | Next::Sleep(_) => continue,
        };
        if message != 0
            && let Some((grant, until)) = attempt.accept(message).await
        {
            attempt.progress().record_answer();
            waiter.request_ended(Some(LastContact::Answered));
            // No message puts it in doubt: releases do not serve waiters that accept grants.
            waiter.queue(|queue| queue.acquired(Some(until)));
            waiter.metrics().acquired_after_wake(woken_at);
            return Ok(grant);
        }
        let sent_at = Instant::now();
        let pause = attempt.pause();
        let subscribe = pause.is_none() && waiter.subscription.begin();
        let outcome = request_as_first(waiter, attempt, subscribe).await?;
        let left = match (outcome, pause) {
            (Outcome::Done(grant), _) => {
                waiter.metrics().acquired_after_wake(woken_at);
                let until = attempt.excludes_waiters_for().map(|held| sent_at + held);
                let (outdated, is_in_doubt) = waiter.queue(|queue| queue.acquired(until));
                drop(outdated);
                if is_in_doubt {
                    attempt.doubt();
                }
                return Ok(grant);
            }
            (Outcome::Wait(_), Some(pause)) => Some(pause),
            (Outcome::Wait(left), None) => {
                tracing::trace!(channel = waiter.channel(), ?left, "waiting");
                left.duration().map(|left| left.saturating_add(ROUNDING))
            }
        };
        let due = left.and_then(|left| Instant::now().checked_add(left));
        waiter.queue(|queue| queue.refused(due));
    }
}

/// Sends the request, and records its outcome for the whole queue. If the store cannot be reached,
/// all waiters for the object fail together. Otherwise each would take another response timeout to
/// fail.
async fn request_as_first<A: Attempt>(
    waiter: &Waiter,
    attempt: &mut A,
    subscribe: bool,
) -> Result<Outcome<A::Grant>> {
    let shares_outcome = attempt.shares_outcome();
    if shares_outcome {
        waiter.queue(|queue| queue.request_started(Instant::now()));
    }
    // Boxed, so that a first waiter that sleeps is small.
    let answer = Box::pin(attempt.send(subscribe)).await;
    if shares_outcome {
        waiter.request_ended(attempt.progress().last_contact());
        if answer.as_ref().is_err_and(Error::is_outage) {
            waiter.fail_all();
        }
    } else if answer.is_ok() {
        waiter.request_ended(Some(LastContact::Answered));
    }
    answer
}

#[cfg(test)]
mod tests;
