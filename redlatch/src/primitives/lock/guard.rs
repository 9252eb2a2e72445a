//! The guard of a held lock.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::{Acquire, AcquireOptions, HoldGuard, Lock, LockKind, OwnedKind, Reentrant};
use crate::error::{Error, Result};
use crate::name::owner_of;
use crate::owner::{Owner, OwnerId};
use crate::session::{HoldRef, Terms};

/// A held lock. [`Guard::unlock`] releases it; dropping the guard releases it in the background.
///
/// Dropping never blocks and never panics. If the store cannot be reached, the release is retried
/// until the lease must have ended, and the log reports it (`tracing`, level WARN). A guard that
/// outlives its runtime releases nothing when dropped; the lock is then free when its lease ends.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct Guard<K: LockKind = Reentrant> {
    held: HoldGuard,
    kind: Arc<K>,
    /// The value that the acquisition returned.
    pub(crate) grant: K::Grant,
}

impl<K: LockKind> Guard<K> {
    pub(super) fn new(hold_ref: HoldRef, terms: Terms, kind: Arc<K>, grant: K::Grant) -> Guard<K> {
        Guard {
            held: HoldGuard::new(hold_ref, terms),
            kind,
            grant,
        }
    }

    /// Returns this guard's reference to the hold.
    pub(crate) fn hold_ref(&self) -> &HoldRef {
        &self.held.hold_ref
    }

    /// Releases the lock and waits until the store has confirmed it. A re-entered lock stays held
    /// until its last guard is released.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the lock was no longer held, so other owners may have held it meanwhile.
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`] or another error: the store did not
    /// answer or refused the release, which continues in the background.
    ///
    /// If the connection breaks during the release, it is sent again. A forced unlock at that
    /// moment cannot be told from a successful first attempt, and counts as released.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the release continues in the background.
    pub async fn unlock(self) -> Result<()> {
        self.held.release().await
    }

    /// Returns whether the lock is certainly still held: no loss was reported, and the lease,
    /// counted from before the request was sent, has not ended. Once `false`, it stays `false`.
    ///
    /// Costs no round trip. The answer is also correct right after a pause of the process, before
    /// any timer has run. (The clock is the monotonic one. On Linux it stops while the whole
    /// machine is suspended, so the answer may be too optimistic then.)
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns how long the lock is certainly held without a renewal. Zero if it was lost.
    pub fn valid_for(&self) -> Duration {
        self.held.hold_ref.hold.valid_for()
    }

    /// Completes when the lock is lost: the store reported it, or the lease ended without a
    /// successful renewal. Never completes if the lock is released first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    ///
    /// ```no_run
    /// # async fn work() {} async fn stop() {}
    /// # async fn example(guard: redlatch::Guard) {
    /// tokio::select! {
    ///     () = guard.lost() => stop().await,
    ///     () = work() => {}
    /// }
    /// # }
    /// ```
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<K> {
        let hold = self.held.hold_ref.hold.clone();
        async move { hold.lost().await }
    }

    /// Runs `work` while the lock is held. The guard keeps the lock afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as the lock is lost; `work` is then dropped and never polled after
    /// the lease has ended.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let hold = &self.held.hold_ref.hold;
        let loss = || hold.loss().map(|loss| hold.lost_error(loss));
        run_while(loss, hold.lost(), work).await
    }

    /// Returns the lock's name.
    pub fn name(&self) -> &str {
        self.held.hold_ref.hold.object.name()
    }

    /// Returns the handle through which the lock was acquired.
    pub(crate) fn handle(&self) -> Lock<K> {
        Lock {
            session: self.held.hold_ref.session.clone(),
            kind: self.kind.clone(),
            reentrant: self.held.terms.reentrant,
        }
    }

    /// Returns the terms of the hold.
    pub(crate) fn terms(&self) -> Terms {
        self.held.terms
    }

    /// Leaves the hold to its lease: it is no longer renewed and never released. Returns an error
    /// if it was lost.
    pub(crate) fn detach(self) -> Result<()> {
        self.held.detach()
    }
}

/// Kinds that have an owner can be re-entered.
impl<K: LockKind + OwnedKind> Guard<K> {
    /// Acquires the lock again for the same owner. It stays held until both guards are released.
    /// [`Error::Lost`] if it was lost.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let outer = client.lock("a").lock().await?;
    /// let inner = outer.reenter().await?;
    /// assert_eq!(outer.hold_count(), 2);
    /// inner.unlock().await?;
    /// assert!(client.lock("a").is_locked().await?);
    /// # Ok(()) }
    /// ```
    pub fn reenter(&self) -> Acquire<K> {
        let request = AcquireOptions::new(&self.handle());
        Acquire { request }.reentering(self.held.hold_ref.clone())
    }

    /// Returns the owner that holds the lock through this guard.
    pub fn owner(&self) -> Owner {
        self.held.hold_ref.hold.owner
    }

    /// Returns the owner's id in the store.
    pub fn owner_id(&self) -> OwnerId {
        owner_of(&self.held.hold_ref.hold.field).into()
    }

    /// Returns the number of guards that this owner has of the lock.
    pub fn hold_count(&self) -> u32 {
        self.held.hold_ref.hold.count()
    }
}

/// Polls `work` as long as there is no loss; `lost` completes when there may be one.
pub(crate) async fn run_while<F: Future>(
    loss: impl Fn() -> Option<Error>,
    lost: impl Future<Output = ()>,
    work: F,
) -> Result<F::Output> {
    let mut work = pin!(work);
    let mut lost = pin!(lost);
    poll_fn(|cx| {
        // Checked before every poll, because timers are late after the process was stopped.
        if let Some(error) = loss() {
            return Poll::Ready(Err(error));
        }
        match work.as_mut().poll(cx) {
            Poll::Ready(output) => return Poll::Ready(Ok(output)),
            Poll::Pending => {}
        }
        // Registers the waker; the loss itself is checked above, now or at the next poll.
        match lost.as_mut().poll(cx) {
            Poll::Ready(()) => match loss() {
                Some(error) => Poll::Ready(Err(error)),
                None => Poll::Pending,
            },
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

impl<K: LockKind> std::fmt::Debug for Guard<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.name())
            .field("owner", &&*self.held.hold_ref.hold.field)
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
