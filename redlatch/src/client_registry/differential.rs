//! Compares script and rule of the registry's steps on random histories.

use proptest::prelude::*;

use super::step::{ClientHash, INSTANCE, MAX_BYTES, Setting, Write, read};
use crate::step::differential::{Comparable, TIME_UNIT, aged, assert_equivalent, lease, time};

const KEY: &str = "redlatch_client:{a}";

#[derive(Debug, Clone)]
enum Move {
    Write {
        ttl: u32,
        replace: bool,
        instance: u8,
        removed: Vec<u8>,
        /// Field, age and size of the text.
        set: Vec<(u8, Option<u32>, u8)>,
    },
    Read {
        fields: Vec<u8>,
    },
    Foreign,
    Advance {
        time: u32,
    },
}

fn moves() -> impl Strategy<Value = Move> {
    let fields = || prop::collection::vec(0..4u8, 0..3);
    let setting = (0..4u8, prop::option::of(0..3u32), 0..3u8);
    let set = prop::collection::vec(setting, 0..3);
    let write = (1..4u32, any::<bool>(), 0..2u8, fields(), set);
    prop_oneof![
        5 => write.prop_map(|(ttl, replace, instance, removed, set)| Move::Write { ttl, replace, instance, removed, set }),
        3 => fields().prop_map(|fields| Move::Read { fields }),
        1 => Just(Move::Foreign),
        2 => (1..3u32).prop_map(|time| Move::Advance { time }),
    ]
}

/// A field about a hold, whose value begins with a time.
fn field(n: u8) -> String {
    format!("hold:{n}")
}

#[test]
fn lua_and_rules_agree() {
    assert_equivalent(moves(), async |harness, one| match one {
        Move::Write {
            ttl,
            replace,
            instance,
            removed,
            set,
        } => {
            let instance = instance.to_string();
            let setting = |(n, age, size): &(u8, Option<u32>, u8)| Setting {
                field: match age {
                    Some(_) => field(*n),
                    None => format!("text:{n}"),
                },
                age: age.map(|age| TIME_UNIT * age),
                text: [" lock - ", "", &"x".repeat(MAX_BYTES + 1)][usize::from(*size)].to_owned(),
            };
            let mut set: Vec<_> = set.iter().map(setting).collect();
            if *replace && !set.is_empty() {
                set.push(Setting::text(INSTANCE, &*instance));
            }
            let step = Write {
                key: KEY,
                ttl: lease(*ttl),
                replace: *replace,
                instance: &instance,
                removed: removed.iter().copied().map(field).collect(),
                set,
            };
            let _ = harness.step(&step.step()).await;
        }
        Move::Read { fields } => {
            let step = read(KEY, fields.iter().copied().map(field).collect());
            let _ = harness.step(&step).await;
        }
        Move::Foreign => harness.set_foreign(KEY, 7).await,
        Move::Advance { time: n } => harness.advance(time(*n)).await,
    });
}

impl Comparable for Option<ClientHash> {
    /// With ages instead of times.
    fn comparable(&self) -> String {
        let Some(ClientHash { now, fields }) = self else {
            return "unreadable".to_owned();
        };
        let aged = fields
            .iter()
            .map(|(field, value)| format!("{field} {}", aged(field, value, *now)));
        aged.collect::<Vec<_>>().join(", ")
    }
}
