//! Events of a watch.

use std::fmt;

use crate::error::Error;
use crate::locks::permits::PermitId;
use crate::observe::inspect::ObjectKind;
use crate::owner::OwnerId;

/// An event of a [`Watch`](super::Watch).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// An object has changed, or existed when the watch started.
    #[non_exhaustive]
    Changed {
        /// Name without the client's prefix.
        name: String,
        /// Kind of the object; if it does not exist any more, the last known one.
        kind: ObjectKind,
        /// The change.
        change: Change,
    },
    /// The store does not report changes at present. The watch tries to restore that until it succeeds.
    #[non_exhaustive]
    Interrupted {
        /// Error of the connection.
        error: Error,
    },
    /// The events so far add up to the state of all objects. This event follows the objects that existed when the
    /// watch started, and after each [`Event::Interrupted`] the differences to the state before.
    Synchronized,
}

/// A change of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// It was held already when the watch started.
    Held(HeldBy),
    /// It was acquired.
    Acquired(HeldBy),
    /// The hold ended: it was released by its owner or by force, or deleted. The store does not record which.
    Released(HeldBy),
    /// The lease of the hold ended, and nothing had changed the object since the hold was last seen.
    Expired(HeldBy),
    /// The owner joined the queue of a fair lock, or was there when the watch started. Waiters for other kinds are not
    /// recorded in the store.
    Waiting(OwnerId),
    /// The owner left the queue without the lock: it gave up, or its position in the queue expired.
    GaveUp(OwnerId),
    /// The number of a semaphore or of a latch is this now. The store does not record which owners changed it.
    Counted(i64),
    /// A semaphore or latch does not exist any more. A latch that opens is deleted.
    Deleted,
}

/// The holder of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum HeldBy {
    /// The owner of a lock.
    Owner(OwnerId),
    /// The owner of the write lock of a read-write lock.
    Writer(OwnerId),
    /// An owner of the read lock of a read-write lock.
    Reader(OwnerId),
    /// A permit of an expirable semaphore. The store does not record its owner.
    Permit(PermitId),
}

impl HeldBy {
    /// Returns the owner, unless it is a permit.
    pub fn owner(&self) -> Option<&OwnerId> {
        match self {
            HeldBy::Owner(owner) | HeldBy::Writer(owner) | HeldBy::Reader(owner) => Some(owner),
            HeldBy::Permit(_) => None,
        }
    }
}

/// As in the table of `redlatch show`.
impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeldBy::Owner(owner) => write!(f, "{owner}"),
            HeldBy::Writer(owner) => write!(f, "{owner} (write)"),
            HeldBy::Reader(owner) => write!(f, "{owner} (read)"),
            HeldBy::Permit(permit) => write!(f, "permit {permit}"),
        }
    }
}
