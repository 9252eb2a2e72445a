//! The time from a release in one client to the acquisition by a waiter in another.

use std::io::BufRead as _;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::task::JoinHandle;

use crate::kinds::{KINDS, Kind};
use crate::options::Options;
use crate::samples::{median, micros, quantile, round};
use crate::{Result, bare};

pub(crate) const NAME: &str = "lock_wake";
pub(crate) const PRIMITIVES: &str = "primitive_wake";

/// How long the lock is held each time: long enough for the waiter to try, to subscribe, to retry
/// and to sleep.
const HOLD_TIME: Duration = Duration::from_millis(3);

const WARM_UP: usize = 50;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Value> {
    println!("\n{NAME}: from the call of unlock in one client to the acquisition by another that");
    println!(
        "waits; in µs and in round trips (median of PINGs sent one after the other, without redlatch). A"
    );
    println!(
        "PING after a pause includes waking idle threads, as a wake-up after a held lock does."
    );
    println!("                             p50 µs     p99 µs   p50 trips   p99 trips");
    let pings = measure_pings(&server.url(), options.wakes, None).await?;
    let idle_pings = measure_pings(&server.url(), options.wakes, Some(HOLD_TIME)).await?;
    let same_process = wake_in_process(&server.url(), options.wakes).await?;
    let other_process = wake_across_processes(&server.url(), &KINDS[0], options.wakes).await?;
    let trip = median(&pings);
    for (what, samples) in [
        ("PING", &pings),
        ("PING after a pause", &idle_pings),
        ("wake in the same process", &same_process),
        ("wake in another process", &other_process),
    ] {
        let (p50, p99) = (median(samples), quantile(samples, 0.99));
        println!(
            "  {what:24} {p50:9.1} {p99:10.1} {:11.2} {:11.2}",
            p50 / trip,
            p99 / trip
        );
    }
    Ok(json!({
        "name": NAME,
        "wakes": options.wakes,
        "ping_p50_us": round(trip, 1),
        "ping_p99_us": round(quantile(&pings, 0.99), 1),
        "idle_ping_p50_us": round(median(&idle_pings), 1),
        "idle_ping_p99_us": round(quantile(&idle_pings, 0.99), 1),
        "wake_p50_idle_trips": round(median(&same_process) / median(&idle_pings), 2),
        "wake_p50_us": round(median(&same_process), 1),
        "wake_p99_us": round(quantile(&same_process, 0.99), 1),
        "wake_p50_trips": round(median(&same_process) / trip, 2),
        "wake_p99_trips": round(quantile(&same_process, 0.99) / trip, 2),
        "other_process_p50_us": round(median(&other_process), 1),
        "other_process_p99_us": round(quantile(&other_process, 0.99), 1),
        "other_process_p50_trips": round(median(&other_process) / trip, 2),
        "other_process_p99_trips": round(quantile(&other_process, 0.99) / trip, 2),
    }))
}

/// Measures every primitive, with a waiter in another process.
pub(crate) async fn measure_primitives(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!(
        "\n{PRIMITIVES}: from the release in one process to the acquisition by another that waits, for"
    );
    println!("every primitive; in µs and in round trips after a pause.");
    println!("                             p50 µs     p99 µs   p50 trips   p99 trips");
    let wakes = options.wakes / 4;
    let trip = median(&measure_pings(&server.url(), wakes, Some(HOLD_TIME)).await?);
    let mut rows = Vec::new();
    for kind in &KINDS {
        let samples = wake_across_processes(&server.url(), kind, wakes).await?;
        let (p50, p99) = (median(&samples), quantile(&samples, 0.99));
        println!(
            "  {:24} {p50:9.1} {p99:10.1} {:11.2} {:11.2}",
            kind.name,
            p50 / trip,
            p99 / trip
        );
        rows.push(json!({
            "name": PRIMITIVES,
            "primitive": kind.name,
            "wakes": wakes,
            "idle_ping_p50_us": round(trip, 1),
            "p50_us": round(p50, 1),
            "p99_us": round(p99, 1),
            "p50_idle_trips": round(p50 / trip, 2),
            "p99_idle_trips": round(p99 / trip, 2),
        }));
    }
    Ok(rows)
}

/// Measures round trips of PING. With `pause`, sleeps before each, so that they include waking idle threads.
async fn measure_pings(url: &str, count: usize, pause: Option<Duration>) -> Result<Vec<f64>> {
    let mut connection = bare::connect(url).await?;
    let mut trips = Vec::with_capacity(count);
    for number in 0..WARM_UP + count {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        let sent = Instant::now();
        redis::cmd("PING").exec_async(&mut connection).await?;
        if number >= WARM_UP {
            trips.push(micros(sent.elapsed()));
        }
    }
    Ok(trips)
}

async fn wake_in_process(url: &str, wakes: usize) -> Result<Vec<f64>> {
    let holder = Client::connect(url).await?.lock("bench:wake");
    let waiter = Client::connect(url).await?.lock("bench:wake");
    let mut samples = Vec::with_capacity(wakes);
    for number in 0..WARM_UP + wakes {
        let guard = holder.lock().await?;
        let waiter = waiter.clone();
        let waiting: JoinHandle<Result<_>> = tokio::spawn(async move {
            let guard = waiter.lock().await?;
            Ok((guard, Instant::now()))
        });
        tokio::time::sleep(HOLD_TIME).await;
        let release_started = Instant::now();
        guard.unlock().await?;
        let (guard, woken) = waiting.await??;
        if number >= WARM_UP {
            samples.push(micros(woken - release_started));
        }
        guard.unlock().await?;
    }
    Ok(samples)
}

async fn wake_across_processes(url: &str, kind: &Kind, wakes: usize) -> Result<Vec<f64>> {
    let name = format!("bench:wake:{}", kind.name);
    let mut peer = tokio::process::Command::new(std::env::current_exe()?)
        .args(["--wake-peer", url, kind.name, &name])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut requests = peer.stdin.take().ok_or("no pipe")?;
    let mut reports = BufReader::new(peer.stdout.take().ok_or("no pipe")?).lines();
    let client = Client::connect(url).await?;
    (kind.prepare)(client.clone(), name.clone()).await?;
    let hold = (kind.hold)(&client, &name);
    let mut samples = Vec::with_capacity(wakes);
    for number in 0..WARM_UP + wakes {
        let release = hold().await?;
        requests.write_all(b"acquire\n").await?;
        reports.next_line().await?; // "waiting"
        tokio::time::sleep(HOLD_TIME).await;
        let release_started = nanos()?;
        release().await?;
        let woken = reports.next_line().await?;
        let woken: u128 = woken.ok_or("the other process has ended")?.parse()?;
        let latency = woken.checked_sub(release_started);
        let latency = latency.ok_or("the other process did not wait")?;
        if number >= WARM_UP {
            samples.push(latency as f64 / 1e3);
        }
        reports.next_line().await?; // "released"
    }
    drop(requests);
    peer.wait().await?;
    Ok(samples)
}

/// The peer process: for each line that it reads, it waits, reports the time of the acquisition,
/// and releases.
pub(crate) async fn peer(url: &str, kind: &str, name: &str) -> Result<()> {
    let kind = KINDS.iter().find(|known| known.name == kind);
    let kind = kind.ok_or("no such primitive")?;
    let acquire = (kind.wait)(&Client::connect(url).await?, name);
    for request in std::io::stdin().lock().lines() {
        request?;
        println!("waiting");
        let release = acquire().await?;
        println!("{}", nanos()?);
        release().await?;
        println!("released");
    }
    Ok(())
}

/// Returns the time of a clock that all processes share. It can be set, but that is unlikely during
/// a measurement.
pub(crate) fn nanos() -> Result<u128> {
    Ok(SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_nanos())
}
