//! Clusters with a frozen node: the locks on the other nodes are renewed and released in time.

use std::time::Instant;

use crate::common::prelude::*;

/// Starts three masters without replicas, none of which ever counts as failed.
fn three_masters() -> Cluster {
    Cluster::start_with(ClusterPlan {
        replicas: 0,
        node_timeout_millis: 600_000,
        ..ClusterPlan::default()
    })
}

/// Returns names of locks, spread over some slots of every node, and the node that serves each.
/// Called while all nodes answer.
fn names(cluster: &Cluster, count: usize) -> Vec<(String, usize)> {
    let tags: Vec<_> = (0..30).map(|_| unique("lock")).collect();
    let masters: Vec<_> = tags.iter().map(|tag| cluster.master_of_key(tag)).collect();
    let named = (0..count).map(|n| {
        let slot = n % tags.len();
        (format!("{{{}}}-{n}", tags[slot]), masters[slot])
    });
    named.collect()
}

/// Returns some of the names that the node to be frozen serves, or that it does not serve.
fn some(names: &[(String, usize)], count: usize, frozen: bool) -> Vec<String> {
    let wanted = names.iter().filter(|(_, node)| (*node == FROZEN) == frozen);
    wanted.map(|(name, _)| name.clone()).take(count).collect()
}

/// Acquires and releases a lock on another node.
async fn take_turns(client: &Client, name: &str) {
    let lock = client.lock(&format!("{name}-free"));
    free(done("free", lock.lock()).await).await;
}

const FROZEN: usize = 1;

/// Long enough for a busy machine to acquire and renew thousands of locks meanwhile.
const LEASE: Duration = WATCHDOG.saturating_mul(2);

/// With thousands of locks and one of three nodes frozen for longer than the lease, no lock on
/// another node is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_node_loses_no_lock_on_other_nodes() {
    let cluster = three_masters();
    let client = Client::builder().watchdog_lease(LEASE);
    let client = client.connect(&cluster.url()).await.unwrap();
    let names = names(&cluster, 3000);
    let elsewhere = some(&names, 5, false);
    let mut guards: Vec<(Guard, usize)> = Vec::new();
    for chunk in names.chunks(200) {
        let acquiring = spawn_each(chunk, |(name, _)| client.lock(name).lock());
        for (acquired, (_, node)) in acquiring.into_iter().zip(chunk) {
            guards.push((acquired.await.unwrap().unwrap(), *node));
        }
    }
    assert!(guards.iter().all(|(guard, _)| guard.is_valid()));

    let frozen = Instant::now();
    cluster.freeze(FROZEN);
    let mut slowest = Duration::ZERO;
    while frozen.elapsed() < LEASE + WATCHDOG {
        // Releases and acquisitions work there, too.
        for name in &elsewhere {
            let begun = Instant::now();
            take_turns(&client, name).await;
            slowest = slowest.max(begun.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let lost = |frozen: bool| {
        let of = guards
            .iter()
            .filter(|(_, node)| (*node == FROZEN) == frozen);
        of.filter(|(guard, _)| !guard.is_valid()).count()
    };
    let (there, elsewhere) = (lost(true), lost(false));
    cluster.thaw(FROZEN);
    println!("lost on the frozen node: {there}, elsewhere: {elsewhere}; slowest turn {slowest:?}");
    assert!(there > 500, "the node was frozen for longer than the lease");
    assert_eq!(elsewhere, 0, "lost on nodes that answered all the time");
    assert!(slowest < LONG / 4, "{slowest:?}");
}

/// Callers whose node does not answer do not prevent other callers from acquiring or releasing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_node_uses_up_no_turns_of_other_nodes() {
    let cluster = three_masters();
    let client = connect(long_timeout(), &cluster.url()).await;
    let names = names(&cluster, 6000);
    let at_frozen = some(&names, 1500, true);
    let elsewhere = some(&names, 20, false);
    let held = held_all(elsewhere.iter().map(|name| client.lock(name))).await;
    // Callers use up turns only if there is a connection.
    take_turns(&client, &at_frozen[0]).await;

    cluster.freeze(FROZEN);
    let asking = Arc::new(AtomicUsize::new(0));
    let failed = Arc::new(AtomicUsize::new(0));
    let crowd: Vec<_> = at_frozen
        .iter()
        .map(|name| {
            let (lock, failed) = (client.lock(name), failed.clone());
            let asking = asking.clone();
            tokio::spawn(async move {
                asking.fetch_add(1, Ordering::SeqCst);
                let outcome = lock.try_lock().await;
                failed.fetch_add(1, Ordering::SeqCst);
                outcome.is_err()
            })
        })
        .collect();
    // More callers wait than may send at the same time.
    let all_ask = async || asking.load(Ordering::SeqCst) == at_frozen.len();
    until("all ask", all_ask).await;
    for name in &elsewhere {
        take_turns(&client, name).await;
    }
    let failed = failed.load(Ordering::SeqCst);
    assert_eq!(failed, 0, "callers of the frozen node came first");

    // Dropped requests are settled in the background, with separate turns.
    for one in &crowd {
        one.abort();
    }
    for one in crowd {
        let _ = one.await;
    }
    let begun = Instant::now();
    drop(held);
    for name in &elsewhere {
        let is_free = async || !client.lock(name).is_locked().await.unwrap();
        until("released in the background", is_free).await;
    }
    let took = begun.elapsed();
    cluster.thaw(FROZEN);
    assert!(took < LONG / 4, "{took:?}");
}
