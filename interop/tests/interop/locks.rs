//! The plain lock, and what all exclusive locks have in common with it.

use redlatch_testkit::unique;

use crate::both_ways;
use crate::stand::{LEASE, until_subscribed};

both_ways! {
    fn held_by_one_waited_for_by_the_other(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("lock");
        let channel = format!("redisson_lock__channel:{{{name}}}");
        assert!(a.does(&format!("lock lock {name} 0 {LEASE}")));
        assert!(!b.does(&format!("lock lock {name} 0 -1")));
        let waits = b.tell(&format!("lock lock {name} -1 -1"));
        until_subscribed(pair.server, &channel, 1);
        assert!(waits.is_under_way());
        assert!(a.does(&format!("unlock lock {name}")));
        assert_eq!(waits.value(), true);
        assert!(b.does(&format!("unlock lock {name}")));
        assert!(!a.does(&format!("is-locked lock {name}")));
    }
}
