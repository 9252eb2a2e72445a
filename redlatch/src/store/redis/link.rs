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

use tokio::sync::watch;

use super::fault::Fault;
use crate::error::Error;
use crate::store::SharedEar;

/// Commands that may queue inside the client library. An attempt is two, with its subscription;
/// renewals and releases still find room beside [`super::ATTEMPTS`].
const PIPELINE: usize = 4 * super::ATTEMPTS;

/// Channels restored per SUBSCRIBE: one command's size stays far from any limit.
const RESTORED_AT_ONCE: usize = 1000;

pub(super) struct Link {
    client: redis::Client,
    connect_timeout: Duration,
    shared: Arc<Shared>,
    opening: Mutex<Opening>,
}

/// The attempt to connect that is under way. It runs in a task of its own: whoever waits for it may
/// give up without starting it over for the others, and all hear of its outcome.
#[derive(Default)]
struct Opening {
    generation: Generation,
    outcome: Option<Outcome>,
}

type Outcome = watch::Receiver<Option<Result<Live, Fault>>>;

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
            opening: Mutex::default(),
        }
    }

    /// Server and database, without anything that could be secret.
    pub(super) fn address(&self) -> String {
        let info = self.client.get_connection_info();
        format!("{}/{}", info.addr(), info.redis_settings().db())
    }

    /// The connection there is, or a new one. Many callers share one attempt to connect.
    pub(super) async fn live(self: &Arc<Self>) -> Result<Live, Fault> {
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        let mut outcome = match self.opening() {
            Ok(live) => return Ok(live),
            Err(outcome) => outcome,
        };
        let outcome = outcome.wait_for(Option::is_some).await;
        match outcome.as_deref() {
            Ok(Some(outcome)) => outcome.clone(),
            // The task is gone with its runtime; the next call makes another.
            Ok(None) | Err(_) => Err(Fault::NotSent("connecting was interrupted".into())),
        }
    }

    /// The attempt under way, or a new one; or the connection that was made just now.
    fn opening(self: &Arc<Self>) -> Result<Live, watch::Receiver<Option<Result<Live, Fault>>>> {
        let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(live) = self.shared.live() {
            return Ok(live);
        }
        let under_way =
            |outcome: &&Outcome| outcome.borrow().is_none() && outcome.has_changed().is_ok();
        if let Some(outcome) = opening.outcome.as_ref().filter(under_way) {
            return Err(outcome.clone());
        }
        opening.generation += 1;
        let (tell, outcome) = watch::channel(None);
        opening.outcome = Some(outcome.clone());
        let (link, generation) = (self.clone(), opening.generation);
        tokio::spawn(async move {
            let opened = tokio::time::timeout(link.connect_timeout, link.open(generation)).await;
            let opened = match opened {
                Ok(opened) => opened.map_err(|e| cannot_connect(&e)),
                Err(_) => Err(Fault::NotSent(format!(
                    "no connection within the connect timeout of {:?}",
                    link.connect_timeout
                ))),
            };
            let _ = tell.send(Some(opened));
        });
        Err(outcome)
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
        let mut restored: HashSet<String> = self.shared.wanted().clone();
        let all: Vec<&String> = restored.iter().collect();
        for channels in all.chunks(RESTORED_AT_ONCE) {
            restore(&mut connection, channels).await?;
        }
        let live = Live {
            connection,
            generation,
        };
        // Before anybody uses it, also what has become unwanted meanwhile is ended.
        loop {
            let unwanted: Vec<String> = {
                let wanted = self.shared.wanted();
                let unwanted: Vec<String> = restored.difference(&wanted).cloned().collect();
                if unwanted.is_empty() {
                    *self.shared.lock_live() = Some(live.clone());
                    return Ok(live);
                }
                unwanted
            };
            live.connection.clone().unsubscribe(&unwanted).await?;
            for channel in &unwanted {
                restored.remove(channel);
            }
        }
    }

    /// From now on `channel` is restored with every connection.
    pub(super) fn want(&self, channel: &str) {
        let mut wanted = self.shared.wanted();
        if !wanted.contains(channel) {
            wanted.insert(channel.to_owned());
        }
    }

    /// From now on it is not.
    pub(super) fn forget(&self, channel: &str) {
        self.shared.wanted().remove(channel);
    }

    /// Ends the subscription, here and on the connection that there is.
    pub(super) async fn unwant(&self, channel: &str) -> Result<(), RedisError> {
        self.forget(channel);
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

/// Subscribes to channels anew. One that is refused must not cost the others, nor the connection.
async fn restore(
    connection: &mut MultiplexedConnection,
    channels: &[&String],
) -> Result<(), RedisError> {
    match connection.subscribe(channels).await {
        Err(error) if !breaks(&error) => {}
        done => return done,
    }
    for channel in channels {
        match connection.subscribe(channel.as_str()).await {
            Err(error) if !breaks(&error) => {
                tracing::warn!(%channel, %error, "a subscription was refused");
            }
            done => done?,
        }
    }
    Ok(())
}

/// Whether an error means that the connection is of no more use.
pub(super) fn breaks(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error()
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

    /// A connection that was in use is no more: whoever waits for its messages must look again.
    fn broken(&self, generation: Generation) {
        let dead = self
            .lock_live()
            .take_if(|live| live.generation == generation);
        if dead.is_some() {
            tracing::debug!("the connection to the store broke");
            self.ear.interrupted();
        }
        // Dropped here, not under the lock: it ends a task.
        drop(dead);
    }
}

/// Says that a connection is broken when its task ends, for whatever reason: also with its runtime,
/// of which the client library says nothing.
struct Sentinel {
    shared: Weak<Shared>,
    generation: Generation,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.broken(self.generation);
        }
    }
}

/// What to do with what the server says unasked.
fn pushes(
    shared: Weak<Shared>,
    generation: Generation,
) -> impl Fn(PushInfo) -> Result<(), redis::aio::SendError> + Send + Sync + 'static {
    let sentinel = Sentinel { shared, generation };
    move |push| {
        let Some(shared) = sentinel.shared.upgrade() else {
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
            PushKind::Disconnection => shared.broken(generation),
            _ => {}
        }
        Ok(())
    }
}

fn cannot_connect(error: &RedisError) -> Fault {
    let reason = error.to_string();
    if matches!(error.code(), Some("WRONGPASS" | "NOAUTH")) {
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
