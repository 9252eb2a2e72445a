//! Connects to one server, with or without TLS.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, RedisError};
#[cfg(feature = "tls")]
use redis::{ConnectionAddr, io::tcp::TcpSettings};
use tokio::task::AbortHandle;

use super::fault::Fault;
#[cfg(feature = "tls")]
pub(super) use super::tls::Tls;
use crate::surroundings::check_sockets;
#[cfg(any(feature = "tls", feature = "simulation"))]
use crate::surroundings::task;

/// Never constructed without the feature.
#[cfg(not(feature = "tls"))]
#[derive(Debug)]
pub(super) enum Tls {}

/// How to reach one server: its address, and how to connect.
#[derive(Clone)]
pub(super) struct Dial {
    pub(super) client: redis::Client,
    pub(super) tls: Option<Arc<Tls>>,
}

/// A connection, and the task that drives it if that is ours. The task ends with the last clone.
#[derive(Clone)]
pub(super) struct Dialled {
    pub(super) connection: MultiplexedConnection,
    _carrier: Option<Arc<Carrier>>,
}

/// Aborts its task when dropped, as the client library does: a silent server would keep it alive.
struct Carrier(AbortHandle);

impl Drop for Carrier {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Dial {
    pub(super) async fn connect(&self, config: &AsyncConnectionConfig) -> Result<Dialled, Fault> {
        #[cfg(feature = "simulation")]
        if let Some(process) = crate::simulation::current() {
            return self.connect_in(&*process, config).await;
        }
        // Without sockets, connecting would panic.
        check_sockets().map_err(Fault::Final)?;
        match &self.tls {
            #[cfg(feature = "tls")]
            Some(tls) => self.connect_with(tls, config).await,
            #[cfg(not(feature = "tls"))]
            Some(never) => match **never {},
            None => {
                let connecting = self
                    .client
                    .get_multiplexed_async_connection_with_config(config);
                Ok(Dialled {
                    connection: connecting.await.map_err(|e| without_tls(&e))?,
                    _carrier: None,
                })
            }
        }
    }

    #[cfg(feature = "tls")]
    async fn connect_with(
        &self,
        tls: &Arc<Tls>,
        config: &AsyncConnectionConfig,
    ) -> Result<Dialled, Fault> {
        let info = self.client.get_connection_info();
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(Fault::NotSent("TLS requires a TCP address".into()));
        };
        let tcp: &TcpSettings = info.tcp_settings();
        let stream = tls.connect(host, *port, tcp).await?;
        self.over(stream, config).await.map_err(|error| {
            tls.first_words(&error, host, *port)
                .unwrap_or_else(|| Fault::connecting(&error))
        })
    }

    #[cfg(feature = "simulation")]
    async fn connect_in(
        &self,
        process: &dyn crate::simulation::Process,
        config: &AsyncConnectionConfig,
    ) -> Result<Dialled, Fault> {
        let info = self.client.get_connection_info();
        let redis::ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(Fault::NotSent("only TCP is simulated".into()));
        };
        let stream = process.connect(host, *port).await;
        let stream = stream.map_err(|e| without_tls(&e.into()))?;
        self.over(stream, config).await.map_err(|e| without_tls(&e))
    }

    /// Creates a connection over a stream.
    #[cfg(any(feature = "tls", feature = "simulation"))]
    async fn over(
        &self,
        stream: impl redis::aio::AsyncStream + Send + Sync + Unpin + 'static,
        config: &AsyncConnectionConfig,
    ) -> Result<Dialled, RedisError> {
        let settings = self.client.get_connection_info().redis_settings();
        let (connection, work) =
            MultiplexedConnection::new_with_config(settings, stream, config.clone()).await?;
        Ok(Dialled {
            connection,
            _carrier: Some(Arc::new(Carrier(tokio::spawn(task(work)).abort_handle()))),
        })
    }

    pub(super) fn silence(&self) -> &'static str {
        silence(self.tls.is_some())
    }

    /// The address, for messages.
    pub(super) fn address(&self) -> String {
        self.client.get_connection_info().addr().to_string()
    }
}

/// Hint appended to timeout errors if the server does not answer. It may wait for the rest of what looks to it
/// like a long command.
pub(super) fn silence(tls: bool) -> &'static str {
    match tls {
        true => "; the server may not speak TLS on this port",
        false => "",
    }
}

/// Adds a hint to the error: a server that expects TLS replies in TLS or disconnects.
fn without_tls(error: &RedisError) -> Fault {
    let fault = Fault::connecting(error);
    let puzzled = error.kind() == ErrorKind::Parse || error.is_connection_dropped();
    match fault {
        Fault::NotSent(reason) if puzzled && !error.is_connection_refusal() => Fault::NotSent(
            format!("{reason}; if the server expects TLS on this port, use rediss://"),
        ),
        fault => fault,
    }
}
