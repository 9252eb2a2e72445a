//! Changes of locks by other clients, which servers report (`CLIENT TRACKING`).

use std::pin::Pin;
use std::time::Instant;

use redlatch::kind::LockKind;
use redlatch_testkit::Log;

use super::log::log;
use crate::common::prelude::*;
use crate::topologies::sentinel_or_cluster::Deployment;

/// With this lease, the first regular renewal is due after hours: a loss is noticed only because a server reports it.
const ENDLESS: Duration = Duration::from_secs(20_000);

fn settings() -> ClientBuilder {
    Client::builder().watchdog_lease(ENDLESS)
}

async fn tracked_client() -> (Server, Client) {
    let server = Server::start();
    let client = connect(settings(), &server.url()).await;
    (server, client)
}

/// A hold, which is kept, and its loss.
struct Held {
    name: String,
    lost: Pin<Box<dyn Future<Output = ()> + Send>>,
    _guard: Box<dyn Send>,
}

impl Held {
    async fn new<K: LockKind + 'static>(lock: Lock<K>) -> Held {
        Held::of(&lock, held(&lock).await)
    }

    async fn with_fixed_lease<K: LockKind + 'static>(lock: Lock<K>) -> Held {
        Held::of(&lock, lock.lock().lease(ENDLESS).await.unwrap())
    }

    fn of<K: LockKind + 'static>(lock: &Lock<K>, guard: Guard<Lock<K>>) -> Held {
        Held {
            name: lock.name().to_owned(),
            lost: Box::pin(guard.lost()),
            _guard: Box::new(guard),
        }
    }
}

/// One of each kind.
async fn all_kinds(client: &Client) -> Vec<Held> {
    let semaphore = client.expirable_semaphore("permits");
    semaphore.try_set_permits(1).await.unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let sides = ["read", "write"].map(|name| client.read_write_lock(name));
    vec![
        Held::new(client.lock("lock")).await,
        Held::with_fixed_lease(client.lock("fixed")).await,
        Held::new(client.fair_lock("fair")).await,
        Held::new(client.fenced_lock("fenced")).await,
        Held::new(sides[0].read()).await,
        Held::new(sides[1].write()).await,
        Held {
            name: "permits".to_owned(),
            lost: Box::pin(permit.lost()),
            _guard: Box::new(permit),
        },
    ]
}

/// Waits until these servers report changes of so many keys.
async fn until_tracked(servers: &[&Server], keys: usize) {
    until("the holds are tracked", async || {
        let tracked = |server: &&Server| server.info("tracking_total_keys");
        let tracked = servers
            .iter()
            .map(|it| tracked(it).parse::<usize>().unwrap());
        tracked.sum::<usize>() >= keys
    })
    .await;
}

fn delete(server: &Server, name: &str) {
    // The key of the held permits has another name.
    let permits = format!("{{{name}}}:timeout");
    let deleted: i64 = server.command(&["DEL", name]);
    let permits: i64 = server.command(&["DEL", &permits]);
    assert!(deleted + permits > 0, "{name}");
}

async fn await_losses(held: Vec<Held>) {
    for one in held {
        within_limit(&format!("{} is lost", one.name), one.lost).await;
    }
}

#[tokio::test]
async fn deleted_locks_are_lost_at_once() {
    let (server, client) = tracked_client().await;
    let held = all_kinds(&client).await;
    until_tracked(&[&server], held.len()).await;
    held.iter().for_each(|one| delete(&server, &one.name));
    await_losses(held).await;
}

#[tokio::test]
async fn all_locks_are_lost_at_once_if_data_is_deleted() {
    let (server, client) = tracked_client().await;
    let held = all_kinds(&client).await;
    until_tracked(&[&server], held.len()).await;
    let _: String = server.command(&["FLUSHALL"]);
    await_losses(held).await;
}

#[tokio::test]
async fn forced_release_is_a_loss_at_once() {
    let (server, client) = tracked_client().await;
    let other = connect(settings(), &server.url()).await;
    let held = vec![
        Held::new(client.lock("lock")).await,
        Held::new(client.fair_lock("fair")).await,
        Held::new(client.read_write_lock("read").read()).await,
        Held::new(client.read_write_lock("write").write()).await,
    ];
    until_tracked(&[&server], held.len()).await;
    assert!(other.lock("lock").force_unlock().await.unwrap());
    assert!(other.fair_lock("fair").force_unlock().await.unwrap());
    let read = other.read_write_lock("read").read();
    assert!(read.force_unlock().await.unwrap());
    let write = other.read_write_lock("write").write();
    assert!(write.force_unlock().await.unwrap());
    await_losses(held).await;
}

async fn losses_in_deployment(deployment: Deployment) {
    let client = deployment.client(settings()).await;
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut held = Vec::new();
    for name in names {
        held.push(Held::new(client.lock(name)).await);
    }
    let mut masters: Vec<usize> = names.map(|name| deployment.master(name)).into();
    masters.sort_unstable();
    masters.dedup();
    let masters: Vec<&Server> = masters.iter().map(|it| deployment.server(*it)).collect();
    until_tracked(&masters, names.len()).await;
    for name in names {
        delete_on_master(&deployment, name);
    }
    await_losses(held).await;
}

fn delete_on_master(deployment: &Deployment, name: &str) {
    let server = deployment.server(deployment.master(name));
    let deleted: i64 = server.command(&["DEL", name]);
    assert_eq!(deleted, 1, "{name}");
}

#[tokio::test]
async fn deleted_locks_are_lost_at_once_behind_sentinels() {
    losses_in_deployment(Deployment::steady_sentinel()).await;
}

#[tokio::test]
async fn deleted_locks_are_lost_at_once_in_cluster() {
    losses_in_deployment(Deployment::steady_cluster()).await;
}

/// No server has reported what happened before the new connection.
#[tokio::test]
async fn lock_that_was_deleted_without_connection_is_lost_on_the_next() {
    let (server, client) = tracked_client().await;
    let held = Held::new(client.lock("lock")).await;
    until_tracked(&[&server], 1).await;
    // In one transaction, so that the client has not reconnected yet.
    let mut transaction = redis::pipe();
    transaction.atomic();
    for kind in ["normal", "pubsub"] {
        let kill = ["KILL", "TYPE", kind, "SKIPME", "yes"];
        transaction.cmd("CLIENT").arg(&kill);
    }
    transaction.cmd("DEL").arg("lock");
    let _: redis::Value = transaction.query(&mut server.connection()).unwrap();
    // Any request makes the connection again.
    within_limit("it reconnects", async {
        retry_transient(|| async { client.lock("other").is_locked().await }).await
    })
    .await;
    await_losses(vec![held]).await;
}

/// A report comes once. The check behind it is lost.
#[tokio::test]
async fn deleted_lock_is_lost_although_the_check_behind_the_report_fails() {
    let (server, proxy) = proxied_server();
    let client = connect(settings(), &proxy.url()).await;
    let held = Held::new(client.lock("lock")).await;
    until_tracked(&[&server], 1).await;
    proxy.discard_requests(true);
    delete(&server, "lock");
    wait_until_discarded(&proxy).await;
    proxy.discard_requests(false);
    proxy.cut();
    await_losses(vec![held]).await;
}

/// Other readers change the key all the time. That costs this one at most as many renewals again.
#[tokio::test]
async fn changes_that_are_no_loss_cause_one_renewal() {
    let (server, client) = tracked_client().await;
    // On a machine that paused, its holds may be long enough to be tracked.
    let other = settings().client_tracking(false);
    let other = other.connect(&server.url()).await.unwrap();
    let held = Held::new(client.read_write_lock("lock").read()).await;
    until_tracked(&[&server], 1).await;
    // The first script was sent twice, because the server did not know it.
    let renewals = || server.calls("client|caching") - 2;
    assert_eq!(renewals(), 0);
    let join = async |name: &str| {
        let guard = other.read_write_lock(name).read().lock().await.unwrap();
        free(guard).await;
    };
    join("lock").await;
    until("it is renewed", async || renewals() == 1).await;
    for _ in 0..20 {
        join("lock").await;
    }
    // Reports arrive in order, so the client has those about the first lock when it renews the second one.
    let second = Held::new(client.read_write_lock("second").read()).await;
    until("it is tracked", async || renewals() == 2).await;
    join("second").await;
    until("it is renewed, too", async || renewals() >= 3).await;
    assert_eq!(renewals(), 3);
    drop((held, second));
}

#[tokio::test]
async fn short_holds_cost_nothing() {
    let (server, client) = tracked_client().await;
    let longer = Held::new(client.lock("longer")).await;
    // On a machine that paused, some holds are long.
    let mut long = 0;
    for i in 0..100 {
        let begun = std::time::Instant::now();
        free(held(&client.lock(&i.to_string())).await).await;
        long += u64::from(begun.elapsed() >= Duration::from_secs(1));
    }
    until_tracked(&[&server], 1).await;
    // Twice, because the server did not know the script.
    let calls = server.calls("client|caching");
    assert!((2..=2 + long).contains(&calls), "{calls}, {long} long ones");
    // The renewal of a long one may arrive behind its release. Servers from 7.2 on also count the key of requests to release.
    let tracked: u64 = server.info("tracking_total_keys").parse().unwrap();
    let expected = 1..=2 * (1 + long);
    assert!(expected.contains(&tracked), "{tracked}, {long} long ones");
    drop(longer);
}

#[tokio::test]
async fn disabled_tracking_asks_for_nothing() {
    let server = Server::start();
    let client = connect(renewing().client_tracking(false), &server.url()).await;
    let guard = held(&client.lock("lock")).await;
    // Renewals extend the key to the whole lease again.
    let left = || async { pttl(&server, "lock") };
    until_rises("the remaining lease", left).await;
    assert_eq!(server.calls("client|tracking"), 0);
    assert!(guard.is_valid());
}

/// An outage is no refusal, although each hold that becomes a second old in it cannot be tracked then.
#[tokio::test]
async fn locks_are_tracked_after_outage_in_which_first_renewals_failed() {
    let (server, proxy) = proxied_server();
    let (log, _guard) = log();
    let client = connect(settings(), &proxy.url()).await;
    let names = ["a", "b", "c", "d", "e", "f"];
    let failed = || -> usize {
        let lines = log.lines(&["renewal failed; retrying until the leases end"]);
        let holds = lines.iter().filter_map(|line| {
            let holds = line.split_once("holds=")?.1.split(' ').next()?;
            holds.parse::<usize>().ok()
        });
        holds.sum()
    };
    // Until the outage begins before the first renewal of the first lock, which is due after a second.
    let held = loop {
        let (mut held, began) = (Vec::new(), Instant::now());
        for name in names {
            held.push(Held::new(client.lock(name)).await);
            // Apart, so that their first renewals are separate batches.
            tokio::time::sleep(Duration::from_millis(120)).await;
        }
        cut_off(&proxy);
        if began.elapsed() < Duration::from_millis(950) {
            break held;
        }
        proxy.refuse(false);
        drop(held);
        within_limit("released", client.flush()).await;
    };
    let before = failed();
    // The first renewal of each.
    until("failed", async || failed() >= before + names.len()).await;
    proxy.refuse(false);
    until_tracked(&[&server], names.len()).await;
    names.iter().for_each(|name| delete(&server, name));
    await_losses(held).await;
}

/// A server that refuses is asked once, and locks are renewed as without.
#[tokio::test]
async fn refused_tracking_changes_nothing() {
    let server = Server::start();
    forbid_tracking(&server);
    let (log, _guard) = log();
    let client = connect(renewing(), &server.url()).await;
    let guard = held(&client.lock("lock")).await;
    let left = || async { pttl(&server, "lock") };
    for _ in 0..2 {
        until_rises("the remaining lease", left).await;
    }
    assert!(guard.is_valid());
    assert_eq!(refusals(&log), 1);
    let denied: Vec<redis::Value> = server.command(&["ACL", "LOG"]);
    assert_eq!(denied.len(), 2, "TRACKING and CACHING, once each");
}

#[tokio::test]
async fn server_that_replaces_one_that_refused_is_asked() {
    let mut server = Server::start_durable();
    forbid_tracking(&server);
    let (log, _guard) = log();
    let client = connect(settings(), &server.url()).await;
    let held = Held::new(client.lock("lock")).await;
    until("it refuses", async || refusals(&log) == 1).await;
    // The new process has the data, and not the rules.
    server.kill();
    server.restart();
    retry_transient(|| async { client.lock("other").is_locked().await }).await;
    until_tracked(&[&server], 1).await;
    delete(&server, "lock");
    await_losses(vec![held]).await;
    assert_eq!(refusals(&log), 1);
}

fn forbid_tracking(server: &Server) {
    let rules = ["-client|tracking", "-client|caching"];
    let _: String = server.command(&[&["ACL", "SETUSER", "default"], &rules[..]].concat());
}

fn refusals(log: &Log) -> usize {
    let event = ["WARN", "the server does not report changed locks"];
    log.lines(&event).len()
}
