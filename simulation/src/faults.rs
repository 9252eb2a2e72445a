//! Injects the faults of a plan: what each one breaks, and how it is repaired.
//!
//! 1. [`Run::fault`] breaks something, waits until the planned end if the fault lasts, and repairs it. When it
//!    returns, servers, network and processes work again.
//! 2. Some faults replace a master: a replica is promoted, and the former master rejoins as a replica.
//! 3. If the store may have lost data, that time is recorded, so that the checker can explain violations. An operator
//!    sets the permits again, because they have no lease.
//! 4. The time of the fault itself is recorded as a window, and whether the store answered no client in it.

use std::time::Duration;

use redlatch_robustness::clock::{Time, nanos};
use redlatch_robustness::history::{DataLost, Forgetting, Window};
use redlatch_robustness::worker::Sync;
use tokio::time::{sleep, sleep_until};

use crate::network::{Direction, HostId};
use crate::plan::{Fault, Scheduled};
use crate::run::{Run, lock};
use crate::server::{Server, slot};
use crate::site::Topology;

/// How long a master may take to learn that it was replaced, once it is reachable again.
const DEMOTION: Duration = Duration::from_millis(1000);

const STEP: Forgetting = Forgetting {
    holds: true,
    tokens: false,
    why: "a step of the server's clock ends leases early",
};

impl Run<'_> {
    /// Injects a fault and repairs it.
    pub(crate) async fn fault(&mut self, scheduled: &Scheduled) {
        let Scheduled { until, fault, .. } = scheduled;
        let (network, from) = (self.network.clone(), self.now());
        let text = format!("FAULT {fault:?} until {:.3} s", until.as_secs_f64());
        network.note(&text, || text.clone());
        let over = self.begun + *until;
        let until = sleep_until(over);
        match *fault {
            Fault::Slow => {
                network.set_latency(self.plan.latency * 8);
                until.await;
                network.set_latency(self.plan.latency);
            }
            Fault::Cut(place, direction) => {
                let directions = match direction {
                    Some(direction) => vec![direction],
                    None => vec![Direction::Up, Direction::Down],
                };
                let (process, hosts) = (self.processes[place].id(), self.site.all_hosts());
                let set = |cut| {
                    for direction in &directions {
                        for host in &hosts {
                            network.set_cut(process, *host, *direction, cut);
                        }
                    }
                };
                set(true);
                until.await;
                set(false);
            }
            Fault::Reset(place) => {
                for host in self.site.all_hosts() {
                    network.reset(Some(self.processes[place].id()), host);
                }
            }
            Fault::AnswersLost(place) => {
                let process = self.processes[place].id();
                network.set_losing(Some(process));
                until.await;
                network.set_losing(None);
            }
            Fault::Freeze => {
                let host = self.site.masters()[0];
                network.set_frozen(host, true);
                until.await;
                network.set_frozen(host, false);
            }
            Fault::Restart | Fault::RestartEmpty => {
                let host = self.site.masters()[0];
                let before = network.kill_server(host);
                until.await;
                let keeps = *fault == Fault::Restart;
                let before = before.as_ref().filter(|_| keeps);
                self.site.restart(host, before.map(Server::snapshot));
                if !keeps {
                    self.data_lost(from, Forgetting::NO_DATA).await;
                }
            }
            Fault::ForgetScripts => {
                for host in self.site.servers() {
                    network.with_server(host, |server, _| server.forget_scripts());
                }
            }
            Fault::StepClock(by) => {
                for host in self.site.servers() {
                    network.step_clock(host, by);
                }
                self.data_lost(from, STEP).await;
            }
            Fault::Stop(place) => {
                let process = self.processes[place].clone();
                process.stop();
                until.await;
                let stopped = (from, Some(self.now()));
                let mut history = lock(&self.history);
                let of = history.processes.entry(process.id()).or_default();
                of.stopped.push(stopped);
                drop(history);
                process.go_on();
            }
            Fault::Kill(place) | Fault::RuntimeDropped(place) => {
                let id = self.processes[place].id();
                match *fault {
                    Fault::Kill(_) => self.processes[place].kill(),
                    _ => self.processes[place].drop_runtime(),
                }
                lock(&self.history).processes.entry(id).or_default().killed = Some(from);
                until.await;
                self.processes[place] = self.start(place);
            }
            Fault::MasterKilled { group, behind } => {
                let master = self.site.masters()[group];
                let replicas = self.site.replicas(group);
                self.set_behind(master, &replicas, !behind.is_zero());
                sleep(behind).await;
                let before = network.kill_server(master);
                self.elect(group, false).await;
                self.set_behind(master, &replicas, false);
                until.await;
                let keeps = self.random.below(2) == 0;
                let before = before.as_ref().filter(|_| keeps);
                self.site.restart(master, before.map(Server::snapshot));
                self.demote(master).await;
                self.data_lost(from, Forgetting::UNREPLICATED).await;
            }
            Fault::MasterFrozen { group } => {
                let master = self.site.masters()[group];
                network.set_frozen(master, true);
                self.elect(group, false).await;
                until.await;
                network.set_frozen(master, false);
                self.demote(master).await;
                self.data_lost(from, Forgetting::UNREPLICATED).await;
            }
            Fault::MasterCutOff { group } => {
                let master = self.site.masters()[group];
                self.site.set_separated(master, true);
                self.elect(group, true).await;
                let replaced = self.now();
                until.await;
                self.site.set_separated(master, false);
                self.demote(master).await;
                match self.plan.sync {
                    Sync::One => self.data_lost(from, Forgetting::RELEASES).await,
                    _ => {
                        self.set_permits().await;
                        self.data_lost_until(from, replaced, Forgetting::CUT_OFF);
                    }
                }
            }
            Fault::HandedOver { group } => {
                let master = self.site.masters()[group];
                self.hand_over(group, master).await;
                if self.site.topology == Topology::Sentinel {
                    self.data_lost(from, Forgetting::UNREPLICATED).await;
                }
            }
            Fault::SentinelsFrozen { one } => {
                let sentinels = self.site.sentinels.clone();
                let sentinels = sentinels.into_iter().take(if one { 1 } else { 3 });
                let sentinels: Vec<HostId> = sentinels.collect();
                for host in &sentinels {
                    network.set_frozen(*host, true);
                }
                network.reset(None, self.site.masters()[0]);
                until.await;
                for host in sentinels {
                    network.set_frozen(host, false);
                }
            }
            Fault::SlotsMoved { pause } => self.move_slots(pause).await,
        }
        let alone = self.site.topology == Topology::Single;
        let cut = matches!(fault, Fault::Freeze | Fault::Restart | Fault::RestartEmpty);
        let broken = Window {
            from,
            until: self.now(),
            cut: false,
        };
        let windows = &mut lock(&self.history).windows;
        windows.push(broken);
        if cut && alone {
            // The server answers from then on, before the operator has set the permits.
            let until = nanos(scheduled.until);
            windows.push(Window { from, until, cut });
        }
    }

    /// Notes that data may have been lost until now, and has an operator set the permits again.
    async fn data_lost(&mut self, from: Time, forgetting: Forgetting) {
        self.set_permits().await;
        self.data_lost_until(from, self.now(), forgetting);
    }

    fn data_lost_until(&self, from: Time, until: Time, forgetting: Forgetting) {
        lock(&self.history).data_lost.push(DataLost {
            from,
            until,
            forgetting,
        });
    }

    /// Cuts the replicas of a group off from their master, or reconnects them.
    fn set_behind(&self, master: HostId, replicas: &[HostId], behind: bool) {
        for replica in replicas {
            self.network.set_separated(master, *replica, behind);
        }
    }

    /// Promotes a replica in place of its master after the failure detection time. `minority`: the master still runs
    /// and notices that it cannot reach a majority.
    async fn elect(&mut self, group: usize, minority: bool) {
        let missed = self.plan.missed;
        sleep(self.random.between(missed / 2, missed)).await;
        if minority && self.site.topology == Topology::Cluster {
            self.site.set_view(self.site.masters()[group], false);
            sleep(missed / 4).await;
        }
        if let Some(successor) = self.site.successor(group) {
            let random = &mut self.random;
            self.site.replace(group, successor, None, random).await;
        }
    }

    /// Makes a former master learn, after a delay, that it was replaced.
    async fn demote(&mut self, master: HostId) {
        sleep(self.random.between(Duration::ZERO, DEMOTION)).await;
        self.site.rejoin(master);
    }

    /// Promotes a replica in place of a healthy master.
    async fn hand_over(&mut self, group: usize, master: HostId) {
        let orderly = self.site.topology == Topology::Cluster;
        if orderly {
            // The master pauses its clients until the replica has received everything.
            self.network.set_frozen(master, true);
            let offset = |host| self.network.with_server(host, |server, _| server.offset());
            while self.site.successor(group).and_then(offset) < offset(master) {
                sleep(Duration::from_millis(1)).await;
            }
        }
        if let Some(successor) = self.site.successor(group) {
            let random = &mut self.random;
            if orderly {
                self.site
                    .replace(group, successor, Some(master), random)
                    .await;
                self.network.set_frozen(master, false);
            } else {
                self.site.replace(group, successor, None, random).await;
                self.demote(master).await;
            }
        }
    }

    /// Moves the slots of all names to random masters, key by key. Each slot stays half moved for a while.
    async fn move_slots(&mut self, pause: Duration) {
        let names: Vec<String> = self.plan.all_names();
        for name in names {
            let (slot, to) = (slot(name.as_bytes()), self.random.below(3));
            if self.site.owner(slot) == to {
                continue;
            }
            self.site.begin_moving(slot, to);
            sleep(self.random.between(Duration::ZERO, pause)).await;
            self.site.move_keys(slot, 1);
            sleep(self.random.between(Duration::ZERO, pause)).await;
            self.site.move_keys(slot, usize::MAX);
            self.site.finish_moving(slot, &mut self.random).await;
        }
    }
}
