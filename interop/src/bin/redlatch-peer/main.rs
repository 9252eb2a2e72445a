//! The peer on redlatch: runs commands from standard input. See `interop/PROTOCOL.md`.
#![forbid(unsafe_code)]

mod contention;
mod latches;
mod locks;
mod permits;
mod settings;
mod throughput;
mod worker;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use settings::Servers;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> ExitCode {
    let servers = match settings::connect(std::env::args().skip(1)).await {
        Ok(servers) => Arc::new(servers),
        Err(error) => {
            eprintln!("redlatch-peer: {error}");
            return ExitCode::FAILURE;
        }
    };
    print_line(&json!({ "ready": concat!("redlatch ", env!("CARGO_PKG_VERSION")) }));
    // The process ends with standard input, without releasing anything.
    let reading = tokio::task::spawn_blocking(move || read(&servers));
    match reading.await {
        Ok(()) => std::process::exit(0),
        Err(_) => ExitCode::FAILURE,
    }
}

fn read(servers: &Arc<Servers>) {
    let mut workers: HashMap<u64, mpsc::UnboundedSender<worker::Request>> = HashMap::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let mut words = line.split(' ').map(str::to_owned);
        let head = (number(words.next()), number(words.next()));
        let (Some(id), Some(worker)) = head else {
            print_line(&json!({ "id": head.0, "error": format!("unknown command {line:?}") }));
            continue;
        };
        let requests = workers
            .entry(worker)
            .or_insert_with(|| worker::start(servers.clone()));
        let words = words.collect();
        if requests.send(worker::Request { id, words }).is_err() {
            print_line(&json!({ "id": id, "error": "this worker has ended" }));
        }
    }
}

fn number(word: Option<String>) -> Option<u64> {
    word?.parse().ok()
}

/// Prints one line; concurrent answers do not mix.
pub(crate) fn print_line(answer: &Value) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{answer}")
        .and_then(|()| out.flush())
        .is_err()
    {
        // The reader has closed the pipe.
        std::process::exit(0);
    }
}

/// Returns the error for a command that this peer does not know, or that has other arguments.
pub(crate) fn unknown_command(command: &str, args: &[&str]) -> Error {
    format!("unknown command {command} {args:?}").into()
}

/// Returns the nanoseconds of the machine's monotonic clock, which all processes share.
pub(crate) fn now() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}
