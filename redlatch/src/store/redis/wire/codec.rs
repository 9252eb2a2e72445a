//! The protocol RESP, versions 2 and 3, without I/O: commands as bytes, and replies from bytes.
//!
//! A reply may arrive in any pieces. What has arrived is decoded once: a [`Decoder`] keeps the
//! lists that are not complete. It does not recurse, and it allocates nothing by a length that a
//! server only claims.

use std::borrow::Cow;
use std::fmt;

use crate::step::{Arg, ErrorReply, ScriptReply};

/// Limit of one reply in memory, in bytes. The longest that are asked for, pages of keys, have a thousandth of that.
const MAX_REPLY: usize = 128 * 1024 * 1024;

/// Limit of the elements of a list.
const MAX_ELEMENTS: usize = MAX_REPLY / size_of::<ScriptReply>();

/// Limit of a line: of an error, a number or a length.
const MAX_LINE: usize = 64 * 1024;

/// Limit of lists inside of lists. Replies of this crate's scripts and of the commands in use have
/// three.
const MAX_DEPTH: usize = 32;

/// Room for the elements of a list at the start: it may claim any number.
const INITIAL_ELEMENTS: usize = 16;

/// A command: its arguments as the protocol writes them.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Cmd {
    bytes: Vec<u8>,
    args: usize,
    /// Of a step: where the number of keys begins, the keys, and the arguments of the script.
    parts: [usize; 3],
}

impl Cmd {
    pub(in super::super) fn with_capacity(bytes: usize) -> Cmd {
        Cmd {
            bytes: Vec::with_capacity(bytes),
            ..Cmd::default()
        }
    }

    /// Creates a command with these arguments, the first of which is its name.
    pub(in super::super) fn of(args: &[&str]) -> Cmd {
        let mut cmd = Cmd::default();
        args.iter().for_each(|arg| cmd.text(arg));
        cmd
    }

    pub(in super::super) fn clear(&mut self) {
        self.bytes.clear();
        (self.args, self.parts) = (0, [0; 3]);
    }

    /// Becomes a copy of another command, in the same buffer.
    pub(super) fn copy_from(&mut self, other: &Cmd) {
        self.bytes.clear();
        self.bytes.extend_from_slice(&other.bytes);
        (self.args, self.parts) = (other.args, other.parts);
    }

    /// Returns the size of the arguments in the protocol.
    pub(in super::super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(in super::super) fn text(&mut self, text: &str) {
        write_text(&mut self.bytes, text.as_bytes());
        self.args += 1;
    }

    pub(in super::super) fn number(&mut self, number: i64) {
        let (size, is_negative) = (number.unsigned_abs(), number < 0);
        let digits = size.checked_ilog10().unwrap_or(0) as usize + 1;
        write_length(&mut self.bytes, b'$', digits + usize::from(is_negative));
        if is_negative {
            self.bytes.push(b'-');
        }
        write_digits(&mut self.bytes, size);
        self.bytes.extend_from_slice(b"\r\n");
        self.args += 1;
    }

    /// Adds the number of keys and the keys of a step, behind its script. What is added later are
    /// its arguments.
    pub(in super::super) fn keys(&mut self, keys: &[Cow<'_, str>]) {
        let numbered = self.bytes.len();
        self.number(keys.len() as i64);
        let first = self.bytes.len();
        keys.iter().for_each(|key| self.text(key));
        self.parts = [numbered, first, self.bytes.len()];
    }

    /// Adds the arguments of a step, behind its keys.
    pub(in super::super) fn args(&mut self, args: &[Arg<'_>]) {
        for arg in args {
            match arg {
                Arg::Text(text) => self.text(text),
                Arg::Number(number) => self.number(*number),
            }
        }
    }

    /// Returns the command that runs a step by the source of its script, alone: its keys are not
    /// marked.
    pub(in super::super) fn with_source(&self, source: &str) -> Cmd {
        let mut eval = Cmd::of(&["EVAL", source]);
        eval.bytes.extend_from_slice(&self.bytes[self.parts[0]..]);
        eval.args = self.args;
        eval
    }

    /// Returns the keys of a step as the protocol writes them, and its arguments.
    pub(super) fn key_and_arg_bytes(&self) -> (&[u8], &[u8]) {
        let [_, first, args] = self.parts;
        debug_assert!(first > 0, "a step whose keys are not marked");
        (&self.bytes[first..args], &self.bytes[args..])
    }

    /// Returns the first argument.
    pub(in super::super) fn name(&self) -> &str {
        let mut lines = self.bytes.split(|byte| *byte == b'\n');
        let name = lines.nth(1).and_then(|line| line.strip_suffix(b"\r"));
        std::str::from_utf8(name.unwrap_or_default()).unwrap_or_default()
    }

    pub(super) fn write_to(&self, out: &mut Vec<u8>) {
        write_header(out, self.args);
        out.extend_from_slice(&self.bytes);
    }
}

/// Writes the start of a command with this number of arguments.
pub(super) fn write_header(out: &mut Vec<u8>, args: usize) {
    write_length(out, b'*', args);
}

pub(super) fn write_text(out: &mut Vec<u8>, text: &[u8]) {
    write_length(out, b'$', text.len());
    out.extend_from_slice(text);
    out.extend_from_slice(b"\r\n");
}

fn write_length(out: &mut Vec<u8>, kind: u8, length: usize) {
    out.push(kind);
    write_digits(out, length as u64);
    out.extend_from_slice(b"\r\n");
}

/// Writes a number as text.
fn write_digits(out: &mut Vec<u8>, number: u64) {
    if number >= 10 {
        write_digits(out, number / 10);
    }
    out.push(b'0' + (number % 10) as u8);
}

/// What a server sends.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Frame {
    /// The reply to a command. It may be an error.
    Reply(ScriptReply),
    /// A message that no command asked for, or the confirmation of a subscription. Its kind is the
    /// first element.
    Push(Vec<ScriptReply>),
}

/// The server does not speak the protocol, or not as this crate understands it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Malformed {
    pub(super) what: String,
    /// Whether it was a message in the form of a reply.
    pub(in super::super) is_message: bool,
}

impl From<String> for Malformed {
    fn from(what: String) -> Malformed {
        let is_message = false;
        Malformed { what, is_message }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server sent {}", self.what)
    }
}

/// Decodes what a server sends.
#[derive(Debug, Default)]
pub(in super::super) struct Decoder {
    /// The lists that are not complete, the outermost first.
    open: Vec<OpenList>,
    /// What the current reply needs in memory so far, in bytes.
    size: usize,
}

#[derive(Debug)]
struct OpenList {
    kind: ListKind,
    elements: Vec<ScriptReply>,
    /// Number of elements that are missing.
    left: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListKind {
    List,
    Push,
    /// Describes the next reply. Not used here.
    Attribute,
}

/// What one line, with the text that it announces, means.
enum Element {
    Value(ScriptReply),
    List(ListKind, usize),
}

impl Decoder {
    /// Decodes from `bytes[*at..]` on, and moves `at` behind what was decoded. `None`: more bytes
    /// are needed.
    pub(in super::super) fn decode(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
    ) -> Result<Option<Frame>, Malformed> {
        loop {
            let rest = &bytes[*at..];
            let Some((element, length)) = element(rest)? else {
                return Ok(None);
            };
            *at += length;
            self.size += length + size_of::<ScriptReply>();
            if self.size > MAX_REPLY {
                return Err(malformed("a reply that is too large", rest));
            }
            let mut value = match element {
                Element::Value(value) => value,
                Element::List(ListKind::Attribute, 0) => continue,
                Element::List(ListKind::List, 0) => ScriptReply::List(Vec::new()),
                Element::List(kind, left) => {
                    let is_inside = !self.open.is_empty();
                    let is_misplaced = kind == ListKind::Push && (is_inside || left == 0);
                    if is_misplaced || self.open.len() == MAX_DEPTH {
                        return Err(malformed("a list in a wrong place", rest));
                    }
                    let elements = Vec::with_capacity(left.min(INITIAL_ELEMENTS));
                    self.open.push(OpenList {
                        kind,
                        elements,
                        left,
                    });
                    continue;
                }
            };
            loop {
                let Some(list) = self.open.last_mut() else {
                    self.size = 0;
                    return Ok(Some(Frame::Reply(value)));
                };
                list.elements.push(value);
                list.left -= 1;
                if list.left > 0 {
                    break;
                }
                let Some(complete) = self.open.pop() else {
                    break;
                };
                match complete.kind {
                    ListKind::List => value = ScriptReply::List(complete.elements),
                    ListKind::Push => {
                        self.size = 0;
                        return Ok(Some(Frame::Push(complete.elements)));
                    }
                    ListKind::Attribute => break,
                }
            }
        }
    }
}

/// Decodes one line, and the text that it announces. Returns it with its length in bytes. `None`:
/// more bytes are needed.
fn element(bytes: &[u8]) -> Result<Option<(Element, usize)>, Malformed> {
    let Some(&kind) = bytes.first() else {
        return Ok(None);
    };
    if !b"+-:_#,($!=*~>%|".contains(&kind) {
        return Err(malformed("something that is no reply", bytes));
    }
    let line_end = bytes.iter().take(MAX_LINE).position(|byte| *byte == b'\n');
    let Some(line_end) = line_end else {
        return match bytes.len() < MAX_LINE {
            true => Ok(None),
            false => Err(malformed("a line without an end", bytes)),
        };
    };
    let Some(line) = bytes[1..line_end].strip_suffix(b"\r") else {
        return Err(malformed("a line that does not end with CR LF", bytes));
    };
    let length = line_end + 1;
    let value = |value| Ok(Some((Element::Value(value), length)));
    match kind {
        b'+' | b',' | b'(' => value(ScriptReply::Bytes(line.to_vec())),
        b'-' => value(ScriptReply::Error(ErrorReply::new(lossy(line)))),
        b':' => match number(line) {
            Some(number) => value(ScriptReply::Integer(number)),
            None => Err(malformed("an invalid number", bytes)),
        },
        b'_' => value(ScriptReply::Nil),
        b'#' => match line {
            b"t" => value(ScriptReply::Integer(1)),
            b"f" => value(ScriptReply::Integer(0)),
            _ => Err(malformed("an invalid truth value", bytes)),
        },
        _ => {
            let (list, each, limit) = match kind {
                b'$' | b'!' | b'=' => (None, 1, MAX_REPLY),
                // The elements of a map are its names and values in turn, as in RESP2.
                b'%' => (Some(ListKind::List), 2, MAX_ELEMENTS),
                b'|' => (Some(ListKind::Attribute), 2, MAX_ELEMENTS),
                b'>' => (Some(ListKind::Push), 1, MAX_ELEMENTS),
                _ => (Some(ListKind::List), 1, MAX_ELEMENTS),
            };
            let count = match number(line) {
                // Nil in RESP2.
                Some(-1) if matches!(kind, b'$' | b'*') => return value(ScriptReply::Nil),
                count => count.and_then(|count| usize::try_from(count).ok()),
            };
            match (count.filter(|count| *count <= limit / each), list) {
                (None, _) => Err(malformed("an invalid length", bytes)),
                (Some(size), None) => text(kind, size, bytes, length),
                (Some(count), Some(list)) => Ok(Some((Element::List(list, count * each), length))),
            }
        }
    }
}

/// Decodes the text of this size behind the first line, which has `start` bytes.
fn text(
    kind: u8,
    size: usize,
    bytes: &[u8],
    start: usize,
) -> Result<Option<(Element, usize)>, Malformed> {
    let end = start + size;
    let Some(end_mark) = bytes.get(end..end + 2) else {
        return Ok(None);
    };
    if end_mark != b"\r\n" {
        return Err(malformed("a text that is longer than its length", bytes));
    }
    let text = &bytes[start..end];
    let value = match kind {
        b'!' => ScriptReply::Error(ErrorReply::new(lossy(text))),
        // `txt:` or `mkd:` before the text.
        b'=' => ScriptReply::Bytes(text.get(4..).unwrap_or_default().to_vec()),
        _ => ScriptReply::Bytes(text.to_vec()),
    };
    Ok(Some((Element::Value(value), end + 2)))
}

fn lossy(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

fn number(line: &[u8]) -> Option<i64> {
    std::str::from_utf8(line).ok()?.parse().ok()
}

/// Returns the error for bytes that cannot be decoded, with the first of them.
pub(super) fn malformed(what: &str, bytes: &[u8]) -> Malformed {
    let start = &bytes[..bytes.len().min(40)];
    let shown: Cow<'_, str> = String::from_utf8_lossy(start);
    Malformed::from(format!("{what}: {shown:?}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(cmd: &Cmd) -> String {
        let mut out = Vec::new();
        cmd.write_to(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn decode_all(bytes: &[u8]) -> Result<Vec<Frame>, Malformed> {
        let (mut decoder, mut at, mut frames) = (Decoder::default(), 0, Vec::new());
        while let Some(frame) = decoder.decode(bytes, &mut at)? {
            frames.push(frame);
        }
        Ok(frames)
    }

    #[test]
    fn commands_are_written_as_lists_of_texts() {
        let mut cmd = Cmd::of(&["GET", "ä\r\n"]);
        cmd.number(i64::MIN);
        cmd.number(0);
        let bytes = "*4\r\n$3\r\nGET\r\n$4\r\nä\r\n\r\n$20\r\n-9223372036854775808\r\n$1\r\n0\r\n";
        assert_eq!(bytes_of(&cmd), bytes);
        assert_eq!(cmd.name(), "GET");
        let mut digits = Vec::new();
        write_digits(&mut digits, u64::MAX);
        assert_eq!(digits, b"18446744073709551615");
    }

    #[test]
    fn step_can_be_sent_by_its_source() {
        let mut cmd = Cmd::of(&["EVALSHA", "sha"]);
        cmd.keys(&["k1", "k2"].map(Cow::from));
        cmd.text("arg");
        let mut eval = Cmd::of(&["EVAL", "the source"]);
        eval.keys(&["k1", "k2"].map(Cow::from));
        eval.text("arg");
        assert_eq!(bytes_of(&cmd.with_source("the source")), bytes_of(&eval));
        let (keys, args) = cmd.key_and_arg_bytes();
        assert_eq!(keys, b"$2\r\nk1\r\n$2\r\nk2\r\n");
        assert_eq!(args, b"$3\r\narg\r\n");
    }

    /// All forms of replies, of both versions of the protocol.
    const SESSION: &[u8] = b"+OK\r\n-ERR no\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n*-1\r\n_\r\n#t\r\n#f\r\n,1.5\r\n\
        (12345678901234567890\r\n!7\r\nERR bad\r\n=5\r\ntxt:x\r\n*0\r\n*2\r\n*1\r\n:1\r\n%1\r\n+a\r\n~1\r\n_\r\n\
        |1\r\n+ttl\r\n:3\r\n$0\r\n\r\n>3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n0\r\n:1\r\n";

    fn session() -> Vec<Frame> {
        use ScriptReply::{Integer, List, Nil};
        let (text, error) = (ScriptReply::from, ScriptReply::error);
        let map = List(vec![text("a"), List(vec![Nil])]);
        let replies = vec![
            text("OK"),
            error("ERR no"),
            Integer(-7),
            text("a\r\n"),
            Nil,
            Nil,
            Nil,
            Integer(1),
            Integer(0),
            text("1.5"),
            text("12345678901234567890"),
            error("ERR bad"),
            text("x"),
            List(Vec::new()),
            List(vec![List(vec![Integer(1)]), map]),
            text(""),
        ];
        let mut frames: Vec<Frame> = replies.into_iter().map(Frame::Reply).collect();
        frames.push(Frame::Push(["message", "c", "0"].map(text).into()));
        frames.push(Frame::Reply(Integer(1)));
        frames
    }

    #[test]
    fn replies_are_decoded_wherever_they_are_cut() {
        assert_eq!(decode_all(SESSION).unwrap(), session());
        for cut in 0..SESSION.len() {
            let (mut decoder, mut at, mut frames) = (Decoder::default(), 0, Vec::new());
            for end in [cut, SESSION.len()] {
                while let Some(frame) = decoder.decode(&SESSION[..end], &mut at).unwrap() {
                    frames.push(frame);
                }
            }
            assert_eq!(frames, session(), "cut at {cut}");
        }
        // One byte at a time, as a buffer from which what was decoded is removed.
        let (mut decoder, mut buffer, mut frames) = (Decoder::default(), Vec::new(), Vec::new());
        for byte in SESSION {
            buffer.push(*byte);
            let mut at = 0;
            while let Some(frame) = decoder.decode(&buffer, &mut at).unwrap() {
                frames.push(frame);
            }
            buffer.drain(..at);
        }
        assert_eq!(frames, session());
    }

    #[test]
    fn malformed_replies_are_named() {
        let nested = "*1\r\n".repeat(10_000);
        let endless = format!("+{}", "x".repeat(MAX_LINE));
        for (bytes, named) in [
            (
                "HTTP/1.1 400",
                "something that is no reply: \"HTTP/1.1 400\"",
            ),
            (":x\r\n", "an invalid number"),
            ("$x\r\n", "an invalid length"),
            ("$-2\r\n", "an invalid length"),
            ("$1152921504606846976\r\n", "an invalid length"),
            ("*1152921504606846976\r\n", "an invalid length"),
            ("%9223372036854775807\r\n", "an invalid length"),
            ("%-1\r\n", "an invalid length"),
            ("#x\r\n", "an invalid truth value"),
            ("+a\n", "does not end with CR LF"),
            ("$1\r\nab\r\n", "longer than its length"),
            ("*1\r\n>1\r\n+a\r\n", "a list in a wrong place"),
            (">0\r\n", "a list in a wrong place"),
            (&nested, "a list in a wrong place"),
            (&endless, "a line without an end"),
        ] {
            let error = decode_all(bytes.as_bytes()).unwrap_err();
            let said = error.to_string();
            assert!(said.contains(named), "{bytes:.40}: {said}");
        }
    }

    /// The elements never come.
    #[test]
    fn claimed_lengths_allocate_nothing() {
        let mut decoder = Decoder::default();
        let bytes = b"*1000000\r\n:1\r\n$100000000\r\nabc";
        assert_eq!(decoder.decode(bytes, &mut 0), Ok(None));
        let [open] = &*decoder.open else {
            panic!("one list is open");
        };
        assert!(open.elements.capacity() <= INITIAL_ELEMENTS);
    }

    #[test]
    fn size_of_a_reply_is_limited() {
        let many = "*1000000\r\n".to_owned() + &"*1\r\n:1\r\n".repeat(1_000_000);
        assert_eq!(decode_all(many.as_bytes()).unwrap().len(), 1);
        // Each reply has its own limit.
        assert_eq!(decode_all(many.repeat(3).as_bytes()).unwrap().len(), 3);
        let nested = "*3\r\n".to_owned() + &many.repeat(3);
        let error = decode_all(nested.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("a reply that is too large"), "{error}");
        let text = format!("${MAX_REPLY}\r\n{}\r\n", "x".repeat(MAX_REPLY));
        let error = decode_all(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("a reply that is too large"), "{error}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in "[-+:$*>%~|!=#_,(0-9a\r\n]{0,60}") {
            let _ = decode_all(bytes.as_bytes());
        }
    }
}
