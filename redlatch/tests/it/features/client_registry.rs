//! The registry of clients on real servers: holders and waiters are registered, and no lock depends on it.

use redlatch::blocking;
use redlatch::inspect::{RegistryEntry, WaitingOwner};

use crate::common::prelude::*;
use crate::common::secured::{PREFIX, Rules, Secured, rules};

/// What the registry says about the holder of `name`.
async fn holder(client: &Client, name: &str) -> Option<RegistryEntry> {
    let state = client.inspect(name).await.unwrap()?;
    let holders = state.holders();
    holders.first()?.registered.clone()
}

async fn until_registered(client: &Client, name: &str) -> RegistryEntry {
    let registered = async || holder(client, name).await.is_some();
    until("the holder is registered", registered).await;
    holder(client, name).await.unwrap()
}

fn client_key(client: &Client) -> String {
    format!("redlatch_client:{{{}}}", client.id())
}

async fn holds_and_waits_are_shown(store: TestStore) {
    let settings = || Client::builder().label("report").prefix(store.prefix());
    let client = store.client_with(settings()).await;
    let peer = store.client_with(settings()).await;
    let name = unique("shown");
    let guard = client.lock(&name).lock().note("reindex 42").await.unwrap();
    let waiting = {
        let lock = peer.lock(&name);
        tokio::spawn(async move { lock.lock().note("next").await?.unlock().await })
    };
    let entry = until_registered(&peer, &name).await;
    assert_eq!(entry.note.as_deref(), Some("reindex 42"));
    assert_eq!(entry.client.id, client.id());
    assert_eq!(entry.client.pid, std::process::id());
    assert_eq!(entry.client.label.as_deref(), Some("report"));
    assert!(entry.age >= Duration::from_secs(1) && entry.age <= entry.client.age);
    assert!(!entry.client.host.is_empty() && !entry.client.program.is_empty());
    let registered = async || !client.waiters(&name).await.unwrap().is_empty();
    until("the waiter is registered", registered).await;
    let waiters = client.waiters(&name).await.unwrap();
    let wait = waiters[0].registered.as_ref().unwrap();
    assert_eq!(wait.client.id.as_str(), peer.id());
    assert_eq!(wait.note.as_deref(), Some("next"));
    let mut listing = peer.list(&name);
    let listed = listing.next().await.unwrap().unwrap();
    assert!(listed.state.holders()[0].registered.is_some());
    free(guard).await;
    joined("its turn", waiting).await;
    for one in [&client, &peer] {
        one.flush().await;
    }
    assert_eq!(client.waiters(&name).await.unwrap(), []);
}

#[tokio::test]
async fn holds_and_waits_are_shown_on_server() {
    holds_and_waits_are_shown(TestStore::server()).await;
}

#[tokio::test]
async fn holds_and_waits_are_shown_in_cluster() {
    holds_and_waits_are_shown(TestStore::cluster()).await;
}

#[tokio::test]
async fn nothing_remains_after_release() {
    let (server, client) = server_and_client().await;
    let name = unique("cleaned");
    let guard = held(&client.lock(&name)).await;
    until_registered(&client, &name).await;
    let key = client_key(&client);
    let fields: Vec<String> = server.command(&["HKEYS", &key]);
    let number = guard.owner().number();
    let expected = [
        "host",
        "pid",
        "program",
        "version",
        "started",
        "instance",
        &format!("hold:{name}:{number}"),
    ];
    assert_eq!(fields, expected);
    let ttl: i64 = server.command(&["PTTL", &key]);
    assert!((20_000..=30_000).contains(&ttl), "{ttl}");
    free(guard).await;
    client.flush().await;
    assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), [""; 0]);
}

/// Two threads, each of which waits for the lock of the other.
#[test]
fn deadlock_of_threads_is_found() {
    let server = Server::start();
    let [client, peer] = [(); 2].map(|()| blocking::Client::connect(&server.url()).unwrap());
    let names = [unique("one"), unique("other")];
    let barrier = std::sync::Barrier::new(2);
    let acquire_both = |client: &blocking::Client, first: &str, second: &str| {
        let first = client.lock(first).lock().block().unwrap();
        barrier.wait();
        // One of the threads gives up.
        let second = client.lock(second).try_lock().wait(SHORT).note("second");
        let acquired = second.block().unwrap().is_some();
        drop(first);
        acquired
    };
    let [one, other] = &names;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| acquire_both(&client, one, other));
        let second = scope.spawn(|| acquire_both(&peer, other, one));
        let observer = blocking::Client::connect(&server.url()).unwrap();
        let deadlock = || {
            let graph = observer.wait_graph().unwrap();
            let deadlocks = graph.deadlocks();
            let name = |wait: &&WaitingOwner| wait.name.clone();
            let cycle = deadlocks.first();
            cycle.map(|waits| waits.iter().map(name).collect::<Vec<_>>())
        };
        let found = std::iter::repeat_with(deadlock)
            .take(400)
            .find_map(|found| {
                std::thread::sleep(Duration::from_millis(10));
                found
            });
        let mut found = found.expect("a deadlock is found before the threads give up");
        found.sort();
        let mut expected = names.to_vec();
        expected.sort();
        assert_eq!(found, expected);
        let acquired = [waiting.join().unwrap(), second.join().unwrap()];
        assert!(!acquired.iter().all(|acquired| *acquired));
    });
}

#[tokio::test]
async fn client_without_permission_registers_nothing() {
    let Rules { app, .. } = rules();
    let secured = Secured::start(&[app]);
    let client = secured.client(Client::builder(), "").await;
    let name = unique("denied");
    let guard = held(&client.lock(&name)).await;
    let denied = || {
        let server = secured.server.plain();
        let log: Vec<std::collections::HashMap<String, String>> = server.command(&["ACL", "LOG"]);
        let about = |entry: &&std::collections::HashMap<String, String>| {
            entry["object"].starts_with("redlatch_client:")
        };
        let counts = log
            .iter()
            .filter(about)
            .map(|entry| entry["count"].parse::<u32>().unwrap());
        counts.sum::<u32>()
    };
    until("the server has refused", async || denied() > 0).await;
    assert_eq!(holder(&client, &name).await, None);
    assert!(client.wait_graph().await.unwrap().waits.is_empty());
    assert!(guard.is_valid());
    free(guard).await;
    let again = held(&client.lock(&name)).await;
    // By then, the entry of the lock would have been written.
    let permitted = self::client(secured.server.plain()).await;
    let later = unique("later");
    let _held = held(&permitted.lock(&later)).await;
    until_registered(&permitted, &later).await;
    free(again).await;
    client.flush().await;
    assert_eq!(denied(), 2, "it writes once, and was asked to read once");
    // Another client has registered itself.
    let key = "redlatch_client:{other}";
    let _: i64 = secured.server.plain().command(&["HSET", key, "host", "h"]);
    assert_matches!(client.wait_graph().await, Err(Error::NotPermitted { .. }));
}

/// With the narrower rule that docs/security.md names.
#[tokio::test]
async fn refused_entry_of_another_client_is_only_missing() {
    let Rules { app, .. } = rules();
    let own = app.replacen(" ~", " ~redlatch_client:{app* ~", 1);
    let secured = Secured::start(&[&own]);
    let id = unique("app");
    let client = secured.client(Client::builder().client_id(&id), "").await;
    let name = unique("foreign");
    let server = secured.server.plain();
    let foreign = format!("{PREFIX}{name}");
    let _: i64 = server.command(&["HSET", &foreign, "other:1", "1"]);
    let _: i64 = server.command(&["HSET", "redlatch_client:{other}", "host", "h"]);
    assert_eq!(holder(&client, &name).await, None);
    let held = unique("held");
    let _guard = client.lock(&held).lock().await.unwrap();
    until_registered(&client, &held).await;
    let graph = client.wait_graph().await.unwrap();
    assert_eq!((graph.waits.len(), graph.unreadable), (0, 1));
}

/// Both names are inspected by one script, which the server refuses as a whole.
#[tokio::test]
async fn wait_for_a_name_that_may_not_be_read_hides_no_other() {
    let Rules { app, .. } = rules();
    let with_registry = app.replacen(" ~", " ~redlatch_client:* ~", 1);
    let secured = Secured::start(&[&with_registry]);
    let other = self::client(secured.server.plain()).await;
    let [permitted, foreign] = [format!("{PREFIX}{}", unique("own")), unique("foreign")];
    let mut held = Vec::new();
    for name in [&permitted, &foreign] {
        let lock = other.lock(name);
        held.push(lock.lock().await.unwrap());
        tokio::spawn(async move { lock.lock().await.map(drop) });
    }
    let names = async |client: &Client| {
        let graph = client.wait_graph().await.unwrap();
        Vec::from_iter(graph.waits.into_iter().map(|wait| wait.name))
    };
    let registered = async || names(&other).await.len() == 2;
    until("both waits are registered", registered).await;
    let client = secured.settings_of(&with_registry, Client::builder());
    let client = client.connect(&secured.server.url()).await.unwrap();
    assert_eq!(names(&client).await, [permitted]);
}

/// With the rule that docs/security.md names.
#[tokio::test]
async fn documented_rule_allows_the_registry() {
    let Rules { app, .. } = rules();
    let with_registry = app.replacen(" ~", " ~redlatch_client:* ~", 1);
    let secured = Secured::start(&[&with_registry]);
    let client = secured.client(Client::builder(), "").await;
    let name = unique("allowed");
    let guard = held(&client.lock(&name)).await;
    until_registered(&client, &name).await;
    let graph = client.wait_graph().await.unwrap();
    assert_eq!((graph.waits.len(), graph.unreadable), (0, 0));
    // Another prefix, or none, finds the same holder.
    let key = format!("{PREFIX}{name}");
    let elsewhere = secured.settings_of(&with_registry, Client::builder());
    let elsewhere = elsewhere.connect(&secured.server.url()).await.unwrap();
    assert!(holder(&elsewhere, &key).await.is_some());
    free(guard).await;
}

#[tokio::test]
async fn client_is_registered_again_when_the_server_has_memory() {
    let (server, client) = server_and_client().await;
    let name = unique("full");
    let guard = held(&client.lock(&name)).await;
    let _: String = server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    until("the server has refused", async || server.errors("OOM") > 0).await;
    let _: String = server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    until_registered(&self::client(&server).await, &name).await;
    assert!(guard.is_valid());
    free(guard).await;
}

#[tokio::test]
async fn foreign_data_in_the_registry_is_ignored() {
    let (server, client) = server_and_client().await;
    let peer = self::client(&server).await;
    let name = unique("corrupt");
    let guard = held(&client.lock(&name)).await;
    until_registered(&peer, &name).await;
    let key = client_key(&client);
    let field = format!("hold:{name}:{}", guard.owner().number());
    let long = "x".repeat(100_000);
    for value in [
        "",
        "7",
        "no number lock - x",
        "9 lock",
        &long,
        "-5 \u{1b}[31m - \n",
    ] {
        let _: i64 = server.command(&["HSET", &key, &field, value]);
        let found = holder(&peer, &name).await;
        let is_shown = value.starts_with("-5");
        assert_eq!(found.is_some(), is_shown, "{value:.20}: {found:?}");
    }
    let _: i64 = server.command(&["HSET", &key, "pid", "many"]);
    assert_eq!(holder(&peer, &name).await, None);
    let _: i64 = server.command(&["DEL", &key]);
    let _: String = server.command(&["SET", &key, "text"]);
    assert_eq!(holder(&peer, &name).await, None);
    for key in [
        "redlatch_client:{}",
        "redlatch_client:{a b}",
        "redlatch_client:{c}",
    ] {
        let _: i64 = server.command(&["HSET", key, "host", "h", "wait:x:7", "1 lock - "]);
    }
    let graph = peer.wait_graph().await.unwrap();
    assert_eq!((graph.waits.len(), graph.unreadable), (0, 3));
    let mut listing = peer.list("*");
    let mut names = Vec::new();
    while let Some(found) = listing.next().await.unwrap() {
        names.push(found.name);
    }
    assert_eq!(names, [name]);
    // The client refuses to write there, and continues.
    free(guard).await;
}
