//! Tests of the read-write lock on a real server: data shared with Redisson, lost answers, lost
//! scripts, foreign keys.

use std::collections::BTreeMap;

use crate::common::prelude::*;

fn hash(server: &Server, key: &str) -> BTreeMap<String, String> {
    server.command(&["HGETALL", key])
}

#[track_caller]
fn assert_fields<const N: usize>(server: &Server, fields: [(&str, &str); N]) {
    let owned = fields.map(|(field, value)| (field.to_owned(), value.to_owned()));
    assert_eq!(hash(server, "a"), BTreeMap::from(owned));
}

fn sorted<const N: usize>(mut keys: [&str; N]) -> [&str; N] {
    keys.sort();
    keys
}

fn keys(server: &Server) -> Vec<String> {
    let mut keys: Vec<String> = server.command(&["KEYS", "*"]);
    // Of a client that was killed, for one lease.
    keys.retain(|key| !key.starts_with("redlatch_client:"));
    keys.sort();
    keys
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_matches_redisson() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let me = Owner::new();
    let owner = String::from(client.owner_id(me));
    let timeout = |n: u32| format!("{{a}}:{owner}:rwlock_timeout:{n}");

    let outer = lock.read().lock().owner(me).lease(LONG).await.unwrap();
    let inner = outer.reenter().lease(2 * LONG).await.unwrap();
    assert_fields(&server, [("mode", "read"), (&owner, "2")]);
    assert_eq!(keys(&server), sorted(["a", &timeout(1), &timeout(2)]));
    assert_eq!(server.command::<String>(&["GET", &timeout(2)]), "1");
    let minute = i64::try_from(LONG.as_millis()).unwrap();
    assert!(pttl(&server, &timeout(1)) <= minute);
    assert!(pttl(&server, &timeout(2)) > minute);
    assert!(pttl(&server, "a") > minute);
    free(inner).await;
    assert_fields(&server, [("mode", "read"), (&owner, "1")]);
    free(outer).await;
    assert_eq!(keys(&server), [""; 0]);

    let writer = lock.write().lock().owner(me).await.unwrap();
    let write = format!("{owner}:write");
    assert_fields(&server, [("mode", "write"), (&write, "1")]);
    let again = writer.reenter().await.unwrap();
    let reader = writer.reenter_read().await.unwrap();
    let both = [("mode", "write"), (&*write, "2"), (&owner, "1")];
    assert_fields(&server, both);
    free(again).await;
    free(writer).await;
    assert_fields(&server, [("mode", "read"), (&owner, "1")]);
    free(reader).await;
    assert_eq!(keys(&server), [""; 0]);

    let tagged = client.read_write_lock("{b}:c");
    let reader = tagged.read().lock().owner(me).await.unwrap();
    let timeout = format!("{{b}}:c:{owner}:rwlock_timeout:1");
    assert_eq!(keys(&server), sorted(["{b}:c", &timeout]));
    // A forced unlock leaves nothing either.
    assert!(tagged.read().force_unlock().await.unwrap());
    assert_eq!(keys(&server), [""; 0]);
    drop(reader);
    client.flush().await;
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_match_redisson() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let messages = messages(&server, "redisson_rwlock:{a}");
    let next_message = || messages.recv_timeout(LONG).unwrap();

    let (one, two) = (lock.read().lock().await, lock.read().lock().await);
    free(one.unwrap()).await;
    // No message so far: there is still a reader.
    free(two.unwrap()).await;
    assert_eq!(next_message(), "0");
    free(held(&lock.write()).await).await;
    // The second message is for a Redisson thread that is only about to sleep.
    assert_eq!([next_message(), next_message()], ["1", "0"]);
    let reader = held(&lock.write()).await.downgrade().await.unwrap();
    // Only redlatch sends this one, so that waiting readers do not keep sleeping.
    assert_eq!([next_message(), next_message()], ["1", "0"]);
    assert!(lock.read().force_unlock().await.unwrap());
    assert_eq!(next_message(), "0");
    // Its release finds that the lock is gone, and cannot know that waiters were woken already.
    drop(reader);
    client.flush().await;
    assert_eq!(next_message(), "0");
    let writer = held(&lock.write()).await;
    assert!(lock.write().force_unlock().await.unwrap());
    assert_eq!([next_message(), next_message()], ["1", "0"]);
    drop(writer);
    client.flush().await;
    assert_eq!([next_message(), next_message()], ["1", "0"]);
    // None of these messages was published twice.
    free(held(&lock.read()).await).await;
    assert_eq!(next_message(), "0");
    assert_eq!(keys(&server), [""; 0]);
}

/// redlatch respects the data of a Redisson client that reads or writes, and the messages of that
/// client wake redlatch's waiters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_from_redisson_are_respected() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let () = server.command(&["HSET", "a", "mode", "read", "redisson:5", "2"]);
    for n in ["1", "2"] {
        let key = format!("{{a}}:redisson:5:rwlock_timeout:{n}");
        let () = server.command(&["SET", &key, "1", "PX", "600000"]);
    }
    let () = server.command(&["PEXPIRE", "a", "600000"]);
    let holder = lock.read().holder().await.unwrap().unwrap();
    assert_eq!((holder.owner.as_str(), holder.holds), ("redisson:5", 2));
    free(held(&lock.read()).await).await;
    assert!(pttl(&server, "a") > 500_000);
    let waiting = waiter_of(&client, lock.write().lock()).await;
    let () = server.command(&["DEL", "a"]);
    let () = server.command(&["PUBLISH", "redisson_rwlock:{a}", "0"]);
    free(joined("woken", waiting).await).await;

    let () = server.command(&["HSET", "a", "mode", "write", "redisson:5:write", "1"]);
    let () = server.command(&["PEXPIRE", "a", "600000"]);
    let holder = lock.write().holder().await.unwrap().unwrap();
    assert_eq!(holder.owner, "redisson:5");
    let waiting = waiter_of(&client, lock.read().lock()).await;
    let () = server.command(&["DEL", "a"]);
    let () = server.command(&["PUBLISH", "redisson_rwlock:{a}", "1"]);
    free(joined("woken", waiting).await).await;
}

/// F12: a reader whose process was killed remains in Redis. Another reader stays longer; when it
/// leaves, the dead one blocks no other owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_reader_expires_with_its_own_lease() {
    let server = Server::start();
    let client = connect(renewing().response_timeout(LONG), &server.url()).await;
    let lock = client.read_write_lock("a");
    let alive = held(&lock.read()).await;
    let killed = "{a}:killed:1:rwlock_timeout:1";
    let () = server.command(&["HSET", "a", "killed:1", "1"]);
    // The other reader is renewed before that.
    let () = server.command(&["SET", killed, "1", "PX", "3000"]);
    let writer = tokio::spawn(lock.write().lock().into_future());
    until("its lease has ended", async || pttl(&server, killed) == -2).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 1);
    // The dead reader's field is still there, and blocks no other owner.
    assert!(hash(&server, "a").contains_key("killed:1"));
    assert!(!writer.is_finished());
    free(alive).await;
    free(joined("no holder is left", writer).await).await;
    assert_eq!(keys(&server), [""; 0]);
}

/// F12 and F13 together: a reader's renewal extends each of its own holds, and no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_extends_only_own_holds() {
    let server = Server::start();
    let client = connect(renewing().response_timeout(LONG), &server.url()).await;
    let lock = client.read_write_lock("a");
    let fixed = lock.read().lock().lease(10 * LONG).await.unwrap();
    let of_fixed = format!("{{a}}:{}:rwlock_timeout:1", fixed.owner_id());
    let outer = held(&lock.read()).await;
    let inner = outer.reenter().await.unwrap();
    let own = [1, 2].map(|n| format!("{{a}}:{}:rwlock_timeout:{n}", outer.owner_id()));
    let [one, two] = own.each_ref().map(|key| {
        let server = &server;
        until_rises("renewed", move || async move { pttl(server, key) })
    });
    tokio::join!(one, two);
    // The renewal neither extends nor shortens it.
    let before = pttl(&server, &of_fixed);
    assert!(before > 500_000);
    until_rises("renewed once more", async || pttl(&server, &own[0])).await;
    assert!(pttl(&server, &of_fixed) <= before);
    free_all([inner, outer, fixed]).await;
    client.flush().await;
    assert_eq!(keys(&server), [""; 0]);
}

/// F14, F1: once nothing is held any more, no command is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_last_release_nothing_is_renewed() {
    let server = Server::start();
    let settings = renewing()
        .response_timeout(LONG)
        // It is written in the background.
        .registry(false);
    let client = settings.connect(&server.url()).await.unwrap();
    let lock = client.read_write_lock("a");
    let outer = held(&lock.read()).await;
    let inner = outer.reenter().await.unwrap();
    let writer = held(&client.read_write_lock("b").write()).await;
    let reader = writer.reenter_read().await.unwrap();
    assert_eq!(client.status().holds, 3);
    free_all([outer, inner, reader]).await;
    free(writer).await;
    assert_eq!(client.status().holds, 0);
    let scripts = || server.calls("eval");
    let before = scripts();
    let begun = std::time::Instant::now();
    until("two renewals would have been due", async || {
        begun.elapsed() > WATCHDOG / 3 * 2
    })
    .await;
    assert_eq!(scripts(), before);
}

/// Redisson: testReadLockAfterTimeout. A restart loses the hold, which is reported; the next hold
/// is renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_read_hold_after_restart_is_renewed() {
    let mut server = Server::start();
    let client = connect(renewing().response_timeout(LONG), &server.url()).await;
    let lock = client.read_write_lock("a");
    let forgotten = held(&lock.read()).await;
    server.restart();
    within_limit("the loss is reported", forgotten.lost()).await;
    assert_matches!(forgotten.unlock().await, Err(Error::Lost { .. }));
    for _ in 0..2 {
        let guard = held(&lock.read()).await;
        let timeout = format!("{{a}}:{}:rwlock_timeout:1", guard.owner_id());
        until_rises("renewed", async || pttl(&server, &timeout)).await;
        assert!(guard.is_valid());
        free(guard).await;
    }
    assert_eq!(keys(&server), [""; 0]);
    assert_eq!(client.status().holds, 0);
}

/// A step whose answer is lost is repeated; repeating it has no further effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers_count_once() {
    let (server, proxy, client) = proxied_client().await;
    let lock = client.read_write_lock("a");
    // The scripts are loaded before any answer is discarded.
    let warm = held(&lock.write()).await.downgrade().await;
    free(warm.unwrap()).await;

    let me = Owner::new();
    let mut writers = Vec::new();
    let mut readers = Vec::new();
    for n in 1..=3 {
        let writer = with_lost_answer(&proxy, lock.write().lock().owner(me).into_future()).await;
        writers.push(writer.unwrap());
        assert_eq!(lock.write().hold_count(me).await.unwrap(), n);
        let reader = with_lost_answer(&proxy, lock.read().lock().owner(me).into_future()).await;
        readers.push(reader.unwrap());
        assert_eq!(lock.read().hold_count(me).await.unwrap(), n);
    }
    while let Some(writer) = writers.pop() {
        with_lost_answer(&proxy, writer.unlock()).await.unwrap();
        let left = u32::try_from(writers.len()).unwrap();
        assert_eq!(lock.write().hold_count(me).await.unwrap(), left);
    }
    while let Some(reader) = readers.pop() {
        with_lost_answer(&proxy, reader.unlock()).await.unwrap();
        let left = u32::try_from(readers.len()).unwrap();
        assert_eq!(lock.read().hold_count(me).await.unwrap(), left);
    }
    assert_eq!(keys(&server), [""; 0]);
}

/// A server loses its scripts, and another closes its connections, while readers and writers wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_scripts_and_connections_are_restored() {
    let (server, client) = server_and_client().await;
    let holder = Client::connect(&server.url()).await.unwrap();
    let lock = client.read_write_lock("a").prefer_writers();
    let theirs = holder.read_write_lock("a");
    for round in 0..6 {
        let guard = held(&theirs.write()).await;
        let read = tokio::spawn(lock.read().lock().into_future());
        let write = waiter_of(&client, lock.write().lock()).await;
        let () = server.command(&["SCRIPT", "FLUSH"]);
        if round % 2 == 0 {
            server.cut_all();
        }
        free(guard).await;
        // Whichever is served first must release before the other can be served.
        let one = tokio::spawn(async move { read.await.unwrap()?.unlock().await });
        let two = tokio::spawn(async move { write.await.unwrap()?.unlock().await });
        joined("read", one).await;
        joined("written", two).await;
    }
    client.flush().await;
    assert_eq!(keys(&server), [""; 0]);
}

/// A waiting writer was killed: its mark blocks readers until it expires, and no message announces
/// that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mark_of_killed_waiting_writer_expires() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a").prefer_writers();
    let now: (u64, u64) = server.command(&["TIME"]);
    let until = (now.0 * 1000 + now.1 / 1000 + 400).to_string();
    let writers = "redlatch_rwlock_writers:{a}";
    let () = server.command(&["ZADD", writers, &until, "killed:1:write"]);
    assert!(lock.read().try_lock().await.unwrap().is_none());
    let reader = within_limit("forgotten", lock.read().lock()).await;
    let write = lock.write();
    let writer = retry_if_late(|| write.try_lock().wait(Duration::from_millis(50))).await;
    assert!(writer.is_none());
    client.flush().await;
    // A waiter removes expired marks, and removes its own mark when it gives up.
    assert_eq!(server.command::<u64>(&["ZCARD", writers]), 0);
    free(reader.unwrap()).await;
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_stay_unchanged() {
    let server = shared();
    let client = client(server).await;
    let foreign = |what: &str| unique(&format!("rw-{what}"));
    let names = ["string", "list", "hash", "mode", "lock", "endless", "odd"].map(foreign);
    let [string, list, user, mode, plain, endless, odd] = &names;
    let () = server.command(&["SET", string, "precious"]);
    let _: i64 = server.command(&["RPUSH", list, "precious"]);
    let _: i64 = server.command(&["HSET", user, "name", "precious"]);
    let _: i64 = server.command(&["HSET", mode, "mode", "dark", "font", "precious"]);
    let _: i64 = server.command(&["HSET", plain, "client:1", "1"]);
    let _: i64 = server.command(&["HSET", endless, "mode", "read", "client:1", "1"]);
    let _: i64 = server.command(&["HSET", odd, "mode", "read", "pages", "many"]);
    for name in &names {
        let before: Vec<u8> = server.command(&["DUMP", name]);
        let lock = client.read_write_lock(name).prefer_writers();
        let mut errors = vec![
            lock.read().lock().await.err(),
            lock.write().lock().await.err(),
            lock.read().try_lock().wait(LONG).await.err(),
            lock.write().try_lock().wait(LONG).await.err(),
        ];
        if name != endless {
            errors.extend([
                lock.read().is_locked().await.err(),
                lock.write().is_locked().await.err(),
                lock.read().force_unlock().await.err(),
                lock.write().force_unlock().await.err(),
            ]);
        }
        for error in errors {
            let is_refused = matches!(error, Some(Error::WrongKind { .. }));
            assert!(is_refused, "{name}: {error:?}");
        }
        client.flush().await;
        let after: Vec<u8> = server.command(&["DUMP", name]);
        assert_eq!(after, before, "{name} was changed");
    }
    // Foreign data in the key of waiting writers.
    let name = foreign("writers");
    let writers = format!("redlatch_rwlock_writers:{{{name}}}");
    let () = server.command(&["SET", &writers, "precious"]);
    let lock = client.read_write_lock(&name).prefer_writers();
    assert_matches!(lock.read().lock().await, Err(Error::WrongKind { .. }));
    client.flush().await;
    assert_eq!(server.command::<String>(&["GET", &writers]), "precious");
    // A lock whose key changes its type while it is held is lost.
    let lock = client.read_write_lock(&foreign("turned"));
    let reader = held(&lock.read()).await;
    let () = server.command(&["SET", lock.name(), "precious"]);
    assert!(reader.unlock().await.is_err());
    let () = server.command(&["DEL", lock.name()]);
    let writer = held(&lock.write()).await;
    let () = server.command(&["SET", lock.name(), "precious"]);
    assert!(writer.downgrade().await.is_err());
    client.flush().await;
    assert_eq!(server.command::<String>(&["GET", lock.name()]), "precious");
}

/// Another program removed the lock's expiry: the remaining readers still exclude writers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_a_lock_without_expiry_exclude_writers() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let one = lock.read().lock().lease(LONG).await.unwrap();
    let two = lock.read().lock().lease(LONG).await.unwrap();
    assert_eq!(server.command::<i64>(&["PERSIST", "a"]), 1);
    free(one).await;
    assert!(lock.write().try_lock().await.unwrap().is_none());
    assert!(two.is_valid());
    // It has an expiry again, so a dead reader cannot keep it.
    assert!((1..=60_000).contains(&pttl(&server, "a")));
    free(two).await;

    let writer = lock.write().lock().lease(LONG).await.unwrap();
    let again = writer.reenter().lease(LONG).await.unwrap();
    let reader = writer.reenter_read().lease(LONG).await.unwrap();
    assert_eq!(server.command::<i64>(&["PERSIST", "a"]), 1);
    // A release without a known lease does not set an expiry.
    free(again).await;
    assert_eq!(pttl(&server, "a"), -1);
    let inner = reader.reenter().lease(LONG).await;
    assert_matches!(inner, Err(Error::WrongKind { .. }));
    free(writer).await;
    assert!(lock.write().try_lock().await.unwrap().is_none());
    assert!((1..=60_000).contains(&pttl(&server, "a")));
    free(reader).await;
    assert_eq!(keys(&server), [""; 0]);
}

/// A dead reader is removed from the lock as soon as any other reader leaves it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_readers_are_removed() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let reads = held(&lock.read()).await;
    for n in 0..20 {
        let _: i64 = server.command(&["HSET", "a", &format!("killed:{n}"), "1"]);
    }
    // A live reader, and a field that belongs to no owner.
    let _: i64 = server.command(&["HSET", "a", "alive:1", "1", "note", "precious"]);
    let () = server.command(&["SET", "{a}:alive:1:rwlock_timeout:1", "1", "PX", "60000"]);
    free(held(&lock.read()).await).await;
    let owner = reads.owner_id();
    let kept = [("alive:1", "1"), ("note", "precious")];
    let [mode, own] = [("mode", "read"), (owner.as_str(), "1")];
    assert_fields(&server, [mode, own, kept[0], kept[1]]);
    free(reads).await;
}

/// A huge hold count written by another program does not keep the server busy for longer than a
/// hold count of redlatch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_hold_count_does_not_block_the_server() {
    let server = Server::start();
    let settings = Client::builder().watchdog_lease(3 * SHORT);
    let client = connect(settings.response_timeout(LONG), &server.url()).await;
    let lock = client.read_write_lock("a");
    let reads = held(&lock.read()).await;
    let many = "4000000000";
    let owner = String::from(reads.owner_id());
    let _: i64 = server.command(&["HSET", "a", &owner, many, "theirs:1", many]);
    let () = server.command(&["CONFIG", "RESETSTAT"]);
    let timeout = format!("{{a}}:{owner}:rwlock_timeout:1");
    until_rises("renewed", async || pttl(&server, &timeout)).await;
    assert_eq!(lock.read().holders().await.unwrap().len(), 1);
    assert!(client.inspect("a").await.unwrap().is_some());
    free(reads).await;
    // Counted instead of timed: none of the steps looked up millions of keys.
    let calls = server.calls("pttl:");
    assert!((1..1_000_000).contains(&calls), "{calls}");
}

/// Beyond the maximum number of holds with their own keys, the last key stands for all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_beyond_the_key_limit_are_kept() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let me = Owner::new();
    let outer = lock.read().lock().owner(me).lease(LONG).await.unwrap();
    let own = format!("{{a}}:{}:rwlock_timeout", outer.owner_id());
    // As if it had been re-entered that often: only the last of all the keys remains.
    let often = 10_001;
    let count = often.to_string();
    let step = "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
        redis.call('DEL', KEYS[2])
        redis.call('SET', KEYS[3], 1, 'PX', 60000)";
    let (first, last) = (format!("{own}:1"), format!("{own}:10000"));
    let owner = outer.owner_id();
    let () = server.command(&[
        "EVAL",
        step,
        "3",
        "a",
        &first,
        &last,
        owner.as_str(),
        &count,
    ]);
    assert_eq!(lock.read().hold_count(me).await.unwrap(), often);
    assert!(lock.write().try_lock().await.unwrap().is_none());
    free(outer).await;
    assert_eq!(keys(&server), [""; 0]);
}

/// One hold lives and the others have expired: releasing an expired one is no error, and the live
/// one keeps the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_hold_can_be_released_while_another_lives() {
    let (server, client) = server_and_client().await;
    let lock = client.read_write_lock("a");
    let outer = lock.read().lock().lease(LONG).await.unwrap();
    let short = Duration::from_millis(50);
    let middle = outer.reenter().lease(short).await.unwrap();
    let inner = outer.reenter().lease(short).await.unwrap();
    let own = format!("{{a}}:{}:rwlock_timeout", outer.owner_id());
    let ended = |n: u32| pttl(&server, &format!("{own}:{n}")) == -2;
    until("both have ended", async || ended(2) && ended(3)).await;
    free(inner).await;
    assert!(lock.write().try_lock().await.unwrap().is_none());
    free(middle).await;
    assert!(lock.write().try_lock().await.unwrap().is_none());
    free(outer).await;
    assert_eq!(keys(&server), [""; 0]);
}
