//! One run in the making: servers, workers, and what is taken down about them. What faults work with.

use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use redlatch_testkit::{Proxy, Server};

use crate::Result;
use crate::clock::now;
use crate::crew::{Crew, lock};
use crate::history::{DataLost, History, Window};
use crate::random::Random;
use crate::site::Site;
use crate::worker::Worker;

pub(crate) struct Scene {
    pub(crate) site: Box<dyn Site>,
    pub(crate) crew: Crew,
    pub(crate) history: Arc<Mutex<History>>,
    /// What a new worker is told.
    pub(crate) worker: Worker,
    pub(crate) random: Random,
}

impl Scene {
    /// The server to break: one that takes writes.
    pub(crate) fn master(&mut self) -> Result<&mut Server> {
        let mut masters = self.site.masters();
        let at = self.random.below(masters.len());
        if masters.is_empty() {
            return Err("nobody takes writes".into());
        }
        Ok(masters.swap_remove(at))
    }

    pub(crate) fn network(&self) -> Result<&Proxy> {
        self.site.network().ok_or("no network to break".into())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.worker.names.clone()
    }

    /// Something is broken while this goes on.
    pub(crate) fn broken<T>(&mut self, while_: impl FnOnce(&mut Scene) -> Result<T>) -> Result<T> {
        let from = now();
        let done = while_(self);
        self.window(from, false);
        done
    }

    /// Breaks something so that nobody is answered any more, and makes it whole after this time.
    pub(crate) fn cut(
        &mut self,
        lasts: Duration,
        break_: impl FnOnce(&mut Scene) -> Result<()>,
        mend: impl FnOnce(&mut Scene) -> Result<()>,
    ) -> Result<()> {
        self.broken(|scene| {
            break_(scene)?;
            let from = now();
            sleep(lasts);
            scene.window(from, true);
            mend(scene)
        })
    }

    /// The store forgets what is held while this goes on.
    pub(crate) fn forgets<T>(
        &mut self,
        tokens: bool,
        while_: impl FnOnce(&mut Scene) -> Result<T>,
    ) -> Result<T> {
        let from = now();
        let done = while_(self);
        lock(&self.history).data_lost.push(DataLost {
            from,
            until: now(),
            tokens,
        });
        done
    }

    fn window(&self, from: i64, cut: bool) {
        let until = now();
        lock(&self.history)
            .windows
            .push(Window { from, until, cut });
    }
}
