//! Pairs of lock and unlock per second on free names, beside the same scripts sent bare.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Result;
use crate::bare::{self, Bare, Pair};
use crate::figures::{median, quantile, round};
use crate::options::Options;

pub(crate) const NAME: &str = "lock_pairs";

const GOAL: f64 = 0.90;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!("\n{NAME}: lock + unlock per second on free names, one connection;");
    println!("beside the same two scripts sent bare. The ratio is the median of all rounds.");
    println!("  tasks     ours/s     bare/s   ratio  (middle half)   goal {GOAL:.2}");
    let client = Client::connect(&server.url()).await?;
    let connection = bare::connect(&server.url()).await?;
    let scripts = Pair::ours();
    bare::load(&connection, &scripts).await?;
    let mut rows = Vec::new();
    for tasks in [1, 16, 128] {
        let ours = || our_round(&client, tasks, options.round);
        let bare = || bare_round(&connection, &scripts, tasks, options.round);
        // To warm up.
        ours().await?;
        bare().await?;
        let (mut our_rates, mut bare_rates, mut ratios) = (vec![], vec![], vec![]);
        for number in 0..options.rounds {
            // In turns, and each as often first: what the machine does besides hits both alike.
            let (our_rate, bare_rate) = if number % 2 == 0 {
                let ours = ours().await?;
                (ours, bare().await?)
            } else {
                let bare = bare().await?;
                (ours().await?, bare)
            };
            our_rates.push(our_rate);
            bare_rates.push(bare_rate);
            ratios.push(our_rate / bare_rate);
        }
        let (our_rate, bare_rate) = (median(&our_rates), median(&bare_rates));
        let ratio = median(&ratios);
        let (low, high) = (quantile(&ratios, 0.25), quantile(&ratios, 0.75));
        println!(
            "  {tasks:5} {our_rate:10.0} {bare_rate:10.0} {ratio:7.3}  ({low:.3}-{high:.3})   {}",
            if ratio >= GOAL {
                "reached"
            } else {
                "NOT reached"
            },
        );
        rows.push(json!({
            "name": NAME,
            "tasks": tasks,
            "ours_per_s": round(our_rate, 0),
            "bare_per_s": round(bare_rate, 0),
            "ratio": round(ratio, 3),
            "ratio_p25": round(low, 3),
            "ratio_p75": round(high, 3),
            "goal": GOAL,
            "reached": ratio >= GOAL,
        }));
    }
    Ok(rows)
}

async fn our_round(client: &Client, tasks: usize, time: Duration) -> Result<f64> {
    rate(tasks, time, |number, stop| {
        let lock = client.lock(&format!("bench:{number}"));
        async move {
            let mut pairs = 0;
            while !stop.load(Relaxed) {
                lock.lock().await?.unlock().await?;
                pairs += 1;
            }
            Ok(pairs)
        }
    })
    .await
}

async fn bare_round(
    connection: &MultiplexedConnection,
    scripts: &Pair,
    tasks: usize,
    time: Duration,
) -> Result<f64> {
    rate(tasks, time, |number, stop| {
        let mut bare = Bare::new(connection, scripts, format!("bench:{number}"));
        async move {
            let mut pairs = 0;
            while !stop.load(Relaxed) {
                bare.pair().await?;
                pairs += 1;
            }
            Ok(pairs)
        }
    })
    .await
}

/// Lets so many tasks work for this long: what all of them did, per second.
async fn rate<W>(
    tasks: usize,
    time: Duration,
    work: impl Fn(usize, Arc<AtomicBool>) -> W,
) -> Result<f64>
where
    W: Future<Output = Result<u64>> + Send + 'static,
{
    let stop = Arc::new(AtomicBool::new(false));
    let started = Instant::now();
    let mut running: JoinSet<_> = (0..tasks).map(|n| work(n, stop.clone())).collect();
    tokio::time::sleep(time).await;
    stop.store(true, Relaxed);
    let mut done = 0;
    while let Some(ended) = running.join_next().await {
        done += ended??;
    }
    Ok(done as f64 / started.elapsed().as_secs_f64())
}
