//! Fencing tokens grow with each acquisition, also after a loss, a restart, or lost data.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};

use super::hold_generations::{refusals, refuse_writes};
use crate::common::prelude::*;

/// Renewals are executed but their answers are lost: the holder loses a hold that the store still
/// has. The owner's next acquisition must not count as a repetition of the one that returned the
/// old token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquisition_after_loss_gets_greater_token_although_store_has_the_hold() {
    let (server, proxy) = proxied_server();
    let settings = Client::builder().watchdog_lease(Duration::from_millis(1500));
    let ours = settings.connect(&proxy.url()).await.unwrap();
    let (lock, other) = (ours.fenced_lock("a"), ours.fenced_lock("{a}b"));
    let me = Owner::new();
    let both = MultiLock::new([lock.clone(), other.clone()]);
    let mut latest = 0;
    for several in [false, true] {
        let lost = loop {
            let lost = retry_if_late(|| lock.lock().owner(me)).await;
            proxy.discard_replies(true);
            if server.command::<bool>(&["PERSIST", "a"]) {
                break lost;
            }
            cut_off(&proxy);
            proxy.discard_replies(false);
            proxy.refuse(false);
        };
        assert!(lost.token() > latest);
        within_limit("lost", lost.lost()).await;
        cut_off(&proxy);
        proxy.discard_replies(false);
        proxy.refuse(false);
        // The store still has it.
        assert!(server.command::<bool>(&["EXISTS", "a"]));
        let token = match several {
            false => {
                let next = retry_if_late(|| lock.lock().owner(me).lease(LONG)).await;
                let again = retry_if_late(|| next.reenter().into_future()).await;
                assert!(again.token() > next.token());
                next.token()
            }
            true => {
                let next = retry_if_late(|| both.lock().owner(me).lease(LONG)).await;
                next.token(&lock).unwrap()
            }
        };
        assert!(token > lost.token(), "{token} after {}", lost.token());
        latest = lock.current_token().await.unwrap();
        drop(lost);
        within_limit("settled", ours.flush()).await;
    }
}

/// A guard is released while an acquisition of the same owner first settles the release of another
/// guard. The store still has the count from before both releases. If the acquisition used the
/// local count without the guard, one more would equal the store's count, and it would count as a
/// repetition.
#[tokio::test(flavor = "current_thread")]
async fn acquisition_gets_greater_token_if_a_guard_is_dropped_while_it_settles() {
    let server = Server::start();
    let (ours, me) = (client(&server).await, Owner::new());
    let lock = ours.fenced_lock("a");
    let _outer = lock.lock().owner(me).await.unwrap();
    let one = lock.lock().owner(me).await.unwrap();
    let two = lock.lock().owner(me).await.unwrap();
    let latest = two.token();
    refuse_writes(&server, true);
    drop(two);
    let leaving = async {
        until("refused", async || refusals(&server) > 0).await;
        drop(one);
        refuse_writes(&server, false);
    };
    // Polled before the background work of the dropped guard.
    let again = lock.lock().owner(me).into_future();
    let (again, ()) =
        within_limit("acquired", async { tokio::join!(biased; again, leaving) }).await;
    let token = again.unwrap().token();
    assert!(token > latest, "{token} after {latest}");
}

/// Only a hold that replaces a lost one releases before it acquires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquisition_without_prior_loss_is_one_round_trip() {
    let server = Server::start();
    let (ours, me) = (unregistered_client(&server).await, Owner::new());
    let lock = ours.fenced_lock("a");
    // From here on, the server knows the scripts.
    free(lock.lock().owner(me).await.unwrap()).await;
    let mut monitor = Monitor::start(&server);
    free(lock.lock().owner(me).await.unwrap()).await;
    let _: String = server.command(&["ECHO", "the-end"]);
    let commands = monitor.until("the-end");
    let scripts = commands.iter().filter(|one| one.name() == "evalsha");
    assert_eq!(scripts.count(), 2, "{commands:?}");
}

/// Set for the process that holds a lock: the URL to connect to.
const HOLDS: &str = "REDLATCH_TEST_HOLDS_FOR";

/// A process that acquires under a chosen client id each time that the test requests it.
struct Holder {
    child: Child,
    stdin: ChildStdin,
    answers: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Holder {
    fn start(url: &str) -> Holder {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg("failures::fencing_tokens::restarted_process_with_same_client_id_is_another_owner")
            .env(HOLDS, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Holder {
            child,
            stdin,
            answers,
        }
    }

    /// Makes it try to acquire. Returns the owner and the token, or `None` if the lock is held.
    fn acquire(&mut self) -> Option<(String, u64)> {
        self.stdin.write_all(b"acquire\n").unwrap();
        loop {
            let line = self.answers.next().unwrap().unwrap();
            // The test harness also writes to standard output, and not always whole lines.
            let Some((_, answer)) = line.split_once("answer ") else {
                continue;
            };
            let (owner, token) = answer.split_once(' ')?;
            return Some((owner.to_owned(), token.parse().unwrap()));
        }
    }
}

impl Drop for Holder {
    /// Kills it, as the kernel does when it is out of memory.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs in that process.
async fn hold(url: &str) {
    let settings = Client::builder().client_id("pod-0").response_timeout(LONG);
    let lock = settings.connect(url).await.unwrap().fenced_lock("a");
    let mut guards = Vec::new();
    for _ in std::io::stdin().lines() {
        match lock.try_lock().await.unwrap() {
            Some(guard) => {
                println!("answer {} {}", guard.owner_id(), guard.token());
                guards.push(guard);
            }
            None => println!("answer none"),
        }
    }
}

/// A process is killed while it holds a lock, and restarted under the same client id within the
/// lease. It is another owner, so it waits for the lease to end, and gets a greater token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_process_with_same_client_id_is_another_owner() {
    if let Ok(url) = std::env::var(HOLDS) {
        return hold(&url).await;
    }
    let server = Server::start();
    let mut first = Holder::start(&server.url());
    let (owner, token) = first.acquire().expect("a free lock");
    drop(first);
    // Keeps the lease alive, however slow this machine is.
    assert!(server.command::<bool>(&["PEXPIRE", "a", "3600000"]));
    let mut second = Holder::start(&server.url());
    assert_eq!(second.acquire(), None, "acquired the hold of {owner}");
    // The lease ends.
    assert!(server.command::<bool>(&["PEXPIRE", "a", "1"]));
    let is_free = async || !server.command::<bool>(&["EXISTS", "a"]);
    until("expired", is_free).await;
    let (next, greater) = second.acquire().expect("a free lock");
    assert!(owner.starts_with("pod-0:") && next.starts_with("pod-0:"));
    assert_ne!(next, owner);
    assert!(greater > token, "{greater} after {token}");
}

/// After a data loss, a resource that remembers a token refuses all writers until the token is
/// advanced.
mod after_lost_data {
    use redlatch::MAX_TOKEN;

    use crate::common::prelude::*;

    async fn recovers(client: &Client, lose_data: impl AsyncFn()) {
        let lock = client.fenced_lock("a");
        assert_eq!(lock.advance_token(0).await.unwrap(), 0, "nothing to raise");
        for _ in 0..3 {
            free(held(&lock).await).await;
        }
        let seen = lock.current_token().await.unwrap();
        lose_data().await;
        let late = held(&lock).await;
        assert!(late.token() < seen, "counted from the beginning");
        // The token can also be advanced while the lock is held.
        assert_eq!(lock.advance_token(seen).await.unwrap(), seen);
        assert_eq!(lock.advance_token(1).await.unwrap(), seen, "never lowered");
        free(late).await;
        let guard = held(&lock).await;
        assert_eq!(guard.token(), seen + 1);
        assert!(!lock.delete_token().await.unwrap(), "it is held");
        assert_eq!(lock.current_token().await.unwrap(), seen + 1);
        free(guard).await;

        for too_great in [MAX_TOKEN + 1, u64::MAX] {
            let refused = lock.advance_token(too_great).await.unwrap_err();
            let Error::InvalidSetting { setting, .. } = &refused else {
                panic!("{refused}");
            };
            assert_eq!(*setting, "at_least");
        }
        assert_eq!(lock.advance_token(MAX_TOKEN).await.unwrap(), MAX_TOKEN);
        let last = held(&lock).await;
        assert_eq!(last.token(), MAX_TOKEN + 1);
        free(last).await;
        assert!(lock.delete_token().await.unwrap());
        assert!(lock.delete_token().await.unwrap(), "there is none");
        assert_eq!(lock.current_token().await.unwrap(), 0);
        assert_eq!(held(&lock).await.token(), 1);
    }

    #[tokio::test]
    async fn token_is_advanced_on_an_embedded_store() {
        let client = Client::builder()
            .connect_embedded(&Embedded::new())
            .unwrap();
        let lose = async || {
            assert!(client.fenced_lock("a").delete_token().await.unwrap());
        };
        recovers(&client, lose).await;
    }

    #[tokio::test]
    async fn token_is_advanced_on_a_server() {
        let (server, client) = server_and_client().await;
        let lose = async || {
            let _: String = server.command(&["FLUSHALL"]);
        };
        recovers(&client, lose).await;
        let key = "redisson_lock_token:{b}";
        let lock = client.fenced_lock("b");
        for foreign in ["x", "07", "1.5"] {
            let _: String = server.command(&["SET", key, foreign]);
            assert_matches!(lock.advance_token(5).await, Err(Error::WrongKind { .. }));
            assert_eq!(server.command::<String>(&["GET", key]), foreign);
        }
    }

    #[test]
    fn token_is_advanced_through_the_blocking_api() {
        let client = redlatch::blocking::Client::embedded().unwrap();
        let lock = client.fenced_lock("a");
        assert_eq!(lock.advance_token(41).unwrap(), 41);
        let guard = lock.lock().block().unwrap();
        assert_eq!(guard.token(), 42);
        assert!(!lock.delete_token().unwrap());
        guard.unlock().unwrap();
        assert!(lock.delete_token().unwrap());
        assert_eq!(lock.current_token().unwrap(), 0);
    }
}
