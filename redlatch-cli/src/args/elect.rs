//! The command line of `redlatch elect`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::ValueHint;

use super::run::Cmd;
use crate::duration;

/// Run CMD as long as this process is the leader of the election NAME, or print who leads.
///
/// Waits until it is elected, and runs CMD. Of all processes that run `redlatch elect NAME`, one
/// leads at a time; the others wait for their turn in the order in which they started. When CMD
/// ends, the next one leads, and redlatch exits with CMD's exit code. A leader whose machine dies
/// is succeeded when its lease ends (--watchdog).
///
/// If the leadership is lost while CMD runs (its lease ended because the store could not be reached
/// in time, or the lock was unlocked by force), redlatch ends CMD and its children with SIGTERM,
/// and with SIGKILL after --kill-after. Then it waits to be elected again, and runs CMD again. If
/// it was asked to end meanwhile (SIGINT, SIGTERM, SIGHUP, SIGQUIT), it exits instead. The same if
/// another client asks for the lock (`redlatch unlock --ask`): it resigns, and waits behind the
/// other candidates.
///
/// CMD gets the variables REDLATCH_EPOCH, a number that is greater than those of all earlier
/// leaders, for a resource that rejects late writes; REDLATCH_LOCK (the name) and REDLATCH_OWNER
/// (the id of this candidate). What `redlatch run` says about passwords, signals, Ctrl-Z, child
/// processes and terminals holds here, too.
///
/// With --observe it is no candidate: it prints the current leader and each change, until it is
/// ended. A line is time (UTC), epoch, id and value; without a leader `-  -  -`. With --json, it
/// prints an object per line: time, epoch, leader and value, which are null without a leader.
///
/// With --http it answers GET /leader with 200 if this process leads and 503 if it does not, and a
/// JSON object: name, leads, and of the current leader epoch, leader and value. GET /healthz is 200
/// while the store answers, and 503 during an outage. It listens before it reaches the store, and
/// until then answers 503.
///
/// In the store an election is the fair lock of the same name, so `redlatch show NAME` shows leader
/// and candidates.
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

    /// Answer GET /leader and GET /healthz on this address; anyone who reaches it can read the
    /// leader
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
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

    /// Fail if the store cannot be reached for this long while redlatch waits, including at the
    /// start [default: wait through any outage]
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

/// Returns the address to listen on: only this machine unless the user names another.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let parsed = text.parse();
    parsed.map_err(|_| "use an address and a port, such as 127.0.0.1:9187 or [::1]:9187".to_owned())
}
