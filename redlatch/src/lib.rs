//! Distributed locks and synchronizers on Redis and Valkey.
#![doc = include_str!("crate.md")]
#![forbid(unsafe_code)]
#![warn(missing_debug_implementations)]

mod background;
mod backoff;
mod client;
mod client_registry;
mod counters;
mod environment;
mod error;
mod glob;
mod hold;
mod join;
mod keyspace;
mod lease;
#[cfg(feature = "macros")]
mod locked;
mod locks;
mod log;
mod metrics;
mod more;
mod name;
mod observe;
mod owner;
mod pending_request;
mod runtime;
mod session;
mod several;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
mod step;
mod store;
mod sync;
#[cfg(test)]
mod test_prelude;
mod wait;
mod watchdog;

#[cfg(feature = "blocking")]
pub mod blocking;
#[cfg(feature = "tower")]
pub mod tower;

pub use backoff::Backoff;
pub use client::{Client, ClientBuilder, ClientStatus, Unsettled};
pub use counters::latch::{CountDownLatch, TryWait, Wait};
pub use counters::semaphore::{Semaphore, SemaphorePermits, TrySetPermits};
pub use error::{Error, ErrorSource, Loss, Result, TicketRefusal};
pub use lease::{Expiry, MAX_LEASE};
#[cfg(feature = "macros")]
pub use locked::{__private, locked};
pub use locks::fair::FairLock;
pub use locks::fair_shared::{
    FairPermitGuard, FairReadLock, FairReadWriteLock, FairSemaphore, FairWriteLock,
};
pub use locks::fenced::{FencedLock, MAX_TOKEN};
pub use locks::group::{GroupLock, GroupValue};
pub use locks::permits::{ExpirableSemaphore, PermitGuard, PermitId};
pub use locks::read_write::{ReadLock, ReadWriteLock, WriteLock};
pub use locks::spin::SpinLock;
pub use locks::{
    Acquirable, Acquire, Busy, Guard, HasLease, HasMinimum, HasOwner, Lock, OrBusy, TryAcquire,
    TryLockError,
};
pub use more::election::{Campaign, Election, Leader, Leadership, Observer};
pub use more::once::{AlreadyRan, Once, OnceRun, Slot};
pub use more::ticket::{HasTicket, IntoTicketError, Ticket, TicketKind};
pub use owner::{Owner, OwnerId};
pub use several::Member;
pub use several::multi::{MultiGuard, MultiLock};
pub use several::red::{RedGuard, RedLock};
pub use store::embedded::Embedded;
pub use store::{Credentials, ReplicaSync};
/// For the command.
#[doc(hidden)]
pub use store::{PublicUrl, SentinelReport, ServerReport};

/// The kinds of lock, the parameter of [`Lock`]. Programs need them to write code for every kind:
/// [`LockKind`](kind::LockKind). To name a guard, use the handle, as in `Guard<WriteLock>`.
pub mod kind {
    pub use crate::locks::fair::{Fair, QueuedKind};
    pub use crate::locks::fair_shared::{FairPermits, FairRead, FairShared, FairWrite};
    pub use crate::locks::fenced::Fenced;
    pub use crate::locks::group::Group;
    pub use crate::locks::permits::Permits;
    pub use crate::locks::read_write::{Read, Write};
    pub use crate::locks::spin::Spin;
    pub use crate::locks::{LockKind, OwnedKind, Reentrant, WriteSide};
    pub use crate::more::revocation::{Askable, Revocable};
}

/// Jobs that run by a schedule, each firing on one machine of a fleet: [`Client::job`].
#[cfg(feature = "cron")]
pub mod job {
    pub use crate::more::job::{
        CatchUp, Cron, History, Job, MAX_OUTPUT, Outcome, Overlap, Run, RunRecord, RunState,
        Scheduled,
    };
}

/// What exists in a store, and what changes there: results of [`Client::inspect`],
/// [`Client::list`], [`Client::watch`] and of methods that return holders, waiters or held permits.
pub mod inspect {
    pub use crate::client_registry::{ClientInfo, RegistryEntry};
    pub use crate::locks::Holder;
    pub use crate::locks::permits::HeldPermit;
    pub use crate::observe::inspect::{ObjectKind, ObjectState, Waiter};
    pub use crate::observe::listing::{Listed, Listing};
    pub use crate::observe::wait_graph::{WaitGraph, WaitingOwner};
    pub use crate::observe::watch::{Change, Event, HeldBy, Watch};
}

/// Runs the examples of the README and of the guide as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[doc = include_str!("../../docs/cookbook.md")]
#[doc = include_str!("../../docs/revocation.md")]
#[doc = include_str!("../../docs/tickets.md")]
#[cfg_attr(all(feature = "macros", feature = "tower"), doc = include_str!("../../docs/http.md"))]
#[cfg_attr(feature = "metrics", doc = include_str!("../../docs/metrics.md"))]
struct Guide;
