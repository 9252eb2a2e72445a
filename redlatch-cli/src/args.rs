//! The command line.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Parser, Subcommand, value_parser};

use crate::duration;

/// Distributed locks on Redis and Valkey, from the command line.
///
/// The locks are those of Redisson: Java processes and Rust processes exclude each other by name.
#[derive(Debug, Parser)]
#[command(
    name = "redlatch",
    version,
    disable_help_subcommand = true,
    max_term_width = 100,
    after_help = "\
Examples:
  redlatch run nightly-backup -- ./backup.sh
  redlatch ls 'orders:*'

`redlatch <COMMAND> --help` tells all about a command."
)]
pub(crate) struct Args {
    /// The store: `redis://[user:password@]host[:port][/db]` or `redis+unix:///path`
    ///
    /// A password is better put into the environment: the command line is seen by every user of the
    /// machine.
    #[arg(
        long,
        global = true,
        env = "REDLATCH_URL",
        hide_env_values = true,
        default_value = "redis://127.0.0.1:6379"
    )]
    pub(crate) url: String,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Show(Show),
    Ls(Ls),
    Unlock(Unlock),
    #[command(name = "__exec", hide = true)]
    Exec(Exec),
}

/// Run CMD while holding the lock NAME.
///
/// Waits for the lock, runs CMD, and releases the lock when CMD ends. Meanwhile a watchdog renews the
/// lock's lease, so CMD may run as long as it likes, and should redlatch or the machine die, the lock
/// is free again when the lease ends.
///
/// CMD sees REDLATCH_LOCK (the name) and REDLATCH_OWNER (who holds the lock, as `redlatch show` tells
/// it). SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to it.
///
/// Should the lock be lost while CMD runs (its lease ended because the store could not be reached in
/// time or this process was stopped, or it was unlocked by force), then CMD is ended.
///
/// Unless standard input is a terminal, CMD gets a process group of its own, and signals go to all of
/// it, so that no child of CMD goes on without the lock. With a terminal, signals go to CMD alone.
/// What CMD leaves behind in the background when it ends by itself is let be. A CMD that asks the
/// terminal for something although standard input is none (a password, say) is stopped by it: give
/// redlatch the terminal as standard input.
///
/// Every run is an owner of its own: a CMD that runs redlatch again for the same NAME waits for itself.
///
/// If redlatch itself is killed (SIGKILL), the system kills CMD too; this works on Linux, for CMD but
/// not for its children, and not when CMD is a set-user-ID program such as sudo.
#[derive(Debug, clap::Args)]
#[command(after_help = RUN_EXAMPLES, after_long_help = format!("{RUN_EXAMPLES}\n\n{RUN_CODES}"))]
pub(crate) struct Run {
    /// Give up after this long if somebody else holds the lock [default: wait for ever]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,

    /// Give up at once if somebody else holds the lock
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Hold the lock for exactly this long at most, without a watchdog: CMD is ended then
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "watchdog"
    )]
    pub(crate) lease: Option<Duration>,

    /// The lease that the watchdog keeps renewing: how long others wait if this machine dies
    /// [default: 30s, at least 100ms]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) watchdog: Option<Duration>,

    /// How long CMD may go on after SIGTERM when the lock was lost, before SIGKILL
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        default_value = "5s"
    )]
    pub(crate) kill_after: Duration,

    /// The exit code when somebody else holds the lock, 0 to 255
    #[arg(
        short = 'E',
        long,
        value_name = "N",
        value_parser = value_parser!(u8),
        allow_hyphen_values = true,
        default_value_t = crate::exit::NOT_OBTAINED
    )]
    pub(crate) conflict_exit_code: u8,

    /// The lock's name: 1 to 512 bytes, without line breaks
    pub(crate) name: String,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

const RUN_EXAMPLES: &str = "\
Durations are written 300ms, 2s, 5m or 1h.

Examples:
  redlatch run nightly-backup -- ./backup.sh
  redlatch run --no-wait nightly-backup -- ./backup.sh    # skip it if it runs elsewhere
  redlatch run --wait 30s -E 0 deploy:web -- sh -c 'make && make install'";

const RUN_CODES: &str = "\
Exit codes:
  CMD's own; 128+n if signal n ended CMD, or ended the wait for the lock
    2  wrong usage: options, durations, the name, the URL
   65  the key NAME holds something that is no lock
   69  the store cannot be reached, or refused us (credentials, version)
   70  a mistake in redlatch
   71  the system refused something, such as one more process
   74  the lock was lost while CMD ran; CMD was ended
   75  somebody else holds the lock (or N of -E)
  126  CMD was found but cannot be executed
  127  CMD was not found";

/// Show who holds the lock NAME.
///
/// Prints a table, or with --json an object: name, kind, held, owner, holds and remaining_ms. A lock
/// that is free is one with held: false, 0 holds, and null for owner and remaining_ms. The latter is
/// null also for a held lock without an expiry.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  redlatch show nightly-backup
  redlatch show --json nightly-backup | jq .remaining_ms

Exit codes: 0 also when it is free; 2 wrong usage; 65 the key holds something that is no lock;
69 the store cannot be reached.")]
pub(crate) struct Show {
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The lock's name
    pub(crate) name: String,
}

/// List the locks that are held.
///
/// Looks with SCAN, which never holds the server up. Prints a table, or with --json one object per
/// line, like that of `redlatch show`; both sorted by name.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  redlatch ls
  redlatch ls 'orders:*'
  redlatch ls --json | jq -r .owner

Exit codes: 0 also when there are none; 2 wrong usage; 69 the store cannot be reached.")]
pub(crate) struct Ls {
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,

    /// Only names that match this glob pattern: *, ?, [a-z], \ to take the next one literally
    #[arg(default_value = "*")]
    pub(crate) pattern: String,
}

/// Take the lock NAME away from whoever holds it.
///
/// The holder learns of it at its next renewal; until then it goes on, beside whoever gets the lock
/// next. Prints whether anybody held it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  redlatch unlock --force nightly-backup

Exit codes: 0 also when nobody held it; 2 wrong usage, or no --force; 65 the key holds something
that is no lock; 69 the store cannot be reached.")]
pub(crate) struct Unlock {
    /// Really: the lock is somebody else's, and there is no other way to unlock it from here
    #[arg(long)]
    pub(crate) force: bool,

    /// The lock's name
    pub(crate) name: String,
}

/// Become CMD, bound to the life of the parent. Not for people: see `child`.
#[derive(Debug, clap::Args)]
pub(crate) struct Exec {
    pub(crate) parent: i32,

    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}
