//! The command line of the process that becomes CMD: `redlatch __exec`, see `exec`.

use std::ffi::OsString;
#[cfg(target_os = "linux")]
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::output;

/// The signals that the new process unblocks, because a thread of this one has blocked them.
pub(crate) enum Unblock<'a> {
    All,
    /// Given by their numbers.
    These(&'a [i32]),
}

/// Returns a command that runs `redlatch __exec`. The new process asks the system to kill it when
/// this process dies, which only it can do, and then executes CMD.
pub(crate) fn exec_command(
    command: &[OsString],
    in_foreground: bool,
    unblock: Unblock<'_>,
) -> Command {
    let mut wrapper = internal_command("__exec", unblock);
    if in_foreground {
        wrapper.arg("--foreground");
    }
    wrapper.args([&std::process::id().to_string(), "--"]);
    wrapper.args(command);
    wrapper
}

/// Returns a command that runs an internal command of this program.
pub(crate) fn internal_command(name: &str, unblock: Unblock<'_>) -> Command {
    let mut internal = redlatch_command();
    internal.arg(name);
    if output::is_json() {
        internal.args(["--log-format", "json"]);
    }
    match unblock {
        Unblock::All => drop(internal.arg("--unblock-all")),
        Unblock::These(numbers) => {
            for number in numbers {
                internal.args(["--unblock", &number.to_string()]);
            }
        }
    }
    internal
}

/// Returns a command that runs this program.
#[cfg(target_os = "linux")]
fn redlatch_command() -> Command {
    // Not the path of the executable, which may be a newer version by now, or missing.
    let mut redlatch = Command::new("/proc/self/exe");
    redlatch.arg0("redlatch");
    redlatch
}

/// Returns a command that runs this program.
#[cfg(not(target_os = "linux"))]
fn redlatch_command() -> Command {
    Command::new(std::env::current_exe().unwrap_or_else(|_| "redlatch".into()))
}
