//! The servers of a run in one of the topologies, and the roles of the servers.
//!
//! This module detects and decides nothing: `faults` decides when a replica is promoted. As among
//! real servers, each Sentinel and each node learns of that separately, after some time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use redlatch_robustness::random::Random;
use redlatch_robustness::worker::USER;
use tokio::time::sleep;

use crate::network::{HostId, Network};
use crate::server::{ClusterView, Node, SLOTS, Server, SlotRange, Snapshot, User};

/// Name of the master that the Sentinels watch.
const MASTER: &str = "mymaster";

/// Name that leads to the master.
const NAME: &str = "redis";

const PORT: u16 = 6379;

const SENTINEL_PORT: u16 = 26379;

/// The longest time until a Sentinel or a node learns of a change.
const MAX_GOSSIP_DELAY: Duration = Duration::from_millis(300);

/// How the servers of a run are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// One server.
    Single,
    /// A master and two replicas behind one name, which leads to the master.
    Named,
    /// One server that has slots and does not say so.
    Sharded,
    /// A master, two replicas and three Sentinels.
    Sentinel,
    /// Three masters with a replica each.
    Cluster,
}

impl Topology {
    /// Returns the number of masters.
    pub fn groups(self) -> usize {
        match self {
            Topology::Single | Topology::Named | Topology::Sharded | Topology::Sentinel => 1,
            Topology::Cluster => 3,
        }
    }

    /// Returns the number of replicas of each master.
    pub fn replicas(self) -> usize {
        match self {
            Topology::Single | Topology::Sharded => 0,
            Topology::Named | Topology::Sentinel => 2,
            Topology::Cluster => 1,
        }
    }
}

/// All servers.
pub(crate) struct Deployment {
    pub(crate) topology: Topology,
    network: Network,
    groups: Vec<Group>,
    pub(crate) sentinels: Vec<HostId>,
    /// Grows with every failover and every moved slot.
    epoch: u64,
    /// The group of each slot of a cluster.
    slots: Vec<usize>,
    /// Slots that move from the first group to the second.
    moving: BTreeMap<u16, (usize, usize)>,
    /// The user of the processes, if not the default one.
    user: Option<User>,
    /// Whether the servers do not know HELLO.
    lacks_resp3: bool,
}

/// A master and its replicas.
struct Group {
    members: Vec<HostId>,
    master: HostId,
}

impl Deployment {
    pub(crate) fn start(topology: Topology, network: &Network) -> Deployment {
        let mut groups = Vec::new();
        for _ in 0..topology.groups() {
            let first = groups.len() * (1 + topology.replicas());
            let members = (first..=first + topology.replicas())
                .map(|number| network.add_server(&format!("redis-{number}"), PORT));
            let members: Vec<HostId> = members.collect();
            for replica in &members[1..] {
                network.follow(*replica, members[0]);
            }
            let master = members[0];
            groups.push(Group { members, master });
        }
        let sentinels = match topology {
            Topology::Sentinel => 3,
            _ => 0,
        };
        let sentinels = (0..sentinels)
            .map(|number| network.add_sentinel(&format!("sentinel-{number}"), SENTINEL_PORT));
        let each = usize::from(SLOTS).div_ceil(groups.len());
        let deployment = Deployment {
            topology,
            network: network.clone(),
            sentinels: sentinels.collect(),
            epoch: 1,
            slots: (0..usize::from(SLOTS)).map(|slot| slot / each).collect(),
            moving: BTreeMap::new(),
            user: None,
            lacks_resp3: false,
            groups,
        };
        for host in deployment.all_hosts() {
            deployment.update_view(host);
        }
        deployment.move_name();
        deployment
    }

    /// Sets the user of the processes on all servers.
    pub(crate) fn set_user(&mut self, user: User) {
        self.user = Some(user);
        self.configure_all();
    }

    /// Makes HELLO unknown on all servers.
    pub(crate) fn remove_resp3(&mut self) {
        self.lacks_resp3 = true;
        self.configure_all();
    }

    fn configure_all(&self) {
        self.servers().for_each(|host| self.configure(host));
    }

    /// Sets on one server what does not survive its restart.
    fn configure(&self, host: HostId) {
        self.network.with_server(host, |server, _| {
            if let Some(user) = &self.user {
                server.set_user(USER, user.clone());
            }
            if self.lacks_resp3 {
                server.remove_resp3();
            }
        });
    }

    /// Returns the URL for clients.
    pub(crate) fn url(&self) -> String {
        let all = |hosts: &mut dyn Iterator<Item = HostId>| {
            let hosts = hosts.map(|host| {
                let (name, port) = self.network.address(host);
                format!("{name}:{port}")
            });
            hosts.collect::<Vec<_>>().join(",")
        };
        match self.topology {
            Topology::Single | Topology::Sharded => {
                format!("redis://{}", all(&mut self.servers()))
            }
            Topology::Named => format!("redis://{NAME}:{PORT}"),
            Topology::Sentinel => {
                let sentinels = all(&mut self.sentinels.iter().copied());
                format!("redis+sentinel://{sentinels}/{MASTER}")
            }
            Topology::Cluster => format!("redis+cluster://{}", all(&mut self.servers())),
        }
    }

    /// Returns all servers with data.
    pub(crate) fn servers(&self) -> impl Iterator<Item = HostId> + '_ {
        self.groups.iter().flat_map(|group| &group.members).copied()
    }

    /// Returns all servers with data, and all Sentinels.
    pub(crate) fn all_hosts(&self) -> Vec<HostId> {
        self.servers()
            .chain(self.sentinels.iter().copied())
            .collect()
    }

    pub(crate) fn masters(&self) -> Vec<HostId> {
        self.groups.iter().map(|group| group.master).collect()
    }

    pub(crate) fn replicas(&self, group: usize) -> Vec<HostId> {
        let Group { members, master } = &self.groups[group];
        let replicas = members.iter().filter(|host| *host != master);
        replicas.copied().collect()
    }

    /// Updates a Sentinel or a node to the current state, in place of its previous view.
    pub(crate) fn update_view(&self, host: HostId) {
        match self.topology {
            Topology::Single | Topology::Named => {}
            Topology::Sentinel => {
                let (name, port) = self.network.address(self.groups[0].master);
                if self.sentinels.contains(&host) {
                    self.network.change_server(host, |server, _| {
                        server.set_master(MASTER, &name, port, self.epoch)
                    });
                }
            }
            Topology::Sharded | Topology::Cluster => self.set_view(host, true),
        }
    }

    /// Updates a node of a cluster to the current state, and sets whether the cluster is healthy.
    pub(crate) fn set_view(&self, host: HostId, is_ok: bool) {
        let view = self.view(host, is_ok);
        self.network
            .change_server(host, |server, _| server.set_cluster(view));
    }

    fn view(&self, host: HostId, is_ok: bool) -> ClusterView {
        let mut slots: Vec<SlotRange> = Vec::new();
        let mut group_before = None;
        for (slot, &group) in (0..SLOTS).zip(&self.slots) {
            match slots.last_mut() {
                Some(range) if group_before == Some(group) => range.last = slot,
                _ => slots.push(SlotRange {
                    first: slot,
                    last: slot,
                    master: self.node(self.groups[group].master),
                    replicas: self
                        .replicas(group)
                        .into_iter()
                        .map(|at| self.node(at))
                        .collect(),
                }),
            }
            group_before = Some(group);
        }
        let own = self.groups.iter().position(|group| group.master == host);
        let leaves = self
            .moving
            .iter()
            .filter(|(_, (from, _))| Some(*from) == own);
        let arrives = self.moving.iter().filter(|(_, (_, to))| Some(*to) == own);
        ClusterView {
            me: self.node(host).id,
            epoch: self.epoch,
            is_ok,
            is_hidden: self.topology == Topology::Sharded,
            migrating: leaves
                .map(|(slot, (_, to))| (*slot, self.node(self.groups[*to].master)))
                .collect(),
            importing: arrives.map(|(slot, _)| *slot).collect::<BTreeSet<u16>>(),
            slots,
        }
    }

    fn node(&self, host: HostId) -> Node {
        let (name, port) = self.network.address(host);
        Node {
            id: format!("{:040x}", host + 1),
            host: name,
            port,
        }
    }

    /// Returns the replica to promote when the master of this group is gone: the one with the most changes.
    pub(crate) fn successor(&self, group: usize) -> Option<HostId> {
        let offset = |host| self.network.with_server(host, |server, _| server.offset());
        let mut replicas = self.replicas(group);
        replicas.retain(|host| offset(*host).is_some());
        // The first of those with the same offset.
        replicas.into_iter().rev().max_by_key(|host| offset(*host))
    }

    /// Promotes a replica in place of its group's master. The other members, Sentinels and nodes learn of it
    /// one after the other. `old` is the former master if it learns of it, too.
    pub(crate) async fn replace(
        &mut self,
        group: usize,
        successor: HostId,
        old: Option<HostId>,
        random: &mut Random,
    ) {
        self.epoch += 1;
        let before = std::mem::replace(&mut self.groups[group].master, successor);
        self.network.promote(successor);
        self.update_view(successor);
        let mut others = self.all_hosts();
        others.retain(|host| *host != successor && (*host != before || old == Some(*host)));
        // The name leads to the successor before, between or after that.
        let is_named = self.topology == Topology::Named;
        let name_moves_before = is_named.then(|| random.below(others.len() + 1));
        while !others.is_empty() {
            if name_moves_before == Some(others.len()) {
                self.move_name();
            }
            let host = others.remove(random.below(others.len()));
            sleep(random.between(Duration::ZERO, MAX_GOSSIP_DELAY)).await;
            self.rejoin(host);
        }
        self.move_name();
    }

    /// Lets the name lead to the current master. Connections stay where they are.
    fn move_name(&self) {
        if self.topology == Topology::Named {
            self.network.set_name(NAME, self.groups[0].master);
        }
    }

    /// Updates a server to the current state, and makes it follow its master if it is a replica.
    pub(crate) fn rejoin(&self, host: HostId) {
        let group = self
            .groups
            .iter()
            .find(|group| group.members.contains(&host));
        if let Some(group) = group
            && group.master != host
            && !self.network.follows(host, group.master)
        {
            let was_master = self
                .network
                .with_server(host, |server, _| !server.is_replica());
            self.network.follow(host, group.master);
            if was_master == Some(true) && self.topology != Topology::Named {
                // As Sentinels do when they demote a master.
                self.network.reset(None, host);
            }
        }
        self.update_view(host);
    }

    /// Cuts a server off from all other servers, and Sentinels, or restores that.
    pub(crate) fn set_separated(&self, host: HostId, separated: bool) {
        for other in self.servers().filter(|other| *other != host) {
            self.network.set_separated(host, other, separated);
        }
    }

    /// Restarts a killed server. A node of a cluster does not serve before it has a new view.
    pub(crate) fn restart(&self, host: HostId, data: Option<Snapshot>) {
        self.network.start_server(host, data);
        self.configure(host);
        match self.topology {
            Topology::Cluster => self.set_view(host, false),
            Topology::Sharded => self.set_view(host, true),
            Topology::Single | Topology::Named | Topology::Sentinel => {}
        }
    }

    /// Returns the group that has a slot.
    pub(crate) fn group_of_slot(&self, slot: u16) -> usize {
        self.slots[usize::from(slot)]
    }

    /// Begins to move a slot to another group.
    pub(crate) fn begin_moving(&mut self, slot: u16, to: usize) {
        let from = self.group_of_slot(slot);
        self.moving.insert(slot, (from, to));
        // In this order, so that no client is redirected to a node that does not expect it.
        for group in [to, from] {
            self.update_view(self.groups[group].master);
        }
    }

    /// Moves some of the keys of a slot that is being moved: as many as this, or all.
    pub(crate) fn move_keys(&self, slot: u16, most: usize) {
        let Some((from, to)) = self.moving.get(&slot) else {
            return;
        };
        let (from, to) = (self.groups[*from].master, self.groups[*to].master);
        let keys = self
            .network
            .with_server(from, |server, now| server.keys_in_slot(slot, now));
        for key in keys.into_iter().flatten().take(most) {
            let mut entry = None;
            self.network.change_server(from, |server, now| {
                entry = server.take_key(&key, now);
                Vec::new()
            });
            if let Some(entry) = entry {
                self.network.change_server(to, |server, now| {
                    server.put_key(&key, entry, now);
                    Vec::new()
                });
            }
        }
    }

    /// Ends the move of a slot whose keys have all been moved.
    pub(crate) async fn finish_moving(&mut self, slot: u16, random: &mut Random) {
        let Some((from, to)) = self.moving.remove(&slot) else {
            return;
        };
        self.slots[usize::from(slot)] = to;
        self.epoch += 1;
        // In this order, so that at every moment a node has the slot.
        for group in [to, from] {
            self.update_view(self.groups[group].master);
        }
        let masters = [from, to].map(|group| self.groups[group].master);
        for host in self.servers().filter(|host| !masters.contains(host)) {
            sleep(random.between(Duration::ZERO, MAX_GOSSIP_DELAY / 10)).await;
            self.update_view(host);
        }
    }

    /// Returns what `find` finds at the masters.
    pub(crate) fn at_masters(
        &self,
        find: impl Fn(&mut Server, Duration) -> Vec<Vec<u8>>,
    ) -> Vec<String> {
        let found = self
            .masters()
            .into_iter()
            .filter_map(|host| self.network.with_server(host, &find));
        let found = found.flatten();
        found
            .map(|name| String::from_utf8_lossy(&name).into_owned())
            .collect()
    }
}
