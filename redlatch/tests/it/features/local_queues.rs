//! Local queues: waiters of different objects, and of one owner's two sides, do not block each other.

use tokio::sync::Barrier;

use crate::common::prelude::*;

on_every_store! {
    multi_lock_of_writer_does_not_queue_behind_readers_for_its_read_side,
    multi_lock_of_reader_is_refused_write_side_behind_a_waiting_writer,
    multi_lock_reenters_a_member_ahead_of_its_waiters,
    names_with_and_without_braces_have_separate_queues,
    names_with_one_channel_miss_no_release,
}

/// The queued reader waits for the writer, so the writer must not wait behind it.
async fn multi_lock_of_writer_does_not_queue_behind_readers_for_its_read_side(store: TestStore) {
    let client = store.client_without_retries().await;
    let sides = client.read_write_lock(&unique("sides"));
    let me = Owner::new();
    let writing = sides.write().lock().owner(me).await.unwrap();
    let reader = waiter_of(&client, sides.read().lock()).await;
    let other = client.lock(&unique("sides-other"));
    let both = MultiLock::new([sides.read()]).and(&other);
    free(done("both", both.lock().owner(me)).await).await;
    free(writing).await;
    free(joined("the reader", reader).await).await;
}

async fn multi_lock_of_reader_is_refused_write_side_behind_a_waiting_writer(store: TestStore) {
    let client = store.client_without_retries().await;
    let sides = client.read_write_lock(&unique("sides"));
    let me = Owner::new();
    let reading = sides.read().lock().owner(me).await.unwrap();
    let writer = waiter_of(&client, sides.write().lock()).await;
    let other = client.lock(&unique("sides-other"));
    let both = MultiLock::new([sides.write()]).and(&other);
    let refused = within_limit("refused", both.lock().owner(me)).await;
    assert_matches!(refused, Err(Error::WriteWhileReading { .. }));
    assert!(!other.is_locked().await.unwrap());
    free(reading).await;
    free(joined("the writer", writer).await).await;
}

async fn multi_lock_reenters_a_member_ahead_of_its_waiters(store: TestStore) {
    let client = store.client_without_retries().await;
    let [one, two] = ["member", "member-other"].map(|name| client.lock(&unique(name)));
    let me = Owner::new();
    let guard = one.lock().owner(me).await.unwrap();
    let waiter = waiter_of(&client, one.lock()).await;
    let both = MultiLock::new([&one, &two]);
    free(done("both", both.lock().owner(me)).await).await;
    free(guard).await;
    free(joined("the waiter", waiter).await).await;
}

/// A pending release of the other side is settled before the request is sent.
#[tokio::test]
async fn just_dropped_read_side_does_not_block_multi_lock_of_write_side() {
    let client = TestStore::server().client_without_retries().await;
    let sides = client.read_write_lock(&unique("left"));
    let other = client.lock(&unique("left-other"));
    let both = MultiLock::new([sides.write()]).and(&other);
    let me = Owner::new();
    for _ in 0..20 {
        drop(sides.read().lock().owner(me).await.unwrap());
        free(both.lock().owner(me).await.unwrap()).await;
    }
}

/// While a request is queued for one member, its owner may acquire the other side of that member by
/// another request.
#[tokio::test(start_paused = true)]
async fn queued_request_is_served_when_its_owner_acquires_the_other_side() {
    let store = TestStore::embedded();
    let [client, peer] = store.clients_without_retries().await;
    let sides = client.read_write_lock("sides");
    let guard = held(&peer.read_write_lock("sides").write()).await;
    // Not polled again before the end of the test, so it stays first in the queue of the readers.
    let mut first = pin!(sides.read().lock().into_future());
    poll_until(&mut first, until_subscribed(&client, 1)).await;
    let me = Owner::new();
    let both = MultiLock::new([sides.read()]).and(client.lock("other"));
    let reading = tokio::spawn(both.lock().owner(me).into_future());
    let writing = tokio::spawn(sides.write().lock().owner(me).into_future());
    tokio::task::yield_now().await;
    free(guard).await;
    let writing = joined("writes", writing).await;
    free(joined("reads, too", reading).await).await;
    free(writing).await;
    free(done("the first reader", first).await).await;
}

/// An owner whose loss was not noticed yet bypasses the queue once and is refused; then it waits
/// like the others.
#[tokio::test(start_paused = true)]
async fn owner_with_lost_other_side_bypasses_queue_only_once() {
    let store = TestStore::embedded();
    let [client, peer] = store.clients_without_retries().await;
    let (sides, theirs) = (client.read_write_lock("x"), peer.read_write_lock("x"));
    let me = Owner::new();
    let lost = sides.write().lock().owner(me).await.unwrap();
    theirs.write().force_unlock().await.unwrap();
    let guard = held(&theirs.write()).await;
    let begun = tokio::time::Instant::now();
    let reading = sides.read().try_lock().wait(SHORT).owner(me).await;
    assert!(reading.unwrap().is_none());
    let both = MultiLock::new([sides.read()]).and(client.lock("other"));
    let reading = both.try_lock().wait(SHORT).owner(me).await;
    assert!(reading.unwrap().is_none());
    assert_eq!(begun.elapsed(), 2 * SHORT);
    assert!(lost.is_valid(), "the next renewal is far away");
    free(guard).await;
}

/// `x` and `{x}` are two objects with one channel.
async fn names_with_and_without_braces_have_separate_queues(store: TestStore) {
    let [client, peer] = store.clients_without_retries().await;
    let name = unique("queue");
    let braced = format!("{{{name}}}");
    let (plain, tagged) = (client.lock(&name), client.lock(&braced));

    let held = peer.lock(&name).lock().await.unwrap();
    let waiter = waiter_of(&client, plain.lock()).await;
    let guard = within_limit("it is free", tagged.lock()).await;
    let next = tokio::spawn(tagged.lock().into_future());
    // The same in a multi-lock.
    let both = MultiLock::new([client.lock(&format!("{{{name}}}:other")), tagged.clone()]);
    assert!(both.try_lock().await.unwrap().is_none());
    free(guard.unwrap()).await;
    free(joined("handed over", next).await).await;
    let guard = done("both", both.lock()).await;
    if store.prefix().is_empty() {
        assert_eq!(client.status().subscriptions, 1, "one for each channel");
    }
    free(held).await;
    free(joined("the first", waiter).await).await;
    free(guard).await;

    let name = unique("permits");
    let [plain, tagged] = [&name, &format!("{{{name}}}")].map(|name| client.semaphore(name));
    for semaphore in [&plain, &tagged] {
        semaphore.try_set_permits(1).await.unwrap();
    }
    let taken = plain.acquire().await.unwrap();
    let waiter = tokio::spawn(plain.acquire().into_future());
    let permits = within_limit("it has one", tagged.acquire()).await;
    permits.unwrap().release().await.unwrap();
    taken.release().await.unwrap();
    let permits = joined("the waiter", waiter).await;
    permits.release().await.unwrap();
}

/// The subscription ends repeatedly while waiters of either name start: no release is missed.
/// (These clients retry by themselves only after ten minutes.)
async fn names_with_one_channel_miss_no_release(store: TestStore) {
    let ending = Client::builder().watchdog_lease(10 * LONG);
    let client = store.client_with(ending.subscription_linger(Duration::ZERO));
    let (client, peer) = (client.await, store.client_without_retries().await);
    let name = unique("heard");
    let work = [name.clone(), format!("{{{name}}}")].map(|name| {
        let (mine, theirs) = (client.lock(&name), peer.lock(&name));
        tokio::spawn(async move {
            for round in 0..60 {
                let guard = held(&theirs).await;
                let waiting = [mine.lock(), mine.lock()]
                    .map(|lock| tokio::spawn(async move { free(lock.await.unwrap()).await }));
                // A delay that differs each round, so that the release meets the other name's waiters at different moments.
                for _ in 0..round % 7 {
                    assert!(theirs.is_locked().await.unwrap());
                }
                free(guard).await;
                done_all("woken", waiting).await;
            }
        })
    });
    for work in work {
        work.await.unwrap();
    }
    until_subscribed(&client, 0).await;
}

/// A release acquires the lock for the next waiter of the same client, which sends nothing. A message that the client did
/// not expect changes that only for a moment.
async fn one_command_for_a_turn<K: OwnedKind>(handle: fn(&Client) -> Lock<K>, channel: &str) {
    const TURNS: usize = 200;
    let (server, client) = server_and_client().await;
    for has_message in [false, true] {
        let held = handle(&client).lock().owner(Owner::new()).await.unwrap();
        let halfway = Arc::new(Barrier::new(5));
        let tasks = [(); 4].map(|()| {
            let (lock, me, halfway) = (handle(&client), Owner::new(), halfway.clone());
            tokio::spawn(async move {
                for turn in 0..TURNS {
                    free(lock.lock().owner(me).await.unwrap()).await;
                    if turn == TURNS / 2 {
                        halfway.wait().await;
                        halfway.wait().await;
                    }
                }
            })
        });
        until_subscribed(&client, 1).await;
        free(held).await;
        within_limit("half of the turns", halfway.wait()).await;
        let mut monitor = Monitor::start(&server);
        if has_message {
            let _: i64 = server.command(&["PUBLISH", channel, "0"]);
        }
        halfway.wait().await;
        done_all("all turns", tasks).await;
        let sent = monitor.count_sent(&server);
        // A release and an acquisition would be two.
        assert!(sent < 2 * TURNS * 17 / 10, "{sent}, {has_message}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_with_owners_of_their_own_need_one_command_for_a_turn() {
    const CHANNEL: &str = "redisson_lock__channel:{a}";
    one_command_for_a_turn(|client| client.lock("a"), CHANNEL).await;
    one_command_for_a_turn(|client| client.fenced_lock("a"), CHANNEL).await;
    one_command_for_a_turn(
        |client| client.read_write_lock("a").write(),
        "redisson_rwlock:{a}",
    )
    .await;
}

#[tokio::test]
async fn tasks_with_owners_of_their_own_in_one_thread_need_one_command_for_a_turn() {
    one_command_for_a_turn(|client| client.lock("a"), "redisson_lock__channel:{a}").await;
}

/// After longer sections the client asks the store for each lock that passes on: at the same time, with few commands.
#[tokio::test]
async fn questions_for_many_locks_share_commands() {
    const NAMES: u16 = 256;
    let (server, client) = server_and_client().await;
    let locks: Vec<_> = (0..NAMES).map(|n| client.lock(&format!("{n}"))).collect();
    // How many are in flight at a time, and so share a command, depends on the time that a busy machine has for this.
    for attempt in 1.. {
        let guards = held_all(locks.iter().cloned()).await;
        let waiters: Vec<_> = locks
            .iter()
            .map(|lock| tokio::spawn(lock.lock().into_future()))
            .collect();
        until_subscribed(&client, NAMES.into()).await;
        let held_since = std::time::Instant::now();
        let is_longer = async || held_since.elapsed() > Duration::from_millis(20);
        until("a longer section", is_longer).await;
        let before = server.calls("evalsha:");
        drop(guards);
        let mut taken = Vec::new();
        for waiter in waiters {
            taken.push(joined("the waiter", waiter).await);
        }
        let sent = server.calls("evalsha:") - before;
        free_all(taken).await;
        if sent < u64::from(NAMES) * 3 / 4 {
            break;
        }
        assert!(attempt < 5, "{sent}");
    }
}
