//! Explores all sequences of steps on a semaphore: no permit is lost or duplicated.

use std::hash::{Hash as _, Hasher};
use std::sync::Arc;

use tokio::time::Instant;

use super::rules;
use crate::counters;
use crate::keyspace::DumpedValue;
use crate::name::{KeyLayout, ObjectKeys};
use crate::step::Outcome;
use crate::step::exploration::{
    Model, State, TICK, Verdict, World, ensure, explore, hash_end, ticks,
};

/// Number of permits.
const PERMITS: u32 = 3;
/// Time to live of the semaphore in ticks, if it has one.
const TTL: u8 = 3;

#[derive(Clone)]
struct Permits {
    ends: bool,
    end: Option<Instant>,
    /// Number of permits that each owner holds.
    taken: [u32; 3],
}

#[derive(Debug, Clone, Copy)]
enum Step {
    SetIfAbsent,
    Take { owner: usize, permits: u32 },
    Release { owner: usize, permits: u32 },
    Drain { owner: usize },
}

impl Model for Permits {
    type Step = Step;
    type Reply = bool;

    fn steps(&self) -> Vec<Step> {
        let of_owner = |owner| {
            let takes = (1..=2).map(move |permits| Step::Take { owner, permits });
            let releases = (1..=2).map(move |permits| Step::Release { owner, permits });
            takes.chain(releases).chain([Step::Drain { owner }])
        };
        [Step::SetIfAbsent]
            .into_iter()
            .chain((0..3).flat_map(of_owner))
            .collect()
    }

    fn take(&mut self, step: Step, world: &mut World) -> Verdict<Option<bool>> {
        let object = Arc::new(ObjectKeys::new(KeyLayout::Semaphore, "", "name"));
        let World { keyspace, now } = world;
        if self.end.is_some_and(|end| end <= *now) {
            // Its permits ended with it.
            (self.end, self.taken) = (None, [0; 3]);
        }
        let exists = keyspace.exists("name");
        let error = |error: crate::Error| error.to_string();
        let reply = match step {
            Step::SetIfAbsent => {
                let set_if_absent = counters::set_if_absent(
                    &object,
                    PERMITS,
                    self.ends.then(|| ticks(TTL)),
                    PERMITS,
                    false,
                );
                let created = set_if_absent.apply(keyspace).map_err(error)?;
                ensure(created != exists, || format!("created: {created}"))?;
                if created && self.ends {
                    self.end = Some(*now + TICK * TTL.into());
                }
                created
            }
            Step::Take { owner, permits } => {
                let take = rules::take_permits(&object, permits);
                match take.apply(keyspace).map_err(error)? {
                    Some(Outcome::Done(_)) => {
                        self.taken[owner] += permits;
                        true
                    }
                    Some(Outcome::Wait(_)) | None => false,
                }
            }
            Step::Release { owner, permits } => {
                if self.taken[owner] < permits {
                    return Ok(None);
                }
                self.taken[owner] -= permits;
                let add = rules::add(&object, i32::try_from(permits).unwrap(), true);
                let added = add.apply(keyspace).map_err(error)?.is_some();
                ensure(added == exists, || format!("released: {added}"))?;
                added
            }
            Step::Drain { owner } => {
                let drain = rules::drain(&object);
                let drained = drain.apply(keyspace).map_err(error)?;
                self.taken[owner] += u32::try_from(drained).unwrap();
                drained > 0
            }
        };
        world.keyspace.take_published();
        Ok(Some(reply))
    }

    /// Only setting the number can be repeated; the reply of the repetition differs.
    fn repeated(step: Step, _: &bool, second: &bool) -> Option<bool> {
        matches!(step, Step::SetIfAbsent).then_some(!second)
    }

    fn check(&self, state: &State, world: &mut World) -> Verdict {
        let Some((value, left)) = state.get("name") else {
            let taken: u32 = self.taken.iter().sum();
            let ended = self.end.is_none_or(|end| end <= world.now);
            return ensure(state.is_empty() && (taken == 0 || ended), || {
                "the number is gone".to_owned()
            });
        };
        ensure(state.len() == 1 && (*left >= 0) == self.ends, || {
            format!("it ends in {left} ms (-1: never)")
        })?;
        let taken = PERMITS.checked_sub(self.taken.iter().sum());
        let number = taken.map(|left| DumpedValue::Text(left.to_string()));
        ensure(number.as_ref() == Some(value), || {
            format!("{value:?} left, and taken {:?}", self.taken)
        })
    }

    fn hash(&self, now: Instant, hasher: &mut impl Hasher) {
        hash_end(self.end, now, hasher);
        let is_gone = self.end.is_some_and(|end| end <= now);
        let taken = if is_gone { [0; 3] } else { self.taken };
        taken.hash(hasher);
    }
}

#[test]
fn exploration_of_semaphore() {
    for (name, ends) in [("semaphore", false), ("semaphore that ends", true)] {
        let permits = Permits {
            ends,
            end: None,
            taken: [0; 3],
        };
        assert!(explore(name, permits).closed);
    }
}
