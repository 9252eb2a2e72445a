//! What a kind of lock, or of permits, defines: its steps, and what its holds and waiters may do.
//! Everything above is written once, and does not know the kind.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::{Hold, OtherClients};
use crate::client_registry::RegistryEntry;
use crate::error::Result;
use crate::keyspace::Keyspace;
use crate::lease::{Expiry, Lease};
use crate::metrics::Kind;
use crate::name::ObjectKeys;
use crate::owner::{ClientId, Owner, OwnerId};
use crate::step::{Outcome, Script, ScriptReply, Step};

/// How much of an object a request acquires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// All of it: a lock.
    Whole,
    /// This many permits.
    Permits(u32),
}

/// The queues of an object. A waiter that can share the object does not wait behind one that
/// cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueKind {
    Exclusive,
    Shared,
}

/// The properties that all holds of a kind share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spec {
    /// The kind of which its metrics are.
    pub(crate) metric: Kind,
    /// The client's queue in which requests wait.
    pub(crate) queue: QueueKind,
    /// Whether callers can name the owner and acquire again for it. Only permits have none: others can acquire the rest of
    /// the object.
    pub(crate) has_owner: bool,
    /// Whether waiters poll instead of being woken.
    pub(crate) polls: bool,
    /// Whether a step of another owner may grant the object to a waiter. If not, each acquisition is requested.
    pub(crate) grants: bool,
    /// Whether a request may take over the hold of another one of this client. If not, each acquisition
    /// needs the store.
    pub(crate) local_handoff: bool,
    /// Whether a release may [put a waiter](To::Waiter) of this client in the place of the owner.
    pub(crate) store_handoff: bool,
    /// Whether a full release frees the object, or a part that others can acquire, and publishes that.
    pub(crate) release_frees: bool,
}

impl Spec {
    /// Returns the specification of an exclusive lock whose waiters are woken and always ask the store.
    pub(crate) const fn of(metric: Kind) -> Spec {
        Spec {
            metric,
            queue: QueueKind::Exclusive,
            has_owner: true,
            polls: false,
            grants: false,
            local_handoff: false,
            store_handoff: false,
            release_frees: true,
        }
    }
}

/// One kind, with the keys of an object and the settings of a handle.
pub(crate) trait HoldKind: Send + Sync + 'static {
    /// The object that is held.
    fn object(&self) -> &Arc<ObjectKeys>;

    fn spec(&self) -> Spec;

    /// Acquires the object, or returns how long another owner may still hold it.
    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome>;

    /// Sets the hold count in the store. 0 releases the hold, and removes anything that its owner left in the
    /// store while it waited. Replies whether the owner held it.
    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool>;

    /// Returns how a server renews a hold.
    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a>;

    /// The rule for the same. Without a lease nothing changes, and it returns whether the hold exists.
    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed>;

    /// Returns the holders.
    fn inspect(&self) -> Step<'_, Vec<Holder>>;

    /// Removes all holds, whichever owner has them. Returns whether there were any.
    fn force(&self) -> Step<'_, bool>;

    /// Puts a successor in the place of the owner, in one step.
    fn handoff<'a>(&'a self, params: HandoffParams<'a>) -> Option<Step<'a, Handoff>> {
        let _ = params;
        None
    }

    /// Grants the object to the owner that waits first in the queue of a fair lock with the same key, if the object is free, or
    /// wakes it. Releases do not look at that queue.
    fn serve_queue<'a>(&'a self, object: &Arc<ObjectKeys>) -> Option<Step<'a, ()>> {
        let _ = object;
        None
    }

    /// The step that undoes an acquisition within the same script. It notifies no waiter, because no other
    /// client can have seen the acquisition. It sets the hold count back to `keep` and the end of the lease
    /// to its period's end.
    ///
    /// A kind with this step can be part of a script that acquires all of several objects or none. Its
    /// acquisition script must reply a number if the object is not available, and anything else if it was
    /// acquired.
    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<Step<'a, bool>> {
        let _ = (hold, keep);
        None
    }

    /// Checks the settings. Called when the lock is used, because creating a handle cannot fail.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns this kind for a caller that waits at most `wait`, if that changes the settings.
    fn waiting_at_most(&self, wait: Duration) -> Option<Self>
    where
        Self: Sized,
    {
        let _ = wait;
        None
    }

    /// The same for a kind that is known at run time.
    fn erased_waiting_at_most(&self, wait: Duration) -> Option<Arc<dyn HoldKind>> {
        let _ = wait;
        None
    }

    /// Returns the hash field that identifies an owner in the store.
    fn field(&self, client: &ClientId, owner: Owner) -> String {
        self.object().field(client.owner_id(owner).into())
    }

    /// Returns the channel that wakes only this owner, if waiters have a channel each.
    fn waiter_channel(&self, field: &str) -> Option<String> {
        let _ = field;
        None
    }

    /// Returns the channel on which a waiter is woken.
    fn channel<'a>(&'a self, hold: &'a Hold) -> &'a str {
        let shared = hold.object.channel();
        hold.waiter_channel.as_deref().unwrap_or(shared)
    }

    /// Returns how long to sleep before the next attempt, if waiters poll. `tries`: the number of earlier
    /// pauses.
    fn pause(&self, tries: u32) -> Option<Duration> {
        let _ = tries;
        None
    }

    /// How long the store remembers a waiter, if it does. Giving up then requires a step.
    fn waiter_ttl(&self) -> Option<Lease> {
        None
    }

    /// Returns how much of the object a hold is.
    fn share(&self) -> Share {
        Share::Whole
    }

    /// Another object that the same owner may hold and that blocks waiters for this one. An owner that
    /// holds it must not wait behind them.
    fn sibling(&self) -> Option<&Arc<ObjectKeys>> {
        None
    }
}

/// The arguments of an acquisition.
#[derive(Clone, Copy)]
pub(crate) struct AcquireParams<'a> {
    pub(crate) hold: &'a Hold,
    /// The requested hold count, so that sending the step twice has the effect of sending it once.
    pub(crate) count: u32,
    pub(crate) lease: Lease,
    /// Whether the request is repeated if the lock is not available now.
    pub(crate) waits: bool,
    /// Number of the request, if the owner accepts a grant of the lock; else 0.
    pub(crate) request_number: i64,
}

#[cfg(test)]
impl<'a> AcquireParams<'a> {
    /// Returns the arguments of a request that is not repeated.
    pub(crate) fn without_waiting(hold: &'a Hold, count: u32, lease: Lease) -> AcquireParams<'a> {
        AcquireParams {
            hold,
            count,
            lease,
            waits: false,
            request_number: 0,
        }
    }
}

/// The arguments of a release.
#[derive(Clone, Copy)]
pub(crate) struct ReleaseParams<'a> {
    pub(crate) hold: &'a Hold,
    /// The hold count to keep; 0 releases the hold.
    pub(crate) keep: u32,
    /// The new lease; `None` leaves it unchanged.
    pub(crate) lease: Option<Lease>,
}

impl ReleaseParams<'_> {
    /// Returns the key of the requests from which this has to remove the owner: see [`Hold::requests_key`].
    pub(crate) fn requests_key(&self) -> Option<String> {
        self.hold.requests_key().filter(|_| self.keep == 0)
    }
}

/// The arguments of a step that puts a successor in the place of the owner.
#[derive(Clone, Copy)]
pub(crate) struct HandoffParams<'a> {
    pub(crate) from: &'a Hold,
    /// The successor as the store knows it. It has no other hold of the object.
    pub(crate) successor: &'a str,
    /// Its lease, which may end earlier than that of the owner.
    pub(crate) lease: Lease,
    pub(crate) to: To,
}

/// What the successor of an owner is, and so when it takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    /// A waiter of the same client, unless the owner was asked to release the object, or other clients wait.
    Waiter {
        /// Number of this client's subscriptions to the object's channel. `None`: others are not counted.
        own_subscriptions: Option<u32>,
    },
    /// A ticket, unless the owner was asked to release the object.
    Ticket,
    /// The owner that adopts a ticket, unless the ticket was asked for.
    Adopter,
    /// A ticket whose adoption did not succeed, in any case. If the adopter was asked to release the object, the ticket is.
    ReturnedTicket,
    /// An owner that keeps the object after the release of this one, in any case.
    Keeper,
}

/// Result of a handoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handoff {
    /// The successor holds the object, with hold count 1. A waiter for a fenced lock has this token, all others 0.
    Done { token: u64 },
    /// The owner still holds the object, because other clients wait for it.
    Kept { others: OtherClients },
    /// The owner did not hold the object. Nothing changed.
    NotHeld,
}

/// Result of the renewal, or of the check, of one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renewed {
    /// The owner does not hold the object.
    NotHeld,
    /// The owner holds the object.
    Held,
    /// The owner holds the object, and was asked to release it. With a limit, the lease was extended until then at most.
    Asked {
        /// Time until the hold is not renewed any more.
        limit: Option<Duration>,
    },
}

impl Renewed {
    pub(crate) fn is_held(self) -> bool {
        self != Renewed::NotHeld
    }

    /// Returns the lease that a renewal with `lease` gives: less if the hold was revoked.
    pub(crate) fn limit(self, lease: Duration) -> Duration {
        match self {
            Renewed::Asked { limit: Some(limit) } => lease.min(limit),
            _ => lease,
        }
    }

    /// Parses the reply of a script: 0 not held, 1 held, -1 asked without a limit, else the milliseconds until the limit
    /// plus 2.
    pub(crate) fn parse(reply: ScriptReply) -> Result<Renewed> {
        Ok(match reply.integer()? {
            0 => Renewed::NotHeld,
            1 => Renewed::Held,
            left => Renewed::Asked {
                limit: u64::try_from(left - 2).ok().map(Duration::from_millis),
            },
        })
    }
}

impl From<bool> for Renewed {
    fn from(held: bool) -> Renewed {
        match held {
            true => Renewed::Held,
            false => Renewed::NotHeld,
        }
    }
}

/// How a server renews one hold: with a script that renews many, of all kinds that share it.
///
/// KEYS of the script are the keys of the holds; ARGV are the lease (0: only check) and then the arguments of
/// each hold. Its reply for each: see [`Renewed::parse`].
///
/// The script also wakes a waiter for each lock that disappeared without a release. Otherwise waiters sleep
/// until the end of the lease that the store last reported to them.
pub(crate) struct Renewal<'a> {
    pub(crate) script: &'static Script,
    /// The key by which the script finds the hold.
    pub(crate) key: &'a str,
    pub(crate) args: SmallVec<[Cow<'a, str>; 3]>,
    /// Cost for the server, relative to a plain lock.
    pub(crate) weight: usize,
}

impl<'a> Renewal<'a> {
    /// Returns the renewal of a lock. The script wakes a waiter on this channel.
    pub(crate) fn of_lock(
        script: &'static Script,
        hold: &'a Hold,
        channel: &'a str,
    ) -> Renewal<'a> {
        Renewal {
            script,
            key: hold.object.key(),
            args: smallvec![(&*hold.field).into(), channel.into()],
            weight: 1,
        }
    }
}

/// A holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The owner that holds the lock.
    pub owner: OwnerId,
    /// Hold count: more than 1 if the owner re-entered the lock.
    pub holds: u32,
    /// When the store ends the hold unless it is renewed.
    pub remaining: Expiry,
    /// What its client has registered about it, if it has: see [`ClientBuilder::registry`](crate::ClientBuilder::registry). Only
    /// [`Client::inspect`](crate::Client::inspect) and listings read that.
    pub registered: Option<RegistryEntry>,
}

impl Holder {
    pub(crate) fn new(owner: OwnerId, holds: u32, remaining: Expiry) -> Holder {
        Holder {
            owner,
            holds,
            remaining,
            registered: None,
        }
    }
}
