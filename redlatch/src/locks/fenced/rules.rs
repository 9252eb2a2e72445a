//! The fenced lock's steps: those of the lock, with a token.
//!
//! State: the lock's hash, and a number that only grows, in a separate key that never expires,
//! unless tokens follow the clock ([`Tokens::grace`]).
//!
//! An acquisition that changes the hold count increments the number and returns it as the token. An
//! acquisition that requests the hold count that the owner already has is a repetition after a lost
//! answer, and returns the current number, if that still exists. The number is incremented before
//! the hash is written, so a number that cannot be incremented leaves the lock unchanged.

use std::borrow::Cow;

use super::token::{self, INVALID_EPOCH, Term, Tokens};
use crate::counters::read_number;
use crate::error::Result;
use crate::hold::AcquireParams;
use crate::keyspace::Holds;
use crate::lease::Expiry;
use crate::locks::reentrant::rules::{try_acquire, wait_outcome};
use crate::locks::rules::wrong_kind;
use crate::name::{FencedKeys, term_key};
use crate::step::{Arg, Outcome, ScriptReply, Step, args, script, unexpected_reply};

/// Acquires the lock for an owner and increments the token, or returns how long another owner may
/// still hold it.
pub(super) fn acquire<'a>(params: AcquireParams<'a>, tokens: Tokens<'a>) -> Step<'a, Outcome> {
    let mut args = args![&*params.hold.field, params.lease, params.count];
    args.extend(tokens.grace.map(Arg::from));
    let script = match tokens.grace {
        None => script!(batchable(2, 3) "../expire.lua", "count_token.lua", "acquire.lua"),
        Some(_) => {
            script!(batchable(2, 4) "../expire.lua", "numbers.lua", "clock_token.lua", "acquire.lua")
        }
    };
    Step::new(
        script,
        [params.hold.object.key(), tokens.key],
        args,
        move |reply| {
            if let ScriptReply::Integer(left) = reply {
                return wait_outcome(&params.hold.object, Expiry::from_millis(left));
            }
            let [token] = reply.array()?;
            let token = token.text()?;
            // Only a repetition can find a token that is not a number: the key was overwritten
            // after the first attempt. So the owner may hold the lock, and the error must not
            // exclude that.
            let parsed = token::parse(&token).map(Outcome::Done);
            parsed.ok_or_else(|| unexpected_reply(&token))
        },
        move |keyspace| {
            let AcquireParams { hold, count, .. } = params;
            let object = &hold.object;
            let found = keyspace.find::<Holds>(object.key())?;
            let free = found.is_none() && count == 1;
            let held = found.and_then(|holds| holds.value.counts.get(&*hold.field).copied());
            // Repeated because the answer was lost: the owner already has its token.
            let latest = match held == Some(count) {
                true => read_number(keyspace, tokens.key)?,
                false => None,
            };
            let token = match latest {
                Some(latest) => latest,
                None if free || held.is_some() => {
                    let next = tokens.next(keyspace);
                    next.ok_or_else(|| wrong_kind(object, INVALID_TOKEN))?
                }
                // Not used: the attempt below is refused.
                None => 0,
            };
            if let Outcome::Wait(left) = try_acquire(keyspace, params)? {
                return Ok(Outcome::Wait(left));
            }
            if latest.is_none() {
                tokens.set(keyspace, token);
            }
            Ok(Outcome::Done(token::unsigned(token)))
        },
    )
}

/// Returns the latest token: of the latest acquisition, or advanced since; 0 if there is none.
pub(super) fn read_token(keys: &FencedKeys) -> Step<'_, u64> {
    Step::new(
        script!("current.lua"),
        [&*keys.token],
        args![],
        |reply| parse_token(keys, reply),
        move |keyspace| {
            let token = read_number(keyspace, &keys.token)?;
            Ok(token::unsigned(token.unwrap_or(0)))
        },
    )
}

fn parse_token(keys: &FencedKeys, reply: ScriptReply) -> Result<u64> {
    let token = token::parse(&reply.text()?);
    token.ok_or_else(|| wrong_kind(&keys.object, INVALID_TOKEN))
}

/// Raises the token to `at_least`, unless it is greater, and to the epoch of the latest term, if
/// there is one. Raises that epoch, too, unless there is a leader. Returns the resulting token.
pub(super) fn advance_token(keys: &FencedKeys, at_least: i64) -> Step<'_, u64> {
    let term = term_key(keys.object.key());
    Step::new(
        script!("numbers.lua", "advance.lua"),
        [
            Cow::from(&*keys.token),
            term.clone().into(),
            keys.object.key().into(),
        ],
        args![at_least],
        |reply| parse_token(keys, reply),
        move |keyspace| {
            let object = &keys.object;
            let token = read_number(keyspace, &keys.token)?.unwrap_or(0);
            // From the greatest number no acquisition can count up.
            if token == i64::MAX {
                return Err(wrong_kind(object, INVALID_TOKEN));
            }
            let latest_term = keyspace.find::<Term>(&term)?;
            let latest_term = latest_term.map_or_else(Term::new, |found| found.value.clone());
            let parse = |text: &String| {
                let epoch = token::parse_epoch(text).filter(|epoch| *epoch < i64::MAX);
                epoch.ok_or_else(|| wrong_kind(object, INVALID_EPOCH))
            };
            let epoch = latest_term.get("epoch").map(parse).transpose()?;
            let latest = token.max(epoch.unwrap_or(0)).max(at_least);
            let is_behind = epoch.is_some_and(|epoch| epoch != latest);
            let mut has_leader = false;
            if let Some(leader) = latest_term.get("leader").filter(|_| is_behind) {
                let holds = keyspace.find::<Holds>(object.key())?;
                has_leader = holds.is_some_and(|holds| holds.value.counts.contains_key(leader));
            }
            if latest != token {
                keyspace.set(&keys.token, latest, None);
            }
            if is_behind && !has_leader {
                let term: &mut Term = keyspace.find_or_create(&term)?;
                term.insert("epoch".to_owned(), latest.to_string());
            }
            Ok(token::unsigned(latest))
        },
    )
}

/// Deletes the token of a free lock, and the latest term of an election: its epochs are tokens of
/// its lock. Replies whether the lock was free.
pub(super) fn delete_token(keys: &FencedKeys) -> Step<'_, bool> {
    let term = term_key(keys.object.key());
    Step::new(
        script!("delete.lua"),
        [
            keys.object.key().into(),
            Cow::from(&*keys.token),
            term.clone().into(),
        ],
        args![],
        ScriptReply::flag,
        move |keyspace| {
            let free = !keyspace.exists(keys.object.key());
            if free {
                keyspace.remove(&keys.token);
                keyspace.remove(&term);
            }
            Ok(free)
        },
    )
}

const INVALID_TOKEN: &str = "its token is no number that can be counted up";
