//! All orders of the events of a model, breadth first.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hasher;

use crate::step::differential::env_number;

pub(crate) type Event = (&'static str, usize);

/// A model: its state is that of a type of the client, and of what surrounds it.
pub(crate) trait Events: Clone + Debug {
    /// Returns the events that are possible, each with the party that it concerns, and with the
    /// state that follows, or a violation.
    fn next(&self) -> Vec<(Event, Result<Self, &'static str>)>;

    /// Checks a new state.
    fn check(&self) -> Result<(), &'static str>;

    /// Hashes what distinguishes it from other states.
    fn hash(&self, hasher: &mut impl Hasher);
}

/// Visits at most so many states, or `REDLATCH_STATES`. Prints how many there are, and returns the
/// names of the events.
///
/// # Panics
///
/// Panics with the first violation and the events that lead to it: a shortest sequence.
pub(crate) fn explore<M: Events>(name: &str, first: M, max_states: u64) -> BTreeSet<&'static str> {
    let max_states = env_number("REDLATCH_STATES", max_states);
    let hash = |state: &M| {
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        hasher.finish()
    };
    let mut seen = HashMap::from([(hash(&first), None)]);
    let mut queue = VecDeque::from([first]);
    let mut events = BTreeSet::new();
    while (seen.len() as u64) < max_states
        && let Some(state) = queue.pop_front()
    {
        let before = hash(&state);
        for (event, next) in state.next() {
            events.insert(event.0);
            let after = next.as_ref().map_or(0, hash);
            if next.is_ok() && seen.contains_key(&after) {
                continue;
            }
            let checked = next.and_then(|next| next.check().map(|()| next));
            let next = checked.unwrap_or_else(|violation| {
                let mut path = vec![event];
                let mut at = before;
                while let Some(Some((earlier, event))) = seen.get(&at) {
                    path.push(*event);
                    at = *earlier;
                }
                path.reverse();
                panic!("{violation}, after {path:?}, the last one in {state:#?}");
            });
            seen.insert(after, Some((before, event)));
            queue.push_back(next);
        }
    }
    let end = match queue.is_empty() {
        true => "closed",
        false => "not closed",
    };
    println!("{name}: {} states, {end}", seen.len());
    events
}
