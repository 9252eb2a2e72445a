//! One address with many slots behind it: managed Redis and proxies that show a cluster as a single
//! server. Here a cluster of one node that does not tell.

use tokio::time::Instant;

use crate::common::deployments::ShardedEndpoint;
use crate::common::prelude::*;

/// Feared most: all holds of a client end with their first lease, because one script cannot renew
/// them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_in_several_slots_are_renewed() {
    let endpoint = ShardedEndpoint::start();
    let client = endpoint.client(renewing()).await;
    let mut guards = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        guards.push(held(&client.lock(name)).await);
    }
    let end = Instant::now() + WATCHDOG;
    tokio::time::sleep_until(end).await;
    // Of a few batches that were sent together.
    let refusals = endpoint.refusals();
    assert!((1..5).contains(&refusals), "{refusals}");
    for guard in guards {
        assert!(guard.is_valid());
        free(guard).await;
    }
    assert_eq!(endpoint.refusals(), refusals);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_on_several_slots_are_divided_at_the_first_refusal() {
    let endpoint = ShardedEndpoint::start();
    let names: Vec<String> = (0..20).map(|number| format!("multi:{number}")).collect();
    {
        let client = endpoint.client(Client::builder()).await;
        let locks: Vec<_> = names.iter().map(|name| client.lock(name)).collect();
        let all = MultiLock::new(&locks);
        let guard = all.try_lock().await.unwrap().unwrap();
        assert_eq!(endpoint.refusals(), 1);
        free(guard).await;
        let guard = done("acquired", all.lock()).await;
        // Another client finds all of them, and skips a key of which no script can read all keys.
        let _: u32 = endpoint.cluster.nodes()[0].command(&["HSET", "multi:weird}key", "a", "1"]);
        let other = endpoint.client(Client::builder()).await;
        let mut listed: Vec<String> = Vec::new();
        let mut listing = other.list("multi:*");
        while let Some(found) = listing.next().await.unwrap() {
            listed.push(found.name);
        }
        listed.sort_unstable();
        let mut expected = names.clone();
        expected.sort_unstable();
        assert_eq!(listed, expected);
        assert_eq!(endpoint.refusals(), 2);
        free(guard).await;
    }
    // Steps of many tasks, which wait to be sent, share a script.
    let client = endpoint.client(Client::builder()).await;
    let tasks = (0..64).map(|number| {
        let lock = client.lock(&format!("task:{number}"));
        tokio::spawn(async move {
            for _ in 0..20 {
                lock.lock().await?.unlock().await?;
            }
            Ok::<_, redlatch::Error>(())
        })
    });
    joined_all("done", tasks.collect::<Vec<_>>()).await;
    // Some were packed, and refused.
    assert!(endpoint.refusals() > 2);
}

/// A message must reach all clients, whether they know of the slots or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latch_with_a_hash_tag_has_one_channel() {
    let endpoint = ShardedEndpoint::start();
    let waiting = endpoint.client(Client::builder()).await;
    let latch = waiting.count_down_latch("{shop}:ready");
    assert!(latch.try_set_count(1).await.unwrap());
    let waiter = tokio::spawn(async move { latch.wait().await });
    let other = endpoint.client(Client::builder()).await;
    let (a, b) = (other.lock("a"), other.lock("b"));
    let both = MultiLock::new([&a, &b]).try_lock().await.unwrap().unwrap();
    free(both).await;
    assert!(endpoint.refusals() > 0);
    let latch = other.count_down_latch("{shop}:ready");
    until("waits", async || {
        let channels: Vec<String> = endpoint.cluster.nodes()[0].command(&["PUBSUB", "CHANNELS"]);
        channels.iter().any(|channel| channel.contains("{shop}"))
    })
    .await;
    latch.count_down().await.unwrap();
    let served = tokio::time::timeout(WATCHDOG, waiter).await;
    served.expect("woken by the message").unwrap().unwrap();
}
