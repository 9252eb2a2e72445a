//! Whether one server process is asked to report changes of keys (`CLIENT TRACKING`), without I/O
//! or clock.
//!
//! A client that gets these reports knows of a loss after two round trips, not at the next renewal.
//! Each renewal is sent behind `CLIENT TRACKING ON OPTIN NOLOOP` and `CLIENT CACHING YES`, in one
//! write: a new connection has nothing to restore. The scripts read their keys once more at the
//! end, because a server forgets a read that the same script follows with a write.
//!
//! 1. The server is asked with each renewal until it refuses. An error reply is a refusal. A
//!    renewal that has failed is repeated without asking.
//! 2. A server may refuse by ending the connection instead, and an outage ends connections, too. So
//!    that counts as a refusal only if [`MAX_ENDED`] connections in a row have ended at a request
//!    for reports, each time the same process has then answered on a new connection, and no request
//!    for reports was answered in between.
//! 3. The process that replaces it is asked again.
//!
//! What must not happen, and what prevents it:
//!
//! - *An outage ends the reports*, for as long as the server lives. During an outage no server
//!   answers on a new connection, so an outage counts once; the first answer after it starts the
//!   count again.
//! - *A report that proves a loss, is missed, or causes load without limit.* It is a hint, and
//!   `watchdog` says what follows from it.
//!
//! `ClientBuilder::client_tracking(false)` turns the reports off.

/// Number of connections in a row. A network that breaks every second connection, and always at such a request, reaches it
/// once in 65,000 times.
const MAX_ENDED: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct Tracking {
    refused: bool,
    /// Whether the latest connection has ended at a request for reports.
    ended: bool,
    /// Number of such connections in a row after which the process has answered.
    ended_in_a_row: u32,
}

impl Tracking {
    /// Returns whether the server is asked to report changes.
    pub(super) fn is_on(&self) -> bool {
        !self.refused
    }

    /// Records that a request for reports was answered.
    pub(super) fn answered(&mut self) {
        (self.ended, self.ended_in_a_row) = (false, 0);
    }

    /// Records an error reply to a request for reports. Returns whether it is the first one.
    pub(super) fn refused(&mut self) -> bool {
        !std::mem::replace(&mut self.refused, true)
    }

    /// Records that the connection has ended before a request for reports was answered.
    pub(super) fn connection_ended(&mut self) {
        self.ended = true;
    }

    /// Records that the same process has answered on a new connection. Returns whether this shows that it refuses.
    pub(super) fn reconnected(&mut self) -> bool {
        self.ended_in_a_row += u32::from(std::mem::take(&mut self.ended));
        self.ended_in_a_row >= MAX_ENDED && self.refused()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_reply_is_a_refusal_once() {
        let mut tracking = Tracking::default();
        assert!(tracking.is_on() && tracking.refused());
        assert!(!tracking.is_on() && !tracking.refused());
    }

    /// However many requests fail in it, and however long it lasts.
    #[test]
    fn outages_are_no_refusal() {
        let mut tracking = Tracking::default();
        for _ in 0..1000 {
            for _ in 0..1000 {
                tracking.connection_ended();
            }
            assert!(!tracking.reconnected());
            tracking.answered();
        }
        // New connections between which nothing was asked.
        for _ in 0..1000 {
            assert!(!tracking.reconnected() && tracking.is_on());
        }
    }

    #[test]
    fn server_that_ends_each_connection_refuses() {
        let mut tracking = Tracking::default();
        for ended in [MAX_ENDED - 1, MAX_ENDED] {
            for one in 1..=ended {
                tracking.connection_ended();
                assert_eq!(tracking.reconnected(), one == MAX_ENDED);
            }
            assert_eq!(tracking.is_on(), ended < MAX_ENDED);
            tracking.answered();
        }
    }
}
