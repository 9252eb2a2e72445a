//! The same locks on a master with replicas and sentinels, and in a cluster, where channels lie in slots like keys
//! and messages are delivered only there.
//!
//! Leases and watchdogs outlast the tests, so a waiter that is served was woken by a message. Names are plain or have
//! a hash tag.

use std::sync::OnceLock;
use std::time::Duration;

use redlatch_interop::{Library, Peer, Pending, Worker};
use redlatch_testkit::{Server, shared_cluster, shared_sentinels, slot_of, unique};

use crate::locks::is_acquired;
use crate::peers::{JAVA, LEASE, until};

/// A deployment that two peers share.
struct Deployment {
    index: usize,
    url: String,
    servers: &'static [Server],
    /// Returns the server that has a key.
    server_of: fn(&str) -> &'static Server,
    /// Subcommand of PUBSUB that counts subscribers.
    numsub: &'static str,
    /// Subcommand of PUBSUB that lists channels.
    list_channels: &'static str,
}

/// Two peers that share the locks of a deployment. Every test also runs with `a` and `b` exchanged.
struct Pair {
    a: &'static Peer,
    b: &'static Peer,
    on: Deployment,
}

fn sentinels() -> Deployment {
    let all = shared_sentinels();
    Deployment {
        index: 0,
        url: all.url(),
        servers: all.servers(),
        server_of: |_| &shared_sentinels().servers()[0],
        numsub: "NUMSUB",
        list_channels: "CHANNELS",
    }
}

fn cluster() -> Deployment {
    let all = shared_cluster();
    Deployment {
        index: 1,
        url: all.url(),
        servers: all.nodes(),
        server_of: |key| &shared_cluster().nodes()[shared_cluster().master_of_key(key)],
        numsub: "SHARDNUMSUB",
        list_channels: "SHARDCHANNELS",
    }
}

/// Runs each of these tests on both deployments, with both libraries in both places, and with both Redisson versions.
macro_rules! on_each {
    ($(fn $test:ident($pair:ident: &Pair) $body:block)*) => {
        $(fn $test($pair: &Pair) $body)*

        on_each!(@on sentinels $($test)*);
        on_each!(@on cluster $($test)*);
    };
    (@on $deployment:ident $($test:ident)*) => {
        mod $deployment {
            on_each!(@with $deployment redisson_first [Redisson, Redlatch] $($test)*);
            on_each!(@with $deployment redlatch_first [Redlatch, Redisson] $($test)*);
            on_each!(@with $deployment redisson_3_first [Redisson3, Redlatch] $($test)*);
            on_each!(@with $deployment redlatch_first_redisson_3 [Redlatch, Redisson3] $($test)*);
        }
    };
    (@with $deployment:ident $way:ident [$a:ident, $b:ident] $($test:ident)*) => {
        mod $way {
            use redlatch_interop::Library::*;
            use super::super::Pair;

            $(#[test]
            fn $test() {
                super::super::$test(&Pair::of([$a, $b], super::super::$deployment()));
            })*
        }
    };
}

impl Pair {
    fn of(libraries: [Library; 2], on: Deployment) -> Pair {
        let [a, b] = libraries.map(|library| on.shared(library));
        Pair { a, b, on }
    }
}

impl Deployment {
    /// Returns the peer that the tests share.
    fn shared(&self, library: Library) -> &'static Peer {
        static PEERS: [[OnceLock<Peer>; Library::COUNT]; 2] =
            [const { [const { OnceLock::new() }; Library::COUNT] }; 2];
        PEERS[self.index][library as usize].get_or_init(|| self.start(library, &[]))
    }

    fn start(&self, library: Library, settings: &[&str]) -> Peer {
        // No waiter retries by itself this soon.
        let watchdog = format!("watchdog={LEASE}");
        let counters = format!("counters={}", counters().url());
        let mut all = vec![watchdog.as_str(), &counters];
        all.extend(settings);
        library.start_with(&JAVA, &all, std::slice::from_ref(&self.url))
    }

    /// Waits until this many connections are subscribed to this channel, on any server.
    #[track_caller]
    fn until_subscribed(&self, channel: &str, by: i64) {
        until(&format!("{by} subscribed to {channel}"), || {
            let on = self.servers.iter().map(|server| {
                let (_, now): (String, i64) = server.command(&["PUBSUB", self.numsub, channel]);
                now
            });
            on.sum::<i64>() == by
        });
    }

    /// Checks that nothing of this name is left, on replicas either, and that no connection is subscribed for it.
    #[track_caller]
    fn assert_nothing_left(&self, tag: &str) {
        let pattern = format!("*{tag}*");
        let braced = format!("{{{tag}}}");
        let is_of = |key: &&String| *key == tag || key.contains(&braced);
        // Keys by which Redisson detects a repeated release, for some seconds; the set of unconnected waiters and the
        // announcements of waiters, which expire as well; and the token of a fenced lock, which stays.
        let stays = |key: &&String| {
            [
                "redisson_unlock_latch:",
                "redlatch_lock_absent:",
                "redlatch_lock_announced:",
                "redisson_lock_token:",
            ]
            .iter()
            .any(|what| key.starts_with(what))
        };
        until(&format!("nothing is left of {tag}"), || {
            self.servers.iter().all(|server| {
                let keys: Vec<String> = server.command(&["KEYS", &pattern]);
                let channels: Vec<String> =
                    server.command(&["PUBSUB", self.list_channels, &pattern]);
                !keys.iter().filter(is_of).any(|key| !stays(&key))
                    && !channels.iter().any(|c| is_of(&c))
            })
        });
    }
}

/// Returns a single server for the numbers of `increment`, which are not in the cluster.
fn counters() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

/// Returns unique names, plain and with a hash tag.
fn names(what: &str) -> [(String, String); 2] {
    let [plain, tag] = [(); 2].map(|()| unique(what));
    let tagged = format!("{{{tag}}}:42");
    [(plain.clone(), plain), (tag, tagged)]
}

/// Returns names whose slots belong to the three masters of the cluster, one each.
fn names_on_three_masters(what: &str) -> [String; 3] {
    [0, 1, 2].map(|master| {
        let on_it = |name: &String| usize::from(slot_of(name.as_bytes())) * 3 / 16_384 == master;
        std::iter::repeat_with(|| unique(what))
            .find(on_it)
            .expect("some name")
    })
}

/// Returns a key or channel that belongs to a name and lies in its slot.
fn derived_key(prefix: &str, name: &str) -> String {
    match name.contains('{') {
        true => format!("{prefix}:{name}"),
        false => format!("{prefix}:{{{name}}}"),
    }
}

/// Returns the channel on which a waiter for such a lock is woken.
fn channel(kind: &str, name: &str, waiter: Worker<'_>) -> String {
    match kind {
        "fair" => derived_key("redisson_lock__channel", name) + ":" + &waiter.owner(),
        "read" | "write" => derived_key("redisson_rwlock", name),
        _ => derived_key("redisson_lock__channel", name),
    }
}

fn latch_channel(name: &str) -> String {
    format!("redisson_countdownlatch__channel__{{{name}}}")
}

/// The kind that is held, and the kind that is awaited meanwhile.
const KINDS: [(&str, &str); 6] = [
    ("lock", "lock"),
    ("fair", "fair"),
    ("fenced", "fenced"),
    ("write", "write"),
    ("write", "read"),
    ("read", "write"),
];

/// For each kind, `b` waits for a lock that `a` holds, and is woken by the release.
#[track_caller]
fn assert_waiters_are_woken(on: &Deployment, a: &Peer, b: &Peer) {
    let mut waiting = Vec::new();
    for (holds, wants) in KINDS {
        for (tag, name) in names("woken") {
            let (a, b) = (a.new_worker(), b.new_worker());
            assert!(is_acquired(
                &a.run(&format!("lock {holds} {name} -1 {LEASE}"))
            ));
            assert!(
                !is_acquired(&b.run(&format!("lock {wants} {name} 0 -1"))),
                "held by a"
            );
            assert!(b.run_bool(&format!("is-locked {holds} {name}")));
            assert!(b.run_number(&format!("remaining {holds} {name}")) > 0);
            assert_eq!(a.run_number(&format!("holds {holds} {name}")), 1);
            // A waiting worker does not answer commands.
            let waiter_channel = channel(wants, &name, b);
            let waits = b.send(&format!("lock {wants} {name} -1 {LEASE}"));
            waiting.push((holds, wants, tag, name, a, b, waiter_channel, waits));
        }
    }
    for (holds, wants, tag, name, a, b, waiter_channel, waits) in waiting {
        on.until_subscribed(&waiter_channel, 1);
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("unlock {holds} {name}")));
        assert!(is_acquired(&waits.value()));
        let acquired = is_acquired(&a.run(&format!("lock {holds} {name} 0 -1")));
        assert!(!acquired, "{wants} {name} is held by b");
        assert!(b.run_bool(&format!("unlock {wants} {name}")));
        on.assert_nothing_left(&tag);
    }
}

on_each! {
    fn waiter_is_woken_by_the_other_side(pair: &Pair) {
        assert_waiters_are_woken(&pair.on, pair.a, pair.b);
    }

    fn waiter_for_permits_is_woken(pair: &Pair) {
        for (_, name) in names("permits") {
            let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
            assert!(a.run_bool(&format!("set-permits {name} 3")));
            assert!(a.run_bool(&format!("acquire {name} 3 0")));
            assert!(!b.run_bool(&format!("acquire {name} 1 0")));
            let waits = b.send(&format!("acquire {name} 2 -1"));
            pair.on.until_subscribed(&derived_key("redisson_sc", &name), 1);
            assert!(waits.is_pending());
            assert!(a.run_bool(&format!("release {name} 2")));
            assert_eq!(waits.value(), true);
            assert_eq!(a.run_number(&format!("available {name}")), 0);
        }
    }

    fn waiter_for_an_expirable_permit_is_woken(pair: &Pair) {
        for (_, name) in names("x-permits") {
            let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
            assert!(a.run_bool(&format!("x-set-permits {name} 1")));
            let held = a.run(&format!("x-acquire {name} 1 0 {LEASE}"));
            let held = held[0].as_str().expect("a permit");
            assert_eq!(b.run_number(&format!("x-acquired {name}")), 1);
            let waits = b.send(&format!("x-acquire {name} 1 -1 {LEASE}"));
            pair.on.until_subscribed(&derived_key("redisson_sc", &name), 1);
            assert!(waits.is_pending());
            assert!(a.run_bool(&format!("x-release {name} {held}")));
            let acquired = waits.value();
            let acquired = acquired[0].as_str().expect("a permit");
            assert_eq!(a.run_number(&format!("x-available {name}")), 0);
            assert!(b.run_bool(&format!("x-release {name} {acquired}")));
        }
    }

    fn waiters_of_both_sides_return_when_a_latch_opens(pair: &Pair) {
        let name = unique("latch");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-count {name} 2")));
        assert!(!b.run_bool(&format!("set-count {name} 7")));
        let waiting = [pair.a, pair.b].map(|peer| peer.new_worker().send(&format!("await {name} -1")));
        pair.on.until_subscribed(&latch_channel(&name), 2);
        assert!(b.run_bool(&format!("count-down {name}")));
        assert_eq!(b.run_number(&format!("count {name}")), 1);
        assert!(waiting.iter().all(Pending::is_pending));
        assert!(a.run_bool(&format!("count-down {name}")));
        for waits in waiting {
            assert_eq!(waits.value(), true);
        }
        pair.on.assert_nothing_left(&name);
    }

    fn first_come_first_served_over_both(pair: &Pair) {
        let name = unique("in-order");
        let queue = derived_key("redisson_lock_queue", &name);
        let server = (pair.on.server_of)(&name);
        let holder = pair.a.new_worker();
        assert!(holder.run_bool(&format!("lock fair {name} -1 {LEASE}")));
        let waiting = [pair.b, pair.a, pair.b, pair.a].map(|peer| {
            let worker = peer.new_worker();
            let owner = worker.owner();
            let waits = worker.send(&format!("lock fair {name} -1 {LEASE}"));
            until("it is queued", || {
                let last: Option<String> = server.command(&["LINDEX", &queue, "-1"]);
                last.as_ref() == Some(&owner)
            });
            (worker, waits)
        });
        assert!(holder.run_bool(&format!("unlock fair {name}")));
        for (worker, waits) in waiting {
            assert_eq!(waits.value(), true);
            // A try that does not queue does not overtake.
            assert!(!holder.run_bool(&format!("lock fair {name} 0 -1")));
            assert!(worker.run_bool(&format!("unlock fair {name}")));
        }
        pair.on.assert_nothing_left(&name);
    }

    fn multi_lock_holds_all_members_for_the_other_side(pair: &Pair) {
        let tag = unique("of-one");
        for [x, y, z] in [["x", "y", "z"].map(|name| format!("{{{tag}}}:{name}")), names_on_three_masters("of-three")] {
            let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
            let all = format!("multi lock:{x},fair:{y},write:{z}");
            let members = [format!("lock {x}"), format!("fair {y}"), format!("write {z}")];
            assert!(a.run_bool(&format!("lock {all} -1 {LEASE}")));
            for member in &members {
                assert!(b.run_bool(&format!("is-locked {member}")));
                assert!(!b.run_bool(&format!("lock {member} 0 -1")));
            }
            assert!(!b.run_bool(&format!("lock {all} 0 {LEASE}")));
            assert!(a.run_bool(&format!("unlock {all}")));
            // The other peer holds one of them: the rest is not kept meanwhile.
            assert!(a.run_bool(&format!("lock lock {x} -1 {LEASE}")));
            assert!(!b.run_bool(&format!("lock {all} 0 {LEASE}")));
            for member in &members[1..] {
                until("a refused multi-lock holds no member", || !a.run_bool(&format!("is-locked {member}")));
            }
            let waits = b.send(&format!("lock {all} -1 {LEASE}"));
            pair.on.until_subscribed(&derived_key("redisson_lock__channel", &x), 1);
            assert!(waits.is_pending());
            assert!(a.run_bool(&format!("unlock lock {x}")));
            assert_eq!(waits.value(), true);
            assert!(b.run_bool(&format!("unlock {all}")));
            for tag in [&tag, &x, &y, &z] {
                pair.on.assert_nothing_left(tag);
            }
        }
    }

    fn both_sides_acquire_in_turn(pair: &Pair) {
        let each = ["lock", "fair", "write", "fenced"].map(|kind| {
            let (name, key) = (unique("to-and-fro"), unique("counter"));
            let both = [pair.a, pair.b].map(|peer| {
                peer.new_worker().send(&format!("increment {kind} {name} {key} 25"))
            });
            (key, both)
        });
        for (key, both) in each {
            for done in both {
                assert_eq!(done.value(), 25);
            }
            let counted: u64 = counters().command(&["GET", &key]);
            assert_eq!(counted, 50, "both wrote at the same time");
        }
    }
}

/// Redisson can be configured to subscribe at replicas (`SubscriptionMode.SLAVE`). Then the master has no subscribers.
#[test]
fn waiter_subscribed_at_a_replica_is_woken() {
    for on in [sentinels(), cluster()] {
        let java = on.start(Library::Redisson, &["replicas=yes"]);
        let rust = on.shared(Library::Redlatch);
        let name = unique("replica");
        let (holder, waiter) = (rust.new_worker(), java.new_worker());
        assert!(holder.run_bool(&format!("lock lock {name} -1 {LEASE}")));
        let waiting = waiter.send(&format!("lock lock {name} -1 {LEASE}"));
        let channel = derived_key("redisson_lock__channel", &name);
        on.until_subscribed(&channel, 1);
        let server = (on.server_of)(&name);
        let (_, at_the_master): (String, i64) = server.command(&["PUBSUB", on.numsub, &channel]);
        assert_eq!(at_the_master, 0);
        assert!(holder.run_bool(&format!("unlock lock {name}")));
        assert_eq!(waiting.value(), true);
        assert_waiters_are_woken(&on, rust, &java);
    }
}

/// Redisson puts braces around the whole name of a latch, even if it contains a hash tag, so that its channel lies in
/// another slot than the key: it cannot set the latch or count it down, and does not receive the messages of others.
#[test]
fn latch_with_a_hash_tag_is_not_shared_in_a_cluster() {
    let on = cluster();
    let rust = on.shared(Library::Redlatch);
    for library in [Library::Redisson, Library::Redisson3] {
        let java = on.shared(library).new_worker();
        // It is not woken, and checks again only at its limit; but it also checks before it sleeps,
        // and on a busy machine that may be late enough to see the latch open.
        let mut tries = (0..5).map(|_| tagged_latch(&on, rust, &java));
        assert!(
            tries.any(|waited| waited >= JAVA_WAIT_LIMIT),
            "it was woken"
        );
    }
}

/// Wait limit of the thread in Java.
const JAVA_WAIT_LIMIT: Duration = Duration::from_secs(8);

/// Returns how long a waiter waits for a latch with a hash tag that redlatch counts down.
fn tagged_latch(on: &Deployment, rust: &Peer, java: &Worker<'_>) -> Duration {
    let name = format!("{{{}}}:42", unique("tagged"));
    let ours = format!("redisson_countdownlatch__channel__{name}");
    let assert_cross_slot = |what: String| assert!(java.run_err(&what).contains("CROSSSLOT"));
    assert_cross_slot(format!("set-count {name} 1"));
    assert!(rust.new_worker().run_bool(&format!("set-count {name} 1")));
    assert_cross_slot(format!("count-down {name}"));
    assert_cross_slot(format!("delete-latch {name}"));
    assert_eq!(java.run_number(&format!("count {name}")), 1);
    let waits = rust.new_worker().send(&format!("await {name} -1"));
    on.until_subscribed(&ours, 1);
    let java_waits = java.send(&format!("await {name} {}", JAVA_WAIT_LIMIT.as_millis()));
    on.until_subscribed(&latch_channel(&name), 1);
    assert!(rust.new_worker().run_bool(&format!("count-down {name}")));
    assert_eq!(waits.value(), true);
    let answer = java_waits.answer();
    assert_eq!(answer.result, Ok(true.into()));
    Duration::from_nanos(answer.ended.abs_diff(answer.started))
}

/// Without slots, the same latch is shared.
#[test]
fn latch_with_a_hash_tag_is_shared_without_slots() {
    let on = sentinels();
    for library in [Library::Redisson, Library::Redisson3] {
        let (java, rust) = (on.shared(library), on.shared(Library::Redlatch));
        for (sets, waits) in [(java, rust), (rust, java)] {
            let name = format!("{{{}}}:42", unique("tagged"));
            let (sets, waiter) = (sets.new_worker(), waits.new_worker());
            assert!(sets.run_bool(&format!("set-count {name} 1")));
            let waits = waiter.send(&format!("await {name} -1"));
            on.until_subscribed(&latch_channel(&name), 1);
            assert!(sets.run_bool(&format!("count-down {name}")));
            assert_eq!(waits.value(), true);
        }
    }
}
