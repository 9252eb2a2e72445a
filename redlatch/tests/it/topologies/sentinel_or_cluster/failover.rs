//! What must hold when a master fails (docs/robustness.md).

use super::{Deployment, LASTING, answered, retry_transient, until_renewed};
use crate::common::prelude::*;

/// F3, F6, F28: a master is killed just after a lock was granted. The next master has the lock and
/// renews it, waiters are woken, and tokens grow.
pub async fn a_killed_master(deployment: &mut Deployment) {
    let settings = long_timeout().watchdog_lease(LASTING);
    let holder = deployment.client(settings.clone()).await;
    let other = deployment.client(settings).await;
    let held = retry_transient(|| holder.lock("{a}:held").lock()).await;
    let lent = retry_transient(|| holder.lock("{a}:lent").lock().lease(10 * LONG)).await;
    let waiting = waiter_of(&other, other.lock("{a}:lent").lock()).await;
    let old = deployment.master("{a}");
    let first = retry_transient(|| holder.fenced_lock("{a}:fenced").lock().lease(10 * LONG)).await;
    deployment.kill(old);
    let new = deployment.await_new_master("{a}", old);
    for key in ["{a}:held", "{a}:lent", "{a}:fenced"] {
        let there: bool = answered(deployment.server(new), &["EXISTS", key]).await;
        assert!(there, "{key} was granted and is gone");
    }
    for _ in 0..2 {
        until_renewed(deployment.server(new), "{a}:held").await;
        assert!(held.is_valid());
    }
    let mut written = first.token();
    free(first).await;
    let second = retry_transient(|| other.fenced_lock("{a}:fenced").lock()).await;
    assert!(second.token() > written, "an update would be lost");
    written = second.token();
    free(second).await;
    free(lent).await;
    let woken = done("woken, not slept through", waiting).await;
    free(woken.unwrap()).await;
    free(held).await;

    // The old master comes back without data, and no client treats it as the master.
    deployment.restart(old);
    deployment.await_healthy();
    let third = retry_transient(|| holder.fenced_lock("{a}:fenced").lock()).await;
    assert!(third.token() > written, "an update would be lost");
    free(third).await;
    until_idle(&holder).await;
    until_idle(&other).await;
}

/// F2: the next master does not have the lock, because the client did not wait for replicas. The
/// holder learns it at the next renewal at the latest.
pub async fn a_lock_that_is_lost_with_its_master(deployment: &mut Deployment) {
    // A third of the lease is enough for a failover, so that the renewal discovers the loss.
    let settings = long_timeout().replica_sync(ReplicaSync::Off);
    let settings = settings.watchdog_lease(LASTING);
    let client = deployment.client(settings).await;
    let old = deployment.master("{b}");
    let replicas = deployment.replicas(old);
    for &replica in &replicas {
        deployment.server(replica).freeze();
    }
    // Otherwise they would find the commands in their connections' buffers when they resume.
    let kill = ["CLIENT", "KILL", "TYPE", "replica"];
    let _: i64 = deployment.server(old).command(&kill);
    let guard = held(&client.lock("{b}:lost")).await;
    deployment.kill(old);
    for &replica in &replicas {
        deployment.server(replica).thaw();
    }
    let new = deployment.await_new_master("{b}", old);
    let there: bool = deployment.server(new).command(&["EXISTS", "{b}:lost"]);
    assert!(!there);
    within_limit("the loss is reported", guard.lost()).await;
    assert!(!guard.is_valid());
    assert_lost(guard.unlock().await, Loss::NotHeld);
}

/// F3, F4, F5, F6: a master hangs, and another one takes its place; then the old one resumes and
/// receives all that had been sent to it. No client relies on it.
pub async fn a_frozen_master(deployment: &Deployment) {
    let settings = long_timeout().watchdog_lease(LASTING);
    let holder = deployment.client(settings.clone()).await;
    let waiter = deployment.client(settings.clone()).await;
    let hasty = settings.response_timeout(Duration::from_millis(300));
    let hasty = deployment.client(hasty).await;
    // All connections are opened before.
    for client in [&holder, &waiter, &hasty] {
        let first = client.lock("{c}:first");
        free(retry_transient(|| first.lock()).await).await;
    }
    let held = retry_transient(|| holder.lock("{c}:held").lock()).await;
    let lent = retry_transient(|| holder.lock("{c}:lent").lock().lease(10 * LONG)).await;
    let waiting = waiter_of(&waiter, waiter.lock("{c}:lent").lock()).await;

    let old = deployment.master("{c}");
    deployment.server(old).freeze();
    let unanswered = hasty.lock("{c}:unanswered").lock().lease(10 * LONG).await;
    assert_transient(unanswered);
    let dropped = holder.lock("{c}:dropped").lock().lease(10 * LONG);
    let dropped = tokio::time::timeout(Duration::from_millis(100), dropped.into_future());
    assert!(dropped.await.is_err());
    let new = deployment.await_new_master("{c}", old);
    // Requested before the client knows of the new master, or after.
    let asked = retry_transient(|| waiter.lock("{c}:asked").lock()).await;
    deployment.server(old).thaw();

    until_renewed(deployment.server(new), "{c}:held").await;
    assert!(held.is_valid());
    free(lent).await;
    let woken = done("woken, not slept through", waiting).await;
    free(woken.unwrap()).await;
    for client in [&holder, &waiter, &hasty] {
        within_limit("settled", client.flush()).await;
    }
    deployment.await_healthy();
    let exists = |key: &str| deployment.server(new).command::<bool>(&["EXISTS", key]);
    for key in ["{c}:unanswered", "{c}:dropped", "{c}:lent"] {
        assert!(!exists(key), "{key} is still held");
    }
    assert!(asked.is_valid() && exists("{c}:asked"));
    free(asked).await;
    free(held).await;
    assert_eq!(hasty.status().holds + holder.status().holds, 0);
}
