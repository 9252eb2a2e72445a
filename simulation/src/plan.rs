//! What a run is made of, all of it drawn from the seed: processes, names, timings, and what breaks when.

use std::time::Duration;

use redlatch_robustness::random::Random;
use redlatch_robustness::worker::KINDS;

use crate::network::{Direction, ProcessId};

/// One run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// All chance comes from here.
    pub seed: u64,
    /// How many client processes there are at first.
    pub processes: usize,
    /// How many tasks each has.
    pub tasks: usize,
    /// How many owners of each process are shared by two tasks.
    pub owners: usize,
    /// How many clients each process has.
    pub clients: usize,
    /// Whether the clients have ids of the user's choice, which a restarted process has again.
    pub chosen_ids: bool,
    /// What is locked, `kind:number` each.
    pub names: Vec<String>,
    /// What the shared owners lock.
    pub few: Vec<String>,
    /// The watchdog's lease.
    pub lease: Duration,
    /// How long a lock is held at most, by most tasks.
    pub inside: Duration,
    /// How long a packet takes at most.
    pub latency: Duration,
    /// How long things go on.
    pub duration: Duration,
    /// What breaks, in order.
    pub faults: Vec<Scheduled>,
}

/// A fault, and when it begins and ends.
#[derive(Debug, Clone)]
pub struct Scheduled {
    /// Since the beginning of the run.
    pub from: Duration,
    /// What is left of it ends then.
    pub until: Duration,
    /// What it is.
    pub fault: Fault,
}

/// What breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Packets take longer.
    Slow,
    /// Both directions between a process and the server are cut, or one.
    Cut(ProcessId, Option<Direction>),
    /// The connections of a process are reset.
    Reset(ProcessId),
    /// The server stands still.
    Freeze,
    /// The server is killed, and started again with its data.
    Restart,
    /// The server is killed, and started again without data.
    RestartEmpty,
    /// The server forgets all scripts.
    ForgetScripts,
    /// The server's clock is set forward.
    StepClock(Duration),
    /// A process stands still.
    Stop(ProcessId),
    /// A process is killed, and another one is started in its place.
    Kill(ProcessId),
}

impl Plan {
    /// Draws the plan of a seed.
    pub fn draw(seed: u64) -> Plan {
        let mut random = Random::new(seed ^ 0x5eed_0f00_d1ce);
        let millis = Duration::from_millis;
        let processes = 1 + random.below(3);
        let lease = millis(900 + 300 * random.below(8) as u64);
        let duration = lease * 4 + millis(random.below(40_000) as u64);
        let mut names = Vec::new();
        for kind in KINDS {
            for number in 0..random.below(3) {
                names.push(format!("{kind}:{number}"));
            }
        }
        if names.is_empty() {
            names.push("lock:0".to_owned());
        }
        let few = ["fenced:few", "lock:few", "rw:few", "fair:few"];
        let few = few.into_iter().filter(|_| random.below(2) == 0);
        let mut few: Vec<String> = few.map(str::to_owned).collect();
        if few.is_empty() {
            few.push("fenced:few".to_owned());
        }
        let mut faults = Vec::new();
        let mut at = lease / 2;
        for _ in 0..random.below(7) {
            at += millis(random.below(6_000) as u64);
            let until = at + millis(50 + random.below(9_000) as u64);
            let process = random.below(processes);
            let fault = match random.below(12) {
                0 => Fault::Slow,
                1 => Fault::Cut(process, None),
                2 => Fault::Cut(process, Some(Direction::Up)),
                3 => Fault::Cut(process, Some(Direction::Down)),
                4 => Fault::Reset(process),
                5 => Fault::Freeze,
                6 => Fault::Restart,
                7 => Fault::RestartEmpty,
                8 => Fault::ForgetScripts,
                9 => Fault::StepClock(millis(random.below(4_000) as u64)),
                10 => Fault::Stop(process),
                _ => Fault::Kill(process),
            };
            let from = at;
            faults.push(Scheduled { from, until, fault });
            at = until;
        }
        let duration = duration.max(at + lease);
        Plan {
            seed,
            processes,
            tasks: 1 + random.below(6),
            owners: random.below(3),
            clients: 1 + random.below(2),
            chosen_ids: random.below(2) == 0,
            names,
            few,
            lease,
            inside: millis(5 + random.below(100) as u64),
            latency: millis(1 + random.below(20) as u64),
            duration,
            faults,
        }
    }
}
