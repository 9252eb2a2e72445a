//! Tests of the spin lock, which polls instead of waiting for messages. The behavior that it shares
//! with other locks is tested in lock_kinds.rs.

use redlatch::{Backoff, SpinLock};
use tokio::time::Instant;

use crate::common::prelude::*;

on_every_store! {
    spin_lock_and_plain_lock_share_their_key,
    woken_and_spinning_waiters_take_turns,
    owner_cannot_mix_spin_lock_and_plain_lock,
}

/// Returns how often a server executed these commands, including calls in scripts.
fn calls(server: &Server, commands: &[&str]) -> u64 {
    let calls = |name: &&str| server.calls(&format!("{name}:"));
    commands.iter().map(calls).sum()
}

fn script_calls(server: &Server) -> u64 {
    calls(server, &["eval", "evalsha"])
}

/// It never subscribes and never publishes: not when it waits, gives up, releases, loses or drops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spin_lock_never_subscribes_and_never_publishes() {
    let server = Server::start();
    let (one, two) = (client(&server).await, client(&server).await);
    let mut tasks = Vec::new();
    for (task, client) in [&one, &two].repeat(10).into_iter().enumerate() {
        let lock = client.spin_lock("a");
        tasks.push(tokio::spawn(async move {
            for turn in 0..5 {
                let guard = lock.lock().await.unwrap();
                let inner = guard.reenter().await.unwrap();
                match (task + turn) % 3 {
                    0 => drop(inner),
                    _ => free(inner).await,
                }
                match (task + turn) % 2 {
                    0 => drop(guard),
                    _ => free(guard).await,
                }
            }
        }));
    }
    done_all("every turn", tasks).await;
    let fixed = one.spin_lock("a").lock().lease(SHORT).await.unwrap();
    let refused = retry_if_late(|| two.spin_lock("a").try_lock().wait(SECOND / 20)).await;
    assert!(refused.is_none());
    let next = done("the lease ends", two.spin_lock("a").lock()).await;
    drop(fixed);
    free(next).await;
    within_limit("settled", one.flush()).await;

    assert!(script_calls(&server) > 200, "the scripts are counted");
    let pubsub = ["subscribe", "ssubscribe", "psubscribe"];
    assert_eq!(calls(&server, &pubsub), 0);
    assert_eq!(calls(&server, &["publish", "spublish"]), 0);
    let subscriptions = [&one, &two].map(|client| client.status().subscriptions);
    assert_eq!(subscriptions, [0, 0]);
    // The same counters show the commands of the plain lock.
    let held = one.lock("b").lock().await.unwrap();
    let waiting = tokio::spawn(two.lock("b").lock().into_future());
    until("it is subscribed", async || calls(&server, &pubsub) == 1).await;
    free(held).await;
    drop(joined("woken", waiting).await);
    assert!(calls(&server, &["publish", "spublish"]) >= 1);
}

/// Of fifty waiters of one client, one polls, and pauses in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_waiter_per_client_asks_the_server() {
    const WAITERS: u64 = 50;
    const PAUSE: Duration = Duration::from_millis(25);
    let server = Server::start();
    let holder = unregistered_client(&server).await;
    let crowd = unregistered_client(&server).await;
    let guard = held(&holder.spin_lock("a")).await;
    let spin = crowd.spin_lock("a").backoff(Backoff::constant(PAUSE));
    let waiters = spawn_each(0..WAITERS, |_| {
        let lock = spin.clone();
        async move { free(held(&lock).await).await }
    });
    // Each waiter that starts before the local queue exists sends one request.
    let before = script_calls(&server);
    let arrived = async || script_calls(&server) > before + WAITERS;
    until("all have arrived and one keeps polling", arrived).await;
    let (begun, before) = (std::time::Instant::now(), script_calls(&server));
    let polls = async || script_calls(&server) >= before + 20;
    until("it polls repeatedly", polls).await;
    let often = (script_calls(&server) - before) as f64;
    let pauses = begun.elapsed().as_secs_f64() / PAUSE.as_secs_f64();
    assert!(often <= pauses + 2.0, "{often} times in {pauses} pauses");
    free(guard).await;
    done_all("served", waiters).await;
}

/// Both kinds use one key, so they exclude each other. A waiter of the spin lock notices every release.
async fn spin_lock_and_plain_lock_share_their_key(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("both");
    let (plain, spin) = (one.lock(&name), two.spin_lock(&name));

    let guard = held(&plain).await;
    assert!(spin.try_lock().await.unwrap().is_none());
    let holder = spin.holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, guard.owner_id());
    let waiting = tokio::spawn(spin.lock().into_future());
    free(guard).await;
    let guard = joined("seen", waiting).await;

    assert!(plain.try_lock().await.unwrap().is_none());
    assert!(plain.is_locked().await.unwrap());
    free(guard).await;
    drop(plain.try_lock().await.unwrap().expect("it is free"));
}

/// Releasing a spin lock wakes no waiter of a plain lock: at worst, that waiter retries when the
/// lease would have ended. A forced unlock does wake it.
async fn woken_and_spinning_waiters_take_turns(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("turns");
    let (plain, spin) = (one.lock(&name), two.spin_lock(&name));
    let guard = spin.lock().lease(SHORT).await.unwrap();
    let waiting = waiter_of(&one, plain.lock()).await;
    free(guard).await;
    free(joined("it retries", waiting).await).await;

    let guard = spin.lock().lease(10 * LONG).await.unwrap();
    let waiting = waiter_of(&one, plain.lock()).await;
    assert!(spin.force_unlock().await.unwrap());
    let next = joined("woken", waiting).await;
    assert!(guard.unlock().await.is_err());
    free(next).await;
}

/// Both kinds would share one hold, and whether its release is published would depend on the first
/// acquisition.
async fn owner_cannot_mix_spin_lock_and_plain_lock(store: TestStore) {
    let (client, me) = (store.client().await, Owner::new());
    let name = unique("ways");
    let (plain, spin) = (client.lock(&name), client.spin_lock(&name));

    let guard = spin.lock().owner(me).await.unwrap();
    assert_matches!(plain.lock().owner(me).await, Err(Error::WrongKind { .. }));
    assert_eq!(guard.hold_count(), 1);
    free(guard).await;

    let guard = plain.lock().owner(me).await.unwrap();
    let mixed = spin.try_lock().owner(me).await;
    assert_matches!(mixed, Err(Error::WrongKind { .. }));
    free(guard).await;
    // Using one kind after the other is allowed.
    let guard = spin.try_lock().owner(me).await.unwrap();
    free(guard.expect("it is free")).await;
}

/// Returns when a waiter of a spin lock acquires a lock that was released after `held`.
async fn served_after(held: Duration, backoff: Backoff) -> Duration {
    let [holder, other] = embedded_clients();
    let begun = Instant::now();
    let guard = holder.lock("a").lock().await.unwrap();
    let spin: SpinLock = other.spin_lock("a").backoff(backoff);
    let waiting = tokio::spawn(spin.lock().into_future());
    sleep(held).await;
    assert!(!waiting.is_finished());
    free(guard).await;
    let next = waiting.await.unwrap().unwrap();
    let took = begun.elapsed();
    free(next).await;
    took
}

/// Redisson: LockOptionsTest.testConstantBackoff.
#[tokio::test(start_paused = true)]
async fn constant_backoff_asks_at_even_intervals() {
    let backoff = Backoff::constant(10 * SECOND);
    for (held, expected) in [(1, 10), (9, 10), (25, 30), (61, 70)] {
        let took = served_after(held * SECOND, backoff).await;
        let due = expected * SECOND..expected * SECOND + SECOND / 10;
        assert!(
            due.contains(&took),
            "held for {held} s, served after {took:?}"
        );
    }
}

/// Redisson: LockOptionsTest.testExponentialBackoff. The pauses double, each reduced by up to half,
/// so after n of them between half of 2^n s and 2^n s have passed.
#[tokio::test(start_paused = true)]
async fn exponential_backoff_grows_up_to_its_limit() {
    let longest = 16 * SECOND;
    let backoff = Backoff::exponential(SECOND, 2.0, longest);
    for _ in 0..20 {
        // Frequent attempts in the beginning …
        let took = served_after(SECOND / 10, backoff).await;
        assert!(took <= SECOND + SECOND / 10, "{took:?}");
        // … and at least this frequent in the end.
        let held = 600 * SECOND;
        let took = served_after(held, backoff).await - held;
        assert!(took <= longest + SECOND / 10, "{took:?}");
    }
    // The delay after the release is at most the longest pause.
    let mut late = 0;
    for n in 0..20 {
        let held = (600 + n) * SECOND;
        let took = served_after(held, backoff).await - held;
        late += u32::from(took > 2 * SECOND);
    }
    assert!(late >= 5, "asked as often as in the beginning");
}

/// The default: at most 128 ms between two attempts, however much time has passed.
#[tokio::test(start_paused = true)]
async fn default_backoff_asks_eight_times_a_second() {
    for hours in [1, 4] {
        let held = hours * Duration::from_secs(3600);
        let took = served_after(held, Backoff::default()).await - held;
        assert!(took <= Duration::from_millis(130), "{took:?}");
    }
}

/// The wait limit has priority over pauses: a limit shorter than the next pause ends on time.
#[tokio::test(start_paused = true)]
async fn wait_limit_ends_within_a_pause() {
    let client = Client::embedded();
    let lock = client.spin_lock("a").backoff(Backoff::constant(HOUR));
    let guard = held(&lock).await;
    let begun = Instant::now();
    assert!(lock.try_lock().wait(SECOND).await.unwrap().is_none());
    assert_took(begun.elapsed(), SECOND..2 * SECOND);
    free(guard).await;
}

/// In one client, a waiter of a spin lock does not queue behind a waiter of a plain lock.
#[tokio::test(start_paused = true)]
async fn spinning_waiter_does_not_queue_behind_plain_waiters() {
    let [holder, both] = embedded_clients();
    let guard = held(&holder.spin_lock("a")).await;
    let plain = both.lock("a");
    let waiting = tokio::spawn(async move { held(&plain).await.unlock().await });
    sleep(SECOND).await;
    let spinning = tokio::spawn(both.spin_lock("a").lock().into_future());
    sleep(SECOND).await;
    let begun = Instant::now();
    free(guard).await;
    let next = spinning.await.unwrap().unwrap();
    assert!(begun.elapsed() <= SECOND, "{:?}", begun.elapsed());
    free(next).await;
    waiting.await.unwrap().unwrap();
}

/// A waiter of a spin lock that is named like another lock's channel is not in that lock's queue.
#[tokio::test(start_paused = true)]
async fn queue_of_spinning_waiters_is_separate_from_channels() {
    let [holder, both] = embedded_clients();
    let odd = "redisson_lock__channel:{a}";
    let _held = held(&holder.spin_lock(odd)).await;
    let guard = held(&holder.lock("a")).await;
    let spinning = tokio::spawn(both.spin_lock(odd).lock().into_future());
    sleep(SECOND).await;
    let waiting = tokio::spawn(both.lock("a").lock().into_future());
    sleep(SECOND).await;
    // The status counts subscribed channels, not queues.
    assert_eq!(both.status().subscriptions, 1);
    free(guard).await;
    drop(joined("it is woken", waiting).await);
    spinning.abort();
}

#[tokio::test(start_paused = true)]
async fn pause_beyond_clock_range_is_unlimited() {
    let client = Client::embedded();
    let _held = held(&client.lock("a")).await;
    let endless = Backoff::constant(Duration::MAX);
    let lock = client.spin_lock("a").backoff(endless);
    assert!(lock.try_lock().wait(SECOND).await.unwrap().is_none());
    let lock = RedLock::new([client.lock("a")]).backoff(endless);
    let unnamed = lock.try_lock().wait(SECOND).await.unwrap();
    let named = lock.try_lock().owner(Owner::new()).wait(SECOND).await;
    assert!(unnamed.is_none() && named.unwrap().is_none());
}
