//! Notices restarts and failovers by the run id of the server process.

use std::sync::{Arc, Mutex, PoisonError};

use redis::Value;

use crate::store::{NodeId, SuspectNodes};

/// Notices when a connection leads to a different server process than the one before it: after a restart or
/// a failover. The holds there may then be lost.
pub(super) struct RunIdTracker {
    node: NodeId,
    suspect_nodes: Arc<SuspectNodes>,
    /// Run id at the latest connection. The inner `None` means that the server did not report it.
    run_id: Mutex<Option<Option<String>>>,
}

impl RunIdTracker {
    pub(super) fn new(node: NodeId, suspect_nodes: Arc<SuspectNodes>) -> RunIdTracker {
        RunIdTracker {
            node,
            suspect_nodes,
            run_id: Mutex::default(),
        }
    }

    /// Records a connection to this process. If the server does not report a run id, each connection may
    /// lead to a different process.
    pub(super) fn record(&self, run_id: Option<String>) {
        let mut latest = self.run_id.lock().unwrap_or_else(PoisonError::into_inner);
        let same = match latest.as_ref() {
            None => true,
            Some(before) => run_id.is_some() && *before == run_id,
        };
        *latest = Some(run_id);
        drop(latest);
        if !same {
            self.report_replaced();
        }
    }

    /// Records that another server has replaced the earlier one.
    pub(super) fn report_replaced(&self) {
        self.suspect_nodes.add(self.node);
    }
}

/// Extracts the run id of the server process from the reply to INFO.
pub(super) fn run_id(info: Value) -> Option<String> {
    let info: String = redis::from_redis_value(info).ok()?;
    let lines = info.lines().filter_map(|line| line.split_once(':'));
    let mut run_ids = lines.filter(|(name, _)| *name == "run_id");
    run_ids.next().map(|(_, id)| id.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns whether a connection to this process, after the earlier ones, makes its node suspect.
    async fn makes_suspect(run_id_tracker: &RunIdTracker, run_id: Option<&str>) -> bool {
        run_id_tracker.record(run_id.map(str::to_owned));
        let nodes = tokio::time::timeout(Duration::ZERO, run_id_tracker.suspect_nodes.next());
        nodes.await.is_ok()
    }

    #[tokio::test]
    async fn reconnection_makes_node_suspect_only_for_other_process() {
        let run_id_tracker = RunIdTracker::new(NodeId::next(), Arc::default());
        assert!(
            !makes_suspect(&run_id_tracker, Some("a")).await,
            "the first connection"
        );
        assert!(
            !makes_suspect(&run_id_tracker, Some("a")).await,
            "the same process"
        );
        assert!(
            makes_suspect(&run_id_tracker, Some("b")).await,
            "another process"
        );
        assert!(
            !makes_suspect(&run_id_tracker, Some("b")).await,
            "the same again"
        );
        assert!(makes_suspect(&run_id_tracker, None).await, "no run id");
        assert!(
            makes_suspect(&run_id_tracker, None).await,
            "no run id again"
        );
        assert!(
            makes_suspect(&run_id_tracker, Some("b")).await,
            "no run id before"
        );
    }
}
