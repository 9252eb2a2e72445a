//! Connects to one server, with or without TLS.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, RedisError};
#[cfg(feature = "tls")]
use redis::{ConnectionAddr, io::tcp::TcpSettings};
use tokio::task::AbortHandle;

use super::exchange_error::ExchangeError;
#[cfg(feature = "tls")]
pub(super) use super::tls::Tls;
use crate::environment::check_sockets;
#[cfg(any(feature = "tls", feature = "simulation"))]
use crate::environment::task;

/// Never constructed without the feature `tls`.
#[cfg(not(feature = "tls"))]
#[derive(Debug)]
pub(super) enum Tls {}

/// How to reach one server: its address, and how to connect.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) client: redis::Client,
    pub(super) tls: Option<Arc<Tls>>,
}

/// A connection, and the task that drives it if this crate started it. The task ends with the last clone.
#[derive(Clone)]
pub(super) struct RawConnection {
    pub(super) connection: MultiplexedConnection,
    _driver: Option<Arc<AbortOnDrop>>,
}

/// Aborts its task when dropped, as the client library does: a silent server would keep it alive.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connector {
    pub(super) async fn connect(
        &self,
        config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, ExchangeError> {
        #[cfg(feature = "simulation")]
        if let Some(process) = crate::simulation::current() {
            return self.connect_simulated(&*process, config).await;
        }
        // Without sockets, connecting would panic.
        check_sockets().map_err(ExchangeError::Permanent)?;
        match &self.tls {
            #[cfg(feature = "tls")]
            Some(tls) => self.connect_tls(tls, config).await,
            #[cfg(not(feature = "tls"))]
            Some(never) => match **never {},
            None => {
                let connecting = self
                    .client
                    .get_multiplexed_async_connection_with_config(config);
                Ok(RawConnection {
                    connection: connecting.await.map_err(|e| with_tls_hint(&e))?,
                    _driver: None,
                })
            }
        }
    }

    #[cfg(feature = "tls")]
    async fn connect_tls(
        &self,
        tls: &Arc<Tls>,
        config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, ExchangeError> {
        let info = self.client.get_connection_info();
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(ExchangeError::not_executed("TLS requires a TCP address"));
        };
        let tcp: &TcpSettings = info.tcp_settings();
        let stream = tls.connect(host, *port, tcp).await?;
        self.handshake_over(stream, config).await.map_err(|error| {
            tls.explain_first_exchange(&error, host, *port)
                .unwrap_or_else(|| ExchangeError::from_connect_error(&error))
        })
    }

    #[cfg(feature = "simulation")]
    async fn connect_simulated(
        &self,
        process: &dyn crate::simulation::Process,
        config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, ExchangeError> {
        let info = self.client.get_connection_info();
        let redis::ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(ExchangeError::not_executed("only TCP is simulated"));
        };
        let stream = process.connect(host, *port).await;
        let stream = stream.map_err(|e| with_tls_hint(&e.into()))?;
        self.handshake_over(stream, config)
            .await
            .map_err(|e| with_tls_hint(&e))
    }

    /// Creates a connection over a stream.
    #[cfg(any(feature = "tls", feature = "simulation"))]
    async fn handshake_over(
        &self,
        stream: impl redis::aio::AsyncStream + Send + Sync + Unpin + 'static,
        config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, RedisError> {
        let settings = self.client.get_connection_info().redis_settings();
        let (connection, work) =
            MultiplexedConnection::new_with_config(settings, stream, config.clone()).await?;
        Ok(RawConnection {
            connection,
            _driver: Some(Arc::new(AbortOnDrop(
                tokio::spawn(task(work)).abort_handle(),
            ))),
        })
    }

    pub(super) fn timeout_hint(&self) -> &'static str {
        timeout_hint(self.tls.is_some())
    }

    /// Returns the address, for messages.
    pub(super) fn address(&self) -> String {
        self.client.get_connection_info().addr().to_string()
    }
}

/// Returns a hint to append to timeout errors if the server does not answer. A server without TLS takes the
/// handshake for the start of a long command, and waits for its rest.
pub(super) fn timeout_hint(tls: bool) -> &'static str {
    match tls {
        true => "; the server may not speak TLS on this port",
        false => "",
    }
}

/// Adds a hint to the error: a server that expects TLS replies in TLS or disconnects.
fn with_tls_hint(error: &RedisError) -> ExchangeError {
    let failure = ExchangeError::from_connect_error(error);
    let may_expect_tls = error.kind() == ErrorKind::Parse || error.is_connection_dropped();
    match failure {
        ExchangeError::NotExecuted(mut cause)
            if may_expect_tls && !error.is_connection_refusal() =>
        {
            let hint = "; if the server expects TLS on this port, use rediss://";
            cause.reason.push_str(hint);
            ExchangeError::NotExecuted(cause)
        }
        failure => failure,
    }
}
