//! Acquired permits, and their release.
//!
//! Permits pass from one request of the client to the next as holds do (`session/handoff`). Those
//! of an expirable semaphore are a hold. Those of a semaphore have none, so the chain moves
//! with them. Invariant: a permit that the store has granted is in one guard, in one offer,
//! or being released. What must not happen, and what prevents it:
//!
//! - *A waiter with an answer on its way gets an offer, too.* The queue has at most one offer for
//!   each waiter whose request is not in flight. Further permits are released. Requests in flight
//!   and messages are about other permits: they are no reason to ask the store.
//! - *A lost wake-up.* Permits are offered only while all waiters request as many. A waiter for
//!   another number, which joined later, refuses and releases them. A waiter that takes an offer
//!   passes the turn on with the store's latest refusal, if no message has arrived since. It holds
//!   for waiters that request as many; any other sends its request.
//! - *Permits pass on that may not exist.* Those that replicas have not confirmed, and those of a
//!   semaphore whose time to live has ended, are neither offered nor taken. Those of a deleted
//!   semaphore pass on for about 10 ms, or three times the time of an answer. Mutant
//!   `unacknowledged-permit-handed-over`.
//! - *A permit without a lease is never released, or twice.* An offer that is dropped releases it,
//!   a waiter that takes it empties the offer, and `Client::flush` drops all offers. Mutant
//!   `taken-permits-also-released`.
//! - *A new master gets permits back that it has not granted.* Permits that replicas did not
//!   confirm are released only to the server that granted them. Mutant
//!   `unacknowledged-permit-released-to-new-master`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::SemaphorePermits;
use super::rules;
use crate::background::{Tries, WorkRef};
use crate::environment::random_fraction;
use crate::error::{Error, Result};
use crate::hold::{Chain, Share};
use crate::locks::Held;
use crate::metrics::{GuardTimer, Kind};
use crate::name::ObjectKeys;
use crate::session::Session;
use crate::store::{Confirmation, Delivery, KeptNode, Progress, Route, ServerId};
use crate::sync::Mutex;

/// How long a release is retried in the background while the store is unavailable. The permits have
/// no lease, so nothing else releases them.
pub(super) const RELEASE_RETRY_LIMIT: Duration = Duration::from_secs(600);

/// The step of a release, for the error that its outcome is unknown.
const RELEASING: &str = "releasing permits";

/// Acquired permits. When dropped, they pass to another request of this client, or are released in the background.
pub(crate) struct HeldPermits {
    /// `None` if there is nothing left to release.
    pending: Option<PendingRelease>,
    permits: u32,
    object: Arc<ObjectKeys>,
    /// `None` if they must be released to the store.
    chain: Option<PermitChain>,
    /// `None` until a caller has them.
    timer: Option<GuardTimer>,
}

/// The chain of these permits.
type PermitChain = Arc<Mutex<Chain>>;

/// Permits between a released guard and the request that takes them over. Dropping them releases them in the background.
pub(super) struct OfferedPermits {
    /// Without a chain: they are not offered again.
    held: HeldPermits,
    chain: PermitChain,
}

impl OfferedPermits {
    /// Returns the permits, unless their number differs or their semaphore's time to live has ended.
    pub(super) fn take(self, share: Share) -> Option<HeldPermits> {
        let OfferedPermits { mut held, chain } = self;
        let is_usable = held.share() == share && held.exists();
        is_usable.then(|| {
            tracing::debug!(
                semaphore = held.object.full_name(),
                permits = held.permits,
                "handed over"
            );
            held.chain = Some(chain);
            held
        })
    }
}

impl HeldPermits {
    /// Creates the guard of permits of a semaphore whose time to live ends at `ends`, if it does.
    pub(super) fn new(
        session: Arc<Session>,
        object: Arc<ObjectKeys>,
        permits: u32,
        ends: Option<Instant>,
    ) -> HeldPermits {
        let pending = (permits > 0).then(|| PendingRelease {
            session,
            object: object.clone(),
            permits,
            final_error: None,
            ends,
            delivery: Delivery::IMMEDIATE,
            node: None,
            progress: None,
        });
        HeldPermits {
            pending,
            permits,
            object,
            chain: None,
            timer: None,
        }
    }

    /// Starts to measure how long a caller has them.
    pub(super) fn measure(&mut self) {
        let pending = self.pending.as_ref();
        self.timer = pending.map(|pending| {
            let metrics = pending.session.metrics();
            metrics
                .of(Kind::Semaphore, Some(self.object.name()))
                .guard()
        });
    }

    /// Binds the permits to the server that granted them, until replicas have confirmed that: they are released only there, or
    /// where their slot has moved from there. A promoted replica may not know that they were acquired, and would have too many
    /// permits.
    pub(super) fn bind_to(&mut self, server: ServerId, confirmation: &Confirmation) {
        if let Some(pending) = &mut self.pending {
            pending.delivery = Delivery::on(Route::AcquisitionsOf(server));
            pending.node.clone_from(&confirmation.node);
        }
    }

    /// Records that enough replicas have confirmed the acquisition. From now on the permits may pass to another request.
    pub(super) fn confirmed(&mut self) {
        if let Some(pending) = &mut self.pending {
            (pending.delivery, pending.node) = (Delivery::IMMEDIATE, None);
        }
        let hands_off = |pending: &PendingRelease| pending.session.hands_off;
        if self.pending.as_ref().is_some_and(hands_off) {
            let chain = Chain::new(Instant::now());
            self.chain = Some(Arc::new(Mutex::new(chain)));
        }
    }

    fn share(&self) -> Share {
        Share::Permits(self.permits)
    }

    /// Returns whether there are permits to release.
    fn exists(&self) -> bool {
        let pending = self.pending.as_ref();
        pending.is_some_and(|pending| !pending.has_expired())
    }

    /// Hands the permits over to a waiting request of this client, if they may be. Afterwards they are not held any more, or
    /// have to be released.
    fn hand_off(&mut self) -> bool {
        let chain = self.chain.take().filter(|_| self.exists());
        let session = self.pending.as_ref().map(|pending| pending.session.clone());
        let (Some(chain), Some(session)) = (chain, session) else {
            return false;
        };
        let (object, share, now) = (self.object.clone(), self.share(), Instant::now());
        let offered = session.offer(&object, share, &chain, now, |may_check_first| {
            let asks = chain
                .lock()
                .local_handoff(may_check_first, now, random_fraction)?;
            let held = HeldPermits {
                pending: self.pending.take(),
                permits: self.permits,
                object: object.clone(),
                chain: None,
                timer: None,
            };
            let chain = chain.clone();
            Ok((Box::new(OfferedPermits { held, chain }), asks))
        });
        if offered.is_err() {
            let yields = chain.lock().yields(Instant::now());
            session.waiting.yield_to(&object, yields);
        }
        offered.is_ok()
    }
}

impl Held for HeldPermits {
    async fn release(mut self) -> Result<()> {
        let timer = self.timer.take();
        let released = self.release_once().await;
        if let Some(mut timer) = timer {
            timer.released(&released);
        }
        released
    }
}

impl HeldPermits {
    async fn release_once(&mut self) -> Result<()> {
        if self.hand_off() {
            return Ok(());
        }
        let Some(mut pending) = self.pending.take() else {
            return Ok(());
        };
        let background = pending.session.background.clone();
        let work = async move {
            let released = pending.try_release().await;
            if released.is_err() && pending.final_error.is_none() {
                pending.release_in_background();
                return (None, released);
            }
            (Some(pending), released)
        };
        let (pending, released) = background.detach_on_drop(&self.object, work, || true).await;
        if let Some(mut pending) = pending {
            // The caller gets the error, so it is not logged as well.
            pending.permits = 0;
        }
        released
    }
}

impl SemaphorePermits {
    /// Returns the number of permits.
    pub fn permits(&self) -> u32 {
        self.held.permits
    }

    /// Returns the semaphore's name.
    pub fn name(&self) -> &str {
        self.held.object.name()
    }

    /// Releases the permits and waits until the store has confirmed it.
    ///
    /// If another task of the same client waits for as many permits, they pass to it without asking the store, and this
    /// returns `Ok` at once.
    /// [`ClientBuilder::local_hand_over`](crate::ClientBuilder::local_hand_over) says when, and turns it off.
    ///
    /// # Errors
    ///
    /// [`Error::OutcomeUnknown`]: the connection broke, or there was no answer within the response
    /// timeout. The permits may or may not have been released; the release is not repeated.
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`]: the release could not be sent;
    /// [`Error::Refused`]: the store refused it, for example because its memory is full. The
    /// release then continues in the background. [`Error::WrongKind`], [`Error::InvalidCount`]
    /// (there would be more than 2147483647): the permits were not released. It is not an error if
    /// the semaphore no longer exists.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the release continues in the background.
    pub async fn release(self) -> Result<()> {
        self.held.release().await
    }

    /// Keeps the permits: nothing releases them automatically. To return them, call
    /// [`Semaphore::release`](super::Semaphore::release).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let semaphore = redlatch::Client::embedded().semaphore("downloads");
    /// semaphore.try_set_permits(3).await?;
    /// semaphore.acquire().await?.forget();
    /// assert_eq!(semaphore.available().await?, 2);
    /// # Ok(()) }
    /// ```
    pub fn forget(mut self) {
        if let Some(mut pending) = self.held.pending.take() {
            pending.permits = 0;
        }
    }
}

impl Drop for HeldPermits {
    fn drop(&mut self) {
        if self.hand_off() {
            return;
        }
        if let Some(pending) = self.pending.take() {
            pending.release_in_background();
        }
    }
}

impl std::fmt::Debug for HeldPermits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldPermits")
            .field("name", &self.object.name())
            .field("permits", &self.permits)
            .finish_non_exhaustive()
    }
}

/// Permits to release. If a try to release them ends with its runtime before it is sent, it is made in another one. Logs a warning
/// if this is dropped otherwise before they are released.
struct PendingRelease {
    session: Arc<Session>,
    object: Arc<ObjectKeys>,
    /// 0 if there is nothing to release.
    permits: u32,
    /// The error that makes a retry useless.
    final_error: Option<Error>,
    /// When the semaphore's time to live ends, after which there is nothing to release.
    ends: Option<Instant>,
    delivery: Delivery,
    /// The node of an acquisition that is not confirmed.
    node: Option<KeptNode>,
    /// The progress of the latest try. `None`: no try has begun in the runtime that has this.
    progress: Option<Progress>,
}

impl PendingRelease {
    async fn try_release(&mut self) -> Result<()> {
        if self.has_expired() {
            self.permits = 0;
            return Ok(());
        }
        // Not more than could be acquired.
        let permits = i32::try_from(self.permits).unwrap_or(i32::MAX);
        let step = rules::add(&self.object, permits, true);
        let (store, progress) = (
            &self.session.store,
            self.progress.insert(Progress::default()),
        );

        let (waiting, channel) = (&self.session.waiting, self.object.channel());
        waiting.record_release(channel);
        let added =
            store.run_at_most_once(&step, RELEASING, self.delivery, Duration::ZERO, progress);
        match added.await {
            Ok(answer) => {
                let available = answer.reply;
                if available.is_none() {
                    // There is no message.
                    waiting.wake(channel);
                }
                tracing::debug!(
                    semaphore = self.object.full_name(),
                    permits = self.permits,
                    ?available,
                    "released"
                );
                self.permits = 0;
                Ok(())
            }
            Err(error) => {
                let is_final = matches!(
                    error,
                    Error::OutcomeUnknown { .. }
                        | Error::WrongKind { .. }
                        | Error::InvalidCount { .. }
                );
                match is_final {
                    true => self.final_error = Some(error.clone()),
                    // The store has refused it, if it was sent.
                    false => progress.mark_unsent(),
                }
                Err(error)
            }
        }
    }

    /// Returns whether the semaphore's time to live has ended. Its name may belong to a new one by now.
    fn has_expired(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }

    fn release_in_background(self) {
        let background = self.session.background.clone();
        let running = background.begin(&self.object);
        let work = running.to_ref();
        background.spawn_begun(running, self.retry_release(work));
    }

    /// Retries until the release succeeds or is known to be impossible. No flush waits for it after several refusals; as nothing
    /// else releases the permits, it continues.
    async fn retry_release(mut self, work: WorkRef) {
        let mut tries = Tries::new(work, Instant::now() + RELEASE_RETRY_LIMIT);
        let (object, permits) = (self.object.clone(), self.permits);
        while let Err(error) = self.try_release().await {
            if self.final_error.is_some() {
                return;
            }
            let Some((pause, _)) = tries.failed(&error, Instant::now()) else {
                self.final_error = Some(error);
                return;
            };
            tracing::debug!(semaphore = object.full_name(), permits, %error,
                "release failed; retrying");
            tokio::time::sleep(pause).await;
        }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        if self.permits == 0 || self.has_expired() {
            return;
        }
        // The runtime of a try that has begun has ended.
        let begun = self.progress.take();
        match begun.filter(|_| self.final_error.is_none()) {
            Some(progress) if progress.was_sent() => {
                self.final_error = Some(Error::OutcomeUnknown {
                    step: RELEASING,
                    reason: "its runtime ended before the answer".into(),
                    source: None,
                });
            }
            Some(_) => {
                let rest = PendingRelease {
                    session: self.session.clone(),
                    object: self.object.clone(),
                    final_error: None,
                    node: self.node.take(),
                    progress: None,
                    ..*self
                };
                return rest.release_in_background();
            }
            None => {}
        }
        let (semaphore, permits) = (self.object.full_name(), self.permits);
        match &self.final_error {
            Some(error) => tracing::warn!(semaphore, permits, %error,
                "the permits may not have been released; if so, they stay acquired"),
            None => tracing::warn!(
                semaphore,
                permits,
                "no runtime to release the permits in; they stay acquired"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::IntoFuture as _;

    use super::*;
    use crate::store::embedded::failure_injection::Failure::NotSent;
    use crate::test_prelude::run_others;
    use crate::{Client, Embedded};

    /// It is retried there until the end of that runtime, and then in another one, if there is one.
    #[test]
    fn release_that_was_not_sent_continues_in_a_living_runtime() {
        let store = Embedded::new();
        let client = Client::builder().connect_embedded(&store).unwrap();
        let semaphore = client.semaphore("a");
        let background = &semaphore.session.background;
        let living = background.runtime_for_test();
        living.block_on(async { semaphore.try_set_permits(2).await.unwrap() });
        let begin_in_ending_runtime = |is_dropped: bool| {
            let ending = background.runtime_for_test();
            ending.block_on(async {
                let permits = semaphore.acquire().await.unwrap();
                store.fail([NotSent; 100]);
                match is_dropped {
                    true => drop(permits),
                    false => assert!(permits.release().await.is_err()),
                }
                run_others().await;
                assert_eq!(client.status().background, 1);
            });
        };
        for is_dropped in [true, false] {
            begin_in_ending_runtime(is_dropped);
            assert_eq!(client.status().background, 1);
            store.recover();
            let available = living.block_on(async {
                client.flush().await;
                semaphore.available().await.unwrap()
            });
            assert_eq!(available, 2);
        }
        drop(living);
        begin_in_ending_runtime(true);
        assert_eq!(client.status().background, 0);
    }

    /// A promoted replica may not know that they were acquired.
    #[tokio::test(start_paused = true)]
    async fn permits_pass_on_only_after_replicas_confirmed_them() {
        for is_confirmed in [false, true] {
            let client = Client::embedded();
            let semaphore = client.semaphore("a");
            semaphore.try_set_permits(1).await.unwrap();
            semaphore.acquire().await.unwrap().forget();
            let (session, object) = (semaphore.session.clone(), semaphore.object.clone());
            let mut held = HeldPermits::new(session, object, 1, None);
            if is_confirmed {
                held.confirmed();
            }
            let mut waiting = semaphore.acquire().into_future();
            let polled = tokio::time::timeout(Duration::ZERO, &mut waiting).await;
            assert!(polled.is_err());
            held.release().await.unwrap();
            let available = semaphore.available().await.unwrap();
            assert_eq!(available, i64::from(!is_confirmed));
            waiting.await.unwrap().release().await.unwrap();
        }
    }
}
