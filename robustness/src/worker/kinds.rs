//! The kinds of locks that workers take, by the names' beginnings.

use std::future::IntoFuture;
use std::time::Duration;

use redlatch::{Acquire, ReadWriteLock, TryAcquire};
use redlatch::{Client, Error, ExpirableSemaphore, FairLock, FencedLock, Guard, Lock, LockKind};

use super::section::Inside;
use crate::Result;
use crate::history::{Mode, PERMITS};
use crate::random::Random;

/// All that there are.
pub const KINDS: [&str; 5] = ["lock", "fair", "fenced", "rw", "permits"];

/// The kinds that named owners and threads take, over few names. A `red` is a RedLock of three locks, and
/// taken by threads only.
pub const KINDS_OF_OWNERS: [&str; 5] = ["fenced", "lock", "rw", "fair", "red"];

/// The names of the locks that a RedLock is made of.
pub(crate) fn members(name: &str) -> [String; 3] {
    let (_, number) = name.split_once(':').unwrap_or_default();
    [0, 1, 2].map(|member| format!("lock:{number}.{member}"))
}

/// The names of the locks that are taken under a name: itself, or the members of a RedLock.
pub(crate) fn locks_of(name: &str) -> Vec<String> {
    match name.starts_with("red:") {
        true => members(name).into(),
        false => vec![name.to_owned()],
    }
}

pub enum Handle {
    Lock(Lock),
    Fair(FairLock),
    Fenced(FencedLock),
    ReadWrite(ReadWriteLock),
    Permits(ExpirableSemaphore, Duration),
}

impl Handle {
    pub fn new(client: &Client, name: &str, lease: Duration) -> Result<Handle> {
        let kind = name.split(':').next().unwrap_or_default();
        Ok(match kind {
            "lock" => Handle::Lock(client.lock(name)),
            // Those who die in the queue are waited for this long.
            "fair" => Handle::Fair(client.fair_lock(name).wait_time(lease)),
            "fenced" => Handle::Fenced(client.fenced_lock(name)),
            "rw" => Handle::ReadWrite(client.read_write_lock(name)),
            "permits" => Handle::Permits(client.expirable_semaphore(name), lease),
            other => return Err(format!("there is no kind {other}: {}", KINDS.join(", ")).into()),
        })
    }

    /// Takes all of it and gives it back, if it is free. Whether it was.
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
        }
    }

    /// One critical section, from asking to having given back.
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
                let asking = inside.ask(lock.name(), Mode::Alone, ask.into_future());
                let guard = asking.await?;
                inside.stay(guard, None, time).await
            }
            Handle::Lock(lock) => {
                let asking = waits(inside, lock.name(), Mode::Alone, lock.lock());
                let guard = asking.await?;
                inside.stay(guard, None, time).await
            }
            Handle::Fair(lock) => {
                let asking = waits(inside, lock.name(), Mode::Alone, lock.lock());
                let guard = asking.await?;
                inside.stay(guard, None, time).await
            }
            Handle::Fenced(lock) => {
                let asking = waits(inside, lock.name(), Mode::Alone, lock.lock());
                let guard = asking.await?;
                let token = guard.as_ref().map(Guard::token);
                inside.stay(guard, token, time).await
            }
            Handle::ReadWrite(lock) if random.below(3) == 0 => {
                let asking = waits(inside, lock.name(), Mode::Alone, lock.write().lock());
                let guard = asking.await?;
                inside.stay(guard, None, time).await
            }
            Handle::ReadWrite(lock) => {
                let asking = waits(inside, lock.name(), Mode::Shared, lock.read().lock());
                let guard = asking.await?;
                inside.stay(guard, None, time).await
            }
            Handle::Permits(semaphore, lease) => {
                // A store that lost its data has forgotten how many there are; nobody else says it.
                semaphore.try_set_permits(PERMITS).await?;
                let ask = semaphore.try_acquire().wait(*lease * 4);
                let asking = inside.ask(semaphore.name(), Mode::Permit, ask.into_future());
                let guard = asking.await?;
                inside.stay(guard, None, time).await
            }
        }
    }
}

/// Takes it if it is free. Whether it was.
async fn once<K: LockKind>(ask: TryAcquire<K>) -> Result<bool, Error> {
    match ask.await? {
        Some(guard) => guard.unlock().await.map(|()| true),
        None => Ok(false),
    }
}

/// Asks, and waits for as long as it takes.
async fn waits<K: LockKind>(
    inside: &mut Inside,
    name: &str,
    mode: Mode,
    ask: Acquire<K>,
) -> Result<Option<Guard<K>>, Error> {
    let asking = async { ask.await.map(Some) };
    inside.ask(name, mode, asking).await
}
