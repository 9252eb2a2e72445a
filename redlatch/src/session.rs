//! A session: store, waiting, watchdog and identity of one client in one hand, and what every
//! primitive does with them: win a hold, and bring the store in line with what is held here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
use crate::store::{Lane, Sent, Store, Turn};
use crate::wait::WaitingRoom;
use crate::watchdog::Watchdog;

/// All that a primitive needs.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    pub(crate) prefix: String,
    pub(crate) store: Arc<Store>,
    pub(crate) waiting: WaitingRoom,
    pub(crate) watchdog: Watchdog,
    pub(crate) background: Background,
    /// How long an outage may last before waiting fails, if that was set.
    pub(crate) outage_limit: Option<Duration>,
    claims: Mutex<Claims>,
    /// Something has been entered, by whomever.
    entered: Notify,
}

/// Every hold that somebody has, wins or gives back, so that the same owner finds the same hold.
type Claims = HashMap<(Owner, Arc<Place>), Claimed, BuildHasherDefault<Mix>>;

/// Mixes two numbers that are well spread or unique by themselves: an owner's, and the hash that a
/// place brings along. Claims are looked up several times for each lock taken.
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

/// What one owner has of one place, over all generations of its hold: a hold that was lost, and the
/// hold that replaced it, act on the same field of the store.
///
/// Invariant: as long as a step of an earlier generation may still reach the store, the next
/// generation takes turns with it ([`Hold::steps`]). Otherwise a late release of the earlier
/// generation, which keeps nothing, would delete what the later one has acquired. Two rules keep it:
///
/// - The claims of all generations are counted, and each step is sent by a claim. So the entry, and
///   with it the one mutex that all generations share, outlives every step. Only renewals are sent
///   without a claim, but in turn; a late one only moves the end of a lease away.
/// - The entry is not removed while the store may keep another count than this client: the last
///   claim to be dropped first settles. Only settling that is given up ends the entry without an
///   answer.
///
/// A step that was sent without an answer does not keep its turn. The next step for the same field
/// is then a release that must be answered before anything is acquired. It is sent on the same
/// connection, behind the unanswered step, or on the connection that replaced a broken one.
struct Claimed {
    /// The latest generation.
    hold: Arc<Hold>,
    /// Number of claims of all generations.
    users: usize,
}

/// How something is to be held.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// How long the store keeps it without hearing from us again.
    pub(crate) lease: Lease,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// Whether the owner may have it already.
    pub(crate) reentrant: bool,
    /// How long the store may remember an attempt: for its lease, or longer if it waits.
    pub(crate) remembered: Lease,
}

impl Terms {
    /// The same for an attempt that waits, if the store remembers waiters for this long.
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

    /// The terms of an acquisition: with this lease, or renewed with the watchdog's.
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

    /// The hold of `owner` on `place`: the one there is, or a new one.
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
            // What was lost stays lost; its guards say so. Whoever asks now starts anew, but in
            // step with what may still be under way for the same owner.
            let later = fresh(claimed.hold.steps.clone());
            later.supersede(&claimed.hold);
            claimed.hold = later;
        }
        claimed.users += 1;
        Ok(Claim::new(self.clone(), claimed.hold.clone()))
    }

    /// The latest generation of a hold.
    fn latest(&self, hold: &Hold) -> Option<Arc<Hold>> {
        let claims = self.claims();
        let claimed = claims.get(&(hold.owner, hold.place.clone()));
        claimed.map(|claimed| claimed.hold.clone())
    }

    /// The tenure of `owner` at `place`, if it holds that as far as is known here.
    fn tenure(&self, owner: Owner, place: &Arc<Place>) -> Option<Tenure> {
        let claims = self.claims();
        let claimed = claims.get(&(owner, place.clone()));
        claimed.and_then(|claimed| claimed.hold.tenure())
    }

    /// Returns when `owner` holds `place`, as far as is known here, in a tenure that began after `since`.
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

    /// Gives back what `owner` has left of `place` and is not given back yet.
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
        // Should it fail, it goes on in the background; what is asked for next will fail too.
        let _ = claim.settle().await;
    }

    /// Runs a step that done twice would do something else than once: [`Store::run_unrepeated`].
    /// Once begun it is not left half-way: when this is dropped it goes on in the background.
    pub(crate) async fn change<S: Step<Reply: 'static> + 'static>(
        &self,
        step: S,
        what: &'static str,
    ) -> Result<S::Reply> {
        let store = self.store.clone();
        let sent = Sent::default();
        let work = async move {
            let run = store.run_unrepeated(&step, what, Lane::First, Duration::ZERO, &sent);
            Ok(run.await?.reply)
        };
        self.finish(work).await
    }

    /// What has been begun is not left half-way: dropped, it goes on in the background.
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

/// What an attempt to have several things at once came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Together<T> {
    /// All of them, and this came with each.
    Had(Vec<T>),
    /// None, because somebody has this one, for so long at most.
    InTheWay(usize, Duration),
}

impl Session {
    /// One attempt to have all or none of several things; [`Claim::enter`] for each of them, in one
    /// step. The caller keeps to one order of things, so that two of these never wait for each
    /// other's turns.
    pub(crate) async fn enter_all<T: Send, S: Step<Reply = Together<T>>>(
        &self,
        claims: &[(&Claim, Terms)],
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&[u32]) -> S,
    ) -> Result<Together<T>> {
        sent.asks_by_itself();
        sent.clear();
        let mut turns = Vec::with_capacity(claims.len());
        for (claim, _) in claims {
            turns.push(claim.hold.turn().await?);
        }
        let entered = self.enter_all_in_turn(claims, subscribe, sent, step).await;
        for turn in &mut turns {
            turn.ended(&entered);
        }
        entered
    }

    async fn enter_all_in_turn<T: Send, S: Step<Reply = Together<T>>>(
        &self,
        claims: &[(&Claim, Terms)],
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&[u32]) -> S,
    ) -> Result<Together<T>> {
        let mut held = Vec::with_capacity(claims.len());
        for (claim, terms) in claims {
            held.push(claim.held_before(*terms).await?);
        }
        let both = claims.iter();
        let unsettled: Vec<_> = both
            .map(|(claim, terms)| Unsettled::new(claim, *terms, sent))
            .collect();
        let step = step(&held);
        // As in `Claim::enter`: the renewal of what is held already must not wait.
        let lane = match held.iter().all(|&held| held == 0) {
            true => Lane::Attempt,
            false => Lane::Taking,
        };
        let answer = match subscribe {
            Some(channel) => {
                let store = &self.store;
                store.subscribe_and_run(channel, &step, lane, sent).await
            }
            None => self.store.run(&step, lane, sent).await,
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
        match &answer.reply {
            Together::Had(_) => {
                let end = |terms: &Terms| answer.sent + terms.lease.duration();
                for ((claim, terms), &held) in claims.iter().zip(&held) {
                    claim.was_taken(held, end(terms));
                }
                if let Err(error) = answer.confirmation.confirmed(sent).await {
                    // Each in the turn that we have; what fails is settled by being dropped.
                    let settling = unsettled.iter().map(Unsettled::settle_in_turn);
                    all(settling).await;
                    return Err(error);
                }
                for (i, (claim, terms)) in claims.iter().enumerate() {
                    if let Err(error) = claim.hold.enter(end(terms), terms.renewed) {
                        // Too late for this one, so for all; dropping what is unsettled gives
                        // them back.
                        for (claim, terms) in claims.iter().take(i) {
                            claim.leave(*terms);
                        }
                        return Err(error);
                    }
                }
                for (claim, _) in claims {
                    self.watchdog.watch(&claim.hold);
                }
                self.entered.notify_waiters();
            }
            Together::InTheWay(i, _) => {
                if let Some((claim, _)) = claims.get(*i)
                    && held.get(*i).is_some_and(|&held| held > 0)
                {
                    settled();
                    return Err(claim.not_held());
                }
            }
        }
        settled();
        Ok(answer.reply)
    }
}

/// A share in a hold, won or not.
pub(crate) struct Claim {
    pub(crate) session: Arc<Session>,
    pub(crate) hold: Arc<Hold>,
    /// Which change of the hold it was that this one left; 0 before.
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
            // This share in the entry is passed on to a claim that settles in the background.
            claimed.hold.clone()
        };
        let lease = unsettled.longest_lease();
        Claim::new(self.session.clone(), unsettled).into_background(lease, None);
    }
}

impl Claim {
    /// A share that has been counted among the users.
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

    /// The owner's latest tenure of this object or of the object [beside](Kind::beside) it.
    ///
    /// Invariant of all waiting: an owner with a tenure never waits in line, because the waiters there
    /// may be waiting for that very tenure to end. It asks the store out of turn, once per tenure. If
    /// the store refuses nevertheless (the tenure has ended meanwhile, or its loss was not noticed
    /// yet), the owner waits in line until a later tenure begins.
    pub(crate) fn tenure(&self) -> Option<Tenure> {
        let beside = self.hold.kind.beside();
        let beside = beside.and_then(|beside| self.session.tenure(self.hold.owner, beside));
        self.hold.tenure().max(beside)
    }

    /// Returns when the owner has such a tenure that began after `since`.
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
            // Boxed: the objects of few kinds are beside another.
            Box::pin(self.session.settle_left(self.hold.owner, beside)).await;
        }
    }

    /// One attempt to have it (once more). `step` is the primitive's, for the hold count wanted.
    ///
    /// However this ends, also by being dropped, the store is brought in line in the background
    /// with what is held here.
    pub(crate) async fn enter<'a, T: Send, S: Step<Reply = Outcome<T>>>(
        &'a self,
        terms: Terms,
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&'a Hold, u32) -> S,
    ) -> Result<Outcome<T>> {
        sent.asks_by_itself();
        sent.clear();
        let mut turn = self.hold.turn().await?;
        let entered = self.enter_in_turn(terms, subscribe, sent, step).await;
        turn.ended(&entered);
        entered
    }

    async fn enter_in_turn<'a, T: Send, S: Step<Reply = Outcome<T>>>(
        &'a self,
        terms: Terms,
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&'a Hold, u32) -> S,
    ) -> Result<Outcome<T>> {
        let held = self.held_before(terms).await?;
        let unsettled = Unsettled::new(self, terms, sent);
        let step = step(&self.hold, held + 1);
        let store = &self.session.store;
        // Who holds it already is in nobody's way, and must not keep its renewal waiting.
        let lane = match held {
            0 => Lane::Attempt,
            _ => Lane::Taking,
        };
        let answer = match subscribe {
            Some(channel) => store.subscribe_and_run(channel, &step, lane, sent).await,
            None => store.run(&step, lane, sent).await,
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                if error.leaves_untouched() || !sent.get() {
                    unsettled.is_settled();
                }
                return Err(error);
            }
        };
        match answer.reply {
            Outcome::Done(won) => {
                let end = answer.sent + terms.lease.duration();
                self.was_taken(held, end);
                if let Err(error) = answer.confirmation.confirmed(sent).await {
                    // Now, if it can be: who hears of it may ask somewhere else.
                    Box::pin(unsettled.settle_in_turn()).await;
                    return Err(error);
                }
                self.hold.enter(end, terms.renewed)?;
                unsettled.is_settled();
                self.session.watchdog.watch(&self.hold);
                self.session.entered.notify_waiters();
                Ok(Outcome::Done(won))
            }
            Outcome::Wait(_) if held > 0 => {
                unsettled.is_settled();
                Err(self.not_held())
            }
            wait @ Outcome::Wait(_) => {
                unsettled.is_settled();
                Ok(wait)
            }
        }
    }

    /// How often the owner has it already, if it may ask for it now.
    ///
    /// What the owner has left before is given back first, in this turn: what is asked for next is
    /// something new, with a lease and a fencing token of its own.
    async fn held_before(&self, terms: Terms) -> Result<u32> {
        let held = loop {
            let standing = self.hold.standing();
            if let Some(loss) = standing.loss {
                return Err(self.hold.lost_error(loss));
            }
            // Again after each settling: a guard may have left meanwhile. The count without it is
            // not what the store has, and one more would pass for what the store has already: the
            // acquisition would count as a repetition, with the fencing token of another one.
            if !standing.is_ahead_of_store {
                break standing.count;
            }
            // Boxed: there is seldom anything to settle.
            Box::pin(self.settle_in_turn(standing.changes)).await?;
        };
        if held > 0 && !terms.reentrant {
            return Err(Error::AlreadyHeld {
                name: self.hold.place.name().to_owned(),
            });
        }
        Ok(held)
    }

    /// The store has given it (once more), whatever the replicas will say: while they are waited for, what
    /// was held before cannot be renewed.
    fn was_taken(&self, held: u32, end: Instant) {
        if held > 0 {
            self.hold.extend(end);
        }
    }

    /// The store says that what is held here is not.
    fn not_held(&self) -> Error {
        self.hold.lose(Loss::NotHeld);
        self.session.watchdog.watch(&self.hold);
        self.session.watchdog.found_missing(&self.hold);
        self.hold.lost_error(Loss::NotHeld)
    }

    /// Gives one entry back. After this, [`Claim::settle`] tells the store.
    pub(crate) fn leave(&self, terms: Terms) {
        let change = self.hold.leave(terms.renewed);
        self.left.store(change, Ordering::Relaxed);
    }

    /// Brings the store in line with what is held here: the hold count as it is now, none included.
    /// Whether the owner still held it.
    ///
    /// Sent twice it is the same as once. When the connection breaks it is sent again; then a "not
    /// held" is the answer to the repetition, and means that the first one did its work.
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

    /// The same for who has the turn; `mine`: how many changes there had been when this was begun.
    async fn settle_in_turn(&self, mine: u64) -> Result<bool> {
        let standing = self.hold.standing();
        let Some(loss) = standing.loss.filter(|_| standing.is_superseded) else {
            return self.settle_hold(&self.hold, standing, mine).await;
        };
        // What the store has for this owner now belongs to the latest generation, whose request may
        // have been canceled before it released what this generation left there.
        if let Some(latest) = self.session.latest(&self.hold)
            && let standing = latest.standing()
            && standing.is_ahead_of_store
        {
            let mine = standing.changes;
            self.settle_hold(&latest, standing, mine).await?;
        }
        Err(self.hold.lost_error(loss))
    }

    /// The same for the latest generation of the hold.
    async fn settle_hold(&self, hold: &Arc<Hold>, now: Standing, mine: u64) -> Result<bool> {
        let session = &self.session;
        let keep = match now.loss {
            None => now.count,
            // An answer that came too late may have left something behind.
            Some(_) => 0,
        };
        if keep == 0 {
            session.watchdog.forget(hold);
            if now.given_back >= mine {
                // By another one's settling, which found the same count.
                return Ok(true);
            }
        }
        let lease = now.is_renewed.then(|| session.watchdog.lease());
        let step = hold.kind.release(hold, keep, lease);
        let store = &session.store;
        let lane = match now.is_asked_for {
            true => Lane::Behind,
            false => Lane::First,
        };
        let release = Release::new(hold, keep);
        let answer = release.answered(store.run(&step, lane, &release.sent).await)?;
        tracing::debug!(lock = hold.place.name(), owner = %hold.field, keep,
            held = answer.reply, "released");
        if keep == 0 && !hold.own.is_empty() {
            // What its owner had left behind while waiting is gone too: another attempt of the same
            // owner has to begin again.
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

    /// Settles without being waited for, and tries again until the store must have given the lock
    /// back by itself.
    pub(crate) fn settle_in_background(&self, lease: Lease) {
        self.clone().into_background(lease.duration(), None);
    }

    /// The same for an attempt that may still be in flight. It keeps its turn until it was tried once to
    /// settle it: so no more attempts are waiting to be settled than may be on their way, however many
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
        // A step that is on its way may take effect this late; its lease starts then.
        let give_up = Instant::now() + lease + SETTLING;
        let name = self.hold.place.name();
        loop {
            let key = self.hold.place.key();
            let turn = self.session.store.settling_turn(key).await;
            let settled = self.settle().await;
            drop((turn, attempt.take()));
            match settled {
                Ok(_) | Err(Error::Lost { .. } | Error::WrongKind { .. }) => return,
                // Whatever the reason, a refusal included: it may be over before the lease is.
                Err(error) if Instant::now() < give_up => {
                    tracing::debug!(lock = name, owner = %self.hold.field, %error,
                        "not given back yet; trying again");
                    tokio::time::sleep(SETTLING / 20).await;
                }
                Err(error) => {
                    tracing::warn!(lock = name, owner = %self.hold.field, %error,
                        "could not be given back; it is free when its lease ends");
                    return;
                }
            }
        }
    }
}

/// How long beyond a lease it is tried to give something back.
const SETTLING: Duration = Duration::from_secs(10);

/// An attempt whose outcome is not known. If it was sent, dropping this settles it in the
/// background: the connection keeps order, so what is sent now comes after the attempt.
struct Unsettled<'a> {
    claim: &'a Claim,
    terms: Terms,
    sent: &'a Sent,
    /// Which change of the hold the attempt is.
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
    /// The attempt has been answered.
    fn is_settled(&self) {
        self.settled.store(true, Ordering::Relaxed);
        self.claim.hold.answered(self.change);
    }

    /// Settles the attempt in the turn that it was made in. If that fails, dropping this does.
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
            // The store has not heard of it.
            false => self.claim.hold.answered(self.change),
        }
    }
}

/// A release, which can be canceled or fail between being sent and being answered. Its hold remembers
/// that: the next release, which may be another caller's, counts as a repetition. If it finds nothing,
/// the first one did its work, and nothing was lost.
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

/// Says so in the log when background work is dropped before it began: its runtime has ended.
struct Unheard(Option<Claim>);

impl Drop for Unheard {
    fn drop(&mut self) {
        if let Some(claim) = &self.0 {
            tracing::warn!(lock = claim.hold.place.name(), owner = %claim.hold.field,
                "no runtime to give it back in; it is free when its lease ends");
            claim.hold.settling_ended();
        }
    }
}

#[cfg(test)]
mod tests;
