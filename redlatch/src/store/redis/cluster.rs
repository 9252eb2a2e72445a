//! A cluster: maps slots to nodes, and keeps the map up to date.
//!
//! 1. A redirection (MOVED) is followed at once, for its slot only.
//! 2. The whole map is requested again when there is a reason to (a redirection, a connection that fails, a
//!    missing answer), and periodically, because a node that hangs gives no reason.
//! 3. Several nodes are asked. Among their answers, the one with the latest epoch counts, so that a node
//!    that was cut off cannot mislead the client.
//! 4. A node that is behind in gossip must not undo newer knowledge. So an answer is ignored if its epoch
//!    is earlier than that of the map in use, or, for a slot that MOVED has moved, if its epoch is not
//!    later than at that time. Both rules end after [`TRUST`], because a cluster that was set up again has
//!    earlier epochs.
//!
//! A node may have no host name (`?`). CLUSTER SLOTS then gives its address separately, but redirections do
//! not. Then the nodes are queried once more.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redis::Value;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use super::access::{Access, Endpoint, NAMELESS};
use super::fault::Fault;
use super::link::{Link, Whereabouts};
use super::listening::text;
use super::lookout::{BRIEFLY, Lookout, PAUSE};
use super::node::{Limits, Node, Settings};
use super::slot::SLOTS;
use crate::error::Result;
use crate::several::most;

/// Time limit for the answer of one node with a connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// Number of connected nodes that are asked at a time.
const ASKED: usize = 5;

/// Interval at which the nodes are asked without a reason.
const PERIOD: Duration = Duration::from_secs(5);

/// How long answers that are not newer are ignored. Gossip takes less: at most half of
/// `cluster-node-timeout` (default 15 s).
const TRUST: Duration = Duration::from_secs(10);

pub(super) struct Cluster {
    seeds: Vec<Endpoint>,
    access: Access,
    settings: Settings,
    map: Mutex<Map>,
    suspicion: Arc<Notify>,
    /// Number of completed queries of the nodes.
    looks: watch::Sender<u64>,
    lookout: Lookout,
    /// Limits for slots without a known owner.
    ownerless: Arc<Limits>,
}

/// The client's view of the cluster.
#[derive(Default)]
struct Map {
    /// Index into `masters` by slot; [`NOBODY`] if the owner is unknown.
    slots: Vec<u16>,
    masters: Vec<Endpoint>,
    nodes: BTreeMap<Endpoint, Arc<Node>>,
    /// Epoch of the map in use, and when it was received.
    followed: Option<(u64, Instant)>,
    /// By slot, the owners that MOVED has named.
    moved: BTreeMap<u16, Moved>,
}

/// The target of a MOVED redirection.
struct Moved {
    to: Endpoint,
    /// Epoch of the map in use at that time: an answer from a later epoch has precedence.
    epoch: u64,
    at: Instant,
}

const NOBODY: u16 = u16::MAX;

impl Map {
    /// Makes a node the owner of slots.
    fn assign(&mut self, slots: RangeInclusive<u16>, to: &Endpoint) {
        let known = self.masters.iter().position(|at| at == to);
        let index = known.unwrap_or_else(|| {
            self.masters.push(to.clone());
            self.masters.len() - 1
        });
        let (first, last) = (usize::from(*slots.start()), usize::from(*slots.end()));
        if let Some(range) = self.slots.get_mut(first..=last) {
            range.fill(u16::try_from(index).unwrap_or(NOBODY));
        }
    }
}

/// The owners of the slots according to one node.
struct Account {
    /// Whether the node sees most of the cluster, and an owner of every slot.
    sound: bool,
    epoch: u64,
    ranges: Vec<(u16, u16, Endpoint)>,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Endpoint>, access: Access, settings: Settings) -> Arc<Cluster> {
        Arc::new(Cluster {
            seeds,
            access,
            settings,
            map: Mutex::default(),
            suspicion: Arc::default(),
            looks: watch::Sender::new(0),
            lookout: Lookout::default(),
            ownerless: Arc::default(),
        })
    }

    /// Returns the addresses in the URL, for messages.
    pub(super) fn name(&self) -> String {
        let mut seeds: Vec<String> = self.seeds.iter().map(Endpoint::to_string).collect();
        seeds.sort_unstable();
        seeds.join(",")
    }

    /// Returns the node that owns a slot.
    pub(super) async fn owner(self: &Arc<Self>, slot: u16) -> Result<Arc<Node>, Fault> {
        if let Some(node) = self.known_owner(slot) {
            self.watch();
            return Ok(node);
        }
        Box::pin(self.look_again()).await;
        self.known_owner(slot).ok_or_else(|| {
            Fault::NotSent(format!(
                "no node of the cluster answered, or none owns slot {slot}"
            ))
        })
    }

    /// Returns all nodes that own slots, in a stable order.
    pub(super) async fn masters(self: &Arc<Self>) -> Vec<Arc<Node>> {
        if self.map().masters.is_empty() {
            self.look_again().await;
        }
        let map = self.map();
        let nodes = map.masters.iter().filter_map(|at| map.nodes.get(at));
        nodes.cloned().collect()
    }

    /// Returns all known nodes.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.map().nodes.values().cloned().collect()
    }

    /// Handles MOVED: a node reports that another node owns the slot.
    pub(super) async fn moved(self: &Arc<Self>, slot: u16, to: &str) -> Option<Arc<Node>> {
        let Some(to) = self.told(slot, to) else {
            let speaker = self.known_owner(slot);
            self.look_again().await;
            let is_other = |node: &Arc<Node>| !speaker.is_some_and(|it| Arc::ptr_eq(&it, node));
            return self.known_owner(slot).filter(is_other);
        };
        self.suspect();
        let mut map = self.map();
        let node = self.node(&mut map, &to)?;
        if !map.masters.contains(&to) {
            self.settings.doubts.raise(node.id);
        }
        map.assign(slot..=slot, &to);
        let moved = Moved {
            to,
            epoch: map.followed.map_or(0, |(epoch, _)| epoch),
            at: Instant::now(),
        };
        map.moved.insert(slot, moved);
        Some(node)
    }

    /// Handles ASK: a node refers to another one for this command only.
    pub(super) fn asked(&self, slot: u16, to: &str) -> Option<Arc<Node>> {
        let endpoint = self
            .told(slot, to)
            .or_else(|| self.only_other_at(slot, to))?;
        self.node(&mut self.map(), &endpoint)
    }

    /// Returns the nameless node that a redirection of the slot's owner means, if its port is unique. If
    /// that is wrong, the node refuses the command, because only the node that imports the slot accepts it.
    fn only_other_at(&self, slot: u16, address: &str) -> Option<Endpoint> {
        let port: u16 = address.rsplit_once(':')?.1.parse().ok()?;
        let map = self.map();
        let owner = map.slots.get(usize::from(slot))?;
        let owner = map.masters.get(usize::from(*owner));
        let is_other = |at: &&Endpoint| at.port() == port && Some(*at) != owner;
        let mut others = map.masters.iter().filter(is_other);
        let other = others.next()?.clone();
        others.next().is_none().then_some(other)
    }

    /// Handles a sign that slots may have another owner.
    pub(super) fn suspect(self: &Arc<Self>) {
        self.watch();
        self.suspicion.notify_one();
    }

    /// Watches for changes from now on, for as long as the runtime lives.
    fn watch(self: &Arc<Self>) {
        self.lookout
            .keep(|| keep_up(Arc::downgrade(self), self.suspicion.clone()));
    }

    /// Waits until the nodes have been asked once more.
    async fn look_again(self: &Arc<Self>) {
        let mut looks = self.looks.subscribe();
        let begun = *looks.borrow_and_update();
        self.suspect();
        let _ = looks.wait_for(|looks| *looks > begun).await;
    }

    /// Asks the nodes for the owners of the slots.
    async fn look(&self) {
        // Ask some connected nodes first; if none answers, ask all.
        if !self.ask(true).await {
            self.ask(false).await;
        }
        self.looks.send_modify(|looks| *looks += 1);
    }

    /// Asks some nodes, and uses their best answer. Returns whether there was one.
    async fn ask(&self, connected: bool) -> bool {
        let patience = match connected {
            true => PATIENCE,
            // There are no other nodes to ask.
            false => self.settings.connect_timeout.max(PATIENCE),
        };
        let asking = self
            .to_ask(connected)
            .into_iter()
            .map(|(at, link)| async move {
                let account = match timeout(patience, account(&at, &link)).await {
                    Ok(account) => account,
                    Err(_) => Err(Fault::NotSent(format!("no answer within {patience:?}"))),
                };
                match account {
                    Ok(account) => Some(account),
                    Err(fault) => {
                        tracing::debug!(%at, ?fault, "a node did not report its slots");
                        None
                    }
                }
            });
        let is_sound = |account: &Account| account.sound;
        let some = |said: &[Option<Option<Account>>]| said.iter().flatten().flatten().any(is_sound);
        let said = most(asking, some, BRIEFLY).await;
        let accounts = said.into_iter().flatten().flatten();
        let latest = accounts.max_by_key(|account| (account.sound, account.epoch));
        // Use an answer of a node that is cut off only if there is no map at all.
        let latest = latest.filter(|latest| latest.sound || self.map().masters.is_empty());
        latest.is_some_and(|account| self.follow(&account))
    }

    fn to_ask(&self, connected: bool) -> Vec<(Endpoint, Arc<Link>)> {
        let mut map = self.map();
        let known: Vec<Endpoint> = map.masters.iter().chain(&self.seeds).cloned().collect();
        let mut ask: Vec<(Endpoint, Arc<Link>)> = Vec::new();
        for at in known {
            if let Some(node) = self.node(&mut map, &at)
                && (!connected || node.commands.is_connected())
                && ask.iter().all(|(other, _)| *other != at)
            {
                ask.push((at, node.commands.clone()));
            }
        }
        if connected {
            ask.truncate(ASKED);
        }
        ask
    }

    /// Uses a node's answer unless something newer is known. Returns whether it did.
    fn follow(&self, account: &Account) -> bool {
        let now = Instant::now();
        let mut map = self.map();
        let is_behind = |(epoch, at): (u64, Instant)| account.epoch < epoch && now < at + TRUST;
        if map.followed.is_some_and(is_behind) {
            return false;
        }
        map.followed = Some((account.epoch, now));
        map.slots = vec![NOBODY; usize::from(SLOTS)];
        let before = std::mem::take(&mut map.masters);
        for (first, last, at) in &account.ranges {
            map.assign(*first..=*last, at);
        }
        let mut moved = std::mem::take(&mut map.moved);
        moved.retain(|_, moved| account.epoch <= moved.epoch && now < moved.at + TRUST);
        for (slot, moved) in &moved {
            map.assign(*slot..=*slot, &moved.to);
        }
        map.moved = moved;
        for at in map.masters.clone() {
            self.node(&mut map, &at);
        }
        let Map { masters, nodes, .. } = &mut *map;
        // A node that has lost its slots may hang with commands in flight. A node that has none yet may be
        // asked for keys of a slot that is moving there, so it is kept while it is in use.
        let is_used = |node: &Arc<Node>| Arc::strong_count(node) > 1;
        // A new master may lack data of the old one.
        let is_new = |at: &&Endpoint| !before.is_empty() && !before.contains(at);
        let new = masters.iter().filter(is_new).filter_map(|at| nodes.get(at));
        let new: Vec<_> = new.map(|node| node.id).collect();
        let gone: Vec<Arc<Node>> = nodes
            .extract_if(.., |at, node| {
                !masters.contains(at) && (before.contains(at) || !is_used(node))
            })
            .map(|(_, node)| node)
            .collect();
        drop(map);
        new.into_iter()
            .for_each(|node| self.settings.doubts.raise(node));
        // Not under the lock: giving up notifies waiters.
        for node in gone {
            node.give_up();
        }
        true
    }

    /// Returns the known owner of a slot.
    pub(super) fn known_owner(&self, slot: u16) -> Option<Arc<Node>> {
        let map = self.map();
        let index = map.slots.get(usize::from(slot))?;
        let at = map.masters.get(usize::from(*index))?;
        map.nodes.get(at).cloned()
    }

    /// Returns the limits of the node that owns a slot.
    pub(super) fn limits(&self, slot: u16) -> Arc<Limits> {
        match self.known_owner(slot) {
            Some(node) => node.limits.clone(),
            None => self.ownerless.clone(),
        }
    }

    /// Returns the node at this address, which need not be connected yet.
    fn node(&self, map: &mut Map, at: &Endpoint) -> Option<Arc<Node>> {
        if let Some(node) = map.nodes.get(at) {
            return Some(node.clone());
        }
        let whereabouts = || {
            let dial = self.access.to_endpoint(at).map_err(Fault::into_error)?;
            Ok(Whereabouts::Fixed(dial))
        };
        let node = Node::new(&self.settings, whereabouts).ok()?;
        map.nodes.insert(at.clone(), node.clone());
        Some(node)
    }

    /// Parses an address as the owner of a slot has written it.
    fn told(&self, slot: u16, address: &str) -> Option<Endpoint> {
        let map = self.map();
        let index = map.slots.get(usize::from(slot)).copied();
        let speaker = index.and_then(|index| map.masters.get(usize::from(index)));
        Endpoint::told(address, speaker.or_else(|| self.seeds.first())?)
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Updates the map when there is a reason to, and periodically.
async fn keep_up(cluster: Weak<Cluster>, suspicion: Arc<Notify>) {
    loop {
        let _ = timeout(PERIOD, suspicion.notified()).await;
        match cluster.upgrade() {
            Some(cluster) => cluster.look().await,
            None => return,
        }
        sleep(PAUSE).await;
    }
}

/// Asks a node for its view of the cluster.
async fn account(at: &Endpoint, link: &Arc<Link>) -> Result<Account, Fault> {
    let mut live = link.live().await?;
    let info = link
        .ask(&mut live, redis::cmd("CLUSTER").arg("INFO"))
        .await?;
    let slots = link
        .ask(&mut live, redis::cmd("CLUSTER").arg("SLOTS"))
        .await?;
    if let Value::ServerError(error) = &slots {
        return Err(Fault::answered(error, ""));
    }
    let info: String = redis::from_redis_value(info).map_err(|e| Fault::refused(&e.into()))?;
    let figure = |name: &str| {
        let lines = info.lines().filter_map(|line| line.split_once(':'));
        lines
            .filter(|(it, _)| *it == name)
            .map(|(_, value)| value.trim())
            .next()
    };
    let epoch = figure("cluster_current_epoch").and_then(|epoch| epoch.parse().ok());
    let Value::Array(ranges) = slots else {
        return Err(Fault::NotSent("unexpected reply".into()));
    };
    let mut ranges: Vec<_> = ranges
        .iter()
        .filter_map(|range| self::range(at, range))
        .collect();
    // Before Redis 7 each node has its own order; a listing needs a stable one.
    ranges.sort_unstable();
    Ok(Account {
        // A node that is cut off from most of the cluster reports that.
        sound: figure("cluster_state") == Some("ok"),
        epoch: epoch.unwrap_or(0),
        ranges,
    })
}

/// `[first, last, [host, port, id, metadata], replicas…]`
fn range(speaker: &Endpoint, range: &Value) -> Option<(u16, u16, Endpoint)> {
    let Value::Array(parts) = range else {
        return None;
    };
    let [
        Value::Int(first),
        Value::Int(last),
        Value::Array(master),
        ..,
    ] = parts.as_slice()
    else {
        return None;
    };
    let host = match master.first() {
        Some(Value::BulkString(host)) => std::str::from_utf8(host).ok()?,
        Some(Value::SimpleString(host)) => host,
        // The answering node does not know its own host.
        Some(Value::Nil) => "",
        _ => return None,
    };
    let Some(Value::Int(port)) = master.get(1) else {
        return None;
    };
    let host = match host {
        // A node without an address does not know its own yet, so it is the answering node.
        NAMELESS => master.get(3).and_then(ip).unwrap_or_default(),
        host => host,
    };
    let endpoint = speaker.or_host(host, u16::try_from(*port).ok()?);
    Some((
        u16::try_from(*first).ok()?,
        u16::try_from(*last).ok().filter(|last| *last < SLOTS)?,
        endpoint,
    ))
}

/// Returns the address in the metadata of a node.
fn ip(metadata: &Value) -> Option<&str> {
    let text = |value| text(Some(value));
    match metadata {
        Value::Map(pairs) => pairs
            .iter()
            .find_map(|(name, value)| (text(name)? == "ip").then(|| text(value))?),
        Value::Array(all) => all.chunks_exact(2).find_map(|pair| match pair {
            [name, value] => (text(name)? == "ip").then(|| text(value))?,
            _ => None,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::given::Login;
    use super::super::listening::Listening;
    use super::*;
    use crate::wait::Lines;

    fn at(port: u16) -> Endpoint {
        Endpoint::new("127.0.0.1", port)
    }

    fn cluster() -> Arc<Cluster> {
        let login = Login::default();
        let settings = Settings {
            connect_timeout: PATIENCE,
            ear: Arc::new(Lines::default()),
            doubts: Arc::default(),
            listening: Listening::Sharded,
            demand: None,
        };
        let access = Access::new(&login, 0, &login, None).unwrap();
        Cluster::new(vec![at(1)], access, settings)
    }

    /// One node owns all slots.
    fn account(epoch: u64, owner: u16) -> Account {
        Account {
            sound: true,
            epoch,
            ranges: vec![(0, SLOTS - 1, at(owner))],
        }
    }

    /// Returns the owners of slots 1 and 2.
    fn owners(cluster: &Cluster) -> [u16; 2] {
        let map = cluster.map();
        [1, 2].map(|slot: usize| map.masters[usize::from(map.slots[slot])].port())
    }

    #[tokio::test(start_paused = true)]
    async fn outdated_node_does_not_undo_redirection() {
        let cluster = cluster();
        assert!(cluster.follow(&account(5, 10)));
        cluster.moved(1, "127.0.0.1:11").await.unwrap();
        assert_eq!(owners(&cluster), [11, 10]);
        // The same epoch, twice.
        for _ in 0..2 {
            assert!(cluster.follow(&account(5, 10)));
            assert_eq!(owners(&cluster), [11, 10]);
        }
        // A later epoch has precedence, an earlier one has not.
        assert!(cluster.follow(&account(6, 12)));
        assert_eq!(owners(&cluster), [12, 12]);
        assert!(!cluster.follow(&account(5, 10)));
        assert_eq!(owners(&cluster), [12, 12]);
    }

    #[tokio::test(start_paused = true)]
    async fn older_epochs_are_accepted_after_trust_period() {
        let cluster = cluster();
        assert!(cluster.follow(&account(5, 10)));
        cluster.moved(1, "127.0.0.1:11").await.unwrap();
        tokio::time::advance(TRUST).await;
        assert!(cluster.follow(&account(5, 10)));
        assert_eq!(owners(&cluster), [10, 10]);
        // A cluster that was set up again.
        assert!(!cluster.follow(&account(1, 20)));
        tokio::time::advance(TRUST).await;
        assert!(cluster.follow(&account(1, 20)));
        assert_eq!(owners(&cluster), [20, 20]);
    }

    #[test]
    fn nameless_node_is_found_by_address() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let ip = || (text("ip"), text("10.0.0.2"));
        let maps = [
            Value::Map(vec![(text("hostname"), text("x")), ip()]),
            Value::Array(vec![ip().0, ip().1]),
        ];
        let found = |host: Value, metadata: Value| {
            let node = Value::Array(vec![host, Value::Int(7), text("id"), metadata]);
            let range = Value::Array(vec![Value::Int(0), Value::Int(9), node]);
            super::range(&Endpoint::new("speaker", 1), &range).unwrap()
        };
        for map in maps {
            let (first, last, at) = found(text("?"), map.clone());
            assert_eq!((first, last, &*at.to_string()), (0, 9, "10.0.0.2:7"));
            // Where the endpoint is unknown, the host of the answering node counts.
            for host in [Value::Nil, text("")] {
                let (.., at) = found(host, map.clone());
                assert_eq!(at.to_string(), "speaker:7");
            }
            let (.., at) = found(text("named"), map);
            assert_eq!(at.to_string(), "named:7");
        }
        let (.., at) = found(text("?"), Value::Array(Vec::new()));
        assert_eq!(at.to_string(), "speaker:7");
    }

    #[tokio::test]
    async fn ask_redirection_goes_to_only_other_node_with_port() {
        let cluster = cluster();
        let mut account = account(5, 10);
        account.ranges = vec![(0, 1, at(10)), (2, SLOTS - 1, at(11))];
        cluster.follow(&account);
        let node = cluster.asked(1, "?:11").unwrap();
        assert!(Arc::ptr_eq(&node, &cluster.known_owner(2).unwrap()));
        assert!(cluster.asked(1, "?:10").is_none());
        assert!(cluster.asked(1, "?:12").is_none());
        let other_host = Endpoint::new("127.0.0.2", 11);
        account.ranges = vec![(0, 1, at(10)), (2, 2, at(11)), (3, SLOTS - 1, other_host)];
        cluster.follow(&account);
        assert!(cluster.asked(1, "?:11").is_none());
    }
}
