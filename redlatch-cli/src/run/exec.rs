//! The short phase in which a new process runs redlatch before it becomes CMD.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::args::Exec;
use crate::exit;
use crate::output::stderr::stderr;
use crate::output::{self, Output};
use crate::process::{signals, terminal};

/// Makes the system kill this process when its parent dies, and becomes CMD. Returns if it cannot.
pub(crate) fn exec(exec: &Exec) -> u8 {
    output::set(Output {
        log_format: exec.log_format,
        ..Output::default()
    });
    if let Err(error) = bind_to_parent() {
        stderr!("CMD cannot be bound to the lifetime of redlatch: {error}");
        return exit::SYSTEM;
    }
    // A parent that died before `bind_to_parent` did not take this process with it: do not start
    // CMD.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent != Some(exec.parent) {
        return exit::SYSTEM;
    }
    let Some((program, args)) = exec.command.split_first() else {
        return exit::USAGE;
    };
    if exec.foreground {
        terminal::enter_foreground();
    }
    let unblocked = match exec.unblock_all {
        true => signals::unblock_all(),
        false => signals::unblock(&exec.unblock),
    };
    if let Err(error) = unblocked {
        stderr!("CMD cannot get the signal mask of the parent of redlatch: {error}");
        return exit::SYSTEM;
    }
    let error = Command::new(program).args(args).exec();
    let program = program.to_string_lossy();
    if error.kind() == ErrorKind::NotFound {
        stderr!("{program}: not found");
        exit::NOT_FOUND
    } else {
        stderr!("{program}: cannot be executed: {error}");
        exit::CANNOT_EXECUTE
    }
}

#[cfg(target_os = "linux")]
fn bind_to_parent() -> rustix::io::Result<()> {
    use rustix::process::{Signal, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::KILL))
}

/// Only Linux supports this.
#[cfg(not(target_os = "linux"))]
fn bind_to_parent() -> rustix::io::Result<()> {
    Ok(())
}
