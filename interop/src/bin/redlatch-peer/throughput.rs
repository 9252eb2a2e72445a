//! Counts pairs of lock and unlock in a given time.

use std::time::{Duration, Instant};

use redlatch::Owner;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::Result;
use crate::locks::{acquire, handle};
use crate::settings::Servers;

/// Acquires and releases in this many tasks, each with a lock of its own or all with the same. Returns the number of
/// pairs of each task.
pub(crate) async fn pairs(
    servers: &Servers,
    kind: &str,
    name: &str,
    own_names: bool,
    tasks: usize,
    ms: u64,
) -> Result<Value> {
    let end = Instant::now() + Duration::from_millis(ms);
    let mut set = JoinSet::new();
    for task in 0..tasks {
        let name = match own_names {
            true => format!("{name}{task}"),
            false => name.to_owned(),
        };
        let lock = handle(servers, kind, &name)?;
        let owner = Owner::new();
        set.spawn(async move {
            let mut pairs = 0u64;
            while Instant::now() < end {
                acquire(&*lock, owner).await?.unlock().await?;
                pairs += 1;
            }
            Ok(pairs)
        });
    }
    let pairs: Result<Vec<u64>> = set.join_all().await.into_iter().collect();
    Ok(pairs?.into())
}
