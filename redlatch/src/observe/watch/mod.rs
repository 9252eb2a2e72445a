//! Watches objects: the store reports which keys have changed, and the watch compares what is there
//! with what it knew. (Redisson's channels announce no acquisition, keyspace events need a setting
//! of the server, and polling with SCAN reads all keys. So without permission for `CLIENT TRACKING`
//! the caller gets the error.)
//!
//! 1. Reports are started, and then all matching objects are listed. So no change falls between the
//!    two.
//! 2. A report is a hint: the objects of the key are inspected, and the difference to their last
//!    known state is emitted. Reports of one key are collected until then, so each look costs at
//!    most one command per slot.
//! 3. Expiry: an object is also inspected 1 ms after something of it should end, because a store
//!    deletes expired keys late, and reports nothing about parts of a value.
//! 4. If the reports end, or all data was deleted, everything starts again with 1. What is known
//!    and not listed is inspected, too.
//!
//! What must not happen, and what prevents it:
//!
//! - *A state that the events do not add up to.* Points 1 and 4. One request is in flight at a
//!   time, so a look is never older than the one before.
//! - *Memory or load that grows with the changes.* `Changes` keeps a key once, and at most 10,000.
//!   Looks are 10 ms apart and inspect up to 100 keys each. A report costs what it changes, however
//!   many objects are known: `Objects` has the ends in order. A watch that is not polled looks at
//!   nothing.
//! - *A release that is called expiry.* A hold has expired only if no change of its key was
//!   reported before its known end: otherwise it may have been renewed and released. Forced
//!   releases and deletions look like releases.
//! - *A master without reports.* The connections follow failovers like the others. In a cluster,
//!   the masters are compared each second with the nodes that report. A new one counts as an
//!   interruption.
//! - *A connection or task that is left behind.* The watch has no task: it works when it is polled.
//!   Its connections end with it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::{Instant, sleep, sleep_until};

use self::known::{Known, Look, ROUNDING};
use self::objects::Objects;
use crate::error::{Error, Result};
use crate::glob;
use crate::join::Boxed;
use crate::lease::MAX_LEASE;
use crate::name::{changed_objects, changing_prefixes};
use crate::observe::inspect::{Inspected, ObjectState, inspect_keys};
use crate::observe::listing::{Listed, Listing, PAGE};
use crate::pending_request::PendingRequest;
use crate::session::Session;
use crate::store::{Changes, Reporters};

mod event;
mod known;
mod objects;

pub use self::event::{Change, Event, HeldBy};

/// Shortest time between two looks. It limits the load that objects cause which change all the time.
const MIN_INTERVAL: Duration = Duration::from_millis(10);

/// Pause before the reports are started again.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// How often it is checked whether a cluster has other masters.
const MASTERS_INTERVAL: Duration = Duration::from_secs(1);

/// Events of the objects whose names match a pattern, as a [`Stream`] that never ends:
/// [`Client::watch`](crate::Client::watch).
///
/// The objects that exist at the start come first ([`Change::Held`]), then [`Event::Synchronized`], then changes by all
/// clients of the store, also by Redisson. The server must permit `CLIENT TRACKING`; it needs no setting.
///
/// # What can be missed
///
/// A watch is for people and dashboards, not for correctness: only guards know whether a lock is held.
///
/// - What begins and ends between two looks at an object. A change is looked at within a round trip, but at most once in
///   10 ms, and only while the watch is polled. So a lock that is held for a millisecond may not appear; one that
///   passes from one owner to another is a [`Change::Released`] and a [`Change::Acquired`].
/// - What begins and ends while the connection is broken, between [`Event::Interrupted`] and
///   [`Event::Synchronized`]. The differences that remain are emitted.
/// - Whether an owner released a lock or lost it by force or deletion; if the watch was interrupted or polled late, also
///   whether its lease expired. All of that is [`Change::Released`].
///
/// The events add up to the state at the latest look. Only the objects that exist and up to 10 000 changed names are kept in
/// memory, however late the watch is polled.
///
/// # Cost
///
/// The server sends the names of all changed keys that start like the pattern, up to its first `*`, `?` or `[`. On a busy
/// server that other programs use, too, choose a pattern that starts with a text.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// use redlatch::inspect::{Change, Event};
///
/// let client = redlatch::Client::embedded();
/// let mut watch = client.watch("orders:*");
/// assert_eq!(watch.next().await?, Event::Synchronized);
/// let _guard = client.lock("orders:42").lock().await?;
/// if let Event::Changed { name, change: Change::Acquired(holder), .. } = watch.next().await? {
///     println!("{holder} acquired {name}");
/// }
/// # Ok(()) }
/// ```
pub struct Watch {
    session: Arc<Session>,
    /// Pattern of the keys: with the client's prefix.
    pattern: String,
    changes: Arc<Changes>,
    reporters: Arc<Reporters>,
    stage: Stage,
    objects: Objects,
    /// The keys to inspect, and until when they had surely not been changed.
    due: BTreeMap<String, Option<Instant>>,
    events: VecDeque<Event>,
    /// Whether [`Event::Synchronized`] follows when no key is due.
    catching_up: bool,
    /// Whether it has followed once.
    started: bool,
    interrupted: bool,
    last_look: Option<Instant>,
    request: PendingRequest<Done>,
}

enum Stage {
    /// Starts the reports, after a pause if they have been started before.
    Starting { pauses: bool },
    /// Reads all objects. `unlisted`: the known keys that have not been listed.
    Listing {
        listing: Box<Listing>,
        unlisted: BTreeSet<String>,
    },
    /// Looks at what is reported, or due.
    Following,
}

/// A request that is done.
enum Done {
    Started(Result<()>),
    /// There are reports, or something is due.
    Woken,
    /// The cluster has another master.
    MastersChanged,
    Inspected(Instant, Result<Vec<(String, Inspected)>>),
}

impl Watch {
    pub(crate) fn new(session: Arc<Session>, pattern: &str) -> Watch {
        let pattern = glob::escape(&session.prefix) + pattern;
        let prefixes = changing_prefixes(&glob::literal_prefix(&pattern));
        Watch {
            session,
            pattern,
            changes: Arc::new(Changes::new(prefixes)),
            reporters: Arc::default(),
            stage: Stage::Starting { pauses: false },
            objects: Objects::default(),
            due: BTreeMap::new(),
            events: VecDeque::new(),
            catching_up: false,
            started: false,
            interrupted: false,
            last_look: None,
            request: PendingRequest::default(),
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`], [`Error::UnsupportedServer`] (without `CLIENT TRACKING`), [`Error::NoRuntime`] and other
    /// errors that do not go away with time. The next call tries again. Other errors are [`Event::Interrupted`].
    ///
    /// # Cancel safety
    ///
    /// Loses nothing if it is dropped.
    pub async fn next(&mut self) -> Result<Event> {
        poll_fn(|cx| self.poll_event(cx)).await
    }

    /// Returns the keys of the objects that exist.
    #[cfg(test)]
    pub(crate) fn known(&self) -> impl Iterator<Item = &str> {
        self.objects.keys()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Poll::Ready(Ok(event));
            }
            if let Err(error) = crate::runtime::current() {
                return Poll::Ready(Err(error));
            }
            let advanced = match &mut self.stage {
                Stage::Listing { listing, .. } => {
                    let found = ready!(Pin::new(&mut **listing).poll_next(cx));
                    let read_at = listing.read_at();
                    let found = found.transpose();
                    found.map(|found| self.handle_listed(found, read_at))
                }
                Stage::Following if self.catching_up && self.due.is_empty() => {
                    (self.catching_up, self.started) = (false, true);
                    self.events.push_back(Event::Synchronized);
                    Ok(())
                }
                Stage::Starting { .. } | Stage::Following => {
                    let done = ready!(self.request.poll(cx, || self.next_request()));
                    self.handle(done)
                }
            };
            if let Err(error) = advanced {
                self.stage = Stage::Starting { pauses: true };
                if !error.is_transient() {
                    return Poll::Ready(Err(error));
                }
                if !std::mem::replace(&mut self.interrupted, true) {
                    self.events.push_back(Event::Interrupted { error });
                }
            }
        }
    }

    /// Returns the next request. It changes nothing here, so it may be dropped.
    fn next_request(&self) -> Boxed<'static, Done> {
        let (session, reporters) = (self.session.clone(), self.reporters.clone());
        let changes = self.changes.clone();
        if let Stage::Starting { pauses } = self.stage {
            return Box::pin(async move {
                if pauses {
                    sleep(RETRY_PAUSE).await;
                }
                Done::Started(session.store.start_reports(&changes, &reporters).await)
            });
        }
        if self.due.is_empty() {
            let next_end = self.objects.next_end();
            let far_away = Instant::now() + MAX_LEASE;
            let next_end = next_end.map_or(far_away, |end| end.min(far_away) + ROUNDING);
            return Box::pin(async move {
                let masters_changed = async {
                    while !session.store.lacks_reporters(&reporters) {
                        sleep(MASTERS_INTERVAL).await;
                    }
                };
                tokio::select! {
                    biased;
                    () = changes.wait() => Done::Woken,
                    () = sleep_until(next_end) => Done::Woken,
                    () = masters_changed => Done::MastersChanged,
                }
            });
        }
        let keys: Vec<String> = self.due.keys().take(PAGE).cloned().collect();
        let not_before = self.last_look.map(|at| at + MIN_INTERVAL);
        Box::pin(async move {
            if let Some(not_before) = not_before {
                sleep_until(not_before).await;
            }
            let at = Instant::now();
            let inspected = inspect_keys(&session.store, keys.into_iter()).await;
            Done::Inspected(at, inspected)
        })
    }

    fn handle(&mut self, done: Done) -> Result<()> {
        match done {
            Done::Started(started) => {
                started?;
                self.catching_up |= std::mem::take(&mut self.interrupted) || !self.started;
                self.list();
            }
            Done::Woken => {
                let reported = self.changes.take();
                for (key, at) in reported.keys {
                    if let Some(key) = self.changed_object(&key) {
                        self.due.entry(key.to_owned()).or_insert(Some(at));
                    }
                }
                if reported.ended {
                    return Err(Error::unavailable(
                        "the connection that reports changes ended",
                    ));
                }
                if reported.all {
                    self.stage = Stage::Starting { pauses: true };
                }
                let now = Instant::now();
                for key in self.objects.ended(now) {
                    self.due.entry(key.to_owned()).or_insert(Some(now));
                }
            }
            Done::MastersChanged => {
                return Err(Error::unavailable(
                    "a new master does not report changes yet",
                ));
            }
            Done::Inspected(at, inspected) => {
                self.last_look = Some(Instant::now());
                for (key, seen) in inspected? {
                    let unchanged_until = self.due.remove(&key).flatten();
                    // Data of other programs is no object.
                    self.compare(key, seen.unwrap_or_default(), at, unchanged_until);
                }
            }
        }
        Ok(())
    }

    /// Handles the next object of the listing; `None`: all have been listed.
    fn handle_listed(&mut self, found: Option<Listed>, read_at: Instant) {
        let Stage::Listing { unlisted, .. } = &mut self.stage else {
            return;
        };
        if let Some(Listed { name, state }) = found {
            let key = [&self.session.prefix, &*name].concat();
            unlisted.remove(&key);
            self.compare(key, Some(state), read_at, None);
        } else {
            let unlisted = std::mem::take(unlisted);
            self.due.extend(unlisted.into_iter().map(|key| (key, None)));
            self.stage = Stage::Following;
        }
    }

    /// Reads all objects again.
    fn list(&mut self) {
        self.stage = Stage::Listing {
            listing: Box::new(Listing::of_keys(self.session.clone(), self.pattern.clone())),
            unlisted: self.objects.keys().map(str::to_owned).collect(),
        };
    }

    /// Returns the key of the object to inspect when this key has changed, if its name matches.
    fn changed_object<'k>(&self, key: &'k str) -> Option<&'k str> {
        let (object, sharing) = changed_objects(key)?;
        // A queue does not tell which of two names it belongs to.
        let sharing = sharing.filter(|sharing| self.objects.contains(sharing));
        let key = match sharing {
            Some(sharing) if !self.objects.contains(object) => sharing,
            _ => object,
        };
        glob::matches(self.pattern.as_bytes(), key.as_bytes()).then_some(key)
    }

    /// Emits the difference between the last known and this state of an object.
    fn compare(
        &mut self,
        key: String,
        state: Option<ObjectState>,
        at: Instant,
        unchanged_until: Option<Instant>,
    ) {
        let look = Look {
            unchanged_until,
            first: !self.started,
        };
        let now = Known::new(state, at);
        let before = self.objects.take(&key);
        let name = key.strip_prefix(&self.session.prefix).unwrap_or(&key);
        for (kind, change) in before.changes_until(&now, look) {
            self.events.push_back(Event::Changed {
                name: name.to_owned(),
                kind,
                change,
            });
        }
        if now.kind.is_some() {
            self.objects.insert(&key, now);
        }
    }
}

impl Stream for Watch {
    type Item = Result<Event>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Event>>> {
        self.poll_event(cx).map(Some)
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch")
            .field("pattern", &self.pattern)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Client, Embedded};

    /// Returns how often an end is read while 200 changes are reported beside so many other
    /// objects.
    async fn looks_at_ends(others: usize) -> usize {
        let client = Client::builder();
        let client = client.connect_embedded(&Embedded::new()).unwrap();
        for i in 0..others {
            let latch = client.count_down_latch(&format!("other:{i}"));
            latch.try_set_count(1).await.unwrap();
        }
        let mut watch = client.watch("*");
        while watch.next().await.unwrap() != Event::Synchronized {}
        let lock = client.lock("changes");
        let before = known::looks_at_ends();
        for _ in 0..100 {
            let guard = lock.lock().await.unwrap();
            watch.next().await.unwrap();
            guard.unlock().await.unwrap();
            watch.next().await.unwrap();
        }
        known::looks_at_ends() - before
    }

    #[tokio::test(start_paused = true)]
    async fn report_costs_what_has_changed() {
        let [few, many] = [looks_at_ends(10).await, looks_at_ends(1000).await];
        assert!(few > 0);
        assert_eq!(many, few);
    }
}
