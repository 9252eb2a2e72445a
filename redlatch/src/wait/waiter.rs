//! A waiter, and the wakers and timers around [`Queues`](super::queue::Queues), which decides.

use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Id;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::object::{Claim, ClientQueues, ObjectQueues, Offer};
use super::queue::{Next, Queue, ServedBy, Turn};
use super::subscription::{ChannelEntry, ChannelMap, Subscription};
use super::{Place, Request};
use crate::background::{Background, Counted, StartedTask};
use crate::client_registry::RegisteredWait;
use crate::environment::random_fraction;
use crate::hold::{QueueKind, Share, Yields};
use crate::metrics::Metrics;
use crate::name::ObjectKeys;
use crate::store::{ContactSource, LastContact, Store};
use crate::sync::Mutex;

/// All wait queues of one client.
#[derive(Clone)]
pub(crate) struct WaitQueues(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) channels: Arc<ChannelMap>,
    pub(super) store: Arc<Store>,
    background: Background,
    linger: Duration,
    /// When a waiter last found the store in an outage.
    pub(super) last_outage: Mutex<Option<Instant>>,
}

impl Deref for WaitQueues {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// A waiter in a queue. Leaves the queue when dropped.
pub(super) struct Waiter {
    queues: WaitQueues,
    pub(super) subscription: Arc<Subscription>,
    object: Arc<ObjectQueues>,
    kind: QueueKind,
    number: u64,
    /// When it has joined the queue.
    pub(super) joined: Instant,
    registered: OnceLock<Box<RegisteredWait>>,
}

/// The first waiter of a queue, claimed by a release that sends a request for it.
pub(crate) struct ClaimedWaiter {
    pub(crate) claim: Claim,
    /// When the request was sent, if it was. Then dropping this means that the object may have been
    /// released.
    sent_at: Option<Instant>,
    queues: WaitQueues,
    object: Arc<ObjectQueues>,
}

impl ClaimedWaiter {
    /// Records that the request is about to be sent.
    pub(crate) fn request_started(&mut self) {
        let mut state = self.object.lock();
        let now = Instant::now();
        state.queues.exclusive().handoff_started(now);
        self.sent_at = Some(now);
    }

    /// Offers the waiter the object, which the store has granted to it.
    pub(crate) fn offer(mut self, offer: Counted<Offer>) {
        let sent_at = self.sent_at.take();
        let outdated = self.queues.change(&self.object, |queues| {
            let queue = queues.exclusive();
            Some(queue.handed_off(sent_at, offer, Instant::now()))
        });
        drop(outdated);
    }
}

impl Drop for ClaimedWaiter {
    fn drop(&mut self) {
        let mut state = self.object.lock();
        state.queues.exclusive().handoff_ended(self.sent_at);
    }
}

impl WaitQueues {
    pub(crate) fn new(
        channels: Arc<ChannelMap>,
        store: Arc<Store>,
        background: Background,
        linger: Duration,
    ) -> WaitQueues {
        WaitQueues(Arc::new(Inner {
            channels,
            store,
            background,
            linger,
            last_outage: Mutex::default(),
        }))
    }

    /// Joins the wait queue for the object of a request, if its channel has waiters or a lingering
    /// subscription.
    pub(super) fn join_existing(&self, request: &impl Request) -> Option<Waiter> {
        let place = request.place();
        let join = |entry: &mut ChannelEntry| self.add_waiter(entry, request, &place, false);
        self.channels.find(place.channel, join)
    }

    /// Joins the wait queue for the object of a request, which is created if there is none.
    /// `answered`: whether the store has answered the request.
    pub(super) fn join(&self, request: &impl Request, answered: bool) -> Waiter {
        let place = request.place();
        let join = |entry: &mut ChannelEntry| self.add_waiter(entry, request, &place, answered);
        self.channels.find_or_add(place.channel, join)
    }

    fn add_waiter(
        &self,
        entry: &mut ChannelEntry,
        request: &impl Request,
        place: &Place<'_>,
        answered: bool,
    ) -> Waiter {
        let object = entry.join(place.object);
        let (kind, share) = (place.queue, place.share);
        let served_by = match place.takes_offers {
            true => ServedBy::Offers,
            false => request.claim().map_or(ServedBy::RequestsOnly, |claim| {
                ServedBy::Claim(Box::new(claim))
            }),
        };
        let (number, joined) = {
            let mut state = object.lock();
            let joined = Instant::now();
            if answered {
                state.queues.queue(kind).record_answer();
            }
            (state.queues.join(kind, share, served_by, joined), joined)
        };
        Waiter {
            queues: self.clone(),
            subscription: entry.subscription.clone(),
            object,
            kind,
            number,
            joined,
            registered: OnceLock::new(),
        }
    }

    /// Offers the first waiter for an object what it waits for, if all waiters [take
    /// it](Queues::takes_offer). `offer` is called then, with whether other clients waited lately.
    /// Returns whether it was offered.
    pub(crate) fn offer(
        &self,
        object: &ObjectKeys,
        share: Share,
        now: Instant,
        offer: impl FnOnce(bool) -> Option<Counted<Offer>>,
    ) -> bool {
        let Some(object) = self.channels.queues_of(object) else {
            return false;
        };
        let outdated = self.change(&object, |queues| {
            let takes_it = queues.takes_offer(share);
            let queue = queues.exclusive();
            let offer = takes_it.then(|| offer(queue.is_crowded()))??;
            Some(queue.offer(offer, share, now))
        });
        outdated.is_some()
    }

    /// Changes the queues of an object, and wakes a waiter. The caller drops the rest after the
    /// locks.
    fn change<T>(
        &self,
        object: &Arc<ObjectQueues>,
        change: impl FnOnce(&mut ClientQueues) -> Option<(Option<Waker>, T)>,
    ) -> Option<T> {
        let mut state = object.lock();
        let (wake, rest) = change(&mut state.queues)?;
        if let Some(first) = state.queues.exclusive().next_expiry()
            && !state.expiry.is_running()
        {
            state.expiry = start_expiry(&self.background, object, first, None);
        }
        drop(state);
        wake.into_iter().for_each(Waker::wake);
        Some(rest)
    }

    /// Claims the first waiter for an object, if all waiters can be claimed, none waits in the
    /// shared queue, the object was not released since the last request, and no request is in
    /// flight.
    pub(crate) fn claim_first(&self, object: &ObjectKeys) -> Option<ClaimedWaiter> {
        let object = self.channels.queues_of(object)?;
        let claim = object.lock().queues.claim_first()?;
        Some(ClaimedWaiter {
            claim,
            sent_at: None,
            queues: self.clone(),
            object,
        })
    }

    /// Lets other clients go first when the exclusive queue of the object requests it again after
    /// the release that follows.
    pub(crate) fn yield_to(&self, object: &ObjectKeys, yields: Yields) {
        if let Some(object) = self.channels.queues_of(object) {
            let mut state = object.lock();
            state.queues.exclusive().yield_to(yields, random_fraction);
        }
    }

    /// Drops all offers, which releases them in the background.
    pub(crate) fn drop_offers(&self) {
        for object in self.channels.objects() {
            let offers = object.lock().queues.exclusive().take_offers();
            drop(offers);
        }
    }

    /// Wakes the first waiter of every queue on `channel`, so that it repeats its request.
    pub(crate) fn wake(&self, channel: &str) {
        self.channels.wake(channel, 0);
    }

    /// Records that this client is about to release the objects of `channel`. For waiters that join
    /// from now on, an earlier answer no longer means that they are held. The message that wakes
    /// waiters may arrive later, on another connection.
    pub(crate) fn record_release(&self, channel: &str) {
        self.channels.find(channel, |entry| entry.record_release());
    }

    /// Starts the task that ends the subscription of a channel: again, if it ran in a runtime that has
    /// `ended`. Not counted as background work: callers of `flush` do not mean to wait for this.
    fn start_closer(&self, channel: &Arc<str>, ended: Option<Id>) -> StartedTask {
        let channels = &self.channels;
        let closing = channels.close_when_idle(&self.store, channel.clone(), self.linger);
        let (queues, channel) = (Arc::downgrade(&self.0), channel.clone());
        let restart = move |ended| {
            if let Some(queues) = queues.upgrade().map(WaitQueues) {
                let close = || queues.start_closer(&channel, Some(ended));
                queues.channels.closer_interrupted(&channel, close);
            }
        };
        self.background.start(ended, closing, restart)
    }
}

/// Starts the task that drops the offers of an object that are not taken in time: again, if it ran in a
/// runtime that has `ended`.
fn start_expiry(
    background: &Background,
    object: &Arc<ObjectQueues>,
    first: Instant,
    ended: Option<Id>,
) -> StartedTask {
    let (cloned, expiring) = (background.clone(), object.clone());
    let restart = move |ended| {
        let mut state = expiring.lock();
        let next = state.queues.exclusive().next_expiry();
        let start = |next| start_expiry(&cloned, &expiring, next, Some(ended));
        state.expiry = next.map(start).unwrap_or_default();
    };
    background.start(ended, drop_expired_offers(object.clone(), first), restart)
}

/// Drops offers that are not taken in time, until there is none.
async fn drop_expired_offers(object: Arc<ObjectQueues>, first: Instant) {
    let mut next = Some(first);
    while let Some(at) = next {
        sleep_until(at).await;
        let mut state = object.lock();
        let queue = state.queues.exclusive();
        let expired = queue.expired_offers(Instant::now());
        next = queue.next_expiry();
        if next.is_none() {
            state.expiry = StartedTask::default();
        }
        drop(state);
        drop(expired);
    }
}

/// Shares the contacts of one queue with its waiters.
#[derive(Debug)]
struct QueueContacts {
    object: Arc<ObjectQueues>,
    kind: QueueKind,
}

impl ContactSource for QueueContacts {
    fn contact_since(&self, since: Instant) -> Option<LastContact> {
        self.object.lock().queues.contact_since(self.kind, since)
    }
}

impl Waiter {
    pub(super) fn channel(&self) -> &str {
        &self.subscription.channel
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.queues.channels.metrics
    }

    pub(super) fn contacts(&self) -> Arc<dyn ContactSource> {
        Arc::new(QueueContacts {
            object: self.object.clone(),
            kind: self.kind,
        })
    }

    /// Accesses the queue of this waiter.
    pub(super) fn queue<T>(
        &self,
        access: impl FnOnce(&mut Queue<Waker, Counted<Offer>, Claim>) -> T,
    ) -> T {
        access(self.object.lock().queues.queue(self.kind))
    }

    /// Waits for something to do, as a waiter that is not the first yet. `now`: if the time is known.
    pub(super) fn turn(&self, mut now: Option<Instant>) -> impl Future<Output = Turn> {
        poll_fn(move |cx| {
            let now = now.take().unwrap_or_else(Instant::now);
            let is_subscribed = self.subscription.is_subscribed();
            let (kind, number) = (self.kind, self.number);
            let turn = |queues: &mut ClientQueues| queues.turn(kind, number, now, is_subscribed);
            match self.decide(cx, turn, |turn| matches!(turn, Turn::Sleep)) {
                Turn::Sleep => Poll::Pending,
                turn => Poll::Ready(turn),
            }
        })
    }

    /// Waits for something to do, as the first waiter. Returns when that was decided, too.
    pub(super) async fn next(&self) -> (Next<Counted<Offer>>, Instant) {
        loop {
            let now = Instant::now();
            let next = |queues: &mut ClientQueues| queues.queue(self.kind).next(now);
            let sleeps = |next: &_| matches!(next, Next::Sleep(_));
            let next = poll_fn(|cx| Poll::Ready(self.decide(cx, next, sleeps))).await;
            let waking = poll_fn(|cx| self.poll_woken(cx));
            match next {
                Next::Sleep(Some(until)) => drop(timeout_at(until, waking).await),
                Next::Sleep(None) => waking.await,
                next => return (next, now),
            }
        }
    }

    /// Has the queues decide what this waiter does. If it sleeps, `cx` is woken.
    fn decide<T>(
        &self,
        cx: &Context<'_>,
        decide: impl FnOnce(&mut ClientQueues) -> T,
        sleeps: impl FnOnce(&T) -> bool,
    ) -> T {
        let mut state = self.object.lock();
        let decided = decide(&mut state.queues);
        let wake = sleeps(&decided).then(|| cx.waker().clone());
        let sleeper = state.queues.queue(self.kind).sleeper(self.number);
        let replaced = sleeper.map(|sleeper| std::mem::replace(sleeper, wake));
        drop(state);
        drop(replaced);
        decided
    }

    fn poll_woken(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.object.lock();
        let Some(Some(wake)) = state.queues.queue(self.kind).sleeper(self.number) else {
            return Poll::Ready(());
        };
        let is_other = !wake.will_wake(cx.waker());
        let replaced = is_other.then(|| std::mem::replace(wake, cx.waker().clone()));
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    /// Records that the request has ended, with its last contact with the store.
    pub(super) fn request_ended(&self, last: Option<LastContact>) {
        self.object.lock().queues.answered(self.kind, last);
    }

    /// Reports to all waiters for the object that the store cannot be reached.
    pub(super) fn fail_all(&self) {
        let wakes = self.object.lock().queues.fail_all();
        wakes.into_iter().for_each(Waker::wake);
    }

    /// Reminds the waiters behind this one that they may have waited long, if any could register
    /// its wait.
    pub(super) fn remind_others(&self) {
        if self
            .registered
            .get()
            .is_some_and(|wait| wait.has_room_for_more())
        {
            let wakes = self.object.lock().queues.remind_all(Instant::now());
            wakes.into_iter().for_each(Waker::wake);
        }
    }

    /// Registers the wait. Returns whether it is registered.
    pub(super) fn register(
        &self,
        register: impl FnOnce(Instant) -> Option<RegisteredWait>,
    ) -> bool {
        if self.registered.get().is_none()
            && let Some(wait) = register(self.joined)
        {
            let _ = self.registered.set(Box::new(wait));
        }
        let done = self.registered.get().is_some();
        self.queue(|queue| queue.registered(self.number, done));
        done
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        drop(self.registered.take());
        let (queues, subscription) = (&self.queues, &self.subscription);
        let leave = || {
            let mut state = self.object.lock();
            let left = state.queues.leave(self.kind, self.number);
            (state.queues.is_empty(), left)
        };
        let channel = &subscription.channel;
        let close = || queues.start_closer(channel, None);
        let left = queues.channels.leave(channel, &self.object, leave, close);
        if let Some(wake) = left.and_then(|mut left| left.wake.take()) {
            wake.wake();
        }
    }
}

#[cfg(test)]
impl WaitQueues {
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 2] {
        self.channels.sizes()
    }
}
