//! Failovers: masters that replicas or other nodes replace.

use std::thread::sleep;
use std::time::Duration;

use redlatch_testkit::Sentinels;

use super::server::ask;
use super::{BASE, Fault};
use crate::Result;
use crate::checker::Losses;
use crate::scene::Scene;
use crate::site::{Needs, Topology};
use crate::worker::Sync;

const REPLICATED: Fault = Fault {
    on: &[Topology::Sentinel, Topology::Cluster],
    losses: Losses::Some,
    times: 1,
    ..BASE
};

pub(super) const FAULTS: [Fault; 13] = [
    Fault {
        name: "master killed",
        what: "kill -9 of a master; a replica is promoted, and the master returns as a replica",
        act: |scene, _| kill(scene, |_, _| Ok(())),
        ..REPLICATED
    },
    Fault {
        name: "master killed, replicas behind",
        what: "the same after the replicas could not replicate for some time",
        soaks: false,
        act: |scene, lasts| {
            kill(scene, |scene, master| {
                let server = scene.server(master);
                ask(server, &["ACL", "SETUSER", "default", "-psync", "-sync"])?;
                ask(server, &["CLIENT", "KILL", "TYPE", "replica"])?;
                sleep(lasts);
                Ok(())
            })
        },
        ..REPLICATED
    },
    Fault {
        name: "master killed, none asked",
        what: "the same as `master killed`, with ReplicaSync::Off",
        sync: Sync::Off,
        soaks: false,
        act: |scene, _| kill(scene, |_, _| Ok(())),
        ..REPLICATED
    },
    // The next two differ only in the number of replicas that clients wait for.
    Fault {
        name: "replicas syncing, none asked",
        what: "a master is killed while its replicas are connected but wait for a full \
               resynchronization, with ReplicaSync::Off",
        sync: Sync::Off,
        lease: 4,
        soaks: false,
        act: |scene, _| kill(scene, hold_back),
        ..REPLICATED
    },
    Fault {
        name: "replicas syncing, all asked",
        what: "the same with ReplicaSync::All",
        losses: Losses::None,
        lease: 4,
        soaks: false,
        // No violation is excused.
        orderly: true,
        act: |scene, _| kill(scene, hold_back),
        ..REPLICATED
    },
    Fault {
        name: "master handed over",
        what: "SENTINEL FAILOVER",
        on: &[Topology::Sentinel],
        act: |scene, _| hand_over(scene),
        ..REPLICATED
    },
    Fault {
        name: "master handed over, orderly",
        what: "CLUSTER FAILOVER",
        orderly: true,
        on: &[Topology::Cluster],
        act: |scene, _| hand_over(scene),
        ..REPLICATED
    },
    Fault {
        name: "master frozen and replaced",
        what: "SIGSTOP of a master until a replica is promoted, then SIGCONT",
        act: |scene, lasts| {
            let master = scene.master()?;
            scene.broken(|scene| {
                scene.server(master).freeze();
                scene.beside(FAILOVER);
                let replaced = scene.site.await_successor(master);
                sleep(lasts);
                scene.server(master).thaw();
                scene.site.await_whole();
                replaced
            })
        },
        ..REPLICATED
    },
    Fault {
        name: "master and sentinel killed",
        what: "kill -9 of the master and of the first sentinel in the clients' list",
        on: &[Topology::Sentinel],
        act: |scene, _| {
            sentinels(scene)?.kill_sentinel(0);
            let done = kill(scene, |_, _| Ok(()));
            sentinels(scene)?.restart_sentinel(0);
            scene.site.await_whole();
            done
        },
        ..REPLICATED
    },
    Fault {
        name: "master killed, a sentinel lies",
        what: "one of the clients' three sentinels always reports another server, with the highest \
               epoch",
        on: &[Topology::Sentinel],
        needs: Needs {
            liar: true,
            ..Needs::NOTHING
        },
        soaks: false,
        act: |scene, _| {
            kill(scene, |_, _| Ok(()))?;
            let decoy = scene.site.decoy().ok_or("no fake master")?;
            let asked: String = decoy.ask(&["INFO", "commandstats"]);
            match asked.contains("cmdstat_eval") {
                true => Err(
                    "clients acquired locks on the server that the wrong sentinel reported".into(),
                ),
                false => Ok(()),
            }
        },
        ..REPLICATED
    },
    Fault {
        name: "sentinels frozen",
        what: "SIGSTOP of all sentinels, while the clients must reconnect",
        on: &[Topology::Sentinel],
        losses: Losses::None,
        times: 2,
        act: |scene, lasts| {
            let master = scene.master()?;
            scene.broken(|scene| {
                let all = sentinels(scene)?;
                let places = 0..all.sentinels().len();
                places.clone().for_each(|place| all.freeze_sentinel(place));
                all.servers()[master].cut_all();
                sleep(lasts);
                places.for_each(|place| all.thaw_sentinel(place));
                Ok(())
            })
        },
        ..REPLICATED
    },
    Fault {
        name: "slots moved",
        what: "the slots of all names move to another master, key by key",
        on: &[Topology::Cluster],
        losses: Losses::None,
        orderly: true,
        act: move_slots,
        ..REPLICATED
    },
    Fault {
        name: "node added and removed",
        what: "a new master joins, imports the slots of half of the names, returns them and leaves",
        on: &[Topology::Cluster],
        losses: Losses::None,
        orderly: true,
        act: come_and_go,
        ..REPLICATED
    },
];

/// Minimum duration of a failover.
const FAILOVER: Duration = Duration::from_secs(2);

fn sentinels(scene: &mut Scene) -> Result<&mut Sentinels> {
    scene.site.sentinels().ok_or("no sentinels".into())
}

fn kill(scene: &mut Scene, before: impl FnOnce(&Scene, usize) -> Result<()>) -> Result<()> {
    let master = scene.master()?;
    scene.broken(|scene| {
        before(scene, master)?;
        scene.site.kill(master);
        scene.beside(FAILOVER);
        scene.site.await_successor(master)
    })?;
    scene.site.restart(master);
    scene.site.await_whole();
    Ok(())
}

/// Stops replication while replicas stay connected: they need a full resynchronization, which the master
/// delays.
fn hold_back(scene: &Scene, master: usize) -> Result<()> {
    let server = scene.server(master);
    ask(server, &["CONFIG", "SET", "repl-diskless-sync-delay", "60"])?;
    ask(server, &["DEBUG", "CHANGE-REPL-ID"])?;
    ask(server, &["CLIENT", "KILL", "TYPE", "replica"])?;
    // Not for long, because renewals are not replicated either.
    sleep(Duration::from_secs(1));
    Ok(())
}

fn hand_over(scene: &mut Scene) -> Result<()> {
    let master = scene.master()?;
    scene.broken(|scene| scene.site.hand_over(master))?;
    scene.site.await_whole();
    Ok(())
}

fn move_slots(scene: &mut Scene, _: Duration) -> Result<()> {
    let masters = scene.site.masters();
    scene.broken(|scene| {
        for name in scene.names() {
            let to = masters[scene.random.below(masters.len())];
            let cluster = scene.site.cluster().ok_or("no cluster")?;
            let slot = cluster.slot_of(&name);
            if cluster.owner(slot) == to {
                continue;
            }
            cluster.begin_moving(slot, to);
            sleep(Duration::from_millis(10));
            cluster.move_keys(slot, to);
            sleep(Duration::from_millis(10));
            cluster.finish_moving(slot, to);
        }
        Ok(())
    })
}

fn come_and_go(scene: &mut Scene, lasts: Duration) -> Result<()> {
    scene.broken(|scene| {
        let names = scene.names();
        let cluster = scene.site.cluster().ok_or("no cluster")?;
        let newcomer = cluster.add_node();
        for name in names.iter().step_by(2) {
            let slot = cluster.slot_of(name);
            if cluster.owner(slot) != newcomer {
                cluster.move_slot(slot, newcomer);
            }
        }
        sleep(lasts);
        cluster.remove_node(newcomer);
        Ok(())
    })
}
