//! Checks that waiters acquire a fair lock, or another fair object, in the order in which they joined its queue.
//!
//! 1. The history has no event for joining the queue, so a request counts as queued a fixed time after it was sent.
//! 2. A request that was sent after that time must not acquire the lock before the queued one is answered.
//! 3. A fault can cost a waiter its place. Waits with a fault shortly before or during them are not compared.

use std::time::Duration;

use super::allowances::RECONNECT_ALLOWANCE;
use super::violation::{Rule, Violation};
use crate::clock::{Time, millis, nanos};
use crate::history::{History, Mode, Section};

/// Finds the acquisitions of fair locks that overtook another request in the queue. A request is in the queue after
/// `join_limit` at the latest. It keeps its place if no fault was under way meanwhile or just before; waiters without a
/// connection are skipped. Owners that several tasks share are not compared, because they take turns before they join.
///
/// Only for runs on a simulated clock, without faults that delay clients or make them leave the queue.
pub fn check_order(history: &History, join_limit: Duration) -> Vec<Violation> {
    let join_limit = nanos(join_limit);
    let is_broken = |from: Time, until: Time| {
        let mut windows = history.windows.iter();
        windows.any(|window| window.from <= until && from <= window.until + RECONNECT_ALLOWANCE)
    };
    let mut found = Vec::new();
    for (name, sections) in history.by_name() {
        if !name.starts_with("fair") {
            continue;
        }
        // Adoptions of tickets do not join the queue.
        let compared = sections
            .iter()
            .filter(|one| one.request.owner.is_none() && one.request.ticket.is_none());
        let compared: Vec<&Section> = compared.copied().collect();
        // A request for several locks does not join the queues of its members.
        let joined = compared.iter().filter(|one| !one.request.is_member);
        for first in joined {
            let overtaker = compared.iter().find(|later| {
                // The messages to those that are served together arrive in any order.
                let together = match first.request.mode == later.request.mode {
                    true if first.request.mode != Mode::Exclusive => join_limit,
                    _ => 0,
                };
                let overtook = |acquired| {
                    first.answered.is_none_or(|at| acquired + together < at)
                        && !is_broken(first.requested, acquired)
                };
                first.requested + join_limit < later.requested
                    && later.acquired.is_some_and(overtook)
            });
            if let Some(later) = overtaker {
                let (first_who, later_who) = (first.requester(), later.requester());
                let before = millis(later.requested - first.requested);
                let text = format!(
                    "{name}: {later_who} acquired it before {first_who}, which requested it \
                     {before} ms earlier"
                );
                let at = later.acquired.unwrap_or(later.requested);
                found.push(Violation::at(at, Rule::Order, text));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, history, section};
    use super::*;
    use crate::history::FaultWindow;

    const JOINS: Duration = Duration::from_millis(10);

    /// Creates a section from the times of its request and its acquisition, in milliseconds.
    fn waited(requested: Time, acquired: Time) -> Section {
        let mut one = section("fair:1", acquired, acquired + 5);
        one.requested = requested * MS;
        one
    }

    #[test]
    fn acquisitions_in_order_are_accepted() {
        let sections = vec![waited(0, 50), waited(20, 60), waited(40, 70)];
        assert!(check_order(&history(sections), JOINS).is_empty());
    }

    #[test]
    fn overtaking_is_found() {
        let sections = vec![waited(0, 60), waited(20, 50)];
        assert_eq!(check_order(&history(sections), JOINS).len(), 1);
        let mut never = waited(0, 60);
        (never.answered, never.acquired) = (None, None);
        let sections = vec![never, waited(20, 50)];
        assert_eq!(check_order(&history(sections), JOINS).len(), 1);
    }

    #[test]
    fn request_that_may_not_have_joined_yet_is_not_overtaken() {
        let sections = vec![waited(0, 60), waited(10, 50)];
        assert!(check_order(&history(sections), JOINS).is_empty());
    }

    #[test]
    fn waiter_may_lose_its_place_with_its_connection() {
        for (from, is_broken) in [(498, false), (499, true), (1045, true), (1051, false)] {
            let mut broken = history(vec![waited(1000, 1060), waited(1020, 1050)]);
            broken.windows.push(FaultWindow {
                from: from * MS,
                until: (from + 1) * MS,
                is_outage: true,
            });
            assert_eq!(check_order(&broken, JOINS).is_empty(), is_broken, "{from}");
        }
    }

    #[test]
    fn other_locks_have_no_order() {
        let mut sections = vec![waited(0, 60), waited(20, 50)];
        for one in &mut sections {
            one.request.name = "lock:1".into();
        }
        assert!(check_order(&history(sections), JOINS).is_empty());
    }
}
