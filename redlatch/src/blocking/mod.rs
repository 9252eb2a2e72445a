//! The same API for threads: it needs no async code, and the thread is the owner.
//!
//! Every method has the name and the errors of its async sibling, and `BlockedRuntime` (below). An async method blocks here. A request,
//! which is awaited there, is started here by [`block`](Acquire::block):
//!
//! ```
//! use std::time::Duration;
//!
//! # fn main() -> redlatch::Result<()> {
//! let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
//! let lock = client.lock("orders:42");
//! let outer = lock.lock().block()?;
//! let inner = lock.lock().block()?; // the same thread: re-entered
//! assert_eq!(inner.hold_count(), 2);
//! inner.unlock()?;
//! outer.unlock()?;
//!
//! let second = Duration::from_secs(1);
//! let guard = lock.try_lock().wait(second).lease(10 * second).block()?;
//! assert!(guard.is_some());
//! # Ok(()) }
//! ```
//!
//! As in Java, a thread that holds a lock may acquire it again (re-entrancy), and threads exclude
//! each other. A client starts its own thread, on which its connection, its watchdog and its
//! background work run; calls block the calling thread until it has answered. A client from
//! [`crate::Client::blocking`] uses the runtime of an async client instead, and shares its connection.
//!
//! In async code use the async API: these calls block the thread on which they are made. In async code of
//! the runtime that would do their work they fail with [`Error::BlockedRuntime`](crate::Error::BlockedRuntime).
//!
//! A child process that `fork()` creates has no threads but the one that called it. There the calls of a client that the parent has
//! created fail with [`Error::NoRuntime`](crate::Error::NoRuntime), and a guard that the child drops releases nothing. Connect again in
//! the child.

use std::cell::Cell;
use std::sync::Arc;

use crate::Owner;
use crate::environment::Creator;

mod client;
mod election;
mod forward;
mod handles;
mod once;
mod polled;
mod request;
mod revocation;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

pub use client::{Client, Listing, Watch};
pub use election::{Campaign, Election, Leadership, Observer};
pub use handles::{
    CountDownLatch, ExpirableSemaphore, FairLock, FairReadLock, FairReadWriteLock, FairSemaphore,
    FairWriteLock, FencedLock, GroupLock, Lock, Member, MultiLock, ReadLock, ReadWriteLock,
    RedLock, Semaphore, SpinLock, WriteLock,
};
pub use once::{Once, OnceRun};
pub use request::{
    Acquirable, Acquire, FairPermitGuard, Guard, MultiGuard, OrBusy, PermitGuard, RedGuard,
    SemaphorePermits, TryAcquire, TrySetPermits, TryWait, Wait,
};
use worker::Worker;

/// A client, handle or request of the async API, for threads.
///
/// [`Client`], [`Lock`] and the other names of this module are aliases of it.
#[derive(Clone, Debug)]
pub struct Blocking<T> {
    inner: T,
    worker: Arc<Worker>,
}

thread_local! {
    /// The owner of the thread, and the process that it was created for: the thread that calls `fork` has a copy in the child.
    static THREAD: Cell<Option<(Creator, Owner)>> = const { Cell::new(None) };
}

/// Returns the owner that identifies the calling thread in this module: what [`Lock::holder`]
/// returns when this thread holds a lock.
pub fn current_thread() -> Owner {
    let known = THREAD.try_with(Cell::get).ok().flatten();
    let own = known.filter(|(process, _)| process.is_here());
    own.map_or_else(new_thread, |(_, owner)| owner)
}

fn new_thread() -> Owner {
    let owner = Owner::new();
    // A thread that is being destroyed has lost its identity, so it gets a new one each time.
    let _ = THREAD.try_with(|known| known.set(Some((Creator::this_process(), owner))));
    owner
}
