//! The embedded keyspace: the keys that Redis would keep, in process, without I/O and without a clock.
//!
//! Keys and rules are those of Redis: a key that has expired or become empty does not exist, and accessing
//! a key as another type is an error.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::lease::{self, Expiry};
#[cfg(test)]
use crate::name::GROUP_END;

/// The keys of one embedded store and their expiry.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Keyspace {
    /// The time of the current step, which the store sets.
    pub(crate) now: Instant,
    entries: HashMap<String, Entry>,
    published: Vec<Message>,
    /// Number of subscribers by channel.
    subscribers: HashMap<String, usize>,
    /// Origin of timestamps: the time of the first one.
    origin: Option<Instant>,
    /// A time, and how far it is from 1970 by the clock.
    clock: (Instant, Duration),
    /// Number of keys after the last sweep.
    swept_to: usize,
}

/// A published message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) channel: String,
    pub(crate) payload: i64,
}

/// The value of a key, and its expiry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    value: Value,
    /// When the key expires, if it does.
    ends: Option<Instant>,
}

#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Value {
    Holds(Holds),
    Number(i64),
    Queue(VecDeque<String>),
    Timestamps(BTreeMap<String, i64>),
    Texts(BTreeMap<String, String>),
}

/// A hash `owner → hold count`, with a mode if it belongs to a read-write lock.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Holds {
    pub(crate) counts: BTreeMap<String, u32>,
    pub(crate) mode: Option<Mode>,
}

/// The side of a read-write lock that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Mode {
    Read,
    Write,
}

/// A type of value: a hash of [`Holds`], a number (a string), a queue of owners (a list), timestamps by
/// member, in milliseconds (a sorted set), or a hash of texts.
pub(crate) trait ValueType: Sized {
    fn of(value: &mut Value) -> Option<&mut Self>;
    fn wrap(self) -> Value;
}

macro_rules! value_types {
    ($($value_type:ty => $variant:ident,)*) => {
        $(impl ValueType for $value_type {
            fn of(value: &mut Value) -> Option<&mut Self> {
                match value {
                    Value::$variant(value) => Some(value),
                    _ => None,
                }
            }
            fn wrap(self) -> Value {
                Value::$variant(self)
            }
        })*
    };
}

value_types! {
    Holds => Holds,
    i64 => Number,
    VecDeque<String> => Queue,
    BTreeMap<String, i64> => Timestamps,
    BTreeMap<String, String> => Texts,
}

/// An existing key: its value and expiry.
pub(crate) struct FoundKey<'a, T> {
    pub(crate) value: &'a mut T,
    ends: &'a mut Option<Instant>,
    now: Instant,
}

impl<T> FoundKey<'_, T> {
    /// Returns when the key expires.
    pub(crate) fn remaining(&self) -> Expiry {
        Expiry::of(*self.ends, self.now)
    }

    /// Sets the expiry to `left` from now if that is later. A key that has lost its expiry gets one again: without
    /// it, a dead owner would keep the key forever.
    pub(crate) fn extend_to(&mut self, left: Duration) {
        let end = self.now + left;
        *self.ends = Some(self.ends.map_or(end, |ends| ends.max(end)));
    }

    /// Sets the expiry to `left` from now if that is earlier. A key without an expiry stays without one.
    pub(crate) fn shorten_to(&mut self, left: Duration) {
        *self.ends = self.ends.map(|ends| ends.min(self.now + left));
    }

    pub(crate) fn expire_after(&mut self, left: Duration) {
        *self.ends = Some(self.now + left);
    }
}

impl Value {
    fn is_empty(&self) -> bool {
        match self {
            Value::Holds(holds) => holds.counts.is_empty() && holds.mode.is_none(),
            Value::Number(_) => false,
            Value::Queue(queue) => queue.is_empty(),
            Value::Timestamps(timestamps) => timestamps.is_empty(),
            Value::Texts(texts) => texts.is_empty(),
        }
    }
}

impl Entry {
    fn exists(&self, now: Instant) -> bool {
        self.ends.is_none_or(|ends| ends > now) && !self.value.is_empty()
    }
}

impl Keyspace {
    /// Creates an empty keyspace.
    pub(crate) fn new(now: Instant) -> Keyspace {
        Keyspace {
            now,
            entries: HashMap::new(),
            published: Vec::new(),
            subscribers: HashMap::new(),
            origin: None,
            clock: (now, Duration::ZERO),
            swept_to: 0,
        }
    }

    /// Sets the clock, which stands at 1970 at first.
    pub(crate) fn set_clock(&mut self, since_1970: Duration) {
        self.clock = (self.now, since_1970);
    }

    /// Returns the time by the clock, in µs since 1970. The clock is never set back.
    pub(crate) fn clock_micros(&self) -> i64 {
        let (at, since_1970) = self.clock;
        let time = since_1970 + self.now.saturating_duration_since(at);
        i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
    }

    /// Returns the value of `key`. Fails if it has another type.
    pub(crate) fn find<T: ValueType>(&mut self, key: &str) -> Result<Option<FoundKey<'_, T>>> {
        let now = self.now;
        match self.live_entry(key) {
            Some(Entry { value, ends }) => {
                let value = T::of(value).ok_or_else(|| wrong_type(key))?;
                Ok(Some(FoundKey { value, ends, now }))
            }
            None => Ok(None),
        }
    }

    /// Returns the value of `key`. If there is none, creates an empty value without an expiry.
    pub(crate) fn find_or_create<T: ValueType + Default>(&mut self, key: &str) -> Result<&mut T> {
        if !self.exists(key) {
            self.set(key, T::default(), None);
        }
        let value = self.entries.get_mut(key).map(|entry| &mut entry.value);
        value.and_then(T::of).ok_or_else(|| wrong_type(key))
    }

    /// Returns whether `key` exists.
    pub(crate) fn exists(&mut self, key: &str) -> bool {
        self.live_entry(key).is_some()
    }

    /// Returns the value of `key`, if it exists.
    pub(crate) fn entry(&mut self, key: &str) -> Option<&Entry> {
        self.live_entry(key).map(|entry| &*entry)
    }

    /// Returns when `key` expires; `None` if it does not exist.
    pub(crate) fn remaining(&mut self, key: &str) -> Option<Expiry> {
        let ends = self.live_entry(key)?.ends;
        Some(Expiry::of(ends, self.now))
    }

    /// Replaces `key`, which expires after `left`, if that is set.
    pub(crate) fn set<T: ValueType>(&mut self, key: &str, value: T, left: Option<Duration>) {
        self.sweep();
        let (value, ends) = (value.wrap(), left.map(|left| self.now + left));
        self.entries.insert(key.to_owned(), Entry { value, ends });
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// Returns the existing keys, in order.
    pub(crate) fn keys(&mut self) -> Vec<String> {
        self.entries.retain(|_, entry| entry.exists(self.now));
        let mut keys: Vec<_> = self.entries.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// Returns the current timestamp: see [`Keyspace::timestamp`].
    pub(crate) fn now_ms(&mut self) -> i64 {
        self.timestamp(self.now)
    }

    /// Returns the current timestamp, rounded up to whole milliseconds.
    pub(crate) fn now_ms_rounded_up(&mut self) -> i64 {
        // The first call defines where timestamps begin, so it must be made with the original time.
        self.now_ms();
        self.timestamp(self.now + Duration::from_nanos(999_999))
    }

    /// Converts a time to a timestamp: whole milliseconds since an origin of this keyspace.
    pub(crate) fn timestamp(&mut self, at: Instant) -> i64 {
        let origin = *self.origin.get_or_insert(at);
        lease::millis(at.saturating_duration_since(origin))
    }

    /// Publishes to `channel` once the current step has ended. Returns the number of subscribers.
    pub(crate) fn publish(&mut self, channel: &str, payload: i64) -> usize {
        self.published.push(Message {
            channel: channel.to_owned(),
            payload,
        });
        self.subscriber_count(channel)
    }

    /// Returns the number of subscribers of `channel`.
    pub(crate) fn subscriber_count(&self, channel: &str) -> usize {
        self.subscribers.get(channel).copied().unwrap_or(0)
    }

    /// Sets the number of subscribers of `channel`.
    pub(crate) fn set_subscriber_count(&mut self, channel: &str, count: usize) {
        if count == 0 {
            self.subscribers.remove(channel);
        } else {
            self.subscribers.insert(channel.to_owned(), count);
        }
    }

    /// Returns the messages that were published since the last call.
    pub(crate) fn take_published(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.published)
    }

    /// Drops expired keys that are never accessed, each time the keyspace has doubled. So memory is bounded by
    /// the live keys, at a constant cost per write.
    fn sweep(&mut self) {
        if self.entries.len() > 2 * self.swept_to + 64 {
            self.entries.retain(|_, entry| entry.exists(self.now));
            self.swept_to = self.entries.len();
        }
    }

    /// Returns the entry of an existing key. Removes it if it has expired or become empty.
    fn live_entry(&mut self, key: &str) -> Option<&mut Entry> {
        if !self.entries.get(key)?.exists(self.now) {
            self.entries.remove(key);
        }
        self.entries.get_mut(key)
    }
}

fn wrong_type(key: &str) -> Error {
    Error::WrongKind {
        name: key.to_owned(),
        reason: "a key of another type",
    }
}

#[cfg(test)]
impl Keyspace {
    /// Removes the expiry of a key.
    pub(crate) fn persist(&mut self, key: &str) {
        if let Some(entry) = self.live_entry(key) {
            entry.ends = None;
        }
    }

    /// Hashes all keys, with all times relative to now: states that were reached at different times and
    /// behave alike from then on are equal. Timestamps that passed longer ago than `past` milliseconds compare
    /// equal. The number under the key `counted.0` is hashed relative to `counted.1`.
    pub(crate) fn hash(
        &mut self,
        past: i64,
        counted: (&str, i64),
        hasher: &mut impl std::hash::Hasher,
    ) {
        use std::hash::Hash as _;
        let now = self.now;
        let now_timestamp = self.now_ms();
        self.entries.retain(|_, entry| entry.exists(now));
        let mut entries: Vec<_> = self.entries.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        for (key, Entry { value, ends }) in entries {
            (key, ends.map(|ends| ends - now)).hash(hasher);
            match value {
                Value::Number(number) if key == counted.0 => (number - counted.1).hash(hasher),
                Value::Timestamps(timestamps) => {
                    for (member, timestamp) in timestamps {
                        (member, (timestamp - now_timestamp).max(-past)).hash(hasher);
                    }
                }
                Value::Texts(texts) => {
                    for (field, text) in texts {
                        match text.parse::<i64>() {
                            Ok(end) if field.ends_with(GROUP_END) => {
                                (field, (end - now_timestamp).max(-past)).hash(hasher);
                            }
                            _ => (field, text).hash(hasher),
                        }
                    }
                }
                value => value.hash(hasher),
            }
        }
        let mut subscribers: Vec<_> = self.subscribers.iter().collect();
        subscribers.sort_unstable();
        subscribers.hash(hasher);
    }

    /// Returns all existing keys in the format in which the differential tests dump a server: the value,
    /// and the remaining milliseconds of the key (-1: no expiry).
    pub(crate) fn dump(&mut self) -> BTreeMap<String, (DumpedValue, i64)> {
        let now_timestamp = self.now_ms();
        let keys = self.keys();
        let entries = keys.into_iter().filter_map(|key| {
            let entry = self.entries.get(&key)?;
            let value = match &entry.value {
                Value::Holds(holds) => {
                    let mut fields: BTreeMap<_, _> = holds
                        .counts
                        .iter()
                        .map(|(owner, count)| (owner.clone(), count.to_string()))
                        .collect();
                    if let Some(mode) = holds.mode {
                        let mode = format!("{mode:?}").to_lowercase();
                        fields.insert("mode".into(), mode);
                    }
                    DumpedValue::Hash(fields)
                }
                Value::Number(number) => DumpedValue::Text(number.to_string()),
                Value::Queue(queue) => DumpedValue::List(queue.iter().cloned().collect()),
                Value::Timestamps(timestamps) => {
                    let left = |(member, timestamp): (&String, &i64)| {
                        (member.clone(), timestamp - now_timestamp)
                    };
                    DumpedValue::Timestamps(timestamps.iter().map(left).collect())
                }
                Value::Texts(texts) => DumpedValue::Hash(texts.clone()),
            };
            let left = entry.ends.map_or(-1, |ends| lease::millis(ends - self.now));
            Some((key, (value, left)))
        });
        entries.collect()
    }
}

/// A value, from either store.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DumpedValue {
    Hash(BTreeMap<String, String>),
    Text(String),
    List(Vec<String>),
    /// Timestamps in milliseconds from now.
    Timestamps(BTreeMap<String, i64>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expired_unused_keys_do_not_accumulate() {
        let mut keyspace = Keyspace::new(Instant::now());
        for i in 0..100_000u64 {
            keyspace.now += Duration::from_millis(1);
            keyspace.set(&format!("key-{i}"), 1, Some(Duration::from_millis(10)));
            assert!(keyspace.entries.len() < 200, "{}", keyspace.entries.len());
        }
    }

    #[test]
    fn other_type_is_error_and_empty_key_is_gone() {
        let mut keyspace = Keyspace::new(Instant::now());
        keyspace.set("a", 1, None);
        let wrong = keyspace.find::<Holds>("a");
        assert!(matches!(wrong, Err(Error::WrongKind { .. })));
        let queue: &mut VecDeque<String> = keyspace.find_or_create("q").unwrap();
        queue.push_back("one".into());
        assert_eq!(keyspace.keys(), ["a", "q"]);
        let queue: &mut VecDeque<String> = keyspace.find_or_create("q").unwrap();
        queue.clear();
        assert_eq!(keyspace.keys(), ["a"]);
    }
}
