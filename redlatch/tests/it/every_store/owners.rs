//! One owner that many tasks use at the same time, or again right after a release: earlier requests
//! do not affect later ones.

use crate::common::prelude::*;

on_every_store! {
    tasks_of_an_owner_see_no_false_loss,
    tasks_of_a_queueing_owner_see_no_false_loss,
    token_of_dropped_guard_is_not_reused,
    token_of_dropped_inner_guard_is_not_reused,
    owner_can_write_right_after_dropping_read_guard,
    lease_of_dropped_guard_does_not_outlive_the_next,
    waiting_writer_that_reads_is_refused_immediately,
}

async fn tasks_of_an_owner_see_no_false_loss(store: TestStore) {
    let [ours, theirs] = store.clients().await;
    let name = unique("storm");
    contend(ours.lock(&name), theirs.lock(&name)).await;
}

async fn tasks_of_a_queueing_owner_see_no_false_loss(store: TestStore) {
    let [ours, theirs] = store.clients().await;
    let name = unique("storm");
    contend(ours.fair_lock(&name), theirs.fair_lock(&name)).await;
}

/// Tasks of one owner and of several owners, all for one lock. The false loss occurred when two
/// guards were released, one settled for both, and a third acquisition came between that and the
/// other guard's settling.
async fn contend<K: OwnedKind>(ours: Lock<K>, theirs: Lock<K>) {
    let me = Owner::new();
    let stop = Arc::new(AtomicBool::new(false));
    let task = |lock: &Lock<K>, owner: Option<Owner>| {
        let (lock, stop) = (lock.clone(), stop.clone());
        tokio::spawn(async move {
            let mut turns = 0;
            while turns < 150 && !stop.load(Ordering::SeqCst) {
                let owner = owner.unwrap_or_else(Owner::new);
                let guard = lock.lock().owner(owner).await.unwrap();
                tokio::task::yield_now().await;
                if let Err(error) = guard.unlock().await {
                    stop.store(true, Ordering::SeqCst);
                    panic!("{error}");
                }
                turns += 1;
            }
        })
    };
    let mut tasks: Vec<_> = (0..6).map(|_| task(&ours, Some(me))).collect();
    tasks.extend((0..3).map(|_| task(&theirs, None)));
    done_all("all have had their turns", tasks).await;
}

async fn token_of_dropped_guard_is_not_reused(store: TestStore) {
    let lock = store.client().await.fenced_lock(&unique("token"));
    let (me, mut last) = (Owner::new(), 0);
    for _ in 0..50 {
        let guard = lock.lock().owner(me).await.unwrap();
        assert!(guard.token() > last, "{} after {last}", guard.token());
        last = guard.token();
        // Released in the background; the next round does not wait for it.
        drop(guard);
    }
}

async fn token_of_dropped_inner_guard_is_not_reused(store: TestStore) {
    let lock = store.client().await.fenced_lock(&unique("token"));
    let outer = held(&lock).await;
    let mut last = outer.token();
    for _ in 0..50 {
        let inner = outer.reenter().await.unwrap();
        assert!(inner.token() > last, "{} after {last}", inner.token());
        last = inner.token();
        drop(inner);
    }
}

async fn owner_can_write_right_after_dropping_read_guard(store: TestStore) {
    let lock = store.client().await.read_write_lock(&unique("sides"));
    let me = Owner::new();
    for _ in 0..50 {
        drop(lock.read().lock().owner(me).await.unwrap());
        let writer = within_limit("written", lock.write().lock().owner(me)).await;
        free(writer.unwrap()).await;
    }
}

async fn lease_of_dropped_guard_does_not_outlive_the_next(store: TestStore) {
    let client = store.client().await;
    let (lock, me) = (client.lock(&unique("lease")), Owner::new());
    drop(lock.lock().owner(me).lease(60 * LONG).await.unwrap());
    let guard = lock.lock().owner(me).lease(LONG).await.unwrap();
    client.flush().await;
    let left = lease_left(&lock).await;
    assert!(
        left <= LONG,
        "a client that dies now blocks others for {left:?}"
    );
    free(guard).await;
}

async fn waiting_writer_that_reads_is_refused_immediately(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("sides");
    let other = held(&two.read_write_lock(&name).read()).await;
    let (lock, me) = (one.read_write_lock(&name), Owner::new());
    let writing = waiter_of(&one, lock.write().lock().owner(me)).await;
    let reader = lock.read().lock().owner(me).await.unwrap();
    let answer = done("answered", writing).await;
    assert_matches!(answer, Err(Error::WriteWhileReading { .. }));
    free(reader).await;
    free(other).await;
}

/// A waiting reader that requests the write side in another task does not wait behind a waiter that
/// waits for it.
#[tokio::test(start_paused = true)]
async fn waiting_reader_that_writes_is_served_immediately() {
    let [one, two] = embedded_clients();
    let everybody_waits = || tokio::time::sleep(Duration::from_millis(10));
    let guard = held(&two.read_write_lock("a").write()).await;
    let (lock, me) = (one.read_write_lock("a").prefer_writers(), Owner::new());
    let writing = tokio::spawn(lock.write().lock().owner(me).into_future());
    everybody_waits().await;
    // First in the queue of readers, and yields to a waiting writer.
    let first = tokio::spawn(lock.read().lock().into_future());
    everybody_waits().await;
    let reading = tokio::spawn(lock.read().lock().owner(me).into_future());
    everybody_waits().await;
    free(guard).await;
    let writer = writing.await.unwrap().unwrap();
    let reader = done("does not wait for itself", reading).await;
    free(reader.unwrap()).await;
    free(writer).await;
    drop(joined("read", first).await);
}

/// An owner of a fair lock that lost it by force retries immediately, and does not sleep as long
/// as its local queue expects the old lease to last.
#[tokio::test(start_paused = true)]
async fn owner_reacquires_fair_lock_right_after_force_unlock() {
    let store = Embedded::new();
    let client = || {
        let settings = Client::builder().subscription_linger(LONG);
        settings.connect_embedded(&store).unwrap()
    };
    let (one, two) = (client(), client());
    let (lock, me) = (one.fair_lock("a"), Owner::new());
    let held = two.fair_lock("a").lock().await.unwrap();
    let waiting = tokio::spawn(lock.lock().owner(me).into_future());
    until("queued", async || lock.queue().await.unwrap().len() == 1).await;
    free(held).await;
    let guard = waiting.await.unwrap().unwrap();
    assert!(two.fair_lock("a").force_unlock().await.unwrap());
    guard.lost().await;
    drop(guard);
    one.flush().await;
    let begun = tokio::time::Instant::now();
    let again = lock.lock().owner(me).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "it was free");
    free(again).await;
}

/// If the connection breaks before a forced unlock is answered, it is not repeated: another owner
/// may hold the lock by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_unlock_is_not_repeated_against_next_holder() {
    let (server, proxy, forcer) = proxied_client().await;
    let holder = Client::connect(&server.url()).await.unwrap();
    let lock = holder.lock("a");
    let first = held(&lock).await;
    // Loads the script on the server.
    assert!(!forcer.lock("b").force_unlock().await.unwrap());
    proxy.lose_next_answer();
    let forced = forcer.lock("a");
    let force = tokio::spawn(async move { forced.force_unlock().await });
    until("unlocked", async || !lock.is_locked().await.unwrap()).await;
    let next = held(&lock).await;
    proxy.wait_until_lost();
    proxy.cut();
    let said = done("answered", force).await;
    assert_matches!(said, Err(Error::OutcomeUnknown { .. }));
    assert!(lock.is_held_by(next.owner()).await.unwrap());
    free(next).await;
    drop(first);
}
