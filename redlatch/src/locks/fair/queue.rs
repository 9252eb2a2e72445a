//! The queue of the waiters for a fair object, here a lock: `queue.lua` and `turn.lua` in Rust, with the same rules. A waiter is
//! *absent* while its channel has no subscriber.
//!
//! A release *grants* the lock to the head of the queue in the same script, so a turn takes one
//! trip and one command. A waiter announces the lease and a random number of its latest request.
//! The release writes the hold with that lease, and publishes the number on the waiter's channel. A
//! waiter in Java announces nothing and is woken as by Redisson. So is a waiter with a fixed lease,
//! and each of a client with `ClientBuilder::fair_grants(false)`. What must not happen, and what
//! prevents it:
//!
//! - *A message without a hold.* The script counts the subscribers, writes the hold, and publishes
//!   last. It does not go by the reply of PUBLISH, which omits subscribers at replicas and other
//!   nodes. Mutant `grant-without-receiver`.
//! - *A grant of another lock.* The locks `a` and `{a}` have one queue, and so have a fair semaphore
//!   and a fair read-write lock of one name. An announcement names its object and the kind.
//! - *A grant that is out of date.* The waiter accepts only the number of its own request, if that
//!   is the latest step for its owner and was sent once (`session/acquire`). Each attempt and each
//!   release clears the number first. A message of a former connection grants nothing. Mutants
//!   `grant-of-earlier-request-accepted`, `grant-accepted-after-release`,
//!   `repeated-request-expects-grant`.
//! - *A lease that is longer here than in the store.* It counts from when the request was sent. If
//!   less than a third is left, the waiter sends a request, which finds the hold. Mutant
//!   `grant-counted-from-message`.
//! - *A hold that counts twice.* A request that crosses the message finds the hold, and wants one.
//! - *A leak.* A waiter that gives up sends a release, which grants the lock to the next. A waiter
//!   that hangs while its connection is open has it for one lease.
//! - *A hold that replicas do not have.* If they confirm acquisitions, the waiter still sends a
//!   request.
//! - *A release that grants twice.* Only the step that deletes a hold grants. Its repetition finds
//!   another owner.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::error::Result;
use crate::hold::{AcquireParams, requests};
use crate::keyspace::{FoundKey, Holds, Keyspace};
use crate::lease::{Expiry, Lease};
use crate::locks::fair_shared::holders;
use crate::name::{FairKeys, ObjectKeys};
use crate::step::{Args, args};

/// Maximum number of waiters that one step checks for absence.
const MAX_CHECKED: usize = 1000;

/// Minimum time in milliseconds that an absent head keeps its position after a release: it may be subscribed at a
/// replica, whose subscribers `PUBSUB NUMSUB` does not count.
const REPLICA_SUBSCRIBER_GRACE: i64 = 50;

/// Maximum time in milliseconds after which the head of the queue retries if it is not woken.
const MAX_SLEEP: i64 = 5000;

/// Maximum time in milliseconds before a waiter checks whether the head of a free lock has taken
/// its turn.
const MAX_RESERVATION: i64 = 1000;

/// Additional time per position in the queue, in milliseconds, so that a long queue does not retry
/// all at once.
const STAGGER: i64 = 10;

/// The waiters that one step has checked for absence.
pub(super) struct CheckedWaiters {
    /// The first waiters of the queue, connected or absent, in order: at most [`MAX_CHECKED`].
    pub(super) owners: Vec<String>,
    /// For each absent waiter, the timestamp in milliseconds until which it keeps its position.
    pub(super) kept_until: BTreeMap<String, i64>,
}

/// Minimum time in milliseconds that a head keeps its turn if it did not receive its message,
/// because it may be reconnecting.
const RECONNECT_GRACE: i64 = 1000;

/// Returns the lock's remaining lease in milliseconds; -1 if it never expires. `None` if it is
/// free.
pub(super) fn remaining_ms(keyspace: &mut Keyspace, object: &ObjectKeys) -> Option<i64> {
    keyspace.remaining(object.key()).map(Expiry::millis)
}

/// Access to the queue of one object, for one step.
///
/// The timeout of the head is the end of the lease plus its own wait time; that of each further waiter
/// is its own wait time later than the one before it.
pub(crate) struct FairQueue<'a> {
    pub(super) keyspace: &'a mut Keyspace,
    keys: &'a FairKeys,
    /// How many permits an object has that several owners may hold. `None`: it is a lock, which one owner holds.
    total: Option<u32>,
}

/// A request of an owner that does not hold the object.
#[derive(Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) params: AcquireParams<'a>,
    /// How long the object is kept for this owner when its turn has come.
    pub(crate) wait_time: Lease,
    /// How long absent waiters keep their positions once the head is one of them.
    pub(crate) grace: Lease,
}

impl<'a> Turn<'a> {
    /// Returns the arguments of the script that acquires the object.
    pub(crate) fn args(&self) -> Args<'a> {
        let AcquireParams {
            hold, lease, count, ..
        } = self.params;
        args![
            &*hold.field,
            lease,
            count,
            self.params.waits.then_some(self.wait_time),
            hold.object.channel(),
            self.grace,
            self.params.request_number,
            hold.object.requests_key(),
        ]
    }
}

/// The state of the queue after waiters were dropped.
struct QueueState {
    head: Option<String>,
    /// After how many milliseconds the object is free for the head, or for the requesting owner if there is none. `None`: it is
    /// free.
    left: Option<i64>,
    /// Whether any waiter was dropped.
    dropped: bool,
    /// How long a free object is reserved for the head, in milliseconds.
    reservation: i64,
    /// How long an absent head keeps its position, in milliseconds, if the object is free for it or for the requesting owner.
    kept_for: Option<i64>,
    /// How many waiters before the requesting owner are absent if the head is.
    absent_before: usize,
}

impl<'a> FairQueue<'a> {
    pub(crate) fn new(keyspace: &'a mut Keyspace, keys: &'a FairKeys) -> FairQueue<'a> {
        let total = None;
        FairQueue {
            keyspace,
            keys,
            total,
        }
    }

    /// Returns the queue of an object that several owners may hold: one with so many permits.
    pub(crate) fn shared(
        keyspace: &'a mut Keyspace,
        keys: &'a FairKeys,
        total: u32,
    ) -> FairQueue<'a> {
        let total = Some(total);
        FairQueue {
            keyspace,
            keys,
            total,
        }
    }

    /// Returns after how many milliseconds the object is free for this waiter, unless its holders renew their leases; -1: never.
    /// `None`: it is free now.
    pub(crate) fn left_for(&mut self, field: &str) -> Result<Option<i64>> {
        match self.total {
            None => Ok(remaining_ms(self.keyspace, &self.keys.object)),
            Some(total) => holders::left_for(self.keyspace, &self.keys.object, total, field),
        }
    }

    /// The same for the head of the queue: 0 if there is none.
    pub(crate) fn left_for_head(&mut self) -> Result<i64> {
        match self.owner_at(0)? {
            Some(head) => Ok(self.left_for(&head)?.unwrap_or(0)),
            None => Ok(0),
        }
    }

    pub(crate) fn keyspace(&mut self) -> &mut Keyspace {
        self.keyspace
    }

    /// Makes a waiter, for which the object is free, a holder.
    pub(crate) fn hold(&mut self, field: &str, lease: Lease) -> Result<()> {
        let object = &self.keys.object;
        match self.total {
            None => {
                let holds = Holds {
                    counts: BTreeMap::from([(field.to_owned(), 1)]),
                    mode: None,
                };
                let lease = Some(lease.duration());
                self.keyspace.set(object.key(), holds, lease);
                Ok(())
            }
            Some(total) => {
                let lease = Some(lease);
                holders::set(self.keyspace, object, total, (field, 1), lease)
            }
        }
    }

    pub(crate) fn now_ms(&mut self) -> i64 {
        self.keyspace.now_ms()
    }

    pub(super) fn is_empty(&mut self) -> Result<bool> {
        Ok(self.owners()?.is_none())
    }

    /// Returns the owners in order, if there are any.
    pub(super) fn owners(&mut self) -> Result<Option<&mut VecDeque<String>>> {
        let queue = self.keyspace.find(&self.keys.queue)?;
        Ok(queue.map(|queue| queue.value))
    }

    pub(crate) fn owner_at(&mut self, position: usize) -> Result<Option<String>> {
        let owners = self.owners()?;
        Ok(owners.and_then(|owners| owners.get(position).cloned()))
    }

    pub(super) fn last(&mut self) -> Result<Option<String>> {
        Ok(self.owners()?.and_then(|owners| owners.back().cloned()))
    }

    pub(crate) fn position_of(&mut self, owner: &str) -> Result<Option<usize>> {
        let owners = self.owners()?;
        Ok(owners.and_then(|owners| owners.iter().position(|waiting| waiting == owner)))
    }

    /// Returns the timestamps under one of the lock's keys.
    fn timestamps(&mut self, key: &str) -> Result<Option<&mut BTreeMap<String, i64>>> {
        let timestamps = self.keyspace.find(key)?;
        Ok(timestamps.map(|timestamps| timestamps.value))
    }

    fn timestamp_of(&mut self, key: &str, owner: &str) -> Result<Option<i64>> {
        let timestamps = self.timestamps(key)?;
        Ok(timestamps.and_then(|timestamps| timestamps.get(owner).copied()))
    }

    fn set_timestamp(&mut self, key: &str, owner: &str, timestamp: i64) -> Result<()> {
        let timestamps: &mut BTreeMap<_, _> = self.keyspace.find_or_create(key)?;
        timestamps.insert(owner.to_owned(), timestamp);
        Ok(())
    }

    fn remove_timestamp(&mut self, key: &str, owner: &str) -> Result<()> {
        if let Some(timestamps) = self.timestamps(key)? {
            timestamps.remove(owner);
        }
        Ok(())
    }

    pub(crate) fn timeout_of(&mut self, owner: &str) -> Result<Option<i64>> {
        self.timestamp_of(&self.keys.timeouts, owner)
    }

    pub(super) fn set_timeout(&mut self, owner: &str, timeout: i64) -> Result<()> {
        self.set_timestamp(&self.keys.timeouts, owner, timeout)
    }

    /// Appends an owner. Returns its position.
    pub(super) fn push(&mut self, owner: &str, timeout: i64) -> Result<usize> {
        let owners: &mut VecDeque<_> = self.keyspace.find_or_create(&self.keys.queue)?;
        owners.push_back(owner.to_owned());
        let position = owners.len() - 1;
        self.set_timeout(owner, timeout)?;
        Ok(position)
    }

    /// Makes an owner that is not in the queue its head.
    pub(crate) fn push_front(&mut self, owner: &str, timeout: i64) -> Result<()> {
        let owners: &mut VecDeque<_> = self.keyspace.find_or_create(&self.keys.queue)?;
        owners.push_front(owner.to_owned());
        self.set_timeout(owner, timeout)
    }

    pub(crate) fn remove(&mut self, position: usize) -> Result<()> {
        let removed = self.owners()?.and_then(|owners| owners.remove(position));
        if let Some(removed) = removed {
            self.remove_timestamp(&self.keys.timeouts, &removed)?;
            self.clear_absence(&removed)?;
            self.clear_announcement(&removed)?;
        }
        Ok(())
    }

    /// The head acquires the object and leaves the queue. The waits of the others count from the time when it is free for the
    /// next one, which is returned.
    fn take_turn(&mut self, head: &str, lease: Lease) -> Result<Option<String>> {
        let timeout = self.timeout_of(head)?;
        self.remove(0)?;
        self.hold(head, lease)?;
        let next = self.owner_at(0)?;
        if let (Some(next), Some(timeout)) = (&next, timeout) {
            let left = self.left_for(next)?.unwrap_or(0);
            let free_at = self.now_ms().saturating_add(left);
            self.shift(0, free_at.saturating_sub(timeout))?;
        }
        Ok(next)
    }

    /// Returns the object as announcements name it.
    fn announced_object(&self) -> String {
        let key = self.keys.object.key();
        match self.total {
            None => key.to_owned(),
            Some(total) => [holders::mode_of(total), ":", key].concat(),
        }
    }

    /// Announces the lease and the number of an owner's request, so that the lock can be granted to it.
    pub(super) fn announce(&mut self, owner: &str, lease: Lease, number: i64) -> Result<()> {
        let key = &self.keys.announcements;
        let object = self.announced_object();
        let announcement = format!("{}:{number}:{object}", lease.millis());
        let announcements: &mut BTreeMap<_, _> = self.keyspace.find_or_create(key)?;
        announcements.insert(owner.to_owned(), announcement);
        // Redisson does not know this key. The expiry removes it if Redisson clients empty the queue.
        if let Some(mut key) = self.keyspace.find::<BTreeMap<String, String>>(key)? {
            key.extend_to(lease.duration());
        }
        Ok(())
    }

    pub(super) fn clear_announcement(&mut self, owner: &str) -> Result<()> {
        let announcements = self.keyspace.find(&self.keys.announcements)?;
        if let Some(announcements) = announcements {
            let announcements: &mut BTreeMap<String, String> = announcements.value;
            announcements.remove(owner);
        }
        Ok(())
    }

    /// Returns the lease, the number and the object that an owner has announced.
    fn announcement(&mut self, owner: &str) -> Result<Option<(Lease, i64, String)>> {
        let announcements = self.keyspace.find(&self.keys.announcements)?;
        let announcements = announcements.map(|key: FoundKey<'_, BTreeMap<_, String>>| key.value);
        let announced = announcements.and_then(|announcements| announcements.get(owner));
        Ok(announced.and_then(|announced| {
            let (lease, rest) = announced.split_once(':')?;
            let (number, object) = rest.split_once(':')?;
            let lease = Duration::from_millis(lease.parse().ok()?);
            Some((
                Lease::new(lease).ok()?,
                number.parse().ok()?,
                object.to_owned(),
            ))
        }))
    }

    /// Serves the queue from its head on: grants the object to each waiter for which it is free, if the waiter has announced
    /// its lease and is connected. The message is the number of its request, and is published only after the hold was
    /// written: the client that receives it holds the object. Wakes the first one that has to request it. Returns that one
    /// if it did not receive the message. `lease`: of the owner that has just acquired the object, if this step did that.
    fn serve(
        &mut self,
        mut head: Option<String>,
        mut lease: Option<Lease>,
    ) -> Result<Option<String>> {
        while let Some(next) = head {
            let announced = self.announcement(&next)?;
            if self.left_for(&next)?.is_some() {
                // It must learn how long the object is held. With an announcement it is granted the object later, and it
                // wakes by itself before a long lease ends.
                let is_short = |lease: Lease| lease.millis() < 2 * MAX_SLEEP;
                if lease.is_some_and(|lease| is_short(lease) || announced.is_none()) {
                    self.wake_head()?;
                }
                return Ok(None);
            }
            let granted = announced
                .filter(|(_, _, it)| *it == self.announced_object() && self.is_connected(&next));
            let Some((asked, number, _)) = granted else {
                return Ok((!self.wake_head()?).then_some(next));
            };
            head = self.take_turn(&next, asked)?;
            lease = Some(asked);
            let channel = self.keys.waiter_channel(&next);
            self.keyspace.publish(&channel, number);
        }
        Ok(None)
    }

    /// Shifts the timeouts of all waiters from a position in the queue on.
    pub(crate) fn shift(&mut self, position: usize, by: i64) -> Result<()> {
        let owners = self.owners()?;
        let owners: Vec<_> = owners.map_or_else(Vec::new, |owners| {
            owners.iter().skip(position).cloned().collect()
        });
        for owner in owners {
            let timestamp = self.timeout_of(&owner)?.unwrap_or(0);
            self.set_timeout(&owner, timestamp.saturating_add(by))?;
        }
        Ok(())
    }

    /// Removes heads of the queue while their timeout has passed, except the requesting owner, which is alive. Returns
    /// the resulting head, and whether any waiter was dropped.
    pub(super) fn drop_timed_out(
        &mut self,
        requester: Option<&str>,
    ) -> Result<(Option<String>, bool)> {
        let now = self.now_ms();
        let mut dropped = false;
        while let Some(head) = self.owner_at(0)? {
            if requester == Some(&*head) || self.timeout_of(&head)?.is_some_and(|until| until > now)
            {
                return Ok((Some(head), dropped));
            }
            self.remove(0)?;
            dropped = true;
        }
        Ok((None, dropped))
    }

    /// Records that an owner is connected, or no longer waits.
    pub(super) fn clear_absence(&mut self, owner: &str) -> Result<()> {
        self.remove_timestamp(&self.keys.absent_waiters, owner)
    }

    pub(super) fn is_connected(&self, owner: &str) -> bool {
        self.keyspace
            .subscriber_count(&self.keys.waiter_channel(owner))
            > 0
    }

    fn set_absence(&mut self, owner: &str, kept_until: i64) -> Result<()> {
        self.set_timestamp(&self.keys.absent_waiters, owner, kept_until)
    }

    /// Records which of the first waiters are absent, except the requesting owner.
    pub(super) fn record_absences(
        &mut self,
        grace: i64,
        requester: Option<&str>,
    ) -> Result<CheckedWaiters> {
        let now = self.now_ms();
        let owners: Vec<String> = match self.owners()? {
            Some(owners) => owners.iter().take(MAX_CHECKED).cloned().collect(),
            None => Vec::new(),
        };
        let mut kept_until = BTreeMap::new();
        for owner in &owners {
            if requester == Some(&**owner) || self.is_connected(owner) {
                self.clear_absence(owner)?;
                continue;
            }
            let until = match self.timestamp_of(&self.keys.absent_waiters, owner)? {
                Some(until) => until,
                None => {
                    self.set_absence(owner, now.saturating_add(grace))?;
                    now.saturating_add(grace)
                }
            };
            kept_until.insert(owner.clone(), until);
        }
        // Redisson does not know this key. The expiry removes it if Redisson clients empty the queue.
        let last_timeout = match self.last()? {
            Some(last) => self.timeout_of(&last)?.unwrap_or(now),
            None => now,
        };
        let time_to_live = last_timeout
            .saturating_sub(now)
            .max(grace)
            .saturating_add(grace);
        let absences = &self.keys.absent_waiters;
        if let Some(mut absences) = self.keyspace.find::<BTreeMap<_, i64>>(absences)? {
            absences.expire_after(Duration::from_millis(time_to_live.unsigned_abs()));
        }
        Ok(CheckedWaiters { owners, kept_until })
    }

    /// Wakes waiters that do not queue, because they use a handle of another kind. The queue is
    /// empty, so none of its waiters is overtaken.
    pub(super) fn wake_unqueued(&mut self) {
        if self.total.is_none() {
            self.keyspace.publish(self.keys.object.channel(), 0);
        }
    }

    /// Wakes one waiter. Returns whether it received the message.
    pub(super) fn wake_one(&mut self, owner: &str) -> bool {
        self.keyspace.publish(&self.keys.waiter_channel(owner), 0) > 0
    }

    /// Wakes the head. If it does not receive the message (it has died, or is reconnecting), also
    /// wakes the next waiter, and so on until one receives it: that waiter then learns how long the
    /// others keep their turns. Returns whether the head received the message.
    pub(crate) fn wake_head(&mut self) -> Result<bool> {
        let mut position = 0;
        while let Some(owner) = self.owner_at(position)? {
            if self.wake_one(&owner) {
                break;
            }
            position += 1;
        }
        Ok(position == 0)
    }

    /// Wakes the next owner, without changing the queue.
    pub(super) fn wake_waiting(&mut self) -> Result<()> {
        if self.is_empty()? {
            self.wake_unqueued();
            return Ok(());
        }
        self.wake_head().map(drop)
    }

    /// Wakes the next owner: the head of the queue, or waiters that do not queue if it is empty. If this step has freed the
    /// object for the head, it is granted if possible. Returns the head if it did not receive the message.
    pub(crate) fn wake_next(&mut self, freed: bool) -> Result<Option<String>> {
        let (Some(head), _) = self.drop_timed_out(None)? else {
            self.wake_unqueued();
            return Ok(None);
        };
        match freed {
            true => self.serve(Some(head), None),
            false => Ok((!self.wake_head()?).then_some(head)),
        }
    }

    /// Wakes or grants to the next owner after the object was released, `remaining` milliseconds before it would have been
    /// free for it. A head that does not receive the message keeps its turn as if the lease had ended
    /// now, but for at least [`RECONNECT_GRACE`].
    pub(crate) fn wake_after_release(&mut self, remaining: i64, grace: Lease) -> Result<()> {
        let first = self.owner_at(0)?;
        let Some(head) = self.wake_next(true)? else {
            return Ok(());
        };
        let checked = self.record_absences(grace.millis(), None)?;
        let min_kept_until = self.now_ms() + REPLICA_SUBSCRIBER_GRACE;
        if checked
            .kept_until
            .get(&head)
            .is_some_and(|&kept_until| kept_until < min_kept_until)
        {
            self.set_absence(&head, min_kept_until)?;
        }
        let Some(timeout) = self.timeout_of(&head)? else {
            return Ok(());
        };
        let min_timeout = self.now_ms() + RECONNECT_GRACE;
        let shortened = timeout.saturating_sub(remaining).max(min_timeout);
        // If the object was granted to a waiter before this one, the timeout does not include the released lease.
        if first == Some(head) && shortened < timeout {
            self.shift(0, shortened - timeout)?;
        }
        Ok(())
    }

    /// Acquires the object for an owner, if it is the owner's turn. Otherwise the owner joins the queue, if it waits. Returns the
    /// milliseconds after which it retries at the latest; `None`: it holds the object.
    pub(crate) fn acquire_in_turn(&mut self, turn: Turn<'_>) -> Result<Option<i64>> {
        let AcquireParams {
            hold, lease, waits, ..
        } = turn.params;
        let owner = &*hold.field;
        // The store may have granted it the object before, and its client not have seen that until the hold ended.
        let requests = hold.object.requests_key();
        requests::remove(self.keyspace, Some(&requests), owner);
        let state = self.drop_dead_waiters(turn)?;
        let is_turn = state.head.as_deref().is_none_or(|head| head == owner);
        if state.left.is_none() && is_turn {
            match state.head {
                None => self.hold(owner, lease)?,
                Some(_) => {
                    let next = self.take_turn(owner, lease)?;
                    self.serve(next, Some(lease))?;
                }
            }
            return Ok(None);
        }
        if state.dropped && state.head.as_deref() != Some(owner) {
            self.wake_head()?;
        }
        if !waits {
            return Ok(Some(state.left.unwrap_or(0)));
        }
        self.enqueue(turn, state).map(Some)
    }

    /// Removes an owner from the queue, and moves the timeouts of the waiters behind it to an earlier time. Returns the position
    /// that it had, if it was there.
    pub(crate) fn leave(&mut self, owner: &str) -> Result<Option<usize>> {
        // Also if Redisson has removed the owner from the queue.
        self.clear_announcement(owner)?;
        let Some(position) = self.position_of(owner)? else {
            return Ok(None);
        };
        let timeout = self.timeout_of(owner)?;
        let earlier_timeout = match position.checked_sub(1) {
            None => {
                // An error: another program has overwritten the object's key.
                let left = self.left_for(owner).unwrap_or(None).unwrap_or(0).max(0);
                Some(self.now_ms().saturating_add(left))
            }
            Some(position) => match self.owner_at(position)? {
                // The time of a dead waiter may have passed.
                Some(earlier) => self.timeout_of(&earlier)?.map(|it| it.max(self.now_ms())),
                None => None,
            },
        };
        self.remove(position)?;
        if let (Some(earlier_timeout), Some(timeout)) = (earlier_timeout, timeout)
            && earlier_timeout < timeout
        {
            self.shift(position, earlier_timeout - timeout)?;
        }
        Ok(Some(position))
    }

    /// Drops each head whose timeout has passed, and on a free lock each head that was absent for
    /// its grace period.
    fn drop_dead_waiters(&mut self, turn: Turn<'_>) -> Result<QueueState> {
        let owner = &*turn.params.hold.field;
        let grace = turn.grace.millis();
        // The requesting owner is connected, even if it was absent before.
        self.clear_absence(owner)?;
        let (head, dropped) = self.drop_timed_out(Some(owner))?;
        let left = self.left_for(head.as_deref().unwrap_or(owner))?;
        let mut state = QueueState {
            head,
            left,
            dropped,
            reservation: grace.min(MAX_RESERVATION),
            kept_for: None,
            absent_before: 0,
        };
        // An object that several owners may hold can be free for this owner, but not for the head.
        let free = left.is_none() || self.left_for(owner)?.is_none();
        let Some(head) = state.head.as_deref().filter(|&head| free && head != owner) else {
            return Ok(state);
        };
        if self.is_connected(head) {
            return Ok(state);
        }
        let now = self.now_ms();
        let checked = self.record_absences(grace, Some(owner))?;
        // Drops absent heads, then finds the new head: the first waiter that is connected or within
        // its grace period.
        let mut dropped_timeout = None;
        state.head = None;
        for waiter in checked.owners {
            let kept_until = checked.kept_until.get(&waiter).copied();
            let is_head = state.head.is_none();
            if is_head && kept_until.is_some_and(|kept_until| kept_until <= now) {
                dropped_timeout = self.timeout_of(&waiter)?.or(dropped_timeout);
                self.remove(0)?;
                state.dropped = true;
                continue;
            }
            if is_head && let Some(kept_until) = kept_until {
                let kept_for = kept_until - now;
                state.reservation = state.reservation.min(kept_for);
                state.kept_for = Some(kept_for);
            }
            let is_requester = waiter == owner;
            state.head.get_or_insert(waiter);
            if is_requester {
                break;
            }
            // Behind a connected head, a step that drops no waiter does not look at the others.
            state.absent_before += usize::from(kept_until.and(state.kept_for).is_some());
        }
        if state.head.is_none() {
            // One step checks only the first waiters; all of them were dropped.
            state.head = self.owner_at(0)?;
        }
        if let Some(dropped_timeout) = dropped_timeout.filter(|&timeout| timeout > now) {
            // Shift as if the dropped waiters had given up.
            self.shift(0, now - dropped_timeout)?;
        }
        state.left = self.left_for(state.head.as_deref().unwrap_or(owner))?;
        Ok(state)
    }

    /// Appends the owner to the queue unless it is already there. Returns the milliseconds after
    /// which it retries at the latest.
    fn enqueue(&mut self, turn: Turn<'_>, state: QueueState) -> Result<i64> {
        let owner = &*turn.params.hold.field;
        let wait = turn.wait_time.millis();
        let now = self.now_ms();
        let remaining = state.left;
        let lock_end = now.saturating_add(remaining.unwrap_or(0));
        let position = self.position_of(owner)?;
        if let Some(head) = &state.head
            && remaining.is_none()
            && position.is_some()
            && !state.dropped
        {
            // This waiter retries and the head has not taken its turn: the head may have missed its
            // message.
            self.wake_one(head);
        }
        let mut position = match position {
            Some(0) => {
                // A head that retries is alive: its timeout is extended, and those of the others by
                // as much. Not at every retry: only if less than half of the wait time is left.
                match self.timeout_of(owner)? {
                    None => self.set_timeout(owner, lock_end.saturating_add(wait))?,
                    Some(timeout) if (timeout - lock_end).saturating_mul(2) < wait => {
                        self.shift(0, lock_end.saturating_add(wait) - timeout)?;
                    }
                    Some(_) => {}
                }
                0
            }
            Some(position) => position,
            None => {
                let from = match self.last()? {
                    Some(last) => self.timeout_of(&last)?.unwrap_or(lock_end).max(lock_end),
                    None => lock_end,
                };
                self.push(owner, from.saturating_add(wait))?
            }
        };
        match turn.params.request_number {
            0 => self.clear_announcement(owner)?,
            number => self.announce(owner, turn.params.lease, number)?,
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
        // head has had time to take its turn. Or when an absent head is dropped, behind which the object
        // is free for this one.
        let distance =
            i64::try_from(position.saturating_sub(state.absent_before)).unwrap_or(i64::MAX);
        let base = match remaining {
            None => state.reservation,
            Some(left) => left.min(state.kept_for.unwrap_or(left)),
        };
        let retry_after = wait.min(base.saturating_add(distance.saturating_mul(STAGGER)));
        let mut retry_after = retry_after.min(max_sleep);
        // It also retries when the waiter before it times out. If that waiter's timeout was lost,
        // the one before that counts, and so on.
        let mut earlier_timeout = None;
        while position > 0 && earlier_timeout.is_none() {
            position -= 1;
            if let Some(earlier) = self.owner_at(position)? {
                earlier_timeout = self.timeout_of(&earlier)?;
            }
        }
        if let Some(earlier_timeout) = earlier_timeout.filter(|&timeout| timeout > now) {
            retry_after = retry_after.min(earlier_timeout - now);
        }
        Ok(retry_after)
    }
}
