//! How much a pair asks of the server.

use redlatch_interop::Library;
use redlatch_testkit::{Monitor, Server};

use crate::sides::Figure;

const PAIRS: usize = 500;

/// Commands that a client sends for one pair; what its scripts call does not count.
pub(crate) fn measure(server: &Server) -> Figure {
    let of = |library: Library| {
        let peer = library.start(&[], &[server.url()]);
        let pair = |name: &str| {
            assert!(peer.worker(1).does(&format!("lock lock {name} -1 -1")));
            assert!(peer.worker(1).does(&format!("unlock lock {name}")));
        };
        // The first one brings the scripts.
        pair("first");
        let mut monitor = Monitor::start(server);
        for _ in 0..PAIRS {
            pair("counted");
        }
        let _: String = server.ask(&["ECHO", "all-pairs-done"]);
        // The end is told by a connection of its own, which says hello first.
        let aside = ["ping", "hello", "client"];
        let sent = monitor
            .until("all-pairs-done")
            .into_iter()
            .filter(|command| !command.in_script && !aside.contains(&&*command.name()));
        sent.count() as f64 / PAIRS as f64
    };
    let name = "commands sent for a pair".to_owned();
    Figure::costs(
        name,
        "commands",
        of(Library::Redisson),
        of(Library::Redlatch),
    )
}
