//! Failovers: masters that replicas or other nodes replace.

use std::thread::sleep;
use std::time::Duration;

use redlatch_testkit::Sentinels;

use super::fault::{BASE, Fault};
use super::server::run_command;
use crate::Result;
use crate::checker::Losses;
use crate::context::Context;
use crate::deployment::{Needs, Topology};
use crate::worker::Sync;

const REPLICATED: Fault = Fault {
    topologies: &[Topology::Sentinel, Topology::Cluster],
    losses: Losses::Any,
    times: 1,
    ..BASE
};

pub(super) const FAULTS: [Fault; 14] = [
    Fault {
        name: "master killed",
        description: "kill -9 of a master; a replica is promoted, and the master returns as a replica",
        topologies: &[Topology::Sentinel, Topology::Cluster, Topology::Named],
        inject: |context, _| kill(context, |_, _| Ok(())),
        ..REPLICATED
    },
    Fault {
        name: "master killed, replicas behind",
        description: "the same after the replicas could not replicate for some time",
        in_soak: false,
        inject: |context, duration| {
            kill(context, |context, master| {
                let server = context.server(master);
                run_command(server, &["ACL", "SETUSER", "default", "-psync", "-sync"])?;
                run_command(server, &["CLIENT", "KILL", "TYPE", "replica"])?;
                sleep(duration);
                Ok(())
            })
        },
        ..REPLICATED
    },
    Fault {
        name: "master killed, none asked",
        description: "the same as `master killed`, with ReplicaSync::Off",
        sync: Sync::Off,
        in_soak: false,
        inject: |context, _| kill(context, |_, _| Ok(())),
        ..REPLICATED
    },
    // The next two differ only in the number of replicas that clients wait for.
    Fault {
        name: "replicas syncing, none asked",
        description: "a master is killed while its replicas are connected but wait for a full \
               resynchronization, with ReplicaSync::Off",
        sync: Sync::Off,
        lease: 4,
        in_soak: false,
        inject: |context, _| kill(context, stall_replication),
        ..REPLICATED
    },
    Fault {
        name: "replicas syncing, all asked",
        description: "the same with ReplicaSync::All",
        losses: Losses::None,
        lease: 4,
        in_soak: false,
        // No violation is excused.
        lossless_failover: true,
        inject: |context, _| kill(context, stall_replication),
        ..REPLICATED
    },
    Fault {
        name: "master handed over",
        description: "SENTINEL FAILOVER",
        topologies: &[Topology::Sentinel],
        inject: |context, _| hand_over(context),
        ..REPLICATED
    },
    Fault {
        name: "master handed over, orderly",
        description: "CLUSTER FAILOVER",
        lossless_failover: true,
        topologies: &[Topology::Cluster],
        inject: |context, _| hand_over(context),
        ..REPLICATED
    },
    Fault {
        name: "master frozen and replaced",
        description: "SIGSTOP of a master until a replica is promoted, then SIGCONT",
        inject: |context, duration| {
            let master = context.master()?;
            context.with_fault_window(|context| {
                context.server(master).freeze();
                context.run_due_faults(FAILOVER);
                let replaced = context.deployment.await_successor(master);
                sleep(duration);
                context.server(master).thaw();
                context.deployment.await_healthy();
                replaced
            })
        },
        ..REPLICATED
    },
    Fault {
        name: "master and sentinel killed",
        description: "kill -9 of the master and of the first sentinel in the clients' list",
        topologies: &[Topology::Sentinel],
        inject: |context, _| {
            sentinels(context)?.kill_sentinel(0);
            let done = kill(context, |_, _| Ok(()));
            sentinels(context)?.restart_sentinel(0);
            context.deployment.await_healthy();
            done
        },
        ..REPLICATED
    },
    Fault {
        name: "master killed, a sentinel lies",
        description: "one of the clients' three sentinels always reports another server, with the highest \
               epoch",
        topologies: &[Topology::Sentinel],
        needs: Needs {
            fake_sentinel: true,
            ..Needs::NOTHING
        },
        in_soak: false,
        inject: |context, _| {
            kill(context, |_, _| Ok(()))?;
            let decoy = context.deployment.decoy().ok_or("no fake master")?;
            let statistics: String = decoy.command(&["INFO", "commandstats"]);
            match statistics.contains("cmdstat_eval") {
                true => Err(
                    "clients acquired locks on the server that the wrong sentinel reported".into(),
                ),
                false => Ok(()),
            }
        },
        ..REPLICATED
    },
    Fault {
        name: "name moved",
        description: "FAILOVER; the former master keeps its connections, and the name leads to it a little longer",
        topologies: &[Topology::Named],
        losses: Losses::None,
        lossless_failover: true,
        times: 3,
        inject: |context, _| hand_over(context),
        ..REPLICATED
    },
    Fault {
        name: "sentinels frozen",
        description: "SIGSTOP of all sentinels, while the clients must reconnect",
        topologies: &[Topology::Sentinel],
        losses: Losses::None,
        times: 2,
        inject: |context, duration| {
            let master = context.master()?;
            context.with_fault_window(|context| {
                let all = sentinels(context)?;
                let places = 0..all.sentinels().len();
                places.clone().for_each(|place| all.freeze_sentinel(place));
                all.servers()[master].cut_all();
                sleep(duration);
                places.for_each(|place| all.thaw_sentinel(place));
                Ok(())
            })
        },
        ..REPLICATED
    },
    Fault {
        name: "slots moved",
        description: "the slots of all names move to another master, key by key",
        topologies: &[Topology::Cluster],
        losses: Losses::None,
        lossless_failover: true,
        inject: move_slots,
        ..REPLICATED
    },
    Fault {
        name: "node added and removed",
        description: "a new master joins, imports the slots of half of the names, returns them and leaves",
        topologies: &[Topology::Cluster],
        losses: Losses::None,
        lossless_failover: true,
        inject: add_and_remove_node,
        ..REPLICATED
    },
];

/// Minimum duration of a failover.
const FAILOVER: Duration = Duration::from_secs(2);

fn sentinels(context: &mut Context) -> Result<&mut Sentinels> {
    context.deployment.sentinels().ok_or("no sentinels".into())
}

fn kill(context: &mut Context, before: impl FnOnce(&Context, usize) -> Result<()>) -> Result<()> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        before(context, master)?;
        context.deployment.kill(master);
        context.run_due_faults(FAILOVER);
        context.deployment.await_successor(master)
    })?;
    context.deployment.restart(master);
    context.deployment.await_healthy();
    Ok(())
}

/// Stops replication while replicas stay connected: they need a full resynchronization, which the master
/// delays.
fn stall_replication(context: &Context, master: usize) -> Result<()> {
    let server = context.server(master);
    run_command(server, &["CONFIG", "SET", "repl-diskless-sync-delay", "60"])?;
    run_command(server, &["DEBUG", "CHANGE-REPL-ID"])?;
    run_command(server, &["CLIENT", "KILL", "TYPE", "replica"])?;
    // Not for long, because renewals are not replicated either.
    sleep(Duration::from_secs(1));
    Ok(())
}

fn hand_over(context: &mut Context) -> Result<()> {
    let master = context.master()?;
    context.with_fault_window(|context| context.deployment.hand_over(master))?;
    context.deployment.await_healthy();
    Ok(())
}

fn move_slots(context: &mut Context, _: Duration) -> Result<()> {
    let masters = context.deployment.masters();
    context.with_fault_window(|context| {
        for name in context.names() {
            let to = masters[context.random.below(masters.len())];
            let cluster = context.deployment.cluster().ok_or("no cluster")?;
            let slot = cluster.slot_of(&name);
            if cluster.master_of_slot(slot) == to {
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

fn add_and_remove_node(context: &mut Context, duration: Duration) -> Result<()> {
    context.with_fault_window(|context| {
        let names = context.names();
        let cluster = context.deployment.cluster().ok_or("no cluster")?;
        let new_node = cluster.add_node();
        for name in names.iter().step_by(2) {
            let slot = cluster.slot_of(name);
            if cluster.master_of_slot(slot) != new_node {
                cluster.move_slot(slot, new_node);
            }
        }
        sleep(duration);
        cluster.remove_node(new_node);
        Ok(())
    })
}
