//! The session of one client: its store, wait queues, watchdog and identity. All primitives acquire and
//! release holds through it.
//!
//! 1. [`Session::hold_ref`] returns a counted reference to the owner's hold on an object. A lost hold is
//!    replaced by a new one.
//! 2. [`HoldRef::try_acquire`] makes one attempt to acquire. The steps of one hold take turns
//!    ([`Hold::turn`]). If the store may still keep something that the owner released, a release is sent
//!    first and must be answered. The attempt carries the wanted hold count.
//! 3. If the store grants the attempt and the replicas confirm it, a guard is added and the watchdog watches
//!    the hold.
//! 4. If an attempt fails or is dropped without an answer, its outcome is unknown ([`SettleOnDrop`]). It is
//!    settled in the background.
//! 5. [`HoldRef::settle`] sends the hold count of this client to the store; 0 releases the hold. Unlocking,
//!    dropping a guard, dropping an attempt and failing all settle in this way.
//! 6. Settling in the background retries until the lease must have ended ([`SETTLE_GRACE`]).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::background::Background;
use crate::error::{Error, Loss, Result};
use crate::hold::{Hold, HoldKind, HoldPeriod, HoldSnapshot};
use crate::join::join_all;
use crate::lease::Lease;
use crate::name::ObjectKeys;
use crate::owner::{ClientId, Owner};
use crate::step::{Outcome, Step};
use crate::store::{AttemptPermit, Delivery, Progress, Route, Store};
use crate::wait::WaitQueues;
use crate::watchdog::Watchdog;

/// The state of one client that all its primitives share.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    pub(crate) prefix: String,
    pub(crate) store: Arc<Store>,
    pub(crate) waiting: WaitQueues,
    pub(crate) watchdog: Watchdog,
    pub(crate) background: Background,
    /// How long an outage may last before waiting fails, if it is set.
    pub(crate) outage_limit: Option<Duration>,
    holds: Mutex<HoldRegistry>,
    /// Notified when any hold was acquired.
    acquired: Notify,
}

/// All holds that are acquired, held or released, so that the same owner finds the same hold.
type HoldRegistry =
    HashMap<(Owner, Arc<ObjectKeys>), RegisteredHold, BuildHasherDefault<MixHasher>>;

/// Mixes two numbers that are already well distributed or unique: an owner's number and the cached hash of
/// an object's key. Each acquisition looks up its hold several times.
#[derive(Default)]
struct MixHasher(u64);

impl Hasher for MixHasher {
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29);
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// One owner's hold on one object, over all its generations. A hold that was lost, and the hold that
/// replaced it, act on the same field of the store.
///
/// Invariant: as long as a step of an earlier generation may still reach the store, the next generation
/// takes turns with it ([`Hold::step_lock`]). Otherwise a late full release of the earlier generation would
/// delete what the later one has acquired. Two rules keep it:
///
/// - The references to all generations are counted, and each step is sent through a reference. So the
///   registry entry, and with it the mutex that all generations share, outlives every step. Only renewals
///   are sent without a reference, but in turn; a late one only extends a lease.
/// - The entry is not removed while the store may keep another count than this client: the last reference
///   settles before it is dropped. Only settling that is abandoned removes the entry without an answer.
///
/// A step that was sent without an answer does not keep its turn. The next step for the same field is then
/// a release that must be answered before anything is acquired. It is sent on the same connection, behind
/// the unanswered step, or on the connection that replaced a broken one.
struct RegisteredHold {
    /// The latest generation.
    hold: Arc<Hold>,
    /// Number of references to all generations.
    refs: usize,
}

/// How a hold is acquired.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// How long the store keeps the hold without a renewal.
    pub(crate) lease: Lease,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// Whether the owner may already hold it.
    pub(crate) reentrant: bool,
    /// How long the store may keep traces of an attempt: the lease, or longer if the attempt waits.
    pub(crate) trace_lifetime: Lease,
}

impl Terms {
    /// Returns the terms for an attempt that waits, if the store remembers waiters for this long.
    pub(crate) fn waiting(self, remembered: Option<Lease>) -> Terms {
        Terms {
            trace_lifetime: remembered.map_or(self.lease, |lifetime| lifetime.max(self.lease)),
            ..self
        }
    }
}

impl Session {
    pub(crate) fn new(
        id: ClientId,
        prefix: String,
        store: Arc<Store>,
        waiting: WaitQueues,
        lease: Lease,
        background: Background,
        outage_limit: Option<Duration>,
    ) -> Session {
        Session {
            outage_limit,
            id,
            prefix,
            watchdog: Watchdog::new(lease, store.clone(), background.clone()),
            store,
            waiting,
            background,
            holds: Mutex::default(),
            acquired: Notify::new(),
        }
    }

    /// Returns the terms of an acquisition: with this lease, or renewed with the watchdog's.
    pub(crate) fn terms(&self, lease: Option<Lease>, reentrant: bool) -> Terms {
        let renewed = lease.is_none();
        let lease = lease.unwrap_or(self.watchdog.lease());
        Terms {
            lease,
            renewed,
            reentrant,
            trace_lifetime: lease,
        }
    }

    /// Returns a reference to the hold of `owner` on `object`, which is created if there is none.
    pub(crate) fn hold_ref<K: HoldKind + 'static>(
        self: &Arc<Self>,
        object: &Arc<ObjectKeys>,
        owner: Owner,
        field: impl Fn() -> String,
        kind: &Arc<K>,
    ) -> Result<HoldRef> {
        let mut holds = self.holds();
        let new_hold = |step_lock| {
            let (field, kind) = (field(), kind.clone());
            Arc::new(Hold::new(object.clone(), owner, field, kind, step_lock))
        };
        let entry = holds
            .entry((owner, object.clone()))
            .or_insert_with(|| RegisteredHold {
                hold: new_hold(Arc::default()),
                refs: 0,
            });
        if entry.hold.object.layout() != object.layout() {
            return Err(Error::WrongKind {
                name: object.name().to_owned(),
                reason: "the same owner uses it as another kind of lock",
            });
        }
        if entry.hold.loss().is_some() {
            // A lost hold stays lost, for its guards. A new request gets a new hold, which takes turns with
            // steps of the old one that may still be in flight.
            let successor = new_hold(entry.hold.step_lock.clone());
            successor.supersede(&entry.hold);
            entry.hold = successor;
        }
        entry.refs += 1;
        Ok(HoldRef::new(self.clone(), entry.hold.clone()))
    }

    /// Returns the latest generation of a hold.
    fn latest_generation(&self, hold: &Hold) -> Option<Arc<Hold>> {
        let holds = self.holds();
        let entry = holds.get(&(hold.owner, hold.object.clone()));
        entry.map(|entry| entry.hold.clone())
    }

    /// Returns the hold period of `owner` on `object`, if it holds the object as far as this client knows.
    fn hold_period(&self, owner: Owner, object: &Arc<ObjectKeys>) -> Option<HoldPeriod> {
        let holds = self.holds();
        let entry = holds.get(&(owner, object.clone()));
        entry.and_then(|entry| entry.hold.hold_period())
    }

    /// Waits until `owner` holds `object`, as far as this client knows, in a hold period that started after
    /// `since`.
    async fn wait_until_held(
        &self,
        owner: Owner,
        object: &Arc<ObjectKeys>,
        since: Option<HoldPeriod>,
    ) {
        loop {
            let mut acquired = std::pin::pin!(self.acquired.notified());
            acquired.as_mut().enable();
            if self.hold_period(owner, object) > since {
                return;
            }
            acquired.await;
        }
    }

    /// Settles what `owner` has released of `object` but not settled yet.
    async fn settle_released(self: &Arc<Self>, owner: Owner, object: &Arc<ObjectKeys>) {
        let hold_ref = {
            let mut holds = self.holds();
            let Some(entry) = holds.get_mut(&(owner, object.clone())) else {
                return;
            };
            if !entry.hold.snapshot().has_unacknowledged_changes {
                return;
            }
            entry.refs += 1;
            HoldRef::new(self.clone(), entry.hold.clone())
        };
        // If this fails, it is retried in the background, and the request that follows will fail too.
        let _ = hold_ref.settle().await;
    }

    /// Runs a step that must not be applied twice: [`Store::run_at_most_once`]. Once started it is completed:
    /// if this is dropped, it continues in the background.
    pub(crate) async fn run_at_most_once<S: Step<Reply: 'static> + 'static>(
        &self,
        step: S,
        what: &'static str,
    ) -> Result<S::Reply> {
        let store = self.store.clone();
        let progress = Progress::default();
        let work = async move {
            let run =
                store.run_at_most_once(&step, what, Delivery::IMMEDIATE, Duration::ZERO, &progress);
            Ok(run.await?.reply)
        };
        self.run_to_completion(work).await
    }

    /// Completes `work` once it is started: if this is dropped, it continues in the background.
    pub(crate) async fn run_to_completion<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.background.remember_runtime()?;
        self.background.detach_on_drop(work, || true).await
    }

    fn holds(&self) -> MutexGuard<'_, HoldRegistry> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of an attempt to acquire all or none of several objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AllOrNone<T> {
    /// All were acquired, with these results.
    Acquired(Vec<T>),
    /// None was acquired: another owner holds the one with this index, for this long at most.
    Blocked(usize, Duration),
}

/// One value for each object of an attempt: mostly one.
type Each<T> = SmallVec<[T; 1]>;

impl Session {
    /// Makes one attempt to acquire all or none of several objects (once more) in one step. `step` creates the
    /// step for the hold counts so far; `blocked` returns, for its reply, the index of the object that another
    /// owner holds. All callers must use the same order of objects, so that two attempts never wait for each
    /// other's turns.
    ///
    /// However this ends, even by being dropped, settling in the background makes the store match this
    /// client.
    pub(crate) async fn try_acquire<S: Step>(
        &self,
        hold_refs: &[(&HoldRef, Terms)],
        subscribe: Option<&str>,
        progress: &Progress,
        step: impl FnOnce(&[u32]) -> S,
        blocked: impl FnOnce(&S::Reply) -> Option<usize>,
    ) -> Result<S::Reply> {
        progress.leave_queue();
        progress.mark_unsent();
        let mut turns = Each::with_capacity(hold_refs.len());
        for (hold_ref, _) in hold_refs {
            turns.push(hold_ref.hold.turn().await?);
        }
        let acquiring = self.try_acquire_in_turn(hold_refs, subscribe, progress, step, blocked);
        let acquired = acquiring.await;
        for turn in &mut turns {
            turn.record_result(&acquired);
        }
        acquired
    }

    async fn try_acquire_in_turn<S: Step>(
        &self,
        hold_refs: &[(&HoldRef, Terms)],
        subscribe: Option<&str>,
        progress: &Progress,
        step: impl FnOnce(&[u32]) -> S,
        blocked: impl FnOnce(&S::Reply) -> Option<usize>,
    ) -> Result<S::Reply> {
        let mut held: Each<u32> = Each::with_capacity(hold_refs.len());
        for (hold_ref, terms) in hold_refs {
            held.push(hold_ref.prior_hold_count(*terms).await?);
        }
        let unsettled: Each<_> = hold_refs
            .iter()
            .map(|(hold_ref, terms)| SettleOnDrop::new(hold_ref, *terms, progress))
            .collect();
        let step = step(&held);
        // A re-entry blocks no other attempt, and must not delay its own renewal by queueing.
        let delivery = Delivery::acquisition(held.iter().any(|&held| held > 0));
        let store = &self.store;
        let answer = match subscribe {
            Some(channel) => {
                store
                    .subscribe_and_run(channel, &step, delivery, progress)
                    .await
            }
            None => store.run(&step, delivery, progress).await,
        };
        let mark_settled = || unsettled.iter().for_each(SettleOnDrop::mark_settled);
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                if error.leaves_untouched() || !progress.was_sent() {
                    mark_settled();
                }
                return Err(error);
            }
        };
        if let Some(i) = blocked(&answer.reply) {
            mark_settled();
            return match (hold_refs.get(i), held.get(i)) {
                (Some((hold_ref, _)), Some(1..)) => Err(hold_ref.mark_not_held()),
                _ => Ok(answer.reply),
            };
        }
        let end = |terms: &Terms| answer.sent_at + terms.lease.duration();
        for ((hold_ref, terms), &held) in hold_refs.iter().zip(&held) {
            hold_ref.extend_prior_hold(held, end(terms));
        }
        if let Err(error) = answer.confirmation.confirmed(progress).await {
            // At once if possible, in the turns of this attempt: the caller may try elsewhere after this
            // error. If it fails, dropping `unsettled` settles.
            Box::pin(join_all(unsettled.iter().map(SettleOnDrop::settle_in_turn))).await;
            return Err(error);
        }
        for (i, (hold_ref, terms)) in hold_refs.iter().enumerate() {
            if let Err(error) = hold_ref.hold.add_guard(end(terms), terms.renewed) {
                // Too late for this one, so for all. Dropping `unsettled` releases them.
                for (hold_ref, terms) in hold_refs.iter().take(i) {
                    hold_ref.remove_guard(*terms);
                }
                return Err(error);
            }
        }
        mark_settled();
        for (hold_ref, _) in hold_refs {
            self.watchdog.watch(&hold_ref.hold);
        }
        self.acquired.notify_waiters();
        Ok(answer.reply)
    }
}

/// A counted reference to a hold, acquired or not.
pub(crate) struct HoldRef {
    pub(crate) session: Arc<Session>,
    pub(crate) hold: Arc<Hold>,
    /// Number of the change with which this reference's guard was removed; 0 before.
    removed_at: AtomicU64,
}

impl Clone for HoldRef {
    fn clone(&self) -> HoldRef {
        if let Some(entry) = self.session.holds().get_mut(&self.key()) {
            entry.refs += 1;
        }
        HoldRef {
            session: self.session.clone(),
            hold: self.hold.clone(),
            removed_at: AtomicU64::new(self.removed_at.load(Ordering::Relaxed)),
        }
    }
}

impl Drop for HoldRef {
    fn drop(&mut self) {
        let key = self.key();
        let unsettled = {
            let mut holds = self.session.holds();
            let Some(entry) = holds.get_mut(&key) else {
                return;
            };
            if entry.refs == 1 && !entry.hold.needs_settling() {
                holds.remove(&key);
                return;
            }
            if entry.refs > 1 {
                entry.refs -= 1;
                return;
            }
            // This reference stays counted: it passes to one that settles in the background.
            entry.hold.clone()
        };
        let lease = unsettled.longest_lease();
        HoldRef::new(self.session.clone(), unsettled).settle_detached(lease, None);
    }
}

impl HoldRef {
    /// Creates a reference that is already counted.
    fn new(session: Arc<Session>, hold: Arc<Hold>) -> HoldRef {
        HoldRef {
            session,
            hold,
            removed_at: AtomicU64::new(0),
        }
    }

    fn key(&self) -> (Owner, Arc<ObjectKeys>) {
        (self.hold.owner, self.hold.object.clone())
    }

    /// Returns the owner's latest hold period of this object or of its [sibling](HoldKind::sibling).
    ///
    /// Invariant of all waiting: an owner with a hold period never waits in a wait queue, because the waiters
    /// there may wait for that very hold period to end. It sends its request out of turn, once per hold
    /// period. If the store refuses nevertheless (the hold period has ended meanwhile, or its loss was not
    /// noticed yet), the owner waits in the wait queue until a later hold period starts.
    pub(crate) fn hold_period(&self) -> Option<HoldPeriod> {
        let sibling = self.hold.kind.sibling();
        let sibling =
            sibling.and_then(|sibling| self.session.hold_period(self.hold.owner, sibling));
        self.hold.hold_period().max(sibling)
    }

    /// Waits until the owner has a [hold period](HoldRef::hold_period) that started after `since`.
    pub(crate) async fn held_after(&self, since: Option<HoldPeriod>) {
        let own = self.hold.held_after(since);
        match self.hold.kind.sibling() {
            None => own.await,
            Some(sibling) => tokio::select! {
                biased;
                () = own => {}
                () = self.session.wait_until_held(self.hold.owner, sibling, since) => {}
            },
        }
    }

    /// Settles what the owner has released of the sibling object, which could block this one.
    pub(crate) async fn settle_sibling(&self) {
        if let Some(sibling) = self.hold.kind.sibling() {
            // Boxed: few kinds have a sibling object.
            Box::pin(self.session.settle_released(self.hold.owner, sibling)).await;
        }
    }

    /// Makes one attempt to acquire the object (once more): [`Session::try_acquire`]. `step` creates the
    /// primitive's step for a hold count.
    pub(crate) async fn try_acquire<'a, T: Send, S: Step<Reply = Outcome<T>>>(
        &'a self,
        terms: Terms,
        subscribe: Option<&str>,
        progress: &Progress,
        step: impl FnOnce(&'a Hold, u32) -> S,
    ) -> Result<Outcome<T>> {
        let step = |held: &[u32]| step(&self.hold, held.iter().sum::<u32>() + 1);
        let blocked = |reply: &Outcome<T>| matches!(reply, Outcome::Wait(_)).then_some(0);
        let hold_refs = [(self, terms)];
        self.session
            .try_acquire(&hold_refs, subscribe, progress, step, blocked)
            .await
    }

    /// Returns how often the owner holds the object already, if it may acquire it now.
    ///
    /// First settles, in this turn, what the owner has released before: the next acquisition is a new one, with
    /// a lease and a fencing token of its own.
    async fn prior_hold_count(&self, terms: Terms) -> Result<u32> {
        let held = loop {
            let snapshot = self.hold.snapshot();
            if let Some(loss) = snapshot.loss {
                return Err(self.hold.lost_error(loss));
            }
            // Check again after each settling: a guard may have been removed meanwhile. Then the store has a higher
            // count than this client, and the next acquisition would look like a repetition, with the
            // fencing token of another one.
            if !snapshot.has_unacknowledged_changes {
                break snapshot.count;
            }
            // Boxed: seldom needed.
            Box::pin(self.settle_in_turn(snapshot.changes)).await?;
        };
        if held > 0 && !terms.reentrant {
            return Err(Error::AlreadyHeld {
                name: self.hold.object.name().to_owned(),
            });
        }
        Ok(held)
    }

    /// Extends the local deadline of a re-entered hold as soon as the master has granted it, because waiting
    /// for replicas delays its renewal.
    fn extend_prior_hold(&self, held: u32, end: Instant) {
        if held > 0 {
            self.hold.extend(end);
        }
    }

    /// Handles a reply that the owner does not hold the object: marks the hold as lost. Returns the error.
    fn mark_not_held(&self) -> Error {
        self.hold.mark_lost(Loss::NotHeld);
        self.session.watchdog.watch(&self.hold);
        self.session.watchdog.report_missing(&self.hold);
        self.hold.lost_error(Loss::NotHeld)
    }

    /// Removes one guard. [`HoldRef::settle`] then updates the store.
    pub(crate) fn remove_guard(&self, terms: Terms) {
        let change = self.hold.remove_guard(terms.renewed);
        self.removed_at.store(change, Ordering::Relaxed);
    }

    /// Makes the store match this client: sends the current hold count, which may be 0. Returns whether the
    /// owner still held it.
    ///
    /// Sending it twice has the effect of one. It is repeated when the connection breaks. "Not held" in
    /// reply to the repetition means that the first one took effect.
    pub(crate) async fn settle(&self) -> Result<bool> {
        let up_to_change = match self.removed_at.load(Ordering::Relaxed) {
            0 => self.hold.changes(),
            removed_at => removed_at,
        };
        let mut turn = self.hold.turn().await?;
        let settled = self.settle_in_turn(up_to_change).await;
        turn.record_result(&settled);
        settled
    }

    /// Settles for a caller that has the turn. `up_to_change`: number of changes when the caller started.
    async fn settle_in_turn(&self, up_to_change: u64) -> Result<bool> {
        let snapshot = self.hold.snapshot();
        let Some(loss) = snapshot.loss.filter(|_| snapshot.is_superseded) else {
            return self.settle_hold(&self.hold, snapshot, up_to_change).await;
        };
        // The store's state of this owner now belongs to the latest generation. Its request may have been
        // canceled before it released what this generation left there.
        if let Some(latest) = self.session.latest_generation(&self.hold)
            && let snapshot = latest.snapshot()
            && snapshot.has_unacknowledged_changes
        {
            let up_to_change = snapshot.changes;
            self.settle_hold(&latest, snapshot, up_to_change).await?;
        }
        Err(self.hold.lost_error(loss))
    }

    /// Settles the latest generation of the hold.
    async fn settle_hold(
        &self,
        hold: &Arc<Hold>,
        now: HoldSnapshot,
        up_to_change: u64,
    ) -> Result<bool> {
        let session = &self.session;
        let keep = match now.loss {
            None => now.count,
            // An answer that came too late may have left something in the store.
            Some(_) => 0,
        };
        if keep == 0 {
            session.watchdog.unwatch(hold);
            if now.released_at >= up_to_change {
                // A release through another reference has sent the same count.
                return Ok(true);
            }
        }
        let lease = now.is_renewed.then(|| session.watchdog.lease());
        let step = hold.kind.release(hold, keep, lease);
        let store = &session.store;
        let delivery = Delivery::on(match now.has_attempt_in_flight {
            true => Route::Acquisitions,
            false => Route::Commands,
        });
        let release = PendingRelease::new(hold, keep);
        if keep == 0 {
            session.waiting.record_release(hold.object.channel());
        }
        let answer = release.record_answer(store.run(&step, delivery, &release.progress).await)?;
        tracing::debug!(lock = hold.object.name(), owner = %hold.field, keep,
            held = answer.reply, "released");
        if keep == 0 && !hold.owner_key.is_empty() {
            // The owner's waiting state in the store is removed too: another attempt of the same owner has
            // to start again.
            session.waiting.wake(&hold.owner_key);
        }
        let is_repeated = answer.repeated || now.maybe_released;
        let held = answer.reply || keep == 0 && is_repeated;
        hold.release_acknowledged(now.changes, keep == 0 && held && now.loss.is_none());
        if let Some(loss) = now.loss {
            return Err(hold.lost_error(loss));
        }
        if keep > 0 {
            if !held {
                hold.mark_lost(Loss::NotHeld);
                session.watchdog.report_missing(hold);
            } else if let Some(lease) = lease {
                hold.extend(answer.sent_at + lease.duration());
            }
            session.watchdog.watch(hold);
        }
        Ok(held)
    }

    /// Settles in the background. Retries until the lease in the store must have ended.
    pub(crate) fn settle_in_background(&self, lease: Lease) {
        self.clone().settle_detached(lease.duration(), None);
    }

    /// Settles an attempt that may still be in flight. The attempt keeps its permit until the first try to
    /// settle it. So the attempts that wait for settling are limited like those in flight, however many
    /// callers start and cancel attempts.
    fn settle_detached(self, lease: Duration, attempt: Option<AttemptPermit>) {
        let background = self.session.background.clone();
        let unstarted = WarnIfDropped(Some(self));
        background.spawn(async move {
            let mut unstarted = unstarted;
            if let Some(hold_ref) = unstarted.0.take() {
                hold_ref.settle_with_retries(lease, attempt).await;
                hold_ref.hold.settling_ended();
            }
        });
    }

    async fn settle_with_retries(&self, lease: Duration, mut attempt: Option<AttemptPermit>) {
        // A step in flight may take effect this late; its lease starts then.
        let deadline = Instant::now() + lease + SETTLE_GRACE;
        let name = self.hold.object.name();
        loop {
            let key = self.hold.object.key();
            let permit = self.session.store.settling_permit(key).await;
            let settled = self.settle().await;
            drop((permit, attempt.take()));
            match settled {
                Ok(_) | Err(Error::Lost { .. } | Error::WrongKind { .. }) => return,
                // After any error, even a refusal: its cause may end before the lease does.
                Err(error) if Instant::now() < deadline => {
                    tracing::debug!(lock = name, owner = %self.hold.field, %error,
                        "release failed; retrying");
                    tokio::time::sleep(SETTLE_GRACE / 20).await;
                }
                Err(error) => {
                    tracing::warn!(lock = name, owner = %self.hold.field, %error,
                        "release failed; the lock is free when its lease ends");
                    return;
                }
            }
        }
    }
}

/// How long after the end of a lease a release is retried.
const SETTLE_GRACE: Duration = Duration::from_secs(10);

/// An attempt with unknown outcome. If it was sent, dropping this settles it in the background: the
/// connection keeps order, so the release arrives after the attempt.
struct SettleOnDrop<'a> {
    hold_ref: &'a HoldRef,
    terms: Terms,
    progress: &'a Progress,
    /// Number of the attempt, among the changes of the hold.
    change: u64,
    settled: AtomicBool,
}

impl<'a> SettleOnDrop<'a> {
    fn new(hold_ref: &'a HoldRef, terms: Terms, progress: &'a Progress) -> SettleOnDrop<'a> {
        SettleOnDrop {
            hold_ref,
            terms,
            progress,
            change: hold_ref.hold.begin_attempt(),
            settled: AtomicBool::new(false),
        }
    }
}

impl SettleOnDrop<'_> {
    /// Records that the attempt has been answered.
    fn mark_settled(&self) {
        self.settled.store(true, Ordering::Relaxed);
        self.hold_ref.hold.attempt_acknowledged(self.change);
    }

    /// Settles the attempt in its own turn. If this fails, dropping `self` settles it.
    async fn settle_in_turn(&self) {
        if self.hold_ref.settle_in_turn(self.change).await.is_ok() {
            self.mark_settled();
        }
    }
}

impl Drop for SettleOnDrop<'_> {
    fn drop(&mut self) {
        let attempt = self.progress.take_permit();
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        match self.progress.was_sent() {
            true => {
                let hold_ref = self.hold_ref.clone();
                hold_ref.settle_detached(self.terms.trace_lifetime.duration(), attempt);
            }
            // It never reached the store.
            false => self.hold_ref.hold.attempt_acknowledged(self.change),
        }
    }
}

/// A release that can be canceled or fail between being sent and being answered. Its hold remembers that:
/// the next release, which may be another caller's, counts as a repetition. If that finds nothing, the
/// first one took effect, and nothing was lost.
struct PendingRelease<'a> {
    hold: &'a Hold,
    keep: u32,
    progress: Progress,
}

impl<'a> PendingRelease<'a> {
    fn new(hold: &'a Hold, keep: u32) -> PendingRelease<'a> {
        let progress = Progress::default();
        PendingRelease {
            hold,
            keep,
            progress,
        }
    }

    fn record_answer<T>(&self, answer: Result<T>) -> Result<T> {
        if answer.as_ref().err().is_none_or(Error::leaves_untouched) {
            self.progress.mark_unsent();
        }
        answer
    }
}

impl Drop for PendingRelease<'_> {
    fn drop(&mut self) {
        if self.keep == 0 && self.progress.was_sent() {
            self.hold.release_unanswered();
        }
    }
}

/// Logs a warning if background work is dropped before it starts, because its runtime has ended.
struct WarnIfDropped(Option<HoldRef>);

impl Drop for WarnIfDropped {
    fn drop(&mut self) {
        if let Some(hold_ref) = &self.0 {
            tracing::warn!(lock = hold_ref.hold.object.name(), owner = %hold_ref.hold.field,
                "no runtime to release the lock in; it is free when its lease ends");
            hold_ref.hold.settling_ended();
        }
    }
}

#[cfg(test)]
mod tests;
