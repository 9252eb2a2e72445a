//! The protocol: parses commands, and writes replies in RESP2 or RESP3.

use std::fmt;
use std::io::Write as _;

/// Keys, values and channels are bytes, not text.
pub(super) type Bytes = Vec<u8>;

/// The greatest length that a client may announce; a greater one is an error of the client or of the simulation.
const MAX_LENGTH: usize = 64 << 20;

/// The versions of the protocol, which HELLO chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

/// The reply to a command.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Reply {
    Status(String),
    /// Without the leading `-`.
    Error(String),
    Int(i64),
    Bulk(Bytes),
    /// A text, such as that of INFO.
    Verbatim(String),
    Nil,
    Double(f64),
    Array(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
    /// Members of a sorted set with their scores.
    Scored(Vec<(Bytes, f64)>),
    /// The answer has been sent already, or is sent later.
    Sent,
}

impl Reply {
    pub(super) fn ok() -> Reply {
        Reply::Status("OK".into())
    }

    pub(super) fn text(text: impl Into<String>) -> Reply {
        Reply::Bulk(text.into().into_bytes())
    }

    pub(super) fn bulks(all: impl IntoIterator<Item = Bytes>) -> Reply {
        Reply::Array(all.into_iter().map(Reply::Bulk).collect())
    }

    /// A count of elements.
    pub(super) fn count(count: usize) -> Reply {
        Reply::Int(i64::try_from(count).unwrap_or(i64::MAX))
    }

    /// Appends the encoded reply.
    pub(super) fn write(&self, protocol: Protocol, out: &mut Bytes) {
        let newer = protocol == Protocol::Resp3;
        match self {
            Reply::Status(text) => line(out, '+', text),
            Reply::Error(text) => line(out, '-', text),
            Reply::Int(number) => line(out, ':', number),
            Reply::Bulk(bytes) => bulk(out, bytes),
            Reply::Verbatim(text) if newer => {
                line(out, '=', text.len() + 4);
                out.extend_from_slice(b"txt:");
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(b"\r\n");
            }
            Reply::Verbatim(text) => bulk(out, text.as_bytes()),
            Reply::Nil if newer => out.extend_from_slice(b"_\r\n"),
            Reply::Nil => out.extend_from_slice(b"$-1\r\n"),
            Reply::Double(number) if newer => line(out, ',', decimal(*number)),
            Reply::Double(number) => bulk(out, decimal(*number).as_bytes()),
            Reply::Array(all) => {
                line(out, '*', all.len());
                all.iter().for_each(|one| one.write(protocol, out));
            }
            Reply::Map(pairs) => {
                match newer {
                    true => line(out, '%', pairs.len()),
                    false => line(out, '*', pairs.len() * 2),
                }
                for (name, value) in pairs {
                    name.write(protocol, out);
                    value.write(protocol, out);
                }
            }
            Reply::Scored(pairs) => {
                line(out, '*', pairs.len() * if newer { 1 } else { 2 });
                for (member, score) in pairs {
                    if newer {
                        line(out, '*', 2);
                    }
                    bulk(out, member);
                    Reply::Double(*score).write(protocol, out);
                }
            }
            Reply::Sent => {}
        }
    }
}

/// Appends a message that is no answer to a command.
pub(super) fn write_push(protocol: Protocol, parts: &[Reply], out: &mut Bytes) {
    let mark = if protocol == Protocol::Resp3 {
        '>'
    } else {
        '*'
    };
    line(out, mark, parts.len());
    parts.iter().for_each(|part| part.write(protocol, out));
}

fn line(out: &mut Bytes, mark: char, rest: impl fmt::Display) {
    // Writing to memory does not fail.
    let _ = write!(out, "{mark}{rest}\r\n");
}

fn bulk(out: &mut Bytes, bytes: &[u8]) {
    line(out, '$', bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Integers below this are printed without an exponent.
const EXACT: f64 = 1e15;

/// Formats a number like C's `%.17g`: the form of scores, and of numbers that scripts pass on.
pub(super) fn decimal(number: f64) -> String {
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    #[allow(
        clippy::cast_possible_truncation,
        reason = "an integer below the limit"
    )]
    if number.fract() == 0.0 && number.abs() < EXACT {
        return match number as i64 {
            0 if number.is_sign_negative() => "-0".into(),
            number => number.to_string(),
        };
    }
    let scientific = format!("{number:.16e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trimmed = |digits: &str| match digits.contains('.') {
        true => digits
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_owned(),
        false => digits.to_owned(),
    };
    match exponent {
        -4..17 => {
            let places = usize::try_from(16 - exponent).unwrap_or(0);
            trimmed(&format!("{number:.places$}"))
        }
        _ => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{}e{sign}{:02}", trimmed(digits), exponent.abs())
        }
    }
}

/// Parses the first command in the buffer. Returns it and its length in bytes; `None` if it is incomplete.
///
/// # Errors
///
/// The error that a server sends before it closes a connection that violates the protocol.
pub(super) fn parse(buffer: &[u8]) -> Result<Option<(Vec<Bytes>, usize)>, String> {
    let mut rest = Unparsed { buffer, at: 0 };
    let Some(count) = rest.header(b'*')? else {
        return Ok(None);
    };
    let mut args = Vec::with_capacity(count.min(1024));
    for _ in 0..count {
        let Some(length) = rest.header(b'$')? else {
            return Ok(None);
        };
        let end = rest.at + length;
        let Some(arg) = buffer.get(rest.at..end) else {
            return Ok(None);
        };
        if buffer.len() < end + 2 {
            return Ok(None);
        }
        args.push(arg.to_vec());
        rest.at = end + 2;
    }
    Ok(Some((args, rest.at)))
}

/// The part of the buffer that is not parsed yet.
struct Unparsed<'a> {
    buffer: &'a [u8],
    at: usize,
}

impl Unparsed<'_> {
    /// Parses a line with a mark and a length.
    fn header(&mut self, mark: u8) -> Result<Option<usize>, String> {
        let rest = &self.buffer[self.at..];
        match rest.first() {
            None => return Ok(None),
            Some(first) if *first != mark => {
                let (mark, first) = (char::from(mark), char::from(*first));
                return Err(format!(
                    "ERR Protocol error: expected '{mark}', got '{first}'"
                ));
            }
            Some(_) => {}
        }
        let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else {
            return Ok(None);
        };
        let number = std::str::from_utf8(&rest[1..end]).ok();
        let length = number.and_then(|number| number.parse().ok());
        let length = length.filter(|&length| length <= MAX_LENGTH);
        self.at += end + 2;
        let invalid = || "ERR Protocol error: invalid bulk length".to_owned();
        length.map(Some).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_parsed_once_it_is_complete() {
        let sent = b"*2\r\n$3\r\nGET\r\n$2\r\na\n\r\n*1\r\n";
        let whole = 4 + 9 + 8;
        for end in 0..whole {
            assert_eq!(parse(&sent[..end]), Ok(None), "{end} bytes");
        }
        let command = vec![b"GET".to_vec(), b"a\n".to_vec()];
        assert_eq!(parse(sent), Ok(Some((command, whole))));
        assert!(parse(b"GET a\r\n").is_err());
        assert!(parse(b"*1\r\n$x\r\n").is_err());
    }

    #[test]
    fn numbers_are_written_as_c_does() {
        let forms = [
            (0.0, "0"),
            (-0.0, "-0"),
            (-3.0, "-3"),
            (1.5, "1.5"),
            (0.1, "0.10000000000000001"),
            (1_700_000_000_123.0, "1700000000123"),
            (1e17, "1e+17"),
            (1e16, "10000000000000000"),
            (1.5e-7, "1.4999999999999999e-07"),
            (922_337_203_685_477.0, "922337203685477"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (number, form) in forms {
            assert_eq!(decimal(number), form);
        }
    }
}
