//! Jobs that run by a schedule, each firing on one machine. Redisson has nothing like it.

mod cron;
#[cfg(test)]
mod differential;
mod history;
mod plan;
mod rules;
mod scheduler;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

pub use self::cron::Cron;
pub use self::history::{History, MAX_OUTPUT, RunRecord, RunState};
pub use self::plan::CatchUp;
pub use self::rules::Overlap;
pub use self::scheduler::{Outcome, Run, Scheduled};
use crate::error::Result;
use crate::glob;
use crate::name::JobKeys;
use crate::session::Session;
use crate::store::{Cursor, ScanType};

/// A job that runs by a schedule, each firing on one of the machines that schedule it:
/// [`Client::job`](crate::Client::job).
///
/// ```no_run
/// # async fn send_report() -> std::io::Result<()> { Ok(()) }
/// # #[tokio::main] async fn main() -> redlatch::Result<()> {
/// use redlatch::job::Cron;
///
/// let client = redlatch::Client::connect("redis://127.0.0.1").await?;
/// let nightly = Cron::parse("0 2 * * *")?.in_tz("Europe/Berlin")?;
/// // A run whose machine dies is repeated once. One that returns an error is not.
/// let job = client.job("nightly-report").schedule(nightly).retry(1);
/// // On all machines. One of them sends the report.
/// job.run(async |run| {
///     println!("{}, attempt {}", run.name(), run.attempt());
///     send_report().await
/// })
/// .await
/// # }
/// ```
#[derive(Clone)]
pub struct Job {
    session: Arc<Session>,
    keys: Arc<JobKeys>,
}

impl Job {
    pub(crate) fn new(session: Arc<Session>, name: &str) -> Job {
        let keys = Arc::new(JobKeys::new(&session.prefix, name));
        Job { session, keys }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.keys.object.name()
    }

    /// Returns the job with the times at which it fires. All machines must use the same.
    pub fn schedule(self, cron: Cron) -> Scheduled {
        Scheduled::new(self, cron)
    }

    /// Returns the latest runs. `None`: the store knows none.
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`](crate::Lock::is_locked).
    pub async fn history(&self) -> Result<Option<History>> {
        self.read(true).await
    }

    /// Returns the same without outputs, which are most of it. For the command, not part of the
    /// public interface.
    #[doc(hidden)]
    pub async fn history_without_outputs(&self) -> Result<Option<History>> {
        self.read(false).await
    }

    async fn read(&self, outputs: bool) -> Result<Option<History>> {
        self.keys.object.check()?;
        let store = &self.session.store;
        let record = store
            .run_idempotent(&rules::read(&self.keys, outputs))
            .await?;
        Ok(History::new(self.name(), &record, store))
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("name", &self.name()).finish()
    }
}

/// Returns the names of all jobs that match a pattern and of which the store has runs, in order.
pub(crate) async fn names(session: &Session, pattern: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut cursor = Some(Cursor::default());
    while let Some(page) = cursor {
        let scan = session.store.scan(JobKeys::PATTERN, ScanType::Hashes, page);
        let (records, next) = scan.await?;
        let of_client = |record: &String| {
            let name = JobKeys::object_of(record)?.strip_prefix(&session.prefix)?;
            // Another program may have written any key.
            let is_valid = JobKeys::new(&session.prefix, name).object.check().is_ok();
            let is_wanted = is_valid && glob::matches(pattern.as_bytes(), name.as_bytes());
            is_wanted.then(|| name.to_owned())
        };
        names.extend(records.iter().filter_map(of_client));
        cursor = next;
    }
    // SCAN may return a key several times.
    names.sort_unstable();
    names.dedup();
    Ok(names)
}
