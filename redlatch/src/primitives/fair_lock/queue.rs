//! The queue of a fair lock's waiters: the same as `queue.lua`, in Rust.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::Result;
use crate::lease::Lease;
use crate::name::Place;
use crate::space::Space;

/// Maximum number of waiters that one step checks for absence.
const LOOKED_AT: usize = 1000;

/// Time in milliseconds for a waiter that subscribes at a replica, and is not counted, to take its turn.
const UNCOUNTED: i64 = 50;

/// The absent waiters: see `queue.lua`.
pub(super) struct Absent {
    /// The first waiters, in order.
    pub(super) owners: Vec<String>,
    /// Until when each absent waiter keeps its position.
    pub(super) keeps: BTreeMap<String, i64>,
}

/// Minimum time in milliseconds that a head keeps its turn if it did not receive its message,
/// because it may be reconnecting.
const RECONNECTION: i64 = 1000;

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// The queue of one lock, at one moment.
///
/// The timeout of the head is the lock's end plus its own wait time; that of each further waiter is
/// its own wait time later than the one before it.
pub(super) struct Queue<'a> {
    pub(super) space: &'a mut Space,
    place: &'a Place,
    now: Instant,
}

impl<'a> Queue<'a> {
    pub(super) fn new(space: &'a mut Space, place: &'a Place, now: Instant) -> Queue<'a> {
        Queue { space, place, now }
    }

    pub(super) fn today(&mut self) -> i64 {
        self.space.date(self.now)
    }

    pub(super) fn is_empty(&mut self) -> Result<bool> {
        Ok(self.owners()?.is_none())
    }

    /// Returns the owners in order, if there are any.
    pub(super) fn owners(&mut self) -> Result<Option<&mut VecDeque<String>>> {
        let queue = self.space.find(self.place.queue(), self.now)?;
        Ok(queue.map(|queue| queue.value))
    }

    pub(super) fn at(&mut self, place: usize) -> Result<Option<String>> {
        let owners = self.owners()?;
        Ok(owners.and_then(|owners| owners.get(place).cloned()))
    }

    pub(super) fn last(&mut self) -> Result<Option<String>> {
        Ok(self.owners()?.and_then(|owners| owners.back().cloned()))
    }

    pub(super) fn place_of(&mut self, owner: &str) -> Result<Option<usize>> {
        let owners = self.owners()?;
        Ok(owners.and_then(|owners| owners.iter().position(|waiting| waiting == owner)))
    }

    /// Returns the dates under one of the lock's keys.
    fn dates(&mut self, key: &str) -> Result<Option<&mut BTreeMap<String, i64>>> {
        let dates = self.space.find(key, self.now)?;
        Ok(dates.map(|dates| dates.value))
    }

    fn forget(&mut self, key: &str, owner: &str) -> Result<()> {
        if let Some(dates) = self.dates(key)? {
            dates.remove(owner);
        }
        Ok(())
    }

    pub(super) fn waited_for(&mut self, owner: &str) -> Result<Option<i64>> {
        let timeouts = self.dates(self.place.timeouts())?;
        Ok(timeouts.and_then(|dates| dates.get(owner).copied()))
    }

    pub(super) fn wait_for(&mut self, owner: &str, until: i64) -> Result<()> {
        let timeouts = self.place.timeouts();
        let dates: &mut BTreeMap<_, _> = self.space.find_or_begin(timeouts, self.now)?;
        dates.insert(owner.to_owned(), until);
        Ok(())
    }

    /// Appends an owner. Returns its position.
    pub(super) fn join(&mut self, owner: &str, until: i64) -> Result<usize> {
        let queue = self.place.queue();
        let owners: &mut VecDeque<_> = self.space.find_or_begin(queue, self.now)?;
        owners.push_back(owner.to_owned());
        let place = owners.len() - 1;
        self.wait_for(owner, until)?;
        Ok(place)
    }

    pub(super) fn remove(&mut self, place: usize) -> Result<()> {
        let gone = self.owners()?.and_then(|owners| owners.remove(place));
        if let Some(gone) = gone {
            self.forget(self.place.timeouts(), &gone)?;
            self.is_present(&gone)?;
        }
        Ok(())
    }

    /// Shifts the timeouts of all waiters from a position in the queue on.
    pub(super) fn shift(&mut self, place: usize, by: i64) -> Result<()> {
        let owners = self.owners()?;
        let owners: Vec<_> = owners.map_or_else(Vec::new, |owners| {
            owners.iter().skip(place).cloned().collect()
        });
        for owner in owners {
            let date = self.waited_for(&owner)?.unwrap_or(0);
            self.wait_for(&owner, date.saturating_add(by))?;
        }
        Ok(())
    }

    /// Drops the heads whose time has passed, except the requesting owner, which is alive. Returns
    /// the resulting head, and whether any waiter was dropped.
    pub(super) fn drop_given_up(&mut self, asks: Option<&str>) -> Result<(Option<String>, bool)> {
        let now = self.today();
        let mut dropped = false;
        while let Some(head) = self.at(0)? {
            if asks == Some(&*head) || self.waited_for(&head)?.is_some_and(|until| until > now) {
                return Ok((Some(head), dropped));
            }
            self.remove(0)?;
            dropped = true;
        }
        Ok((None, dropped))
    }

    /// Notes that an owner is connected, or no longer waits.
    pub(super) fn is_present(&mut self, owner: &str) -> Result<()> {
        self.forget(self.place.absent(), owner)
    }

    pub(super) fn is_connected(&self, owner: &str) -> bool {
        self.space.listeners(&self.place.of_owner(owner)) > 0
    }

    fn note(&mut self, owner: &str, keeps: i64) -> Result<()> {
        let dates: &mut BTreeMap<_, _> = self.space.find_or_begin(self.place.absent(), self.now)?;
        dates.insert(owner.to_owned(), keeps);
        Ok(())
    }

    /// Notes which waiters are absent, except the requesting owner.
    pub(super) fn note_absent(&mut self, grace: i64, asks: Option<&str>) -> Result<Absent> {
        let now = self.today();
        let owners: Vec<String> = match self.owners()? {
            Some(owners) => owners.iter().take(LOOKED_AT).cloned().collect(),
            None => Vec::new(),
        };
        let mut keeps = BTreeMap::new();
        for owner in &owners {
            if asks == Some(&**owner) || self.is_connected(owner) {
                self.is_present(owner)?;
                continue;
            }
            let noted = self.dates(self.place.absent())?;
            let until = match noted.and_then(|noted| noted.get(owner).copied()) {
                Some(until) => until,
                None => {
                    self.note(owner, now.saturating_add(grace))?;
                    now.saturating_add(grace)
                }
            };
            keeps.insert(owner.clone(), until);
        }
        // Expires the key even if only Redisson empties the queue.
        let last = match self.last()? {
            Some(last) => self.waited_for(&last)?.unwrap_or(now),
            None => now,
        };
        let lasts = last.saturating_sub(now).max(grace).saturating_add(grace);
        let end = self.now + Duration::from_millis(lasts.unsigned_abs());
        let noted = self
            .space
            .find::<BTreeMap<_, _>>(self.place.absent(), self.now)?;
        if let Some(mut noted) = noted {
            noted.set_end(end);
        }
        Ok(Absent { owners, keeps })
    }

    /// Wakes waiters that do not queue, because they use a handle of another kind. The queue is
    /// empty, so none of its waiters is overtaken.
    pub(super) fn call_others(&mut self) {
        self.space.publish(self.place.channel(), 0);
    }

    /// Wakes one waiter. Returns whether it received the message.
    pub(super) fn call_one(&mut self, owner: &str) -> bool {
        self.space.publish(&self.place.of_owner(owner), 0) > 0
    }

    /// Wakes the head. If it does not receive the message (it has died, or is reconnecting), also
    /// wakes the next waiter, and so on until one receives it: that waiter then learns how long the
    /// others keep their turns. Returns whether the head received the message.
    pub(super) fn call(&mut self) -> Result<bool> {
        let mut place = 0;
        while let Some(owner) = self.at(place)? {
            if self.call_one(&owner) {
                break;
            }
            place += 1;
        }
        Ok(place == 0)
    }

    /// Wakes the next owner: the head of the queue, or waiters that do not queue if it is empty.
    /// Returns the head if it did not receive the message.
    pub(super) fn call_next(&mut self) -> Result<Option<String>> {
        let (Some(head), _) = self.drop_given_up(None)? else {
            self.call_others();
            return Ok(None);
        };
        Ok((!self.call()?).then_some(head))
    }

    /// Wakes the next owner after the lock was released `left` milliseconds before its end. A head
    /// that does not receive the message keeps its turn as if the lock had ended now.
    pub(super) fn call_after_release(&mut self, left: i64, grace: Lease) -> Result<()> {
        let Some(head) = self.call_next()? else {
            return Ok(());
        };
        let noted = self.note_absent(millis(grace.duration()), None)?;
        let earliest = self.today() + UNCOUNTED;
        if noted
            .keeps
            .get(&head)
            .is_some_and(|&keeps| keeps < earliest)
        {
            self.note(&head, earliest)?;
        }
        let Some(before) = self.waited_for(&head)? else {
            return Ok(());
        };
        let earliest = self.today() + RECONNECTION;
        let after = before.saturating_sub(left).max(earliest);
        if after < before {
            self.shift(0, after - before)?;
        }
        Ok(())
    }
}
