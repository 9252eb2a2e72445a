//! The command lines of the commands that show locks and other objects.

use std::time::Duration;

use clap::ValueHint;

use crate::duration;

/// Show the kind and the holder of NAME.
///
/// Supports locks of every kind, with the waiters of a fair lock and all readers, semaphores and
/// latches. Prints a table, or with --json an object: name, kind, held, owner, holds and
/// remaining_ms; where applicable also token (of a fenced lock), holders (of a read-write lock),
/// queue (of a fair lock), registered (if its client has registered who it is: host, pid, program,
/// version, label, kind, since, age_ms and note), value (of a semaphore or latch), available, total
/// and permits (of an expirable semaphore). A semaphore is held when all of its permits are taken.
/// A name that does not exist in the store is a free lock or an open latch: kind, owner and
/// remaining_ms are null, held is false. remaining_ms is also null for objects that never expire.
///
/// With --quiet, prints nothing: the exit code is 0 if NAME is held, and 1 if it is free. NAME is
/// held if `held` is true in JSON, that is if another owner would have to wait. Locks are held if
/// they have a holder, read-write locks also if it is a reader; semaphores if no permit is
/// available. A latch is never held: for a latch that is not open, `redlatch latch NAME wait --for
/// 0` exits with 75.
///
/// REMAINING is the time until the hold expires if it is not renewed; for a waiter in a queue, the
/// time until it is skipped if it does not respond.
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
/// Uses SCAN, which does not block the server. Any key that holds an integer could be a semaphore
/// or a latch, and is listed. Prints a table, or with --json one object per line, like that of
/// `redlatch show`; both sorted by name.
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
/// Clients of redlatch register what they hold or wait for longer than a second: machine, process,
/// label and note. Other holders, and waiters in the queue of a fair lock, are shown by their ids.
/// Waiters are listed in the order of the queue, then the longest wait first. Finds them with SCAN,
/// which does not block the server.
///
/// With --json prints the object of `redlatch show --json` and waiters: each with owner, position
/// (in a queue) and registered.
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
/// Looks for cycles over all clients: each owner of a cycle waits for a lock that the next one
/// holds. Knows the waits of more than a second that clients of redlatch have registered, and the
/// queues of fair locks, also those of Redisson. Each `redlatch run` is an owner of its own, even
/// inside of another. A cycle that exists only if the owners of one task count as one is shown as a
/// possible deadlock.
///
/// A deadlock counts if it is there twice, a moment apart. With --json prints one object per
/// deadlock, with possible, and waits: each with name, waiter and holders.
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
/// Prints one line for each event, by clients of redlatch and Redisson: time (UTC), event, name,
/// owner, kind. Objects that exist already come first. The events:
///
/// held (when the watch started), acquired, released (by its owner, by force, or deleted: the store
/// does not record which), expired; waiting and gave-up, of a queue of a fair lock; counted (a
/// semaphore or latch has another number) and deleted (such as a latch that opened).
///
/// With --json, prints an object per line: time and event; where applicable also name, kind, owner,
/// side (read or write), permit (its id), value. Two further events are messages on standard error
/// otherwise: interrupted (with error: the connection broke, and redlatch reconnects until it
/// succeeds) and synchronized (all objects are known: at the start, and after an interruption
/// behind its differences).
///
/// It is for people and dashboards: what begins and ends within 10 ms, or while the connection is
/// broken, may be missing.
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

/// Show the locks in the terminal, refreshed each second.
///
/// For each lock: its holder, for how long it has been held, how many owners wait and for how long,
/// and the time until its lease ends. The keys sort, filter, show the details of a lock with its
/// waiters, and unlock by force; ? lists them.
///
/// HOLDER, AGE, WAITERS and WAIT come from the registry of clients: holds and waits of longer than
/// a second, by clients of redlatch. Another holder is shown by the id of its owner, and its AGE is
/// how long this view has seen it. Other waiters are only those in the queues of fair locks. A lock
/// that becomes free is shown for ten more looks. Semaphores and latches are not shown, except for
/// those of `run --permits` in use.
///
/// TURNS/S is how often the lock was acquired, on average of the last ten looks. For fenced locks
/// it is exact, because their tokens count acquisitions, unless they follow the clock. For other
/// locks it counts the holders that a look found and the look before did not, so holds that began
/// and ended between two looks are missing. A + means at least.
///
/// It continues through an outage of the store, and shows since when its data are stale. In the
/// details, `u` unlocks like `redlatch unlock --force`, but only if no other owner holds the lock
/// in the meantime.
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

    /// The time between two looks at the store; a look that takes longer is followed by a pause as
    /// long
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
