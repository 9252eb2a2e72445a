//! Failures of one exchange with a server, and when to retry.

use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerError};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::step::refused;
use crate::store::Sent;

/// Why one exchange failed.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// There was no connection, or the server rejected the command for now. It had no effect.
    NotSent(String),
    /// The server rejected the command for now and is still the right one. It had no effect. The topology
    /// is not suspected: each check of it would add load.
    NotNow(String),
    /// The connection broke before the answer arrived. The command may have had its effect.
    Unanswered(String),
    /// No effect: another server must be used, at this address, as the server wrote it (MOVED).
    Moved(String),
    /// The same for this command only (ASK).
    Asked(String),
    /// No effect: the server is not a master, or not any more.
    Deposed(String),
    /// An error that a retry does not change.
    Final(Error),
}

/// Returns the code of an error. Before 7.0 an error inside of a script arrives wrapped in another. One
/// that the script has caught follows the place where it happened: `…: -READONLY …`.
fn inner_code<'a>(code: &'a str, said: &'a str) -> &'a str {
    if code != "ERR" && !code.starts_with('@') {
        return code;
    }
    let inner = said.split_once(": -").map(|(_, inner)| inner);
    let inner = inner.and_then(|inner| inner.split_whitespace().next());
    let is_code = |inner: &&str| inner.bytes().all(|byte| byte.is_ascii_uppercase());
    inner.filter(is_code).unwrap_or(code)
}

/// Error of a script that accesses a key in a half-moved slot.
const NOT_HERE: &str = "Script attempted to access a non local key";

impl Fault {
    /// Classifies an error reply of the server.
    pub(super) fn answered(error: &ServerError, key: &str) -> Fault {
        Fault::said(error.code(), error.details(), key)
    }

    /// The same for an error of the client library.
    pub(super) fn refused(error: &RedisError) -> Fault {
        match error.code() {
            Some(code) => Fault::said(code, error.detail(), ""),
            None => Fault::Final(Error::Refused {
                reason: error.to_string(),
            }),
        }
    }

    fn said(code: &str, details: Option<&str>, key: &str) -> Fault {
        let said = match details {
            Some(details) => format!("{code} {details}"),
            None => code.to_owned(),
        };
        let code = inner_code(code, &said);
        // `MOVED 3999 127.0.0.1:6381`
        let address = || details?.split_whitespace().nth(1).map(str::to_owned);
        match code {
            "MOVED" => address().map_or(Fault::NotSent(said), Fault::Moved),
            "ASK" => address().map_or(Fault::NotSent(said), Fault::Asked),
            // UNBLOCKED: a WAIT that was interrupted, because the master became a replica.
            "READONLY" | "MASTERDOWN" | "UNBLOCKED" => Fault::Deposed(said),
            "LOADING" | "BUSY" | "TRYAGAIN" => Fault::NotNow(said),
            "CLUSTERDOWN" | "NOREPLICAS" => Fault::NotSent(said),
            "NOAUTH" | "WRONGPASS" => Fault::Final(Error::AuthenticationFailed { reason: said }),
            // A script met a key that has moved with its slot. Its effects before that remain.
            "ERR" if details.is_some_and(|said| said.starts_with(NOT_HERE)) => {
                Fault::Unanswered(said)
            }
            _ => Fault::Final(refused(key, said)),
        }
    }

    /// Classifies a failure to connect.
    pub(super) fn connecting(error: &RedisError) -> Fault {
        let reason = match error.code() {
            // The server's own text explains the syntax of HELLO.
            Some("NOAUTH") => "NOAUTH: a password is required, and none was provided".to_owned(),
            _ => error.to_string(),
        };
        if matches!(error.code(), Some("WRONGPASS" | "NOAUTH")) {
            return Fault::Final(Error::AuthenticationFailed { reason });
        }
        let no_hello = reason.contains("HELLO") && reason.contains("unknown command");
        match error.kind() {
            ErrorKind::AuthenticationFailed => Fault::Final(Error::AuthenticationFailed { reason }),
            _ if no_hello || error.kind() == ErrorKind::RESP3NotSupported => {
                Fault::Final(Error::UnsupportedServer {
                    reason: "it does not support RESP3".into(),
                })
            }
            ErrorKind::InvalidClientConfig => Fault::Final(Error::Unavailable { reason }),
            _ => Fault::NotSent(reason),
        }
    }

    /// Returns the error for a caller that does not retry.
    pub(super) fn into_error(self) -> Error {
        match self {
            Fault::Final(error) => error,
            Fault::NotSent(reason)
            | Fault::NotNow(reason)
            | Fault::Unanswered(reason)
            | Fault::Deposed(reason) => Error::Unavailable { reason },
            Fault::Moved(to) | Fault::Asked(to) => Error::Unavailable {
                reason: format!("too many redirects in the cluster, the last one to {to}"),
            },
        }
    }

    /// Returns the reason, for a list of several.
    pub(super) fn reason(self) -> String {
        match self.into_error() {
            Error::Unavailable { reason } => reason,
            error => error.to_string(),
        }
    }
}

/// Retries on a new connection with growing pauses, until a time limit.
pub(super) struct Retry {
    pub(super) begun: Instant,
    timeout: Duration,
    pause: Duration,
    last: Option<Error>,
    /// Whether an earlier try may have applied the step.
    pub(super) repeated: bool,
}

/// Pauses between tries. Connecting has its own in addition.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

impl Retry {
    pub(super) fn until(timeout: Duration) -> Retry {
        Retry {
            begun: Instant::now(),
            timeout,
            pause: FIRST_PAUSE,
            last: None,
            repeated: false,
        }
    }

    /// Returns the rest of the response timeout.
    pub(super) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.begun.elapsed())
    }

    /// Sleeps until it is time to retry, or returns the error if a retry makes no sense. The failure is
    /// recorded in `sent`, for a caller that does not wait that long.
    pub(super) async fn after(&mut self, fault: Fault, sent: &Sent) -> Result<()> {
        self.repeated |= matches!(fault, Fault::Unanswered(_));
        let is_final = matches!(fault, Fault::Final(_));
        let error = fault.into_error();
        if is_final {
            return Err(error);
        }
        tracing::debug!(%error, "a command was not answered; retrying");
        sent.failed(self.begun, error.clone());
        self.last = Some(error);
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// Returns the error when the time limit has passed. `silence` is the hint for the case that there is
    /// no connection.
    pub(super) fn given_up(&mut self, silence: Option<&str>, sent: &Sent) -> Error {
        let last = self.last.take();
        let error = last.unwrap_or_else(|| no_answer(self.timeout, silence));
        sent.failed(self.begun, error.clone());
        error
    }
}

/// Returns the error for a call that has waited this long without any failure. `silence` is the hint for
/// the case that there is no connection.
pub(super) fn no_answer(after: Duration, silence: Option<&str>) -> Error {
    match silence {
        None => Error::ResponseTimeout { after },
        Some(silence) => Error::Unavailable {
            reason: format!("no connection within {after:?}{silence}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From Redis 7, wrapped by 6.2, and caught by a script in 6.2.
    #[test]
    fn errors_wrapped_by_scripts_are_recognized() {
        let forms = |code: &str| {
            [
                (code.to_owned(), "said the server".to_owned()),
                (
                    "ERR".to_owned(),
                    format!(
                        "Error running script (call to f_6b1b): @user_script:1: @user_script: 1: -{code} said"
                    ),
                ),
                (
                    "@user_script:".to_owned(),
                    format!("12: -{code} said the server"),
                ),
            ]
        };
        for code in ["READONLY", "UNBLOCKED"] {
            for (first, rest) in forms(code) {
                let fault = Fault::said(&first, Some(&rest), "k");
                assert!(matches!(fault, Fault::Deposed(_)), "{fault:?}");
                assert!(fault.into_error().is_transient());
            }
        }
        for code in ["NOREPLICAS", "LOADING"] {
            for (first, rest) in forms(code) {
                let fault = Fault::said(&first, Some(&rest), "k");
                assert!(
                    matches!(fault, Fault::NotSent(_) | Fault::NotNow(_)),
                    "{fault:?}"
                );
                assert!(fault.into_error().is_transient());
            }
        }
        for code in ["OOM", "MISCONF"] {
            for (first, rest) in forms(code) {
                let fault = Fault::said(&first, Some(&rest), "k");
                assert!(matches!(fault, Fault::Final(Error::Refused { .. })));
            }
        }
    }
}
