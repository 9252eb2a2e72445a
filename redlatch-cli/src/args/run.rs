//! The command line of `redlatch run`, and what other commands that hold a lock share with it.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use clap::{ValueHint, value_parser};
use redlatch::{Client, Once, Slot};

use crate::duration;
use crate::exit::NOT_ACQUIRED;

/// Run CMD while holding the lock NAME, or several locks.
///
/// Waits for the lock, runs CMD, and releases the lock when CMD ends. Meanwhile a watchdog renews
/// the lock's lease, so CMD may run for any time. If redlatch or the machine dies, the lock becomes
/// free when the lease ends.
///
/// While redlatch waits, it also waits for a store that cannot be reached, for as long as --wait
/// and --outage-limit allow, and reports it on standard error. With --no-wait, and for permanent
/// errors (wrong credentials, TLS, the URL), it fails immediately.
///
/// All users of a NAME must use the same kind of lock. Plain, --fair, --fenced and --spin locks
/// exclude each other, but do not wake each other: a waiter of another kind retries only when the
/// lease would have ended.
///
/// CMD gets the variables REDLATCH_LOCK (the name, or the names separated by spaces, each once) and
/// REDLATCH_OWNER (the lock's owner, as in `redlatch show`), and with --fenced
/// REDLATCH_FENCING_TOKEN. It gets no passwords: those in REDLATCH_PASSWORD,
/// REDLATCH_SENTINEL_PASSWORD and REDLATCH_URL are removed, except with --keep-passwords. A
/// REDLATCH_URL that cannot be parsed becomes `invalid`.
///
/// With or without a terminal, the lock is released only after CMD has ended and, if a signal ended
/// it, after the last of its child processes has ended, too. If the lock is lost while they run
/// (its lease ended because the store could not be reached in time, it was unlocked by force, or
/// the time of --lease or --at-most has passed), redlatch ends them with SIGTERM, and with SIGKILL
/// after --kill-after. Others can acquire the lock meanwhile. On Linux, daemons that CMD has
/// started count as child processes; elsewhere, only processes in CMD's process group do.
///
/// If CMD ends without a signal, processes that it leaves behind continue without the lock. A
/// signal ended CMD if it died from one, if redlatch forwarded SIGINT, SIGTERM, SIGHUP or SIGQUIT
/// to it before it ended, or if its exit code is 128+n for a signal n.
///
/// redlatch forwards the signals that it receives to CMD's process group. SIGTSTP (Ctrl-Z), SIGTTIN
/// and SIGTTOU stop CMD, its child processes and redlatch together. Meanwhile the lease is not
/// renewed; on SIGCONT (`fg`) redlatch first checks the lock, and continues CMD only if it is still
/// held. Otherwise it kills CMD and its child processes at once. SIGINT, SIGTERM, SIGHUP and SIGQUIT
/// do not wait for that answer: CMD gets them if the lease has not ended. In a terminal, CMD is the
/// foreground job.
///
/// Before CMD runs, a signal that ends a process ends redlatch, also while it waits for the ticket
/// of `--ticket -`, for a password file or for the store. SIGINT, SIGQUIT and SIGTERM do so even if
/// the parent of redlatch ignores or blocks them. CMD starts with the signal mask and the ignored
/// signals of that parent; only SIGPIPE and SIGCHLD always have their default effects.
///
/// redlatch cannot react if it is killed by SIGKILL, is stopped by SIGSTOP or crashes. On Linux,
/// its death also kills CMD, but not child processes of CMD, and not a set-user-ID program such as
/// sudo. After SIGSTOP, CMD continues; it is ended after SIGCONT if the lock was lost.
///
/// Each run is a separate owner: a CMD that runs redlatch again for the same NAME waits for itself.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch run [OPTIONS] <NAME>... -- <CMD>...\n       redlatch run [OPTIONS] --ticket <TICKET> -- <CMD>...",
    after_help = RUN_EXAMPLES,
    after_long_help = format!("{RUN_EXAMPLES}\n\n{RUN_CODES}")
)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) kind: Kind,

    /// With --permits: if NAME has another number of permits, change it for all users
    #[arg(
        long,
        requires = "permits",
        conflicts_with_all = ["fair", "read", "write", "fenced", "spin"],
        help_heading = "Kinds of lock"
    )]
    pub(crate) set_permits: bool,

    /// Make the number of --fenced follow the store's clock: it also grows after lost data, and leaves
    /// no key for ever. All users of NAME must do the same
    #[arg(long, requires = "fenced", help_heading = "Kinds of lock")]
    pub(crate) clock_tokens: bool,

    #[command(flatten)]
    pub(crate) waiting: Waiting,

    /// Hold the lock at most this long, without a watchdog; CMD is ended when the time has passed
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "watchdog"
    )]
    pub(crate) lease: Option<Duration>,

    /// Hold the lock at most this long, although the watchdog renews it; CMD is ended when the time
    /// has passed. So a CMD that hangs does not keep the lock forever, and a machine that dies
    /// keeps it for one lease only
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "lease"
    )]
    pub(crate) at_most: Option<Duration>,

    /// Keep the lock for at least this long since it was acquired, also after CMD has ended. So a
    /// short CMD runs once although the clocks of the machines that start it differ; use it with
    /// -n. Not for several NAMEs
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with_all = ["read", "write", "permits", "once_per", "slot"]
    )]
    pub(crate) at_least: Option<Duration>,

    /// Run CMD at most once in each period of this length, on all machines: `1h` is each full hour
    /// of the server's clock (UTC). It is not repeated in that period if it fails or its machine
    /// dies. A later caller exits with 73 and prints which machine ran it. Not for several NAMEs
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "slot",
        help_heading = "Run once"
    )]
    pub(crate) once_per: Option<Duration>,

    /// Run CMD at most once for this text, such as the planned time 2026-11-22T02:00, within seven
    /// days
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = "Run once"
    )]
    pub(crate) slot: Option<String>,

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

    /// Instead of acquiring NAME, hold the lock of this ticket, which `redlatch lock` has printed,
    /// and release it when CMD has ended. `-` reads the first line of standard input. The ticket
    /// cannot be used again
    #[arg(
        long,
        value_name = "TICKET",
        allow_hyphen_values = true,
        conflicts_with_all = [
            "names", "fair", "read", "write", "fenced", "spin", "permits", "wait", "no_wait", "lease", "at_most",
            "at_least", "once_per", "slot",
        ]
    )]
    pub(crate) ticket: Option<String>,

    /// The lock's name: 1 to 512 bytes, without line breaks. With several names, all
    /// locks are held or none
    #[arg(required_unless_present = "ticket", value_name = "NAME", value_hint = ValueHint::Other)]
    pub(crate) names: Vec<String>,

    #[command(flatten)]
    pub(crate) cmd: Cmd,
}

impl Run {
    /// Returns the job that runs once for each slot, if it is one.
    pub(crate) fn once(&self, client: &Client) -> Option<Once> {
        let slot = match (&self.slot, self.once_per) {
            (Some(text), _) => Slot::from(&**text),
            (None, length) => Slot::per(length?),
        };
        // Several names are refused before.
        self.names.first().map(|name| client.once(name, slot))
    }
}

const RUN_EXAMPLES: &str = "\
Durations are written 300ms, 2s, 5m (or 5min), 1h or 1d; 5 means 5s.

Examples:
  redlatch run nightly-backup -- ./backup.sh
  redlatch run -n nightly-backup -- ./backup.sh       # or skip it
  redlatch run --wait 30s -E 0 deploy:web -- sh -c 'make && make install'
  redlatch run --at-most 2h import -- ./import.sh     # ended if it takes longer
  redlatch run -n --at-least 50s cleanup -- ./cleanup.sh     # from cron, on all machines
  redlatch run --once-per 1h report -- ./report.sh           # once an hour in the whole fleet
  redlatch run --permits 3 thumbnails -- ./render.sh  # at most three
  redlatch run account:1 account:2 -- ./transfer.sh   # both or none";

const RUN_CODES: &str = "\
Exit codes:
  CMD's own; 128+n if signal n ended CMD, or ended the wait for the lock
    2  wrong usage: options, durations, the name, the URL, the configuration file
   65  NAME is an object of another kind, or has another number of permits
   69  the store cannot be reached or refused the client (credentials, version),
       or too few replicas acknowledged the lock in time
   70  a bug in redlatch
   71  the system refused an operation, such as starting another process
   73  --once-per, --slot: CMD has run already
   74  the lock was lost while CMD or its children ran; they were ended, and a message
       names those that could not be
   75  another owner holds the lock (or N of -E)
  126  CMD was found but cannot be executed
  127  CMD was not found";

/// How long a command waits for a lock, and for the store.
#[derive(Debug, clap::Args)]
pub(crate) struct Waiting {
    /// Give up after this long if another owner holds the lock [default: wait forever]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,

    /// Give up immediately if another owner holds the lock
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Fail if the store cannot be reached for this long while redlatch waits, including at the
    /// start [default: wait through any outage]
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "no_wait"
    )]
    outage_limit: Option<Duration>,
}

impl Waiting {
    /// How long an outage of the store may last while `redlatch` waits; `None`: without a limit.
    /// With --no-wait it does not wait.
    pub(crate) fn outage_limit(&self) -> Option<Duration> {
        match self.no_wait {
            true => Some(Duration::ZERO),
            false => self.outage_limit,
        }
    }
}

/// CMD, and how it runs.
#[derive(Debug, clap::Args)]
pub(crate) struct Cmd {
    /// The lease that the watchdog renews: how long others wait if this machine dies
    /// [default: 30s, at least 100ms]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) watchdog: Option<Duration>,

    /// How long processes may take to end before SIGKILL: CMD and its children after the lock was
    /// lost, and CMD's children after a signal ended CMD
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        default_value = "5s"
    )]
    pub(crate) kill_after: Duration,

    /// How this run is called when others ask who holds the lock (`redlatch show`) [default: the
    /// name of CMD]
    #[arg(
        long,
        env = "REDLATCH_LABEL",
        hide_env_values = true,
        value_name = "TEXT"
    )]
    pub(crate) label: Option<String>,

    /// What this run does, for the same [default: the first words of CMD, up to an option]
    #[arg(long, value_name = "TEXT")]
    pub(crate) note: Option<String>,

    /// Also pass REDLATCH_PASSWORD, REDLATCH_SENTINEL_PASSWORD and the password in REDLATCH_URL
    /// to CMD, for a CMD that runs redlatch itself
    #[arg(long, help_heading = "Store")]
    pub(crate) keep_passwords: bool,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandName)]
    pub(crate) command: Vec<OsString>,
}

/// How many words of CMD are its note.
const NOTE_WORDS: usize = 4;

impl Cmd {
    /// Returns the label of the client: by default the name of CMD.
    pub(crate) fn label(&self) -> String {
        let cmd = self.command.first().map(Path::new);
        let name = cmd.and_then(Path::file_name).unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        self.label.clone().unwrap_or(name)
    }

    /// Returns the note of the lock: by default the first words of CMD. Without options, which may
    /// contain passwords.
    pub(crate) fn note(&self) -> String {
        let words = self.command.iter().map(|word| word.to_string_lossy());
        let is_plain =
            |word: &Cow<'_, str>| !word.starts_with('-') && !word.contains(['=', '@', '\n']);
        let words: Vec<_> = words.take(NOTE_WORDS).take_while(is_plain).collect();
        self.note.clone().unwrap_or_else(|| words.join(" "))
    }
}

/// The kind of the object NAME. All users of a name must use the same kind.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(multiple = false)]
pub(crate) struct Kind {
    /// Wait in the queue of all --fair waiters: first come, first served.
    /// Waiters that have died delay the others by at most 5 s in total
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) fair: bool,

    /// Hold a read-write lock for reading: shared with other readers, but not with a writer
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) read: bool,

    /// Hold a read-write lock for writing: exclusive
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) write: bool,

    /// Give CMD a number in REDLATCH_FENCING_TOKEN that increases with each acquisition, for a
    /// resource that rejects late writes
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) fenced: bool,

    /// Poll, with growing pauses, instead of subscribing to a channel
    #[arg(long, help_heading = "Kinds of lock")]
    pub(crate) spin: bool,

    /// Run at most N CMDs at a time on all machines: NAME is a semaphore of N permits, which
    /// remains in the store. All users must use the same N; another number is refused
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
    /// Returns what the object NAME is called in messages. Plain, fair, fenced and spin locks
    /// exclude each other, so each of them is "a lock".
    pub(crate) fn object_name(&self) -> &'static str {
        match self.permits {
            Some(_) => "expirable semaphore",
            None if self.read || self.write => "read-write lock",
            None => "lock",
        }
    }
}
