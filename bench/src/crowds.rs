//! A stream of callers with a wait limit at a dead, frozen or slow server: when their calls return,
//! and how much memory they use.

use std::time::{Duration, Instant};

use redlatch::Client;
use redlatch_testkit::{Proxy, Server};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Result;
use crate::figures::{micros, quantile, round};
use crate::options::Options;
use crate::resident::resident;

pub(crate) const NAME: &str = "crowds";

/// Callers that arrive per second.
const ARRIVALS: u32 = 5000;

/// Interval between arrivals of some of them.
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
    let time = options.crowds;
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
    let (mut most, mut served, mut arrived) = (0, 0_usize, 0_u32);
    let mut memory = vec![resident("self")?];
    let mut tick = tokio::time::interval(TICK);
    while begun.elapsed() < time {
        tick.tick().await;
        let due = begun.elapsed().min(time).as_secs_f64() * f64::from(ARRIVALS);
        while f64::from(arrived) < due {
            let call = client
                .lock(&format!("bench:crowd:{arrived}"))
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
            let (took, got) = ended?;
            latencies.push(micros(took) / 1000.0);
            served += usize::from(got);
        }
        most = most.max(callers.len());
        if begun.elapsed() >= time.mul_f64(memory.len() as f64 / 3.0) {
            memory.push(resident("self")?);
        }
    }
    while let Some(ended) = callers.join_next().await {
        let (took, got) = ended?;
        latencies.push(micros(took) / 1000.0);
        served += usize::from(got);
    }
    memory.push(resident("self")?);
    let left = client.status().background;
    let at = |share: f64| round(quantile(&latencies, share), 0);
    let memory: Vec<f64> = memory
        .iter()
        .map(|bytes| round(*bytes as f64 / 1e6, 1))
        .collect();
    println!(
        "  {state}: p50 {} p99 {} slowest {}; {served} of {arrived} served, {most} pending at most, \
         {left} to settle; memory {memory:?}",
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
        "pending_at_most": most,
        "left_to_settle": left,
        "memory_mb": memory,
    }))
}
