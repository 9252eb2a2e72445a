//! Steps: atomic changes to the state of one name, each implemented twice.
//!
//! A server runs the Lua script, the embedded store runs the Rust rule. Both give the same reply and leave
//! the same state. Everything above a step is written once and does not depend on the primitive.

use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::keyspace::Keyspace;

/// One atomic change, in both implementations.
///
/// A step can be repeated: executed twice, it has the same effect as once. It carries the *target* state (a hold
/// count, an end of a lease) rather than a change. Steps that change a number are the exception: see
/// [`Store::run_at_most_once`](crate::store::Store::run_at_most_once).
pub(crate) trait Step: Send + Sync {
    type Reply: Send;

    /// The Lua script that a server runs.
    fn script(&self) -> &'static Script;
    /// The keys that the step accesses, all in the slot of the name.
    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send;
    /// Adds the other arguments of the script.
    fn args(&self, args: &mut Args<'_>);
    /// Decodes the reply of the script.
    fn reply(&self, raw: Value) -> Result<Self::Reply>;
    /// The rule: the same change to the embedded keyspace.
    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<Self::Reply>;
}

/// A step of which only the reply type is known.
pub(crate) type BoxedStep<'a, R> = Box<dyn DynStep<R> + 'a>;

/// Object-safe version of [`Step`], for [`BoxedStep`].
pub(crate) trait DynStep<R>: Send + Sync {
    fn script(&self) -> &'static Script;
    fn key_count(&self) -> usize;
    fn key(&self, n: usize) -> &str;
    fn args(&self, args: &mut Args<'_>);
    fn reply(&self, raw: Value) -> Result<R>;
    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<R>;
}

impl<S: Step> DynStep<S::Reply> for S {
    fn script(&self) -> &'static Script {
        Step::script(self)
    }

    fn key_count(&self) -> usize {
        Step::keys(self).len()
    }

    fn key(&self, n: usize) -> &str {
        Step::keys(self).nth(n).unwrap_or_default()
    }

    fn args(&self, args: &mut Args<'_>) {
        Step::args(self, args);
    }

    fn reply(&self, raw: Value) -> Result<S::Reply> {
        Step::reply(self, raw)
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<S::Reply> {
        Step::apply(self, keyspace, now)
    }
}

impl<R: Send> Step for BoxedStep<'_, R> {
    type Reply = R;

    fn script(&self) -> &'static Script {
        (**self).script()
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        (0..(**self).key_count()).map(|n| (**self).key(n))
    }

    fn args(&self, args: &mut Args<'_>) {
        (**self).args(args);
    }

    fn reply(&self, raw: Value) -> Result<R> {
        (**self).reply(raw)
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<R> {
        (**self).apply(keyspace, now)
    }
}

/// A step with a converted reply.
pub(crate) struct MapReply<S, F>(pub(crate) S, pub(crate) F);

impl<S, F, R> Step for MapReply<S, F>
where
    S: Step,
    F: Fn(S::Reply) -> R + Send + Sync,
    R: Send,
{
    type Reply = R;

    fn script(&self) -> &'static Script {
        self.0.script()
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        self.0.keys()
    }

    fn args(&self, args: &mut Args<'_>) {
        self.0.args(args);
    }

    fn reply(&self, raw: Value) -> Result<R> {
        self.0.reply(raw).map(&self.1)
    }

    fn apply(&self, keyspace: &mut Keyspace, now: Instant) -> Result<R> {
        self.0.apply(keyspace, now).map(&self.1)
    }
}

/// Result of an attempt to acquire something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome<T = ()> {
    /// Acquired, with this result.
    Done(T),
    /// Another owner holds it. Retry when a message arrives, and after this time at the latest;
    /// [`Duration::MAX`]: only when a message arrives.
    Wait(Duration),
}

/// A Lua script, known to the server by its SHA-1.
pub(crate) struct Script {
    source: &'static str,
    /// By [`PublishMode`].
    hashes: [OnceLock<redis::Script>; 2],
    /// See [`Script::has_undeclared_keys`].
    undeclared: bool,
}

/// How scripts publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishMode {
    /// With PUBLISH.
    Global,
    /// With SPUBLISH: only subscribers at the node of the slot receive the message, not all nodes of a
    /// cluster. Subscribers are counted in the same way (SHARDNUMSUB).
    Sharded,
}

impl Script {
    /// Returns an id of the script: its address, because each script is created once.
    pub(crate) fn id(&'static self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub(crate) const fn new(source: &'static str) -> Script {
        Script {
            source,
            hashes: [const { OnceLock::new() }; 2],
            undeclared: false,
        }
    }

    /// Marks the script as one that also accesses undeclared keys, which it finds by itself.
    pub(crate) const fn with_undeclared_keys(self) -> Script {
        self.set_undeclared_keys(true)
    }

    /// Sets that mark to `undeclared`.
    pub(crate) const fn set_undeclared_keys(mut self, undeclared: bool) -> Script {
        self.undeclared = undeclared;
        self
    }

    /// Returns whether the script may access more than the declared keys. While its slot moves between two
    /// nodes of a cluster, neither node then knows whether a missing key does not exist or is at the
    /// other node.
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
                let published = self.source.replace("'PUBLISH'", "'SPUBLISH'");
                published.replace("'NUMSUB'", "'SHARDNUMSUB'").into()
            }
        }
    }

    pub(crate) fn sha(&self, mode: PublishMode) -> &str {
        let [global, sharded] = &self.hashes;
        let hash = match mode {
            PublishMode::Global => global,
            PublishMode::Sharded => sharded,
        };
        hash.get_or_init(|| redis::Script::new(&self.source_for(mode)))
            .get_hash()
    }
}

/// The arguments of a step for the server.
pub(crate) struct Args<'a>(pub(crate) &'a mut redis::Cmd);

impl Args<'_> {
    pub(crate) fn text(&mut self, text: &str) {
        self.0.arg(text);
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0.arg(number);
    }

    pub(crate) fn signed(&mut self, number: i64) {
        self.0.arg(number);
    }
}

/// Decodes the reply of a script that returns 1 or 0.
pub(crate) fn decode_bool(raw: &Value) -> Result<bool> {
    match raw {
        Value::Int(answer @ (0 | 1)) => Ok(*answer == 1),
        other => Err(unexpected_reply(other)),
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
            true => "not an integer",
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

/// Returns the error for a reply that none of this crate's scripts gives.
pub(crate) fn unexpected_reply(raw: &Value) -> Error {
    Error::Refused {
        reason: format!("unexpected reply: {raw:?}"),
    }
}
