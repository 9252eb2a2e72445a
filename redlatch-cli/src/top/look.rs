//! What one look at the store has found.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use redlatch::Expiry;
use redlatch::inspect::{self, Listed, ObjectKind, ObjectState, RegistryEntry, WaitGraph};

/// Limit of locks that a look keeps. Further ones are only counted.
const MAX_LOCKS: usize = 20_000;

/// Limits of the owners that a look keeps of each lock. Further ones are only counted.
const MAX_HOLDERS: usize = 1000;
const MAX_WAITERS: usize = 1000;

/// All locks that match the pattern.
#[derive(Debug, Clone)]
pub(super) struct Look {
    /// Without those beyond the limit.
    pub(super) locks: Vec<Lock>,
    pub(super) omitted: usize,
    /// Whether the server refused to show which owners wait. Then only those in queues are known.
    pub(super) waits_refused: bool,
    /// When it began.
    pub(super) at: Instant,
    /// The same, by the clock of this machine.
    pub(super) time: SystemTime,
    pub(super) took: Duration,
}

/// A lock, or an expirable semaphore.
#[derive(Debug, Clone, Default)]
pub(super) struct Lock {
    pub(super) name: String,
    /// What the holder uses it as: `lock`, `fair`, `election`, `fenced`, `spin`,
    /// `read`, `write` or `permit`.
    pub(super) kind: String,
    pub(super) holders: Vec<Holder>,
    pub(super) holder_count: usize,
    /// In the order of the queue, then the longest wait first.
    pub(super) waiters: Vec<Waiter>,
    pub(super) waiter_count: usize,
    /// The fencing token.
    pub(super) token: Option<u64>,
    /// Of an expirable semaphore: how many permits are held, of how many.
    pub(super) permits: Option<(usize, i64)>,
}

/// The client behind an owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Party {
    /// The id of the owner, or of the permit.
    pub(super) owner: String,
    /// `report@db7 (pid 4711)`, if it is in the registry.
    pub(super) client: Option<String>,
    /// How long it has held or waited, if it is in the registry.
    pub(super) age: Option<Duration>,
    pub(super) note: Option<String>,
}

#[derive(Debug, Clone)]
pub(super) struct Holder {
    pub(super) party: Party,
    pub(super) lease: Expiry,
    /// `read` or `write`, of a read-write lock.
    pub(super) side: Option<&'static str>,
    /// How many times it holds the lock.
    pub(super) holds: u32,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Waiter {
    pub(super) party: Party,
    /// Its position in the queue of a fair lock.
    pub(super) position: Option<usize>,
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
    pub(super) fn name(&self) -> &str {
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
            ..Lock::default()
        };
        let default_kind = match found.state {
            ObjectState::Lock {
                holder,
                queue,
                token,
                ..
            } => {
                lock.holders
                    .extend(holder.iter().map(|holder| Holder::new(holder, None)));
                lock.waiter_count = queue.len();
                let waiter = |(i, waiter): (usize, &inspect::Waiter)| Waiter {
                    party: Party::new(waiter.owner.as_str(), waiter.registered.as_ref()),
                    position: Some(i + 1),
                };
                lock.waiters
                    .extend(queue.iter().enumerate().take(MAX_WAITERS).map(waiter));
                lock.token = token;
                match kind {
                    ObjectKind::FairLock => "fair",
                    ObjectKind::FencedLock => "fenced",
                    _ => "lock",
                }
            }
            ObjectState::ReadWriteLock {
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
                match writer {
                    Some(_) => "write",
                    None => "read",
                }
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
            ("fair", Some(used_as)) if used_as == "election" => used_as,
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

    /// Returns how long the longest wait has lasted.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        let ages = self.waiters.iter().filter_map(|waiter| waiter.party.age);
        ages.max()
    }

    /// Returns how long the oldest hold has lasted, if it is in the registry.
    pub(super) fn registered_age(&self) -> Option<Duration> {
        let ages = self.holders.iter().filter_map(|holder| holder.party.age);
        ages.max()
    }

    /// Returns the longest time until a hold ends unless it is renewed.
    pub(super) fn lease(&self) -> Option<Expiry> {
        let leases = self.holders.iter().map(|holder| holder.lease);
        leases.max_by_key(|lease| match lease {
            Expiry::In(left) => (false, *left),
            Expiry::Never => (true, Duration::ZERO),
        })
    }

    /// Returns the holders in a few words.
    pub(super) fn holder_text(&self) -> String {
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
    pub(super) fn new(at: Instant) -> Look {
        Look {
            locks: Vec::new(),
            omitted: 0,
            waits_refused: false,
            at,
            time: SystemTime::now(),
            took: Duration::ZERO,
        }
    }

    pub(super) fn add(&mut self, found: Listed) {
        if self.locks.len() < MAX_LOCKS {
            self.locks.extend(Lock::new(found));
        } else if !matches!(found.state, ObjectState::Counter { .. }) {
            self.omitted += 1;
        }
    }

    /// Removes locks that were listed twice, and adds the waits.
    pub(super) fn complete(&mut self, graph: &WaitGraph) {
        self.locks.sort_by(|lock, other| lock.name.cmp(&other.name));
        self.locks.dedup_by(|lock, other| lock.name == other.name);
        let mut waits: HashMap<&str, Vec<&inspect::WaitingOwner>> = HashMap::new();
        for wait in &graph.waits {
            waits.entry(&wait.name).or_default().push(wait);
        }
        for lock in &mut self.locks {
            if let Some(waits) = waits.remove(&*lock.name) {
                lock.add_waits(waits.into_iter());
            }
        }
        self.took = self.at.elapsed();
    }

    /// Adds locks that were held until recently.
    pub(super) fn add_free(&mut self, locks: impl Iterator<Item = Lock>) {
        // Beyond the limit, a lock may be missing although it is held.
        if self.omitted == 0 {
            let space = MAX_LOCKS.saturating_sub(self.locks.len());
            self.locks.extend(locks.take(space));
            self.locks.sort_by(|lock, other| lock.name.cmp(&other.name));
        }
    }

    /// Returns the number of locks that are held, with those beyond the limit.
    pub(super) fn held(&self) -> usize {
        let held = self.locks.iter().filter(|lock| lock.holder_count > 0);
        held.count() + self.omitted
    }

    /// Returns the lock of this name. The locks are sorted by name.
    pub(super) fn lock(&self, name: &str) -> Option<&Lock> {
        let at = self.locks.binary_search_by(|lock| (*lock.name).cmp(name));
        self.locks.get(at.ok()?)
    }
}
