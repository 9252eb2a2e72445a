//! Tests of a side that dies or is stopped: the other side acquires its locks.

use redlatch_interop::{Library, Pending};
use redlatch_testkit::unique;

use crate::both_ways;
use crate::locks::is_acquired;
use crate::peers::{LEASE, start_on, until, until_subscribed};

const KINDS: [&str; 5] = ["lock", "fair", "write", "fenced", "spin"];

/// Watchdog lease of the peers that are killed, in ms.
const SHORT: &str = "watchdog=3000";

both_ways! {
    // Not with Redisson 3.16.8, to save time: `read_write` tests that a reader dies. And there a waiter of a fair
    // lock sleeps until it is woken, if the holder was renewed beyond the lease that the waiter read first; no client
    // wakes it when such a holder dies.
    @not_3_16
    fn killed_waiter_does_not_block_others(pair: &Pair) {
        let (mut killed, alive) = (pair.start_a(&[SHORT]), pair.b);
        let name = unique("waiter");
        let permits = unique("waiter");
        let holder = pair.a.new_worker();
        assert!(holder.run_bool(&format!("lock lock {name} -1 {LEASE}")));
        assert!(holder.run_bool(&format!("set-permits {permits} 1")));
        assert!(holder.run_bool(&format!("acquire {permits} 1 -1")));
        let _unanswered = [
            killed.worker(1).send(&format!("lock lock {name} -1 -1")),
            killed.worker(2).send(&format!("acquire {permits} 1 -1")),
        ];
        let waiting = [
            alive.new_worker().send(&format!("lock lock {name} -1 {LEASE}")),
            alive.new_worker().send(&format!("acquire {permits} 1 -1")),
        ];
        until_subscribed(pair.server, &format!("redisson_lock__channel:{{{name}}}"), 2);
        until_subscribed(pair.server, &format!("redisson_sc:{{{permits}}}"), 2);
        killed.kill();
        assert!(holder.run_bool(&format!("unlock lock {name}")));
        assert!(holder.run_bool(&format!("release {permits} 1")));
        for waits in waiting {
            assert_eq!(waits.value(), true);
        }
    }

    fn holder_stopped_beyond_its_lease_loses_the_lock(pair: &Pair) {
        let (a, b) = (pair.start_a(&[SHORT]), pair.b);
        let names = KINDS.map(|kind| format!("{kind} {}", unique("frozen")));
        let worker = a.worker(1);
        for on in &names {
            assert!(is_acquired(&worker.run(&format!("lock {on} -1 -1"))));
        }
        a.signal("STOP");
        let next: Vec<_> = names.iter().map(|on| (b.new_worker(), on)).collect();
        for (next, on) in &next {
            assert!(is_acquired(&next.run(&format!("lock {on} -1 {LEASE}"))));
        }
        a.signal("CONT");
        for (next, on) in next {
            assert!(!worker.run_bool(&format!("is-held {on}")));
            worker.run_err(&format!("unlock {on}"));
            assert!(next.run_bool(&format!("is-held {on}")), "the new holder keeps the lock");
            assert!(next.run_bool(&format!("unlock {on}")));
        }
    }

    fn waiter_is_served_after_all_connections_broke(pair: &Pair) {
        // Separate servers, because other tests would be cut off as well.
        let server = redlatch_testkit::Server::start();
        let [a, b] = pair.libraries.map(|library| start_on(library, &[], std::slice::from_ref(&server)));
        let name = unique("cut");
        assert!(a.worker(1).run_bool(&format!("lock lock {name} -1 {LEASE}")));
        // From now on b does not need to load the script first.
        let other = unique("loaded");
        assert!(b.worker(1).run_bool(&format!("lock lock {other} -1 {LEASE}")));
        let scripts = server.calls("eval");
        let waits = b.worker(1).send(&format!("lock lock {name} -1 {LEASE}"));
        let channel = format!("redisson_lock__channel:{{{name}}}");
        until_subscribed(&server, &channel, 1);
        // It tries once before it subscribes and once after. Redisson fails with an error if the connection breaks
        // before the answer.
        until("it waits", || server.calls("eval") >= scripts + 2);
        server.cut_all();
        until_subscribed(&server, &channel, 1);
        let unlock = || a.worker(1).send(&format!("unlock lock {name}")).answer().result;
        match pair.libraries[0] {
            Library::Redlatch => assert_eq!(unlock().unwrap(), true),
            // It may send it on a connection of which it has not noticed that it is broken, and fails then.
            _ => until("it is released", || unlock().is_ok_and(|released| released == true)),
        }
        assert_eq!(waits.value(), true);
        for name in [name, other] {
            assert!(b.worker(1).run_bool(&format!("unlock lock {name}")));
        }
    }

    fn lock_of_a_killed_holder_is_acquired_after_its_lease(pair: &Pair) {
        let (mut a, b) = (pair.start_a(&[SHORT]), pair.b);
        let names = KINDS.map(|kind| format!("{kind} {}", unique("killed")));
        let reads = format!("read {}", unique("killed"));
        let [x, y, z] = ["x", "y", "z"].map(unique);
        let groups = [
            format!("multi lock:{x},fair:{y}"),
            format!("red lock:{z}@0,lock:{z}@1,lock:{z}@2"),
        ];
        for on in names.iter().chain(&groups).chain([&reads]) {
            assert!(is_acquired(&a.worker(1).run(&format!("lock {on} -1 -1"))));
        }
        let permits = unique("killed");
        assert!(a.worker(1).run_bool(&format!("x-set-permits {permits} 1")));
        let acquired = a.worker(1).run(&format!("x-acquire {permits} 1 0 2000"));
        assert_eq!(acquired.as_array().map(Vec::len), Some(1));
        let writes = reads.replacen("read", "write", 1);
        let waiting: Vec<Pending> = names
            .iter()
            .chain(&groups)
            .chain([&writes])
            .map(|on| b.new_worker().send(&format!("lock {on} -1 {LEASE}")))
            .collect();
        let permit = b.new_worker().send(&format!("x-acquire {permits} 1 -1 {LEASE}"));
        a.kill();
        for waits in waiting {
            assert!(is_acquired(&waits.value()));
        }
        assert_eq!(permit.value().as_array().map(Vec::len), Some(1));
    }
}
