//! URLs, names and cluster answers: every part of an address is either used or rejected.

use std::time::Instant;

use crate::common::prelude::*;

/// Starts a cluster of masters without replicas, in which no failover happens.
fn masters(plan: ClusterPlan<'_>) -> Cluster {
    Cluster::start_with(ClusterPlan {
        replicas: 0,
        node_timeout_millis: 600_000,
        ..plan
    })
}

/// Returns the URL of a single node.
fn url_of(cluster: &Cluster, node: usize) -> String {
    let node = &cluster.nodes()[node];
    format!("redis+cluster://{}:{}", node.address(), node.port())
}

/// Returns a name in a slot of this node.
fn name_at(cluster: &Cluster, node: usize) -> String {
    let mut names = (0..).map(|number| unique(&format!("at-{number}")));
    names
        .find(|name| cluster.master_of_key(name) == node)
        .unwrap()
}

/// Two services that are configured for the same database exclude each other, in whatever form the
/// URL names the database. An address that is only partly understood is rejected.
#[tokio::test]
async fn database_of_url_is_used() {
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
    free(guard).await;
}

/// Nodes that announce no host name are `?` in all answers if host names are preferred. The client
/// uses their addresses for the slots that they own and for slots that move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_host_name_are_found_by_address() {
    let cluster = masters(ClusterPlan {
        separate_addresses: true,
        args: &["--cluster-preferred-endpoint-type", "hostname"],
        ..ClusterPlan::default()
    });
    let client = connect(long_timeout(), &url_of(&cluster, 0)).await;
    let names = [0, 1, 2].map(|node| name_at(&cluster, node));
    let mut guards = Vec::new();
    for name in &names {
        let lock = client.lock(name);
        guards.push(done("held", lock.lock()).await);
    }

    // Moved (MOVED n ?:port), together with the lock in it.
    let moved = &names[0];
    cluster.move_slot(cluster.slot_of(moved), 1);
    assert!(done("asked", client.lock(moved).is_locked()).await);

    // In the middle of a move (ASK n ?:port): a name that does not exist yet.
    let slot = cluster.slot_of(&names[1]);
    let other = format!("other:{{{}}}", names[1]);
    cluster.begin_moving(slot, 2);
    let lock = client.lock(&other);
    guards.push(done("held while it moves", lock.lock()).await);
    cluster.move_keys(slot, 2);
    cluster.finish_moving(slot, 2);
    for guard in guards {
        done("released", guard.unlock()).await;
    }
}

/// Behind a tunnel or NAT, nodes announce addresses that cannot be reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_addresses_are_mapped() {
    let cluster = masters(ClusterPlan {
        args: &[
            "--cluster-preferred-endpoint-type",
            "hostname",
            "--cluster-announce-hostname",
            // Nobody listens there.
            "127.0.0.2",
        ],
        ..ClusterPlan::default()
    });
    let settings = Client::builder().response_timeout(Duration::from_secs(1));
    let unmapped = settings.clone().connect(&url_of(&cluster, 0)).await;
    let unmapped = unmapped.unwrap();
    let name = name_at(&cluster, 1);
    let error = unmapped.lock(&name).try_lock().await.unwrap_err();
    assert!(error.to_string().contains("127.0.0.2"), "{error}");
    let settings = settings
        .map_address(|host, port| (host == "127.0.0.2").then(|| ("127.0.0.1".into(), port)));
    let client = settings.connect(&url_of(&cluster, 0)).await.unwrap();
    let guard = held(&client.lock(&name)).await;
    cluster.move_slot(cluster.slot_of(&name), 2);
    free(guard).await;
}

/// Waits until a server refuses all commands because a script is running.
fn until_busy(server: &Server) {
    let begun = Instant::now();
    while server.try_command::<()>(&["PING"]).is_ok() {
        assert!(begun.elapsed() < LONG, "it is never busy");
    }
}

/// A node that runs a long script answers BUSY, just as a node that loads its data answers LOADING.
/// Repeating a step does not request the slot map from all nodes each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_node_does_not_trigger_topology_refresh() {
    let cluster = &masters(ClusterPlan {
        args: &["--busy-reply-threshold", "10"],
        ..ClusterPlan::default()
    });
    let client = connect(long_timeout(), &cluster.url()).await;
    let names: [String; 20] = std::array::from_fn(|_| name_at(cluster, 0));
    // Connect to both nodes, and load the scripts.
    for name in [&names[0], &name_at(cluster, 1)] {
        free(held(&client.lock(name)).await).await;
    }
    let calls = |node: usize, command: &str, figure: &str| -> u64 {
        let stats: String = cluster.command(node, &["INFO", "commandstats"]);
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")));
        let figures = line.unwrap_or_default().split(',');
        let figure = figures
            .filter_map(|it| it.split_once('='))
            .find(|(name, _)| *name == figure);
        figure.map_or(0, |(_, value)| value.parse().unwrap())
    };
    let refreshes = || calls(1, "cluster|slots", "calls");
    let (refreshed, refused) = (refreshes(), calls(0, "evalsha", "rejected_calls"));
    let acquiring: Vec<_> = std::thread::scope(|scope| {
        let busy = ["EVAL", "while true do end", "0"];
        // Fails with an error when the script is killed.
        let running = scope.spawn(move || cluster.nodes()[0].try_command::<()>(&busy));
        until_busy(&cluster.nodes()[0]);
        let acquiring = names.map(|name| {
            let lock = client.lock(&name);
            tokio::spawn(async move { lock.lock().await?.unlock().await })
        });
        // Long enough for several hundred repetitions.
        std::thread::sleep(Duration::from_secs(2));
        let () = cluster.command(0, &["SCRIPT", "KILL"]);
        running.join().unwrap().unwrap_err();
        acquiring.into()
    });
    joined_all("acquired", acquiring).await;
    let refused = calls(0, "evalsha", "rejected_calls") - refused;
    let refreshed = refreshes() - refreshed;
    assert!(refused >= 60, "it was busy: {refused}");
    // One every five seconds without a reason; it was up to 20 per second.
    // As many as there were refusals would be too many.
    assert!(refreshed <= 6, "{refreshed} of {refused}");
}

// Names

mod names {
    use crate::common::prelude::*;

    on_every_store! {
        name_with_braces_but_no_hash_tag_is_rejected_by_every_kind,
    }

    /// The keys or the channel of such a name would lie in different slots of a cluster. Every
    /// store rejects it, so that a program that works on one server also works in a cluster.
    async fn name_with_braces_but_no_hash_tag_is_rejected_by_every_kind(store: TestStore) {
        let client = store.client().await;
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
                assert_matches!(error, Error::InvalidName { .. });
                let said = error.to_string();
                assert!(said.contains("hash tag, as in \"{order}:7\""), "{said}");
            }
        }
    }

    /// Keys of other programs with such names do not prevent a cluster from being listed.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn key_with_invalid_name_does_not_end_a_listing() {
        let cluster = shared_cluster();
        let client = Client::connect(&cluster.url()).await.unwrap();
        let shared = unique("listed");
        for foreign in [format!("{shared}}}b"), format!("{shared}{{b")] {
            let master = cluster.master_of_key(&foreign);
            let () = cluster.command(master, &["HSET", &foreign, "c:1", "1"]);
        }
        let lock = client.lock(&format!("{shared}:mine"));
        let _guard = held(&lock).await;
        let mut listing = client.list(&format!("{shared}*"));
        let mut names = Vec::new();
        while let Some(found) = done("listed", listing.next()).await {
            names.push(found.name);
        }
        assert_eq!(names, [lock.name()]);
    }
}
