//! Nothing grows with the number of names ever used: each collection of a client is as it was before, once all is released and
//! the subscriptions have ended.
//!
//! Collections that no name adds to: the nodes and slots of a topology, the steps of a batch, the scripts of multi-locks (one for
//! each order of kinds). Those that a caller bounds: the metrics with an attribute, whose values a function of the caller returns,
//! and the reports of a watch, at most 10,000 keys.

use std::future::{Future, IntoFuture};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::sleep;

use super::Session;
use crate::error::Result;
use crate::inspect::Event;
use crate::test_prelude::SECOND;
use crate::{Client, Embedded, MultiLock, Owner, RedLock};

const NAMES: usize = 500;

/// Returns the sizes of all collections of a client.
fn sizes(session: &Session, store: &Embedded) -> Vec<(&'static str, usize)> {
    let mut sizes = vec![("holds", session.holds.lock().len())];
    sizes.extend(session.waiting.sizes());
    sizes.extend(session.watchdog.sizes());
    sizes.extend(session.registration.sizes());
    sizes.extend(store.sizes());
    sizes
}

/// Acquires something that is held, and releases it. `release` releases it for the holder.
async fn wait_for<G>(
    request: impl IntoFuture<Output = Result<G>>,
    release: impl Future<Output = ()>,
) {
    let mut waiting = Box::pin(request.into_future());
    let polled = tokio::time::timeout(Duration::ZERO, &mut waiting).await;
    assert!(polled.is_err(), "it is held");
    release.await;
    drop(waiting.await.unwrap());
}

/// Uses a name with every primitive. Each request waits.
async fn use_name(client: &Client, other: &Client, name: &str) {
    let key = |kind: &str| format!("{kind}:{name}");
    macro_rules! wait_for_lock {
        ($kind:ident, $name:expr) => {{
            let held = other.$kind($name).lock().await.unwrap();
            wait_for(client.$kind($name).lock(), async { drop(held) }).await;
        }};
    }
    wait_for_lock!(lock, &key("lock"));
    wait_for_lock!(fair_lock, &key("fair"));
    wait_for_lock!(fenced_lock, &key("fenced"));
    wait_for_lock!(spin_lock, &key("spin"));
    let sides = [client, other].map(|client| client.read_write_lock(&key("sides")));
    let writing = sides[1].write().lock().await.unwrap();
    wait_for(sides[0].read().lock(), async { drop(writing) }).await;
    let reading = sides[1].read().lock().await.unwrap();
    wait_for(sides[0].write().lock(), async { drop(reading) }).await;
    let [mine, theirs] = [client, other].map(|client| client.semaphore(&key("permits")));
    mine.try_set_permits(1).await.unwrap();
    let held = theirs.acquire().await.unwrap();
    wait_for(mine.acquire(), async { drop(held) }).await;
    let [mine, theirs] =
        [client, other].map(|client| client.expirable_semaphore(&key("expirable")));
    mine.try_set_permits(1).await.unwrap();
    let held = theirs.acquire().await.unwrap();
    wait_for(mine.acquire(), async { drop(held) }).await;
    let latch = client.count_down_latch(&key("latch"));
    latch.try_set_count(1).await.unwrap();
    let (opened, counted) = tokio::join!(latch.wait().into_future(), async {
        yield_now().await;
        latch.count_down().await
    });
    opened.unwrap();
    counted.unwrap();
    let election = client.election(&key("election"));
    let mut observer = election.observe();
    let leads = other
        .election(&key("election"))
        .campaign("a")
        .await
        .unwrap();
    observer.next().await.unwrap();
    leads.resign().await.unwrap();
    let leads = election.campaign("b").await.unwrap();
    drop((leads, observer));
    let ran = client.once(&key("once"), "today").run(async {}).await;
    assert!(ran.unwrap().is_ok());
    // One becomes a ticket, one is asked for, one is lost, and one is re-entered.
    let lock = client.lock(&key("ticket"));
    let ticket = lock.lock().await.unwrap().into_ticket().await.unwrap();
    let adopted = other.lock(&key("ticket")).adopt(&ticket).await.unwrap();
    adopted.unlock().await.unwrap();
    let lock = client.lock(&key("revoked"));
    let guard = lock.lock().await.unwrap();
    let asked = guard.asked();
    other.lock(&key("revoked")).ask().await.unwrap();
    tokio::time::timeout(60 * SECOND, asked).await.unwrap();
    guard.unlock().await.unwrap();
    let lock = client.lock(&key("lost"));
    let guard = lock.lock().await.unwrap();
    other.lock(&key("lost")).force_unlock().await.unwrap();
    guard.unlock().await.unwrap_err();
    let (lock, me) = (client.lock(&key("owned")), Owner::new());
    let outer = lock.lock().owner(me).await.unwrap();
    let inner = lock.lock().owner(me).await.unwrap();
    drop((outer, inner));
    let both = [key("one"), key("two")].map(|name| client.lock(&name));
    let held = other.lock(&key("two")).lock().await.unwrap();
    let members = MultiLock::new(both.clone());
    let (acquired, ()) = tokio::join!(members.lock().into_future(), async {
        yield_now().await;
        drop(held);
    });
    acquired.unwrap().unlock().await.unwrap();
    let guard = RedLock::new(both).lock().await.unwrap();
    guard.unlock().await.unwrap();
    let [mine, theirs] = [client, other].map(|client| client.group_lock("group", name));
    let held = theirs.lock().await.unwrap();
    wait_for(mine.lock(), async { drop(held) }).await;
}

#[tokio::test(start_paused = true)]
async fn collections_are_as_before_after_many_names() {
    let store = Embedded::new();
    let [client, other] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let session = client.lock("a").session.clone();
    let mut watch = client.watch("*");
    while watch.next().await.unwrap() != Event::Synchronized {}
    let before = sizes(&session, &store);
    for name in 0..NAMES {
        use_name(&client, &other, &name.to_string()).await;
    }
    // Longer than an acquisition whose hold is registered, and than all leases and lingering subscriptions.
    sleep(120 * SECOND).await;
    client.flush().await;
    other.flush().await;
    assert_eq!(sizes(&session, &store), before);
    while let Ok(event) = tokio::time::timeout(SECOND, watch.next()).await {
        event.unwrap();
    }
    let left: Vec<String> = watch.known().map(str::to_owned).collect();
    // Numbers of permits and tokens stay.
    let ends = ["lock:", "fair:", "spin:", "sides:", "latch:", "owned:"];
    let ended = |key: &&String| ends.iter().any(|kind| key.starts_with(kind));
    assert_eq!(left.iter().filter(ended).count(), 0, "{left:?}");
}

/// The values of a group share a channel, which is never idle here. What each of them leaves behind would be visited by each
/// message.
#[tokio::test]
async fn values_of_a_group_leave_nothing_behind() {
    let store = Embedded::new();
    let [client, other] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let group = |client: &Client, value: usize| client.group_lock("group", value.to_string());
    let _held = group(&other, 0).lock().await.unwrap();
    let waiting = tokio::spawn(group(&client, 0).lock().into_future());
    for value in 1..10_000 {
        let held = group(&other, value).lock().await.unwrap();
        wait_for(group(&client, value).lock(), async { drop(held) }).await;
    }
    let session = group(&client, 0).session.clone();
    let objects = session.waiting.sizes();
    assert!(objects.iter().all(|(_, size)| *size < 50), "{objects:?}");
    waiting.abort();
}
