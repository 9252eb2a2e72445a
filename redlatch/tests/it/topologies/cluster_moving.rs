//! Tests on a cluster whose slots and nodes move while locks are held, waited for, renewed and
//! released.

use std::sync::OnceLock;

use redlatch_testkit::FailoverMode;

use super::sentinel_or_cluster::NEVER;
use crate::common::prelude::*;

/// The cluster for tests that move slots. It is separate from the shared cluster: keys of other
/// tests may lie in the moving slots, and the nodes' error counters must count only errors of these
/// tests.
fn moving_cluster() -> &'static Cluster {
    static MOVING: OnceLock<Cluster> = OnceLock::new();
    MOVING.get_or_init(|| {
        Cluster::start_with(ClusterPlan {
            node_timeout_millis: NEVER,
            ..ClusterPlan::default()
        })
    })
}

async fn client(cluster: &Cluster) -> Client {
    connect(renewing().response_timeout(LONG), &cluster.url()).await
}

/// Acquires and releases one object of each kind, all in one slot.
async fn every_kind(client: &Client, tag: &str) {
    let lock = client.lock(&format!("{tag}:lock"));
    free(retry_transient(|| lock.lock()).await).await;
    let fair = client.fair_lock(&format!("{tag}:fair"));
    free(retry_transient(|| fair.lock()).await).await;
    let fenced = client.fenced_lock(&format!("{tag}:fenced"));
    free(retry_transient(|| fenced.lock()).await).await;
    let both = client.read_write_lock(&format!("{tag}:both"));
    free(retry_transient(|| both.read().lock()).await).await;
    free(retry_transient(|| both.write().lock()).await).await;
    let several = MultiLock::new([lock, client.lock(&format!("{tag}:other"))]);
    free(retry_transient(|| several.lock()).await).await;
    let permits = client.expirable_semaphore(&format!("{tag}:permits"));
    permits.try_set_permits(1).await.unwrap();
    free(retry_transient(|| permits.acquire()).await).await;
    let plain = client.semaphore(&format!("{tag}:plain"));
    plain.try_set_permits(1).await.unwrap();
    let permit = retry_transient(|| plain.acquire()).await;
    permit.release().await.unwrap();
}

/// Only the script knows the keys of the readers' timeouts. While the lock has moved but these keys
/// have not, the readers must not be treated as dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_survives_partial_move_of_its_keys() {
    let cluster = moving_cluster();
    let reader = client(cluster).await;
    let writer = connect(response_timeout(Duration::from_secs(1)), &cluster.url()).await;
    let name = "{half}:both";
    let slot = slot_of(b"{half}");
    let to = (cluster.master_of_slot(slot) + 1) % 3;
    let both = reader.read_write_lock(name);
    let read = retry_transient(|| both.read().lock().lease(10 * LONG)).await;
    // Also loads the scripts on both nodes.
    let write = writer.read_write_lock(name);
    assert!(write.write().try_lock().await.unwrap().is_none());
    cluster.begin_moving(slot, to);
    cluster.move_key(name, to);
    let tried = write.write().try_lock().await;
    let error = tried.expect_err("not known now");
    assert!(error.is_transient(), "{error}");
    cluster.move_keys(slot, to);
    cluster.finish_moving(slot, to);
    assert!(retry_transient(|| write.write().try_lock()).await.is_none());
    free(read).await;
    free(retry_transient(|| write.write().lock()).await).await;
}

/// Too few replicas acknowledge an acquisition of permits, which have no owner. Meanwhile the slot moves, half-way and
/// for good. The permits are released where they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreplicated_permits_are_released_where_their_slot_has_moved() {
    let cluster = Cluster::start_with(ClusterPlan {
        node_timeout_millis: NEVER,
        ..ClusterPlan::default()
    });
    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(2));
    let client = connect(settings.replica_timeout(5 * SECOND), &cluster.url()).await;
    let settings = long_timeout().replica_sync(ReplicaSync::Off);
    let other = connect(settings, &cluster.url()).await;
    let name = "{unreplicated}";
    let slot = slot_of(name.as_bytes());
    let permits = other.semaphore(name);
    permits.try_set_permits(3).await.unwrap();
    // Acquires two permits, which too few replicas acknowledge, and returns the error of that after
    // `change`.
    let refused = async |change: &dyn Fn()| {
        let acquiring = tokio::spawn(client.semaphore(name).acquire_many(2).into_future());
        let acquired = async || matches!(permits.available().await, Ok(1));
        until("acquired at the master", acquired).await;
        change();
        done("answered", acquiring).await
    };
    let to = (cluster.master_of_slot(slot) + 1) % 3;
    let move_half_way = || {
        cluster.begin_moving(slot, to);
        cluster.move_keys(slot, to);
    };
    let answer = refused(&move_half_way).await;
    assert_matches!(answer, Err(Error::NotReplicated { .. }));
    assert_eq!(permits.available().await.unwrap(), 3);
    cluster.finish_moving(slot, to);

    let to = (to + 1) % 3;
    let answer = refused(&|| cluster.move_slot(slot, to)).await;
    assert_matches!(answer, Err(Error::NotReplicated { .. }));
    assert_eq!(permits.available().await.unwrap(), 3);

    // A replica takes over. It may not have all acquisitions, so nothing is released, and the error says so.
    let replica = cluster.replica_of(to);
    let answer = refused(&|| cluster.fail_over(replica, FailoverMode::Graceful)).await;
    assert_matches!(answer, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(permits.available().await.unwrap(), 1);
}

/// The slot was the last one of its node, so the client does not use that node any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_are_acquired_once_if_their_node_loses_its_last_slot() {
    let mut cluster = Cluster::start_with(ClusterPlan {
        node_timeout_millis: NEVER,
        // Else the node becomes a replica.
        args: &["--cluster-allow-replica-migration", "no"],
        ..ClusterPlan::default()
    });
    let name = "{last-slot}";
    let slot = slot_of(name.as_bytes());
    let home = cluster.master_of_slot(slot);
    let added = cluster.add_node();
    cluster.move_slot(slot, added);
    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(1));
    let client = connect(settings.replica_timeout(LONG), &cluster.url()).await;
    let other = connect(long_timeout(), &cluster.url()).await;
    // Also loads the script: behind a WAIT it would not be run for a minute.
    let loaded = other.semaphore(name);
    loaded.try_set_permits(3).await.unwrap();
    loaded.acquire().await.unwrap().release().await.unwrap();
    let permits = client.semaphore(name);
    let acquiring = tokio::spawn(client.semaphore(name).acquire_many(2).into_future());
    let available = || async { permits.available().await.unwrap() };
    until("acquired at the master", async || available().await == 1).await;
    cluster.move_slot(slot, home);
    // Redirected, it learns that the node has no slots.
    available().await;
    // They are released there, and acquired where a replica confirms them.
    let held = joined("answered", acquiring).await;
    assert_eq!(available().await, 1);
    held.release().await.unwrap();
    assert_eq!(available().await, 3);
}

/// F6: a slot moves to another node and back. Steps with a single key succeed during the move
/// (ASK); steps with several keys succeed after it (TRYAGAIN).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_work_while_their_slot_moves() {
    let cluster = moving_cluster();
    let (holder, waiter) = (client(cluster).await, client(cluster).await);
    let slot = slot_of(b"{m}");
    let home = cluster.master_of_slot(slot);
    for to in [(home + 1) % 3, home] {
        let held = retry_transient(|| holder.lock("{m}:held").lock()).await;
        let also = retry_transient(|| holder.lock("{m}:also").lock()).await;
        let fair = retry_transient(|| holder.fair_lock("{m}:held-fair").lock()).await;
        let both = holder.read_write_lock("{m}:held-both");
        let read = retry_transient(|| both.read().lock()).await;
        let lent = retry_transient(|| holder.lock("{m}:lent").lock().lease(10 * LONG)).await;
        let waiting = tokio::spawn(waiter.lock("{m}:lent").lock().into_future());
        let queueing = tokio::spawn(waiter.fair_lock("{m}:held-fair").lock().into_future());
        let writing = waiter.read_write_lock("{m}:held-both");
        let writing = tokio::spawn(writing.write().lock().into_future());
        until_subscribed(&waiter, 3).await;
        within_limit("every kind before", every_kind(&waiter, "{m}")).await;

        cluster.begin_moving(slot, to);
        // New locks are acquired on the target node.
        let new = retry_transient(|| holder.lock("{m}:new").lock().lease(10 * LONG)).await;
        let meanwhile = waiter.clone();
        let meanwhile = tokio::spawn(async move { every_kind(&meanwhile, "{m}").await });
        // One of several related keys has moved.
        cluster.move_key("{m}:held", to);
        for guard in [&held, &also] {
            until_rises("a lease", async || guard.valid_for()).await;
        }
        cluster.move_keys(slot, to);
        for guard in [&held, &also] {
            until_rises("a lease", async || guard.valid_for()).await;
        }
        // Released on the target node, to which no waiter has subscribed yet.
        free(lent).await;
        cluster.finish_moving(slot, to);
        free(joined("woken, not slept through", waiting).await).await;
        done("every kind meanwhile", meanwhile).await;
        within_limit("every kind after", every_kind(&waiter, "{m}")).await;
        free(fair).await;
        free(joined("the next in the queue", queueing).await).await;
        free(read).await;
        free(joined("the writer", writing).await).await;
        for guard in [held, also, new] {
            assert!(guard.is_valid());
            free(guard).await;
        }
        until_idle(&holder).await;
        until_idle(&waiter).await;
        let listed = ["PUBSUB", "SHARDCHANNELS", "*{m}*"];
        let channels = |node| cluster.command::<Vec<String>>(node, &listed).len();
        for node in 0..cluster.nodes().len() {
            until("none is left", async || channels(node) == 0).await;
        }
    }
}

/// F6: a waiter that starts while the slot is moving waits as usual, and is woken after the move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_waiter_waits_while_slot_moves() {
    let cluster = moving_cluster();
    let holder = client(cluster).await;
    let hasty = Client::connect(&cluster.url()).await.unwrap();
    let slot = slot_of(b"{w}");
    let to = (cluster.master_of_slot(slot) + 1) % 3;
    let held = retry_transient(|| holder.lock("{w}:held").lock().lease(10 * LONG)).await;
    cluster.begin_moving(slot, to);
    cluster.move_keys(slot, to);
    let waiting = waiter_of(&hasty, hasty.lock("{w}:held").lock()).await;
    // Longer than the client retries a request without success.
    let limited = hasty.lock("{w}:held").try_lock().wait(crate::common::SHORT);
    let other = limited.await.unwrap();
    assert!(other.is_none() && !waiting.is_finished());
    cluster.finish_moving(slot, to);
    free(held).await;
    free(joined("woken, not slept through", waiting).await).await;
}

/// The step's declared keys do not include the reader's own key. If that key is on another node
/// than the rest, the step must wait for the end of the move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_acquire_and_release_while_slot_moves() {
    let cluster = moving_cluster();
    let (first, second) = (client(cluster).await, client(cluster).await);
    let slot = slot_of(b"{r}");
    let to = (cluster.master_of_slot(slot) + 1) % 3;
    let early = retry_transient(|| first.read_write_lock("{r}:both").read().lock()).await;
    let gone = retry_transient(|| second.read_write_lock("{r}:both").read().lock()).await;
    let gone_owner = gone.owner_id();
    cluster.begin_moving(slot, to);
    let late = second.clone();
    let late = tokio::spawn(async move {
        let both = late.read_write_lock("{r}:both");
        retry_transient(|| both.read().lock()).await
    });
    let releasing = tokio::spawn(gone.unlock());
    let home = &cluster.nodes()[cluster.master_of_slot(slot)];
    let refused = async || home.info("total_error_replies") != "0";
    until("the latecomer has been refused", refused).await;
    cluster.move_keys(slot, to);
    cluster.finish_moving(slot, to);
    let late = done("the latecomer", late).await;
    joined("the release", releasing).await;
    for guard in [&early, &late] {
        until_rises("a lease", async || guard.valid_for()).await;
    }
    let both = first.read_write_lock("{r}:both");
    let holders = both.read().holders().await.unwrap();
    assert_eq!(holders.len(), 2);
    assert!(holders.iter().all(|holder| holder.owner != gone_owner));
    free(early).await;
    free(late).await;
    assert!(!both.read().is_locked().await.unwrap());
    let left: Vec<String> = cluster.command(to, &["KEYS", "*{r}*"]);
    assert!(left.is_empty(), "{left:?}");
}

/// A request to a node that owns no slots yet is not cut short when the client refreshes its slot
/// map.
async fn while_a_new_node_is_asked(cluster: &Cluster, added: usize) {
    let client = client(cluster).await;
    let slot = slot_of(b"{p}");
    let permits = client.semaphore("{p}:permits");
    permits.try_set_permits(2).await.unwrap();
    let permit = retry_transient(|| permits.acquire()).await;
    permit.release().await.unwrap();
    let elsewhere = (0..)
        .map(|n| format!("elsewhere-{n}"))
        .find(|name| cluster.master_of_key(name) != cluster.master_of_slot(slot))
        .unwrap();
    cluster.begin_moving(slot, added);
    cluster.move_keys(slot, added);
    let permit = retry_transient(|| permits.acquire()).await;
    permit.release().await.unwrap();

    cluster.freeze(added);
    let releasing = permits.clone();
    let releasing = tokio::spawn(async move { releasing.release(1).await });
    let watched = &cluster.nodes()[cluster.master_of_key(&elsewhere)];
    for _ in 0..2 {
        let refreshes = || watched.info("cmdstat_cluster|slots");
        let before = refreshes();
        // A broken connection triggers a refresh.
        watched.cut_all();
        free(retry_transient(|| client.lock(&elsewhere).lock()).await).await;
        until("it has refreshed", async || refreshes() != before).await;
    }
    cluster.thaw(added);
    joined("answered", releasing).await;
    assert_eq!(permits.available().await.unwrap(), 3);
    cluster.finish_moving(slot, added);
}

/// Nodes join and leave, and replicas take over in an orderly way, while locks are held and waited
/// for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_work_while_nodes_join_and_leave() {
    let mut cluster = Cluster::start_with(ClusterPlan {
        node_timeout_millis: 60_000,
        ..ClusterPlan::default()
    });
    let (holder, waiter) = (client(&cluster).await, client(&cluster).await);
    let slot = slot_of(b"{n}");
    let held = retry_transient(|| holder.lock("{n}:held").lock()).await;
    let wait_for = async |name: &str| {
        let none = || async { waiter.status().subscriptions == 0 };
        until("the last subscription has ended", none).await;
        let lent = retry_transient(|| holder.lock(name).lock().lease(10 * LONG)).await;
        let waiting = tokio::spawn(waiter.lock(name).lock().into_future());
        until("it waits", async || !none().await).await;
        (lent, waiting)
    };
    let (lent, waiting) = wait_for("{n}:orderly").await;
    let old = cluster.master_of_slot(slot);
    cluster.fail_over(cluster.replica_of(old), FailoverMode::Graceful);
    until_rises("a lease", async || held.valid_for()).await;
    free(lent).await;
    let woken = done("woken, not slept through", waiting).await;
    free(woken.unwrap()).await;

    let (lent, waiting) = wait_for("{n}:added").await;
    let added = cluster.add_node();
    while_a_new_node_is_asked(&cluster, added).await;
    cluster.move_slot(slot, added);
    until_rises("a lease", async || held.valid_for()).await;
    free(lent).await;
    let woken = done("woken, not slept through", waiting).await;
    free(woken.unwrap()).await;

    let (lent, waiting) = wait_for("{n}:removed").await;
    cluster.remove_node(added);
    until_rises("a lease", async || held.valid_for()).await;
    free(lent).await;
    let woken = done("woken, not slept through", waiting).await;
    free(woken.unwrap()).await;
    assert!(held.is_valid());
    free(held).await;
}
