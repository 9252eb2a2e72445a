//! Servers that die, stand still, or turn their clients away.

use std::thread::sleep;
use std::time::{Duration, Instant};

use redlatch_testkit::Server;

use super::{BASE, Fault, Lasts};
use crate::Result;
use crate::checker::Losses;
use crate::scene::Scene;
use crate::site::Needs;

pub(super) const FAULTS: [Fault; 12] = [
    Fault {
        name: "killed, durable",
        what: "kill -9 of the server, which comes back with all that it had (AOF, fsync always)",
        needs: Needs {
            network: false,
            durable: true,
        },
        act: |scene, lasts| scene.cut(lasts, kill, restart),
        ..BASE
    },
    Fault {
        name: "killed, empty",
        what: "kill -9 of the server, which comes back without its data",
        losses: Losses::Some,
        soaks: false,
        times: 2,
        act: |scene, lasts| scene.forgets(true, |scene| scene.cut(lasts, kill, restart)),
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
            scene.broken(|scene| ask(scene.master()?, &["DEBUG", "SLEEP", &seconds]))
        },
        ..BASE
    },
    Fault {
        name: "frozen past the lease",
        what: "SIGSTOP of the server for longer than a lease",
        losses: Losses::Some,
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| {
            let freeze = |scene: &mut Scene| scene.master().map(|master| master.freeze());
            let thaw = |scene: &mut Scene| scene.master().map(|master| master.thaw());
            scene.cut(lasts, freeze, thaw)
        },
        ..BASE
    },
    Fault {
        name: "clients killed",
        what: "CLIENT KILL of all connections, ten times a second",
        act: |scene, lasts| again_and_again(scene, lasts, Duration::from_millis(100), cut_all),
        ..BASE
    },
    Fault {
        name: "output limits",
        what: "messages of a megabyte on the channels listened to, with a buffer of 64 kB for them",
        act: output_limits,
        ..BASE
    },
    Fault {
        name: "too many clients",
        what: "maxclients reached when all have to connect anew",
        act: too_many_clients,
        ..BASE
    },
    Fault {
        name: "full",
        what: "maxmemory reached: nothing new is taken, what is held is renewed",
        lasts: Lasts::PastLease,
        times: 1,
        act: |scene, lasts| {
            scene.broken(|scene| {
                let master = scene.master()?;
                ask(master, &["CONFIG", "SET", "maxmemory", "1"])?;
                sleep(lasts);
                ask(master, &["CONFIG", "SET", "maxmemory", "0"])
            })
        },
        ..BASE
    },
    Fault {
        name: "scripts forgotten",
        what: "SCRIPT FLUSH, a hundred times a second",
        act: |scene, lasts| {
            again_and_again(scene, lasts * 2, Duration::from_millis(10), |master| {
                ask(master, &["SCRIPT", "FLUSH"])
            })
        },
        ..BASE
    },
];

/// A command of somebody else's.
pub(super) fn ask(server: &Server, words: &[&str]) -> Result<()> {
    let mut command = redis::cmd(words.first().ok_or("no command")?);
    for word in &words[1..] {
        command.arg(word);
    }
    let client = redis::Client::open(server.url())?;
    Ok(command.query::<()>(&mut client.get_connection()?)?)
}

/// Does it every so often while this lasts.
pub(super) fn again_and_again(
    scene: &mut Scene,
    lasts: Duration,
    pause: Duration,
    act: impl Fn(&mut Server) -> Result<()>,
) -> Result<()> {
    scene.broken(|scene| {
        let end = Instant::now() + lasts;
        while Instant::now() < end {
            act(scene.master()?)?;
            sleep(pause);
        }
        Ok(())
    })
}

fn kill(scene: &mut Scene) -> Result<()> {
    scene.master()?.kill();
    Ok(())
}

fn restart(scene: &mut Scene) -> Result<()> {
    scene.master()?.restart();
    Ok(())
}

fn pause(scene: &mut Scene, lasts: Duration, what: &str) -> Result<()> {
    let millis = lasts.as_millis().to_string();
    let begin = |scene: &mut Scene| ask(scene.master()?, &["CLIENT", "PAUSE", &millis, what]);
    // It may end a little before the clock says so here.
    let almost = lasts.saturating_sub(Duration::from_millis(20));
    scene.cut(almost, begin, |_| {
        sleep(Duration::from_millis(50));
        Ok(())
    })
}

fn cut_all(master: &mut Server) -> Result<()> {
    master.cut_all();
    Ok(())
}

/// A connection that listens is in the class `pubsub`, whatever else it carries.
fn output_limits(scene: &mut Scene, lasts: Duration) -> Result<()> {
    let limit = |limit: &str| format!("pubsub {limit} {limit} 0");
    let set = |master: &Server, to: &str| {
        let name = "client-output-buffer-limit";
        ask(master, &["CONFIG", "SET", name, &limit(to)])
    };
    let connections =
        |master: &Server| -> Result<u64> { Ok(master.info("total_connections_received").parse()?) };
    let before = connections(scene.master()?)?;
    let mut asked = 0;
    scene.broken(|scene| {
        let master = scene.master()?;
        set(master, "65536")?;
        let mut own = master.connection();
        let end = Instant::now() + lasts;
        while Instant::now() < end {
            let channels: Vec<String> = redis::cmd("PUBSUB").arg("CHANNELS").query(&mut own)?;
            for channel in channels {
                let mut publish = redis::cmd("PUBLISH");
                let message = "x".repeat(1 << 20);
                publish.arg(channel).arg(message).query::<()>(&mut own)?;
            }
            sleep(Duration::from_millis(50));
        }
        asked += 3;
        set(master, "33554432")
    })?;
    sleep(Duration::from_millis(200));
    let cut = connections(scene.master()?)?.saturating_sub(before + asked);
    if cut == 0 {
        return Err("no connection came to its limit".into());
    }
    Ok(())
}

fn too_many_clients(scene: &mut Scene, lasts: Duration) -> Result<()> {
    scene.broken(|scene| {
        let master = scene.master()?;
        // Nobody else can connect meanwhile, not even to make an end of it.
        let mut own = master.connection();
        let mut say = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).query::<()>(&mut own);
        say(&["CONFIG", "SET", "maxclients", "1"])?;
        for class in ["normal", "pubsub"] {
            say(&["CLIENT", "KILL", "SKIPME", "yes", "TYPE", class])?;
        }
        sleep(lasts);
        say(&["CONFIG", "SET", "maxclients", "10000"])?;
        if master.info("rejected_connections") == "0" {
            return Err("nobody was turned away".into());
        }
        Ok(())
    })
}
