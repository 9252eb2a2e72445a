//! Compares the expirable semaphore's Lua scripts and rules over random histories.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::Permits;
use super::permit_id::{PermitId, join_ids};
use super::rules::{self, Counts, ReleaseMode};
use crate::hold::Hold;
use crate::lease::Expiry;
use crate::metrics::KindMetrics;
use crate::owner::Owner;
use crate::session::check_handoff;
use crate::step::Outcome;
use crate::step::differential::{Comparable, assert_equivalent, assert_reached, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Acquire {
        owner: u8,
        n: u8,
        lease: u32,
        permits: u32,
    },
    Release {
        ids: Vec<(u8, u8)>,
        mode: ReleaseMode,
        again: bool,
    },
    Renew {
        owner: u8,
        n: u8,
        lease: u32,
    },
    Set {
        permits: u32,
        if_absent: bool,
    },
    Add {
        delta: i64,
    },
    Count,
    CheckHandoff {
        owner: u8,
        n: u8,
    },
    UpdateLease {
        id: (u8, u8),
        lease: u32,
    },
    LeaseOf {
        id: (u8, u8),
    },
    Ask {
        id: (u8, u8),
        limit: Option<u32>,
    },
    Inspect,
    Force,
    Delete,
    Advance {
        time: u32,
    },
    SetForeign {
        deadlines: bool,
    },
    DeleteNumber,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, n, lease) = (0..3u8, 1..4u8, 1..4u32);
    let id = (0..3u8, 0..3u8);
    let mode = prop_oneof![
        Just(ReleaseMode::Held),
        Just(ReleaseMode::AllOrNone),
        Just(ReleaseMode::CountOnly)
    ];
    let ids = prop::collection::btree_set(id.clone(), 1..4).prop_map(Vec::from_iter);
    let delta = prop_oneof![
        -5..6i64,
        Just(i64::from(i32::MAX)),
        Just(-i64::from(i32::MAX))
    ];
    prop_oneof![
        10 => (owner.clone(), n.clone(), lease.clone(), prop_oneof![3 => Just(0), 1 => 1..6u32])
            .prop_map(|(owner, n, lease, permits)| Move::Acquire { owner, n, lease, permits }),
        8 => (ids, mode, any::<bool>()).prop_map(|(ids, mode, again)| Move::Release { ids, mode, again }),
        6 => (owner, n, lease.clone())
            .prop_map(|(owner, n, lease)| Move::Renew { owner, n, lease: lease - 1 }),
        8 => (0..8u32, any::<bool>()).prop_map(|(permits, if_absent)| Move::Set { permits, if_absent }),
        4 => delta.prop_map(|delta| Move::Add { delta }),
        3 => Just(Move::Count),
        1 => (0..3u8, 1..4u8).prop_map(|(owner, n)| Move::CheckHandoff { owner, n }),
        4 => (id.clone(), lease).prop_map(|(id, lease)| Move::UpdateLease { id, lease }),
        1 => id.clone().prop_map(|id| Move::LeaseOf { id }),
        4 => (id, prop::option::of(0..4u32)).prop_map(|(id, limit)| Move::Ask { id, limit }),
        1 => Just(Move::Inspect),
        2 => Just(Move::Force),
        1 => Just(Move::Delete),
        4 => (1..3u32).prop_map(|time| Move::Advance { time }),
        2 => prop_oneof![4 => Just(false), 1 => Just(true)]
            .prop_map(|deadlines| Move::SetForeign { deadlines }),
        1 => Just(Move::DeleteNumber),
    ]
}

/// Returns an id whose bytes are not text, so that both sides are compared in hex.
fn id((owner, n): (u8, u8)) -> PermitId {
    let mut bytes = [0xff; PermitId::BYTES];
    (bytes[0], bytes[1]) = (0xf0 + owner, 0xf0 + n);
    PermitId::from_bytes(bytes)
}

/// Returns the first `n` permits of an owner: some of them may be held already.
fn ids(owner: u8, n: u8) -> String {
    join_ids(&Vec::from_iter((0..n).map(|n| id((owner, n)))))
}

impl Comparable for Counts {
    fn comparable(&self) -> String {
        format!("{self:?}")
    }
}

impl Comparable for usize {
    fn comparable(&self) -> String {
        self.to_string()
    }
}

/// Counts the events that the histories must cover.
#[derive(Debug, Default)]
struct Seen {
    acquired: u32,
    acquired_with_number: u32,
    unset: u32,
    waits_for_expiry: u32,
    waits_for_message: u32,
    released: u32,
    released_only_some: u32,
    renewed: u32,
    not_renewed: u32,
    set: u32,
    too_many: u32,
    fewer_than_none: u32,
    lease_updated: u32,
    asked: u32,
    not_asked: u32,
    forced: u32,
    deleted: u32,
    wrong_kind: u32,
}

#[test]
fn lua_and_rules_agree() {
    let mut seen = Seen::default();
    assert_equivalent(moves(), async |harness, one| {
        let kind = Arc::new(Permits::new("", "name"));
        let keys = kind.keys.clone();
        let count = |what: &mut u32, happened: bool| *what += u32::from(happened);
        match one {
            Move::Acquire {
                owner,
                n,
                lease: l,
                permits,
            } => {
                let (ids, lease, permits) = (&ids(*owner, *n), lease(*l), *permits);
                let acquire = rules::acquire(&keys, ids, lease, permits);
                match harness.step(&acquire).await {
                    Ok(Some(Outcome::Wait(Expiry::Never))) => seen.waits_for_message += 1,
                    Ok(Some(Outcome::Wait(_))) => seen.waits_for_expiry += 1,
                    Ok(Some(Outcome::Done(_))) => {
                        seen.acquired += 1;
                        seen.acquired_with_number += u32::from(permits > 0);
                    }
                    Ok(None) => seen.unset += 1,
                    Err(_) => seen.wrong_kind += 1,
                }
            }
            Move::Release { ids, mode, again } => {
                let ids: Vec<_> = ids.iter().copied().map(id).collect();
                let (joined, mode) = (&join_ids(&ids), *mode);
                let requests = again.then(|| keys.object.requests_key());
                let step = rules::release(&keys, joined, mode, requests);
                let out = harness.step(&step).await.unwrap_or(0);
                count(&mut seen.released, out > 0 && mode == ReleaseMode::Held);
                count(&mut seen.released_only_some, out > 0 && out < ids.len());
            }
            Move::Renew { owner, n, lease: l } => {
                let ids = ids(*owner, *n);
                let hold = Hold::new(Owner::new(), ids, kind.clone(), KindMetrics::default());
                let renewed = harness.renew(&hold, *l).await;
                count(&mut seen.renewed, renewed);
                count(&mut seen.not_renewed, !renewed);
            }
            Move::Set { permits, if_absent } => {
                let (permits, if_absent) = (*permits, *if_absent);
                let step = rules::set(&keys, permits, if_absent);
                count(&mut seen.set, harness.step(&step).await == Ok(true));
            }
            Move::Add { delta } => {
                let step = rules::add(&keys, *delta);
                count(&mut seen.too_many, harness.step(&step).await == Ok(false));
            }
            Move::Count => {
                let counts = harness.step(&rules::count(&keys)).await;
                let none = counts.is_ok_and(|counts| counts.available < 0);
                count(&mut seen.fewer_than_none, none);
            }
            Move::CheckHandoff { owner, n } => {
                let hold = &Hold::new(
                    Owner::new(),
                    ids(*owner, *n),
                    kind.clone(),
                    KindMetrics::default(),
                );
                let object = &hold.object;
                let hold = Some(hold);
                let _ = harness.step(&check_handoff(object, hold)).await;
            }
            Move::UpdateLease { id: one, lease: l } => {
                let (id, lease) = (&id(*one).to_string(), lease(*l));
                let step = rules::update_lease(&keys, id, lease);
                let updated = harness.step(&step).await;
                count(&mut seen.lease_updated, updated == Ok(true));
            }
            Move::LeaseOf { id: one } => {
                let id = &id(*one).to_string();
                let _ = harness.step(&rules::lease_of(&keys, id)).await;
            }
            Move::Ask { id: one, limit } => {
                let (id, limit) = (&id(*one).to_string(), limit.map(time));
                let asked = harness.step(&rules::ask(&keys, id, limit)).await;
                count(&mut seen.asked, asked == Ok(true));
                count(&mut seen.not_asked, asked == Ok(false));
            }
            Move::Inspect => {
                let _ = harness.step(&rules::inspect(&keys)).await;
            }
            Move::Force => {
                let forced = harness.step(&rules::force(&keys)).await;
                count(&mut seen.forced, forced == Ok(true));
            }
            Move::Delete => {
                let deleted = harness.step(&rules::delete(&keys)).await;
                count(&mut seen.deleted, deleted == Ok(true));
            }
            // A little longer than the leases: timestamps are rounded up, and permits that were acquired
            // in the same millisecond must have expired on both sides.
            Move::Advance { time: n } => harness.advance(time(*n) + Duration::from_millis(5)).await,
            Move::SetForeign { deadlines } => {
                let key = if *deadlines {
                    &keys.deadlines
                } else {
                    keys.object.key()
                };
                harness.set_foreign(key, 5).await;
            }
            // Only the number: held permits belong to no semaphore from now on.
            Move::DeleteNumber => harness.remove(keys.object.key()).await,
        }
    });
    let Seen {
        acquired,
        acquired_with_number,
        unset,
        waits_for_expiry,
        waits_for_message,
        released,
        released_only_some,
        renewed,
        not_renewed,
        set,
        too_many,
        fewer_than_none,
        lease_updated,
        asked,
        not_asked,
        forced,
        deleted,
        wrong_kind,
    } = seen;
    let events = [
        acquired,
        acquired_with_number,
        unset,
        waits_for_expiry,
        waits_for_message,
        released,
        released_only_some,
        renewed,
        not_renewed,
        set,
        too_many,
        fewer_than_none,
        lease_updated,
        asked,
        not_asked,
        forced,
        deleted,
        wrong_kind,
    ];
    assert_reached(events);
}
