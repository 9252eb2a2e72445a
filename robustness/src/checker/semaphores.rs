//! Checks that no semaphore grants more permits than it has.
//!
//! 1. A permit is taken from the answer to its acquisition until its release is requested.
//! 2. Permits have no leases, so a process that is killed keeps its permits for good.
//! 3. The first acquisition that exceeds the number of permits is a violation.
//! 4. A step whose answer was lost may leave a permit taken for good. Such permits are no violation, but other checks
//!    must not expect them to be free.

use super::violation::{Rule, Violation};
use crate::clock::Time;
use crate::history::{History, Mode, PERMITS, Section};

/// How long a released permit may be offered to other tasks of the client, and then released without an answer.
const OFFERED_AND_RELEASED: Time = 100_000_000;

pub(super) fn check(history: &History) -> Vec<Violation> {
    let names = history.by_name();
    let found = names.values().filter_map(|sections| check_name(sections));
    found.collect()
}

/// Finds the first acquisition that exceeds the number of permits. Later ones may only be its consequence.
fn check_name(sections: &[&Section]) -> Option<Violation> {
    let semaphore = |one: &&&Section| one.request.mode == Mode::Semaphore;
    let mut changes = Vec::new();
    for section in sections.iter().filter(semaphore) {
        if let Some(acquired) = section.acquired {
            // At equal times, the sort below puts releases before acquisitions.
            changes.push((acquired, Some(section)));
            changes.push((section.release_started.unwrap_or(Time::MAX), None));
        }
    }
    changes.sort_by_key(|&(at, comes)| (at, comes.is_some()));
    // A permit that is released when it is acquired makes this negative for a moment.
    let mut taken = 0_i64;
    for (at, comes) in changes {
        let Some(section) = comes else {
            taken -= 1;
            continue;
        };
        taken += 1;
        if taken > i64::from(PERMITS) {
            let (name, who) = (&section.request.name, section.requester());
            let text = format!("{name}: {who} acquired permit {taken} of {PERMITS}");
            return Some(Violation::at(at, Rule::Permits, text));
        }
    }
    None
}

/// Returns whether this semaphore may lack permits for good, or have more of them than were set.
pub fn may_lack_permits(history: &History, name: &str) -> bool {
    let mut sections = history
        .sections
        .iter()
        .filter(|one| one.request.name == name);
    sections.any(|one| one.request.mode == Mode::Semaphore && may_be_stuck(history, one))
        || name.starts_with("semaphore:") && permits_lost_since(history) < Time::MAX
}

/// Returns whether a permit that was requested in a section may stay taken for good: it was not certainly released, and
/// a fault was under way meanwhile. A request that gave up may have a step in flight for a while. One that succeeded
/// may have acquired a permit before that replicas did not confirm. A permit that was released may have been offered to
/// another task instead, which left, so that it was released in the background.
pub(super) fn may_be_stuck(history: &History, section: &Section) -> bool {
    let in_fault = |from: Time, until: Time| {
        let mut windows = history.windows.iter();
        windows.any(|window| window.from < until && from < window.until)
    };
    let requested = section.requested;
    if let Some(released) = section.released
        && section.unlock_error.is_none()
    {
        let begun = section.release_started.unwrap_or(released);
        let replicated = section.acquired.filter(|_| history.awaits_replicas);
        return in_fault(begun, released + OFFERED_AND_RELEASED)
            || replicated.is_some_and(|acquired| in_fault(requested, acquired));
    }
    let ended = match section.acquired {
        Some(_) => section.released,
        None => section.answered,
    };
    in_fault(requested, ended.map_or(Time::MAX, |at| at + history.lease))
}

/// Returns the time from which the number of permits in the store may be wrong, or `Time::MAX`.
pub(super) fn permits_lost_since(history: &History) -> Time {
    let lost = history.leaseless_losses().map(|lost| lost.from);
    lost.min().unwrap_or(Time::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, history, section};
    use super::*;
    use crate::history::FaultWindow;

    /// Creates a permit that is held from one millisecond to another.
    fn permit(from: Time, until: Time) -> Section {
        let mut one = section("semaphore:0", from, until);
        one.request.mode = Mode::Semaphore;
        (one.valid_until, one.deadline, one.kept_until) = (None, None, None);
        one
    }

    /// Creates a permit that its process held when it was killed.
    fn held_by_killed_process(from: Time) -> Section {
        let mut one = permit(from, from);
        (one.release_started, one.released) = (None, None);
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
        let sections = vec![
            held_by_killed_process(0),
            permit(1, 11),
            permit(20_000, 20_010),
        ];
        assert!(check(&history(sections)).is_empty());
        let sections = vec![
            held_by_killed_process(0),
            held_by_killed_process(1),
            permit(20_000, 20_010),
        ];
        assert_eq!(check(&history(sections)).len(), 1);
    }

    #[test]
    fn permits_may_be_lost_only_during_faults() {
        let mut refused = permit(100, 200);
        (refused.acquired, refused.release_started, refused.released) = (None, None, None);
        let mut unknown = permit(100, 200);
        unknown.unlock_error = Some("OutcomeUnknown".into());
        let offered = permit(0, 100);
        let mut retried = permit(170, 200);
        retried.requested = 100 * MS;
        for section in [
            refused,
            unknown,
            offered,
            retried,
            held_by_killed_process(100),
        ] {
            let mut one = history(vec![section, permit(0, 10_000)]);
            one.awaits_replicas = true;
            assert!(!may_lack_permits(&one, "semaphore:0"));
            one.windows.push(FaultWindow {
                from: 150 * MS,
                until: 160 * MS,
                is_outage: false,
            });
            assert!(may_lack_permits(&one, "semaphore:0"));
            assert!(!may_lack_permits(&one, "semaphore:1"));
        }
    }
}
