//! Checks that waiters acquire a fair lock in the order in which they joined its queue.
//!
//! 1. The history has no event for joining the queue, so a request counts as queued a fixed time after it was sent.
//! 2. A request that was sent after that time must not acquire the lock before the queued one is answered.
//! 3. A fault can cost a waiter its place. Waits with a fault shortly before or during them are not compared.

use std::time::Duration;

use super::{RECONNECTS, Rule, Violation};
use crate::clock::{Time, millis, nanos};
use crate::history::{History, Section};

/// Finds the acquisitions of fair locks that overtook another request in the queue. A request is in the queue after
/// `joins` at the latest. It keeps its place if no fault was under way meanwhile or just before; waiters without a
/// connection are skipped. Owners that several tasks share are not compared, because they take turns before they join.
///
/// Only for runs on a simulated clock, without faults that delay clients or make them leave the queue.
pub fn overtaken(history: &History, joins: Duration) -> Vec<Violation> {
    let joins = nanos(joins);
    let is_broken = |from: Time, until: Time| {
        let mut windows = history.windows.iter();
        windows.any(|window| window.from <= until && from <= window.until + RECONNECTS)
    };
    let mut found = Vec::new();
    for (name, sections) in history.by_name() {
        if !name.starts_with("fair") {
            continue;
        }
        let compared = sections.iter().filter(|one| one.ask.owner.is_none());
        let compared: Vec<&Section> = compared.copied().collect();
        // A request for several locks does not join the queues of its members.
        let joined = compared.iter().filter(|one| !one.ask.part);
        for first in joined {
            let overtaker = compared.iter().find(|later| {
                let overtook =
                    |got| first.answered.is_none_or(|at| got < at) && !is_broken(first.asked, got);
                first.asked + joins < later.asked && later.got.is_some_and(overtook)
            });
            if let Some(later) = overtaker {
                let (first_who, later_who) = (first.who(), later.who());
                let before = millis(later.asked - first.asked);
                let text = format!(
                    "{name}: {later_who} acquired it before {first_who}, which requested it \
                     {before} ms earlier"
                );
                let at = later.got.unwrap_or(later.asked);
                found.push(Violation::at(at, Rule::Order, text));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::made::{MS, history, section};
    use super::*;
    use crate::history::Window;

    const JOINS: Duration = Duration::from_millis(10);

    /// Creates a section from the times of its request and its acquisition, in milliseconds.
    fn waited(asked: Time, got: Time) -> Section {
        let mut one = section("fair:1", got, got + 5);
        one.asked = asked * MS;
        one
    }

    #[test]
    fn acquisitions_in_order_are_accepted() {
        let sections = vec![waited(0, 50), waited(20, 60), waited(40, 70)];
        assert!(overtaken(&history(sections), JOINS).is_empty());
    }

    #[test]
    fn overtaking_is_found() {
        let sections = vec![waited(0, 60), waited(20, 50)];
        assert_eq!(overtaken(&history(sections), JOINS).len(), 1);
        let mut never = waited(0, 60);
        (never.answered, never.got) = (None, None);
        let sections = vec![never, waited(20, 50)];
        assert_eq!(overtaken(&history(sections), JOINS).len(), 1);
    }

    #[test]
    fn request_that_may_not_have_joined_yet_is_not_overtaken() {
        let sections = vec![waited(0, 60), waited(10, 50)];
        assert!(overtaken(&history(sections), JOINS).is_empty());
    }

    #[test]
    fn waiter_may_lose_its_place_with_its_connection() {
        for (from, is_broken) in [(498, false), (499, true), (1045, true), (1051, false)] {
            let mut broken = history(vec![waited(1000, 1060), waited(1020, 1050)]);
            broken.windows.push(Window {
                from: from * MS,
                until: (from + 1) * MS,
                cut: true,
            });
            assert_eq!(overtaken(&broken, JOINS).is_empty(), is_broken, "{from}");
        }
    }

    #[test]
    fn other_locks_have_no_order() {
        let mut sections = vec![waited(0, 60), waited(20, 50)];
        for one in &mut sections {
            one.ask.name = "lock:1".into();
        }
        assert!(overtaken(&history(sections), JOINS).is_empty());
    }
}
