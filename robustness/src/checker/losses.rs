//! Checks that holders learn of every loss in time, and that no hold is lost that could be kept.
//!
//! 1. While the store answers no client, nothing can be renewed. A guard from before such a time must be invalid one
//!    lease after its start ([`Rule::ValidTooLong`]), and any guard once its loss was reported.
//! 2. When a lease ends, a holder that runs must learn of it within [`MARGIN`] ([`Rule::ToldTooLate`]). A stopped
//!    process may learn of it when it continues, and a killed one does not.
//! 3. The store keeps a hold until the end of its lease. An earlier loss is [`Rule::TakenFromHolder`].
//! 4. If the fault is too short to prevent renewal, or concerns another server, any loss is
//!    [`Rule::LostWithoutNeed`], unless the process was stopped and could not renew.

use super::{Losses, MARGIN, Rule, Violation};
use crate::clock::{Time, millis, nanos};
use crate::history::{History, Section};

pub(super) fn check(history: &History, losses: Losses) -> Vec<Violation> {
    let mut found = Vec::new();
    // The members of a multi-lock are lost together, and its own section reports the loss.
    for section in history.sections.iter().filter(|one| !one.ask.part) {
        found.extend(valid_too_long(history, section));
        found.extend(told_too_late(history, section));
        found.extend(taken_from_holder(section));
        let needless = match losses {
            Losses::None => true,
            Losses::OutOfReach => !history.out_of_reach.contains(&section.ask.name),
            Losses::Some => false,
        };
        if needless && section.was_lost() && !stood_still(history, section, losses) {
            let at = section.told.or(section.freed).unwrap_or(history.end);
            found.push(violation(
                Rule::LostWithoutNeed,
                section,
                at,
                at,
                "was lost",
            ));
        }
    }
    found
}

/// Finds a guard that was valid although its loss was reported, or although no renewal was possible for a lease.
fn valid_too_long(history: &History, section: &Section) -> Option<Violation> {
    let (got, until) = section.valid()?;
    let said = if section.valid_after_told {
        Some((section.told?, "was valid after its loss was reported"))
    } else {
        let cut = history.windows.iter().filter(|window| window.cut);
        let ends = cut.map(|window| (window.from + history.lease, window.until));
        // `end` is a lease after the cut began. During the rest of the cut, no guard from before it is valid.
        let mut bad = ends.filter(|&(end, whole)| got < end && end < until && end < whole);
        bad.next()
            .map(|(end, _)| (end, "was valid although nothing could have renewed it"))
    };
    said.map(|(end, text)| violation(Rule::ValidTooLong, section, end, until, text))
}

/// Finds a loss before the end of the lease. Only a store that lost its data explains it.
fn taken_from_holder(section: &Section) -> Option<Violation> {
    let kept_until = section.kept_until?;
    let not_held = section.unlock_error.as_deref() == Some("Lost(NotHeld)");
    let at = match section.told {
        Some(told) => told,
        None => section.freed.filter(|_| not_held)?,
    };
    let text = "lost the lock before its lease ended";
    (at < kept_until).then(|| violation(Rule::TakenFromHolder, section, at, at, text))
}

/// Finds a running holder that did not learn of the end of its lease in time.
fn told_too_late(history: &History, section: &Section) -> Option<Violation> {
    let deadline = section.deadline?;
    let process = history.processes.get(&section.process)?;
    // A process that was stopped at that time learns of it when it continues.
    let mut by = deadline + nanos(MARGIN);
    for &(from, until) in &process.stopped {
        let until = until.unwrap_or(history.end);
        if from < by && deadline < until {
            by = by.max(until + nanos(MARGIN));
        }
    }
    let end = section.left.or(process.killed).unwrap_or(history.end);
    if end <= by || section.told.is_some_and(|told| told <= by) {
        return None;
    }
    let told = section.told.unwrap_or(end);
    let text = match section.told {
        Some(_) => "detected the end of its lease late",
        None => "did not detect the end of its lease",
    };
    Some(violation(Rule::ToldTooLate, section, deadline, told, text))
}

/// Returns whether the process was stopped while the lock was held or requested. A stopped holder cannot renew. The
/// lease counts from before the request was sent, so it may end right after the answer is read. If thousands of
/// locks are held for the whole run ([`Losses::OutOfReach`]), only a stop within the last lease counts, and only if
/// it was longer than a sixth of a lease: a shorter one leaves time for another renewal.
fn stood_still(history: &History, section: &Section, losses: Losses) -> bool {
    let from = section.asked;
    let until = section.told.or(section.freed).unwrap_or(history.end);
    let (from, least) = match losses {
        Losses::OutOfReach => (from.max(until - history.lease), history.lease / 6),
        Losses::None | Losses::Some => (from, 0),
    };
    let process = history.processes.get(&section.process);
    let mut stops = process.iter().flat_map(|process| &process.stopped);
    stops.any(|&(stop, on)| {
        let on = on.unwrap_or(Time::MAX);
        stop < until && on > from && on - stop > least
    })
}

fn violation(rule: Rule, section: &Section, from: Time, until: Time, text: &str) -> Violation {
    let (who, name) = (section.who(), &section.ask.name);
    let held = section.got.map_or(0, |got| millis(from - got));
    let how = section.unlock_error.as_deref().unwrap_or("");
    Violation {
        rule,
        from,
        until,
        text: format!("{name}: {who} {text}, {held} ms after the acquisition {how}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::made::{MS, history, section};
    use super::*;
    use crate::history::Window;

    fn rules(history: &History, losses: Losses) -> Vec<Rule> {
        let found = check(history, losses);
        found.iter().map(|violation| violation.rule).collect()
    }

    fn cut(from: Time, until: Time) -> Window {
        Window {
            from: from * MS,
            until: until * MS,
            cut: true,
        }
    }

    #[test]
    fn guard_that_outlives_its_last_possible_renewal_is_found() {
        let mut bad = history(vec![section("a", 0, 5000)]);
        bad.windows.push(cut(1000, 6000));
        assert_eq!(rules(&bad, Losses::Some), [Rule::ValidTooLong]);
        let mut well = history(vec![section("a", 0, 4000)]);
        well.windows.push(cut(1000, 6000));
        assert_eq!(rules(&well, Losses::Some), []);
        // The cut ended in time for a renewal.
        let mut short = history(vec![section("a", 0, 5000)]);
        short.windows.push(cut(1000, 3000));
        assert_eq!(rules(&short, Losses::Some), []);
    }

    #[test]
    fn guard_that_is_valid_after_its_reported_loss_is_found() {
        let mut one = section("a", 0, 100);
        (one.told, one.valid_after_told) = (Some(50 * MS), true);
        one.kept_until = None;
        let bad = history(vec![one]);
        assert_eq!(rules(&bad, Losses::Some), [Rule::ValidTooLong]);
    }

    /// Creates a history of a holder whose lease ended at 3 s and that left its section at 9 s.
    fn late(told: Option<Time>) -> History {
        let mut one = section("a", 0, 10);
        one.deadline = Some(3000 * MS);
        (one.told, one.left, one.freed) = (told.map(|t| t * MS), Some(9000 * MS), Some(9000 * MS));
        history(vec![one])
    }

    #[test]
    fn loss_that_is_reported_late_or_never_is_found() {
        assert_eq!(rules(&late(Some(3100)), Losses::Some), []);
        assert_eq!(rules(&late(Some(8000)), Losses::Some), [Rule::ToldTooLate]);
        assert_eq!(rules(&late(None), Losses::Some), [Rule::ToldTooLate]);
    }

    #[test]
    fn lock_that_is_taken_from_its_holder_is_found() {
        let mut told = late(Some(2900));
        told.sections[0].kept_until = Some(3000 * MS);
        assert_eq!(rules(&told, Losses::Some), [Rule::TakenFromHolder]);
        told.sections[0].kept_until = Some(2900 * MS);
        assert_eq!(rules(&told, Losses::Some), []);
        let mut unlocked = history(vec![section("a", 0, 10)]);
        unlocked.sections[0].unlock_error = Some("Lost(NotHeld)".into());
        assert_eq!(rules(&unlocked, Losses::Some), [Rule::TakenFromHolder]);
        // The lease ended before the release was answered.
        unlocked.sections[0].freed = Some(3010 * MS);
        assert_eq!(rules(&unlocked, Losses::Some), []);
    }

    #[test]
    fn stopped_holder_learns_of_loss_when_it_continues() {
        let mut stopped = late(Some(8000));
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((1000 * MS, Some(7900 * MS)));
        assert_eq!(rules(&stopped, Losses::Some), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(1000 * MS, Some(4000 * MS))];
        assert_eq!(rules(&stopped, Losses::Some), [Rule::ToldTooLate]);
    }

    #[test]
    fn stop_before_the_last_lease_does_not_excuse_a_loss() {
        let mut stopped = late(Some(9000));
        stopped.sections[0].deadline = Some(9000 * MS);
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((5500 * MS, Some(6500 * MS)));
        assert_eq!(rules(&stopped, Losses::OutOfReach), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(4500 * MS, Some(5500 * MS))];
        assert_eq!(rules(&stopped, Losses::OutOfReach), [Rule::LostWithoutNeed]);
        assert_eq!(rules(&stopped, Losses::None), []);
    }

    #[test]
    fn stop_during_the_request_excuses_a_loss() {
        let mut stopped = late(Some(3100));
        (stopped.sections[0].asked, stopped.sections[0].got) = (100 * MS, Some(3000 * MS));
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((110 * MS, Some(2999 * MS)));
        assert_eq!(rules(&stopped, Losses::None), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(10 * MS, Some(90 * MS))];
        assert_eq!(rules(&stopped, Losses::None), [Rule::LostWithoutNeed]);
    }

    #[test]
    fn killed_holder_need_not_learn_of_loss() {
        let mut killed = late(None);
        (killed.sections[0].left, killed.sections[0].freed) = (None, None);
        killed.processes.entry(0).or_default().killed = Some(100 * MS);
        assert_eq!(rules(&killed, Losses::Some), []);
    }

    #[test]
    fn avoidable_loss_is_found() {
        let lost = late(Some(3100));
        assert_eq!(rules(&lost, Losses::None), [Rule::LostWithoutNeed]);
        let mut unlocked = history(vec![section("a", 0, 10)]);
        unlocked.sections[0].unlock_error = Some("Lost(LeaseEnded)".into());
        assert_eq!(rules(&unlocked, Losses::None), [Rule::LostWithoutNeed]);
        assert_eq!(
            rules(&unlocked, Losses::OutOfReach),
            [Rule::LostWithoutNeed]
        );
        unlocked.out_of_reach.insert("a".into());
        assert_eq!(rules(&unlocked, Losses::OutOfReach), []);
        unlocked.sections[0].unlock_error = Some("ResponseTimeout".into());
        assert_eq!(rules(&unlocked, Losses::None), []);
    }
}
