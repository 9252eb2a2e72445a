//! One critical section, from the request to the release.

use super::event::{EventKind, Request};
use crate::clock::Time;

/// What happened in the section.
#[derive(Debug, Clone)]
pub struct Section {
    pub process: usize,
    pub request: Request,
    pub requested: Time,
    /// When the request was answered in any way.
    pub answered: Option<Time>,
    /// Why the lock was not acquired.
    pub failed: Option<String>,
    /// When the lock had been acquired.
    pub acquired: Option<Time>,
    pub token: Option<u64>,
    /// The hold count of its owner, read right after the acquisition.
    pub holds: Option<u32>,
    /// The count of a latch after it was counted down.
    pub count: Option<u64>,
    /// The last time at which the guard is known to have been valid.
    pub valid_until: Option<Time>,
    /// The end of the lease that the guard last reported.
    pub deadline: Option<Time>,
    /// The store keeps the hold at least until then, unless it is released.
    pub kept_until: Option<Time>,
    /// When the loss was reported.
    pub loss_reported: Option<Time>,
    /// Whether the guard reported that it is valid after the loss was reported.
    pub valid_after_loss: bool,
    pub accepted: u32,
    pub refused: u32,
    pub release_started: Option<Time>,
    pub released: Option<Time>,
    pub unlock_error: Option<String>,
}

impl Section {
    pub fn new(process: usize, requested: Time, request: Request) -> Section {
        Section {
            process,
            request,
            requested,
            answered: None,
            failed: None,
            acquired: None,
            token: None,
            holds: None,
            count: None,
            valid_until: None,
            deadline: None,
            kept_until: None,
            loss_reported: None,
            valid_after_loss: false,
            accepted: 0,
            refused: 0,
            release_started: None,
            released: None,
            unlock_error: None,
        }
    }

    /// Records an event of the section. Returns whether it was the last one.
    pub(super) fn record(&mut self, t: Time, what: EventKind) -> bool {
        match what {
            EventKind::Acquired { token, holds } => {
                (self.answered, self.acquired) = (Some(t), Some(t));
                (self.token, self.holds) = (token, holds);
            }
            EventKind::CountedDown { left } => {
                (self.answered, self.acquired) = (Some(t), Some(t));
                self.count = Some(left);
            }
            EventKind::NotAcquired => self.answered = Some(t),
            EventKind::Failed { error } => (self.answered, self.failed) = (Some(t), Some(error)),
            EventKind::Valid { until, at_least } => {
                self.valid_after_loss |= self.loss_reported.is_some();
                self.valid_until = Some(t);
                self.deadline = self.deadline.max(Some(until));
                self.kept_until = self.kept_until.max(Some(at_least));
            }
            EventKind::LossReported => self.loss_reported = Some(t),
            EventKind::Wrote { accepted: true } => self.accepted += 1,
            EventKind::Wrote { accepted: false } => self.refused += 1,
            EventKind::Releasing => self.release_started = Some(t),
            EventKind::Released { error } => (self.released, self.unlock_error) = (Some(t), error),
            EventKind::Ready
            | EventKind::Stalled { .. }
            | EventKind::Requested(_)
            | EventKind::Leftover { .. }
            | EventKind::Done => {}
        }
        self.released.is_some() || (self.answered.is_some() && self.acquired.is_none())
    }

    /// Returns the time in which the guard is known to have been valid.
    pub fn valid_span(&self) -> Option<(Time, Time)> {
        let (acquired, until) = (self.acquired?, self.valid_until?);
        (acquired < until).then_some((acquired, until))
    }

    /// Returns the time in which waiters may have to wait for it, as far as its holder knows.
    pub fn held_span(&self) -> Option<(Time, Time)> {
        let acquired = self.acquired?;
        let end = if self.was_lost() {
            self.valid_until
        } else {
            self.released
                .max(self.release_started)
                .max(self.valid_until)
        };
        Some((acquired, end.unwrap_or(acquired)))
    }

    /// Returns whether it was lost while it was held.
    pub fn was_lost(&self) -> bool {
        let lost = |error: &String| error.starts_with("Lost");
        self.loss_reported.is_some() || self.unlock_error.as_ref().is_some_and(lost)
    }

    /// Returns whether both are acquisitions of one owner, which may have several guards of one hold.
    pub fn same_owner(&self, other: &Section) -> bool {
        let owner = |one: &Section| {
            one.request
                .owner
                .map(|owner| (one.process, one.request.client, owner))
        };
        owner(self).is_some() && owner(self) == owner(other)
    }

    pub fn requester(&self) -> String {
        let Request {
            task,
            client,
            owner,
            ..
        } = &self.request;
        let owner = owner.map(|owner| format!(" owner {owner}"));
        let owner = owner.unwrap_or_default();
        format!(
            "process {} client {client}{owner} task {task}",
            self.process
        )
    }
}
