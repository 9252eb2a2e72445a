//! One lock that a majority of independent servers gives.

use std::future::IntoFuture;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use redlatch::{Backoff, Client, ClientBuilder, Embedded, Error, Loss, Member, Owner, RedLock};
use redlatch_testkit::Server;

use crate::common::{
    LONG, WATCHDOG, assert_lost, dropped_everywhere, in_time, polled, soon, until,
};

const SECOND: Duration = Duration::from_secs(1);

/// Independent stores.
enum Stands {
    Embedded(Vec<Embedded>),
    Servers(Vec<Server>),
}

impl Stands {
    async fn clients(&self) -> Vec<Client> {
        self.clients_with(Client::builder()).await
    }

    /// A client of each.
    async fn clients_with(&self, settings: ClientBuilder) -> Vec<Client> {
        let mut clients = Vec::new();
        match self {
            Stands::Embedded(stores) => {
                for store in stores {
                    clients.push(settings.clone().connect_embedded(store).unwrap());
                }
            }
            Stands::Servers(servers) => {
                for server in servers {
                    clients.push(settings.clone().connect(&server.url()).await.unwrap());
                }
            }
        }
        clients
    }
}

fn embedded(n: usize) -> Stands {
    Stands::Embedded((0..n).map(|_| Embedded::new()).collect())
}

fn servers(n: usize) -> Stands {
    Stands::Servers((0..n).map(|_| Server::start()).collect())
}

/// The lock that these make, with time enough for a busy machine.
fn red_lock(clients: &[Client], name: &str) -> RedLock {
    RedLock::new(clients.iter().map(|client| client.lock(name))).timeout(5 * SECOND)
}

async fn holders(clients: &[Client], name: &str) -> usize {
    let mut held = 0;
    for client in clients {
        held += usize::from(client.lock(name).is_locked().await.unwrap());
    }
    held
}

async fn nothing_left(clients: &[Client], name: &str) {
    for client in clients {
        soon("settled", client.settled()).await;
        let status = client.status();
        assert_eq!((status.holds, status.background), (0, 0), "{status:?}");
    }
    assert_eq!(holders(clients, name).await, 0);
}

/// Makes a test on both kinds of stores out of each async function.
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
    a_majority_gives_it(3),
    without_a_quorum_all_is_given_back(5),
    waiting_ends_with_patience_or_the_lock(3),
    owner_can_reenter(3),
    a_lost_minority_does_no_harm(3),
    a_majority_that_was_lost_is_told_at_the_release(3),
    request_dropped_anywhere_leaves_nothing_behind(3),
    bad_input_is_refused(3),
    work_under_the_lock(3),
    one_holder_at_a_time(3),
    one_holder_at_a_time_over_five(5),
}

async fn a_majority_gives_it(stands: Stands) {
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let guard = lock.lock().await.unwrap();
    assert!(guard.is_valid());
    assert_eq!((guard.held(), holders(&others, "a").await), (3, 3));
    for client in &clients {
        let member = client.lock("a");
        assert!(member.is_held_by(guard.owner()).await.unwrap());
        assert_eq!(client.status().holds, 1);
    }
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    assert!(!lock.is_held_by(Owner::new()).await.unwrap());
    assert!(other.try_lock().await.unwrap().is_none());
    assert_eq!(holders(&others, "a").await, 3);
    guard.unlock().await.unwrap();
    assert_eq!(holders(&others, "a").await, 0);
    // With one held by somebody else there is still a majority.
    let one = others[1].lock("a").lock().await.unwrap();
    let guard = lock.try_lock().await.unwrap().unwrap();
    assert_eq!(guard.held(), 2);
    assert!(lock.is_held_by(guard.owner()).await.unwrap());
    drop(guard);
    one.unlock().await.unwrap();
    nothing_left(&clients, "a").await;
    nothing_left(&others, "a").await;
}

async fn without_a_quorum_all_is_given_back(stands: Stands) {
    let (clients, others) = (stands.clients().await, stands.clients().await);
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
    assert_eq!(guard.held(), 3);
    guard.unlock().await.unwrap();
    for guard in held {
        guard.unlock().await.unwrap();
    }
    nothing_left(&clients, "a").await;
}

async fn waiting_ends_with_patience_or_the_lock(stands: Stands) {
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let held = other.lock().await.unwrap();
    let wait = Duration::from_millis(60);
    for owner in [None, Some(Owner::new())] {
        let begun = std::time::Instant::now();
        let limited = in_time(|| {
            let request = lock.try_lock().wait(wait);
            match owner {
                Some(owner) => request.owner(owner),
                None => request,
            }
        });
        assert!(limited.await.is_none());
        assert!(begun.elapsed() >= wait);
    }
    // Ten of one client wait, and get it one after the other.
    let waiting: Vec<_> = (0..10)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                let guard = lock.try_lock().wait(LONG).await.unwrap().unwrap();
                guard.unlock().await.unwrap();
            })
        })
        .collect();
    held.unlock().await.unwrap();
    for one in waiting {
        soon("served", one).await.unwrap();
    }
    for client in &clients {
        until("no line is left", || async {
            client.status().subscriptions == 0
        })
        .await;
    }
    nothing_left(&clients, "a").await;
}

async fn owner_can_reenter(stands: Stands) {
    let clients = stands.clients().await;
    let lock = red_lock(&clients, "a");
    let owner = Owner::new();
    let outer = lock.lock().owner(owner).await.unwrap();
    let inner = soon("again", lock.lock().owner(owner).into_future())
        .await
        .unwrap();
    assert_eq!(clients[0].lock("a").hold_count(owner).await.unwrap(), 2);
    outer.unlock().await.unwrap();
    assert!(inner.is_valid());
    assert_eq!(holders(&clients, "a").await, 3);
    inner.unlock().await.unwrap();
    nothing_left(&clients, "a").await;
}

async fn a_lost_minority_does_no_harm(stands: Stands) {
    let clients = stands
        .clients_with(Client::builder().watchdog(WATCHDOG))
        .await;
    let lock = red_lock(&clients, "a");
    let guard = lock.lock().await.unwrap();
    let mut lost = pin!(guard.lost());
    assert!(clients[0].lock("a").force_unlock().await.unwrap());
    until("the minority's loss is known", || async {
        guard.held() == 2
    })
    .await;
    assert!(guard.is_valid());
    assert!(polled(1, &mut lost).await.is_none());
    assert!(clients[2].lock("a").force_unlock().await.unwrap());
    soon("told", lost).await;
    assert!(!guard.is_valid());
    let error = guard.run(std::future::pending::<()>()).await.unwrap_err();
    assert_lost(&error, Loss::NotHeld);
    let error = guard.unlock().await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    // A release that finds a minority gone has released the lock; one that finds most gone not.
    let guard = lock.lock().await.unwrap();
    clients[1].lock("a").force_unlock().await.unwrap();
    guard.unlock().await.unwrap();
    let guard = lock.lock().await.unwrap();
    clients[0].lock("a").force_unlock().await.unwrap();
    clients[1].lock("a").force_unlock().await.unwrap();
    let error = guard.unlock().await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    nothing_left(&clients, "a").await;
}

/// Another owner holds the third member: with the member that the guard lost, others could have acquired a majority.
async fn a_majority_that_was_lost_is_told_at_the_release(stands: Stands) {
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let theirs = others[2].lock("a").lock().await.unwrap();
    let guard = red_lock(&clients, "a").lock().await.unwrap();
    assert_eq!(guard.held(), 2);
    assert!(others[0].lock("a").force_unlock().await.unwrap());
    let lost = guard.unlock().await.unwrap_err();
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    theirs.unlock().await.unwrap();
    nothing_left(&clients, "a").await;
}

async fn request_dropped_anywhere_leaves_nothing_behind(stands: Stands) {
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    for contended in [false, true] {
        dropped_everywhere(async |polls| {
            let held = match contended {
                true => Some(other.lock().await.unwrap()),
                false => None,
            };
            let taking = polled(polls, lock.lock().into_future());
            let (guard, ()) = tokio::join!(taking, async {
                if let Some(held) = held {
                    held.unlock().await.unwrap();
                }
            });
            let through = guard.is_some();
            drop(guard);
            nothing_left(&clients, "a").await;
            through
        })
        .await;
        dropped_everywhere(async |polls| {
            let guard = lock.lock().await.unwrap();
            let released = polled(polls, guard.unlock()).await.is_some();
            nothing_left(&clients, "a").await;
            released
        })
        .await;
    }
}

async fn bad_input_is_refused(stands: Stands) {
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let lock = red_lock(&clients, "a");
    let none = RedLock::new(Vec::<Member>::new());
    let error = none.try_lock().await.unwrap_err();
    assert!(matches!(error, Error::InvalidMembers { .. }), "{error}");
    let unnamed = lock.clone().and(clients[0].lock(""));
    let error = unnamed.lock().await.unwrap_err();
    assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    for timeout in [Duration::ZERO, Duration::MAX] {
        let error = lock.clone().timeout(timeout).lock().await.unwrap_err();
        assert!(matches!(error, Error::InvalidSetting { .. }), "{error}");
    }
    for lease in [Duration::ZERO, Duration::MAX] {
        let error = lock.lock().lease(lease).await.unwrap_err();
        assert!(matches!(error, Error::InvalidLease { .. }), "{error}");
    }
    // Nothing would remain of it.
    let error = lock.lock().lease(SECOND / 500).await.unwrap_err();
    assert!(matches!(error, Error::InvalidSetting { .. }), "{error}");
    // Through two clients of one store it would wait for itself.
    let itself = lock.clone().and(others[1].lock("a"));
    let refused = [
        itself.lock().await.map(drop).unwrap_err(),
        itself.is_held_by(Owner::new()).await.unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, Error::InvalidMembers { .. }), "{error}");
    }
    // One lock that is named three times is not three.
    let twice = RedLock::new([
        clients[0].lock("a"),
        clients[0].lock("a"),
        clients[0].lock("a"),
        clients[1].lock("a"),
        clients[2].lock("a"),
    ]);
    let held = [
        others[1].lock("a").lock().await.unwrap(),
        others[2].lock("a").lock().await.unwrap(),
    ];
    assert!(twice.try_lock().await.unwrap().is_none());
    for guard in held {
        guard.unlock().await.unwrap();
    }
    // Most refuse their owner: waiting would not mend it.
    let owner = Owner::new();
    let strict = RedLock::new(
        clients
            .iter()
            .map(|client| client.lock("a").non_reentrant()),
    );
    let strict = strict.timeout(5 * SECOND);
    let guard = strict.lock().owner(owner).await.unwrap();
    let error = soon("refused", strict.lock().owner(owner).into_future())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::AlreadyHeld { .. }), "{error}");
    guard.unlock().await.unwrap();
    // Something else under the key: of a minority it is one that says no, of most an error.
    if let Stands::Servers(servers) = &stands {
        let () = servers[0].ask(&["SET", "a", "5"]);
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.held(), 2);
        guard.unlock().await.unwrap();
        let () = servers[2].ask(&["SET", "a", "5"]);
        let error = lock.lock().await.unwrap_err();
        assert!(matches!(error, Error::WrongKind { .. }), "{error}");
        let _: i64 = servers[0].ask(&["DEL", "a"]);
        let _: i64 = servers[2].ask(&["DEL", "a"]);
    }
    nothing_left(&clients, "a").await;
}

async fn work_under_the_lock(stands: Stands) {
    let clients = stands.clients().await;
    let lock = red_lock(&clients, "a");
    let held = lock.run(holders(&clients, "a")).await.unwrap();
    assert_eq!(held, 3);
    let lost = lock.run(async {
        for client in &clients {
            client.lock("a").force_unlock().await.unwrap();
        }
    });
    let lost = lost.await.unwrap_err();
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    nothing_left(&clients, "a").await;
}

async fn one_holder_at_a_time(stands: Stands) {
    contend(stands, None).await;
}

async fn one_holder_at_a_time_over_five(stands: Stands) {
    contend(stands, None).await;
}

/// F19 (redisson#624, #2172): many take it with a lease that is shorter than they wait, and some
/// with no wait at all. Never two of them find it valid at a time.
async fn contend(stands: Stands, frozen: Option<Arc<AtomicUsize>>) {
    const PROCESSES: usize = 3;
    const TASKS: usize = 2;
    const ROUNDS: usize = 8;
    let inside = Arc::new(AtomicBool::new(false));
    let mut all = Vec::new();
    let mut tasks = Vec::new();
    for process in 0..PROCESSES {
        let clients = stands.clients().await;
        for task in 0..TASKS {
            let timeout = match frozen {
                Some(_) => SECOND / 10,
                None => 5 * SECOND,
            };
            let lock = red_lock(&clients, "a").timeout(timeout);
            let (inside, frozen) = (inside.clone(), frozen.clone());
            tasks.push(tokio::spawn(async move {
                let mut had = 0;
                while had < ROUNDS {
                    let mut request = lock.try_lock().lease(LONG / 3);
                    if (process + task + had) % 3 > 0 {
                        request = request.wait(LONG);
                    }
                    // Most of them slow for a moment: as good as refused.
                    let Ok(Some(guard)) = request.await else {
                        tokio::task::yield_now().await;
                        continue;
                    };
                    if !guard.is_valid() {
                        continue;
                    }
                    assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                    tokio::task::yield_now().await;
                    // A pause of the machine for longer than the lease is told, not overlooked:
                    // then nothing can be said of who else was inside.
                    let alone = guard.is_valid();
                    inside.store(false, Ordering::SeqCst);
                    assert!(alone, "the machine was too slow for this test");
                    had += 1;
                    if let Some(frozen) = &frozen {
                        frozen.fetch_add(1, Ordering::SeqCst);
                    }
                    guard.unlock().await.unwrap();
                }
            }));
        }
        all.push(clients);
    }
    if let (Some(had), Stands::Servers(servers)) = (&frozen, &stands) {
        // One after the other hangs for a while, and works again: always a minority.
        for (n, server) in servers.iter().enumerate() {
            let so_far = had.load(Ordering::SeqCst);
            server.freeze();
            until("it goes on without that one", || async {
                had.load(Ordering::SeqCst) > so_far + 3
                    || had.load(Ordering::SeqCst) == PROCESSES * TASKS * ROUNDS
            })
            .await;
            server.thaw();
            // What hung is settled before the next one hangs, or it would be no minority.
            for clients in &all {
                let member = clients[n].lock("awake");
                soon("awake", async {
                    while member.is_locked().await.is_err() {}
                })
                .await;
            }
        }
    }
    for task in tasks {
        soon("all get their turns", task).await.unwrap();
    }
    for clients in &all {
        nothing_left(clients, "a").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_holder_at_a_time_while_a_minority_hangs() {
    contend(servers(3), Some(Arc::default())).await;
}

/// A minority that hangs, or is down, costs its own short time only, and nothing remains there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minority_may_hang_or_be_down() {
    let mut all: Vec<_> = (0..5).map(|_| Server::start()).collect();
    // Were the response timeout waited for, the test would not end in time.
    let settings = Client::builder().response_timeout(2 * LONG);
    let mut clients = Vec::new();
    for server in &all {
        clients.push(settings.clone().connect(&server.url()).await.unwrap());
    }
    let lock = red_lock(&clients, "a").timeout(SECOND / 2);
    // They hang while it is held: it stays, and its release is not held up.
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.held(), 5);
    all[1].freeze();
    all[3].kill();
    assert!(guard.is_valid());
    soon("not held up", guard.unlock()).await.unwrap();
    for _ in 0..3 {
        let guard = soon("without them", lock.lock().into_future())
            .await
            .unwrap();
        assert_eq!(guard.held(), 3);
        assert!(guard.is_valid());
        soon("not held up", guard.unlock()).await.unwrap();
    }
    // One server of a bare quorum hangs, and one that refused works again: others can acquire the lock, so it is released.
    let guard = soon("without them", lock.lock().into_future())
        .await
        .unwrap();
    assert_eq!(guard.held(), 3);
    all[1].thaw();
    all[0].freeze();
    soon("not held up", guard.unlock()).await.unwrap();
    all[0].thaw();
    all[3].restart();
    soon("all of them again", async {
        loop {
            match lock.lock().await {
                Ok(guard) if guard.held() == 5 => break guard.unlock().await.unwrap(),
                _ => {}
            }
        }
    })
    .await;
    nothing_left(&clients, "a").await;
}

/// Most of them hang: no lock, an error that says so, and nothing remains when they go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_there_is_no_lock() {
    let all: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let mut clients = Vec::new();
    for server in &all {
        clients.push(Client::connect(&server.url()).await.unwrap());
    }
    let lock = red_lock(&clients, "a").timeout(SECOND / 5);
    lock.lock().await.unwrap().unlock().await.unwrap();
    all[0].freeze();
    all[2].freeze();
    let error = soon("refused", lock.try_lock().into_future())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(!clients[1].lock("a").is_locked().await.unwrap());
    let waiting = lock.try_lock().wait(SECOND / 2).into_future();
    let error = soon("refused", waiting).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    // Who waits for ever gets it when they go on.
    let waiting = tokio::spawn(lock.lock().into_future());
    all[0].thaw();
    all[2].thaw();
    let guard = soon("at last", waiting).await.unwrap().unwrap();
    guard.unlock().await.unwrap();
    nothing_left(&clients, "a").await;
}

/// F19: yes from all, but so late that nothing of the lease remains: not held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_that_comes_too_late_is_none() {
    let all: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let mut clients = Vec::new();
    for server in &all {
        let settings = Client::builder().response_timeout(2 * LONG);
        clients.push(settings.connect(&server.url()).await.unwrap());
    }
    let lock = red_lock(&clients, "a").timeout(LONG);
    let lease = SECOND / 2;
    lock.lock().await.unwrap().unlock().await.unwrap();
    all[0].freeze();
    all[1].freeze();
    let asked = std::time::Instant::now();
    let trying = tokio::spawn(lock.try_lock().lease(lease).into_future());
    until("the third has said yes", || async {
        clients[2].lock("a").is_locked().await.unwrap() || asked.elapsed() > lease
    })
    .await;
    until("the lease is over", || async { asked.elapsed() > lease }).await;
    all[0].thaw();
    all[1].thaw();
    let won = soon("answered", trying).await.unwrap();
    assert!(matches!(won, Ok(None)), "{won:?}");
    nothing_left(&clients, "a").await;
}

/// A server that lost its data gives the lock to another; the majority keeps it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_lost_its_data_does_not_give_it_away() {
    let mut all: Vec<_> = (0..3).map(|_| Server::start()).collect();
    let (mut clients, mut others) = (Vec::new(), Vec::new());
    for server in &all {
        clients.push(Client::connect(&server.url()).await.unwrap());
        others.push(Client::connect(&server.url()).await.unwrap());
    }
    let (lock, other) = (red_lock(&clients, "a"), red_lock(&others, "a"));
    let guard = lock.lock().await.unwrap();
    all[1].restart();
    until("it is there again", || async {
        others[1].lock("a").is_locked().await.is_ok()
    })
    .await;
    assert!(other.try_lock().await.unwrap().is_none());
    assert!(guard.is_valid());
    guard.unlock().await.unwrap();
    nothing_left(&clients, "a").await;
}

#[tokio::test(start_paused = true)]
async fn the_allowance_for_clocks_is_taken_off() {
    let stands = embedded(5);
    let clients = stands.clients().await;
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
    let error = guard.unlock().await.unwrap_err();
    assert_lost(&error, Loss::LeaseEnded);
    nothing_left(&clients, "a").await;
}

/// An owner that has entered twice holds it for the longer lease, and both guards allow for clocks
/// that had that long to differ.
#[tokio::test(start_paused = true)]
async fn the_longest_lease_decides_what_is_taken_off() {
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

/// Who waits for a majority is in nobody's way who wants but one of its members, or a majority of
/// others.
#[tokio::test]
async fn who_waits_keeps_nobody_from_its_members() {
    let stands = embedded(5);
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let _taken = [
        others[1].lock("a").lock().await.unwrap(),
        others[2].lock("a").lock().await.unwrap(),
    ];
    let first = others[0].lock("a").lock().await.unwrap();
    let mut waiting = red_lock(&clients[..3], "a").lock().into_future();
    // Embedded stores answer at once: after this it stands in line.
    assert!(crate::common::polled(2, &mut waiting).await.is_none());
    let waiting = tokio::spawn(waiting);
    let member = tokio::spawn(clients[0].lock("a").lock().into_future());
    until("it waits too", || async {
        clients[0].status().subscriptions == 1
    })
    .await;
    first.unlock().await.unwrap();
    let member = soon("the member is free", member).await.unwrap().unwrap();
    member.unlock().await.unwrap();
    let of_others = [
        clients[0].lock("a"),
        clients[3].lock("a"),
        clients[4].lock("a"),
    ];
    let of_others = RedLock::new(of_others).timeout(5 * SECOND).lock();
    let guard = soon("they are free", of_others.into_future())
        .await
        .unwrap();
    assert_eq!(guard.held(), 3);
    waiting.abort();
}

/// The quorum-th longest lease counts.
#[tokio::test(start_paused = true)]
async fn a_majority_of_leases_decides() {
    let mut clients = Vec::new();
    for seconds in [10, 20, 40] {
        let settings = Client::builder().watchdog(seconds * SECOND);
        clients.push(settings.connect_embedded(&Embedded::new()).unwrap());
    }
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.valid_for(), 20 * SECOND - Duration::from_millis(202));
    assert_eq!(guard.held(), 3);
    drop(guard);
    nothing_left(&clients, "a").await;
}

#[tokio::test(start_paused = true)]
async fn renewed_for_hours_and_released_for_good() {
    let stands = embedded(3);
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    let other = RedLock::new(others.iter().map(|client| client.lock("a")));
    let guard = lock.lock().await.unwrap();
    let lost = tokio::spawn(guard.lost());
    for _ in 0..24 {
        tokio::time::sleep(3600 * SECOND).await;
        assert!(guard.is_valid());
        assert!(guard.valid_for() >= 19 * SECOND);
        assert!(other.try_lock().wait(SECOND).await.unwrap().is_none());
    }
    guard.unlock().await.unwrap();
    tokio::time::sleep(3600 * SECOND).await;
    assert!(!lost.is_finished(), "released, not lost");
    lost.abort();
    assert_eq!(holders(&clients, "a").await, 0);
    for client in clients.iter().chain(&others) {
        let status = client.status();
        assert_eq!(
            (status.holds, status.subscriptions, status.background),
            (0, 0, 0)
        );
    }
}

/// Whoever waits gets what a dead holder left when its lease ends.
#[tokio::test(start_paused = true)]
async fn a_dead_holder_costs_its_lease() {
    let stands = embedded(3);
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let lock = RedLock::new(clients.iter().map(|client| client.lock("a")));
    let other = RedLock::new(others.iter().map(|client| client.lock("a")))
        .backoff(Backoff::constant(SECOND / 10));
    std::mem::forget(lock.lock().lease(20 * SECOND).await.unwrap());
    let begun = tokio::time::Instant::now();
    let guard = other.lock().await.unwrap();
    let waited = begun.elapsed();
    assert!(waited >= 20 * SECOND && waited < 21 * SECOND, "{waited:?}");
    guard.unlock().await.unwrap();
}

/// Guards and pending acquisitions may go to other threads.
#[test]
fn everything_is_send() {
    fn is_send<T: Send>(_: &T) {}
    let lock = RedLock::new([Client::embedded().lock("a")]);
    is_send(&lock);
    is_send(&lock.lock().into_future());
    is_send(&lock.run(async {}));
    is_send(&async {
        let guard = lock.lock().await.unwrap();
        guard.lost().await;
        guard.run(async {}).await.unwrap();
        guard.unlock().await.unwrap();
    });
}

/// Who waits for a majority is in nobody's way who waits for one of the members, or for others.
#[tokio::test(start_paused = true)]
async fn only_those_who_want_the_same_wait_in_one_line() {
    let stands = embedded(5);
    let (clients, others) = (stands.clients().await, stands.clients().await);
    let mut held = Vec::new();
    for other in &others[..3] {
        held.push(other.lock("a").lock().await.unwrap());
    }
    let blocked = RedLock::new(clients[..3].iter().map(|client| client.lock("a")));
    let blocked = tokio::spawn(blocked.lock().into_future());
    tokio::time::sleep(Duration::from_secs(1)).await;

    let free = [&clients[0], &clients[3], &clients[4]];
    let free = RedLock::new(free.map(|client| client.lock("a")));
    let free = soon("a majority is free", free.lock().into_future()).await;
    free.unwrap().unlock().await.unwrap();

    let single = tokio::spawn(clients[0].lock("a").lock().into_future());
    tokio::time::sleep(Duration::from_secs(1)).await;
    held.remove(0).unlock().await.unwrap();
    drop(soon("it is called", single).await.unwrap().unwrap());
    assert!(!blocked.is_finished());
    blocked.abort();
}
