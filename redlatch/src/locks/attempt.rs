//! The acquisition of a lock: looks up the owner's hold, waits in the client's queue, and runs the
//! step of the lock's kind.

use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;

use super::{AcquireOnce, AnyLock, Busy, HeldLock, Lock, LockKind, Options};
use crate::client_registry::RegisteredWait;
use crate::environment::random;
use crate::error::{Error, Result};
use crate::hold::{HoldLimits, PeriodId, Share};
use crate::join::Boxed;
use crate::lease::Expiry;
use crate::metrics::KindMetrics;
use crate::owner::Owner;
use crate::session::{HoldRef, LocalHandoff, RequestedHold, StoreHandoff, Terms};
use crate::step::Outcome;
use crate::store::Progress;
use crate::wait::{Claim, Offer, Place, Request, RequestLimits, WaitQueues};

impl<K: LockKind> AcquireOnce for Lock<K> {
    type Held = HeldLock<K>;

    fn metrics(&self) -> KindMetrics {
        let metrics = self.session.metrics();
        metrics.of(self.kind.spec().metric, Some(self.name()))
    }

    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    fn acquire_once(
        &self,
        options: &Options,
    ) -> impl Future<Output = Result<Option<HeldLock<K>>>> + Send {
        async move {
            let acquired = self.erased().acquire(self.reentrant, options).await?;
            let held =
                |(hold_ref, terms, token)| HeldLock::new(hold_ref, terms, self.kind.clone(), token);
            Ok(acquired.map(held))
        }
    }

    async fn busy(&self) -> Busy {
        self.erased().busy().await
    }

    fn waiting_at_most(self, wait: Duration) -> Lock<K> {
        match self.kind.waiting_at_most(wait) {
            Some(kind) => self.with_kind(kind),
            None => self,
        }
    }
}

/// What a request has acquired, with its terms and the fencing token.
type Acquired = (HoldRef, Terms, u64);

impl AnyLock {
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    fn acquire<'a>(
        self,
        reentrant: bool,
        options: &'a Options,
    ) -> impl Future<Output = Result<Option<Acquired>>> + Send + 'a {
        async move {
            let session = &self.session;
            session.background.remember_runtime()?;
            self.kind.object().check()?;
            self.kind.check()?;
            let spec = self.kind.spec();
            let mut terms = session.terms(options.lease()?, reentrant);
            let limits = options.request_limits(session.outage_limit);
            let hold_limits = options.hold_limits()?;
            let owner = match options.continues() {
                // Boxed: most requests have an owner of their own and should not carry these futures.
                Some(hold_ref) if hold_ref.hold.object == *self.kind.object() => {
                    options.set_note(&hold_ref.hold);
                    let hold_ref = HoldRef::clone(hold_ref);
                    let acquiring = self.acquire_hold(hold_ref, terms, limits, hold_limits, true);
                    return Box::pin(acquiring).await;
                }
                Some(sibling) => Some(sibling.hold.owner),
                None if spec.has_owner => options.owner()?,
                None => None,
            };
            if let Some(owner) = owner {
                return Box::pin(self.acquire_for(owner, terms, limits, options)).await;
            }
            terms.local_handoff = session.hands_off && terms.renewed && spec.local_handoff;
            let hold_ref = self.hold_ref_for(Owner::anonymous(), options)?;
            self.acquire_hold(hold_ref, terms, limits, hold_limits, false)
                .await
        }
    }

    /// Returns the owner's hold, with the note of the request.
    fn hold_ref_for(&self, owner: Owner, options: &Options) -> Result<HoldRef> {
        let hold_ref = self.hold_ref(owner)?;
        options.set_note(&hold_ref.hold);
        Ok(hold_ref)
    }

    /// Acquires the lock for an owner that the caller named, or that holds its sibling.
    async fn acquire_for(
        &self,
        owner: Owner,
        terms: Terms,
        limits: RequestLimits,
        options: &Options,
    ) -> Result<Option<Acquired>> {
        loop {
            let hold_ref = self.hold_ref_for(owner, options)?;
            let hold = hold_ref.hold.clone();
            hold.state().acquires_again = true;
            let hold_limits = options.hold_limits()?;
            let acquiring = self.acquire_hold(hold_ref, terms, limits, hold_limits, true);
            match acquiring.await {
                // The owner's previous hold was lost meanwhile: start again with a new one.
                Err(Error::Lost { .. }) if hold.loss().is_some() => {}
                done => return done,
            }
        }
    }

    /// Acquires the hold within the limits. `owner_is_named`: see [`LockRequest::owner_is_named`].
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice"
    )]
    fn acquire_hold(
        &self,
        hold_ref: HoldRef,
        terms: Terms,
        limits: RequestLimits,
        hold_limits: Option<&HoldLimits>,
        owner_is_named: bool,
    ) -> impl Future<Output = Result<Option<Acquired>>> + Send {
        async move {
            let progress = Progress::default();
            // Boxed, as is its future below, so that programs that do not log at this level do not pay for them.
            let span = {
                let (lock, owner) = (self.kind.object().full_name(), &hold_ref.hold.field);
                let span = tracing::debug_span!("acquire", lock, %owner);
                (!span.is_disabled()).then(|| Box::new(span))
            };
            let mut request = LockRequest {
                lock: self,
                requested: RequestedHold {
                    hold_limits,
                    waits: limits.waits(),
                    ..RequestedHold::without_waiting(&*self.kind, &hold_ref, terms)
                },
                progress: &progress,
                owner_is_named,
                store_may_know_waiter: false,
                in_flight: false,
                tries: 0,
                handed_off: None,
            };
            let waiting = &hold_ref.session.waiting;
            let token = match &span {
                None => waiting.within(&limits, &progress, &mut request).await?,
                Some(span) => {
                    let acquiring = waiting.within(&limits, &progress, &mut request);
                    Box::pin(acquiring.instrument((**span).clone())).await?
                }
            };
            let handed_off = request.handed_off.take();
            drop(request);
            // The guard keeps a hold that another request has handed off, under its owner. The own hold was
            // never acquired then.
            let handed_off = handed_off.and_then(|handed_off| handed_off.into_hold_ref());
            let hold_ref = handed_off.unwrap_or(hold_ref);
            let _span = span.as_ref().map(|span| span.enter());
            match token {
                // The snapshot is taken only if the event is enabled.
                Some(_) => tracing::debug!(holds = hold_ref.hold.snapshot().count, "acquired"),
                None => tracing::debug!("not acquired"),
            }
            Ok(token.map(|token| (hold_ref, terms, token)))
        }
    }
}

/// A request for a lock, from its first attempt until it is acquired, refused or dropped.
struct LockRequest<'a> {
    lock: &'a AnyLock,
    requested: RequestedHold<'a>,
    progress: &'a Progress,
    /// Whether the caller chose the owner. Then other callers may acquire for it at the same time.
    owner_is_named: bool,
    /// Whether the store may know this waiter.
    store_may_know_waiter: bool,
    /// Whether an attempt is in flight.
    in_flight: bool,
    /// Number of attempts so far.
    tries: u32,
    /// The hold that another request of this client has handed off.
    handed_off: Option<Box<LocalHandoff>>,
}

impl LockRequest<'_> {
    /// Acquires the lock by waiting in the client's queue, or by re-entering as soon as the owner holds it.
    async fn acquire_or_reenter(
        &mut self,
        queues: &WaitQueues,
        waits: bool,
    ) -> Result<Option<u64>> {
        let hold_ref = self.requested.hold_ref;
        // A read side of this owner that was released, but not settled, would block its own request.
        hold_ref.settle_sibling().await;
        // Re-entry is tried once in each hold period: only those that begin later than this count.
        let mut tried = None;
        loop {
            // A holder must not wait in the queue: see `HoldRef::hold_period`. Of a lost hold, the attempt
            // returns the loss.
            if hold_ref.hold_period() > tried || hold_ref.hold.loss().is_some() {
                tried = Some(PeriodId::latest());
                match self.send(false).await? {
                    Outcome::Done(token) => return Ok(Some(token)),
                    Outcome::Wait(_) if !waits && hold_ref.hold_period().is_some() => {
                        return Ok(None);
                    }
                    // The hold period has ended. Another owner may have acquired the lock.
                    Outcome::Wait(_) => continue,
                }
            }
            tokio::select! {
                biased;
                () = hold_ref.held_after(tried) => {}
                token = queues.acquire(self, waits) => return token,
            }
        }
    }

    /// Begins an attempt, which is in flight until the caller has its outcome.
    fn begin_attempt(
        &mut self,
        subscribe: bool,
    ) -> impl Future<Output = Result<Outcome>> + Send + '_ {
        self.requested.request_number = self.next_number();
        self.in_flight = true;
        let channel = subscribe.then(|| self.requested.channel());
        self.requested.try_acquire(channel, self.progress)
    }

    /// Makes another attempt after the store has refused one because the owner reads, if it does not do so now.
    async fn send_if_not_reading(
        &mut self,
        subscribe: bool,
        refused: Result<Outcome>,
    ) -> Result<Outcome> {
        if self.requested.hold_ref.owner_reads().await? {
            return refused;
        }
        let outcome = self.begin_attempt(subscribe).await;
        self.in_flight = false;
        outcome
    }

    /// Returns the number of the next attempt, if it accepts a grant; else 0. With a fixed lease it does not: the
    /// guard would have less than the lease.
    fn next_number(&self) -> i64 {
        let accepts = self.lock.kind.spec().grants
            && self.requested.hold_ref.session.accepts_grants
            && self.requested.waits
            && self.requested.terms.renewed;
        match accepts {
            // At least 1.
            true => (random().as_u64_pair().0 >> 1).cast_signed() | 1,
            false => 0,
        }
    }
}

impl Request for LockRequest<'_> {
    /// The fencing token.
    type Acquired = u64;

    fn place(&self) -> Place<'_> {
        let kind = &self.lock.kind;
        let object = self.requested.hold_ref.hold.object.identity();
        Place {
            queue: kind.spec().queue,
            share: kind.share(),
            takes_offers: self.requested.terms.local_handoff,
            ..Place::new(self.requested.channel(), object)
        }
    }

    async fn acquire(&mut self, queues: &WaitQueues, waits: bool) -> Result<Option<u64>> {
        if self.owner_is_named {
            // Boxed: most requests have an owner of their own and should not carry this future.
            return Box::pin(self.acquire_or_reenter(queues, waits)).await;
        }
        queues.acquire(self, waits).await
    }

    async fn send(&mut self, subscribe: bool) -> Result<Outcome> {
        let first = self.begin_attempt(subscribe).await;
        self.in_flight = false;
        // Not borrowed, and moved as a whole: otherwise the future of each request would have room for it.
        let mut outcome = if matches!(first, Err(Error::WriteWhileReading { .. })) {
            // Boxed: seldom needed.
            Box::pin(self.send_if_not_reading(subscribe, first)).await
        } else {
            first
        };
        // No holder notices, and no message reports, that other permits were set or deleted by hand.
        if let (Ok(Outcome::Wait(left)), Share::Permits(_)) = (&mut outcome, self.lock.kind.share())
        {
            let lease = self.requested.hold_ref.session.watchdog.lease();
            *left = Expiry::In(lease.duration()).min(*left);
        }
        match &outcome {
            Ok(Outcome::Done(_)) => self.store_may_know_waiter = false,
            Ok(Outcome::Wait(_)) => self.store_may_know_waiter = self.requested.waits,
            // The attempt's outcome is unknown. The step that settles it also removes the waiter's record.
            Err(_) => {}
        }
        outcome
    }

    fn progress(&self) -> &Progress {
        self.progress
    }

    fn excludes_waiters_for(&self) -> Option<Duration> {
        let excludes = self.requested.hold_ref.hold.excludes_waiters();
        excludes.then(|| self.requested.terms.lease.duration())
    }

    fn check_acquired(&mut self) {
        self.requested.hold_ref.check_hold_in_background();
    }

    fn claim(&self) -> Option<Claim> {
        let HoldRef { session, hold, .. } = self.requested.hold_ref;
        let can_hand_off = session.hands_off && self.lock.kind.spec().store_handoff;
        (can_hand_off && !session.store.awaits_replicas()).then(|| Claim {
            hold: hold.clone(),
            lease: self.requested.terms.lease,
        })
    }

    fn take(&mut self, offer: Offer, now: Instant) -> Option<(u64, Option<Instant>)> {
        let kind = &self.lock.kind;
        let offer = match offer.downcast::<StoreHandoff>() {
            Ok(handoff) => {
                // It may have been claimed for another request of the same owner.
                let can_hand_off = kind.spec().store_handoff;
                let taken = can_hand_off.then(|| handoff.take(&self.requested));
                let (token, end) = taken??;
                return Some((token, Some(end)));
            }
            Err(offer) => offer,
        };
        if !self.requested.terms.local_handoff {
            // It joined the queue after the offer.
            return None;
        }
        let offer = offer.downcast::<LocalHandoff>().ok()?;
        let handed_off = offer.accept(kind.share(), self.requested.hold_limits, now)?;
        let excludes = self.requested.hold_ref.hold.excludes_waiters();
        let request = self.requested.hold_ref.hold.state().request.clone();
        let end = {
            let mut state = handed_off.hold()?.state_at(|| now);
            state.request = request;
            excludes.then_some(state.period.end)
        };
        self.handed_off = Some(handed_off);
        Some((0, end))
    }

    async fn accept(&mut self, message: i64) -> Option<u64> {
        self.requested.accept_grant(message).await?;
        self.store_may_know_waiter = false;
        Some(0)
    }

    fn pause(&mut self) -> Option<Duration> {
        let pause = self.lock.kind.pause(self.tries);
        self.tries = self.tries.saturating_add(1);
        pause
    }

    fn registrar(&self) -> impl FnOnce(Instant) -> Option<RegisteredWait> + Send + 'static {
        self.requested.hold_ref.registrar()
    }

    fn reporter(&self) -> impl FnOnce(Instant) -> Boxed<'static, ()> + Send + 'static {
        let (lock, waiting) = (self.lock.clone(), self.requested.hold_ref.hold.clone());
        |since| lock.report(waiting, since)
    }
}

impl Drop for LockRequest<'_> {
    /// Removes the store's record of this waiter. If an attempt is in flight, the step that settles
    /// the attempt removes the record.
    fn drop(&mut self) {
        let is_settled_by_attempt = self.in_flight && self.progress.was_sent();
        if (self.store_may_know_waiter || self.owner_is_named) && !is_settled_by_attempt {
            self.requested.remove_waiter(self.store_may_know_waiter);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::IntoFuture as _;
    use std::time::Duration;

    use crate::{Client, Embedded, MultiLock, Owner};

    /// The request finds that its owner holds the lock, and bypasses the queue. The owner has lost
    /// the lock to another client, and drops its guard before the request is sent, or while it is
    /// in flight. The request waits until the lock is released, at most until its limit.
    #[tokio::test(start_paused = true)]
    async fn request_whose_owner_released_meanwhile_waits_until_its_limit() {
        let store = Embedded::new();
        let [client, peer] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
        let (mine, theirs) = (client.lock("a"), peer.lock("a"));
        let both = MultiLock::new([&mine]);
        let limit = Duration::from_secs(20);
        for case in 0..8 {
            let [in_flight, is_multi_lock, released_in_time] = [1, 2, 4].map(|bit| case & bit > 0);
            let me = Owner::new();
            let guard = mine.lock().owner(me).await.unwrap();
            theirs.force_unlock().await.unwrap();
            let held = theirs.lock().await.unwrap();
            let hold = guard.hold_ref().hold.clone();
            let step_turn = hold.try_turn().filter(|_| !in_flight);
            store.delay_answers(in_flight.then_some(limit / 10));
            let started = tokio::time::Instant::now();
            let waiting = match is_multi_lock {
                false => {
                    let waiting = mine.try_lock().wait(limit).owner(me).into_future();
                    tokio::spawn(async move { waiting.await.map(|grant| grant.map(drop)) })
                }
                true => {
                    let waiting = both.try_lock().wait(limit).owner(me).into_future();
                    tokio::spawn(async move { waiting.await.map(|grant| grant.map(drop)) })
                }
            };
            tokio::task::yield_now().await;
            drop(guard);
            drop(step_turn);
            if released_in_time {
                tokio::time::sleep(limit / 2).await;
                assert!(!waiting.is_finished());
                held.unlock().await.unwrap();
                assert!(waiting.await.unwrap().unwrap().is_some());
            } else {
                assert!(waiting.await.unwrap().unwrap().is_none());
                assert_eq!(started.elapsed(), limit);
                held.unlock().await.unwrap();
            }
            client.flush().await;
        }
    }

    /// Its first step wants a second hold, and the lock is free.
    #[tokio::test(start_paused = true)]
    async fn try_lock_whose_owner_released_a_lost_hold_meanwhile_acquires_the_lock() {
        let store = Embedded::new();
        let client = Client::builder().connect_embedded(&store).unwrap();
        let (lock, me) = (client.lock("a"), Owner::new());
        let guard = lock.lock().owner(me).await.unwrap();
        lock.force_unlock().await.unwrap();
        store.delay_answers(Some(Duration::from_secs(1)));
        let trying = tokio::spawn(lock.try_lock().owner(me).into_future());
        tokio::task::yield_now().await;
        drop(guard);
        assert!(trying.await.unwrap().unwrap().is_some());
    }
}
