//! Every primitive: acquired and released on free names, compared with the same scripts sent
//! directly.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::captured::Captured;
use crate::kinds::{KINDS, Kind};
use crate::options::Options;
use crate::ratio::{Comparison, compare, rate};
use crate::{Result, bare};

pub(crate) const NAME: &str = "primitive_pairs";

const GOAL: f64 = 0.85;
const TASKS: usize = 16;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!(
        "\n{NAME}: acquire and release pairs per second of each primitive on free names, by {TASKS}"
    );
    println!(
        "tasks on one connection, compared with the same commands, recorded and sent directly."
    );
    println!(
        "                             ours/s     bare/s   ratio  (quartiles)     goal {GOAL:.2}"
    );
    let mut rows = Vec::new();
    for kind in &KINDS {
        let compared = pairs(server, kind, options).await?;
        println!("  {:20} {}", kind.name, compared.table_row(GOAL));
        let mut row = compared.json(GOAL);
        row["name"] = json!(NAME);
        row["primitive"] = json!(kind.name);
        row["tasks"] = json!(TASKS);
        rows.push(row);
    }
    Ok(rows)
}

async fn pairs(server: &Server, kind: &'static Kind, options: &Options) -> Result<Comparison> {
    let client = Client::connect(&server.url()).await?;
    let connection = bare::connect(&server.url()).await?;
    let name = |number: usize| format!("bench:{}:{number}", kind.name);
    let mut captured = Vec::new();
    for number in 0..TASKS {
        (kind.prepare)(client.clone(), name(number)).await?;
        let recorded = Captured::record(server, kind, &client, &connection, name(number)).await?;
        captured.push(Arc::new(Mutex::new(recorded)));
    }
    let ours = || {
        rate(TASKS, options.round, |number, stop| {
            let acquire = (kind.acquire)(&client, &name(number));
            async move {
                let mut pairs = 0;
                while !stop.load(Relaxed) {
                    acquire().await?().await?;
                    pairs += 1;
                }
                Ok(pairs)
            }
        })
    };
    let bare = || {
        rate(TASKS, options.round, |number, stop| {
            let captured = captured[number].clone();
            async move {
                let mut captured = captured.lock().await;
                let mut pairs = 0;
                while !stop.load(Relaxed) {
                    captured.replay().await?;
                    pairs += 1;
                }
                Ok(pairs)
            }
        })
    };
    compare(ours, bare, options.rounds.div_ceil(2)).await
}
