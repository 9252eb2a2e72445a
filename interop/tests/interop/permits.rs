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

fn at(server: &Server, name: &str) -> Option<i64> {
    server.ask(&["GET", name])
}

both_ways! {
    fn permits_are_taken_from_one_store(pair: &Pair) {
        let name = unique("permits");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-permits {name} 5")));
        assert!(!b.does(&format!("set-permits {name} 9")));
        assert!(b.does(&format!("acquire {name} 2 0")));
        assert!(a.does(&format!("acquire {name} 1 -1")));
        for worker in [a, b] {
            assert_eq!(worker.number(&format!("available {name}")), 2);
        }
        assert!(!a.does(&format!("acquire {name} 3 0")));
        assert!(!b.does(&format!("acquire {name} 3 {REFUSED_AFTER}")));
        assert!(a.does(&format!("release {name} 1")));
        assert!(b.does(&format!("acquire {name} 3 0")));
        assert_eq!(a.number(&format!("available {name}")), 0);
        assert!(b.does(&format!("add-permits {name} 4")));
        assert!(a.does(&format!("add-permits {name} -1")));
        assert_eq!(a.number(&format!("drain {name}")), 3);
        assert_eq!(b.number(&format!("available {name}")), 0);
        assert!(a.does(&format!("release {name} 2")));
        assert_eq!(b.number(&format!("drain {name}")), 2);
        assert_eq!(at(pair.server, &name), Some(0));
        for (library, worker) in pair.libraries.into_iter().zip([a, b]) {
            // 3.x versions do not have it.
            if matches!(library, Library::Redisson | Library::Redlatch) {
                assert!(worker.does(&format!("release-if-exists {name} 1")));
                assert!(!worker.does(&format!("release-if-exists {name}-not-there 1")));
            }
        }
    }

    fn waiter_for_many_is_woken_when_they_are_available(pair: &Pair) {
        let name = unique("many");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-permits {name} 3")));
        assert!(a.does(&format!("acquire {name} 3 0")));
        let waits = b.tell(&format!("acquire {name} 3 -1"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(a.does(&format!("release {name} 1")));
        assert!(a.does(&format!("release {name} 1")));
        assert!(waits.is_under_way());
        assert!(a.does(&format!("release {name} 1")));
        assert_eq!(waits.value(), true);
        assert_eq!(a.number(&format!("available {name}")), 0);
    }

    fn waiters_of_both_sides_are_all_served(pair: &Pair) {
        let name = unique("crowd");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-permits {name} 2")));
        assert!(a.does(&format!("acquire {name} 2 0")));
        let waiting: Vec<_> = [pair.a, pair.b, pair.a, pair.b]
            .map(|peer| peer.new_worker().tell(&format!("acquire {name} 1 -1")))
            .into();
        until_subscribed(pair.server, &channel(&name), 2);
        assert!(b.does(&format!("release {name} 2")));
        assert!(a.does(&format!("release {name} 2")));
        for answer in waiting {
            assert_eq!(answer.value(), true);
        }
        assert_eq!(at(pair.server, &name), Some(0));
    }

    fn setting_and_adding_wake_the_others_waiters(pair: &Pair) {
        let name = unique("set");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let waits = b.tell(&format!("acquire {name} 1 -1"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(a.does(&format!("set-permits {name} 1")));
        assert_eq!(waits.value(), true);
        let waits = b.tell(&format!("acquire {name} 2 -1"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(a.does(&format!("add-permits {name} 2")));
        assert_eq!(waits.value(), true);
    }

    fn waiter_for_an_expirable_permit_is_woken(pair: &Pair) {
        let name = unique("x-woken");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("x-set-permits {name} 1")));
        let held = ids(&a.ask(&format!("x-acquire {name} 1 0 {LEASE}")));
        let waits = b.tell(&format!("x-acquire {name} 1 -1 {LEASE}"));
        until_subscribed(pair.server, &channel(&name), 1);
        assert!(waits.is_under_way());
        assert!(a.does(&format!("x-release {name} {}", held[0])));
        assert_eq!(ids(&waits.value()).len(), 1);
    }

    fn messages_below_zero_do_not_harm_waiters(pair: &Pair) {
        let name = unique("x-owed");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("x-set-permits {name} 1")));
        let held = ids(&a.ask(&format!("x-acquire {name} 1 0 {LEASE}")));
        let waits = b.tell(&format!("x-acquire {name} 1 -1 {LEASE}"));
        until_subscribed(pair.server, &channel(&name), 1);
        // redlatch publishes the number available, which is below zero here; then zero, and one.
        assert!(a.does(&format!("x-add-permits {name} -3")));
        assert!(a.does(&format!("x-add-permits {name} 1")));
        assert!(a.does(&format!("x-add-permits {name} 2")));
        assert!(waits.is_under_way());
        assert!(a.does(&format!("x-release {name} {}", held[0])));
        assert_eq!(ids(&waits.value()).len(), 1);
    }

    fn as_many_are_woken_as_can_be_served(pair: &Pair) {
        let name = unique("as-many");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-permits {name} 3")));
        assert!(a.does(&format!("acquire {name} 3 0")));
        let waiters = [(); 3].map(|()| pair.b.new_worker());
        let waiting = waiters.map(|waiter| waiter.tell(&format!("acquire {name} 1 -1")));
        until_subscribed(pair.server, &channel(&name), 1);
        // Released together, so that one message announces them, with their number.
        assert!(a.does(&format!("release {name} 3")));
        for answer in waiting {
            assert_eq!(answer.value(), true);
        }
        assert_eq!(b.number(&format!("available {name}")), 0);
    }

    // Redisson 3.16.8 has no `trySetPermits` with a time to live; and for expirable permits no counts of acquired or
    // all permits, no `getLeaseTime`, no `setPermits`, and none of the methods for several permits.
    @late
    fn permits_with_a_time_to_live_end_for_both(pair: &Pair) {
        let name = unique("ttl");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("set-permits-for {name} 2 6000")));
        assert!(!b.does(&format!("set-permits-for {name} 9 6000")));
        until("they have ended", || b.number(&format!("available {name}")) == 0);
        assert!(b.does(&format!("set-permits {name} 1")));
    }

    fn expirable_permits_are_the_same_to_both(pair: &Pair) {
        let name = unique("expirable");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("x-set-permits {name} 4")));
        assert!(!b.does(&format!("x-set-permits {name} 9")));
        let taken = ids(&a.ask(&format!("x-acquire {name} 2 0 {LEASE}")));
        assert_eq!(taken.len(), 2);
        let one = ids(&b.ask(&format!("x-acquire {name} 1 -1 -1")));
        for worker in [a, b] {
            assert_eq!(worker.number(&format!("x-available {name}")), 1);
            assert_eq!(worker.number(&format!("x-acquired {name}")), 3);
            assert_eq!(worker.number(&format!("x-total {name}")), 4);
            let left = worker.number(&format!("x-lease {name} {}", taken[0]));
            assert!((LEASE as i64 - 60_000..=LEASE as i64).contains(&left), "{left}");
            assert_eq!(worker.ask(&format!("x-acquire {name} 2 0 {LEASE}")), json!([]));
        }
        // Each side may release permits of the other, by their ids.
        assert!(b.does(&format!("x-update-lease {name} {} {}", taken[1], 2 * LEASE)));
        assert!(a.number(&format!("x-lease {name} {}", taken[1])) > LEASE as i64);
        assert!(b.does(&format!("x-release {name} {}", taken[0])));
        a.fails(&format!("x-release {name} {}", taken[0]));
        b.fails(&format!("x-lease {name} {}", taken[0]));
        let rest = format!("{},{}", taken[1], one[0]);
        assert_eq!(a.number(&format!("x-try-release {name} {rest}")), 2);
        assert_eq!(b.number(&format!("x-try-release {name} {rest}")), 0);
        assert_eq!(a.number(&format!("x-available {name}")), 4);
        assert!(b.does(&format!("x-add-permits {name} 2")));
        assert_eq!(a.number(&format!("x-total {name}")), 6);
        assert!(a.does(&format!("x-resize {name} 3")));
        assert_eq!(b.number(&format!("x-total {name}")), 3);
        assert_eq!(b.number(&format!("x-available {name}")), 3);
    }

    fn expired_permit_is_acquired_by_the_other_side(pair: &Pair) {
        let name = unique("x-expires");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("x-set-permits {name} 1")));
        let held = ids(&a.ask(&format!("x-acquire {name} 1 0 700")));
        assert_eq!(ids(&b.ask(&format!("x-acquire {name} 1 -1 {LEASE}"))).len(), 1);
        a.fails(&format!("x-release {name} {}", held[0]));
        assert_eq!(a.number(&format!("x-acquired {name}")), 1);
    }

    // Not with Redisson 3.16.8, to save time.
    fn permit_without_an_end_is_kept(pair: &Pair) {
        let name = unique("x-endless");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("x-set-permits {name} 1")));
        let held = ids(&a.ask(&format!("x-acquire {name} 1 0 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert_eq!(b.ask(&format!("x-acquire {name} 1 {beyond} -1")), json!([]));
        assert!(a.does(&format!("x-release {name} {}", held[0])));
        assert_eq!(ids(&b.ask(&format!("x-acquire {name} 1 0 -1"))).len(), 1);
    }
}
