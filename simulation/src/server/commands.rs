//! All commands in one table, and the checks before a command runs.
//!
//! The order of the checks is that of Redis: arity, login, permissions, slots, then whether the server may
//! write now. Scripts go through the same table with checks of their own.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::auth::Denied;
use super::connection::{self, ConnectionId};
use super::keyspace::WrongType;
use super::resp::{Bytes, Reply};
use super::script::{self, Interpreter};
use super::{
    Refusal, State, Unsupported, cluster, hashes, info, keys, lists, pubsub, replication, sentinel,
    sorted_sets, strings,
};

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
    arity: isize,
    keys: Keys,
    channels: ChannelArgs,
    /// Channels that belong to the slot of their name.
    pub(super) sharded: bool,
    pub(super) writes: bool,
    /// Refused when no memory is left.
    grows: bool,
    in_scripts: bool,
    /// Allowed before a login.
    before_login: bool,
    in_sentinels: bool,
    run: fn(&mut Call<'_>) -> CommandResult,
}

const fn spec(
    name: &'static str,
    arity: isize,
    run: fn(&mut Call<'_>) -> CommandResult,
) -> CommandSpec {
    CommandSpec {
        name,
        arity,
        keys: Keys::None,
        channels: ChannelArgs::None,
        sharded: false,
        writes: false,
        grows: false,
        in_scripts: true,
        before_login: false,
        in_sentinels: false,
        run,
    }
}

const fn read(
    name: &'static str,
    arity: isize,
    run: fn(&mut Call<'_>) -> CommandResult,
) -> CommandSpec {
    CommandSpec {
        keys: Keys::First,
        ..spec(name, arity, run)
    }
}

/// Creates a command that writes, but needs no additional memory.
const fn shrink(
    name: &'static str,
    arity: isize,
    run: fn(&mut Call<'_>) -> CommandResult,
) -> CommandSpec {
    CommandSpec {
        writes: true,
        ..read(name, arity, run)
    }
}

const fn write(
    name: &'static str,
    arity: isize,
    run: fn(&mut Call<'_>) -> CommandResult,
) -> CommandSpec {
    CommandSpec {
        grows: true,
        ..shrink(name, arity, run)
    }
}

/// Creates a command that scripts cannot call.
const fn client(
    name: &'static str,
    arity: isize,
    run: fn(&mut Call<'_>) -> CommandResult,
) -> CommandSpec {
    CommandSpec {
        in_scripts: false,
        ..spec(name, arity, run)
    }
}

const fn all_keys(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        keys: Keys::All,
        ..spec
    }
}

const fn counted_keys(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        keys: Keys::Counted,
        ..spec
    }
}

const fn before_login(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        before_login: true,
        ..spec
    }
}

/// Marks a command that Sentinels support, too.
const fn in_sentinels(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        in_sentinels: true,
        ..spec
    }
}

const fn channels(channels: ChannelArgs, spec: CommandSpec) -> CommandSpec {
    CommandSpec { channels, ..spec }
}

const fn sharded(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        sharded: true,
        ..spec
    }
}

use ChannelArgs::{All, First, Patterns};

const TABLE: &[CommandSpec] = &[
    in_sentinels(before_login(client("HELLO", -1, connection::hello))),
    in_sentinels(before_login(client("AUTH", -2, connection::auth))),
    in_sentinels(before_login(client("QUIT", -1, connection::quit))),
    in_sentinels(client("SENTINEL", -2, sentinel::sentinel)),
    client("ASKING", 1, cluster::asking),
    client("CLUSTER", -2, cluster::cluster),
    in_sentinels(client("CLIENT", -2, connection::client)),
    spec("SELECT", 2, connection::select),
    in_sentinels(spec("PING", -1, connection::ping)),
    spec("ECHO", 2, connection::echo),
    spec("TIME", 1, info::time),
    in_sentinels(client("INFO", -1, info::info)),
    client("CONFIG", -2, info::config),
    client("ROLE", 1, replication::role),
    client("WAIT", 3, replication::wait),
    read("TYPE", 2, keys::type_of),
    all_keys(read("EXISTS", -2, keys::exists)),
    read("TTL", 2, keys::ttl),
    read("PTTL", 2, keys::pttl),
    read("PEXPIRETIME", 2, keys::pexpiretime),
    shrink("EXPIRE", -3, keys::expire),
    shrink("PEXPIRE", -3, keys::pexpire),
    shrink("EXPIREAT", -3, keys::expireat),
    shrink("PEXPIREAT", -3, keys::pexpireat),
    shrink("PERSIST", 2, keys::persist),
    all_keys(shrink("DEL", -2, keys::del)),
    all_keys(shrink("UNLINK", -2, keys::del)),
    spec("KEYS", 2, keys::keys),
    spec("SCAN", -2, keys::scan),
    spec("DBSIZE", 1, keys::dbsize),
    no_keys(shrink("FLUSHALL", -1, keys::flush)),
    no_keys(shrink("FLUSHDB", -1, keys::flush)),
    read("GET", 2, strings::get),
    read("GETRANGE", 4, strings::getrange),
    read("STRLEN", 2, strings::strlen),
    write("SET", -3, strings::set),
    write("INCR", 2, strings::incr),
    write("DECR", 2, strings::decr),
    write("INCRBY", 3, strings::incrby),
    write("DECRBY", 3, strings::decrby),
    read("HGET", 3, hashes::hget),
    read("HMGET", -3, hashes::hmget),
    read("HGETALL", 2, hashes::hgetall),
    read("HKEYS", 2, hashes::hkeys),
    read("HVALS", 2, hashes::hvals),
    read("HLEN", 2, hashes::hlen),
    read("HEXISTS", 3, hashes::hexists),
    write("HSET", -4, hashes::hset),
    write("HINCRBY", 4, hashes::hincrby),
    shrink("HDEL", -3, hashes::hdel),
    read("LLEN", 2, lists::llen),
    read("LRANGE", 4, lists::lrange),
    read("LINDEX", 3, lists::lindex),
    read("LPOS", -3, lists::lpos),
    write("LPUSH", -3, lists::lpush),
    write("RPUSH", -3, lists::rpush),
    shrink("LPOP", -2, lists::lpop),
    shrink("RPOP", -2, lists::rpop),
    shrink("LREM", 4, lists::lrem),
    read("ZCARD", 2, sorted_sets::zcard),
    read("ZSCORE", 3, sorted_sets::zscore),
    read("ZCOUNT", 4, sorted_sets::zcount),
    read("ZRANGE", -4, sorted_sets::zrange),
    read("ZREVRANGE", -4, sorted_sets::zrevrange),
    write("ZADD", -4, sorted_sets::zadd),
    write("ZINCRBY", 4, sorted_sets::zincrby),
    shrink("ZREM", -3, sorted_sets::zrem),
    shrink("ZREMRANGEBYRANK", 4, sorted_sets::zremrangebyrank),
    shrink("ZREMRANGEBYSCORE", 4, sorted_sets::zremrangebyscore),
    counted_keys(client("EVAL", -3, script::eval)),
    counted_keys(client("EVALSHA", -3, script::evalsha)),
    client("SCRIPT", -2, script::script),
    in_sentinels(channels(All, client("SUBSCRIBE", -2, pubsub::subscribe))),
    in_sentinels(client("UNSUBSCRIBE", -1, pubsub::unsubscribe)),
    channels(Patterns, client("PSUBSCRIBE", -2, pubsub::psubscribe)),
    client("PUNSUBSCRIBE", -1, pubsub::punsubscribe),
    sharded(channels(All, client("SSUBSCRIBE", -2, pubsub::ssubscribe))),
    sharded(client("SUNSUBSCRIBE", -1, pubsub::sunsubscribe)),
    channels(First, spec("PUBLISH", 3, pubsub::publish)),
    sharded(channels(First, spec("SPUBLISH", 3, pubsub::spublish))),
    spec("PUBSUB", -2, pubsub::pubsub),
];

const fn no_keys(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        keys: Keys::None,
        ..spec
    }
}

impl CommandSpec {
    fn find(name: &[u8]) -> Option<&'static CommandSpec> {
        static BY_NAME: LazyLock<BTreeMap<&[u8], &CommandSpec>> =
            LazyLock::new(|| TABLE.iter().map(|it| (it.name.as_bytes(), it)).collect());
        // Scripts write them in capital letters.
        BY_NAME.get(name).copied().or_else(|| {
            let name = name.to_ascii_uppercase();
            BY_NAME.get(name.as_slice()).copied()
        })
    }

    fn takes(&self, args: usize) -> bool {
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

/// Runs a client's command, and sends the answer.
pub(super) fn run(
    state: &mut State,
    interpreter: &mut Interpreter,
    from: ConnectionId,
    args: &[Bytes],
) -> Result<(), Unsupported> {
    if args.is_empty() {
        return Ok(());
    }
    let call = Call {
        state,
        from,
        args,
        interpreter: Some(interpreter),
    };
    let reply = match call.check_and_run() {
        Ok(reply) => reply,
        Err(CommandError::Refused(text)) => Reply::Error(text),
        Err(CommandError::Unsupported(what)) => return Err(Unsupported(what)),
    };
    // The reply comes before what it changes for its own connection.
    state.send(from, &reply);
    state.record_changes(Some(from));
    state.end_caching(from, &args[0]);
    state.close_if_requested(from);
    Ok(())
}

/// Runs a command that a script calls.
pub(super) fn run_in_script(
    state: &mut State,
    from: ConnectionId,
    args: &[Bytes],
    has_written: &mut bool,
) -> CommandResult {
    let name = args.first().map(Vec::as_slice).unwrap_or_default();
    let spec = CommandSpec::find(name).ok_or_else(|| unsupported(shown(args)))?;
    if !spec.takes(args.len()) {
        return Err(refused(
            "ERR Wrong number of args calling Redis command from script",
        ));
    }
    if !spec.in_scripts {
        return Err(refused("ERR This Redis command is not allowed from script"));
    }
    if let Err(denied) = state.permits(from, spec, args) {
        return Err(refused(match denied {
            Denied::Command => {
                "ERR The user executing the script can't run this command or subcommand"
            }
            Denied::Key => {
                "ERR The user executing the script can't access at least one of the keys mentioned in the command arguments"
            }
            Denied::Channel => {
                "ERR The user executing the script can't publish to the channel mentioned in the command"
            }
        }));
    }
    // Whether a script may use more memory is decided before its first write.
    let growth_is_allowed = *has_written;
    if spec.writes {
        state.check_writable()?;
        *has_written = true;
    }
    if spec.grows && !growth_is_allowed {
        state.check_memory()?;
    }
    state.check_slots_in_script(spec, args)?;
    let answer = (spec.run)(&mut Call {
        state,
        from,
        args,
        interpreter: None,
    });
    state.record_read(from, spec, args);
    answer
}

impl State {
    /// Checks whether this server may write now.
    fn check_writable(&self) -> Result<(), CommandError> {
        if self.keys.is_replica {
            return Err(refused(
                "READONLY You can't write against a read only replica.",
            ));
        }
        match self.refusal {
            Some(Refusal::TooFewReplicas) => {
                Err(refused("NOREPLICAS Not enough good replicas to write."))
            }
            Some(Refusal::DiskError) => Err(refused(
                "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk. \
                 Commands that may modify the data set are disabled, because this instance is configured to report \
                 errors during writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check \
                 the Redis logs for details about the RDB error.",
            )),
            _ => Ok(()),
        }
    }

    fn check_memory(&self) -> Result<(), CommandError> {
        match self.refusal {
            Some(Refusal::OutOfMemory) => Err(refused(
                "OOM command not allowed when used memory > 'maxmemory'.",
            )),
            _ => Ok(()),
        }
    }
}

impl Call<'_> {
    fn check_and_run(mut self) -> CommandResult {
        let spec = CommandSpec::find(&self.args[0]).ok_or_else(|| unsupported(shown(self.args)))?;
        if self.state.sentinel.is_some() && !spec.in_sentinels {
            return Err(self.unsupported());
        }
        if !spec.takes(self.args.len()) {
            let name = spec.name.to_ascii_lowercase();
            return Err(refused(format!(
                "ERR wrong number of arguments for '{name}' command"
            )));
        }
        let state = &*self.state;
        if !spec.before_login
            && state
                .connections
                .get(&self.from)
                .is_none_or(|it| it.user.is_none())
        {
            return Err(refused("NOAUTH Authentication required."));
        }
        if let Err(denied) = state.permits(self.from, spec, self.args) {
            let name = spec.full_name(self.args).to_ascii_lowercase();
            return Err(refused(match denied {
                Denied::Command => {
                    format!("NOPERM this user has no permissions to run the '{name}' command")
                }
                Denied::Key => {
                    "NOPERM this user has no permissions to access one of the keys used as arguments".into()
                }
                Denied::Channel => {
                    "NOPERM this user has no permissions to access one of the channels used as arguments".into()
                }
            }));
        }
        self.state.script_asks = self
            .state
            .connections
            .get(&self.from)
            .is_some_and(|it| it.asking);
        self.state.check_slots(self.from, spec, self.args)?;
        let state = &*self.state;
        if spec.grows {
            state.check_memory()?;
        }
        if spec.writes {
            state.check_writable()?;
        }
        if state.refusal == Some(Refusal::Loading) && !spec.before_login {
            return Err(refused("LOADING Redis is loading the dataset in memory"));
        }
        let answer = (spec.run)(&mut self);
        self.state.record_read(self.from, spec, self.args);
        answer
    }

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
fn shown(args: &[Bytes]) -> String {
    let shown = args.iter().map(|arg| match arg.len() {
        0..=100 => format!("{:?}", String::from_utf8_lossy(arg)),
        length => format!("({length} bytes)"),
    });
    format!("the command {}", shown.collect::<Vec<_>>().join(" "))
}
