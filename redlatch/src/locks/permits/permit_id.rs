//! The id of a permit, and a permit with its lease.

use std::fmt::{Debug, Display, Formatter, Write as _};
use std::str::FromStr;

use crate::environment::random;
use crate::error::{Error, Result};
use crate::lease::Expiry;

/// The id of one permit of an [`ExpirableSemaphore`](crate::ExpirableSemaphore): 16 random bytes,
/// written as 32 hex digits, as in Redisson.
///
/// A caller that knows it may release the permit, in any process.
///
/// ```
/// # fn main() -> redlatch::Result<()> {
/// let id: redlatch::PermitId = "00112233445566778899aabbccddeeff".parse()?;
/// assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
/// assert!("1234".parse::<redlatch::PermitId>().is_err());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PermitId([u8; PermitId::BYTES]);

/// A held permit of an expirable semaphore.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldPermit {
    /// The id with which it can be released.
    pub id: PermitId,
    /// Time until it expires unless it is renewed.
    pub remaining: Expiry,
}

impl PermitId {
    /// Length of an id in bytes.
    pub const BYTES: usize = 16;

    /// Length of an id in hex digits.
    pub(super) const DIGITS: usize = 2 * PermitId::BYTES;

    /// Returns a new random id.
    pub(super) fn random() -> PermitId {
        PermitId(random().into_bytes())
    }

    /// Returns the id with these bytes; `None` for an entry of another length, which neither this library nor
    /// Redisson has written.
    pub(crate) fn from_store(bytes: &[u8]) -> Option<PermitId> {
        bytes.try_into().ok().map(PermitId)
    }

    /// Creates the id from its bytes in the store.
    pub const fn from_bytes(bytes: [u8; PermitId::BYTES]) -> PermitId {
        PermitId(bytes)
    }

    /// Returns the bytes as they are kept in the store.
    pub const fn as_bytes(&self) -> &[u8; PermitId::BYTES] {
        &self.0
    }
}

impl FromStr for PermitId {
    type Err = Error;

    /// Parses 32 hex digits. [`Error::InvalidPermitId`] for anything else.
    fn from_str(text: &str) -> Result<PermitId> {
        let invalid = || Error::InvalidPermitId {
            id: text.chars().take(64).collect(),
        };
        let digits = text.as_bytes();
        if digits.len() != PermitId::DIGITS {
            return Err(invalid());
        }
        let digit = |byte: u8| {
            char::from(byte)
                .to_digit(16)
                .and_then(|n| u8::try_from(n).ok())
        };
        let mut bytes = [0; PermitId::BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let [high, low] = pair else {
                return Err(invalid());
            };
            let (Some(high), Some(low)) = (digit(*high), digit(*low)) else {
                return Err(invalid());
            };
            *byte = high << 4 | low;
        }
        Ok(PermitId(bytes))
    }
}

impl Display for PermitId {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Debug for PermitId {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "PermitId({self})")
    }
}

/// Concatenates ids, in the form that the scripts take.
pub(super) fn join_ids<'a>(ids: impl IntoIterator<Item = &'a PermitId>) -> String {
    ids.into_iter().fold(String::new(), |mut text, id| {
        let _ = write!(text, "{id}");
        text
    })
}

/// Splits concatenated ids, the inverse of [`join_ids`].
pub(super) fn split_ids(ids: &str) -> impl Iterator<Item = &str> {
    let text = |id| std::str::from_utf8(id).ok();
    ids.as_bytes().chunks(PermitId::DIGITS).filter_map(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permit_id_round_trips() {
        let (one, two) = (PermitId::random(), PermitId::from_bytes([0xff; 16]));
        assert_ne!(one, PermitId::random());
        assert_eq!(one.to_string().parse::<PermitId>().unwrap(), one);
        assert_eq!(
            two.to_string().to_uppercase().parse::<PermitId>().unwrap(),
            two
        );
        let text = join_ids(&[one, two]);
        let read: Vec<PermitId> = split_ids(&text).map(|id| id.parse().unwrap()).collect();
        assert_eq!(read, [one, two]);
        assert_eq!(split_ids("").count(), 0);
    }

    #[test]
    fn invalid_permit_id_is_rejected() {
        let long = "0".repeat(1000);
        for bad in [
            "",
            "1234",
            "0011223344556677 899aabbccddeeff",
            "00112233445566778899aabbccddeeff0",
            "+0112233445566778899aabbccddeeff",
            "gg112233445566778899aabbccddeeff",
            "éééééééééééééééé",
            &long,
        ] {
            let said = bad.parse::<PermitId>().unwrap_err().to_string();
            assert!(said.contains("32 hex digits"), "{said}");
            assert!(said.len() < 200, "{said}");
        }
    }
}
