//! The fenced lock's steps: those of the lock, with a token.
//!
//! State: the lock's hash, and a number that only grows, in a separate key that never expires.
//!
//! An acquisition that changes the hold count increments the number and returns it as the token.
//! An acquisition that requests the hold count that the owner already has is a repetition after a
//! lost answer, and returns the current number. The number is incremented before the hash is written, so a number
//! that cannot be incremented leaves the lock unchanged.

use std::sync::Arc;

use smallvec::smallvec;

use super::token;
use crate::error::Result;
use crate::keyspace::{Holds, Keyspace};
use crate::lease::Expiry;
use crate::name::FencedKeys;
use crate::primitives::counter::read_number;
use crate::primitives::election::{INVALID_EPOCH, Term};
use crate::primitives::lock::AcquireParams;
use crate::primitives::lock::rules::wrong_kind;
use crate::primitives::reentrant::rules::{try_acquire, wait_outcome};
use crate::step::{Args, Keys, Outcome, Script, ScriptReply, Step, script, unexpected_reply};

/// Acquires the lock for an owner and increments the token, or returns how long another owner may still hold it.
pub(super) struct Acquire<'a> {
    pub(super) params: AcquireParams<'a>,
    pub(super) keys: &'a FencedKeys,
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!(batchable(2, 3) "../expire.lua", "acquire.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.keys.object.key(), &*self.keys.token]
    }

    fn args(&self, args: &mut dyn Args) {
        args.text(&self.params.hold.field);
        args.number(self.params.lease.millis());
        args.number(self.params.count.into());
    }

    fn decode(&self, reply: ScriptReply) -> Result<Outcome> {
        if let ScriptReply::Integer(left) = reply {
            return wait_outcome(&self.params.hold.object, Expiry::from_millis(left));
        }
        let [token] = reply.array()?;
        let token = token.text()?;
        // Only a repetition can find a token that is not a number: the key was overwritten after the
        // first attempt. So the owner may hold the lock, and the error must not exclude that.
        let parsed = token::parse(&token).map(Outcome::Done);
        parsed.ok_or_else(|| unexpected_reply(&token))
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Outcome> {
        let AcquireParams { hold, count, .. } = self.params;
        let object = &hold.object;
        let found = keyspace.find::<Holds>(object.key())?;
        let free = found.is_none() && count == 1;
        let held = found.and_then(|holds| holds.value.counts.get(&*hold.field).copied());
        let token = if held == Some(count) {
            // Repeated because the answer was lost: the owner already has its token.
            read_number(keyspace, &self.keys.token)?.unwrap_or_default()
        } else if free || held.is_some() {
            let next = token::next(keyspace, &self.keys.token);
            next.ok_or_else(|| wrong_kind(object, INVALID_TOKEN))?
        } else {
            // Not used: the attempt below is refused.
            0
        };
        if let Outcome::Wait(left) = try_acquire(keyspace, self.params)? {
            return Ok(Outcome::Wait(left));
        }
        if held != Some(count) {
            keyspace.set(&self.keys.token, token, None);
        }
        Ok(Outcome::Done(token::unsigned(token)))
    }
}

/// Returns the latest token: of the latest acquisition, or advanced since; 0 if there is none.
pub(super) struct ReadToken<'a> {
    pub(super) keys: &'a FencedKeys,
}

impl Step for ReadToken<'_> {
    type Reply = u64;

    fn script(&self) -> &'static Script {
        script!("current.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![&*self.keys.token]
    }

    fn decode(&self, reply: ScriptReply) -> Result<u64> {
        token::parse(&reply.text()?).ok_or_else(|| wrong_kind(&self.keys.object, INVALID_TOKEN))
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<u64> {
        Ok(token::unsigned(
            read_number(keyspace, &self.keys.token)?.unwrap_or(0),
        ))
    }
}

/// Raises the token to `at_least`, unless it is greater, and to the epoch of the latest term, if
/// there is one. Raises that epoch, too, unless there is a leader. Returns the resulting token.
pub(super) struct AdvanceToken<'a> {
    pub(super) keys: &'a FencedKeys,
    pub(super) term: &'a str,
    pub(super) at_least: i64,
}

impl Step for AdvanceToken<'_> {
    type Reply = u64;

    fn script(&self) -> &'static Script {
        script!("numbers.lua", "advance.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![&*self.keys.token, self.term, self.keys.object.key()]
    }

    fn args(&self, args: &mut dyn Args) {
        args.number(self.at_least);
    }

    fn decode(&self, reply: ScriptReply) -> Result<u64> {
        ReadToken { keys: self.keys }.decode(reply)
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<u64> {
        let object = &self.keys.object;
        let token = read_number(keyspace, &self.keys.token)?.unwrap_or(0);
        // From the greatest number no acquisition can count up.
        if token == i64::MAX {
            return Err(wrong_kind(object, INVALID_TOKEN));
        }
        let term = keyspace.find::<Term>(self.term)?;
        let term = term.map_or_else(Term::new, |found| found.value.clone());
        let parse = |text: &String| {
            let epoch = token::parse_epoch(text).filter(|epoch| *epoch < i64::MAX);
            epoch.ok_or_else(|| wrong_kind(object, INVALID_EPOCH))
        };
        let epoch = term.get("epoch").map(parse).transpose()?;
        let latest = token.max(epoch.unwrap_or(0)).max(self.at_least);
        let is_behind = epoch.is_some_and(|epoch| epoch != latest);
        let mut has_leader = false;
        if let Some(leader) = term.get("leader").filter(|_| is_behind) {
            let holds = keyspace.find::<Holds>(object.key())?;
            has_leader = holds.is_some_and(|holds| holds.value.counts.contains_key(leader));
        }
        if latest != token {
            keyspace.set(&self.keys.token, latest, None);
        }
        if is_behind && !has_leader {
            let term: &mut Term = keyspace.find_or_create(self.term)?;
            term.insert("epoch".to_owned(), latest.to_string());
        }
        Ok(token::unsigned(latest))
    }
}

/// Deletes the token of a free lock, and the latest term of an election: its epochs are tokens of its lock.
pub(super) struct DeleteToken {
    pub(super) keys: Arc<FencedKeys>,
    pub(super) term: String,
}

impl Step for DeleteToken {
    /// Whether the lock was free.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("delete.lua")
    }

    fn keys(&self) -> Keys<'_> {
        smallvec![self.keys.object.key(), &*self.keys.token, &*self.term]
    }

    fn decode(&self, reply: ScriptReply) -> Result<bool> {
        reply.flag()
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<bool> {
        let free = !keyspace.exists(self.keys.object.key());
        if free {
            keyspace.remove(&self.keys.token);
            keyspace.remove(&self.term);
        }
        Ok(free)
    }
}

const INVALID_TOKEN: &str = "its token is no number that can be counted up";
