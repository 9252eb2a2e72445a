//! The plan of a run, drawn from the seed: servers, processes, names, timings, and faults with their times.

use std::collections::BTreeSet;
use std::time::Duration;

use redlatch_robustness::checker::Losses;
use redlatch_robustness::names::{COUNTERS, KINDS, jobs, locks_of, locks_of_all};
use redlatch_robustness::random::Random;
use redlatch_robustness::worker::Sync;

use crate::deployment::Topology;
use crate::network::{Direction, ProcessId, TCP_USER_TIMEOUT};

/// The longest time from the failure of a master to the promotion of a replica, in any run.
const MAX_FAILOVER_TIME: Duration = Duration::from_millis(2000);

/// The longest time for which queries fail after a failover ([`Fault::QueriesFail`]).
pub(crate) const QUERIES_FAIL_FOR: Duration = Duration::from_millis(2000);

/// One run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Source of all randomness.
    pub seed: u64,
    /// The servers.
    pub topology: Topology,
    /// How many replicas must acknowledge an acquisition.
    pub sync: Sync,
    /// The longest time from the failure of a master to the promotion of a replica.
    pub failover_time: Duration,
    /// Initial number of client processes.
    pub processes: usize,
    /// Number of tasks of each process.
    pub tasks: usize,
    /// Number of owners of each process that two tasks share.
    pub owners: usize,
    /// Number of clients of each process.
    pub clients: usize,
    /// Whether the clients have chosen ids, which a restarted process reuses.
    pub chosen_ids: bool,
    /// Names of the locks, `kind:number` each.
    pub names: Vec<String>,
    /// Names of the locks that the shared owners acquire.
    pub contended_names: Vec<String>,
    /// Names of the jobs that all processes run.
    pub jobs: Vec<String>,
    /// Number of additional locks that the first client of each process holds during the whole run.
    pub permanent_locks: usize,
    /// Number of commands that the first client of the first process sends at once, with requests that are canceled.
    pub flood: usize,
    /// Whether ready tasks of a process run in a random order.
    pub shuffles_tasks: bool,
    /// Whether tasks make tickets of holds and adopt, renew or release them, ask for locks, and
    /// revoke holds.
    pub uses_tickets: bool,
    /// Whether requests have limits, and guards are dropped and flushed.
    pub uses_limits: bool,
    /// The watchdog's lease.
    pub lease: Duration,
    /// The longest time that most tasks hold a lock.
    pub max_hold: Duration,
    /// Interval at which holders check whether their guards are valid.
    pub check_interval: Duration,
    /// Maximum latency of a packet.
    pub latency: Duration,
    /// What the user of the processes may do.
    pub user: PlannedUser,
    /// Whether the servers do not know HELLO, so that connections speak RESP2.
    pub lacks_resp3: bool,
    /// Time in which the processes acquire locks.
    pub duration: Duration,
    /// The faults, in order.
    pub faults: Vec<ScheduledFault>,
}

/// The user of the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedUser {
    /// The one without a password.
    Default,
    /// One whose password changes.
    Rotating,
    /// One without permission for the commands that some services do not have.
    Restricted,
}

/// A fault with its start and end.
#[derive(Debug, Clone)]
pub struct ScheduledFault {
    /// Since the beginning of the run.
    pub from: Duration,
    /// Time of the repair, if it has not ended by itself.
    pub until: Duration,
    /// The fault.
    pub fault: Fault,
}

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Packets take longer.
    Slow,
    /// One direction between a process and all servers is cut, or both (`None`).
    Cut(ProcessId, Option<Direction>),
    /// The connections of a process are reset.
    Reset(ProcessId),
    /// Servers run some of the commands of the process and then reset the connection instead of answering.
    AnswersLost(ProcessId),
    /// The next packet of the process behind each message, grant and report of changed keys is lost, or its answer, or it
    /// is late. These signals come once.
    SignalsFail(ProcessId),
    /// The server is frozen.
    Freeze,
    /// The server is killed, and restarted with its data.
    Restart,
    /// The server is killed, and restarted without data.
    RestartEmpty,
    /// The server forgets all scripts.
    ForgetScripts,
    /// The password of the processes changes, and their connections are reset.
    PasswordChanged,
    /// The server's clock is set forward.
    StepClock(Duration),
    /// The server's clock is set back.
    StepClockBack(Duration),
    /// A process is stopped.
    Stop(ProcessId),
    /// A process is killed and replaced.
    Kill(ProcessId),
    /// The runtime of a process ends, which drops all tasks and guards; then the process is replaced.
    RuntimeDropped(ProcessId),
    /// The master of a group is killed, after its replicas have not received anything for a while. A replica is
    /// promoted, and the old master is restarted as a replica.
    MasterKilled {
        /// Which of the masters.
        group: usize,
        /// By how much the replicas are behind; zero if they are not.
        behind: Duration,
    },
    /// The master of a group is frozen until after a replica was promoted.
    MasterFrozen {
        /// Which of the masters.
        group: usize,
    },
    /// The master of a group is cut off from the other servers and Sentinels, but not from clients. A replica is
    /// promoted. The old master becomes a replica after the network is restored.
    MasterCutOff {
        /// Which of the masters.
        group: usize,
    },
    /// A replica is promoted in place of a healthy master, as an operator does.
    ManualFailover {
        /// Which of the masters.
        group: usize,
    },
    /// A replica is promoted while clients still reach the old master. They learn of that (the Sentinels publish
    /// it, or the old master answers MOVED), but for a while their queries for the new master fail.
    QueriesFail {
        /// Which of the masters.
        group: usize,
        /// Whether Sentinels receive the queries late, instead of refusing them.
        late: bool,
    },
    /// One Sentinel is frozen, or all of them, and clients have to reconnect to the master.
    SentinelsFrozen {
        /// Whether only one of them is frozen.
        one: bool,
    },
    /// The slots of all names move to other masters.
    SlotsMoved {
        /// The longest pause between the steps of a slot's move.
        pause: Duration,
    },
}

impl Fault {
    /// Whether the fault only breaks connections or empties the script cache. Clients continue without loss as
    /// soon as they have a new connection.
    fn is_minor(self) -> bool {
        matches!(
            self,
            Fault::Reset(_)
                | Fault::AnswersLost(_)
                | Fault::SignalsFail(_)
                | Fault::ForgetScripts
                | Fault::PasswordChanged
        )
    }
}

impl Plan {
    /// Draws the plan of a seed.
    pub fn draw(seed: u64) -> Plan {
        let mut random = Random::new(seed ^ 0x5eed_0f00_d1ce);
        let millis = Duration::from_millis;
        let jobs = draw_jobs(seed);
        let processes = (1 + random.below(3)).max(if jobs.is_empty() { 1 } else { 2 });
        let mut lease = millis(900 + 300 * random.below(8) as u64);
        let duration = random.between(lease, lease * 4);
        let mut names = draw_names(&mut random);
        match seed % 8 {
            2 | 6 => names.insert(0, format!("{}:0", FAIR[0])),
            4 => names.insert(0, format!("{}:0", FAIR[1])),
            _ => {}
        }
        let contended = ["fenced:few", "lock:few", "rw:few", "fair:few", "spin:few"];
        let contended = contended.into_iter().filter(|_| random.below(2) == 0);
        let mut contended_names: Vec<String> = contended.map(str::to_owned).collect();
        if contended_names.is_empty() {
            contended_names.push("fenced:few".to_owned());
        }
        let topology = match random.below(4) {
            0 | 1 => match seed % 8 {
                3 => Topology::Named,
                5 => Topology::Sharded,
                _ => Topology::Single,
            },
            2 => Topology::Sentinel,
            _ => Topology::Cluster,
        };
        let sync = match random.below(4) {
            0 => Sync::Off,
            1 if topology.replicas() > 0 => Sync::One,
            _ => Sync::All,
        };
        let only_minor = random.below(3) == 0;
        let mut faults = Vec::new();
        let mut at = lease / 2;
        for _ in 0..random.below(5) {
            at += random.between(Duration::ZERO, lease);
            let lasts = match random.below(12) {
                0 => random.between(TCP_USER_TIMEOUT / 2, TCP_USER_TIMEOUT * 3 / 2),
                1..5 => random.between(Duration::ZERO, lease / 6),
                5 => random.between(lease, lease * 6 / 5),
                _ => random.between(lease / 6, lease * 5 / 2),
            };
            let mut until = at + lasts;
            let process = random.below(processes);
            let fault = match random.below(if only_minor { 3 } else { 16 }) {
                0 => Fault::Reset(process),
                1 if seed % 4 == 1 => Fault::SignalsFail(process),
                1 => Fault::AnswersLost(process),
                2 => Fault::ForgetScripts,
                3 => Fault::Slow,
                4 => Fault::Cut(process, None),
                5 => Fault::Cut(process, Some(Direction::Up)),
                6 => Fault::Cut(process, Some(Direction::Down)),
                7 => Fault::Stop(process),
                8 if seed.is_multiple_of(3) => Fault::RuntimeDropped(process),
                8 => Fault::Kill(process),
                _ => match topology {
                    Topology::Single | Topology::Sharded => single_fault(&mut random),
                    Topology::Named => named_fault(&mut random, lease),
                    Topology::Sentinel => sentinel_fault(&mut random, lease),
                    Topology::Cluster => cluster_fault(&mut random, lease),
                },
            };
            // In half of the runs, some faults are replaced by another one.
            let fault = match fault {
                Fault::SentinelsFrozen { one: true } | Fault::MasterCutOff { .. }
                    if seed % 2 == 1 && topology == Topology::Sentinel =>
                {
                    // The old master stays alive until the first lease has ended at the new one.
                    until =
                        until.max(at + MAX_FAILOVER_TIME + QUERIES_FAIL_FOR * 4 + lease * 3 / 2);
                    let (group, late) = (0, seed % 4 == 1);
                    Fault::QueriesFail { group, late }
                }
                Fault::ManualFailover { group }
                    if seed % 2 == 1 && topology == Topology::Cluster =>
                {
                    let late = false;
                    Fault::QueriesFail { group, late }
                }
                fault => fault,
            };
            if fault == Fault::Freeze && topology.replicas() > 0 {
                // Longer would cause a failover, which is a fault of its own.
                until = until.min(at + lease / 6);
            }
            let from = at;
            faults.push(ScheduledFault { from, until, fault });
            at = until;
        }
        let cuts_off = |one: &ScheduledFault| {
            let queries_fail = matches!(one.fault, Fault::QueriesFail { .. });
            matches!(one.fault, Fault::MasterCutOff { .. })
                || queries_fail && topology == Topology::Sentinel
        };
        if sync == Sync::One && faults.iter().any(cuts_off) {
            // Renewals do not wait for replicas: with a lease that is shorter than a failover, a lock would expire
            // at the new master while the old one still renewed it.
            lease = lease.max(millis(3000)) * 4;
        }
        let duration = duration.max(at + lease);
        let duration = match jobs.is_empty() {
            true => duration,
            // Several slots of each job.
            false => duration.max(millis(12_000)),
        };
        let has_one_address = matches!(topology, Topology::Single | Topology::Named);
        // With one server, also with passwords that change; and behind a name.
        let lacks_resp3 = matches!(seed % 16, 10..=12) && has_one_address;
        let user = match seed % 8 {
            2 => PlannedUser::Rotating,
            4 if topology == Topology::Single && !lacks_resp3 => PlannedUser::Restricted,
            _ => PlannedUser::Default,
        };
        if user == PlannedUser::Rotating {
            add_password_changes(&mut faults, lease / 2, duration);
        }
        Plan {
            seed,
            user,
            lacks_resp3,
            topology,
            sync,
            failover_time: MAX_FAILOVER_TIME - millis(1_600 - random.below(1_600) as u64),
            processes,
            tasks: 1 + random.below(6),
            // Often several for each client, so that locks pass from one to the next.
            owners: random.below(3) * (1 + seed % 3) as usize,
            clients: 1 + random.below(2),
            chosen_ids: random.below(2) == 0,
            names,
            contended_names,
            jobs,
            permanent_locks: match random.below(16) {
                // In one of 64 such runs, 20 times as many. Such a run takes as long as 50 others.
                0 => (50 + random.below(250)) * if seed.is_multiple_of(64) { 20 } else { 1 },
                _ => 0,
            },
            // More than any buffer holds. Such a run takes as long as several others.
            flood: if seed % 64 == 7 { 5_000 } else { 0 },
            shuffles_tasks: seed % 2 == 1,
            uses_tickets: seed % 4 >= 2,
            uses_limits: seed % 8 >= 4,
            lease,
            // A quarter holds so briefly that locks pass from task to task.
            max_hold: millis(match random.below(300) as u64 {
                brief @ ..75 => 1 + brief / 15,
                long => 10 + long,
            }),
            check_interval: millis(if random.below(4) == 0 { 5 } else { 50 }),
            latency: millis(1 + random.below(20) as u64),
            duration,
            faults,
        }
    }

    /// Returns the names of all locks.
    pub fn all_names(&self) -> Vec<String> {
        let names = self.names.iter().chain(&self.contended_names);
        locks_of_all(names.chain(&self.jobs))
    }

    /// Returns whether all faults are minor. Then waiters acquire free locks promptly, and in their turn, when no
    /// fault is active.
    pub fn has_only_minor_faults(&self) -> bool {
        self.faults.iter().all(|one| one.fault.is_minor())
    }

    /// Returns the losses that the faults may cause.
    pub fn losses(&self) -> Losses {
        let is_short = |one: &ScheduledFault| one.until - one.from <= self.lease / 6;
        let is_harmless = |one: &ScheduledFault| match one.fault {
            Fault::Stop(_) | Fault::Kill(_) | Fault::RuntimeDropped(_) => true,
            Fault::SlotsMoved { .. } => true,
            // A new connection takes several answers, each of which may be lost.
            Fault::Freeze
            | Fault::SentinelsFrozen { .. }
            | Fault::AnswersLost(_)
            | Fault::SignalsFail(_) => is_short(one),
            fault => fault.is_minor(),
        };
        match self.faults.iter().all(is_harmless) {
            true => Losses::None,
            false => Losses::Any,
        }
    }
}

/// Adds changes of the password at this interval. A change that is due during another fault happens behind that fault.
fn add_password_changes(faults: &mut Vec<ScheduledFault>, interval: Duration, duration: Duration) {
    let times = (1..).map(|number| interval * number);
    let changes = times.take_while(|at| *at < duration);
    faults.extend(changes.map(|at| ScheduledFault {
        from: at,
        until: at,
        fault: Fault::PasswordChanged,
    }));
    faults.sort_by_key(|scheduled| scheduled.from);
}

/// Kinds that are drawn apart, so that the other seeds have the plans that they had.
const FAIR: [&str; 2] = ["fair-rw", "fair-permits"];

/// Draws jobs for a quarter of the seeds. Apart, so that the other seeds have the plans that they had.
fn draw_jobs(seed: u64) -> Vec<String> {
    let mut random = Random::new(seed ^ 0x6a_0b5);
    match random.below(4) {
        0 => jobs(|_| random.below(2) == 0),
        _ => Vec::new(),
    }
}

/// Draws one or two names for half of the kinds. The members of a multi-lock are also acquired alone.
fn draw_names(random: &mut Random) -> Vec<String> {
    let mut names = BTreeSet::new();
    let is_drawn_here = |kind: &&str| !FAIR.contains(kind);
    for kind in KINDS.into_iter().filter(is_drawn_here).chain(COUNTERS) {
        for number in 0..random.below(4).saturating_sub(1) {
            let name = format!("{kind}:{number}");
            if kind == "multi" {
                names.extend(locks_of(&name));
            }
            names.insert(name);
        }
    }
    if names.is_empty() {
        names.insert("lock:0".to_owned());
    }
    // Tasks prefer the first or the last ones.
    let mut names: Vec<String> = names.into_iter().collect();
    for at in (1..names.len()).rev() {
        names.swap(at, random.below(at + 1));
    }
    names
}

fn single_fault(random: &mut Random) -> Fault {
    match random.below(4) {
        0 => Fault::Freeze,
        1 => Fault::Restart,
        2 => Fault::RestartEmpty,
        _ => {
            let by = Duration::from_millis(random.below(4_000) as u64);
            match by.as_millis() % 2 {
                0 => Fault::StepClock(by),
                _ => Fault::StepClockBack(by),
            }
        }
    }
}

fn named_fault(random: &mut Random, lease: Duration) -> Fault {
    match random.below(4) {
        0 => Fault::Freeze,
        1 => Fault::ManualFailover { group: 0 },
        failed => Fault::MasterKilled {
            group: 0,
            behind: match failed {
                2 => Duration::ZERO,
                _ => random.between(Duration::from_millis(1), lease / 2),
            },
        },
    }
}

fn sentinel_fault(random: &mut Random, lease: Duration) -> Fault {
    match random.below(5) {
        0 => Fault::Freeze,
        1 | 2 => Fault::SentinelsFrozen {
            one: random.below(2) == 0,
        },
        _ => replication_fault(random, lease, 1),
    }
}

fn cluster_fault(random: &mut Random, lease: Duration) -> Fault {
    match random.below(5) {
        0 => Fault::Freeze,
        1 | 2 => Fault::SlotsMoved {
            pause: Duration::from_millis(random.below(200) as u64),
        },
        _ => replication_fault(random, lease, 3),
    }
}

fn replication_fault(random: &mut Random, lease: Duration, groups: usize) -> Fault {
    let group = random.below(groups);
    match random.below(5) {
        0 => Fault::MasterKilled {
            group,
            behind: Duration::ZERO,
        },
        1 => Fault::MasterKilled {
            group,
            behind: random.between(Duration::from_millis(1), lease / 2),
        },
        2 => Fault::MasterFrozen { group },
        3 => Fault::MasterCutOff { group },
        _ => Fault::ManualFailover { group },
    }
}
