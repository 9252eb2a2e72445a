//! Checks that no waiter passes a latch before its count is zero.
//!
//! 1. A step takes effect between its request and its answer. A step that failed takes effect at any time after its
//!    request, or never.
//! 2. A latch is certainly closed if fewer steps than its count can have counted it down since the count was set.
//!    A waiter that passes it while it is certainly closed is a violation.
//! 3. A latch is certainly open from a time at which its count is known to have reached zero until a step may have
//!    set it again. [`super::waits`] uses this to find waiters that do not pass an open latch.
//! 4. While the store may have lost its data, nothing is certain.

use super::violation::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{DataLossWindow, History, Mode, Section};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for (name, sections) in history.by_name() {
        let passed =
            |one: &&&Section| one.request.mode == Mode::AwaitZero && one.acquired.is_some();
        for waiter in sections.iter().filter(passed) {
            let until = waiter.acquired.unwrap_or(waiter.requested);
            if let Some((set, count, counted)) =
                certainly_closed(history, &sections, waiter.requested, until)
            {
                let (who, after) = (waiter.requester(), millis(until - set));
                let text = format!(
                    "{name}: {who} passed {after} ms after the count was set to {count}, and it \
                     was counted down at most {counted} times"
                );
                found.push(Violation::at(waiter.requested, Rule::Latch, text).until(until));
            }
        }
    }
    found
}

/// If the latch was certainly closed in this time, returns when it was set, its count, and how many steps can have
/// counted it down since.
fn certainly_closed(
    history: &History,
    sections: &[&Section],
    from: Time,
    until: Time,
) -> Option<(Time, u32, usize)> {
    let set = sections
        .iter()
        .filter_map(|one| match (one.request.mode, one.acquired) {
            (Mode::SetCount(count), Some(acquired)) if acquired < from => {
                Some((one.requested, count))
            }
            _ => None,
        });
    let (requested, count) = set.max()?;
    let mut lost = history.leaseless_losses();
    if lost.any(|lost| lost.from <= until && requested <= last_lost(lost, history)) {
        return None;
    }
    let counts = sections.iter().filter(|one| {
        let may_count = one.requested <= until && latest_effect(one) >= requested;
        one.request.mode == Mode::CountDown && may_count
    });
    let counted = counts.count();
    (counted < count as usize).then_some((requested, count, counted))
}

/// Returns the latest time at which a step can have been lost: clients may still use a replaced master for a while.
fn last_lost(lost: &DataLossWindow, history: &History) -> Time {
    lost.until + history.lease
}

/// Returns the latest time at which a step can have taken effect.
fn latest_effect(section: &Section) -> Time {
    let answered = section.answered.filter(|_| section.failed.is_none());
    answered.unwrap_or(Time::MAX)
}

/// Returns the times in which the latch was certainly open.
pub(super) fn open_intervals(history: &History, sections: &[&Section]) -> Vec<(Time, Time)> {
    let may_be_set = |one: &&&Section| {
        let set = matches!(one.request.mode, Mode::SetCount(_));
        set && (one.acquired.is_some() || one.failed.is_some() || one.answered.is_none())
    };
    let mut open: Vec<(Time, Time)> = Vec::new();
    for (earliest, at) in zero_intervals(sections) {
        let sets = sections.iter().filter(may_be_set);
        let later = sets.filter(|one| latest_effect(one) > earliest);
        let lost = history
            .leaseless_losses()
            .filter(|lost| last_lost(lost, history) >= earliest);
        let ends = later
            .map(|one| one.requested)
            .chain(lost.map(|lost| lost.from));
        let end = ends.min().unwrap_or(history.end);
        if at < end {
            open.push((at, end));
        }
    }
    open.sort_unstable();
    // Several zeros may belong to one interval.
    open.dedup_by(|one, before| {
        let joins = one.0 <= before.1;
        if joins {
            before.1 = before.1.max(one.1);
        }
        joins
    });
    open
}

/// Returns pairs of times. Between the first and the second one, the count was certainly zero at some moment.
fn zero_intervals(sections: &[&Section]) -> Vec<(Time, Time)> {
    // The count is zero before it is set for the first time.
    let mut zeros = vec![(Time::MIN, Time::MIN)];
    for one in sections {
        match (one.request.mode, one.acquired) {
            (Mode::CountDown, Some(acquired)) if one.count == Some(0) => {
                zeros.push((one.requested, acquired))
            }
            (Mode::AwaitZero, Some(acquired)) => zeros.push((one.requested, acquired)),
            // Unless a step may have counted it down, and another one set it again, before this one was answered.
            (Mode::SetCount(count), Some(set)) if !counts_between(sections, one.requested, set) => {
                let counted = sections.iter().filter(|one| {
                    one.request.mode == Mode::CountDown
                        && one.acquired.is_some()
                        && one.requested >= set
                });
                let mut counted: Vec<Time> = counted.filter_map(|one| one.acquired).collect();
                counted.sort_unstable();
                let last = counted.get(count.saturating_sub(1) as usize);
                zeros.extend(last.map(|&last| (set, last)));
            }
            _ => {}
        }
    }
    zeros
}

/// Returns whether a step may have counted the latch down in this time.
fn counts_between(sections: &[&Section], from: Time, until: Time) -> bool {
    let mut counts = sections
        .iter()
        .filter(|one| one.request.mode == Mode::CountDown);
    counts.any(|one| one.requested < until && latest_effect(one) > from)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, history, section};
    use super::*;
    use crate::history::DataLoss;

    /// Creates a step from the times of its request and its answer, in milliseconds.
    fn step(mode: Mode, requested: Time, answered: Time) -> Section {
        let mut one = section("latch:0", answered, answered);
        (one.requested, one.request.mode) = (requested * MS, mode);
        (one.valid_until, one.deadline, one.kept_until) = (None, None, None);
        one
    }

    /// Creates two steps: the count is set to 2 from 10 to 20 ms, and counted down to 1 from 30 to 40 ms.
    fn set() -> Vec<Section> {
        let mut counted = step(Mode::CountDown, 30, 40);
        counted.count = Some(1);
        vec![step(Mode::SetCount(2), 10, 20), counted]
    }

    fn rules(sections: Vec<Section>) -> Vec<Rule> {
        let found = check(&history(sections));
        found.iter().map(|violation| violation.rule).collect()
    }

    fn with(mut sections: Vec<Section>, one: Section) -> Vec<Section> {
        sections.push(one);
        sections
    }

    fn intervals(sections: &[Section]) -> Vec<(Time, Time)> {
        let history = history(sections.to_vec());
        let open = open_intervals(&history, &history.sections.iter().collect::<Vec<_>>());
        let millis = |(from, until)| (from / MS, until / MS);
        open.into_iter().map(millis).collect()
    }

    const BEGINNING: Time = Time::MIN / MS;

    #[test]
    fn waiter_that_passes_a_closed_latch_is_found() {
        assert_eq!(
            rules(with(set(), step(Mode::AwaitZero, 50, 60))),
            [Rule::Latch]
        );
        // The waiter sent its request before the latch was certainly closed.
        assert_eq!(rules(with(set(), step(Mode::AwaitZero, 15, 60))), []);
    }

    #[test]
    fn unanswered_count_down_may_have_opened_the_latch() {
        let mut unanswered = step(Mode::CountDown, 55, 55);
        (unanswered.answered, unanswered.acquired) = (None, None);
        let sections = with(set(), step(Mode::AwaitZero, 50, 60));
        assert_eq!(rules(with(sections, unanswered.clone())), []);
        // The step failed before the latch was set, but may have taken effect later.
        let mut failed = step(Mode::CountDown, 1, 5);
        (failed.acquired, failed.failed) = (None, Some("ResponseTimeout".into()));
        let sections = with(set(), step(Mode::AwaitZero, 50, 60));
        assert_eq!(rules(with(sections, failed)), []);
        unanswered.requested = 65 * MS;
        let sections = with(set(), step(Mode::AwaitZero, 50, 60));
        assert_eq!(rules(with(sections, unanswered)), [Rule::Latch]);
    }

    #[test]
    fn latch_is_not_certainly_closed_after_data_loss() {
        let mut one = history(with(set(), step(Mode::AwaitZero, 50, 60)));
        one.record_data_loss(45 * MS, 48 * MS, DataLoss::NO_DATA);
        assert!(check(&one).is_empty());
        (one.data_losses[0].from, one.data_losses[0].until) = (-9000 * MS, -5000 * MS);
        assert_eq!(check(&one).len(), 1);
    }

    #[test]
    fn latch_is_open_from_zero_until_it_may_be_set() {
        let end = 60_000;
        assert_eq!(intervals(&set()), [(BEGINNING, 10)]);
        let mut last = step(Mode::CountDown, 70, 80);
        last.count = Some(0);
        let mut sections = with(set(), last);
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, end)]);
        let mut refused = step(Mode::SetCount(1), 90, 95);
        refused.acquired = None;
        sections.push(refused.clone());
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, end)]);
        refused.failed = Some("Unavailable".into());
        sections.push(refused);
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, 90)]);
        // The count may have been set before the answer that reported zero.
        sections[3].requested = 75 * MS;
        sections[4].requested = 75 * MS;
        assert_eq!(intervals(&sections), [(BEGINNING, 10)]);
    }

    #[test]
    fn enough_answered_count_downs_open_the_latch() {
        let mut wrong = step(Mode::CountDown, 70, 80);
        wrong.count = Some(1);
        let sections = with(set(), wrong);
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, 60_000)]);
        // The first set may have taken effect before a count-down, and the second one after it.
        let mut sections = vec![step(Mode::SetCount(1), 10, 20)];
        sections.push(step(Mode::SetCount(3), 10, 20));
        sections.push(step(Mode::CountDown, 10, 20));
        sections.push(step(Mode::CountDown, 30, 40));
        sections[2].count = Some(0);
        sections[3].count = Some(2);
        assert_eq!(intervals(&sections), [(BEGINNING, 10)]);
    }
}
