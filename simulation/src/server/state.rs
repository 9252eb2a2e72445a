//! The state of a server, without its interpreter, and what it sends.

use std::collections::BTreeMap;
use std::time::Duration;

use super::auth::User;
use super::cluster::ClusterView;
use super::connection::{Connection, ConnectionId};
use super::keyspace::Keyspace;
use super::pubsub::Channels;
use super::replication::Replication;
use super::resp::{self, Bytes, Reply, write_push};
use super::sentinel::Masters;
use super::tracking::{Readers, Reads};

/// Configuration of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// Host at which clients reach it.
    pub host: String,
    /// Its port there.
    pub port: u16,
    /// The id of the process in INFO: 40 hex digits, different after each restart.
    pub run_id: String,
    /// The version that it reports and emulates: 7.0 or later.
    pub version: String,
    /// The password of the user `default`, if it needs one.
    pub password: Option<String>,
}

/// Output of a server: bytes for a connection, or its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Sends these bytes.
    Send {
        /// The connection.
        to: ConnectionId,
        /// An answer or a message, complete.
        bytes: Vec<u8>,
    },
    /// Closes the connection, after all that was sent before.
    Close {
        /// The connection, which the server has already removed.
        to: ConnectionId,
    },
}

/// Error that ends the run: a command, an option or a use of Lua that the simulated server does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the simulated server does not support {0}")]
pub struct Unsupported(pub(super) String);

/// Why a server refuses commands for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Commands that need memory are refused (`maxmemory`).
    OutOfMemory,
    /// Writes are refused: too few replicas are connected (`min-replicas-to-write`).
    TooFewReplicas,
    /// Writes are refused: the data cannot be saved.
    DiskError,
    /// All commands are refused until the data is loaded.
    Loading,
    /// Queries for the topology are refused (`CLUSTER`, `SENTINEL`), and nothing else.
    Queries,
}

/// The state of a server without its interpreter, which runs scripts on it.
#[derive(Debug)]
pub(super) struct State {
    pub(super) config: Config,
    /// Time since 1970, by this server's clock.
    pub(super) now: Duration,
    pub(super) keys: Keyspace,
    pub(super) connections: BTreeMap<ConnectionId, Connection>,
    /// Number of connections ever accepted.
    pub(super) connected: u64,
    pub(super) channels: Channels,
    pub(super) replication: Replication,
    pub(super) users: BTreeMap<String, User>,
    pub(super) refusal: Option<Refusal>,
    /// Whether HELLO is unknown, as at some proxies.
    pub(super) lacks_resp3: bool,
    /// The view of a cluster node.
    pub(super) cluster: Option<ClusterView>,
    /// The masters of a Sentinel.
    pub(super) sentinel: Option<Masters>,
    /// Messages for the other nodes of the cluster.
    pub(super) broadcasts: Vec<(Bytes, Bytes)>,
    pub(super) readers: Readers,
    pub(super) reads: Reads,
    /// The keys of the running script.
    pub(super) script_keys: Option<Vec<Bytes>>,
    /// Whether the running script was redirected here by the owner of its slot (ASKING).
    pub(super) script_asks: bool,
    pub(super) outputs: Vec<Output>,
}

impl State {
    /// Creates the state of a master without data.
    pub(super) fn new(config: Config) -> State {
        let default = User::unrestricted(config.password.as_deref());
        State {
            now: Duration::ZERO,
            keys: Keyspace::default(),
            connections: BTreeMap::new(),
            connected: 0,
            channels: Channels::default(),
            replication: Replication::default(),
            users: BTreeMap::from([("default".to_owned(), default)]),
            refusal: None,
            lacks_resp3: false,
            cluster: None,
            sentinel: None,
            broadcasts: Vec::new(),
            readers: Readers::new(),
            reads: Reads::new(),
            script_keys: None,
            script_asks: false,
            outputs: Vec::new(),
            config,
        }
    }

    pub(super) fn set_clock(&mut self, now: Duration) {
        self.now = now;
        self.keys.now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    }

    /// Removes the next complete command from the input of a connection that is not blocked.
    pub(super) fn next_command(&mut self, id: ConnectionId) -> Option<Vec<Bytes>> {
        let connection = self.connections.get_mut(&id)?;
        if connection.blocked.is_some() {
            return None;
        }
        match resp::parse(&connection.input) {
            Ok(None) => None,
            Ok(Some((args, length))) => {
                connection.input.drain(..length);
                Some(args)
            }
            Err(error) => {
                self.send(id, &Reply::Error(error));
                self.close(id);
                None
            }
        }
    }

    /// Sends an answer.
    pub(super) fn send(&mut self, to: ConnectionId, reply: &Reply) {
        let Some(connection) = self.connections.get(&to) else {
            return;
        };
        let mut bytes = Vec::new();
        reply.write(connection.protocol, &mut bytes);
        if !bytes.is_empty() {
            self.outputs.push(Output::Send { to, bytes });
        }
    }

    /// Sends a push message, which is no answer.
    pub(super) fn push(&mut self, to: ConnectionId, parts: &[Reply]) {
        if let Some(connection) = self.connections.get(&to) {
            let mut bytes = Vec::new();
            write_push(connection.protocol, parts, &mut bytes);
            self.outputs.push(Output::Send { to, bytes });
        }
    }

    /// Closes a connection from this side.
    pub(super) fn close(&mut self, id: ConnectionId) {
        if self.forget(id) {
            self.outputs.push(Output::Close { to: id });
        }
    }

    /// Removes a connection. Returns whether it existed.
    pub(super) fn forget(&mut self, id: ConnectionId) -> bool {
        self.channels.forget(id);
        self.connections.remove(&id).is_some()
    }
}
