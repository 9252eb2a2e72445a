//! Elections for threads.

use std::future::IntoFuture as _;
use std::time::Duration;

use super::Blocking;
use super::forward::forward;
use super::polled::Polled;
use crate::error::Result;
use crate::inspect::Waiter;
use crate::{Leader, OwnerId};

/// A handle of an election: [`crate::Election`].
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
/// let election = client.election("scheduler");
/// let leadership = election.campaign("10.0.0.7:8080").block()?;
/// let leader = election.leader()?.expect("a leader");
/// assert_eq!((leader.epoch, &*leader.value), (leadership.epoch(), "10.0.0.7:8080"));
/// leadership.resign()
/// # }
/// ```
pub type Election = Blocking<crate::Election>;

/// Waits until this candidate leads: [`crate::Campaign`]. The candidate does not belong to the thread.
pub type Campaign = Blocking<crate::Campaign>;

/// The term of a leader: [`crate::Leadership`]. It may be moved to another thread.
pub type Leadership = Blocking<crate::Leadership>;

forward! { [Election] "crate::Election" {
    get name() -> &str;
    new campaign(value: impl Into<String>) -> Campaign;
    run leader() -> Option<Leader>;
    run candidates() -> Vec<Waiter>;
    run advance_epoch(at_least: u64) -> u64;
    run ask() -> Option<OwnerId>;
    run revoke(limit: Duration) -> Option<OwnerId>;
    run released_by(owner: OwnerId, wait: Duration) -> bool;
} }

impl Election {
    /// Returns the changes of the leader, starting with the current one: [`crate::Election::observe`].
    pub fn observe(&self) -> Observer {
        Observer(Polled::new(self.inner.observe(), &self.worker))
    }
}

forward! { [Campaign] "crate::Campaign" {
    get owner_id() -> &OwnerId;
    set outage_limit(limit: impl Into<Option<Duration>>);
    set note(note: impl Into<String>);
} }

impl Campaign {
    /// Blocks until this candidate leads.
    pub fn block(self) -> Result<Leadership> {
        let inner = self.worker.run(self.inner.into_future())??;
        Ok(Blocking {
            inner,
            worker: self.worker,
        })
    }
}

forward! { [Leadership] "crate::Leadership" {
    get epoch() -> u64;
    get owner_id() -> &OwnerId;
    get is_valid() -> bool;
    get valid_for() -> Duration;
} }

impl Leadership {
    /// Blocks until it is lost, at most this long: [`crate::Leadership::lost`]. Returns whether it is lost.
    pub fn lost(&self, wait: Duration) -> Result<bool> {
        let is_lost = self.worker.completes_within(wait, self.inner.lost())?;
        Ok(is_lost || !self.is_valid())
    }

    /// Blocks until another client asks the leader to resign, at most this long:
    /// [`crate::Leadership::asked`]. Returns whether it has asked.
    pub fn asked(&self, wait: Duration) -> Result<bool> {
        self.worker.completes_within(wait, self.inner.asked())
    }

    /// Replaces the value that observers see: [`crate::Leadership::proclaim`].
    pub fn proclaim(&self, value: impl Into<String>) -> Result<()> {
        self.worker.run(self.inner.proclaim(value))?
    }

    /// Ends the leadership: [`crate::Leadership::resign`].
    pub fn resign(self) -> Result<()> {
        self.worker.run(self.inner.resign())?
    }

    /// Ends the leadership in favor of a candidate: [`crate::Leadership::resign_to`].
    pub fn resign_to(self, candidate: &OwnerId) -> Result<()> {
        let candidate = candidate.clone();
        let inner = self.inner;
        self.worker
            .run(async move { inner.resign_to(&candidate).await })?
    }
}

/// The leader of an election and its changes: [`crate::Observer`], as an iterator, which blocks until the leader changes and
/// never ends. Only the end of the process stops a thread that waits for a change.
#[derive(Debug)]
pub struct Observer(Polled<crate::Observer>);

impl Iterator for Observer {
    type Item = Result<Option<Leader>>;

    fn next(&mut self) -> Option<Result<Option<Leader>>> {
        self.0.next()
    }
}
