//! Scripts, on a Lua 5.1 of the server's own.
//!
//! A script runs atomically: it calls commands through the same table as clients, on the server's state. Values
//! are converted between Lua and replies as in Redis: numbers lose their fraction, false is nil, a table ends
//! before its first nil, and tables with the field `ok` or `err` are statuses and errors.
//!
//! Features of a real server that are not simulated (random numbers, clocks, libraries, undefined globals) end
//! the run, even if the script catches errors.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use mlua::{Function, Lua, LuaOptions, MultiValue, StdLib, Table, Value};

use super::command::{Call, CommandError, CommandResult, refused, unsupported};
use super::commands::run_in_script;
use super::connection::ConnectionId;
use super::resp::{Bytes, Reply, decimal};
use super::state::State;

/// Runs first in the interpreter: see `prelude.lua`.
const PRELUDE: &str = include_str!("prelude.lua");

/// Name of scripts in their errors.
const SCRIPT: &str = "@user_script";

/// Maximum nesting of a reply.
const MAX_DEPTH: usize = 100;

/// Bytes of Lua's memory that may be used before its garbage is collected, which takes time. Few runs use that
/// many.
const GC_THRESHOLD: usize = 32 << 20;

thread_local! {
    /// Interpreters of servers that have ended. Creating one takes longer than most runs spend in it.
    static ENGINE_POOL: RefCell<Vec<Engine>> = const { RefCell::new(Vec::new()) };
}

/// The scripts of one server. Lua is started with the first of them: Sentinels and most replicas run none.
#[derive(Debug, Default)]
pub(super) struct Interpreter {
    engine: Option<Engine>,
    /// The SHA-1 of each script that clients may call.
    known: BTreeSet<String>,
}

#[derive(Debug)]
struct Engine {
    lua: Lua,
    /// Calls a script with a function that runs commands.
    run: Function,
    /// All scripts that were ever loaded, by SHA-1.
    compiled: BTreeMap<String, Function>,
    /// Use of a feature that is not simulated.
    misuse: Misuse,
}

type Misuse = Arc<Mutex<Option<String>>>;

impl Drop for Interpreter {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            // At the end of the thread the list no longer exists.
            let _ = ENGINE_POOL.try_with(|free| free.borrow_mut().push(engine));
        }
    }
}

impl Interpreter {
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    /// Loads a script. Returns its SHA-1.
    fn load(&mut self, source: &[u8]) -> Result<String, CommandError> {
        let sha = sha(source);
        if !self.known.contains(&sha) {
            self.engine().compile(&sha, source)?;
            self.known.insert(sha.clone());
        }
        Ok(sha)
    }

    /// Runs a loaded script.
    fn run(
        &mut self,
        state: &mut State,
        from: ConnectionId,
        sha: &str,
        keys: &[Bytes],
        args: &[Bytes],
    ) -> CommandResult {
        if !self.known.contains(sha) {
            return Err(refused("NOSCRIPT No matching script. Please use EVAL."));
        }
        self.engine().run(state, from, sha, keys, args)
    }

    fn engine(&mut self) -> &mut Engine {
        self.engine.get_or_insert_with(|| {
            let free = ENGINE_POOL.with_borrow_mut(Vec::pop);
            free.unwrap_or_else(|| Engine::build().expect("the interpreter starts"))
        })
    }
}

impl Engine {
    fn build() -> mlua::Result<Engine> {
        let libraries = StdLib::STRING | StdLib::TABLE | StdLib::MATH;
        let lua = Lua::new_with(libraries, LuaOptions::default())?;
        lua.gc_stop();
        let misuse = Misuse::default();
        let noted = misuse.clone();
        let misused = lua.create_function(move |_, what: String| {
            let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
            noted.get_or_insert(what);
            Ok(())
        })?;
        let sha1hex = lua.create_function(|_, text: mlua::String| Ok(sha(&text.as_bytes())))?;
        let current_line = lua.create_function(|lua, ()| Ok(line(lua)))?;
        let prelude = lua.load(PRELUDE).set_name("=prelude");
        let run = prelude.call((misused, sha1hex, current_line))?;
        Ok(Engine {
            lua,
            run,
            compiled: BTreeMap::new(),
            misuse,
        })
    }

    fn compile(&mut self, sha: &str, source: &[u8]) -> Result<(), CommandError> {
        if !self.compiled.contains_key(sha) {
            let chunk = self.lua.load(source).set_name(SCRIPT);
            let function = chunk.into_function().map_err(|error| {
                let text = match &error {
                    mlua::Error::SyntaxError { message, .. } => message.clone(),
                    other => other.to_string(),
                };
                refused(format!("ERR Error compiling script (new function): {text}"))
            })?;
            self.compiled.insert(sha.to_owned(), function);
        }
        Ok(())
    }

    fn run(
        &mut self,
        state: &mut State,
        from: ConnectionId,
        sha: &str,
        keys: &[Bytes],
        args: &[Bytes],
    ) -> CommandResult {
        let not_compiled = || unsupported("a script that is known and was never compiled");
        let function = self.compiled.get(sha).ok_or_else(not_compiled)?.clone();
        let mut unsupported_command = None;
        let outcome = self.call(
            state,
            from,
            &function,
            [keys, args],
            &mut unsupported_command,
        );
        let misuse = self
            .misuse
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(what) = misuse.or(unsupported_command) {
            return Err(unsupported(format!("{what}, in the script {sha}")));
        }
        let broken = |error: mlua::Error| unsupported(format!("an error of Lua itself: {error}"));
        let (succeeded, value) = outcome.map_err(broken)?;
        if succeeded {
            return reply(&value, MAX_DEPTH);
        }
        let Value::Table(error) = value else {
            return Err(unsupported(format!("an error of the form {value:?}")));
        };
        let text: mlua::String = error.get("err").map_err(broken)?;
        let text = text.to_string_lossy();
        let line: i64 = error.get("line").map_err(broken)?;
        Err(refused(format!(
            "{text} script: {sha}, on {SCRIPT}:{line}."
        )))
    }

    fn call(
        &self,
        state: &mut State,
        from: ConnectionId,
        function: &Function,
        tables: [&[Bytes]; 2],
        unsupported_command: &mut Option<String>,
    ) -> mlua::Result<(bool, Value)> {
        let table = |all: &[Bytes]| {
            let strings = all.iter().map(|bytes| self.lua.create_string(bytes));
            self.lua
                .create_sequence_from(strings.collect::<mlua::Result<Vec<_>>>()?)
        };
        let [keys, args] = tables;
        let (keys, args) = (table(keys)?, table(args)?);
        let mut has_written = false;
        if self.lua.used_memory() > GC_THRESHOLD {
            self.lua.gc_collect()?;
        }
        self.lua.scope(|scope| {
            let command = scope.create_function_mut(|lua, args: MultiValue| {
                let reply = match command(&args) {
                    Ok(args) => run_in_script(state, from, &args, &mut has_written),
                    Err(stop) => Err(stop),
                };
                match reply {
                    Ok(reply) => value(lua, &reply),
                    Err(CommandError::Refused(text)) => value(lua, &Reply::Error(text)),
                    Err(CommandError::Unsupported(what)) => {
                        unsupported_command.get_or_insert(what);
                        value(lua, &Reply::Error("ERR unsupported".into()))
                    }
                }
            })?;
            self.run.call((function, command, keys, args))
        })
    }
}

/// Returns the current line of the running script, for errors; -1 for a tail call, whose line Lua does not keep.
fn line(lua: &Lua) -> i64 {
    for level in 0.. {
        let found = lua.inspect_stack(level, |frame| {
            let is_script = frame.source().source.as_deref() == Some(SCRIPT);
            is_script.then(|| frame.current_line()).flatten()
        });
        match found {
            Some(Some(line)) => return i64::try_from(line).unwrap_or(i64::MAX),
            Some(None) => {}
            None => break,
        }
    }
    -1
}

/// Converts the arguments of a script's call to a command.
fn command(args: &MultiValue) -> Result<Vec<Bytes>, CommandError> {
    if args.is_empty() {
        return Err(refused(
            "ERR Please specify at least one argument for this redis.call() call",
        ));
    }
    let argument = |arg: &Value| match arg {
        Value::String(text) => Ok(text.as_bytes().to_vec()),
        #[allow(clippy::cast_precision_loss, reason = "Lua's numbers are no others")]
        Value::Integer(number) => Ok(decimal(*number as f64).into_bytes()),
        Value::Number(number) => Ok(decimal(*number).into_bytes()),
        _ => Err(refused(
            "ERR Lua redis lib command arguments must be strings or integers",
        )),
    };
    args.iter().map(argument).collect()
}

/// Converts a reply for a script, as in RESP2.
fn value(lua: &Lua, reply: &Reply) -> mlua::Result<Value> {
    let string = |bytes: &[u8]| lua.create_string(bytes).map(Value::String);
    let field = |name: &str, text: &str| {
        let table = lua.create_table()?;
        table.raw_set(name, text)?;
        Ok(Value::Table(table))
    };
    let all = |replies: &mut dyn Iterator<Item = &Reply>| {
        let values = replies.map(|reply| value(lua, reply));
        let values = values.collect::<mlua::Result<Vec<_>>>()?;
        lua.create_sequence_from(values).map(Value::Table)
    };
    match reply {
        Reply::Status(text) => field("ok", text),
        Reply::Error(text) => field("err", text),
        #[allow(clippy::cast_precision_loss, reason = "Lua's numbers are no others")]
        Reply::Int(number) => Ok(Value::Number(*number as f64)),
        Reply::Bulk(bytes) => string(bytes),
        Reply::Verbatim(text) => string(text.as_bytes()),
        Reply::Double(number) => string(decimal(*number).as_bytes()),
        Reply::Nil | Reply::Sent => Ok(Value::Boolean(false)),
        Reply::Array(replies) => all(&mut replies.iter()),
        Reply::Map(pairs) => all(&mut pairs.iter().flat_map(|(name, value)| [name, value])),
        Reply::Scored(pairs) => {
            let flat = pairs
                .iter()
                .flat_map(|(member, score)| [string(member), string(decimal(*score).as_bytes())]);
            let flat = flat.collect::<mlua::Result<Vec<_>>>()?;
            lua.create_sequence_from(flat).map(Value::Table)
        }
    }
}

/// Converts the return value of a script to a reply.
fn reply(value: &Value, depth: usize) -> CommandResult {
    #[allow(clippy::cast_possible_truncation, reason = "as Redis cuts numbers")]
    match value {
        Value::Nil | Value::Boolean(false) => Ok(Reply::Nil),
        Value::Boolean(true) => Ok(Reply::Int(1)),
        Value::Integer(number) => Ok(Reply::Int(*number)),
        Value::Number(number) => Ok(Reply::Int(match number {
            // As processors convert numbers that are too large.
            9_223_372_036_854_775_808.0.. => i64::MIN,
            number => *number as i64,
        })),
        Value::String(text) => Ok(Reply::Bulk(text.as_bytes().to_vec())),
        Value::Table(table) if depth > 0 => table_reply(table, depth),
        other => Err(unsupported(format!("a script that returns {other:?}"))),
    }
}

fn table_reply(table: &Table, depth: usize) -> CommandResult {
    let broken = |error: mlua::Error| unsupported(format!("an error of Lua itself: {error}"));
    let field = |name: &str| table.raw_get::<Value>(name).map_err(broken);
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.to_string_lossy().replace(['\r', '\n'], " ")),
        _ => None,
    };
    if let Some(error) = text(&field("err")?) {
        return Ok(Reply::Error(error));
    }
    if let Some(status) = text(&field("ok")?) {
        return Ok(Reply::Status(status));
    }
    for name in ["double", "map", "set", "big_number", "verbatim_string"] {
        if !field(name)?.is_nil() {
            return Err(unsupported(format!(
                "a script that returns a table with {name:?}"
            )));
        }
    }
    let mut all = Vec::new();
    for index in 1.. {
        match table.raw_get::<Value>(index).map_err(broken)? {
            Value::Nil => break,
            value => all.push(reply(&value, depth - 1)?),
        }
    }
    Ok(Reply::Array(all))
}

fn sha(source: &[u8]) -> String {
    sha1_smol::Sha1::from(source).digest().to_string()
}

pub(super) fn eval(call: &mut Call<'_>) -> CommandResult {
    run(call, |interpreter, source| interpreter.load(source))
}

pub(super) fn evalsha(call: &mut Call<'_>) -> CommandResult {
    run(call, |_, sha| {
        Ok(String::from_utf8_lossy(sha).to_ascii_lowercase())
    })
}

fn run(
    call: &mut Call<'_>,
    find: impl FnOnce(&mut Interpreter, &[u8]) -> Result<String, CommandError>,
) -> CommandResult {
    let keys = call.integer(2)?;
    let rest = &call.args[3..];
    let keys =
        usize::try_from(keys).map_err(|_| refused("ERR Number of keys can't be negative"))?;
    let too_many = || refused("ERR Number of keys can't be greater than number of args");
    let (keys, args) = rest.split_at_checked(keys).ok_or_else(too_many)?;
    let source = &call.args[1];
    let Some(interpreter) = &mut call.interpreter else {
        return Err(refused("ERR This Redis command is not allowed from script"));
    };
    let sha = find(interpreter, source)?;
    call.state.script_keys = Some(keys.to_vec());
    let answer = interpreter.run(call.state, call.from, &sha, keys, args);
    call.state.script_keys = None;
    answer
}

pub(super) fn script(call: &mut Call<'_>) -> CommandResult {
    let unsupported = call.unsupported();
    let Some(interpreter) = &mut call.interpreter else {
        return Err(unsupported);
    };
    let sub = String::from_utf8_lossy(&call.args[1]).to_ascii_uppercase();
    match (sub.as_str(), &call.args[2..]) {
        ("LOAD", [source]) => Ok(Reply::text(interpreter.load(source)?)),
        ("EXISTS", shas @ [_, ..]) => {
            let is_known = |sha: &Bytes| {
                let sha = String::from_utf8_lossy(sha).to_ascii_lowercase();
                Reply::Int(interpreter.known.contains(&sha).into())
            };
            Ok(Reply::Array(shas.iter().map(is_known).collect()))
        }
        ("FLUSH", [] | [_]) => {
            interpreter.forget();
            Ok(Reply::ok())
        }
        _ => Err(unsupported),
    }
}
