//! Futures may be dropped at any await point (failure catalogue F4, F5): at worst one lease remains
//! that is not renewed, and with a server that answers not even that.

use std::future::IntoFuture;
use std::pin::pin;
use std::time::Duration;

use redlatch::{Client, Lock, Owner};
use redlatch_testkit::{Proxy, Server, unique};

use crate::common::{
    LONG, Stand, dropped_everywhere, polled, polled_until_subscribed, soon, until,
};

/// Nothing was left behind: no key, no renewal, nothing under way.
async fn nothing_left(client: &Client, lock: &Lock) {
    soon("settled", client.settled()).await;
    assert!(!lock.is_locked().await.unwrap(), "a key was left");
    let status = client.status();
    assert_eq!((status.holds, status.background), (0, 0), "{status:?}");
}

on_every_store! {
    a_free_lock,
    a_lock_that_is_given_back_meanwhile,
    a_place_in_the_line,
    entering_again,
    giving_back,
    working_under_a_lock,
}

async fn a_free_lock(stand: Stand) {
    let client = stand.client().await;
    let lock = client.lock(&unique("cancel-free"));
    dropped_everywhere(async |polls| {
        let guard = polled(polls, lock.lock().into_future()).await;
        let through = guard.is_some();
        drop(guard);
        nothing_left(&client, &lock).await;
        through
    })
    .await;
}

async fn a_lock_that_is_given_back_meanwhile(stand: Stand) {
    let (client, other) = (stand.client().await, stand.client().await);
    let name = unique("cancel-wait");
    let lock = client.lock(&name);
    dropped_everywhere(async |polls| {
        let held = other.lock(&name).lock().await.unwrap();
        let waiter = polled(polls, lock.lock().into_future());
        let (guard, released) = soon("both", async { tokio::join!(waiter, held.unlock()) }).await;
        released.unwrap();
        let through = guard.is_some();
        drop(guard);
        nothing_left(&client, &lock).await;
        through
    })
    .await;
}

async fn a_place_in_the_line(stand: Stand) {
    let client = stand.client().await;
    let lock = client.lock(&unique("cancel-line"));
    dropped_everywhere(async |polls| {
        // One before and one after: whoever leaves the line must not keep the next one from it.
        let held = lock.lock().await.unwrap();
        let after = {
            let mut gone = pin!(polled(polls, lock.lock().into_future()));
            let mut after = Box::pin(lock.lock().into_future());
            let both = async {
                tokio::select! {
                    biased;
                    gone = &mut gone => gone,
                    _ = &mut after => unreachable!("held by somebody else"),
                    () = until("in line", || async { client.status().subscriptions == 1 }) => None,
                }
            };
            let first = both.await;
            assert!(first.is_none());
            after
        };
        held.unlock().await.unwrap();
        drop(soon("the next one gets it", after).await.unwrap());
        nothing_left(&client, &lock).await;
        polls >= 10
    })
    .await;
}

async fn entering_again(stand: Stand) {
    let client = stand.client().await;
    let lock = client.lock(&unique("cancel-again"));
    dropped_everywhere(async |polls| {
        let outer = lock.lock().await.unwrap();
        let inner = polled(polls, outer.reenter().into_future()).await;
        let through = inner.is_some();
        drop(inner);
        soon("settled", client.settled()).await;
        assert_eq!(outer.hold_count(), 1);
        assert_eq!(lock.hold_count(outer.owner()).await.unwrap(), 1);
        outer.unlock().await.unwrap();
        nothing_left(&client, &lock).await;
        through
    })
    .await;
}

async fn giving_back(stand: Stand) {
    let client = stand.client().await;
    let lock = client.lock(&unique("cancel-unlock"));
    dropped_everywhere(async |polls| {
        let guard = lock.lock().await.unwrap();
        let released = polled(polls, guard.unlock()).await;
        nothing_left(&client, &lock).await;
        released.is_some()
    })
    .await;
}

async fn working_under_a_lock(stand: Stand) {
    let client = stand.client().await;
    let lock = client.lock(&unique("cancel-run"));
    dropped_everywhere(async |polls| {
        let work = async {
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        };
        let done = polled(polls, lock.run(work)).await;
        nothing_left(&client, &lock).await;
        done.is_some()
    })
    .await;
}

/// The release comes after each await point of the waiter in turn: whatever it was doing, it hears
/// of it (failure catalogue F6).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_between_any_two_polls_is_heard() {
    let stand = Stand::server();
    let (client, other) = (stand.client().await, stand.client().await);
    for polls in 1..30 {
        // Each time a channel that is not subscribed to yet.
        let lock = client.lock(&unique("heard"));
        let channel = format!("redisson_lock__channel:{{{}}}", lock.name());
        let same = other.lock(lock.name());
        let held = same.lock().lease(10 * LONG).await.unwrap();
        let mut waiter = lock.lock().into_future();
        polled_until_subscribed(polls, &mut waiter, &channel).await;
        // The connection keeps order: what the waiter has sent until now has been answered.
        assert!(lock.is_locked().await.unwrap());
        held.unlock().await.unwrap();
        let guard = soon("heard, not slept through", waiter).await.unwrap();
        guard.unlock().await.unwrap();
    }
}

/// On a server that has just lost its scripts, and on a connection that has just been cut, there
/// are more await points.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_while_scripts_are_taught_and_connections_made() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("cancel-flushed");
    dropped_everywhere(async |polls| {
        let _: () = server.ask(&["SCRIPT", "FLUSH"]);
        server.cut_all();
        let guard = polled(polls, lock.lock().into_future()).await;
        let through = guard.is_some();
        drop(guard);
        nothing_left(&client, &lock).await;
        through
    })
    .await;
}

/// A request of an owner first settles what a guard of the same owner has just released, and is canceled
/// while that release is unanswered. The guard's own release then finds nothing, and nothing was lost.
#[tokio::test(flavor = "current_thread")]
async fn release_is_no_loss_although_a_canceled_request_of_its_owner_has_released_first() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let client = Client::connect(&proxy.url()).await.unwrap();
    let (lock, me) = (client.lock("a"), Owner::new());
    // So that the server has both scripts.
    lock.lock().await.unwrap().unlock().await.unwrap();
    let guard = lock.lock().owner(me).await.unwrap();
    proxy.swallow_replies(true);
    let has_turn = lock.lock().owner(me).into_future();
    let mut next = Box::pin(lock.lock().owner(me).into_future());
    let mut release = Box::pin(guard.unlock());
    {
        let mut has_turn = pin!(has_turn);
        assert!(polled(1, has_turn.as_mut()).await.is_none());
        assert!(polled(1, next.as_mut()).await.is_none());
        assert!(polled(1, release.as_mut()).await.is_none());
    }
    tokio::select! {
        biased;
        _ = next.as_mut() => panic!("there are no answers"),
        () = until("released", || async { !server.ask::<bool>(&["EXISTS", "a"]) }) => {}
    }
    drop(next);
    proxy.swallow_replies(false);
    proxy.cut();
    // On a new connection: on the broken one, it would be the release itself that is repeated.
    assert!(!soon("connected", lock.is_locked()).await.unwrap());
    soon("released", release).await.unwrap();
    nothing_left(&client, &lock).await;
}

/// A hundred tasks are cancelled at random moments; whoever is left gets the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_crowds_leave_nothing_behind() {
    let stand = Stand::server();
    let client = stand.client().await;
    let lock = client.lock(&unique("crowd"));
    for round in 0..5u64 {
        let crowd: Vec<_> = (0..100u64)
            .map(|n| {
                let lock = lock.clone();
                tokio::spawn(async move {
                    let patience = Duration::from_micros((n * 7919 + round * 104_729) % 5000);
                    let waiting = lock.lock().into_future();
                    drop(tokio::time::timeout(patience, waiting).await);
                })
            })
            .collect();
        for one in crowd {
            one.await.unwrap();
        }
        let last = soon("the lock is free", lock.lock().into_future()).await;
        drop(last.unwrap());
        nothing_left(&client, &lock).await;
    }
}
