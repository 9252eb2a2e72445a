//! The queue of a fair lock's waiters: `queue.lua` in Rust, with the same rules. A waiter is
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
//! - *A grant of another lock.* The locks `a` and `{a}` have one queue. An announcement names its
//!   lock.
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
use crate::keyspace::{FoundKey, Holds, Keyspace};
use crate::lease::Lease;
use crate::name::FairKeys;

/// Maximum number of waiters that one step checks for absence.
const MAX_CHECKED: usize = 1000;

/// Minimum time in milliseconds that an absent head keeps its position after a release: it may be subscribed at a
/// replica, whose subscribers `PUBSUB NUMSUB` does not count.
const REPLICA_SUBSCRIBER_GRACE: i64 = 50;

/// Maximum time in milliseconds after which the head of the queue retries if it is not woken.
pub(super) const MAX_SLEEP: i64 = 5000;

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

/// Access to the queue of one lock, for one step.
///
/// The timeout of the head is the end of the lease plus its own wait time; that of each further waiter
/// is its own wait time later than the one before it.
pub(crate) struct FairQueue<'a> {
    pub(super) keyspace: &'a mut Keyspace,
    keys: &'a FairKeys,
}

impl<'a> FairQueue<'a> {
    pub(crate) fn new(keyspace: &'a mut Keyspace, keys: &'a FairKeys) -> FairQueue<'a> {
        FairQueue { keyspace, keys }
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

    /// Removes the head, which acquires the lock for this lease in milliseconds.
    pub(super) fn take_turn(&mut self, head: &str, lease: i64) -> Result<()> {
        let timeout = self.timeout_of(head)?;
        self.remove(0)?;
        if let Some(timeout) = timeout {
            let lease_end = self.now_ms().saturating_add(lease);
            self.shift(0, lease_end.saturating_sub(timeout))?;
        }
        // The next waiter is the head now: it must learn how long the lock is held. One with an announcement is
        // granted the lock at the release. It wakes by itself before a long lease ends.
        if let Some(next) = self.owner_at(0)?
            && (lease < 2 * MAX_SLEEP || self.announcement(&next)?.is_none())
        {
            self.wake_head()?;
        }
        Ok(())
    }

    /// Announces the lease and the number of an owner's request, so that the lock can be granted to it.
    pub(super) fn announce(&mut self, owner: &str, lease: Lease, number: i64) -> Result<()> {
        let key = &self.keys.announcements;
        let announcements: &mut BTreeMap<_, _> = self.keyspace.find_or_create(key)?;
        let announcement = format!("{}:{number}:{}", lease.millis(), self.keys.object.key());
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

    /// Returns the lease, the number and the key of the lock that an owner has announced.
    fn announcement(&mut self, owner: &str) -> Result<Option<(Lease, i64, String)>> {
        let announcements = self.keyspace.find(&self.keys.announcements)?;
        let announcements = announcements.map(|key: FoundKey<'_, BTreeMap<_, String>>| key.value);
        let announced = announcements.and_then(|announcements| announcements.get(owner));
        Ok(announced.and_then(|announced| {
            let (lease, rest) = announced.split_once(':')?;
            let (number, key) = rest.split_once(':')?;
            let lease = Duration::from_millis(lease.parse().ok()?);
            Some((
                Lease::new(lease).ok()?,
                number.parse().ok()?,
                key.to_owned(),
            ))
        }))
    }

    /// Grants the free lock to the head if it has announced its lease and is connected. The message is the number of
    /// its request, and is published only after the hold was written: the client that receives it holds the lock.
    /// Returns whether the lock was granted. The announcement names the lock, because the locks `a` and `{a}` have the
    /// same queue.
    fn grant(&mut self, head: &str) -> Result<bool> {
        let Some((lease, number, key)) = self.announcement(head)? else {
            return Ok(false);
        };
        if key != self.keys.object.key() || !self.is_connected(head) {
            return Ok(false);
        }
        self.take_turn(head, lease.millis())?;
        let holds = Holds {
            counts: BTreeMap::from([(head.to_owned(), 1)]),
            mode: None,
        };
        self.keyspace
            .set(self.keys.object.key(), holds, Some(lease.duration()));
        self.keyspace
            .publish(&self.keys.waiter_channel(head), number);
        Ok(true)
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
        self.keyspace.publish(self.keys.object.channel(), 0);
    }

    /// Wakes one waiter. Returns whether it received the message.
    pub(super) fn wake_one(&mut self, owner: &str) -> bool {
        self.keyspace.publish(&self.keys.waiter_channel(owner), 0) > 0
    }

    /// Wakes the head. If it does not receive the message (it has died, or is reconnecting), also
    /// wakes the next waiter, and so on until one receives it: that waiter then learns how long the
    /// others keep their turns. Returns whether the head received the message.
    pub(super) fn wake_head(&mut self) -> Result<bool> {
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

    /// Wakes the next owner: the head of the queue, or waiters that do not queue if it is empty. If this step has
    /// released the lock, it is granted to the head if possible. Returns the head if it did not receive the message.
    pub(super) fn wake_next(&mut self, released: bool) -> Result<Option<String>> {
        let (Some(head), _) = self.drop_timed_out(None)? else {
            self.wake_unqueued();
            return Ok(None);
        };
        let received = released && self.grant(&head)? || self.wake_head()?;
        Ok((!received).then_some(head))
    }

    /// Wakes or grants to the next owner after the lock was released when `remaining` milliseconds of its lease
    /// were left. A head that does not receive the message keeps its turn as if the lease had ended
    /// now, but for at least [`RECONNECT_GRACE`].
    pub(super) fn wake_after_release(&mut self, remaining: i64, grace: Lease) -> Result<()> {
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
        if shortened < timeout {
            self.shift(0, shortened - timeout)?;
        }
        Ok(())
    }
}
