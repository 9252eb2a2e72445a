//! Why one exchange with a server failed, and when to try again.

use std::time::Duration;

use redis::ServerError;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::step::refused;

/// Why one exchange failed.
#[derive(Clone)]
pub(super) enum Fault {
    /// There was no connection, or the server would not look at it now: it did nothing.
    NotSent(String),
    /// The connection broke before the answer came: it may have done its work.
    Unanswered(String),
    /// An answer that trying again does not change.
    Final(Error),
}

impl Fault {
    /// An error that the server answered with.
    pub(super) fn answered(error: &ServerError, key: &str) -> Fault {
        let said = match error.details() {
            Some(details) => format!("{} {details}", error.code()),
            None => error.code().to_owned(),
        };
        match error.code() {
            "LOADING" | "BUSY" | "TRYAGAIN" | "MASTERDOWN" | "CLUSTERDOWN" => Fault::NotSent(said),
            "NOAUTH" | "WRONGPASS" => Fault::Final(Error::AuthenticationFailed { reason: said }),
            _ => Fault::Final(refused(key, said)),
        }
    }
}

/// Tries again on a new connection, with growing pauses, until it is time to give up.
pub(super) struct Retry {
    pub(super) give_up: Instant,
    timeout: Duration,
    pause: Duration,
    last: Option<String>,
    /// Whether the step may have been carried out by an earlier try.
    pub(super) repeated: bool,
}

/// The pauses between tries: short enough for a restarted server to be found at once, long enough
/// that ten thousand waiting callers do not keep it from starting.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

impl Retry {
    pub(super) fn until(timeout: Duration) -> Retry {
        Retry {
            give_up: Instant::now() + timeout,
            timeout,
            pause: FIRST_PAUSE,
            last: None,
            repeated: false,
        }
    }

    /// Returns when it is time to try again; the error if that makes no sense.
    pub(super) async fn after(&mut self, fault: Fault) -> Result<()> {
        let reason = match fault {
            Fault::Final(error) => return Err(error),
            Fault::NotSent(reason) => reason,
            Fault::Unanswered(reason) => {
                self.repeated = true;
                reason
            }
        };
        tracing::debug!(%reason, "a step was not answered; trying again");
        self.last = Some(reason);
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// The error when time is up.
    pub(super) fn given_up(&mut self) -> Error {
        match self.last.take() {
            Some(reason) => Error::Unavailable { reason },
            None => Error::ResponseTimeout {
                after: self.timeout,
            },
        }
    }
}
