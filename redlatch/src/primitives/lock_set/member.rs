//! A member of a multi-lock or RedLock: a lock whose kind is erased.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::join::Boxed;
use crate::lease::{Expiry, Lease};
use crate::metrics::{Kind, KindMetrics};
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::primitives::lock::{AcquireParams, Lock, OwnedKind, report};
use crate::session::{HoldRef, Session, Terms};
use crate::step::{Outcome, Step};
use crate::wait::QueueKind;

/// A lock of any kind as a member: created `From` a [`Lock`] or a reference to one.
#[derive(Clone)]
pub struct Member(pub(crate) Arc<dyn AnyLock>);

impl<K: OwnedKind> From<Lock<K>> for Member {
    fn from(lock: Lock<K>) -> Member {
        Member(Arc::new(lock))
    }
}

impl<K: OwnedKind> From<&Lock<K>> for Member {
    fn from(lock: &Lock<K>) -> Member {
        Member(Arc::new(lock.clone()))
    }
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Member").field(&self.name()).finish()
    }
}

/// The operations of a lock whose kind is erased.
pub(crate) trait AnyLock: Send + Sync {
    fn session(&self) -> &Arc<Session>;
    fn object(&self) -> &Arc<ObjectKeys>;
    fn is_reentrant(&self) -> bool;
    fn hold_ref(&self, owner: Owner) -> Result<HoldRef>;
    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome>;
    fn channel<'a>(&'a self, hold: &'a Hold) -> &'a str;
    fn queue_kind(&self) -> QueueKind;
    fn pause(&self, tries: u32) -> Option<Duration>;
    fn waiter_ttl(&self) -> Option<Lease>;
    fn is_held_by(&self, owner: Owner) -> Boxed<'_, Result<bool>>;
    fn report(&self, waiting: Arc<Hold>, since: Instant) -> Boxed<'static, ()>;
}

impl<K: OwnedKind> AnyLock for Lock<K> {
    fn session(&self) -> &Arc<Session> {
        &self.session
    }

    fn object(&self) -> &Arc<ObjectKeys> {
        self.kind.object()
    }

    fn is_reentrant(&self) -> bool {
        self.reentrant
    }

    fn hold_ref(&self, owner: Owner) -> Result<HoldRef> {
        Lock::hold_ref(self, owner)
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        self.kind.acquire(params)
    }

    fn channel<'a>(&'a self, hold: &'a Hold) -> &'a str {
        self.kind.channel(hold)
    }

    fn queue_kind(&self) -> QueueKind {
        K::QUEUE
    }

    fn pause(&self, tries: u32) -> Option<Duration> {
        self.kind.pause(tries)
    }

    fn waiter_ttl(&self) -> Option<Lease> {
        self.kind.waiter_ttl()
    }

    fn is_held_by(&self, owner: Owner) -> Boxed<'_, Result<bool>> {
        Box::pin(Lock::is_held_by(self, owner))
    }

    fn report(&self, waiting: Arc<Hold>, since: Instant) -> Boxed<'static, ()> {
        report(self.clone(), waiting, since)
    }
}

impl Member {
    pub(crate) fn name(&self) -> &str {
        self.0.object().name()
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        self.0.session()
    }

    /// Returns the key's slot in a cluster.
    pub(crate) fn slot(&self) -> Option<u16> {
        self.session().store.slot(self.0.object().key())
    }

    /// Returns the slot that the key has or would have in a cluster, so that the order of locks is the
    /// same whether the store is known to have slots or not. The embedded store has none.
    pub(crate) fn order(&self) -> Option<u16> {
        self.session().store.order(self.0.object().key())
    }

    /// Returns whether both are the same lock through the same client.
    pub(crate) fn is_same(&self, other: &Member) -> bool {
        let (one, two) = (self.0.object(), other.0.object());
        Arc::ptr_eq(self.session(), other.session()) && one == two && one.layout() == two.layout()
    }

    /// Returns the terms of a hold that is requested with this lease, or with none.
    pub(crate) fn terms(&self, lease: Option<Lease>) -> Terms {
        self.session().terms(lease, self.0.is_reentrant())
    }

    /// Returns whether one owner that requests both would wait for itself.
    fn excludes(&self, other: &Member) -> bool {
        let shared = |member: &Member| member.0.queue_kind() == QueueKind::Shared;
        !Arc::ptr_eq(self.session(), other.session())
            && self.0.object().identity() == other.0.object().identity()
            && !(shared(self) && shared(other))
            && self.session().store.address() == other.session().store.address()
    }
}

/// Removes duplicates and validates the members, because creating a handle cannot fail.
pub(crate) fn validated(members: &[Member]) -> Result<Vec<Member>> {
    if members.is_empty() {
        return Err(Error::InvalidMembers {
            reason: "there are none; specify at least one".into(),
        });
    }
    let mut all: Vec<Member> = Vec::with_capacity(members.len());
    // There may be thousands, so each is compared only with those of its name.
    let mut by_identity: HashMap<&str, Vec<&Member>> = HashMap::with_capacity(members.len());
    for member in members {
        member.0.object().check()?;
        let known = by_identity.entry(member.0.object().identity()).or_default();
        if known.iter().any(|known| known.is_same(member)) {
            continue;
        }
        if known.iter().any(|known| known.excludes(member)) {
            return Err(Error::InvalidMembers {
                reason: format!(
                    "{:?} is requested through two clients of one store, so one would wait for the \
                     other; use the same client for both",
                    member.name()
                ),
            });
        }
        known.push(member);
        all.push(member.clone());
    }
    Ok(all)
}

/// Returns the metrics of requests for several locks as one, of the first member's client.
pub(crate) fn request_metrics(members: &[Member], kind: Kind) -> KindMetrics {
    let first = members.first();
    first.map_or_else(KindMetrics::default, |member| {
        member.session().metrics().of(kind, None)
    })
}

/// Returns the shortest outage limit that is set for the members' clients.
pub(crate) fn shortest_outage_limit(members: &[Member]) -> Option<Expiry> {
    let limits = members.iter();
    limits
        .filter_map(|member| member.session().outage_limit)
        .min()
}
