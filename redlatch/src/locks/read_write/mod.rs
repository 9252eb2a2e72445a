//! The read-write lock (Redisson: `RReadWriteLock`, `RedissonReadWriteLock`): many readers, or one
//! writer that may also read. Its two sides are two kinds of lock that share a key; `rules`
//! describes the algorithm.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod rules;

use std::sync::Arc;

use smallvec::smallvec;

pub(crate) use self::rules::inspect;
use self::rules::{force, read, wake_all, write};
use crate::error::Result;
use crate::hold::{
    AcquireParams, Handoff, HandoffParams, Hold, HoldKind, QueueKind, ReleaseParams, Renewal,
    Renewed, Spec,
};
use crate::keyspace::{Keyspace, Mode};
use crate::lease::Lease;
use crate::locks::reentrant::handoff::{self, handoff};
use crate::locks::{Holder, Lock, OwnedKind, RequiredWriteHold, ToReadSide, WriteSide};
use crate::metrics::Kind;
use crate::name::{ObjectKeys, ReadWriteKeys};
use crate::session::Session;
use crate::step::{Outcome, Step};

/// A lock that either many readers or one writer holds (Redisson: `RReadWriteLock`).
///
/// Each side is a [`Lock`] with all of its methods. Any number of owners hold
/// [`ReadWriteLock::read`], or one owner holds [`ReadWriteLock::write`], never both; except that
/// the writer may also read.
///
/// - Both sides are re-entrant, and the watchdog of each client renews its own holds. A reader that
///   dies blocks writers for one lease, however many other readers continue.
/// - When a writer releases the lock and no other writer acquires it first, all waiting readers acquire it
///   together.
/// - A writer that also reads ([`Guard::reenter_read`](crate::Guard::reenter_read)) may release both sides in any order; without the
///   write side it is a reader like the others. [`Guard::downgrade`](crate::Guard::downgrade) is the short way.
/// - A reader that requests the write side gets [`Error::WriteWhileReading`](crate::Error::WriteWhileReading) immediately: it would
///   wait for itself, and two such readers for each other.
/// - Readers that overlap one after the other keep a writer waiting for as long as they overlap. If
///   that can happen, see [`ReadWriteLock::prefer_writers`].
///
/// Like all handles, it is cheap and does nothing by itself.
///
/// # When not to use it
///
/// Reading under a lock costs as much as writing under one: two round trips. Where reads are short,
/// a plain [`Client::lock`](crate::Client::lock) is simpler; where they may return stale data, use
/// no lock for reading.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let catalogue = client.read_write_lock("catalogue");
///
/// let one = catalogue.read().lock().await?;
/// let two = catalogue.read().lock().await?; // another owner, at the same time
/// assert!(catalogue.write().try_lock().await?.is_none());
/// one.unlock().await?;
/// two.unlock().await?;
///
/// let writer = catalogue.write().lock().await?;
/// assert!(catalogue.read().try_lock().await?.is_none());
/// let reader = writer.downgrade().await?; // no other owner can write in between
/// assert!(catalogue.read().try_lock().await?.is_some());
/// # reader.unlock().await }
/// ```
#[derive(Clone, Debug)]
pub struct ReadWriteLock {
    read: ReadLock,
    write: WriteLock,
}

/// The read side of a [`ReadWriteLock`].
pub type ReadLock = Lock<Read>;

/// The write side of a [`ReadWriteLock`].
pub type WriteLock = Lock<Write>;

/// Makes a [`Lock`] a [`ReadLock`], as its type parameter (Redisson: `RedissonReadLock`).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Read {
    keys: Arc<ReadWriteKeys>,
    /// Whether readers wait behind waiting writers.
    prefers_writers: bool,
    /// The write hold whose owner requests the read side as well.
    required: Option<RequiredWriteHold>,
}

/// Makes a [`Lock`] a [`WriteLock`], as its type parameter (Redisson: `RedissonWriteLock`).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Write {
    keys: Arc<ReadWriteKeys>,
    /// How long a waiting writer blocks new readers, if it does.
    blocks_readers_for: Option<Lease>,
}

impl OwnedKind for Read {}
impl OwnedKind for Write {}

/// Returns the sides of a lock that does not prefer writers.
fn sides(prefix: &str, name: &str) -> (Read, Write) {
    let keys = Arc::new(ReadWriteKeys::new(prefix, name));
    let read = Read {
        keys: keys.clone(),
        prefers_writers: false,
        required: None,
    };
    let write = Write {
        keys,
        blocks_readers_for: None,
    };
    (read, write)
}

impl ReadWriteLock {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> ReadWriteLock {
        let (read, write) = sides(&session.prefix, name);
        ReadWriteLock {
            read: Lock::from_kind(session.clone(), read),
            write: Lock::from_kind(session, write),
        }
    }

    /// Returns the same lock with priority for writers: once a writer waits, new readers wait
    /// behind it. Owners that already read may re-enter.
    ///
    /// It only has an effect between handles that have this setting. Writers that wait through another
    /// handle, or in Redisson, do not block readers. Readers that use another handle, or Redisson, are not
    /// blocked by waiting writers. A waiting writer retries every 3 s and is remembered in the store for
    /// 10 s, so a writer that dies blocks readers for at most 10 s.
    ///
    /// Of the writers that wait through one client, only the first is known to the store: after its
    /// turn a new reader may come before the next writer.
    ///
    /// A reader must not wait for another owner to start reading, because a writer may be waiting
    /// in between. A constant stream of writers blocks readers.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let catalogue = client.read_write_lock("catalogue").prefer_writers();
    /// let reader = catalogue.read().lock().await?;
    /// let writer = tokio::spawn(catalogue.write().lock().into_future());
    /// # while client.status().subscriptions == 0 { tokio::task::yield_now().await }
    /// // Once the writer waits:
    /// assert!(catalogue.read().try_lock().await?.is_none());
    /// reader.unlock().await?;
    /// # writer.await.unwrap()?.unlock().await }
    /// ```
    #[must_use]
    pub fn prefer_writers(self) -> ReadWriteLock {
        let read = Read {
            prefers_writers: true,
            ..(*self.read.kind).clone()
        };
        let write = Write {
            blocks_readers_for: Some(Lease::WRITER_PREFERENCE),
            ..(*self.write.kind).clone()
        };
        ReadWriteLock {
            read: self.read.with_kind(read),
            write: self.write.with_kind(write),
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.read.name()
    }

    /// Returns the side that many owners may hold at a time (Redisson: `readLock()`).
    ///
    /// [`Lock::holders`] returns all readers, [`Lock::is_locked`] whether there are any;
    /// [`Lock::force_unlock`] releases the holds of all of them.
    pub fn read(&self) -> ReadLock {
        self.read.clone()
    }

    /// Returns the side that one owner may hold at a time, while no other owner reads (Redisson:
    /// `writeLock()`).
    ///
    /// Requesting it while reading is [`Error::WriteWhileReading`](crate::Error::WriteWhileReading). [`Lock::is_locked`] returns
    /// whether there is a writer. [`Lock::force_unlock`] releases the writer's hold and its read holds.
    pub fn write(&self) -> WriteLock {
        self.write.clone()
    }
}

impl ToReadSide<Read> for Write {
    fn read_side(&self, required: RequiredWriteHold) -> Read {
        Read {
            keys: self.keys.clone(),
            prefers_writers: self.blocks_readers_for.is_some(),
            required: Some(required),
        }
    }
}

impl WriteSide for Write {
    type Read = Read;
}

impl HoldKind for Read {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.keys.read
    }

    fn spec(&self) -> Spec {
        Spec {
            queue: QueueKind::Shared,
            // Other readers may remain.
            release_frees: false,
            ..Spec::of(Kind::ReadLock)
        }
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        let prefix = self.keys.reader_timeouts_prefix(&hold.field);
        Renewal {
            script: read::renew_script(),
            key: hold.object.key(),
            args: smallvec![
                (&*hold.field).into(),
                prefix.into(),
                hold.object.channel().into()
            ],
            weight: 1,
        }
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        read::renew(keyspace, &self.keys, hold, lease).map(Into::into)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        read::release(&self.keys, params)
    }

    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        Some(&self.keys.write)
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        let required = RequiredWriteHold::of(self.required.as_ref(), params);
        let step = read::acquire(params, &self.keys, self.prefers_writers);
        RequiredWriteHold::checked(required, step)
    }

    fn check(&self) -> Result<()> {
        self.required
            .as_ref()
            .map_or(Ok(()), RequiredWriteHold::check)
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        inspect(&self.keys, Mode::Read)
    }

    fn force(&self) -> Step<'_, bool> {
        force(&self.keys, Mode::Read)
    }
}

/// A writer is renewed like the holder of a plain lock: its lease is the key's expiry.
impl HoldKind for Write {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.keys.write
    }

    fn spec(&self) -> Spec {
        // A writer that blocks readers while it waits is known to the store, which therefore decides on its turn.
        let store_knows_no_waiter = self.blocks_readers_for.is_none();
        Spec {
            local_handoff: store_knows_no_waiter,
            store_handoff: store_knows_no_waiter,
            ..Spec::of(Kind::WriteLock)
        }
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        Renewal::of_lock(write::renew_script(), hold, hold.object.channel())
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        write::renew(keyspace, hold, lease)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        write::release(&self.keys, params)
    }

    fn handoff<'a>(&'a self, params: HandoffParams<'a>) -> Option<Step<'a, Handoff>> {
        let variant = handoff::Variant {
            script: write::handoff_script(),
            wakes: true,
            writer: true,
            tokens: None,
        };
        Some(handoff(params, variant, |keyspace, object| {
            wake_all(keyspace, object);
            Ok(())
        }))
    }

    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        Some(&self.keys.read)
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        let acquire = write::Acquire {
            params,
            keys: &self.keys,
            blocks_readers_for: self.blocks_readers_for,
        };
        acquire.step()
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        inspect(&self.keys, Mode::Write)
    }

    fn force(&self) -> Step<'_, bool> {
        force(&self.keys, Mode::Write)
    }

    fn waiter_ttl(&self) -> Option<Lease> {
        self.blocks_readers_for
    }
}
