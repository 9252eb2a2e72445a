//! Settings that may be changed on either side while both still share locks.

use redlatch_testkit::unique;

use crate::both_ways;
use crate::locks::acquired;
use crate::peers::{LEASE, until_subscribed};

both_ways! {
    // Redisson 3.16.8 does not put a prefix before the names of read-write locks.
    @late
    fn a_prefix_is_a_name_mapper_and_the_codec_does_not_matter(pair: &Pair) {
        let [a, b] = pair.start(&["prefix=app:", "codec=string"]);
        let name = unique("prefixed");
        let (holds, waits) = (a.worker(1), b.worker(1));
        for kind in ["lock", "fair", "read", "write", "fenced", "spin"] {
            assert!(acquired(&holds.ask(&format!("lock {kind} {name}-{kind} -1 {LEASE}"))));
            let key: String = pair.server.ask(&["TYPE", &format!("app:{name}-{kind}")]);
            assert_eq!(key, "hash", "{kind}");
            let other = if kind == "read" { "write" } else { kind };
            assert!(!acquired(&waits.ask(&format!("lock {other} {name}-{kind} 0 -1"))), "{kind}");
        }
        // The channel is that of the whole name.
        let waiting = waits.tell(&format!("lock lock {name}-lock -1 {LEASE}"));
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{app:{name}-lock}}"), 1);
        assert!(holds.does(&format!("unlock lock {name}-lock")));
        assert_eq!(waiting.value(), true);

        assert!(holds.does(&format!("set-permits {name}-permits 3")));
        assert!(waits.does(&format!("acquire {name}-permits 2 0")));
        assert_eq!(holds.number(&format!("available {name}-permits")), 1);
        assert!(waits.does(&format!("x-set-permits {name}-leased 3")));
        let taken = holds.ask(&format!("x-acquire {name}-leased 2 0 {LEASE}"));
        assert_eq!(taken.as_array().map(Vec::len), Some(2));
        assert_eq!(waits.number(&format!("x-available {name}-leased")), 1);
        assert!(holds.does(&format!("set-count {name}-latch 1")));
        assert_eq!(waits.number(&format!("count {name}-latch")), 1);
        let number: String = pair.server.ask(&["GET", &format!("app:{name}-latch")]);
        assert_eq!(number, "1");
    }
}
