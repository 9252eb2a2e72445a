//! Names, and the keys and channels that belong to them. Redisson's layout is defined only here.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};

/// The longest name in bytes, including the prefix. Redis allows 512 MB, but people read names in
/// logs and in `redlatch ls`.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// Maximum number of characters of a value of a group that are shown.
const MAX_SHOWN_CHARS: usize = 64;

/// Suffix of the owner in the hash field of a writer.
const WRITER: &str = ":write";

/// Between the owner and the number of permits, in the hash field of a fair semaphore.
const PERMITS: char = '#';

/// Prefixes of an object's further keys.
const TOKEN: &str = "redisson_lock_token";
/// Begins the channel of a lock.
const LOCK_CHANNEL: &str = "redisson_lock__channel";
const QUEUE: &str = "redisson_lock_queue";
const TIMEOUTS: &str = "redisson_lock_timeout";
const WRITERS: &str = "redlatch_rwlock_writers";
const ABSENT: &str = "redlatch_lock_absent";
const ANNOUNCED: &str = "redlatch_lock_announced";
const ASKED: &str = "redlatch_lock_asked";
const ELECTION: &str = "redlatch_election";
/// Begins the channels of fair objects that several owners may hold, and their further keys: as those of the fair lock.
const FAIR_CHANNEL: &str = "redlatch_fair_channel";
const FAIR_QUEUE: &str = "redlatch_fair_queue";
const FAIR_TIMEOUTS: &str = "redlatch_fair_timeout";
const FAIR_ABSENT: &str = "redlatch_fair_absent";
const FAIR_ANNOUNCED: &str = "redlatch_fair_announced";
/// The prefixes of all further keys.
///
/// Names `a` and `{a}` are *aliases*: Redisson gives them the same further keys and channels. They
/// are two locks with different holders, and where only redlatch uses a key, it has another form
/// for each ([`unambiguous`]). What Redisson defines stays as it is, also where it mixes up
/// aliases:
///
/// - Channels: a message may wake a waiter of the other lock, which then asks once more than
///   necessary.
/// - The queue of fair locks, its timeouts, and what redlatch records about its waiters (absences,
///   announcements): one queue for both locks. An announcement names the lock, so no waiter is
///   granted the other one. A waiter of one lock may delay those of the other.
/// - Tokens: one sequence for both locks. The tokens of each still increase.
/// - The deadlines of the permits of an expirable semaphore, and the timeouts of a reader that
///   reads both locks: one owner must not hold both read locks, and only one of the two semaphores
///   may be used.
const PREFIXES: [&str; 16] = [
    TOKEN,
    QUEUE,
    TIMEOUTS,
    WRITERS,
    ABSENT,
    ANNOUNCED,
    ASKED,
    ELECTION,
    ONCE,
    JOB,
    CLIENT,
    UNLOCK_LATCH,
    FAIR_QUEUE,
    FAIR_TIMEOUTS,
    FAIR_ABSENT,
    FAIR_ANNOUNCED,
];
/// Suffixes of the fields of an owner in a group of locks.
pub(crate) const GROUP_END: &str = ":expire_time";
const GROUP_COUNT: &str = ":lock_count";
/// Suffix of the deadlines of permits.
const DEADLINES: &str = "timeout";
/// Prefix of the channel of a latch.
const LATCH_CHANNEL: &str = "redisson_countdownlatch__channel__";
/// Prefix of the records of runs.
const ONCE: &str = "redlatch_once";
/// Prefix of the records of jobs that run by a schedule.
const JOB: &str = "redlatch_job";
/// Prefix of the hash of a client.
const CLIENT: &str = "redlatch_client";
/// Prefix of keys that only Redisson writes: the results of unlocking that it keeps.
const UNLOCK_LATCH: &str = "redisson_unlock_latch";

/// The key and the channel of one object in the store. Some kinds have further keys: see
/// [`FairKeys`], [`FencedKeys`], [`GroupKeys`], [`ReadWriteKeys`] and [`PermitKeys`].
#[derive(Debug)]
pub(crate) struct ObjectKeys {
    /// Length of the client's prefix.
    prefix_len: usize,
    channel: Box<str>,
    /// Where the channel contains the key.
    key: Range<usize>,
    layout: KeyLayout,
    /// Why the name is invalid, if it is. Every operation reports it, because creating a handle
    /// cannot fail.
    invalid: Option<&'static str>,
    /// Boxed: most objects are not one of a group.
    in_group: Option<Box<InGroup>>,
    /// Hash of the identity. Cached because an object is looked up at every lock and unlock.
    hash: u64,
}

/// One of the objects that share a key and layout: see [`GroupKeys`].
#[derive(Debug)]
struct InGroup {
    /// The name for people, with the prefix.
    shown: String,
    /// What distinguishes it from the others.
    identity: String,
}

/// Layout of an object: its channel, and how the store writes its owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyLayout {
    /// `RedissonLock`: a hash.
    Lock,
    /// `RedissonSpinLock`: the same hash, but waiters do not subscribe.
    Spin,
    /// `RedissonFencedLock`: the hash and a token.
    Fenced,
    /// `RedissonFairLock`: the hash, a queue, and a channel for each waiter.
    Fair,
    /// The same, and the keys of the election.
    Election,
    /// `RedissonReadLock`: the hash and a timeout for each hold.
    Read,
    /// `RedissonWriteLock`: the same hash with other fields.
    Write,
    /// One value of `RedissonFasterMultiLock`: fields of a hash that all values of a group share.
    Group,
    /// `RedissonSemaphore`: a number.
    Semaphore,
    /// `RedissonPermitExpirableSemaphore`: a number and the deadlines of the permits.
    Permits,
    /// `RedissonCountDownLatch`: a number.
    Latch,
    /// Redlatch's own: a hash of holders, and a queue.
    FairRead,
    /// The same hash and queue, with other fields.
    FairWrite,
    /// The same, with the number of permits in the fields.
    FairSemaphore,
}

impl KeyLayout {
    /// Returns whether its holders write, beside others that read under the same key.
    pub(crate) fn writes(self) -> bool {
        matches!(self, KeyLayout::Write | KeyLayout::FairWrite)
    }
}

impl ObjectKeys {
    pub(crate) fn new(layout: KeyLayout, prefix: &str, name: &str) -> ObjectKeys {
        let key = format!("{prefix}{name}");
        let channel = match layout {
            KeyLayout::Lock
            | KeyLayout::Spin
            | KeyLayout::Fenced
            | KeyLayout::Fair
            | KeyLayout::Election
            | KeyLayout::Group => prefixed(LOCK_CHANNEL, &key),
            KeyLayout::Read | KeyLayout::Write => prefixed("redisson_rwlock", &key),
            KeyLayout::Semaphore | KeyLayout::Permits => prefixed("redisson_sc", &key),
            // The only layout that adds braces even to a name with its own hash tag.
            KeyLayout::Latch => format!("{LATCH_CHANNEL}{{{key}}}"),
            KeyLayout::FairRead | KeyLayout::FairWrite | KeyLayout::FairSemaphore => {
                unambiguous(FAIR_CHANNEL, &key, &['{'])
            }
        };
        ObjectKeys {
            invalid: invalid_reason(&key, name),
            in_group: None,
            hash: hash_of(&key),
            prefix_len: prefix.len(),
            key: key_within(&channel, &key),
            channel: channel.into(),
            layout,
        }
    }

    /// Checks that the name is valid.
    pub(crate) fn check(&self) -> Result<()> {
        match self.invalid {
            None => Ok(()),
            Some(reason) => Err(Error::InvalidName {
                name: self.name().chars().take(64).collect(),
                reason,
            }),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.full_name().get(self.prefix_len..).unwrap_or_default()
    }

    /// Returns the name with the client's prefix, for log events.
    pub(crate) fn full_name(&self) -> &str {
        let in_group = self.in_group.as_ref();
        in_group.map_or(self.key(), |object| &object.shown)
    }

    pub(crate) fn key(&self) -> &str {
        self.channel.get(self.key.clone()).unwrap_or_default()
    }

    /// Returns what names the object within a client: its key, unless several objects share the
    /// key.
    pub(crate) fn identity(&self) -> &str {
        let in_group = self.in_group.as_ref();
        in_group.map_or(self.key(), |object| &object.identity)
    }

    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// Moves the channel of a latch whose name has a hash tag of its own to the slot of its key.
    /// Otherwise no script could publish there in a cluster: Redisson's cannot (CROSSSLOT).
    /// Redisson's waiters subscribe to another channel, where nothing is published, so they cannot
    /// share such a latch.
    pub(crate) fn move_channel_to_slot(&mut self) {
        let channel = [LATCH_CHANNEL, self.key()].concat();
        self.key = key_within(&channel, self.key());
        self.channel = channel.into();
    }

    pub(crate) fn layout(&self) -> KeyLayout {
        self.layout
    }

    /// Returns the key of the requests to release a lock (redlatch's own, not in Redisson). Not
    /// stored, because few steps need it.
    pub(crate) fn requests_key(&self) -> String {
        unambiguous(ASKED, self.key(), &['{'])
    }

    /// Returns the hash field for `owner`, given as `<client id>:<number>`.
    pub(crate) fn field(&self, owner: String) -> String {
        match self.layout.writes() {
            true => writer_field(&owner),
            false => owner,
        }
    }
}

/// Returns the hash field of a read-write lock for an owner that holds the write lock.
pub(crate) fn writer_field(owner: &str) -> String {
    [owner, WRITER].concat()
}

/// Returns whether a field of the hash of a read-write lock belongs to a writer.
pub(crate) fn is_writer_field(field: &str) -> bool {
    field.ends_with(WRITER)
}

/// Returns the hash field of a fair semaphore for an owner that holds so many permits.
pub(crate) fn permits_field(owner: &str, permits: u32) -> String {
    format!("{owner}{PERMITS}{permits}")
}

/// Returns the owner and the permits of such a field.
fn split_permits(field: &str) -> Option<(&str, u32)> {
    let (owner, permits) = field.rsplit_once(PERMITS)?;
    Some((owner, permits.parse().ok()?))
}

/// Returns how many permits a field of a fair semaphore is for. `None`: it is one of another object.
pub(crate) fn permits_in(field: &str) -> Option<u32> {
    split_permits(field).map(|(_, permits)| permits)
}

/// Returns how many permits a field is for: one, unless it says so.
pub(crate) fn permits_of(field: &str) -> u32 {
    permits_in(field).unwrap_or(1)
}

/// Returns the owner of a hash field.
pub(crate) fn owner_of(field: &str) -> &str {
    let owner = split_permits(field).map(|(owner, _)| owner);
    owner.or(field.strip_suffix(WRITER)).unwrap_or(field)
}

/// The keys of a fair lock.
#[derive(Debug)]
pub(crate) struct FairKeys {
    pub(crate) object: Arc<ObjectKeys>,
    /// The waiting owners, in order.
    pub(crate) queue: String,
    /// The times at which waiters expire.
    pub(crate) timeouts: String,
    /// The times until which disconnected waiters keep their positions in the queue (redlatch's
    /// own, not in Redisson).
    pub(crate) absent_waiters: String,
    /// The leases that waiters ask for, and the numbers of their requests (redlatch's own, not in
    /// Redisson).
    pub(crate) announcements: String,
}

impl FairKeys {
    pub(crate) fn new(prefix: &str, name: &str) -> FairKeys {
        FairKeys::of(ObjectKeys::new(KeyLayout::Fair, prefix, name).into())
    }

    /// Returns the keys of the fair lock that shares its key with this lock.
    pub(crate) fn of(object: Arc<ObjectKeys>) -> FairKeys {
        FairKeys {
            queue: prefixed(QUEUE, object.key()),
            timeouts: prefixed(TIMEOUTS, object.key()),
            absent_waiters: prefixed(ABSENT, object.key()),
            announcements: prefixed(ANNOUNCED, object.key()),
            object,
        }
    }

    /// Returns the keys of a fair object that several owners may hold.
    pub(crate) fn shared(object: Arc<ObjectKeys>) -> FairKeys {
        let key = |prefix| unambiguous(prefix, object.key(), &['{']);
        FairKeys {
            queue: key(FAIR_QUEUE),
            timeouts: key(FAIR_TIMEOUTS),
            absent_waiters: key(FAIR_ABSENT),
            announcements: key(FAIR_ANNOUNCED),
            object,
        }
    }

    /// Returns the key of the queue of the fair lock that shares its key with this lock. `None`: it
    /// is no lock.
    pub(crate) fn queue_of(object: &ObjectKeys) -> Option<String> {
        object
            .channel
            .starts_with(LOCK_CHANNEL)
            .then(|| prefixed(QUEUE, object.key()))
    }

    /// Returns the channel of one waiter.
    pub(crate) fn waiter_channel(&self, owner: &str) -> String {
        [&self.object.channel, ":", owner].concat()
    }
}

/// The keys of an election: those of a fair lock, the token of a fenced lock, and its latest term
/// (redlatch's own, not in Redisson).
#[derive(Debug)]
pub(crate) struct ElectionKeys {
    pub(crate) fair: Arc<FairKeys>,
    /// Counts the epochs, which are tokens of the lock.
    pub(crate) token: String,
    /// Epoch, leader and value of the latest term. Never expires, so that epochs only grow.
    pub(crate) term: String,
}

impl ElectionKeys {
    pub(crate) fn new(prefix: &str, name: &str) -> ElectionKeys {
        let fair = FairKeys::of(ObjectKeys::new(KeyLayout::Election, prefix, name).into());
        ElectionKeys {
            token: prefixed(TOKEN, fair.object.key()),
            term: term_key(fair.object.key()),
            fair: fair.into(),
        }
    }
}

/// Returns the key of the latest term of an election.
pub(crate) fn term_key(key: &str) -> String {
    unambiguous(ELECTION, key, &['{'])
}

/// The keys of a fenced lock.
#[derive(Debug)]
pub(crate) struct FencedKeys {
    pub(crate) object: Arc<ObjectKeys>,
    /// The fencing token, a number that only grows.
    pub(crate) token: String,
}

impl FencedKeys {
    pub(crate) fn new(prefix: &str, name: &str) -> FencedKeys {
        let object = ObjectKeys::new(KeyLayout::Fenced, prefix, name);
        FencedKeys {
            token: prefixed(TOKEN, object.key()),
            object: object.into(),
        }
    }
}

/// The key of a group of locks, and the field of one of its values. A holder of the value has two
/// further fields.
#[derive(Debug)]
pub(crate) struct GroupKeys {
    pub(crate) object: Arc<ObjectKeys>,
    /// The field that names the owner of the value.
    pub(crate) value: Box<str>,
}

impl GroupKeys {
    /// `value` is the field of the value, `shown` the value for people.
    pub(crate) fn new(prefix: &str, group: &str, value: &str, shown: &str) -> GroupKeys {
        let mut object = ObjectKeys::new(KeyLayout::Group, prefix, group);
        // Equals no other key, because no name has a NUL.
        let identity = [object.key(), "\0", value].concat();
        let shown: String = shown.escape_debug().take(MAX_SHOWN_CHARS).collect();
        let shown = format!("{prefix}{group}[{shown}]");
        object.hash = hash_of(&identity);
        object.in_group = Some(Box::new(InGroup { shown, identity }));
        GroupKeys {
            object: object.into(),
            value: value.into(),
        }
    }

    /// Returns the field with the end of an owner's hold, in epoch ms.
    pub(crate) fn end_field(&self, owner: &str) -> String {
        [&self.value, ":", owner, GROUP_END].concat()
    }

    /// Returns the field with an owner's hold count.
    pub(crate) fn count_field(&self, owner: &str) -> String {
        [&self.value, ":", owner, GROUP_COUNT].concat()
    }
}

/// The keys of a read-write lock.
#[derive(Debug)]
pub(crate) struct ReadWriteKeys {
    /// The two sides. They have one key and one channel.
    pub(crate) read: Arc<ObjectKeys>,
    pub(crate) write: Arc<ObjectKeys>,
    /// The waiting writers that block new readers, and until when (redlatch's own, not in
    /// Redisson).
    pub(crate) writers: String,
    /// Prefix of the timeouts of all readers' holds; the reader follows.
    pub(crate) timeouts_prefix: String,
}

impl ReadWriteKeys {
    pub(crate) fn new(prefix: &str, name: &str) -> ReadWriteKeys {
        let side = |layout| Arc::new(ObjectKeys::new(layout, prefix, name));
        let read = side(KeyLayout::Read);
        ReadWriteKeys {
            writers: unambiguous(WRITERS, read.key(), &['{']),
            timeouts_prefix: suffixed(read.key(), ""),
            write: side(KeyLayout::Write),
            read,
        }
    }

    /// Returns the prefix of the timeouts of one reader's holds; the number of the hold follows.
    pub(crate) fn reader_timeouts_prefix(&self, reader: &str) -> String {
        [&self.timeouts_prefix, reader, ":rwlock_timeout"].concat()
    }
}

/// The keys of an expirable semaphore.
#[derive(Debug)]
pub(crate) struct PermitKeys {
    pub(crate) object: Arc<ObjectKeys>,
    /// The times at which the permits expire.
    pub(crate) deadlines: String,
}

impl PermitKeys {
    pub(crate) fn new(prefix: &str, name: &str) -> PermitKeys {
        let object = ObjectKeys::new(KeyLayout::Permits, prefix, name);
        PermitKeys {
            deadlines: suffixed(object.key(), DEADLINES),
            object: object.into(),
        }
    }
}

/// The key of the runs of a job (redlatch's own, not in Redisson).
#[derive(Debug)]
pub(crate) struct OnceKeys {
    /// The name, and a lock with this name, which the job does not use itself.
    pub(crate) object: Arc<ObjectKeys>,
    /// The record of the latest run, or of the run of a slot with a name.
    pub(crate) record: String,
}

impl OnceKeys {
    pub(crate) fn new(prefix: &str, name: &str, slot: Option<&str>) -> OnceKeys {
        let object = ObjectKeys::new(KeyLayout::Lock, prefix, name);
        let braces = ['{', '}'];
        let mut record = unambiguous(ONCE, object.key(), &braces);
        if let Some(slot) = slot {
            record = [&record, ":", slot].concat();
        }
        if object.key().contains(braces) {
            // Else `x{t}:y`, and `x{t}` with the slot `y`, would have one record.
            record = format!("{record}:{}", object.key().len());
        }
        let object = object.into();
        OnceKeys { object, record }
    }
}

/// The key of a job that runs by a schedule (redlatch's own, not in Redisson).
#[cfg(feature = "cron")]
#[derive(Debug)]
pub(crate) struct JobKeys {
    /// The name, and the lock with this name.
    pub(crate) object: Arc<ObjectKeys>,
    /// What was decided, and the latest runs.
    pub(crate) record: String,
}

#[cfg(feature = "cron")]
impl JobKeys {
    /// Pattern of the records of all jobs.
    pub(crate) const PATTERN: &str = "redlatch_job:*";

    pub(crate) fn new(prefix: &str, name: &str) -> JobKeys {
        let object = ObjectKeys::new(KeyLayout::Lock, prefix, name);
        JobKeys {
            record: unambiguous(JOB, object.key(), &['{', '}']),
            object: object.into(),
        }
    }

    /// Returns the key of the job with this record: its name with the prefix.
    pub(crate) fn object_of(record: &str) -> Option<&str> {
        name_within(JOB, record)
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
    pub(crate) fair_queue: String,
    pub(crate) fair_timeouts: String,
}

impl CandidateKeys {
    /// Takes a key, including the prefix.
    pub(crate) fn new(key: String) -> CandidateKeys {
        CandidateKeys {
            queue: prefixed(QUEUE, &key),
            timeouts: prefixed(TIMEOUTS, &key),
            token: prefixed(TOKEN, &key),
            deadlines: suffixed(&key, DEADLINES),
            readers: suffixed(&key, ""),
            fair_queue: unambiguous(FAIR_QUEUE, &key, &['{']),
            fair_timeouts: unambiguous(FAIR_TIMEOUTS, &key, &['{']),
            key,
        }
    }

    pub(crate) fn keys(&self) -> [&str; 8] {
        [
            &self.key,
            &self.queue,
            &self.timeouts,
            &self.token,
            &self.deadlines,
            &self.readers,
            &self.fair_queue,
            &self.fair_timeouts,
        ]
    }
}

/// Returns whether a key belongs to the object of another key.
pub(crate) fn is_extra_key(key: &str) -> bool {
    // Both forms of such a key contain a brace: see `prefixed` and `suffixed`.
    let has_prefix = |prefix: &&str| {
        let rest = key.strip_prefix(*prefix);
        rest.is_some_and(|rest| rest.starts_with(':') && rest.contains(['{', '}']))
    };
    let is_timeout = || {
        let parts = key.rsplit_once(":rwlock_timeout:");
        parts.is_some_and(|(reader, n)| {
            reader.contains('{') && !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    PREFIXES.iter().any(has_prefix) || is_timeout()
}

/// Returns prefixes of the keys that change when an object is acquired, released or waited for, for
/// all objects whose keys start with `start`. No prefix starts with another.
pub(crate) fn changing_prefixes(start: &str) -> Vec<String> {
    let mut all = vec![start.to_owned(), format!("{QUEUE}:{start}")];
    // A name with a hash tag, and one without.
    all.push(format!("{FAIR_QUEUE}::{start}"));
    if !start.contains('{') {
        // The braces of the queue of a name without a hash tag of its own.
        all.extend([QUEUE, FAIR_QUEUE].map(|queue| format!("{queue}:{{{start}")));
    }
    all.sort_unstable();
    let mut prefixes: Vec<String> = Vec::new();
    for prefix in all {
        // Sorted, so a prefix directly follows those that it starts with, or others that start with
        // them.
        if !prefixes.last().is_some_and(|last| prefix.starts_with(last)) {
            prefixes.push(prefix);
        }
    }
    prefixes
}

/// Returns the key of the object that may have changed with this key: itself, or that of the object
/// to which a queue belongs. The second one shares its queue, if there is one (`a` and `{a}`).
pub(crate) fn changed_objects(key: &str) -> Option<(&str, Option<&str>)> {
    match objects_of_queue(key) {
        None => (!is_extra_key(key)).then_some((key, None)),
        found => found,
    }
}

/// Returns the key of the fair lock to which a queue belongs, and the one that shares the queue, if
/// there is one: the locks `a` and `{a}` have one queue.
fn objects_of_queue(queue: &str) -> Option<(&str, Option<&str>)> {
    if let Some(name) = name_within(FAIR_QUEUE, queue) {
        return Some((name, None));
    }
    let name = queue.strip_prefix(QUEUE)?.strip_prefix(':')?;
    let inside = name.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
    match inside.filter(|inside| !inside.contains(['{', '}'])) {
        Some(inside) => Some((inside, Some(name))),
        None => Some((name, None)),
    }
}

/// Objects are equal if their keys are, except for the two sides of a read-write lock and the
/// values of a group: they share a key, and one owner may hold several of them.
impl PartialEq for ObjectKeys {
    fn eq(&self, other: &ObjectKeys) -> bool {
        let writes = |object: &ObjectKeys| object.layout.writes();
        self.identity() == other.identity() && writes(self) == writes(other)
    }
}

impl Eq for ObjectKeys {}

impl Hash for ObjectKeys {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Pattern of the hashes of all clients.
pub(crate) const CLIENT_PATTERN: &str = "redlatch_client:{*}";

/// Patterns of the queues of all fair objects: locks, and those that several owners may hold.
pub(crate) const FAIR_QUEUE_PATTERNS: [&str; 2] =
    ["redisson_lock_queue:*{*}*", "redlatch_fair_queue:*{*}*"];

/// Returns the key of the fair object to which a queue belongs. (The locks `a` and `{a}` have one
/// queue; this is `a`.)
pub(crate) fn object_of_queue(queue: &str) -> Option<&str> {
    objects_of_queue(queue).map(|(object, _)| object)
}

/// Returns the key of the hash in which a client registers itself (redlatch's own, not in
/// Redisson). It has no prefix, as the ids of owners have none: a holder is looked up by its id,
/// without the prefix of its client.
pub(crate) fn client_key(id: &str) -> String {
    prefixed(CLIENT, id)
}

/// Returns the id of the client to which such a hash belongs.
pub(crate) fn client_of_key(key: &str) -> Option<&str> {
    let id = key.strip_prefix(CLIENT)?.strip_prefix(":{")?;
    id.strip_suffix('}')
}

/// Returns a key or channel that belongs to `name`, in its cluster slot: the name becomes the hash
/// tag, unless it has one of its own.
fn prefixed(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

/// As [`prefixed`], but no two names have one key: those of `a` and `{a}` differ. `special` are
/// characters of names that get no braces.
fn unambiguous(prefix: &str, name: &str, special: &[char]) -> String {
    if name.contains(special) {
        format!("{prefix}::{name}")
    } else {
        prefixed(prefix, name)
    }
}

/// The inverse of [`unambiguous`].
fn name_within<'a>(prefix: &str, key: &'a str) -> Option<&'a str> {
    let rest = key.strip_prefix(prefix)?.strip_prefix(':')?;
    let with_own_tag = rest.strip_prefix(':');
    with_own_tag.or_else(|| rest.strip_prefix('{')?.strip_suffix('}'))
}

/// Returns a key that belongs to `name`, in its cluster slot.
fn suffixed(name: &str, suffix: &str) -> String {
    if name.contains('{') {
        format!("{name}:{suffix}")
    } else {
        format!("{{{name}}}:{suffix}")
    }
}

/// Returns where a channel contains the key of its object.
fn key_within(channel: &str, key: &str) -> Range<usize> {
    let start = channel.rfind(key).unwrap_or_default();
    start..start + key.len()
}

fn hash_of(identity: &str) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(identity)
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
/// Braces around the whole name keep them together if the name has no braces. A name with a hash
/// tag needs none. Redisson looks only for a `{`, so a name with other braces (`a}b`, `a{b`, `{}a`)
/// works on a single server and fails in a cluster. It is refused everywhere, so that a program can
/// move between deployments.
pub(crate) fn spans_slots(key: &str) -> bool {
    key.contains(['{', '}']) && hash_tag(key).is_none()
}

/// Returns the text in the first braces of a key, if there is any. In a cluster it determines the
/// slot instead of the whole key.
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

    /// A second job with the record of the first would never run, and an election with the term of
    /// another would report its leader.
    #[test]
    fn no_two_names_share_a_record_or_a_term() {
        let names = [
            "a", "{a}", "a}", "a}:b", "{a}:b", "x{t}", "x{t}:y", "{x{t}}",
        ];
        let slots = [
            None,
            Some(""),
            Some("b"),
            Some("b}"),
            Some("b}:4"),
            Some("y"),
            Some("y:6"),
            Some("3"),
        ];
        let mut keys: Vec<String> = Vec::new();
        for name in names {
            keys.push(ElectionKeys::new("", name).term);
            keys.extend(slots.map(|slot| OnceKeys::new("", name, slot).record));
        }
        assert!(keys.iter().all(|key| is_extra_key(key)), "{keys:#?}");
        let number = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), number);
        assert_eq!(
            OnceKeys::new("", "a", Some("b")).record,
            "redlatch_once:{a}:b"
        );
        assert_eq!(
            OnceKeys::new("", "x{t}", Some("y")).record,
            "redlatch_once::x{t}:y:4"
        );
        assert_eq!(
            ElectionKeys::new("", "x{t}").term,
            "redlatch_election::x{t}"
        );
    }

    /// All further keys of a name, of each kind, and the channels.
    fn further_keys(name: &str) -> Vec<String> {
        let lock = ObjectKeys::new(KeyLayout::Lock, "", name);
        let fair = FairKeys::new("", name);
        let shared = ObjectKeys::new(KeyLayout::FairRead, "", name);
        let shared = FairKeys::shared(shared.into());
        let read_write = ReadWriteKeys::new("", name);
        vec![
            lock.requests_key(),
            fair.queue.clone(),
            fair.timeouts.clone(),
            fair.absent_waiters.clone(),
            fair.announcements.clone(),
            ElectionKeys::new("", name).term,
            FencedKeys::new("", name).token,
            read_write.writers.clone(),
            read_write.reader_timeouts_prefix("c:1"),
            PermitKeys::new("", name).deadlines,
            OnceKeys::new("", name, None).record,
            unambiguous(JOB, lock.key(), &['{', '}']),
            lock.channel.into(),
            fair.waiter_channel("c:1"),
            read_write.read.channel().to_owned(),
            PermitKeys::new("", name).object.channel().to_owned(),
            ObjectKeys::new(KeyLayout::Latch, "", name).channel.into(),
            shared.queue.clone(),
            shared.timeouts.clone(),
            shared.absent_waiters.clone(),
            shared.announcements.clone(),
            shared.waiter_channel("c:1"),
        ]
    }

    /// A request to release `a` was one to release `{a}`.
    #[test]
    fn aliases_share_only_what_redisson_defines() {
        let [plain, tagged, other] = ["a", "{a}", "x{a}"].map(further_keys);
        // Those of redlatch, the last two with the queue: an announcement names its lock.
        let ours = [ASKED, ELECTION, WRITERS, ONCE, JOB, "redlatch_fair"];
        let of_queue = [ABSENT, ANNOUNCED];
        for ((plain, tagged), other) in plain.iter().zip(&tagged).zip(&other) {
            assert!(plain != other && tagged != other, "{other}");
            let is = |prefixes: &[&str]| prefixes.iter().any(|one| plain.starts_with(one));
            if plain.starts_with("redlatch_") {
                assert!(is(&ours) || is(&of_queue), "{plain}: not considered");
                assert_eq!(plain == tagged, is(&of_queue), "{plain} {tagged}");
            }
        }
        // So that none is forgotten.
        for prefix in PREFIXES {
            let is_listed = plain.iter().any(|key| key.starts_with(prefix));
            assert!(
                is_listed || [CLIENT, UNLOCK_LATCH].contains(&prefix),
                "{prefix}"
            );
        }
    }

    /// Names are part of messages.
    #[test]
    fn values_are_shown_in_one_short_line() {
        let shown = |value: &str| {
            let keys = GroupKeys::new("", "g", "field", value);
            keys.object.full_name().to_owned()
        };
        assert_eq!(shown("größe\nERROR"), "g[größe\\nERROR]");
        assert_eq!(shown(&"a".repeat(1000)).len(), "g[]".len() + 64);
    }

    #[test]
    fn keys_and_channels_match_redisson() {
        let lock = |prefix, name| ObjectKeys::new(KeyLayout::Lock, prefix, name);
        let plain = lock("", "orders:42");
        assert_eq!(plain.key(), "orders:42");
        assert_eq!(plain.channel(), "redisson_lock__channel:{orders:42}");

        let tagged = lock("", "{orders}:42");
        assert_eq!(tagged.channel(), "redisson_lock__channel:{orders}:42");

        let prefixed = lock("shop:", "a");
        assert_eq!((prefixed.name(), prefixed.full_name()), ("a", "shop:a"));
        assert_eq!(prefixed.key(), "shop:a");
        assert_eq!(prefixed.channel(), "redisson_lock__channel:{shop:a}");

        assert_eq!(plain.requests_key(), "redlatch_lock_asked:{orders:42}");
        assert_eq!(tagged.requests_key(), "redlatch_lock_asked::{orders}:42");
        assert!(is_extra_key(&plain.requests_key()));

        let spin = ObjectKeys::new(KeyLayout::Spin, "", "a");
        assert_eq!((spin.key(), spin.channel()), ("a", lock("", "a").channel()));

        let fair = FairKeys::new("", "a");
        assert_eq!(fair.queue, "redisson_lock_queue:{a}");
        assert_eq!(fair.timeouts, "redisson_lock_timeout:{a}");
        assert_eq!(fair.absent_waiters, "redlatch_lock_absent:{a}");
        assert_eq!(fair.announcements, "redlatch_lock_announced:{a}");
        let channel = fair.waiter_channel("c:1");
        assert_eq!(channel, "redisson_lock__channel:{a}:c:1");

        let fenced = FencedKeys::new("", "a");
        assert_eq!(fenced.token, "redisson_lock_token:{a}");

        let client = client_key("c");
        assert_eq!(client, "redlatch_client:{c}");
        assert_eq!(client_of_key(&client), Some("c"));
        assert!(is_extra_key(&client));
        for (queue, name) in [("{a}", "a"), ("{a}b", "{a}b"), ("a{b}", "a{b}")] {
            let key = format!("redisson_lock_queue:{queue}");
            assert_eq!(object_of_queue(&key), Some(name));
        }

        let keys = ReadWriteKeys::new("", "a");
        let prefix = keys.reader_timeouts_prefix("c:1");
        assert_eq!(prefix, "{a}:c:1:rwlock_timeout");
        assert_eq!(keys.writers, "redlatch_rwlock_writers:{a}");
        let tagged = ReadWriteKeys::new("", "{a}b").reader_timeouts_prefix("c:1");
        assert_eq!(tagged, "{a}b:c:1:rwlock_timeout");
        let ReadWriteKeys { read, write, .. } = keys;
        assert_eq!((read.key(), read.channel()), ("a", "redisson_rwlock:{a}"));
        assert_eq!((write.key(), write.channel()), (read.key(), read.channel()));
        assert_ne!(write, read);
        assert_eq!(write.field("c:1".into()), "c:1:write");
        assert_eq!(owner_of("c:1:write"), "c:1");
        assert!(is_writer_field("c:1:write") && !is_writer_field("c:1"));

        let permits = PermitKeys::new("", "a");
        assert_eq!(permits.deadlines, "{a}:timeout");
        assert_eq!(permits.object.channel(), "redisson_sc:{a}");
        let latch = ObjectKeys::new(KeyLayout::Latch, "", "{a}b");
        assert_eq!(latch.channel(), "redisson_countdownlatch__channel__{{a}b}");
    }

    #[test]
    fn changes_of_queues_are_changes_of_their_locks() {
        assert_eq!(changed_objects("a"), Some(("a", None)));
        let queue = FairKeys::new("", "a").queue;
        assert_eq!(changed_objects(&queue), Some(("a", Some("{a}"))));
        assert_eq!(FairKeys::new("", "{a}").queue, queue);
        let queue = FairKeys::new("", "{a}:b").queue;
        assert_eq!(changed_objects(&queue), Some(("{a}:b", None)));
        assert_eq!(changed_objects(&FencedKeys::new("", "a").token), None);

        for (start, name) in [
            ("", "a"),
            ("a", "ab"),
            ("{", "{a}"),
            ("{a}:", "{a}:b"),
            ("redisson", "redisson"),
        ] {
            let prefixes = changing_prefixes(start);
            let keys = FairKeys::new("", name);
            for key in [keys.object.key(), &keys.queue] {
                let matching = prefixes.iter().filter(|prefix| key.starts_with(*prefix));
                assert_eq!(matching.count(), 1, "{key} {prefixes:?}");
            }
            // Otherwise the server refuses them.
            let overlaps = |one: &String| {
                prefixes
                    .iter()
                    .filter(|other| other.starts_with(one))
                    .count()
                    > 1
            };
            assert!(!prefixes.iter().any(overlaps), "{prefixes:?}");
        }
        assert_eq!(changing_prefixes(""), [""]);
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
