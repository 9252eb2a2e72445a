//! Compares the semaphore's Lua scripts and rules over random histories.

use std::cell::Cell;
use std::time::Duration;

use proptest::prelude::*;

use super::rules::{Add, Drain, Take};
use crate::name::{Family, Place};
use crate::primitives::number::{Begin, Delete, Read};
use crate::primitives::twin::{agree, lease, time};
use crate::step::Outcome;

#[derive(Debug, Clone)]
enum Move {
    Set { permits: u32, lives: u32 },
    Take { permits: u32 },
    Add { permits: i32, if_exists: bool },
    Drain,
    Read,
    Delete,
    Pass { time: u32 },
    PlantHuge,
}

fn moves() -> impl Strategy<Value = Move> {
    let amount = prop_oneof![
        8 => -6..7i32,
        1 => Just(i32::MAX),
        1 => Just(-i32::MAX),
        1 => Just(i32::MIN),
    ];
    prop_oneof![
        4 => (prop_oneof![6 => 0..6u32, 1 => Just(i32::MAX as u32)], 0..4u32)
            .prop_map(|(permits, lives)| Move::Set { permits, lives }),
        8 => (1..4u32).prop_map(|permits| Move::Take { permits }),
        8 => (amount, any::<bool>())
            .prop_map(|(permits, if_exists)| Move::Add { permits, if_exists }),
        1 => Just(Move::Drain),
        2 => Just(Move::Read),
        1 => Just(Move::Delete),
        2 => (1..3u32).prop_map(|time| Move::Pass { time }),
        1 => Just(Move::PlantHuge),
    ]
}

#[test]
fn lua_and_rules_agree() {
    let (taken, refused, out_of_range, owed, expired, ending) = Default::default();
    let seen: [&Cell<u32>; 6] = [&taken, &refused, &out_of_range, &owed, &expired, &ending];
    let count = |what: &Cell<u32>, happened: bool| what.set(what.get() + u32::from(happened));
    agree(moves(), async |twin, one| {
        let place = std::sync::Arc::new(Place::new(Family::Semaphore, "", "name"));
        match *one {
            Move::Set { permits, lives } => {
                let step = Begin {
                    place: place.clone(),
                    number: permits,
                    time_to_live: (lives > 0).then(|| lease(lives)),
                    payload: permits,
                    above_zero: false,
                };
                twin.step(&step).await.unwrap();
            }
            Move::Take { permits } => {
                let step = Take {
                    place: &place,
                    permits,
                };
                let outcome = twin.step(&step).await.unwrap();
                count(&taken, matches!(outcome, Outcome::Done(_)));
                count(&refused, matches!(outcome, Outcome::Wait(_)));
                let ends = |&lives: &Duration| lives < Duration::MAX;
                count(
                    &ending,
                    matches!(&outcome, Outcome::Done(lives) if ends(lives)),
                );
            }
            Move::Add { permits, if_exists } => {
                let step = Add {
                    place,
                    permits,
                    if_exists,
                };
                let added = twin.step(&step).await;
                count(&out_of_range, added.is_err());
                count(&owed, matches!(added, Ok(Some(..0))));
            }
            Move::Drain => {
                twin.step(&Drain { place }).await.unwrap();
            }
            Move::Read => {
                twin.step(&Read { place: &place }).await.unwrap();
            }
            Move::Delete => {
                let step = Delete {
                    place: place.clone(),
                    payload: None,
                };
                twin.step(&step).await.unwrap();
            }
            Move::Pass { time: n } => {
                let before = twin.step(&Read { place: &place }).await.unwrap();
                twin.pass(time(n)).await;
                let after = twin.step(&Read { place: &place }).await.unwrap();
                count(&expired, before != after);
            }
            Move::PlantHuge => twin.plant("name", 999_999_999_999_999).await,
        }
    });
    for (n, what) in seen.iter().enumerate() {
        assert!(what.get() > 20, "state {n} is hardly ever reached");
    }
}
