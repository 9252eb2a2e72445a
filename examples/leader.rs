//! Of several processes one is the leader: the holder of the lock. The first leader dies, and the second takes
//! over when its lease has ended. The second resigns, and the third takes over immediately.
//!
//! ```sh
//! cargo run --example leader                          # needs no server
//! cargo run --example leader -- redis://127.0.0.1     # or with REDLATCH_URL
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use redlatch::{Client, ClientBuilder, Embedded};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Longest time until there is a new leader after one has died.
const LEASE: Duration = Duration::from_secs(2);

/// Number of current leaders.
static LEADING: AtomicU32 = AtomicU32::new(0);

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("leader: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let url = std::env::args().nth(1);
    let url = url.or_else(|| std::env::var("REDLATCH_URL").ok());
    let fleet_lock = Arc::new(FleetLock {
        store: match url {
            Some(url) => Store::Server(url),
            None => Store::Embedded(Embedded::new()),
        },
        // A unique name. In production all processes use the same fixed name.
        name: format!("redlatch-example:{}:leader", Client::embedded().id()),
    });

    // In place of a process that dies: a thread whose runtime ends with it.
    let dying = fleet_lock.clone();
    let first = move || lead_and_die(&dying);
    let died = tokio::task::spawn_blocking(first).await??;

    let fleet: Vec<_> = ["second", "third"]
        .map(|name| tokio::spawn(serve(name, fleet_lock.clone())))
        .into();
    let mut taken_over = Vec::new();
    for one in fleet {
        taken_over.push(one.await??);
    }
    taken_over.sort();
    let gap = taken_over[0].duration_since(died);
    println!("3 leaders, one at a time; no leader for {gap:.1?} after a death");
    Ok(())
}

/// Waits to become the leader, leads for a while and resigns. Returns when it took over.
async fn serve(name: &str, fleet_lock: Arc<FleetLock>) -> Result<Instant> {
    let client = fleet_lock.client().await?;
    let guard = client.lock(&fleet_lock.name).lock().await?;
    let since = Instant::now();
    println!("{name}: leads");
    // If the leadership is lost (for example, the store was unreachable for too long), `run` drops the work
    // and returns an error.
    guard.run(lead(name)).await??;
    println!("{name}: resigns");
    guard.unlock().await?;
    Ok(since)
}

/// Work that only one process at a time may do.
async fn lead(name: &str) -> Result<()> {
    if LEADING.fetch_add(1, Ordering::SeqCst) != 0 {
        return Err("two lead at once".into());
    }
    for round in 1..=3 {
        tokio::time::sleep(LEASE / 20).await;
        println!("{name}: hands out the work of round {round}");
    }
    LEADING.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

/// Leads, and dies without releasing the lock. Returns when it died.
fn lead_and_die(fleet_lock: &FleetLock) -> Result<Instant> {
    let process = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    process.block_on(async {
        let client = fleet_lock.client().await?;
        let guard = client.lock(&fleet_lock.name).lock().await?;
        println!("first: leads");
        guard.run(lead("first")).await??;
        println!("first: dies");
        // A dead process releases nothing.
        std::mem::forget(guard);
        Ok(Instant::now())
    })
}

/// The lock that all processes compete for.
struct FleetLock {
    store: Store,
    name: String,
}

enum Store {
    Embedded(Embedded),
    Server(String),
}

impl FleetLock {
    async fn client(&self) -> Result<Client> {
        let settings: ClientBuilder = Client::builder().watchdog_lease(LEASE);
        Ok(match &self.store {
            Store::Embedded(store) => settings.connect_embedded(store)?,
            Store::Server(url) => settings.connect(url).await?,
        })
    }
}
