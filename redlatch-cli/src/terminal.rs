//! The terminal that controls this process, and the process group in its foreground.

use std::fs::File;
use std::io::{self, IsTerminal as _};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::getpgrp;
use rustix::process::{Pid, test_kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

pub(crate) struct Terminal {
    device: File,
    /// This process's group.
    group: Pid,
    /// The signal mask that this process was started with.
    mask: SigSet,
}

impl Terminal {
    /// Opens the controlling terminal. Returns `None` without one, or if this process's group is
    /// outside its PID namespace: such a group cannot be put into the foreground.
    ///
    /// Blocks SIGTTOU for this thread: a process in the background would otherwise be stopped when
    /// it changes the foreground.
    pub(crate) fn open() -> Option<Terminal> {
        let group = Pid::from_raw(getpgrp().as_raw())?;
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/tty")
            .ok()?;
        let mut ttou = SigSet::empty();
        ttou.add(Signal::SIGTTOU);
        let mask = ttou.thread_swap_mask(SigmaskHow::SIG_BLOCK).ok()?;
        Some(Terminal {
            device,
            group,
            mask,
        })
    }

    /// Runs `work`, which starts a process, with the signal mask that this process was started with, so that
    /// the new process inherits it.
    pub(crate) fn with_original_mask<T>(&self, work: impl FnOnce() -> T) -> T {
        let masked = self.mask.thread_swap_mask(SigmaskHow::SIG_SETMASK);
        let result = work();
        if let Ok(masked) = masked {
            let _ = masked.thread_set_mask();
        }
        result
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
        let _ = terminal.mask.thread_set_mask();
    }
}
