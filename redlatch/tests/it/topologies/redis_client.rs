//! The settings of a client of the crate `redis`: [`redlatch::Client::from_redis`].

use redis::{ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates};
use redlatch_testkit::{TempDir, TlsServer};

use crate::common::prelude::*;

/// Needs encoding in a URL.
const PASSWORD: &str = "pä:ss/@?#%&word";

fn redis_client(addr: ConnectionAddr, settings: RedisConnectionInfo) -> redis::Client {
    let info = addr.into_connection_info().unwrap();
    redis::Client::open(info.set_redis_settings(settings)).unwrap()
}

fn tcp(port: u16) -> ConnectionAddr {
    ConnectionAddr::Tcp("127.0.0.1".into(), port)
}

fn tls(port: u16, insecure: bool) -> ConnectionAddr {
    ConnectionAddr::TcpTls {
        host: "127.0.0.1".into(),
        port,
        insecure,
        tls_params: None,
    }
}

/// Checks that the other client finds the lock in its database.
async fn is_shared(client: Client, redis: &redis::Client) {
    let name = unique("shared");
    let guard = held(&client.lock(&name)).await;
    let mut connection = redis.get_connection().unwrap();
    let exists: bool = redis::cmd("EXISTS")
        .arg(&name)
        .query(&mut connection)
        .unwrap();
    assert!(exists);
    free(guard).await;
}

async fn refused(settings: ClientBuilder, redis: &redis::Client) -> String {
    let connecting = settings.connect_timeout(LONG).connect_redis(redis);
    let error = within_limit("refused", connecting).await.unwrap_err();
    match error {
        Error::InvalidSetting { setting, .. } => setting.to_owned(),
        error => error.to_string(),
    }
}

#[tokio::test]
async fn password_user_and_database_are_shared() {
    let server = Server::start_with(&["--requirepass", PASSWORD]);
    let app = ["ACL", "SETUSER", "ä/p", "on", "~*", "&*", "+@all"];
    let password = format!(">{PASSWORD}2");
    let app = [&app[..], &[&password]].concat();
    let () = server.command(&app);
    let default = RedisConnectionInfo::default().set_password(PASSWORD);
    let other = RedisConnectionInfo::default()
        .set_username("ä/p")
        .set_password(format!("{PASSWORD}2"));
    for (settings, db) in [(&default, 0), (&default, 3), (&other, 15)] {
        let redis = redis_client(tcp(server.port()), settings.clone().set_db(db));
        is_shared(Client::from_redis(&redis).await.unwrap(), &redis).await;
    }
    // The builder has precedence.
    let wrong = RedisConnectionInfo::default().set_password("wrong");
    let redis = redis_client(tcp(server.port()), wrong);
    let error = Client::from_redis(&redis).await.unwrap_err();
    assert!(
        matches!(error, Error::AuthenticationFailed { .. }),
        "{error}"
    );
    let settings = Client::builder().password(PASSWORD);
    settings.connect_redis(&redis).await.unwrap();
    // Such a client does not log in.
    let nobody = RedisConnectionInfo::default().set_username("nobody");
    let redis = redis_client(tcp(server.port()), nobody);
    let said = refused(Client::builder(), &redis).await;
    assert!(said.contains("username without a password"), "{said}");
}

#[test]
fn threads_share_them_too() {
    let redis = redis::Client::open(shared().url()).unwrap();
    let client = redlatch::blocking::Client::from_redis(&redis).unwrap();
    let guard = client.lock(&unique("threads")).lock().block().unwrap();
    guard.unlock().unwrap();
}

#[tokio::test]
async fn unix_socket_is_shared() {
    let dir = TempDir::new();
    let path = dir.path().join("a+socket.sock");
    let socket = path.to_str().unwrap();
    let args = ["--unixsocket", socket, "--requirepass", PASSWORD];
    let _server = Server::start_with(&args);
    let settings = RedisConnectionInfo::default()
        .set_password(PASSWORD)
        .set_db(2);
    let redis = redis_client(ConnectionAddr::Unix(path), settings);
    is_shared(Client::from_redis(&redis).await.unwrap(), &redis).await;
    let relative = ConnectionAddr::Unix("relative.sock".into());
    let redis = redis_client(relative, RedisConnectionInfo::default());
    let said = refused(Client::builder(), &redis).await;
    assert!(said.contains("no absolute socket path"), "{said}");
}

#[tokio::test]
async fn tls_is_shared_but_not_its_certificates() {
    let server = TlsServer::start("no", &[]);
    let (port, pem) = (server.port(), server.ca().pem());
    let url = server.url();
    let certificates = TlsCertificates {
        client_tls: None,
        root_cert: Some(pem.into()),
    };
    let own_ca = redis::Client::build_with_tls(url, certificates).unwrap();
    assert_eq!(refused(Client::builder(), &own_ca).await, "tls_params");
    let settings = || Client::builder().tls_ca(pem);
    settings().connect_redis(&own_ca).await.unwrap();

    let system = redis_client(tls(port, false), RedisConnectionInfo::default());
    let client = settings().connect_redis(&system).await.unwrap();
    free(held(&client.lock(&unique("tls"))).await).await;
    // Not in plain text.
    let said = refused(Client::builder().tls_ca("none"), &system).await;
    assert_eq!(said, "tls_ca");

    let insecure = redis_client(tls(port, true), RedisConnectionInfo::default());
    assert_eq!(refused(settings(), &insecure).await, "insecure");
}

#[tokio::test]
async fn invalid_addresses_are_refused() {
    for host in ["0.0.0.0", "bücher.example", "a/3", "u@h", "h?db=1"] {
        let addr = ConnectionAddr::Tcp(host.into(), 6379);
        let redis = redis_client(addr, RedisConnectionInfo::default());
        assert_eq!(refused(Client::builder(), &redis).await, "addr", "{host}");
    }
    let several = ConnectionAddr::Tcp("a,b".into(), 6379);
    let redis = redis_client(several, RedisConnectionInfo::default());
    let said = refused(Client::builder(), &redis).await;
    assert!(said.contains("takes one server"), "{said}");
    let redis = redis_client(tcp(0), RedisConnectionInfo::default());
    assert_eq!(refused(Client::builder(), &redis).await, "addr");
    let negative = RedisConnectionInfo::default().set_db(-1);
    let redis = redis_client(tcp(1), negative);
    let said = Client::from_redis(&redis).await.unwrap_err().to_string();
    assert!(
        said.contains("the database in db= is not a number"),
        "{said}"
    );
}
