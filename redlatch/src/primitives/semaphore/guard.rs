//! Permits that somebody has, and giving them back.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::rules::Add;
use crate::error::{Error, Result};
use crate::name::Place;
use crate::session::Session;
use crate::store::{ConnectionId, Lane, Sent};

/// For how long it is tried in the background to give permits back to a store that is away. They
/// have no lease, so nobody else ever does it.
pub(super) const GIVING_BACK: Duration = Duration::from_secs(600);

/// The pause between two tries of that; each of them goes on for the response timeout.
const PAUSE: Duration = Duration::from_millis(500);

/// Permits of a [`Semaphore`](super::Semaphore) (Redisson has none: there one counts by oneself).
/// Given back by [`SemaphorePermits::release`], or in the background when dropped.
///
/// Dropping never blocks and never panics. While the store cannot be reached, giving back is tried
/// again for ten minutes; the log says if it came to nothing (`tracing`, level WARN). A process
/// that ends without having given its permits back keeps them for good.
///
/// Permits go back only to a semaphore that is still there: one that has been deleted, or whose time
/// to live has ended, is not made anew with a wrong number of permits. Nor does one that was set anew
/// after its time to live had ended get permits of the one before. But one that was deleted and set
/// anew, or set anew after the store had lost its data, does: the store does not tell it from the
/// one before, and it has more permits then than were set.
#[must_use = "the permits are given back as soon as this is dropped"]
pub struct SemaphorePermits {
    /// `None` when there is nothing to give back any more.
    owed: Option<Owed>,
    permits: u32,
    place: Arc<Place>,
}

impl SemaphorePermits {
    /// Permits of a semaphore that ceases to be at `ends`, if it does.
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
            lane: Lane::First,
        });
        SemaphorePermits {
            owed,
            permits,
            place,
        }
    }

    /// Releases permits that too few replicas have confirmed, to the server process that granted them. A replica that
    /// has taken its place may not know that they were acquired, and would have too many permits.
    pub(super) async fn release_unconfirmed(mut self, connection: ConnectionId) -> Result<()> {
        if let Some(owed) = &mut self.owed {
            owed.lane = Lane::Only(connection);
        }
        self.release().await
    }

    /// How many permits these are.
    pub fn permits(&self) -> u32 {
        self.permits
    }

    /// The semaphore's name.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// Gives the permits back and returns when the store has them.
    ///
    /// # Errors
    ///
    /// [`Error::OutcomeUnknown`]: the connection broke, or there was no answer within the response
    /// timeout; they may have been given back or not, and are not given back again.
    /// [`Error::Unavailable`], [`Error::ResponseTimeout`]: they could not be sent;
    /// [`Error::Refused`]: the store did not want them, as when its memory is full. Giving back goes
    /// on in the background then. [`Error::WrongKind`], [`Error::InvalidCount`] (more than 2147483647
    /// would be there): they were not given back. It is no error that the semaphore is gone.
    ///
    /// # Cancel safety
    ///
    /// When dropped, giving back goes on in the background.
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
            // Whoever asked hears what became of them; the log need not say so too.
            owed.permits = 0;
        }
        given_back
    }

    /// Keeps the permits for good: nothing gives them back by itself. To be given back by
    /// [`Semaphore::release`](super::Semaphore::release), or never.
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

/// Permits to give back. Says so in the log when it is dropped before that is done.
struct Owed {
    session: Arc<Session>,
    place: Arc<Place>,
    /// 0 when nothing is owed any more.
    permits: u32,
    /// Why nothing can be done about it.
    hopeless: Option<Error>,
    /// When nothing is owed any more, because the semaphore is no more.
    ends: Option<Instant>,
    lane: Lane,
}

impl Owed {
    async fn give_back(&mut self) -> Result<()> {
        if self.is_void() {
            self.permits = 0;
            return Ok(());
        }
        let step = Add {
            place: self.place.clone(),
            // As many as could be taken.
            permits: i32::try_from(self.permits).unwrap_or(i32::MAX),
            if_exists: true,
        };
        let (store, sent) = (&self.session.store, Sent::default());
        let what = "giving permits back";
        let added = store.run_unrepeated(&step, what, self.lane, Duration::ZERO, &sent);
        match added.await {
            Ok(answer) => {
                let available = answer.reply;
                tracing::debug!(
                    semaphore = self.place.name(),
                    permits = self.permits,
                    ?available,
                    "given back"
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

    /// Whether the semaphore has ceased to be. Under its name may be another one by now.
    fn is_void(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }

    /// Tries until it is done, or known that it cannot be.
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
                "not given back yet; trying again");
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
                "may not have been given back; then they stay taken"),
            None => tracing::warn!(
                semaphore,
                permits,
                "no runtime to give them back in; they stay taken"
            ),
        }
    }
}
