//! Explores all sequences of steps on a group of locks.

use super::{Group, GroupValue};
use crate::step::exploration::{Locks, Party, explore};

fn locks(parties: &[(u8, &str)]) -> Locks {
    let party = |&(owner, value): &(u8, &str)| {
        let kind = Group::new("", "name", &GroupValue::from(value));
        Party::new(owner, kind, true)
    };
    Locks::new(parties.iter().map(party).collect(), false, |key| {
        (key == "name").then_some(true)
    })
}

#[test]
fn exploration_of_one_value() {
    assert!(explore("group lock", locks(&[(0, "a"), (1, "a")])).closed);
}

/// The holds of one value must not end with those of another one. These are too many states to explore all.
#[test]
fn exploration_of_two_values() {
    let _ = explore(
        "two values of a group",
        locks(&[(0, "a"), (1, "b"), (2, "b")]),
    );
}
