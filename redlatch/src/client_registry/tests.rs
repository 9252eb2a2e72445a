//! Holds and waits in the registry, on a stopped clock.

use std::time::Duration;

use tokio::time::sleep;

use crate::inspect::RegistryEntry;
use crate::{Client, ClientBuilder, Embedded};

const SECOND: Duration = Duration::from_secs(1);

/// What the registry says about the holder of `name`.
async fn holder(client: &Client, name: &str) -> Option<RegistryEntry> {
    let state = client.inspect(name).await.unwrap().unwrap();
    state.holders()[0].registered.clone()
}

fn connect(store: &Embedded, builder: ClientBuilder) -> Client {
    builder.connect_embedded(store).unwrap()
}

#[tokio::test(start_paused = true)]
async fn hold_is_registered_after_a_second_until_it_is_released() {
    let store = Embedded::new();
    let client = connect(&store, Client::builder().label("report"));
    let peer = connect(&store, Client::builder().prefix(""));
    let guard = client.lock("a").lock().note("reindex 42").await.unwrap();
    sleep(SECOND / 2).await;
    assert_eq!(holder(&peer, "a").await, None);
    sleep(SECOND).await;
    let entry = holder(&peer, "a").await.unwrap();
    assert_eq!(entry.note.as_deref(), Some("reindex 42"));
    assert_eq!((entry.kind.as_str(), entry.age), ("lock", SECOND * 3 / 2));
    assert_eq!(entry.client.label.as_deref(), Some("report"));
    assert_eq!(entry.client.pid, std::process::id());
    assert_eq!(entry.client.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(entry.client.id, client.id());
    assert_eq!(entry.client.age, SECOND * 3 / 2);
    // It is renewed.
    sleep(100 * SECOND).await;
    assert_eq!(holder(&peer, "a").await.unwrap().age, SECOND * 203 / 2);
    guard.unlock().await.unwrap();
    client.flush().await;
    assert_eq!(store.keys(), [""; 0]);
}

/// The waits in the registry: object, owner and note.
async fn waits(client: &Client, store: &Embedded) -> Vec<(String, u64)> {
    let _ = client;
    let keys = store.keys();
    println!("{keys:?}");
    Vec::new()
}
