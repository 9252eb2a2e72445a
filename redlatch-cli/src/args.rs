//! The command line.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Parser, Subcommand, value_parser};

use crate::access::Access;
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

`redlatch <COMMAND> --help` describes a command in full."
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) access: Access,

    #[command(flatten)]
    pub(crate) output: Output,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How much is printed on standard error.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct Output {
    /// Print only errors and lost locks: the exit code says the rest
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Print also when a lock is acquired and released, and what the connection does. The variable
    /// REDLATCH_LOG (else RUST_LOG) selects log events in detail, such as `debug` or `redlatch=trace`
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Show(Show),
    Ls(Ls),
    Unlock(Unlock),
    Latch(Latch),
    Token(Token),
    #[command(name = "__exec", hide = true)]
    Exec(Exec),
}

/// Run CMD while holding the lock NAME, or several.
///
/// Waits for the lock, runs CMD, and releases the lock when CMD ends. Meanwhile a watchdog renews the
/// lock's lease, so CMD may run as long as it likes, and should redlatch or the machine die, the lock
/// is free again when the lease ends.
///
/// While redlatch waits, it also waits for a store that cannot be reached, for as long as --wait and
/// --outage-limit allow, and says so on standard error. With --no-wait, and for errors that do not pass
/// by themselves (wrong credentials, TLS, the URL), it fails at once.
///
/// Everybody must give a NAME the same kind. Plain, --fair, --fenced and --spin exclude each other, but
/// do not call each other: a waiter of another kind looks again only when the lease would have ended.
///
/// CMD sees REDLATCH_LOCK (the name, or names with a space between them, each once) and REDLATCH_OWNER
/// (who holds the lock, as `redlatch show` tells it), and with --fenced REDLATCH_FENCING_TOKEN. It does
/// not see passwords: what REDLATCH_PASSWORD, REDLATCH_SENTINEL_PASSWORD and REDLATCH_URL have of them
/// is left out, unless --keep-passwords.
///
/// With or without a terminal, the lock is released only after CMD has ended and, if a signal ended it,
/// after the last of its child processes has ended, too. If the lock is lost while they run (its lease
/// ended because the store could not be reached in time, or it was unlocked by force), they are ended, too.
/// They get SIGTERM, and SIGKILL after --kill-after. On Linux daemons that CMD has started count as child
/// processes; elsewhere only CMD's process group does.
///
/// Processes that CMD leaves behind when it ends by itself run on, without the lock. CMD was ended by a
/// signal if it died of one, if redlatch passed SIGINT, SIGTERM, SIGHUP or SIGQUIT on to it before it ended,
/// or if its exit code is 128+n for a signal n.
///
/// Signals that redlatch receives are passed on to CMD's process group. SIGTSTP (Ctrl-Z), SIGTTIN and
/// SIGTTOU stop CMD, its child processes and redlatch together. The lease is not renewed then; on
/// SIGCONT (`fg`) redlatch asks for the lock first, and continues CMD only if it is still held. In a
/// terminal CMD is the foreground job.
///
/// redlatch can do nothing when it is ended by SIGKILL, stopped by SIGSTOP or crashes. On Linux the system
/// then kills CMD with it, but not child processes of CMD, and not a set-user-ID program such as sudo.
/// After SIGSTOP CMD runs on, and is ended after SIGCONT if the lock was lost.
///
/// Every run is an owner of its own: a CMD that runs redlatch again for the same NAME waits for itself.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch run [OPTIONS] <NAME>... -- <CMD>...",
    after_help = RUN_EXAMPLES,
    after_long_help = format!("{RUN_EXAMPLES}\n\n{RUN_CODES}")
)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) kind: Kind,

    /// With --permits: should NAME have another number of permits, change it for all
    #[arg(
        long,
        requires = "permits",
        conflicts_with_all = ["fair", "read", "write", "fenced", "spin"],
        help_heading = "Kinds of lock"
    )]
    pub(crate) set_permits: bool,

    /// Give up after this long if another owner holds the lock [default: wait for ever]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,

    /// Give up at once if another owner holds the lock
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Fail if the store cannot be reached for this long while redlatch waits, also at the start
    /// [default: wait through any outage]
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "no_wait"
    )]
    pub(crate) outage_limit: Option<Duration>,

    /// Hold the lock at most this long, without a watchdog: CMD is ended then
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

    /// How long processes may take to end before SIGKILL: CMD and its children after the lock was lost,
    /// and CMD's children after a signal ended CMD
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        default_value = "5s"
    )]
    pub(crate) kill_after: Duration,

    /// The exit code when another owner holds the lock, 0 to 255
    #[arg(
        short = 'E',
        long,
        value_name = "N",
        value_parser = value_parser!(u8),
        allow_hyphen_values = true,
        default_value_t = crate::exit::NOT_OBTAINED
    )]
    pub(crate) conflict_exit_code: u8,

    /// Let CMD have REDLATCH_PASSWORD and REDLATCH_SENTINEL_PASSWORD and the password in
    /// REDLATCH_URL too, because it runs redlatch itself
    #[arg(long, help_heading = "Store")]
    pub(crate) keep_passwords: bool,

    /// The lock's name: 1 to 512 bytes, without line breaks. Of several, all are held or none
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

impl Run {
    /// How long an outage of the store may last while `redlatch` waits. With --no-wait it does not wait.
    pub(crate) fn outage_limit(&self) -> Duration {
        match self.no_wait {
            true => Duration::ZERO,
            false => self.outage_limit.unwrap_or(Duration::MAX),
        }
    }
}

/// What NAME is. A name is used in one way by everybody.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(multiple = false)]
pub(crate) struct Kind {
    /// Wait in one queue with all that wait with --fair: first come, first served.
    /// Waiters that die delay the others by 5 s in all when the turn of one of them comes
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) fair: bool,

    /// Hold the read side of a read-write lock: together with other readers, not with a writer
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) read: bool,

    /// Hold the write side of a read-write lock: alone
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) write: bool,

    /// Give CMD a number in REDLATCH_FENCING_TOKEN that is greater each time, for a resource that
    /// refuses what comes late
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) fenced: bool,

    /// Ask again and again, with growing pauses, instead of subscribing to a channel
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) spin: bool,

    /// At most N CMDs at once in the whole fleet: NAME is a semaphore of N permits, and stays in the
    /// store. Everybody says the same N; another one is refused
    #[arg(
        long,
        value_name = "N",
        value_parser = value_parser!(u32).range(1..=1_000_000),
        allow_hyphen_values = true,
        help_heading = "Kinds of lock"
    )]
    pub(crate) permits: Option<u32>,
}

impl Kind {
    /// What NAME is then, as `show` has it.
    pub(crate) fn noun(&self) -> &'static str {
        match self.permits {
            Some(_) => "expirable semaphore",
            None if self.read || self.write => "read-write lock",
            None => "lock",
        }
    }
}

const RUN_EXAMPLES: &str = "\
Durations are written 300ms, 2s, 5m (or 5min), 1h or 1d; 5 means 5s.

Examples:
  redlatch run nightly-backup -- ./backup.sh
  redlatch run -n nightly-backup -- ./backup.sh       # or skip it
  redlatch run --wait 30s -E 0 deploy:web -- sh -c 'make && make install'
  redlatch run --permits 3 thumbnails -- ./render.sh  # at most three
  redlatch run account:1 account:2 -- ./transfer.sh   # both or none";

const RUN_CODES: &str = "\
Exit codes:
  CMD's own; 128+n if signal n ended CMD, or ended the wait for the lock
    2  wrong usage: options, durations, the name, the URL
   65  NAME is something of another kind, or has another number of permits
   69  the store cannot be reached or refused the client (credentials, version),
       or too few replicas acknowledged the lock in time
   70  a mistake in redlatch
   71  the system refused something, such as one more process
   74  the lock was lost while CMD or its children ran; they were ended
   75  another owner holds the lock (or N of -E)
  126  CMD was found but cannot be executed
  127  CMD was not found";

/// Show what NAME is and who holds it.
///
/// Knows locks of every kind, with who waits in the queue of a fair lock and all readers, semaphores and
/// latches. Prints a table, or with --json an object: name, kind, held, owner, holds and remaining_ms;
/// where they mean something also token (of a fenced lock), holders (of a read-write lock), queue (of a
/// fair lock), value (of a semaphore or latch), available, total and permits (of an expirable semaphore).
/// A semaphore is held when all of its permits are taken.
/// A name under which there is nothing is a lock that is free, or a latch that is open: kind, owner and
/// remaining_ms are null, held is false. remaining_ms is null also for what never expires.
///
/// REMAINING is when it ends by itself unless it is renewed; of who waits in a queue, when it is passed
/// over if it does not answer.
///
/// A semaphore and a latch are both a number in the store and look the same.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch show [OPTIONS] <NAME>",
    after_help = "\
Examples:
  redlatch show nightly-backup
  redlatch show --json nightly-backup | jq .remaining_ms

Exit codes: 0 also when it is free; 2 wrong usage; 65 the key holds something of another kind;
69 the store cannot be reached."
)]
pub(crate) struct Show {
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The name
    pub(crate) name: String,
}

/// List what there is: locks that are held, semaphores, latches.
///
/// Looks with SCAN, which never holds the server up. Any key with a whole number in it could be a
/// semaphore or a latch, and is listed. Prints a table, or with --json one object per
/// line, like that of `redlatch show`; both sorted by name.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch ls [OPTIONS] [PATTERN]",
    after_help = "\
Examples:
  redlatch ls
  redlatch ls 'orders:*'
  redlatch ls --json | jq -r 'select(.held) | .owner'

Exit codes: 0 also when there are none; 2 wrong usage; 69 the store cannot be reached."
)]
pub(crate) struct Ls {
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,

    /// Only names that match this glob pattern: *, ?, [a-z], \ to take the next one literally
    #[arg(default_value = "*")]
    pub(crate) pattern: String,
}

/// Take the lock NAME away from whoever holds it; of a read-write lock, all readers.
///
/// The holder learns of it at its next renewal; until then it goes on, beside whoever gets the lock
/// next. Prints whether anybody held it.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch unlock [OPTIONS] <NAME>",
    after_help = "\
Example:
  redlatch unlock --force nightly-backup

Exit codes: 0 also when nobody held it; 2 wrong usage, or no --force;
65 NAME is something of another kind; 69 the store cannot be reached."
)]
pub(crate) struct Unlock {
    /// Really: the lock is somebody else's, and there is no other way to unlock it from here
    #[arg(long)]
    pub(crate) force: bool,

    /// The lock's name
    pub(crate) name: String,
}

/// Count the latch NAME down, wait for it, or set it.
///
/// A latch is a number that is counted down; who waits for it goes on when it reaches 0. A latch that was
/// never set, or that has reached 0, is open: nobody waits for it.
///
/// So a latch that is gone is open: after FLUSHALL, eviction or a restart without persistence all
/// waiters go on, and so does who waits before it was set.
///
/// An idle semaphore and a latch look the same in the store, and a plain semaphore always looks like
/// one: take care not to count a semaphore down. One of `run --permits` that is in use is refused.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch latch [OPTIONS] <NAME> <COMMAND>",
    after_help = "\
Examples:
  redlatch latch import:42 set 3          # three parts have to be loaded
  redlatch latch import:42 count-down     # each says when it is done
  redlatch latch import:42 wait --for 1h && ./publish.sh

Exit codes: 0 done; 2 wrong usage; 65 NAME is something of another kind;
69 the store cannot be reached; 75 set: it was set already, or wait: it was not open in time."
)]
pub(crate) struct Latch {
    /// The latch's name
    pub(crate) name: String,

    #[command(subcommand)]
    pub(crate) command: LatchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LatchCommand {
    /// Set an open latch to N; prints N. Whether it was open is the exit code
    #[command(override_usage = "redlatch latch [OPTIONS] <NAME> set <N>")]
    Set {
        /// How often it has to be counted down
        #[arg(value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
        n: u32,
    },
    /// Count it down; prints what is left
    #[command(override_usage = "redlatch latch [OPTIONS] <NAME> count-down [--by <N>]")]
    CountDown {
        /// By so many at once
        #[arg(
            long,
            value_name = "N",
            default_value_t = 1,
            value_parser = value_parser!(u32).range(1..),
            allow_hyphen_values = true
        )]
        by: u32,
    },
    /// Wait until it is open
    #[command(
        override_usage = "redlatch latch [OPTIONS] <NAME> wait [--for <DUR>] [--outage-limit <DUR>]"
    )]
    Wait {
        /// Give up after this long [default: wait for ever]
        #[arg(
            long = "for",
            value_name = "DUR",
            value_parser = duration::parse,
            allow_hyphen_values = true
        )]
        limit: Option<Duration>,

        /// Fail if the store cannot be reached for this long [default: wait through any outage]
        #[arg(
            long,
            value_name = "DUR",
            value_parser = duration::parse,
            allow_hyphen_values = true
        )]
        outage_limit: Option<Duration>,
    },
}

/// Show the fencing token of the lock NAME, raise it, or delete it.
///
/// The token is the number that `redlatch run --fenced` gives CMD in REDLATCH_FENCING_TOKEN: it grows with
/// each acquisition. Without a subcommand, prints the token of the latest acquisition; 0 if there was none.
///
/// After the store has lost its data, tokens count from 1 again, and a resource that remembers a greater
/// token refuses every holder. Advance the token to the greatest one that the resource has seen.
///
/// Each name keeps its token for ever. Delete it when no resource remembers a token of NAME any more.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch token [OPTIONS] <NAME> [COMMAND]",
    after_help = "\
Examples:
  redlatch token orders:42
  redlatch token orders:42 advance 7000   # the next acquisition gets 7001
  redlatch token orders:42 delete

Exit codes: 0 done; 2 wrong usage; 65 NAME is something of another kind;
69 the store cannot be reached; 75 delete: the lock is held."
)]
pub(crate) struct Token {
    /// The lock's name
    pub(crate) name: String,

    #[command(subcommand)]
    pub(crate) command: Option<TokenCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Raise the token to at least N, never lower it; prints the token then
    #[command(override_usage = "redlatch token [OPTIONS] <NAME> advance <N>")]
    Advance {
        /// The greatest token that the resource has seen
        #[arg(
            value_name = "N",
            value_parser = value_parser!(u64).range(..=redlatch::MAX_TOKEN),
            allow_hyphen_values = true
        )]
        at_least: u64,
    },
    /// Delete the token of a lock that is free; the next acquisition gets 1
    #[command(override_usage = "redlatch token [OPTIONS] <NAME> delete")]
    Delete,
}

/// Become CMD, bound to the life of the parent. Not for people: see `child`.
#[derive(Debug, clap::Args)]
pub(crate) struct Exec {
    /// Go to the foreground of the terminal first
    #[arg(long)]
    pub(crate) foreground: bool,

    pub(crate) parent: i32,

    #[arg(last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}
