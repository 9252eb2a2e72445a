//! The time from a release in one process to the acquisition by a waiter in another.

use std::time::{Duration, Instant};

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;

use crate::figures::{median, micros, quantile};
use crate::options::Options;
use crate::sides::{Figure, Sides};

/// How long the lock is held each time: long enough for the waiter to try, to subscribe, to retry
/// and to sleep.
const HOLD_TIME: Duration = Duration::from_millis(10);

pub(crate) fn measure(server: &Server, sides: &Sides, options: &Options) -> [Figure; 4] {
    let start = |library: Library| library.start(&[], &[server.url()]);
    let (java, rust) = (start(Library::Redisson), start(Library::Redlatch));
    let begun = Instant::now();
    while begun.elapsed() < options.warm_up {
        wake(&sides.redisson, &java, "wake-theirs");
        wake(&sides.redlatch, &rust, "wake-ours");
        wake(&sides.redlatch, &java, "wake-mixed");
        wake(&sides.redisson, &rust, "wake-mixed");
    }
    let mut samples = [const { Vec::new() }; 4];
    for _ in 0..options.wakes {
        let [theirs, ours, by_theirs, by_ours] = &mut samples;
        theirs.push(wake(&sides.redisson, &java, "wake-theirs"));
        ours.push(wake(&sides.redlatch, &rust, "wake-ours"));
        by_ours.push(wake(&sides.redlatch, &java, "wake-mixed"));
        by_theirs.push(wake(&sides.redisson, &rust, "wake-mixed"));
    }
    let [theirs, ours, by_theirs, by_ours] = &samples;
    let p99 = |samples: &[f64]| quantile(samples, 0.99);
    let figure = |what: &str, theirs: f64, ours: f64| {
        let name = format!("release to acquisition elsewhere, {what}");
        Figure::costs(name, "us", theirs, ours)
    };
    [
        figure("median", median(theirs), median(ours)),
        figure("p99", p99(theirs), p99(ours)),
        // Each side waits for the other; the figures are named after the waiting side.
        figure("of the other, median", median(by_ours), median(by_theirs)),
        figure("of the other, p99", p99(by_ours), p99(by_theirs)),
    ]
}

/// Returns the time from calling `unlock` to the acquisition by the waiter, in µs.
fn wake(holds: &Peer, waits: &Peer, name: &str) -> f64 {
    let (holds, waits) = (holds.worker(2), waits.worker(2));
    assert!(holds.does(&format!("lock lock {name} -1 -1")));
    let waiting = waits.tell(&format!("lock lock {name} -1 -1"));
    std::thread::sleep(HOLD_TIME);
    let released = holds.tell(&format!("unlock lock {name}")).answer();
    let had = waiting.answer();
    assert!(
        released.result.is_ok() && had.result.is_ok(),
        "{released:?} {had:?}"
    );
    assert!(waits.does(&format!("unlock lock {name}")));
    let took = u64::try_from(had.at - released.from);
    micros(Duration::from_nanos(
        took.expect("it was acquired while it was held"),
    ))
}
