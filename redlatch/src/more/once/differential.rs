//! Compares the scripts of runs and their rules over random histories. Slots of a length are compared by the tests of the
//! public API: here the clocks of the two sides differ.

use proptest::prelude::*;
use tokio::time::Instant;

use super::rules::{Begin, Begun, finish};
use crate::keyspace::Keyspace;
use crate::name::OnceKeys;
use crate::step::differential::{Comparable, aged, assert_equivalent, lease, time};
use crate::step::repetition::Repetitions;

#[derive(Debug, Clone)]
enum Move {
    Begin {
        slot: u8,
        run: u8,
        time_to_live: u32,
        replaces: u8,
    },
    Finish {
        slot: u8,
        run: u8,
    },
    Advance {
        time: u32,
    },
    Foreign {
        slot: u8,
    },
}

fn moves() -> impl Strategy<Value = Move> {
    let (slot, run) = (0..2u8, 0..4u8);
    prop_oneof![
        5 => (slot.clone(), run.clone(), 1..4u32, 0..4u8).prop_map(
            |(slot, run, time_to_live, replaces)| Move::Begin { slot, run, time_to_live, replaces }
        ),
        3 => (slot.clone(), run).prop_map(|(slot, run)| Move::Finish { slot, run }),
        2 => (1..3u32).prop_map(|time| Move::Advance { time }),
        1 => slot.prop_map(|slot| Move::Foreign { slot }),
    ]
}

#[test]
fn lua_and_rules_agree() {
    let keys = |slot: u8| OnceKeys::new("", "name", Some(&slot.to_string()));
    assert_equivalent(moves(), async |harness, one| match *one {
        Move::Begin {
            slot,
            run,
            time_to_live,
            replaces,
        } => {
            let replaces = format!("client:{replaces}");
            let id = format!("client:{run}");
            let step = Begin {
                keys: &keys(slot),
                // One of them only looks.
                run: (run > 0).then_some(&*id),
                slot: None,
                time_to_live: lease(time_to_live),
                host: "db7",
                by: &id,
                offset: 0,
                replaces: Some(&replaces),
            };
            let _ = harness.step(&step.step()).await;
        }
        Move::Finish { slot, run } => {
            let (keys, run) = (keys(slot), format!("client:{run}"));
            let step = finish(&keys, &run, "exit code 0");
            let _ = harness.step(&step).await;
        }
        Move::Advance { time: n } => harness.advance(time(n)).await,
        Move::Foreign { slot } => harness.set_foreign(&keys(slot).record, 7).await,
    });
}

/// The lock of the first one has ended when its step arrives.
#[test]
fn late_retry_does_not_replace_a_run_that_began_since() {
    let (mut keyspace, keys) = (
        Keyspace::new(Instant::now()),
        OnceKeys::new("", "name", None),
    );
    let mut begin = |run, replaces| {
        let begin = Begin {
            keys: &keys,
            run: Some(run),
            slot: None,
            time_to_live: lease(1),
            host: "db7",
            by: "client",
            offset: 0,
            replaces,
        };
        match begin.step().apply(&mut keyspace).unwrap() {
            Begun::New { attempt } => Ok(attempt),
            Begun::Record(record) => Err(record.run),
            Begun::Vacant => panic!("it begins"),
        }
    };
    assert_eq!(begin("dead", None), Ok(1));
    let found = begin("late", None).unwrap_err();
    assert_eq!(begin("next", None), Err(found.clone()));
    assert_eq!(begin("next", Some(&found)), Ok(2));
    assert_eq!(begin("late", Some(&found)), Err("next".to_owned()));
}

#[tokio::test]
async fn repeated_begin_is_written_again() {
    let repetitions = Repetitions::new().await;
    let keys = OnceKeys::new("", "name", None);
    let begin = Begin {
        keys: &keys,
        run: Some("client:1"),
        slot: None,
        time_to_live: lease(1),
        host: "db7",
        by: "client",
        offset: 0,
        replaces: None,
    };
    let steps = [begin.step(), begin.step()];
    repetitions.assert_written_again(steps).await;
}

impl Comparable for Begun {
    /// With ages instead of times.
    fn comparable(&self) -> String {
        let Begun::Record(record) = self else {
            return format!("{self:?}");
        };
        let age = |at: i64| aged("began", &at.to_string(), record.now);
        let (began, ended) = (age(record.began), record.ended.map(age));
        let (host, by, outcome) = (&record.host, &record.by, &record.outcome);
        let (attempt, run) = (record.attempt, &record.run);
        format!("{host} {by} {began} {ended:?} {outcome} {attempt} {run}")
    }
}
