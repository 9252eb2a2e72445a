//! The read-write lock.

use redlatch_interop::{Library, Worker};
use redlatch_testkit::{Server, unique};

use crate::both_ways;
use crate::peers::{LEASE, WATCHDOG, assert_nothing_left, until_subscribed};

fn channel(name: &str) -> String {
    format!("redisson_rwlock:{{{name}}}")
}

fn mode(server: &Server, name: &str) -> Option<String> {
    server.command(&["HGET", name, "mode"])
}

#[track_caller]
fn lock(worker: Worker<'_>, side: &str, name: &str) {
    assert!(worker.run_bool(&format!("lock {side} {name} -1 {LEASE}")));
}

#[track_caller]
fn unlock(worker: Worker<'_>, side: &str, name: &str) {
    assert!(worker.run_bool(&format!("unlock {side} {name}")));
}

#[track_caller]
fn assert_refused(worker: Worker<'_>, side: &str, name: &str) {
    assert!(!worker.run_bool(&format!("lock {side} {name} 0 -1")));
}

both_ways! {
    fn readers_share_and_a_writer_waits_for_the_last(pair: &Pair) {
        let name = unique("shared");
        let readers = [pair.a.new_worker(), pair.b.new_worker(), pair.a.new_worker()];
        for reader in readers {
            lock(reader, "read", &name);
        }
        for worker in [pair.a.new_worker(), pair.b.new_worker()] {
            assert!(worker.run_bool(&format!("is-locked read {name}")));
            assert!(!worker.run_bool(&format!("is-locked write {name}")));
        }
        assert_eq!(mode(pair.server, &name).as_deref(), Some("read"));
        let writer = pair.b.new_worker();
        assert_refused(writer, "write", &name);
        let waits = writer.send(&format!("lock write {name} -1 {LEASE}"));
        until_subscribed(pair.server, &channel(&name), 1);
        for reader in readers {
            assert!(waits.is_pending());
            unlock(reader, "read", &name);
        }
        assert_eq!(waits.value(), true);
        assert_eq!(mode(pair.server, &name).as_deref(), Some("write"));
        unlock(writer, "write", &name);
        assert_nothing_left(pair.server, &name);
    }

    fn all_readers_enter_when_the_writer_leaves(pair: &Pair) {
        let name = unique("written");
        let writer = pair.a.new_worker();
        // A short lease: a thread in Java that is about to sleep when the message comes sleeps until the lease ends.
        assert!(writer.run_bool(&format!("lock write {name} -1 30000")));
        let readers = [pair.b, pair.b, pair.a].map(|peer| peer.new_worker());
        let waiting = readers.map(|reader| reader.send(&format!("lock read {name} -1 {LEASE}")));
        until_subscribed(pair.server, &channel(&name), 2);
        assert!(waiting.iter().all(|reads| reads.is_pending()));
        unlock(writer, "write", &name);
        for reads in waiting {
            assert_eq!(reads.value(), true);
        }
        for reader in readers {
            unlock(reader, "read", &name);
        }
        assert_nothing_left(pair.server, &name);
    }

    fn writer_may_read_and_downgrade(pair: &Pair) {
        let name = unique("downgrade");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        lock(a, "write", &name);
        lock(a, "read", &name);
        assert_refused(b, "read", &name);
        let waits = (pair.libraries[0] == Library::Redlatch).then(|| {
            let waits = pair.b.new_worker().send(&format!("lock read {name} -1 30000"));
            until_subscribed(pair.server, &channel(&name), 1);
            waits
        });
        unlock(a, "write", &name);
        assert_eq!(mode(pair.server, &name).as_deref(), Some("read"));
        // Redisson publishes no message that only readers are left; redlatch does.
        if let Some(waits) = waits {
            assert_eq!(waits.value(), true, "woken");
        }
        lock(b, "read", &name);
        assert_refused(pair.b.new_worker(), "write", &name);
        unlock(a, "read", &name);
        unlock(b, "read", &name);
    }

    fn holds_are_counted_on_both_sides(pair: &Pair) {
        let name = unique("counted");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        lock(a, "read", &name);
        lock(a, "read", &name);
        lock(b, "read", &name);
        assert_eq!(a.run_number(&format!("holds read {name}")), 2);
        assert_eq!(b.run_number(&format!("holds read {name}")), 1);
        unlock(a, "read", &name);
        unlock(b, "read", &name);
        assert_eq!(a.run_number(&format!("holds read {name}")), 1);
        assert_refused(b, "write", &name);
        unlock(a, "read", &name);
        assert!(b.run_bool(&format!("lock write {name} 0 -1")));
        lock(b, "write", &name);
        unlock(b, "write", &name);
        assert_refused(a, "read", &name);
        unlock(b, "write", &name);
        assert_nothing_left(pair.server, &name);
    }

    fn every_reader_has_a_lease_of_its_own(pair: &Pair) {
        let name = unique("leases");
        let (short, long) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(short.run_bool(&format!("lock read {name} -1 {WATCHDOG}")));
        lock(long, "read", &name);
        let remaining = |worker: Worker<'_>| worker.run_number(&format!("remaining read {name}"));
        assert!(remaining(short) > WATCHDOG as i64);
        unlock(long, "read", &name);
        // The long lease ended with its reader.
        assert!(remaining(short) <= WATCHDOG as i64);
        assert!(remaining(long) <= WATCHDOG as i64);
        let writer = pair.b.new_worker();
        assert!(writer.run_bool(&format!("lock write {name} -1 {LEASE}")));
        unlock(writer, "write", &name);
    }

    fn watchdog_of_the_other_side_does_not_renew_a_dead_reader(pair: &Pair) {
        let name = unique("dead");
        let [mut a, b] = pair.start(&["watchdog=3000"]);
        let (killed, alive) = (a.worker(1), b.worker(1));
        assert!(killed.run_bool(&format!("lock read {name} -1 -1")));
        assert!(alive.run_bool(&format!("lock read {name} -1 -1")));
        a.kill();
        let writer = b.worker(2);
        assert!(!writer.run_bool(&format!("lock write {name} 4000 -1")), "one reader is left");
        unlock(alive, "read", &name);
        assert!(writer.run_bool(&format!("lock write {name} -1 -1")));
        unlock(writer, "write", &name);
    }

    // Redisson 3.16.8 reports success for the release of a read or write lock that is free.
    @not_3_16
    fn forced_unlock_is_a_loss_for_the_other_side(pair: &Pair) {
        let name = unique("forced");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        // A short lease, because Redisson leaves the timeout keys of readers behind.
        assert!(a.run_bool(&format!("lock read {name} -1 {WATCHDOG}")));
        assert!(b.run_bool(&format!("force-unlock read {name}")));
        a.run_err(&format!("unlock read {name}"));
        lock(a, "write", &name);
        assert!(b.run_bool(&format!("force-unlock write {name}")));
        a.run_err(&format!("unlock write {name}"));
        assert_nothing_left(pair.server, &name);
    }

    // Not with Redisson 3.16.8, to save time: the test in which a reader dies shows that another one is renewed.
    fn watchdog_keeps_a_reader_against_the_other_sides_writer(pair: &Pair) {
        let name = unique("renewed");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.run_bool(&format!("lock read {name} -1 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert!(!b.run_bool(&format!("lock write {name} {beyond} -1")));
        unlock(a, "read", &name);
        assert!(b.run_bool(&format!("lock write {name} 0 -1")));
        unlock(b, "write", &name);
    }
}
