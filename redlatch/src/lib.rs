//! Distributed locks and synchronizers on Redis and Valkey.
#![doc = include_str!("crate.md")]
#![forbid(unsafe_code)]
#![warn(missing_debug_implementations)]

mod background;
mod backoff;
mod client;
mod client_registry;
mod environment;
mod error;
mod glob;
mod hold;
mod join;
mod keyspace;
mod lease;
mod listing;
#[cfg(feature = "macros")]
mod locked;
mod log;
mod metrics;
mod name;
mod owner;
mod pending_request;
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
mod wait_graph;
mod watch;
mod watchdog;

#[cfg(feature = "blocking")]
pub mod blocking;
#[cfg(feature = "tower")]
pub mod tower;

pub use backoff::Backoff;
pub use client::{Client, ClientBuilder, ClientStatus, Unsettled};
pub use error::{Error, ErrorSource, Loss, Result, TicketRefusal};
pub use lease::{Expiry, MAX_LEASE};
#[cfg(feature = "macros")]
pub use locked::{__private, locked};
pub use owner::{Owner, OwnerId};
pub use primitives::count_down_latch::{CountDownLatch, TryWait, Wait};
pub use primitives::election::{Campaign, Election, Leader, Leadership, Observer};
pub use primitives::expirable_semaphore::{ExpirableSemaphore, PermitGuard, PermitId};
pub use primitives::fair_lock::FairLock;
pub use primitives::fenced_lock::{FencedLock, MAX_TOKEN};
pub use primitives::group_lock::{GroupLock, GroupValue};
pub use primitives::lock::{
    Acquirable, Acquire, Guard, HasLease, HasMinimum, HasOwner, Lock, TryAcquire,
};
pub use primitives::lock_set::Member;
pub use primitives::multi_lock::{MultiGuard, MultiLock};
pub use primitives::once::{AlreadyRan, Once, OnceRun, Slot};
pub use primitives::read_write_lock::{ReadLock, ReadWriteLock, WriteLock};
pub use primitives::red_lock::{RedGuard, RedLock};
pub use primitives::semaphore::{Semaphore, SemaphorePermits, TrySetPermits};
pub use primitives::spin_lock::SpinLock;
pub use primitives::ticket::{HasTicket, IntoTicketError, Ticket, TicketKind};
pub use store::embedded::Embedded;
pub use store::{Credentials, ReplicaSync};
/// For the command.
#[doc(hidden)]
pub use store::{PublicUrl, ServerReport};

/// The kinds of lock, the parameter of [`Lock`]. Programs need them to write code for every kind:
/// [`LockKind`](kind::LockKind). To name a guard, use the handle, as in `Guard<WriteLock>`.
pub mod kind {
    pub use crate::primitives::expirable_semaphore::Permits;
    pub use crate::primitives::fair_lock::Fair;
    pub use crate::primitives::fenced_lock::Fenced;
    pub use crate::primitives::group_lock::Group;
    pub use crate::primitives::lock::{LockKind, OwnedKind, Reentrant};
    pub use crate::primitives::read_write_lock::{Read, Write};
    pub use crate::primitives::revocation::Revocable;
    pub use crate::primitives::spin_lock::Spin;
}

/// What exists in a store, and what changes there: results of [`Client::inspect`], [`Client::list`],
/// [`Client::watch`] and of methods that return holders, waiters or held permits.
pub mod inspect {
    pub use crate::client_registry::{ClientInfo, RegistryEntry};
    pub use crate::listing::{Listed, Listing};
    pub use crate::primitives::expirable_semaphore::HeldPermit;
    pub use crate::primitives::inspect::{ObjectKind, ObjectState, Waiter};
    pub use crate::primitives::lock::Holder;
    pub use crate::wait_graph::{WaitGraph, WaitingOwner};
    pub use crate::watch::{Change, Event, HeldBy, Watch};
}

/// Runs the examples of the README and of the guide as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[doc = include_str!("../../docs/cookbook.md")]
#[doc = include_str!("../../docs/revocation.md")]
#[doc = include_str!("../../docs/tickets.md")]
#[cfg_attr(all(feature = "macros", feature = "tower"), doc = include_str!("../../docs/http.md"))]
struct Guide;
