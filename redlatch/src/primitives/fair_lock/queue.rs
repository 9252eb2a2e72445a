//! The queue of a fair lock's waiters: `queue.lua` in Rust, with the same rules. A waiter is *absent* while its channel
//! has no subscriber.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::name::FairKeys;

/// Maximum number of waiters that one step checks for absence.
const MAX_CHECKED: usize = 1000;

/// Minimum time in milliseconds that an absent head keeps its position after a release: it may be subscribed at a
/// replica, whose subscribers `PUBSUB NUMSUB` does not count.
const REPLICA_SUBSCRIBER_GRACE: i64 = 50;

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
pub(super) struct FairQueue<'a> {
    pub(super) keyspace: &'a mut Keyspace,
    keys: &'a FairKeys,
}

impl<'a> FairQueue<'a> {
    pub(super) fn new(keyspace: &'a mut Keyspace, keys: &'a FairKeys) -> FairQueue<'a> {
        FairQueue { keyspace, keys }
    }

    pub(super) fn now_ms(&mut self) -> i64 {
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

    pub(super) fn owner_at(&mut self, position: usize) -> Result<Option<String>> {
        let owners = self.owners()?;
        Ok(owners.and_then(|owners| owners.get(position).cloned()))
    }

    pub(super) fn last(&mut self) -> Result<Option<String>> {
        Ok(self.owners()?.and_then(|owners| owners.back().cloned()))
    }

    pub(super) fn position_of(&mut self, owner: &str) -> Result<Option<usize>> {
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

    pub(super) fn timeout_of(&mut self, owner: &str) -> Result<Option<i64>> {
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

    pub(super) fn remove(&mut self, position: usize) -> Result<()> {
        let removed = self.owners()?.and_then(|owners| owners.remove(position));
        if let Some(removed) = removed {
            self.remove_timestamp(&self.keys.timeouts, &removed)?;
            self.clear_absence(&removed)?;
        }
        Ok(())
    }

    /// Shifts the timeouts of all waiters from a position in the queue on.
    pub(super) fn shift(&mut self, position: usize, by: i64) -> Result<()> {
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
        if let Some(mut absences) = self.keyspace.find::<BTreeMap<_, _>>(absences)? {
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

    /// Wakes the next owner: the head of the queue, or waiters that do not queue if it is empty.
    /// Returns the head if it did not receive the message.
    pub(super) fn wake_next(&mut self) -> Result<Option<String>> {
        let (Some(head), _) = self.drop_timed_out(None)? else {
            self.wake_unqueued();
            return Ok(None);
        };
        Ok((!self.wake_head()?).then_some(head))
    }

    /// Wakes the next owner after the lock was released when `remaining` milliseconds of its lease
    /// were left. A head that does not receive the message keeps its turn as if the lease had ended
    /// now, but for at least [`RECONNECT_GRACE`].
    pub(super) fn wake_after_release(&mut self, remaining: i64, grace: Lease) -> Result<()> {
        let Some(head) = self.wake_next()? else {
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
