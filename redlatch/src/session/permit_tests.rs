//! Permits that pass from one request of a client to the next: the same tests for both kinds of semaphore, in virtual
//! time.

use std::future::IntoFuture as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::error::Result;
use crate::hold::Yields;
use crate::kind::Permits;
use crate::locks::{Acquirable, Acquire, Held as _};
use crate::store::embedded::failure_injection::Failure::{self, NoAnswer, NoEffect, NotSent};
use crate::test_prelude::{SECOND, run_others};
use crate::{Client, Embedded, ExpirableSemaphore, Guard, Lock, PermitId, Semaphore};

const MILLIS: Duration = Duration::from_millis(1);

/// What both kinds of semaphore can do.
trait Kind: Clone + Send + Sync + 'static {
    type Target: Acquirable;

    fn of(client: &Client) -> Self;
    fn acquire(&self, permits: u32) -> Acquire<Self::Target>;
    fn try_set(&self, permits: u32) -> impl Future<Output = Result<bool>> + Send;
    fn available(&self) -> impl Future<Output = Result<i64>> + Send;
    fn delete(&self) -> impl Future<Output = Result<bool>> + Send;
}

macro_rules! kind {
    ($semaphore:ident, $target:ty, $of:ident) => {
        impl Kind for $semaphore {
            type Target = $target;

            fn of(client: &Client) -> Self {
                client.$of("a")
            }

            fn acquire(&self, permits: u32) -> Acquire<$target> {
                self.acquire_many(permits)
            }

            async fn try_set(&self, permits: u32) -> Result<bool> {
                self.try_set_permits(permits).await
            }

            async fn available(&self) -> Result<i64> {
                self.available().await
            }

            async fn delete(&self) -> Result<bool> {
                self.delete().await
            }
        }
    };
}

kind!(Semaphore, Semaphore, semaphore);
kind!(ExpirableSemaphore, Lock<Permits>, expirable_semaphore);

/// Runs a test with both kinds.
macro_rules! with_both_kinds {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            #[tokio::test(start_paused = true)]
            async fn semaphore() {
                super::$test::<crate::Semaphore>().await;
            }

            #[tokio::test(start_paused = true)]
            async fn expirable_semaphore() {
                super::$test::<crate::ExpirableSemaphore>().await;
            }
        }
    )*};
}

with_both_kinds! {
    waiters_take_over_permits_of_released_or_dropped_guard,
    permits_pass_on_only_to_request_for_as_many,
    client_that_does_not_hand_over_releases,
    permits_that_were_held_for_long_are_released,
    each_waiter_takes_one_offer_and_the_rest_is_released,
    canceled_waiter_passes_permits_on,
    waiter_for_other_number_refuses_offer_and_loses_no_permit,
    waiter_for_fewer_permits_asks_the_store_after_offer,
    message_during_offer_is_not_lost,
    offer_that_is_not_taken_in_time_is_released,
    other_client_gets_its_turn,
    permits_of_deleted_semaphore_pass_on_briefly,
    random_cancellations_lose_no_permit,
}

type Waiting<K> = Pin<Box<dyn Future<Output = Result<Guard<<K as Kind>::Target>>> + Send>>;

/// Returns a semaphore with this many permits, of a client and of another client.
async fn semaphores<K: Kind>(permits: u32) -> (Client, K, K) {
    let store = Embedded::new();
    let [client, peer] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let (mine, theirs) = (K::of(&client), K::of(&peer));
    assert!(mine.try_set(permits).await.unwrap());
    (client, mine, theirs)
}

async fn acquire<K: Kind>(semaphore: &K, permits: u32) -> Guard<K::Target> {
    semaphore.acquire(permits).await.unwrap()
}

async fn release<R: Acquirable>(guard: Guard<R>) {
    guard.held.release().await.unwrap();
}

/// Polls a future once.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    tokio::time::timeout(Duration::ZERO, future).await.ok()
}

/// Starts a request that is not polled any more once it waits.
async fn parked<K: Kind>(semaphore: &K, permits: u32) -> Waiting<K> {
    let mut waiting = semaphore.acquire(permits).into_future();
    assert!(poll_once(&mut waiting).await.is_none());
    waiting
}

/// Starts a request and lets it join the queue.
async fn waiter<K: Kind>(semaphore: &K, permits: u32) -> JoinHandle<Result<Guard<K::Target>>> {
    let waiter = tokio::spawn(semaphore.acquire(permits).into_future());
    run_others().await;
    waiter
}

async fn available<K: Kind>(semaphore: &K) -> i64 {
    semaphore.available().await.unwrap()
}

/// Permits that are offered are not free, and those that are released are.
async fn waiters_take_over_permits_of_released_or_dropped_guard<K: Kind>() {
    for permits in [1, 3] {
        let (client, mine, theirs) = semaphores::<K>(permits).await;
        let first = acquire(&mine, permits).await;
        let waiters = [(); 2].map(|()| mine.acquire(permits).into_future());
        let [mut second, mut third] = waiters;
        assert!(poll_once(&mut second).await.is_none());
        assert!(poll_once(&mut third).await.is_none());
        release(first).await;
        assert_eq!(available(&theirs).await, 0);
        let second = second.await.unwrap();
        drop(second);
        run_others().await;
        assert_eq!(available(&theirs).await, 0);
        let third = third.await.unwrap();
        release(third).await;
        assert_eq!(available(&theirs).await, i64::from(permits));
        let status = client.status();
        assert_eq!((status.holds, status.background), (0, 0));
    }
}

async fn permits_pass_on_only_to_request_for_as_many<K: Kind>() {
    let waiting_for: [(&[u32], bool); 6] = [
        (&[2], true),
        (&[2, 2], true),
        (&[1], false),
        (&[3], false),
        (&[2, 1], false),
        (&[1, 2], false),
    ];
    for (wanted, handed_over) in waiting_for {
        let (_client, mine, theirs) = semaphores::<K>(3).await;
        let (two, one) = (acquire(&mine, 2).await, acquire(&theirs, 1).await);
        let mut waiters = Vec::new();
        for permits in wanted {
            waiters.push(parked(&mine, *permits).await);
        }
        release(two).await;
        let free = available(&theirs).await;
        assert_eq!(free, if handed_over { 0 } else { 2 }, "{wanted:?}");
        release(one).await;
        for waiter in waiters {
            release(waiter.await.unwrap()).await;
        }
        assert_eq!(available(&theirs).await, 3);
    }
}

async fn client_that_does_not_hand_over_releases<K: Kind>() {
    let store = Embedded::new();
    let client = Client::builder().local_hand_over(false);
    let client = client.connect_embedded(&store).unwrap();
    let mine = K::of(&client);
    mine.try_set(1).await.unwrap();
    let guard = acquire(&mine, 1).await;
    let waiting = parked(&mine, 1).await;
    release(guard).await;
    assert_eq!(available(&mine).await, 1);
    release(waiting.await.unwrap()).await;
}

/// Other clients may have begun to wait.
async fn permits_that_were_held_for_long_are_released<K: Kind>() {
    let (_client, mine, theirs) = semaphores::<K>(1).await;
    let guard = acquire(&mine, 1).await;
    let waiting = parked(&mine, 1).await;
    sleep(11 * MILLIS).await;
    release(guard).await;
    assert_eq!(available(&theirs).await, 1);
    release(waiting.await.unwrap()).await;
}

async fn each_waiter_takes_one_offer_and_the_rest_is_released<K: Kind>() {
    let (_client, mine, theirs) = semaphores::<K>(4).await;
    let mut guards = Vec::new();
    for _ in 0..4 {
        guards.push(acquire(&mine, 1).await);
    }
    let mut waiters = Vec::new();
    for _ in 0..3 {
        waiters.push(waiter(&mine, 1).await);
    }
    let begun = Instant::now();
    for guard in guards {
        release(guard).await;
    }
    assert_eq!(available(&theirs).await, 1);
    let mut guards = Vec::new();
    for waiter in waiters {
        guards.push(waiter.await.unwrap().unwrap());
    }
    assert_eq!(
        (begun.elapsed(), available(&theirs).await),
        (Duration::ZERO, 1)
    );
    for guard in guards {
        release(guard).await;
    }
    assert_eq!(available(&theirs).await, 4);
}

async fn canceled_waiter_passes_permits_on<K: Kind>() {
    let (client, mine, theirs) = semaphores::<K>(1).await;
    let guard = acquire(&mine, 1).await;
    let (first, second) = (waiter(&mine, 1).await, waiter(&mine, 1).await);
    drop(guard);
    first.abort();
    let guard = second.await.unwrap().unwrap();
    assert!(first.await.is_err());
    assert_eq!(available(&theirs).await, 0);
    let last = waiter(&mine, 1).await;
    drop(guard);
    last.abort();
    assert!(last.await.is_err());
    client.flush().await;
    assert_eq!(available(&theirs).await, 1);
}

/// It joins after the offer, and becomes the first because those before it leave.
async fn waiter_for_other_number_refuses_offer_and_loses_no_permit<K: Kind>() {
    let (client, mine, theirs) = semaphores::<K>(2).await;
    let [one, other] = [acquire(&mine, 1).await, acquire(&mine, 1).await];
    let first = parked(&mine, 1).await;
    release(one).await;
    assert_eq!(available(&theirs).await, 0);
    let mut both = parked(&mine, 2).await;
    drop(first);
    assert!(poll_once(&mut both).await.is_none());
    client.flush().await;
    assert_eq!(available(&theirs).await, 1);
    release(other).await;
    let begun = Instant::now();
    let both = both.await.unwrap();
    assert_eq!(
        (begun.elapsed(), available(&theirs).await),
        (Duration::ZERO, 0)
    );
    release(both).await;
    assert_eq!(available(&theirs).await, 2);
}

/// The store has refused the earlier request for more.
async fn waiter_for_fewer_permits_asks_the_store_after_offer<K: Kind>() {
    let (_client, mine, theirs) = semaphores::<K>(3).await;
    let two = acquire(&mine, 2).await;
    let first = parked(&mine, 2).await;
    release(two).await;
    assert_eq!(available(&theirs).await, 1);
    // Joins after the offer, so that the first takes it.
    let one = mine.acquire(1).into_future();
    let begun = Instant::now();
    let (two, one) = tokio::join!(first, one);
    assert_eq!(
        (begun.elapsed(), available(&theirs).await),
        (Duration::ZERO, 0)
    );
    // The next one joins an empty queue.
    let second = parked(&mine, 2).await;
    release(two.unwrap()).await;
    let two = second.await.unwrap();
    release(one.unwrap()).await;
    let one = acquire(&mine, 1).await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
    release(two).await;
    release(one).await;
    assert_eq!(available(&theirs).await, 3);
}

/// The first waiter takes the offer, and the next one the permit that the message reports.
async fn message_during_offer_is_not_lost<K: Kind>() {
    for released_first in [false, true] {
        let (_client, mine, theirs) = semaphores::<K>(2).await;
        let guard = acquire(&mine, 1).await;
        let other = acquire(&theirs, 1).await;
        let (first, second) = (parked(&mine, 1).await, parked(&mine, 1).await);
        let begun = Instant::now();
        if released_first {
            release(other).await;
            release(guard).await;
        } else {
            release(guard).await;
            release(other).await;
        }
        let first = first.await.unwrap();
        let second = second.await.unwrap();
        assert_eq!(
            (begun.elapsed(), available(&theirs).await),
            (Duration::ZERO, 0)
        );
        release(first).await;
        release(second).await;
        assert_eq!(available(&theirs).await, 2);
    }
}

/// A request that is kept but not polled does not keep the permits, and [`Client::flush`] waits until they are released.
async fn offer_that_is_not_taken_in_time_is_released<K: Kind>() {
    let (client, mine, theirs) = semaphores::<K>(1).await;
    let guard = acquire(&mine, 1).await;
    let parked = parked(&mine, 1).await;
    release(guard).await;
    assert_eq!(available(&theirs).await, 0);
    client.flush().await;
    assert_eq!(available(&theirs).await, 1);
    release(parked.await.unwrap()).await;
}

/// Acquires and releases a permit again and again.
async fn contend<K: Kind>(semaphore: K, turns: Arc<AtomicU32>) {
    loop {
        let guard = acquire(&semaphore, 1).await;
        turns.fetch_add(1, SeqCst);
        sleep(MILLIS).await;
        release(guard).await;
    }
}

async fn other_client_gets_its_turn<K: Kind>() {
    let (_client, mine, theirs) = semaphores::<K>(2).await;
    let (our_turns, their_turns) = (Arc::<AtomicU32>::default(), Arc::<AtomicU32>::default());
    let contenders = [(); 6].map(|()| tokio::spawn(contend(mine.clone(), our_turns.clone())));
    sleep(1000 * MILLIS).await;
    assert!(our_turns.swap(0, SeqCst) > 1000);
    let other = tokio::spawn(contend(theirs, their_turns.clone()));
    sleep(1000 * MILLIS).await;
    let (ours, theirs) = (our_turns.load(SeqCst), their_turns.load(SeqCst));
    assert!(
        theirs >= 1000 / 20 && ours >= 500,
        "{ours} and {theirs} turns"
    );
    other.abort();
    contenders.iter().for_each(JoinHandle::abort);
}

async fn permits_of_deleted_semaphore_pass_on_briefly<K: Kind>() {
    let (_client, mine, theirs) = semaphores::<K>(1).await;
    let turns = Arc::<AtomicU32>::default();
    let contend = async |mine: &K| {
        loop {
            let guard = acquire(mine, 1).await;
            turns.fetch_add(1, SeqCst);
            sleep(MILLIS).await;
            // The release may report that the permit is lost.
            let _ = guard.held.release().await;
        }
    };
    let contending = async { tokio::join!(contend(&mine), contend(&mine)) };
    let test = async {
        sleep(100 * MILLIS).await;
        assert!(turns.load(SeqCst) > 50);
        assert!(theirs.delete().await.unwrap());
        sleep(15 * MILLIS).await;
        turns.store(0, SeqCst);
        sleep(1000 * MILLIS).await;
        assert_eq!(turns.load(SeqCst), 0);
    };
    tokio::select! {
        _ = contending => {}
        () = test => {}
    }
}

/// Returns a generator of random numbers less than its argument (SplitMix64).
fn random(seed: u64) -> impl Fn(u32) -> u32 + Clone + Send + 'static {
    let state = Arc::new(AtomicU64::new(seed));
    move |n| {
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        let next = state.fetch_add(STEP, SeqCst).wrapping_add(STEP);
        let next = (next ^ (next >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let next = (next ^ (next >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((next ^ (next >> 31)) % u64::from(n)) as u32
    }
}

/// Tasks of two clients acquire, and are canceled at random times. In the end all permits are there.
async fn random_cancellations_lose_no_permit<K: Kind>() {
    const PERMITS: u32 = 5;
    for seed in 0..20 {
        let below = random(seed);
        let (client, mine, theirs) = semaphores::<K>(PERMITS).await;
        let in_use = Arc::<AtomicU32>::default();
        let tasks = (0..12).map(|task| {
            let (below, in_use) = (below.clone(), in_use.clone());
            let semaphore = if task % 4 == 0 {
                theirs.clone()
            } else {
                mine.clone()
            };
            tokio::spawn(async move {
                for _ in 0..60 {
                    let permits = 1 + below(8) / 7;
                    let limit = Duration::from_micros(below(3000).into());
                    let request = semaphore.acquire(permits).into_future();
                    let Ok(guard) = tokio::time::timeout(limit, request).await else {
                        continue;
                    };
                    let used = in_use.fetch_add(permits, SeqCst) + permits;
                    assert!(used <= PERMITS, "seed {seed}: {used} permits are in use");
                    sleep(Duration::from_micros(below(1500).into())).await;
                    in_use.fetch_sub(permits, SeqCst);
                    match below(2) {
                        0 => drop(guard),
                        _ => guard.unwrap().held.release().await.unwrap(),
                    }
                }
            })
        });
        for task in Vec::from_iter(tasks) {
            task.await.unwrap();
        }
        client.flush().await;
        sleep(20 * MILLIS).await;
        assert_eq!(available(&theirs).await, i64::from(PERMITS), "seed {seed}");
    }
}

/// Like an owner that a caller knows: the caller may release them.
#[tokio::test(start_paused = true)]
async fn permits_with_known_ids_or_fixed_lease_are_released() {
    let (_client, mine, theirs) = semaphores::<ExpirableSemaphore>(1).await;
    let is_handed_over = async |guard: Guard<Lock<Permits>>, next: Acquire<Lock<Permits>>| {
        let mut next = next.into_future();
        assert!(poll_once(&mut next).await.is_none());
        release(guard).await;
        let free = available(&theirs).await;
        release(next.await.unwrap()).await;
        free == 0
    };
    let guard = acquire(&mine, 1).await;
    assert!(is_handed_over(guard, mine.acquire()).await);
    let guard = acquire(&mine, 1).await;
    assert_eq!(guard.ids().len(), 1);
    assert!(!is_handed_over(guard, mine.acquire()).await);
    let guard = mine.acquire().lease(1000 * MILLIS).await.unwrap();
    assert!(!is_handed_over(guard, mine.acquire()).await);
    let guard = acquire(&mine, 1).await;
    assert!(!is_handed_over(guard, mine.acquire().lease(1000 * MILLIS)).await);
}

/// The feared interleaving: an attempt is not answered, and neither is the release behind it, which is repeated in the
/// background. The request settles the attempt itself, is granted the permits by the next one, and the caller takes them out.
/// Then the background sends its release, of the same ids.
#[tokio::test(start_paused = true)]
async fn permits_taken_out_are_not_released_for_an_earlier_attempt() {
    for attempt in [NoAnswer, NoEffect] {
        for release in [NoAnswer, NoEffect, NotSent] {
            let text = format!("{attempt:?}, {release:?}");
            let store = Embedded::new();
            let client = Client::builder().connect_embedded(&store).unwrap();
            let semaphore = client.expirable_semaphore("a");
            semaphore.try_set_permits(1).await.unwrap();
            store.fail([attempt, release]);
            let guard = semaphore.acquire().outage_limit(SECOND).await.unwrap();
            assert_eq!(client.status().background, 1, "{text}");
            let ids = guard.into_ids().unwrap();
            client.flush().await;
            assert_eq!(available(&semaphore).await, 0, "{text}");
            semaphore.release_many(&ids).await.expect(&text);
            let status = client.status();
            assert_eq!((status.holds, status.background), (0, 0), "{text}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn forgotten_permits_do_not_pass_on() {
    let (client, mine, theirs) = semaphores::<Semaphore>(1).await;
    let guard = acquire(&mine, 1).await;
    let mut waiting = parked(&mine, 1).await;
    guard.forget();
    assert!(poll_once(&mut waiting).await.is_none());
    client.flush().await;
    assert_eq!(available(&theirs).await, 0);
    theirs.release(1).await.unwrap();
    release(waiting.await.unwrap()).await;
}

/// Its name may belong to a new semaphore, which has permits of its own.
#[tokio::test(start_paused = true)]
async fn permits_of_expired_semaphore_do_not_pass_on() {
    let client = Client::embedded();
    let semaphore = client.semaphore("a");
    let set = async |millis| {
        semaphore
            .try_set_permits(1)
            .time_to_live(millis * MILLIS)
            .await
    };
    for expires_while_offered in [false, true] {
        assert!(set(5).await.unwrap());
        let guard = semaphore.acquire().await.unwrap();
        let mut waiting = parked(&semaphore, 1).await;
        if expires_while_offered {
            guard.release().await.unwrap();
            sleep(5 * MILLIS).await;
        } else {
            sleep(5 * MILLIS).await;
            guard.release().await.unwrap();
        }
        assert!(poll_once(&mut waiting).await.is_none());
        assert!(set(1000).await.unwrap());
        release(waiting.await.unwrap()).await;
        assert_eq!(semaphore.available().await.unwrap(), 1);
        semaphore.delete().await.unwrap();
    }
}

/// The first waiter delays its request for the permit that a message has reported, and gets an offer instead. The next one
/// must ask for that permit.
#[tokio::test(start_paused = true)]
async fn message_before_delay_is_not_lost() {
    let (_client, mine, theirs) = semaphores::<Semaphore>(2).await;
    let [guard, other] = [acquire(&mine, 1).await, acquire(&theirs, 1).await];
    let waiters = [waiter(&mine, 1).await, waiter(&mine, 1).await];
    mine.session
        .waiting
        .yield_to(&mine.object, Yields::counted(2));
    let begun = Instant::now();
    release(other).await;
    run_others().await;
    assert!(!waiters.iter().any(JoinHandle::is_finished));
    release(guard).await;
    let mut guards = Vec::new();
    for waiter in waiters {
        guards.push(waiter.await.unwrap().unwrap());
    }
    assert!(begun.elapsed() < 10 * MILLIS);
    assert_eq!(available(&theirs).await, 0);
}

/// The release may have freed the permit, although no message reports that.
#[tokio::test(start_paused = true)]
async fn refusal_from_before_release_does_not_count_for_later_request() {
    let store = Embedded::new();
    let client = Client::builder().local_hand_over(false);
    let client = client.connect_embedded(&store).unwrap();
    let semaphore = client.semaphore("a");
    semaphore.try_set_permits(1).await.unwrap();
    semaphore.acquire().await.unwrap().forget();
    let waiting = tokio::spawn(semaphore.acquire().into_future());
    sleep(MILLIS).await;
    let refused = semaphore.try_acquire().wait(MILLIS).await;
    assert!(refused.unwrap().is_none());
    store.fail([Failure::NoEffect]);
    assert!(semaphore.release(1).await.is_err());
    let unknown = semaphore.try_acquire().wait(MILLIS).await;
    assert!(unknown.is_err(), "{unknown:?}");
    assert!(!waiting.is_finished());
}

/// A removal of permits frees none, and no message says that more of them were refused.
#[tokio::test(start_paused = true)]
async fn change_that_frees_no_permit_makes_no_refusal_unknown() {
    let client = Client::embedded();
    let semaphore = client.semaphore("a");
    semaphore.try_set_permits(2).await.unwrap();
    let waiting = tokio::spawn(semaphore.acquire_many(3).into_future());
    for (permits, is_refused) in [(-1, false), (i32::MAX, true)] {
        sleep(MILLIS).await;
        let added = semaphore.add_permits(permits).await;
        assert_eq!(added.is_err(), is_refused, "{added:?}");
        let limited = semaphore.try_acquire_many(3).wait(MILLIS).await;
        assert!(limited.unwrap().is_none(), "{permits}");
    }
    assert!(!waiting.is_finished());
    let expirable = client.expirable_semaphore("b").permits(1);
    let guard = expirable.acquire().await.unwrap();
    let waiting = tokio::spawn(expirable.acquire().into_future());
    sleep(MILLIS).await;
    let mut ids = guard.into_ids().unwrap();
    ids.push(PermitId::from_bytes([0; PermitId::BYTES]));
    assert!(expirable.release_many(&ids).await.is_err());
    let limited = expirable.try_acquire().wait(MILLIS).await;
    assert!(limited.unwrap().is_none());
    assert!(!waiting.is_finished());
}

/// A latch whose key has disappeared is open, which no message reports.
#[tokio::test(start_paused = true)]
async fn answer_from_before_a_latch_was_open_does_not_count_for_later_request() {
    for deletes in [false, true] {
        let store = Embedded::new();
        let client = Client::builder().connect_embedded(&store).unwrap();
        let latch = client.count_down_latch("a");
        latch.try_set_count(1).await.unwrap();
        let waiting = tokio::spawn(latch.wait().into_future());
        sleep(MILLIS).await;
        store.remove("a");
        assert!(!latch.try_wait().wait(MILLIS).await.unwrap());
        match deletes {
            false => assert_eq!(latch.count_down().await.unwrap(), 0),
            true => assert!(!latch.delete().await.unwrap()),
        }
        assert!(latch.try_wait().wait(MILLIS).await.unwrap(), "{deletes}");
        waiting.await.unwrap().unwrap();
    }
}

/// Another program deletes the semaphore without a message.
#[tokio::test(start_paused = true)]
async fn waiter_for_expirable_permits_retries_once_in_each_watchdog_lease() {
    let store = Embedded::new();
    let [client, peer] = [(); 2].map(|()| Client::builder().connect_embedded(&store).unwrap());
    let [mine, theirs] = [&client, &peer].map(|one| one.expirable_semaphore("a").permits(1));
    let held = theirs.acquire().lease(3600 * SECOND).await.unwrap();
    let waiting = tokio::spawn(mine.acquire().into_future());
    run_others().await;
    store.remove("a");
    let begun = Instant::now();
    drop(waiting.await.unwrap().unwrap());
    assert_eq!(begun.elapsed().as_secs(), 30);
    drop(held);
}
