//! A member of a multi-lock or RedLock: a lock whose kind is erased.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tracing::Span;

use crate::error::{Error, Result};
use crate::hold::QueueKind;
use crate::join::join_all;
use crate::lease::{Expiry, Lease};
use crate::locks::{AnyLock, Busy, Lock, OwnedKind};
use crate::metrics::{Kind, KindMetrics};
use crate::name::ObjectKeys;
use crate::owner::Owner;
use crate::session::{Session, Terms};

/// A lock of any kind as a member: created `From` a [`Lock`] or a reference to one.
#[derive(Clone)]
pub struct Member {
    pub(crate) lock: AnyLock,
    reentrant: bool,
}

impl<K: OwnedKind> From<Lock<K>> for Member {
    fn from(lock: Lock<K>) -> Member {
        Member::from(&lock)
    }
}

impl<K: OwnedKind> From<&Lock<K>> for Member {
    fn from(lock: &Lock<K>) -> Member {
        Member {
            lock: lock.erased(),
            reentrant: lock.reentrant,
        }
    }
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Member").field(&self.name()).finish()
    }
}

impl Member {
    pub(crate) fn name(&self) -> &str {
        self.object().name()
    }

    pub(crate) fn object(&self) -> &Arc<ObjectKeys> {
        self.lock.kind.object()
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.lock.session
    }

    /// Returns the key's slot in a cluster.
    pub(crate) fn slot(&self) -> Option<u16> {
        self.session().store.slot(self.object().key())
    }

    /// Returns the slot that the key has or would have in a cluster, so that the order of locks is
    /// the same whether the store is known to have slots or not. The embedded store has none.
    pub(crate) fn order(&self) -> Option<u16> {
        self.session().store.order(self.object().key())
    }

    /// Returns whether both are the same lock through the same client.
    pub(crate) fn is_same(&self, other: &Member) -> bool {
        let (one, two) = (self.object(), other.object());
        Arc::ptr_eq(self.session(), other.session()) && one == two && one.layout() == two.layout()
    }

    /// Returns the terms of a hold that is requested with this lease, or with none.
    pub(crate) fn terms(&self, lease: Option<Lease>) -> Terms {
        self.session().terms(lease, self.reentrant)
    }

    /// Returns this member with the settings for a request that waits at most `wait`.
    pub(crate) fn waiting_at_most(mut self, wait: Duration) -> Member {
        if let Some(kind) = self.lock.kind.erased_waiting_at_most(wait) {
            self.lock.kind = kind;
        }
        self
    }

    /// Returns whether both are in one store, as far as is known.
    fn shares_key(&self, other: &Member) -> bool {
        let stores = [self, other].map(|member| &member.session().store);
        stores[0].shares_key(stores[1], self.object().key())
    }

    /// Returns whether one owner that requests both would wait for itself.
    fn excludes(&self, other: &Member) -> bool {
        let shared = |member: &Member| member.lock.kind.spec().queue == QueueKind::Shared;
        !Arc::ptr_eq(self.session(), other.session())
            && self.object().identity() == other.object().identity()
            && !(shared(self) && shared(other))
            && self.shares_key(other)
    }
}

/// Asks the stores which member keeps a request for all of them waiting longest.
pub(crate) async fn busy(members: &[Member]) -> Busy {
    Busy::longest(join_all(members.iter().map(|member| member.lock.busy())).await)
}

/// Removes duplicates and validates the members, because creating a handle cannot fail. Returns at
/// least one.
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
        member.object().check()?;
        member.lock.kind.check()?;
        let known = by_identity.entry(member.object().identity()).or_default();
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

/// Validates members again that have been requested: more is known about the stores of several clients once these have answered.
pub(crate) fn check_stores(members: &[Member]) -> Result<()> {
    let is_other = |member: &Member| !Arc::ptr_eq(member.session(), members[0].session());
    match members.iter().any(is_other) {
        true => validated(members).map(drop),
        false => Ok(()),
    }
}

/// Remembers the current runtime for the work of all clients.
pub(crate) fn remember_runtime(members: &[Member]) -> Result<()> {
    let mut sessions = members.iter().map(Member::session);
    sessions.try_for_each(|session| session.background.remember_runtime())
}

/// Returns the span of a request for several locks as one.
pub(crate) fn span(members: &[Member], owner: Owner) -> Span {
    tracing::debug_span!(
        "acquire",
        lock = members[0].object().full_name(),
        members = members.len(),
        owner = owner.number()
    )
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
