//! The command line.

use std::time::Duration;

use crate::LIBRARIES;

pub(crate) const USAGE: &str = "\
Usage: redlatch-bench-peers [--quick] WORKER...

Runs the libraries of these workers, which `tools/bench-peers` builds: rust, go, python, java.

  --quick       short rounds, for a trial run
";

pub(crate) struct Options {
    pub(crate) workers: Vec<String>,
    pub(crate) rounds: usize,
    pub(crate) round: Duration,
    pub(crate) wakes: usize,
    /// How long each polling interval is tried, and commands are counted.
    pub(crate) trial: Duration,
    pub(crate) warm_up: Duration,
    pub(crate) warm_up_java: Duration,
}

/// Parses the command line.
pub(crate) fn read(args: impl Iterator<Item = String>) -> Result<Options, String> {
    let (flags, workers): (Vec<String>, Vec<String>) = args.partition(|arg| arg.starts_with('-'));
    let known = |worker: &String| LIBRARIES.iter().any(|library| library.worker == worker);
    if let Some(unknown) = workers.iter().find(|worker| !known(worker)) {
        return Err(format!("unknown worker {unknown}"));
    }
    if workers.is_empty() {
        return Err("there is no worker".to_owned());
    }
    let (rounds, round, wakes, trial, warm_up, warm_up_java) = match &flags[..] {
        [] => (5, 700, 300, 400, 1000, 20_000),
        [quick] if quick == "--quick" => (3, 200, 30, 100, 200, 3000),
        _ => return Err(format!("unknown options {flags:?}")),
    };
    Ok(Options {
        workers,
        rounds,
        round: Duration::from_millis(round),
        wakes,
        trial: Duration::from_millis(trial),
        warm_up: Duration::from_millis(warm_up),
        warm_up_java: Duration::from_millis(warm_up_java),
    })
}
