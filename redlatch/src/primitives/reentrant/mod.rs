//! The re-entrant lock (Redisson: `RLock`, `RedissonLock`). The other exclusive locks reuse its steps.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
pub(crate) mod rules;

use crate::error::Result;
use crate::hold::{Hold, HoldKind};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::name::{KeyLayout, ObjectKeys};
use crate::primitives::lock::{AcquireParams, Holder, OwnedKind, Reentrant, Rules};
use crate::step::{BoxedStep, Outcome, Script, Step};

use tokio::time::Instant;

impl OwnedKind for Reentrant {}

impl HoldKind for Reentrant {
    fn renew_script(&self) -> &'static Script {
        rules::renew_script()
    }

    fn renew(
        &self,
        keyspace: &mut Keyspace,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        let held = rules::renew(keyspace, hold, lease, now)?;
        if rules::was_deleted(keyspace, held, &hold.object, now) {
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
        let step = rules::Release::new(hold, keep, lease);
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
    const LAYOUT: KeyLayout = KeyLayout::Lock;

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> impl Step<Reply = Outcome> + 'a {
        rules::Acquire::new(params)
    }

    fn inspect<'a>(&'a self, object: &'a ObjectKeys) -> impl Step<Reply = Vec<Holder>> + 'a {
        rules::Inspect { object }
    }

    fn force<'a>(&'a self, object: &'a ObjectKeys) -> impl Step<Reply = bool> + 'a {
        rules::Force { object }
    }
}
