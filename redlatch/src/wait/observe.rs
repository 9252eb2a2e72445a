//! Observes an object: looks at it until it is in a certain state. For calls that acquire nothing.

use super::{Place, Request, RequestLimits, WaitQueues};
use crate::error::Result;
use crate::hold::QueueKind;
use crate::join::Boxed;
use crate::step::Outcome;
use crate::store::Progress;

/// A look at an object, behind a subscription to this channel, if there is one. Returns the result,
/// or when to look again unless a message arrives.
pub(crate) type Look<'a, T> =
    dyn Fn(Option<&'a str>) -> Boxed<'a, Result<Outcome<T>>> + Send + Sync + 'a;

impl WaitQueues {
    /// Looks until `look` returns a result: at once, behind a subscription to `channel`, after each
    /// message and each broken connection, and when the time has passed that it has returned. Of
    /// the observers with the same `object`, one looks for all. `None`: not within the limits.
    pub(crate) async fn observe<'a, T: Send>(
        &'a self,
        channel: &'a str,
        object: &'a str,
        limits: &RequestLimits,
        progress: &'a Progress,
        look: &'a Look<'a, T>,
    ) -> Result<Option<T>> {
        let mut observation = Observation {
            channel,
            object,
            progress,
            look,
        };
        self.within(limits, progress, &mut observation).await
    }
}

/// A caller that looks at an object, as the wait queues see it.
struct Observation<'a, T> {
    channel: &'a str,
    object: &'a str,
    progress: &'a Progress,
    look: &'a Look<'a, T>,
}

impl<T: Send> Request for Observation<'_, T> {
    type Acquired = T;

    fn place(&self) -> Place<'_> {
        Place {
            queue: QueueKind::Shared,
            ..Place::new(self.channel, self.object)
        }
    }

    async fn send(&mut self, subscribe: bool) -> Result<Outcome<T>> {
        (self.look)(subscribe.then_some(self.channel)).await
    }

    fn progress(&self) -> &Progress {
        self.progress
    }
}
