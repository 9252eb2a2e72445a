//! What somebody has who holds a lock.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::{Acquire, Held, Lock, LockKind, OwnedKind, Reentrant, Request};
use crate::error::{Error, Result};
use crate::owner::Owner;
use crate::session::{Claim, Terms};

/// A held lock. Released by [`Guard::unlock`], or in the background when dropped.
///
/// Dropping never blocks and never panics. When the store cannot be reached, releasing is tried
/// again until the lease must have ended, and the log says so (`tracing`, level WARN). A guard that
/// outlives its runtime releases nothing when dropped; the lock is then free when its lease ends.
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct Guard<K: LockKind = Reentrant> {
    held: Held,
    kind: Arc<K>,
    /// What came with the acquisition.
    pub(crate) won: K::Won,
}

impl<K: LockKind> Guard<K> {
    pub(super) fn new(claim: Claim, terms: Terms, kind: Arc<K>, won: K::Won) -> Guard<K> {
        Guard {
            held: Held::new(claim, terms),
            kind,
            won,
        }
    }

    /// The share in the hold that it is.
    pub(crate) fn claim(&self) -> &Claim {
        &self.held.claim
    }

    /// Releases the lock and returns when the store has done so. A lock that was entered several
    /// times stays held until its last guard is released.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: it was no longer held, so others may have held it
    /// meanwhile. [`Error::Unavailable`], [`Error::ResponseTimeout`] or another: the store did not
    /// answer or refused; releasing goes on in the background.
    ///
    /// When the connection breaks during the release, it is sent again. Having been removed by
    /// force in just that moment cannot be told from having been released by the first try, and
    /// counts as released.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the release goes on in the background.
    pub async fn unlock(self) -> Result<()> {
        self.held.give_back().await
    }

    /// Whether the lock is certainly still held: no loss was told, and the lease, counted from
    /// before the request for it was sent, has not ended. Once `false` it stays `false`.
    ///
    /// Costs no round trip. Right also on waking from a pause of the process, before any timer has
    /// run. (The clock is the monotonic one; on Linux it stands still while the whole machine is
    /// suspended, so then the answer may be too hopeful.)
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// For how long the lock is certainly held if nothing renews it. Zero when it was lost.
    pub fn valid_for(&self) -> Duration {
        self.held.claim.hold.valid_for()
    }

    /// Completes when the lock is lost: the store said so, or the lease ended without a renewal
    /// that succeeded. Never completes when the lock is released first.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at will.
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
        let hold = self.held.claim.hold.clone();
        async move { hold.lost().await }
    }

    /// Runs `work` while the lock is held. The guard keeps the lock afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as the lock is lost; `work` is dropped then, and
    /// not polled again after the lease has ended.
    ///
    /// # Cancel safety
    ///
    /// When dropped, `work` is dropped.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let hold = &self.held.claim.hold;
        let loss = || hold.loss().map(|loss| hold.lost_error(loss));
        run_while(loss, hold.lost(), work).await
    }

    /// The lock's name.
    pub fn name(&self) -> &str {
        self.held.claim.hold.place.name()
    }

    /// The handle through which it was acquired.
    pub(crate) fn handle(&self) -> Lock<K> {
        Lock {
            session: self.held.claim.session.clone(),
            place: self.held.claim.hold.place.clone(),
            kind: self.kind.clone(),
            reentrant: self.held.terms.reentrant,
        }
    }

    /// The terms on which it is held.
    pub(crate) fn terms(&self) -> Terms {
        self.held.terms
    }

    /// Leaves what is held to its lease: from here on nobody renews it or gives it back. An error if
    /// it has been lost.
    pub(crate) fn detach(self) -> Result<()> {
        self.held.detach()
    }
}

/// What has an owner can be entered again.
impl<K: LockKind + OwnedKind> Guard<K> {
    /// Enters the lock once more, for the same owner. It is held until both guards are released.
    /// [`Error::Lost`] if it has been lost.
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
        let request = Request::new(&self.handle());
        Acquire { request }.again(self.held.claim.clone())
    }

    /// Who holds the lock through this guard.
    pub fn owner(&self) -> Owner {
        self.held.claim.hold.owner
    }

    /// The owner as the store knows it: `<client id>:<number>`.
    pub fn owner_id(&self) -> &str {
        let hold = &self.held.claim.hold;
        hold.place.owner(&hold.field)
    }

    /// How many guards this owner has of the lock.
    pub fn hold_count(&self) -> u32 {
        self.held.claim.hold.count()
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
        // Asked before every poll: timers are late when the process was stopped.
        if let Some(error) = loss() {
            return Poll::Ready(Err(error));
        }
        match work.as_mut().poll(cx) {
            Poll::Ready(output) => return Poll::Ready(Ok(output)),
            Poll::Pending => {}
        }
        // Registers for the news; what it was is asked again, now or at the next poll.
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
            .field("owner", &&*self.held.claim.hold.field)
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
