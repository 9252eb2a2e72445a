//! Tests of the read-write lock in the blocking API.

use std::sync::Barrier;
use std::sync::atomic::AtomicI32;
use std::thread;

use redlatch::blocking::current_thread;

use crate::common::prelude::*;

#[test]
fn only_the_writing_thread_can_also_read() {
    on_every_store(|client| {
        let lock = client().read_write_lock(&unique("thread"));
        let (read, write) = (lock.read(), lock.write());
        let writer = write.lock().block().unwrap();
        let reader = read.try_lock().block().unwrap().unwrap();
        let again = write.lock().block().unwrap();
        assert_eq!(writer.owner(), current_thread());
        assert_eq!(write.hold_count(current_thread()).unwrap(), 2);
        assert_eq!(read.hold_count(current_thread()).unwrap(), 1);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert!(write.is_locked().unwrap());
                assert!(!write.is_held_by_current_thread().unwrap());
                assert!(read.try_lock().block().unwrap().is_none());
                let wait = Duration::from_millis(10);
                assert!(retry_if_late_blocking(|| write.try_lock().wait(wait).block()).is_none());
            });
            other.join().unwrap();
        });
        writer.unlock().unwrap();
        again.unlock().unwrap();
        assert!(!write.is_locked().unwrap());
        assert!(read.is_held_by_current_thread().unwrap());
        assert_matches!(write.lock().block(), Err(Error::WriteWhileReading { .. }));
        reader.unlock().unwrap();
        assert!(!read.is_locked().unwrap());
        assert_eq!(lock.name(), read.name());
    });
}

#[test]
fn downgrading_thread_admits_all_waiting_readers() {
    on_every_store(|client| {
        let client = client();
        let lock = client.read_write_lock(&unique("downgrade"));
        let lock = lock.prefer_writers();
        let writer = lock.write().lock().block().unwrap();
        let inside = Barrier::new(5);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let reader = lock.read().lock().block().unwrap();
                    inside.wait();
                    reader.unlock().unwrap();
                });
            }
            while client.status().subscriptions == 0 {
                thread::yield_now();
            }
            let reader = writer.downgrade().unwrap();
            assert!(reader.is_valid());
            inside.wait();
            reader.unlock().unwrap();
        });
        client.flush().unwrap();
        assert_eq!(client.status().holds, 0);
        let writer = lock.write().try_lock().wait(LONG).block();
        drop(writer.unwrap().expect("within its limit"));

        let brief = Duration::from_millis(50);
        let writer = retry_if_late_blocking(|| lock.write().lock().lease(brief).block());
        while writer.is_valid() {
            thread::yield_now();
        }
        assert!(matches!(writer.downgrade(), Err(Error::Lost { .. })));
    });
}

#[test]
fn reading_and_writing_threads_exclude_each_other() {
    on_every_store(|client| {
        let name = unique("threads");
        let clients = [client(), client()];
        let inside = AtomicI32::new(0);
        thread::scope(|scope| {
            for n in 0..8 {
                let (lock, inside) = (clients[n % 2].read_write_lock(&name), &inside);
                scope.spawn(move || {
                    for turn in 0..20 {
                        if (n + turn) % 3 == 0 {
                            let guard = lock.write().lock().block().unwrap();
                            assert_eq!(inside.swap(-1000, Ordering::SeqCst), 0);
                            thread::yield_now();
                            inside.store(0, Ordering::SeqCst);
                            guard.unlock().unwrap();
                        } else {
                            let guard = lock.read().lock().block().unwrap();
                            assert!(inside.fetch_add(1, Ordering::SeqCst) >= 0);
                            thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            guard.unlock().unwrap();
                        }
                    }
                });
            }
        });
    });
}
