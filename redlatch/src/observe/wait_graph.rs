//! Which owners wait for which locks, and which owners hold those: from the registry of clients,
//! and from the queues of fair locks.
//!
//! A *deadlock* is a cycle: each wait of it is for an object that is held by the owner of the next
//! wait. In async programs each acquisition has an owner of its own. A cycle in which a wait is for
//! an object that the *task* of the next wait has acquired is a possible deadlock only: the task
//! may have passed the guard on, or it may wait for several locks at the same time. The store is
//! read in several steps, so a cycle may never have existed: the command reports one only if it
//! finds it twice, a moment apart.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::client_registry::{AllClients, Registered, RegistryEntry, Role};
use crate::error::{Error, Result};
use crate::locks::Holder;
use crate::name::{FAIR_QUEUE_PATTERNS, KeyLayout, ObjectKeys, object_of_queue};
use crate::observe::inspect::{ObjectState, inspect_keys};
use crate::observe::listing::PAGE;
use crate::owner::OwnerId;
use crate::session::Session;
use crate::store::{Cursor, ScanType};

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
    /// What its client has registered, if it has. Without it, the owner is in the queue of a fair
    /// lock.
    pub registered: Option<RegistryEntry>,
    /// The holders of the object.
    pub holders: Vec<Holder>,
}

/// The owners that wait, as far as the store shows them:
/// [`Client::wait_graph`](crate::Client::wait_graph).
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
    /// Returns the deadlocks: cycles in which each owner waits for a lock that the next one holds,
    /// and the last one for a lock of the first. Each wait is in one of them at most.
    ///
    /// An owner is a thread in `blocking` and in Redisson, and otherwise the one of the request
    /// ([`Acquire::owner`](crate::Acquire::owner)). See also [`WaitGraph::possible_deadlocks`].
    pub fn deadlocks(&self) -> Vec<Vec<&WaitingOwner>> {
        self.resolve(self.cycles(false, &[]))
    }

    /// Returns the cycles that are deadlocks if the owners of a task belong together: at least one
    /// wait is for a lock that the task of the next wait has acquired, with another owner. Does not
    /// contain the waits of [`WaitGraph::deadlocks`].
    ///
    /// Without [`Acquire::owner`](crate::Acquire::owner), each acquisition of an async program has
    /// an owner of its own, so a deadlock of its tasks is found here. But a task that passes its
    /// guards to other tasks, or waits for several locks at the same time (`join!`, `select!`), may
    /// be in such a cycle and yet continue.
    pub fn possible_deadlocks(&self) -> Vec<Vec<&WaitingOwner>> {
        let certain = self.cycles(false, &[]).concat();
        self.resolve(self.cycles(true, &certain))
    }

    fn resolve(&self, cycles: Vec<Vec<usize>>) -> Vec<Vec<&WaitingOwner>> {
        let waits = |cycle: Vec<usize>| cycle.into_iter().map(|i| &self.waits[i]).collect();
        cycles.into_iter().map(waits).collect()
    }

    /// Returns the cycles as indices of their waits, without those of some waits. If `by_task`, a
    /// task counts as the holder of what it has acquired.
    fn cycles(&self, by_task: bool, reported: &[usize]) -> Vec<Vec<usize>> {
        let mut edges = Edges::new(&self.waits, by_task);
        reported.iter().for_each(|wait| edges.remove(*wait));
        edges.take_cycles()
    }

    /// Keeps the waits and holders that are also in an earlier graph, with the same owner and since
    /// the same time. The store is read in several steps while locks change hands, so only a cycle
    /// that remains is a deadlock.
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

/// The edges between waits: from each to the waits of those that hold its object. They lead over
/// *parties*, owners and tasks, so their number is that of the waits and holders, also if an owner
/// that holds much waits often.
///
/// Only *live* waits are looked at: those that may be in a cycle. A wait without an edge to or from
/// a live one is in none.
struct Edges {
    parties: Vec<Party>,
    waits: Vec<Wait>,
    /// How often a wait was looked at.
    #[cfg(test)]
    looked_at: std::cell::Cell<usize>,
}

/// An owner, or a task.
#[derive(Default)]
struct Party {
    /// The waits of the party, in order, the index of the first live one, and how many are live.
    waits: Vec<usize>,
    first_live: usize,
    live_waits: usize,
    /// The waits for what the party holds, and how many of them are live.
    waited_for: Vec<usize>,
    live_waited_for: usize,
}

struct Wait {
    /// The parties that wait, as indices.
    own: Vec<usize>,
    /// The parties that hold the object.
    holders: BTreeSet<usize>,
    is_live: bool,
}

/// What identifies a party.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum PartyId<'a> {
    Owner(&'a str),
    Task(Task<'a>),
}

impl Edges {
    /// If `by_task`, a task counts as the holder of what it has acquired.
    fn new(waiting: &[WaitingOwner], by_task: bool) -> Edges {
        let mut indices = BTreeMap::new();
        let mut waits = Vec::new();
        for wait in waiting {
            let mut parties = |owner, registered| {
                let task = task_of(registered).filter(|_| by_task);
                let ids = [Some(PartyId::Owner(owner)), task.map(PartyId::Task)];
                let mut index = |id| {
                    let next = indices.len();
                    *indices.entry(id).or_insert(next)
                };
                ids.into_iter()
                    .flatten()
                    .map(&mut index)
                    .collect::<Vec<usize>>()
            };
            let own = parties(wait.owner.as_str(), wait.registered.as_ref());
            let mut holders = BTreeSet::new();
            for holder in &wait.holders {
                holders.extend(parties(holder.owner.as_str(), holder.registered.as_ref()));
            }
            waits.push(Wait {
                own,
                holders,
                is_live: true,
            });
        }
        let mut parties = Vec::new();
        parties.resize_with(indices.len(), Party::default);
        for (i, wait) in waits.iter().enumerate() {
            for own in &wait.own {
                parties[*own].waits.push(i);
            }
            for holder in &wait.holders {
                parties[*holder].waited_for.push(i);
            }
        }
        for party in &mut parties {
            party.live_waits = party.waits.len();
            party.live_waited_for = party.waited_for.len();
        }
        let mut edges = Edges {
            parties,
            waits,
            #[cfg(test)]
            looked_at: std::cell::Cell::default(),
        };
        edges.remove_unconnected((0..waiting.len()).collect());
        edges
    }

    /// Returns cycles that share no wait until there is none.
    fn take_cycles(&mut self) -> Vec<Vec<usize>> {
        let mut cycles = Vec::new();
        for start in 0..self.waits.len() {
            if !self.is_live(start) {
                continue;
            }
            match self.shortest_cycle(start) {
                Some(cycle) => {
                    cycle.iter().for_each(|wait| self.remove(*wait));
                    cycles.push(cycle);
                }
                None => self.remove(start),
            }
        }
        cycles
    }

    fn is_live(&self, wait: usize) -> bool {
        #[cfg(test)]
        self.looked_at.set(self.looked_at.get() + 1);
        self.waits[wait].is_live
    }

    /// Removes a wait, and those that are in no cycle without it.
    fn remove(&mut self, wait: usize) {
        let mut unconnected = Vec::new();
        self.remove_one(wait, &mut unconnected);
        self.remove_unconnected(unconnected);
    }

    /// Removes those of these waits that are in no cycle, and then of their neighbors.
    fn remove_unconnected(&mut self, mut candidates: Vec<usize>) {
        while let Some(wait) = candidates.pop() {
            if !self.is_live(wait) {
                continue;
            }
            let Wait { own, holders, .. } = &self.waits[wait];
            // A wait for what its own owner or task holds is no cycle.
            let leads_on = |holder: &usize| {
                self.parties[*holder].live_waits > usize::from(own.contains(holder))
            };
            let is_reached = |own: &usize| {
                self.parties[*own].live_waited_for > usize::from(holders.contains(own))
            };
            if !holders.iter().any(leads_on) || !own.iter().any(is_reached) {
                self.remove_one(wait, &mut candidates);
            }
        }
    }

    /// Removes a wait. Adds those to `candidates` that may be in no cycle any more.
    fn remove_one(&mut self, wait: usize, candidates: &mut Vec<usize>) {
        if !std::mem::take(&mut self.waits[wait].is_live) {
            return;
        }
        let Wait { own, holders, .. } = &self.waits[wait];
        // The last one may be the wait itself, so this looks at the waits of a party twice at most.
        for own in own {
            let party = &mut self.parties[*own];
            let is_live = |wait: &usize| self.waits[*wait].is_live;
            let rest = &party.waits[party.first_live..];
            party.first_live += rest.iter().take_while(|wait| !is_live(wait)).count();
            party.live_waits -= 1;
            if party.live_waits <= 1 {
                candidates.extend(&party.waited_for);
            }
        }
        for holder in holders {
            let party = &mut self.parties[*holder];
            party.live_waited_for -= 1;
            if party.live_waited_for <= 1 {
                candidates.extend(&party.waits);
            }
        }
    }

    /// Returns the shortest cycle of live waits through `start`.
    fn shortest_cycle(&self, start: usize) -> Option<Vec<usize>> {
        let Wait { own, holders, .. } = &self.waits[start];
        // For each party, the wait that leads to it, and the party of that wait.
        let mut before: BTreeMap<usize, Option<(usize, usize)>> = BTreeMap::new();
        before.extend(holders.iter().map(|holder| (*holder, None)));
        let mut queue: VecDeque<usize> = holders.iter().copied().collect();
        while let Some(at) = queue.pop_front() {
            let party = &self.parties[at];
            let waits = party.waits.iter().skip(party.first_live);
            for &wait in waits.filter(|wait| **wait != start && self.is_live(**wait)) {
                let holders = &self.waits[wait].holders;
                if own.iter().any(|own| holders.contains(own)) {
                    let mut cycle = vec![wait];
                    let mut party = at;
                    while let Some(&Some((earlier, of))) = before.get(&party) {
                        cycle.push(earlier);
                        party = of;
                    }
                    cycle.push(start);
                    cycle.reverse();
                    return Some(cycle);
                }
                for &holder in holders {
                    before.entry(holder).or_insert_with(|| {
                        queue.push_back(holder);
                        Some((wait, at))
                    });
                }
            }
        }
        None
    }
}

/// Reads the graph of all waits.
pub(crate) async fn read_all(session: &Session) -> Result<WaitGraph> {
    let all = session.registration.read_all(&session.store).await?;
    let waits = all.entries.iter().filter(|one| one.role == Role::Waits);
    let mut keys: BTreeSet<String> = waits.map(|one| one.key.clone()).collect();
    let store = &session.store;
    for pattern in FAIR_QUEUE_PATTERNS {
        let mut cursor = Some(Cursor::default());
        while let Some(at) = cursor {
            let (queues, next) = store.scan(pattern, ScanType::Lists, at).await?;
            let objects = queues.iter().filter_map(|key| object_of_queue(key));
            keys.extend(objects.map(str::to_owned));
            cursor = next;
        }
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
        let object = name.map(|name| ObjectKeys::new(KeyLayout::Lock, &session.prefix, name));
        object.is_some_and(|object| object.check().is_ok())
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
            let name = &key[session.prefix.len()..];
            graph.waits.extend(waits(name, &key, state, entries));
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
    key: &str,
    mut state: Option<ObjectState>,
    entries: &[&Registered],
) -> Vec<WaitingOwner> {
    let mut held = Vec::new();
    for one in state.iter_mut().flat_map(|state| state.owners(key)) {
        let is_same = |other: &&&Registered| {
            (other.role, other.writes) == (one.role, one.writes) && other.owner == *one.owner
        };
        let found = entries.iter().find(is_same);
        *one.entry = found.map(|found| found.entry.clone());
        if one.role == Role::Holds {
            held.push((one.owner.clone(), one.writes));
        }
    }
    let holders = state.iter().flat_map(ObjectState::holders);
    let holders: Vec<Holder> = holders.cloned().collect();
    let queue = state.map_or_else(Vec::new, |state| state.queue().to_vec());
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
        .map(|(i, waiter)| wait(waiter.owner, Some(i + 1), waiter.registered))
        .collect();
    let is_known = |one: &Registered| {
        // It may have acquired the object since it was registered. A reader may wait for the write
        // lock.
        let holds =
            |(owner, writes): &(OwnerId, bool)| *owner == one.owner && *writes == one.writes;
        waits.iter().any(|wait| wait.owner == one.owner) || held.iter().any(holds)
    };
    let others = entries.iter().filter(|one| one.role == Role::Waits);
    let mut others: Vec<_> = others
        .filter(|one| !is_known(one))
        .map(|one| wait(one.owner.clone(), None, Some(one.entry.clone())))
        .collect();
    let age = |one: &WaitingOwner| one.registered.as_ref().map(|entry| entry.age);
    others.sort_by_key(|one| std::cmp::Reverse(age(one)));
    waits.extend(others);
    waits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Expiry;

    /// Owner `owner` waits for what `holders` hold.
    fn wait(owner: usize, holders: impl IntoIterator<Item = usize>) -> WaitingOwner {
        let id = |owner| OwnerId::from(format!("c:{owner}"));
        let holder = |owner| Holder {
            owner: id(owner),
            holds: 1,
            remaining: Expiry::Never,
            registered: None,
        };
        WaitingOwner {
            name: "a".into(),
            owner: id(owner),
            position: None,
            registered: None,
            holders: holders.into_iter().map(holder).collect(),
        }
    }

    fn graph(waits: Vec<WaitingOwner>) -> WaitGraph {
        let unreadable = 0;
        WaitGraph { waits, unreadable }
    }

    fn cycles(waits: Vec<WaitingOwner>) -> Vec<Vec<usize>> {
        graph(waits).cycles(false, &[])
    }

    #[test]
    fn shortest_cycles_are_found_and_share_no_wait() {
        for (waits, expected) in [
            (vec![wait(1, [2]), wait(2, [3])], vec![]),
            // A wait for what its own owner holds is none.
            (vec![wait(1, [1])], vec![]),
            (vec![wait(1, [2]), wait(2, [1])], vec![vec![0, 1]]),
            // With a wait that leads to the cycle, and one that leads away from it.
            (
                vec![wait(0, [1]), wait(1, [2, 4]), wait(4, [5]), wait(2, [1])],
                vec![vec![1, 3]],
            ),
            // The shorter of two.
            (
                vec![wait(1, [2, 3]), wait(2, [3]), wait(3, [1])],
                vec![vec![0, 2]],
            ),
            // Two cycles with a bridge from one to the other.
            (
                vec![
                    wait(1, [2]),
                    wait(2, [1, 5]),
                    wait(5, [6]),
                    wait(6, [7]),
                    wait(7, [8]),
                    wait(8, [7]),
                ],
                vec![vec![0, 1], vec![4, 5]],
            ),
            // Each wait of an owner may be in a cycle of its own.
            (
                vec![wait(1, [2]), wait(1, [2]), wait(2, [1]), wait(2, [1])],
                vec![vec![0, 2], vec![1, 3]],
            ),
        ] {
            assert_eq!(cycles(waits.clone()), expected, "{waits:#?}");
        }
    }

    /// Returns how often a wait is looked at to find the deadlocks.
    fn work(waits: &[WaitingOwner]) -> usize {
        let mut edges = Edges::new(waits, false);
        std::hint::black_box(edges.take_cycles());
        edges.looked_at.get()
    }

    /// Anybody who may write to the store can make such queues.
    #[test]
    fn cost_grows_with_the_number_of_waits() {
        type Shape = fn(usize) -> Vec<WaitingOwner>;
        let shapes: [(&str, Shape); 4] = [
            (
                "the holder waits behind all others for itself, often",
                |n| (0..n).map(|i| wait(i % 2 * i, [0])).collect(),
            ),
            ("a chain", |n| (0..n).map(|i| wait(i, [i + 1])).collect()),
            ("a ring", |n| {
                (0..n).map(|i| wait(i, [(i + 1) % n])).collect()
            }),
            ("two owners that wait for each other often", |n| {
                (0..n).map(|i| wait(i % 2, [1 - i % 2])).collect()
            }),
        ];
        for (shape, waits) in shapes {
            let work = work(&waits(2_000));
            assert!(work < 10 * 2_000, "{shape}: {work}");
        }
    }
}
