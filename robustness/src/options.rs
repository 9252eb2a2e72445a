//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::clock::now;
use crate::site::Topology;
use crate::worker::Worker;

/// Breaks servers, networks and clients under redlatch's locks, and checks what became of them.
#[derive(Debug, Parser)]
#[command(name = "redlatch-robustness", args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) rows: Rows,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Many clients, and one thing after the other that breaks, drawn at random
    Soak(Soak),
    /// A client process, as the others start them.
    #[command(hide = true)]
    Worker(Worker),
}

/// Which faults, and how.
#[derive(Debug, Args)]
pub(crate) struct Rows {
    /// Only faults that have this in their name
    #[arg(long)]
    pub(crate) only: Option<String>,
    /// Only on these topologies
    #[arg(long)]
    pub(crate) topology: Vec<Topology>,
    /// What there is, and nothing else
    #[arg(long)]
    pub(crate) list: bool,
    /// A shorter lease, and each fault once: for trying out
    #[arg(long)]
    pub(crate) quick: bool,
    /// How many rows are run at once: they wait more than they work
    #[arg(long, default_value_t = 2)]
    pub(crate) at_once: usize,
    /// Keeps what the workers say, line by line, in a folder for each row
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
    /// Repeats the choices of an earlier run
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// What the network is called that the program was started in, if it is in one of its own now
    #[arg(long, hide = true)]
    pub(crate) outside: Option<String>,
}

/// How long, and with how many.
#[derive(Debug, Args)]
pub(crate) struct Soak {
    #[arg(long, default_value_t = 600)]
    pub(crate) seconds: u64,
    #[arg(long, default_value = "single")]
    pub(crate) topology: Topology,
    #[arg(long, default_value_t = 10)]
    pub(crate) processes: usize,
    /// Of each process: every one wants locks in the name of nobody else
    #[arg(long, default_value_t = 50)]
    pub(crate) tasks: usize,
    /// Of each process, for its tasks to share: every one has connections of its own
    #[arg(long, default_value_t = 50)]
    pub(crate) clients: usize,
    #[arg(long, default_value_t = 50)]
    pub(crate) names: usize,
    /// Keeps what the workers say, line by line
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
    /// Repeats the choices of an earlier run
    #[arg(long)]
    pub(crate) seed: Option<u64>,
}

impl Soak {
    pub(crate) fn seed(&self) -> u64 {
        seed(self.seed)
    }
}

impl Rows {
    pub(crate) fn seed(&self) -> u64 {
        seed(self.seed)
    }
}

fn seed(given: Option<u64>) -> u64 {
    given.unwrap_or_else(|| now().unsigned_abs() % 1_000_000_007)
}
