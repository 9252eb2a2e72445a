//! Refusals that say who holds what was requested.

use std::future::{Future, IntoFuture};
use std::time::Duration;

use super::{Acquirable, AnyLock, Guard, TryAcquire};
use crate::error::Error;
use crate::hold::Holder;
use crate::join::Boxed;
use crate::name::KeyLayout;
use crate::observe::inspect::inspect;
use crate::owner::OwnerId;

/// Why a request was refused, as the store said just after it: [`TryAcquire::or_busy`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> redlatch::Result<()> {
/// # let client = redlatch::Client::embedded();
/// use redlatch::TryLockError;
///
/// let lock = client.lock("nightly-report");
/// let held = lock.lock().await?;
/// match lock.try_lock().or_busy().await {
///     Err(TryLockError::Busy(busy)) => {
///         assert_eq!(busy.holder, Some(held.owner_id()));
///         assert_eq!(busy.to_string(), format!("{} holds it for 30s", held.owner_id()));
///     }
///     Err(TryLockError::Failed(error)) => return Err(error),
///     Ok(_guard) => unreachable!(),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Busy {
    /// How long the holder keeps it unless it renews its lease or releases it. Zero if it became free meanwhile, or if only
    /// others that wait in a queue come first. `None`: nobody knows, because it has no lease (permits of a
    /// [`Semaphore`](crate::Semaphore)), or the store could not be asked.
    ///
    /// A watchdog renews its lock until the release: then this says after which time the lock is free if the holder dies.
    pub remaining: Option<Duration>,
    /// The owner that holds it: of several readers the one with the longest lease; of several locks the one that is held
    /// longest. Permits have no owner.
    pub holder: Option<OwnerId>,
    /// The [note](crate::Acquire::note) of the holder, if its client has [registered](crate::ClientBuilder::registry) it.
    pub note: Option<String>,
}

/// Why a request that says who refused it has no guard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TryLockError {
    /// Another owner holds it, or there are too few permits.
    #[error("busy: {0}")]
    Busy(Busy),
    /// The request failed.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// A [`TryAcquire`] whose refusal says who holds it: [`TryAcquire::or_busy`].
#[must_use = "nothing is acquired until this is awaited"]
#[derive(Debug)]
pub struct OrBusy<R: Acquirable> {
    request: TryAcquire<R>,
}

impl<R: Acquirable> TryAcquire<R> {
    /// Returns an error that says who holds it, for how long, and with which note, in place of `None`. For messages to
    /// people, and for headers such as `Retry-After`.
    ///
    /// After a refusal this asks the store: one command for the holder, and one for its note; of several locks for each. The
    /// holder may have changed since. If it cannot be asked, the fields are `None`.
    /// (Redisson's `tryLock` returns `false`.)
    ///
    /// # Errors
    ///
    /// [`TryLockError::Failed`] with those of [`Acquire`](crate::Acquire). The conversion to [`Error`] is up to the caller,
    /// because a refusal is none.
    ///
    /// # Cancel safety
    ///
    /// That of [`Acquire`](crate::Acquire).
    pub fn or_busy(self) -> OrBusy<R> {
        OrBusy { request: self }
    }
}

impl<R: Acquirable> OrBusy<R> {
    /// Acquires, runs `work` while it is held, and releases: [`TryAcquire::run`].
    pub async fn run<F: Future>(self, work: F) -> Result<F::Output, TryLockError> {
        Ok(self.await?.run_and_release(work).await?)
    }

    /// As [`Acquire::owner_or`](super::Acquire::owner_or).
    #[cfg(feature = "blocking")]
    pub(crate) fn owner_or(mut self, owner: crate::Owner) -> OrBusy<R> {
        self.request = self.request.owner_or(owner);
        self
    }
}

impl<R: Acquirable> IntoFuture for OrBusy<R> {
    type Output = Result<Guard<R>, TryLockError>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            match self.request.acquire_once().await? {
                Some(guard) => Ok(guard),
                None => Err(TryLockError::Busy(self.request.target().busy().await)),
            }
        })
    }
}

impl AnyLock {
    /// Asks the store who holds it.
    pub(crate) async fn busy(&self) -> Busy {
        let (kind, object) = (&self.kind, self.kind.object());
        let has_owner = kind.spec().has_owner;
        // Inspection shows no holders of permits and of a value of a group.
        let holders = match has_owner && object.layout() != KeyLayout::Group {
            true => inspect(&self.session, object).await.map(|state| {
                let holders = state.as_ref().map(|state| state.holders());
                holders.unwrap_or_default().into_iter().cloned().collect()
            }),
            false => self.holders().await,
        };
        holders.map_or_else(|_| Busy::default(), |holders| Busy::of(holders, has_owner))
    }
}

impl Busy {
    /// Returns what these holders mean for a refused request. It waits until the last holder of a lock has released it, but only
    /// until the first permit is free.
    fn of(holders: Vec<Holder>, has_owner: bool) -> Busy {
        let holder = match has_owner {
            true => holders.into_iter().max_by_key(|holder| holder.remaining),
            false => holders.into_iter().min_by_key(|holder| holder.remaining),
        };
        let Some(holder) = holder else {
            return Busy {
                remaining: Some(Duration::ZERO),
                ..Busy::default()
            };
        };
        Busy {
            remaining: holder.remaining.duration(),
            holder: has_owner.then_some(holder.owner),
            note: holder.registered.and_then(|entry| entry.note),
        }
    }

    /// Returns the one of several that keeps a request for all of them waiting longest.
    pub(crate) fn longest(all: impl IntoIterator<Item = Busy>) -> Busy {
        let all = all
            .into_iter()
            .max_by_key(|busy| (busy.holder.is_some(), busy.remaining));
        all.unwrap_or_default()
    }
}

impl std::fmt::Display for Busy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.holder {
            Some(holder) => write!(f, "{holder} holds it")?,
            None if self.remaining == Some(Duration::ZERO) => return f.write_str("it was held"),
            None => f.write_str("it is held")?,
        }
        if let Some(remaining) = self.remaining {
            write!(f, " for {remaining:?}")?;
        }
        match &self.note {
            Some(note) => write!(f, " ({note})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Busy, TryLockError};
    use crate::error::Error;
    use crate::store::embedded::failure_injection::Failure::NoEffect;
    use crate::test_prelude::{SECOND, clients};
    use crate::{Acquirable, MultiLock, OrBusy, Owner, RedLock};

    async fn refused<R: Acquirable>(request: OrBusy<R>) -> Busy {
        match request.await {
            Err(TryLockError::Busy(busy)) => busy,
            other => panic!("{:?}", other.map(drop)),
        }
    }

    /// A lease of 20 s, of which 5 s have passed.
    const LEFT: Option<Duration> = Some(Duration::from_secs(15));

    #[tokio::test(start_paused = true)]
    async fn refusal_names_holder_remaining_lease_and_note() {
        let (_, [client, peer]) = clients();
        let held = peer.lock("a").lock().lease(20 * SECOND).note("reindex 42");
        let held = held.await.unwrap();
        tokio::time::sleep(5 * SECOND).await;
        let expected = Busy {
            remaining: LEFT,
            holder: Some(held.owner_id()),
            note: Some("reindex 42".into()),
        };
        let (lock, other) = (client.lock("a"), client.lock("b"));
        assert_eq!(refused(lock.try_lock().or_busy()).await, expected);
        let text = format!("busy: {} holds it for 15s (reindex 42)", held.owner_id());
        assert_eq!(TryLockError::Busy(expected.clone()).to_string(), text);
        // A shorter lease than that of the other member.
        let _short = other.lock().lease(3 * SECOND).await.unwrap();
        let both = [&lock, &other];
        assert_eq!(
            refused(MultiLock::new(both).try_lock().or_busy()).await,
            expected
        );
        assert_eq!(
            refused(RedLock::new(both).try_lock().or_busy()).await,
            expected
        );
        let waiting = lock.try_lock().wait(14 * SECOND).or_busy();
        assert_eq!(refused(waiting).await.remaining, Some(SECOND));
        let waiting = lock.try_lock().wait(2 * SECOND).or_busy();
        assert!(waiting.run(async {}).await.is_ok(), "the lease has ended");
    }

    /// The reader with the longest lease blocks a writer, the writer blocks readers.
    #[tokio::test(start_paused = true)]
    async fn refusal_names_reader_or_writer() {
        let (_, [client, peer]) = clients();
        let (ours, theirs) = (client.read_write_lock("a"), peer.read_write_lock("a"));
        let short = theirs.read().lock().lease(10 * SECOND).await.unwrap();
        let long = theirs.read().lock().lease(20 * SECOND).await.unwrap();
        let busy = refused(ours.write().try_lock().or_busy()).await;
        assert_eq!(busy.holder, Some(long.owner_id()));
        short.unlock().await.unwrap();
        long.unlock().await.unwrap();
        let writer = theirs.write().lock().lease(20 * SECOND).await.unwrap();
        let busy = refused(ours.read().try_lock().or_busy()).await;
        assert_eq!(
            (busy.holder, busy.remaining),
            (Some(writer.owner_id()), Some(20 * SECOND))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn refusal_of_other_kinds_says_what_the_store_knows() {
        let (_, [client, peer]) = clients();
        let value = peer
            .group_lock("g", "v")
            .lock()
            .lease(20 * SECOND)
            .await
            .unwrap();
        tokio::time::sleep(5 * SECOND).await;
        let busy = refused(client.group_lock("g", "v").try_lock().or_busy()).await;
        assert_eq!(
            (busy.holder, busy.remaining),
            (Some(value.owner_id()), LEFT)
        );
        // The first permit that is free again.
        let expirable = client.expirable_semaphore("e");
        expirable.try_set_permits(2).await.unwrap();
        let permits = [20, 30].map(|seconds| expirable.acquire().lease(seconds * SECOND));
        let mut held = Vec::new();
        for permit in permits {
            held.push(permit.await.unwrap());
        }
        let busy = refused(expirable.try_acquire().or_busy()).await;
        assert_eq!((&busy.holder, busy.remaining), (&None, Some(20 * SECOND)));
        assert_eq!(busy.to_string(), "it is held for 20s");
        let semaphore = client.semaphore("s");
        let busy = refused(semaphore.try_acquire().or_busy()).await;
        assert_eq!(
            (&busy, busy.to_string().as_str()),
            (&Busy::default(), "it is held")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn refusal_is_one_also_if_the_holder_cannot_be_asked() {
        let (store, [client, peer]) = clients();
        let lock = client.lock("a");
        let held = peer.lock("a").lock().await.unwrap();
        let request = lock.try_lock().or_busy();
        // The attempt is answered, and then no question.
        store.fail([None].into_iter().chain([Some(NoEffect); 20]));
        assert_eq!(refused(request).await, Busy::default());
        store.recover();
        held.unlock().await.unwrap();
        let guard = lock.lock().await.unwrap();
        let anonymous = guard.owner();
        guard.unlock().await.unwrap();
        let failed = lock.try_lock().owner(anonymous).or_busy().await;
        let Err(TryLockError::Failed(Error::InvalidSetting { setting, .. })) = failed else {
            panic!("{:?}", failed.map(drop));
        };
        assert_eq!(setting, "owner");
        assert!(lock.try_lock().owner(Owner::new()).or_busy().await.is_ok());
        client.flush().await;
        // The lock has become free since.
        assert_eq!(lock.erased().busy().await.to_string(), "it was held");
    }
}
