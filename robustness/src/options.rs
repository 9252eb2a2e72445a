//! The command line.

use clap::{Args, Parser, Subcommand};

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
    /// Repeats the choices of an earlier run
    #[arg(long, env = "SEED")]
    pub(crate) seed: Option<u64>,
}
