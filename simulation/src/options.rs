//! The command line.

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::thread;

use clap::Parser;
use clap::error::ErrorKind;

/// Runs redlatch's client on a simulated network, clock and servers.
#[derive(Debug, Parser)]
#[command(name = "redlatch-simulation")]
pub(crate) struct Options {
    /// Number of seeds to run, from --first on. Default: as many as run in a minute.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) seeds: Option<u64>,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    pub(crate) first: u64,
    /// Number of threads that run seeds. Default: one for each core.
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Runs only this seed and prints its trace.
    #[arg(long, conflicts_with_all = ["seeds", "first", "threads"])]
    pub(crate) seed: Option<u64>,
}

impl Options {
    /// Reads the command line. An error is printed in one line.
    pub(crate) fn from_command_line() -> Result<Options, ExitCode> {
        Options::try_parse().map_err(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                // Standard output may be closed.
                let _ = error.print();
                ExitCode::SUCCESS
            }
            _ => {
                eprintln!("redlatch-simulation: {}", in_one_line(&error));
                ExitCode::from(2)
            }
        })
    }

    pub(crate) fn threads(&self) -> usize {
        let cores = || thread::available_parallelism().ok();
        self.threads.or_else(cores).map_or(1, NonZeroUsize::get)
    }
}

/// Returns the error without the usage that follows it.
fn in_one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let what = text.split("\n\n").next().unwrap_or(text);
    what.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(args: &[&str]) -> String {
        let args = ["redlatch-simulation"].iter().chain(args);
        in_one_line(&Options::try_parse_from(args).expect_err("an error"))
    }

    #[test]
    fn invalid_input_is_reported_in_one_line() {
        assert_eq!(
            error(&["--seeds", "many"]),
            "invalid value 'many' for '--seeds <SEEDS>': invalid digit found in string"
        );
        assert_eq!(
            error(&["--seeds", "0"]),
            "invalid value '0' for '--seeds <SEEDS>': 0 is not in 1..18446744073709551615"
        );
        assert_eq!(
            error(&["--seed", "1", "--first", "2"]),
            "the argument '--seed <SEED>' cannot be used with '--first <FIRST>'"
        );
        assert_eq!(error(&["--sed", "1"]), "unexpected argument '--sed' found");
    }
}
