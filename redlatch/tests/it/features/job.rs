//! Jobs that run by a schedule: [`redlatch::Client::job`].

use std::collections::BTreeMap;
use std::time::SystemTime;

use redlatch::job::{Cron, History, Overlap, Run, RunState};
use tokio::sync::watch;

use crate::common::prelude::*;

on_every_store! {
    each_firing_runs_on_one_client,
    overlapping_runs_read_one_lock,
}

fn each(seconds: u64) -> Cron {
    Cron::parse(&format!("*/{seconds} * * * * *")).unwrap()
}

/// The clocks of the clients differ by a third of a second.
async fn each_firing_runs_on_one_client(store: TestStore) {
    let (name, runs) = (unique("job"), Arc::new(Mutex::new(Vec::new())));
    let (ended, end) = watch::channel(false);
    let mut fleet = Vec::new();
    for machine in 0..3 {
        let (client, name, runs) = (store.client().await, name.clone(), runs.clone());
        let mut end = end.clone();
        fleet.push(tokio::spawn(async move {
            let ahead = Duration::from_millis(150 * machine);
            let job = client.job(&name).schedule(each(1));
            let job = job.clock(move || SystemTime::now() + ahead);
            let done = async {
                let _ = end.wait_for(|ended| *ended).await;
            };
            let work = async |run: Run| runs.lock().unwrap().push(run.slot());
            job.run_until(done, work).await.unwrap();
        }));
    }
    until("four runs", async || runs.lock().unwrap().len() >= 4).await;
    ended.send_replace(true);
    done_all("the end of the fleet", fleet).await;
    let runs = Arc::into_inner(runs).unwrap().into_inner().unwrap();
    let mut counts = BTreeMap::new();
    for slot in &runs {
        *counts.entry(*slot).or_insert(0) += 1;
    }
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    let client = store.client().await;
    let history = client.job(&name).history().await.unwrap().expect("runs");
    let slots: Vec<_> = history.runs.iter().rev().map(|run| run.slot).collect();
    assert_eq!(slots, counts.into_keys().collect::<Vec<_>>());
    assert!(all_are(&history, RunState::Succeeded));
    assert_eq!(history.schedule, Some(each(1)));
    assert!(client.jobs(&name).await.unwrap().contains(&name));
    assert!(!client.lock(&name).is_locked().await.unwrap());
}

fn all_are(history: &History, state: RunState) -> bool {
    history.runs.iter().all(|run| run.state == state)
}

async fn overlapping_runs_read_one_lock(store: TestStore) {
    let (client, name) = (store.client().await, unique("overlap"));
    let job = client.job(&name).schedule(each(1)).overlap(Overlap::Allow);
    let running = Mutex::new(0);
    let two = until("two runs at a time", async || *running.lock().unwrap() >= 2);
    let (ended, end) = watch::channel(false);
    let stop = async {
        two.await;
        let holders = client
            .read_write_lock(&name)
            .read()
            .holders()
            .await
            .unwrap();
        assert!(holders.len() >= 2, "{holders:?}");
        let history = client.job(&name).history().await.unwrap().unwrap();
        assert!(all_are(&history, RunState::Running));
        ended.send_replace(true);
    };
    let work = async |_| {
        *running.lock().unwrap() += 1;
        let _ = end.clone().wait_for(|ended| *ended).await;
    };
    job.run_until(stop, work).await.unwrap();
    let history = client.job(&name).history().await.unwrap().unwrap();
    assert!(all_are(&history, RunState::Succeeded));
}

/// The clock of a machine is an hour ahead. It uses up no slot of the others: it waits.
#[tokio::test]
async fn machine_that_is_far_ahead_waits() {
    let (client, name) = (client_at(&shared().url()).await, unique("ahead"));
    let job = client.job(&name).schedule(each(2));
    let job = job.clock(|| SystemTime::now() + Duration::from_secs(3600));
    let at = Mutex::new(None);
    let begun = until("a run", async || at.lock().unwrap().is_some());
    let work = async |run: Run| {
        at.lock()
            .unwrap()
            .get_or_insert((run.slot(), SystemTime::now()));
    };
    let waited = tokio::time::timeout(Duration::from_secs(5), job.run_until(begun, work)).await;
    assert!(waited.is_err(), "{at:?}");
    assert_eq!(client.job(&name).history().await.unwrap(), None);
    // A machine with the right clock has its slots.
    let right = client.job(&name).schedule(each(2));
    let begun = until("a run", async || at.lock().unwrap().is_some());
    right.run_until(begun, work).await.unwrap();
    let (slot, at) = at.lock().unwrap().expect("a run");
    // By half a period.
    assert!(slot <= at + Duration::from_secs(1), "{slot:?} {at:?}");
}
