//! Injects the faults of a plan: what each one breaks, and how it is repaired.
//!
//! 1. [`Run::inject`] breaks something, waits until the planned end if the fault lasts, and repairs it. When it
//!    returns, servers, network and processes work again.
//! 2. Some faults replace a master: a replica is promoted, and the former master rejoins as a replica.
//! 3. If the store may have lost data, that time is recorded, so that the checker can explain violations. An operator
//!    sets the permits again, because they have no lease.
//! 4. The time of the fault itself is recorded as a window, and whether the store answered no client in it.

use std::time::Duration;

use redlatch_robustness::clock::{Time, nanos};
use redlatch_robustness::history::{DataLoss, FaultWindow};
use redlatch_robustness::worker::Sync;
use tokio::time::{sleep, sleep_until};

use crate::deployment::Topology;
use crate::network::{Direction, HostId};
use crate::plan::{Fault, QUERIES_FAIL_FOR, ScheduledFault};
use crate::process::Process;
use crate::run::{Run, lock};
use crate::server::{Refusal, Server, slot};

/// How long a master may take to learn that it was replaced, once it is reachable again.
const MAX_DEMOTION_DELAY: Duration = Duration::from_millis(1000);

/// How long a query that is late, and the next one, may take.
const MAX_QUERY_TIME: Duration = Duration::from_millis(2500);

/// The longest pause of clients between queries of the sentinels.
const LONGEST_QUERY_PAUSE: Duration = Duration::from_secs(5);

const CLOCK_STEP: DataLoss = DataLoss {
    holds: true,
    shows: false,
    tokens: false,
    why: "a step of the server's clock ends leases early",
};

impl Run<'_> {
    /// Injects a fault and repairs it.
    pub(crate) async fn inject(&mut self, scheduled: &ScheduledFault) {
        let ScheduledFault { until, fault, .. } = scheduled;
        let (network, from) = (self.network.clone(), self.now());
        let text = format!("FAULT {fault:?} until {:.3} s", until.as_secs_f64());
        network.note(&text, || text.clone());
        let end = self.begun + *until;
        let until = sleep_until(end);
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
                let (process, hosts) = (self.processes[place].id(), self.deployment.all_hosts());
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
            Fault::Reset(place) => self.reset_connections(&self.processes[place]),
            Fault::AnswersLost(place) => {
                let process = self.processes[place].id();
                network.set_answer_loss(Some(process));
                until.await;
                network.set_answer_loss(None);
            }
            Fault::SignalsFail(place) => {
                let process = self.processes[place].id();
                network.set_failing_signals(Some(process));
                until.await;
                network.set_failing_signals(None);
            }
            Fault::Freeze => {
                let host = self.deployment.masters()[0];
                network.set_frozen(host, true);
                until.await;
                network.set_frozen(host, false);
            }
            Fault::Restart | Fault::RestartEmpty => {
                let host = self.deployment.masters()[0];
                let before = network.kill_server(host);
                until.await;
                let keeps_data = *fault == Fault::Restart;
                let before = before.as_ref().filter(|_| keeps_data);
                self.deployment.restart(host, before.map(Server::snapshot));
                if !keeps_data {
                    self.record_data_loss(from, DataLoss::NO_DATA).await;
                }
            }
            Fault::ForgetScripts => {
                for host in self.deployment.servers() {
                    network.with_server(host, |server, _| server.forget_scripts());
                }
            }
            Fault::PasswordChanged => {
                self.change_password();
                for process in &self.processes {
                    self.reset_connections(process);
                }
                self.sentinels_fail(from);
            }
            Fault::StepClock(by) => {
                for host in self.deployment.servers() {
                    network.step_clock(host, by);
                }
                lock(&self.history).clock_steps.push((from, nanos(by)));
                self.record_data_loss(from, CLOCK_STEP).await;
            }
            Fault::StepClockBack(by) => {
                for host in self.deployment.servers() {
                    network.step_clock_back(host, by);
                }
                lock(&self.history).clock_steps.push((from, -nanos(by)));
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
                process.resume();
            }
            Fault::Kill(place) | Fault::RuntimeDropped(place) => {
                let id = self.processes[place].id();
                lock(&self.history).processes.entry(id).or_default().killed = Some(from);
                match *fault {
                    Fault::Kill(_) => self.processes[place].kill(),
                    _ => self.processes[place].drop_runtime(),
                }
                until.await;
                self.processes[place] = self.start(place);
            }
            Fault::MasterKilled { group, behind } => {
                let master = self.deployment.masters()[group];
                let replicas = self.deployment.replicas(group);
                self.set_behind(master, &replicas, !behind.is_zero());
                sleep(behind).await;
                let before = network.kill_server(master);
                self.elect(group, false).await;
                self.set_behind(master, &replicas, false);
                until.await;
                let keeps_data = self.random.below(2) == 0;
                let before = before.as_ref().filter(|_| keeps_data);
                self.deployment
                    .restart(master, before.map(Server::snapshot));
                self.demote(master).await;
                self.record_data_loss(from, DataLoss::UNREPLICATED).await;
            }
            Fault::MasterFrozen { group } => {
                let master = self.deployment.masters()[group];
                network.set_frozen(master, true);
                self.elect(group, false).await;
                until.await;
                network.set_frozen(master, false);
                self.demote(master).await;
                self.record_data_loss(from, DataLoss::UNREPLICATED).await;
            }
            Fault::MasterCutOff { group } => {
                let master = self.deployment.masters()[group];
                self.deployment.set_separated(master, true);
                self.elect(group, true).await;
                let replaced = self.now();
                until.await;
                self.deployment.set_separated(master, false);
                self.demote(master).await;
                let followed = self.heard_again().min(self.now()).max(replaced);
                self.record_cut_off(from, followed).await;
            }
            Fault::ManualFailover { group } => {
                let master = self.deployment.masters()[group];
                self.manual_failover(group, master).await;
                let topology = self.deployment.topology;
                if topology != Topology::Cluster {
                    let loss = DataLoss {
                        // Behind one name, a client that sends nothing keeps its connection to the former master.
                        shows: topology != Topology::Named,
                        ..DataLoss::UNREPLICATED
                    };
                    self.record_data_loss(from, loss).await;
                }
            }
            Fault::QueriesFail { group, late } => {
                let master = self.deployment.masters()[group];
                match self.deployment.topology {
                    Topology::Cluster => {
                        self.set_queries_fail(true, late);
                        self.manual_failover(group, master).await;
                        until.await;
                        self.set_queries_fail(false, late);
                    }
                    _ => {
                        self.deployment.set_separated(master, true);
                        let fails_from = self.now();
                        self.set_queries_fail(true, late);
                        self.elect(group, true).await;
                        let fails = self.random.between(Duration::ZERO, QUERIES_FAIL_FOR);
                        sleep(fails).await;
                        self.set_queries_fail(false, late);
                        self.sentinels_fail(fails_from);
                        let pause = self.heard_again().abs_diff(self.now());
                        sleep(Duration::from_nanos(pause)).await;
                        let followed = self.now();
                        until.await;
                        self.deployment.set_separated(master, false);
                        self.demote(master).await;
                        self.record_cut_off(from, followed).await;
                    }
                }
            }
            Fault::SentinelsFrozen { one } => {
                let sentinels = self.deployment.sentinels.clone();
                let sentinels = sentinels.into_iter().take(if one { 1 } else { 3 });
                let sentinels: Vec<HostId> = sentinels.collect();
                for host in &sentinels {
                    network.set_frozen(*host, true);
                }
                network.reset(None, self.deployment.masters()[0]);
                until.await;
                for host in sentinels {
                    network.set_frozen(host, false);
                }
                self.sentinels_fail(from);
            }
            Fault::SlotsMoved { pause } => {
                self.move_slots(pause).await;
                let moved = (from, self.now());
                lock(&self.history).slot_moves.push(moved);
            }
        }
        let is_single = self.deployment.topology.replicas() == 0;
        let is_outage = matches!(fault, Fault::Freeze | Fault::Restart | Fault::RestartEmpty);
        let broken = FaultWindow {
            from,
            until: self.now(),
            is_outage: false,
        };
        let windows = &mut lock(&self.history).windows;
        windows.push(broken);
        if is_outage && is_single {
            // The server answers from then on, before the operator has set the permits.
            let until = nanos(scheduled.until);
            windows.push(FaultWindow {
                from,
                until,
                is_outage,
            });
        }
    }

    fn reset_connections(&self, process: &Process) {
        for host in self.deployment.all_hosts() {
            self.network.reset(Some(process.id()), host);
        }
    }

    /// Records that data may have been lost until now. An operator sets the permits again.
    async fn record_data_loss(&mut self, from: Time, loss: DataLoss) {
        self.set_permits().await;
        self.record_data_loss_until(from, self.now(), loss);
    }

    /// Records that connections to sentinels broke, or queries failed, from then until now.
    fn sentinels_fail(&mut self, from: Time) {
        if self.deployment.topology != Topology::Sentinel {
            return;
        }
        let earlier = self.sentinels_failed.filter(|_| from <= self.heard_again());
        let from = earlier.map_or(from, |(from, _)| from);
        self.sentinels_failed = Some((from, self.now()));
    }

    /// Returns when all clients have queried the sentinels again, and receive their messages, at the latest: pauses between
    /// queries do not grow faster than the time in which they fail.
    fn heard_again(&self) -> Time {
        let heard = |(from, until): (Time, Time)| {
            until + (until - from).min(nanos(LONGEST_QUERY_PAUSE)) + nanos(MAX_QUERY_TIME)
        };
        self.sentinels_failed.map_or(0, heard)
    }

    /// Records what may be lost because a master was cut off, and clients used it until they followed its successor.
    async fn record_cut_off(&mut self, from: Time, followed: Time) {
        match self.plan.sync {
            Sync::One => {
                self.record_data_loss(from, DataLoss::UNCONFIRMED_WRITES)
                    .await;
            }
            _ => {
                self.set_permits().await;
                self.record_data_loss_until(from, followed, DataLoss::MASTER_PARTITIONED);
            }
        }
    }

    /// Makes the clients' queries for the current master fail, or ends that. `late`: they do not arrive meanwhile.
    fn set_queries_fail(&self, fail: bool, late: bool) {
        let (network, deployment) = (&self.network, &self.deployment);
        for host in deployment.all_hosts() {
            if !late {
                let refusal = fail.then_some(Refusal::Queries);
                network.with_server(host, |server, _| server.refuse(refusal));
            } else if deployment.sentinels.contains(&host) {
                for process in &self.processes {
                    network.set_cut(process.id(), host, Direction::Up, fail);
                }
            }
        }
    }

    fn record_data_loss_until(&self, from: Time, until: Time, loss: DataLoss) {
        lock(&self.history).record_data_loss(from, until, loss);
    }

    /// Cuts the replicas of a group off from their master, or reconnects them.
    fn set_behind(&self, master: HostId, replicas: &[HostId], behind: bool) {
        for replica in replicas {
            self.network.set_separated(master, *replica, behind);
        }
    }

    /// Promotes a replica in place of its master after the failure detection time. `in_minority`: the master still
    /// runs, and learns that it cannot reach a majority.
    async fn elect(&mut self, group: usize, in_minority: bool) {
        let failover_time = self.plan.failover_time;
        sleep(self.random.between(failover_time / 2, failover_time)).await;
        if in_minority && self.deployment.topology == Topology::Cluster {
            self.deployment
                .set_view(self.deployment.masters()[group], false);
            sleep(failover_time / 4).await;
        }
        if let Some(successor) = self.deployment.successor(group) {
            let random = &mut self.random;
            self.deployment
                .replace(group, successor, None, random)
                .await;
        }
    }

    /// Makes a former master learn, after a delay, that it was replaced.
    async fn demote(&mut self, master: HostId) {
        sleep(self.random.between(Duration::ZERO, MAX_DEMOTION_DELAY)).await;
        self.deployment.rejoin(master);
    }

    /// Promotes a replica in place of a healthy master.
    async fn manual_failover(&mut self, group: usize, master: HostId) {
        let is_coordinated = self.deployment.topology == Topology::Cluster;
        if is_coordinated {
            // The master pauses its clients until the replica has received everything.
            self.network.set_frozen(master, true);
            let offset = |host| self.network.with_server(host, |server, _| server.offset());
            while self.deployment.successor(group).and_then(offset) < offset(master) {
                sleep(Duration::from_millis(1)).await;
            }
        }
        if let Some(successor) = self.deployment.successor(group) {
            let random = &mut self.random;
            if is_coordinated {
                self.deployment
                    .replace(group, successor, Some(master), random)
                    .await;
                self.network.set_frozen(master, false);
            } else {
                self.deployment
                    .replace(group, successor, None, random)
                    .await;
                self.demote(master).await;
            }
        }
    }

    /// Moves the slots of all names to random masters, key by key. Each slot stays half moved for a while.
    async fn move_slots(&mut self, pause: Duration) {
        let names: Vec<String> = self.plan.all_names();
        for name in names {
            let (slot, to) = (slot(name.as_bytes()), self.random.below(3));
            if self.deployment.group_of_slot(slot) == to {
                continue;
            }
            self.deployment.begin_moving(slot, to);
            sleep(self.random.between(Duration::ZERO, pause)).await;
            self.deployment.move_keys(slot, 1);
            sleep(self.random.between(Duration::ZERO, pause)).await;
            self.deployment.move_keys(slot, usize::MAX);
            self.deployment.finish_moving(slot, &mut self.random).await;
        }
    }
}
