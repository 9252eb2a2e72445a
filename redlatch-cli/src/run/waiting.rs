//! What a command prints about a lock that another owner holds.

use std::convert::Infallible;
use std::time::Duration;

use redlatch::inspect::ObjectState;
use redlatch::{Client, Expiry};
use tokio::time::{Instant, timeout_at};

use crate::output::stderr::note;
use crate::{duration, output, text};

/// How long a command waits before it prints a message. A lock that is free soon needs none.
pub(super) const REPORT_DELAY: Duration = Duration::from_secs(1);

/// If the wait takes long, reports once which lock is awaited and which owner holds it.
pub(crate) async fn report_waiting(client: &Client, names: &[String]) -> Infallible {
    if !output::settings().verbose {
        tokio::time::sleep(REPORT_DELAY).await;
    }
    for name in names {
        if let Some(holder_text) = holder_text(client, name).await {
            note!("waiting for {name}, {holder_text}");
        }
    }
    std::future::pending().await
}

/// Reports why the lock was not acquired. Does not wait for a slow store, because the limit has
/// passed.
pub(crate) async fn report_conflict(client: &Client, names: &[String], wait: Option<Duration>) {
    let deadline = Instant::now() + REPORT_DELAY;
    let shown = names.join(" ");
    let what = match wait {
        Some(wait) => format!("not acquired within {}", duration::short(wait)),
        None => "not acquired".into(),
    };
    let mut reasons = Vec::new();
    for name in names {
        let holder_text = timeout_at(deadline, holder_text(client, name)).await;
        if let Ok(Some(holder_text)) = holder_text {
            reasons.push(match names.len() {
                1 => holder_text,
                _ => format!("{name} is {holder_text}"),
            });
        }
    }
    match reasons.is_empty() {
        true => note!("{shown}: {what}: another owner held it"),
        false => note!("{shown}: {what}: {}", reasons.join("; ")),
    }
}

/// Describes the holder of `name`, and when its lease ends if it is not renewed.
async fn holder_text(client: &Client, name: &str) -> Option<String> {
    let state = client.inspect(name).await.ok().flatten()?;
    let mut holders = state.holders();
    let count = holders.len();
    // This client waits, so it has acquired the lock only until its replicas have acknowledged that.
    holders.retain(|holder| !holder.owner.as_str().starts_with(client.id()));
    if count > 0 && holders.is_empty() {
        return Some("acquired, but not acknowledged by enough replicas (--replicas)".into());
    }
    if let Some(first) = holders.first() {
        let others = match holders.len() - 1 {
            0 => String::new(),
            others => format!(" and {others} more"),
        };
        if first.registered.is_some() {
            return Some(format!("held by {}{others}", text::holder(first)));
        }
        // All have to expire, so the latest expiry counts.
        let latest = holders.iter().map(|holder| holder.remaining).max();
        let until = match latest.and_then(Expiry::duration) {
            Some(latest) => format!(" for up to {}", duration::rough(latest)),
            None => " forever".into(),
        };
        return Some(format!("held by {}{others}{until}", first.owner));
    }
    match &state {
        ObjectState::ExpirableSemaphore { held, .. } => {
            // One permit is enough.
            let until = held.iter().map(|permit| permit.remaining).min();
            let until = until.and_then(Expiry::duration);
            let until = until.map_or(String::new(), |until| {
                format!(" for up to {}", duration::rough(until))
            });
            Some(match held.len() {
                1 => format!("its only permit is in use{until}"),
                all => format!("all {all} permits are in use{until}"),
            })
        }
        state => {
            let next = state.queue().first();
            next.map(|next| format!("next in its queue is {}", next.owner))
        }
    }
}
