//! A cluster: maps slots to nodes, and keeps the map up to date.
//!
//! 1. A redirection (MOVED) is followed at once, for its slot only.
//! 2. The whole map is requested again when there is a reason to (a MOVED, a connection that fails,
//!    a missing answer), and periodically, because a node that hangs gives no reason.
//! 3. Several nodes are queried. Among their answers, the one with the latest epoch counts, so that
//!    a node that was cut off cannot mislead the client.
//! 4. A node that is behind in gossip must not undo newer changes. So an answer is ignored if its
//!    epoch is earlier than that of the map in use, or, for a slot that MOVED has moved, if its
//!    epoch is not later than at that time. Both rules end after [`OLD_EPOCH_IGNORED_FOR`], because
//!    a cluster that was set up again has earlier epochs.
//! 5. An answer of a node of another cluster does not count, and such a node is not used
//!    ([`super::node_ids`]).
//!
//! A node may have no host name (`?`). CLUSTER SLOTS then gives its address separately, but
//! redirections do not. After such a MOVED the nodes are queried once more; such an ASK leads to
//! the only other master with its port.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::connection::{ReconnectingConnection, Target};
use super::endpoint::{Endpoint, UNKNOWN_HOST};
use super::exchange_error::{ExchangeError, not_in_a_cluster};
use super::node::{Node, NodeSettings};
use super::node_ids::NodeIds;
use super::pubsub::text_field;
use super::refresh_task::{Checks, MIN_QUERY_TIME, RefreshTask, Signals, answer_within};
use super::run_id_tracker::info_field;
use super::slot::{SLOT_COUNT, slot};
use super::wire::Cmd;
use crate::environment::{check_sockets, random};
use crate::join::join_until;
use crate::step::ScriptReply;
use crate::sync::Mutex;

/// Time limit for the answer of one node with a connection.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of connected nodes that are queried at a time.
const MAX_QUERIED: usize = 5;

/// Interval at which the nodes are queried without a reason.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// How long answers that are not newer are ignored. Gossip takes less: at most half of
/// `cluster-node-timeout` (default 15 s).
const OLD_EPOCH_IGNORED_FOR: Duration = Duration::from_secs(10);

pub(super) struct Cluster {
    seeds: Vec<Endpoint>,
    settings: NodeSettings,
    map: Mutex<SlotMap>,
    ids: Arc<Mutex<NodeIds>>,
    /// Wakes requests after each query of the nodes, in the order in which they began to wait.
    refreshed: Notify,
    refresh_task: RefreshTask,
    signals: Arc<Signals>,
    /// Whether no connected node is known to lack sharded channels, as of the latest check.
    has_sharded_channels: AtomicBool,
    /// Why no node answered the latest query, if none did.
    unanswered: Mutex<Option<ExchangeError>>,
}

/// The client's view of the cluster.
#[derive(Default)]
struct SlotMap {
    /// The owners in the answer in use, in the order of their slots.
    ranges: Vec<SlotRange>,
    /// Epoch of that answer, and when it was received.
    current_epoch: Option<(u64, Instant)>,
    /// By slot, the owners that MOVED has named since. They have precedence.
    moved: BTreeMap<u16, Moved>,
    nodes: BTreeMap<Endpoint, Arc<Node>>,
    /// Nodes that have lost all slots. Acquisitions that may still have to be settled there keep
    /// them.
    departed: Vec<Weak<Node>>,
}

/// The first and the last of several slots, and their owner.
type SlotRange = (u16, u16, Endpoint);

/// The target of a MOVED redirection.
struct Moved {
    to: Endpoint,
    /// Epoch of the map in use at that time: an answer from a later epoch has precedence.
    epoch: u64,
    at: Instant,
}

impl SlotMap {
    /// Returns the known owner of a slot.
    fn owner(&self, slot: u16) -> Option<&Endpoint> {
        if let Some(moved) = self.moved.get(&slot) {
            return Some(&moved.to);
        }
        let after = self.ranges.partition_point(|(first, ..)| *first <= slot);
        let (_, last, owner) = self.ranges.get(after.checked_sub(1)?)?;
        (slot <= *last).then_some(owner)
    }

    /// Returns all known owners of slots, in a stable order.
    fn masters(&self) -> Vec<Endpoint> {
        let moved = self.moved.values().map(|moved| &moved.to);
        let mut masters = Vec::new();
        for owner in self.ranges.iter().map(|(.., owner)| owner).chain(moved) {
            if !masters.contains(owner) {
                masters.push(owner.clone());
            }
        }
        masters
    }
}

/// The owners of the slots according to one node.
struct SlotReport {
    /// Whether the node reports that the cluster works: it sees most masters and, unless the
    /// cluster is configured to work without (`cluster-require-full-coverage no`), an owner of
    /// every slot.
    is_healthy: bool,
    epoch: u64,
    ranges: Vec<SlotRange>,
    /// The ids of all nodes with slots, and of their replicas.
    ids: BTreeMap<Endpoint, String>,
}

impl SlotReport {
    fn owns(&self, at: &Endpoint) -> bool {
        self.ranges.iter().any(|(.., owner)| owner == at)
    }

    fn has_node(&self, id: &str) -> bool {
        self.ids.values().any(|other| other == id)
    }
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Endpoint>, settings: NodeSettings) -> Arc<Cluster> {
        Arc::new(Cluster {
            seeds,
            settings,
            map: Mutex::default(),
            ids: Arc::default(),
            refreshed: Notify::new(),
            refresh_task: RefreshTask::default(),
            signals: Arc::default(),
            has_sharded_channels: AtomicBool::new(true),
            unanswered: Mutex::default(),
        })
    }

    /// Returns the node that owns a slot.
    pub(super) async fn slot_owner(
        self: &Arc<Self>,
        slot: u16,
    ) -> Result<Arc<Node>, ExchangeError> {
        if let Some(node) = self.known_slot_owner(slot) {
            self.ensure_refresh_task();
            return Ok(node);
        }
        Box::pin(self.refresh_and_wait()).await?;
        self.known_slot_owner(slot)
            .ok_or_else(|| self.without_owner(&format!("no node of the cluster owns slot {slot}")))
    }

    /// Returns the error for slots whose owner is not known: that of the latest query if no node
    /// has answered it.
    pub(super) fn without_owner(&self, otherwise: &str) -> ExchangeError {
        match self.unanswered.lock().clone() {
            Some(failure) if failure.is_permanent() => failure,
            Some(failure) => failure.before_the_step(),
            None => ExchangeError::not_executed(otherwise),
        }
    }

    /// Returns all nodes that own slots, in a stable order.
    pub(super) async fn masters(self: &Arc<Self>) -> Result<Vec<Arc<Node>>, ExchangeError> {
        if self.map.lock().ranges.is_empty() {
            self.refresh_and_wait().await?;
        }
        Ok(self.known_masters())
    }

    /// Returns all nodes that own slots, as far as is known locally, in a stable order.
    pub(super) fn known_masters(&self) -> Vec<Arc<Node>> {
        let map = self.map.lock();
        let masters = map.masters();
        let nodes = masters.iter().filter_map(|at| map.nodes.get(at));
        nodes.cloned().collect()
    }

    /// Returns whether all nodes have sharded channels, as far as is known.
    pub(super) fn has_sharded_channels(&self) -> bool {
        self.has_sharded_channels.load(Ordering::Relaxed)
    }

    /// Ends subscriptions at nodes that have lost the slots of their channels, where the node does
    /// not. (See
    /// [`super::pubsub`].)
    fn end_moved_subscriptions(&self) {
        let nodes = self.nodes();
        let lacks = |node: &Arc<Node>| node.pubsub().is_without_sharded_channels();
        self.has_sharded_channels
            .store(!nodes.iter().any(lacks), Ordering::Relaxed);
        for node in &nodes {
            node.pubsub().end_moved_subscriptions(|channel| {
                let owner = self.known_slot_owner(slot(channel));
                owner.is_some_and(|owner| owner.id != node.id)
            });
        }
    }

    /// Returns all known nodes.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.map.lock().nodes.values().cloned().collect()
    }

    /// Returns the nodes that have lost all slots and are still in use.
    pub(super) fn departed_nodes(&self) -> Vec<Arc<Node>> {
        let map = self.map.lock();
        map.departed.iter().filter_map(Weak::upgrade).collect()
    }

    /// Handles MOVED: a node reports that another node owns the slot. Returns that node, if it can
    /// be found.
    pub(super) async fn handle_moved(self: &Arc<Self>, slot: u16, to: &str) -> Option<Arc<Node>> {
        let Some(to) = self.parse_redirect(slot, to) else {
            let responder = self.known_slot_owner(slot);
            self.signals.changed.notify_one();
            self.refresh_and_wait().await.ok()?;
            let is_other = |node: &Arc<Node>| !responder.is_some_and(|it| Arc::ptr_eq(&it, node));
            return self.known_slot_owner(slot).filter(is_other);
        };
        let mut map = self.map.lock();
        let node = self.node(&mut map, &to);
        if map.masters().contains(&to) {
            self.request_refresh();
        } else {
            self.settings.suspects.add_node(node.id);
            self.request_refresh_at_once();
        }
        let moved = Moved {
            to,
            epoch: map.current_epoch.map_or(0, |(epoch, _)| epoch),
            at: Instant::now(),
        };
        map.moved.insert(slot, moved);
        Some(node)
    }

    /// Handles ASK: a node refers to another one for this command only. Returns that node, if it
    /// can be found.
    pub(super) fn handle_ask(&self, slot: u16, to: &str) -> Option<Arc<Node>> {
        let endpoint = self
            .parse_redirect(slot, to)
            .or_else(|| self.only_other_with_port(slot, to))?;
        Some(self.node(&mut self.map.lock(), &endpoint))
    }

    /// Returns the target of a redirection without a host: the only other node with its port, if
    /// there is one. If that is the wrong node, it refuses the command, because only the node that
    /// imports the slot accepts it.
    fn only_other_with_port(&self, slot: u16, address: &str) -> Option<Endpoint> {
        let port: u16 = address.rsplit_once(':')?.1.parse().ok()?;
        let map = self.map.lock();
        let owner = map.owner(slot);
        let is_other = |at: &Endpoint| at.port() == port && Some(at) != owner;
        let mut others = map.masters().into_iter().filter(is_other);
        let other = others.next()?;
        others.next().is_none().then_some(other)
    }

    /// Handles a failure that may have its reason in another owner of a slot.
    pub(super) fn request_refresh(self: &Arc<Self>) {
        self.ensure_refresh_task();
        self.signals.failed.notify_one();
    }

    /// Handles a node's report that slots have another owner.
    fn request_refresh_at_once(self: &Arc<Self>) {
        self.ensure_refresh_task();
        self.signals.changed.notify_one();
    }

    /// Watches for changes from now on, for as long as the runtime lives.
    fn ensure_refresh_task(self: &Arc<Self>) {
        let refresh = || refresh_loop(Arc::downgrade(self), Checks::new(self.signals.clone()));
        self.refresh_task.ensure_running(refresh);
    }

    /// Waits until the nodes have been queried once more.
    async fn refresh_and_wait(self: &Arc<Self>) -> Result<(), ExchangeError> {
        check_sockets()?;
        let refreshed = self.refreshed.notified();
        self.request_refresh();
        refreshed.await;
        Ok(())
    }

    /// Queries the nodes for the owners of the slots. Returns whether there are other masters than
    /// before.
    async fn refresh(&self) -> bool {
        let before = self.map.lock().masters();
        // Query some connected nodes first; if no answer of theirs can be used, query all.
        if !self.query_nodes(true).await {
            self.query_nodes(false).await;
        }
        self.end_moved_subscriptions();
        self.refreshed.notify_waiters();
        self.map.lock().masters() != before
    }

    /// Queries connected nodes, or all known ones, and uses their best answer. Returns whether one
    /// was used.
    async fn query_nodes(&self, connected: bool) -> bool {
        let limit = match connected {
            true => QUERY_TIMEOUT,
            // There are no other nodes to query.
            false => self.settings.config.connect_timeout.max(QUERY_TIMEOUT),
        };
        let query = |(at, connection): (Endpoint, Arc<ReconnectingConnection>)| async move {
            let report = answer_within(limit, &connection, fetch_slots(&at, &connection)).await;
            let report = report.map_err(|failure| failure.if_unknown_command(not_in_a_cluster));
            if let Err(failure) = &report {
                tracing::debug!(%at, error = ?failure, "a node did not report its slots");
            }
            report
        };
        let queries = self.nodes_to_query(connected).into_iter().map(query);
        let is_ours = |report: &SlotReport| self.ids.lock().are_ours(&report.ids);
        let enough = |answers: &[Option<Result<SlotReport, ExchangeError>>]| {
            let mut reports = answers.iter().flatten().flatten();
            reports.any(|report| report.is_healthy && is_ours(report))
        };
        let answers = join_until(queries, enough, MIN_QUERY_TIME).await;
        let (mut reports, mut failures) = (Vec::new(), Vec::new());
        for answer in answers.into_iter().flatten() {
            match answer {
                Ok(report) => reports.push(report),
                Err(failure) => failures.push(failure),
            }
        }
        // A node that is down does not hide what another one has refused for good.
        let unanswered = failures
            .into_iter()
            .min_by_key(|failure| !failure.is_permanent());
        *self.unanswered.lock() = unanswered.filter(|_| reports.is_empty());
        let is_set_up_again = {
            let answers = reports.iter().map(|report| &report.ids);
            self.ids.lock().end_query(answers, Instant::now())
        };
        if !is_set_up_again {
            reports.retain(is_ours);
        }
        let latest = best_report(&reports);
        // Use an answer of a node that is cut off only if there is no map at all.
        let latest = latest.filter(|latest| latest.is_healthy || self.map.lock().ranges.is_empty());
        latest.is_some_and(|report| self.apply_report(report))
    }

    fn nodes_to_query(&self, connected: bool) -> Vec<(Endpoint, Arc<ReconnectingConnection>)> {
        let mut map = self.map.lock();
        let known = map.masters().into_iter().chain(self.seeds.clone());
        let mut queried: Vec<(Endpoint, Arc<ReconnectingConnection>)> = Vec::new();
        for at in known {
            let node = self.node(&mut map, &at);
            if (!connected || node.commands.is_connected())
                && queried.iter().all(|(other, _)| *other != at)
            {
                queried.push((at, node.commands.clone()));
            }
        }
        match connected {
            true => random_choice(queried, MAX_QUERIED),
            false => queried,
        }
    }

    /// Uses a node's answer unless something newer is known. Returns whether it did.
    fn apply_report(&self, report: &SlotReport) -> bool {
        let now = Instant::now();
        let mut map = self.map.lock();
        let is_behind =
            |(epoch, at): (u64, Instant)| report.epoch < epoch && now < at + OLD_EPOCH_IGNORED_FOR;
        if map.current_epoch.is_some_and(is_behind) {
            return false;
        }
        let before = map.masters();
        let owners: BTreeSet<_> = map.ranges.iter().map(|(.., owner)| owner.clone()).collect();
        map.current_epoch = Some((report.epoch, now));
        map.ranges.clone_from(&report.ranges);
        self.ids.lock().replace(&report.ids);
        map.moved.retain(|_, moved| {
            report.epoch <= moved.epoch && now < moved.at + OLD_EPOCH_IGNORED_FOR
        });
        let masters = map.masters();
        for at in &masters {
            let node = self.node(&mut map, at);
            // A new master may lack data of the old one. If MOVED has named it before, then for one slot.
            let is_new = !owners.contains(at) && report.owns(at);
            if !owners.is_empty() && is_new {
                self.settings.suspects.add_node(node.id);
            }
        }
        // A node that has lost its slots may hang with commands in flight, so it is invalidated. A
        // node that has none yet may serve keys of a slot that is moving there, so it is kept while
        // it is in use.
        let is_in_use = |node: &Arc<Node>| Arc::strong_count(node) > 1;
        let mut gone = Vec::new();
        map.nodes.retain(|at, node| {
            let stays = masters.contains(at) || !before.contains(at) && is_in_use(node);
            if !stays {
                gone.push(node.clone());
            }
            stays
        });
        map.departed.retain(|node| node.strong_count() > 0);
        map.departed.extend(gone.iter().map(Arc::downgrade));
        drop(map);
        // Not under the lock: invalidating a connection notifies waiters.
        for node in gone {
            node.invalidate();
        }
        true
    }

    /// Returns the known owner of a slot.
    pub(super) fn known_slot_owner(&self, slot: u16) -> Option<Arc<Node>> {
        let map = self.map.lock();
        map.nodes.get(map.owner(slot)?).cloned()
    }

    /// Returns the node at this address, which need not be connected yet.
    fn node(&self, map: &mut SlotMap, at: &Endpoint) -> Arc<Node> {
        let target = || Target::ClusterNode(at.clone(), self.ids.clone());
        let new = || Node::new(&self.settings, &target());
        map.nodes.entry(at.clone()).or_insert_with(new).clone()
    }

    /// Parses the address in a redirection for a slot. Without a host it has that of the known
    /// owner of the slot.
    fn parse_redirect(&self, slot: u16, address: &str) -> Option<Endpoint> {
        let map = self.map.lock();
        let responder = map.owner(slot).or_else(|| self.seeds.first())?;
        Endpoint::parse_redirect(address, responder)
    }
}

/// Returns the best of several answers: of the cluster to which most answering nodes belong, if
/// addresses in the URL are those of another one; of a node that reports that the cluster works;
/// and the latest.
fn best_report(reports: &[SlotReport]) -> Option<&SlotReport> {
    let same_cluster = |one: &SlotReport| {
        let shares_node = |other: &&SlotReport| one.ids.values().any(|id| other.has_node(id));
        reports.iter().filter(shares_node).count()
    };
    reports
        .iter()
        .max_by_key(|report| (same_cluster(report), report.is_healthy, report.epoch))
}

/// Updates the map when there is a reason to, and periodically.
async fn refresh_loop(cluster: Weak<Cluster>, mut checks: Checks) {
    loop {
        checks.next(REFRESH_INTERVAL).await;
        let found = match cluster.upgrade() {
            Some(cluster) => cluster.refresh().await,
            None => return,
        };
        checks.pause(found).await;
    }
}

/// Returns at most `count` of these nodes, so that many clients share the load among all nodes.
fn random_choice<T>(mut nodes: Vec<T>, count: usize) -> Vec<T> {
    nodes.sort_by_cached_key(|_| random());
    nodes.truncate(count);
    nodes
}

/// Queries a node for its view of the cluster.
async fn fetch_slots(
    at: &Endpoint,
    connection: &Arc<ReconnectingConnection>,
) -> Result<SlotReport, ExchangeError> {
    let live = connection.get_or_connect().await?;
    let info = live.query(&Cmd::of(&["CLUSTER", "INFO"])).await?;
    let slots = live.query(&Cmd::of(&["CLUSTER", "SLOTS"])).await?;
    let unexpected = || ExchangeError::not_executed("unexpected reply");
    let info = info.as_text().ok_or_else(unexpected)?;
    let epoch = info_field(info, "cluster_current_epoch").and_then(|epoch| epoch.parse().ok());
    let ranges = slots.elements().ok_or_else(unexpected)?;
    let ids = ranges.iter().flat_map(|range| parse_ids(at, range));
    let ids = ids.collect();
    let mut ranges: Vec<_> = ranges
        .iter()
        .filter_map(|range| parse_slot_range(at, range))
        .collect();
    // Before Redis 7 each node has its own order; a listing needs a stable one.
    ranges.sort_unstable();
    Ok(SlotReport {
        // A node that is cut off from most of the cluster reports that.
        is_healthy: info_field(info, "cluster_state") == Some("ok"),
        epoch: epoch.unwrap_or(0),
        ranges,
        ids,
    })
}

/// `[first, last, [host, port, id, metadata], replicas…]`
fn parse_slot_range(responder: &Endpoint, range: &ScriptReply) -> Option<SlotRange> {
    let [
        ScriptReply::Integer(first),
        ScriptReply::Integer(last),
        master,
        ..,
    ] = range.elements()?
    else {
        return None;
    };
    Some((
        u16::try_from(*first).ok()?,
        u16::try_from(*last)
            .ok()
            .filter(|last| *last < SLOT_COUNT)?,
        parse_node(responder, master)?,
    ))
}

/// Returns the ids of the master and the replicas of a slot range.
fn parse_ids(responder: &Endpoint, range: &ScriptReply) -> Vec<(Endpoint, String)> {
    let id = |node: &ScriptReply| node.elements()?.get(2)?.as_text().map(str::to_owned);
    let nodes = range.elements().unwrap_or_default().iter().skip(2);
    nodes
        .filter_map(|node| Some((parse_node(responder, node)?, id(node)?)))
        .collect()
}

/// `[host, port, id, metadata]`
fn parse_node(responder: &Endpoint, node: &ScriptReply) -> Option<Endpoint> {
    let node = node.elements()?;
    let host = match node.first()? {
        // The answering node does not know its own host.
        ScriptReply::Nil => "",
        host => host.as_text()?,
    };
    let Some(ScriptReply::Integer(port)) = node.get(1) else {
        return None;
    };
    let host = match host {
        // A node without an address does not know its own yet, so it is the answering node.
        UNKNOWN_HOST => {
            let metadata = node.get(3).unwrap_or(&ScriptReply::Nil);
            text_field(metadata, "ip").unwrap_or_default()
        }
        host => host,
    };
    Some(responder.with_host_and_port(host, u16::try_from(*port).ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::connection_config::ConnectionConfig;
    use super::super::options::{RedisSettings, ReplicaSync};
    use super::*;
    use crate::wait::ChannelMap;

    fn at(port: u16) -> Endpoint {
        Endpoint::new("127.0.0.1", port)
    }

    fn cluster() -> Arc<Cluster> {
        let settings = NodeSettings {
            config: ConnectionConfig::plain(),
            redis: RedisSettings {
                replica_sync: ReplicaSync::Off,
                ..RedisSettings::default()
            },
            subscriber: Arc::new(ChannelMap::default()),
            suspects: Arc::new(crate::store::Suspects::new(false)),
        };
        Cluster::new(vec![at(1)], settings)
    }

    /// One node owns all slots.
    fn report(epoch: u64, owner: u16) -> SlotReport {
        SlotReport {
            is_healthy: true,
            epoch,
            ranges: vec![(0, SLOT_COUNT - 1, at(owner))],
            ids: BTreeMap::new(),
        }
    }

    /// Returns the owners of slots 1 and 2.
    fn owners(cluster: &Cluster) -> [u16; 2] {
        let map = cluster.map.lock();
        [1, 2].map(|slot| map.owner(slot).unwrap().port())
    }

    #[tokio::test(start_paused = true)]
    async fn outdated_node_does_not_undo_redirection() {
        let cluster = cluster();
        assert!(cluster.apply_report(&report(5, 10)));
        cluster.handle_moved(1, "127.0.0.1:11").await.unwrap();
        assert_eq!(owners(&cluster), [11, 10]);
        // The same epoch, twice.
        for _ in 0..2 {
            assert!(cluster.apply_report(&report(5, 10)));
            assert_eq!(owners(&cluster), [11, 10]);
        }
        // A later epoch has precedence, an earlier one has not.
        assert!(cluster.apply_report(&report(6, 12)));
        assert_eq!(owners(&cluster), [12, 12]);
        assert!(!cluster.apply_report(&report(5, 10)));
        assert_eq!(owners(&cluster), [12, 12]);
    }

    /// MOVED is the first to tell of a failover, of one slot.
    #[tokio::test(start_paused = true)]
    async fn holds_of_all_slots_are_checked_at_a_new_master_that_one_redirection_has_named() {
        let cluster = cluster();
        assert!(cluster.apply_report(&report(5, 10)));
        let new = cluster.handle_moved(1, "127.0.0.1:11").await.unwrap();
        let suspects = cluster.settings.suspects.clone();
        assert_eq!(suspects.next().await.nodes, BTreeSet::from([new.id]));
        let suspected = || tokio::time::timeout(Duration::from_secs(1), suspects.next());
        assert!(cluster.apply_report(&report(5, 10)));
        assert!(suspected().await.is_err(), "it has only that slot");
        assert!(cluster.apply_report(&report(6, 11)));
        let nodes = suspected().await.unwrap().nodes;
        assert_eq!(nodes, BTreeSet::from([new.id]));
        assert!(cluster.apply_report(&report(7, 11)));
        assert!(suspected().await.is_err(), "it has the slots already");
    }

    #[tokio::test(start_paused = true)]
    async fn earlier_epochs_are_ignored_only_for_a_time() {
        let cluster = cluster();
        assert!(cluster.apply_report(&report(5, 10)));
        cluster.handle_moved(1, "127.0.0.1:11").await.unwrap();
        tokio::time::advance(OLD_EPOCH_IGNORED_FOR).await;
        assert!(cluster.apply_report(&report(5, 10)));
        assert_eq!(owners(&cluster), [10, 10]);
        // A cluster that was set up again.
        assert!(!cluster.apply_report(&report(1, 20)));
        tokio::time::advance(OLD_EPOCH_IGNORED_FOR).await;
        assert!(cluster.apply_report(&report(1, 20)));
        assert_eq!(owners(&cluster), [20, 20]);
    }

    #[test]
    fn best_report_is_latest_of_most_nodes() {
        let report = |is_healthy, epoch, ids: &[(u16, &str)]| SlotReport {
            is_healthy,
            ids: ids
                .iter()
                .map(|&(port, id)| (at(port), id.into()))
                .collect(),
            ..report(epoch, 1)
        };
        let best = |reports: &[SlotReport]| best_report(reports).map(|best| best.epoch);
        let ours: &[(u16, &str)] = &[(1, "a"), (2, "b")];
        let (renamed, foreign): (&[_], &[_]) = (&[(7, "b"), (3, "c")], &[(1, "x")]);
        assert_eq!(best(&[]), None);
        let (earlier, later) = (report(true, 1, ours), report(true, 2, renamed));
        assert_eq!(best(&[earlier, later]), Some(2));
        let (cut_off, healthy) = (report(false, 2, ours), report(true, 1, ours));
        assert_eq!(best(&[cut_off, healthy]), Some(1));
        let (one, other) = (report(false, 1, ours), report(false, 2, renamed));
        assert_eq!(best(&[one, other, report(true, 9, foreign)]), Some(2));
        // Before Redis 4.0 nodes had no ids.
        assert_eq!(best(&[report(true, 1, &[]), report(true, 2, &[])]), Some(2));
    }

    /// Slots 0 to 9.
    fn range<const N: usize>(nodes: [(ScriptReply, i64, &str, ScriptReply); N]) -> ScriptReply {
        let nodes = nodes.map(|(host, port, id, metadata)| {
            ScriptReply::List(vec![host, ScriptReply::Integer(port), id.into(), metadata])
        });
        let slots = [0, 9].map(ScriptReply::Integer);
        ScriptReply::List(slots.into_iter().chain(nodes).collect())
    }

    #[test]
    fn ids_of_masters_and_replicas_are_known() {
        let range = range([
            (ScriptReply::Nil, 7, "a", ScriptReply::Nil),
            ("other".into(), 8, "b", ScriptReply::Nil),
        ]);
        let ids = parse_ids(&Endpoint::new("responder", 1), &range);
        let ids = ids.iter().map(|(at, id)| format!("{at} {id}"));
        assert_eq!(ids.collect::<Vec<_>>(), ["responder:7 a", "other:8 b"]);
    }

    #[test]
    fn queried_nodes_are_chosen_at_random() {
        let chosen: std::collections::BTreeSet<usize> = (0..100)
            .flat_map(|_| random_choice((0..20).collect(), MAX_QUERIED))
            .collect();
        assert_eq!(chosen.len(), 20);
        assert_eq!(random_choice(vec![1, 2], MAX_QUERIED).len(), 2);
    }

    #[test]
    fn nameless_node_is_found_by_address() {
        let maps = [
            &["hostname", "x", "ip", "10.0.0.2"][..],
            &["ip", "10.0.0.2"],
        ];
        let maps =
            maps.map(|map| ScriptReply::List(map.iter().copied().map(ScriptReply::from).collect()));
        let found = |host: ScriptReply, metadata: ScriptReply| {
            let range = range([(host, 7, "id", metadata)]);
            parse_slot_range(&Endpoint::new("responder", 1), &range).unwrap()
        };
        for map in maps {
            let (first, last, at) = found("?".into(), map.clone());
            assert_eq!((first, last, &*at.to_string()), (0, 9, "10.0.0.2:7"));
            // Where the endpoint is unknown, the host of the answering node counts.
            for host in [ScriptReply::Nil, "".into()] {
                let (.., at) = found(host, map.clone());
                assert_eq!(at.to_string(), "responder:7");
            }
            let (.., at) = found("named".into(), map);
            assert_eq!(at.to_string(), "named:7");
        }
        let (.., at) = found("?".into(), ScriptReply::List(Vec::new()));
        assert_eq!(at.to_string(), "responder:7");
    }

    #[tokio::test]
    async fn ask_redirection_goes_to_only_other_node_with_port() {
        let cluster = cluster();
        let mut report = report(5, 10);
        report.ranges = vec![(0, 1, at(10)), (2, SLOT_COUNT - 1, at(11))];
        cluster.apply_report(&report);
        let node = cluster.handle_ask(1, "?:11").unwrap();
        assert!(Arc::ptr_eq(&node, &cluster.known_slot_owner(2).unwrap()));
        assert!(cluster.handle_ask(1, "?:10").is_none());
        assert!(cluster.handle_ask(1, "?:12").is_none());
        let other_host = Endpoint::new("127.0.0.2", 11);
        report.ranges = vec![
            (0, 1, at(10)),
            (2, 2, at(11)),
            (3, SLOT_COUNT - 1, other_host),
        ];
        cluster.apply_report(&report);
        assert!(cluster.handle_ask(1, "?:11").is_none());
    }
}
