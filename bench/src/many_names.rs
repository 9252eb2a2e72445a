//! A multi-lock of many free names, compared with the scripts for each of them sent directly.

use std::time::Instant;

use redlatch::{Client, MultiLock};
use redlatch_testkit::Server;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Result;
use crate::bare::{self, Bare, ScriptPair};
use crate::options::Options;
use crate::ratio::compare;

pub(crate) const NAME: &str = "multi_lock_names";

const GOAL: f64 = 1.0;

/// Tasks that send the bare scripts.
const TASKS: usize = 128;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!("\n{NAME}: names that one multi-lock acquires and releases per second, all free;");
    println!("compared with the two scripts for each name, sent directly by {TASKS} tasks.");
    println!("  names     ours/s     bare/s   ratio  (quartiles)     goal {GOAL:.2}");
    let client = Client::connect(&server.url()).await?;
    let connection = bare::connect(&server.url()).await?;
    let scripts = ScriptPair::ours();
    bare::load(&connection, &scripts).await?;
    let mut rows = Vec::new();
    for names in [1_000, 10_000] {
        let name = |number: usize| format!("bench:many:{number}");
        let all = MultiLock::new((0..names).map(|number| client.lock(&name(number))));
        let ours = || async {
            let started = Instant::now();
            all.lock().await?.unlock().await?;
            Ok(names as f64 / started.elapsed().as_secs_f64())
        };
        let bare = || async {
            let started = Instant::now();
            let mut tasks: JoinSet<Result<()>> = JoinSet::new();
            for task in 0..TASKS {
                let numbers = (task..names).step_by(TASKS);
                let new = |number| Bare::new(&connection, &scripts, name(number));
                let mut owners: Vec<Bare> = numbers.map(new).collect();
                tasks.spawn(async move {
                    for owner in &mut owners {
                        owner.acquire_and_release().await?;
                    }
                    Ok(())
                });
            }
            while let Some(ended) = tasks.join_next().await {
                ended??;
            }
            Ok(names as f64 / started.elapsed().as_secs_f64())
        };
        let compared = compare(ours, bare, options.rounds.div_ceil(4)).await?;
        println!("  {names:5} {}", compared.table_row(GOAL));
        let mut row = compared.json(GOAL);
        row["name"] = json!(NAME);
        row["names"] = json!(names);
        rows.push(row);
    }
    Ok(rows)
}
