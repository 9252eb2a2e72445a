//! Many tasks of one client that wait for one name or for many: memory, and how fast they are served after the
//! release.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::{Duration, Instant};

use redlatch::{Client, Guard, Lock};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::fresh::{in_child, powers_of_ten};
use crate::options::Options;
use crate::resident_memory::resident_memory;
use crate::samples::round;
use crate::{Result, command_stats, held};

pub(crate) const NAME: &str = "scale_waiting";

/// Tasks for each name, in the rows with many names.
const TASKS_PER_NAME: usize = 10;

pub(crate) async fn measure(options: &Options) -> Result<Vec<Value>> {
    println!(
        "\n{NAME}: tasks of one client wait for locks that the client then releases; each task"
    );
    println!("acquires and releases once. Bytes of resident memory for each waiting task.");
    println!("      tasks   names   hand-over   bytes   served/s   commands per task");
    let mut shapes: Vec<_> = powers_of_ten(options.waiting)
        .map(|tasks| (tasks, 1))
        .collect();
    shapes.push((options.waiting, options.waiting / TASKS_PER_NAME));
    let mut rows = Vec::new();
    for (tasks, names) in shapes {
        for hand_over in [true, false] {
            let values = [tasks.to_string(), names.to_string(), hand_over.to_string()];
            let args = [&[NAME.to_owned()][..], &values].concat();
            let row = in_child(&args).await?;
            println!(
                "  {tasks:9} {names:7} {:>11} {:>7} {:>10} {:>19}",
                if hand_over { "yes" } else { "no" },
                row["bytes_per_task"].to_string(),
                row["served_per_s"].to_string(),
                row["commands_per_task"].to_string(),
            );
            rows.push(row);
        }
    }
    Ok(rows)
}

/// Measures this many tasks, in this process.
pub(crate) async fn row(tasks: usize, names: usize, hand_over: bool) -> Result<Value> {
    let server = &Server::start();
    let builder = Client::builder().local_hand_over(hand_over);
    let client = builder.connect(&server.url()).await?;
    let guards = held::acquire_all(&client, names).await?;
    let locks: Vec<Lock> = (0..names).map(|n| client.lock(&held::name(n))).collect();
    let before = resident_memory("self")?;
    let queued = Arc::new(AtomicUsize::new(0));
    let mut waiting = Vec::with_capacity(tasks);
    waiting.extend(locks.iter().map(|lock| wait(lock, &queued)));
    until_queued(&client, names, &queued, names).await;
    // Now every name has a queue, which all further tasks join when they are first polled.
    let further = (names..tasks).map(|number| wait(&locks[number % names], &queued));
    waiting.extend(further);
    until_queued(&client, names, &queued, tasks).await;
    let bytes = resident_memory("self")?.saturating_sub(before) as f64 / tasks as f64;

    command_stats::reset(server);
    let started = Instant::now();
    held::release_all(guards).await?;
    for task in waiting {
        task.await??;
    }
    let took = started.elapsed().as_secs_f64();
    let commands = command_stats::read(server).sent() as f64 / tasks as f64;
    Ok(json!({
        "name": NAME,
        "tasks": tasks,
        "names": names,
        "local_hand_over": hand_over,
        "bytes_per_task": round(bytes, 0),
        "served_per_s": round(tasks as f64 / took, 0),
        "commands_per_task": round(commands, 3),
    }))
}

/// Starts a task that acquires and releases the lock once, and counts it when it waits.
fn wait(lock: &Lock, queued: &Arc<AtomicUsize>) -> JoinHandle<Result<()>> {
    let (lock, queued) = (lock.clone(), queued.clone());
    tokio::spawn(async move { Ok(acquire_counted(&lock, &queued).await?.unlock().await?) })
}

/// Acquires the lock, which is held, and counts the request when it has been polled once.
pub(crate) async fn acquire_counted(lock: &Lock, queued: &AtomicUsize) -> Result<Guard> {
    let mut request = lock.lock().into_future();
    let acquired = poll_fn(|task| Poll::Ready(request.as_mut().poll(task).is_ready())).await;
    if acquired {
        return Err("the lock was free".into());
    }
    queued.fetch_add(1, Relaxed);
    Ok(request.await?)
}

/// Waits until this many requests have been polled, and this many names are subscribed.
pub(crate) async fn until_queued(
    client: &Client,
    names: usize,
    queued: &AtomicUsize,
    tasks: usize,
) {
    while queued.load(Relaxed) < tasks || client.status().subscriptions < names {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
