//! A waiter and the queues of its object: the lock, the wakers and the timers around [`Queues`], which decides.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Attempt;
use super::queue::{Due, Next, QueueKind, Queues};
use super::subscription::{ChannelEntry, ChannelMap, Subscription};
use crate::background::{Background, Counted};
use crate::client_registry::{REGISTERED_AFTER, RegisteredWait};
use crate::environment::{random_fraction, task};
use crate::hold::{Share, Yields};
use crate::lease::Lease;
use crate::metrics::{Metrics, Timer};
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::store::{ContactSource, LastContact, Store, Subscriber as _};
use crate::sync::Mutex;

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

/// The queues of one object.
#[derive(Debug)]
pub(super) struct ObjectQueues {
    pub(super) key: Box<str>,
    state: Mutex<ObjectState>,
    registered: Mutex<RegisteredWaits>,
}

type ClientQueues = Queues<Waker, Counted<Offer>, TransferClaim>;

#[derive(Debug)]
pub(super) struct ObjectState {
    pub(super) queues: ClientQueues,
    /// The task that calls [`Queues::tick`] while that is needed.
    ticker: Option<AbortHandle>,
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

/// Something that a request of this client passes to the next. Dropping it releases it.
pub(crate) type Offer = Box<dyn Any + Send>;

/// What a release of this client needs to know to acquire the object for a waiter.
#[derive(Debug)]
pub(crate) struct TransferClaim {
    /// The waiter's hold.
    pub(crate) hold: Arc<dyn Any + Send + Sync>,
    pub(crate) lease: Lease,
}

/// A waiter in a queue. Leaves the queue when dropped.
pub(super) struct Waiter {
    queues: WaitQueues,
    subscription: Arc<Subscription>,
    object: Arc<ObjectQueues>,
    kind: QueueKind,
    number: u64,
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
        let now = Instant::now();
        self.object.lock().queues.transfer_started(now);
        self.sent_at = Some(now);
    }

    /// Offers the waiter the object, which the store has granted to it.
    pub(crate) fn offer(mut self, offer: Counted<Offer>) {
        let sent_at = self.sent_at.take();
        let outdated = self.queues.change(&self.object, |queues| {
            Some(queues.transferred(sent_at, offer, Instant::now()))
        });
        drop(outdated);
    }
}

impl Drop for ClaimedWaiter {
    fn drop(&mut self) {
        self.object.lock().queues.transfer_ended(self.sent_at);
    }
}

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
        self.channels.subscriptions()
    }

    /// Returns whether this client subscribes to a channel.
    pub(crate) fn is_subscribed(&self, channel: &str) -> bool {
        let is_subscribed = |entry: &mut ChannelEntry| entry.subscription.is_subscribed();
        self.channels.find(channel, is_subscribed) == Some(true)
    }

    /// Returns whether a request for `object` joins a queue: it has waiters, or had some since the
    /// subscription began.
    pub(crate) fn has_queue(&self, channel: &str, object: &str) -> bool {
        let has_queue = |entry: &mut ChannelEntry| entry.find(object).is_some();
        self.channels.find(channel, has_queue) == Some(true)
    }

    /// Joins the wait queue for `object`, if `channel` has waiters or a lingering subscription.
    pub(super) fn join_existing(
        &self,
        channel: &str,
        object: &str,
        kind: QueueKind,
    ) -> Option<Waiter> {
        let join = |entry: &mut ChannelEntry| self.add_waiter(entry, object, kind, false);
        self.channels.find(channel, join)
    }

    /// Joins the wait queue for `object` on `channel`, which is created if there is none. `answered`: whether the store has
    /// answered the request.
    pub(super) fn join(
        &self,
        channel: &str,
        object: &str,
        kind: QueueKind,
        answered: bool,
    ) -> Waiter {
        let join = |entry: &mut ChannelEntry| self.add_waiter(entry, object, kind, answered);
        self.channels.find_or_add(channel, join)
    }

    fn add_waiter(
        &self,
        entry: &mut ChannelEntry,
        object: &str,
        kind: QueueKind,
        answered: bool,
    ) -> Waiter {
        let object = entry.join(object);
        let number = object.lock().queues.join(kind, answered, Instant::now());
        Waiter {
            queues: self.clone(),
            subscription: entry.subscription.clone(),
            object,
            kind,
            number,
            registered: AtomicU16::new(0),
        }
    }

    /// Offers the first waiter for an object what it waits for, if all waiters [take it](Queues::takes_offer). `offer` is called
    /// then, with whether other clients waited lately. Returns whether it was offered.
    pub(crate) fn offer(
        &self,
        object: &ObjectKeys,
        share: Share,
        offer: impl FnOnce(bool) -> Option<Counted<Offer>>,
    ) -> bool {
        let Some(object) = self.channels.queues_of(object) else {
            return false;
        };
        let outdated = self.change(&object, |queues| {
            let offer = queues
                .takes_offer(share)
                .then(|| offer(queues.is_crowded()))
                .flatten()?;
            Some(queues.offer(offer, share, Instant::now()))
        });
        outdated.is_some()
    }

    /// Changes the queues of an object, and wakes a waiter. The caller drops the rest after the locks.
    fn change<T>(
        &self,
        object: &Arc<ObjectQueues>,
        change: impl FnOnce(&mut ClientQueues) -> Option<(Option<Waker>, T)>,
    ) -> Option<T> {
        let mut state = object.lock();
        let (wake, rest) = change(&mut state.queues)?;
        let watches = self.keep_ticking(object, &mut state);
        drop(state);
        wake.into_iter().chain(watches).for_each(Waker::wake);
        Some(rest)
    }

    /// Claims the first waiter for an object, if all waiters can be claimed, none waits in the shared queue, the object
    /// was not released since the last request, and no request is in flight.
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

    /// Lets other clients go first when the exclusive queue of the object requests it again after the release that
    /// follows.
    pub(crate) fn yield_to(&self, object: &ObjectKeys, yields: Yields) {
        if let Some(object) = self.channels.queues_of(object) {
            object.lock().queues.yield_to(yields, random_fraction);
        }
    }

    /// Drops all offers, which releases them in the background.
    pub(crate) fn drop_offers(&self) {
        for object in self.channels.objects() {
            let offers = object.lock().queues.take_offers();
            drop(offers);
        }
    }

    /// Wakes the first waiter of every queue on `channel`, so that it repeats its request.
    pub(crate) fn wake(&self, channel: &str) {
        self.channels.on_message(channel, 0);
    }

    /// Records that this client is about to release the objects of `channel`. For waiters that join from now
    /// on, an earlier answer no longer means that they are held. The message that wakes waiters may arrive
    /// later, on another connection.
    pub(crate) fn record_release(&self, channel: &str) {
        self.channels.find(channel, |entry| entry.record_release());
    }

    /// Starts the ticker of an object if it needs one. Without a runtime, returns what wakes the waiter that sleeps although it
    /// has the turn.
    fn keep_ticking(&self, object: &Arc<ObjectQueues>, state: &mut ObjectState) -> Option<Waker> {
        let is_running = |ticker: &AbortHandle| !ticker.is_finished();
        let first = state.queues.next_tick()?;
        if state.ticker.as_ref().is_some_and(is_running) {
            return None;
        }
        let Some(runtime) = self.background.runtime() else {
            return state.queues.watch();
        };
        let ticking = runtime.spawn(task(WaitQueues::tick(object.clone(), first)));
        state.ticker = Some(ticking.abort_handle());
        None
    }

    async fn tick(object: Arc<ObjectQueues>, first: Instant) {
        let mut next = Some(first);
        while let Some(at) = next {
            sleep_until(at).await;
            let mut state = object.lock();
            let (wake, expired) = state.queues.tick(Instant::now());
            next = state.queues.next_tick();
            if next.is_none() {
                state.ticker = None;
            }
            drop(state);
            drop(expired);
            wake.into_iter().for_each(Waker::wake);
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
    pub(super) fn new(key: &str) -> ObjectQueues {
        ObjectQueues {
            key: key.into(),
            state: Mutex::new(ObjectState {
                queues: Queues::new(Instant::now()),
                ticker: None,
            }),
            registered: Mutex::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ObjectState> {
        self.state.lock()
    }

    pub(super) fn is_private(&self) -> bool {
        self.key.contains(PRIVATE)
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
        self.queues.metrics()
    }

    pub(super) fn contacts(&self) -> Arc<dyn ContactSource> {
        Arc::new(QueueContacts {
            object: self.object.clone(),
            kind: self.kind,
        })
    }

    /// Records that this waiter takes offers of this share.
    pub(super) fn enable_offers(&self, share: Share) {
        let mut state = self.object.lock();
        state.queues.enable_offers(self.kind, self.number, share);
    }

    /// Lets a release claim this waiter.
    pub(super) fn enable_claim(&self, claim: TransferClaim) {
        let mut state = self.object.lock();
        state.queues.enable_claim(self.kind, self.number, claim);
    }

    /// Returns what this waiter does next. If it sleeps, `cx` is woken.
    fn next(&self, share: Share, cx: &Context<'_>) -> Next<Counted<Offer>> {
        let is_subscribed = self.subscription.is_subscribed();
        let (kind, number) = (self.kind, self.number);
        let mut state = self.object.lock();
        let next = state
            .queues
            .next(kind, number, share, Instant::now(), is_subscribed);
        let sleeps = matches!(next, Next::Sleep { .. });
        let wake = sleeps.then(|| cx.waker().clone());
        let replaced = state
            .queues
            .sleeper(kind, number)
            .map(|sleeper| std::mem::replace(sleeper, wake));
        let watches = self.queues.keep_ticking(&self.object, &mut state);
        drop(state);
        drop(replaced);
        watches.into_iter().for_each(Waker::wake);
        next
    }

    /// Waits until there is something to do for this waiter that is not the first yet. Registers its wait when the first one
    /// reminds it.
    pub(super) fn turn(
        &self,
        attempt: &impl Attempt,
    ) -> impl Future<Output = Next<Counted<Offer>>> {
        poll_fn(|cx| match self.next(attempt.share(), cx) {
            Next::Sleep { registers, .. } => {
                if registers {
                    self.register(|since| attempt.registrar()(since));
                }
                Poll::Pending
            }
            next => Poll::Ready(next),
        })
    }

    /// Waits until there is something to do for this waiter, which is the first. Sets `woken` if it was woken.
    pub(super) async fn next_as_first(
        &self,
        share: Share,
        woken: &mut Option<Timer>,
    ) -> Next<Counted<Offer>> {
        loop {
            let next = poll_fn(|cx| Poll::Ready(self.next(share, cx))).await;
            let Next::Sleep { until, .. } = next else {
                return next;
            };
            let is_woken = match until {
                Some(until) => timeout_at(until, poll_fn(|cx| self.poll_woken(cx)))
                    .await
                    .is_ok(),
                None => {
                    poll_fn(|cx| self.poll_woken(cx)).await;
                    true
                }
            };
            if is_woken {
                woken.get_or_insert_with(Timer::start);
            }
        }
    }

    fn poll_woken(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.object.lock();
        let sleeper = state.queues.sleeper(self.kind, self.number);
        let Some(Some(wake)) = sleeper else {
            return Poll::Ready(());
        };
        let replaced =
            (!wake.will_wake(cx.waker())).then(|| std::mem::replace(wake, cx.waker().clone()));
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    /// Waits until no subscription of the channel is being ended. None is from then on, because the channel has a waiter.
    pub(super) async fn subscription_ended(&self) {
        self.subscription.ended().await;
    }

    /// Returns whether a subscription has to be sent. If so, records that there may be one to end from now on.
    pub(super) fn begin_subscribing(&self) -> bool {
        self.subscription.begin()
    }

    /// Records that a request is about to be sent whose answer counts for the whole queue.
    pub(super) fn request_started(&self) {
        let mut state = self.object.lock();
        state.queues.request_started(self.kind, Instant::now());
    }

    /// Records that the request has ended, with its last contact with the store.
    pub(super) fn request_ended(&self, last: Option<LastContact>) {
        self.object.lock().queues.answered(self.kind, last);
    }

    /// Records that the store has refused the request, which is repeated then.
    pub(super) fn refused(&self, due: Due) {
        self.object.lock().queues.refused(self.kind, due);
    }

    /// Records that the request has acquired the object: see [`Queues::acquired`]. Returns whether it is in doubt.
    pub(super) fn acquired(&self, share: Share, until: Option<Instant>) -> bool {
        let (outdated, is_in_doubt) = self.object.lock().queues.acquired(self.kind, share, until);
        drop(outdated);
        is_in_doubt
    }

    /// Records that a message has granted the object.
    pub(super) fn granted(&self, share: Share, until: Instant) {
        self.object.lock().queues.granted(self.kind, share, until);
    }

    /// Records that this waiter has taken an offer: see [`Queues::took`].
    pub(super) fn took(&self, share: Share, until: Option<Instant>) {
        self.object.lock().queues.took(self.kind, share, until);
    }

    /// Reports to all waiters for the object that the store cannot be reached.
    pub(super) fn fail_all(&self) {
        let wakes = self.object.lock().queues.fail_all();
        wakes.into_iter().for_each(Waker::wake);
    }

    /// Reminds the waiters behind this one that they may have waited long, if any could register its wait. Not in an outage:
    /// they would fail.
    pub(super) fn remind_others(&self) {
        let is_useful = {
            let registered = self.object.registered.lock();
            let has_room = |wait: &RegisteredWait| wait.has_room_for_more();
            let mut waits = registered.waits.iter().flatten();
            waits.next().is_some_and(has_room)
                && registered.len() < self.object.lock().queues.waiters()
        };
        if is_useful {
            let wakes = self.object.lock().queues.remind_all();
            wakes.into_iter().for_each(Waker::wake);
        }
    }

    /// Returns when this waiter has joined the queue.
    pub(super) fn joined(&self) -> Instant {
        let state = self.object.lock();
        state.queues.joined(self.kind, self.number, Instant::now())
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
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(index) = self.registered.get_mut().checked_sub(1) {
            let registered = self.object.registered.lock().take(index);
            drop(registered);
        }
        let (queues, subscription) = (&self.queues, &self.subscription);
        let leave = || {
            let is_subscribed = subscription.is_subscribed();
            let mut state = self.object.lock();
            let (kind, number) = (self.kind, self.number);
            let left = state
                .queues
                .leave(kind, number, Instant::now(), is_subscribed);
            let is_idle = state.queues.waiters() == 0;
            let watches = queues.keep_ticking(&self.object, &mut state);
            (is_idle, (left, watches))
        };
        // Not counted as background work: callers of `flush` do not mean to wait for this.
        let close = || {
            let channel = subscription.channel.clone();
            let closing = queues
                .channels
                .close_when_idle(&queues.store, channel, queues.linger);
            Some(
                queues
                    .background
                    .runtime()?
                    .spawn(task(closing))
                    .abort_handle(),
            )
        };
        let channels = &queues.channels;
        if let Some((left, watches)) =
            channels.leave(&subscription.channel, &self.object, leave, close)
        {
            left.wake.into_iter().chain(watches).for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
impl WaitQueues {
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 2] {
        self.channels.sizes()
    }
}
