//! Scripts that are sent directly: the cost of the client library and the server without redlatch.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, IntoConnectionInfo as _, ProtocolVersion, Script};

use crate::Result;

/// An acquire script and a release script with the same keys and arguments.
#[derive(Clone)]
pub(crate) struct ScriptPair {
    acquire: Script,
    release: Script,
}

impl ScriptPair {
    /// Returns the scripts of redlatch.
    pub(crate) fn ours() -> ScriptPair {
        ScriptPair {
            acquire: Script::new(concat!(
                include_str!("../../redlatch/src/locks/expire.lua"),
                include_str!("../../redlatch/src/locks/reentrant/acquire.lua")
            )),
            release: Script::new(include_str!(
                "../../redlatch/src/locks/reentrant/release.lua"
            )),
        }
    }

    /// Returns the usual scripts: they check first, and then increment or decrement.
    pub(crate) fn classic() -> ScriptPair {
        ScriptPair {
            acquire: Script::new(include_str!("classic_acquire.lua")),
            release: Script::new(include_str!("classic_release.lua")),
        }
    }
}

/// An owner that acquires and releases one name.
pub(crate) struct Bare {
    connection: MultiplexedConnection,
    scripts: ScriptPair,
    key: String,
    owner: String,
    channel: String,
}

/// Opens a connection with redlatch's own connection settings. All owners share it, as all tasks share
/// a client.
pub(crate) async fn connect(url: &str) -> Result<MultiplexedConnection> {
    let info = url.into_connection_info()?;
    let settings = info.redis_settings().clone();
    let settings = settings.set_protocol(ProtocolVersion::RESP3);
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
    let config = AsyncConnectionConfig::new()
        .set_pipeline_buffer_size(1024)
        // The default response timeout of redlatch, enforced by the client library here.
        .set_response_timeout(Some(Duration::from_secs(3)))
        .set_push_sender(|_| Ok::<(), redis::aio::SendError>(()));
    let client = redis::Client::open(info)?;
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    Ok(connection.await?)
}

/// Loads the scripts on the server.
pub(crate) async fn load(connection: &MultiplexedConnection, scripts: &ScriptPair) -> Result<()> {
    let mut connection = connection.clone();
    scripts.acquire.load_async(&mut connection).await?;
    scripts.release.load_async(&mut connection).await?;
    Ok(())
}

impl Bare {
    pub(crate) fn new(
        connection: &MultiplexedConnection,
        scripts: &ScriptPair,
        key: String,
    ) -> Bare {
        Bare {
            connection: connection.clone(),
            scripts: scripts.clone(),
            // The length of a redlatch client id and an owner number.
            owner: format!("00000000-0000-0000-0000-000000000000:{}", 1_000_000),
            channel: format!("redisson_lock__channel:{{{key}}}"),
            key,
        }
    }

    /// Acquires and releases once.
    pub(crate) async fn acquire_and_release(&mut self) -> Result<()> {
        let mut acquire = redis::cmd("EVALSHA");
        acquire.arg(self.scripts.acquire.get_hash()).arg(1);
        acquire.arg(&self.key).arg(&self.owner).arg(30_000);
        let remaining: Option<i64> = acquire.query_async(&mut self.connection).await?;
        if remaining.is_some() {
            return Err("the lock on a new name was not free".into());
        }
        let mut release = redis::cmd("EVALSHA");
        release.arg(self.scripts.release.get_hash()).arg(1);
        release.arg(&self.key).arg(&self.owner).arg(&self.channel);
        let released: i64 = release.query_async(&mut self.connection).await?;
        match released {
            1 => Ok(()),
            _ => Err("the held object could not be released".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use redlatch_testkit::Server;

    use super::*;

    /// The scripts are those of redlatch with all their parts, so they run without it.
    #[tokio::test]
    async fn scripts_run_without_redlatch() {
        let server = Server::start();
        let connection = connect(&server.url()).await.unwrap();
        for (n, scripts) in [ScriptPair::ours(), ScriptPair::classic()]
            .iter()
            .enumerate()
        {
            load(&connection, scripts).await.unwrap();
            let mut bare = Bare::new(&connection, scripts, format!("a-{n}"));
            for _ in 0..2 {
                bare.acquire_and_release().await.unwrap();
            }
            assert_eq!(server.command::<u32>(&["DBSIZE"]), 0);
        }
    }
}
