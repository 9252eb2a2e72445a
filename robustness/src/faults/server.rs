//! Faults of servers: they die, are paused, or refuse their clients.

use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::Server;

use super::fault::{BASE, Fault, FaultDuration};
use crate::Result;
use crate::checker::Losses;
use crate::context::Context;
use crate::deployment::{Needs, Topology};
use crate::history::DataLoss;

pub(super) const FAULTS: [Fault; 14] = [
    Fault {
        name: "killed, durable",
        description: "kill -9 of the server, which restarts with all its data (AOF, fsync always)",
        needs: Needs {
            durable: true,
            ..Needs::NOTHING
        },
        // A server with slots refuses commands for two seconds after a restart.
        lease: 2,
        topologies: &[
            Topology::Single,
            Topology::Sharded,
            Topology::Restricted,
            Topology::Resp2,
        ],
        inject: kill,
        ..BASE
    },
    Fault {
        name: "killed, empty",
        description: "kill -9 of the server, which restarts without its data",
        losses: Losses::Any,
        in_soak: false,
        times: 2,
        topologies: &[Topology::Single],
        inject: |context, duration| {
            context.with_data_loss(DataLoss::NO_DATA, |context| kill(context, duration))
        },
        ..BASE
    },
    Fault {
        name: "paused",
        description: "CLIENT PAUSE ALL",
        inject: |context, duration| pause(context, duration, "ALL"),
        ..BASE
    },
    Fault {
        name: "paused, writes",
        description: "CLIENT PAUSE WRITE",
        inject: |context, duration| pause(context, duration, "WRITE"),
        ..BASE
    },
    Fault {
        name: "paused past the lease",
        description: "CLIENT PAUSE ALL for longer than a lease",
        topologies: &[Topology::Single],
        losses: Losses::Any,
        duration: FaultDuration::PastLease,
        times: 1,
        in_soak: false,
        inject: |context, duration| pause(context, duration, "ALL"),
        ..BASE
    },
    Fault {
        name: "asleep",
        description: "DEBUG SLEEP",
        inject: |context, duration| {
            let seconds = duration.as_secs_f64().to_string();
            let master = context.master()?;
            context.with_fault_window(|context| {
                run_command(context.server(master), &["DEBUG", "SLEEP", &seconds])
            })
        },
        ..BASE
    },
    Fault {
        name: "frozen past the lease",
        description: "SIGSTOP of the server for longer than a lease",
        topologies: &[Topology::Single],
        losses: Losses::Any,
        duration: FaultDuration::PastLease,
        times: 1,
        inject: |context, duration| {
            let master = context.master()?;
            let freeze = |context: &mut Context| context.server(master).freeze();
            context.with_outage(duration, freeze, |context| context.server(master).thaw())
        },
        ..BASE
    },
    Fault {
        name: "node frozen, many held",
        description: "SIGSTOP of one of three masters for longer than a lease, while a client holds 3,000 \
               locks; no lock on the other masters is lost",
        topologies: &[Topology::Cluster],
        needs: Needs {
            no_failover: true,
            ..Needs::NOTHING
        },
        losses: Losses::Unreachable,
        duration: FaultDuration::PastLease,
        times: 1,
        in_soak: false,
        permanent_locks: 3000,
        lease: 2,
        inject: |context, duration| {
            let master = context.master()?;
            context.mark_unreachable(master)?;
            let freeze = |context: &mut Context| context.server(master).freeze();
            context.with_outage(duration, freeze, |context| context.server(master).thaw())
        },
        ..BASE
    },
    Fault {
        name: "clients killed",
        description: "CLIENT KILL of all connections, ten times a second",
        inject: |context, duration| {
            repeat(context, duration, Duration::from_millis(100), |server| {
                server.cut_all();
                Ok(())
            })
        },
        ..BASE
    },
    Fault {
        name: "output limits",
        description: "messages of 1 MB on the subscribed channels, with an output buffer limit of 64 kB",
        inject: output_limits,
        ..BASE
    },
    Fault {
        name: "clients evicted",
        description: "maxmemory-clients reached: the server closes the connections that use the most \
               memory",
        topologies: &[Topology::Single],
        inject: evict,
        ..BASE
    },
    Fault {
        name: "too many clients",
        description: "maxclients reached when all clients must reconnect",
        inject: too_many_clients,
        ..BASE
    },
    Fault {
        name: "full",
        description: "maxmemory reached: no acquisitions, but held locks are renewed",
        duration: FaultDuration::PastLease,
        times: 1,
        inject: |context, duration| {
            let master = context.master()?;
            context.with_fault_window(|context| {
                let server = context.server(master);
                run_command(server, &["CONFIG", "SET", "maxmemory", "1"])?;
                sleep(duration);
                run_command(server, &["CONFIG", "SET", "maxmemory", "0"])
            })
        },
        ..BASE
    },
    Fault {
        name: "scripts forgotten",
        description: "SCRIPT FLUSH, a hundred times a second",
        inject: |context, duration| {
            repeat(context, duration * 2, Duration::from_millis(10), |server| {
                run_command(server, &["SCRIPT", "FLUSH"])
            })
        },
        ..BASE
    },
];

/// Sends a command on a connection of its own.
pub(super) fn run_command(server: &Server, words: &[&str]) -> Result<()> {
    let mut command = redis::cmd(words.first().ok_or("no command")?);
    command.arg(&words[1..]);
    Ok(command.query::<()>(&mut server.connection())?)
}

/// Repeats an action at an interval while the fault lasts.
fn repeat(
    context: &mut Context,
    duration: Duration,
    pause: Duration,
    inject: impl Fn(&Server) -> Result<()>,
) -> Result<()> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        let end = Instant::now() + duration;
        while Instant::now() < end {
            inject(context.server(master))?;
            sleep(pause);
        }
        Ok(())
    })
}

fn kill(context: &mut Context, duration: Duration) -> Result<()> {
    let master = context.master()?;
    let kill = |context: &mut Context| context.deployment.kill(master);
    context.with_outage(duration, kill, |context| context.deployment.restart(master))
}

fn pause(context: &mut Context, duration: Duration, what: &str) -> Result<()> {
    let master = context.master()?;
    let millis = duration.as_millis().to_string();
    context.with_fault_window(|context| {
        run_command(context.server(master), &["CLIENT", "PAUSE", &millis, what])?;
        // It may end a little earlier than this process's clock shows.
        let almost = duration.saturating_sub(Duration::from_millis(20));
        context.with_outage(almost, |_| (), |_| sleep(Duration::from_millis(50)))
    })
}

/// Limits the output buffers of the class `pubsub`, to which connections with subscriptions belong.
fn output_limits(context: &mut Context, duration: Duration) -> Result<()> {
    let master = context.master()?;
    let set = |server: &Server, limit: &str| {
        let limit = format!("pubsub {limit} {limit} 0");
        let name = "client-output-buffer-limit";
        run_command(server, &["CONFIG", "SET", name, &limit])
    };
    context.with_fault_window(|context| {
        let server = context.server(master);
        set(server, "65536")?;
        let mut own = server.connection();
        let end = Instant::now() + duration;
        let message = "x".repeat(1 << 20);
        let mut receivers = 0;
        while Instant::now() < end {
            for (list, publish) in [("CHANNELS", "PUBLISH"), ("SHARDCHANNELS", "SPUBLISH")] {
                let channels: Vec<String> = redis::cmd("PUBSUB").arg(list).query(&mut own)?;
                for channel in channels
                    .iter()
                    .filter(|channel| channel.contains("redisson"))
                {
                    let mut publish = redis::cmd(publish);
                    let by: i64 = publish.arg(channel).arg(&message).query(&mut own)?;
                    receivers += by;
                }
            }
            sleep(Duration::from_millis(50));
        }
        // Every message that reached a subscriber exceeded the limit.
        if receivers == 0 && duration > Duration::from_millis(300) {
            return Err("no client was subscribed".into());
        }
        set(server, "33554432")
    })
}

/// Evicts normal clients. An output buffer limit of the class `normal` would not do: answers to lock
/// commands are too short to be counted. This closes the same connections.
fn evict(context: &mut Context, duration: Duration) -> Result<()> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        let server = context.server(master);
        let mut own = server.connection();
        let mut send = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).query::<()>(&mut own);
        send(&["CLIENT", "NO-EVICT", "on"])?;
        let end = Instant::now() + duration;
        while Instant::now() < end {
            // Less than a few connections use, so that most are evicted.
            for bytes in ["100000", "0"] {
                send(&["CONFIG", "SET", EVICTION, bytes])?;
                sleep(Duration::from_millis(50));
            }
        }
        match server.info("evicted_clients").as_str() {
            "0" => Err("no client was evicted".into()),
            _ => Ok(()),
        }
    })
}

const EVICTION: &str = "maxmemory-clients";

fn too_many_clients(context: &mut Context, duration: Duration) -> Result<()> {
    let master = context.master()?;
    context.with_fault_window(|context| {
        let server = context.server(master);
        // No other client can connect meanwhile, not even to end the fault.
        let mut own = server.connection();
        let mut send = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).query::<()>(&mut own);
        send(&["CONFIG", "SET", "maxclients", "1"])?;
        for class in ["normal", "pubsub"] {
            send(&["CLIENT", "KILL", "SKIPME", "yes", "TYPE", class])?;
        }
        sleep(duration);
        send(&["CONFIG", "SET", "maxclients", "10000"])?;
        if server.info("rejected_connections") == "0" {
            return Err("no client was rejected".into());
        }
        Ok(())
    })
}
