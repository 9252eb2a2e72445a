//! The one connection of a client: made when it is needed, made anew when it breaks, with its
//! subscriptions restored before anything else is sent.
//!
//! On top of the client library's multiplexed connection. Its own connection manager is not used:
//! it keeps a refused reconnection (wrong password for a moment, too many clients) for good.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, PushInfo, PushKind, RedisError, Value};

use super::fault::Fault;
use crate::error::Error;
use crate::store::SharedEar;

/// Commands that may queue inside the client library. More than [`super::ATTEMPTS`], so that a
/// renewal always finds room.
const PIPELINE: usize = 2 * super::ATTEMPTS;

/// Channels restored per SUBSCRIBE: one command's size stays far from any limit.
const RESTORED_AT_ONCE: usize = 1000;

pub(super) struct Link {
    client: redis::Client,
    connect_timeout: Duration,
    shared: Arc<Shared>,
    connecting: tokio::sync::Mutex<Generation>,
}

struct Shared {
    ear: SharedEar,
    live: Mutex<Option<Live>>,
    /// The channels to restore on a new connection.
    wanted: Mutex<HashSet<String>>,
}

/// Which connection in the life of a link: news of an old one must not end a new one.
type Generation = u64;

/// A connection that works as far as anybody knows.
#[derive(Clone)]
pub(super) struct Live {
    pub(super) connection: MultiplexedConnection,
    generation: Generation,
}

impl Link {
    pub(super) fn new(client: redis::Client, connect_timeout: Duration, ear: SharedEar) -> Link {
        let shared = Shared {
            ear,
            live: Mutex::new(None),
            wanted: Mutex::new(HashSet::new()),
        };
        Link {
            client,
            connect_timeout,
            shared: Arc::new(shared),
            connecting: tokio::sync::Mutex::new(0),
        }
    }

    /// The connection there is, or a new one. Many callers share one attempt to connect.
    pub(super) async fn live(&self) -> Result<Live, Fault> {
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        let mut generation = self.connecting.lock().await;
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        *generation += 1;
        let opening = self.open(*generation);
        let live = match tokio::time::timeout(self.connect_timeout, opening).await {
            Ok(opened) => opened.map_err(|e| cannot_connect(&e))?,
            Err(_) => {
                return Err(Fault::NotSent(format!(
                    "no connection within the connect timeout of {:?}",
                    self.connect_timeout
                )));
            }
        };
        *self.shared.lock_live() = Some(live.clone());
        Ok(live)
    }

    async fn open(&self, generation: Generation) -> Result<Live, RedisError> {
        let config = AsyncConnectionConfig::new()
            // Both timeouts are kept outside, around everything that a call does.
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(PIPELINE)
            .set_push_sender(pushes(Arc::downgrade(&self.shared), generation));
        let mut connection = self
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let wanted: Vec<String> = self.shared.wanted().iter().cloned().collect();
        for channels in wanted.chunks(RESTORED_AT_ONCE) {
            connection.subscribe(channels).await?;
        }
        Ok(Live {
            connection,
            generation,
        })
    }

    /// From now on `channel` is restored with every connection.
    pub(super) fn want(&self, channel: &str) {
        self.shared.wanted().insert(channel.to_owned());
    }

    /// Ends the subscription, here and on the connection that there is.
    pub(super) async fn unwant(&self, channel: &str) -> Result<(), RedisError> {
        self.shared.wanted().remove(channel);
        match self.shared.live() {
            Some(mut live) => live.connection.unsubscribe(channel).await,
            None => Ok(()),
        }
    }

    /// Says that a connection has failed somebody.
    pub(super) fn broken(&self, live: &Live) {
        self.shared.broken(live.generation);
    }
}

impl Shared {
    fn lock_live(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> Option<Live> {
        self.lock_live().clone()
    }

    fn wanted(&self) -> MutexGuard<'_, HashSet<String>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn broken(&self, generation: Generation) {
        let dead = self
            .lock_live()
            .take_if(|live| live.generation == generation);
        if dead.is_some() {
            tracing::debug!("the connection to the store broke");
        }
        // Dropped here, not under the lock: it ends a task.
        drop(dead);
    }
}

/// What to do with what the server says unasked.
fn pushes(
    shared: Weak<Shared>,
    generation: Generation,
) -> impl Fn(PushInfo) -> Result<(), redis::aio::SendError> + Send + Sync + 'static {
    move |push| {
        let Some(shared) = shared.upgrade() else {
            return Err(redis::aio::SendError);
        };
        match push.kind {
            PushKind::Message => {
                if let Some(Value::BulkString(channel)) = push.data.first()
                    && let Ok(channel) = std::str::from_utf8(channel)
                {
                    shared.ear.heard(channel);
                }
            }
            PushKind::Disconnection => {
                shared.broken(generation);
                shared.ear.interrupted();
            }
            _ => {}
        }
        Ok(())
    }
}

fn cannot_connect(error: &RedisError) -> Fault {
    let reason = error.to_string();
    if matches!(error.code(), Some("WRONGPASS" | "NOAUTH" | "NOPERM")) {
        return Fault::Final(Error::AuthenticationFailed { reason });
    }
    let no_hello = reason.contains("HELLO") && reason.contains("unknown command");
    match error.kind() {
        ErrorKind::AuthenticationFailed => Fault::Final(Error::AuthenticationFailed { reason }),
        _ if no_hello || error.kind() == ErrorKind::RESP3NotSupported => {
            Fault::Final(Error::UnsupportedServer {
                reason: "it does not know RESP3".into(),
            })
        }
        ErrorKind::InvalidClientConfig => Fault::Final(Error::Unavailable { reason }),
        _ => Fault::NotSent(reason),
    }
}
