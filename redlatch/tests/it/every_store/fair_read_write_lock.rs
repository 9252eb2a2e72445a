//! Tests of the fair read-write lock: readers share it, writers exclude all others, and no waiter of
//! either side is overtaken.

use redlatch::inspect::{ObjectKind, ObjectState};
use redlatch::kind::QueuedKind;
use redlatch::{FairReadWriteLock, Result};

use crate::common::prelude::*;

on_every_store! {
    readers_share_and_writers_are_exclusive,
    waiters_are_served_in_order_and_consecutive_readers_together,
    waiter_that_gives_up_lets_those_behind_it_in,
    force_unlock_serves_the_queue,
    inspection_shows_holders_and_waiters,
    writer_may_read_and_reader_may_not_write,
    writer_keeps_reading_without_a_writer_in_between,
    lost_writer_does_not_read_and_leaves_the_queue_alone,
    revoked_writer_is_followed_by_the_queue,
    other_locks_of_the_same_name_are_refused,
}

async fn lock_of(store: &TestStore, what: &str) -> (Client, FairReadWriteLock) {
    let [client] = store.clients_with(short_linger()).await;
    let lock = client.fair_read_write_lock(&unique(what));
    (client, lock)
}

async fn until_queued(lock: &FairReadWriteLock, waiters: usize) {
    let queued = async || lock.queue().await.unwrap().len() == waiters;
    until("in the queue", queued).await;
}

/// Starts a waiter, and returns once it has its position in the queue.
async fn spawn_waiter<K: QueuedKind + OwnedKind>(
    side: &Lock<K>,
    lock: &FairReadWriteLock,
    ahead: usize,
) -> JoinHandle<Result<Guard<Lock<K>>>> {
    let waiting = tokio::spawn(side.lock().into_future());
    until_queued(lock, ahead + 1).await;
    waiting
}

async fn turn<K: OwnedKind>(waiting: JoinHandle<Result<Guard<Lock<K>>>>) -> Guard<Lock<K>> {
    joined("it is its turn", waiting).await
}

async fn assert_nothing_left(client: &Client, lock: &FairReadWriteLock) {
    within_limit("settled", client.flush()).await;
    assert!(!lock.read().is_locked().await.unwrap() && !lock.write().is_locked().await.unwrap());
    assert!(lock.queue().await.unwrap().is_empty());
    assert!(client.inspect(lock.name()).await.unwrap().is_none());
    until_subscribed(client, 0).await;
}

async fn readers_share_and_writers_are_exclusive(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-share").await;
    let (read, write) = (lock.read(), lock.write());
    let one = held(&read).await;
    let elsewhere = store.client().await.fair_read_write_lock(lock.name());
    let two = held(&elsewhere.read()).await;
    assert!(write.try_lock().await.unwrap().is_none());
    let mut readers = read.holders().await.unwrap();
    readers.sort_by(|a, b| a.owner.cmp(&b.owner));
    let mut owners = [&one, &two].map(|guard| guard.owner_id());
    owners.sort();
    assert!(readers.iter().map(|holder| &holder.owner).eq(&owners));
    assert!(!write.is_locked().await.unwrap());
    free(one).await;
    assert!(write.try_lock().await.unwrap().is_none());
    free(two).await;
    let writer = held(&write).await;
    assert!(elsewhere.read().try_lock().await.unwrap().is_none());
    assert!(elsewhere.write().try_lock().await.unwrap().is_none());
    assert!(!read.is_locked().await.unwrap() && write.is_locked().await.unwrap());
    free(writer).await;
    assert_nothing_left(&client, &lock).await;
}

async fn waiters_are_served_in_order_and_consecutive_readers_together(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-order").await;
    let elsewhere = store.client().await.fair_read_write_lock(lock.name());
    let first = held(&lock.write()).await;
    let one = spawn_waiter(&lock.read(), &lock, 0).await;
    let two = spawn_waiter(&elsewhere.read(), &lock, 1).await;
    let writer = spawn_waiter(&elsewhere.write(), &lock, 2).await;
    let last = spawn_waiter(&lock.read(), &lock, 3).await;
    free(first).await;
    let (one, two) = (turn(one).await, turn(two).await);
    // Neither a new reader nor the last one overtakes the writer.
    assert!(lock.read().try_lock().await.unwrap().is_none());
    until_queued(&lock, 2).await;
    free(one).await;
    until_queued(&lock, 2).await;
    free(two).await;
    let writer = turn(writer).await;
    assert!(!last.is_finished());
    free(writer).await;
    free(turn(last).await).await;
    assert_nothing_left(&client, &lock).await;
}

async fn waiter_that_gives_up_lets_those_behind_it_in(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-give-up").await;
    let reader = held(&lock.read()).await;
    let writer = spawn_waiter(&lock.write(), &lock, 0).await;
    let one = spawn_waiter(&lock.read(), &lock, 1).await;
    let two = spawn_waiter(&lock.read(), &lock, 2).await;
    writer.abort();
    let (one, two) = (turn(one).await, turn(two).await);
    assert!(reader.is_valid());
    for guard in [reader, one, two] {
        free(guard).await;
    }
    assert_nothing_left(&client, &lock).await;
}

async fn force_unlock_serves_the_queue(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-force").await;
    let readers = [held(&lock.read()).await, held(&lock.read()).await];
    let writer = spawn_waiter(&lock.write(), &lock, 0).await;
    assert!(!lock.write().force_unlock().await.unwrap());
    assert!(lock.read().force_unlock().await.unwrap());
    let writer = turn(writer).await;
    assert!(!lock.read().force_unlock().await.unwrap());
    for reader in readers {
        assert_lost(reader.unlock().await, Loss::NotHeld);
    }
    assert!(writer.is_valid());
    free(writer).await;
    assert_nothing_left(&client, &lock).await;
}

async fn inspection_shows_holders_and_waiters(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-inspect").await;
    let reader = held(&lock.read()).await;
    let writer = spawn_waiter(&lock.write(), &lock, 0).await;
    let state = client.inspect(lock.name()).await.unwrap().unwrap();
    assert_eq!(state.kind(), ObjectKind::FairReadWriteLock);
    assert!(
        state
            .holders()
            .iter()
            .map(|it| &it.owner)
            .eq([&reader.owner_id()])
    );
    assert!(state.queue().iter().map(|it| it.writes).eq([true]));
    let ObjectState::FairReadWriteLock {
        writer: None,
        readers,
        ..
    } = &state
    else {
        panic!("{state:?}");
    };
    assert_eq!(readers[0].holds, 1);
    let waiters = client.waiters(lock.name()).await.unwrap();
    assert_eq!(waiters.len(), 1);
    assert_eq!(
        (&waiters[0].owner, waiters[0].position),
        (&state.queue()[0].owner, Some(1))
    );
    let mut listing = client.list(lock.name());
    assert_eq!(listing.next().await.unwrap().unwrap().name, lock.name());
    free(reader).await;
    let writer = turn(writer).await;
    assert_eq!(
        lock.write().holder().await.unwrap().unwrap().owner,
        writer.owner_id()
    );
    free(writer).await;
    assert_nothing_left(&client, &lock).await;
}

async fn writer_may_read_and_reader_may_not_write(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-both").await;
    let me = Owner::new();
    let writer = lock.write().lock().owner(me).await.unwrap();
    let waiting = spawn_waiter(&lock.write(), &lock, 0).await;
    // Regardless of the queue.
    let reader = lock.read().lock().owner(me).await.unwrap();
    let again = lock.write().lock().owner(me).await.unwrap();
    free(again).await;
    free(writer).await;
    assert!(lock.read().is_held_by(me).await.unwrap());
    let refused = lock.write().lock().owner(me).await;
    assert_matches!(refused, Err(Error::WriteWhileReading { .. }));
    assert!(!waiting.is_finished());
    free(reader).await;
    free(turn(waiting).await).await;
    assert_nothing_left(&client, &lock).await;
}

async fn writer_keeps_reading_without_a_writer_in_between(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-downgrade").await;
    let elsewhere = store.client().await.fair_read_write_lock(lock.name());
    for with_reader in [false, true] {
        let writer = held(&lock.write()).await;
        // Regardless of the queue, and of which client waits.
        let other = spawn_waiter(&elsewhere.write(), &lock, 0).await;
        let both = match with_reader {
            true => Some(writer.reenter_read().await.unwrap()),
            false => None,
        };
        let owner = writer.owner_id();
        let reader = writer.downgrade().await.unwrap();
        assert_eq!(reader.owner_id(), owner);
        assert!(!lock.write().is_locked().await.unwrap());
        assert!(elsewhere.read().try_lock().await.unwrap().is_none());
        let last = spawn_waiter(&elsewhere.read(), &lock, 1).await;
        assert!(!other.is_finished());
        for guard in both.into_iter().chain([reader]) {
            assert!(guard.is_valid());
            free(guard).await;
        }
        free(turn(other).await).await;
        free(turn(last).await).await;
        assert_nothing_left(&client, &lock).await;
    }
    // Readers that wait are let in at once.
    let writer = held(&lock.write()).await;
    let waiting = spawn_waiter(&elsewhere.read(), &lock, 0).await;
    let reader = writer.downgrade().await.unwrap();
    free(turn(waiting).await).await;
    free(reader).await;
    assert_nothing_left(&client, &lock).await;
}

/// The feared interleaving: a request that waits in the queue for what only a writer gets, which nobody accepts.
async fn lost_writer_does_not_read_and_leaves_the_queue_alone(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-lost").await;
    let elsewhere = store.client().await.fair_read_write_lock(lock.name());
    for downgrades in [false, true] {
        let writer = held(&lock.write()).await;
        let next = spawn_waiter(&elsewhere.write(), &lock, 0).await;
        assert!(elsewhere.write().force_unlock().await.unwrap());
        let next = turn(next).await;
        match downgrades {
            true => assert_lost(writer.downgrade().await.map(drop), Loss::NotHeld),
            false => assert_lost(writer.reenter_read().await.map(drop), Loss::NotHeld),
        }
        assert!(lock.queue().await.unwrap().is_empty());
        assert!(next.is_valid() && elsewhere.write().is_locked().await.unwrap());
        free(next).await;
        assert_nothing_left(&client, &lock).await;
    }
}

async fn revoked_writer_is_followed_by_the_queue(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-revoke").await;
    let elsewhere = store.client().await.fair_read_write_lock(lock.name());
    let writer = held(&lock.write()).await;
    let next = spawn_waiter(&elsewhere.read(), &lock, 0).await;
    // So it learns of the limit before its next renewal.
    let looks = tokio::spawn(writer.asked());
    let asked = elsewhere.write().revoke(SECOND / 10).await.unwrap();
    assert_eq!(asked, Some(writer.owner_id()));
    let next = turn(next).await;
    looks.abort();
    assert!(!writer.is_valid());
    assert_lost(writer.unlock().await, Loss::Revoked);
    free(next).await;
    assert_nothing_left(&client, &lock).await;
}

async fn other_locks_of_the_same_name_are_refused(store: TestStore) {
    let (client, lock) = lock_of(&store, "fair-kinds").await;
    let refused = |outcome: Result<()>| assert_matches!(outcome, Err(Error::WrongKind { .. }));
    let name = lock.name();
    let reader = held(&lock.read()).await;
    let plain = client.read_write_lock(name);
    refused(plain.read().try_lock().await.map(drop));
    refused(plain.write().try_lock().await.map(drop));
    refused(client.lock(name).try_lock().await.map(drop));
    refused(client.fair_lock(name).try_lock().await.map(drop));
    refused(client.lock(name).force_unlock().await.map(drop));
    free(reader).await;
    let plain = held(&plain.read()).await;
    refused(lock.write().try_lock().await.map(drop));
    free(plain).await;
    let plain = held(&client.lock(name)).await;
    refused(lock.read().try_lock().await.map(drop));
    free(plain).await;
    assert_nothing_left(&client, &lock).await;
}

/// Without a release: the writer's turn comes when the reader's lease ends, and so on.
#[tokio::test(start_paused = true)]
async fn holders_that_die_delay_others_by_their_leases() {
    let [one, two] = embedded_clients();
    let (lock, theirs) = (one.fair_read_write_lock("a"), two.fair_read_write_lock("a"));
    let begun = tokio::time::Instant::now();
    let lease = 10 * SECOND;
    let mut guards = Vec::new();
    for n in 1..=2 {
        guards.push(lock.read().lock().lease(n * lease).await.unwrap());
    }
    let writer = tokio::spawn(theirs.write().lock().lease(lease).into_future());
    until_queued(&lock, 1).await;
    let readers = [0, 1].map(|_| tokio::spawn(lock.read().lock().lease(lease).into_future()));
    until_queued(&lock, 3).await;
    let _writer = turn(writer).await;
    assert_took(begun.elapsed(), 2 * lease..2 * lease + SECOND);
    for reader in readers {
        guards.push(turn(reader).await);
    }
    assert_took(begun.elapsed(), 3 * lease..3 * lease + SECOND);
}

/// The message of a grant wakes only one of two requests of an owner. The other one may enter now, too, or is refused.
#[tokio::test(start_paused = true)]
async fn granted_side_wakes_other_side_of_its_owner() {
    let [mine, peer] = embedded_clients();
    let (lock, theirs) = (
        mine.fair_read_write_lock("a"),
        peer.fair_read_write_lock("a"),
    );
    for writes_first in [true, false] {
        let me = Owner::new();
        let write = || tokio::spawn(lock.write().lock().owner(me).into_future());
        let read = || tokio::spawn(lock.read().lock().owner(me).into_future());
        let begun = tokio::time::Instant::now();
        if writes_first {
            let reader = held(&theirs.read()).await;
            let writing = write();
            until_queued(&lock, 1).await;
            let reading = read();
            until_queued(&lock, 2).await;
            free(reader).await;
            let guards = (turn(writing).await, turn(reading).await);
            assert!(guards.0.is_valid() && guards.1.is_valid());
        } else {
            let writer = held(&theirs.write()).await;
            let reading = read();
            until_queued(&lock, 1).await;
            let writing = write();
            until_queued(&lock, 2).await;
            free(writer).await;
            let _reader = turn(reading).await;
            let refused = within_limit("refused", writing).await.unwrap();
            assert_matches!(refused, Err(Error::WriteWhileReading { .. }));
        }
        assert!(begun.elapsed() < SECOND, "{:?}", begun.elapsed());
        assert_nothing_left(&mine, &lock).await;
    }
}

/// A writer that is first in the queue has no connection: readers behind it wait for its grace period, and no longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiter_delays_others_by_one_grace_period() {
    for holder_reads in [false, true] {
        let (server, proxy) = proxied_server();
        let near = connect(short_linger(), &server.url()).await;
        let far = connect(short_linger(), &proxy.url()).await;
        let grace = Duration::from_millis(600);
        let of = |client: &Client| client.fair_read_write_lock("a").grace_period(grace);
        let (lock, theirs) = (of(&near), of(&far));
        let (writer, reader) = match holder_reads {
            false => (Some(held(&lock.write()).await), None),
            // The reader keeps its hold: the lock is free for other readers, but not for the dead writer.
            true => (None, Some(held(&lock.read()).await)),
        };
        let dies = spawn_waiter(&theirs.write(), &lock, 0).await;
        until("it is subscribed", async || channels(&server) >= 1).await;
        let readers = [
            spawn_waiter(&lock.read(), &lock, 1).await,
            spawn_waiter(&lock.read(), &lock, 2).await,
        ];
        cut_off(&proxy);
        let gone = async || channels(&server) == 2;
        until("only the others are subscribed", gone).await;
        let begun = std::time::Instant::now();
        if let Some(writer) = writer {
            free(writer).await;
        }
        let mut guards = Vec::new();
        for reader in readers {
            guards.push(turn(reader).await);
        }
        assert!(begun.elapsed() >= grace);
        // It continues to wait, at the end of the queue.
        proxy.refuse(false);
        until_queued(&lock, 1).await;
        for guard in guards.into_iter().chain(reader) {
            free(guard).await;
        }
        free(turn(dies).await).await;
        assert_nothing_left(&near, &lock).await;
        within_limit("settled", far.flush()).await;
        let keys: usize = server.command(&["DBSIZE"]);
        let registry: Vec<String> = server.command(&["KEYS", "redlatch_client:*"]);
        assert_eq!(keys, registry.len());
    }
}

/// A release, and an acquisition, serve all consecutive readers in one script. Without grants each requests its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_are_granted_the_lock_together_by_one_script() {
    const READERS: usize = 20;
    for grants in [true, false] {
        let server = Server::start();
        let settings = || short_linger().fair_grants(grants).registry(false);
        let client = connect(settings(), &server.url()).await;
        let lock = client.fair_read_write_lock("a");
        let writer = held(&lock.write()).await;
        let mut readers = Vec::new();
        for n in 0..READERS {
            readers.push(spawn_waiter(&lock.read(), &lock, n).await);
        }
        until("all are subscribed", async || channels(&server) == READERS).await;
        // On the same connection, so after the requests that were sent with the subscriptions.
        assert_eq!(lock.queue().await.unwrap().len(), READERS);
        let quiet = server.calls("eval");
        free(writer).await;
        let mut guards = Vec::new();
        for reader in readers {
            guards.push(turn(reader).await);
        }
        let sent = server.calls("eval") - quiet;
        match grants {
            true => assert!(sent < 4, "{sent} scripts"),
            false => assert!(sent >= READERS as u64, "{sent} scripts"),
        }
        for guard in guards {
            free(guard).await;
        }
        assert_nothing_left(&client, &lock).await;
    }
}
