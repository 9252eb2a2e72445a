//! The members that hold a RedLock.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::{RedGuard, quorum};
use crate::background::{RunningWork, WorkRef};
use crate::error::{Error, Loss, Result};
use crate::hold::{Hold, HoldLimits, RunningLimits};
use crate::join::join_until;
use crate::locks::{Held, HeldForLease, HoldGuard};
use crate::owner::Owner;
use crate::runtime::sleep_until;
use crate::session::HoldRef;
use crate::several::{Member, any_lost};
use crate::sync::{Mutex, wait_for};

/// What is known about one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MemberStatus {
    Held,
    /// It was lost at a limit of the request, or was revoked.
    AtLimit,
    /// It has not granted the lock, or has lost it.
    Missing,
}

/// Returns whether a member that has just been granted counts. `confirmed`: which members are held, also as their stores have
/// confirmed after that.
pub(super) fn counts(granted: usize, confirmed: &[bool]) -> bool {
    let others = confirmed.iter().enumerate();
    let held = others.filter(|(i, held)| *i != granted && **held).count();
    held >= quorum(confirmed.len())
}

/// A RedLock that a majority granted.
pub(crate) struct HeldMajority {
    pub(super) owner: Owner,
    pub(super) majority: Arc<Majority>,
}

/// The members of a RedLock that is held, and whether a majority of them is.
pub(super) struct Majority {
    members: Mutex<Vec<MemberHold>>,
    /// How long one member may take to answer.
    member_timeout: Duration,
    state: AtomicU8,
    /// Notified when a member was acquired again, and at the end.
    changed: Notify,
    /// The requests for missing members, by member, which may have ended. A flush waits for none
    /// while the lock is held, because members that are down are requested without end. The end of
    /// the lock cancels them; then a flush waits until they are settled.
    requests: Mutex<Vec<Option<WorkRef>>>,
    /// The limits of this lock, which also count for members that are acquired again.
    limits: Mutex<Option<RunningLimits>>,
}

/// A member, and its hold if it granted the lock. The hold may be lost.
pub(super) struct MemberHold {
    pub(super) member: Member,
    pub(super) held: Option<HoldGuard>,
}

impl MemberHold {
    fn hold(&self) -> Option<&Arc<Hold>> {
        self.held.as_ref().map(HoldGuard::hold)
    }

    fn status(&self) -> MemberStatus {
        match self.hold() {
            Some(hold) if !hold.valid_for().is_zero() => MemberStatus::Held,
            Some(hold) if hold.loss().is_some_and(Loss::is_at_limit) => MemberStatus::AtLimit,
            _ => MemberStatus::Missing,
        }
    }

    /// Returns how long its hold is valid. It may have been acquired for longer, before or since: clocks have had that long to
    /// drift.
    fn valid_for(&self) -> Duration {
        self.held.as_ref().map_or(Duration::ZERO, |held| {
            let longest = held.hold().state().period.longest;
            let lease = longest.max(held.terms.lease.duration());
            held.hold().valid_despite(clock_drift(lease))
        })
    }
}

const HELD: u8 = 0;
const LOST: u8 = 1;
const RELEASED: u8 = 2;

/// How much earlier a lease may end on a server than here: 1 % for clocks that run at different
/// speeds, and 2 ms for what Redis truncates, as the algorithm's description specifies.
pub(super) fn clock_drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

impl Majority {
    pub(super) fn new(members: Vec<MemberHold>, member_timeout: Duration) -> Majority {
        Majority {
            members: Mutex::new(members),
            member_timeout,
            state: AtomicU8::new(HELD),
            changed: Notify::new(),
            requests: Mutex::default(),
            limits: Mutex::default(),
        }
    }

    /// Records a request for a missing member.
    pub(super) fn begin_request(&self, i: usize) -> RunningWork {
        let member = self.member(i);
        let running = member.session().background.begin(member.object());
        let work = running.to_ref();
        let mut requests = self.requests.lock();
        if self.state.load(Ordering::SeqCst) == HELD {
            work.needless();
        }
        let members = requests.len().max(i + 1);
        requests.resize(members, None);
        requests[i] = Some(work);
        running
    }

    /// Returns how long a quorum of the holds is valid now: the quorum-th longest of their remaining
    /// leases.
    pub(super) fn quorum_valid_for(&self) -> Duration {
        let members = self.members.lock();
        let mut each: Vec<_> = members.iter().map(MemberHold::valid_for).collect();
        each.sort_unstable_by(|one, other| other.cmp(one));
        let valid = each.get(quorum(each.len()) - 1);
        valid.copied().unwrap_or_default()
    }

    /// The same, unless the lock is lost or released. A loss is permanent.
    pub(super) fn valid_for(&self) -> Duration {
        if self.state.load(Ordering::SeqCst) != HELD {
            return Duration::ZERO;
        }
        let valid = self.quorum_valid_for();
        if valid.is_zero() {
            self.end(LOST);
        }
        valid
    }

    /// Notices that no majority is held any more.
    pub(super) fn check(&self) {
        let _ = self.valid_for();
    }

    /// Returns what is known about each member, and the holds that counted as held. One of them may be lost since.
    pub(super) fn status(&self) -> (Vec<MemberStatus>, Vec<Arc<Hold>>) {
        let members = self.members.lock();
        let statuses: Vec<_> = members.iter().map(MemberHold::status).collect();
        let held = members
            .iter()
            .zip(&statuses)
            .filter(|(_, status)| **status == MemberStatus::Held);
        let holds = held.filter_map(|(one, _)| one.hold().cloned()).collect();
        (statuses, holds)
    }

    pub(super) fn member(&self, i: usize) -> Member {
        self.members.lock()[i].member.clone()
    }

    /// Returns the members that are held, and their holds; `None` for the others.
    pub(super) fn held(&self) -> Vec<Option<(Member, HoldRef)>> {
        let members = self.members.lock();
        let held = |one: &MemberHold| {
            let hold_ref = || Some(one.held.as_ref()?.hold_ref.clone());
            let is_held = one.status() == MemberStatus::Held;
            Some(one.member.clone()).zip(hold_ref().filter(|_| is_held))
        };
        members.iter().map(held).collect()
    }

    /// Adds a member that was acquired again, if it [`counts`] and the lock has not ended. Else it is released.
    pub(super) fn add(&self, i: usize, granted: HoldGuard, confirmed: &[bool]) {
        let dropped = {
            let mut members = self.members.lock();
            let statuses: Vec<_> = members.iter().map(MemberHold::status).collect();
            let is_held =
                |(status, confirmed): (&_, &_)| *status == MemberStatus::Held && *confirmed;
            let held: Vec<_> = statuses.iter().zip(confirmed).map(is_held).collect();
            if self.state.load(Ordering::SeqCst) == HELD && counts(i, &held) {
                if let Some(limits) = &*self.limits.lock() {
                    granted.hold().state().period.add_running_limits(limits);
                    let watchdog = &granted.hold_ref.session.watchdog;
                    watchdog.watch(granted.hold());
                }
                let (hold, of) = (granted.hold(), members.len());
                tracing::info!(lock = hold.object.full_name(), owner = %hold.field, of,
                    "a member of a RedLock was acquired again");
                members[i].held.replace(granted)
            } else {
                Some(granted)
            }
        };
        // What was lost, or has to be released.
        drop(dropped);
        self.changed.notify_waiters();
    }

    /// Takes the holds of the members.
    pub(super) fn take(&self) -> Vec<HoldGuard> {
        let mut members = self.members.lock();
        members
            .iter_mut()
            .filter_map(|one| one.held.take())
            .collect()
    }

    /// Sets the final state, once.
    fn end(&self, how: u8) {
        {
            // Held until they count, so that no other task sees the end before.
            let mut requests = self.requests.lock();
            let ended = self
                .state
                .compare_exchange(HELD, how, Ordering::SeqCst, Ordering::SeqCst);
            if ended.is_err() {
                return;
            }
            requests.drain(..).flatten().for_each(|work| work.awaited());
        }
        if how == LOST
            && let Some((hold, loss)) = self.first_loss()
        {
            tracing::warn!(lock = hold.object.full_name(), owner = %hold.field, %loss, "lost");
        }
        self.changed.notify_waiters();
    }

    /// Waits until the lock is lost or released.
    pub(super) async fn ended(&self) {
        let has_ended = || (self.state.load(Ordering::SeqCst) != HELD).then_some(());
        wait_for(&self.changed, has_ended).await;
    }

    /// Returns when no majority is held any more; never if it is released first.
    async fn lost(&self) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            // Before the validity: a hold that is lost in between is among these.
            let (_, held) = self.status();
            let left = self.valid_for();
            match self.state.load(Ordering::SeqCst) {
                LOST => return,
                RELEASED => std::future::pending().await,
                _ => {}
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = any_lost(held) => {}
                () = sleep_until(Instant::now() + left) => {}
            }
        }
    }

    /// Returns how many members granted the lock and are known to keep it.
    fn held_members(&self) -> usize {
        let (statuses, _) = self.status();
        let held = statuses.iter().filter(|one| **one == MemberStatus::Held);
        held.count()
    }

    /// Returns the hold of a member and why the lock was lost.
    fn first_loss(&self) -> Option<(Arc<Hold>, Loss)> {
        let members = self.members.lock();
        let holds = || members.iter().filter_map(MemberHold::hold);
        let losses = || holds().filter_map(|hold| hold.loss());
        let is_missing = losses().find(|loss| *loss == Loss::NotHeld);
        let reason = is_missing.or_else(|| losses().find(|loss| loss.is_at_limit()));
        let reason = reason.unwrap_or(Loss::LeaseEnded);
        Some((holds().next()?.clone(), reason))
    }

    /// Returns the error, if the majority is lost.
    fn loss(&self) -> Option<Error> {
        self.check();
        if self.state.load(Ordering::SeqCst) != LOST {
            return None;
        }
        let (hold, reason) = self.first_loss()?;
        Some(hold.lost_error(reason))
    }

    /// Starts the limits of the request, which begin when a majority is held.
    pub(super) fn start_limits(&self, limits: Option<&HoldLimits>) {
        *self.limits.lock() = limits.map(|limits| RunningLimits::start(limits, Instant::now()));
        let members = self.members.lock();
        let held = members.iter().filter_map(|one| one.held.as_ref());
        held.for_each(|held| held.start_limits(limits));
    }
}

impl Held for HeldMajority {
    /// Releases the members that granted the lock, concurrently. After their time limit it returns as
    /// soon as the unconfirmed members are too few to withhold a majority from other owners.
    async fn release(self) -> Result<()> {
        if let Some(lost) = self.majority.loss() {
            return Err(lost);
        }
        self.majority.end(RELEASED);
        let held_members = self.majority.take();
        let members = self.majority.members.lock().len();
        let is_lost = |one: &&Option<Result<()>>| matches!(one, Some(Err(Error::Lost { .. })));
        let is_kept = |one: &&Option<Result<()>>| !is_lost(one) && !matches!(one, Some(Ok(())));
        let released = |done: &[Option<Result<()>>]| {
            let kept = done.iter().filter(is_kept).count();
            members - kept >= quorum(members)
        };
        let releases = held_members.into_iter().map(HoldGuard::release);
        let done = join_until(releases, released, self.majority.member_timeout).await;
        // Other owners may have held the members that were lost or that did not grant it.
        let lost = done.iter().filter(is_lost).count();
        let is_held = done.len() - lost >= quorum(members);
        if is_held && released(&done) {
            return Ok(());
        }
        let mut errors = done.into_iter().flatten().filter_map(Result::err);
        let error = errors.find(|error| matches!(error, Error::Lost { .. }) != is_held);
        error.map_or(Ok(()), Err)
    }

    fn loss(&self) -> Option<Error> {
        self.majority.loss()
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let majority = self.majority.clone();
        async move { majority.lost().await }
    }
}

impl HeldForLease for HeldMajority {
    fn valid_for(&self) -> Duration {
        self.majority.valid_for()
    }

    fn feed(&self) {
        if let Some(limits) = &mut *self.majority.limits.lock() {
            limits.feed(Instant::now());
        }
        let members = self.majority.members.lock();
        let holds = members.iter().filter_map(MemberHold::hold);
        holds.for_each(|hold| hold.feed());
    }

    fn owner(&self) -> Owner {
        self.owner
    }
}

impl RedGuard {
    /// Returns how many members granted the lock and are known to keep it: at least a quorum, or
    /// the lock is lost.
    pub fn held_members(&self) -> usize {
        self.held.majority.held_members()
    }
}

impl Drop for HeldMajority {
    fn drop(&mut self) {
        self.majority.end(RELEASED);
        drop(self.majority.take());
    }
}

impl std::fmt::Debug for HeldMajority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldMajority")
            .field("owner", &self.owner)
            .field("held_members", &self.majority.held_members())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
