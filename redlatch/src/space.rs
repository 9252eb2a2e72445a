//! The embedded space: what Redis holds for us, in process, without I/O and without a clock.
//!
//! The keys are those of Redis, and so are the habits: a key that has expired or become empty is not
//! there, and asking for one shape where there is another is an error.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};

/// The keys of one embedded store and their expiry.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Space {
    entries: HashMap<String, Entry>,
    published: Vec<Message>,
    /// How many listen to each channel.
    audience: HashMap<String, usize>,
    /// What dates are counted from.
    origin: Option<Instant>,
    swept_to: usize,
}

/// What was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) channel: String,
    pub(crate) payload: i64,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Entry {
    value: Value,
    /// When the key expires, if it does.
    ends: Option<Instant>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(crate) enum Value {
    Holds(Holds),
    Number(i64),
    Queue(VecDeque<String>),
    Dates(BTreeMap<String, i64>),
}

/// A hash `owner → hold count`, with a mode if it is a read-write lock's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Holds {
    pub(crate) counts: BTreeMap<String, u32>,
    pub(crate) mode: Option<Mode>,
}

/// Which side of a read-write lock is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum Mode {
    Read,
    Write,
}

/// What can be kept under a key: a hash of [`Holds`], a number (a string), a queue of owners (a
/// list), or dates by member, in milliseconds (a sorted set).
pub(crate) trait Shape: Sized {
    fn of(value: &mut Value) -> Option<&mut Self>;
    fn wrap(self) -> Value;
}

macro_rules! shapes {
    ($($shape:ty => $variant:ident,)*) => {
        $(impl Shape for $shape {
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

shapes! {
    Holds => Holds,
    i64 => Number,
    VecDeque<String> => Queue,
    BTreeMap<String, i64> => Dates,
}

/// A key that is there: its value, and its end.
pub(crate) struct Found<'a, T> {
    pub(crate) value: &'a mut T,
    ends: &'a mut Option<Instant>,
}

impl<T> Found<'_, T> {
    /// How long it will be there; [`Duration::MAX`] for ever.
    pub(crate) fn remaining(&self, now: Instant) -> Duration {
        match *self.ends {
            Some(ends) => ends.saturating_duration_since(now),
            None => Duration::MAX,
        }
    }

    /// Moves the end away, never nearer. What has lost its end gets one again: without it, whoever
    /// dies would keep it for ever.
    pub(crate) fn extend_to(&mut self, end: Instant) {
        *self.ends = Some(self.ends.map_or(end, |ends| ends.max(end)));
    }

    /// Moves the end nearer, never away; what has none goes on for ever.
    pub(crate) fn shorten_to(&mut self, end: Instant) {
        *self.ends = self.ends.map(|ends| ends.min(end));
    }

    pub(crate) fn set_end(&mut self, end: Instant) {
        *self.ends = Some(end);
    }
}

impl Value {
    fn is_empty(&self) -> bool {
        match self {
            Value::Holds(holds) => holds.counts.is_empty() && holds.mode.is_none(),
            Value::Number(_) => false,
            Value::Queue(queue) => queue.is_empty(),
            Value::Dates(dates) => dates.is_empty(),
        }
    }
}

impl Entry {
    fn is_there(&self, now: Instant) -> bool {
        self.ends.is_none_or(|ends| ends > now) && !self.value.is_empty()
    }
}

impl Space {
    /// What is under `key` at `now`. An error if it has another shape.
    pub(crate) fn find<T: Shape>(
        &mut self,
        key: &str,
        now: Instant,
    ) -> Result<Option<Found<'_, T>>> {
        if !self.is_there(key, now) {
            return Ok(None);
        }
        let Some(entry) = self.entries.get_mut(key) else {
            return Ok(None);
        };
        match T::of(&mut entry.value) {
            Some(value) => Ok(Some(Found {
                value,
                ends: &mut entry.ends,
            })),
            None => Err(Error::WrongKind {
                name: key.to_owned(),
                reason: "a key of another type",
            }),
        }
    }

    /// What is under `key` at `now`; if there is nothing, an empty value without an end.
    pub(crate) fn find_or_begin<T: Shape + Default>(
        &mut self,
        key: &str,
        now: Instant,
    ) -> Result<&mut T> {
        if !self.is_there(key, now) {
            self.set(key, T::default(), None, now);
        }
        let wrong = || Error::WrongKind {
            name: key.to_owned(),
            reason: "a key of another type",
        };
        let entry = self.entries.get_mut(key).ok_or_else(wrong)?;
        T::of(&mut entry.value).ok_or_else(wrong)
    }

    /// Whether there is anything under `key` at `now`.
    pub(crate) fn is_there(&mut self, key: &str, now: Instant) -> bool {
        match self.entries.get(key) {
            Some(entry) if entry.is_there(now) => true,
            Some(_) => {
                self.entries.remove(key);
                false
            }
            None => false,
        }
    }

    /// How long `key` will be there: `None` if it is not, [`Duration::MAX`] for ever.
    pub(crate) fn remaining(&mut self, key: &str, now: Instant) -> Option<Duration> {
        if !self.is_there(key, now) {
            return None;
        }
        let ends = self.entries.get(key)?.ends;
        Some(ends.map_or(Duration::MAX, |ends| ends.saturating_duration_since(now)))
    }

    /// Writes `key` anew.
    pub(crate) fn set<T: Shape>(
        &mut self,
        key: &str,
        value: T,
        ends: Option<Instant>,
        now: Instant,
    ) {
        self.sweep(now);
        let value = value.wrap();
        self.entries.insert(key.to_owned(), Entry { value, ends });
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// The keys that are there at `now`, in order.
    pub(crate) fn keys(&mut self, now: Instant) -> Vec<String> {
        self.entries.retain(|_, entry| entry.is_there(now));
        let mut keys: Vec<_> = self.entries.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// A date as it is kept: whole milliseconds, from an origin of the space's own.
    pub(crate) fn date(&mut self, at: Instant) -> i64 {
        let origin = *self.origin.get_or_insert(at);
        i64::try_from(at.saturating_duration_since(origin).as_millis()).unwrap_or(i64::MAX)
    }

    /// Publishes to `channel` once the step that is running has ended. How many will hear it.
    pub(crate) fn publish(&mut self, channel: &str, payload: i64) -> usize {
        self.published.push(Message {
            channel: channel.to_owned(),
            payload,
        });
        self.listeners(channel)
    }

    /// How many listen to `channel`.
    pub(crate) fn listeners(&self, channel: &str) -> usize {
        self.audience.get(channel).copied().unwrap_or(0)
    }

    /// So many listen to `channel` now.
    pub(crate) fn listening(&mut self, channel: &str, listeners: usize) {
        if listeners == 0 {
            self.audience.remove(channel);
        } else {
            self.audience.insert(channel.to_owned(), listeners);
        }
    }

    /// What was published since this was last asked.
    pub(crate) fn take_published(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.published)
    }

    /// Drops what has expired and is never asked for again, each time the space has doubled: so
    /// memory is bounded by what is held, at a constant cost per write.
    fn sweep(&mut self, now: Instant) {
        if self.entries.len() > 2 * self.swept_to + 64 {
            self.entries.retain(|_, entry| entry.is_there(now));
            self.swept_to = self.entries.len();
        }
    }
}

#[cfg(test)]
impl Space {
    /// Takes the end of a key away.
    pub(crate) fn persist(&mut self, key: &str, now: Instant) {
        if self.is_there(key, now)
            && let Some(entry) = self.entries.get_mut(key)
        {
            entry.ends = None;
        }
    }

    /// Hashes all keys, with all times relative to `now`: states that were reached at different times
    /// and behave alike from then on are equal. Dates that passed longer ago than `past` milliseconds
    /// compare equal. The number under the key `counted` counts from the number given with it.
    pub(crate) fn hash_at(
        &mut self,
        now: Instant,
        past: i64,
        counted: (&str, i64),
        hasher: &mut impl std::hash::Hasher,
    ) {
        use std::hash::Hash as _;
        let today = self.date(now);
        self.entries.retain(|_, entry| entry.is_there(now));
        let mut entries: Vec<_> = self.entries.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        for (key, Entry { value, ends }) in entries {
            (key, ends.map(|ends| ends - now)).hash(hasher);
            match value {
                Value::Number(number) if key == counted.0 => (number - counted.1).hash(hasher),
                Value::Dates(dates) => {
                    for (member, date) in dates {
                        (member, (date - today).max(-past)).hash(hasher);
                    }
                }
                value => value.hash(hasher),
            }
        }
        let mut audience: Vec<_> = self.audience.iter().collect();
        audience.sort_unstable();
        audience.hash(hasher);
    }

    /// Everything that is there, written as the differential tests write what a server has: the
    /// value, and the remaining milliseconds of the key (-1: for ever).
    pub(crate) fn dump(&mut self, now: Instant) -> BTreeMap<String, (Dumped, i64)> {
        let today = self.date(now);
        let keys = self.keys(now);
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
                    Dumped::Hash(fields)
                }
                Value::Number(number) => Dumped::Text(number.to_string()),
                Value::Queue(queue) => Dumped::List(queue.iter().cloned().collect()),
                Value::Dates(dates) => {
                    let left = |(member, date): (&String, &i64)| (member.clone(), date - today);
                    Dumped::Dates(dates.iter().map(left).collect())
                }
            };
            let left = entry.ends.map_or(-1, |ends| {
                i64::try_from((ends - now).as_millis()).unwrap_or(i64::MAX)
            });
            Some((key, (value, left)))
        });
        entries.collect()
    }
}

/// A value, whatever store it was found in.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Dumped {
    Hash(BTreeMap<String, String>),
    Text(String),
    List(Vec<String>),
    /// Dates as milliseconds from now.
    Dates(BTreeMap<String, i64>),
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
            let ends = Some(now + Duration::from_millis(10));
            space.set(&format!("key-{i}"), 1, ends, now);
            assert!(space.entries.len() < 200, "{}", space.entries.len());
        }
    }

    #[test]
    fn a_key_of_another_shape_is_an_error_and_an_empty_one_is_gone() {
        let now = Instant::now();
        let mut space = Space::default();
        space.set("a", 1, None, now);
        assert!(matches!(
            space.find::<Holds>("a", now),
            Err(Error::WrongKind { .. })
        ));
        let queue: &mut VecDeque<String> = space.find_or_begin("q", now).unwrap();
        queue.push_back("one".into());
        assert_eq!(space.keys(now), ["a", "q"]);
        space
            .find_or_begin::<VecDeque<String>>("q", now)
            .unwrap()
            .clear();
        assert_eq!(space.keys(now), ["a"]);
    }
}
