//! Multi-locks in the blocking API.

use std::cell::Cell;
use std::thread;
use std::time::Instant;

use redlatch::blocking::{Client, Member, MultiLock, RedLock, current_thread};

use crate::common::prelude::*;

const LONG: Duration = Duration::from_secs(60);

#[test]
fn threads_acquire_several_locks_in_any_order() {
    let connect = || Client::connect(&shared().url()).unwrap();
    let clients = [connect(), connect(), Client::embedded().unwrap()];
    let (a, b) = (unique("threads-a"), unique("threads-b"));
    let inside = AtomicBool::new(false);
    thread::scope(|scope| {
        for n in 0..6 {
            let mut locks = [
                Member::from(clients[n % 2].lock(&a)),
                Member::from(clients[(n + 1) % 2].fenced_lock(&b)),
                Member::from(clients[2].spin_lock("c")),
            ];
            locks.rotate_left(n % 3);
            let (multi, inside) = (MultiLock::new(locks), &inside);
            scope.spawn(move || {
                for _ in 0..10 {
                    let guard = multi.try_lock().wait(LONG).block().unwrap().unwrap();
                    assert_eq!(guard.owner(), current_thread());
                    assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                    thread::yield_now();
                    inside.store(false, Ordering::SeqCst);
                    guard.unlock().unwrap();
                }
            });
        }
    });
    for client in &clients {
        client.flush().unwrap();
        let status = client.status();
        assert_eq!((status.holds, status.background), (0, 0), "{status:?}");
    }
}

#[test]
fn multi_lock_is_reentrant_per_thread() {
    let client = Client::embedded().unwrap();
    let fenced = client.fenced_lock("b");
    let multi = MultiLock::new([client.lock("a")]).and(&fenced);
    let outer = multi.lock().block().unwrap();
    let inner = multi.try_lock().block().unwrap().unwrap();
    let tokens = [&outer, &inner].map(|guard| guard.token(&fenced));
    assert_eq!(tokens, [Some(1), Some(2)]);
    assert_eq!(fenced.hold_count(current_thread()).unwrap(), 2);
    assert!(multi.is_held_by_current_thread().unwrap());
    let others = thread::scope(|scope| {
        let other = scope.spawn(|| multi.try_lock().block().unwrap().is_some());
        other.join().unwrap()
    });
    assert!(!others);
    drop(inner);
    client.flush().unwrap();
    assert!(outer.is_valid());
    outer.unlock().unwrap();
    let brief = multi.lock().lease(Duration::from_secs(10));
    let brief = brief.block().unwrap();
    assert!(brief.valid_for() <= Duration::from_secs(10));
}

#[test]
fn red_lock_works_for_threads() {
    let servers: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let clients: Vec<_> = servers
        .iter()
        .map(|server| Client::connect(&server.url()).unwrap())
        .collect();
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    let lock = lock.member_timeout(Duration::from_secs(5));
    let guard = lock.lock().block().unwrap();
    assert_eq!((guard.held_members(), guard.owner()), (3, current_thread()));
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            !lock.is_held_by_current_thread().unwrap() && lock.try_lock().block().unwrap().is_none()
        });
        assert!(other.join().unwrap());
    });
    assert!(guard.is_valid() && guard.valid_for() < Duration::from_secs(30));
    guard.unlock().unwrap();
    let brief = lock.try_lock().wait(LONG).lease(Duration::from_secs(10));
    let guard = brief.block().unwrap().unwrap();
    assert!(guard.valid_for() < Duration::from_secs(10));
}

/// A multi-lock runs on the thread of its first member's client. Background work and renewals of
/// the other clients stay on their own threads.
#[test]
fn renewals_stay_on_each_clients_thread() {
    let server = Server::start();
    let settings = redlatch::Client::builder().watchdog_lease(WATCHDOG);
    let first = Client::connect(&server.url()).unwrap();
    let second = Client::with(settings, &shared().url()).unwrap();
    let semaphore = second.semaphore(&unique("own-thread"));
    assert!(semaphore.try_set_permits(1).block().unwrap());
    let permit = semaphore.acquire().block().unwrap();
    let other = second.lock(&unique("own-thread-held"));
    let held = other.lock().block().unwrap();
    let name = unique("own-thread-lock");
    let multi = MultiLock::new([first.lock(&name), second.lock(&name)]);
    assert_eq!(multi.names().collect::<Vec<_>>(), [&name, &name]);
    let both = multi.lock().block().unwrap();
    assert_eq!(both.names().count(), 2);
    both.unlock().unwrap();
    let connected = server.clients();
    drop((multi, first));
    eventually(|| server.clients() < connected);
    // From here on, the test makes no call through the second client.
    drop(permit);
    let observer = Client::connect(&shared().url()).unwrap();
    let seen = observer.semaphore(semaphore.name());
    eventually(|| seen.available().unwrap() == 1);
    assert_renewed(|| held.valid_for());
}

/// The handle of a multi-lock keeps the threads of all its members' clients alive.
#[test]
fn multi_lock_keeps_all_clients_alive() {
    let client = || {
        let settings = redlatch::Client::builder().watchdog_lease(WATCHDOG);
        Client::with(settings, "embedded:").unwrap()
    };
    let multi = MultiLock::new([client().lock("a")]).and(client().lock("b"));
    let guard = multi.lock().block().unwrap();
    drop(multi);
    assert_renewed(|| guard.valid_for());
    guard.unlock().unwrap();
}

/// Longer than a busy machine pauses a process.
const WATCHDOG: Duration = Duration::from_secs(6);

/// Waits for two renewals: the first may have been in flight before.
#[track_caller]
fn assert_renewed(valid_for: impl Fn() -> Duration) {
    for _ in 0..2 {
        let before = Cell::new(valid_for());
        eventually(|| {
            let now = valid_for();
            assert!(now > Duration::ZERO, "lost");
            now > before.replace(now)
        });
    }
}

#[track_caller]
fn eventually(holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LONG, "never happened");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn empty_multi_lock_is_an_error() {
    let none = || Vec::<Member>::new();
    let error = MultiLock::new(none()).lock().block().unwrap_err();
    assert_matches!(error, Error::InvalidMembers { .. });
    let error = RedLock::new(none()).try_lock().block().unwrap_err();
    assert_matches!(error, Error::InvalidMembers { .. });
}

#[test]
fn members_can_be_added_to_an_empty_multi_lock() {
    let client = Client::embedded().unwrap();
    let lock = client.lock("added");
    let none = || Vec::<Member>::new();
    let multi = MultiLock::new(none()).and(&lock);
    multi.lock().block().unwrap().unlock().unwrap();
    let red = RedLock::new(none()).and(&lock);
    red.lock().block().unwrap().unlock().unwrap();
}

/// A set as the member of another one: the work of its members is done in their runtimes, too.
#[test]
fn set_is_not_awaited_in_the_runtime_of_a_nested_member() {
    let runtimes = [(); 3].map(|()| runtime());
    let locks = runtimes.each_ref().map(|runtime| {
        runtime.block_on(async {
            let client = redlatch::Client::embedded();
            client.blocking().unwrap().lock("a")
        })
    });
    let [a, b, c] = locks;
    let all = MultiLock::new([a, b]).and(c);
    for runtime in &runtimes {
        let refused = runtime.block_on(async { all.try_lock().block().err() });
        assert_eq!(refused, Some(Error::BlockedRuntime));
    }
}
