//! TLS with sentinels and on a cluster, where all servers speak only TLS: certificates with host
//! names instead of addresses, and the errors for wrong configurations. Failovers over TLS are
//! tested in `sentinel.rs` and `cluster.rs`, everything else, with client certificates, in
//! `acl.rs`.

use std::time::Instant;

use redlatch_testkit::{Ca, CertSpec, LOOPBACK, TlsPlan, TlsServer};

use super::sentinel_or_cluster::NEVER;
use crate::common::prelude::*;

fn trusting(ca: &Ca) -> ClientBuilder {
    let ours = ca.client();
    let settings = long_timeout().connect_timeout(LONG).tls_ca(ca.pem());
    settings.tls_client_cert(ours.cert, ours.key)
}

/// Certificates that are valid for no address.
fn by_name() -> CertSpec<'static> {
    CertSpec {
        names: &["localhost"],
        ..LOOPBACK
    }
}

fn distrusting() -> ClientBuilder {
    trusting(&Ca::new())
}

/// Asserts that connecting fails with an error that contains all of this text. Retries if a
/// sentinel on a busy machine did not answer within its second.
async fn refused(settings: ClientBuilder, url: &str, says: &[&str]) -> Error {
    let begun = Instant::now();
    loop {
        let connecting = settings.clone().connect(url);
        let error = within_limit("refused", connecting).await.unwrap_err();
        let said = error.to_string();
        if says.iter().all(|it| said.contains(it)) {
            return error;
        }
        let late = error.is_transient() && begun.elapsed() < LONG;
        assert!(late, "{url}: {said} does not say {says:?}");
    }
}

async fn not_secure(settings: ClientBuilder, url: &str, says: &[&str]) {
    assert_matches!(refused(settings, url, says).await, Error::TlsFailed { .. });
}

/// Using the wrong protocol on a port, plain or TLS, is always reported, whether the server answers
/// or waits for more data.
async fn the_wrong_kind_of_port(secure: &str, port: u16) {
    let in_the_open = secure.replacen("rediss+", "redis+", 1);
    refused(Client::builder(), &in_the_open, &["use rediss://"]).await;
    let plain = format!("127.0.0.1:{}", shared().port());
    let secure = secure.replace(&format!("127.0.0.1:{port}"), &plain);
    for _ in 0..3 {
        let settings = Client::builder().connect_timeout(Duration::from_secs(1));
        let error = within_limit("refused", settings.connect(&secure)).await;
        let said = error.unwrap_err().to_string();
        assert!(said.contains("speak TLS on this port"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinel_tls_errors_are_reported_and_host_names_work() {
    let all = Sentinels::start_with(SentinelPlan {
        replicas: 0,
        sentinels: 1,
        quorum: 1,
        sentinel_lines: &[
            "sentinel resolve-hostnames yes",
            "sentinel announce-hostnames yes",
        ],
        tls: Some(TlsPlan {
            auth_clients: "yes",
            ..TlsPlan::default()
        }),
        ..SentinelPlan::default()
    });
    let (ca, url) = (all.ca().unwrap(), all.url());
    let other_scheme = url.replacen("rediss+", "valkeys+", 1);
    retry_transient(|| trusting(ca).connect(&other_scheme)).await;

    let sentinel = &all.sentinels()[0];
    let at_sentinel = format!("127.0.0.1:{}: ", sentinel.port());
    not_secure(distrusting(), &url, &[&at_sentinel, "tls_ca"]).await;
    let nameless = Client::builder().tls_ca(ca.pem());
    refused(nameless, &url, &[&at_sentinel, "tls_client_cert"]).await;

    // The sentinels are trusted, but the masters that they report are not, or do not speak TLS.
    let other = TlsServer::start_for(by_name(), "no", &[]);
    let (secure, plain) = (other.port(), other.plain().port());
    let monitored = |master: &str, host: &str, port: u16| {
        let port = port.to_string();
        let () = sentinel.command(&["SENTINEL", "MONITOR", master, host, &port, "1"]);
        url.replace("mymaster", master)
    };
    let stranger = monitored("stranger", "127.0.0.1", secure);
    let at_master = format!("127.0.0.1:{secure}: ");
    not_secure(trusting(ca), &stranger, &[&at_master, "tls_ca"]).await;
    let in_the_open = monitored("in-the-open", "127.0.0.1", plain);
    let settings = trusting(ca).connect_timeout(Duration::from_secs(3));
    refused(settings, &in_the_open, &["speak TLS on this port"]).await;

    // A master with a host name in its certificate, from another CA, that sentinels report by that
    // name.
    let named = monitored("named", "localhost", secure);
    let both = || trusting(ca).tls_ca(format!("{}{}", ca.pem(), other.ca().pem()));
    retry_transient(|| both().connect(&named)).await;
    not_secure(both(), &stranger, &[&at_master, "not for 127.0.0.1"]).await;

    the_wrong_kind_of_port(&url, sentinel.port()).await;
}

/// Nodes whose certificates contain host names, and which announce these names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_with_host_names_works() {
    let all = Cluster::start_with(ClusterPlan {
        replicas: 0,
        args: &[
            "--cluster-announce-hostname",
            "localhost",
            "--cluster-preferred-endpoint-type",
            "hostname",
        ],
        tls: Some(TlsPlan {
            certificate: by_name(),
            auth_clients: "yes",
        }),
        node_timeout_millis: NEVER,
        ..ClusterPlan::default()
    });
    let ca = all.ca().unwrap();
    let url = all.url().replace("127.0.0.1", "localhost");
    let holder = trusting(ca).connect(&url).await.unwrap();
    let other_scheme = url.replacen("rediss+", "valkeys+", 1);
    let waiter = trusting(ca).connect(&other_scheme).await.unwrap();
    // Each node owns some of the names. Their slots move, and both kinds of redirect name the
    // target.
    for n in 0..6 {
        let name = unique(&format!("named-{n}"));
        let guard = retry_transient(|| holder.lock(&name).lock().lease(10 * LONG)).await;
        let waiting = waiter_of(&waiter, waiter.lock(&name).lock()).await;
        let to = (all.master_of_key(&name) + 1) % 3;
        all.move_slot(all.slot_of(&name), to);
        free(guard).await;
        let woken = done("woken, not slept through", waiting).await;
        free(woken.unwrap()).await;
        until_subscribed(&waiter, 0).await;
    }
    // The certificates are not valid for the nodes' addresses.
    let words = ["not for 127.0.0.1", "localhost"];
    not_secure(trusting(ca), &all.url(), &words).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_tls_errors_are_reported() {
    let all = Cluster::start_with(ClusterPlan {
        replicas: 0,
        tls: Some(TlsPlan::default()),
        node_timeout_millis: NEVER,
        ..ClusterPlan::default()
    });
    let (ca, url) = (all.ca().unwrap(), all.url());
    not_secure(distrusting(), &url, &["127.0.0.1:", "tls_ca"]).await;
    // An additional node that is down does not hide it.
    let one_down = format!("{url},127.0.0.1:1");
    not_secure(distrusting(), &one_down, &["tls_ca"]).await;

    // A node that does not answer, such as one that the others announce with a plain port.
    let mut names = (0..).map(|n| format!("elsewhere-{n}"));
    let name = names.find(|name| all.master_of_key(name) == 1).unwrap();
    let first = format!("rediss+cluster://127.0.0.1:{}", all.nodes()[0].port());
    let settings = trusting(ca).response_timeout(Duration::from_secs(1));
    let client = settings.connect(&first).await.unwrap();
    let lock = client.lock(&name);
    all.freeze(1);
    let error = lock.is_locked().await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    assert!(error.to_string().contains("speak TLS"), "{error}");
    all.thaw(1);
    retry_transient(|| lock.is_locked()).await;

    the_wrong_kind_of_port(&first, all.nodes()[0].port()).await;
}
