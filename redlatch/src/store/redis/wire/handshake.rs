//! What a client sends first on a connection: HELLO with the login, the name of this library, and SELECT, in one write.

use std::sync::Arc;

use super::{Cmd, Expects, Wire, WireError};
use crate::error::Error;
use crate::step::{Args as _, ErrorReply, ScriptReply};
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
        let [hello, ..] = wire.send_all([
            (&hello, Expects::Reply),
            // Before 7.2 a server knows neither.
            (&name, Expects::Nothing),
            (&version, Expects::Nothing),
        ]);
        let selected = (self.db != 0).then(|| wire.send(&select));
        for pending in [hello, selected].into_iter().flatten() {
            match pending.await.reply {
                None => return Err(HandshakeError::Wire(wire.end_reason())),
                Some(ScriptReply::Error(error)) => {
                    return Err(HandshakeError::Refused(refusal(&error)));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// Classifies an error reply. It is permanent, unless it is known to pass.
fn refusal(error: &ErrorReply) -> ExchangeError {
    let message = error.to_string();
    let passes = message.contains("max number of clients");
    match error.code() {
        // The server's own text explains the syntax of HELLO.
        "NOAUTH" => {
            let reason = "NOAUTH: a password is required, and none was provided".into();
            Error::AuthenticationFailed { reason }.into()
        }
        "NOPROTO" => no_resp3(),
        "ERR" if message.contains("unknown command") && message.contains("HELLO") => no_resp3(),
        "ERR" if passes => ExchangeError::not_executed(message),
        _ => match ExchangeError::from_reply(error, "") {
            ExchangeError::NotMaster(message) | ExchangeError::Busy(message) => {
                ExchangeError::not_executed(message)
            }
            failure => failure,
        },
    }
}

fn no_resp3() -> ExchangeError {
    let reason = "it does not support RESP3".into();
    Error::UnsupportedServer { reason }.into()
}
