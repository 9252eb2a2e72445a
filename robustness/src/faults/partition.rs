//! Partitions: a master is cut off from its replicas and from the servers that watch it, while clients still
//! reach it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::fault::{BASE, Fault};
use crate::Result;
use crate::checker::{Losses, MARGIN};
use crate::clock::now;
use crate::context::Context;
use crate::deployment::{Needs, Topology};
use crate::history::{DataLoss, DataLossWindow};
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

pub(super) const FAULTS: [Fault; 3] = [
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
    let from = now();
    let until = partition_master(context, duration)?;
    let window = DataLossWindow { from, until, loss };
    lock(&context.history).data_losses.push(window);
    Ok(())
}

/// Cuts off a master. Returns when the new master was known.
fn partition_master(context: &mut Context, duration: Duration) -> Result<i64> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        let partition = Partition::of(context.server(master).address())?;
        context.deployment.await_successor(master)?;
        let at = now();
        await_clients_gone(context, master)?;
        sleep(duration);
        drop(partition);
        context.deployment.await_healthy();
        Ok(at)
    })
}

/// Waits until no client is connected to a server that still answers.
fn await_clients_gone(context: &Context, place: usize) -> Result<()> {
    // An unused connection may be noticed only at the next renewal, or when an observer looks again, after a lease.
    let end = Instant::now() + MARGIN + Duration::from_millis(context.worker.lease);
    loop {
        let list: String = context.server(place).command(&["CLIENT", "LIST"]);
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
