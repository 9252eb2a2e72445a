//! Where steps run: on a server, or in process.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::Instant;

pub(crate) use self::redis::Confirmation;
pub use self::redis::ReplicaSync;
use crate::error::Result;
use crate::step::Step;

pub(crate) mod embedded;
mod glob;
pub(crate) mod redis;

/// A store, as one client has it. Closed on purpose: what a store must promise (order, atomic
/// steps, pushes) is more than a trait could say.
pub(crate) enum Store {
    Redis(redis::Redis),
    Embedded(embedded::Attached),
}

/// Who hears what the store has to say unasked. Called from the connection's own task: must not
/// block.
pub(crate) trait Ear: Send + Sync {
    /// Something was published to `channel`.
    fn heard(&self, channel: &str);
    /// The connection broke: what was published since then may have been missed.
    fn interrupted(&self);
    /// What is published to `channel` is not heard any more, until it is subscribed to again.
    fn ended(&self, channel: &str);
}

/// How a step is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// An acquisition. Waits its turn behind others, and for the replicas to have it.
    Attempt,
    /// An acquisition that has had its turn, or needs none.
    Taking,
    /// A look by somebody who waits. Has its turn as attempts do.
    Look,
    /// Follows on attempts that may still be on their way.
    Behind,
    /// Has right of way: renewals, releases, inspections.
    First,
}

impl Lane {
    /// Whether it waits its turn.
    pub(crate) fn queues(self) -> bool {
        matches!(self, Lane::Attempt | Lane::Look)
    }

    /// Whether replicas have to have it too.
    pub(crate) fn is_to_be_confirmed(self) -> bool {
        matches!(self, Lane::Attempt | Lane::Taking)
    }
}

/// Whether a step was sent at all. Lives outside of the future that sends it, so that it can be
/// looked at after that was dropped.
#[derive(Debug, Default)]
pub(crate) struct Sent(AtomicBool);

impl Sent {
    /// It is about to be handed to the connection, or to the space.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// It is known to have done nothing, and may be sent again.
    pub(crate) fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A reply, and what is known of how it came about.
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    /// When the step that was answered was sent: leases count from here, because the server
    /// cannot have started them earlier.
    pub(crate) sent: Instant,
    /// Whether it had been sent before without an answer, so that the reply may be to a repetition.
    pub(crate) repeated: bool,
    /// Of an acquisition: whether the replicas have it.
    pub(crate) confirmation: Confirmation,
}

impl Store {
    /// Which store it is: the address that was connected to, the same for all who gave the same.
    pub(crate) fn address(&self) -> String {
        match self {
            Store::Redis(redis) => redis.address(),
            Store::Embedded(space) => space.address(),
        }
    }

    /// Which keys can be in one step, in a cluster: those of the same slot.
    pub(crate) fn slot(&self, key: &str) -> Option<u16> {
        match self {
            Store::Redis(redis) => redis.slot(key),
            Store::Embedded(_) => None,
        }
    }

    /// Runs a step; if the connection breaks, again on the next one, until the response timeout.
    pub(crate) async fn run<S: Step>(
        &self,
        step: &S,
        lane: Lane,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => redis.run(step, lane, None, sent).await,
            Store::Embedded(space) => {
                sent.set();
                space.run(step)
            }
        }
    }

    /// Runs a step that only looks: what becomes of it makes no difference to the store.
    pub(crate) async fn look<S: Step>(&self, step: &S) -> Result<S::Reply> {
        let answer = self.run(step, Lane::First, &Sent::default()).await?;
        Ok(answer.reply)
    }

    /// Runs a step once: if the connection breaks, that is the answer.
    pub(crate) async fn run_once<S: Step>(
        &self,
        step: &S,
        within: Duration,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => redis.run_once(step, within).await,
            Store::Embedded(space) => space.run(step),
        }
    }

    /// Runs a step that done twice would count twice: tried again only while it is known to have
    /// done nothing. Without an answer the error is [`Error::OutcomeUnknown`], which names `what`.
    ///
    /// What was not sent by the response timeout is given up; for an answer it waits until
    /// `answered_within`, if that is longer.
    ///
    /// [`Error::OutcomeUnknown`]: crate::Error::OutcomeUnknown
    pub(crate) async fn run_unrepeated<S: Step>(
        &self,
        step: &S,
        what: &'static str,
        lane: Lane,
        answered_within: Duration,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => {
                let answer = redis.run_unrepeated(step, what, lane, answered_within, sent);
                answer.await
            }
            Store::Embedded(space) => {
                sent.set();
                space.run(step)
            }
        }
    }

    /// The node that serves a key, as far as is known without asking. Work for different nodes is
    /// limited and batched separately, so that a node that does not answer delays nothing at the others.
    pub(crate) fn node(&self, key: &str) -> Option<NodeId> {
        match self {
            Store::Redis(redis) => redis.node(key),
            Store::Embedded(_) => None,
        }
    }

    /// The nodes that may have lost data. The embedded store never does.
    pub(crate) fn doubts(&self) -> Arc<Doubts> {
        match self {
            Store::Redis(redis) => redis.doubts(),
            Store::Embedded(_) => Arc::default(),
        }
    }

    /// A place among the attempts that may be on their way at once at the node of a key, for those that
    /// are run with [`Lane::Taking`]. Kept until the attempt is over.
    pub(crate) async fn turn(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        match self {
            Store::Redis(redis) => redis.turn(key).await,
            Store::Embedded(_) => None,
        }
    }

    /// A turn to release something in the background, at the node of a key.
    pub(crate) async fn settling_turn(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        match self {
            Store::Redis(redis) => redis.settling_turn(key).await,
            Store::Embedded(_) => None,
        }
    }

    /// How long an answer may take.
    pub(crate) fn response_timeout(&self) -> Duration {
        match self {
            Store::Redis(redis) => redis.response_timeout(),
            Store::Embedded(_) => Duration::MAX,
        }
    }

    /// Subscribes to a channel and runs a step behind it, in one round trip: whatever is published
    /// after the step is heard.
    pub(crate) async fn subscribe_and_run<S: Step>(
        &self,
        channel: &str,
        step: &S,
        lane: Lane,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => redis.run(step, lane, Some(channel), sent).await,
            Store::Embedded(space) => {
                sent.set();
                space.subscribe(channel);
                space.run(step)
            }
        }
    }

    /// Ends a subscription. An error leaves it ended too: it is not restored.
    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match self {
            Store::Redis(redis) => redis.unsubscribe(channel).await,
            Store::Embedded(space) => {
                space.unsubscribe(channel);
                Ok(())
            }
        }
    }

    /// One page of the keys that match a glob pattern: the keys, and where the next page begins, if
    /// there is one. A key may come twice, as with SCAN.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        sought: Sought,
        cursor: Cursor,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        match self {
            Store::Redis(redis) => redis.scan(pattern, sought, cursor).await,
            Store::Embedded(space) => Ok(match sought {
                Sought::Hashes => (space.keys(pattern), None),
                // All keys were among the hashes: there are few.
                Sought::Strings => (Vec::new(), None),
            }),
        }
    }
}

/// Identifies a server that holds data, for as long as this process knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId(u64);

/// Nodes that may have lost data, because another process answers for them than before: after a restart or
/// a failover. The watchdog checks what is held there.
#[derive(Default)]
pub(crate) struct Doubts {
    nodes: Mutex<HashSet<NodeId>>,
    raised: Notify,
}

impl Doubts {
    pub(crate) fn raise(&self, node: NodeId) {
        self.lock().insert(node);
        self.raised.notify_one();
    }

    /// Returns the nodes that were named since the last call, as soon as there are any.
    ///
    /// Cancel-safe: they are taken only when they are returned.
    pub(crate) async fn next(&self) -> HashSet<NodeId> {
        loop {
            let nodes = std::mem::take(&mut *self.lock());
            if !nodes.is_empty() {
                return nodes;
            }
            self.raised.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<NodeId>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a page begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cursor {
    /// Which of the nodes of a cluster, in their order.
    pub(crate) node: usize,
    /// SCAN's own.
    pub(crate) key: u64,
}

/// Which keys to look for: those of locks, or those of what counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sought {
    Hashes,
    Strings,
}

/// Shared by store and waiting room: the ear is there before the store speaks.
pub(crate) type SharedEar = Arc<dyn Ear>;
