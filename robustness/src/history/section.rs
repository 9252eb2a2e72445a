//! One critical section, from the request to the release.

use super::event::{EventKind, Mode, Request};
use crate::clock::Time;

/// The ticket that the hold of a section became.
#[derive(Debug, Clone)]
pub struct MadeTicket {
    pub text: String,
    /// The store keeps its hold at least until then, unless a client adopts it.
    pub kept_until: Time,
    /// When the first adoption was requested.
    pub requested: Option<Time>,
    /// When the first adoption had succeeded.
    pub adopted: Option<Time>,
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
    /// When the loss was reported.
    pub loss_reported: Option<Time>,
    /// Whether the guard reported that it is valid after the loss was reported.
    pub valid_after_loss: bool,
    pub accepted: u32,
    pub refused: u32,
    pub release_started: Option<Time>,
    pub released: Option<Time>,
    pub unlock_error: Option<String>,
    /// The lease of the ticket that the hold was about to become.
    pub ticket_lease: Option<Time>,
    /// The ticket that the hold became. The section ends with that.
    pub ticket: Option<MadeTicket>,
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
            }
            EventKind::LossReported => self.loss_reported = Some(t),
            EventKind::Wrote { accepted: true } => self.accepted += 1,
            EventKind::Wrote { accepted: false } => self.refused += 1,
            EventKind::Releasing => self.release_started = Some(t),
            EventKind::Released { error } => (self.released, self.unlock_error) = (Some(t), error),
            EventKind::MakingTicket { lease } => {
                (self.release_started, self.ticket_lease) = (Some(t), Some(lease));
            }
            EventKind::BecameTicket { text } => {
                let lease = self.ticket_lease.unwrap_or_default();
                self.released = Some(t);
                self.ticket = Some(MadeTicket {
                    text,
                    // The store counts the lease from when it executes the step.
                    kept_until: self.release_started.unwrap_or(t) + lease,
                    requested: None,
                    adopted: None,
                    free_at: t + lease,
                });
            }
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
        Some((acquired, end.unwrap_or(acquired)))
    }

    /// Returns whether it only asks the holder of the lock, or revokes its hold.
    pub fn is_ask(&self) -> bool {
        matches!(self.request.mode, Mode::Ask(_))
    }

    /// Returns whether it adopts the ticket of the other section.
    pub fn adopts(&self, other: &Section) -> bool {
        let made = other.ticket.as_ref().map(|ticket| &ticket.text);
        made.is_some() && made == self.request.ticket.as_ref()
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
