//! Checks that no semaphore grants more permits than it has.
//!
//! 1. A permit is taken from the answer to its acquisition until its release is requested.
//! 2. Permits have no leases, so a process that is killed keeps its permits for good.
//! 3. The first acquisition that exceeds the number of permits is a violation.
//! 4. A step whose answer was lost may leave a permit taken for good. Such permits are no violation, but other checks
//!    must not expect them to be free.

use super::{Rule, Violation};
use crate::clock::Time;
use crate::history::{History, Mode, PERMITS, Section};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let names = history.by_name();
    let found = names.values().filter_map(|sections| of_name(sections));
    found.collect()
}

/// Finds the first acquisition that exceeds the number of permits. Later ones may only be its consequence.
fn of_name(sections: &[&Section]) -> Option<Violation> {
    let semaphore = |one: &&&Section| one.ask.mode == Mode::Semaphore;
    let mut changes = Vec::new();
    for section in sections.iter().filter(semaphore) {
        if let Some(got) = section.got {
            // At equal times, the sort below puts releases before acquisitions.
            changes.push((got, Some(section)));
            changes.push((section.left.unwrap_or(Time::MAX), None));
        }
    }
    changes.sort_by_key(|&(at, comes)| (at, comes.is_some()));
    let mut taken = 0;
    for (at, comes) in changes {
        let Some(section) = comes else {
            taken -= 1;
            continue;
        };
        taken += 1;
        if taken > PERMITS {
            let (name, who) = (&section.ask.name, section.who());
            let text = format!("{name}: {who} acquired permit {taken} of {PERMITS}");
            return Some(Violation::at(at, Rule::Permits, text));
        }
    }
    None
}

/// Returns whether this semaphore may lack permits for good, or have more of them than were set.
pub fn may_lack_permits(history: &History, name: &str) -> bool {
    let mut sections = history.sections.iter().filter(|one| one.ask.name == name);
    sections.any(|one| one.ask.mode == Mode::Semaphore && may_be_stuck(history, one))
        || name.starts_with("semaphore:") && forgotten(history) < Time::MAX
}

/// Returns whether a permit that was requested in a section may stay taken for good: it was not certainly released, and
/// a fault was under way meanwhile. A request that gave up may have a step in flight for a while. One that succeeded
/// may have acquired a permit before that replicas did not confirm.
pub(super) fn may_be_stuck(history: &History, section: &Section) -> bool {
    let is_released = section.freed.is_some() && section.unlock_error.is_none();
    let over = match section.got {
        Some(got) if is_released && history.awaits_replicas => got,
        Some(_) if is_released => return false,
        Some(_) => section.freed.map_or(Time::MAX, |at| at + history.lease),
        None => section.answered.map_or(Time::MAX, |at| at + history.lease),
    };
    let mut windows = history.windows.iter();
    windows.any(|window| window.from < over && section.asked < window.until)
}

/// Returns the time from which the number of permits in the store may be wrong, or `Time::MAX`.
pub(super) fn forgotten(history: &History) -> Time {
    let lost = history.forgotten().map(|lost| lost.from);
    lost.min().unwrap_or(Time::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::made::{MS, history, section};
    use super::*;
    use crate::history::Window;

    /// Creates a permit that is held from one millisecond to another.
    fn permit(from: Time, until: Time) -> Section {
        let mut one = section("semaphore:0", from, until);
        one.ask.mode = Mode::Semaphore;
        (one.valid_until, one.deadline, one.kept_until) = (None, None, None);
        one
    }

    /// Creates a permit that its process held when it was killed.
    fn of_the_dead(from: Time) -> Section {
        let mut one = permit(from, from);
        (one.left, one.freed) = (None, None);
        one
    }

    #[test]
    fn excess_permit_is_found() {
        let well = vec![permit(0, 10), permit(1, 11), permit(10, 20)];
        assert!(check(&history(well)).is_empty());
        let found = check(&history(vec![permit(0, 10), permit(1, 11), permit(9, 20)]));
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].rule, found[0].from), (Rule::Permits, 9 * MS));
    }

    #[test]
    fn permits_of_killed_processes_stay_taken() {
        let sections = vec![of_the_dead(0), permit(1, 11), permit(20_000, 20_010)];
        assert!(check(&history(sections)).is_empty());
        let sections = vec![of_the_dead(0), of_the_dead(1), permit(20_000, 20_010)];
        assert_eq!(check(&history(sections)).len(), 1);
    }

    #[test]
    fn permits_may_be_lost_only_during_faults() {
        let mut refused = permit(100, 200);
        (refused.got, refused.left, refused.freed) = (None, None, None);
        let mut unknown = permit(100, 200);
        unknown.unlock_error = Some("OutcomeUnknown".into());
        let mut retried = permit(170, 200);
        retried.asked = 100 * MS;
        for section in [refused, unknown, retried, of_the_dead(100)] {
            let mut one = history(vec![section, permit(0, 10_000)]);
            one.awaits_replicas = true;
            assert!(!may_lack_permits(&one, "semaphore:0"));
            one.windows.push(Window {
                from: 150 * MS,
                until: 160 * MS,
                cut: false,
            });
            assert!(may_lack_permits(&one, "semaphore:0"));
            assert!(!may_lack_permits(&one, "semaphore:1"));
        }
    }
}
