//! The work of a crowd: it fails if two owners do it at the same time.

use std::sync::Arc;

use redis::AsyncCommands;
use redlatch::Owner;
use serde_json::Value;

use crate::Result;
use crate::locks::{Handle, taken};
use crate::settings::Servers;

pub(crate) async fn count(
    servers: &Servers,
    lock: &Arc<dyn Handle>,
    owner: Owner,
    kind: &str,
    key: &str,
    rounds: u64,
) -> Result<Value> {
    let mut redis = servers.bare().await?;
    for _ in 0..rounds {
        let guard = taken(&**lock, owner).await?;
        let number: Option<u64> = redis.get(key).await?;
        if kind == "read" {
            let again: Option<u64> = redis.get(key).await?;
            if number != again {
                return Err(format!("{number:?} became {again:?} while it was read").into());
            }
        } else {
            let () = redis.set(key, number.unwrap_or(0) + 1).await?;
        }
        guard.unlock().await?;
    }
    Ok(rounds.into())
}

pub(crate) async fn permits(
    servers: &Servers,
    name: &str,
    key: &str,
    rounds: u64,
) -> Result<Value> {
    let mut redis = servers.bare().await?;
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
