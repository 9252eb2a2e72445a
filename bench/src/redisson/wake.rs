//! From a release in one process to the acquisition in another that waits for it.

use std::time::{Duration, Instant};

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;

use crate::figures::{median, micros, quantile};
use crate::options::Options;
use crate::sides::{Figure, Sides};

/// How long it is held each time: enough for the other one to have asked, to listen, and to have gone to sleep.
const HOLDING: Duration = Duration::from_millis(10);

pub(crate) fn measure(server: &Server, sides: &Sides, options: &Options) -> [Figure; 2] {
    let start = |library: Library| library.start(&[], &[server.url()]);
    let (java, rust) = (start(Library::Redisson), start(Library::Redlatch));
    let begun = Instant::now();
    while begun.elapsed() < options.warm_up {
        wake(&sides.redisson, &java, "wake-theirs");
    }
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..options.wakes {
        theirs.push(wake(&sides.redisson, &java, "wake-theirs"));
        ours.push(wake(&sides.redlatch, &rust, "wake-ours"));
    }
    let figure = |what: &str, of: fn(&[f64]) -> f64| {
        let name = format!("release to acquisition in another process, {what}");
        Figure::costs(name, "us", of(&theirs), of(&ours))
    };
    [
        figure("median", median),
        figure("p99", |samples| quantile(samples, 0.99)),
    ]
}

/// From calling `unlock` to having it there, in µs.
fn wake(holds: &Peer, waits: &Peer, name: &str) -> f64 {
    let (holds, waits) = (holds.worker(2), waits.worker(2));
    holds.ask(&format!("lock lock {name} -1 -1"));
    let waiting = waits.tell(&format!("lock lock {name} -1 -1"));
    std::thread::sleep(HOLDING);
    let released = holds.tell(&format!("unlock lock {name}")).answer();
    let had = waiting.answer();
    waits.ask(&format!("unlock lock {name}"));
    micros(Duration::from_nanos(had.at.abs_diff(released.from)))
}
