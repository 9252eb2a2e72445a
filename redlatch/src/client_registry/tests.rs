//! Holds and waits in the registry, on a stopped clock.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{FIRST_PAUSE, LONGEST_PAUSE, RequestInfo, Role};
use crate::error::Loss;
use crate::inspect::{ObjectState, RegistryEntry, WaitingOwner};
use crate::name::{KeyLayout, ObjectKeys, client_key};
use crate::test_prelude::{SECOND, clients};
use crate::{Acquire, Client, ClientBuilder, Embedded, Guard, Lock, MultiLock, Owner};

/// What the registry says about the holder of `name`.
async fn holder(client: &Client, name: &str) -> Option<RegistryEntry> {
    let state = client.inspect(name).await.unwrap().unwrap();
    state.holders()[0].registered.clone()
}

/// The registered note of the holder of `name`.
async fn note(client: &Client, name: &str) -> Option<String> {
    holder(client, name).await.unwrap().note
}

fn connect(store: &Embedded, builder: ClientBuilder) -> Client {
    builder.connect_embedded(store).unwrap()
}

#[tokio::test(start_paused = true)]
async fn hold_is_registered_after_a_second_until_it_is_released() {
    let store = Embedded::new();
    let client = connect(&store, Client::builder().label("report"));
    let peer = connect(&store, Client::builder().prefix(""));
    let guard = client.lock("a").lock().note("reindex 42").await.unwrap();
    sleep(SECOND / 2).await;
    assert_eq!(holder(&peer, "a").await, None);
    sleep(SECOND).await;
    let entry = holder(&peer, "a").await.unwrap();
    assert_eq!(entry.note.as_deref(), Some("reindex 42"));
    assert_eq!((entry.kind.as_str(), entry.age), ("lock", SECOND * 3 / 2));
    assert_eq!(entry.client.label.as_deref(), Some("report"));
    assert_eq!(entry.client.pid, std::process::id());
    assert_eq!(entry.client.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(entry.client.id, client.id());
    assert_eq!(entry.client.age, SECOND * 3 / 2);
    // It is renewed.
    sleep(100 * SECOND).await;
    assert_eq!(holder(&peer, "a").await.unwrap().age, SECOND * 203 / 2);
    guard.unlock().await.unwrap();
    client.flush().await;
    assert_eq!(store.keys(), [""; 0]);
}

/// The note belongs to a request, although the owner's hold still exists while its release is in
/// flight.
#[tokio::test(start_paused = true)]
async fn note_of_earlier_hold_is_forgotten() {
    let store = Embedded::new();
    let client = connect(&store, Client::builder());
    let (lock, me) = (client.lock("a"), Owner::new());
    drop(lock.lock().owner(me).note("earlier").await.unwrap());
    let guard = lock.lock().owner(me).await.unwrap();
    sleep(SECOND * 2).await;
    assert_eq!(note(&client, "a").await, None);
    drop(lock.lock().owner(me).note("later").await.unwrap());
    let again = lock.lock().owner(me).await.unwrap();
    client.flush().await;
    let note = guard.hold_ref().hold.state().request.note.clone();
    assert_eq!(note.as_deref(), Some("later"), "a re-entry keeps it");
    drop((guard, again));
}

#[tokio::test(start_paused = true)]
async fn note_of_reentry_replaces_the_registered_one() {
    let (store, [client, peer]) = clients();
    let guard = client.lock("a").lock().note("first").await.unwrap();
    sleep(SECOND * 2).await;
    let again = guard.reenter().note("second").await.unwrap();
    sleep(SECOND / 10).await;
    let entry = holder(&peer, "a").await.unwrap();
    assert_eq!(entry.note.as_deref(), Some("second"));
    assert_eq!(entry.age, SECOND * 21 / 10);
    for guard in [again, guard] {
        guard.unlock().await.unwrap();
    }
    client.flush().await;
    assert_eq!(store.keys(), [""; 0]);
}

/// The watchdog notices only when the first hold is due that it is lost.
#[tokio::test(start_paused = true)]
async fn entry_of_later_hold_outlives_a_lost_one_of_its_owner() {
    let (_, [client, peer]) = clients();
    let (lock, me) = (client.lock("a"), Owner::new());
    let lost = lock.lock().owner(me).await.unwrap();
    sleep(SECOND * 2).await;
    lost.hold_ref().hold.mark_lost(Loss::NotHeld);
    let later = lock.lock().owner(me).note("later").await.unwrap();
    sleep(SECOND * 2).await;
    for _ in 0..15 {
        sleep(SECOND * 2).await;
        assert_eq!(note(&peer, "a").await.as_deref(), Some("later"));
    }
    drop((lost, later));
}

/// Each of them replaces the entries of the other one when it renews its own.
#[tokio::test(start_paused = true)]
async fn clients_with_the_same_id_do_not_renew_each_others_entries() {
    let store = Embedded::new();
    let settings = |label| Client::builder().client_id("app").label(label);
    let [first, second] = ["first", "second"].map(|label| connect(&store, settings(label)));
    let _a = first.lock("a").lock().await.unwrap();
    sleep(SECOND * 2).await;
    let _b = second.lock("b").lock().await.unwrap();
    let mut registered = Vec::new();
    for seconds in [2, 8, 2] {
        sleep(SECOND * seconds).await;
        let label = async |name| Some(holder(&first, name).await?.client.label.clone());
        registered.push((label("a").await.flatten(), label("b").await.flatten()));
    }
    let [a, b] = ["first", "second"].map(|label| Some(label.to_owned()));
    assert_eq!(registered, [(None, b.clone()), (a, None), (None, b)]);
}

/// The names that are waited for, and the notes of the waiters, in order.
async fn waits(client: &Client) -> Vec<(String, String)> {
    let graph = client.wait_graph().await.unwrap();
    assert_eq!(graph.unreadable, 0);
    let note = |wait: &WaitingOwner| {
        wait.registered
            .as_ref()
            .and_then(|entry| entry.note.clone())
    };
    let waits = graph.waits.iter();
    waits
        .map(|wait| (wait.name.clone(), note(wait).unwrap_or_default()))
        .collect()
}

/// A task that waits for a lock.
fn waiting(request: Acquire<Lock>) -> JoinHandle<Guard> {
    tokio::spawn(async move { request.await.unwrap() })
}

#[tokio::test(start_paused = true)]
async fn waits_are_registered_after_a_second_until_they_end() {
    let (store, [client, peer]) = clients();
    let lock = client.lock("a");
    let guard = lock.lock().await.unwrap();
    let first = waiting(peer.lock("a").lock().note("1"));
    sleep(SECOND / 2).await;
    let second = waiting(peer.lock("a").lock().note("2"));
    let third = waiting(peer.lock("a").lock().note("3"));
    sleep(SECOND / 4).await;
    assert_eq!(waits(&client).await, []);
    sleep(3 * SECOND).await;
    let expected = |notes: &[&str]| -> Vec<_> {
        notes
            .iter()
            .map(|note| ("a".to_owned(), (*note).to_owned()))
            .collect()
    };
    assert_eq!(waits(&client).await, expected(&["1", "2", "3"]));
    let waiters = peer.waiters("a").await.unwrap();
    let ages: Vec<_> = waiters
        .iter()
        .map(|one| one.registered.as_ref().unwrap().age)
        .collect();
    let age = SECOND * 15 / 4;
    assert_eq!(ages, [age, age - SECOND / 2, age - SECOND / 2]);
    assert_eq!(
        waiters[0].holders[0].registered.as_ref().unwrap().client.id,
        client.id()
    );
    assert_eq!(peer.waiters("b").await.unwrap(), []);

    second.abort();
    guard.unlock().await.unwrap();
    let guard = first.await.unwrap();
    sleep(SECOND / 10).await;
    assert_eq!(waits(&client).await, expected(&["3"]));
    sleep(SECOND).await;
    assert_eq!(note(&client, "a").await.as_deref(), Some("1"));
    guard.unlock().await.unwrap();
    third.await.unwrap().unlock().await.unwrap();
    for client in [&client, &peer] {
        client.flush().await;
    }
    assert_eq!(store.keys(), [""; 0]);
}

/// Two tasks, each of which has an owner of its own for each of its locks.
#[tokio::test(start_paused = true)]
async fn deadlock_of_tasks_is_found() {
    let (_, [client, peer]) = clients();
    let acquire_both = |client: &Client, names: [&'static str; 2]| {
        let locks = names.map(|name| client.lock(name));
        tokio::spawn(async move {
            let _first = locks[0].lock().await.unwrap();
            sleep(SECOND / 10).await;
            let _second = locks[1]
                .lock()
                .note(format!("for {}", locks[1].name()))
                .await
                .unwrap();
        })
    };
    let one = acquire_both(&client, ["a", "b"]);
    let other = acquire_both(&peer, ["b", "a"]);
    let behind = waiting(peer.lock("a").lock());
    sleep(3 * SECOND).await;
    let graph = client.wait_graph().await.unwrap();
    assert!(graph.deadlocks().is_empty(), "the owners differ");
    let deadlocks = graph.possible_deadlocks();
    let names = |cycle: &Vec<&WaitingOwner>| -> Vec<_> {
        cycle.iter().map(|one| one.name.clone()).collect()
    };
    assert_eq!(
        deadlocks.iter().map(names).collect::<Vec<_>>(),
        [["a", "b"]]
    );
    // The cycle: each one waits for what the next one holds.
    for (one, next) in [(0, 1), (1, 0)] {
        let holder = &deadlocks[0][one].holders[0];
        let waiter = deadlocks[0][next].registered.as_ref().unwrap();
        assert_eq!(holder.registered.as_ref().unwrap().task, waiter.task);
    }
    one.abort();
    sleep(SECOND / 10).await;
    let graph = client.wait_graph().await.unwrap();
    assert!(graph.possible_deadlocks().is_empty());
    behind.await.unwrap().unlock().await.unwrap();
    other.await.unwrap();
}

/// The owners are known from the queues of the locks only, as those of Redisson.
#[tokio::test(start_paused = true)]
async fn deadlock_of_fair_locks_is_found_without_the_registry() {
    let store = Embedded::new();
    let [client, peer] = [(); 2].map(|()| connect(&store, Client::builder().registry(false)));
    let (me, they) = (Owner::new(), Owner::new());
    let _a = client.fair_lock("a").lock().owner(me).await.unwrap();
    let _b = peer.fair_lock("b").lock().owner(they).await.unwrap();
    let wait = |client: &Client, name, owner| {
        let request = client.fair_lock(name).lock().owner(owner);
        tokio::spawn(async move { request.await.map(drop) })
    };
    let one = wait(&client, "b", me);
    sleep(SECOND).await;
    let observer = connect(&store, Client::builder());
    assert!(observer.wait_graph().await.unwrap().deadlocks().is_empty());
    let other = wait(&peer, "a", they);
    sleep(SECOND).await;
    let graph = observer.wait_graph().await.unwrap();
    let deadlocks = graph.deadlocks();
    assert_eq!(deadlocks.len(), 1);
    let owners: Vec<_> = deadlocks[0].iter().map(|one| one.owner.clone()).collect();
    assert_eq!(owners, [peer.owner_id(they), client.owner_id(me)]);
    assert_eq!(
        (deadlocks[0][0].position, &deadlocks[0][0].registered),
        (Some(1), &None)
    );
    one.abort();
    other.abort();
}

#[tokio::test(start_paused = true)]
async fn several_locks_are_registered_each() {
    let (_, [client, peer]) = clients();
    let both = MultiLock::new([client.lock("a"), client.lock("b")]);
    let theirs = MultiLock::new([peer.lock("b"), peer.lock("c")]);
    let guard = both.lock().note("both").await.unwrap();
    let other = {
        let request = theirs.lock().note("theirs");
        tokio::spawn(async move { request.await.unwrap().unlock().await })
    };
    sleep(3 * SECOND / 2).await;
    for name in ["a", "b"] {
        assert_eq!(note(&peer, name).await.as_deref(), Some("both"));
    }
    assert_eq!(waits(&peer).await, [("b".to_owned(), "theirs".to_owned())]);
    guard.unlock().await.unwrap();
    other.await.unwrap().unwrap();
}

/// For the store it is a fair lock.
#[tokio::test(start_paused = true)]
async fn leader_is_registered_as_that_of_an_election() {
    let (_, [client, peer]) = clients();
    let _leads = client.election("a").campaign("1").await.unwrap();
    sleep(2 * SECOND).await;
    let state = peer.inspect("a").await.unwrap().unwrap();
    let entry = state.holders()[0].registered.as_ref().unwrap();
    assert_eq!(entry.kind, "election");
}

/// The owner of a write lock that also reads has two entries.
#[tokio::test(start_paused = true)]
async fn both_sides_of_read_write_lock_are_registered() {
    let (_, [client, peer]) = clients();
    let lock = client.read_write_lock("a");
    let write = lock.write().lock().note("w").await.unwrap();
    let _read = write.reenter_read().note("r").await.unwrap();
    sleep(2 * SECOND).await;
    let Some(ObjectState::ReadWriteLock { writer, readers }) = peer.inspect("a").await.unwrap()
    else {
        panic!("it is a read-write lock");
    };
    for (holder, kind, note) in [(&writer.unwrap(), "write", "w"), (&readers[0], "read", "r")] {
        let entry = holder.registered.as_ref().unwrap();
        assert_eq!((&*entry.kind, entry.note.as_deref()), (kind, Some(note)));
    }
    let mut listing = peer.list("*");
    let listed = listing.next().await.unwrap().unwrap();
    assert!(
        listed
            .state
            .holders()
            .iter()
            .all(|holder| holder.registered.is_some())
    );
    assert_eq!(listing.next().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn lost_hold_and_deleted_registry_disappear_and_come_back() {
    let (store, [client, peer]) = clients();
    let guard = client.lock("a").lock().await.unwrap();
    let kept = client.lock("b").lock().await.unwrap();
    sleep(2 * SECOND).await;
    let key = client_key(client.id());
    assert!(store.keys().contains(&key));
    store.remove(&key);
    assert_eq!(holder(&peer, "b").await, None);
    sleep(11 * SECOND).await;
    assert!(holder(&peer, "b").await.is_some());
    peer.lock("a").force_unlock().await.unwrap();
    let _theirs = peer.lock("a").lock().await.unwrap();
    guard.lost().await;
    sleep(SECOND / 2).await;
    let fields = store.texts(&key);
    let holds = fields.keys().filter(|field| field.starts_with("hold:"));
    assert_eq!(holds.count(), 1, "{fields:?}");
    kept.unlock().await.unwrap();
}

/// Starts a task that awaits the request and counts how often it is polled.
fn polled<R>(request: R) -> Arc<AtomicUsize>
where
    R: IntoFuture<IntoFuture: Send, Output: Send> + Send + 'static,
{
    let polls = Arc::new(AtomicUsize::new(0));
    let counted = polls.clone();
    tokio::spawn(async move {
        let mut request = pin!(request.into_future());
        poll_fn(|cx| {
            counted.fetch_add(1, Ordering::Relaxed);
            request.as_mut().poll(cx)
        })
        .await
    });
    polls
}

#[tokio::test(start_paused = true)]
async fn registry_polls_no_waiter_that_cannot_be_registered() {
    for is_on in [true, false] {
        let store = Embedded::new();
        let [client, peer] = [(); 2].map(|()| connect(&store, Client::builder().registry(is_on)));
        let _held = peer.lock("a").lock().await.unwrap();
        let semaphore = client.semaphore("s");
        semaphore.try_set_permits(1).await.unwrap();
        let _permit = semaphore.acquire().await.unwrap();
        let mut locks = Vec::new();
        let mut permits = Vec::new();
        for _ in 0..3 {
            locks.push(polled(client.lock("a").lock()));
            permits.push(polled(semaphore.acquire()));
            sleep(SECOND / 10).await;
        }
        sleep(3 * SECOND).await;
        let all = locks.iter().chain(&permits);
        all.for_each(|polls| polls.store(0, Ordering::Relaxed));
        sleep(10 * SECOND).await;
        let polls = |of: &[Arc<AtomicUsize>]| -> Vec<_> {
            of.iter().map(|one| one.load(Ordering::Relaxed)).collect()
        };
        assert_eq!(polls(&permits), [0; 3]);
        // The first waiter checks whether there are others to register.
        let first = if is_on { 10 } else { 0 };
        assert_eq!(polls(&locks), [first, 0, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn waits_leave_room_for_holds() {
    let (store, [client, peer]) = clients();
    let _held = peer.lock("a").lock().await.unwrap();
    let permits = client.expirable_semaphore("p");
    permits.try_set_permits(1).await.unwrap();
    let waiters: Vec<_> = (0..600).map(|_| polled(client.lock("a").lock())).collect();
    sleep(4 * SECOND).await;
    assert_eq!(waits(&peer).await.len(), 500);
    waiters
        .iter()
        .for_each(|polls| polls.store(0, Ordering::Relaxed));
    let _permit = permits.acquire().await.unwrap();
    let _hold = client.lock("b").lock().await.unwrap();
    sleep(2 * SECOND).await;
    assert!(holder(&peer, "b").await.is_some());
    let polls = waiters.iter().map(|polls| polls.load(Ordering::Relaxed));
    assert!(polls.sum::<usize>() <= 2, "the registry is full");
    let fields = store.texts(&client_key(client.id()));
    let holds = fields.keys().filter(|field| field.starts_with("hold:"));
    assert_eq!(holds.count(), 1, "holders of permits are not looked up");
}

/// It passes its guards to other tasks, and waits for what these hold.
#[tokio::test(start_paused = true)]
async fn dispatcher_is_no_deadlock() {
    let (_, [client, peer]) = clients();
    let dispatcher = tokio::spawn(async move {
        for _ in 0..2 {
            let guard = client.lock("a").lock().await.unwrap();
            tokio::spawn(async move {
                sleep(10 * SECOND).await;
                drop(guard);
            });
        }
    });
    sleep(5 * SECOND).await;
    let graph = peer.wait_graph().await.unwrap();
    assert_eq!(graph.waits.len(), 1);
    assert!(graph.deadlocks().is_empty() && graph.possible_deadlocks().is_empty());
    dispatcher.await.unwrap();
}

/// Outside of tasks, the owners of a client do not belong together.
#[test]
fn owners_outside_of_tasks_are_independent() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let (_, [client, peer]) = clients();
        let acquire_both = async |names: [&'static str; 2]| {
            let _first = client.lock(names[0]).lock().await.unwrap();
            sleep(SECOND / 10).await;
            let second = client.lock(names[1]).try_lock().wait(5 * SECOND);
            second.await.unwrap().is_some()
        };
        let check = async {
            sleep(3 * SECOND).await;
            let graph = peer.wait_graph().await.unwrap();
            assert_eq!(graph.waits.len(), 2);
            assert!(graph.possible_deadlocks().is_empty());
        };
        tokio::join!(acquire_both(["a", "b"]), acquire_both(["b", "a"]), check);
    });
}

#[tokio::test(start_paused = true)]
async fn only_what_is_unchanged_is_a_deadlock() {
    let (_, [client, peer]) = clients();
    let (me, they) = (Owner::new(), Owner::new());
    let _a = client.lock("a").lock().owner(me).await.unwrap();
    let _b = peer.lock("b").lock().owner(they).await.unwrap();
    let wait = |client: &Client, name, owner| {
        let request = client.lock(name).lock().owner(owner);
        tokio::spawn(async move { request.await.map(drop) })
    };
    let one = wait(&client, "b", me);
    let other = wait(&peer, "a", they);
    sleep(3 * SECOND).await;
    let earlier = client.wait_graph().await.unwrap();
    let again = async |expected: usize| {
        let mut graph = client.wait_graph().await.unwrap();
        assert_eq!(graph.deadlocks().len(), 1);
        graph.retain_unchanged(&earlier);
        assert_eq!(graph.deadlocks().len(), expected);
    };
    sleep(SECOND).await;
    again(1).await;
    // The same owners in another wait.
    other.abort();
    let other = wait(&peer, "a", they);
    sleep(3 * SECOND).await;
    again(0).await;
    for task in [one, other] {
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn waits_of_other_prefixes_are_not_inspected() {
    let store = Embedded::new();
    let prefixes = ["app:", ""];
    let [client, peer] = prefixes.map(|prefix| connect(&store, Client::builder().prefix(prefix)));
    let mut held = Vec::new();
    for name in ["app:a", "app:", "b", "app"] {
        held.push(peer.lock(name).lock().await.unwrap());
        waiting(peer.lock(name).lock());
    }
    sleep(3 * SECOND).await;
    assert_eq!(waits(&peer).await.len(), 4);
    assert_eq!(waits(&client).await, [("a".to_owned(), String::new())]);
}

#[test]
fn entries_outlive_the_runtime_of_the_task() {
    let [first, second, other] = [(); 3].map(|()| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap()
    });
    let (_, [client, peer]) = first.block_on(async { clients() });
    let _guard = first.block_on(async {
        let guard = client.lock("a").lock().await.unwrap();
        sleep(2 * SECOND).await;
        guard
    });
    second.block_on(async {
        let _other = client.lock("b").lock().await.unwrap();
        // As if an answer were awaited.
        client.session.registration.0.state.lock().is_writing = true;
        let begun = Instant::now();
        let flush = client.flush();
        // The runtime that was used last has ended, too.
        let late = client.lock("c");
        let end = move || {
            let used = other.block_on(async { late.lock().await?.unlock().await });
            used.unwrap();
            drop(other);
            drop(first);
        };
        let end = async { std::thread::spawn(end).join().unwrap() };
        tokio::join!(flush, end);
        assert!(begun.elapsed() < SECOND);
        sleep(100 * SECOND).await;
        assert!(holder(&peer, "a").await.is_some());
    });
}

#[tokio::test(start_paused = true)]
async fn refusal_pauses_the_registry() {
    let (store, [client, peer]) = clients();
    let key = client_key(client.id());
    // The key has another type.
    let foreign = peer.semaphore(&key);
    foreign.try_set_permits(1).await.unwrap();
    let _guard = client.lock("a").lock().await.unwrap();
    sleep(3 * SECOND).await;
    assert_eq!(holder(&peer, "a").await, None);
    store.remove(&key);
    sleep(FIRST_PAUSE).await;
    assert!(holder(&peer, "a").await.is_some());

    // For longer: seldom.
    store.remove(&key);
    foreign.try_set_permits(1).await.unwrap();
    sleep(3600 * SECOND).await;
    let refusals = client.session.registration.0.state.lock().refusals;
    assert!((20..60).contains(&refusals), "{refusals}");
    store.remove(&key);
    sleep(LONGEST_PAUSE).await;
    assert!(holder(&peer, "a").await.is_some());
}

/// Two readers, each of which waits to write until the other one has finished.
#[tokio::test(start_paused = true)]
async fn deadlock_of_readers_that_wait_to_write_is_found() {
    let (_, clients) = clients::<2>();
    let mut held = Vec::new();
    let owners = [(); 2].map(|()| Owner::new());
    for (client, owner) in clients.iter().zip(owners) {
        let lock = client.read_write_lock("a").read().lock().owner(owner);
        held.push(lock.await.unwrap());
    }
    for (client, owner) in clients.iter().zip(owners) {
        let object = ObjectKeys::new(KeyLayout::Write, "", "a");
        let registration = &client.session.registration;
        let request = RequestInfo::of_task();
        registration.add(Role::Waits, &object, owner, Instant::now(), &request);
    }
    sleep(2 * SECOND).await;
    let graph = clients[0].wait_graph().await.unwrap();
    assert_eq!(
        graph.deadlocks().iter().map(Vec::len).collect::<Vec<_>>(),
        [2]
    );
}

#[tokio::test(start_paused = true)]
async fn wait_is_registered_until_the_last_of_its_owner_ends() {
    let (_, [client, peer]) = clients();
    let _held = peer.lock("a").lock().await.unwrap();
    let owner = Owner::new();
    let tasks = [(); 2].map(|()| waiting(client.lock("a").lock().owner(owner)));
    sleep(3 * SECOND).await;
    for (task, left) in tasks.iter().zip([1, 0]) {
        assert_eq!(waits(&peer).await.len(), 1);
        task.abort();
        sleep(SECOND / 2).await;
        assert_eq!(waits(&peer).await.len(), left);
    }
}
