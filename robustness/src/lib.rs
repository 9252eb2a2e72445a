//! Breaks servers, networks and clients under real locks, and checks what became of them:
//! `make robustness`, `make soak`.
//!
//! The simulation uses the workers' tasks, the histories that they make, and what checks these.
#![forbid(unsafe_code)]
#![expect(missing_docs, reason = "only the simulation uses this library")]

pub mod checker;
pub mod clock;
mod crew;
mod faults;
pub mod history;
mod namespace;
mod options;
mod pulse;
pub mod random;
pub mod resource;
mod run;
mod scene;
mod schedule;
mod site;
mod soak;
mod table;
pub mod visit;
pub mod worker;

use std::process::ExitCode;

use clap::Parser as _;

use options::{Command, Options};

pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The program.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.command {
        Some(Command::Worker(worker)) => {
            let runtime = tokio::runtime::Runtime::new();
            runtime
                .map_err(Error::from)
                .and_then(|runtime| runtime.block_on(worker::work(worker)))
                .map(|()| true)
        }
        Some(Command::Soak(soak)) => soak::soak(&soak),
        None => table::run_rows(&options.rows),
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
