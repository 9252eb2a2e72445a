//! Compares redlatch with other lock libraries on one server: `make bench-peers`.
//!
//! Each library runs in worker processes of its own (`bench/peers/README.md`). Only one library works at a time, and all
//! take turns, so that other load on the machine affects them alike. The figures can be compared with each other, not
//! with those of another machine or day.
#![forbid(unsafe_code)]

mod library_run;
mod options;
mod plot;
mod report;
#[path = "../samples.rs"]
mod samples;

use std::process::ExitCode;

use redlatch_testkit::Server;
use serde_json::Value;

use library_run::{LIBRARIES, Library, LibraryRun, SCENARIOS};
use options::Options;

fn main() -> ExitCode {
    let options = match options::read(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(wrong) => {
            eprint!("redlatch-bench-peers: {wrong}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match bench(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redlatch-bench-peers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> std::io::Result<()> {
    let server = Server::start();
    let mut all = Vec::new();
    // Redisson is last: it renews locks that it has released, which would count as commands of other libraries.
    let built = |library: &&Library| options.workers.iter().any(|w| w == library.worker);
    for library in LIBRARIES.iter().filter(built) {
        let mut run = LibraryRun::start(library, &server, options);
        run.warm_up(options);
        run.count_commands(&server, options);
        println!("{}", run.title());
        all.push(run);
    }
    let count = all.len();
    for round in 0..options.rounds {
        println!("round {} of {}", round + 1, options.rounds);
        for scenario in 0..SCENARIOS.len() {
            for turn in 0..count {
                all[(round + turn) % count].measure(scenario, options);
            }
        }
        for turn in 0..count {
            all[(round + turn) % count].measure_wakes(options.wakes / options.rounds);
        }
    }
    let rows: Vec<Value> = all.iter().map(LibraryRun::json).collect();
    report::write(&server, &rows, options)
}
