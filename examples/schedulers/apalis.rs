//! A job of `apalis` in several processes: one of them runs each firing.
//!
//! ```sh
//! cargo run --bin apalis -- redis://127.0.0.1    # in several terminals
//! ```

use std::str::FromStr as _;
use std::time::{Duration, SystemTime};

use apalis::prelude::*;
use apalis_cron::{CronScheduler, Tick};
use cron::Schedule;
use redlatch::job::Cron;
use redlatch::{Client, Slot};

const SCHEDULE: &str = "*/10 * * * * *";

#[tokio::main]
async fn main() -> Result<(), BoxDynError> {
    let url = std::env::args().nth(1);
    let client = Client::connect(url.as_deref().unwrap_or("redis://127.0.0.1")).await?;
    let worker = WorkerBuilder::new("reports")
        .backend(CronScheduler::new(Schedule::from_str(SCHEDULE)?))
        .data(client)
        .data(Cron::parse(SCHEDULE)?)
        .build(report);
    worker.run().await?;
    Ok(())
}

/// A tick has its scheduled time, which names the slot.
async fn report(tick: Tick, client: Data<Client>, cron: Data<Cron>) -> Result<(), BoxDynError> {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(tick.get_timestamp());
    let once = client.once("report", Slot::cron(&cron, time));
    match once.run(send_report()).await? {
        Ok(()) => {}
        Err(earlier) => println!("{} has it", earlier.by),
    }
    Ok(())
}

async fn send_report() {
    println!("report");
}
