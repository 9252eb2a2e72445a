//! What happens, when, and what the watchdog does then: tables, and random histories.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;
use crate::step::differential::check_random;

use Event::{Answer, Ended, Is, MovesTo, Report, Sweep, Tick, Unwatch};
use WatchAction::{Expire, Release, Renew, RenewOnTime};

const LEASE: u64 = 30_000;

static SCRIPTS: [Script; 2] = [Script::new("a"), Script::new("b")];

/// A hold as the schedule sees it. Times are milliseconds since the start.
#[derive(Debug, Clone, Copy)]
struct Facts {
    due: u64,
    action: WatchAction,
    end: u64,
    registers_at: Option<u64>,
    node: u8,
    script: usize,
    renews: bool,
    weight: usize,
    /// Since when the store may have lost it.
    suspect: Option<u64>,
}

/// A hold with the watchdog's lease.
const RENEWED: Facts = Facts {
    due: 10_000,
    action: Renew,
    end: LEASE,
    registers_at: None,
    node: 0,
    script: 0,
    renews: true,
    weight: 1,
    suspect: None,
};

/// A hold with the same lease, which is not renewed.
const FIXED: Facts = Facts {
    due: LEASE,
    action: Expire,
    renews: false,
    ..RENEWED
};

impl Facts {
    fn due(self, due: u64) -> Facts {
        let end = self.end.max(due);
        Facts { due, end, ..self }
    }

    fn on_time(self, due: u64) -> Facts {
        let action = RenewOnTime;
        Facts {
            due,
            action,
            ..self
        }
    }

    fn renew(&mut self, now: u64) {
        (self.due, self.action, self.end) = match self.renews {
            true => (now + 10_000, Renew, self.end.max(now + LEASE)),
            false => (self.end, Expire, self.end),
        };
    }

    fn at(self, node: u8) -> Facts {
        Facts { node, ..self }
    }
}

/// What happens to a hold with this number, or to a node.
#[derive(Debug, Clone, Copy)]
enum Event {
    Tick,
    /// The client tells the watchdog about the hold.
    Is(u32, Facts),
    /// The hold ends, and no one tells the watchdog.
    Ended(u32),
    Unwatch(u32),
    MovesTo(u32, u8),
    /// The oldest batch has ended, and renewed its holds.
    Answer,
    /// Holds may be missing at a node.
    Sweep(u8),
    /// Another client has changed the key of a hold.
    Report(u32),
}

/// The watchdog, and what it has been told.
struct World {
    schedule: Schedule<u32, u8>,
    begun: Instant,
    now: u64,
    holds: BTreeMap<u32, Facts>,
    places: BTreeMap<u32, Option<ScheduleSlot>>,
    in_flight: VecDeque<Batch<u32, u8>>,
}

/// The holds that have not ended, and when the times of their facts begin.
struct Holds<'a>(&'a BTreeMap<u32, Facts>, Instant);

impl Look<u32, u8> for Holds<'_> {
    fn watch(&self, hold: &u32) -> Option<Watch> {
        let Holds(holds, begun) = *self;
        let at = |millis| begun + Duration::from_millis(millis);
        let facts = holds.get(hold)?;
        let (due, action) = match facts.suspect {
            Some(since) if facts.action != Release => (since, Renew),
            _ => (facts.due, facts.action),
        };
        Some(Watch {
            due: at(due),
            action,
            end: at(facts.end),
            registers_at: facts.registers_at.map(at),
        })
    }

    fn load(&self, hold: &u32) -> Load<u8> {
        // A hold that has ended without the watchdog's knowledge stays at its node.
        let facts = self.0.get(hold).unwrap_or(&RENEWED);
        Load {
            node: facts.node,
            script: &SCRIPTS[facts.script],
            renews: facts.renews,
            weight: facts.weight,
        }
    }
}

impl World {
    fn new() -> World {
        World {
            schedule: Schedule::new(Lease::WATCHDOG),
            begun: Instant::now(),
            now: 0,
            holds: BTreeMap::new(),
            places: BTreeMap::new(),
            in_flight: VecDeque::new(),
        }
    }

    fn now(&self) -> Instant {
        self.begun + Duration::from_millis(self.now)
    }

    fn millis(&self, at: Instant) -> u64 {
        u64::try_from((at - self.begun).as_millis()).unwrap()
    }

    fn unwatch(&mut self, hold: u32) -> Option<EntryNumber> {
        self.schedule.unwatch(self.places.entry(hold).or_default())
    }

    /// Watches a hold, or stops if it has ended.
    fn watch(&mut self, hold: u32) {
        match Holds(&self.holds, self.begun).watch(&hold) {
            Some(watch) => {
                let place = self.places.entry(hold).or_default();
                self.schedule.watch(place, &hold, watch);
            }
            None => _ = self.unwatch(hold),
        }
    }

    /// Has holds checked now.
    fn check(&mut self, holds: &[u32]) {
        for hold in holds {
            if let Some(facts) = self.holds.get_mut(hold) {
                facts.suspect = Some(self.now);
            }
            self.watch(*hold);
        }
    }

    fn happens(&mut self, event: Event) {
        let now = self.now();
        match event {
            Tick => {}
            Is(hold, facts) => {
                self.holds.insert(hold, facts);
                self.watch(hold);
            }
            Ended(hold) => _ = self.holds.remove(&hold),
            Unwatch(hold) => {
                self.holds.remove(&hold);
                self.unwatch(hold);
            }
            MovesTo(hold, node) => {
                if let Some(facts) = self.holds.get_mut(&hold) {
                    facts.node = node;
                }
            }
            Answer => {
                if let Some(batch) = self.in_flight.pop_front() {
                    self.schedule.batch_ended(&batch);
                    for (_, hold) in batch.holds {
                        let now = self.now;
                        self.holds.entry(hold).and_modify(|facts| facts.renew(now));
                        self.watch(hold);
                    }
                }
            }
            Sweep(node) => _ = self.schedule.plan_sweep(node, false, now),
            Report(hold) => {
                let checked = self.schedule.reported(now, |one| *one == hold);
                self.check(&checked);
            }
        }
    }

    /// Does what the schedule says, and returns that.
    fn begin(&mut self) -> String {
        let now = self.now();
        let swept = self
            .schedule
            .begin_sweeps(now, &Holds(&self.holds, self.begun));
        self.check(&swept);
        let work = self.schedule.begin(now, &Holds(&self.holds, self.begun));
        let mut text = String::new();
        for hold in work.register {
            write!(text, "register {hold} ").unwrap();
            self.schedule
                .registered(self.places[&hold], EntryNumber::new(hold));
            self.holds.get_mut(&hold).unwrap().registers_at = None;
        }
        for hold in work.release {
            write!(text, "release {hold} ").unwrap();
            self.holds.remove(&hold);
        }
        for hold in work.ended {
            let number = self.unwatch(hold);
            write!(text, "end {hold}{} ", number.map_or("", |_| " registered")).unwrap();
        }
        for batch in work.batches {
            for (_, hold) in &batch.holds {
                self.holds.get_mut(hold).unwrap().suspect = None;
            }
            let verb = if batch.renews { "renew" } else { "check" };
            let holds: Vec<String> = batch
                .holds
                .iter()
                .map(|(_, hold)| hold.to_string())
                .collect();
            write!(text, "{verb}@{} {} ", batch.node, holds.join(",")).unwrap();
            self.in_flight.push_back(batch);
        }
        text.trim_end().to_owned()
    }

    /// Returns when the watchdog wakes next.
    fn plan_wake(&mut self) -> Option<u64> {
        let (now, in_flight) = (self.now(), self.in_flight.len());
        let wake = self
            .schedule
            .plan_wake(now, in_flight, Duration::from_secs(10));
        wake.map(|at| self.millis(at))
    }

    /// Lets something happen at this time. Returns what the watchdog does, and when it wakes next.
    fn after(&mut self, now: u64, event: Event) -> (String, Option<u64>) {
        self.now = now;
        self.happens(event);
        (self.begin(), self.plan_wake())
    }

    fn size_of(&self, what: &str) -> usize {
        let sizes = self.schedule.sizes();
        sizes.iter().find(|(name, _)| *name == what).unwrap().1
    }
}

/// Checks what the watchdog does after each event, and when it wakes next.
#[track_caller]
fn assert_table(rows: impl IntoIterator<Item = (u64, Event, &'static str, u64)>) -> World {
    let mut world = World::new();
    for (row, (now, event, work, wakes_at)) in rows.into_iter().enumerate() {
        let done = world.after(now, event);
        assert_eq!(done, (work.to_owned(), Some(wakes_at)), "row {row}");
    }
    world
}

#[test]
fn hold_in_batch_is_due_at_its_end_and_then_renewed_again() {
    assert_table([
        (0, Is(1, RENEWED), "", 10_000),
        (8_999, Tick, "", 10_000),
        (9_000, Tick, "renew@0 1", 30_000),
        (9_001, Tick, "", 30_000),
        (9_500, Answer, "", 19_500),
        (19_500, Tick, "renew@0 1", 39_500),
        (39_500, Ended(1), "end 1", 40_500),
        (39_501, Answer, "", 49_501),
    ]);
}

#[test]
fn only_regular_renewals_are_early() {
    assert_table([
        (0, Is(1, RENEWED), "", 10_000),
        (0, Is(2, RENEWED.due(11_000)), "", 10_000),
        (0, Is(3, RENEWED.due(11_001)), "", 10_000),
        (0, Is(4, RENEWED.on_time(10_001)), "", 10_000),
        (0, Is(5, FIXED.due(10_002)), "", 10_000),
        (10_000, Tick, "renew@0 1,2", 10_001),
        (10_001, Tick, "renew@0 4,3", 10_002),
        (10_002, Ended(5), "end 5", 30_000),
    ]);
}

#[test]
fn batch_has_one_node_and_script_and_is_renewed_or_checked() {
    let script = 1;
    assert_table([
        (0, Is(1, RENEWED), "", 10_000),
        (0, Is(2, RENEWED.at(1)), "", 10_000),
        (0, Is(3, Facts { script, ..RENEWED }), "", 10_000),
        (0, Is(4, FIXED.on_time(10_000)), "", 10_000),
        (0, Is(5, RENEWED), "", 10_000),
        (
            10_000,
            Tick,
            "renew@0 1,5 renew@0 3 check@0 4 renew@1 2",
            LEASE,
        ),
    ]);
}

/// Returns the sizes of the batches that start now.
fn batches(weights: impl IntoIterator<Item = usize>) -> (World, Vec<usize>) {
    let mut world = World::new();
    for (hold, weight) in (1..).zip(weights) {
        world.happens(Is(hold, Facts { weight, ..RENEWED }));
    }
    world.after(10_000, Tick);
    let sizes = world.in_flight.iter().map(|batch| batch.holds.len());
    let sizes = sizes.collect();
    (world, sizes)
}

#[test]
fn batch_has_at_most_a_hundred_holds_and_weighs_at_most_a_thousand_unless_single() {
    for (weights, sizes) in [
        (vec![1; 201], vec![100, 100, 1]),
        (vec![600, 400], vec![2]),
        (vec![600, 401], vec![1, 1]),
        (vec![400, 400, 400], vec![2, 1]),
        (vec![1000, 1], vec![1, 1]),
        (vec![2000, 1], vec![1, 1]),
    ] {
        let watched = weights.len();
        let (world, actual) = batches(weights);
        assert_eq!((world.schedule.len(), actual), (watched, sizes));
    }
}

#[test]
fn at_most_eight_batches_are_in_flight_per_node() {
    let (mut world, sizes) = batches([1000; 10]);
    assert_eq!((sizes.len(), world.size_of("ready")), (8, 2));
    for (event, work) in [
        (Tick, ""),
        (Is(11, RENEWED.at(1)), "renew@1 11"),
        (Answer, "renew@0 9"),
        // It waits for a batch of its node.
        (Is(12, RENEWED), ""),
        (Answer, "renew@0 10"),
        (Answer, "renew@0 12"),
    ] {
        assert_eq!(world.after(10_000, event).0, work, "{event:?}");
    }
}

/// Also if it is released, or released and acquired again, before its batch starts.
#[test]
fn ready_hold_that_has_changed_is_left_out() {
    let again = Is(9, RENEWED.due(20_000));
    for (events, started, then, left) in [
        (vec![], "renew@0 9", "", 9),
        (vec![Unwatch(9)], "end 9", "", 8),
        (vec![Ended(9)], "end 9", "", 8),
        (vec![Unwatch(9), again], "renew@0 9", "", 9),
        (vec![MovesTo(9, 1)], "", "renew@1 9", 9),
    ] {
        let (mut world, _) = batches([1000; 9]);
        events.iter().for_each(|event| world.happens(*event));
        assert_eq!(world.after(10_000, Answer).0, started, "{events:?}");
        assert_eq!(world.size_of("ready"), 0);
        assert_eq!(
            (world.schedule.len(), world.size_of("entries")),
            (left, left)
        );
        assert_eq!(world.after(10_000, Tick).0, then, "{events:?}");
    }
}

#[test]
fn hold_acquired_again_is_renewed_after_its_batch_has_ended() {
    let world = assert_table([
        (0, Is(1, RENEWED), "", 10_000),
        (10_000, Tick, "renew@0 1", 30_000),
        // A batch in flight ends soon.
        (11_000, Unwatch(1), "", 12_000),
        (11_000, Is(1, RENEWED.due(12_000)), "", 30_000),
        (12_000, Tick, "", 30_000),
        (12_000, Answer, "", 22_000),
        (22_000, Tick, "renew@0 1", 42_000),
    ]);
    assert_eq!(world.size_of("entries"), 1);
}

#[test]
fn hold_is_registered_once_whatever_else_is_due() {
    let registers_at = Some(1_000);
    let young = Facts {
        registers_at,
        ..FIXED
    };
    assert_table([
        (0, Is(1, young), "", 1_000),
        (0, Is(2, young.on_time(500)), "", 500),
        (0, Is(3, young.on_time(1_000)), "", 500),
        (999, Tick, "check@0 2", 1_000),
        (1_000, Tick, "register 1 register 3 check@0 3", 30_000),
        // It was in a batch.
        (1_100, Answer, "register 2", 30_000),
        (30_000, Ended(1), "end 1 registered", 30_000),
    ]);
    let mut world = World::new();
    world.after(1_000, Is(1, young));
    assert_eq!(world.unwatch(1), EntryNumber::new(1));
    assert_eq!(world.unwatch(1), None);
}

#[test]
fn hold_lost_at_limit_is_released_once() {
    let action = Release;
    let lost = Is(
        9,
        Facts {
            action,
            ..RENEWED.due(15_000)
        },
    );
    assert_table([
        (0, Is(9, RENEWED), "", 10_000),
        (10_000, Tick, "renew@0 9", 30_000),
        (15_000, lost, "release 9 end 9", 16_000),
        (15_000, Answer, "", 25_000),
    ]);
    // In the same way if it is ready.
    let (mut world, _) = batches([1000; 9]);
    assert_eq!(world.after(15_000, lost).0, "release 9 end 9");
    assert_eq!(world.after(15_000, Answer).0, "");
    assert_eq!((world.schedule.len(), world.size_of("entries")), (8, 8));
}

#[test]
fn sweep_checks_all_holds_of_its_node_after_pause() {
    let [far, fixed] = [RENEWED, FIXED].map(|facts| facts.due(30_000));
    let world = assert_table([
        (0, Is(1, far), "", 30_000),
        (0, Is(2, fixed), "", 30_000),
        (0, Is(3, far.at(1)), "", 30_000),
        (1_000, Sweep(0), "renew@0 1 check@0 2", 30_000),
        (1_050, Sweep(0), "", 1_100),
        (1_051, Sweep(0), "", 1_100),
        (1_060, Answer, "", 1_100),
        // One with a renewal in flight is checked once that has ended.
        (1_100, Tick, "renew@0 1", 30_000),
        (1_101, Answer, "check@0 2", 30_000),
        (2_000, Sweep(0), "", 30_000),
        (2_001, Answer, "renew@0 1", 30_000),
    ]);
    assert_eq!(world.size_of("nodes"), 1, "the other node has no work");
}

/// It also wakes for a planned sweep while nothing is watched: a hold that was granted before is added soon.
#[test]
fn planned_sweep_is_not_forgotten_while_nothing_is_watched() {
    let fixed = FIXED.due(30_000);
    assert_table([
        (0, Is(1, fixed), "", 30_000),
        (1, Sweep(0), "check@0 1", 30_000),
        (2, Sweep(0), "", 101),
        (60, Unwatch(1), "", 101),
        (70, Answer, "", 101),
        (101, Tick, "", 10_101),
    ]);
}

#[test]
fn pauses_between_sweeps_in_a_row_grow() {
    let mut world = World::new();
    world.happens(Is(1, FIXED.due(100_000)));
    let mut sweeps = |from: u64, end: u64| {
        let begun = (from..end).filter(|now| {
            world.now = *now;
            world.happens(Answer);
            world.happens(Sweep(0));
            !world.begin().is_empty()
        });
        begun.collect::<Vec<u64>>()
    };
    let growing = [0, 100, 300, 700, 1_500, 3_100, 6_300, 11_300, 16_300];
    assert_eq!(sweeps(0, 20_000), growing);
    // Some time without a sweep.
    assert_eq!(sweeps(26_300, 26_800), [26_300, 26_400, 26_600]);
}

#[test]
fn node_is_remembered_while_it_has_work_or_was_swept() {
    let now = Instant::now();
    for (batches, ready, next_sweep, last_sweep, is_used) in [
        (0, 0, None, None, [false, false]),
        (1, 0, None, None, [true, true]),
        (0, 1, None, None, [true, true]),
        (0, 0, Some(now), None, [true, true]),
        (0, 0, None, Some(now), [true, false]),
    ] {
        let queue = NodeQueue {
            ready: (0..ready).collect(),
            batches,
            last_sweep,
            earlier_sweeps: 0,
            next_sweep,
        };
        let times = [now, now + SWEEPS_REMEMBERED_FOR];
        assert_eq!(times.map(|now| queue.is_used(now)), is_used);
    }
    let mut world = World::new();
    world.after(0, Sweep(0));
    assert_eq!(world.size_of("nodes"), 0, "there is nothing to sweep");
}

#[test]
fn reports_are_ignored_for_a_third_of_lease_per_hold() {
    assert_table([
        (0, Is(1, RENEWED.due(30_000)), "", 30_000),
        (0, Is(2, RENEWED.due(30_000)), "", 30_000),
        (0, Report(3), "", 30_000),
        (0, Report(1), "renew@0 1", 30_000),
        (1, Report(2), "renew@0 2", 30_000),
        (5_000, Answer, "", 15_000),
        (9_999, Report(1), "", 15_000),
        (10_000, Report(1), "renew@0 1", 30_000),
        // One during a renewal has the hold renewed once more.
        (10_001, Report(2), "", 30_000),
        (10_001, Answer, "renew@0 2", 35_000),
        // The next period starts anew.
        (10_002, Unwatch(1), "", 40_001),
        (10_003, Is(1, RENEWED.due(30_000)), "", 30_000),
        (10_004, Answer, "", 20_004),
        (10_005, Report(1), "renew@0 1", 40_001),
    ]);
}

/// Otherwise short holds in sequence would each start and end a task.
#[test]
fn idle_watchdog_ends_after_a_while() {
    let mut world = World::new();
    world.schedule.started(world.now());
    for (now, event, wakes_at) in [
        (0, Tick, Some(10_000)),
        (5_000, Is(1, RENEWED.due(20_000)), Some(20_000)),
        (5_000, Unwatch(1), Some(15_000)),
        (6_000, Is(1, RENEWED), Some(10_000)),
        (10_000, Tick, Some(30_000)),
        // A batch in flight ends soon.
        (11_000, Unwatch(1), Some(12_000)),
        (12_000, Answer, Some(22_000)),
        (22_000, Tick, None),
    ] {
        assert_eq!(world.after(now, event).1, wakes_at, "{event:?}");
    }
}

#[test]
fn watchdog_is_woken_for_what_is_due_earlier() {
    let mut world = World::new();
    world.schedule.started(world.now());
    assert!(!world.schedule.wakes_too_late(), "nothing is due");
    world.happens(Is(1, RENEWED));
    assert!(!world.schedule.wakes_too_late(), "it looks at once");
    assert_eq!(world.plan_wake(), Some(10_000));
    assert!(!world.schedule.wakes_too_late());
    world.happens(Is(2, RENEWED.due(9_999)));
    assert!(world.schedule.wakes_too_late());
    let start = world.now();
    assert!(world.schedule.plan_sweep(0, false, start));
    assert_eq!(world.after(0, Tick).0, "renew@0 2,1");
    assert!(world.schedule.plan_sweep(0, false, start));
    assert_eq!(world.plan_wake(), Some(100));
    assert!(
        !world.schedule.plan_sweep(0, false, start),
        "the earlier one counts"
    );
    assert_eq!(world.plan_wake(), Some(100));
    assert!(
        world.schedule.plan_sweep(0, true, start),
        "another server answers"
    );
    assert_eq!(world.plan_wake(), Some(0));
}

/// A hold. There are enough to have more batches than may be in flight.
fn holds() -> impl Strategy<Value = u32> {
    1..30u32
}

/// What happens next, and after how many milliseconds.
fn events() -> impl Strategy<Value = (u64, Event)> {
    let action = prop_oneof![4 => Just(Renew), 2 => Just(RenewOnTime), 2 => Just(Expire), 1 => Just(Release)];
    let times = (
        0..20_000u64,
        0..20_000u64,
        proptest::option::of(0..5_000u64),
    );
    let shape = (
        0..2u8,
        0..2usize,
        any::<bool>(),
        prop_oneof![1 => Just(1), 3 => Just(1000usize)],
    );
    let facts =
        (action, times, shape).prop_map(|(action, times, (node, script, renews, weight))| {
            // Until they are watched, the times count from then.
            let (due, after, registers_at) = times;
            let end = due + after;
            Facts {
                due,
                action,
                end,
                registers_at,
                node,
                script,
                renews,
                weight,
                suspect: None,
            }
        });
    let event = prop_oneof![
        6 => (holds(), facts).prop_map(|(hold, facts)| Is(hold, facts)),
        1 => holds().prop_map(Ended),
        1 => holds().prop_map(Unwatch),
        1 => (holds(), 0..2u8).prop_map(|(hold, node)| MovesTo(hold, node)),
        3 => Just(Answer),
        1 => (0..2u8).prop_map(Sweep),
        1 => holds().prop_map(Report),
        2 => Just(Tick),
    ];
    (prop_oneof![Just(0), 0..3_000u64], event)
}

impl World {
    fn assert_invariants(&mut self) {
        let schedule = &self.schedule;
        let mut renewing: Vec<ScheduleSlot> = Vec::new();
        for (node, queue) in &schedule.nodes {
            let batches = self.in_flight.iter().filter(|batch| batch.node == *node);
            assert_eq!(queue.batches, batches.count());
            assert!(queue.batches <= MAX_BATCHES_IN_FLIGHT);
            assert!(queue.ready.is_empty() || queue.batches == MAX_BATCHES_IN_FLIGHT);
            renewing.extend(&queue.ready);
        }
        let in_flight = self.in_flight.iter().flat_map(|batch| &batch.holds);
        renewing.extend(in_flight.map(|(place, _)| *place));
        renewing.sort_unstable();
        assert!(
            renewing.is_sorted_by(|one, next| one < next),
            "a hold is in two: {renewing:?}"
        );
        let entries = schedule.entries.places.iter().enumerate();
        let entries = entries.filter_map(|(place, entry)| Some((place, entry.as_ref()?)));
        let marked = entries.clone().filter(|(_, entry)| entry.renewing);
        let marked: Vec<ScheduleSlot> = marked.map(|(place, _)| place).collect();
        assert_eq!(marked, renewing);
        // Each hold that has not ended is watched.
        let look = Holds(&self.holds, self.begun);
        for hold in self.holds.keys() {
            let place = self.places[hold].expect("a place");
            let entry = schedule.entries.get(place).expect("an entry");
            let watch = look.watch(hold).unwrap();
            assert!(
                entry.hold == *hold && entry.due.is_some(),
                "{hold} is not watched"
            );
            let is_due = matches!(watch.action, Renew | RenewOnTime) && watch.due <= self.now();
            assert!(entry.renewing || !is_due, "{hold} is not renewed");
            assert!(
                entry.due <= Some((watch.end, u64::MAX)),
                "the end of {hold} would be missed"
            );
        }
        assert!(
            entries
                .clone()
                .all(|(_, entry)| entry.due.is_some() || entry.renewing)
        );
        assert_eq!(
            entries.clone().count(),
            schedule.entries.places.len() - schedule.entries.free.len()
        );
        let due = entries.filter_map(|(place, entry)| Some((entry.due?, place)));
        let due: BTreeMap<_, _> = due.collect();
        assert_eq!(due, schedule.due);
        let sweeps = schedule.nodes.values().filter_map(|queue| queue.next_sweep);
        let first = due.keys().map(|(at, _)| *at).chain(sweeps).min();
        let first = first.map(|at| self.millis(at));
        let wakes_at = self.plan_wake();
        assert!(first.is_none_or(|first| wakes_at <= Some(first) && wakes_at.is_some()));
    }
}

#[test]
fn invariants_hold_in_random_histories() {
    let histories = prop::collection::vec(events(), 1..150);
    check_random(300, histories, |history| {
        let mut world = World::new();
        for (pause, event) in history {
            world.now += pause;
            let event = match event {
                Is(hold, mut facts) => {
                    facts.due += world.now;
                    facts.end += world.now;
                    facts.registers_at = facts.registers_at.map(|at| at + world.now);
                    Is(hold, facts)
                }
                event => event,
            };
            world.happens(event);
            // Twice: a hold that was ready and has moved is ready again then.
            (0..2).for_each(|_| _ = world.begin());
            world.assert_invariants();
        }
        (1..30).for_each(|hold| world.happens(Unwatch(hold)));
        while !world.in_flight.is_empty() {
            world.happens(Answer);
            world.begin();
            world.assert_invariants();
        }
        // A sweep may still be planned, and is then remembered.
        for _ in 0..2 {
            world.now += u64::try_from(SWEEPS_REMEMBERED_FOR.as_millis()).unwrap();
            world.begin();
        }
        assert!(world.schedule.sizes().iter().all(|(_, size)| *size == 0));
    });
}
