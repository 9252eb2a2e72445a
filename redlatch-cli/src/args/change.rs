//! The command lines of `redlatch unlock`, `latch` and `token`: they change objects and hold none.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueHint, value_parser};
use redlatch::PermitId;

use crate::duration;

/// Ask the holder of the lock NAME to release it, release it by force, without its holder, or
/// release the lock of a ticket.
///
/// With a ticket that `redlatch lock` has printed (--ticket, or the variable REDLATCH_TICKET),
/// releases the lock as its holder.
///
/// With --ask the holder decides. `redlatch run` ends CMD as at a loss (SIGTERM, and SIGKILL after
/// its --kill-after), and then releases the lock. So does `redlatch cron` with the command of a job,
/// which it does not repeat then. `redlatch elect` does the same and campaigns again. Programs decide
/// themselves (`Guard::asked`); Redisson does not know requests, and continues.
///
/// With --revoke a holder that does not release the lock in time loses it: its lease is not renewed
/// beyond the limit. The next owner acquires the lock only after its holder has noticed that, or
/// after the end of its lease. Holders that do not know requests are not revoked. Both are for
/// plain, --fair, --fenced and --spin locks, for writers and for leaders of elections, and only for
/// the hold that the owner has now. With --permit they ask for a permit of the semaphore NAME.
///
/// With --force the holder detects the loss at its next renewal; until then it continues,
/// concurrently with the next holder. Of a read-write lock, it releases the writer or all readers,
/// whichever hold it.
///
/// Prints the owner that was asked, or whether the lock was held.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch unlock [OPTIONS] <NAME>\n       redlatch unlock [OPTIONS] [--ticket <TICKET>]",
    after_help = "\
Examples:
  redlatch unlock --ask --wait 30s nightly-backup
  redlatch unlock --revoke 5m --wait 6m nightly-backup
  redlatch unlock --ask --permit 00112233445566778899aabbccddeeff downloads
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

    /// Ask the holder to release the lock, and let it lose the lock after this time: it is not
    /// renewed any more
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        requires = "name",
        conflicts_with_all = ["ask", "force"]
    )]
    pub(crate) revoke: Option<Duration>,

    /// Ask for this permit of a semaphore of `run --permits`. `redlatch show NAME` lists the ids
    #[arg(long, value_name = "ID", requires = "name", conflicts_with = "force")]
    pub(crate) permit: Option<PermitId>,

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

    /// The ticket, without NAME. `-` reads it from standard input, so that other users of the
    /// machine do not see it
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
/// A latch is a number that is counted down; its waiters continue when it reaches 0. A latch that
/// was never set, or that has reached 0, is open: waiting for it returns immediately.
///
/// So a latch that is deleted is open: after FLUSHALL, eviction or a restart without persistence,
/// all waiters continue, and so does a waiter that starts before the latch is set.
///
/// An idle semaphore looks the same as a latch in the store, and a plain semaphore always does:
/// make sure that NAME is not a semaphore before counting it down. A semaphore of `run --permits`
/// that is in use is refused.
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
/// The token is the number that `redlatch run --fenced` gives CMD in REDLATCH_FENCING_TOKEN. It
/// increases with each acquisition. The epochs of an election (`redlatch elect`, REDLATCH_EPOCH)
/// are the tokens of its lock. Without a subcommand, prints the latest token: that of the latest
/// acquisition, or the number to which it was advanced since; 0 if there is none.
///
/// After the store has lost its data, tokens count from 1 again, and a resource that remembers a
/// greater token rejects every holder. Advance the token to the greatest one that the resource has
/// seen.
///
/// With --from-file, advances the tokens of many names, and prints each name with its token. Each
/// line of the file is a name, a tab or one space, and the greatest token that the resource has seen,
/// as a query of the resource prints them. A name that ends with a space needs the tab. If a line is
/// wrong, no token is advanced. It can be repeated.
///
/// Each name keeps its token forever. Delete it when no resource remembers a token of NAME any
/// more.
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
    /// Delete the token of a lock that is free, or of an election without a leader; the next
    /// acquisition gets 1
    #[command(override_usage = "redlatch token [OPTIONS] <NAME> delete")]
    Delete,
}
