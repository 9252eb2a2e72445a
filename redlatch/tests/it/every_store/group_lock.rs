//! Tests of the locks of a group's values. The behavior that they share with other locks is tested in lock_kinds.rs, and
//! what Redisson and redlatch share in interop/.

use redlatch::GroupValue;

use crate::common::prelude::*;

/// The field of the value `a`, computed by Redisson 4.7.0 with its default codec.
const FIELD_OF_A: &str = "Jon6GCcO+0QSJkhre5wXYA";

on_every_store! {
    overlapping_sets_exclude_each_other,
    owner_holds_values_through_several_handles,
    values_wait_in_queues_of_their_own,
    forced_unlock_releases_one_value,
    prefix_belongs_to_the_group,
    group_is_not_shown_as_another_object,
}

async fn overlapping_sets_exclude_each_other(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("group");
    let guard = held(&one.multi_lock(&name, ["a", "b"])).await;
    let others = two.multi_lock(&name, ["b", "c"]);
    assert!(others.try_lock().await.unwrap().is_none());
    let last = two.group_lock(&name, "c");
    // A refused set holds no value.
    assert!(!last.is_locked().await.unwrap());
    let waiting = waiter_of(&two, others.lock()).await;
    free(guard).await;
    let guard = joined("woken", waiting).await;
    assert!(last.is_locked().await.unwrap());
    assert!(!one.group_lock(&name, "a").is_locked().await.unwrap());
    free(guard).await;
    assert!(!last.is_locked().await.unwrap());
    for client in [one, two] {
        client.flush().await;
        assert_idle(&client);
    }
}

async fn owner_holds_values_through_several_handles(store: TestStore) {
    let (client, me) = (store.client().await, Owner::new());
    let name = unique("group");
    let locks = ["a", "b", "c"].map(|value| client.group_lock(&name, value));
    let counts = async || {
        let mut counts = Vec::new();
        for lock in &locks {
            counts.push(lock.hold_count(me).await.unwrap());
        }
        counts
    };
    let one = client.multi_lock(&name, ["a", "b"]);
    let one = one.lock().owner(me).await.unwrap();
    let two = client.multi_lock(&name, ["b", "c", "b"]);
    let two = two.lock().owner(me).await.unwrap();
    assert_eq!(counts().await, [1, 2, 1]);
    // A value that is named twice is acquired once.
    assert_eq!(two.names().count(), 2);
    free(one).await;
    assert_eq!(counts().await, [0, 1, 1]);
    free(two).await;
    assert_eq!(counts().await, [0, 0, 0]);
}

/// A waiter for one value does not delay a request for another one, not even of an owner for whose release it waits.
async fn values_wait_in_queues_of_their_own(store: TestStore) {
    let (client, me) = (store.client().await, Owner::new());
    let name = unique("group");
    let [a, b] = ["a", "b"].map(|value| client.group_lock(&name, value));
    let held = a.lock().owner(me).await.unwrap();
    let waiting = waiter_of(&client, a.lock()).await;
    let second = within_limit("another value", b.lock().owner(me));
    let second = second.await.unwrap();
    free(held).await;
    free(joined("woken", waiting).await).await;
    free(second).await;
}

async fn forced_unlock_releases_one_value(store: TestStore) {
    let client = store.client().await;
    let name = unique("group");
    let [a, b] = ["a", "b"].map(|value| client.group_lock(&name, value));
    let (lost, kept) = (held(&a).await, held(&b).await);
    assert!(a.force_unlock().await.unwrap());
    assert!(!a.force_unlock().await.unwrap());
    assert_lost(lost.unlock().await, Loss::NotHeld);
    assert!(b.is_held_by(kept.owner()).await.unwrap());
    free(kept).await;
}

async fn prefix_belongs_to_the_group(store: TestStore) {
    let (plain, prefixed) = (store.client().await, store.client_with_prefix("p:").await);
    let name = unique("group");
    let _held = held(&prefixed.group_lock(&name, "a")).await;
    assert!(!plain.group_lock(&name, "a").is_locked().await.unwrap());
}

async fn group_is_not_shown_as_another_object(store: TestStore) {
    let client = store.client().await;
    let name = unique("group");
    let lock = client.group_lock(&name, "a");
    let guard = held(&lock).await;
    assert_matches!(client.inspect(&name).await, Err(Error::WrongKind { .. }));
    let mut listing = client.list(&name);
    assert_eq!(listing.next().await.unwrap(), None);
    assert!(client.lock(&name).force_unlock().await.is_err());
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    free(guard).await;
}

/// The watchdog renews all holds in a group: of several owners, and through several handles. Redisson renews those of the
/// first thread only.
#[tokio::test(start_paused = true)]
async fn all_holds_of_a_group_are_renewed_for_hours() {
    let [one, two] = embedded_clients();
    let guards = [
        held(&one.multi_lock("group", ["a", "b"])).await,
        held(&one.multi_lock("group", ["c", "d"])).await,
        held(&two.multi_lock("group", ["e"])).await,
    ];
    sleep(3 * 3600 * SECOND).await;
    for value in ["a", "b", "c", "d", "e"] {
        let lock = two.group_lock("group", value);
        assert!(lock.is_locked().await.unwrap(), "{value}");
    }
    for guard in guards {
        assert!(guard.is_valid());
        free(guard).await;
    }
}

/// The hold of a dead client ends with its lease, although another value keeps the hash of the group alive.
#[tokio::test(start_paused = true)]
async fn value_of_a_dead_client_is_free_after_its_lease() {
    let [dead, alive] = embedded_clients();
    let _kept = alive.group_lock("group", "b").lock().await.unwrap();
    let (theirs, lock) = (
        dead.group_lock("group", "a"),
        alive.group_lock("group", "a"),
    );
    let lost = theirs.lock().lease(10 * SECOND).await.unwrap();
    let begun = tokio::time::Instant::now();
    let next = held(&lock).await;
    assert_took(begun.elapsed(), 10 * SECOND..11 * SECOND);
    assert_lost(lost.unlock().await, Loss::LeaseEnded);
    dead.flush().await;
    assert!(next.is_valid());
    assert!(lock.is_held_by(next.owner()).await.unwrap());
}

/// Returns the fields of a hash, in order.
fn fields(server: &Server, key: &str) -> Vec<(String, String)> {
    let mut fields: Vec<(String, String)> = server.command(&["HGETALL", key]);
    fields.sort();
    fields
}

#[tokio::test]
async fn fields_are_those_of_redisson() {
    let (server, client) = server_and_client().await;
    let lock = client.group_lock("group", "a");
    let guard = lock.lock().lease(LONG).await.unwrap();
    let again = guard.reenter().await.unwrap();
    let owner = guard.owner_id();
    let held = fields(&server, "group");
    let [(value, named), (end_field, end), (count_field, count)] = &held[..] else {
        panic!("{held:?}");
    };
    assert_eq!((&**value, &**named), (FIELD_OF_A, owner.as_str()));
    let field = |suffix| format!("{FIELD_OF_A}:{owner}:{suffix}");
    assert_eq!((count_field, count.as_str()), (&field("lock_count"), "2"));
    assert_eq!(end_field, &field("expire_time"));
    let (seconds, _): (u64, u64) = server.command(&["TIME"]);
    let left = end.parse::<u64>().unwrap() / 1000 - seconds;
    assert!((20..=60).contains(&left), "{left}");
    free(again).await;
    free(guard).await;
    assert_eq!(fields(&server, "group"), []);
}

/// A client in Java died. Its fields are removed with its hold, because a late release there would read only these.
#[tokio::test]
async fn fields_of_an_ended_hold_are_removed() {
    let (server, client) = server_and_client().await;
    let acquire_in_java = |end: &str| {
        let [ends, count] =
            ["expire_time", "lock_count"].map(|suffix| format!("{FIELD_OF_A}:java:1:{suffix}"));
        let fields = [FIELD_OF_A, "java:1", &ends, end, &count, "1"];
        let _: i64 = server.command(&[&["HSET", "group"], &fields[..]].concat());
    };
    acquire_in_java("1700000000000");
    let lock = client.group_lock("group", "a");
    assert!(!lock.is_locked().await.unwrap());
    let guard = lock.try_lock().lease(LONG).await.unwrap();
    let guard = guard.expect("it is free");
    let owner = guard.owner_id();
    let is_of = |field: &(String, String), owner: &str| field.0.contains(owner);
    let left = fields(&server, "group");
    assert!(!left.iter().any(|field| is_of(field, "java")), "{left:?}");
    // Java acquires the value when this lease has ended, and leaves these fields behind.
    acquire_in_java("4000000000000");
    assert_lost(guard.unlock().await, Loss::NotHeld);
    let left = fields(&server, "group");
    let of_own = left.iter().any(|field| is_of(field, owner.as_str()));
    assert!(!of_own, "{left:?}");
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(lock.try_lock().await.unwrap().is_none());
}

/// One script acquires all values, and one renews them.
#[tokio::test]
async fn one_script_acquires_all_values() {
    let server = Server::start();
    let client = unregistered_client(&server).await;
    let all = client.multi_lock("group", (0..50).map(|value| format!("value-{value}")));
    // Loads the scripts.
    free(held(&all).await).await;
    let before = server.calls("evalsha:");
    let guard = held(&all).await;
    assert_eq!(server.calls("evalsha:"), before + 1);
    assert_eq!(fields(&server, "group").len(), 150);
    free(guard).await;
    assert_eq!(fields(&server, "group"), []);
}

/// Neither a group nor a lock of another kind changes the other.
#[tokio::test]
async fn lock_of_another_kind_is_refused() {
    let (server, client) = server_and_client().await;
    let group = client.multi_lock("name", ["a", "b"]);
    let guard = held(&client.lock("name")).await;
    let before = fields(&server, "name");
    assert_matches!(group.try_lock().await, Err(Error::WrongKind { .. }));
    assert_eq!(fields(&server, "name"), before);
    free(guard).await;
    let reader = held(&client.read_write_lock("name").read()).await;
    assert_matches!(group.try_lock().await, Err(Error::WrongKind { .. }));
    free(reader).await;
    let guard = held(&group).await;
    assert!(client.lock("name").try_lock().await.unwrap().is_none());
    free(guard).await;
    assert!(client.lock("name").try_lock().await.unwrap().is_some());
}

/// A value that expired with all data is free for other owners, and its waiters are woken when the holder notices.
#[tokio::test]
async fn deleted_group_is_reported_and_wakes_waiters() {
    let server = Server::start();
    let (one, two) = (client(&server).await, client(&server).await);
    let guard = held(&one.multi_lock("group", ["a", "b"])).await;
    let waiting = waiter_of(&two, two.group_lock("group", "b").lock()).await;
    let _: i64 = server.command(&["DEL", "group"]);
    assert_lost(guard.unlock().await, Loss::NotHeld);
    drop(joined("woken", waiting).await);
}

#[tokio::test(start_paused = true)]
async fn values_of_different_types_and_codecs_are_different() {
    let client = Client::embedded();
    let values = || {
        [
            GroupValue::from("1"),
            GroupValue::from(1i32),
            GroupValue::from(1i64),
            GroupValue::from_encoded("1"),
        ]
    };
    let mut guards = Vec::new();
    for value in values() {
        let lock = client.group_lock("group", value);
        guards.push(lock.try_lock().await.unwrap().expect("another value"));
    }
    for value in values() {
        let lock = client.group_lock("group", value);
        assert!(lock.try_lock().await.unwrap().is_none());
    }
}
