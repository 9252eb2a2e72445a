//! The embedded store: runs the rules in process, under one mutex. It calls the same `Subscriber`
//! as a connection does. Its clock is tokio's, so tests may pause it. While there is a watch, it
//! compares the keys of each step before and after, and reports those that have changed.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::glob;
use crate::keyspace::{Entry, Keyspace, Message};
use crate::step::Step;
use crate::store::{Answer, Changes, Progress, SharedSubscriber};
use crate::sync::Mutex;

#[cfg(test)]
pub(crate) mod failure_injection;

/// A store without a server: the same steps, keys and messages, in this process.
///
/// Clients with clones of one `Embedded` share its keys, like processes that share a server. Time
/// is tokio's, so tests can pause and advance it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let store = redlatch::Embedded::new();
/// let one = redlatch::Client::builder().connect_embedded(&store)?;
/// let two = redlatch::Client::builder().connect_embedded(&store)?;
/// let guard = one.lock("a").lock().await?;
/// assert!(two.lock("a").try_lock().await?.is_none());
/// # guard.unlock().await }
/// ```
#[derive(Clone)]
pub struct Embedded(Arc<Mutex<Shared>>);

struct Shared {
    keyspace: Keyspace,
    is_available: bool,
    /// By channel and connection id.
    subscribers: HashMap<String, HashMap<u64, SharedSubscriber>>,
    last_connection_id: u64,
    /// The watches to which changed keys are reported.
    watches: Vec<Weak<Changes>>,
    #[cfg(test)]
    injected: failure_injection::InjectedFailures,
}

impl Embedded {
    /// Creates an empty store.
    pub fn new() -> Embedded {
        let mut keyspace = Keyspace::new(Instant::now());
        // A clock before 1970 counts as 1970.
        keyspace.set_clock(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default());
        Embedded(Arc::new(Mutex::new(Shared {
            keyspace,
            is_available: true,
            subscribers: HashMap::new(),
            last_connection_id: 0,
            watches: Vec::new(),
            #[cfg(test)]
            injected: failure_injection::InjectedFailures::default(),
        })))
    }

    /// Makes the store unavailable, or available again, for tests of what a program does during an
    /// outage. While it is unavailable, calls of its clients have no effect and fail at once with
    /// [`Error::Unavailable`]. Leases go on, so holds end that their clients cannot renew.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// let store = redlatch::Embedded::new();
    /// let client = redlatch::Client::builder().connect_embedded(&store)?;
    /// store.set_available(false);
    /// let error = client.lock("a").lock().await.unwrap_err();
    /// assert!(error.is_transient());
    /// store.set_available(true);
    /// client.lock("a").lock().await?.unlock().await
    /// # }
    /// ```
    pub fn set_available(&self, available: bool) {
        let mut shared = self.0.lock();
        shared.is_available = available;
        if available {
            return;
        }
        let clients = shared.subscribers.values().flatten();
        let clients: HashMap<u64, SharedSubscriber> =
            clients.map(|(id, client)| (*id, client.clone())).collect();
        let watches = std::mem::take(&mut shared.watches);
        // They may access the store at once.
        drop(shared);
        let watches = watches.iter().filter_map(Weak::upgrade);
        let watches = watches.map(|watch| watch as SharedSubscriber);
        let disconnected = clients.into_values().chain(watches);
        disconnected.for_each(|subscriber| subscriber.on_disconnect());
    }

    /// Returns the number of channels with subscribers, and of watches.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 2] {
        let shared = self.0.lock();
        [
            ("subscribed", shared.subscribers.len()),
            ("watches", shared.watches.len()),
        ]
    }

    /// Returns the keys that exist.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<String> {
        let mut shared = self.0.lock();
        shared.keyspace.now = Instant::now();
        shared.keyspace.keys()
    }

    /// Removes a key, as another program might.
    #[cfg(test)]
    pub(crate) fn remove(&self, key: &str) {
        self.0.lock().keyspace.remove(key);
    }

    /// Returns a hash of texts.
    #[cfg(test)]
    pub(crate) fn texts(&self, key: &str) -> std::collections::BTreeMap<String, String> {
        let mut shared = self.0.lock();
        let found = shared.keyspace.find(key).unwrap();
        found.map_or_else(Default::default, |found| {
            let value: &mut std::collections::BTreeMap<String, String> = found.value;
            value.clone()
        })
    }

    fn available(&self) -> Result<MutexGuard<'_, Shared>> {
        let shared = self.0.lock();
        match shared.is_available {
            true => Ok(shared),
            false => Err(Error::unavailable("the embedded store is set unavailable")),
        }
    }

    pub(crate) fn connect(&self, subscriber: SharedSubscriber) -> EmbeddedConnection {
        let mut shared = self.0.lock();
        shared.last_connection_id += 1;
        EmbeddedConnection {
            id: shared.last_connection_id,
            store: self.clone(),
            subscriber,
        }
    }
}

impl Default for Embedded {
    fn default() -> Embedded {
        Embedded::new()
    }
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded").finish_non_exhaustive()
    }
}

/// One client's connection to an embedded store.
pub(crate) struct EmbeddedConnection {
    id: u64,
    store: Embedded,
    pub(super) subscriber: SharedSubscriber,
}

impl EmbeddedConnection {
    pub(crate) fn address(&self) -> String {
        format!("embedded:{:p}", Arc::as_ptr(&self.store.0))
    }

    pub(crate) fn run<R: Send>(
        &self,
        step: &Step<'_, R>,
        progress: &Progress,
    ) -> Result<Answer<R>> {
        #[cfg(test)]
        if let Some(answer) = self.run_with_failure(step, progress) {
            return answer;
        }
        progress.mark_sent();
        let answer = self.apply(step);
        match &answer {
            Err(error @ Error::Unavailable { .. }) => {
                progress.mark_unsent();
                progress.record_failure(Instant::now(), error.clone());
            }
            _ => progress.record_answer(),
        }
        answer
    }

    /// Returns an error if the store is unavailable.
    pub(crate) fn ping(&self) -> Result<()> {
        self.store.available().map(drop)
    }

    /// Returns the time limit for an answer: none, because the embedded store answers immediately.
    /// A unit test can set another timeout.
    #[allow(clippy::unused_self, reason = "unit tests set it")]
    pub(crate) fn response_timeout(&self) -> Option<Duration> {
        #[cfg(test)]
        let timeout = self.store.0.lock().injected.response_timeout;
        #[cfg(not(test))]
        let timeout = None;
        timeout
    }

    fn apply<R: Send>(&self, step: &Step<'_, R>) -> Result<Answer<R>> {
        let sent_at = Instant::now();
        let (reply, deliveries) = {
            let mut shared = self.store.available()?;
            shared.keyspace.now = sent_at;
            let before = shared.watched_entries(step.keys());
            let reply = step.apply(&mut shared.keyspace)?;
            shared.report_changes(before);
            (reply, shared.take_deliveries())
        };
        for (subscriber, message) in deliveries {
            subscriber.on_message(&message.channel, &message.payload.to_string());
        }
        Ok(Answer {
            reply,
            sent_at,
            confirmation: None,
            server: Default::default(),
        })
    }

    pub(crate) fn subscribe(&self, channel: &str) {
        let mut shared = self.store.0.lock();
        let subscribers = shared.subscribers.entry(channel.to_owned()).or_default();
        subscribers.insert(self.id, self.subscriber.clone());
        let subscriber_count = subscribers.len();
        shared
            .keyspace
            .set_subscriber_count(channel, subscriber_count);
    }

    pub(crate) fn unsubscribe(&self, channel: &str) {
        let shared = &mut *self.store.0.lock();
        if let Some(subscribers) = shared.subscribers.get_mut(channel) {
            subscribers.remove(&self.id);
            shared
                .keyspace
                .set_subscriber_count(channel, subscribers.len());
            if subscribers.is_empty() {
                shared.subscribers.remove(channel);
            }
        }
    }

    pub(crate) fn start_reports(&self, changes: &Arc<Changes>) -> Result<()> {
        let mut shared = self.store.available()?;
        let watch = Arc::downgrade(changes);
        if !shared.watches.iter().any(|other| other.ptr_eq(&watch)) {
            shared.watches.push(watch);
        }
        Ok(())
    }

    pub(crate) fn keys(&self, pattern: &str) -> Result<Vec<String>> {
        let mut shared = self.store.available()?;
        shared.keyspace.now = Instant::now();
        let mut keys = shared.keyspace.keys();
        keys.retain(|key| glob::matches(pattern.as_bytes(), key.as_bytes()));
        Ok(keys)
    }
}

impl Drop for EmbeddedConnection {
    fn drop(&mut self) {
        let channels: Vec<String> = self.store.0.lock().subscribers.keys().cloned().collect();
        channels
            .iter()
            .for_each(|channel| self.unsubscribe(channel));
    }
}

impl Shared {
    /// Returns the values of these keys, if there is a watch.
    fn watched_entries<'k>(&mut self, keys: &'k [Cow<'_, str>]) -> Vec<(&'k str, Option<Entry>)> {
        self.watches.retain(|watch| watch.strong_count() > 0);
        if self.watches.is_empty() {
            return Vec::new();
        }
        let entry = |key: &'k Cow<'_, str>| (&**key, self.keyspace.entry(key).cloned());
        keys.iter().map(entry).collect()
    }

    /// Reports the keys that have changed since then. Expiry is no change: watches know the time.
    fn report_changes(&mut self, before: Vec<(&str, Option<Entry>)>) {
        for (key, entry) in before {
            if self.keyspace.entry(key) != entry.as_ref() {
                let watches = self.watches.iter().filter_map(Weak::upgrade);
                watches.for_each(|watch| watch.add_key(key));
            }
        }
    }

    /// Returns the subscribers of the messages just published. They are called after the lock is
    /// released, because they may access the store at once.
    fn take_deliveries(&mut self) -> Vec<(SharedSubscriber, Message)> {
        let mut deliveries = Vec::new();
        for message in self.keyspace.take_published() {
            if let Some(subscribers) = self.subscribers.get(&message.channel) {
                let delivery =
                    |subscriber: &SharedSubscriber| (subscriber.clone(), message.clone());
                deliveries.extend(subscribers.values().map(delivery));
            }
        }
        deliveries
    }
}
