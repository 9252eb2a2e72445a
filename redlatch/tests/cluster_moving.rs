//! On a cluster whose slots and nodes move while locks are held, waited for, renewed and released.

mod common;
mod topology;

use std::future::IntoFuture;

use common::{LONG, WATCHDOG, risen, soon, until};
use redlatch::{Client, MultiLock};
use redlatch_testkit::{Cluster, ClusterPlan, Takeover, shared_cluster, slot_of};
use topology::{granted, patient};

async fn client(cluster: &Cluster) -> Client {
    let settings = patient().watchdog(WATCHDOG);
    settings.connect(&cluster.url()).await.unwrap()
}

/// One name of each kind, all in one slot: taken and given back.
async fn every_kind(client: &Client, tag: &str) {
    let lock = client.lock(&format!("{tag}:lock"));
    granted(|| lock.lock()).await.unlock().await.unwrap();
    let fair = client.fair_lock(&format!("{tag}:fair"));
    granted(|| fair.lock()).await.unlock().await.unwrap();
    let fenced = client.fenced_lock(&format!("{tag}:fenced"));
    granted(|| fenced.lock()).await.unlock().await.unwrap();
    let both = client.read_write_lock(&format!("{tag}:both"));
    granted(|| both.read().lock()).await.unlock().await.unwrap();
    granted(|| both.write().lock())
        .await
        .unlock()
        .await
        .unwrap();
    let several = MultiLock::new([lock, client.lock(&format!("{tag}:other"))]);
    granted(|| several.lock()).await.unlock().await.unwrap();
    let permits = client.expirable_semaphore(&format!("{tag}:permits"));
    permits.try_set_permits(1).await.unwrap();
    granted(|| permits.acquire()).await.release().await.unwrap();
    let plain = client.semaphore(&format!("{tag}:plain"));
    plain.try_set_permits(1).await.unwrap();
    granted(|| plain.acquire()).await.release().await.unwrap();
}

/// F6: a slot moves to another node and back. What is single goes on in between (ASK); steps with
/// several keys when the move is over (TRYAGAIN).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_under_its_locks() {
    let cluster = shared_cluster();
    let (holder, waiter) = (client(cluster).await, client(cluster).await);
    let slot = slot_of(b"{m}");
    let home = cluster.owner(slot);
    for to in [(home + 1) % 3, home] {
        let held = granted(|| holder.lock("{m}:held").lock()).await;
        let also = granted(|| holder.lock("{m}:also").lock()).await;
        let fair = granted(|| holder.fair_lock("{m}:held-fair").lock()).await;
        let both = holder.read_write_lock("{m}:held-both");
        let read = granted(|| both.read().lock()).await;
        let lent = granted(|| holder.lock("{m}:lent").lock().lease(10 * LONG)).await;
        let waiting = tokio::spawn(waiter.lock("{m}:lent").lock().into_future());
        let queueing = tokio::spawn(waiter.fair_lock("{m}:held-fair").lock().into_future());
        let writing = waiter.read_write_lock("{m}:held-both");
        let writing = tokio::spawn(writing.write().lock().into_future());
        until("they wait", || async { waiter.status().subscriptions == 3 }).await;
        soon("every kind before", every_kind(&waiter, "{m}")).await;

        cluster.begin_moving(slot, to);
        // What is new is taken where the slot goes to.
        let new = granted(|| holder.lock("{m}:new").lock().lease(10 * LONG)).await;
        let meanwhile = waiter.clone();
        let meanwhile = tokio::spawn(async move { every_kind(&meanwhile, "{m}").await });
        // Half of what was together is there.
        cluster.move_key("{m}:held", to);
        for guard in [&held, &also] {
            risen("a lease", || async { guard.valid_for() }).await;
        }
        cluster.move_keys(slot, to);
        for guard in [&held, &also] {
            risen("a lease", || async { guard.valid_for() }).await;
        }
        // Released where nobody listens yet.
        lent.unlock().await.unwrap();
        cluster.finish_moving(slot, to);
        let woken = soon("woken, not slept through", waiting).await.unwrap();
        woken.unwrap().unlock().await.unwrap();
        soon("every kind meanwhile", meanwhile).await.unwrap();
        soon("every kind after", every_kind(&waiter, "{m}")).await;
        fair.unlock().await.unwrap();
        let next = soon("the next in the queue", queueing).await.unwrap();
        next.unwrap().unlock().await.unwrap();
        read.unlock().await.unwrap();
        let writer = soon("the writer", writing).await.unwrap();
        writer.unwrap().unlock().await.unwrap();
        for guard in [held, also, new] {
            assert!(guard.is_valid());
            guard.unlock().await.unwrap();
        }
        for client in [&holder, &waiter] {
            until("nothing is left", || async {
                let status = client.status();
                (status.holds, status.subscriptions, status.background) == (0, 0, 0)
            })
            .await;
        }
        let channels =
            |node| cluster.ask::<Vec<String>>(node, &["PUBSUB", "SHARDCHANNELS", "*{m}*"]);
        for node in 0..cluster.nodes().len() {
            until("no subscription is left", || async {
                channels(node).is_empty()
            })
            .await;
        }
    }
}

/// F6: who begins to wait while the slot is open waits as well as before, and is woken when the move is
/// over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_comes_while_a_slot_moves_waits() {
    let cluster = shared_cluster();
    let holder = client(cluster).await;
    let hasty = Client::connect(&cluster.url()).await.unwrap();
    let slot = slot_of(b"{w}");
    let to = (cluster.owner(slot) + 1) % 3;
    let held = granted(|| holder.lock("{w}:held").lock().lease(10 * LONG)).await;
    cluster.begin_moving(slot, to);
    cluster.move_keys(slot, to);
    let waiting = tokio::spawn(hasty.lock("{w}:held").lock().into_future());
    until("it waits", || async { hasty.status().subscriptions == 1 }).await;
    // Longer than it would ask for in vain.
    let patience = hasty.lock("{w}:held").try_lock().wait(common::SHORT);
    let other = patience.await.unwrap();
    assert!(other.is_none() && !waiting.is_finished());
    cluster.finish_moving(slot, to);
    held.unlock().await.unwrap();
    let woken = soon("woken, not slept through", waiting).await.unwrap();
    woken.unwrap().unlock().await.unwrap();
}

/// Nodes come and go, and replicas take over in good order, while locks are held and waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_come_and_go() {
    let mut cluster = Cluster::start_with(ClusterPlan {
        node_timeout_millis: 60_000,
        ..ClusterPlan::default()
    });
    let (holder, waiter) = (client(&cluster).await, client(&cluster).await);
    let slot = slot_of(b"{n}");
    let held = granted(|| holder.lock("{n}:held").lock()).await;
    let wait_for = async |name: &str| {
        let lent = granted(|| holder.lock(name).lock().lease(10 * LONG)).await;
        let waiting = tokio::spawn(waiter.lock(name).lock().into_future());
        let before = waiter.status().subscriptions;
        until("it waits", || async { waiter.status().subscriptions > 0 }).await;
        let _ = before;
        (lent, waiting)
    };
    let (lent, waiting) = wait_for("{n}:orderly").await;
    let old = cluster.owner(slot);
    cluster.fail_over(cluster.replica_of(old), Takeover::Orderly);
    risen("a lease", || async { held.valid_for() }).await;
    lent.unlock().await.unwrap();
    let woken = soon("woken, not slept through", waiting).await.unwrap();
    woken.unwrap().unlock().await.unwrap();

    let (lent, waiting) = wait_for("{n}:added").await;
    let added = cluster.add_node();
    cluster.move_slot(slot, added);
    risen("a lease", || async { held.valid_for() }).await;
    lent.unlock().await.unwrap();
    let woken = soon("woken, not slept through", waiting).await.unwrap();
    woken.unwrap().unlock().await.unwrap();

    let (lent, waiting) = wait_for("{n}:removed").await;
    cluster.remove_node(added);
    risen("a lease", || async { held.valid_for() }).await;
    lent.unlock().await.unwrap();
    let woken = soon("woken, not slept through", waiting).await.unwrap();
    woken.unwrap().unlock().await.unwrap();
    assert!(held.is_valid());
    held.unlock().await.unwrap();
}
