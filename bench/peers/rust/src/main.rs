//! A worker of `make bench-peers` on a lock library for Rust. See `bench/peers/README.md`.
#![forbid(unsafe_code)]

mod libraries;

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use libraries::{Distkit, DistributedLock, Library, Redlatch, Rslock};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [library, url, interval] = &args[..] else {
        return Err("usage: redlatch-bench-peers-rust LIBRARY URL INTERVAL_MS".into());
    };
    let interval = Duration::from_millis(interval.parse()?);
    let ready = format!("{library} {}", version(library));
    // Runs as tasks on the runtime's own threads: waking the main thread would cost more.
    let serving = match library.as_str() {
        "redlatch" => tokio::spawn(serve(ready, Redlatch::connect(url).await?)),
        "rslock" => tokio::spawn(serve(ready, Rslock::new(url, interval))),
        "distkit" => tokio::spawn(serve(ready, Distkit::connect(url, interval).await?)),
        "distributed-lock-redis" => {
            tokio::spawn(serve(ready, DistributedLock::connect(url, interval).await?))
        }
        _ => return Err(format!("unknown library {library}").into()),
    };
    serving.await?
}

/// Returns the version of a dependency from the lock file.
fn version(package: &str) -> &str {
    let entry = format!("name = \"{package}\"\nversion = \"");
    let (_, rest) = include_str!("../Cargo.lock")
        .split_once(&entry)
        .unwrap_or_default();
    rest.split('"').next().unwrap_or_default()
}

/// Returns the lines of standard input. Ends the process with it, also while a task waits for a lock.
fn input() -> mpsc::UnboundedReceiver<String> {
    let (sender, lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(std::io::Result::ok) {
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    lines
}

/// Runs the commands from standard input.
async fn serve<L: Library>(ready: String, library: L) -> Result<()> {
    println!("{}", json!({ "ready": ready }));
    let mut held = None;
    let mut lines = input();
    while let Some(line) = lines.recv().await {
        let words: Vec<&str> = line.split(' ').collect();
        let [id, _worker, command, _kind, name, args @ ..] = &words[..] else {
            return Err(format!("unknown command {line:?}").into());
        };
        let started = now();
        let value = match (*command, args) {
            ("lock", _) => {
                held = Some(L::acquire(&library.handle(name)).await?);
                json!(true)
            }
            ("unlock", _) => {
                L::release(held.take().ok_or("the lock is not held")?).await?;
                json!(true)
            }
            ("pairs" | "contend", [tasks, ms]) => {
                let own_names = *command == "pairs";
                json!(pairs(&library, name, own_names, tasks.parse()?, ms.parse()?).await?)
            }
            _ => return Err(format!("unknown command {line:?}").into()),
        };
        let (id, ended) = (id.parse::<u64>()?, now());
        println!(
            "{}",
            json!({ "id": id, "started": started, "ended": ended, "ok": value })
        );
    }
    Ok(())
}

/// Acquires and releases in this many tasks, each with a lock of its own or all with the same. Returns the number of
/// pairs of each task.
async fn pairs<L: Library>(
    library: &L,
    name: &str,
    own_names: bool,
    tasks: usize,
    ms: u64,
) -> Result<Vec<u64>> {
    let end = Instant::now() + Duration::from_millis(ms);
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let lock = match own_names {
            true => library.handle(&format!("{name}{task}")),
            false => library.handle(name),
        };
        running.spawn(async move {
            let mut pairs = 0;
            while Instant::now() < end {
                L::release(L::acquire(&lock).await?).await?;
                pairs += 1;
            }
            Ok(pairs)
        });
    }
    running.join_all().await.into_iter().collect()
}

/// Returns the nanoseconds of the machine's monotonic clock, which all processes share.
fn now() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}
