//! The command line.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum, ValueHint, value_parser};
use redlatch::{Client, Once, Slot};

use crate::stderr::{LogFormat, Output};
use crate::store_args::StoreArgs;
use crate::ticket_args::{Lock, Renew};
use crate::{duration, http};

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

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Elect(Elect),
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
    Exporter(Exporter),
    Completions(Completions),
}

/// Commands for redlatch itself and its package. They are not part of [`Command`], because completions
/// would list them even if they were hidden.
#[derive(Debug, Parser)]
#[command(name = "redlatch")]
pub(crate) enum InternalCommand {
    #[command(name = InternalCommand::EXEC)]
    Exec(Exec),
    #[cfg(feature = "man")]
    #[command(name = InternalCommand::MAN)]
    Man(Man),
}

impl InternalCommand {
    pub(crate) const EXEC: &str = "__exec";
    const MAN: &str = "__man";

    /// Returns whether `first`, the first argument of redlatch, is an internal command.
    pub(crate) fn is_named(first: &OsStr) -> bool {
        first == Self::EXEC || (cfg!(feature = "man") && first == Self::MAN)
    }
}

/// Run CMD while holding the lock NAME, or several locks.
///
/// Waits for the lock, runs CMD, and releases the lock when CMD ends. Meanwhile a watchdog renews the
/// lock's lease, so CMD may run for any time. If redlatch or the machine dies, the lock becomes free when
/// the lease ends.
///
/// While redlatch waits, it also waits for a store that cannot be reached, for as long as --wait and
/// --outage-limit allow, and reports it on standard error. With --no-wait, and for permanent errors
/// (wrong credentials, TLS, the URL), it fails immediately.
///
/// All users of a NAME must use the same kind of lock. Plain, --fair, --fenced and --spin locks exclude
/// each other, but do not wake each other: a waiter of another kind retries only when the lease would have
/// ended.
///
/// CMD gets the variables REDLATCH_LOCK (the name, or the names separated by spaces, each once) and
/// REDLATCH_OWNER (the lock's owner, as in `redlatch show`), and with --fenced REDLATCH_FENCING_TOKEN. It
/// gets no passwords: those in REDLATCH_PASSWORD, REDLATCH_SENTINEL_PASSWORD and REDLATCH_URL are removed,
/// except with --keep-passwords. A REDLATCH_URL that cannot be parsed becomes `invalid`.
///
/// With or without a terminal, the lock is released only after CMD has ended and, if a signal ended it,
/// after the last of its child processes has ended, too. If the lock is lost while they run (its lease
/// ended because the store could not be reached in time, it was unlocked by force, or the time of --lease or
/// --at-most has passed), redlatch ends them with SIGTERM, and with SIGKILL after --kill-after. Others can
/// acquire the lock meanwhile. On Linux, daemons that CMD has started count as child
/// processes; elsewhere, only processes in CMD's process group do.
///
/// If CMD ends without a signal, processes that it leaves behind continue without the lock. A signal ended
/// CMD if it died from one, if redlatch forwarded SIGINT, SIGTERM, SIGHUP or SIGQUIT to it before it ended,
/// or if its exit code is 128+n for a signal n.
///
/// redlatch forwards the signals that it receives to CMD's process group. SIGTSTP (Ctrl-Z), SIGTTIN and
/// SIGTTOU stop CMD, its child processes and redlatch together. Meanwhile the lease is not renewed;
/// on SIGCONT (`fg`) redlatch first checks the lock, and continues CMD only if it is still held.
/// Otherwise it kills CMD and its child processes at once. In a terminal, CMD is the foreground
/// job.
///
/// Before CMD runs, a signal that ends a process ends redlatch, also while it waits for the ticket
/// of `--ticket -`, for a password file or for the store. SIGINT, SIGQUIT and SIGTERM do so even if
/// the parent of redlatch ignores or blocks them. CMD starts with the signal mask and the ignored
/// signals of that parent; only SIGPIPE and SIGCHLD always have their default effects.
///
/// redlatch cannot react if it is killed by SIGKILL, is stopped by SIGSTOP or crashes. On Linux, its death
/// also kills CMD, but not child processes of CMD, and not a set-user-ID program such as sudo. After
/// SIGSTOP, CMD continues; it is ended after SIGCONT if the lock was lost.
///
/// Each run is a separate owner: a CMD that runs redlatch again for the same NAME waits for itself.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch run [OPTIONS] <NAME>... -- <CMD>...",
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

    /// Hold the lock at most this long, although the watchdog renews it; CMD is ended when the time has passed.
    /// So a CMD that hangs does not keep the lock forever, and a machine that dies keeps it for one lease only
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "lease"
    )]
    pub(crate) at_most: Option<Duration>,

    /// Keep the lock for at least this long since it was acquired, also after CMD has ended. So a short CMD runs
    /// once although the clocks of the machines that start it differ; use it with -n. Not for several NAMEs
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with_all = ["read", "write", "permits", "once_per", "slot"]
    )]
    pub(crate) at_least: Option<Duration>,

    /// Run CMD at most once in each period of this length, on all machines: `1h` is each full hour of
    /// the server's clock (UTC). It is not repeated in that period if it fails or its machine dies. A later
    /// caller exits with 73 and prints which machine ran it. Not for several NAMEs
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        conflicts_with = "slot",
        help_heading = "Run once"
    )]
    pub(crate) once_per: Option<Duration>,

    /// Run CMD at most once for this text, such as the planned time 2026-11-22T02:00, within seven days
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
        default_value_t = crate::exit::NOT_ACQUIRED
    )]
    pub(crate) conflict_exit_code: u8,

    /// Instead of acquiring NAME, hold the lock of this ticket, which `redlatch lock` has printed, and release it when CMD
    /// has ended. `-` reads the first line of standard input. The ticket cannot be used again
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

/// How long a command waits for a lock, and for the store.
#[derive(Debug, clap::Args)]
pub(crate) struct Waiting {
    /// Give up after this long if another owner holds the lock [default: wait forever]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,

    /// Give up immediately if another owner holds the lock
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Fail if the store cannot be reached for this long while redlatch waits, including at the start
    /// [default: wait through any outage]
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
    /// How long an outage of the store may last while `redlatch` waits; `None`: without a limit. With
    /// --no-wait it does not wait.
    pub(crate) fn outage_limit(&self) -> Option<Duration> {
        match self.no_wait {
            true => Some(Duration::ZERO),
            false => self.outage_limit,
        }
    }
}

/// Run CMD as long as this process is the leader of the election NAME, or print who leads.
///
/// Waits until it is elected, and runs CMD. Of all processes that run `redlatch elect NAME`, one leads at a time; the others
/// wait for their turn in the order in which they started. When CMD ends, the next one leads, and redlatch exits with CMD's
/// exit code. A leader whose machine dies is succeeded when its lease ends (--watchdog).
///
/// If the leadership is lost while CMD runs (its lease ended because the store could not be reached in time, or the lock was
/// unlocked by force), redlatch ends CMD and its children with SIGTERM, and with SIGKILL after --kill-after. Then it waits to be
/// elected again, and runs CMD again. If it was asked to end meanwhile (SIGINT, SIGTERM, SIGHUP, SIGQUIT), it exits instead.
/// The same if another client asks for the lock (`redlatch unlock --ask`): it resigns, and waits
/// behind the other candidates.
///
/// CMD gets the variables REDLATCH_EPOCH, a number that is greater than those of all earlier leaders, for a resource that
/// rejects late writes; REDLATCH_LOCK (the name) and REDLATCH_OWNER (the id of this candidate). What `redlatch run` says
/// about passwords, signals, Ctrl-Z, child processes and terminals holds here, too.
///
/// With --observe it is no candidate: it prints the current leader and each change, until it is ended. A line is time (UTC),
/// epoch, id and value; without a leader `-  -  -`. With --json, it prints an object per line: time, epoch, leader and value,
/// which are null without a leader.
///
/// With --http it answers GET /leader with 200 if this process leads and 503 if it does not, and a JSON object: name, leads,
/// and of the current leader epoch, leader and value. GET /healthz is 200 while the store answers,
/// and 503 during an outage. It listens before it reaches the store, and until then answers 503.
///
/// In the store an election is the fair lock of the same name, so `redlatch show NAME` shows leader and candidates.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch elect [OPTIONS] <NAME> -- <CMD>...\n       redlatch elect --observe [--json] <NAME>",
    mut_arg("command", |command| command.required(false).required_unless_present("observe")),
    after_help = ELECT_EXAMPLES,
    after_long_help = format!("{ELECT_EXAMPLES}\n\n{ELECT_CODES}")
)]
pub(crate) struct Elect {
    /// What observers see of this leader, such as its address [default: the name of this machine]
    #[arg(long, value_name = "TEXT")]
    pub(crate) value: Option<String>,

    /// Answer GET /leader and GET /healthz on this address; anyone who reaches it can read the leader
    #[arg(long, value_name = "ADDR", value_parser = http::parse_address)]
    pub(crate) http: Option<SocketAddr>,

    /// Print the leader and its changes instead
    #[arg(
        long,
        conflicts_with_all = ["value", "http", "outage_limit", "watchdog", "kill_after", "note", "keep_passwords", "command"]
    )]
    pub(crate) observe: bool,

    /// With --observe: print one JSON object per line
    // Also conflicts: clap does not require what conflicts with an argument that is there.
    #[arg(long, requires = "observe", conflicts_with = "command")]
    pub(crate) json: bool,

    /// Fail if the store cannot be reached for this long while redlatch waits, including at the start
    /// [default: wait through any outage]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) outage_limit: Option<Duration>,

    /// The election's name: 1 to 512 bytes, without line breaks
    #[arg(value_hint = ValueHint::Other)]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) cmd: Cmd,
}

const ELECT_EXAMPLES: &str = "\
Examples:
  redlatch elect scheduler -- ./scheduler
  redlatch elect scheduler --value 10.0.0.7:8080 --http 127.0.0.1:4040 -- ./scheduler
  redlatch elect scheduler --observe --json | jq -r .value";

const ELECT_CODES: &str = "\
Exit codes:
  CMD's own; 128+n if signal n ended CMD, or ended the wait; with --observe 0 when the reader of a pipe ends
    2  wrong usage: options, durations, the name, the URL, the configuration file
   65  NAME is an object of another kind
   69  the store cannot be reached or refused the client (credentials, version),
       or too few replicas acknowledged the lock in time
   70  a bug in redlatch
   71  the system refused an operation, such as starting another process
   74  the leadership was lost, and CMD had ended, a signal had asked redlatch to end, or
       processes of CMD could not be ended
  126  CMD was found but cannot be executed
  127  CMD was not found";

/// CMD, and how it runs.
#[derive(Debug, clap::Args)]
pub(crate) struct Cmd {
    /// The lease that the watchdog renews: how long others wait if this machine dies
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

    /// How this run is called when others ask who holds the lock (`redlatch show`) [default: the name of CMD]
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

    /// Returns the note of the lock: by default the first words of CMD. Without options, which may contain passwords.
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

    /// Run at most N CMDs at a time on all machines: NAME is a semaphore of N permits, which remains
    /// in the store. All users must use the same N; another number is refused
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
    /// Returns what the object NAME is called in messages. Plain, fair, fenced and spin locks exclude each
    /// other, so each of them is "a lock".
    pub(crate) fn object_name(&self) -> &'static str {
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

/// Show the kind and the holder of NAME.
///
/// Supports locks of every kind, with the waiters of a fair lock and all readers, semaphores and
/// latches. Prints a table, or with --json an object: name, kind, held, owner, holds and remaining_ms;
/// where applicable also token (of a fenced lock), holders (of a read-write lock), queue (of a
/// fair lock), registered (if its client has registered who it is: host, pid, program, version, label, kind, since, age_ms and
/// note), value (of a semaphore or latch), available, total and permits (of an expirable semaphore).
/// A semaphore is held when all of its permits are taken.
/// A name that does not exist in the store is a free lock or an open latch: kind, owner and remaining_ms
/// are null, held is false. remaining_ms is also null for objects that never expire.
///
/// With --quiet, prints nothing: the exit code is 0 if NAME is held, and 1 if it is free. NAME is held if
/// `held` is true in JSON, that is if another owner would have to wait. Locks are held if they have a
/// holder, read-write locks also if it is a reader; semaphores if no permit is available. A latch is
/// never held: for a latch that is not open, `redlatch latch NAME wait --for 0` exits with 75.
///
/// REMAINING is the time until the hold expires if it is not renewed; for a waiter in a queue, the time
/// until it is skipped if it does not respond.
///
/// A semaphore and a latch are both a number in the store and cannot be distinguished.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch show [OPTIONS] <NAME>",
    after_help = "\
Examples:
  redlatch show nightly-backup
  redlatch show --json nightly-backup | jq .remaining_ms
  redlatch show -q nightly-backup && echo 'the backup is running'

Exit codes: 0 also if it is free; with --quiet 1 if it is free; 2 wrong usage;
65 the key holds data of another kind; 69 the store cannot be reached."
)]
pub(crate) struct Show {
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The name
    #[arg(value_hint = ValueHint::Other)]
    pub(crate) name: String,
}

/// List held locks, semaphores and latches.
///
/// Uses SCAN, which does not block the server. Any key that holds an integer could be a semaphore or a
/// latch, and is listed. Prints a table, or with --json one object per
/// line, like that of `redlatch show`; both sorted by name.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch ls [OPTIONS] [PATTERN]",
    after_help = "\
Examples:
  redlatch ls
  redlatch ls 'orders:*'
  redlatch ls --json | jq -r 'select(.held) | .owner'

Exit codes: 0 also if there are none; 2 wrong usage; 69 the store cannot be reached."
)]
pub(crate) struct Ls {
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,

    /// Also print which client holds or waits, since when, and its note
    #[arg(short = 'w', long, conflicts_with = "json")]
    pub(crate) wide: bool,

    /// Only names that match this glob pattern: *, ?, [a-z], \ to escape the next character
    #[arg(default_value = "*", value_hint = ValueHint::Other)]
    pub(crate) pattern: String,
}

/// Tell who holds NAME, since when, and who waits for it.
///
/// Clients of redlatch register what they hold or wait for longer than a second: machine, process, label and note.
/// Other holders, and waiters in the queue of a fair lock, are shown by their ids. Waiters are listed in the order of the
/// queue, then the longest wait first. Finds them with SCAN, which does not block the server.
///
/// With --json prints the object of `redlatch show --json` and waiters: each with owner, position (in a queue) and registered.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch why [OPTIONS] <NAME>",
    after_help = "\
Example:
  redlatch why nightly-backup

Exit codes: 0 also if it is free; 2 wrong usage; 65 the key holds data of another kind;
69 the store cannot be reached."
)]
pub(crate) struct Why {
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The name
    #[arg(value_hint = ValueHint::Other)]
    pub(crate) name: String,
}

/// Find owners that wait for each other.
///
/// Looks for cycles over all clients: each owner of a cycle waits for a lock that the next one holds. Knows the waits of
/// more than a second that clients of redlatch have registered, and the queues of fair locks, also those of Redisson. Each
/// `redlatch run` is an owner of its own, even inside of another. A cycle that exists only if the owners of one task count as
/// one is shown as a possible deadlock.
///
/// A deadlock counts if it is there twice, a moment apart. With --json prints one object per deadlock, with possible, and
/// waits: each with name, waiter and holders.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch deadlocks [OPTIONS]",
    after_help = "\
Example:
  redlatch deadlocks || alert

Exit codes: 0 there is none, or only possible ones; 1 found; 2 wrong usage; 69 the store cannot be reached."
)]
pub(crate) struct Deadlocks {
    /// Print one JSON object per deadlock
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print what happens to locks, semaphores and latches, until it is ended.
///
/// Prints one line for each event, by clients of redlatch and Redisson: time (UTC), event, name, owner, kind. Objects that
/// exist already come first. The events:
///
/// held (when the watch started), acquired, released (by its owner, by force, or deleted: the store does not record
/// which), expired; waiting and gave-up, of a queue of a fair lock; counted (a semaphore or latch has another
/// number) and deleted (such as a latch that opened).
///
/// With --json, prints an object per line: time and event; where applicable also name, kind, owner, side (read or write),
/// permit (its id), value. Two further events are messages on standard error otherwise: interrupted (with error: the
/// connection broke, and redlatch reconnects until it succeeds) and synchronized (all objects are known: at the start, and
/// after an interruption behind its differences).
///
/// It is for people and dashboards: what begins and ends within 10 ms, or while the connection is broken, may be missing.
///
/// The server needs no setting. Its user needs the permissions for `CLIENT TRACKING` and SCAN.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch watch [OPTIONS] [PATTERN]",
    after_help = "\
Examples:
  redlatch watch
  redlatch watch 'orders:*'
  redlatch watch --json | jq -r 'select(.event == \"expired\") | .name'

Exit codes: 128+n when signal n ends it, so 130 after Ctrl-C; 0 when the reader of a pipe ends;
2 wrong usage; 69 the store cannot be reached at the start, or does not permit it."
)]
pub(crate) struct Watch {
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,

    /// Only names that match this glob pattern: *, ?, [a-z], \ to escape the next character
    #[arg(default_value = "*", value_hint = ValueHint::Other)]
    pub(crate) pattern: String,
}

/// Ask the holder of the lock NAME to release it, release it by force, without its holder, or release the lock of a ticket.
///
/// With a ticket that `redlatch lock` has printed (--ticket, or the variable REDLATCH_TICKET), releases the lock as its holder.
///
/// With --ask the holder decides. `redlatch run` ends CMD as at a loss (SIGTERM, and SIGKILL after its --kill-after), and then
/// releases the lock. `redlatch elect` does the same and campaigns again. Programs decide
/// themselves (`Guard::asked`); Redisson does not know requests, and continues.
///
/// With --revoke a holder that does not release the lock in time loses it: its lease is not renewed beyond the limit. The next
/// owner acquires the lock only after its holder has noticed that, or after the end of its lease. Holders that do not know
/// requests are not revoked. Both are for plain, --fair, --fenced and --spin locks and for writers, and only for the hold that the
/// owner has now.
///
/// With --force the holder detects the loss at its next renewal; until then it continues, concurrently with the next
/// holder. Of a read-write lock, it releases the writer or all readers, whichever hold it.
///
/// Prints the owner that was asked, or whether the lock was held.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch unlock [OPTIONS] <NAME>\n       redlatch unlock [OPTIONS] [--ticket <TICKET>]",
    after_help = "\
Examples:
  redlatch unlock --ask --wait 30s nightly-backup
  redlatch unlock --revoke 5m --wait 6m nightly-backup
  redlatch unlock --force nightly-backup
  redlatch unlock --ticket \"$ticket\"

Exit codes: 0 also if it was not held; 2 wrong usage, none of --ask, --revoke and --force, or not a
ticket; 65 NAME is an object of another kind; 69 the store cannot be reached; 71 standard input or
output failed; 74 the ticket was used, its lease has ended, or it is forged; 76 the holder has not
released it within --wait."
)]
pub(crate) struct Unlock {
    /// Ask the holder to release the lock
    #[arg(long, requires = "name", conflicts_with = "force")]
    pub(crate) ask: bool,

    /// Ask the holder to release the lock, and let it lose the lock after this time: it is not renewed any more
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        requires = "name",
        conflicts_with_all = ["ask", "force"]
    )]
    pub(crate) revoke: Option<Duration>,

    /// Wait at most this long until the owner that was asked does not hold the lock
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        requires = "name",
        conflicts_with = "force"
    )]
    pub(crate) wait: Option<Duration>,

    /// Confirm: take the lock from its holder, which may still be working
    #[arg(long, requires = "name")]
    pub(crate) force: bool,

    /// The ticket, without NAME. `-` reads it from standard input, so that other users of the machine do not see it
    #[arg(
        long,
        env = "REDLATCH_TICKET",
        hide_env_values = true,
        value_name = "TICKET",
        allow_hyphen_values = true
    )]
    pub(crate) ticket: Option<String>,

    /// The lock's name
    #[arg(required_unless_present = "ticket", value_hint = ValueHint::Other)]
    pub(crate) name: Option<String>,
}

/// Count the latch NAME down, wait for it, or set it.
///
/// A latch is a number that is counted down; its waiters continue when it reaches 0. A latch that was
/// never set, or that has reached 0, is open: waiting for it returns immediately.
///
/// So a latch that is deleted is open: after FLUSHALL, eviction or a restart without persistence, all
/// waiters continue, and so does a waiter that starts before the latch is set.
///
/// An idle semaphore looks the same as a latch in the store, and a plain semaphore always does: make sure
/// that NAME is not a semaphore before counting it down. A semaphore of `run --permits` that is in use is
/// refused.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch latch [OPTIONS] <NAME> <COMMAND>",
    after_help = "\
Examples:
  redlatch latch import:42 set 3          # three parts to load
  redlatch latch import:42 count-down     # each part, when it is done
  redlatch latch import:42 wait --for 1h && ./publish.sh

Exit codes: 0 done; 2 wrong usage; 65 NAME is an object of another kind;
69 the store cannot be reached; 75 the latch was already set (set), or did not open in time (wait)."
)]
pub(crate) struct Latch {
    /// The latch's name
    #[arg(value_hint = ValueHint::Other)]
    pub(crate) name: String,

    #[command(subcommand)]
    pub(crate) command: LatchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LatchCommand {
    /// Set an open latch to N and print N. If it was not open, exit with 75
    #[command(override_usage = "redlatch latch [OPTIONS] <NAME> set <N>")]
    Set {
        /// How many times the latch must be counted down until it opens
        #[arg(value_parser = value_parser!(u32).range(1..), allow_hyphen_values = true)]
        n: u32,
    },
    /// Count the latch down and print the remaining count
    #[command(override_usage = "redlatch latch [OPTIONS] <NAME> count-down [--by <N>]")]
    CountDown {
        /// Number to count down by
        #[arg(
            long,
            value_name = "N",
            default_value_t = 1,
            value_parser = value_parser!(u32).range(1..),
            allow_hyphen_values = true
        )]
        by: u32,
    },
    /// Wait until the latch is open
    #[command(
        override_usage = "redlatch latch [OPTIONS] <NAME> wait [--for <DUR>] [--outage-limit <DUR>]"
    )]
    Wait {
        /// Give up after this long [default: wait forever]
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

/// Show the fencing token of the lock or election NAME, raise it, or delete it.
///
/// The token is the number that `redlatch run --fenced` gives CMD in REDLATCH_FENCING_TOKEN. It increases
/// with each acquisition. The epochs of an election (`redlatch elect`, REDLATCH_EPOCH) are the tokens of its lock.
/// Without a subcommand, prints the latest token: that of the latest acquisition, or the
/// number to which it was advanced since; 0 if there is none.
///
/// After the store has lost its data, tokens count from 1 again, and a resource that remembers a greater
/// token rejects every holder. Advance the token to the greatest one that the resource has seen.
///
/// With --from-file, advances the tokens of many names, and prints each name with its token. Each line of the file is a
/// name, white space, and the greatest token that the resource has seen, as a query of the resource prints them. If a line is
/// wrong, no token is advanced. It can be repeated.
///
/// Each name keeps its token forever. Delete it when no resource remembers a token of NAME any more.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch token [OPTIONS] <NAME> [COMMAND]\n       redlatch token [OPTIONS] --from-file <FILE>",
    after_help = "\
Examples:
  redlatch token orders:42
  redlatch token orders:42 advance 7000   # the next acquisition gets 7001
  redlatch token orders:42 delete
  redlatch token scheduler advance 100    # the next leader gets the epoch 101
  psql -At -F ' ' -c 'SELECT resource, token FROM redlatch_fence_token' | redlatch token --from-file -

Exit codes: 0 done; 2 wrong usage; 65 NAME is an object of another kind;
69 the store cannot be reached; 75 delete: the lock is held."
)]
pub(crate) struct Token {
    /// The name of the lock or election
    #[arg(value_hint = ValueHint::Other, required_unless_present = "from_file", default_value = "", hide_default_value = true)]
    pub(crate) name: String,

    /// Advance the tokens in this file; `-`: standard input
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    pub(crate) from_file: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) command: Option<TokenCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Raise the token to at least N, never lower it, and print the new token
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
    /// Delete the token of a lock that is free, or of an election without a leader; the next acquisition gets 1
    #[command(override_usage = "redlatch token [OPTIONS] <NAME> delete")]
    Delete,
}

/// Show the locks in the terminal, refreshed each second.
///
/// For each lock: its holder, for how long it has been held, how many owners wait and for how long, and the time until its
/// lease ends. The keys sort, filter, show the details of a lock with its waiters, and unlock by force; ? lists them.
///
/// HOLDER, AGE, WAITERS and WAIT come from the registry of clients: holds and waits of longer than a second, by clients of
/// redlatch. Another holder is shown by the id of its owner, and its AGE is how long this view has seen it. Other waiters are
/// only those in the queues of fair locks. A lock that becomes free is shown for ten more looks. Semaphores and latches are not shown, except for those of `run --permits` in use.
///
/// TURNS/S is how often the lock was acquired, on average of the last ten looks. For fenced locks it is exact, because their
/// tokens count acquisitions. For other locks it counts the holders that a look found and the look before did not, so holds
/// that began and ended between two looks are missing. A + means at least.
///
/// It continues through an outage of the store, and shows since when its data are stale. In the details, `u` unlocks like
/// `redlatch unlock --force`, but only if no other owner holds the lock in the meantime.
///
/// Log events are written only if standard error is not the terminal.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch top [OPTIONS] [PATTERN]",
    after_help = "\
Examples:
  redlatch top
  redlatch top 'orders:*'

Exit codes: 0 left with q; 2 wrong usage, or standard output is no terminal;
71 the terminal cannot be used; 128+n ended by signal n, also by Ctrl-C."
)]
pub(crate) struct Top {
    /// Only names that match this glob pattern: *, ?, [a-z], \ to escape the next character
    #[arg(default_value = "*", value_hint = ValueHint::Other)]
    pub(crate) pattern: String,

    /// The time between two looks at the store; a look that takes longer is followed by a pause as long
    #[arg(
        long,
        value_name = "DUR",
        default_value = "1s",
        value_parser = duration::parse,
        allow_hyphen_values = true
    )]
    pub(crate) interval: Duration,

    /// Use no colors, as with the variable NO_COLOR
    #[arg(long)]
    pub(crate) no_color: bool,
}

/// Check what works on the store, and what to change.
///
/// Uses the main features as a program would, by two clients on names of its own that begin with `redlatch-doctor:`, and asks the
/// servers for their settings. It takes some seconds, and deletes what it made.
///
/// Each line has a state: ok; note, a limit to know about; degraded, works less well; failed. A line that begins with
/// change: says what to do about it.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch doctor [OPTIONS]",
    after_help = "\
Examples:
  redlatch doctor
  redlatch doctor --url rediss://redis.example:6380 --json

Exit codes: 0 everything works; 1 something failed or is degraded; 2 wrong usage;
69 the store cannot be reached, or locks do not work on it."
)]
pub(crate) struct Doctor {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Serve metrics of all locks and semaphores to Prometheus.
///
/// Looks at the objects in the store every --interval, and answers GET /metrics with the number of objects, holders and
/// waiters of each kind. With --names, also for each name. The services that use the locks need no change; they can
/// export their own waiting times and losses with the library's feature `metrics`.
///
/// It needs no lock, and continues through an outage of the store: meanwhile redlatch_exporter_up is 0.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch exporter [OPTIONS] [PATTERN]",
    after_help = "\
Examples:
  redlatch exporter
  redlatch exporter --names 'jobs:*' --listen 0.0.0.0:9187

Exit codes: 2 wrong usage; 71 the address cannot be used; 128+n ended by signal n."
)]
pub(crate) struct Exporter {
    /// Objects whose names match this glob pattern
    #[arg(default_value = "*", value_hint = ValueHint::Other)]
    pub(crate) pattern: String,

    /// The address to listen on; anyone who reaches it can read the metrics
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "127.0.0.1:9187",
        value_parser = http::parse_address
    )]
    pub(crate) listen: SocketAddr,

    /// The pause between two looks at the store, at least 100ms
    #[arg(
        long,
        value_name = "DUR",
        default_value = "15s",
        value_parser = duration::parse_pause,
        allow_hyphen_values = true
    )]
    pub(crate) interval: Duration,

    /// Also export each name, at most 1000 of them
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
    use clap::CommandFactory as _;

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
