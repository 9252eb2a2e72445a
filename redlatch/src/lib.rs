//! Distributed locks and synchronizers on Redis and Valkey.
#![doc = include_str!("crate.md")]
#![forbid(unsafe_code)]
#![warn(missing_debug_implementations)]

mod background;
mod backoff;
mod client;
mod environment;
mod error;
mod hold;
mod join;
mod keyspace;
mod lease;
mod listing;
mod log;
mod name;
mod owner;
mod primitives;
mod runtime;
mod session;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
mod step;
mod store;
mod sync;
mod wait;
mod watchdog;

pub mod blocking;

pub use backoff::Backoff;
pub use client::{Client, ClientBuilder, ClientStatus};
pub use error::{Error, ErrorSource, Loss, Result};
pub use lease::{Expiry, MAX_LEASE};
pub use listing::{Listed, Listing};
pub use owner::{Owner, OwnerId};
pub use primitives::count_down_latch::CountDownLatch;
pub use primitives::expirable_semaphore::{ExpirableSemaphore, PermitGuard, PermitId, Permits};
pub use primitives::fair_lock::{Fair, FairLock};
pub use primitives::fenced_lock::{Fenced, FencedLock, MAX_TOKEN};
pub use primitives::inspect::{HeldPermit, ObjectKind, ObjectState, Waiter};
pub use primitives::lock::{
    Acquire, Guard, Holder, Lock, LockKind, OwnedKind, Reentrant, TryAcquire,
};
pub use primitives::multi_lock::{
    AcquireMany, LockOfMany, Member, MultiGuard, MultiLock, TryAcquireMany,
};
pub use primitives::read_write_lock::{Read, ReadLock, ReadWriteLock, Write, WriteLock};
pub use primitives::red_lock::{RedGuard, RedLock};
pub use primitives::semaphore::{
    AcquirePermits, Semaphore, SemaphorePermits, TryAcquirePermits, TrySetPermits,
};
pub use primitives::spin_lock::{Spin, SpinLock};
pub use store::ReplicaSync;
pub use store::embedded::Embedded;

/// Runs the examples of the README as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
