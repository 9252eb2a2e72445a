//! Breaks servers, networks and clients under real locks, and checks the history of each run:
//! `make robustness`, `make soak`.
//!
//! 1. A run starts servers in a topology (`deployment`), and worker processes that connect to them (`processes`).
//! 2. The tasks of a worker acquire locks, stay in critical sections for a while and release the locks
//!    (`worker`). They report each event with its time on standard output.
//! 3. Meanwhile the run injects a fault (`faults`) for some time and repairs it.
//! 4. The events of all workers make up a history of critical sections (`history`).
//! 5. In the end the run checks that nothing is left in the store, and the checker looks for violations in
//!    the history (`checker`): two valid guards of one lock, lost wake-ups, tokens out of order.
//! 6. Each violation must be explained by the fault, or the run fails.
//!
//! The simulation uses the workers' tasks, histories and checker, too.
#![forbid(unsafe_code)]
#![expect(missing_docs, reason = "only the simulation uses this library")]

pub mod checker;
pub mod clock;
mod context;
mod deployment;
mod error;
mod faults;
pub mod final_check;
pub mod history;
mod load;
mod mechanisms;
pub mod names;
mod namespace;
pub mod observers;
mod options;
mod processes;
pub mod random;
pub mod resource;
mod run;
mod soak;
mod stall_monitor;
mod table;
pub mod worker;

use std::process::ExitCode;

use clap::Parser as _;

pub use error::{Error, Result};
use options::{Command, Options};

/// Runs the program.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.command {
        Some(Command::Worker(worker)) => {
            let runtime = tokio::runtime::Runtime::new();
            runtime
                .map_err(Error::from)
                .and_then(|runtime| runtime.block_on(worker::run(worker)))
                .map(|()| true)
        }
        Some(Command::Soak(soak)) => soak::soak(&soak),
        None => table::run_table(&options.rows),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("redlatch-robustness: {error}");
            ExitCode::FAILURE
        }
    }
}
