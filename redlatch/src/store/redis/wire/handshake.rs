//! What a client sends first on a connection, without waiting: HELLO with the login, the name of this library, and SELECT.

use std::sync::Arc;

use super::{Cmd, Expects, Wire, WireError};
use crate::step::{Args as _, ScriptReply};
use crate::store::redis::exchange_error::ExchangeError;

/// Who connects, and to which database.
#[derive(Clone, Default)]
pub(in super::super) struct Handshake {
    pub(in super::super) username: Option<String>,
    pub(in super::super) password: Option<String>,
    pub(in super::super) db: i64,
}

/// Why a handshake failed.
pub(in super::super) enum HandshakeError {
    /// The connection has ended.
    Wire(WireError),
    /// The server has refused a part of it.
    Refused(ExchangeError),
}

impl Handshake {
    pub(in super::super) async fn run(&self, wire: &Arc<Wire>) -> Result<(), HandshakeError> {
        let mut hello = Cmd::of(&["HELLO", "3"]);
        if let Some(password) = &self.password {
            let username = self.username.as_deref().unwrap_or("default");
            ["AUTH", username, password]
                .iter()
                .for_each(|arg| hello.text(arg));
        }
        let name = Cmd::of(&["CLIENT", "SETINFO", "LIB-NAME", "redlatch"]);
        let version = Cmd::of(&["CLIENT", "SETINFO", "LIB-VER", env!("CARGO_PKG_VERSION")]);
        let mut select = Cmd::of(&["SELECT"]);
        select.number(self.db);
        let commands = [&hello, &name, &version].map(|cmd| (cmd, Expects::Reply));
        // Before 7.2 a server knows neither the name nor the version.
        let [hello, ..] = wire.send_all(commands, None);
        let selected = (self.db != 0).then(|| wire.send(&select));
        for pending in std::iter::once(hello).chain(selected) {
            match pending.await.reply {
                None => return Err(HandshakeError::Wire(wire.end_reason())),
                Some(ScriptReply::Error(error)) => {
                    return Err(HandshakeError::Refused(ExchangeError::from_refusal(&error)));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}
