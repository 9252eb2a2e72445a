//! One client that holds many locks: memory, and the cost of renewal by the watchdog.

use std::time::{Duration, Instant};

use redlatch::{Client, Guard};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::cpu_time::cpu_time;
use crate::fresh::{in_child, powers_of_ten};
use crate::options::Options;
use crate::resident_memory::resident_memory;
use crate::samples::round;
use crate::{Result, command_stats};

pub(crate) const NAME: &str = "scale_held";

/// Tasks that acquire at the same time.
const TASKS: usize = 128;

pub(crate) async fn measure(options: &Options) -> Result<Vec<Value>> {
    let (window, lease) = (options.window.as_secs(), options.lease.as_secs());
    println!(
        "\n{NAME}: locks held by one client, a watchdog of {lease} s, measured for {window} s;"
    );
    println!("CPU in percent of one core, bytes of resident memory of the client for each lock.");
    println!(
        "      locks   client %   server %   commands/s   bytes   after   acquired s   released s   lost"
    );
    let mut rows = Vec::new();
    for locks in powers_of_ten(options.locks) {
        let args = [
            NAME.to_owned(),
            format!("{locks}"),
            format!("{window}"),
            format!("{lease}"),
        ];
        let row = in_child(&args).await?;
        let figure = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        println!(
            "  {locks:9} {:10.2} {:10.2} {:12.1} {:7} {:7} {:12.2} {:12.2} {:6}",
            figure("client_cpu_percent"),
            figure("server_cpu_percent"),
            figure("commands_per_s"),
            figure("bytes_per_lock"),
            figure("bytes_per_lock_after"),
            figure("acquire_s"),
            figure("release_s"),
            figure("lost"),
        );
        rows.push(row);
    }
    Ok(rows)
}

/// Measures this many locks, in this process. `window` and `lease` are in seconds.
pub(crate) async fn row(locks: usize, window: u64, lease: u64) -> Result<Value> {
    let server = &Server::start();
    let builder = Client::builder().watchdog_lease(Duration::from_secs(lease));
    let client = builder.connect(&server.url()).await?;
    // One-time costs of any client are not a cost of a held lock.
    client.lock("bench:first").lock().await?.unlock().await?;

    let before = resident_memory("self")?;
    let started = Instant::now();
    let guards = acquire_all(&client, locks).await?;
    let acquiring = started.elapsed().as_secs_f64();
    let bytes = resident_memory("self")?.saturating_sub(before) as f64 / locks as f64;

    command_stats::reset(server);
    let (client_before, server_before) = (cpu_time()?, server_cpu(server)?);
    let started = Instant::now();
    tokio::time::sleep(Duration::from_secs(window)).await;
    let took = started.elapsed().as_secs_f64();
    let percent = |used: Duration| used.as_secs_f64() / took * 100.0;
    let client_cpu = percent(cpu_time()?.saturating_sub(client_before));
    let server_cpu = percent(server_cpu(server)?.saturating_sub(server_before));
    let done = command_stats::read(server);
    let commands = done.sent() as f64 / took;
    let inner = done.inner().map(|(_, calls)| calls).sum::<u64>() as f64 / took;
    let bytes_after = resident_memory("self")?.saturating_sub(before) as f64 / locks as f64;

    let valid = guards.iter().filter(|guard| guard.is_valid()).count();
    let kept: usize = server.command(&["DBSIZE"]);
    let started = Instant::now();
    release_all(guards).await?;
    let releasing = started.elapsed().as_secs_f64();
    Ok(json!({
        "name": NAME,
        "locks": locks,
        "lease_s": lease,
        "window_s": round(took, 2),
        "client_cpu_percent": round(client_cpu, 2),
        "server_cpu_percent": round(server_cpu, 2),
        "commands_per_s": round(commands, 2),
        "inner_calls_per_s": round(inner, 0),
        "bytes_per_lock": round(bytes, 0),
        "bytes_per_lock_after": round(bytes_after, 0),
        "valid_at_end": valid,
        "kept_by_server": kept,
        "lost": locks - valid,
        "acquire_s": round(acquiring, 2),
        "release_s": round(releasing, 2),
    }))
}

pub(crate) async fn acquire_all(client: &Client, locks: usize) -> Result<Vec<Guard>> {
    let mut tasks: JoinSet<Result<_>> = JoinSet::new();
    for task in 0..TASKS {
        let client = client.clone();
        tasks.spawn(async move {
            let mut guards = Vec::with_capacity(locks.div_ceil(TASKS));
            for number in (task..locks).step_by(TASKS) {
                guards.push(client.lock(&name(number)).lock().await?);
            }
            Ok(guards)
        });
    }
    let mut guards = Vec::with_capacity(locks);
    while let Some(ended) = tasks.join_next().await {
        guards.append(&mut ended??);
    }
    Ok(guards)
}

/// Returns the name of the lock with this number.
pub(crate) fn name(number: usize) -> String {
    format!("bench:held:{number}")
}

pub(crate) async fn release_all(mut guards: Vec<Guard>) -> Result<()> {
    let share = guards.len().div_ceil(TASKS);
    let mut tasks: JoinSet<Result<_>> = JoinSet::new();
    while !guards.is_empty() {
        let some = guards.split_off(guards.len().saturating_sub(share));
        tasks.spawn(async move {
            for guard in some {
                guard.unlock().await?;
            }
            Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

fn server_cpu(server: &Server) -> Result<Duration> {
    let part = |name: &str| server.info(name).parse::<f64>();
    let used = part("used_cpu_user")? + part("used_cpu_sys")?;
    Ok(Duration::from_secs_f64(used))
}
