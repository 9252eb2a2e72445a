//! A value of a group, as Redisson names it in the group's hash.

use std::fmt::{Debug, Display, Formatter};

use super::highway_hash::hash128;

/// A value of a group of locks: see [`Client::group_lock`](crate::Client::group_lock).
///
/// Redisson names a value by a hash of the bytes to which its codec encodes it. So the same value is
/// a different one for clients with different codecs. The conversions `From` text and numbers give
/// the bytes of `Kryo5Codec`, which is Redisson's default, for a `String`, a `Long` (`i64`) and an
/// `Integer` (`i32`); in Java too, these are three different values. For any other codec or type
/// pass the bytes: [`GroupValue::from_encoded`].
///
/// ```
/// # fn main() {
/// use redlatch::GroupValue;
///
/// assert_ne!(GroupValue::from("1"), GroupValue::from(1));
/// // Redisson with `StringCodec`:
/// assert_ne!(GroupValue::from_encoded("1"), GroupValue::from("1"));
/// # }
/// ```
#[derive(Clone)]
pub struct GroupValue {
    /// The field of the group's hash.
    field: Box<str>,
    /// The value, for people.
    shown: Box<str>,
}

/// The numbers by which `Kryo5Codec` names these types.
const INTEGER: u8 = 2;
const STRING: u8 = 3;
const LONG: u8 = 9;

/// Flag of the first byte of a text with a length, and of the last byte of a text without a length.
const FLAG: u8 = 0x80;

/// The longest text without a length.
const MAX_UNCOUNTED: usize = 32;

impl GroupValue {
    /// Creates the value that Redisson's codec encodes to these bytes. With `StringCodec` these are the
    /// bytes of the text in UTF-8, with a JSON codec those of its JSON.
    pub fn from_encoded(bytes: impl AsRef<[u8]>) -> GroupValue {
        let field = field_of(bytes.as_ref());
        GroupValue {
            shown: field.clone(),
            field,
        }
    }

    fn new(shown: &str, encoded: &[u8]) -> GroupValue {
        GroupValue {
            field: field_of(encoded),
            shown: shown.into(),
        }
    }

    /// Returns the field of the group's hash that belongs to this value.
    pub(crate) fn field(&self) -> &str {
        &self.field
    }
}

impl From<&str> for GroupValue {
    fn from(text: &str) -> GroupValue {
        let mut encoded = vec![STRING];
        match text.as_bytes() {
            [start @ .., last] if (1..MAX_UNCOUNTED).contains(&start.len()) && text.is_ascii() => {
                encoded.extend(start);
                encoded.push(last | FLAG);
            }
            _ => {
                let units: Vec<u16> = text.encode_utf16().collect();
                push_length(&mut encoded, units.len() + 1);
                units
                    .into_iter()
                    .for_each(|unit| push_unit(&mut encoded, unit));
            }
        }
        GroupValue::new(text, &encoded)
    }
}

impl From<String> for GroupValue {
    fn from(text: String) -> GroupValue {
        text.as_str().into()
    }
}

impl From<&String> for GroupValue {
    fn from(text: &String) -> GroupValue {
        text.as_str().into()
    }
}

impl From<i32> for GroupValue {
    fn from(number: i32) -> GroupValue {
        let mut encoded = vec![INTEGER];
        let zigzag = (number << 1) ^ (number >> 31);
        push_number(&mut encoded, zigzag.cast_unsigned().into());
        GroupValue::new(&number.to_string(), &encoded)
    }
}

impl From<i64> for GroupValue {
    fn from(number: i64) -> GroupValue {
        let mut encoded = vec![LONG];
        let zigzag = (number << 1) ^ (number >> 63);
        push_number(&mut encoded, zigzag.cast_unsigned());
        GroupValue::new(&number.to_string(), &encoded)
    }
}

/// Values are equal if Redisson names them alike.
impl PartialEq for GroupValue {
    fn eq(&self, other: &GroupValue) -> bool {
        self.field == other.field
    }
}

impl Eq for GroupValue {}

impl Display for GroupValue {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.shown)
    }
}

impl Debug for GroupValue {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "GroupValue({:?})", self.shown)
    }
}

/// Appends a number, seven bits in each byte, the lowest first. The ninth byte contains all bits that are left.
fn push_number(encoded: &mut Vec<u8>, mut number: u64) {
    let low = |number: u64| (number & 0x7f) as u8;
    for _ in 0..8 {
        if number < 0x80 {
            break;
        }
        encoded.push(low(number) | 0x80);
        number >>= 7;
    }
    encoded.push(number as u8);
}

/// Appends the length of a text plus one: the first byte contains six bits.
fn push_length(encoded: &mut Vec<u8>, length: usize) {
    let low = (length & 0x3f) as u8 | FLAG;
    match length >> 6 {
        0 => encoded.push(low),
        rest => {
            encoded.push(low | 0x40);
            push_number(encoded, rest as u64);
        }
    }
}

/// Appends a UTF-16 code unit in the form of UTF-8. So a character of two units takes six bytes.
fn push_unit(encoded: &mut Vec<u8>, unit: u16) {
    let following = |bits: u16| 0x80 | (bits & 0x3f) as u8;
    match unit {
        0..0x80 => encoded.push(unit as u8),
        0x80..0x800 => encoded.extend([0xc0 | (unit >> 6) as u8, following(unit)]),
        _ => encoded.extend([
            0xe0 | (unit >> 12) as u8,
            following(unit >> 6),
            following(unit),
        ]),
    }
}

/// Returns the hash in Base64, without padding.
fn field_of(encoded: &[u8]) -> Box<str> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let hash = u128::from_be_bytes(hash128(encoded));
    // 22 digits of six bits; the last one contains two bits of the hash.
    let digit = |n: u32| {
        let at = 128 - 6 * n as i32 - 6;
        let bits = if at < 0 { hash << -at } else { hash >> at };
        char::from(DIGITS[(bits & 0x3f) as usize])
    };
    (0..22).map(digit).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields were computed by Redisson 4.7.0, with `Kryo5Codec` and with `StringCodec`.
    #[test]
    fn fields_match_redisson() {
        let text = |n: usize, letter: &str| letter.repeat(n);
        for (value, kryo, string) in [
            (
                "a".to_owned(),
                "Jon6GCcO+0QSJkhre5wXYA",
                "qwvAS12pR0CgRitaypEjUw",
            ),
            (
                String::new(),
                "8kZ0F42HzoQfW3jDxQ6f4g",
                "t6rZwibGo2uy1OSmNVe8pg",
            ),
            (
                "ab".to_owned(),
                "iFSOY3KcP2BLEBRRjSOm8w",
                "qIx8Ray65QDI9s9SyboNig",
            ),
            (
                "é".to_owned(),
                "TfKmvqzzRix6DTrWfCmgqA",
                "spgDxOb77/OO0mYEcmfOBQ",
            ),
            (
                "😀".to_owned(),
                "x8RNEAwQ8KZSMhraJs6dXA",
                "BFYDo74PGvb6OkPcvcLRhw",
            ),
            (
                text(31, "x"),
                "BzTMKSuziXWGj9li2P2Lsg",
                "1omFCAk+GBQpap37/rKLeQ",
            ),
            (
                text(32, "x"),
                "0UUk8uVNEOXl9hsMj/fNEQ",
                "oog9enxT89k7nsZ/uTkmfw",
            ),
            (
                text(33, "x"),
                "eJfv05+bxLxhUVWN6o5g5Q",
                "cJuuy+d4tHkkrsjaNAk7Bw",
            ),
            (
                text(70, "x"),
                "aq5g5KMb0evwG7mQZuRjtw",
                "TbA3Y3PWA0kIJH5pChdaGg",
            ),
            ("a\0b".to_owned(), "m8v7/4jDHicWj+DTbiRS/w", ""),
            (text(9000, "x"), "dXxeybBP0bSRMY086pxRjw", ""),
            (
                text(40, "é"),
                "oIfumCiYZ57xYtE7ivHFCQ",
                "gpRw7qDPOpRJjE4U+hXifA",
            ),
        ] {
            assert_eq!(GroupValue::from(&value).field(), kryo, "{value}");
            let encoded = GroupValue::from_encoded(&value);
            assert!(string.is_empty() || encoded.field() == string, "{value}");
        }
        for (number, field) in [
            (5i64, "IMGxE6/yprGpC9xW/VX2/Q"),
            (-7, "pEUxx4gAGwkWPxKf1mG+kQ"),
            (i64::MAX, "oHmWFzLkUeNAtvvz0oDfqw"),
            (i64::MIN, "8wAGzfg3roSo3NdLNkzw7w"),
            (1 << 40, "CWfHLs90hnG/fGpULLZd5A"),
        ] {
            assert_eq!(GroupValue::from(number).field(), field, "{number}");
        }
        for (number, field) in [
            (5i32, "z+mXvHxiSxQPtHYfzr4BdQ"),
            (-7, "V2Y7uorS4IviNUOgYRDQrA"),
            (i32::MIN, "R1kKuDeBmc0eqIAvhdu5Tw"),
            (300, "tkePp8q6EwlXVe1QFcmxwQ"),
        ] {
            assert_eq!(GroupValue::from(number).field(), field, "{number}");
        }
    }
}
