//! Compares two ways to do the same, measured in alternating rounds, so that other load on the
//! machine affects both alike.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Result;
use crate::samples::{median, quantile, round};

/// Rates per second of both ways, and the ratio of each round.
pub(crate) struct Comparison {
    ours: f64,
    bare: f64,
    pub(crate) ratio: f64,
    low: f64,
    high: f64,
}

impl Comparison {
    /// Prints the row of a table for this number of tasks, and returns it for the file.
    pub(crate) fn report(&self, name: &str, tasks: usize, goal: f64) -> Value {
        println!("  {tasks:5} {}", self.table_row(goal));
        let mut row = self.json(goal);
        row["name"] = json!(name);
        row["tasks"] = json!(tasks);
        row
    }

    pub(crate) fn table_row(&self, goal: f64) -> String {
        let Comparison {
            ours,
            bare,
            ratio,
            low,
            high,
        } = self;
        let reached = if *ratio >= goal {
            "reached"
        } else {
            "NOT reached"
        };
        format!("{ours:10.0} {bare:10.0} {ratio:7.3}  ({low:.3}-{high:.3})   {reached}")
    }

    pub(crate) fn json(&self, goal: f64) -> Value {
        json!({
            "ours_per_s": round(self.ours, 0),
            "bare_per_s": round(self.bare, 0),
            "ratio": round(self.ratio, 3),
            "ratio_p25": round(self.low, 3),
            "ratio_p75": round(self.high, 3),
            "goal": goal,
            "reached": self.ratio >= goal,
        })
    }
}

/// Runs this many rounds of each way, alternating, with each way first equally often.
pub(crate) async fn compare<A, B>(
    ours: impl Fn() -> A,
    bare: impl Fn() -> B,
    rounds: usize,
) -> Result<Comparison>
where
    A: Future<Output = Result<f64>>,
    B: Future<Output = Result<f64>>,
{
    // Warm-up.
    ours().await?;
    bare().await?;
    let (mut our_rates, mut bare_rates, mut ratios) = (vec![], vec![], vec![]);
    for number in 0..rounds {
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
    Ok(Comparison {
        ours: median(&our_rates),
        bare: median(&bare_rates),
        ratio: median(&ratios),
        low: quantile(&ratios, 0.25),
        high: quantile(&ratios, 0.75),
    })
}

/// Runs this many tasks for this duration. Returns their total rate per second.
pub(crate) async fn rate<W>(
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
