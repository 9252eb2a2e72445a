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
use crate::hold::{Hold, Kind};
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
    /// Turns to settle in the background: whoever drops thousands of attempts at once must not have
    /// the renewals wait behind them.
    settlings: tokio::sync::Semaphore,
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

struct Claimed {
    hold: Arc<Hold>,
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
            settlings: tokio::sync::Semaphore::new(SETTLINGS_AT_ONCE),
        }
    }

    /// The terms of an acquisition: with this lease, or renewed with the watchdog's.
    pub(crate) fn terms(&self, lease: Option<Lease>, reentrant: bool) -> Terms {
        Terms {
            lease: lease.unwrap_or(self.watchdog.lease()),
            renewed: lease.is_none(),
            reentrant,
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
            let hold = Hold::new(place.clone(), owner, field, kind, steps);
            Claimed {
                hold: Arc::new(hold),
                users: 0,
            }
        };
        let claimed = claims
            .entry((owner, place.clone()))
            .or_insert_with(|| fresh(Arc::default()));
        if claimed.hold.place.family() != place.family() {
            return Err(Error::WrongKind {
                name: place.name().to_owned(),
                reason: "the same owner uses it as another kind of lock",
            });
        }
        if claimed.hold.loss().is_some() {
            // What was lost stays lost; its guards say so. Whoever asks now starts anew, but in
            // step with what may still be under way for the same owner.
            claimed.hold.supersede();
            *claimed = fresh(claimed.hold.steps.clone());
        }
        claimed.users += 1;
        Ok(Claim::new(self.clone(), claimed.hold.clone()))
    }

    /// Whether `owner` holds `place`, as far as is known here.
    pub(crate) fn holds(&self, owner: Owner, place: &Arc<Place>) -> bool {
        let claims = self.claims();
        let claimed = claims.get(&(owner, place.clone()));
        claimed.is_some_and(|claimed| claimed.hold.count() > 0 && claimed.hold.loss().is_none())
    }

    /// Returns when `owner` holds `place`, as far as is known here.
    pub(crate) async fn has_entered(&self, owner: Owner, place: &Arc<Place>) {
        loop {
            let mut news = std::pin::pin!(self.entered.notified());
            news.as_mut().enable();
            if self.holds(owner, place) {
                return;
            }
            news.await;
        }
    }

    /// Gives back what `owner` has left of `place` and is not given back yet.
    pub(crate) async fn settle_left(self: &Arc<Self>, owner: Owner, place: &Arc<Place>) {
        let claim = {
            let mut claims = self.claims();
            let Some(claimed) = claims.get_mut(&(owner, place.clone())) else {
                return;
            };
            if !claimed.hold.is_ahead_of_store() {
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
    pub(crate) async fn enter_all<'a, T: Send, S: Step<Reply = Together<T>>>(
        &self,
        claims: &[(&'a Claim, Terms)],
        subscribe: Option<&str>,
        sent: &Sent,
        step: impl FnOnce(&[u32]) -> S,
    ) -> Result<Together<T>> {
        sent.clear();
        let mut turns = Vec::with_capacity(claims.len());
        let mut held = Vec::with_capacity(claims.len());
        for (claim, terms) in claims {
            turns.push(claim.hold.steps.lock().await);
            held.push(claim.held_before(*terms).await?);
        }
        let unsettled = |(claim, terms): &(&'a Claim, Terms)| Unsettled::new(claim, *terms, sent);
        let unsettled: Vec<_> = claims.iter().map(unsettled).collect();
        let changes: Vec<u64> = claims
            .iter()
            .map(|(claim, _)| claim.hold.taking())
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
        let settled = || {
            let each = unsettled.iter().zip(&changes);
            each.for_each(|(one, change)| one.is_settled(*change));
        };
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
                if let Err(error) = answer.confirmation.confirmed().await {
                    // Each in the turn that we have; what fails is settled by being dropped.
                    let each = claims.iter().zip(&changes);
                    let settling = each.map(|((claim, _), change)| claim.settle_in_turn(*change));
                    let settled = all(settling).await;
                    for ((one, change), settled) in unsettled.iter().zip(&changes).zip(settled) {
                        if settled.is_ok() {
                            one.is_settled(*change);
                        }
                    }
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
        let key = (self.hold.owner, self.hold.place.clone());
        if let Some(claimed) = self.session.claims().get_mut(&key)
            && Arc::ptr_eq(&claimed.hold, &self.hold)
        {
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
        let key = (self.hold.owner, self.hold.place.clone());
        let mut claims = self.session.claims();
        if let Some(claimed) = claims.get_mut(&key)
            && Arc::ptr_eq(&claimed.hold, &self.hold)
        {
            claimed.users -= 1;
            if claimed.users == 0 {
                claims.remove(&key);
            }
        }
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
        sent.clear();
        let _turn = self.hold.steps.lock().await;
        let held = self.held_before(terms).await?;
        let unsettled = Unsettled::new(self, terms, sent);
        let change = self.hold.taking();
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
                    unsettled.is_settled(change);
                }
                return Err(error);
            }
        };
        match answer.reply {
            Outcome::Done(won) => {
                let end = answer.sent + terms.lease.duration();
                self.was_taken(held, end);
                if let Err(error) = answer.confirmation.confirmed().await {
                    // Now, if it can be: who hears of it may ask somewhere else.
                    if self.settle_in_turn(change).await.is_ok() {
                        unsettled.is_settled(change);
                    }
                    return Err(error);
                }
                self.hold.enter(end, terms.renewed)?;
                unsettled.is_settled(change);
                self.session.watchdog.watch(&self.hold);
                self.session.entered.notify_waiters();
                Ok(Outcome::Done(won))
            }
            Outcome::Wait(_) if held > 0 => {
                unsettled.is_settled(change);
                Err(self.not_held())
            }
            wait @ Outcome::Wait(_) => {
                unsettled.is_settled(change);
                Ok(wait)
            }
        }
    }

    /// How often the owner has it already, if it may ask for it now.
    ///
    /// What the owner has left before is given back first, in this turn: what is asked for next is
    /// something new, with a lease and a fencing token of its own.
    async fn held_before(&self, terms: Terms) -> Result<u32> {
        if let Some(loss) = self.hold.loss() {
            return Err(self.hold.lost_error(loss));
        }
        if self.hold.is_ahead_of_store() {
            self.settle_in_turn(self.hold.changes()).await?;
        }
        let held = self.hold.count();
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
        let _turn = self.hold.steps.lock().await;
        self.settle_in_turn(mine).await
    }

    /// The same for who has the turn; `mine`: how many changes there had been when this was begun.
    async fn settle_in_turn(&self, mine: u64) -> Result<bool> {
        let (hold, session) = (&self.hold, &self.session);
        let (all, count, loss) = hold.standing();
        if let Some(loss) = loss
            && hold.is_superseded()
        {
            // What the store has for this owner is the later hold's.
            return Err(hold.lost_error(loss));
        }
        let keep = match loss {
            None => count,
            // An answer that came too late may have left something behind.
            Some(_) => 0,
        };
        if keep == 0 {
            session.watchdog.forget(hold);
            if hold.has_given_back(mine) {
                // By another one's settling, which found the same count.
                return Ok(true);
            }
        }
        let lease = hold.is_renewed().then(|| session.watchdog.lease());
        let step = hold.kind.release(hold, keep, lease);
        let store = &session.store;
        let lane = match hold.is_asked_for() {
            true => Lane::Behind,
            false => Lane::First,
        };
        let answer = store.run(&step, lane, &Sent::default()).await?;
        tracing::debug!(lock = hold.place.name(), owner = %hold.field, keep,
            held = answer.reply, "released");
        if keep == 0 && !hold.own.is_empty() {
            // What its owner had left behind while waiting is gone too: another attempt of the same
            // owner has to begin again.
            session.waiting.call(&hold.own);
        }
        hold.store_followed(all);
        if let Some(loss) = loss {
            return Err(hold.lost_error(loss));
        }
        let held = answer.reply || answer.repeated;
        match keep {
            0 if held => hold.gave_back(all),
            0 => {}
            _ => {
                if !answer.reply {
                    hold.lose(Loss::NotHeld);
                } else if let Some(lease) = lease {
                    hold.extend(answer.sent + lease.duration());
                }
                session.watchdog.watch(hold);
            }
        }
        Ok(if keep == 0 { held } else { answer.reply })
    }

    /// Settles without being waited for, and tries again until the store must have given the lock
    /// back by itself.
    pub(crate) fn settle_in_background(&self, lease: Lease) {
        self.settle_in_background_with(lease, None);
    }

    /// The same for an attempt that may still be on its way. It keeps its turn until it was tried once to
    /// settle it: so no more attempts are waiting to be settled than may be on their way, however many
    /// callers come and go.
    fn settle_in_background_with(&self, lease: Lease, turn: Option<Turn>) {
        let unheard = Unheard(Some(self.clone()));
        self.session.background.spawn(async move {
            let mut unheard = unheard;
            if let Some(claim) = unheard.0.take() {
                claim.settle_persistently(lease, turn).await;
            }
        });
    }

    async fn settle_persistently(&self, lease: Lease, mut attempt: Option<Turn>) {
        // A step that is on its way may take effect this late; its lease starts then.
        let give_up = Instant::now() + lease.duration() + SETTLING;
        let name = self.hold.place.name();
        loop {
            let turn = self.session.settlings.acquire().await;
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

/// How many settlings are on their way at once in the background.
const SETTLINGS_AT_ONCE: usize = 64;

/// An attempt whose outcome is not known. If it was sent, dropping this settles it in the
/// background: the connection keeps order, so what is sent now comes after the attempt.
struct Unsettled<'a> {
    claim: &'a Claim,
    terms: Terms,
    sent: &'a Sent,
    settled: AtomicBool,
}

impl<'a> Unsettled<'a> {
    fn new(claim: &'a Claim, terms: Terms, sent: &'a Sent) -> Unsettled<'a> {
        Unsettled {
            claim,
            terms,
            sent,
            settled: AtomicBool::new(false),
        }
    }
}

impl Unsettled<'_> {
    /// The attempt that was this change has been answered.
    fn is_settled(&self, change: u64) {
        self.settled.store(true, Ordering::Relaxed);
        self.claim.hold.answered(change);
    }
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        let turn = self.sent.take_turn();
        if self.sent.get() && !self.settled.load(Ordering::Relaxed) {
            let lease = self.terms.lease;
            self.claim.settle_in_background_with(lease, turn);
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
        }
    }
}
