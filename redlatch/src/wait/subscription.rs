//! The channels of one client: one subscription for each, and the queues of the objects that are
//! waited for.
//!
//! Redisson's layout gives two objects one channel: `a` and `{a}`. Each has queues of its own, so a
//! waiter never waits behind a waiter for the other object. They share the subscription:
//!
//! 1. A waiter that is refused joins a queue of its object. The first one subscribes when it has
//!    the turn.
//! 2. A message on the channel wakes the first waiter of every queue. So does a broken connection,
//!    because messages may have been missed.
//! 3. The last waiter of the channel starts a task that ends the subscription after the linger
//!    time, unless a waiter joins before.
//! 4. An object without waiters keeps its queues, because they know when to expect the next
//!    release: but only the latest [`MAX_IDLE`] of a channel. The values of a group share a channel
//!    that may never be idle, and a message visits all objects of its channel. A waiter of an
//!    object that has no queues any more asks the store.
//! 5. While the subscription is being ended, the first waiters of the channel send nothing
//!    (`Subscription::ending`), so that ending and subscribing cannot cross.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use self::SubscriptionState::{EndReported, NotSubscribed, Subscribed, Unconfirmed};
use super::object::ObjectQueues;
use crate::background::StartedTask;
use crate::metrics::{Metrics, SubscriptionCount};
use crate::name::ObjectKeys;
use crate::store::{Store, Subscriber};
use crate::sync::Mutex;

/// The subscriptions and wait queues by channel. Receives the messages of the store.
#[derive(Default)]
pub(crate) struct ChannelMap {
    entries: Mutex<BTreeMap<Arc<str>, ChannelEntry>>,
    /// Number of entries. Saves most requests, which find no waiters, from locking the map.
    len: AtomicUsize,
    pub(crate) metrics: Metrics,
}

/// One channel: its subscription, and the objects with waiters on it.
pub(super) struct ChannelEntry {
    pub(super) subscription: Arc<Subscription>,
    /// The objects with waiters, and the latest without, in the order of their keys: usually one.
    objects: Vec<Arc<ObjectQueues>>,
    /// Those without waiters, the oldest first.
    idle: VecDeque<Arc<ObjectQueues>>,
    /// Number of waiters on this channel, including the first of each queue.
    waiters: usize,
    /// When the last waiter left.
    idle_since: Option<Instant>,
    /// The task that ends the subscription after the linger time.
    closer: StartedTask,
}

pub(super) struct Subscription {
    pub(super) channel: Arc<str>,
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
    /// The store reported the end of the subscription. In a cluster that may be the end of an
    /// earlier subscription, at the node that had the slot before. So there may be a subscription
    /// to end.
    EndReported,
}

/// How many objects of a channel keep their queues without waiters.
const MAX_IDLE: usize = 16;

/// Whether the subscription of a channel can be ended.
enum Ready {
    /// Not before then.
    Later(Instant),
    /// It has waiters again, or is gone.
    No,
    /// New waiters wait until the second value is dropped.
    Now(Arc<Subscription>, tokio::sync::OwnedMutexGuard<()>),
}

impl ChannelMap {
    pub(crate) fn new(metrics: Metrics) -> ChannelMap {
        ChannelMap {
            metrics,
            ..ChannelMap::default()
        }
    }

    /// Returns whether nothing waits in this client, and no subscription lingers. An entry that
    /// another thread is about to add may be missed.
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    fn lock_unless_empty(&self) -> Option<MutexGuard<'_, BTreeMap<Arc<str>, ChannelEntry>>> {
        (!self.is_empty()).then(|| self.entries.lock())
    }

    /// Accesses a channel, if there is any.
    pub(super) fn find<T>(
        &self,
        channel: &str,
        access: impl FnOnce(&mut ChannelEntry) -> T,
    ) -> Option<T> {
        let mut channels = self.lock_unless_empty()?;
        channels.get_mut(channel).map(access)
    }

    /// Accesses a channel, which is created if there is none.
    pub(super) fn find_or_add<T>(
        &self,
        channel: &str,
        access: impl FnOnce(&mut ChannelEntry) -> T,
    ) -> T {
        let mut channels = self.entries.lock();
        let channel: Arc<str> = channel.into();
        let entry = channels
            .entry(channel.clone())
            .or_insert_with(|| ChannelEntry::new(channel, self.metrics.subscription()));
        let accessed = access(entry);
        self.len.store(channels.len(), Ordering::Release);
        accessed
    }

    /// Returns the queues of an object, if it has any.
    pub(super) fn queues_of(&self, object: &ObjectKeys) -> Option<Arc<ObjectQueues>> {
        let find = |entry: &mut ChannelEntry| entry.find(object.identity()).cloned();
        self.find(object.channel(), find).flatten()
    }

    /// Returns the queues of all objects.
    pub(super) fn objects(&self) -> Vec<Arc<ObjectQueues>> {
        let channels = self.entries.lock();
        let objects = channels.values().flat_map(|entry| &entry.objects);
        objects.cloned().collect()
    }

    /// Returns whether this client subscribes to a channel.
    pub(crate) fn is_subscribed(&self, channel: &str) -> bool {
        self.find(channel, |entry| entry.subscription.is_subscribed()) == Some(true)
    }

    /// Returns whether a request for `object` joins a queue: it has waiters, or had some since the
    /// subscription began.
    pub(crate) fn has_queue(&self, channel: &str, object: &str) -> bool {
        self.find(channel, |entry| entry.find(object).is_some()) == Some(true)
    }

    /// Returns whether a request for `object` waits in a queue.
    pub(crate) fn has_waiters(&self, channel: &str, object: &str) -> bool {
        let waits = |queues: &Arc<ObjectQueues>| !queues.lock().queues.is_empty();
        self.find(channel, |entry| entry.find(object).is_some_and(waits)) == Some(true)
    }

    /// Returns the number of subscribed channels, in use or lingering. Spin locks have none.
    pub(crate) fn subscriptions(&self) -> usize {
        let channels = self.entries.lock();
        let subscribed = |entry: &&ChannelEntry| entry.subscription.may_be_subscribed();
        channels.values().filter(subscribed).count()
    }

    /// Records a message for the objects of a channel, and wakes the first waiters.
    pub(super) fn wake(&self, channel: &str, message: i64) {
        let mut woken = Vec::new();
        if let Some(entry) = self.entries.lock().get(channel) {
            entry.wake(message, &mut woken);
        }
        woken.into_iter().for_each(Waker::wake);
    }

    fn ready_to_close(&self, channel: &str, linger: Duration) -> Ready {
        let mut channels = self.entries.lock();
        let Some(entry) = channels.get_mut(channel) else {
            return Ready::No;
        };
        let Some(idle_since) = entry.idle_since.filter(|_| entry.waiters == 0) else {
            entry.closer = StartedTask::default();
            return Ready::No;
        };
        if idle_since + linger > Instant::now() {
            return Ready::Later(idle_since + linger);
        }
        // The channel has no waiter, and none can join until this returns, so no waiter holds this
        // lock.
        let Ok(ending) = entry.subscription.ending.clone().try_lock_owned() else {
            return Ready::Later(Instant::now() + linger);
        };
        // A queue knows when to expect the next release only if it has received every release so
        // far.
        entry.objects.clear();
        entry.idle.clear();
        entry.subscription.begin_ending();
        Ready::Now(entry.subscription.clone(), ending)
    }

    /// Records that the subscription has ended. Removes the channel unless a waiter has joined
    /// meanwhile.
    fn closed(&self, channel: &str) {
        let mut channels = self.entries.lock();
        match channels.get_mut(channel) {
            Some(entry) if entry.waiters > 0 => entry.closer = StartedTask::default(),
            _ => drop(channels.remove(channel)),
        }
        self.len.store(channels.len(), Ordering::Release);
    }

    /// Ends the subscription of a channel that had no waiter for the linger time. So repeated
    /// waiting for a lock does not subscribe each time.
    pub(super) fn close_when_idle(
        self: &Arc<ChannelMap>,
        store: &Arc<Store>,
        channel: Arc<str>,
        linger: Duration,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (channels, store) = (Arc::downgrade(self), Arc::downgrade(store));
        async move {
            let mut wake = Instant::now() + linger;
            loop {
                sleep_until(wake).await;
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
                // Sent even if no subscription is known here: a repeated step may have subscribed
                // again after the store reported the end.
                if let Err(error) = store.unsubscribe(&channel).await {
                    tracing::debug!(%channel, %error, "a subscription ended with an error");
                }
                subscription.change(&[Unconfirmed, Subscribed, EndReported], NotSubscribed);
                return channels.closed(&channel);
            }
        }
    }

    /// Records that the runtime of a closer has ended before it. If the channel has no waiter, `close`
    /// starts it again.
    pub(super) fn closer_interrupted(&self, channel: &str, close: impl FnOnce() -> StartedTask) {
        self.find(channel, |entry| {
            entry.closer = match entry.waiters {
                0 => close(),
                _ => StartedTask::default(),
            };
        });
    }

    /// Records that a waiter leaves. `leave` returns whether it was the last one for its object.
    /// Behind the last one of the channel, `close` starts the
    /// [closer](ChannelMap::close_when_idle), unless it runs.
    pub(super) fn leave<T>(
        &self,
        channel: &str,
        object: &Arc<ObjectQueues>,
        leave: impl FnOnce() -> (bool, T),
        close: impl FnOnce() -> StartedTask,
    ) -> Option<T> {
        let mut channels = self.entries.lock();
        let entry = channels.get_mut(channel)?;
        entry.waiters -= 1;
        let (is_idle, left) = leave();
        if is_idle {
            entry.become_idle(object);
        }
        if entry.waiters == 0 {
            entry.idle_since = Some(Instant::now());
            if !entry.closer.is_running() {
                entry.closer = close();
            }
        }
        Some(left)
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> [(&'static str, usize); 2] {
        let channels = self.entries.lock();
        let objects = channels.values().map(|entry| entry.objects.len());
        [("channels", channels.len()), ("objects", objects.sum())]
    }

    /// Handles the answer to a step that was sent just now.
    #[cfg(test)]
    pub(super) fn confirm(&self, channel: &str) {
        self.on_subscribed(channel, self.subscription_ends(channel));
    }
}

impl Subscriber for ChannelMap {
    fn on_message(&self, channel: &str, message: &str) {
        // A message that is not a number grants nothing.
        self.wake(channel, message.parse().unwrap_or(0));
    }

    fn on_disconnect(&self) {
        let mut woken = Vec::new();
        for entry in self.entries.lock().values() {
            for object in &entry.objects {
                let wakes = object.lock().queues.disconnected(Instant::now());
                woken.extend(wakes.into_iter().flatten());
            }
        }
        woken.into_iter().for_each(Waker::wake);
    }

    /// Not if the subscription has ended since: another request may have begun one again, which is
    /// not confirmed yet.
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
        }
        self.wake(channel, 0);
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
            closer: StartedTask::default(),
        }
    }

    /// Returns the index of the object with this key; without one, that of the first object behind
    /// it.
    fn position(&self, key: &str) -> Result<usize, usize> {
        self.objects
            .binary_search_by(|object| (*object.key).cmp(key))
    }

    pub(super) fn find(&self, key: &str) -> Option<&Arc<ObjectQueues>> {
        self.objects.get(self.position(key).ok()?)
    }

    /// Returns the object with this key, which is created if there is none, for a waiter that
    /// joins.
    pub(super) fn join(&mut self, key: &str) -> Arc<ObjectQueues> {
        self.waiters += 1;
        let position = match self.position(key) {
            Ok(found) => {
                let object = self.objects[found].clone();
                self.idle.retain(|idle| !Arc::ptr_eq(idle, &object));
                return object;
            }
            Err(position) => position,
        };
        let object = Arc::new(ObjectQueues::new(key));
        self.objects.insert(position, object.clone());
        object
    }

    /// Records that an object has no waiters any more.
    fn become_idle(&mut self, object: &Arc<ObjectQueues>) {
        // No other waiter joins it.
        if object.is_private() {
            return self.forget(object);
        }
        self.idle.push_back(object.clone());
        for _ in MAX_IDLE..self.idle.len() {
            match self.idle.pop_front() {
                Some(oldest) if oldest.lock().queues.exclusive().has_handoff_in_flight() => {
                    self.idle.push_back(oldest)
                }
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

    pub(super) fn record_release(&self) {
        for object in &self.objects {
            object.lock().queues.released(Instant::now());
        }
    }

    fn wake(&self, message: i64, woken: &mut Vec<Waker>) {
        for object in &self.objects {
            let wakes = object.lock().queues.message(message, Instant::now());
            woken.extend(wakes.into_iter().flatten());
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

    pub(super) fn is_subscribed(&self) -> bool {
        *self.state.lock() == Subscribed
    }

    /// Returns whether a subscription has to be sent. If so, records that there may be one to end
    /// from now on.
    pub(super) fn begin(&self) -> bool {
        self.change(&[NotSubscribed, EndReported], Unconfirmed) != Subscribed
    }

    /// From here on it is unknown whether the subscription exists, even if ending it is
    /// interrupted.
    fn begin_ending(&self) {
        self.change(&[Subscribed], Unconfirmed);
    }

    /// Waits while a task ends the subscription. As long as the channel has a waiter, no task ends
    /// it again.
    pub(super) async fn wait_while_ending(&self) {
        drop(self.ending.lock().await);
    }
}

#[cfg(test)]
mod tests;
