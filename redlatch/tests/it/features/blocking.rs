//! Tests of the blocking API.

use std::thread;
use std::time::Instant;

use redlatch::blocking::{Client, current_thread};
use redlatch::inspect::{Change, Event};

use crate::common::prelude::*;

#[test]
fn lock_is_reentrant_per_thread() {
    on_every_store(|client| {
        let lock = client().lock(&unique("thread"));
        let outer = lock.lock().block().unwrap();
        let inner = lock.lock().block().unwrap();
        assert_eq!(outer.owner(), current_thread());
        assert_eq!(inner.hold_count(), 2);
        assert_eq!(lock.hold_count(current_thread()).unwrap(), 2);
        assert!(lock.is_held_by_current_thread().unwrap());
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert!(!lock.is_held_by_current_thread().unwrap());
                lock.try_lock().block().unwrap().is_some()
            });
            assert!(!other.join().unwrap());
        });
        inner.unlock().unwrap();
        assert!(lock.is_locked().unwrap());
        outer.unlock().unwrap();
        assert!(!lock.is_locked().unwrap());
        assert_eq!(lock.holder().unwrap(), None);
    });
}

#[test]
fn threads_of_several_clients_exclude_each_other() {
    on_every_store(|client| {
        let name = unique("threads");
        let inside = AtomicBool::new(false);
        let clients = [client(), client()];
        thread::scope(|scope| {
            for n in 0..8 {
                let (lock, inside) = (clients[n % 2].lock(&name), &inside);
                scope.spawn(move || {
                    for _ in 0..20 {
                        let guard = lock.lock().block().unwrap();
                        assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                        thread::yield_now();
                        inside.store(false, Ordering::SeqCst);
                        guard.unlock().unwrap();
                    }
                });
            }
        });
    });
}

#[test]
fn wait_limits_are_kept() {
    on_every_store(|client| {
        let client = client();
        let lock = client.lock(&unique("wait"));
        let guard = lock.lock().block().unwrap();
        thread::scope(|scope| {
            let gave_up = scope.spawn(|| {
                let wait = Duration::from_millis(20);
                retry_if_late_blocking(|| lock.try_lock().wait(wait).block()).is_none()
            });
            assert!(gave_up.join().unwrap());
            let woken = scope.spawn(|| lock.try_lock().wait(LONG).block().unwrap().is_some());
            while client.status().subscriptions == 0 {
                thread::yield_now();
            }
            guard.unlock().unwrap();
            assert!(woken.join().unwrap());
        });
    });
}

#[test]
fn expired_fixed_lease_is_reported_as_lost() {
    on_every_store(|client| {
        let lock = client().lock(&unique("lease"));
        let lease = Duration::from_millis(300);
        let guard = retry_if_late_blocking(|| lock.lock().lease(lease).block());
        assert!(guard.valid_for() <= Duration::from_millis(300));
        let begun = Instant::now();
        while guard.is_valid() {
            assert!(begun.elapsed() < LONG);
            thread::yield_now();
        }
        assert!(matches!(guard.unlock(), Err(Error::Lost { .. })));
    });
}

#[test]
fn non_reentrant_and_forced() {
    on_every_store(|client| {
        let lock = client().lock(&unique("strict")).non_reentrant();
        let guard = lock.lock().block().unwrap();
        assert_matches!(lock.lock().block(), Err(Error::AlreadyHeld { .. }));
        assert!(lock.force_unlock().unwrap());
        assert!(!lock.force_unlock().unwrap());
        assert!(matches!(guard.unlock(), Err(Error::Lost { .. })));
    });
}

#[test]
fn dropping_releases_without_blocking() {
    on_every_store(|client| {
        let client = client();
        let lock = client.lock(&unique("drop"));
        drop(lock.lock().block().unwrap());
        client.flush().unwrap();
        assert_eq!(lock.remaining_lease().unwrap(), None);
    });
}

/// At the end of a scope, the guard, the handle and the client are dropped one after the other; the
/// lock is released.
#[test]
fn dropping_everything_at_once_still_releases() {
    let name = unique("scope-end");
    let observer = Client::connect(&shared().url()).unwrap().lock(&name);
    for _ in 0..20 {
        {
            let client = Client::connect(&shared().url()).unwrap();
            let lock = client.lock(&name);
            let _guard = lock.try_lock().block().unwrap().expect("released before");
        }
        let begun = Instant::now();
        while observer.is_locked().unwrap() {
            // Far less than the lease of 30 s.
            assert!(begun.elapsed() < 20 * SECOND, "left to its lease");
            thread::yield_now();
        }
    }
}

/// Handles keep the client's thread alive; dropping the last handle ends it.
#[test]
fn handles_and_guards_outlive_the_client() {
    on_every_store(|client| {
        let client = client();
        let lock = client.lock(&unique("outlive"));
        drop(client);
        let guard = lock.lock().block().unwrap();
        assert!(lock.is_locked().unwrap());
        drop(lock);
        guard.unlock().unwrap();
    });
}

#[test]
fn blocking_calls_work_inside_a_runtime() {
    on_every_store(|client| {
        let client = Arc::new(client());
        let name = unique("inside");
        runtime().block_on(async {
            let guard = client.lock(&name).lock().block().unwrap();
            guard.unlock().unwrap();
        });
    });
}

/// Guards release on the client's own thread, regardless of where they are dropped: also in a
/// runtime that ends immediately, in one that is never driven, and in one without timers.
#[test]
fn guards_dropped_in_a_runtime_release_without_it() {
    let ends = |drops: &dyn Fn()| runtime().block_on(async { drops() });
    let not_driven = |drops: &dyn Fn()| {
        // Neither driven nor shut down while the test runs.
        let runtime: &'static tokio::runtime::Runtime = Box::leak(Box::new(runtime()));
        let _entered = runtime.enter();
        drops();
    };
    let without_timers = |drops: &dyn Fn()| {
        let bare = tokio::runtime::Builder::new_current_thread().build();
        bare.unwrap().block_on(async { drops() });
    };
    type InRuntime<'a> = &'a dyn Fn(&dyn Fn());
    let runtimes: [InRuntime<'_>; 3] = [&ends, &not_driven, &without_timers];
    on_every_store(|client| {
        let client = client();
        let lock = client.lock(&unique("foreign-lock"));
        let semaphore = client.semaphore(&unique("foreign-permits"));
        assert!(semaphore.try_set_permits(2).block().unwrap());
        for (n, runtime) in runtimes.iter().enumerate() {
            runtime(&|| {
                let guard = lock.try_lock().block().unwrap().expect("released before");
                assert_eq!(guard.name(), lock.name());
                drop(guard);
                drop(semaphore.acquire_many(2).block().unwrap());
            });
            client.flush().unwrap();
            assert!(!lock.is_locked().unwrap(), "{n}");
            assert_eq!(semaphore.available().unwrap(), 2, "{n}");
            assert_eq!(client.status().background, 0, "{n}");
        }
    });
}

#[test]
fn errors_are_returned() {
    let refused = Client::connect("http://nowhere").unwrap_err();
    assert!(matches!(refused, Error::InvalidUrl { .. }));
    let lock = Client::embedded().unwrap().lock("");
    assert_matches!(lock.lock().block(), Err(Error::InvalidName { .. }));
    assert_matches!(lock.try_lock().block(), Err(Error::InvalidName { .. }));
}

#[test]
fn work_runs_while_it_is_held() {
    on_every_store(|client| {
        let lock = client().lock(&unique("run"));
        let inside = lock.run(|guard| (guard.is_valid(), guard.hold_count()));
        assert_eq!(inside.unwrap(), (true, 1));
        assert!(!lock.is_locked().unwrap());
        let held = lock.lock().block().unwrap();
        let refused = thread::scope(|scope| {
            let other = scope.spawn(|| lock.try_lock().run(|_| unreachable!()));
            other.join().unwrap()
        });
        assert!(refused.unwrap().is_none());
        let lost = lock.run(|_| lock.force_unlock().unwrap());
        assert!(matches!(lost, Err(Error::Lost { .. })));
        assert!(matches!(held.unlock(), Err(Error::Lost { .. })));
    });
}

#[test]
fn loss_ends_a_pause() {
    on_every_store(|client| {
        let lock = client().lock(&unique("lost"));
        let lease = Duration::from_millis(300);
        let guard = retry_if_late_blocking(|| lock.lock().lease(lease).block());
        assert!(guard.lost(LONG).unwrap());
        assert!(guard.lost(Duration::ZERO).unwrap());
        let guard = lock.lock().block().unwrap();
        assert!(!guard.lost(Duration::from_millis(1)).unwrap());
        guard.unlock().unwrap();
    });
}

#[test]
fn guards_reenter_and_report_their_owner() {
    on_every_store(|client| {
        let client = client();
        let lock = client.lock(&unique("owner"));
        let outer = lock.lock().block().unwrap();
        let inner = outer.reenter().block().unwrap();
        assert_eq!(outer.hold_count(), 2);
        assert_eq!(inner.owner_id(), client.owner_id(current_thread()));
        inner.unlock().unwrap();
        outer.unlock().unwrap();
    });
}

#[test]
fn objects_are_inspected_and_listed() {
    on_every_store(|client| {
        let client = client();
        let name = unique("listed");
        assert_eq!(client.inspect(&name).unwrap(), None);
        let _guard = client.lock(&name).lock().block().unwrap();
        let state = client.inspect(&name).unwrap().unwrap();
        assert_eq!(state.holders().len(), 1);
        let listed: Vec<_> = client.list(&name).map(Result::unwrap).collect();
        assert!(!listed.is_empty());
        assert!(listed.iter().all(|found| found.name == name));
    });
}

#[test]
fn events_are_an_iterator() {
    on_every_store(|client| {
        let client = client();
        let name = unique("events");
        let mut events = client.watch(&name).map(Result::unwrap);
        assert_eq!(events.next(), Some(Event::Synchronized));
        let guard = client.lock(&name).lock().block().unwrap();
        let acquired = events.next();
        assert!(
            matches!(&acquired, Some(Event::Changed { change: Change::Acquired(by), .. })
                if by.owner() == Some(&client.owner_id(guard.owner()))),
            "{acquired:?}"
        );
    });
}

/// Both clients have one identity, so a thread and a task with the same owner share a hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_is_shared_with_async_code() {
    let client = redlatch::Client::connect(&shared().url()).await.unwrap();
    let blocking = client.blocking().unwrap();
    assert_eq!(blocking.id(), client.id());
    let name = unique("shared-client");
    let refused = blocking.lock(&name).lock().block();
    assert!(matches!(refused, Err(Error::BlockedRuntime)));
    let lock = client.lock(&name);
    let on_thread = {
        let (blocking, name) = (blocking.clone(), name.clone());
        move || {
            let guard = blocking.lock(&name).lock().block().unwrap();
            (guard.owner(), guard.unlock().unwrap()).0
        }
    };
    let threads = [
        tokio::task::spawn_blocking(on_thread.clone()),
        tokio::task::spawn_blocking(move || thread::spawn(on_thread).join().unwrap()),
    ];
    for thread in threads {
        let owner = thread.await.unwrap();
        assert!(!lock.is_held_by(owner).await.unwrap());
        let guard = lock.lock().owner(owner).await.unwrap();
        let held = blocking.lock(&name);
        let held = tokio::task::spawn_blocking(move || held.is_held_by(owner).unwrap());
        assert!(held.await.unwrap());
        free(guard).await;
    }
    client.flush().await;
}

/// Nothing renews the lock without the runtime of its client, and nothing can be released.
#[test]
fn run_reports_loss_although_the_runtime_has_ended() {
    let runtime = threaded_runtime();
    let lock = runtime.block_on(async {
        let client = redlatch::Client::embedded();
        client.blocking().unwrap().lock("a")
    });
    let lease = Duration::from_millis(50);
    let ran = lock.lock().lease(lease).run(|guard| {
        drop(runtime);
        while guard.is_valid() {
            thread::yield_now();
        }
    });
    assert_matches!(ran, Err(Error::Lost { .. }));
}

/// The work has been done; that its outcome cannot be recorded is no error.
#[test]
fn run_of_a_slot_returns_its_output_although_the_runtime_has_ended() {
    let runtime = threaded_runtime();
    let once = runtime.block_on(async {
        let client = redlatch::Client::embedded();
        client.blocking().unwrap().once("a", "today")
    });
    let ran = once.run(|| {
        drop(runtime);
        7
    });
    assert_eq!(ran, Ok(Ok(7)));
    assert_eq!(once.run(|| 8), Err(Error::NoRuntime));
}

/// A guard of a shared client that is dropped on a thread releases in the runtime.
#[test]
fn shared_client_of_a_single_threaded_runtime_works_from_other_threads() {
    let runtime = runtime();
    let outside = runtime.block_on(async {
        let client = redlatch::Client::embedded();
        let blocking = client.blocking().unwrap();
        assert!(matches!(blocking.flush(), Err(Error::BlockedRuntime)));
        let work = move || {
            drop(blocking.lock("a").lock().block().unwrap());
            blocking.flush().unwrap();
            assert!(!blocking.lock("a").is_locked().unwrap());
            blocking
        };
        tokio::task::spawn_blocking(work).await.unwrap()
    });
    drop(runtime);
    assert_matches!(outside.lock("a").is_locked(), Err(Error::NoRuntime));
    let none = redlatch::Client::embedded().blocking();
    assert!(matches!(none, Err(Error::NoRuntime)));
}

#[test]
fn hanging_thread_loses_lock_at_limit() {
    on_every_store(|client| {
        let (holder, other) = (client(), client());
        let name = unique("limit");
        let limit = Duration::from_millis(200);
        let guard = holder.lock(&name).lock().at_most(limit).block().unwrap();
        let begun = Instant::now();
        let next = thread::scope(|scope| {
            let waiting = scope.spawn(|| other.lock(&name).lock().run(|next| next.is_valid()));
            waiting.join().unwrap()
        });
        // Its lease ends 30 s after the acquisition.
        assert!(next.unwrap() && begun.elapsed() < Duration::from_secs(30));
        assert!(guard.lost(LONG).unwrap());
        assert!(matches!(guard.feed(), Err(Error::Lost { .. })));
        let fed = other.lock(&name).try_lock().fed_every(LONG).block();
        fed.unwrap().unwrap().feed().unwrap();
    });
}
