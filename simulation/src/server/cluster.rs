//! A node of a cluster: which node owns a slot, and where a command is redirected to.
//!
//! Nodes do not talk to each other. Each has a view of the cluster that its caller sets, so that nodes may
//! be behind each other or disagree. A moving slot has two nodes: its master redirects clients (ASK) for keys
//! that it does not have any more, and the importing node serves clients that were redirected (ASKING).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use super::Server;
use super::command::{Call, CommandError, CommandResult, CommandSpec, refused};
use super::connection::ConnectionId;
use super::keyspace::Entry;
use super::pubsub::SubscriptionKind;
use super::resp::{Bytes, Reply};
use super::state::{Output, State};

/// Number of slots.
pub const SLOTS: u16 = 16384;

/// One node, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// 40 hex digits.
    pub id: String,
    /// Host at which it listens.
    pub host: String,
    /// Its port there.
    pub port: u16,
}

/// A range of slots, and the nodes that have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotRange {
    /// The first slot.
    pub first: u16,
    /// The last slot.
    pub last: u16,
    /// The master.
    pub master: Node,
    /// Its replicas.
    pub replicas: Vec<Node>,
}

/// One node's view of its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterView {
    /// The id of this node.
    pub me: String,
    /// Grows with every change.
    pub epoch: u64,
    /// Whether the cluster is healthy, as far as this node sees.
    pub is_ok: bool,
    /// Whether the node says that it is no part of a cluster.
    pub is_hidden: bool,
    /// The ranges of slots with their masters. A slot in no range has no master.
    pub slots: Vec<SlotRange>,
    /// Slots of this node that move to another one.
    pub migrating: BTreeMap<u16, Node>,
    /// Slots that move to this node.
    pub importing: BTreeSet<u16>,
}

/// Redirection of a command.
enum Redirect {
    CrossSlot,
    Unserved,
    Down,
    Moved(u16, Node),
    Ask(u16, Node),
    TryAgain,
}

impl ClusterView {
    fn master_of(&self, slot: u16) -> Option<&Node> {
        let has = |range: &&SlotRange| (range.first..=range.last).contains(&slot);
        self.slots.iter().find(has).map(|range| &range.master)
    }

    fn is_mine(&self, slot: u16) -> bool {
        self.master_of(slot)
            .is_some_and(|master| master.id == self.me)
    }
}

/// Returns the slot of a key or channel: of the text between its first braces, unless that is empty.
pub fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|&byte| byte == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// CRC-16/XMODEM, bit by bit.
fn crc16(bytes: &[u8]) -> u16 {
    let shift = |crc: u16, _| match crc & 0x8000 {
        0 => crc << 1,
        _ => (crc << 1) ^ 0x1021,
    };
    let step = |crc: u16, &byte: &u8| (0..8).fold(crc ^ (u16::from(byte) << 8), shift);
    bytes.iter().fold(0, step)
}

impl State {
    /// Refuses a client's command that belongs to another node.
    pub(super) fn check_slots(
        &mut self,
        from: ConnectionId,
        spec: &CommandSpec,
        args: &[Bytes],
    ) -> Result<(), CommandError> {
        let connection = self.connections.get_mut(&from);
        let asking = connection.is_some_and(|it| std::mem::take(&mut it.asking));
        let Some(redirect) = self.redirect(spec, args, asking) else {
            return Ok(());
        };
        Err(refused(match redirect {
            Redirect::CrossSlot => {
                "CROSSSLOT Keys in request don't hash to the same slot".to_owned()
            }
            Redirect::Unserved => "CLUSTERDOWN Hash slot not served".to_owned(),
            Redirect::Down => "CLUSTERDOWN The cluster is down".to_owned(),
            Redirect::Moved(slot, to) => format!("MOVED {slot} {}:{}", to.host, to.port),
            Redirect::Ask(slot, to) => format!("ASK {slot} {}:{}", to.host, to.port),
            Redirect::TryAgain => {
                "TRYAGAIN Multiple keys request during rehashing of slot".to_owned()
            }
        }))
    }

    /// The same for a command that a script calls.
    pub(super) fn check_slots_in_script(
        &mut self,
        spec: &CommandSpec,
        args: &[Bytes],
    ) -> Result<(), CommandError> {
        let asking = self.script_asks;
        match self.redirect(spec, args, asking) {
            None => Ok(()),
            Some(Redirect::Down) => Err(refused(
                "ERR Script attempted to execute a command while the cluster is down",
            )),
            Some(_) => Err(refused(
                "ERR Script attempted to access a non local key in a cluster node",
            )),
        }
    }

    fn redirect(&mut self, spec: &CommandSpec, args: &[Bytes], asking: bool) -> Option<Redirect> {
        let view = self.cluster.as_ref()?;
        let keys = match spec.sharded {
            true => spec.channels(args),
            false => spec.keys(args),
        };
        let slot = slot(keys.first()?);
        if keys.iter().any(|key| self::slot(key) != slot) {
            return Some(Redirect::CrossSlot);
        }
        let Some(master) = view.master_of(slot).cloned() else {
            return Some(Redirect::Unserved);
        };
        if !view.is_ok {
            return Some(Redirect::Down);
        }
        let is_mine = view.is_mine(slot);
        let to = view.migrating.get(&slot).filter(|_| is_mine).cloned();
        let imports = asking && view.importing.contains(&slot);
        // Channels do not move; only keys can be missing.
        let present = keys
            .iter()
            .filter(|key| spec.sharded || self.keys.contains(key))
            .count();
        let is_missing = present < keys.len();
        match to {
            Some(_) if is_missing && present > 0 => Some(Redirect::TryAgain),
            Some(to) if is_missing => Some(Redirect::Ask(slot, to)),
            _ if is_mine => None,
            _ if imports && is_missing && keys.len() > 1 => Some(Redirect::TryAgain),
            _ if imports => None,
            _ => Some(Redirect::Moved(slot, master)),
        }
    }
}

impl Server {
    /// Makes this server a node of a cluster, or gives a node a new view of it. Ends the subscriptions
    /// to channels of slots that it does not own any more.
    pub fn set_cluster(&mut self, view: ClusterView) -> Vec<Output> {
        let lost = |channel: &Bytes| !view.is_mine(slot(channel));
        let sharded = self.state.channels.all(SubscriptionKind::Sharded);
        let lost: Vec<(Bytes, Vec<ConnectionId>)> = sharded
            .filter(|(channel, _)| lost(channel))
            .map(|(channel, ids)| (channel.clone(), ids.to_vec()))
            .collect();
        self.state.cluster = Some(view);
        for (channel, ids) in lost {
            for id in ids {
                self.state
                    .end_subscription(id, SubscriptionKind::Sharded, &channel);
            }
        }
        std::mem::take(&mut self.state.outputs)
    }

    /// Returns the keys of a slot that have not expired.
    pub fn keys_in_slot(&mut self, slot: u16, now: Duration) -> Vec<Vec<u8>> {
        let mut keys = self.keys(now);
        keys.retain(|key| self::slot(key) == slot);
        keys
    }

    /// Removes a key, to move it to another node.
    pub fn take_key(&mut self, key: &[u8], now: Duration) -> Option<Entry> {
        self.state.set_clock(now);
        let entry = self.state.keys.get(key).cloned();
        self.state.keys.remove(key);
        self.state.record_changes(None);
        entry
    }

    /// Stores a key that was moved from another node.
    pub fn put_key(&mut self, key: &[u8], entry: Entry, now: Duration) {
        self.state.set_clock(now);
        self.state.keys.put(key, entry);
        self.state.record_changes(None);
    }

    /// Returns the messages published here that all other nodes have to deliver, too.
    pub fn take_broadcasts(&mut self) -> Vec<(Vec<u8>, Vec<u8>)> {
        std::mem::take(&mut self.state.broadcasts)
    }

    /// Delivers a message that was published at another node.
    pub fn deliver_broadcast(&mut self, channel: &[u8], message: &[u8]) -> Vec<Output> {
        self.state.deliver(false, channel, message);
        std::mem::take(&mut self.state.outputs)
    }
}

pub(super) fn asking(call: &mut Call<'_>) -> CommandResult {
    if call.state.cluster.is_none() {
        return Err(refused("ERR This instance has cluster support disabled"));
    }
    if let Some(connection) = call.state.connections.get_mut(&call.from) {
        connection.asking = true;
    }
    Ok(Reply::ok())
}

pub(super) fn cluster(call: &mut Call<'_>) -> CommandResult {
    let Some(view) = &call.state.cluster else {
        return Err(refused("ERR This instance has cluster support disabled"));
    };
    let integer = |number: u16| Reply::Int(number.into());
    match (call.word(1).as_str(), call.args.len()) {
        ("MYID", 2) => Ok(Reply::text(&view.me)),
        ("KEYSLOT", 3) => Ok(integer(slot(call.arg(2)))),
        ("INFO", 2) => {
            let assigned: u64 = view
                .slots
                .iter()
                .map(|it| u64::from(it.last - it.first) + 1)
                .sum();
            let mut text = String::new();
            let state = if view.is_ok { "ok" } else { "fail" };
            let _ = write!(
                text,
                "cluster_enabled:1\r\ncluster_state:{state}\r\ncluster_slots_assigned:{assigned}\r\n\
                 cluster_current_epoch:{}\r\n",
                view.epoch
            );
            Ok(Reply::Verbatim(text))
        }
        ("SLOTS", 2) => {
            let node = |node: &Node| {
                Reply::Array(vec![
                    Reply::text(&node.host),
                    integer(node.port),
                    Reply::text(&node.id),
                    Reply::Map(Vec::new()),
                ])
            };
            let range = |range: &SlotRange| {
                let mut parts = vec![integer(range.first), integer(range.last)];
                parts.push(node(&range.master));
                parts.extend(range.replicas.iter().map(node));
                Reply::Array(parts)
            };
            Ok(Reply::Array(view.slots.iter().map(range).collect()))
        }
        _ => Err(call.unsupported()),
    }
}
