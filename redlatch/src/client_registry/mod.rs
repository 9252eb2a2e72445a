//! The registry of clients: each client writes into a hash of its own which process it is, and what
//! it has held or waited for longer than a second. Invariant: it is only information. No lock
//! depends on it, and it costs nothing before that second.
//!
//! 1. The watchdog and the waiters add entries after a second ([`REGISTERED_AFTER`]), when they
//!    wake anyway, and remove them when the hold or wait ends. That only changes a map in memory.
//! 2. The first entry starts a task. It collects changes for [`BATCH_WINDOW`], and writes them with
//!    one step. The hash has the watchdog's lease as its time to live, which the task renews each
//!    time a third of it has passed. Times are those of the store, computed from ages, because
//!    clients have different clocks.
//! 3. The step returns the number of fields. If it is unexpected (the hash has expired, was
//!    changed, or is that of another client with the same id), the task replaces the hash.
//! 4. When the last entry has ended, the task deletes the hash and ends. If the process dies, it
//!    expires.
//! 5. An outage makes the task wait until the next renewal, and then replace the hash. After any
//!    other error (no memory) it pauses for some seconds, and in the end for minutes
//!    ([`LONGEST_PAUSE`]). Without permission the client writes nothing any more. Reading does not
//!    depend on that.
//!
//! What must not happen, and what prevents it:
//!
//! - *A release waits for the registry.* It only changes the map. `Client::flush` waits for one
//!   attempt to write.
//! - *An entry of an earlier hold.* It is removed when the watchdog stops watching the hold period.
//!   A hold that is a second old is handed off to no other request.
//! - *An entry harms its reader.* Texts are cut when they are written and read, fields and hashes
//!   beyond a size are not read, and what cannot be parsed is missing. The command escapes what it
//!   prints.
//!
//! The key has no prefix, because a holder is looked up by its id. `ClientBuilder::registry(false)`
//! turns the registry off.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Id;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use self::step::{Setting, Write};
use crate::background::{Background, StartedTask};
use crate::backoff::Backoff;
use crate::environment::{ProcessInfo, process_info, task_id};
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::name::{KeyLayout, ObjectKeys, client_key};
use crate::owner::{ClientId, Owner};
use crate::store::{Delivery, Store};
use crate::sync::{Mutex, wait_for};

#[cfg(test)]
mod differential;
mod entry;
mod read;
mod step;
#[cfg(test)]
mod tests;

pub use entry::{ClientInfo, RegistryEntry};
pub(crate) use entry::{Registered, Role, shortened};
pub(crate) use read::{AllClients, Sought};

/// How long a hold or wait lasts until it is registered, so that shorter ones cost nothing.
pub(crate) const REGISTERED_AFTER: Duration = Duration::from_secs(1);

/// How long changes are collected before they are written.
const BATCH_WINDOW: Duration = Duration::from_millis(50);

/// How long nothing is written after the store has refused it once.
const FIRST_PAUSE: Duration = Duration::from_secs(4);

/// How long nothing is written after the store has refused it again and again.
const LONGEST_PAUSE: Duration = Duration::from_secs(180);

/// Limit of entries in one step, so that no script blocks the server.
const MAX_STEP_ENTRIES: usize = 100;

/// Limit of holds of a client, and of its waits, so that readers need not read more. Further ones
/// are not registered.
const MAX_PER_ROLE: usize = 500;

/// Limit of entries of a client.
const MAX_ENTRIES: usize = 2 * MAX_PER_ROLE;

/// What one client registers about itself.
#[derive(Clone)]
pub(crate) struct Registration(Arc<Shared>);

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Registration").field(&self.0.key).finish()
    }
}

struct Shared {
    key: String,
    /// Distinguishes this client from others with the same id.
    instance: String,
    /// Text that the user has chosen for the client.
    label: Option<String>,
    created: Instant,
    ttl: Lease,
    /// Weak: the task does not keep the connections of a dropped client open.
    store: Weak<Store>,
    background: Background,
    /// Whether the client writes to the registry.
    is_on: AtomicBool,
    /// Whether the client reads the registry.
    is_read: bool,
    state: Mutex<State>,
    /// Notified when there is something to write.
    changed: Notify,
    /// Notified when changes are to be written at once.
    urgent: Notify,
    /// Notified after each attempt to write.
    written: Notify,
}

#[derive(Default)]
struct State {
    /// By field.
    entries: BTreeMap<String, Entry>,
    /// Number of these that are waits.
    waits: usize,
    /// Number of the latest entry.
    latest: u32,
    /// The fields that may differ in the store.
    unwritten: BTreeSet<String>,
    /// Whether the hash may exist in the store.
    may_exist: bool,
    /// Whether the hash in the store is as the client has written it, except for `unwritten`.
    is_known: bool,
    /// Whether the task is writing.
    is_writing: bool,
    /// Whether the latest attempt to write has failed.
    failed: bool,
    /// How often in a row the store has refused to write.
    refusals: u32,
    task: StartedTask,
}

/// Number of an entry, which distinguishes the holds of one owner.
pub(crate) type EntryNumber = NonZeroU32;

struct Entry {
    number: EntryNumber,
    since: Instant,
    /// Number of waits of the owner for the object.
    waits: usize,
    /// What the value contains behind the time.
    text: String,
}

#[cfg(test)]
impl Registration {
    /// Returns how many fields it has, and how many of them it has to write.
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 2] {
        let state = self.0.state.lock();
        [
            ("entries", state.entries.len()),
            ("unwritten", state.unwritten.len()),
        ]
    }
}

impl Registration {
    pub(crate) fn new(
        id: &ClientId,
        label: Option<String>,
        ttl: Lease,
        store: &Arc<Store>,
        background: Background,
        is_on: bool,
    ) -> Registration {
        Registration(Arc::new(Shared {
            key: client_key(id.as_str()),
            instance: ClientId::random().as_str().to_owned(),
            label,
            created: Instant::now(),
            ttl,
            store: Arc::downgrade(store),
            background,
            is_on: is_on.into(),
            is_read: is_on,
            state: Mutex::default(),
            changed: Notify::new(),
            urgent: Notify::new(),
            written: Notify::new(),
        }))
    }

    /// Returns the label of the client, if it has one.
    pub(crate) fn label(&self) -> Option<&str> {
        self.0.label.as_deref()
    }

    /// Returns whether the client writes to the registry.
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Registers a hold or wait that began at `since`, or replaces its entry. Returns the number of
    /// the entry; `None` if it is not registered.
    pub(crate) fn add(
        &self,
        role: Role,
        object: &ObjectKeys,
        owner: Owner,
        since: Instant,
        request: &RequestInfo,
    ) -> Option<EntryNumber> {
        let shared = &self.0;
        // Inspection does not show the holders of permits and of a group, so their entries would
        // never be looked up.
        let is_hidden = matches!(object.layout(), KeyLayout::Permits | KeyLayout::Group);
        if !self.is_on() || (role == Role::Holds && is_hidden) {
            return None;
        }
        let field = role.field(object, owner);
        let text = entry::entry_text(object, request);
        let state = &mut *shared.state.lock();
        if let Some(earlier) = state.entries.get_mut(&field) {
            if role == Role::Waits {
                earlier.waits += 1;
                return Some(earlier.number);
            }
        } else if !state.has_room(role) {
            return None;
        }
        state.latest = state.latest.wrapping_add(1);
        let number = EntryNumber::new(state.latest).unwrap_or(EntryNumber::MAX);
        state.unwritten.insert(field.clone());
        let entry = Entry {
            number,
            since,
            waits: 1,
            text,
        };
        state.entries.insert(field, entry);
        state.waits += usize::from(role == Role::Waits);
        shared.notify_task(state);
        Some(number)
    }

    /// Registers a wait for an object. `None` if it is not registered.
    pub(crate) fn add_wait(
        &self,
        object: &Arc<ObjectKeys>,
        owner: Owner,
        since: Instant,
        request: &RequestInfo,
    ) -> Option<RegisteredWait> {
        let registered = self.add(Role::Waits, object, owner, since, request);
        registered.map(|_| RegisteredWait {
            registration: self.clone(),
            object: object.clone(),
            owner,
        })
    }

    /// Removes a hold that has ended, unless a later hold of the owner has replaced its entry.
    pub(crate) fn remove_hold(&self, object: &ObjectKeys, owner: Owner, number: EntryNumber) {
        let has_ended = |entry: &mut Entry| entry.number == number;
        self.remove(Role::Holds, object, owner, has_ended);
    }

    /// Removes the entry of an owner, if it has ended.
    fn remove(
        &self,
        role: Role,
        object: &ObjectKeys,
        owner: Owner,
        has_ended: impl FnOnce(&mut Entry) -> bool,
    ) {
        if !self.is_on() {
            return;
        }
        let field = role.field(object, owner);
        let state = &mut *self.0.state.lock();
        if state.entries.get_mut(&field).is_some_and(has_ended) {
            state.entries.remove(&field);
            state.waits -= usize::from(role == Role::Waits);
            state.unwritten.insert(field);
            self.0.notify_task(state);
        }
    }

    /// Waits until the store has all changes so far, or writing has failed; not longer than a lease
    /// after `begun`.
    pub(crate) async fn flush(&self, begun: Instant) {
        let shared = &self.0;
        let is_flushed = || {
            let state = &mut *shared.state.lock();
            if !self.is_on() || state.failed || state.is_written() {
                return Some(());
            }
            shared.notify_task(state);
            shared.urgent.notify_one();
            None
        };
        // The runtime of the task may not be driven.
        let written = wait_for(&shared.written, is_flushed);
        let left = shared.ttl.duration().saturating_sub(begun.elapsed());
        let _ = timeout(shared.ttl.renewal_interval().min(left), written).await;
    }
}

/// The request of a hold or wait.
#[derive(Debug, Clone)]
pub(crate) struct RequestInfo {
    /// The task that made it, if it was one.
    task: Option<tokio::task::Id>,
    pub(crate) note: Option<Box<str>>,
}

impl RequestInfo {
    /// Creates that of a request of the current task.
    pub(crate) fn of_task() -> RequestInfo {
        RequestInfo {
            task: task_id(),
            note: None,
        }
    }
}

/// A registered wait. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct RegisteredWait {
    registration: Registration,
    object: Arc<ObjectKeys>,
    owner: Owner,
}

impl RegisteredWait {
    /// Returns whether the client may register more waits.
    pub(crate) fn has_room_for_more(&self) -> bool {
        let registration = &self.registration;
        registration.is_on() && registration.0.state.lock().has_room(Role::Waits)
    }
}

impl Drop for RegisteredWait {
    fn drop(&mut self) {
        let has_ended = |entry: &mut Entry| {
            entry.waits -= 1;
            entry.waits == 0
        };
        let registration = &self.registration;
        registration.remove(Role::Waits, &self.object, self.owner, has_ended);
    }
}

impl Shared {
    /// Has the task write the changes. Starts it if it does not run, or its runtime has ended.
    fn notify_task(self: &Arc<Shared>, state: &mut State) {
        match state.task.is_running() {
            true => self.changed.notify_one(),
            false => self.start_task(state, None),
        }
    }

    /// Starts the task: again, if it ran in a runtime that has `ended`.
    fn start_task(self: &Arc<Shared>, state: &mut State, ended: Option<Id>) {
        let shared = self.clone();
        let restart = move |ended| {
            let state = &mut *shared.state.lock();
            // A step in flight may have been applied or not.
            (state.is_writing, state.failed, state.is_known) = (false, true, false);
            state.task = StartedTask::default();
            if !state.entries.is_empty() && shared.store.strong_count() > 0 {
                shared.start_task(state, Some(ended));
            }
            shared.written.notify_waiters();
        };
        let work = run_task(self.clone());
        state.task = self.background.start(ended, work, restart);
    }

    /// Writes all changes.
    async fn write(&self, store: &Store, process: &ProcessInfo) -> Result<()> {
        let mut is_first = true;
        while let Some(step) = self.next_step(process, is_first) {
            is_first = false;
            let within = self.ttl.renewal_interval();
            let answer = store
                .run_once(&step.step(), Delivery::IMMEDIATE, within)
                .await?;
            let state = &mut *self.state.lock();
            if state.entries.is_empty() && state.unwritten.is_empty() {
                // Also if entries have ended meanwhile: the next step deletes the hash.
                state.may_exist = answer.reply > 0;
            }
            if state.unwritten.is_empty() {
                let about_client = entry::CLIENT_FIELDS.len() - usize::from(self.label.is_none());
                let expected = about_client + state.entries.len();
                state.is_known = usize::try_from(answer.reply) == Ok(expected);
            }
        }
        Ok(())
    }

    /// Returns the next step that makes the hash what it should be; the first one renews the hash
    /// in any case.
    fn next_step(&self, process: &ProcessInfo, is_first: bool) -> Option<Write<'_>> {
        let state = &mut *self.state.lock();
        state.is_writing = true;
        let mut step = Write {
            key: &self.key,
            ttl: self.ttl,
            replace: !state.is_known || state.entries.is_empty(),
            instance: &self.instance,
            removed: Vec::new(),
            set: Vec::new(),
        };
        if state.entries.is_empty() {
            state.unwritten.clear();
            state.is_known = false;
            return state.may_exist.then_some(step);
        }
        if step.replace {
            state.unwritten = state.entries.keys().cloned().collect();
            let age = self.created.elapsed();
            let label = self.label.as_deref();
            step.set = entry::client_settings(process, label, &self.instance, age);
            (state.may_exist, state.is_known) = (true, true);
        }
        for _ in 0..MAX_STEP_ENTRIES {
            let Some(field) = state.unwritten.pop_first() else {
                break;
            };
            match state.entries.get(&field) {
                Some(entry) => step.set.push(Setting {
                    field,
                    age: Some(entry.since.elapsed()),
                    text: entry.text.clone(),
                }),
                None => step.removed.push(field),
            }
        }
        let writes = !step.set.is_empty() || !step.removed.is_empty();
        (writes || is_first).then_some(step)
    }

    /// Handles the end of an attempt to write.
    fn written(&self, result: Result<()>) -> Next {
        let state = &mut *self.state.lock();
        (state.is_writing, state.failed) = (false, result.is_err());
        let refusal = result.err().filter(|error| !error.is_transient());
        if state.failed {
            // What the store has is unknown. Its time to live limits how long.
            state.is_known = false;
        }
        let pauses = Backoff::exponential(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
        let pause = refusal.is_some().then(|| pauses.pause(state.refusals));
        state.refusals = match pause {
            Some(_) => state.refusals.saturating_add(1),
            None => 0,
        };
        if let Some(error @ Error::NotPermitted { .. }) = refusal {
            // From now on it registers nothing.
            if self.is_on.swap(false, Ordering::Relaxed) {
                tracing::debug!(reason = %error, "the client is not in the registry");
            }
            (state.entries, state.unwritten, state.waits) = Default::default();
        }
        let is_on = self.is_on.load(Ordering::Relaxed);
        let is_done = !is_on || (state.entries.is_empty() && state.is_written());
        if is_done {
            state.task = StartedTask::default();
        }
        self.written.notify_waiters();
        match (is_done, pause) {
            (true, _) => Next::End,
            (false, Some(pause)) => Next::Pause(pause),
            (false, None) => Next::Renew,
        }
    }
}

impl State {
    /// Returns whether there are fewer holds or waits than the limit.
    fn has_room(&self, role: Role) -> bool {
        let others = match role {
            Role::Holds => self.entries.len() - self.waits,
            Role::Waits => self.waits,
        };
        others < MAX_PER_ROLE
    }

    /// Returns whether the store has all changes, as far as is known.
    fn is_written(&self) -> bool {
        !self.is_writing && self.unwritten.is_empty() && self.may_exist != self.entries.is_empty()
    }
}

/// What the task does after an attempt to write.
enum Next {
    Renew,
    Pause(Duration),
    End,
}

/// The task, which runs while there are entries.
async fn run_task(shared: Arc<Shared>) {
    let process = process_info();
    loop {
        let _ = timeout(BATCH_WINDOW, shared.urgent.notified()).await;
        let Some(store) = shared.store.upgrade() else {
            return;
        };
        let result = shared.write(&store, &process).await;
        drop(store);
        match shared.written(result) {
            Next::Renew => {
                let _ = timeout(shared.ttl.renewal_interval(), shared.changed.notified()).await;
            }
            Next::Pause(pause) => sleep(pause).await,
            Next::End => return,
        }
    }
}
