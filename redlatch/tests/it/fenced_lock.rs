//! What is the fenced lock's own: the token. What it has in common with the other locks is in
//! lock_kinds.rs.

use std::future::IntoFuture;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::{Client, Embedded, Error, Loss, Owner};
use redlatch_testkit::{Proxy, Server, unique};
use tokio::time::advance;

use crate::common::{Stand, assert_lost, in_time, soon, until, without_the_answer};

const SECOND: Duration = Duration::from_secs(1);

on_every_store! {
    every_acquisition_counts_one_up,
    tokens_grow_over_clients_reentry_expiry_and_force,
    a_try_in_vain_uses_no_token,
    tokens_are_in_the_order_of_the_acquisitions,
    it_keeps_out_the_lock_of_the_same_name,
    a_resource_that_checks_the_token_refuses_who_came_too_late,
}

/// Redisson: RedissonFencedLockTest.testTokenIncrease.
async fn every_acquisition_counts_one_up(stand: Stand) {
    let client = stand.client().await;
    let lock = client.fenced_lock(&unique("count"));
    assert_eq!(lock.current_token().await.unwrap(), 0);
    for expected in 1..=5 {
        let guard = match expected {
            1 | 2 => lock.lock().await.unwrap(),
            3 => lock.lock().lease(10 * SECOND).await.unwrap(),
            4 => lock.try_lock().await.unwrap().unwrap(),
            _ => lock.try_lock().wait(SECOND).await.unwrap().unwrap(),
        };
        assert_eq!(guard.token(), expected);
        assert_eq!(lock.current_token().await.unwrap(), expected);
        guard.unlock().await.unwrap();
        assert_eq!(lock.current_token().await.unwrap(), expected);
    }
}

async fn tokens_grow_over_clients_reentry_expiry_and_force(stand: Stand) {
    let (one, two) = (stand.client().await, stand.client().await);
    let name = unique("grow");
    let (lock, theirs) = (one.fenced_lock(&name), two.fenced_lock(&name));
    let mut tokens = Vec::new();

    let outer = lock.lock().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    tokens.extend([outer.token(), inner.token()]);
    // A guard keeps the token of its own acquisition.
    inner.unlock().await.unwrap();
    assert_eq!(outer.token(), tokens[0]);
    let again = lock.lock().owner(outer.owner()).await.unwrap();
    tokens.push(again.token());
    again.unlock().await.unwrap();
    outer.unlock().await.unwrap();

    let expired = in_time(|| theirs.lock().lease(SECOND / 5)).await;
    tokens.push(expired.token());
    let forced = soon("its lease ends", lock.lock().into_future())
        .await
        .unwrap();
    tokens.push(forced.token());
    assert!(theirs.force_unlock().await.unwrap());
    let last = theirs.lock().await.unwrap();
    tokens.push(last.token());

    assert!(
        tokens.is_sorted_by(|early, late| early < late),
        "{tokens:?}"
    );
    assert_eq!(lock.current_token().await.unwrap(), last.token());
    last.unlock().await.unwrap();
}

async fn a_try_in_vain_uses_no_token(stand: Stand) {
    let client = stand.client().await;
    let lock = client.fenced_lock(&unique("vain"));
    let guard = lock.lock().await.unwrap();
    for _ in 0..5 {
        assert!(lock.try_lock().await.unwrap().is_none());
    }
    let refused = lock.try_lock().wait(SECOND / 50).await.unwrap();
    assert!(refused.is_none());
    assert_eq!(lock.current_token().await.unwrap(), guard.token());
    guard.unlock().await.unwrap();
}

async fn tokens_are_in_the_order_of_the_acquisitions(stand: Stand) {
    let name = unique("order");
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let client = stand.client().await;
        for _ in 0..5 {
            let (lock, tokens) = (client.fenced_lock(&name), tokens.clone());
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = lock.lock().await.unwrap();
                    tokens.lock().unwrap().push(guard.token());
                    guard.unlock().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        soon("every turn", task).await.unwrap();
    }
    let tokens = tokens.lock().unwrap();
    assert_eq!(*tokens, (1..=200).collect::<Vec<u64>>());
}

/// The same key: with and without a token, they keep each other out.
async fn it_keeps_out_the_lock_of_the_same_name(stand: Stand) {
    let (one, two) = (stand.client().await, stand.client().await);
    let name = unique("same");
    let (plain, fenced) = (one.lock(&name), two.fenced_lock(&name));
    let guard = plain.lock().await.unwrap();
    assert!(fenced.try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn(fenced.lock().into_future());
    until("it waits", || async { two.status().subscriptions == 1 }).await;
    guard.unlock().await.unwrap();
    let guard = soon("woken", waiting).await.unwrap().unwrap();
    assert_eq!(guard.token(), 1);
    assert!(plain.try_lock().await.unwrap().is_none());
    // One owner that used both would count its holds twice.
    let me = guard.owner();
    let mixed = two.lock(&name).lock().owner(me).await.unwrap_err();
    assert!(matches!(mixed, Error::WrongKind { .. }), "{mixed}");
    guard.unlock().await.unwrap();
}

/// The token's key is where Redisson has it, and never expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_is_kept_where_redisson_keeps_it() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let key = "redisson_lock_token:{orders:42}";
    let _: () = server.ask(&["SET", key, "41"]);
    let lock = client.fenced_lock("orders:42");
    assert_eq!(lock.current_token().await.unwrap(), 41);
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.token(), 42);
    guard.unlock().await.unwrap();
    assert_eq!(server.ask::<String>(&["GET", key]), "42");
    assert_eq!(server.ask::<i64>(&["PTTL", key]), -1);
    assert_eq!(server.ask::<Vec<String>>(&["KEYS", "*"]), [key]);
    // Forgotten by hand it begins anew.
    let _: i64 = server.ask(&["DEL", key]);
    assert_eq!(lock.current_token().await.unwrap(), 0);
    assert_eq!(lock.lock().await.unwrap().token(), 1);
}

/// Something else in the token's place is an error, and stays as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_is_none_is_an_error() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock("a");
    let key = "redisson_lock_token:{a}";
    for planted in [
        &["SET", key, "precious"][..],
        &["RPUSH", key, "precious"],
        &["SET", key, "9223372036854775807"],
    ] {
        let _: redis::Value = server.ask(planted);
        let before: Vec<u8> = server.ask(&["DUMP", key]);
        assert!(lock.lock().await.is_err());
        soon("settled", client.settled()).await;
        assert_eq!(server.ask::<Vec<u8>>(&["DUMP", key]), before);
        assert!(!lock.is_locked().await.unwrap(), "held without a token");
        assert_eq!(client.status().holds, 0);
        let _: i64 = server.ask(&["DEL", key]);
    }
    assert_eq!(lock.lock().await.unwrap().token(), 1);
}

/// A server that refuses to count says why itself: it is full, or takes no writes. The key is not to
/// blame.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server_is_not_taken_for_a_bad_token() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock("full");
    let before = in_time(|| lock.lock()).await;
    let token = before.token();
    let () = server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = before.reenter().await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    before.unlock().await.unwrap();
    let error = lock.lock().await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    let () = server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    let after = in_time(|| lock.lock()).await;
    assert!(after.token() > token);
    after.unlock().await.unwrap();
}

/// Tokens are exact over their whole range, and what is none is told as one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_beyond_the_exact_floats_are_exact() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock("a");
    let key = "redisson_lock_token:{a}";
    let () = server.ask(&["SET", key, "9007199254740992"]);
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.token(), 9_007_199_254_740_993);
    assert_eq!(lock.current_token().await.unwrap(), 9_007_199_254_740_993);
    guard.unlock().await.unwrap();
    for planted in ["precious", "9223372036854775807"] {
        let () = server.ask(&["SET", key, planted]);
        let error = lock.lock().await.unwrap_err();
        assert!(matches!(error, Error::WrongKind { .. }), "{error}");
    }
    assert_eq!(lock.current_token().await.unwrap(), i64::MAX as u64);
    let () = server.ask(&["SET", key, "precious"]);
    let error = lock.current_token().await.unwrap_err();
    assert!(matches!(error, Error::WrongKind { .. }), "{error}");
}

/// An acquisition whose answer is lost with the connection is sent again, and is the same one: it
/// keeps its token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquisition_whose_answer_is_lost_keeps_its_token() {
    let server = Server::start();
    let proxy = Arc::new(Proxy::to(server.port()));
    let client = Client::connect(&proxy.url()).await.unwrap();
    let lock = client.fenced_lock("a");
    lock.run(async {}).await.unwrap();
    let mut expected = 1;
    for _ in 0..5 {
        expected += 1;
        let outer = without_the_answer(&proxy, lock.lock().into_future())
            .await
            .unwrap();
        assert_eq!(outer.token(), expected);
        expected += 1;
        let inner = without_the_answer(&proxy, outer.reenter().into_future())
            .await
            .unwrap();
        assert_eq!(inner.token(), expected);
        without_the_answer(&proxy, inner.unlock()).await.unwrap();
        without_the_answer(&proxy, outer.unlock()).await.unwrap();
        assert_eq!(lock.current_token().await.unwrap(), expected);
    }
}

/// What is to be protected: it remembers the greatest token it has seen, and looks at it in the
/// same step in which it writes.
#[derive(Default)]
struct Resource {
    newest: Mutex<u64>,
    written: Mutex<Vec<u64>>,
    refused: AtomicU64,
}

impl Resource {
    fn write(&self, token: u64) -> bool {
        let mut newest = self.newest.lock().unwrap();
        if token < *newest {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return false;
        }
        *newest = token;
        self.written.lock().unwrap().push(token);
        true
    }
}

/// F28: the lease of a holder ends while it does something else; the next one has it and writes.
/// The write of the first is refused, and its guard has told it so before.
async fn a_resource_that_checks_the_token_refuses_who_came_too_late(stand: Stand) {
    let (one, two) = (stand.client().await, stand.client().await);
    let name = unique("resource");
    let resource = Resource::default();

    let fenced = one.fenced_lock(&name);
    let paused = in_time(|| fenced.lock().lease(SECOND / 5)).await;
    assert!(resource.write(paused.token()));
    let next = soon(
        "the lease ends",
        two.fenced_lock(&name).lock().into_future(),
    )
    .await
    .unwrap();
    assert!(resource.write(next.token()));

    assert!(!paused.is_valid(), "says so before the write");
    assert!(!resource.write(paused.token()), "an update was lost");
    assert!(resource.write(next.token()));
    let paused_token = paused.token();
    let lost = paused.unlock().await.unwrap_err();
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    let (first, second) = (paused_token, next.token());
    assert_eq!(
        *resource.written.lock().unwrap(),
        [first, second, second],
        "in the order of the tokens"
    );
    next.unlock().await.unwrap();
}

/// F28, on waking: the process stood still for longer than its lease, and no timer has run yet.
#[tokio::test(start_paused = true)]
async fn a_holder_that_stood_still_knows_it_on_waking() {
    let store = Embedded::new();
    let client = || Client::builder().connect_embedded(&store).unwrap();
    let (one, two) = (client(), client());
    let resource = Resource::default();
    let paused = one.fenced_lock("a").lock().lease(SECOND).await.unwrap();
    assert!(paused.is_valid() && resource.write(paused.token()));

    // Nothing of this process runs in here; the other one's goes on.
    advance(2 * SECOND).await;
    let next = two.fenced_lock("a").try_lock().await.unwrap().unwrap();
    assert!(resource.write(next.token()));

    assert!(!paused.is_valid());
    let written = paused.run(async { resource.write(paused.token()) }).await;
    assert_lost(&written.unwrap_err(), Loss::LeaseEnded);
    assert_eq!(
        resource.refused.load(Ordering::SeqCst),
        0,
        "it did not try to"
    );
    assert!(
        !resource.write(paused.token()),
        "who does not ask is refused"
    );
    next.unlock().await.unwrap();
}

/// An owner that has lost its hold and asks again has a new token: the old one is of no use to it.
#[tokio::test(start_paused = true)]
async fn who_lost_it_comes_back_with_a_new_token() {
    let client = Client::embedded();
    let lock = client.fenced_lock("a");
    let me = Owner::new();
    let lost = lock.lock().owner(me).lease(SECOND).await.unwrap();
    advance(2 * SECOND).await;
    let anew = lock.lock().owner(me).await.unwrap();
    assert_eq!((lost.token(), anew.token()), (1, 2));
    drop(lost);
    client.settled().await;
    assert!(lock.is_held_by(me).await.unwrap());
    anew.unlock().await.unwrap();
}
