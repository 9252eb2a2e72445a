//! The read-write lock.

use redlatch_interop::{Library, Worker};
use redlatch_testkit::{Server, unique};

use crate::both_ways;
use crate::peers::{LEASE, WATCHDOG, nothing_left, until_subscribed};

fn channel(name: &str) -> String {
    format!("redisson_rwlock:{{{name}}}")
}

fn mode(server: &Server, name: &str) -> Option<String> {
    server.ask(&["HGET", name, "mode"])
}

#[track_caller]
fn takes(worker: Worker<'_>, side: &str, name: &str) {
    assert!(worker.does(&format!("lock {side} {name} -1 {LEASE}")));
}

#[track_caller]
fn unlocks(worker: Worker<'_>, side: &str, name: &str) {
    assert!(worker.does(&format!("unlock {side} {name}")));
}

#[track_caller]
fn cannot(worker: Worker<'_>, side: &str, name: &str) {
    assert!(!worker.does(&format!("lock {side} {name} 0 -1")));
}

both_ways! {
    fn readers_share_and_a_writer_waits_for_the_last(pair: &Pair) {
        let name = unique("shared");
        let readers = [pair.a.new_worker(), pair.b.new_worker(), pair.a.new_worker()];
        for reader in readers {
            takes(reader, "read", &name);
        }
        for worker in [pair.a.new_worker(), pair.b.new_worker()] {
            assert!(worker.does(&format!("is-locked read {name}")));
            assert!(!worker.does(&format!("is-locked write {name}")));
        }
        assert_eq!(mode(pair.server, &name).as_deref(), Some("read"));
        let writer = pair.b.new_worker();
        cannot(writer, "write", &name);
        let waits = writer.tell(&format!("lock write {name} -1 {LEASE}"));
        until_subscribed(pair.server, &channel(&name), 1);
        for reader in readers {
            assert!(waits.is_under_way());
            unlocks(reader, "read", &name);
        }
        assert_eq!(waits.value(), true);
        assert_eq!(mode(pair.server, &name).as_deref(), Some("write"));
        unlocks(writer, "write", &name);
        nothing_left(pair.server, &name);
    }

    fn all_readers_enter_when_the_writer_leaves(pair: &Pair) {
        let name = unique("written");
        let writer = pair.a.new_worker();
        // A short lease: a thread in Java that is about to sleep sleeps until the lease ends.
        assert!(writer.does(&format!("lock write {name} -1 30000")));
        let here = pair.a.new_worker();
        let readers = [pair.b.new_worker(), pair.b.new_worker(), here];
        let waiting = readers.map(|reader| reader.tell(&format!("lock read {name} -1 {LEASE}")));
        until_subscribed(pair.server, &channel(&name), 2);
        assert!(waiting.iter().all(|reads| reads.is_under_way()));
        unlocks(writer, "write", &name);
        for reads in waiting {
            assert_eq!(reads.value(), true);
        }
        for reader in readers {
            unlocks(reader, "read", &name);
        }
        nothing_left(pair.server, &name);
    }

    fn writer_may_read_and_downgrade(pair: &Pair) {
        let name = unique("downgrade");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        takes(a, "write", &name);
        takes(a, "read", &name);
        cannot(b, "read", &name);
        let waits = (pair.libraries[0] == Library::Redlatch).then(|| {
            let waits = pair.b.new_worker().tell(&format!("lock read {name} -1 30000"));
            until_subscribed(pair.server, &channel(&name), 1);
            waits
        });
        unlocks(a, "write", &name);
        assert_eq!(mode(pair.server, &name).as_deref(), Some("read"));
        // Redisson publishes no message that only readers are left; redlatch does.
        if let Some(waits) = waits {
            assert_eq!(waits.value(), true, "woken");
        }
        takes(b, "read", &name);
        cannot(pair.b.new_worker(), "write", &name);
        unlocks(a, "read", &name);
        unlocks(b, "read", &name);
    }

    fn holds_are_counted_on_both_sides(pair: &Pair) {
        let name = unique("counted");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        takes(a, "read", &name);
        takes(a, "read", &name);
        takes(b, "read", &name);
        assert_eq!(a.number(&format!("holds read {name}")), 2);
        assert_eq!(b.number(&format!("holds read {name}")), 1);
        unlocks(a, "read", &name);
        unlocks(b, "read", &name);
        assert_eq!(a.number(&format!("holds read {name}")), 1);
        cannot(b, "write", &name);
        unlocks(a, "read", &name);
        assert!(b.does(&format!("lock write {name} 0 -1")));
        takes(b, "write", &name);
        unlocks(b, "write", &name);
        cannot(a, "read", &name);
        unlocks(b, "write", &name);
        nothing_left(pair.server, &name);
    }

    fn every_reader_has_a_lease_of_its_own(pair: &Pair) {
        let name = unique("leases");
        let (short, long) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(short.does(&format!("lock read {name} -1 {WATCHDOG}")));
        takes(long, "read", &name);
        let remaining = |worker: Worker<'_>| worker.number(&format!("remaining read {name}"));
        assert!(remaining(short) > WATCHDOG as i64);
        unlocks(long, "read", &name);
        // The long lease ended with its reader.
        assert!(remaining(short) <= WATCHDOG as i64);
        assert!(remaining(long) <= WATCHDOG as i64);
        let writer = pair.b.new_worker();
        assert!(writer.does(&format!("lock write {name} -1 {LEASE}")));
        unlocks(writer, "write", &name);
    }

    fn watchdog_of_the_other_side_does_not_renew_a_dead_reader(pair: &Pair) {
        let name = unique("dead");
        let [mut a, b] = pair.start(&["watchdog=3000"]);
        let (dies, lives) = (a.worker(1), b.worker(1));
        assert!(dies.does(&format!("lock read {name} -1 -1")));
        assert!(lives.does(&format!("lock read {name} -1 -1")));
        a.kill();
        let writer = b.worker(2);
        assert!(!writer.does(&format!("lock write {name} 4000 -1")), "one reads still");
        unlocks(lives, "read", &name);
        assert!(writer.does(&format!("lock write {name} -1 -1")));
        unlocks(writer, "write", &name);
    }

    // Redisson 3.16.8 reports success for the release of a read or write lock that is free.
    @late
    fn forced_unlock_is_a_loss_for_the_other_side(pair: &Pair) {
        let name = unique("forced");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        // A short lease, because Redisson leaves the timeout keys of readers behind.
        assert!(a.does(&format!("lock read {name} -1 {WATCHDOG}")));
        assert!(b.does(&format!("force-unlock read {name}")));
        a.fails(&format!("unlock read {name}"));
        takes(a, "write", &name);
        assert!(b.does(&format!("force-unlock write {name}")));
        a.fails(&format!("unlock write {name}"));
        nothing_left(pair.server, &name);
    }

    // Not with Redisson 3.16.8, to save time: the test in which a reader dies shows that another one is renewed.
    fn watchdog_keeps_a_reader_against_the_other_sides_writer(pair: &Pair) {
        let name = unique("renewed");
        let (a, b) = (pair.a.new_worker(), pair.b.new_worker());
        assert!(a.does(&format!("lock read {name} -1 -1")));
        let beyond = WATCHDOG + WATCHDOG / 3;
        assert!(!b.does(&format!("lock write {name} {beyond} -1")));
        unlocks(a, "read", &name);
        assert!(b.does(&format!("lock write {name} 0 -1")));
        unlocks(b, "write", &name);
    }
}
