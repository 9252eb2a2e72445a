//! One run in the making: servers, workers, and what is taken down about them. What faults work with.

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

/// How long a store that is whole again may need until it answers.
const MENDED: Duration = Duration::from_secs(10);

pub(crate) struct Scene {
    pub(crate) site: Box<dyn Site>,
    pub(crate) crew: Crew,
    pub(crate) history: Arc<Mutex<History>>,
    /// What a new worker is told.
    pub(crate) worker: Worker,
    pub(crate) random: Random,
    /// What else may break while something is broken.
    pub(crate) schedule: Option<Schedule>,
}

impl Scene {
    /// The place of a server to break: one that takes writes.
    pub(crate) fn master(&mut self) -> Result<usize> {
        let masters = self.site.masters();
        let at = self.random.below(masters.len());
        masters.get(at).copied().ok_or("nobody takes writes".into())
    }

    pub(crate) fn server(&self, place: usize) -> &Server {
        self.site.server(place)
    }

    /// The server that has a name.
    pub(crate) fn owner(&mut self, name: &str) -> Result<&Server> {
        let place = match self.site.cluster() {
            Some(cluster) => cluster.owner_of(name),
            None => self.master()?,
        };
        Ok(self.server(place))
    }

    /// Records which of the names in use are kept by a node of a cluster that is about to be out of reach.
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
        self.site.network().ok_or("no network to break".into())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.worker.all_names()
    }

    /// Breaks something, and makes it whole again. If a replica has taken its master's place on the way,
    /// asked for or not, it may not have known everything.
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

    /// Lets time pass, in which other things may break if there is a schedule for that.
    pub(crate) fn rest(&mut self, time: Duration) {
        let end = Instant::now() + time;
        // Nothing breaks beside what breaks beside.
        if let Some(mut schedule) = self.schedule.take() {
            schedule.keep_until(end, self);
            self.schedule = Some(schedule);
        }
        sleep(end.saturating_duration_since(Instant::now()));
    }

    /// Lets so much of a time pass in which something is waited for anyway, if there is a schedule.
    pub(crate) fn beside(&mut self, time: Duration) {
        if self.schedule.is_some() {
            self.rest(time);
        }
    }

    /// Something is broken while this goes on.
    pub(crate) fn broken<T>(&mut self, while_: impl FnOnce(&mut Scene) -> Result<T>) -> Result<T> {
        let from = now();
        let done = while_(self);
        self.window(from, false);
        done
    }

    /// Breaks something so that the store answers nobody any more, and makes it whole after this time.
    /// Where there are several servers, others may answer in its place.
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

    /// The store forgets what is held while this goes on. Then how many permits there are is said anew,
    /// as an operator would have to.
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
