//! A job that this process runs by a schedule. Each run is a critical section, of the lock with the name of the job.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use redlatch::Client;
use redlatch::job::{Cron, Overlap, Run};
use tokio::time::{Instant, sleep};

use super::options::WorkerOptions;
use super::reporter::Reporter;
use crate::Result;
use crate::clock::{Time, nanos};
use crate::history::{EventKind, JobRun, Mode, Request};
use crate::names::{JobSettings, job_settings};
use crate::random::Random;

/// Interval of the checks whether the run has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A job that this process runs.
pub(super) struct ScheduledJob {
    pub(super) name: String,
    pub(super) task: usize,
    /// With its number.
    pub(super) client: (usize, Client),
    pub(super) reporter: Reporter,
    pub(super) worker: Arc<WorkerOptions>,
    pub(super) shutdown: Arc<AtomicBool>,
}

/// Work that has begun. When it is dropped before its end, the lock was lost.
struct Working<'a> {
    reporter: &'a Reporter,
    section: u64,
    has_ended: bool,
}

impl ScheduledJob {
    /// Runs the job until the shutdown.
    pub(super) async fn run(self) -> Result<()> {
        let name = &*self.name;
        let settings = job_settings(name).ok_or_else(|| format!("unknown job {name}"))?;
        let seconds = settings.period.as_secs();
        let clock = self.reporter.clone();
        let scheduled = (self.client.1.job(name))
            .schedule(Cron::parse(&format!("*/{seconds} * * * * *"))?)
            .overlap(settings.overlap)
            .catch_up(settings.catch_up)
            .retry(settings.retries)
            .jitter(settings.jitter)
            .clock(move || clock.date());
        while !self.shutdown.load(Ordering::Relaxed) {
            let (job, date) = (name.to_owned(), since_1970(self.reporter.date()));
            self.reporter.report(EventKind::Scheduled { job, date });
            let work = |run| self.work(settings, run);
            // The store may refuse a client whose password changes: it begins again.
            if let Err(error) = scheduled.run_until(self.stop(), work).await {
                self.report_stop();
                eprintln!("{name} ended: {error}");
                sleep(CHECK_INTERVAL).await;
            }
        }
        Ok(())
    }

    /// Waits for the shutdown.
    async fn stop(&self) {
        while !self.shutdown.load(Ordering::Relaxed) {
            sleep(CHECK_INTERVAL).await;
        }
        self.report_stop();
    }

    fn report_stop(&self) {
        let job = self.name.clone();
        self.reporter.report(EventKind::Unscheduled { job });
    }

    /// Works for a while. One run in eight fails.
    async fn work(&self, settings: &JobSettings, run: Run) -> Result<(), &'static str> {
        let (slot, attempt) = (since_1970(run.slot()), run.attempt());
        let mut random = self.worker.random(self.task);
        let mut random = Random::new(random.next_u64() ^ slot.unsigned_abs() ^ u64::from(attempt));
        let end = Instant::now() + random.between(Duration::ZERO, settings.longest);
        let mut working = self.begin(settings, JobRun { slot, attempt });
        loop {
            // The lock is checked after this moment, before the work continues.
            let at = self.reporter.now();
            let left = end.saturating_duration_since(Instant::now());
            sleep(self.reporter.check_interval().min(left)).await;
            let (until, at_least) = (at, at);
            let valid = EventKind::Valid { until, at_least };
            self.reporter.report_at(at, working.section, valid);
            if Instant::now() >= end || self.shutdown.load(Ordering::Relaxed) {
                break;
            }
        }
        working.end();
        match random.below(8) {
            0 => Err("failed"),
            _ => Ok(()),
        }
    }

    /// Reports that a run begins.
    fn begin(&self, settings: &JobSettings, run: JobRun) -> Working<'_> {
        let section = self.reporter.section();
        let request = Request {
            client: self.client.0,
            mode: match settings.overlap {
                Overlap::Allow => Mode::Shared,
                _ => Mode::Exclusive,
            },
            run: Some(run),
            ..Request::exclusive(self.task, self.name.clone())
        };
        let (token, holds) = (None, None);
        for what in [
            EventKind::Requested(request),
            EventKind::Acquired { token, holds },
        ] {
            self.reporter.report_in(section, what);
        }
        Working {
            reporter: &self.reporter,
            section,
            has_ended: false,
        }
    }
}

impl Working<'_> {
    fn end(&mut self) {
        self.has_ended = true;
        for what in [EventKind::Releasing, EventKind::Released { error: None }] {
            self.reporter.report_in(self.section, what);
        }
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.reporter
                .report_in(self.section, EventKind::LossReported);
        }
    }
}

fn since_1970(time: SystemTime) -> Time {
    nanos(
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default(),
    )
}
