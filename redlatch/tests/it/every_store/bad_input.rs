//! Invalid input always causes a clear error, and never changes a foreign key.

use std::error::Error as _;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;

use redlatch::inspect::ObjectState;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use crate::common::prelude::*;

on_every_store! {
    invalid_names_are_rejected,
    invalid_leases_are_rejected,
}

async fn invalid_names_are_rejected(store: TestStore) {
    let client = store.client().await;
    let long = "x".repeat(513);
    for name in [
        "", "a\0b", "a\nb", "a\rb", &long, "a}b", "a{b", "{}a", "a{}b", "}{", "{", "}",
    ] {
        let lock = client.lock(name);
        assert_eq!(lock.name(), name);
        for error in [
            lock.lock().await.err(),
            lock.try_lock().await.err(),
            lock.is_locked().await.err(),
            lock.remaining_lease().await.err(),
            lock.force_unlock().await.err(),
            lock.run(async {}).await.err(),
        ] {
            let is_refused = matches!(error, Some(Error::InvalidName { .. }));
            assert!(is_refused, "{name:?}: {error:?}");
        }
    }
    let longest = "x".repeat(512 - store.prefix().len());
    client.lock(&longest).run(async {}).await.unwrap();
}

async fn invalid_leases_are_rejected(store: TestStore) {
    let (_client, lock) = store.object(Client::lock, "leases").await;
    for lease in [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(999),
        MAX_LEASE + Duration::from_millis(1),
        Duration::MAX,
    ] {
        let error = lock.lock().lease(lease).await.unwrap_err();
        let is_refused = matches!(error, Error::InvalidLease { .. });
        assert!(is_refused, "{lease:?}: {error}");
    }
    let longest = lock.lock().lease(MAX_LEASE).await.unwrap();
    assert!(longest.valid_for() > MAX_LEASE - LONG);
    free(longest).await;
}

#[tokio::test]
async fn invalid_settings_are_rejected() {
    let url = shared().url();
    let new = Client::builder;
    let too_short = Duration::from_millis(99);
    let settings = [
        ("watchdog_lease", new().watchdog_lease(too_short)),
        ("watchdog_lease", new().watchdog_lease(Duration::ZERO)),
        ("watchdog_lease", new().watchdog_lease(Duration::MAX)),
        ("prefix", Client::builder().prefix("a\nb")),
        ("connect_timeout", new().connect_timeout(Duration::ZERO)),
        ("response_timeout", new().response_timeout(Duration::ZERO)),
        ("response_timeout", new().response_timeout(Duration::MAX)),
        (
            "subscription_linger",
            new().subscription_linger(Duration::MAX),
        ),
        ("client_id", Client::builder().client_id("")),
        ("client_id", Client::builder().client_id("a:b")),
        ("client_id", Client::builder().client_id("x".repeat(65))),
    ];
    for (name, settings) in settings {
        match settings.connect(&url).await {
            Err(Error::InvalidSetting { setting, .. }) => assert_eq!(setting, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let named = connect(Client::builder().client_id("worker-7"), &url).await;
    assert_eq!(named.id(), "worker-7");
}

#[tokio::test]
async fn unusable_urls_are_rejected() {
    for url in [
        "",
        "secret",
        "http://:secret@x",
        "rediss://:secret@",
        "redis://:secret@:x",
    ] {
        let error = Client::connect(url).await.unwrap_err();
        assert!(matches!(error, Error::InvalidUrl { .. }), "{url}: {error}");
        assert!(!format!("{error} {error:?}").contains("secret"));
    }
    // A port without a listener: the socket is bound but does not listen.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    drop(taken);
    let url = format!("redis://u:secret@127.0.0.1:{port}");
    let error = Client::connect(&url).await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    assert!(!format!("{error} {error:?}").contains("secret"));
    let source = error.source().and_then(|source| source.downcast_ref());
    assert!(
        source.is_some_and(|source: &std::io::Error| source.kind() == ErrorKind::ConnectionRefused),
        "{source:?}"
    );
    let socket = Client::connect("redis+unix:///nowhere/redis.sock");
    assert_matches!(socket.await, Err(Error::Unavailable { .. }));
}

#[tokio::test]
async fn wrong_passwords_are_rejected() {
    let server = Server::start_with(&["--requirepass", "right"]);
    let url = |password: &str| format!("redis://:{password}@127.0.0.1:{}", server.port());
    let error = Client::connect(&url("secret")).await.unwrap_err();
    assert_matches!(error, Error::AuthenticationFailed { .. });
    assert!(!format!("{error} {error:?}").contains("secret"));
    let error = Client::connect(&server.url()).await.unwrap_err();
    assert_matches!(error, Error::AuthenticationFailed { .. });

    let client = Client::connect(&url("right")).await.unwrap();
    client.lock("a").run(async {}).await.unwrap();
    assert!(!format!("{client:?} {:?}", client.lock("a")).contains("right"));
}

/// Answers each HELLO with `hello`, INFO with an old version, and every other command with OK.
fn fake_server(hello: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = stream.read(&mut buffer) {
                let said = String::from_utf8_lossy(&buffer[..read]).into_owned();
                // One answer per command: each command begins with an array header.
                for command in said.split("\r\n*").filter(|part| !part.is_empty()) {
                    let answer = match command {
                        _ if command.contains("HELLO") => hello,
                        _ if command.contains("INFO\r\n") && !command.contains("SETINFO") => {
                            "$20\r\nredis_version:5.0.14\r\n"
                        }
                        _ => "+OK\r\n",
                    };
                    let _ = stream.write_all(answer.as_bytes());
                }
            }
        }
    });
    port
}

#[tokio::test]
async fn unsupported_servers_are_rejected() {
    let old = "%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.0.16\r\n";
    let ancient = "-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n";
    let other = "-ERR unknown command 'HELLO'\r\n";
    let cluster = "%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n7.0.15\r\n\
        $4\r\nmode\r\n$7\r\ncluster\r\n";
    for hello in [old, ancient, other, cluster] {
        let port = fake_server(hello);
        let url = format!("redis://127.0.0.1:{port}");
        let answer = within_limit("an answer", Client::connect(&url)).await;
        let error = answer.unwrap_err();
        let is_refused = matches!(error, Error::UnsupportedServer { .. });
        assert!(is_refused, "{hello}: {error}");
        assert!(error.to_string().contains("6.2"), "{error}");
    }
    // Valkey counts its versions separately, so a low version number is accepted.
    let port =
        fake_server("%2\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$7\r\nversion\r\n$5\r\n1.0.0\r\n");
    let url = format!("redis://127.0.0.1:{port}");
    Client::connect(&url).await.unwrap();
}

#[tokio::test]
async fn non_redis_server_is_rejected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
        }
    });
    let url = format!("redis://127.0.0.1:{port}");
    let answer = within_limit("an answer", Client::connect(&url)).await;
    let error = answer.unwrap_err();
    assert_matches!(
        error,
        Error::Unavailable { .. } | Error::UnsupportedServer { .. }
    );
}

/// Else a program would wait for the end of an outage that does not end.
#[tokio::test]
async fn database_that_the_server_does_not_have_is_refused() {
    let server = Server::start();
    let url = format!("{}/99", server.url());
    let answer = within_limit("an answer", Client::connect(&url)).await;
    let error = answer.unwrap_err();
    assert_matches!(error, Error::Refused { .. });
    assert!(error.to_string().contains("SELECT 99: ERR"), "{error}");
    assert!(!error.is_transient());
}

#[tokio::test]
async fn database_needs_the_permission_to_select_it() {
    let server = Server::start();
    let rule = |rule| {
        [
            "ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", rule,
        ]
    };
    let _: String = server.command(&rule("-select"));
    let url = format!("redis://app:pw@127.0.0.1:{}/3", server.port());
    let answer = within_limit("an answer", Client::connect(&url)).await;
    let error = answer.unwrap_err();
    assert_matches!(error, Error::Refused { .. });
    assert!(error.to_string().contains("SELECT 3: NOPERM"), "{error}");
    let _: String = server.command(&rule("+select"));
    Client::connect(&url).await.unwrap();
}

/// The connection ends in the moment in which its handshake is answered. Nobody uses it yet, so nobody notices.
#[tokio::test]
async fn connection_that_ends_with_its_handshake_is_replaced() {
    let server = Server::start();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let (port, is_next_bad) = (server.port(), Arc::new(AtomicBool::new(false)));
    let (next_bad, made) = (is_next_bad.clone(), Arc::new(Mutex::new(Vec::new())));
    let connections = made.clone();
    let accepting = tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            if next_bad.swap(false, Ordering::Relaxed) {
                let _ = client.read(&mut [0; 4096]).await.unwrap();
                // In one piece: the answers to HELLO and twice CLIENT SETINFO, and one to nothing.
                let answers = b"%0\r\n+OK\r\n+OK\r\n+unasked\r\n";
                client.write_all(answers).await.unwrap();
                continue;
            }
            let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let copying = tokio::spawn(async move {
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
            connections.lock().unwrap().push(copying.abort_handle());
        }
    });
    let client = Client::connect(&url).await.unwrap();
    let lock = client.lock("a");
    assert!(!lock.is_locked().await.unwrap());
    is_next_bad.store(true, Ordering::Relaxed);
    made.lock().unwrap().iter().for_each(AbortHandle::abort);
    assert!(!done("an answer", lock.is_locked()).await);
    assert!(!is_next_bad.load(Ordering::Relaxed));
    accepting.abort();
}

#[tokio::test]
async fn foreign_keys_are_not_changed() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let foreign = |what: &str| unique(&format!("foreign-{what}"));
    let names = ["string", "list", "hash", "many"].map(foreign);
    let [string, list, user, many] = &names;
    let _: () = server.command(&["SET", string, "precious"]);
    let _: i64 = server.command(&["RPUSH", list, "precious"]);
    let _: i64 = server.command(&["HSET", user, "name", "precious"]);
    let _: i64 = server.command(&["HSET", many, "a:1", "1", "b:2", "2"]);
    for name in &names {
        let before: Vec<u8> = server.command(&["DUMP", name]);
        let lock = client.lock(name);
        for error in [
            lock.lock().await.err(),
            lock.try_lock().wait(LONG).await.err(),
            lock.is_locked().await.err(),
            lock.force_unlock().await.err(),
        ] {
            let is_refused = matches!(error, Some(Error::WrongKind { .. }));
            assert!(is_refused, "{name}: {error:?}");
        }
        client.flush().await;
        let after: Vec<u8> = server.command(&["DUMP", name]);
        assert_eq!(after, before, "{name} was changed");
    }
    // They are not listed either.
    let mut listing = client.list("foreign-*");
    while let Some(found) = listing.next().await.unwrap() {
        assert!(!names.contains(&found.name), "{found:?}");
    }
    // A lock whose key changes its type while it is held is lost.
    let lock = client.lock(&foreign("turned"));
    let guard = held(&lock).await;
    let _: () = server.command(&["SET", lock.name(), "precious"]);
    assert!(guard.unlock().await.is_err());
    assert_eq!(server.command::<String>(&["GET", lock.name()]), "precious");
}

/// A foreign key in a store must not prevent other keys from being listed, nor be reported as a
/// lock.
#[tokio::test]
async fn foreign_keys_do_not_disturb_listing() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let _held = held(&client.lock("mine")).await;
    let many = "for n = 1, 100000 do redis.call('HSET', 'many', n, n) end";
    for command in [
        &["HSET", "count", "c:1", "99999999999"][..],
        &["SET", "number", "9999999999999999999"],
        &["HSET", "write", "mode", "dark", "quota:write", "-1"],
        &["HSET", "dark", "mode", "dark", "size", "12"],
        &["HSET", "odd", "mode", "read", "size", "12"],
        &["HSET", "reader", "mode", "read", "c:1", "99999999999"],
        &["SET", "{reader}:c:1:rwlock_timeout:1", "1", "PX", "60000"],
        &["EVAL", many, "0"],
        &["SET", "permits", "9007199254740993"],
        &["ZADD", "{permits}:timeout", "1", "id"],
        &["SET", "least", "-9223372036854775808"],
        // Next to a lock that does not exist.
        &["SET", "redisson_lock_token:{gone}", "precious"],
    ] {
        let _: redis::Value = server.command(command);
    }
    let () = server.command(&["CONFIG", "RESETSTAT"]);
    let mut found = Vec::new();
    let mut listing = client.list("*");
    while let Some(listed) = listing.next().await.unwrap() {
        found.push(format!("{}: {}", listed.name, listed.state.kind()));
    }
    found.sort();
    let expected = [
        "least: semaphore or latch",
        "mine: lock",
        "permits: expirable semaphore",
    ];
    assert_eq!(found, expected);
    let Some(ObjectState::ExpirableSemaphore { available, .. }) =
        client.inspect("permits").await.unwrap()
    else {
        panic!("no semaphore");
    };
    assert_eq!(available, 9_007_199_254_740_994);
    assert!(client.inspect("gone").await.unwrap().is_none());
    // Inspecting it by name reports its type.
    assert_matches!(client.inspect("count").await, Err(Error::WrongKind { .. }));
    // The big hash was not read for this: only the hashes of locks are, those of four keys here.
    let reads = server.calls("hgetall:");
    assert!((1..=5).contains(&reads), "{reads}");
}
