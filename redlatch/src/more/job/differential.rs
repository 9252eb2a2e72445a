//! Compares the scripts of jobs and their rules over random histories.

use proptest::prelude::*;

use super::rules::{Begin, Begun, Overlap, Record, attempt_key, finish, read};
use crate::hold::{AcquireParams, HoldKind as _};
use crate::locks::Reentrant;
use crate::name::JobKeys;
use crate::step::differential::{
    Comparable, Differential, aged, assert_equivalent, hold, lease, time,
};
use crate::step::repetition::Repetitions;

#[derive(Debug, Clone)]
enum Move {
    Begin {
        run: u8,
        slot: i64,
        owner: u8,
        /// Whether it tries to acquire the lock before.
        locks: bool,
        attempts: u32,
        overlap: Overlap,
        time_to_live: u32,
    },
    Finish {
        run: u8,
        slot: i64,
        attempt: u32,
        failed: bool,
    },
    Read {
        outputs: bool,
    },
    /// The lock of an exclusive run.
    Acquire {
        owner: u8,
        lease: u32,
    },
    Release,
    /// The key of a reader.
    SetReader,
    RemoveReader,
    Advance {
        time: u32,
    },
    Foreign,
}

fn moves() -> impl Strategy<Value = Move> {
    let overlap = prop_oneof![
        Just(Overlap::Skip),
        Just(Overlap::Wait),
        Just(Overlap::Allow)
    ];
    let (run, slot, owner) = (0..4u8, 1..4i64, 0..3u8);
    let begin = (
        run.clone(),
        slot.clone(),
        owner.clone(),
        prop::bool::weighted(0.8),
        1..3u32,
        overlap,
        1..4u32,
    );
    prop_oneof![
        9 => begin.prop_map(|(run, slot, owner, locks, attempts, overlap, time_to_live)| Move::Begin {
            run, slot, owner, locks, attempts, overlap, time_to_live,
        }),
        4 => (run, slot, 1..3u32, any::<bool>())
            .prop_map(|(run, slot, attempt, failed)| Move::Finish { run, slot, attempt, failed }),
        3 => any::<bool>().prop_map(|outputs| Move::Read { outputs }),
        3 => (owner, 1..4u32).prop_map(|(owner, lease)| Move::Acquire { owner, lease }),
        2 => Just(Move::Release),
        1 => Just(Move::SetReader),
        1 => Just(Move::RemoveReader),
        2 => (1..3u32).prop_map(|time| Move::Advance { time }),
        1 => Just(Move::Foreign),
    ]
}

/// So that some are dropped.
const KEPT: u32 = 2;

#[test]
fn lua_and_rules_agree() {
    let keys = JobKeys::new("", "name");
    let reader = "{name}:reader:rwlock_timeout:1";
    assert_equivalent(moves(), async |harness, one| match *one {
        Move::Begin {
            run,
            slot,
            owner,
            locks,
            attempts,
            overlap,
            time_to_live,
        } => {
            match overlap {
                _ if !locks => {}
                Overlap::Allow => harness.set_foreign(reader, 1).await,
                _ => acquire(harness, owner, 2).await,
            }
            let id = format!("client:{run}");
            let runner = match overlap {
                Overlap::Allow => format!("\n{reader}\ndb7\n{id}"),
                _ => format!("client:{owner}\nname\ndb7\n{id}"),
            };
            let step = Begin {
                keys: &keys,
                // One of them only asks.
                run: if run > 0 { &id } else { "" },
                slot,
                attempts,
                // Those of the two sides differ.
                ahead: 0,
                overlap,
                kept: KEPT,
                time_to_live: lease(time_to_live),
                runner: &runner,
                schedule: "@daily",
            };
            let _ = harness.step(&step.step()).await;
        }
        Move::Finish {
            run,
            slot,
            attempt,
            failed,
        } => {
            let (run, of) = (format!("client:{run}"), attempt_key(slot, attempt));
            let end = if failed {
                "failed\nexit code 1\nno"
            } else {
                "ok\ndone\n"
            };
            let _ = harness.step(&finish(&keys, &run, &of, end)).await;
        }
        Move::Read { outputs } => {
            let _ = harness.step(&read(&keys, outputs)).await;
        }
        Move::Acquire { owner, lease } => acquire(harness, owner, lease).await,
        Move::Release => harness.remove("name").await,
        Move::SetReader => harness.set_foreign(reader, 1).await,
        Move::RemoveReader => harness.remove(reader).await,
        Move::Advance { time: n } => harness.advance(time(n)).await,
        Move::Foreign => harness.set_foreign(&keys.record, 7).await,
    });
}

async fn acquire(harness: &mut Differential, owner: u8, units: u32) {
    let kind = Reentrant::new("", "name");
    let hold = hold(owner, kind.clone());
    let params = AcquireParams::without_waiting(&hold, 1, lease(units));
    let _ = harness.step(&kind.acquire(params)).await;
}

#[tokio::test]
async fn repeated_begin_is_written_again() {
    let repetitions = Repetitions::new().await;
    let held = repetitions.client.lock("name").lock().await.unwrap();
    let (keys, runner) = (
        JobKeys::new("", "name"),
        format!("{}\nname\ndb7\nclient", held.owner_id()),
    );
    let begin = Begin {
        keys: &keys,
        run: "client:1",
        slot: 1,
        attempts: 1,
        ahead: 0,
        overlap: Overlap::Skip,
        kept: KEPT,
        time_to_live: lease(1),
        runner: &runner,
        schedule: "@daily",
    };
    let steps = [begin.step(), begin.step()];
    repetitions.assert_written_again(steps).await;
}

impl Comparable for Begun {
    /// With the times in units.
    fn comparable(&self) -> String {
        let units = |left: std::time::Duration| crate::lease::Expiry::In(left).comparable();
        match *self {
            Begun::Lasts { attempt, left } => format!("lasts {attempt} {}", units(left)),
            Begun::Overlaps(left) => format!("overlaps {}", units(left)),
            other => format!("{other:?}"),
        }
    }
}

impl Comparable for Record {
    /// With ages instead of times.
    fn comparable(&self) -> String {
        let aged =
            |(field, value): (&String, &String)| (field.clone(), aged(field, value, self.now));
        let mut live = self.live.clone();
        live.sort();
        let fields: Vec<_> = self.fields.iter().map(aged).collect();
        format!("{fields:?} {live:?}")
    }
}
