//! Publish and subscribe: channels, patterns, and channels that belong to a slot.

use std::collections::{BTreeMap, BTreeSet};

use super::Server;
use super::command::{Call, CommandResult};
use super::connection::ConnectionId;
use super::glob::matches;
use super::resp::{Bytes, Protocol, Reply};
use super::state::State;

/// The ways to subscribe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SubscriptionKind {
    Channel,
    Pattern,
    Sharded,
}

impl SubscriptionKind {
    /// Returns the names of the confirmations of a subscription and of its end.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            SubscriptionKind::Channel => ("subscribe", "unsubscribe"),
            SubscriptionKind::Pattern => ("psubscribe", "punsubscribe"),
            SubscriptionKind::Sharded => ("ssubscribe", "sunsubscribe"),
        }
    }
}

/// All subscriptions.
#[derive(Debug, Default)]
pub(super) struct Channels {
    /// Subscribers of each channel, in the order of subscription.
    subscribers: BTreeMap<(SubscriptionKind, Bytes), Vec<ConnectionId>>,
    /// Channels of each subscriber.
    subscriptions: BTreeMap<ConnectionId, BTreeSet<(SubscriptionKind, Bytes)>>,
}

impl Channels {
    fn add(&mut self, id: ConnectionId, kind: SubscriptionKind, channel: &Bytes) {
        let subscription = (kind, channel.clone());
        if self
            .subscriptions
            .entry(id)
            .or_default()
            .insert(subscription.clone())
        {
            self.subscribers.entry(subscription).or_default().push(id);
        }
    }

    fn remove(&mut self, id: ConnectionId, kind: SubscriptionKind, channel: &Bytes) {
        let subscription = (kind, channel.clone());
        if let Some(all) = self.subscriptions.get_mut(&id) {
            all.remove(&subscription);
        }
        if let Some(ids) = self.subscribers.get_mut(&subscription) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.subscribers.remove(&subscription);
            }
        }
    }

    /// Ends all subscriptions of a connection.
    pub(super) fn forget(&mut self, id: ConnectionId) {
        for (kind, channel) in self.subscriptions.remove(&id).unwrap_or_default() {
            self.remove(id, kind, &channel);
        }
    }

    /// Returns the channels or patterns of a connection.
    fn of(&self, id: ConnectionId, kind: SubscriptionKind) -> Vec<Bytes> {
        let all = self.subscriptions.get(&id).into_iter().flatten();
        let all = all.filter(|(other, _)| *other == kind);
        all.map(|(_, channel)| channel.clone()).collect()
    }

    /// Returns the number of subscriptions in confirmations to a connection: channels and patterns count together.
    fn count(&self, id: ConnectionId, kind: SubscriptionKind) -> usize {
        let all = self.subscriptions.get(&id).into_iter().flatten();
        let counts = |(other, _): &&(SubscriptionKind, Bytes)| {
            (*other == SubscriptionKind::Sharded) == (kind == SubscriptionKind::Sharded)
        };
        all.filter(counts).count()
    }

    /// Returns the subscribers of one channel or pattern.
    fn subscribers(&self, kind: SubscriptionKind, channel: &[u8]) -> &[ConnectionId] {
        let ids = self.subscribers.get(&(kind, channel.to_vec()));
        ids.map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns all channels or patterns that have subscribers.
    pub(super) fn all(
        &self,
        kind: SubscriptionKind,
    ) -> impl Iterator<Item = (&Bytes, &[ConnectionId])> {
        let all = self
            .subscribers
            .iter()
            .filter(move |((other, _), _)| *other == kind);
        all.map(|((_, channel), ids)| (channel, ids.as_slice()))
    }
}

impl Server {
    /// Returns all channels and patterns that have subscribers.
    pub fn channels(&self) -> Vec<Vec<u8>> {
        let kinds = [
            SubscriptionKind::Channel,
            SubscriptionKind::Pattern,
            SubscriptionKind::Sharded,
        ];
        let all = kinds
            .into_iter()
            .flat_map(|kind| self.state.channels.all(kind));
        all.map(|(channel, _)| channel.clone()).collect()
    }
}

impl State {
    /// Returns whether a connection runs no other commands, because it has subscriptions and speaks RESP2.
    pub(super) fn only_subscribes(&self, id: ConnectionId) -> bool {
        let connection = self.connections.get(&id);
        let has_any = |id| {
            let all = self.channels.subscriptions.get(&id);
            all.is_some_and(|all| !all.is_empty())
        };
        connection.is_some_and(|it| it.protocol == Protocol::Resp2) && has_any(id)
    }

    /// Sends a message to all subscribers of this server. Returns their number.
    pub(super) fn deliver(&mut self, sharded: bool, channel: &[u8], message: &[u8]) -> usize {
        let bulk = |bytes: &[u8]| Reply::Bulk(bytes.to_vec());
        let (kind, word) = match sharded {
            true => (SubscriptionKind::Sharded, "smessage"),
            false => (SubscriptionKind::Channel, "message"),
        };
        let direct = self.channels.subscribers(kind, channel).to_vec();
        let parts = [Reply::text(word), bulk(channel), bulk(message)];
        for id in &direct {
            self.push(*id, &parts);
        }
        if sharded {
            return direct.len();
        }
        let patterns = self.channels.all(SubscriptionKind::Pattern);
        let matching = patterns.filter(|(pattern, _)| matches(pattern, channel));
        let matching: Vec<(Bytes, ConnectionId)> = matching
            .flat_map(|(pattern, ids)| ids.iter().map(|id| (pattern.clone(), *id)))
            .collect();
        for (pattern, id) in &matching {
            let parts = ["pmessage".as_bytes(), pattern, channel, message].map(bulk);
            self.push(*id, &parts);
        }
        direct.len() + matching.len()
    }

    /// Ends a subscription and confirms it, requested or not.
    pub(super) fn end_subscription(
        &mut self,
        id: ConnectionId,
        kind: SubscriptionKind,
        channel: &Bytes,
    ) {
        self.channels.remove(id, kind, channel);
        self.confirm_end(id, kind, Reply::Bulk(channel.clone()));
    }

    fn confirm_end(&mut self, id: ConnectionId, kind: SubscriptionKind, channel: Reply) {
        let left = Reply::count(self.channels.count(id, kind));
        self.push(id, &[Reply::text(kind.words().1), channel, left]);
    }
}

pub(super) fn subscribe(call: &mut Call<'_>) -> CommandResult {
    begin(call, SubscriptionKind::Channel)
}

pub(super) fn psubscribe(call: &mut Call<'_>) -> CommandResult {
    begin(call, SubscriptionKind::Pattern)
}

pub(super) fn ssubscribe(call: &mut Call<'_>) -> CommandResult {
    begin(call, SubscriptionKind::Sharded)
}

fn begin(call: &mut Call<'_>, kind: SubscriptionKind) -> CommandResult {
    let (state, id) = (&mut *call.state, call.from);
    for channel in &call.args[1..] {
        state.channels.add(id, kind, channel);
        let count = Reply::count(state.channels.count(id, kind));
        let confirmation = [
            Reply::text(kind.words().0),
            Reply::Bulk(channel.clone()),
            count,
        ];
        state.push(id, &confirmation);
    }
    Ok(Reply::Sent)
}

pub(super) fn unsubscribe(call: &mut Call<'_>) -> CommandResult {
    end(call, SubscriptionKind::Channel)
}

pub(super) fn punsubscribe(call: &mut Call<'_>) -> CommandResult {
    end(call, SubscriptionKind::Pattern)
}

pub(super) fn sunsubscribe(call: &mut Call<'_>) -> CommandResult {
    end(call, SubscriptionKind::Sharded)
}

fn end(call: &mut Call<'_>, kind: SubscriptionKind) -> CommandResult {
    let (state, id) = (&mut *call.state, call.from);
    let named = call.args[1..].to_vec();
    let channels = if named.is_empty() {
        state.channels.of(id, kind)
    } else {
        named
    };
    if channels.is_empty() {
        state.confirm_end(id, kind, Reply::Nil);
    }
    for channel in &channels {
        state.end_subscription(id, kind, channel);
    }
    Ok(Reply::Sent)
}

pub(super) fn publish(call: &mut Call<'_>) -> CommandResult {
    send(call, false)
}

pub(super) fn spublish(call: &mut Call<'_>) -> CommandResult {
    send(call, true)
}

fn send(call: &mut Call<'_>, sharded: bool) -> CommandResult {
    let (channel, message) = (&call.args[1], &call.args[2]);
    let receivers = call.state.deliver(sharded, channel, message);
    call.state.replication.published(sharded, channel, message);
    if call.state.cluster.is_some() && !sharded {
        let broadcast = (channel.clone(), message.clone());
        call.state.broadcasts.push(broadcast);
    }
    Ok(Reply::count(receivers))
}

pub(super) fn pubsub(call: &mut Call<'_>) -> CommandResult {
    let channels = &call.state.channels;
    let (kind, lists) = match call.word(1).as_str() {
        "CHANNELS" => (SubscriptionKind::Channel, true),
        "SHARDCHANNELS" => (SubscriptionKind::Sharded, true),
        "NUMSUB" => (SubscriptionKind::Channel, false),
        "SHARDNUMSUB" => (SubscriptionKind::Sharded, false),
        "NUMPAT" if call.args.len() == 2 => {
            return Ok(Reply::count(
                channels.all(SubscriptionKind::Pattern).count(),
            ));
        }
        _ => return Err(call.unsupported()),
    };
    if lists {
        let pattern = match call.args.len() {
            2 => None,
            3 => Some(call.arg(2)),
            _ => return Err(call.wrong_arity()),
        };
        let names = channels.all(kind).map(|(channel, _)| channel);
        let found = names.filter(|name| pattern.is_none_or(|pattern| matches(pattern, name)));
        return Ok(Reply::bulks(found.cloned()));
    }
    let counts = call.args[2..].iter().flat_map(|channel| {
        let count = channels.subscribers(kind, channel).len();
        [Reply::Bulk(channel.clone()), Reply::count(count)]
    });
    Ok(Reply::Array(counts.collect()))
}
