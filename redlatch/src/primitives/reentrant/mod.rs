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

use self::reassign::Reassign;
use self::transfer::Transfer;
use crate::error::Result;
use crate::hold::{
    Hold, HoldKind, ReassignParams, ReleaseParams, Renewal, Renewed, TransferParams, Transferred,
};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::metrics::Kind;
use crate::name::{KeyLayout, ObjectKeys};
use crate::primitives::fair_lock::ServeQueue;
use crate::primitives::lock::{
    AcquireParams, HasMinimum, Holder, Lock, OwnedKind, Reentrant, Rules,
};
use crate::step::{BoxedStep, Outcome, Step};

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

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> BoxedStep<'a, bool> {
        Box::new(rules::Release {
            params,
            wakes_waiter: K::WAKES_WAITERS,
            requests: params.requests_key(),
            restored_lease: None,
        })
    }

    fn can_transfer(&self) -> bool {
        K::TRANSFERS
    }

    fn transfer<'a>(&'a self, params: TransferParams<'a>) -> Option<BoxedStep<'a, Transferred>> {
        let token_key = self.token_key();
        let of_writer = false;
        let step = Transfer {
            requests: params.from.object.requests_key(),
            params,
            token_key,
            of_writer,
        };
        K::TRANSFERS.then(|| Box::new(step) as BoxedStep<'a, _>)
    }

    fn serve_queue<'a>(&'a self, object: &Arc<ObjectKeys>) -> Option<BoxedStep<'a, ()>> {
        K::TRANSFERS.then(|| Box::new(ServeQueue::new(object.clone())) as BoxedStep<'a, _>)
    }

    fn reassign<'a>(&'a self, params: ReassignParams<'a>) -> Option<BoxedStep<'a, bool>> {
        let object = &params.hold.object;
        Some(Box::new(Reassign {
            params,
            script: reassign::script(),
            channel: if K::WAKES_WAITERS {
                object.channel()
            } else {
                ""
            },
            wake: |keyspace: &mut Keyspace| {
                keyspace.publish(object.channel(), 0);
                Ok(())
            },
            of_writer: false,
        }))
    }

    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<BoxedStep<'a, bool>> {
        let lease = None;
        let left = hold
            .state()
            .period
            .end
            .saturating_duration_since(Instant::now());
        Some(Box::new(rules::Release {
            params: ReleaseParams { hold, keep, lease },
            wakes_waiter: false,
            requests: None,
            restored_lease: Some(Lease::from_remaining(left)),
        }))
    }
}

impl Rules for Reentrant {
    fn hands_over(&self) -> bool {
        true
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> impl Step<Reply = Outcome> + 'a {
        rules::Acquire(params)
    }

    fn inspect(&self) -> impl Step<Reply = Vec<Holder>> {
        let object = &self.object;
        rules::Inspect { object }
    }

    fn force(&self) -> impl Step<Reply = bool> {
        let object = &self.object;
        rules::Force { object }
    }
}
