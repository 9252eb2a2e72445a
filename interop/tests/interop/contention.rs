//! Tests of contention: two processes of each side compete for one name.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use redlatch::Client;
use redlatch_interop::{Library, Peer, Pending};
use redlatch_testkit::{Monitor, Server, unique};

use crate::peers::{assert_nothing_left, start_on, until};

/// Peers that compete for each name: two JVMs with four threads each, and two Rust processes with eight tasks each.
struct Contenders {
    server: Server,
    peers: Vec<(Peer, u64)>,
}

impl Contenders {
    /// Returns the peers that the tests share, because starting them takes long. Each test has names of its own.
    fn shared(redisson: Library) -> &'static Contenders {
        static CONTENDERS: [OnceLock<Contenders>; Library::COUNT] =
            [const { OnceLock::new() }; Library::COUNT];
        CONTENDERS[redisson as usize].get_or_init(|| Contenders::start(redisson))
    }

    /// Starts peers on a separate server.
    fn start(redisson: Library) -> Contenders {
        let server = Server::start();
        let of = [
            (redisson, 4),
            (redisson, 4),
            (Library::Redlatch, 8),
            (Library::Redlatch, 8),
        ];
        let start = |(library, workers): (Library, u64)| {
            (
                start_on(library, &[], std::slice::from_ref(&server)),
                workers,
            )
        };
        Contenders {
            peers: of.map(start).into(),
            server,
        }
    }

    fn workers(&self) -> i64 {
        self.peers.iter().map(|(_, workers)| *workers as i64).sum()
    }

    /// Runs a command in all workers at the same time, and returns their answers.
    fn run_in_all(&self, command: impl Fn(usize) -> String) -> Vec<i64> {
        let peers = self
            .peers
            .iter()
            .flat_map(|(peer, workers)| (0..*workers).map(move |_| peer));
        let pending: Vec<Pending> = peers
            .enumerate()
            .map(|(i, peer)| peer.new_worker().send(&command(i)))
            .collect();
        let numbers = pending
            .into_iter()
            .map(|done| done.value().as_i64().expect("a number"));
        numbers.collect()
    }

    /// Increments a number under the lock in all workers, and checks that no increment was lost.
    fn increment(&self, kind: &str, name: &str, rounds: i64) {
        let key = unique("counter");
        self.run_in_all(|_| format!("increment {kind} {name} {key} {rounds}"));
        let counted: i64 = self.server.command(&["GET", &key]);
        assert_eq!(counted, self.workers() * rounds, "an increment was lost");
        assert_nothing_left(&self.server, name);
    }
}

fn a_lock(redisson: Library) {
    Contenders::shared(redisson).increment("lock", &unique("contended"), 20);
}

fn a_read_write_lock(redisson: Library) {
    let contenders = Contenders::shared(redisson);
    let (name, key, rounds) = (unique("contended"), unique("counter"), 20);
    // Every third worker writes.
    let kind = |i: usize| if i.is_multiple_of(3) { "write" } else { "read" };
    contenders.run_in_all(|i| format!("increment {} {name} {key} {rounds}", kind(i)));
    let counted: i64 = contenders.server.command(&["GET", &key]);
    assert_eq!(
        counted,
        contenders.workers() / 3 * rounds,
        "an increment was lost"
    );
    assert_nothing_left(&contenders.server, &name);
}

fn a_semaphore(redisson: Library) {
    let contenders = Contenders::shared(redisson);
    let (name, key) = (unique("contended"), unique("holders"));
    assert!(
        contenders.peers[0]
            .0
            .worker(1)
            .run_bool(&format!("set-permits {name} 3"))
    );
    let most = contenders.run_in_all(|_| format!("count-holders {name} {key} 20"));
    assert!(
        most.iter().all(|&most| (1..=3).contains(&most)),
        "{most:?} at the same time, of 3"
    );
    assert_eq!(
        contenders.peers[2]
            .0
            .worker(1)
            .run_number(&format!("available {name}")),
        3
    );
    let _: i64 = contenders.server.command(&["DEL", &name, &key]);
    assert_nothing_left(&contenders.server, &name);
}

/// Waiters of both sides are served in the order in which the server queued them.
fn a_fair_lock(redisson: Library) {
    let contenders = Contenders::shared(redisson);
    let name = unique("contended");
    let mut monitor = Monitor::start(&contenders.server);
    contenders.increment("fair", &name, 15);
    let _: String = contenders.server.command(&["ECHO", "all-released"]);
    let queue = format!("redisson_lock_queue:{{{name}}}");
    let mut waiting = VecDeque::new();
    let (mut next, mut holder, mut served) = (None, None, 0);
    for command in monitor.until("all-released") {
        let words = command.text();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["rpush", key, owner] if key == queue => waiting.push_back(owner.to_owned()),
            ["lpop", key] if key == queue => next = waiting.pop_front(),
            ["lrem", key, _, owner] if key == queue => {
                let position = waiting.iter().position(|waits| waits == owner);
                assert_ne!(
                    position,
                    Some(0),
                    "the first waiter of the queue was skipped"
                );
                if let Some(position) = position {
                    waiting.remove(position);
                }
            }
            ["del", key] if key == name => holder = None,
            // The holder repeats its request: as a waiter it sent that before it learned that a release had granted it the lock.
            ["hset", key, owner, "1"] if key == name && holder.as_deref() == Some(owner) => {}
            ["hset" | "hincrby", key, owner, "1"] if key == name => {
                match next.take() {
                    Some(next) => assert_eq!(owner, next, "it was not the turn of this waiter"),
                    None => assert!(waiting.is_empty(), "{owner} overtook {waiting:?}"),
                }
                holder = Some(owner.to_owned());
                served += 1;
            }
            _ => {}
        }
    }
    assert_eq!(served, contenders.workers() * 15);
}

/// Tasks of one client pass a lock on without asking the server. A waiting thread of Redisson gets its turns, too.
fn a_lock_that_tasks_hand_over(redisson: Library) {
    let contenders = Contenders::shared(redisson);
    let (name, key) = (unique("contended"), unique("counter"));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let turns = Arc::new(AtomicU64::new(0));
    let url = contenders.server.url();
    let client = runtime.block_on(Client::connect(&url)).expect("a client");
    for _ in 0..8 {
        let (lock, turns) = (client.lock(&name), turns.clone());
        runtime.spawn(async move {
            loop {
                lock.run(async { turns.fetch_add(1, Ordering::Relaxed) })
                    .await
                    .expect("the lock");
            }
        });
    }
    until("the tasks pass the lock on", || {
        turns.load(Ordering::Relaxed) > 1000
    });
    let (java, _) = &contenders.peers[0];
    java.new_worker()
        .run(&format!("increment lock {name} {key} 20"));
    let counted: i64 = contenders.server.command(&["GET", &key]);
    assert_eq!(counted, 20);
    runtime.shutdown_background();
}

fn no_subscription_remains(redisson: Library) {
    let contenders = Contenders::start(redisson);
    for kind in ["lock", "fair", "write"] {
        contenders.increment(kind, &unique("contended"), 2);
    }
    until("no client is subscribed", || {
        let channels: Vec<String> = contenders.server.command(&["PUBSUB", "CHANNELS", "*"]);
        let clients: String = contenders
            .server
            .command(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        channels.is_empty() && clients.lines().all(|client| client.contains(" sub=0 "))
    });
}

macro_rules! with_each_redisson {
    ($($test:ident)*) => {
        mod redisson {
            $(#[test]
            fn $test() {
                super::$test(redlatch_interop::Library::Redisson);
            })*
        }
        mod redisson_3 {
            $(#[test]
            fn $test() {
                super::$test(redlatch_interop::Library::Redisson3);
            })*
        }
    };
}

with_each_redisson! { a_lock a_lock_that_tasks_hand_over a_fair_lock a_read_write_lock a_semaphore no_subscription_remains }
