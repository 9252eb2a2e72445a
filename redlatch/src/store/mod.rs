//! The store, which runs steps: on a server or in process.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, timeout_at};

pub use self::redis::ReplicaSync;
pub(crate) use self::redis::{AttemptLimiter, AttemptPermit, Confirmation};
use crate::error::{Error, Result};
use crate::step::Step;

pub(crate) mod embedded;
mod glob;
pub(crate) mod redis;

/// The store of one client. Not a trait: a trait cannot express what a store must promise (order, atomic
/// steps, pushed messages).
pub(crate) enum Store {
    Redis(redis::Redis),
    Embedded(embedded::EmbeddedConnection),
}

/// Receives what the store pushes. Called from the connection's own task: must not block.
pub(crate) trait Subscriber: Send + Sync {
    /// A message was published to `channel`.
    fn on_message(&self, channel: &str);
    /// The connection broke: messages may have been missed since.
    fn on_disconnect(&self);
    /// The subscription of `channel` has ended. Its messages are missed until it is subscribed to again.
    fn on_unsubscribed(&self, channel: &str);
}

/// How a step is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delivery {
    /// Whether the step waits for a permit, behind other acquisitions at the node.
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
    /// The same, to this server only: another one may not have the acquisition.
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
    /// For a step that does not wait for a permit: renewals, releases and inspections.
    pub(crate) const IMMEDIATE: Delivery = Delivery::on(Route::Commands);

    /// Returns a delivery on this route, without waiting for a permit.
    pub(crate) const fn on(route: Route) -> Delivery {
        Delivery {
            queued: false,
            route,
            replicate: false,
        }
    }

    /// Returns the delivery of an acquisition. If the owner may already hold the object (`held`), the
    /// acquisition does not wait behind others.
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
/// Used by one call at a time. The flags save most steps from locking the details.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Whether the step may have been sent.
    sent: AtomicBool,
    /// Whether the last contact with the store was an answer.
    answered: AtomicBool,
    /// Whether `details` contains a wait queue.
    in_queue: AtomicBool,
    /// Whether `details` contains a permit.
    in_flight: AtomicBool,
    details: Mutex<ProgressDetails>,
}

#[derive(Debug, Default)]
struct ProgressDetails {
    /// Start and error of an outage. Out of date if the store has answered since.
    failed: Option<(Instant, Error)>,
    /// The permit of an attempt that is in flight, or was when its caller dropped it.
    permit: Option<AttemptPermit>,
    /// The limiter at which the attempt waits for its permit.
    limiter: Option<Arc<AttemptLimiter>>,
    /// Start of the response timeout, if the attempt had to wait for its permit.
    timeout_start: Option<Instant>,
    /// The wait queue that the request has joined, and when. Its contacts with the store count for all its
    /// requests.
    wait_queue: Option<(Arc<dyn ContactSource>, Instant)>,
}

/// Contacts with the store, for requests that wait in a wait queue and send nothing themselves.
pub(crate) trait ContactSource: std::fmt::Debug + Send + Sync {
    /// Returns the last contact, or `None` if there has been none since then.
    fn contact_since(&self, since: Instant) -> Option<LastContact>;
}

/// The outcome of a request's last contact with the store.
#[derive(Debug, Clone)]
pub(crate) enum LastContact {
    /// The store has answered.
    Answered,
    /// The store could not be reached or did not answer; `error` is the latest error.
    Failed { since: Instant, error: Error },
}

impl Progress {
    /// Records that the step is about to be passed to the connection or to the embedded store.
    pub(crate) fn mark_sent(&self) {
        self.sent.store(true, Ordering::Relaxed);
    }

    /// Records that the step had no effect and may be sent again.
    pub(crate) fn mark_unsent(&self) {
        self.sent.store(false, Ordering::Relaxed);
    }

    /// Returns whether the step may have been sent.
    pub(crate) fn was_sent(&self) -> bool {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the last contact with the store, if there was any.
    pub(crate) fn last_contact(&self) -> Option<LastContact> {
        let details = self.details();
        let of_queue = details.wait_queue.as_ref();
        let of_queue = of_queue.and_then(|(wait_queue, since)| wait_queue.contact_since(*since));
        of_queue.or_else(|| match self.answered.load(Ordering::Relaxed) {
            true => Some(LastContact::Answered),
            false => {
                let (since, error) = details.failed.clone()?;
                Some(LastContact::Failed { since, error })
            }
        })
    }

    /// Records that the request has joined a wait queue.
    pub(crate) fn join_queue(&self, wait_queue: Arc<dyn ContactSource>) {
        self.details().wait_queue = Some((wait_queue, Instant::now()));
        self.in_queue.store(true, Ordering::Relaxed);
    }

    /// Records that the request is the first in its wait queue or has left it: from now on it sends steps
    /// itself.
    pub(crate) fn leave_queue(&self) {
        if !self.in_queue.load(Ordering::Relaxed) {
            return;
        }
        self.in_queue.store(false, Ordering::Relaxed);
        let left = self.details().wait_queue.take();
        match left.and_then(|(wait_queue, since)| wait_queue.contact_since(since)) {
            Some(LastContact::Answered) => self.record_answer(),
            Some(LastContact::Failed { since, error }) => self.set_failure(since, error),
            None => {}
        }
    }

    /// Takes over the last contact of another step of the same request.
    pub(crate) fn merge(&self, other: &Progress) {
        match other.last_contact() {
            Some(LastContact::Answered) => self.record_answer(),
            Some(LastContact::Failed { since, error }) => self.record_failure(since, error),
            None => {}
        }
    }

    /// Records that the store has answered: an outage, if there was one, is over.
    pub(crate) fn record_answer(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Records that the store has answered an earlier step, but not yet the current one.
    pub(crate) fn expect_answer(&self) {
        self.details().failed = None;
        self.answered.store(false, Ordering::Relaxed);
    }

    /// Records a failure to reach the store. The outage started at `since`, or at the first failure since the
    /// last answer, if that is earlier.
    pub(crate) fn record_failure(&self, since: Instant, error: Error) {
        let since = match &self.details().failed {
            Some((earlier, _)) if !self.answered.load(Ordering::Relaxed) => since.min(*earlier),
            _ => since,
        };
        self.set_failure(since, error);
    }

    fn set_failure(&self, since: Instant, error: Error) {
        self.details().failed = Some((since, error));
        self.answered.store(false, Ordering::Relaxed);
    }

    /// Keeps the permit of the attempt.
    pub(crate) fn keep_permit(&self, permit: AttemptPermit) {
        self.details().permit = Some(permit);
        self.in_flight.store(true, Ordering::Relaxed);
    }

    /// Takes the permit of the attempt, for the step that settles it.
    pub(crate) fn take_permit(&self) -> Option<AttemptPermit> {
        if !self.in_flight.load(Ordering::Relaxed) {
            return None;
        }
        self.in_flight.store(false, Ordering::Relaxed);
        self.details().permit.take()
    }

    /// Records that the attempt waits for a permit, until the result is dropped. Meanwhile the response
    /// timeout restarts with each answer to another attempt at this limiter.
    pub(crate) fn wait_for_permit(&self, limiter: Arc<AttemptLimiter>) -> impl Drop + '_ {
        self.details().limiter = Some(limiter);
        WaitingForPermit(self)
    }

    /// Returns the start of the response timeout, if the attempt had to wait for its permit.
    pub(crate) fn timeout_start(&self) -> Option<Instant> {
        self.details().timeout_start()
    }

    /// Runs `work` until it is done. Returns `None` if it takes longer than `timeout`, which starts at `begun`
    /// and restarts while the attempt waits for its permit.
    pub(crate) async fn with_timeout<T>(
        &self,
        begun: Instant,
        timeout: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        let Some(mut deadline) = begun.checked_add(timeout) else {
            return Some(work.await);
        };
        loop {
            if let Ok(done) = timeout_at(deadline, work.as_mut()).await {
                return Some(done);
            }
            let later = self.timeout_start().map(|from| from + timeout);
            deadline = later.filter(|later| *later > deadline)?;
        }
    }

    fn details(&self) -> MutexGuard<'_, ProgressDetails> {
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressDetails {
    fn timeout_start(&self) -> Option<Instant> {
        let limiter = self.limiter.as_ref();
        let latest = limiter.and_then(|limiter| limiter.latest_answer());
        self.timeout_start.max(latest)
    }
}

/// An attempt that waits for its permit.
struct WaitingForPermit<'a>(&'a Progress);

impl Drop for WaitingForPermit<'_> {
    fn drop(&mut self) {
        let mut details = self.0.details();
        details.timeout_start = details.timeout_start();
        details.limiter = None;
    }
}

/// A reply, and how it was obtained.
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    /// When the answered step was sent. Leases count from here, because the server cannot have started them
    /// earlier.
    pub(crate) sent_at: Instant,
    /// Whether the step was sent before without an answer, so that this may be the reply to a repetition.
    pub(crate) repeated: bool,
    /// For an acquisition: resolves when the replicas have confirmed it.
    pub(crate) confirmation: Confirmation,
    pub(crate) server: ServerId,
}

impl Store {
    /// Identifies the store by the address in its URL: equal for all clients with the same address.
    pub(crate) fn address(&self) -> String {
        match self {
            Store::Redis(redis) => redis.address(),
            Store::Embedded(embedded) => embedded.address(),
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
    pub(crate) async fn run<R: Send>(
        &self,
        step: &dyn Step<Reply = R>,
        delivery: Delivery,
        progress: &Progress,
    ) -> Result<Answer<R>> {
        match self {
            Store::Redis(redis) => redis.run(step, delivery, None, progress).await,
            Store::Embedded(embedded) => embedded.run(step, progress),
        }
    }

    /// Runs a read-only step. Its outcome makes no difference to the store.
    pub(crate) async fn read<R: Send>(&self, step: &dyn Step<Reply = R>) -> Result<R> {
        let answer = self
            .run(step, Delivery::IMMEDIATE, &Progress::default())
            .await?;
        Ok(answer.reply)
    }

    /// Runs a step once. If the connection breaks, that is an error.
    pub(crate) async fn run_once<R: Send>(
        &self,
        step: &dyn Step<Reply = R>,
        within: Duration,
    ) -> Result<Answer<R>> {
        match self {
            Store::Redis(redis) => redis.run_once(step, within).await,
            Store::Embedded(embedded) => embedded.run(step, &Progress::default()),
        }
    }

    /// Runs a step that must not be applied twice. It is repeated only while it is known to have had no
    /// effect. Without an answer, the error is [`Error::OutcomeUnknown`], which names `what`.
    ///
    /// A step that was not sent by the response timeout is dropped. The wait for its answer lasts until
    /// `answered_within`, if that is longer.
    ///
    /// [`Error::OutcomeUnknown`]: crate::Error::OutcomeUnknown
    pub(crate) async fn run_at_most_once<R: Send>(
        &self,
        step: &dyn Step<Reply = R>,
        what: &'static str,
        delivery: Delivery,
        answered_within: Duration,
        progress: &Progress,
    ) -> Result<Answer<R>> {
        match self {
            Store::Redis(redis) => {
                let answer =
                    redis.run_at_most_once(step, what, delivery, answered_within, progress);
                answer.await
            }
            Store::Embedded(embedded) => embedded.run(step, progress),
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
    pub(crate) fn suspect_nodes(&self) -> Arc<SuspectNodes> {
        match self {
            Store::Redis(redis) => redis.suspect_nodes(),
            Store::Embedded(_) => Arc::default(),
        }
    }

    /// Waits for a permit to settle a hold in the background, at the node of a key.
    pub(crate) async fn settling_permit(&self, key: &str) -> Option<OwnedSemaphorePermit> {
        match self {
            Store::Redis(redis) => redis.settling_permit(key).await,
            Store::Embedded(_) => None,
        }
    }

    /// Returns the error for a request for this key that had no contact with the store for this long.
    pub(crate) fn timeout_error(&self, key: &str, after: Duration) -> Error {
        match self {
            Store::Redis(redis) => redis.timeout_error(key, after),
            Store::Embedded(_) => Error::ResponseTimeout { after },
        }
    }

    /// Returns the time limit for an answer.
    pub(crate) fn response_timeout(&self) -> Duration {
        match self {
            Store::Redis(redis) => redis.response_timeout(),
            Store::Embedded(embedded) => embedded.response_timeout(),
        }
    }

    /// Subscribes to a channel and runs a step behind the subscription, in one round trip. So all messages
    /// published after the step arrive.
    pub(crate) async fn subscribe_and_run<R: Send>(
        &self,
        channel: &str,
        step: &dyn Step<Reply = R>,
        delivery: Delivery,
        progress: &Progress,
    ) -> Result<Answer<R>> {
        match self {
            Store::Redis(redis) => redis.run(step, delivery, Some(channel), progress).await,
            Store::Embedded(embedded) => {
                embedded.subscribe(channel);
                embedded.run(step, progress)
            }
        }
    }

    /// Ends a subscription. It is not restored, even after an error.
    pub(crate) async fn unsubscribe(&self, channel: &str) -> Result<()> {
        match self {
            Store::Redis(redis) => redis.unsubscribe(channel).await,
            Store::Embedded(embedded) => {
                embedded.unsubscribe(channel);
                Ok(())
            }
        }
    }

    /// Returns one page of the keys that match a glob pattern, and the start of the next page, if there is
    /// one. A key may occur twice, as with SCAN.
    pub(crate) async fn scan(
        &self,
        pattern: &str,
        scan_type: ScanType,
        cursor: Cursor,
    ) -> Result<(Vec<String>, Option<Cursor>)> {
        match self {
            Store::Redis(redis) => redis.scan(pattern, scan_type, cursor).await,
            Store::Embedded(embedded) => Ok(match scan_type {
                ScanType::Hashes => (embedded.keys(pattern), None),
                // The hashes contain all keys: there are few.
                ScanType::Strings => (Vec::new(), None),
            }),
        }
    }
}

/// Identifies a server with data for as long as this process knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(u64);

/// Identifies the server at the other end of a connection. A failover gives another one in a cluster and behind
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
pub(crate) struct SuspectNodes {
    nodes: Mutex<BTreeSet<NodeId>>,
    added: Notify,
}

impl SuspectNodes {
    pub(crate) fn add(&self, node: NodeId) {
        self.lock().insert(node);
        self.added.notify_one();
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
            self.added.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<NodeId>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Start of a page of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cursor {
    /// Index of the node in a cluster.
    pub(crate) node: usize,
    /// Cursor of SCAN.
    pub(crate) key: u64,
}

/// The keys that a scan returns: those of locks (hashes), or those of counters (strings).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanType {
    Hashes,
    Strings,
}

/// Shared by the store and the wait queues. It exists before the store, so it misses no message.
pub(crate) type SharedSubscriber = Arc<dyn Subscriber>;
