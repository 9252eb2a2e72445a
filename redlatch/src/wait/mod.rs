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
mod object;
mod observe;
mod queue;
mod subscription;
mod waiter;

pub(crate) use limits::RequestLimits;
pub(crate) use object::{Claim, Offer, private_object};
use queue::{Next, ROUNDING, Turn};
pub(crate) use subscription::ChannelMap;
use waiter::Waiter;
pub(crate) use waiter::{ClaimedWaiter, WaitQueues};

/// How long the first waiter of a queue waits before that is logged. Not shorter than the default
/// lease: the lock of a holder that died is free by then.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// Where a request waits, and for what.
pub(crate) struct Place<'a> {
    /// The channel on which the store publishes that the object may be free.
    pub(crate) channel: &'a str,
    /// Key of the object. Two objects may share a channel, but a waiter never waits behind a waiter
    /// for another object.
    pub(crate) object: &'a str,
    /// In which of the object's queues the request waits.
    pub(crate) queue: QueueKind,
    /// How much of the object it is for.
    pub(crate) share: Share,
    /// Whether it may take a hold that another request of the client hands over.
    pub(crate) takes_offers: bool,
    /// Whether the other waiters for the object do not fail with this request if it cannot reach
    /// the store, because it also uses other stores.
    pub(crate) fails_alone: bool,
}

impl<'a> Place<'a> {
    /// Returns the place of a request for a whole object that takes no offers.
    pub(crate) fn new(channel: &'a str, object: &'a str) -> Place<'a> {
        Place {
            channel,
            object,
            queue: QueueKind::Exclusive,
            share: Share::Whole,
            takes_offers: false,
            fails_alone: false,
        }
    }
}

/// A request for an object, including all its waiting. It may be dropped at any point.
pub(crate) trait Request: Send {
    /// Result of a success.
    type Acquired: Send;

    /// Returns where it waits. This does not change while it is in a queue.
    fn place(&self) -> Place<'_>;

    /// Waits until the object is acquired. If it does not wait, makes one attempt (`None`: the store
    /// refused it). May be called again after an error.
    fn acquire(
        &mut self,
        queues: &WaitQueues,
        waits: bool,
    ) -> impl Future<Output = Result<Option<Self::Acquired>>> + Send
    where
        Self: Sized,
    {
        queues.acquire(self, waits)
    }

    /// Makes one attempt. If `subscribe` is true, its first step to the store of the channel is
    /// sent behind a subscription, which the store reports: the attempt may also end before that
    /// step.
    fn send(
        &mut self,
        subscribe: bool,
    ) -> impl Future<Output = Result<Outcome<Self::Acquired>>> + Send;

    /// Returns the record of whether the steps of this request were sent, and with which outcome.
    fn progress(&self) -> &Progress;

    /// Returns how long the acquisition excludes the other waiters in the queue. `None`: it does
    /// not, or its end is not known, so the next waiter sends its request at once.
    fn excludes_waiters_for(&self) -> Option<Duration> {
        None
    }

    /// Called when a message arrived during the acquisition. The message mostly reports an earlier
    /// release. If the store has lost the new hold instead, this check wakes the waiters.
    fn check_acquired(&mut self) {}

    /// Returns what a release of this client needs to know to acquire the object for this request.
    /// `None`: it cannot, or this takes over holds.
    fn claim(&self) -> Option<Claim> {
        None
    }

    /// Takes what was offered. Returns the grant, and when its lease ends without a renewal; `None`
    /// for the latter if the acquisition does not exclude the other waiters. `None` if this request
    /// cannot use the offer, which is released then.
    fn take(&mut self, offer: Offer, now: Instant) -> Option<(Self::Acquired, Option<Instant>)> {
        drop((offer, now));
        None
    }

    /// Accepts a hold that the store has granted to the latest request, as this message reports.
    /// `None` if the message reports no such hold, or it has to be requested.
    fn accept(&mut self, message: i64) -> impl Future<Output = Option<Self::Acquired>> + Send {
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
    pub(crate) async fn acquire<R: Request>(
        &self,
        request: &mut R,
        waits: bool,
    ) -> Result<Option<R::Acquired>> {
        if waits && let Some(waiter) = self.join_existing(request) {
            return wait_in_queue(&waiter, request).await.map(Some);
        }
        // Either this client has no waiters, so that the object is probably free and one round trip
        // is enough, or the request does not wait.
        match request.send(false).await? {
            Outcome::Done(grant) => Ok(Some(grant)),
            Outcome::Wait(_) if !waits => Ok(None),
            Outcome::Wait(_) => {
                let waiter = self.join(request, true);
                wait_in_queue(&waiter, request).await.map(Some)
            }
        }
    }

    /// Like `acquire`, for a request that was refused before or that found a queue: waits for its
    /// turn first.
    pub(crate) async fn acquire_through_queue<R: Request>(
        &self,
        request: &mut R,
    ) -> Result<R::Acquired> {
        // A request for several objects may get here before it was sent. Then the store has not
        // answered it, although it joins an existing queue.
        let last = request.progress().last_contact();
        let answered = matches!(last, Some(LastContact::Answered));
        let existing = self.join_existing(request);
        let waiter = existing.unwrap_or_else(|| self.join(request, answered));
        wait_in_queue(&waiter, request).await
    }
}

/// Waits for the turn, and then as the first waiter of the queue.
async fn wait_in_queue<R: Request>(waiter: &Waiter, request: &mut R) -> Result<R::Acquired> {
    request
        .progress()
        .join_queue(waiter.contacts(), waiter.joined);
    let mut now = Some(waiter.joined);
    let turn = loop {
        match waiter.turn(now.take()).await {
            Turn::Register => waiter.register(|since| request.registrar()(since)),
            Turn::Sleep => continue,
            turn => break turn,
        };
    };
    request.progress().leave_queue();
    match turn {
        Turn::Fail { since, error } => {
            request.progress().record_failure(since, error.clone());
            return Err(error);
        }
        Turn::First { relies: true } => request.progress().record_answer(),
        _ => {}
    }
    // Boxed: of many waiters, one is the first.
    Box::pin(async {
        let (report, register) = (request.reporter(), request.registrar());
        let mut waiting = pin!(wait_as_first(waiter, request));
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
async fn wait_as_first<R: Request>(waiter: &Waiter, request: &mut R) -> Result<R::Acquired> {
    waiter.subscription.wait_while_ending().await;
    loop {
        let (next, now) = waiter.next().await;
        let (message, woken_at) = match next {
            Next::Take(offer) => {
                let Some((grant, until)) = offer.end(|offer| request.take(offer, now)) else {
                    continue;
                };
                waiter.queue(|queue| queue.took(until));
                return Ok(grant);
            }
            Next::Send { message, woken_at } => (message, woken_at),
            Next::Drop(_) | Next::Sleep(_) => continue,
        };
        if message != 0
            && let Some(grant) = request.accept(message).await
        {
            request.progress().record_answer();
            waiter.request_ended(Some(LastContact::Answered));
            // No message puts it in doubt: releases do not serve waiters that accept grants. They
            // have a channel each, so they exclude no other waiter.
            waiter.queue(|queue| queue.acquired(None));
            waiter.metrics().acquired_after_wake(woken_at);
            return Ok(grant);
        }
        let sent_at = Instant::now();
        let pause = request.pause();
        let subscribe = pause.is_none() && waiter.subscription.begin();
        let outcome = request_as_first(waiter, request, subscribe).await?;
        let left = match (outcome, pause) {
            (Outcome::Done(grant), _) => {
                waiter.metrics().acquired_after_wake(woken_at);
                let until = request.excludes_waiters_for().map(|held| sent_at + held);
                let (outdated, is_in_doubt) = waiter.queue(|queue| queue.acquired(until));
                drop(outdated);
                if is_in_doubt {
                    request.check_acquired();
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
async fn request_as_first<R: Request>(
    waiter: &Waiter,
    request: &mut R,
    subscribe: bool,
) -> Result<Outcome<R::Acquired>> {
    let fails_alone = request.place().fails_alone;
    if !fails_alone {
        waiter.queue(|queue| queue.request_started(Instant::now()));
    }
    // Boxed, so that a first waiter that sleeps is small.
    let answer = Box::pin(request.send(subscribe)).await;
    if !fails_alone {
        waiter.request_ended(request.progress().last_contact());
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
