//! Latches.

use redlatch::Client;
use serde_json::Value;

use crate::settings::millis;
use crate::{Result, unknown_command};

/// Runs a command on a latch.
pub(crate) async fn run(client: &Client, command: &str, args: &[&str]) -> Result<Value> {
    let [name, args @ ..] = args else {
        return Err(format!("{command} needs a name").into());
    };
    let latch = client.count_down_latch(name);
    Ok(match (command, args) {
        ("set-count", [n]) => latch.try_set_count(n.parse()?).await?.into(),
        ("count-down", []) => {
            latch.count_down().await?;
            true.into()
        }
        ("count", []) => latch.count().await?.into(),
        ("await", ["-1"]) => {
            latch.wait().await?;
            true.into()
        }
        ("await", [wait]) => latch.try_wait().wait(millis(wait)?).await?.into(),
        ("delete-latch", []) => latch.delete().await?.into(),
        _ => return Err(unknown_command(command, args)),
    })
}
