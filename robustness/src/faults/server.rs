//! Faults of servers: they die, are paused, or refuse their clients.

use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::Server;

use super::{BASE, Fault, Lasts};
use crate::Result;
use crate::checker::Losses;
use crate::history::Forgetting;
use crate::scene::Scene;
use crate::site::{Needs, Topology};

pub(super) const FAULTS: [Fault; 14] = [
    Fault {
        name: "killed, durable",
        what: "kill -9 of the server, which restarts with all its data (AOF, fsync always)",
        needs: Needs {
            durable: true,
            ..Needs::NOTHING
        },
        on: &[Topology::Single],
        act: kill,
        ..BASE
    },
    Fault {
        name: "killed, empty",
        what: "kill -9 of the server, which restarts without its data",
        losses: Losses::Some,
        soaks: false,
        times: 2,
        on: &[Topology::Single],
        act: |scene, lasts| scene.forgets(Forgetting::NO_DATA, |scene| kill(scene, lasts)),
        ..BASE
    },
    Fault {
        name: "paused",
        what: "CLIENT PAUSE ALL",
        act: |scene, lasts| pause(scene, lasts, "ALL"),
        ..BASE
    },
    Fault {
        name: "paused, writes",
        what: "CLIENT PAUSE WRITE",
        act: |scene, lasts| pause(scene, lasts, "WRITE"),
        ..BASE
    },
    Fault {
        name: "paused past the lease",
        what: "CLIENT PAUSE ALL for longer than a lease",
        on: &[Topology::Single],
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        soaks: false,
        act: |scene, lasts| pause(scene, lasts, "ALL"),
        ..BASE
    },
    Fault {
        name: "asleep",
        what: "DEBUG SLEEP",
        act: |scene, lasts| {
            let seconds = lasts.as_secs_f64().to_string();
            let master = scene.master()?;
            scene.broken(|scene| ask(scene.server(master), &["DEBUG", "SLEEP", &seconds]))
        },
        ..BASE
    },
    Fault {
        name: "frozen past the lease",
        what: "SIGSTOP of the server for longer than a lease",
        on: &[Topology::Single],
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| {
            let master = scene.master()?;
            let freeze = |scene: &mut Scene| scene.server(master).freeze();
            scene.cut(lasts, freeze, |scene| scene.server(master).thaw())
        },
        ..BASE
    },
    Fault {
        name: "node frozen, many held",
        what: "SIGSTOP of one of three masters for longer than a lease, while a client holds 3,000 \
               locks; no lock on the other masters is lost",
        on: &[Topology::Cluster],
        needs: Needs {
            unreplaced: true,
            ..Needs::NOTHING
        },
        losses: Losses::OutOfReach,
        lasts: Lasts::PastLease,
        times: 1,
        soaks: false,
        held: 3000,
        lease: 2,
        act: |scene, lasts| {
            let master = scene.master()?;
            scene.out_of_reach(master)?;
            let freeze = |scene: &mut Scene| scene.server(master).freeze();
            scene.cut(lasts, freeze, |scene| scene.server(master).thaw())
        },
        ..BASE
    },
    Fault {
        name: "clients killed",
        what: "CLIENT KILL of all connections, ten times a second",
        act: |scene, lasts| {
            again_and_again(scene, lasts, Duration::from_millis(100), |server| {
                server.cut_all();
                Ok(())
            })
        },
        ..BASE
    },
    Fault {
        name: "output limits",
        what: "messages of 1 MB on the subscribed channels, with an output buffer limit of 64 kB",
        act: output_limits,
        ..BASE
    },
    Fault {
        name: "clients evicted",
        what: "maxmemory-clients reached: the server closes the connections that use the most \
               memory",
        on: &[Topology::Single],
        act: evict,
        ..BASE
    },
    Fault {
        name: "too many clients",
        what: "maxclients reached when all clients must reconnect",
        act: too_many_clients,
        ..BASE
    },
    Fault {
        name: "full",
        what: "maxmemory reached: no acquisitions, but held locks are renewed",
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| {
            let master = scene.master()?;
            scene.broken(|scene| {
                let server = scene.server(master);
                ask(server, &["CONFIG", "SET", "maxmemory", "1"])?;
                sleep(lasts);
                ask(server, &["CONFIG", "SET", "maxmemory", "0"])
            })
        },
        ..BASE
    },
    Fault {
        name: "scripts forgotten",
        what: "SCRIPT FLUSH, a hundred times a second",
        act: |scene, lasts| {
            again_and_again(scene, lasts * 2, Duration::from_millis(10), |server| {
                ask(server, &["SCRIPT", "FLUSH"])
            })
        },
        ..BASE
    },
];

/// Sends a command on a connection of its own.
pub(super) fn ask(server: &Server, words: &[&str]) -> Result<()> {
    let mut command = redis::cmd(words.first().ok_or("no command")?);
    command.arg(&words[1..]);
    Ok(command.query::<()>(&mut server.connection())?)
}

/// Repeats an action at an interval while the fault lasts.
fn again_and_again(
    scene: &mut Scene,
    lasts: Duration,
    pause: Duration,
    act: impl Fn(&Server) -> Result<()>,
) -> Result<()> {
    let master = scene.master()?;
    scene.broken(|scene| {
        let end = Instant::now() + lasts;
        while Instant::now() < end {
            act(scene.server(master))?;
            sleep(pause);
        }
        Ok(())
    })
}

fn kill(scene: &mut Scene, lasts: Duration) -> Result<()> {
    let master = scene.master()?;
    let kill = |scene: &mut Scene| scene.site.kill(master);
    scene.cut(lasts, kill, |scene| scene.site.restart(master))
}

fn pause(scene: &mut Scene, lasts: Duration, what: &str) -> Result<()> {
    let master = scene.master()?;
    let millis = lasts.as_millis().to_string();
    scene.broken(|scene| {
        ask(scene.server(master), &["CLIENT", "PAUSE", &millis, what])?;
        // It may end a little earlier than this process's clock shows.
        let almost = lasts.saturating_sub(Duration::from_millis(20));
        scene.cut(almost, |_| (), |_| sleep(Duration::from_millis(50)))
    })
}

/// Limits the output buffers of the class `pubsub`, to which connections with subscriptions belong.
fn output_limits(scene: &mut Scene, lasts: Duration) -> Result<()> {
    let master = scene.master()?;
    let set = |server: &Server, limit: &str| {
        let limit = format!("pubsub {limit} {limit} 0");
        let name = "client-output-buffer-limit";
        ask(server, &["CONFIG", "SET", name, &limit])
    };
    scene.broken(|scene| {
        let server = scene.server(master);
        set(server, "65536")?;
        let mut own = server.connection();
        let end = Instant::now() + lasts;
        let message = "x".repeat(1 << 20);
        let mut heard = 0;
        while Instant::now() < end {
            for (list, publish) in [("CHANNELS", "PUBLISH"), ("SHARDCHANNELS", "SPUBLISH")] {
                let channels: Vec<String> = redis::cmd("PUBSUB").arg(list).query(&mut own)?;
                for channel in channels
                    .iter()
                    .filter(|channel| channel.contains("redisson"))
                {
                    let mut publish = redis::cmd(publish);
                    let by: i64 = publish.arg(channel).arg(&message).query(&mut own)?;
                    heard += by;
                }
            }
            sleep(Duration::from_millis(50));
        }
        // Every message that reached a subscriber exceeded the limit.
        if heard == 0 && lasts > Duration::from_millis(300) {
            return Err("no client was subscribed".into());
        }
        set(server, "33554432")
    })
}

/// Evicts normal clients. An output buffer limit of the class `normal` would not do: answers to lock
/// commands are too short to be counted. This closes the same connections.
fn evict(scene: &mut Scene, lasts: Duration) -> Result<()> {
    let master = scene.master()?;
    scene.broken(|scene| {
        let server = scene.server(master);
        let mut own = server.connection();
        let mut say = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).query::<()>(&mut own);
        say(&["CLIENT", "NO-EVICT", "on"])?;
        let end = Instant::now() + lasts;
        while Instant::now() < end {
            // Less than a few connections use, so that most are evicted.
            for bytes in ["100000", "0"] {
                say(&["CONFIG", "SET", EVICTION, bytes])?;
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

fn too_many_clients(scene: &mut Scene, lasts: Duration) -> Result<()> {
    let master = scene.master()?;
    scene.broken(|scene| {
        let server = scene.server(master);
        // No other client can connect meanwhile, not even to end the fault.
        let mut own = server.connection();
        let mut say = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).query::<()>(&mut own);
        say(&["CONFIG", "SET", "maxclients", "1"])?;
        for class in ["normal", "pubsub"] {
            say(&["CLIENT", "KILL", "SKIPME", "yes", "TYPE", class])?;
        }
        sleep(lasts);
        say(&["CONFIG", "SET", "maxclients", "10000"])?;
        if server.info("rejected_connections") == "0" {
            return Err("no client was rejected".into());
        }
        Ok(())
    })
}
