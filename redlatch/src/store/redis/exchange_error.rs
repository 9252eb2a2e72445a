//! Failures of one exchange with a server, and when to retry.

use std::collections::BTreeSet;
use std::time::Duration;
use std::{fmt, io};

use tokio::time::Instant;

use super::endpoint::Endpoint;
use super::pace::{Outage, Pace};
use crate::error::{Cause, Error, Result};
use crate::log::join_names;
use crate::step::{ErrorReply, script_error};
use crate::store::Progress;

/// Why one exchange failed.
#[derive(Debug, Clone)]
pub(super) enum ExchangeError {
    /// There was no connection, or the server rejected the command for now. It had no effect.
    NotExecuted(Cause),
    /// The server rejected the command for now and is still the right one. It had no effect. The
    /// topology is not checked: each check would add load.
    Busy(String),
    /// The connection broke before the answer arrived. The command may have had its effect.
    Unanswered(Cause),
    /// No effect: another server must be used, at this address, as the server wrote it (MOVED).
    Moved(String),
    /// The same for this command only (ASK).
    Ask(String),
    /// No effect: the server is not a master, or not any more.
    NotMaster(String),
    /// No effect: the keys are in several slots, which was not known of this store.
    CrossSlot(String),
    /// An error that a retry does not change.
    Permanent(Error),
}

/// Returns the error for a server that is not in a cluster.
pub(super) fn not_in_a_cluster() -> ExchangeError {
    let reason = "it is not in a cluster; connect with redis:// or redis+sentinel://".into();
    ExchangeError::Permanent(Error::UnsupportedServer { reason })
}

impl ExchangeError {
    /// Returns the kind of the error, for spans.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            ExchangeError::NotExecuted(_) => "not_executed",
            ExchangeError::Busy(_) => "busy",
            ExchangeError::Unanswered(_) => "unanswered",
            ExchangeError::Moved(_) => "moved",
            ExchangeError::Ask(_) => "ask",
            ExchangeError::NotMaster(_) => "not_master",
            ExchangeError::CrossSlot(_) => "cross_slot",
            ExchangeError::Permanent(_) => "permanent",
        }
    }
}

/// Returns the code of an error. Before 7.0 an error inside of a script arrives wrapped in another.
/// One that the script has caught follows the script line where it happened: `…: -READONLY …`.
fn inner_code<'a>(code: &'a str, message: &'a str) -> &'a str {
    if code != "ERR" && !code.starts_with('@') {
        return code;
    }
    let inner = message.split_once(": -").map(|(_, inner)| inner);
    let inner = inner.and_then(|inner| inner.split_whitespace().next());
    let is_code = |inner: &&str| inner.bytes().all(|byte| byte.is_ascii_uppercase());
    inner.filter(is_code).unwrap_or(code)
}

/// Returns what to do about a refusal that is known.
fn remedy(refusal: &str) -> Option<&'static str> {
    if is_unknown_command(refusal) {
        Some(
            "the server or a proxy before it does not have this command: do without this feature, or use another server",
        )
    } else if refusal.contains("passed using the KEYS array") {
        Some(
            "redlatch computes the keys of its scripts: connect to a server without this proxy, or switch off its check",
        )
    } else {
        None
    }
}

/// Returns whether a server says that it runs no commands on a connection with subscriptions.
pub(super) fn is_only_for_subscriptions(refusal: &str) -> bool {
    refusal.contains("are allowed in this context")
}

/// Returns whether a server or proxy says that it does not have a command.
pub(super) fn is_unknown_command(refusal: &str) -> bool {
    let texts = [
        "unknown command",
        "unsupported command",
        "command is not supported",
        "not support for",
    ];
    contains_any(refusal, &texts)
}

/// Returns whether a server refuses HELLO because it does not know it, or the protocol.
pub(super) fn lacks_resp3(refusal: &ErrorReply) -> bool {
    refusal.code() == "NOPROTO" || is_unknown_command(&refusal.to_string())
}

/// Returns whether a server or proxy says that the keys of a command are in several slots.
pub(super) fn is_cross_slot(error: &ErrorReply) -> bool {
    let texts = [
        "crossslot",
        "cross-slot",
        "in same slot",
        "in the same slot",
    ];
    contains_any(&error.to_string(), &texts)
}

/// Returns whether a refusal contains one of these texts, which are in lower case.
fn contains_any(refusal: &str, texts: &[&str]) -> bool {
    let refusal = refusal.to_ascii_lowercase();
    texts.iter().any(|text| refusal.contains(text))
}

/// Error of a script that accesses a key in a half-moved slot. Redis begins it with `Script
/// attempted`, Valkey 9.1 with `Attempted`.
const NON_LOCAL_KEY: &str = "ttempted to access a non local key";

impl ExchangeError {
    pub(super) fn not_executed(cause: impl Into<Cause>) -> ExchangeError {
        ExchangeError::NotExecuted(cause.into())
    }

    /// There is no connection to this place. Of several servers it may be the only one.
    pub(super) fn unreachable(place: impl fmt::Display, error: io::Error) -> ExchangeError {
        ExchangeError::NotExecuted(Cause::new(format!("{place}: {error}"), error))
    }

    /// Returns whether repeating the command cannot help.
    pub(super) fn is_permanent(&self) -> bool {
        matches!(
            self,
            ExchangeError::Permanent(_) | ExchangeError::CrossSlot(_)
        )
    }

    /// Returns whether the command is known to have had no effect.
    pub(super) fn had_no_effect(&self) -> bool {
        !matches!(
            self,
            ExchangeError::Unanswered(_) | ExchangeError::Permanent(_)
        )
    }

    /// Classifies an error reply of the server.
    pub(super) fn from_reply(error: &ErrorReply, key: &str) -> ExchangeError {
        let (message, details) = (error.to_string(), error.details());
        let code = inner_code(error.code(), &message);
        // `MOVED 3999 127.0.0.1:6381`
        let address = || details?.split_whitespace().nth(1).map(str::to_owned);
        match code {
            "MOVED" => address().map_or(ExchangeError::not_executed(message), ExchangeError::Moved),
            "ASK" => address().map_or(ExchangeError::not_executed(message), ExchangeError::Ask),
            "ERR" if message.contains("WAIT cannot be used with") => {
                ExchangeError::NotMaster(message)
            }
            // UNBLOCKED: a WAIT that was interrupted, because the master became a replica.
            "READONLY" | "MASTERDOWN" | "UNBLOCKED" => ExchangeError::NotMaster(message),
            "LOADING" | "BUSY" | "TRYAGAIN" => ExchangeError::Busy(message),
            "CLUSTERDOWN" | "NOREPLICAS" => ExchangeError::not_executed(message),
            "NOAUTH" | "WRONGPASS" => Error::authentication_failed(message).into(),
            // A script accessed a key that has moved with its slot. Its effects before that remain.
            _ if message.contains(NON_LOCAL_KEY) => ExchangeError::Unanswered(message.into()),
            _ if is_only_for_subscriptions(&message) => ExchangeError::not_executed(message),
            _ => match remedy(&message) {
                Some(remedy) => {
                    let reason = format!("{message}; {remedy}");
                    Error::Refused { reason }.into()
                }
                None => script_error(key, message).into(),
            },
        }
    }

    /// Classifies an error reply to a command of the handshake. Unless it is known to pass, a retry
    /// does not change it.
    pub(super) fn from_refusal(command: &str, error: &ErrorReply) -> ExchangeError {
        let mut message = error.to_string();
        // A server that does not know the command repeats its arguments, and with them the
        // password.
        if let Some((what, _)) = message.split_once(", with args") {
            message = what.to_owned();
        }
        match error.code() {
            "LOADING" | "BUSY" | "TRYAGAIN" | "MASTERDOWN" | "CLUSTERDOWN" | "READONLY" => {
                ExchangeError::not_executed(message)
            }
            _ if message.contains("max number of clients") => ExchangeError::not_executed(message),
            // The server's own text explains the syntax of HELLO.
            "NOAUTH" => {
                let reason = "NOAUTH: a password is required, and none was provided";
                Error::authentication_failed(reason).into()
            }
            "WRONGPASS" => Error::authentication_failed(message).into(),
            // Before there were users.
            _ if command == "AUTH" && message.contains("invalid password") => {
                Error::authentication_failed(message).into()
            }
            _ if command == "HELLO" && lacks_resp3(error) => {
                let reason = format!("it does not support RESP3 ({message})");
                Error::UnsupportedServer { reason }.into()
            }
            _ => {
                let reason = format!("{command}: {message}");
                Error::Refused { reason }.into()
            }
        }
    }

    /// Adds to a denied permission which keys or channels it is about: servers do not name them.
    pub(super) fn naming<'a>(
        mut self,
        what: &str,
        all: impl Iterator<Item = &'a str>,
    ) -> ExchangeError {
        if let ExchangeError::Permanent(Error::NotPermitted { reason }) = &mut self
            && contains_any(reason, &["permissions to access", "can't access"])
        {
            let all: BTreeSet<&str> = all.collect();
            if !all.is_empty() {
                let others = match contains_any(reason, &["in script", "executing the script"]) {
                    true => ", from which the script derives others",
                    false => "",
                };
                *reason = format!("{reason}; {what}{others}: {}", join_names(all.into_iter()));
            }
        }
        self
    }

    /// Adds to a refusal which server it is from, where the URL names none but sentinels.
    pub(super) fn refused_by(mut self, server: &str) -> ExchangeError {
        if let ExchangeError::Permanent(
            Error::AuthenticationFailed { reason, .. }
            | Error::NotPermitted { reason }
            | Error::Refused { reason },
        ) = &mut self
        {
            *reason = format!("{server}: {reason}");
        }
        self
    }

    /// The same for a sentinel, which has users of its own.
    pub(super) fn refused_by_sentinel(mut self, at: &Endpoint) -> ExchangeError {
        if let ExchangeError::Permanent(Error::AuthenticationFailed { sentinel, .. }) = &mut self {
            *sentinel = Some(at.to_string());
            return self;
        }
        self.refused_by(&format!("sentinel {at}"))
    }

    /// Returns whether the server does not have the command, or does not permit it.
    pub(super) fn lacks_command(&self) -> bool {
        match self {
            ExchangeError::Permanent(Error::NotPermitted { .. }) => true,
            ExchangeError::Permanent(Error::Refused { reason }) => is_unknown_command(reason),
            _ => false,
        }
    }

    /// Returns this failure, or another one if the server does not have the command.
    pub(super) fn if_unknown_command(self, other: impl FnOnce() -> ExchangeError) -> ExchangeError {
        match &self {
            ExchangeError::Permanent(Error::Refused { reason }) if is_unknown_command(reason) => {
                other()
            }
            _ => self,
        }
    }

    /// Returns the error for a caller that does not retry. (Not an `impl From`: one more for the
    /// public type would keep the compiler from inferring types in programs.)
    pub(super) fn into_error(self) -> Error {
        match self {
            ExchangeError::Permanent(error) => error,
            ExchangeError::NotExecuted(cause) | ExchangeError::Unanswered(cause) => {
                Error::unavailable(cause)
            }
            ExchangeError::Busy(reason)
            | ExchangeError::NotMaster(reason)
            | ExchangeError::CrossSlot(reason) => Error::unavailable(reason),
            ExchangeError::Moved(to) | ExchangeError::Ask(to) => Error::unavailable(format!(
                "too many redirects in the cluster, the last one to {to}"
            )),
        }
    }

    /// Returns the error of a step before which this has failed, so that it was not sent.
    pub(super) fn before_the_step(self) -> ExchangeError {
        ExchangeError::not_executed(self.reason())
    }

    /// Returns the reason, for a list of several.
    pub(super) fn reason(self) -> String {
        match self.into_error() {
            Error::Unavailable { reason, .. } => reason,
            error => error.to_string(),
        }
    }
}

/// An error that a retry does not change.
impl From<Error> for ExchangeError {
    fn from(error: Error) -> ExchangeError {
        ExchangeError::Permanent(error)
    }
}

/// Retries on a new connection with growing pauses, until a time limit.
pub(super) struct Retry {
    pub(super) started: Instant,
    timeout: Duration,
    pace: Pace,
    last_error: Option<Error>,
}

impl Retry {
    pub(super) fn with_timeout(timeout: Duration) -> Retry {
        Retry {
            started: Instant::now(),
            timeout,
            pace: Pace::default(),
            last_error: None,
        }
    }

    /// Returns the rest of the response timeout.
    pub(super) fn remaining(&self) -> Duration {
        self.timeout.saturating_sub(self.started.elapsed())
    }

    /// Sleeps until it is time to retry, or returns the error if a retry makes no sense. The
    /// failure is recorded in `progress`, for a caller that does not wait that long. The pause also
    /// grows with the `outage` of the node, which outlasts a request, and ends with it.
    pub(super) async fn pause_after(
        &mut self,
        failure: ExchangeError,
        outage: &Outage,
        progress: &Progress,
    ) -> Result<()> {
        if let ExchangeError::Unanswered(_) = failure {
            progress.mark_repeated();
        }
        let is_permanent = failure.is_permanent();
        let error = failure.into_error();
        if is_permanent {
            return Err(error);
        }
        tracing::debug!(%error, "a command was not answered; retrying");
        progress.record_failure(self.started, error.clone());
        self.last_error = Some(error);
        self.pace.failed(Instant::now());
        outage.pause(self.pace.pause()).await;
        Ok(())
    }

    /// Returns the error when the time limit has passed. `timeout_hint` is the hint for the case
    /// that there is no connection.
    pub(super) fn deadline_error(
        &mut self,
        timeout_hint: Option<&str>,
        progress: &Progress,
    ) -> Error {
        let last = self.last_error.take();
        let error = last.unwrap_or_else(|| timeout_error(self.timeout, timeout_hint));
        progress.record_failure(self.started, error.clone());
        error
    }
}

/// Returns the error for a call that has waited this long without any failure. `timeout_hint` is
/// the hint for the case that there is no connection.
pub(super) fn timeout_error(after: Duration, timeout_hint: Option<&str>) -> Error {
    match timeout_hint {
        None => Error::ResponseTimeout { after },
        Some(timeout_hint) => {
            Error::unavailable(format!("no connection within {after:?}{timeout_hint}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classify(text: String) -> ExchangeError {
        ExchangeError::from_reply(&ErrorReply::new(text), "k")
    }

    #[test]
    fn script_in_a_half_moved_slot_is_repeated() {
        for details in [
            "Script attempted to access a non local key in a cluster node",
            "Attempted to access a non local key in a cluster node script: on @user_script:121.",
        ] {
            // A script that catches the error, on 6.2, replies with it from where it happened.
            for code in ["ERR", "@user_script: 40:"] {
                let failure = classify(format!("{code} {details}"));
                let is_repeated = matches!(failure, ExchangeError::Unanswered(_));
                assert!(is_repeated, "{failure:?}");
            }
        }
    }

    /// A refusal that does not pass must not look like an outage: a program would wait for its end.
    #[test]
    fn refusals_of_a_handshake_are_permanent_unless_they_pass() {
        let not_executed = [
            ("HELLO", "LOADING Redis is loading the dataset in memory"),
            ("HELLO", "ERR max number of clients reached"),
            (
                "HELLO",
                "ERR max number of clients + cluster connections reached",
            ),
            ("HELLO", "MASTERDOWN Link with MASTER is down"),
        ];
        let unsupported = [
            ("HELLO", "NOPROTO unsupported protocol version"),
            ("HELLO", "ERR unknown command 'HELLO'"),
            ("HELLO", "ERR unsupported command"),
            (
                "HELLO",
                "ERR unknown command `HELLO`, with args beginning with: `AUTH`, `s3cret`",
            ),
        ];
        let failed = [
            (
                "HELLO",
                "NOAUTH HELLO must be called with the client already authenticated",
            ),
            ("HELLO", "WRONGPASS invalid username-password pair"),
        ];
        let refused = [
            (
                "AUTH",
                "ERR unknown command 'AUTH', with args beginning with: 's3cret'",
            ),
            ("HELLO", "DENIED Redis is running in protected mode"),
            ("SELECT 99", "ERR DB index is out of range"),
            (
                "SELECT 3",
                "NOPERM this user has no permissions to run the 'select' command",
            ),
            ("SELECT 3", "ERR unknown command 'SELECT'"),
        ];
        for (kind, refusals) in [
            ("not_executed", &not_executed[..]),
            ("UnsupportedServer", &unsupported),
            ("AuthenticationFailed", &failed),
            ("Refused", &refused),
        ] {
            for (command, text) in refusals {
                let failure = ExchangeError::from_refusal(command, &ErrorReply::new(*text));
                let ExchangeError::Permanent(error) = failure else {
                    assert_eq!(failure.kind(), kind, "{text}");
                    continue;
                };
                assert!(format!("{error:?}").starts_with(kind), "{error:?}");
                let said = error.to_string();
                assert!(!said.contains("s3cret"), "{said}");
                if kind == "Refused" {
                    let text = text.split(", with").next().unwrap();
                    assert!(said.contains(command) && said.contains(text), "{said}");
                }
            }
        }
    }

    /// From Redis 7, wrapped by 6.2, and caught by a script in 6.2.
    #[test]
    fn errors_wrapped_by_scripts_are_recognized() {
        for (code, kind) in [
            ("READONLY", "not_master"),
            ("UNBLOCKED", "not_master"),
            ("NOREPLICAS", "not_executed"),
            ("LOADING", "busy"),
            ("OOM", "permanent"),
            ("MISCONF", "permanent"),
        ] {
            for text in [
                format!("{code} said the server"),
                format!(
                    "ERR Error running script (call to f_6b1b): @user_script:1: @user_script: 1: -{code} said"
                ),
                format!("@user_script: 12: -{code} said the server"),
            ] {
                let failure = classify(text);
                assert_eq!(failure.kind(), kind, "{failure:?}");
                let error = failure.into_error();
                match kind {
                    "permanent" => assert!(matches!(error, Error::Refused { .. }), "{error:?}"),
                    _ => assert!(error.is_transient(), "{error:?}"),
                }
            }
        }
    }
}
