//! Context of a run, which faults use: servers, workers, and the history recorded so far.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::{Proxy, Server};

use crate::Result;
use crate::clock::{Time, now};
use crate::deployment::Deployment;
use crate::final_check::set_permits_blocking;
use crate::history::{DataLoss, FaultWindow, History};
use crate::names::{key_of, locks_of};
use crate::processes::{Processes, lock};
use crate::random::Random;
use crate::worker::WorkerOptions;

/// Time within which a repaired store must answer.
const REPAIR_LIMIT: Duration = Duration::from_secs(10);

/// Time from the start of one fault to the next.
const FAULT_INTERVAL: Duration = Duration::from_secs(1);

/// Number of late faults that are made up for.
const MAX_OVERDUE_FAULTS: u32 = 5;

/// Breaks something for a while, and repairs it.
pub(crate) type Inject = fn(&mut Context, Duration) -> Result<()>;

pub(crate) struct Context {
    pub(crate) deployment: Box<dyn Deployment>,
    pub(crate) processes: Processes,
    pub(crate) history: Arc<Mutex<History>>,
    /// Settings of a new worker.
    pub(crate) worker: WorkerOptions,
    pub(crate) random: Random,
    /// Further faults that may happen during a fault.
    pub(crate) schedule: Option<Schedule>,
}

impl Context {
    /// Returns the place of a server to break: one that accepts writes.
    pub(crate) fn master(&mut self) -> Result<usize> {
        let masters = self.deployment.masters();
        let at = self.random.below(masters.len());
        masters
            .get(at)
            .copied()
            .ok_or("no server accepts writes".into())
    }

    pub(crate) fn server(&self, place: usize) -> &Server {
        self.deployment.server(place)
    }

    /// Returns the server that has the keys of a name.
    pub(crate) fn server_of(&mut self, name: &str) -> Result<&Server> {
        let place = match self.deployment.cluster() {
            Some(cluster) => cluster.master_of_key(name),
            None => self.master()?,
        };
        Ok(self.server(place))
    }

    /// Records which of the used names are on a cluster node that is about to become unreachable.
    pub(crate) fn mark_unreachable(&mut self, place: usize) -> Result<()> {
        let history = lock(&self.history);
        let in_use = history.sections.iter().map(|one| one.request.name.clone());
        let mut names: BTreeSet<String> = in_use.collect();
        drop(history);
        names.extend(
            self.worker
                .names
                .iter()
                .chain(&self.worker.contended_names)
                .chain(&self.worker.jobs)
                .cloned(),
        );
        let cluster = self.deployment.cluster().ok_or("no cluster")?;
        // Thousands of names have a few slots.
        let mut masters = BTreeMap::new();
        names.retain(|name| {
            locks_of(name).iter().any(|name| {
                let slot = cluster.slot_of(key_of(name));
                *masters
                    .entry(slot)
                    .or_insert_with(|| cluster.master_of_slot(slot))
                    == place
            })
        });
        lock(&self.history).unreachable_names = names;
        Ok(())
    }

    pub(crate) fn network(&self) -> Result<&Proxy> {
        self.deployment
            .network()
            .ok_or("there is no proxy to break".into())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let names = self.worker.all_names();
        let keys: BTreeSet<&str> = names.iter().map(|name| key_of(name)).collect();
        keys.into_iter().map(str::to_owned).collect()
    }

    /// Lets time pass. If there is a schedule, other faults may happen meanwhile.
    pub(crate) fn wait(&mut self, time: Duration) {
        let end = Instant::now() + time;
        // Scheduled faults do not nest.
        if let Some(mut schedule) = self.schedule.take() {
            schedule.run_until(end, self);
            self.schedule = Some(schedule);
        }
        sleep(end.saturating_duration_since(Instant::now()));
    }

    /// Runs scheduled faults during a wait, if there is a schedule.
    pub(crate) fn run_due_faults(&mut self, time: Duration) {
        if self.schedule.is_some() {
            self.wait(time);
        }
    }

    /// Records a window in which something is broken, while the closure runs.
    pub(crate) fn with_fault_window<T>(
        &mut self,
        action: impl FnOnce(&mut Context) -> Result<T>,
    ) -> Result<T> {
        let from = now();
        let done = action(self);
        self.record_window(from, false);
        done
    }

    /// Breaks something so that the store answers no client any more, and repairs it after this time.
    /// If there are several servers, others may answer in its place.
    pub(crate) fn with_outage(
        &mut self,
        duration: Duration,
        break_: impl FnOnce(&mut Context),
        repair: impl FnOnce(&mut Context),
    ) -> Result<()> {
        let alone = self.deployment.is_single_server();
        self.with_fault_window(|context| {
            break_(context);
            let from = now();
            context.wait(duration);
            context.record_window(from, alone);
            repair(context);
            Ok(())
        })
    }

    /// Sets the permits that the store may have lost, as an operator would have to.
    pub(crate) fn set_permits(&self) -> Result<()> {
        set_permits_blocking(&self.deployment.url(), &self.names(), REPAIR_LIMIT)
    }

    /// Records that the store has lost data since a time, until it has its permits again.
    pub(crate) fn record_data_loss(&self, from: Time, loss: DataLoss) -> Result<()> {
        self.set_permits()?;
        lock(&self.history).record_data_loss(from, now(), loss);
        Ok(())
    }

    /// Records that the store loses data while the closure runs.
    pub(crate) fn with_data_loss<T>(
        &mut self,
        loss: DataLoss,
        action: impl FnOnce(&mut Context) -> Result<T>,
    ) -> Result<T> {
        let from = now();
        let done = action(self)?;
        self.record_data_loss(from, loss)?;
        Ok(done)
    }

    fn record_window(&self, from: i64, is_outage: bool) {
        let until = now();
        lock(&self.history).windows.push(FaultWindow {
            from,
            until,
            is_outage,
        });
    }
}

/// A random schedule of faults: about once a second one begins, whether or not earlier ones are over.
pub(crate) struct Schedule {
    due: Instant,
    /// Names and injections of the faults that may happen during another one.
    overlapping: Vec<(&'static str, Inject)>,
    lease: Duration,
    /// How often each was drawn.
    pub(crate) drawn: BTreeMap<&'static str, usize>,
}

impl Schedule {
    pub(crate) fn new(overlapping: Vec<(&'static str, Inject)>, lease: Duration) -> Schedule {
        Schedule {
            due: Instant::now(),
            overlapping,
            lease,
            drawn: BTreeMap::new(),
        }
    }

    /// Waits until the next fault is due.
    pub(crate) fn wait(&mut self) {
        let now = Instant::now();
        sleep(self.due.saturating_duration_since(now));
        self.due = (self.due + FAULT_INTERVAL).max(now - FAULT_INTERVAL * MAX_OVERDUE_FAULTS);
    }

    /// Runs one fault after the other of those that may happen during another one.
    pub(crate) fn run_until(&mut self, end: Instant, context: &mut Context) {
        while !self.overlapping.is_empty() && self.due < end {
            self.wait();
            let (name, inject) = self.overlapping[context.random.below(self.overlapping.len())];
            let left = end.saturating_duration_since(Instant::now());
            let duration = context.random.between(self.lease / 60, self.lease / 4);
            // A fault that affected no client does not count. These faults do not change masters.
            if inject(context, duration.min(left)).is_ok() {
                *self.drawn.entry(name).or_default() += 1;
            }
        }
    }
}
