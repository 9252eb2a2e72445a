//! The store, which runs steps: on a server or in process.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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

/// The store of one client. Not a trait: a trait cannot express what a store must promise (order, atomic
/// steps, pushed messages).
pub(crate) enum Store {
    Redis(redis::Redis),
    Embedded(embedded::Attached),
}

/// Receives what the store pushes. Called from the connection's own task: must not block.
pub(crate) trait Ear: Send + Sync {
    /// A message was published to `channel`.
    fn heard(&self, channel: &str);
    /// The connection broke: messages may have been missed since.
    fn interrupted(&self);
    /// The subscription of `channel` has ended. Its messages are missed until it is subscribed to again.
    fn ended(&self, channel: &str);
}

/// How a step is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// Whether the step waits for its turn behind other acquisitions at the node.
    pub(crate) queued: bool,
    pub(crate) route: Route,
    /// Whether replicas have to confirm the step. Such a step is settled if its caller drops it.
    pub(crate) replicate: bool,
}

/// The connection on which a step is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// That of renewals, releases and inspections.
    Commands,
    /// That of acquisitions: behind those that may still be in flight.
    Acquisitions,
    /// The same, to this server only: another one may not know of the acquisition.
    AcquisitionsOf(ServerId),
}

impl Delivery {
    pub(crate) const ACQUISITION: Delivery = Delivery {
        queued: true,
        route: Route::Acquisitions,
        replicate: true,
    };
    /// For a waiter that inspects an object.
    pub(crate) const QUEUED_INSPECTION: Delivery = Delivery {
        replicate: false,
        ..Delivery::ACQUISITION
    };
    /// Without waiting for anything.
    pub(crate) const IMMEDIATE: Delivery = Delivery::on(Route::Commands);

    /// Sends the step on this route at once.
    pub(crate) const fn on(route: Route) -> Delivery {
        Delivery {
            queued: false,
            route,
            replicate: false,
        }
    }

    /// An acquisition. Of an object that the owner may already hold, it does not wait behind others.
    pub(crate) const fn acquisition(held: bool) -> Delivery {
        Delivery {
            queued: !held,
            ..Delivery::ACQUISITION
        }
    }
}

/// Records whether a step was sent, and its outcome. It lives outside of the future that sends the step, so
/// it can still be read after that future was dropped.
///
/// Used by one call at a time. The flags save most steps from locking the notes.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    sent: AtomicBool,
    /// Whether the latest news is an answer.
    answered: AtomicBool,
    /// Whether the notes contain a line.
    in_line: AtomicBool,
    /// Whether the notes contain a turn.
    in_flight: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    /// Start and error of an outage. Out of date if the store has answered since.
    failed: Option<(Instant, Error)>,
    /// The turn of an attempt that is in flight, or was when its caller dropped it.
    turn: Option<Turn>,
    /// The queue in which the attempt waits for its turn.
    queue: Option<Arc<Turns>>,
    /// Start of the response timeout, if the attempt had to wait for its turn.
    counts_from: Option<Instant>,
    /// The line that the request has joined, and when. The line's news apply to all its requests.
    line: Option<(Arc<dyn News>, Instant)>,
}

/// News of the store for requests that wait in line and send nothing themselves.
pub(crate) trait News: std::fmt::Debug + Send + Sync {
    /// Returns the latest news, or `None` if there has been none since then.
    fn word(&self, since: Instant) -> Option<Word>;
}

/// The latest news of the store that a request has.
#[derive(Debug, Clone)]
pub(crate) enum Word {
    /// The store has answered.
    Answered,
    /// The store could not be reached or did not answer; `error` is the latest error.
    Failed { since: Instant, error: Error },
}

impl Sent {
    /// Records that the step is about to be passed to the connection or the space.
    pub(crate) fn set(&self) {
        self.sent.store(true, Ordering::Relaxed);
    }

    /// Records that the step had no effect and may be sent again.
    pub(crate) fn clear(&self) {
        self.sent.store(false, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> bool {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the latest news, if there is any.
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

    /// Records that the request has joined a line.
    pub(crate) fn joined(&self, line: Arc<dyn News>) {
        self.notes().line = Some((line, Instant::now()));
        self.in_line.store(true, Ordering::Relaxed);
    }

    /// Records that the request is the first in its line or has left it: from now on it sends steps itself.
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

    /// Records that the store has answered: an outage, if there was one, is over.
    pub(crate) fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Records that the store has answered an earlier step, but not yet the current one.
    pub(crate) fn unanswered(&self) {
        self.notes().failed = None;
        self.answered.store(false, Ordering::Relaxed);
    }

    /// Records a failure to reach the store. The outage started at `since`, or at its first failure since
    /// the last answer, if that is earlier.
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

    /// Keeps the turn of the attempt.
    pub(crate) fn keep_turn(&self, turn: Turn) {
        self.notes().turn = Some(turn);
        self.in_flight.store(true, Ordering::Relaxed);
    }

    /// Returns the turn of the attempt, for the step that settles it.
    pub(crate) fn take_turn(&self) -> Option<Turn> {
        if !self.in_flight.load(Ordering::Relaxed) {
            return None;
        }
        self.in_flight.store(false, Ordering::Relaxed);
        self.notes().turn.take()
    }

    /// While the result lives, the response timeout restarts with each answer to other attempts in the
    /// queue.
    pub(crate) fn queued_at(&self, queue: Arc<Turns>) -> impl Drop + '_ {
        self.notes().queue = Some(queue);
        Queued(self)
    }

    /// Returns the start of the response timeout, if the attempt had to wait for its turn.
    pub(crate) fn counts_from(&self) -> Option<Instant> {
        self.notes().counts_from()
    }

    /// Runs `work` until it is done, or until no answer has come for `timeout`. That counts from `begun` at
    /// first.
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

/// A reply, and how it was obtained.
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    /// When the answered step was sent. Leases count from here, because the server cannot have started them
    /// earlier.
    pub(crate) sent: Instant,
    /// Whether the step was sent before without an answer, so that this may be the reply to a repetition.
    pub(crate) repeated: bool,
    /// For an acquisition: whether the replicas have it.
    pub(crate) confirmation: Confirmation,
    pub(crate) server: ServerId,
}

impl Store {
    /// Identifies the store by the address in its URL: equal for all clients with the same address.
    pub(crate) fn address(&self) -> String {
        match self {
            Store::Redis(redis) => redis.address(),
            Store::Embedded(space) => space.address(),
        }
    }

    /// Returns the cluster slot of a key. In a cluster, all keys of a step must be in one slot.
    pub(crate) fn slot(&self, key: &str) -> Option<u16> {
        match self {
            Store::Redis(redis) => redis.slot(key),
            Store::Embedded(_) => None,
        }
    }

    /// Runs a step. If the connection breaks, repeats it on the next one until the response timeout.
    pub(crate) async fn run<S: Step>(
        &self,
        step: &S,
        delivery: Delivery,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => redis.run(step, delivery, None, sent).await,
            Store::Embedded(space) => space.run(step, sent),
        }
    }

    /// Runs a read-only step. Its outcome makes no difference to the store.
    pub(crate) async fn look<S: Step>(&self, step: &S) -> Result<S::Reply> {
        let answer = self
            .run(step, Delivery::IMMEDIATE, &Sent::default())
            .await?;
        Ok(answer.reply)
    }

    /// Runs a step once. If the connection breaks, that is an error.
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

    /// Runs a step that must not be applied twice. It is repeated only while it is known to have had no
    /// effect. Without an answer, the error is [`Error::OutcomeUnknown`], which names `what`.
    ///
    /// A step that was not sent by the response timeout is dropped. The wait for its answer lasts until
    /// `answered_within`, if that is longer.
    ///
    /// [`Error::OutcomeUnknown`]: crate::Error::OutcomeUnknown
    pub(crate) async fn run_unrepeated<S: Step>(
        &self,
        step: &S,
        what: &'static str,
        delivery: Delivery,
        answered_within: Duration,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => {
                let answer = redis.run_unrepeated(step, what, delivery, answered_within, sent);
                answer.await
            }
            Store::Embedded(space) => space.run(step, sent),
        }
    }

    /// Returns the node that serves a key, as far as is known locally. Work for different nodes is limited
    /// and batched separately, so a node that does not answer does not delay work for the others.
    pub(crate) fn node(&self, key: &str) -> Option<NodeId> {
        match self {
            Store::Redis(redis) => redis.node(key),
            Store::Embedded(_) => None,
        }
    }

    /// Returns the nodes that may have lost data. The embedded store never does.
    pub(crate) fn doubts(&self) -> Arc<Doubts> {
        match self {
            Store::Redis(redis) => redis.doubts(),
            Store::Embedded(_) => Arc::default(),
        }
    }

    /// Waits for a turn to release a hold in the background, at the node of a key.
    pub(crate) async fn settling_turn(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        match self {
            Store::Redis(redis) => redis.settling_turn(key).await,
            Store::Embedded(_) => None,
        }
    }

    /// Returns the error for a request for this key that got no news for this long.
    pub(crate) fn no_answer(&self, key: &str, after: Duration) -> Error {
        match self {
            Store::Redis(redis) => redis.no_answer(key, after),
            Store::Embedded(_) => Error::ResponseTimeout { after },
        }
    }

    /// Returns the time limit for an answer.
    pub(crate) fn response_timeout(&self) -> Duration {
        match self {
            Store::Redis(redis) => redis.response_timeout(),
            Store::Embedded(space) => space.response_timeout(),
        }
    }

    /// Subscribes to a channel and runs a step behind the subscription, in one round trip. So all messages
    /// published after the step arrive.
    pub(crate) async fn subscribe_and_run<S: Step>(
        &self,
        channel: &str,
        step: &S,
        delivery: Delivery,
        sent: &Sent,
    ) -> Result<Answer<S::Reply>> {
        match self {
            Store::Redis(redis) => redis.run(step, delivery, Some(channel), sent).await,
            Store::Embedded(space) => {
                space.subscribe(channel);
                space.run(step, sent)
            }
        }
    }

    /// Ends a subscription. It is ended even after an error: it is not restored.
    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match self {
            Store::Redis(redis) => redis.unsubscribe(channel).await,
            Store::Embedded(space) => {
                space.unsubscribe(channel);
                Ok(())
            }
        }
    }

    /// Returns one page of the keys that match a glob pattern, and the start of the next page, if there is
    /// one. A key may occur twice, as with SCAN.
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
                // The hashes contain all keys: there are few.
                Sought::Strings => (Vec::new(), None),
            }),
        }
    }
}

/// Identifies a server with data for as long as this process knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u64);

/// Identifies the server at the other end of a link. A failover gives another one in a cluster and behind
/// Sentinels, which name another address. Small, because every request keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ServerId(u32);

impl ServerId {
    /// Returns an id that no other server has.
    pub(crate) fn next() -> ServerId {
        static LATEST: AtomicU32 = AtomicU32::new(0);
        ServerId(LATEST.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }
}

/// Nodes that may have lost data, because a different server process answers for them: after a restart or a
/// failover. The watchdog checks the holds there.
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

    /// Waits until there are such nodes, and returns those added since the last call.
    ///
    /// Cancel-safe: the nodes are removed only when they are returned.
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

/// Start of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cursor {
    /// Index of the node in a cluster.
    pub(crate) node: usize,
    /// Cursor of SCAN.
    pub(crate) key: u64,
}

/// Which keys to look for: those of locks (hashes), or those of counters (strings).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sought {
    Hashes,
    Strings,
}

/// Shared by the store and the wait queues. It exists before the store, so it misses no message.
pub(crate) type SharedEar = Arc<dyn Ear>;
