//! Steps: atomic changes to the state of one name, each implemented twice.
//!
//! A server runs the Lua script, the embedded store runs the Rust rule. Both give the same reply
//! and leave the same state. Everything above a step is written once and does not depend on the
//! primitive.

#[cfg(test)]
pub(crate) mod differential;
#[cfg(test)]
pub(crate) mod exploration;
#[cfg(test)]
mod refusals;
#[cfg(test)]
pub(crate) mod repetition;

use std::borrow::Cow;
use std::fmt::{self, Debug};
use std::mem::take;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};

/// One atomic change, in both implementations: a script with its arguments, and the rule.
///
/// A step can be repeated: executed twice, it has the same effect as once. It carries the *target*
/// state (a hold count, an end of a lease) rather than a change. Steps that change a number are the
/// exception: see
/// [`Store::run_at_most_once`](crate::store::Store::run_at_most_once).
///
/// A step that replicas have to confirm writes also if it is repeated: see `repetition`.
pub(crate) struct Step<'a, R>(Box<Parts<'a, dyn Logic<R> + 'a>>);

struct Parts<'a, L: ?Sized> {
    script: &'static Script,
    keys: Keys<'a>,
    args: Args<'a>,
    logic: L,
}

/// What a step does with the reply of its script, and what it does instead of the script.
trait Logic<R>: Send + Sync {
    fn decode(&self, reply: ScriptReply) -> Result<R>;
    fn apply(&self, keyspace: &mut Keyspace) -> Result<R>;
}

impl<R, D, A> Logic<R> for (D, A)
where
    D: Fn(ScriptReply) -> Result<R> + Send + Sync,
    A: Fn(&mut Keyspace) -> Result<R> + Send + Sync,
{
    fn decode(&self, reply: ScriptReply) -> Result<R> {
        self.0(reply)
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<R> {
        self.1(keyspace)
    }
}

impl<'a, R> Step<'a, R> {
    /// Creates a step. `keys`: all that it accesses, in the slot of the name. `decode`: decodes the
    /// reply of the script. `apply`: the rule, the same change to the embedded keyspace.
    pub(crate) fn new<K: Into<Cow<'a, str>>>(
        script: &'static Script,
        keys: impl IntoIterator<Item = K>,
        args: Args<'a>,
        decode: impl Fn(ScriptReply) -> Result<R> + Send + Sync + 'a,
        apply: impl Fn(&mut Keyspace) -> Result<R> + Send + Sync + 'a,
    ) -> Step<'a, R> {
        Step(Box::new(Parts {
            script,
            keys: keys.into_iter().map(Into::into).collect(),
            args,
            logic: (decode, apply),
        }))
    }

    /// Converts the reply.
    pub(crate) fn map<T>(
        mut self,
        convert: impl Fn(R) -> Result<T> + Copy + Send + Sync + 'a,
    ) -> Step<'a, T>
    where
        R: 'a,
    {
        let (keys, args) = (take(&mut self.0.keys), take(&mut self.0.args));
        let inner = Arc::new(self);
        let rule = inner.clone();
        Step::new(
            inner.script(),
            keys,
            args,
            move |reply| inner.decode(reply).and_then(convert),
            move |keyspace| rule.apply(keyspace).and_then(convert),
        )
    }

    pub(crate) fn script(&self) -> &'static Script {
        self.0.script
    }

    pub(crate) fn keys(&self) -> &Keys<'a> {
        &self.0.keys
    }

    /// Returns the other arguments of the script.
    pub(crate) fn args(&self) -> &Args<'a> {
        &self.0.args
    }

    pub(crate) fn decode(&self, reply: ScriptReply) -> Result<R> {
        self.0.logic.decode(reply)
    }

    pub(crate) fn apply(&self, keyspace: &mut Keyspace) -> Result<R> {
        self.0.logic.apply(keyspace)
    }
}

/// The keys of a step: no allocation of their own for those of most objects.
pub(crate) type Keys<'a> = SmallVec<[Cow<'a, str>; 2]>;

/// The arguments of a script behind its keys. In all steps of one verb they have the same order. An
/// acquisition: owner, lease, what else names the hold, count. A release: owner, channel, what else
/// names the hold, count to keep, lease. A forced release: channel, what else names the hold. Then
/// follows what only one kind has.
pub(crate) type Args<'a> = SmallVec<[Arg<'a>; 4]>;

#[derive(Debug, Clone)]
pub(crate) enum Arg<'a> {
    Text(Cow<'a, str>),
    Number(i64),
}

/// Returns these arguments.
macro_rules! args {
    () => {
        $crate::step::Args::new()
    };
    ($($arg:expr),+ $(,)?) => {
        $crate::step::Args::from_iter([$($crate::step::Arg::from($arg)),+])
    };
}

pub(crate) use args;

impl<'a> From<&'a str> for Arg<'a> {
    fn from(text: &'a str) -> Arg<'a> {
        Arg::Text(text.into())
    }
}

impl From<String> for Arg<'_> {
    fn from(text: String) -> Self {
        Arg::Text(text.into())
    }
}

impl From<i64> for Arg<'_> {
    fn from(number: i64) -> Self {
        Arg::Number(number)
    }
}

impl From<u32> for Arg<'_> {
    fn from(number: u32) -> Self {
        Arg::Number(number.into())
    }
}

/// 1 or 0.
impl From<bool> for Arg<'_> {
    fn from(flag: bool) -> Self {
        Arg::Number(flag.into())
    }
}

/// In milliseconds.
impl From<Lease> for Arg<'_> {
    fn from(lease: Lease) -> Self {
        Arg::Number(lease.millis())
    }
}

/// In milliseconds; 0: none.
impl From<Option<Lease>> for Arg<'_> {
    fn from(lease: Option<Lease>) -> Self {
        Arg::Number(lease.map_or(0, Lease::millis))
    }
}

/// Result of an attempt to acquire something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome<T = u64> {
    /// Acquired, with this result: of a lock its fencing token; 0 if it has none.
    Done(T),
    /// Another owner holds it. Retry when a message arrives, and when this has passed at the
    /// latest.
    Wait(Expiry),
}

impl Outcome {
    /// Acquired, without a token.
    pub(crate) const ACQUIRED: Outcome = Outcome::Done(0);
}

/// A Lua script, known to the server by its SHA-1.
pub(crate) struct Script {
    source: &'static str,
    /// By [`PublishMode`].
    hashes: [OnceLock<String>; 2],
    /// See [`Script::has_undeclared_keys`].
    undeclared: bool,
    /// Present if several steps can be in one script.
    batchable: Option<Batchable>,
}

/// A script that can be run for several steps at once, if each has this number of keys and
/// arguments.
#[derive(Debug)]
pub(crate) struct Batchable {
    source: &'static str,
    pub(crate) keys: usize,
    pub(crate) args: usize,
    hash: OnceLock<String>,
}

/// Returns the script that consists of these files. With `undeclared`, it also accesses keys that
/// it finds by itself. With `batchable(1, 2)`, steps with one key and two arguments can be sent
/// together.
macro_rules! script {
    (batchable($keys:literal, $args:literal) $($file:literal),+) => {{
        static SCRIPT: $crate::step::Script =
            $crate::step::Script::batchable(concat!($(include_str!($file)),+), $keys, $args);
        &SCRIPT
    }};
    (undeclared $($file:literal),+) => {{
        static SCRIPT: $crate::step::Script =
            $crate::step::Script::new(concat!($(include_str!($file)),+)).set_undeclared_keys(true);
        &SCRIPT
    }};
    ($($file:literal),+) => {{
        static SCRIPT: $crate::step::Script =
            $crate::step::Script::new(concat!($(include_str!($file)),+));
        &SCRIPT
    }};
}

pub(crate) use script;

/// How scripts publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishMode {
    /// With PUBLISH.
    Global,
    /// With SPUBLISH: only subscribers at the node of the slot receive the message, not all nodes
    /// of a cluster. Subscribers are counted in the same way (SHARDNUMSUB). On a node before Redis
    /// 7.0, which has no sharded channels, like `Global`.
    Sharded,
}

/// Precedes scripts that publish in sharded channels. A refusal for another reason than an unknown
/// command is raised, so that the caller learns what is missing.
const SHARDED: &str = "local function way(refusal, sharded, global)
    return string.find(refusal, 'nknown') and global or sharded
end
local function publish(call, channel, message)
    local sent = redis.pcall('SPUBLISH', channel, message)
    if type(sent) == 'number' then
        return sent
    end
    return call(way(sent.err, 'SPUBLISH', 'PUBLISH'), channel, message)
end
local function numsub(call, ...)
    local counts = redis.pcall('PUBSUB', 'SHARDNUMSUB', ...)
    if not counts.err then
        return counts
    end
    return call('PUBSUB', way(counts.err, 'SHARDNUMSUB', 'NUMSUB'), ...)
end
";

impl Script {
    pub(crate) const fn new(source: &'static str) -> Script {
        Script {
            source,
            hashes: [const { OnceLock::new() }; 2],
            undeclared: false,
            batchable: None,
        }
    }

    /// Creates a script that can be run for several steps at once, if each has this number of keys
    /// and arguments.
    pub(crate) const fn batchable(source: &'static str, keys: usize, args: usize) -> Script {
        let batchable = Batchable {
            source,
            keys,
            args,
            hash: OnceLock::new(),
        };
        Script {
            source,
            hashes: [const { OnceLock::new() }; 2],
            undeclared: false,
            batchable: Some(batchable),
        }
    }

    /// Returns how steps with this number of keys and arguments are sent together, if they can be.
    pub(crate) fn for_batch(&self, keys: usize, args: usize) -> Option<&Batchable> {
        let batchable = self.batchable.as_ref();
        batchable.filter(|batchable| (batchable.keys, batchable.args) == (keys, args))
    }

    /// Sets whether the script also accesses undeclared keys, which it finds by itself.
    pub(crate) const fn set_undeclared_keys(mut self, undeclared: bool) -> Script {
        self.undeclared = undeclared;
        self
    }

    /// Returns whether the script may access more than the declared keys. While its slot moves
    /// between two nodes of a cluster, neither node then knows whether a missing key does not exist
    /// or is at the other node.
    pub(crate) fn has_undeclared_keys(&self) -> bool {
        self.undeclared
    }

    /// Returns the original source, with PUBLISH.
    pub(crate) fn source(&self) -> &'static str {
        self.source
    }

    /// Returns the source for servers that publish in this way.
    pub(crate) fn source_for(&self, mode: PublishMode) -> Cow<'static, str> {
        match mode {
            PublishMode::Global => self.source.into(),
            PublishMode::Sharded => {
                let mut source = self.source.to_owned();
                for call in ["redis.call", "redis.pcall"] {
                    let publish = format!("{call}('PUBLISH', ");
                    source = source.replace(&publish, &format!("publish({call}, "));
                    let numsub = format!("{call}('PUBSUB', 'NUMSUB', ");
                    source = source.replace(&numsub, &format!("numsub({call}, "));
                }
                debug_assert!(!source.contains("PUBLISH'") && !source.contains("NUMSUB'"));
                match source == self.source {
                    true => self.source.into(),
                    false => format!("{SHARDED}{source}").into(),
                }
            }
        }
    }

    /// Returns the SHA-1 of [`Script::source_for`].
    pub(crate) fn sha(&self, mode: PublishMode) -> &str {
        let [global, sharded] = &self.hashes;
        let hash = match mode {
            PublishMode::Global => global,
            PublishMode::Sharded => sharded,
        };
        hash.get_or_init(|| sha1(&self.source_for(mode)))
    }
}

impl Batchable {
    /// Returns the script that runs the step once for each of its keys, with the arguments of all
    /// steps behind all keys. Its reply is the list of their replies and errors.
    ///
    /// It contains the source of the single script, with other indices. So the two cannot differ,
    /// and there is no table of keys and arguments for each step, which would take as long as a
    /// round trip saves.
    pub(crate) fn batch_source(&self) -> String {
        let mut step = self.source.to_owned();
        for n in 1..=9 {
            step = step.replace(&format!("KEYS[{n}]"), &format!("KEYS[k + {n}]"));
            let arg = match n <= self.args {
                true => format!("ARGV[a + {n}]"),
                false => "nil".to_owned(),
            };
            step = step.replace(&format!("ARGV[{n}]"), &arg);
        }
        let (keys, args) = (self.keys, self.args);
        format!(
            "local KEYS, ARGV, redis = KEYS, ARGV, redis
local function step(k, a)
{step}
end
local replies = {{}}
for i = 0, #KEYS / {keys} - 1 do
    -- pcall: an error concerns this step only.
    local done, reply = pcall(step, {keys} * i, {args} * i)
    if not done and type(reply) ~= 'table' then
        reply = {{ err = tostring(reply) }}
    end
    -- nil would end the list; false is the same in a reply.
    replies[i + 1] = reply or false
end
return replies"
        )
    }

    /// Returns the SHA-1 of [`Batchable::batch_source`].
    pub(crate) fn sha(&self) -> &str {
        self.hash.get_or_init(|| sha1(&self.batch_source()))
    }
}

/// The same script, which exists once.
impl PartialEq for Script {
    fn eq(&self, other: &Script) -> bool {
        std::ptr::eq(self, other)
    }
}

/// The same script, which exists once.
impl PartialEq for Batchable {
    fn eq(&self, other: &Batchable) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Batchable {}

/// Returns the SHA-1 of a text, by which servers know a script.
pub(crate) fn sha1(source: &str) -> String {
    sha1_smol::Sha1::from(source).digest().to_string()
}

/// The reply of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScriptReply {
    Nil,
    Integer(i64),
    Bytes(Vec<u8>),
    List(Vec<ScriptReply>),
    Error(ErrorReply),
}

/// An error reply of a server: its code and more text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ErrorReply(String);

impl ErrorReply {
    pub(crate) fn new(text: impl Into<String>) -> ErrorReply {
        ErrorReply(text.into())
    }

    /// Returns the first word.
    pub(crate) fn code(&self) -> &str {
        self.0.split_whitespace().next().unwrap_or_default()
    }

    /// Returns the text behind the code.
    pub(crate) fn details(&self) -> Option<&str> {
        self.0.split_once(' ').map(|(_, details)| details)
    }
}

impl fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl ScriptReply {
    pub(crate) fn integer(self) -> Result<i64> {
        match self {
            ScriptReply::Integer(number) => Ok(number),
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Decodes the reply of a script that returns 1 or 0.
    pub(crate) fn flag(self) -> Result<bool> {
        match self {
            ScriptReply::Integer(flag @ (0 | 1)) => Ok(flag == 1),
            other => Err(unexpected_reply(&other)),
        }
    }

    pub(crate) fn text(self) -> Result<String> {
        match self {
            ScriptReply::Bytes(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Returns the text of a reply that is one.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            ScriptReply::Bytes(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }

    /// Returns the elements of a reply that is a list.
    pub(crate) fn elements(&self) -> Option<&[ScriptReply]> {
        match self {
            ScriptReply::List(elements) => Some(elements),
            _ => None,
        }
    }

    pub(crate) fn list(self) -> Result<Vec<ScriptReply>> {
        match self {
            ScriptReply::List(list) => Ok(list),
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Decodes a list with this number of replies.
    pub(crate) fn array<const N: usize>(self) -> Result<[ScriptReply; N]> {
        let array = self.list()?.try_into();
        array.map_err(|list| unexpected_reply(&ScriptReply::List(list)))
    }
}

#[cfg(test)]
impl From<&str> for ScriptReply {
    fn from(text: &str) -> ScriptReply {
        ScriptReply::Bytes(text.into())
    }
}

#[cfg(test)]
impl ScriptReply {
    pub(crate) fn error(text: &str) -> ScriptReply {
        ScriptReply::Error(ErrorReply::new(text))
    }
}

/// Returns the error for a reply that none of this crate's scripts gives.
pub(crate) fn unexpected_reply(reply: &impl Debug) -> Error {
    Error::Refused {
        reason: format!("unexpected reply: {reply:?}"),
    }
}

/// Converts the error reply of a script about the object `name`.
pub(crate) fn script_error(name: &str, message: String) -> Error {
    let wrong = |reason| Error::WrongKind {
        name: name.to_owned(),
        reason,
    };
    if message.starts_with("WRONGKIND") {
        wrong(match message.contains("no number") {
            true => "not an integer that can be counted up",
            false => "a lock of another kind",
        })
    } else if message.contains("WRONGTYPE") {
        // Matches anywhere: before 7.0 an error inside of a script arrives wrapped in another.
        wrong("a key of another type")
    } else if message.starts_with("NOPERM")
        // Denials inside of a script, before 7.2 and since.
        || message.contains("The user executing the script can't")
        || message.contains("ACL failure in script")
    {
        Error::NotPermitted { reason: message }
    } else {
        Error::Refused { reason: message }
    }
}
