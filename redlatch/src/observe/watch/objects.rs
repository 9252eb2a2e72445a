//! The objects that exist, by key, and in the order in which something of them ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::known::{Known, ROUNDING};

#[derive(Debug, Default)]
pub(super) struct Objects {
    known: BTreeMap<Arc<str>, Known>,
    /// The next end of each object that has one.
    ends: BTreeSet<(Instant, Arc<str>)>,
}

impl Objects {
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(|key| &**key)
    }

    pub(super) fn contains(&self, key: &str) -> bool {
        self.known.contains_key(key)
    }

    /// Adds an object that is not known.
    pub(super) fn insert(&mut self, key: &str, known: Known) {
        let key: Arc<str> = key.into();
        self.ends
            .extend(known.next_end().map(|end| (end, key.clone())));
        self.known.insert(key, known);
    }

    /// Removes an object. Returns what was known of it.
    pub(super) fn take(&mut self, key: &str) -> Known {
        let Some((key, known)) = self.known.remove_entry(key) else {
            return Known::default();
        };
        if let Some(end) = known.next_end() {
            self.ends.remove(&(end, key));
        }
        known
    }

    /// Returns when something ends next.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// Returns the keys of the objects of which something has ended. Looks at no others.
    pub(super) fn ended(&self, now: Instant) -> impl Iterator<Item = &str> {
        let has_ended = move |end| now.checked_duration_since(end) >= Some(ROUNDING);
        let ended = self.ends.iter().take_while(move |(end, _)| has_ended(*end));
        ended.map(|(_, key)| &**key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lease::Expiry;
    use crate::observe::inspect::ObjectState;

    /// Returns a number that expires.
    fn ends_in(remaining: Expiry, at: Instant) -> Known {
        let value = 1;
        Known::new(Some(ObjectState::Counter { value, remaining }), at)
    }

    #[test]
    fn ends_are_those_of_known_objects() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut objects = Objects::default();
        let names = ["never", "first", "second", "third"];
        for (seconds, name) in names.into_iter().enumerate() {
            let remaining = match seconds {
                0 => Expiry::Never,
                _ => Expiry::In(second * seconds as u32),
            };
            objects.insert(name, ends_in(remaining, now));
        }
        let ended = |objects: &Objects, at| -> Vec<String> {
            objects.ended(at).map(str::to_owned).collect()
        };
        assert_eq!(objects.next_end(), Some(now + second));
        assert!(ended(&objects, now + second).is_empty());
        let first = now + second + ROUNDING;
        assert_eq!(ended(&objects, first), ["first"]);
        // It was renewed.
        assert!(objects.take("first").kind.is_some() && !objects.contains("first"));
        objects.insert("first", ends_in(Expiry::In(second), now + 2 * second));
        assert_eq!(objects.next_end(), Some(now + 2 * second));
        assert_eq!(
            ended(&objects, now + 4 * second),
            ["second", "first", "third"]
        );
        for name in names {
            objects.take(name);
        }
        assert!(objects.take("third").kind.is_none());
        assert_eq!((objects.next_end(), objects.ends.len()), (None, 0));
        assert_eq!(objects.keys().count(), 0);
    }
}
