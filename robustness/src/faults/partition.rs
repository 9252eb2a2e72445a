//! Partitions: a master is cut off from its replicas and from the servers that watch it, while clients still
//! reach it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::fault::{BASE, Fault};
use crate::Result;
use crate::checker::{Losses, MARGIN};
use crate::clock::{Time, now};
use crate::context::Context;
use crate::deployment::{Needs, Topology};
use crate::history::DataLoss;
use crate::namespace::Partition;
use crate::processes::lock;
use crate::worker::Sync;

const PARTITION: Fault = Fault {
    description: "a master is cut off from its replicas, sentinels and other nodes, but not from clients; \
           another master is elected, and the first one detects it later",
    topologies: &[Topology::Sentinel, Topology::Cluster],
    needs: Needs {
        partitions: true,
        ..Needs::NOTHING
    },
    times: 1,
    in_soak: false,
    // Violations are excused explicitly below.
    lossless_failover: true,
    ..BASE
};

pub(super) const FAULTS: [Fault; 4] = [
    Fault {
        name: "master partitioned",
        losses: Losses::Any,
        inject: |context, duration| {
            partition_with_loss(context, duration, DataLoss::MASTER_PARTITIONED)
        },
        ..PARTITION
    },
    Fault {
        name: "master partitioned, none asked",
        description: "the same with ReplicaSync::Off",
        losses: Losses::Any,
        sync: Sync::Off,
        inject: |context, duration| {
            partition_with_loss(context, duration, DataLoss::MASTER_PARTITIONED)
        },
        ..PARTITION
    },
    Fault {
        name: "master partitioned, queries late",
        description: "the same, and the first queries of the clients behind the sentinels' messages arrive \
               when the clients no longer wait for them",
        topologies: &[Topology::Sentinel],
        needs: Needs {
            sentinel_network: true,
            ..PARTITION.needs
        },
        losses: Losses::Any,
        inject: |context, duration| {
            partition_with_loss(context, duration, DataLoss::MASTER_PARTITIONED)
        },
        ..PARTITION
    },
    // Renewals do not wait for replicas: with a lease shorter than a failover, earlier holds would expire at the
    // new master while the old one still renewed them.
    Fault {
        name: "master partitioned, replica asked",
        description: "the same with ReplicaSync::AtLeast(1), which grants nothing that is lost",
        sync: Sync::One,
        lease: 4,
        inject: |context, duration| {
            partition_with_loss(context, duration, DataLoss::UNCONFIRMED_WRITES)
        },
        ..PARTITION
    },
];

/// Records the cut-off as a loss of data: the old master still accepts what the new one does not have, until clients have
/// left it.
fn partition_with_loss(context: &mut Context, duration: Duration, loss: DataLoss) -> Result<()> {
    let (from, until) = partition_master(context, duration)?;
    context.set_permits()?;
    lock(&context.history).record_data_loss(from, until, loss);
    Ok(())
}

/// Cuts off a master. Returns when that began, and when clients knew the new master.
fn partition_master(context: &mut Context, duration: Duration) -> Result<(Time, Time)> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        let from = now();
        let partition = Partition::of(context.server(master).address())?;
        hold_queries(context, true);
        context.deployment.await_successor(master)?;
        await_queries(context)?;
        hold_queries(context, false);
        let at = now();
        await_clients_gone(context, master)?;
        let left_at = now();
        sleep(duration);
        drop(partition);
        context.deployment.await_healthy();
        match context.deployment.sentinel_network() {
            [] => Ok((from, at)),
            // Clients whose queries were late leave later.
            _ => Ok((from, left_at)),
        }
    })
}

/// Holds the clients' queries to the sentinels back, where that network can be broken, or ends that.
fn hold_queries(context: &Context, held: bool) {
    for proxy in context.deployment.sentinel_network() {
        proxy.hold_requests(held);
    }
}

/// Waits until clients have queried the sentinels once more.
fn await_queries(context: &Context) -> Result<()> {
    hold_queries(context, true);
    let end = Instant::now() + MARGIN * 4;
    let network = context.deployment.sentinel_network();
    while network.iter().any(|proxy| proxy.held_requests() == 0) {
        if Instant::now() > end {
            return Err("the clients query the sentinels no more".into());
        }
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Waits until no client is connected to a server that still answers.
fn await_clients_gone(context: &Context, place: usize) -> Result<()> {
    // An unused connection may be noticed only at the next renewal, or when an observer looks again, after a lease.
    let end = Instant::now() + MARGIN + Duration::from_millis(context.worker.lease);
    loop {
        let list: String = context.server(place).command(&["CLIENT", "LIST"]);
        // This query and the servers among themselves use RESP2. A client of a cluster that has nothing at this server
        // may have asked it for the owners of the slots, and keeps that connection until it asks for them again.
        let clients =
            |line: &&str| line.contains(" resp=3") && !line.contains(" cmd=cluster|slots ");
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
