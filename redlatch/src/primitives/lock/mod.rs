//! The re-entrant lock (Redisson: `RLock`, `RedissonLock`). The other exclusive locks reuse its steps.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
pub(crate) mod rules;

use crate::error::Result;
use crate::hold::{Hold, Kind};
use crate::lease::Lease;
use crate::name::{Family, Place};
use crate::primitives::handle::{Ask, Holder, OwnedKind, Reentrant, Rules};
use crate::space::Space;
use crate::step::{BoxedStep, Outcome, Script, Step};

use tokio::time::Instant;

impl OwnedKind for Reentrant {}

impl Kind for Reentrant {
    fn renew_script(&self) -> &'static Script {
        rules::renew_script()
    }

    fn renew(
        &self,
        space: &mut Space,
        hold: &Hold,
        lease: Option<Lease>,
        now: Instant,
    ) -> Result<bool> {
        let held = rules::renew(space, hold, lease, now)?;
        if rules::is_gone(space, held, &hold.place, now) {
            space.publish(hold.place.channel(), 0);
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
        step.tell = false;
        step.back = Some(Lease::left(
            hold.end().saturating_duration_since(Instant::now()),
        ));
        Some(Box::new(step))
    }
}

impl Rules for Reentrant {
    type Won = ();
    const FAMILY: Family = Family::Lock;

    fn acquire<'a>(&'a self, ask: Ask<'a>) -> impl Step<Reply = Outcome> + 'a {
        rules::Acquire::new(ask)
    }

    fn inspect<'a>(&'a self, place: &'a Place) -> impl Step<Reply = Vec<Holder>> + 'a {
        rules::Inspect { place }
    }

    fn force<'a>(&'a self, place: &'a Place) -> impl Step<Reply = bool> + 'a {
        rules::Force { place }
    }
}
