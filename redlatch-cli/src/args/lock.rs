//! The command line of `redlatch lock` and `redlatch renew`.

use std::time::Duration;

use clap::{ValueHint, value_parser};
use redlatch::TicketKind;

use super::run::Waiting;
use crate::duration;
use crate::exit::NOT_ACQUIRED;

/// Acquire the lock NAME, print a ticket for it, and exit.
///
/// The lock stays held for --lease, although redlatch has ended. A process that has the ticket can
/// extend that time (`redlatch renew`), release the lock (`redlatch unlock --ticket`), or run a
/// command with it (`redlatch run --ticket`), on any machine. A program in Rust can adopt it. So a
/// lock can be held across the steps of a script or a pipeline. If a step never comes, the lock is
/// free when the lease ends.
///
/// The ticket is one line of letters, digits and . - _ ~, and contains a secret.
///
/// With --hold, prints no ticket and does not exit: it holds the lock until SIGINT, SIGTERM,
/// SIGQUIT or SIGHUP, releases it, and exits with 0. When it has acquired the lock, it prints the
/// owner, as in `redlatch show`, and with --fenced a space and the fencing token. If the lock is
/// lost, it exits with 74.
///
/// Like `redlatch run`, it waits for the lock, and for a store that cannot be reached. All users of
/// a NAME must use the same kind of lock. Readers and semaphores have no tickets.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch lock [OPTIONS] <NAME>",
    after_help = LOCK_EXAMPLES,
    after_long_help = format!("{LOCK_EXAMPLES}\n\n{LOCK_CODES}")
)]
pub(crate) struct Lock {
    #[command(flatten)]
    kind: LockKind,

    /// Make the token of --fenced follow the store's clock: it also grows after lost data, and leaves
    /// no key for ever. All users of NAME must do the same
    #[arg(long, requires = "fenced", help_heading = "Kinds of lock")]
    pub(crate) clock_tokens: bool,

    /// How long the lock stays held, unless the ticket is renewed or adopted
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "hold",
        default_value = "10m"
    )]
    pub(crate) lease: Duration,

    /// Hold the lock until a signal, instead of printing a ticket
    #[arg(long)]
    pub(crate) hold: bool,

    /// With --hold, the lease that the watchdog renews: how long others wait if this machine dies
    /// [default: 30s, at least 100ms]
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        requires = "hold"
    )]
    pub(crate) watchdog: Option<Duration>,

    #[command(flatten)]
    pub(crate) waiting: Waiting,

    /// The exit code when another owner holds the lock, 0 to 255
    #[arg(
        short = 'E',
        long,
        value_name = "N",
        value_parser = value_parser!(u8),
        allow_hyphen_values = true,
        default_value_t = NOT_ACQUIRED
    )]
    pub(crate) conflict_exit_code: u8,

    /// The lock's name: 1 to 512 bytes, without line breaks
    #[arg(value_hint = ValueHint::Other)]
    pub(crate) name: String,
}

impl Lock {
    pub(crate) fn kind(&self) -> TicketKind {
        match self.kind {
            LockKind { fair: true, .. } => TicketKind::Fair,
            LockKind { write: true, .. } => TicketKind::Write,
            LockKind { fenced: true, .. } => TicketKind::Fenced,
            LockKind { spin: true, .. } => TicketKind::Spin,
            _ => TicketKind::Lock,
        }
    }
}

/// The kinds of lock that have tickets.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(multiple = false)]
struct LockKind {
    /// Wait in the queue of all --fair waiters: first come, first served
    #[arg(long, help_heading = "Kinds of lock")]
    fair: bool,

    /// Hold a read-write lock for writing: exclusive
    #[arg(long, help_heading = "Kinds of lock")]
    write: bool,

    /// Count a fencing token, which the ticket contains, for a resource that rejects late writes
    #[arg(long, help_heading = "Kinds of lock")]
    fenced: bool,

    /// Poll, with growing pauses, instead of subscribing to a channel
    #[arg(long, help_heading = "Kinds of lock")]
    spin: bool,
}

const LOCK_EXAMPLES: &str = "\
Durations are written 300ms, 2s, 5m (or 5min), 1h or 1d; 5 means 5s.

Examples:
  REDLATCH_TICKET=$(redlatch lock deploy:web --lease 15m) || exit
  export REDLATCH_TICKET
  ./build.sh && redlatch renew && ./upload.sh
  redlatch unlock
  redlatch lock maintenance --hold        # until Ctrl-C";

const LOCK_CODES: &str = "\
Exit codes:
    0  the ticket was printed; with --hold the lock was released
  128+n  signal n ended the wait for the lock, or for the reader of the ticket
    2  wrong usage: options, durations, the name, the URL, the configuration file
   65  NAME is an object of another kind
   69  the store cannot be reached or refused the client (credentials, version),
       or too few replicas acknowledged the lock in time
   71  the ticket could not be written; the lock was released, or not requested if standard
       output is closed
   74  the lock was lost
   75  another owner holds the lock (or N of -E)";

/// Extend the lease of a ticket that `redlatch lock` has printed.
///
/// The lease ends after this time at the earliest. It is never shortened.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch renew [--ticket <TICKET>] [--lease <DUR>]",
    after_help = "\
Examples:
  redlatch renew --ticket \"$ticket\"
  redlatch renew --lease 1h               # of REDLATCH_TICKET

Exit codes: 0 extended; 2 wrong usage, or not a ticket; 69 the store cannot be reached;
71 standard input cannot be read; 74 the ticket was used, its lease has ended, it is forged, or it was revoked and can only be
extended to the limit that the message names."
)]
pub(crate) struct Renew {
    /// The ticket. `-` reads it from standard input, so that other users of the machine do not see
    /// it
    #[arg(
        long,
        env = "REDLATCH_TICKET",
        hide_env_values = true,
        value_name = "TICKET",
        allow_hyphen_values = true
    )]
    pub(crate) ticket: String,

    /// The new lease [default: that of `redlatch lock`]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) lease: Option<Duration>,
}
