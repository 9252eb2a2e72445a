//! The watchdog: one task per client that renews the leases of all its holds and reports losses.
//! [`Schedule`] decides when it does what with which hold. This file has the task, sends the
//! batches and handles the answers.
//!
//! A lease is renewed when a third of it has passed (as in Redisson), together with other holds
//! that are due about then. A failed renewal is retried until the end of the lease. At that end the
//! holder is notified of the loss. The task starts with the first hold and ends after the last.
//!
//! A *sweep* checks all holds of one node at once, so that all losses are noticed together. It
//! starts when a different server process answers for the node, when a connection to it ends, and
//! when one hold was found missing. Each hold is renewed as usual. One with a fixed lease takes the
//! same path with a read-only step, so its lease does not grow. A hold that is being released is
//! skipped and checked after a pause.
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
//! - *A report is missed.* One during a renewal has the hold renewed once more. All holds of
//!   the node are checked if all data was deleted, when a connection breaks, and on each new one.
//! - *Other clients' changes cause as many renewals.* Further reports about the same hold are
//!   ignored for a third of its lease. Sweeps in a row have growing pauses.
//!
//! The schedule is locked before the state of a hold, and before the registry. A release reads what
//! it needs in the state of its hold ([`WatchdogState`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::runtime::Id;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::background::{Background, StartedTask};
use crate::client_registry::{REGISTERED_AFTER, Registration, Role};
use crate::environment::task;
use crate::error::Loss;
use crate::hold::{Hold, Renewal, RenewalTimes, Renewed, Watch, WatchdogState};
use crate::join::{Boxed, join_all};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::log::join_names;
use crate::metrics::{Metrics, Timer};
use crate::step::{Arg, Keys, Script, ScriptReply, Step, args, unexpected_reply};
use crate::store::{Delivery, NodeId, Store, Suspects};
use crate::sync::Mutex;

mod schedule;

use schedule::{Load, Look, retry_pause};

/// How old a hold is when it is renewed for the first time, so that short holds cost nothing.
const TRACKED_AFTER: Duration = Duration::from_secs(1);

/// The node is `None` while the owner of a slot is unknown, and for the embedded store.
type Schedule = schedule::Schedule<Arc<Hold>, Option<NodeId>>;
type Batch = schedule::Batch<Arc<Hold>, Option<NodeId>>;

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
    state: Mutex<State>,
    /// Notified when something is due before the task wakes.
    wake_sooner: Notify,
    suspects: Arc<Suspects>,
    registration: Registration,
    /// See [`Watchdog::release_overdue_with`].
    release: OnceLock<ReleaseHold>,
}

struct State {
    schedule: Schedule,
    task: StartedTask,
    /// Whether the client was dropped, which ends the task.
    ended: bool,
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
                state: Mutex::new(State {
                    schedule: Schedule::new(lease),
                    task: StartedTask::default(),
                    ended: false,
                }),
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
        let state = &mut self.core.state.lock();
        self.core.watch_awake(state, hold, Instant::now());
    }

    /// The same, for a new guard of a hold that was granted, or last watched, at `granted_at` or later. If a sweep has left it out
    /// since, it is checked now: the store may have lost it before.
    pub(crate) fn watch_granted(&self, hold: &Arc<Hold>, granted_at: Instant, now: Instant) {
        let state = &mut *self.core.state.lock();
        if state.schedule.has_swept_since(granted_at) {
            hold.watchdog_state(WatchdogState::suspect);
        }
        self.core.watch_awake(state, hold, now);
    }

    /// Has a hold checked now, because an answer to a step out of its turn says that the store does
    /// not have it.
    pub(crate) fn suspect(&self, hold: &Arc<Hold>) {
        hold.watchdog_state(WatchdogState::suspect);
        self.watch(hold);
    }

    /// Stops watching a hold.
    pub(crate) fn unwatch(&self, hold: &Arc<Hold>) {
        let schedule = &mut self.core.state.lock().schedule;
        self.core.unwatch(schedule, hold);
    }

    /// Handles a reply that the store does not have this hold. Other holds at the same node may be
    /// missing, too.
    pub(crate) fn report_missing(&self, hold: &Hold) {
        let node = self.store.node(hold.object.key());
        self.core.plan_sweep(node, false);
    }

    /// Returns the number of watched holds.
    pub(crate) fn len(&self) -> usize {
        self.core.state.lock().schedule.len()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.core.state.lock().ended = true;
        self.core.wake_sooner.notify_one();
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

    /// Starts the task: again, if it ran in a runtime that has `ended`.
    fn start_task(self: &Arc<Core>, state: &mut State, ended: Option<Id>) {
        state.schedule.started(Instant::now());
        let core = self.clone();
        let restart = move |ended| {
            let state = &mut *core.state.lock();
            state.task = StartedTask::default();
            if !state.ended && state.schedule.len() > 0 {
                core.start_task(state, Some(ended));
            }
        };
        let work = run_task(self.clone());
        state.task = self.background.start(ended, work, restart);
    }

    /// Has the schedule watch a hold, unless that has ended.
    fn watch(&self, schedule: &mut Schedule, hold: &Arc<Hold>, now: Instant) {
        let mut state = hold.state_at(|| now);
        if let Some(watch) = state.next_watch(self.times(), now) {
            return schedule.watch(&mut state.watchdog.place, hold, watch);
        }
        drop(state);
        self.unwatch(schedule, hold);
    }

    /// The same, and has the task run and wake in time.
    fn watch_awake(self: &Arc<Core>, state: &mut State, hold: &Arc<Hold>, now: Instant) {
        self.watch(&mut state.schedule, hold, now);
        if state.task.is_running() {
            self.wake_in_time(&state.schedule);
        } else {
            self.start_task(state, None);
        }
    }

    /// Wakes the task, if it would wake too late by itself.
    fn wake_in_time(&self, schedule: &Schedule) {
        if schedule.wakes_too_late() {
            self.wake_sooner.notify_one();
        }
    }

    fn unwatch(&self, schedule: &mut Schedule, hold: &Hold) {
        let unwatch = |state: &mut WatchdogState| {
            state.registered = false;
            schedule.unwatch(&mut state.place)
        };
        if let Some(number) = hold.watchdog_state(unwatch) {
            let registration = &self.registration;
            registration.remove_hold(&hold.object, hold.owner, number);
        }
    }

    /// Has holds renewed or checked now.
    fn check(&self, schedule: &mut Schedule, holds: &[Arc<Hold>]) {
        let now = Instant::now();
        for hold in holds {
            hold.watchdog_state(WatchdogState::suspect);
            self.watch(schedule, hold, now);
        }
    }

    /// Registers a hold, unless its period has ended.
    fn register(&self, schedule: &mut Schedule, hold: &Hold) {
        if self.registration.is_on()
            && let Some(since) = hold.begin_registration(REGISTERED_AFTER)
        {
            let request = hold.state().request.clone();
            let (object, owner) = (&hold.object, hold.owner);
            let registration = &self.registration;
            let number = registration.add(Role::Holds, object, owner, since, &request);
            let place = hold.watchdog_state(|state| state.place);
            schedule.registered(place, number);
        }
    }

    /// Begins the work that is due now. Returns the batches to send, and the holds to release.
    fn begin(self: &Arc<Core>, store: &Store) -> (Vec<InFlight>, Vec<Arc<Hold>>) {
        let schedule = &mut self.state.lock().schedule;
        let now = Instant::now();
        let look = LookAt {
            core: self,
            store,
            now,
        };
        let swept = schedule.begin_sweeps(now, &look);
        if !swept.is_empty() {
            tracing::debug!(holds = swept.len(), "checking all holds of a node");
        }
        self.check(schedule, &swept);
        let work = schedule.begin(now, &look);
        for hold in &work.register {
            self.register(schedule, hold);
        }
        for hold in &work.release {
            hold.watchdog_state(|state| state.overdue = false);
        }
        for hold in &work.ended {
            self.unwatch(schedule, hold);
        }
        let batches = work.batches.into_iter();
        let batches = batches.map(|batch| InFlight {
            core: self.clone(),
            batch,
        });
        (batches.collect(), work.release)
    }

    /// See [`Schedule::plan_sweep`].
    fn plan_sweep(&self, node: Option<NodeId>, at_once: bool) {
        let schedule = &mut self.state.lock().schedule;
        if schedule.plan_sweep(node, at_once, Instant::now()) {
            self.wake_sooner.notify_one();
        }
    }

    /// Has holds renewed or checked now, because another client has changed their keys.
    fn check_changed(&self, keys: &BTreeSet<Box<str>>) {
        let schedule = &mut self.state.lock().schedule;
        let is_changed = |hold: &Arc<Hold>| keys.contains(hold.kind.renewal(hold).key);
        let changed = schedule.reported(Instant::now(), is_changed);
        for hold in &changed {
            tracing::debug!(
                lock = hold.object.full_name(),
                "another client has changed a lock"
            );
        }
        self.check(schedule, &changed);
    }

    /// Releases holds that were lost at a limit, in the background.
    fn release(&self, overdue: &[Arc<Hold>]) {
        // Outside of the mutex: this may drop the last reference to the client, and with it the
        // watchdog.
        if let Some(release) = self.release.get() {
            overdue.iter().for_each(release);
        }
    }

    /// Plans when the task wakes next. `None` ends the task, because there is nothing to watch or the client was dropped.
    fn plan_wake(&self, batches_in_flight: usize) -> Option<Instant> {
        let times = self.times();
        let all = [times.first_after, times.registered_after];
        let first_renewal = all.into_iter().flatten();
        let first_renewal = first_renewal.fold(self.lease.renewal_interval(), Duration::min);
        let state = &mut *self.state.lock();
        let schedule = &mut state.schedule;
        let wakes_at = schedule.plan_wake(Instant::now(), batches_in_flight, first_renewal);
        let wakes_at = wakes_at.filter(|_| !state.ended);
        if wakes_at.is_none() {
            state.task = StartedTask::default();
        }
        wakes_at
    }

    /// Schedules a hold again after a pause.
    fn retry_later(&self, hold: &Hold) {
        let again = Instant::now() + retry_pause(self.lease);
        hold.watchdog_state(|state| {
            state.not_before = Some(again);
            // Otherwise a hold with a fixed lease would not be checked again.
            state.suspect();
        });
    }
}

/// What the schedule has to know about holds, now.
struct LookAt<'a> {
    core: &'a Core,
    store: &'a Store,
    now: Instant,
}

impl Look<Arc<Hold>, Option<NodeId>> for LookAt<'_> {
    fn watch(&self, hold: &Arc<Hold>) -> Option<Watch> {
        let state = hold.state_at(|| self.now);
        state.next_watch(self.core.times(), self.now)
    }

    fn load(&self, hold: &Arc<Hold>) -> Load<Option<NodeId>> {
        let Renewal { script, weight, .. } = hold.kind.renewal(hold);
        Load {
            node: self.store.node(hold.object.key()),
            script,
            renews: hold.state_at(|| self.now).is_renewed(),
            weight,
        }
    }
}

/// A batch in flight. However it ends, dropping it has each of its holds watched again.
struct InFlight {
    core: Arc<Core>,
    batch: Batch,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let schedule = &mut self.core.state.lock().schedule;
        schedule.batch_ended(&self.batch);
        let now = Instant::now();
        for (_, hold) in &self.batch.holds {
            self.core.watch(schedule, hold, now);
        }
        // The task may be another one than that which began the batch: the runtime of that one has ended.
        self.core.wake_in_time(schedule);
    }
}

/// The task. If its runtime ends before the last hold, the task continues in another one that the client has used.
async fn run_task(core: Arc<Core>) {
    let mut renewals = JoinSet::new();
    loop {
        {
            let Some(store) = core.store.upgrade() else {
                return;
            };
            let (batches, overdue) = core.begin(&store);
            for batch in batches {
                renewals.spawn(task(renew(store.clone(), batch)));
            }
            core.release(&overdue);
        }
        let Some(wake) = core.plan_wake(renewals.len()) else {
            return;
        };
        tokio::select! {
            biased;
            Some(_) = renewals.join_next() => {}
            suspected = core.suspects.next() => {
                for (nodes, at_once) in [(suspected.nodes, true), (suspected.changed_nodes, false)] {
                    nodes.into_iter().for_each(|node| core.plan_sweep(Some(node), at_once));
                }
                if !suspected.keys.is_empty() {
                    core.check_changed(&suspected.keys);
                }
            }
            () = core.wake_sooner.notified() => {}
            () = sleep_until(wake) => {}
        }
    }
}

/// Renews one batch.
async fn renew(store: Arc<Store>, batch: InFlight) {
    let holds = batch.batch.holds.iter().map(|(_, hold)| hold);
    renew_by_slot(&store, &batch, holds.collect()).await;
}

/// Renews some of the holds of a batch.
fn renew_by_slot<'a>(
    store: &'a Store,
    batch: &'a InFlight,
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
async fn renew_together(
    store: &Store,
    in_flight: &InFlight,
    holds: &[&Arc<Hold>],
    is_divided: bool,
) {
    let InFlight { core, batch } = in_flight;
    // A hold that is being released or re-entered is skipped for now. If that happened since the batch
    // was made, it may no longer be due.
    let mut turns = Vec::with_capacity(holds.len());
    let mut free: Vec<&Hold> = Vec::with_capacity(holds.len());
    for hold in holds {
        match hold.try_turn() {
            Some(turn) if hold.state().begin_renewal(batch.renews) => {
                turns.push(turn);
                free.push(hold);
            }
            _ => core.retry_later(hold),
        }
    }
    if free.is_empty() {
        return;
    }
    let lease = batch.renews.then_some(core.lease);
    let step = renew_holds(batch.script, lease, &free);
    // A retry does not ask for reports: a server that does not know that may have ended the connection.
    let is_retried = |hold: &&Hold| hold.watchdog_state(|state| state.not_before.is_some());
    // Without an answer, as when this runtime ends, each reason to check a hold remains.
    let suspicion = |hold: &&Hold| hold.state().watchdog.latest_suspicion();
    let suspicions = Vec::from_iter(free.iter().map(suspicion));
    let delivery = Delivery {
        tracked: core.suspects.is_tracking() && !free.iter().all(is_retried),
        ..Delivery::IMMEDIATE
    };
    let timer = Timer::start();
    let renewing = store.run_once(&step, delivery, core.lease.renewal_interval());
    let renewing = renewing.await;
    if renewing.is_err() && !is_divided && store.has_slots() {
        // The keys are in several slots, and the script was refused.
        drop(turns);
        return renew_by_slot(store, in_flight, holds.to_vec()).await;
    }
    core.metrics.renewal_ended(timer, renewing.is_ok());
    match renewing {
        Ok(answer) => {
            let mut renewed = 0;
            for ((hold, suspicion), reply) in free.iter().zip(suspicions).zip(answer.reply) {
                hold.watchdog_state(|state| {
                    state.refuted(suspicion);
                    state.unanswered &= lease.is_none();
                    (state.not_before, state.tracked) = (None, delivery.tracked);
                });
                if !reply.is_held() {
                    hold.mark_lost(Loss::NotHeld);
                    continue;
                }
                renewed += 1;
                if lease.is_some() {
                    core.metrics.renewed(|| hold.valid_for());
                }
                hold.renewed(answer.sent_at, lease, reply);
                tracing::trace!(lock = hold.object.full_name(), owner = %hold.field, "renewed");
            }
            tracing::debug!(renewed, of = free.len(), "renewed a batch");
            if renewed < free.len() {
                core.plan_sweep(batch.node, false);
            }
        }
        Err(error) => {
            let holds = free.len();
            let locks = join_names(free.iter().map(|hold| hold.object.full_name()));
            if free.iter().all(is_retried) {
                tracing::debug!(%error, holds, locks, "renewal failed again");
            } else {
                tracing::warn!(%error, holds, locks, "renewal failed; retrying until the leases end");
            }
            for hold in &free {
                core.retry_later(hold);
            }
        }
    }
    drop(turns);
}

/// The step that renews one batch: holds of kinds that share a script. Replies for each hold whether it was renewed. `lease`: `None`
/// leaves the leases unchanged and only checks whether the holds exist.
pub(crate) fn renew_holds<'a>(
    script: &'static Script,
    lease: Option<Lease>,
    holds: &[&'a Hold],
) -> Step<'a, Vec<Renewed>> {
    let holds = holds.to_vec();
    let number = holds.len();
    let mut args = args![lease];
    let mut keys = Keys::with_capacity(number);
    for hold in &holds {
        let renewal = hold.kind.renewal(hold);
        keys.push(renewal.key.into());
        args.extend(renewal.args.into_iter().map(Arg::Text));
    }
    let decode = move |reply: ScriptReply| {
        let renewed = reply.list()?;
        if renewed.len() != number {
            return Err(unexpected_reply(&renewed));
        }
        renewed.into_iter().map(Renewed::parse).collect()
    };
    let apply = move |keyspace: &mut Keyspace| {
        let renew = |hold: &&Hold| {
            // One key of another type must not prevent the others from being renewed.
            let renewed = hold.kind.renew(keyspace, hold, lease);
            renewed.unwrap_or(Renewed::NotHeld)
        };
        Ok(holds.iter().map(renew).collect())
    };
    Step::new(script, keys, args, decode, apply)
}

#[cfg(test)]
impl Watchdog {
    /// Returns how many holds it has, by use.
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 4] {
        self.core.state.lock().schedule.sizes()
    }
}

#[cfg(test)]
mod tests;
