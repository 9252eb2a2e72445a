//! Events of objects: `Client::watch`.

use std::fmt::Display;

use redlatch::inspect::{Change, Event, ObjectKind, Watch};
use tokio::time::Instant;

use crate::common::prelude::*;
use crate::topologies::sentinel_or_cluster::Deployment;

/// A watch that has started.
async fn watch(client: &Client, pattern: &str) -> Watch {
    let mut watch = client.watch(pattern);
    assert_eq!(next(&mut watch).await, "synchronized");
    watch
}

/// Returns the next event in one line.
async fn next(watch: &mut Watch) -> String {
    in_one_line(done("an event", watch.next()).await)
}

fn in_one_line(event: Event) -> String {
    match event {
        Event::Changed { name, change, .. } => format!("{name} {}", describe(&change)),
        Event::Interrupted { .. } => "interrupted".into(),
        Event::Synchronized => "synchronized".into(),
        other => panic!("{other:?}"),
    }
}

fn describe(change: &Change) -> String {
    let what = |verb: &str, who: &dyn Display| format!("{verb} {who}");
    match change {
        Change::Held(by) => what("held", by),
        Change::Acquired(by) => what("acquired", by),
        Change::Released(by) => what("released", by),
        Change::Expired(by) => what("expired", by),
        Change::Waiting(owner) => what("waiting", owner),
        Change::GaveUp(owner) => what("gave-up", owner),
        Change::Counted(value) => what("counted", value),
        Change::Deleted => "deleted".into(),
        other => panic!("{other:?}"),
    }
}

/// Asserts that these changes of one object are next, in this order.
async fn expect<const N: usize>(watch: &mut Watch, name: &str, changes: [&str; N]) {
    for change in changes {
        assert_eq!(next(watch).await, format!("{name} {change}"));
    }
}

/// Acquires a lock. Returns the guard and the owner in the store.
async fn acquire<K: OwnedKind + 'static>(
    client: &Client,
    lock: &Lock<K>,
) -> (Guard<Lock<K>>, String) {
    let owner = Owner::new();
    let guard = lock.lock().owner(owner).await.unwrap();
    (guard, client.owner_id(owner).to_string())
}

/// Same as [`acquire`], and asserts that the event is next. `side`: of a read-write lock, in parentheses.
async fn acquire_seen<K: OwnedKind + 'static>(
    watch: &mut Watch,
    lock: &Lock<K>,
    side: &str,
) -> (Guard<Lock<K>>, String) {
    let guard = lock.lock().owner(Owner::new()).await.unwrap();
    let owner = guard.owner_id().to_string();
    expect(watch, lock.name(), [&format!("acquired {owner}{side}")]).await;
    (guard, owner)
}

/// Releases a lock, and asserts that the event is next.
async fn free_seen<K: OwnedKind + 'static>(watch: &mut Watch, guard: Guard<Lock<K>>, side: &str) {
    let (name, owner) = (guard.name().to_owned(), guard.owner_id());
    free(guard).await;
    expect(watch, &name, [&format!("released {owner}{side}")]).await;
}

on_every_store! {
    every_client_sees_changes_of_locks,
    every_kind_is_watched,
    only_matching_names_are_watched,
    existing_objects_come_first,
}

async fn every_client_sees_changes_of_locks(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("watched");
    let lock = client.lock(&name);
    let mut watches = [watch(&client, &name).await, watch(&other, &name).await];

    let (guard, owner) = acquire(&client, &lock).await;
    for watch in &mut watches {
        expect(watch, &name, [&format!("acquired {owner}")]).await;
    }
    // Not a change of its holder.
    free(guard.reenter().await.unwrap()).await;
    free(guard).await;
    for watch in &mut watches {
        expect(watch, &name, [&format!("released {owner}")]).await;
    }

    let (_guard, owner) = acquire(&client, &lock).await;
    for watch in &mut watches {
        expect(watch, &name, [&format!("acquired {owner}")]).await;
    }
    assert!(other.lock(&name).force_unlock().await.unwrap());
    for watch in &mut watches {
        expect(watch, &name, [&format!("released {owner}")]).await;
    }
}

async fn every_kind_is_watched(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("kind");
    let mut watch = watch(&client, &format!("{name}*")).await;

    let fair = format!("{name}-fair");
    let (guard, _) = acquire_seen(&mut watch, &client.fair_lock(&fair), "").await;
    let mut waiters = Vec::new();
    for _ in 0..2 {
        let (lock, owner) = (other.fair_lock(&fair), Owner::new());
        let waiter = tokio::spawn(async move { lock.lock().owner(owner).await.unwrap() });
        let owner = other.owner_id(owner);
        expect(&mut watch, &fair, [&format!("waiting {owner}")]).await;
        waiters.push((waiter, owner));
    }
    let [(first, first_owner), (second, second_owner)] = waiters.try_into().unwrap();
    second.abort();
    expect(&mut watch, &fair, [&format!("gave-up {second_owner}")]).await;
    free_seen(&mut watch, guard, "").await;
    expect(&mut watch, &fair, [&format!("acquired {first_owner}")]).await;
    free(first.await.unwrap()).await;
    expect(&mut watch, &fair, [&format!("released {first_owner}")]).await;

    let shared = format!("{name}-shared");
    let lock = client.read_write_lock(&shared);
    let (writer, _) = acquire_seen(&mut watch, &lock.write(), " (write)").await;
    free_seen(&mut watch, writer, " (write)").await;
    let (_one, _) = acquire_seen(&mut watch, &lock.read(), " (read)").await;
    let (two, _) = acquire_seen(&mut watch, &lock.read(), " (read)").await;
    free_seen(&mut watch, two, " (read)").await;

    let permits = format!("{name}-permits");
    let semaphore = client.expirable_semaphore(&permits);
    semaphore.try_set_permits(2).await.unwrap();
    expect(&mut watch, &permits, ["counted 2"]).await;
    let permit = semaphore.acquire().await.unwrap();
    let id = permit.ids()[0];
    expect(&mut watch, &permits, [&format!("acquired permit {id}")]).await;
    permit.release().await.unwrap();
    expect(&mut watch, &permits, [&format!("released permit {id}")]).await;

    let latch = format!("{name}-latch");
    let open = client.count_down_latch(&latch);
    open.try_set_count(2).await.unwrap();
    expect(&mut watch, &latch, ["counted 2"]).await;
    open.count_down().await.unwrap();
    expect(&mut watch, &latch, ["counted 1"]).await;
    open.count_down().await.unwrap();
    expect(&mut watch, &latch, ["deleted"]).await;
}

async fn only_matching_names_are_watched(store: TestStore) {
    let client = store.client().await;
    let tag = unique("pattern");
    // Characters that have a meaning in patterns, and a hash tag.
    let names = ["*a", "?a", "[a]", r"\a", "^a", "\u{1b}[31m", "{x}a", "köln"];
    for name in names {
        let name = format!("{tag}{name}");
        let escaped = |c| [Some('\\').filter(|_| r"*?[]\^".contains(c)), Some(c)];
        let pattern: String = name.chars().flat_map(escaped).flatten().collect();
        let mut watch = watch(&client, &pattern).await;
        // Would match if the pattern were not escaped.
        let (_other, _) = acquire(&client, &client.lock(&format!("{tag}xa"))).await;
        let (guard, _) = acquire_seen(&mut watch, &client.lock(&name), "").await;
        free_seen(&mut watch, guard, "").await;
    }

    // The queue of a name with its own hash tag has other braces.
    let name = format!("{tag}{{y}}fair");
    let mut watch = watch(&client, &format!("{tag}{{y}}*")).await;
    let (_guard, _) = acquire_seen(&mut watch, &client.fair_lock(&name), "").await;
    let other = store.client().await.fair_lock(&name);
    let waiter = tokio::spawn(async move { drop(other.lock().await) });
    let waits = next(&mut watch).await;
    assert!(waits.starts_with(&format!("{name} waiting ")), "{waits}");
    waiter.abort();
}

async fn existing_objects_come_first(store: TestStore) {
    let client = store.client_with_prefix("p*").await;
    let name = unique("existing");
    let (_guard, owner) = acquire(&client, &client.lock(&name)).await;
    let counter = format!("{name}-counter");
    client.semaphore(&counter).try_set_permits(3).await.unwrap();
    let mut watch = client.watch(&format!("{name}*"));
    let mut events = Vec::new();
    loop {
        match next(&mut watch).await.as_str() {
            "synchronized" => break,
            event => events.push(event.to_owned()),
        }
    }
    events.sort();
    let held = format!("{name} held {owner}");
    assert_eq!(events, [held, format!("{counter} counted 3")]);
    let event = async {
        client.semaphore(&counter).add_permits(1).await.unwrap();
        watch.next().await.unwrap()
    };
    match within_limit("an event", event).await {
        Event::Changed {
            name, kind, change, ..
        } => {
            assert_eq!((name, kind), (counter, ObjectKind::Counter));
            assert_eq!(change, Change::Counted(4));
        }
        other => panic!("{other:?}"),
    }
}

/// On the paused clock, to the millisecond.
#[tokio::test(start_paused = true)]
async fn expiry_is_seen_when_it_happens() {
    let [client, other] = embedded_clients();
    let mut watch = watch(&other, "a").await;
    let begun = Instant::now();
    let lease = Duration::from_secs(30);
    let owner = Owner::new();
    let lock = client.lock("a");
    let _guard = lock.lock().lease(lease).owner(owner).await.unwrap();
    let owner = client.owner_id(owner);
    expect(&mut watch, "a", [&format!("acquired {owner}")]).await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
    expect(&mut watch, "a", [&format!("expired {owner}")]).await;
    assert!(begun.elapsed() - lease <= Duration::from_millis(2));
}

/// Renewals change nothing that an event is about.
#[tokio::test(start_paused = true)]
async fn renewed_lock_is_released_and_not_expired() {
    let client = Client::embedded();
    let mut watch = watch(&client, "*").await;
    let (guard, _) = acquire_seen(&mut watch, &client.lock("a"), "").await;
    let hour = Duration::from_secs(3600);
    let quiet = tokio::time::timeout(hour, watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    // Also if nothing has looked at it for a while.
    sleep(hour).await;
    free_seen(&mut watch, guard, "").await;
}

#[tokio::test]
async fn expiry_on_a_server_is_seen_as_such() {
    let (server, client) = server_and_client().await;
    let mut watch = watch(&client, "*").await;
    let owner = Owner::new();
    let lock = client.lock("a");
    let _guard = lock.lock().lease(SHORT).owner(owner).await.unwrap();
    let owner = client.owner_id(owner);
    expect(&mut watch, "a", [&format!("acquired {owner}")]).await;
    let lease = SHORT.as_millis().to_string();
    let () = server.command(&["SET", "number", "1", "PX", &lease]);
    expect(&mut watch, "number", ["counted 1"]).await;
    expect(&mut watch, "a", [&format!("expired {owner}")]).await;
    expect(&mut watch, "number", ["deleted"]).await;
}

/// `a` and `{a}` have one queue in Redisson's layout.
#[tokio::test]
async fn waiter_is_seen_for_the_lock_that_exists() {
    let (_server, client) = server_and_client().await;
    let mut watch = watch(&client, "*").await;
    for name in ["a", "{a}"] {
        let (guard, _) = acquire_seen(&mut watch, &client.fair_lock(name), "").await;
        let (lock, waiting) = (client.fair_lock(name), Owner::new());
        let waiter = tokio::spawn(async move { drop(lock.lock().owner(waiting).await) });
        let waiting = client.owner_id(waiting);
        expect(&mut watch, name, [&format!("waiting {waiting}")]).await;
        waiter.abort();
        expect(&mut watch, name, [&format!("gave-up {waiting}")]).await;
        free_seen(&mut watch, guard, "").await;
    }
}

#[tokio::test]
async fn deleted_data_is_seen() {
    let (server, client) = server_and_client().await;
    let mut watch = watch(&client, "*").await;
    let (_guard, owner) = acquire_seen(&mut watch, &client.lock("a"), "").await;
    let _: String = server.command(&["FLUSHALL"]);
    expect(&mut watch, "a", [&format!("released {owner}")]).await;
    let (_guard, _) = acquire_seen(&mut watch, &client.lock("b"), "").await;
}

/// What changed without a connection is emitted afterwards.
#[tokio::test]
async fn differences_are_emitted_after_an_interruption() {
    let (server, proxy) = proxied_server();
    let direct = client(&server).await;
    let watching = Client::connect(&proxy.url()).await.unwrap();
    let mut watch = watch(&watching, "*").await;
    let (released, first) = acquire_seen(&mut watch, &direct.lock("a"), "").await;
    let (_kept, _) = acquire_seen(&mut watch, &direct.lock("b"), "").await;

    cut_off(&proxy);
    assert_eq!(next(&mut watch).await, "interrupted");
    free(released).await;
    let (_new, third) = acquire(&direct, &direct.lock("c")).await;
    let (brief, _) = acquire(&direct, &direct.lock("d")).await;
    free(brief).await;
    proxy.refuse(false);
    expect(&mut watch, "c", [&format!("acquired {third}")]).await;
    expect(&mut watch, "a", [&format!("released {first}")]).await;
    assert_eq!(next(&mut watch).await, "synchronized");
    let (_again, _) = acquire_seen(&mut watch, &direct.lock("d"), "").await;
}

#[tokio::test]
async fn watch_survives_restart_of_the_server() {
    let (mut server, client) = server_and_client().await;
    let mut watch = watch(&client, "*").await;
    let (_guard, owner) = acquire_seen(&mut watch, &client.lock("a"), "").await;
    server.kill();
    assert_eq!(next(&mut watch).await, "interrupted");
    server.restart();
    expect(&mut watch, "a", [&format!("released {owner}")]).await;
    assert_eq!(next(&mut watch).await, "synchronized");
    let (_guard, _) = acquire_seen(&mut watch, &client.lock("b"), "").await;
}

/// A watch that is not polled keeps each changed name once, and catches up with one look.
#[tokio::test]
async fn slow_reader_gets_the_remaining_differences() {
    let (server, client) = server_and_client().await;
    let mut watch = watch(&client, "*").await;
    let owner = |n: usize| format!("client:{n}");
    for n in 0..1000 {
        let () = server.command(&["DEL", "a"]);
        let () = server.command(&["HSET", "a", &owner(n), "1"]);
    }
    // More names than are kept.
    let script = "for i = 1, 30000 do
        redis.call('HSET', 'b' .. i, 'client:1', 1)
        if i > 10 then redis.call('DEL', 'b' .. i) end
    end";
    let () = server.command(&["EVAL", script, "0"]);
    let mut events = Vec::new();
    for _ in 0..11 {
        events.push(next(&mut watch).await);
    }
    events.sort();
    assert_eq!(events[0], format!("a acquired {}", owner(999)));
    assert_eq!(events[1], "b1 acquired client:1");
    let () = server.command(&["DEL", "a"]);
    expect(&mut watch, "a", [&*format!("released {}", owner(999))]).await;
}

/// Drops `next` at every point.
#[tokio::test]
async fn events_are_not_lost_if_next_is_dropped() {
    let (_server, client) = server_and_client().await;
    let mut watch = watch(&client, "*").await;
    for n in 0..20 {
        let name = n.to_string();
        let (guard, owner) = acquire(&client, &client.lock(&name)).await;
        let event = loop {
            if let Some(event) = poll_up_to(1, watch.next()).await {
                break event.unwrap();
            }
            sleep(Duration::from_millis(1)).await;
        };
        assert_eq!(in_one_line(event), format!("{name} acquired {owner}"));
        free_seen(&mut watch, guard, "").await;
    }
}

#[tokio::test]
async fn dropped_watch_leaves_nothing_behind() {
    let (server, client) = server_and_client().await;
    let before = server.clients();
    let watches = [watch(&client, "a*").await, watch(&client, "b*").await];
    assert_eq!(server.clients(), before + 2);
    drop(watches);
    until("the connections end", async || server.clients() == before).await;
    assert_eq!(server.info("tracking_clients"), "0");
    // Also if it has not started yet.
    poll_up_to(2, client.watch("c*").next()).await;
    until("the connection ends", async || server.clients() == before).await;
}

#[test]
fn watch_works_in_the_next_runtime() {
    let server = Server::start();
    let first = runtime();
    let (client, mut watch) = first.block_on(async {
        let client = client(&server).await;
        let watch = watch(&client, "*").await;
        (client, watch)
    });
    drop(first);
    runtime().block_on(async {
        let (_guard, owner) = acquire(&client, &client.lock("a")).await;
        assert_eq!(next(&mut watch).await, "interrupted");
        expect(&mut watch, "a", [&format!("acquired {owner}")]).await;
        assert_eq!(next(&mut watch).await, "synchronized");
    });
}

#[test]
fn runtime_without_timers_is_an_error() {
    let client = Client::embedded();
    let mut watch = client.watch("*");
    let mut bare = tokio::runtime::Builder::new_current_thread();
    let bare = bare.build().unwrap();
    assert_matches!(bare.block_on(watch.next()), Err(Error::NoRuntime));
    assert_eq!(runtime().block_on(next(&mut watch)), "synchronized");
    assert_matches!(bare.block_on(watch.next()), Err(Error::NoRuntime));
}

#[tokio::test]
async fn refused_reports_are_an_error_that_names_them() {
    let (server, client) = server_and_client().await;
    let _: String = server.command(&["ACL", "SETUSER", "default", "-client|tracking"]);
    let mut watch = client.watch("*");
    for _ in 0..2 {
        let error = within_limit("refused", watch.next()).await.unwrap_err();
        assert_matches!(error, Error::NotPermitted { .. });
        assert!(error.to_string().contains("client|tracking"), "{error}");
    }
    let _: String = server.command(&["ACL", "SETUSER", "default", "+client|tracking"]);
    assert_eq!(next(&mut watch).await, "synchronized");
}

async fn failover(mut deployment: Deployment) {
    let client = deployment.client(Client::builder()).await;
    let mut watch = watch(&client, "*").await;
    let (_guard, _) = acquire_seen(&mut watch, &client.lock("a"), "").await;
    let old = deployment.master("a");
    deployment.kill(old);
    assert_eq!(next(&mut watch).await, "interrupted");
    // Until it knows the new master, it may also see that there is none, or a state without the lock.
    let events = async {
        while next(&mut watch).await != "synchronized" {}
        let lock = client.lock("b");
        let guard = retry_transient(|| lock.lock()).await;
        let wanted = format!("b acquired {}", client.owner_id(guard.owner()));
        while next(&mut watch).await != wanted {}
    };
    within_limit("it follows the failover", events).await;
}

#[tokio::test]
async fn watch_follows_failover_behind_sentinels() {
    failover(Deployment::sentinel()).await;
}

#[tokio::test]
async fn watch_follows_failover_in_cluster() {
    failover(Deployment::cluster()).await;
}

/// A node that gets its first slots does not break any connection.
#[tokio::test]
async fn watch_follows_slot_to_a_new_node() {
    let mut cluster = Cluster::start();
    let added = cluster.add_node();
    let client = Client::connect(&cluster.url()).await.unwrap();
    let mut watch = watch(&client, "*").await;
    let (guard, _) = acquire_seen(&mut watch, &client.lock("a"), "").await;
    cluster.move_slot(cluster.slot_of("a"), added);
    assert_eq!(next(&mut watch).await, "interrupted");
    assert_eq!(next(&mut watch).await, "synchronized");
    free_seen(&mut watch, guard, "").await;
}
