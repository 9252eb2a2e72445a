//! At most one valid guard per lock at any instant, unless the guards belong to one hold of one owner; and
//! what a process held when it was killed stays taken until its lease has ended.

use super::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{History, Mode, PERMITS, Section};

/// A guard, and from when to when it keeps other owners out.
#[derive(Clone, Copy)]
struct Span<'a> {
    from: Time,
    until: Time,
    section: &'a Section,
    /// Its process was killed while it held the lock: the store keeps it until the lease has ended.
    is_dead: bool,
}

pub(super) fn check(history: &History) -> Vec<Violation> {
    let names = history.by_name();
    names
        .iter()
        .flat_map(|(name, sections)| of_name(history, name, sections))
        .collect()
}

fn of_name(history: &History, name: &str, sections: &[&Section]) -> Vec<Violation> {
    let spans = sections.iter().filter_map(|one| Span::of(history, one));
    let mut spans: Vec<Span<'_>> = spans.collect();
    spans.sort_by_key(|span| span.from);
    let mut found = Vec::new();
    let mut inside: Vec<Span<'_>> = Vec::new();
    for span in spans {
        inside.retain(|other| other.until > span.from);
        let many = match span.section.ask.mode {
            // Sharing with those who share is no fault; a permit is one too many or it is not.
            Mode::Permit if inside.len() < PERMITS as usize => &[],
            _ => &inside[..],
        };
        let bad = many.iter().filter(|other| !may_overlap(span, **other));
        // Of several permits it cannot be told which one was taken away.
        let is_dead = many.iter().any(|other| other.is_dead);
        for other in bad {
            let (rule, state) = match other.is_dead || (is_permit(span) && is_dead) {
                true => (Rule::TakenFromTheDead, "whose lease had not ended"),
                false => (Rule::Exclusion, "which was still valid"),
            };
            let (after, who) = (millis(span.from - other.from), span.section.who());
            found.push(Violation {
                rule,
                from: span.from,
                until: span.until.min(other.until),
                text: format!(
                    "{name}: {who} came {after} ms after {}, {state}",
                    other.section.who()
                ),
            });
        }
        inside.push(span);
    }
    found
}

fn is_permit(span: Span<'_>) -> bool {
    span.section.ask.mode == Mode::Permit
}

/// Whether the later one may come while the other one is held.
fn may_overlap(later: Span<'_>, other: Span<'_>) -> bool {
    let (one, two) = (later.section, other.section);
    let (mode, other_mode) = (one.ask.mode, two.ask.mode);
    if mode == Mode::Shared && other_mode == Mode::Shared {
        return true;
    }
    // A first entry begins a hold. A writer may also read, and that is another hold.
    let is_another_hold = mode == other_mode && one.holds == Some(1);
    one.same_owner(two) && !is_another_hold
}

impl<'a> Span<'a> {
    fn of(history: &History, section: &'a Section) -> Option<Span<'a>> {
        let process = history.processes.get(&section.process);
        let killed = process.is_some_and(|process| process.killed.is_some());
        let is_dead = killed && section.left.is_none() && section.told.is_none();
        let (from, valid_until) = (section.got?, section.valid_until?);
        let until = match is_dead {
            true => section
                .kept_until
                .map_or(valid_until, |kept| kept.max(valid_until)),
            false => valid_until,
        };
        (from < until).then_some(Span {
            from,
            until,
            section,
            is_dead,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::made::{MS, history, section};
    use super::*;

    fn overlaps(sections: Vec<Section>) -> usize {
        check(&history(sections)).len()
    }

    #[test]
    fn one_after_the_other_is_well() {
        let sections = vec![section("a", 0, 10), section("a", 10, 20)];
        assert_eq!(overlaps(sections), 0);
        let sections = vec![section("a", 0, 10), section("b", 5, 20)];
        assert_eq!(overlaps(sections), 0);
    }

    #[test]
    fn two_at_a_time_are_found() {
        let found = check(&history(vec![section("a", 5, 20), section("a", 0, 10)]));
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].from, found[0].until), (5 * MS, 10 * MS));
    }

    #[test]
    fn one_inside_of_a_long_one_is_found_behind_another() {
        let sections = vec![section("a", 0, 30), section("a", 1, 2), section("a", 5, 9)];
        assert_eq!(overlaps(sections), 2);
    }

    #[test]
    fn who_was_stopped_counts_until_it_was_last_valid() {
        // It holds on, without being valid: no violation of the lock's.
        let mut stopped = section("a", 0, 100);
        stopped.valid_until = Some(8 * MS);
        assert_eq!(overlaps(vec![stopped, section("a", 10, 20)]), 0);
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let with = |mode, mut one: Section| {
            one.ask.mode = mode;
            one
        };
        let read = |from, until| with(Mode::Shared, section("rw", from, until));
        assert_eq!(overlaps(vec![read(0, 10), read(5, 20)]), 0);
        assert_eq!(overlaps(vec![read(0, 10), section("rw", 5, 20)]), 1);
        assert_eq!(overlaps(vec![section("rw", 0, 10), read(5, 20)]), 1);
    }

    #[test]
    fn one_permit_too_many_is_found() {
        let permit = |from, until| {
            let mut one = section("permits", from, until);
            one.ask.mode = Mode::Permit;
            one
        };
        assert_eq!(
            overlaps(vec![permit(0, 10), permit(1, 11), permit(10, 20)]),
            0
        );
        let found = overlaps(vec![permit(0, 10), permit(1, 11), permit(9, 20)]);
        assert_ne!(found, 0);
    }

    /// A guard of owner 7 of its process, which is the so many-th of its hold.
    fn of_owner(holds: u32, mut one: Section) -> Section {
        (one.ask.owner, one.holds) = (Some(7), Some(holds));
        one
    }

    #[test]
    fn guards_of_one_hold_overlap() {
        let sections = vec![
            of_owner(1, section("a", 0, 10)),
            of_owner(2, section("a", 5, 20)),
        ];
        assert_eq!(overlaps(sections), 0);
    }

    #[test]
    fn two_holds_of_one_owner_are_found() {
        let sections = vec![
            of_owner(1, section("a", 0, 10)),
            of_owner(1, section("a", 5, 20)),
        ];
        assert_eq!(overlaps(sections), 1);
    }

    #[test]
    fn a_writer_may_read_and_other_owners_may_not() {
        let read = |mut one: Section| {
            one.ask.mode = Mode::Shared;
            one
        };
        let write = of_owner(1, section("rw", 0, 10));
        let own = of_owner(1, read(section("rw", 5, 20)));
        assert_eq!(overlaps(vec![write.clone(), own]), 0);
        assert_eq!(overlaps(vec![write, read(section("rw", 5, 20))]), 1);
    }

    #[test]
    fn the_same_owner_number_elsewhere_is_another_owner() {
        let outer = of_owner(1, section("a", 0, 10));
        let mut other_client = of_owner(2, section("a", 5, 20));
        other_client.ask.client = 1;
        assert_eq!(overlaps(vec![outer.clone(), other_client]), 1);
        let mut other_process = of_owner(2, section("a", 5, 20));
        other_process.process = 1;
        assert_eq!(overlaps(vec![outer, other_process]), 1);
    }

    /// Process 1 was killed at 10 ms with a lock that is kept until 3010 ms; process 0 has it from here.
    fn taken_from_the_dead(at: Time) -> History {
        let mut dead = of_owner(1, section("a", 0, 10));
        (dead.left, dead.freed, dead.process) = (None, None, 1);
        let next = of_owner(2, section("a", at, at + 5));
        let mut history = history(vec![dead, next]);
        history.processes.entry(1).or_default().killed = Some(10 * MS);
        history
    }

    #[test]
    fn what_the_dead_held_is_taken_until_its_lease_has_ended() {
        assert!(check(&taken_from_the_dead(3010)).is_empty());
        let found = check(&taken_from_the_dead(3000));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].rule, Rule::TakenFromTheDead);
        // A lock that it released or lost before is free.
        let mut left = taken_from_the_dead(500);
        left.sections[0].left = Some(9 * MS);
        assert!(check(&left).is_empty());
        let mut told = taken_from_the_dead(500);
        told.sections[0].told = Some(9 * MS);
        assert!(check(&told).is_empty());
    }

    #[test]
    fn a_permit_of_the_dead_counts_until_its_lease_has_ended() {
        let permits = |at| {
            let mut history = taken_from_the_dead(at);
            history.sections.push(section("a", at - 1, at + 1));
            for one in &mut history.sections {
                one.ask.mode = Mode::Permit;
            }
            check(&history)
        };
        assert!(permits(3020).is_empty());
        let found = permits(500);
        assert!(!found.is_empty());
        assert!(found.iter().all(|one| one.rule == Rule::TakenFromTheDead));
    }
}
