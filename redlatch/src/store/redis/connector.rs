//! Connects to one server, with or without TLS, and makes the handshake.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::connection_config::ConnectionConfig;
use super::credentials::Credentials;
use super::endpoint::Address;
use super::exchange_error::{ExchangeError, is_unknown_command, lacks_resp3};
use super::pubsub::SubscriptionMode;
use super::server_info::ServerInfo;
use super::wire::{Cmd, Expects, PushHandler, Socket, Wire, WireError, WireGuard};
use crate::environment::{check_sockets, task};
use crate::error::{Cause, Error};
use crate::metrics::Metrics;
use crate::step::{ErrorReply, ScriptReply};

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    /// Without messages besides replies: a connection with subscriptions carries nothing else.
    Resp2,
    Resp3,
}

impl ConnectionConfig {
    /// Connects to the server at this address, and makes the handshake.
    pub(super) async fn connect(
        &self,
        address: &Address,
        metrics: Metrics,
        on_push: PushHandler,
        subscription_mode: SubscriptionMode,
    ) -> Result<(WireGuard, Protocol), ExchangeError> {
        let socket = self.socket(address).await?;
        // Before the connection reads: a server that refuses it says so at once, and that is the
        // answer to HELLO.
        let mut credentials = self.credentials().await?;
        let is_apart = subscription_mode == SubscriptionMode::Apart;
        let mut guard = Wire::spawn(socket, metrics, on_push, is_apart);
        let wire = guard.wire();
        let mut greeted = self.handshake(&wire, credentials.as_ref(), address).await;
        if let Err(ExchangeError::Permanent(Error::AuthenticationFailed { .. })) = greeted
            && self.has_changing_credentials()
            && let Some(before) = &credentials
            && let Ok(Some(newer)) = self.credentials().await
            && !newer.is_same_login(before)
        {
            // They have changed in this moment.
            greeted = self.handshake(&wire, Some(&newer), address).await;
            credentials = Some(newer);
        }
        let protocol = greeted?;
        let renewed_after = credentials.and_then(|credentials| credentials.renewed_after);
        // A connection with subscriptions that carries nothing else ends with its token; the next
        // one logs in.
        if let Some(after) = renewed_after.filter(|_| !is_apart) {
            let renewing = self.clone().log_in_again(wire, after);
            guard.abort_at_end(tokio::spawn(task(renewing)).abort_handle());
        }
        Ok((guard, protocol))
    }

    /// Sends what comes first on a connection, without waiting: HELLO with the login, the name of
    /// this library, and SELECT. Checks whether the server is supported.
    async fn handshake(
        &self,
        wire: &Arc<Wire>,
        credentials: Option<&Credentials>,
        address: &Address,
    ) -> Result<Protocol, ExchangeError> {
        let mut hello = Cmd::of(&["HELLO", "3"]);
        // A proxy that wants the login first.
        let is_before_login =
            |error: &ErrorReply| credentials.is_some() && error.code() == "NOAUTH";
        if let Some(credentials) = credentials {
            hello.text("AUTH");
            credentials.write(&mut hello);
        }
        let name = Cmd::of(&["CLIENT", "SETINFO", "LIB-NAME", "redlatch"]);
        let version = Cmd::of(&["CLIENT", "SETINFO", "LIB-VER", env!("CARGO_PKG_VERSION")]);
        let mut select = Cmd::of(&["SELECT"]);
        select.number(self.db);
        // Before 7.2 a server does not know what follows HELLO, and nobody needs the answers.
        let [greeting, ..] = wire.send_all(
            [&hello, &name, &version].map(|cmd| (cmd, Expects::Reply)),
            None,
        );
        let selected = (self.db != 0).then(|| wire.send(&select));
        let sent = [
            Some((&hello, greeting)),
            selected.map(|sent| (&select, sent)),
        ];
        for (cmd, pending) in sent.into_iter().flatten() {
            match pending.await.reply {
                None => return Err(self.explain(&wire.end_reason(), address)),
                // Of what follows it, all that matters is sent again.
                Some(ScriptReply::Error(error))
                    if cmd.name() == "HELLO"
                        && self.standalone
                        && (lacks_resp3(&error) || is_before_login(&error)) =>
                {
                    self.handshake_in_resp2(wire, credentials, address).await?;
                    return Ok(Protocol::Resp2);
                }
                Some(ScriptReply::Error(error)) => return Err(self.refused(cmd, &error)),
                Some(greeting) if cmd.name() == "HELLO" => {
                    self.check(&ServerInfo::from_hello(&greeting)?)?;
                }
                Some(_) => {}
            }
        }
        Ok(Protocol::Resp3)
    }

    /// The same for a server that refuses HELLO.
    async fn handshake_in_resp2(
        &self,
        wire: &Arc<Wire>,
        credentials: Option<&Credentials>,
        address: &Address,
    ) -> Result<(), ExchangeError> {
        let auth = credentials.map(Credentials::auth);
        let mut select = Cmd::of(&["SELECT"]);
        select.number(self.db);
        let select = (self.db != 0).then_some(select);
        let info = Cmd::of(&["INFO", "server"]);
        for cmd in [auth, select, Some(info)].into_iter().flatten() {
            match wire.send(&cmd).await.reply {
                None => return Err(self.explain(&wire.end_reason(), address)),
                // What is not permitted, or not known, is no reason to refuse the server.
                Some(ScriptReply::Error(error))
                    if cmd.name() == "INFO"
                        && (error.code() == "NOPERM" || is_unknown_command(&error.to_string())) => {
                }
                Some(ScriptReply::Error(error)) => return Err(self.refused(&cmd, &error)),
                Some(info) if cmd.name() == "INFO" => self.check(&ServerInfo::from_info(&info))?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn refused(&self, cmd: &Cmd, error: &ErrorReply) -> ExchangeError {
        let command = match cmd.name() {
            "SELECT" => format!("SELECT {}", self.db),
            name => name.to_owned(),
        };
        ExchangeError::from_refusal(&command, error)
    }

    /// Checks what the server reports. One that was supported may be replaced by another one at its
    /// address for a while.
    fn check(&self, info: &ServerInfo<'_>) -> Result<(), ExchangeError> {
        match info.check(self.standalone) {
            Ok(()) => {
                self.was_supported.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(error) if self.was_supported.load(Ordering::Relaxed) => {
                Err(ExchangeError::not_executed(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn socket(&self, address: &Address) -> Result<Socket, ExchangeError> {
        #[cfg(feature = "simulation")]
        if let Some(process) = crate::simulation::current() {
            let Address::Tcp(at) = address else {
                return Err(ExchangeError::not_executed("only TCP is simulated"));
            };
            let at = self.address_map.reachable(at);
            let connected = process.connect(at.host(), at.port()).await;
            let stream = connected.map_err(|error| ExchangeError::unreachable(&at, error))?;
            return Ok(Socket::other(stream));
        }
        // Without sockets, connecting would panic.
        check_sockets()?;
        match (&self.tls, address) {
            #[cfg(feature = "tls")]
            (Some(tls), Address::Tcp(at)) => {
                let stream = tls.connect(at, &self.address_map.reachable(at)).await?;
                Ok(Socket::other(stream))
            }
            #[cfg(feature = "tls")]
            (Some(_), Address::Unix(_)) => {
                Err(ExchangeError::not_executed("TLS requires a TCP address"))
            }
            #[cfg(not(feature = "tls"))]
            (Some(never), _) => match **never {},
            (None, Address::Tcp(at)) => {
                let stream = self.address_map.reachable(at).connect().await?;
                Ok(Socket::tcp(stream))
            }
            #[cfg(unix)]
            (None, Address::Unix(path)) => {
                let connected = tokio::net::UnixStream::connect(path).await;
                let failed = |error| ExchangeError::unreachable(path.display(), error);
                Ok(Socket::unix(connected.map_err(failed)?))
            }
            #[cfg(not(unix))]
            (None, Address::Unix(_)) => {
                let reason = "this system has no Unix sockets".into();
                Err(Error::InvalidUrl { reason }.into())
            }
        }
    }

    /// Explains the end of a connection during its handshake.
    fn explain(&self, error: &WireError, address: &Address) -> ExchangeError {
        #[cfg(feature = "tls")]
        if let (Some(tls), Address::Tcp(at)) = (&self.tls, address) {
            let explained = tls.explain_first_exchange(error, at);
            return explained.unwrap_or_else(|| ended(error, ""));
        }
        let _ = address;
        // A server that expects TLS replies in TLS or disconnects. One in protected mode may do so
        // before its text arrives, and twemproxy does when it does not know a command.
        ended(
            error,
            "; if the server expects TLS on this port, use rediss://; it may also be in protected mode, or be a proxy \
             without RESP3",
        )
    }
}

fn ended(error: &WireError, hint: &str) -> ExchangeError {
    ExchangeError::NotExecuted(Cause::new(format!("{error}{hint}"), error.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its waiters wait through that, as through any outage.
    #[test]
    fn other_server_at_the_address_of_a_supported_one_is_an_outage() {
        let config = ConnectionConfig {
            standalone: true,
            ..ConnectionConfig::plain()
        };
        let check = |config: &ConnectionConfig, mode: &str, version: &str| {
            let texts = ["server", "redis", "version", version, "mode", mode];
            let hello = texts.map(ScriptReply::from);
            config.check(&ServerInfo::from_hello(&ScriptReply::List(hello.into()))?)
        };
        let others = [
            ("cluster", "7.0.0"),
            ("sentinel", "7.0.0"),
            ("standalone", "6.0.0"),
        ];
        for (mode, version) in others {
            let refused = check(&config, mode, version).unwrap_err();
            assert!(refused.is_permanent(), "{mode}");
        }
        check(&config, "standalone", "7.0.0").unwrap();
        // Another connection of the same store.
        let config = config.clone();
        for (mode, version) in others {
            let failed = check(&config, mode, version).unwrap_err();
            assert!(!failed.is_permanent() && failed.had_no_effect(), "{mode}");
        }
    }
}
