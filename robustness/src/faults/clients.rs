//! Clients that stand still or die.

use std::thread::sleep;

use super::{BASE, Fault, Lasts};
use crate::checker::Losses;

pub(super) const FAULTS: [Fault; 2] = [
    Fault {
        name: "client stopped",
        what: "SIGSTOP of a client process for longer than a lease, while it holds and waits",
        losses: Losses::None,
        lasts: Lasts::PastLease,
        times: 2,
        act: |scene, lasts| {
            let all = scene.crew.alive();
            let number = all[scene.random.below(all.len())];
            scene.crew.stop(number)?;
            sleep(lasts);
            scene.crew.go_on(number)
        },
        ..BASE
    },
    Fault {
        name: "client killed",
        what: "kill -9 of a client process, while it holds and waits; another one takes its place",
        act: |scene, lasts| {
            let all = scene.crew.alive();
            let number = all[scene.random.below(all.len())];
            scene.crew.kill(number)?;
            sleep(lasts);
            scene.crew.start(&scene.worker)?;
            Ok(())
        },
        ..BASE
    },
];
