//! Breaks servers, networks and clients under real locks, and checks what became of them:
//! `make robustness`, `make soak`.
#![forbid(unsafe_code)]

mod checker;
mod clock;
mod crew;
mod faults;
mod history;
mod namespace;
mod options;
mod pulse;
mod random;
mod resource;
mod run;
mod scene;
mod schedule;
mod site;
mod soak;
mod table;
mod visit;
mod worker;

use std::process::ExitCode;

use clap::Parser as _;

use options::{Command, Options};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Error> = std::result::Result<T, E>;

fn main() -> ExitCode {
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
