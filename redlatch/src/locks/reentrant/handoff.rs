//! The step that puts a successor in the place of the owner, without the lock being free in between,
//! for all kinds whose state is a hash owner -> hold count.
//!
//! 1. The owner's field of the hash is replaced by that of the successor. Its lease replaces the old
//!    one, and may end earlier.
//! 2. If the successor has a field already, the step was repeated. Then the expiry only moves later,
//!    because the client counts the lease from when the step was sent last.
//! 3. To a [waiter](To::Waiter) of the same client the lock passes only if no other client waits, as
//!    far as the step has to look, or asks for it. A fenced lock gets the next token.
//! 4. A [ticket](To::Ticket) is not made of a hold whose owner was asked to release it, and a ticket
//!    that was asked for is not adopted: with the new owner the request would be gone, and so would
//!    the limit of a revocation. Mutant `asked-ticket-adopted`.
//! 5. A [keeper](To::Keeper) takes the place of an owner that has released the lock before its
//!    minimum time has passed ([`Acquire::at_least`](crate::Acquire::at_least)): its lease is the rest
//!    of that time. This is not refused.
//! 6. Nor is a ticket that [gets its hold back](To::ReturnedTicket), because its adoption did not
//!    succeed. A request for the hold of the adopter is then one for the ticket, and limits its lease.
//!    So does a request for the ticket if the step was repeated.
//! 7. If the owner's hold has ended, a request for it ends, too, as with a release.
//! 8. Waiters in the store are woken, because the lease that they know of may be longer. They learn
//!    the new end, and sleep until then.
//!
//! Invariant: from the acquisition until the end of the new lease, no other step acquires the lock.
//! What must not happen, and what prevents it:
//!
//! - *A late step of the replaced owner frees the lock*, acquires it or moves its end: a repeated
//!   release, a canceled attempt, a renewal. None of them finds that owner in the store, and no step
//!   has a keeper. Mutant `minimum-time-ignored`.
//! - *The same owner re-enters, with the fencing token of before.* It is not the holder, so it waits
//!   as others do.
//! - *Two owners have one token.* The script increments the token before it changes the lock. If it
//!   cannot, it changes nothing. Mutant `transfer-keeps-token`.
//! - *A writer beside a reader.* A writer that also reads remains a reader, so it is not replaced
//!   (mutant `transfer-while-reading`).
//! - *A lock of another owner moves.* The script looks for the owner. Mutant
//!   `transfer-ignores-owner`.

use std::time::Duration;

use super::rules::was_deleted;
use crate::error::{Error, Result};
use crate::hold::{
    Handoff, HandoffParams, Hold, OtherClients, Renewed, To, fair_waiters, requests,
};
use crate::keyspace::{Holds, Keyspace};
use crate::locks::fenced::token::{self, Tokens};
use crate::name::ObjectKeys;
use crate::step::{Arg, Script, ScriptReply, Step, args, script};

/// How the step differs between the kinds of lock.
pub(crate) struct Variant<'a> {
    pub(crate) script: &'static Script,
    /// Whether waiters in the store are woken. Those that poll are not.
    pub(crate) wakes: bool,
    /// Whether this is the write side of a read-write lock.
    pub(crate) writer: bool,
    /// The fencing tokens, if there are any. The script then has their `next_token`.
    pub(crate) tokens: Option<Tokens<'a>>,
}

/// Returns the script of locks whose waiters subscribe to the lock's channel, or do not subscribe.
pub(crate) fn script(tokens: Option<Tokens<'_>>) -> &'static Script {
    match tokens {
        None => script!("../../hold/fair_waiters.lua", "wake.lua", "handoff.lua"),
        Some(Tokens { grace: None, .. }) => script!(
            "../fenced/count_token.lua",
            "../../hold/fair_waiters.lua",
            "wake.lua",
            "handoff.lua"
        ),
        Some(Tokens { grace: Some(_), .. }) => script!(
            "../fenced/numbers.lua",
            "../fenced/clock_token.lua",
            "../../hold/fair_waiters.lua",
            "wake.lua",
            "handoff.lua"
        ),
    }
}

/// Puts a successor in the place of the owner. `wake`: wakes a waiter in the store.
pub(crate) fn handoff<'a>(
    params: HandoffParams<'a>,
    variant: Variant<'a>,
    wake: impl Fn(&mut Keyspace, &ObjectKeys) -> Result<()> + Send + Sync + 'a,
) -> Step<'a, Handoff> {
    let HandoffParams {
        from,
        successor,
        lease,
        to,
    } = params;
    let object = &*from.object;
    let is_waiter = matches!(to, To::Waiter { .. });
    let tokens = variant.tokens.filter(|_| is_waiter);
    let wakes = variant.wakes && !is_waiter;
    // In the hash of another kind, other programs may have set fields: a release is not refused.
    let fields = match (variant.writer, is_waiter) {
        (true, _) => 2,
        (false, true) => 1,
        (false, false) => 0,
    };
    let requests = match to {
        To::Keeper => from.requests_key(),
        _ => Some(object.requests_key()),
    };
    let mut args = args![
        &*from.field,
        object.channel(),
        successor,
        lease,
        match to {
            To::Waiter { .. } => "waiter",
            To::Ticket => "ticket",
            To::Adopter => "adopter",
            To::ReturnedTicket => "returned",
            To::Keeper => "keeper",
        },
        i64::try_from(fields).unwrap_or(0),
        requests.clone().unwrap_or_default(),
        wakes,
    ];
    if let To::Waiter { own_subscriptions } = to {
        args.push(own_subscriptions.map_or(-1, i64::from).into());
    }
    args.extend(tokens.and_then(|tokens| tokens.grace).map(Arg::from));
    let decode = move |reply| match reply {
        ScriptReply::Integer(0) => Ok(Handoff::NotHeld),
        ScriptReply::Integer(-1) => Err(not_movable(from, variant.writer)),
        ScriptReply::Integer(-2) => Err(asked(from, None)),
        ScriptReply::Integer(left) => {
            let left = u64::try_from(left - 2).unwrap_or_default();
            Err(asked(from, Some(Duration::from_millis(left))))
        }
        ScriptReply::List(_) => {
            let [count, in_queue] = reply.array()?;
            let count = usize::try_from(count.integer()?).unwrap_or(0);
            let in_queue = in_queue.flag()?;
            let others = OtherClients { count, in_queue };
            Ok(Handoff::Kept { others })
        }
        // Another program may have set something else since the token was counted up.
        token => Ok(Handoff::Done {
            token: token::parse(&token.text()?).unwrap_or(0),
        }),
    };
    let apply = move |keyspace: &mut Keyspace| {
        let request = requests::find(keyspace, from);
        let of_successor = match to {
            To::Ticket | To::ReturnedTicket => requests::find_first(keyspace, from, [successor]),
            _ => Renewed::Held,
        };
        let subscribers = keyspace.subscriber_count(object.channel());
        let queued = fair_waiters::count(keyspace, object);
        let found = keyspace.find::<Holds>(object.key())?;
        let (mut held, mut is_repeated, mut is_only_hold) = (false, false, true);
        if let Some(mut holds) = found {
            let Holds { counts, mode } = &*holds.value;
            held = counts.contains_key(&*from.field);
            is_repeated = counts.contains_key(successor);
            is_only_hold = fields == 0 || counts.len() + usize::from(mode.is_some()) == fields;
            if is_repeated {
                holds.extend_to(of_successor.limit(lease.duration()));
            }
        }
        if is_repeated {
            let token = tokens.and_then(|tokens| token::read(keyspace, tokens.key));
            return Ok(Handoff::Done {
                token: token.map_or(0, token::unsigned),
            });
        }
        if let To::Waiter {
            own_subscriptions: Some(own),
        } = to
            && held
        {
            let count = subscribers.saturating_sub(own as usize) + queued;
            let in_queue = queued > 0;
            let others = OtherClients { count, in_queue };
            if count > 0 {
                return Ok(Handoff::Kept { others });
            }
        }
        if held && !is_only_hold {
            return Err(not_movable(from, variant.writer));
        }
        let mut lease = lease.duration();
        match (to, request) {
            _ if !held || matches!(to, To::Keeper) => {
                requests::remove(keyspace, requests.as_deref(), &from.field);
            }
            (To::ReturnedTicket, _) => {
                lease = request.limit(lease);
                requests::move_to(keyspace, from, successor, lease);
            }
            (_, Renewed::Asked { limit }) => return Err(asked(from, limit)),
            _ => {}
        }
        let mut token = 0;
        if held && let Some(tokens) = tokens {
            let next = tokens.next(keyspace);
            let next = next.ok_or_else(|| not_movable(from, variant.writer))?;
            tokens.set(keyspace, next);
            token = token::unsigned(next);
        }
        if held && let Some(mut holds) = keyspace.find::<Holds>(object.key())? {
            let counts = &mut holds.value.counts;
            counts.remove(&*from.field);
            counts.insert(successor.to_owned(), 1);
            holds.expire_after(lease);
        }
        if wakes && (held || was_deleted(keyspace, held, object)) {
            wake(keyspace, object)?;
        }
        Ok(match held {
            true => Handoff::Done { token },
            false => Handoff::NotHeld,
        })
    };
    let token_key = tokens.map(|tokens| tokens.key);
    let keys = [object.key()].into_iter().chain(token_key);
    Step::new(variant.script, keys, args, decode, apply)
}

/// The feared interleaving: a request of the writer for the read side is granted just before. It
/// would read while the other owner writes.
fn not_movable(hold: &Hold, of_writer: bool) -> Error {
    Error::NotMovable {
        name: hold.object.name().to_owned(),
        reason: match of_writer {
            true => "its owner also reads; release the read side first",
            false => "the store has something else with this name",
        },
    }
}

fn asked(hold: &Hold, left: Option<Duration>) -> Error {
    let name = hold.object.name().to_owned();
    Error::Asked { name, left }
}
