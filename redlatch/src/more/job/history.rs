//! What the store has about the runs of a job, for people.

use std::time::{Duration, SystemTime};

use super::cron::Cron;
use super::plan::late;
use super::rules::{KEPT, Record, slot_of};
use crate::client_registry::shortened;
use crate::more::once::{millis, time_of};
use crate::store::Store;

/// The longest output of a run that is kept, in bytes.
pub const MAX_OUTPUT: usize = 2048;

/// The latest runs of a job: [`Job::history`](super::Job::history).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct History {
    /// Name of the job.
    pub name: String,
    /// When it fires, as the machine said that ran it last.
    pub schedule: Option<Cron>,
    /// The latest slot that was decided: it has run, or was skipped.
    pub last_slot: SystemTime,
    /// How many firings were skipped, because another run lasted, since the store has the record.
    pub skipped: u64,
    /// The latest slot whose run has succeeded, also if the run itself is not kept any more.
    pub last_success: Option<SystemTime>,
    /// The latest runs (up to 20), the latest slot first.
    pub runs: Vec<RunRecord>,
}

/// One run of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunRecord {
    /// The time for which it was scheduled.
    pub slot: SystemTime,
    /// 1, and more if it repeats a run [without an end](super::Scheduled::retry).
    pub attempt: u32,
    /// What has become of it.
    pub state: RunState,
    /// Name of the machine.
    pub host: String,
    /// The process: `label@host (pid 4711)`.
    pub by: String,
    /// When it began, by the clock of the server.
    pub began: SystemTime,
    /// How long it took. `None` while it lasts. Of a lost run: until that was noticed.
    pub took: Option<Duration>,
    /// How it ended, such as `exit code 3`; empty if that is not known.
    pub outcome: String,
    /// The last lines of its output, up to [`MAX_OUTPUT`] bytes.
    pub output: String,
}

/// What has become of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunState {
    /// It lasts.
    Running,
    /// It has ended well.
    Succeeded,
    /// It has failed, or was ended at its timeout.
    Failed,
    /// Its machine has died, or lost the lock.
    Lost,
}

impl RunState {
    /// Returns a word for it: `running`, `ok`, `failed` or `lost`.
    pub fn as_str(self) -> &'static str {
        match self {
            RunState::Running => "running",
            RunState::Succeeded => "ok",
            RunState::Failed => "failed",
            RunState::Lost => "lost",
        }
    }
}

impl History {
    /// Returns the next firing after `now`, if the schedule is known.
    pub fn next_run(&self, now: SystemTime) -> Option<SystemTime> {
        self.schedule.as_ref()?.next_after(now)
    }

    /// Returns the earliest firing that no machine has begun or skipped, if it was due more than a minute
    /// before `now`, by the schedule of the latest run. Then no machine schedules the job any more, or its
    /// schedule has changed since, or each delays it ([`Scheduled::jitter`](super::Scheduled::jitter)), has
    /// missed it, or cannot acquire the lock of the job. `None` while a run lasts: a firing may wait for its end.
    pub fn overdue(&self, now: SystemTime) -> Option<SystemTime> {
        let first = self.schedule.as_ref()?.next_after(self.last_slot)?;
        let lasts = |run: &RunRecord| run.state == RunState::Running;
        (late(first, now) && !self.runs.iter().any(lasts)).then_some(first)
    }

    pub(super) fn new(name: &str, record: &Record, store: &Store) -> Option<History> {
        let Record { now, fields, live } = record;
        let run = |(field, text): (&String, &String)| {
            let (slot, attempt) = slot_of(field)?;
            let mut lines = text.split('\n');
            let began: i64 = lines.next()?.parse().ok()?;
            let mut lines = lines.skip(3).map(shortened);
            let (host, by) = (lines.next()?.to_owned(), lines.next()?.to_owned());
            let end = fields.get(&field.replacen("run", "end", 1));
            let mut parts = end.map(|end| end.splitn(4, '\n')).into_iter().flatten();
            let ended = parts.next().and_then(|ended| ended.parse::<i64>().ok());
            let state = match parts.next() {
                Some("ok") => RunState::Succeeded,
                Some("failed") => RunState::Failed,
                None if live.contains(field) => RunState::Running,
                _ => RunState::Lost,
            };
            let took = ended.and_then(|ended| u64::try_from(ended.saturating_sub(began)).ok());
            Some(RunRecord {
                slot: at(slot),
                attempt,
                state,
                host,
                by,
                began: time_of(store, *now, began),
                took: took.map(Duration::from_millis),
                outcome: shortened(parts.next().unwrap_or_default()).to_owned(),
                output: last_bytes(parts.next().unwrap_or_default(), MAX_OUTPUT).to_owned(),
            })
        };
        let mut runs: Vec<_> = fields.iter().filter_map(run).collect();
        runs.sort_by_key(|run| std::cmp::Reverse((run.slot, run.attempt)));
        runs.truncate(KEPT as usize);
        let schedule = fields.get("schedule").and_then(|schedule| {
            let (zone, text) = schedule.split_once(' ')?;
            Cron::parse(text).and_then(|cron| cron.in_tz(zone)).ok()
        });
        let number = |field| fields.get(field)?.parse::<i64>().ok();
        Some(History {
            name: name.to_owned(),
            schedule,
            last_slot: at(number("last")?),
            skipped: number("skipped").map_or(0, i64::unsigned_abs),
            last_success: number("succeeded").map(at),
            runs,
        })
    }
}

/// Returns the time of a slot.
fn at(slot: i64) -> SystemTime {
    let time = SystemTime::UNIX_EPOCH.checked_add(millis(slot));
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Returns the end of a text, at most so many bytes.
pub(super) fn last_bytes(text: &str, bytes: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}
