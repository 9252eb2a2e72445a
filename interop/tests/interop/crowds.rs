//! Mixed crowds on one name: two processes of each side.

use std::collections::VecDeque;
use std::sync::OnceLock;

use redlatch_interop::{Library, Peer, Pending};
use redlatch_testkit::{Monitor, Server, unique};

use crate::peers::{nothing_left, start_on, until};

/// Four threads in each of two JVMs, eight tasks in each of two Rust processes, for each name.
struct Crowd {
    server: Server,
    peers: Vec<(Peer, u64)>,
}

impl Crowd {
    /// Returns the crowd that the tests share, because starting one takes long. Each test has names of its own.
    fn shared(redisson: Library) -> &'static Crowd {
        static CROWDS: [OnceLock<Crowd>; Library::COUNT] =
            [const { OnceLock::new() }; Library::COUNT];
        CROWDS[redisson as usize].get_or_init(|| Crowd::with(redisson))
    }

    /// Starts a crowd on a server of its own.
    fn with(redisson: Library) -> Crowd {
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
        Crowd {
            peers: of.map(start).into(),
            server,
        }
    }

    fn workers(&self) -> i64 {
        self.peers.iter().map(|(_, workers)| *workers as i64).sum()
    }

    /// Runs a command in all workers at the same time, and returns their answers.
    fn all(&self, command: impl Fn(usize) -> String) -> Vec<i64> {
        let all = self
            .peers
            .iter()
            .flat_map(|(peer, workers)| (0..*workers).map(move |_| peer));
        let under_way: Vec<Pending> = all
            .enumerate()
            .map(|(i, peer)| peer.new_worker().tell(&command(i)))
            .collect();
        let numbers = under_way
            .into_iter()
            .map(|done| done.value().as_i64().expect("a number"));
        numbers.collect()
    }

    fn counted(&self, kind: &str, name: &str, rounds: i64) {
        let key = unique("counter");
        self.all(|_| format!("crowd {kind} {name} {key} {rounds}"));
        let counted: i64 = self.server.ask(&["GET", &key]);
        assert_eq!(counted, self.workers() * rounds, "something was lost");
        nothing_left(&self.server, name);
    }
}

fn a_lock(redisson: Library) {
    Crowd::shared(redisson).counted("lock", &unique("crowd"), 20);
}

fn a_read_write_lock(redisson: Library) {
    let crowd = Crowd::shared(redisson);
    let (name, key, rounds) = (unique("crowd"), unique("counter"), 20);
    // Every third worker writes.
    let kind = |i: usize| if i.is_multiple_of(3) { "write" } else { "read" };
    crowd.all(|i| format!("crowd {} {name} {key} {rounds}", kind(i)));
    let counted: i64 = crowd.server.ask(&["GET", &key]);
    assert_eq!(counted, crowd.workers() / 3 * rounds, "something was lost");
    nothing_left(&crowd.server, &name);
}

fn a_semaphore(redisson: Library) {
    let crowd = Crowd::shared(redisson);
    let (name, key) = (unique("crowd"), unique("inside"));
    assert!(
        crowd.peers[0]
            .0
            .worker(1)
            .does(&format!("set-permits {name} 3"))
    );
    let most = crowd.all(|_| format!("crowd-permits {name} {key} 20"));
    assert!(
        most.iter().all(|&most| (1..=3).contains(&most)),
        "{most:?} at the same time, of 3"
    );
    assert_eq!(
        crowd.peers[2]
            .0
            .worker(1)
            .number(&format!("available {name}")),
        3
    );
    let _: i64 = crowd.server.ask(&["DEL", &name, &key]);
    nothing_left(&crowd.server, &name);
}

/// Waiters of both sides are served in the order in which the server queued them.
fn a_fair_lock(redisson: Library) {
    let crowd = Crowd::shared(redisson);
    let name = unique("crowd");
    let mut monitor = Monitor::start(&crowd.server);
    crowd.counted("fair", &name, 15);
    let _: String = crowd.server.ask(&["ECHO", "all-have-gone"]);
    let queue = format!("redisson_lock_queue:{{{name}}}");
    let mut waiting = VecDeque::new();
    let (mut called, mut served) = (None, 0);
    for command in monitor.until("all-have-gone") {
        let words = command.text();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["rpush", key, owner] if key == queue => waiting.push_back(owner.to_owned()),
            ["lpop", key] if key == queue => called = waiting.pop_front(),
            ["lrem", key, _, owner] if key == queue => {
                let place = waiting.iter().position(|waits| waits == owner);
                assert_ne!(place, Some(0), "the first waiter of the queue was skipped");
                if let Some(place) = place {
                    waiting.remove(place);
                }
            }
            ["hset" | "hincrby", key, owner, "1"] if key == name => {
                match called.take() {
                    Some(next) => assert_eq!(owner, next, "it was not the turn of this waiter"),
                    None => assert!(waiting.is_empty(), "{owner} overtook {waiting:?}"),
                }
                served += 1;
            }
            _ => {}
        }
    }
    assert_eq!(served, crowd.workers() * 15);
}

fn no_subscription_remains(redisson: Library) {
    let crowd = Crowd::with(redisson);
    for kind in ["lock", "fair", "write"] {
        crowd.counted(kind, &unique("crowd"), 2);
    }
    until("no client is subscribed", || {
        let channels: Vec<String> = crowd.server.ask(&["PUBSUB", "CHANNELS", "*"]);
        let clients: String = crowd.server.ask(&["CLIENT", "LIST", "TYPE", "pubsub"]);
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

with_each_redisson! { a_lock a_fair_lock a_read_write_lock a_semaphore no_subscription_remains }
