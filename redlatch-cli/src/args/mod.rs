//! The command line.

pub(crate) mod change;
pub(crate) mod config;
pub(crate) mod cron;
#[cfg(test)]
mod documented_commands;
pub(crate) mod elect;
pub(crate) mod lock;
pub(crate) mod run;
pub(crate) mod show;

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::time::Duration;

use clap::{Arg, CommandFactory as _, Parser, Subcommand, ValueEnum, ValueHint};

use self::change::{Latch, Token, Unlock};
pub(crate) use self::cron::RunJob;
use self::cron::{Cron, Jobs};
use self::elect::{Elect, parse_address};
use self::lock::{Lock, Renew};
use self::run::Run;
use self::show::{Deadlocks, Ls, Show, Top, Watch, Why};
use crate::duration;
use crate::output::{LogFormat, Output};
use crate::store::args::StoreArgs;

/// Distributed locks on Redis and Valkey, from the command line.
///
/// The locks are those of Redisson: Java processes and Rust processes exclude each other by name.
#[derive(Debug, Parser)]
#[command(
    name = "redlatch",
    // Not the name with which it was started.
    bin_name = "redlatch",
    version,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = "\
Examples:
  redlatch run nightly-backup -- ./backup.sh
  redlatch ls 'orders:*'

`redlatch <COMMAND> --help` describes a command in full."
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) store_args: StoreArgs,

    /// The configuration file to read, instead of $XDG_CONFIG_HOME/redlatch.toml (by default
    /// ~/.config/redlatch.toml) and /etc/redlatch.toml
    ///
    /// Its keys are the names of the store's options, such as `url` and `tls-ca`, and `log-format`.
    /// Options override environment variables, which override the user's file, which overrides
    /// /etc/redlatch.toml.
    #[arg(
        long,
        global = true,
        env = "REDLATCH_CONFIG",
        hide_env_values = true,
        value_name = "FILE",
        value_hint = ValueHint::FilePath,
        help_heading = "Configuration"
    )]
    pub(crate) config: Option<OsString>,

    #[command(flatten)]
    pub(crate) output: Output,

    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// Returns what parses the command line and the environment. An empty variable counts as unset.
    pub(crate) fn parser() -> clap::Command {
        without_empty_variables(Args::command())
    }
}

fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty =
        |variable: &OsStr| std::env::var_os(variable).is_some_and(|value| value.is_empty());
    let arg = |arg: Arg| match arg.get_env().is_some_and(is_empty) {
        true => arg.env(None),
        false => arg,
    };
    command
        .mut_args(arg)
        .mut_subcommands(without_empty_variables)
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Elect(Elect),
    Cron(Cron),
    Jobs(Jobs),
    Show(Show),
    Ls(Ls),
    Why(Why),
    Deadlocks(Deadlocks),
    Watch(Watch),
    Lock(Lock),
    Renew(Renew),
    Unlock(Unlock),
    Latch(Latch),
    Token(Token),
    Top(Top),
    Doctor(Doctor),
    #[command(alias = "exporter")]
    Serve(Serve),
    Completions(Completions),
}

/// Commands for redlatch itself and its package. They are not part of [`Command`], because
/// completions would list them even if they were hidden.
#[derive(Debug, Parser)]
#[command(name = "redlatch")]
pub(crate) enum InternalCommand {
    #[command(name = InternalCommand::EXEC)]
    Exec(Exec),
    #[command(name = InternalCommand::JOB)]
    Job(RunJob),
    #[cfg(feature = "man")]
    #[command(name = InternalCommand::MAN)]
    Man(Man),
}

impl InternalCommand {
    pub(crate) const EXEC: &str = "__exec";
    pub(crate) const JOB: &str = "__job";
    const MAN: &str = "__man";

    /// Returns whether `first`, the first argument of redlatch, is an internal command.
    pub(crate) fn is_named(first: &OsStr) -> bool {
        first == Self::EXEC || first == Self::JOB || (cfg!(feature = "man") && first == Self::MAN)
    }
}

/// Check what works on the store, and what to change.
///
/// Uses the main features as a program would, by two clients on names of its own that begin with
/// `redlatch-doctor:`, and asks the servers for their settings, and the sentinels for the master. It
/// takes some seconds, and deletes what it made, also after a signal that ends it.
///
/// Each line has a state: ok; note, a limit to know about; degraded, works less well; failed. A
/// line that begins with change: says what to do about it.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch doctor [OPTIONS]",
    after_help = "\
Examples:
  redlatch doctor
  redlatch doctor --url rediss://redis.example:6380 --json

Exit codes: 0 everything works; 1 something failed or is degraded; 2 wrong usage;
69 the store cannot be reached, or locks do not work on it; 128+n ended by signal n."
)]
pub(crate) struct Doctor {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Serve a page with all locks to browsers, and metrics to Prometheus.
///
/// GET / is a page that shows the locks with their holders and waiters, possible deadlocks,
/// elections and jobs, live. GET /metrics has the number of objects, holders and waiters of each kind, with
/// --names also of each name. GET /api/state has what the page shows, as JSON, and GET /healthz
/// tells whether the store answers. Nothing that is served changes a lock. The services that use
/// the locks need no change; they can export their own waiting times and losses with the library's
/// feature `metrics`.
///
/// It looks at the store every --interval, and every --refresh while a page is open, once for all
/// of them. It continues through an outage of the store, and says since when its data are stale;
/// meanwhile redlatch_exporter_up is 0.
///
/// The command was called `redlatch exporter`, and still can be.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch serve [OPTIONS] [PATTERN]",
    after_help = "\
Examples:
  redlatch serve
  redlatch serve --names 'jobs:*' --listen 0.0.0.0:9187

Exit codes: 2 wrong usage; 71 the address cannot be used; 128+n ended by signal n."
)]
pub(crate) struct Serve {
    /// Objects whose names match this glob pattern
    #[arg(default_value = "*", value_hint = ValueHint::Other)]
    pub(crate) pattern: String,

    /// The address to listen on; anyone who reaches it can read the names of locks and who holds them
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "127.0.0.1:9187",
        value_parser = parse_address
    )]
    pub(crate) listen: SocketAddr,

    /// The time between two looks at the store, at least 100ms; a look that takes longer is
    /// followed by a pause as long
    #[arg(
        long,
        value_name = "DUR",
        default_value = "15s",
        value_parser = duration::parse_pause,
        allow_hyphen_values = true
    )]
    pub(crate) interval: Duration,

    /// The same while a page is open, at least 100ms
    #[arg(
        long,
        value_name = "DUR",
        default_value = "1s",
        value_parser = duration::parse_pause,
        allow_hyphen_values = true
    )]
    pub(crate) refresh: Duration,

    /// Metrics also of each name, at most 1000 of them
    #[arg(long)]
    pub(crate) names: bool,
}

/// Print a script that completes options and commands of redlatch in a shell.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch completions <SHELL>",
    after_help = "\
The Debian package installs the scripts. Without it, write them to these files:
  bash  ~/.local/share/bash-completion/completions/redlatch
  zsh   _redlatch in a directory of $fpath
  fish  ~/.config/fish/completions/redlatch.fish

Examples:
  redlatch completions fish > ~/.config/fish/completions/redlatch.fish
  . <(redlatch completions bash)      # only in the current bash"
)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: Shell,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Write the man pages to DIR, for packages.
#[cfg(feature = "man")]
#[derive(Debug, clap::Args)]
pub(crate) struct Man {
    pub(crate) dir: std::path::PathBuf,
}

/// Become CMD, bound to the lifetime of the parent. Internal: see `child`.
#[derive(Debug, clap::Args)]
pub(crate) struct Exec {
    /// Go to the foreground of the terminal first
    #[arg(long)]
    pub(crate) foreground: bool,

    #[arg(long)]
    pub(crate) log_format: Option<LogFormat>,

    /// The number of a signal that redlatch has blocked, and CMD's parent has not
    #[arg(long)]
    pub(crate) unblock: Vec<i32>,

    /// Unblock all signals
    #[arg(long)]
    pub(crate) unblock_all: bool,

    pub(crate) parent: i32,

    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They may have passwords in the wrong place, and characters that control the terminal.
    #[test]
    fn help_does_not_show_the_values_of_variables() {
        let mut commands = vec![Args::command()];
        while let Some(command) = commands.pop() {
            commands.extend(command.get_subcommands().cloned());
            for arg in command
                .get_arguments()
                .filter(|arg| arg.get_env().is_some())
            {
                assert!(arg.is_hide_env_values_set(), "{}", arg.get_id());
            }
        }
    }
}
