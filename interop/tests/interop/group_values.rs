//! Tests of the values of a group: Redisson's `getMultiLock(group, values)`.

use redlatch_interop::Library;
use redlatch_testkit::unique;

use crate::both_ways;
use crate::peers::{
    LEASE, REFUSED_AFTER, WATCHDOG, assert_nothing_left, start_on, until, until_subscribed,
};

/// Watchdog lease of the peers that are killed or stopped, in ms.
const SHORT: &str = "watchdog=3000";

both_ways! {
    // Redisson 3.16.8 does not have these locks.
    @not_3_16
    fn waiter_for_an_overlapping_set_is_woken(pair: &Pair) {
        let (a, b, other) = (pair.a.new_worker(), pair.b.new_worker(), pair.b.new_worker());
        let name = unique("group");
        assert!(a.run_bool(&format!("lock group {name}:x,y -1 {LEASE}")));
        assert!(!b.run_bool(&format!("lock group {name}:y,z 0 {LEASE}")));
        assert!(other.run_bool(&format!("lock group {name}:z 0 {LEASE}")), "a refused set holds no value");
        assert!(other.run_bool(&format!("unlock group {name}:z")));
        let waits = b.send(&format!("lock group {name}:y,z -1 {LEASE}"));
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{{name}}}"), 1);
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("unlock group {name}:x,y")));
        // Long before the lease ends, so it was woken.
        assert_eq!(waits.value(), true);
        assert!(!a.run_bool(&format!("lock group {name}:x,y 0 {LEASE}")));
        assert!(a.run_bool(&format!("lock group {name}:x 0 {LEASE}")));
        assert!(a.run_bool(&format!("unlock group {name}:x")));
        assert!(b.run_bool(&format!("unlock group {name}:y,z")));
        assert_nothing_left(pair.server, &name);
    }

    fn every_waiter_for_a_released_value_is_woken(pair: &Pair) {
        // A server of its own, because its scripts are counted.
        let server = redlatch_testkit::Server::start();
        let servers = std::slice::from_ref(&server);
        let [holder, peer] = [Library::Redlatch, pair.libraries[1]].map(|library| start_on(library, &[], servers));
        let (holder, name) = (holder.worker(1), unique("group"));
        assert!(holder.run_bool(&format!("lock group {name}:x,y,z -1 {LEASE}")));
        let waiting = [(1, "x"), (2, "y"), (3, "z")].map(|(worker, value)| {
            let scripts = server.calls("eval");
            let waits = peer.worker(worker).send(&format!("lock group {name}:{value} -1 {LEASE}"));
            // It tries twice, and then sleeps.
            until("it waits", || server.calls("eval") >= scripts + 2);
            waits
        });
        assert!(holder.run_bool(&format!("unlock group {name}:x,y,z")));
        for waits in waiting {
            assert_eq!(waits.value(), true);
        }
    }

    fn holds_of_each_value_are_counted(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("group");
        let is_free = |value: &str| {
            let free = b.run_bool(&format!("lock group {name}:{value} 0 {LEASE}"));
            if free {
                assert!(b.run_bool(&format!("unlock group {name}:{value}")));
            }
            free
        };
        for values in ["x,y", "y,x", "y,z"] {
            assert!(a.run_bool(&format!("lock group {name}:{values} -1 {LEASE}")));
        }
        assert!(a.run_bool(&format!("unlock group {name}:y,z")));
        assert_eq!(["x", "y", "z"].map(is_free), [false, false, true]);
        assert!(a.run_bool(&format!("unlock group {name}:y,x")));
        assert_eq!(["x", "y"].map(is_free), [false, false]);
        assert!(a.run_bool(&format!("unlock group {name}:x,y")));
        assert_eq!(["x", "y"].map(is_free), [true, true]);
        assert_nothing_left(pair.server, &name);
    }

    fn values_are_renewed(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("group");
        assert!(a.run_bool(&format!("lock group {name}:x,y -1 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert!(!b.run_bool(&format!("lock group {name}:y,z {beyond} -1")));
        assert!(a.run_bool(&format!("is-held group {name}:x,y")));
        assert!(a.run_bool(&format!("unlock group {name}:x,y")));
        assert!(b.run_bool(&format!("lock group {name}:y,z 0 -1")));
        assert!(b.run_bool(&format!("unlock group {name}:y,z")));
        assert_nothing_left(pair.server, &name);
    }

    fn values_of_a_killed_holder_are_acquired_after_its_lease(pair: &Pair) {
        let (mut a, b) = (pair.start_a(&[SHORT]), pair.b.new_worker());
        let name = unique("group");
        let other = pair.b.new_worker();
        assert!(a.worker(1).run_bool(&format!("lock group {name}:x,y -1 -1")));
        // The key of the group lives longer than the hold of the killed peer.
        assert!(other.run_bool(&format!("lock group {name}:other -1 {LEASE}")));
        let waits = b.send(&format!("lock group {name}:y,z -1 {LEASE}"));
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{{name}}}"), 1);
        a.kill();
        assert_eq!(waits.value(), true);
        assert!(!other.run_bool(&format!("lock group {name}:y 0 {LEASE}")));
    }

    fn late_release_does_not_release_the_next_hold(pair: &Pair) {
        let (a, b) = (pair.start_a(&[SHORT]), pair.b.new_worker());
        let name = unique("group");
        let worker = a.worker(1);
        assert!(worker.run_bool(&format!("lock group {name}:x,y -1 -1")));
        a.signal("STOP");
        assert!(b.run_bool(&format!("lock group {name}:x,y -1 {LEASE}")));
        a.signal("CONT");
        worker.run_err(&format!("unlock group {name}:x,y"));
        assert!(!worker.run_bool(&format!("lock group {name}:x {REFUSED_AFTER} -1")));
        assert!(b.run_bool(&format!("unlock group {name}:x,y")));
        // The fields of the replaced hold do not count for the next one.
        assert!(worker.run_bool(&format!("lock group {name}:x,y -1 {LEASE}")));
        assert!(worker.run_bool(&format!("unlock group {name}:x,y")));
        assert!(b.run_bool(&format!("lock group {name}:x,y 0 {LEASE}")), "nothing is held");
    }

    fn forced_unlock_releases_a_value(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("group");
        assert!(a.run_bool(&format!("lock group {name}:x -1 {LEASE}")));
        assert!(b.run_bool(&format!("is-locked group {name}:x")));
        let next = pair.a.new_worker();
        let waits = next.send(&format!("lock group {name}:x -1 {LEASE}"));
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{{name}}}"), 1);
        assert!(b.run_bool(&format!("force-unlock group {name}:x")));
        assert_eq!(waits.value(), true);
        a.run_err(&format!("unlock group {name}:x"));
        assert!(next.run_bool(&format!("unlock group {name}:x")));
        assert!(!b.run_bool(&format!("is-locked group {name}:x")));
    }
}
