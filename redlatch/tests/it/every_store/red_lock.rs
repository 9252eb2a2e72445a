//! Tests of the RedLock: a lock granted by a majority of independent servers.

use redlatch::{Backoff, Member, RedGuard};

use crate::common::prelude::*;

/// Independent stores.
enum TestStores {
    Embedded(Vec<Embedded>),
    Servers(Vec<Server>),
}

impl TestStores {
    async fn clients(&self) -> Vec<Client> {
        self.clients_with(Client::builder()).await
    }

    /// Returns one client for each store.
    async fn clients_with(&self, settings: ClientBuilder) -> Vec<Client> {
        match self {
            TestStores::Servers(servers) => clients_of(servers, settings).await,
            TestStores::Embedded(stores) => {
                let client = |store| settings.clone().connect_embedded(store).unwrap();
                stores.iter().map(client).collect()
            }
        }
    }
}

fn embedded(n: usize) -> TestStores {
    TestStores::Embedded((0..n).map(|_| Embedded::new()).collect())
}

fn servers(n: usize) -> TestStores {
    TestStores::Servers((0..n).map(|_| Server::start()).collect())
}

/// Returns one client for each server.
async fn clients_of(servers: &[Server], settings: ClientBuilder) -> Vec<Client> {
    let mut clients = Vec::new();
    for server in servers {
        clients.push(connect(settings.clone(), &server.url()).await);
    }
    clients
}

/// Starts three servers for a test that stops or restarts them, and connects a client to each.
async fn restartable() -> (Vec<Server>, Vec<Client>) {
    let servers: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let clients = clients_of(&servers, Client::builder()).await;
    (servers, clients)
}

/// Creates a RedLock over these clients, with timeouts long enough for a busy machine.
fn red_lock(clients: &[Client], name: &str) -> RedLock {
    RedLock::new(clients.iter().map(|client| client.lock(name))).member_timeout(5 * SECOND)
}

/// Returns two clients of each of three new stores, and the RedLock over the first ones.
async fn three_stores() -> (Vec<Client>, Vec<Client>, RedLock) {
    let stores = embedded(3);
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    (clients, others, lock)
}

async fn holders(clients: &[Client], name: &str) -> usize {
    let mut held = 0;
    for client in clients {
        held += usize::from(client.lock(name).is_locked().await.unwrap());
    }
    held
}

async fn assert_nothing_left(clients: &[Client], name: &str) {
    for client in clients {
        within_limit("settled", client.flush()).await;
        // Releases of holds whose lease has ended continue behind a flush.
        until("nothing is left in the client", async || {
            let status = client.status();
            (status.holds, status.background) == (0, 0)
        })
        .await;
    }
    assert_eq!(holders(clients, name).await, 0);
}

/// Turns each async function into a test on both kinds of stores.
macro_rules! on_independent_stores {
    ($($name:ident($n:expr),)*) => {
        mod on_embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(super::embedded($n)).await;
            })*
        }
        mod on_servers {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(super::servers($n)).await;
            })*
        }
    };
}

on_independent_stores! {
    majority_grants_the_lock(3),
    failed_quorum_releases_all_members(5),
    waiting_ends_at_its_limit_or_with_the_lock(3),
    owner_can_reenter(3),
    lost_minority_does_no_harm(3),
    lost_majority_is_reported_at_release(3),
    request_dropped_anywhere_leaves_nothing_behind(3),
    invalid_input_is_rejected(3),
    run_holds_the_lock(3),
    one_holder_at_a_time(3),
    one_holder_at_a_time_over_five(5),
}

async fn majority_grants_the_lock(stores: TestStores) {
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let guard = held(&lock).await;
    assert!(guard.is_valid());
    assert_eq!((guard.held_members(), holders(&others, "a").await), (3, 3));
    for client in &clients {
        let member = client.lock("a");
        assert!(member.is_held_by(guard.owner()).await.unwrap());
        assert_eq!(client.status().holds, 1);
    }
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    assert!(!lock.is_held_by(Owner::new()).await.unwrap());
    assert!(other.try_lock().await.unwrap().is_none());
    assert_eq!(holders(&others, "a").await, 3);
    free(guard).await;
    assert_eq!(holders(&others, "a").await, 0);
    // With one member held by another owner, there is still a majority.
    let one = held(&others[1].lock("a")).await;
    let guard = lock.try_lock().await.unwrap().unwrap();
    assert_eq!(guard.held_members(), 2);
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    drop(guard);
    free(one).await;
    assert_nothing_left(&clients, "a").await;
    assert_nothing_left(&others, "a").await;
}

async fn failed_quorum_releases_all_members(stores: TestStores) {
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let lock = red_lock(&clients, "a");
    let mut held = Vec::new();
    for client in &others[1..4] {
        held.push(client.lock("a").lock().await.unwrap());
    }
    assert!(lock.try_lock().await.unwrap().is_none());
    for free in [0, 4] {
        assert!(!others[free].lock("a").is_locked().await.unwrap());
    }
    held.pop().unwrap().unlock().await.unwrap();
    let guard = lock.try_lock().await.unwrap().unwrap();
    assert_eq!(guard.held_members(), 3);
    guard.unlock().await.unwrap();
    for guard in held {
        guard.unlock().await.unwrap();
    }
    assert_nothing_left(&clients, "a").await;
}

async fn waiting_ends_at_its_limit_or_with_the_lock(stores: TestStores) {
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let held = other.lock().await.unwrap();
    let wait = Duration::from_millis(60);
    for owner in [None, Some(Owner::new())] {
        let begun = std::time::Instant::now();
        let limited = retry_if_late(|| {
            let request = lock.try_lock().wait(wait);
            match owner {
                Some(owner) => request.owner(owner),
                None => request,
            }
        });
        assert!(limited.await.is_none());
        assert!(begun.elapsed() >= wait);
    }
    // Ten requests of one client wait, and acquire it one after the other.
    let waiting = spawn_each(0..10, |_| {
        let lock = lock.clone();
        async move {
            let guard = lock.try_lock().wait(LONG).await.unwrap().unwrap();
            free(guard).await;
        }
    });
    free(held).await;
    done_all("served", waiting).await;
    for client in &clients {
        until_subscribed(client, 0).await;
    }
    assert_nothing_left(&clients, "a").await;
}

async fn owner_can_reenter(stores: TestStores) {
    let clients = stores.clients().await;
    let lock = red_lock(&clients, "a");
    let owner = Owner::new();
    let outer = lock.lock().owner(owner).await.unwrap();
    let inner = done("again", lock.lock().owner(owner)).await;
    assert_eq!(clients[0].lock("a").hold_count(owner).await.unwrap(), 2);
    free(outer).await;
    assert!(inner.is_valid());
    assert_eq!(holders(&clients, "a").await, 3);
    free(inner).await;
    assert_nothing_left(&clients, "a").await;
}

async fn lost_minority_does_no_harm(stores: TestStores) {
    let clients = stores.clients_with(renewing()).await;
    let lock = red_lock(&clients, "a");
    let guard = held(&lock).await;
    let mut lost = pin!(guard.lost());
    assert!(clients[0].lock("a").force_unlock().await.unwrap());
    let member = clients[0].lock("a");
    until("the minority is acquired again", async || {
        member.is_held_by(guard.owner()).await.unwrap() && guard.held_members() == 3
    })
    .await;
    assert!(guard.is_valid());
    assert!(poll_up_to(1, &mut lost).await.is_none());
    for client in [&clients[0], &clients[2]] {
        assert!(client.lock("a").force_unlock().await.unwrap());
    }
    within_limit("the loss is reported", lost).await;
    assert!(!guard.is_valid());
    assert_lost(guard.run(std::future::pending::<()>()).await, Loss::NotHeld);
    assert_matches!(guard.unlock().await, Err(Error::Lost { .. }));
    // All members are free.
    assert_nothing_left(&clients, "a").await;
    // A release that finds a minority gone has released the lock; one that finds a majority gone
    // has not.
    let guard = held(&lock).await;
    clients[1].lock("a").force_unlock().await.unwrap();
    free(guard).await;
    let guard = held(&lock).await;
    clients[0].lock("a").force_unlock().await.unwrap();
    clients[1].lock("a").force_unlock().await.unwrap();
    assert_matches!(guard.unlock().await, Err(Error::Lost { .. }));
    assert_nothing_left(&clients, "a").await;
}

/// Another owner holds the third member: together with the member that the guard lost, others could
/// have acquired a majority.
async fn lost_majority_is_reported_at_release(stores: TestStores) {
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let theirs = held(&others[2].lock("a")).await;
    let guard = held(&red_lock(&clients, "a")).await;
    assert_eq!(guard.held_members(), 2);
    assert!(others[0].lock("a").force_unlock().await.unwrap());
    assert_matches!(guard.unlock().await, Err(Error::Lost { .. }));
    free(theirs).await;
    assert_nothing_left(&clients, "a").await;
}

async fn request_dropped_anywhere_leaves_nothing_behind(stores: TestStores) {
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    for contended in [false, true] {
        drop_after_each_poll(async |polls| {
            let held = match contended {
                true => Some(other.lock().await.unwrap()),
                false => None,
            };
            let taking = poll_up_to(polls, lock.lock());
            let (guard, ()) = tokio::join!(taking, async {
                if let Some(held) = held {
                    free(held).await;
                }
            });
            let through = guard.is_some();
            drop(guard);
            assert_nothing_left(&clients, "a").await;
            through
        })
        .await;
        drop_after_each_poll(async |polls| {
            let guard = lock.lock().await.unwrap();
            let released = poll_up_to(polls, guard.unlock()).await.is_some();
            assert_nothing_left(&clients, "a").await;
            released
        })
        .await;
    }
}

async fn invalid_input_is_rejected(stores: TestStores) {
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let lock = red_lock(&clients, "a");
    let none = RedLock::new(Vec::<Member>::new());
    assert_matches!(none.try_lock().await, Err(Error::InvalidMembers { .. }));
    let unnamed = lock.clone().and(clients[0].lock(""));
    assert_matches!(unnamed.lock().await, Err(Error::InvalidName { .. }));
    for timeout in [Duration::ZERO, Duration::MAX] {
        let request = lock.clone().member_timeout(timeout).lock();
        assert_matches!(request.await, Err(Error::InvalidSetting { .. }));
    }
    for lease in [Duration::ZERO, Duration::MAX] {
        let error = lock.lock().lease(lease).await.unwrap_err();
        assert_matches!(error, Error::InvalidLease { .. });
    }
    let fair = clients.iter().map(|client| client.fair_lock("a"));
    let fair = RedLock::new(fair.map(|lock| lock.wait_time(Duration::ZERO)));
    assert_matches!(fair.lock().await, Err(Error::InvalidSetting { .. }));
    // Nothing of the lease would remain.
    let error = lock.lock().lease(SECOND / 500).await.unwrap_err();
    assert_matches!(error, Error::InvalidSetting { .. });
    // Through two clients of one store it would wait for itself.
    let itself = lock.clone().and(others[1].lock("a"));
    let refused = [
        itself.lock().await.map(drop).unwrap_err(),
        itself.is_held_by(Owner::new()).await.unwrap_err(),
    ];
    for error in refused {
        assert_matches!(error, Error::InvalidMembers { .. });
    }
    // One lock that is named three times does not count as three.
    let twice = RedLock::new([0, 0, 0, 1, 2].map(|n: usize| clients[n].lock("a")));
    let held = [
        held(&others[1].lock("a")).await,
        held(&others[2].lock("a")).await,
    ];
    assert!(twice.try_lock().await.unwrap().is_none());
    free_all(held).await;
    // Most members refuse their owner: waiting would not help.
    let owner = Owner::new();
    let strict = |client: &Client| client.lock("a").non_reentrant();
    let strict = RedLock::new(clients.iter().map(strict)).member_timeout(5 * SECOND);
    let guard = strict.lock().owner(owner).await.unwrap();
    let again = within_limit("refused", strict.lock().owner(owner)).await;
    assert_matches!(again, Err(Error::AlreadyHeld { .. }));
    free(guard).await;
    // Foreign data under the key: in a minority it counts as a refusal, in a majority it is an
    // error.
    if let TestStores::Servers(servers) = &stores {
        let () = servers[0].command(&["SET", "a", "5"]);
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.held_members(), 2);
        free(guard).await;
        let () = servers[2].command(&["SET", "a", "5"]);
        assert_matches!(lock.lock().await, Err(Error::WrongKind { .. }));
        let _: i64 = servers[0].command(&["DEL", "a"]);
        let _: i64 = servers[2].command(&["DEL", "a"]);
    }
    assert_nothing_left(&clients, "a").await;
}

async fn run_holds_the_lock(stores: TestStores) {
    let clients = stores.clients().await;
    let lock = red_lock(&clients, "a");
    let held = lock.run(holders(&clients, "a")).await.unwrap();
    assert_eq!(held, 3);
    let lost = lock.run(async {
        for client in &clients {
            client.lock("a").force_unlock().await.unwrap();
        }
    });
    assert_matches!(lost.await, Err(Error::Lost { .. }));
    assert_nothing_left(&clients, "a").await;
}

async fn one_holder_at_a_time(stores: TestStores) {
    contend(stores, None).await;
}

async fn one_holder_at_a_time_over_five(stores: TestStores) {
    contend(stores, None).await;
}

/// F19 (redisson#624, #2172): many owners acquire it with a lease that is shorter than their wait,
/// and some without waiting. Two of them never find it valid at the same time. With a counter of
/// acquisitions, the servers also hang one after the other.
async fn contend(stores: TestStores, acquisitions: Option<Arc<AtomicUsize>>) {
    const PROCESSES: usize = 3;
    const TASKS: usize = 2;
    const ROUNDS: usize = 8;
    let inside = Arc::new(AtomicBool::new(false));
    let mut all = Vec::new();
    let mut tasks = Vec::new();
    for process in 0..PROCESSES {
        let clients = stores.clients().await;
        for task in 0..TASKS {
            let timeout = match acquisitions {
                Some(_) => SECOND / 10,
                None => 5 * SECOND,
            };
            let lock = red_lock(&clients, "a").member_timeout(timeout);
            let (inside, acquisitions) = (inside.clone(), acquisitions.clone());
            tasks.push(tokio::spawn(async move {
                let mut rounds = 0;
                while rounds < ROUNDS {
                    let mut request = lock.try_lock().lease(LONG / 3);
                    if (process + task + rounds) % 3 > 0 {
                        request = request.wait(LONG);
                    }
                    // A majority was slow for a moment, which counts as refused.
                    let Ok(Some(guard)) = request.await else {
                        tokio::task::yield_now().await;
                        continue;
                    };
                    if !guard.is_valid() {
                        continue;
                    }
                    assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                    tokio::task::yield_now().await;
                    // If the machine pauses for longer than the lease, the loss is reported; then
                    // the test cannot judge exclusion.
                    let alone = guard.is_valid();
                    inside.store(false, Ordering::SeqCst);
                    assert!(alone, "the machine was too slow for this test");
                    rounds += 1;
                    if let Some(acquisitions) = &acquisitions {
                        acquisitions.fetch_add(1, Ordering::SeqCst);
                    }
                    free(guard).await;
                }
            }));
        }
        all.push(clients);
    }
    if let (Some(acquisitions), TestStores::Servers(servers)) = (&acquisitions, &stores) {
        // The servers hang one after the other, and recover: always a minority.
        for (n, server) in servers.iter().enumerate() {
            let so_far = acquisitions.load(Ordering::SeqCst);
            server.freeze();
            until("it continues without that one", async || {
                let by_now = acquisitions.load(Ordering::SeqCst);
                by_now > so_far + 3 || by_now == PROCESSES * TASKS * ROUNDS
            })
            .await;
            server.thaw();
            // Settle everything on the server that hung before the next one hangs, or more than a
            // minority would be affected.
            for clients in &all {
                let member = clients[n].lock("awake");
                within_limit("awake", async {
                    while member.is_locked().await.is_err() {}
                })
                .await;
            }
        }
    }
    done_all("all get their turns", tasks).await;
    for clients in &all {
        assert_nothing_left(clients, "a").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_holder_at_a_time_while_a_minority_hangs() {
    contend(servers(3), Some(Arc::default())).await;
}

/// A minority that hangs or is down costs only its own short timeout, and nothing remains there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn minority_may_hang_or_be_down() {
    let mut all: Vec<_> = (0..5).map(|_| Server::start()).collect();
    // If the response timeout were waited for, the test would not end in time.
    let settings = Client::builder().response_timeout(2 * LONG);
    let clients = clients_of(&all, settings).await;
    let lock = red_lock(&clients, "a").member_timeout(SECOND / 2);
    // They hang while it is held: it stays held, and they do not delay its release.
    let guard = held(&lock).await;
    assert_eq!(guard.held_members(), 5);
    all[1].freeze();
    all[3].kill();
    assert!(guard.is_valid());
    done("without delay", guard.unlock()).await;
    for _ in 0..3 {
        let guard = done("without them", lock.lock()).await;
        assert_eq!(guard.held_members(), 3);
        assert!(guard.is_valid());
        done("without delay", guard.unlock()).await;
    }
    // Of a bare quorum one server hangs, and a server that had refused works again. Other owners
    // could acquire the lock, so it counts as released.
    let guard = done("without them", lock.lock()).await;
    assert_eq!(guard.held_members(), 3);
    all[1].thaw();
    all[0].freeze();
    done("without delay", guard.unlock()).await;
    all[0].thaw();
    all[3].restart();
    within_limit("all of them again", async {
        loop {
            match lock.lock().await {
                Ok(guard) if guard.held_members() == 5 => break free(guard).await,
                _ => {}
            }
        }
    })
    .await;
    assert_nothing_left(&clients, "a").await;
}

/// A majority hangs: the acquisition fails with a descriptive error, and nothing remains once they
/// recover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_there_is_no_lock() {
    let (all, clients) = restartable().await;
    let lock = red_lock(&clients, "a").member_timeout(SECOND / 5);
    free(held(&lock).await).await;
    all[0].freeze();
    all[2].freeze();
    let error = within_limit("refused", lock.try_lock()).await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    assert!(!clients[1].lock("a").is_locked().await.unwrap());
    let waiting = lock.try_lock().wait(SECOND / 2).into_future();
    let error = within_limit("refused", waiting).await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    // A waiter without a limit acquires it once they recover.
    let waiting = tokio::spawn(lock.lock().into_future());
    all[0].thaw();
    all[2].thaw();
    free(joined("at last", waiting).await).await;
    assert_nothing_left(&clients, "a").await;
}

/// F19: all servers grant it, but so late that nothing of the lease remains: it is not acquired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_quorum_does_not_acquire() {
    let all: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let settings = Client::builder().response_timeout(2 * LONG);
    let clients = clients_of(&all, settings).await;
    let lock = red_lock(&clients, "a").member_timeout(LONG);
    let lease = SECOND / 2;
    free(held(&lock).await).await;
    all[0].freeze();
    all[1].freeze();
    let asked = std::time::Instant::now();
    let trying = tokio::spawn(lock.try_lock().lease(lease).into_future());
    until("the third has granted it", async || {
        clients[2].lock("a").is_locked().await.unwrap() || asked.elapsed() > lease
    })
    .await;
    until("the lease is over", async || asked.elapsed() > lease).await;
    all[0].thaw();
    all[1].thaw();
    assert_matches!(done("answered", trying).await, Ok(None));
    assert_nothing_left(&clients, "a").await;
}

/// A server that lost its data grants the lock to another owner; the majority keeps it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_lost_its_data_does_not_break_the_lock() {
    let (mut all, clients) = restartable().await;
    let others = clients_of(&all, Client::builder()).await;
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let guard = held(&lock).await;
    all[1].restart();
    until("it is there again", async || {
        others[1].lock("a").is_locked().await.is_ok()
    })
    .await;
    assert!(other.try_lock().await.unwrap().is_none());
    assert!(guard.is_valid());
    free(guard).await;
    assert_nothing_left(&clients, "a").await;
}

#[tokio::test(start_paused = true)]
async fn clock_allowance_is_subtracted() {
    let stores = embedded(5);
    let clients = stores.clients().await;
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    let guard = lock.lock().lease(10 * SECOND).await.unwrap();
    // 1 % and 2 ms.
    let allowance = Duration::from_millis(102);
    assert_eq!(guard.valid_for(), 10 * SECOND - allowance);
    let begun = tokio::time::Instant::now();
    guard.lost().await;
    let lasted = begun.elapsed();
    assert!(lasted >= 10 * SECOND - allowance, "{lasted:?}");
    assert!(
        lasted <= 10 * SECOND - allowance + SECOND / 100,
        "{lasted:?}"
    );
    // The servers keep it longer than that.
    assert_eq!(holders(&clients, "a").await, 5);
    assert!(!guard.is_valid());
    assert_lost(guard.unlock().await, Loss::LeaseEnded);
    assert_nothing_left(&clients, "a").await;
}

/// After a re-entry the owner holds the lock for the longer lease. Both guards then subtract the
/// clock allowance for that longer time.
#[tokio::test(start_paused = true)]
async fn longest_lease_determines_clock_allowance() {
    for leases in [[1000, 1], [1, 1000]] {
        let clients = embedded(3).clients().await;
        let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
        let me = Owner::new();
        let [outer, inner] = leases.map(|lease| lock.lock().owner(me).lease(lease * SECOND));
        let (outer, inner) = (outer.await.unwrap(), inner.await.unwrap());
        // 1 % and 2 ms.
        let left = 990 * SECOND - Duration::from_millis(2);
        assert_eq!((outer.valid_for(), inner.valid_for()), (left, left));
    }
}

/// A waiter for a majority does not block requests for a single member, or for another majority.
#[tokio::test]
async fn waiter_does_not_block_requests_for_its_members() {
    let stores = embedded(5);
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let _taken = [
        held(&others[1].lock("a")).await,
        held(&others[2].lock("a")).await,
    ];
    let first = held(&others[0].lock("a")).await;
    let mut waiting = red_lock(&clients[..3], "a").lock().into_future();
    // Embedded stores answer immediately: after this, the request is queued.
    assert!(crate::common::poll_up_to(2, &mut waiting).await.is_none());
    let waiting = tokio::spawn(waiting);
    let member = tokio::spawn(clients[0].lock("a").lock().into_future());
    until("it waits too", async || {
        clients[0].status().subscriptions == 1
    })
    .await;
    free(first).await;
    free(joined("the member is free", member).await).await;
    let of_others = [0, 3, 4].map(|n: usize| clients[n].lock("a"));
    let of_others = RedLock::new(of_others).member_timeout(5 * SECOND).lock();
    let guard = done("they are free", of_others).await;
    assert_eq!(guard.held_members(), 3);
    waiting.abort();
}

/// The quorum-th longest lease counts.
#[tokio::test(start_paused = true)]
async fn majority_of_leases_determines_validity() {
    let mut clients = Vec::new();
    for seconds in [10, 20, 40] {
        let settings = Client::builder().watchdog_lease(seconds * SECOND);
        clients.push(settings.connect_embedded(&Embedded::new()).unwrap());
    }
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    let guard = held(&lock).await;
    assert_eq!(guard.valid_for(), 20 * SECOND - Duration::from_millis(202));
    assert_eq!(guard.held_members(), 3);
    drop(guard);
    assert_nothing_left(&clients, "a").await;
}

#[tokio::test(start_paused = true)]
async fn renewed_for_hours_and_released_for_good() {
    let (clients, others, lock) = three_stores().await;
    let other = RedLock::new(others.iter().map(|client| client.lock("a")));
    let guard = held(&lock).await;
    let lost = tokio::spawn(guard.lost());
    for _ in 0..24 {
        tokio::time::sleep(3600 * SECOND).await;
        assert!(guard.is_valid());
        assert!(guard.valid_for() >= 19 * SECOND);
        assert!(other.try_lock().wait(SECOND).await.unwrap().is_none());
    }
    free(guard).await;
    tokio::time::sleep(3600 * SECOND).await;
    assert!(!lost.is_finished(), "released, not lost");
    lost.abort();
    assert_eq!(holders(&clients, "a").await, 0);
    for client in clients.iter().chain(&others) {
        assert_idle(client);
        assert_eq!(client.status().subscriptions, 0);
    }
}

/// A waiter acquires the lock of a dead holder when its lease ends.
#[tokio::test(start_paused = true)]
async fn dead_holder_costs_its_lease() {
    let (_clients, others, lock) = three_stores().await;
    let other = RedLock::new(others.iter().map(|client| client.lock("a")))
        .backoff(Backoff::constant(SECOND / 10));
    std::mem::forget(lock.lock().lease(20 * SECOND).await.unwrap());
    let begun = tokio::time::Instant::now();
    let guard = held(&other).await;
    assert_took(begun.elapsed(), 20 * SECOND..21 * SECOND);
    free(guard).await;
}

/// A waiter for a majority does not block waiters for one of the members, or for other locks.
#[tokio::test(start_paused = true)]
async fn only_identical_requests_share_a_queue() {
    let stores = embedded(5);
    let (clients, others) = (stores.clients().await, stores.clients().await);
    let mut held = Vec::new();
    for other in &others[..3] {
        held.push(other.lock("a").lock().await.unwrap());
    }
    let blocked = RedLock::new(clients[..3].iter().map(|client| client.lock("a")));
    let blocked = tokio::spawn(blocked.lock().into_future());
    tokio::time::sleep(Duration::from_secs(1)).await;

    let free = [&clients[0], &clients[3], &clients[4]];
    let free = RedLock::new(free.map(|client| client.lock("a")));
    let free = within_limit("a majority is free", free.lock()).await;
    free.unwrap().unlock().await.unwrap();

    let single = tokio::spawn(clients[0].lock("a").lock().into_future());
    tokio::time::sleep(Duration::from_secs(1)).await;
    held.remove(0).unlock().await.unwrap();
    drop(joined("it is woken", single).await);
    assert!(!blocked.is_finished());
    blocked.abort();
}

/// Each server restarts without its data. No two of them do so at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restart_without_persistence_keeps_the_lock() {
    let (mut all, clients) = restartable().await;
    let others = clients_of(&all, Client::builder()).await;
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let guard = held(&lock).await;
    for _ in 0..2 {
        for (server, client) in all.iter_mut().zip(&clients) {
            server.restart();
            let member = client.lock("a");
            until("acquired again", async || {
                matches!(member.is_held_by(guard.owner()).await, Ok(true))
            })
            .await;
            until("it counts", async || guard.held_members() == 3).await;
            assert!(guard.is_valid());
        }
    }
    assert!(other.try_lock().await.unwrap().is_none());
    free(guard).await;
    free(held(&other).await).await;
    assert_nothing_left(&clients, "a").await;
}

/// Two of three servers lose their data at the same time: the lock is lost for good, and what is left of it is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_restart_of_majority_loses_the_lock() {
    let (mut all, clients) = restartable().await;
    let lock = red_lock(&clients, "a");
    let guard = held(&lock).await;
    all[..2].iter_mut().for_each(Server::kill);
    all[..2].iter_mut().for_each(Server::restart);
    within_limit("lost", guard.lost()).await;
    assert!(!guard.is_valid());
    assert_lost(guard.unlock().await, Loss::NotHeld);
    assert_nothing_left(&clients, "a").await;
}

/// The guard is dropped at any time while a member that has restarted is requested.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_while_member_is_requested_leaves_nothing_behind() {
    let (mut all, clients) = restartable().await;
    let lock = red_lock(&clients, "a");
    for n in 0..6 {
        let guard = done("acquired", lock.lock()).await;
        all[n % 3].restart();
        // About when the first request is sent.
        tokio::time::sleep(Duration::from_millis(100 + 30 * n as u64)).await;
        match n % 2 {
            0 => drop(guard),
            _ => drop(within_limit("released", guard.unlock()).await),
        }
        for client in &clients {
            until("nothing is left", async || {
                within_limit("settled", client.flush()).await;
                matches!(client.lock("a").is_locked().await, Ok(false))
            })
            .await;
        }
    }
    assert_nothing_left(&clients, "a").await;
}

#[tokio::test(start_paused = true)]
async fn lost_and_refused_members_are_acquired_again() {
    let (clients, others, lock) = three_stores().await;
    let theirs = held(&others[0].lock("a")).await;
    let guard = held(&lock).await;
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(guard.held_members(), 2, "another owner holds one");
    free(theirs).await;
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(guard.held_members(), 3);
    let lost = tokio::spawn(guard.lost());
    for _ in 0..3 {
        for other in &others {
            assert!(other.lock("a").force_unlock().await.unwrap());
            // A third of the lease, and the first pause.
            tokio::time::sleep(11 * SECOND).await;
            assert_eq!((guard.held_members(), holders(&others, "a").await), (3, 3));
        }
    }
    // A flush does not wait for the lock itself.
    for client in &clients {
        within_limit("idle", client.flush()).await;
    }
    assert!(guard.is_valid() && !lost.is_finished());
    free(guard).await;
    assert_nothing_left(&clients, "a").await;
    // Both at once.
    let guard = held(&lock).await;
    for other in &others[..2] {
        assert!(other.lock("a").force_unlock().await.unwrap());
    }
    guard.lost().await;
    let theirs = held(&others[0].lock("a")).await;
    tokio::time::sleep(60 * SECOND).await;
    assert!(!guard.is_valid());
    assert_lost(guard.unlock().await, Loss::NotHeld);
    free(theirs).await;
    assert_nothing_left(&clients, "a").await;
}

/// A member that is acquired again makes the lock neither longer than its lease nor than its limit.
#[tokio::test(start_paused = true)]
async fn members_acquired_again_have_the_limits_of_the_lock() {
    for is_fixed in [true, false] {
        let (_clients, others, lock) = three_stores().await;
        let theirs = others[0].lock("a").lock().await.unwrap();
        let begun = tokio::time::Instant::now();
        let guard = match is_fixed {
            true => lock.lock().lease(60 * SECOND).await.unwrap(),
            false => lock.lock().at_most(60 * SECOND).await.unwrap(),
        };
        tokio::time::sleep(10 * SECOND).await;
        free(theirs).await;
        tokio::time::sleep(2 * SECOND).await;
        if !is_fixed {
            // Another one of the first two.
            assert!(others[1].lock("a").force_unlock().await.unwrap());
            tokio::time::sleep(12 * SECOND).await;
        }
        assert_eq!(guard.held_members(), 3, "fixed: {is_fixed}");
        guard.lost().await;
        assert_took(begun.elapsed(), 59 * SECOND..=60 * SECOND);
        tokio::time::sleep(2 * SECOND).await;
        assert_eq!(holders(&others, "a").await, 0);
        let limit = 60 * SECOND;
        let reason = match is_fixed {
            true => Loss::LeaseEnded,
            false => Loss::HeldTooLong { limit },
        };
        assert_lost(guard.unlock().await, reason);
    }
}

/// The server has one run id, which is known when the members have been requested. Until then each round would be
/// refused by its own hold.
#[tokio::test]
async fn members_at_two_addresses_of_one_server_are_refused() {
    let url = shared().url();
    let same = url.replace("127.0.0.1", "localhost");
    let name = unique("addresses");
    for third in [None, Some(Client::embedded())] {
        // Not before they are used.
        let lazy = |url| Client::builder().connect_lazy(url).unwrap();
        let clients: Vec<_> = [&*url, &same].map(lazy).into_iter().chain(third).collect();
        let refused = within_limit("refused", red_lock(&clients, &name).lock()).await;
        assert_matches!(refused, Err(Error::InvalidMembers { .. }));
        assert_nothing_left(&clients, &name).await;
    }
}

/// The interval in which the lock must be fed does not end the lease of members that are acquired later.
#[tokio::test(start_paused = true)]
async fn fed_lock_regains_members_until_its_lease_ends() {
    let (_clients, others, lock) = three_stores().await;
    let theirs = held(&others[0].lock("a")).await;
    let request = lock.lock().lease(60 * SECOND).fed_every(2 * SECOND);
    let guard = request.await.unwrap();
    let feed_for = async |seconds| {
        for _ in 0..seconds {
            sleep(SECOND).await;
            guard.feed().unwrap();
        }
    };
    feed_for(10).await;
    free(theirs).await;
    for _ in 0..4 {
        feed_for(10).await;
        assert_eq!(guard.held_members(), 3);
    }
}

/// The release of the owner's read side may be in flight.
#[tokio::test(start_paused = true)]
async fn released_read_side_does_not_refuse_its_owner() {
    let clients = embedded(3).clients().await;
    let sides = || clients.iter().map(|client| client.read_write_lock("a"));
    let read = RedLock::new(sides().map(|lock| lock.read()));
    let write = RedLock::new(sides().map(|lock| lock.write()));
    let me = Owner::new();
    drop(read.lock().owner(me).await.unwrap());
    let guard = write.try_lock().owner(me).await.unwrap().unwrap();
    assert_eq!(guard.held_members(), 3);
}

/// Its owner holds one of the members as another kind of lock.
#[tokio::test(start_paused = true)]
async fn member_of_another_kind_counts_as_refused() {
    let (clients, _others, lock) = three_stores().await;
    let me = Owner::new();
    let kind = async |client: &Client| {
        let fenced = client.fenced_lock("a");
        fenced.lock().owner(me).await.unwrap()
    };
    let _one = kind(&clients[0]).await;
    let guard = lock.try_lock().owner(me).await.unwrap().unwrap();
    assert_eq!(guard.held_members(), 2);
    free(guard).await;
    let _two = kind(&clients[1]).await;
    let refused = lock.try_lock().owner(me).await;
    assert_matches!(refused, Err(Error::WrongKind { .. }));
}

/// The loss has not been noticed before the request.
#[tokio::test(start_paused = true)]
async fn owner_that_lost_the_lock_acquires_it_at_once() {
    let (clients, others, lock) = three_stores().await;
    let me = Owner::new();
    let lost = lock.lock().owner(me).await.unwrap();
    for other in &others {
        assert!(other.lock("a").force_unlock().await.unwrap());
    }
    let guard = lock.try_lock().owner(me).await.unwrap().unwrap();
    assert!(!lost.is_valid());
    assert_eq!(guard.held_members(), 3);
    assert_lost(lost.unlock().await, Loss::NotHeld);
    assert!(guard.is_valid());
    free(guard).await;
    assert_nothing_left(&clients, "a").await;
}

/// Otherwise the member that remains is renewed for as long as the guard exists, and no other owner has a majority while
/// another server is down.
#[tokio::test(start_paused = true)]
async fn lost_lock_releases_members_that_remain() {
    let (clients, others, lock) = three_stores().await;
    let guard = held(&lock).await;
    for other in &others[..2] {
        assert!(other.lock("a").force_unlock().await.unwrap());
    }
    guard.lost().await;
    assert_nothing_left(&clients, "a").await;
    assert_eq!(guard.held_members(), 0);
    assert_lost(guard.feed(), Loss::NotHeld);
    assert_lost(guard.unlock().await, Loss::NotHeld);
}

/// The guards of one owner keep the lock each for itself.
#[tokio::test(start_paused = true)]
async fn reentered_lock_regains_members_for_each_guard() {
    let (clients, others, lock) = three_stores().await;
    let me = Owner::new();
    let outer = lock.lock().owner(me).await.unwrap();
    let inner = lock.lock().owner(me).await.unwrap();
    for other in &others {
        assert!(other.lock("a").force_unlock().await.unwrap());
        tokio::time::sleep(13 * SECOND).await;
        assert_eq!((outer.held_members(), inner.held_members()), (3, 3));
    }
    assert_eq!(clients[0].lock("a").hold_count(me).await.unwrap(), 2);
    free(outer).await;
    assert!(inner.is_valid());
    assert_eq!(holders(&others, "a").await, 3);
    free(inner).await;
    assert_nothing_left(&clients, "a").await;
}

/// Members that do not answer are requested for as long as their locks are held. A flush does not
/// wait for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_ends_while_members_are_requested() {
    let servers: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let settings = renewing();
    let settings = settings.response_timeout(SHORT);
    let clients = clients_of(&servers, settings).await;
    servers[2].freeze();
    // So many that a request for one of them is in flight at almost any time.
    let names: Vec<_> = (0..20).map(|n| format!("a-{n}")).collect();
    let locking = names.iter().map(|name| {
        let lock = red_lock(&clients, name).member_timeout(SECOND);
        tokio::spawn(async move { retry_if_late(|| lock.lock()).await })
    });
    let mut guards = Vec::new();
    for one in Vec::from_iter(locking) {
        guards.push(one.await.unwrap());
    }
    for client in &clients {
        within_limit("flushed", client.flush()).await;
    }
    assert!(guards.iter().all(RedGuard::is_valid));
    drop(guards);
    servers[2].thaw();
    for client in &clients {
        within_limit("flushed", client.flush()).await;
    }
    for name in &names {
        assert_nothing_left(&clients, name).await;
    }
}

/// A member that is acquired again has the limits of the RedLock, not those of another guard.
#[tokio::test(start_paused = true)]
async fn limit_of_one_member_stays_with_it() {
    let (clients, others, lock) = three_stores().await;
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    let single = clients[0].lock("a").lock().owner(me).at_most(20 * SECOND);
    let single = single.await.unwrap();
    assert!(others[1].lock("a").force_unlock().await.unwrap());
    tokio::time::sleep(13 * SECOND).await;
    assert_eq!(guard.held_members(), 3);
    tokio::time::sleep(8 * SECOND).await;
    assert!(!single.is_valid());
    assert!(guard.is_valid());
    assert_eq!(guard.held_members(), 2);
    free(guard).await;
}
