//! All commands in one table, and the checks before a command runs.
//!
//! The order of the checks is that of Redis: arity, login, permissions, slots, then whether the server may
//! write now. Scripts go through the same table with checks of their own.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::auth::Denied;
use super::command::{
    Call, ChannelArgs, CommandError, CommandResult, CommandSpec, Keys, refused, shown, unsupported,
};
use super::connection::{self, ConnectionId};
use super::resp::{Bytes, Reply};
use super::script::{self, Interpreter};
use super::state::{Refusal, State, Unsupported};
use super::{
    cluster, hashes, info, keys, lists, pubsub, replication, sentinel, sorted_sets, strings,
};

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
        in_subscriptions: false,
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

/// Marks a command that a RESP2 connection with subscriptions runs, too.
const fn in_subscriptions(spec: CommandSpec) -> CommandSpec {
    CommandSpec {
        in_subscriptions: true,
        ..spec
    }
}

const fn subscribes(
    name: &'static str,
    arity: isize,
    run: fn(&mut Call<'_>) -> CommandResult,
) -> CommandSpec {
    in_subscriptions(client(name, arity, run))
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
    in_subscriptions(in_sentinels(before_login(client(
        "QUIT",
        -1,
        connection::quit,
    )))),
    in_sentinels(client("SENTINEL", -2, sentinel::sentinel)),
    client("ASKING", 1, cluster::asking),
    client("CLUSTER", -2, cluster::cluster),
    in_sentinels(client("CLIENT", -2, connection::client)),
    spec("SELECT", 2, connection::select),
    in_subscriptions(in_sentinels(spec("PING", -1, connection::ping))),
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
    in_sentinels(channels(
        All,
        subscribes("SUBSCRIBE", -2, pubsub::subscribe),
    )),
    in_sentinels(subscribes("UNSUBSCRIBE", -1, pubsub::unsubscribe)),
    channels(Patterns, subscribes("PSUBSCRIBE", -2, pubsub::psubscribe)),
    subscribes("PUNSUBSCRIBE", -1, pubsub::punsubscribe),
    sharded(channels(
        All,
        subscribes("SSUBSCRIBE", -2, pubsub::ssubscribe),
    )),
    sharded(subscribes("SUNSUBSCRIBE", -1, pubsub::sunsubscribe)),
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
        if !spec.in_subscriptions && state.only_subscribes(self.from) {
            let name = spec.name.to_ascii_lowercase();
            return Err(refused(format!(
                "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in \
                 this context"
            )));
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
        let is_query = matches!(spec.name, "CLUSTER" | "SENTINEL");
        if state.refusal == Some(Refusal::Loading) && !spec.before_login
            || state.refusal == Some(Refusal::Queries) && is_query
        {
            return Err(refused("LOADING Redis is loading the dataset in memory"));
        }
        let answer = (spec.run)(&mut self);
        self.state.record_read(self.from, spec, self.args);
        answer
    }
}
