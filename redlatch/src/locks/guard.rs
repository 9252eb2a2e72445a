//! The guard of what a request acquired. What differs between locks, several locks as one and
//! permits is its [`Held`] part.

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use super::{Acquirable, HasLease, HasOwner, Held, HeldForLease as _, Lock};
use crate::error::{Error, Result};
use crate::owner::Owner;

/// What a request acquired: a held lock, several locks held as one, or permits. [`Guard::unlock`]
/// releases it ([`Guard::release`] for permits); dropping the guard releases it in the background.
///
/// Dropping never blocks and never panics. If the store cannot be reached, the release is retried
/// until the lease must have ended, and the log reports it (`tracing`, level WARN). A guard that
/// outlives its runtime releases nothing when dropped; the lock is then free when its lease ends.
#[must_use = "it is released as soon as the guard is dropped"]
pub struct Guard<R: Acquirable = Lock> {
    pub(crate) held: R::Held,
}

impl<R: Acquirable> Guard<R> {
    /// Runs `work` while it is held, and releases it. A release that the store does not answer is
    /// not an error; it continues in the background.
    pub(crate) async fn run_and_release<F: Future>(self, work: F) -> Result<F::Output> {
        let output = self.run_while_held(work).await?;
        self.release_unless_lost().await.map(|()| output)
    }

    /// Polls `work` as long as there is no loss.
    pub(crate) async fn run_while_held<F: Future>(&self, work: F) -> Result<F::Output> {
        let held = &self.held;
        let mut work = pin!(work);
        let mut lost = pin!(held.lost());
        poll_fn(|cx| {
            // Checked before every poll, because timers are late after the process was stopped.
            if let Some(error) = held.loss() {
                return Poll::Ready(Err(error));
            }
            if let Poll::Ready(output) = work.as_mut().poll(cx) {
                return Poll::Ready(Ok(output));
            }
            // Registers the waker.
            if lost.as_mut().poll(cx).is_ready()
                && let Some(error) = held.loss()
            {
                return Poll::Ready(Err(error));
            }
            Poll::Pending
        })
        .await
    }

    /// Releases it. The only error is a loss.
    pub(crate) async fn release_unless_lost(self) -> Result<()> {
        let error = self.held.release().await.err();
        error.and_then(Error::into_loss).map_or(Ok(()), Err)
    }
}

impl<R: HasLease> Guard<R> {
    /// Releases it and waits until the store has confirmed it. A re-entered lock stays held until
    /// its last guard is released.
    ///
    /// If another task of the same client waits for the lock, or for as many permits, it passes to that task. Within 10 ms after
    /// the last answer of the store (twice the time that it took if that is longer), this then returns at once: `Ok` means that
    /// no loss is known and that the lease has not ended. Later it asks the store whether the lock is still held.
    /// [`ClientBuilder::local_hand_over`](crate::ClientBuilder::local_hand_over) says when, and turns it off.
    ///
    /// Several locks are released concurrently. A RedLock is released on all members that granted
    /// it; after [`RedLock::member_timeout`](crate::RedLock::member_timeout) this returns as soon as the
    /// unconfirmed members are too few to withhold a majority from other owners, and the release is
    /// retried there in the background.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: it was no longer held (a RedLock: not by a majority), so other owners may
    /// have held it meanwhile. [`Error::Unavailable`], [`Error::ResponseTimeout`] or another error:
    /// the store did not answer or refused the release, which continues in the background. Of
    /// several locks, this is the first error of a member, a loss before others; all are released nevertheless. A
    /// RedLock returns it only if too many members may still keep the lock. A member that does not
    /// answer cannot report that it lost the lock.
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

    /// Records that the holder still works, and restarts the interval of [`Acquire::fed_every`](super::Acquire::fed_every). Costs
    /// no round trip. Without such an interval, it only checks whether it is still held.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: it was lost before, also because it was fed too late. Feeding it changes nothing then.
    pub fn feed(&self) -> Result<()> {
        self.held.feed();
        self.held.loss().map_or(Ok(()), Err)
    }

    /// Returns whether it is certainly still held: no loss was reported, and the lease, counted
    /// from before the request was sent, has not ended. Once `false`, it stays `false`. A multi-lock
    /// is valid while all members are held; a RedLock while a majority is, even if their clocks run
    /// a little faster than the local one.
    ///
    /// Costs no round trip. The answer is also correct right after a pause of the process, before
    /// any timer has run. (The clock is the monotonic one. On Linux it stops while the whole
    /// machine is suspended, so the answer may be too optimistic then.)
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// Returns how long it is certainly held without a renewal. Zero if it was lost.
    ///
    /// For a multi-lock this is the shortest time of its members. For a RedLock it is the quorum-th
    /// longest, less the allowance for clock drift (1 % of the lease and 2 ms).
    pub fn valid_for(&self) -> Duration {
        self.held.valid_for()
    }

    /// Completes when it is lost: the store reported it, the lease ended without a successful
    /// renewal, or a limit of the request ([`Acquire::at_most`](super::Acquire::at_most)) was reached. Never completes if it
    /// is released first, with all other guards of its owner.
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
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<R> {
        self.held.lost()
    }

    /// Runs `work` while it is held. The guard keeps it afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] as soon as it is lost; `work` is then dropped and never polled after the
    /// lease has ended.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.run_while_held(work).await
    }
}

impl<R: HasOwner> Guard<R> {
    /// Returns the owner that holds it through this guard.
    ///
    /// If the request named none, the owner is anonymous. It identifies this acquisition while the
    /// guard exists: after the release, another acquisition of the same client may continue under
    /// the same owner ([`ClientBuilder::local_hand_over`](crate::ClientBuilder::local_hand_over)).
    /// No request can name it ([`Acquire::owner`](super::Acquire::owner)).
    pub fn owner(&self) -> Owner {
        self.held.owner()
    }
}

impl<R: Acquirable> Debug for Guard<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Guard").field(&self.held).finish()
    }
}
