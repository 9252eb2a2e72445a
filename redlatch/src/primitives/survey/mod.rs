//! What there is under some names, whatever it is: what listings show.

#[cfg(test)]
mod differential;
mod rules;

use std::time::Duration;

use super::handle::Holder;

pub(crate) use rules::Survey;

/// What an object is and how it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ObjectState {
    /// A lock, of whatever kind: they look the same in the store, but for what they keep besides.
    #[non_exhaustive]
    Lock {
        /// Who holds it.
        holder: Option<Holder>,
        /// Who waits for it, in order, if it is a fair lock.
        queue: Vec<Waiting>,
        /// The token of its latest acquisition, if it is a fenced lock.
        token: Option<u64>,
    },
    /// A read-write lock that is held.
    #[non_exhaustive]
    ReadWriteLock {
        /// Who writes.
        writer: Option<Holder>,
        /// Who reads; one of them may be the writer.
        readers: Vec<Holder>,
    },
    /// A semaphore or a count-down latch: both are a number, and nothing else tells them apart.
    #[non_exhaustive]
    Counter {
        /// Permits available, or what is left to count down.
        value: i64,
        /// How long it lives, if not for ever.
        remaining: Option<Duration>,
    },
    /// An expirable semaphore with permits out. Without any it is a [`ObjectState::Counter`].
    #[non_exhaustive]
    ExpirableSemaphore {
        /// Permits available.
        available: i64,
        /// Permits that are out.
        acquired: Vec<OutPermit>,
    },
}

/// Somebody who waits for a fair lock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// `<client id>:<number>`.
    pub owner: String,
    /// How long its place in the queue is kept for it.
    pub remaining: Duration,
}

/// A permit of an expirable semaphore that somebody has.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutPermit {
    /// Its id, in hexadecimal digits.
    pub id: String,
    /// How long it is out unless renewed; `None` for ever.
    pub remaining: Option<Duration>,
}

/// What kind of object is kept under a name, as far as the store can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ObjectKind {
    /// A lock without anything besides.
    Lock,
    /// A lock with a queue.
    FairLock,
    /// A lock with a fencing token.
    FencedLock,
    /// A read-write lock.
    ReadWriteLock,
    /// A semaphore or a count-down latch.
    Counter,
    /// An expirable semaphore.
    ExpirableSemaphore,
}

impl ObjectState {
    /// What kind of object this is, as far as the store can tell: a fair lock that nobody waits for
    /// looks like any other.
    pub fn kind(&self) -> ObjectKind {
        match self {
            ObjectState::Lock { queue, .. } if !queue.is_empty() => ObjectKind::FairLock,
            ObjectState::Lock { token: Some(_), .. } => ObjectKind::FencedLock,
            ObjectState::Lock { .. } => ObjectKind::Lock,
            ObjectState::ReadWriteLock { .. } => ObjectKind::ReadWriteLock,
            ObjectState::Counter { .. } => ObjectKind::Counter,
            ObjectState::ExpirableSemaphore { .. } => ObjectKind::ExpirableSemaphore,
        }
    }

    /// All who hold it, if it is a lock: writer and readers, or the one holder.
    pub fn holders(&self) -> Vec<&Holder> {
        match self {
            ObjectState::Lock { holder, .. } => holder.iter().collect(),
            ObjectState::ReadWriteLock { writer, readers } => {
                writer.iter().chain(readers).collect()
            }
            ObjectState::Counter { .. } | ObjectState::ExpirableSemaphore { .. } => Vec::new(),
        }
    }
}

impl std::fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            ObjectKind::Lock => "lock",
            ObjectKind::FairLock => "fair lock",
            ObjectKind::FencedLock => "fenced lock",
            ObjectKind::ReadWriteLock => "read-write lock",
            ObjectKind::Counter => "semaphore or latch",
            ObjectKind::ExpirableSemaphore => "expirable semaphore",
        })
    }
}
