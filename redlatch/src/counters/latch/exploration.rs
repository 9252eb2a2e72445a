//! Explores all sequences of steps on a latch: it counts down to zero and no further, and its key
//! is then deleted.

use std::hash::{Hash as _, Hasher};
use std::sync::Arc;

use tokio::time::Instant;

use super::rules::{CHANGED, OPENED, count_down};
use crate::counters;
use crate::keyspace::{DumpedValue, Message};
use crate::name::{KeyLayout, ObjectKeys};
use crate::step::exploration::{Model, State, Verdict, World, ensure, explore};

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
        let object = Arc::new(ObjectKeys::new(KeyLayout::Latch, "", "name"));
        let channel = object.channel().to_owned();
        let keyspace = &mut world.keyspace;
        let before = self.count;
        let error = |error: crate::Error| error.to_string();
        let (reply, expected) = match step {
            Step::Set { count } => {
                let set_if_absent = counters::set_if_absent(&object, count, None, CHANGED, true);
                if before == 0 {
                    self.count = count;
                }
                let set = set_if_absent.apply(keyspace).map_err(error)?;
                (set.into(), u64::from(before == 0))
            }
            Step::CountDown { by } => {
                self.count = before.saturating_sub(by);
                let down = count_down(&object, by);
                let count = down.apply(keyspace).map_err(error)?;
                (count, self.count.into())
            }
            Step::Read => {
                let read = counters::read(&object);
                let number = read.apply(keyspace).map_err(error)?;
                (u64::try_from(number).unwrap(), before.into())
            }
            Step::Delete => {
                let delete = counters::delete(&object, Some(OPENED));
                self.count = 0;
                let deleted = delete.apply(keyspace).map_err(error)?;
                (deleted.into(), u64::from(before > 0))
            }
        };
        ensure(reply == expected, || {
            format!("answered {reply} instead of {expected}")
        })?;
        // The message that the latch is open is published exactly when it opens.
        let payload = OPENED.into();
        let opened = Message { channel, payload };
        let published = keyspace.take_published().contains(&opened);
        ensure(published == (before > 0 && self.count == 0), || {
            format!("published that it is open: {published}")
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
        let count = DumpedValue::Text(self.count.to_string());
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
