//! The connections on which servers report changed keys to a watch (`CLIENT TRACKING ON BCAST`).
//!
//! Each master has one, which carries nothing else. The server reports every change of a key with
//! one of the prefixes, by any client, also those by scripts and expiry. It needs no settings on
//! the server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::connection::ReconnectingConnection;
use super::exchange_error::ExchangeError;
use super::topology::Topology;
use super::wire::Cmd;
use super::{Redis, with_response_timeout};
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::store::{Changes, NodeId};
use crate::sync::Mutex;

/// The connections, by master. They end when this is dropped.
#[derive(Default)]
pub(crate) struct Reporters(Mutex<BTreeMap<NodeId, Arc<ReconnectingConnection>>>);

impl Redis {
    pub(crate) async fn start_reports(
        &self,
        changes: &Arc<Changes>,
        reporters: &Reporters,
    ) -> Result<()> {
        self.topology.check_callable()?;
        let limit: Duration = self.response_timeout;
        let connections = reporters.connect(&self.topology, changes);
        let connections = with_response_timeout(limit, connections).await?;
        changes.restart();
        let starting = connections.iter().map(|connection| async move {
            let started = with_response_timeout(limit, start(connection, changes)).await;
            started.inspect_err(|_| self.topology.request_refresh())
        });
        join_all(starting).await.into_iter().collect()
    }

    pub(crate) fn lacks_reporters(&self, reporters: &Reporters) -> bool {
        let reporters = reporters.0.lock();
        let masters = self.topology.known_masters();
        !masters.iter().all(|node| reporters.contains_key(&node.id))
    }
}

impl Reporters {
    /// Returns one connection to each current master. Those to former masters end.
    async fn connect(
        &self,
        topology: &Topology,
        changes: &Arc<Changes>,
    ) -> Result<Vec<Arc<ReconnectingConnection>>, ExchangeError> {
        let masters = topology.masters().await?;
        let mut connections = self.0.lock();
        let mut former = std::mem::take(&mut *connections);
        for node in masters {
            let connection = former.remove(&node.id);
            let further = || topology.reports_connection(&node, changes.clone());
            connections.insert(node.id, connection.unwrap_or_else(further));
        }
        Ok(connections.values().cloned().collect())
    }
}

/// Makes one server report changes.
async fn start(
    connection: &Arc<ReconnectingConnection>,
    changes: &Changes,
) -> Result<(), ExchangeError> {
    let live = connection.get_or_connect().await?;
    let off = Cmd::of(&["CLIENT", "TRACKING", "OFF"]);
    let mut on = Cmd::of(&["CLIENT", "TRACKING", "ON", "BCAST"]);
    // Without a prefix, all keys are reported.
    for prefix in changes.prefixes.iter().filter(|prefix| !prefix.is_empty()) {
        ["PREFIX", prefix].iter().for_each(|arg| on.text(arg));
    }
    // Reports that were on already, with the same prefixes, would be refused.
    for command in [off, on] {
        let started = live.query(&command).await;
        started.map_err(|failure| match failure {
            ExchangeError::Permanent(Error::Refused { reason }) => Error::UnsupportedServer {
                reason: format!("it does not report changed keys (CLIENT TRACKING: {reason})"),
            }
            .into(),
            failure => failure,
        })?;
    }
    Ok(())
}
