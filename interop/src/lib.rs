//! Peers: processes that run commands on locks, one with the real Redisson, one with redlatch. See
//! `interop/PROTOCOL.md`.
#![forbid(unsafe_code)]

mod peer;

pub use peer::{Answer, Peer, Pending, Worker};

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library that a peer uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The newest Redisson.
    Redisson,
    /// A late 3.x version, which is still widely used.
    Redisson3,
    /// An old version, of January 2022, which is still in use.
    Redisson316,
    /// redlatch.
    Redlatch,
}

impl Library {
    /// Number of libraries: `library as usize` is below it.
    pub const COUNT: usize = 4;

    /// Starts a peer on this library.
    ///
    /// # Panics
    ///
    /// If it has not been built, or does not start.
    pub fn start(self, settings: &[&str], urls: &[String]) -> Peer {
        self.start_with(&[], settings, urls)
    }

    /// Like [`Library::start`], with options for the JVM.
    ///
    /// # Panics
    ///
    /// Like [`Library::start`].
    pub fn start_with(self, java: &[&str], settings: &[&str], urls: &[String]) -> Peer {
        let mut command = match self {
            Library::Redlatch => Command::new(rust_peer()),
            Library::Redisson | Library::Redisson3 | Library::Redisson316 => {
                let mut command = Command::new("java");
                command.args(java).arg("-cp").arg(self.classes());
                command.arg("org.redlatch.interop.Peer");
                command
            }
        };
        command.args(settings).args(urls);
        Peer::start(command)
    }

    /// Returns its version from `interop/java/versions`; for redlatch that of this workspace.
    ///
    /// # Panics
    ///
    /// If that file does not exist.
    pub fn version(self) -> String {
        let line = match self {
            Library::Redisson => 0,
            Library::Redisson3 => 1,
            Library::Redisson316 => 2,
            Library::Redlatch => return env!("CARGO_PKG_VERSION").to_owned(),
        };
        let file = java().join("versions");
        let versions = std::fs::read_to_string(&file).expect("interop/java/versions");
        let version = versions.lines().nth(line).expect("three versions");
        version.trim().to_owned()
    }

    fn classes(self) -> String {
        let built = java().join("target").join(self.version());
        let classes = built.join("classes");
        assert!(
            classes.exists(),
            "{} does not exist; `make interop` builds it",
            classes.display()
        );
        format!("{}:{}", classes.display(), built.join("lib/*").display())
    }
}

fn java() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("java")
}

/// Returns the path of the peer, which cargo builds next to the running test or benchmark.
fn rust_peer() -> PathBuf {
    let mut here = std::env::current_exe().expect("this program");
    here.pop();
    if here.ends_with("deps") {
        here.pop();
    }
    here.join("redlatch-peer")
}
