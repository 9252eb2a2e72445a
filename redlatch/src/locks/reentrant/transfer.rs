//! The step that puts a waiter of the same client in the place of the owner, for all kinds of lock
//! with this step: the re-entrant and the fenced lock, and the write side of a read-write lock.

use std::collections::BTreeMap;

use crate::hold::{OtherClients, Renewed, TransferParams, Transferred};
use crate::hold::{fair_waiters, requests};
use crate::keyspace::{FoundKey, Holds, Keyspace};
use crate::locks::fenced::token;
use crate::step::{ScriptReply, Step, args, script, unexpected_reply};

/// Passes the lock on to a waiter of the same client, unless other clients wait or ask for it.
/// `token_key`: the key of the fencing token, if there is one. `of_writer`: whether this is the
/// write side of a read-write lock.
pub(crate) fn transfer<'a>(
    params: TransferParams<'a>,
    token_key: Option<&'a str>,
    of_writer: bool,
) -> Step<'a, Transferred> {
    let TransferParams {
        from,
        to,
        lease,
        own_subscriptions,
    } = params;
    let object = &from.object;
    let args = args![
        &*from.field,
        object.channel(),
        &*to.field,
        lease,
        own_subscriptions.map_or(-1, i64::from),
        if of_writer { 2u32 } else { 1 },
        object.requests_key(),
    ];
    let decode = move |reply| {
        Ok(match reply {
            ScriptReply::Integer(-2) => Transferred::NotHeld,
            ScriptReply::Integer(_) => Transferred::Kept {
                others: OtherClients::default(),
            },
            ScriptReply::List(_) => {
                let [count, in_queue] = reply.array()?;
                let count = usize::try_from(count.integer()?).unwrap_or(0);
                let in_queue = in_queue.flag()?;
                Transferred::Kept {
                    others: OtherClients { count, in_queue },
                }
            }
            token => {
                let text = token.text()?;
                let token = match token_key {
                    None => Some(0),
                    Some(_) => token::parse(&text),
                };
                let token = token.ok_or_else(|| unexpected_reply(&text))?;
                Transferred::ToWaiter { token }
            }
        })
    };
    let apply = move |keyspace: &mut Keyspace| {
        let is_asked = requests::find(keyspace, from) != Renewed::Held;
        let subscribers = keyspace.subscriber_count(object.channel());
        let queued = fair_waiters::count(keyspace, object);
        let found = keyspace.find::<Holds>(object.key())?;
        let is_owned = |holds: &FoundKey<'_, Holds>| holds.value.counts.contains_key(&*from.field);
        let Some(holds) = found.filter(is_owned) else {
            return Ok(Transferred::NotHeld);
        };
        let is_only_hold = holds.value.counts.len() == 1 && holds.value.mode.is_some() == of_writer;
        let others = own_subscriptions.map_or_else(OtherClients::default, |own| OtherClients {
            count: subscribers.saturating_sub(own as usize) + queued,
            in_queue: queued > 0,
        });
        if others.count > 0 || !is_only_hold || is_asked {
            return Ok(Transferred::Kept { others });
        }
        let token = match token_key {
            None => 0,
            Some(key) => {
                let Some(next) = token::next(keyspace, key) else {
                    return Ok(Transferred::Kept {
                        others: OtherClients::default(),
                    });
                };
                keyspace.set(key, next, None);
                token::unsigned(next)
            }
        };
        if let Some(mut holds) = keyspace.find::<Holds>(object.key())? {
            holds.value.counts = BTreeMap::from([(to.field.to_string(), 1)]);
            holds.expire_after(lease.duration());
        }
        Ok(Transferred::ToWaiter { token })
    };
    let script = script!("../../hold/fair_waiters.lua", "transfer.lua");
    let keys = [object.key()].into_iter().chain(token_key);
    Step::new(script, keys, args, decode, apply)
}
