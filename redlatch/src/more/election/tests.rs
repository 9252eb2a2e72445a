//! Elections on a stopped clock, with the embedded store.

use std::future::IntoFuture as _;
use std::time::Duration;

use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, timeout};

use super::rules;
use super::*;
use crate::test_prelude::clients;
use crate::{Client, Error};

const LEASE: Duration = Duration::from_secs(30);

/// Campaigns in a task, and waits until the candidate is in the queue.
async fn candidate(client: &Client, value: &str) -> (OwnerId, JoinHandle<Result<Leadership>>) {
    let campaign = client.election("e").campaign(value);
    let owner = campaign.owner_id().clone();
    let waiting = tokio::spawn(campaign.into_future());
    let is_waiting = |waiter: &Waiter| waiter.owner == owner;
    let election = client.election("e");
    while !election.candidates().await.unwrap().iter().any(is_waiting) {
        yield_now().await;
    }
    (owner, waiting)
}

async fn led(waiting: JoinHandle<Result<Leadership>>) -> Leadership {
    waiting.await.unwrap().unwrap()
}

fn value(leader: &Option<Leader>) -> Option<(u64, &str)> {
    let leader = leader.as_ref()?;
    Some((leader.epoch, &leader.value))
}

#[tokio::test(start_paused = true)]
async fn leader_is_asked_to_resign_and_the_next_one_is_not() {
    let (_, [one, two, other]) = clients();
    let leader = one.election("e").campaign("a").await.unwrap();
    let (_, next) = candidate(&two, "b").await;
    let asked = tokio::spawn(leader.asked());
    let owner = other.fair_lock("e").ask().await.unwrap();
    assert_eq!(owner.as_ref(), Some(leader.owner_id()));
    let limit = Duration::from_secs(1);
    timeout(limit, asked).await.unwrap().unwrap();
    leader.resign().await.unwrap();
    let next = led(next).await;
    assert!(timeout(limit, next.asked()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn candidates_lead_in_order_with_growing_epochs() {
    let (_, [one, two, three]) = clients();
    let election = one.election("e");
    let first = election.campaign("first").await.unwrap();
    let (_, second) = candidate(&two, "second").await;
    let (_, third) = candidate(&three, "third").await;
    let begun = Instant::now();
    assert_eq!(value(&election.leader().await.unwrap()), Some((1, "first")));
    assert_eq!(first.epoch(), 1);
    first.resign().await.unwrap();
    let second = led(second).await;
    assert!(!third.is_finished());
    assert_eq!(second.epoch(), 2);
    drop(second);
    let third = led(third).await;
    assert_eq!(third.epoch(), 3);
    let leader = election.leader().await.unwrap();
    assert_eq!(value(&leader), Some((3, "third")));
    assert_eq!(&leader.unwrap().owner, third.owner_id());
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn campaigns_of_one_scope_exclude_each_other() {
    let (_, [client]) = clients();
    Owner::new()
        .scope(async {
            let election = client.election("e");
            let first = election.campaign("").await.unwrap();
            let second = tokio::time::timeout(10 * LEASE, election.campaign("").into_future());
            assert!(second.await.is_err());
            assert!(first.is_valid());
        })
        .await;
}

/// Invariant: epochs grow also when all keys of the lock have expired.
#[tokio::test(start_paused = true)]
async fn epoch_outlives_the_lock() {
    let (store, [client]) = clients();
    let election = client.election("e");
    let dead = election.campaign("").await.unwrap();
    dead.guard.detach().unwrap();
    tokio::time::sleep(365 * 24 * 60 * LEASE).await;
    assert_eq!(
        store.keys(),
        ["redisson_lock_token:{e}", "redlatch_election:{e}"]
    );
    assert_eq!(election.campaign("").await.unwrap().epoch(), 2);
}

#[tokio::test(start_paused = true)]
async fn observer_reports_a_dead_leader_when_its_lease_ends() {
    let (_, [one, two]) = clients();
    let mut observer = two.election("e").observe();
    let dead = one.election("e").campaign("dead").await.unwrap();
    assert_eq!(value(&observer.next().await.unwrap()), Some((1, "dead")));
    let begun = Instant::now();
    dead.guard.detach().unwrap();
    assert_eq!(observer.next().await.unwrap(), None);
    let late = begun.elapsed() - LEASE;
    assert!(late < Duration::from_millis(5), "{late:?}");
}

#[tokio::test(start_paused = true)]
async fn next_candidate_leads_when_the_lease_of_a_dead_leader_ends() {
    let (_, [one, two]) = clients();
    let dead = one.election("e").campaign("dead").await.unwrap();
    let begun = Instant::now();
    let (_, next) = candidate(&two, "next").await;
    dead.guard.detach().unwrap();
    assert_eq!(led(next).await.epoch(), 2);
    let late = begun.elapsed() - LEASE;
    assert!(late < Duration::from_millis(5), "{late:?}");
}

/// A candidate whose process hangs at the head of the queue delays the others by its turn, not by
/// the fair lock's five minutes.
#[tokio::test(start_paused = true)]
async fn hung_candidate_delays_the_others_by_one_lease() {
    let (_, [leader, hung, next]) = clients();
    let leadership = leader.election("e").campaign("").await.unwrap();
    let mut campaign = hung.election("e").campaign("hung").into_future();
    // It waits and is subscribed, and is then never polled again.
    let polled = tokio::time::timeout(Duration::from_millis(1), &mut campaign);
    assert!(polled.await.is_err());
    let (_, next) = candidate(&next, "next").await;
    leadership.resign().await.unwrap();
    let begun = Instant::now();
    let _next = led(next).await;
    let waited = begun.elapsed();
    // It retries each five seconds.
    let limit = LEASE + Duration::from_secs(6);
    assert!((LEASE / 2..limit).contains(&waited), "{waited:?}");
}

/// Observers in one client have seen different leaders, so none may wait for another to read.
#[tokio::test(start_paused = true)]
async fn observers_of_one_client_do_not_wait_for_each_other() {
    let (_, [client]) = clients();
    let election = client.election("e");
    let (mut early, mut late) = (election.observe(), election.observe());
    let leadership = election.campaign("one").await.unwrap();
    assert_eq!(value(&early.next().await.unwrap()), Some((1, "one")));
    let next = tokio::spawn(async move { early.next().await });
    tokio::time::sleep(Duration::from_millis(1)).await;
    let begun = Instant::now();
    let read = tokio::time::timeout(LEASE, late.next()).await;
    assert_eq!(value(&read.unwrap().unwrap()), Some((1, "one")));
    leadership.proclaim("two").await.unwrap();
    assert_eq!(value(&late.next().await.unwrap()), Some((1, "two")));
    assert_eq!(value(&next.await.unwrap().unwrap()), Some((1, "two")));
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

/// Invariant: the last report is the final state, after each kind of change, by a message and not
/// by the end of a lease.
#[tokio::test(start_paused = true)]
async fn observer_reports_each_kind_of_change_at_once() {
    let (_, [one, two, observing]) = clients();
    let mut observer = observing.election("e").observe();
    assert_eq!(observer.next().await.unwrap(), None);
    let begun = Instant::now();
    let (reports, mut reported) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let _ = reports.send(observer.next().await.unwrap());
        }
    });
    let mut report = async || reported.recv().await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let first = one.election("e").campaign("first").await.unwrap();
    assert_eq!(value(&report().await), Some((1, "first")));
    first.proclaim("ready").await.unwrap();
    assert_eq!(value(&report().await), Some((1, "ready")));
    first.resign().await.unwrap();
    assert_eq!(report().await, None);
    let second = two.election("e").campaign("second").await.unwrap();
    assert_eq!(value(&report().await), Some((2, "second")));
    assert!(two.fair_lock("e").force_unlock().await.unwrap());
    assert_eq!(report().await, None);
    drop(second);
    assert!(begun.elapsed() < Duration::from_millis(5));
}

/// The next candidate hangs: the vacancy is published although the queue is not empty.
#[tokio::test(start_paused = true)]
async fn observer_reports_a_vacancy_while_candidates_wait() {
    for forced in [false, true] {
        let (_, [leader, hung, observing]) = clients();
        let mut observer = observing.election("e").observe();
        let leadership = leader.election("e").campaign("").await.unwrap();
        let mut campaign = hung.election("e").campaign("hung").into_future();
        let polled = tokio::time::timeout(Duration::from_millis(1), &mut campaign);
        assert!(polled.await.is_err());
        assert!(observer.next().await.unwrap().is_some());
        let next = tokio::spawn(async move { observer.next().await });
        tokio::time::sleep(Duration::from_millis(1)).await;
        let begun = Instant::now();
        match forced {
            true => assert!(observing.fair_lock("e").force_unlock().await.unwrap()),
            false => leadership.resign().await.unwrap(),
        }
        assert_eq!(next.await.unwrap().unwrap(), None);
        assert_eq!(begun.elapsed(), Duration::ZERO, "forced: {forced}");
    }
}

#[tokio::test(start_paused = true)]
async fn holder_of_the_fair_lock_is_no_leader() {
    let (_, [client]) = clients();
    let election = client.election("e");
    election.campaign("").await.unwrap().resign().await.unwrap();
    let held = client.fair_lock("e").lock().await.unwrap();
    assert_eq!(election.leader().await.unwrap(), None);
    let (_, waiting) = candidate(&client, "").await;
    held.unlock().await.unwrap();
    assert_eq!(led(waiting).await.epoch(), 2);
}

#[tokio::test(start_paused = true)]
async fn former_leader_cannot_proclaim() {
    let (_, [one, two]) = clients();
    let election = one.election("e");
    let former = election.campaign("one").await.unwrap();
    assert!(one.fair_lock("e").force_unlock().await.unwrap());
    let _leader = two.election("e").campaign("two").await.unwrap();
    let error = former.proclaim("late").await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    assert_eq!(value(&election.leader().await.unwrap()), Some((2, "two")));
    former.lost().await;
    assert!(!former.is_valid());
    let error = former.proclaim("later").await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    assert!(matches!(former.resign().await, Err(Error::Lost { .. })));
}

/// A value that was sent on a broken connection arrives after the next one.
#[tokio::test(start_paused = true)]
async fn late_value_does_not_replace_a_later_one() {
    let (_, [client]) = clients();
    let election = client.election("e");
    let leadership = election.campaign("").await.unwrap();
    for value in ["one", "two"] {
        leadership.proclaim(value).await.unwrap();
    }
    let late = rules::proclaim(&election.keys, leadership.owner_id().as_str(), 1, "one");
    assert!(client.session.store.run_idempotent(&late).await.unwrap());
    assert_eq!(value(&election.leader().await.unwrap()), Some((1, "two")));
}

#[tokio::test(start_paused = true)]
async fn leader_resigns_to_a_candidate_before_the_others() {
    let (_, [client]) = clients();
    let election = client.election("e");
    let leadership = election.campaign("leader").await.unwrap();
    let (second_id, second) = candidate(&client, "second").await;
    let (third_id, third) = candidate(&client, "third").await;
    let (fourth_id, fourth) = candidate(&client, "fourth").await;
    let begun = Instant::now();
    leadership.resign_to(&third_id).await.unwrap();
    let third = led(third).await;
    assert_eq!(third.epoch(), 2);
    let queue = election.candidates().await.unwrap();
    let owners: Vec<_> = queue.iter().map(|waiter| &waiter.owner).collect();
    assert_eq!(owners, [&second_id, &fourth_id]);
    // Those overtaken keep their turns as long as before.
    for waiter in &queue {
        assert!(waiter.remaining.duration().unwrap() >= LEASE, "{waiter:?}");
    }
    // A candidate that does not wait is no successor: the order stays as it is.
    third.resign_to(&third_id).await.unwrap();
    assert_eq!(led(second).await.epoch(), 3);
    assert_eq!(led(fourth).await.epoch(), 4);
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropped_campaign_leaves_the_queue() {
    let (_, [client]) = clients();
    let election = client.election("e");
    let _leadership = election.campaign("").await.unwrap();
    let (_, waiting) = candidate(&client, "").await;
    waiting.abort();
    let _ = waiting.await;
    client.flush().await;
    assert!(election.candidates().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn work_ends_when_the_leadership_is_lost() {
    let (_, [client]) = clients();
    let leadership = client.election("e").campaign("").await.unwrap();
    assert_eq!(leadership.run(async { 7 }).await.unwrap(), 7);
    assert!(client.fair_lock("e").force_unlock().await.unwrap());
    let work = std::future::pending::<()>();
    let error = leadership.run(work).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn invalid_name_is_reported() {
    let election = Client::embedded().election("");
    let invalid = |error| assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    invalid(election.campaign("").await.map(drop).unwrap_err());
    invalid(election.leader().await.map(drop).unwrap_err());
    invalid(election.observe().next().await.map(drop).unwrap_err());
    invalid(election.candidates().await.map(drop).unwrap_err());
}

/// The latest term is still its own, but the lock is not.
#[tokio::test(start_paused = true)]
async fn former_leader_cannot_proclaim_while_there_is_no_leader() {
    let (store, [client]) = clients();
    let former = client.election("e").campaign("one").await.unwrap();
    assert!(client.fair_lock("e").force_unlock().await.unwrap());
    let error = former.proclaim("late").await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    assert_eq!(store.texts("redlatch_election:{e}")["value"], "one");
}
