//! Lines of local waiters: one subscription per channel, and per requested object its waiters in order.
//!
//! Redisson's layout gives two objects one channel: `a` and `{a}`. Each has queues of its own, so a waiter
//! never waits behind a waiter for the other object. They share the subscription:
//!
//! 1. The first waiter that is refused joins the line of its object, and subscribes when it has the turn.
//! 2. A message on the channel wakes the first waiter of every queue. So does a broken connection, because
//!    messages may have been missed.
//! 3. The last waiter of the channel starts a task that ends the subscription after the linger time, unless
//!    a waiter joins before.
//! 4. While the subscription is being ended, new waiters get no turn (`Core::ending`), so that ending and
//!    subscribing cannot cross.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::background::Background;
use crate::error::Error;
use crate::store::{Ear, News, Store, Word};
use crate::surroundings::task;

/// All lines of one client.
#[derive(Clone)]
pub(crate) struct WaitingRoom {
    lines: Arc<Lines>,
    pub(super) store: Arc<Store>,
    background: Background,
    linger: Duration,
    /// When a waiter last found the store in an outage.
    pub(super) outage: Arc<Mutex<Option<Instant>>>,
}

/// The lines by channel. Receives the messages of the store.
#[derive(Default)]
pub(crate) struct Lines(Mutex<BTreeMap<Arc<str>, Entry>>);

struct Entry {
    core: Arc<Core>,
    /// The objects with waiters on this channel: mostly one. Cleared when the subscription is ended.
    objects: Vec<Arc<Object>>,
    /// Number of members of the line, including the first.
    members: usize,
    /// When the last member left.
    idle_since: Option<Instant>,
    /// The task that will close the line.
    closer: Option<AbortHandle>,
}

struct Core {
    channel: Arc<str>,
    subscription: AtomicU8,
    /// Locked while the subscription is being ended. A waiter that joins meanwhile subscribes only
    /// afterwards, so that ending and subscribing cannot cross.
    ending: Arc<tokio::sync::Mutex<()>>,
}

/// The queues of one object.
struct Object {
    key: Box<str>,
    queues: [Waiters; 2],
    /// Since when the store cannot be reached, and why.
    failing: Mutex<Option<(Instant, Error)>>,
    /// Notified when the store could not be reached, to fail all waiters of the line.
    failed: Notify,
}

/// What the store has answered to the first of a queue.
#[derive(Debug, Default)]
struct Answers {
    /// Number of waiters in the queue. The rest is reset when the last one leaves.
    waiters: usize,
    /// Since when a request has been without an answer.
    silent_since: Option<Instant>,
    /// When the object was first released since the store was last asked, as far as this client knows.
    released: Option<Instant>,
    /// Whether the store has answered a request of the queue.
    answered: bool,
}

/// The waiters in one queue of an object.
#[derive(Default)]
struct Waiters {
    answers: Mutex<Answers>,
    /// The owner of this lock is the first in line; tokio's mutex is fair. Contains the time before which
    /// the next waiter need not ask, set by the waiter that has just acquired the object.
    turn: tokio::sync::Mutex<Option<Instant>>,
    /// Notified when a message was published, or may have been.
    call: Notify,
}

/// The queues of an object. A waiter that can share the object does not wait behind one that cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    Exclusive,
    Shared,
}

const NOT_SUBSCRIBED: u8 = 0;
/// Sent; whether it took effect is unknown.
const SUBSCRIBING: u8 = 1;
const SUBSCRIBED: u8 = 2;
/// The store reported its end. In a cluster that may be the end of an earlier subscription, at the node
/// that had the slot before. So there may be a subscription to end.
const ENDED: u8 = 3;

/// A member of a line. Leaves it when dropped.
pub(super) struct Line {
    room: WaitingRoom,
    core: Arc<Core>,
    object: Arc<Object>,
    queue: Queue,
}

/// The turn of the first in line. Dropping it passes the turn to the next waiter.
pub(super) struct Turn<'a>(tokio::sync::MutexGuard<'a, Option<Instant>>);

impl WaitingRoom {
    pub(crate) fn new(
        lines: Arc<Lines>,
        store: Arc<Store>,
        background: Background,
        linger: Duration,
    ) -> WaitingRoom {
        WaitingRoom {
            lines,
            store,
            background,
            linger,
            outage: Arc::default(),
        }
    }

    /// Returns the number of lines with a subscription, in use or lingering. Spin locks have none.
    pub(crate) fn subscriptions(&self) -> usize {
        let lines = self.lines.lock();
        let subscribed = |entry: &&Entry| entry.core.may_be_subscribed();
        lines.values().filter(subscribed).count()
    }

    /// Returns whether there is a line for `object` at `channel`. Requests then wait for their turn in it.
    pub(crate) fn has_line(&self, channel: &str, object: &str) -> bool {
        let lines = self.lines.lock();
        let entry = lines.get(channel);
        entry.is_some_and(|entry| entry.find(object).is_some())
    }

    /// Joins the line for `object` at `channel`, if there is a line at the channel.
    pub(super) fn line(&self, channel: &str, object: &str, queue: Queue) -> Option<Line> {
        let mut lines = self.lines.lock();
        let entry = lines.get_mut(channel)?;
        Some(self.enter(entry, object, queue))
    }

    /// Wakes the first in the line of `channel`, so that it repeats its request.
    pub(crate) fn call(&self, channel: &str) {
        self.lines.heard(channel);
    }

    /// Records that this client is about to release the objects of `channel`. Waiters that join from now
    /// on do not take them for held. The message that wakes waiters may arrive later, on another connection.
    pub(crate) fn releasing(&self, channel: &str) {
        if let Some(entry) = self.lines.lock().get(channel) {
            entry.released();
        }
    }

    /// Joins the line for `object` at `channel`, which is created if there is none. For a request that the
    /// store has answered.
    pub(super) fn join(&self, channel: &str, object: &str, queue: Queue) -> Line {
        let mut lines = self.lines.lock();
        let channel: Arc<str> = channel.into();
        let entry = lines
            .entry(channel.clone())
            .or_insert_with(|| Entry::new(channel));
        let line = self.enter(entry, object, queue);
        line.waiters().answers().answered = true;
        line
    }

    fn enter(&self, entry: &mut Entry, object: &str, queue: Queue) -> Line {
        entry.members += 1;
        let line = Line {
            room: self.clone(),
            core: entry.core.clone(),
            object: entry.object(object),
            queue,
        };
        line.waiters().answers().waiters += 1;
        line
    }

    /// Ends the line's subscription after it had no member for the linger time. So repeated waiting for a
    /// lock does not subscribe each time.
    async fn close_when_idle(
        lines: Weak<Lines>,
        store: Weak<Store>,
        channel: Arc<str>,
        linger: Duration,
    ) {
        let mut wake = Instant::now() + linger;
        loop {
            tokio::time::sleep_until(wake).await;
            let (Some(lines), Some(store)) = (lines.upgrade(), store.upgrade()) else {
                return;
            };
            let (core, _ending) = match lines.ready_to_close(&channel, linger) {
                Ready::Later(at) => {
                    wake = at;
                    continue;
                }
                Ready::No => return,
                Ready::Now(core, ending) => (core, ending),
            };
            // Also if none is known here: a repetition may have restarted one that ended. The store knows.
            if let Err(error) = store.unsubscribe(&channel).await {
                tracing::debug!(%channel, %error, "a subscription ended with an error");
            }
            core.subscription.store(NOT_SUBSCRIBED, Ordering::SeqCst);
            return lines.closed(&channel);
        }
    }
}

enum Ready {
    Later(Instant),
    No,
    /// New members wait until the second value is dropped.
    Now(Arc<Core>, tokio::sync::OwnedMutexGuard<()>),
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ready_to_close(&self, channel: &str, linger: Duration) -> Ready {
        let mut lines = self.lock();
        let Some(entry) = lines.get_mut(channel) else {
            return Ready::No;
        };
        let Some(idle_since) = entry.idle_since.filter(|_| entry.members == 0) else {
            entry.closer = None;
            return Ready::No;
        };
        if idle_since + linger > Instant::now() {
            return Ready::Later(idle_since + linger);
        }
        // The line has no member, and none can join until this returns, so no waiter holds this lock.
        let Ok(ending) = entry.core.ending.clone().try_lock_owned() else {
            return Ready::Later(Instant::now() + linger);
        };
        // A queue knows when to expect the next release only if it has received every release so far.
        entry.objects.clear();
        entry.core.begin_ending();
        Ready::Now(entry.core.clone(), ending)
    }

    /// Records that the subscription has ended. Removes the line unless a waiter has joined meanwhile.
    fn closed(&self, channel: &str) {
        let mut lines = self.lock();
        match lines.get_mut(channel) {
            Some(entry) if entry.members > 0 => entry.closer = None,
            _ => drop(lines.remove(channel)),
        }
    }
}

impl Ear for Lines {
    fn heard(&self, channel: &str) {
        if let Some(entry) = self.lock().get(channel) {
            entry.call();
        }
    }

    fn interrupted(&self) {
        for entry in self.lock().values() {
            entry.call();
        }
    }

    fn ended(&self, channel: &str) {
        if let Some(entry) = self.lock().get(channel) {
            let subscription = &entry.core.subscription;
            let _ = subscription.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
                (now != NOT_SUBSCRIBED).then_some(ENDED)
            });
            entry.call();
        }
    }
}

impl Entry {
    fn new(channel: Arc<str>) -> Entry {
        Entry {
            core: Arc::new(Core {
                channel,
                subscription: AtomicU8::new(NOT_SUBSCRIBED),
                ending: Arc::default(),
            }),
            objects: Vec::new(),
            members: 0,
            idle_since: None,
            closer: None,
        }
    }

    fn find(&self, key: &str) -> Option<&Arc<Object>> {
        self.objects.iter().find(|object| *object.key == *key)
    }

    /// Returns the object with this key, which is created if there is none.
    fn object(&mut self, key: &str) -> Arc<Object> {
        if let Some(object) = self.find(key) {
            return object.clone();
        }
        let object = Arc::new(Object {
            key: key.into(),
            queues: Default::default(),
            failing: Mutex::default(),
            failed: Notify::new(),
        });
        self.objects.push(object.clone());
        object
    }

    fn queues(&self) -> impl Iterator<Item = &Waiters> {
        self.objects.iter().flat_map(|object| &object.queues)
    }

    fn released(&self) {
        for queue in self.queues() {
            queue.answers().released.get_or_insert_with(Instant::now);
        }
    }

    fn call(&self) {
        self.released();
        for queue in self.queues() {
            queue.call.notify_one();
        }
    }
}

impl Core {
    fn may_be_subscribed(&self) -> bool {
        self.subscription.load(Ordering::SeqCst) != NOT_SUBSCRIBED
    }

    fn begin_ending(&self) {
        // Unknown from here on, even if ending is dropped half-way.
        let (was, is) = (SUBSCRIBED, SUBSCRIBING);
        let subscription = &self.subscription;
        let _ = subscription.compare_exchange(was, is, Ordering::SeqCst, Ordering::SeqCst);
    }
}

impl Waiters {
    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object {
    fn queue(&self, queue: Queue) -> &Waiters {
        let [exclusive, shared] = &self.queues;
        match queue {
            Queue::Exclusive => exclusive,
            Queue::Shared => shared,
        }
    }

    fn failing(&self) -> MutexGuard<'_, Option<(Instant, Error)>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The news of one queue.
struct QueueNews {
    object: Arc<Object>,
    queue: Queue,
}

impl std::fmt::Debug for QueueNews {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueNews").finish_non_exhaustive()
    }
}

impl News for QueueNews {
    /// If a request in this queue was refused, the store has answered that another owner holds the object.
    /// That counts as news, unless a request has been without an answer ever since `since`, or the object
    /// was released before `since` and no request was sent after that. There is no news if all requests of
    /// the queue have left.
    fn word(&self, since: Instant) -> Option<Word> {
        if let Some((since, error)) = self.object.failing().clone() {
            return Some(Word::Failed { since, error });
        }
        let answers = self.object.queue(self.queue).answers();
        let silent = answers.silent_since.or(answers.released);
        let silent = silent.is_some_and(|silent| silent <= since);
        (!silent && answers.answered).then_some(Word::Answered)
    }
}

impl Line {
    fn waiters(&self) -> &Waiters {
        self.object.queue(self.queue)
    }

    pub(super) fn channel(&self) -> &str {
        &self.core.channel
    }

    pub(super) fn news(&self) -> Arc<dyn News> {
        Arc::new(QueueNews {
            object: self.object.clone(),
            queue: self.queue,
        })
    }

    /// Records that a request is about to be sent.
    pub(super) fn asking(&self) {
        let mut answers = self.waiters().answers();
        answers.silent_since.get_or_insert_with(Instant::now);
    }

    /// Records that the request has ended, with the latest news.
    pub(super) fn heard(&self, word: Option<Word>) {
        let mut answers = self.waiters().answers();
        answers.silent_since = None;
        match word {
            Some(Word::Answered) => {
                answers.answered = true;
                *self.object.failing() = None;
            }
            Some(Word::Failed { since, error }) => *self.object.failing() = Some((since, error)),
            None => {}
        }
    }

    /// Reports to all waiters in line that the store cannot be reached.
    pub(super) fn fail_together(&self) {
        self.object.failed.notify_waiters();
    }

    /// Waits until [`Line::fail_together`] is called after the first poll. Returns since when the store
    /// cannot be reached, and why.
    pub(super) async fn failed(&self) -> (Instant, Error) {
        loop {
            self.object.failed.notified().await;
            if let Some(failing) = self.object.failing().clone() {
                return failing;
            }
        }
    }

    /// Waits until all earlier waiters have had their turns and no subscription of the channel is being
    /// ended. None is ended from then on, because this line has a member.
    pub(super) async fn turn(&self) -> Turn<'_> {
        let turn = self.waiters().turn.lock().await;
        drop(self.core.ending.lock().await);
        Turn(turn)
    }

    /// Waits until a message was published since [`Line::forget_calls`], or the connection broke.
    pub(super) async fn called(&self) {
        self.waiters().call.notified().await;
    }

    /// Discards the messages so far. Returns whether the object was released since this was last called.
    pub(super) fn forget_calls(&self) -> bool {
        // In this order: a message that arrives in between costs one request more, and is not forgotten.
        let notified = std::pin::pin!(self.waiters().call.notified()).enable();
        let mut answers = self.waiters().answers();
        let released = answers.released.take();
        answers.silent_since = answers.silent_since.or(released);
        notified || released.is_some()
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.core.subscription.load(Ordering::SeqCst) == SUBSCRIBED
    }

    /// Records that a subscription is about to be sent, so there may be one to end.
    pub(super) fn subscribing(&self) {
        let subscription = &self.core.subscription;
        let _ = subscription.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
            matches!(now, NOT_SUBSCRIBED | ENDED).then_some(SUBSCRIBING)
        });
    }

    /// Records that the subscription took effect, unless it has ended already.
    pub(super) fn subscribed(&self) {
        let _ = self.core.subscription.compare_exchange(
            SUBSCRIBING,
            SUBSCRIBED,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut lines = self.room.lines.lock();
        let Some(entry) = lines.get_mut(&self.core.channel) else {
            return;
        };
        entry.members -= 1;
        let mut answers = self.waiters().answers();
        answers.waiters -= 1;
        if answers.waiters == 0 {
            // Later requests find out by themselves.
            *answers = Answers::default();
        }
        drop(answers);
        if entry.members > 0 {
            return;
        }
        entry.idle_since = Some(Instant::now());
        for object in &entry.objects {
            *object.failing() = None;
        }
        let closes = |closer: &AbortHandle| !closer.is_finished();
        let Some(runtime) = self.room.background.handle() else {
            return;
        };
        if entry.closer.as_ref().is_some_and(closes) {
            return;
        }
        // Not counted as background work: callers that wait for that do not mean to wait for this.
        let closer = runtime.spawn(task(WaitingRoom::close_when_idle(
            Arc::downgrade(&self.room.lines),
            Arc::downgrade(&self.room.store),
            self.core.channel.clone(),
            self.room.linger,
        )));
        entry.closer = Some(closer.abort_handle());
    }
}

impl Turn<'_> {
    /// Records, for the waiter that acquired the object, until when the next one need not send a request.
    pub(super) fn hand_on(&mut self, until: Instant) {
        *self.0 = Some(until);
    }

    pub(super) fn take_handed_on(&mut self) -> Option<Instant> {
        self.0.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a cluster this may be the end of an earlier subscription, at another node.
    #[test]
    fn ended_subscription_may_have_to_be_ended_again() {
        let entry = Entry::new("c".into());
        let core = entry.core.clone();
        core.subscription.store(SUBSCRIBED, Ordering::SeqCst);
        let lines = Lines(Mutex::default());
        lines.lock().insert("c".into(), entry);
        lines.ended("c");
        assert!(core.may_be_subscribed());
        core.subscription.store(NOT_SUBSCRIBED, Ordering::SeqCst);
        lines.ended("c");
        assert!(!core.may_be_subscribed());
    }

    const LINGER: Duration = Duration::from_secs(10);

    fn room() -> WaitingRoom {
        let lines = Arc::<Lines>::default();
        let store = crate::store::embedded::Embedded::new().attach(lines.clone());
        let store = Arc::new(Store::Embedded(store));
        WaitingRoom::new(lines, store, Background::default(), LINGER)
    }

    /// Returns whether a waiter in line is woken at once.
    async fn is_called(line: &Line) -> bool {
        let called = tokio::time::timeout(Duration::ZERO, line.called());
        called.await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_wake_on_messages_and_when_some_may_be_missed() {
        let room = room();
        let line = room.join("c", "object", Queue::Exclusive);
        assert!(!is_called(&line).await);
        room.lines.heard("c");
        assert!(is_called(&line).await && !is_called(&line).await);
        room.lines.interrupted();
        assert!(is_called(&line).await);
        room.lines.ended("c");
        assert!(is_called(&line).await);
        room.lines.heard("c");
        line.forget_calls();
        assert!(!is_called(&line).await);
    }

    /// A release may have freed the object that the earlier answer called held.
    #[tokio::test(start_paused = true)]
    async fn a_request_that_joins_after_a_message_has_no_news_until_the_store_answers() {
        let room = room();
        let line = room.join("c", "object", Queue::Exclusive);
        let is_news = |since| matches!(line.news().word(since), Some(Word::Answered));
        let tick = || tokio::time::sleep(Duration::from_millis(1));
        let before = Instant::now();
        tick().await;
        room.lines.heard("c");
        let after = Instant::now();
        assert!(is_news(before) && !is_news(after));
        assert!(line.forget_calls());
        line.asking();
        assert!(!is_news(after));
        tick().await;
        room.lines.heard("c");
        let during = Instant::now();
        line.heard(Some(Word::Answered));
        assert!(is_news(after) && !is_news(during));
        line.forget_calls();
        line.asking();
        line.heard(Some(Word::Answered));
        assert!(is_news(during));
    }

    #[test]
    fn subscription_being_ended_is_not_used() {
        let core = Entry::new("c".into()).core;
        core.subscription.store(SUBSCRIBED, Ordering::SeqCst);
        core.begin_ending();
        assert!(core.may_be_subscribed());
        assert_ne!(core.subscription.load(Ordering::SeqCst), SUBSCRIBED);
    }

    #[test]
    fn line_is_closed_unless_waiter_joins() {
        let lines = Lines::default();
        lines.lock().insert("c".into(), Entry::new("c".into()));
        lines.lock().get_mut("c").unwrap().members = 1;
        lines.closed("c");
        assert_eq!(lines.lock().len(), 1);
        lines.lock().get_mut("c").unwrap().members = 0;
        lines.closed("c");
        assert_eq!(lines.lock().len(), 0);
    }

    /// A waiter that joins and leaves within the linger time restarts it, with the same task.
    #[tokio::test(start_paused = true)]
    async fn linger_time_starts_after_last_waiter() {
        let room = room();
        for _ in 0..3 {
            let line = room.join("c", "object", Queue::Exclusive);
            line.subscribing();
            line.subscribed();
            drop(line);
            tokio::time::sleep(LINGER / 2).await;
            let tasks = tokio::runtime::Handle::current()
                .metrics()
                .num_alive_tasks();
            assert_eq!((room.subscriptions(), tasks), (1, 1));
        }
        tokio::time::sleep(LINGER / 2 - Duration::from_millis(10)).await;
        assert_eq!(room.subscriptions(), 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(room.subscriptions(), 0);
        assert!(room.lines.lock().is_empty());
    }
}
