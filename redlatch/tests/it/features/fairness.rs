//! A client whose tasks pass a lock or a permit on among themselves, beside every kind of waiter in another client: each has
//! its turn within a bound.

use std::pin::Pin;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::common::prelude::*;

/// Length of a section.
const SECTION: Duration = Duration::from_millis(1);

/// Tasks of the busy client.
const TASKS: usize = 4;

/// Within this time a waiter has all its turns. One that asks ten times a second has about 24, and fewer than six with a
/// probability of 10^-5.
const LIMIT: Duration = Duration::from_secs(60);

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Acquires something once, has it for a section, and releases it.
type Turn = fn(Client, Arc<str>) -> Work;

/// A kind of waiter in another client, and how many turns it must have.
struct Waiter {
    kind: &'static str,
    turn: Turn,
    turns: u64,
}

/// The store wakes it, or the client that releases knows that it waits.
const KNOWN: u64 = 40;

/// It asks from time to time, and leaves no trace in the store.
const UNKNOWN: u64 = 6;

async fn section<K: OwnedKind>(lock: Lock<K>) {
    let guard = held(&lock).await;
    sleep(SECTION).await;
    free(guard).await;
}

async fn section_of_owner<K: OwnedKind>(lock: Lock<K>) {
    let guard = lock.lock().owner(Owner::new()).await.unwrap();
    sleep(SECTION).await;
    free(guard).await;
}

async fn tried_section(lock: Lock) {
    loop {
        if let Some(guard) = lock.try_lock().await.unwrap() {
            sleep(SECTION).await;
            return free(guard).await;
        }
        sleep(Duration::from_millis(100)).await;
    }
}

async fn tried_permit(semaphore: Semaphore) {
    loop {
        if let Some(permit) = semaphore.try_acquire().await.unwrap() {
            sleep(SECTION).await;
            return permit.release().await.unwrap();
        }
        sleep(Duration::from_millis(100)).await;
    }
}

async fn permit(semaphore: Semaphore) {
    let permit = semaphore.acquire().await.unwrap();
    sleep(SECTION).await;
    permit.release().await.unwrap();
}

async fn expirable_permit(semaphore: ExpirableSemaphore) {
    let permit = semaphore.acquire().await.unwrap();
    sleep(SECTION).await;
    permit.release().await.unwrap();
}

/// Lets the tasks of one client compete for one object beside a waiter of another client, for each kind of waiter at the same
/// time. Each must have its turns.
async fn assert_turns(server: &Server, busy: Turn, waiters: impl IntoIterator<Item = Waiter>) {
    let mut rows = JoinSet::new();
    for waiter in waiters {
        let url = server.url();
        rows.spawn(async move {
            let name: Arc<str> = unique("fairness").into();
            let client = Client::connect(&url).await.unwrap();
            let other = Client::connect(&url).await.unwrap();
            let permits = client.semaphore(&format!("{name}:permits"));
            permits.try_set_permits(1).await.unwrap();
            let expirable = client.expirable_semaphore(&format!("{name}:expirable"));
            expirable.try_set_permits(1).await.unwrap();
            let sections = Arc::new(AtomicU64::new(0));
            let mut tasks = JoinSet::new();
            for _ in 0..TASKS {
                let (client, name, sections) = (client.clone(), name.clone(), sections.clone());
                tasks.spawn(async move {
                    loop {
                        busy(client.clone(), name.clone()).await;
                        sections.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // They pass it on already.
            while sections.load(Ordering::Relaxed) < 100 {
                sleep(SECTION).await;
            }
            let (begun, mut turns) = (Instant::now(), 0);
            let all = async {
                while turns < waiter.turns {
                    (waiter.turn)(other.clone(), name.clone()).await;
                    turns += 1;
                }
            };
            let is_done = timeout(LIMIT, all).await.is_ok();
            let result = format!(
                "{}: {turns} turns in {:?}, beside {} sections",
                waiter.kind,
                begun.elapsed(),
                sections.load(Ordering::Relaxed),
            );
            (is_done, result)
        });
    }
    let results = rows.join_all().await;
    let failed = results.iter().any(|(is_done, _)| !is_done);
    assert!(!failed, "{results:#?}");
}

fn waiters_for_lock() -> Vec<Waiter> {
    let row = |kind, turns, turn| Waiter { kind, turn, turns };
    vec![
        row("lock", KNOWN, |client, name| {
            Box::pin(section(client.lock(&name)))
        }),
        row("fair lock", KNOWN, |client, name| {
            Box::pin(section(client.fair_lock(&name)))
        }),
        row("multi-lock", KNOWN, |client, name| {
            Box::pin(async move {
                let other = client.lock(&format!("{name}:other"));
                let both = MultiLock::new([client.lock(&name), other]);
                let guard = held(&both).await;
                sleep(SECTION).await;
                free(guard).await;
            })
        }),
        row("RedLock", UNKNOWN, |client, name| {
            Box::pin(async move {
                let guard = held(&RedLock::new([client.lock(&name)])).await;
                sleep(SECTION).await;
                free(guard).await;
            })
        }),
        row("spin lock", UNKNOWN, |client, name| {
            Box::pin(section(client.spin_lock(&name)))
        }),
        row("try_lock", UNKNOWN, |client, name| {
            Box::pin(tried_section(client.lock(&name)))
        }),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_have_their_turns_beside_hand_overs() {
    let busy: Turn = |client, name| Box::pin(section(client.lock(&name)));
    assert_turns(&Server::start(), busy, waiters_for_lock()).await;
}

/// A request that asks ten times a second has about 13 turns within the limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_have_their_turns_beside_hand_overs_of_long_sections() {
    let busy: Turn = |client, name| {
        Box::pin(async move {
            let guard = held(&client.lock(&name)).await;
            sleep(20 * SECTION).await;
            free(guard).await;
        })
    };
    let fewer = |waiter: Waiter| Waiter {
        turns: waiter.turns / 4,
        ..waiter
    };
    let waiters = waiters_for_lock().into_iter().map(fewer);
    assert_turns(&Server::start(), busy, waiters).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_have_their_turns_beside_transfers() {
    let busy: Turn = |client, name| Box::pin(section_of_owner(client.lock(&name)));
    assert_turns(&Server::start(), busy, waiters_for_lock()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_have_their_turns_beside_hand_overs_of_permits() {
    let busy: Turn = |client, name| Box::pin(permit(client.semaphore(&format!("{name}:permits"))));
    let row = |kind, turns, turn| Waiter { kind, turn, turns };
    let waiters = [
        row("acquire", KNOWN, |client, name| {
            Box::pin(permit(client.semaphore(&format!("{name}:permits"))))
        }),
        row("try_acquire", UNKNOWN, |client, name| {
            Box::pin(tried_permit(client.semaphore(&format!("{name}:permits"))))
        }),
    ];
    assert_turns(&Server::start(), busy, waiters).await;
    let busy: Turn = |client, name| {
        let semaphore = client.expirable_semaphore(&format!("{name}:expirable"));
        Box::pin(expirable_permit(semaphore))
    };
    let waiters = [
        row("acquire", KNOWN, |client, name| {
            let semaphore = client.expirable_semaphore(&format!("{name}:expirable"));
            Box::pin(expirable_permit(semaphore))
        }),
        row("try_acquire", UNKNOWN, |client, name| {
            Box::pin(async move {
                let semaphore = client.expirable_semaphore(&format!("{name}:expirable"));
                loop {
                    if let Some(permit) = semaphore.try_acquire().await.unwrap() {
                        sleep(SECTION).await;
                        return permit.release().await.unwrap();
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            })
        }),
    ];
    assert_turns(&Server::start(), busy, waiters).await;
}

/// A waiter like one of Redisson that subscribes at a replica: the client that releases does not know of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_subscribes_at_a_replica_has_its_turns() {
    let master = Server::start();
    let (address, port) = (master.address().to_string(), master.port().to_string());
    let replica = Server::start_with(&["--replicaof", &address, &port]);
    while replica.info("master_link_status") != "up" {
        sleep(Duration::from_millis(10)).await;
    }
    let name = unique("fairness");
    let client = Client::connect(&master.url()).await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let lock = client.lock(&name);
        tasks.spawn(async move {
            loop {
                section(lock.clone()).await;
            }
        });
    }
    let (mut commands, mut subscriber) = (master.connection(), replica.connection());
    let waiting = tokio::task::spawn_blocking(move || {
        let channel = format!("redisson_lock__channel:{{{name}}}");
        let mut subscription = subscriber.as_pubsub();
        subscription.set_read_timeout(Some(LIMIT)).unwrap();
        subscription.subscribe(&channel).unwrap();
        let acquire = "if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
            redis.call('HSET', KEYS[1], 'java:1', 1)
            return redis.call('PEXPIRE', KEYS[1], 30000)";
        let release = "redis.call('DEL', KEYS[1]) return redis.call('PUBLISH', ARGV[1], 0)";
        let (begun, mut turns) = (std::time::Instant::now(), 0);
        while turns < UNKNOWN && begun.elapsed() < LIMIT {
            subscription.get_message().unwrap();
            let acquired: bool = redis::Script::new(acquire)
                .key(&name)
                .invoke(&mut commands)
                .unwrap();
            if acquired {
                turns += 1;
                std::thread::sleep(SECTION);
                let script = redis::Script::new(release);
                let mut call = script.prepare_invoke();
                let () = call.key(&name).arg(&channel).invoke(&mut commands).unwrap();
            }
        }
        turns
    });
    assert_eq!(waiting.await.unwrap(), UNKNOWN);
}
