//! An owner that tasks share requests a lock again after it has lost a hold: the late release of the lost hold
//! never deletes a later acquisition.

use std::time::Instant;

use redlatch::{FencedLock, MultiGuard, blocking};

use crate::common::prelude::*;

/// Lease of a hold that is about to be lost.
const BRIEF: Duration = Duration::from_millis(700);

/// Makes the server refuse all writes, or accept them again. Clients retry refused steps with growing
/// pauses.
pub(crate) fn refuse_writes(server: &Server, refuse: bool) {
    let replicas = if refuse { "1" } else { "0" };
    let () = server.command(&["CONFIG", "SET", "min-replicas-to-write", replicas]);
}

/// Number of writes that the server has refused so far.
pub(crate) fn refusals(server: &Server) -> u64 {
    server.errors("NOREPLICAS")
}

/// After this many refusals in a row, a step is repeated after the longest pause, 250 ms.
const UNTIL_THE_LONGEST_PAUSE: u64 = 8;

/// The release of the lost hold is retried in the background, past its check for a later hold. The
/// second request waits for its turn and is canceled. The third must not overtake the release,
/// which would then delete what the third has acquired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_of_lost_hold_takes_turns_with_later_holds() {
    let server = Server::start();
    let (ours, theirs) = (client(&server).await, client(&server).await);
    let lock = ours.lock("a");
    for _ in 0..3 {
        let me = Owner::new();
        let lost = loop {
            let lost = retry_if_late(|| lock.lock().owner(me).lease(BRIEF)).await;
            // So that there is a key left for the release to delete.
            if server.command::<bool>(&["PERSIST", "a"]) {
                break lost;
            }
        };
        refuse_writes(&server, true);
        within_limit("lost", lost.lost()).await;
        let before = refusals(&server);
        drop(lost);
        let refused = |times| {
            let server = &server;
            until("refused", move || async move {
                refusals(server) >= before + times
            })
        };
        refused(UNTIL_THE_LONGEST_PAUSE).await;
        let second = poll_up_to(1, lock.lock().owner(me)).await;
        assert!(second.is_none(), "the second request has not waited");
        refused(refusals(&server) - before + 1).await;
        refuse_writes(&server, false);
        let third = lock.lock().owner(me).lease(10 * LONG).await.unwrap();
        within_limit("the release has ended", ours.flush()).await;
        assert!(third.is_valid());
        let other = theirs.lock("a").try_lock().await.unwrap();
        assert!(other.is_none(), "two valid holders");
        free(third).await;
    }
}

/// The same without any cancellation by the caller: a RedLock gives each of its rounds little time.
#[test]
fn release_of_lost_red_lock_takes_turns_with_later_rounds() {
    let server = Server::start();
    let settings = || long_timeout();
    let ours = blocking::Client::with(settings(), &server.url()).unwrap();
    let theirs = blocking::Client::with(settings(), &server.url()).unwrap();
    let red = blocking::RedLock::new([ours.lock("a")]).member_timeout(BRIEF / 5);
    for _ in 0..4 {
        let lost = loop {
            let lost = retry_if_late_blocking(|| red.lock().lease(BRIEF).block());
            if server.command::<bool>(&["PERSIST", "a"]) {
                break lost;
            }
        };
        refuse_writes(&server, true);
        // A RedLock ends before the leases of its members do: the member's hold must be lost, too.
        let begun = Instant::now();
        while begun.elapsed() < BRIEF {
            std::thread::sleep(BRIEF / 10);
        }
        assert!(!lost.is_valid());
        let before = refusals(&server);
        drop(lost);
        while refusals(&server) < before + UNTIL_THE_LONGEST_PAUSE {
            assert!(begun.elapsed() < LONG, "never refused");
            std::thread::sleep(Duration::from_millis(2));
        }
        let next = std::thread::scope(|scope| {
            scope.spawn(|| {
                // The release alone is refused four times a second. More refusals are attempts of a
                // later round that does not wait for it, and would now be first.
                let begun = Instant::now();
                let mut before = refusals(&server);
                while begun.elapsed() < 2 * BRIEF {
                    std::thread::sleep(Duration::from_millis(15));
                    let now = refusals(&server);
                    if now > before + 1 {
                        break;
                    }
                    before = now;
                }
                refuse_writes(&server, false);
            });
            red.lock().block().unwrap()
        });
        ours.flush().unwrap();
        assert!(next.is_valid());
        let other = theirs.lock("a").try_lock().block().unwrap();
        assert!(other.is_none(), "two valid holders");
        next.unlock().unwrap();
    }
}

/// The request that replaces a lost hold is canceled before it has sent anything. What the lost
/// hold left in the store is released nevertheless, before its lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_hold_is_released_although_its_successor_was_canceled() {
    let server = Server::start();
    let (ours, me) = (client(&server).await, Owner::new());
    let lock = ours.lock("a");
    let lost = loop {
        let lost = retry_if_late(|| lock.lock().owner(me).lease(BRIEF)).await;
        if server.command::<bool>(&["PEXPIRE", "a", "3600000"]) {
            break lost;
        }
    };
    within_limit("lost", lost.lost()).await;
    let waiter = waiter_of(&ours, lock.lock()).await;
    // Queues behind the waiter, and is canceled there.
    assert!(poll_up_to(1, lock.lock().owner(me)).await.is_none());
    drop(lost);
    free(joined("released", waiter).await).await;
}

const NAMES: [&str; 2] = ["{x}1", "{x}2"];

/// The locks that a task holds: one of the two, or both as a multi-lock.
enum Held {
    One(usize, Guard<FencedLock>),
    Both(MultiGuard),
}

impl Held {
    fn is_valid(&self) -> bool {
        match self {
            Held::One(_, guard) => guard.is_valid(),
            Held::Both(guard) => guard.is_valid(),
        }
    }

    fn covers(&self, name: usize) -> bool {
        match self {
            Held::One(one, _) => *one == name,
            Held::Both(_) => true,
        }
    }

    fn token(&self, locks: &[FencedLock; 2], name: usize) -> Option<u64> {
        match self {
            Held::One(one, guard) => (*one == name).then(|| guard.token()),
            Held::Both(guard) => guard.token(&locks[name]),
        }
    }

    async fn unlock(self) -> redlatch::Result<()> {
        match self {
            Held::One(_, guard) => guard.unlock().await,
            Held::Both(guard) => guard.unlock().await,
        }
    }
}

/// A guard with its number, and the client and the owner that acquired it.
type NumberedGuard = (u64, (usize, Owner), Held);

/// State that all tasks share.
struct SharedState {
    server: Server,
    proxy: Arc<Proxy>,
    clients: [Client; 2],
    locks: [[FencedLock; 2]; 2],
    guards: Mutex<Vec<NumberedGuard>>,
    next: AtomicU64,
    /// The greatest token of each name so far.
    tokens: [AtomicU64; 2],
    acquired: AtomicU64,
    lost: AtomicU64,
    violations: Mutex<Vec<String>>,
    over: AtomicBool,
}

impl SharedState {
    fn violated(&self, what: String) {
        self.over.store(true, Ordering::SeqCst);
        self.violations.lock().unwrap().push(what);
    }

    /// Checks that all valid guards of one name belong to one owner.
    fn check_exclusion(&self) {
        let guards = self.guards.lock().unwrap();
        for (i, name) in NAMES.iter().enumerate() {
            let mut holders = guards.iter().filter(|(.., held)| held.covers(i));
            // Validity never returns: a guard that is valid at the second check was valid at the
            // first.
            let Some((_, first, one)) = holders.find(|(.., held)| held.is_valid()) else {
                continue;
            };
            let second = holders.find(|(_, holder, held)| holder != first && held.is_valid());
            if let Some((_, second, _)) = second
                && one.is_valid()
            {
                self.violated(format!("{name}: {first:?} and {second:?} both hold it"));
            }
        }
    }

    /// Checks that the store has the hold of a valid guard.
    fn check_store(&self, store: &mut redis::Connection, number: u64) {
        let guards = self.guards.lock().unwrap();
        let found = guards.iter().find(|(one, ..)| *one == number);
        let Some((_, (client, owner), held)) = found else {
            return;
        };
        let field = format!("{}:{}", self.clients[*client].id(), owner.number());
        for (i, name) in NAMES.iter().enumerate().filter(|(i, _)| held.covers(*i)) {
            let query = redis::cmd("HEXISTS").arg(name).arg(&field).query(store);
            let there: bool = query.unwrap();
            // Checked last: the guard was valid when the store answered.
            if !there && held.is_valid() {
                self.violated(format!(
                    "{}: {owner:?} holds it, the store does not",
                    NAMES[i]
                ));
            }
        }
    }

    /// One of many tasks of an owner: it acquires, is canceled, holds, loses and releases.
    async fn work(&self, client: usize, owner: Owner, mut random: Random) {
        let mut store = self.server.connection();
        let locks = &self.locks[client];
        let both = MultiLock::new(locks.clone());
        while !self.over.load(Ordering::SeqCst) {
            let name = usize::try_from(random.below(2)).unwrap();
            let wait = random.millis(0, 60);
            let lease = random.one_in(2).then(|| random.millis(40, 300));
            let before = [0, 1].map(|i: usize| self.tokens[i].load(Ordering::SeqCst));
            let several = random.one_in(6);
            let acquiring = async {
                if several {
                    let request = both.try_lock().owner(owner).wait(wait);
                    let guard = match lease {
                        Some(lease) => request.lease(lease).await?,
                        None => request.await?,
                    };
                    return Ok(guard.map(Held::Both));
                }
                let request = locks[name].try_lock().owner(owner).wait(wait);
                let guard = match lease {
                    Some(lease) => request.lease(lease).await?,
                    None => request.await?,
                };
                redlatch::Result::Ok(guard.map(|guard| Held::One(name, guard)))
            };
            let acquired: Option<redlatch::Result<_>> = match random.below(4) {
                0 => Some(acquiring.await),
                1 => {
                    let polls = 1 + usize::try_from(random.below(4)).unwrap();
                    poll_up_to(polls, acquiring).await
                }
                _ => {
                    let limit = random.millis(0, 80);
                    tokio::time::timeout(limit, acquiring).await.ok()
                }
            };
            match acquired {
                Some(Ok(Some(held))) => {
                    for i in 0..2 {
                        let Some(token) = held.token(locks, i) else {
                            continue;
                        };
                        if token <= before[i] {
                            let (name, before) = (NAMES[i], before[i]);
                            self.violated(format!("{name}: token {token} after {before}"));
                        }
                        self.tokens[i].fetch_max(token, Ordering::SeqCst);
                    }
                    self.hold(held, (client, owner), &mut store, &mut random)
                        .await;
                }
                _ => tokio::time::sleep(random.millis(0, 10)).await,
            }
        }
    }

    async fn hold(
        &self,
        held: Held,
        holder: (usize, Owner),
        store: &mut redis::Connection,
        random: &mut Random,
    ) {
        self.acquired.fetch_add(1, Ordering::SeqCst);
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        self.guards.lock().unwrap().push((number, holder, held));
        for _ in 0..=random.below(5) {
            self.check_exclusion();
            self.check_store(store, number);
            tokio::time::sleep(random.millis(0, 10)).await;
        }
        if random.one_in(4) {
            // Holds until the hold is lost, or for a while.
            let end = Instant::now() + random.millis(0, 400);
            while Instant::now() < end && self.is_valid(number) {
                self.check_store(store, number);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        if !self.is_valid(number) {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        let held = {
            let mut guards = self.guards.lock().unwrap();
            let at = guards.iter().position(|(one, ..)| *one == number).unwrap();
            guards.swap_remove(at).2
        };
        match random.below(3) {
            0 => drop(held),
            1 => drop(held.unlock().await),
            _ => drop(tokio::time::timeout(random.millis(0, 20), held.unlock()).await),
        }
    }

    fn is_valid(&self, number: u64) -> bool {
        let guards = self.guards.lock().unwrap();
        let found = guards.iter().find(|(one, ..)| *one == number);
        found.is_some_and(|(.., held)| held.is_valid())
    }

    /// Breaks the network and refuses writes repeatedly.
    async fn inject_faults(&self, mut random: Random) {
        let proxy = &self.proxy;
        while !self.over.load(Ordering::SeqCst) {
            tokio::time::sleep(random.millis(50, 500)).await;
            let lasts = random.millis(20, 500);
            match random.below(8) {
                0 => proxy.cut(),
                1 => proxy.reset(),
                2 => proxy.reset_after(usize::try_from(random.below(400)).unwrap()),
                3 => proxy.reset_after_sent(usize::try_from(random.below(2000)).unwrap()),
                4 => {
                    proxy.stall(true);
                    tokio::time::sleep(lasts).await;
                    proxy.stall(false);
                }
                5 => {
                    refuse_writes(&self.server, true);
                    tokio::time::sleep(lasts).await;
                    refuse_writes(&self.server, false);
                }
                6 => {
                    cut_off(proxy);
                    tokio::time::sleep(lasts).await;
                    proxy.refuse(false);
                }
                _ => {
                    // The connections end first: after a discarded answer, later answers would be
                    // assigned to the wrong requests.
                    proxy.discard_replies(true);
                    tokio::time::sleep(lasts).await;
                    cut_off(proxy);
                    proxy.discard_replies(false);
                    proxy.refuse(false);
                }
            }
        }
    }
}

/// Owners that several tasks share, cancellation at random points, and a network that breaks.
/// The checks count guards: no two valid guards belong to different owners, the store keeps the lock for
/// each valid guard, and each token is greater than the tokens of all acquisitions that ended before
/// its own began.
///
/// `REDLATCH_SEED` repeats a run as far as the scheduler lets it; `REDLATCH_SECONDS` makes it longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_losses_and_cancellations_never_break_exclusion() {
    let seconds = std::env::var("REDLATCH_SECONDS").ok();
    let lasts = Duration::from_secs(seconds.map_or(5, |seconds| seconds.parse().unwrap()));
    let seed = seed();
    let (server, proxy) = proxied_server();
    let connect = async || {
        let settings = Client::builder()
            .watchdog_lease(Duration::from_millis(600))
            .response_timeout(Duration::from_millis(400));
        settings.connect(&proxy.url()).await.unwrap()
    };
    let clients = [connect().await, connect().await];
    let locks = [0, 1].map(|i: usize| NAMES.map(|name| clients[i].fenced_lock(name)));
    let shared = Arc::new(SharedState {
        server,
        proxy,
        clients,
        locks,
        guards: Mutex::default(),
        next: AtomicU64::new(0),
        tokens: Default::default(),
        acquired: AtomicU64::new(0),
        lost: AtomicU64::new(0),
        violations: Mutex::default(),
        over: AtomicBool::new(false),
    });
    let mut seeds = Random(seed);
    let mut tasks = Vec::new();
    for client in [0, 1] {
        for _ in 0..2 {
            let owner = Owner::new();
            for _ in 0..3 {
                let (shared, random) = (shared.clone(), Random(seeds.next()));
                tasks.push(tokio::spawn(async move {
                    shared.work(client, owner, random).await
                }));
            }
        }
    }
    let (breaking, random) = (shared.clone(), Random(seeds.next()));
    let breaking = async move { breaking.inject_faults(random).await };
    tasks.push(tokio::spawn(breaking));
    let end = Instant::now() + lasts;
    let over = async || Instant::now() > end || shared.over.load(Ordering::SeqCst);
    until("time is up", over).await;
    shared.over.store(true, Ordering::SeqCst);
    done_all("the tasks end", tasks).await;
    let (acquired, lost) = (&shared.acquired, &shared.lost);
    println!("{acquired:?} acquired, {lost:?} of them lost");
    let violations = shared.violations.lock().unwrap().clone();
    assert!(
        violations.is_empty(),
        "REDLATCH_SEED={seed}: {violations:#?}"
    );
    assert!(acquired.load(Ordering::SeqCst) > 0);
    // Nothing is left behind for longer than a lease.
    for name in NAMES {
        let is_free = async || !shared.server.command::<bool>(&["EXISTS", name]);
        until("free", is_free).await;
    }
}
