//! Tests of TLS and credentials, and of the errors for wrong configurations.

use std::error::Error as _;
use std::time::Instant;

use redlatch_testkit::{Ca, CertSpec, LOOPBACK, TlsServer};

use crate::common::prelude::*;

fn trusting(server: &TlsServer) -> ClientBuilder {
    let settings = long_timeout();
    settings.tls_ca(server.ca().pem())
}

async fn refused(settings: ClientBuilder, url: &str) -> Error {
    let connecting = settings.connect_timeout(LONG).connect(url);
    within_limit("refused", connecting).await.unwrap_err()
}

#[track_caller]
fn assert_tls(error: &Error, says: &str) {
    let said = error.to_string();
    assert!(matches!(error, Error::TlsFailed { .. }), "{said}");
    assert!(error.source().is_some(), "{said}");
    assert!(said.contains(says), "{said}");
}

/// Checks that two clients can wait for each other, also after the connection broke.
async fn works(settings: ClientBuilder, server: &TlsServer) {
    let one = settings.clone().connect(&server.url()).await.unwrap();
    let other = settings.connect(&server.url()).await.unwrap();
    let name = unique("tls");
    for _ in 0..2 {
        let guard = held(&one.lock(&name)).await;
        let lock = other.lock(&name);
        let waiting = tokio::spawn(async move { lock.lock().await?.unlock().await });
        until_subscribed(&other, 1).await;
        free(guard).await;
        joined("its turn", waiting).await;
        server.plain().cut_all();
    }
}

#[tokio::test]
async fn custom_ca_is_sufficient() {
    let server = TlsServer::start("no", &[]);
    works(trusting(&server), &server).await;
    let by_name = server.url().replace("127.0.0.1", "localhost");
    trusting(&server).connect(&by_name).await.unwrap();
    let other_scheme = server.url().replace("rediss", "valkeys");
    trusting(&server).connect(&other_scheme).await.unwrap();
}

#[tokio::test]
async fn client_certificates_are_presented() {
    let server = TlsServer::start("yes", &[]);
    let ours = server.ca().client();
    let settings = trusting(&server).tls_client_cert(ours.cert, ours.key);
    works(settings, &server).await;
}

#[tokio::test]
async fn missing_or_foreign_client_certificate_is_reported() {
    let server = TlsServer::start("yes", &[]);
    for _ in 0..10 {
        let error = refused(trusting(&server), &server.url()).await;
        let said = error.to_string();
        assert!(said.contains("client certificate"), "{said}");
        assert!(said.contains("tls_client_cert"), "{said}");
    }
    let foreign = Ca::new().client();
    let settings = trusting(&server).tls_client_cert(foreign.cert, foreign.key);
    let said = refused(settings, &server.url()).await.to_string();
    assert!(said.contains("rejected the client certificate"), "{said}");
}

#[tokio::test]
async fn server_with_unknown_ca_is_rejected() {
    let server = TlsServer::start("no", &[]);
    let settings = Client::builder().tls_ca(Ca::new().pem());
    let error = refused(settings, &server.url()).await;
    assert_tls(&error, "not issued by a trusted CA");
    assert!(error.to_string().contains("tls_ca"));
    // The system does not trust the test's CA either.
    let error = refused(Client::builder(), &server.url()).await;
    assert!(error.to_string().contains("tls_ca"), "{error}");
    assert!(!error.is_transient());
}

#[tokio::test]
async fn server_certificate_for_another_host_is_rejected() {
    let names = &["db.example"];
    let server = TlsServer::start_for(CertSpec { names, ..LOOPBACK }, "no", &[]);
    let error = refused(trusting(&server), &server.url()).await;
    assert_tls(&error, "not for 127.0.0.1, but for");
    assert_tls(&error, "db.example");
    assert_tls(&error, "tls_server_name");
    let named = trusting(&server).tls_server_name("db.example");
    works(named, &server).await;
    let settings = trusting(&server).tls_server_name("another.example");
    let error = refused(settings, &server.url()).await;
    assert_tls(&error, "not for another.example");
    let error = refused(trusting(&server).tls_server_name("no name"), &server.url()).await;
    assert!(error.to_string().contains("tls_server_name"), "{error}");
    let settings = Client::builder().tls_server_name("db.example");
    let error = refused(settings, "redis://127.0.0.1:1").await;
    assert!(error.to_string().contains("tls_server_name"), "{error}");
    // The name counts, not where the connection leads.
    let by_name = server.url().replace("127.0.0.1", "db.example");
    let mapped = trusting(&server)
        .map_address(|host, port| (host == "db.example").then(|| ("127.0.0.1".into(), port)));
    mapped.connect(&by_name).await.unwrap();
    let names: &[&str] = &[];
    let nameless = CertSpec { names, ..LOOPBACK };
    let nameless = TlsServer::start_for(nameless, "no", &[]);
    let error = refused(trusting(&nameless), &nameless.url()).await;
    assert_tls(&error, "no subjectAltName");
}

#[tokio::test]
async fn expired_server_certificate_is_rejected() {
    let expired = CertSpec {
        expired: true,
        ..LOOPBACK
    };
    let server = TlsServer::start_for(expired, "no", &[]);
    let error = refused(trusting(&server), &server.url()).await;
    assert_tls(&error, "has expired");
}

#[tokio::test]
async fn wrong_kind_of_port_is_reported_and_does_not_hang() {
    let server = TlsServer::start("no", &[]);
    let plain_to_tls = format!("redis://127.0.0.1:{}", server.port());
    let error = refused(Client::builder(), &plain_to_tls).await;
    assert_matches!(error, Error::Unavailable { .. });
    assert!(error.to_string().contains("rediss://"), "{error}");

    // A TLS handshake looks to a plain server like a long command, so the client waits until the
    // connect timeout. If the handshake contains a line break, the server rejects it immediately.
    let tls_to_plain = server.plain().url().replace("redis:", "rediss:");
    let connect_timeout = Duration::from_secs(1);
    for _ in 0..5 {
        let begun = Instant::now();
        let settings = trusting(&server).connect_timeout(connect_timeout);
        let error = settings.connect(&tls_to_plain).await.unwrap_err();
        assert!(error.to_string().contains("speak TLS"), "{error}");
        assert!(begun.elapsed() < LONG / 2);
    }
}

#[tokio::test]
async fn certificate_files_are_read_for_every_connection() {
    let server = TlsServer::start("yes", &[]);
    let scratch = std::env::temp_dir().join(unique("redlatch-tls"));
    std::fs::create_dir(&scratch).unwrap();
    let [ca, cert, key] = ["ca", "cert", "key"].map(|name| scratch.join(name));
    let ours = server.ca().client();
    std::fs::write(&ca, server.ca().pem()).unwrap();
    std::fs::write(&cert, &ours.cert).unwrap();
    std::fs::write(&key, &ours.key).unwrap();
    let settings = Client::builder().tls_ca_file(&ca);
    let settings = settings.tls_client_cert_files(&cert, &key);
    let client = settings.clone().connect(&server.url()).await.unwrap();
    let lock = client.lock("files");
    retry_if_late(|| lock.is_locked()).await;

    // Missing for a moment: the previous content is used for a connection.
    std::fs::remove_file(&key).unwrap();
    server.plain().cut_all();
    retry_if_late(|| lock.is_locked()).await;
    let error = refused(settings, &server.url()).await;
    assert_matches!(error, Error::InvalidSetting { .. });
    assert!(error.to_string().contains(key.to_str().unwrap()), "{error}");

    // A different certificate, which the server does not accept.
    let foreign = Ca::new().client();
    std::fs::write(&cert, &foreign.cert).unwrap();
    std::fs::write(&key, &foreign.key).unwrap();
    server.plain().cut_all();
    let answer = within_limit("refused", lock.is_locked()).await;
    let said = answer.unwrap_err().to_string();
    assert!(said.contains("client certificate"), "{said}");

    // The accepted one again.
    std::fs::write(&cert, &ours.cert).unwrap();
    std::fs::write(&key, &ours.key).unwrap();
    retry_if_late(|| lock.is_locked()).await;
    std::fs::remove_dir_all(&scratch).unwrap();
}

/// The CAs of the system are replaced while a program runs: its next connection trusts the new
/// ones. (In a separate process, which treats a file as the system's CAs.)
#[test]
fn system_certificates_are_read_again() {
    const NAME: &str = "topologies::tls::system_certificates_are_read_again";
    const VARIABLE: &str = "SSL_CERT_FILE";
    const CHILD: &str = "REDLATCH_TEST_OWN_ROOTS";
    if std::env::var_os(CHILD).is_none() {
        let scratch = std::env::temp_dir().join(unique("redlatch-roots"));
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args([NAME, "--exact", "--nocapture"]);
        child.env(CHILD, "1").env(VARIABLE, &scratch);
        let output = child.env_remove("SSL_CERT_DIR").output().unwrap();
        let _ = std::fs::remove_file(&scratch);
        let said = String::from_utf8_lossy(&output.stdout);
        let wrong = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}{wrong}");
        assert!(said.contains("1 passed"), "{said}{wrong}");
        return;
    }
    let roots = std::env::var_os(VARIABLE).unwrap();
    let server = TlsServer::start("no", &[]);
    std::fs::write(&roots, server.ca().pem()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let settings = long_timeout();
        let client = settings.clone().connect(&server.url()).await.unwrap();
        let lock = client.lock("roots");
        assert!(!lock.is_locked().await.unwrap());

        // The server has a certificate of another CA, which the system now trusts instead.
        let other = Ca::new();
        let identity = other.server(LOOPBACK);
        let scratch = std::env::temp_dir().join(unique("redlatch-tls"));
        std::fs::create_dir(&scratch).unwrap();
        let [cert, key] = ["cert", "key"].map(|name| scratch.join(name));
        std::fs::write(&cert, &identity.cert).unwrap();
        std::fs::write(&key, &identity.key).unwrap();
        let [cert, key] = [cert, key].map(|path| path.to_str().unwrap().to_owned());
        let files = ["tls-cert-file", &cert, "tls-key-file", &key];
        let change = [&["CONFIG", "SET"], &files[..]].concat();
        let () = server.plain().command(&change);
        server.plain().cut_all();
        // Not yet: the old CA is still trusted.
        assert_tls(
            &within_limit("refused", lock.is_locked()).await.unwrap_err(),
            "not issued by a trusted CA",
        );
        std::fs::write(&roots, other.pem()).unwrap();
        let trusted = async || matches!(lock.is_locked().await, Ok(false));
        until("trusted", trusted).await;
        settings.connect(&server.url()).await.unwrap();
        std::fs::remove_dir_all(&scratch).unwrap();
    });
}

#[tokio::test]
async fn unusable_settings_are_reported() {
    let ca = Ca::new();
    let ours = ca.client();
    let secret = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
    let secure = "rediss://127.0.0.1:1";
    let builder = Client::builder;
    let (plain, socket) = ("redis://127.0.0.1:1", "redis+unix:///no/such/socket");
    let no_file = "/no/such/file";
    let with_key = |key: &str| builder().tls_client_cert(&*ours.cert, key);
    let foreign_key = ca.client().key;
    for (settings, url, says) in [
        (builder().tls_ca("nothing"), secure, "no certificate in PEM"),
        (builder().tls_ca(""), secure, "no certificate in PEM"),
        (builder().tls_ca_file(no_file), secure, no_file),
        (with_key("nothing"), secure, "private key"),
        (with_key(secret), secure, "tls_client_cert"),
        (with_key(&foreign_key), secure, "tls_client_cert"),
        // TLS settings with a plain URL are rejected, so that no data is sent unencrypted.
        (builder().tls_ca(ca.pem()), plain, "rediss"),
        (with_key(&ours.key), socket, "rediss"),
        (builder().username("me"), plain, "without a password"),
    ] {
        let error = refused(settings.clone(), url).await;
        let said = error.to_string();
        assert!(matches!(error, Error::InvalidSetting { .. }), "{said}");
        assert!(said.contains(says), "{said}");
        assert!(!format!("{said}{settings:?}").contains("c2Vjcm"), "{said}");
    }
    for url in ["rediss://h/#insecure", "rediss+unix:///socket"] {
        assert_matches!(refused(builder(), url).await, Error::InvalidUrl { .. });
    }
}

#[tokio::test]
async fn builder_credentials_override_url_credentials() {
    let server = Server::start_with(&["--requirepass", "right"]);
    let () = server.command(&["ACL", "SETUSER", "me", "on", ">mine", "+@all", "~*", "&*"]);
    let at = format!("127.0.0.1:{}", server.port());
    let builder = || long_timeout();
    for (settings, url) in [
        (builder().password("right"), format!("redis://{at}")),
        (builder().password("right"), format!("redis://:s3cret@{at}")),
        (
            builder().username("me").password("mine"),
            format!("redis://you:s3cret@{at}"),
        ),
        (builder().username("me"), format!("redis://:mine@{at}")),
        (builder().password("mine"), format!("redis://me@{at}")),
    ] {
        let client = settings.connect(&url).await.unwrap();
        client.lock(&unique("login")).is_locked().await.unwrap();
    }
    for settings in [
        builder().password("s3cret"),
        builder().username("me").password("s3cret"),
        builder().username("nobody").password("s3cret"),
    ] {
        assert!(!format!("{settings:?}").contains("s3cret"));
        let error = refused(settings, &format!("redis://{at}")).await;
        assert_matches!(error, Error::AuthenticationFailed { .. });
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
    }
}
