//! Tests on a server: data and messages, lost answers, broken connections.

use super::*;

fn channel(semaphore: &Semaphore) -> String {
    format!("redisson_sc:{{{}}}", semaphore.name())
}

/// The layout of Redisson: key, channel, payloads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_messages_match_redisson() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let semaphore = client.semaphore(&unique("layout"));
    let messages = messages(server, &channel(&semaphore));
    let value = || server.command::<String>(&["GET", semaphore.name()]);
    semaphore.try_set_permits(3).await.unwrap();
    assert_eq!(value(), "3");
    pass(&semaphore, 2).await;
    semaphore.add_permits(4).await.unwrap();
    semaphore.add_permits(-2).await.unwrap();
    semaphore.drain().await.unwrap();
    assert_eq!(value(), "0");
    semaphore.release(2).await.unwrap();
    assert_eq!(value(), "2");
    let received = [(); 4].map(|()| messages.recv_timeout(LONG).unwrap());
    assert_eq!(received, ["3", "3", "7", "2"]);
    assert_eq!(pttl(server, semaphore.name()), -1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_stay_unchanged() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let text = |value: &'static str| {
        let name = unique("foreign");
        let () = server.command(&["SET", &name, value]);
        name
    };
    let (hash, list) = (unique("foreign-hash"), unique("foreign-list"));
    let _: i64 = server.command(&["HSET", &hash, "a", "1"]);
    let _: i64 = server.command(&["RPUSH", &list, "1"]);
    let foreign = [
        text("precious"),
        text(""),
        text("1.5"),
        text("007"),
        text("1e3"),
        text("-0"),
        text("9999999999999999999999"),
        hash,
        list,
    ];
    for name in &foreign {
        let before: Vec<u8> = server.command(&["DUMP", name]);
        let semaphore = client.semaphore(name);
        for error in errors_of_each_request(&semaphore).await {
            assert_matches!(error, Some(Error::WrongKind { .. }));
        }
        assert_eq!(server.command::<Vec<u8>>(&["DUMP", name]), before, "{name}");
    }
    // The key changes its type while there are a waiter and a holder of permits.
    let semaphore = set(&client, "turned", 1).await;
    let held = semaphore.acquire().await.unwrap();
    let waiting = waiter_of(&client, semaphore.acquire()).await;
    let () = server.command(&["SET", semaphore.name(), "precious"]);
    let _: i64 = server.command(&["PUBLISH", &channel(&semaphore), "1"]);
    let error = done("answered", waiting).await.unwrap_err();
    assert_matches!(error, Error::WrongKind { .. });
    assert_matches!(held.release().await, Err(Error::WrongKind { .. }));
    within_limit("settled", client.flush()).await;
    let kept: String = server.command(&["GET", semaphore.name()]);
    assert_eq!(kept, "precious");
}

/// A request that was sent but not answered is reported, and never repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_outcome_is_reported_and_not_repeated() {
    let (server, proxy, client) = proxied_client().await;
    let semaphore = set(&client, "unknown", 100).await;
    // Loads the scripts, so that the lost answer is that of the step itself.
    semaphore.acquire().await.unwrap().release().await.unwrap();
    semaphore.drain().await.unwrap();
    semaphore.add_permits(100).await.unwrap();
    let mut expected = 100;
    for round in 0..5 {
        let taken = with_lost_answer(&proxy, semaphore.acquire_many(10).into_future());
        assert_matches!(taken.await, Err(Error::OutcomeUnknown { .. }));
        expected -= 10;
        assert_eq!(semaphore.available().await.unwrap(), expected, "{round}");
        let released = with_lost_answer(&proxy, semaphore.release(3));
        assert_matches!(released.await, Err(Error::OutcomeUnknown { .. }));
        expected += 3;
        assert_eq!(semaphore.available().await.unwrap(), expected, "{round}");
        let permits = semaphore.acquire_many(5).await.unwrap();
        let error = with_lost_answer(&proxy, permits.release()).await;
        assert!(matches!(error, Err(Error::OutcomeUnknown { .. })));
        within_limit("settled", client.flush()).await;
        assert_eq!(semaphore.available().await.unwrap(), expected, "{round}");
    }
    let error = with_lost_answer(&proxy, semaphore.drain()).await;
    assert!(matches!(error, Err(Error::OutcomeUnknown { .. })));
    assert_eq!(semaphore.available().await.unwrap(), 0);
    let said = error.unwrap_err().to_string();
    assert!(
        said.contains("draining") && said.contains("not repeated"),
        "{said}"
    );
    let fresh = client.semaphore(&unique("unknown-set"));
    let error = with_lost_answer(&proxy, fresh.try_set_permits(4).into_future()).await;
    assert_matches!(error, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(fresh.available().await.unwrap(), 4);
    assert!(fresh.delete().await.unwrap());
    assert!(fresh.try_set_permits(4).await.unwrap());
    let direct = Client::connect(&server.url()).await.unwrap();
    let set = async {
        let same = direct.semaphore(fresh.name());
        assert!(same.try_set_permits(5).await.unwrap());
    };
    let error = with_lost_answer_after(&proxy, fresh.delete(), set).await;
    assert_matches!(error, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(fresh.available().await.unwrap(), 5);
    assert_idle(&client);
}

/// A request that was never sent is retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_connection_is_reopened() {
    let (server, proxy, client) = proxied_client().await;
    let semaphore = set(&client, "anew", 2).await;
    for _ in 0..20 {
        proxy.cut();
        until("the cut is noticed", async || server.clients() == 0).await;
        // The next inspection reconnects; the request after it is sent on the new connection.
        semaphore.available().await.unwrap();
        pass(&semaphore, 2).await;
    }
    assert_eq!(semaphore.available().await.unwrap(), 2);
}

/// A server that is busy with another script has executed nothing: the request is retried, but not
/// forever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_to_busy_server_is_retried() {
    let server = Server::start_with(&["--lua-time-limit", "1"]);
    let hasty = connect(response_timeout(Duration::from_millis(300)), &server.url()).await;
    let other = connect(long_timeout(), &server.url()).await;
    let same = set(&other, "busy", 2).await;
    let semaphore = hasty.semaphore(same.name());
    let mut connection = server.connection();
    let busy = std::thread::spawn(move || {
        let endless = redis::Script::new("while true do end");
        let ended: redis::RedisResult<()> = endless.invoke(&mut connection);
        assert!(ended.unwrap_err().to_string().contains("killed"));
    });
    until("it is busy", async || {
        let ping = redis::cmd("PING").query::<String>(&mut server.connection());
        ping.is_err()
    })
    .await;
    assert_transient(semaphore.acquire_many(2).await);
    // If a busy machine got no answer, nothing was executed either.
    let mut error = semaphore.release(5).await.unwrap_err();
    while matches!(error, Error::OutcomeUnknown { .. }) {
        error = semaphore.release(5).await.unwrap_err();
    }
    assert!(
        matches!(&error, Error::Unavailable { reason, .. } if reason.contains("BUSY")),
        "{error}"
    );
    let waiting = tokio::spawn(same.acquire_many(2).into_future());
    let () = server.command(&["SCRIPT", "KILL"]);
    tokio::task::spawn_blocking(|| busy.join().unwrap())
        .await
        .unwrap();
    let permits = joined("served", waiting).await;
    within_limit("settled", hasty.flush()).await;
    assert_eq!(same.available().await.unwrap(), 0);
    permits.release().await.unwrap();
    assert_eq!(same.available().await.unwrap(), 2);
}

/// Failure catalogue F4: an answer that arrives after the response timeout acquires nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_answer_is_undone() {
    let server = Server::start();
    let client = connect(response_timeout(Duration::from_millis(200)), &server.url()).await;
    let other = crate::common::client(&server).await;
    let same = set(&other, "late", 2).await;
    let semaphore = client.semaphore(same.name());
    // Loads the script, so that the late answer is that of the step itself.
    same.acquire().await.unwrap().release().await.unwrap();
    server.freeze();
    let error = semaphore.acquire_many(2).await.unwrap_err();
    assert_matches!(error, Error::ResponseTimeout { .. });
    assert_eq!(client.status().background, 1);
    server.thaw();
    within_limit("settled", client.flush()).await;
    assert_eq!(same.available().await.unwrap(), 2);
}

/// Any number of acquisitions whose answers are awaited in the background do not block other
/// requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn awaiting_late_answers_does_not_block_other_requests() {
    let (server, proxy) = proxied_server();
    let client = connect(response_timeout(Duration::from_millis(500)), &proxy.url()).await;
    let other = crate::common::client(&server).await;
    let same = set(&other, "heard-out", 1000).await;
    same.acquire().await.unwrap().release().await.unwrap();
    let semaphore = client.semaphore(same.name());
    proxy.stall(true);
    let tries = spawn_each(0..512, |_| semaphore.try_acquire());
    for tried in tries {
        assert_matches!(tried.await.unwrap(), Err(Error::ResponseTimeout { .. }));
    }
    assert_eq!(client.status().background, 512);
    let lock = client.lock("heard-out-lock");
    let tried = within_limit("a turn", lock.try_lock()).await;
    assert!(matches!(tried, Err(Error::ResponseTimeout { .. })));
    proxy.stall(false);
    within_limit("settled", client.flush()).await;
    assert_eq!(same.available().await.unwrap(), 1000);
}

/// A guard that is dropped while the server is unreachable releases once the server is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_is_retried_until_the_server_is_back() {
    let (server, proxy) = proxied_server();
    let client = connect(response_timeout(Duration::from_millis(200)), &proxy.url()).await;
    let same = set(&crate::common::client(&server).await, "away", 4).await;
    let semaphore = client.semaphore(same.name());
    let one = retry_if_late(|| semaphore.acquire()).await;
    let two = retry_if_late(|| semaphore.acquire_many(2)).await;
    cut_off(&proxy);
    until("the cut is noticed", async || {
        matches!(
            semaphore.release(1).await,
            Err(Error::Unavailable { .. } | Error::ResponseTimeout { .. })
        )
    })
    .await;
    drop(one);
    assert_transient(two.release().await);
    assert_transient(semaphore.acquire().await);
    assert_eq!(client.status().background, 2);
    proxy.refuse(false);
    within_limit("settled", client.flush()).await;
    assert_eq!(same.available().await.unwrap(), 4);
}

/// Failure catalogue F6: the permits are released after each await point of the waiter in turn; in
/// every state, the waiter is woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_released_between_any_two_polls_wake_waiter() {
    let store = TestStore::server();
    let [client, other] = store.clients_without_retries().await;
    for polls in 1..30 {
        // Uses a new channel each time, which is not subscribed to yet.
        let semaphore = set(&client, "heard", 2).await;
        let same = other.semaphore(semaphore.name());
        let held = same.acquire_many(2).await.unwrap();
        let mut waiter = semaphore.acquire_many(2).into_future();
        poll_until_subscribed(polls, &mut waiter, &channel(&semaphore)).await;
        // The connection keeps order: everything that the waiter has sent so far has been answered.
        assert_eq!(semaphore.available().await.unwrap(), 0);
        held.release().await.unwrap();
        let permits = done("woken, not slept through", waiter).await;
        permits.release().await.unwrap();
    }
}

/// A waiter whose connection is cut, or stalled while permits are released, acquires them (F6
/// across a reconnection).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_released_during_disconnect_are_noticed() {
    let (server, proxy) = proxied_server();
    let holder = Client::connect(&server.url()).await.unwrap();
    let waiter = connect(Client::builder().watchdog_lease(10 * LONG), &proxy.url()).await;
    for round in 0..10 {
        // With a name of its own, so that its subscription is that of this round's waiter.
        let semaphore = set(&holder, &format!("down-{round}"), 1).await;
        let same = waiter.semaphore(semaphore.name());
        let channel = channel(&semaphore);
        let held = semaphore.acquire().await.unwrap();
        let waiting = tokio::spawn(same.acquire().into_future());
        until("it waits", async || subscribers(&server, &channel) == 1).await;
        // Earlier requests have been answered by the time that a later command is answered.
        same.available().await.unwrap();
        cut_off(&proxy);
        held.release().await.unwrap();
        proxy.refuse(false);
        joined("seen", waiting).await.release().await.unwrap();
    }
}

/// A refused subscription loses no permits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_channel_loses_no_permits() {
    let server = Server::start();
    let client = Client::connect(&user_without_channels(&server))
        .await
        .unwrap();
    let other = Client::connect(&server.url()).await.unwrap();
    let semaphore = set(&other, "mute", 2).await;
    let same = client.semaphore(semaphore.name());
    let permits = same.acquire_many(2).await.unwrap();
    assert_matches!(same.acquire().await, Err(Error::NotPermitted { .. }));
    // Publishing is refused as well, before anything is changed. The release is retried until it is
    // allowed.
    assert_matches!(permits.release().await, Err(Error::NotPermitted { .. }));
    assert_eq!(semaphore.available().await.unwrap(), 0);
    let () = server.command(&["ACL", "SETUSER", "restricted", "allchannels"]);
    within_limit("settled", client.flush()).await;
    assert_eq!(semaphore.available().await.unwrap(), 2);
}

/// Only the first of many waiters sends requests; waiting costs one subscription.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiters_cost_one_subscription() {
    let (server, holder) = server_and_client().await;
    let crowd = Client::connect(&server.url()).await.unwrap();
    let semaphore = set(&holder, "crowd", 1).await;
    let held = semaphore.acquire().await.unwrap();
    let same = crowd.semaphore(semaphore.name());
    let waiting = spawn_each(0..200, |_| {
        let same = same.clone();
        async move { same.acquire().await.unwrap().release().await.unwrap() }
    });
    until_subscribed(&crowd, 1).await;
    let channel = channel(&semaphore);
    until_subscribed_once(&server, &channel).await;
    held.release().await.unwrap();
    done_all("served", waiting).await;
    until("no channel is left", async || channels(&server) == 0).await;
}
