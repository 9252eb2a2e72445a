//! The step that acquires several objects or none. It is composed of the members' own steps, both
//! in Lua and in Rust.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::keyspace::Keyspace;
use crate::session::AllOrNone;
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script_error, unexpected_reply};
use crate::sync::Mutex;

/// The step that acquires one object, and the step that undoes it.
pub(crate) struct Part<'a> {
    pub(crate) name: &'a str,
    pub(crate) acquire: Step<'a, Outcome>,
    pub(crate) undo: Step<'a, bool>,
}

/// Acquires all objects in their order, or none of them.
pub(crate) fn acquire_all(parts: Vec<Part<'_>>) -> Step<'_, AllOrNone<u64>> {
    // In the order of their numbers in the composed script.
    let scripts = scripts(&parts);
    let (mut keys, mut args) = (Keys::new(), Args::new());
    for Part { acquire, undo, .. } in &parts {
        add_call(&mut keys, &mut args, &scripts, acquire);
        add_call(&mut keys, &mut args, &scripts, undo);
    }
    let parts = Arc::new(parts);
    let decoded = parts.clone();
    Step::new(
        composed(&scripts),
        keys,
        args,
        move |reply| decode(&decoded, reply),
        move |keyspace| apply(&parts, keyspace),
    )
}

/// Acquires one object with its own script.
pub(crate) fn alone(acquire: Step<'_, Outcome>) -> Step<'_, AllOrNone<u64>> {
    acquire.map(|outcome| {
        Ok(match outcome {
            Outcome::Done(token) => AllOrNone::Acquired(vec![token]),
            Outcome::Wait(left) => AllOrNone::Blocked(0, left),
        })
    })
}

/// Adds one call of a member's script: its number, the counts of its keys and arguments, and these.
fn add_call<'a, R>(
    keys: &mut Keys<'a>,
    args: &mut Args<'a>,
    scripts: &[&'static Script],
    step: &Step<'a, R>,
) {
    let index = scripts.iter().position(|script| *script == step.script());
    let script = index.map_or(0, |index| index + 1);
    for number in [script, step.keys().len(), step.args().len()] {
        args.push(i64::try_from(number).unwrap_or(i64::MAX).into());
    }
    args.extend(step.args().iter().cloned());
    keys.extend(step.keys().iter().cloned());
}

fn decode(parts: &[Part<'_>], reply: ScriptReply) -> Result<AllOrNone<u64>> {
    let mut all = reply.list()?;
    if let [ScriptReply::Integer(i), _] = all.as_slice() {
        let i = usize::try_from(*i).unwrap_or(usize::MAX);
        return blocked(parts, i, all.pop().unwrap_or(ScriptReply::Nil));
    }
    if all.len() != parts.len() {
        return Err(unexpected_reply(&ScriptReply::List(all)));
    }
    let mut tokens = Vec::with_capacity(all.len());
    for (part, reply) in parts.iter().zip(all) {
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

/// Interprets a reply of the script that acquired nothing.
fn blocked(parts: &[Part<'_>], i: usize, refusal: ScriptReply) -> Result<AllOrNone<u64>> {
    let part = parts.get(i).ok_or_else(|| unexpected_reply(&refusal))?;
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

/// Unwraps a reply from its own array; an empty array means nil.
fn single(reply: ScriptReply) -> Result<ScriptReply> {
    match reply {
        ScriptReply::List(mut one) if one.len() <= 1 => Ok(one.pop().unwrap_or(ScriptReply::Nil)),
        other => Err(unexpected_reply(&other)),
    }
}

fn apply(parts: &[Part<'_>], keyspace: &mut Keyspace) -> Result<AllOrNone<u64>> {
    let mut tokens = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        let refusal = match part.acquire.apply(keyspace) {
            Ok(Outcome::Done(token)) => {
                tokens.push(token);
                continue;
            }
            Ok(Outcome::Wait(left)) => Ok(AllOrNone::Blocked(i, left)),
            Err(error) => Err(error),
        };
        for acquired in parts.iter().take(i).rev() {
            acquired.undo.apply(keyspace)?;
        }
        return refusal;
    }
    Ok(AllOrNone::Acquired(tokens))
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
