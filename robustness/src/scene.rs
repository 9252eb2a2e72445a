//! Context of a run, which faults use: servers, workers, and the history recorded so far.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::{Proxy, Server};

use crate::Result;
use crate::clock::now;
use crate::crew::{Crew, lock};
use crate::faults::Fault;
use crate::history::{DataLost, Forgetting, History, Window};
use crate::random::Random;
use crate::schedule::Schedule;
use crate::site::Site;
use crate::visit::set_permits_from_outside;
use crate::worker::{Worker, locks_of};

/// Time within which a repaired store must answer.
const MENDED: Duration = Duration::from_secs(10);

pub(crate) struct Scene {
    pub(crate) site: Box<dyn Site>,
    pub(crate) crew: Crew,
    pub(crate) history: Arc<Mutex<History>>,
    /// Settings of a new worker.
    pub(crate) worker: Worker,
    pub(crate) random: Random,
    /// Further faults that may happen during a fault.
    pub(crate) schedule: Option<Schedule>,
}

impl Scene {
    /// Returns the place of a server to break: one that accepts writes.
    pub(crate) fn master(&mut self) -> Result<usize> {
        let masters = self.site.masters();
        let at = self.random.below(masters.len());
        masters
            .get(at)
            .copied()
            .ok_or("no server accepts writes".into())
    }

    pub(crate) fn server(&self, place: usize) -> &Server {
        self.site.server(place)
    }

    /// Returns the server that has a name.
    pub(crate) fn owner(&mut self, name: &str) -> Result<&Server> {
        let place = match self.site.cluster() {
            Some(cluster) => cluster.owner_of(name),
            None => self.master()?,
        };
        Ok(self.server(place))
    }

    /// Records which of the used names are on a cluster node that is about to become unreachable.
    pub(crate) fn out_of_reach(&mut self, place: usize) -> Result<()> {
        let history = lock(&self.history);
        let in_use = history.sections.iter().map(|one| one.ask.name.clone());
        let mut names: BTreeSet<String> = in_use.collect();
        drop(history);
        names.extend(self.worker.names.iter().chain(&self.worker.few).cloned());
        let cluster = self.site.cluster().ok_or("no cluster")?;
        // Thousands of names have a few slots.
        let mut owners = BTreeMap::new();
        names.retain(|name| {
            locks_of(name).iter().any(|name| {
                let slot = cluster.slot_of(name);
                *owners.entry(slot).or_insert_with(|| cluster.owner(slot)) == place
            })
        });
        lock(&self.history).out_of_reach = names;
        Ok(())
    }

    pub(crate) fn network(&self) -> Result<&Proxy> {
        self.site
            .network()
            .ok_or("there is no proxy to break".into())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.worker.all_names()
    }

    /// Runs a fault, and repairs it. If a replica was promoted meanwhile, intentionally or not, it may lack data.
    pub(crate) fn act(&mut self, fault: &Fault, lasts: Duration) -> Result<()> {
        let (from, before) = (now(), self.site.masters());
        (fault.act)(self, lasts).map_err(|error| format!("{}: {error}", fault.name))?;
        if !fault.orderly && self.site.masters() != before {
            lock(&self.history).data_lost.push(DataLost {
                from,
                until: now(),
                forgetting: Forgetting::UNREPLICATED,
            });
        }
        Ok(())
    }

    /// Lets time pass. If there is a schedule, other faults may happen meanwhile.
    pub(crate) fn rest(&mut self, time: Duration) {
        let end = Instant::now() + time;
        // Scheduled faults do not nest.
        if let Some(mut schedule) = self.schedule.take() {
            schedule.keep_until(end, self);
            self.schedule = Some(schedule);
        }
        sleep(end.saturating_duration_since(Instant::now()));
    }

    /// Runs scheduled faults during a wait, if there is a schedule.
    pub(crate) fn beside(&mut self, time: Duration) {
        if self.schedule.is_some() {
            self.rest(time);
        }
    }

    /// Records a window in which something is broken, while the closure runs.
    pub(crate) fn broken<T>(&mut self, while_: impl FnOnce(&mut Scene) -> Result<T>) -> Result<T> {
        let from = now();
        let done = while_(self);
        self.window(from, false);
        done
    }

    /// Breaks something so that the store answers no client any more, and repairs it after this time.
    /// If there are several servers, others may answer in its place.
    pub(crate) fn cut(
        &mut self,
        lasts: Duration,
        break_: impl FnOnce(&mut Scene),
        mend: impl FnOnce(&mut Scene),
    ) -> Result<()> {
        let alone = self.site.is_alone();
        self.broken(|scene| {
            break_(scene);
            let from = now();
            scene.rest(lasts);
            scene.window(from, alone);
            mend(scene);
            Ok(())
        })
    }

    /// Records that the store loses data while the closure runs. Then sets the permits again, as an operator
    /// would have to.
    pub(crate) fn forgets<T>(
        &mut self,
        forgetting: Forgetting,
        while_: impl FnOnce(&mut Scene) -> Result<T>,
    ) -> Result<T> {
        let from = now();
        let done = while_(self)?;
        set_permits_from_outside(&self.site.url(), &self.names(), MENDED)?;
        lock(&self.history).data_lost.push(DataLost {
            from,
            until: now(),
            forgetting,
        });
        Ok(done)
    }

    fn window(&self, from: i64, cut: bool) {
        let until = now();
        lock(&self.history)
            .windows
            .push(Window { from, until, cut });
    }
}
