//! The spin lock (Redisson: `RSpinLock`, `RedissonSpinLock`): the re-entrant lock without messages.
//! It has no steps of its own; what it adds is when to ask again.

use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::error::Result;
use crate::hold::{Hold, Kind};
use crate::lease::Lease;
use crate::name::{Family, Place};
use crate::primitives::handle::{Ask, Holder, Lock, OwnedKind, Reentrant, Rules};
use crate::primitives::lock::rules;
use crate::space::Space;
use crate::step::{Args, BoxedStep, Outcome, Script, Step};

/// A lock that is waited for by asking again and again, with growing pauses (Redisson: `RSpinLock`).
///
/// It subscribes to nothing, and says nothing when it is released, so thousands of short-lived names cost the store
/// no subscriptions. Of the waiters of one client only the first asks. It is the same lock in the
/// store as [`Client::lock`](crate::Client::lock): both exclude each other, but who waits there for
/// somebody who spins is not called, and looks again when the lease would have ended. One owner that
/// holds it through one of the two is told [`Error::WrongKind`](crate::Error::WrongKind) when it asks
/// through the other: the holds would be one, and only one of them calls who waits.
///
/// When not to use it: where a lock is held for longer than some milliseconds, or waited for by many
/// processes, each of them asks up to 1000 times a second, in the end 8 times a second; the lock
/// that is woken asks once.
///
/// ```
/// use std::time::Duration;
/// use redlatch::Backoff;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let lock = client
///     .spin_lock("counter:7")
///     .backoff(Backoff::constant(Duration::from_millis(2)));
/// let guard = lock.lock().await?;
/// guard.unlock().await
/// # }
/// ```
pub type SpinLock = Lock<Spin>;

/// The kind of [`SpinLock`].
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Spin {
    backoff: Backoff,
}

impl OwnedKind for Spin {}

impl Lock<Spin> {
    /// How long to pause between tries. Default [`Backoff::default`].
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Lock<Spin> {
        self.with_kind(Spin { backoff })
    }
}

impl Kind for Spin {
    fn renew_script(&self) -> &'static Script {
        Reentrant.renew_script()
    }

    /// Without a channel: waiters that spin are not subscribed to one.
    fn renew_args(&self, hold: &Hold, args: &mut Args<'_>) {
        args.text(&hold.field);
        args.text("");
    }

    fn renew(
        &self,
        space: &mut Space,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        rules::renew(space, hold, lease, now)
    }

    fn release<'a>(
        &'a self,
        hold: &'a Hold,
        keep: u32,
        lease: Option<Lease>,
    ) -> BoxedStep<'a, bool> {
        let mut step = rules::Release::new(hold, keep, lease);
        step.tell = false;
        Box::new(step)
    }

    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<BoxedStep<'a, bool>> {
        Reentrant.undo(hold, keep)
    }
}

impl Rules for Spin {
    type Won = ();
    const FAMILY: Family = Family::Spin;

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        Reentrant.acquire(ask)
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        Reentrant.inspect(place)
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        Reentrant.force(place)
    }

    /// Nobody is called: this is but the name of a line, other than that of those who are.
    fn channel<'a>(&self, hold: &'a Hold) -> &'a str {
        hold.place.spinning()
    }

    fn pause(&self, tries: u32) -> Option<Duration> {
        Some(self.backoff.pause(tries))
    }
}
