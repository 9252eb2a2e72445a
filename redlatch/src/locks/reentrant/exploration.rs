//! Explores all sequences of steps on a lock, and on a spin lock, which has the same rules.

use crate::hold::HoldKind;
use crate::locks::Reentrant;
use crate::locks::spin::Spin;
use crate::step::exploration::{Locks, Party, explore};

fn explore_kind<K: HoldKind + Clone>(name: &str, kind: &K) {
    let parties = (0..3).map(|owner| Party::new(owner, kind.clone(), true));
    let locks = Locks::new(parties.collect(), false, |key| {
        (key == "name").then_some(true)
    });
    assert!(explore(name, locks).closed);
}

#[test]
fn exploration_of_lock() {
    explore_kind("lock", &Reentrant::new("", "name"));
}

#[test]
fn exploration_of_spin_lock() {
    explore_kind("spin lock", &Spin::new("", "name"));
}
