//! The server's cost of one acquisition and release, called a pair.

use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::{Map, Value, json};

use crate::bare::{self, Bare, ScriptPair};
use crate::command_stats::Stats;
use crate::options::Options;
use crate::samples::{median, round};
use crate::{Result, command_stats};

pub(crate) const NAME: &str = "lock_server_cost";

const GOAL: f64 = 6.0;
const ROUNDS: usize = 5;

/// Cost of one kind of pair in each round.
#[derive(Default)]
struct Costs {
    micros: Vec<f64>,
    sent: f64,
    inner: f64,
    calls: Map<String, Value>,
}

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Value> {
    println!("\n{NAME}: server cost of one pair, compared with the scripts that are usually");
    println!("used. Times are for the scripts alone, without network and parsing.");
    println!("              µs per pair   commands   calls in scripts");
    let client = Client::connect(&server.url()).await?;
    let lock = client.lock("bench:cost");
    let connection = bare::connect(&server.url()).await?;
    let scripts = ScriptPair::classic();
    bare::load(&connection, &scripts).await?;
    let mut bare = Bare::new(&connection, &scripts, "bench:classic".into());
    // So that the server knows redlatch's scripts.
    lock.lock().await?.unlock().await?;

    let (mut ours, mut classic) = (Costs::default(), Costs::default());
    for _ in 0..ROUNDS {
        command_stats::reset(server);
        for _ in 0..options.cost_pairs {
            lock.lock().await?.unlock().await?;
        }
        ours.add(&command_stats::read(server), options.cost_pairs);
        command_stats::reset(server);
        for _ in 0..options.cost_pairs {
            bare.acquire_and_release().await?;
        }
        classic.add(&command_stats::read(server), options.cost_pairs);
    }
    for (name, costs) in [("redlatch", &ours), ("classic", &classic)] {
        let (micros, sent, inner) = (median(&costs.micros), costs.sent, costs.inner);
        println!("  {name:10} {micros:12.2} {sent:10.2} {inner:18.2}");
    }
    let reached = ours.inner <= GOAL;
    let verdict = if reached { "reached" } else { "NOT reached" };
    println!("  goal: {GOAL} calls in scripts per pair, {verdict}");
    Ok(json!({
        "name": NAME,
        "server_us_per_pair": round(median(&ours.micros), 3),
        "commands_per_pair": round(ours.sent, 3),
        "inner_calls_per_pair": round(ours.inner, 3),
        "inner_calls": ours.calls,
        "classic_server_us_per_pair": round(median(&classic.micros), 3),
        "classic_inner_calls_per_pair": round(classic.inner, 3),
        "classic_inner_calls": classic.calls,
        "goal": GOAL,
        "reached": reached,
    }))
}

impl Costs {
    fn add(&mut self, stats: &Stats, pairs: usize) {
        let per_pair = |count: u64| count as f64 / pairs as f64;
        self.micros.push(per_pair(stats.script_micros()));
        self.sent = per_pair(stats.sent());
        self.inner = per_pair(stats.inner().map(|(_, calls)| calls).sum());
        let called = |(name, calls): (&str, u64)| (name.to_owned(), json!(per_pair(calls)));
        self.calls = stats.inner().map(called).collect();
    }
}
