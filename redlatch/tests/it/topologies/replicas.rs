//! F24: an acquisition counts once the replicas have acknowledged it; otherwise it is released.

use redlatch::Result;
use tokio::time::Instant;

use super::sentinel_or_cluster::Deployment;
use crate::common::prelude::*;

/// A master and its replicas, without sentinels.
struct Replicated {
    master: Server,
    replicas: Vec<Server>,
}

impl Replicated {
    async fn start(count: usize) -> Replicated {
        let settings = ["--repl-diskless-sync-delay", "0", "--repl-timeout", "600"];
        let master = Server::start_with(&settings);
        let follow = format!("127.0.0.1 {}", master.port());
        let replica = |_| Server::start_with(&[&settings[..], &["--replicaof", &follow]].concat());
        let replicas = (0..count).map(replica).collect();
        let all = Replicated { master, replicas };
        all.until_in_sync(count).await;
        all
    }

    /// Waits until this many replicas are connected and in sync.
    async fn until_in_sync(&self, count: usize) {
        until_in_sync(&self.master, count).await;
    }

    async fn client(&self, settings: ClientBuilder) -> Client {
        settings.connect(&self.master.url()).await.unwrap()
    }

    fn exists(&self, key: &str) -> bool {
        self.master.command(&["EXISTS", key])
    }

    /// Returns how many WAITs the master has received.
    fn waits(&self) -> u64 {
        self.master.calls("wait:")
    }
}

/// A short replica timeout.
fn short_replica_timeout(sync: ReplicaSync) -> ClientBuilder {
    let settings = long_timeout().replica_sync(sync);
    settings.replica_timeout(Duration::from_millis(100))
}

#[track_caller]
fn assert_not_replicated<T>(asked: Result<T>, needed: usize, in_sync: usize) {
    let Err(error) = asked else {
        panic!("granted although the replicas hang");
    };
    let limit = Duration::from_millis(100);
    assert_matches!(&error, Error::NotReplicated { needed: n, in_sync: i, within, .. }
        if (*n, *i, *within) == (needed, in_sync, limit));
    let said = error.to_string();
    let counted = format!("{in_sync} of {needed} required replicas");
    for part in [&*counted, "100ms", "replica_sync", "replica_timeout"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(error.is_transient());
}

/// Whether a single server has replicas is not known before it is connected to.
#[tokio::test]
async fn lazy_client_waits_for_replicas() {
    let all = Replicated::start(1).await;
    let settings = short_replica_timeout(ReplicaSync::All);
    let client = settings.connect_lazy(&all.master.url()).unwrap();
    let lock = client.lock("lazy");
    free(retry_transient(|| lock.lock()).await).await;
    all.replicas[0].freeze();
    assert_not_replicated(lock.lock().await, 1, 0);
    let settings = short_replica_timeout(ReplicaSync::Off);
    let client = settings.connect_lazy(&all.master.url()).unwrap();
    let lock = client.lock("not replicated");
    free(held(&lock).await).await;
    all.replicas[0].thaw();
}

/// In every case, the object is free again on the master when the error is returned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreplicated_acquisition_is_released() {
    let all = Replicated::start(1).await;
    let client = all.client(short_replica_timeout(ReplicaSync::All)).await;
    let expirable = client.expirable_semaphore("expirable");
    expirable.try_set_permits(3).await.unwrap();
    let semaphore = client.semaphore("semaphore");
    semaphore.try_set_permits(3).await.unwrap();
    let outer = retry_transient(|| client.lock("outer").lock()).await;
    all.replicas[0].freeze();
    let free = |key: &str| assert!(!all.exists(key), "{key} is still held");

    let lock = client.lock("lock");
    assert_not_replicated(lock.lock().await, 1, 0);
    free("lock");
    assert_not_replicated(lock.try_lock().await, 1, 0);
    free("lock");
    assert_not_replicated(lock.run(async {}).await, 1, 0);
    free("lock");
    assert_not_replicated(client.spin_lock("spin").lock().await, 1, 0);
    free("spin");
    assert_not_replicated(client.fair_lock("fair").lock().await, 1, 0);
    free("fair");
    let fenced = client.fenced_lock("fenced");
    assert_not_replicated(fenced.lock().await, 1, 0);
    free("fenced");
    // A token that was issued once is not issued again.
    let spent = fenced.current_token().await.unwrap();
    let both = client.read_write_lock("both");
    assert_not_replicated(both.read().lock().await, 1, 0);
    free("both");
    assert_not_replicated(both.write().lock().await, 1, 0);
    free("both");
    let several = MultiLock::new([client.lock("one"), client.lock("two")]);
    assert_not_replicated(several.lock().await, 1, 0);
    free("one");
    free("two");
    assert_not_replicated(expirable.acquire_many(2).await, 1, 0);
    assert_eq!(expirable.available().await.unwrap(), 3);
    assert_not_replicated(semaphore.acquire_many(2).await, 1, 0);
    assert_eq!(semaphore.available().await.unwrap(), 3);
    // A hold keeps its previous hold count.
    assert_not_replicated(outer.reenter().await, 1, 0);
    assert!(outer.is_valid() && outer.hold_count() == 1);
    within_limit("settled", client.flush()).await;
    let holds = client.lock("outer").hold_count(outer.owner()).await;
    assert_eq!(holds.unwrap(), 1);
    assert_eq!(client.status().holds, 1);

    // Renewals and releases need no replica.
    outer.unlock().await.unwrap();
    free("outer");
    all.replicas[0].thaw();
    let guard = retry_transient(|| fenced.lock()).await;
    assert!(guard.token() > spent);
}

/// The required replicas, by setting: while one of two replicas hangs, while both hang, and without
/// any.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_sync_determines_required_replicas() {
    use ReplicaSync::{All, AtLeast, Majority, Off};
    let mut all = Replicated::start(2).await;
    let [every, majority, one, two, off] = [
        all.client(short_replica_timeout(All)).await,
        all.client(short_replica_timeout(Majority)).await,
        all.client(short_replica_timeout(AtLeast(1))).await,
        all.client(short_replica_timeout(AtLeast(2))).await,
        all.client(short_replica_timeout(Off)).await,
    ];
    let name = unique("setting");
    let take = async |client: &Client| match client.lock(&name).lock().await {
        Ok(guard) => guard.unlock().await,
        Err(error) => Err(error),
    };
    for client in [&every, &majority, &one, &two, &off] {
        free(retry_transient(|| client.lock(&name).lock()).await).await;
    }
    all.replicas[0].freeze();
    for client in [&every, &majority, &one, &off] {
        free(retry_transient(|| client.lock(&name).lock()).await).await;
    }
    assert_not_replicated(take(&two).await, 2, 1);
    all.replicas[1].freeze();
    assert_not_replicated(take(&every).await, 1, 0);
    assert_not_replicated(take(&majority).await, 1, 0);
    assert_not_replicated(take(&one).await, 1, 0);
    assert_not_replicated(take(&two).await, 2, 0);
    take(&off).await.unwrap();

    // Replicas that are gone do not count, except where a number is demanded.
    for replica in &mut all.replicas {
        replica.kill();
    }
    all.until_in_sync(0).await;
    for client in [&every, &majority, &off] {
        free(retry_transient(|| client.lock(&name).lock()).await).await;
    }
    let waits = all.waits();
    take(&every).await.unwrap();
    assert_eq!(all.waits(), waits, "no replica was to be waited for");
    assert_not_replicated(take(&one).await, 1, 0);

    // A replica that comes back counts again.
    all.replicas[0].restart();
    all.until_in_sync(1).await;
    until("it is waited for", async || {
        let before = all.waits();
        free(retry_transient(|| every.lock(&name).lock()).await).await;
        all.waits() > before
    })
    .await;
    free(retry_transient(|| one.lock(&name).lock()).await).await;
    all.replicas[0].freeze();
    assert_not_replicated(take(&every).await, 1, 0);
}

/// The client has counted no replicas. Some connect, and hang, before its next acquisition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_connects_after_the_last_count_is_waited_for() {
    use ReplicaSync::{All, Majority};
    let mut all = Replicated::start(1).await;
    let clients = [
        all.client(short_replica_timeout(All)).await,
        all.client(short_replica_timeout(Majority)).await,
    ];
    all.replicas[0].kill();
    all.until_in_sync(0).await;
    for client in &clients {
        // The first acquisition learns that the replica has gone.
        for _ in 0..2 {
            drop(retry_transient(|| client.lock("gone").lock()).await);
        }
    }
    all.replicas[0].restart();
    all.until_in_sync(1).await;
    all.replicas[0].freeze();
    for client in &clients {
        assert_not_replicated(client.lock("back").lock().await, 1, 0);
        assert!(!all.exists("back"), "it is still held");
    }
    all.replicas[0].thaw();
    for client in &clients {
        drop(retry_transient(|| client.lock("back").lock()).await);
    }
}

/// A server without replicas costs nothing extra. With a replica, each single acquisition costs one
/// WAIT; renewals, inspections, waits and releases cost none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replication_costs_one_wait_per_acquisition() {
    let alone = Replicated::start(0).await;
    let client = alone.client(long_timeout()).await;
    free(held(&client.lock("a")).await).await;
    assert_eq!(alone.waits(), 0);
    // The inspecting connections are gone once the server has noticed.
    until("one connection", async || alone.master.clients() == 1).await;

    let all = Replicated::start(1).await;
    let client = all.client(long_timeout()).await;
    // Loads the scripts.
    free(retry_transient(|| client.lock("a").lock()).await).await;
    let before = all.waits();
    for n in before + 1..=before + 10 {
        let guard = retry_transient(|| client.lock("a").lock()).await;
        assert_eq!(all.waits(), n);
        assert!(client.lock("a").is_locked().await.unwrap());
        free(guard).await;
        assert_eq!(all.waits(), n);
    }
    let settings = long_timeout().replica_sync(ReplicaSync::Off);
    let off = all.client(settings).await;
    free(held(&off.lock("b")).await).await;
    assert_eq!(all.waits(), before + 10);
}

/// Many requests arrive while the replica hangs: one WAIT covers many of them. Renewals and
/// releases have priority.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_share_a_wait_while_replica_hangs() {
    const CROWD: usize = 300;
    let all = Replicated::start(1).await;
    let client = all.client(long_timeout().watchdog_lease(WATCHDOG)).await;
    let held = retry_transient(|| client.lock("held").lock()).await;
    let mut released = Vec::new();
    for n in 0..20 {
        released.push(retry_transient(|| client.lock(&format!("released-{n}")).lock()).await);
    }
    let before = all.waits();
    all.replicas[0].freeze();
    let crowd = spawn_each(0..CROWD, |n| client.lock(&format!("crowd-{n}")).lock());
    let waited_for = async || all.waits() > before || all.exists("crowd-0");
    until("they are waited for", waited_for).await;
    free_all(released).await;
    let mut failed = 0;
    for one in crowd {
        let asked = done("answered", one).await;
        failed += usize::from(matches!(asked, Err(Error::NotReplicated { .. })));
    }
    assert_eq!(failed, CROWD);
    let waits = all.waits() - before;
    assert!(waits < CROWD as u64 / 10, "{waits} WAITs");
    within_limit("settled", client.flush()).await;
    let left: Vec<String> = all.master.command(&["KEYS", "*d-*"]);
    let left: Vec<_> = left.iter().filter(|key| !key.contains('{')).collect();
    assert!(left.is_empty(), "{left:?}");

    // Renewals continue while a request constantly waits for the replica.
    let asking = client.clone();
    let asking = tokio::spawn(async move {
        loop {
            let _ = asking.lock("again").lock().await;
        }
    });
    for _ in 0..2 {
        until_rises("a lease", async || held.valid_for()).await;
    }
    asking.abort();
    assert!(held.is_valid());
    free(held).await;
}

/// A request that is dropped while it waits for the replicas leaves nothing behind, nor does one
/// that is dropped anywhere else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_dropped_while_waiting_for_replicas_leaves_nothing() {
    let all = Replicated::start(1).await;
    let client = all.client(long_timeout()).await;
    let lock = client.lock("dropped");
    drop_result_after_each_poll(
        async |polls| poll_up_to(polls, lock.lock()).await,
        async || {
            within_limit("settled", client.flush()).await;
            assert!(!all.exists("dropped"), "a key was left");
        },
    )
    .await;
    all.replicas[0].freeze();
    for _ in 0..2 {
        let mut asking = lock.lock().into_future();
        let on_master = until("it is on the master", async || all.exists("dropped"));
        poll_until(&mut asking, on_master).await;
        drop(asking);
        within_limit("settled", client.flush()).await;
        assert!(!all.exists("dropped"), "a key was left");
        assert_eq!(client.status().holds, 0);
    }
}

/// `None` means that another owner holds the lock. Here no other owner does: the server has granted the lock to this
/// request, and the replicas have not confirmed it at the wait limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unconfirmed_grant_at_the_wait_limit_is_not_reported_as_held() {
    let all = Replicated::start(1).await;
    // One client each: the next request on a connection is answered after the replicas.
    let settings = || long_timeout().replica_timeout(LONG);
    let (client, other) = (all.client(settings()).await, all.client(settings()).await);
    let third = all.client(settings()).await;
    let (lock, permits) = (client.lock("lock"), third.semaphore("permits"));
    let several = MultiLock::new(["one", "two"].map(|name| other.lock(name)));
    permits.try_set_permits(1).await.unwrap();
    // A script that the server does not know is sent again, and would not be granted at the limit.
    drop(retry_transient(|| lock.lock()).await);
    drop(retry_transient(|| several.lock()).await);
    drop(retry_transient(|| permits.acquire()).await);
    for client in [&client, &other, &third] {
        within_limit("settled", client.flush()).await;
    }
    all.replicas[0].freeze();
    let limit = Duration::from_millis(200);
    let one = lock.try_lock().wait(limit).into_future();
    let both = several.try_lock().wait(limit).into_future();
    let permit = permits.try_acquire().wait(limit).into_future();
    let (one, both, permit) = tokio::join!(one, both, permit);
    all.replicas[0].thaw();
    let errors = [one.err(), both.err(), permit.err()];
    for (what, error) in ["lock", "several", "permit"].iter().zip(errors) {
        let error = error.unwrap_or_else(|| panic!("{what}: as if another owner held it"));
        assert!(error.is_transient(), "{what}: {error}");
    }
    for client in [client, other, third] {
        within_limit("settled", client.flush()).await;
    }
    let left = ["lock", "one", "two"].map(|key| all.exists(key));
    assert_eq!(left, [false; 3]);
}

/// A hold that is requested again, alone or in a multi-lock, does not end while the replicas are waited for, if it is renewed.
/// With a fixed lease it ends when a replica that becomes the master would let it end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reentering_while_replicas_hang_extends_only_what_is_renewed() {
    let all = Replicated::start(1).await;
    // Two clients: a request on a connection follows the replicas' answer to the previous request.
    let settings = || long_timeout().replica_timeout(LONG);
    let (client, other) = (all.client(settings()).await, all.client(settings()).await);
    let (short, long, me) = (LONG, 10 * LONG, Owner::new());
    let (one, two) = (client.lock("one"), other.lock("two"));
    let several = MultiLock::new([two.clone(), other.lock("new")]);
    // A script that the server does not know is sent again, also after the replicas' answer.
    free(retry_transient(|| several.lock()).await).await;
    let renewed = retry_transient(|| one.lock().owner(me)).await;
    let fixed = retry_transient(|| two.lock().lease(short).owner(me)).await;
    let end_of = |guard: &Guard| Instant::now() + guard.valid_for();
    let before = end_of(&renewed);
    all.replicas[0].freeze();
    let alone = tokio::spawn(one.lock().lease(long).owner(me).into_future());
    let several = tokio::spawn(several.lock().lease(long).owner(me).into_future());
    let is_longer = async || all.master.command::<u64>(&["PTTL", "two"]) > 2 * 60_000;
    until("the master has the new lease", is_longer).await;
    let is_extended = async || end_of(&renewed) > before;
    until("the renewed hold counts from now on", is_extended).await;
    assert!(!alone.is_finished() && !several.is_finished());
    assert!(renewed.valid_for() <= Duration::from_secs(30) && fixed.valid_for() <= short);
    all.replicas[0].thaw();
    let (_alone, _several) = (
        joined("alone", alone).await,
        joined("with another", several).await,
    );
    assert!(renewed.valid_for() > short && fixed.valid_for() > short);
}

/// A task without any remaining budget makes no progress in one poll. The WAIT must not be sent
/// before its step, or its answer would not cover that step.
#[tokio::test]
async fn wait_is_sent_after_the_step_for_any_task_budget() {
    let all = Replicated::start(1).await;
    let client = all.client(short_replica_timeout(ReplicaSync::All)).await;
    free(retry_transient(|| client.lock("first").lock()).await).await;
    all.replicas[0].freeze();
    for left in 1..12 {
        let mut asking = client.lock(&format!("budget-{left}")).lock().into_future();
        // Leaves this much of tokio's budget (128 per poll of a task) at each poll.
        let asking = poll_fn(move |cx| {
            for _ in 0..(128 - left) {
                let mut spent = pin!(tokio::task::consume_budget());
                if spent.as_mut().poll(cx).is_pending() {
                    break;
                }
            }
            std::pin::Pin::new(&mut asking).poll(cx)
        });
        let asked = done("answered", tokio::spawn(asking)).await;
        assert_not_replicated(asked.map(drop), 1, 0);
    }
}

/// The runtime of the first request waits for the replicas. When it ends, requests in another
/// runtime that share the wait learn that there will be no answer.
#[test]
fn end_of_one_runtime_does_not_affect_another() {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let (ending, staying) = (runtime(), runtime());
    let all = staying.block_on(Replicated::start(1));
    let settings = long_timeout().replica_timeout(Duration::from_secs(2));
    let client = staying.block_on(all.client(settings));
    let first = retry_transient(|| client.lock("first").lock());
    let first = staying.block_on(first);
    all.replicas[0].freeze();
    let pause = Duration::from_millis(200);
    for n in 0..2 {
        ending.spawn(client.lock(&format!("ending-{n}")).lock().into_future());
        std::thread::sleep(pause);
    }
    let asking = staying.spawn(client.lock("staying").lock().into_future());
    std::thread::sleep(pause);
    ending.shutdown_background();
    staying.block_on(async {
        let asked = done("an answer", asking).await;
        assert!(asked.is_err(), "granted although the replica hangs");
        drop(first);
        within_limit("settled", client.flush()).await;
        assert!(!all.exists("staying"));
    });
}

/// In repeated failovers, a lock that was granted just before the master died exists on the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn granted_locks_survive_the_master() {
    let mut deployment = Deployment::sentinel();
    let settings = long_timeout().watchdog_lease(10 * LONG);
    let client = deployment.client(settings).await;
    for round in 0..3 {
        let name = format!("granted-{round}");
        let old = deployment.master("");
        let guard = retry_transient(|| client.lock(&name).lock()).await;
        deployment.kill(old);
        let new = deployment.await_new_master("", old);
        assert!(deployment.server(new).command::<bool>(&["EXISTS", &name]));
        free(guard).await;
        deployment.restart(old);
        deployment.await_healthy();
    }
}

/// Managed servers and ACLs: only a user who asked for a number of replicas requires that they
/// confirm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_wait_or_role_confirms_nothing() {
    let all = Replicated::start(1).await;
    for (user, command) in [("no-wait", "-wait"), ("no-role", "-role")] {
        let rule = ["ACL", "SETUSER", user, "on", ">pw", "~*", "&*", "+@all"];
        let _: String = all.master.command(&[&rule[..], &[command]].concat());
        let settings = |sync| {
            let settings = patient(Client::builder()).replica_sync(sync);
            settings.username(user).password("pw")
        };
        let client = all.client(settings(ReplicaSync::All)).await;
        free(held(&client.lock(user)).await).await;
        for required in [ReplicaSync::AtLeast(1), ReplicaSync::Majority] {
            // A fixed number needs no ROLE.
            let works = command == "-role" && required == ReplicaSync::AtLeast(1);
            let asked = async {
                let client = settings(required).connect(&all.master.url()).await?;
                client.lock(user).lock().await?.unlock().await
            };
            match asked.await {
                Ok(_) => assert!(works, "{command} {required:?}"),
                Err(error) => {
                    assert!(!works, "{error:?}");
                    assert_matches!(error, Error::NotPermitted { .. });
                    assert!(error.to_string().contains("replica_sync"), "{error}");
                }
            }
            assert!(!all.exists(user), "{required:?}");
        }
    }
}
