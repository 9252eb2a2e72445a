//! Compares Redisson and redlatch: `make bench-redisson`.
//!
//! Both run in separate processes on one server that is started for them. They alternate, so that
//! other load on the machine affects both alike. The figures can be compared with each other, not
//! with those of another machine or day.
#![forbid(unsafe_code)]

mod memory;
mod options;
mod pairs;
#[path = "../resident_memory.rs"]
mod resident_memory;
#[path = "../samples.rs"]
mod samples;
mod sides;
mod traffic;
mod wake;

use std::process::ExitCode;

use redlatch_testkit::Server;
use serde_json::{Value, json};

use options::Options;
use sides::{Figure, Sides};

fn main() -> ExitCode {
    let options = match options::read(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{}", options::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(wrong) => {
            eprint!("redlatch-bench-redisson: {wrong}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match bench(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redlatch-bench-redisson: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> std::io::Result<()> {
    let server = Server::start();
    let redis = server.info("redis_version");
    let sides = Sides::start(&server);
    let cpus = std::thread::available_parallelism()?;
    println!(
        "{} and {} on Redis {redis}, {cpus} CPUs",
        sides.redisson.library_version(),
        sides.redlatch.library_version()
    );
    println!("\nEach line: Redisson, redlatch, and their ratio (above 1: redlatch is better).\n");

    let mut figures: Vec<Figure> = Vec::new();
    println!("warming up both for {} s", options.warm_up.as_secs());
    pairs::warm_up(&sides, options);
    for threads in [1, 16, 128] {
        figures.push(pairs::uncontended(&sides, threads, options));
    }
    figures.push(pairs::contended(&sides, options));
    figures.push(pairs::contended_over_processes(&server, &sides, options));
    figures.extend(wake::measure(&server, &sides, options));
    drop(sides);
    // New processes: in a JVM that has acquired and released many locks, unneeded renewals
    // continue.
    figures.push(traffic::measure(&server));
    figures.extend(memory::measure(&server, options)?);

    let rows: Vec<Value> = figures.iter().map(Figure::json).collect();
    let written = json!({ "redis": redis, "cpus": cpus.get(), "figures": rows });
    if let Some(folder) = options.json.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&options.json, format!("{written:#}\n"))?;
    println!("\nWritten to {}", options.json.display());
    Ok(())
}
