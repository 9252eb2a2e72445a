//! Futures are small and not nested too deeply: a program has thousands of them at the same time,
//! and embeds them in its own.
//!
//! The limit on nesting is `recursion_limit` at the top of `it/main.rs`. Without the attribute it
//! is 128. Beyond it, compiling a program that uses the library fails.

use crate::common::prelude::*;

/// Largest size in bytes of a request for a lock: a task that waits has one.
const LOCK_REQUEST: usize = 1024;

/// Largest size in bytes of any request.
const REQUEST: usize = 2048;

/// Largest size in bytes of the futures that callers embed in their own.
const EMBEDDED: usize = 600;

/// Returns the size in bytes of the boxed future that a request turns into.
fn boxed_size<R: IntoFuture>(request: R) -> usize
where
    R::IntoFuture: std::ops::Deref,
{
    size_of_val(&*request.into_future())
}

#[tokio::test]
async fn requests_are_small_futures() {
    let client = Client::embedded();
    let lock = client.lock("a");
    let read_write = client.read_write_lock("b");
    let both = MultiLock::new([client.lock("c"), client.lock("d")]);
    let lock_sizes = [
        ("lock", boxed_size(lock.lock())),
        ("try_lock", boxed_size(lock.try_lock())),
    ];
    for (request, size) in lock_sizes {
        assert!(size <= LOCK_REQUEST, "{request}: {size} bytes");
    }
    let sizes = [
        ("fair lock", boxed_size(client.fair_lock("a").lock())),
        ("fenced lock", boxed_size(client.fenced_lock("a").lock())),
        ("spin lock", boxed_size(client.spin_lock("a").lock())),
        ("read lock", boxed_size(read_write.read().lock())),
        ("write lock", boxed_size(read_write.write().lock())),
        ("multi-lock", boxed_size(both.lock())),
        ("semaphore", boxed_size(client.semaphore("e").acquire())),
    ];
    for (request, size) in sizes {
        assert!(size <= REQUEST, "{request}: {size} bytes");
    }
    let guard = held(&lock).await;
    let unlock = size_of_val(&guard.unlock());
    assert!(unlock <= EMBEDDED, "unlock: {unlock} bytes");
    let is_locked = size_of_val(&lock.is_locked());
    assert!(is_locked <= EMBEDDED, "is_locked: {is_locked} bytes");
}
