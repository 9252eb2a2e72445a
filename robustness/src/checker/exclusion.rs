//! Checks that a lock has at most one valid guard at any instant, and that the locks of a killed process and of a ticket
//! stay taken until their lease has ended.
//!
//! 1. A guard spans the time from its acquisition to the last time at which it is known to have been valid. If its
//!    process was killed with it, the span ends when the store may drop the hold. The span of a ticket ends then, too, or
//!    when its first adoption is requested: from then on the adopter's guard has a span.
//! 2. Spans of one name are visited in order of their start, and compared with all spans that have not ended.
//! 3. Guards of one hold of one owner may overlap, readers may overlap, and a writer may also read.
//! 4. Permits may overlap as long as there are no more of them than the semaphore has.
//! 5. Any other overlap is a violation: [`Rule::AcquiredBeforeExpiry`] if the earlier holder was killed or is a ticket,
//!    else [`Rule::Exclusion`].

use super::losses::revoked_from;
use super::violation::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{History, Mode, PERMITS, Section};

/// A guard, and the time in which it excludes other owners.
#[derive(Clone, Copy)]
struct Span<'a> {
    from: Time,
    until: Time,
    section: &'a Section,
    /// Whether there is no guard: its process was killed while it held the lock, or the hold is that of a ticket. The store
    /// keeps the hold until the lease has ended.
    is_dead: bool,
}

pub(super) fn check(history: &History) -> Vec<Violation> {
    let names = history.by_name();
    names
        .iter()
        .flat_map(|(name, sections)| check_name(history, name, sections))
        .collect()
}

fn check_name(history: &History, name: &str, sections: &[&Section]) -> Vec<Violation> {
    let spans = sections.iter().flat_map(|one| {
        Span::of(history, one)
            .into_iter()
            .chain(Span::of_ticket(one))
    });
    let mut spans: Vec<Span<'_>> = spans.collect();
    spans.sort_by_key(|span| span.from);
    let mut found = Vec::new();
    let mut active: Vec<Span<'_>> = Vec::new();
    for span in spans {
        active.retain(|other| other.until > span.from);
        let are_permits = is_permit(span) && active.iter().copied().all(is_permit);
        let many = match are_permits && active.len() < PERMITS as usize {
            // A free permit conflicts with no other, unless one has all permits; `may_overlap` decides about all other modes.
            true => &[],
            false => &active[..],
        };
        // Permits are interchangeable: the first ones with fixed leases explain it, if there are enough.
        let mut fixed = active.iter().copied().filter(has_fixed_lease);
        let fixed_permit = match are_permits {
            true => fixed.nth(last_excess(&active)),
            false => None,
        };
        let bad = many.iter().filter(|other| !may_overlap(span, **other));
        // Permits are interchangeable: any conflicting one may be the permit of a killed process.
        let is_dead = many.iter().any(|other| other.is_dead);
        let until = match is_permit(span) && !many.is_empty() {
            true => excess_ends(&active, span),
            false => span.until,
        };
        for other in bad {
            let (rule, state) = match other.is_dead || (is_permit(span) && is_dead) {
                true => (Rule::AcquiredBeforeExpiry, "whose lease had not ended"),
                false => (Rule::Exclusion, "which was still valid"),
            };
            let (after, who) = (millis(span.from - other.from), span.section.requester());
            let fixed = match is_permit(span) {
                true => fixed_permit,
                false => Some(*other).filter(has_fixed_lease),
            };
            let holder = other.section.requester();
            let text = format!("{name}: {who} acquired it {after} ms after {holder}, {state}");
            found.push(Violation {
                until: until.min(other.until),
                fixed_since: fixed.map(|fixed| fixed.from),
                ..Violation::at(span.from, rule, text)
            });
        }
        active.push(span);
    }
    found
}

/// Returns when so many permits have ended that there are no longer too many.
fn excess_ends(active: &[Span<'_>], span: Span<'_>) -> Time {
    let mut ends: Vec<Time> = active.iter().chain([&span]).map(|one| one.until).collect();
    ends.sort_unstable();
    ends[last_excess(active)]
}

/// Returns the index of the last permit that has to end, beside these active ones, before there are no longer too many.
fn last_excess(active: &[Span<'_>]) -> usize {
    // 0: another one has all permits.
    active.len().saturating_sub(PERMITS as usize)
}

fn has_fixed_lease(span: &Span<'_>) -> bool {
    span.section.request.limits.lease.is_some()
}

fn is_permit(span: Span<'_>) -> bool {
    span.section.request.mode == Mode::Permit
}

/// Returns whether the later guard may be acquired while the other one excludes other owners.
fn may_overlap(later: Span<'_>, other: Span<'_>) -> bool {
    let (one, two) = (later.section, other.section);
    let (mode, other_mode) = (one.request.mode, two.request.mode);
    if mode == Mode::Shared && other_mode == Mode::Shared {
        return true;
    }
    // A hold count of 1 means a new hold. The read hold of a writer is a separate hold, and allowed.
    let is_another_hold = mode == other_mode && one.holds == Some(1);
    one.same_owner(two) && !is_another_hold
}

impl<'a> Span<'a> {
    fn of(history: &History, section: &'a Section) -> Option<Span<'a>> {
        let process = history.processes.get(&section.process);
        let killed = process.is_some_and(|process| process.killed.is_some());
        let is_dead =
            killed && section.release_started.is_none() && section.loss_reported.is_none();
        let (from, valid_until) = (section.acquired?, section.valid_until?);
        let until = match is_dead {
            // Its client may have lost and released it because it was revoked, and was killed before it said so.
            true => [section.kept_until, revoked_from(history, section)]
                .into_iter()
                .flatten()
                .min()
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

    /// Returns the time in which the ticket of a section excludes other owners, before any client requests to adopt it.
    fn of_ticket(section: &'a Section) -> Option<Span<'a>> {
        let ticket = section.ticket.as_ref()?;
        let (from, kept_until) = (section.released?, ticket.kept_until);
        let until = ticket.requested.map_or(kept_until, |at| at.min(kept_until));
        (from < until).then_some(Span {
            from,
            until,
            section,
            is_dead: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, becomes_ticket, history, section};
    use super::*;

    fn overlaps(sections: Vec<Section>) -> usize {
        check(&history(sections)).len()
    }

    #[test]
    fn consecutive_guards_are_accepted() {
        let sections = vec![section("a", 0, 10), section("a", 10, 20)];
        assert_eq!(overlaps(sections), 0);
        let sections = vec![section("a", 0, 10), section("b", 5, 20)];
        assert_eq!(overlaps(sections), 0);
    }

    #[test]
    fn overlapping_guards_are_found() {
        let found = check(&history(vec![section("a", 5, 20), section("a", 0, 10)]));
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].from, found[0].until), (5 * MS, 10 * MS));
    }

    #[test]
    fn every_overlap_with_a_long_guard_is_found() {
        let sections = vec![section("a", 0, 30), section("a", 1, 2), section("a", 5, 9)];
        assert_eq!(overlaps(sections), 2);
    }

    #[test]
    fn stopped_holder_excludes_others_until_last_valid() {
        // The stopped process still has the guard, but an invalid guard excludes no other owner.
        let mut stopped = section("a", 0, 100);
        stopped.valid_until = Some(8 * MS);
        assert_eq!(overlaps(vec![stopped, section("a", 10, 20)]), 0);
    }

    #[test]
    fn readers_overlap_and_writers_do_not() {
        let with = |mode, mut one: Section| {
            one.request.mode = mode;
            one
        };
        let read = |from, until| with(Mode::Shared, section("rw", from, until));
        assert_eq!(overlaps(vec![read(0, 10), read(5, 20)]), 0);
        assert_eq!(overlaps(vec![read(0, 10), section("rw", 5, 20)]), 1);
        assert_eq!(overlaps(vec![section("rw", 0, 10), read(5, 20)]), 1);
    }

    #[test]
    fn excess_permit_is_found() {
        let permit = |from, until| {
            let mut one = section("permits", from, until);
            one.request.mode = Mode::Permit;
            one
        };
        assert_eq!(
            overlaps(vec![permit(0, 10), permit(1, 11), permit(10, 20)]),
            0
        );
        let found = overlaps(vec![permit(0, 10), permit(1, 11), permit(9, 20)]);
        assert_ne!(found, 0);
        let three = vec![permit(0, 10), permit(1, 30), permit(9, 40)];
        let found = check(&history(three));
        assert!(found.iter().all(|one| one.until == 10 * MS), "{found:?}");
    }

    /// Makes a section a guard of owner 7 with this hold count.
    fn of_owner(holds: u32, mut one: Section) -> Section {
        (one.request.owner, one.holds) = (Some(7), Some(holds));
        one
    }

    #[test]
    fn guards_of_one_hold_may_overlap() {
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
    fn writer_may_read_and_other_owners_may_not() {
        let read = |mut one: Section| {
            one.request.mode = Mode::Shared;
            one
        };
        let write = of_owner(1, section("rw", 0, 10));
        let own = of_owner(1, read(section("rw", 5, 20)));
        assert_eq!(overlaps(vec![write.clone(), own]), 0);
        assert_eq!(overlaps(vec![write, read(section("rw", 5, 20))]), 1);
    }

    #[test]
    fn owner_number_is_scoped_to_client_and_process() {
        let outer = of_owner(1, section("a", 0, 10));
        let mut other_client = of_owner(2, section("a", 5, 20));
        other_client.request.client = 1;
        assert_eq!(overlaps(vec![outer.clone(), other_client]), 1);
        let mut other_process = of_owner(2, section("a", 5, 20));
        other_process.process = 1;
        assert_eq!(overlaps(vec![outer, other_process]), 1);
    }

    /// Creates a history in which process 1 is killed at 10 ms with a lock that the store keeps until 3010 ms.
    /// Process 0 acquires it at this time.
    fn taken_from_the_dead(at: Time) -> History {
        let mut dead = of_owner(1, section("a", 0, 10));
        (dead.release_started, dead.released, dead.process) = (None, None, 1);
        let next = of_owner(2, section("a", at, at + 5));
        let mut history = history(vec![dead, next]);
        history.processes.entry(1).or_default().killed = Some(10 * MS);
        history
    }

    #[test]
    fn lock_of_killed_process_stays_taken_until_lease_ends() {
        assert!(check(&taken_from_the_dead(3010)).is_empty());
        let found = check(&taken_from_the_dead(3000));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].rule, Rule::AcquiredBeforeExpiry);
        // A lock that the process released or lost before it was killed is free.
        let mut left = taken_from_the_dead(500);
        left.sections[0].release_started = Some(9 * MS);
        assert!(check(&left).is_empty());
        let mut loss_reported = taken_from_the_dead(500);
        loss_reported.sections[0].loss_reported = Some(9 * MS);
        assert!(check(&loss_reported).is_empty());
        // A hold that was revoked is kept until the limit.
        let revoked = |at| {
            let mut revoked = taken_from_the_dead(at);
            let mut request = section("a", 5, 5);
            request.request.mode = Mode::Ask(Some(1200 * MS));
            (request.valid_until, request.kept_until) = (None, None);
            revoked.sections.push(request);
            check(&revoked).len()
        };
        // From a third of a lease before it.
        assert_eq!([revoked(200), revoked(205)], [1, 0]);
    }

    #[test]
    fn request_for_all_permits_excludes_others() {
        let permits = |modes: [Mode; 2], second: Time| {
            let mut sections = vec![section("a", 0, 20), section("a", second, second + 20)];
            for (one, mode) in sections.iter_mut().zip(modes) {
                one.request.mode = mode;
            }
            check(&history(sections)).len()
        };
        let (one, all) = (Mode::Permit, Mode::Exclusive);
        assert_eq!(permits([one, one], 10), 0);
        for modes in [[one, all], [all, one], [all, all]] {
            assert_eq!([permits(modes, 10), permits(modes, 21)], [1, 0]);
        }
    }

    #[test]
    fn permit_of_killed_process_stays_taken_until_lease_ends() {
        let permits = |at| {
            let mut history = taken_from_the_dead(at);
            history.sections.push(section("a", at - 1, at + 1));
            for one in &mut history.sections {
                one.request.mode = Mode::Permit;
            }
            check(&history)
        };
        assert!(permits(3020).is_empty());
        let found = permits(500);
        assert!(!found.is_empty());
        assert!(
            found
                .iter()
                .all(|one| one.rule == Rule::AcquiredBeforeExpiry)
        );
    }

    /// Only a guard with a fixed lease lets its holder rely on a lost hold until the lease ends.
    #[test]
    fn overlap_says_whether_a_fixed_lease_explains_it() {
        let fixed = |mut one: Section| {
            one.request.limits.lease = Some(3000 * MS);
            one
        };
        let explained = |sections| {
            let found = check(&history(sections));
            let since = found.iter().map(|one| one.fixed_since.map(|at| at / MS));
            since.collect::<Vec<_>>()
        };
        let (first, second) = (section("a", 1, 10), section("a", 5, 20));
        let sections = vec![first.clone(), fixed(second.clone())];
        assert_eq!(explained(sections), [None]);
        assert_eq!(explained(vec![fixed(first), second]), [Some(1)]);
        let permits = |fixed_ones: &[usize], count| {
            let permits = (0..count).map(|number| {
                let mut one = section("permits:0", number, 20 + number);
                one.request.mode = Mode::Permit;
                match fixed_ones.contains(&(number as usize)) {
                    true => fixed(one),
                    false => one,
                }
            });
            explained(permits.collect())
        };
        assert_eq!(PERMITS, 2);
        assert!(permits(&[1], 2).is_empty());
        assert_eq!(permits(&[], 3), [None; 2]);
        assert_eq!(permits(&[1], 3), [Some(1); 2]);
        // Two of the first three are too many, and only one of them has a fixed lease.
        assert_eq!(permits(&[0], 4)[2..], [None; 3]);
        assert_eq!(permits(&[0, 1], 4)[2..], [Some(1); 3]);
    }

    /// The guard of process 0 becomes a ticket at 10 ms, which the store keeps until 3010 ms.
    #[test]
    fn lock_of_ticket_stays_taken_until_lease_ends_or_client_adopts_it() {
        let acquired_at = |at, requested: Option<Time>| {
            let mut one = becomes_ticket(section("a", 0, 10), "one", 3010);
            if let Some(ticket) = &mut one.ticket {
                ticket.requested = requested.map(|at| at * MS);
            }
            let found = check(&history(vec![one, section("a", at, at + 5)]));
            found.iter().map(|one| one.rule).collect::<Vec<_>>()
        };
        assert_eq!(acquired_at(3010, None), []);
        assert_eq!(acquired_at(3000, None), [Rule::AcquiredBeforeExpiry]);
        assert_eq!(acquired_at(500, Some(500)), []);
        assert_eq!(acquired_at(500, Some(501)), [Rule::AcquiredBeforeExpiry]);
        assert_eq!(acquired_at(9, None), [Rule::Exclusion, Rule::Exclusion]);
    }
}
