//! Partitions: a master is cut off from its replicas and from the servers that watch it, while clients still
//! reach it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{BASE, Fault};
use crate::Result;
use crate::checker::{Losses, MARGIN};
use crate::clock::now;
use crate::crew::lock;
use crate::history::{DataLost, Forgetting};
use crate::namespace::Partition;
use crate::scene::Scene;
use crate::site::{Needs, Topology};
use crate::worker::Sync;

const PARTITION: Fault = Fault {
    what: "a master is cut off from its replicas, sentinels and other nodes, but not from clients; \
           another master is elected, and the first one detects it later",
    on: &[Topology::Sentinel, Topology::Cluster],
    needs: Needs {
        partitions: true,
        ..Needs::NOTHING
    },
    times: 1,
    soaks: false,
    // Violations are excused explicitly below.
    orderly: true,
    ..BASE
};

pub(super) const FAULTS: [Fault; 3] = [
    Fault {
        name: "master partitioned",
        losses: Losses::Some,
        act: excused,
        ..PARTITION
    },
    Fault {
        name: "master partitioned, none asked",
        what: "the same with ReplicaSync::Off",
        losses: Losses::Some,
        sync: Sync::Off,
        act: excused,
        ..PARTITION
    },
    // Renewals do not wait for replicas: with a lease shorter than a failover, earlier holds would expire at the
    // new master while the old one still renewed them.
    Fault {
        name: "master partitioned, replica asked",
        what: "the same with ReplicaSync::AtLeast(1), which grants nothing that is lost",
        sync: Sync::One,
        lease: 4,
        act: |scene, lasts| cut_off(scene, lasts).map(drop),
        ..PARTITION
    },
];

/// Records the cut-off as a loss of data, because the old master still grants acquisitions until clients have left it.
fn excused(scene: &mut Scene, lasts: Duration) -> Result<()> {
    let from = now();
    let until = cut_off(scene, lasts)?;
    lock(&scene.history).data_lost.push(DataLost {
        from,
        until,
        forgetting: Forgetting::CUT_OFF,
    });
    Ok(())
}

/// Cuts off a master. Returns when the new master was known.
fn cut_off(scene: &mut Scene, lasts: Duration) -> Result<i64> {
    let master = scene.master()?;
    scene.broken(|scene| {
        let partition = Partition::of(scene.server(master).address())?;
        scene.site.await_successor(master)?;
        let at = now();
        await_left(scene, master)?;
        sleep(lasts);
        drop(partition);
        scene.site.await_whole();
        Ok(at)
    })
}

/// Waits until no client is connected to a server that still answers.
fn await_left(scene: &Scene, place: usize) -> Result<()> {
    // An unused connection may be noticed only at the next renewal.
    let end = Instant::now() + MARGIN + Duration::from_millis(scene.worker.lease) / 3;
    loop {
        let list: String = scene.server(place).ask(&["CLIENT", "LIST"]);
        // This query and the servers among themselves use RESP2.
        let clients = |line: &&str| line.contains(" resp=3");
        let left: Vec<&str> = list.lines().filter(clients).collect();
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > end {
            let left = left.join("\n");
            return Err(format!("still with the old master:\n{left}").into());
        }
        sleep(Duration::from_millis(20));
    }
}
