//! Tests of multi-locks and RedLocks.

use redlatch_testkit::unique;

use crate::both_ways;
use crate::peers::{
    LEASE, RED_REFUSED_AFTER, WATCHDOG, assert_nothing_left, until, until_subscribed,
};

both_ways! {
    fn multi_lock_holds_all_members_for_the_other_side(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let [x, y, z] = ["x", "y", "z"].map(unique);
        let all = format!("multi lock:{x},fair:{y},write:{z}");
        assert!(a.run_bool(&format!("lock {all} -1 {LEASE}")));
        for member in [format!("lock {x}"), format!("fair {y}"), format!("write {z}")] {
            assert!(b.run_bool(&format!("is-locked {member}")));
            assert!(!b.run_bool(&format!("lock {member} 0 -1")));
            assert!(a.run_bool(&format!("is-held {member}")));
        }
        assert!(!b.run_bool(&format!("lock {all} 0 {LEASE}")));
        assert!(a.run_bool(&format!("unlock {all}")));
        // Without a wait, Redisson 3.16.8 fails if one member takes a millisecond.
        assert!(b.run_bool(&format!("lock {all} -1 {LEASE}")));
        assert!(b.run_bool(&format!("unlock {all}")));
        for name in [x, y, z] {
            assert_nothing_left(pair.server, &name);
        }
    }

    fn multi_lock_waits_for_a_member_of_the_other_side(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let [x, y] = ["x", "y"].map(unique);
        let all = format!("multi lock:{x},lock:{y}");
        assert!(a.run_bool(&format!("lock lock {y} -1 {LEASE}")));
        assert!(!b.run_bool(&format!("lock {all} 0 {LEASE}")));
        until("a refused multi-lock holds no member", || !a.run_bool(&format!("is-locked lock {x}")));
        let waits = b.send(&format!("lock {all} -1 {LEASE}"));
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{{y}}}"), 1);
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("unlock lock {y}")));
        assert_eq!(waits.value(), true);
        assert!(b.run_bool(&format!("unlock {all}")));
    }

    fn a_red_lock_is_renewed(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("red");
        let red = format!("red lock:{name}@0,lock:{name}@1,lock:{name}@2");
        assert!(a.run_bool(&format!("lock {red} -1 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert!(!b.run_bool(&format!("lock multi lock:{name}@1 {beyond} -1")));
        assert!(!b.run_bool(&format!("lock {red} {RED_REFUSED_AFTER} {LEASE}")));
        assert!(a.run_bool(&format!("unlock {red}")));
        assert!(b.run_bool(&format!("lock {red} -1 {LEASE}")));
        assert!(b.run_bool(&format!("unlock {red}")));
    }

    // Redisson 3.16.8 stays subscribed if its wait ends before it has subscribed, as it may on a busy machine; and it
    // renews the members of a multi-lock like those of a RedLock.
    @not_3_16
    fn a_multi_lock_is_renewed(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let [x, y] = ["x", "y"].map(unique);
        let all = format!("multi lock:{x},lock:{y}@1");
        assert!(a.run_bool(&format!("lock {all} -1 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert!(!b.run_bool(&format!("lock multi lock:{y}@1 {beyond} -1")));
        assert!(!b.run_bool(&format!("lock lock {x} 0 -1")));
        assert!(a.run_bool(&format!("unlock {all}")));
        // Without a wait, Redisson 3.16.8 fails if one member takes a millisecond.
        assert!(b.run_bool(&format!("lock {all} -1 {LEASE}")));
        assert!(b.run_bool(&format!("unlock {all}")));
    }

    fn red_lock_excludes_the_other_side(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let names = ["r0", "r1", "r2"].map(unique);
        let [r0, r1, r2] = &names;
        let red = format!("red lock:{r0}@0,lock:{r1}@1,lock:{r2}@2");
        assert!(a.run_bool(&format!("lock {red} -1 {LEASE}")));
        for (server, name) in pair.servers.iter().zip(&names) {
            let held: Vec<(String, i64)> = server.command(&["HGETALL", name]);
            assert!(held.len() == 1 && held[0].1 == 1, "{held:?}");
        }
        assert!(!b.run_bool(&format!("lock {red} {RED_REFUSED_AFTER} {LEASE}")));
        let waits = b.send(&format!("lock {red} -1 {LEASE}"));
        assert!(!pair.b.new_worker().run_bool(&format!("lock {red} {RED_REFUSED_AFTER} {LEASE}")));
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("unlock {red}")));
        assert_eq!(waits.value(), true);
        assert!(!a.run_bool(&format!("lock {red} {RED_REFUSED_AFTER} {LEASE}")));
        assert!(b.run_bool(&format!("unlock {red}")));
        for (server, name) in pair.servers.iter().zip(&names) {
            assert_nothing_left(server, name);
        }
    }

    fn red_lock_needs_only_a_majority(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let names = ["r0", "r1", "r2"].map(unique);
        let [r0, r1, r2] = &names;
        let red = format!("red lock:{r0}@0,lock:{r1}@1,lock:{r2}@2");
        let [of_one, of_two] = [format!("lock:{r0}@0"), format!("lock:{r1}@1")];
        assert!(b.run_bool(&format!("lock multi {of_one} -1 {LEASE}")));
        assert!(a.run_bool(&format!("lock {red} 5000 {LEASE}")), "two of three");
        assert!(a.run_bool(&format!("unlock {red}")));
        assert!(b.run_bool(&format!("lock multi {of_two} -1 {LEASE}")));
        // A short lease: on a busy machine Redisson may learn too late that it acquired one of them.
        assert!(!a.run_bool(&format!("lock {red} {RED_REFUSED_AFTER} {WATCHDOG}")), "one of three");
        assert!(b.run_bool(&format!("unlock multi {of_two}")));
        assert!(b.run_bool(&format!("unlock multi {of_one}")));
        for (server, name) in pair.servers.iter().zip(&names) {
            assert_nothing_left(server, name);
        }
    }
}
