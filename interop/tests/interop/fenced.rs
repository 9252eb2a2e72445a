//! The tokens of the fenced lock.

use redlatch_interop::Worker;
use redlatch_testkit::unique;

use crate::both_ways;
use crate::peers::{LEASE, REFUSED_AFTER};

/// Acquires a lock in turn. Returns the last token.
fn rising_tokens([a, b]: [Worker<'_>; 2], name: &str) -> i64 {
    let mut latest = 0;
    for worker in [a, b, b, a, b, a, a] {
        let token = worker.run_number(&format!("lock fenced {name} -1 {LEASE}"));
        assert!(token > latest, "{token} after {latest}");
        latest = token;
        for worker in [a, b] {
            assert_eq!(worker.run_number(&format!("token {name}")), latest);
        }
        assert!(worker.run_bool(&format!("unlock fenced {name}")));
    }
    latest
}

both_ways! {
    // Redisson 3.16.8 has no `RFencedLock`.
    @not_3_16
    fn tokens_rise_over_both(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("tokens");
        for worker in [a, b] {
            assert_eq!(worker.run_number(&format!("token {name}")), 0, "never held");
        }
        let latest = rising_tokens([a, b], &name);
        let at: i64 = pair.server.command(&["GET", &format!("redisson_lock_token:{{{name}}}")]);
        assert_eq!(at, latest);
    }

    // Redlatch's tokens follow the clock here, and Redisson counts up from them.
    fn tokens_by_the_clock_rise_over_both(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("clock");
        let latest = rising_tokens([a, b], &name);
        assert!((1 << 50..1 << 53).contains(&latest), "{latest}");
        let left: i64 = pair.server.command(&["PTTL", &format!("redisson_lock_token:{{{name}}}")]);
        assert!((1..=86_400_000).contains(&left), "{left}");
    }

    fn failed_try_returns_no_token(pair: &Pair) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("no-token");
        let token = a.run_number(&format!("lock fenced {name} -1 {LEASE}"));
        assert_eq!(b.run(&format!("lock fenced {name} 0 -1")), false);
        assert_eq!(b.run(&format!("lock fenced {name} {REFUSED_AFTER} {LEASE}")), false);
        assert_eq!(b.run_number(&format!("token {name}")), token);
        assert!(a.run_bool(&format!("unlock fenced {name}")));
    }
}
