//! Those who wait for a fair lock, in order: the same as `queue.lua`, beside it.

use std::collections::{BTreeMap, VecDeque};

use tokio::time::Instant;

use crate::error::Result;
use crate::name::Place;
use crate::space::Space;

/// How long a head that does not hear its call is waited for at least: it may only be being
/// connected again.
const RECONNECTION: i64 = 1000;

/// The queue of one lock, at one moment.
///
/// The head is waited for until the lock's end and its own wait time have passed, each further one
/// for its own wait time longer than the one before it.
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

    /// The owners in order, if there are any.
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

    fn dates(&mut self) -> Result<Option<&mut BTreeMap<String, i64>>> {
        let dates = self.space.find(self.place.timeouts(), self.now)?;
        Ok(dates.map(|dates| dates.value))
    }

    pub(super) fn waited_for(&mut self, owner: &str) -> Result<Option<i64>> {
        Ok(self.dates()?.and_then(|dates| dates.get(owner).copied()))
    }

    pub(super) fn wait_for(&mut self, owner: &str, until: i64) -> Result<()> {
        let timeouts = self.place.timeouts();
        let dates: &mut BTreeMap<_, _> = self.space.find_or_begin(timeouts, self.now)?;
        dates.insert(owner.to_owned(), until);
        Ok(())
    }

    /// Joins the tail: at which place.
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
        if let Some(gone) = gone
            && let Some(dates) = self.dates()?
        {
            dates.remove(&gone);
        }
        Ok(())
    }

    /// Moves the timeouts of everybody from a place in the queue on.
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

    /// Drops the heads whose time has passed, except who asks: it is alive. The head that there is
    /// then, and whether anybody was dropped.
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

    /// Calls who waits for the lock without queueing, through a handle of another kind: nobody in the
    /// queue is passed over, because there is nobody.
    pub(super) fn call_others(&mut self) {
        self.space.publish(self.place.channel(), 0);
    }

    /// Calls the head. Should it not hear (it has died, or is being connected again), also the next
    /// one, and so on until somebody does: that one then knows how long the others are waited for.
    /// Whether the head heard.
    pub(super) fn call(&mut self) -> Result<bool> {
        let mut place = 0;
        while let Some(owner) = self.at(place)? {
            if self.space.publish(&self.place.of_owner(&owner), 0) > 0 {
                break;
            }
            place += 1;
        }
        Ok(place == 0)
    }

    /// The lock was given back so many milliseconds before its end: the head's turn, or that of those
    /// who do not queue, if there is none. One that does not hear is waited for as if the lock had ended just now.
    pub(super) fn call_after_release(&mut self, left: i64) -> Result<()> {
        let (Some(head), _) = self.drop_given_up(None)? else {
            self.call_others();
            return Ok(());
        };
        if self.call()? {
            return Ok(());
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
