//! The terminal that controls this process, and the process group in its foreground. SIGTTOU must
//! be blocked, as by [`Signals::catch_all`](crate::process::signals::Signals::catch_all): the
//! system would stop a process in the background that changes the foreground.

use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd;

use nix::unistd::getpgrp;
use rustix::process::{Pid, test_kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

pub(crate) struct Terminal {
    device: File,
    /// This process's group.
    group: Pid,
}

impl Terminal {
    /// Opens the controlling terminal. Returns `None` without one, or if this process's group is
    /// outside its PID namespace: such a group cannot be put into the foreground.
    pub(crate) fn open() -> Option<Terminal> {
        let group = Pid::from_raw(getpgrp().as_raw())?;
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/tty")
            .ok()?;
        Some(Terminal { device, group })
    }

    /// Returns whether this process is in the foreground.
    pub(crate) fn is_foreground(&self) -> bool {
        tcgetpgrp(&self.device).is_ok_and(|group| group == self.group)
    }

    /// Returns whether CMD should start in the foreground. In a pipeline it does not, because other
    /// commands of the pipeline may need the terminal.
    pub(crate) fn starts_cmd_in_foreground(&self) -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal() && self.is_foreground()
    }

    /// Puts `group` into the foreground.
    pub(crate) fn set_foreground(&self, group: Pid) -> bool {
        tcsetpgrp(&self.device, group).is_ok()
    }

    /// Puts this process's group back into the foreground, replacing `group` or a group that has
    /// ended, but not the shell.
    pub(crate) fn restore_foreground(&self, group: Pid) {
        let current = tcgetpgrp(&self.device);
        if current.is_ok_and(|now| now == group || test_kill_process_group(now).is_err()) {
            let _ = tcsetpgrp(&self.device, self.group);
        }
    }
}

/// Puts this process's own group into the foreground of its terminal, if it has one.
pub(crate) fn enter_foreground() {
    if let Some(terminal) = Terminal::open() {
        terminal.set_foreground(terminal.group);
    }
}

/// Returns whether this process is in the background of `terminal`. Without job control there is no
/// background.
pub(crate) fn is_in_background(terminal: impl AsFd) -> bool {
    let group = tcgetpgrp(terminal).map(|group| group.as_raw_nonzero().get());
    group.is_ok_and(|group| group != getpgrp().as_raw())
}
