//! Exit codes, named after sysexits.h where it has a matching name.

use redlatch::Error;
use rustix::process::WaitStatus;

use crate::duration;

pub(crate) const OK: u8 = 0;
/// `show --quiet`: NAME is free. As in `grep -q`, the answer is no.
pub(crate) const FREE: u8 = 1;
/// `redlatch deadlocks` has found one.
pub(crate) const FOUND: u8 = 1;
/// `redlatch doctor`: something does not work, or works less well.
pub(crate) const DEGRADED: u8 = 1;
/// Wrong usage, as in clap and shells.
pub(crate) const USAGE: u8 = 2;
/// EX_DATAERR: the key holds an object of another kind.
pub(crate) const WRONG_KIND: u8 = 65;
/// EX_UNAVAILABLE: the store cannot be reached, or refuses access.
pub(crate) const UNAVAILABLE: u8 = 69;
/// EX_SOFTWARE: a bug in redlatch.
pub(crate) const SOFTWARE: u8 = 70;
/// EX_OSERR: the operating system refused something.
pub(crate) const SYSTEM: u8 = 71;
/// EX_CANTCREAT: the slot of --once-per or --slot has had its run.
pub(crate) const ALREADY_RAN: u8 = 73;
/// EX_IOERR: the lock was lost while CMD ran, or a ticket is refused or revoked.
pub(crate) const LOST: u8 = 74;
/// EX_TEMPFAIL: another owner holds the lock.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// EX_PROTOCOL: the holder that was asked to release the lock has not done so in time.
pub(crate) const NOT_RELEASED: u8 = 76;
/// As in shells: found, but cannot be executed.
pub(crate) const CANNOT_EXECUTE: u8 = 126;
/// As in shells: not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// As in shells: ended by a signal.
pub(crate) fn by_signal(number: i32) -> u8 {
    u8::try_from(number).map_or(u8::MAX, |number| number.saturating_add(128))
}

/// Returns the exit code that a shell reports for this status.
pub(crate) fn by_status(status: WaitStatus) -> u8 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, number) => by_signal(number.unwrap_or_default()),
    }
}

/// The failure of a command.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure {
            code: USAGE,
            message: message.into(),
        }
    }

    pub(crate) fn wrong_kind(message: impl Into<String>) -> Failure {
        Failure {
            code: WRONG_KIND,
            message: message.into(),
        }
    }

    pub(crate) fn system(what: &str, error: &std::io::Error) -> Failure {
        Failure {
            code: SYSTEM,
            message: format!("{what}: {error}"),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let code = match &error {
            Error::InvalidName { .. }
            | Error::InvalidTicket { .. }
            | Error::InvalidLease { .. }
            | Error::InvalidSetting { .. }
            | Error::InvalidUrl { .. } => USAGE,
            Error::WrongKind { .. } => WRONG_KIND,
            Error::Unavailable { .. }
            | Error::ResponseTimeout { .. }
            | Error::NotReplicated { .. }
            | Error::AuthenticationFailed { .. }
            | Error::TlsFailed { .. }
            | Error::NotPermitted { .. }
            | Error::UnsupportedServer { .. }
            | Error::OutcomeUnknown { .. }
            | Error::Refused { .. } => UNAVAILABLE,
            Error::Lost { .. } | Error::TicketRefused { .. } | Error::Asked { .. } => LOST,
            _ => SOFTWARE,
        };
        let message = match error {
            Error::InvalidLease { lease, .. } => {
                let lease = duration::short(lease);
                format!("a lease of {lease} cannot be used; use 1ms to ten years")
            }
            error => error.to_string(),
        };
        Failure { code, message }
    }
}
