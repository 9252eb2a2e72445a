//! A server in the process: a state machine whose input is bytes and the time, and whose output is the bytes
//! that it sends.
//!
//! [`Server::receive`] appends bytes to the connection's input, runs every complete command, and
//! returns the answers and messages in the order in which they are sent. Commands are in one table
//! (`commands`), which also specifies the checks before they run. A command that the simulation does not
//! support is an [`Unsupported`] error of the run, never an answer that a client could take for a refusal.
//!
//! Nothing here is random or depends on hashing: the same calls give the same answers.

mod auth;
mod cluster;
mod commands;
mod connection;
mod glob;
mod hashes;
mod info;
mod keys;
mod keyspace;
mod lists;
mod pubsub;
mod replication;
mod resp;
mod script;
mod sentinel;
mod sorted_sets;
mod strings;
#[cfg(test)]
mod tests;
mod tracking;

use std::collections::BTreeMap;
use std::time::Duration;

pub use self::auth::User;
pub use self::cluster::{ClusterView, Node, SLOTS, SlotRange, slot};
use self::connection::Connection;
pub use self::connection::ConnectionId;
pub use self::keyspace::Entry;
use self::keyspace::Keyspace;
use self::pubsub::Channels;
use self::replication::Replication;
pub use self::replication::{Effect, Effects, Snapshot};
use self::resp::{Bytes, Reply, write_push};
use self::script::Interpreter;
use self::sentinel::Masters;
use self::tracking::{Readers, Reads};

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
pub struct Unsupported(String);

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
}

/// One simulated server.
#[derive(Debug)]
pub struct Server {
    state: State,
    interpreter: Interpreter,
}

/// The state of a server without its interpreter, which runs scripts on it.
#[derive(Debug)]
struct State {
    config: Config,
    /// Time since 1970, by this server's clock.
    now: Duration,
    keys: Keyspace,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Number of connections ever accepted.
    connected: u64,
    channels: Channels,
    replication: Replication,
    users: BTreeMap<String, User>,
    refusal: Option<Refusal>,
    /// The view of a cluster node.
    cluster: Option<ClusterView>,
    /// The masters of a Sentinel.
    sentinel: Option<Masters>,
    /// Messages for the other nodes of the cluster.
    broadcasts: Vec<(Bytes, Bytes)>,
    readers: Readers,
    reads: Reads,
    /// The keys of the running script.
    script_keys: Option<Vec<Bytes>>,
    /// Whether the running script was redirected here by the owner of its slot (ASKING).
    script_asks: bool,
    outputs: Vec<Output>,
}

impl Server {
    /// Creates a master without data.
    pub fn new(config: Config) -> Server {
        let default = User::unrestricted(config.password.as_deref());
        let state = State {
            now: Duration::ZERO,
            keys: Keyspace::default(),
            connections: BTreeMap::new(),
            connected: 0,
            channels: Channels::default(),
            replication: Replication::default(),
            users: BTreeMap::from([("default".to_owned(), default)]),
            refusal: None,
            cluster: None,
            sentinel: None,
            broadcasts: Vec::new(),
            readers: Readers::new(),
            reads: Reads::new(),
            script_keys: None,
            script_asks: false,
            outputs: Vec::new(),
            config,
        };
        Server {
            state,
            interpreter: Interpreter::default(),
        }
    }

    /// Accepts a connection.
    pub fn connect(&mut self) -> ConnectionId {
        self.state.connected += 1;
        let id = ConnectionId(self.state.connected);
        let user = &self.state.users["default"];
        let connection = Connection::new(user.needs_no_password().then(|| "default".to_owned()));
        self.state.connections.insert(id, connection);
        id
    }

    /// Removes a connection that the client or the network has closed.
    pub fn disconnect(&mut self, id: ConnectionId) {
        self.state.forget(id);
    }

    /// Receives bytes from a connection and runs the commands that they complete. `now` is the
    /// time since 1970 by this server's clock.
    ///
    /// Bytes of a closed connection are ignored.
    ///
    /// # Errors
    ///
    /// The run has to end: see [`Unsupported`].
    pub fn receive(
        &mut self,
        from: ConnectionId,
        bytes: &[u8],
        now: Duration,
    ) -> Result<Vec<Output>, Unsupported> {
        self.state.set_clock(now);
        if let Some(connection) = self.state.connections.get_mut(&from) {
            connection.input.extend_from_slice(bytes);
        }
        self.run_input(from)?;
        self.outputs()
    }

    /// Advances the time: blocked commands whose timeout has passed are answered. Must be called at the
    /// latest at [`Server::next_deadline`].
    ///
    /// # Errors
    ///
    /// See [`Server::receive`]; commands behind those that were blocked run now.
    pub fn advance(&mut self, now: Duration) -> Result<Vec<Output>, Unsupported> {
        self.state.set_clock(now);
        self.outputs()
    }

    /// Returns when the next blocked command times out.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.state.next_deadline()
    }

    /// Deletes all keys that have expired, as a server does in the background. Without it they are
    /// invisible, and stored until they are looked up.
    pub fn delete_expired(&mut self, now: Duration) -> Vec<Output> {
        self.state.set_clock(now);
        if !self.state.keys.is_replica {
            self.state.keys.delete_expired();
            self.state.record_changes(None);
        }
        std::mem::take(&mut self.state.outputs)
    }

    /// Refuses commands from now on for this reason, or ends the refusal if it is `None`.
    pub fn refuse(&mut self, refusal: Option<Refusal>) {
        self.state.refusal = refusal;
    }

    /// Removes all scripts from the cache.
    pub fn forget_scripts(&mut self) {
        self.interpreter.forget();
    }

    /// Returns all keys that have not expired.
    pub fn keys(&mut self, now: Duration) -> Vec<Vec<u8>> {
        self.state.set_clock(now);
        self.state.keys.keys().cloned().collect()
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.state.connections.len()
    }

    /// Runs the commands in the input of a connection, up to one that blocks.
    fn run_input(&mut self, id: ConnectionId) -> Result<(), Unsupported> {
        while let Some(args) = self.state.next_command(id) {
            commands::run(&mut self.state, &mut self.interpreter, id, &args)?;
        }
        Ok(())
    }

    /// Returns the output, with the answers to commands that are no longer blocked and to those behind them.
    fn outputs(&mut self) -> Result<Vec<Output>, Unsupported> {
        while let Some(id) = self.state.unblock_next() {
            self.run_input(id)?;
        }
        Ok(std::mem::take(&mut self.state.outputs))
    }
}

impl State {
    fn set_clock(&mut self, now: Duration) {
        self.now = now;
        self.keys.now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    }

    /// Removes the next complete command from the input of a connection that is not blocked.
    fn next_command(&mut self, id: ConnectionId) -> Option<Vec<Bytes>> {
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
    fn send(&mut self, to: ConnectionId, reply: &Reply) {
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
    fn push(&mut self, to: ConnectionId, parts: &[Reply]) {
        if let Some(connection) = self.connections.get(&to) {
            let mut bytes = Vec::new();
            write_push(connection.protocol, parts, &mut bytes);
            self.outputs.push(Output::Send { to, bytes });
        }
    }

    /// Closes a connection from this side.
    fn close(&mut self, id: ConnectionId) {
        if self.forget(id) {
            self.outputs.push(Output::Close { to: id });
        }
    }

    /// Removes a connection. Returns whether it existed.
    fn forget(&mut self, id: ConnectionId) -> bool {
        self.channels.forget(id);
        self.connections.remove(&id).is_some()
    }
}
