//! What one look at the store has found: for `redlatch top` and `serve`.
//!
//! [`reader`] looks at the store, [`history`] compares a look with those before.

pub(crate) mod history;
pub(crate) mod reader;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant, SystemTime};

use redlatch::Expiry;
use redlatch::inspect::{self, Listed, ObjectKind, ObjectState, RegistryEntry, WaitGraph};
use serde::Serialize;

/// Limit of locks that a look keeps. Further ones are only counted.
const MAX_LOCKS: usize = 20_000;

/// Limits of the owners that a look keeps of each lock. Further ones are only counted.
const MAX_HOLDERS: usize = 1000;
const MAX_WAITERS: usize = 1000;

/// Limit of the names of semaphores and latches that a look keeps. Further ones are only counted.
const MAX_COUNTERS: usize = 1000;

/// All objects that match the pattern.
#[derive(Debug, Clone)]
pub(crate) struct Look {
    /// Without those beyond the limit.
    pub(crate) locks: Vec<Lock>,
    pub(crate) omitted: usize,
    /// Names of semaphores and latches, without those beyond the limit.
    pub(crate) counters: Vec<String>,
    /// How many objects there are, by their kinds, with those beyond the limits.
    pub(crate) kinds: BTreeMap<String, Counts>,
    /// Owners that wait, of all objects whatever their names.
    pub(crate) graph: WaitGraph,
    /// Whether the server refused to show which owners wait. Then only those in queues are known.
    pub(crate) waits_refused: bool,
    /// When it began.
    pub(crate) at: Instant,
    /// The same, by the clock of this machine.
    pub(crate) time: SystemTime,
    pub(crate) took: Duration,
    /// The kind of each object that was found.
    found: HashMap<String, ObjectKind>,
}

/// Numbers of objects, of their holders and of their waiters.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) objects: usize,
    pub(crate) holders: usize,
    pub(crate) waiters: usize,
}

/// A lock, or an expirable semaphore.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lock {
    pub(crate) name: String,
    /// What its data in the store show. `None` if it was held until recently.
    pub(crate) object: Option<ObjectKind>,
    /// What the holder uses it as: `lock`, `fair`, `election`, `fenced`, `spin`,
    /// `read`, `write` or `permit`.
    pub(crate) kind: String,
    pub(crate) holders: Vec<Holder>,
    pub(crate) holder_count: usize,
    /// In the order of the queue, then the longest wait first.
    pub(crate) waiters: Vec<Waiter>,
    pub(crate) waiter_count: usize,
    /// The fencing token.
    pub(crate) token: Option<u64>,
    /// Of an expirable semaphore: how many permits are held, of how many.
    pub(crate) permits: Option<(usize, i64)>,
}

/// The client behind an owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Party {
    /// The id of the owner, or of the permit.
    pub(crate) owner: String,
    /// `report@db7 (pid 4711)`, if it is in the registry.
    pub(crate) client: Option<String>,
    /// How long it has held or waited, if it is in the registry.
    pub(crate) age: Option<Duration>,
    pub(crate) note: Option<String>,
}

#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) party: Party,
    pub(crate) lease: Expiry,
    /// `read` or `write`, of a read-write lock.
    pub(crate) side: Option<&'static str>,
    /// How many times it holds the lock.
    pub(crate) holds: u32,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Waiter {
    pub(crate) party: Party,
    /// Its position in the queue of a fair lock.
    pub(crate) position: Option<usize>,
}

impl Party {
    fn new(owner: &str, registered: Option<&RegistryEntry>) -> Party {
        Party {
            owner: owner.to_owned(),
            client: registered.map(|entry| entry.client.to_string()),
            age: registered.map(|entry| entry.age),
            note: registered.and_then(|entry| entry.note.clone()),
        }
    }

    /// Returns the client, or the owner if its client is not known.
    pub(crate) fn name(&self) -> &str {
        self.client.as_deref().unwrap_or(&self.owner)
    }
}

impl Holder {
    fn new(holder: &inspect::Holder, side: Option<&'static str>) -> Holder {
        Holder {
            party: Party::new(holder.owner.as_str(), holder.registered.as_ref()),
            lease: holder.remaining,
            side,
            holds: holder.holds,
        }
    }
}

impl Lock {
    /// Returns the lock that was listed. `None` for semaphores and latches, which have no holder:
    /// any number in the store looks like one.
    fn new(found: Listed) -> Option<Lock> {
        let kind = found.state.kind();
        let registered = found.state.holders().into_iter();
        let registered = registered.filter_map(|holder| holder.registered.as_ref());
        let used_as = registered.map(|entry| entry.kind.clone()).next();
        let mut lock = Lock {
            name: found.name,
            object: Some(kind),
            ..Lock::default()
        };
        let queue = found.state.queue();
        lock.waiter_count = queue.len();
        let waiter = |(i, waiter): (usize, &inspect::Waiter)| Waiter {
            party: Party::new(waiter.owner.as_str(), waiter.registered.as_ref()),
            position: Some(i + 1),
        };
        lock.waiters
            .extend(queue.iter().enumerate().take(MAX_WAITERS).map(waiter));
        let default_kind = match found.state {
            ObjectState::Lock { holder, token, .. } => {
                lock.holders
                    .extend(holder.iter().map(|holder| Holder::new(holder, None)));
                lock.token = token;
                match kind {
                    ObjectKind::FairLock => "fair",
                    ObjectKind::FencedLock => "fenced",
                    _ => "lock",
                }
            }
            ObjectState::ReadWriteLock {
                writer, readers, ..
            }
            | ObjectState::FairReadWriteLock {
                writer, readers, ..
            } => {
                let writers = writer
                    .iter()
                    .map(|holder| Holder::new(holder, Some("write")));
                let sides = writers.chain(
                    readers
                        .iter()
                        .map(|holder| Holder::new(holder, Some("read"))),
                );
                lock.holders.extend(sides.take(MAX_HOLDERS));
                lock.holder_count = readers.len() + writer.iter().len();
                match (kind, writer) {
                    (ObjectKind::FairReadWriteLock, Some(_)) => "fair-write",
                    (ObjectKind::FairReadWriteLock, None) => "fair-read",
                    (_, Some(_)) => "write",
                    (_, None) => "read",
                }
            }
            ObjectState::FairSemaphore { holders, .. } => {
                let holder = |holder| Holder::new(holder, None);
                lock.holders
                    .extend(holders.iter().take(MAX_HOLDERS).map(holder));
                lock.holder_count = holders.len();
                "fair-semaphore"
            }
            ObjectState::ExpirableSemaphore {
                available, held, ..
            } => {
                let permit = |permit: &inspect::HeldPermit| Holder {
                    party: Party::new(&permit.id.to_string(), None),
                    lease: permit.remaining,
                    side: None,
                    holds: 1,
                };
                lock.holders
                    .extend(held.iter().take(MAX_HOLDERS).map(permit));
                lock.holder_count = held.len();
                let total = i64::try_from(held.len()).unwrap_or(i64::MAX);
                lock.permits = Some((held.len(), available.saturating_add(total)));
                "permit"
            }
            _ => return None,
        };
        lock.kind = match (default_kind, used_as) {
            // The queue and the token say more than the request of the holder. A writer may be
            // registered as a reader, too.
            ("lock", Some(used_as)) => used_as,
            // An election is a fair lock with a term.
            ("fair" | "fenced", Some(used_as)) if used_as == "election" => used_as,
            (kind, _) => kind.to_owned(),
        };
        lock.holder_count = lock.holder_count.max(lock.holders.len());
        Some(lock)
    }

    /// Adds the waits that are in the registry, in the order of the graph.
    fn add_waits<'a>(&mut self, waits: impl Iterator<Item = &'a inspect::WaitingOwner>) {
        let mut waiters = Vec::new();
        let mut count = 0;
        for wait in waits {
            count += 1;
            if waiters.len() < MAX_WAITERS {
                waiters.push(Waiter {
                    party: Party::new(wait.owner.as_str(), wait.registered.as_ref()),
                    position: wait.position,
                });
            }
        }
        // The queue may have grown between the two reads.
        if count >= self.waiter_count {
            (self.waiters, self.waiter_count) = (waiters, count);
        }
    }

    /// Returns whether the name or the holder contains a text, in lower case.
    pub(crate) fn matches(&self, wanted: &str) -> bool {
        let has = |text: &str| text.to_lowercase().contains(wanted);
        wanted.is_empty() || has(&self.name) || has(&self.holder_text())
    }

    /// Returns how long the longest wait has lasted.
    pub(crate) fn longest_wait(&self) -> Option<Duration> {
        let ages = self.waiters.iter().filter_map(|waiter| waiter.party.age);
        ages.max()
    }

    /// Returns how long the oldest hold has lasted, if it is in the registry.
    pub(crate) fn registered_age(&self) -> Option<Duration> {
        let ages = self.holders.iter().filter_map(|holder| holder.party.age);
        ages.max()
    }

    /// Returns the longest time until a hold ends unless it is renewed.
    pub(crate) fn lease(&self) -> Option<Expiry> {
        let leases = self.holders.iter().map(|holder| holder.lease);
        leases.max_by_key(|lease| match lease {
            Expiry::In(left) => (false, *left),
            Expiry::Never => (true, Duration::ZERO),
        })
    }

    /// Returns the holders in a few words.
    pub(crate) fn holder_text(&self) -> String {
        if let Some((held, total)) = self.permits {
            return format!("({held} of {total} permits)");
        }
        match (self.holders.first(), self.holder_count) {
            (None, _) => "(free)".into(),
            (Some(holder), 1) => holder.party.name().to_owned(),
            (Some(holder), count) => format!("{count}: {}, …", holder.party.name()),
        }
    }
}

impl Look {
    pub(crate) fn new(at: Instant) -> Look {
        Look {
            locks: Vec::new(),
            omitted: 0,
            counters: Vec::new(),
            kinds: BTreeMap::new(),
            graph: WaitGraph::default(),
            waits_refused: false,
            at,
            time: SystemTime::now(),
            took: Duration::ZERO,
            found: HashMap::new(),
        }
    }

    pub(crate) fn add(&mut self, found: Listed) {
        let kind = found.state.kind();
        // SCAN may return a key several times.
        if self.found.insert(found.name.clone(), kind).is_some() {
            return;
        }
        let counts = self.kinds.entry(kind.to_string()).or_default();
        counts.objects += 1;
        counts.holders += match &found.state {
            ObjectState::ExpirableSemaphore { held, .. } => held.len(),
            state => state.holders().len(),
        };
        if kind == ObjectKind::Counter {
            if self.counters.len() < MAX_COUNTERS {
                self.counters.push(found.name);
            }
        } else if self.locks.len() < MAX_LOCKS {
            self.locks.extend(Lock::new(found));
        } else {
            self.omitted += 1;
        }
    }

    /// Sorts the locks, and adds the waits.
    pub(crate) fn complete(&mut self, graph: WaitGraph) {
        self.locks.sort_by(|lock, other| lock.name.cmp(&other.name));
        let mut waits: HashMap<&str, Vec<&inspect::WaitingOwner>> = HashMap::new();
        for wait in &graph.waits {
            waits.entry(&wait.name).or_default().push(wait);
        }
        for (name, waits) in &waits {
            let kind = self.found.get(*name).map(ObjectKind::to_string);
            if let Some(counts) = kind.and_then(|kind| self.kinds.get_mut(&kind)) {
                counts.waiters += waits.len();
            }
        }
        for lock in &mut self.locks {
            if let Some(waits) = waits.remove(&*lock.name) {
                lock.add_waits(waits.into_iter());
            }
        }
        self.graph = graph;
        self.found = HashMap::new();
        self.took = self.at.elapsed();
    }

    /// Adds locks that were held until recently.
    pub(crate) fn add_free(&mut self, locks: impl Iterator<Item = Lock>) {
        // Beyond the limit, a lock may be missing although it is held.
        if self.omitted == 0 {
            let space = MAX_LOCKS.saturating_sub(self.locks.len());
            self.locks.extend(locks.take(space));
            self.locks.sort_by(|lock, other| lock.name.cmp(&other.name));
        }
    }

    /// Returns the number of locks that are held, with those beyond the limit.
    pub(crate) fn held(&self) -> usize {
        let held = self.locks.iter().filter(|lock| lock.holder_count > 0);
        held.count() + self.omitted
    }

    /// Returns the elections that have a leader, as far as it is in the registry.
    pub(crate) fn elections(&self) -> impl Iterator<Item = &Lock> {
        let locks = self.locks.iter();
        locks.filter(|lock| lock.kind == "election" && lock.holder_count > 0)
    }

    /// Returns the lock of this name. The locks are sorted by name.
    pub(crate) fn lock(&self, name: &str) -> Option<&Lock> {
        let at = self.locks.binary_search_by(|lock| (*lock.name).cmp(name));
        self.locks.get(at.ok()?)
    }
}

#[cfg(test)]
mod tests {
    use redlatch::Client;

    use super::*;

    #[tokio::test]
    async fn name_that_scan_returns_twice_is_counted_once() {
        let client = Client::embedded();
        let guard = client.fair_lock("a").lock().await.unwrap();
        let lock = client.fair_lock("a");
        let waiter = tokio::spawn(async move { lock.lock().await.map(drop) });
        let mut graph = client.wait_graph().await.unwrap();
        while graph.waits.is_empty() {
            tokio::task::yield_now().await;
            graph = client.wait_graph().await.unwrap();
        }
        let mut look = Look::new(Instant::now());
        for _ in 0..2 {
            look.add(client.list("*").next().await.unwrap().unwrap());
        }
        look.complete(graph);
        let counts = Counts {
            objects: 1,
            holders: 1,
            waiters: 1,
        };
        assert_eq!(look.kinds, BTreeMap::from([("fair lock".into(), counts)]));
        let locks = look.locks.iter();
        let locks: Vec<_> = locks.map(|lock| (&*lock.name, lock.waiter_count)).collect();
        assert_eq!(locks, [("a", 1)]);
        guard.unlock().await.unwrap();
        waiter.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn objects_beyond_the_limits_are_counted() {
        let client = Client::embedded();
        let _guard = client.lock("lock").lock().await.unwrap();
        client
            .semaphore("semaphore")
            .try_set_permits(1)
            .await
            .unwrap();
        let mut listing = client.list("*");
        let mut look = Look::new(Instant::now());
        while let Some(found) = listing.next().await.unwrap() {
            for i in 0..=MAX_LOCKS {
                let mut one = found.clone();
                one.name = format!("{}{i}", found.name);
                look.add(one);
            }
        }
        assert_eq!((look.locks.len(), look.omitted), (MAX_LOCKS, 1));
        assert_eq!(look.counters.len(), MAX_COUNTERS);
        let objects = look.kinds.values().map(|counts| counts.objects);
        assert_eq!(objects.sum::<usize>(), 2 * (MAX_LOCKS + 1));
        assert_eq!(look.held(), MAX_LOCKS + 1);
    }
}
