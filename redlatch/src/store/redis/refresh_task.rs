//! The task that watches a deployment for changes. It lives as long as its runtime; the next connection
//! starts another one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::connection::ReconnectingConnection;
use super::exchange_error::ExchangeError;
use crate::environment::task;
use crate::sync::Mutex;

/// Time that every node has to answer, even if enough nodes have answered before.
pub(super) const MIN_QUERY_TIME: Duration = Duration::from_millis(100);

/// Shortest time between two checks.
pub(super) const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct RefreshTask {
    running: Mutex<Option<AbortHandle>>,
    /// Notified when there is a reason to check.
    pub(super) signal: Arc<Notify>,
}

impl RefreshTask {
    /// Starts the task, which waits for the signal, unless it is running. It ends when `self` is dropped.
    pub(super) fn ensure_running<F: Future<Output = ()> + Send + 'static>(
        &self,
        refresh: impl FnOnce(Arc<Notify>) -> F,
    ) {
        let mut running = self.running.lock();
        if running.as_ref().is_none_or(AbortHandle::is_finished) {
            let refresh = refresh(self.signal.clone());
            *running = Some(tokio::spawn(task(refresh)).abort_handle());
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
    answer.unwrap_or_else(|_| {
        let timeout_hint = connection.timeout_hint().unwrap_or_default();
        let reason = format!("no answer within {limit:?}{timeout_hint}");
        Err(ExchangeError::not_executed(reason))
    })
}
