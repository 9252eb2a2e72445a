//! The fair read-write lock.

use std::sync::Arc;
use std::time::Duration;

use super::holders::UNLIMITED;
use super::{FairShared, Part};
use crate::error::Result;
use crate::locks::fair::FairTimes;
use crate::locks::{Lock, RequiredWriteHold, ToReadSide, WriteSide};
use crate::metrics::Kind;
use crate::name::{FairKeys, KeyLayout, ObjectKeys};
use crate::observe::inspect::Waiter;
use crate::session::Session;

/// A read-write lock that is acquired in the order of the requests, across all clients: many readers
/// or one writer hold it.
///
/// It is not in Redisson. Its data in the store is this library's own, so Redisson's
/// `getReadWriteLock(name)`, and [`Client::read_write_lock`](crate::Client::read_write_lock), are
/// other locks, which the store refuses while this one has the name ([`Error::WrongKind`](crate::Error::WrongKind)).
///
/// Each side is a [`Lock`] with all of its methods. Readers and writers wait in one queue in the
/// store, as for a [`FairLock`](crate::FairLock):
///
/// - Nobody overtakes a waiter, so neither side starves: a reader that arrives while a writer waits is
///   served behind it. Consecutive readers read together.
/// - A plain [`try_lock`](Lock::try_lock) neither joins the queue nor overtakes it.
/// - A release, or a waiter that gives up, serves the queue in the same step, with the
///   [grants](crate::ClientBuilder::fair_grants) of the fair lock. Waiters that died delay the others by
///   one [grace period](Lock::grace_period) in total, a waiter whose process hangs by one lease or its
///   [wait time](Lock::wait_time).
/// - Both sides are re-entrant regardless of the queue, and the watchdog of each client renews its own
///   holds. A reader that dies blocks writers for one lease, however many other readers continue.
/// - A writer may also read, regardless of the queue ([`Guard::reenter_read`](crate::Guard::reenter_read)), and keep reading when
///   it releases the write side, without another writer in between ([`Guard::downgrade`](crate::Guard::downgrade)). A
///   reader that requests the write side gets [`Error::WriteWhileReading`](crate::Error::WriteWhileReading)
///   immediately: it would wait for itself. And a reader must not wait for another owner to start reading,
///   because a writer may be waiting in between.
///
/// If the store loses its data, waiters notice that within 5 s, and longer for those further back in the
/// queue.
///
/// # When not to use it
///
/// Each step reads all holders, which takes the server about a microsecond for each. Where neither side
/// starves, [`Client::read_write_lock`](crate::Client::read_write_lock) costs less.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// use std::future::IntoFuture;
///
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let catalogue = client.fair_read_write_lock("catalogue");
///
/// let reader = catalogue.read().lock().await?;
/// let writer = tokio::spawn(catalogue.write().lock().into_future());
/// while catalogue.queue().await?.is_empty() {
///     tokio::task::yield_now().await; // until the writer waits
/// }
/// assert!(catalogue.read().try_lock().await?.is_none(), "it is the writer's turn");
/// reader.unlock().await?;
/// writer.await.unwrap()?.unlock().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FairReadWriteLock {
    read: FairReadLock,
    write: FairWriteLock,
}

/// The read side of a [`FairReadWriteLock`].
pub type FairReadLock = Lock<FairShared<FairRead>>;

/// The write side of a [`FairReadWriteLock`].
pub type FairWriteLock = Lock<FairShared<FairWrite>>;

/// Makes a [`Lock`] a [`FairReadLock`], as the parameter of its kind.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FairRead {
    write: Arc<ObjectKeys>,
    /// The write hold whose owner requests the read side as well.
    required: Option<RequiredWriteHold>,
}

/// Makes a [`Lock`] a [`FairWriteLock`], as the parameter of its kind.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FairWrite {
    read: Arc<ObjectKeys>,
}

impl Part for FairRead {
    const LAYOUT: KeyLayout = KeyLayout::FairRead;
    const METRIC: Kind = Kind::FairReadLock;

    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        Some(&self.write)
    }

    fn required(&self) -> Option<&RequiredWriteHold> {
        self.required.as_ref()
    }
}

impl Part for FairWrite {
    const LAYOUT: KeyLayout = KeyLayout::FairWrite;
    const METRIC: Kind = Kind::FairWriteLock;

    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        Some(&self.read)
    }
}

impl ToReadSide<FairShared<FairRead>> for FairShared<FairWrite> {
    fn read_side(&self, required: RequiredWriteHold) -> FairShared<FairRead> {
        let part = FairRead {
            write: self.keys.object.clone(),
            required: Some(required),
        };
        side(&self.part.read, self.times, part)
    }
}

impl WriteSide for FairShared<FairWrite> {
    type Read = FairShared<FairRead>;
}

fn side<P: Part>(object: &Arc<ObjectKeys>, times: FairTimes, part: P) -> FairShared<P> {
    FairShared {
        keys: FairKeys::shared(object.clone()).into(),
        times,
        part,
        total: UNLIMITED,
    }
}

/// Returns both sides.
pub(super) fn sides(prefix: &str, name: &str) -> (FairShared<FairRead>, FairShared<FairWrite>) {
    let object = |layout| Arc::new(ObjectKeys::new(layout, prefix, name));
    let (read, write) = (object(FairRead::LAYOUT), object(FairWrite::LAYOUT));
    let reads = FairRead {
        write: write.clone(),
        required: None,
    };
    let writes = FairWrite { read: read.clone() };
    let times = FairTimes::default();
    (side(&read, times, reads), side(&write, times, writes))
}

impl FairReadWriteLock {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> FairReadWriteLock {
        let (read, write) = sides(&session.prefix, name);
        FairReadWriteLock {
            read: Lock::from_kind(session.clone(), read),
            write: Lock::from_kind(session, write),
        }
    }

    /// Returns the name as it was passed in.
    pub fn name(&self) -> &str {
        self.read.name()
    }

    /// Sets how long the lock is kept for a waiter of this handle when its turn has come: [`Lock::wait_time`], for both
    /// sides.
    #[must_use]
    pub fn wait_time(self, wait_time: Duration) -> FairReadWriteLock {
        FairReadWriteLock {
            read: self.read.wait_time(wait_time),
            write: self.write.wait_time(wait_time),
        }
    }

    /// Sets how long disconnected waiters keep their positions once their turn has come: [`Lock::grace_period`], for both
    /// sides.
    #[must_use]
    pub fn grace_period(self, grace_period: Duration) -> FairReadWriteLock {
        FairReadWriteLock {
            read: self.read.grace_period(grace_period),
            write: self.write.grace_period(grace_period),
        }
    }

    /// Returns the side that many owners may hold at a time. [`Lock::holders`] returns all readers; [`Lock::force_unlock`]
    /// releases the holds of all of them.
    pub fn read(&self) -> FairReadLock {
        self.read.clone()
    }

    /// Returns the side that one owner may hold at a time, while no other owner reads. [`Lock::force_unlock`] releases the
    /// writer's hold, but not what it also reads.
    pub fn write(&self) -> FairWriteLock {
        self.write.clone()
    }

    /// Returns the waiters for both sides in any process, the next one first: [`Lock::queue`], with its errors.
    pub async fn queue(&self) -> Result<Vec<Waiter>> {
        self.read.queue().await
    }
}
