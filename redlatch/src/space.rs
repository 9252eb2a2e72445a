//! The embedded space: what Redis holds for us, in process, without I/O and without a clock.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

/// The keys of one embedded store and their expiry, under the same names as in Redis.
#[derive(Debug, Default)]
pub(crate) struct Space {
    entries: HashMap<String, Holds>,
    published: Vec<String>,
    swept_to: usize,
}

/// A hash `owner → hold count` with an end: what the lock keeps in Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holds {
    /// Hold counts by owner.
    pub(crate) counts: BTreeMap<String, u32>,
    /// When the key expires.
    pub(crate) ends: Instant,
}

impl Holds {
    pub(crate) fn remaining(&self, now: Instant) -> Duration {
        self.ends.saturating_duration_since(now)
    }

    /// Moves the end away, never nearer.
    pub(crate) fn extend_to(&mut self, end: Instant) {
        self.ends = self.ends.max(end);
    }
}

impl Space {
    /// The holds under `key`, if the key is there at `now`.
    pub(crate) fn holds(&mut self, key: &str, now: Instant) -> Option<&mut Holds> {
        if self.entries.get(key)?.ends <= now {
            self.entries.remove(key);
        }
        self.entries.get_mut(key)
    }

    /// Writes `key` anew.
    pub(crate) fn set(&mut self, key: &str, holds: Holds, now: Instant) {
        self.sweep(now);
        self.entries.insert(key.to_owned(), holds);
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// The keys that are there at `now`, in order.
    pub(crate) fn keys(&mut self, now: Instant) -> Vec<String> {
        self.entries.retain(|_, holds| holds.ends > now);
        let mut keys: Vec<_> = self.entries.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// Publishes to `channel` once the step that is running has ended.
    pub(crate) fn publish(&mut self, channel: &str) {
        self.published.push(channel.to_owned());
    }

    /// The channels published to since this was last asked.
    pub(crate) fn take_published(&mut self) -> Vec<String> {
        std::mem::take(&mut self.published)
    }

    /// Drops what has expired and is never asked for again, each time the space has doubled: so
    /// memory is bounded by what is held, at a constant cost per write.
    fn sweep(&mut self, now: Instant) {
        if self.entries.len() > 2 * self.swept_to + 64 {
            self.entries.retain(|_, holds| holds.ends > now);
            self.swept_to = self.entries.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expired_keys_that_nobody_asks_for_do_not_pile_up() {
        let start = Instant::now();
        let mut space = Space::default();
        for i in 0..100_000u64 {
            let now = start + Duration::from_millis(i);
            let holds = Holds {
                counts: BTreeMap::new(),
                ends: now + Duration::from_millis(10),
            };
            space.set(&format!("key-{i}"), holds, now);
            assert!(space.entries.len() < 200, "{}", space.entries.len());
        }
    }
}
