//! The command lines of `redlatch cron` and `redlatch jobs`.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueHint;

use crate::duration;
use crate::output::LogFormat;

/// Run the jobs of a crontab, each firing on one of the machines that run this.
///
/// Start it with the same FILE on several machines. For each time at which a job fires, one machine
/// runs its command. If that machine dies, another one runs it again if the job says so (retry);
/// otherwise the run is recorded as lost. The firing is named by its scheduled time, so the clocks
/// of the machines may differ by up to half a period. While a command runs, its machine holds the
/// lock with the name of the job.
///
/// A line of FILE is a schedule, the name of the job, options in brackets, and a command for
/// /bin/sh (or SHELL):
///
///   CRON_TZ=Europe/Berlin
///   0 2 * * *    nightly-report [retry=1 timeout=2h]  /opt/report.sh
///   */5 * * * *  cleanup                              /opt/cleanup.sh
///
/// The schedule has five fields (minute, hour, day of the month, month, day of the week), or six
/// with seconds before them, or is @hourly, @daily, @weekly, @monthly or @yearly. Times are UTC
/// unless a line above sets CRON_TZ or TZ; both may also stand before the schedule in its line.
/// Other lines NAME=VALUE set variables for the commands below them. `\%` is a `%`.
///
/// Options: overlap=skip|wait|allow says what happens when a job fires while it runs (skip);
/// timeout=DUR ends a command that takes longer; retry=N (0) repeats a run whose machine died;
/// catch-up=last runs the latest firing that all machines missed (none); jitter=DUR delays a firing
/// at random, so that not always the machine whose clock is ahead runs the job.
///
/// If lines are wrong, all of them are reported and nothing starts. SIGHUP reads FILE again; if it
/// is wrong then, the jobs stay as they were. SIGTERM and SIGINT begin no further run and wait for
/// those that last; a second one ends them. So does each other signal that ends a process.
/// `redlatch unlock --ask NAME` ends the run of one job, on any machine. It is not repeated.
///
/// A command gets REDLATCH_LOCK (the name of the job), REDLATCH_SLOT (the scheduled time in UTC)
/// and REDLATCH_ATTEMPT (1, or more if it is repeated), and no passwords. Each line that it prints
/// is printed with the name of the job before it. The last 2 kB are kept for `redlatch jobs NAME`.
/// It ends with its child processes as under `redlatch run`, and has no terminal.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch cron [OPTIONS] <FILE>",
    verbatim_doc_comment,
    after_help = "\
Examples:
  redlatch cron /etc/redlatch.crontab
  redlatch cron --check /etc/redlatch.crontab

Exit codes: 0 ended by a signal; 2 wrong usage, or wrong lines in FILE; 65 the record of a job holds
other data; 69 the store refused the client; 70 a bug; 71 FILE cannot be read; 128+n --check ended by
signal n."
)]
pub(crate) struct Cron {
    /// Only check FILE
    #[arg(long)]
    pub(crate) check: bool,

    /// The lease that the watchdog renews: how long it takes until a run is repeated or lost after
    /// its machine has died [default: 30s, at least 100ms]
    #[arg(long, value_name = "DUR", value_parser = duration::parse, allow_hyphen_values = true)]
    pub(crate) watchdog: Option<Duration>,

    /// How long the processes of a command may take to end after SIGTERM, before SIGKILL
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration::parse,
        allow_hyphen_values = true,
        default_value = "5s"
    )]
    pub(crate) kill_after: Duration,

    /// The crontab
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
}

/// Show the jobs that run by a schedule, or the latest runs of one.
///
/// Without NAME, prints a line for each job: its latest run, when it fires next, and how often it
/// was skipped because another run lasted. Instead of its next time, `overdue` says that a time has
/// passed by more than a minute and no machine has begun that run: perhaps none has the job in its
/// crontab any more, or its schedule has changed. With NAME, prints a line for each of the last 20 runs,
/// the latest first, and the output of the latest. Times are UTC.
///
/// A run is running, ok, failed, or lost: its machine has died. The process in BY is `redlatch cron`,
/// not the command.
///
/// With --json, prints one object per line: name, schedule, tz, next, overdue (the time that has
/// passed; then next is null), last_slot, skipped, and runs, each with slot, attempt, state, host, by, began, took_ms, outcome and output.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "redlatch jobs [OPTIONS] [NAME]",
    after_help = "\
Examples:
  redlatch jobs
  redlatch jobs nightly-report
  redlatch jobs --json | jq -r 'select(.runs[0].state != \"ok\") | .name'

Exit codes: 0 also if there are none; 2 wrong usage; 65 the key of the job holds other data; 69 the
store cannot be reached."
)]
pub(crate) struct Jobs {
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,

    /// The job
    #[arg(value_hint = ValueHint::Other)]
    pub(crate) name: Option<String>,
}

/// Run the command of a job. Internal: see `run::of_parent`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunJob {
    #[arg(long)]
    pub(crate) log_format: Option<LogFormat>,

    /// The number of a signal that the parent has blocked
    #[arg(long)]
    pub(crate) unblock: Vec<i32>,

    /// The name of the job
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) cmd: super::run::Cmd,
}
