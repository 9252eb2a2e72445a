//! Checks that each slot of a job is run once, and that none is left out.
//!
//! A run is a section of the lock with the name of the job, so the other checks find two runs at the same time, and
//! work that continues, or ends early, beside the lock. Here:
//!
//! 1. A slot is run again only as a later attempt that its job allows, and only if the attempt before is dead: its
//!    process was killed, it lost the lock, or something was broken so that its end may not have been recorded
//!    ([`Rule::SlotRepeated`]).
//! 2. A slot is run if a process could do so all the time until the next slot was due ([`Rule::SlotSkipped`]): it ran the
//!    job, and nothing was broken, killed or stopped meanwhile, nor in the lease before, for which a dead
//!    client may have kept the lock. Excuses: a job that does not overlap was busy with an earlier slot when this one was due
//!    (skip), or until the next one was (wait).
//! 3. A run whose process was killed, or stopped until it had lost the lock, is repeated when its lease has ended, if its job
//!    allows that, no later slot was run meanwhile, and a process could do so ([`Rule::SlotSkipped`]): it has watched the run
//!    since the slot was due, has begun to run the job later, or has lost the run itself. Meanwhile nothing was broken, killed
//!    or stopped, except for what ended this attempt and those before.
//! 4. When the clock of a server is set back, slots begin later while it is behind. What the server stored before ends that
//!    much later.

use std::collections::BTreeMap;
use std::time::Duration;

use redlatch::job::Overlap;

use super::violation::{Rule, Violation};
use crate::clock::{Time, millis, nanos};
use crate::history::{History, JobRun, Process, Scheduler, Section};
use crate::names::{JobSettings, job_settings};

struct Job<'a> {
    history: &'a History,
    name: &'a str,
    settings: &'a JobSettings,
    /// In the order in which they began.
    runs: Vec<Ran<'a>>,
    schedulers: Vec<&'a Scheduler>,
}

#[derive(Clone, Copy)]
struct Ran<'a> {
    run: JobRun,
    begun: Time,
    section: &'a Section,
}

pub(super) fn check(history: &History) -> Vec<Violation> {
    jobs(history).iter().flat_map(Job::repeated).collect()
}

/// Finds slots that were left out. `settles`: how long after its work a run may keep the job busy, because its end is
/// recorded, the lock is released, and another process acquires it; the clocks of the processes also differ by less.
pub fn check_slots(history: &History, settles: Duration) -> Vec<Violation> {
    let jobs = jobs(history);
    let skipped = jobs.iter().flat_map(|job| job.skipped(nanos(settles)));
    let not_repeated = jobs.iter().flat_map(|job| job.not_repeated(nanos(settles)));
    skipped.chain(not_repeated).collect()
}

/// Returns all jobs that processes have run.
fn jobs(history: &History) -> Vec<Job<'_>> {
    let sections = history.by_name();
    let mut schedulers: BTreeMap<&str, Vec<&Scheduler>> = BTreeMap::new();
    for scheduler in &history.schedulers {
        schedulers
            .entry(&scheduler.job)
            .or_default()
            .push(scheduler);
    }
    let jobs = schedulers.into_iter().filter_map(|(name, schedulers)| {
        let runs = sections.get(name).into_iter().flatten();
        let runs = runs.filter_map(|&section| {
            Some(Ran {
                run: section.request.run?,
                begun: section.acquired?,
                section,
            })
        });
        let mut runs: Vec<Ran<'_>> = runs.collect();
        runs.sort_by_key(|ran| ran.begun);
        Some(Job {
            history,
            name,
            settings: job_settings(name)?,
            runs,
            schedulers,
        })
    });
    jobs.collect()
}

impl Job<'_> {
    /// Finds slots that were run once more although they may not be.
    fn repeated(&self) -> Vec<Violation> {
        let mut latest: BTreeMap<Time, Ran<'_>> = BTreeMap::new();
        let mut found = Vec::new();
        for ran in &self.runs {
            let before = latest.insert(ran.run.slot, *ran);
            let why = match before {
                _ if ran.run.attempt > self.settings.retries + 1 => "more often than it may",
                Some(before) if ran.run.attempt <= before.run.attempt => "as the same attempt",
                Some(before) if before.section.valid_until > Some(ran.begun) => "while it ran",
                Some(before) if self.has_ended(before) => "although it had ended",
                _ => continue,
            };
            let from = before.map_or(ran.begun, |before| before.begun);
            let text = format!("{} {why}", ran.section.requester());
            found.push(self.violation(Rule::SlotRepeated, ran.run, from, ran.begun, &text));
        }
        found
    }

    /// Returns whether the end of a run was certainly recorded. A process that is stopped after it has checked the lock can
    /// end the work when it continues, and another one may run the slot by then.
    fn has_ended(&self, ran: Ran<'_>) -> bool {
        let ended = ran.section.released.filter(|_| !ran.section.was_lost());
        let checked = ran.section.valid_until.unwrap_or(ran.begun);
        ended.is_some_and(|ended| self.is_quiet(checked, ended + self.history.lease, &[]))
    }

    /// Finds slots that were not run although a process could do so.
    fn skipped(&self, settles: Time) -> Vec<Violation> {
        let period = nanos(self.settings.period);
        let mut found = BTreeMap::new();
        for scheduler in &self.schedulers {
            let end = self.end_of(scheduler);
            let mut slot = ((scheduler.from + scheduler.clock) / period + 1) * period;
            loop {
                let due = slot - scheduler.clock;
                // A slot begins when the clock of the server has reached it, or almost.
                let behind = self.history.clock_behind(due).max(0);
                let delay = behind + nanos(self.settings.jitter);
                let decided = (due - settles, due + delay + settles);
                let next = (decided.0 + period, decided.1 + period);
                if next.1 > end {
                    break;
                }
                let ran = self.runs.iter().any(|ran| ran.run.slot == slot);
                let busy = match self.settings.overlap {
                    Overlap::Wait => self.is_busy(slot, next),
                    Overlap::Skip => self.is_busy(slot, decided),
                    _ => false,
                };
                let begin = self.history.lease_begin(due - settles);
                if !ran && !busy && self.is_quiet(begin, next.1, &[]) {
                    let process = scheduler.process;
                    let text = format!("not run, but process {process} could");
                    let run = JobRun { slot, attempt: 1 };
                    found.entry(slot).or_insert_with(|| {
                        self.violation(Rule::SlotSkipped, run, due, next.1, &text)
                    });
                }
                slot += period;
            }
        }
        found.into_values().collect()
    }

    /// Returns until when a process runs the job.
    fn end_of(&self, scheduler: &Scheduler) -> Time {
        let process = self.history.processes.get(&scheduler.process);
        let killed = process.and_then(|process| process.killed);
        killed.or(scheduler.until).unwrap_or(self.history.end)
    }

    /// Returns whether a run of a slot before this one may have lasted at some moment of this time.
    fn is_busy(&self, slot: Time, (from, until): (Time, Time)) -> bool {
        let mut earlier = self.runs.iter().filter(|ran| ran.run.slot < slot);
        earlier.any(|ran| {
            let section = ran.section;
            let end = match section.released.filter(|_| !section.was_lost()) {
                Some(released) => released,
                None => {
                    let lasted = section.valid_until.max(section.loss_reported);
                    self.history.lease_end(lasted.unwrap_or(ran.begun))
                }
            };
            ran.begun < until && from < end
        })
    }

    /// Finds runs of dead processes that were not repeated.
    fn not_repeated(&self, settles: Time) -> Vec<Violation> {
        let mut found = Vec::new();
        for ran in &self.runs {
            let Some(gone) = self
                .gone(*ran)
                .filter(|_| ran.run.attempt <= self.settings.retries)
            else {
                continue;
            };
            // Those of the slot, this one and the attempts before.
            let earlier = self
                .runs
                .iter()
                .filter(|one| one.run.slot == ran.run.slot && one.run.attempt <= ran.run.attempt);
            let dead: Vec<Time> = earlier.clone().filter_map(|one| self.gone(*one)).collect();
            let is_next = |next: &Ran<'_>, until: Time| {
                let later = (next.run.slot, next.run.attempt) > (ran.run.slot, ran.run.attempt);
                later && ran.begun < next.begun && next.begun <= until
            };
            let missing = self.schedulers.iter().find_map(|scheduler| {
                let of_process = earlier.clone().map(|one| one.section);
                let of_process = of_process.filter(|one| one.process == scheduler.process);
                // A process that has lost the run waits for the end of its lease, too.
                let lost = of_process.filter_map(|one| one.loss_reported).max();
                let watches = lost.map_or(scheduler.from, |lost| lost.max(scheduler.from));
                let until = watches.max(self.history.lease_end(gone)) + self.history.margin;
                let due = ran.run.slot - scheduler.clock - settles;
                let begin = self.history.lease_begin(due).max(scheduler.from);
                let could = until <= self.end_of(scheduler)
                    && self.is_quiet(begin.min(ran.begun), until, &dead);
                let is_repeated = || self.runs.iter().any(|next| is_next(next, until));
                (could && !is_repeated()).then_some(until)
            });
            if let Some(until) = missing {
                let who = ran.section.requester();
                let text = format!("not repeated after the end of {who}");
                found.push(self.violation(Rule::SlotSkipped, ran.run, gone, until, &text));
            }
        }
        found
    }

    /// Returns when the process was killed while the run lasted, or stopped until the run was lost.
    fn gone(&self, ran: Ran<'_>) -> Option<Time> {
        let process = self.history.processes.get(&ran.section.process)?;
        let lost = ran.section.loss_reported;
        let killed = process.killed.filter(|_| lost.is_none());
        let margin = self.history.margin;
        // One that had continued before lost it for another reason.
        let until_lost = |&&(stopped, continued): &&(Time, Option<Time>)| {
            let lasts = |lost| continued.is_none_or(|continued| lost <= continued + margin);
            lost.is_some_and(|lost| (ran.begun..lost).contains(&stopped) && lasts(lost))
        };
        let stopped = process.stopped.iter().rfind(until_lost);
        let gone = killed.or(stopped.map(|stop| stop.0))?;
        (ran.section.released.is_none() && ran.begun <= gone).then_some(gone)
    }

    /// Returns whether nothing was broken in this time, and all processes ran that run the job, except for what began at
    /// these moments.
    fn is_quiet(&self, from: Time, until: Time, except: &[Time]) -> bool {
        let history = self.history;
        let meets =
            |(begun, end): (Time, Time)| begun <= until && from <= end && !except.contains(&begun);
        let windows = history.windows.iter().map(|one| (one.from, one.until));
        let losses = history.data_losses.iter().map(|one| (one.from, one.until));
        let failovers = history.failovers.iter().copied();
        let mut faults = windows.chain(losses).chain(failovers);
        let of_job = |number: &usize| self.schedulers.iter().any(|one| one.process == *number);
        let mut processes = history
            .processes
            .iter()
            .filter(|(number, _)| of_job(number));
        let was_away = |process: &Process| {
            let killed = process.killed.map(|at| (at, at));
            let stops = process.stopped.iter();
            let stops = stops.map(|&(from, until)| (from, until.unwrap_or(history.end)));
            killed.into_iter().chain(stops).any(meets)
        };
        !faults.any(meets) && !processes.any(|(_, process)| was_away(process))
    }

    fn violation(&self, rule: Rule, run: JobRun, from: Time, until: Time, text: &str) -> Violation {
        let (name, slot, attempt) = (self.name, millis(run.slot), run.attempt);
        let text = format!("{name}: attempt {attempt} of slot {slot} ms: {text}");
        Violation::at(from, rule, text).until(until)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, history, section};
    use super::*;
    use crate::history::FaultWindow;

    /// Creates a run of a slot (in seconds) that lasts from one millisecond to another.
    fn run(name: &str, slot: Time, attempt: u32, from: Time, until: Time) -> Section {
        let mut one = section(name, from, until);
        let slot = slot * 1000 * MS;
        one.request.run = Some(JobRun { slot, attempt });
        (one.deadline, one.kept_until) = (one.valid_until, one.valid_until);
        one
    }

    /// Makes process 1 that of a run, which it does not end.
    fn unended(mut one: Section) -> Section {
        (one.process, one.release_started, one.released) = (1, None, None);
        one
    }

    /// Creates a history in which processes 0 and 1 run a job from the beginning until then, in milliseconds.
    fn scheduled(name: &str, until: Time, sections: Vec<Section>) -> History {
        let mut history = history(sections);
        for process in 0..2 {
            history.processes.entry(process).or_default();
            history.schedulers.push(Scheduler {
                process,
                job: name.to_owned(),
                from: 0,
                until: Some(until * MS),
                clock: 0,
            });
        }
        history
    }

    fn found(history: &History) -> Vec<(Rule, Time)> {
        let mut found = check(history);
        found.extend(check_slots(history, Duration::from_millis(500)));
        found
            .into_iter()
            .map(|one| (one.rule, one.from / MS))
            .collect()
    }

    fn window(from: Time, until: Time) -> FaultWindow {
        FaultWindow {
            from: from * MS,
            until: until * MS,
            is_outage: false,
        }
    }

    #[test]
    fn slot_is_run_once() {
        // Job 5 is repeated once, job 4 twice.
        let again = |attempt, from| {
            let runs = vec![
                run("job:4", 5, 1, 5_000, 6_000),
                run("job:4", 5, attempt, from, from + 1000),
            ];
            found(&scheduled("job:4", 9_000, runs))
        };
        assert_eq!(again(1, 7_000), [(Rule::SlotRepeated, 5_000)]);
        assert_eq!(again(2, 7_000), [(Rule::SlotRepeated, 5_000)]);
        assert_eq!(again(2, 5_500), [(Rule::SlotRepeated, 5_000)]);
        assert_eq!(again(4, 7_000), [(Rule::SlotRepeated, 5_000)]);
        // Of another slot.
        let runs = vec![
            run("job:4", 5, 1, 5_000, 6_000),
            run("job:4", 10, 1, 10_000, 11_000),
        ];
        assert_eq!(found(&scheduled("job:4", 14_000, runs)), []);
    }

    #[test]
    fn dead_run_is_repeated_as_often_as_the_job_allows() {
        let killed = |name, repeated: Option<(u32, Time)>| {
            let mut runs = vec![unended(run(name, 10, 1, 10_000, 11_000))];
            let again = |(attempt, at)| run(name, 10, attempt, at, at + 100);
            runs.extend(repeated.map(again));
            let mut history = scheduled(name, 18_000, runs);
            history.processes.entry(1).or_default().killed = Some(11_000 * MS);
            history
        };
        assert_eq!(found(&killed("job:5", Some((2, 14_050)))), []);
        // Twice is too often.
        let found_at = found(&killed("job:5", Some((3, 14_050))));
        assert_eq!(found_at, [(Rule::SlotRepeated, 10_000)]);
        let missing = [(Rule::SlotSkipped, 11_000)];
        assert_eq!(found(&killed("job:5", None)), missing);
        assert_eq!(found(&killed("job:5", Some((2, 15_501)))), missing);
        // A fault, the end of the other process, or a later slot excuses it.
        let mut history = killed("job:5", None);
        history.windows.push(window(13_000, 13_001));
        assert_eq!(found(&history), []);
        let mut history = killed("job:5", None);
        history.schedulers[0].until = Some(15_000 * MS);
        assert_eq!(found(&history), []);
        let mut history = killed("job:5", None);
        let later = run("job:5", 20, 1, 15_000, 16_000);
        history.sections.push(later);
        assert_eq!(found(&history), []);
        // The fault that killed it does not excuse it.
        let mut history = killed("job:5", None);
        history.windows.push(window(11_000, 11_000));
        assert_eq!(found(&history), missing);
        // Its lease ends later when the clock is set back.
        let mut history = killed("job:5", Some((2, 15_600)));
        assert_eq!(found(&history), missing);
        for (at, back, expected) in [
            (11_000, 100, &[][..]),
            (13_999, 100, &[]),
            (13_999, 99, &missing),
            // Before its last renewal, or when it has ended.
            (10_999, 100, &missing),
            (14_000, 100, &missing),
        ] {
            history.clock_steps = vec![(at * MS, -back * MS)];
            assert_eq!(found(&history), expected, "set back {back} ms at {at} ms");
        }
        // A process that was stopped until it had lost its lock.
        let mut history = killed("job:5", None);
        let process = history.processes.entry(1).or_default();
        process.killed = None;
        process.stopped.push((11_000 * MS, Some(14_500 * MS)));
        history.sections[0].loss_reported = Some(14_500 * MS);
        assert_eq!(found(&history), missing);
        // It continued, and a fault that nothing else tells of ended its lock later.
        history.sections[0].loss_reported = Some(14_501 * MS + history.margin);
        assert_eq!(found(&history), []);
    }

    #[test]
    fn each_attempt_is_repeated() {
        // Attempt 1 dies with process 1, attempt 2 with process 2. What killed them lasts until 11.5 and 15.5 s.
        let killed_twice = |third: Option<Time>| {
            let mut second = unended(run("job:4", 10, 2, 14_050, 15_000));
            second.process = 2;
            let mut runs = vec![
                run("job:4", 5, 1, 5_000, 5_100),
                unended(run("job:4", 10, 1, 10_000, 11_000)),
                second,
            ];
            runs.extend(third.map(|at| run("job:4", 10, 3, at, at + 100)));
            let mut history = scheduled("job:4", 19_900, runs);
            let process = 2;
            let scheduler = history.schedulers[0].clone();
            history.schedulers.push(Scheduler {
                process,
                ..scheduler
            });
            for (process, at) in [(1, 11_000), (2, 15_000)] {
                history.processes.entry(process).or_default().killed = Some(at * MS);
                history.windows.push(window(at, at + 500));
            }
            history
        };
        let missing = [(Rule::SlotSkipped, 15_000)];
        assert_eq!(found(&killed_twice(Some(19_500))), []);
        assert_eq!(found(&killed_twice(Some(19_501))), missing);
        assert_eq!(found(&killed_twice(None)), missing);
        // Another fault, also one during the first attempt, may end the watch.
        for at in [10_500, 12_000, 16_000] {
            let mut history = killed_twice(None);
            history.windows.push(window(at, at));
            assert_eq!(found(&history), []);
        }
    }

    #[test]
    fn lonely_process_repeats_its_own_run() {
        let lost_at_16 = |again: Option<Time>| {
            let mut lost = unended(run("job:5", 10, 1, 10_000, 11_000));
            lost.loss_reported = Some(16_000 * MS);
            let mut runs = vec![lost];
            runs.extend(again.map(|at| run("job:5", 10, 2, at, at + 100)));
            let mut history = scheduled("job:5", 18_000, runs);
            history.schedulers.remove(0);
            let process = history.processes.entry(1).or_default();
            process.stopped.push((11_000 * MS, Some(16_000 * MS)));
            history
        };
        let missing = [(Rule::SlotSkipped, 11_000)];
        assert_eq!(found(&lost_at_16(Some(17_500))), []);
        assert_eq!(found(&lost_at_16(Some(17_501))), missing);
        assert_eq!(found(&lost_at_16(None)), missing);
        let mut history = lost_at_16(None);
        history.schedulers[0].until = Some(17_499 * MS);
        assert_eq!(found(&history), []);
        // The process was killed instead, and another one began at 16 s.
        let replaced = |again: Option<Time>| {
            let mut history = lost_at_16(again);
            history.sections[0].loss_reported = None;
            let process = history.processes.entry(1).or_default();
            process.stopped.clear();
            process.killed = Some(11_000 * MS);
            history.windows.push(window(11_000, 15_900));
            let (process, from) = (2, 16_000 * MS);
            let scheduler = history.schedulers[0].clone();
            history.schedulers.push(Scheduler {
                process,
                from,
                ..scheduler
            });
            history
        };
        assert_eq!(found(&replaced(Some(17_500))), []);
        assert_eq!(found(&replaced(Some(17_501))), missing);
        assert_eq!(found(&replaced(None)), missing);
        // The record may be lost before it begins.
        let mut history = replaced(None);
        history.windows.push(window(10_500, 10_500));
        assert_eq!(found(&history), []);
    }

    #[test]
    fn end_that_was_not_recorded_excuses_a_repetition() {
        let runs = vec![
            run("job:4", 5, 1, 5_000, 6_000),
            run("job:4", 5, 2, 9_500, 9_600),
        ];
        let mut history = scheduled("job:4", 9_900, runs);
        history.windows.push(window(9_100, 9_200));
        assert_eq!(found(&history), [(Rule::SlotRepeated, 5_000)]);
        history.windows.push(window(5_900, 6_000));
        assert_eq!(found(&history), []);
    }

    #[test]
    fn process_that_was_stopped_after_its_last_check_may_end_the_work_too_late() {
        let stopped = |from: Time, until: Time| {
            let mut late = run("job:4", 5, 1, 5_000, 9_600);
            (late.process, late.valid_until) = (1, Some(6_000 * MS));
            let runs = vec![late, run("job:4", 5, 2, 9_500, 9_700)];
            let mut history = scheduled("job:4", 9_900, runs);
            let stops = &mut history.processes.entry(1).or_default().stopped;
            stops.push((from * MS, Some(until * MS)));
            found(&history)
        };
        assert_eq!(stopped(6_001, 9_599), []);
        assert_eq!(stopped(5_001, 5_999), [(Rule::SlotRepeated, 5_000)]);
    }

    #[test]
    fn each_slot_is_run_or_excused() {
        // A job with the period of 2 s that waits, one that overlaps, and one that skips, with 5 s.
        let (waits, overlaps, skips) = ("job:2", "job:3", "job:4");
        let lone = |name, slot, from, until| vec![run(name, slot, 1, from, until)];
        for (name, end, runs, missing) in [
            (waits, 4_400, vec![], vec![]),
            (waits, 5_100, vec![], vec![2_000]),
            (waits, 5_100, lone(waits, 2, 2_000, 2_100), vec![]),
            // The run of a slot before lasts until the next slot, or a moment before that.
            (waits, 7_200, lone(waits, 2, 2_000, 5_600), vec![]),
            (waits, 7_200, lone(waits, 2, 2_000, 4_900), vec![4_000]),
            (
                overlaps,
                7_200,
                lone(overlaps, 2, 2_000, 6_000),
                vec![4_000],
            ),
            (skips, 16_000, lone(skips, 5, 5_000, 9_600), vec![]),
            (skips, 16_000, lone(skips, 5, 5_000, 9_400), vec![10_000]),
            // That of a later slot does not excuse.
            (skips, 16_000, lone(skips, 10, 10_000, 10_100), vec![5_000]),
        ] {
            let history = scheduled(name, end, runs);
            let missing: Vec<_> = missing
                .into_iter()
                .map(|at| (Rule::SlotSkipped, at))
                .collect();
            assert_eq!(found(&history), missing, "{name} {end}");
        }
        // A process that ends cannot.
        let mut history = scheduled(skips, 16_000, vec![]);
        history.processes.entry(0).or_default().killed = Some(1_000 * MS);
        history.schedulers[1].until = Some(1_000 * MS);
        assert_eq!(found(&history), []);
        // What was broken within a lease before, or until the next slot.
        let broken = |from, until| {
            let mut history = scheduled(skips, 11_000, vec![]);
            history.windows.push(window(from, until));
            found(&history).len()
        };
        assert_eq!([broken(0, 1_499), broken(0, 1_500)], [1, 0]);
        assert_eq!([broken(10_500, 11_000), broken(10_501, 11_000)], [0, 1]);
        let away = |stopped: Option<Time>, killed: Option<Time>| {
            let mut history = scheduled(skips, 11_000, vec![]);
            let process = history.processes.entry(1).or_default();
            process.killed = killed.map(|at| at * MS);
            process.stopped = stopped.map(|at| (at * MS, None)).into_iter().collect();
            found(&history).len()
        };
        assert_eq!([away(Some(10_000), None), away(Some(10_600), None)], [0, 1]);
        assert_eq!([away(None, Some(1_400)), away(None, Some(2_000))], [1, 0]);
        // The clock of the server was set back before, so that each slot begins 1 s late.
        let mut history = scheduled(skips, 12_000, lone(skips, 5, 5_900, 6_000));
        assert_eq!(found(&history), []);
        history.sections.clear();
        history.clock_steps.push((5_000 * MS, -1_000 * MS));
        assert_eq!(found(&history), [(Rule::SlotSkipped, 5_000)]);
        history
            .schedulers
            .iter_mut()
            .for_each(|one| one.until = Some(11_400 * MS));
        assert_eq!(found(&history), []);
        // It was set later, or was no longer behind.
        history.clock_steps[0].0 = 5_001 * MS;
        assert_eq!(found(&history), [(Rule::SlotSkipped, 5_000)]);
        history.clock_steps = vec![(0, -1_000 * MS), (5_000 * MS, 100 * MS)];
        assert_eq!(found(&history), [(Rule::SlotSkipped, 5_000)]);
        history.clock_steps[1].1 -= MS;
        assert_eq!(found(&history), []);
        // A lease of before ends that much later, too: a fault that ended 4.5 s before explains the slot of 5 s.
        let broken = |until, (at, back): (Time, Time)| {
            let mut history = scheduled(skips, 13_000, vec![]);
            history.clock_steps.push((at * MS, -back * MS));
            history.windows.push(window(0, until));
            found(&history).len()
        };
        assert_eq!(broken(500, (500, 1_000)), 0);
        assert_eq!(broken(500, (500, 999)), 1);
        assert_eq!(broken(499, (500, 1_000)), 1);
        // The lease was stored later.
        assert_eq!(broken(500, (499, 1_000)), 1);
    }

    /// A clock that is ahead fires earlier.
    #[test]
    fn slot_follows_the_clock_of_the_process() {
        let mut history = scheduled("job:4", 11_000, vec![]);
        for scheduler in &mut history.schedulers {
            scheduler.clock = 1_000_000_000_000 * MS + 2_000 * MS;
        }
        assert_eq!(found(&history), [(Rule::SlotSkipped, 3_000)]);
    }
}
