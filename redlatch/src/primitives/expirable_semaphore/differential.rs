//! Compares the expirable semaphore's Lua scripts and rules over random histories.

use std::time::Duration;

use proptest::prelude::*;

use super::Permits;
use super::permit_id::{PermitId, join};
use super::rules::{
    Acquire, Add, Count, Counts, Delete, Force, Inspect, LeaseOf, Release, Set, UpdateLease, Which,
};
use crate::hold::Hold;
use crate::name::{Family, Place};
use crate::owner::Owner;
use crate::primitives::twin::{Comparable, agree, lease, time};
use crate::step::Outcome;

#[derive(Debug, Clone)]
enum Move {
    Acquire { owner: u8, n: u8, lease: u32 },
    Release { ids: Vec<(u8, u8)>, which: Which },
    Renew { owner: u8, n: u8, lease: u32 },
    Set { permits: u32, first: bool },
    Add { more: i64 },
    Count,
    UpdateLease { id: (u8, u8), lease: u32 },
    LeaseOf { id: (u8, u8) },
    Inspect,
    Force,
    Delete,
    Pass { time: u32 },
    Plant { beside: bool },
    Vanish,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, n, lease) = (0..3u8, 1..4u8, 1..4u32);
    let id = (0..3u8, 0..3u8);
    let which = prop_oneof![Just(Which::Any), Just(Which::All), Just(Which::None)];
    let ids = prop::collection::btree_set(id.clone(), 1..4).prop_map(Vec::from_iter);
    let more = prop_oneof![
        -5..6i64,
        Just(i64::from(i32::MAX)),
        Just(-i64::from(i32::MAX))
    ];
    prop_oneof![
        10 => (owner.clone(), n.clone(), lease.clone())
            .prop_map(|(owner, n, lease)| Move::Acquire { owner, n, lease }),
        4 => (ids, which).prop_map(|(ids, which)| Move::Release { ids, which }),
        4 => (owner, n, lease.clone())
            .prop_map(|(owner, n, lease)| Move::Renew { owner, n, lease: lease - 1 }),
        8 => (0..8u32, any::<bool>()).prop_map(|(permits, first)| Move::Set { permits, first }),
        2 => more.prop_map(|more| Move::Add { more }),
        2 => Just(Move::Count),
        2 => (id.clone(), lease).prop_map(|(id, lease)| Move::UpdateLease { id, lease }),
        1 => id.prop_map(|id| Move::LeaseOf { id }),
        1 => Just(Move::Inspect),
        1 => Just(Move::Force),
        1 => Just(Move::Delete),
        4 => (1..3u32).prop_map(|time| Move::Pass { time }),
        1 => prop_oneof![4 => Just(false), 1 => Just(true)]
            .prop_map(|beside| Move::Plant { beside }),
        1 => Just(Move::Vanish),
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
    join(&Vec::from_iter((0..n).map(|n| id((owner, n)))))
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
    waits_for_expiry: u32,
    waits_for_word: u32,
    released: u32,
    released_only_some: u32,
    renewed: u32,
    not_renewed: u32,
    set: u32,
    too_many: u32,
    fewer_than_none: u32,
    lease_updated: u32,
    forced: u32,
    deleted: u32,
    wrong_kind: u32,
}

#[test]
fn lua_and_rules_agree() {
    let mut seen = Seen::default();
    agree(moves(), async |twin, one| {
        let place = &std::sync::Arc::new(Place::new(Family::Permits, "", "name"));
        let count = |what: &mut u32, happened: bool| *what += u32::from(happened);
        match one {
            Move::Acquire { owner, n, lease: l } => {
                let ids = &ids(*owner, *n);
                let lease = lease(*l);
                let got = twin.step(&Acquire { place, ids, lease }).await;
                count(&mut seen.acquired, got == Ok(Outcome::Done(())));
                match got {
                    Ok(Outcome::Wait(Duration::MAX)) => seen.waits_for_word += 1,
                    Ok(Outcome::Wait(_)) => seen.waits_for_expiry += 1,
                    Ok(Outcome::Done(())) => {}
                    Err(_) => seen.wrong_kind += 1,
                }
            }
            Move::Release { ids, which } => {
                let ids: Vec<_> = ids.iter().copied().map(id).collect();
                let step = Release {
                    place,
                    ids: &join(&ids),
                    which: *which,
                };
                let out = twin.step(&step).await.unwrap_or(0);
                count(&mut seen.released, out > 0 && *which == Which::Any);
                count(&mut seen.released_only_some, out > 0 && out < ids.len());
            }
            Move::Renew { owner, n, lease: l } => {
                let place = Place::new(Family::Permits, "", "name");
                let kind = std::sync::Arc::new(Permits { n: (*n).into() });
                let ids = ids(*owner, *n);
                let hold = Hold::new(place.into(), Owner::new(), ids, kind, Default::default());
                let renewed = twin.renew(&hold, *l).await;
                count(&mut seen.renewed, renewed);
                count(&mut seen.not_renewed, !renewed);
            }
            Move::Set { permits, first } => {
                let step = Set {
                    place: place.clone(),
                    permits: *permits,
                    first: *first,
                };
                count(&mut seen.set, twin.step(&step).await == Ok(true));
            }
            Move::Add { more } => {
                let step = Add {
                    place: place.clone(),
                    more: *more,
                };
                count(&mut seen.too_many, twin.step(&step).await == Ok(false));
            }
            Move::Count => {
                let counts = twin.step(&Count { place }).await;
                let none = counts.is_ok_and(|counts| counts.available < 0);
                count(&mut seen.fewer_than_none, none);
            }
            Move::UpdateLease { id: one, lease: l } => {
                let step = UpdateLease {
                    place,
                    id: &id(*one).to_string(),
                    lease: lease(*l),
                };
                count(&mut seen.lease_updated, twin.step(&step).await == Ok(true));
            }
            Move::LeaseOf { id: one } => {
                let id = &id(*one).to_string();
                let _ = twin.step(&LeaseOf { place, id }).await;
            }
            Move::Inspect => {
                let _ = twin.step(&Inspect { place }).await;
            }
            Move::Force => {
                count(
                    &mut seen.forced,
                    twin.step(&Force { place }).await == Ok(true),
                );
            }
            Move::Delete => {
                count(
                    &mut seen.deleted,
                    twin.step(&Delete {
                        place: place.clone(),
                    })
                    .await
                        == Ok(true),
                );
            }
            // A little longer than the leases: dates are rounded up, and permits that were acquired
            // in the same millisecond must have expired on both sides.
            Move::Pass { time: n } => twin.pass(time(*n) + Duration::from_millis(5)).await,
            Move::Plant { beside } => {
                let key = if *beside {
                    place.deadlines()
                } else {
                    place.key()
                };
                twin.plant(key, 5).await;
            }
            // Only the number: held permits belong to no semaphore from now on.
            Move::Vanish => twin.remove(place.key()).await,
        }
    });
    println!("{seen:?}");
    let Seen {
        acquired,
        waits_for_expiry,
        waits_for_word,
        released,
        released_only_some,
        renewed,
        not_renewed,
        set,
        too_many,
        fewer_than_none,
        lease_updated,
        forced,
        deleted,
        wrong_kind,
    } = seen;
    let all = [
        acquired,
        waits_for_expiry,
        waits_for_word,
        released,
        released_only_some,
        renewed,
        not_renewed,
        set,
        too_many,
        fewer_than_none,
        lease_updated,
        forced,
        deleted,
        wrong_kind,
    ];
    assert!(all.iter().all(|times| *times > 20), "hardly ever: {all:?}");
}
