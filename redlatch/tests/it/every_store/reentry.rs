//! Several holds of one owner: what one of them does, or fails to do, does not affect the others.

use crate::common::prelude::*;

on_every_store! {
    reentering_does_not_revive_a_lost_hold,
    dropped_inner_guard_does_not_make_unlock_report_loss,
    canceled_reentry_does_not_make_unlock_report_loss,
    concurrent_acquisitions_of_one_owner_do_not_wait_for_each_other,
    queued_owner_starts_over_when_its_other_hold_was_lost,
    loss_during_reentry_is_removed_from_hold_count,
}

async fn reentering_does_not_revive_a_lost_hold(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("revive");
    let outer = held(&client.lock(&name)).await;
    assert!(other.lock(&name).force_unlock().await.unwrap());
    // Another owner held it in between; now it is free again.
    other.lock(&name).run(async {}).await.unwrap();
    assert_lost(outer.reenter().await, Loss::NotHeld);
    assert!(!outer.is_valid());
    assert!(!client.lock(&name).is_locked().await.unwrap());
}

async fn dropped_inner_guard_does_not_make_unlock_report_loss(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "inner").await;
    for _ in 0..300 {
        let outer = held(&lock).await;
        let one = outer.reenter().await.unwrap();
        let two = outer.reenter().await.unwrap();
        drop(one);
        drop(two);
        free(outer).await;
        client.flush().await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

async fn canceled_reentry_does_not_make_unlock_report_loss(store: TestStore) {
    let (client, lock) = store.object(Client::lock, "cancelled").await;
    for _ in 0..300 {
        let outer = held(&lock).await;
        let mut again = outer.reenter().into_future();
        poll_fn(|cx| {
            let _ = again.as_mut().poll(cx);
            Poll::Ready(())
        })
        .await;
        drop(again);
        free(outer).await;
        client.flush().await;
        assert!(!lock.is_locked().await.unwrap());
    }
}

async fn concurrent_acquisitions_of_one_owner_do_not_wait_for_each_other(store: TestStore) {
    let client = store.client_without_retries().await;
    let other = store.client().await;
    let name = unique("siblings");
    let guard = held(&other.lock(&name)).await;
    let (lock, me) = (client.lock(&name), Owner::new());
    let both =
        me.scope(async { tokio::join!(lock.lock().into_future(), lock.lock().into_future()) });
    let release = async {
        until_subscribed(&client, 1).await;
        free(guard).await;
    };
    let ((one, two), ()) =
        within_limit("both have it", async { tokio::join!(both, release) }).await;
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(lock.hold_count(me).await.unwrap(), 2);
    free(one).await;
    free(two).await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn queued_owner_starts_over_when_its_other_hold_was_lost(store: TestStore) {
    let [client, other] = store.clients().await;
    let (name, me) = (unique("sibling-lost"), Owner::new());
    let lock = client.lock(&name);
    let guard = held(&other.lock(&name)).await;
    let brief = lock.lock().owner(me).lease(SHORT).into_future();
    let brief = tokio::spawn(brief);
    until_subscribed(&client, 1).await;
    let second = lock.lock().owner(me).lease(SHORT).into_future();
    let second = tokio::spawn(second);
    free(guard).await;
    let brief = joined("acquired", brief).await;
    within_limit("lost", brief.lost()).await;
    // Whether it re-entered before the loss or requested it afterwards: it gets no error, and never
    // blocks forever.
    let second = joined("not a dead end", second).await;
    drop(brief);
    drop(second);
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
}

async fn loss_during_reentry_is_removed_from_hold_count(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("off-account");
    let outer = client.lock(&name).lock().lease(10 * LONG).await.unwrap();
    assert!(other.lock(&name).force_unlock().await.unwrap());
    let next = held(&other.lock(&name)).await;
    assert!(matches!(outer.reenter().await, Err(Error::Lost { .. })));
    assert_eq!(client.status().holds, 0);
    drop(outer);
    client.flush().await;
    assert!(next.is_valid() && other.lock(&name).is_held_by(next.owner()).await.unwrap());
}

/// The answer to a re-entry arrives when the hold is already lost; what it left in the store is
/// released, instead of lasting for its lease of an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_answer_to_reentry_leaves_nothing_behind() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    let outer = loop {
        let outer = retry_if_late(|| lock.lock().lease(Duration::from_millis(700))).await;
        // So that the re-entry finds the hold, however slow this machine is.
        if server.command::<bool>(&["PERSIST", "a"]) {
            break outer;
        }
    };
    server.freeze();
    let thaw = async {
        within_limit("lost", outer.lost()).await;
        server.thaw();
    };
    let again = outer.reenter().lease(HOUR).into_future();
    let (again, ()) = tokio::join!(again, thaw);
    assert_matches!(again, Err(Error::Lost { .. }));
    drop(outer);
    within_limit("settled", client.flush()).await;
    assert!(!client.lock("a").is_locked().await.unwrap());
}

/// The same owner has released the lock before; its next acquisition is not answered. That one is
/// undone nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_acquisition_of_known_owner_is_undone() {
    let server = Server::start();
    let client = connect(response_timeout(Duration::from_millis(300)), &server.url()).await;
    let (lock, me) = (client.lock("a"), Owner::new());
    // This request waits in vain, so that the owner stays known while it acquires the lock
    // elsewhere.
    let kept = retry_if_late(|| async {
        let outer = lock.lock().owner(me).await?;
        let kept = outer.reenter();
        outer.unlock().await?;
        Ok(kept)
    })
    .await;
    server.freeze();
    let error = lock.lock().owner(me).await.unwrap_err();
    assert_matches!(error, Error::ResponseTimeout { .. });
    server.thaw();
    within_limit("undone", client.flush()).await;
    assert!(!retry_if_late(|| lock.is_locked()).await);
    drop(kept);
}

/// The owner of a lost guard has acquired and released the lock since. Dropping that guard never
/// affects the owner's next hold, whenever it is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_guard_never_affects_later_holds_of_its_owner() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let (lock, me) = (client.lock("a"), Owner::new());
    for _ in 0..20 {
        let brief = || lock.lock().owner(me).lease(Duration::from_millis(200));
        let Ok(lost) = brief().await else {
            // The lease had ended before the answer: a busy machine.
            continue;
        };
        within_limit("lost", lost.lost()).await;
        free(lock.lock().owner(me).await.unwrap()).await;
        // A release whose script must be loaded first arrives one round trip later.
        let _: () = server.command(&["SCRIPT", "FLUSH"]);
        drop(client.lock("teach").try_lock().await.unwrap());
        let again = lock.lock().owner(me);
        let (again, ()) = tokio::join!(again.into_future(), async { drop(lost) });
        let again = again.unwrap();
        client.flush().await;
        // Not deleted by the release of the lost guard.
        assert!(lock.is_held_by(me).await.unwrap());
        free(again).await;
    }
}

/// Releasing one of several holds must not delete a lock that has lost its expiry.
#[tokio::test]
async fn inner_release_keeps_a_lock_without_expiry() {
    let (server, client) = server_and_client().await;
    let lock = client.lock("a");
    let outer = lock.lock().lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(LONG).await.unwrap();
    assert_eq!(server.command::<i64>(&["PERSIST", "a"]), 1);
    free(inner).await;
    assert!(lock.is_held_by(outer.owner()).await.unwrap());
    free(outer).await;
}

/// A server that is out of memory keeps all holds, and an inner guard can still be released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inner_guard_can_be_released_on_a_full_server() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.lock("a");
    let outer = held(&lock).await;
    let inner = outer.reenter().await.unwrap();
    let () = server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(client.lock("b").try_lock().await.is_err(), "it is not full");
    done("released", inner.unlock()).await;
    assert_eq!(lock.hold_count(outer.owner()).await.unwrap(), 1);
    free(outer).await;
    assert!(!lock.is_locked().await.unwrap());
}
