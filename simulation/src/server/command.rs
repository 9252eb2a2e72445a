//! What a command is: its call, its reply or refusal, and its properties.

use super::connection::ConnectionId;
use super::keyspace::WrongType;
use super::resp::{Bytes, Reply};
use super::script::Interpreter;
use super::state::State;

/// Why a command has no ordinary reply.
#[derive(Debug)]
pub(super) enum CommandError {
    /// The server refuses it with this text.
    Refused(String),
    /// The simulation does not know it.
    Unsupported(String),
}

pub(super) type CommandResult = Result<Reply, CommandError>;

impl From<WrongType> for CommandError {
    fn from(_: WrongType) -> CommandError {
        refused("WRONGTYPE Operation against a key holding the wrong kind of value")
    }
}

pub(super) fn refused(text: impl Into<String>) -> CommandError {
    CommandError::Refused(text.into())
}

pub(super) fn unsupported(what: impl Into<String>) -> CommandError {
    CommandError::Unsupported(what.into())
}

/// A running command.
pub(super) struct Call<'a> {
    pub(super) state: &'a mut State,
    pub(super) from: ConnectionId,
    /// All arguments, the command's name first.
    pub(super) args: &'a [Bytes],
    /// `None` within a script.
    pub(super) interpreter: Option<&'a mut Interpreter>,
}

/// Which arguments are keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keys {
    None,
    First,
    All,
    /// The second argument is their number; they follow it.
    Counted,
}

/// Which arguments are channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChannelArgs {
    None,
    First,
    All,
    Patterns,
}

/// A command of the table.
#[derive(Clone, Copy)]
pub(super) struct CommandSpec {
    pub(super) name: &'static str,
    /// The number of arguments with the name; negative: at least as many.
    pub(super) arity: isize,
    pub(super) keys: Keys,
    pub(super) channels: ChannelArgs,
    /// Channels that belong to the slot of their name.
    pub(super) sharded: bool,
    pub(super) writes: bool,
    /// Refused when no memory is left.
    pub(super) grows: bool,
    pub(super) in_scripts: bool,
    /// Allowed before a login.
    pub(super) before_login: bool,
    pub(super) in_sentinels: bool,
    /// Allowed on a RESP2 connection with subscriptions.
    pub(super) in_subscriptions: bool,
    pub(super) run: fn(&mut Call<'_>) -> CommandResult,
}

impl CommandSpec {
    /// Returns whether it takes this number of arguments, with the name.
    pub(super) fn takes(&self, args: usize) -> bool {
        match usize::try_from(self.arity) {
            Ok(arity) => args == arity,
            Err(_) => args >= self.arity.unsigned_abs(),
        }
    }

    /// Returns the keys among the arguments.
    pub(super) fn keys<'a>(&self, args: &'a [Bytes]) -> &'a [Bytes] {
        match self.keys {
            Keys::None => &[],
            Keys::First => &args[1..2],
            Keys::All => &args[1..],
            Keys::Counted => {
                let count = args.get(2).and_then(|count| integer(count));
                let count = count.and_then(|count| usize::try_from(count).ok());
                let end = count.and_then(|count| count.checked_add(3));
                end.and_then(|end| args.get(3..end)).unwrap_or(&[])
            }
        }
    }

    /// Returns its name, with the subcommand if it has any.
    pub(super) fn full_name(&self, args: &[Bytes]) -> String {
        match (self.name, args.get(1)) {
            ("CLIENT" | "CLUSTER" | "CONFIG" | "PUBSUB" | "SCRIPT" | "SENTINEL", Some(sub)) => {
                let sub = String::from_utf8_lossy(sub).to_ascii_uppercase();
                format!("{}|{sub}", self.name)
            }
            _ => self.name.to_owned(),
        }
    }

    /// Returns whether it reads keys itself, unlike the commands that run scripts.
    pub(super) fn reads_a_key(&self) -> bool {
        matches!(self.keys, Keys::First | Keys::All)
    }

    /// Returns whether the channels are patterns.
    pub(super) fn subscribes_to_patterns(&self) -> bool {
        self.channels == ChannelArgs::Patterns
    }

    /// Returns the channels or channel patterns among the arguments.
    pub(super) fn channels<'a>(&self, args: &'a [Bytes]) -> &'a [Bytes] {
        match self.channels {
            ChannelArgs::None => &[],
            ChannelArgs::First => &args[1..2],
            ChannelArgs::All | ChannelArgs::Patterns => &args[1..],
        }
    }
}

impl Call<'_> {
    /// Returns the argument at this position; the table guarantees the minimum number.
    pub(super) fn arg(&self, at: usize) -> &[u8] {
        self.args.get(at).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn integer(&self, at: usize) -> Result<i64, CommandError> {
        let refusal = || refused("ERR value is not an integer or out of range");
        integer(self.arg(at)).ok_or_else(refusal)
    }

    /// Returns an argument that is a word, in capital letters.
    pub(super) fn word(&self, at: usize) -> String {
        String::from_utf8_lossy(self.arg(at)).to_ascii_uppercase()
    }

    /// Returns the error for an option or subcommand that the simulation does not support.
    pub(super) fn unsupported(&self) -> CommandError {
        unsupported(shown(self.args))
    }

    /// Returns the error for a subcommand with too few or too many arguments.
    pub(super) fn wrong_arity(&self) -> CommandError {
        let (command, sub) = (
            self.word(0).to_ascii_lowercase(),
            self.word(1).to_ascii_lowercase(),
        );
        refused(format!(
            "ERR wrong number of arguments for '{command}|{sub}' command"
        ))
    }
}

/// Parses an integer as Redis does: no sign but a minus, no leading zeros.
pub(super) fn integer(text: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?;
    let number: i64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Formats a command for an error message.
pub(super) fn shown(args: &[Bytes]) -> String {
    let shown = args.iter().map(|arg| match arg.len() {
        0..=100 => format!("{:?}", String::from_utf8_lossy(arg)),
        length => format!("({length} bytes)"),
    });
    format!("the command {}", shown.collect::<Vec<_>>().join(" "))
}
