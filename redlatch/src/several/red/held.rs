//! The members that hold a RedLock.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::{RedGuard, quorum};
use crate::background::{RunningWork, WorkRef};
use crate::error::{Error, Loss, Result};
use crate::hold::{Hold, HoldLimits, RunningLimits, Validity};
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

/// Returns whether a member that has just been granted counts. `confirmed`: which members are held,
/// also as their stores have confirmed after that.
pub(super) fn counts(granted: usize, confirmed: &[bool]) -> bool {
    let others = confirmed.iter().enumerate();
    let held = others.filter(|(i, held)| *i != granted && **held).count();
    held >= quorum(confirmed.len())
}

/// A RedLock that a majority granted.
pub(crate) struct HeldMajority(pub(super) Arc<Majority>);

/// The members of a RedLock that is held, and whether a majority of them is.
pub(super) struct Majority {
    pub(super) owner: Owner,
    /// How long one member may take to answer.
    pub(super) member_timeout: Duration,
    state: Mutex<State>,
    /// Notified when a member was acquired again, and at the end.
    changed: Notify,
}

struct State {
    phase: Phase,
    /// The error, if the lock was lost.
    loss: Option<Error>,
    members: Vec<MemberHold>,
    /// The limits of this lock, which also count for members that are acquired again.
    limits: Option<RunningLimits>,
}

/// Whether the lock is held. It ends once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    Lost,
    Released,
}

/// A member, and its hold if it granted the lock. The hold may be lost.
pub(super) struct MemberHold {
    member: Member,
    held: Option<HoldGuard>,
    /// The latest request for the member while it was missing, which may have ended. A flush does
    /// not wait for it while the lock is held, because members that are down are requested without
    /// end. The end of the lock cancels it; then a flush waits until it is settled.
    request: Option<WorkRef>,
}

impl MemberHold {
    pub(super) fn new(member: Member, held: Option<HoldGuard>) -> MemberHold {
        MemberHold {
            member,
            held,
            request: None,
        }
    }

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

    /// Returns how long its hold is valid.
    fn valid_for(&self) -> Duration {
        self.held.as_ref().map_or(Duration::ZERO, |held| {
            held.hold().valid_despite(clock_drift_of(held))
        })
    }

    /// Returns how long its lease still lasts. Its hold may end before, at a limit.
    fn lease_left(&self) -> Duration {
        self.held.as_ref().map_or(Duration::ZERO, |held| {
            let left = held.hold().state().period.left(Instant::now());
            left.saturating_sub(clock_drift_of(held))
        })
    }
}

/// How much earlier a lease may end on a server than here: 1 % for clocks that run at different
/// speeds, and 2 ms for what Redis truncates, as the algorithm's description specifies.
pub(super) fn clock_drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// Returns the same for a hold. It may have been acquired for longer, before or since: clocks have
/// had that long to drift.
fn clock_drift_of(held: &HoldGuard) -> Duration {
    let longest = held.hold().state().period.longest;
    clock_drift(longest.max(held.terms.lease.duration()))
}

/// Returns how long a quorum of the holds is valid now.
pub(super) fn quorum_valid_for(members: &[MemberHold]) -> Duration {
    longest_of_quorum(members, MemberHold::valid_for)
}

/// Returns the quorum-th longest of these times: a quorum has as much.
fn longest_of_quorum(members: &[MemberHold], time: fn(&MemberHold) -> Duration) -> Duration {
    let mut each: Vec<_> = members.iter().map(time).collect();
    each.sort_unstable_by(|one, other| other.cmp(one));
    each[quorum(each.len()) - 1]
}

/// Takes the holds of the members.
pub(super) fn take_holds(members: &mut [MemberHold]) -> Vec<HoldGuard> {
    let held = members.iter_mut().filter_map(|one| one.held.take());
    held.collect()
}

impl State {
    fn holds(&self) -> impl Iterator<Item = &Arc<Hold>> {
        self.members.iter().filter_map(MemberHold::hold)
    }

    /// Returns the hold of a member and why the lock was lost.
    fn first_loss(&self) -> Option<(Arc<Hold>, Loss)> {
        let losses = || self.holds().filter_map(|hold| hold.loss());
        let is_missing = losses().find(|loss| *loss == Loss::NotHeld);
        let reason = is_missing.or_else(|| losses().find(|loss| loss.is_at_limit()));
        let reason = reason.unwrap_or(Loss::LeaseEnded);
        Some((self.holds().next()?.clone(), reason))
    }
}

impl Majority {
    pub(super) fn new(
        owner: Owner,
        members: Vec<MemberHold>,
        member_timeout: Duration,
    ) -> Majority {
        Majority {
            owner,
            member_timeout,
            state: Mutex::new(State {
                phase: Phase::Held,
                loss: None,
                members,
                limits: None,
            }),
            changed: Notify::new(),
        }
    }

    /// Records a request for a missing member, and returns the member.
    pub(super) fn begin_request(&self, i: usize) -> (Member, RunningWork) {
        let state = &mut *self.state.lock();
        let one = &mut state.members[i];
        let running = one.member.session().background.begin(one.member.object());
        let work = running.to_ref();
        if state.phase == Phase::Held {
            work.needless();
        }
        one.request = Some(work);
        (one.member.clone(), running)
    }

    /// Returns how long a quorum of the holds is valid now; zero if the lock is lost or released. A
    /// loss is permanent.
    pub(super) fn valid_for(&self) -> Duration {
        let valid = {
            let state = self.state.lock();
            if state.phase != Phase::Held {
                return Duration::ZERO;
            }
            quorum_valid_for(&state.members)
        };
        if valid.is_zero() {
            // Other owners may need the members that remain for a majority.
            drop(self.end(Phase::Lost));
        }
        valid
    }

    /// Returns how long a quorum still has its leases. Limits may end the holds before.
    pub(super) fn lease_left(&self) -> Duration {
        longest_of_quorum(&self.state.lock().members, MemberHold::lease_left)
    }

    /// Notices that no majority is held any more.
    pub(super) fn check(&self) {
        let _ = self.valid_for();
    }

    /// Returns what is known about each member, and the holds that counted as held. One of them may
    /// be lost since.
    pub(super) fn status(&self) -> (Vec<MemberStatus>, Vec<Arc<Hold>>) {
        let state = self.state.lock();
        let statuses: Vec<_> = state.members.iter().map(MemberHold::status).collect();
        let each = state.members.iter().zip(&statuses);
        let held = each.filter(|(_, status)| **status == MemberStatus::Held);
        let holds = held.filter_map(|(one, _)| one.hold().cloned()).collect();
        (statuses, holds)
    }

    /// Returns the members that are held, and their holds; `None` for the others.
    pub(super) fn held(&self) -> Vec<Option<(Member, HoldRef)>> {
        let held = |one: &MemberHold| {
            let held = one.held.as_ref()?;
            let is_held = one.status() == MemberStatus::Held;
            is_held.then(|| (one.member.clone(), held.hold_ref.clone()))
        };
        self.state.lock().members.iter().map(held).collect()
    }

    /// Adds a member that was acquired again, if it [`counts`] and the lock has not ended. Else it
    /// is released.
    pub(super) fn add(&self, i: usize, granted: HoldGuard, confirmed: &[bool]) {
        let dropped = {
            let state = &mut *self.state.lock();
            let each = state.members.iter().zip(confirmed);
            let held =
                each.map(|(one, confirmed)| *confirmed && one.status() == MemberStatus::Held);
            let held: Vec<_> = held.collect();
            if state.phase == Phase::Held && counts(i, &held) {
                if let Some(limits) = &state.limits {
                    granted.hold().state().period.add_running_limits(limits);
                    let watchdog = &granted.hold_ref.session.watchdog;
                    watchdog.watch(granted.hold());
                }
                let (hold, of) = (granted.hold(), state.members.len());
                tracing::info!(lock = hold.object.full_name(), owner = %hold.field, of,
                    "a member of a RedLock was acquired again");
                state.members[i].held.replace(granted)
            } else {
                Some(granted)
            }
        };
        // What was lost, or has to be released.
        drop(dropped);
        self.changed.notify_waiters();
    }

    /// Sets the final phase, once. Returns the holds of the members, which the caller has to release.
    fn end(&self, phase: Phase) -> Vec<HoldGuard> {
        let (loss, holds) = {
            let state = &mut *self.state.lock();
            if state.phase != Phase::Held {
                return Vec::new();
            }
            state.phase = phase;
            let requests = state.members.iter_mut();
            let requests = requests.filter_map(|one| one.request.take());
            requests.for_each(|work| work.awaited());
            let is_lost = phase == Phase::Lost;
            let loss = is_lost.then(|| state.first_loss()).flatten();
            state.loss = loss.as_ref().map(|(hold, reason)| hold.lost_error(*reason));
            (loss, take_holds(&mut state.members))
        };
        if let Some((hold, loss)) = loss {
            tracing::warn!(lock = hold.object.full_name(), owner = %hold.field, %loss, "lost");
        }
        self.changed.notify_waiters();
        holds
    }

    /// Waits until the lock is lost or released.
    pub(super) async fn ended(&self) {
        let has_ended = || (self.state.lock().phase != Phase::Held).then_some(());
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
            let phase = self.state.lock().phase;
            match phase {
                Phase::Lost => return,
                Phase::Released => std::future::pending().await,
                Phase::Held => {}
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
        let (_, held) = self.status();
        held.len()
    }

    /// Returns the error, if the majority is lost.
    fn loss(&self) -> Option<Error> {
        self.check();
        self.state.lock().loss.clone()
    }

    /// Starts the limits of the request, which begin when a majority is held.
    pub(super) fn start_limits(&self, limits: Option<&HoldLimits>) {
        let state = &mut *self.state.lock();
        state.limits = limits.map(|limits| RunningLimits::start(limits, Instant::now()));
        let held = state.members.iter().filter_map(|one| one.held.as_ref());
        held.for_each(|held| held.start_limits(limits));
    }
}

impl Held for HeldMajority {
    /// Releases the members that granted the lock, concurrently. After their time limit it returns
    /// as soon as the unconfirmed members are too few to withhold a majority from other owners.
    async fn release(self) -> Result<()> {
        let majority = &self.0;
        majority.check();
        let held_members = majority.end(Phase::Released);
        if let Some(lost) = majority.loss() {
            return Err(lost);
        }
        let members = majority.state.lock().members.len();
        let is_lost =
            |one: &&Option<Result<()>>| matches!(one, Some(Err(error)) if error.is_loss());
        let is_kept = |one: &&Option<Result<()>>| !is_lost(one) && !matches!(one, Some(Ok(())));
        let released = |done: &[Option<Result<()>>]| {
            let kept = done.iter().filter(is_kept).count();
            members - kept >= quorum(members)
        };
        let releases = held_members.into_iter().map(HoldGuard::release);
        let done = join_until(releases, released, majority.member_timeout).await;
        // Other owners may have held the members that were lost or that did not grant it.
        let lost = done.iter().filter(is_lost).count();
        let is_held = done.len() - lost >= quorum(members);
        if is_held && released(&done) {
            return Ok(());
        }
        let mut errors = done.into_iter().flatten().filter_map(Result::err);
        let error = errors.find(|error| error.is_loss() != is_held);
        error.map_or(Ok(()), Err)
    }

    fn loss(&self) -> Option<Error> {
        self.0.loss()
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let majority = self.0.clone();
        async move { majority.lost().await }
    }
}

impl HeldForLease for HeldMajority {
    fn valid_for(&self) -> Duration {
        self.0.valid_for()
    }

    fn validity(&self) -> Validity {
        let majority = self.0.clone();
        Arc::new(move || !majority.valid_for().is_zero())
    }

    fn feed(&self) {
        let state = &mut *self.0.state.lock();
        if let Some(limits) = &mut state.limits {
            limits.feed(Instant::now());
        }
        state.holds().for_each(|hold| hold.feed());
    }

    fn owner(&self) -> Owner {
        self.0.owner
    }
}

impl RedGuard {
    /// Returns how many members granted the lock and are known to keep it: at least a quorum. 0 if
    /// the lock is lost, because the members that remain are released then.
    pub fn held_members(&self) -> usize {
        self.held.0.held_members()
    }
}

impl Drop for HeldMajority {
    fn drop(&mut self) {
        drop(self.0.end(Phase::Released));
    }
}

impl std::fmt::Debug for HeldMajority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldMajority")
            .field("owner", &self.0.owner)
            .field("held_members", &self.0.held_members())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
