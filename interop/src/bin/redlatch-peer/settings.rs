//! Settings with which a peer is started.

use std::time::Duration;

use redlatch::{Client, GroupValue};

use crate::Result;

/// The servers of the peer, and their settings.
pub(crate) struct Servers {
    counters: String,
    clients: Vec<Client>,
    pub(crate) fair_wait: Option<Duration>,
    string_codec: bool,
}

impl Servers {
    pub(crate) fn client(&self, server: usize) -> Result<&Client> {
        let client = self.clients.get(server);
        client.ok_or_else(|| format!("there is no server {server}").into())
    }

    /// Returns a value of a group of locks, as Redisson encodes a text with the peer's codec.
    pub(crate) fn group_value(&self, text: &str) -> GroupValue {
        match self.string_codec {
            true => GroupValue::from_encoded(text),
            false => text.into(),
        }
    }

    /// Opens a connection to the server with the numbers that locks protect. Without timeouts: on a busy
    /// machine an answer may take longer than the default of half a second, and the test has a limit.
    pub(crate) async fn counter_connection(&self) -> Result<redis::aio::MultiplexedConnection> {
        let client = redis::Client::open(self.counters.as_str())?;
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        Ok(connection.await?)
    }
}

pub(crate) async fn connect(args: impl Iterator<Item = String>) -> Result<Servers> {
    let mut builder = Client::builder();
    let (mut urls, mut fair_wait, mut counters) = (Vec::new(), None, None);
    let mut string_codec = false;
    for arg in args {
        match arg.split_once('=') {
            Some(("watchdog", ms)) => builder = builder.watchdog_lease(millis(ms)?),
            Some(("fair-wait", ms)) => fair_wait = Some(millis(ms)?),
            Some(("prefix", prefix)) => builder = builder.prefix(prefix),
            Some(("hand-over", "off")) => builder = builder.local_hand_over(false),
            Some(("tracking", "off")) => builder = builder.client_tracking(false),
            Some(("counters", url)) => counters = Some(url.to_owned()),
            Some(("codec", "string")) => string_codec = true,
            // redlatch uses replicas neither for reads nor for subscriptions.
            Some(("replicas", _)) => {}
            _ if arg.contains("://") => urls.push(arg),
            _ => return Err(format!("unknown argument {arg:?}").into()),
        }
    }
    let mut clients = Vec::new();
    for url in &urls {
        clients.push(builder.clone().connect(url).await?);
    }
    let Some(first) = urls.into_iter().next() else {
        return Err("redlatch-peer [SETTING=VALUE ...] URL [URL ...]".into());
    };
    Ok(Servers {
        counters: counters.unwrap_or(first),
        clients,
        fair_wait,
        string_codec,
    })
}

pub(crate) fn millis(word: &str) -> Result<Duration> {
    Ok(Duration::from_millis(word.parse()?))
}
