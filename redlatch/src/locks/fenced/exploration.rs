//! Explores all sequences of steps on a fenced lock.

use super::Fenced;
use crate::step::exploration::{Locks, Party, explore};

const TOKEN: &str = "redisson_lock_token:{name}";

#[test]
fn exploration_of_fenced_lock() {
    let parties = (0..3).map(|owner| Party::new(owner, Fenced::new("", "name"), true));
    let locks = Locks::new(parties.collect(), false, |key| match key {
        "name" => Some(true),
        TOKEN => Some(false),
        _ => None,
    });
    assert!(explore("fenced lock", locks.with_token(TOKEN)).closed);
}
