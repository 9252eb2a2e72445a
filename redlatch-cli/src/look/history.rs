//! Changes between looks: turns per second, and earlier holders.
//!
//! Each look is compared with the one before. An owner that holds a lock, and did not hold it then,
//! is a turn. Holds that began and ended between two looks are not seen, except for fenced locks
//! whose token counts all of them. An owner that holds a lock no more is a past hold.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use super::{Lock, Look, Party};

/// Turns per second are an average over this many looks.
const LOOKS: usize = 10;

/// How many looks a lock is remembered that does not exist.
const FORGET_AFTER: u32 = 60;

/// How many looks a lock is shown that does not exist. Otherwise a lock that is held often, but for
/// short times, would come and go.
const FREE_FOR: u32 = 10;

/// Tokens from this one on, which is of 2001, follow the clock.
const FIRST_CLOCK_TOKEN: u64 = 1_000_000_000_000_000;

/// Limit of past holds, over all locks. The oldest are forgotten.
const MAX_PAST: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct History {
    locks: HashMap<String, Seen>,
    past: VecDeque<PastHold>,
    /// When the latest looks began, the latest one last.
    looks: VecDeque<Instant>,
}

/// The history of a lock since the view started.
#[derive(Debug, Default)]
struct Seen {
    kind: String,
    holders: Vec<SeenHolder>,
    token: Option<u64>,
    /// Turns in the latest looks, the latest one last.
    turns: VecDeque<u64>,
    /// For how many looks it has not existed.
    missing: u32,
}

#[derive(Debug, Clone)]
struct SeenHolder {
    party: Party,
    since: SystemTime,
    since_instant: Instant,
}

/// A hold that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PastHold {
    pub(crate) lock: String,
    pub(crate) party: Party,
    pub(crate) since: SystemTime,
    pub(crate) lasted: Duration,
}

/// How often a lock is acquired.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Turns {
    pub(crate) per_second: f64,
    /// Whether all turns were counted. Otherwise there were at least as many.
    pub(crate) is_exact: bool,
}

/// How long a lock has been held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Age {
    pub(crate) time: Duration,
    /// Whether the beginning is known. Otherwise it has been held at least as long.
    pub(crate) is_exact: bool,
}

impl History {
    /// Compares a look with the one before.
    pub(crate) fn add(&mut self, look: &Look) {
        let is_first = self.looks.is_empty();
        self.looks.push_back(look.at);
        if self.looks.len() > LOOKS + 1 {
            self.looks.pop_front();
        }
        for seen in self.locks.values_mut() {
            seen.missing += 1;
        }
        for lock in &look.locks {
            if !self.locks.contains_key(&lock.name) {
                self.locks.insert(lock.name.clone(), Seen::default());
            }
            let Some(seen) = self.locks.get_mut(&lock.name) else {
                continue;
            };
            seen.missing = 0;
            seen.kind.clone_from(&lock.kind);
            let is_known = |party: &Party, seen: &Seen| {
                let mut holders = seen.holders.iter();
                holders.any(|one| one.party.owner == party.owner)
            };
            let holders = lock.holders.iter().map(|holder| &holder.party);
            let begun = holders.clone().filter(|party| !is_known(party, seen));
            let begun = u64::try_from(begun.count()).unwrap_or(u64::MAX);
            // Of very many holders, the store may list others at each look.
            let are_all_listed = lock.holder_count <= lock.holders.len();
            let turns = match (lock.token, seen.counting_token()) {
                _ if is_first => 0,
                (Some(token), Some(before)) if token < FIRST_CLOCK_TOKEN => {
                    token.saturating_sub(before)
                }
                _ if !are_all_listed => 0,
                _ => begun,
            };
            seen.token = lock.token.or(seen.token);
            seen.add_turns(turns);
            let holders = holders.cloned().collect();
            let ended = seen.replace_holders(holders, look);
            if are_all_listed {
                remember(&mut self.past, &lock.name, ended, look.at);
            }
        }
        for (name, seen) in &mut self.locks {
            if seen.missing > 0 {
                seen.add_turns(0);
                let ended = seen.replace_holders(Vec::new(), look);
                remember(&mut self.past, name, ended, look.at);
            }
        }
        self.locks.retain(|_, seen| seen.missing < FORGET_AFTER);
    }

    /// Returns the locks that the latest look did not find, but one of those before it.
    pub(crate) fn free_locks(&self) -> impl Iterator<Item = Lock> {
        let recent = |seen: &Seen| (1..=FREE_FOR).contains(&seen.missing);
        let free = self.locks.iter().filter(move |(_, seen)| recent(seen));
        free.map(|(name, seen)| Lock {
            name: name.clone(),
            kind: seen.kind.clone(),
            token: seen.token,
            ..Lock::default()
        })
    }

    /// Returns how often the lock was acquired lately. `None` before the second look at it.
    pub(crate) fn turns(&self, name: &str) -> Option<Turns> {
        let seen = self.locks.get(name)?;
        // The first look at a lock has nothing to be compared with, unless the lock did not exist
        // before.
        let looks = seen.turns.len().min(self.looks.len().saturating_sub(1));
        let begun = *self.looks.iter().rev().nth(looks)?;
        let time = self.looks.back()?.duration_since(begun);
        if time.is_zero() {
            return None;
        }
        let turns: u64 = seen.turns.iter().rev().take(looks).sum();
        Some(Turns {
            per_second: turns as f64 / time.as_secs_f64(),
            is_exact: seen.counting_token().is_some(),
        })
    }

    /// Returns for how long this owner has been seen as a holder, up to the latest look.
    pub(crate) fn seen_for(&self, name: &str, owner: &str) -> Option<Duration> {
        let holders = &self.locks.get(name)?.holders;
        let holder = holders.iter().find(|one| one.party.owner == owner)?;
        Some(self.looks.back()?.duration_since(holder.since_instant))
    }

    /// Returns how long the oldest hold of a lock has lasted, up to the latest look.
    pub(crate) fn age(&self, lock: &Lock) -> Option<Age> {
        let registered = lock.registered_age().map(|time| Age {
            time,
            is_exact: true,
        });
        let seen = || {
            let holders = lock.holders.iter();
            let ages = holders.filter_map(|holder| self.seen_for(&lock.name, &holder.party.owner));
            ages.max().map(|time| Age {
                time,
                is_exact: false,
            })
        };
        registered.or_else(seen)
    }

    /// Returns the holds of a lock that have ended, the latest first.
    pub(crate) fn past(&self, name: &str) -> impl Iterator<Item = &PastHold> {
        self.past.iter().rev().filter(move |one| one.lock == name)
    }
}

impl Seen {
    /// Returns the token, if it counts the acquisitions.
    fn counting_token(&self) -> Option<u64> {
        self.token.filter(|token| *token < FIRST_CLOCK_TOKEN)
    }

    fn add_turns(&mut self, turns: u64) {
        self.turns.push_back(turns);
        if self.turns.len() > LOOKS {
            self.turns.pop_front();
        }
    }

    /// Sets the current holders of the lock, and returns the earlier ones that no longer hold it.
    fn replace_holders(&mut self, now: Vec<Party>, look: &Look) -> Vec<SeenHolder> {
        let mut before = std::mem::take(&mut self.holders);
        for mut party in now {
            let known = before
                .iter()
                .position(|one| one.party.owner == party.owner)
                .map(|at| before.swap_remove(at));
            let age = party.age;
            let holder = match known {
                Some(known) => {
                    // A hold is registered later than it begins, and is removed from the registry
                    // before it ends.
                    party.client = party.client.or(known.party.client);
                    party.note = party.note.or(known.party.note);
                    SeenHolder { party, ..known }
                }
                None => SeenHolder {
                    party,
                    since: look.time,
                    since_instant: look.at,
                },
            };
            // The registry knows when the hold began.
            let since = age.and_then(|age| look.time.checked_sub(age));
            let since_instant = age.and_then(|age| look.at.checked_sub(age));
            self.holders.push(SeenHolder {
                since: since.unwrap_or(holder.since),
                since_instant: since_instant.unwrap_or(holder.since_instant),
                ..holder
            });
        }
        before
    }
}

fn remember(past: &mut VecDeque<PastHold>, name: &str, ended: Vec<SeenHolder>, at: Instant) {
    for holder in ended {
        if past.len() == MAX_PAST {
            past.pop_front();
        }
        past.push_back(PastHold {
            lock: name.to_owned(),
            party: holder.party,
            since: holder.since,
            lasted: at.duration_since(holder.since_instant),
        });
    }
}
