//! Faults of data: keys that are deleted or overwritten.

use std::thread::sleep;

use super::server::ask;
use super::{BASE, Fault, Lasts};
use crate::Result;
use crate::checker::Losses;
use crate::history::Forgetting;
use crate::scene::Scene;

pub(super) const FAULTS: [Fault; 2] = [
    Fault {
        name: "flushed",
        what: "FLUSHALL",
        losses: Losses::Some,
        soaks: false,
        act: |scene, lasts| {
            scene.forgets(Forgetting::NO_DATA, |scene| {
                scene.broken(|scene| {
                    let master = scene.master()?;
                    ask(scene.server(master), &["FLUSHALL"])
                })
            })?;
            sleep(lasts);
            Ok(())
        },
        ..BASE
    },
    Fault {
        name: "overwritten",
        what: "the key of every other lock is overwritten with other data, and deleted half a \
               lease later",
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        soaks: false,
        act: |scene, lasts| {
            scene.forgets(Forgetting::KEYS_GONE, |scene| {
                scene.broken(|scene| overwrite(scene, lasts / 3))
            })
        },
        ..BASE
    },
];

fn overwrite(scene: &mut Scene, lasts: std::time::Duration) -> Result<()> {
    let names = scene.names();
    let others: Vec<&String> = names.iter().step_by(2).collect();
    for name in &others {
        let owner = scene.owner(name)?;
        // Deletes all keys of the object, because acquired permits have a key of their own. Atomically, because a
        // worker may set the number of permits meanwhile.
        let script = "redis.call('DEL', unpack(KEYS)) redis.call('RPUSH', KEYS[1], 'other data')";
        let permits = format!("{{{name}}}:timeout");
        ask(owner, &["EVAL", script, "2", name, &permits])?;
    }
    sleep(lasts);
    for name in others {
        ask(scene.owner(name)?, &["DEL", name])?;
    }
    Ok(())
}
