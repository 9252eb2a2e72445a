//! The process in which `redlatch cron` runs the command of a job: `redlatch __job`.
//!
//! It runs CMD as `redlatch run` does, but its parent holds the lock. Standard input is a pipe from
//! the parent. When that is closed, the lock counts as lost: CMD and its child processes are ended.
//! So they also end if the parent is killed. A byte in the pipe says that another client asks for the
//! lock. The parent reports both.
//!
//! It has a session of its own, without a terminal: keys are for the parent, which lets its runs end,
//! and CMD cannot read the terminal. In the session of the parent, the system would stop CMD then, and
//! no shell would continue it.

use std::fs::File;
use std::io;

use redlatch::Client;
use rustix::io::{read, retry_on_intr};
use tokio::sync::watch;

use super::held_lock::{HeldLock, OfParent};
use super::supervise::{CmdEnd, run_cmd};
use crate::args::RunJob;
use crate::exit::{self, Failure};
use crate::output::{self, Output};
use crate::process::signals::{self, Signals};
use crate::threads::{runtime, spawn_without_signals};

pub(crate) fn run_job(args: &RunJob) -> Result<u8, Failure> {
    output::set(Output {
        log_format: args.log_format,
        ..Output::default()
    });
    let in_session = rustix::process::setsid();
    in_session.map_err(|error| Failure::system("cannot begin a session", &error.into()))?;
    // The parent has blocked them for itself. Keys before the session are for the parent, too.
    let unblocked = signals::discard_keys().and_then(|()| signals::unblock(&args.unblock));
    unblocked.map_err(|error| Failure::system("cannot unblock signals", &error))?;
    // On this thread, because CMD is killed when the thread that started it ends.
    let runtime = runtime()?;
    let code = runtime.block_on(run(args));
    runtime.shutdown_background();
    code
}

async fn run(args: &RunJob) -> Result<u8, Failure> {
    let mut signals = Signals::catch_all()?;
    let state = watch_parent().map_err(|error| Failure::system("cannot watch a pipe", &error))?;
    let client = Client::embedded();
    let held_lock = HeldLock::of_parent(args.name.clone(), state);
    match run_cmd(&client, held_lock, None, &args.cmd, &mut signals).await? {
        CmdEnd::Ended { code, .. } => Ok(code),
        CmdEnd::Lost { .. } => Ok(exit::LOST),
    }
}

/// Returns what the pipe of the parent says about the lock. CMD gets no input.
fn watch_parent() -> io::Result<watch::Receiver<OfParent>> {
    let pipe = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let (state, receiver) = watch::channel(OfParent::Held);
    spawn_without_signals("parent", move || {
        while let Ok(1..) = retry_on_intr(|| read(&pipe, &mut [0; 1])) {
            state.send_replace(OfParent::Asked);
        }
        state.send_replace(OfParent::Ended);
    })?;
    Ok(receiver)
}
