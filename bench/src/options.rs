//! The command line.

use std::path::PathBuf;
use std::time::Duration;

pub(crate) const USAGE: &str = "\
Usage: redlatch-bench [OPTIONS]

  --quick           short rounds and few locks, for a trial run
  --only TEXT       only the benchmarks whose names contain TEXT: lock_pairs, visibility_pairs,
                    lock_contended, lock_sections, multi_lock_names, lock_server_cost, lock_wake,
                    primitive_pairs, primitive_wake, scale_held, scale_waiting, scale_processes,
                    callers. `scale` then includes its largest rows: 1000000 held locks and 100
                    processes
  --locks N         scale_held holds 1000 locks, 10000 and so on, at most N (100000; with --only
                    1000000)
  --window SECONDS  how long scale_held measures each number of locks (20)
  --callers SECONDS duration of each run of the callers benchmark (10)
  --json PATH       file for the results (target/bench.json)
";

pub(crate) enum Command {
    Help,
    Bench(Options),
    /// Internal: the peer process of the wake-up measurement.
    WakePeer {
        url: String,
        kind: String,
        name: String,
    },
    /// Internal: a process of the benchmark `scale_processes`.
    Contender {
        url: String,
        hand_over: bool,
    },
    /// Internal: measures one row of a table.
    Row(Vec<String>),
}

pub(crate) struct Options {
    pub(crate) quick: bool,
    only: Option<String>,
    pub(crate) json: PathBuf,
    /// Number of rounds of redlatch and of the bare scripts, each.
    pub(crate) rounds: usize,
    /// Duration of a round.
    pub(crate) round: Duration,
    /// How long tasks contend for one name.
    pub(crate) contended: Duration,
    /// Pairs per round whose cost on the server is measured.
    pub(crate) cost_pairs: usize,
    /// Largest number of locks that `scale_held` holds.
    pub(crate) locks: usize,
    /// Largest number of tasks in `scale_waiting`.
    pub(crate) waiting: usize,
    /// Largest number of processes in `scale_processes`.
    pub(crate) processes: usize,
    /// How long `scale_held` measures each number of locks.
    pub(crate) window: Duration,
    /// The watchdog lease while many locks are held.
    pub(crate) lease: Duration,
    /// Number of measured wake-ups.
    pub(crate) wakes: usize,
    /// How long callers arrive at a dead, frozen or slow server.
    pub(crate) callers: Duration,
}

impl Options {
    fn full() -> Options {
        Options {
            quick: false,
            only: None,
            json: concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bench.json").into(),
            rounds: 40,
            round: Duration::from_millis(300),
            contended: Duration::from_secs(5),
            cost_pairs: 20_000,
            locks: 100_000,
            waiting: 100_000,
            processes: 10,
            window: Duration::from_secs(20),
            lease: Duration::from_secs(30),
            wakes: 2000,
            callers: Duration::from_secs(10),
        }
    }

    fn quick() -> Options {
        Options {
            quick: true,
            rounds: 5,
            round: Duration::from_millis(100),
            contended: Duration::from_millis(500),
            cost_pairs: 2000,
            locks: 10_000,
            waiting: 10_000,
            processes: 10,
            window: Duration::from_secs(3),
            lease: Duration::from_secs(3),
            wakes: 200,
            callers: Duration::from_secs(3),
            ..Options::full()
        }
    }

    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only))
    }
}

/// Parses the command line. `names` are those of all benchmarks.
pub(crate) fn read(args: impl Iterator<Item = String>, names: &[&str]) -> Result<Command, String> {
    let args: Vec<String> = args.collect();
    match &args[..] {
        [flag, url, kind, name] if flag == "--wake-peer" => {
            let [url, kind, name] = [url, kind, name].map(Clone::clone);
            return Ok(Command::WakePeer { url, kind, name });
        }
        [flag, url, hand_over] if flag == "--contender" => {
            let (url, hand_over) = (url.clone(), hand_over == "true");
            return Ok(Command::Contender { url, hand_over });
        }
        [flag, row @ ..] if flag == "--row" => return Ok(Command::Row(row.to_vec())),
        _ => {}
    }
    // These are applied first, wherever they appear, so that other options override their values.
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    let mut options = match has("--quick") {
        true => Options::quick(),
        false if has("--only") => Options {
            locks: 1_000_000,
            processes: 100,
            ..Options::full()
        },
        false => Options::full(),
    };
    let mut args = args.into_iter();
    while let Some(flag) = args.next() {
        let mut value = || args.next().ok_or(format!("{flag} needs a value"));
        match flag.as_str() {
            "--help" | "-h" => return Ok(Command::Help),
            "--quick" => {}
            "--only" => options.only = Some(value()?),
            "--locks" => options.locks = parse_positive(&flag, &value()?)?,
            "--window" => {
                options.window = Duration::from_secs(parse_positive(&flag, &value()?)?);
            }
            "--callers" => {
                options.callers = Duration::from_secs(parse_positive(&flag, &value()?)?);
            }
            "--json" => options.json = value()?.into(),
            _ => return Err(format!("unknown option {flag}")),
        }
    }
    if names.iter().any(|name| options.wants(name)) {
        Ok(Command::Bench(options))
    } else {
        Err(format!(
            "--only: no benchmark has such a name; use one of: {}",
            names.join(", ")
        ))
    }
}

fn parse_positive<N: std::str::FromStr + Default + PartialEq>(
    flag: &str,
    text: &str,
) -> Result<N, String> {
    match text.parse() {
        Ok(number) if number != N::default() => Ok(number),
        _ => Err(format!("{flag}: {text:?} is not a number above 0")),
    }
}
