//! Metrics of jobs that run by a schedule.

use std::time::{Duration, SystemTime};

use redlatch::Client;
use redlatch::job::{History, RunState};

use crate::jobs::read_all;

/// What is exported of one job.
#[derive(Debug)]
pub(super) struct JobMetrics {
    pub(super) name: String,
    /// When the latest run that succeeded was scheduled, since the beginning of 1970.
    pub(super) last_success: Option<Duration>,
    /// How long the latest run took that has ended.
    pub(super) last_duration: Option<Duration>,
    /// How many of the runs that the store has failed or were lost.
    pub(super) failures: u32,
    pub(super) skipped: u64,
}

/// Reads the jobs that match a pattern. A client that may not read them exports none.
pub(super) async fn read(client: &Client, pattern: &str) -> redlatch::Result<Vec<JobMetrics>> {
    match read_all(client, pattern, false).await {
        Ok(histories) => Ok(histories.iter().map(metrics).collect()),
        Err(redlatch::Error::NotPermitted { .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn metrics(history: &History) -> JobMetrics {
    let success = history.last_success();
    let is_failure = |state| matches!(state, RunState::Failed | RunState::Lost);
    let failures = history.runs.iter().filter(|run| is_failure(run.state));
    JobMetrics {
        name: history.name.clone(),
        last_success: success.and_then(|run| run.slot.duration_since(SystemTime::UNIX_EPOCH).ok()),
        last_duration: history.runs.iter().find_map(|run| run.took),
        failures: u32::try_from(failures.count()).unwrap_or(u32::MAX),
        skipped: history.skipped,
    }
}
