//! Tests with sentinels: failovers, and sentinels that are dead, frozen or wrong.

use redlatch_testkit::{fake_sentinel, shared_sentinels};

use super::sentinel_or_cluster::{Deployment, LASTING, failover, steady, until_renewed};
use crate::common::prelude::*;
use crate::common::runtime;
use crate::features::log::log;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_follows_failover_of_killed_master() {
    let mut deployment = Deployment::sentinel();
    failover::a_killed_master(&mut deployment).await;
    failover::a_lock_that_is_lost_with_its_master(&mut deployment).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_follows_failover_of_killed_master_over_tls() {
    failover::a_killed_master(&mut Deployment::tls_sentinel()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_leaves_frozen_master() {
    failover::a_frozen_master(&Deployment::sentinel()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_until_master_is_replaced() {
    let deployment = Deployment::steady_sentinel();
    steady::a_guard_is_more_careful_than_the_server(&deployment).await;
    steady::dropped_anywhere(&deployment).await;
    steady::a_waiter_whose_connections_are_cut(&deployment).await;
    steady::a_master_that_hangs(&deployment).await;
}

/// One sentinel is dead, one hangs, and one is wrong and reports a very high epoch. A client still
/// finds the master, follows a failover, and sends no command to the server that the wrong sentinel
/// reports.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn majority_of_sentinels_is_believed() {
    let secret = "swordfish";
    let mut all = Sentinels::start_with(SentinelPlan {
        replicas: 1,
        sentinels: 5,
        sentinel_lines: &["requirepass swordfish"],
        ..SentinelPlan::default()
    });
    let decoy = Server::start();
    let fake_port = fake_sentinel(decoy.port());
    all.kill_sentinel(0);
    all.freeze_sentinel(1);
    // With a missing or wrong password, the error names only that.
    for query in ["", "?sentinel_password=guessed"] {
        let url = format!("{}{query}", all.url());
        let error = Client::connect(&url).await.unwrap_err();
        assert_matches!(error, Error::AuthenticationFailed { .. });
        let said = format!("{error} {error:?}");
        assert!(!said.contains("guessed"), "{said}");
        assert!(!said.contains(secret), "{said}");
    }

    let with_fake = format!("127.0.0.1:{fake_port},127.0.0.1:");
    let url = all.url().replacen("127.0.0.1:", &with_fake, 1);
    let url = format!("{url}?sentinel_password={secret}");
    // The hold outlasts the failover, however long that takes.
    let client = connect(long_timeout().watchdog_lease(10 * LONG), &url).await;
    let guard = retry_transient(|| client.lock("a").lock()).await;
    let old = all.master();
    assert!(all.command::<bool>(old, &["EXISTS", "a"]));
    all.kill(old);
    let new = all.await_new_master(old);
    let next = retry_transient(|| client.lock("b").lock()).await;
    assert!(all.command::<bool>(new, &["EXISTS", "b"]));
    free(guard).await;
    assert!(!all.command::<bool>(new, &["EXISTS", "a"]));

    // It restarts as a master, until the sentinels reconfigure it.
    all.restart(old);
    for n in 0..100 {
        let lock = client.lock(&format!("n-{n}"));
        std::mem::forget(lock.lock().lease(LONG).await.unwrap());
    }
    free(next).await;
    let keys: Vec<String> = all.command(new, &["KEYS", "n-*"]);
    assert_eq!(keys.len(), 100);
    assert_eq!(decoy.command::<i64>(&["DBSIZE"]), 0);
    let calls = decoy.command::<String>(&["INFO", "commandstats"]);
    assert!(!calls.contains("evalsha"), "{calls}");
}

/// Unusable configurations cause an immediate error that names the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_kind_of_url_is_reported() {
    let url = shared_sentinels().url();
    let name = url.rsplit('/').next().unwrap();
    let unknown = url.replace(name, "nobody");
    let error = refused(&unknown).await;
    assert_matches!(error, Error::Refused { .. });
    assert!(error.to_string().contains("\"nobody\""), "{error}");

    let nowhere =
        "redis+sentinel://:swordfish@127.0.0.1:1,127.0.0.1:2/main?sentinel_password=sesame";
    let answer = within_limit("answered", Client::connect(nowhere)).await;
    let error = answer.unwrap_err();
    let Error::Unavailable { reason, .. } = &error else {
        panic!("{error}");
    };
    for sentinel in ["127.0.0.1:1", "127.0.0.1:2"] {
        assert!(reason.contains(sentinel), "{reason}");
    }
    assert!(!format!("{error:?}").contains("swordfish") && !reason.contains("sesame"));

    // A server that is no sentinel, and a sentinel that is no server.
    let port = shared_sentinels().servers()[0].port();
    let data = format!("redis+sentinel://127.0.0.1:{port}/main");
    let connecting = patient(Client::builder()).connect(&data);
    let error = within_limit("answered", connecting).await.unwrap_err();
    assert_matches!(error, Error::UnsupportedServer { .. });
    let sentinel = shared_sentinels().sentinels()[0].url();
    let connecting = patient(Client::builder()).connect(&sentinel);
    let error = within_limit("answered", connecting).await.unwrap_err();
    assert_matches!(error, Error::UnsupportedServer { .. });
    assert!(error.to_string().contains("redis+sentinel://"), "{error}");
}

/// Returns the error of connecting, which is none of an outage.
async fn refused(url: &str) -> Error {
    let refused = async {
        loop {
            let connected = patient(Client::builder()).connect(url).await;
            let error = connected.unwrap_err();
            if !error.is_transient() {
                return error;
            }
        }
    };
    within_limit("refused", refused).await
}

/// Sentinels have users of their own, so the error says which of the two logins is wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_login_names_the_server() {
    let all = shared_sentinels();
    let url = all.url();
    let error = refused(&format!("{url}?sentinel_user=nobody&sentinel_password=x")).await;
    assert_matches!(error, Error::AuthenticationFailed { .. });
    let said = error.to_string();
    let mut sentinels = all.sentinels().iter();
    let begin = |port| format!("the sentinel 127.0.0.1:{port} refused the login (");
    assert!(
        sentinels.any(|one| said.starts_with(&begin(one.port()))),
        "{said}"
    );
    assert!(said.contains("`sentinel_password`"), "{said}");
    let error = refused(&url.replace("://", "://nobody:x@")).await;
    assert_matches!(error, Error::AuthenticationFailed { .. });
    let said = error.to_string();
    assert!(
        said.contains("master 127.0.0.1:") && !said.contains("sentinel"),
        "{said}"
    );
}

/// A hanging sentinel delays connecting only briefly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_sentinel_does_not_block_connecting() {
    let all = Sentinels::start_with(SentinelPlan {
        replicas: 0,
        ..SentinelPlan::default()
    });
    all.freeze_sentinel(0);
    let client = connect(long_timeout(), &all.url()).await;
    let guard = held(&client.lock("a")).await;
    until("alone, it has no replicas to wait for", async || {
        let calls: String = all.command(0, &["INFO", "commandstats"]);
        !calls.contains("cmdstat_wait:")
    })
    .await;
    let lock = client.lock("a");
    let waiting = retry_if_late(|| lock.try_lock().wait(Duration::from_millis(50)));
    assert!(waiting.await.is_none());
    free(guard).await;
}

/// The network has lost the connection, and tells neither end. A new one works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connection_to_a_sentinel_is_replaced() {
    let all = Sentinels::start_with(SentinelPlan {
        replicas: 0,
        sentinels: 1,
        ..SentinelPlan::default()
    });
    let sentinel = &all.sentinels()[0];
    let network = Proxy::to_server(sentinel);
    let direct = format!(":{}", sentinel.port());
    let url = all.url().replace(&direct, &format!(":{}", network.port()));
    let client = connect(long_timeout(), &url).await;
    network.hold_requests(true);
    until("it connects again", async || {
        let clients: String = sentinel.command(&["CLIENT", "LIST"]);
        clients.contains("cmd=NULL")
    })
    .await;
    drop(client);
}

/// Returns a semaphore of three permits, whose client waits for more replicas than there are after the master has answered.
async fn awaiting_replicas(all: &Sentinels) -> (Client, Semaphore) {
    let master = &all.servers()[all.master()];
    let direct = long_timeout().connect(&master.url()).await;
    let seen = direct.unwrap().semaphore(&unique("unconfirmed"));
    assert!(seen.try_set_permits(3).await.unwrap());
    // The server knows the scripts from here on.
    let permits = seen.acquire_many(2).await.unwrap();
    permits.release().await.unwrap();

    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(9));
    let client = connect(settings.replica_timeout(LONG), &all.url()).await;
    let semaphore = client.semaphore(seen.name());
    (client, semaphore)
}

/// Waits until two of three permits are acquired.
async fn acquired_on_all_servers(all: &Sentinels, semaphore: &Semaphore) {
    let count = |server: &Server| server.command::<String>(&["GET", semaphore.name()]);
    let acquired = async || all.servers().iter().all(|server| count(server) == "1");
    until("acquired on all servers", acquired).await;
}

/// Permits have no owner: a server that has taken the master's place may not know that they were acquired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unconfirmed_permits_are_not_released_to_another_master() {
    let all = Arc::new(Sentinels::start());
    let (client, semaphore) = awaiting_replicas(&all).await;
    let failover = async {
        acquired_on_all_servers(&all, &semaphore).await;
        let all = all.clone();
        tokio::task::spawn_blocking(move || all.fail_over()).await
    };
    let acquiring = semaphore.try_acquire_many(2).into_future();
    let (acquired, master) = tokio::join!(acquiring, failover);
    assert!(acquired.is_err(), "too few replicas have confirmed it");
    within_limit("settled", client.flush()).await;
    let new = &all.servers()[master.unwrap()];
    assert_eq!(new.command::<String>(&["GET", semaphore.name()]), "1");
}

/// The runtime of the acquisition ends while replicas are awaited. Another runtime of the client releases the permits, after a
/// failover.
#[test]
fn unconfirmed_permits_of_an_ended_runtime_are_not_released_to_another_master() {
    let all = Sentinels::start();
    let ending = runtime();
    let (client, semaphore) = ending.block_on(awaiting_replicas(&all));
    let (log, _guard) = log();
    // Used by the client, and driven only after the failover.
    let other = runtime();
    let used = other.block_on(semaphore.acquire_many(0).into_future());
    assert_eq!(used.unwrap().permits(), 0);
    ending.block_on(async {
        tokio::spawn(semaphore.try_acquire_many(2).into_future());
        acquired_on_all_servers(&all, &semaphore).await;
        let acquired = ["acquired", semaphore.name(), "permits=2"];
        let known = async || log.lines(&acquired).len() == 1;
        until("the client knows it", known).await;
    });
    drop(ending);
    assert_eq!(client.status().background, 1);
    let new = &all.servers()[all.fail_over()];
    other.block_on(within_limit("settled", client.flush()));
    assert_eq!(new.command::<String>(&["GET", semaphore.name()]), "1");
}

/// The sentinels publish a failover, and the queries behind their messages are late. The former master still
/// answers as a master. The client leaves it nevertheless, with all connections at once, and its lock stays valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_is_followed_although_queries_behind_its_messages_are_late() {
    let all = Arc::new(Sentinels::start());
    let proxies: Vec<Proxy> = all.sentinels().iter().map(Proxy::to_server).collect();
    let addresses = proxies
        .iter()
        .map(|one| format!("127.0.0.1:{}", one.port()));
    let addresses = addresses.collect::<Vec<_>>().join(",");
    let name = all.url().rsplit('/').next().unwrap().to_owned();
    let url = format!("redis+sentinel://{addresses}/{name}");
    let settings = || long_timeout().watchdog_lease(LASTING);
    // It awaits replicas, so it has two connections to the master.
    let client = retry_transient(|| settings().connect(&url)).await;
    let held = retry_transient(|| client.lock("held").lock()).await;
    let old = all.master();
    // The sentinels cannot make it a replica.
    let rules = ["ACL", "SETUSER", "default", "-slaveof", "-replicaof"];
    let () = all.command(old, &rules);

    let hold_queries = |held| proxies.iter().for_each(|one| one.hold_requests(held));
    hold_queries(true);
    let failover = tokio::task::spawn_blocking({
        let all = all.clone();
        move || all.fail_over()
    });
    let new = failover.await.unwrap();
    until("all sentinels have published it", async || {
        all.sentinels().iter().all(|sentinel| {
            let query = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &name];
            let (_, port): (String, u16) = sentinel.command(&query);
            port == all.servers()[new].port()
        })
    })
    .await;
    hold_queries(true);
    // The second query is sent when the first one has failed.
    let queried = async || proxies.iter().any(|one| one.held_requests() >= 2);
    until("the client has queried twice more", queried).await;
    let role: Vec<redis::Value> = all.command(old, &["ROLE"]);
    assert_eq!(role[0], redis::Value::BulkString(b"master".to_vec()));
    hold_queries(false);

    // One of its connections breaks, and finds the new master, unless the client has followed
    // already.
    let connections: String = all.command(old, &["CLIENT", "LIST"]);
    let attempts = connections.lines().find(|line| line.contains(" cmd=wait "));
    if let Some(id) = attempts.and_then(|line| line.split([' ', '=']).nth(1)) {
        let _: i64 = all.command(old, &["CLIENT", "KILL", "ID", id]);
    }
    for n in 0..20 {
        let lock = client.lock(&format!("both-{n}"));
        free(retry_transient(|| lock.lock()).await).await;
    }
    until_renewed(&all.servers()[new], "held").await;
    assert!(held.is_valid());
    let other = settings().connect(&all.url()).await.unwrap();
    let waiting = retry_if_late(|| {
        other
            .lock("held")
            .try_lock()
            .wait(Duration::from_millis(50))
    });
    assert!(waiting.await.is_none(), "a second holder");
    free(held).await;
    let left: Vec<String> = all.command(new, &["KEYS", "both-*"]);
    assert_eq!(left, Vec::<String>::new());
}

/// Feared most: the master is replaced while it still answers this client, whose watch of the sentinels has ended with the
/// runtime of another caller.
#[test]
fn sentinels_are_watched_in_every_runtime() {
    let all = Sentinels::start();
    let is_watched = || {
        let list = ["CLIENT", "LIST", "TYPE", "pubsub"];
        let mut lists = all
            .sentinels()
            .iter()
            .map(|one| one.command::<String>(&list));
        lists.any(|clients| !clients.is_empty())
    };
    // The other one does nothing outside of `block_on`.
    let (ending, other) = (tokio::runtime::Runtime::new().unwrap(), runtime());
    let client = ending.block_on(Client::connect(&all.url())).unwrap();
    let lock = client.lock("a");
    ending.block_on(async {
        lock.is_locked().await.unwrap();
        until("it is watched", async || is_watched()).await;
    });
    // The other runtime makes the next connections.
    let master = &all.servers()[all.master()];
    let _: i64 = master.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    other.block_on(async {
        free(retry_transient(|| lock.lock()).await).await;
    });
    drop(ending);
    // In a runtime that the client does not use.
    runtime().block_on(until("that watch has ended", async || !is_watched()));
    other.block_on(async {
        free(retry_transient(|| lock.lock()).await).await;
        until("it is watched again", async || is_watched()).await;
    });
}
