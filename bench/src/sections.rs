//! Sections of different lengths on one contended name: how long the lock takes from one task of a
//! process to the next, and with how many commands.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redlatch::{Client, Lock};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::options::Options;
use crate::samples::{median, micros, quantile, round};
use crate::{Result, command_stats};

pub(crate) const NAME: &str = "lock_sections";

const TASKS: usize = 8;
const SECTIONS_MS: [u64; 5] = [1, 5, 12, 20, 200];

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!(
        "\n{NAME}: {TASKS} tasks of one process contend for one name, and keep it for a time;"
    );
    println!("µs from the release until the next task holds it.");
    println!("  section ms   commands/pair       p50       p99   sections");
    let mut rows = Vec::new();
    for millis in SECTIONS_MS {
        let client = Client::connect(&server.url()).await?;
        let lock = client.lock(&format!("bench:section:{millis}"));
        let section = Duration::from_millis(millis);
        contend(&lock, section, options.round).await?; // warm-up
        command_stats::reset(server);
        let waits = contend(&lock, section, options.contended).await?;
        let commands = command_stats::read(server).sent() as f64 / waits.len() as f64;
        let (p50, p99) = (median(&waits), quantile(&waits, 0.99));
        let sections = waits.len();
        println!("  {millis:10} {commands:15.3} {p50:9.1} {p99:9.1} {sections:10}");
        rows.push(json!({
            "name": NAME,
            "tasks": TASKS,
            "section_ms": millis,
            "commands_per_pair": round(commands, 3),
            "passes_on_p50_us": round(p50, 1),
            "passes_on_p99_us": round(p99, 1),
            "sections": sections,
        }));
    }
    Ok(rows)
}

/// Returns the microseconds from each release until the next task had the lock.
async fn contend(lock: &Lock, section: Duration, time: Duration) -> Result<Vec<f64>> {
    let end = Instant::now() + time;
    let released = Arc::new(Mutex::new(None::<Instant>));
    let contender = |lock: Lock, released: Arc<Mutex<Option<Instant>>>| async move {
        let mut waits = Vec::new();
        while Instant::now() < end {
            let guard = lock.lock().await?;
            let last = released
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            waits.extend(last.map(|last| micros(last.elapsed())));
            sleep(section).await;
            *released.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            guard.unlock().await?;
        }
        Ok(waits)
    };
    let contenders = (0..TASKS).map(|_| contender(lock.clone(), released.clone()));
    let mut contenders: JoinSet<Result<_>> = contenders.collect();
    let mut waits = Vec::new();
    while let Some(ended) = contenders.join_next().await {
        waits.append(&mut ended??);
    }
    Ok(waits)
}
