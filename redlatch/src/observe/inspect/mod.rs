//! Reads the kind and state of the objects under given names, for listings.

#[cfg(test)]
mod differential;
mod rules;

use std::collections::BTreeMap;

use crate::client_registry::{RegistryEntry, Role, Sought};
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::lease::Expiry;
use crate::locks::Holder;
use crate::locks::permits::HeldPermit;
use crate::name::{CandidateKeys, ObjectKeys, spans_slots};
use crate::owner::OwnerId;
use crate::session::Session;
use crate::store::Store;

pub(crate) use rules::Inspected;
#[cfg(test)]
pub(crate) use rules::inspect_names;
#[cfg(not(test))]
use rules::inspect_names;

/// The kind and state of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ObjectState {
    /// A lock of any kind but the read-write lock. In the store these locks differ only in their
    /// additional keys.
    #[non_exhaustive]
    Lock {
        /// The holder, if the lock is held.
        holder: Option<Holder>,
        /// The waiters in order, if it is a fair lock.
        queue: Vec<Waiter>,
        /// Its latest token, if it is a fenced lock.
        token: Option<u64>,
    },
    /// A held read-write lock.
    #[non_exhaustive]
    ReadWriteLock {
        /// The writer, if there is one.
        writer: Option<Holder>,
        /// The readers; one of them may be the writer.
        readers: Vec<Holder>,
    },
    /// A fair read-write lock, held or with waiters.
    #[non_exhaustive]
    FairReadWriteLock {
        /// The writer, if there is one.
        writer: Option<Holder>,
        /// The readers; one of them may be the writer.
        readers: Vec<Holder>,
        /// The waiters for both sides, in order.
        queue: Vec<Waiter>,
    },
    /// A fair semaphore, with held permits or waiters.
    #[non_exhaustive]
    FairSemaphore {
        /// The holders; their hold count is the number of their permits.
        holders: Vec<Holder>,
        /// The waiters, in order.
        queue: Vec<Waiter>,
    },
    /// A semaphore or a count-down latch. The store has only a number for either, so they cannot be
    /// distinguished.
    #[non_exhaustive]
    Counter {
        /// The number of available permits, or the count of the latch.
        value: i64,
        /// Time until the object expires.
        remaining: Expiry,
    },
    /// An expirable semaphore with held permits. Without held permits it is an
    /// [`ObjectState::Counter`].
    #[non_exhaustive]
    ExpirableSemaphore {
        /// Number of available permits.
        available: i64,
        /// The held permits, as
        /// [`ExpirableSemaphore::held_permits`](crate::ExpirableSemaphore::held_permits) returns
        /// them.
        held: Vec<HeldPermit>,
    },
}

/// A waiter of a fair lock, or of another fair object.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The owner that waits.
    pub owner: OwnerId,
    /// Whether it waits for the write side of a read-write lock.
    pub writes: bool,
    /// How many permits it waits for, if the object is a fair semaphore.
    pub permits: Option<u32>,
    /// Time until it loses its position in the queue.
    pub remaining: Expiry,
    /// What its client has registered about it, if it has: see
    /// [`ClientBuilder::registry`](crate::ClientBuilder::registry).
    pub registered: Option<RegistryEntry>,
}

/// Inspects the objects with these keys, and returns them in no order. In a cluster it sends one
/// script per slot, all concurrently.
pub(crate) async fn inspect_keys(
    store: &Store,
    keys: impl Iterator<Item = String>,
) -> Result<Vec<(String, Inspected)>> {
    let (keys, had_slots): (Vec<String>, _) = (keys.collect(), store.has_slots());
    match inspect_by_slot(store, &keys).await {
        // It has refused keys of several.
        Err(_) if store.has_slots() && !had_slots => inspect_by_slot(store, &keys).await,
        inspected => inspected,
    }
}

async fn inspect_by_slot(store: &Store, keys: &[String]) -> Result<Vec<(String, Inspected)>> {
    let mut slots: BTreeMap<Option<u16>, Vec<CandidateKeys>> = BTreeMap::new();
    // No script could read all keys of a name that spans slots, so it has no object.
    let (absent, keys): (Vec<_>, Vec<_>) = keys
        .iter()
        .partition(|key| store.has_slots() && spans_slots(key));
    for key in keys {
        let names = slots.entry(store.slot(key)).or_default();
        names.push(CandidateKeys::new(key.clone()));
    }
    let inspections = slots.into_values().map(|names| async move {
        let seen = store.run_idempotent(&inspect_names(&names)).await?;
        let keys = names.into_iter().map(|name| name.key);
        Ok::<_, Error>(keys.zip(seen).collect::<Vec<_>>())
    });
    let inspected: Result<Vec<_>> = join_all(inspections).await.into_iter().collect();
    let absent = absent.into_iter().map(|key| (key.clone(), Ok(None)));
    Ok(inspected?.into_iter().flatten().chain(absent).collect())
}

/// Returns the kind and state of an object; `None` if its key does not exist.
pub(crate) async fn inspect(session: &Session, object: &ObjectKeys) -> Result<Option<ObjectState>> {
    let names = [CandidateKeys::new(object.key().to_owned())];
    let states = session.store.run_idempotent(&inspect_names(&names)).await?;
    match states.into_iter().next() {
        Some(Ok(mut state)) => {
            let found = state.iter_mut().map(|state| (object.key(), state));
            look_up(session, found).await;
            Ok(state)
        }
        Some(Err(reason)) => Err(Error::WrongKind {
            name: object.name().to_owned(),
            reason,
        }),
        None => Ok(None),
    }
}

/// Adds what the registry of clients says about the holders and waiters of some objects, given with
/// their keys.
pub(crate) async fn look_up<'a>(
    session: &Session,
    objects: impl Iterator<Item = (&'a str, &'a mut ObjectState)>,
) {
    let sought = objects.flat_map(|(key, state)| state.owners(key));
    let registration = &session.registration;
    registration.look_up(&session.store, sought.collect()).await;
}

/// The kind of an object, as far as its data in the store shows it: see [`ObjectState::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ObjectKind {
    /// A lock without waiters in a queue and without a fencing token.
    Lock,
    /// A lock with waiters in a queue.
    FairLock,
    /// A lock with a fencing token.
    FencedLock,
    /// A read-write lock.
    ReadWriteLock,
    /// A fair read-write lock.
    FairReadWriteLock,
    /// A fair semaphore.
    FairSemaphore,
    /// A semaphore or a count-down latch.
    Counter,
    /// An expirable semaphore.
    ExpirableSemaphore,
}

impl ObjectState {
    /// Returns the kind of this object, as far as its data in the store shows it: a fair lock
    /// without waiters looks like any other lock.
    pub fn kind(&self) -> ObjectKind {
        match self {
            ObjectState::Lock { queue, .. } if !queue.is_empty() => ObjectKind::FairLock,
            ObjectState::Lock { token: Some(_), .. } => ObjectKind::FencedLock,
            ObjectState::Lock { .. } => ObjectKind::Lock,
            ObjectState::ReadWriteLock { .. } => ObjectKind::ReadWriteLock,
            ObjectState::FairReadWriteLock { .. } => ObjectKind::FairReadWriteLock,
            ObjectState::FairSemaphore { .. } => ObjectKind::FairSemaphore,
            ObjectState::Counter { .. } => ObjectKind::Counter,
            ObjectState::ExpirableSemaphore { .. } => ObjectKind::ExpirableSemaphore,
        }
    }

    /// Returns all holders and waiters that the state names. `key`: that of the object.
    pub(crate) fn owners<'a>(&'a mut self, key: &'a str) -> impl Iterator<Item = Sought<'a>> {
        let (writer, holders, queue) = match self {
            ObjectState::Lock { holder, queue, .. } => {
                (None, holder.as_mut_slice(), &mut queue[..])
            }
            ObjectState::ReadWriteLock { writer, readers } => {
                (writer.as_mut(), &mut readers[..], &mut [][..])
            }
            ObjectState::FairReadWriteLock {
                writer,
                readers,
                queue,
            } => (writer.as_mut(), &mut readers[..], &mut queue[..]),
            ObjectState::FairSemaphore { holders, queue } => {
                (None, &mut holders[..], &mut queue[..])
            }
            ObjectState::Counter { .. } | ObjectState::ExpirableSemaphore { .. } => {
                (None, &mut [][..], &mut [][..])
            }
        };
        let sought = move |role, writes, owner, entry| Sought {
            role,
            key,
            owner,
            writes,
            entry,
        };
        let holder = move |writes, it: &'a mut Holder| {
            sought(Role::Holds, writes, &it.owner, &mut it.registered)
        };
        let waiter =
            move |it: &'a mut Waiter| sought(Role::Waits, it.writes, &it.owner, &mut it.registered);
        let writer = writer.into_iter().map(move |it| holder(true, it));
        let holders = holders.iter_mut().map(move |it| holder(false, it));
        writer.chain(holders).chain(queue.iter_mut().map(waiter))
    }

    /// Returns the waiters in order, if it is a fair lock or another fair object.
    pub fn queue(&self) -> &[Waiter] {
        match self {
            ObjectState::Lock { queue, .. }
            | ObjectState::FairReadWriteLock { queue, .. }
            | ObjectState::FairSemaphore { queue, .. } => queue,
            _ => &[],
        }
    }

    /// Returns all holders of a lock or of a fair semaphore: writer and readers, or the single holder.
    pub fn holders(&self) -> Vec<&Holder> {
        match self {
            ObjectState::Lock { holder, .. } => holder.iter().collect(),
            ObjectState::ReadWriteLock { writer, readers }
            | ObjectState::FairReadWriteLock {
                writer, readers, ..
            } => writer.iter().chain(readers).collect(),
            ObjectState::FairSemaphore { holders, .. } => holders.iter().collect(),
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
            ObjectKind::FairReadWriteLock => "fair read-write lock",
            ObjectKind::FairSemaphore => "fair semaphore",
            ObjectKind::Counter => "semaphore or latch",
            ObjectKind::ExpirableSemaphore => "expirable semaphore",
        })
    }
}
