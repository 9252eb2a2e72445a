//! Names, and the keys and channels that belong to them. Redisson's layout is defined only here.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash, Hasher};

use crate::error::{Error, Result};

/// The longest name in bytes, including the prefix. Redis allows 512 MB, but people read names in logs and
/// in `redlatch ls`.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// Suffix of the owner in the hash field of a writer.
const WRITER: &str = ":write";

/// Prefixes of an object's further keys.
const TOKEN: &str = "redisson_lock_token";
const QUEUE: &str = "redisson_lock_queue";
const TIMEOUTS: &str = "redisson_lock_timeout";
const WRITERS: &str = "redlatch_rwlock_writers";
const ABSENT: &str = "redlatch_lock_absent";
/// Prefix of the channel of a latch.
const LATCH_CHANNEL: &str = "redisson_countdownlatch__channel__";
/// Prefix of keys that only Redisson writes: the results of unlocking that it keeps.
const UNLOCK_LATCH: &str = "redisson_unlock_latch";

/// The keys and channels of one object in the store.
#[derive(Debug)]
pub(crate) struct ObjectKeys {
    name: String,
    key: String,
    channel: String,
    layout: KeyLayout,
    /// Further keys of the object; empty where unused.
    extra_keys: [String; 3],
    /// Why the name is invalid, if it is. Every operation reports it, because creating a handle cannot
    /// fail.
    invalid: Option<&'static str>,
    /// Hash of the key. Cached because an object is looked up at every lock and unlock.
    hash: u64,
}

/// Layout of an object: which further keys it has, and how the store writes its owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyLayout {
    /// `RedissonLock`: the hash alone.
    Lock,
    /// `RedissonSpinLock`: the same hash, but waiters do not subscribe.
    Spin,
    /// `RedissonFencedLock`: the hash and a token.
    Fenced,
    /// `RedissonFairLock`: the hash, a queue, and a channel for each waiter.
    Fair,
    /// `RedissonReadLock`: the hash and a timeout for each hold.
    Read,
    /// `RedissonWriteLock`: the same hash with other fields.
    Write,
    /// `RedissonSemaphore`: a number.
    Semaphore,
    /// `RedissonPermitExpirableSemaphore`: a number and the deadlines of the permits.
    Permits,
    /// `RedissonCountDownLatch`: a number.
    Latch,
}

impl ObjectKeys {
    pub(crate) fn new(layout: KeyLayout, prefix: &str, name: &str) -> ObjectKeys {
        let key = format!("{prefix}{name}");
        let extra_keys = match layout {
            KeyLayout::Fenced => [prefixed(TOKEN, &key), String::new(), String::new()],
            // The set of absent waiters is redlatch's own, not in Redisson.
            KeyLayout::Fair => [QUEUE, TIMEOUTS, ABSENT].map(|prefix| prefixed(prefix, &key)),
            // The waiting writers that block new readers (redlatch's own, not in Redisson), and the prefix
            // of the timeouts of all readers' holds.
            KeyLayout::Read | KeyLayout::Write => {
                [prefixed(WRITERS, &key), suffixed(&key, ""), String::new()]
            }
            KeyLayout::Permits => [suffixed(&key, "timeout"), String::new(), String::new()],
            // Kept in the client, not in the store. It cannot equal a channel, because no name has a NUL.
            KeyLayout::Spin => [format!("\0{key}"), String::new(), String::new()],
            KeyLayout::Lock | KeyLayout::Semaphore | KeyLayout::Latch => Default::default(),
        };
        let channel = match layout {
            KeyLayout::Lock | KeyLayout::Spin | KeyLayout::Fenced | KeyLayout::Fair => {
                prefixed("redisson_lock__channel", &key)
            }
            KeyLayout::Read | KeyLayout::Write => prefixed("redisson_rwlock", &key),
            KeyLayout::Semaphore | KeyLayout::Permits => prefixed("redisson_sc", &key),
            // The only layout that adds braces even to a name with its own hash tag.
            KeyLayout::Latch => format!("{LATCH_CHANNEL}{{{key}}}"),
        };
        ObjectKeys {
            invalid: invalid_reason(&key, name),
            hash: BuildHasherDefault::<DefaultHasher>::default().hash_one(&key),
            name: name.to_owned(),
            channel,
            layout,
            extra_keys,
            key,
        }
    }

    /// Checks that the name is valid.
    pub(crate) fn check(&self) -> Result<()> {
        match self.invalid {
            None => Ok(()),
            Some(reason) => Err(Error::InvalidName {
                name: self.name.chars().take(64).collect(),
                reason,
            }),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// Moves the channel of a latch whose name has a hash tag of its own to the slot of its key. Otherwise
    /// no script could publish there in a cluster: Redisson's cannot (CROSSSLOT). Redisson's waiters
    /// subscribe to another channel, where nothing is published, so they cannot share such a latch.
    pub(crate) fn move_channel_to_slot(&mut self) {
        self.channel = [LATCH_CHANNEL, &self.key].concat();
    }

    pub(crate) fn layout(&self) -> KeyLayout {
        self.layout
    }

    /// Key of the fencing token of a fenced lock, a number that only grows.
    pub(crate) fn token(&self) -> &str {
        &self.extra_keys[0]
    }

    /// Name of the wait queue of a spin lock, separate from the channel.
    pub(crate) fn spin_queue(&self) -> &str {
        &self.extra_keys[0]
    }

    /// Key of the owners that wait for a fair lock, in order.
    pub(crate) fn queue(&self) -> &str {
        &self.extra_keys[0]
    }

    /// Key of the times at which waiters for a fair lock expire.
    pub(crate) fn timeouts(&self) -> &str {
        &self.extra_keys[1]
    }

    /// Key of the times until which disconnected waiters for a fair lock keep their positions in the queue.
    pub(crate) fn absent_waiters(&self) -> &str {
        &self.extra_keys[2]
    }

    /// Key of the writers that block new readers, and until when.
    pub(crate) fn writers(&self) -> &str {
        &self.extra_keys[0]
    }

    /// Prefix of the timeouts of all readers' holds; the reader follows.
    pub(crate) fn timeouts_prefix(&self) -> &str {
        &self.extra_keys[1]
    }

    /// Prefix of the timeouts of one reader's holds; the number of the hold follows.
    pub(crate) fn reader_timeouts_prefix(&self, reader: &str) -> String {
        [self.timeouts_prefix(), reader, ":rwlock_timeout"].concat()
    }

    /// Key of the times at which the permits of an expirable semaphore expire.
    pub(crate) fn deadlines(&self) -> &str {
        &self.extra_keys[0]
    }

    /// Returns the hash field for `owner`, given as `<client id>:<number>`.
    pub(crate) fn field(&self, owner: String) -> String {
        match self.layout {
            KeyLayout::Write => self.writer(&owner),
            _ => owner,
        }
    }

    /// Returns the hash field of a read-write lock for an owner that holds the write lock.
    pub(crate) fn writer(&self, owner: &str) -> String {
        [owner, WRITER].concat()
    }

    /// Returns whether a field of the hash of a read-write lock belongs to a writer.
    pub(crate) fn is_writer_field(&self, field: &str) -> bool {
        field.ends_with(WRITER)
    }

    /// Returns the owner of a hash field.
    pub(crate) fn owner_of<'a>(&self, field: &'a str) -> &'a str {
        field.strip_suffix(WRITER).unwrap_or(field)
    }

    /// Returns the name that belongs to one owner alone: a fair waiter's channel, or the prefix of the
    /// timeouts of a reader's holds. Empty for all other layouts.
    pub(crate) fn owner_key(&self, field: &str) -> String {
        match self.layout {
            KeyLayout::Fair => [&*self.channel, ":", field].concat(),
            KeyLayout::Read => self.reader_timeouts_prefix(field),
            _ => String::new(),
        }
    }
}

/// All keys that could belong to a name whose kind is unknown.
pub(crate) struct CandidateKeys {
    pub(crate) key: String,
    pub(crate) queue: String,
    pub(crate) timeouts: String,
    pub(crate) token: String,
    pub(crate) deadlines: String,
    /// Prefix of the timeouts of readers; the reader follows.
    pub(crate) readers: String,
}

impl CandidateKeys {
    /// Takes a key, including the prefix.
    pub(crate) fn new(key: String) -> CandidateKeys {
        let [queue, timeouts, _] = ObjectKeys::new(KeyLayout::Fair, "", &key).extra_keys;
        let [token, ..] = ObjectKeys::new(KeyLayout::Fenced, "", &key).extra_keys;
        let [deadlines, ..] = ObjectKeys::new(KeyLayout::Permits, "", &key).extra_keys;
        CandidateKeys {
            readers: suffixed(&key, ""),
            key,
            queue,
            timeouts,
            token,
            deadlines,
        }
    }

    pub(crate) fn keys(&self) -> [&str; 6] {
        [
            &self.key,
            &self.queue,
            &self.timeouts,
            &self.token,
            &self.deadlines,
            &self.readers,
        ]
    }
}

/// Returns whether a key belongs to the object of another key.
pub(crate) fn is_extra_key(key: &str) -> bool {
    // Both forms of such a key contain a brace: see `prefixed` and `suffixed`.
    let has_prefix = |prefix: &&str| {
        let rest = key.strip_prefix(*prefix);
        rest.is_some_and(|rest| rest.starts_with(':') && rest.contains('{'))
    };
    let is_timeout = || {
        let parts = key.rsplit_once(":rwlock_timeout:");
        parts.is_some_and(|(reader, n)| {
            reader.contains('{') && !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    [TOKEN, QUEUE, TIMEOUTS, WRITERS, ABSENT, UNLOCK_LATCH]
        .iter()
        .any(has_prefix)
        || is_timeout()
}

/// Objects are equal if their keys are, except for the two sides of a read-write lock: they share a key,
/// and one owner may hold both.
impl PartialEq for ObjectKeys {
    fn eq(&self, other: &ObjectKeys) -> bool {
        let writes = |object: &ObjectKeys| object.layout == KeyLayout::Write;
        self.key == other.key && writes(self) == writes(other)
    }
}

impl Eq for ObjectKeys {}

impl Hash for ObjectKeys {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Returns a key or channel that belongs to `name`, in its cluster slot: the name becomes the hash tag,
/// unless it has one of its own.
fn prefixed(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

/// Returns a key that belongs to `name`, in its cluster slot.
fn suffixed(name: &str, suffix: &str) -> String {
    if name.contains('{') {
        format!("{name}:{suffix}")
    } else {
        format!("{{{name}}}:{suffix}")
    }
}

fn invalid_reason(key: &str, name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("it is empty")
    } else if key.len() > MAX_NAME_BYTES {
        Some("it is longer than 512 bytes, the client's prefix included")
    } else if spans_slots(key) {
        Some(SPANS_SLOTS)
    } else {
        invalid_character(name)
    }
}

/// Reason to refuse a name that [spans slots](spans_slots).
pub(crate) const SPANS_SLOTS: &str =
    "its braces do not enclose a hash tag, so its keys would be in different slots of a cluster";

/// Returns whether the keys and channels of an object with this key (prefix included) would lie in
/// different slots of a cluster.
///
/// Braces around the whole name keep them together if the name has no braces. A name with a hash tag needs
/// none. Redisson looks only for a `{`, so a name with other braces (`a}b`, `a{b`, `{}a`) works on a single
/// server and fails in a cluster. It is refused everywhere, so that a program can move between deployments.
pub(crate) fn spans_slots(key: &str) -> bool {
    key.contains(['{', '}']) && hash_tag(key).is_none()
}

/// Returns the text in the first braces of a key, if there is any. In a cluster it determines the slot
/// instead of the whole key.
pub(crate) fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (inside, _) = rest.split_once('}')?;
    (!inside.is_empty()).then_some(inside)
}

/// Returns why a name or prefix is refused: it would break lines of logs and listings.
pub(crate) fn invalid_character(text: &str) -> Option<&'static str> {
    if text.contains('\0') {
        Some("it contains a NUL")
    } else if text.contains(['\n', '\r']) {
        Some("it contains a line break")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_channels_match_redisson() {
        let lock = |prefix, name| ObjectKeys::new(KeyLayout::Lock, prefix, name);
        let plain = lock("", "orders:42");
        assert_eq!(plain.key(), "orders:42");
        assert_eq!(plain.channel(), "redisson_lock__channel:{orders:42}");

        let tagged = lock("", "{orders}:42");
        assert_eq!(tagged.channel(), "redisson_lock__channel:{orders}:42");

        let prefixed = lock("shop:", "a");
        assert_eq!(prefixed.name(), "a");
        assert_eq!(prefixed.key(), "shop:a");
        assert_eq!(prefixed.channel(), "redisson_lock__channel:{shop:a}");

        let spin = ObjectKeys::new(KeyLayout::Spin, "", "a");
        assert_eq!((spin.key(), spin.channel()), ("a", lock("", "a").channel()));
        assert!(
            invalid_character(spin.spin_queue()).is_some(),
            "no channel's name"
        );

        let fair = ObjectKeys::new(KeyLayout::Fair, "", "a");
        assert_eq!(fair.queue(), "redisson_lock_queue:{a}");
        assert_eq!(fair.timeouts(), "redisson_lock_timeout:{a}");
        assert_eq!(fair.absent_waiters(), "redlatch_lock_absent:{a}");
        assert_eq!(fair.owner_key("c:1"), "redisson_lock__channel:{a}:c:1");

        let fenced = ObjectKeys::new(KeyLayout::Fenced, "", "a");
        assert_eq!(fenced.token(), "redisson_lock_token:{a}");

        let read = ObjectKeys::new(KeyLayout::Read, "", "a");
        assert_eq!(read.channel(), "redisson_rwlock:{a}");
        assert_eq!(read.owner_key("c:1"), "{a}:c:1:rwlock_timeout");
        let tagged = ObjectKeys::new(KeyLayout::Read, "", "{a}b");
        assert_eq!(tagged.owner_key("c:1"), "{a}b:c:1:rwlock_timeout");
        let write = ObjectKeys::new(KeyLayout::Write, "", "a");
        assert_eq!(write.field("c:1".into()), "c:1:write");
        assert_eq!(write.owner_of("c:1:write"), "c:1");
        assert!(write.is_writer_field("c:1:write") && !read.is_writer_field("c:1"));
        assert_eq!(write.reader_timeouts_prefix("c:1"), read.owner_key("c:1"));
        assert_eq!(write.writers(), "redlatch_rwlock_writers:{a}");
        assert_ne!(write, read);

        let permits = ObjectKeys::new(KeyLayout::Permits, "", "a");
        assert_eq!(permits.deadlines(), "{a}:timeout");
        assert_eq!(permits.channel(), "redisson_sc:{a}");
        let latch = ObjectKeys::new(KeyLayout::Latch, "", "{a}b");
        assert_eq!(latch.channel(), "redisson_countdownlatch__channel__{{a}b}");
    }

    #[test]
    fn bad_names_are_refused_with_the_reason() {
        for (name, reason) in [
            ("", "empty"),
            ("a\0b", "NUL"),
            ("a\nb", "line break"),
            ("a\rb", "line break"),
            (&"x".repeat(513), "512"),
            ("a}b", "hash tag"),
            ("a{b", "hash tag"),
            ("{}a", "hash tag"),
            ("a{}{b}", "hash tag"),
            ("}{", "hash tag"),
        ] {
            let message = ObjectKeys::new(KeyLayout::Lock, "", name)
                .check()
                .unwrap_err()
                .to_string();
            assert!(message.contains(reason), "{message}");
            assert!(message.len() < 400, "{message}");
        }
        assert!(
            ObjectKeys::new(KeyLayout::Lock, "", &"x".repeat(512))
                .check()
                .is_ok()
        );
        assert!(
            ObjectKeys::new(KeyLayout::Lock, "p", &"x".repeat(512))
                .check()
                .is_err()
        );
        for name in ["köln ✓ {a}", "a}b{c}", "{a}b}", "{a{b}"] {
            assert!(ObjectKeys::new(KeyLayout::Lock, "", name).check().is_ok());
        }
        // The prefix is part of the key.
        let tagged = ObjectKeys::new(KeyLayout::Lock, "{app}:", "a}b");
        assert!(tagged.check().is_ok());
        assert!(
            ObjectKeys::new(KeyLayout::Lock, "app}:", "a")
                .check()
                .is_err()
        );
    }
}
