//! Compares the latch's Lua scripts and rules over random histories.

use std::cell::Cell;

use proptest::prelude::*;

use super::rules::{CHANGED, OPENED, count_down};
use crate::counters;
use crate::name::{KeyLayout, ObjectKeys};
use crate::step::differential::{assert_equivalent, assert_reached};

#[derive(Debug, Clone)]
enum Move {
    Set { count: u32 },
    CountDown { by: u32 },
    Read,
    Delete,
    SetForeign { number: i64 },
}

fn moves() -> impl Strategy<Value = Move> {
    let by = prop_oneof![8 => 1..4u32, 1 => Just(u32::MAX)];
    let count = prop_oneof![8 => 1..6u32, 1 => Just(u32::MAX)];
    let foreign = prop_oneof![
        -3..3i64,
        Just(999_999_999_999_999),
        Just(-99_999_999_999_999)
    ];
    prop_oneof![
        6 => count.prop_map(|count| Move::Set { count }),
        12 => by.prop_map(|by| Move::CountDown { by }),
        2 => Just(Move::Read),
        1 => Just(Move::Delete),
        1 => foreign.prop_map(|number| Move::SetForeign { number }),
    ]
}

#[test]
fn lua_and_rules_agree() {
    let (opened, opened_already, set, closed) = Default::default();
    let seen: [&Cell<u32>; 4] = [&opened, &opened_already, &set, &closed];
    let count = |what: &Cell<u32>, happened: bool| what.set(what.get() + u32::from(happened));
    assert_equivalent(moves(), async |harness, one| {
        let object = std::sync::Arc::new(ObjectKeys::new(KeyLayout::Latch, "", "name"));
        match *one {
            Move::Set { count: number } => {
                let step = counters::set_if_absent(&object, number, None, CHANGED, true);
                let before = harness.step(&counters::read(&object)).await.unwrap();
                let was_set = harness.step(&step).await.unwrap();
                assert_eq!(was_set, before <= 0, "open, or not");
                count(&set, was_set);
                count(&closed, !was_set);
            }
            Move::CountDown { by } => {
                let before = harness.step(&counters::read(&object)).await.unwrap();
                let left = harness.step(&count_down(&object, by)).await.unwrap();
                count(&opened, before > 0 && left == 0);
                count(&opened_already, before <= 0 && left == 0);
            }
            Move::Read => {
                harness.step(&counters::read(&object)).await.unwrap();
            }
            Move::Delete => {
                let step = counters::delete(&object, Some(OPENED));
                harness.step(&step).await.unwrap();
            }
            Move::SetForeign { number } => harness.set_foreign("name", number).await,
        }
    });
    assert_reached(seen.map(Cell::get));
}
