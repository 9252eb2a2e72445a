//! Replication: a record of the changes of every command, which a replica applies later, and WAIT.
//!
//! A record holds the new values of all keys that one command or script has changed, so that applying it is
//! all or nothing, and applying the records in order gives the master's data. The caller decides how long a
//! record travels: it takes records from the master ([`Server::take_effects`]), passes them to a
//! replica ([`Server::apply`]) and acknowledges them to the master ([`Server::acknowledge`]).

use std::collections::BTreeMap;
use std::time::Duration;

use super::Server;
use super::command::{Call, CommandResult, refused};
use super::connection::ConnectionId;
use super::keyspace::Entry;
use super::resp::{Bytes, Reply};
use super::state::{Output, State, Unsupported};

/// The changes of one command or script.
#[derive(Debug, Clone, PartialEq)]
pub struct Effects {
    /// Replication offset after this record.
    pub offset: u64,
    /// The changes, in order.
    pub changes: Vec<Effect>,
}

/// One change.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// All keys were removed.
    Flushed,
    /// A key has another value.
    Changed {
        /// The key.
        key: Vec<u8>,
        /// The value with its expiry; `None`: the key was removed.
        entry: Option<Entry>,
    },
    /// A message was published.
    Published {
        /// Whether the channel is sharded.
        sharded: bool,
        /// The channel.
        channel: Vec<u8>,
        /// The message.
        message: Vec<u8>,
    },
}

/// All data of a server, for a new replica, or for a server that restarts with its data.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    offset: u64,
    entries: BTreeMap<Bytes, Entry>,
}

#[derive(Debug, Default)]
pub(super) struct Replication {
    offset: u64,
    replicas: Vec<Replica>,
    /// Address of the master, for a replica.
    master: Option<(String, u16)>,
    /// Records that have not been taken yet.
    effects: Vec<Effects>,
    /// Messages that the current command has published.
    published: Vec<Effect>,
}

/// A connected replica.
#[derive(Debug)]
pub(super) struct Replica {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) acknowledged: u64,
}

/// An unanswered WAIT.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingWait {
    replicas: usize,
    offset: u64,
    until: Option<Duration>,
}

impl Replication {
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    pub(super) fn master(&self) -> Option<&(String, u16)> {
        self.master.as_ref()
    }

    pub(super) fn published(&mut self, sharded: bool, channel: &[u8], message: &[u8]) {
        if !self.replicas.is_empty() {
            self.published.push(Effect::Published {
                sharded,
                channel: channel.to_vec(),
                message: message.to_vec(),
            });
        }
    }

    /// Returns how many replicas have acknowledged this offset.
    fn acknowledged(&self, offset: u64) -> usize {
        let have = |replica: &&Replica| replica.acknowledged >= offset;
        self.replicas.iter().filter(have).count()
    }
}

impl State {
    /// Records the changes of the current command of this connection for replicas and readers.
    pub(super) fn record_changes(&mut self, from: Option<ConnectionId>) {
        let changed = self.keys.take_changes();
        let published = std::mem::take(&mut self.replication.published);
        self.send_invalidations(&changed, from);
        if !changed.is_empty() || !published.is_empty() {
            self.replication.offset += 1;
            if !self.replication.replicas.is_empty() {
                let flushed = changed.flushed.then_some(Effect::Flushed);
                let stored = self.keys.stored();
                let keys = changed.keys.into_keys().map(|key| Effect::Changed {
                    entry: stored.get(&key).cloned(),
                    key,
                });
                let changes = flushed.into_iter().chain(keys).chain(published).collect();
                let offset = self.replication.offset;
                self.replication.effects.push(Effects { offset, changes });
            }
        }
        if let Some(connection) = from.and_then(|from| self.connections.get_mut(&from)) {
            connection.offset = self.replication.offset;
        }
    }

    /// Answers the next WAIT that is due. Returns its connection.
    pub(super) fn unblock_next(&mut self) -> Option<ConnectionId> {
        let answer = |waiting: &PendingWait| {
            let have = self.replication.acknowledged(waiting.offset);
            let is_over = waiting.until.is_some_and(|until| until <= self.now);
            (have >= waiting.replicas || is_over).then_some(have)
        };
        let mut blocked = self
            .connections
            .iter()
            .filter_map(|(id, connection)| Some((*id, answer(connection.blocked.as_ref()?)?)));
        let (id, have) = blocked.next()?;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.blocked = None;
        }
        self.send(id, &Reply::count(have));
        Some(id)
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let blocked = self
            .connections
            .values()
            .filter_map(|it| it.blocked.as_ref());
        blocked.filter_map(|waiting| waiting.until).min()
    }

    /// Refuses every blocked WAIT, because this server has no replicas any more.
    fn refuse_blocked(&mut self) {
        let blocked = self
            .connections
            .iter()
            .filter(|(_, it)| it.blocked.is_some());
        let blocked: Vec<_> = blocked.map(|(id, _)| *id).collect();
        for id in blocked {
            let text = "UNBLOCKED force unblock from blocking operation, instance state changed \
                        (master -> replica?)";
            self.send(id, &Reply::Error(text.into()));
            self.close(id);
        }
    }
}

impl Server {
    /// Returns all data, for a replica or a restart.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            offset: self.state.replication.offset,
            entries: self.state.keys.stored().clone(),
        }
    }

    /// Replaces all data, like a server that starts with it.
    pub fn load(&mut self, data: Snapshot) {
        self.state.keys.load(data.entries);
        self.state.replication.offset = data.offset;
    }

    /// Connects a replica: from now on it gets all changes, on top of the data that this returns.
    pub fn attach_replica(&mut self, host: &str, port: u16) -> Snapshot {
        self.detach_replica(host, port);
        self.state.replication.replicas.push(Replica {
            host: host.to_owned(),
            port,
            acknowledged: self.state.replication.offset,
        });
        self.snapshot()
    }

    /// Disconnects a replica.
    pub fn detach_replica(&mut self, host: &str, port: u16) {
        let is_other = |replica: &Replica| (replica.host.as_str(), replica.port) != (host, port);
        self.state.replication.replicas.retain(is_other);
    }

    /// Returns the changes since the last call, for every attached replica.
    pub fn take_effects(&mut self) -> Vec<Effects> {
        std::mem::take(&mut self.state.replication.effects)
    }

    /// Records how much a replica has applied. Answers commands that waited for that.
    ///
    /// # Errors
    ///
    /// See [`Server::receive`].
    pub fn acknowledge(
        &mut self,
        host: &str,
        port: u16,
        offset: u64,
        now: Duration,
    ) -> Result<Vec<Output>, Unsupported> {
        self.state.set_clock(now);
        let replicas = self.state.replication.replicas.iter_mut();
        for replica in replicas.filter(|it| (it.host.as_str(), it.port) == (host, port)) {
            replica.acknowledged = replica.acknowledged.max(offset);
        }
        self.outputs()
    }

    /// Becomes a replica of the server at this address, with its data. Clients that wait for replicas of this one are
    /// refused and closed.
    ///
    /// # Errors
    ///
    /// See [`Server::receive`].
    pub fn become_replica(
        &mut self,
        host: &str,
        port: u16,
        data: Snapshot,
    ) -> Result<Vec<Output>, Unsupported> {
        self.load(data);
        self.state.keys.is_replica = true;
        let replication = &mut self.state.replication;
        replication.master = Some((host.to_owned(), port));
        replication.replicas.clear();
        replication.effects.clear();
        self.state.refuse_blocked();
        self.outputs()
    }

    /// Becomes a master, with its current data.
    pub fn become_master(&mut self) {
        self.state.keys.is_replica = false;
        self.state.replication.master = None;
    }

    /// Returns whether it follows a master.
    pub fn is_replica(&self) -> bool {
        self.state.keys.is_replica
    }

    /// Returns its replication offset.
    pub fn offset(&self) -> u64 {
        self.state.replication.offset
    }

    /// Applies changes of the master. Returns the messages to subscribers of this server.
    pub fn apply(&mut self, effects: &Effects, now: Duration) -> Vec<Output> {
        self.state.set_clock(now);
        for change in &effects.changes {
            match change {
                Effect::Flushed => self.state.keys.load(BTreeMap::new()),
                Effect::Changed { key, entry } => self.state.keys.apply(key, entry.clone()),
                Effect::Published {
                    sharded,
                    channel,
                    message,
                } => {
                    self.state.deliver(*sharded, channel, message);
                }
            }
        }
        self.state.replication.offset = effects.offset;
        std::mem::take(&mut self.state.outputs)
    }
}

pub(super) fn role(call: &mut Call<'_>) -> CommandResult {
    let replication = &call.state.replication;
    let int = |number: u64| Reply::Int(i64::try_from(number).unwrap_or(i64::MAX));
    if let Some((host, port)) = replication.master() {
        return Ok(Reply::Array(vec![
            Reply::text("slave"),
            Reply::text(host),
            Reply::Int(i64::from(*port)),
            Reply::text("connected"),
            int(replication.offset),
        ]));
    }
    let replicas = replication.replicas.iter().map(|replica| {
        let parts = [
            replica.host.clone(),
            replica.port.to_string(),
            replica.acknowledged.to_string(),
        ];
        Reply::Array(parts.map(Reply::text).into())
    });
    Ok(Reply::Array(vec![
        Reply::text("master"),
        int(replication.offset),
        Reply::Array(replicas.collect()),
    ]))
}

pub(super) fn wait(call: &mut Call<'_>) -> CommandResult {
    if call.state.keys.is_replica {
        return Err(refused(
            "ERR WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is \
             configured to be writable (which is not the default) writes to replicas are just local and are not \
             propagated.",
        ));
    }
    let replicas = usize::try_from(call.integer(1)?.max(0)).unwrap_or(usize::MAX);
    let millis = call
        .integer(2)
        .map_err(|_| refused("ERR timeout is not an integer or out of range"))?;
    let millis = u64::try_from(millis).map_err(|_| refused("ERR timeout is negative"))?;
    let now = call.state.now;
    let Some(connection) = call.state.connections.get_mut(&call.from) else {
        return Ok(Reply::Sent);
    };
    let offset = connection.offset;
    let have = call.state.replication.acknowledged(offset);
    if have >= replicas {
        return Ok(Reply::count(have));
    }
    connection.blocked = Some(PendingWait {
        replicas,
        offset,
        until: (millis > 0).then(|| now + Duration::from_millis(millis)),
    });
    Ok(Reply::Sent)
}
