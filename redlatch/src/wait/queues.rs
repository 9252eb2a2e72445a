//! Wait queues of one client: one subscription per channel, and two queues (exclusive and shared) for
//! each object that is waited for.
//!
//! Redisson's layout gives two objects one channel: `a` and `{a}`. Each has queues of its own, so a waiter
//! never waits behind a waiter for the other object. They share the subscription:
//!
//! 1. A waiter that is refused joins a queue of its object. The first one subscribes when it has the turn.
//! 2. A message on the channel wakes the first waiter of every queue. So does a broken connection, because
//!    messages may have been missed.
//! 3. The last waiter of the channel starts a task that ends the subscription after the linger time, unless
//!    a waiter joins before.
//! 4. An object without waiters keeps its queues, because they know when to expect the next release: but only the latest
//!    [`MAX_IDLE`] of a channel. The values of a group share a channel that may never be idle, and a message visits all objects
//!    of its channel. A waiter of an object that has no queues any more asks the store.
//! 5. While the subscription is being ended, new waiters get no turn (`Subscription::ending`), so that ending
//!    and subscribing cannot cross.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::pin::pin;
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use self::SubscriptionState::{EndReported, NotSubscribed, Subscribed, Unconfirmed};
use super::Attempt;
use crate::background::{Background, Counted};
use crate::client_registry::{REGISTERED_AFTER, RegisteredWait};
use crate::environment::{random_fraction, task};
use crate::error::Error;
use crate::hold::{Share, Yielding, Yields};
use crate::lease::Lease;
use crate::metrics::{Metrics, SubscriptionCount};
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::store::{ContactSource, LastContact, Store, Subscriber};
use crate::sync::{Mutex, wait_for};

/// All wait queues of one client.
#[derive(Clone)]
pub(crate) struct WaitQueues(Arc<Shared>);

pub(crate) struct Shared {
    pub(super) channels: Arc<ChannelMap>,
    pub(super) store: Arc<Store>,
    background: Background,
    linger: Duration,
    /// When a waiter last found the store in an outage.
    pub(super) last_outage: Mutex<Option<Instant>>,
}

impl Deref for WaitQueues {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// The subscriptions and wait queues by channel. Receives the messages of the store.
#[derive(Default)]
pub(crate) struct ChannelMap {
    entries: Mutex<BTreeMap<Arc<str>, ChannelEntry>>,
    /// Number of entries. Saves most requests, which find no waiters, from locking the map.
    len: AtomicUsize,
    metrics: Metrics,
}

/// One channel: its subscription, and the objects with waiters on it.
struct ChannelEntry {
    subscription: Arc<Subscription>,
    /// The objects with waiters, and the latest without, in the order of their keys: usually one.
    objects: Vec<Arc<ObjectQueues>>,
    /// Those without waiters, the oldest first.
    idle: VecDeque<Arc<ObjectQueues>>,
    /// Number of waiters on this channel, including the first of each queue.
    waiters: usize,
    /// When the last waiter left.
    idle_since: Option<Instant>,
    /// The task that ends the subscription after the linger time.
    closer: Option<AbortHandle>,
}

struct Subscription {
    channel: Arc<str>,
    state: Mutex<SubscriptionState>,
    /// How often its end was reported.
    ends: AtomicU64,
    count: SubscriptionCount,
    /// Locked while the subscription is being ended. A waiter that joins meanwhile subscribes only
    /// afterwards, so that ending and subscribing cannot cross.
    ending: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SubscriptionState {
    NotSubscribed,
    /// The subscription was sent; whether it took effect is unknown.
    Unconfirmed,
    Subscribed,
    /// The store reported the end of the subscription. In a cluster that may be the end of an earlier
    /// subscription, at the node that had the slot before. So there may be a subscription to end.
    EndReported,
}

/// The queues of one object.
#[derive(Debug)]
struct ObjectQueues {
    key: Box<str>,
    created: Instant,
    /// One queue for each [`QueueKind`].
    queues: [WaitQueue; 2],
    registered: Mutex<RegisteredWaits>,
    /// Since when the store cannot be reached, and why.
    outage: Mutex<Option<(Instant, Error)>>,
    /// Notified when the store could not be reached, to fail all waiters for the object, and to remind them that they may have
    /// waited long.
    failed: Notify,
}

/// The registered waits for an object. (Each waiter has only an index, so that it is small.)
#[derive(Debug, Default)]
struct RegisteredWaits {
    waits: Vec<Option<RegisteredWait>>,
    /// The indices without a wait.
    free: Vec<u16>,
}

impl RegisteredWaits {
    /// Adds a wait. Returns its index plus one; 0 if there are too many.
    fn add(&mut self, wait: RegisteredWait) -> u16 {
        if self.free.is_empty() {
            let Ok(index) = u16::try_from(self.waits.len() + 1) else {
                return 0;
            };
            self.waits.push(None);
            self.free.push(index - 1);
        }
        let index = self.free.pop().unwrap_or_default();
        self.waits[usize::from(index)] = Some(wait);
        index + 1
    }

    fn take(&mut self, index: u16) -> Option<RegisteredWait> {
        self.free.push(index);
        self.waits.get_mut(usize::from(index))?.take()
    }

    fn len(&self) -> usize {
        self.waits.len() - self.free.len()
    }
}

/// The contacts of one queue with the store.
#[derive(Debug, Default)]
struct ContactState {
    /// Number of waiters in the queue. The rest is reset when the last one leaves, except for transfers and pending wakeups.
    waiters: usize,
    /// Number of these that take offers of `share`.
    taking_offers: usize,
    /// The claims of waiters in the order in which they joined, without those that a release has taken.
    claims: VecDeque<(u64, TransferClaim)>,
    latest_claim: u64,
    /// How much of the object the first of these requests. Waiters that request another share take no offers.
    share: Option<Share>,
    /// Whether the first waiter is sending a request.
    in_flight: bool,
    /// Since when the latest answer is out of date: since the release that the unanswered request follows,
    /// or since that request was sent. The answer still counts for waiters that joined earlier.
    stale_since: Option<Instant>,
    /// Since when the step of a release that has claimed a waiter is in flight.
    transferred_since: Option<Instant>,
    /// When the object was first released, or may have been, since the last request was sent.
    maybe_released_at: Option<Instant>,
    /// Whether the connection broke since then: the message of a later release may be missed, too.
    disconnected: bool,
    /// Whether the store has answered a request of the queue.
    answered: bool,
    /// How long other clients go first.
    yielding: Yielding,
    /// The latest message, until the first waiter takes it; 0 if there is none.
    message: i64,
}

/// The waiters in one queue of an object.
#[derive(Debug, Default)]
struct WaitQueue {
    contact: Mutex<ContactState>,
    /// The waiter that holds this lock is the first of the queue; tokio's mutex is fair. Contains the time
    /// until which the next waiter need not send a request, if it requests the same share. Set by a waiter that acquires
    /// the object.
    turn: tokio::sync::Mutex<Option<(Instant, Share)>>,
    /// Notified when a message was published, or may have been, and when there is an offer.
    wake: Notify,
    /// What the first waiter may take instead of sending a request.
    offers: Mutex<Offers>,
}

/// Something that a request of this client passes to the next. Dropping it releases it.
pub(crate) type Offer = Box<dyn Any + Send>;

/// What a release of this client needs to know to acquire the object for a waiter.
#[derive(Debug)]
pub(crate) struct TransferClaim {
    /// The waiter's hold.
    pub(crate) hold: Arc<dyn Any + Send + Sync>,
    pub(crate) lease: Lease,
}

/// The offers of one queue: at most one of a whole object, or of permits at most one for each waiter. They are dropped if no
/// waiter takes them in time: a request may not be polled any more.
#[derive(Debug, Default)]
struct Offers {
    /// The oldest first.
    unclaimed: VecDeque<Unclaimed>,
    /// The task that drops them.
    expiry: Option<AbortHandle>,
}

/// An offer that no waiter has taken.
#[derive(Debug)]
struct Unclaimed {
    /// Counted, because a flush waits until it is taken, or released.
    offer: Counted<Offer>,
    share: Share,
    since: Instant,
}

/// How many objects of a channel keep their queues without waiters.
const MAX_IDLE: usize = 16;

/// How long an offer waits to be taken.
const OFFERED_FOR: Duration = Duration::from_millis(10);

/// The queues of an object. A waiter that can share the object does not wait behind one that cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueKind {
    Exclusive,
    Shared,
}

/// A waiter in a queue. Leaves the queue when dropped.
pub(super) struct Waiter {
    queues: WaitQueues,
    subscription: Arc<Subscription>,
    object: Arc<ObjectQueues>,
    kind: QueueKind,
    takes_offers: bool,
    /// Id of its claim; 0: it has none.
    claim_id: u64,
    /// When it has joined the queue, in milliseconds since the queues of the object were created, modulo 2^32. (Smaller than
    /// an `Instant`: each waiter has one.)
    joined_ms: u32,
    /// Index of its wait in [`ObjectQueues::registered`], plus one; 0: the wait is not registered.
    registered: AtomicU16,
}

/// The first waiter of a queue, claimed by a release that sends a request for it.
pub(crate) struct ClaimedWaiter {
    pub(crate) claim: TransferClaim,
    /// When the request was sent, if it was. Then dropping this means that the object may have been released.
    sent_at: Option<Instant>,
    queues: WaitQueues,
    object: Arc<ObjectQueues>,
}

impl ClaimedWaiter {
    /// Records that the request is about to be sent.
    pub(crate) fn request_started(&mut self) {
        let mut contact = self.object.queue(QueueKind::Exclusive).contact.lock();
        let now = Instant::now();
        contact.transferred_since = Some(now);
        self.sent_at = Some(now);
    }

    /// Offers the waiter the object, which the store has granted to it.
    pub(crate) fn offer(mut self, offer: Counted<Offer>) {
        let queue = self.object.queue(QueueKind::Exclusive);
        let mut contact = queue.contact.lock();
        if contact.waiters == 0 {
            drop(contact);
            return drop(offer);
        }
        contact.end_transfer(self.sent_at.take());
        contact.answered = true;
        let outdated = self.queues.put_offer(&self.object, offer, Share::Whole);
        drop(contact);
        drop(outdated);
    }
}

impl Drop for ClaimedWaiter {
    fn drop(&mut self) {
        let mut contact = self.object.queue(QueueKind::Exclusive).contact.lock();
        if contact.end_transfer(self.sent_at) {
            contact.maybe_released_at = contact.maybe_released_at.or(self.sent_at);
        }
    }
}

/// A request of the first waiter that is in flight.
pub(super) struct Sending<'a>(&'a WaitQueue);

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.contact.lock().in_flight = false;
    }
}

/// The turn of the first waiter of a queue, with the time until which it need not send a request. Dropping it
/// passes the turn to the next waiter.
pub(super) type QueueTurn<'a> = tokio::sync::MutexGuard<'a, Option<(Instant, Share)>>;

impl WaitQueues {
    pub(crate) fn new(
        channels: Arc<ChannelMap>,
        store: Arc<Store>,
        background: Background,
        linger: Duration,
    ) -> WaitQueues {
        WaitQueues(Arc::new(Shared {
            channels,
            store,
            background,
            linger,
            last_outage: Mutex::default(),
        }))
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.channels.metrics
    }

    /// Returns whether nothing waits in this client, and no subscription lingers.
    pub(crate) fn are_unused(&self) -> bool {
        self.channels.is_empty()
    }

    /// Returns the number of subscribed channels, in use or lingering. Spin locks have none.
    pub(crate) fn subscriptions(&self) -> usize {
        let channels = self.channels.entries.lock();
        let subscribed = |entry: &&ChannelEntry| entry.subscription.may_be_subscribed();
        channels.values().filter(subscribed).count()
    }

    /// Returns whether a request for `object` joins a queue: it has waiters, or had some since the
    /// subscription began.
    pub(crate) fn has_queue(&self, channel: &str, object: &str) -> bool {
        let Some(channels) = self.channels.lock_unless_empty() else {
            return false;
        };
        let entry = channels.get(channel);
        entry.is_some_and(|entry| entry.find(object).is_some())
    }

    /// Joins the wait queue for `object`, if `channel` has waiters or a lingering subscription.
    pub(super) fn join_existing(
        &self,
        channel: &str,
        object: &str,
        kind: QueueKind,
    ) -> Option<Waiter> {
        let mut channels = self.channels.lock_unless_empty()?;
        let entry = channels.get_mut(channel)?;
        Some(self.add_waiter(entry, object, kind))
    }

    /// Offers the first waiter for an object what it waits for. `offer` is called, with whether other clients waited lately, if
    /// all waiters take offers of this share, and none waits in the shared queue. If the share is the whole object, it must not have been released since the
    /// last request, and no request may be in flight. There must be a waiter for each offer, not counting the one whose
    /// request is in flight: it may need none. Returns whether it was offered.
    pub(crate) fn offer(
        &self,
        object: &ObjectKeys,
        share: Share,
        offer: impl FnOnce(bool) -> Option<Counted<Offer>>,
    ) -> bool {
        let Some(channels) = self.channels.lock_unless_empty() else {
            return false;
        };
        let Some(queues) = queues_of(&channels, object) else {
            return false;
        };
        let [exclusive, shared] = &queues.queues;
        let (all_take_it, is_crowded) = {
            let contact = exclusive.contact.lock();
            // All others are offers of the same share, or refused soon.
            let (is_current, unclaimed) = match share {
                Share::Whole => (contact.is_current(), 0),
                Share::Permits(_) => (true, exclusive.offers.lock().unclaimed.len()),
            };
            let all_take_it = is_current
                && contact.waiters > unclaimed + usize::from(contact.in_flight)
                && contact.taking_offers == contact.waiters
                && contact.share == Some(share);
            (all_take_it, contact.yielding.is_crowded())
        };
        if !all_take_it || shared.contact.lock().waiters > 0 {
            return false;
        }
        let Some(offer) = offer(is_crowded) else {
            return false;
        };
        let outdated = self.put_offer(queues, offer, share);
        drop(channels);
        drop(outdated);
        true
    }

    /// Offers the first waiter of the exclusive queue something. Returns the earlier offers of the whole object: their hold is
    /// lost, because the store has granted another one since. The caller drops them after its locks.
    fn put_offer(
        &self,
        object: &Arc<ObjectQueues>,
        offer: Counted<Offer>,
        share: Share,
    ) -> VecDeque<Unclaimed> {
        let queue = object.queue(QueueKind::Exclusive);
        let mut offers = queue.offers.lock();
        let outdated = match share {
            Share::Whole => std::mem::take(&mut offers.unclaimed),
            Share::Permits(_) => VecDeque::new(),
        };
        offers.unclaimed.push_back(Unclaimed {
            offer,
            share,
            since: Instant::now(),
        });
        queue.wake.notify_one();
        if offers.expiry.as_ref().is_none_or(AbortHandle::is_finished)
            && let Some(runtime) = self.background.runtime()
        {
            let expiring = runtime.spawn(task(WaitQueues::drop_expired_offers(object.clone())));
            offers.expiry = Some(expiring.abort_handle());
        }
        outdated
    }

    /// Claims the first waiter for an object, if all waiters can be claimed, none waits in the shared queue, the object
    /// was not released since the last request, and no request is in flight.
    pub(crate) fn claim_first(&self, object: &ObjectKeys) -> Option<ClaimedWaiter> {
        let channels = self.channels.lock_unless_empty()?;
        let object = queues_of(&channels, object)?;
        let [exclusive, shared] = &object.queues;
        let mut contact = exclusive.contact.lock();
        let all_claimable = contact.is_current() && contact.claims.len() == contact.waiters;
        if !all_claimable || shared.contact.lock().waiters > 0 {
            return None;
        }
        let (_, claim) = contact.claims.pop_front()?;
        Some(ClaimedWaiter {
            claim,
            sent_at: None,
            queues: self.clone(),
            object: object.clone(),
        })
    }

    /// Lets other clients go first when the exclusive queue of the object requests it again after the release that
    /// follows.
    pub(crate) fn yield_to(&self, object: &ObjectKeys, yields: Yields) {
        let channels = self.channels.lock_unless_empty();
        let queues = channels.as_ref();
        if let Some(queues) = queues.and_then(|channels| queues_of(channels, object)) {
            let mut contact = queues.queue(QueueKind::Exclusive).contact.lock();
            if contact.waiters > 0 {
                let of_permits = matches!(contact.share, Some(Share::Permits(_)));
                contact
                    .yielding
                    .released(yields, of_permits, random_fraction);
            }
        }
    }

    /// Drops offers that are not taken in time, until there is none.
    async fn drop_expired_offers(object: Arc<ObjectQueues>) {
        let mut wake = Instant::now() + OFFERED_FOR;
        loop {
            sleep_until(wake).await;
            let mut offers = object.queue(QueueKind::Exclusive).offers.lock();
            let unclaimed = &mut offers.unclaimed;
            let is_expired = |one: &Unclaimed| one.since.elapsed() >= OFFERED_FOR;
            let expired = unclaimed.partition_point(is_expired);
            let expired: Vec<_> = unclaimed.drain(..expired).collect();
            let oldest = unclaimed.front().map(|oldest| oldest.since);
            if oldest.is_none() {
                offers.expiry = None;
            }
            drop(offers);
            drop(expired);
            match oldest {
                Some(since) => wake = since + OFFERED_FOR,
                None => return,
            }
        }
    }

    /// Drops all offers, which releases them in the background.
    pub(crate) fn drop_offers(&self) {
        let offers: Vec<_> = {
            let channels = self.channels.entries.lock();
            let queues = channels.values().flat_map(ChannelEntry::queues);
            queues
                .flat_map(|queue| std::mem::take(&mut queue.offers.lock().unclaimed))
                .collect()
        };
        drop(offers);
    }

    /// Returns whether this client subscribes to a channel.
    pub(crate) fn is_subscribed(&self, channel: &str) -> bool {
        let channels = self.channels.entries.lock();
        let subscribed = |entry: &ChannelEntry| *entry.subscription.state.lock() == Subscribed;
        channels.get(channel).is_some_and(subscribed)
    }

    /// Wakes the first waiter of every queue on `channel`, so that it repeats its request.
    pub(crate) fn wake(&self, channel: &str) {
        self.channels.on_message(channel, 0);
    }

    /// Records that this client is about to release the objects of `channel`. For waiters that join from now
    /// on, an earlier answer no longer means that they are held. The message that wakes waiters may arrive
    /// later, on another connection.
    pub(crate) fn record_release(&self, channel: &str) {
        let channels = self.channels.lock_unless_empty();
        if let Some(entry) = channels.as_ref().and_then(|channels| channels.get(channel)) {
            entry.record_release();
        }
    }

    /// Joins the wait queue for `object` on `channel`, which is created if there is none. For a request that
    /// the store has answered.
    pub(super) fn join(&self, channel: &str, object: &str, kind: QueueKind) -> Waiter {
        let waiter = self.join_unanswered(channel, object, kind);
        waiter.queue().contact.lock().answered = true;
        waiter
    }

    /// The same for a request that the store may not have answered.
    pub(super) fn join_unanswered(&self, channel: &str, object: &str, kind: QueueKind) -> Waiter {
        let mut channels = self.channels.entries.lock();
        let channel: Arc<str> = channel.into();
        let entry = channels
            .entry(channel.clone())
            .or_insert_with(|| ChannelEntry::new(channel, self.channels.metrics.subscription()));
        let waiter = self.add_waiter(entry, object, kind);
        self.channels.len.store(channels.len(), Ordering::Release);
        waiter
    }

    fn add_waiter(&self, entry: &mut ChannelEntry, object: &str, kind: QueueKind) -> Waiter {
        entry.waiters += 1;
        let object = entry.object(object);
        let waiter = Waiter {
            queues: self.clone(),
            subscription: entry.subscription.clone(),
            joined_ms: object.age_ms() as u32,
            object,
            kind,
            takes_offers: false,
            claim_id: 0,
            registered: AtomicU16::new(0),
        };
        waiter.queue().contact.lock().waiters += 1;
        waiter
    }

    /// Ends the subscription of a channel that had no waiter for the linger time. So repeated waiting for a
    /// lock does not subscribe each time.
    async fn close_when_idle(
        channels: Weak<ChannelMap>,
        store: Weak<Store>,
        channel: Arc<str>,
        linger: Duration,
    ) {
        let mut wake = Instant::now() + linger;
        loop {
            tokio::time::sleep_until(wake).await;
            let (Some(channels), Some(store)) = (channels.upgrade(), store.upgrade()) else {
                return;
            };
            let (subscription, _ending) = match channels.ready_to_close(&channel, linger) {
                Ready::Later(at) => {
                    wake = at;
                    continue;
                }
                Ready::No => return,
                Ready::Now(subscription, ending) => (subscription, ending),
            };
            // Sent even if no subscription is known here: a repeated step may have subscribed again after the
            // store reported the end.
            if let Err(error) = store.unsubscribe(&channel).await {
                tracing::debug!(%channel, %error, "a subscription ended with an error");
            }
            subscription.change(&[Unconfirmed, Subscribed, EndReported], NotSubscribed);
            return channels.closed(&channel);
        }
    }
}

/// Returns a key for the queues of one caller, which no other waiter for the object joins.
pub(crate) fn private_object(object: &str) -> String {
    format!("{object}{PRIVATE}{}", Owner::new().number())
}

/// Precedes the number of the caller. No name has a NUL, and that of a value of a group is between two names.
const PRIVATE: &str = "\0\0";

impl ObjectQueues {
    fn is_private(&self) -> bool {
        self.key.contains(PRIVATE)
    }
}

/// Whether the subscription of a channel can be ended.
enum Ready {
    /// Not before then.
    Later(Instant),
    /// It has waiters again, or is gone.
    No,
    /// New waiters wait until the second value is dropped.
    Now(Arc<Subscription>, tokio::sync::OwnedMutexGuard<()>),
}

/// Returns the queues of an object, if it has any.
fn queues_of<'a>(
    channels: &'a BTreeMap<Arc<str>, ChannelEntry>,
    object: &ObjectKeys,
) -> Option<&'a Arc<ObjectQueues>> {
    channels.get(object.channel())?.find(object.identity())
}

impl ChannelMap {
    pub(crate) fn new(metrics: Metrics) -> ChannelMap {
        ChannelMap {
            metrics,
            ..ChannelMap::default()
        }
    }

    /// An entry that another thread is about to add may be missed.
    fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    fn lock_unless_empty(&self) -> Option<MutexGuard<'_, BTreeMap<Arc<str>, ChannelEntry>>> {
        (!self.is_empty()).then(|| self.entries.lock())
    }

    fn ready_to_close(&self, channel: &str, linger: Duration) -> Ready {
        let mut channels = self.entries.lock();
        let Some(entry) = channels.get_mut(channel) else {
            return Ready::No;
        };
        let Some(idle_since) = entry.idle_since.filter(|_| entry.waiters == 0) else {
            entry.closer = None;
            return Ready::No;
        };
        if idle_since + linger > Instant::now() {
            return Ready::Later(idle_since + linger);
        }
        // The channel has no waiter, and none can join until this returns, so no waiter holds this lock.
        let Ok(ending) = entry.subscription.ending.clone().try_lock_owned() else {
            return Ready::Later(Instant::now() + linger);
        };
        // A queue knows when to expect the next release only if it has received every release so far.
        entry.objects.clear();
        entry.idle.clear();
        entry.subscription.begin_ending();
        Ready::Now(entry.subscription.clone(), ending)
    }

    /// Records that the subscription has ended. Removes the channel unless a waiter has joined meanwhile.
    fn closed(&self, channel: &str) {
        let mut channels = self.entries.lock();
        match channels.get_mut(channel) {
            Some(entry) if entry.waiters > 0 => entry.closer = None,
            _ => drop(channels.remove(channel)),
        }
        self.len.store(channels.len(), Ordering::Release);
    }
}

#[cfg(test)]
impl ChannelMap {
    /// Handles the answer to a step that was sent just now.
    pub(super) fn confirm(&self, channel: &str) {
        self.on_subscribed(channel, self.subscription_ends(channel));
    }
}

impl Subscriber for ChannelMap {
    fn on_message(&self, channel: &str, message: i64) {
        if let Some(entry) = self.entries.lock().get(channel) {
            entry.wake(message);
        }
    }

    fn on_disconnect(&self) {
        for entry in self.entries.lock().values() {
            for queue in entry.queues() {
                queue.contact.lock().disconnected = true;
            }
            entry.wake(0);
        }
    }

    /// Not if the subscription has ended since: another request may have begun one again, which is not confirmed yet.
    fn on_subscribed(&self, channel: &str, ends: u64) {
        if let Some(entry) = self.entries.lock().get(channel)
            && entry.subscription.ends.load(Ordering::Relaxed) == ends
        {
            entry.subscription.change(&[Unconfirmed], Subscribed);
        }
    }

    fn subscription_ends(&self, channel: &str) -> u64 {
        let entries = self.entries.lock();
        let entry = entries.get(channel);
        entry.map_or(0, |entry| entry.subscription.ends.load(Ordering::Relaxed))
    }

    fn on_unsubscribed(&self, channel: &str) {
        if let Some(entry) = self.entries.lock().get(channel) {
            let subscription = &entry.subscription;
            subscription.ends.fetch_add(1, Ordering::Relaxed);
            subscription.change(&[Unconfirmed, Subscribed], EndReported);
            entry.wake(0);
        }
    }

    fn metrics(&self) -> Metrics {
        self.metrics.clone()
    }
}

impl ChannelEntry {
    fn new(channel: Arc<str>, count: SubscriptionCount) -> ChannelEntry {
        ChannelEntry {
            subscription: Arc::new(Subscription {
                channel,
                state: Mutex::new(NotSubscribed),
                ends: AtomicU64::new(0),
                count,
                ending: Arc::default(),
            }),
            objects: Vec::new(),
            idle: VecDeque::new(),
            waiters: 0,
            idle_since: None,
            closer: None,
        }
    }

    /// Returns the index of the object with this key; without one, that of the first object behind it.
    fn position(&self, key: &str) -> Result<usize, usize> {
        self.objects
            .binary_search_by(|object| (*object.key).cmp(key))
    }

    fn find(&self, key: &str) -> Option<&Arc<ObjectQueues>> {
        self.objects.get(self.position(key).ok()?)
    }

    /// Returns the object with this key, which is created if there is none, for a waiter.
    fn object(&mut self, key: &str) -> Arc<ObjectQueues> {
        let position = match self.position(key) {
            Ok(found) => {
                let object = self.objects[found].clone();
                self.idle.retain(|idle| !Arc::ptr_eq(idle, &object));
                return object;
            }
            Err(position) => position,
        };
        let object = Arc::new(ObjectQueues {
            key: key.into(),
            queues: Default::default(),
            registered: Mutex::default(),
            outage: Mutex::default(),
            created: Instant::now(),
            failed: Notify::new(),
        });
        self.objects.insert(position, object.clone());
        object
    }

    /// Records that an object has no waiters any more.
    fn become_idle(&mut self, object: &Arc<ObjectQueues>) {
        // No other waiter joins it.
        if object.is_private() {
            return self.forget(object);
        }
        *object.outage.lock() = None;
        self.idle.push_back(object.clone());
        for _ in MAX_IDLE..self.idle.len() {
            match self.idle.pop_front() {
                Some(oldest) if oldest.is_transferred() => self.idle.push_back(oldest),
                Some(oldest) => self.forget(&oldest),
                None => {}
            }
        }
    }

    fn forget(&mut self, object: &ObjectQueues) {
        if let Ok(position) = self.position(&object.key) {
            self.objects.remove(position);
        }
    }

    fn queues(&self) -> impl Iterator<Item = &WaitQueue> {
        self.objects.iter().flat_map(|object| &object.queues)
    }

    fn record_release(&self) {
        for queue in self.queues() {
            let mut contact = queue.contact.lock();
            contact.maybe_released_at.get_or_insert_with(Instant::now);
        }
    }

    fn wake(&self, message: i64) {
        self.record_release();
        for queue in self.queues() {
            let mut contact = queue.contact.lock();
            contact.message = message;
            // The release of a write lock publishes another message, too, for waiters in Java. That of permits publishes
            // their number.
            let is_release = message == 0 || contact.share != Some(Share::Whole);
            if is_release {
                contact.yielding.message();
            }
            drop(contact);
            queue.wake.notify_one();
        }
    }
}

impl Subscription {
    /// Changes the state from one of `from` to `to`. Returns the state before.
    fn change(&self, from: &[SubscriptionState], to: SubscriptionState) -> SubscriptionState {
        let mut state = self.state.lock();
        let before = *state;
        if from.contains(&before) {
            *state = to;
            self.count.set(to != NotSubscribed);
        }
        before
    }

    fn may_be_subscribed(&self) -> bool {
        *self.state.lock() != NotSubscribed
    }

    /// From here on it is unknown whether the subscription exists, even if ending it is interrupted.
    fn begin_ending(&self) {
        self.change(&[Subscribed], Unconfirmed);
    }
}

impl ContactState {
    /// Records that the transfer that was sent then has ended. Returns false if another one was sent, or none.
    fn end_transfer(&mut self, sent_at: Option<Instant>) -> bool {
        let ended = self
            .transferred_since
            .take_if(|since| Some(*since) == sent_at);
        ended.is_some()
    }

    /// Returns since when the latest answer is out of date, if it is: an object was released, or a request is in flight.
    fn outdated_at(&self) -> Option<Instant> {
        let since = [
            self.stale_since,
            self.transferred_since,
            self.maybe_released_at,
        ];
        since.into_iter().flatten().min()
    }

    /// Returns whether the object was not released since the latest answer, and no request is in flight.
    fn is_current(&self) -> bool {
        self.outdated_at().is_none()
    }
}

impl ObjectQueues {
    /// Returns how many milliseconds ago the queues were created.
    fn age_ms(&self) -> u64 {
        self.created.elapsed().as_millis() as u64
    }

    fn has_waiters(&self) -> bool {
        let waits = |queue: &WaitQueue| queue.contact.lock().waiters > 0;
        self.queues.iter().any(waits)
    }

    /// Returns whether the step of a release that has claimed a waiter is in flight.
    fn is_transferred(&self) -> bool {
        let exclusive = self.queue(QueueKind::Exclusive).contact.lock();
        exclusive.transferred_since.is_some()
    }

    fn queue(&self, kind: QueueKind) -> &WaitQueue {
        let [exclusive, shared] = &self.queues;
        match kind {
            QueueKind::Exclusive => exclusive,
            QueueKind::Shared => shared,
        }
    }
}

/// Shares the contacts of one queue with its waiters.
#[derive(Debug)]
struct QueueContacts {
    object: Arc<ObjectQueues>,
    kind: QueueKind,
}

impl ContactSource for QueueContacts {
    /// If a request of this queue was refused, the store has answered that another owner holds the object.
    /// That counts as a contact of every waiter, unless a request has been without an answer ever since
    /// `since`, or the object was released before `since` and no request was sent after that. There is no
    /// contact if all waiters of the queue have left.
    fn contact_since(&self, since: Instant) -> Option<LastContact> {
        if let Some((since, error)) = self.object.outage.lock().clone() {
            return Some(LastContact::Failed { since, error });
        }
        let contact = self.object.queue(self.kind).contact.lock();
        let is_outdated = contact.outdated_at().is_some_and(|at| at <= since);
        (!is_outdated && contact.answered).then_some(LastContact::Answered)
    }
}

impl Waiter {
    fn queue(&self) -> &WaitQueue {
        self.object.queue(self.kind)
    }

    pub(super) fn channel(&self) -> &str {
        &self.subscription.channel
    }

    pub(super) fn contacts(&self) -> Arc<dyn ContactSource> {
        Arc::new(QueueContacts {
            object: self.object.clone(),
            kind: self.kind,
        })
    }

    /// Records that the first waiter is sending a request, until the result is dropped.
    pub(super) fn sending(&self) -> Sending<'_> {
        self.queue().contact.lock().in_flight = true;
        Sending(self.queue())
    }

    /// Records that a request is about to be sent whose answer counts for the whole queue.
    pub(super) fn request_started(&self) {
        let mut contact = self.queue().contact.lock();
        contact.stale_since.get_or_insert_with(Instant::now);
    }

    /// Records that the request has ended, with its last contact with the store.
    pub(super) fn request_ended(&self, last: Option<LastContact>) {
        let mut contact = self.queue().contact.lock();
        contact.stale_since = None;
        match last {
            Some(LastContact::Answered) => {
                contact.answered = true;
                *self.object.outage.lock() = None;
            }
            Some(LastContact::Failed { since, error }) => {
                *self.object.outage.lock() = Some((since, error))
            }
            None => {}
        }
    }

    /// Reports to all waiters for the object that the store cannot be reached.
    pub(super) fn fail_all(&self) {
        self.object.failed.notify_waiters();
    }

    /// Reminds the waiters behind this one that they may have waited long, if any could register its wait. Not in an outage:
    /// they would fail.
    pub(super) fn remind_others(&self) {
        let object = &self.object;
        let is_useful = {
            let registered = object.registered.lock();
            let waiters = |queue: &WaitQueue| queue.contact.lock().waiters;
            let has_room = |wait: &RegisteredWait| wait.has_room_for_more();
            registered
                .waits
                .iter()
                .flatten()
                .next()
                .is_some_and(has_room)
                && registered.len() < object.queues.iter().map(waiters).sum()
        };
        if is_useful && object.outage.lock().is_none() {
            object.failed.notify_waiters();
        }
    }

    /// Waits until [`Waiter::fail_all`] is called after the first poll. Returns since when the store cannot be reached, and
    /// why. Registers the wait when the first waiter reminds this one.
    pub(super) async fn failed(&self, attempt: &impl Attempt) -> (Instant, Error) {
        let mut notified = pin!(self.object.failed.notified());
        loop {
            notified.as_mut().await;
            // Before the outage is read, so that no failure is missed.
            notified.set(self.object.failed.notified());
            let outage = self.object.outage.lock().clone();
            match outage {
                Some(outage) => return outage,
                None => self.register(|since| attempt.registrar()(since)),
            }
        }
    }

    /// Returns when this waiter has joined the queue.
    pub(super) fn joined(&self) -> Instant {
        let now_ms = self.object.age_ms();
        let waited_ms = (now_ms as u32).wrapping_sub(self.joined_ms);
        self.object.created + Duration::from_millis(now_ms - u64::from(waited_ms))
    }

    /// Returns whether the wait is registered.
    pub(super) fn is_registered(&self) -> bool {
        self.registered.load(Ordering::Relaxed) > 0
    }

    /// Registers the wait, if it has lasted long and is not registered yet.
    pub(super) fn register(&self, register: impl FnOnce(Instant) -> Option<RegisteredWait>) {
        let joined = self.joined();
        if !self.is_registered()
            && joined.elapsed() >= REGISTERED_AFTER
            && let Some(wait) = register(joined)
        {
            let place = self.object.registered.lock().add(wait);
            self.registered.store(place, Ordering::Relaxed);
        }
    }

    /// Waits until all earlier waiters have had their turns and no subscription of the channel is being
    /// ended. None is ended from then on, because the channel has a waiter.
    pub(super) async fn turn(&self) -> QueueTurn<'_> {
        let turn = self.queue().turn.lock().await;
        drop(self.subscription.ending.lock().await);
        turn
    }

    /// Records that this waiter takes offers of this share.
    pub(super) fn enable_offers(&mut self, share: Share) {
        self.takes_offers = {
            let mut contact = self.queue().contact.lock();
            if contact.taking_offers == 0 {
                contact.share = Some(share);
            }
            let takes_offers = contact.share == Some(share);
            contact.taking_offers += usize::from(takes_offers);
            takes_offers
        };
    }

    /// Returns whether a release of this client may pass the object to this waiter.
    pub(super) fn is_served_locally(&self) -> bool {
        self.takes_offers || self.claim_id > 0
    }

    pub(super) fn metrics(&self) -> &Metrics {
        self.queues.metrics()
    }

    /// Lets a release claim this waiter.
    pub(super) fn enable_claim(&mut self, claim: TransferClaim) {
        let mut contact = self.queue().contact.lock();
        contact.latest_claim += 1;
        let id = contact.latest_claim;
        contact.claims.push_back((id, claim));
        contact.share.get_or_insert(Share::Whole);
        drop(contact);
        self.claim_id = id;
    }

    /// Takes what another request of this client has offered, if there is anything. Drops the offer of a whole object if that
    /// may have been released since: the store then decides which owner holds it.
    pub(super) fn take_offer(&self) -> Option<Counted<Offer>> {
        let unclaimed = self.queue().offers.lock().unclaimed.pop_front()?;
        let is_valid = unclaimed.share != Share::Whole || self.answer_is_current();
        is_valid.then_some(unclaimed.offer)
    }

    /// Returns whether the object was not released since the latest answer.
    pub(super) fn answer_is_current(&self) -> bool {
        self.queue().contact.lock().is_current()
    }

    fn has_offer(&self) -> bool {
        !self.queue().offers.lock().unclaimed.is_empty()
    }

    /// Waits until a message was published since [`Waiter::take_wakeups`], there is an offer, or the connection
    /// broke.
    pub(super) async fn woken(&self) {
        // One notification may be for several offers, and an earlier waiter may have taken the offer of another one.
        let is_released = || self.queue().contact.lock().maybe_released_at.is_some();
        let is_woken = || self.has_offer() || is_released();
        wait_for(&self.queue().wake, || is_woken().then_some(())).await;
    }

    /// Takes the latest message; 0 if there is none.
    pub(super) fn take_message(&self) -> i64 {
        std::mem::take(&mut self.queue().contact.lock().message)
    }

    /// Waits so long that other clients can send their requests before, unless there is an offer. Returns whether clients are
    /// among them that were counted.
    pub(super) async fn let_others_go_first(&self) -> bool {
        if self.has_offer() {
            return false;
        }
        let until = self.queue().contact.lock().yielding.until(Instant::now());
        let Some((end, are_counted)) = until else {
            return false;
        };
        // Wakeups from now on are of others.
        self.take_wakeups();
        let offered = wait_for(&self.queue().wake, || self.has_offer().then_some(()));
        let _ = timeout_at(end, offered).await;
        are_counted
    }

    /// Records that no other client had its turn in the meantime.
    pub(super) fn yielded_in_vain(&self) {
        self.queue().contact.lock().yielding.in_vain();
    }

    /// Takes the pending wakeups, and makes answers from before them out of date. Returns whether there
    /// were any.
    pub(super) fn take_wakeups(&self) -> bool {
        let mut contact = self.queue().contact.lock();
        contact.disconnected = false;
        let released = contact.maybe_released_at.take();
        contact.stale_since = contact.stale_since.or(released);
        released.is_some()
    }

    /// Discards the pending wakeups, if the object was acquired after them. Returns whether there were any. If the connection
    /// broke, they are kept: only a request of the next waiter makes sure that there is one again, and that no message was
    /// missed.
    pub(super) fn discard_wakeups(&self) -> bool {
        let mut contact = self.queue().contact.lock();
        !contact.disconnected && contact.maybe_released_at.take().is_some()
    }

    pub(super) fn is_subscribed(&self) -> bool {
        *self.subscription.state.lock() == Subscribed
    }

    /// Returns whether a subscription has to be sent. If so, records that there may be one to end from now on.
    pub(super) fn begin_subscribing(&self) -> bool {
        let subscription = &self.subscription;
        subscription.change(&[NotSubscribed, EndReported], Unconfirmed) != Subscribed
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // Dropped after the locks: these refer to holds.
        let (mut _unclaimed, mut _claim) = (VecDeque::new(), None);
        if let Some(index) = self.registered.get_mut().checked_sub(1) {
            let registered = self.object.registered.lock().take(index);
            drop(registered);
        }
        let mut channels = self.queues.channels.entries.lock();
        let Some(entry) = channels.get_mut(&self.subscription.channel) else {
            return;
        };
        entry.waiters -= 1;
        let mut contact = self.queue().contact.lock();
        contact.waiters -= 1;
        contact.taking_offers -= usize::from(self.takes_offers);
        if let Ok(i) = contact
            .claims
            .binary_search_by_key(&self.claim_id, |(id, _)| *id)
        {
            _claim = contact.claims.remove(i);
        }
        if contact.waiters == 0 {
            _unclaimed = std::mem::take(&mut self.queue().offers.lock().unclaimed);
            // Later requests must contact the store themselves.
            *contact = ContactState {
                transferred_since: contact.transferred_since,
                maybe_released_at: contact.maybe_released_at,
                ..ContactState::default()
            };
        }
        drop(contact);
        if !self.object.has_waiters() {
            entry.become_idle(&self.object);
        }
        if entry.waiters > 0 {
            return;
        }
        entry.idle_since = Some(Instant::now());
        let is_running = |closer: &AbortHandle| !closer.is_finished();
        let Some(runtime) = self.queues.background.runtime() else {
            return;
        };
        if entry.closer.as_ref().is_some_and(is_running) {
            return;
        }
        // Not counted as background work: callers of `flush` do not mean to wait for this.
        let closer = runtime.spawn(task(WaitQueues::close_when_idle(
            Arc::downgrade(&self.queues.channels),
            Arc::downgrade(&self.queues.store),
            self.subscription.channel.clone(),
            self.queues.linger,
        )));
        entry.closer = Some(closer.abort_handle());
    }
}

#[cfg(test)]
impl WaitQueues {
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 2] {
        let channels = self.channels.entries.lock();
        let objects = channels.values().map(|entry| entry.objects.len());
        [("channels", channels.len()), ("objects", objects.sum())]
    }

    /// Returns the number of objects with queues on a channel.
    pub(crate) fn objects(&self, channel: &str) -> usize {
        let channels = self.channels.entries.lock();
        channels.get(channel).map_or(0, |entry| entry.objects.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::KeyLayout;

    /// In a cluster this may be the end of an earlier subscription, at another node.
    #[test]
    fn ended_subscription_may_have_to_be_ended_again() {
        let entry = ChannelEntry::new("c".into(), Metrics::default().subscription());
        let subscription = entry.subscription.clone();
        *subscription.state.lock() = Subscribed;
        let channels = ChannelMap::default();
        channels.entries.lock().insert("c".into(), entry);
        channels.on_unsubscribed("c");
        assert!(subscription.may_be_subscribed());
        *subscription.state.lock() = NotSubscribed;
        channels.on_unsubscribed("c");
        assert!(!subscription.may_be_subscribed());
    }

    const LINGER: Duration = Duration::from_secs(10);

    fn queues() -> WaitQueues {
        let channels = Arc::<ChannelMap>::default();
        let store = crate::store::embedded::Embedded::new().connect(channels.clone());
        let store = Arc::new(Store::Embedded(store));
        WaitQueues::new(channels, store, Background::default(), LINGER)
    }

    #[tokio::test(start_paused = true)]
    async fn time_of_joining_is_known_after_months() {
        let queues = queues();
        let _first = queues.join("c", "object", QueueKind::Exclusive);
        tokio::time::advance(Duration::from_secs(100 * 24 * 3600)).await;
        let before = Instant::now();
        let waiter = queues.join("c", "object", QueueKind::Exclusive);
        assert!(before - waiter.joined() < Duration::from_millis(1));
        tokio::time::advance(Duration::from_secs(7)).await;
        assert!(before - waiter.joined() < Duration::from_millis(1));
    }

    /// Returns whether a waiter is woken at once.
    async fn is_woken(waiter: &Waiter) -> bool {
        let woken = tokio::time::timeout(Duration::ZERO, waiter.woken());
        woken.await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_wake_on_messages_and_when_some_may_be_missed() {
        let queues = queues();
        let waiter = queues.join("c", "object", QueueKind::Exclusive);
        assert!(!is_woken(&waiter).await);
        queues.channels.on_message("c", 0);
        assert!(is_woken(&waiter).await && waiter.take_wakeups());
        assert!(!is_woken(&waiter).await);
        queues.channels.on_disconnect();
        assert!(is_woken(&waiter).await && waiter.take_wakeups());
        queues.channels.on_unsubscribed("c");
        assert!(is_woken(&waiter).await && waiter.take_wakeups());
        queues.channels.on_message("c", 0);
        waiter.take_wakeups();
        assert!(!is_woken(&waiter).await);
    }

    #[tokio::test(start_paused = true)]
    async fn waiter_lets_other_clients_go_first_that_have_waited_longer() {
        let queues = queues();
        let object = ObjectKeys::new(KeyLayout::Lock, "", "a");
        let waiter = queues.join(object.channel(), object.key(), QueueKind::Exclusive);
        let delay = async || {
            let begun = Instant::now();
            waiter.let_others_go_first().await;
            begun.elapsed().as_millis()
        };
        assert_eq!(delay().await, 0);
        for (others, delays) in [(3, [3, 2, 1, 0]), (100, [5, 4, 3, 2]), (0, [0; 4])] {
            queues.yield_to(&object, Yields::counted(others));
            for expected in delays {
                // First that of the client's own release.
                queues.channels.on_message(object.channel(), 0);
                assert_eq!(delay().await, expected);
            }
        }
        // None of them has waited, so they do not go first for a while.
        waiter.yielded_in_vain();
        queues.yield_to(&object, Yields::counted(1));
        queues.channels.on_message(object.channel(), 0);
        assert_eq!(delay().await, 0);
    }

    /// The release of a write lock publishes two messages, of which one counts, also if its waiters take no offers.
    #[tokio::test(start_paused = true)]
    async fn waiter_that_can_be_claimed_counts_one_message_of_a_writer() {
        let queues = queues();
        let waiter = claimable(&queues);
        queues.yield_to(&object(), Yields::counted(2));
        for expected in [2, 1, 0] {
            for message in [1, 0] {
                queues.channels.on_message(object().channel(), message);
            }
            let begun = Instant::now();
            waiter.let_others_go_first().await;
            assert_eq!(begun.elapsed().as_millis(), expected);
        }
    }

    /// A release of permits publishes their number. An offer ends the delay.
    #[tokio::test(start_paused = true)]
    async fn waiter_for_permits_lets_others_go_first_unless_it_gets_an_offer() {
        let queues = queues();
        let object = ObjectKeys::new(KeyLayout::Semaphore, "", "a");
        let one = Share::Permits(1);
        let mut waiter = queues.join(object.channel(), object.key(), QueueKind::Exclusive);
        waiter.enable_offers(one);
        queues.yield_to(&object, Yields::counted(2));
        for expected in [2, 1, 0] {
            queues.channels.on_message(object.channel(), 7);
            let begun = Instant::now();
            waiter.let_others_go_first().await;
            assert_eq!(begun.elapsed().as_millis(), expected);
        }
        queues.yield_to(&object, Yields::counted(2));
        let begun = Instant::now();
        let offer = async { queues.offer(&object, one, |_| Some(Counted::for_test(Box::new(())))) };
        let (was_delayed, is_offered) = tokio::join!(waiter.let_others_go_first(), offer);
        assert!(was_delayed && is_offered);
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert!(waiter.take_offer().is_some() && waiter.take_offer().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn subscription_is_sent_until_confirmed_and_again_after_its_end() {
        let queues = queues();
        let waiter = queues.join("c", "object", QueueKind::Exclusive);
        assert!(waiter.begin_subscribing() && waiter.begin_subscribing());
        queues.channels.confirm(waiter.channel());
        assert!(!waiter.begin_subscribing());
        queues.channels.on_unsubscribed("c");
        // The answer to a request without a subscription confirms none.
        queues.channels.confirm(waiter.channel());
        assert!(!waiter.is_subscribed() && waiter.begin_subscribing());
    }

    /// Feared most: the request relies on the subscription of another one, which is not there yet, and misses a message.
    #[tokio::test(start_paused = true)]
    async fn answer_from_before_the_end_of_a_subscription_does_not_confirm_the_next_one() {
        let queues = queues();
        let [first, second] =
            [QueueKind::Exclusive, QueueKind::Shared].map(|kind| queues.join("c", "object", kind));
        assert!(first.begin_subscribing());
        let ends = queues.channels.subscription_ends("c");
        queues.channels.on_unsubscribed("c");
        assert!(second.begin_subscribing());
        queues.channels.on_subscribed("c", ends);
        assert!(!first.is_subscribed() && first.begin_subscribing());
        queues.channels.confirm("c");
        assert!(second.is_subscribed());
    }

    /// A release may have freed the object that the earlier answer called held.
    #[tokio::test(start_paused = true)]
    async fn request_that_joins_after_message_has_no_answer_until_store_answers() {
        let queues = queues();
        let waiter = queues.join("c", "object", QueueKind::Exclusive);
        let has_contact = |since| {
            matches!(
                waiter.contacts().contact_since(since),
                Some(LastContact::Answered)
            )
        };
        let tick = || tokio::time::sleep(Duration::from_millis(1));
        let before = Instant::now();
        tick().await;
        queues.channels.on_message("c", 0);
        let after = Instant::now();
        assert!(has_contact(before) && !has_contact(after));
        assert!(waiter.take_wakeups());
        waiter.request_started();
        assert!(!has_contact(after));
        tick().await;
        queues.channels.on_message("c", 0);
        let during = Instant::now();
        waiter.request_ended(Some(LastContact::Answered));
        assert!(has_contact(after) && !has_contact(during));
        waiter.take_wakeups();
        waiter.request_started();
        waiter.request_ended(Some(LastContact::Answered));
        assert!(has_contact(during));
    }

    #[test]
    fn subscription_being_ended_is_not_used() {
        let subscription =
            ChannelEntry::new("c".into(), Metrics::default().subscription()).subscription;
        *subscription.state.lock() = Subscribed;
        subscription.begin_ending();
        assert!(subscription.may_be_subscribed());
        assert_ne!(*subscription.state.lock(), Subscribed);
    }

    #[test]
    fn channel_is_removed_unless_waiter_joins() {
        let channels = ChannelMap::default();
        let entry = ChannelEntry::new("c".into(), Metrics::default().subscription());
        channels.entries.lock().insert("c".into(), entry);
        channels.entries.lock().get_mut("c").unwrap().waiters = 1;
        channels.closed("c");
        assert_eq!(channels.entries.lock().len(), 1);
        channels.entries.lock().get_mut("c").unwrap().waiters = 0;
        channels.closed("c");
        assert_eq!(channels.entries.lock().len(), 0);
    }

    /// A waiter that joins and leaves within the linger time restarts it, with the same task.
    #[tokio::test(start_paused = true)]
    async fn linger_time_starts_after_last_waiter() {
        let queues = queues();
        for _ in 0..3 {
            let waiter = queues.join("c", "object", QueueKind::Exclusive);
            waiter.begin_subscribing();
            queues.channels.confirm(waiter.channel());
            drop(waiter);
            tokio::time::sleep(LINGER / 2).await;
            let tasks = tokio::runtime::Handle::current()
                .metrics()
                .num_alive_tasks();
            assert_eq!((queues.subscriptions(), tasks), (1, 1));
        }
        tokio::time::sleep(LINGER / 2 - Duration::from_millis(10)).await;
        assert_eq!(queues.subscriptions(), 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(queues.subscriptions(), 0);
        assert!(queues.channels.entries.lock().is_empty());
    }

    /// The values of a group share a channel.
    #[tokio::test(start_paused = true)]
    async fn objects_without_waiters_go_while_the_channel_has_waiters() {
        let queues = queues();
        let join = |object: &str| queues.join("c", object, QueueKind::Exclusive);
        let _waits = [join("a"), join("z")];
        for value in 0..1000 {
            let waiter = join(&format!("value {value}"));
            assert_eq!(queues.objects("c"), 3 + value.min(MAX_IDLE));
            drop(waiter);
        }
        // The latest keep what they know.
        let is_known = |value| queues.has_queue("c", &format!("value {value}"));
        assert!(is_known(999) && is_known(1000 - MAX_IDLE) && !is_known(999 - MAX_IDLE));
        // Each waiter makes its object the latest.
        let again = join(&format!("value {}", 1000 - MAX_IDLE));
        drop((again, join("another")));
        assert!(is_known(1000 - MAX_IDLE) && !is_known(1001 - MAX_IDLE));
        let [first, last] = ["a", "z"].map(|object| queues.has_queue("c", object));
        assert!(first && last);
    }

    /// The release that has claimed its waiter may still take effect.
    #[tokio::test(start_paused = true)]
    async fn object_with_transfer_in_flight_stays() {
        let (queues, object) = (queues(), object());
        let channel = object.channel();
        let _waits = queues.join(channel, "waits", QueueKind::Exclusive);
        let waiter = claimable(&queues);
        let mut claimed = queues.claim_first(&object).unwrap();
        claimed.request_started();
        drop(waiter);
        let idle = || {
            for value in 0..2 * MAX_IDLE {
                queues.join(channel, &format!("{value}"), QueueKind::Exclusive);
            }
        };
        idle();
        assert!(queues.has_queue(channel, object.key()));
        drop(claimed);
        idle();
        assert!(!queues.has_queue(channel, object.key()));
        assert_eq!(queues.objects(channel), 1 + MAX_IDLE);
    }

    fn object() -> ObjectKeys {
        ObjectKeys::new(KeyLayout::Lock, "", "a")
    }

    fn waiter(queues: &WaitQueues, kind: QueueKind, takes_offers: bool) -> Waiter {
        let object = object();
        let mut waiter = queues.join(object.channel(), object.key(), kind);
        if takes_offers {
            waiter.enable_offers(Share::Whole);
        }
        waiter
    }

    /// Makes an offer that counts how many references to it are left, unless it is refused.
    fn offer(queues: &WaitQueues) -> Option<std::sync::Weak<()>> {
        let offered = Arc::new(());
        let weak = Arc::downgrade(&offered);
        queues
            .offer(&object(), Share::Whole, |_| {
                Some(Counted::for_test(Box::new(offered)))
            })
            .then_some(weak)
    }

    #[tokio::test(start_paused = true)]
    async fn offer_is_refused_unless_all_waiters_take_it() {
        use QueueKind::{Exclusive, Shared};
        let queues = queues();
        assert!(offer(&queues).is_none(), "no queue");
        drop(waiter(&queues, Exclusive, true));
        assert!(offer(&queues).is_none(), "no waiter");
        for (kind, takes_offers) in [(Exclusive, false), (Shared, false)] {
            let other = waiter(&queues, kind, takes_offers);
            let taker = waiter(&queues, Exclusive, true);
            let second = waiter(&queues, Exclusive, true);
            assert!(offer(&queues).is_none() && !is_woken(&taker).await);
            drop((other, second));
            assert!(offer(&queues).is_some() && is_woken(&taker).await);
        }
        let _taker = waiter(&queues, Exclusive, true);
        assert!(!queues.offer(&object(), Share::Whole, |_| None));
    }

    /// After a release, and while a request is in flight, the store decides which owner holds the object.
    #[tokio::test(start_paused = true)]
    async fn offer_is_refused_and_not_taken_if_object_may_have_been_released() {
        let queues = queues();
        let taker = waiter(&queues, QueueKind::Exclusive, true);
        assert!(taker.take_offer().is_none());
        assert!(offer(&queues).is_some());
        assert!(taker.take_offer().is_some() && taker.take_offer().is_none());
        let offered = offer(&queues).unwrap();
        queues.wake(object().channel());
        assert!(taker.take_offer().is_none());
        assert_eq!(offered.strong_count(), 0);
        assert!(offer(&queues).is_none(), "released");
        taker.take_wakeups();
        taker.request_started();
        assert!(offer(&queues).is_none(), "in flight");
        taker.request_ended(Some(LastContact::Answered));
        assert!(offer(&queues).is_some(), "answered");
    }

    #[tokio::test(start_paused = true)]
    async fn waiter_whose_request_is_in_flight_is_offered_no_permits() {
        let queues = queues();
        let permits = Share::Permits(1);
        let mut taker = queues.join(object().channel(), object().key(), QueueKind::Exclusive);
        taker.enable_offers(permits);
        let offer = || {
            queues.offer(&object(), permits, |_| {
                Some(Counted::for_test(Box::new(())))
            })
        };
        let sending = taker.sending();
        assert!(!offer(), "it may need none");
        let mut other = queues.join(object().channel(), object().key(), QueueKind::Exclusive);
        other.enable_offers(permits);
        assert!(offer() && !offer());
        assert!(taker.take_offer().is_some());
        drop((sending, other));
        queues.wake(object().channel());
        assert!(offer(), "others may have been released");
    }

    #[tokio::test(start_paused = true)]
    async fn offer_that_is_not_taken_is_dropped_after_10_ms() {
        let queues = queues();
        let _taker = waiter(&queues, QueueKind::Exclusive, true);
        let millis = Duration::from_millis;
        for _ in 0..2 {
            let first = offer(&queues).unwrap();
            tokio::time::sleep(millis(6)).await;
            let second = offer(&queues).unwrap();
            assert_eq!(first.strong_count(), 0, "replaced");
            tokio::time::sleep(millis(9)).await;
            assert_eq!(second.strong_count(), 1);
            tokio::time::sleep(millis(6)).await;
            assert_eq!(second.strong_count(), 0);
        }
        // It is noticed when it is due.
        let only = offer(&queues).unwrap();
        tokio::time::sleep(millis(11)).await;
        assert_eq!(only.strong_count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn last_waiter_drops_offer() {
        let queues = queues();
        let takers = [(); 2].map(|()| waiter(&queues, QueueKind::Exclusive, true));
        let offered = offer(&queues).unwrap();
        let [first, last] = takers;
        drop(first);
        assert_eq!(offered.strong_count(), 1);
        drop(last);
        assert_eq!(offered.strong_count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn waiter_with_offer_does_not_let_others_go_first() {
        let queues = queues();
        let taker = waiter(&queues, QueueKind::Exclusive, true);
        queues.yield_to(&object(), Yields::counted(3));
        offer(&queues).unwrap();
        let begun = Instant::now();
        assert!(!taker.let_others_go_first().await && begun.elapsed().is_zero());
        assert!(taker.take_offer().is_some());
        assert!(taker.let_others_go_first().await && !begun.elapsed().is_zero());
        // Its wakeups from before are taken: what wakes it now is the release of another client.
        queues.wake(object().channel());
        assert!(taker.let_others_go_first().await && !taker.take_wakeups());
        // A queue without waiters lets no client go first.
        drop(taker);
        queues.yield_to(&object(), Yields::counted(3));
        let taker = waiter(&queues, QueueKind::Exclusive, true);
        assert!(!taker.let_others_go_first().await);
    }

    #[tokio::test(start_paused = true)]
    async fn wakeups_are_taken_or_discarded_once() {
        let queues = queues();
        let waiter = waiter(&queues, QueueKind::Exclusive, false);
        let channel = object().channel().to_owned();
        for take in [Waiter::take_wakeups, Waiter::discard_wakeups] {
            assert!(!take(&waiter));
            queues.wake(&channel);
            assert!(take(&waiter) && !take(&waiter) && !is_woken(&waiter).await);
            // Released by this client: the message follows.
            queues.record_release(&channel);
            assert!(take(&waiter) && !take(&waiter));
        }
        queues.channels.on_disconnect();
        assert!(!waiter.discard_wakeups(), "kept for the next request");
        assert!(is_woken(&waiter).await && waiter.take_wakeups());
        queues.wake(&channel);
        assert!(waiter.discard_wakeups());
    }

    /// A waiter that a release may claim.
    fn claimable(queues: &WaitQueues) -> Waiter {
        let mut waiter = waiter(queues, QueueKind::Exclusive, false);
        let (hold, lease) = (Arc::new(()), Lease::WATCHDOG);
        waiter.enable_claim(TransferClaim { hold, lease });
        waiter
    }

    #[tokio::test(start_paused = true)]
    async fn first_waiter_is_claimed_if_all_can_be_and_no_request_is_in_flight() {
        let (queues, object) = (queues(), object());
        let claimable = || claimable(&queues);
        let is_refused = || queues.claim_first(&object).is_none();
        for other in [QueueKind::Exclusive, QueueKind::Shared] {
            let first = claimable();
            let other = waiter(&queues, other, false);
            assert!(first.is_served_locally() && !other.is_served_locally());
            assert!(is_refused());
        }
        let first = claimable();
        first.request_started();
        assert!(is_refused());
        first.request_ended(Some(LastContact::Answered));
        let mut claimed = queues.claim_first(&object).unwrap();
        assert!(is_refused(), "its claim is taken");
        assert!(first.answer_is_current(), "nothing was sent");
        claimed.request_started();
        assert!(!first.answer_is_current());
        // Without an answer, the object may have been released.
        drop(claimed);
        assert!(first.take_wakeups() && first.take_offer().is_none());
        drop(first);
        let first = claimable();
        let mut claimed = queues.claim_first(&object).unwrap();
        claimed.request_started();
        claimed.offer(Counted::for_test(Box::new(())));
        assert!(first.answer_is_current() && first.take_offer().is_some());
    }

    /// The transfer may release the object before it is answered. Neither the answer to another request nor the departure of all
    /// waiters changes that.
    #[tokio::test(start_paused = true)]
    async fn no_answer_is_current_while_transfer_is_in_flight() {
        let (queues, object) = (queues(), object());
        for all_leave in [false, true] {
            let mut waiter = claimable(&queues);
            let mut claimed = queues.claim_first(&object).unwrap();
            claimed.request_started();
            if all_leave {
                drop(waiter);
                waiter = claimable(&queues);
            }
            waiter.request_started();
            waiter.request_ended(Some(LastContact::Answered));
            let contacts = waiter.contacts();
            assert!(contacts.contact_since(Instant::now()).is_none());
            assert!(!waiter.answer_is_current() && queues.claim_first(&object).is_none());
            drop(claimed);
            assert!(waiter.take_wakeups());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn latest_message_is_taken_once() {
        let queues = queues();
        let waiter = waiter(&queues, QueueKind::Exclusive, false);
        for message in [7, 8] {
            queues.channels.on_message(object().channel(), message);
        }
        assert_eq!((waiter.take_message(), waiter.take_message()), (8, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn channel_is_subscribed_once_confirmed() {
        let (queues, channel) = (queues(), object().channel().to_owned());
        assert!(!queues.is_subscribed(&channel));
        let waiter = waiter(&queues, QueueKind::Exclusive, false);
        waiter.begin_subscribing();
        assert!(!queues.is_subscribed(&channel));
        queues.channels.confirm(waiter.channel());
        assert!(queues.is_subscribed(&channel) && !queues.is_subscribed("another"));
    }
}
