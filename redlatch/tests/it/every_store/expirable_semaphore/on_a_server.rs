//! Tests on a server: data and messages, lost answers, killed processes.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_and_messages_match_redisson() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let name = unique("layout");
    let messages = messages(server, &format!("redisson_sc:{{{name}}}"));
    let next_message = || messages.recv_timeout(LONG).unwrap();

    let semaphore = client.expirable_semaphore(&name);
    assert!(semaphore.try_set_permits(3).await.unwrap());
    assert_eq!(next_message(), "3");
    let two = semaphore.acquire_many(2).lease(LONG).await.unwrap();
    assert_eq!(server.command::<String>(&["GET", &name]), "1");
    let deadlines = format!("{{{name}}}:timeout");
    let kept: Vec<(Vec<u8>, i64)> =
        server.command(&["ZRANGE", &deadlines, "0", "-1", "WITHSCORES"]);
    let mut ids: Vec<_> = kept.iter().map(|(id, _)| id.clone()).collect();
    let mut expected: Vec<_> = two.ids().iter().map(|id| id.as_bytes().to_vec()).collect();
    ids.sort();
    expected.sort();
    assert_eq!(ids, expected);
    let (seconds, _): (i64, i64) = server.command(&["TIME"]);
    for (_, date) in kept {
        assert!(
            (date / 1000 - seconds - 60).abs() < 30,
            "{date} is no date of the server's"
        );
    }
    let ids = two.into_ids().unwrap();
    semaphore.release(ids[0]).await.unwrap();
    assert_eq!(next_message(), "2");
    semaphore.release(ids[1]).await.unwrap();
    assert_eq!(next_message(), "3");
    semaphore.add_permits(4).await.unwrap();
    assert_eq!(next_message(), "7");
    semaphore.set_permits(5).await.unwrap();
    assert_eq!(next_message(), "5");
    let id = ids_of(semaphore.acquire()).await[0];
    let updated = semaphore.update_lease(id, Duration::from_millis(1)).await;
    assert!(updated.unwrap());
    assert_eq!(next_message(), "4");
    let expired = async || semaphore.available().await.unwrap() == 5;
    until("it has expired", expired).await;
    assert_eq!(next_message(), "5");
    assert_eq!(pttl(server, &name), -1);
    assert_eq!(server.command::<i64>(&["EXISTS", &deadlines]), 0);
}

/// Redisson grants permits without a lease, and releases redlatch's permits by their ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_without_lease_are_supported() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let semaphore = with_permits(&client, "for-ever", 1).await;
    let deadlines = format!("{{{}}}:timeout", semaphore.name());
    let raw = ["ZADD", &deadlines, "922337203685477", "0123456789abcdef"];
    let () = server.command(&raw);
    let () = server.command(&["DECR", semaphore.name()]);
    let id = PermitId::from_bytes(*b"0123456789abcdef");
    assert_eq!(semaphore.lease_of(id).await.unwrap(), Some(Expiry::Never));
    let held = semaphore.held_permits().await.unwrap();
    assert_eq!((held.len(), held[0].remaining), (1, Expiry::Never));
    assert_eq!(held[0].id, id);
    assert_eq!(counts(&semaphore).await, (0, 1, 1));
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    let waiter = waiter_of(&client, semaphore.acquire()).await;
    // Releases the permit as Redisson does; the message follows.
    let () = server.command(&["ZREM", &deadlines, "0123456789abcdef"]);
    let () = server.command(&["INCR", semaphore.name()]);
    let channel = format!("redisson_sc:{{{}}}", semaphore.name());
    // A message sent before the subscription took effect is not received, so it is published until the waiter has ended.
    let publish_until_woken = || async {
        let _: i64 = server.command(&["PUBLISH", &channel, "1"]);
        waiter.is_finished()
    };
    until("woken", publish_until_woken).await;
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

/// F22: a user deleted the key with the number of free permits, or gave it a time to live, as Redisson's `expire`
/// does. Permits acquired before do not count in a semaphore that is set anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_deleted_semaphore_are_not_counted() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let semaphore = with_permits(&client, "gone", 3).await;
    let deadlines = format!("{{{}}}:timeout", semaphore.name());
    for removal in [vec!["DEL"], vec!["PEXPIRE", "1"]] {
        let ids = ids_of(semaphore.acquire_many(2)).await;
        let mut command = vec![removal[0], semaphore.name()];
        command.extend(&removal[1..]);
        let () = server.command(&command);
        let gone = || async { server.command::<i64>(&["EXISTS", semaphore.name()]) == 0 };
        until("it is gone", gone).await;
        assert!(semaphore.try_acquire().await.unwrap().is_none());
        assert!(!semaphore.try_release(ids[0]).await.unwrap());
        assert_eq!(server.command::<i64>(&["EXISTS", semaphore.name()]), 0);
        assert!(semaphore.try_set_permits(3).await.unwrap());
        assert_eq!(counts(&semaphore).await, (3, 0, 3));
        assert_eq!(server.command::<i64>(&["EXISTS", &deadlines]), 0);
    }
}

/// Without a semaphore, no request changes anything: the auxiliary key may hold foreign data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_semaphore_change_nothing() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    let semaphore = client.expirable_semaphore(&unique("looking"));
    let deadlines = format!("{{{}}}:timeout", semaphore.name());
    let id: PermitId = "ff".repeat(16).parse().unwrap();
    let mut add = redis::cmd("ZADD");
    add.arg(&deadlines)
        .arg(99_999_999_999_999i64)
        .arg(&[0xffu8; 16][..]);
    let () = add.query(&mut server.connection()).unwrap();
    assert_eq!(counts(&semaphore).await, (0, 0, 0));
    assert_eq!(semaphore.lease_of(id).await.unwrap(), None);
    assert!(semaphore.held_permits().await.unwrap().is_empty());
    assert!(!semaphore.update_lease(id, LONG).await.unwrap());
    assert!(!semaphore.try_release(id).await.unwrap());
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert!(!semaphore.force_release().await.unwrap());
    assert!(!semaphore.delete().await.unwrap());
    assert_eq!(server.command::<i64>(&["ZCARD", &deadlines]), 1);
    assert_eq!(server.command::<i64>(&["EXISTS", semaphore.name()]), 0);
}

/// A client without permission to publish changes nothing, because waiters would not be notified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_publish_permission_nothing_changes() {
    let server = Server::start();
    let admin = Client::connect(&server.url()).await.unwrap();
    let restricted = Client::connect(&user_without_channels(&server))
        .await
        .unwrap();
    let observer = admin.expirable_semaphore("a");
    let semaphore = restricted.expirable_semaphore("a");
    assert!(semaphore.set_permits(3).await.is_err());
    assert_eq!(server.command::<i64>(&["DBSIZE"]), 0);
    observer.set_permits(3).await.unwrap();
    let ids = observer.acquire().await.unwrap().into_ids().unwrap();
    let before = lease_of(&observer, ids[0]).await;
    assert!(semaphore.add_permits(2).await.is_err());
    assert!(semaphore.set_permits(7).await.is_err());
    assert!(semaphore.release(ids[0]).await.is_err());
    assert!(semaphore.force_release().await.is_err());
    assert!(semaphore.update_lease(ids[0], SECOND).await.is_err());
    assert_eq!(counts(&observer).await, (2, 1, 3));
    let left = lease_of(&observer, ids[0]).await;
    assert!(left + 10 * SECOND > before, "{left:?} of {before:?}");
    // An expired permit is not released either.
    let ended = observer.update_lease(ids[0], Duration::from_millis(1));
    ended.await.unwrap();
    sleep(Duration::from_millis(5)).await;
    assert!(semaphore.available().await.is_err());
    assert_eq!(server.command::<i64>(&["ZCARD", "{a}:timeout"]), 1);
    assert_eq!(counts(&observer).await, (3, 0, 3));
}

/// A server that is out of memory keeps all permits: renewing and releasing need no memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_memory_loses_no_permit() {
    let server = Server::start();
    let client = connect(renewing(), &server.url()).await;
    let semaphore = client.expirable_semaphore("a");
    semaphore.set_permits(2).await.unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let handed_on = ids_of(semaphore.acquire()).await;
    let () = server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(semaphore.add_permits(1).await.is_err(), "it is not full");
    let updated = semaphore.update_lease(handed_on[0], 10 * LONG).await;
    assert!(updated.unwrap());
    let key = "{a}:timeout";
    let end = || server.command::<Vec<(Vec<u8>, f64)>>(&["ZRANGE", key, "0", "0", "WITHSCORES"]);
    for _ in 0..2 {
        until_rises("the end of its lease", async || end()[0].1).await;
    }
    assert!(permit.is_valid());
    permit.release().await.unwrap();
    semaphore.release(handed_on[0]).await.unwrap();
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}

/// Foreign data under one of the keys causes an error, and stays unchanged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_stay_unchanged() {
    let server = shared();
    let client = Client::connect(&server.url()).await.unwrap();
    for write in [
        vec!["HSET", "name", "a", "1"],
        vec!["SET", "name", "abc"],
        vec!["SET", "name", "1.5"],
        vec!["SET", "name", "9223372036854775807"],
        vec!["RPUSH", "deadlines", "a"],
        vec!["SET", "deadlines", "5"],
    ] {
        let name = unique("foreign");
        let deadlines = format!("{{{name}}}:timeout");
        let foreign = match write[1] {
            "name" => &name,
            _ => &deadlines,
        };
        let mut command = write.clone();
        command[1] = foreign;
        let () = server.command(&command);
        let before: Vec<u8> = server.command(&["DUMP", foreign]);
        let semaphore = client.expirable_semaphore(&name);
        for error in errors_of_each_request(&semaphore).await {
            let is_refused = matches!(error, Some(Error::WrongKind { .. }));
            assert!(is_refused, "{write:?}: {error:?}");
        }
        let after: Vec<u8> = server.command(&["DUMP", foreign]);
        assert_eq!(after, before, "{write:?}");
        let keys: i64 = server.command(&["EXISTS", &name, &deadlines]);
        assert_eq!(keys, 1, "{write:?}");
    }
}

/// Runs the steps of the test below once, so that the server knows their scripts.
async fn load_scripts(client: &Client) {
    let semaphore = with_permits(client, "teach", 1).await;
    let permit = semaphore.acquire().await.unwrap();
    semaphore.lease_of(permit.ids()[0]).await.unwrap();
    semaphore.update_lease(permit.ids()[0], LONG).await.unwrap();
    permit.release().await.unwrap();
    semaphore.add_permits(1).await.unwrap();
    counts(&semaphore).await;
    semaphore.force_release().await.unwrap();
    semaphore.delete().await.unwrap();
}

/// F22, F25: a step whose answer is lost takes effect once. It is sent again if it may be repeated; otherwise its
/// outcome is reported as unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answer_does_not_count_twice() {
    let (server, proxy) = proxied_server();
    let client = connect(long_timeout(), &proxy.url()).await;
    let direct = Client::connect(&server.url()).await.unwrap();
    load_scripts(&direct).await;
    let semaphore = client.expirable_semaphore("lost-answers");
    let observer = direct.expirable_semaphore("lost-answers");

    for permits in [5, 6] {
        let unknown = with_lost_answer(&proxy, semaphore.try_set_permits(permits)).await;
        assert_matches!(unknown, Err(Error::OutcomeUnknown { .. }));
        assert_eq!(counts(&semaphore).await, (5, 0, 5));
    }
    let set = async { assert!(observer.try_set_permits(5).await.unwrap()) };
    let unknown = with_lost_answer_after(&proxy, semaphore.delete(), set).await;
    assert_matches!(unknown, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(counts(&semaphore).await, (5, 0, 5));
    let two = with_lost_answer(&proxy, semaphore.acquire_many(2).into_future()).await;
    let two = two.unwrap();
    assert_eq!(counts(&observer).await, (3, 2, 5));
    // In this order: a pause of the machine in between shortens what is left.
    let kept = lease_of(&observer, two.ids()[0]).await;
    let more = two.valid_for().saturating_sub(kept);
    assert!(more < SECOND, "{more:?} more than {kept:?}");
    with_lost_answer(&proxy, two.release()).await.unwrap();
    assert_eq!(counts(&observer).await, (5, 0, 5));

    let ids = semaphore.acquire_many(5).await.unwrap().into_ids().unwrap();
    let released = with_lost_answer(&proxy, semaphore.release(ids[0])).await;
    released.unwrap();
    let released = with_lost_answer(&proxy, semaphore.try_release(ids[1])).await;
    assert!(released.unwrap());
    let released = with_lost_answer(&proxy, semaphore.release_many(&ids[2..4])).await;
    released.unwrap();
    assert_eq!(counts(&observer).await, (4, 1, 5));
    // One of these permits is acquired, so the first request has not released them.
    let refused = with_lost_answer(&proxy, semaphore.release_many(&ids[3..])).await;
    assert!(is_lost(&refused));
    assert_eq!(counts(&observer).await, (4, 1, 5));

    let set = with_lost_answer(&proxy, semaphore.set_permits(7)).await;
    set.unwrap();
    assert_eq!(counts(&observer).await, (6, 1, 7));
    // This request is not repeated, and its outcome is reported as unknown.
    let unknown = with_lost_answer(&proxy, semaphore.add_permits(2)).await;
    assert_matches!(unknown, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(counts(&semaphore).await, (8, 1, 9));
    let unknown = with_lost_answer(&proxy, semaphore.delete()).await;
    assert_matches!(unknown, Err(Error::OutcomeUnknown { .. }));
    assert_eq!(counts(&observer).await, (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_retries_after_reconnect() {
    let (server, proxy) = proxied_server();
    let client = Client::connect(&proxy.url()).await.unwrap();
    let other = Client::connect(&server.url()).await.unwrap();
    let semaphore = with_permits(&other, "broken", 1).await;
    let held = semaphore.acquire().lease(10 * LONG).await.unwrap();
    let theirs = client.expirable_semaphore(semaphore.name());
    let waiter = tokio::spawn(theirs.acquire().into_future());
    until("it is subscribed", async || channels(&server) == 1).await;
    // Released while the client receives no messages.
    proxy.stall(true);
    held.release().await.unwrap();
    proxy.cut();
    proxy.stall(false);
    let permit = joined("served", waiter).await;
    permit.release().await.unwrap();
}

/// The code that another process runs in [`killed_process_keeps_no_permits`]; run as a test, it
/// does nothing.
#[tokio::test]
async fn another_process() {
    let Ok(url) = std::env::var("REDLATCH_TEST_OF_PERMITS") else {
        return;
    };
    let client = connect(renewing(), &url).await;
    let semaphore = client.expirable_semaphore("killed");
    let _held = semaphore.acquire_many(3).await.unwrap();
    println!("\nheld");
    std::future::pending::<()>().await;
}

/// F20: kill -9. The permits are free again when their lease ends, and waiters are woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_process_keeps_no_permits() {
    let server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let semaphore = client.expirable_semaphore("killed");
    assert!(semaphore.try_set_permits(3).await.unwrap());
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture"])
        .args(["every_store::expirable_semaphore::on_a_server::another_process"])
        .env("REDLATCH_TEST_OF_PERMITS", server.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(process.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap() == "held"));
    let waiter = waiter_of(&client, semaphore.acquire_many(3)).await;
    assert_eq!(counts(&semaphore).await, (0, 3, 3));
    process.kill().unwrap();
    process.wait().unwrap();
    let three = joined("they come back", waiter).await;
    three.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (3, 0, 3));
}

/// F2: the server cannot be reached. The holder learns of the loss before another client can
/// acquire its permit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_holder_learns_that_its_permit_is_lost() {
    let (server, proxy) = proxied_server();
    let client = connect(renewing().response_timeout(SHORT), &proxy.url()).await;
    let other = Client::connect(&server.url()).await.unwrap();
    let semaphore = client.expirable_semaphore("cut-off");
    assert!(semaphore.try_set_permits(1).await.unwrap());
    let permit = semaphore.acquire().await.unwrap();
    proxy.stall(true);
    let same = other.expirable_semaphore("cut-off");
    let theirs = done("it comes back", same.acquire()).await;
    assert!(!permit.is_valid(), "held by two");
    assert!(is_lost(&permit.release().await));
    proxy.stall(false);
    within_limit("settled", client.flush()).await;
    assert!(theirs.is_valid());
    assert_eq!(counts(&same).await, (0, 1, 1));
}

/// All processes go on after the server has lost its data, and none has more permits than there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn number_of_permits_survives_loss_of_data() {
    let mut server = Server::start();
    let client = Client::connect(&server.url()).await.unwrap();
    let semaphore = client.expirable_semaphore("jobs").permits(2);
    let held = semaphore.acquire_many(2).lease(SHORT).await.unwrap();
    let waiting = waiter_of(&client, semaphore.acquire()).await;
    server.restart();
    let one = joined("goes on", waiting).await;
    assert_eq!(counts(&semaphore).await, (1, 1, 2));
    assert!(held.release().await.is_err());
    one.release().await.unwrap();
    assert_eq!(counts(&semaphore).await, (2, 0, 2));
}
