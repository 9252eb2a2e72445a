//! Many tasks of one process compete for one name, compared with a mutex of that process.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use redlatch::{Client, Lock};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::task::{JoinSet, yield_now};

use crate::options::Options;
use crate::ratio::{Comparison, compare, rate};
use crate::samples::{micros, round};
use crate::{Result, command_stats};

pub(crate) const NAME: &str = "lock_contended";

const TASKS: usize = 16;

/// Of the rate of a `tokio::sync::Mutex`.
const GOAL: f64 = 0.25;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Value> {
    println!("\n{NAME}: {TASKS} tasks of one process contend for one name;");
    println!("served in order of arrival, the longest wait stays near the mean.");
    let client = Client::connect(&server.url()).await?;
    let lock = client.lock("bench:contended");
    contend(&lock, options.round).await?; // warm-up
    command_stats::reset(server);
    let started = Instant::now();
    let waits = contend(&lock, options.contended).await?;
    let took = started.elapsed().as_secs_f64();
    let done = command_stats::read(server);

    let counts: Vec<usize> = waits.iter().map(Vec::len).collect();
    let waits: Vec<f64> = waits.into_iter().flatten().map(micros).collect();
    let pairs = waits.len() as f64;
    let per_s = pairs / took;
    let commands = done.sent() as f64 / pairs;
    let mean = waits.iter().sum::<f64>() / pairs;
    let longest = waits.iter().copied().fold(0.0, f64::max);
    let least = counts.iter().min().copied().unwrap_or_default();
    let most = counts.iter().max().copied().unwrap_or_default();
    println!("  {per_s:.0} pairs/s, {commands:.3} commands per pair");
    println!(
        "  longest wait {longest:.0} µs = {:.1} times the mean of {mean:.0} µs; \
         {least} to {most} turns per task",
        longest / mean
    );
    println!(
        "                               ours/s    mutex/s   ratio  (quartiles)     goal {GOAL:.2}"
    );
    let compared = compare_with_mutex(&lock, false, options).await?;
    println!("  tokio::sync::Mutex       {}", compared.table_row(GOAL));
    let passed_on = compare_with_mutex(&lock, true, options).await?;
    println!("  the same, if each yields {}", passed_on.table_row(GOAL));
    Ok(json!({
        "name": NAME,
        "tasks": TASKS,
        "ours_per_s": round(per_s, 0),
        "commands_per_pair": round(commands, 3),
        "wait_mean_us": round(mean, 1),
        "wait_longest_us": round(longest, 1),
        "longest_to_mean": round(longest / mean, 2),
        "turns_least": least,
        "turns_most": most,
        "tokio_mutex": compared.json(GOAL),
        "tokio_mutex_passed_on": passed_on.json(GOAL),
    }))
}

/// The same tasks, which acquire a mutex of their process in every other round. A task that does not yield while it holds the
/// mutex mostly finds it free again: with `yields`, the mutex passes on from task to task, too.
async fn compare_with_mutex(lock: &Lock, yields: bool, options: &Options) -> Result<Comparison> {
    let mutex = Arc::new(Mutex::new(()));
    let ours = || {
        rate(TASKS, options.round, |_, stop| {
            let lock = lock.clone();
            async move {
                let mut pairs = 0;
                while !stop.load(Relaxed) {
                    let guard = lock.lock().await?;
                    if yields {
                        yield_now().await;
                    }
                    guard.unlock().await?;
                    pairs += 1;
                }
                Ok(pairs)
            }
        })
    };
    let theirs = || {
        rate(TASKS, options.round, |_, stop| {
            let mutex = mutex.clone();
            async move {
                let mut pairs = 0;
                while !stop.load(Relaxed) {
                    let guard = mutex.lock().await;
                    if yields {
                        yield_now().await;
                    }
                    drop(guard);
                    pairs += 1;
                }
                Ok(pairs)
            }
        })
    };
    compare(ours, theirs, options.rounds.div_ceil(4)).await
}

/// Returns how long each task waited for each of its acquisitions.
async fn contend(lock: &Lock, time: Duration) -> Result<Vec<Vec<Duration>>> {
    let end = Instant::now() + time;
    let contender = |lock: Lock| async move {
        let mut waits = Vec::new();
        while Instant::now() < end {
            let requested = Instant::now();
            let guard = lock.lock().await?;
            waits.push(requested.elapsed());
            guard.unlock().await?;
        }
        Ok(waits)
    };
    let mut contenders: JoinSet<Result<_>> = (0..TASKS).map(|_| contender(lock.clone())).collect();
    let mut waits = Vec::new();
    while let Some(ended) = contenders.join_next().await {
        waits.push(ended??);
    }
    Ok(waits)
}
