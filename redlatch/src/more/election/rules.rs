//! The election's steps: those of the fair lock, with a term.
//!
//! State: the fair lock's keys, the fencing token of that lock, and the latest term, a hash that
//! never expires: its epoch, leader, value, and the revision of that value.
//!
//! * Acquire: as the fair lock. If the candidate acquires the lock, a term begins: the token is
//!   incremented and is the epoch, and the candidate is its leader. A repetition after a lost
//!   answer finds the term and returns its epoch.
//! * Advance, delete: the steps of the fenced lock. The token becomes at least the epoch of the
//!   term, which earlier versions counted up without it, and so does the epoch of the term. But a
//!   leader keeps its epoch.
//! * Proclaim: changes the value, if the owner holds the lock and leads the latest term.
//! * Read: the leader is that of the latest term, if it still holds the lock. Otherwise there is
//!   none.
//! * Release: as the fair lock, after moving a successor to the head of the queue. The turn of the
//!   next candidate, which may hang, counts from the release, not from the end of the lease.
//!
//! Each change publishes on the lock's channel, where the fair lock publishes when its queue is
//! empty. The lock and the term change in one step, so an owner that holds the lock by [`acquire`]
//! leads the latest term.

use std::time::Duration;

use super::Leader;
use crate::error::Result;
use crate::hold::{Hold, ReleaseParams};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::{self, Expiry, Lease};
use crate::locks::fair::FairQueue;
use crate::locks::fenced::token::{self, INVALID_EPOCH, Term};
use crate::locks::reentrant::rules::wait_outcome;
use crate::locks::rules::wrong_kind;
use crate::name::ElectionKeys;
use crate::step::{Outcome, Script, ScriptReply, Step, args, script};

/// Returns the keys of steps on the term: the lock, which its leader has to hold, and the term.
fn term_keys(keys: &ElectionKeys) -> [&str; 2] {
    [keys.fair.object.key(), &keys.term]
}

fn read_term(keyspace: &mut Keyspace, keys: &ElectionKeys) -> Result<Term> {
    let found = keyspace.find::<Term>(&keys.term)?;
    Ok(found.map_or_else(Term::new, |found| found.value.clone()))
}

fn write_term<const N: usize>(
    keyspace: &mut Keyspace,
    keys: &ElectionKeys,
    fields: [(&str, String); N],
) -> Result<()> {
    let term: &mut Term = keyspace.find_or_create(&keys.term)?;
    term.extend(fields.map(|(field, text)| (field.to_owned(), text)));
    keyspace.publish(keys.fair.object.channel(), 0);
    Ok(())
}

fn holds_lock(keyspace: &mut Keyspace, keys: &ElectionKeys, owner: &str) -> Result<bool> {
    let holds = keyspace.find::<Holds>(keys.fair.object.key())?;
    Ok(holds.is_some_and(|holds| holds.value.counts.contains_key(owner)))
}

fn parse_epoch(keys: &ElectionKeys, text: &str) -> Result<i64> {
    token::parse_epoch(text).ok_or_else(|| wrong_kind(&keys.fair.object, INVALID_EPOCH))
}

fn parse_leader(keys: &ElectionKeys, epoch: &str, owner: &str, value: String) -> Result<Leader> {
    let epoch = token::unsigned(parse_epoch(keys, epoch)?);
    let owner = owner.into();
    Ok(Leader {
        epoch,
        owner,
        value,
    })
}

/// Acquires the election's lock for a candidate whose turn it is, and begins its term. Replies the
/// epoch. `lock`: the fair lock's step.
pub(super) fn acquire<'a>(
    lock: Step<'a, Outcome>,
    hold: &'a Hold,
    keys: &'a ElectionKeys,
    value: &'a str,
) -> Step<'a, Outcome> {
    static SCRIPT: Script = Script::new(concat!(
        include_str!("../../locks/expire.lua"),
        include_str!("../../locks/fair/queue.lua"),
        include_str!("../../locks/fair/turn.lua"),
        include_str!("../../locks/fenced/numbers.lua"),
        "local function acquire_lock()\n",
        include_str!("../../locks/fair/acquire.lua"),
        "end\n",
        include_str!("acquire.lua"),
    ));
    let mut all_keys = lock.keys().clone();
    all_keys.extend([(&*keys.term).into(), (&*keys.token).into()]);
    let mut args = lock.args().clone();
    args.push(value.into());
    let decode = move |reply| {
        if let ScriptReply::Integer(left) = reply {
            return wait_outcome(&hold.object, Expiry::from_millis(left));
        }
        let [epoch] = reply.array()?;
        parse_epoch(keys, &epoch.text()?).map(|epoch| Outcome::Done(token::unsigned(epoch)))
    };
    let apply = move |keyspace: &mut Keyspace| {
        let candidate = &*hold.field;
        let term = read_term(keyspace, keys)?;
        let epoch = term.get("epoch");
        let epoch = epoch.map_or(Ok(0), |epoch| parse_epoch(keys, epoch))?;
        let latest = token::read(keyspace, &keys.token);
        let next = latest.and_then(|latest| latest.max(epoch).checked_add(1));
        let next = next.ok_or_else(|| wrong_kind(&keys.fair.object, INVALID_EPOCH))?;
        let held = holds_lock(keyspace, keys, candidate)?;
        if let Outcome::Wait(left) = lock.apply(keyspace)? {
            return Ok(Outcome::Wait(left));
        }
        if held && term.get("leader").is_some_and(|leader| leader == candidate) {
            return Ok(Outcome::Done(token::unsigned(epoch)));
        }
        keyspace.set(&keys.token, next, None);
        let fields = [
            ("epoch", next.to_string()),
            ("leader", candidate.to_owned()),
            ("value", value.to_owned()),
            ("revision", "0".to_owned()),
        ];
        write_term(keyspace, keys, fields)?;
        Ok(Outcome::Done(token::unsigned(next)))
    };
    Step::new(&SCRIPT, all_keys, args, decode, apply)
}

/// Releases the election's lock, and wakes observers. Replies whether the owner held the lock.
/// `lock`: the fair lock's step. `successor`: the candidate that becomes the head of the queue, if
/// it waits. `turn`: how long the next candidate keeps its turn at most.
pub(super) fn release<'a>(
    lock: Step<'a, bool>,
    params: ReleaseParams<'a>,
    keys: &'a ElectionKeys,
    successor: Option<&'a str>,
    turn: Lease,
) -> Step<'a, bool> {
    static SCRIPT: Script = Script::new(concat!(
        include_str!("../../locks/expire.lua"),
        include_str!("../../locks/fair/queue.lua"),
        "local function release_lock()\n",
        include_str!("../../locks/fair/release.lua"),
        "end\n",
        include_str!("release.lua"),
    ));
    let all_keys = lock.keys().clone();
    let mut args = lock.args().clone();
    args.extend(args![successor.unwrap_or_default(), turn]);
    let apply = move |keyspace: &mut Keyspace| {
        let ReleaseParams { hold, keep, .. } = params;
        let fair = &keys.fair;
        if keep == 0
            && let Some(successor) = successor
            && holds_lock(keyspace, keys, &hold.field)?
        {
            let left = keyspace.remaining(fair.object.key());
            let left = left.and_then(Expiry::duration).unwrap_or_default();
            move_to_head(&mut FairQueue::new(keyspace, fair), successor, left)?;
        }
        let released = lock.apply(keyspace)?;
        if !released || keep > 0 {
            return Ok(released);
        }
        let mut queue = FairQueue::new(keyspace, fair);
        if let Some(head) = queue.owner_at(0)? {
            let turn_end = queue.now_ms().saturating_add(turn.millis());
            let late = queue.timeout_of(&head)?.unwrap_or(0) - turn_end;
            if late > 0 {
                queue.shift(0, -late)?;
            }
            keyspace.publish(fair.object.channel(), 0);
        }
        Ok(true)
    };
    Step::new(&SCRIPT, all_keys, args, ScriptReply::flag, apply)
}

/// Moves a candidate to the head of the queue, if it waits. `left`: the remaining lease.
fn move_to_head(queue: &mut FairQueue<'_>, candidate: &str, left: Duration) -> Result<()> {
    let position = queue.position_of(candidate)?;
    let Some((position, before)) = position.and_then(|at| Some((at, at.checked_sub(1)?))) else {
        return Ok(());
    };
    let earlier_timeout = match queue.owner_at(before)? {
        Some(earlier) => queue.timeout_of(&earlier)?,
        None => None,
    };
    let (Some(timeout), Some(earlier_timeout)) = (queue.timeout_of(candidate)?, earlier_timeout)
    else {
        // The timeouts were lost: the order stays as it is.
        return Ok(());
    };
    let wait = timeout - earlier_timeout;
    queue.remove(position)?;
    queue.shift(0, wait)?;
    queue.shift(position, -wait)?;
    let left = lease::millis(left);
    let timeout = queue.now_ms().saturating_add(left).saturating_add(wait);
    queue.push_front(candidate, timeout)
}

/// Changes the value of the leader's term. Replies whether the owner leads. `revision`: the number
/// of the value in this term, from 1: a value that arrives after a later one is ignored.
pub(super) fn proclaim<'a>(
    keys: &'a ElectionKeys,
    leader: &'a str,
    revision: i64,
    value: &'a str,
) -> Step<'a, bool> {
    Step::new(
        script!("proclaim.lua"),
        term_keys(keys),
        args![leader, revision, value, keys.fair.object.channel()],
        ScriptReply::flag,
        move |keyspace| {
            let term = read_term(keyspace, keys)?;
            if !holds_lock(keyspace, keys, leader)?
                || term.get("leader").is_none_or(|latest| latest != leader)
            {
                return Ok(false);
            }
            let latest = term.get("revision").and_then(|text| text.parse().ok());
            if latest.unwrap_or(0) < revision {
                let fields = [
                    ("value", value.to_owned()),
                    ("revision", revision.to_string()),
                ];
                write_term(keyspace, keys, fields)?;
            }
            Ok(true)
        },
    )
}

/// Returns the current leader and the remaining time of its lease.
pub(super) fn read(keys: &ElectionKeys) -> Step<'_, Option<(Leader, Expiry)>> {
    Step::new(
        script!("read.lua"),
        term_keys(keys),
        args![],
        move |reply| {
            if reply == ScriptReply::Nil {
                return Ok(None);
            }
            let [epoch, leader, value, left] = reply.array()?;
            let leader = parse_leader(keys, &epoch.text()?, &leader.text()?, value.text()?)?;
            Ok(Some((leader, Expiry::from_millis(left.integer()?))))
        },
        move |keyspace| {
            let term = read_term(keyspace, keys)?;
            let [epoch, leader, value] = ["epoch", "leader", "value"].map(|field| term.get(field));
            let (Some(epoch), Some(leader), Some(value)) = (epoch, leader, value) else {
                return Ok(None);
            };
            if !holds_lock(keyspace, keys, leader)? {
                return Ok(None);
            }
            let leader = parse_leader(keys, epoch, leader, value.clone())?;
            let left = keyspace.remaining(keys.fair.object.key());
            Ok(left.map(|left| (leader, left)))
        },
    )
}
