//! Faults of the network: connections between healthy clients and servers break, stall or lose data.

use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::Proxy;

use super::{BASE, Fault, Lasts};
use crate::Result;
use crate::checker::Losses;
use crate::scene::Scene;
use crate::site::{Needs, Topology};

const NETWORK: Fault = Fault {
    on: &[Topology::Single],
    needs: Needs {
        network: true,
        ..Needs::NOTHING
    },
    ..BASE
};

pub(super) const FAULTS: [Fault; 13] = [
    Fault {
        name: "connections reset",
        what: "all connections are closed, twenty times a second",
        beside: true,
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
        what: "all connections are closed, and new ones immediately",
        act: |scene, lasts| changed(scene, lasts, refuse),
        ..NETWORK
    },
    Fault {
        name: "refused past the lease",
        what: "connections are closed and refused for slightly longer than a lease: they are \
               restored while lost locks are being released",
        losses: Losses::Some,
        lasts: Lasts::JustPastLease,
        times: 5,
        soaks: false,
        act: |scene, lasts| changed(scene, lasts, refuse),
        ..NETWORK
    },
    Fault {
        name: "answers lost",
        what: "commands arrive, replies do not; then all connections are closed",
        act: |scene, lasts| changed(scene, lasts, swallow),
        ..NETWORK
    },
    Fault {
        name: "answers lost past the lease",
        what: "the same for slightly longer than a lease: the store renews locks that the clients \
               lost",
        losses: Losses::Some,
        lasts: Lasts::JustPastLease,
        soaks: false,
        act: |scene, lasts| changed(scene, lasts, swallow),
        ..NETWORK
    },
    Fault {
        name: "answers cut short",
        what: "connections are reset (RST) within a reply, after some of its bytes",
        act: |scene, lasts| {
            let longest = 64;
            again(scene, lasts, |network, bytes| {
                network.reset_after(1 + bytes % longest);
            })
        },
        ..NETWORK
    },
    Fault {
        name: "commands cut short",
        what: "connections are reset (RST) within a command, after some of its bytes",
        act: |scene, lasts| {
            // A step with its keys and arguments has some hundred bytes.
            let longest = 400;
            again(scene, lasts, |network, bytes| {
                network.reset_after_sent(1 + bytes % longest);
            })
        },
        ..NETWORK
    },
    Fault {
        name: "answers end",
        what: "the server's half of every connection is closed, the clients' is not",
        act: |scene, lasts| again(scene, lasts, |network, _| network.end_replies()),
        ..NETWORK
    },
    Fault {
        name: "commands end",
        what: "the clients' half of every connection is closed, the server's is not",
        act: |scene, lasts| again(scene, lasts, |network, _| network.end_requests()),
        ..NETWORK
    },
    Fault {
        name: "commands lost",
        what: "commands do not arrive; then all connections are closed",
        act: |scene, lasts| {
            changed(scene, lasts, |network, losing| {
                network.swallow_requests(losing);
                if !losing {
                    network.cut();
                }
            })
        },
        ..NETWORK
    },
    Fault {
        name: "delayed",
        what: "200, 300 and 400 ms more latency in each direction, each for half a lease",
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| delay(scene, lasts, &[200, 300, 400]),
        ..NETWORK
    },
    Fault {
        name: "delayed past the timeout",
        what: "600 ms more latency in each direction; clients time out after 1 s",
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| delay(scene, lasts, &[600]),
        ..NETWORK
    },
    Fault {
        name: "stalled past the lease",
        what: "nothing is forwarded for longer than a lease, and no connection is closed",
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| changed(scene, lasts, stall),
        ..NETWORK
    },
];

/// Breaks connections twenty times a second; `act` gets a random number to choose by.
fn again(scene: &mut Scene, lasts: Duration, act: impl Fn(&Proxy, usize)) -> Result<()> {
    let came = |scene: &mut Scene| -> Result<u64> {
        let master = scene.master()?;
        Ok(scene
            .server(master)
            .info("total_connections_received")
            .parse()?)
    };
    scene.broken(|scene| {
        let before = came(scene)?;
        let end = Instant::now() + lasts;
        while Instant::now() < end {
            let number = scene.random.below(1 << 16);
            act(scene.network()?, number);
            sleep(Duration::from_millis(50));
        }
        // A client whose connection broke has opened another one. One of the new ones is that of the query itself.
        if came(scene)? < before + 2 && lasts > Duration::from_millis(300) {
            return Err("no connection broke".into());
        }
        Ok(())
    })
}

fn delay(scene: &mut Scene, lasts: Duration, each: &[u64]) -> Result<()> {
    let part = lasts / u32::try_from(each.len())?;
    scene.broken(|scene| {
        for &millis in each {
            scene.network()?.delay(Duration::from_millis(millis));
            sleep(part);
        }
        scene.network()?.delay(Duration::ZERO);
        // The last request is in flight for that long.
        sleep(Duration::from_millis(
            each.last().copied().unwrap_or_default(),
        ));
        Ok(())
    })
}

/// Changes the behavior of the network for the duration of the fault.
fn changed(scene: &mut Scene, lasts: Duration, change: fn(&Proxy, bool)) -> Result<()> {
    let change = |scene: &mut Scene, broken| {
        if let Some(network) = scene.site.network() {
            change(network, broken);
        }
    };
    scene.cut(
        lasts,
        |scene| change(scene, true),
        |scene| change(scene, false),
    )
}

fn refuse(network: &Proxy, refusing: bool) {
    network.refuse(refusing);
    network.cut();
}

fn swallow(network: &Proxy, swallowing: bool) {
    network.swallow_replies(swallowing);
    if !swallowing {
        network.cut();
    }
}

fn stall(network: &Proxy, stalled: bool) {
    network.stall(stalled);
}
