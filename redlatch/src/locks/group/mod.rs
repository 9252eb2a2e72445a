//! Locks of the values of a group (Redisson: `getMultiLock(group, values)`,
//! `RedissonFasterMultiLock`): all values of a group are in one hash. A lock of one value is a kind
//! of lock like the others, and several of them are a
//! [`MultiLock`], which acquires them with one script. `rules` describes the steps.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod highway_hash;
mod rules;
mod value;

use std::sync::Arc;

use smallvec::smallvec;
use tokio::time::Instant;

pub use self::value::GroupValue;
use crate::error::Result;
use crate::hold::{AcquireParams, Hold, HoldKind, ReleaseParams, Renewal, Renewed, Spec};
use crate::keyspace::Keyspace;
use crate::lease::Lease;
use crate::locks::{Holder, Lock, OwnedKind};
use crate::metrics::Kind;
use crate::name::{GroupKeys, ObjectKeys};
use crate::step::{Outcome, Step};

/// A lock of one value of a group. [`Client::multi_lock`](crate::Client::multi_lock) locks several
/// values together (Redisson: `getMultiLock(group, values)`).
///
/// The values of a group are independent locks that share one hash, so in a cluster they lie in one
/// slot, and one script acquires several of them. Use it for many short-lived names that are often
/// locked together, such as the rows of a batch. The hash exists while any of its values is held. A
/// process that dies leaves the fields of its values there until these are acquired again, or the
/// hash expires.
///
/// All values of a group share one channel: each release wakes the first waiter of each value of
/// the group. Where many clients wait for different values, [`Client::lock`](crate::Client::lock)
/// with a name for each value costs the server less.
///
/// [`Client::inspect`](crate::Client::inspect), listings and
/// [`Client::watch`](crate::Client::watch) do not show the values of a group, because the hash
/// contains only hashes of them. [`Lock::holder`] and the other methods of each value do.
///
/// The ends of holds are dates in the hash. redlatch uses the server's clock. Redisson uses the
/// clock of each client, so the clocks of Java machines must be synchronized: a Java client whose
/// clock is ahead acquires a value before its holder's lease has ended, and the holds of one whose
/// clock is behind end early.
///
/// Locks of other kinds must not have the name of a group. On a server, a group whose name belongs
/// to a held lock is [`Error::WrongKind`](crate::Error::WrongKind), and a lock whose name is that
/// of a group waits until no value of the group is held.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let both = client.multi_lock("accounts", ["alice", "bob"]);
/// let guard = both.lock().await?;
/// assert!(client.group_lock("accounts", "bob").is_locked().await?);
/// assert!(!client.group_lock("accounts", "carol").is_locked().await?);
/// guard.unlock().await
/// # }
/// ```
pub type GroupLock = Lock<Group>;

/// Makes a [`Lock`] a [`GroupLock`], as its type parameter.
#[derive(Debug, Clone)]
pub struct Group {
    keys: Arc<GroupKeys>,
}

impl OwnedKind for Group {}

impl Group {
    pub(crate) fn new(prefix: &str, group: &str, value: &GroupValue) -> Group {
        let keys = GroupKeys::new(prefix, group, value.field(), &value.to_string());
        Group { keys: keys.into() }
    }
}

impl HoldKind for Group {
    fn object(&self) -> &Arc<ObjectKeys> {
        &self.keys.object
    }

    fn spec(&self) -> Spec {
        Spec::of(Kind::GroupLock)
    }

    fn renewal<'a>(&'a self, hold: &'a Hold) -> Renewal<'a> {
        Renewal {
            script: rules::renew_script(),
            key: hold.object.key(),
            args: smallvec![
                (&*hold.field).into(),
                (&*self.keys.value).into(),
                hold.object.channel().into()
            ],
            weight: 1,
        }
    }

    fn renew(&self, keyspace: &mut Keyspace, hold: &Hold, lease: Option<Lease>) -> Result<Renewed> {
        rules::renew(keyspace, &self.keys, hold, lease).map(Into::into)
    }

    fn release<'a>(&'a self, params: ReleaseParams<'a>) -> Step<'a, bool> {
        rules::release(params, &self.keys, None)
    }

    fn undo<'a>(&'a self, hold: &'a Hold, keep: u32) -> Option<Step<'a, bool>> {
        let lease = None;
        let left = hold.state().period.left(Instant::now());
        let params = ReleaseParams { hold, keep, lease };
        let restored_lease = Some(Lease::from_remaining(left));
        Some(rules::release(params, &self.keys, restored_lease))
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        rules::acquire(params, &self.keys)
    }

    fn inspect(&self) -> Step<'_, Vec<Holder>> {
        rules::inspect(&self.keys)
    }

    fn force(&self) -> Step<'_, bool> {
        rules::force(&self.keys)
    }
}
