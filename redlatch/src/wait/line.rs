//! Lines: per channel the local waiters, in order, and the one subscription that serves them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::background::Background;
use crate::error::Error;
use crate::store::{Ear, News, Store, Word};

/// All lines of one client.
#[derive(Clone)]
pub(crate) struct WaitingRoom {
    lines: Arc<Lines>,
    pub(super) store: Arc<Store>,
    background: Background,
    linger: Duration,
    /// When a waiter has found the store in an outage last.
    pub(super) outage: Arc<Mutex<Option<Instant>>>,
}

/// The lines by channel; the part that hears what the store says.
#[derive(Default)]
pub(crate) struct Lines(Mutex<HashMap<Arc<str>, Entry>>);

struct Entry {
    core: Arc<Core>,
    /// How many are in the line, the first included.
    members: usize,
    /// When the last one left.
    idle_since: Option<Instant>,
    /// The task that waits to close the line.
    closer: Option<AbortHandle>,
}

struct Core {
    channel: Arc<str>,
    queues: [Waiters; 2],
    subscription: AtomicU8,
    answers: Mutex<Answers>,
    /// The store could not be asked: all who wait in line are told.
    failed: Notify,
}

/// What the store has answered to those who were first in a line.
#[derive(Debug, Default)]
struct Answers {
    /// Since when it has been asked without an answer.
    silent_since: Option<Instant>,
    /// Since when it cannot be asked, and why.
    failing: Option<(Instant, Error)>,
}

/// Those who wait in one queue of a channel.
#[derive(Default)]
struct Waiters {
    /// Whoever has this lock is the first in line; tokio's mutex serves in order of arrival. Inside:
    /// until when the one who just won needs nobody to ask.
    turn: tokio::sync::Mutex<Option<Instant>>,
    /// Called when something was published, or may have been.
    call: Notify,
}

/// The queues of a channel. Who can share what is waited for does not wait behind those who cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    Exclusive,
    Shared,
}

const NOT_SUBSCRIBED: u8 = 0;
/// Sent; whether it took effect is not known.
const SUBSCRIBING: u8 = 1;
const SUBSCRIBED: u8 = 2;
/// The store says that it has ended. In a cluster that may have been an earlier one, with the node that
/// had the slot before: so there may be one to end.
const ENDED: u8 = 3;

/// A place in a line. Leaves it when dropped.
pub(super) struct Line {
    room: WaitingRoom,
    core: Arc<Core>,
    queue: Queue,
}

/// Being the first in line. The next one comes forward when it is dropped.
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

    /// How many lines have a subscription, waited on or lingering. Who spins has none.
    pub(crate) fn subscriptions(&self) -> usize {
        let lines = self.lines.lock();
        let subscribed = |entry: &&Entry| entry.core.may_be_subscribed();
        lines.values().filter(subscribed).count()
    }

    /// Whether there is a line at `channel`: who waits asks when it is its turn there.
    pub(crate) fn has_line(&self, channel: &str) -> bool {
        self.lines.lock().contains_key(channel)
    }

    /// A place in the line of `channel`, if there is one.
    pub(super) fn line(&self, channel: &str, queue: Queue) -> Option<Line> {
        let mut lines = self.lines.lock();
        let entry = lines.get_mut(channel)?;
        Some(self.enter(entry, queue))
    }

    /// Has whoever is first in the line of `channel` ask again.
    pub(crate) fn call(&self, channel: &str) {
        self.lines.heard(channel);
    }

    /// A place in the line of `channel`, which is begun if need be.
    pub(super) fn join(&self, channel: &str, queue: Queue) -> Line {
        let mut lines = self.lines.lock();
        if let Some(entry) = lines.get_mut(channel) {
            return self.enter(entry, queue);
        }
        let channel: Arc<str> = channel.into();
        let core = Core {
            channel: channel.clone(),
            queues: Default::default(),
            subscription: AtomicU8::new(NOT_SUBSCRIBED),
            answers: Mutex::default(),
            failed: Notify::new(),
        };
        let entry = lines.entry(channel).or_insert(Entry {
            core: Arc::new(core),
            members: 0,
            idle_since: None,
            closer: None,
        });
        self.enter(entry, queue)
    }

    fn enter(&self, entry: &mut Entry, queue: Queue) -> Line {
        entry.members += 1;
        Line {
            room: self.clone(),
            core: entry.core.clone(),
            queue,
        }
    }

    /// Ends the line's subscription once nobody has been in it for the linger time: a lock that is
    /// waited for again and again is not subscribed to again and again.
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
            let core = match lines.ready_to_close(&channel, linger) {
                Ready::Later(at) => {
                    wake = at;
                    continue;
                }
                Ready::No => return,
                Ready::Now(core) => core,
            };
            // As the first in every line: who comes now waits until the subscription has ended, and
            // then makes a new one.
            let [exclusive, shared] = &core.queues;
            let mut turn = exclusive.turn.lock().await;
            let mut shared_turn = shared.turn.lock().await;
            if lines.is_joined(&channel) {
                // Somebody was quicker. Whoever leaves last will see to it.
                return;
            }
            *turn = None;
            *shared_turn = None;
            // Not known from here on, also should this be dropped half-way.
            let (was, is) = (SUBSCRIBED, SUBSCRIBING);
            let subscription = &core.subscription;
            let _ = subscription.compare_exchange(was, is, Ordering::SeqCst, Ordering::SeqCst);
            // Also if there is none as far as is known here: one that has ended may have been begun again
            // by a repetition. The store knows.
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
    Now(Arc<Core>),
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Entry>> {
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
        Ready::Now(entry.core.clone())
    }

    /// Whether anybody is in the line; then nobody is about to close it any more.
    fn is_joined(&self, channel: &str) -> bool {
        let mut lines = self.lock();
        let joined = lines.get_mut(channel).filter(|entry| entry.members > 0);
        joined.is_some_and(|entry| {
            entry.closer = None;
            true
        })
    }

    /// The subscription has ended; the line with it, unless somebody has come meanwhile.
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
            entry.core.call();
        }
    }

    fn interrupted(&self) {
        for entry in self.lock().values() {
            entry.core.call();
        }
    }

    fn ended(&self, channel: &str) {
        if let Some(entry) = self.lock().get(channel) {
            let subscription = &entry.core.subscription;
            let _ = subscription.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
                (now != NOT_SUBSCRIBED).then_some(ENDED)
            });
            entry.core.call();
        }
    }
}

impl Core {
    fn may_be_subscribed(&self) -> bool {
        self.subscription.load(Ordering::SeqCst) != NOT_SUBSCRIBED
    }

    fn call(&self) {
        for queue in &self.queues {
            queue.call.notify_one();
        }
    }

    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

impl News for Core {
    /// A line is there because the store said that another owner holds what is waited for. That counts
    /// as news, unless the store has been asked all the time since then and has not answered.
    fn word(&self, since: Instant) -> Option<Word> {
        let answers = self.answers();
        if let Some((since, error)) = answers.failing.clone() {
            return Some(Word::Failed { since, error });
        }
        let silent = answers.silent_since.is_some_and(|silent| silent <= since);
        (!silent).then_some(Word::Answered)
    }
}

impl Line {
    fn waiters(&self) -> &Waiters {
        let [exclusive, shared] = &self.core.queues;
        match self.queue {
            Queue::Exclusive => exclusive,
            Queue::Shared => shared,
        }
    }

    pub(super) fn channel(&self) -> &str {
        &self.core.channel
    }

    pub(super) fn news(&self) -> Arc<dyn News> {
        self.core.clone()
    }

    /// The store is about to be asked.
    pub(super) fn asking(&self) {
        let mut answers = self.core.answers();
        answers.silent_since.get_or_insert_with(Instant::now);
    }

    /// What was asked has ended, and this is the latest news.
    pub(super) fn heard(&self, word: Option<Word>) {
        let mut answers = self.core.answers();
        answers.silent_since = None;
        match word {
            Some(Word::Answered) => answers.failing = None,
            Some(Word::Failed { since, error }) => answers.failing = Some((since, error)),
            None => {}
        }
    }

    /// Tells all who wait in line that the store cannot be asked.
    pub(super) fn fail_together(&self) {
        self.core.failed.notify_waiters();
    }

    /// Returns when [`Line::fail_together`] is called after this was first polled: since when the store
    /// cannot be asked, and why.
    pub(super) async fn failed(&self) -> (Instant, Error) {
        loop {
            self.core.failed.notified().await;
            if let Some(failing) = self.core.answers().failing.clone() {
                return failing;
            }
        }
    }

    /// Returns when everybody who came before has had their turn.
    pub(super) async fn turn(&self) -> Turn<'_> {
        Turn(self.waiters().turn.lock().await)
    }

    /// Returns when something was published since [`Line::forget_calls`], or the connection broke.
    pub(super) async fn called(&self) {
        self.waiters().call.notified().await;
    }

    pub(super) fn forget_calls(&self) {
        std::pin::pin!(self.waiters().call.notified()).enable();
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.core.subscription.load(Ordering::SeqCst) == SUBSCRIBED
    }

    /// A subscription is about to be sent, so there may be one to end.
    pub(super) fn subscribing(&self) {
        let subscription = &self.core.subscription;
        let _ = subscription.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
            matches!(now, NOT_SUBSCRIBED | ENDED).then_some(SUBSCRIBING)
        });
    }

    /// It took effect; unless it has ended already.
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
        if entry.members > 0 {
            return;
        }
        entry.idle_since = Some(Instant::now());
        // Who comes later finds out by itself.
        *self.core.answers() = Answers::default();
        let closes = |closer: &AbortHandle| !closer.is_finished();
        let Some(runtime) = self.room.background.handle() else {
            return;
        };
        if entry.closer.as_ref().is_some_and(closes) {
            return;
        }
        // Not counted as background work: nobody who waits for that means to wait for this.
        let closer = runtime.spawn(WaitingRoom::close_when_idle(
            Arc::downgrade(&self.room.lines),
            Arc::downgrade(&self.room.store),
            self.core.channel.clone(),
            self.room.linger,
        ));
        entry.closer = Some(closer.abort_handle());
    }
}

impl Turn<'_> {
    /// Says, on the way out as the winner, until when the next one need not ask by itself.
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

    /// In a cluster the end may be that of an earlier subscription, with another node.
    #[test]
    fn after_an_end_there_may_be_a_subscription_to_end() {
        let core = Arc::new(Core {
            channel: "c".into(),
            queues: Default::default(),
            subscription: AtomicU8::new(SUBSCRIBED),
            answers: Mutex::default(),
            failed: Notify::new(),
        });
        let lines = Lines(Mutex::default());
        let entry = Entry {
            core: core.clone(),
            members: 0,
            idle_since: None,
            closer: None,
        };
        lines.lock().insert("c".into(), entry);
        lines.ended("c");
        assert!(core.may_be_subscribed());
        core.subscription.store(NOT_SUBSCRIBED, Ordering::SeqCst);
        lines.ended("c");
        assert!(!core.may_be_subscribed());
    }
}
