//! The kinds of locks that workers use, selected by prefixes of the names.

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::time::Duration;

use redlatch::{AcquireMany, LockOfMany, ReadWriteLock, TryAcquire, TryAcquireMany};
use redlatch::{Client, Error, ExpirableSemaphore, FairLock, FencedLock, Guard, Lock, LockKind};
use redlatch::{CountDownLatch, Member, MultiLock, RedLock, Semaphore, SpinLock};
use tokio::time::timeout;

use super::section::Inside;
use crate::Result;
use crate::history::{Mode, PERMITS};
use crate::random::Random;

/// Kinds with leases. A `multi` is a multi-lock of three kinds, a `red` a RedLock of three locks.
pub const KINDS: [&str; 8] = [
    "lock", "fair", "fenced", "rw", "permits", "spin", "multi", "red",
];

/// Kinds without leases: what they lose in an outage is lost for good. Only simulated runs use them.
pub const COUNTERS: [&str; 2] = ["semaphore", "latch"];

/// The kinds that named owners and threads use, over few names. Only threads use `red`.
pub const KINDS_OF_OWNERS: [&str; 6] = ["fenced", "lock", "rw", "fair", "spin", "red"];

/// Returns the names of the locks that are acquired for a name: itself, or the members of a multi-lock or a
/// RedLock. Two multi-locks share members, with each other and with tasks that use these alone.
pub fn locks_of(name: &str) -> Vec<String> {
    match name.split_once(':') {
        Some(("red", number)) => (0..3).map(|one| format!("lock:{number}.{one}")).collect(),
        Some(("multi", number)) => {
            let half = number.parse().unwrap_or(0) / 2;
            vec![
                format!("lock:{number}"),
                format!("fair:{half}"),
                format!("rw:{half}"),
            ]
        }
        _ => vec![name.to_owned()],
    }
}

/// Returns the names of all locks that are acquired for these names, each once.
pub fn locks_of_all<'a>(names: impl Iterator<Item = &'a String>) -> Vec<String> {
    let locks: BTreeSet<String> = names.flat_map(|name| locks_of(name)).collect();
    locks.into_iter().collect()
}

pub enum Handle {
    Lock(Lock),
    Fair(FairLock),
    Fenced(FencedLock),
    ReadWrite(ReadWriteLock),
    Permits(ExpirableSemaphore, Duration),
    Spin(SpinLock),
    Multi(MultiLock, String),
    Red(RedLock, String),
    Semaphore(Semaphore, Duration),
    Latch(CountDownLatch, Duration),
}

impl Handle {
    pub fn new(client: &Client, name: &str, lease: Duration) -> Result<Handle> {
        let kind = name.split(':').next().unwrap_or_default();
        let members = || {
            let locks = locks_of(name).into_iter();
            locks.map(|name| member(client, &name, lease))
        };
        Ok(match kind {
            "lock" => Handle::Lock(client.lock(name)),
            "fair" => Handle::Fair(fair(client, name, lease)),
            "fenced" => Handle::Fenced(client.fenced_lock(name)),
            "rw" => Handle::ReadWrite(client.read_write_lock(name)),
            "permits" => Handle::Permits(client.expirable_semaphore(name), lease),
            "spin" => Handle::Spin(client.spin_lock(name)),
            "multi" => Handle::Multi(MultiLock::new(members()), name.to_owned()),
            "red" => {
                let lock = RedLock::new(members()).timeout(lease / 10);
                Handle::Red(lock, name.to_owned())
            }
            "semaphore" => Handle::Semaphore(client.semaphore(name), lease),
            "latch" => Handle::Latch(client.count_down_latch(name), lease),
            other => {
                let kinds = [&KINDS[..], &COUNTERS].concat().join(", ");
                return Err(format!("unknown kind {other}; available: {kinds}").into());
            }
        })
    }

    /// Acquires the whole object and releases it, if it is free. Returns whether it was.
    pub async fn visit(&self) -> Result<bool, Error> {
        match self {
            Handle::Lock(lock) => once(lock.try_lock()).await,
            Handle::Fair(lock) => once(lock.try_lock()).await,
            Handle::Fenced(lock) => once(lock.try_lock()).await,
            Handle::ReadWrite(lock) => once(lock.write().try_lock()).await,
            Handle::Permits(semaphore, _) => {
                semaphore.try_set_permits(PERMITS).await?;
                once(semaphore.try_acquire_many(PERMITS)).await
            }
            Handle::Spin(lock) => once(lock.try_lock()).await,
            // Their members are visited.
            Handle::Multi(..) | Handle::Red(..) => Ok(true),
            // Exactly as many permits as were set.
            Handle::Semaphore(semaphore, _) => {
                semaphore.try_set_permits(PERMITS).await?;
                Ok(semaphore.available().await? == i64::from(PERMITS))
            }
            Handle::Latch(latch, _) => Ok(latch.count_down_by(HIGHEST).await? == 0),
        }
    }

    /// Runs one critical section, from the request to the release.
    pub(crate) async fn pass(
        &self,
        inside: &mut Inside,
        time: Duration,
        random: &mut Random,
    ) -> Result<(), Error> {
        match self {
            // Some wait with a limit.
            Handle::Lock(lock) if random.below(4) == 0 => {
                let ask = lock.try_lock().wait(time * 4);
                let asking = ask.into_future();
                inside.pass(lock.name(), Mode::Alone, asking, time).await
            }
            Handle::Lock(lock) => enter(lock, Mode::Alone, inside, time).await,
            Handle::Fair(lock) => enter(lock, Mode::Alone, inside, time).await,
            Handle::Spin(lock) => enter(lock, Mode::Alone, inside, time).await,
            Handle::Fenced(lock) => {
                let asking = async { lock.lock().await.map(Some) };
                let guard = inside.ask(lock.name(), Mode::Alone, asking).await?;
                let token = guard.as_ref().map(Guard::token);
                inside.stay(guard, token, time).await
            }
            Handle::ReadWrite(lock) if random.below(3) == 0 => {
                enter(lock.write(), Mode::Alone, inside, time).await
            }
            Handle::ReadWrite(lock) => enter(lock.read(), Mode::Shared, inside, time).await,
            Handle::Permits(semaphore, lease) => {
                // A store that lost its data lost the permits, too; no other client sets them.
                semaphore.try_set_permits(PERMITS).await?;
                let ask = semaphore.try_acquire().wait(*lease * 4);
                let (name, asking) = (semaphore.name(), ask.into_future());
                inside.pass(name, Mode::Permit, asking, time).await
            }
            Handle::Multi(lock, name) => {
                let asking = many(lock.lock(), lock.try_lock(), time * 4, random.below(6));
                inside.pass(name, Mode::Alone, asking, time).await
            }
            Handle::Red(lock, name) => {
                let asking = many(lock.lock(), lock.try_lock(), time * 4, random.below(6));
                inside.pass(name, Mode::Alone, asking, time).await
            }
            Handle::Semaphore(semaphore, lease) => {
                semaphore.try_set_permits(PERMITS).await?;
                let ask = semaphore.try_acquire().wait(*lease * 4);
                let asking = inside.ask(semaphore.name(), Mode::Semaphore, ask.into_future());
                let permits = asking.await?;
                inside.keep(permits, time).await
            }
            Handle::Latch(latch, lease) => use_latch(latch, *lease, inside, random).await,
        }
    }
}

/// The highest count of a latch.
const HIGHEST: u32 = 3;

/// Sets the count, counts down and waits, or does some of these.
async fn use_latch(
    latch: &CountDownLatch,
    lease: Duration,
    inside: &mut Inside,
    random: &mut Random,
) -> Result<(), Error> {
    let name = latch.name();
    let highest = usize::try_from(HIGHEST).unwrap_or_default();
    if random.below(2) == 0 {
        let count = 1 + u32::try_from(random.below(highest)).unwrap_or_default();
        let set = async {
            latch
                .try_set_count(count)
                .await
                .map(|set| set.then_some(()))
        };
        let asking = inside.ask(name, Mode::SetCount(count), set);
        if asking.await?.is_some() {
            inside.enter(None, None);
        }
    }
    if random.below(4) > 0 {
        let counting = async { latch.count_down().await.map(Some) };
        if let Some(left) = inside.ask(name, Mode::CountDown, counting).await? {
            inside.counted(left);
        }
    }
    if random.below(2) == 0 {
        let limit = random.between(Duration::ZERO, lease * 4);
        let wait = async { latch.wait_for(limit).await.map(|open| open.then_some(())) };
        if inside.ask(name, Mode::AwaitZero, wait).await?.is_some() {
            inside.enter(None, None);
        }
    }
    Ok(())
}

fn fair(client: &Client, name: &str, lease: Duration) -> FairLock {
    // A waiter that dies in the queue delays the others this long.
    client.fair_lock(name).wait_time(lease)
}

/// A member of a multi-lock or a RedLock.
fn member(client: &Client, name: &str, lease: Duration) -> Member {
    match name.split(':').next() {
        Some("fair") => fair(client, name, lease).into(),
        Some("rw") => client.read_write_lock(name).write().into(),
        _ => client.lock(name).into(),
    }
}

/// Acquires and releases the lock if it is free. Returns whether it was.
async fn once<K: LockKind>(ask: TryAcquire<K>) -> Result<bool, Error> {
    match ask.await? {
        Some(guard) => guard.unlock().await.map(|()| true),
        None => Ok(false),
    }
}

/// Runs one critical section whose request waits.
async fn enter<K: LockKind>(
    lock: &Lock<K>,
    mode: Mode,
    inside: &mut Inside,
    time: Duration,
) -> Result<(), Error> {
    let asking = async { lock.lock().await.map(Some) };
    inside.pass(lock.name(), mode, asking, time).await
}

/// Requests several locks in one of three ways: with a limit, canceled at the limit, or without one.
async fn many<L: LockOfMany>(
    lock: AcquireMany<L>,
    try_lock: TryAcquireMany<L>,
    limit: Duration,
    way: usize,
) -> Result<Option<L::Guard>, Error> {
    match way {
        0 => try_lock.wait(limit).await,
        1 => match timeout(limit, lock.into_future()).await {
            Ok(guard) => guard.map(Some),
            Err(_) => Ok(None),
        },
        _ => lock.await.map(Some),
    }
}
