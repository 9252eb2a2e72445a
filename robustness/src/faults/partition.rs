//! A master that is cut off from those who watch it, while clients still reach it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::server::ask;
use super::{BASE, Fault};
use crate::Result;
use crate::checker::{Losses, MARGIN};
use crate::clock::now;
use crate::crew::lock;
use crate::history::DataLost;
use crate::scene::{CUT_OFF, Scene};
use crate::site::{LOGINS, Needs, Topology};
use crate::worker::Sync;

const PARTITION: Fault = Fault {
    what: "replicas and sentinels lose the master, clients do not; another one is chosen, and only \
           later the first one learns of it",
    on: &[Topology::Sentinel],
    needs: Needs {
        logins: true,
        ..Needs::NOTHING
    },
    times: 1,
    soaks: false,
    // What is excused is said below.
    orderly: true,
    ..BASE
};

pub(super) const FAULTS: [Fault; 2] = [
    Fault {
        name: "master cut off",
        losses: Losses::Some,
        act: |scene, lasts| {
            let from = now();
            let until = cut_off(scene, lasts)?;
            lock(&scene.history).data_lost.push(DataLost {
                from,
                until,
                forgetting: CUT_OFF,
            });
            Ok(())
        },
        ..PARTITION
    },
    // Renewals do not wait for replicas: with a lease that is shorter than a failover, what was held
    // before would end at the new master while the old one still renewed it.
    Fault {
        name: "master cut off, replica asked",
        sync: Sync::One,
        lease: 4,
        act: |scene, lasts| cut_off(scene, lasts).map(drop),
        ..PARTITION
    },
];

/// When the sentinels agreed on another master.
fn cut_off(scene: &mut Scene, lasts: Duration) -> Result<i64> {
    let master = scene.master()?;
    scene.broken(|scene| {
        for user in LOGINS {
            ask(scene.server(master), &["ACL", "SETUSER", user, "off"])?;
            ask(scene.server(master), &["CLIENT", "KILL", "USER", user])?;
        }
        let chosen = scene.site.await_successor(master);
        let at = now();
        let left = chosen.and_then(|()| await_left(scene, master));
        sleep(lasts);
        for user in LOGINS {
            ask(scene.server(master), &["ACL", "SETUSER", user, "on"])?;
        }
        // Sentinels whose login failed keep the connection, and do not try again for long.
        scene.server(master).cut_all();
        scene.site.await_whole();
        left.map(|()| at)
    })
}

/// Returns when no client is left at a server that still answers.
fn await_left(scene: &Scene, place: usize) -> Result<()> {
    // A connection that nobody uses may be noticed with the next renewal.
    let end = Instant::now() + MARGIN + Duration::from_millis(scene.worker.lease) / 3;
    loop {
        let list: String = scene.server(place).ask(&["CLIENT", "LIST"]);
        // Who asks, and sentinels that fail to log in, speak the older protocol.
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
