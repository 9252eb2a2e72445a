//! When waiters retry, and how long the queue waits for them, to the millisecond. The random histories of
//! the differential test have leases of days, which hide these times.

use std::time::Duration;

use tokio::time::Instant;

use super::Fair;
use super::queue::{FairQueue, Turn};
use super::rules;
use crate::error::Result;
use crate::hold::{AcquireParams, Hold, ReleaseParams};
use crate::keyspace::{Holds, Keyspace};
use crate::lease::Lease;
use crate::step::Outcome;
use crate::step::differential::hold;

const WAIT: u64 = 10_000;
const GRACE: u64 = 800;

struct World {
    keyspace: Keyspace,
}

impl World {
    fn new() -> World {
        let mut keyspace = Keyspace::new(Instant::now());
        keyspace.now_ms();
        World { keyspace }
    }

    fn hold(owner: u8) -> Hold {
        hold(owner, Fair::new("", "name"))
    }

    fn pass(&mut self, millis: u64) {
        self.keyspace.now += Duration::from_millis(millis);
    }

    /// An owner requests the lock. Returns in how many milliseconds it retries, or `None` if it acquired it.
    fn retry_after(&mut self, owner: u8, lease: u64, wait_time: u64) -> Option<u128> {
        match self.request(owner, lease, wait_time).unwrap() {
            Outcome::Done(_) => None,
            Outcome::Wait(left) => Some(left.duration().unwrap().as_millis()),
        }
    }

    fn request(&mut self, owner: u8, lease: u64, wait_time: u64) -> Result<Outcome> {
        let millis = |millis| Lease::new(Duration::from_millis(millis)).unwrap();
        let (hold, kind) = (World::hold(owner), Fair::new("", "name"));
        let turn = Turn {
            params: AcquireParams {
                hold: &hold,
                count: 1,
                lease: millis(lease),
                waits: true,
                request_number: 0,
            },
            wait_time: millis(wait_time),
            grace: millis(GRACE),
        };
        rules::acquire(&kind.keys, turn).apply(&mut self.keyspace)
    }

    /// An owner releases the lock or leaves the queue. Returns the channels of the messages.
    fn woken_by_release(&mut self, owner: u8) -> Vec<String> {
        let (hold, kind) = (World::hold(owner), Fair::new("", "name"));
        let step = rules::release(
            &kind.keys,
            ReleaseParams {
                hold: &hold,
                keep: 0,
                lease: None,
            },
            Lease::new(Duration::from_millis(GRACE)).unwrap(),
        );
        self.keyspace.take_published();
        step.apply(&mut self.keyspace).unwrap();
        let published = self.keyspace.take_published().into_iter();
        published.map(|message| message.channel).collect()
    }

    /// Returns in how many milliseconds the timeout of a waiter passes.
    fn timeout(&mut self, owner: u8) -> i64 {
        let (hold, kind) = (World::hold(owner), Fair::new("", "name"));
        let mut queue = FairQueue::new(&mut self.keyspace, &kind.keys);
        queue.timeout_of(&hold.field).unwrap().unwrap() - queue.now_ms()
    }
}

#[test]
fn waiters_retry_at_the_end_of_the_lease_one_after_the_other() {
    let mut world = World::new();
    assert_eq!(world.retry_after(1, 2000, WAIT), None);
    assert_eq!(world.retry_after(2, 2000, WAIT), Some(2000));
    assert_eq!(world.retry_after(3, 2000, WAIT), Some(2010));
    assert_eq!(world.retry_after(4, 2000, WAIT), Some(2020));
    // At the latest after its own wait time.
    assert_eq!(world.retry_after(5, 2000, 1500), Some(1500));
    world.pass(500);
    assert_eq!(world.retry_after(2, 2000, WAIT), Some(1500));
    assert_eq!(world.retry_after(3, 2000, WAIT), Some(1510));
}

#[test]
fn waiters_of_a_long_lease_retry_from_time_to_time() {
    let mut world = World::new();
    assert_eq!(world.retry_after(1, 100_000, WAIT), None);
    assert_eq!(world.retry_after(2, 2000, WAIT), Some(5000));
    assert_eq!(world.retry_after(3, 2000, WAIT), Some(5010));
    assert_eq!(world.retry_after(4, 2000, WAIT), Some(5020));
}

#[test]
fn waiter_retries_when_the_timeout_of_the_one_before_it_passes() {
    let mut world = World::new();
    assert_eq!(world.retry_after(1, 2000, WAIT), None);
    assert_eq!(world.retry_after(2, 2000, 100), Some(2000));
    assert_eq!(world.retry_after(3, 2000, 1000), Some(1000));
    // The holder renews its lease.
    assert_eq!(world.retry_after(1, 50_000, WAIT), None);
    assert_eq!(world.retry_after(4, 2000, WAIT), Some(3100));
    assert_eq!((world.timeout(2), world.timeout(3)), (2100, 3100));
}

/// A waiter that was woken in place of an absent one leaves the queue: the next one is woken.
#[test]
fn wake_up_of_a_waiter_that_leaves_passes_to_the_next() {
    let mut world = World::new();
    for owner in 1..=4 {
        world.retry_after(owner, 20_000, WAIT);
    }
    let kind = Fair::new("", "name");
    let channel = |owner| kind.keys.waiter_channel(&World::hold(owner).field);
    for owner in [3, 4] {
        world.keyspace.set_subscriber_count(&channel(owner), 1);
    }
    assert_eq!(world.woken_by_release(1).last(), Some(&channel(3)));
    assert_eq!(world.woken_by_release(3).last(), Some(&channel(4)));
}

#[test]
fn absent_waiters_keep_the_lock_free_for_their_grace_period() {
    let mut world = World::new();
    assert_eq!(world.retry_after(1, 2000, WAIT), None);
    for owner in [2, 3, 4] {
        world.retry_after(owner, 2000, WAIT);
    }
    world.pass(2000);
    // No waiter subscribes: 2 and 4 are absent, and 3 sends a request.
    assert_eq!(world.retry_after(3, 2000, WAIT), Some(800));
    world.pass(300);
    // Both before it are absent.
    assert_eq!(world.retry_after(4, 2000, WAIT), Some(500));
    world.pass(500);
    let (head, next) = (world.timeout(2), world.timeout(3));
    // 2 is dropped, and the others are waited for as if it had given up.
    assert_eq!(world.retry_after(4, 2000, WAIT), Some(300));
    assert_eq!(world.timeout(3), next - head);
}

#[test]
fn lock_that_never_expires_is_no_lock_of_ours() {
    let mut world = World::new();
    let hold = World::hold(1);
    let key = hold.object.key().to_owned();
    let holds: &mut Holds = world.keyspace.find_or_create(&key).unwrap();
    holds.counts.insert(hold.field.to_string(), 1);
    assert!(world.request(2, 2000, WAIT).is_err());
}
