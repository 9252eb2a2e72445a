//! Semaphores of both kinds.

use redlatch_interop::Library;
use redlatch_testkit::{Server, unique};
use serde_json::{Value, json};

use crate::both_ways;
use crate::peers::{LEASE, REFUSED_AFTER, WATCHDOG, until, until_subscribed};

fn channel(name: &str) -> String {
    format!("redisson_sc:{{{name}}}")
}

fn ids(value: &Value) -> Vec<String> {
    let ids = value.as_array().expect("ids");
    ids.iter()
        .map(|id| id.as_str().expect("an id").to_owned())
        .collect()
}

fn stored(server: &Server, name: &str) -> Option<i64> {
    server.command(&["GET", name])
}

both_ways! {
    fn permits_are_taken_from_one_store(pair: &Pair) {
        let name = unique("permits");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-permits {name} 5")));
        assert!(!b.run_bool(&format!("set-permits {name} 9")));
        assert!(b.run_bool(&format!("acquire {name} 2 0")));
        assert!(a.run_bool(&format!("acquire {name} 1 -1")));
        for worker in [a, b] {
            assert_eq!(worker.run_number(&format!("available {name}")), 2);
        }
        assert!(!a.run_bool(&format!("acquire {name} 3 0")));
        assert!(!b.run_bool(&format!("acquire {name} 3 {REFUSED_AFTER}")));
        assert!(a.run_bool(&format!("release {name} 1")));
        assert!(b.run_bool(&format!("acquire {name} 3 0")));
        assert_eq!(a.run_number(&format!("available {name}")), 0);
        assert!(b.run_bool(&format!("add-permits {name} 4")));
        assert!(a.run_bool(&format!("add-permits {name} -1")));
        assert_eq!(a.run_number(&format!("drain {name}")), 3);
        assert_eq!(b.run_number(&format!("available {name}")), 0);
        assert!(a.run_bool(&format!("release {name} 2")));
        assert_eq!(b.run_number(&format!("drain {name}")), 2);
        assert_eq!(stored(pair.server, &name), Some(0));
        for (library, worker) in pair.libraries.into_iter().zip([a, b]) {
            // 3.x versions do not have it.
            if matches!(library, Library::Redisson | Library::Redlatch) {
                assert!(worker.run_bool(&format!("release-if-exists {name} 1")));
                assert!(!worker.run_bool(&format!("release-if-exists {name}-not-there 1")));
            }
        }
    }

    fn waiter_for_many_is_woken_when_they_are_available(pair: &Pair) {
        let name = unique("many");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-permits {name} 3")));
        assert!(a.run_bool(&format!("acquire {name} 3 0")));
        let waits = b.send(&format!("acquire {name} 3 -1"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(a.run_bool(&format!("release {name} 1")));
        assert!(a.run_bool(&format!("release {name} 1")));
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("release {name} 1")));
        assert_eq!(waits.value(), true);
        assert_eq!(a.run_number(&format!("available {name}")), 0);
    }

    fn waiters_of_both_sides_are_all_served(pair: &Pair) {
        let name = unique("waiters");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-permits {name} 2")));
        assert!(a.run_bool(&format!("acquire {name} 2 0")));
        let waiting: Vec<_> = [pair.a, pair.b, pair.a, pair.b]
            .map(|peer| peer.new_worker().send(&format!("acquire {name} 1 -1")))
            .into();
        until_subscribed(pair.server, &channel(&name), 2);
        assert!(b.run_bool(&format!("release {name} 2")));
        assert!(a.run_bool(&format!("release {name} 2")));
        for acquired in waiting {
            assert_eq!(acquired.value(), true);
        }
        assert_eq!(stored(pair.server, &name), Some(0));
    }

    fn setting_and_adding_wake_the_others_waiters(pair: &Pair) {
        let name = unique("set");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let waits = b.send(&format!("acquire {name} 1 -1"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(a.run_bool(&format!("set-permits {name} 1")));
        assert_eq!(waits.value(), true);
        let waits = b.send(&format!("acquire {name} 2 -1"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(a.run_bool(&format!("add-permits {name} 2")));
        assert_eq!(waits.value(), true);
    }

    fn waiter_for_an_expirable_permit_is_woken(pair: &Pair) {
        let name = unique("x-woken");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("x-set-permits {name} 1")));
        let held = ids(&a.run(&format!("x-acquire {name} 1 0 {LEASE}")));
        let waits = b.send(&format!("x-acquire {name} 1 -1 {LEASE}"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("x-release {name} {}", held[0])));
        assert_eq!(ids(&waits.value()).len(), 1);
    }

    fn messages_below_zero_do_not_harm_waiters(pair: &Pair) {
        let name = unique("x-below-zero");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("x-set-permits {name} 1")));
        let held = ids(&a.run(&format!("x-acquire {name} 1 0 {LEASE}")));
        let waits = b.send(&format!("x-acquire {name} 1 -1 {LEASE}"));
        until_subscribed(pair.server, &channel(&name), 1);
        // redlatch publishes the number available, which is below zero here; then zero, and one.
        assert!(a.run_bool(&format!("x-add-permits {name} -3")));
        assert!(a.run_bool(&format!("x-add-permits {name} 1")));
        assert!(a.run_bool(&format!("x-add-permits {name} 2")));
        assert!(waits.is_pending());
        assert!(a.run_bool(&format!("x-release {name} {}", held[0])));
        assert_eq!(ids(&waits.value()).len(), 1);
    }

    fn as_many_are_woken_as_can_be_served(pair: &Pair) {
        let name = unique("as-many");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-permits {name} 3")));
        assert!(a.run_bool(&format!("acquire {name} 3 0")));
        let waiters = [(); 3].map(|()| pair.b.new_worker());
        let waiting = waiters.map(|waiter| waiter.send(&format!("acquire {name} 1 -1")));
        until_subscribed(pair.server, &channel(&name), 1);
        // Released together, so that one message announces them, with their number.
        assert!(a.run_bool(&format!("release {name} 3")));
        for acquired in waiting {
            assert_eq!(acquired.value(), true);
        }
        assert_eq!(b.run_number(&format!("available {name}")), 0);
    }

    // Redisson 3.16.8 has no `trySetPermits` with a time to live; and for expirable permits no counts of acquired or
    // all permits, no `getLeaseTime`, no `setPermits`, and none of the methods for several permits.
    @not_3_16
    fn permits_with_a_time_to_live_end_for_both(pair: &Pair) {
        let name = unique("ttl");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("set-permits-for {name} 2 6000")));
        assert!(!b.run_bool(&format!("set-permits-for {name} 9 6000")));
        until("they have ended", || b.run_number(&format!("available {name}")) == 0);
        assert!(b.run_bool(&format!("set-permits {name} 1")));
    }

    fn expirable_permits_are_the_same_to_both(pair: &Pair) {
        let name = unique("expirable");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("x-set-permits {name} 4")));
        assert!(!b.run_bool(&format!("x-set-permits {name} 9")));
        let taken = ids(&a.run(&format!("x-acquire {name} 2 0 {LEASE}")));
        assert_eq!(taken.len(), 2);
        let one = ids(&b.run(&format!("x-acquire {name} 1 -1 -1")));
        for worker in [a, b] {
            assert_eq!(worker.run_number(&format!("x-available {name}")), 1);
            assert_eq!(worker.run_number(&format!("x-acquired {name}")), 3);
            assert_eq!(worker.run_number(&format!("x-total {name}")), 4);
            let left = worker.run_number(&format!("x-lease {name} {}", taken[0]));
            assert!((LEASE as i64 - 60_000..=LEASE as i64).contains(&left), "{left}");
            assert_eq!(worker.run(&format!("x-acquire {name} 2 0 {LEASE}")), json!([]));
        }
        // Each side may release permits of the other, by their ids.
        assert!(b.run_bool(&format!("x-update-lease {name} {} {}", taken[1], 2 * LEASE)));
        assert!(a.run_number(&format!("x-lease {name} {}", taken[1])) > LEASE as i64);
        assert!(b.run_bool(&format!("x-release {name} {}", taken[0])));
        a.run_err(&format!("x-release {name} {}", taken[0]));
        b.run_err(&format!("x-lease {name} {}", taken[0]));
        let rest = format!("{},{}", taken[1], one[0]);
        assert_eq!(a.run_number(&format!("x-try-release {name} {rest}")), 2);
        assert_eq!(b.run_number(&format!("x-try-release {name} {rest}")), 0);
        assert_eq!(a.run_number(&format!("x-available {name}")), 4);
        assert!(b.run_bool(&format!("x-add-permits {name} 2")));
        assert_eq!(a.run_number(&format!("x-total {name}")), 6);
        assert!(a.run_bool(&format!("x-resize {name} 3")));
        assert_eq!(b.run_number(&format!("x-total {name}")), 3);
        assert_eq!(b.run_number(&format!("x-available {name}")), 3);
    }

    fn expired_permit_is_acquired_by_the_other_side(pair: &Pair) {
        let name = unique("x-expires");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("x-set-permits {name} 1")));
        let held = ids(&a.run(&format!("x-acquire {name} 1 0 700")));
        assert_eq!(ids(&b.run(&format!("x-acquire {name} 1 -1 {LEASE}"))).len(), 1);
        a.run_err(&format!("x-release {name} {}", held[0]));
        assert_eq!(a.run_number(&format!("x-acquired {name}")), 1);
    }

    // Not with Redisson 3.16.8, to save time.
    fn permit_without_an_end_is_kept(pair: &Pair) {
        let name = unique("x-endless");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("x-set-permits {name} 1")));
        let held = ids(&a.run(&format!("x-acquire {name} 1 0 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert_eq!(b.run(&format!("x-acquire {name} 1 {beyond} -1")), json!([]));
        assert!(a.run_bool(&format!("x-release {name} {}", held[0])));
        assert_eq!(ids(&b.run(&format!("x-acquire {name} 1 0 -1"))).len(), 1);
    }
}
