//! Client tracking: a connection receives an invalidation when a key that it has read changes.
//!
//! Only RESP3, for all commands or for those that a client announces (`OPTIN`). A key is invalidated once, and
//! must be read again for another invalidation. If a script reads anything, all its declared keys count as read,
//! as in Redis; a write of the connection itself cancels its earlier reads.

use std::collections::{BTreeMap, BTreeSet};

use super::command::{Call, CommandResult, CommandSpec, refused};
use super::connection::ConnectionId;
use super::keyspace::Changes;
use super::resp::{Bytes, Reply};
use super::state::State;

/// Tracking mode of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tracking {
    opt_in: bool,
    /// Whether the connection's own changes send no invalidation.
    no_loop: bool,
    /// Whether the next command is tracked.
    track_next: bool,
}

/// Keys that were read, each with the number of changes that it had made before.
pub(super) type Reads = BTreeMap<Bytes, u64>;

/// The connections that have read a key.
pub(super) type Readers = BTreeMap<Bytes, BTreeSet<ConnectionId>>;

impl State {
    /// Records the keys that a command of this connection has read.
    pub(super) fn record_read(&mut self, from: ConnectionId, spec: &CommandSpec, args: &[Bytes]) {
        if spec.writes || !spec.reads_a_key() {
            return;
        }
        let tracking = self.connections.get(&from).and_then(|it| it.tracking);
        if tracking.is_none_or(|it| it.opt_in && !it.track_next) {
            return;
        }
        let keys = match &self.script_keys {
            Some(keys) => keys.as_slice(),
            None => spec.keys(args),
        };
        let changed = self.keys.changed();
        for key in keys {
            self.reads.insert(key.clone(), changed);
        }
    }

    /// Ends a command: the next one is tracked only if announced again, unless this command was the announcement.
    pub(super) fn end_caching(&mut self, from: ConnectionId, name: &[u8]) {
        if let Some(connection) = self.connections.get_mut(&from)
            && let Some(tracking) = &mut connection.tracking
            && !name.eq_ignore_ascii_case(b"CLIENT")
        {
            tracking.track_next = false;
        }
    }

    /// Sends invalidations to the readers of changed keys. From then on the keys that the connection has read after
    /// its own changes count as read.
    pub(super) fn send_invalidations(&mut self, changes: &Changes, by: Option<ConnectionId>) {
        if changes.flushed {
            self.readers.clear();
            let tracking = self
                .connections
                .iter()
                .filter(|(_, it)| it.tracking.is_some());
            let ids: Vec<ConnectionId> = tracking.map(|(id, _)| *id).collect();
            for id in ids {
                self.push(id, &[Reply::text("invalidate"), Reply::Nil]);
            }
        }
        let mut changed: Vec<_> = changes.keys.iter().collect();
        changed.sort_unstable_by_key(|(_, (first, _))| *first);
        for (key, _) in changed {
            for id in self.readers.remove(key).unwrap_or_default() {
                let tracking = self.connections.get(&id).and_then(|it| it.tracking);
                if tracking.is_some_and(|it| !(it.no_loop && by == Some(id))) {
                    let keys = Reply::Array(vec![Reply::Bulk(key.clone())]);
                    self.push(id, &[Reply::text("invalidate"), keys]);
                }
            }
        }
        for (key, changed) in std::mem::take(&mut self.reads) {
            let is_over = changes
                .keys
                .get(&key)
                .is_some_and(|(_, latest)| *latest > changed);
            if let Some(by) = by.filter(|_| !is_over) {
                self.readers.entry(key).or_default().insert(by);
            }
        }
    }
}

/// `CLIENT TRACKING`
pub(super) fn tracking(call: &mut Call<'_>) -> CommandResult {
    let mut wanted = Tracking {
        opt_in: false,
        no_loop: false,
        track_next: call.connection().tracking.is_some_and(|it| it.track_next),
    };
    for at in 3..call.args.len() {
        match call.word(at).as_str() {
            "OPTIN" => wanted.opt_in = true,
            "NOLOOP" => wanted.no_loop = true,
            _ => return Err(call.unsupported()),
        }
    }
    let wanted = match call.word(2).as_str() {
        "ON" => Some(wanted),
        "OFF" => None,
        _ => return Err(call.unsupported()),
    };
    call.connection().tracking = wanted;
    Ok(Reply::ok())
}

/// `CLIENT CACHING`
pub(super) fn caching(call: &mut Call<'_>) -> CommandResult {
    let yes = call.word(2) == "YES";
    match &mut call.connection().tracking {
        Some(tracking) if tracking.opt_in && yes => tracking.track_next = true,
        Some(tracking) if tracking.opt_in => return Err(call.unsupported()),
        _ => {
            return Err(refused(
                "ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT \
                 mode enabled",
            ));
        }
    }
    Ok(Reply::ok())
}
