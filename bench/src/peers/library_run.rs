//! The libraries, the scenarios, and the measurements of one library.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use redlatch_interop::{Library as Interop, Peer, Pending};
use redlatch_testkit::{Monitor, Server};
use serde_json::{Value, json};

use crate::options::Options;
use crate::samples::{median, micros, quantile, round};

pub(crate) struct Library {
    name: &'static str,
    /// The worker program that includes it.
    pub(crate) worker: &'static str,
    /// Whether its waiters poll, so that an interval must be chosen.
    polls: bool,
}

const fn library(name: &'static str, worker: &'static str, polls: bool) -> Library {
    Library {
        name,
        worker,
        polls,
    }
}

pub(crate) const LIBRARIES: [Library; 9] = [
    library("redlatch", "rust", false),
    library("rslock", "rust", true),
    library("distkit", "rust", true),
    library("distributed-lock-redis", "rust", true),
    library("redsync", "go", true),
    library("bsm/redislock", "go", true),
    library("rueidislock", "go", false),
    library("redis-py", "python", true),
    library("redisson", "java", false),
];

/// Intervals at which polling libraries are tried, in ms.
const INTERVALS: [u32; 5] = [1, 2, 5, 10, 50];

/// Processes of each library, because no scenario needs more.
const PROCESSES: usize = 4;

/// Tasks that acquire and release all the time.
pub(crate) struct Scenario {
    name: &'static str,
    command: &'static str,
    processes: usize,
    /// Tasks in each process.
    tasks: usize,
}

const fn scenario(
    name: &'static str,
    command: &'static str,
    processes: usize,
    tasks: usize,
) -> Scenario {
    Scenario {
        name,
        command,
        processes,
        tasks,
    }
}

/// In `free` each task has a name of its own, in `one_name` all compete for one.
pub(crate) const SCENARIOS: [Scenario; 5] = [
    scenario("free_1", "pairs", 1, 1),
    scenario("free_16", "pairs", 1, 16),
    scenario("free_128", "pairs", 1, 128),
    scenario("one_name_1x16", "contend", 1, 16),
    scenario("one_name_4x4", "contend", 4, 4),
];
/// With this one the polling interval is chosen.
const ONE_NAME: &Scenario = &SCENARIOS[3];

struct Round {
    pairs_per_s: f64,
    /// Pairs of each task.
    turns: Vec<u64>,
}

/// A library with its worker processes and results.
pub(crate) struct LibraryRun {
    library: &'static Library,
    /// In ms, if it polls.
    interval: Option<u32>,
    processes: Vec<Peer>,
    /// If it polls: two processes with the shortest interval, for wake-ups.
    wake_processes: Vec<Peer>,
    /// For each scenario.
    rounds: [Vec<Round>; SCENARIOS.len()],
    commands_per_pair: [f64; SCENARIOS.len()],
    /// Times from the release to the acquisition in another process, in µs.
    wakes: Vec<f64>,
}

impl LibraryRun {
    pub(crate) fn start(
        library: &'static Library,
        server: &Server,
        options: &Options,
    ) -> LibraryRun {
        let interval = library
            .polls
            .then(|| best_interval(library, server, options));
        let start = |count: usize, interval: u32| {
            let processes = (0..count).map(|_| start(library, server, interval));
            processes.collect()
        };
        LibraryRun {
            library,
            interval,
            processes: start(PROCESSES, interval.unwrap_or_default()),
            wake_processes: start(if library.polls { 2 } else { 0 }, INTERVALS[0]),
            rounds: Default::default(),
            commands_per_pair: Default::default(),
            wakes: Vec::new(),
        }
    }

    /// Returns the name and version of the library, and its interval.
    pub(crate) fn title(&self) -> String {
        let polls = |ms| format!(", polls every {ms} ms");
        let polls = self.interval.map_or_else(String::new, polls);
        format!("{}{polls}", self.processes[0].library_version())
    }

    /// Runs until a virtual machine has compiled the frequently executed code.
    pub(crate) fn warm_up(&mut self, options: &Options) {
        let time = match self.library.worker {
            "java" => options.warm_up_java,
            _ => options.warm_up,
        };
        // Most of it in all processes, because the code for one name must be compiled in each.
        let weights = [1, 1, 1, 3, 6];
        for (scenario, weight) in SCENARIOS.iter().zip(weights) {
            self.run(scenario, time * weight / weights.iter().sum::<u32>());
        }
        self.measure_wakes(10);
        self.wakes.clear();
    }

    /// Counts the commands that clients send. Statistics of the server do not separate them from those that scripts call.
    pub(crate) fn count_commands(&mut self, server: &Server, options: &Options) {
        self.commands_per_pair = SCENARIOS.each_ref().map(|scenario| {
            let mut monitor = Monitor::start(server);
            let round = self.run(scenario, options.trial);
            monitor.count_sent(server) as f64 / round.turns.iter().sum::<u64>() as f64
        });
    }

    /// Measures one round of a scenario.
    pub(crate) fn measure(&mut self, scenario: usize, options: &Options) {
        let round = self.run(&SCENARIOS[scenario], options.round);
        self.rounds[scenario].push(round);
    }

    fn run(&self, scenario: &Scenario, time: Duration) -> Round {
        run(&self.processes[..scenario.processes], scenario, time)
    }

    /// Measures the time from calling release in one process to the acquisition in another.
    pub(crate) fn measure_wakes(&mut self, wakes: usize) {
        let processes = match self.library.polls {
            true => &self.wake_processes,
            false => &self.processes,
        };
        let [holder, waiter] = [0, 1].map(|process| processes[process].worker(1));
        for _ in 0..wakes {
            assert!(holder.run_bool("lock lock wake -1 -1"));
            let waiting = waiter.send("lock lock wake -1 -1");
            // Long enough for the waiter to try, to subscribe, to retry and to sleep. It varies, because a polling
            // waiter is at a different point of its interval each time.
            let share = (self.wakes.len() as f64 * 0.618_034).fract();
            std::thread::sleep(Duration::from_millis(10).mul_f64(1.0 + share));
            let released = holder.send("unlock lock wake").answer();
            let acquired = waiting.answer();
            assert!(waiter.run_bool("unlock lock wake"));
            let took = u64::try_from(acquired.ended - released.started);
            let took = took.expect("it was acquired while it was held");
            self.wakes.push(micros(Duration::from_nanos(took)));
        }
    }

    /// Returns all results.
    pub(crate) fn json(&self) -> Value {
        let mut row = json!({
            "name": self.library.name,
            "version": self.processes[0].library_version(),
            "polls_every_ms": self.interval,
            "wake_p50_us": round(median(&self.wakes), 1),
            "wake_p99_us": round(quantile(&self.wakes, 0.99), 1),
        });
        for (index, scenario) in SCENARIOS.iter().enumerate() {
            let rounds = self.rounds[index].iter();
            let median = |of: fn(&Round) -> f64| median(&Vec::from_iter(rounds.clone().map(of)));
            row[scenario.name] = json!({
                "pairs_per_s": round(median(|round| round.pairs_per_s), 0),
                "commands_per_pair": round(self.commands_per_pair[index], 3),
                "fewest_turns": round(median(|round| round.share(round.turns.iter().min())), 3),
                "most_turns": round(median(|round| round.share(round.turns.iter().max())), 3),
            });
        }
        row
    }
}

impl Round {
    /// Compares the turns of a task with an equal share.
    fn share(&self, turns: Option<&u64>) -> f64 {
        let equal = self.turns.iter().sum::<u64>() as f64 / self.turns.len() as f64;
        turns.copied().unwrap_or_default() as f64 / equal
    }
}

/// Returns the interval with the most pairs per second on one name.
fn best_interval(library: &Library, server: &Server, options: &Options) -> u32 {
    let rate = |interval: u32| {
        let peer = [start(library, server, interval)];
        run(&peer, ONE_NAME, options.trial / 2);
        run(&peer, ONE_NAME, options.trial).pairs_per_s
    };
    let rates = INTERVALS.map(|interval| (interval, rate(interval)));
    let best = rates
        .into_iter()
        .max_by(|(_, one), (_, other)| one.total_cmp(other));
    best.expect("there are intervals").0
}

fn start(library: &Library, server: &Server, interval: u32) -> Peer {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = root.join("../target/peers");
    let mut command = match library.worker {
        "rust" => Command::new(built.join("rust/release/redlatch-bench-peers-rust")),
        "go" => Command::new(built.join("redlatch-bench-peers-go")),
        "python" => Command::new(built.join("python/bin/python")),
        _ => return Interop::Redisson.start(&[], &[server.url()]),
    };
    if library.worker == "python" {
        command.arg(root.join("peers/python/worker.py"));
    }
    command.args([library.name, &server.url(), &interval.to_string()]);
    Peer::start(command)
}

/// Runs the tasks in these processes.
fn run(processes: &[Peer], scenario: &Scenario, time: Duration) -> Round {
    let Scenario {
        name,
        command,
        tasks,
        ..
    } = scenario;
    let line = format!("{command} lock {name} {tasks} {}", time.as_millis());
    let begun = Instant::now();
    let sent: Vec<Pending> = processes
        .iter()
        .map(|peer| peer.worker(1).send(&line))
        .collect();
    let turns: Vec<u64> = sent.into_iter().flat_map(Pending::numbers).collect();
    let pairs: u64 = turns.iter().sum();
    Round {
        pairs_per_s: pairs as f64 / begun.elapsed().as_secs_f64(),
        turns,
    }
}
