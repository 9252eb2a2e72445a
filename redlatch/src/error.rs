//! What can go wrong, each with a message that says what to do.

use std::time::Duration;

/// The result of an operation on a lock.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a lock failed.
///
/// No message contains a password, also when the URL that was given does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name cannot be used for an object in the store.
    #[error(
        "the name {name:?} cannot be used: {reason}; take 1 to 512 bytes without NUL or line breaks, \
         and no braces but those of a hash tag, as in \"{{order}}:7\""
    )]
    #[non_exhaustive]
    InvalidName {
        /// The name, shortened if it was very long.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A lease is too short or too long.
    #[error("a lease of {lease:?} cannot be used: take 1 ms to ten years")]
    #[non_exhaustive]
    InvalidLease {
        /// The lease that was asked for.
        lease: Duration,
    },

    /// A number of permits, or the count of a latch, is one that cannot be.
    #[error("the count {count} cannot be used: {reason}")]
    #[non_exhaustive]
    InvalidCount {
        /// The number that was asked for.
        count: i64,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A setting of the client builder has a value that cannot work.
    #[error("the setting `{setting}` cannot be used as given: {reason}")]
    #[non_exhaustive]
    InvalidSetting {
        /// The name of the setting, as the builder's method is named.
        setting: &'static str,
        /// What is wrong with the value.
        reason: String,
    },

    /// A text is no id of a permit.
    #[error("{id:?} is no id of a permit: take the 32 hex digits that it was given out with")]
    #[non_exhaustive]
    InvalidPermitId {
        /// The text, shortened if it was very long.
        id: String,
    },

    /// The URL of the store was not understood.
    #[error("the store's URL was not understood: {reason}")]
    #[non_exhaustive]
    InvalidUrl {
        /// What is wrong with it, without any part that could be secret.
        reason: String,
    },

    /// The store could not be reached, or the connection broke and did not come back in time: of the
    /// connect timeout, or of the response timeout if that is over first.
    ///
    /// Whatever the step may have done is being undone in the background; an acquisition that
    /// ends with this error leaves at most one lease behind that is not renewed.
    #[error("the store cannot be reached ({reason}); is it running, and is the address right?")]
    #[non_exhaustive]
    Unavailable {
        /// What the connection said.
        reason: String,
    },

    /// There is a connection, and the store did not answer on it within the response timeout, or within
    /// the wait limit of the request if that is shorter.
    ///
    /// The outcome of the step is unknown. Whatever it did is being undone in the background, as
    /// with [`Error::Unavailable`].
    #[error(
        "the store did not answer within {after:?}; it is overloaded, paused or cut off \
         (builder setting `response_timeout`, or the wait limit if that is shorter)"
    )]
    #[non_exhaustive]
    ResponseTimeout {
        /// The time that passed without an answer.
        after: Duration,
    },

    /// It was acquired, but too few replicas had that in time, so that a failover might have lost it.
    /// It was given back again; if that failed too it goes on in the background.
    #[error(
        "{in_sync} of the {needed} replicas that must have it had the acquisition within {within:?}, \
         so it was given back; are they connected and keeping up? \
         (builder settings `replica_sync` and `replica_timeout`)"
    )]
    #[non_exhaustive]
    NotReplicated {
        /// How many must have it.
        needed: usize,
        /// How many had it.
        in_sync: usize,
        /// How long they were waited for.
        within: Duration,
    },

    /// The store refused the user name or the password.
    #[error("the store refused the credentials ({reason}); check user name and password")]
    #[non_exhaustive]
    AuthenticationFailed {
        /// What the store said.
        reason: String,
    },

    /// The user that the client has logged in as may not do this, or not with this key or channel.
    ///
    /// [`docs/security.md`] has the smallest set of rules (ACL) that is enough.
    ///
    /// [`docs/security.md`]: https://github.com/redlatch/redlatch/blob/main/docs/security.md
    #[error(
        "the store does not permit this to its user ({reason}); the rules that are needed are in \
         docs/security.md"
    )]
    #[non_exhaustive]
    NotPermitted {
        /// What the store said.
        reason: String,
    },

    /// No TLS connection that could be trusted: the server's certificate is not from a CA that is
    /// trusted, not for this host or has expired; the server does not accept ours or wants one; or
    /// it does not speak TLS. A server that says nothing of it, but hangs up or stays silent, is
    /// [`Error::Unavailable`]; the message asks whether it is that.
    #[error("no secure connection to the store: {reason}")]
    #[non_exhaustive]
    TlsFailed {
        /// What is wrong, and what to do.
        reason: String,
    },

    /// The server is too old, or is no Redis.
    #[error("the server cannot be used: {reason}; Redis 6.2 or later, or any Valkey, is needed")]
    #[non_exhaustive]
    UnsupportedServer {
        /// What was found.
        reason: String,
    },

    /// Under the key is something of another kind. It was not changed.
    #[error(
        "the key of {name:?} holds something of another kind ({reason}); \
         it was left as it is: use another name, or remove the key"
    )]
    #[non_exhaustive]
    WrongKind {
        /// The name of the object, or the key.
        name: String,
        /// What was found there.
        reason: &'static str,
    },

    /// The lock was held by this guard and is no longer.
    #[error("the lock {name:?} was lost: {reason}; do not go on with what it protects")]
    #[non_exhaustive]
    Lost {
        /// The name of the lock.
        name: String,
        /// How it was lost.
        reason: Loss,
    },

    /// A non-reentrant lock is already held by the owner that asks for it.
    #[error(
        "the non-reentrant lock {name:?} is already held by this owner; release it first, \
         or use the re-entrant lock"
    )]
    #[non_exhaustive]
    AlreadyHeld {
        /// The name of the lock.
        name: String,
    },

    /// Locks that cannot be held together.
    #[error("these locks cannot be held together: {reason}")]
    #[non_exhaustive]
    InvalidMembers {
        /// What is wrong with them.
        reason: String,
    },

    /// A reader asks to write. It would wait for itself: others may be reading with it, and each of
    /// them could ask the same.
    #[error(
        "{name:?} is read by this owner, which now asks to write and would wait for itself; \
         release the read side first, or begin with the write side (a writer may also read)"
    )]
    #[non_exhaustive]
    WriteWhileReading {
        /// The name of the read-write lock.
        name: String,
    },

    /// There was no answer to a step that must not be repeated: it may have done its work or not.
    #[error(
        "there was no answer, and whether {step} took effect is not known ({reason}); \
         it was not repeated, because done twice it would count twice"
    )]
    #[non_exhaustive]
    OutcomeUnknown {
        /// What was to be done.
        step: &'static str,
        /// What the connection said.
        reason: String,
    },

    /// The store answered with an error that has no variant of its own.
    #[error("the store refused the step: {reason}")]
    #[non_exhaustive]
    Refused {
        /// What the store said.
        reason: String,
    },

    /// There is no tokio runtime in which the client could work, it was built without time or I/O, or it
    /// has been shut down.
    #[error(
        "there is no running tokio runtime with time and I/O enabled; \
         call from within one, or use `redlatch::blocking`"
    )]
    NoRuntime,
}

/// How a lock was lost, in [`Error::Lost`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The lease ended before it was renewed or released: the process was stopped, the store could
    /// not be reached for that long, or a fixed lease was shorter than the work.
    LeaseEnded,
    /// The store says that the owner does not hold the lock: it was unlocked by force, its key was
    /// deleted, or the store lost its data.
    NotHeld,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Loss::LeaseEnded => "its lease ended before it was renewed or released",
            Loss::NotHeld => "the store says that its owner no longer holds it",
        })
    }
}

impl Error {
    /// Whether the store was looked at and left as it was.
    pub(crate) fn leaves_untouched(&self) -> bool {
        matches!(
            self,
            Error::WrongKind { .. } | Error::WriteWhileReading { .. }
        )
    }

    /// Whether the store could not be asked.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(
            self,
            Error::Unavailable { .. } | Error::ResponseTimeout { .. }
        )
    }

    /// Whether the same call may succeed later with nothing changed here: the store was away, slow
    /// or cut off, or its replicas were.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Error::Unavailable { .. } | Error::ResponseTimeout { .. } | Error::NotReplicated { .. }
        )
    }
}
