//! Two peers on the same servers, and helpers to check these servers.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;

/// Watchdog lease of the shared peers, in ms.
pub(crate) const WATCHDOG: u64 = 6_000;

/// A lease that is longer than any test, in ms: a waiter that is served before its end was woken.
pub(crate) const LEASE: u64 = 600_000;

/// Wait limit of requests that must be refused, in ms. If Redisson has subscribed only after that, it never ends the
/// subscription.
pub(crate) const REFUSED_AFTER: u64 = 2_000;

/// The same for a RedLock of three members: Redisson waits a third of it for each.
pub(crate) const RED_REFUSED_AFTER: u64 = 3 * REFUSED_AFTER;

/// Options of the JVM, so that it starts quickly and uses few cores.
pub(crate) const JAVA: [&str; 4] = [
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-Xmx256m",
];

/// Two peers that share locks. Every test also runs with `a` and `b` exchanged.
pub(crate) struct Pair {
    pub(crate) a: &'static Peer,
    pub(crate) b: &'static Peer,
    /// The first of the servers, with all objects that name no other.
    pub(crate) server: &'static Server,
    /// All of them.
    pub(crate) servers: &'static [Server],
    pub(crate) libraries: [Library; 2],
}

impl Pair {
    pub(crate) fn of(libraries: [Library; 2]) -> Pair {
        let servers = servers();
        Pair {
            a: shared(libraries[0]),
            b: shared(libraries[1]),
            server: &servers[0],
            servers,
            libraries,
        }
    }

    /// Starts a peer like `a` for one test, which may kill it.
    pub(crate) fn start_a(&self, settings: &[&str]) -> Peer {
        start(self.libraries[0], settings)
    }

    /// Starts peers of both libraries for one test, which may kill them.
    pub(crate) fn start(&self, settings: &[&str]) -> [Peer; 2] {
        self.libraries.map(|library| start(library, settings))
    }
}

/// Starts a peer for one test.
pub(crate) fn start(library: Library, settings: &[&str]) -> Peer {
    start_on(library, settings, servers())
}

/// Starts a peer on these servers.
pub(crate) fn start_on(library: Library, settings: &[&str], servers: &[Server]) -> Peer {
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    library.start_with(&JAVA, settings, &urls)
}

fn servers() -> &'static [Server] {
    static SERVERS: OnceLock<[Server; 3]> = OnceLock::new();
    SERVERS.get_or_init(|| [(); 3].map(|()| Server::start()))
}

/// Returns the peer that the tests share.
fn shared(library: Library) -> &'static Peer {
    static PEERS: [OnceLock<Peer>; Library::COUNT] = [const { OnceLock::new() }; Library::COUNT];
    let watchdog = format!("watchdog={WATCHDOG}");
    PEERS[library as usize].get_or_init(|| start(library, &[&watchdog]))
}

/// Waits until a condition is true.
#[track_caller]
pub(crate) fn until(what: &str, holds: impl FnMut() -> bool) {
    assert!(becomes_true(holds), "never happened: {what}");
}

/// Returns whether a condition becomes true within two minutes.
fn becomes_true(mut holds: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while !holds() {
        if begun.elapsed() > Duration::from_secs(120) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Waits until this many connections are subscribed to this channel.
#[track_caller]
pub(crate) fn until_subscribed(server: &Server, channel: &str, by: i64) {
    until(&format!("{by} subscribed to {channel}"), || {
        let (_, now): (String, i64) = server.command(&["PUBSUB", "NUMSUB", channel]);
        now == by
    });
}

/// Returns all keys that contain this name.
pub(crate) fn keys(server: &Server, name: &str) -> Vec<String> {
    let keys: Vec<String> = server.command(&["KEYS", &format!("*{name}*")]);
    // Keys with which Redisson detects a repeated release; and if Redisson served the last waiter, the set of waiters
    // without a connection and the announcements. All expire after some seconds, and no test waits for that.
    let expires = |key: &str| {
        [
            "redisson_unlock_latch:",
            "redlatch_lock_absent:",
            "redlatch_lock_announced:",
        ]
        .iter()
        .any(|what| key.starts_with(what))
    };
    let mut keys: Vec<String> = keys
        .into_iter()
        .filter(|key| is_of(name, key) && !expires(key))
        .collect();
    keys.sort();
    keys
}

/// Checks that nothing of this name is left in Redis, and that no connection is subscribed for it.
#[track_caller]
pub(crate) fn assert_nothing_left(server: &Server, name: &str) {
    let mut left = Vec::new();
    let gone = becomes_true(|| {
        let pattern = format!("*{name}*");
        let channels: Vec<String> = server.command(&["PUBSUB", "CHANNELS", &pattern]);
        left = keys(server, name);
        left.extend(channels.into_iter().filter(|channel| is_of(name, channel)));
        left.is_empty()
    });
    let fields = server.try_command::<Vec<(String, i64)>>(&["HGETALL", name]);
    assert!(gone, "left of {name}: {left:?}, its fields: {fields:?}");
}

/// Returns whether a key belongs to this name, and not to one that starts with it.
fn is_of(name: &str, key: &str) -> bool {
    key == name || key.contains(&format!("{{{name}}}"))
}

/// Runs each of these tests with both libraries in both places, and with each Redisson version. Tests after `@not_3_16`
/// run with the late 3.x and the newest only: Redisson 3.16 lacks the feature, or another test with it shows the
/// same faster.
#[macro_export]
macro_rules! both_ways {
    (@newest $(fn $test:ident($pair:ident: &Pair) $body:block)*) => {
        $(fn $test($pair: &$crate::peers::Pair) $body)*

        $crate::both_ways!(@with redisson_first [Redisson, Redlatch] $($test)*);
        $crate::both_ways!(@with redlatch_first [Redlatch, Redisson] $($test)*);
    };
    (@with $way:ident [$a:ident, $b:ident] $($test:ident)*) => {
        mod $way {
            $(#[test]
            fn $test() {
                use redlatch_interop::Library::*;
                super::$test(&$crate::peers::Pair::of([$a, $b]));
            })*
        }
    };
    (
        $(fn $test:ident($pair:ident: &Pair) $body:block)*
        $(@not_3_16 $(fn $not_3_16:ident($pair_not_3_16:ident: &Pair) $body_not_3_16:block)*)?
    ) => {
        $crate::both_ways!(@newest
            $(fn $test($pair: &Pair) $body)*
            $($(fn $not_3_16($pair_not_3_16: &Pair) $body_not_3_16)*)?
        );
        $crate::both_ways!(@with redisson_3_first [Redisson3, Redlatch] $($test)* $($($not_3_16)*)?);
        $crate::both_ways!(@with redlatch_first_redisson_3 [Redlatch, Redisson3] $($test)* $($($not_3_16)*)?);
        $crate::both_ways!(@with redisson_3_16_first [Redisson316, Redlatch] $($test)*);
        $crate::both_ways!(@with redlatch_first_redisson_3_16 [Redlatch, Redisson316] $($test)*);
    };
}
