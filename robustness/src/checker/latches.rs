//! No waiter passes a latch before its count is zero.
//!
//! Steps take effect at some time between question and answer, and those that failed at some time or never. So a
//! latch is closed for certain if, since its count was set, fewer steps can have counted it down than that. It is
//! open for certain from when it is known to have come to zero until a step may have set it again.

use super::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{DataLost, History, Mode, Section};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for (name, sections) in history.by_name() {
        let passed = |one: &&&Section| one.ask.mode == Mode::AwaitZero && one.got.is_some();
        for waiter in sections.iter().filter(passed) {
            let until = waiter.got.unwrap_or(waiter.asked);
            if let Some((set, count, counted)) = closed(history, &sections, waiter.asked, until) {
                let (who, after) = (waiter.who(), millis(until - set));
                let text = format!(
                    "{name}: {who} passed {after} ms after the count was set to {count}, and it was counted down \
                     {counted} times at most"
                );
                found.push(Violation {
                    rule: Rule::Latch,
                    from: waiter.asked,
                    until,
                    text,
                });
            }
        }
    }
    found
}

/// Whether the latch was closed for certain from then to then: when it was set, to what, and how often it can have
/// been counted down since.
fn closed(
    history: &History,
    sections: &[&Section],
    from: Time,
    until: Time,
) -> Option<(Time, u32, usize)> {
    let set = sections
        .iter()
        .filter_map(|one| match (one.ask.mode, one.got) {
            (Mode::SetCount(count), Some(got)) if got < from => Some((one.asked, count)),
            _ => None,
        });
    let (asked, count) = set.max()?;
    let mut lost = history.forgotten();
    if lost.any(|lost| lost.from <= until && asked <= last_lost(lost, history)) {
        return None;
    }
    let counts = sections.iter().filter(|one| {
        let may_count = one.asked <= until && ends(one) >= asked;
        one.ask.mode == Mode::CountDown && may_count
    });
    let counted = counts.count();
    (counted < count as usize).then_some((asked, count, counted))
}

/// When a step can have been lost at the latest: clients may still use a master that was replaced.
fn last_lost(lost: &DataLost, history: &History) -> Time {
    lost.until + history.lease
}

/// When a step has taken effect at the latest, if it has.
fn ends(section: &Section) -> Time {
    let answered = section.answered.filter(|_| section.failed.is_none());
    answered.unwrap_or(Time::MAX)
}

/// When the latch was open for certain.
pub(super) fn open(history: &History, sections: &[&Section]) -> Vec<(Time, Time)> {
    let may_be_set = |one: &&&Section| {
        let set = matches!(one.ask.mode, Mode::SetCount(_));
        set && (one.got.is_some() || one.failed.is_some() || one.answered.is_none())
    };
    let mut open: Vec<(Time, Time)> = Vec::new();
    for (earliest, at) in zeros(sections) {
        let sets = sections.iter().filter(may_be_set);
        let later = sets.filter(|one| ends(one) > earliest);
        let lost = history
            .forgotten()
            .filter(|lost| last_lost(lost, history) >= earliest);
        let ends = later.map(|one| one.asked).chain(lost.map(|lost| lost.from));
        let end = ends.min().unwrap_or(history.end);
        if at < end {
            open.push((at, end));
        }
    }
    open.sort_unstable();
    // Several may say the same.
    open.dedup_by(|one, before| {
        let joins = one.0 <= before.1;
        if joins {
            before.1 = before.1.max(one.1);
        }
        joins
    });
    open
}

/// When the count was zero for certain: between the first and the second time.
fn zeros(sections: &[&Section]) -> Vec<(Time, Time)> {
    // Before it is set for the first time.
    let mut zeros = vec![(Time::MIN, Time::MIN)];
    for one in sections {
        match (one.ask.mode, one.got) {
            (Mode::CountDown, Some(got)) if one.count == Some(0) => zeros.push((one.asked, got)),
            (Mode::AwaitZero, Some(got)) => zeros.push((one.asked, got)),
            (Mode::SetCount(count), Some(set)) => {
                let counted = sections.iter().filter(|one| {
                    one.ask.mode == Mode::CountDown && one.got.is_some() && one.asked >= set
                });
                let mut counted: Vec<Time> = counted.filter_map(|one| one.got).collect();
                counted.sort_unstable();
                let last = counted.get(count.saturating_sub(1) as usize);
                zeros.extend(last.map(|&last| (set, last)));
            }
            _ => {}
        }
    }
    zeros
}

#[cfg(test)]
mod tests {
    use super::super::made::{MS, history, section};
    use super::*;
    use crate::history::{DataLost, Forgetting};

    /// A step that was asked for at one millisecond and answered at another.
    fn step(mode: Mode, asked: Time, answered: Time) -> Section {
        let mut one = section("latch:0", answered, answered);
        (one.asked, one.ask.mode) = (asked * MS, mode);
        (one.valid_until, one.deadline, one.kept_until) = (None, None, None);
        one
    }

    /// Set to 2 from 10 to 20 ms, and counted down to 1 from 30 to 40 ms.
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
        let open = open(&history, &history.sections.iter().collect::<Vec<_>>());
        let millis = |(from, until)| (from / MS, until / MS);
        open.into_iter().map(millis).collect()
    }

    const BEGINNING: Time = Time::MIN / MS;

    #[test]
    fn a_waiter_that_passes_a_closed_latch_is_found() {
        assert_eq!(
            rules(with(set(), step(Mode::AwaitZero, 50, 60))),
            [Rule::Latch]
        );
        // It asked before the latch was certainly closed.
        assert_eq!(rules(with(set(), step(Mode::AwaitZero, 15, 60))), []);
    }

    #[test]
    fn a_count_without_an_answer_may_have_opened_it() {
        let mut unanswered = step(Mode::CountDown, 55, 55);
        (unanswered.answered, unanswered.got) = (None, None);
        let sections = with(set(), step(Mode::AwaitZero, 50, 60));
        assert_eq!(rules(with(sections, unanswered.clone())), []);
        // It failed before the latch was set, and may have been on its way for longer.
        let mut failed = step(Mode::CountDown, 1, 5);
        (failed.got, failed.failed) = (None, Some("ResponseTimeout".into()));
        let sections = with(set(), step(Mode::AwaitZero, 50, 60));
        assert_eq!(rules(with(sections, failed)), []);
        unanswered.asked = 65 * MS;
        let sections = with(set(), step(Mode::AwaitZero, 50, 60));
        assert_eq!(rules(with(sections, unanswered)), [Rule::Latch]);
    }

    #[test]
    fn a_latch_that_was_forgotten_is_open() {
        let mut one = history(with(set(), step(Mode::AwaitZero, 50, 60)));
        one.data_lost.push(DataLost {
            from: 45 * MS,
            until: 48 * MS,
            forgetting: Forgetting::NO_DATA,
        });
        assert!(check(&one).is_empty());
        (one.data_lost[0].from, one.data_lost[0].until) = (-9000 * MS, -5000 * MS);
        assert_eq!(check(&one).len(), 1);
    }

    #[test]
    fn it_is_open_from_zero_until_it_may_be_set() {
        let end = 60_000;
        assert_eq!(intervals(&set()), [(BEGINNING, 10)]);
        let mut last = step(Mode::CountDown, 70, 80);
        last.count = Some(0);
        let mut sections = with(set(), last);
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, end)]);
        let mut refused = step(Mode::SetCount(1), 90, 95);
        refused.got = None;
        sections.push(refused.clone());
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, end)]);
        refused.failed = Some("Unavailable".into());
        sections.push(refused);
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, 90)]);
        // It may have been set before the answer that said zero.
        sections[3].asked = 75 * MS;
        sections[4].asked = 75 * MS;
        assert_eq!(intervals(&sections), [(BEGINNING, 10)]);
    }

    #[test]
    fn counts_that_were_answered_open_it_whatever_they_said() {
        let mut wrong = step(Mode::CountDown, 70, 80);
        wrong.count = Some(1);
        let sections = with(set(), wrong);
        assert_eq!(intervals(&sections), [(BEGINNING, 10), (80, 60_000)]);
    }
}
