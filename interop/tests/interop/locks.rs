//! Common behavior of all exclusive locks.

use redlatch_interop::Library;
use redlatch_testkit::unique;
use serde_json::Value;

use crate::each_kind;
use crate::kinds::WaitDetector;
use crate::peers::{LEASE, REFUSED_AFTER, WATCHDOG, assert_nothing_left, keys, until};

/// Returns whether the lock was acquired: the answer is a token for a fenced lock, `true` for others.
pub(crate) fn is_acquired(answer: &Value) -> bool {
    *answer != Value::Bool(false)
}

each_kind! {
    fn waiter_is_woken_by_the_other_side(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("woken");
        let on = kind.on(&name);
        assert!(is_acquired(&a.run(&format!("lock {on} -1 {LEASE}"))));
        assert!(!is_acquired(&b.run(&format!("lock {on} 0 -1"))), "held by a");
        let detector = WaitDetector::new(pair.server, kind, &name, b);
        let waits = b.send(&format!("lock {on} -1 {LEASE}"));
        detector.until_waiting();
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("unlock {on}")));
        // Long before the lease ends, so it was woken.
        assert!(is_acquired(&detector.woken(waits)));
        assert!(!is_acquired(&a.run(&format!("lock {on} 0 -1"))), "held by b");
        assert!(b.run_bool(&format!("unlock {on}")));
        assert!(!a.run_bool(&format!("is-locked {on}")));
    }

    fn both_see_the_same(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("seen");
        let on = kind.on(&name);
        for worker in [a, b] {
            assert!(!worker.run_bool(&format!("is-locked {on}")));
            assert_eq!(worker.run_number(&format!("holds {on}")), 0);
            assert_eq!(worker.run_number(&format!("remaining {on}")), -2);
        }
        let times = if kind.is_reentrant() { 2 } else { 1 };
        for _ in 0..times {
            assert!(is_acquired(&a.run(&format!("lock {on} -1 {LEASE}"))));
        }
        for worker in [a, b] {
            assert!(worker.run_bool(&format!("is-locked {on}")));
            let remaining = worker.run_number(&format!("remaining {on}"));
            // Redisson's write lock adds the lease of each re-entry to the remaining one.
            assert!((LEASE as i64 - 60_000..=2 * LEASE as i64).contains(&remaining), "{remaining}");
        }
        let key: Vec<(String, String)> = pair.server.command(&["HGETALL", &name]);
        let held = (kind.field(a), times.to_string());
        assert!(key.contains(&held), "{key:?}");
        assert_eq!((a.run_number(&format!("holds {on}")), b.run_number(&format!("holds {on}"))), (times, 0));
        assert!(a.run_bool(&format!("is-held {on}")));
        assert!(!b.run_bool(&format!("is-held {on}")));
        b.run_err(&format!("unlock {on}"));
        for left in (0..times).rev() {
            assert!(a.run_bool(&format!("unlock {on}")));
            assert_eq!(b.run_bool(&format!("is-locked {on}")), left > 0);
        }
    }

    fn forced_unlock_is_a_loss_for_the_other_side(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("forced");
        let on = kind.on(&name);
        assert!(is_acquired(&a.run(&format!("lock {on} -1 {LEASE}"))));
        let next = pair.a.new_worker();
        let detector = WaitDetector::new(pair.server, kind, &name, next);
        let waits = next.send(&format!("lock {on} -1 {LEASE}"));
        detector.until_waiting();
        assert!(b.run_bool(&format!("force-unlock {on}")));
        assert!(is_acquired(&detector.woken(waits)), "a waiter is woken");
        a.run_err(&format!("unlock {on}"));
        assert!(next.run_bool(&format!("is-held {on}")), "and keeps it");
        assert!(b.run_bool(&format!("force-unlock {on}")));
        assert!(!b.run_bool(&format!("force-unlock {on}")), "it is not held");
    }

    fn other_side_acquires_after_the_lease_ends(pair: &Pair, kind: Kind) {
        // Redisson 3.16.8 computes the end of the lease once, with its own clock. If its first request reached the
        // server late, it wakes before the end, gets a negative time, and sleeps until a message comes. A lease that
        // ends sends none.
        if kind.0 == "fair" && pair.libraries[1] == Library::Redisson316 {
            return;
        }
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let on = kind.on(&unique("ends"));
        assert!(is_acquired(&a.run(&format!("lock {on} -1 300"))));
        assert!(is_acquired(&b.run(&format!("lock {on} -1 {LEASE}"))));
        assert!(!a.run_bool(&format!("is-held {on}")));
        a.run_err(&format!("unlock {on}"));
        assert!(b.run_bool(&format!("unlock {on}")));
    }

    fn an_inner_release_keeps_the_other_out(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("inner");
        let on = kind.on(&name);
        assert!(is_acquired(&a.run(&format!("lock {on} -1 {LEASE}"))));
        if !kind.is_reentrant() {
            a.run_err(&format!("lock {on} -1 {LEASE}"));
            a.run_err(&format!("lock {on} 0 -1"));
            assert!(a.run_bool(&format!("unlock {on}")));
            assert!(is_acquired(&b.run(&format!("lock {on} 0 -1"))));
            b.run_err(&format!("lock {on} 0 -1"));
            assert!(b.run_bool(&format!("unlock {on}")));
            return;
        }
        assert!(is_acquired(&a.run(&format!("lock {on} 0 -1"))));
        let detector = WaitDetector::new(pair.server, kind, &name, b);
        let waits = b.send(&format!("lock {on} -1 {LEASE}"));
        detector.until_waiting();
        assert!(a.run_bool(&format!("unlock {on}")));
        assert!(a.run_bool(&format!("is-held {on}")));
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("unlock {on}")));
        assert!(is_acquired(&detector.woken(waits)));
        assert!(b.run_bool(&format!("unlock {on}")));
    }

    fn both_sides_acquire_in_turn(pair: &Pair, kind: Kind) {
        let on = kind.on(&unique("to-and-fro"));
        let key = unique("counter");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let both = [a, b].map(|worker| worker.send(&format!("increment {on} {key} 50")));
        for done in both {
            assert_eq!(done.value(), 50);
        }
        let counted: u64 = pair.server.command(&["GET", &key]);
        assert_eq!(counted, 100, "both wrote at the same time");
    }

    // Redisson 3.16.8 stays subscribed if its wait ends before it has subscribed, as it may on a busy machine.
    // `lock_groups` and `read_write` test that it renews.
    @not_3_16
    fn watchdog_keeps_the_lock_beyond_the_lease(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let on = kind.on(&unique("renewed"));
        assert!(is_acquired(&a.run(&format!("lock {on} -1 -1"))));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert!(!is_acquired(&b.run(&format!("lock {on} {beyond} -1"))));
        assert!(a.run_bool(&format!("is-held {on}")));
        assert!(a.run_bool(&format!("unlock {on}")));
        assert!(is_acquired(&b.run(&format!("lock {on} 0 -1"))));
        assert!(b.run_bool(&format!("unlock {on}")));
    }

    fn timed_out_waiter_leaves_nothing_behind(pair: &Pair, kind: Kind) {
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let name = unique("gives-up");
        let on = kind.on(&name);
        assert!(is_acquired(&a.run(&format!("lock {on} -1 {LEASE}"))));
        let held = keys(pair.server, &name);
        assert!(!is_acquired(&b.run(&format!("lock {on} {REFUSED_AFTER} -1"))));
        until("only the keys of a are left", || keys(pair.server, &name) == held);
        assert!(a.run_bool(&format!("unlock {on}")));
        if kind.0 != "fenced" {
            assert_nothing_left(pair.server, &name);
        }
    }
}
