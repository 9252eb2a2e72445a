//! Clients of a store that is down: when they are created, and later.

use redlatch::inspect::Event;

use crate::common::prelude::*;

/// A service that starts before its store is not restarted again and again.
#[tokio::test]
async fn client_works_as_soon_as_its_store_does() {
    let mut server = Server::start_durable();
    server.kill();
    let settings = Client::builder().response_timeout(Duration::from_millis(200));
    let eager = settings.clone().connect(&server.url()).await;
    assert_matches!(eager, Err(Error::Unavailable { .. }));
    let client = settings.connect_lazy(&server.url()).unwrap();
    let lock = client.lock(&unique("lazy"));
    for error in [
        lock.try_lock().await.map(drop).unwrap_err(),
        client.ping().await.map(drop).unwrap_err(),
    ] {
        assert!(error.is_transient(), "{error}");
    }
    assert!(!client.status().connected);
    let settings = long_timeout();
    let patient = settings.connect_lazy(&server.url()).unwrap();
    let waiting = patient.clone();
    let waiting = tokio::spawn(async move { waiting.lock(&unique("lazy")).lock().await });
    server.restart();
    free(joined("held", waiting).await).await;
    patient.ping().await.unwrap();
    assert!(patient.status().connected);
    server.kill();
    until("disconnected", async || !patient.status().connected).await;
}

/// What `connect` refuses at once, the first step refuses.
#[tokio::test]
async fn first_step_reports_what_the_servers_refuse() {
    let lazy = |url: &str| {
        let settings = long_timeout();
        settings.connect_lazy(url).unwrap()
    };
    let refused = async |url: &str| {
        let client = lazy(url);
        let lock = client.lock(&unique("refused"));
        let error = within_limit("refused", async { lock.try_lock().await }).await;
        error.unwrap_err()
    };
    let server = Server::start_with(&["--requirepass", "s3cret"]);
    let place = format!("127.0.0.1:{}", server.port());
    for form in ["redis", "redis+cluster"] {
        let error = refused(&format!("{form}://:wrong@{place}")).await;
        let is_login = matches!(error, Error::AuthenticationFailed { .. });
        assert!(is_login, "{form}: {error}");
    }
    // A refusal of the handshake is no answer.
    let without_database = lazy(&format!("redis://:s3cret@{place}/99"));
    let error = without_database.ping().await.unwrap_err();
    assert!(error.to_string().contains("99"), "{error}");
    let node_with_password = lazy(&format!("redis+cluster://:wrong@{place}"));
    for error in [
        node_with_password.ping().await.map(drop).unwrap_err(),
        node_with_password
            .list("*")
            .next()
            .await
            .map(drop)
            .unwrap_err(),
    ] {
        let is_login = matches!(error, Error::AuthenticationFailed { .. });
        assert!(is_login, "{error}");
    }
    let not_a_node = shared().url().replace("redis://", "redis+cluster://");
    let error = refused(&not_a_node).await;
    assert!(error.to_string().contains("not in a cluster"), "{error}");
    let cluster = Cluster::start_with(ClusterPlan {
        masters: 1,
        replicas: 0,
        ..ClusterPlan::default()
    });
    let node = &cluster.nodes()[0];
    let error = refused(&format!("redis://{}:{}", node.address(), node.port())).await;
    assert!(error.to_string().contains("redis+cluster://"), "{error}");
    // What is wrong without any server is an error at once.
    let settings = Client::builder();
    let error = settings.connect_lazy("redis://h/3?db=4").unwrap_err();
    assert_matches!(error, Error::InvalidUrl { .. });
}

#[tokio::test]
async fn each_deployment_is_connected_to_when_needed() {
    let (sentinels, cluster) = (Sentinels::start(), Cluster::start());
    for url in [sentinels.url(), cluster.url(), "embedded:".into()] {
        let settings = long_timeout();
        let client = settings.connect_lazy(&url).unwrap();
        free(held(&client.lock(&unique("lazy"))).await).await;
    }
}

#[test]
fn client_needs_a_runtime() {
    let error = Client::builder().connect_lazy("redis://h").unwrap_err();
    assert_matches!(error, Error::NoRuntime);
}

/// How a program behaves in an outage can be tested without a server.
#[tokio::test(start_paused = true)]
async fn embedded_store_can_be_unavailable() {
    let store = Embedded::new();
    let [holder, other] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let guard = held(&holder.lock("a")).await;
    let waiting = tokio::spawn({
        let lock = other.lock("a");
        async move { lock.lock().await }
    });
    until_subscribed(&other, 1).await;
    let mut watch = other.watch("*");
    while watch.next().await.unwrap() != Event::Synchronized {}
    store.set_available(false);
    for error in [
        other.lock("b").try_lock().await.map(drop).unwrap_err(),
        other.lock("a").force_unlock().await.map(drop).unwrap_err(),
        other.list("*").next().await.map(drop).unwrap_err(),
        other.ping().await.map(drop).unwrap_err(),
    ] {
        assert_matches!(error, Error::Unavailable { .. });
    }
    assert!(!other.status().connected);
    let event = done("interrupted", watch.next()).await;
    assert_matches!(event, Event::Interrupted { .. });
    // Once, not again and again.
    let quiet = tokio::time::timeout(Duration::from_secs(5), watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    within_limit("lost", guard.lost()).await;
    store.set_available(true);
    assert!(other.status().connected);
    other.ping().await.unwrap();
    while done("synchronized", watch.next()).await != Event::Synchronized {}
    assert_matches!(done("told", waiting).await, Err(Error::Unavailable { .. }));
    other.lock("a").run(async {}).await.unwrap();
}
