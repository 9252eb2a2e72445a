//! Explores all sequences of steps on a fenced lock.

use super::Fenced;
use crate::step::exploration::{Locks, Party, explore, ticks};

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

/// Its key expires while the lock is held, or after it was released.
#[test]
fn exploration_of_tokens_by_the_clock() {
    let fenced = Fenced {
        grace: Some(ticks(1)),
        ..Fenced::new("", "name")
    };
    let parties = (0..3).map(|owner| Party::new(owner, fenced.clone(), true));
    let locks = Locks::new(parties.collect(), false, |key| match key {
        "name" | TOKEN => Some(true),
        _ => None,
    });
    let explored = explore("tokens by the clock", locks.with_token(TOKEN).by_clock());
    assert!(explored.closed);
}
