//! Acquires all members or none, and waits for the member that blocks while holding nothing.
//!
//! 1. Split the members, in their global order, into batches that one script can acquire. If a
//!    member already has a local queue of waiters, go to 4 with that member.
//! 2. Acquire the batches one after the other, without waiting for locks. If all succeed, return
//!    them.
//! 3. If a member is held by another owner, release everything that this attempt acquired.
//! 4. Wait in that member's queue. When it is this request's turn, start over at 2; from now on the
//!    attempt that reaches the member also subscribes to its channel and registers as its waiter.
//! 5. If another member blocks this time, leave the queue, pause if the request has just come from
//!    another queue, and go to 4 with that member.
//!
//! No deadlock: no request holds a lock *while waiting* for another, so waiters form no cycle.
//!
//! No livelock: during an attempt, a request may briefly hold some locks and thereby refuse another
//! attempt. All requests acquire the locks in the same order. Of all locks that are held so
//! briefly, consider the last one in that order: its holder can only be refused by an owner that
//! has acquired all of its locks. So attempts cannot make each other fail forever. They can refuse
//! each other many times while a later lock is held for long, and delay those that wait for an
//! earlier one. So a request that goes from queue to queue in a short time pauses in between, for
//! longer each time.

use std::future::{Future as _, poll_fn};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use super::acquire_all::{Part, acquire_all, alone};
use super::held::{HeldMember, release_all};
use crate::backoff::Backoff;
use crate::client_registry::RegisteredWait;
use crate::error::{Error, Result};
use crate::hold::PeriodId;
use crate::join::Boxed;
use crate::lease::Lease;
use crate::locks::HoldGuard;
use crate::session::{AllOrNone, HoldRef, RequestedHold};
use crate::several::{Member, check_stores};
use crate::step::Outcome;
use crate::store::Progress;
use crate::wait::{Place, Request, WaitQueues};

/// Maximum number of locks that one script acquires, so that it does not block the server.
const MAX_BATCH: usize = 100;

/// Pauses of a request that goes from queue to queue.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// A request that has been in a queue for longer than this has waited there.
const QUICK_SWITCH: Duration = Duration::from_secs(1);

/// One acquisition of several locks in progress.
pub(super) struct MultiLockRequest<'a> {
    all: &'a [Member],
    members: Vec<RequestedMember<'a>>,
    progress: &'a Progress,
    /// The member that is waited for; the request is in its queue.
    blocking_member: Option<usize>,
    /// Whether the store may remember this request as a waiter of that member.
    store_may_know_waiter: bool,
    /// Whether a step that requests that member is in flight.
    member_in_flight: bool,
    /// Whether the latest attempt acquired all members.
    acquired_all: bool,
    /// Number of pauses since the request has been waiting for that member.
    tries: u32,
    /// When the request last switched to another member's queue, and how often it did so shortly
    /// before.
    last_switch: Option<(Instant, u32)>,
    /// Set while an attempt runs: what the owner acquires then, it acquires through this request.
    attempt_runs: Arc<AtomicBool>,
}

/// A member, with the request for the owner's hold. Its limits begin when all members are held.
struct RequestedMember<'a> {
    member: &'a Member,
    requested: RequestedHold<'a>,
}

impl<'a> RequestedMember<'a> {
    /// Returns the request of an attempt that `waits` for this member, or not.
    fn request(&self, waits: bool) -> RequestedHold<'a> {
        RequestedHold {
            waits,
            ..self.requested
        }
    }
}

/// Returns the acquisition of a member as a part of a step for several, if it can be one.
fn part<'a>(requested: &RequestedHold<'a>, held: u32) -> Option<Part<'a>> {
    let hold = &*requested.hold_ref.hold;
    Some(Part {
        name: hold.object.name(),
        undo: hold.kind.undo(hold, held)?,
        acquire: requested.step(held),
    })
}

impl<'a> MultiLockRequest<'a> {
    /// Both slices list the same locks, in order.
    pub(super) fn new(
        all: &'a [Member],
        hold_refs: &'a [HoldRef],
        lease: Option<Lease>,
        progress: &'a Progress,
    ) -> MultiLockRequest<'a> {
        let both = all.iter().zip(hold_refs);
        let members: Vec<_> = both
            .map(|(member, hold_ref)| RequestedMember {
                member,
                requested: RequestedHold::without_waiting(
                    &*member.lock.kind,
                    hold_ref,
                    member.terms(lease),
                ),
            })
            .collect();
        MultiLockRequest {
            progress,
            all,
            members,
            blocking_member: None,
            store_may_know_waiter: false,
            member_in_flight: false,
            acquired_all: false,
            tries: 0,
            last_switch: None,
            attempt_runs: Arc::default(),
        }
    }

    /// Returns the first member with a local queue of waiters, except members for which the owner
    /// must not wait behind them: see `HoldRef::hold_period`.
    fn first_queued_member(&self) -> Option<usize> {
        self.members.iter().position(|one| {
            let (requested, waiting) = (&one.requested, &one.member.session().waiting);
            let object = requested.hold_ref.hold.object.identity();
            waiting.channels.has_queue(requested.channel(), object)
                && requested.hold_ref.hold_period().is_none()
        })
    }

    /// Returns the member in whose queue the request is; the first one if it is in none.
    fn waited_for(&self) -> &RequestedMember<'a> {
        &self.members[self.blocking_member.unwrap_or_default()]
    }

    /// Waits for another member from now on, and removes the store's record of this waiter at the
    /// previous member. If an attempt is in flight, the step that settles it does so.
    fn switch_to(&mut self, other: Option<usize>) {
        let left = self.waited_for().request(true);
        let is_settled = self.member_in_flight && self.progress.was_sent();
        if !is_settled {
            left.remove_waiter(self.store_may_know_waiter);
        }
        (self.store_may_know_waiter, self.member_in_flight) = (false, false);
        self.blocking_member = other;
        self.tries = 0;
    }

    /// Pauses if the request has just come from another member's queue, too.
    async fn pause_before_switch(&mut self) {
        let quick_switches = match self.last_switch {
            Some((at, quick_switches)) if at.elapsed() < QUICK_SWITCH => quick_switches + 1,
            _ => 0,
        };
        if let Some(pauses) = quick_switches.checked_sub(1) {
            let all = Backoff::exponential(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
            tokio::time::sleep(all.pause(pauses)).await;
        }
        self.last_switch = Some((Instant::now(), quick_switches));
    }

    /// Tries once. If a member blocks, nothing is held.
    async fn try_all(&mut self, subscribe: bool) -> Result<AllOrNone<HeldMember>> {
        let _running = AttemptRuns::begin(&self.attempt_runs);
        let mut was_refused = false;
        loop {
            let in_slots = self.members_in_slots();
            match self.try_batches(subscribe).await {
                // A store has slots, and has refused keys of several.
                Err(_) if self.members_in_slots() > in_slots => {}
                Err(Error::WriteWhileReading { .. })
                    if !std::mem::replace(&mut was_refused, true)
                        && !self.owner_reads().await? => {}
                Ok(blocked @ AllOrNone::Blocked(..)) => {
                    return check_stores(self.all).map(|()| blocked);
                }
                tried => return tried,
            }
        }
    }

    /// Returns whether the owner reads a member whose write side it requests: see [`HoldRef::owner_reads`].
    async fn owner_reads(&self) -> Result<bool> {
        for one in &self.members {
            if one.requested.hold_ref.owner_reads().await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the number of members whose stores have slots, as far as is known.
    fn members_in_slots(&self) -> usize {
        let slots = self.members.iter().filter_map(|one| one.member.slot());
        slots.count()
    }

    async fn try_batches(&mut self, subscribe: bool) -> Result<AllOrNone<HeldMember>> {
        self.acquired_all = false;
        let mut held_members = Vec::with_capacity(self.members.len());
        for batch in batches(&self.members) {
            let requests_member = self.blocking_member.is_some_and(|i| batch.contains(&i));
            // Before the step is sent, the store cannot remember this request.
            self.member_in_flight = requests_member;
            let result = self.acquire_batch(batch.clone(), subscribe).await;
            self.member_in_flight = false;
            self.store_may_know_waiter |= requests_member && self.progress.was_sent();
            let refused = match result {
                Ok(AllOrNone::Acquired(tokens)) => {
                    for (one, token) in self.members[batch].iter().zip(tokens) {
                        let RequestedHold {
                            hold_ref, terms, ..
                        } = one.requested;
                        let held = HoldGuard::new(hold_ref.clone(), terms);
                        held_members.push(HeldMember { held, token });
                    }
                    continue;
                }
                Ok(AllOrNone::Blocked(i, left)) => Ok(AllOrNone::Blocked(batch.start + i, left)),
                Err(error) => Err(error),
            };
            let _ = release_all(held_members).await;
            return refused;
        }
        self.store_may_know_waiter = false;
        self.acquired_all = true;
        Ok(AllOrNone::Acquired(held_members))
    }

    /// Acquires one batch. If `subscribe` is set, subscribes first to the channel of the member
    /// that is waited for.
    async fn acquire_batch(&self, batch: Range<usize>, subscribe: bool) -> Result<AllOrNone<u64>> {
        let members = batch.clone().zip(&self.members[batch.clone()]);
        let holds: Vec<_> = members
            .map(|(i, one)| one.request(self.blocking_member == Some(i)))
            .collect();
        let blocking = holds.iter().find(|requested| subscribe && requested.waits);
        let channel = blocking.map(RequestedHold::channel);
        let step = |held: &[u32]| match (held, &*holds) {
            (&[held], [requested]) => alone(requested.step(held)),
            _ => {
                let parts = holds.iter().zip(held);
                acquire_all(parts.filter_map(|(one, &held)| part(one, held)).collect())
            }
        };
        let blocked = |reply: &AllOrNone<u64>| match reply {
            AllOrNone::Acquired(_) => None,
            AllOrNone::Blocked(i, _) => Some(*i),
        };
        let session = self.members[batch.start].member.session();
        session
            .try_acquire(&holds, channel, self.progress, step, blocked)
            .await
    }
}

/// Returns the batches of adjacent members that one script can acquire: of one client, so also in
/// one store, and of one slot there.
fn batches(members: &[RequestedMember<'_>]) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut before: Option<&Member> = None;
    for (i, one) in members.iter().enumerate() {
        let (member, hold) = (one.member, &*one.requested.hold_ref.hold);
        // A member without an undo step is acquired by itself.
        let composes = hold.kind.undo(hold, 0).is_some();
        let joins = |last: &Member| {
            composes
                && Arc::ptr_eq(last.session(), member.session())
                && last.slot() == member.slot()
        };
        match batches.last_mut() {
            Some(batch) if batch.len() < MAX_BATCH && before.is_some_and(joins) => {
                batch.end = i + 1
            }
            _ => batches.push(i..i + 1),
        }
        before = composes.then_some(member);
    }
    batches
}

/// Waits until the owner has a hold period that started after `since`, through an acquisition other
/// than the current attempt.
async fn held_through_another(
    hold_ref: &HoldRef,
    since: Option<PeriodId>,
    attempt_runs: &AtomicBool,
) {
    let mut held = pin!(hold_ref.held_after(since));
    poll_fn(|cx| {
        if attempt_runs.load(Ordering::Relaxed) {
            // Polled again after the attempt has ended: it runs in the same task, before this.
            return Poll::Pending;
        }
        held.as_mut().poll(cx)
    })
    .await;
}

/// Marks an attempt as running until it ends or is dropped.
struct AttemptRuns(Arc<AtomicBool>);

impl AttemptRuns {
    fn begin(attempt_runs: &Arc<AtomicBool>) -> AttemptRuns {
        attempt_runs.store(true, Ordering::Relaxed);
        AttemptRuns(attempt_runs.clone())
    }
}

impl Drop for AttemptRuns {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Request for MultiLockRequest<'_> {
    /// All members, or the one that blocks now, for which the request does not wait.
    type Acquired = AllOrNone<HeldMember>;

    /// In the queue of the member that blocks.
    fn place(&self) -> Place<'_> {
        let RequestedHold { kind, hold_ref, .. } = self.waited_for().requested;
        Place {
            queue: kind.spec().queue,
            // Members may be in other stores.
            fails_alone: true,
            ..Place::new(
                kind.channel(&hold_ref.hold),
                hold_ref.hold.object.identity(),
            )
        }
    }

    async fn acquire(
        &mut self,
        _: &WaitQueues,
        waits: bool,
    ) -> Result<Option<AllOrNone<HeldMember>>> {
        for one in &self.members {
            one.requested.hold_ref.settle_sibling().await;
        }
        let mut since = None;
        let mut blocking = self.first_queued_member().filter(|_| waits);
        loop {
            let Some(i) = blocking else {
                self.switch_to(None);
                since = Some(PeriodId::latest());
                match self.try_all(false).await? {
                    AllOrNone::Blocked(i, _) if waits => blocking = Some(i),
                    done => return Ok(Some(done)),
                }
                continue;
            };
            self.switch_to(Some(i));
            let RequestedMember { member, requested } = self.members[i];
            let attempt_runs = self.attempt_runs.clone();
            let result = tokio::select! {
                biased;
                result = member.session().waiting.acquire_through_queue(self) => result?,
                // Bypasses the queue: see `HoldRef::hold_period`.
                () = held_through_another(requested.hold_ref, since, &attempt_runs) => {
                    blocking = None;
                    continue;
                }
            };
            match result {
                AllOrNone::Blocked(i, _) => {
                    self.switch_to(None);
                    self.pause_before_switch().await;
                    blocking = Some(i);
                }
                done => return Ok(Some(done)),
            }
        }
    }

    async fn send(&mut self, subscribe: bool) -> Result<Outcome<AllOrNone<HeldMember>>> {
        Ok(match self.try_all(subscribe).await? {
            AllOrNone::Blocked(i, left) if self.blocking_member == Some(i) => Outcome::Wait(left),
            done => Outcome::Done(done),
        })
    }

    fn progress(&self) -> &Progress {
        self.progress
    }

    fn excludes_waiters_for(&self) -> Option<Duration> {
        let RequestedHold {
            hold_ref, terms, ..
        } = self.waited_for().requested;
        let excludes = self.acquired_all && hold_ref.hold.excludes_waiters();
        excludes.then(|| terms.lease.duration())
    }

    fn pause(&mut self) -> Option<Duration> {
        self.tries = self.tries.saturating_add(1);
        self.waited_for().requested.kind.pause(self.tries - 1)
    }

    fn registrar(&self) -> impl FnOnce(Instant) -> Option<RegisteredWait> + Send + 'static {
        self.waited_for().requested.hold_ref.registrar()
    }

    fn reporter(&self) -> impl FnOnce(Instant) -> Boxed<'static, ()> + Send + 'static {
        let RequestedMember { member, requested } = self.waited_for();
        let (lock, waiting) = (member.lock.clone(), requested.hold_ref.hold.clone());
        |since| lock.report(waiting, since)
    }
}

impl Drop for MultiLockRequest<'_> {
    fn drop(&mut self) {
        self.switch_to(None);
    }
}
