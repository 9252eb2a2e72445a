//! The watchdog: one task per client that renews the leases of all its holds and reports losses.
//!
//! A lease is renewed when a third of it has passed (as in Redisson), together with other holds that are due
//! about then. A failed renewal is retried until the end of the lease. At that end the holder is notified of
//! the loss. The task starts with the first hold and ends after the last.
//!
//! A hold passes through three stages:
//!
//! 1. `due`: every hold, ordered by the time at which the watchdog has to look at it;
//! 2. `ready`, one queue per node of a cluster: holds to renew now;
//! 3. a batch in flight, at most [`MAX_BATCHES_IN_FLIGHT`] per node.
//!
//! A batch never mixes nodes, and no node waits for a batch of another. So a node that does not answer
//! affects only the holds that it serves. While a hold is ready or in flight, it stays in `due` for the end
//! of its lease, so that its loss is noticed in time. When its batch ends, or when its slot has moved to
//! another node meanwhile, it returns to `due` and is assigned to a node again.
//!
//! A *sweep* checks all holds of one node at once, so that all losses are noticed together. It starts when
//! a different server process answers for the node, and when one hold was found missing. Each hold is
//! renewed as usual. One with a fixed lease takes the same path with a read-only step, so its lease does
//! not grow. A hold that is being released is skipped and checked after a pause. Missing holds cause at
//! most one sweep per [`SWEEP_PAUSE`] and node.
//!
//! A hold with a [limit](crate::hold::HoldLimits) is looked at when that ends, too. A hold that is
//! a second old ([`REGISTERED_AFTER`]) is added to the [registry of clients](Registration), and
//! removed when it is no longer watched.
//!
//! With *client tracking*, each renewal asks the server to report it if another client changes the
//! key (`store/redis/tracking`). A hold is renewed for the first time after [`TRACKED_AFTER`], so
//! that short holds cost nothing. A change by this client itself (a re-entry, another reader) ends
//! the reports until the next renewal. What must not happen, and what prevents it:
//!
//! - *A report counts as a loss.* It has the hold renewed at once, and only the reply decides.
//! - *A report is missed.* One during a renewal has the hold renewed once more. If all data was
//!   deleted, and on each new connection, all holds of the node are checked.
//! - *Other clients' changes cause as many renewals.* Further reports about the same hold are
//!   ignored for a third of its lease. All holds are checked at most once per [`SWEEP_PAUSE`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::take;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::background::Background;
use crate::client_registry::{EntryNumber, REGISTERED_AFTER, Registration, Role};
use crate::environment::task;
use crate::error::{Loss, Result};
use crate::hold::{Due, Hold, Renewal, RenewalTimes, Renewed, WatchAction, WatchdogState};
use crate::join::{Boxed, join_all};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::log::join_names;
use crate::metrics::{Metrics, Timer};
use crate::step::{Args, Keys, Script, ScriptReply, Step, unexpected_reply};
use crate::store::{Delivery, NodeId, Store, Suspects};
use crate::sync::Mutex;

/// Limit of holds in a batch, as in Redisson: so many that few scripts renew thousands of holds, and so few that no
/// script blocks the server.
const MAX_BATCH_HOLDS: usize = 100;

/// Limit of the total weight of a batch ([`Renewal::weight`]). A single hold may exceed it.
const MAX_BATCH_WEIGHT: usize = 1000;

/// Shortest time between two sweeps of a node because of missing holds: a thousand losses in a row must not
/// cause a thousand sweeps.
const SWEEP_PAUSE: Duration = Duration::from_secs(5);

/// How old a hold is when it is renewed for the first time, so that short holds cost nothing.
const TRACKED_AFTER: Duration = Duration::from_secs(1);

/// Batches in flight per node: a batch that hangs must not delay the others.
const MAX_BATCHES_IN_FLIGHT: usize = 8;

pub(crate) struct Watchdog {
    core: Arc<Core>,
    store: Arc<Store>,
}

/// Releases a hold in the background.
type ReleaseHold = Box<dyn Fn(&Arc<Hold>) + Send + Sync>;

/// What the watchdog shares with its task.
struct Core {
    lease: Lease,
    metrics: Metrics,
    /// Weak: the task does not keep the connections of a dropped client open.
    store: Weak<Store>,
    background: Background,
    schedule: Mutex<Schedule>,
    /// Notified when something is due before the task wakes.
    wake_sooner: Notify,
    suspects: Arc<Suspects>,
    registration: Registration,
    /// See [`Watchdog::release_overdue_with`].
    release: OnceLock<ReleaseHold>,
}

#[derive(Default)]
struct Schedule {
    due: BTreeMap<Due, Arc<Hold>>,
    /// Number of insertions so far.
    insertions: u64,
    /// Holds that were lost at a limit, to release now.
    overdue: Vec<Arc<Hold>>,
    /// By node; `None` while the owner of a slot is unknown, and for the embedded store.
    nodes: BTreeMap<Option<NodeId>, NodeQueue>,
    task: Option<AbortHandle>,
    /// When the task will wake by itself.
    wakes_at: Option<Instant>,
    /// Whether the task has found nothing to watch and is about to end.
    idle: bool,
}

/// The renewals at one node.
#[derive(Default)]
struct NodeQueue {
    /// Holds to renew now, the oldest first.
    ready: VecDeque<Arc<Hold>>,
    /// Number of batches in flight.
    batches: usize,
    /// Start of the latest sweep.
    last_sweep: Option<Instant>,
    /// Start of the next sweep.
    next_sweep: Option<Instant>,
}

impl Watchdog {
    pub(crate) fn new(
        lease: Lease,
        store: Arc<Store>,
        background: Background,
        metrics: Metrics,
        registration: Registration,
    ) -> Watchdog {
        Watchdog {
            core: Arc::new(Core {
                lease,
                metrics,
                store: Arc::downgrade(&store),
                background,
                schedule: Mutex::default(),
                wake_sooner: Notify::new(),
                suspects: store.suspects(),
                registration,
                release: OnceLock::new(),
            }),
            store,
        }
    }

    /// Sets how to release, in the background, a hold that was lost at a limit.
    pub(crate) fn release_overdue_with(
        &self,
        release: impl Fn(&Arc<Hold>) + Send + Sync + 'static,
    ) {
        let _ = self.core.release.set(Box::new(release));
    }

    /// Returns the lease to which the watchdog renews holds.
    pub(crate) fn lease(&self) -> Lease {
        self.core.lease
    }

    /// Starts to watch a hold, or updates when it is due.
    pub(crate) fn watch(&self, hold: &Arc<Hold>) {
        let schedule = &mut *self.core.schedule.lock();
        self.core.reschedule(schedule, hold);
        let runs = |task: &AbortHandle| !task.is_finished();
        if schedule.task.as_ref().is_some_and(runs) {
            if schedule.first_due() < schedule.wakes_at {
                self.core.wake_sooner.notify_one();
            }
        } else if let Some(runtime) = self.core.background.runtime() {
            self.core.start_task(schedule, &runtime);
        }
    }

    /// Has a hold checked now, because an answer to a step out of its turn says that the store does not have it.
    pub(crate) fn suspect(&self, hold: &Arc<Hold>) {
        hold.watchdog_state(|state| state.suspect = true);
        self.watch(hold);
    }

    /// Stops watching a hold.
    pub(crate) fn unwatch(&self, hold: &Arc<Hold>) {
        self.core.remove(&mut self.core.schedule.lock(), hold);
    }

    /// Handles a reply that the store does not have this hold. Other holds at the same node may be missing,
    /// too.
    pub(crate) fn report_missing(&self, hold: &Hold) {
        let node = self.store.node(hold.object.key());
        self.core.plan_sweep(node, SWEEP_PAUSE);
    }

    /// Returns the number of watched holds.
    pub(crate) fn len(&self) -> usize {
        self.core.schedule.lock().due.len()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some(task) = self.core.schedule.lock().task.take() {
            task.abort();
        }
    }
}

impl Schedule {
    /// Returns when the first hold is due.
    fn first_due(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((due, _), _)| *due)
    }

    /// Removes a hold. Returns its entry in the registry.
    fn remove(&mut self, hold: &Hold) -> Option<EntryNumber> {
        let unwatch = |state: &mut WatchdogState| {
            state.registered = false;
            (state.due.take(), state.entry.take())
        };
        let (due, entry) = hold.watchdog_state(unwatch);
        due.inspect(|due| drop(self.due.remove(due)));
        entry
    }

    fn insert(&mut self, hold: &Arc<Hold>, due: Instant) {
        self.insertions += 1;
        let due = (due, self.insertions);
        if let Some(earlier) = hold.watchdog_state(|state| state.due.replace(due)) {
            self.due.remove(&earlier);
        }
        self.due.insert(due, hold.clone());
    }
}

impl Core {
    /// Returns when holds are renewed.
    fn times(&self) -> RenewalTimes {
        RenewalTimes {
            margin: self.lease.duration() - self.lease.renewal_interval(),
            first_after: self.suspects.is_tracking().then_some(TRACKED_AFTER),
            registered_after: self.registration.is_on().then_some(REGISTERED_AFTER),
        }
    }

    /// Returns how much before its time a hold may be renewed, so that batches are fewer and fuller.
    fn batch_window(&self) -> Duration {
        self.lease.duration() / 30
    }

    /// Returns the pause before a failed renewal is retried.
    fn retry_pause(&self) -> Duration {
        self.batch_window()
            .clamp(Duration::from_millis(10), Duration::from_secs(1))
    }

    fn start_task(self: &Arc<Core>, schedule: &mut Schedule, runtime: &Handle) {
        let task = runtime.spawn(task(run_task(self.clone())));
        schedule.task = Some(task.abort_handle());
        schedule.wakes_at = Some(Instant::now());
        schedule.idle = false;
    }

    fn reschedule(&self, schedule: &mut Schedule, hold: &Arc<Hold>) {
        match hold.next_watch(self.times()) {
            Some((due, _)) => schedule.insert(hold, due),
            None => self.remove(schedule, hold),
        }
    }

    /// Stops watching a hold that has ended.
    fn remove(&self, schedule: &mut Schedule, hold: &Hold) {
        if let Some(entry) = schedule.remove(hold) {
            self.registration
                .remove_hold(&hold.object, hold.owner, entry);
        }
    }

    /// Registers a hold, if it is time.
    fn register(&self, hold: &Hold) {
        if self.registration.is_on()
            && let Some(since) = hold.begin_registration(REGISTERED_AFTER)
        {
            let request = hold.state().request.clone();
            let (object, owner) = (&hold.object, hold.owner);
            let registration = &self.registration;
            let entry = registration.add(Role::Holds, object, owner, since, &request);
            hold.watchdog_state(|state| state.entry = entry);
        }
    }

    /// Moves due holds to the queues of their nodes, and takes the batches that may start now.
    fn take_due(self: &Arc<Core>, store: &Store) -> Vec<Batch> {
        let schedule = &mut *self.schedule.lock();
        self.begin_sweeps(schedule, store);
        self.make_ready(schedule, store);
        let mut batches = Vec::new();
        let mut moved = Vec::new();
        schedule.nodes.retain(|node, node_queue| {
            node_queue.take_batches(*node, self, store, &mut batches, &mut moved);
            node_queue.is_used()
        });
        for hold in moved {
            hold.watchdog_state(|state| state.renewing = false);
            self.reschedule(schedule, &hold);
        }
        batches
    }

    /// Plans a sweep of a node: now, or `pause` after the latest sweep.
    fn plan_sweep(&self, node: Option<NodeId>, pause: Duration) {
        let schedule = &mut *self.schedule.lock();
        if schedule.due.is_empty() {
            return;
        }
        let node_queue = schedule.nodes.entry(node).or_default();
        let now = Instant::now();
        let earliest = node_queue.last_sweep.map(|last| last + pause);
        let at = earliest.map_or(now, |earliest| earliest.max(now));
        let at = node_queue.next_sweep.map_or(at, |planned| planned.min(at));
        node_queue.next_sweep = Some(at);
        if Some(at) < schedule.wakes_at {
            self.wake_sooner.notify_one();
        }
    }

    /// Has holds renewed or checked now, because another client has changed their keys.
    fn check_changed(&self, keys: &BTreeSet<Box<str>>) {
        let now = Instant::now();
        let schedule = &mut *self.schedule.lock();
        let is_changed = |hold: &&Arc<Hold>| keys.contains(hold.kind.renewal(hold).key);
        let holds: Vec<Arc<Hold>> = schedule.due.values().filter(is_changed).cloned().collect();
        for hold in holds {
            let is_checked = hold.watchdog_state(|state| {
                let ignored_until = state
                    .reported_at
                    .map(|at| at + self.lease.renewal_interval());
                if ignored_until.is_some_and(|until| now < until) {
                    return false;
                }
                (state.reported_at, state.suspect) = (Some(now), true);
                true
            });
            if is_checked {
                tracing::debug!(
                    lock = hold.object.full_name(),
                    "another client has changed a lock"
                );
                self.reschedule(schedule, &hold);
            }
        }
    }

    /// Marks all holds of the nodes with a due sweep for checking. That includes holds with a renewal in flight: the
    /// store may have run it before the cause of the sweep.
    fn begin_sweeps(&self, schedule: &mut Schedule, store: &Store) {
        let now = Instant::now();
        let mut swept = Vec::new();
        for (node, node_queue) in &mut schedule.nodes {
            if node_queue.next_sweep.is_some_and(|at| at <= now) {
                node_queue.next_sweep = None;
                node_queue.last_sweep = Some(now);
                swept.push(*node);
            }
        }
        if swept.is_empty() {
            return;
        }
        let is_there = |hold: &&Arc<Hold>| swept.contains(&store.node(hold.object.key()));
        let holds: Vec<Arc<Hold>> = schedule.due.values().filter(is_there).cloned().collect();
        tracing::debug!(holds = holds.len(), "checking all holds of a node");
        for hold in holds {
            hold.watchdog_state(|state| state.suspect = true);
            self.reschedule(schedule, &hold);
        }
    }

    /// Moves the holds to renew now to the queues of their nodes.
    fn make_ready(&self, schedule: &mut Schedule, store: &Store) {
        let now = Instant::now();
        let soon = now + self.batch_window();
        let mut later = Vec::new();
        while let Some(entry) = schedule.due.first_entry() {
            if entry.key().0 > soon {
                break;
            }
            let hold = entry.remove();
            hold.watchdog_state(|state| state.due = None);
            self.register(&hold);
            let Some((due, watch)) = hold.next_watch(self.times()) else {
                self.remove(schedule, &hold);
                continue;
            };
            // Regular renewals may be early, to fill a batch.
            let taken = match watch {
                WatchAction::Renew => due <= soon,
                WatchAction::RenewOnTime => due <= now,
                WatchAction::Register | WatchAction::Expire => false,
                WatchAction::Release => {
                    hold.watchdog_state(|state| state.overdue = false);
                    self.remove(schedule, &hold);
                    schedule.overdue.push(hold);
                    continue;
                }
            };
            if taken {
                hold.watchdog_state(|state| state.renewing = true);
                later.push((hold.clone(), hold.next_end()));
                let node = store.node(hold.object.key());
                let node_queue = schedule.nodes.entry(node).or_default();
                node_queue.ready.push_back(hold);
            } else {
                later.push((hold, due));
            }
        }
        for (hold, due) in later {
            schedule.insert(&hold, due);
        }
    }

    /// Releases holds that were lost at a limit, in the background.
    fn release_overdue(&self) {
        let overdue = take(&mut self.schedule.lock().overdue);
        // Outside of the mutex: this may drop the last reference to the client, and with it the watchdog.
        if let Some(release) = self.release.get() {
            overdue.iter().for_each(release);
        }
    }

    /// Plans when the task wakes next. `None` ends the task, because there is nothing to watch.
    ///
    /// It does not end at once: otherwise short holds in sequence would each start and end a task. The
    /// first renewal or registration of a new lease is not due until then, so nothing is missed and nothing has to wake the task.
    fn plan_wake(&self, batches_in_flight: usize) -> Option<Instant> {
        let schedule = &mut *self.schedule.lock();
        let nodes = schedule.nodes.values();
        let sweeps = nodes.filter_map(|node_queue| node_queue.next_sweep);
        let first_due = schedule.first_due();
        let first = first_due.map(|due| sweeps.fold(due, Instant::min));
        let idle = first.is_none() && batches_in_flight == 0;
        schedule.wakes_at = match first {
            None if idle && schedule.idle => None,
            None if idle => {
                let RenewalTimes {
                    first_after,
                    registered_after,
                    ..
                } = self.times();
                let all = [first_after, registered_after].into_iter().flatten();
                let first_due = all.fold(self.lease.renewal_interval(), Duration::min);
                Some(Instant::now() + first_due)
            }
            // The end of a batch also wakes the task.
            None => Some(Instant::now() + self.retry_pause()),
            due => due,
        };
        schedule.idle = idle;
        if schedule.wakes_at.is_none() {
            schedule.task = None;
        }
        schedule.wakes_at
    }

    /// Schedules a hold again after a pause.
    fn retry_later(&self, hold: &Hold) {
        let again = Instant::now() + self.retry_pause();
        hold.watchdog_state(|state| {
            state.not_before = Some(again);
            // Otherwise a hold with a fixed lease would not be checked again.
            state.suspect = true;
        });
    }
}

impl NodeQueue {
    /// Returns whether the node has work, or a recent sweep to remember.
    fn is_used(&self) -> bool {
        let lately = |swept: Instant| swept.elapsed() < SWEEP_PAUSE;
        self.batches > 0
            || !self.ready.is_empty()
            || self.next_sweep.is_some()
            || self.last_sweep.is_some_and(lately)
    }

    /// Takes as many batches as may start now. Adds to `moved` the holds that another node serves by now.
    fn take_batches(
        &mut self,
        node: Option<NodeId>,
        core: &Arc<Core>,
        store: &Store,
        batches: &mut Vec<Batch>,
        moved: &mut Vec<Arc<Hold>>,
    ) {
        // The open batches, oldest first. There is one for each script, and separate ones for holds that are renewed
        // and holds that are only checked.
        let mut open: Vec<OpenBatch> = Vec::new();
        while let Some(hold) = self.ready.pop_front() {
            if hold.next_watch(core.times()).is_none() {
                // Released or lost meanwhile.
                hold.watchdog_state(|state| state.renewing = false);
                continue;
            }
            if store.node(hold.object.key()) != node {
                moved.push(hold);
                continue;
            }
            let renews = hold.state().is_renewed();
            let Renewal { script, weight, .. } = hold.kind.renewal(&hold);
            let is_alike = |one: &OpenBatch| one.script == script && one.batch.renews == renews;
            let found = open.iter().position(is_alike);
            let fitting = found.filter(|at| open[*at].fits(weight));
            let at = match fitting {
                Some(at) => at,
                None if self.batches == MAX_BATCHES_IN_FLIGHT => {
                    self.ready.push_front(hold);
                    break;
                }
                None => {
                    batches.extend(found.map(|full| open.remove(full).batch));
                    self.batches += 1;
                    open.push(OpenBatch {
                        script,
                        remaining_weight: MAX_BATCH_WEIGHT,
                        batch: Batch {
                            holds: Vec::with_capacity(MAX_BATCH_HOLDS),
                            core: core.clone(),
                            node,
                            renews,
                        },
                    });
                    open.len() - 1
                }
            };
            hold.watchdog_state(|state| state.suspect = false);
            open[at].add(hold, weight);
        }
        batches.extend(open.into_iter().map(|open| open.batch));
    }
}

/// A batch to which holds are added.
struct OpenBatch {
    script: &'static Script,
    remaining_weight: usize,
    batch: Batch,
}

impl OpenBatch {
    fn fits(&self, weight: usize) -> bool {
        self.batch.holds.len() < MAX_BATCH_HOLDS && self.remaining_weight >= weight
    }

    fn add(&mut self, hold: Arc<Hold>, weight: usize) {
        self.remaining_weight = self.remaining_weight.saturating_sub(weight);
        self.batch.holds.push(hold);
    }
}

/// Holds that are renewed together. However it ends, dropping it puts each hold back into `due`.
struct Batch {
    holds: Vec<Arc<Hold>>,
    core: Arc<Core>,
    node: Option<NodeId>,
    /// Whether the holds are renewed, or only checked because their leases are fixed.
    renews: bool,
}

impl Drop for Batch {
    fn drop(&mut self) {
        let schedule = &mut *self.core.schedule.lock();
        if let Some(node_queue) = schedule.nodes.get_mut(&self.node) {
            node_queue.batches = node_queue.batches.saturating_sub(1);
        }
        for hold in &self.holds {
            hold.watchdog_state(|state| state.renewing = false);
            self.core.reschedule(schedule, hold);
        }
    }
}

/// The task. If its runtime ends before the last hold, the task continues in the runtime used last.
async fn run_task(core: Arc<Core>) {
    let mut restart = RestartOnDrop {
        core: core.clone(),
        runtime: Handle::current().id(),
        ended: false,
    };
    let mut renewals = JoinSet::new();
    loop {
        {
            let Some(store) = core.store.upgrade() else {
                return;
            };
            for batch in core.take_due(&store) {
                renewals.spawn(task(renew(store.clone(), batch)));
            }
            core.release_overdue();
        }
        let Some(wake) = core.plan_wake(renewals.len()) else {
            break;
        };
        tokio::select! {
            biased;
            Some(_) = renewals.join_next() => {}
            suspected = core.suspects.next() => {
                for (nodes, pause) in [
                    (suspected.nodes, Duration::ZERO),
                    (suspected.changed_nodes, SWEEP_PAUSE),
                ] {
                    nodes.into_iter().for_each(|node| core.plan_sweep(Some(node), pause));
                }
                if !suspected.keys.is_empty() {
                    core.check_changed(&suspected.keys);
                }
            }
            () = core.wake_sooner.notified() => {}
            () = sleep_until(wake) => {}
        }
    }
    restart.ended = true;
}

/// Starts the task again in another runtime if it is dropped before it has ended.
struct RestartOnDrop {
    core: Arc<Core>,
    runtime: tokio::runtime::Id,
    /// The task has ended by itself. If it is needed again, another one has already been started.
    ended: bool,
}

impl Drop for RestartOnDrop {
    fn drop(&mut self) {
        let core = &self.core;
        let schedule = &mut *core.schedule.lock();
        if self.ended || schedule.due.is_empty() || core.store.strong_count() == 0 {
            return;
        }
        if let Some(runtime) = core.background.latest_runtime()
            && runtime.id() != self.runtime
        {
            core.start_task(schedule, &runtime);
        }
    }
}

/// Renews one batch.
async fn renew(store: Arc<Store>, batch: Batch) {
    renew_by_slot(&store, &batch, batch.holds.iter().collect()).await;
}

/// Renews some of the holds of a batch.
fn renew_by_slot<'a>(
    store: &'a Store,
    batch: &'a Batch,
    holds: Vec<&'a Arc<Hold>>,
) -> Boxed<'a, ()> {
    Box::pin(async move {
        // In a cluster each key gets its own script. Two keys are seldom in the same slot, and
        // while a slot moves they may be on two nodes, neither of which would run a script for
        // both. All scripts are sent together, so they take one round trip to the node.
        let has_slots = store.has_slots();
        let mut together: BTreeMap<Option<&str>, Vec<&Arc<Hold>>> = BTreeMap::new();
        for hold in holds {
            let alone = has_slots.then(|| hold.object.key());
            together.entry(alone).or_default().push(hold);
        }
        let renewals = together.iter();
        let renewals =
            renewals.map(|(alone, holds)| renew_together(store, batch, holds, alone.is_some()));
        join_all(renewals).await;
    })
}

/// Renews holds that one script can renew. `is_divided`: all have one key.
async fn renew_together(store: &Store, batch: &Batch, holds: &[&Arc<Hold>], is_divided: bool) {
    let core = &*batch.core;
    let Some(first) = holds.first() else {
        return;
    };
    // A hold that is being released or re-entered is skipped for now. If that happened since the batch
    // was made, it may no longer be due.
    let mut turns = Vec::with_capacity(holds.len());
    let mut step = Renew {
        script: first.kind.renewal(first).script,
        lease: batch.renews.then_some(core.lease),
        holds: Vec::with_capacity(holds.len()),
    };
    for hold in holds {
        let is_due = || {
            let state = hold.state();
            state.held_period().is_some() && state.is_renewed() == batch.renews
        };
        match hold.try_turn() {
            Some(turn) if is_due() => {
                turns.push(turn);
                step.holds.push(hold);
            }
            _ => core.retry_later(hold),
        }
    }
    if step.holds.is_empty() {
        return;
    }
    // A retry does not ask for reports: a server that does not know that may have ended the connection.
    let is_retried = |hold: &&Hold| hold.watchdog_state(|state| state.not_before.is_some());
    let delivery = Delivery {
        tracked: core.suspects.is_tracking() && !step.holds.iter().all(is_retried),
        ..Delivery::IMMEDIATE
    };
    let timer = Timer::start();
    let renewing = store.run_once(&step, delivery, core.lease.renewal_interval());
    let renewing = renewing.await;
    if renewing.is_err() && !is_divided && store.has_slots() {
        // The keys are in several slots, and the script was refused.
        drop(turns);
        return renew_by_slot(store, batch, holds.to_vec()).await;
    }
    core.metrics.renewal_ended(timer, renewing.is_ok());
    match renewing {
        Ok(answer) => {
            let mut renewed = 0;
            for (hold, reply) in step.holds.iter().zip(answer.reply) {
                hold.watchdog_state(|state| {
                    (state.not_before, state.tracked) = (None, delivery.tracked);
                });
                if !reply.is_held() {
                    hold.mark_lost(Loss::NotHeld);
                    continue;
                }
                renewed += 1;
                if step.lease.is_some() {
                    core.metrics.renewed(|| hold.valid_for());
                }
                hold.renewed(answer.sent_at, step.lease, reply);
                tracing::trace!(lock = hold.object.full_name(), owner = %hold.field, "renewed");
            }
            tracing::debug!(renewed, of = step.holds.len(), "renewed a batch");
            if renewed < step.holds.len() {
                core.plan_sweep(batch.node, SWEEP_PAUSE);
            }
        }
        Err(error) => {
            let holds = step.holds.len();
            let locks = join_names(step.holds.iter().map(|hold| hold.object.full_name()));
            if step.holds.iter().all(is_retried) {
                tracing::debug!(%error, holds, locks, "renewal failed again");
            } else {
                tracing::warn!(%error, holds, locks, "renewal failed; retrying until the leases end");
            }
            for hold in &step.holds {
                core.retry_later(hold);
            }
        }
    }
    drop(turns);
}

/// The step that renews one batch: holds of kinds that share a script.
pub(crate) struct Renew<'a> {
    pub(crate) script: &'static Script,
    /// `None`: leaves the leases unchanged and only checks whether the holds exist.
    pub(crate) lease: Option<Lease>,
    pub(crate) holds: Vec<&'a Hold>,
}

impl Step for Renew<'_> {
    /// For each hold, whether it was renewed.
    type Reply = Vec<Renewed>;

    fn script(&self) -> &'static Script {
        self.script
    }

    fn keys(&self) -> Keys<'_> {
        let keys = self.holds.iter();
        keys.map(|hold| hold.kind.renewal(hold).key).collect()
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.lease.map_or(0, Lease::millis));
        for hold in &self.holds {
            for arg in hold.kind.renewal(hold).args {
                args.text(&arg);
            }
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<Vec<Renewed>> {
        let renewed = reply.list()?;
        if renewed.len() != self.holds.len() {
            return Err(unexpected_reply(&renewed));
        }
        renewed.into_iter().map(Renewed::parse).collect()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Vec<Renewed>> {
        let renew = |hold: &&Hold| {
            // One key of another type must not prevent the others from being renewed.
            let renewed = hold.kind.renew(keyspace, hold, self.lease);
            renewed.unwrap_or(Renewed::NotHeld)
        };
        Ok(self.holds.iter().map(renew).collect())
    }
}

#[cfg(test)]
impl Watchdog {
    /// Returns how many holds it has, by use.
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 4] {
        let schedule = self.core.schedule.lock();
        let ready = schedule.nodes.values().map(|node| node.ready.len()).sum();
        [
            ("due", schedule.due.len()),
            ("overdue", schedule.overdue.len()),
            ("ready", ready),
            ("nodes", schedule.nodes.len()),
        ]
    }
}

#[cfg(test)]
mod tests;
