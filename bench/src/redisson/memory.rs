//! Memory of a process that holds many locks.

use redlatch_interop::{Library, Peer};
use redlatch_testkit::Server;

use crate::options::Options;
use crate::resident_memory::resident_memory;
use crate::sides::Figure;

pub(crate) fn measure(server: &Server, options: &Options) -> std::io::Result<[Figure; 2]> {
    let of = |library: Library| -> std::io::Result<_> {
        let peer = library.start(&[], &[server.url()]);
        let before = mebibytes(&peer)?;
        peer.worker(1)
            .run(&format!("hold-many held-{library:?}- {}", options.locks));
        Ok((before, mebibytes(&peer)?))
    };
    let (redisson, redlatch) = (of(Library::Redisson)?, of(Library::Redlatch)?);
    let locks = options.locks;
    Ok([
        Figure::costs(
            format!("memory of the process that holds {locks} locks"),
            "MiB",
            redisson.1,
            redlatch.1,
        ),
        Figure::costs(
            "  of that, growth while it acquired them".to_owned(),
            "MiB",
            redisson.1 - redisson.0,
            redlatch.1 - redlatch.0,
        ),
    ])
}

/// Returns the resident memory of the process in MiB.
fn mebibytes(peer: &Peer) -> std::io::Result<f64> {
    Ok(resident_memory(&peer.pid().to_string())? as f64 / f64::from(1 << 20))
}
