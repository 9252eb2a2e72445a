//! Errors. Each message says what happened and what to do.

use std::error::Error as StdError;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// The result of an operation on a lock.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why an operation failed.
///
/// No message contains a password, even if the URL contains one. If a connection failed because of an error of
/// the operating system or of a library, [`source`](StdError::source) returns that error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name cannot be used for an object in the store.
    #[error(
        "the name {name:?} cannot be used: {reason}; use 1 to 512 bytes without NUL or line \
         breaks, and no braces except those of a hash tag, as in \"{{order}}:7\""
    )]
    #[non_exhaustive]
    InvalidName {
        /// The name, truncated if it is very long.
        name: String,
        /// Why the name is refused.
        reason: &'static str,
    },

    /// A lease is too short or too long.
    #[error("a lease of {lease:?} cannot be used; use 1 ms to ten years")]
    #[non_exhaustive]
    InvalidLease {
        /// The requested lease.
        lease: Duration,
    },

    /// A number of permits or the count of a latch is out of range.
    #[error("the count {count} cannot be used: {reason}")]
    #[non_exhaustive]
    InvalidCount {
        /// The requested number.
        count: i64,
        /// Why the number is refused.
        reason: &'static str,
    },

    /// A setting of the client builder, of a handle or of a request has an unusable value.
    #[error("invalid value for the setting `{setting}`: {reason}")]
    #[non_exhaustive]
    InvalidSetting {
        /// Name of the method that sets it.
        setting: &'static str,
        /// Why the value is refused.
        reason: String,
    },

    /// A text is not a permit id.
    #[error("{id:?} is not a permit id; use the 32 hex digits that the acquisition returned")]
    #[non_exhaustive]
    InvalidPermitId {
        /// The text, truncated if it is very long.
        id: String,
    },

    /// The store's URL could not be parsed.
    #[error("the store's URL is invalid: {reason}")]
    #[non_exhaustive]
    InvalidUrl {
        /// Why the URL is refused, without any part that could be secret.
        reason: String,
    },

    /// The store could not be reached, or the connection broke and was not restored in time. The limit is
    /// the connect timeout, or the response timeout if that ends first.
    ///
    /// Any effect of the step is undone in the background. An acquisition that fails with this error leaves
    /// at most one lease behind, which is not renewed.
    #[error(
        "the store cannot be reached ({reason}); check that it is running and that the address \
         is correct"
    )]
    #[non_exhaustive]
    Unavailable {
        /// Error of the connection.
        reason: String,
        /// The error that caused it, if there is one.
        source: Option<ErrorSource>,
    },

    /// The client is connected, but the store did not answer within the response timeout, or within the
    /// wait limit of the request if that is shorter.
    ///
    /// The outcome of the step is unknown. Any effect is undone in the background, as with
    /// [`Error::Unavailable`].
    #[error(
        "the store did not answer within {after:?}; it may be overloaded, paused or disconnected \
         (limit: builder setting `response_timeout`, or the wait limit if that is shorter)"
    )]
    #[non_exhaustive]
    ResponseTimeout {
        /// Time that passed without an answer.
        after: Duration,
    },

    /// The master granted the acquisition, but too few replicas acknowledged it in time, so a failover
    /// could lose it. The client has released it again, or continues to try that in the background. Permits of a
    /// [`Semaphore`](crate::Semaphore) have no owner, so they are not released to a server that has replaced this one,
    /// and may not have them: then the error is [`Error::OutcomeUnknown`].
    #[error(
        "only {in_sync} of {needed} required replicas acknowledged the acquisition within \
         {within:?}, so the client releases it; check that the replicas are connected and not lagging \
         (builder settings `replica_sync` and `replica_timeout`; option `--replicas` of the command)"
    )]
    #[non_exhaustive]
    NotReplicated {
        /// Number of replicas that must acknowledge the acquisition.
        needed: usize,
        /// Number of replicas that acknowledged it.
        in_sync: usize,
        /// Time that the client waited for the replicas.
        within: Duration,
    },

    /// The store, or one of its sentinels, rejected the user name or the password.
    #[error("{}", login_refused(reason, sentinel.as_deref()))]
    #[non_exhaustive]
    AuthenticationFailed {
        /// Reply of the server.
        reason: String,
        /// Address of the sentinel that rejected them; `None`: a data server did.
        sentinel: Option<String>,
    },

    /// The client's user is not permitted to run a command, or to use a key or channel.
    ///
    /// [`docs/security.md`] lists the minimal ACL rules.
    ///
    /// [`docs/security.md`]: https://github.com/redlatch/redlatch/blob/main/docs/security.md
    #[error(
        "the store denied permission to the client's user ({reason}); docs/security.md lists the \
         required ACL rules"
    )]
    #[non_exhaustive]
    NotPermitted {
        /// Reply of the store, with the keys of the step or the channel if it is about these.
        reason: String,
    },

    /// No trusted TLS connection could be made. The server's certificate is not from a trusted CA, is not
    /// for this host or has expired; the server rejects or requires a client certificate; or the server
    /// does not speak TLS. If the server gives no reason but disconnects or stays silent, the error is
    /// [`Error::Unavailable`], whose message names TLS as a possible cause.
    #[error("the TLS connection to the store failed: {reason}")]
    #[non_exhaustive]
    TlsFailed {
        /// The problem, and how to fix it.
        reason: String,
        /// The error that caused it, if there is one.
        source: Option<ErrorSource>,
    },

    /// The server is too old, or is not Redis or Valkey.
    #[error(
        "the server is not supported: {reason}; Redis 6.2 or later, or any Valkey, is required"
    )]
    #[non_exhaustive]
    UnsupportedServer {
        /// What the client found.
        reason: String,
    },

    /// The key holds data of another kind. It was not changed.
    #[error(
        "the data of {name:?} is of another kind ({reason}) and was not changed; use another name, or \
         delete the key"
    )]
    #[non_exhaustive]
    WrongKind {
        /// Name of the object, or the key.
        name: String,
        /// What the key holds instead, or why it does not fit.
        reason: &'static str,
    },

    /// The lock or permit is no longer held.
    #[error("the lock {name:?} was lost: {reason}; stop using the resource that it protects")]
    #[non_exhaustive]
    Lost {
        /// Name of the lock.
        name: String,
        /// Cause of the loss.
        reason: Loss,
    },

    /// The owner already holds the non-reentrant lock that it requests.
    #[error(
        "the non-reentrant lock {name:?} is already held by this owner; release it first, or use \
         the reentrant lock"
    )]
    #[non_exhaustive]
    AlreadyHeld {
        /// Name of the lock.
        name: String,
    },

    /// The hold of this guard cannot become a ticket.
    #[error("the lock {name:?} cannot become a ticket: {reason}")]
    #[non_exhaustive]
    NotMovable {
        /// Name of the lock.
        name: String,
        /// Why it cannot, and what to do.
        reason: &'static str,
    },

    /// A text is not a ticket, or the ticket is one of another lock.
    #[error("the ticket cannot be used: {reason}")]
    #[non_exhaustive]
    InvalidTicket {
        /// Why it cannot, without any part of the text.
        reason: String,
    },

    /// The store does not have the hold of the ticket.
    #[error("the ticket of {name:?} is refused: {reason}")]
    #[non_exhaustive]
    TicketRefused {
        /// Name of the lock.
        name: String,
        /// What the store has instead.
        reason: TicketRefusal,
    },

    /// Another client has asked for the lock ([`Lock::ask`](crate::Lock::ask), [`Lock::revoke`](crate::Lock::revoke)), so its hold does not
    /// pass on to a ticket or from one, and is not extended beyond the limit of the request.
    #[error("the lock {name:?} was {}; finish the work, and release it", asked_effect(*.left))]
    #[non_exhaustive]
    Asked {
        /// Name of the lock.
        name: String,
        /// Time until the limit of the request; `None`: it has no limit.
        left: Option<Duration>,
    },

    /// These locks cannot be held together.
    #[error("these locks cannot be held together: {reason}")]
    #[non_exhaustive]
    InvalidMembers {
        /// Why they cannot.
        reason: String,
    },

    /// An owner that holds the read lock requests the write lock. It would wait for itself: if several
    /// readers did so, each would wait for the others.
    #[error(
        "this owner holds the read lock of {name:?}, so a request for the write lock would wait \
         for itself; release the read lock first, or start with the write lock (a writer may also \
         read)"
    )]
    #[non_exhaustive]
    WriteWhileReading {
        /// Name of the read-write lock.
        name: String,
    },

    /// A step that must not be repeated was not answered. It may or may not have taken effect.
    #[error(
        "the store did not answer, so it is unknown whether {step} took effect ({reason}); it was \
         not repeated, because a second execution would count twice"
    )]
    #[non_exhaustive]
    OutcomeUnknown {
        /// The step.
        step: &'static str,
        /// Error of the connection.
        reason: String,
        /// The error that caused it, if there is one.
        source: Option<ErrorSource>,
    },

    /// The store replied with an error that has no variant of its own, or no sentinel knows a master of the
    /// name in the URL.
    #[error("the store refused the command: {reason}")]
    #[non_exhaustive]
    Refused {
        /// Reply of the store.
        reason: String,
    },

    /// There is no tokio runtime that the client could use: the call is outside of one, the runtime was
    /// built without time or I/O, or it has shut down. Or this process was forked: a client works only in
    /// the process that created it.
    #[error(
        "there is no running tokio runtime with time and I/O enabled; \
         call from within one, or use `redlatch::blocking`, and connect again in a forked process"
    )]
    NoRuntime,

    /// A blocking call was made in async code of the runtime that has to answer it, so it would block the
    /// very work that it waits for. Only possible with a client from
    /// [`Client::blocking`](crate::Client::blocking).
    #[error(
        "a blocking call in async code of its own runtime would wait for itself; use the async \
         API there, or call from `spawn_blocking` or another thread"
    )]
    BlockedRuntime,
}

/// Returns which server has rejected a login, and what to check.
fn login_refused(reason: &str, sentinel: Option<&str>) -> String {
    match sentinel {
        None => format!(
            "the store refused the credentials ({reason}); check the user name and password"
        ),
        Some(at) => format!(
            "the sentinel {at} refused the login ({reason}); check the user name and password for the sentinels, \
             which are not those for the servers (builder settings `sentinel_username` and `sentinel_password`)"
        ),
    }
}

/// Returns what a request to release a lock does to its hold.
fn asked_effect(left: Option<Duration>) -> String {
    match left {
        Some(left) => format!(
            "revoked, so its hold does not pass on, and is not extended beyond {left:?} from now"
        ),
        None => "asked for, so its hold does not pass on".to_owned(),
    }
}

/// Cause of a loss, in [`Error::Lost`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The lease ended before it was renewed or released: the process was suspended, the store was
    /// unreachable for too long, or a fixed lease was shorter than the work.
    LeaseEnded,
    /// The store reports that the owner does not hold the lock: it was force-unlocked, its key was deleted,
    /// or the store lost its data.
    NotHeld,
    /// It was held until the limit of [`Acquire::at_most`](crate::Acquire::at_most). The client releases it in the
    /// background.
    HeldTooLong {
        /// How long it was allowed to be held.
        limit: Duration,
    },
    /// Its holder did not call [`Guard::feed`](crate::Guard::feed) as often as
    /// [`Acquire::fed_every`](crate::Acquire::fed_every) requires. The client releases it in the background.
    NotFed {
        /// How often it had to be fed.
        limit: Duration,
    },
    /// [`Lock::revoke`](crate::Lock::revoke) has asked its holder to release it, and the limit has passed. The client releases
    /// it in the background.
    Revoked,
}

impl Loss {
    /// Returns whether it was lost at a limit, so that the store still has the hold.
    pub(crate) fn is_at_limit(self) -> bool {
        matches!(
            self,
            Loss::HeldTooLong { .. } | Loss::NotFed { .. } | Loss::Revoked
        )
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Loss::LeaseEnded => f.write_str("its lease ended before it was renewed or released"),
            Loss::NotHeld => f.write_str("the store reports that its owner no longer holds it"),
            Loss::HeldTooLong { limit } => {
                write!(f, "it was held longer than its limit of {limit:?}")
            }
            Loss::NotFed { limit } => write!(f, "its holder did not feed it for {limit:?}"),
            Loss::Revoked => {
                f.write_str("it was revoked, and its holder did not release it in time")
            }
        }
    }
}

/// What the store has instead of the hold of a ticket, in [`Error::TicketRefused`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TicketRefusal {
    /// The lock is free.
    Free,
    /// This owner holds the lock, as [`OwnerId`](crate::OwnerId). It has adopted the ticket, or has acquired the lock
    /// after the lease of the ticket.
    HeldBy {
        /// The owner as the store keeps it.
        owner: String,
    },
    /// The hold of another ticket is in the store. So the secret of this one is wrong, or it is an earlier one.
    OtherTicket,
}

impl std::fmt::Display for TicketRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TicketRefusal::Free => f.write_str(
                "the lock is free, because the lease of the ticket has ended or the lock was released; acquire it again",
            ),
            TicketRefusal::HeldBy { owner } => write!(
                f,
                "it has already been used, or its lease has ended: {owner} holds the lock"
            ),
            TicketRefusal::OtherTicket => f.write_str(
                "another ticket holds the lock, so this one is forged, or its lease has ended",
            ),
        }
    }
}

/// The error of the operating system or of a library that caused an [`Error`]. Its type may change in any
/// release. All sources are equal, because an [`Error`] also describes its source in words.
#[derive(Clone)]
pub struct ErrorSource(Arc<dyn StdError + Send + Sync>);

impl ErrorSource {
    pub(crate) fn new(error: impl StdError + Send + Sync + 'static) -> ErrorSource {
        ErrorSource(Arc::new(error))
    }
}

impl Deref for ErrorSource {
    type Target = dyn StdError + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl std::fmt::Debug for ErrorSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.0, f)
    }
}

impl PartialEq for ErrorSource {
    fn eq(&self, _: &ErrorSource) -> bool {
        true
    }
}

impl Eq for ErrorSource {}

/// Why a connection failed: in words, and the error that it describes, if there is one.
#[derive(Debug, Clone)]
pub(crate) struct Cause {
    pub(crate) reason: String,
    pub(crate) source: Option<ErrorSource>,
}

impl Cause {
    pub(crate) fn new(
        reason: impl Into<String>,
        source: impl StdError + Send + Sync + 'static,
    ) -> Cause {
        Cause {
            reason: reason.into(),
            source: Some(ErrorSource::new(source)),
        }
    }
}

impl From<String> for Cause {
    fn from(reason: String) -> Cause {
        let source = None;
        Cause { reason, source }
    }
}

impl From<&str> for Cause {
    fn from(reason: &str) -> Cause {
        reason.to_owned().into()
    }
}

impl Error {
    pub(crate) fn unavailable(cause: impl Into<Cause>) -> Error {
        let Cause { reason, source } = cause.into();
        Error::Unavailable { reason, source }
    }

    /// The error for a login that a data server rejects.
    pub(crate) fn authentication_failed(reason: impl Into<String>) -> Error {
        let (reason, sentinel) = (reason.into(), None);
        Error::AuthenticationFailed { reason, sentinel }
    }

    /// Returns whether the store answered without changing anything.
    pub(crate) fn leaves_untouched(&self) -> bool {
        matches!(
            self,
            Error::WrongKind { .. }
                | Error::WriteWhileReading { .. }
                | Error::NotMovable { .. }
                | Error::Asked { .. }
        )
    }

    /// Returns whether the store does not have the hold that was to be released, so that other owners may have held the lock.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Error::Lost { .. } | Error::WrongKind { .. })
    }

    /// Returns the loss that this error of a release means.
    pub(crate) fn into_loss(self) -> Option<Error> {
        match self {
            Error::WrongKind { name, .. } => Some(Error::Lost {
                name,
                reason: Loss::NotHeld,
            }),
            lost @ Error::Lost { .. } => Some(lost),
            _ => None,
        }
    }

    /// Returns whether the store could not be reached or did not answer.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(
            self,
            Error::Unavailable { .. } | Error::ResponseTimeout { .. }
        )
    }

    /// Returns whether the same call may succeed later without changes on the client: the store was down,
    /// slow or unreachable, or its replicas were.
    pub fn is_transient(&self) -> bool {
        self.is_outage() || matches!(self, Error::NotReplicated { .. })
    }
}
