//! Checks that no waiter waits long for a free lock.
//!
//! 1. For each name, the times in which it is free follow from the sections: fewer holders than it admits, or a latch
//!    that is certainly open. A multi-lock or RedLock is free while all its members are.
//! 2. Each part of a request's wait that falls into such a time is idle time.
//! 3. A fault explains idle time until it is repaired. If a process was stopped or killed, idle time counts from
//!    then, because its hold lasts for up to a lease.
//! 4. When the clock of a server is set back, what it stores ends that much later.
//! 5. Idle time of more than a lease and the [margin](History::margin) is [`Rule::Hang`]. If the lock is fair and departed
//!    waiters in its queue can explain the delay, it is [`Rule::Queue`] instead.
//! 6. [`check_promptness`] checks the same with a limit of a few round trips ([`Rule::Promptness`]).

use std::collections::BTreeMap;
use std::time::Duration;

use super::allowances::{FAIR_GRACE_PERIOD, MARGIN, RECONNECT_ALLOWANCE, REMOVAL_ALLOWANCE};
use super::violation::{Rule, Violation};
use super::{latches, semaphores};
use crate::clock::{Time, millis, nanos};
use crate::history::{History, Mode, PERMITS, Section};
use crate::names::{has_queue, locks_of, members_of};

/// The sections by name.
type SectionsByName<'a> = BTreeMap<&'a str, Vec<&'a Section>>;

/// Number of leases for which a departed waiter may stay in a queue until its turn comes.
const MAX_QUEUE_LEASES: Time = 20;

/// A time in which a request waited for a free lock.
struct IdleWait<'a> {
    section: &'a Section,
    from: Time,
    until: Time,
    /// Whether a fault ended within [`RECONNECT_ALLOWANCE`] before, or a process was stopped or killed.
    after_fault: bool,
}

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    let names = history.by_name();
    for &name in names.keys() {
        // Failed attempts on several locks may briefly hold one of them, again and again.
        let is_member = names[name].iter().any(|one| one.request.is_member);
        let limit = history.lease
            + match is_member {
                true => history.lease + nanos(MARGIN),
                false => history.margin,
            };
        // Only the longest wait for each name is reported.
        let too_long = idle_waits(history, &names, name)
            .into_iter()
            .filter(|idle| idle.until - idle.from > limit);
        if let Some(worst) = too_long.max_by_key(|idle| idle.until - idle.from) {
            let time = worst.until - worst.from;
            // A candidate keeps its turn for at least this long.
            let turn = match name.starts_with("election") {
                true => history.lease.max(nanos(FAIR_GRACE_PERIOD)),
                false => history.lease,
            };
            let queued = departed_turns(history, &names, name, &worst, turn)
                + restored_queue_grace(history, name, &worst);
            found.push(worst.violation(match time <= limit + queued {
                true => Rule::Queue,
                false => Rule::Hang,
            }));
        }
    }
    found
}

/// Finds the requests that waited for a free lock for longer than `limit`. The time of faults does not count.
///
/// Valid only on a simulated clock, and without faults that delay clients: on a real clock a busy machine delays them,
/// too.
pub fn check_promptness(history: &History, limit: Duration) -> Vec<Violation> {
    let names = history.by_name();
    // Requests for spin locks and RedLocks retry after a pause. A failed attempt on several locks may briefly hold one
    // of them, or be the head of its queue, and so block other requests.
    let may_be_delayed = |name: &str| {
        let mut kinds = ["spin", "red", "multi"].iter();
        kinds.any(|kind| name.starts_with(kind)) || !members_of(name).is_empty()
    };
    let must_be_prompt = |(name, sections): &(&&str, &Vec<&Section>)| {
        !may_be_delayed(name) && !sections.iter().any(|section| section.request.is_member)
    };
    let prompt = names.iter().filter(must_be_prompt);
    let idle = prompt.flat_map(|(name, _)| idle_waits(history, &names, name));
    let too_long = idle.filter(|idle| {
        // Clients may still be connecting.
        let allowance = match (idle.after_fault, has_queue(&idle.section.request.name)) {
            (true, true) => RECONNECT_ALLOWANCE + REMOVAL_ALLOWANCE,
            (true, false) => RECONNECT_ALLOWANCE,
            (false, _) => 0,
        };
        idle.until - idle.from > nanos(limit) + allowance
    });
    too_long
        .map(|idle| idle.violation(Rule::Promptness))
        .collect()
}

/// Returns the longest wait for a free lock after a fault, counted from its repair, or from when a process was stopped
/// or killed.
pub(crate) fn worst_recovery(history: &History) -> Option<Time> {
    let names = history.by_name();
    let idle = names
        .keys()
        .flat_map(|name| idle_waits(history, &names, name));
    let after_fault = idle.filter(|idle| idle.after_fault);
    after_fault.map(|idle| idle.until - idle.from).max()
}

/// Returns for how long departed waiters in its queue may keep a fair lock from others: for a `turn` each, if they were
/// stopped, because their connections still listen; for one grace period together, if they were killed, or could not leave
/// because the store was unavailable.
fn departed_turns(
    history: &History,
    names: &SectionsByName<'_>,
    name: &str,
    idle: &IdleWait<'_>,
    turn: Time,
) -> Time {
    let fair = fair_locks(name);
    let sections = fair.iter().filter_map(|name| names.get(name.as_str()));
    let (mut listening, mut gone) = (0, 0);
    for section in sections.flatten() {
        let process = history.processes.get(&section.process);
        let stops = process.iter().flat_map(|process| &process.stopped);
        let killed = process.and_then(|process| process.killed);
        let failed_at = section.answered.filter(|_| section.failed.is_some());
        let departed = |end: Time| {
            let waited = section.requested <= end && section.answered.is_none_or(|at| at >= end);
            waited && end <= idle.until && idle.from - end < MAX_QUEUE_LEASES * history.lease
        };
        if stops.map(|stop| stop.0).any(departed) {
            listening += turn;
        } else if killed.into_iter().chain(failed_at).any(departed) {
            gone += turn;
        }
    }
    match history.tells_listeners {
        true => listening + gone.min(nanos(FAIR_GRACE_PERIOD)),
        false => listening + gone,
    }
}

/// Returns the fair locks that are acquired for a name.
fn fair_locks(name: &str) -> Vec<String> {
    let mut locks = locks_of(name);
    locks.retain(|name| has_queue(name));
    locks
}

/// Returns how long a fair lock may be kept for waiters whose queue entries a failover restored, because the promoted
/// replica had missed their removal.
fn restored_queue_grace(history: &History, name: &str, idle: &IdleWait<'_>) -> Time {
    let mut losses = history.data_losses.iter().filter(|loss| loss.loss.holds);
    match !fair_locks(name).is_empty() && losses.any(|loss| loss.from <= idle.until) {
        true => nanos(FAIR_GRACE_PERIOD),
        false => 0,
    }
}

/// Returns the nonempty times in which a request waited for a free lock.
fn idle_waits<'a>(history: &History, names: &SectionsByName<'a>, name: &str) -> Vec<IdleWait<'a>> {
    let mut free = free_intervals(history, &names[name]);
    // All members must be free at the same time.
    for lock in locks_of(name) {
        if let Some(sections) = names.get(lock.as_str()).filter(|_| lock != name) {
            free = intersection(&free, &self::free_intervals(history, sections));
        }
    }
    let mut found = Vec::new();
    for section in &names[name] {
        if section.request.is_member
            || section.request.ticket.is_some()
            || matches!(section.request.mode, Mode::SetCount(_) | Mode::CountDown)
        {
            continue;
        }
        let process = history.processes.get(&section.process);
        let killed = process.and_then(|process| process.killed);
        let requested = section.requested;
        let answered = section.answered.or(killed).unwrap_or(history.end);
        let first = free.partition_point(|&(_, until)| until <= requested);
        for &(from, until) in free.iter().skip(first) {
            if from >= answered {
                break;
            }
            let mut idle = IdleWait {
                section,
                from: from.max(requested),
                until: until.min(answered),
                after_fault: false,
            };
            idle.skip_faults(history);
            if idle.from < idle.until {
                found.push(idle);
            }
        }
    }
    found
}

impl IdleWait<'_> {
    fn violation(&self, rule: Rule) -> Violation {
        let (name, who) = (&self.section.request.name, self.section.requester());
        let waited = millis(self.until - self.from);
        let text = format!("{name}: {who} waited {waited} ms while it was free");
        Violation::at(self.from, rule, text).until(self.until)
    }

    /// Moves the start behind the faults that explain the wait. A fault explains it until it is repaired. A process
    /// that was stopped or killed may hold the lock until its lease ends, so the limit counts from then.
    fn skip_faults(&mut self, history: &History) {
        for window in &history.windows {
            if window.from < self.until && self.from < window.until {
                self.start_at(window.until);
            }
        }
        for (number, process) in &history.processes {
            for &(stop, on) in &process.stopped {
                let on = on.unwrap_or(history.end);
                if stop < self.until && self.from <= on {
                    self.start_at(stop);
                    // A stopped waiter cannot acquire a free lock.
                    if *number == self.section.process {
                        self.start_at(on);
                    }
                }
            }
            if let Some(killed) = process.killed
                && killed < self.until
                && self.from - killed <= history.lease
            {
                self.start_at(killed);
            }
        }
        for &(at, forward) in &history.clock_steps {
            let back = (-forward).max(0);
            if at < self.until && self.from < at + history.lease + back {
                self.from += back;
            }
        }
        let mut windows = history
            .windows
            .iter()
            .map(|window| self.from - window.until);
        self.after_fault |= windows.any(|since| (0..RECONNECT_ALLOWANCE).contains(&since));
    }

    fn start_at(&mut self, at: Time) {
        self.from = self.from.max(at);
        self.after_fault = true;
    }
}

/// Returns the intervals in which another request could be granted, calculated from the reported holds. For a latch:
/// the intervals in which it is certainly open. An acquisition ends an interval even if permits remain: others may acquire
/// before a waiter, again and again, because no order is promised.
fn free_intervals(history: &History, sections: &[&Section]) -> Vec<(Time, Time)> {
    let mut changes = Vec::new();
    let capacity = match sections.first().map(|one| one.request.mode) {
        Some(Mode::SetCount(_) | Mode::CountDown | Mode::AwaitZero) => {
            return latches::open_intervals(history, sections);
        }
        // Among requests for all permits, one that is not held may be kept for the first of them.
        Some(Mode::Permit) if sections.iter().all(|one| one.request.mode == Mode::Permit) => {
            PERMITS as usize
        }
        Some(Mode::Semaphore) => {
            // After a data loss no permit is certainly free. A permit whose acquisition or release is uncertain may
            // never become free.
            let mut unavailable_since: Vec<Time> =
                vec![semaphores::permits_lost_since(history); PERMITS as usize];
            let may_be_stuck = |one: &&&Section| semaphores::may_be_stuck(history, one);
            let since = |one: &&Section| one.acquired.unwrap_or(one.requested);
            unavailable_since.extend(sections.iter().filter(may_be_stuck).map(since));
            for from in unavailable_since {
                changes.extend([(from, true), (Time::MAX, false)]);
            }
            PERMITS as usize
        }
        _ => 1,
    };
    for (from, until) in sections.iter().filter_map(|one| history.held_span(one)) {
        changes.extend([(from, true), (until, false)]);
    }
    // At equal times, acquisitions come before releases, so that there is no gap between them.
    changes.sort_by_key(|&(at, is_acquisition)| (at, !is_acquisition));
    let mut free = Vec::new();
    let (mut holders, mut since) = (0_usize, Time::MIN);
    for (at, is_acquisition) in changes {
        if is_acquisition {
            if holders < capacity && since < at {
                free.push((since, at));
                since = at;
            }
            holders += 1;
        } else {
            if holders == capacity {
                since = at;
            }
            holders -= 1;
        }
    }
    if holders < capacity {
        free.push((since, history.end));
    }
    free
}

/// Returns the intersection of two lists of times.
fn intersection(one: &[(Time, Time)], other: &[(Time, Time)]) -> Vec<(Time, Time)> {
    let both = |a: &(Time, Time), b: &(Time, Time)| (a.0.max(b.0), a.1.min(b.1));
    let pairs = one
        .iter()
        .flat_map(|a| other.iter().map(move |b| both(a, b)));
    pairs.filter(|(from, until)| from < until).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, history, section};
    use super::*;
    use crate::history::FaultWindow;

    /// Creates a section from the times of its request and its acquisition, in milliseconds.
    fn waited(requested: Time, acquired: Time) -> Section {
        let mut one = section("a", acquired, acquired + 10);
        one.requested = requested * MS;
        one
    }

    #[test]
    fn wait_for_a_held_lock_is_accepted() {
        let sections = vec![section("a", 0, 20_000), waited(5, 20_010)];
        assert!(check(&history(sections)).is_empty());
    }

    #[test]
    fn wait_for_a_free_lock_is_found() {
        let sections = vec![section("a", 0, 10), waited(5, 9000)];
        assert_eq!(check(&history(sections))[0].rule, Rule::Hang);
    }

    #[test]
    fn clock_that_is_set_back_explains_as_much_of_a_wait() {
        // The limit is 4,500 ms, and the wait is 8,990 ms long.
        let sections = || vec![section("a", 0, 20_010), waited(5, 29_000)];
        for (at, by, found) in [
            (20_000, 4490, 0),
            (20_000, 4489, 1),
            (28_999, 4490, 0),
            (29_000, 4490, 1),
            // A hold that began just before the step lasts until 20,011 or 20,010 ms.
            (12_521, 4490, 0),
            (12_520, 4490, 1),
        ] {
            let mut one = history(sections());
            one.clock_steps.push((at * MS, -by * MS));
            assert_eq!(check(&one).len(), found, "set back {by} ms at {at} ms");
        }
    }

    #[test]
    fn late_acquisition_of_a_free_lock_is_found() {
        let late = |by: Time| history(vec![section("a", 0, 10), waited(5, 10 + by)]);
        let limit = Duration::from_millis(50);
        assert!(check_promptness(&late(50), limit).is_empty());
        let found = check_promptness(&late(51), limit);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].from, found[0].until), (10 * MS, 61 * MS));
    }

    #[test]
    fn acquisition_may_take_longer_just_after_a_fault() {
        let late = |name: &str, by: Time| {
            let mut late = history(vec![section("a", 0, 10), waited(5, 20 + by)]);
            for section in &mut late.sections {
                section.request.name = name.to_owned();
            }
            late.windows.push(FaultWindow {
                from: 15 * MS,
                until: 20 * MS,
                is_outage: false,
            });
            late
        };
        let limit = Duration::from_millis(50);
        // The head of a queue may have given up, and keep its place until it is removed.
        for (name, longest) in [("a", 550), ("fair:a", 1050), ("election:a", 1050)] {
            assert!(check_promptness(&late(name, longest), limit).is_empty());
            assert_eq!(check_promptness(&late(name, longest + 1), limit).len(), 1);
        }
        // Another client held the lock when the fault ended.
        let held = |fault: Time| {
            let mut held = history(vec![section("a", 0, 1000), waited(5, 1200)]);
            let (from, until) = ((fault - 5) * MS, fault * MS);
            let is_outage = false;
            held.windows.push(FaultWindow {
                from,
                until,
                is_outage,
            });
            held
        };
        assert!(check_promptness(&held(900), limit).is_empty());
        assert_eq!(check_promptness(&held(400), limit).len(), 1);
    }

    #[test]
    fn request_without_an_answer_is_found() {
        let mut never = waited(5, 9000);
        (never.answered, never.acquired, never.valid_until) = (None, None, None);
        (never.release_started, never.released) = (None, None);
        let sections = vec![section("a", 0, 10), never];
        assert_eq!(check(&history(sections)).len(), 1);
    }

    #[test]
    fn time_during_a_fault_does_not_count() {
        let mut broken = history(vec![section("a", 0, 10), waited(5, 9000)]);
        broken.windows.push(FaultWindow {
            from: 5 * MS,
            until: 8000 * MS,
            is_outage: true,
        });
        assert!(check(&broken).is_empty());
        assert_eq!(worst_recovery(&broken), Some(1000 * MS));
    }

    #[test]
    fn lock_of_killed_process_is_free_a_lease_later() {
        let mut dead = section("a", 0, 10);
        (dead.release_started, dead.released, dead.process) = (None, None, 1);
        let mut one = history(vec![dead, waited(5, 3100)]);
        one.processes.entry(1).or_default().killed = Some(12 * MS);
        assert!(check(&one).is_empty());
        assert_eq!(worst_recovery(&one), Some(3088 * MS));
        one.sections[1] = waited(5, 9000);
        assert_eq!(check(&one).len(), 1);
    }

    #[test]
    fn killed_waiters_in_a_queue_are_distinguished_from_a_hang() {
        let fair = |mut one: Section| {
            one.request.name = "fair:1".into();
            one
        };
        let mut dead = fair(waited(5, 9000));
        (dead.answered, dead.acquired, dead.valid_until) = (None, None, None);
        (dead.release_started, dead.released, dead.process) = (None, None, 1);
        let next = fair(waited(6, 6100));
        let mut one = history(vec![fair(section("a", 0, 10)), dead, next]);
        one.processes.entry(1).or_default().killed = Some(8 * MS);
        assert_eq!(check(&one)[0].rule, Rule::Queue);
        one.sections[2] = fair(waited(6, 9000));
        assert_eq!(check(&one)[0].rule, Rule::Hang);
    }

    /// Three waiters departed before the fourth one, which waited for 9 s while the lock was free. A turn is 3 s.
    #[test]
    fn dead_waiters_share_a_grace_period_and_stopped_ones_have_a_turn_each() {
        let waiting = |process, answered| {
            let mut one = waited(5, answered);
            one.request.name = "fair:1".into();
            one.process = process;
            if process > 0 {
                (one.answered, one.acquired, one.valid_until) = (None, None, None);
                (one.release_started, one.released) = (None, None);
            }
            one
        };
        let rule = |stopped: [bool; 3], tells_listeners, answered| {
            let mut held = section("fair:1", 0, 10);
            held.release_started = Some(10 * MS);
            let waiters = [1, 2, 3].map(|process| waiting(process, 0));
            let mut one = history([vec![held, waiting(0, answered)], waiters.into()].concat());
            one.tells_listeners = tells_listeners;
            for (process, is_stopped) in (1..).zip(stopped) {
                let process = one.processes.entry(process).or_default();
                match is_stopped {
                    true => process.stopped.push((10 * MS, None)),
                    false => process.killed = Some(10 * MS),
                }
            }
            check(&one)[0].rule
        };
        let (lease, margin, turn, grace) = (3000, 1500, 3000, 5000);
        let limit = 10 + lease + margin;
        for (stopped, tells_listeners, queued) in [
            ([false; 3], true, grace),
            ([false; 3], false, 3 * turn),
            ([true, false, false], true, turn + grace),
            ([true; 3], true, 3 * turn),
        ] {
            let at = |end| rule(stopped, tells_listeners, end);
            assert_eq!(
                at(limit + queued),
                Rule::Queue,
                "{stopped:?} {tells_listeners}"
            );
            assert_eq!(
                at(limit + queued + 1),
                Rule::Hang,
                "{stopped:?} {tells_listeners}"
            );
        }
    }

    #[test]
    fn replica_that_was_behind_restores_a_queue() {
        let next = |name: &str, answered| {
            let mut next = waited(6, answered);
            next.request.name = name.into();
            next
        };
        let mut one = history(vec![next("fair:1", 9000)]);
        one.sections.insert(0, section("fair:1", 0, 10));
        assert_eq!(check(&one)[0].rule, Rule::Hang);
        one.data_losses.push(crate::history::DataLossWindow {
            from: MS,
            until: 8 * MS,
            loss: crate::history::DataLoss {
                holds: true,
                shows: true,
                tokens: false,
                why: "",
            },
        });
        assert_eq!(check(&one)[0].rule, Rule::Queue);
        one.sections[1] = next("fair:1", 12_000);
        assert_eq!(check(&one)[0].rule, Rule::Hang);
        for one in &mut one.sections {
            one.request.name = "lock:1".into();
        }
        assert_eq!(check(&one)[0].rule, Rule::Hang);
    }

    /// Attempts on several locks may hold it again and again.
    #[test]
    fn on_a_simulated_clock_only_members_of_several_locks_have_the_margin_of_a_busy_machine() {
        let mut one = history(vec![section("a", 0, 10), waited(5, 3250)]);
        one.margin = 200 * MS;
        assert_eq!(check(&one)[0].rule, Rule::Hang);
        one.sections[0].request.is_member = true;
        assert!(check(&one).is_empty());
    }

    #[test]
    fn wait_for_a_free_permit_is_found() {
        let permit = |mut one: Section| {
            one.request.mode = Mode::Permit;
            one
        };
        let sections = vec![
            permit(section("a", 0, 20_000)),
            permit(section("a", 0, 10)),
            permit(waited(5, 9000)),
        ];
        assert_eq!(check(&history(sections)).len(), 1);
        let sections = vec![
            permit(section("a", 0, 20_000)),
            permit(section("a", 0, 9000)),
            permit(waited(5, 9001)),
        ];
        assert!(check(&history(sections)).is_empty());
    }

    /// Creates a multi-lock and its members from the times of its request and its acquisition, in milliseconds.
    fn multi(requested: Time, acquired: Time) -> Vec<Section> {
        let names = [vec!["multi:0".to_owned()], locks_of("multi:0")].concat();
        let section = |name: &String| {
            let mut one = waited(requested, acquired);
            (one.request.name, one.request.is_member) = (name.clone(), name != "multi:0");
            one
        };
        names.iter().map(section).collect()
    }

    #[test]
    fn multi_lock_waits_while_one_of_its_members_is_held() {
        let mut sections = multi(5, 9000);
        sections.push(section("lock:0", 0, 5000));
        sections.push(section("rw:0", 4000, 9000));
        assert!(check(&history(sections.clone())).is_empty());
        sections.pop();
        assert!(check(&history(sections.clone())).is_empty());
        sections.pop();
        let found = check(&history(sections));
        assert_eq!(found.len(), 1);
        assert!(found[0].text.starts_with("multi:0"), "{found:?}");
    }

    #[test]
    fn multi_lock_waits_in_the_queue_of_a_fair_member() {
        let mut dead = waited(5, 9000);
        (dead.answered, dead.acquired, dead.valid_until) = (None, None, None);
        (dead.release_started, dead.released, dead.process) = (None, None, 1);
        dead.request.name = "fair:0".into();
        let mut one = history(multi(6, 6100));
        assert_eq!(check(&one)[0].rule, Rule::Hang);
        one.sections.push(dead);
        one.processes.entry(1).or_default().killed = Some(8 * MS);
        assert_eq!(check(&one)[0].rule, Rule::Queue);
    }

    #[test]
    fn permit_that_may_be_lost_is_not_expected_to_be_free() {
        let permit = |mut one: Section| {
            one.request.mode = Mode::Semaphore;
            one
        };
        let mut dead = permit(section("a", 0, 10));
        (dead.release_started, dead.released) = (None, None);
        let mut one = history(vec![
            dead.clone(),
            permit(section("a", 0, 9000)),
            permit(waited(5, 9000)),
        ]);
        assert_eq!(check(&one).len(), 1);
        one.windows.push(FaultWindow {
            from: 8 * MS,
            until: 9 * MS,
            is_outage: false,
        });
        assert!(check(&one).is_empty());
        // The other permit is free.
        one.sections[1] = permit(section("a", 0, 10));
        assert_eq!(check(&one).len(), 1);
    }

    #[test]
    fn others_may_acquire_before_waiter_for_permit() {
        let permit = |mut one: Section| {
            one.request.mode = Mode::Semaphore;
            one
        };
        let short = (0..9).map(|second| permit(section("a", second * 1000, second * 1000 + 10)));
        let mut sections: Vec<Section> = short.collect();
        sections.push(permit(waited(5, 9000)));
        assert!(check(&history(sections.clone())).is_empty());
        // For four seconds none did.
        sections.drain(3..7);
        assert_eq!(check(&history(sections)).len(), 1);
    }
}
