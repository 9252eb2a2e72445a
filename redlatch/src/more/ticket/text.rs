//! The text of a ticket: `redlatch1.<kind>.<name>.<token>.<lease>.<secret>`.
//!
//! All characters may be part of a URL. The name is escaped (`~` and two hex digits for each byte other than letters,
//! digits, `-` and `_`), the token of a fenced lock and the lease in ms are decimal numbers, and the secret has 32 hex
//! digits. There is one text for each ticket, and any other text is refused.
//!
//! The owner that holds the lock for the ticket is derived from the whole text. So a listing that shows the owner does not
//! show the ticket, and a ticket of which any part was changed is the ticket of another owner, which holds nothing.

use std::fmt::{Display, Formatter, Write as _};
use std::str::FromStr;
use std::time::Duration;

use crate::environment::random;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::name::{KeyLayout, MAX_NAME_BYTES, ObjectKeys};
use crate::owner::OwnerId;
use crate::step::sha1;

/// The first part of the text, with the version of the format.
const VERSION: &str = "redlatch1";

/// What the token is if there is none.
const NO_TOKEN: &str = "-";

/// The longest text of a ticket: a name of which each byte is escaped, and 128 bytes for the other parts.
const MAX_TICKET_BYTES: usize = 3 * MAX_NAME_BYTES + 128;

/// Number of characters of the secret.
const SECRET_DIGITS: usize = 32;

/// First part of the owners of tickets. Their number is 0, which no owner of a client has.
const OWNER: &str = "ticket-";

/// A hold that no process renews, which another process may adopt: [`Guard::into_ticket`](crate::Guard::into_ticket).
///
/// Its text ([`Display`], [`FromStr`]) has ASCII letters, digits, `.`, `-`, `_` and `~`, and at most 1664 bytes. It contains a
/// secret: a process that has it and may use the store can adopt, renew and release the hold. [`Debug`](std::fmt::Debug) omits the
/// secret.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let client = redlatch::Client::embedded();
/// let guard = client.lock("orders:42").lock().await?;
/// let ticket = guard.into_ticket().await?;
/// let text = ticket.to_string(); // e.g. redlatch1.lock.orders~3A42.-.30000.2c5ea4c07e8f4c1d8e0b9b1b8a3f6d52
/// assert_eq!(text.parse::<redlatch::Ticket>()?, ticket);
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket {
    kind: TicketKind,
    name: String,
    token: Option<u64>,
    lease: Lease,
    secret: String,
}

/// The kind of lock that a [`Ticket`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TicketKind {
    /// [`Client::lock`](crate::Client::lock).
    Lock,
    /// [`Client::fair_lock`](crate::Client::fair_lock).
    Fair,
    /// [`Client::fenced_lock`](crate::Client::fenced_lock).
    Fenced,
    /// [`Client::spin_lock`](crate::Client::spin_lock).
    Spin,
    /// The write side of [`Client::read_write_lock`](crate::Client::read_write_lock).
    Write,
}

impl TicketKind {
    const ALL: [TicketKind; 5] = [
        TicketKind::Lock,
        TicketKind::Fair,
        TicketKind::Fenced,
        TicketKind::Spin,
        TicketKind::Write,
    ];

    fn as_str(self) -> &'static str {
        match self {
            TicketKind::Lock => "lock",
            TicketKind::Fair => "fair",
            TicketKind::Fenced => "fenced",
            TicketKind::Spin => "spin",
            TicketKind::Write => "write",
        }
    }
}

/// As in the text of a ticket: `lock`, `fair`, `fenced`, `spin` or `write`.
impl Display for TicketKind {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl Ticket {
    /// Creates a ticket with a new secret.
    pub(super) fn new(kind: TicketKind, name: &str, token: Option<u64>, lease: Lease) -> Ticket {
        Ticket {
            kind,
            name: name.to_owned(),
            token,
            lease,
            secret: random().simple().to_string(),
        }
    }

    /// Returns the kind of the lock.
    pub fn kind(&self) -> TicketKind {
        self.kind
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the fencing token of the hold, if the lock is a [`FencedLock`](crate::FencedLock). The resource accepts the
    /// holder with this token, also while no process has adopted the ticket.
    pub fn token(&self) -> Option<u64> {
        self.token
    }

    /// Returns the lease with which the ticket was made.
    pub fn lease(&self) -> Duration {
        self.lease.duration()
    }

    pub(super) fn store_lease(&self) -> Lease {
        self.lease
    }

    /// Returns the owner of the hold until the ticket is adopted, as the store keeps it and listings show it. Not a secret.
    pub fn owner_id(&self) -> OwnerId {
        format!("{OWNER}{}:0", sha1(&self.to_string())).into()
    }
}

/// Returns whether this owner is a ticket.
pub(super) fn is_ticket(owner: &OwnerId) -> bool {
    owner.as_str().starts_with(OWNER) && owner.as_str().ends_with(":0")
}

impl Display for Ticket {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{VERSION}.{}.", self.kind)?;
        for &byte in self.name.as_bytes() {
            match is_unescaped(byte) {
                true => f.write_char(byte.into())?,
                false => write!(f, "~{byte:02X}")?,
            }
        }
        match self.token {
            Some(token) => write!(f, ".{token}")?,
            None => write!(f, ".{NO_TOKEN}")?,
        }
        write!(f, ".{}.{}", self.lease.millis(), self.secret)
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket")
            .field("kind", &self.kind)
            .field("name", &self.name)
            .field("token", &self.token)
            .field("lease", &self.lease())
            .finish_non_exhaustive()
    }
}

/// Parses the text of a ticket. It says nothing about whether the store still has the hold.
///
/// # Errors
///
/// [`Error::InvalidTicket`]: it is longer than 1664 bytes, or not the text that [`Display`] writes.
impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Ticket> {
        if text.len() > MAX_TICKET_BYTES {
            return Err(invalid(format!(
                "it is longer than {MAX_TICKET_BYTES} bytes"
            )));
        }
        let ticket = parse(text).ok_or_else(|| invalid(why_malformed(text)))?;
        // Numbers with leading zeros, bytes that need no escape: there is one text for each ticket.
        match ticket.to_string() == text {
            true => Ok(ticket),
            false => Err(invalid(MALFORMED)),
        }
    }
}

const MALFORMED: &str = "it is malformed; use the whole text as it was printed";

pub(super) fn invalid(reason: impl Into<String>) -> Error {
    let reason = reason.into();
    Error::InvalidTicket { reason }
}

fn why_malformed(text: &str) -> &'static str {
    let version = text.split('.').next().unwrap_or_default();
    let is_later = version.strip_prefix("redlatch").is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
    });
    match is_later && version != VERSION {
        true => "another version of redlatch made it",
        false => MALFORMED,
    }
}

fn parse(text: &str) -> Option<Ticket> {
    let parts: Vec<&str> = text.split('.').collect();
    let [VERSION, kind, name, token, lease, secret] = parts[..] else {
        return None;
    };
    let kind = TicketKind::ALL
        .into_iter()
        .find(|one| one.as_str() == kind)?;
    let name = unescape(name)?;
    ObjectKeys::new(KeyLayout::Lock, "", &name).check().ok()?;
    let token = match token {
        NO_TOKEN => None,
        token => Some(token.parse().ok()?),
    };
    if token.is_some() != (kind == TicketKind::Fenced) {
        return None;
    }
    let lease = Lease::new(Duration::from_millis(lease.parse().ok()?)).ok()?;
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_secret = secret.len() == SECRET_DIGITS && secret.bytes().all(is_digit);
    is_secret.then(|| Ticket {
        kind,
        name,
        token,
        lease,
        secret: secret.to_owned(),
    })
}

fn is_unescaped(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

fn unescape(name: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'~' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}
