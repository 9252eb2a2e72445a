//! The traits of what requests acquire, and of what guards hold and release.

use std::fmt::Debug;
use std::future::{Future, pending};
use std::time::Duration;

use super::Busy;
use crate::error::{Error, Result};
use crate::hold::{Hold, HoldLimits, Validity};
use crate::lease::{Expiry, Lease, WaitLimit};
use crate::metrics::KindMetrics;
use crate::owner::Owner;
use crate::session::HoldRef;
use crate::wait::RequestLimits;

/// What a request acquires: a [`Lock`](crate::Lock), a [`MultiLock`](crate::MultiLock), a
/// [`RedLock`](crate::RedLock) or permits of a [`Semaphore`](crate::Semaphore).
#[expect(private_bounds, reason = "sealed: only this crate implements it")]
pub trait Acquirable: AcquireOnce {}

impl<R: AcquireOnce> Acquirable for R {}

/// A target that is held for a lease: everything that can be acquired, except for permits of a
/// [`Semaphore`](crate::Semaphore).
#[expect(private_bounds, reason = "sealed by the held type")]
pub trait HasLease: Acquirable + AcquireOnce<Held: HeldForLease> {}

/// A target whose holder is an [`Owner`] and can acquire it again: locks, multi-locks and RedLocks, but no permits.
pub trait HasOwner: HasLease {}

/// A target that can be kept from all owners for a time after its release
/// ([`Acquire::at_least`](super::Acquire::at_least)): plain, fair, fenced and spin locks.
pub trait HasMinimum: HasOwner {}

/// Acquires what a request is for.
pub(crate) trait AcquireOnce: Clone + Send + Sync + 'static {
    /// What a successful request holds.
    type Held: Held;

    /// Returns the metrics of a request for it.
    fn metrics(&self) -> KindMetrics;

    /// Acquires it, waiting up to the limit in `options`. Returns `None` if it was not available before that limit.
    fn acquire_once(
        &self,
        options: &Options,
    ) -> impl Future<Output = Result<Option<Self::Held>>> + Send;

    /// Asks the store who holds it, for a request that was refused.
    fn busy(&self) -> impl Future<Output = Busy> + Send;

    /// Returns this target with the settings for a request that waits at most `wait` (a fair lock shortens its wait
    /// time). Unchanged by default.
    fn waiting_at_most(self, wait: Duration) -> Self {
        let _ = wait;
        self
    }
}

/// The options of a request.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// How long the request waits; `None`: without a limit.
    pub(crate) wait: Option<Duration>,
    pub(super) lease: Option<Duration>,
    /// The limit of this request; `None`: that of the client.
    pub(crate) outage_limit: Option<Expiry>,
    pub(super) owner: Option<Owner>,
    /// Boxed: most requests have none.
    pub(super) rare: Option<Box<RareOptions>>,
}

/// Options that few requests have.
#[derive(Debug, Default)]
pub(crate) struct RareOptions {
    /// See [`Acquire::note`](super::Acquire::note).
    pub(super) note: Option<Box<str>>,
    pub(super) limits: Option<HoldLimits>,
    /// The hold whose owner acquires, if the request comes from a guard: see
    /// [`Acquire::continuing`](super::Acquire::continuing).
    pub(super) continues: Option<HoldRef>,
    /// See [`Acquire::at_least`](super::Acquire::at_least).
    pub(super) at_least: Option<Duration>,
}

impl Options {
    /// Returns the options of a request that waits at most `wait`.
    pub(crate) fn waiting_at_most(wait: Duration) -> Options {
        Options {
            wait: Some(wait),
            ..Options::default()
        }
    }

    pub(crate) fn lease(&self) -> Result<Option<Lease>> {
        self.lease.map(Lease::new).transpose()
    }

    /// Returns for how long a release must not free what this request acquires, if it is limited.
    pub(super) fn at_least(&self) -> Result<Option<Lease>> {
        let at_least = self.rare.as_ref().and_then(|rare| rare.at_least);
        let checked = |time| {
            Lease::new(time).map_err(|_| Error::InvalidSetting {
                setting: "at_least",
                reason: format!("{time:?} is out of range; use 1 ms to ten years"),
            })
        };
        if let Some((time, lease)) = at_least.zip(self.lease)
            && lease < time
        {
            return Err(Error::InvalidSetting {
                setting: "at_least",
                reason: format!(
                    "the lock would be free after its lease of {lease:?}; use a longer lease"
                ),
            });
        }
        at_least.map(checked).transpose()
    }

    pub(super) fn rare_mut(&mut self) -> &mut RareOptions {
        self.rare.get_or_insert_default()
    }

    pub(super) fn hold_limits_mut(&mut self) -> &mut HoldLimits {
        self.rare_mut().limits.get_or_insert_default()
    }

    /// Returns the hold whose owner acquires, if the request comes from a guard.
    pub(super) fn continues(&self) -> Option<&HoldRef> {
        self.rare.as_ref()?.continues.as_ref()
    }

    /// Returns the limits of the hold, if the request sets any.
    pub(crate) fn hold_limits(&self) -> Result<Option<&HoldLimits>> {
        let limits = self.rare.as_ref().and_then(|rare| rare.limits.as_ref());
        limits.map_or(Ok(()), HoldLimits::check)?;
        Ok(limits)
    }

    /// Sets the note of a hold, if the request has one or does not re-enter.
    pub(crate) fn set_note(&self, hold: &Hold) {
        if self.rare.is_none() && hold.owner.is_anonymous() {
            // A new hold, without a note.
            return;
        }
        let note = self.rare.as_ref().and_then(|rare| rare.note.clone());
        hold.state().set_note(note);
    }

    /// Returns the owner that the caller named, or the owner of the scope. An error if it is
    /// anonymous.
    ///
    /// The feared interleaving: a caller reads the owner of a guard and releases it. The hold
    /// passes to another task, under the same owner. A request for this owner would then re-enter
    /// the hold of that task. It is refused also while the guard exists, so that no caller relies
    /// on the order.
    pub(crate) fn owner(&self) -> Result<Option<Owner>> {
        match self.owner.or_else(Owner::current) {
            Some(owner) if owner.is_anonymous() => Err(Error::InvalidSetting {
                setting: "owner",
                reason: "it belongs to an acquisition that named no owner, and no other request \
                         can use it; re-enter with `Guard::reenter`, or name an `Owner::new()` in \
                         each of the requests"
                    .into(),
            }),
            owner => Ok(owner),
        }
    }

    /// Returns the limits, counted from now. `outage_limit` applies unless the request has its own.
    pub(crate) fn request_limits(&self, outage_limit: Option<Expiry>) -> RequestLimits {
        let wait = self.wait.map_or(WaitLimit::Endless, WaitLimit::at_most);
        RequestLimits::new(wait, self.outage_limit.or(outage_limit))
    }
}

/// The part of a guard that depends on what is held. Dropping it releases in the background.
pub(crate) trait Held: Debug + Send + Sync + 'static {
    /// Releases it and waits until the store has confirmed it. If that is dropped, the release
    /// continues in the background.
    fn release(self) -> impl Future<Output = Result<()>> + Send;

    /// Records that its release must not free it for this long. Only locks with [`HasMinimum`] can have such a time.
    fn retain_for(&self, at_least: Lease) {
        let _ = at_least;
    }

    /// Returns the error, if it was lost. By default it has no lease and cannot be lost.
    fn loss(&self) -> Option<Error> {
        None
    }

    /// Completes when it is lost.
    fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<Self> {
        pending()
    }
}

/// The part of a guard that holds something for a lease.
pub(crate) trait HeldForLease: Held {
    /// Returns how long it is certainly held without a renewal. Zero if it was lost.
    fn valid_for(&self) -> Duration;

    /// Returns a function that says whether it is still held, also when this guard is gone.
    fn validity(&self) -> Validity;

    /// Records that the holder still works.
    fn feed(&self);

    /// Returns the owner that holds it.
    fn owner(&self) -> Owner;
}
