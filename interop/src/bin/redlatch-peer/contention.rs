//! Checked work for workers that compete for one name: it fails if too many of them work at the same time.

use std::sync::Arc;

use redis::AsyncCommands;
use redlatch::Owner;
use serde_json::Value;

use crate::Result;
use crate::locks::{Handle, acquire};
use crate::settings::Servers;

/// Increments the number at `key` in each round, or reads it twice if `kind` is `read`.
pub(crate) async fn increment(
    servers: &Servers,
    lock: &Arc<dyn Handle>,
    owner: Owner,
    kind: &str,
    key: &str,
    rounds: u64,
) -> Result<Value> {
    let mut redis = servers.counter_connection().await?;
    for _ in 0..rounds {
        let held = acquire(&**lock, owner).await?;
        let number: Option<u64> = redis.get(key).await?;
        if kind == "read" {
            let again: Option<u64> = redis.get(key).await?;
            if number != again {
                return Err(format!("{number:?} became {again:?} while it was read").into());
            }
        } else {
            let () = redis.set(key, number.unwrap_or(0) + 1).await?;
        }
        held.unlock().await?;
    }
    Ok(rounds.into())
}

/// Counts the holders of a permit at `key`. Returns the largest count.
pub(crate) async fn count_holders(
    servers: &Servers,
    name: &str,
    key: &str,
    rounds: u64,
) -> Result<Value> {
    let mut redis = servers.counter_connection().await?;
    let semaphore = servers.client(0)?.semaphore(name);
    let mut most = 0;
    for _ in 0..rounds {
        let permit = semaphore.acquire().await?;
        most = most.max(redis.incr::<_, _, u64>(key, 1).await?);
        let _: i64 = redis.decr(key, 1).await?;
        permit.release().await?;
    }
    Ok(most.into())
}
