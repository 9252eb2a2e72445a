//! Metrics, with a recorder of the test's own, compared with docs/metrics.md.

use std::collections::{BTreeMap, BTreeSet};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, LocalRecorderGuard,
    Metadata, Recorder, SharedString, Unit,
};
use tokio::task::yield_now;

use crate::common::prelude::*;

/// Recorded values, by name and attributes, as in `a{kind=lock,outcome=acquired}`.
#[derive(Debug, Clone, Default)]
struct Recorded(Arc<Mutex<BTreeMap<String, Vec<f64>>>>);

/// One time series. A gauge and a counter have one value.
struct Series {
    recorded: Recorded,
    key: String,
}

impl Recorded {
    /// Records the metrics of clients that this thread creates, until the second value is dropped.
    fn start() -> (Recorded, LocalRecorderGuard<'static>) {
        let recorded = Recorded::default();
        let recorder = Box::leak(Box::new(recorded.clone()));
        (recorded, metrics::set_default_local_recorder(recorder))
    }

    fn series(&self, key: &Key) -> Arc<Series> {
        let label = |one: &metrics::Label| format!("{}={}", one.key(), one.value());
        let labels: Vec<_> = key.labels().map(label).collect();
        let key = match labels.is_empty() {
            true => key.name().to_owned(),
            false => format!("{}{{{}}}", key.name(), labels.join(",")),
        };
        self.0.lock().unwrap().entry(key.clone()).or_default();
        let recorded = self.clone();
        Arc::new(Series { recorded, key })
    }

    fn values(&self, key: &str) -> Vec<f64> {
        let all = self.0.lock().unwrap();
        let values = all.get(key).cloned();
        values.unwrap_or_else(|| panic!("{key} in {all:#?}"))
    }

    fn count(&self, key: &str) -> usize {
        self.values(key).len()
    }

    /// Returns the value of a counter or gauge.
    fn value(&self, key: &str) -> f64 {
        self.values(key).first().copied().unwrap_or_default()
    }

    /// Returns the number of requests for locks by outcome: acquired, timeout, canceled, error.
    fn requests(&self) -> [usize; 4] {
        ["acquired", "timeout", "canceled", "error"].map(|outcome| {
            let labels = format!("{{kind=lock,outcome={outcome}}}");
            self.count(&format!("redlatch.lock.wait.duration{labels}"))
        })
    }

    /// Returns the number of guards of locks by outcome: released, lost, dropped.
    fn guards(&self) -> [usize; 3] {
        ["released", "lost", "dropped"].map(|outcome| {
            let labels = format!("{{kind=lock,outcome={outcome}}}");
            self.count(&format!("redlatch.lock.hold.duration{labels}"))
        })
    }
}

impl Series {
    fn add(&self, value: f64) {
        let mut all = self.recorded.0.lock().unwrap();
        let values = all.get_mut(&self.key).unwrap();
        *values = vec![values.first().copied().unwrap_or_default() + value];
    }
}

impl CounterFn for Series {
    fn increment(&self, value: u64) {
        self.add(value as f64);
    }

    fn absolute(&self, _: u64) {
        panic!("counters are only incremented");
    }
}

impl GaugeFn for Series {
    fn increment(&self, value: f64) {
        self.add(value);
    }

    fn decrement(&self, value: f64) {
        self.add(-value);
    }

    fn set(&self, _: f64) {
        panic!("several clients share a gauge");
    }
}

impl HistogramFn for Series {
    fn record(&self, value: f64) {
        let mut all = self.recorded.0.lock().unwrap();
        all.get_mut(&self.key).unwrap().push(value);
    }
}

impl Recorder for Recorded {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.series(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.series(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.series(key))
    }
}

#[tokio::test(start_paused = true)]
async fn requests_are_measured_by_outcome() {
    let (recorded, _guard) = Recorded::start();
    let [client, peer] = embedded_clients();
    let lock = client.lock("a");
    let theirs = held(&peer.lock("a")).await;
    assert_eq!(recorded.requests(), [1, 0, 0, 0]);
    let waiting = tokio::spawn(lock.lock().into_future());
    yield_now().await;
    assert_eq!(recorded.value("redlatch.lock.waiting{kind=lock}"), 1.0);
    waiting.abort();
    assert!(waiting.await.is_err());
    assert_eq!(recorded.requests(), [1, 0, 1, 0]);
    assert!(lock.try_lock().wait(2 * SECOND).await.unwrap().is_none());
    assert_eq!(recorded.requests(), [1, 1, 1, 0]);
    let timeout = "redlatch.lock.wait.duration{kind=lock,outcome=timeout}";
    assert_eq!(recorded.values(timeout), [2.0]);
    free(theirs).await;
    assert_matches!(client.lock("").lock().await, Err(Error::InvalidName { .. }));
    assert_eq!(recorded.requests(), [1, 1, 1, 1]);
    assert_eq!(recorded.value("redlatch.lock.waiting{kind=lock}"), 0.0);
}

#[tokio::test(start_paused = true)]
async fn guards_are_measured_by_outcome() {
    let (recorded, _guard) = Recorded::start();
    let client = Client::embedded();
    let lock = client.lock("a");
    let guard = held(&lock).await;
    assert_eq!(recorded.value("redlatch.lock.held{kind=lock}"), 1.0);
    sleep(3 * SECOND).await;
    free(guard).await;
    assert_eq!(recorded.guards(), [1, 0, 0]);
    let released = "redlatch.lock.hold.duration{kind=lock,outcome=released}";
    assert_eq!(recorded.values(released), [3.0]);
    drop(held(&lock).await);
    assert_eq!(recorded.guards(), [1, 0, 1]);
    client.flush().await;
    let guard = lock.lock().lease(SECOND).await.unwrap();
    sleep(2 * SECOND).await;
    assert!(guard.unlock().await.is_err());
    assert_eq!(recorded.guards(), [1, 1, 1]);
    let lost = |reason| recorded.value(&format!("redlatch.lock.lost{{kind=lock,reason={reason}}}"));
    assert_eq!((lost("lease_ended"), lost("not_held")), (1.0, 0.0));
    let guard = held(&lock).await;
    lock.force_unlock().await.unwrap();
    guard.lost().await;
    assert_eq!((lost("lease_ended"), lost("not_held")), (1.0, 1.0));
    drop(guard);
    let limited = lock.lock().at_most(2 * SECOND).fed_every(SECOND);
    let guard = limited.await.unwrap();
    sleep(SECOND / 2).await;
    guard.feed().unwrap();
    guard.lost().await;
    drop(guard);
    client.flush().await;
    lock.lock().at_most(SECOND).await.unwrap().lost().await;
    assert_eq!((lost("held_too_long"), lost("not_fed")), (1.0, 1.0));
    assert_eq!(recorded.value("redlatch.lock.held{kind=lock}"), 0.0);
}

#[tokio::test(start_paused = true)]
async fn renewals_are_measured() {
    let (recorded, _guard) = Recorded::start();
    let client = Client::embedded();
    let guard = held(&client.lock("a")).await;
    sleep(35 * SECOND).await;
    free(guard).await;
    assert_eq!(recorded.count("redlatch.renewal.duration"), 3);
    assert_eq!(recorded.values("redlatch.renewal.margin"), [20.0; 3]);
    assert_eq!(recorded.value("redlatch.renewal.failures"), 0.0);
}

/// A lock passes on three times. Then another client is woken.
#[tokio::test(start_paused = true)]
async fn hand_overs_and_wake_ups_are_measured() {
    let (recorded, _guard) = Recorded::start();
    let [client, peer] = embedded_clients();
    let lock = client.lock("a");
    let guard = held(&lock).await;
    let tasks = [(); 3].map(|()| tokio::spawn(lock.lock().run(async {})));
    yield_now().await;
    free(guard).await;
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(recorded.values("redlatch.hand_over.turns"), [3.0]);
    assert_eq!(recorded.count("redlatch.wake.latency"), 0);
    let guard = held(&lock).await;
    let theirs = tokio::spawn(peer.lock("a").lock().run(async {}));
    yield_now().await;
    free(guard).await;
    theirs.await.unwrap().unwrap();
    assert_eq!(recorded.count("redlatch.wake.latency"), 1);
    // Requests and guards of the client and of the other one.
    assert_eq!((recorded.requests()[0], recorded.guards()[0]), (6, 6));
}

#[tokio::test(start_paused = true)]
async fn metrics_have_kind_and_chosen_names() {
    let (recorded, _guard) = Recorded::start();
    let store = Embedded::new();
    let client = Client::builder()
        .metrics_name(|name| name.strip_suffix(":42"))
        .connect_embedded(&store)
        .unwrap();
    let semaphore = client.semaphore("s");
    semaphore.try_set_permits(2).await.unwrap();
    let permits = semaphore.acquire().await.unwrap();
    let held = |attributes| recorded.value(&format!("redlatch.lock.held{{{attributes}}}"));
    assert_eq!(held("kind=semaphore"), 1.0);
    permits.release().await.unwrap();
    assert_eq!(held("kind=semaphore"), 0.0);
    let expirable = client.expirable_semaphore("e");
    expirable.try_set_permits(2).await.unwrap();
    let _permit = expirable.acquire().await.unwrap();
    let _fair = client.fair_lock("orders:42").lock().await.unwrap();
    let _spin = client.spin_lock("spin").lock().await.unwrap();
    let _value = client.group_lock("group", "a").lock().await.unwrap();
    let _fenced = client.fenced_lock("fenced").lock().await.unwrap();
    let both = client.read_write_lock("rw");
    let owner = Owner::new();
    let _writer = both.write().lock().owner(owner).await.unwrap();
    let _reader = both.read().lock().owner(owner).await.unwrap();
    let multi = MultiLock::new([client.lock("x"), client.lock("y")]);
    let _multi = multi.lock().await.unwrap();
    for (attributes, guards) in [
        ("kind=expirable_semaphore", 1.0),
        ("kind=fair_lock,name=orders", 1.0),
        ("kind=fenced_lock", 1.0),
        ("kind=spin_lock", 1.0),
        ("kind=group_lock", 1.0),
        ("kind=write_lock", 1.0),
        ("kind=read_lock", 1.0),
        // The members of the multi-lock.
        ("kind=lock", 2.0),
    ] {
        assert_eq!(held(attributes), guards, "{attributes}");
    }
    let waited = "redlatch.lock.wait.duration{kind=multi_lock,outcome=acquired}";
    assert_eq!(recorded.count(waited), 1);
}

#[tokio::test]
async fn connections_and_batches_are_measured() {
    let (recorded, _guard) = Recorded::start();
    let (server, client) = server_and_client().await;
    let guard = held(&client.lock("a")).await;
    let waiting = tokio::spawn(client.lock("a").lock().owner(Owner::new()).into_future());
    let subscriptions = || recorded.value("redlatch.client.subscriptions");
    until("the waiter has subscribed", async || subscriptions() == 1.0).await;
    let _: String = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    let again = async || recorded.value("redlatch.client.reconnects") > 0.0;
    until("the client has connected again", again).await;
    free(guard).await;
    free(joined("woken", waiting).await).await;
    until("it has ended", async || subscriptions() == 0.0).await;
    let requests = (0..200).map(|n| {
        let lock = client.lock(&format!("lock {n}"));
        tokio::spawn(async move { lock.lock().await?.unlock().await })
    });
    joined_all("acquired", requests.collect::<Vec<_>>()).await;
    let sizes = recorded.values("redlatch.batch.size");
    assert!(!sizes.is_empty());
    assert!(
        sizes.iter().all(|size| (1.0..=16.0).contains(size)),
        "{sizes:?}"
    );
}

#[tokio::test]
async fn refused_reports_of_changes_are_counted() {
    let (recorded, _guard) = Recorded::start();
    let server = Server::start();
    let _: String = server.command(&["ACL", "SETUSER", "default", "-client|tracking"]);
    let client = Client::connect(&server.url()).await.unwrap();
    let guard = held(&client.lock("a")).await;
    let refused = async || recorded.value("redlatch.client.tracking_refusals") == 1.0;
    until("the server refuses", refused).await;
    free(guard).await;
}

#[tokio::test(start_paused = true)]
async fn documented_metrics_exist() {
    let (recorded, _guard) = Recorded::start();
    free(held(&Client::embedded().lock("a")).await).await;
    let all = recorded.0.lock().unwrap();
    let registered: BTreeSet<&str> = all
        .keys()
        .map(|key| key.split('{').next().unwrap())
        .collect();
    let documented: BTreeSet<&str> = include_str!("../../../../docs/metrics.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `redlatch.").map(|_| &line[3..]))
        .filter_map(|row| row.split('`').next())
        .collect();
    assert_eq!(registered, documented);
}

#[test]
fn dashboard_shows_documented_metrics() {
    let documented = include_str!("../../../../docs/metrics.md").replace('.', "_");
    let dashboard = include_str!("../../../../docs/grafana-dashboard.json");
    let words = dashboard.split(|c: char| !c.is_ascii_lowercase() && c != '_');
    let names: BTreeSet<&str> = words.filter(|word| word.starts_with("redlatch_")).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        let family = ["_bucket", "_count", "_sum"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(name);
        assert!(documented.contains(&format!("`{family}`")), "{name}");
    }
}
