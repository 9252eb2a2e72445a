//! Threads that acquire locks through a blocking client: each is an owner, and re-enters locks that it holds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch::blocking::{Client, Guard, ManyGuard, RedLock, current_thread};
use redlatch::{Error, Fenced, LockKind, OwnedKind};

use super::kinds::locks_of;
use super::owners::time_inside;
use super::section::{LOOK, kind};
use super::tell::Teller;
use crate::Result;
use crate::history::{Ask, Mode, What};
use crate::random::Random;

/// One of the threads.
pub(super) struct Thread {
    pub(super) number: usize,
    pub(super) client: Client,
    pub(super) client_number: usize,
    pub(super) names: Vec<String>,
    pub(super) lease: Duration,
    pub(super) teller: Teller,
    pub(super) random: Random,
}

/// Common interface of all guards of a thread.
trait Held: Sized {
    fn valid_for(&self) -> Duration;
    fn holds(&self) -> Option<u32>;
    fn unlock(self) -> Result<(), Error>;
}

impl<K: LockKind + OwnedKind> Held for Guard<K> {
    fn valid_for(&self) -> Duration {
        Guard::valid_for(self)
    }

    fn holds(&self) -> Option<u32> {
        Some(self.hold_count())
    }

    fn unlock(self) -> Result<(), Error> {
        Guard::unlock(self)
    }
}

impl Held for ManyGuard<redlatch::RedLock> {
    fn valid_for(&self) -> Duration {
        ManyGuard::<redlatch::RedLock>::valid_for(self)
    }

    fn holds(&self) -> Option<u32> {
        None
    }

    fn unlock(self) -> Result<(), Error> {
        ManyGuard::<redlatch::RedLock>::unlock(self)
    }
}

impl Thread {
    /// Acquires one lock after the other until the end.
    pub(super) fn run(mut self, ending: &AtomicBool) -> Result<()> {
        while !ending.load(Ordering::Relaxed) {
            let at = self.random.below(self.names.len());
            let name = self.names[at].clone();
            if self.request(&name, ending)?.is_err() {
                sleep(Duration::from_millis(20));
            }
            sleep(self.random.between(Duration::ZERO, self.lease / 20));
        }
        Ok(())
    }

    fn request(&mut self, name: &str, ending: &AtomicBool) -> Result<Result<(), Error>> {
        let kind = name.split(':').next().unwrap_or_default();
        Ok(match kind {
            "lock" => {
                let lock = self.client.lock(name);
                self.alone(name, |wait| lock.try_lock_for(wait), ending)
            }
            "fenced" => {
                let lock = self.client.fenced_lock(name);
                let token = |guard: &Guard<Fenced>| Some(guard.token());
                self.pass(
                    name,
                    Mode::Alone,
                    token,
                    |wait| lock.try_lock_for(wait),
                    ending,
                )
            }
            "spin" => {
                let lock = self.client.spin_lock(name);
                self.alone(name, |wait| lock.try_lock_for(wait), ending)
            }
            "fair" => {
                let lock = self.client.fair_lock(name).wait_time(self.lease / 4);
                self.alone(name, |wait| lock.try_lock_for(wait), ending)
            }
            "rw" if self.random.below(2) == 0 => {
                let lock = self.client.read_write_lock(name).write();
                self.alone(name, |wait| lock.try_lock_for(wait), ending)
            }
            "rw" => {
                let lock = self.client.read_write_lock(name).read();
                self.pass(
                    name,
                    Mode::Shared,
                    |_| None,
                    |wait| lock.try_lock_for(wait),
                    ending,
                )
            }
            "red" => {
                let members = locks_of(name);
                let lock = RedLock::new(members.iter().map(|name| self.client.lock(name)));
                let lock = lock.timeout(self.lease / 20);
                self.alone(name, |wait| lock.try_lock_for(wait), ending)
            }
            other => return Err(format!("threads do not support the kind {other}").into()),
        })
    }

    /// Runs one critical section, perhaps with a nested one.
    fn pass<G: Held>(
        &mut self,
        name: &str,
        mode: Mode,
        token: fn(&G) -> Option<u64>,
        ask: impl Fn(Duration) -> Result<Option<G>, Error>,
        ending: &AtomicBool,
    ) -> Result<(), Error> {
        let wait = self.random.between(Duration::ZERO, self.lease / 2);
        let Some((outer, guard)) = self.enter(name, mode, token, || ask(wait))? else {
            return Ok(());
        };
        // Mostly short: the owners of tasks have to acquire the locks, too.
        let time = match self.random.below(3) {
            0 => time_inside(self.lease, &mut self.random),
            _ => LOOK,
        };
        let end = Instant::now() + time;
        let mut inner = None;
        if self.random.below(2) == 0 {
            // The thread holds the lock: other waiters make no difference.
            inner = self
                .enter(name, mode, token, || ask(Duration::ZERO))
                .ok()
                .flatten();
        }
        let mut is_lost = false;
        while !is_lost && Instant::now() < end && !ending.load(Ordering::Relaxed) {
            sleep(LOOK);
            is_lost = !self.look(outer, &guard);
            if let Some((section, guard)) = &inner {
                self.look(*section, guard);
            }
        }
        if is_lost {
            self.teller.tell_of(outer, What::Told);
            if let Some((section, _)) = &inner {
                self.teller.tell_of(*section, What::Told);
            }
        }
        let mut all = vec![(outer, guard)];
        all.extend(inner);
        if is_lost && self.random.below(2) == 0 {
            // The guards of the lost hold still exist meanwhile.
            let wait = self.lease / 2;
            all.extend(self.enter(name, mode, token, || ask(wait)).ok().flatten());
        }
        // In one order or the other.
        if self.random.below(2) == 0 {
            all.reverse();
        }
        // An outage may delay the first of them: the others are not checked meanwhile.
        for (section, _) in &all {
            self.teller.tell_of(*section, What::Leaving);
        }
        for (section, guard) in all {
            self.leave(section, guard);
        }
        Ok(())
    }

    /// Runs a section of a lock that is exclusive and has no tokens.
    fn alone<G: Held>(
        &mut self,
        name: &str,
        ask: impl Fn(Duration) -> Result<Option<G>, Error>,
        ending: &AtomicBool,
    ) -> Result<(), Error> {
        self.pass(name, Mode::Alone, |_| None, ask, ending)
    }

    /// Sends one request. Returns the section and its guard.
    fn enter<G: Held>(
        &mut self,
        name: &str,
        mode: Mode,
        token: fn(&G) -> Option<u64>,
        ask: impl FnOnce() -> Result<Option<G>, Error>,
    ) -> Result<Option<(u64, G)>, Error> {
        let section = self.teller.section();
        let tell = |what| self.teller.tell_of(section, what);
        tell(What::Asked(Ask {
            task: self.number,
            client: self.client_number,
            owner: Some(current_thread().number()),
            name: name.to_owned(),
            mode,
            part: false,
        }));
        match ask() {
            Ok(Some(guard)) => {
                let holds = guard.holds();
                tell(What::Got {
                    token: token(&guard),
                    holds,
                });
                self.look(section, &guard);
                Ok(Some((section, guard)))
            }
            Ok(None) => {
                tell(What::GaveUp);
                Ok(None)
            }
            Err(error) => {
                tell(What::Failed {
                    error: kind(&error),
                });
                Err(error)
            }
        }
    }

    fn leave<G: Held>(&mut self, section: u64, guard: G) {
        let freed = match self.random.below(2) {
            0 => guard.unlock(),
            _ => {
                drop(guard);
                Ok(())
            }
        };
        let error = freed.err().map(|error| kind(&error));
        self.teller.tell_of(section, What::Freed { error });
    }

    fn look<G: Held>(&self, section: u64, guard: &G) -> bool {
        self.teller.look(section, || guard.valid_for()).is_some()
    }
}
