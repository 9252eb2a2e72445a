//! Tickets: [`redlatch::Guard::into_ticket`] and [`redlatch::Lock::adopt`]. Failures that are injected at exact points are tested
//! in `more/ticket/tests.rs`, processes that are killed in the tests of the command.

use redlatch::{Ticket, TicketRefusal};

use crate::common::prelude::*;

on_every_store! {
    hold_of_each_kind_moves_to_other_client,
    one_of_many_clients_adopts_each_ticket,
    ticket_and_waiters_exclude_each_other,
    waiters_learn_shorter_lease_of_ticket,
    canceled_steps_leave_nothing_behind,
}

async fn hold_moves<K: HasTicket>(lock: Lock<K>, other: Lock<K>) {
    let guard = held(&lock).await;
    let owner = guard.owner_id();
    let text = guard.into_ticket_for(LONG).await.unwrap().to_string();
    let ticket: Ticket = text.parse().unwrap();
    let holder = lock.holder().await.unwrap().expect("it is held");
    assert_eq!((&holder.owner, holder.holds), (&ticket.owner_id(), 1));
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(other.try_lock().await.unwrap().is_none());
    other.renew_ticket(&ticket, 2 * LONG).await.unwrap();
    assert!(lease_left(&lock).await > LONG);

    let adopted = other.adopt(&ticket).await.unwrap();
    assert_ne!(adopted.owner_id(), owner);
    assert!(lock.is_locked().await.unwrap() && adopted.is_valid());
    for lock in [&lock, &other] {
        for error in [
            lock.adopt(&ticket).await.unwrap_err(),
            lock.renew_ticket(&ticket, LONG).await.unwrap_err(),
            lock.unlock_ticket(&ticket).await.unwrap_err(),
        ] {
            let Error::TicketRefused { reason, .. } = &error else {
                panic!("{error}");
            };
            let owner = adopted.owner_id().to_string();
            assert_eq!(*reason, TicketRefusal::HeldBy { owner });
        }
    }
    free(adopted.reenter().await.unwrap()).await;
    let ticket = adopted.into_ticket().await.unwrap();
    lock.unlock_ticket(&ticket).await.unwrap();
    assert!(!other.is_locked().await.unwrap());
    free(held(&lock).await).await;
}

async fn hold_of_each_kind_moves_to_other_client(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("moves");
    let [plain, fair, fenced, spin, data] =
        ["plain", "fair", "fenced", "spin", "data"].map(|kind| format!("{name}:{kind}"));
    hold_moves(one.lock(&plain), two.lock(&plain)).await;
    hold_moves(one.fair_lock(&fair), two.fair_lock(&fair)).await;
    hold_moves(one.fenced_lock(&fenced), two.fenced_lock(&fenced)).await;
    hold_moves(one.spin_lock(&spin), two.spin_lock(&spin)).await;
    let write = |client: &Client| client.read_write_lock(&data).write();
    hold_moves(write(&one), write(&two)).await;
    assert_eq!((one.status().holds, two.status().holds), (0, 0));
    // The token of a fenced lock is that of the acquisition.
    let lock = one.fenced_lock(&fenced);
    let guard = held(&lock).await;
    let token = guard.token();
    let ticket = guard.into_ticket().await.unwrap();
    assert_eq!(ticket.token(), Some(token));
    let adopted = two.fenced_lock(&fenced).adopt(&ticket).await.unwrap();
    assert_eq!(adopted.token(), token);
    assert_eq!(lock.current_token().await.unwrap(), token);
    free(adopted).await;
}

async fn one_of_many_clients_adopts_each_ticket(store: TestStore) {
    let name = unique("race");
    let first = store.client().await.lock(&name);
    let clients: [Client; 4] = store.clients().await;
    let mut ticket = held(&first).await.into_ticket().await.unwrap();
    for _ in 0..20 {
        let adopting = spawn_each(clients.iter().chain(&clients), |client| {
            let (lock, ticket) = (client.lock(&name), ticket.clone());
            async move { lock.adopt(&ticket).await }
        });
        let mut adopted = Vec::new();
        for one in adopting {
            match done("an answer", one).await {
                Ok(guard) => adopted.push(guard),
                Err(error) => assert_matches!(error, Error::TicketRefused { .. }),
            }
        }
        assert_eq!(adopted.len(), 1);
        // The next one adopts a ticket of the winner.
        let guard = adopted.pop().expect("one");
        assert!(guard.is_valid());
        ticket = guard.into_ticket().await.unwrap();
    }
    first.unlock_ticket(&ticket).await.unwrap();
}

/// Tasks of three clients acquire the lock and pass it on as tickets, and others acquire it in between.
async fn ticket_and_waiters_exclude_each_other(store: TestStore) {
    let (name, holders) = (unique("exclusion"), Arc::new(AtomicU32::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let pair: [Client; 2] = store.clients().await;
        let (name, holders) = (name.clone(), holders.clone());
        tasks.push(tokio::spawn(async move {
            let work = async || {
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                tokio::task::yield_now().await;
                holders.fetch_sub(1, Ordering::SeqCst);
            };
            for round in 0..20 {
                let [one, two] = &pair;
                let guard = held(&one.lock(&name)).await;
                work().await;
                if round % 3 == 0 {
                    free(guard).await;
                    continue;
                }
                let ticket = guard.into_ticket().await.unwrap();
                work().await;
                let guard = two.lock(&name).adopt(&ticket).await.unwrap();
                work().await;
                match round % 3 {
                    1 => free(guard).await,
                    _ => drop(guard),
                }
            }
        }));
    }
    done_all("all rounds", tasks).await;
}

/// The lease that the waiters know of is far longer than that of the ticket, which nothing uses.
async fn waiters_learn_shorter_lease_of_ticket(store: TestStore) {
    let [one, two] = store.clients().await;
    let name = unique("shorter");
    let [plain, fair, data] = ["plain", "fair", "write"].map(|kind| format!("{name}:{kind}"));
    waiter_learns_shorter_lease(&two, one.lock(&plain), two.lock(&plain)).await;
    waiter_learns_shorter_lease(&two, one.fair_lock(&fair), two.fair_lock(&fair)).await;
    let [ours, theirs] = [&one, &two].map(|client| client.read_write_lock(&data).write());
    waiter_learns_shorter_lease(&two, ours, theirs).await;
}

async fn waiter_learns_shorter_lease<K: HasTicket>(two: &Client, lock: Lock<K>, other: Lock<K>) {
    let guard = lock.lock().lease(10 * LONG).await.unwrap();
    let waiting = waiter_of(two, other.lock()).await;
    guard.into_ticket_for(SECOND).await.unwrap();
    drop(joined("the end of the ticket", waiting).await);
    two.flush().await;
    // The channel is not used any more.
    until_subscribed(two, 0).await;
}

/// A guard whose ticket is canceled is released, and an adoption that is canceled gives the hold back.
async fn canceled_steps_leave_nothing_behind(store: TestStore) {
    let (one, two) = (&store.client().await, &store.client().await);
    let name = &unique("canceled");
    drop_after_each_poll(|polls| async move {
        let lock = one.fenced_lock(name);
        let guard = held(&lock).await;
        let ticket = poll_up_to(polls, guard.into_ticket_for(10 * LONG)).await;
        let is_made = ticket.is_some();
        if let Some(ticket) = ticket {
            let unlocked = two.fenced_lock(name).unlock_ticket(&ticket.unwrap()).await;
            unlocked.unwrap();
        }
        one.flush().await;
        assert!(!lock.is_locked().await.unwrap());
        assert_eq!(one.status().holds, 0);
        is_made
    })
    .await;
    drop_after_each_poll(|polls| async move {
        let lock = one.fenced_lock(name);
        let ticket = held(&lock).await.into_ticket_for(10 * LONG).await;
        let ticket = ticket.unwrap();
        let (other, token) = (two.fenced_lock(name), ticket.token());
        let adopted = poll_up_to(polls, other.adopt(&ticket)).await;
        let is_adopted = adopted.is_some();
        let guard = match adopted {
            Some(adopted) => adopted.unwrap(),
            // At once by the same client, or later by another one.
            None if polls % 2 == 0 => other.adopt(&ticket).await.unwrap(),
            None => {
                two.flush().await;
                lock.adopt(&ticket).await.unwrap()
            }
        };
        assert_eq!(Some(guard.token()), token);
        free(guard).await;
        two.flush().await;
        assert!(!lock.is_locked().await.unwrap());
        is_adopted
    })
    .await;
}

/// Another task of the owner releases its guard while a ticket is made of the last one. The step in flight is canceled. The store
/// may have replaced the owner already: the release then finds no hold, but this is not a loss.
#[tokio::test(flavor = "current_thread")]
async fn release_behind_canceled_ticket_is_no_loss() {
    let client = &client(shared()).await;
    let name = &unique("release-behind-canceled");
    drop_after_each_poll(|polls| async move {
        let (lock, me) = (client.lock(name), Owner::new());
        let outer = lock.lock().owner(me).await.unwrap();
        let mut reentering = lock.lock().owner(me).into_future();
        let mut making = Box::pin(outer.into_ticket());
        assert!(poll_up_to(1, reentering.as_mut()).await.is_none());
        assert!(poll_up_to(1, making.as_mut()).await.is_none());
        let mut releasing = Box::pin(reentering.await.unwrap().unlock());
        assert!(poll_up_to(1, releasing.as_mut()).await.is_none());
        let made = poll_up_to(polls, making.as_mut()).await;
        drop(making);
        releasing.await.unwrap();
        client.flush().await;
        let is_made = made.is_some();
        if let Some(ticket) = made {
            lock.unlock_ticket(&ticket.unwrap()).await.unwrap();
        }
        assert!(!lock.is_locked().await.unwrap());
        is_made
    })
    .await;
}

async fn through_proxy() -> (Client, Arc<Proxy>) {
    let proxy = Arc::new(Proxy::to(shared().port()));
    let client = connect(long_timeout(), &proxy.url()).await;
    (client, proxy)
}

/// Each step has taken effect when its answer is lost, and is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_whose_answers_are_lost_are_repeated() {
    let (client, proxy) = through_proxy().await;
    let lock = client.fenced_lock(&unique("lost"));
    let guard = held(&lock).await;
    let token = guard.token();
    let ticket = with_lost_answer(&proxy, guard.into_ticket()).await.unwrap();
    let renewed = with_lost_answer(&proxy, lock.renew_ticket(&ticket, LONG)).await;
    renewed.unwrap();
    let guard = with_lost_answer(&proxy, lock.adopt(&ticket)).await.unwrap();
    assert_eq!((guard.token(), guard.hold_count()), (token, 1));
    let ticket = guard.into_ticket().await.unwrap();
    let unlocked = with_lost_answer(&proxy, lock.unlock_ticket(&ticket)).await;
    unlocked.unwrap();
    assert!(!lock.is_locked().await.unwrap());
}

/// The answer to an adoption does not arrive in time. The same client adopts the ticket as soon as the store answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_adopts_ticket_after_outage() {
    let (server, one) = server_and_client().await;
    let two = connect(response_timeout(Duration::from_millis(200)), &server.url()).await;
    let guard = held(&one.lock("a")).await;
    let ticket = guard.into_ticket_for(10 * LONG).await.unwrap();
    server.freeze();
    for _ in 0..3 {
        assert_transient(two.lock("a").adopt(&ticket).await);
    }
    server.thaw();
    let lock = two.lock("a");
    let adopted = retry_transient(|| lock.adopt(&ticket)).await;
    let error = one.lock("a").adopt(&ticket).await.unwrap_err();
    let owner = adopted.owner_id().to_string();
    let held_by = TicketRefusal::HeldBy { owner };
    assert_matches!(error, Error::TicketRefused { ref reason, .. } if *reason == held_by);
    within_limit("settled", two.flush()).await;
    assert!(adopted.is_valid());
    // An answer may be late again.
    drop(adopted);
    within_limit("released", two.flush()).await;
    assert!(!one.lock("a").is_locked().await.unwrap());
}

/// The process that made the ticket has lost its connection, and all that it does later does not affect the adopter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_holder_does_not_affect_adopter() {
    let (first, proxy) = through_proxy().await;
    let (second, name) = (client(shared()).await, unique("former"));
    let guard = held(&first.lock(&name)).await;
    let lost = guard.lost();
    let ticket = guard.into_ticket_for(LONG).await.unwrap();
    proxy.cut();
    let adopted = second.lock(&name).adopt(&ticket).await.unwrap();
    assert!(first.lock(&name).try_lock().await.unwrap().is_none());
    first.flush().await;
    assert!(adopted.is_valid());
    assert!(tokio::time::timeout(Duration::ZERO, lost).await.is_err());
    free(adopted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adopted_hold_that_was_deleted_is_lost() {
    let (client, name) = (client(shared()).await, unique("deleted"));
    let ticket = held(&client.lock(&name)).await.into_ticket().await.unwrap();
    let adopted = client.lock(&name).adopt(&ticket).await.unwrap();
    let () = shared().command(&["DEL", &name]);
    assert_lost(adopted.unlock().await, Loss::NotHeld);
}

/// The data under the key of a lock is that of another program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_data_stays_unchanged() {
    let (client, name) = (client(shared()).await, unique("foreign"));
    let lock = client.lock(&name);
    let ticket = held(&lock).await.into_ticket().await.unwrap();
    let () = shared().command(&["SET", &name, "text"]);
    for error in [
        lock.adopt(&ticket).await.unwrap_err(),
        lock.renew_ticket(&ticket, LONG).await.unwrap_err(),
        lock.unlock_ticket(&ticket).await.unwrap_err(),
    ] {
        assert_matches!(error, Error::WrongKind { .. });
    }
    let text: String = shared().command(&["GET", &name]);
    assert_eq!(text, "text");
}

/// The same for threads.
#[test]
fn threads_pass_tickets_on() {
    on_every_store(|connect| {
        let (one, two) = (connect(), connect());
        let name = unique("threads");
        let guard = one.fenced_lock(&name).lock().block().unwrap();
        let token = guard.token();
        let again = guard.reenter().block().unwrap();
        let refused = again.into_ticket().unwrap_err();
        assert!(matches!(refused.error(), Error::NotMovable { .. }));
        refused.into_guard().expect("the guard").unlock().unwrap();
        let ticket = guard.into_ticket_for(LONG).unwrap();
        let lock = two.fenced_lock(&name);
        lock.renew_ticket(&ticket, 2 * LONG).unwrap();
        let guard = lock.adopt(&ticket).unwrap();
        assert_eq!(guard.token(), token);
        assert!(!lock.is_held_by_current_thread().unwrap());
        let again = guard.reenter().block().unwrap();
        assert_eq!(again.hold_count(), 2);
        again.unlock().unwrap();
        let ticket = guard.into_ticket().unwrap();
        one.fenced_lock(&name).unlock_ticket(&ticket).unwrap();
        assert!(!lock.is_locked().unwrap());
    });
}

/// Messages that arrive while a request acquires the lock have it checked in the background, behind the step that makes the ticket.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn guard_that_became_a_ticket_reports_no_loss() {
    let without_linger = Client::builder().subscription_linger(Duration::ZERO);
    let peer = client(shared()).await;
    let client = connect(without_linger, &shared().url()).await;
    let name = unique("checked");
    let (lock, theirs) = (client.lock(&name), peer.lock(&name));
    let publishing = Arc::new(AtomicBool::new(true));
    let messages = {
        let publishing = publishing.clone();
        let channel = format!("redisson_lock__channel:{{{name}}}");
        std::thread::spawn(move || {
            let mut connection = shared().connection();
            let mut publish = redis::cmd("PUBLISH");
            publish.arg(channel).arg("0");
            while publishing.load(Ordering::Relaxed) {
                let _: i64 = publish.query(&mut connection).unwrap();
            }
        })
    };
    for _ in 0..300 {
        let held = theirs.lock().await.unwrap();
        let waiting = waiter_of(&client, lock.lock()).await;
        free(held).await;
        let guard = joined("acquired", waiting).await;
        let mut lost = pin!(guard.lost());
        let ticket = guard.into_ticket().await.unwrap();
        // What is in flight does not concern the guard any more.
        assert!(poll_up_to(1, &mut lost).await.is_none());
        lock.unlock_ticket(&ticket).await.unwrap();
        until_subscribed(&client, 0).await;
    }
    publishing.store(false, Ordering::Relaxed);
    messages.join().unwrap();
}
