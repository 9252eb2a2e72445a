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

use super::queue::{FairQueue, Turn, remaining_ms};
use crate::error::Result;
use crate::hold::{Hold, ReleaseParams, Renewed, requests};
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
pub(crate) fn all_keys(keys: &FairKeys) -> [&str; 5] {
    [
        keys.object.key(),
        &keys.queue,
        &keys.timeouts,
        &keys.absent_waiters,
        &keys.announcements,
    ]
}

/// Acquires the lock for an owner whose turn it is, or returns when to retry. If the request waits,
/// the owner joins the queue.
pub(super) fn acquire<'a>(keys: &'a FairKeys, turn: Turn<'a>) -> Step<'a, Outcome> {
    let hold = turn.params.hold;
    Step::new(
        script!("../expire.lua", "queue.lua", "turn.lua", "acquire.lua"),
        all_keys(keys),
        turn.args(),
        |reply| parse_outcome(&hold.object, reply),
        move |keyspace| {
            let (object, owner) = (&*hold.object, &*hold.field);
            let ignores_queue =
                |holds: &Holds| holds.mode.is_some() || holds.counts.contains_key(owner);
            let held = keyspace.find::<Holds>(object.key())?;
            // Without the queue: a re-entry (refused if its hold was lost meanwhile), and a read-write
            // lock's key (an error).
            if turn.params.count > 1 || held.is_some_and(|held| ignores_queue(held.value)) {
                return try_acquire(keyspace, turn.params);
            }
            if remaining_ms(keyspace, object) == Some(-1) {
                // A key that never expires is not a lock: this returns the error.
                return wait_outcome(object, Expiry::Never);
            }
            match FairQueue::new(keyspace, keys).acquire_in_turn(turn)? {
                None => Ok(Outcome::ACQUIRED),
                Some(retry_after) => wait_outcome(object, Expiry::from_millis(retry_after)),
            }
        },
    )
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
        let mut queue = FairQueue::new(keyspace, keys);
        let position = match keep {
            0 => queue.leave(owner)?,
            _ => None,
        };
        if position == Some(0) || position.is_some() && left.is_none() {
            // The message that woke this owner, also in place of absent owners before it, is now meant for the next
            // waiter.
            if left.is_none() && queue.is_empty()? {
                queue.wake_unqueued();
            } else {
                queue.wake_head()?;
            }
        }
        let held = set_hold_count(keyspace, params)?;
        let mut queue = FairQueue::new(keyspace, keys);
        if held && keep == 0 {
            queue.wake_after_release(left.unwrap_or(0), grace)?;
        } else if left.is_none() && position.is_none() {
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
