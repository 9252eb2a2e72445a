//! The fair lock's steps: those of the lock, with a queue of waiters.
//!
//! State: the lock's hash; the queue, a list of the waiting owners, the oldest first; two maps from
//! owner to timestamp: until when its turn is kept (its timeout), and until when an absent waiter
//! keeps its position; and the lease and number of the latest request of each waiter that accepts a
//! grant.
//!
//! * Acquire: an owner that holds the lock re-enters it, regardless of the queue. Otherwise, first
//!   drop each head whose timeout has passed. If the lock is free and the head is absent (no
//!   connection subscribes to its channel), record all absent waiters, and drop absent heads whose
//!   grace period has passed.
//! * If the lock is free and the owner is the head, or the queue is empty, the owner acquires the
//!   lock. Shift the timeouts of the others, so that they count from the end of the new lease, and
//!   wake the new head, so that it learns that end, unless it accepts a grant.
//! * Otherwise, if the request waits, the owner joins the tail (`try_lock` does not). Its timeout
//!   is that of the last waiter (the end of the lease if the queue is empty) plus its wait time.
//!   The reply is the time after which it retries if it is not woken.
//! * Release: if the head accepts a grant and is connected, write its hold, and publish the number
//!   of its latest request to it. Otherwise wake it. If it does not receive the message, wake the
//!   next waiters until one does. In that case also record which waiters are absent, and shift the
//!   timeouts, so that they count from now instead of from the end of the lease.
//! * Giving up removes the owner from the queue, shifts the timeouts of the waiters behind it, and
//!   wakes the next waiter if the owner was the head.

use std::sync::Arc;

use super::queue::{FairQueue, MAX_SLEEP};
use crate::error::Result;
use crate::hold::{AcquireParams, requests};
use crate::hold::{Hold, ReleaseParams, Renewed};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::{Expiry, Lease};
use crate::locks::reentrant::rules::{
    self as reentrant, parse_outcome, set_hold_count, try_acquire, wait_outcome, was_deleted,
};
use crate::locks::rules::{is_held, parse_forced};
use crate::name::{FairKeys, ObjectKeys};
use crate::step::{Outcome, Script, ScriptReply, Step, args, script};

/// Returns the keys in the scripts' order: the lock, the queue, the timeouts, the absent waiters,
/// the announcements.
fn all_keys(keys: &FairKeys) -> [&str; 5] {
    [
        keys.object.key(),
        &keys.queue,
        &keys.timeouts,
        &keys.absent_waiters,
        &keys.announcements,
    ]
}

/// Maximum time in milliseconds before a waiter checks whether the head of a free lock has taken
/// its turn.
const MAX_RESERVATION: i64 = 1000;

/// Additional time per position in the queue, in milliseconds, so that a long queue does not retry
/// all at once.
const STAGGER: i64 = 10;

/// Returns the lock's remaining lease in milliseconds; -1 if it never expires. `None` if it is
/// free.
fn remaining_ms(keyspace: &mut Keyspace, object: &ObjectKeys) -> Option<i64> {
    match keyspace.remaining(object.key())? {
        Expiry::Never => Some(-1),
        Expiry::In(left) => Some(i64::try_from(left.as_millis()).unwrap_or(i64::MAX)),
    }
}

/// The state of the queue after waiters were dropped.
struct QueueState {
    head: Option<String>,
    /// Whether any waiter was dropped.
    dropped: bool,
    /// How long a free lock is reserved for the head, in milliseconds.
    reservation: i64,
    /// How many waiters before the requesting owner are absent.
    absent_before: usize,
}

/// Acquires the lock for an owner whose turn it is, or returns when to retry. If the request waits,
/// the owner joins the queue.
#[derive(Clone, Copy)]
pub(super) struct Acquire<'a> {
    pub(super) params: AcquireParams<'a>,
    pub(super) keys: &'a FairKeys,
    /// How long the lock is kept for this owner when its turn has come.
    pub(super) wait_time: Lease,
    /// How long absent waiters keep their positions once the head is one of them.
    pub(super) grace: Lease,
}

impl<'a> Acquire<'a> {
    pub(super) fn step(self) -> Step<'a, Outcome> {
        let AcquireParams { hold, lease, .. } = self.params;
        let wait_time = self.params.waits.then_some(self.wait_time);
        let args = args![
            &*hold.field,
            lease,
            self.params.count,
            wait_time,
            hold.object.channel(),
            self.grace,
            self.params.request_number,
        ];
        Step::new(
            script!("../expire.lua", "queue.lua", "acquire.lua"),
            all_keys(self.keys),
            args,
            |reply| parse_outcome(&hold.object, reply),
            move |keyspace| self.apply(keyspace),
        )
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Outcome> {
        let AcquireParams { hold, count, .. } = self.params;
        let (object, owner) = (&*hold.object, &*hold.field);
        let ignores_queue =
            |holds: &Holds| holds.mode.is_some() || holds.counts.contains_key(owner);
        let held = keyspace.find::<Holds>(object.key())?;
        // Without the queue: a re-entry (refused if its hold was lost meanwhile), and a read-write
        // lock's key (an error).
        if count > 1 || held.is_some_and(|held| ignores_queue(held.value)) {
            return try_acquire(keyspace, self.params);
        }
        let left = remaining_ms(keyspace, object);
        if left == Some(-1) {
            // A key that never expires is not a lock: this returns the error.
            return wait_outcome(object, Expiry::Never);
        }
        let mut queue = FairQueue::new(keyspace, self.keys);
        let state = self.drop_dead_waiters(&mut queue, left.is_none())?;
        let (head, dropped) = (&state.head, state.dropped);
        if left.is_none() && head.as_deref().is_none_or(|head| head == owner) {
            if head.is_some() {
                queue.take_turn(owner, self.params.lease.millis())?;
            }
            return try_acquire(keyspace, self.params);
        }
        if dropped && head.as_deref() != Some(owner) {
            queue.wake_head()?;
        }
        if !self.params.waits {
            return wait_outcome(object, Expiry::from_millis(left.unwrap_or(0)));
        }
        let retry_after = self.enqueue(&mut queue, left, state)?;
        wait_outcome(object, Expiry::from_millis(retry_after))
    }

    /// Drops each head whose timeout has passed, and on a free lock each head that was absent for
    /// its grace period.
    fn drop_dead_waiters(&self, queue: &mut FairQueue<'_>, free: bool) -> Result<QueueState> {
        let owner = &*self.params.hold.field;
        let grace = self.grace.millis();
        let mut state = QueueState {
            head: None,
            dropped: false,
            reservation: grace.min(MAX_RESERVATION),
            absent_before: 0,
        };
        if queue.is_empty()? {
            return Ok(state);
        }
        // The requesting owner is connected, even if it was absent before.
        queue.clear_absence(owner)?;
        (state.head, state.dropped) = queue.drop_timed_out(Some(owner))?;
        let Some(head) = state.head.as_deref().filter(|&head| free && head != owner) else {
            return Ok(state);
        };
        if queue.is_connected(head) {
            return Ok(state);
        }
        let now = queue.now_ms();
        let checked = queue.record_absences(grace, Some(owner))?;
        // Drops absent heads, then finds the new head: the first waiter that is connected or within
        // its grace period.
        let mut dropped_timeout = None;
        state.head = None;
        for waiter in checked.owners {
            let kept_until = checked.kept_until.get(&waiter).copied();
            let is_head = state.head.is_none();
            if is_head && kept_until.is_some_and(|kept_until| kept_until <= now) {
                dropped_timeout = queue.timeout_of(&waiter)?.or(dropped_timeout);
                queue.remove(0)?;
                state.dropped = true;
                continue;
            }
            if is_head && let Some(kept_until) = kept_until {
                state.reservation = state.reservation.min(kept_until - now);
            }
            let is_requester = waiter == owner;
            state.head.get_or_insert(waiter);
            if is_requester {
                break;
            }
            state.absent_before += usize::from(kept_until.is_some());
        }
        if state.head.is_none() {
            // One step checks only the first waiters; all of them were dropped.
            state.head = queue.owner_at(0)?;
        }
        if let Some(dropped_timeout) = dropped_timeout.filter(|&timeout| timeout > now) {
            // Shift as if the dropped waiters had given up.
            queue.shift(0, now - dropped_timeout)?;
        }
        Ok(state)
    }

    /// Appends the owner to the queue unless it is already there. Returns the milliseconds after
    /// which it retries at the latest. `remaining`: the remaining lease in milliseconds; `None` if
    /// the lock is free.
    fn enqueue(
        &self,
        queue: &mut FairQueue<'_>,
        remaining: Option<i64>,
        state: QueueState,
    ) -> Result<i64> {
        let owner = &*self.params.hold.field;
        let wait = self.wait_time.millis();
        let now = queue.now_ms();
        let lock_end = now.saturating_add(remaining.unwrap_or(0));
        let position = queue.position_of(owner)?;
        if let Some(head) = &state.head
            && remaining.is_none()
            && position.is_some()
            && !state.dropped
        {
            // This waiter retries and the head has not taken its turn: the head may have missed its
            // message.
            queue.wake_one(head);
        }
        let mut position = match position {
            Some(0) => {
                // A head that retries is alive: its timeout is extended, and those of the others by
                // as much. Not at every retry: only if less than half of the wait time is left.
                match queue.timeout_of(owner)? {
                    None => queue.set_timeout(owner, lock_end.saturating_add(wait))?,
                    Some(timeout) if (timeout - lock_end).saturating_mul(2) < wait => {
                        queue.shift(0, lock_end.saturating_add(wait) - timeout)?;
                    }
                    Some(_) => {}
                }
                0
            }
            Some(position) => position,
            None => {
                let from = match queue.last()? {
                    Some(last) => queue.timeout_of(&last)?.unwrap_or(lock_end).max(lock_end),
                    None => lock_end,
                };
                queue.push(owner, from.saturating_add(wait))?
            }
        };
        match self.params.request_number {
            0 => queue.clear_announcement(owner)?,
            number => queue.announce(owner, self.params.lease, number)?,
        }
        // FLUSHALL deletes the queue as well, and then no step knows which waiter to wake. So every
        // waiter retries regularly. Later waiters retry less often, so that a long queue does not
        // flood the server with requests.
        let ahead = i64::try_from(position).unwrap_or(i64::MAX);
        let max_sleep = MAX_SLEEP.saturating_add(ahead.saturating_mul(STAGGER));
        if position == 0 {
            return Ok(remaining.unwrap_or(0).min(max_sleep));
        }
        // A waiter is woken when its turn comes. If no client wakes it, because the holder or the
        // waiters before it died, it retries when the lease ends, or, if the lock is free, when the
        // head has had time to take its turn.
        let distance =
            i64::try_from(position.saturating_sub(state.absent_before)).unwrap_or(i64::MAX);
        let base = remaining.unwrap_or(state.reservation);
        let retry_after = wait.min(base.saturating_add(distance.saturating_mul(STAGGER)));
        let mut retry_after = retry_after.min(max_sleep);
        // It also retries when the waiter before it times out. If that waiter's timeout was lost,
        // the one before that counts, and so on.
        let mut earlier_timeout = None;
        while position > 0 && earlier_timeout.is_none() {
            position -= 1;
            if let Some(earlier) = queue.owner_at(position)? {
                earlier_timeout = queue.timeout_of(&earlier)?;
            }
        }
        if let Some(earlier_timeout) = earlier_timeout.filter(|&timeout| timeout > now) {
            retry_after = retry_after.min(earlier_timeout - now);
        }
        Ok(retry_after)
    }
}

/// Sets an owner's hold count to the number of holds to keep. 0 releases the lock, and removes the
/// owner from the queue if it is still there from waiting. Replies whether the owner held the lock.
pub(super) fn release<'a>(
    keys: &'a FairKeys,
    params: ReleaseParams<'a>,
    grace: Lease,
) -> Step<'a, bool> {
    let ReleaseParams { hold, keep, lease } = params;
    let requests = params.requests_key();
    let args = args![
        &*hold.field,
        hold.object.channel(),
        keep,
        lease,
        grace,
        // The script of the election has further arguments behind it.
        requests.clone().unwrap_or_default(),
    ];
    let apply = move |keyspace: &mut Keyspace| {
        let (object, owner) = (&*hold.object, &*hold.field);
        requests::remove(keyspace, requests.as_deref(), owner);
        let left = remaining_ms(keyspace, object);
        // The owner leaves the queue first, because the rest fails if another program has
        // overwritten the lock's key.
        let waited = keep == 0 && leave_queue(&mut FairQueue::new(keyspace, keys), owner, left)?;
        let held = set_hold_count(keyspace, params)?;
        let mut queue = FairQueue::new(keyspace, keys);
        if held && keep == 0 {
            queue.wake_after_release(left.unwrap_or(0), grace)?;
        } else if left.is_none() && !waited {
            // The lock was deleted (FLUSHALL, DEL) or expired: no release wakes the waiters.
            queue.wake_next(false)?;
        }
        Ok(held)
    };
    let script = script!("../expire.lua", "queue.lua", "release.lua");
    Step::new(script, all_keys(keys), args, ScriptReply::flag, apply)
}

/// Grants the lock to the head of the queue, or wakes it, if the lock is free: another kind of lock
/// with the same key was released, whose steps do not look at the queue.
pub(crate) fn serve_queue<'a>(object: Arc<ObjectKeys>) -> Step<'a, ()> {
    let keys = FairKeys::of(object);
    Step::new(
        script!("../expire.lua", "queue.lua", "serve.lua"),
        all_keys(&keys).map(str::to_owned),
        args![keys.object.channel().to_owned()],
        |_| Ok(()),
        move |keyspace| {
            let is_free = !keyspace.exists(keys.object.key());
            let mut queue = FairQueue::new(keyspace, &keys);
            if is_free && !queue.is_empty()? {
                queue.wake_next(true)?;
            }
            Ok(())
        },
    )
}

/// A script of the re-entrant lock that wakes the next waiter of the queue.
macro_rules! waking_script {
    ($($path:literal),+) => {{
        static SCRIPT: Script = Script::new(concat!(
            // A local, because `wake.lua` assigns to it.
            "local KEYS = KEYS\n",
            include_str!("../expire.lua"),
            include_str!("queue.lua"),
            include_str!("wake.lua"),
            $(include_str!($path)),+
        ));
        &SCRIPT
    }};
}

/// Returns the script that renews the leases of many locks.
pub(super) fn renew_script() -> &'static Script {
    waking_script!("../../hold/requests.lua", "../reentrant/renew.lua")
}

/// Returns the script that puts a successor in the place of the owner.
pub(super) fn handoff_script() -> &'static Script {
    waking_script!("../../hold/fair_waiters.lua", "../reentrant/handoff.lua")
}

/// Renews one lock, as the script does. If the lock was deleted, wakes the next waiter instead.
pub(super) fn renew(
    keyspace: &mut Keyspace,
    keys: &FairKeys,
    hold: &Hold,
    lease: Option<Lease>,
) -> Result<Renewed> {
    let renewed = reentrant::renew(keyspace, hold, lease)?;
    if was_deleted(keyspace, renewed.is_held(), &hold.object) {
        FairQueue::new(keyspace, keys).wake_waiting()?;
    }
    Ok(renewed)
}

/// Removes the owner from the queue, and moves the timeouts of the waiters behind it to an earlier
/// time. Returns whether it was waiting. `remaining`: the remaining lease in milliseconds, negative
/// if it never ends; `None` if the lock is free.
fn leave_queue(queue: &mut FairQueue<'_>, owner: &str, remaining: Option<i64>) -> Result<bool> {
    // Also if Redisson has removed the owner from the queue.
    queue.clear_announcement(owner)?;
    let Some(position) = queue.position_of(owner)? else {
        return Ok(false);
    };
    let timeout = queue.timeout_of(owner)?;
    let earlier_timeout = match position.checked_sub(1) {
        None => Some(queue.now_ms().saturating_add(remaining.unwrap_or(0).max(0))),
        Some(position) => match queue.owner_at(position)? {
            Some(earlier) => queue.timeout_of(&earlier)?,
            None => None,
        },
    };
    queue.remove(position)?;
    if let (Some(earlier_timeout), Some(timeout)) = (earlier_timeout, timeout)
        && earlier_timeout < timeout
    {
        queue.shift(position, earlier_timeout - timeout)?;
    }
    if position == 0 || remaining.is_none() {
        // This owner may have used up the wake-up of the last release, also in place of absent
        // owners before it: pass it to the next waiter.
        if remaining.is_none() && queue.is_empty()? {
            queue.wake_unqueued();
        } else {
            queue.wake_head()?;
        }
    }
    Ok(true)
}

/// Releases the lock whichever owner holds it. Replies whether it was held.
pub(super) fn force(keys: &FairKeys, grace: Lease) -> Step<'_, bool> {
    Step::new(
        script!("../expire.lua", "queue.lua", "force.lua"),
        all_keys(keys),
        args![keys.object.channel(), grace],
        |reply| parse_forced(&keys.object, reply),
        move |keyspace| {
            let held = is_held(keyspace, &keys.object)?;
            if held {
                let left = remaining_ms(keyspace, &keys.object).unwrap_or(0);
                keyspace.remove(keys.object.key());
                let mut queue = FairQueue::new(keyspace, keys);
                queue.wake_after_release(left, grace)?;
                if !queue.is_empty()? {
                    // Only the head was woken. The lock may be that of an election, whose observers
                    // are not in the queue.
                    queue.wake_unqueued();
                }
            }
            Ok(held)
        },
    )
}
