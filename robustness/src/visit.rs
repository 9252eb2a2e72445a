//! Somebody who comes when all the others have gone: everything must be free, and is left tidy.

use std::time::Duration;

use redlatch::Client;
use tokio::time::{Instant, sleep};

use crate::Result;
use crate::worker::Handle;

/// Takes each lock once and gives it back. Those that could not be had within this time.
pub(crate) fn visit(url: &str, names: &[String], limit: Duration) -> Result<Vec<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build()?;
    runtime.block_on(async {
        let client = Client::connect(url).await?;
        let end = Instant::now() + limit;
        let mut kept = Vec::new();
        for name in names {
            let handle = Handle::new(&client, name, limit)?;
            loop {
                let had = handle.visit().await;
                if matches!(had, Ok(true)) {
                    break;
                }
                if Instant::now() > end {
                    let why = had.err().map(|error| error.to_string());
                    kept.push(format!("{name} {}", why.unwrap_or_default()));
                    break;
                }
                sleep(Duration::from_millis(20)).await;
            }
        }
        client.settled().await;
        Ok(kept)
    })
}
