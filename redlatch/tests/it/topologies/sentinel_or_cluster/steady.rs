//! What must hold while no master is replaced.

use super::{Deployment, retry_transient};
use crate::common::prelude::*;

/// F2: a master hangs, and no replica takes its place. The holder learns of the loss before the
/// server can have expired the lock.
pub async fn a_master_that_hangs(deployment: &Deployment) {
    let watchdog = Duration::from_secs(2);
    let settings = response_timeout(watchdog).watchdog_lease(watchdog);
    let client = deployment.client(settings).await;
    let name = unique("{d}:hangs");
    let server = deployment.server(deployment.master("{d}"));
    let guard = loop {
        let guard = retry_transient(|| client.lock(&name).lock()).await;
        server.freeze();
        // If the machine paused, the hold may be over already; then the loss was reported.
        if guard.is_valid() {
            break guard;
        }
        server.thaw();
    };
    within_limit("the loss is reported", guard.lost()).await;
    assert_lost(guard.unlock().await, Loss::LeaseEnded);
    server.thaw();
    until("nothing is left", async || {
        within_limit("settled", client.flush()).await;
        pttl(server, &name) == -2 && client.status().holds == 0
    })
    .await;
}

/// F2: a guard's remaining time never exceeds the server's.
pub async fn a_guard_is_more_careful_than_the_server(deployment: &Deployment) {
    let client = deployment.client(long_timeout()).await;
    let name = unique("{d}:careful");
    let server = deployment.server(deployment.master("{d}"));
    let guard = retry_transient(|| client.lock(&name).lock()).await;
    let left = pttl(server, &name);
    // The server truncates to whole milliseconds.
    let left = Duration::from_millis(u64::try_from(left).unwrap() + 1);
    assert!(guard.valid_for() <= left);
    free(guard).await;
}

/// F6: a release while the waiter's connections are down is noticed when they are restored.
pub async fn a_waiter_whose_connections_are_cut(deployment: &Deployment) {
    let holder = deployment.client(long_timeout()).await;
    let waiter = deployment.client(long_timeout()).await;
    let name = unique("{d}:cut");
    let server = deployment.server(deployment.master("{d}"));
    for _ in 0..5 {
        let none = || async { waiter.status().subscriptions == 0 };
        until("the last subscription has ended", none).await;
        let held = retry_transient(|| holder.lock(&name).lock().lease(10 * LONG)).await;
        let waiting = tokio::spawn(waiter.lock(&name).lock().into_future());
        until("it waits", async || !none().await).await;
        server.cut_all();
        free(held).await;
        let woken = done("woken, not slept through", waiting).await;
        free(woken.unwrap()).await;
    }
}

/// F5: acquisitions are dropped at every await point, including the wait for replicas.
pub async fn dropped_anywhere(deployment: &Deployment) {
    let client = deployment.client(long_timeout()).await;
    let other = deployment.client(long_timeout()).await;
    let name = unique("{d}:dropped");
    let lock = client.lock(&name);
    let server = deployment.server(deployment.master("{d}"));
    let assert_nothing_left = async || {
        within_limit("settled", client.flush()).await;
        assert_eq!(pttl(server, &name), -2, "a key was left");
        assert_eq!(client.status().holds, 0);
    };
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, lock.lock()).await,
        async || assert_nothing_left().await,
    )
    .await;
    drop_result_after_each_poll(
        async |polls| {
            let held = other.lock(&name).lock().lease(10 * LONG).await.unwrap();
            let waiter = poll_up_to(polls, lock.lock());
            beside_release(waiter, held.unlock()).await
        },
        async || assert_nothing_left().await,
    )
    .await;
}
