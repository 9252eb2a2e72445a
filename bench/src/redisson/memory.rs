//! What a process that holds many locks needs.

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;

use crate::options::Options;
use crate::sides::Figure;

pub(crate) fn measure(server: &Server, options: &Options) -> [Figure; 2] {
    let of = |library: Library| {
        let peer = library.start(&[], &[server.url()]);
        let before = resident(&peer);
        peer.worker(1)
            .ask(&format!("hold-many held-{library:?}- {}", options.locks));
        (before, resident(&peer))
    };
    let (theirs, ours) = (of(Library::Redisson), of(Library::Redlatch));
    let locks = options.locks;
    [
        Figure::costs(
            format!("memory of the process that holds {locks} locks"),
            "MB",
            theirs.1,
            ours.1,
        ),
        Figure::costs(
            "  of that, more than before it took them".to_owned(),
            "MB",
            theirs.1 - theirs.0,
            ours.1 - ours.0,
        ),
    ]
}

/// What is really there of it, in MB.
fn resident(peer: &Peer) -> f64 {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", peer.pid())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    kilobytes
        .and_then(|kb| kb.trim().parse::<f64>().ok())
        .unwrap_or(f64::NAN)
        / 1024.0
}
