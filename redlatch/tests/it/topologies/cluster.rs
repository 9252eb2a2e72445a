//! Tests on a cluster: failovers, and slots, locks and nodes that move.

use std::collections::HashMap;

use super::sentinel_or_cluster::{Deployment, LASTING, failover, steady, until_renewed};
use crate::common::prelude::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_follows_failover_of_killed_master() {
    let mut deployment = Deployment::cluster();
    failover::a_killed_master(&mut deployment).await;
    failover::a_lock_that_is_lost_with_its_master(&mut deployment).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_follows_failover_of_killed_master_over_tls() {
    failover::a_killed_master(&mut Deployment::tls_cluster()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_leaves_frozen_master() {
    failover::a_frozen_master(&Deployment::cluster()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_until_master_is_replaced() {
    let deployment = Deployment::steady_cluster();
    steady::a_guard_is_more_careful_than_the_server(&deployment).await;
    steady::dropped_anywhere(&deployment).await;
    steady::a_waiter_whose_connections_are_cut(&deployment).await;
    steady::a_master_that_hangs(&deployment).await;
    let Deployment::Cluster(mut cluster) = deployment else {
        unreachable!()
    };
    locks_on_all_nodes_are_renewed(&cluster).await;
    // Some of the seed nodes do not answer.
    let seeds = cluster.url();
    let mut names = (0..).map(|n| format!("elsewhere-{n}"));
    let elsewhere = names.find(|name| cluster.master_of_key(name) == 1).unwrap();
    cluster.freeze(0);
    let replica = cluster.nodes()[5].port();
    for url in [
        seeds.clone(),
        format!("redis+cluster://127.0.0.1:1,127.0.0.1:{replica}"),
    ] {
        // Within the default timeout.
        let client = Client::connect(&url).await.unwrap();
        let lock = client.lock(&elsewhere);
        free(held(&lock).await).await;
    }
    cluster.thaw(0);
    cluster.kill(5);
    long_timeout().connect(&seeds).await.unwrap();
}

/// Valkey 9 can have several. Redis says that a cluster has one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_itself_decides_about_its_databases() {
    let cluster = shared_cluster();
    let url = format!("{}/0", cluster.url());
    Client::connect(&url).await.unwrap();
    match Client::connect(&format!("{}/3", cluster.url())).await {
        Ok(client) => {
            free(held(&client.lock(&unique("database"))).await).await;
        }
        Err(error) => {
            assert_matches!(error, Error::Refused { .. });
            assert!(error.to_string().contains("SELECT 3: "), "{error}");
        }
    }
}

/// A URL with the wrong scheme causes an error that names the kind of server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_kind_of_url_is_reported() {
    let node = shared_cluster().nodes()[0].url();
    let alone = Server::start();
    let alone = format!("redis+cluster://127.0.0.1:{}", alone.port());
    for (url, other) in [(node, "redis+cluster://"), (alone, "redis://")] {
        let error = Client::connect(&url).await.unwrap_err();
        assert_matches!(error, Error::UnsupportedServer { .. });
        assert!(error.to_string().contains(other), "{error}");
    }
    let connecting = Client::connect("redis+cluster://:sesame@127.0.0.1:1,127.0.0.1:2");
    let error = within_limit("answered", connecting).await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    assert!(!format!("{error} {error:?}").contains("sesame"));
}

/// Returns the number of subscriptions to matching channels, on all nodes.
fn subscribers(cluster: &Cluster, pattern: &str) -> usize {
    let of_one = |node: &Server| {
        let channels: Vec<String> = node.command(&["PUBSUB", "SHARDCHANNELS", pattern]);
        channels.len()
    };
    cluster.nodes().iter().map(of_one).sum()
}

/// F7, F8: one client waits for thousands of names at once, on all nodes. Each is listed once, and
/// no subscription remains.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_client_waits_for_thousands_of_names() {
    const NAMES: usize = 2000;
    let cluster = shared_cluster();
    let holder = connect(long_timeout(), &cluster.url()).await;
    let waiter = connect(long_timeout(), &cluster.url()).await;
    let prefix = unique("many");
    let holding = spawn_each(0..NAMES, |n| {
        let lock = holder.lock(&format!("{prefix}-{n}"));
        async move { retry_transient(|| lock.lock().lease(10 * LONG)).await }
    });
    let mut held = Vec::new();
    for one in holding {
        held.push(one.await.unwrap());
    }
    let waiting = spawn_each(0..NAMES, |n| {
        waiter.lock(&format!("{prefix}-{n}")).lock().into_future()
    });
    let channels = format!("*{prefix}*");
    let all = async || subscribers(cluster, &channels) == NAMES;
    until("all are subscribed to", all).await;
    let mut listed: HashMap<String, usize> = HashMap::new();
    let mut listing = holder.list(&format!("{prefix}-*"));
    while let Some(one) = listing.next().await.unwrap() {
        *listed.entry(one.name).or_default() += 1;
    }
    assert_eq!(listed.len(), NAMES);
    assert!(listed.values().all(|&times| times == 1), "listed twice");
    free_all(held).await;
    for one in waiting {
        free(joined("woken", one).await).await;
    }
    until("none is left", async || {
        subscribers(cluster, &channels) == 0
    })
    .await;
    until_subscribed(&waiter, 0).await;
}

/// Locks all over the cluster are renewed in few round trips, and none is lost.
async fn locks_on_all_nodes_are_renewed(cluster: &Cluster) {
    const LOCKS: u64 = 200;
    let client = connect(long_timeout().watchdog_lease(WATCHDOG), &cluster.url()).await;
    let mut held = Vec::new();
    for n in 0..LOCKS {
        let lock = client.lock(&format!("renewed-{n}"));
        held.push((retry_transient(|| lock.lock()).await, Duration::MAX, 0));
    }
    let of_masters = |figure: &str| -> u64 {
        let of_one = |node: &Server| node.info(figure).parse::<u64>().unwrap();
        cluster.nodes().iter().take(3).map(of_one).sum()
    };
    let reads = of_masters("total_reads_processed");
    let commands = of_masters("total_commands_processed");
    until("all are renewed several times", || {
        for (guard, before, renewals) in &mut held {
            let left = guard.valid_for();
            assert!(!left.is_zero(), "a lease was lost");
            *renewals += u64::from(left > std::mem::replace(before, left));
        }
        let done = held.iter().all(|&(.., renewals)| renewals >= 3);
        async move { done }
    })
    .await;
    let reads = of_masters("total_reads_processed") - reads;
    let commands = of_masters("total_commands_processed") - commands;
    let is_batched = commands >= 3 * LOCKS && reads < commands / 4;
    assert!(is_batched, "{reads} for {commands}");
    for (guard, ..) in held {
        free(guard).await;
    }
}

/// A client may outlive the runtime in which it was created. Its refresh task continues in the next
/// runtime, even if the client only waits.
#[test]
fn topology_changes_are_detected_in_every_runtime() {
    let cluster = Cluster::start_with(ClusterPlan {
        replicas: 0,
        ..ClusterPlan::default()
    });
    let refreshes = || {
        let figures = (0..3).map(|node| cluster.command::<String>(node, &["INFO", "commandstats"]));
        let calls = |figures: String| {
            let commands = figures
                .lines()
                .filter(|line| line.starts_with("cmdstat_cluster"));
            let calls =
                commands.filter_map(|line| line.split(['=', ',']).nth(1)?.parse::<u64>().ok());
            calls.sum::<u64>()
        };
        figures.map(calls).sum::<u64>()
    };
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let ending = runtime();
    let client = ending.block_on(Client::connect(&cluster.url())).unwrap();
    drop(ending);
    runtime().block_on(async {
        let _guard = retry_transient(|| client.lock("a").lock()).await;
        let before = refreshes();
        until("it refreshes by itself", async || refreshes() > before).await;
    });
}

/// Starts a cluster whose epoch is later than that of any other cluster in these tests.
fn later_cluster() -> Cluster {
    let cluster = Cluster::start_with(ClusterPlan {
        replicas: 0,
        ..ClusterPlan::default()
    });
    // Only a node whose epoch is not the latest one begins another one.
    for node in (0..3).cycle().take(30) {
        let _: String = cluster.command(node, &["CLUSTER", "BUMPEPOCH"]);
    }
    // Otherwise a replica of a node whose address is reused would replicate from here.
    for node in cluster.nodes() {
        let () = node.command(&["ACL", "SETUSER", "default", "-psync", "-sync"]);
    }
    cluster
}

/// Returns two clients, and a lock that the first one holds.
async fn held_in(cluster: &Cluster) -> (Client, Client, redlatch::Guard) {
    let url = cluster.url();
    let connect = || long_timeout().watchdog_lease(LASTING).connect(&url);
    let holder = retry_transient(connect).await;
    let other = retry_transient(connect).await;
    let held = retry_transient(|| holder.lock("{a}:held").lock()).await;
    (holder, other, held)
}

/// Asserts that a name is held and that no node of another cluster has run a script.
async fn assert_held_elsewhere(other: &Client, held: &redlatch::Guard, foreign: &Cluster) {
    let lock = other.lock(held.name());
    let acquired = retry_transient(|| lock.try_lock()).await;
    let (is_second, is_valid) = (acquired.is_some(), held.is_valid());
    for node in foreign.nodes() {
        let calls = node.command::<String>(&["INFO", "commandstats"]);
        assert!(!calls.contains("eval"), "{calls}");
    }
    assert!(is_valid, "the holder has lost it");
    assert!(!is_second, "there is a second holder");
}

/// The address of a master that failed belongs to a node of another cluster. No name is acquired there, and the holder in
/// the right cluster stays valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_of_another_cluster_at_address_of_master_is_not_used() {
    let (mut cluster, foreign) = (Cluster::start(), later_cluster());
    let (_holder, other, held) = held_in(&cluster).await;
    assert!(other.lock("{a}:held").try_lock().await.unwrap().is_none());
    let master = cluster.master_of_key("{a}");
    let same_slots = foreign.nodes()[foreign.master_of_key("{a}")].port();
    cluster.kill(master);
    let _reused = Proxy::in_place_of(&cluster.nodes()[master], same_slots);
    assert_held_elsewhere(&other, &held, &foreign).await;
    for n in 0..20 {
        let lock = other.lock(&format!("{{a}}:{n}"));
        free(retry_transient(|| lock.lock()).await).await;
    }
    let new = cluster.await_master_change("{a}", master);
    until_renewed(&cluster.nodes()[new], "{a}:held").await;
    assert_held_elsewhere(&other, &held, &foreign).await;
    free(held).await;
}

/// The same for the address of a replica that the client knows from its URL. Its node is queried when no other
/// one answers, and reports a later epoch than all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_of_another_cluster_does_not_replace_map() {
    let Deployment::Cluster(mut cluster) = Deployment::steady_cluster() else {
        unreachable!()
    };
    let foreign = later_cluster();
    let (_holder, other, held) = held_in(&cluster).await;
    let replica = 5;
    cluster.kill(replica);
    let reused = &cluster.nodes()[replica];
    let _reused = Proxy::in_place_of(reused, foreign.nodes()[0].port());
    (0..replica).for_each(|node| cluster.freeze(node));
    // The client queries them, and then the nodes that it only knows from its URL.
    let queries = || {
        let stats: String = foreign.command(0, &["INFO", "commandstats"]);
        let queries = stats.lines().filter_map(|line| {
            let line = line.strip_prefix("cmdstat_cluster|")?;
            let line = line
                .strip_prefix("myid:calls=")
                .or(line.strip_prefix("slots:calls="))?;
            line.split(',').next()?.parse::<u64>().ok()
        });
        queries.sum::<u64>()
    };
    let before = queries();
    let lock = other.lock("{a}:held");
    let attempt = tokio::spawn(lock.try_lock().into_future());
    let queried = async || queries() >= before + 2;
    until("the foreign node is queried", queried).await;
    (0..replica).for_each(|node| cluster.thaw(node));
    let attempt = done("answered", attempt).await;
    let is_second = matches!(attempt, Ok(Some(_)));
    assert!(!is_second, "a second holder");
    assert_held_elsewhere(&other, &held, &foreign).await;
    free(held).await;
}
