//! Requests to release a lock: [`redlatch::Lock::ask`] and [`redlatch::Lock::revoke`].

use redlatch::kind::Revocable;

use crate::common::prelude::*;
use crate::common::secured::{PREFIX, Rules, Secured, rules};

on_every_store! {
    request_reaches_holder_of_each_kind,
    request_reaches_holder_of_permit,
    permits_of_revoked_guard_are_free_after_it_is_lost,
    leader_is_asked_and_revoked,
    next_owner_acquires_after_revoked_one_is_lost,
    later_holds_of_the_owner_are_not_asked,
    hold_that_was_asked_for_becomes_no_ticket,
    ticket_that_was_asked_for_is_not_adopted,
}

async fn revoke_at_once<K: Revocable>(lock: &Lock<K>) {
    let holder = lock.revoke(Duration::ZERO).await.unwrap();
    holder.expect("it is held");
}

/// Returns two locks of each client, whose names differ only by braces, and whose channels are the same.
async fn aliases(lease: Duration) -> Vec<[Lock; 2]> {
    let settings = || Client::builder().watchdog_lease(lease);
    let on_server = settings().connect(&shared().url()).await.unwrap();
    let embedded = settings().connect_embedded(&Embedded::new()).unwrap();
    let name = unique("alias");
    let locks =
        |client: &Client| [name.clone(), format!("{{{name}}}")].map(|name| client.lock(&name));
    vec![locks(&on_server), locks(&embedded)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_for_alias_does_not_remove_revocation() {
    for [lock, alias] in aliases(100 * LONG).await {
        let revoked = held(&lock).await;
        let asked = held(&alias).await;
        revoke_at_once(&lock).await;
        alias.ask().await.unwrap().expect("it is held");
        within_limit("it is asked", asked.asked()).await;
        // It looks for the request. It is lost at once, so this may never complete.
        let looking = tokio::spawn(revoked.asked());
        within_limit("it is lost", revoked.lost()).await;
        looking.abort();
        assert!(asked.is_valid());
        free(asked).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revocation_does_not_end_alias_of_same_owner() {
    for [lock, alias] in aliases(WATCHDOG).await {
        let me = Owner::new();
        let revoked = lock.lock().owner(me).await.unwrap();
        let kept = alias.lock().owner(me).await.unwrap();
        revoke_at_once(&lock).await;
        within_limit("it is lost", revoked.lost()).await;
        // A renewal, which the request would prevent.
        until_rises("it is renewed", async || kept.valid_for()).await;
        let asked = timeout(SECOND / 10, kept.asked()).await;
        assert!(asked.is_err() && kept.is_valid());
        free(kept).await;
    }
}

/// Otherwise the ticket would have a whole lease, and its request would be gone with the owner.
async fn hold_that_was_asked_for_becomes_no_ticket(store: TestStore) {
    let settings = || Client::builder().watchdog_lease(100 * LONG);
    let (client, other) = (store.client_with(settings()).await, store.client().await);
    let name = unique("to-ticket");
    becomes_no_ticket(client.lock(&name), other.lock(&name)).await;
    becomes_no_ticket(client.fair_lock(&name), other.fair_lock(&name)).await;
    let [ours, theirs] = [&client, &other].map(|client| client.read_write_lock(&name).write());
    becomes_no_ticket(ours, theirs).await;
}

async fn becomes_no_ticket<K: Revocable + HasTicket>(lock: Lock<K>, other: Lock<K>) {
    let mut guard = held(&lock).await;
    for limit in [None, Some(LONG)] {
        let owner = match limit {
            None => other.ask().await,
            Some(limit) => other.revoke(limit).await,
        };
        let owner = owner.unwrap().expect("it is held");
        let refused = guard.into_ticket_for(2 * LONG).await.unwrap_err();
        match refused.error() {
            Error::Asked { left, .. } => {
                assert!(*left <= limit && left.is_some() == limit.is_some())
            }
            other => panic!("{other}"),
        }
        guard = refused.into_guard().expect("nothing has changed");
        assert!(guard.is_valid());
        assert!(!other.released_by(owner, Duration::ZERO).await.unwrap());
    }
    let owner = guard.owner_id();
    free(guard).await;
    assert!(other.released_by(owner, LONG).await.unwrap());
}

/// What the caller asks for and does not get is an error that says what is left.
async fn ticket_that_was_asked_for_is_not_adopted(store: TestStore) {
    let [client, other] = store.clients().await;
    let name = unique("from-ticket");
    is_not_adopted(client.lock(&name), other.lock(&name)).await;
    is_not_adopted(client.fair_lock(&name), other.fair_lock(&name)).await;
    let [ours, theirs] = [&client, &other].map(|client| client.read_write_lock(&name).write());
    is_not_adopted(ours, theirs).await;
}

async fn is_not_adopted<K: Revocable + HasTicket>(lock: Lock<K>, other: Lock<K>) {
    let left_of = |error: Error| match error {
        Error::Asked { left, .. } => left,
        other => panic!("{other}"),
    };
    let guard = held(&lock).await;
    let ticket = guard.into_ticket_for(LONG).await.unwrap();
    let owner = other.ask().await.unwrap().expect("it is held");
    assert_eq!(left_of(lock.adopt(&ticket).await.unwrap_err()), None);
    // Without a limit, the request changes nothing about the lease.
    lock.renew_ticket(&ticket, 2 * LONG).await.unwrap();
    other.revoke(3 * LONG).await.unwrap().expect("it is held");
    lock.renew_ticket(&ticket, LONG).await.unwrap();
    let left = left_of(lock.renew_ticket(&ticket, 4 * LONG).await.unwrap_err());
    assert!(left.is_some_and(|left| left > LONG && left <= 3 * LONG));
    let lease = lock.remaining_lease().await.unwrap().unwrap();
    assert!(lease.duration() <= left);
    let left = left_of(lock.adopt(&ticket).await.unwrap_err());
    assert!(left.is_some_and(|left| left <= 3 * LONG));
    let released = other.released_by(owner.clone(), Duration::ZERO).await;
    assert!(!released.unwrap());
    lock.unlock_ticket(&ticket).await.unwrap();
    assert!(other.released_by(owner, LONG).await.unwrap());
}

/// Asks for a lock that a client with a long lease holds. The holder then releases it.
async fn ask_for<K: Revocable>(lock: Lock<K>, other: Lock<K>) {
    assert_eq!(other.ask().await.unwrap(), None);
    assert_eq!(other.revoke(LONG).await.unwrap(), None);
    let guard = held(&lock).await;
    let asked = tokio::spawn(guard.asked());
    let owner = other.ask().await.unwrap();
    assert_eq!(owner, Some(guard.owner_id()));
    done("it is asked", asked).await;
    // Also if it was asked before.
    within_limit("it was asked", guard.asked()).await;
    assert!(guard.is_valid() && lock.is_locked().await.unwrap());
    let owner = owner.unwrap();
    assert!(!other.released_by(owner.clone(), SECOND).await.unwrap());
    let released = other.released_by(owner, LONG);
    let (released, unlocked) = tokio::join!(released, guard.unlock());
    unlocked.unwrap();
    assert!(released.unwrap());
    let work = lock.lock().run_until_asked(std::future::pending::<()>());
    let work = tokio::spawn(work);
    until("it is held", async || other.ask().await.unwrap().is_some()).await;
    let output = done("it ends", work).await;
    assert_eq!(output.unwrap(), None);
    assert!(!lock.is_locked().await.unwrap());
}

async fn request_reaches_holder_of_each_kind(store: TestStore) {
    let settings = Client::builder().watchdog_lease(100 * LONG);
    let clients = store.clients_with(settings).await;
    let [one, other] = &clients;
    let name = unique("asked");
    let [plain, fair, fenced, spin, write] =
        ["plain", "fair", "fenced", "spin", "write"].map(|kind| format!("{name}:{kind}"));
    ask_for(one.lock(&plain), other.lock(&plain)).await;
    ask_for(one.fair_lock(&fair), other.fair_lock(&fair)).await;
    ask_for(one.fenced_lock(&fenced), other.fenced_lock(&fenced)).await;
    ask_for(one.spin_lock(&spin), other.spin_lock(&spin)).await;
    let [ours, theirs] = [one, other].map(|client| client.read_write_lock(&write).write());
    ask_for(ours, theirs).await;
    let fair = format!("{name}:fair-write");
    let [ours, theirs] = [one, other].map(|client| client.fair_read_write_lock(&fair).write());
    ask_for(ours, theirs).await;
}

async fn request_reaches_holder_of_permit(store: TestStore) {
    let settings = Client::builder().watchdog_lease(100 * LONG);
    let [one, other] = store.clients_with(settings).await;
    let name = unique("permit");
    let [ours, theirs] = [&one, &other].map(|client| client.expirable_semaphore(&name).permits(4));
    let several = ours.acquire_many(2).await.unwrap();
    let kept = ours.acquire().await.unwrap();
    let (asked, not_asked) = (tokio::spawn(several.asked()), tokio::spawn(kept.asked()));
    // One of them is enough.
    let id = several.ids()[1];
    assert!(theirs.ask(id).await.unwrap());
    done("it is asked", asked).await;
    within_limit("it was asked", several.asked()).await;
    assert!(several.is_valid());
    assert!(!theirs.released(id, Duration::ZERO).await.unwrap());
    let released = theirs.released(id, LONG);
    let (released, unlocked) = tokio::join!(released, several.release());
    unlocked.unwrap();
    assert!(released.unwrap());
    assert!(!theirs.ask(id).await.unwrap());
    assert!(!not_asked.is_finished());
    not_asked.abort();
    free(kept).await;
    let work = ours.acquire().run_until_asked(std::future::pending::<()>());
    let work = tokio::spawn(work);
    let ask_all = async || {
        let held = theirs.held_permits().await.unwrap();
        for permit in &held {
            assert!(theirs.ask(permit.id).await.unwrap());
        }
        !held.is_empty()
    };
    until("it is held", ask_all).await;
    assert_eq!(done("it ends", work).await.unwrap(), None);
    assert_eq!(theirs.available().await.unwrap(), 4);
}

/// The holder ignores the request. Its lease is far longer than the limit.
async fn permits_of_revoked_guard_are_free_after_it_is_lost(store: TestStore) {
    let settings = Client::builder().watchdog_lease(100 * LONG);
    let [client, other] = store.clients_with(settings).await;
    let name = unique("revoked-permit");
    let [ours, theirs] = [&client, &other].map(|client| client.expirable_semaphore(&name));
    assert!(ours.try_set_permits(3).await.unwrap());
    let permits = ours.acquire_many(2).await.unwrap();
    let next = waiter_of(&other, theirs.acquire_many(3)).await;
    let kept = ours.acquire().await.unwrap();
    // It looks for the request. It may be lost before this completes.
    let looking = tokio::spawn(permits.asked());
    until("it listens", async || client.status().subscriptions > 0).await;
    let id = permits.ids()[0];
    assert!(theirs.revoke(id, SECOND).await.unwrap());
    // A later one with more time changes nothing.
    assert!(theirs.revoke(id, HOUR).await.unwrap());
    within_limit("it is lost", permits.lost()).await;
    looking.abort();
    assert!(kept.is_valid());
    free(kept).await;
    let next = joined("the next acquires", next).await;
    assert!(!permits.is_valid() && next.is_valid());
    assert_lost(permits.release().await, Loss::Revoked);
    free(next).await;
    let too_long = theirs.revoke(id, MAX_LEASE + SECOND).await;
    assert!(matches!(too_long, Err(Error::InvalidSetting { .. })));
}

async fn leader_is_asked_and_revoked(store: TestStore) {
    let settings = Client::builder().watchdog_lease(100 * LONG);
    let [client, other] = store.clients_with(settings).await;
    let name = unique("leader");
    let [ours, theirs] = [&client, &other].map(|client| client.election(&name));
    assert_eq!(theirs.ask().await.unwrap(), None);
    let leadership = ours.campaign("one").await.unwrap();
    let work = leadership.run_until_asked(std::future::pending::<()>());
    let (stopped, asked) = tokio::join!(within_limit("it stops", work), theirs.ask());
    assert_eq!(stopped.unwrap(), None);
    let owner = asked.unwrap().expect("a leader");
    assert_eq!(&owner, leadership.owner_id());
    let resigned = leadership.resign();
    let (released, resigned) = tokio::join!(theirs.released_by(owner, LONG), resigned);
    resigned.unwrap();
    assert!(released.unwrap());
    // This one ignores it.
    let leadership = ours.campaign("two").await.unwrap();
    let asked = tokio::spawn(leadership.asked());
    until("it listens", async || client.status().subscriptions > 0).await;
    theirs.revoke(SECOND).await.unwrap().expect("a leader");
    done("it is asked", asked).await;
    let next = within_limit("the next leads", theirs.campaign("three")).await;
    assert!(!leadership.is_valid());
    next.unwrap().resign().await.unwrap();
}

/// The holder ignores the request. Its lease is far longer than the limit.
async fn next_owner_acquires_after_revoked_one_is_lost(store: TestStore) {
    let settings = Client::builder().watchdog_lease(100 * LONG);
    let [client, other] = store.clients_with(settings).await;
    let name = unique("revoked");
    let lock = client.lock(&name);
    let guard = held(&lock).await;
    let next = waiter_of(&other, other.lock(&name).lock()).await;
    // The holder looks for requests only at renewals, or while it polls this.
    let asked = tokio::spawn(guard.asked());
    until("it listens", async || client.status().subscriptions > 0).await;
    other.lock(&name).revoke(SECOND).await.unwrap();
    done("it is asked", asked).await;
    let next = joined("the next acquires", next).await;
    assert!(!guard.is_valid() && next.is_valid());
    assert_lost(guard.unlock().await, Loss::Revoked);
    free(next).await;
    client.flush().await;
    assert!(!lock.is_locked().await.unwrap());
}

/// The feared interleaving: a request meets the next hold of the same owner.
async fn later_holds_of_the_owner_are_not_asked(store: TestStore) {
    let client = store.client_with(renewing()).await;
    let other = store.client().await;
    let name = unique("later");
    let me = Owner::new();
    later_hold(client.lock(&name), other.lock(&name), me).await;
    later_hold(client.fair_lock(&name), other.fair_lock(&name), me).await;
    let [ours, theirs] = [&client, &other].map(|client| client.read_write_lock(&name).write());
    later_hold(ours, theirs, me).await;
    let fair = |client: &Client| client.fair_read_write_lock(&name).write();
    later_hold(fair(&client), fair(&other), me).await;
}

async fn later_hold<K: Revocable>(lock: Lock<K>, other: Lock<K>, me: Owner) {
    let guard = lock.lock().owner(me).await.unwrap();
    revoke_at_once(&other).await;
    let released = guard.unlock().await;
    if released.is_err() {
        // A renewal came first.
        assert_lost(released, Loss::Revoked);
    }
    let guard = lock.lock().owner(me).await.unwrap();
    // A renewal, which the request would prevent.
    until_rises("it is renewed", async || guard.valid_for()).await;
    let asked = timeout(SECOND / 10, guard.asked()).await;
    assert!(asked.is_err() && guard.is_valid());
    free(guard).await;
}

/// The message is lost with the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_during_broken_connection_is_not_missed() {
    let proxy = Proxy::to(shared().port());
    let client = connect(Client::builder().watchdog_lease(100 * LONG), &proxy.url()).await;
    let other = crate::common::client(shared()).await;
    let name = unique("broken");
    let guard = held(&client.lock(&name)).await;
    let asked = tokio::spawn(guard.asked());
    let subscribed = async || client.status().subscriptions > 0;
    until("it is subscribed", subscribed).await;
    proxy.refuse(true);
    proxy.reset();
    other.lock(&name).ask().await.unwrap().expect("it is held");
    proxy.refuse(false);
    done("it is asked", asked).await;
    free(guard).await;
}

/// It is cut off before it learns of the request, so its lease ends. Nothing else frees the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_holder_that_is_cut_off_ends_with_its_lease() {
    let proxy = Proxy::to(shared().port());
    let client = connect(Client::builder().watchdog_lease(SHORT), &proxy.url()).await;
    let other = crate::common::client(shared()).await;
    let name = unique("cut-off");
    let guard = held(&client.lock(&name)).await;
    proxy.stall(true);
    other.lock(&name).revoke(Duration::ZERO).await.unwrap();
    let next = within_limit("the next acquires", async {
        other.lock(&name).lock().await
    });
    let next = next.await.unwrap();
    assert!(!guard.is_valid() && next.is_valid());
    proxy.stall(false);
    free(next).await;
}

/// As Redisson writes it. It releases and acquires with the same owner, and notices nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_that_does_not_know_requests_is_not_disturbed() {
    let (server, client) = (shared(), client(shared()).await);
    let name = unique("java");
    let owner = "8743c9c0-0795-4907-87fd-6c719a6b4586:1";
    let acquire = || {
        let () = server.command(&["HSET", &name, owner, "1"]);
        let () = server.command(&["PEXPIRE", &name, "60000"]);
    };
    acquire();
    let lock = client.lock(&name);
    let asked = lock.revoke(Duration::ZERO).await.unwrap();
    assert_eq!(asked.as_ref().map(|owner| owner.as_str()), Some(owner));
    let fields: Vec<String> = server.command(&["HGETALL", &name]);
    assert_eq!(fields, [owner, "1"]);
    assert!(pttl(server, &name) > 50_000);
    let waiting = lock.released_by(asked.unwrap(), LONG);
    let release = async {
        let () = server.command(&["DEL", &name]);
        let channel = format!("redisson_lock__channel:{{{name}}}");
        let () = server.command(&["PUBLISH", &channel, "0"]);
    };
    let (released, ()) = tokio::join!(waiting, release);
    assert!(released.unwrap());
    acquire();
    assert!(lock.is_locked().await.unwrap());
    let guard = lock.force_unlock().await.unwrap().then(|| lock.lock());
    let guard = guard.expect("it was held").await.unwrap();
    let asked = timeout(SECOND / 10, guard.asked()).await;
    assert!(asked.is_err(), "the request was for another owner");
    free(guard).await;
}

/// A hash of another kind, and readers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_locks_of_the_kind_are_asked() {
    let client = client(shared()).await;
    let name = unique("kind");
    let data = client.read_write_lock(&name);
    let reader = held(&data.read()).await;
    assert_eq!(data.write().ask().await.unwrap(), None);
    assert_matches!(client.lock(&name).ask().await, Err(Error::WrongKind { .. }));
    free(reader).await;
    let writer = held(&data.write()).await;
    assert_matches!(client.lock(&name).ask().await, Err(Error::WrongKind { .. }));
    free(writer).await;
    let guard = held(&client.lock(&name)).await;
    assert_matches!(data.write().ask().await, Err(Error::WrongKind { .. }));
    free(guard).await;
    let fair = client.fair_read_write_lock(&name);
    let reader = held(&fair.read()).await;
    assert_eq!(fair.write().ask().await.unwrap(), None);
    assert_matches!(data.write().ask().await, Err(Error::WrongKind { .. }));
    free(reader).await;
    let writer = held(&data.write()).await;
    assert_matches!(fair.write().ask().await, Err(Error::WrongKind { .. }));
    free(writer).await;
}

/// Without the rule for requests, locks work as before, and a client that asks gets an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_permission_are_refused() {
    let Rules { app, .. } = rules();
    let rule = " ~redlatch_lock_asked:{app:*";
    assert!(app.contains(rule));
    let restricted = app.replacen("app ", "restricted ", 1).replace(rule, "");
    let secured = Secured::start(&[app, &restricted]);
    let settings = Client::builder().prefix(PREFIX).watchdog_lease(WATCHDOG);
    let settings = secured.settings_of(&restricted, settings);
    let client = settings.connect(&secured.server.url()).await.unwrap();
    let lock = client.lock(&unique("refused"));
    let me = Owner::new();
    let guard = lock.lock().owner(me).await.unwrap();
    assert_matches!(lock.ask().await, Err(Error::NotPermitted { .. }));
    until_rises("it is renewed", async || guard.valid_for()).await;
    let next = {
        let lock = lock.clone();
        tokio::spawn(async move { lock.lock().owner(Owner::new()).await.unwrap() })
    };
    until("it waits", async || client.status().subscriptions > 0).await;
    free(guard).await;
    free(done("the next acquires", next).await).await;
    assert!(!lock.is_locked().await.unwrap());
}

#[test]
fn thread_is_asked() {
    on_every_store(|client| {
        let (client, lock_name) = (client(), unique("thread"));
        let lock = client.lock(&lock_name);
        let guard = lock.lock().block().unwrap();
        assert!(!guard.asked(SECOND / 10).unwrap());
        let asked = lock.ask().unwrap().expect("it is held");
        assert_eq!(asked, guard.owner_id());
        assert!(guard.asked(LONG).unwrap());
        assert!(!lock.released_by(asked.clone(), SECOND).unwrap());
        guard.unlock().unwrap();
        assert!(lock.released_by(asked, LONG).unwrap());
        // The thread acquires it again, as another hold.
        let guard = lock.lock().block().unwrap();
        assert!(!guard.asked(SECOND / 10).unwrap());
        guard.unlock().unwrap();
    });
}
