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
//!    which takes it instead of sending a request (`session/hand_over`).
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
use crate::hold::Share;
use crate::join::Boxed;
use crate::lease::Expiry;
use crate::metrics::Timer;
use crate::step::Outcome;
use crate::store::{LastContact, Progress};

mod limits;
mod queues;

pub(crate) use limits::{Limits, Request};

pub(crate) use queues::{
    ChannelMap, ClaimedWaiter, Offer, QueueKind, TransferClaim, WaitQueues, private_object,
};
use queues::{QueueTurn, Waiter};

/// Added to the time in the reply, which the store truncates to whole milliseconds. Without it the waiter could
/// be early and have to send its request twice.
const ROUNDING: Duration = Duration::from_millis(1);

/// How long the first waiter of a queue waits before that is logged. Not shorter than the default lease: the
/// lock of a holder that died is free by then.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// A request as the wait queues see it: they repeat [`Attempt::send`], which makes one attempt, until the object is
/// acquired.
pub(crate) trait Attempt: Send {
    /// Result of the acquisition.
    type Grant: Send;

    /// The channel on which the store publishes that the object may be free.
    fn channel(&self) -> &str;

    /// Key of the requested object. Two objects may share a channel, but a waiter never waits behind a
    /// waiter for another object.
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

    /// Returns whether all waiters for the object fail if this request cannot reach the store. False if the request
    /// also uses other stores.
    fn shares_outcome(&self) -> bool {
        true
    }

    /// Returns how long the acquisition excludes the other waiters in the queue. `None`: it does not, or its
    /// end is not known, so the next waiter sends its request at once.
    fn excludes_waiters_for(&self) -> Option<Duration>;

    /// Handles a message that arrived while the object was acquired. It is mostly of an earlier release, but the object
    /// may have been released meanwhile. If so, this wakes the waiters.
    fn doubt(&mut self) {}

    /// Returns whether this may take a hold that another request of the client hands over.
    fn takes_offers(&self) -> bool {
        false
    }

    /// Returns what a release of this client needs to know to acquire the object for this request. `None`: it cannot, or
    /// this takes over holds.
    fn claim(&self) -> Option<TransferClaim> {
        None
    }

    /// Returns how much of the object this requests.
    fn share(&self) -> Share {
        Share::Whole
    }

    /// Takes what was offered. Returns the grant, and when its lease ends without a renewal; `None` for the latter if the
    /// acquisition does not exclude the other waiters. `None` if this request cannot use the offer, which is released then.
    fn take(&mut self, offer: Offer) -> Option<(Self::Grant, Option<Instant>)> {
        drop(offer);
        None
    }

    /// Accepts a hold that the store has granted to the latest request, as this message reports. Returns when it ends
    /// unless it is renewed. `None` if the message reports no such hold, or it has to be requested.
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

    /// Returns a function that registers a wait since the given time, as long as its result exists. `None`: it is not
    /// registered.
    fn registrar(&self) -> impl FnOnce(Instant) -> Option<RegisteredWait> + Send + 'static {
        |_| None
    }

    /// Returns a function that logs which owner holds the object, for a waiter that has waited long since the given
    /// time. The future runs concurrently with the waiting.
    fn reporter(&self) -> impl FnOnce(Instant) -> Boxed<'static, ()> + Send + 'static {
        |_| Box::pin(std::future::ready(()))
    }
}

impl WaitQueues {
    /// Repeats the request until it acquires the object. If it does not wait, sends it once (`None`: the store
    /// refused it).
    ///
    /// Cancel-safe: a dropped waiter leaves the queue, and the next one gets the turn.
    pub(crate) async fn acquire<A: Attempt>(
        &self,
        attempt: &mut A,
        waits: bool,
    ) -> Result<Option<A::Grant>> {
        let kind = attempt.queue_kind();
        if waits
            && let Some(mut waiter) = self.join_existing(attempt.channel(), attempt.object(), kind)
        {
            return wait_in_queue(&mut waiter, attempt).await.map(Some);
        }
        // Either this client has no waiters, so that the object is probably free and one round trip is enough, or
        // the request does not wait.
        match attempt.send(false).await? {
            Outcome::Done(grant) => Ok(Some(grant)),
            Outcome::Wait(_) if !waits => Ok(None),
            Outcome::Wait(_) => {
                let mut waiter = self.join(attempt.channel(), attempt.object(), kind);
                wait_in_queue(&mut waiter, attempt).await.map(Some)
            }
        }
    }

    /// Like `acquire`, for a request that was refused before or that found a queue: waits for its turn first.
    pub(crate) async fn acquire_in_turn<A: Attempt>(&self, attempt: &mut A) -> Result<A::Grant> {
        let (channel, object, kind) = (attempt.channel(), attempt.object(), attempt.queue_kind());
        // A request for several objects may get here before it was sent. Then the store has not answered it, although it
        // joins an existing queue.
        let join = match attempt.progress().last_contact() {
            Some(LastContact::Answered) => WaitQueues::join,
            Some(LastContact::Failed { .. }) | None => WaitQueues::join_unanswered,
        };
        let existing = self.join_existing(channel, object, kind);
        let mut waiter = existing.unwrap_or_else(|| join(self, channel, object, kind));
        wait_in_queue(&mut waiter, attempt).await
    }
}

/// Waits for the turn, and then as the first waiter of the queue.
async fn wait_in_queue<A: Attempt>(waiter: &mut Waiter, attempt: &mut A) -> Result<A::Grant> {
    if attempt.takes_offers() {
        waiter.enable_offers(attempt.share());
    } else if let Some(claim) = attempt.claim() {
        waiter.enable_claim(claim);
    }
    let turn = wait_for_turn(waiter, attempt).await?;
    // Boxed: of many waiters, one is the first.
    Box::pin(async {
        let (since, report, register) = (Instant::now(), attempt.reporter(), attempt.registrar());
        let mut waiting = pin!(wait_as_first(waiter, turn, attempt));
        let long_wait = async {
            let remind = async {
                sleep_until(waiter.joined() + REGISTERED_AFTER).await;
                waiter.register(register);
                while waiter.is_registered() {
                    waiter.remind_others();
                    sleep(REGISTERED_AFTER).await;
                }
            };
            let report = async {
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

/// Waits until this is the first waiter of the queue. After a second it is registered, when the first waiter reminds it.
async fn wait_for_turn<'a, A: Attempt>(waiter: &'a Waiter, attempt: &A) -> Result<QueueTurn<'a>> {
    attempt.progress().join_queue(waiter.contacts());
    let turn = tokio::select! {
        biased;
        failed = waiter.failed(attempt) => Err(failed),
        turn = waiter.turn() => Ok(turn),
    };
    attempt.progress().leave_queue();
    turn.map_err(|(since, error)| {
        attempt.progress().record_failure(since, error.clone());
        error
    })
}

/// Waits as the first waiter of the queue: repeats the request when it may succeed.
async fn wait_as_first<A: Attempt>(
    waiter: &Waiter,
    mut turn: QueueTurn<'_>,
    attempt: &mut A,
) -> Result<A::Grant> {
    let share = attempt.share();
    let mut next = match turn.take().filter(|(_, for_share)| *for_share == share) {
        Some((at, _))
            if waiter.is_subscribed() && Instant::now() < at && !waiter.take_wakeups() =>
        {
            // The previous waiter acquired the object, and no release has arrived since, so another owner
            // still holds it. This counts as the store's answer to this request.
            attempt.progress().record_answer();
            waiter.request_ended(Some(LastContact::Answered));
            NextRequest::At(at)
        }
        _ => NextRequest::Now,
    };
    loop {
        let is_woken = match next {
            NextRequest::Now => false,
            NextRequest::OnMessage => {
                waiter.woken().await;
                true
            }
            NextRequest::At(at) => tokio::select! {
                biased;
                () = waiter.woken() => true,
                () = sleep_until(at) => false,
            },
        };
        let woken = is_woken.then(Timer::start);
        let let_counted_go_first = waiter.let_others_go_first().await;
        while let Some(offer) = waiter.take_offer() {
            if let Some((grant, end)) = offer.end(|offer| attempt.take(offer)) {
                let refused = || next.at_latest().filter(|_| waiter.answer_is_current());
                let end = end.map_or_else(refused, |end| Some(end + ROUNDING));
                *turn = end.map(|end| (end, share));
                return Ok(grant);
            }
        }
        // The next answer already includes every release whose message has arrived.
        let others_released = waiter.take_wakeups();
        let message = waiter.take_message();
        if message != 0
            && let Some((grant, end)) = attempt.accept(message).await
        {
            attempt.progress().record_answer();
            waiter.request_ended(Some(LastContact::Answered));
            *turn = Some((end + ROUNDING, share));
            waiter.metrics().acquired_after_wake(woken);
            return Ok(grant);
        }
        let sent_at = Instant::now();
        let pause = attempt.pause();
        let subscribe = pause.is_none() && waiter.begin_subscribing();
        let outcome = request_as_first(waiter, attempt, subscribe).await?;
        next = match (outcome, pause) {
            (Outcome::Done(grant), _) => {
                waiter.metrics().acquired_after_wake(woken);
                if let Some(held) = attempt.excludes_waiters_for() {
                    *turn = Some((sent_at + held + ROUNDING, share));
                }
                if share == Share::Whole {
                    // The store granted it, so an earlier holder that offers it has lost it.
                    drop(waiter.take_offer());
                    if waiter.is_served_locally() && waiter.discard_wakeups() {
                        attempt.doubt();
                    }
                }
                // A client that acquires permits meanwhile releases nothing.
                if share == Share::Whole && let_counted_go_first && !others_released {
                    waiter.yielded_in_vain();
                }
                return Ok(grant);
            }
            (Outcome::Wait(_), Some(pause)) => NextRequest::at(Expiry::In(pause)),
            (Outcome::Wait(left), None) => {
                tracing::trace!(channel = waiter.channel(), ?left, "waiting");
                NextRequest::at(match left {
                    Expiry::In(left) => Expiry::In(left.saturating_add(ROUNDING)),
                    Expiry::Never => Expiry::Never,
                })
            }
        };
    }
}

/// Sends the request, and records its outcome for the whole queue. If the store cannot be reached, all waiters for
/// the object fail together. Otherwise each would take another response timeout to fail.
async fn request_as_first<A: Attempt>(
    waiter: &Waiter,
    attempt: &mut A,
    subscribe: bool,
) -> Result<Outcome<A::Grant>> {
    let shares_outcome = attempt.shares_outcome();
    if shares_outcome {
        waiter.request_started();
    }
    // Boxed, so that a first waiter that sleeps is small.
    let answer = Box::pin(async {
        let _sending = waiter.sending();
        attempt.send(subscribe).await
    });
    let answer = answer.await;
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

/// When the first waiter repeats its request, unless a message arrives before.
enum NextRequest {
    Now,
    At(Instant),
    OnMessage,
}

impl NextRequest {
    /// Returns [`NextRequest::At`] this long from now; [`NextRequest::OnMessage`] if that is never, or beyond what
    /// the clock can represent.
    fn at(time: Expiry) -> NextRequest {
        let at = time
            .duration()
            .and_then(|left| Instant::now().checked_add(left));
        at.map_or(NextRequest::OnMessage, NextRequest::At)
    }

    /// Returns until when the store's latest refusal holds unless a message arrives. `None`: unknown.
    fn at_latest(&self) -> Option<Instant> {
        match self {
            NextRequest::At(at) => Some(*at),
            NextRequest::Now | NextRequest::OnMessage => None,
        }
    }
}

#[cfg(test)]
mod tests;
