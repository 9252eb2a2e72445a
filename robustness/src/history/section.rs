//! One critical section, from the request to the release.

use serde::{Deserialize, Serialize};

use super::event::{Mode, What};
use crate::clock::Time;

/// The request of a section.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ask {
    pub task: usize,
    pub client: usize,
    /// The number of the owner, which several tasks share or which is a thread. `None`: this acquisition has an
    /// owner of its own.
    pub owner: Option<u64>,
    pub name: String,
    pub mode: Mode,
    /// Whether it is one of several locks that are requested together, all or none. The whole has a section of
    /// its own. While this one is awaited, another member may block the request.
    #[serde(default)]
    pub part: bool,
}

/// What happened in the section.
#[derive(Debug, Clone)]
pub struct Section {
    pub process: usize,
    pub ask: Ask,
    pub asked: Time,
    /// When the request was answered in any way.
    pub answered: Option<Time>,
    /// Why it was not acquired.
    pub failed: Option<String>,
    /// When it had been acquired.
    pub got: Option<Time>,
    pub token: Option<u64>,
    /// The hold count of its owner, read right after the acquisition.
    pub holds: Option<u32>,
    /// The count of a latch after it was counted down.
    pub count: Option<u64>,
    /// The last time at which the guard is known to have been valid.
    pub valid_until: Option<Time>,
    /// The end of the lease that the guard last reported.
    pub deadline: Option<Time>,
    /// The store keeps it until then at least, unless it is released.
    pub kept_until: Option<Time>,
    /// When the loss was reported.
    pub told: Option<Time>,
    /// Whether the guard reported that it is valid after the loss was reported.
    pub valid_after_told: bool,
    pub accepted: u32,
    pub refused: u32,
    pub left: Option<Time>,
    pub freed: Option<Time>,
    pub unlock_error: Option<String>,
}

impl Section {
    pub fn new(process: usize, asked: Time, ask: Ask) -> Section {
        Section {
            process,
            ask,
            asked,
            answered: None,
            failed: None,
            got: None,
            token: None,
            holds: None,
            count: None,
            valid_until: None,
            deadline: None,
            kept_until: None,
            told: None,
            valid_after_told: false,
            accepted: 0,
            refused: 0,
            left: None,
            freed: None,
            unlock_error: None,
        }
    }

    /// Records an event of the section. Returns whether it was the last one.
    pub(super) fn take(&mut self, t: Time, what: What) -> bool {
        match what {
            What::Got { token, holds } => {
                (self.answered, self.got) = (Some(t), Some(t));
                (self.token, self.holds) = (token, holds);
            }
            What::Counted { left } => {
                (self.answered, self.got) = (Some(t), Some(t));
                self.count = Some(left);
            }
            What::GaveUp => self.answered = Some(t),
            What::Failed { error } => (self.answered, self.failed) = (Some(t), Some(error)),
            What::Valid { until, at_least } => {
                self.valid_after_told |= self.told.is_some();
                self.valid_until = Some(t);
                self.deadline = self.deadline.max(Some(until));
                self.kept_until = self.kept_until.max(Some(at_least));
            }
            What::Told => self.told = Some(t),
            What::Wrote { accepted: true } => self.accepted += 1,
            What::Wrote { accepted: false } => self.refused += 1,
            What::Leaving => self.left = Some(t),
            What::Freed { error } => (self.freed, self.unlock_error) = (Some(t), error),
            What::Ready | What::Stood { .. } | What::Asked(_) | What::Left { .. } | What::Done => {}
        }
        self.freed.is_some() || (self.answered.is_some() && self.got.is_none())
    }

    /// Returns the time in which the guard is known to have been valid.
    pub fn valid(&self) -> Option<(Time, Time)> {
        let (got, until) = (self.got?, self.valid_until?);
        (got < until).then_some((got, until))
    }

    /// Returns the time in which waiters may have to wait for it, as far as its holder knows.
    pub fn held(&self) -> Option<(Time, Time)> {
        let got = self.got?;
        let end = if self.was_lost() {
            self.valid_until
        } else {
            self.freed.max(self.left).max(self.valid_until)
        };
        Some((got, end.unwrap_or(got)))
    }

    /// Returns whether it was lost while it was held.
    pub fn was_lost(&self) -> bool {
        let lost = |error: &String| error.starts_with("Lost");
        self.told.is_some() || self.unlock_error.as_ref().is_some_and(lost)
    }

    /// Returns whether both are acquisitions of one owner, which may have several guards of one hold.
    pub fn same_owner(&self, other: &Section) -> bool {
        let owner = |one: &Section| {
            one.ask
                .owner
                .map(|owner| (one.process, one.ask.client, owner))
        };
        owner(self).is_some() && owner(self) == owner(other)
    }

    pub fn who(&self) -> String {
        let Ask {
            task,
            client,
            owner,
            ..
        } = &self.ask;
        let owner = owner.map(|owner| format!(" owner {owner}"));
        let owner = owner.unwrap_or_default();
        format!(
            "process {} client {client}{owner} task {task}",
            self.process
        )
    }
}
