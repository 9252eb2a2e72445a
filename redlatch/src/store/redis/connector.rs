//! Connects to one server, with or without TLS.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, ErrorKind, IntoConnectionInfo, RedisError};
use tokio::task::JoinSet;

use super::connection_config::ConnectionConfig;
use super::exchange_error::ExchangeError;
#[cfg(feature = "tls")]
use super::tls::Tls;
use crate::environment::check_sockets;
#[cfg(any(feature = "tls", feature = "simulation"))]
use crate::environment::task;

/// A connection, and the task that drives it if this crate started it. The task is aborted with the last clone,
/// as the client library does: a silent server would keep it alive.
#[derive(Clone)]
pub(super) struct RawConnection {
    pub(super) connection: MultiplexedConnection,
    _driver: Option<Arc<JoinSet<()>>>,
}

impl ConnectionConfig {
    /// Connects to the server at this address.
    pub(super) async fn connect(
        &self,
        addr: &ConnectionAddr,
        library_config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, ExchangeError> {
        #[cfg(feature = "simulation")]
        if let Some(process) = crate::simulation::current() {
            return self
                .connect_simulated(&*process, addr, library_config)
                .await;
        }
        // Without sockets, connecting would panic.
        check_sockets()?;
        match &self.tls {
            #[cfg(feature = "tls")]
            Some(tls) => self.connect_tls(tls, addr, library_config).await,
            #[cfg(not(feature = "tls"))]
            Some(never) => match **never {},
            None => {
                let connecting = self.connect_plain(addr, library_config);
                Ok(RawConnection {
                    connection: connecting.await.map_err(|e| with_tls_hint(&e))?,
                    _driver: None,
                })
            }
        }
    }

    async fn connect_plain(
        &self,
        addr: &ConnectionAddr,
        library_config: &AsyncConnectionConfig,
    ) -> Result<MultiplexedConnection, RedisError> {
        let info = addr.clone().into_connection_info()?;
        let info = info.set_redis_settings(self.settings.clone());
        let client = redis::Client::open(info.set_tcp_settings(self.tcp.clone()))?;
        let connecting = client.get_multiplexed_async_connection_with_config(library_config);
        connecting.await
    }

    #[cfg(feature = "tls")]
    async fn connect_tls(
        &self,
        tls: &Arc<Tls>,
        addr: &ConnectionAddr,
        library_config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, ExchangeError> {
        let ConnectionAddr::Tcp(host, port) = addr else {
            return Err(ExchangeError::not_executed("TLS requires a TCP address"));
        };
        let stream = tls.connect(host, *port, &self.tcp).await?;
        let connection = self.handshake_over(stream, library_config).await;
        connection.map_err(|error| {
            tls.explain_first_exchange(&error, host, *port)
                .unwrap_or_else(|| ExchangeError::from_connect_error(&error))
        })
    }

    #[cfg(feature = "simulation")]
    async fn connect_simulated(
        &self,
        process: &dyn crate::simulation::Process,
        addr: &ConnectionAddr,
        library_config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, ExchangeError> {
        let ConnectionAddr::Tcp(host, port) = addr else {
            return Err(ExchangeError::not_executed("only TCP is simulated"));
        };
        let stream = process.connect(host, *port).await;
        let stream = stream.map_err(|e| with_tls_hint(&e.into()))?;
        let connection = self.handshake_over(stream, library_config).await;
        connection.map_err(|e| with_tls_hint(&e))
    }

    /// Creates a connection over a stream.
    #[cfg(any(feature = "tls", feature = "simulation"))]
    async fn handshake_over(
        &self,
        stream: impl redis::aio::AsyncStream + Send + Sync + Unpin + 'static,
        library_config: &AsyncConnectionConfig,
    ) -> Result<RawConnection, RedisError> {
        let config = library_config.clone();
        let (connection, work) =
            MultiplexedConnection::new_with_config(&self.settings, stream, config).await?;
        let mut driver = JoinSet::new();
        driver.spawn(task(work));
        let _driver = Some(Arc::new(driver));
        Ok(RawConnection {
            connection,
            _driver,
        })
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
