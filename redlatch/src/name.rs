//! Names, and the keys and channels that they stand for: the only home of Redisson's layout.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash, Hasher};

use crate::error::{Error, Result};

/// The longest name, in bytes, prefix included. Redis would take 512 MB; a name is read by people,
/// in logs and in `redlatch ls`.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// What follows the owner in the field of a writer.
const WRITER: &str = ":write";

/// What the keys begin with that lie beside others.
const TOKEN: &str = "redisson_lock_token";
const QUEUE: &str = "redisson_lock_queue";
const TIMEOUTS: &str = "redisson_lock_timeout";
const WRITERS: &str = "redlatch_rwlock_writers";
const ABSENT: &str = "redlatch_lock_absent";
/// What the channel of a latch begins with.
const LATCH_CHANNEL: &str = "redisson_countdownlatch__channel__";
/// Redisson's own: the answers that it keeps for unlocking.
const UNLOCK_LATCH: &str = "redisson_unlock_latch";

/// Where one object lives in the store.
#[derive(Debug)]
pub(crate) struct Place {
    name: String,
    key: String,
    channel: String,
    family: Family,
    /// What the family keeps beside the key; empty where it keeps nothing.
    beside: [String; 3],
    /// Why the name cannot be used, if so. Said whenever it is used, because making a handle
    /// cannot fail.
    fault: Option<&'static str>,
    /// Of the key, because a place is looked up each time it is locked and unlocked.
    hash: u64,
}

/// Which layout an object has: what it keeps beside its key, and how its owners are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// `RedissonLock`: the hash alone.
    Lock,
    /// `RedissonSpinLock`: the same hash, but who waits for it is not called.
    Spin,
    /// `RedissonFencedLock`: a token beside the hash.
    Fenced,
    /// `RedissonFairLock`: a queue beside the hash, a channel for each waiter.
    Fair,
    /// `RedissonReadLock`: a timeout for each hold beside the hash.
    Read,
    /// `RedissonWriteLock`: the same hash, other owners.
    Write,
    /// `RedissonSemaphore`: a number.
    Semaphore,
    /// `RedissonPermitExpirableSemaphore`: the deadlines of the permits beside the number.
    Permits,
    /// `RedissonCountDownLatch`: a number.
    Latch,
}

impl Place {
    pub(crate) fn new(family: Family, prefix: &str, name: &str) -> Place {
        let key = format!("{prefix}{name}");
        let beside = match family {
            Family::Fenced => [prefixed(TOKEN, &key), String::new(), String::new()],
            // Which waiters were found absent is ours and not Redisson's.
            Family::Fair => [QUEUE, TIMEOUTS, ABSENT].map(|beside| prefixed(beside, &key)),
            // Writers that wait and hold back new readers, which is ours and not Redisson's; and
            // what the timeouts of all readers' holds begin with.
            Family::Read | Family::Write => {
                [prefixed(WRITERS, &key), suffixed(&key, ""), String::new()]
            }
            Family::Permits => [suffixed(&key, "timeout"), String::new(), String::new()],
            // Kept here and not in the store: a line that is no channel's, as no name has a NUL.
            Family::Spin => [format!("\0{key}"), String::new(), String::new()],
            Family::Lock | Family::Semaphore | Family::Latch => Default::default(),
        };
        let channel = match family {
            Family::Lock | Family::Spin | Family::Fenced | Family::Fair => {
                prefixed("redisson_lock__channel", &key)
            }
            Family::Read | Family::Write => prefixed("redisson_rwlock", &key),
            Family::Semaphore | Family::Permits => prefixed("redisson_sc", &key),
            // The only one that puts braces around a name that brings its own.
            Family::Latch => format!("{LATCH_CHANNEL}{{{key}}}"),
        };
        Place {
            fault: fault(&key, name),
            hash: BuildHasherDefault::<DefaultHasher>::default().hash_one(&key),
            name: name.to_owned(),
            channel,
            family,
            beside,
            key,
        }
    }

    /// Whether the name can be used.
    pub(crate) fn check(&self) -> Result<()> {
        match self.fault {
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

    /// Gives a latch, whose name brings a hash tag of its own, a channel in the slot of its key. Without
    /// that no script could publish there in a cluster: Redisson's cannot (CROSSSLOT), so such a latch is
    /// for us alone. Redisson's waiters listen elsewhere, where nobody publishes.
    pub(crate) fn bring_channel_to_key(&mut self) {
        self.channel = [LATCH_CHANNEL, &self.key].concat();
    }

    pub(crate) fn family(&self) -> Family {
        self.family
    }

    /// The fencing token of a fenced lock: a number that only grows.
    pub(crate) fn token(&self) -> &str {
        &self.beside[0]
    }

    /// The line of those who spin, beside the channel that calls others.
    pub(crate) fn spinning(&self) -> &str {
        &self.beside[0]
    }

    /// The owners that wait for a fair lock, in order.
    pub(crate) fn queue(&self) -> &str {
        &self.beside[0]
    }

    /// Until when those who wait for a fair lock are waited for.
    pub(crate) fn timeouts(&self) -> &str {
        &self.beside[1]
    }

    /// Until when waiters for a fair lock that are not connected keep their places.
    pub(crate) fn absent(&self) -> &str {
        &self.beside[2]
    }

    /// The writers that hold back new readers, and until when.
    pub(crate) fn writers(&self) -> &str {
        &self.beside[0]
    }

    /// What the timeouts of all readers' holds begin with; the reader comes next.
    pub(crate) fn timeouts_begin(&self) -> &str {
        &self.beside[1]
    }

    /// What the timeouts of one reader's holds begin with; the number of the hold comes next.
    pub(crate) fn timeouts_of(&self, reader: &str) -> String {
        [self.timeouts_begin(), reader, ":rwlock_timeout"].concat()
    }

    /// When the permits of an expirable semaphore expire.
    pub(crate) fn deadlines(&self) -> &str {
        &self.beside[0]
    }

    /// What is written in the store for `owner`, given as `<client id>:<number>`.
    pub(crate) fn field(&self, owner: String) -> String {
        match self.family {
            Family::Write => self.writer(&owner),
            _ => owner,
        }
    }

    /// What is written in the hash of a read-write lock for an owner who writes.
    pub(crate) fn writer(&self, owner: &str) -> String {
        [owner, WRITER].concat()
    }

    /// Whether what is written in that hash stands for an owner who writes.
    pub(crate) fn writes(&self, field: &str) -> bool {
        field.ends_with(WRITER)
    }

    /// The owner for whom `field` is written in the store.
    pub(crate) fn owner<'a>(&self, field: &'a str) -> &'a str {
        field.strip_suffix(WRITER).unwrap_or(field)
    }

    /// What belongs to one owner alone: a fair waiter's channel, or what the timeouts of a reader's
    /// holds begin with. Empty for all others.
    pub(crate) fn of_owner(&self, field: &str) -> String {
        match self.family {
            Family::Fair => [&*self.channel, ":", field].concat(),
            Family::Read => self.timeouts_of(field),
            _ => String::new(),
        }
    }
}

/// All keys that could belong to a name of which nobody knows what it is.
pub(crate) struct Beside {
    pub(crate) key: String,
    pub(crate) queue: String,
    pub(crate) timeouts: String,
    pub(crate) token: String,
    pub(crate) deadlines: String,
    /// What the timeouts of a reader begin with, before the reader's name.
    pub(crate) readers: String,
}

impl Beside {
    /// Of a key, prefix included.
    pub(crate) fn new(key: String) -> Beside {
        let [queue, timeouts, _] = Place::new(Family::Fair, "", &key).beside;
        let [token, ..] = Place::new(Family::Fenced, "", &key).beside;
        let [deadlines, ..] = Place::new(Family::Permits, "", &key).beside;
        Beside {
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

/// Whether a key belongs to an object of another name.
pub(crate) fn is_beside(key: &str) -> bool {
    // Both forms of such a key have a brace: see `prefixed` and `suffixed`.
    let begins = |prefix: &&str| {
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
        .any(begins)
        || is_timeout()
}

/// Places are told apart by their keys. The two sides of a read-write lock share one, and one owner
/// may hold both.
impl PartialEq for Place {
    fn eq(&self, other: &Place) -> bool {
        let writes = |place: &Place| place.family == Family::Write;
        self.key == other.key && writes(self) == writes(other)
    }
}

impl Eq for Place {}

impl Hash for Place {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// A key or channel that belongs to `name` and lies in its cluster slot: the name becomes the hash
/// tag, unless it brings one of its own.
fn prefixed(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

/// A key that belongs to `name` and lies in its cluster slot.
fn suffixed(name: &str, suffix: &str) -> String {
    if name.contains('{') {
        format!("{name}:{suffix}")
    } else {
        format!("{{{name}}}:{suffix}")
    }
}

fn fault(key: &str, name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("it is empty")
    } else if key.len() > MAX_NAME_BYTES {
        Some("it is longer than 512 bytes, the client's prefix included")
    } else if spans_slots(key) {
        Some(SPANS_SLOTS)
    } else {
        forbidden(name)
    }
}

/// Reason to refuse a name that [spans slots](spans_slots).
pub(crate) const SPANS_SLOTS: &str =
    "its braces enclose no hash tag, so its keys would lie in different slots of a cluster";

/// Returns whether the keys and channels of an object with this key (prefix included) would lie in
/// different slots of a cluster.
///
/// Braces around the whole name keep them together if the name has no braces, and nothing is needed if it
/// has a hash tag. Redisson tells the two apart by a `{` alone, so a name with other braces (`a}b`, `a{b`,
/// `{}a`) works on one server and fails in a cluster. It is refused everywhere: the same names are valid
/// wherever a program is deployed.
pub(crate) fn spans_slots(key: &str) -> bool {
    key.contains(['{', '}']) && hash_tag(key).is_none()
}

/// Returns the text in the first braces of a key, if there is any: in a cluster it decides on the slot,
/// instead of the whole key.
pub(crate) fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (inside, _) = rest.split_once('}')?;
    (!inside.is_empty()).then_some(inside)
}

/// What a name or prefix must not contain: it would break lines of logs and listings.
pub(crate) fn forbidden(text: &str) -> Option<&'static str> {
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
    fn keys_and_channels_are_redissons() {
        let lock = |prefix, name| Place::new(Family::Lock, prefix, name);
        let plain = lock("", "orders:42");
        assert_eq!(plain.key(), "orders:42");
        assert_eq!(plain.channel(), "redisson_lock__channel:{orders:42}");

        let tagged = lock("", "{orders}:42");
        assert_eq!(tagged.channel(), "redisson_lock__channel:{orders}:42");

        let prefixed = lock("shop:", "a");
        assert_eq!(prefixed.name(), "a");
        assert_eq!(prefixed.key(), "shop:a");
        assert_eq!(prefixed.channel(), "redisson_lock__channel:{shop:a}");

        let spin = Place::new(Family::Spin, "", "a");
        assert_eq!((spin.key(), spin.channel()), ("a", lock("", "a").channel()));
        assert!(forbidden(spin.spinning()).is_some(), "no channel's name");

        let fair = Place::new(Family::Fair, "", "a");
        assert_eq!(fair.queue(), "redisson_lock_queue:{a}");
        assert_eq!(fair.timeouts(), "redisson_lock_timeout:{a}");
        assert_eq!(fair.absent(), "redlatch_lock_absent:{a}");
        assert_eq!(fair.of_owner("c:1"), "redisson_lock__channel:{a}:c:1");

        let fenced = Place::new(Family::Fenced, "", "a");
        assert_eq!(fenced.token(), "redisson_lock_token:{a}");

        let read = Place::new(Family::Read, "", "a");
        assert_eq!(read.channel(), "redisson_rwlock:{a}");
        assert_eq!(read.of_owner("c:1"), "{a}:c:1:rwlock_timeout");
        let tagged = Place::new(Family::Read, "", "{a}b");
        assert_eq!(tagged.of_owner("c:1"), "{a}b:c:1:rwlock_timeout");
        let write = Place::new(Family::Write, "", "a");
        assert_eq!(write.field("c:1".into()), "c:1:write");
        assert_eq!(write.owner("c:1:write"), "c:1");
        assert!(write.writes("c:1:write") && !read.writes("c:1"));
        assert_eq!(write.timeouts_of("c:1"), read.of_owner("c:1"));
        assert_eq!(write.writers(), "redlatch_rwlock_writers:{a}");
        assert_ne!(write, read);

        let permits = Place::new(Family::Permits, "", "a");
        assert_eq!(permits.deadlines(), "{a}:timeout");
        assert_eq!(permits.channel(), "redisson_sc:{a}");
        let latch = Place::new(Family::Latch, "", "{a}b");
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
            let said = Place::new(Family::Lock, "", name)
                .check()
                .unwrap_err()
                .to_string();
            assert!(said.contains(reason), "{said}");
            assert!(said.len() < 400, "{said}");
        }
        assert!(
            Place::new(Family::Lock, "", &"x".repeat(512))
                .check()
                .is_ok()
        );
        assert!(
            Place::new(Family::Lock, "p", &"x".repeat(512))
                .check()
                .is_err()
        );
        for name in ["köln ✓ {a}", "a}b{c}", "{a}b}", "{a{b}"] {
            assert!(Place::new(Family::Lock, "", name).check().is_ok());
        }
        // The prefix belongs to the key.
        let tagged = Place::new(Family::Lock, "{app}:", "a}b");
        assert!(tagged.check().is_ok());
        assert!(Place::new(Family::Lock, "app}:", "a").check().is_err());
    }
}
