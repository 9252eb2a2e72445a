//! Jobs that run at most once for each slot, for threads.

use std::time::Duration;

use super::forward::forward;
use super::{Acquirable, Blocking, Guard};
use crate::error::Result;
use crate::{AlreadyRan, HasLease};

/// A job that runs at most once for each slot: [`crate::Once`].
pub type Once = Blocking<crate::Once>;

/// The only run of a slot: [`crate::OnceRun`]. It may be moved to another thread.
pub type OnceRun = Blocking<crate::OnceRun>;

forward! { [Once] "crate::Once" {
    get name() -> &str;
    set remembered_for(time: Duration);
    run earlier_run() -> Option<AlreadyRan>;
} }

forward! { [OnceRun] "crate::OnceRun" {
    get attempt() -> u32;
} }

impl Once {
    /// Allows further runs in the place of one without an outcome: [`crate::Once::retry_unfinished`].
    #[must_use]
    pub fn retry_unfinished<L>(mut self, times: u32, held: &Guard<L>) -> Once
    where
        L: Acquirable + HasLease,
    {
        self.inner = self.inner.retry_unfinished(times, &held.inner);
        self
    }

    /// Begins the run of the current slot: [`crate::Once::begin`].
    ///
    /// ```
    /// # fn main() -> redlatch::Result<()> {
    /// let client = redlatch::blocking::Client::embedded()?;
    /// let once = client.once("nightly-report", "2026-11-22T02:00");
    /// let run = once.begin()?.expect("the first run");
    /// run.finish("42 pages")?;
    /// assert_eq!(once.begin()?.unwrap_err().outcome.as_deref(), Some("42 pages"));
    /// # Ok(()) }
    /// ```
    pub fn begin(&self) -> Result<Result<OnceRun, AlreadyRan>> {
        let once = self.inner.clone();
        let begun = self.worker.run(async move { once.begin().await })??;
        Ok(begun.map(|inner| Blocking {
            inner,
            worker: self.worker.clone(),
        }))
    }

    /// Calls `work` unless the current slot has had a run: [`crate::Once::run`]. If `work` panics, the outcome is `dropped`.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<Result<T, AlreadyRan>> {
        let run = match self.begin()? {
            Ok(run) => run,
            Err(earlier) => return Ok(Err(earlier)),
        };
        let output = work();
        // The work was started, so no error may be returned.
        let _ = self.worker.run(run.inner.finish_or_log());
        Ok(Ok(output))
    }
}

impl OnceRun {
    /// Records how the run has ended: [`crate::OnceRun::finish`].
    pub fn finish(self, outcome: impl Into<String>) -> Result<bool> {
        let outcome = outcome.into();
        self.worker.run(self.inner.finish(outcome))?
    }
}
