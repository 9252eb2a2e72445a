//! What other programs may have written into the registry of clients, and into objects: all that inspection reads.

use std::time::Duration;

use redlatch::Client;
use redlatch::inspect::{Listing, ObjectState, WaitGraph};

use super::replies::run_operation;

/// Runs the operation that the first line names. Its results can be displayed.
pub fn run(data: &[u8]) {
    run_operation(data, |client, operation| async move {
        match &*operation {
            "inspect" => {
                let state: Option<ObjectState> = client.inspect("x").await?;
                let _ = format!("{state:?}");
            }
            "list" => {
                let mut listing: Listing = client.list("*");
                while let Some(listed) = listing.next().await? {
                    let _ = format!("{listed:?}");
                }
            }
            "waiters" => drop(client.waiters("x").await?),
            "watch" => watch(&client).await?,
            _ => {
                let graph: WaitGraph = client.wait_graph().await?;
                let cycles = (graph.deadlocks(), graph.possible_deadlocks());
                let _ = format!("{cycles:?}");
            }
        }
        Ok(())
    });
}

async fn watch(client: &Client) -> redlatch::Result<()> {
    let mut watch = client.watch("*");
    let limit = Duration::from_secs(20);
    while let Ok(event) = tokio::time::timeout(limit, watch.next()).await {
        let _ = format!("{:?}", event?);
    }
    Ok(())
}
