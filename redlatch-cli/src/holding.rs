//! What is held while CMD runs, whatever kind it is.

use std::future::Future;
use std::pin::Pin;

use redlatch::{
    Acquire, Client, Guard, Lock, LockKind, MultiGuard, MultiLock, OwnedKind, PermitId, TryAcquire,
};

use crate::args::Run;
use crate::say::say;

pub(crate) struct Holding {
    guard: Box<dyn Held>,
    names: String,
    owner: String,
    token: Option<u64>,
}

type Boxed<T> = Pin<Box<dyn Future<Output = T>>>;

trait Held {
    fn lost(&self) -> Boxed<()>;
    fn unlock(self: Box<Self>) -> Boxed<redlatch::Result<()>>;
}

impl<K: LockKind> Held for Guard<K> {
    fn lost(&self) -> Boxed<()> {
        Box::pin(Guard::lost(self))
    }

    fn unlock(self: Box<Self>) -> Boxed<redlatch::Result<()>> {
        Box::pin(Guard::unlock(*self))
    }
}

impl Held for MultiGuard {
    fn lost(&self) -> Boxed<()> {
        Box::pin(MultiGuard::lost(self))
    }

    fn unlock(self: Box<Self>) -> Boxed<redlatch::Result<()>> {
        Box::pin(MultiGuard::unlock(*self))
    }
}

impl Holding {
    /// Waits for what `run` asks for; `None` if somebody else has it and patience is over.
    pub(crate) async fn obtain(client: &Client, run: &Run) -> redlatch::Result<Option<Holding>> {
        let kind = run.kind;
        let [name] = run.names.as_slice() else {
            return several(client, run).await;
        };
        if let Some(permits) = kind.permits {
            return permit(client, name, permits, run).await;
        }
        if kind.fenced {
            let guard = one(client.fenced_lock(name), run).await?;
            return Ok(guard.map(|guard| {
                let token = guard.token();
                Holding::of(guard, run, Some(token))
            }));
        }
        if kind.fair {
            return lock(client.fair_lock(name), run).await;
        }
        if kind.read {
            return lock(client.read_write_lock(name).read().clone(), run).await;
        }
        if kind.write {
            return lock(client.read_write_lock(name).write().clone(), run).await;
        }
        if kind.spin {
            return lock(client.spin_lock(name), run).await;
        }
        lock(client.lock(name), run).await
    }

    fn of<K: LockKind + OwnedKind>(guard: Guard<K>, run: &Run, token: Option<u64>) -> Holding {
        Holding {
            owner: guard.owner_id().to_owned(),
            names: run.names.join(" "),
            guard: Box::new(guard),
            token,
        }
    }

    /// What CMD is told.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (&'static str, String)> {
        let token = self.token.map(|token| token.to_string());
        [
            ("REDLATCH_LOCK", self.names.clone()),
            ("REDLATCH_OWNER", self.owner.clone()),
        ]
        .into_iter()
        .chain(token.map(|token| ("REDLATCH_FENCING_TOKEN", token)))
    }

    /// Completes when it is lost.
    pub(crate) async fn lost(&self) {
        self.guard.lost().await;
    }

    pub(crate) async fn unlock(self) -> redlatch::Result<()> {
        self.guard.unlock().await
    }
}

async fn lock<K: LockKind + OwnedKind>(
    lock: Lock<K>,
    run: &Run,
) -> redlatch::Result<Option<Holding>> {
    let guard = one(lock, run).await?;
    Ok(guard.map(|guard| Holding::of(guard, run, None)))
}

async fn one<K: LockKind>(lock: Lock<K>, run: &Run) -> redlatch::Result<Option<Guard<K>>> {
    ask(lock.lock(), lock.try_lock(), run).await
}

/// In the one way or the other, as `run` has it.
async fn ask<K: LockKind>(
    mut waiting: Acquire<K>,
    mut trying: TryAcquire<K>,
    run: &Run,
) -> redlatch::Result<Option<Guard<K>>> {
    if let Some(lease) = run.lease {
        waiting = waiting.lease(lease);
        trying = trying.lease(lease);
    }
    match run.wait {
        Some(wait) => trying.wait(wait).await,
        None if run.no_wait => trying.await,
        None => waiting.await.map(Some),
    }
}

/// One of `permits` permits.
async fn permit(
    client: &Client,
    name: &str,
    permits: u32,
    run: &Run,
) -> redlatch::Result<Option<Holding>> {
    let semaphore = client.expirable_semaphore(name);
    if !semaphore.try_set_permits(permits).await? {
        let total = semaphore.total().await?;
        if total != i64::from(permits) {
            say!("{name}: had {total} permits; it has {permits} from now on");
            semaphore.set_permits(permits).await?;
        }
    }
    let guard = ask(semaphore.acquire(), semaphore.try_acquire(), run).await?;
    Ok(guard.map(|guard| Holding {
        owner: guard.ids().iter().map(PermitId::to_string).collect(),
        names: name.to_owned(),
        guard: Box::new(guard),
        token: None,
    }))
}

/// All or nothing.
async fn several(client: &Client, run: &Run) -> redlatch::Result<Option<Holding>> {
    let kind = run.kind;
    let names = run.names.iter();
    let locks = if kind.fair {
        MultiLock::new(names.map(|name| client.fair_lock(name)))
    } else if kind.read {
        MultiLock::new(names.map(|name| client.read_write_lock(name).read().clone()))
    } else if kind.write {
        MultiLock::new(names.map(|name| client.read_write_lock(name).write().clone()))
    } else if kind.spin {
        MultiLock::new(names.map(|name| client.spin_lock(name)))
    } else {
        MultiLock::new(names.map(|name| client.lock(name)))
    };
    let (mut waiting, mut trying) = (locks.lock(), locks.try_lock());
    if let Some(lease) = run.lease {
        waiting = waiting.lease(lease);
        trying = trying.lease(lease);
    }
    let guard = match run.wait {
        Some(wait) => trying.wait(wait).await?,
        None if run.no_wait => trying.await?,
        None => Some(waiting.await?),
    };
    Ok(guard.map(|guard| Holding {
        owner: client.owner_id(guard.owner()),
        names: run.names.join(" "),
        guard: Box::new(guard),
        token: None,
    }))
}
