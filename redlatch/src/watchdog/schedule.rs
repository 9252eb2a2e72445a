//! What the watchdog does with which hold, and when. [`Schedule`] decides. It has no lock, no task
//! and no clock: the watchdog has them, tells it about holds ([`Look`]), and does what it says.
//!
//! 1. A watched hold has one entry and is due at one time: for its renewal, its registration, or
//!    the end of its lease or of a limit.
//! 2. When a renewal is due, the hold is *ready*: it stands in the queue of the node that serves
//!    it. From there it is put into a batch. It stays due for its end until the batch has ended.
//! 3. A regular renewal may be early by a thirtieth of the lease, so that batches are fewer and
//!    fuller. The first one may not, nor one after a failure.
//! 4. All holds of a batch are at one node, share a script, and are all renewed or all checked.
//! 5. A ready hold whose slot has moved to another node is due again.
//! 6. A *sweep* has all holds of a node checked at once.
//!
//! Invariant: a hold is in no more than one queue or batch, and each watched hold is due at some
//! time. What must not happen:
//!
//! - *A hold is in two batches.* The entry of a hold that is ready or in a batch outlives its
//!   release. If the hold is acquired again before the batch has ended, it finds that entry.
//! - *A loss is noticed late.* The end of a hold is due also while it is renewed.
//! - *A node that does not answer delays others.* Queues and limits are those of one node.
//! - *A thousand losses cause a thousand sweeps.* [`NodeQueue::sweep_pause`].

use std::collections::{BTreeMap, VecDeque};
use std::mem::take;
use std::time::Duration;

use tokio::time::Instant;

use crate::client_registry::EntryNumber;
use crate::hold::{ScheduleSlot, Watch, WatchAction};
use crate::lease::Lease;
use crate::step::Script;

/// Limit of holds in a batch, as in Redisson: so many that few scripts renew thousands of holds,
/// and so few that no script blocks the server.
const MAX_BATCH_HOLDS: usize = 100;

/// Limit of the total weight of a batch ([`Load::weight`]). A single hold may exceed it.
const MAX_BATCH_WEIGHT: usize = 1000;

/// Shortest time between the first two sweeps of a node.
const FIRST_SWEEP_PAUSE: Duration = Duration::from_millis(100);

/// Shortest time between two sweeps of a node after many in a row.
const LONGEST_SWEEP_PAUSE: Duration = Duration::from_secs(5);

/// After so long without a sweep, the next is a first one again.
const SWEEPS_REMEMBERED_FOR: Duration = Duration::from_secs(10);

/// Batches in flight per node: a batch that hangs must not delay the others.
const MAX_BATCHES_IN_FLIGHT: usize = 8;

/// See the [module](self). `H` refers to a hold, `N` to a node.
pub(super) struct Schedule<H, N> {
    /// The watchdog's lease.
    lease: Lease,
    entries: Entries<H>,
    /// All watched holds. The numbers order those that are due at the same instant, so that all
    /// runs of a program use the same order.
    due: BTreeMap<(Instant, u64), ScheduleSlot>,
    /// Number of insertions into `due` so far.
    insertions: u64,
    nodes: BTreeMap<N, NodeQueue>,
    /// Start of the latest sweep of any node, also of one that found no hold.
    last_sweep: Option<Instant>,
    /// When the watchdog will wake by itself.
    wakes_at: Option<Instant>,
    /// Whether the watchdog has found nothing to watch and is about to end.
    idle: bool,
}

/// A hold that is watched, ready or in a batch.
struct Entry<H> {
    hold: H,
    /// Its key in `due`. `None`: it is not watched.
    due: Option<(Instant, u64)>,
    /// Whether it is ready or in a batch.
    renewing: bool,
    /// When the server has reported the latest change that was not ignored.
    reported_at: Option<Instant>,
    /// Its entry in the registry of clients.
    registered: Option<EntryNumber>,
}

/// The entries. Each stays at its place, so that a hold finds it without a search.
struct Entries<H> {
    places: Vec<Option<Entry<H>>>,
    free: Vec<ScheduleSlot>,
}

/// The renewals at one node.
#[derive(Default)]
struct NodeQueue {
    /// Holds to renew now, the oldest first.
    ready: VecDeque<ScheduleSlot>,
    /// Number of batches in flight.
    batches: usize,
    /// Start of the latest sweep.
    last_sweep: Option<Instant>,
    /// Number of sweeps in a row before the latest one.
    earlier_sweeps: u32,
    /// Start of the next sweep.
    next_sweep: Option<Instant>,
}

/// What the schedule has to know about a hold.
pub(super) trait Look<H, N> {
    /// Returns when the hold is due. `None`: it has ended.
    fn watch(&self, hold: &H) -> Option<Watch>;

    fn load(&self, hold: &H) -> Load<N>;
}

/// What a hold adds to a batch.
pub(super) struct Load<N> {
    /// The node that serves it.
    pub(super) node: N,
    pub(super) script: &'static Script,
    /// Whether the hold is renewed, or only checked because its lease is fixed.
    pub(super) renews: bool,
    pub(super) weight: usize,
}

/// What the watchdog does now.
pub(super) struct Work<H, N> {
    pub(super) batches: Vec<Batch<H, N>>,
    /// Holds to register: see [`Schedule::registered`].
    pub(super) register: Vec<H>,
    /// Holds that were lost at a limit. Each is also one of those that have ended.
    pub(super) release: Vec<H>,
    /// Holds that are not due any more: see [`Schedule::unwatch`].
    pub(super) ended: Vec<H>,
}

/// Holds that are renewed together.
pub(super) struct Batch<H, N> {
    pub(super) holds: Vec<(ScheduleSlot, H)>,
    pub(super) node: N,
    pub(super) script: &'static Script,
    pub(super) renews: bool,
    remaining_weight: usize,
}

/// Returns how much before its time a hold may be renewed.
fn batch_window(lease: Lease) -> Duration {
    lease.duration() / 30
}

/// Returns the pause before a failed renewal is retried.
pub(super) fn retry_pause(lease: Lease) -> Duration {
    batch_window(lease).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

impl<H: Clone, N: Copy + Ord> Schedule<H, N> {
    pub(super) fn new(lease: Lease) -> Schedule<H, N> {
        Schedule {
            lease,
            entries: Entries {
                places: Vec::new(),
                free: Vec::new(),
            },
            due: BTreeMap::new(),
            insertions: 0,
            nodes: BTreeMap::new(),
            last_sweep: None,
            wakes_at: None,
            idle: false,
        }
    }

    /// Returns the number of watched holds.
    pub(super) fn len(&self) -> usize {
        self.due.len()
    }

    /// Watches a hold, or updates when it is due. `place`: that of the hold.
    pub(super) fn watch(&mut self, place: &mut Option<ScheduleSlot>, hold: &H, watch: Watch) {
        let place = place.get_or_insert_with(|| self.entries.add(hold.clone()));
        self.plan(*place, watch);
    }

    fn plan(&mut self, place: ScheduleSlot, watch: Watch) {
        if let Some(entry) = self.entries.get_mut(place) {
            let at = match watch.action {
                WatchAction::Release => watch.due,
                _ if entry.renewing => watch.end,
                _ => watch.registers_at.map_or(watch.due, |at| at.min(watch.due)),
            };
            self.insertions += 1;
            let due = (at, self.insertions);
            if let Some(earlier) = entry.due.replace(due) {
                self.due.remove(&earlier);
            }
            self.due.insert(due, place);
        }
    }

    /// Stops watching a hold. Returns its entry in the registry, which ends, too.
    pub(super) fn unwatch(&mut self, place: &mut Option<ScheduleSlot>) -> Option<EntryNumber> {
        let entry = self.entries.get_mut((*place)?)?;
        entry.reported_at = None;
        if let Some(due) = entry.due.take() {
            self.due.remove(&due);
        }
        let registered = entry.registered.take();
        if !entry.renewing {
            place.take().inspect(|place| self.entries.remove(*place));
        }
        registered
    }

    /// Records that the registry has the hold.
    pub(super) fn registered(&mut self, place: Option<ScheduleSlot>, number: Option<EntryNumber>) {
        if let Some(entry) = place.and_then(|place| self.entries.get_mut(place)) {
            entry.registered = number;
        }
    }

    /// Plans a sweep of a node: now, or after a pause if others were shortly before. `at_once`:
    /// without that pause. Returns whether the watchdog would wake too late.
    pub(super) fn plan_sweep(&mut self, node: N, at_once: bool, now: Instant) -> bool {
        if self.due.is_empty() {
            self.last_sweep = Some(now);
            return false;
        }
        let queue = self.nodes.entry(node).or_default();
        let pause_end = queue.last_sweep.map(|last| last + queue.sweep_pause());
        let at = pause_end
            .filter(|_| !at_once)
            .map_or(now, |end| end.max(now));
        let at = queue.next_sweep.map_or(at, |planned| planned.min(at));
        queue.next_sweep = Some(at);
        Some(at) < self.wakes_at
    }

    /// Begins the sweeps that are due. Returns the holds to check: all of those nodes, also if a
    /// renewal is in flight, because the store may have run it before the cause of the sweep.
    pub(super) fn begin_sweeps(&mut self, now: Instant, look: &impl Look<H, N>) -> Vec<H> {
        let mut swept = Vec::new();
        for (node, queue) in &mut self.nodes {
            if queue.next_sweep.take_if(|at| *at <= now).is_some() {
                queue.swept(now);
                swept.push(*node);
            }
        }
        if swept.is_empty() {
            return Vec::new();
        }
        self.last_sweep = Some(now);
        let watched = self.due.values();
        let watched = watched.filter_map(|place| Some(&self.entries.get(*place)?.hold));
        let is_there = |hold: &&H| swept.contains(&look.load(hold).node);
        watched.filter(is_there).cloned().collect()
    }

    /// Returns whether a sweep was too early for a hold that was granted then and is watched from now on.
    pub(super) fn has_swept_since(&self, granted_at: Instant) -> bool {
        self.last_sweep >= Some(granted_at)
    }

    /// Handles a report that another client has changed the keys of these holds. Returns those to
    /// check. Further reports about the same hold are ignored for a third of the lease.
    pub(super) fn reported(&mut self, now: Instant, is_changed: impl Fn(&H) -> bool) -> Vec<H> {
        let ignored_for = self.lease.renewal_interval();
        let checked = self.due.values().filter_map(|place| {
            let entry = self.entries.get_mut(*place)?;
            let is_ignored = entry.reported_at.is_some_and(|at| now < at + ignored_for);
            if is_ignored || !is_changed(&entry.hold) {
                return None;
            }
            entry.reported_at = Some(now);
            Some(entry.hold.clone())
        });
        checked.collect()
    }

    /// Returns the work that is due now. The watchdog sends the batches, and they count as sent.
    pub(super) fn begin(&mut self, now: Instant, look: &impl Look<H, N>) -> Work<H, N> {
        let mut work = Work {
            batches: Vec::new(),
            register: Vec::new(),
            release: Vec::new(),
            ended: Vec::new(),
        };
        self.make_ready(now, look, &mut work);
        let (entries, mut left_out) = (&self.entries, Vec::new());
        self.nodes.retain(|node, queue| {
            queue.take_batches(*node, entries, look, &mut work.batches, &mut left_out);
            queue.is_used(now)
        });
        for (place, watch) in left_out {
            if let Some(entry) = self.entries.get_mut(place) {
                entry.renewing = false;
                match watch {
                    Some(watch) => self.plan(place, watch),
                    None => work.ended.push(entry.hold.clone()),
                }
            }
        }
        work
    }

    /// Looks at the holds that are due, and moves those to renew to the queues of their nodes.
    fn make_ready(&mut self, now: Instant, look: &impl Look<H, N>, work: &mut Work<H, N>) {
        let soon = now + batch_window(self.lease);
        let mut later = Vec::new();
        while let Some(first) = self.due.first_entry().filter(|first| first.key().0 <= soon) {
            let place = first.remove();
            let Some(entry) = self.entries.get_mut(place) else {
                continue;
            };
            entry.due = None;
            let hold = &entry.hold;
            let Some(mut watch) = look.watch(hold) else {
                work.ended.push(hold.clone());
                continue;
            };
            let is_now = match watch.action {
                WatchAction::Renew => watch.due <= soon,
                WatchAction::RenewOnTime => watch.due <= now,
                WatchAction::Expire => false,
                WatchAction::Release => {
                    work.release.push(hold.clone());
                    work.ended.push(hold.clone());
                    continue;
                }
            };
            if watch.registers_at.take_if(|at| *at <= now).is_some() {
                work.register.push(hold.clone());
            }
            if is_now && !entry.renewing {
                entry.renewing = true;
                let queue = self.nodes.entry(look.load(hold).node).or_default();
                queue.ready.push_back(place);
            }
            later.push((place, watch));
        }
        for (place, watch) in later {
            self.plan(place, watch);
        }
    }

    /// Records that a batch has ended. Then each of its holds is watched again, or unwatched.
    pub(super) fn batch_ended(&mut self, batch: &Batch<H, N>) {
        if let Some(queue) = self.nodes.get_mut(&batch.node) {
            queue.batches = queue.batches.saturating_sub(1);
        }
        for (place, _) in &batch.holds {
            if let Some(entry) = self.entries.get_mut(*place) {
                entry.renewing = false;
            }
        }
    }

    /// Records that the watchdog has started.
    pub(super) fn started(&mut self, now: Instant) {
        (self.wakes_at, self.idle) = (Some(now), false);
    }

    fn first_due(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((due, _), _)| *due)
    }

    /// Returns whether a hold is due before the watchdog wakes by itself.
    pub(super) fn wakes_too_late(&self) -> bool {
        // Without a time the watchdog has ended, or looks at once.
        self.first_due()
            .is_some_and(|due| Some(due) < self.wakes_at)
    }

    /// Plans when the watchdog wakes next. `None` ends it, because there is nothing to watch.
    ///
    /// It does not end at once: otherwise short holds in sequence would each start and end a task.
    /// `first_renewal`: how long after its acquisition the first renewal or registration of a hold
    /// is due. Nothing is missed until then, and nothing has to wake the watchdog.
    pub(super) fn plan_wake(
        &mut self,
        now: Instant,
        batches_in_flight: usize,
        first_renewal: Duration,
    ) -> Option<Instant> {
        let sweeps = self.nodes.values().filter_map(|queue| queue.next_sweep);
        let first = self.first_due().into_iter().chain(sweeps).min();
        let was_idle = take(&mut self.idle);
        self.wakes_at = match first {
            Some(first) => Some(first),
            // The end of a batch also wakes the watchdog.
            None if batches_in_flight > 0 => Some(now + retry_pause(self.lease)),
            None if was_idle => None,
            None => {
                self.idle = true;
                Some(now + first_renewal)
            }
        };
        self.wakes_at
    }
}

impl<H> Entries<H> {
    fn add(&mut self, hold: H) -> ScheduleSlot {
        let entry = Entry {
            hold,
            due: None,
            renewing: false,
            reported_at: None,
            registered: None,
        };
        let Some(place) = self.free.pop() else {
            self.places.push(Some(entry));
            return self.places.len() - 1;
        };
        self.places[place] = Some(entry);
        place
    }

    fn get(&self, place: ScheduleSlot) -> Option<&Entry<H>> {
        self.places.get(place)?.as_ref()
    }

    fn get_mut(&mut self, place: ScheduleSlot) -> Option<&mut Entry<H>> {
        self.places.get_mut(place)?.as_mut()
    }

    fn remove(&mut self, place: ScheduleSlot) {
        self.places[place] = None;
        self.free.push(place);
    }
}

impl NodeQueue {
    /// Returns whether the node has work, or a recent sweep to remember.
    fn is_used(&self, now: Instant) -> bool {
        let is_idle = self.batches == 0 && self.ready.is_empty() && self.next_sweep.is_none();
        !is_idle || self.was_swept_lately(now)
    }

    fn was_swept_lately(&self, now: Instant) -> bool {
        self.last_sweep
            .is_some_and(|at| now < at + SWEEPS_REMEMBERED_FOR)
    }

    /// Records the start of a sweep.
    fn swept(&mut self, now: Instant) {
        self.earlier_sweeps = match self.was_swept_lately(now) {
            true => self.earlier_sweeps.saturating_add(1),
            false => 0,
        };
        self.last_sweep = Some(now);
    }

    /// Returns the shortest time between the latest sweep and the next. It grows with the sweeps in a row: a thousand losses
    /// in a row must not cause a thousand sweeps, but a second loss must not wait for seconds.
    fn sweep_pause(&self) -> Duration {
        let growth = 1 << self.earlier_sweeps.min(10);
        (FIRST_SWEEP_PAUSE * growth).min(LONGEST_SWEEP_PAUSE)
    }

    /// Takes as many batches as may start now. Adds to `left_out` the holds that have ended or
    /// were lost, and those that another node serves by now.
    fn take_batches<H: Clone, N: Copy + Ord>(
        &mut self,
        node: N,
        entries: &Entries<H>,
        look: &impl Look<H, N>,
        batches: &mut Vec<Batch<H, N>>,
        left_out: &mut Vec<(ScheduleSlot, Option<Watch>)>,
    ) {
        // The open batches, oldest first: one for each script, and separate ones for holds that are
        // renewed and holds that are only checked.
        let mut open: Vec<Batch<H, N>> = Vec::new();
        while let Some(place) = self.ready.pop_front() {
            let Some(Entry { hold, .. }) = entries.get(place) else {
                continue;
            };
            let watch = look.watch(hold);
            let is_watched = |watch: &Watch| watch.action != WatchAction::Release;
            let load = watch
                .as_ref()
                .filter(|watch| is_watched(watch))
                .map(|_| look.load(hold));
            let Some(load) = load.filter(|load| load.node == node) else {
                left_out.push((place, watch));
                continue;
            };
            let found = open.iter().position(|batch| batch.is_of(&load));
            let fitting = found.filter(|at| open[*at].fits(&load));
            let at = match fitting {
                Some(at) => at,
                None if self.batches == MAX_BATCHES_IN_FLIGHT => {
                    self.ready.push_front(place);
                    break;
                }
                None => {
                    batches.extend(found.map(|full| open.remove(full)));
                    self.batches += 1;
                    open.push(Batch::new(&load));
                    open.len() - 1
                }
            };
            open[at].add(place, hold.clone(), &load);
        }
        batches.append(&mut open);
    }
}

impl<H, N: Copy> Batch<H, N> {
    fn new(load: &Load<N>) -> Batch<H, N> {
        Batch {
            holds: Vec::with_capacity(MAX_BATCH_HOLDS),
            node: load.node,
            script: load.script,
            renews: load.renews,
            remaining_weight: MAX_BATCH_WEIGHT,
        }
    }

    fn is_of(&self, load: &Load<N>) -> bool {
        self.script == load.script && self.renews == load.renews
    }

    fn fits(&self, load: &Load<N>) -> bool {
        self.holds.len() < MAX_BATCH_HOLDS && self.remaining_weight >= load.weight
    }

    fn add(&mut self, place: ScheduleSlot, hold: H, load: &Load<N>) {
        self.remaining_weight = self.remaining_weight.saturating_sub(load.weight);
        self.holds.push((place, hold));
    }
}

#[cfg(test)]
impl<H, N> Schedule<H, N> {
    /// Returns how many holds it has, by use.
    pub(super) fn sizes(&self) -> [(&'static str, usize); 4] {
        let ready = self.nodes.values().map(|queue| queue.ready.len()).sum();
        [
            ("entries", self.entries.places.iter().flatten().count()),
            ("due", self.due.len()),
            ("ready", ready),
            ("nodes", self.nodes.len()),
        ]
    }
}

#[cfg(test)]
mod tests;
