//! The watchdog on a stopped clock, with holds that the store keeps for as long as the test says so.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::*;
use crate::error::Result;
use crate::hold::{AcquireParams, HoldKind, HoldLimits, Holder, ReleaseParams, Spec};
use crate::metrics::Kind;
use crate::name::{KeyLayout, ObjectKeys};
use crate::owner::ClientId;
use crate::step::differential;
use crate::step::{Outcome, Step};
use crate::store::embedded::Embedded;
use crate::test_prelude::SECOND;
use crate::wait::ChannelMap;

/// A kind that records when a step for its hold was run.
struct RecordingKind {
    object: Arc<ObjectKeys>,
    begun: Instant,
    weight: usize,
    missing: AtomicBool,
    /// After how many seconds a step ran, and whether it renewed the hold.
    steps: Mutex<Vec<(u64, bool)>>,
}

impl HoldKind for Arc<RecordingKind> {
    fn spec(&self) -> Spec {
        Spec::of(Kind::Lock)
    }

    fn acquire<'a>(&'a self, _: AcquireParams<'a>) -> Step<'a, Outcome> {
        unreachable!("the watchdog acquires nothing")
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        unreachable!("the watchdog lists nothing")
    }

    fn force(&self) -> Step<'_, bool> {
        unreachable!("the watchdog releases nothing")
    }

    fn object(&self) -> &Arc<ObjectKeys> {
        &self.object
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        static SCRIPT: Script = Script::new("");
        Renewal {
            script: &SCRIPT,
            key: hold.object.key(),
            args: SmallVec::new(),
            weight: self.weight,
        }
    }

    fn renew(&self, keyspace: &mut Keyspace, _: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        let after = (keyspace.now - self.begun).as_secs();
        self.steps.lock().push((after, lease.is_some()));
        Ok(Renewed::from(!self.missing.load(Ordering::SeqCst)))
    }

    fn release<'a>(&'a self, _: ReleaseParams<'a>) -> Step<'a, bool> {
        unreachable!("the watchdog releases nothing")
    }
}

/// A hold and its kind.
struct Watched {
    hold: Arc<Hold>,
    kind: Arc<RecordingKind>,
}

impl Watched {
    fn new(weight: usize, lease: Duration, renewed: bool) -> Watched {
        let kind = Arc::new(RecordingKind {
            object: ObjectKeys::new(KeyLayout::Lock, "", "name").into(),
            begun: Instant::now(),
            weight,
            missing: AtomicBool::new(false),
            steps: Mutex::default(),
        });
        let hold = Arc::new(differential::hold(1, kind.clone()));
        hold.add_guard(Instant::now() + lease, renewed, None)
            .unwrap();
        Watched { hold, kind }
    }

    /// A hold with the watchdog's lease.
    fn renewed() -> Watched {
        Watched::new(1, 30 * SECOND, true)
    }

    fn fixed(lease: Duration) -> Watched {
        Watched::new(1, lease, false)
    }

    fn mark_missing(&self) {
        self.kind.missing.store(true, Ordering::SeqCst);
    }

    /// Returns when steps for the hold were run since the last call, and whether they renewed it.
    fn steps(&self) -> Vec<(u64, bool)> {
        std::mem::take(&mut self.kind.steps.lock())
    }
}

fn watchdog() -> Watchdog {
    let subscriber = Arc::new(ChannelMap::default());
    let store = Arc::new(Store::Embedded(Embedded::new().connect(subscriber)));
    let (id, background) = (ClientId::random(), Background::default());
    let registration = Registration::new(
        &id,
        None,
        Lease::WATCHDOG,
        &store,
        background.clone(),
        false,
    );
    Watchdog::new(
        Lease::WATCHDOG,
        store,
        background,
        Metrics::default(),
        registration,
    )
}

async fn sleep(time: Duration) {
    tokio::time::sleep(time).await;
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().unwrap()
}

fn tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}

#[tokio::test(start_paused = true)]
async fn hold_is_renewed_after_each_third_of_its_lease() {
    let (watchdog, one) = (watchdog(), Watched::renewed());
    watchdog.watch(&one.hold);
    sleep(35 * SECOND).await;
    assert_eq!(one.steps(), [(10, true), (20, true), (30, true)]);
    assert!(one.hold.valid_for() > 24 * SECOND);
    watchdog.unwatch(&one.hold);
    assert_eq!(watchdog.len(), 0);
    sleep(35 * SECOND).await;
    assert_eq!(one.steps(), []);
    assert_eq!(one.hold.loss(), Some(Loss::LeaseEnded));
}

fn at_most(limit: Duration) -> HoldLimits {
    HoldLimits {
        at_most: Some(limit),
        fed_every: None,
    }
}

fn limited(limit: Duration) -> Watched {
    let one = Watched::renewed();
    one.hold.start_limits(&at_most(limit));
    one
}

/// Records which holds are released, and after how many seconds.
fn record_releases(watchdog: &Watchdog) -> Arc<Mutex<Vec<(u64, Loss)>>> {
    let released = Arc::new(Mutex::new(Vec::new()));
    let (recorded, begun) = (released.clone(), Instant::now());
    watchdog.release_overdue_with(move |hold| {
        let after = begun.elapsed().as_secs();
        recorded.lock().push((after, hold.loss().unwrap()));
    });
    released
}

/// Whether the watchdog notices the loss itself, or its holder does. The loss comes before the release.
#[tokio::test(start_paused = true)]
async fn hold_is_released_once_at_limit_and_not_renewed_any_more() {
    for is_noticed_by_holder in [false, true] {
        let (watchdog, limit) = (watchdog(), 25 * SECOND);
        let released = record_releases(&watchdog);
        let (one, unlimited) = (limited(limit), Watched::renewed());
        watchdog.watch(&one.hold);
        watchdog.watch(&unlimited.hold);
        if is_noticed_by_holder {
            sleep(24 * SECOND).await;
            tokio::time::advance(SECOND).await;
            assert!(one.hold.valid_for().is_zero());
            watchdog.watch(&one.hold);
        }
        one.hold.lost().await;
        sleep(35 * SECOND).await;
        assert_eq!(one.steps(), [(10, true), (20, true)]);
        assert_eq!(*released.lock(), [(25, Loss::HeldTooLong { limit })]);
        assert!(watchdog.len() == 1 && unlimited.hold.valid_for() >= 19 * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn released_hold_is_not_released_at_limit() {
    let watchdog = watchdog();
    let released = record_releases(&watchdog);
    let [one, other] = [limited(SECOND), limited(SECOND)];
    watchdog.watch(&one.hold);
    watchdog.watch(&other.hold);
    one.hold.state().remove_guard(true);
    watchdog.unwatch(&one.hold);
    // A release of its guard begins before the watchdog looks at it.
    other.hold.mark_lost(Loss::HeldTooLong { limit: SECOND });
    other.hold.state().begin_release(0);
    sleep(60 * SECOND).await;
    assert_eq!((watchdog.len(), released.lock().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn fixed_lease_ends_on_time_without_request() {
    let (watchdog, one, other) = (watchdog(), Watched::renewed(), Watched::fixed(25 * SECOND));
    watchdog.watch(&one.hold);
    watchdog.watch(&other.hold);
    assert_eq!(watchdog.len(), 2);
    let begun = Instant::now();
    other.hold.lost().await;
    assert_eq!(begun.elapsed(), 25 * SECOND);
    sleep(SECOND).await;
    assert_eq!((watchdog.len(), other.steps()), (1, vec![]));
}

#[tokio::test(start_paused = true)]
async fn earlier_due_hold_wakes_task() {
    let watchdog = watchdog();
    let (one, other) = (Watched::renewed(), Watched::new(1, 24 * SECOND, true));
    watchdog.watch(&one.hold);
    sleep(SECOND).await;
    watchdog.watch(&other.hold);
    sleep(4 * SECOND).await;
    assert_eq!((one.steps(), other.steps()), (vec![], vec![(4, true)]));
}

#[tokio::test(start_paused = true)]
async fn one_task_watches_all_holds_and_ends_after_idle_third() {
    let watchdog = watchdog();
    let holds = [(); 3].map(|()| Watched::renewed());
    for one in &holds {
        watchdog.watch(&one.hold);
        sleep(SECOND).await;
    }
    assert_eq!(tasks(), 1);
    for one in &holds {
        watchdog.unwatch(&one.hold);
    }
    // The task wakes once at the time that it knew of.
    sleep(15 * SECOND).await;
    assert_eq!(tasks(), 1);
    sleep(5 * SECOND).await;
    assert_eq!(tasks(), 0);
    let later = Watched::renewed();
    watchdog.watch(&later.hold);
    sleep(11 * SECOND).await;
    assert_eq!(later.steps(), [(10, true)]);
    drop(watchdog);
    tokio::task::yield_now().await;
    assert_eq!(tasks(), 0);
}

/// The holds of a node are lost together: all are checked as soon as one is missing, and then after growing pauses.
#[tokio::test(start_paused = true)]
async fn missing_hold_triggers_check_without_renewing_fixed_leases() {
    let watchdog = watchdog();
    let (one, other, fixed) = (
        Watched::renewed(),
        Watched::new(1, 38 * SECOND, true),
        Watched::fixed(100 * SECOND),
    );
    let holds = [&one, &other, &fixed];
    for watched in holds {
        watchdog.watch(&watched.hold);
    }
    one.mark_missing();
    sleep(12 * SECOND).await;
    assert_eq!(one.hold.loss(), Some(Loss::NotHeld));
    assert_eq!(other.steps(), [(10, true)]);
    assert_eq!(fixed.steps(), [(10, false)]);
    assert!(fixed.hold.valid_for() < 90 * SECOND);
    // It is immediate now, and after a pause the second time.
    for _ in 0..3 {
        watchdog.report_missing(&one.hold);
        sleep(SECOND / 1000).await;
    }
    assert_eq!((other.steps().len(), fixed.steps().len()), (1, 1));
    fixed.mark_missing();
    sleep(SECOND).await;
    assert_eq!(fixed.hold.loss(), Some(Loss::NotHeld));
    // Once more because of this loss.
    assert_eq!(other.steps().len(), 2);
}

/// The first report has the hold renewed at once, or checked if its lease is fixed. Those after it have no effect for a third of
/// a lease.
#[tokio::test(start_paused = true)]
async fn reported_change_is_checked_once_per_third_of_lease() {
    for renewed in [true, false] {
        let (watchdog, one) = (watchdog(), Watched::new(1, 300 * SECOND, renewed));
        watchdog.watch(&one.hold);
        let report = |key: &str| {
            watchdog.core.check_changed(&[key.into()].into());
            watchdog.core.wake_sooner.notify_one();
        };
        // Before the last report, a renewal is due anyway.
        let last = 1 + usize::from(renewed);
        for (after, expected) in [(0, 1), (1, 0), (7, 0), (3, last)] {
            sleep(after * SECOND).await;
            report("name");
            report("other");
            sleep(SECOND / 10).await;
            let steps = one.steps();
            assert_eq!(steps.len(), expected, "{after} {steps:?}");
            assert!(steps.iter().all(|(_, renews)| *renews == renewed));
        }
        one.mark_missing();
        sleep(11 * SECOND).await;
        report("name");
        sleep(SECOND / 10).await;
        assert_eq!(one.hold.loss(), Some(Loss::NotHeld));
    }
}

#[tokio::test(start_paused = true)]
async fn hold_with_step_in_progress_is_skipped_for_a_second() {
    let (watchdog, one) = (watchdog(), Watched::renewed());
    watchdog.watch(&one.hold);
    let turn = one.hold.turn().await.unwrap();
    sleep(Duration::from_millis(12_500)).await;
    assert_eq!(one.steps(), []);
    drop(turn);
    sleep(2 * SECOND).await;
    assert_eq!(one.steps(), [(13, true)]);
    sleep(5 * SECOND).await;
    assert_eq!(one.steps(), [], "renewed as usual from then on");
}

fn schedule(watchdog: &Watchdog, holds: &[Watched]) {
    for one in holds {
        let core = &watchdog.core;
        core.watch(&mut core.state.lock().schedule, &one.hold, Instant::now());
    }
}

fn batches(watchdog: &Watchdog) -> Vec<InFlight> {
    watchdog.core.begin(&watchdog.store).0
}

#[tokio::test(start_paused = true)]
async fn hold_changed_after_batching_is_not_renewed() {
    let watchdog = watchdog();
    let holds = [(); 4].map(|()| Watched::renewed());
    schedule(&watchdog, &holds);
    tokio::time::advance(10 * SECOND).await;
    let mut batches = batches(&watchdog);
    let [released, lost, fixed, held] = &holds;
    released.hold.state().remove_guard(true);
    lost.hold.mark_lost(Loss::NotHeld);
    fixed
        .hold
        .add_guard(Instant::now() + SECOND, false, None)
        .unwrap();
    fixed.hold.state().remove_guard(true);
    renew(watchdog.store.clone(), batches.pop().unwrap()).await;
    assert!(batches.is_empty());
    for one in [released, lost, fixed] {
        assert_eq!(one.steps(), []);
    }
    assert_eq!(held.steps(), [(10, true)]);
    // Holds that still exist return to the queue of their node.
    assert_eq!(watchdog.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn hold_ended_after_batching_is_not_checked() {
    let watchdog = watchdog();
    let holds = [(); 3].map(|()| Watched::fixed(100 * SECOND));
    for one in &holds {
        one.hold.watchdog_state(|state| state.suspect = true);
    }
    schedule(&watchdog, &holds);
    let mut batches = batches(&watchdog);
    let [released, lost, held] = &holds;
    released.hold.state().remove_guard(false);
    lost.hold.mark_lost(Loss::NotHeld);
    renew(watchdog.store.clone(), batches.pop().unwrap()).await;
    assert_eq!((released.steps(), lost.steps()), (vec![], vec![]));
    assert_eq!(held.steps(), [(0, false)]);
}

/// The runtime of the batch ends, and the answer is never read.
#[tokio::test(start_paused = true)]
async fn check_without_answer_is_repeated() {
    let (watchdog, one) = (watchdog(), Watched::fixed(100 * SECOND));
    one.hold.watchdog_state(WatchdogState::suspect);
    schedule(&watchdog, std::slice::from_ref(&one));
    let in_flight = batches(&watchdog);
    assert!(
        one.hold.state().needs_check(),
        "it does not pass on meanwhile"
    );
    drop(in_flight);
    let mut repeated = batches(&watchdog);
    renew(watchdog.store.clone(), repeated.pop().unwrap()).await;
    assert_eq!(
        (one.steps(), batches(&watchdog).len()),
        (vec![(0, false)], 0)
    );
}

/// The batch that would renew it ends later.
#[tokio::test(start_paused = true)]
async fn limit_of_hold_with_renewal_in_flight_is_noticed_once() {
    let watchdog = watchdog();
    let one = Watched::new(1, 20 * SECOND, true);
    one.hold.start_limits(&at_most(SECOND));
    one.hold.watchdog_state(|state| state.suspect = true);
    schedule(&watchdog, std::slice::from_ref(&one));
    let mut in_flight = batches(&watchdog);
    tokio::time::advance(SECOND).await;
    let (batches, overdue) = watchdog.core.begin(&watchdog.store);
    assert_eq!((batches.len(), overdue.len()), (0, 1));
    renew(watchdog.store.clone(), in_flight.remove(0)).await;
    let (batches, overdue) = watchdog.core.begin(&watchdog.store);
    assert_eq!((batches.len(), overdue.len()), (0, 0));
    assert_eq!((one.steps(), watchdog.len()), (vec![], 0));
}

/// The release of its guard waits behind the renewal, and the owner acquires the object again before
/// the other holds of the batch have been answered.
#[tokio::test(start_paused = true)]
async fn hold_acquired_again_is_not_in_two_batches() {
    let (watchdog, one) = (watchdog(), Watched::renewed());
    one.hold.watchdog_state(|state| state.suspect = true);
    schedule(&watchdog, std::slice::from_ref(&one));
    let in_flight = batches(&watchdog);
    one.hold.state().remove_guard(true);
    watchdog.unwatch(&one.hold);
    let end = Instant::now() + 30 * SECOND;
    one.hold.add_guard(end, true, None).unwrap();
    watchdog.suspect(&one.hold);
    assert_eq!((batches(&watchdog).len(), watchdog.len()), (0, 1));
    drop(in_flight);
    assert_eq!((batches(&watchdog).len(), watchdog.len()), (1, 1));
}

/// Another runtime was used after the one that continues, and ends before or after that of the watchdog.
#[test]
fn watchdog_continues_in_a_living_runtime() {
    for ends_before in [true, false] {
        let [first, second, other] = [(); 3].map(|()| runtime());
        let watchdog = watchdog();
        let (watchdog, one) = first.block_on(async {
            let one = Watched::renewed();
            watchdog.watch(&one.hold);
            tokio::task::yield_now().await;
            (watchdog, one)
        });
        for runtime in [&second, &other] {
            let background = &watchdog.core.background;
            let remembered = runtime.block_on(async { background.remember_runtime() });
            remembered.unwrap();
        }
        let in_order = match ends_before {
            true => [other, first],
            false => [first, other],
        };
        in_order.into_iter().for_each(drop);
        second.block_on(async {
            sleep(15 * SECOND).await;
            // One of the watchdog, and one of the client in each runtime.
            assert_eq!((one.steps().len(), tasks()), (1, 2), "{ends_before}");
            // It has nothing to continue for once it has ended by itself.
            watchdog.unwatch(&one.hold);
            sleep(40 * SECOND).await;
            assert_eq!(tasks(), 1);
        });
    }
}

/// The task of another runtime had begun it, and the next one waits already for the end of the lease.
#[tokio::test(start_paused = true)]
async fn batch_that_outlives_its_task_wakes_the_next_one() {
    let (watchdog, one) = (watchdog(), Watched::renewed());
    schedule(&watchdog, std::slice::from_ref(&one));
    tokio::time::advance(15 * SECOND).await;
    let in_flight = batches(&watchdog);
    assert_eq!(in_flight.len(), 1);
    let core = &watchdog.core;
    core.start_task(&mut core.state.lock(), None);
    tokio::task::yield_now().await;
    drop(in_flight);
    sleep(SECOND).await;
    assert_eq!(one.steps().len(), 1);
}

#[test]
fn reply_for_wrong_number_of_holds_is_refused() {
    let (one, other) = (Watched::renewed(), Watched::renewed());
    let step = renew_holds(
        one.hold.kind.renewal(&one.hold).script,
        None,
        &[&one.hold, &other.hold],
    );
    let reply = |answers: &[i64]| {
        let answers = answers.iter().copied().map(ScriptReply::Integer);
        step.decode(ScriptReply::List(answers.collect()))
    };
    assert_eq!(reply(&[1, 0]).unwrap(), [Renewed::Held, Renewed::NotHeld]);
    let millis = |left| Renewed::Asked {
        limit: Some(Duration::from_millis(left)),
    };
    assert_eq!(reply(&[2, 3]).unwrap(), [millis(0), millis(1)]);
    let no_limit = Renewed::Asked { limit: None };
    assert_eq!(reply(&[-1, 1]).unwrap(), [no_limit, Renewed::Held]);
    assert!(reply(&[1]).is_err() && reply(&[1, 1, 1]).is_err());
    assert!(step.decode(ScriptReply::Nil).is_err());
}

#[test]
fn idle_watchdog_ends_with_its_runtime() {
    let (first, second) = (runtime(), runtime());
    let watchdog = watchdog();
    first.block_on(async {
        let one = Watched::renewed();
        watchdog.watch(&one.hold);
        tokio::task::yield_now().await;
        watchdog.unwatch(&one.hold);
    });
    let bound = second.block_on(async { watchdog.core.background.remember_runtime() });
    bound.unwrap();
    drop(first);
    // That of the client.
    assert_eq!(second.block_on(async { tasks() }), 1);
}
