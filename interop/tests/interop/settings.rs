//! Settings that may be changed on either side while both still share locks.

use redlatch_testkit::unique;

use crate::both_ways;
use crate::locks::is_acquired;
use crate::peers::{LEASE, until_subscribed};

both_ways! {
    // Redisson 3.16.8 does not put a prefix before the names of read-write locks.
    @not_3_16
    fn a_prefix_is_a_name_mapper_and_both_have_the_same_codec(pair: &Pair) {
        let [a, b] = pair.start(&["prefix=app:", "codec=string"]);
        let name = unique("prefixed");
        let (holder, waiter) = (a.worker(1), b.worker(1));
        for kind in ["lock", "fair", "read", "write", "fenced", "spin"] {
            assert!(is_acquired(&holder.run(&format!("lock {kind} {name}-{kind} -1 {LEASE}"))));
            let key: String = pair.server.command(&["TYPE", &format!("app:{name}-{kind}")]);
            assert_eq!(key, "hash", "{kind}");
            let other = if kind == "read" { "write" } else { kind };
            assert!(!is_acquired(&waiter.run(&format!("lock {other} {name}-{kind} 0 -1"))), "{kind}");
        }
        // The field of a value depends on the codec.
        assert!(holder.run_bool(&format!("lock group {name}-group:x,y -1 {LEASE}")));
        let key: String = pair.server.command(&["TYPE", &format!("app:{name}-group")]);
        assert_eq!(key, "hash");
        assert!(!waiter.run_bool(&format!("lock group {name}-group:y,z 0 -1")));
        // The channel is that of the whole name.
        let waiting = waiter.send(&format!("lock lock {name}-lock -1 {LEASE}"));
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{app:{name}-lock}}"), 1);
        assert!(holder.run_bool(&format!("unlock lock {name}-lock")));
        assert_eq!(waiting.value(), true);

        assert!(holder.run_bool(&format!("set-permits {name}-permits 3")));
        assert!(waiter.run_bool(&format!("acquire {name}-permits 2 0")));
        assert_eq!(holder.run_number(&format!("available {name}-permits")), 1);
        assert!(waiter.run_bool(&format!("x-set-permits {name}-leased 3")));
        let taken = holder.run(&format!("x-acquire {name}-leased 2 0 {LEASE}"));
        assert_eq!(taken.as_array().map(Vec::len), Some(2));
        assert_eq!(waiter.run_number(&format!("x-available {name}-leased")), 1);
        assert!(holder.run_bool(&format!("set-count {name}-latch 1")));
        assert_eq!(waiter.run_number(&format!("count {name}-latch")), 1);
        let number: String = pair.server.command(&["GET", &format!("app:{name}-latch")]);
        assert_eq!(number, "1");
    }
}
