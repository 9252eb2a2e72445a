//! Changes of keys that a store reports, until a watch looks at them.
//!
//! Reports are hints, collected by key: however often a key changes, it is here once. So a slow reader costs little
//! memory, and one look at the key catches up.

use std::collections::BTreeMap;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::subscriber::Subscriber;
use crate::sync::{Mutex, wait_for};

/// Number of changed keys that are kept. Beyond it, all objects are read again.
const MAX_KEYS: usize = 10_000;

/// Collects what the store reports.
pub(crate) struct Changes {
    /// The keys that are reported start with one of these. No prefix starts with another.
    pub(crate) prefixes: Vec<String>,
    pending: Mutex<Reported>,
    added: Notify,
}

/// The changes that were reported since the last look.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Reported {
    /// The changed keys, and when the first change of each was reported.
    pub(crate) keys: BTreeMap<Box<str>, Instant>,
    /// Any key may have changed: all were deleted, or too many have changed.
    pub(crate) all: bool,
    /// The store reports nothing any more: changes are missed until reports are started again.
    pub(crate) ended: bool,
}

impl Changes {
    pub(crate) fn new(prefixes: Vec<String>) -> Changes {
        Changes {
            prefixes,
            pending: Mutex::default(),
            added: Notify::new(),
        }
    }

    /// Records that this key may have changed, if it has one of the prefixes.
    pub(super) fn add_key(&self, key: &str) {
        if !self.prefixes.iter().any(|prefix| key.starts_with(prefix)) {
            return;
        }
        let now = Instant::now();
        self.update(|pending| {
            if !pending.keys.contains_key(key) {
                pending.keys.insert(key.into(), now);
            }
            if pending.keys.len() > MAX_KEYS {
                pending.keys.clear();
                pending.all = true;
            }
        });
    }

    /// Forgets that the reports have ended, because they are about to be started again.
    pub(super) fn restart(&self) {
        self.pending.lock().ended = false;
    }

    fn update(&self, update: impl FnOnce(&mut Reported)) {
        update(&mut self.pending.lock());
        self.added.notify_one();
    }

    /// Waits until there is a report.
    pub(crate) async fn wait(&self) {
        let is_pending = || (*self.pending.lock() != Reported::default()).then_some(());
        wait_for(&self.added, is_pending).await;
    }

    /// Returns the changes that were reported since the last call.
    pub(crate) fn take(&self) -> Reported {
        std::mem::take(&mut *self.pending.lock())
    }
}

/// On the connection that carries the reports and nothing else.
impl Subscriber for Changes {
    fn on_message(&self, _: &str, _: &str) {}

    fn on_disconnect(&self) {
        self.update(|pending| pending.ended = true);
    }

    fn on_unsubscribed(&self, _: &str) {}

    fn on_changed(&self, key: Option<&str>) {
        match key {
            Some(key) => self.add_key(key),
            None => self.update(|pending| pending.all = true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_a_key_are_kept_once_and_with_the_first_time() {
        let changes = Changes::new(vec!["a:".into()]);
        changes.add_key("b:1");
        assert_eq!(changes.take(), Reported::default());
        changes.add_key("a:1");
        let first = changes.pending.lock().keys["a:1"];
        changes.add_key("a:1");
        let reported = changes.take();
        assert_eq!(reported.keys, BTreeMap::from([("a:1".into(), first)]));
        assert_eq!(changes.take(), Reported::default());
    }

    #[test]
    fn number_of_kept_keys_is_limited() {
        let changes = Changes::new(vec![String::new()]);
        for n in 0..3 * MAX_KEYS {
            changes.add_key(&n.to_string());
        }
        let reported = changes.take();
        assert!(reported.all && reported.keys.len() <= MAX_KEYS);
    }
}
