//! Tasks in many processes that compete for one name: how evenly the processes are served, and how long the
//! name stays free.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::task::JoinSet;

use crate::Result;
use crate::options::Options;
use crate::samples::round;
use crate::waiting::{acquire_counted, until_queued};
use crate::wake::nanos;

pub(crate) const NAME: &str = "scale_processes";

const LOCK: &str = "bench:processes";

/// Tasks of each process.
const TASKS: usize = 100;

/// How long the tasks compete.
const WINDOW: Duration = Duration::from_secs(5);

/// When each task of a process acquired, in nanoseconds of the shared clock.
type Times = Vec<Vec<u128>>;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!(
        "\n{NAME}: processes with {TASKS} tasks each compete for one name for {WINDOW:?}, which"
    );
    println!(
        "is released when all of them wait. Pauses in ms: time without an acquisition, of all"
    );
    println!("processes together and of the process with the longest.");
    println!(
        "  processes   hand-over   acquired/s   turns of a process   tasks served   pause   of one   all served s"
    );
    let mut rows = Vec::new();
    for processes in [10, 100]
        .into_iter()
        .filter(|number| *number <= options.processes)
    {
        for hand_over in [true, false] {
            let row = compete(server, processes, hand_over).await?;
            let turns = format!("{} to {}", row["turns_fewest"], row["turns_most"]);
            println!(
                "  {processes:9} {:>11} {:>12} {turns:>20} {:>14} {:>7} {:>8} {:>14}",
                if hand_over { "yes" } else { "no" },
                row["acquired_per_s"].to_string(),
                row["tasks_served"].to_string(),
                row["longest_pause_ms"].to_string(),
                row["longest_pause_of_process_ms"].to_string(),
                row["all_served_after_s"].to_string(),
            );
            rows.push(row);
        }
    }
    Ok(rows)
}

async fn compete(server: &Server, processes: usize, hand_over: bool) -> Result<Value> {
    let client = Client::connect(&server.url()).await?;
    let guard = client.lock(LOCK).lock().await?;
    let mut children = Vec::new();
    for _ in 0..processes {
        let child = tokio::process::Command::new(std::env::current_exe()?)
            .args(["--contender", &server.url(), &hand_over.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        children.push(child);
    }
    let mut reports = Vec::new();
    for child in &mut children {
        let mut report = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
        report.next_line().await?; // "queued"
        reports.push(report);
    }
    let begun = nanos()?;
    guard.unlock().await?;
    tokio::time::sleep(WINDOW).await;
    let end = nanos()?;
    // The end of its input stops a process. Its pending requests are still served.
    for child in &mut children {
        drop(child.stdin.take());
    }
    let mut processes_times: Vec<Times> = Vec::new();
    for report in &mut reports {
        let times = report.next_line().await?.ok_or("a process has failed")?;
        processes_times.push(serde_json::from_str(&times)?);
    }
    let drained = nanos()?;
    let in_window = |times: &[u128]| times.iter().filter(|time| **time <= end).count();
    let tasks = processes_times.iter().flatten();
    let served = tasks.filter(|times| in_window(times) > 0).count();
    let by_process: Vec<Vec<u128>> = processes_times.iter().map(|times| times.concat()).collect();
    let turns: Vec<usize> = by_process.iter().map(|times| in_window(times)).collect();
    let pauses = by_process
        .iter()
        .map(|times| longest_pause(times, begun, end));
    let process_pause = pauses.fold(0.0, f64::max);
    let pause = longest_pause(&by_process.concat(), begun, end);
    let seconds = |from: u128, to: u128| round((to - from) as f64 / 1e9, 1);
    let window = seconds(begun, end);
    let per_s = round(turns.iter().sum::<usize>() as f64 / window, 0);
    let (fewest, most) = (turns.iter().min(), turns.iter().max());
    Ok(json!({
        "name": NAME,
        "processes": processes,
        "local_hand_over": hand_over,
        "tasks": processes * TASKS,
        "window_s": window,
        "acquired_per_s": per_s,
        "turns_fewest": fewest,
        "turns_most": most,
        "tasks_served": served,
        "longest_pause_ms": pause,
        "longest_pause_of_process_ms": process_pause,
        "all_served_after_s": seconds(begun, drained),
    }))
}

/// Returns the longest time in ms without an acquisition, from the beginning to the end of the measurement.
fn longest_pause(times: &[u128], begun: u128, end: u128) -> f64 {
    let mut times: Vec<u128> = times.iter().map(|time| *time.min(&end)).collect();
    times.extend([begun, end]);
    times.sort_unstable();
    let pauses = times.windows(2).map(|pair| pair[1] - pair[0]);
    round(pauses.max().unwrap_or_default() as f64 / 1e6, 1)
}

/// A process of the benchmark: its tasks acquire and release until its input ends. Prints a line when all of
/// them wait for the first time, and at the end the times of all acquisitions.
pub(crate) async fn contend(url: &str, hand_over: bool) -> Result<()> {
    let client = Client::builder()
        .local_hand_over(hand_over)
        .connect(url)
        .await?;
    let lock = client.lock(LOCK);
    let (queued, stop) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut running: JoinSet<Result<_>> = JoinSet::new();
    for _ in 0..TASKS {
        let (lock, queued, stop) = (lock.clone(), queued.clone(), stop.clone());
        running.spawn(async move {
            let mut guard = acquire_counted(&lock, &queued).await?;
            let mut times = Vec::new();
            loop {
                times.push(nanos()?);
                guard.unlock().await?;
                if stop.load(Relaxed) {
                    return Ok(times);
                }
                guard = lock.lock().await?;
            }
        });
    }
    until_queued(&client, 1, &queued, TASKS).await;
    println!("queued");
    // Waits on the main thread, which runs no tasks.
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    stop.store(true, Relaxed);
    let mut times = Times::new();
    while let Some(ended) = running.join_next().await {
        times.push(ended??);
    }
    println!("{}", serde_json::to_string(&times)?);
    Ok(())
}
