//! More commands are in flight on one connection than the buffers on its way hold: those of the client, the sockets
//! and the server.

use std::collections::BTreeSet;

use tokio::task::JoinSet;

use crate::common::prelude::*;

/// Acquisitions that are canceled in each round.
const ACQUISITIONS: u64 = 400;

/// Other commands that are sent in each round, at once.
const COMMANDS: u64 = 4000;

const ROUNDS: usize = 6;

/// Cancels acquisitions at random times, while `load` sends thousands of commands on the same connection. Then the
/// store must hold exactly what guards hold.
async fn cancel_beside(load: impl AsyncFn(&Client) -> JoinSet<()>) {
    let mut random = Random(seed());
    let (server, client) = server_and_client().await;
    for round in 0..ROUNDS {
        let mut others = load(&client).await;
        let mut acquisitions = JoinSet::new();
        for n in 0..ACQUISITIONS {
            let lock = client.lock(&format!("canceled:{n}"));
            let limit = random.millis(1, 60);
            acquisitions.spawn(async move { timeout(limit, lock.lock().into_future()).await });
        }
        let mut guards: Vec<Guard> = Vec::new();
        while let Some(ended) = within_limit("the limit", acquisitions.join_next()).await {
            guards.extend(ended.unwrap().ok().map(Result::unwrap));
        }
        while let Some(ended) = within_limit("an answer", others.join_next()).await {
            ended.unwrap();
        }
        within_limit("all are settled", client.flush()).await;
        let held: BTreeSet<String> = server.command(&["KEYS", "canceled:*"]);
        let guarded: BTreeSet<String> = guards.iter().map(|guard| guard.name().into()).collect();
        assert_eq!(held, guarded, "round {round}");
        free_all(guards).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn acquisitions_canceled_beside_releases_leave_nothing_held() {
    cancel_beside(async |client| {
        let mut acquiring = JoinSet::new();
        for n in 0..COMMANDS {
            let lock = client.read_write_lock(&format!("released:{n}")).write();
            acquiring.spawn(async move { lock.lock().lease(10 * LONG).await });
        }
        let mut releasing = JoinSet::new();
        for guard in acquiring.join_all().await {
            releasing.spawn(async move { free(guard.unwrap()).await });
        }
        releasing
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn acquisitions_canceled_beside_inspections_leave_nothing_held() {
    cancel_beside(async |client| {
        let mut inspecting = JoinSet::new();
        for n in 0..COMMANDS {
            let lock = client.lock(&format!("inspected:{n}"));
            inspecting.spawn(async move { assert!(!lock.is_locked().await.unwrap()) });
        }
        inspecting
    })
    .await;
}

/// Callers that ask again and again fill neither the memory of the client nor the buffers of a server that does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn unanswered_inspections_are_limited() {
    let server = Server::start();
    let proxy = Proxy::to_server(&server);
    // Unbatched, each inspection is one call.
    let builder = Client::builder().batching(false);
    let builder = builder.response_timeout(Duration::from_millis(300));
    let client = builder.connect(&proxy.url()).await.unwrap();
    let lock = client.lock("a");
    assert!(!lock.is_locked().await.unwrap());
    let before = server.calls("evalsha:");
    proxy.discard_replies(true);
    for _ in 0..3 {
        let mut asking = JoinSet::new();
        for _ in 0..COMMANDS {
            let lock = lock.clone();
            asking.spawn(async move { lock.is_locked().await });
        }
        while let Some(answer) = within_limit("the timeout", asking.join_next()).await {
            assert!(answer.unwrap().is_err());
        }
    }
    proxy.discard_replies(false);
    proxy.cut();
    let is_locked = async || loop {
        match lock.is_locked().await {
            Ok(is_locked) => return is_locked,
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    };
    assert!(!within_limit("room after the end of the connection", is_locked()).await);
    // 2,048 without an answer, besides those of the registry of clients and the ones that were answered.
    let calls = server.calls("evalsha:") - before;
    assert!((1000..2200).contains(&calls), "{calls}");
}
