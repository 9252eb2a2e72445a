//! The step that puts a waiter of the same client in the place of the owner, for all kinds of lock with this step: the
//! re-entrant and the fenced lock, and the write side of a read-write lock.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::hold::{OtherClients, Renewed, TransferParams, Transferred};
use crate::hold::{fair_waiters, requests};
use crate::keyspace::{FoundKey, Holds, Keyspace};
use crate::primitives::fenced_lock::token;
use crate::step::{Args, Keys, Script, ScriptReply, Step, script, unexpected_reply};

/// Passes the lock on to a waiter of the same client, unless other clients wait or ask for it.
pub(crate) struct Transfer<'a> {
    pub(crate) params: TransferParams<'a>,
    /// The key of the requests to release the lock. The hold of an owner that has one does not pass on.
    pub(crate) requests: String,
    /// The key of the fencing token, if there is one.
    pub(crate) token_key: Option<&'a str>,
    /// Whether this is the write side of a read-write lock.
    pub(crate) of_writer: bool,
}

impl Step for Transfer<'_> {
    type Reply = Transferred;

    fn script(&self) -> &'static Script {
        script!("../../hold/fair_waiters.lua", "transfer.lua")
    }

    fn keys(&self) -> Keys<'_> {
        let keys = [self.params.from.object.key()].into_iter();
        keys.chain(self.token_key).collect()
    }

    fn args(&self, args: &mut dyn Args) {
        let TransferParams {
            from,
            to,
            lease,
            own_subscriptions,
        } = self.params;
        args.text(&from.field);
        args.text(from.object.channel());
        args.text(&to.field);
        args.number(lease.millis());
        args.number(own_subscriptions.map_or(-1, i64::from));
        args.number(if self.of_writer { 2 } else { 1 });
        args.text(&self.requests);
    }

    fn decode(&self, reply: ScriptReply) -> Result<Transferred> {
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
                let token = match self.token_key {
                    None => Some(0),
                    Some(_) => token::parse(&text),
                };
                let token = token.ok_or_else(|| unexpected_reply(&text))?;
                Transferred::ToWaiter { token }
            }
        })
    }

    fn apply(&self, keyspace: &mut Keyspace) -> Result<Transferred> {
        let TransferParams {
            from,
            to,
            lease,
            own_subscriptions,
        } = self.params;
        let object = &from.object;
        let is_asked = requests::find(keyspace, from) != Renewed::Held;
        let subscribers = keyspace.subscriber_count(object.channel());
        let queued = fair_waiters::count(keyspace, object);
        let found = keyspace.find::<Holds>(object.key())?;
        let is_owned = |holds: &FoundKey<'_, Holds>| holds.value.counts.contains_key(&*from.field);
        let Some(holds) = found.filter(is_owned) else {
            return Ok(Transferred::NotHeld);
        };
        let is_only_hold =
            holds.value.counts.len() == 1 && holds.value.mode.is_some() == self.of_writer;
        let others = own_subscriptions.map_or_else(OtherClients::default, |own| OtherClients {
            count: subscribers.saturating_sub(own as usize) + queued,
            in_queue: queued > 0,
        });
        if others.count > 0 || !is_only_hold || is_asked {
            return Ok(Transferred::Kept { others });
        }
        let token = match self.token_key {
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
    }
}
