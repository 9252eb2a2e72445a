//! The command line.

use std::path::PathBuf;
use std::time::Duration;

pub(crate) const USAGE: &str = "\
Usage: redlatch-bench-redisson [OPTIONS]

  --quick       short rounds, for a trial run
  --json PATH   file for the results (target/bench-redisson.json)
";

pub(crate) struct Options {
    pub(crate) json: PathBuf,
    pub(crate) warm_up: Duration,
    pub(crate) rounds: usize,
    pub(crate) round: Duration,
    pub(crate) wakes: usize,
    pub(crate) locks: usize,
}

/// Parses the command line. Returns `None` if help is requested.
pub(crate) fn read(mut args: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options {
        json: concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bench-redisson.json").into(),
        warm_up: Duration::from_secs(25),
        rounds: 7,
        round: Duration::from_secs(2),
        wakes: 500,
        locks: 10_000,
    };
    while let Some(flag) = args.next() {
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--quick" => {
                options.warm_up = Duration::from_secs(3);
                options.rounds = 3;
                options.round = Duration::from_millis(300);
                options.wakes = 50;
                options.locks = 1000;
            }
            "--json" => options.json = args.next().ok_or("--json needs a path")?.into(),
            _ => return Err(format!("unknown option {flag}")),
        }
    }
    Ok(Some(options))
}
