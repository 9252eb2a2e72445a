//! A cluster is updated node by node to a version with sharded channels (Redis 7.0), while clients use it.
//!
//! A node of this version that does not know the commands stands for an earlier one.

use super::sentinel_or_cluster::NEVER;
use crate::common::prelude::*;

/// A cluster of three masters without sharded channels.
fn earlier_cluster() -> Cluster {
    let args: Vec<&str> = ["SPUBLISH", "SSUBSCRIBE", "SUNSUBSCRIBE"]
        .into_iter()
        .flat_map(|command| ["--rename-command", command, ""])
        .collect();
    Cluster::start_with(ClusterPlan {
        replicas: 0,
        node_timeout_millis: NEVER,
        args: &args,
        ..ClusterPlan::default()
    })
}

fn update(cluster: &mut Cluster, node: usize) {
    cluster.restart_without(node, "rename-command");
    cluster.await_healthy();
}

async fn client(cluster: &Cluster) -> Client {
    let (settings, url) = (long_timeout(), cluster.url());
    retry_transient(|| settings.clone().connect(&url)).await
}

/// Returns a name whose slot this node owns.
fn name_at(cluster: &Cluster, node: usize, round: &str) -> String {
    let mut names = (0..).map(|n| format!("{{{round}-{n}}}"));
    names
        .find(|name| cluster.master_of_key(name) == node)
        .unwrap()
}

/// Each client waits for each other one, at each node. Leases are longer than the test.
async fn all_wake_each_other(cluster: &Cluster, clients: &[Client], round: &str) {
    for node in 0..cluster.nodes().len() {
        for (h, holder) in clients.iter().enumerate() {
            for (w, waiter) in clients.iter().enumerate().filter(|(w, _)| *w != h) {
                let name = name_at(cluster, node, &format!("{round}-{h}-{w}"));
                wakes(holder, waiter, &name).await;
            }
        }
    }
}

async fn wakes(holder: &Client, waiter: &Client, name: &str) {
    let lock = holder.lock(&format!("{name}:lock"));
    let held = retry_transient(|| lock.lock().lease(10 * LONG)).await;
    let semaphore = holder.semaphore(&format!("{name}:semaphore"));
    semaphore.try_set_permits(1).await.unwrap();
    let permit = retry_transient(|| semaphore.acquire()).await;
    let locking = tokio::spawn(waiter.lock(lock.name()).lock().into_future());
    let acquiring = tokio::spawn(waiter.semaphore(semaphore.name()).acquire().into_future());
    until_subscribed(waiter, 2).await;
    free(held).await;
    permit.release().await.unwrap();
    free(joined("the lock", locking).await).await;
    let permit = done("the permit", acquiring).await;
    permit.unwrap().release().await.unwrap();
    until_subscribed(waiter, 0).await;
}

/// Clients that are older than the update, that start during it, and after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_woken_before_during_and_after_an_update() {
    let mut cluster = earlier_cluster();
    let mut clients = vec![client(&cluster).await, client(&cluster).await];
    all_wake_each_other(&cluster, &clients, "before").await;
    update(&mut cluster, 0);
    clients.push(client(&cluster).await);
    all_wake_each_other(&cluster, &clients, "during").await;
    for node in 1..3 {
        update(&mut cluster, node);
    }
    clients.push(client(&cluster).await);
    all_wake_each_other(&cluster, &clients, "after").await;
}

/// Waiters sleep while their node is updated, and lose their lock with its data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_of_an_updated_node_asks_again() {
    let mut cluster = earlier_cluster();
    let (holder, waiter) = (client(&cluster).await, client(&cluster).await);
    let name = name_at(&cluster, 1, "restarted");
    let held = retry_transient(|| holder.lock(&name).lock().lease(10 * LONG)).await;
    let waiting = waiter_of(&waiter, waiter.lock(&name).lock()).await;
    update(&mut cluster, 1);
    free(joined("asked", waiting).await).await;
    assert!(held.unlock().await.is_err(), "its data is gone");
}

/// The release is published where the waiter does not listen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_follows_its_slot_to_an_updated_node() {
    let mut cluster = earlier_cluster();
    update(&mut cluster, 0);
    let (holder, waiter) = (client(&cluster).await, client(&cluster).await);
    for (from, to) in [(1, 0), (0, 1)] {
        let name = name_at(&cluster, from, &format!("moved-{from}"));
        let held = retry_transient(|| holder.lock(&name).lock().lease(10 * LONG)).await;
        let waiting = waiter_of(&waiter, waiter.lock(&name).lock()).await;
        cluster.move_slot(slot_of(name.as_bytes()), to);
        free(held).await;
        free(joined("woken", waiting).await).await;
        until_subscribed(&waiter, 0).await;
    }
}
