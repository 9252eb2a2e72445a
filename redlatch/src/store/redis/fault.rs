//! Why one exchange with a server failed, and when to try again.

use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerError};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::step::refused;
use crate::store::Sent;

/// Why one exchange failed.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// There was no connection, or the server would not look at it now: it did nothing.
    NotSent(String),
    /// The server would not look at it now, and is still the one to ask: it did nothing. No reason to
    /// suspect the topology, which every look would load further.
    NotNow(String),
    /// The connection broke before the answer came: it may have done its work.
    Unanswered(String),
    /// It did nothing, because another server has to be asked: the one at this address, as the
    /// server wrote it.
    Moved(String),
    /// The same for this one time.
    Asked(String),
    /// It did nothing: the server is no master, or not any more.
    Deposed(String),
    /// An answer that trying again does not change.
    Final(Error),
}

/// The code of an error. Before 7.0 an error inside of a script arrives wrapped in another, and one that
/// the script has caught arrives behind the place where it happened: `…: -READONLY …`.
fn inner_code<'a>(code: &'a str, said: &'a str) -> &'a str {
    if code != "ERR" && !code.starts_with('@') {
        return code;
    }
    let inner = said.split_once(": -").map(|(_, inner)| inner);
    let inner = inner.and_then(|inner| inner.split_whitespace().next());
    let is_code = |inner: &&str| inner.bytes().all(|byte| byte.is_ascii_uppercase());
    inner.filter(is_code).unwrap_or(code)
}

/// What a script is told that asks for a key of a slot that is half moved.
const NOT_HERE: &str = "Script attempted to access a non local key";

impl Fault {
    /// An error that the server answered with.
    pub(super) fn answered(error: &ServerError, key: &str) -> Fault {
        Fault::said(error.code(), error.details(), key)
    }

    /// The same, as the client library tells it.
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
            // A script of a slot that moves came upon a key that is elsewhere: what it did before that,
            // it did.
            "ERR" if details.is_some_and(|said| said.starts_with(NOT_HERE)) => {
                Fault::Unanswered(said)
            }
            _ => Fault::Final(refused(key, said)),
        }
    }

    /// Connecting has failed.
    pub(super) fn connecting(error: &RedisError) -> Fault {
        let reason = match error.code() {
            // The server's own text explains how to write HELLO.
            Some("NOAUTH") => "NOAUTH: it requires a password, and none was given".to_owned(),
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
                    reason: "it does not know RESP3".into(),
                })
            }
            ErrorKind::InvalidClientConfig => Fault::Final(Error::Unavailable { reason }),
            _ => Fault::NotSent(reason),
        }
    }

    /// The error for whoever does not try again.
    pub(super) fn into_error(self) -> Error {
        match self {
            Fault::Final(error) => error,
            Fault::NotSent(reason)
            | Fault::NotNow(reason)
            | Fault::Unanswered(reason)
            | Fault::Deposed(reason) => Error::Unavailable { reason },
            Fault::Moved(to) | Fault::Asked(to) => Error::Unavailable {
                reason: format!("the cluster keeps referring to another node, at last to {to}"),
            },
        }
    }

    /// What it comes to in a list of several.
    pub(super) fn reason(self) -> String {
        match self.into_error() {
            Error::Unavailable { reason } => reason,
            error => error.to_string(),
        }
    }
}

/// Tries again on a new connection, with growing pauses, until it is time to give up.
pub(super) struct Retry {
    pub(super) begun: Instant,
    timeout: Duration,
    pause: Duration,
    last: Option<Error>,
    /// Whether the step may have been carried out by an earlier try.
    pub(super) repeated: bool,
}

/// The pauses between tries. Connecting has its own besides.
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

    /// How much of the response timeout is left.
    pub(super) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.begun.elapsed())
    }

    /// Returns when it is time to try again; the error if that makes no sense. What failed is noted in
    /// `sent`, for a caller who does not wait that long.
    pub(super) async fn after(&mut self, fault: Fault, sent: &Sent) -> Result<()> {
        self.repeated |= matches!(fault, Fault::Unanswered(_));
        let is_final = matches!(fault, Fault::Final(_));
        let error = fault.into_error();
        if is_final {
            return Err(error);
        }
        tracing::debug!(%error, "a step was not answered; trying again");
        sent.failed(self.begun, error.clone());
        self.last = Some(error);
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// The error when time is up. `silence` is what to think of if there is no connection.
    pub(super) fn given_up(&mut self, silence: Option<&str>, sent: &Sent) -> Error {
        let last = self.last.take();
        let error = last.unwrap_or_else(|| no_answer(self.timeout, silence));
        sent.failed(self.begun, error.clone());
        error
    }
}

/// The error for a call that has waited this long and does not know of any fault. `silence` is what to
/// think of if there is no connection.
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

    /// As Redis 7 says it, as 6.2 wraps it, and as 6.2 tells a script that catches it.
    #[test]
    fn errors_are_known_however_a_script_wraps_them() {
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
