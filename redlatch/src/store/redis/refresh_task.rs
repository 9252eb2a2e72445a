//! The task that watches a deployment for changes. It lives as long as its runtime; the next step, in
//! whichever runtime, starts another one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::connection::ReconnectingConnection;
use super::exchange_error::ExchangeError;
use super::pace::Pace;
use crate::environment::{check_sockets, task};
use crate::sync::Mutex;

/// Time that every node has to answer, even if enough nodes have answered before.
pub(super) const MIN_QUERY_TIME: Duration = Duration::from_millis(100);

/// Shortest time between two checks.
pub(super) const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

/// Limit of the time between two checks that failures request, while the checks find nothing new.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

#[derive(Default)]
pub(super) struct RefreshTask {
    running: Mutex<Option<AbortHandle>>,
}

/// The reasons to check.
#[derive(Default)]
pub(super) struct Signals {
    /// A server reports that something has changed.
    pub(super) changed: Notify,
    /// Something failed. In an outage everything fails again and again.
    pub(super) failed: Notify,
}

/// Says when to check: at once when something has changed, and in growing intervals while only
/// failures request it.
pub(super) struct Checks {
    signals: Arc<Signals>,
    pace: Pace,
}

impl Checks {
    pub(super) fn new(signals: Arc<Signals>) -> Checks {
        Checks {
            signals,
            pace: Pace::up_to(LONGEST_PAUSE),
        }
    }

    /// Waits for a reason to check, at most for `interval`.
    pub(super) async fn next(&self, interval: Duration) {
        tokio::select! {
            biased;
            () = self.signals.changed.notified() => {}
            () = self.signals.failed.notified() => {}
            () = sleep(interval) => {}
        }
    }

    /// Pauses after a check, which may have `found` something new.
    pub(super) async fn pause(&mut self, found: bool) {
        match found {
            true => self.pace.reset(),
            false => self.pace.failed(Instant::now()),
        }
        sleep(MIN_REFRESH_INTERVAL).await;
        if let Some(until) = self.pace.not_before()
            && timeout_at(until, self.signals.changed.notified())
                .await
                .is_ok()
        {
            self.pace.reset();
            self.signals.changed.notify_one();
        }
    }
}

impl RefreshTask {
    /// Starts the task unless it is running. It ends when `self` is dropped. In a runtime without sockets it would reach no
    /// server, and prevent a better one.
    pub(super) fn ensure_running<F: Future<Output = ()> + Send + 'static>(
        &self,
        refresh: impl FnOnce() -> F,
    ) {
        let mut running = self.running.lock();
        let is_running = running.as_ref().is_some_and(|task| !task.is_finished());
        if !is_running && check_sockets().is_ok() {
            *running = Some(tokio::spawn(task(refresh())).abort_handle());
        }
    }
}

impl Drop for RefreshTask {
    fn drop(&mut self) {
        if let Some(task) = self.running.lock().take() {
            task.abort();
        }
    }
}

/// Returns the answer of one node to a query, or an error if it takes longer than `limit`.
pub(super) async fn answer_within<T>(
    limit: Duration,
    connection: &ReconnectingConnection,
    query: impl Future<Output = Result<T, ExchangeError>>,
) -> Result<T, ExchangeError> {
    let answer = timeout(limit, query).await;
    answer.unwrap_or_else(|_| Err(no_answer_within(limit, connection)))
}

/// Returns the error for a node that did not answer in time.
pub(super) fn no_answer_within(
    limit: Duration,
    connection: &ReconnectingConnection,
) -> ExchangeError {
    let timeout_hint = connection.timeout_hint().unwrap_or_default();
    ExchangeError::not_executed(format!("no answer within {limit:?}{timeout_hint}"))
}
