//! Every loss is told in time, and nothing is lost that could be kept.

use super::{Losses, MARGIN, Rule, Violation};
use crate::clock::{Time, millis, nanos};
use crate::history::{History, Section};

pub(super) fn check(history: &History, losses: Losses) -> Vec<Violation> {
    let mut found = Vec::new();
    // Those of a multi-lock are lost as one: its own section says the same.
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

/// While the store answers nobody, nothing is renewed: a lease later every guard is invalid.
fn valid_too_long(history: &History, section: &Section) -> Option<Violation> {
    let (got, until) = section.valid()?;
    let said = if section.valid_after_told {
        Some((section.told?, "was valid after it was told the loss"))
    } else {
        let cut = history.windows.iter().filter(|window| window.cut);
        let ends = cut.map(|window| (window.from + history.lease, window.until));
        // Had before, and valid in a time when nothing could be.
        let mut bad = ends.filter(|&(end, whole)| got < end && end < until && end < whole);
        bad.next()
            .map(|(end, _)| (end, "was valid although nothing could have renewed it"))
    };
    said.map(|(end, text)| violation(Rule::ValidTooLong, section, end, until, text))
}

/// The store keeps a lock until the end of its lease: before that it is not lost, unless the store has lost
/// its data.
fn taken_from_holder(section: &Section) -> Option<Violation> {
    let kept_until = section.kept_until?;
    let not_held = section.unlock_error.as_deref() == Some("Lost(NotHeld)");
    let at = match section.told {
        Some(told) => told,
        None => section.freed.filter(|_| not_held)?,
    };
    let text = "lost it while its lease ran";
    (at < kept_until).then(|| violation(Rule::TakenFromHolder, section, at, at, text))
}

/// A holder that runs hears of the end of its lease.
fn told_too_late(history: &History, section: &Section) -> Option<Violation> {
    let deadline = section.deadline?;
    let process = history.processes.get(&section.process)?;
    // Who stood still then hears of it on waking.
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
        Some(_) => "was told late that its lease had ended",
        None => "was not told that its lease had ended",
    };
    Some(violation(Rule::ToldTooLate, section, deadline, told, text))
}

/// Whether its process was stopped while it was held: then it could not renew. Or while it was requested: the lease
/// counts from before the request was sent, and may end right after the answer is read. Among thousands of
/// locks, held for the whole run, only a stop in the last lease counts, if it was longer than a sixth of that:
/// a shorter one leaves time for another renewal.
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
        text: format!("{name}: {who} {text}, {held} ms after it had it {how}"),
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
    fn valid_in_a_time_when_nothing_could_be_renewed() {
        let mut bad = history(vec![section("a", 0, 5000)]);
        bad.windows.push(cut(1000, 6000));
        assert_eq!(rules(&bad, Losses::Some), [Rule::ValidTooLong]);
        let mut well = history(vec![section("a", 0, 4000)]);
        well.windows.push(cut(1000, 6000));
        assert_eq!(rules(&well, Losses::Some), []);
        // It was over in time for a renewal.
        let mut short = history(vec![section("a", 0, 5000)]);
        short.windows.push(cut(1000, 3000));
        assert_eq!(rules(&short, Losses::Some), []);
    }

    #[test]
    fn valid_after_the_loss_was_told() {
        let mut one = section("a", 0, 100);
        (one.told, one.valid_after_told) = (Some(50 * MS), true);
        one.kept_until = None;
        let bad = history(vec![one]);
        assert_eq!(rules(&bad, Losses::Some), [Rule::ValidTooLong]);
    }

    /// Its lease ended at 3 s; it left at 9 s.
    fn late(told: Option<Time>) -> History {
        let mut one = section("a", 0, 10);
        one.deadline = Some(3000 * MS);
        (one.told, one.left, one.freed) = (told.map(|t| t * MS), Some(9000 * MS), Some(9000 * MS));
        history(vec![one])
    }

    #[test]
    fn a_loss_that_is_told_late_or_never() {
        assert_eq!(rules(&late(Some(3100)), Losses::Some), []);
        assert_eq!(rules(&late(Some(8000)), Losses::Some), [Rule::ToldTooLate]);
        assert_eq!(rules(&late(None), Losses::Some), [Rule::ToldTooLate]);
    }

    #[test]
    fn a_lock_that_is_taken_from_its_holder() {
        let mut told = late(Some(2900));
        told.sections[0].kept_until = Some(3000 * MS);
        assert_eq!(rules(&told, Losses::Some), [Rule::TakenFromHolder]);
        told.sections[0].kept_until = Some(2900 * MS);
        assert_eq!(rules(&told, Losses::Some), []);
        let mut unlocked = history(vec![section("a", 0, 10)]);
        unlocked.sections[0].unlock_error = Some("Lost(NotHeld)".into());
        assert_eq!(rules(&unlocked, Losses::Some), [Rule::TakenFromHolder]);
        // It ended while nothing came through.
        unlocked.sections[0].freed = Some(3010 * MS);
        assert_eq!(rules(&unlocked, Losses::Some), []);
    }

    #[test]
    fn who_stood_still_is_told_on_waking() {
        let mut stopped = late(Some(8000));
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((1000 * MS, Some(7900 * MS)));
        assert_eq!(rules(&stopped, Losses::Some), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(1000 * MS, Some(4000 * MS))];
        assert_eq!(rules(&stopped, Losses::Some), [Rule::ToldTooLate]);
    }

    #[test]
    fn a_stop_before_the_last_renewal_is_no_excuse() {
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
    fn a_stop_while_the_lock_was_requested_shortens_its_lease() {
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
    fn who_was_killed_is_told_nothing() {
        let mut killed = late(None);
        (killed.sections[0].left, killed.sections[0].freed) = (None, None);
        killed.processes.entry(0).or_default().killed = Some(100 * MS);
        assert_eq!(rules(&killed, Losses::Some), []);
    }

    #[test]
    fn a_loss_that_need_not_have_been() {
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
