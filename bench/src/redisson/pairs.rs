//! Acquire/release pairs per second.

use std::time::{Duration, Instant};

use redlatch_interop::{Library, Peer, Pending};
use redlatch_testkit::Server;

use crate::options::Options;
use crate::sides::{Figure, Sides};

/// Runs until the JVM has compiled the frequently executed code.
pub(crate) fn warm_up(sides: &Sides, options: &Options) {
    let begun = Instant::now();
    let mut threads = [128, 16, 1].into_iter().cycle();
    // Twice the time, because the two sides run one after the other.
    while begun.elapsed() < 2 * options.warm_up {
        let threads = threads.next().unwrap_or(1);
        for peer in [&sides.redisson, &sides.redlatch] {
            rate(&[peer], "pairs", "warm", threads, options.round);
        }
    }
}

/// Each thread or task has its own lock.
pub(crate) fn uncontended(sides: &Sides, threads: usize, options: &Options) -> Figure {
    let name = format!("uncontended, threads or tasks: {threads}");
    alternate(name, options, |library| {
        let name = format!("own-{library:?}-");
        rate(
            &[sides.peer(library)],
            "pairs",
            &name,
            threads,
            options.round,
        )
    })
}

/// All tasks compete for one lock, in one process.
pub(crate) fn contended(sides: &Sides, options: &Options) -> Figure {
    alternate(
        "one lock, 16 in one process".to_owned(),
        options,
        |library| {
            let name = format!("one-{library:?}");
            rate(&[sides.peer(library)], "contend", &name, 16, options.round)
        },
    )
}

/// All tasks compete for one lock, in four processes.
pub(crate) fn contended_over_processes(
    server: &Server,
    sides: &Sides,
    options: &Options,
) -> Figure {
    let more: Vec<Sides> = (0..3).map(|_| Sides::start(server)).collect();
    let all: Vec<&Sides> = more.iter().chain([sides]).collect();
    let peers = |library| -> Vec<&Peer> { all.iter().map(|sides| sides.peer(library)).collect() };
    let begun = Instant::now();
    while begun.elapsed() < options.warm_up {
        for library in [Library::Redisson, Library::Redlatch] {
            rate(&peers(library), "contend", "warm-all", 4, options.round);
        }
    }
    let name = "one lock, 4 processes with 4 each".to_owned();
    alternate(name, options, |library| {
        let name = format!("all-{library:?}");
        rate(&peers(library), "contend", &name, 4, options.round)
    })
}

/// Runs rounds with both libraries, each of which is first equally often.
fn alternate(name: String, options: &Options, rate: impl Fn(Library) -> f64) -> Figure {
    let (mut redisson, mut redlatch) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let mut order = [Library::Redlatch, Library::Redisson];
        if round % 2 != 0 {
            order.reverse();
        }
        for library in order {
            let rates = match library {
                Library::Redlatch => &mut redlatch,
                _ => &mut redisson,
            };
            rates.push(rate(library));
        }
    }
    Figure::rates(name, "pairs/s", &redisson, &redlatch)
}

/// Returns the total pairs per second of these peers.
fn rate(peers: &[&Peer], command: &str, name: &str, threads: usize, time: Duration) -> f64 {
    let ms = time.as_millis();
    let command = format!("{command} lock {name} {threads} {ms}");
    let begun = Instant::now();
    let done: Vec<Pending> = peers
        .iter()
        .map(|peer| peer.worker(1).send(&command))
        .collect();
    let pairs: u64 = done.into_iter().flat_map(Pending::numbers).sum();
    pairs as f64 / begun.elapsed().as_secs_f64()
}
