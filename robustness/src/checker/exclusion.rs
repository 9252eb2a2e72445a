//! At most one valid guard per lock at any instant.

use super::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{History, Mode, PERMITS, Section};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let names = history.by_name();
    names
        .iter()
        .flat_map(|(name, sections)| of_name(name, sections))
        .collect()
}

fn of_name(name: &str, sections: &[&Section]) -> Vec<Violation> {
    let mut spans: Vec<(Time, Time, &Section)> = sections
        .iter()
        .filter_map(|one| one.valid().map(|(from, until)| (from, until, *one)))
        .collect();
    spans.sort_by_key(|span| span.0);
    let mut found = Vec::new();
    let mut inside: Vec<(Time, Time, &Section)> = Vec::new();
    for (from, until, section) in spans {
        inside.retain(|other| other.1 > from);
        let many = match section.ask.mode {
            // Sharing with those who share is no fault; a permit is one too many or it is not.
            Mode::Permit if inside.len() < PERMITS as usize => &[],
            _ => &inside[..],
        };
        for (since, other_until, other) in many {
            let share = section.ask.mode == Mode::Shared && other.ask.mode == Mode::Shared;
            if !share {
                found.push(Violation {
                    rule: Rule::Exclusion,
                    from,
                    until: until.min(*other_until),
                    text: format!(
                        "{name}: {} came {} ms after {}, which was still valid",
                        section.who(),
                        millis(from - since),
                        other.who()
                    ),
                });
            }
        }
        inside.push((from, until, section));
    }
    found
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
}
