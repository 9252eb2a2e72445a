//! Tests of cron expressions, of the plan and of the scheduler.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use redlatch_testkit::Log;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use super::cron::utc;
use super::plan::{CatchUp, Due, Ending, Firing, Next, Plan, TOLERANCE};
use super::rules::{Begin, Begun, KEPT, MAX_FIELDS, Overlap, attempt_key, finish, read};
use super::scheduler::millis;
use super::{Cron, History, Job, Outcome, Run, RunRecord, RunState, Scheduled};
use crate::lease::Lease;
use crate::step::differential::check_random;
use crate::store::embedded::failure_injection::Failure;
use crate::{Client, Embedded, Guard, Owner, Slot};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Parses `2027-03-28T00:30` or `…:30:15`, in UTC.
fn at(text: &str) -> SystemTime {
    let seconds = if text.len() == 16 { ":00Z" } else { "Z" };
    let parsed: jiff::Timestamp = format!("{text}{seconds}").parse().unwrap();
    parsed.into()
}

fn cron(text: &str, zone: &str) -> Cron {
    Cron::parse(text).unwrap().in_tz(zone).unwrap()
}

/// Returns the firings after a time, in UTC.
fn firings(cron: &Cron, after: &str, count: usize) -> Vec<String> {
    let next = |time: &SystemTime| cron.next_after(*time);
    let all = std::iter::successors(Some(at(after)), next).skip(1);
    all.take(count).map(utc).collect()
}

#[test]
fn firings_follow_the_clocks_of_the_zone() {
    let cases: &[(&str, &str, &str, &[&str])] = &[
        // In Berlin, 02:00 becomes 03:00 on 2027-03-28, and 03:00 becomes 02:00 on 2027-10-31.
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2027-03-27T00:00",
            &[
                "2027-03-27T01:30:00Z",
                "2027-03-28T01:00:00Z",
                "2027-03-29T00:30:00Z",
            ],
        ),
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2027-10-30T00:00",
            &[
                "2027-10-30T00:30:00Z",
                "2027-10-31T00:30:00Z",
                "2027-11-01T01:30:00Z",
            ],
        ),
        (
            "*/30 * * * *",
            "Europe/Berlin",
            "2027-03-28T00:10",
            &[
                "2027-03-28T00:30:00Z",
                "2027-03-28T01:00:00Z",
                "2027-03-28T01:30:00Z",
            ],
        ),
        (
            "0 * * * *",
            "Europe/Berlin",
            "2027-10-30T23:30",
            &[
                "2027-10-31T00:00:00Z",
                "2027-10-31T01:00:00Z",
                "2027-10-31T02:00:00Z",
            ],
        ),
        (
            "0 0 * * *",
            "America/New_York",
            "2027-03-13T12:00",
            &["2027-03-14T05:00:00Z", "2027-03-15T04:00:00Z"],
        ),
        (
            "59 23 31 12 *",
            "UTC",
            "2026-12-31T23:58:59",
            &["2026-12-31T23:59:00Z", "2027-12-31T23:59:00Z"],
        ),
        (
            "@yearly",
            "Asia/Tokyo",
            "2026-12-31T14:59:59",
            &["2026-12-31T15:00:00Z"],
        ),
        (
            "*/20 * * * * *",
            "UTC",
            "2026-12-31T23:59:30",
            &["2026-12-31T23:59:40Z", "2027-01-01T00:00:00Z"],
        ),
        (
            "0 9 13 * 5",
            "UTC",
            "2026-11-07T00:00",
            &["2026-11-13T09:00:00Z", "2026-11-20T09:00:00Z"],
        ),
        (
            "0 9 * * 0,7",
            "UTC",
            "2026-11-07T00:00",
            &["2026-11-08T09:00:00Z", "2026-11-15T09:00:00Z"],
        ),
        (
            "0 0 L 2 *",
            "UTC",
            "2027-01-01T00:00",
            &["2027-02-28T00:00:00Z", "2028-02-29T00:00:00Z"],
        ),
    ];
    for (text, zone, after, expected) in cases {
        let cron = cron(text, zone);
        assert_eq!(firings(&cron, after, expected.len()), *expected, "{cron}");
        // Backwards the same.
        for pair in expected.windows(2) {
            let [earlier, later] = [pair[0], pair[1]].map(|time| at(time.trim_end_matches('Z')));
            assert_eq!(cron.latest_until(later - SECOND), Some(earlier), "{cron}");
            assert_eq!(cron.latest_until(later), Some(later), "{cron}");
        }
    }
}

/// As in cron.
#[test]
fn both_days_must_match_if_one_begins_with_a_star() {
    for (text, expected) in [
        ("0 9 */2 * 1", ["2026-11-09", "2026-11-23", "2026-12-07"]),
        ("0 0 9 */2 * 1", ["2026-11-09", "2026-11-23", "2026-12-07"]),
        ("0 9 13 * */2", ["2026-12-13", "2027-02-13", "2027-03-13"]),
        (
            "0 9 1-31/2 */1 1",
            ["2026-11-07", "2026-11-09", "2026-11-11"],
        ),
        ("0 9 * * 1", ["2026-11-09", "2026-11-16", "2026-11-23"]),
    ] {
        let all = firings(&cron(text, "UTC"), "2026-11-07T00:00", 3);
        assert_eq!(
            all,
            expected.map(|day| format!("{day}T09:00:00Z")),
            "{text}"
        );
    }
}

#[test]
fn bad_expressions_and_zones_are_refused_with_the_reason() {
    for (text, reason) in [
        ("", "0 fields"),
        ("* * * *", "4 fields; use five"),
        ("* * * * * * *", "7 fields"),
        ("61 * * * *", "61"),
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 4,6 *", "never fires"),
        (", 2 * * *", "an empty item"),
        ("0 2 * * 1,,3", "an empty item"),
        ("0 2 * * 1,", "an empty item"),
        ("@reboot", ""),
        ("a b c d e", ""),
        ("5-1 * * * *", ""),
        ("*/0 * * * *", ""),
        (&"1,".repeat(200), "400 bytes"),
    ] {
        let error = Cron::parse(text).unwrap_err().to_string();
        println!("{text}: {error}");
        assert!(error.contains(reason), "{text}: {error}");
        assert!(error.len() < 300, "{error}");
    }
    for zone in ["Europe/Nowhere", "", "../../etc/passwd", "Berlin", "+02"] {
        let error = Cron::parse("@daily").unwrap().in_tz(zone).unwrap_err();
        assert!(error.to_string().contains("unknown"), "{zone}: {error}");
    }
}

/// No text makes the parser or the search panic, and both directions agree.
#[test]
fn any_expression_is_refused_or_fires() {
    let field = "[0-9*?LW#+]{1,3}|[*]/[0-9]{1,2}|[0-9]{1,2}(-[0-9]{1,2})?(/[0-9])?|[A-Za-z]{3}(#[L1-6])?|.{0,4}";
    let text = proptest::collection::vec(field, 4..8);
    let zones = [
        "UTC",
        "Europe/Berlin",
        "Australia/Lord_Howe",
        "America/St_Johns",
    ];
    let zone = proptest::sample::select(zones.to_vec());
    let after = 0..4_000_000_000u64;
    check_random(2000, (text, zone, after), |(fields, zone, after)| {
        let after = SystemTime::UNIX_EPOCH + Duration::from_secs(after);
        let Ok(cron) = Cron::parse(&fields.join(" ")) else {
            return;
        };
        let cron = cron.in_tz(zone).unwrap();
        if let Some(next) = cron.next_after(after) {
            assert!(next > after, "{cron} {after:?} {next:?}");
            assert_eq!(cron.latest_until(next), Some(next), "{cron} {after:?}");
        }
    });
}

#[test]
fn slot_is_that_of_the_nearest_firing() {
    let hourly = Cron::parse("@hourly").unwrap();
    for (now, slot) in [
        ("2026-12-31T23:30:01", "2027-01-01T00:00:00Z"),
        ("2026-12-31T23:59:59", "2027-01-01T00:00:00Z"),
        ("2027-01-01T00:00:00", "2027-01-01T00:00:00Z"),
        ("2027-01-01T00:29:59", "2027-01-01T00:00:00Z"),
    ] {
        assert_eq!(Slot::cron(&hourly, at(now)), Slot::from(slot), "{now}");
    }
}

fn plan(text: &str, catch_up: CatchUp, now: &str) -> Plan {
    Plan::new(
        Cron::parse(text).unwrap(),
        catch_up,
        Duration::ZERO,
        at(now),
    )
}

/// What the store has of a job: the last slot, and a run of it in this state.
fn known(schedule: &Cron, last: SystemTime, state: Option<RunState>) -> History {
    let run = |state| RunRecord {
        slot: last,
        attempt: 1,
        state,
        host: String::new(),
        by: String::new(),
        began: last,
        took: None,
        outcome: String::new(),
        output: String::new(),
    };
    History {
        name: "job".to_owned(),
        schedule: Some(schedule.clone()),
        last_slot: last,
        skipped: 0,
        last_success: None,
        runs: state.map(run).into_iter().collect(),
    }
}

/// Takes what the store has when a process starts.
fn resume(plan: &mut Plan, known: &History) -> Option<SystemTime> {
    plan.resume(Some(known), at("2100-01-01T00:00"), Overlap::Skip)
}

/// A run of another schedule may have died long ago.
#[test]
fn run_of_the_same_schedule_is_watched_unless_it_has_ended() {
    let slot = at("2027-01-01T02:00");
    let same = || Cron::parse("0 2 * * *").unwrap();
    for (before, state, is_watched) in [
        (same(), Some(RunState::Running), true),
        (same(), Some(RunState::Lost), true),
        (same(), Some(RunState::Succeeded), false),
        (same(), Some(RunState::Failed), false),
        (same(), None, false),
        (daily(), Some(RunState::Running), false),
        (daily(), Some(RunState::Lost), false),
    ] {
        let mut plan = plan("0 2 * * *", CatchUp::None, "2027-01-01T11:00");
        let watched = resume(&mut plan, &known(&before, slot, state));
        assert_eq!(watched.is_some(), is_watched, "{before} {state:?}");
        assert!(watched.is_none_or(|watched| watched == slot));
    }
}

fn daily() -> Cron {
    Cron::parse("@daily").unwrap()
}

fn fire(slot: SystemTime) -> Due {
    Due::Fire(slot, Duration::ZERO)
}

#[test]
fn plan_fires_each_slot_once_in_order() {
    let fire = |time: &str| fire(at(time));
    let mut plan = plan("*/30 * * * * *", CatchUp::None, "2026-12-31T23:59:10");
    for (now, due) in [
        ("2026-12-31T23:59:10", Due::Sleep(20 * SECOND)),
        ("2026-12-31T23:59:29", Due::Sleep(SECOND)),
        ("2026-12-31T23:59:30", fire("2026-12-31T23:59:30")),
        ("2026-12-31T23:59:30", Due::Sleep(30 * SECOND)),
        // The clock was set back: the slot is not repeated.
        ("2026-12-31T23:59:20", Due::Sleep(40 * SECOND)),
        // Late by a bit: each of them.
        ("2027-01-01T00:00:31", fire("2027-01-01T00:00:00")),
        ("2027-01-01T00:00:31", fire("2027-01-01T00:00:30")),
        ("2027-01-01T00:00:31", Due::Sleep(29 * SECOND)),
        // The machine slept: only the latest.
        (
            "2027-01-01T08:00:07",
            Due::Missed(at("2027-01-01T00:01"), at("2027-01-01T07:59:30")),
        ),
        ("2027-01-01T08:00:07", fire("2027-01-01T08:00:00")),
        ("2027-01-01T08:00:07", Due::Sleep(23 * SECOND)),
        // The job still fires although the clock was set back by hours.
        ("2027-01-01T04:00:07", Due::Sleep(23 * SECOND)),
        ("2027-01-01T04:00:30", fire("2027-01-01T04:00:30")),
    ] {
        assert_eq!(plan.due(at(now), 0.5), due, "{now}");
    }
}

#[test]
fn late_firing_is_missed_unless_the_job_catches_up() {
    let (late, in_time) = ("2027-01-01T02:01:01", "2027-01-01T02:01:00");
    let slot = at("2027-01-01T02:00");
    let day = Duration::from_secs(24 * 3600);
    for (catch_up, now, due) in [
        (CatchUp::None, in_time, fire(slot)),
        (CatchUp::None, late, Due::Missed(slot, slot)),
        (CatchUp::Last, late, fire(slot)),
    ] {
        let mut plan = plan("0 2 * * *", catch_up, "2026-12-31T12:00");
        assert_eq!(plan.due(at(now), 0.0), due, "{catch_up:?} {now}");
        assert_eq!(plan.due(at(now), 0.0), Due::Sleep(MINUTE));
    }
    // The machine slept for days.
    for (catch_up, due) in [
        (CatchUp::None, Due::Missed(slot, slot + 3 * day)),
        (CatchUp::Last, fire(slot + 3 * day)),
    ] {
        let mut plan = plan("0 2 * * *", catch_up, "2026-12-31T12:00");
        let now = slot + 3 * day + 2 * MINUTE;
        assert_eq!(plan.due(now, 0.0), due, "{catch_up:?}");
        assert_eq!(plan.due(now, 0.0), Due::Sleep(MINUTE));
    }
    // This process starts after the time.
    let minutes = |minutes| slot + minutes * MINUTE;
    let fires = fire(slot);
    for (catch_up, last, started, due) in [
        (
            CatchUp::None,
            Some(slot - day),
            minutes(2),
            Due::Sleep(MINUTE),
        ),
        (CatchUp::None, Some(slot - day), minutes(1), fires.clone()),
        (CatchUp::None, Some(slot), minutes(1), Due::Sleep(MINUTE)),
        (CatchUp::None, None, minutes(1), Due::Sleep(MINUTE)),
        (CatchUp::Last, None, minutes(420), Due::Sleep(MINUTE)),
        (CatchUp::Last, Some(slot), minutes(420), Due::Sleep(MINUTE)),
        (CatchUp::Last, Some(slot - day), minutes(420), fires.clone()),
        (CatchUp::Last, Some(slot - 9 * day), minutes(420), fires),
    ] {
        let daily = Cron::parse("0 2 * * *").unwrap();
        let mut plan = Plan::new(daily.clone(), catch_up, Duration::ZERO, started);
        if let Some(last) = last {
            resume(&mut plan, &known(&daily, last, None));
        }
        assert_eq!(plan.due(started, 0.0), due, "{catch_up:?} {last:?}");
        assert_eq!(plan.due(started, 0.0), Due::Sleep(MINUTE));
    }
    // It has another schedule than before, which did not exist at that time.
    for catch_up in [CatchUp::None, CatchUp::Last] {
        for (before, due) in [("0 2 * * *", fire(slot)), ("0 3 * * *", Due::Sleep(MINUTE))] {
            let now = minutes(1);
            let now_at_two = Cron::parse("0 2 * * *").unwrap();
            let mut plan = Plan::new(now_at_two, catch_up, Duration::ZERO, now);
            let before = Cron::parse(before).unwrap();
            resume(&mut plan, &known(&before, slot - day, None));
            assert_eq!(plan.due(now, 0.0), due, "{catch_up:?} {before}");
        }
    }
    // Of a short period, the latest one.
    let (often, now) = (Cron::parse("*/10 * * * * *").unwrap(), minutes(1) + SECOND);
    let mut plan = Plan::new(often.clone(), CatchUp::None, Duration::ZERO, now);
    resume(&mut plan, &known(&often, slot - day, None));
    assert_eq!(plan.due(now, 0.0), fire(minutes(1)));
    assert_eq!(plan.due(now, 0.0), Due::Sleep(9 * SECOND));
}

/// The slot of 02:05. The latest run is that of 02:00.
#[test]
fn firing_that_has_waited_for_another_run_is_not_late_for_the_next_process() {
    use RunState::{Lost, Running, Succeeded};
    let (cron, now) = (Cron::parse("*/5 * * * *").unwrap(), at("2027-01-01T02:07"));
    for (overlap, state, took, fires) in [
        (Overlap::Wait, Running, None, true),
        (Overlap::Wait, Succeeded, Some(6 * MINUTE), true),
        (Overlap::Wait, Succeeded, Some(6 * MINUTE - SECOND), false),
        (Overlap::Wait, Lost, None, false),
        (Overlap::Skip, Running, None, false),
        (Overlap::Allow, Running, None, false),
    ] {
        // It has run with this schedule, or with another one until so many minutes before.
        for since in [None, Some(2), Some(1)] {
            let before = since.map_or(cron.clone(), |_| daily());
            let mut known = known(&before, at("2027-01-01T02:00"), Some(state));
            known.runs[0].took = took;
            let mut plan = Plan::new(cron.clone(), CatchUp::None, Duration::ZERO, now);
            let since = now - since.unwrap_or(0) * MINUTE - SECOND;
            plan.resume(Some(&known), since, overlap);
            let due = match fires && (before == cron || since < at("2027-01-01T02:05")) {
                true => fire(at("2027-01-01T02:05")),
                false => Due::Sleep(MINUTE),
            };
            assert_eq!(plan.due(now, 0.0), due, "{overlap:?} {state:?} {since:?}");
            assert_eq!(plan.due(now, 0.0), Due::Sleep(MINUTE));
        }
    }
}

#[test]
fn jitter_and_early_clocks_are_limited_by_half_a_period() {
    for (text, jitter, random, after, ahead) in [
        ("* * * * *", 10 * SECOND, 0.5, 5 * SECOND, 30 * SECOND),
        ("* * * * *", 90 * SECOND, 1.0, 30 * SECOND, 30 * SECOND),
        ("* * * * * *", 90 * SECOND, 1.0, SECOND / 2, SECOND / 2),
        ("@daily", 90 * SECOND, 1.0, 90 * SECOND, TOLERANCE),
    ] {
        let slot = at("2027-01-01T00:00");
        let cron = Cron::parse(text).unwrap();
        let mut plan = Plan::new(cron, CatchUp::None, jitter, slot - SECOND);
        assert_eq!(plan.due(slot, random), Due::Fire(slot, after), "{text}");
        assert_eq!(plan.ahead(slot), ahead, "{text}");
    }
}

#[test]
fn firing_does_what_the_store_replies() {
    use Next::{End, Lock, Pause};
    let (short, wait) = (Lock(SECOND), Lock(10 * SECOND));
    let lasts = |attempt| Begun::Lasts {
        attempt,
        left: 9 * SECOND,
    };
    let overlaps = Begun::Overlaps(9 * SECOND);
    // What was replied, whether without the lock, with how many retries; what follows, and whether a later firing takes the place.
    let cases = [
        (Begun::New(1), false, 0, Next::Run(1), true),
        (Begun::New(3), false, 0, Next::Run(3), true),
        (Begun::Vacant, true, 0, short, true),
        (Begun::Vacant, false, 0, Pause(Duration::ZERO), true),
        (Begun::Done, false, 2, End(Ending::Elsewhere), true),
        (Begun::Done, true, 2, End(Ending::Elsewhere), true),
        (lasts(1), true, 0, End(Ending::Elsewhere), true),
        (lasts(1), true, 1, Pause(9 * SECOND), false),
        (lasts(2), true, 1, End(Ending::Elsewhere), true),
        (lasts(1), false, 1, Pause(9 * SECOND), false),
        (Begun::Early(7 * SECOND), false, 0, Pause(7 * SECOND), false),
        (Begun::Skipped, true, 0, End(Ending::Skipped), true),
        (overlaps, true, 0, wait, true),
        (overlaps, false, 0, Pause(SECOND), true),
    ];
    for (reply, asked, retries, next, gives_way) in cases {
        let mut firing = firing(retries, CatchUp::None);
        let slot = firing.slot;
        assert_eq!(
            firing.replied(reply, asked, slot),
            next,
            "{reply:?} {asked} {retries}"
        );
        let does_give_way = firing.gives_way().is_some();
        assert_eq!(does_give_way, gives_way, "{reply:?} {asked} {retries}");
    }
}

fn firing(retries: u32, catch_up: CatchUp) -> Firing {
    let slot = at("2027-01-01T00:00");
    Firing::new(slot, Duration::ZERO, Overlap::Skip, retries, catch_up)
}

#[test]
fn firing_waits_through_a_short_outage() {
    for overlap in [Overlap::Skip, Overlap::Wait, Overlap::Allow] {
        for (catch_up, after, next) in [
            (CatchUp::None, 59, Next::Pause(SECOND)),
            (CatchUp::None, 61, Next::End(Ending::Missed)),
            (CatchUp::Last, 3600, Next::Pause(SECOND)),
        ] {
            let mut firing = firing(1, catch_up);
            firing.overlap = overlap;
            let now = firing.slot + after * SECOND;
            assert_eq!(firing.gives_way().is_some(), overlap != Overlap::Allow);
            assert_eq!(firing.failed(now), next, "{overlap:?} {catch_up:?} {after}");
            // Otherwise each firing of a long outage would be kept.
            if next != Next::End(Ending::Missed) {
                let is_logged = firing.gives_way() == Some(Ending::Missed);
                assert_eq!(is_logged, catch_up == CatchUp::None, "{overlap:?}");
                assert!(firing.gives_way().is_some());
            }
            // While it watches the run of another machine, it is not late.
            let lasts = Begun::Lasts {
                attempt: 1,
                left: SECOND,
            };
            firing.replied(lasts, true, now);
            assert_eq!(firing.failed(now), Next::Pause(SECOND));
            assert_eq!(firing.gives_way(), None);
        }
    }
}

/// The time for which it has waited before is no outage.
#[test]
fn firing_that_waits_for_another_run_is_not_late() {
    for (reply, asked) in [
        (Begun::Overlaps(SECOND), true),
        (Begun::Overlaps(SECOND), false),
        (Begun::Vacant, true),
    ] {
        let mut firing = firing(0, CatchUp::None);
        firing.overlap = Overlap::Wait;
        let replied = firing.slot + 20 * MINUTE;
        firing.replied(reply, asked, replied);
        for (after, next) in [
            (Duration::ZERO, Next::Pause(SECOND)),
            (TOLERANCE, Next::Pause(SECOND)),
            (TOLERANCE + SECOND, Next::End(Ending::Missed)),
        ] {
            assert_eq!(firing.failed(replied + after), next, "{reply:?} {after:?}");
        }
    }
}

/// Another machine may have the lock to repeat the run, or another user may have it.
#[test]
fn dead_run_is_watched_while_another_machine_may_repeat_it() {
    for overlap in [Overlap::Skip, Overlap::Wait, Overlap::Allow] {
        for (catch_up, asked, next) in [
            (CatchUp::None, true, Next::Lock(SECOND)),
            (CatchUp::Last, true, Next::Lock(SECOND)),
            (CatchUp::None, false, Next::Pause(Duration::ZERO)),
        ] {
            let mut firing = firing(1, catch_up);
            firing.overlap = overlap;
            let now = firing.slot + 20 * MINUTE;
            let lasts = Begun::Lasts {
                attempt: 1,
                left: SECOND,
            };
            firing.replied(lasts, true, now);
            for after in [Duration::ZERO, 2 * TOLERANCE] {
                let vacant = firing.replied(Begun::Vacant, asked, now + after);
                assert_eq!(vacant, next, "{overlap:?} {catch_up:?} {asked}");
                assert_eq!(firing.gives_way(), None, "{overlap:?} {catch_up:?} {asked}");
            }
        }
    }
}

/// A clock that is ahead does not make it late, but an outage that follows does.
#[test]
fn early_firing_is_late_a_minute_after_it_may_begin() {
    let early = 10 * SECOND;
    for (catch_up, after, next, gives_way) in [
        (CatchUp::None, TOLERANCE, Next::Pause(SECOND), None),
        (
            CatchUp::None,
            2 * TOLERANCE,
            Next::End(Ending::Missed),
            None,
        ),
        (CatchUp::Last, TOLERANCE, Next::Pause(SECOND), None),
        // Only the latest of them runs.
        (
            CatchUp::Last,
            2 * TOLERANCE,
            Next::Pause(SECOND),
            Some(Ending::Elsewhere),
        ),
    ] {
        let mut firing = firing(1, catch_up);
        let slot = firing.slot;
        firing.replied(Begun::Early(early), true, slot + 5 * MINUTE);
        let now = slot + 5 * MINUTE + early + after;
        assert_eq!(firing.failed(now), next, "{catch_up:?} {after:?}");
        assert_eq!(firing.gives_way(), gives_way, "{catch_up:?} {after:?}");
    }
}

/// Its own later firing, or another machine's, has the lock for a moment, because it is early as well.
#[test]
fn early_firing_does_not_give_way_to_one_that_is_early_too() {
    for (catch_up, after, gives_way) in [
        (CatchUp::None, SECOND, None),
        (CatchUp::Last, SECOND, None),
        // Only the latest of them runs.
        (CatchUp::Last, 2 * TOLERANCE, Some(Ending::Elsewhere)),
    ] {
        let mut firing = firing(0, catch_up);
        let slot = firing.slot;
        firing.replied(Begun::Early(2 * SECOND), false, slot);
        let now = slot + 2 * SECOND + after;
        assert_eq!(firing.replied(Begun::Vacant, true, now), Next::Lock(SECOND));
        assert_eq!(firing.gives_way(), gives_way, "{catch_up:?} {after:?}");
    }
}

/// A machine that begins a firing late by its jitter has as much time as one that begins at once.
#[test]
fn jitter_of_a_firing_is_no_delay() {
    let (slot, jitter) = (at("2027-01-01T00:00"), 90 * SECOND);
    let due = slot + jitter;
    // The process that would have begun it then was replaced.
    let mut next = Plan::new(daily(), CatchUp::None, jitter, slot + 2 * MINUTE);
    resume(&mut next, &known(&daily(), slot - 24 * 60 * MINUTE, None));
    let fires = Due::Fire(slot, Duration::ZERO);
    assert_eq!(next.due(slot + 2 * MINUTE, 1.0), fires);
    for (now, after) in [
        (due - SECOND, Due::Fire(slot, SECOND)),
        (due + TOLERANCE, fires.clone()),
        (due + TOLERANCE + SECOND, Due::Missed(slot, slot)),
    ] {
        let mut plan = Plan::new(daily(), CatchUp::None, jitter, slot - SECOND);
        assert_eq!(plan.due(now, 1.0), after, "{now:?}");
    }
    for (now, is_missed) in [
        (due, false),
        (due + TOLERANCE, false),
        (due + TOLERANCE + SECOND, true),
    ] {
        let firing = || Firing::new(slot, jitter, Overlap::Skip, 0, CatchUp::None);
        let next = |next| {
            if is_missed {
                Next::End(Ending::Missed)
            } else {
                next
            }
        };
        assert_eq!(firing().failed(now), next(Next::Pause(SECOND)), "{now:?}");
        let vacant = firing().replied(Begun::Vacant, true, now);
        assert_eq!(vacant, next(Next::Lock(SECOND)), "{now:?}");
    }
}

/// Not even a run of this job.
#[test]
fn firing_is_missed_if_another_user_holds_the_lock() {
    for (overlap, catch_up, next) in [
        (Overlap::Skip, CatchUp::None, Next::End(Ending::Missed)),
        (Overlap::Allow, CatchUp::None, Next::End(Ending::Missed)),
        (Overlap::Skip, CatchUp::Last, Next::Lock(SECOND)),
        (Overlap::Allow, CatchUp::Last, Next::Lock(SECOND)),
        (Overlap::Wait, CatchUp::None, Next::Lock(SECOND)),
    ] {
        let mut firing = firing(0, catch_up);
        firing.overlap = overlap;
        let slot = firing.slot;
        let in_time = firing.replied(Begun::Vacant, true, slot + TOLERANCE);
        assert_eq!(in_time, Next::Lock(SECOND));
        // Otherwise each firing would be kept until the lock is free.
        let is_kept = overlap == Overlap::Allow && catch_up == CatchUp::None;
        let gives_way = firing.gives_way().is_some();
        assert_eq!(gives_way, !is_kept, "{overlap:?} {catch_up:?}");
        let late = firing.replied(Begun::Vacant, true, slot + TOLERANCE + SECOND);
        assert_eq!(late, next, "{overlap:?} {catch_up:?}");
    }
}

#[test]
fn settings_beyond_the_limits_are_refused() {
    let client = Client::embedded();
    let job = || client.job("job").schedule(cron("@daily", "UTC"));
    let years = 11 * 366 * 24 * 60 * MINUTE;
    for (job, refused) in [
        (job().retry(19), None),
        // The record would not keep all attempts.
        (job().retry(20), Some("retry")),
        (job().jitter(years), Some("jitter")),
        (job().timeout(years), Some("timeout")),
    ] {
        let error = job.check().err().map(|error| error.to_string());
        assert_eq!(error.is_some(), refused.is_some(), "{error:?}");
        let (error, refused) = (error.unwrap_or_default(), refused.unwrap_or_default());
        assert!(error.contains(refused), "{error}");
    }
}

/// Begins runs in the store without doing their work.
struct Beginner {
    client: Client,
    job: Job,
    /// Times count from here, in the time of the store.
    now: i64,
    kept: u32,
}

impl Beginner {
    async fn new(client: &Client) -> Beginner {
        let job = client.job(&redlatch_testkit::unique("begin"));
        let record = job
            .session
            .store
            .run_idempotent(&read(&job.keys, false))
            .await;
        let now = record.unwrap().now;
        let client = client.clone();
        let kept = KEPT;
        Beginner {
            client,
            job,
            now,
            kept,
        }
    }

    /// Begins the run of a slot so many seconds from now. `lock` has the owner of its lock and the key, as lines, or is
    /// [`DEAD`].
    async fn begin(
        &self,
        run: &str,
        seconds: i64,
        attempts: u32,
        overlap: Overlap,
        lock: &str,
    ) -> Begun {
        let mut held = None;
        let mut runner = format!("{lock}\nhost\nby");
        if lock == DEAD {
            let lock = self.client.lock(&redlatch_testkit::unique("dead"));
            let guard = held.insert(lock.lock().await.unwrap());
            runner = format!("{}\n{}\nhost\nby", guard.owner_id(), lock.name());
        }
        let step = Begin {
            keys: &self.job.keys,
            run,
            slot: self.now + seconds * 1000,
            attempts,
            ahead: 60_000,
            overlap,
            kept: self.kept,
            time_to_live: Lease::from_remaining(MINUTE),
            runner: &runner,
            schedule: "UTC @hourly",
        };
        let store = &self.job.session.store;
        let begun = store.run_idempotent(&step.step()).await.unwrap();
        if let Some(held) = held {
            held.unlock().await.unwrap();
        }
        begun
    }

    /// On a server and in the embedded store, each with a lock that is held.
    async fn on_each_store(test: impl AsyncFn(&Client, &str)) {
        let on_server = Client::connect(&redlatch_testkit::shared().url())
            .await
            .unwrap();
        for client in [on_server, Client::embedded()] {
            let lock = client.lock(&redlatch_testkit::unique("held"));
            let _held = lock.lock().await.unwrap();
            test(&client, &format!("\n{}", lock.name())).await;
        }
    }
}

/// A lock that ends when the run has begun.
const DEAD: &str = "";

/// The run that lasts may end before the slot.
#[tokio::test]
async fn early_machine_does_not_skip_a_firing() {
    Beginner::on_each_store(async |client, lasts| {
        let job = Beginner::new(client).await;
        let first = job.begin("a", -20, 1, Overlap::Skip, lasts).await;
        assert_eq!(first, Begun::New(1));
        for run in ["", "b"] {
            let early = job.begin(run, 40, 1, Overlap::Skip, DEAD).await;
            let is_early =
                matches!(early, Begun::Early(time) if time <= 40 * SECOND && time > SECOND);
            assert!(is_early, "{early:?}");
        }
        let waits = job.begin("b", 40, 1, Overlap::Wait, DEAD).await;
        assert!(matches!(waits, Begun::Overlaps(_)), "{waits:?}");
        let skipped = async || job.job.history().await.unwrap().unwrap().skipped;
        assert_eq!(skipped().await, 0);
        let due = job.begin("b", -10, 1, Overlap::Skip, DEAD).await;
        assert_eq!((due, skipped().await), (Begun::Skipped, 1));
    })
    .await;
}

#[tokio::test]
async fn dead_run_is_not_repeated_after_a_later_one() {
    Beginner::on_each_store(async |client, lasts| {
        for (overlap, later, repeated) in [
            (Overlap::Allow, None, Begun::New(2)),
            (Overlap::Allow, Some(DEAD), Begun::Done),
            (Overlap::Allow, Some(lasts), Begun::Done),
            (Overlap::Skip, None, Begun::New(2)),
        ] {
            let job = Beginner::new(client).await;
            let first = job.begin("a", -20, 2, overlap, DEAD).await;
            assert_eq!(first, Begun::New(1));
            if let Some(lock) = later {
                let later = job.begin("b", -10, 2, overlap, lock).await;
                assert_eq!(later, Begun::New(1));
            }
            let again = job.begin("c", -20, 2, overlap, DEAD).await;
            assert_eq!(again, repeated, "{overlap:?} {later:?}");
        }
    })
    .await;
}

/// Another program may have written any hash.
#[tokio::test]
async fn of_a_record_that_keeps_too_much_at_most_20_runs_are_known() {
    Beginner::on_each_store(async |client, lasts| {
        let mut job = Beginner::new(client).await;
        job.kept = u32::MAX;
        // And `last`, `latest` and `schedule`.
        let largest = i64::from(MAX_FIELDS) - 3;
        for slot in 1..=largest {
            let begun = job.begin("a", slot - 300, 1, Overlap::Allow, lasts).await;
            assert_eq!(begun, Begun::New(1));
        }
        let history = job.job.history().await.unwrap();
        assert_eq!(history.unwrap().runs.len(), KEPT as usize);
        job.begin("a", 0, 1, Overlap::Allow, lasts).await;
        assert_eq!(job.job.history().await.unwrap(), None);
    })
    .await;
}

/// The record keeps all attempts, so it knows that there are no more.
#[tokio::test]
async fn slot_is_repeated_as_often_as_can_be_set() {
    Beginner::on_each_store(async |client, _| {
        let job = Beginner::new(client).await;
        for attempt in 1..=KEPT {
            let run = attempt.to_string();
            let begun = job.begin(&run, -20, KEPT, Overlap::Skip, DEAD).await;
            assert_eq!(begun, Begun::New(attempt));
        }
        for run in ["", "another"] {
            let begun = job.begin(run, -20, KEPT, Overlap::Skip, DEAD).await;
            assert_eq!(begun, Begun::Done);
        }
        let runs = job.job.history().await.unwrap().unwrap().runs;
        let attempts: Vec<_> = runs.iter().rev().map(|run| run.attempt).collect();
        assert_eq!(attempts, Vec::from_iter(1..=KEPT));
        assert!(runs.iter().all(|run| run.state == RunState::Lost));
    })
    .await;
}

/// More runs last at a time than the record keeps of those that have ended.
#[tokio::test]
async fn run_that_lasts_is_kept_longer_than_others() {
    Beginner::on_each_store(async |client, lasts| {
        let job = Beginner::new(client).await;
        let begin = async |run: i64, lock| {
            let id = run.to_string();
            let begun = job.begin(&id, run, 1, Overlap::Allow, lock).await;
            assert_eq!(begun, Begun::New(1), "{run}");
        };
        let end = async |run: i64| {
            let (id, of) = (run.to_string(), attempt_key(job.now + run * 1000, 1));
            let step = finish(&job.job.keys, &id, &of, "ok\ndone\n");
            let store = &job.job.session.store;
            store.run_idempotent(&step).await.unwrap()
        };
        let kept = i64::from(KEPT);
        for run in 1..=kept {
            begin(run, if run == kept - 1 { DEAD } else { lasts }).await;
        }
        assert!(end(kept).await);
        // In the place of the one that is dead, of that which has ended, and of the oldest.
        for (run, known) in [(kept + 1, true), (kept + 2, true), (kept + 3, false)] {
            begin(run, lasts).await;
            let runs = job.job.history().await.unwrap().unwrap().runs;
            assert_eq!(runs.len(), KEPT as usize);
            let is_first = |run: &RunRecord| run.slot == at_ms(job.now + 1000);
            assert_eq!(runs.iter().any(is_first), known, "{run}");
        }
        assert!(!end(1).await);
        assert!(end(2).await);
    })
    .await;
}

fn at_ms(millis: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(millis.unsigned_abs())
}

/// The step arrives after an outage.
#[tokio::test]
async fn begin_without_its_lock_leaves_the_slot_to_others() {
    Beginner::on_each_store(async |client, _| {
        let job = Beginner::new(client).await;
        let lock = client.lock(&redlatch_testkit::unique("late"));
        let lock_of = |guard: &Guard| format!("{}\n{}", guard.owner_id(), lock.name());
        let begin = async |of: &str| job.begin("run", -20, 1, Overlap::Skip, of).await;
        let guard = lock.lock().await.unwrap();
        let ended = lock_of(&guard);
        guard.unlock().await.unwrap();
        assert_eq!(begin(&ended).await, Begun::Vacant);
        assert_eq!(job.job.history().await.unwrap(), None);
        // Also while another machine has it.
        let guard = lock.lock().await.unwrap();
        assert_eq!(begin(&ended).await, Begun::Vacant);
        assert_eq!(begin(&lock_of(&guard)).await, Begun::New(1));
    })
    .await;
}

/// A fleet of clients on one embedded store and a paused clock, which begins at a given time.
struct Fleet {
    store: Embedded,
    began: Instant,
    at: SystemTime,
    runs: Arc<Mutex<Vec<(String, u32, usize)>>>,
}

impl Fleet {
    fn new(at_text: &str) -> Fleet {
        Fleet {
            store: Embedded::new(),
            began: Instant::now(),
            at: at(at_text),
            runs: Arc::default(),
        }
    }

    fn client(&self) -> Client {
        Client::builder().connect_embedded(&self.store).unwrap()
    }

    /// Returns the job on a machine whose clock is ahead by this time.
    fn job(&self, client: &Client, text: &str, zone: &str, ahead: Duration) -> Scheduled {
        let (began, at) = (self.began, self.at + ahead);
        let job = client.job("job").schedule(cron(text, zone));
        job.clock(move || at + began.elapsed())
    }

    /// Returns the job as a client of its own schedules it, in UTC, on a machine whose clock is right.
    fn utc_job(&self, text: &str) -> Scheduled {
        self.job(&self.client(), text, "UTC", Duration::ZERO)
    }

    /// Runs the job on a machine until it is stopped or killed. Each run takes `takes`.
    fn start(&self, machine: usize, job: Scheduled, takes: Duration) -> Machine {
        let (stop, running) = self.running(machine, job, takes);
        let task = tokio::spawn(running);
        Machine { stop, task }
    }

    fn running(
        &self,
        machine: usize,
        job: Scheduled,
        takes: Duration,
    ) -> (oneshot::Sender<()>, impl Future<Output = ()> + use<>) {
        let (stop, stopped) = oneshot::channel::<()>();
        let runs = self.runs.clone();
        let running = async move {
            let work = async |run: Run| {
                let run = (utc(run.slot()), run.attempt(), machine);
                runs.lock().unwrap().push(run);
                sleep(takes).await;
            };
            let stopped = async {
                let _ = stopped.await;
            };
            job.run_until(stopped, work).await.unwrap();
        };
        (stop, running)
    }

    /// Returns how often each slot was run.
    fn slots(&self) -> BTreeMap<String, usize> {
        let mut slots = BTreeMap::new();
        for (slot, ..) in &*self.runs.lock().unwrap() {
            *slots.entry(slot.clone()).or_default() += 1;
        }
        slots
    }

    async fn history(&self) -> History {
        let history = self.client().job("job").history().await.unwrap();
        history.expect("the job has run")
    }
}

struct Machine {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Machine {
    async fn stop(self) {
        drop(self.stop);
        self.task.await.unwrap();
    }
}

/// Twenty machines whose clocks differ by up to half a period, over a change of the clocks and the end of a year.
#[tokio::test(start_paused = true)]
async fn each_slot_runs_on_one_of_many_machines() {
    for (text, zone, start, hours) in [
        ("*/15 * * * *", "Europe/Berlin", "2027-03-27T23:01", 4),
        ("*/15 * * * *", "Europe/Berlin", "2027-10-30T23:01", 4),
        ("*/10 * * * *", "UTC", "2026-12-31T22:01", 3),
    ] {
        let fleet = Fleet::new(start);
        let gap = cron(text, zone);
        let expected = firings(&gap, start, (hours * 4) as usize);
        let machines: Vec<_> = (0..20)
            .map(|machine| {
                let ahead = Duration::from_secs(machine * 14);
                let job = fleet.job(&fleet.client(), text, zone, ahead);
                fleet.start(machine as usize, job.jitter(5 * SECOND), 90 * SECOND)
            })
            .collect();
        let last = at(expected.last().unwrap().trim_end_matches('Z'));
        sleep(last.duration_since(fleet.at).unwrap() + 2 * MINUTE).await;
        for machine in machines {
            machine.stop().await;
        }
        let slots = fleet.slots();
        assert!(
            expected.iter().all(|slot| slots.contains_key(slot)),
            "{slots:?}"
        );
        assert!(slots.values().all(|runs| *runs == 1), "{slots:?}");
        let history = fleet.history().await;
        assert_eq!(
            (history.runs.len(), history.skipped),
            (slots.len().min(20), 0)
        );
        assert!(
            history
                .runs
                .iter()
                .all(|run| run.state == RunState::Succeeded)
        );
    }
}

/// The machine that runs a slot dies. Another one repeats it when the lease would have ended, if it may.
#[tokio::test(start_paused = true)]
async fn dead_run_is_repeated_only_if_it_may_be() {
    for overlap in [Overlap::Skip, Overlap::Wait, Overlap::Allow] {
        for retries in 0..3 {
            let fleet = Fleet::new("2027-01-01T01:59");
            let machines: Vec<_> = (0..4)
                .map(|machine| {
                    let job = fleet.utc_job("0 2 * * *");
                    let (job, runs) = (job.overlap(overlap).retry(retries), fleet.runs.clone());
                    tokio::spawn(async move {
                        let died = tokio::sync::Notify::new();
                        let work = async |run: Run| {
                            let attempt = run.attempt();
                            runs.lock()
                                .unwrap()
                                .push((utc(run.slot()), attempt, machine));
                            if attempt < 3 {
                                sleep(5 * SECOND).await;
                                died.notify_one();
                                std::future::pending::<()>().await;
                            }
                        };
                        tokio::select! {
                            ended = job.run(work) => ended.unwrap(),
                            () = died.notified() => {}
                        }
                    })
                })
                .collect();
            sleep(10 * MINUTE).await;
            let history = fleet.history().await;
            let states = history.runs.iter().rev().map(|run| run.state.as_str());
            let all = &["lost", "lost", "ok"][..=retries as usize];
            assert_eq!(Vec::from_iter(states), all, "{overlap:?} {retries}");
            let runs = fleet.runs.lock().unwrap().clone();
            let attempts: Vec<_> = runs.iter().map(|run| run.1).collect();
            assert_eq!(attempts, [1, 2, 3][..all.len()], "{overlap:?} {retries}");
            let on: std::collections::BTreeSet<_> = runs.iter().map(|run| run.2).collect();
            assert_eq!(on.len(), all.len(), "{runs:?}");
            machines.iter().for_each(tokio::task::JoinHandle::abort);
        }
    }
}

/// Also a panic, in the closure and in its future: it ends neither the job on this machine nor, by attempts elsewhere, on others.
#[tokio::test(start_paused = true)]
async fn failed_run_is_recorded_and_the_next_firing_runs() {
    let fleet = Fleet::new("2027-01-01T00:00:30");
    let job = fleet.utc_job("* * * * *").retry(2).timeout(SECOND);
    let work = |run: Run| {
        let minute = utc(run.slot())[14..16].parse().unwrap();
        assert_ne!(minute, 1, "early");
        async move {
            match minute {
                2 => panic!("late"),
                3 => std::panic::panic_any(3),
                4 => return Err("an error"),
                5 => sleep(MINUTE).await,
                _ => {}
            }
            Ok(())
        }
    };
    job.run_until(sleep(6 * MINUTE), work).await.unwrap();
    let history = fleet.history().await;
    let ends = history
        .runs
        .iter()
        .rev()
        .map(|run| (run.state.as_str(), &*run.outcome));
    let ends = Vec::from_iter(ends);
    assert!(ends[0].1.contains("early"), "{ends:?}");
    let others = [
        ("failed", "panicked: late"),
        ("failed", "panicked: not with a text"),
        ("failed", "an error"),
        ("failed", "timed out after 1s"),
        ("ok", ""),
    ];
    assert_eq!(ends[1..], others);
    assert!(history.runs.iter().all(|run| run.attempt == 1));
}

/// A later slot was skipped while the run lasted. A process is started then, or takes the place of one that watches the run.
#[tokio::test(start_paused = true)]
async fn dead_run_is_repeated_after_later_slots_were_skipped() {
    let fleet = Fleet::new("2027-01-01T01:59:59");
    let job = || fleet.utc_job("0 * * * *").retry(1);
    let dies = fleet.start(0, job(), 180 * MINUTE);
    let watches = fleet.start(1, job(), 180 * MINUTE);
    sleep(70 * MINUTE).await;
    assert_eq!(fleet.history().await.skipped, 1);
    let takes_over = fleet.start(2, job(), SECOND);
    watches.stop().await;
    dies.task.abort();
    sleep(2 * MINUTE).await;
    takes_over.stop().await;
    let runs = fleet.runs.lock().unwrap().clone();
    let slot = "2027-01-01T02:00:00Z".to_owned();
    let [first, again] = &runs[..] else {
        panic!("two runs: {runs:?}");
    };
    assert_eq!((&first.0, first.1), (&slot, 1));
    assert_eq!(again, &(slot, 2, 2));
}

/// Another user gets the lock when it ends with its lease.
#[tokio::test(start_paused = true)]
async fn dead_run_is_repeated_after_another_user_had_the_lock() {
    let fleet = Fleet::new("2027-01-01T01:59:59");
    let job = || fleet.utc_job("0 2 * * *").retry(1);
    let dies = fleet.start(0, job(), 180 * MINUTE);
    until_runs(&fleet, 1).await;
    let watches = fleet.start(1, job(), SECOND);
    sleep(10 * MINUTE).await;
    let lock = fleet.client().lock("job");
    let waits = tokio::spawn(async move { lock.lock().await.unwrap() });
    sleep(SECOND).await;
    dies.task.abort();
    let held = waits.await.unwrap();
    sleep(10 * MINUTE).await;
    held.unlock().await.unwrap();
    sleep(MINUTE).await;
    watches.stop().await;
    let runs = fleet.runs.lock().unwrap().clone();
    let runs: Vec<_> = runs.iter().map(|run| (run.1, run.2)).collect();
    assert_eq!(runs, [(1, 0), (2, 1)]);
}

/// Each run takes longer than a period.
#[tokio::test(start_paused = true)]
async fn overlapping_firings_are_skipped_wait_or_run() {
    for (overlap, minutes, skipped) in [
        (Overlap::Skip, vec![1, 3, 5, 7], 3),
        // The latest of those that wait.
        (Overlap::Wait, vec![1, 2, 4, 6], 0),
        (Overlap::Allow, vec![1, 2, 3, 4, 5, 6, 7], 0),
    ] {
        let fleet = Fleet::new("2027-01-01T00:00:30");
        let machines: Vec<_> = (0..3)
            .map(|machine| {
                let ahead = Duration::from_millis(100 * machine);
                let job = fleet.job(&fleet.client(), "* * * * *", "UTC", ahead);
                fleet.start(machine as usize, job.overlap(overlap), 110 * SECOND)
            })
            .collect();
        sleep(6 * MINUTE + 50 * SECOND).await;
        for machine in machines {
            machine.stop().await;
        }
        let slots: Vec<_> = fleet.slots().into_iter().collect();
        let expected = minutes
            .iter()
            .map(|minute| (format!("2027-01-01T00:{minute:02}:00Z"), 1));
        assert_eq!(slots, Vec::from_iter(expected), "{overlap:?}");
        assert_eq!(fleet.history().await.skipped, skipped, "{overlap:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn outage_delays_or_misses_a_firing() {
    for (catch_up, minutes, runs) in [
        (CatchUp::None, 1, 1),
        (CatchUp::None, 5, 0),
        (CatchUp::Last, 5, 1),
    ] {
        let fleet = Fleet::new("2027-01-01T01:59:40");
        let job = fleet.utc_job("0 2 * * *");
        let machine = fleet.start(0, job.catch_up(catch_up), SECOND);
        sleep(SECOND).await;
        fleet.store.set_available(false);
        sleep(minutes * MINUTE).await;
        fleet.store.set_available(true);
        sleep(MINUTE).await;
        machine.stop().await;
        assert_eq!(fleet.slots().len(), runs, "{catch_up:?} {minutes}");
    }
}

/// The period is not longer than a firing may be late, so that each one takes the place of the one before.
#[tokio::test(start_paused = true)]
async fn each_slot_of_an_outage_is_logged_unless_it_is_caught_up() {
    for overlap in [Overlap::Skip, Overlap::Wait, Overlap::Allow] {
        for (catch_up, missed) in [(CatchUp::None, 29), (CatchUp::Last, 0)] {
            let (log, _logged) = logged();
            let fleet = Fleet::new("2027-01-01T01:59:40");
            let job = fleet.utc_job("* * * * *");
            let machine = fleet.start(0, job.overlap(overlap).catch_up(catch_up), SECOND);
            sleep(SECOND).await;
            fleet.store.set_available(false);
            sleep(30 * MINUTE).await;
            fleet.store.set_available(true);
            sleep(10 * SECOND).await;
            machine.stop().await;
            let slots = Vec::from_iter(fleet.slots());
            let latest = ("2027-01-01T02:29:00Z".to_owned(), 1);
            assert_eq!(slots, [latest], "{overlap:?} {catch_up:?}");
            let lines = log.lines(&["a firing was missed"]);
            assert_eq!(lines.len(), missed, "{overlap:?} {catch_up:?} {lines:?}");
        }
    }
}

/// The same while another user holds the lock.
#[tokio::test(start_paused = true)]
async fn each_slot_runs_or_is_logged_while_another_user_holds_the_lock() {
    for (overlap, ran) in [
        (Overlap::Skip, 2),
        (Overlap::Wait, 2),
        // They run beside each other.
        (Overlap::Allow, 7),
    ] {
        let (log, _logged) = logged();
        let fleet = Fleet::new("2027-01-01T01:59:55");
        let (client, job) = (fleet.client(), fleet.utc_job("*/10 * * * * *"));
        let (lock, side) = (client.lock("job"), client.read_write_lock("job").write());
        let (mut alone, mut writer) = (None, None);
        match overlap {
            Overlap::Allow => writer = Some(side.lock().await.unwrap()),
            _ => alone = Some(lock.lock().await.unwrap()),
        }
        let machine = fleet.start(0, job.overlap(overlap), SECOND / 10);
        sleep(122 * SECOND).await;
        drop((alone, writer));
        sleep(5 * SECOND).await;
        machine.stop().await;
        assert_eq!(fleet.slots().len(), ran, "{overlap:?}");
        let missed = log.lines(&["a firing was missed"]);
        assert_eq!(missed.len(), 13 - ran, "{overlap:?} {missed:?}");
    }
}

/// It has only just acquired the lock when the next firing of this machine is due. If it loses the lock at once, nothing has run.
#[tokio::test(start_paused = true)]
async fn slot_that_another_machine_begins_is_not_missed() {
    for is_lost in [false, true] {
        slot_is_begun_elsewhere(is_lost).await;
    }
}

async fn slot_is_begun_elsewhere(is_lost: bool) {
    let (log, _logged) = logged();
    let fleet = Fleet::new("2027-01-01T01:59:55");
    let client = fleet.client();
    let held = client.lock("job").lock().await.unwrap();
    let machine = fleet.start(0, fleet.utc_job("*/10 * * * * *"), SECOND);
    sleep(15 * SECOND + SECOND / 2).await;
    let begin = Begin {
        keys: &client.job("job").keys,
        run: "run",
        slot: millis(at("2027-01-01T02:00")),
        attempts: 1,
        ahead: 0,
        overlap: Overlap::Skip,
        kept: KEPT,
        time_to_live: Lease::from_remaining(MINUTE),
        runner: &format!("{}\njob\nhost\nby", held.owner_id()),
        schedule: "UTC */10 * * * * *",
    };
    let store = &client.job("job").session.store;
    let begun = store.run_idempotent(&begin.step()).await.unwrap();
    assert_eq!(begun, Begun::New(1));
    if is_lost {
        held.unlock().await.unwrap();
    }
    sleep(5 * SECOND).await;
    machine.stop().await;
    let missed = log.lines(&["a firing was missed"]);
    assert_eq!(missed.len(), usize::from(is_lost), "{missed:?}");
}

#[tokio::test(start_paused = true)]
async fn slots_of_a_machine_that_slept_are_logged_once() {
    let (log, _logged) = logged();
    let fleet = Fleet::new("2027-01-01T02:10");
    let job = fleet.utc_job("*/30 * * * *");
    let (began, at) = (fleet.began, fleet.at);
    let job = job.clock(move || {
        let slept = if began.elapsed() < MINUTE { 0 } else { 8 };
        at + began.elapsed() + slept * 60 * MINUTE
    });
    let machine = fleet.start(0, job, SECOND);
    sleep(5 * MINUTE).await;
    machine.stop().await;
    let [line] = &log.lines(&["a firing was missed"])[..] else {
        panic!("once: {}", log.text());
    };
    for field in [
        "slot=\"2027-01-01T02:30:00Z\"",
        "until=\"2027-01-01T10:00:00Z\"",
    ] {
        assert!(line.contains(field), "{line}");
    }
}

/// Another kind of lock has its name. Logged once.
#[tokio::test(start_paused = true)]
async fn refusal_delays_or_misses_a_firing() {
    for (catch_up, seconds, runs) in [
        (CatchUp::None, 50, 1),
        (CatchUp::None, 70, 0),
        (CatchUp::Last, 3600, 1),
    ] {
        let (log, _logged) = logged();
        let fleet = Fleet::new("2027-01-01T01:59:59");
        let job = fleet.utc_job("0 2 * * *");
        let machine = fleet.start(0, job.catch_up(catch_up), SECOND);
        let other = fleet.client().read_write_lock("job");
        let other = other.write().lock().await.unwrap();
        sleep(seconds * SECOND).await;
        other.unlock().await.unwrap();
        sleep(MINUTE).await;
        machine.stop().await;
        assert_eq!(fleet.slots().len(), runs, "{catch_up:?} {seconds}");
        assert_eq!(log.lines(&["a firing was refused"]).len(), 1);
        let missed = log.lines(&["a firing was missed"]).len();
        assert_eq!(missed, 1 - runs, "{catch_up:?} {seconds}");
    }
}

/// Longer than a firing may be late.
#[tokio::test(start_paused = true)]
async fn watch_of_a_run_lasts_while_the_store_refuses() {
    let (log, _logged) = logged();
    let fleet = Fleet::new("2027-01-01T01:59:59");
    let job = || fleet.utc_job("0 2 * * *").retry(1);
    let dies = fleet.start(0, job(), 180 * MINUTE);
    until_runs(&fleet, 1).await;
    let watches = fleet.start(1, job(), SECOND);
    sleep(SECOND).await;
    dies.task.abort();
    sleep(SECOND).await;
    fleet.store.fail([Failure::Refused; 100]);
    sleep(10 * MINUTE).await;
    watches.stop().await;
    let runs = fleet.runs.lock().unwrap().clone();
    let runs: Vec<_> = runs.iter().map(|run| (run.1, run.2)).collect();
    assert_eq!(runs, [(1, 0), (2, 1)]);
    assert_eq!(log.lines(&["a firing was refused"]).len(), 1);
}

/// Returns what this thread logs until the second value is dropped.
fn logged() -> (Log, impl Sized) {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone());
    // With only one subscriber, `tracing` would disable an event for good if another test, which has no subscriber, were
    // the first to log it.
    let other = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    let until = tracing::subscriber::set_default(subscriber.finish());
    (log, (other, until))
}

/// The fleet was down at the time, or is started for the first time.
#[tokio::test(start_paused = true)]
async fn restarted_fleet_catches_up_once() {
    for (catch_up, has_run, slots) in [
        (CatchUp::None, true, 1),
        (CatchUp::Last, false, 0),
        (CatchUp::Last, true, 2),
    ] {
        let fleet = Fleet::new("2027-01-01T01:59:40");
        let job = || fleet.utc_job("0 2 * * *").catch_up(catch_up);
        if has_run {
            let machine = fleet.start(0, job(), SECOND);
            sleep(MINUTE).await;
            machine.stop().await;
        }
        sleep(80 * 3600 * SECOND).await;
        let machines = [1, 2, 3].map(|machine| fleet.start(machine, job(), SECOND));
        sleep(MINUTE).await;
        for machine in machines {
            machine.stop().await;
        }
        assert_eq!(fleet.slots().len(), slots, "{catch_up:?} {has_run}");
        assert!(fleet.slots().values().all(|runs| *runs == 1));
    }
}

/// A process waits with a firing that is due, and another one takes its place, as when the crontab has changed.
#[tokio::test(start_paused = true)]
async fn firing_that_waits_is_taken_over_by_the_next_process() {
    let fleet = Fleet::new("2027-01-01T01:59:40");
    let job = || fleet.utc_job("0 2 * * *");
    let first = fleet.start(0, job(), SECOND);
    sleep(24 * 60 * MINUTE).await;
    let lock = fleet.client().lock("job");
    let held = lock.lock().await.unwrap();
    sleep(MINUTE / 2).await;
    first.stop().await;
    assert_eq!(fleet.slots().len(), 1);
    let next = fleet.start(1, job(), SECOND);
    sleep(10 * SECOND).await;
    held.unlock().await.unwrap();
    sleep(10 * SECOND).await;
    next.stop().await;
    let slots = Vec::from_iter(fleet.slots());
    let expected = ["2027-01-01T02:00:00Z", "2027-01-02T02:00:00Z"];
    assert_eq!(slots, expected.map(|slot| (slot.to_owned(), 1)));
}

/// It waits for another run of the job, longer than a firing may be late.
#[tokio::test(start_paused = true)]
async fn firing_that_waits_for_another_run_is_taken_over_by_the_next_process() {
    let fleet = Fleet::new("2027-01-01T01:59:40");
    let job = || fleet.utc_job("*/5 * * * *").overlap(Overlap::Wait);
    let first = fleet.start(0, job(), 8 * MINUTE);
    sleep(7 * MINUTE + MINUTE / 3).await;
    // It begins no further run. The one of 02:00 lasts.
    drop(first.stop);
    let next = fleet.start(1, job(), 8 * MINUTE);
    first.task.await.unwrap();
    sleep(MINUTE).await;
    next.stop().await;
    let runs = fleet.runs.lock().unwrap().clone();
    let run = |slot: &str, machine| (slot.to_owned(), 1, machine);
    let expected = [
        run("2027-01-01T02:00:00Z", 0),
        run("2027-01-01T02:05:00Z", 1),
    ];
    assert_eq!(runs, expected);
}

/// The job has never run, so the store does not know its schedule. The next process does, or does not.
#[tokio::test(start_paused = true)]
async fn firing_that_waits_is_taken_over_if_the_next_process_knows_the_schedule() {
    for (since, slots) in [(Duration::ZERO, 1), (MINUTE, 0)] {
        let fleet = Fleet::new("2027-01-01T01:59:40");
        let job = || fleet.utc_job("0 2 * * *");
        let held = fleet.client().lock("job").lock().await.unwrap();
        let first = fleet.start(0, job(), SECOND);
        sleep(MINUTE).await;
        first.stop().await;
        let next = fleet.start(1, job().since(fleet.at + since), SECOND);
        sleep(10 * SECOND).await;
        held.unlock().await.unwrap();
        sleep(10 * SECOND).await;
        next.stop().await;
        assert_eq!(fleet.slots().len(), slots, "{since:?}");
    }
}

/// Replicas do not confirm that a run has begun, although its lock is renewed.
#[tokio::test(start_paused = true)]
async fn stop_does_not_wait_for_replicas() {
    let fleet = Fleet::new("2027-01-01T01:59:59");
    let job = fleet.utc_job("0 2 * * *");
    let machine = fleet.start(0, job.catch_up(CatchUp::Last), SECOND);
    sleep(SECOND / 2).await;
    let unconfirmed = std::iter::repeat_n(Some(Failure::Unconfirmed), 100_000);
    fleet.store.fail([None].into_iter().chain(unconfirmed));
    sleep(5 * MINUTE).await;
    assert!(fleet.client().lock("job").is_locked().await.unwrap());
    let stopped = tokio::time::timeout(MINUTE, machine.stop()).await;
    stopped.expect("it ends");
    assert!(fleet.slots().is_empty());
}

#[tokio::test(start_paused = true)]
async fn last_success_is_known_after_any_number_of_failures() {
    let fleet = Fleet::new("2027-01-01T00:00:30");
    let job = fleet.utc_job("* * * * *");
    let last = at("2027-01-01T00:02");
    let work = async |run: Run| match run.slot() <= last {
        true => Ok(()),
        false => Err("out of paper"),
    };
    job.run_until(sleep(40 * MINUTE), work).await.unwrap();
    let history = fleet.history().await;
    assert!(history.runs.iter().all(|run| run.state == RunState::Failed));
    assert_eq!(history.last_success, Some(last));
}

#[tokio::test(start_paused = true)]
async fn run_that_never_ends_times_out() {
    let fleet = Fleet::new("2027-01-01T01:59:40");
    let job = fleet.utc_job("0 2 * * *");
    let machine = fleet.start(0, job.timeout(5 * MINUTE), 24 * 60 * MINUTE);
    sleep(3 * MINUTE).await;
    let [run] = &fleet.history().await.runs[..] else {
        panic!("one run");
    };
    assert_eq!((run.state, run.took), (RunState::Running, None));
    assert!(fleet.client().lock("job").is_locked().await.unwrap());
    sleep(3 * MINUTE).await;
    let history = fleet.history().await;
    let [run] = &history.runs[..] else {
        panic!("one run");
    };
    assert_eq!(
        (run.state, &*run.outcome),
        (RunState::Failed, "timed out after 300s")
    );
    assert_eq!(run.took.unwrap().as_secs(), 300);
    assert!(!fleet.client().lock("job").is_locked().await.unwrap());
    let next = history.next_run(fleet.at + 6 * MINUTE);
    assert_eq!(next.map(utc).as_deref(), Some("2027-01-02T02:00:00Z"));
    machine.stop().await;
}

/// Another client takes the lock by force. The machine that loses it drops the work. Another one repeats the run if it may.
#[tokio::test(start_paused = true)]
async fn lost_lock_drops_the_work_and_is_recorded() {
    for (retries, runs) in [(0, &[(1, "lost")][..]), (1, &[(1, "lost"), (2, "ok")])] {
        let fleet = Fleet::new("2027-01-01T01:59:40");
        let job = || fleet.utc_job("0 2 * * *").retry(retries);
        let loses = fleet.start(0, job(), 5 * MINUTE);
        until_runs(&fleet, 1).await;
        let other = fleet.start(1, job(), 5 * MINUTE);
        // It has looked at the run that lasts.
        sleep(SECOND).await;
        assert!(fleet.client().lock("job").force_unlock().await.unwrap());
        until_runs(&fleet, runs.len()).await;
        sleep(10 * MINUTE).await;
        let history = fleet.history().await;
        let found = history.runs.iter().rev();
        let found = found.map(|run| (run.attempt, run.state.as_str()));
        assert_eq!(Vec::from_iter(found), runs, "{retries}");
        let outcome = &history.runs.last().unwrap().outcome;
        let is_told = outcome.contains("no longer holds");
        assert_eq!(is_told, retries == 0, "{outcome}");
        for machine in [loses, other] {
            machine.stop().await;
        }
    }
}

/// While it runs, a firing may wait for its end. Later none schedules it any more.
#[tokio::test(start_paused = true)]
async fn firing_that_no_machine_begins_is_overdue() {
    let fleet = Fleet::new("2027-01-01T01:59:40");
    let machine = fleet.start(0, fleet.utc_job("0 * * * *"), 90 * MINUTE);
    until_runs(&fleet, 1).await;
    let [due, late] = ["2027-01-01T03:01", "2027-01-01T03:01:01"].map(at);
    assert_eq!(fleet.history().await.overdue(late), None);
    machine.task.abort();
    sleep(MINUTE).await;
    let history = fleet.history().await;
    assert_eq!(history.overdue(due), None);
    assert_eq!(history.overdue(late), Some(at("2027-01-01T03:00")));
}

/// The work decides how it ends, and that end is not repeated. Readers cannot be asked.
#[tokio::test(start_paused = true)]
async fn work_learns_that_its_lock_is_asked_for() {
    for (overlap, expected) in [(Overlap::Skip, "asked"), (Overlap::Allow, "not asked")] {
        let fleet = Fleet::new("2027-01-01T01:59:40");
        let job = fleet.utc_job("0 2 * * *").overlap(overlap).retry(1);
        let work = async |run: Run| {
            let asked = fleet.client().lock("job").ask().await;
            assert_eq!(asked.is_ok(), overlap == Overlap::Skip, "{asked:?}");
            tokio::select! {
                () = run.asked() => Outcome::failure("asked"),
                () = sleep(2 * MINUTE) => Outcome::success("not asked"),
            }
        };
        let stop = sleep(10 * MINUTE);
        job.run_until(stop, work).await.unwrap();
        let [run] = &fleet.history().await.runs[..] else {
            panic!("one run");
        };
        assert_eq!(run.outcome, expected);
        assert!(!fleet.client().lock("job").is_locked().await.unwrap());
    }
}

/// There is no other machine. The lock is taken by force, or the store cannot be reached until its lease has ended.
/// All locks of the job's task may have one owner.
#[tokio::test(start_paused = true)]
async fn lonely_machine_repeats_the_run_whose_lock_it_lost() {
    for (minutes, has_owner) in [(0, false), (5, false), (0, true), (5, true)] {
        let fleet = Fleet::new("2027-01-01T01:59:40");
        let job = fleet.utc_job("0 2 * * *").retry(1);
        let (stop, running) = fleet.running(0, job, 20 * MINUTE);
        let task = match has_owner {
            true => tokio::spawn(Owner::new().scope(running)),
            false => tokio::spawn(running),
        };
        let machine = Machine { stop, task };
        until_runs(&fleet, 1).await;
        if minutes == 0 {
            assert!(fleet.client().lock("job").force_unlock().await.unwrap());
        }
        fleet.store.set_available(minutes == 0);
        sleep(minutes * MINUTE).await;
        fleet.store.set_available(true);
        sleep(30 * MINUTE).await;
        machine.stop().await;
        let history = fleet.history().await;
        let states = history.runs.iter().rev().map(|run| run.state.as_str());
        assert_eq!(Vec::from_iter(states), ["lost", "ok"], "{minutes}");
    }
}

/// Its lock shows meanwhile that its machine lives.
#[tokio::test(start_paused = true)]
async fn run_whose_end_was_refused_is_not_repeated() {
    let fleet = Fleet::new("2027-01-01T01:59:59");
    let machines = [0, 1].map(|_| {
        let job = fleet.utc_job("0 2 * * *");
        let store = fleet.store.clone();
        tokio::spawn(async move {
            let work = async |_| {
                // The other machine looks at the run.
                sleep(5 * SECOND).await;
                store.fail([Failure::Refused; 20]);
            };
            let stop = sleep(10 * MINUTE);
            job.retry(1).run_until(stop, work).await.unwrap();
        })
    });
    for machine in machines {
        machine.await.unwrap();
    }
    let history = fleet.history().await;
    let states = history.runs.iter().map(|run| run.state.as_str());
    assert_eq!(Vec::from_iter(states), ["ok"]);
}

/// The key of the record has other data.
#[tokio::test(start_paused = true)]
async fn end_that_is_refused_for_good_keeps_the_lock_for_a_minute() {
    let fleet = Fleet::new("2027-01-01T01:59:59");
    let job = fleet.utc_job("0 2 * * *");
    let record = job.job().keys.record.clone();
    let machine = fleet.start(0, job, 5 * MINUTE);
    until_runs(&fleet, 1).await;
    fleet.store.remove(&record);
    let _other = fleet.client().lock(&record).lock().await.unwrap();
    for (after, is_locked) in [(5 * MINUTE + MINUTE / 2, true), (MINUTE, false)] {
        sleep(after).await;
        let lock = fleet.client().lock("job");
        assert_eq!(lock.is_locked().await.unwrap(), is_locked, "{after:?}");
    }
    machine.stop().await;
}

async fn until_runs(fleet: &Fleet, count: usize) {
    while fleet.runs.lock().unwrap().len() < count {
        sleep(SECOND).await;
    }
}

/// The outcome and the output may have any length and any characters.
#[tokio::test(start_paused = true)]
async fn history_has_outcome_and_the_end_of_the_output() {
    let fleet = Fleet::new("2027-01-01T01:59:40");
    let job = fleet.utc_job("0 2 * * *");
    let output = format!("{}é\nlast line\n", "x".repeat(5000));
    let work = async |run: Run| {
        assert_eq!((run.name(), run.attempt()), ("job", 1));
        Outcome::failure("exit\ncode 3").output(&output)
    };
    job.run_until(sleep(MINUTE), work).await.unwrap();
    let history = fleet.history().await;
    let [run] = &history.runs[..] else {
        panic!("one run");
    };
    assert_eq!(utc(run.slot), "2027-01-01T02:00:00Z");
    assert_eq!(
        (run.state, &*run.outcome),
        (RunState::Failed, "exit code 3")
    );
    assert!(run.output.len() <= super::MAX_OUTPUT && run.output.ends_with("xé\nlast line\n"));
    assert!(
        run.by.contains(&format!("(pid {})", std::process::id())),
        "{}",
        run.by
    );
    assert_eq!(history.schedule, Some(cron("0 2 * * *", "UTC")));
    assert_eq!(history.last_success, None);
}

/// Names with prefixes and hash tags, and keys of other programs.
#[tokio::test(start_paused = true)]
async fn jobs_are_listed_by_their_names() {
    let store = Embedded::new();
    let at = at("2027-01-01T01:59:59");
    for (prefix, name) in [("", "a"), ("", "b{t}"), ("p:", "a"), ("p:", "{x}:c")] {
        let client = Client::builder()
            .prefix(prefix)
            .connect_embedded(&store)
            .unwrap();
        let job = client.job(name).schedule(Cron::parse("0 2 * * *").unwrap());
        let began = Instant::now();
        let job = job.clock(move || at + began.elapsed());
        job.run_until(sleep(3 * SECOND), async |_| ())
            .await
            .unwrap();
    }
    for (prefix, pattern, names) in [
        ("", "*", vec!["a", "b{t}", "p:a", "p:{x}:c"]),
        ("p:", "*", vec!["a", "{x}:c"]),
        ("p:", "a*", vec!["a"]),
    ] {
        let client = Client::builder()
            .prefix(prefix)
            .connect_embedded(&store)
            .unwrap();
        assert_eq!(
            client.jobs(pattern).await.unwrap(),
            names,
            "{prefix} {pattern}"
        );
    }
    let none = Client::embedded().job("a").history().await.unwrap();
    assert_eq!(none, None);
}

/// In the same minute, on three machines.
#[tokio::test(start_paused = true)]
async fn a_thousand_jobs_fire_at_one_minute() {
    let (store, at, began) = (Embedded::new(), at("2027-01-01T01:59:50"), Instant::now());
    let runs = Arc::new(Mutex::new(BTreeMap::new()));
    let mut machines = Vec::new();
    for _ in 0..3 {
        let client = Client::builder().connect_embedded(&store).unwrap();
        for job in 0..1000 {
            let (name, runs) = (format!("job:{job}"), runs.clone());
            let job = client.job(&name).schedule(cron("0 2 * * *", "UTC"));
            let job = job.jitter(SECOND).clock(move || at + began.elapsed());
            machines.push(tokio::spawn(async move {
                let work = async |run: Run| {
                    *runs
                        .lock()
                        .unwrap()
                        .entry(run.name().to_owned())
                        .or_insert(0) += 1;
                };
                job.run_until(sleep(MINUTE), work).await.unwrap();
            }));
        }
    }
    for machine in machines {
        machine.await.unwrap();
    }
    let runs = Arc::into_inner(runs).unwrap().into_inner().unwrap();
    assert_eq!(runs.len(), 1000);
    assert!(runs.values().all(|runs| *runs == 1));
    let client = Client::builder().connect_embedded(&store).unwrap();
    assert_eq!(client.jobs("job:*").await.unwrap().len(), 1000);
}
