//! The session of one client: its store, wait queues, watchdog and identity. All primitives acquire and
//! release holds through it.
//!
//! 1. [`Session::claim`] returns the owner's hold on a place, and counts the claims on it. A lost hold is
//!    replaced by a new one.
//! 2. [`Claim::enter`] makes one attempt to acquire. Steps of one hold take turns ([`Hold::turn`]). If the
//!    store may still keep something that the owner released, a release is sent first and must be answered.
//!    The attempt carries the hold count that it wants.
//! 3. If the store grants the attempt and the replicas confirm it, a guard is added and the watchdog watches
//!    the hold.
//! 4. If an attempt fails or is dropped without an answer, its outcome is unknown ([`Unsettled`]). It is
//!    settled in the background.
//! 5. [`Claim::settle`] sends the hold count of this client to the store; 0 releases the hold. Unlocking,
//!    dropping a guard, dropping an attempt and failing all settle in this way.
//! 6. Settling in the background retries until the lease must have ended ([`SETTLING`]).

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
use crate::hold::{Hold, Kind, Standing, Tenure};
use crate::lease::Lease;
use crate::name::Place;
use crate::owner::{ClientId, Owner};
use crate::several::all;
use crate::step::{Outcome, Step};
use crate::store::{Delivery, Route, Sent, Store, Turn};
use crate::wait::WaitingRoom;
use crate::watchdog::Watchdog;

/// What all primitives share.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    pub(crate) prefix: String,
    pub(crate) store: Arc<Store>,
    pub(crate) waiting: WaitingRoom,
    pub(crate) watchdog: Watchdog,
    pub(crate) background: Background,
    /// How long an outage may last before waiting fails, if it is set.
    pub(crate) outage_limit: Option<Duration>,
    claims: Mutex<Claims>,
    /// Notified when any hold was entered.
    entered: Notify,
}

/// All holds that are acquired, held or released, so that the same owner finds the same hold.
type Claims = HashMap<(Owner, Arc<Place>), Claimed, BuildHasherDefault<Mix>>;

/// Mixes two numbers that are already well distributed or unique: an owner's number and the cached hash of
/// a place. Each acquisition looks up claims several times.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
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

/// One owner's hold on one place, over all its generations. A hold that was lost, and the hold that
/// replaced it, act on the same field of the store.
///
/// Invariant: as long as a step of an earlier generation may still reach the store, the next generation
/// takes turns with it ([`Hold::steps`]). Otherwise a late full release of the earlier generation would
/// delete what the later one has acquired. Two rules keep it:
///
/// - The claims of all generations are counted, and each step is sent by a claim. So the entry, and with it
///   the mutex that all generations share, outlives every step. Only renewals are sent without a claim, but
///   in turn; a late one only extends a lease.
/// - The entry is not removed while the store may keep another count than this client: the last claim
///   settles before it is dropped. Only settling that is abandoned removes the entry without an answer.
///
/// A step that was sent without an answer does not keep its turn. The next step for the same field is then
/// a release that must be answered before anything is acquired. It is sent on the same connection, behind
/// the unanswered step, or on the connection that replaced a broken one.
struct Claimed {
    /// The latest generation.
    hold: Arc<Hold>,
    /// Number of claims of all generations.
    users: usize,
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
    pub(crate) remembered: Lease,
}

impl Terms {
    /// The terms for an attempt that waits, if the store remembers waiters for this long.
    pub(crate) fn waiting(self, remembered: Option<Lease>) -> Terms {
        Terms {
            remembered: remembered.map_or(self.lease, |lasts| lasts.max(self.lease)),
            ..self
        }
    }
}

impl Session {
    pub(crate) fn new(
        id: ClientId,
        prefix: String,
        store: Arc<Store>,
        waiting: WaitingRoom,
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
            claims: Mutex::default(),
            entered: Notify::new(),
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
            remembered: lease,
        }
    }

    /// Returns a claim on the hold of `owner` on `place`, which is created if there is none.
    pub(crate) fn claim<K: Kind + 'static>(
        self: &Arc<Self>,
        place: &Arc<Place>,
        owner: Owner,
        field: impl Fn() -> String,
        kind: &Arc<K>,
    ) -> Result<Claim> {
        let mut claims = self.claims();
        let fresh = |steps| {
            let (field, kind) = (field(), kind.clone());
            Arc::new(Hold::new(place.clone(), owner, field, kind, steps))
        };
        let claimed = claims
            .entry((owner, place.clone()))
            .or_insert_with(|| Claimed {
                hold: fresh(Arc::default()),
                users: 0,
            });
        if claimed.hold.place.family() != place.family() {
            return Err(Error::WrongKind {
                name: place.name().to_owned(),
                reason: "the same owner uses it as another kind of lock",
            });
        }
        if claimed.hold.loss().is_some() {
            // A lost hold stays lost, for its guards. A new request gets a new hold, which takes turns with
            // steps of the old one that may still be in flight.
            let later = fresh(claimed.hold.steps.clone());
            later.supersede(&claimed.hold);
            claimed.hold = later;
        }
        claimed.users += 1;
        Ok(Claim::new(self.clone(), claimed.hold.clone()))
    }

    /// Returns the latest generation of a hold.
    fn latest(&self, hold: &Hold) -> Option<Arc<Hold>> {
        let claims = self.claims();
        let claimed = claims.get(&(hold.owner, hold.place.clone()));
        claimed.map(|claimed| claimed.hold.clone())
    }

    /// Returns the tenure of `owner` at `place`, if it holds that as far as is known here.
    fn tenure(&self, owner: Owner, place: &Arc<Place>) -> Option<Tenure> {
        let claims = self.claims();
        let claimed = claims.get(&(owner, place.clone()));
        claimed.and_then(|claimed| claimed.hold.tenure())
    }

    /// Waits until `owner` holds `place`, as far as is known here, in a tenure that started after `since`.
    async fn has_entered(&self, owner: Owner, place: &Arc<Place>, since: Option<Tenure>) {
        loop {
            let mut news = std::pin::pin!(self.entered.notified());
            news.as_mut().enable();
            if self.tenure(owner, place) > since {
                return;
            }
            news.await;
        }
    }

    /// Releases in the store what `owner` has left of `place` but not settled yet.
    async fn settle_left(self: &Arc<Self>, owner: Owner, place: &Arc<Place>) {
        let claim = {
            let mut claims = self.claims();
            let Some(claimed) = claims.get_mut(&(owner, place.clone())) else {
                return;
            };
            if !claimed.hold.standing().is_ahead_of_store {
                return;
            }
            claimed.users += 1;
            Claim::new(self.clone(), claimed.hold.clone())
        };
        // If this fails, it is retried in the background, and the request that follows will fail too.
        let _ = claim.settle().await;
    }

    /// Runs a step that must not be applied twice: [`Store::run_unrepeated`]. Once started it is completed:
    /// if this is dropped, it continues in the background.
    pub(crate) async fn change<S: Step<Reply: 'static> + 'static>(
        &self,
        step: S,
        what: &'static str,
    ) -> Result<S::Reply> {
        let store = self.store.clone();
        let sent = Sent::default();
        let work = async move {
            let run = store.run_unrepeated(&step, what, Delivery::IMMEDIATE, Duration::ZERO, &sent);
            Ok(run.await?.reply)
        };
        self.finish(work).await
    }

    /// Completes `work` once it is started: if this is dropped, it continues in the background.
    pub(crate) async fn finish<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.background.bind()?;
        self.background.finish(work, || true).await
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of an attempt to acquire all or none of several objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Together<T> {
    /// All were acquired, with these results.
    Had(Vec<T>),
    /// None was acquired: another owner holds the one with this index, for this long at most.
    InTheWay(usize, Duration),
}

/// One for each object of an attempt: mostly one.
type Each<T> = SmallVec<[T; 1]>;

impl Session {
    /// Makes one attempt to acquire all or none of several objects (once more) in one step. `step` creates
    /// it for the hold counts so far; `blocked` returns from its reply which object another owner holds. All
    /// callers must use one order of objects, so that two attempts never wait for each other's turns.
    ///
    /// However this ends, even by being dropped, settling in the background makes the store match this
    /// client.
    pub(crate) async fn enter<S: Step>(
        &self,
        claims: &[(&Claim, Terms)],
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&[u32]) -> S,
        blocked: impl FnOnce(&S::Reply) -> Option<usize>,
    ) -> Result<S::Reply> {
        sent.asks_by_itself();
        sent.clear();
        let mut turns = Each::with_capacity(claims.len());
        for (claim, _) in claims {
            turns.push(claim.hold.turn().await?);
        }
        let entering = self.enter_in_turn(claims, subscribe, sent, step, blocked);
        let entered = entering.await;
        for turn in &mut turns {
            turn.ended(&entered);
        }
        entered
    }

    async fn enter_in_turn<S: Step>(
        &self,
        claims: &[(&Claim, Terms)],
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&[u32]) -> S,
        blocked: impl FnOnce(&S::Reply) -> Option<usize>,
    ) -> Result<S::Reply> {
        let mut held: Each<u32> = Each::with_capacity(claims.len());
        for (claim, terms) in claims {
            held.push(claim.held_before(*terms).await?);
        }
        let all_claims = claims.iter();
        let unsettled: Each<_> = all_claims
            .map(|(claim, terms)| Unsettled::new(claim, *terms, sent))
            .collect();
        let step = step(&held);
        // A re-entry blocks no other attempt, and must not delay its own renewal by queueing.
        let delivery = Delivery::acquisition(held.iter().any(|&held| held > 0));
        let store = &self.store;
        let answer = match subscribe {
            Some(channel) => {
                store
                    .subscribe_and_run(channel, &step, delivery, sent)
                    .await
            }
            None => store.run(&step, delivery, sent).await,
        };
        let settled = || unsettled.iter().for_each(Unsettled::is_settled);
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                if error.leaves_untouched() || !sent.get() {
                    settled();
                }
                return Err(error);
            }
        };
        if let Some(i) = blocked(&answer.reply) {
            settled();
            return match (claims.get(i), held.get(i)) {
                (Some((claim, _)), Some(1..)) => Err(claim.not_held()),
                _ => Ok(answer.reply),
            };
        }
        let end = |terms: &Terms| answer.sent + terms.lease.duration();
        for ((claim, terms), &held) in claims.iter().zip(&held) {
            claim.was_taken(held, end(terms));
        }
        if let Err(error) = answer.confirmation.confirmed(sent).await {
            // At once if possible, in the turns of this attempt: the caller may try elsewhere after this
            // error. If it fails, dropping `unsettled` settles.
            Box::pin(all(unsettled.iter().map(Unsettled::settle_in_turn))).await;
            return Err(error);
        }
        for (i, (claim, terms)) in claims.iter().enumerate() {
            if let Err(error) = claim.hold.enter(end(terms), terms.renewed) {
                // Too late for this one, so for all. Dropping `unsettled` releases them.
                for (claim, terms) in claims.iter().take(i) {
                    claim.leave(*terms);
                }
                return Err(error);
            }
        }
        settled();
        for (claim, _) in claims {
            self.watchdog.watch(&claim.hold);
        }
        self.entered.notify_waiters();
        Ok(answer.reply)
    }
}

/// A claim on a hold, acquired or not. Claims are counted.
pub(crate) struct Claim {
    pub(crate) session: Arc<Session>,
    pub(crate) hold: Arc<Hold>,
    /// Number of the change with which this claim left the hold; 0 before.
    left: AtomicU64,
}

impl Clone for Claim {
    fn clone(&self) -> Claim {
        if let Some(claimed) = self.session.claims().get_mut(&self.key()) {
            claimed.users += 1;
        }
        Claim {
            session: self.session.clone(),
            hold: self.hold.clone(),
            left: AtomicU64::new(self.left.load(Ordering::Relaxed)),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let key = self.key();
        let unsettled = {
            let mut claims = self.session.claims();
            let Some(claimed) = claims.get_mut(&key) else {
                return;
            };
            if claimed.users == 1 && !claimed.hold.is_to_be_settled() {
                claims.remove(&key);
                return;
            }
            if claimed.users > 1 {
                claimed.users -= 1;
                return;
            }
            // This claim's count is passed on to a claim that settles in the background.
            claimed.hold.clone()
        };
        let lease = unsettled.longest_lease();
        Claim::new(self.session.clone(), unsettled).into_background(lease, None);
    }
}

impl Claim {
    /// Creates a claim that is already counted.
    fn new(session: Arc<Session>, hold: Arc<Hold>) -> Claim {
        Claim {
            session,
            hold,
            left: AtomicU64::new(0),
        }
    }

    fn key(&self) -> (Owner, Arc<Place>) {
        (self.hold.owner, self.hold.place.clone())
    }

    /// Returns the owner's latest tenure of this object or of the object [beside](Kind::beside) it.
    ///
    /// Invariant of all waiting: an owner with a tenure never waits in line, because the waiters there may
    /// wait for that very tenure to end. It sends its request out of turn, once per tenure. If the store
    /// refuses nevertheless (the tenure has ended meanwhile, or its loss was not noticed yet), the owner
    /// waits in line until a later tenure starts.
    pub(crate) fn tenure(&self) -> Option<Tenure> {
        let beside = self.hold.kind.beside();
        let beside = beside.and_then(|beside| self.session.tenure(self.hold.owner, beside));
        self.hold.tenure().max(beside)
    }

    /// Waits until the owner has such a tenure that started after `since`.
    pub(crate) async fn entered_after(&self, since: Option<Tenure>) {
        let own = self.hold.entered_after(since);
        match self.hold.kind.beside() {
            None => own.await,
            Some(beside) => tokio::select! {
                biased;
                () = own => {}
                () = self.session.has_entered(self.hold.owner, beside, since) => {}
            },
        }
    }

    /// Settles what the owner has released of the object beside this one, which could block it.
    pub(crate) async fn settle_beside(&self) {
        if let Some(beside) = self.hold.kind.beside() {
            // Boxed: few kinds have an object beside theirs.
            Box::pin(self.session.settle_left(self.hold.owner, beside)).await;
        }
    }

    /// Makes one attempt to acquire the object (once more): [`Session::enter`]. `step` creates the
    /// primitive's step for a hold count.
    pub(crate) async fn enter<'a, T: Send, S: Step<Reply = Outcome<T>>>(
        &'a self,
        terms: Terms,
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&'a Hold, u32) -> S,
    ) -> Result<Outcome<T>> {
        let step = |held: &[u32]| step(&self.hold, held.iter().sum::<u32>() + 1);
        let blocked = |reply: &Outcome<T>| matches!(reply, Outcome::Wait(_)).then_some(0);
        let claims = [(self, terms)];
        self.session
            .enter(&claims, subscribe, sent, step, blocked)
            .await
    }

    /// Returns how often the owner holds the object already, if it may acquire it now.
    ///
    /// First releases, in this turn, what the owner left before: the next acquisition is a new one, with a
    /// lease and a fencing token of its own.
    async fn held_before(&self, terms: Terms) -> Result<u32> {
        let held = loop {
            let standing = self.hold.standing();
            if let Some(loss) = standing.loss {
                return Err(self.hold.lost_error(loss));
            }
            // Check again after each settling: a guard may have left meanwhile. Then the store has a higher
            // count than this client, and the next acquisition would look like a repetition, with the
            // fencing token of another one.
            if !standing.is_ahead_of_store {
                break standing.count;
            }
            // Boxed: seldom needed.
            Box::pin(self.settle_in_turn(standing.changes)).await?;
        };
        if held > 0 && !terms.reentrant {
            return Err(Error::AlreadyHeld {
                name: self.hold.place.name().to_owned(),
            });
        }
        Ok(held)
    }

    /// The master granted it. Extend the local deadline now, because waiting for replicas delays renewal.
    fn was_taken(&self, held: u32, end: Instant) {
        if held > 0 {
            self.hold.extend(end);
        }
    }

    /// Handles a reply that the owner does not hold the object: marks the hold as lost. Returns the error.
    fn not_held(&self) -> Error {
        self.hold.lose(Loss::NotHeld);
        self.session.watchdog.watch(&self.hold);
        self.session.watchdog.found_missing(&self.hold);
        self.hold.lost_error(Loss::NotHeld)
    }

    /// Removes one guard. [`Claim::settle`] then updates the store.
    pub(crate) fn leave(&self, terms: Terms) {
        let change = self.hold.leave(terms.renewed);
        self.left.store(change, Ordering::Relaxed);
    }

    /// Makes the store match this client: sends the current hold count, which may be 0. Returns whether the
    /// owner still held it.
    ///
    /// Sending it twice has the effect of one. It is repeated when the connection breaks. "Not held" in
    /// reply to the repetition means that the first one took effect.
    pub(crate) async fn settle(&self) -> Result<bool> {
        let mine = match self.left.load(Ordering::Relaxed) {
            0 => self.hold.changes(),
            left => left,
        };
        let mut turn = self.hold.turn().await?;
        let settled = self.settle_in_turn(mine).await;
        turn.ended(&settled);
        settled
    }

    /// Settles for a caller that has the turn. `mine`: number of changes when the caller started.
    async fn settle_in_turn(&self, mine: u64) -> Result<bool> {
        let standing = self.hold.standing();
        let Some(loss) = standing.loss.filter(|_| standing.is_superseded) else {
            return self.settle_hold(&self.hold, standing, mine).await;
        };
        // The store's state of this owner now belongs to the latest generation. Its request may have been
        // canceled before it released what this generation left there.
        if let Some(latest) = self.session.latest(&self.hold)
            && let standing = latest.standing()
            && standing.is_ahead_of_store
        {
            let mine = standing.changes;
            self.settle_hold(&latest, standing, mine).await?;
        }
        Err(self.hold.lost_error(loss))
    }

    /// Settles the latest generation of the hold.
    async fn settle_hold(&self, hold: &Arc<Hold>, now: Standing, mine: u64) -> Result<bool> {
        let session = &self.session;
        let keep = match now.loss {
            None => now.count,
            // An answer that came too late may have left something in the store.
            Some(_) => 0,
        };
        if keep == 0 {
            session.watchdog.forget(hold);
            if now.given_back >= mine {
                // Another claim's release found the same count.
                return Ok(true);
            }
        }
        let lease = now.is_renewed.then(|| session.watchdog.lease());
        let step = hold.kind.release(hold, keep, lease);
        let store = &session.store;
        let delivery = Delivery::on(match now.is_asked_for {
            true => Route::Acquisitions,
            false => Route::Commands,
        });
        let release = Release::new(hold, keep);
        if keep == 0 {
            session.waiting.releasing(hold.place.channel());
        }
        let answer = release.answered(store.run(&step, delivery, &release.sent).await)?;
        tracing::debug!(lock = hold.place.name(), owner = %hold.field, keep,
            held = answer.reply, "released");
        if keep == 0 && !hold.own.is_empty() {
            // The owner's waiting state in the store is removed too: another attempt of the same owner has
            // to start again.
            session.waiting.call(&hold.own);
        }
        let is_repeated = answer.repeated || now.maybe_released;
        let held = answer.reply || keep == 0 && is_repeated;
        hold.store_followed(now.changes, keep == 0 && held && now.loss.is_none());
        if let Some(loss) = now.loss {
            return Err(hold.lost_error(loss));
        }
        if keep > 0 {
            if !held {
                hold.lose(Loss::NotHeld);
                session.watchdog.found_missing(hold);
            } else if let Some(lease) = lease {
                hold.extend(answer.sent + lease.duration());
            }
            session.watchdog.watch(hold);
        }
        Ok(held)
    }

    /// Settles in the background. Retries until the lease in the store must have ended.
    pub(crate) fn settle_in_background(&self, lease: Lease) {
        self.clone().into_background(lease.duration(), None);
    }

    /// Settles an attempt that may still be in flight. The attempt keeps its turn until the first try to
    /// settle it. So the attempts that wait for settling are limited like those in flight, however many
    /// callers come and go.
    fn into_background(self, lease: Duration, attempt: Option<Turn>) {
        let background = self.session.background.clone();
        let unheard = Unheard(Some(self));
        background.spawn(async move {
            let mut unheard = unheard;
            if let Some(claim) = unheard.0.take() {
                claim.settle_persistently(lease, attempt).await;
                claim.hold.settling_ended();
            }
        });
    }

    async fn settle_persistently(&self, lease: Duration, mut attempt: Option<Turn>) {
        // A step in flight may take effect this late; its lease starts then.
        let give_up = Instant::now() + lease + SETTLING;
        let name = self.hold.place.name();
        loop {
            let key = self.hold.place.key();
            let turn = self.session.store.settling_turn(key).await;
            let settled = self.settle().await;
            drop((turn, attempt.take()));
            match settled {
                Ok(_) | Err(Error::Lost { .. } | Error::WrongKind { .. }) => return,
                // After any error, even a refusal: its cause may end before the lease does.
                Err(error) if Instant::now() < give_up => {
                    tracing::debug!(lock = name, owner = %self.hold.field, %error,
                        "release failed; retrying");
                    tokio::time::sleep(SETTLING / 20).await;
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
const SETTLING: Duration = Duration::from_secs(10);

/// An attempt with unknown outcome. If it was sent, dropping this settles it in the background: the
/// connection keeps order, so the release arrives after the attempt.
struct Unsettled<'a> {
    claim: &'a Claim,
    terms: Terms,
    sent: &'a Sent,
    /// Number of the attempt among the changes of the hold.
    change: u64,
    settled: AtomicBool,
}

impl<'a> Unsettled<'a> {
    fn new(claim: &'a Claim, terms: Terms, sent: &'a Sent) -> Unsettled<'a> {
        Unsettled {
            claim,
            terms,
            sent,
            change: claim.hold.taking(),
            settled: AtomicBool::new(false),
        }
    }
}

impl Unsettled<'_> {
    /// Records that the attempt has been answered.
    fn is_settled(&self) {
        self.settled.store(true, Ordering::Relaxed);
        self.claim.hold.answered(self.change);
    }

    /// Settles the attempt in its own turn. If this fails, dropping it settles.
    async fn settle_in_turn(&self) {
        if self.claim.settle_in_turn(self.change).await.is_ok() {
            self.is_settled();
        }
    }
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        let attempt = self.sent.take_turn();
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        match self.sent.get() {
            true => {
                let claim = self.claim.clone();
                claim.into_background(self.terms.remembered.duration(), attempt);
            }
            // It never reached the store.
            false => self.claim.hold.answered(self.change),
        }
    }
}

/// A release that can be canceled or fail between being sent and being answered. Its hold remembers that:
/// the next release, which may be another caller's, counts as a repetition. If that finds nothing, the
/// first one took effect, and nothing was lost.
struct Release<'a> {
    hold: &'a Hold,
    keep: u32,
    sent: Sent,
}

impl<'a> Release<'a> {
    fn new(hold: &'a Hold, keep: u32) -> Release<'a> {
        let sent = Sent::default();
        Release { hold, keep, sent }
    }

    fn answered<T>(&self, answer: Result<T>) -> Result<T> {
        if answer.as_ref().err().is_none_or(Error::leaves_untouched) {
            self.sent.clear();
        }
        answer
    }
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        if self.keep == 0 && self.sent.get() {
            self.hold.may_be_released();
        }
    }
}

/// Logs a warning if background work is dropped before it starts, because its runtime has ended.
struct Unheard(Option<Claim>);

impl Drop for Unheard {
    fn drop(&mut self) {
        if let Some(claim) = &self.0 {
            tracing::warn!(lock = claim.hold.place.name(), owner = %claim.hold.field,
                "no runtime to release the lock in; it is free when its lease ends");
            claim.hold.settling_ended();
        }
    }
}

#[cfg(test)]
mod tests;
