//! Compares the semaphore's Lua scripts and rules over random histories.

use std::cell::Cell;

use proptest::prelude::*;

use super::rules;
use crate::counters;
use crate::lease::Expiry;
use crate::name::{KeyLayout, ObjectKeys};
use crate::session::check_handoff;
use crate::step::Outcome;
use crate::step::differential::{assert_equivalent, assert_reached, lease, time};

#[derive(Debug, Clone)]
enum Move {
    Set { permits: u32, ttl: u32 },
    Take { permits: u32 },
    Add { permits: i32, if_exists: bool },
    Drain,
    Read,
    CheckHandoff,
    Delete,
    Advance { time: u32 },
    SetHuge,
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
            .prop_map(|(permits, ttl)| Move::Set { permits, ttl }),
        8 => (1..4u32).prop_map(|permits| Move::Take { permits }),
        8 => (amount, any::<bool>())
            .prop_map(|(permits, if_exists)| Move::Add { permits, if_exists }),
        1 => Just(Move::Drain),
        2 => Just(Move::Read),
        1 => Just(Move::CheckHandoff),
        1 => Just(Move::Delete),
        4 => (1..3u32).prop_map(|time| Move::Advance { time }),
        1 => Just(Move::SetHuge),
    ]
}

#[test]
fn lua_and_rules_agree() {
    let (taken, refused, out_of_range, below_zero, expired, ending) = Default::default();
    let seen: [&Cell<u32>; 6] = [
        &taken,
        &refused,
        &out_of_range,
        &below_zero,
        &expired,
        &ending,
    ];
    let count = |what: &Cell<u32>, happened: bool| what.set(what.get() + u32::from(happened));
    assert_equivalent(moves(), async |harness, one| {
        let object = std::sync::Arc::new(ObjectKeys::new(KeyLayout::Semaphore, "", "name"));
        match *one {
            Move::Set { permits, ttl } => {
                let step = counters::set_if_absent(
                    &object,
                    permits,
                    (ttl > 0).then(|| lease(ttl)),
                    permits,
                    false,
                );
                harness.step(&step).await.unwrap();
            }
            Move::Take { permits } => {
                let step = rules::take_permits(&object, permits);
                let outcome = harness.step(&step).await.unwrap();
                count(&taken, matches!(outcome, Some(Outcome::Done(_))));
                count(&refused, matches!(outcome, Some(Outcome::Wait(_))));
                let ends = |&ttl: &Expiry| ttl < Expiry::Never;
                count(
                    &ending,
                    matches!(&outcome, Some(Outcome::Done(ttl)) if ends(ttl)),
                );
            }
            Move::Add { permits, if_exists } => {
                let step = rules::add(&object, permits, if_exists);
                let added = harness.step(&step).await;
                count(&out_of_range, added.is_err());
                count(&below_zero, matches!(added, Ok(Some(..0))));
            }
            Move::Drain => {
                harness.step(&rules::drain(&object)).await.unwrap();
            }
            Move::Read => {
                harness.step(&counters::read(&object)).await.unwrap();
            }
            Move::CheckHandoff => {
                let step = check_handoff(&object, None);
                harness.step(&step).await.unwrap();
            }
            Move::Delete => {
                let step = counters::delete(&object, None);
                harness.step(&step).await.unwrap();
            }
            Move::Advance { time: n } => {
                let before = harness.step(&counters::read(&object)).await.unwrap();
                harness.advance(time(n)).await;
                let after = harness.step(&counters::read(&object)).await.unwrap();
                count(&expired, before != after);
            }
            Move::SetHuge => harness.set_foreign("name", 999_999_999_999_999).await,
        }
    });
    assert_reached(seen.map(Cell::get));
}
