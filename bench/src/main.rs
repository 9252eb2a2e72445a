//! The cost of redlatch's locks: `make bench`.
//!
//! Everything is measured in one run, on a server that is started for it, so that figures can be
//! compared with each other. They cannot be compared with those of another machine or day.
#![forbid(unsafe_code)]

mod bare;
mod callers;
mod captured;
mod command_stats;
mod contended;
mod cost;
mod cpu_time;
mod fresh;
mod held;
mod kinds;
mod many_names;
mod options;
mod pairs;
mod primitive_pairs;
mod processes;
mod ratio;
mod resident_memory;
mod samples;
mod sections;
mod visibility;
mod waiting;
mod wake;

use std::process::ExitCode;

use redlatch_testkit::Server;
use serde_json::Value;

use options::{Command, Options};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Error> = std::result::Result<T, E>;

/// All benchmarks, in the order in which they run.
const BENCHMARKS: [&str; 13] = [
    pairs::NAME,
    visibility::NAME,
    contended::NAME,
    sections::NAME,
    many_names::NAME,
    cost::NAME,
    wake::NAME,
    primitive_pairs::NAME,
    wake::PRIMITIVES,
    held::NAME,
    waiting::NAME,
    processes::NAME,
    callers::NAME,
];

#[tokio::main]
async fn main() -> ExitCode {
    let done = match options::read(std::env::args().skip(1), &BENCHMARKS) {
        Ok(Command::Help) => {
            print!("{}", options::USAGE);
            Ok(())
        }
        Ok(Command::WakePeer { url, kind, name }) => wake::peer(&url, &kind, &name).await,
        Ok(Command::Contender { url, hand_over }) => processes::contend(&url, hand_over).await,
        Ok(Command::Row(args)) => on_worker(async move { print_row(&args).await }).await,
        Ok(Command::Bench(options)) => on_worker(async move { bench(&options).await }).await,
        Err(wrong) => {
            eprint!("redlatch-bench: {wrong}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redlatch-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs this as a task on the runtime's own threads: waking the main thread would cost more.
async fn on_worker(work: impl Future<Output = Result<()>> + Send + 'static) -> Result<()> {
    tokio::spawn(work).await?
}

async fn bench(options: &Options) -> Result<()> {
    let server = Server::start();
    println!(
        "redlatch {} on Redis {}, {} CPUs{}",
        env!("CARGO_PKG_VERSION"),
        server.info("redis_version"),
        std::thread::available_parallelism()?,
        if options.quick {
            ", quick: figures are rough"
        } else {
            ""
        },
    );
    let mut rows: Vec<Value> = Vec::new();
    if options.wants(pairs::NAME) {
        rows.extend(pairs::measure(&server, options).await?);
    }
    if options.wants(visibility::NAME) {
        rows.extend(visibility::measure(&server, options).await?);
    }
    if options.wants(contended::NAME) {
        rows.push(contended::measure(&server, options).await?);
    }
    if options.wants(sections::NAME) {
        rows.extend(sections::measure(&server, options).await?);
    }
    if options.wants(many_names::NAME) {
        rows.extend(many_names::measure(&server, options).await?);
    }
    if options.wants(cost::NAME) {
        rows.push(cost::measure(&server, options).await?);
    }
    if options.wants(wake::NAME) {
        rows.push(wake::measure(&server, options).await?);
    }
    if options.wants(primitive_pairs::NAME) {
        rows.extend(primitive_pairs::measure(&server, options).await?);
    }
    if options.wants(wake::PRIMITIVES) {
        rows.extend(wake::measure_primitives(&server, options).await?);
    }
    if options.wants(held::NAME) {
        rows.extend(held::measure(options).await?);
    }
    if options.wants(waiting::NAME) {
        rows.extend(waiting::measure(options).await?);
    }
    if options.wants(processes::NAME) {
        rows.extend(processes::measure(&server, options).await?);
    }
    if options.wants(callers::NAME) {
        rows.extend(callers::measure(options).await?);
    }
    if let Some(folder) = options.json.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&options.json, format!("{:#}\n", Value::Array(rows)))?;
    println!("\nWritten to {}", options.json.display());
    Ok(())
}

/// Measures a row in this process, which is such a child, and prints it as JSON.
async fn print_row(args: &[String]) -> Result<()> {
    let row = match args {
        [name, locks, window, lease] if name == held::NAME => {
            held::row(locks.parse()?, window.parse()?, lease.parse()?).await?
        }
        [name, tasks, names, hand_over] if name == waiting::NAME => {
            waiting::row(tasks.parse()?, names.parse()?, hand_over.parse()?).await?
        }
        _ => return Err(format!("no such row: {args:?}").into()),
    };
    println!("{row}");
    Ok(())
}
