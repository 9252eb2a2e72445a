//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::clock::now;
use crate::deployment::Topology;
use crate::worker::WorkerOptions;

/// Injects faults into servers, networks and clients that use redlatch, and checks its locks.
#[derive(Debug, Parser)]
#[command(name = "redlatch-robustness", args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) rows: TableOptions,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs many clients with one random fault after the other
    Soak(SoakOptions),
    /// A client process, started by the other commands.
    #[command(hide = true)]
    Worker(WorkerOptions),
}

/// Which faults to run, and how.
#[derive(Debug, Args)]
pub(crate) struct TableOptions {
    /// Only faults whose name contains this text
    #[arg(long)]
    pub(crate) only: Option<String>,
    /// Only on these topologies
    #[arg(long)]
    pub(crate) topology: Vec<Topology>,
    /// Only lists the faults
    #[arg(long)]
    pub(crate) list: bool,
    /// A shorter lease, and each fault once, for a trial run
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of rows to run at a time; they mostly wait
    #[arg(long, default_value_t = 2)]
    pub(crate) at_once: usize,
    /// Writes the output of the workers, line by line, to a folder for each row
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
    /// Repeats the random choices of an earlier run
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Name of the network namespace that the program was started in, if it now runs in its own
    #[arg(long, hide = true)]
    pub(crate) outside: Option<String>,
}

/// Duration and size of the run.
#[derive(Debug, Args)]
pub(crate) struct SoakOptions {
    #[arg(long, default_value_t = 600)]
    pub(crate) seconds: u64,
    #[arg(long, default_value = "single")]
    pub(crate) topology: Topology,
    #[arg(long, default_value_t = 10)]
    pub(crate) processes: usize,
    /// Tasks of each process, each with its own owner
    #[arg(long, default_value_t = 50)]
    pub(crate) tasks: usize,
    /// Clients of each process, shared by its tasks; each has its own connections
    #[arg(long, default_value_t = 50)]
    pub(crate) clients: usize,
    #[arg(long, default_value_t = 50)]
    pub(crate) names: usize,
    /// Writes the output of the workers, line by line, to this folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
    /// Repeats the random choices of an earlier run
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

impl SoakOptions {
    pub(crate) fn seed(&self) -> u64 {
        seed(self.seed)
    }
}

impl TableOptions {
    pub(crate) fn seed(&self) -> u64 {
        seed(self.seed)
    }
}

fn seed(given: Option<u64>) -> u64 {
    given.unwrap_or_else(|| now().unsigned_abs() % 1_000_000_007)
}
