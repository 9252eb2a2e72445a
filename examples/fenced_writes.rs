//! Two workers add lines to a report in a file. One of them sleeps for longer than its lease, wakes up and
//! writes its outdated report. Without a fencing token the other worker's line is lost. With one, the keeper
//! of the file rejects the late write.
//!
//! ```sh
//! cargo run --example fenced_writes                          # needs no server
//! cargo run --example fenced_writes -- redis://127.0.0.1     # or with REDLATCH_URL
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use redlatch::{Client, Embedded};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const LEASE: Duration = Duration::from_millis(500);

/// Keeps the file: all writes go through it. It does not know about locks and only remembers one number.
struct Keeper {
    file: PathBuf,
    /// The greatest token so far; `None` if it does not check tokens.
    newest: Option<Mutex<u64>>,
}

impl Keeper {
    fn read(&self) -> Result<String> {
        Ok(std::fs::read_to_string(&self.file)?)
    }

    /// Replaces the report, unless a worker with a greater token has already written. Check and write are
    /// one step: no other write comes in between.
    fn write(&self, token: u64, report: &str) -> Result<()> {
        let mut newest = match &self.newest {
            Some(newest) => Some(newest.lock().map_err(|_| "poisoned")?),
            None => None,
        };
        if let Some(newest) = &mut newest {
            if token < **newest {
                return Err(format!("token {token} is too late, {newest} has written").into());
            }
            **newest = token;
        }
        Ok(std::fs::write(&self.file, report)?)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fenced_writes: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let (sleepy, busy) = two_clients(url.as_deref()).await?;
    // A unique name.
    let lock = format!("redlatch-example:{}:report", sleepy.id());
    let file = std::env::temp_dir().join(format!("redlatch-report-{}.txt", std::process::id()));

    let kept = both_keepers([&sleepy, &busy], &lock, &file).await;
    let _ = std::fs::remove_file(&file);
    // Tokens have a key that never expires. This lock will not be used again.
    sleepy.fenced_lock(&lock).delete_token().await?;
    match kept? {
        [false, true] => Ok(()),
        _ => Err("unexpected outcome".into()),
    }
}

/// Returns whether the final report contains busy's line, with a keeper that ignores tokens and one that
/// checks them.
async fn both_keepers(workers: [&Client; 2], lock: &str, file: &Path) -> Result<[bool; 2]> {
    let mut kept = [false; 2];
    for checks in [false, true] {
        match checks {
            false => println!("A keeper that does not look at tokens:"),
            true => println!("\nA keeper that does:"),
        }
        let report = two_workers(workers, lock, file, checks).await?;
        println!("  the report: {:?}", report.trim_end());
        kept[usize::from(checks)] = report.contains("busy");
    }
    println!(
        "\nbusy's line is there: without tokens {}, with tokens {}",
        kept[0], kept[1]
    );
    Ok(kept)
}

/// Both workers add a line to the report. Returns the final content of the file.
async fn two_workers(
    [sleepy, busy]: [&Client; 2],
    lock: &str,
    file: &Path,
    checks: bool,
) -> Result<String> {
    std::fs::write(file, "")?;
    let keeper = Keeper {
        file: file.to_owned(),
        newest: checks.then(Mutex::default),
    };

    let late = sleepy.fenced_lock(lock).lock().lease(LEASE).await?;
    let stale_report = keeper.read()? + "a line of sleepy\n";
    println!("  sleepy has token {} and falls asleep", late.token());

    // The lease ends and the other worker acquires the lock. Its own lease is renewed by the watchdog.
    let guard = busy.fenced_lock(lock).lock().await?;
    let report = keeper.read()? + "a line of busy\n";
    keeper.write(guard.token(), &report)?;
    println!("  busy has token {} and writes its line", guard.token());
    guard.unlock().await?;

    // The guard is no longer valid. A worker that does not check that, or that sleeps right after the check,
    // still writes.
    println!(
        "  sleepy wakes up; its guard is valid: {}; it writes all the same",
        late.is_valid()
    );
    match keeper.write(late.token(), &stale_report) {
        Ok(()) => println!("  the keeper takes it, and busy's line is gone"),
        Err(refused) => println!("  the keeper refuses it: {refused}"),
    }
    keeper.read()
}

/// Creates two clients, as if they were in separate processes.
async fn two_clients(url: Option<&str>) -> Result<(Client, Client)> {
    match url {
        Some(url) => Ok((Client::connect(url).await?, Client::connect(url).await?)),
        None => {
            let store = Embedded::new();
            let client = || Client::builder().connect_embedded(&store);
            Ok((client()?, client()?))
        }
    }
}
