//! Futures may be dropped at any await point (failure catalogue F4, F5). At worst one lease remains
//! that is not renewed; if the server answers, not even that remains.

use crate::common::prelude::*;

/// Asserts that nothing is left: no key, no renewal, no background work.
async fn assert_nothing_left(client: &Client, lock: &Lock) {
    within_limit("settled", client.flush()).await;
    assert!(!lock.is_locked().await.unwrap(), "a key was left");
    assert_idle(client);
}

on_every_store! {
    acquiring_a_free_lock,
    acquiring_a_lock_that_is_released_meanwhile,
    waiting_in_the_local_queue,
    reentering,
    releasing,
    working_under_a_lock,
}

async fn acquiring_a_free_lock(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "cancel-free").await;
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, lock.lock()).await,
        async || assert_nothing_left(&client, &lock).await,
    )
    .await;
}

async fn acquiring_a_lock_that_is_released_meanwhile(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("cancel-wait");
    let lock = client.lock(&name);
    drop_result_after_each_poll(
        async |polls| {
            let held = other.lock(&name).lock().await.unwrap();
            let waiter = poll_up_to(polls, lock.lock());
            beside_release(waiter, held.unlock()).await
        },
        async || assert_nothing_left(&client, &lock).await,
    )
    .await;
}

async fn waiting_in_the_local_queue(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "cancel-line").await;
    drop_after_each_poll(async |polls| {
        // One waiter before and one after: a waiter that leaves the queue must not block the next
        // one.
        let guard = held(&lock).await;
        let after = {
            let mut gone = pin!(poll_up_to(polls, lock.lock()));
            let mut after = lock.lock().into_future();
            tokio::select! {
                biased;
                gone = &mut gone => assert!(gone.is_none()),
                _ = &mut after => unreachable!("guard by another owner"),
                () = until_subscribed(&client, 1) => {}
            }
            after
        };
        free(guard).await;
        drop(done("the next one gets it", after).await);
        assert_nothing_left(&client, &lock).await;
        polls >= 10
    })
    .await;
}

async fn reentering(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "cancel-again").await;
    drop_after_each_poll(async |polls| {
        let outer = held(&lock).await;
        let inner = poll_up_to(polls, outer.reenter()).await;
        let through = inner.is_some();
        drop(inner);
        within_limit("settled", client.flush()).await;
        assert_eq!(outer.hold_count(), 1);
        assert_eq!(lock.hold_count(outer.owner()).await.unwrap(), 1);
        free(outer).await;
        assert_nothing_left(&client, &lock).await;
        through
    })
    .await;
}

async fn releasing(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "cancel-unlock").await;
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, held(&lock).await.unlock()).await,
        async || assert_nothing_left(&client, &lock).await,
    )
    .await;
}

async fn working_under_a_lock(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "cancel-run").await;
    let work = async || {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    };
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, lock.run(work())).await,
        async || assert_nothing_left(&client, &lock).await,
    )
    .await;
}

/// Releases the lock after each await point of the waiter in turn: in every state, the waiter is
/// woken (failure catalogue F6).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_between_any_two_polls_wakes_waiter() {
    let store = TestStore::server();
    let [client, other] = store.clients().await;
    for polls in 1..30 {
        // Uses a new channel each time, which is not subscribed to yet.
        let lock = client.lock(&unique("heard"));
        let channel = format!("redisson_lock__channel:{{{}}}", lock.name());
        let same = other.lock(lock.name());
        let held = same.lock().lease(10 * LONG).await.unwrap();
        let mut waiter = lock.lock().into_future();
        poll_until_subscribed(polls, &mut waiter, &channel).await;
        // The connection keeps order: everything that the waiter has sent so far has been answered.
        assert!(lock.is_locked().await.unwrap());
        free(held).await;
        free(done("woken, not slept through", waiter).await).await;
    }
}

/// On a server that has just lost its scripts, and on a connection that was just cut, there are
/// more await points.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_dropped_while_loading_scripts_or_connecting() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("cancel-flushed");
    drop_result_after_each_poll(
        async |polls| {
            let _: () = server.command(&["SCRIPT", "FLUSH"]);
            server.cut_all();
            poll_up_to(polls, lock.lock()).await
        },
        async || assert_nothing_left(&client, &lock).await,
    )
    .await;
}

/// A request first settles the release of a guard of the same owner, and is canceled while that
/// release is unanswered. The guard's own release then finds no hold, but this is not a loss.
#[tokio::test(flavor = "current_thread")]
async fn release_by_canceled_request_of_same_owner_is_no_loss() {
    let (server, proxy, client) = proxied_client().await;
    let (lock, me) = (client.lock("a"), Owner::new());
    // So that the server knows both scripts.
    free(held(&lock).await).await;
    let guard = lock.lock().owner(me).await.unwrap();
    proxy.discard_replies(true);
    let has_turn = lock.lock().owner(me).into_future();
    let mut next = Box::pin(lock.lock().owner(me).into_future());
    let mut release = Box::pin(guard.unlock());
    {
        let mut has_turn = pin!(has_turn);
        assert!(poll_up_to(1, has_turn.as_mut()).await.is_none());
        assert!(poll_up_to(1, next.as_mut()).await.is_none());
        assert!(poll_up_to(1, release.as_mut()).await.is_none());
    }
    let is_free = async || !server.command::<bool>(&["EXISTS", "a"]);
    poll_until(next.as_mut(), until("released", is_free)).await;
    drop(next);
    proxy.discard_replies(false);
    proxy.cut();
    // On a new connection: on the broken one, the release itself would be repeated.
    assert!(!done("connected", lock.is_locked()).await);
    done("released", release).await;
    assert_nothing_left(&client, &lock).await;
}

/// Cancels a hundred tasks at random moments; each remaining task acquires the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_canceled_requests_leave_nothing_behind() {
    let store = TestStore::server();
    let (client, lock) = store.object(Client::lock, "crowd").await;
    for round in 0..5u64 {
        let crowd = spawn_each(0..100u64, |n| {
            let lock = lock.clone();
            async move {
                let limit = Duration::from_micros((n * 7919 + round * 104_729) % 5000);
                let waiting = lock.lock().into_future();
                drop(tokio::time::timeout(limit, waiting).await);
            }
        });
        for one in crowd {
            one.await.unwrap();
        }
        drop(done("the lock is free", lock.lock()).await);
        assert_nothing_left(&client, &lock).await;
    }
}
