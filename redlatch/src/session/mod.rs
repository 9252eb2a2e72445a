//! The session of one client: its store, wait queues, watchdog and identity. All primitives acquire and
//! release holds through it.
//!
//! 1. [`Session::hold_ref`] returns a counted reference to the owner's hold on an object. A lost hold is
//!    replaced by a new one.
//! 2. [`Session::try_acquire`] makes one attempt to acquire. The steps of one hold take turns
//!    ([`Hold::turn`]). If the store may still keep something that the owner released, a release is sent
//!    first and must be answered. The attempt carries the wanted hold count.
//! 3. If the store grants the attempt and the replicas confirm it, a guard is added and the watchdog watches
//!    the hold.
//! 4. If an attempt fails or is dropped without an answer, its outcome is unknown ([`SettleOnDrop`]). It is
//!    settled in the background.
//! 5. [`HoldRef::settle`] sends the hold count of this client to the store; 0 releases the hold. Unlocking,
//!    dropping a guard, dropping an attempt and failing all settle in this way.
//! 6. Settling in the background retries until the lease must have ended ([`SETTLE_GRACE`]). A flush waits no longer than the
//!    lease, and not for what the store has refused several times.
//! 7. A hold that is lost at a limit is settled in the background, too, while its guards still exist.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::background::Background;
use crate::client_registry::Registration;
use crate::error::Result;
use crate::hold::{Hold, HoldKind, HoldLimits};
use crate::lease::{Expiry, Lease};
use crate::metrics::Metrics;
use crate::name::ObjectKeys;
use crate::owner::ClientId;
use crate::step::Step;
use crate::store::{Delivery, Progress, Store};
use crate::sync::Mutex;
use crate::wait::WaitQueues;
use crate::watchdog::Watchdog;

mod acquire;
mod handoff;
mod hold_ref;
mod registry;
mod settle;

pub(crate) use acquire::AllOrNone;
pub(crate) use handoff::{LocalHandoff, StoreHandoff};
#[cfg(test)]
pub(crate) use handoff::{WaiterCounts, check_handoff};
pub(crate) use hold_ref::HoldRef;
use registry::HoldRegistry;

/// The state of one client that all its primitives share.
pub(crate) struct Session {
    pub(crate) id: ClientId,
    pub(crate) prefix: String,
    pub(crate) store: Arc<Store>,
    pub(crate) waiting: WaitQueues,
    pub(crate) watchdog: Watchdog,
    pub(crate) background: Background,
    pub(crate) registration: Registration,
    /// How long an outage may last before waiting fails, if it is set.
    pub(crate) outage_limit: Option<Expiry>,
    /// Whether holds and permits pass from one request of this client to the next.
    pub(crate) hands_off: bool,
    /// Whether waiters for a fair lock accept grants.
    pub(crate) accepts_grants: bool,
    holds: Mutex<HoldRegistry>,
    /// Notified when a hold was acquired whose kind has a [sibling](crate::hold::HoldKind::sibling).
    sibling_acquired: Notify,
}

/// How a hold is acquired.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// How long the store keeps the hold without a renewal.
    pub(crate) lease: Lease,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// Whether the owner may already hold it.
    pub(crate) reentrant: bool,
    /// Whether the hold may pass to another request of this client: see [`LocalHandoff`].
    pub(crate) local_handoff: bool,
}

/// A hold that a request acquires, and how.
#[derive(Clone, Copy)]
pub(crate) struct RequestedHold<'a> {
    /// The kind with the settings of the request.
    pub(crate) kind: &'a dyn HoldKind,
    pub(crate) hold_ref: &'a HoldRef,
    pub(crate) terms: Terms,
    /// The limits of the request, if it has any.
    pub(crate) hold_limits: Option<&'a HoldLimits>,
    /// Whether the request is repeated if the object is not available now.
    pub(crate) waits: bool,
    /// Number of the attempt, if a step of another owner may grant it the object; else 0.
    pub(crate) request_number: i64,
}

impl Session {
    pub(crate) fn new(
        id: ClientId,
        prefix: String,
        store: Arc<Store>,
        waiting: WaitQueues,
        lease: Lease,
        background: Background,
        registration: Registration,
    ) -> Session {
        Session {
            outage_limit: None,
            hands_off: true,
            accepts_grants: true,
            id,
            prefix,
            watchdog: Watchdog::new(
                lease,
                store.clone(),
                background.clone(),
                waiting.channels.metrics.clone(),
                registration.clone(),
            ),
            registration,
            store,
            waiting,
            background,
            holds: Mutex::default(),
            sibling_acquired: Notify::new(),
        }
    }

    /// Shares the session, through which the watchdog releases holds that were lost at a limit.
    pub(crate) fn share(self) -> Arc<Session> {
        let session = Arc::new(self);
        let weak = Arc::downgrade(&session);
        session.watchdog.release_overdue_with(move |hold| {
            if let Some(hold_ref) = weak.upgrade().and_then(|session| session.any_ref(hold)) {
                let longest = hold.state().period.longest;
                hold_ref.settle_detached(longest, None);
            }
        });
        session
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.waiting.channels.metrics
    }

    /// Watches a hold that has a new guard, and notifies requests that may rely on it. `granted_at`: when it was granted, or earlier.
    fn guard_added(&self, hold: &Arc<Hold>, granted_at: Instant) {
        self.watchdog
            .watch_granted(hold, granted_at, Instant::now());
        if hold.kind.sibling().is_some() {
            self.sibling_acquired.notify_waiters();
        }
    }

    /// Returns the terms of an acquisition: with this lease, or renewed with the watchdog's.
    pub(crate) fn terms(&self, lease: Option<Lease>, reentrant: bool) -> Terms {
        let renewed = lease.is_none();
        let lease = lease.unwrap_or(self.watchdog.lease());
        Terms {
            lease,
            renewed,
            reentrant,
            local_handoff: false,
        }
    }

    /// Runs a step that must not be applied twice: [`Store::run_at_most_once`]. Once started it is completed:
    /// if this is dropped, it continues in the background. `step` creates the step.
    pub(crate) async fn run_at_most_once<K: Send + Sync + 'static, R: Send + 'static>(
        &self,
        object: &Arc<ObjectKeys>,
        keys: &Arc<K>,
        step: impl FnOnce(&K) -> Step<'_, R> + Send + 'static,
        what: &'static str,
    ) -> Result<R> {
        let (store, keys) = (self.store.clone(), keys.clone());
        let progress = Progress::default();
        let work = async move {
            let step = step(&keys);
            let run =
                store.run_at_most_once(&step, what, Delivery::REQUEST, Duration::ZERO, &progress);
            Ok(run.await?.reply)
        };
        self.run_to_completion(object, work).await
    }

    /// Completes `work` once it is started: if this is dropped, it continues in the background.
    pub(crate) async fn run_to_completion<T: Send + 'static>(
        &self,
        object: &Arc<ObjectKeys>,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.background.remember_runtime()?;
        let work = self.background.detach_on_drop(object, work, || true);
        work.await
    }
}

#[cfg(test)]
mod growth_tests;
#[cfg(test)]
mod permit_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod turn_tests;
