//! Notices restarts and failovers by the run id of the server process, and handles its reports of changed keys.

use std::sync::Arc;

use super::capabilities::Capabilities;
use crate::metrics::Metrics;
use crate::step::{ErrorReply, ScriptReply};
use crate::store::{NodeId, Suspects};
use crate::sync::Mutex;

/// Notices when a connection leads to a different server process than the one before it: after a restart or
/// a failover. The holds there may then be lost.
pub(super) struct RunIdTracker {
    node: NodeId,
    suspects: Arc<Suspects>,
    metrics: Metrics,
    capabilities: Arc<Capabilities>,
    /// The run id of the process at the latest connection. The inner `None` means that the server did not report it.
    run_id: Mutex<Option<Option<String>>>,
}

impl RunIdTracker {
    pub(super) fn new(
        node: NodeId,
        suspects: Arc<Suspects>,
        metrics: Metrics,
        capabilities: Arc<Capabilities>,
    ) -> RunIdTracker {
        RunIdTracker {
            node,
            suspects,
            metrics,
            capabilities,
            run_id: Mutex::default(),
        }
    }

    /// Records a connection to this process. If the server does not report a run id, each connection may
    /// lead to a different process. With client tracking, each connection starts anew: the server has not reported what has
    /// changed in the meantime.
    pub(super) fn record(&self, run_id: Option<String>) {
        // Locked until the end: what concurrent connections show is recorded in their order.
        let mut latest = self.run_id.lock();
        match latest.replace(run_id.clone()) {
            Some(before) if run_id.is_none() || before != run_id => {
                self.capabilities
                    .replaced(before.is_some() && run_id.is_some());
                self.suspects.add_node(self.node);
            }
            Some(_) if self.suspects.is_tracking() => {
                if self.capabilities.tracking.lock().reconnected() {
                    self.not_tracking(&"it ends each connection that asks for reports");
                }
                self.suspects.add_changed_node(self.node);
            }
            _ => {}
        }
    }

    /// Has the holds checked when the connection has broken: the server may have lost them, and a client that sends nothing
    /// would not know before its next renewal.
    pub(super) fn disconnected(&self) {
        self.suspects.add_changed_node(self.node);
    }

    /// Returns the run id of the process at the latest connection, if it is known.
    pub(super) fn run_id(&self) -> Option<String> {
        self.run_id.lock().clone().flatten()
    }

    /// Handles the server's report about changed keys; `None`: all were deleted.
    pub(super) fn report_changed(&self, keys: Option<&[ScriptReply]>) {
        match keys {
            Some(keys) => {
                let keys = keys.iter().filter_map(ScriptReply::as_text);
                keys.for_each(|key| self.suspects.add_key(key));
            }
            None => self.suspects.add_changed_node(self.node),
        }
    }

    /// Returns whether the server is asked to report changes of keys.
    pub(super) fn is_tracking(&self) -> bool {
        self.suspects.is_tracking() && self.capabilities.tracking.lock().is_on()
    }

    /// Records the answers to a request for reports. `None`: the connection has ended.
    pub(super) fn tracked(&self, answers: Option<&[ScriptReply]>) {
        let mut tracking = self.capabilities.tracking.lock();
        match answers {
            Some(answers) => match answers.iter().find_map(refusal) {
                Some(reason) if tracking.refused() => self.not_tracking(reason),
                Some(_) => {}
                None => tracking.answered(),
            },
            None => tracking.connection_ended(),
        }
    }

    fn not_tracking(&self, reason: &dyn std::fmt::Display) {
        tracing::warn!(%reason, "the server does not report changed locks");
        self.metrics.tracking_refused();
    }

    /// Records that another server has replaced the earlier one.
    pub(super) fn report_replaced(&self) {
        self.capabilities.replaced(true);
        self.suspects.add_node(self.node);
    }

    /// Records that a connection cannot carry reports.
    pub(super) fn cannot_track(&self) {
        if self.suspects.is_tracking() && self.capabilities.record_without_reports() {
            self.not_tracking(&"its reports require RESP3");
        }
    }
}

/// Returns the error if a server refuses to report changes. A server that is busy may do so later.
fn refusal(answer: &ScriptReply) -> Option<&ErrorReply> {
    match answer {
        ScriptReply::Error(error) if matches!(error.code(), "NOPERM" | "ERR") => Some(error),
        _ => None,
    }
}

/// Extracts the run id of the server process from the reply to INFO.
pub(super) fn run_id(info: &ScriptReply) -> Option<String> {
    info_field(info.as_text()?, "run_id").map(str::to_owned)
}

/// Returns a field of the reply to INFO or CLUSTER INFO.
pub(super) fn info_field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    let (_, value) = info_fields(info).find(|(other, _)| *other == name)?;
    Some(value)
}

/// Returns all fields of a reply to INFO.
pub(super) fn info_fields(info: &str) -> impl Iterator<Item = (&str, &str)> {
    let fields = info.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(name, value)| (name, value.trim()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns whether a connection to this process, after the earlier ones, makes its node suspect.
    async fn makes_suspect(run_id_tracker: &RunIdTracker, run_id: Option<&str>) -> bool {
        run_id_tracker.record(run_id.map(str::to_owned));
        let nodes = tokio::time::timeout(Duration::ZERO, run_id_tracker.suspects.next());
        nodes.await.is_ok()
    }

    #[tokio::test]
    async fn reconnection_makes_node_suspect_only_for_other_process() {
        let run_id_tracker = RunIdTracker::new(
            NodeId::next(),
            Arc::new(Suspects::new(false)),
            Metrics::default(),
            Arc::default(),
        );
        for (run_id, is_other, what) in [
            (Some("a"), false, "the first connection"),
            (Some("a"), false, "the same process"),
            (Some("b"), true, "another process"),
            (Some("b"), false, "the same again"),
            (None, true, "no run id"),
            (None, true, "no run id again"),
            (Some("b"), true, "no run id before"),
        ] {
            let is_suspect = makes_suspect(&run_id_tracker, run_id).await;
            assert_eq!(is_suspect, is_other, "{what}");
        }
    }
}
