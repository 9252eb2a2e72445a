//! Which owners wait for which locks, and which owners hold those: from the registry of clients, and from the queues of fair locks.
//!
//! A *deadlock* is a cycle: each wait of it is for an object that is held by the owner of the next wait. In async programs each
//! acquisition has an owner of its own. A cycle in which a wait is for an object that the *task* of the next wait has acquired is
//! a possible deadlock only: the task may have passed the guard on, or it may wait for several locks at the same time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::client_registry::{AllClients, Registered, RegistryEntry, Role};
use crate::error::{Error, Result};
use crate::name::{FAIR_QUEUE_PATTERN, KeyLayout, ObjectKeys, object_of_queue, spans_slots};
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

/// A task of a client, which acts with several owners: the ids of both.
type Task<'a> = (&'a str, &'a str);

fn task_of(registered: Option<&RegistryEntry>) -> Option<Task<'_>> {
    let entry = registered?;
    Some((&entry.client.id, entry.task.as_deref()?))
}

impl WaitGraph {
    /// Returns the deadlocks: cycles in which each owner waits for a lock that the next one holds, and the last one for a lock
    /// of the first. Each wait is in one of them at most.
    ///
    /// An owner is a thread in `blocking` and in Redisson, and otherwise the one of the request
    /// ([`Acquire::owner`](crate::Acquire::owner)). See also [`WaitGraph::possible_deadlocks`].
    pub fn deadlocks(&self) -> Vec<Vec<&WaitingOwner>> {
        self.resolve(self.cycles(false, BTreeSet::new()))
    }

    /// Returns the cycles that are deadlocks if the owners of a task belong together: at least one wait is for a lock that the
    /// task of the next wait has acquired, with another owner. Does not contain the waits of [`WaitGraph::deadlocks`].
    ///
    /// Without [`Acquire::owner`](crate::Acquire::owner), each acquisition of an async program has an owner of its own, so a
    /// deadlock of its tasks is found here. But a task that passes its guards to other tasks, or waits for several locks at
    /// the same time (`join!`, `select!`), may be in such a cycle and yet continue.
    pub fn possible_deadlocks(&self) -> Vec<Vec<&WaitingOwner>> {
        let certain = self.cycles(false, BTreeSet::new()).concat();
        self.resolve(self.cycles(true, certain.into_iter().collect()))
    }

    fn resolve(&self, cycles: Vec<Vec<usize>>) -> Vec<Vec<&WaitingOwner>> {
        let waits = |cycle: Vec<usize>| cycle.into_iter().filter_map(|i| self.waits.get(i));
        cycles
            .into_iter()
            .map(|cycle| waits(cycle).collect())
            .collect()
    }

    /// Returns the cycles as indices of their waits, without those of some waits. If `by_task`, a task counts as the holder of
    /// what it has acquired.
    fn cycles(&self, by_task: bool, mut reported: BTreeSet<usize>) -> Vec<Vec<usize>> {
        let mut by_owner: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        let mut of_task: BTreeMap<Task<'_>, Vec<usize>> = BTreeMap::new();
        for (i, wait) in self.waits.iter().enumerate() {
            by_owner.entry(wait.owner.as_str()).or_default().push(i);
            let task = task_of(wait.registered.as_ref()).filter(|_| by_task);
            if let Some(task) = task {
                of_task.entry(task).or_default().push(i);
            }
        }
        let next = |(i, wait): (usize, &WaitingOwner)| -> BTreeSet<usize> {
            let waits = wait.holders.iter().flat_map(|holder| {
                let task = task_of(holder.registered.as_ref());
                let of_task = task.and_then(|task| of_task.get(&task));
                [by_owner.get(holder.owner.as_str()), of_task]
            });
            // A wait for what its own owner or task holds is no cycle.
            let waits = waits.flatten().flatten().copied();
            waits.filter(|to| *to != i).collect()
        };
        let next: Vec<_> = self.waits.iter().enumerate().map(next).collect();
        let mut cycles = Vec::new();
        for start in 0..next.len() {
            if reported.contains(&start) {
                continue;
            }
            if let Some(cycle) = shortest_cycle(start, &next, &reported) {
                reported.extend(cycle.iter().copied());
                cycles.push(cycle);
            }
        }
        cycles
    }

    /// Keeps the waits and holders that are also in an earlier graph, with the same owner and since the same time. The store is
    /// read in several steps while locks change hands, so only a cycle that remains is a deadlock.
    pub fn retain_unchanged(&mut self, earlier: &WaitGraph) {
        let since =
            |registered: &Option<RegistryEntry>| registered.as_ref().map(|one| one.since_ms);
        let is_same = |one: &Holder, other: &Holder| {
            one.owner == other.owner && since(&one.registered) == since(&other.registered)
        };
        let key = |wait: &WaitingOwner| (wait.name.clone(), wait.owner.clone());
        let earlier: BTreeMap<_, _> = earlier.waits.iter().map(|wait| (key(wait), wait)).collect();
        self.waits.retain_mut(|wait| {
            let Some(before) = earlier.get(&key(wait)) else {
                return false;
            };
            let is_held = |one: &Holder| before.holders.iter().any(|other| is_same(one, other));
            wait.holders.retain(is_held);
            since(&wait.registered) == since(&before.registered)
        });
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
    let is_readable = |key: &String| {
        let name = key.strip_prefix(&session.prefix);
        let is_name = |name: &str| {
            let object = ObjectKeys::new(KeyLayout::Lock, &session.prefix, name);
            !name.is_empty() && object.check().is_ok()
        };
        // In a cluster no script could read all keys of a name that spans slots.
        name.is_some_and(is_name) && (session.store.slot(key).is_none() || !spans_slots(key))
    };
    let keys: Vec<String> = keys.into_iter().filter(is_readable).collect();
    for page in keys.chunks(PAGE) {
        let inspect = |keys: Vec<String>| inspect_keys(&session.store, keys.into_iter());
        let mut inspected = inspect(page.to_vec()).await;
        if inspected.as_ref().is_err_and(is_refusal) {
            // Perhaps of one key only: those of other applications are skipped.
            let mut permitted = Vec::new();
            for key in page {
                match inspect(vec![key.clone()]).await {
                    Err(error) if is_refusal(&error) => {}
                    found => permitted.extend(found?),
                }
            }
            inspected = Ok(permitted);
        }
        for (key, seen) in inspected? {
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

/// Returns whether the client may not read a key.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error,
        Error::NotPermitted { .. } | Error::InvalidName { .. }
    )
}

/// Returns the waits for an object, in order.
fn waits(
    name: &str,
    state: Option<ObjectState>,
    entries: &[&Registered],
) -> impl Iterator<Item = WaitingOwner> {
    let find = |role: Role, owner: &OwnerId, writes: bool| {
        let is_sought =
            |one: &&&Registered| one.role == role && one.owner == *owner && one.writes == writes;
        let found = entries.iter().find(is_sought);
        found.map(|found| found.entry.clone())
    };
    let mut holders: Vec<Holder> = state
        .iter()
        .flat_map(ObjectState::holders)
        .cloned()
        .collect();
    let has_writer = matches!(
        state,
        Some(ObjectState::ReadWriteLock {
            writer: Some(_),
            ..
        })
    );
    // The writer comes first.
    let writes = |i: usize| i == 0 && has_writer;
    for (i, holder) in holders.iter_mut().enumerate() {
        holder.registered = find(Role::Holds, &holder.owner, writes(i));
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
            let registered = find(Role::Waits, &waiter.owner, false);
            wait(waiter.owner, Some(i + 1), registered)
        })
        .collect();
    let is_known = |one: &Registered| {
        // It may have acquired the object since it was registered. A reader may wait for the write lock.
        let mut holders = holders.iter().enumerate();
        waits.iter().any(|wait| wait.owner == one.owner)
            || holders.any(|(i, holder)| holder.owner == one.owner && writes(i) == one.writes)
    };
    let others = entries.iter().filter(|one| one.role == Role::Waits);
    let mut others: Vec<_> = others
        .filter(|one| !is_known(one))
        .map(|one| wait(one.owner.clone(), None, Some(one.entry.clone())))
        .collect();
    let age = |one: &WaitingOwner| one.registered.as_ref().map(|entry| entry.age);
    others.sort_by_key(|one| std::cmp::Reverse(age(one)));
    waits.extend(others);
    waits.into_iter()
}
