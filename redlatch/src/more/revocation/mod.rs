//! Asks the holder of a lock to release it, and revokes its hold (Curator: `makeRevocable`).
//! Redisson has nothing like it.
//!
//! 1. [`Lock::ask`] records the request beside the lock, under the owner that holds it then, and
//!    publishes.
//! 2. The holder learns of it from the next renewal, or at once from [`Guard::asked`], which checks
//!    its hold behind a subscription, after each message, and after each broken connection.
//! 3. [`Lock::revoke`] adds a limit. The store extends the hold until then at most, and its client
//!    counts it as lost then ([`Loss::Revoked`](crate::Loss::Revoked)). Only after that the client
//!    releases it, or its lease ends.
//! 4. A hold whose owner was asked is released to all.
//!
//! Invariant: the lock is neither free nor acquired by another owner while the revoked holder
//! counts its hold as valid. A request never changes the lock. What must not happen, and what
//! prevents it:
//!
//! - *A request meets a later holder.* It names the holder at that time, and is not repeated. An
//!   owner that no caller names never acquires again once a guard has been released.
//! - *A request meets a later hold of the same owner.* A release removes it, if a request may
//!   acquire for the owner again, and so does the step for minimum times. So does a handoff that
//!   finds that the hold has ended: no release follows it if it was repeated. A waiter of a fair
//!   queue may not have seen a grant, so the next attempt of its owner removes the request, too. An
//!   answer counts only for the hold that the client had when it asked (`granted_in`).
//! - *A request is missed.* Point 2. Renewals report it, too, so the message is only faster.
//! - *A hold is extended nevertheless.* Re-entries extend a lease without reading the request. They
//!   do not postpone the next renewal (`checked_end`), and a fixed lease that they have extended is
//!   checked when it would have ended. A client that knows the limit gives them no longer lease.
//!   Mutant `revoked-hold-counts-whole-lease`.
//! - *An asked hold passes on within the client.* It is not offered, and an offer of it is not
//!   taken. The script of a handoff looks for a request. Handoffs pass a request on until the
//!   next check beside them, before the last answer ceases to count (`hold/fairness`). It counts
//!   the request as a client that waits.
//! - *A request expires before the hold.* It lasts for the remaining lease, the limit and an hour
//!   more.
//! - *A renewal is refused because of requests.* They are read with `pcall`, and their keys are not
//!   declared. Without permission, or while a slot moves, there are none.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod tests;

mod ask;

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::ask::ask;
use crate::error::Result;
use crate::hold::requests::check_limit;
use crate::hold::{Hold, PeriodId, Renewed, Share};
use crate::join::Boxed;
use crate::lease::{Expiry, WaitLimit};
use crate::locks::fair::Fair;
use crate::locks::fair_shared::{FairShared, FairWrite};
use crate::locks::fenced::Fenced;
use crate::locks::permits::Permits;
use crate::locks::read_write::Write;
use crate::locks::spin::Spin;
use crate::locks::{Acquire, Guard, Lock, LockKind, OwnedKind, Reentrant};
use crate::owner::OwnerId;
use crate::runtime::sleep_until;
use crate::session::{HoldRef, Session};
use crate::step::Outcome;
use crate::store::{Delivery, Progress};
use crate::sync::Mutex;
use crate::wait::{RequestLimits, private_object};
use crate::watchdog::renew_holds;

/// How often [`Lock::released_by`] looks, because fair and spin locks do not publish each release. Also the shortest time between
/// two looks for requests of permits.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// A kind of lock whose holder can be asked to release it: the re-entrant, fair, fenced and spin lock, and the write side of a
/// read-write lock and of a fair one. Not the read side, because new readers would take the place of those that were asked.
pub trait Revocable: OwnedKind {}

impl Revocable for Reentrant {}
impl Revocable for Fair {}
impl Revocable for Fenced {}
impl Revocable for Spin {}
impl Revocable for Write {}
impl Revocable for FairShared<FairWrite> {}

/// A kind whose guards can be asked for: the [`Revocable`] ones, and permits
/// ([`ExpirableSemaphore::ask`](crate::ExpirableSemaphore::ask)).
pub trait Askable: LockKind {}

impl<K: Revocable> Askable for K {}
impl Askable for Permits {}

impl<K: Revocable> Lock<K> {
    /// Asks the holder to release the lock, in any process. Returns the owner that was asked; `None`: the lock is free, and
    /// nothing was done.
    ///
    /// The holder decides: its [`Guard::asked`] completes, and [`Acquire::run_until_asked`] ends its work and releases. A holder that
    /// does neither continues, and so does Redisson, which does not know requests. The request is for the hold that its owner has
    /// now, and remains until that is released: no later holder is asked, nor is a later hold of the same owner. It does not
    /// depend on the client that asks. It is lost with lost data, and with a failover to a replica that does not have it.
    ///
    /// Without an answer of the holder, see [`Lock::revoke`]. [`Lock::released_by`] waits for the release.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::is_locked`], and [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown): the connection broke before the answer arrived. The step is
    /// not repeated, because another owner may hold the lock by now.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it started, it continues in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.lock("reindex");
    /// let guard = lock.lock().await?;
    /// let asked = client.lock("reindex").ask().await?; // in another process
    /// guard.asked().await;
    /// assert_eq!(asked, Some(guard.owner_id()));
    /// guard.unlock().await?;
    /// assert_eq!(lock.ask().await?, None);
    /// # Ok(()) }
    /// ```
    pub async fn ask(&self) -> Result<Option<OwnerId>> {
        self.ask_until(None).await
    }

    /// Asks the holder to release the lock as [`Lock::ask`] does. If it has not by the end of `limit`, it loses the lock. Returns
    /// immediately; `None`: the lock is free, and nothing was done. Of several requests the earliest limit counts.
    ///
    /// Unlike [`Lock::force_unlock`], this never leaves two owners that believe to hold the lock. The request only keeps the
    /// hold from being renewed: the store does not extend its lease beyond the limit. The client of the holder learns of the
    /// limit from its next renewal or [`Guard::asked`]. At the limit its guards are lost, for the reason
    /// [`Loss::Revoked`](crate::Loss::Revoked), and only then it releases the lock, so that the next owner acquires it. If it cannot
    /// be reached or is stopped, the lease ends: at the limit, or later if it was extended before the request.
    ///
    /// A re-entry by a client that has not learned of the limit yet may extend the lease once more. A fixed lease is not
    /// shortened. Holders that do not know requests, Redisson and redlatch before this version, are not revoked.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::ask`]. [`Error::InvalidSetting`](crate::Error::InvalidSetting): the limit is longer than
    /// [`MAX_LEASE`](crate::MAX_LEASE).
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::ask`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let lock = client.lock("reindex");
    /// let busy = lock.lock().await?;
    /// lock.revoke(Duration::from_secs(60)).await?;
    /// let next = lock.lock().await?; // at most a minute later
    /// assert!(!busy.is_valid() && next.is_valid());
    /// # Ok(()) }
    /// ```
    pub async fn revoke(&self, limit: Duration) -> Result<Option<OwnerId>> {
        check_limit(limit)?;
        self.ask_until(Some(limit)).await
    }

    async fn ask_until(&self, limit: Option<Duration>) -> Result<Option<OwnerId>> {
        let object = self.valid_kind()?.object();
        self.session
            .run_at_most_once(
                object,
                object,
                move |object| ask(object, limit),
                "asking for a release",
            )
            .await
    }

    /// Waits until `owner`, mostly the result of [`Lock::ask`], does not hold the lock, at most this long. Returns whether it does not.
    /// The release is noticed within half a second. Another owner may hold the lock then.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::is_locked`]. During an outage it continues to wait.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    pub async fn released_by(&self, owner: OwnerId, wait: Duration) -> Result<bool> {
        self.until_released_by(owner, wait).await
    }
}

impl<K: LockKind> Lock<K> {
    /// See [`Lock::released_by`].
    pub(crate) async fn until_released_by(&self, owner: OwnerId, wait: Duration) -> Result<bool> {
        self.session.background.remember_runtime()?;
        self.valid_kind()?;
        let limits = RequestLimits::new(WaitLimit::at_most(wait), Some(Expiry::Never));
        let (store, progress) = (&self.session.store, Progress::default());
        let owner = &owner;
        let look = |channel| -> Boxed<'_, _> {
            let progress = &progress;
            Box::pin(async move {
                let step = self.kind.inspect();
                let delivery = Delivery::QUEUED_INSPECTION;
                let answer = store.run(&step, channel, delivery, progress).await?;
                let mut holders = answer.reply.into_iter();
                Ok(match holders.find(|holder| holder.owner == *owner) {
                    None => Outcome::Done(()),
                    Some(holder) => Outcome::Wait(holder.remaining.min(Expiry::In(LOOK_INTERVAL))),
                })
            })
        };
        let (object, queues) = (self.kind.object(), &self.session.waiting);
        // No waiter for the lock waits behind this.
        let private = private_object(object.identity());
        let released = queues.observe(object.channel(), &private, &limits, &progress, &look);
        Ok(released.await?.is_some())
    }
}

impl<K: Askable> Guard<Lock<K>> {
    /// Completes when another client asks for the lock, or for one of the permits: [`Lock::ask`], [`Lock::revoke`],
    /// [`ExpirableSemaphore::ask`](crate::ExpirableSemaphore::ask). Immediately if it has asked before, in this hold.
    /// Never completes if the lock is lost or released first, with all other guards of its owner.
    ///
    /// While it is polled, it subscribes to the lock's channel, and looks for a request after each message and each broken
    /// connection. So it misses none. If the store refuses that (permissions), requests are found by the renewals, which
    /// need permission for the requests, too.
    ///
    /// Requests of the same client pass a lock on among each other without asking the store. For the store they are one
    /// holder: a request to release that arrives meanwhile is for the guard that holds the lock then.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    ///
    /// ```no_run
    /// # async fn work() {}
    /// # async fn example(guard: redlatch::Guard) -> redlatch::Result<()> {
    /// tokio::select! {
    ///     () = work() => {}
    ///     () = guard.asked() => println!("another process needs the lock"),
    /// }
    /// guard.unlock().await
    /// # }
    /// ```
    pub fn asked(&self) -> impl Future<Output = ()> + Send + 'static + use<K> {
        let HoldRef { session, hold, .. } = self.hold_ref();
        asked(session.clone(), hold.clone())
    }

    /// Runs `work` while it is held, until another client asks for the lock. Then `work` is dropped at its current await point.
    /// `None`: it was asked. The guard keeps the lock afterwards.
    ///
    /// # Errors
    ///
    /// As [`Guard::run`].
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work`.
    pub async fn run_until_asked<F: Future>(&self, work: F) -> Result<Option<F::Output>> {
        self.run(unless(self.asked(), work)).await
    }
}

impl<K: Askable> Acquire<Lock<K>> {
    /// Acquires, runs `work` while it is held, and releases: [`Acquire::run`]. If another client asks for the lock ([`Lock::ask`],
    /// [`Lock::revoke`]), `work` is dropped at its current await point before the release. `None`: it was asked.
    ///
    /// # Errors
    ///
    /// As [`Acquire::run`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Acquire::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.lock("reindex");
    /// assert_eq!(lock.lock().run_until_asked(async { 6 * 7 }).await?, Some(42));
    ///
    /// let endless = lock.lock().run_until_asked(std::future::pending::<()>());
    /// let ask = async {
    ///     while lock.ask().await?.is_none() {
    ///         tokio::task::yield_now().await;
    ///     }
    ///     Ok(())
    /// };
    /// assert_eq!(tokio::try_join!(endless, ask)?.0, None);
    /// # Ok(()) }
    /// ```
    pub async fn run_until_asked<F: Future>(self, work: F) -> Result<Option<F::Output>> {
        let guard = self.await?;
        let work = unless(guard.asked(), work);
        guard.run_and_release(work).await
    }
}

/// Completes when another client asks for this hold, in its present period: see [`Guard::asked`].
pub(crate) fn asked(
    session: Arc<Session>,
    hold: Arc<Hold>,
) -> impl Future<Output = ()> + Send + 'static {
    let asked = hold.asked();
    let period = hold.state().period.id;
    async move {
        tokio::select! {
            biased;
            () = asked => {}
            never = check_until_asked(&session, &hold, period) => match never {},
        }
    }
}

/// Runs `work`, but drops it when `interrupted` completes first.
async fn unless<F: Future>(interrupted: impl Future<Output = ()>, work: F) -> Option<F::Output> {
    tokio::select! {
        biased;
        output = work => Some(output),
        () = interrupted => None,
    }
}

/// Checks a hold in one hold period. The hold records the request.
async fn check_until_asked(session: &Session, hold: &Arc<Hold>, period: PeriodId) -> Infallible {
    while hold.state().held_period() == Some(period) {
        check_while_held(session, hold, period).await;
        // The answer that it is missing may be wrong, in a failover.
        sleep_until(Instant::now() + session.watchdog.lease().renewal_interval()).await;
    }
    std::future::pending().await
}

/// Checks a hold now and whenever a request may have arrived, while the store has it and the hold period lasts.
async fn check_while_held(session: &Session, hold: &Arc<Hold>, period: PeriodId) {
    let limits = RequestLimits::new(WaitLimit::Endless, Some(Expiry::Never));
    let (store, progress) = (&session.store, Progress::default());
    // Each release of another permit is a message, too.
    let pauses = hold.kind.share() != Share::Whole;
    let next_look = Mutex::new(None);
    let look = |channel| -> Boxed<'_, _> {
        let (progress, next_look) = (&progress, &next_look);
        Box::pin(async move {
            let next = next_look.lock().filter(|_| pauses);
            if let Some(next) = next {
                sleep_until(next).await;
            }
            *next_look.lock() = Some(Instant::now() + LOOK_INTERVAL);
            let granted_in = {
                let state = hold.state();
                if state.held_period() != Some(period) {
                    return Ok(Outcome::Done(()));
                }
                state.period.granted_in
            };
            let step = renew_holds(hold.kind.renewal(hold).script, None, &[hold]);
            let delivery = Delivery::QUEUED_INSPECTION;
            let answer = store.run(&step, channel, delivery, progress).await?;
            match answer.reply.first() {
                Some(Renewed::Asked { limit }) => {
                    hold.mark_asked(granted_in, limit.map(|left| answer.sent_at + left));
                    session.watchdog.watch(hold);
                }
                // Another look could find the message that this one published because the lock is free. The watchdog checks the
                // hold in its turn, and reports the loss.
                Some(Renewed::NotHeld) => {
                    session.watchdog.suspect(hold);
                    return Ok(Outcome::Done(()));
                }
                Some(Renewed::Held) | None => {}
            }
            let left = session.watchdog.lease().duration();
            Ok(Outcome::Wait(Expiry::In(left)))
        })
    };
    if session.background.remember_runtime().is_ok() {
        let object = &hold.object;
        let (queues, private) = (&session.waiting, private_object(object.identity()));
        let observed = queues.observe(object.channel(), &private, &limits, &progress, &look);
        if let Err(error) = observed.await {
            let lock = object.full_name();
            tracing::debug!(lock, %error, "requests to release are found by renewals only");
        }
    }
}
