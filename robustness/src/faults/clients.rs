//! Faults of clients: processes that are paused or killed.

use super::{BASE, Fault, Lasts};
use crate::Result;
use crate::checker::Losses;
use crate::scene::Scene;

pub(super) const FAULTS: [Fault; 3] = [
    Fault {
        name: "client stopped",
        what: "SIGSTOP of a client process for longer than a lease while it holds and waits",
        losses: Losses::None,
        lasts: Lasts::PastLease,
        times: 2,
        beside: true,
        act: |scene, lasts| {
            let number = somebody(scene)?;
            scene.crew.stop(number)?;
            scene.rest(lasts);
            scene.crew.go_on(number)
        },
        ..BASE
    },
    Fault {
        name: "client killed",
        what: "kill -9 of a client process while it holds and waits; another one replaces it",
        beside: true,
        act: |scene, lasts| {
            let number = somebody(scene)?;
            scene.crew.kill(number)?;
            scene.rest(lasts);
            scene.crew.start(&scene.worker)?;
            Ok(())
        },
        ..BASE
    },
    Fault {
        name: "client restarted",
        what: "kill -9 of a client process while it holds and waits; it is restarted within the \
               lease with the same client ids",
        chosen_ids: true,
        soaks: false,
        act: |scene, lasts| {
            let number = somebody(scene)?;
            scene.crew.kill(number)?;
            scene.rest(lasts);
            scene.crew.start_in_place_of(number, &scene.worker)?;
            Ok(())
        },
        ..BASE
    },
];

/// Picks a running process.
fn somebody(scene: &mut Scene) -> Result<usize> {
    let all = scene.crew.running();
    let at = scene.random.below(all.len());
    all.get(at).copied().ok_or("no client is running".into())
}
