//! Tests of the fencing token. The behavior that the fenced lock shares with other locks is tested
//! in lock_kinds.rs.

use tokio::time::advance;

use redlatch::MAX_TOKEN;

use crate::common::prelude::*;

on_every_store! {
    every_acquisition_increments_the_token,
    tokens_grow_across_clients_reentry_expiry_and_force_unlock,
    failed_try_lock_uses_no_token,
    tokens_follow_the_order_of_acquisitions,
    fenced_lock_excludes_plain_lock_of_the_same_name,
    resource_that_checks_tokens_refuses_late_writer,
    tokens_by_the_clock_grow_in_all_ways_to_acquire,
}

/// Redisson: RedissonFencedLockTest.testTokenIncrease.
async fn every_acquisition_increments_the_token(store: TestStore) {
    let (_client, lock) = store.object(Client::fenced_lock, "count").await;
    assert_eq!(lock.current_token().await.unwrap(), 0);
    for expected in 1..=5 {
        let guard = match expected {
            1 | 2 => held(&lock).await,
            3 => lock.lock().lease(10 * SECOND).await.unwrap(),
            4 => lock.try_lock().await.unwrap().unwrap(),
            _ => lock.try_lock().wait(SECOND).await.unwrap().unwrap(),
        };
        assert_eq!(guard.token(), expected);
        assert_eq!(lock.current_token().await.unwrap(), expected);
        free(guard).await;
        assert_eq!(lock.current_token().await.unwrap(), expected);
    }
}

async fn tokens_grow_across_clients_reentry_expiry_and_force_unlock(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("grow");
    let (lock, theirs) = (one.fenced_lock(&name), two.fenced_lock(&name));
    let mut tokens = Vec::new();

    let me = Owner::new();
    let outer = lock.lock().owner(me).await.unwrap();
    let inner = outer.reenter().await.unwrap();
    tokens.extend([outer.token(), inner.token()]);
    // A guard keeps the token of its own acquisition.
    free(inner).await;
    assert_eq!(outer.token(), tokens[0]);
    let again = lock.lock().owner(me).await.unwrap();
    tokens.push(again.token());
    free(again).await;
    free(outer).await;

    let expired = retry_if_late(|| theirs.lock().lease(SECOND / 5)).await;
    tokens.push(expired.token());
    let forced = done("its lease ends", lock.lock()).await;
    tokens.push(forced.token());
    assert!(theirs.force_unlock().await.unwrap());
    let last = held(&theirs).await;
    tokens.push(last.token());

    let is_sorted = tokens.is_sorted_by(|early, late| early < late);
    assert!(is_sorted, "{tokens:?}");
    assert_eq!(lock.current_token().await.unwrap(), last.token());
    free(last).await;
}

async fn failed_try_lock_uses_no_token(store: TestStore) {
    let (_client, lock) = store.object(Client::fenced_lock, "vain").await;
    let guard = held(&lock).await;
    for _ in 0..5 {
        assert!(lock.try_lock().await.unwrap().is_none());
    }
    let refused = retry_if_late(|| lock.try_lock().wait(SECOND / 50)).await;
    assert!(refused.is_none());
    assert_eq!(lock.current_token().await.unwrap(), guard.token());
    free(guard).await;
}

async fn tokens_follow_the_order_of_acquisitions(store: TestStore) {
    let name = unique("order");
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let client = store.client().await;
        for _ in 0..5 {
            let (lock, tokens) = (client.fenced_lock(&name), tokens.clone());
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = held(&lock).await;
                    tokens.lock().unwrap().push(guard.token());
                    free(guard).await;
                }
            }));
        }
    }
    done_all("every turn", tasks).await;
    let tokens = tokens.lock().unwrap();
    assert_eq!((tokens.len(), tokens[0]), (200, 1));
    // A token may be missing: on a busy machine a waiter does not accept a transferred hold, and sends another request.
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

/// The same key: locks with and without a token exclude each other.
async fn fenced_lock_excludes_plain_lock_of_the_same_name(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("same");
    let (plain, fenced) = (one.lock(&name), two.fenced_lock(&name));
    let guard = held(&plain).await;
    assert!(fenced.try_lock().await.unwrap().is_none());
    let me = Owner::new();
    let waiting = waiter_of(&two, fenced.lock().owner(me)).await;
    free(guard).await;
    let guard = joined("woken", waiting).await;
    assert_eq!(guard.token(), 1);
    assert!(plain.try_lock().await.unwrap().is_none());
    // One owner that uses both would count its holds twice.
    let mixed = two.lock(&name).lock().owner(me).await.unwrap_err();
    assert_matches!(mixed, Error::WrongKind { .. });
    free(guard).await;
}

/// The token is stored under Redisson's key, and never expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_is_stored_in_redissons_key() {
    let (server, client) = server_and_client().await;
    let key = "redisson_lock_token:{orders:42}";
    let _: () = server.command(&["SET", key, "41"]);
    let lock = client.fenced_lock("orders:42");
    assert_eq!(lock.current_token().await.unwrap(), 41);
    let guard = held(&lock).await;
    assert_eq!(guard.token(), 42);
    free(guard).await;
    assert_eq!(server.command::<String>(&["GET", key]), "42");
    assert_eq!(pttl(&server, key), -1);
    assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), [key]);
    // Deleted by hand, it starts again.
    let _: i64 = server.command(&["DEL", key]);
    assert_eq!(lock.current_token().await.unwrap(), 0);
    assert_eq!(held(&lock).await.token(), 1);
}

/// Foreign data in the token's key causes an error, and stays unchanged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_token_is_an_error() {
    let (server, client) = server_and_client().await;
    let lock = client.fenced_lock("a");
    let key = "redisson_lock_token:{a}";
    for foreign in [
        &["SET", key, "precious"][..],
        &["RPUSH", key, "precious"],
        &["SET", key, "9223372036854775807"],
    ] {
        let _: redis::Value = server.command(foreign);
        let before: Vec<u8> = server.command(&["DUMP", key]);
        assert!(lock.lock().await.is_err());
        within_limit("settled", client.flush()).await;
        assert_eq!(server.command::<Vec<u8>>(&["DUMP", key]), before);
        assert!(!lock.is_locked().await.unwrap(), "held without a token");
        assert_eq!(client.status().holds, 0);
        let _: i64 = server.command(&["DEL", key]);
    }
    assert_eq!(held(&lock).await.token(), 1);
}

/// A server that refuses to increment reports its own reason: it is full, or accepts no writes. The
/// error must not blame the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_error_is_not_reported_as_bad_token() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let lock = client.fenced_lock("full");
    let before = retry_if_late(|| lock.lock()).await;
    let token = before.token();
    let () = server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_matches!(before.reenter().await, Err(Error::Refused { .. }));
    free(before).await;
    assert_matches!(lock.lock().await, Err(Error::Refused { .. }));
    let () = server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    let after = retry_if_late(|| lock.lock()).await;
    assert!(after.token() > token);
    free(after).await;
}

/// Tokens are exact over their whole range, and an invalid token is reported as such.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_beyond_float_precision_are_exact() {
    let (server, client) = server_and_client().await;
    let lock = client.fenced_lock("a");
    let key = "redisson_lock_token:{a}";
    let () = server.command(&["SET", key, "9007199254740992"]);
    let guard = held(&lock).await;
    assert_eq!(guard.token(), 9_007_199_254_740_993);
    assert_eq!(lock.current_token().await.unwrap(), 9_007_199_254_740_993);
    free(guard).await;
    for foreign in ["precious", "9223372036854775807"] {
        let () = server.command(&["SET", key, foreign]);
        assert_matches!(lock.lock().await, Err(Error::WrongKind { .. }));
    }
    assert_eq!(lock.current_token().await.unwrap(), i64::MAX as u64);
    let () = server.command(&["SET", key, "precious"]);
    assert_matches!(lock.current_token().await, Err(Error::WrongKind { .. }));
}

/// An acquisition whose answer is lost with the connection is repeated, and remains the same
/// acquisition with the same token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquisition_with_lost_answer_keeps_its_token() {
    let (_server, proxy, client) = proxied_client().await;
    let lock = client.fenced_lock("a");
    lock.run(async {}).await.unwrap();
    let mut expected = 1;
    for _ in 0..5 {
        expected += 1;
        let outer = with_lost_answer(&proxy, lock.lock().into_future()).await;
        let outer = outer.unwrap();
        assert_eq!(outer.token(), expected);
        expected += 1;
        let inner = with_lost_answer(&proxy, outer.reenter().into_future()).await;
        let inner = inner.unwrap();
        assert_eq!(inner.token(), expected);
        with_lost_answer(&proxy, inner.unlock()).await.unwrap();
        with_lost_answer(&proxy, outer.unlock()).await.unwrap();
        assert_eq!(lock.current_token().await.unwrap(), expected);
    }
}

/// The protected resource: it remembers the greatest token that it has seen, and checks it in the
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

/// F28: the lease of a holder ends while it is busy; the next holder acquires the lock and writes.
/// The write of the first holder is refused, and its guard has reported the loss before.
async fn resource_that_checks_tokens_refuses_late_writer(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("resource");
    let resource = Resource::default();

    let fenced = one.fenced_lock(&name);
    let paused = retry_if_late(|| fenced.lock().lease(SECOND / 5)).await;
    assert!(resource.write(paused.token()));
    let next = done("the lease ends", two.fenced_lock(&name).lock()).await;
    assert!(resource.write(next.token()));

    assert!(!paused.is_valid(), "says so before the write");
    assert!(!resource.write(paused.token()), "an update was lost");
    assert!(resource.write(next.token()));
    let paused_token = paused.token();
    assert_matches!(paused.unlock().await, Err(Error::Lost { .. }));
    let (first, second) = (paused_token, next.token());
    let written = resource.written.lock().unwrap().clone();
    assert_eq!(written, [first, second, second]);
    free(next).await;
}

/// F28, on waking: the process paused for longer than its lease, and no timer has run yet.
#[tokio::test(start_paused = true)]
async fn paused_holder_knows_of_loss_on_waking() {
    let [one, two] = embedded_clients();
    let resource = Resource::default();
    let paused = one.fenced_lock("a").lock().lease(SECOND).await.unwrap();
    assert!(paused.is_valid() && resource.write(paused.token()));

    // No task of this process runs here; the other client's tasks do.
    advance(2 * SECOND).await;
    let next = two.fenced_lock("a").try_lock().await.unwrap().unwrap();
    assert!(resource.write(next.token()));

    assert!(!paused.is_valid());
    let written = paused.run(async { resource.write(paused.token()) }).await;
    assert_lost(written, Loss::LeaseEnded);
    // It did not try to. If it had not asked its guard, the resource would have refused it.
    assert_eq!(resource.refused.load(Ordering::SeqCst), 0);
    assert!(!resource.write(paused.token()));
    free(next).await;
}

/// An owner that has lost its hold and acquires again gets a new token: the old one would be
/// refused.
#[tokio::test(start_paused = true)]
async fn acquiring_again_after_loss_gets_a_new_token() {
    let client = Client::embedded();
    let lock = client.fenced_lock("a");
    let me = Owner::new();
    let lost = lock.lock().owner(me).lease(SECOND).await.unwrap();
    advance(2 * SECOND).await;
    let anew = lock.lock().owner(me).await.unwrap();
    assert_eq!((lost.token(), anew.token()), (1, 2));
    drop(lost);
    client.flush().await;
    assert!(lock.is_held_by(me).await.unwrap());
    free(anew).await;
}

/// Tokens of the clock, with which another handle counts on.
async fn tokens_by_the_clock_grow_in_all_ways_to_acquire(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("clock");
    let (lock, theirs) = (
        one.fenced_lock(&name).clock_tokens(),
        two.fenced_lock(&name).clock_tokens(),
    );
    let counting = two.fenced_lock(&name);
    let first = held(&counting).await;
    assert_eq!(first.token(), 1);
    free(first).await;
    let outer = lock.lock().owner(Owner::new()).await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let mut tokens = vec![OF_2023, outer.token(), inner.token()];
    free(inner).await;
    // To a waiter of this client, and to one of the other.
    let ours = waiter_of(&one, lock.lock().owner(Owner::new())).await;
    free(outer).await;
    let ours = joined("passed on", ours).await;
    tokens.push(ours.token());
    let waiting = waiter_of(&two, theirs.lock().owner(Owner::new())).await;
    free(ours).await;
    let guard = joined("released", waiting).await;
    tokens.push(guard.token());
    free(guard).await;
    for lock in [&counting, &lock, &counting] {
        tokens.push(lock.lock().lease(LONG).await.unwrap().token());
        until("released", async || !lock.is_locked().await.unwrap()).await;
    }
    let all = MultiLock::new([lock.clone(), one.fenced_lock(&unique("clock"))]);
    let all = all.lock().await.unwrap();
    tokens.push(all.token(&lock).unwrap());
    all.unlock().await.unwrap();
    let ticket = held(&lock).await.into_ticket().await.unwrap();
    let adopted = theirs.adopt(&ticket).await.unwrap();
    tokens.push(adopted.token());
    free(adopted).await;
    assert!(
        tokens.is_sorted_by(|early, late| early < late),
        "{tokens:?}"
    );
    let latest = tokens.last().copied();
    assert_eq!(Some(lock.current_token().await.unwrap()), latest);
    assert!(latest < Some(1 << 53));
}

/// A token of November 2023, in microseconds since 1970.
const OF_2023: u64 = 1_700_000_000_000_000;

/// The key expires a day after the latest acquisition, and tokens grow also if it was lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_by_the_clock_grow_after_lost_data_and_leave_no_key() {
    let (server, client) = server_and_client().await;
    let (lock, day) = (client.fenced_lock("a").clock_tokens(), 24 * 3_600_000);
    let key = "redisson_lock_token:{a}";
    let mut latest = OF_2023;
    for lose in [&["FLUSHALL"][..], &["DEL", key], &["SET", key, "7"]] {
        let guard = held(&lock).await;
        assert!(guard.token() > latest);
        latest = guard.token();
        let left = pttl(&server, key);
        assert!((day - 100_000..=day).contains(&left), "{left}");
        free(guard).await;
        assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), [key]);
        let _: redis::Value = server.command(lose);
    }
    // Another handle counts on, and does not postpone the expiry.
    let _: bool = server.command(&["PEXPIRE", key, "5000000"]);
    let counting = client.fenced_lock("a");
    free(held(&counting).await).await;
    assert_eq!(server.command::<String>(&["GET", key]), "8");
    assert!(pttl(&server, key) <= 5_000_000);
}

/// Numbers that are greater than the clock: the key outlives the time at which the clock reaches them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_by_the_clock_are_greater_than_numbers_that_were_set() {
    let (server, client) = server_and_client().await;
    let (lock, key) = (
        client.fenced_lock("a").clock_tokens(),
        "redisson_lock_token:{a}",
    );
    let year = 365 * 24 * 3_600_000;
    let far = held(&lock).await.token() + 1000 * year as u64;
    assert_eq!(lock.advance_token(far).await.unwrap(), far);
    assert_eq!(pttl(&server, key), -1);
    until("released", async || !lock.is_locked().await.unwrap()).await;
    let guard = held(&lock).await;
    assert_eq!(guard.token(), far + 1);
    assert!(pttl(&server, key) > year);
    free(guard).await;
    for number in [1 << 53, (1 << 53) + 1, MAX_TOKEN - 1] {
        lock.advance_token(number).await.unwrap();
        let guard = held(&lock).await;
        assert_eq!(guard.token(), number + 1);
        free(guard).await;
    }
    assert_matches!(lock.lock().await, Ok(guard) if guard.token() == MAX_TOKEN + 1);
    let error = lock.lock().await.unwrap_err().to_string();
    assert!(
        error.contains("not an integer that can be counted up"),
        "{error}"
    );
    until("released", async || !lock.is_locked().await.unwrap()).await;
    for foreign in [
        &["SET", key, "9223372036854775807"][..],
        &["SET", key, "precious"],
        &["HSET", key, "precious", "7"],
    ] {
        let _: i64 = server.command(&["DEL", key]);
        let _: redis::Value = server.command(foreign);
        let before: Vec<u8> = server.command(&["DUMP", key]);
        assert_matches!(lock.lock().await, Err(Error::WrongKind { .. }));
        assert_eq!(server.command::<Vec<u8>>(&["DUMP", key]), before);
        assert!(!lock.is_locked().await.unwrap(), "held without a token");
    }
}
