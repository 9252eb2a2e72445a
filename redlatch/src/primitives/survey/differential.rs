//! Compares script and rule of the listing step on any data under a name. The steps of other
//! primitives create the data: each of their tests covers its own primitive, this one how they look in listings.

use std::time::Duration;

use proptest::prelude::*;

use super::rules::Survey;
use super::{ObjectState, OutPermit, Waiting};
use crate::name::{Beside, Family};
use crate::primitives::fenced_lock::Fenced;
use crate::primitives::handle::{Ask, Reentrant, Rules as _};
use crate::primitives::twin::{Comparable, agree, hold, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Lock { owner: u8, lease: u32 },
    Fence { owner: u8, lease: u32 },
    Number { number: i64 },
    Pass { time: u32 },
    Force,
    Look,
}

fn moves() -> impl Strategy<Value = Move> {
    let (owner, lease) = (0..3u8, 1..4u32);
    prop_oneof![
        3 => (owner.clone(), lease.clone()).prop_map(|(owner, lease)| Move::Lock { owner, lease }),
        3 => (owner, lease).prop_map(|(owner, lease)| Move::Fence { owner, lease }),
        1 => any::<i64>().prop_map(|number| Move::Number { number }),
        2 => (1..3u32).prop_map(|time| Move::Pass { time }),
        1 => Just(Move::Force),
        4 => Just(Move::Look),
    ]
}

#[test]
fn lua_and_rules_agree() {
    agree(moves(), async |twin, one| match *one {
        Move::Lock { owner, lease: n } => {
            let ask = Ask {
                hold: &hold(Family::Lock, owner, Reentrant),
                count: 1,
                lease: lease(n),
                waits: false,
            };
            let _ = twin.step(&Reentrant.acquire(ask)).await;
        }
        Move::Fence { owner, lease: n } => {
            let ask = Ask {
                hold: &hold(Family::Fenced, owner, Fenced),
                count: 1,
                lease: lease(n),
                waits: false,
            };
            let _ = twin.step(&Fenced.acquire(ask)).await;
        }
        Move::Number { number } => twin.plant("name", number).await,
        Move::Pass { time: n } => twin.pass(time(n)).await,
        Move::Force => {
            let place = hold(Family::Lock, 0, Reentrant).place;
            let _ = twin.step(&Reentrant.force(&place)).await;
        }
        Move::Look => {
            let names = [Beside::new("name".into()), Beside::new("none".into())];
            let _ = twin.step(&Survey { names: &names }).await;
        }
    });
}

impl Comparable for Vec<super::rules::Seen> {
    fn comparable(&self) -> String {
        let cut = |left: Duration| (left.as_secs() + 50_000) / 100_000;
        let one = |seen: &super::rules::Seen| match seen {
            Ok(None) => "nothing".to_owned(),
            Err(_) => "something else".to_owned(),
            Ok(Some(ObjectState::Lock {
                holder,
                queue,
                token,
            })) => {
                let holder = holder.iter().cloned().collect::<Vec<_>>().comparable();
                let waits = |waiting: &Waiting| (waiting.owner.clone(), cut(waiting.remaining));
                let queue: Vec<_> = queue.iter().map(waits).collect();
                format!("lock {holder} {queue:?} {token:?}")
            }
            Ok(Some(ObjectState::ReadWriteLock { writer, readers })) => {
                let writer = writer.iter().cloned().collect::<Vec<_>>().comparable();
                format!("{writer}; {}", readers.comparable())
            }
            Ok(Some(ObjectState::Counter { value, remaining })) => {
                format!("{value} {:?}", remaining.map(cut))
            }
            Ok(Some(ObjectState::ExpirableSemaphore {
                available,
                acquired,
            })) => {
                let out = |permit: &OutPermit| (permit.id.clone(), permit.remaining.map(cut));
                let mut out: Vec<_> = acquired.iter().map(out).collect();
                out.sort();
                format!("{available} {out:?}")
            }
        };
        self.iter().map(one).collect::<Vec<_>>().join("\n")
    }
}
