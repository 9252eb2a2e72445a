//! Faults of the network: connections between healthy clients and servers break, stall or lose data.

use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::Proxy;

use super::fault::{BASE, Fault, FaultDuration};
use super::server::run_command;
use crate::Result;
use crate::checker::Losses;
use crate::context::Context;
use crate::deployment::{Needs, Topology};

const NETWORK: Fault = Fault {
    topologies: &Topology::ONE_ADDRESS,
    needs: Needs {
        network: true,
        ..Needs::NOTHING
    },
    ..BASE
};

pub(super) const FAULTS: [Fault; 14] = [
    Fault {
        name: "connections reset",
        description: "all connections are closed, twenty times a second",
        can_overlap: true,
        inject: |context, duration| {
            context.with_fault_window(|context| {
                let end = Instant::now() + duration;
                while Instant::now() < end {
                    context.network()?.cut();
                    sleep(Duration::from_millis(50));
                }
                Ok(())
            })
        },
        ..NETWORK
    },
    Fault {
        name: "connections refused",
        description: "all connections are closed, and new ones immediately",
        inject: |context, duration| with_network_change(context, duration, refuse),
        ..NETWORK
    },
    Fault {
        name: "refused past the lease",
        description: "connections are closed and refused for slightly longer than a lease: they are \
               restored while lost locks are being released",
        losses: Losses::Any,
        duration: FaultDuration::JustPastLease,
        times: 5,
        in_soak: false,
        inject: |context, duration| with_network_change(context, duration, refuse),
        ..NETWORK
    },
    Fault {
        name: "answers lost",
        description: "commands arrive, replies do not; then all connections are closed",
        inject: |context, duration| with_network_change(context, duration, lose_replies),
        ..NETWORK
    },
    Fault {
        name: "answers lost past the lease",
        description: "the same for slightly longer than a lease: the store renews locks that the clients \
               lost",
        losses: Losses::Any,
        duration: FaultDuration::JustPastLease,
        in_soak: false,
        inject: |context, duration| with_network_change(context, duration, lose_replies),
        ..NETWORK
    },
    Fault {
        name: "answers cut short",
        description: "connections are reset (RST) within a reply, after some of its bytes",
        inject: |context, duration| {
            let longest = 64;
            break_repeatedly(context, duration, |network, bytes| {
                network.reset_after(1 + bytes % longest);
            })
        },
        ..NETWORK
    },
    Fault {
        name: "commands cut short",
        description: "connections are reset (RST) within a command, after some of its bytes",
        inject: |context, duration| {
            // A step with its keys and arguments has some hundred bytes.
            let longest = 400;
            break_repeatedly(context, duration, |network, bytes| {
                network.reset_after_sent(1 + bytes % longest);
            })
        },
        ..NETWORK
    },
    Fault {
        name: "answers end",
        description: "the server's half of every connection is closed, the clients' is not",
        inject: |context, duration| {
            break_repeatedly(context, duration, |network, _| network.end_replies())
        },
        ..NETWORK
    },
    Fault {
        name: "commands end",
        description: "the clients' half of every connection is closed, the server's is not",
        inject: |context, duration| {
            break_repeatedly(context, duration, |network, _| network.end_requests())
        },
        ..NETWORK
    },
    Fault {
        name: "commands lost",
        description: "commands do not arrive; then all connections are closed",
        inject: |context, duration| {
            with_network_change(context, duration, |network, losing| {
                network.discard_requests(losing);
                if !losing {
                    network.cut();
                }
            })
        },
        ..NETWORK
    },
    Fault {
        name: "signals",
        description: "behind each message, so also each grant, and each deleted or expired key, whose holder gets a report, \
               what clients send is lost, or its answers, or it is late",
        inject: fail_behind_messages,
        ..NETWORK
    },
    Fault {
        name: "delayed",
        description: "200, 300 and 400 ms more latency in each direction, each for half a lease",
        duration: FaultDuration::PastLease,
        times: 1,
        // An answer takes up to 800 ms, and clients time out after 1 s. So a renewal also fails if the machine pauses a
        // process for 0.2 s, and the lease has to leave time for several tries. Where a password changes every two seconds, the
        // connection ends before a second try.
        lease: 2,
        topologies: &[
            Topology::Single,
            Topology::Named,
            Topology::Sharded,
            Topology::Restricted,
            Topology::Resp2,
        ],
        inject: |context, duration| delay(context, duration, &[200, 300, 400]),
        ..NETWORK
    },
    Fault {
        name: "delayed past the timeout",
        description: "600 ms more latency in each direction; clients time out after 1 s",
        losses: Losses::Any,
        duration: FaultDuration::PastLease,
        times: 1,
        inject: |context, duration| delay(context, duration, &[600]),
        ..NETWORK
    },
    Fault {
        name: "stalled past the lease",
        description: "nothing is forwarded for longer than a lease, and no connection is closed",
        losses: Losses::Any,
        duration: FaultDuration::PastLease,
        times: 1,
        inject: |context, duration| with_network_change(context, duration, stall),
        ..NETWORK
    },
];

/// Breaks connections twenty times a second; `inject` gets a random number to choose by.
fn break_repeatedly(
    context: &mut Context,
    duration: Duration,
    inject: impl Fn(&Proxy, usize),
) -> Result<()> {
    let accepted_connections = |context: &mut Context| -> Result<u64> {
        let master = context.master()?;
        Ok(context
            .server(master)
            .info("total_connections_received")
            .parse()?)
    };
    context.with_fault_window(|context| {
        let before = accepted_connections(context)?;
        let end = Instant::now() + duration;
        while Instant::now() < end {
            let number = context.random.below(1 << 16);
            inject(context.network()?, number);
            sleep(Duration::from_millis(50));
        }
        // A client whose connection broke has opened another one. One of the new ones is that of the query itself.
        if accepted_connections(context)? < before + 2 && duration > Duration::from_millis(300) {
            return Err("no connection broke".into());
        }
        Ok(())
    })
}

/// How long what follows a message is late or discarded, and how long no other message counts.
const BEHIND_MESSAGE: Duration = Duration::from_millis(30);

/// Breaks the network right behind messages and reports, which come only once, in four ways in turn.
fn fail_behind_messages(context: &mut Context, duration: Duration) -> Result<()> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        let (server, network) = (context.server(master), context.network()?);
        let mut own = server.connection();
        // Reports of changed keys are pushed at the same time as these notifications.
        run_command(server, &["CONFIG", "SET", "notify-keyspace-events", "Egx"])?;
        let mut channels = own.as_pubsub();
        channels.psubscribe("*")?;
        channels.set_read_timeout(Some(BEHIND_MESSAGE))?;
        let (end, mut messages) = (Instant::now() + duration, 0);
        while Instant::now() < end {
            if channels.get_message().is_err() {
                continue;
            }
            let set: Option<fn(&Proxy, bool)> = match messages % 4 {
                0 => None,
                1 => Some(Proxy::discard_requests),
                2 => Some(Proxy::discard_replies),
                _ => Some(Proxy::stall),
            };
            if let Some(set) = set {
                set(network, true);
                sleep(BEHIND_MESSAGE);
                set(network, false);
            }
            if messages % 4 < 3 {
                network.cut();
            }
            messages += 1;
            sleep(BEHIND_MESSAGE);
            // Those that were published meanwhile.
            channels.set_read_timeout(Some(Duration::from_millis(1)))?;
            while Instant::now() < end && channels.get_message().is_ok() {}
            channels.set_read_timeout(Some(BEHIND_MESSAGE))?;
        }
        run_command(server, &["CONFIG", "SET", "notify-keyspace-events", ""])?;
        if messages == 0 && duration > Duration::from_millis(300) {
            return Err("no message was published".into());
        }
        Ok(())
    })
}

fn delay(context: &mut Context, duration: Duration, each: &[u64]) -> Result<()> {
    let part = duration / u32::try_from(each.len())?;
    context.with_fault_window(|context| {
        for &millis in each {
            context.network()?.delay(Duration::from_millis(millis));
            sleep(part);
        }
        context.network()?.delay(Duration::ZERO);
        // The last request is in flight for that long.
        sleep(Duration::from_millis(
            each.last().copied().unwrap_or_default(),
        ));
        Ok(())
    })
}

/// Changes the behavior of the network for the duration of the fault.
fn with_network_change(
    context: &mut Context,
    duration: Duration,
    change: fn(&Proxy, bool),
) -> Result<()> {
    let change = |context: &mut Context, broken| {
        if let Some(network) = context.deployment.network() {
            change(network, broken);
        }
    };
    context.with_outage(
        duration,
        |context| change(context, true),
        |context| change(context, false),
    )
}

fn refuse(network: &Proxy, refusing: bool) {
    network.refuse(refusing);
    network.cut();
}

fn lose_replies(network: &Proxy, discarding: bool) {
    network.discard_replies(discarding);
    if !discarding {
        network.cut();
    }
}

fn stall(network: &Proxy, stalled: bool) {
    network.stall(stalled);
}
