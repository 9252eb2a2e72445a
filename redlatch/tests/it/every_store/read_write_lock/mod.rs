//! Conformance tests: the read-write lock behaves the same on every store.

mod blocking;
mod in_virtual_time;
mod on_a_server;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::AtomicI32;

use redlatch::{ReadLock, ReadWriteLock};
use tokio::sync::Barrier;

use crate::common::prelude::*;

on_every_store! {
    readers_share_and_writers_are_exclusive,
    both_sides_are_reentrant,
    writer_can_also_read_and_release_in_any_order,
    writer_that_also_reads_excludes_others_from_both_sides,
    request_of_writer_for_another_owner_waits_as_any_other,
    all_waiting_readers_are_admitted_together,
    reader_that_requests_write_side_fails_immediately,
    reader_that_requests_write_side_behind_others_fails_immediately,
    writer_that_requests_read_side_does_not_wait_behind_others,
    downgrading_admits_no_writer_in_between,
    downgrading_admits_waiting_readers,
    downgrading_one_of_two_holds_keeps_others_out,
    downgrading_keeps_a_fixed_lease_fixed,
    downgrading_a_lost_hold_is_an_error,
    lost_writer_that_requests_read_side_fails_immediately,
    releasing_the_write_side_first_admits_waiting_readers,
    dead_reader_expires_despite_live_readers,
    every_read_hold_is_renewed,
    shorter_lease_does_not_shorten_a_hold,
    released_reader_leaves_longest_remaining_lease,
    non_reentrant_side_refuses_its_owner,
    each_side_is_force_unlocked_separately,
    guard_reports_expired_lease,
    owner_can_acquire_again_after_losing_read_side,
    preferred_writer_is_admitted_despite_stream_of_readers,
    preferred_writer_blocks_only_new_readers,
    preferred_writer_that_gives_up_admits_readers,
    try_lock_of_preferred_writer_blocks_no_reader,
    readers_and_writers_exclude_each_other,
    invalid_names_and_leases_are_rejected,
    plain_lock_of_the_same_name_is_another_kind,
    prefixes_and_hash_tags_belong_to_the_name,
    request_dropped_anywhere_leaves_nothing_behind,
    no_state_remains_after_release,
}

async fn lock_of(store: &TestStore, name: &str) -> (Client, ReadWriteLock) {
    let client = store.client().await;
    let lock = client.read_write_lock(&unique(name));
    (client, lock)
}

/// Returns when a request of this client waits.
async fn until_waiting(client: &Client) {
    until("it waits", async || client.status().subscriptions > 0).await;
}

/// Waits until a preferred writer keeps new readers out.
async fn until_refused(read: &ReadLock) {
    until("it is remembered", async || {
        let reader = read.try_lock().await.unwrap();
        let is_refused = reader.is_none();
        free_all(reader).await;
        is_refused
    })
    .await;
}

async fn is_free(lock: &ReadWriteLock) -> bool {
    !lock.read().is_locked().await.unwrap() && !lock.write().is_locked().await.unwrap()
}

async fn readers_share_and_writers_are_exclusive(store: TestStore) {
    let (client, lock) = lock_of(&store, "share").await;
    let (read, write) = (lock.read(), lock.write());
    assert!(is_free(&lock).await);
    assert_eq!(lock.name(), read.name());

    let one = held(&read).await;
    let two = read.try_lock().await.unwrap().unwrap();
    let elsewhere = store.client().await;
    let three = elsewhere.read_write_lock(lock.name());
    let three = held(&three.read()).await;
    assert!(read.is_locked().await.unwrap() && !write.is_locked().await.unwrap());
    assert!(write.try_lock().await.unwrap().is_none());
    let mut readers: Vec<_> = read.holders().await.unwrap();
    readers.sort_by(|a, b| a.owner.cmp(&b.owner));
    let mut owners = [&one, &two, &three].map(|guard| guard.owner_id());
    owners.sort();
    assert!(readers.iter().map(|holder| &holder.owner).eq(&owners));
    assert!(readers.iter().all(|holder| holder.holds == 1));
    let left = lease_left(&read).await;
    assert!(left > Duration::ZERO && left <= Duration::from_secs(30));
    for guard in [one, two, three] {
        assert!(read.is_locked().await.unwrap());
        assert!(write.try_lock().await.unwrap().is_none());
        assert!(guard.is_valid());
        free(guard).await;
    }
    assert!(is_free(&lock).await);

    let writer = held(&write).await;
    assert!(write.is_locked().await.unwrap() && !read.is_locked().await.unwrap());
    assert!(write.try_lock().await.unwrap().is_none());
    assert!(read.try_lock().await.unwrap().is_none());
    assert!(write.is_held_by(writer.owner()).await.unwrap());
    assert!(!read.is_held_by(writer.owner()).await.unwrap());
    // The owner is written in the usual form, although the hash field is different.
    assert_eq!(writer.owner_id(), client.owner_id(writer.owner()));
    let holder = write.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, writer.owner_id());
    free(writer).await;
    assert!(is_free(&lock).await);
}

async fn both_sides_are_reentrant(store: TestStore) {
    let (_client, lock) = lock_of(&store, "again").await;
    let me = Owner::new();

    let read = lock.read();
    let mut guards = Vec::new();
    for n in 1..=4 {
        guards.push(read.lock().owner(me).await.unwrap());
        assert_eq!(read.hold_count(me).await.unwrap(), n);
    }
    guards.push(guards[0].reenter().await.unwrap());
    for (n, guard) in guards.into_iter().enumerate() {
        assert_eq!(read.hold_count(me).await.unwrap() as usize, 5 - n);
        assert!(lock.write().try_lock().await.unwrap().is_none());
        free(guard).await;
    }
    assert!(is_free(&lock).await);

    let write = lock.write();
    let mut guards = Vec::new();
    for n in 1..=4 {
        guards.push(write.lock().owner(me).await.unwrap());
        assert_eq!(write.hold_count(me).await.unwrap(), n);
    }
    while let Some(guard) = guards.pop() {
        assert!(read.try_lock().await.unwrap().is_none());
        free(guard).await;
        assert_eq!(write.hold_count(me).await.unwrap() as usize, guards.len());
    }
    assert!(is_free(&lock).await);
}

/// F15: every order in which two holds of each side can be released, and acquired after the first.
async fn writer_can_also_read_and_release_in_any_order(store: TestStore) {
    let (client, lock) = lock_of(&store, "orders").await;
    // Side that is acquired next, after a first write hold: 0 is write, 1 is read.
    for taken in [[0, 1, 1], [1, 0, 1], [1, 1, 0]] {
        for order in permutations(4) {
            let me = Owner::new();
            let (mut read_guards, mut write_guards) = (BTreeMap::new(), BTreeMap::new());
            for (n, side) in [0].into_iter().chain(taken).enumerate() {
                if side == 0 {
                    write_guards.insert(n, lock.write().lock().owner(me).await.unwrap());
                } else {
                    read_guards.insert(n, lock.read().lock().owner(me).await.unwrap());
                }
            }
            for n in order {
                if let Some(guard) = write_guards.remove(&n) {
                    assert!(guard.is_valid());
                    free(guard).await;
                }
                if let Some(guard) = read_guards.remove(&n) {
                    assert!(guard.is_valid());
                    free(guard).await;
                }
                let (reads, writes) = (read_guards.len() as u32, write_guards.len() as u32);
                assert_eq!(lock.write().hold_count(me).await.unwrap(), writes);
                assert_eq!(lock.read().hold_count(me).await.unwrap(), reads);
                // Others may read exactly while there is no write hold, and write while there is no
                // hold at all.
                let reader = lock.read().try_lock().await.unwrap();
                assert_eq!(reader.is_some(), writes == 0, "{taken:?}");
                free_all(reader).await;
                let writer = lock.write().try_lock().await.unwrap();
                assert_eq!(writer.is_some(), writes + reads == 0, "{taken:?}");
                free_all(writer).await;
            }
        }
    }
    assert!(is_free(&lock).await);
    assert_eq!(client.status().holds, 0);
}

/// Returns all permutations of the numbers below `n`.
fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for shorter in permutations(n - 1) {
        for at in 0..n {
            let mut longer = shorter.clone();
            longer.insert(at, n - 1);
            all.push(longer);
        }
    }
    all
}

async fn writer_that_also_reads_excludes_others_from_both_sides(store: TestStore) {
    let (_client, lock) = lock_of(&store, "both").await;
    let writer = held(&lock.write()).await;
    let reader = writer.reenter_read().await.unwrap();
    assert_eq!(reader.owner(), writer.owner());
    assert!(lock.read().is_locked().await.unwrap());
    assert!(lock.write().is_locked().await.unwrap());
    assert!(lock.read().try_lock().await.unwrap().is_none());
    assert!(lock.write().try_lock().await.unwrap().is_none());
    free(reader).await;
    assert!(lock.write().is_locked().await.unwrap());
    free(writer).await;
    assert!(is_free(&lock).await);
}

async fn request_of_writer_for_another_owner_waits_as_any_other(store: TestStore) {
    let (client, lock) = lock_of(&store, "another owner").await;
    let writer = held(&lock.write()).await;
    let reading = writer.reenter_read().owner(Owner::new()).into_future();
    let reading = tokio::spawn(reading);
    until_waiting(&client).await;
    assert!(writer.is_valid());
    free(writer).await;
    free(joined("served", reading).await).await;
    assert!(is_free(&lock).await);
}

/// F17. Each admitted reader waits for all the others while holding the lock.
async fn all_waiting_readers_are_admitted_together(store: TestStore) {
    const READERS: usize = 30;
    let clients: [Client; 2] = store.clients().await;
    let name = unique("together");
    let holder = store.client().await;
    let writer = holder.read_write_lock(&name);
    let writer = writer.write().lock().lease(10 * LONG).await.unwrap();
    let (barrier, begun) = (Arc::new(Barrier::new(READERS)), Arc::new(AtomicU32::new(0)));
    let readers = spawn_each(0..READERS, |n| {
        let lock = clients[n % 2].read_write_lock(&name);
        let (barrier, begun) = (barrier.clone(), begun.clone());
        async move {
            begun.fetch_add(1, Ordering::SeqCst);
            let guard = held(&lock.read()).await;
            barrier.wait().await;
            free(guard).await;
        }
    });
    // A local writer in the queue does not split the readers: they are all admitted before it or
    // after it.
    let lock = clients[0].read_write_lock(&name);
    let next = tokio::spawn(async move { lock.write().lock().await?.unlock().await });
    until("all have begun", async || {
        begun.load(Ordering::SeqCst) as usize == READERS
    })
    .await;
    for client in &clients {
        until_waiting(client).await;
    }
    free(writer).await;
    done_all("inside together", readers).await;
    joined("after them", next).await;
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Error>) {
    assert_matches!(answer, Err(Error::WriteWhileReading { .. }));
}

async fn reader_that_requests_write_side_fails_immediately(store: TestStore) {
    let (client, lock) = lock_of(&store, "upgrade").await;
    let me = Owner::new();
    let mine = lock.read().lock().owner(me).await.unwrap();
    for others_read in [false, true] {
        let mut other = None;
        if others_read {
            other = Some(held(&lock.read()).await);
        }
        let write = lock.write();
        refused(within_limit("answered", write.lock().owner(me)).await);
        refused(write.try_lock().owner(me).await);
        let wait = write.try_lock().owner(me).wait(LONG);
        refused(within_limit("answered", wait).await);
        drop(other);
        client.flush().await;
    }
    assert!(mine.is_valid());
    assert_eq!(lock.read().hold_count(me).await.unwrap(), 1);
    free(mine).await;
    free(lock.write().lock().owner(me).await.unwrap()).await;
    client.flush().await;
    assert!(is_free(&lock).await);
}

async fn reader_that_requests_write_side_behind_others_fails_immediately(store: TestStore) {
    let (client, lock) = lock_of(&store, "upgrade-line").await;
    for lock in [lock.clone(), lock.prefer_writers()] {
        let me = Owner::new();
        let mine = lock.read().lock().owner(me).await.unwrap();
        let waiting = waiter_of(&client, lock.write().lock()).await;
        // In the queue, it would wait for a waiter that waits for it.
        refused(within_limit("answered", lock.write().lock().owner(me)).await);
        free(mine).await;
        free(joined("served", waiting).await).await;
    }
}

async fn writer_that_requests_read_side_does_not_wait_behind_others(store: TestStore) {
    let (client, lock) = lock_of(&store, "read-line").await;
    let writer = held(&lock.write()).await;
    let read = tokio::spawn(lock.read().lock().into_future());
    let write = waiter_of(&client, lock.write().lock()).await;
    let reader = done("at once", writer.reenter_read()).await;
    let again = done("at once", writer.reenter()).await;
    free_all([writer, again]).await;
    let read = joined("reads with it", read).await;
    free(reader).await;
    free(read).await;
    free(joined("writes in the end", write).await).await;
}

async fn downgrading_admits_no_writer_in_between(store: TestStore) {
    let (client, lock) = lock_of(&store, "downgrade").await;
    let other = store.client().await;
    let writer = held(&lock.write()).await;
    let theirs = other.read_write_lock(lock.name());
    let next = waiter_of(&other, theirs.write().lock()).await;
    let owner = writer.owner();
    let reader = writer.downgrade().await.unwrap();
    assert_eq!(reader.owner(), owner);
    assert!(reader.is_valid());
    assert!(!lock.write().is_locked().await.unwrap());
    assert!(!next.is_finished());
    // Others can read at the same time.
    free(lock.read().try_lock().await.unwrap().unwrap()).await;
    assert!(!next.is_finished());
    free(reader).await;
    free(joined("woken", next).await).await;
    assert_eq!(client.status().holds, 0);
}

async fn downgrading_admits_waiting_readers(store: TestStore) {
    let (client, lock) = lock_of(&store, "downgrade-wakes").await;
    let writer = lock.write().lock().lease(10 * LONG).await.unwrap();
    let waiting = waiter_of(&client, lock.read().lock()).await;
    let reader = writer.downgrade().await.unwrap();
    free(joined("woken", waiting).await).await;
    free(reader).await;
}

async fn downgrading_one_of_two_holds_keeps_others_out(store: TestStore) {
    let (_client, lock) = lock_of(&store, "downgrade-inner").await;
    let outer = held(&lock.write()).await;
    let inner = outer.reenter().await.unwrap();
    let reader = inner.downgrade().await.unwrap();
    assert_eq!(outer.hold_count(), 1);
    assert!(lock.read().try_lock().await.unwrap().is_none());
    free(outer).await;
    free(lock.read().try_lock().await.unwrap().unwrap()).await;
    free(reader).await;
    assert!(is_free(&lock).await);
}

async fn downgrading_keeps_a_fixed_lease_fixed(store: TestStore) {
    let (_client, lock) = lock_of(&store, "downgrade-lease").await;
    let writer = lock.write().lock().lease(3 * LONG).await.unwrap();
    let reader = writer.downgrade().await.unwrap();
    assert!(reader.valid_for() > 2 * LONG && reader.valid_for() <= 3 * LONG);
    free(reader).await;

    let reader = retry_if_late(|| async {
        let writer = lock.write().lock().lease(Duration::from_millis(300)).await;
        writer?.downgrade().await
    })
    .await;
    within_limit("it is not renewed", reader.lost()).await;
    free(done("free", lock.write().lock()).await).await;
}

async fn downgrading_a_lost_hold_is_an_error(store: TestStore) {
    let (client, lock) = lock_of(&store, "downgrade-lost").await;
    let writer = held(&lock.write()).await;
    assert!(lock.write().force_unlock().await.unwrap());
    let theirs = held(&lock.write()).await;
    let lost = within_limit("answered", writer.downgrade()).await;
    assert_lost(lost, Loss::NotHeld);
    client.flush().await;
    assert!(lock.write().is_held_by(theirs.owner()).await.unwrap());
    free(theirs).await;

    // Even if no other owner has acquired it since.
    let writer = held(&lock.write()).await;
    assert!(lock.write().force_unlock().await.unwrap());
    assert_matches!(writer.downgrade().await, Err(Error::Lost { .. }));
    client.flush().await;
    assert!(is_free(&lock).await);

    let writer = retry_if_late(|| lock.write().lock().lease(Duration::from_millis(50))).await;
    within_limit("ended", writer.lost()).await;
    assert_matches!(writer.downgrade().await, Err(Error::Lost { .. }));
    client.flush().await;
    assert!(is_free(&lock).await);
}

async fn lost_writer_that_requests_read_side_fails_immediately(store: TestStore) {
    let (client, lock) = lock_of(&store, "read-lost").await;
    let assert_reported = |read: Result<Guard<ReadLock>, Error>| {
        assert_matches!(read, Err(Error::Lost { .. }));
    };
    let brief = || lock.write().lock().lease(Duration::from_millis(50));
    // The client knows of the loss.
    let (writer, reader) = retry_if_late(|| async {
        let writer = brief().await?;
        let reader = writer.reenter_read().lease(LONG).await?;
        Ok((writer, reader))
    })
    .await;
    let late = writer.reenter_read();
    within_limit("ended", writer.lost()).await;
    assert_reported(within_limit("answered", writer.reenter_read()).await);
    // An owner that already reads continues as any reader does.
    free(done("entered", reader.reenter()).await).await;
    free(reader).await;
    assert_reported(within_limit("answered", late).await);
    drop(writer);
    client.flush().await;

    // Even if other waiters are queued.
    let writer = retry_if_late(brief).await;
    within_limit("ended", writer.lost()).await;
    let theirs = held(&lock.write()).await;
    let waiting = waiter_of(&client, lock.read().lock()).await;
    assert_reported(within_limit("answered", writer.reenter_read()).await);
    free(theirs).await;
    free(joined("free", waiting).await).await;

    // Only the store knows of the loss.
    let writer = held(&lock.write()).await;
    assert!(lock.write().force_unlock().await.unwrap());
    let theirs = held(&lock.write()).await;
    assert_reported(within_limit("answered", writer.reenter_read()).await);
    assert!(!writer.is_valid());
    drop(writer);
    client.flush().await;
    assert!(lock.write().is_held_by(theirs.owner()).await.unwrap());
    free(theirs).await;
    assert!(is_free(&lock).await);
}

async fn releasing_the_write_side_first_admits_waiting_readers(store: TestStore) {
    let (client, lock) = lock_of(&store, "write-first").await;
    let writer = lock.write().lock().lease(10 * LONG).await.unwrap();
    let reader = writer.reenter_read().lease(10 * LONG).await.unwrap();
    let waiting = waiter_of(&client, lock.read().lock()).await;
    free(writer).await;
    free(joined("woken", waiting).await).await;
    free(reader).await;
}

/// F12: one reader dies, another lives and is renewed; the dead one is gone after its own lease.
async fn dead_reader_expires_despite_live_readers(store: TestStore) {
    let client = store.client_with(renewing()).await;
    let lock = client.read_write_lock(&unique("dead"));
    let alive = held(&lock.read()).await;
    // Meanwhile the other reader is renewed; wait for one more renewal.
    let dead = lock.read().lock().lease(WATCHDOG).await;
    std::mem::forget(dead.unwrap());
    let other = store.client().await;
    let theirs = other.read_write_lock(lock.name());
    let writer = waiter_of(&other, theirs.write().lock()).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 2);
    let alone = async || lock.read().holders().await.unwrap().len() == 1;
    until("the dead one is gone", alone).await;
    assert!(alive.is_valid());
    assert!(!writer.is_finished());
    free(alive).await;
    free(joined("no holder is left", writer).await).await;
    assert!(is_free(&lock).await);
}

/// F13: each of many concurrent holds, including re-entered ones, is extended.
async fn every_read_hold_is_renewed(store: TestStore) {
    let client = store.client_with(renewing()).await;
    let lock = client.read_write_lock(&unique("renewed"));
    let mut guards = Vec::new();
    for n in 0..40 {
        let guard = held(&lock.read()).await;
        if n % 4 == 0 {
            guards.push(guard.reenter().await.unwrap());
        }
        guards.push(guard);
    }
    let ends = || async {
        let holders = lock.read().holders().await.unwrap().into_iter();
        HashMap::<_, _>::from_iter(holders.map(|holder| (holder.owner, holder.remaining)))
    };
    let mut before = ends().await;
    assert_eq!(before.len(), 40);
    let mut to_be_seen: HashSet<_> = before.keys().cloned().collect();
    while !to_be_seen.is_empty() {
        let now = ends().await;
        assert_eq!(now.len(), 40, "one has ended");
        to_be_seen.retain(|owner| now[owner] <= before[owner]);
        before = now;
        assert!(guards.iter().all(Guard::is_valid));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(guards.iter().all(Guard::is_valid));
    free_all(guards).await;
    assert!(is_free(&lock).await);
    assert_eq!(client.status().holds, 0);
}

/// F16, for both sides.
async fn shorter_lease_does_not_shorten_a_hold(store: TestStore) {
    let (_client, lock) = lock_of(&store, "shorter").await;
    let short = LONG / 4;

    let outer = lock.read().lock().lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(short).await.unwrap();
    assert!(lease_left(&lock.read()).await > LONG / 2);
    free(inner).await;
    assert!(lease_left(&lock.read()).await > LONG / 2);
    free(outer).await;
    assert!(is_free(&lock).await);

    // The longer one is released first: the end stays, because the guards rely on it.
    let outer = lock.read().lock().lease(short).await.unwrap();
    free(outer.reenter().lease(LONG).await.unwrap()).await;
    assert!(outer.valid_for() > LONG / 2);
    assert!(lease_left(&lock.read()).await > LONG / 2);
    free(outer).await;
    assert!(is_free(&lock).await);

    let outer = lock.write().lock().lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(short).await.unwrap();
    let reader = outer.reenter_read().lease(short).await.unwrap();
    for _ in 0..2 {
        assert!(lease_left(&lock.write()).await > LONG / 2);
    }
    free(reader).await;
    assert!(lease_left(&lock.write()).await > LONG / 2);
    free(inner).await;
    assert!(lease_left(&lock.write()).await > LONG / 2);
    assert!(outer.is_valid());
    free(outer).await;
    assert!(is_free(&lock).await);
}

/// The key lives exactly as long as the longest remaining lease.
async fn released_reader_leaves_longest_remaining_lease(store: TestStore) {
    let (_client, lock) = lock_of(&store, "left").await;
    let long = lock.read().lock().lease(10 * LONG).await.unwrap();
    let middle = lock.read().lock().lease(5 * LONG).await.unwrap();
    let short = lock.read().lock().lease(2 * LONG).await.unwrap();
    let left = async || lease_left(&lock.read()).await;
    assert!(left().await > 9 * LONG);
    free(long).await;
    assert!(left().await > 4 * LONG && left().await <= 5 * LONG);
    free(short).await;
    assert!(left().await > 4 * LONG);
    free(middle).await;

    // An owner that wrote with a long lease, and now reads with a shorter one, is a reader like
    // others.
    let writer = lock.write().lock().lease(10 * LONG).await.unwrap();
    let reader = writer.reenter_read().lease(2 * LONG).await.unwrap();
    free(writer).await;
    assert!(left().await <= 2 * LONG);
    assert!(reader.is_valid());
    free(reader).await;
    assert!(is_free(&lock).await);
}

async fn non_reentrant_side_refuses_its_owner(store: TestStore) {
    let (_client, lock) = lock_of(&store, "once").await;
    let me = Owner::new();
    let read = lock.read().non_reentrant();
    let reader = read.lock().owner(me).await.unwrap();
    let refused = within_limit("answered", read.lock().owner(me)).await;
    assert!(matches!(refused, Err(Error::AlreadyHeld { .. })));
    free(reader).await;
    let write = lock.write().non_reentrant();
    let writer = write.lock().owner(me).await.unwrap();
    let refused = write.try_lock().owner(me).await;
    assert!(matches!(refused, Err(Error::AlreadyHeld { .. })));
    // The sides are two locks: holding one side does not refuse the other.
    free(read.lock().owner(me).await.unwrap()).await;
    free(writer).await;
}

async fn each_side_is_force_unlocked_separately(store: TestStore) {
    let client = store.client_with(renewing()).await;
    let lock = client.read_write_lock(&unique("force"));
    assert!(!lock.read().force_unlock().await.unwrap());
    assert!(!lock.write().force_unlock().await.unwrap());

    let reader = held(&lock.read()).await;
    let outer = held(&lock.read()).await;
    let inner = outer.reenter().await.unwrap();
    assert!(!lock.write().force_unlock().await.unwrap());
    assert!(lock.read().is_locked().await.unwrap());
    let waiting = waiter_of(&client, lock.write().lock()).await;
    assert!(lock.read().force_unlock().await.unwrap());
    let writer = joined("woken", waiting).await;
    for guard in [reader, outer, inner] {
        within_limit("the loss is reported at the next renewal", guard.lost()).await;
        assert_lost(guard.unlock().await, Loss::NotHeld);
    }

    assert!(!lock.read().force_unlock().await.unwrap());
    assert!(lock.write().is_locked().await.unwrap());
    let reader = writer.reenter_read().await.unwrap();
    assert!(lock.read().force_unlock().await.unwrap());
    assert!(!lock.read().is_locked().await.unwrap());
    assert!(lock.write().is_held_by(writer.owner()).await.unwrap());
    within_limit("the loss is reported", reader.lost()).await;
    drop(reader);
    let reader = writer.reenter_read().await.unwrap();
    let waiting = waiter_of(&client, lock.read().lock()).await;
    assert!(lock.write().force_unlock().await.unwrap());
    let next = joined("woken", waiting).await;
    within_limit("the loss is reported", writer.lost()).await;
    within_limit("the loss is reported", reader.lost()).await;
    assert!(next.is_valid());
    drop((writer, reader));
    client.flush().await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 1);
    free(next).await;
    assert!(is_free(&lock).await);
}

async fn guard_reports_expired_lease(store: TestStore) {
    let (client, lock) = lock_of(&store, "ended").await;
    let lease = Duration::from_millis(200);
    let reader = retry_if_late(|| lock.read().lock().lease(lease)).await;
    let writer = within_limit("free", retry_if_late(|| lock.write().lock().lease(lease))).await;
    assert!(!reader.is_valid());
    let next = done("free", lock.read().lock()).await;
    assert!(!writer.is_valid());
    for lost in [reader.unlock().await, writer.unlock().await] {
        assert_lost(lost, Loss::LeaseEnded);
    }
    client.flush().await;
    // The late releases did not affect the next holders.
    assert!(lock.read().is_held_by(next.owner()).await.unwrap());
    free(next).await;
    assert!(is_free(&lock).await);
}

async fn owner_can_acquire_again_after_losing_read_side(store: TestStore) {
    let (client, lock) = lock_of(&store, "anew").await;
    let me = Owner::new();
    // Another reader keeps the hash alive, so the dead reader's field stays in it.
    let other = held(&lock.read()).await;
    let lease = Duration::from_millis(150);
    let brief = || lock.read().lock().owner(me).lease(lease);
    let (one, two) = (retry_if_late(brief).await, retry_if_late(brief).await);
    within_limit("lost", async { tokio::join!(one.lost(), two.lost()) }).await;
    assert!(matches!(two.reenter().await, Err(Error::Lost { .. })));
    // The client counts the lease from before the request was sent, so it ends in the store last.
    let ended = async || lock.read().hold_count(me).await.unwrap() == 0;
    until("ended in the store", ended).await;
    // The expired hold no longer makes its owner a reader.
    assert!(lock.write().try_lock().owner(me).await.unwrap().is_none());
    let anew = lock.read().lock().owner(me).await.unwrap();
    assert_eq!(anew.hold_count(), 1);
    assert_eq!(lock.read().hold_count(me).await.unwrap(), 1);
    drop((one, two));
    client.flush().await;
    assert_eq!(lock.read().hold_count(me).await.unwrap(), 1);
    free(anew).await;
    free(other).await;
    assert!(is_free(&lock).await);
}

async fn preferred_writer_is_admitted_despite_stream_of_readers(store: TestStore) {
    let [readers, writers] = store.clients().await;
    let name = unique("stream");
    let read = readers.read_write_lock(&name).prefer_writers();
    let write = writers.read_write_lock(&name).prefer_writers();
    let mut reader = held(&read.read()).await;
    let writer = tokio::spawn(write.write().lock().into_future());
    // Each reader is admitted before the last one leaves: without preference for writers this would
    // never end.
    let begun = std::time::Instant::now();
    while let Some(next) = read.read().try_lock().await.unwrap() {
        assert!(begun.elapsed() < LONG, "the writer starves");
        free(std::mem::replace(&mut reader, next)).await;
    }
    assert!(reader.is_valid());
    assert!(!writer.is_finished());
    free(reader).await;
    let writer = joined("it is its turn", writer).await;
    // And the next reader is served eventually.
    let waiting = waiter_of(&readers, read.read().lock()).await;
    free(writer).await;
    free(joined("after the writer", waiting).await).await;
}

async fn preferred_writer_blocks_only_new_readers(store: TestStore) {
    let (client, plain) = lock_of(&store, "new").await;
    let lock = plain.clone().prefer_writers();
    let reader = held(&lock.read()).await;
    let writer = tokio::spawn(lock.write().lock().into_future());
    until_refused(&lock.read()).await;
    // A current reader can re-enter; a handle without the preference ignores it.
    let again = reader.reenter().await.unwrap();
    let other = plain.read().try_lock().await.unwrap().unwrap();
    for guard in [again, other, reader] {
        assert!(!writer.is_finished());
        free(guard).await;
    }
    let writer = joined("its turn", writer).await;
    // A writer may read, regardless of other waiting writers.
    let elsewhere = store.client().await;
    let next = elsewhere.read_write_lock(lock.name()).prefer_writers();
    let next = waiter_of(&elsewhere, next.write().lock()).await;
    let reader = writer.downgrade().await.unwrap();
    assert!(lock.read().try_lock().await.unwrap().is_none());
    free(reader).await;
    free(joined("its turn", next).await).await;
    client.flush().await;
    // No writer waits any more.
    free(lock.read().try_lock().await.unwrap().unwrap()).await;
}

async fn preferred_writer_that_gives_up_admits_readers(store: TestStore) {
    let [readers, writers] = store.clients().await;
    let name = unique("gives-up");
    let read = readers.read_write_lock(&name).prefer_writers();
    let write = writers.read_write_lock(&name).prefer_writers();
    for dropped in [false, true] {
        let reader = held(&read.read()).await;
        let wait = match dropped {
            true => LONG,
            false => Duration::from_millis(100),
        };
        let mut writer = write.write().try_lock().wait(wait).into_future();
        let reads = read.read();
        let remembered = tokio::select! {
            biased;
            _ = &mut writer => false,
            () = until_refused(&reads) => true,
        };
        if !remembered {
            // On a slow machine its wait limit was over first, so this round shows nothing.
            free(reader).await;
            continue;
        }
        let waiting = tokio::spawn(read.read().lock().into_future());
        match dropped {
            true => drop(writer),
            false => assert!(writer.await.unwrap().is_none()),
        }
        free(joined("admitted", waiting).await).await;
        free(reader).await;
        writers.flush().await;
        readers.flush().await;
    }
    assert!(is_free(&read).await);
    assert_eq!(writers.status().background, 0);
}

async fn try_lock_of_preferred_writer_blocks_no_reader(store: TestStore) {
    let (_client, lock) = lock_of(&store, "tries").await;
    let lock = lock.prefer_writers();
    let reader = held(&lock.read()).await;
    assert!(lock.write().try_lock().await.unwrap().is_none());
    free(lock.read().try_lock().await.unwrap().unwrap()).await;
    free(reader).await;
}

async fn readers_and_writers_exclude_each_other(store: TestStore) {
    let clients: [Client; 2] = store.clients().await;
    let name = unique("crowd");
    // Readers increment the counter, a writer needs it for itself.
    let inside = Arc::new(AtomicI32::new(0));
    let together = Arc::new(AtomicI32::new(0));
    let crowd = spawn_each(0..16, |n| {
        let mut lock = clients[n % 2].read_write_lock(&name);
        if n % 4 == 0 {
            lock = lock.prefer_writers();
        }
        let (inside, together) = (inside.clone(), together.clone());
        async move {
            for turn in 0..20 {
                if (n + turn) % 4 == 0 {
                    let guard = held(&lock.write()).await;
                    let before = inside.swap(-1000, Ordering::SeqCst);
                    assert_eq!(before, 0, "not alone");
                    tokio::task::yield_now().await;
                    inside.store(0, Ordering::SeqCst);
                    if turn % 2 == 0 {
                        let guard = guard.downgrade().await.unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) >= 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        free(guard).await;
                    } else {
                        free(guard).await;
                    }
                } else {
                    let guard = held(&lock.read()).await;
                    let readers = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(readers > 0, "a writer is inside");
                    together.fetch_max(readers, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    free(guard).await;
                }
            }
        }
    });
    done_all("every turn is taken", crowd).await;
    assert!(is_free(&clients[0].read_write_lock(&name)).await);
    for client in &clients {
        client.flush().await;
        assert_eq!(client.status().holds, 0);
    }
}

async fn invalid_names_and_leases_are_rejected(store: TestStore) {
    let client = store.client().await;
    for name in ["", "a\0b", "a\nb", &"x".repeat(513)] {
        let lock = client.read_write_lock(name);
        assert_eq!(lock.name(), name);
        for error in [
            lock.read().lock().await.err(),
            lock.write().lock().await.err(),
            lock.read().try_lock().await.err(),
            lock.write().try_lock().await.err(),
            lock.read().is_locked().await.err(),
            lock.write().force_unlock().await.err(),
        ] {
            assert!(matches!(error, Some(Error::InvalidName { .. })));
        }
    }
    let lock = client.read_write_lock(&unique("leases"));
    for lease in [
        Duration::ZERO,
        Duration::from_micros(999),
        MAX_LEASE + Duration::from_millis(1),
        Duration::MAX,
    ] {
        let read = lock.read().lock().lease(lease).await.err();
        let write = lock.write().lock().lease(lease).await.err();
        for error in [read, write] {
            assert!(matches!(error, Some(Error::InvalidLease { .. })));
        }
    }
    let longest = lock.write().lock().lease(MAX_LEASE).await.unwrap();
    let reader = longest.reenter_read().lease(MAX_LEASE).await.unwrap();
    free(longest).await;
    assert!(reader.valid_for() > MAX_LEASE - LONG);
    free(reader).await;
    assert!(is_free(&lock).await);
}

async fn plain_lock_of_the_same_name_is_another_kind(store: TestStore) {
    let client = store.client().await;
    let name = unique("kinds");
    let (plain, lock) = (client.lock(&name), client.read_write_lock(&name));
    let me = Owner::new();
    let wrong = |error: Option<Error>| {
        assert_matches!(error, Some(Error::WrongKind { .. }));
    };
    let guard = plain.lock().owner(me).await.unwrap();
    wrong(lock.read().lock().await.err());
    wrong(lock.write().lock().await.err());
    wrong(lock.read().lock().owner(me).await.err());
    wrong(lock.write().lock().owner(me).await.err());
    wrong(lock.read().holders().await.err());
    wrong(lock.write().is_locked().await.err());
    wrong(lock.read().force_unlock().await.err());
    wrong(lock.write().force_unlock().await.err());
    client.flush().await;
    assert_eq!(plain.hold_count(me).await.unwrap(), 1);
    free(guard).await;

    let reader = lock.read().lock().owner(me).await.unwrap();
    wrong(plain.lock().await.err());
    wrong(plain.try_lock().owner(me).await.err());
    wrong(plain.force_unlock().await.err());
    client.flush().await;
    assert_eq!(lock.read().hold_count(me).await.unwrap(), 1);
    free(reader).await;
    free(held(&plain).await).await;
}

async fn prefixes_and_hash_tags_belong_to_the_name(store: TestStore) {
    let with = store.client_with_prefix("shop:").await;
    let without = store.client().await;
    for name in [unique("{tag}:names"), unique("names")] {
        let (here, there) = (with.read_write_lock(&name), without.read_write_lock(&name));
        let same = without.read_write_lock(&format!("shop:{name}"));
        let guards = [held(&here.read()).await, held(&here.read()).await];
        assert!(there.write().try_lock().await.unwrap().is_some());
        assert!(same.write().try_lock().await.unwrap().is_none());
        assert_eq!(same.read().holders().await.unwrap().len(), 2);
        for guard in guards {
            assert_eq!(guard.name(), name);
            free(guard).await;
        }
        assert!(is_free(&same).await);
        without.flush().await;
    }
}

async fn request_dropped_anywhere_leaves_nothing_behind(store: TestStore) {
    let (client, lock) = lock_of(&store, "dropped").await;
    let other = store.client().await;
    let assert_nothing_left = async || {
        within_limit("settled", client.flush()).await;
        assert!(is_free(&lock).await, "a key was left");
        assert_idle(&client);
    };
    for lock in [lock.clone(), lock.clone().prefer_writers()] {
        let theirs = other.read_write_lock(lock.name());
        // A free side.
        drop_result_after_each_poll(
            async |polls| poll_up_to(polls, lock.read().lock()).await,
            async || assert_nothing_left().await,
        )
        .await;
        // A side that is released meanwhile, in both directions.
        drop_result_after_each_poll(
            async |polls| {
                let held = theirs.write().lock().await.unwrap();
                let waiter = poll_up_to(polls, lock.read().lock());
                beside_release(waiter, held.unlock()).await
            },
            async || assert_nothing_left().await,
        )
        .await;
        drop_after_each_poll(async |polls| {
            let held = theirs.read().lock().await.unwrap();
            let waiter = poll_up_to(polls, lock.write().lock());
            let guard = beside_release(waiter, held.unlock()).await;
            let through = guard.is_some();
            drop(guard);
            assert_nothing_left().await;
            // No waiting writer is recorded any more.
            let reader = lock.read().try_lock().await.unwrap();
            free(reader.expect("free")).await;
            through
        })
        .await;
        drop_result_after_each_poll(
            async |polls| {
                let writer = lock.write().lock().await.unwrap();
                poll_up_to(polls, writer.downgrade()).await
            },
            async || assert_nothing_left().await,
        )
        .await;
        drop_after_each_poll(async |polls| {
            let writer = lock.write().lock().await.unwrap();
            let reader = poll_up_to(polls, writer.reenter_read()).await;
            let through = reader.is_some();
            drop(reader);
            within_limit("settled", client.flush()).await;
            assert_eq!(lock.read().holders().await.unwrap(), []);
            assert!(lock.write().is_held_by(writer.owner()).await.unwrap());
            let released = poll_up_to(polls, writer.unlock()).await;
            assert_nothing_left().await;
            through && released.is_some()
        })
        .await;
        drop_after_each_poll(async |polls| {
            let outer = lock.read().lock().await.unwrap();
            let inner = poll_up_to(polls, outer.reenter()).await;
            let through = inner.is_some();
            drop(inner);
            within_limit("settled", client.flush()).await;
            assert_eq!(lock.read().hold_count(outer.owner()).await.unwrap(), 1);
            let released = poll_up_to(polls, outer.unlock()).await;
            assert_nothing_left().await;
            through && released.is_some()
        })
        .await;
    }
}

/// F14 among others.
async fn no_state_remains_after_release(store: TestStore) {
    let client = store.client_with(short_linger()).await;
    let lock = client.read_write_lock(&unique("account")).prefer_writers();
    let tasks = spawn_each(0..24, |n| {
        let lock = lock.clone();
        async move {
            match n % 4 {
                0 => {
                    let guard = held(&lock.read()).await;
                    let inner = guard.reenter().await.unwrap();
                    drop(guard);
                    free(inner).await;
                }
                1 => {
                    let guard = held(&lock.write()).await;
                    let reader = guard.reenter_read().await.unwrap();
                    free(guard).await;
                    drop(reader);
                }
                2 => drop(held(&lock.write()).await.downgrade().await),
                _ => {
                    let wait = Duration::from_millis(n);
                    // Such a short limit may pass without an answer.
                    drop(lock.write().try_lock().wait(wait).await);
                }
            }
        }
    });
    done_all("done", tasks).await;
    client.flush().await;
    until_idle(&client).await;
    assert!(is_free(&lock).await);
}
