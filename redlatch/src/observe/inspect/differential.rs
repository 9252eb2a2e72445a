//! Compares script and rule of the listing step on any data under a name. The steps of other
//! primitives create the data: each of their tests covers its own primitive, this one how listings
//! show them.

use std::time::Duration;

use proptest::prelude::*;

use super::rules::{Inspected, inspect_names};
use super::{ObjectState, Waiter};
use crate::hold::{AcquireParams, HoldKind as _};
use crate::lease::Expiry;
use crate::locks::Reentrant;
use crate::locks::fenced::Fenced;
use crate::locks::permits::HeldPermit;
use crate::name::CandidateKeys;
use crate::step::differential::{Comparable, assert_equivalent, hold, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Lock { owner: u8, lease: u32 },
    Fence { owner: u8, lease: u32 },
    Number { number: i64 },
    Advance { time: u32 },
    Force,
    Inspect,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..3u8, 1..4u32);
    prop_oneof![
        3 => (owner.clone(), lease.clone()).prop_map(|(owner, lease)| Move::Lock { owner, lease }),
        3 => (owner, lease).prop_map(|(owner, lease)| Move::Fence { owner, lease }),
        1 => any::<i64>().prop_map(|number| Move::Number { number }),
        2 => (1..3u32).prop_map(|time| Move::Advance { time }),
        1 => Just(Move::Force),
        4 => Just(Move::Inspect),
    ]
}

#[test]
fn lua_and_rules_agree() {
    assert_equivalent(moves(), async |harness, one| match *one {
        Move::Lock { owner, lease: n } => {
            let hold = hold(owner, Reentrant::new("", "name"));
            let params = AcquireParams::without_waiting(&hold, 1, lease(n));
            let _ = harness.step(&hold.kind.acquire(params)).await;
        }
        Move::Fence { owner, lease: n } => {
            let hold = hold(owner, Fenced::new("", "name"));
            let params = AcquireParams::without_waiting(&hold, 1, lease(n));
            let _ = harness.step(&hold.kind.acquire(params)).await;
        }
        Move::Number { number } => harness.set_foreign("name", number).await,
        Move::Advance { time: n } => harness.advance(time(n)).await,
        Move::Force => {
            let _ = harness.step(&Reentrant::new("", "name").force()).await;
        }
        Move::Inspect => {
            let names = ["name", "none"].map(|name| CandidateKeys::new(name.into()));
            let _ = harness.step(&inspect_names(&names)).await;
        }
    });
}

impl Comparable for Vec<Inspected> {
    fn comparable(&self) -> String {
        let units = |left: Duration| (left.as_secs() + 50_000) / 100_000;
        let rounded = |left: Expiry| left.duration().map(units);
        let waits = |queue: &[Waiter]| {
            let wait = |it: &Waiter| {
                (
                    it.owner.clone(),
                    it.writes,
                    it.permits,
                    rounded(it.remaining),
                )
            };
            queue.iter().map(wait).collect::<Vec<_>>()
        };
        let one = |seen: &Inspected| match seen {
            Ok(None) => "nothing".to_owned(),
            Err(_) => "something else".to_owned(),
            Ok(Some(ObjectState::Lock {
                holder,
                queue,
                token,
            })) => {
                let holder = holder.iter().cloned().collect::<Vec<_>>().comparable();
                format!("lock {holder} {:?} {token:?}", waits(queue))
            }
            Ok(Some(ObjectState::ReadWriteLock { writer, readers })) => {
                let writer = writer.iter().cloned().collect::<Vec<_>>().comparable();
                format!("{writer}; {}", readers.comparable())
            }
            Ok(Some(ObjectState::FairReadWriteLock {
                writer,
                readers,
                queue,
            })) => {
                let writer = writer.iter().cloned().collect::<Vec<_>>().comparable();
                let readers = readers.comparable();
                format!("fair {writer}; {readers}; {:?}", waits(queue))
            }
            Ok(Some(ObjectState::FairSemaphore { holders, queue })) => {
                format!("{}; {:?}", holders.comparable(), waits(queue))
            }
            Ok(Some(ObjectState::Counter { value, remaining })) => {
                format!("{value} {:?}", rounded(*remaining))
            }
            Ok(Some(ObjectState::ExpirableSemaphore { available, held })) => {
                let permit = |permit: &HeldPermit| (permit.id, rounded(permit.remaining));
                let mut permits: Vec<_> = held.iter().map(permit).collect();
                permits.sort();
                format!("{available} {permits:?}")
            }
        };
        self.iter().map(one).collect::<Vec<_>>().join("\n")
    }
}
