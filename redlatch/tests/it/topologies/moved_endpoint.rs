//! One name that leads to another server after a failover: managed Redis, a Kubernetes service, a
//! load balancer.

use crate::common::deployments::MovedEndpoint;
use crate::common::prelude::*;

/// Feared most: the client renews nothing for as long as the old server keeps the connection, and
/// another client acquires what it holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_live_on_when_the_name_leads_to_the_new_master() {
    let named = MovedEndpoint::start();
    named.until_in_sync().await;
    let settings = || patient(Client::builder()).watchdog_lease(WATCHDOG);
    let client = settings().connect(&named.name.url()).await.unwrap();
    let other = settings().connect(&named.name.url()).await.unwrap();
    let guard = held(&client.lock("held")).await;
    named.fail_over();
    let before = named.connections();
    // For a while, the name leads to the old master.
    let request = tokio::spawn({
        let lock = client.lock("other");
        async move { lock.lock().await }
    });
    until("asked again", async || named.connections() > before + 2).await;
    named.name.redirect(&named.new);
    let on_new = joined("acquired", request).await;
    assert_eq!(named.new.command::<u32>(&["EXISTS", "other"]), 1);
    let end = tokio::time::Instant::now() + WATCHDOG;
    tokio::time::sleep_until(end).await;
    assert!(guard.is_valid(), "{:?}", guard.unlock().await);
    assert!(other.lock("held").try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn({
        let lock = other.lock("held");
        async move { lock.lock().await }
    });
    free(guard).await;
    free(on_new).await;
    free(joined("served", waiting).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn name_that_leads_to_a_replica_fails_with_a_clear_error() {
    let named = MovedEndpoint::start();
    named.until_in_sync().await;
    named.fail_over();
    let limit = Duration::from_secs(2);
    let client = connect(Client::builder().response_timeout(limit), &named.name.url()).await;
    let before = named.connections();
    let error = client.lock("a").try_lock().await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    let said = error.to_string();
    let expected = "leads to a replica, and must lead to a master";
    assert!(said.contains(expected), "{said}");
    // After growing pauses.
    let connections = named.connections() - before;
    assert!((2..100).contains(&connections), "{connections}");
    named.name.redirect(&named.new);
    free(done("acquired", client.lock("a").lock()).await).await;
}

/// Feared most: an answer from a server without data counts, because a step that writes nothing is not refused there. Then each
/// hold is lost, and a latch is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_master_that_restarts_without_data_decides_nothing() {
    let named = MovedEndpoint::start();
    named.until_in_sync().await;
    let client = connect(patient(Client::builder()), &named.name.url()).await;
    let guard = held(&client.lock("held")).await;
    let latch = client.count_down_latch("latch");
    assert!(latch.try_set_count(1).await.unwrap());
    let waiting = tokio::spawn({
        let latch = latch.clone();
        async move { latch.wait().await }
    });
    let channel = "redisson_countdownlatch__channel__{latch}";
    until("subscribed", async || subscribers(&named.old, channel) > 0).await;
    named.until_replicated("latch").await;
    named.fail_over();
    // As after a restart: empty, and a replica that has not reached its master.
    let _: String = named.old.command(&["REPLICAOF", "NO", "ONE"]);
    let _: String = named.old.command(&["FLUSHALL"]);
    let _: String = named.old.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let before = named.connections();
    for kind in ["normal", "pubsub"] {
        let _: i64 = named.old.command(&["CLIENT", "KILL", "TYPE", kind]);
    }
    until("asked again", async || named.connections() > before + 10).await;
    assert!(guard.is_valid() && !waiting.is_finished());
    let unlocked = tokio::spawn(guard.unlock());
    named.name.redirect(&named.new);
    joined("released", unlocked).await;
    assert_eq!(named.new.command::<u32>(&["EXISTS", "held"]), 0);
    latch.count_down().await.unwrap();
    joined("open", waiting).await;
}

/// Feared most: a step that a server has executed, which was a replica when the connection was made, is executed once more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_becomes_a_master_executes_a_step_once() {
    let named = MovedEndpoint::start();
    let settings = || patient(Client::builder());
    let other = connect(settings(), &named.old.url()).await;
    let latch = other.count_down_latch("latch");
    assert!(latch.try_set_count(3).await.unwrap());
    named.until_replicated("latch").await;
    named.name.redirect(&named.new);
    let client = connect(settings(), &named.name.url()).await;
    let latch = client.count_down_latch("latch");
    let roles = || named.new.calls("role");
    let before = roles();
    // Begins to connect.
    let _ = tokio::time::timeout(Duration::ZERO, latch.count()).await;
    until("connected", async || roles() > before).await;
    let _: String = named.new.command(&["REPLICAOF", "NO", "ONE"]);
    let counted = latch.count_down().await;
    assert_eq!(counted.unwrap(), 2);
}

/// Feared most: a release at the new master wakes no waiter, because the waiter listens at the former master. Its client learns of the
/// failover by a renewal on another connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_leaves_the_former_master_with_the_other_connections() {
    let named = MovedEndpoint::start();
    named.until_in_sync().await;
    let settings = || patient(Client::builder()).watchdog_lease(WATCHDOG);
    let holder = settings().connect(&named.name.url()).await.unwrap();
    let other = settings().connect(&named.name.url()).await.unwrap();
    // So long that its end wakes no waiter.
    let held = holder.lock("a").lock().lease(100 * LONG).await.unwrap();
    let waiter = tokio::spawn(other.lock("a").lock().into_future());
    let channel = "redisson_lock__channel:{a}";
    until("subscribed", async || subscribers(&named.old, channel) > 0).await;
    let _renewed = other.lock("b").lock().await.unwrap();
    named.until_in_sync().await;
    named.fail_over();
    // No message reaches the former master any more.
    let _: String = named.old.command(&["REPLICAOF", "127.0.0.1", "1"]);
    named.name.redirect(&named.new);
    free(held).await;
    free(joined("a turn", waiter).await).await;
}
