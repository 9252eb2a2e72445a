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
mod command;
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
mod state;
mod strings;
#[cfg(test)]
mod tests;
mod tracking;

use std::time::Duration;

pub use self::auth::User;
pub use self::cluster::{ClusterView, Node, SLOTS, SlotRange, slot};
use self::connection::Connection;
pub use self::connection::ConnectionId;
pub use self::keyspace::Entry;
pub use self::replication::{Effect, Effects, Snapshot};
use self::script::Interpreter;
use self::state::State;
pub use self::state::{Config, Output, Refusal, Unsupported};

/// One simulated server.
#[derive(Debug)]
pub struct Server {
    state: State,
    interpreter: Interpreter,
}

impl Server {
    /// Creates a master without data.
    pub fn new(config: Config) -> Server {
        Server {
            state: State::new(config),
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
