//! Servers whose connections with subscriptions carry nothing else: those without RESP3, and some that imitate Redis.

use crate::common::deployments::{MovedEndpoint, RESP2, start_resp2};
use crate::common::imitations::Imitation;
use crate::common::prelude::*;

/// Feared most: a waiter sleeps on a free lock, because its subscription, or its wake-up, went to a connection that cannot carry it.
async fn waiters_are_woken(server: &Server, url: &str) {
    let settings = || patient(Client::builder()).watchdog_lease(WATCHDOG);
    let client = settings().connect(url).await.unwrap();
    let other = settings().connect(url).await.unwrap();
    for name in ["a", "b"] {
        let guard = held(&client.lock(name)).await;
        let waiters = [(); 3].map(|()| {
            let lock = other.lock(name);
            tokio::spawn(async move { held(&lock).await.unlock().await })
        });
        let channel = format!("redisson_lock__channel:{{{name}}}");
        until("subscribed", async || subscribers(server, &channel) > 0).await;
        free(guard).await;
        joined_all("a turn", waiters).await;
    }
    // Again after all connections have ended, those with subscriptions, too.
    let guard = held(&client.lock("c")).await;
    let waiter = tokio::spawn(other.lock("c").lock().into_future());
    let channel = "redisson_lock__channel:{c}";
    until("subscribed", async || subscribers(server, channel) > 0).await;
    let _: u32 = server.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    let _: u32 = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    free(guard).await;
    free(joined("a turn", waiter).await).await;
    // The last waiter has left: no connection listens.
    until("unsubscribed", async || channels(server) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_resp3() {
    let server = start_resp2();
    waiters_are_woken(&server, &server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_whose_connections_with_subscriptions_run_no_commands() {
    let server = Server::start();
    let imitation = Imitation {
        subscribes_apart: true,
        ..Imitation::default()
    };
    waiters_are_woken(&server, &imitation.start(&server).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_replies_with_messages() {
    let server = Server::start();
    let imitation = Imitation {
        replies_with_messages: true,
        ..Imitation::default()
    };
    let url = imitation.start(&server).await;
    waiters_are_woken(&server, &url).await;
}

/// With a login and a database, which follow HELLO otherwise.
#[tokio::test]
async fn login_and_database_without_resp3() {
    let server = start_resp2();
    let _: String = server.command(&["ACL", "SETUSER", "app", "on", ">right", "~*", "&*", "+@all"]);
    let url = |password: &str| format!("redis://app:{password}@127.0.0.1:{}/3", server.port());
    let refused = Client::connect(&url("wrong")).await.unwrap_err();
    assert_matches!(refused, Error::AuthenticationFailed { .. });
    let client = Client::connect(&url("right")).await.unwrap();
    let guard = held(&client.lock("a")).await;
    let clients: String = server.command(&["CLIENT", "LIST"]);
    let is_logged_in = clients.contains("db=3") && clients.contains("user=app");
    assert!(is_logged_in, "{clients}");
    free(guard).await;
    // Its reports of changes need RESP3.
    let error = client.watch("*").next().await.err().unwrap();
    assert!(error.to_string().contains("RESP3"), "{error}");
}

/// Feared most: only the connection of the attempts ends. The waiter asks the new master, and listens at the former one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_follow_the_attempts_to_another_server() {
    let named = MovedEndpoint::start_with(&RESP2);
    named.until_in_sync().await;
    let settings = || patient(Client::builder()).replica_sync(ReplicaSync::Off);
    let holder = settings().connect(&named.name.url()).await.unwrap();
    let other = settings().connect(&named.name.url()).await.unwrap();
    // So long that its end wakes no waiter.
    let held = holder.lock("a").lock().lease(100 * LONG).await.unwrap();
    let waiter = tokio::spawn(other.lock("a").lock().into_future());
    let channel = "redisson_lock__channel:{a}";
    let subscribers = |server: &Server| {
        let counts: (String, u32) = server.command(&["PUBSUB", "NUMSUB", channel]);
        counts.1
    };
    until("subscribed", async || subscribers(&named.old) > 0).await;
    let replicated = async || named.new.command::<bool>(&["EXISTS", "a"]);
    until("replicated", replicated).await;
    named.fail_over();
    // No message reaches the former master any more.
    let _: String = named.old.command(&["REPLICAOF", "127.0.0.1", "1"]);
    named.name.redirect(&named.new);
    let _: u32 = named.old.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    until("subscribed at the new master", async || {
        subscribers(&named.new) > 0
    })
    .await;
    free(held).await;
    free(joined("a turn", waiter).await).await;
}
