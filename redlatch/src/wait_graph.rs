//! Which owners wait for which locks, and which owners hold those: from the registry of clients, and from the queues of fair locks.
//!
//! A *deadlock* is a cycle: each wait of it is for an object that is held by the owner or the task of the next wait. Owners alone
//! would not show it, because each acquisition of an async program has an owner of its own.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::client_registry::{AllClients, Registered, RegistryEntry, Role};
use crate::error::Result;
use crate::name::{FAIR_QUEUE_PATTERN, ObjectKeys, object_of_queue, spans_slots};
use crate::owner::OwnerId;
use crate::primitives::inspect::{ObjectState, inspect_keys};
use crate::primitives::lock::Holder;
use crate::session::Session;
use crate::store::{Cursor, ScanType};

/// Keys inspected per round trip.
const PAGE: usize = 100;

/// An owner that waits for a lock or permit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitingOwner {
    /// Name of the object, without the client's prefix.
    pub name: String,
    /// The owner that waits.
    pub owner: OwnerId,
    /// Position in the queue of a fair lock, from 1 on.
    pub position: Option<usize>,
    /// What its client has registered, if it has. Without it, the owner is in the queue of a fair lock.
    pub registered: Option<RegistryEntry>,
    /// The holders of the object.
    pub holders: Vec<Holder>,
}

/// The owners that wait, as far as the store shows them: [`Client::wait_graph`](crate::Client::wait_graph).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WaitGraph {
    /// By name, and for each name in the order of the queue, then the longest wait first.
    pub waits: Vec<WaitingOwner>,
    /// Number of clients in the registry that are not readable.
    pub unreadable: usize,
}

/// An owner, or a task of a client, which acts with several owners.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Actor<'a> {
    Owner(&'a str),
    Task(&'a str, Option<&'a str>),
}

/// Returns the actors as which an owner is known.
fn actors<'a>(
    owner: &'a OwnerId,
    registered: Option<&'a RegistryEntry>,
) -> impl Iterator<Item = Actor<'a>> {
    let task = registered.map(|entry| Actor::Task(&entry.client.id, entry.task.as_deref()));
    [Actor::Owner(owner.as_str())].into_iter().chain(task)
}

impl WaitGraph {
    /// Returns the deadlocks: cycles in which each owner waits for a lock that the next one holds, and the last one for a lock
    /// of the first. Each wait is in one of them at most.
    ///
    /// The owners of one task count as one, and so do those of a client outside of tasks (`Runtime::block_on`). A task that
    /// waits for several locks at the same time (`join!`, `select!`) may therefore be reported although it can continue.
    pub fn deadlocks(&self) -> Vec<Vec<&WaitingOwner>> {
        let mut waits_of: BTreeMap<Actor<'_>, Vec<usize>> = BTreeMap::new();
        for (i, wait) in self.waits.iter().enumerate() {
            for actor in actors(&wait.owner, wait.registered.as_ref()) {
                waits_of.entry(actor).or_default().push(i);
            }
        }
        let next = |wait: &WaitingOwner| -> BTreeSet<usize> {
            let holders = wait.holders.iter();
            let actors = holders.flat_map(|one| actors(&one.owner, one.registered.as_ref()));
            let waits = actors.filter_map(|actor| waits_of.get(&actor));
            waits.flatten().copied().collect()
        };
        let next: Vec<_> = self.waits.iter().map(next).collect();
        let mut reported = BTreeSet::new();
        let mut deadlocks = Vec::new();
        for start in 0..next.len() {
            if reported.contains(&start) {
                continue;
            }
            if let Some(cycle) = shortest_cycle(start, &next, &reported) {
                reported.extend(cycle.iter().copied());
                deadlocks.push(
                    cycle
                        .into_iter()
                        .filter_map(|i| self.waits.get(i))
                        .collect(),
                );
            }
        }
        deadlocks
    }
}

/// Returns the shortest cycle through `start`, without those that were reported.
fn shortest_cycle(
    start: usize,
    next: &[BTreeSet<usize>],
    reported: &BTreeSet<usize>,
) -> Option<Vec<usize>> {
    let mut before = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(at) = queue.pop_front() {
        for &to in next.get(at)? {
            if to == start {
                let mut cycle = vec![at];
                while let Some(&earlier) = cycle.last().and_then(|last| before.get(last)) {
                    cycle.push(earlier);
                }
                cycle.reverse();
                return Some(cycle);
            }
            if !reported.contains(&to) && !before.contains_key(&to) {
                before.insert(to, at);
                queue.push_back(to);
            }
        }
    }
    None
}

/// Reads the graph of all waits.
pub(crate) async fn read_all(session: &Session) -> Result<WaitGraph> {
    let all = session.registration.read_all(&session.store).await?;
    let mut keys: BTreeSet<String> = all
        .entries
        .iter()
        .filter(|one| one.role == Role::Waits)
        .map(|one| one.key.clone())
        .collect();
    let mut cursor = Some(Cursor::default());
    while let Some(at) = cursor {
        let (queues, next) = session
            .store
            .scan(FAIR_QUEUE_PATTERN, ScanType::Lists, at)
            .await?;
        keys.extend(
            queues
                .iter()
                .filter_map(|key| object_of_queue(key))
                .map(str::to_owned),
        );
        cursor = next;
    }
    read(session, &all, keys).await
}

/// Reads the owners that wait for one object.
pub(crate) async fn read_object(session: &Session, object: &ObjectKeys) -> Result<WaitGraph> {
    let all = session.registration.read_all(&session.store).await?;
    read(session, &all, BTreeSet::from([object.key().to_owned()])).await
}

/// Returns the waits for these objects.
async fn read(session: &Session, all: &AllClients, keys: BTreeSet<String>) -> Result<WaitGraph> {
    let mut registered: BTreeMap<&str, Vec<&Registered>> = BTreeMap::new();
    for one in &all.entries {
        registered.entry(&one.key).or_default().push(one);
    }
    let mut graph = WaitGraph {
        unreadable: all.unreadable,
        ..WaitGraph::default()
    };
    // In a cluster no script could read all keys of a name that spans slots.
    let is_readable = |key: &String| session.store.slot(key).is_none() || !spans_slots(key);
    let keys: Vec<String> = keys.into_iter().filter(is_readable).collect();
    for page in keys.chunks(PAGE) {
        for (key, seen) in inspect_keys(&session.store, page.iter().cloned()).await? {
            let state = seen.ok().flatten();
            let entries = registered.get(&*key).map_or(&[][..], Vec::as_slice);
            if let Some(name) = key.strip_prefix(&session.prefix) {
                graph.waits.extend(waits(name, state, entries));
            }
        }
    }
    graph.waits.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(graph)
}

/// Returns the waits for an object, in order.
fn waits(
    name: &str,
    state: Option<ObjectState>,
    entries: &[&Registered],
) -> impl Iterator<Item = WaitingOwner> {
    let find = |role: Role, owner: &OwnerId| {
        let is_sought = |one: &&&Registered| one.role == role && one.owner == *owner;
        let found = entries.iter().find(is_sought);
        found.map(|found| found.entry.clone())
    };
    let mut holders: Vec<Holder> = state
        .iter()
        .flat_map(ObjectState::holders)
        .cloned()
        .collect();
    for holder in &mut holders {
        holder.registered = find(Role::Holds, &holder.owner);
    }
    let queue = match state {
        Some(ObjectState::Lock { queue, .. }) => queue,
        _ => Vec::new(),
    };
    let wait = |owner: OwnerId, position, registered| WaitingOwner {
        name: name.to_owned(),
        owner,
        position,
        registered,
        holders: holders.clone(),
    };
    let mut waits: Vec<_> = queue
        .into_iter()
        .enumerate()
        .map(|(i, waiter)| {
            let registered = find(Role::Waits, &waiter.owner);
            wait(waiter.owner, Some(i + 1), registered)
        })
        .collect();
    let is_known = |owner: &OwnerId| {
        // It may have acquired the object since it was registered.
        waits.iter().any(|one| one.owner == *owner) || holders.iter().any(|one| one.owner == *owner)
    };
    let others = entries.iter().filter(|one| one.role == Role::Waits);
    let mut others: Vec<_> = others
        .filter(|one| !is_known(&one.owner))
        .map(|one| wait(one.owner.clone(), None, Some(one.entry.clone())))
        .collect();
    let age = |one: &WaitingOwner| one.registered.as_ref().map(|entry| entry.age);
    others.sort_by_key(|one| std::cmp::Reverse(age(one)));
    waits.extend(others);
    waits.into_iter()
}
