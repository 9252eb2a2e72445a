//! Connections that break or say nothing, between whole clients and whole servers.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{BASE, Fault, Lasts};
use crate::checker::Losses;
use crate::scene::Scene;
use crate::site::{Needs, Topology};

const NETWORK: Fault = Fault {
    on: &[Topology::Single],
    needs: Needs {
        network: true,
        durable: false,
    },
    ..BASE
};

pub(super) const FAULTS: [Fault; 4] = [
    Fault {
        name: "connections reset",
        what: "all connections cut, twenty times a second",
        act: |scene, lasts| {
            scene.broken(|scene| {
                let end = Instant::now() + lasts;
                while Instant::now() < end {
                    scene.network()?.cut();
                    sleep(Duration::from_millis(50));
                }
                Ok(())
            })
        },
        ..NETWORK
    },
    Fault {
        name: "connections refused",
        what: "all connections cut, and new ones closed at once",
        act: |scene, lasts| {
            scene.cut(
                lasts,
                |scene| refuse(scene, true),
                |scene| refuse(scene, false),
            )
        },
        ..NETWORK
    },
    Fault {
        name: "answers lost",
        what: "commands arrive, answers do not; then all connections are cut",
        act: |scene, lasts| {
            scene.cut(
                lasts,
                |scene| swallow(scene, true),
                |scene| swallow(scene, false),
            )
        },
        ..NETWORK
    },
    Fault {
        name: "stalled past the lease",
        what: "nothing is passed on for longer than a lease, and nothing closed",
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| {
            scene.cut(
                lasts,
                |scene| stall(scene, true),
                |scene| stall(scene, false),
            )
        },
        ..NETWORK
    },
];

fn refuse(scene: &mut Scene, refusing: bool) {
    if let Some(network) = scene.site.network() {
        network.refuse(refusing);
        network.cut();
    }
}

fn swallow(scene: &mut Scene, swallowing: bool) {
    if let Some(network) = scene.site.network() {
        network.swallow_replies(swallowing);
        if !swallowing {
            network.cut();
        }
    }
}

fn stall(scene: &mut Scene, stalled: bool) {
    if let Some(network) = scene.site.network() {
        network.stall(stalled);
    }
}
