//! Locks that the store lost: waiters are woken, and all holders learn of it together.

use redlatch::kind::LockKind;

use crate::common::prelude::*;

/// With this lease, a waiter that gets no message sleeps for hours.
const ENDLESS: Duration = Duration::from_secs(20_000);

/// Creates the holder, whose renewals are due every two seconds, and another client.
async fn clients(server: &Server) -> (Client, Client) {
    let settings = renewing().response_timeout(LONG);
    let holder = connect(settings, &server.url()).await;
    (holder, rarely_renewing(server).await)
}

/// How the loss is found after another program deletes the key: the first client holds the lock and
/// the second waits for it.
#[derive(Clone, Copy)]
enum Found {
    /// By the next renewal.
    ByRenewal,
    /// By the release.
    ByRelease,
}

/// A waiter that learned the whole lease acquires the lock soon after its key was deleted. Returns
/// whether a message woke it: waiters of fair locks soon retry by themselves.
async fn waiter_is_woken<K: LockKind, L: LockKind>(
    server: &Server,
    held: &Lock<K>,
    wanted: &Lock<L>,
    subscribed: impl Fn() -> usize,
    found: Found,
) -> bool {
    let guard = match found {
        Found::ByRenewal => held.lock().await.unwrap(),
        // Not renewed, so that only the release can find that it is gone.
        Found::ByRelease => held.lock().lease(ENDLESS).await.unwrap(),
    };
    if let Found::ByRenewal = found {
        // The waiter relies on the remaining lease that the store reports.
        let _: i64 = server.command(&["PEXPIRE", held.name(), "9000000"]);
    }
    let waiting = tokio::spawn(wanted.lock().into_future());
    until("it waits", async || subscribed() > 0).await;
    // It has sent its request behind its subscription.
    until("it asks", async || {
        let clients: String = server.command(&["CLIENT", "LIST"]);
        let is_subscribed = |client: &&str| client.contains(" sub=1 ");
        let mut subscribed = clients.lines().filter(is_subscribed);
        subscribed.any(|client| !client.contains(" cmd=subscribe "))
    })
    .await;
    let channels: Vec<String> = server.command(&["PUBSUB", "CHANNELS"]);
    let received = Vec::from_iter(channels.iter().map(|channel| messages(server, channel)));
    let deleted: i64 = server.command(&["DEL", held.name()]);
    assert_eq!(deleted, 1);
    if let Found::ByRelease = found {
        let _ = guard.unlock().await;
    }
    let guard = joined("the waiter is woken", waiting).await;
    let brief = Duration::from_millis(50);
    let was_woken = received.iter().any(|one| one.recv_timeout(brief).is_ok());
    free(guard).await;
    was_woken
}

macro_rules! a_waiter_is_woken {
    ($($name:ident, $client:ident => $held:expr, $wanted:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            for found in [Found::ByRenewal, Found::ByRelease] {
                // On a busy machine it may have retried first.
                until("it is woken", async || {
                    let server = Server::start();
                    let (holder, waiter) = clients(&server).await;
                    let held = { let $client = &holder; $held };
                    let wanted = { let $client = &waiter; $wanted };
                    let subscribed = || waiter.status().subscriptions;
                    waiter_is_woken(&server, &held, &wanted, subscribed, found).await
                })
                .await;
            }
        }
    )*};
}

a_waiter_is_woken! {
    a_deleted_lock_wakes_its_waiter, client => client.lock("x"), client.lock("x");
    a_deleted_fenced_lock_wakes_its_waiter, client => client.fenced_lock("x"), client.fenced_lock("x");
    a_deleted_fair_lock_calls_the_head_of_its_queue, client =>
        client.fair_lock("x"), client.fair_lock("x");
    a_deleted_writer_wakes_a_reader, client =>
        client.read_write_lock("x").write(), client.read_write_lock("x").read();
    a_deleted_reader_wakes_a_writer, client =>
        client.read_write_lock("x").read(), client.read_write_lock("x").write();
}

/// FLUSHALL also deletes the queue of a fair lock, so no step knows which waiters to notify.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_waiters_of_a_flushed_fair_lock_acquire_it() {
    let server = Server::start();
    let (holder, other) = clients(&server).await;
    let guard = held(&holder.fair_lock("x")).await;
    let _: i64 = server.command(&["PEXPIRE", "x", "9000000"]);
    let waiting = [(); 3].map(|()| {
        let request = other.fair_lock("x").lock().into_future();
        tokio::spawn(async move { request.await?.unlock().await })
    });
    let queued = || server.command::<i64>(&["LLEN", "redisson_lock_queue:{x}"]);
    until("all are in the queue", async || queued() == 3).await;
    let _: String = server.command(&["FLUSHALL"]);
    joined_all("the waiter retries", waiting).await;
    let _ = guard.unlock().await;
}

/// If another owner holds the lock by now, the waiters must keep waiting.
#[tokio::test]
async fn lost_hold_wakes_no_waiter_while_another_owner_holds_the_lock() {
    let server = Server::start();
    let (holder, other) = clients(&server).await;
    let lost = held(&holder.lock("x")).await;
    let _: i64 = server.command(&["DEL", "x"]);
    let next = held(&other.lock("x")).await;
    let messages = messages(&server, "redisson_lock__channel:{x}");
    within_limit("lost", lost.lost()).await;
    let _ = lost.unlock().await;
    // A step in flight for the lost hold would find no owner after the release, and notify a
    // waiter.
    within_limit("settled", holder.flush()).await;
    free(next).await;
    // The first message is that of the release.
    messages.recv_timeout(LONG).unwrap();
    let more = messages.recv_timeout(Duration::from_millis(50));
    assert!(more.is_err(), "one message, of the release");
}

/// Renewals are due after hours, so only a sweep can find a loss earlier.
async fn rarely_renewing(server: &Server) -> Client {
    connect(long_timeout().watchdog_lease(ENDLESS), &server.url()).await
}

/// Acquires fifty holds of all kinds, half of them with a fixed lease.
async fn fifty_holds(client: &Client) -> Vec<Guard> {
    let mut guards = Vec::new();
    for n in 0..50 {
        let lock = client.lock(&format!("held-{n}"));
        guards.push(match n % 2 {
            0 => held(&lock).await,
            _ => lock.lock().lease(ENDLESS).await.unwrap(),
        });
    }
    guards
}

async fn all_learn_of_their_loss(guards: &[Guard]) {
    for guard in guards {
        within_limit("every hold learns of its loss", guard.lost()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_without_data_reports_all_losses_together() {
    let mut server = Server::start();
    let client = rarely_renewing(&server).await;
    let guards = fifty_holds(&client).await;
    let reader = held(&client.read_write_lock("shared").read()).await;
    let fair = held(&client.fair_lock("fair")).await;
    let semaphore = client.expirable_semaphore("permits");
    semaphore.set_permits(1).await.unwrap();
    let permit = semaphore.acquire().await.unwrap();
    server.restart();
    // Any next request connects, and sees that another process answers.
    drop(retry_transient(|| client.lock("other").lock()).await);
    all_learn_of_their_loss(&guards).await;
    within_limit("the reader", reader.lost()).await;
    within_limit("the fair lock", fair.lost()).await;
    within_limit("the permit", permit.lost()).await;
}

/// Its client sends nothing: no renewal is due, and no one waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_client_learns_of_losses_at_a_restarted_server() {
    let mut server = Server::start();
    let settings = long_timeout().client_tracking(false).registry(false);
    let client = connect(settings, &server.url()).await;
    let guard = client.lock("held").lock().lease(ENDLESS).await.unwrap();
    server.restart();
    within_limit("it learns of its loss", guard.lost()).await;
}

/// Attempts have a connection of their own. What the restart did to it has the holds checked, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_at_a_restarted_server_reveals_losses_where_replicas_are_awaited() {
    let mut server = Server::start();
    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(0));
    let settings = settings.client_tracking(false).registry(false);
    let client = connect(settings, &server.url()).await;
    let guard = client.lock("held").lock().lease(ENDLESS).await.unwrap();
    server.restart();
    let other = retry_transient(|| client.lock("other").try_lock()).await;
    within_limit("it learns of its loss", guard.lost()).await;
    drop(other);
}

/// The name leads to another server, and the earlier one hangs: only the attempts connect again. No server tells its run id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_at_the_next_server_reveals_losses_while_the_earlier_one_hangs() {
    let (former, next) = (Server::start(), Server::start());
    for server in [&former, &next] {
        let () = server.command(&["ACL", "SETUSER", "default", "-info"]);
    }
    let name = Proxy::to_server(&former);
    let settings = long_timeout().replica_sync(ReplicaSync::AtLeast(0));
    let settings = settings.client_tracking(false).registry(false);
    let settings = settings.connect_timeout(Duration::from_secs(1));
    let client = connect(settings, &name.url()).await;
    let guard = client.lock("held").lock().lease(ENDLESS).await.unwrap();
    former.freeze();
    name.redirect(&next);
    name.reset_after_sent(1);
    let other = retry_transient(|| client.lock("other").try_lock()).await;
    within_limit("it learns of its loss", guard.lost()).await;
    drop(other);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_flushall_one_loss_reveals_all_others() {
    let server = Server::start();
    let client = rarely_renewing(&server).await;
    let guards = fifty_holds(&client).await;
    let () = server.command(&["FLUSHALL"]);
    assert_lost(guards[0].reenter().await, Loss::NotHeld);
    all_learn_of_their_loss(&guards).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loss_found_by_renewal_reveals_all_others() {
    let server = Server::start();
    let (client, _) = clients(&server).await;
    let renewed = held(&client.lock("renewed")).await;
    // Not renewed, so that only a sweep finds its loss.
    let fixed = client.lock("fixed").lock().lease(ENDLESS).await.unwrap();
    let () = server.command(&["FLUSHALL"]);
    within_limit("the renewed one is lost", renewed.lost()).await;
    within_limit("the other one is lost", fixed.lost()).await;
}

/// The guard that finds the loss releases in the background; the other guard of the owner keeps its hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loss_found_by_one_of_two_guards_reveals_all_others() {
    let server = Server::start();
    let client = rarely_renewing(&server).await;
    let first = held(&client.lock("twice")).await;
    let second = first.reenter().await.unwrap();
    let other = held(&client.lock("other")).await;
    let () = server.command(&["FLUSHALL"]);
    drop(second);
    within_limit("the first guard is lost", first.lost()).await;
    within_limit("the other hold is lost", other.lost()).await;
}

/// A release that finds its hold missing also triggers a check of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweep_checks_fixed_leases_without_extending_them() {
    let server = Server::start();
    let client = rarely_renewing(&server).await;
    let fixed = client.lock("fixed").lock().lease(LONG * 5).await.unwrap();
    let renewed = held(&client.lock("renewed")).await;
    let deleted = client.lock("deleted").lock().lease(ENDLESS).await.unwrap();
    let first = held(&client.lock("first")).await;
    let _: i64 = server.command(&["DEL", "first", "deleted"]);
    let _: i64 = server.command(&["PEXPIRE", "renewed", "5000000"]);
    assert_lost(first.unlock().await, Loss::NotHeld);
    // Fixed leases are checked together.
    within_limit("the deleted one is lost", deleted.lost()).await;
    let left: i64 = server.command(&["PTTL", "fixed"]);
    assert!((1..=300_000).contains(&left), "{left}");
    let is_renewed = async || pttl(&server, "renewed") > 10_000_000;
    until("the other is renewed", is_renewed).await;
    assert!(fixed.is_valid() && renewed.is_valid());
    assert!(fixed.valid_for() <= LONG * 5);
}

/// Feared: the program believes that its work was protected, because the first error is one of the member that does not answer.
#[tokio::test(start_paused = true)]
async fn run_reports_the_loss_of_a_member_beside_the_outage_of_another() {
    for [failing, lost] in [["a", "b"], ["b", "a"]] {
        let stores = [Embedded::new(), Embedded::new()];
        let connect = |store| Client::builder().connect_embedded(store).unwrap();
        let members = [
            connect(&stores[0]).lock(failing),
            connect(&stores[1]).lock(lost),
        ];
        let ran = MultiLock::new(members).lock().run(async {
            assert!(connect(&stores[1]).lock(lost).force_unlock().await.unwrap());
            stores[0].set_available(false);
        });
        assert_matches!(ran.await, Err(Error::Lost { .. }));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_reports_that_another_program_has_overwritten_the_key() {
    let client = rarely_renewing(shared()).await;
    let lock = client.lock(&unique("overwritten"));
    let ran = lock.run(async {
        let _: () = shared().command(&["SET", lock.name(), "other"]);
    });
    assert_lost(ran.await, Loss::NotHeld);
}
