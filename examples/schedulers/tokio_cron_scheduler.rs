//! A job of `tokio-cron-scheduler` in several processes: one of them runs each firing.
//!
//! ```sh
//! cargo run --bin tokio_cron_scheduler -- redis://127.0.0.1    # in several terminals
//! ```

use std::future::pending;
use std::time::SystemTime;

use redlatch::job::Cron;
use redlatch::{Client, Slot};
use tokio_cron_scheduler::{Job, JobScheduler};

/// In UTC, like the firings: this scheduler does not follow changes of the clocks.
const SCHEDULE: &str = "*/10 * * * * *";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1);
    let client = Client::connect(url.as_deref().unwrap_or("redis://127.0.0.1")).await?;
    let cron = Cron::parse(SCHEDULE)?;
    let job = Job::new_async(SCHEDULE, move |_, _| {
        // The firing that is nearest to the clock of this machine: the same on all machines.
        let once = client.once("report", Slot::cron(&cron, SystemTime::now()));
        Box::pin(async move {
            match once.run(send_report()).await {
                Ok(Ok(())) => {}
                Ok(Err(earlier)) => println!("{} has it", earlier.by),
                Err(error) => eprintln!("report: {error}"),
            }
        })
    })?;
    let scheduler = JobScheduler::new().await?;
    scheduler.add(job).await?;
    scheduler.start().await?;
    pending().await
}

async fn send_report() {
    println!("report");
}
