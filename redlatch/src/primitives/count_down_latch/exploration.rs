//! Explores all sequences of steps on a latch: it counts down to zero and no further, and its key
//! is then deleted.

use std::hash::{Hash as _, Hasher};
use std::sync::Arc;

use tokio::time::Instant;

use super::rules::{CHANGED, CountDown, OPENED};
use crate::name::{Family, Place};
use crate::primitives::exploration::{Model, State, Verdict, World, ensure, explore};
use crate::primitives::number::{Begin, Delete, Read};
use crate::space::{Dumped, Message};
use crate::step::Step as _;

#[derive(Clone)]
struct Latch {
    count: u32,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Set { count: u32 },
    CountDown { by: u32 },
    Read,
    Delete,
}

impl Model for Latch {
    type Step = Step;
    type Reply = u64;

    fn steps(&self) -> Vec<Step> {
        let set = (1..=9).map(|count| Step::Set { count });
        let down = [1, 2, u32::MAX].map(|by| Step::CountDown { by });
        set.chain(down).chain([Step::Read, Step::Delete]).collect()
    }

    fn take(&mut self, step: Step, world: &mut World) -> Verdict<Option<u64>> {
        let place = Arc::new(Place::new(Family::Latch, "", "name"));
        let channel = place.channel().to_owned();
        let World { space, now } = world;
        let before = self.count;
        let error = |error: crate::Error| error.to_string();
        let (reply, expected) = match step {
            Step::Set { count } => {
                let begin = Begin {
                    place: place.clone(),
                    number: count,
                    time_to_live: None,
                    payload: CHANGED,
                    above_zero: true,
                };
                if before == 0 {
                    self.count = count;
                }
                let set = begin.apply(space, *now).map_err(error)?;
                (set.into(), u64::from(before == 0))
            }
            Step::CountDown { by } => {
                self.count = before.saturating_sub(by);
                let down = CountDown {
                    place: place.clone(),
                    by,
                };
                (down.apply(space, *now).map_err(error)?, self.count.into())
            }
            Step::Read => {
                let read = Read { place: &place };
                let number = read.apply(space, *now).map_err(error)?;
                (u64::try_from(number).unwrap(), before.into())
            }
            Step::Delete => {
                let delete = Delete {
                    place: place.clone(),
                    payload: Some(OPENED),
                };
                self.count = 0;
                let deleted = delete.apply(space, *now).map_err(error)?;
                (deleted.into(), u64::from(before > 0))
            }
        };
        ensure(reply == expected, || {
            format!("answered {reply} instead of {expected}")
        })?;
        // The message that the latch is open is published exactly when it opens.
        let payload = OPENED.into();
        let opened = Message { channel, payload };
        let told = space.take_published().contains(&opened);
        ensure(told == (before > 0 && self.count == 0), || {
            format!("told that it is open: {told}")
        })?;
        Ok(Some(reply))
    }

    fn repeated(step: Step, first: &u64, second: &u64) -> Option<bool> {
        match step {
            Step::CountDown { .. } => None,
            Step::Read => Some(first == second),
            // The first one set or deleted it.
            Step::Set { .. } | Step::Delete => Some(*second == 0),
        }
    }

    fn check(&self, state: &State, _: &mut World) -> Verdict {
        let count = Dumped::Text(self.count.to_string());
        let expected = (self.count > 0).then(|| ("name".to_owned(), (count, -1)));
        ensure(*state == expected.into_iter().collect(), || {
            format!("the count is {}", self.count)
        })
    }

    fn hash(&self, _: Instant, hasher: &mut impl Hasher) {
        self.count.hash(hasher);
    }
}

#[test]
fn exploration_of_count_down_latch() {
    assert!(explore("latch", Latch { count: 0 }).closed);
}
