//! Every primitive behind a common interface of acquire and release.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;

use redlatch::kind::LockKind;
use redlatch::{Client, Guard, Lock, MultiGuard, MultiLock, RedGuard, RedLock, SemaphorePermits};

use crate::Result;

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// Releases the acquired object.
pub(crate) type Release = Box<dyn FnOnce() -> BoxFuture<()> + Send>;

/// Acquires the primitive, or waits for it.
pub(crate) type Acquire = Arc<dyn Fn() -> BoxFuture<Release> + Send + Sync>;

pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// Runs before the first acquisition.
    pub(crate) prepare: fn(Client, String) -> BoxFuture<()>,
    pub(crate) acquire: fn(&Client, &str) -> Acquire,
    /// The acquisition of a holder for which others have to wait.
    pub(crate) hold: fn(&Client, &str) -> Acquire,
    /// The acquisition of a waiter that waits until that holder releases.
    pub(crate) wait: fn(&Client, &str) -> Acquire,
}

pub(crate) const KINDS: [Kind; 14] = [
    of_lock("lock", |client, name| lock(client.lock(name))),
    of_lock("fair-lock", |client, name| lock(client.fair_lock(name))),
    Kind {
        name: "read-lock",
        prepare: no_preparation,
        acquire: read,
        // Readers do not wait for each other, so a writer holds the lock.
        hold: write,
        wait: read,
    },
    of_lock("write-lock", write),
    Kind {
        name: "fair-read-lock",
        prepare: no_preparation,
        acquire: fair_read,
        hold: fair_write,
        wait: fair_read,
    },
    of_lock("fair-write-lock", fair_write),
    of_lock("fenced-lock", |client, name| lock(client.fenced_lock(name))),
    of_lock("spin-lock", |client, name| lock(client.spin_lock(name))),
    of_lock("multi-lock-of-3", |client, name| {
        let names = ["a", "b", "c"].map(|part| format!("{name}:{part}"));
        let locks = MultiLock::new(names.iter().map(|name| client.lock(name)));
        Arc::new(move || acquire(locks.lock(), MultiGuard::unlock))
    }),
    of_lock("red-lock-of-3", |client, name| {
        // On one server: the cost of a majority, without the parallel work of three servers.
        let names = ["a", "b", "c"].map(|part| format!("{name}:{part}"));
        let lock = RedLock::new(names.iter().map(|name| client.lock(name)));
        Arc::new(move || acquire(lock.lock(), RedGuard::unlock))
    }),
    Kind {
        name: "semaphore",
        prepare: |client, name| {
            Box::pin(async move {
                client.semaphore(&name).try_set_permits(1).await?;
                Ok(())
            })
        },
        acquire: semaphore,
        hold: semaphore,
        wait: semaphore,
    },
    Kind {
        name: "expirable-semaphore",
        prepare: |client, name| {
            Box::pin(async move {
                client.expirable_semaphore(&name).try_set_permits(1).await?;
                Ok(())
            })
        },
        acquire: permit,
        hold: permit,
        wait: permit,
    },
    of_lock("fair-semaphore", |client, name| {
        let semaphore = client.fair_semaphore(name, 1);
        Arc::new(move || acquire(semaphore.acquire(), Guard::unlock))
    }),
    Kind {
        name: "count-down-latch",
        prepare: no_preparation,
        acquire: latch,
        hold: latch,
        wait: |client, name| {
            let latch = client.count_down_latch(name);
            Arc::new(move || {
                let latch = latch.clone();
                Box::pin(async move {
                    latch.wait().await?;
                    Ok(release(async { Ok(()) }))
                })
            })
        },
    },
];

const fn of_lock(name: &'static str, acquire: fn(&Client, &str) -> Acquire) -> Kind {
    Kind {
        name,
        prepare: no_preparation,
        acquire,
        hold: acquire,
        wait: acquire,
    }
}

fn no_preparation(_: Client, _: String) -> BoxFuture<()> {
    Box::pin(async { Ok(()) })
}

fn lock<K: LockKind>(lock: Lock<K>) -> Acquire {
    Arc::new(move || acquire(lock.lock(), Guard::unlock))
}

fn read(client: &Client, name: &str) -> Acquire {
    lock(client.read_write_lock(name).read())
}

fn write(client: &Client, name: &str) -> Acquire {
    lock(client.read_write_lock(name).write())
}

fn fair_read(client: &Client, name: &str) -> Acquire {
    lock(client.fair_read_write_lock(name).read())
}

fn fair_write(client: &Client, name: &str) -> Acquire {
    lock(client.fair_read_write_lock(name).write())
}

fn semaphore(client: &Client, name: &str) -> Acquire {
    let semaphore = client.semaphore(name);
    Arc::new(move || acquire(semaphore.acquire(), SemaphorePermits::release))
}

fn permit(client: &Client, name: &str) -> Acquire {
    let semaphore = client.expirable_semaphore(name);
    Arc::new(move || acquire(semaphore.acquire(), Guard::unlock))
}

/// A latch: acquiring sets it, releasing opens it.
fn latch(client: &Client, name: &str) -> Acquire {
    let latch = client.count_down_latch(name);
    Arc::new(move || {
        let latch = latch.clone();
        Box::pin(async move {
            latch.try_set_count(1).await?;
            Ok(release(async move {
                latch.count_down().await?;
                Ok(())
            }))
        })
    })
}

/// Acquires a guard, which `unlock` releases.
fn acquire<R, G, U, F>(request: R, unlock: U) -> BoxFuture<Release>
where
    R: IntoFuture<Output = redlatch::Result<G>>,
    R::IntoFuture: Send + 'static,
    G: Send + 'static,
    U: FnOnce(G) -> F + Send + 'static,
    F: Future<Output = redlatch::Result<()>> + Send + 'static,
{
    let guard = request.into_future();
    Box::pin(async move {
        let guard = guard.await?;
        Ok(release(async move { Ok(unlock(guard).await?) }))
    })
}

fn release(work: impl Future<Output = Result<()>> + Send + 'static) -> Release {
    Box::new(|| Box::pin(work))
}
