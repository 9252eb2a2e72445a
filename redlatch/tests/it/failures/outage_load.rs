//! In an outage a client does not load servers more than it has to: pauses grow while nothing changes.
//!
//! Each test counts at the servers, for a fixed time. On a busy machine the counts are lower.

use crate::common::prelude::*;
use crate::topologies::sentinel_or_cluster::{Deployment, NEVER};

/// Time for which commands and connections are counted.
const COUNTED_FOR: Duration = Duration::from_secs(4);

/// A short response timeout: the pauses must also grow across requests.
fn impatient() -> ClientBuilder {
    Client::builder().response_timeout(Duration::from_secs(1))
}

/// Keeps requesting this many locks with this prefix, until dropped.
fn keep_requesting(client: &Client, prefix: &str, count: usize) -> tokio::task::JoinSet<()> {
    let requesting = |n| {
        let lock = client.lock(&format!("{prefix}:{n}"));
        async move {
            loop {
                let _ = lock.lock().into_future().await;
            }
        }
    };
    (0..count).map(requesting).collect()
}

/// Returns by how much a counter increases.
async fn increase(counter: impl Fn() -> u64) -> u64 {
    let before = counter();
    tokio::time::sleep(COUNTED_FOR).await;
    counter() - before
}

fn masters(count: usize) -> Cluster {
    Cluster::start_with(ClusterPlan {
        masters: count,
        replicas: 0,
        node_timeout_millis: NEVER,
        ..ClusterPlan::default()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirections_in_circles_are_followed_with_pauses() {
    let cluster = masters(2);
    let client = impatient().connect(&cluster.url()).await.unwrap();
    let slot = slot_of(b"{circle}").to_string();
    let ids: Vec<String> = (0..2)
        .map(|node| cluster.command(node, &["CLUSTER", "MYID"]))
        .collect();
    for node in 0..2 {
        let () = cluster.command(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &ids[1 - node]]);
    }
    let requesting = keep_requesting(&client, "{circle}", 50);
    let nodes = cluster.nodes();
    let moved = increase(|| nodes.iter().map(|node| node.errors("MOVED")).sum()).await;
    drop(requesting);
    assert!(moved > 0, "no redirection");
    assert!(moved < 3000, "{moved} redirections");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_that_is_down_is_asked_with_pauses() {
    let cluster = masters(1);
    let client = impatient().connect(&cluster.url()).await.unwrap();
    let () = cluster.command(0, &["CLUSTER", "DELSLOTS", "0"]);
    let requesting = keep_requesting(&client, "down", 50);
    let node = &cluster.nodes()[0];
    let asked = increase(|| node.errors("CLUSTERDOWN")).await;
    drop(requesting);
    assert!(asked > 0, "the cluster is not down");
    assert!(asked < 1300, "{asked} steps");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topology_of_cluster_is_queried_with_pauses() {
    let mut cluster = masters(2);
    let client = impatient().connect(&cluster.url()).await.unwrap();
    let dead = cluster.master_of_key("{dead}");
    cluster.kill(dead);
    let requesting = keep_requesting(&client, "{dead}", 20);
    let other = &cluster.nodes()[1 - dead];
    let queries = increase(|| other.calls("cluster|slots:")).await;
    drop(requesting);
    assert!(queries > 0, "the other node was not asked");
    assert!(queries < 35, "{queries} queries");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_queried_with_pauses() {
    let mut deployment = Deployment::steady_sentinel();
    let client = deployment.client(impatient()).await;
    let master = deployment.master("");
    deployment.kill(master);
    let requesting = keep_requesting(&client, "dead", 20);
    let Deployment::Sentinel(sentinels) = &deployment else {
        unreachable!()
    };
    let sentinel = &sentinels.sentinels()[0];
    let queries = increase(|| sentinel.info("total_commands_processed").parse().unwrap()).await;
    drop(requesting);
    assert!(queries > 4, "the sentinel was not asked");
    assert!(queries < 90, "{queries} queries");
}

/// The connection breaks with the first step. Only an answer to a step is a success.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_breaks_after_its_handshake_is_replaced_with_pauses() {
    let (server, proxy) = proxied_server();
    let client = impatient().connect(&proxy.url()).await.unwrap();
    proxy.reset_on(Some("EVALSHA"));
    let requesting = keep_requesting(&client, "breaks", 200);
    let received = || server.info("total_connections_received").parse().unwrap();
    let connections = increase(received).await;
    assert!(connections > 2, "it does not break");
    assert!(connections < 80, "{connections} connections");
    // It works again, without more than one pause.
    proxy.reset_on(None);
    drop(requesting);
    drop(crate::common::retry_transient(|| client.lock("breaks").lock()).await);
}
