//! One critical section, from the request to the release.

use super::event::{EventKind, Limits, Mode, Request};
use crate::clock::Time;

/// The ticket that the hold of a section became, or what keeps the lock after its release, for a
/// minimum time.
#[derive(Debug, Clone)]
pub struct MadeTicket {
    /// `None`: no client can adopt it.
    pub text: Option<String>,
    /// The store keeps its hold at least until then, unless a client adopts it.
    pub kept_until: Time,
    /// The same without renewals: an adoption that fails may give the hold back with the first
    /// lease.
    pub kept_first: Time,
    /// When the first adoption or release was requested.
    pub requested: Option<Time>,
    /// When the first adoption had succeeded.
    pub adopted: Option<Time>,
    /// Whether an adoption has failed: then the ticket may get the hold back at any time.
    pub may_get_back: bool,
    /// If no adoption succeeds, the lock is free then at the latest.
    pub free_at: Time,
}

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
    /// When the holder fed the hold for the last time.
    pub fed: Option<Time>,
    /// The end of a limit of the hold, if the guard was valid after it.
    pub valid_after_limit: Option<Time>,
    /// When the loss was reported.
    pub loss_reported: Option<Time>,
    /// Whether the guard reported that it is valid after the loss was reported.
    pub valid_after_loss: bool,
    pub accepted: u32,
    pub refused: u32,
    pub release_started: Option<Time>,
    pub released: Option<Time>,
    /// Whether the guard was dropped, so that the store releases the lock later.
    pub was_dropped: bool,
    pub unlock_error: Option<String>,
    /// The lease of the ticket that the hold was about to become.
    pub ticket_lease: Option<Time>,
    /// The ticket that the hold became. The section ends with that.
    pub ticket: Option<MadeTicket>,
}

impl MadeTicket {
    /// Records that its lease may last until then.
    pub(super) fn may_end_at(&mut self, t: Time) {
        self.free_at = self.free_at.max(t);
    }
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
            fed: None,
            valid_after_limit: None,
            loss_reported: None,
            valid_after_loss: false,
            accepted: 0,
            refused: 0,
            release_started: None,
            released: None,
            was_dropped: false,
            unlock_error: None,
            ticket_lease: None,
            ticket: None,
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
                let passed = self.limit_end().filter(|&end| end < t);
                self.valid_after_limit = self.valid_after_limit.or(passed);
            }
            EventKind::LossReported => self.loss_reported = Some(t),
            EventKind::Wrote { accepted: true } => self.accepted += 1,
            EventKind::Wrote { accepted: false } => self.refused += 1,
            EventKind::Fed => self.fed = Some(t),
            EventKind::Releasing => self.release_started = Some(t),
            EventKind::Released { error } => {
                self.ticket = self.minimum(t).filter(|_| error.is_none());
                (self.released, self.unlock_error) = (Some(t), error);
            }
            EventKind::Dropped => {
                self.ticket = self.minimum(t);
                (self.released, self.was_dropped) = (Some(t), true);
            }
            EventKind::MakingTicket { lease } => {
                (self.release_started, self.ticket_lease) = (Some(t), Some(lease));
            }
            EventKind::BecameTicket { text } => {
                let lease = self.ticket_lease.unwrap_or_default();
                // The store counts the lease from when it executes the step.
                let kept_until = self.release_started.unwrap_or(t) + lease;
                self.released = Some(t);
                self.ticket = Some(MadeTicket {
                    text: Some(text),
                    kept_until,
                    kept_first: kept_until,
                    requested: None,
                    adopted: None,
                    may_get_back: false,
                    free_at: t + lease,
                });
            }
            EventKind::Ready
            | EventKind::Stalled { .. }
            | EventKind::Requested(_)
            | EventKind::Scheduled { .. }
            | EventKind::Unscheduled { .. }
            | EventKind::Leftover { .. }
            | EventKind::Done => {}
        }
        self.released.is_some() || (self.answered.is_some() && self.acquired.is_none())
    }

    /// Returns when the hold is lost at a limit of its request at the latest, unless it is fed
    /// later.
    fn limit_end(&self) -> Option<Time> {
        let acquired = self.acquired?;
        let Limits {
            lease,
            at_most,
            fed_every,
            ..
        } = self.request.limits;
        let fed = fed_every.map(|interval| self.fed.unwrap_or(acquired) + interval);
        let others = [lease, at_most].map(|limit| limit.map(|limit| acquired + limit));
        others.into_iter().chain([fed]).flatten().min()
    }

    /// Returns what keeps the lock after a release that succeeded at this time, until the minimum
    /// time has passed.
    fn minimum(&self, released: Time) -> Option<MadeTicket> {
        let end = self.acquired? + self.request.limits.at_least?;
        let left = end - self.release_started?;
        (left > 0).then_some(MadeTicket {
            text: None,
            // In whole milliseconds.
            kept_until: end - 1_000_000,
            kept_first: end - 1_000_000,
            requested: None,
            adopted: None,
            may_get_back: false,
            free_at: released + left,
        })
    }

    /// Returns the time in which the guard is known to have been valid.
    pub fn valid_span(&self) -> Option<(Time, Time)> {
        let (acquired, until) = (self.acquired?, self.valid_until?);
        (acquired < until).then_some((acquired, until))
    }

    /// Returns the time in which waiters may have to wait for it, as far as its holder knows.
    pub fn held_span(&self) -> Option<(Time, Time)> {
        let acquired = self.acquired?;
        if let Some(ticket) = &self.ticket {
            return Some((acquired, ticket.adopted.unwrap_or(ticket.free_at)));
        }
        let end = if self.was_lost() {
            self.valid_until
        } else {
            self.released
                .max(self.release_started)
                .max(self.valid_until)
        };
        // A hold that is lost at a limit, or whose release fails, is kept for its minimum time.
        let minimum = self.unlock_error.as_ref().and(self.request.limits.at_least);
        let end = end.max(minimum.map(|at_least| acquired + at_least));
        Some((acquired, end.unwrap_or(acquired)))
    }

    /// Returns whether it enters no section: it asks for the lock, or renews or releases a ticket.
    pub fn enters_none(&self) -> bool {
        let mode = self.request.mode;
        matches!(
            mode,
            Mode::Ask(_) | Mode::RenewTicket(_) | Mode::ReleaseTicket
        )
    }

    /// Returns whether it adopts the ticket of the other section.
    pub fn adopts(&self, other: &Section) -> bool {
        let made = other.ticket.as_ref().and_then(|made| made.text.as_ref());
        made.is_some() && made == self.request.ticket.as_ref() && !self.enters_none()
    }

    /// Returns whether it was lost while it was held.
    pub fn was_lost(&self) -> bool {
        let lost = |error: &String| error.starts_with("Lost");
        self.loss_reported.is_some() || self.unlock_error.as_ref().is_some_and(lost)
    }

    /// Returns whether the store has answered that it released the lock.
    pub fn is_release_answered(&self) -> bool {
        let is_released = self.released.is_some() && !self.was_dropped;
        is_released && !self.was_lost() && self.unlock_error.is_none()
    }

    /// Returns the limit of a request to release a lock, if it has one and the store has not refused it because nothing was
    /// held. Without an answer, the store may execute it at any later time.
    pub fn revocation_limit(&self) -> Option<Time> {
        let got_none = self.acquired.is_none() && self.failed.is_none();
        match self.request.mode {
            Mode::Ask(_) if self.answered.is_some() && got_none => None,
            Mode::Ask(limit) => limit,
            _ => None,
        }
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
