//! The re-entrant lock (Redisson: `RLock`, `RedissonLock`). The other exclusive locks reuse its steps.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
pub(crate) mod handoff;
pub(crate) mod rules;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::handoff::handoff;
use crate::backoff::Backoff;
use crate::error::Result;
use crate::hold::{
    AcquireParams, Handoff, HandoffParams, Hold, HoldKind, ReleaseParams, Renewal, Renewed, Spec,
};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::locks::fair::serve_queue;
use crate::locks::fenced::token::Tokens;
use crate::locks::{HasMinimum, Holder, Lock, OwnedKind, Reentrant};
use crate::metrics::Kind;
use crate::name::{KeyLayout, ObjectKeys};
use crate::step::{Outcome, Step};

impl OwnedKind for Reentrant {}
impl HasMinimum for Lock<Reentrant> {}

impl Reentrant {
    pub(crate) fn new(prefix: &str, name: &str) -> Reentrant {
        let object = ObjectKeys::new(KeyLayout::Lock, prefix, name).into();
        Reentrant { object }
    }
}

impl ReentrantKind for Reentrant {
    fn keys(&self) -> &Arc<ObjectKeys> {
        &self.object
    }

    fn spec(&self) -> Spec {
        Spec {
            local_handoff: true,
            store_handoff: true,
            ..Spec::of(Kind::Lock)
        }
    }
}

/// A kind with the steps of the re-entrant lock.
pub(crate) trait ReentrantKind: Send + Sync + 'static {
    fn keys(&self) -> &Arc<ObjectKeys>;

    fn spec(&self) -> Spec;

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        rules::acquire(params)
    }

    /// Returns the fencing tokens, of which each acquisition gets the next one.
    fn tokens(&self) -> Option<Tokens<'_>> {
        None
    }

    /// Returns how waiters poll: the name of their queue, and the pauses. See [`HoldKind::pause`].
    fn polling(&self) -> Option<(&str, &Backoff)> {
        None
    }
}

/// Returns the channel on which a step wakes a waiter; empty if waiters poll.
fn waiters_channel(kind: &impl ReentrantKind) -> &str {
    match kind.polling() {
        Some(_) => "",
        None => kind.keys().channel(),
    }
}

impl<K: ReentrantKind> HoldKind for K {
    fn object(&self) -> &Arc<ObjectKeys> {
        self.keys()
    }

    fn spec(&self) -> Spec {
        Spec {
            polls: self.polling().is_some(),
            ..ReentrantKind::spec(self)
        }
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        ReentrantKind::acquire(self, params)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        rules::release(params, waiters_channel(self))
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        Renewal::of_lock(rules::renew_script(), hold, waiters_channel(self))
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        let (renewed, channel) = (rules::renew(keyspace, hold, lease)?, waiters_channel(self));
        if !channel.is_empty() && rules::was_deleted(keyspace, renewed.is_held(), &hold.object) {
            keyspace.publish(channel, 0);
        }
        Ok(renewed)
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        rules::inspect(self.keys())
    }

    fn force(&self) -> Step<'_, bool> {
        rules::force(self.keys())
    }

    fn serve_queue<'a>(&'a self, object: &Arc<ObjectKeys>) -> Option<Step<'a, ()>> {
        let hands_off = ReentrantKind::spec(self).store_handoff;
        hands_off.then(|| serve_queue(object.clone()))
    }

    fn handoff<'a>(&'a self, params: HandoffParams<'a>) -> Option<Step<'a, Handoff>> {
        let variant = handoff::Variant {
            script: handoff::script(self.tokens()),
            wakes: self.polling().is_none(),
            writer: false,
            tokens: self.tokens(),
        };
        Some(handoff(params, variant, |keyspace, object| {
            keyspace.publish(object.channel(), 0);
            Ok(())
        }))
    }

    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<Step<'a, bool>> {
        let left = hold.state().period.left(Instant::now());
        Some(rules::undo(hold, keep, Lease::from_remaining(left)))
    }

    fn channel<'a>(&'a self, hold: &'a Hold) -> &'a str {
        let polling = self.polling();
        polling.map_or(hold.object.channel(), |(queue, _)| queue)
    }

    fn pause(&self, tries: u32) -> Option<Duration> {
        let polling = self.polling();
        polling.map(|(_, backoff)| backoff.pause(tries))
    }
}
