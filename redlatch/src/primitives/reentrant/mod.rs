//! The re-entrant lock (Redisson: `RLock`, `RedissonLock`). The other exclusive locks reuse its steps.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
pub(crate) mod rules;

use std::sync::Arc;

use tokio::time::Instant;

use crate::error::Result;
use crate::hold::{Hold, HoldKind, Renewal};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::name::{KeyLayout, ObjectKeys};
use crate::primitives::lock::{AcquireParams, OwnedKind, Reentrant, Rules};
use crate::step::{BoxedStep, Outcome, Step};

impl OwnedKind for Reentrant {}

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
}

/// A kind whose holds are renewed and released like those of the re-entrant lock.
pub(crate) trait ReentrantHolds: Send + Sync {
    fn object(&self) -> &Arc<ObjectKeys>;

    /// Whether its waiters subscribe to the object's channel.
    const WAKES_WAITERS: bool = true;
}

impl<K: ReentrantHolds> HoldKind for K {
    fn object(&self) -> &Arc<ObjectKeys> {
        ReentrantHolds::object(self)
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        let channel = match K::WAKES_WAITERS {
            true => hold.object.channel(),
            false => "",
        };
        Renewal::of_lock(rules::renew_script(), hold, channel)
    }

    fn renew(
        &self,
        keyspace: &mut Keyspace,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        let held = rules::renew(keyspace, hold, lease, now)?;
        if K::WAKES_WAITERS && rules::was_deleted(keyspace, held, &hold.object, now) {
            keyspace.publish(hold.object.channel(), 0);
        }
        Ok(held)
    }

    fn release<'a>(
        &'a self,
        hold: &'a Hold,
        keep: u32,
        lease: Option<Lease>,
    ) -> BoxedStep<'a, bool> {
        let mut step = rules::Release::new(hold, keep, lease);
        step.wakes_waiter = K::WAKES_WAITERS;
        Box::new(step)
    }

    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<BoxedStep<'a, bool>> {
        let mut step = rules::Release::new(hold, keep, None);
        step.wakes_waiter = false;
        step.restored_lease = Some(Lease::from_remaining(
            hold.end().saturating_duration_since(Instant::now()),
        ));
        Some(Box::new(step))
    }
}

impl Rules for Reentrant {
    type Grant = ();

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> impl Step<Reply = Outcome> + 'a {
        rules::Acquire::new(params)
    }
}
