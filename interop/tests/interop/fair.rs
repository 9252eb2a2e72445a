//! The fair lock: both sides in one queue.

use redlatch::blocking::Client;
use redlatch_interop::{Pending, Worker};
use redlatch_testkit::{Server, unique};

use crate::both_ways;
use crate::peers::{LEASE, keys, until};

/// Returns the waiters for a fair lock, the next one first.
fn queue(server: &Server, name: &str) -> Vec<String> {
    server.command(&[
        "LRANGE",
        &format!("redisson_lock_queue:{{{name}}}"),
        "0",
        "-1",
    ])
}

/// Starts a waiter, and waits until it is the last one in the queue.
#[track_caller]
fn start_waiter(server: &Server, worker: Worker<'_>, name: &str) -> Pending {
    let owner = worker.owner();
    let waits = worker.send(&format!("lock fair {name} -1 {LEASE}"));
    until("it is queued", || {
        queue(server, name).last() == Some(&owner)
    });
    waits
}

both_ways! {
    fn first_come_first_served_over_both(pair: &Pair) {
        let name = unique("in-order");
        let holder = pair.a.new_worker();
        assert!(holder.run_bool(&format!("lock fair {name} -1 {LEASE}")));
        let waiters = [pair.b, pair.a, pair.a, pair.b, pair.b, pair.a].map(|peer| peer.new_worker());
        let mut owners: Vec<String> = waiters.iter().map(Worker::owner).collect();
        let mut waiting: Vec<_> =
            waiters.iter().map(|&worker| (worker, start_waiter(pair.server, worker, &name))).collect();
        assert_eq!(queue(pair.server, &name), owners);
        assert!(holder.run_bool(&format!("unlock fair {name}")));
        while !waiting.is_empty() {
            let (worker, acquired) = waiting.remove(0);
            assert_eq!(acquired.value(), true);
            owners.remove(0);
            assert_eq!(queue(pair.server, &name), owners);
            for (_, others) in &waiting {
                assert!(others.is_pending());
            }
            // A try that does not queue does not overtake.
            assert!(!holder.run_bool(&format!("lock fair {name} 0 -1")));
            assert!(worker.run_bool(&format!("unlock fair {name}")));
        }
        assert_eq!(keys(pair.server, &name), Vec::<String>::new());
    }

    fn try_lock_fails_on_a_free_lock_with_a_queue(pair: &Pair) {
        let name = unique("in-line");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("lock fair {name} -1 {LEASE}")));
        // A waiter that this test queues, and that never sends a request.
        let queue_key = format!("redisson_lock_queue:{{{name}}}");
        let ends = format!("redisson_lock_timeout:{{{name}}}");
        let _: i64 = pair.server.command(&["RPUSH", &queue_key, "other-client:1"]);
        let _: i64 = pair.server.command(&["ZADD", &ends, "99999999999999", "other-client:1"]);
        assert!(a.run_bool(&format!("unlock fair {name}")));
        for worker in [a, b] {
            assert!(!worker.run_bool(&format!("is-locked fair {name}")));
            assert!(!worker.run_bool(&format!("lock fair {name} 0 -1")), "not its turn");
        }
        let _: i64 = pair.server.command(&["DEL", &queue_key, &ends]);
        assert!(b.run_bool(&format!("lock fair {name} 0 -1")));
        assert!(b.run_bool(&format!("unlock fair {name}")));
    }

    // Each process holds a lock and waits for that of the other. What the library knows of Redisson is in the queues.
    fn deadlock_over_both_is_found(pair: &Pair) {
        let (first, second) = (unique("first"), unique("second"));
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        let owners = [a.owner(), b.owner()];
        assert!(a.run_bool(&format!("lock fair {first} -1 {LEASE}")));
        assert!(b.run_bool(&format!("lock fair {second} -1 {LEASE}")));
        let (a_waits, b_waits) = (start_waiter(pair.server, a, &second), start_waiter(pair.server, b, &first));
        let client = Client::connect(&pair.server.url()).expect("a client");
        let graph = client.wait_graph().expect("the waits");
        let deadlocks = graph.deadlocks();
        let mut found = deadlocks.iter().filter(|cycle| cycle.iter().any(|wait| wait.name == first));
        let mut cycle: Vec<_> =
            found.next().expect("a deadlock").iter().map(|wait| (&*wait.name, wait.owner.to_string())).collect();
        cycle.sort_unstable();
        let [a_owner, b_owner] = owners;
        assert_eq!(cycle, [(&*first, b_owner), (&*second, a_owner)]);
        assert!(found.next().is_none());
        // A forced release of one lock ends it.
        assert!(client.fair_lock(&first).force_unlock().expect("released"));
        assert_eq!(b_waits.value(), true);
        assert!(b.run_bool(&format!("unlock fair {second}")));
        assert_eq!(a_waits.value(), true);
        assert!(a.run_bool(&format!("unlock fair {second}")) && b.run_bool(&format!("unlock fair {first}")));
    }

    fn timed_out_waiter_leaves_the_queue(pair: &Pair) {
        let name = unique("gives-up");
        let holder = pair.a.new_worker();
        assert!(holder.run_bool(&format!("lock fair {name} -1 {LEASE}")));
        let (impatient, patient) = (pair.b.new_worker(), pair.a.new_worker());
        let [owner, behind] = [impatient, patient].map(|worker| worker.owner());
        let gives_up = impatient.send(&format!("lock fair {name} 6000 -1"));
        until("it is queued", || queue(pair.server, &name) == [owner.clone()]);
        let waits = start_waiter(pair.server, patient, &name);
        assert_eq!(gives_up.value(), false);
        until("it has left", || queue(pair.server, &name) == [behind.clone()]);
        assert!(holder.run_bool(&format!("unlock fair {name}")));
        assert_eq!(waits.value(), true);
        assert!(patient.run_bool(&format!("unlock fair {name}")));
        assert_eq!(keys(pair.server, &name), Vec::<String>::new());
    }

    // Redisson 3.16.8 has no `fairLockWaitTimeout`: it always waits for five minutes.
    @not_3_16
    fn dead_waiter_is_skipped(pair: &Pair) {
        let name = unique("dies");
        let [a, mut b] = pair.start(&["fair-wait=2000"]);
        let holder = a.worker(1);
        assert!(holder.run_bool(&format!("lock fair {name} -1 10000")));
        let killed = b.worker(1);
        let _unanswered = start_waiter(pair.server, killed, &name);
        let next = a.worker(2);
        let waits = start_waiter(pair.server, next, &name);
        b.kill();
        // The dead waiter delays the others by its wait time, from the end of the lease that it waited for.
        assert_eq!(waits.value(), true);
        assert!(next.run_bool(&format!("unlock fair {name}")));
        assert_eq!(keys(pair.server, &name), Vec::<String>::new());
    }
}
