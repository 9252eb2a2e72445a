//! The guard of acquired permits, and their release.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::rules::Add;
use crate::error::{Error, Result};
use crate::name::Place;
use crate::session::Session;
use crate::store::{Delivery, Route, Sent, ServerId};

/// How long a release is retried in the background while the store is unavailable. The permits have
/// no lease, so nothing else releases them.
pub(super) const GIVING_BACK: Duration = Duration::from_secs(600);

/// The pause between two background attempts. Each attempt lasts up to the response timeout.
const PAUSE: Duration = Duration::from_millis(500);

/// Acquired permits of a [`Semaphore`](super::Semaphore) (Redisson has no such type: there, callers
/// count permits themselves). [`SemaphorePermits::release`] releases them; dropping releases them
/// in the background.
///
/// Dropping never blocks and never panics. While the store cannot be reached, the release is
/// retried for ten minutes; if it fails, the log reports it (`tracing`, level WARN). A process that
/// ends without releasing its permits keeps them forever.
///
/// Permits are released only to a semaphore that still exists. A semaphore that was deleted, or
/// whose time to live has ended, is not created again with a wrong number of permits. One that was
/// set again after its time to live had ended does not get permits of the previous one either. But
/// a semaphore that was deleted and set again, or set again after the store lost its data, does get
/// them, because the store cannot tell it from the previous one. It then has more permits than were set.
#[must_use = "the permits are released as soon as this is dropped"]
pub struct SemaphorePermits {
    /// `None` if there is nothing left to release.
    owed: Option<Owed>,
    permits: u32,
    place: Arc<Place>,
}

impl SemaphorePermits {
    /// Creates the guard of permits of a semaphore whose time to live ends at `ends`, if it does.
    pub(super) fn new(
        session: Arc<Session>,
        place: Arc<Place>,
        permits: u32,
        ends: Option<Instant>,
    ) -> SemaphorePermits {
        let owed = (permits > 0).then(|| Owed {
            session,
            place: place.clone(),
            permits,
            hopeless: None,
            ends,
            delivery: Delivery::IMMEDIATE,
        });
        SemaphorePermits {
            owed,
            permits,
            place,
        }
    }

    /// Releases permits that too few replicas have acknowledged, to the server that granted
    /// them. A promoted replica may not know that they were acquired, and would have too many permits.
    pub(super) async fn release_unconfirmed(mut self, server: ServerId) -> Result<()> {
        if let Some(owed) = &mut self.owed {
            owed.delivery = Delivery::on(Route::AcquisitionsOf(server));
        }
        self.release().await
    }

    /// Returns the number of permits.
    pub fn permits(&self) -> u32 {
        self.permits
    }

    /// Returns the semaphore's name.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// Releases the permits and waits until the store has confirmed it.
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
    pub async fn release(mut self) -> Result<()> {
        let Some(mut owed) = self.owed.take() else {
            return Ok(());
        };
        let background = owed.session.background.clone();
        let rest = background.clone();
        let work = async move {
            let given_back = owed.give_back().await;
            if given_back.is_err() && owed.hopeless.is_none() {
                rest.spawn(owed.persist());
                return (None, given_back);
            }
            (Some(owed), given_back)
        };
        let (owed, given_back) = background.finish(work, || true).await;
        if let Some(mut owed) = owed {
            // The caller gets the error, so it is not logged as well.
            owed.permits = 0;
        }
        given_back
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
        if let Some(mut owed) = self.owed.take() {
            owed.permits = 0;
        }
    }
}

impl Drop for SemaphorePermits {
    fn drop(&mut self) {
        if let Some(owed) = self.owed.take() {
            let background = owed.session.background.clone();
            background.spawn(owed.persist());
        }
    }
}

impl std::fmt::Debug for SemaphorePermits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SemaphorePermits")
            .field("name", &self.name())
            .field("permits", &self.permits)
            .finish_non_exhaustive()
    }
}

/// Permits to release. Logs a warning if it is dropped before they are released.
struct Owed {
    session: Arc<Session>,
    place: Arc<Place>,
    /// 0 if nothing is owed.
    permits: u32,
    /// The error that makes a retry useless.
    hopeless: Option<Error>,
    /// When the semaphore's time to live ends, after which nothing is owed.
    ends: Option<Instant>,
    delivery: Delivery,
}

impl Owed {
    async fn give_back(&mut self) -> Result<()> {
        if self.is_void() {
            self.permits = 0;
            return Ok(());
        }
        let step = Add {
            place: self.place.clone(),
            // Not more than could be acquired.
            permits: i32::try_from(self.permits).unwrap_or(i32::MAX),
            if_exists: true,
        };
        let (store, sent) = (&self.session.store, Sent::default());
        let what = "releasing permits";
        let added = store.run_unrepeated(&step, what, self.delivery, Duration::ZERO, &sent);
        match added.await {
            Ok(answer) => {
                let available = answer.reply;
                tracing::debug!(
                    semaphore = self.place.name(),
                    permits = self.permits,
                    ?available,
                    "released"
                );
                self.permits = 0;
                Ok(())
            }
            Err(error) => {
                let hopeless = matches!(
                    error,
                    Error::OutcomeUnknown { .. }
                        | Error::WrongKind { .. }
                        | Error::InvalidCount { .. }
                );
                if hopeless {
                    self.hopeless = Some(error.clone());
                }
                Err(error)
            }
        }
    }

    /// Returns whether the semaphore's time to live has ended. Its name may belong to a new one by now.
    fn is_void(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }

    /// Retries until the release succeeds or is known to be impossible.
    async fn persist(mut self) {
        let give_up = Instant::now() + GIVING_BACK;
        let (place, permits) = (self.place.clone(), self.permits);
        while let Err(error) = self.give_back().await {
            if self.hopeless.is_some() {
                return;
            }
            if Instant::now() >= give_up {
                self.hopeless = Some(error);
                return;
            }
            tracing::debug!(semaphore = place.name(), permits, %error,
                "release failed; retrying");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if self.permits == 0 || self.is_void() {
            return;
        }
        let (semaphore, permits) = (self.place.name(), self.permits);
        match &self.hopeless {
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
