//! Commands that the server receives for one pair.

use redlatch_interop::Library;
use redlatch_testkit::{Monitor, Server};

use crate::sides::Figure;

const PAIRS: usize = 500;

/// Returns the number of commands that a client sends for one pair, not counting calls in scripts.
pub(crate) fn measure(server: &Server) -> Figure {
    let of = |library: Library| {
        let peer = library.start(&[], &[server.url()]);
        let pair = |name: &str| {
            assert!(peer.worker(1).run_bool(&format!("lock lock {name} -1 -1")));
            assert!(peer.worker(1).run_bool(&format!("unlock lock {name}")));
        };
        // The first pair loads the scripts.
        pair("first");
        let mut monitor = Monitor::start(server);
        for _ in 0..PAIRS {
            pair("counted");
        }
        monitor.count_sent(server) as f64 / PAIRS as f64
    };
    let name = "commands sent for a pair".to_owned();
    Figure::costs(
        name,
        "commands",
        of(Library::Redisson),
        of(Library::Redlatch),
    )
}
