//! The data: keys with values of four types, and when they expire.
//!
//! A key whose timestamp has passed is invisible from that moment on. A master also deletes it when it is looked
//! up, as a separate change; a replica leaves that to its master. Every change is recorded by key, so that
//! the caller can replicate the changes of a command.

use std::collections::BTreeMap;

use super::resp::Bytes;

/// A value and when it expires, in milliseconds since 1970.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub(super) value: Value,
    pub(super) expires: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Text(Bytes),
    Hash(Hash),
    List(List),
    SortedSet(SortedSet),
}

pub(super) type Hash = BTreeMap<Bytes, Bytes>;
pub(super) type List = Vec<Bytes>;

/// Scores by member; they are sorted by score on demand.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct SortedSet(pub(super) BTreeMap<Bytes, f64>);

impl SortedSet {
    /// Returns all members, by score and then by name.
    pub(super) fn sorted(&self) -> Vec<(Bytes, f64)> {
        let mut all: Vec<_> = self.0.iter().map(|(m, s)| (m.clone(), *s)).collect();
        // Stable: members with the same score stay in the order of the map.
        all.sort_by(|(_, one), (_, other)| one.total_cmp(other));
        all
    }
}

/// Error: the key holds another type than the command expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WrongType;

/// One of the types, for access to it.
pub(super) trait Kind: Sized {
    fn of(value: &Value) -> Option<&Self>;
    fn of_mut(value: &mut Value) -> Option<&mut Self>;
    fn empty() -> Value;
    fn is_empty(&self) -> bool;
}

macro_rules! kind {
    ($type:ty, $variant:ident, $is_empty:expr) => {
        impl Kind for $type {
            fn of(value: &Value) -> Option<&Self> {
                match value {
                    Value::$variant(value) => Some(value),
                    _ => None,
                }
            }

            fn of_mut(value: &mut Value) -> Option<&mut Self> {
                match value {
                    Value::$variant(value) => Some(value),
                    _ => None,
                }
            }

            fn empty() -> Value {
                Value::$variant(Default::default())
            }

            fn is_empty(&self) -> bool {
                let is_empty: fn(&Self) -> bool = $is_empty;
                is_empty(self)
            }
        }
    };
}

kind!(Hash, Hash, |hash| hash.is_empty());
kind!(List, List, |list| list.is_empty());
kind!(SortedSet, SortedSet, |set| set.0.is_empty());

impl Value {
    /// Returns the name of the type, as in the reply to TYPE.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Value::Text(_) => "string",
            Value::Hash(_) => "hash",
            Value::List(_) => "list",
            Value::SortedSet(_) => "zset",
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Keyspace {
    entries: BTreeMap<Bytes, Entry>,
    /// The time of the current command, in milliseconds since 1970.
    pub(super) now: u64,
    /// Whether the master deletes expired keys.
    pub(super) is_replica: bool,
    changes: Changes,
}

/// Changes since the last call that took them.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Whether all keys were removed first.
    pub(super) flushed: bool,
    /// Each with the numbers of its first and its latest change.
    pub(super) keys: BTreeMap<Bytes, (u64, u64)>,
    /// Number of changes.
    pub(super) count: u64,
}

impl Changes {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn note(&mut self, key: &[u8]) {
        self.count += 1;
        let first = (self.count, self.count);
        self.keys.entry(key.to_vec()).or_insert(first).1 = self.count;
    }
}

impl Keyspace {
    fn is_expired(&self, entry: &Entry) -> bool {
        // As in Redis, the key is still visible in the millisecond of its timestamp.
        entry.expires.is_some_and(|expires| self.now > expires)
    }

    /// Returns the entry unless it has expired.
    pub(super) fn get(&mut self, key: &[u8]) -> Option<&Entry> {
        let is_expired = self.is_expired(self.entries.get(key)?);
        if is_expired && !self.is_replica {
            self.remove(key);
        }
        self.entries.get(key).filter(|_| !is_expired)
    }

    pub(super) fn contains(&mut self, key: &[u8]) -> bool {
        self.get(key).is_some()
    }

    /// Writes the entry, and replaces any other.
    pub(super) fn put(&mut self, key: &[u8], entry: Entry) {
        self.entries.insert(key.to_vec(), entry);
        self.changes.note(key);
    }

    /// Removes the entry. Returns whether there was one.
    pub(super) fn remove(&mut self, key: &[u8]) -> bool {
        let removed = self.entries.remove(key).is_some();
        if removed {
            self.changes.note(key);
        }
        removed
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.changes.keys.clear();
        self.changes.flushed = true;
        self.changes.count += 1;
    }

    /// Reads a string, which unlike other types may be empty.
    pub(super) fn text(&mut self, key: &[u8]) -> Result<Option<&Bytes>, WrongType> {
        match self.get(key) {
            Some(Entry {
                value: Value::Text(text),
                ..
            }) => Ok(Some(text)),
            Some(_) => Err(WrongType),
            None => Ok(None),
        }
    }

    /// Writes a string; the key's expiry does not change.
    pub(super) fn set_text(&mut self, key: &[u8], text: Bytes) {
        let expires = self.get(key).and_then(|entry| entry.expires);
        let value = Value::Text(text);
        self.put(key, Entry { value, expires });
    }

    /// Reads a value of this type.
    pub(super) fn read<K: Kind>(&mut self, key: &[u8]) -> Result<Option<&K>, WrongType> {
        match self.get(key) {
            Some(entry) => K::of(&entry.value).map(Some).ok_or(WrongType),
            None => Ok(None),
        }
    }

    /// Changes a value of this type, which is created if missing and removed if it becomes empty.
    /// `change` also returns whether it has changed anything.
    pub(super) fn change<K: Kind, R>(
        &mut self,
        key: &[u8],
        change: impl FnOnce(&mut K) -> (R, bool),
    ) -> Result<R, WrongType> {
        if !self.contains(key) {
            // A replica may still store an expired entry.
            self.entries.remove(key);
        }
        let entry = self.entries.entry(key.to_vec()).or_insert_with(|| Entry {
            value: K::empty(),
            expires: None,
        });
        let value = K::of_mut(&mut entry.value).ok_or(WrongType)?;
        let (result, changed) = change(value);
        if value.is_empty() {
            self.entries.remove(key);
        }
        if changed {
            self.changes.note(key);
        }
        Ok(result)
    }

    /// Changes when a key expires.
    pub(super) fn set_expiry(&mut self, key: &[u8], expires: Option<u64>) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.expires = expires;
            self.changes.note(key);
        }
    }

    /// Returns all keys that have not expired, in order.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Bytes> {
        self.visible().map(|(key, _)| key)
    }

    /// Returns all entries that have not expired, by key.
    pub(super) fn visible(&self) -> impl Iterator<Item = (&Bytes, &Entry)> {
        self.entries
            .iter()
            .filter(|(_, entry)| !self.is_expired(entry))
    }

    /// Deletes expired keys.
    pub(super) fn delete_expired(&mut self) {
        let is_expired =
            |(key, entry): (&Bytes, &Entry)| self.is_expired(entry).then(|| key.clone());
        let over: Vec<Bytes> = self.entries.iter().filter_map(is_expired).collect();
        for key in over {
            self.remove(&key);
        }
    }

    /// Returns all stored entries, expired or not.
    pub(super) fn stored(&self) -> &BTreeMap<Bytes, Entry> {
        &self.entries
    }

    /// Replaces the data, without recording a change.
    pub(super) fn load(&mut self, entries: BTreeMap<Bytes, Entry>) {
        self.entries = entries;
    }

    /// Applies a change of the master.
    pub(super) fn apply(&mut self, key: &[u8], entry: Option<Entry>) {
        match entry {
            Some(entry) => {
                self.entries.insert(key.to_vec(), entry);
            }
            None => {
                self.entries.remove(key);
            }
        }
    }

    /// Returns the number of changes since they were last taken.
    pub(super) fn changed(&self) -> u64 {
        self.changes.count
    }

    pub(super) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }
}
