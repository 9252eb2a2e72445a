//! One client that holds many locks: the cost of renewal by the watchdog.

use std::time::{Duration, Instant};

use redlatch::{Client, Guard};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::cpu_time::cpu_time;
use crate::options::Options;
use crate::resident_memory::resident_memory;
use crate::samples::round;
use crate::{Result, command_stats};

pub(crate) const NAME: &str = "lock_held";

/// Tasks that acquire at the same time.
const TASKS: usize = 128;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Value> {
    let (locks, window, lease) = (options.locks, options.window, options.lease);
    println!("\n{NAME}: {locks} locks held by one client, a watchdog of {lease:?}, measured");
    println!("for {window:?}. CPU in percent of one core.");
    let () = server.command(&["FLUSHALL"]);
    let builder = Client::builder().watchdog_lease(lease);
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
    tokio::time::sleep(window).await;
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
    println!("  client {client_cpu:.1} % CPU, server {server_cpu:.1} % CPU");
    println!("  {commands:.1} commands/s, {inner:.0} calls in scripts/s");
    println!("  {bytes:.0} bytes per held lock, {bytes_after:.0} after the window");
    println!("  {valid} of {locks} valid at the end, {kept} in the server");
    println!("  acquired in {acquiring:.1} s, released in {releasing:.1} s");
    Ok(json!({
        "name": NAME,
        "locks": locks,
        "lease_s": lease.as_secs_f64(),
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

async fn acquire_all(client: &Client, locks: usize) -> Result<Vec<Guard>> {
    let mut tasks: JoinSet<Result<_>> = JoinSet::new();
    for task in 0..TASKS {
        let client = client.clone();
        tasks.spawn(async move {
            let mut guards = Vec::with_capacity(locks.div_ceil(TASKS));
            for number in (task..locks).step_by(TASKS) {
                guards.push(client.lock(&format!("bench:held:{number}")).lock().await?);
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

async fn release_all(mut guards: Vec<Guard>) -> Result<()> {
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
