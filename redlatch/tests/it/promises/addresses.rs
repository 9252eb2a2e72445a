//! URLs, names and cluster answers: every part of an address is understood or refused.

use std::time::{Duration, Instant};

use redlatch::{Client, Error};
use redlatch_testkit::{Cluster, ClusterPlan, Server, shared, unique};

use crate::common::{LONG, soon};

/// A cluster of masters without replicas, in which nothing ever fails over.
fn masters(plan: ClusterPlan<'_>) -> Cluster {
    Cluster::start_with(ClusterPlan {
        replicas: 0,
        node_timeout_millis: 600_000,
        ..plan
    })
}

/// The URL that names one node only.
fn url_of(cluster: &Cluster, node: usize) -> String {
    let node = &cluster.nodes()[node];
    format!("redis+cluster://{}:{}", node.address(), node.port())
}

/// A name in a slot of this node.
fn name_at(cluster: &Cluster, node: usize) -> String {
    (0..)
        .map(|number| unique(&format!("at-{number}")))
        .find(|name| cluster.owner_of(name) == node)
        .unwrap()
}

/// Two services that are configured for the same database exclude each other, however the database is
/// written; an address that is only partly understood is refused.
#[tokio::test]
async fn the_database_of_a_url_is_the_one_that_is_used() {
    let url = shared().url();
    let name = unique("database");
    let by_path = Client::connect(&format!("{url}/3")).await.unwrap();
    let guard = by_path.lock(&name).lock().await.unwrap();
    for (form, held) in [
        ("/3", true),
        ("?db=3", true),
        ("/?db=3", true),
        ("/3?db=3", true),
        ("", false),
    ] {
        let other = Client::connect(&format!("{url}{form}")).await.unwrap();
        let is_locked = other.lock(&name).is_locked().await.unwrap();
        assert_eq!(is_locked, held, "{form}");
    }
    for (form, named) in [
        ("/?database=3", "database"),
        ("/4?db=3", "db="),
        ("/3#3", "#"),
    ] {
        let error = Client::connect(&format!("{url}{form}")).await.unwrap_err();
        assert!(matches!(error, Error::InvalidUrl { .. }), "{form}: {error}");
        assert!(error.to_string().contains(named), "{form}: {error}");
    }
    guard.unlock().await.unwrap();
}

/// Nodes that announce no host name are `?` in all answers where host names are preferred. Their
/// addresses are used, wherever they are, for the slots that they have and for those that move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_a_name_are_found_by_their_addresses() {
    let cluster = masters(ClusterPlan {
        apart: true,
        args: &["--cluster-preferred-endpoint-type", "hostname"],
        ..ClusterPlan::default()
    });
    let settings = Client::builder().response_timeout(LONG);
    let client = settings.connect(&url_of(&cluster, 0)).await.unwrap();
    let names = [0, 1, 2].map(|node| name_at(&cluster, node));
    let mut guards = Vec::new();
    for name in &names {
        let lock = client.lock(name);
        guards.push(soon("held", lock.lock().into_future()).await.unwrap());
    }

    // Moved (MOVED n ?:port), with the lock in it.
    let moved = &names[0];
    cluster.move_slot(cluster.slot_of(moved), 1);
    assert!(soon("asked", client.lock(moved).is_locked()).await.unwrap());

    // On its way (ASK n ?:port): a name that is not there yet.
    let slot = cluster.slot_of(&names[1]);
    let other = format!("other:{{{}}}", names[1]);
    cluster.begin_moving(slot, 2);
    let lock = client.lock(&other);
    guards.push(
        soon("held while it moves", lock.lock().into_future())
            .await
            .unwrap(),
    );
    cluster.move_keys(slot, 2);
    cluster.finish_moving(slot, 2);
    for guard in guards {
        soon("released", guard.unlock()).await.unwrap();
    }
}

/// Waits until a server refuses everything because of a script.
fn until_busy(server: &Server) {
    let begun = Instant::now();
    while server.try_ask::<()>(&["PING"]).is_ok() {
        assert!(begun.elapsed() < LONG, "it is never busy");
    }
}

/// A node that runs a long script answers BUSY, as one that loads its data answers LOADING. Repeating a
/// step does not ask all nodes for the map of slots each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_node_is_no_reason_to_look_for_another() {
    let cluster = &masters(ClusterPlan {
        args: &["--busy-reply-threshold", "10"],
        ..ClusterPlan::default()
    });
    let settings = Client::builder().response_timeout(LONG);
    let client = settings.connect(&cluster.url()).await.unwrap();
    let names: [String; 20] = std::array::from_fn(|_| name_at(cluster, 0));
    // Connected to both, and the scripts are known.
    for name in [&names[0], &name_at(cluster, 1)] {
        client
            .lock(name)
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    let calls = |node: usize, command: &str, figure: &str| -> u64 {
        let stats: String = cluster.ask(node, &["INFO", "commandstats"]);
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")));
        let figures = line.unwrap_or_default().split(',');
        let figure = figures
            .filter_map(|it| it.split_once('='))
            .find(|(name, _)| *name == figure);
        figure.map_or(0, |(_, value)| value.parse().unwrap())
    };
    let looks = || calls(1, "cluster|slots", "calls");
    let (looked, refused) = (looks(), calls(0, "evalsha", "rejected_calls"));
    let acquiring: Vec<_> = std::thread::scope(|scope| {
        let busy = ["EVAL", "while true do end", "0"];
        // Ends with an error when it is killed.
        let running = scope.spawn(move || cluster.nodes()[0].try_ask::<()>(&busy));
        until_busy(&cluster.nodes()[0]);
        let acquiring = names.map(|name| {
            let lock = client.lock(&name);
            tokio::spawn(async move { lock.lock().await?.unlock().await })
        });
        // Long enough for some hundred repetitions.
        std::thread::sleep(Duration::from_secs(2));
        let () = cluster.ask(0, &["SCRIPT", "KILL"]);
        running.join().unwrap().unwrap_err();
        acquiring.into()
    });
    for acquired in acquiring {
        soon("acquired", acquired).await.unwrap().unwrap();
    }
    let refused = calls(0, "evalsha", "rejected_calls") - refused;
    let looked = looks() - looked;
    assert!(refused >= 60, "it was busy: {refused}");
    // One every five seconds without a reason; it was up to 20 a second.
    assert!(looked <= 6, "{looked} looks for {refused} refusals");
}

// Names

mod names {
    use redlatch::{Client, Error};
    use redlatch_testkit::{shared_cluster, unique};

    use crate::common::{Stand, soon};

    on_every_store! {
        a_name_whose_braces_enclose_no_hash_tag_is_refused_by_every_kind,
    }

    /// Its keys, or its channel, would lie in different slots of a cluster. Refused on every store, so that a
    /// program that works on one server works in a cluster.
    async fn a_name_whose_braces_enclose_no_hash_tag_is_refused_by_every_kind(stand: Stand) {
        let client = stand.client().await;
        for braces in ["}b", "{b", "{}b", "}{", "{}{b}"] {
            let name = unique("braces") + braces;
            let sides = client.read_write_lock(&name);
            for error in [
                client.lock(&name).try_lock().await.err(),
                client.spin_lock(&name).try_lock().await.err(),
                client.fair_lock(&name).try_lock().await.err(),
                client.fenced_lock(&name).try_lock().await.err(),
                sides.read().try_lock().await.err(),
                sides.write().try_lock().await.err(),
                client.semaphore(&name).try_set_permits(1).await.err(),
                client.semaphore(&name).try_acquire().await.err(),
                client.expirable_semaphore(&name).try_acquire().await.err(),
                client.count_down_latch(&name).try_set_count(1).await.err(),
                client.count_down_latch(&name).wait().await.err(),
                client.lock(&name).force_unlock().await.err(),
                client.inspect(&name).await.err(),
            ] {
                let error = error.unwrap();
                assert!(matches!(error, Error::InvalidName { .. }), "{error}");
                let said = error.to_string();
                assert!(said.contains("hash tag, as in \"{order}:7\""), "{said}");
            }
        }
    }

    /// What other programs keep in a cluster under such names does not keep it from being listed.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_key_that_cannot_be_a_name_here_does_not_end_a_listing() {
        let cluster = shared_cluster();
        let client = Client::connect(&cluster.url()).await.unwrap();
        let shared = unique("listed");
        for foreign in [format!("{shared}}}b"), format!("{shared}{{b")] {
            let owner = cluster.owner_of(&foreign);
            let () = cluster.ask(owner, &["HSET", &foreign, "c:1", "1"]);
        }
        let lock = client.lock(&format!("{shared}:mine"));
        let _guard = lock.lock().await.unwrap();
        let mut listing = client.list(&format!("{shared}*"));
        let mut names = Vec::new();
        while let Some(found) = soon("listed", listing.next()).await.unwrap() {
            names.push(found.name);
        }
        assert_eq!(names, [lock.name()]);
    }
}
