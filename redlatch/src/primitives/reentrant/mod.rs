//! The re-entrant lock (Redisson: `RLock`, `RedissonLock`). The other exclusive locks reuse its steps.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
pub(crate) mod reassign;
pub(crate) mod rules;
pub(crate) mod transfer;

use std::sync::Arc;

use tokio::time::Instant;

use self::reassign::reassign;
use self::transfer::transfer;
use crate::error::Result;
use crate::hold::{
    Hold, HoldKind, ReassignParams, ReleaseParams, Renewal, Renewed, TransferParams, Transferred,
};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::metrics::Kind;
use crate::name::{KeyLayout, ObjectKeys};
use crate::primitives::fair_lock::serve_queue;
use crate::primitives::lock::{
    AcquireParams, HasMinimum, Holder, Lock, OwnedKind, Reentrant, Rules,
};
use crate::step::{Outcome, Step};

impl OwnedKind for Reentrant {}
impl HasMinimum for Lock<Reentrant> {}

impl Reentrant {
    pub(crate) fn new(prefix: &str, name: &str) -> Reentrant {
        let object = ObjectKeys::new(KeyLayout::Lock, prefix, name).into();
        Reentrant { object }
    }
}

impl ReentrantHolds for Reentrant {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.object
    }

    const METRIC_KIND: Kind = Kind::Lock;
    const TRANSFERS: bool = true;
}

/// A kind whose holds are renewed and released like those of the re-entrant lock.
pub(crate) trait ReentrantHolds: Send + Sync {
    fn object(&self) -> &Arc<ObjectKeys>;

    /// See [`HoldKind::metric_kind`].
    const METRIC_KIND: Kind;

    /// Whether its waiters subscribe to the object's channel.
    const WAKES_WAITERS: bool = true;

    /// Whether a release may pass the lock to a waiter of the same client.
    const TRANSFERS: bool = false;

    /// Returns the key of the fencing token, which each acquisition increments.
    fn token_key(&self) -> Option<&str> {
        None
    }
}

impl<K: ReentrantHolds> HoldKind for K {
    fn object(&self) -> &Arc<ObjectKeys> {
        ReentrantHolds::object(self)
    }

    fn metric_kind(&self) -> Kind {
        K::METRIC_KIND
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        let channel = match K::WAKES_WAITERS {
            true => hold.object.channel(),
            false => "",
        };
        Renewal::of_lock(rules::renew_script(), hold, channel)
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        let renewed = rules::renew(keyspace, hold, lease)?;
        if K::WAKES_WAITERS && rules::was_deleted(keyspace, renewed.is_held(), &hold.object) {
            keyspace.publish(hold.object.channel(), 0);
        }
        Ok(renewed)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        rules::release(params, K::WAKES_WAITERS)
    }

    fn can_transfer(&self) -> bool {
        K::TRANSFERS
    }

    fn transfer<'a>(&'a self, params: TransferParams<'a>) -> Option<Step<'a, Transferred>> {
        K::TRANSFERS.then(|| transfer(params, self.token_key(), false))
    }

    fn serve_queue<'a>(&'a self, object: &Arc<ObjectKeys>) -> Option<Step<'a, ()>> {
        K::TRANSFERS.then(|| serve_queue(object.clone()))
    }

    fn reassign<'a>(&'a self, params: ReassignParams<'a>) -> Option<Step<'a, bool>> {
        let object = &params.hold.object;
        let channel = match K::WAKES_WAITERS {
            true => object.channel(),
            false => "",
        };
        let wake = |keyspace: &mut Keyspace| {
            keyspace.publish(object.channel(), 0);
            Ok(())
        };
        Some(reassign(params, reassign::script(), channel, wake, false))
    }

    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<Step<'a, bool>> {
        let end = hold.state().period.end;
        let left = end.saturating_duration_since(Instant::now());
        Some(rules::undo(hold, keep, Lease::from_remaining(left)))
    }
}

impl Rules for Reentrant {
    fn hands_over(&self) -> bool {
        true
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        rules::acquire(params)
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        rules::inspect(&self.object)
    }

    fn force(&self) -> Step<'_, bool> {
        rules::force(&self.object)
    }
}
