//! Where steps run: on a server, or in process.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, timeout_at};

pub use self::redis::ReplicaSync;
pub(crate) use self::redis::{Confirmation, Turn, Turns};
use crate::error::{Error, Result};
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
    /// Follows on an attempt, to the server that served it and to no other: another one may not know of it.
    Only(ServerId),
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

/// Whether a step was sent at all, and what became of it. Lives outside of the future that sends it, so
/// that it can be looked at after that was dropped.
///
/// One call uses it at a time. The flags spare most steps the lock of the notes.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    sent: AtomicBool,
    /// The latest news is an answer.
    answered: AtomicBool,
    /// The notes have a line.
    in_line: AtomicBool,
    /// The notes have a turn.
    in_flight: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    /// Since when the store could not be asked, and why; out of date if it has answered since.
    failed: Option<(Instant, Error)>,
    /// The turn of an attempt that is in flight, or was when its caller left.
    turn: Option<Turn>,
    /// Where the attempt waits for its turn.
    queue: Option<Arc<Turns>>,
    /// From when on an answer may be expected, if the attempt had to wait for its turn.
    counts_from: Option<Instant>,
    /// The line that the request has joined, and when: its news are those of the whole line.
    line: Option<(Arc<dyn News>, Instant)>,
}

/// What a request that waits in line knows of the store, though it has not asked by itself.
pub(crate) trait News: std::fmt::Debug + Send + Sync {
    /// The latest news; `None` if there has been none since then.
    fn word(&self, since: Instant) -> Option<Word>;
}

/// The latest news of the store that a request has.
#[derive(Debug, Clone)]
pub(crate) enum Word {
    /// The store has answered.
    Answered,
    /// The store could not be asked, with this error at last.
    Failed { since: Instant, error: Error },
}

impl Sent {
    /// It is about to be handed to the connection, or to the space.
    pub(crate) fn set(&self) {
        self.sent.store(true, Ordering::Relaxed);
    }

    /// It is known to have done nothing, and may be sent again.
    pub(crate) fn clear(&self) {
        self.sent.store(false, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> bool {
        self.sent.load(Ordering::Relaxed)
    }

    /// The latest news, if there are any.
    pub(crate) fn word(&self) -> Option<Word> {
        let notes = self.notes();
        let of_line = notes.line.as_ref();
        let of_line = of_line.and_then(|(line, since)| line.word(*since));
        of_line.or_else(|| match self.answered.load(Ordering::Relaxed) {
            true => Some(Word::Answered),
            false => {
                let (since, error) = notes.failed.clone()?;
                Some(Word::Failed { since, error })
            }
        })
    }

    /// The request has joined a line.
    pub(crate) fn joined(&self, line: Arc<dyn News>) {
        self.notes().line = Some((line, Instant::now()));
        self.in_line.store(true, Ordering::Relaxed);
    }

    /// The request is the first in its line, or has left it: from now on it asks by itself.
    pub(crate) fn asks_by_itself(&self) {
        if !self.in_line.load(Ordering::Relaxed) {
            return;
        }
        self.in_line.store(false, Ordering::Relaxed);
        let left = self.notes().line.take();
        match left.and_then(|(line, since)| line.word(since)) {
            Some(Word::Answered) => self.answered(),
            Some(Word::Failed { since, error }) => self.set_failed(since, error),
            None => {}
        }
    }

    /// Takes over the news of another step of the same request.
    pub(crate) fn take_over(&self, other: &Sent) {
        match other.word() {
            Some(Word::Answered) => self.answered(),
            Some(Word::Failed { since, error }) => self.failed(since, error),
            None => {}
        }
    }

    /// The store has answered: an outage, if there was one, is over.
    pub(crate) fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// The store has answered an earlier step, and not yet the present one.
    pub(crate) fn unanswered(&self) {
        self.notes().failed = None;
        self.answered.store(false, Ordering::Relaxed);
    }

    /// The store cannot be asked, since this time or, if it failed before and has not answered since,
    /// since then.
    pub(crate) fn failed(&self, since: Instant, error: Error) {
        let since = match &self.notes().failed {
            Some((earlier, _)) if !self.answered.load(Ordering::Relaxed) => since.min(*earlier),
            _ => since,
        };
        self.set_failed(since, error);
    }

    fn set_failed(&self, since: Instant, error: Error) {
        self.notes().failed = Some((since, error));
        self.answered.store(false, Ordering::Relaxed);
    }

    /// The attempt has its turn.
    pub(crate) fn keep_turn(&self, turn: Turn) {
        self.notes().turn = Some(turn);
        self.in_flight.store(true, Ordering::Relaxed);
    }

    /// The turn of the attempt, for the step that settles it.
    pub(crate) fn take_turn(&self) -> Option<Turn> {
        if !self.in_flight.load(Ordering::Relaxed) {
            return None;
        }
        self.in_flight.store(false, Ordering::Relaxed);
        self.notes().turn.take()
    }

    /// Counts the response timeout from the latest answer to others, for as long as the result lives.
    pub(crate) fn queued_at(&self, queue: Arc<Turns>) -> impl Drop + '_ {
        self.notes().queue = Some(queue);
        Queued(self)
    }

    /// From when on an answer may be expected, if the attempt had to wait for its turn.
    pub(crate) fn counts_from(&self) -> Option<Instant> {
        self.notes().counts_from()
    }

    /// Does `work`, or gives up when no answer has come for this long after it was begun.
    pub(crate) async fn in_time<T>(
        &self,
        begun: Instant,
        timeout: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let Some(mut give_up) = begun.checked_add(timeout) else {
            return Some(work.await);
        };
        loop {
            if let Ok(done) = timeout_at(give_up, work.as_mut()).await {
                return Some(done);
            }
            let later = self.counts_from().map(|from| from + timeout);
            give_up = later.filter(|later| *later > give_up)?;
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Notes {
    fn counts_from(&self) -> Option<Instant> {
        let latest = self.queue.as_ref().and_then(|queue| queue.latest_answer());
        self.counts_from.max(latest)
    }
}

/// An attempt that waits for its turn.
struct Queued<'a>(&'a Sent);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        let mut notes = self.0.notes();
        notes.counts_from = notes.counts_from();
        notes.queue = None;
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
    pub(crate) server: ServerId,
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
            Store::Embedded(space) => space.run(step, sent),
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
            Store::Embedded(space) => space.run(step, &Sent::default()),
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
            Store::Embedded(space) => space.run(step, sent),
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

    /// A turn to release something in the background, at the node of a key.
    pub(crate) async fn settling_turn(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        match self {
            Store::Redis(redis) => redis.settling_turn(key).await,
            Store::Embedded(_) => None,
        }
    }

    /// The error for a request of this key that has waited this long without any news.
    pub(crate) fn no_answer(&self, key: &str, after: Duration) -> Error {
        match self {
            Store::Redis(redis) => redis.no_answer(key, after),
            Store::Embedded(_) => Error::ResponseTimeout { after },
        }
    }

    /// How long an answer may take.
    pub(crate) fn response_timeout(&self) -> Duration {
        match self {
            Store::Redis(redis) => redis.response_timeout(),
            Store::Embedded(space) => space.response_timeout(),
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
                space.subscribe(channel);
                space.run(step, sent)
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u64);

/// Identifies a server: after a failover it is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ServerId {
    node: Option<NodeId>,
    /// Of the servers that took over from each other as this node.
    number: u64,
}

/// Nodes that may have lost data, because another process answers for them than before: after a restart or
/// a failover. The watchdog checks the holds there.
#[derive(Default)]
pub(crate) struct Doubts {
    nodes: Mutex<BTreeSet<NodeId>>,
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
    pub(crate) async fn next(&self) -> BTreeSet<NodeId> {
        loop {
            let nodes = std::mem::take(&mut *self.lock());
            if !nodes.is_empty() {
                return nodes;
            }
            self.raised.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<NodeId>> {
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
