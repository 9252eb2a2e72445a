//! Heap allocations of an uncontended lock and unlock, and the sizes of their futures: `make bench`.
//!
//! A program of its own, because its allocator would make the other measurements slower. Everything runs on one
//! thread, so the tasks of the connection are counted, too.
#![forbid(unsafe_code)]

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use redlatch::{Client, Lock};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const NAME: &str = "lock_allocations";

/// The file that the benchmark writes. The rows of this program are added to it.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bench.json");

const PAIRS: u32 = 10_000;

const WAITING_NAME: &str = "lock_waiting_allocations";

const HELD_NAME: &str = "lock_held_allocations";

/// Number of waiting requests, and of held locks.
const WAITING: usize = 10_000;

fn main() -> Result<()> {
    println!(
        "{NAME}: heap allocations of one lock + unlock on a free name, and sizes of the futures."
    );
    println!("  store      allocations     bytes   lock() bytes   unlock() bytes");
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let server = Server::start();
    let client = runtime.block_on(Client::connect(&server.url()))?;
    let _context = runtime.enter();
    let mut rows: Vec<Value> = match std::fs::read(FILE) {
        Ok(text) => serde_json::from_slice(&text)?,
        Err(_) => Vec::new(),
    };
    rows.retain(|row| {
        ![NAME, WAITING_NAME, HELD_NAME]
            .map(Value::from)
            .contains(&row["name"])
    });
    rows.push(measure(&runtime, "server", &client)?);
    rows.push(measure(&runtime, "embedded", &Client::embedded())?);
    println!("\n{WAITING_NAME}: what a request that waits for a lock keeps on the heap.");
    println!("  store      allocations     bytes");
    rows.push(measure_waiting(&runtime, "server", &client)?);
    rows.push(measure_waiting(&runtime, "embedded", &Client::embedded())?);
    println!("\n{HELD_NAME}: what a held lock keeps on the heap, beside its guard.");
    println!("  store      allocations     bytes");
    rows.push(measure_held(&runtime, "server", &client)?);
    rows.push(measure_held(&runtime, "embedded", &Client::embedded())?);
    std::fs::write(FILE, format!("{:#}\n", Value::Array(rows)))?;
    println!("\nAdded to {FILE}");
    Ok(())
}

fn measure(runtime: &Runtime, store: &str, client: &Client) -> Result<Value> {
    let lock = client.lock("bench:allocations");
    // One-time costs: the scripts, the task of the watchdog.
    runtime.block_on(pairs(&lock))?;
    let mut done = Ok(());
    let counted = allocation_counter::measure(|| done = runtime.block_on(pairs(&lock)));
    done?;
    let per_pair = |total: u64| (total as f64 / f64::from(PAIRS) * 10.0).round() / 10.0;
    let (allocations, bytes) = (per_pair(counted.count_total), per_pair(counted.bytes_total));
    let lock_bytes = size_of_val(&*lock.lock().into_future());
    let guard = runtime.block_on(lock.lock().into_future())?;
    let unlock_bytes = size_of_val(&guard.unlock());
    println!("  {store:10} {allocations:11} {bytes:9} {lock_bytes:14} {unlock_bytes:16}");
    Ok(json!({
        "name": NAME,
        "store": store,
        "allocations_per_pair": allocations,
        "bytes_per_pair": bytes,
        "lock_future_bytes": lock_bytes,
        "unlock_future_bytes": unlock_bytes,
    }))
}

async fn pairs(lock: &Lock) -> Result<()> {
    for _ in 0..PAIRS {
        lock.lock().await?.unlock().await?;
    }
    Ok(())
}

/// Measures what waiting requests for one lock keep on the heap, without the tasks that await them.
fn measure_waiting(runtime: &Runtime, store: &str, client: &Client) -> Result<Value> {
    let lock = client.lock("bench:waiting");
    let guard = runtime.block_on(lock.lock().into_future())?;
    // The first waiter creates the queue, and subscribes.
    let mut first = lock.lock().into_future();
    let until_subscribed = async { tokio::time::timeout(Duration::from_secs(1), &mut first).await };
    if runtime.block_on(until_subscribed).is_ok() {
        return Err("the lock was free".into());
    }
    let mut requests = Vec::with_capacity(WAITING);
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            for _ in 0..WAITING {
                let mut request = lock.lock().into_future();
                let polled = poll_fn(|task| Poll::Ready(request.as_mut().poll(task).is_ready()));
                polled.await;
                requests.push(request);
            }
        });
    });
    drop((requests, first));
    runtime.block_on(guard.unlock())?;
    Ok(kept_on_heap(WAITING_NAME, store, &counted))
}

/// Measures what locks with different names keep on the heap while they are held. Embedded, that includes the store.
fn measure_held(runtime: &Runtime, store: &str, client: &Client) -> Result<Value> {
    // One-time costs: the scripts, the task of the watchdog.
    runtime.block_on(pairs(&client.lock("bench:held")))?;
    let mut guards = Vec::with_capacity(WAITING);
    let mut acquired: Result<()> = Ok(());
    let counted = allocation_counter::measure(|| {
        acquired = runtime.block_on(async {
            for number in 0..WAITING {
                let lock = client.lock(&format!("bench:held:{number}"));
                guards.push(lock.lock().await?);
            }
            Ok(())
        });
    });
    acquired?;
    for guard in guards {
        runtime.block_on(guard.unlock())?;
    }
    Ok(kept_on_heap(HELD_NAME, store, &counted))
}

/// Prints and returns what each request or lock keeps.
fn kept_on_heap(name: &str, store: &str, counted: &allocation_counter::AllocationInfo) -> Value {
    let each = |total: i64| (total as f64 / WAITING as f64 * 10.0).round() / 10.0;
    let (allocations, bytes) = (each(counted.count_current), each(counted.bytes_current));
    println!("  {store:10} {allocations:11} {bytes:9}");
    json!({
        "name": name,
        "store": store,
        "allocations_per_request": allocations,
        "bytes_per_request": bytes,
    })
}
