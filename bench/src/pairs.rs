//! Lock/unlock pairs per second on free names, compared with the same scripts sent directly.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::Value;

use crate::Result;
use crate::bare::{self, Bare, ScriptPair};
use crate::options::Options;
use crate::ratio::{compare, rate};

pub(crate) const NAME: &str = "lock_pairs";

const GOAL: f64 = 0.90;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!("\n{NAME}: lock + unlock per second on free names, one connection;");
    println!(
        "compared with the same two scripts sent directly. The ratio is the median of all rounds."
    );
    println!("  tasks     ours/s     bare/s   ratio  (quartiles)     goal {GOAL:.2}");
    let client = Client::connect(&server.url()).await?;
    let connection = bare::connect(&server.url()).await?;
    let scripts = ScriptPair::ours();
    bare::load(&connection, &scripts).await?;
    let mut rows = Vec::new();
    for tasks in [1, 16, 128] {
        let ours = || our_round(&client, tasks, options.round);
        let bare = || bare_round(&connection, &scripts, tasks, options.round);
        let compared = compare(ours, bare, options.rounds).await?;
        rows.push(compared.report(NAME, tasks, GOAL));
    }
    Ok(rows)
}

/// Returns the pairs per second of these tasks, each with a name of its own.
pub(crate) async fn our_round(client: &Client, tasks: usize, time: Duration) -> Result<f64> {
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
    scripts: &ScriptPair,
    tasks: usize,
    time: Duration,
) -> Result<f64> {
    rate(tasks, time, |number, stop| {
        let mut bare = Bare::new(connection, scripts, format!("bench:{number}"));
        async move {
            let mut pairs = 0;
            while !stop.load(Relaxed) {
                bare.acquire_and_release().await?;
                pairs += 1;
            }
            Ok(pairs)
        }
    })
    .await
}
