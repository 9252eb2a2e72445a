//! Threads that acquire locks through a blocking client: each is an owner, and re-enters locks that it holds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch::blocking::{Client, Guard, RedGuard, RedLock, current_thread};
use redlatch::kind::OwnedKind;
use redlatch::{Error, FencedLock, Lock};

use super::owners::random_hold_duration;
use super::reporter::{CHECK_INTERVAL, Reporter};
use super::section::error_name;
use crate::Result;
use crate::history::{EventKind, Limits, Mode, Request};
use crate::names::locks_of;
use crate::random::Random;

/// One of the threads.
pub(super) struct Thread {
    pub(super) number: usize,
    pub(super) client: Client,
    pub(super) client_number: usize,
    pub(super) names: Vec<String>,
    pub(super) lease: Duration,
    pub(super) reporter: Reporter,
    pub(super) random: Random,
}

/// Common interface of all guards of a thread.
trait BlockingGuard: Sized {
    fn valid_for(&self) -> Duration;
    fn holds(&self) -> Option<u32>;
    fn unlock(self) -> Result<(), Error>;
}

impl<K: OwnedKind> BlockingGuard for Guard<Lock<K>> {
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

impl BlockingGuard for RedGuard {
    fn valid_for(&self) -> Duration {
        RedGuard::valid_for(self)
    }

    fn holds(&self) -> Option<u32> {
        None
    }

    fn unlock(self) -> Result<(), Error> {
        RedGuard::unlock(self)
    }
}

impl Thread {
    /// Acquires one lock after the other until the end.
    pub(super) fn run(mut self, shutdown: &AtomicBool) -> Result<()> {
        while !shutdown.load(Ordering::Relaxed) {
            let at = self.random.below(self.names.len());
            let name = self.names[at].clone();
            if self.request(&name, shutdown)?.is_err() {
                sleep(Duration::from_millis(20));
            }
            sleep(self.random.between(Duration::ZERO, self.lease / 20));
        }
        Ok(())
    }

    fn request(&mut self, name: &str, shutdown: &AtomicBool) -> Result<Result<(), Error>> {
        let kind = name.split(':').next().unwrap_or_default();
        Ok(match kind {
            "lock" => {
                let lock = self.client.lock(name);
                self.run_exclusive(name, |wait| lock.try_lock().wait(wait).block(), shutdown)
            }
            "fenced" => {
                let lock = self.client.fenced_lock(name);
                let token = |guard: &Guard<FencedLock>| Some(guard.token());
                self.run_section(
                    name,
                    Mode::Exclusive,
                    token,
                    |wait| lock.try_lock().wait(wait).block(),
                    shutdown,
                )
            }
            "spin" => {
                let lock = self.client.spin_lock(name);
                self.run_exclusive(name, |wait| lock.try_lock().wait(wait).block(), shutdown)
            }
            "fair" => {
                let lock = self.client.fair_lock(name).wait_time(self.lease / 4);
                self.run_exclusive(name, |wait| lock.try_lock().wait(wait).block(), shutdown)
            }
            "rw" if self.random.below(2) == 0 => {
                let lock = self.client.read_write_lock(name).write();
                self.run_exclusive(name, |wait| lock.try_lock().wait(wait).block(), shutdown)
            }
            "rw" => {
                let lock = self.client.read_write_lock(name).read();
                self.run_section(
                    name,
                    Mode::Shared,
                    |_| None,
                    |wait| lock.try_lock().wait(wait).block(),
                    shutdown,
                )
            }
            "red" => {
                let members = locks_of(name);
                let lock = RedLock::new(members.iter().map(|name| self.client.lock(name)));
                let lock = lock.member_timeout(self.lease / 20);
                self.run_exclusive(name, |wait| lock.try_lock().wait(wait).block(), shutdown)
            }
            other => return Err(format!("threads do not support the kind {other}").into()),
        })
    }

    /// Runs one critical section, perhaps with a nested one.
    fn run_section<G: BlockingGuard>(
        &mut self,
        name: &str,
        mode: Mode,
        token: fn(&G) -> Option<u64>,
        request: impl Fn(Duration) -> Result<Option<G>, Error>,
        shutdown: &AtomicBool,
    ) -> Result<(), Error> {
        let wait = self.random.between(Duration::ZERO, self.lease / 2);
        let Some((outer, guard)) = self.acquire(name, mode, token, || request(wait))? else {
            return Ok(());
        };
        // Mostly short: the owners of tasks have to acquire the locks, too.
        let time = match self.random.below(3) {
            0 => random_hold_duration(self.lease, &mut self.random),
            _ => CHECK_INTERVAL,
        };
        let end = Instant::now() + time;
        let mut inner = None;
        if self.random.below(2) == 0 {
            // The thread holds the lock: other waiters make no difference.
            inner = self
                .acquire(name, mode, token, || request(Duration::ZERO))
                .ok()
                .flatten();
        }
        let mut is_lost = false;
        while !is_lost && Instant::now() < end && !shutdown.load(Ordering::Relaxed) {
            sleep(CHECK_INTERVAL);
            is_lost = !self.check_validity(outer, &guard);
            if let Some((section, guard)) = &inner {
                self.check_validity(*section, guard);
            }
        }
        if is_lost {
            self.reporter.report_in(outer, EventKind::LossReported);
            if let Some((section, _)) = &inner {
                self.reporter.report_in(*section, EventKind::LossReported);
            }
        }
        let mut all = vec![(outer, guard)];
        all.extend(inner);
        if is_lost && self.random.below(2) == 0 {
            // The guards of the lost hold still exist meanwhile.
            let wait = self.lease / 2;
            all.extend(
                self.acquire(name, mode, token, || request(wait))
                    .ok()
                    .flatten(),
            );
        }
        // In one order or the other.
        if self.random.below(2) == 0 {
            all.reverse();
        }
        // An outage may delay the first of them: the others are not checked meanwhile.
        for (section, _) in &all {
            self.reporter.report_in(*section, EventKind::Releasing);
        }
        for (section, guard) in all {
            self.release(section, guard);
        }
        Ok(())
    }

    /// Runs a section of a lock that is exclusive and has no tokens.
    fn run_exclusive<G: BlockingGuard>(
        &mut self,
        name: &str,
        request: impl Fn(Duration) -> Result<Option<G>, Error>,
        shutdown: &AtomicBool,
    ) -> Result<(), Error> {
        self.run_section(name, Mode::Exclusive, |_| None, request, shutdown)
    }

    /// Sends one request. Returns the section and its guard.
    fn acquire<G: BlockingGuard>(
        &mut self,
        name: &str,
        mode: Mode,
        token: fn(&G) -> Option<u64>,
        request: impl FnOnce() -> Result<Option<G>, Error>,
    ) -> Result<Option<(u64, G)>, Error> {
        let section = self.reporter.section();
        let report = |what| self.reporter.report_in(section, what);
        report(EventKind::Requested(Request {
            task: self.number,
            client: self.client_number,
            owner: Some(current_thread().number()),
            name: name.to_owned(),
            mode,
            is_member: false,
            ticket: None,
            limits: Limits::default(),
            run: None,
        }));
        match request() {
            Ok(Some(guard)) => {
                let holds = guard.holds();
                report(EventKind::Acquired {
                    token: token(&guard),
                    holds,
                });
                self.check_validity(section, &guard);
                Ok(Some((section, guard)))
            }
            Ok(None) => {
                report(EventKind::NotAcquired);
                Ok(None)
            }
            Err(error) => {
                report(EventKind::Failed {
                    error: error_name(&error),
                });
                Err(error)
            }
        }
    }

    fn release<G: BlockingGuard>(&mut self, section: u64, guard: G) {
        let released = match self.random.below(2) {
            0 => guard.unlock(),
            _ => {
                drop(guard);
                Ok(())
            }
        };
        let error = released.err().map(|error| error_name(&error));
        self.reporter
            .report_in(section, EventKind::Released { error });
    }

    fn check_validity<G: BlockingGuard>(&self, section: u64, guard: &G) -> bool {
        self.reporter
            .report_validity(section, || guard.valid_for())
            .is_some()
    }
}
