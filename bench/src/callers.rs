//! Callers with a wait limit that keep arriving at a dead, frozen or slow server: when their calls
//! return, and how much memory they use.

use std::time::{Duration, Instant};

use redlatch::Client;
use redlatch_testkit::{Proxy, Server};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Result;
use crate::options::Options;
use crate::resident_memory::resident_memory;
use crate::samples::{micros, quantile, round};

pub(crate) const NAME: &str = "callers";

/// Callers that arrive per second.
const ARRIVALS: u32 = 5000;

/// Interval at which callers arrive, several at a time.
const TICK: Duration = Duration::from_millis(10);

/// Wait limit of each caller.
const LIMIT: Duration = Duration::from_secs(1);

/// Delay of the slow server's answers.
const DELAY: Duration = Duration::from_millis(200);

#[derive(Clone, Copy)]
enum State {
    Dead,
    Frozen,
    Slow,
}

pub(crate) async fn measure(options: &Options) -> Result<Vec<Value>> {
    let time = options.callers;
    println!(
        "\n{NAME}: {ARRIVALS} callers per second for {time:?}, each with a limit of {LIMIT:?}."
    );
    println!(
        "Latency in ms; memory of this process in MB at the start, after each third, and at the \
         end."
    );
    let mut rows = Vec::new();
    for state in [State::Dead, State::Frozen, State::Slow] {
        rows.push(stream(state, time).await?);
    }
    Ok(rows)
}

async fn stream(state: State, time: Duration) -> Result<Value> {
    let mut server = Server::start();
    let proxy = Proxy::to(server.port());
    let client = Client::connect(&proxy.url()).await?;
    let state = match state {
        State::Dead => {
            server.kill();
            proxy.refuse(true);
            proxy.cut();
            "dead"
        }
        State::Frozen => {
            server.freeze();
            "frozen"
        }
        State::Slow => {
            proxy.delay(DELAY);
            "slow"
        }
    };
    let begun = Instant::now();
    let mut callers = JoinSet::new();
    let mut latencies = Vec::new();
    let (mut most_pending, mut served, mut arrived) = (0, 0_usize, 0_u32);
    let mut memory = vec![resident_memory("self")?];
    let mut tick = tokio::time::interval(TICK);
    while begun.elapsed() < time {
        tick.tick().await;
        let due = begun.elapsed().min(time).as_secs_f64() * f64::from(ARRIVALS);
        while f64::from(arrived) < due {
            let call = client
                .lock(&format!("bench:callers:{arrived}"))
                .try_lock()
                .wait(LIMIT);
            callers.spawn(async move {
                let begun = Instant::now();
                let answer = call.await;
                (begun.elapsed(), matches!(answer, Ok(Some(_))))
            });
            arrived += 1;
        }
        while let Some(ended) = callers.try_join_next() {
            let (took, acquired) = ended?;
            latencies.push(micros(took) / 1000.0);
            served += usize::from(acquired);
        }
        most_pending = most_pending.max(callers.len());
        if begun.elapsed() >= time.mul_f64(memory.len() as f64 / 3.0) {
            memory.push(resident_memory("self")?);
        }
    }
    while let Some(ended) = callers.join_next().await {
        let (took, acquired) = ended?;
        latencies.push(micros(took) / 1000.0);
        served += usize::from(acquired);
    }
    memory.push(resident_memory("self")?);
    let unsettled = client.status().background;
    let at = |share: f64| round(quantile(&latencies, share), 0);
    let memory: Vec<f64> = memory
        .iter()
        .map(|bytes| round(*bytes as f64 / 1e6, 1))
        .collect();
    println!(
        "  {state}: p50 {} p99 {} slowest {}; {served} of {arrived} served, {most_pending} pending at most, \
         {unsettled} to settle; memory {memory:?}",
        at(0.5),
        at(0.99),
        at(1.0),
    );
    if state == "frozen" {
        server.thaw();
    }
    Ok(json!({
        "name": format!("{NAME}_{state}"),
        "arrived": arrived,
        "served": served,
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
        "slowest_ms": at(1.0),
        "pending_at_most": most_pending,
        "left_to_settle": unsettled,
        "memory_mb": memory,
    }))
}
