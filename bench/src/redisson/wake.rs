//! The time from a release in one process to the acquisition by a waiter in another.

use std::time::{Duration, Instant};

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;

use crate::options::Options;
use crate::samples::{median, micros, quantile};
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
        let name = format!("release to acquisition in another process, {what}");
        Figure::costs(name, "us", theirs, ours)
    };
    [
        figure("median", median(theirs), median(ours)),
        figure("p99", p99(theirs), p99(ours)),
        // Each library waits for the other. The figure counts for the library that waits.
        figure(
            "held by the other library, median",
            median(by_ours),
            median(by_theirs),
        ),
        figure(
            "held by the other library, p99",
            p99(by_ours),
            p99(by_theirs),
        ),
    ]
}

/// Returns the time from calling `unlock` to the acquisition by the waiter, in µs.
fn wake(holder: &Peer, waiter: &Peer, name: &str) -> f64 {
    let (holder, waiter) = (holder.worker(2), waiter.worker(2));
    assert!(holder.run_bool(&format!("lock lock {name} -1 -1")));
    let waiting = waiter.send(&format!("lock lock {name} -1 -1"));
    std::thread::sleep(HOLD_TIME);
    let released = holder.send(&format!("unlock lock {name}")).answer();
    let acquired = waiting.answer();
    assert!(
        released.result.is_ok() && acquired.result.is_ok(),
        "{released:?} {acquired:?}"
    );
    assert!(waiter.run_bool(&format!("unlock lock {name}")));
    let took = u64::try_from(acquired.ended - released.started);
    micros(Duration::from_nanos(
        took.expect("it was acquired while it was held"),
    ))
}
