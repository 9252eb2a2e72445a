//! Jobs that run at most once for each slot: [`redlatch::Client::once`].

use std::collections::BTreeMap;
use std::time::SystemTime;

use redlatch::Slot;

use crate::common::prelude::*;

on_every_store! {
    slot_has_one_run,
    one_of_many_clients_runs_each_slot,
    runs_of_slots_with_a_length_follow_clock_of_store,
    dropped_run_is_not_repeated,
    unfinished_run_is_retried_by_next_holder_of_lock,
    released_lock_retries_nothing,
    names_and_slots_are_independent,
}

async fn slot_has_one_run(store: TestStore) {
    let labeled = Client::builder().label("backup");
    let (first, second) = (store.client_with(labeled).await, store.client().await);
    let name = unique("once");
    let [mine, other] = [&first, &second].map(|client| client.once(&name, "02:00"));
    assert_eq!(other.earlier_run().await.unwrap(), None);
    let before = SystemTime::now();
    let run = mine.begin().await.unwrap().expect("the first run");
    let earlier = other.begin().await.unwrap().unwrap_err();
    assert_eq!((earlier.outcome.as_deref(), earlier.took), (None, None));
    assert!(earlier.by.starts_with("backup@"), "{earlier:?}");
    let pid = format!("(pid {})", std::process::id());
    assert!(earlier.by.contains(&pid), "{earlier:?}");
    assert!(!earlier.host.is_empty());
    // The server is on this machine, and rounds to milliseconds.
    let tolerance = Duration::from_millis(5);
    assert!(earlier.at >= before - tolerance && earlier.at <= SystemTime::now() + tolerance);
    assert!(run.finish("exit code 3").await.unwrap());
    for once in [&mine, &other] {
        let earlier = once.begin().await.unwrap().unwrap_err();
        assert_eq!(earlier.outcome.as_deref(), Some("exit code 3"));
        assert!(earlier.took.is_some());
        let looked = once.earlier_run().await.unwrap().expect("a run");
        assert_eq!(looked.outcome, earlier.outcome);
    }
    // The next slot.
    let next = first.once(&name, "03:00");
    assert_eq!(next.run(async { 42 }).await.unwrap(), Ok(42));
    let earlier = second.once(&name, "03:00").run(async {}).await.unwrap();
    assert_eq!(earlier.unwrap_err().outcome.as_deref(), Some("finished"));
}

/// As many slots as clients of a fleet would ask for within days. Each client asks at another time, and the work is
/// shorter than the differences between them.
async fn one_of_many_clients_runs_each_slot(store: TestStore) {
    let (clients, slots) = (20, 100);
    let (name, runs) = (unique("fleet"), Arc::new(Mutex::new(BTreeMap::new())));
    let mut fleet = Vec::new();
    for machine in 0..clients {
        let (client, name, runs) = (store.client().await, name.clone(), runs.clone());
        fleet.push(tokio::spawn(async move {
            for slot in 0..slots {
                let work = async {
                    *runs.lock().unwrap().entry(slot).or_insert(0) += 1;
                    if slot % 10 == machine % 10 {
                        sleep(Duration::from_millis(10)).await;
                    }
                };
                let once = client.once(&name, slot.to_string());
                let _ = once.run(work).await.unwrap();
            }
        }));
    }
    done_all("the end of all slots", fleet).await;
    let runs = Arc::into_inner(runs).unwrap().into_inner().unwrap();
    assert_eq!(runs, (0..slots).map(|slot| (slot, 1)).collect());
}

/// Each slot lasts 50 ms, and begins 20 ms later than without an offset. The clients ask as often as they can, until ten slots were used, and the store says when each run
/// began.
async fn runs_of_slots_with_a_length_follow_clock_of_store(store: TestStore) {
    let (name, length) = (unique("length"), Duration::from_millis(50));
    let offset = Duration::from_millis(20);
    let begun = Arc::new(Mutex::new(Vec::new()));
    let mut fleet = Vec::new();
    for _ in 0..4 {
        let (client, begun, name) = (store.client().await, begun.clone(), name.clone());
        fleet.push(tokio::spawn(async move {
            let once = client.once(&name, Slot::per(length).offset(offset));
            while begun.lock().unwrap().len() < 10 {
                if let Ok(run) = once.begin().await.unwrap() {
                    let record = once.earlier_run().await.unwrap();
                    // Otherwise the record is that of a later run.
                    if run.finish("done").await.unwrap()
                        && let Some(record) = record
                    {
                        begun.lock().unwrap().push(record.at);
                    }
                }
            }
        }));
    }
    done_all("the end of the slots", fleet).await;
    let begun = Arc::into_inner(begun).unwrap().into_inner().unwrap();
    assert!(begun.len() >= 2, "{begun:?}");
    if matches!(store, TestStore::Embedded(_)) {
        // Its slots do not begin at multiples of their length since 1970.
        return;
    }
    let slot = |at: &SystemTime| {
        let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        (since - offset).as_millis() / length.as_millis()
    };
    let mut slots: Vec<_> = begun.iter().map(slot).collect();
    let all = slots.len();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), all, "two runs in one slot: {begun:?}");
}

/// The work may have been done partly.
async fn dropped_run_is_not_repeated(store: TestStore) {
    let client = store.client().await;
    let once = client.once(&unique("dropped"), Slot::per(HOUR * 24 * 3650));
    drop(once.begin().await.unwrap().expect("the first run"));
    client.flush().await;
    let earlier = once.begin().await.unwrap().unwrap_err();
    assert_eq!(earlier.outcome.as_deref(), Some("dropped"));
}

/// The runner is killed: it records nothing, and its lock expires.
async fn unfinished_run_is_retried_by_next_holder_of_lock(store: TestStore) {
    let name = unique("retry");
    let (client, other) = (store.client().await, store.client().await);
    let killed = async || {
        let guard = client.lock(&name).lock().lease(SHORT).await.unwrap();
        let once = client.once(&name, "02:00").retry_unfinished(2, &guard);
        let run = once.begin().await.unwrap().expect("another run");
        std::mem::forget(guard);
        run
    };
    let late = killed().await;
    assert_eq!(late.attempt(), 1);
    // Without a retry, and with a lock that has expired.
    assert!(client.once(&name, "02:00").begin().await.unwrap().is_err());
    let guard = other.lock(&name).lock().await.unwrap();
    let expired = client.lock(&unique("expired")).lock().lease(SHORT).await;
    let expired = expired.unwrap();
    expired.lost().await;
    let once = other.once(&name, "02:00");
    let refused = once.clone().retry_unfinished(9, &expired).begin().await;
    assert_eq!(refused.unwrap().unwrap_err().attempt, 1);
    let unused = other.once(&name, "03:00");
    let refused = unused.clone().retry_unfinished(9, &expired).begin().await;
    assert!(matches!(refused, Err(Error::Lost { .. })), "{refused:?}");
    assert_eq!(unused.earlier_run().await.unwrap(), None);
    free(guard).await;
    // Two retries, and no third.
    std::mem::forget(killed().await);
    let last = killed().await;
    assert_eq!(last.attempt(), 3);
    assert!(!late.finish("late").await.unwrap());
    let guard = other.lock(&name).lock().await.unwrap();
    let again = once.clone().retry_unfinished(2, &guard);
    let earlier = again.begin().await.unwrap().unwrap_err();
    assert_eq!((earlier.attempt, earlier.outcome), (3, None));
    // A run with any outcome is not repeated.
    assert!(last.finish("exit code 1").await.unwrap());
    let again = once.retry_unfinished(9, &guard);
    assert_eq!(again.begin().await.unwrap().unwrap_err().attempt, 3);
    free(guard).await;
}

/// The handle outlives the guard.
async fn released_lock_retries_nothing(store: TestStore) {
    let name = unique("released");
    let (client, other) = (store.client().await, store.client().await);
    std::mem::forget(client.once(&name, "02:00").begin().await.unwrap());
    // Of the same client, too, to which the hold may pass on.
    for client_of_next in [&other, &client] {
        let guard = held(&client.lock(&name)).await;
        let late = client.once(&name, "02:00").retry_unfinished(9, &guard);
        free(guard).await;
        let guard = held(&client_of_next.lock(&name)).await;
        let once = client_of_next.once(&name, "02:00");
        let run = once.retry_unfinished(9, &guard).begin().await.unwrap();
        let run = run.expect("another run");
        let refused = late.begin().await.unwrap().unwrap_err();
        assert_eq!(refused.attempt, run.attempt());
        std::mem::forget(run);
        free(guard).await;
    }
}

async fn names_and_slots_are_independent(store: TestStore) {
    let client = store.client().await;
    let name = unique("names");
    let tagged = format!("{{{name}}}:tagged");
    // No lock, no listing and no other job is affected.
    let guard = held(&client.lock(&name)).await;
    for (name, slot) in [(&name, "a"), (&name, "b"), (&tagged, "a"), (&name, "{b}")] {
        let once = client.once(name, slot);
        assert_eq!(once.name(), name);
        assert!(once.run(async {}).await.unwrap().is_ok(), "{name} {slot}");
        assert!(once.run(async {}).await.unwrap().is_err(), "{name} {slot}");
    }
    let hourly = client.once(&name, Slot::per(HOUR));
    assert!(hourly.run(async {}).await.unwrap().is_ok());
    free(guard).await;
    let mut listing = client.list(&format!("*{name}*"));
    // Records are no objects.
    assert_eq!(listing.next().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn slots_begin_at_multiples_of_their_length() {
    let store = Embedded::new();
    let [client, other] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let [mine, others] = [&client, &other].map(|client| client.once("a", Slot::per(HOUR)));
    // The first slot begins now, with the store.
    assert!(mine.run(async {}).await.unwrap().is_ok());
    sleep(HOUR - SECOND).await;
    assert!(others.run(async {}).await.unwrap().is_err());
    sleep(SECOND).await;
    assert!(others.run(sleep(HOUR / 2)).await.unwrap().is_ok());
    assert!(mine.run(async {}).await.unwrap().is_err());
    // In the middle of a slot, and later than that of the run.
    sleep(3 * HOUR).await;
    assert!(mine.run(async {}).await.unwrap().is_ok());
    assert!(others.run(async {}).await.unwrap().is_err());
}

#[tokio::test(start_paused = true)]
async fn slots_with_offset_begin_later() {
    let once = Client::embedded().once("a", Slot::per(3 * HOUR).offset(HOUR));
    assert!(once.run(async {}).await.unwrap().is_ok());
    for (time, is_next) in [(HOUR - SECOND, false), (SECOND, true), (3 * HOUR, true)] {
        sleep(time).await;
        assert_eq!(once.run(async {}).await.unwrap().is_ok(), is_next);
        assert!(once.run(async {}).await.unwrap().is_err());
    }
}

/// A clock that was set back is in an earlier slot. A retry there would allow the later slot again.
#[tokio::test]
async fn run_of_later_slot_is_not_retried() {
    let (client, name) = (client(shared()).await, unique("set-back"));
    let once = client.once(&name, Slot::per(HOUR));
    std::mem::forget(once.begin().await.unwrap().expect("the first run"));
    let key = format!("redlatch_once:{{{name}}}");
    let began: i64 = shared().command(&["HGET", &key, "began"]);
    let later = (began + 3_600_000).to_string();
    let _: i64 = shared().command(&["HSET", &key, "began", &later]);
    let guard = held(&client.lock(&name)).await;
    let once = once.retry_unfinished(1, &guard);
    assert!(once.begin().await.unwrap().is_err());
    free(guard).await;
}

/// The run of an earlier slot ends after that of the next one has begun.
#[tokio::test(start_paused = true)]
async fn late_outcome_does_not_change_record_of_next_slot() {
    let once = Client::embedded().once("a", Slot::per(HOUR));
    let slow = once.begin().await.unwrap().unwrap();
    sleep(HOUR).await;
    let next = once.begin().await.unwrap().unwrap();
    assert!(!slow.finish("late").await.unwrap());
    assert_eq!(once.earlier_run().await.unwrap().unwrap().outcome, None);
    sleep(SECOND).await;
    assert!(next.finish("in time").await.unwrap());
    let earlier = once.earlier_run().await.unwrap().unwrap();
    assert_eq!(earlier.outcome.as_deref(), Some("in time"));
    assert_eq!(earlier.took, Some(SECOND));
}

#[tokio::test(start_paused = true)]
async fn record_remains_for_its_time() {
    let client = Client::embedded();
    let named = client.once("a", "02:00").remembered_for(HOUR);
    let day = client
        .once("a", Slot::per(24 * HOUR))
        .remembered_for(SECOND);
    let default = client.once("a", "03:00");
    for once in [&named, &day, &default] {
        assert!(once.run(async {}).await.unwrap().is_ok());
    }
    sleep(HOUR - SECOND).await;
    assert!(named.earlier_run().await.unwrap().is_some());
    sleep(SECOND).await;
    assert!(named.earlier_run().await.unwrap().is_none());
    // Longer than its slot in any case.
    sleep(22 * HOUR).await;
    assert!(day.earlier_run().await.unwrap().is_some());
    sleep(6 * 24 * HOUR).await;
    assert!(default.earlier_run().await.unwrap().is_some());
    sleep(24 * HOUR).await;
    assert!(default.earlier_run().await.unwrap().is_none());
}

#[tokio::test]
async fn invalid_names_slots_and_times_are_errors() {
    let client = Client::embedded();
    let error = client.once("", "a").begin().await.unwrap_err();
    assert_matches!(error, Error::InvalidName { .. });
    let too_long = "x".repeat(513);
    for (once, expected) in [
        (client.once("a", ""), "slot"),
        (client.once("a", too_long), "slot"),
        (client.once("a", Slot::per(Duration::ZERO)), "slot"),
        (client.once("a", Slot::per(Duration::MAX)), "slot"),
        (
            client.once("a", Slot::per(HOUR).offset(Duration::MAX)),
            "slot",
        ),
        (
            client.once("a", "a").remembered_for(Duration::ZERO),
            "remembered_for",
        ),
    ] {
        for error in [
            once.begin().await.unwrap_err(),
            once.earlier_run().await.unwrap_err(),
        ] {
            let Error::InvalidSetting { setting, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(*setting, expected);
        }
    }
}

#[tokio::test]
async fn foreign_data_is_an_error() {
    let server = redlatch_testkit::shared();
    let (client, name) = (client(server).await, unique("foreign"));
    let once = client.once(&name, "a");
    let key = format!("redlatch_once:{{{name}}}:a");
    for command in [
        ["HSET", &key, "field", "1"].as_slice(),
        &["SET", &key, "text"],
    ] {
        let () = server.command(command);
        assert_matches!(once.begin().await, Err(Error::WrongKind { .. }));
        let () = server.command(&["DEL", &key]);
    }
}

/// The step was applied, its answer was lost: the repetition finds its own run.
#[tokio::test]
async fn repeated_step_finds_its_own_run() {
    let server = redlatch_testkit::shared();
    let proxy = Arc::new(Proxy::to(server.port()));
    let client = connect(long_timeout(), &proxy.url()).await;
    let once = client.once(&unique("lost"), "a");
    assert!(once.earlier_run().await.unwrap().is_none());
    let run = with_lost_answer(&proxy, once.begin()).await.unwrap();
    let run = run.expect("the only run");
    assert!(with_lost_answer(&proxy, run.finish("done")).await.unwrap());
    let earlier = once.earlier_run().await.unwrap().expect("a run");
    assert_eq!(earlier.outcome.unwrap(), "done");
}

/// During an outage no work starts. The slot is free afterwards, unless the step has reached the server.
#[tokio::test]
async fn nothing_runs_while_store_cannot_be_reached() {
    let mut server = Server::start_durable();
    let client = connect(Client::builder().response_timeout(SHORT), &server.url()).await;
    let once = client.once("a", "02:00");
    let other = client.once("a", "03:00");
    let run = other.begin().await.unwrap().unwrap();
    server.kill();
    assert_transient(once.run(async { panic!("it ran") }).await);
    // The outcome is not recorded, and that is all.
    assert_transient(run.finish("done").await);
    server.restart();
    let answers = async || once.earlier_run().await.is_ok();
    until("the store answers", answers).await;
    assert!(once.run(async {}).await.unwrap().is_ok());
    assert_eq!(other.earlier_run().await.unwrap().unwrap().outcome, None);
}

/// The caller leaves before the answer arrives.
#[tokio::test]
async fn canceled_beginning_ends_in_background() {
    let (client, name) = (&client(shared()).await, &unique("canceled"));
    let tries = &std::cell::Cell::new(0);
    drop_after_each_poll(|polls| async move {
        tries.set(tries.get() + 1);
        let once = client.once(name, tries.get().to_string());
        let begun = poll_up_to(polls, once.begin()).await;
        let is_begun = begun.is_some();
        drop(begun);
        client.flush().await;
        let earlier = once.earlier_run().await.unwrap().expect("a run");
        assert_eq!(earlier.outcome.as_deref(), Some("dropped"));
        is_begun
    })
    .await;
    assert!(tries.get() > 5);
}
