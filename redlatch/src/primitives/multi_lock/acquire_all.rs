//! The step that acquires several objects or none. It is composed of the members' own steps, both in
//! Lua and in Rust.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::session::AllOrNone;
use crate::step::{
    Args, BoxedStep, Keys, Outcome, Script, ScriptReply, Step, script_error, unexpected_reply,
};
use crate::sync::Mutex;

/// Acquires all objects in their order, or none of them.
pub(crate) struct AcquireAll<'a> {
    parts: Vec<Part<'a>>,
    /// The scripts of the parts, in the order of their numbers in the composed script.
    scripts: Vec<&'static Script>,
    script: &'static Script,
}

/// The step that acquires one object, and the step that undoes it.
pub(crate) struct Part<'a> {
    pub(crate) name: &'a str,
    pub(crate) acquire: BoxedStep<'a, Outcome>,
    pub(crate) undo: BoxedStep<'a, bool>,
}

impl<'a> AcquireAll<'a> {
    pub(crate) fn new(parts: Vec<Part<'a>>) -> AcquireAll<'a> {
        let scripts = scripts(&parts);
        AcquireAll {
            script: composed(&scripts),
            scripts,
            parts,
        }
    }

    /// Interprets a reply of the script that acquired nothing.
    fn blocked(&self, i: usize, refusal: ScriptReply) -> Result<AllOrNone<u64>> {
        let part = self.parts.get(i);
        let part = part.ok_or_else(|| unexpected_reply(&refusal))?;
        match refusal {
            ScriptReply::Bytes(text) => {
                let said = String::from_utf8_lossy(&text).into_owned();
                Err(script_error(part.name, said))
            }
            other => match part.acquire.decode(single(other)?)? {
                Outcome::Wait(left) => Ok(AllOrNone::Blocked(i, left)),
                Outcome::Done(_) => Err(Error::Refused {
                    reason: "the script reported an acquisition that it had undone".into(),
                }),
            },
        }
    }
}

/// Unwraps a reply from its own array; an empty array means nil.
fn single(reply: ScriptReply) -> Result<ScriptReply> {
    match reply {
        ScriptReply::List(mut one) if one.len() <= 1 => Ok(one.pop().unwrap_or(ScriptReply::Nil)),
        other => Err(unexpected_reply(&other)),
    }
}

impl Step for AcquireAll<'_> {
    type Reply = AllOrNone<u64>;

    fn script(&self) -> &'static Script {
        self.script
    }

    fn keys(&self) -> Keys<'_> {
        let mut keys = Keys::new();
        for part in &self.parts {
            keys.extend(part.acquire.keys());
            keys.extend(part.undo.keys());
        }
        keys
    }

    fn args(&self, args: &mut dyn Args) {
        let number = |script: &'static Script| {
            let index = self.scripts.iter().position(|one| *one == script);
            index.map_or(0, |index| index + 1)
        };
        for Part { acquire, undo, .. } in &self.parts {
            write(args, number(acquire.script()), acquire);
            write(args, number(undo.script()), undo);
        }
    }

    fn decode(&self, reply: ScriptReply) -> Result<AllOrNone<u64>> {
        let mut all = reply.list()?;
        if let [ScriptReply::Integer(i), _] = all.as_slice() {
            let i = usize::try_from(*i).unwrap_or(usize::MAX);
            return self.blocked(i, all.pop().unwrap_or(ScriptReply::Nil));
        }
        if all.len() != self.parts.len() {
            return Err(unexpected_reply(&ScriptReply::List(all)));
        }
        let mut tokens = Vec::with_capacity(all.len());
        for (part, reply) in self.parts.iter().zip(all) {
            match part.acquire.decode(single(reply)?)? {
                Outcome::Done(token) => tokens.push(token),
                // The script acquired it, because it treats any reply but a number as a success.
                Outcome::Wait(_) => {
                    return Err(Error::Refused {
                        reason: "the script reported a refused acquisition as granted".into(),
                    });
                }
            }
        }
        Ok(AllOrNone::Acquired(tokens))
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<AllOrNone<u64>> {
        let mut tokens = Vec::with_capacity(self.parts.len());
        for (i, part) in self.parts.iter().enumerate() {
            let refusal = match part.acquire.apply(keyspace) {
                Ok(Outcome::Done(token)) => {
                    tokens.push(token);
                    continue;
                }
                Ok(Outcome::Wait(left)) => Ok(AllOrNone::Blocked(i, left)),
                Err(error) => Err(error),
            };
            for acquired in self.parts.iter().take(i).rev() {
                acquired.undo.apply(keyspace)?;
            }
            return refusal;
        }
        Ok(AllOrNone::Acquired(tokens))
    }
}

/// Writes one call of a member's script: its number, and the counts of its keys and arguments.
fn write(args: &mut dyn Args, script: usize, step: &impl Step) {
    let mut count = ArgCount(0);
    step.args(&mut count);
    for number in [script, step.keys().len(), count.0] {
        args.number(i64::try_from(number).unwrap_or(i64::MAX));
    }
    step.args(args);
}

/// Counts arguments.
struct ArgCount(usize);

impl Args for ArgCount {
    fn text(&mut self, _: &str) {
        self.0 += 1;
    }

    fn number(&mut self, _: i64) {
        self.0 += 1;
    }
}

/// Returns the scripts of these parts, each once.
fn scripts(parts: &[Part<'_>]) -> Vec<&'static Script> {
    let mut scripts: Vec<&'static Script> = Vec::new();
    for part in parts {
        for script in [part.acquire.script(), part.undo.script()] {
            if !scripts.contains(&script) {
                scripts.push(script);
            }
        }
    }
    // Sorted, so that the same scripts in another order compose the same script.
    scripts.sort_unstable_by_key(|script| script.source());
    scripts
}

/// Returns the script that is composed of these. It is never freed: there is one for each set of
/// kinds that are ever locked together, and the server keeps it too.
fn composed(parts: &[&'static Script]) -> &'static Script {
    static SCRIPTS: OnceLock<Mutex<HashMap<Vec<&'static str>, &'static Script>>> = OnceLock::new();
    let sources = parts.iter().map(|part| part.source()).collect();
    let scripts = SCRIPTS.get_or_init(Mutex::default);
    let mut scripts = scripts.lock();
    scripts.entry(sources).or_insert_with(|| {
        let mut source = String::from("local scripts = {\n");
        for part in parts {
            source.push_str("function(KEYS, ARGV)\n");
            source.push_str(part.source());
            source.push_str("\nend,\n");
        }
        source.push_str("}\n");
        source.push_str(include_str!("acquire_all.lua"));
        let undeclared = parts.iter().any(|part| part.has_undeclared_keys());
        let script = Script::new(Box::leak(source.into_boxed_str()));
        Box::leak(Box::new(script.set_undeclared_keys(undeclared)))
    })
}
