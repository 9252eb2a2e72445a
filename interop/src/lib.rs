//! Processes that are told what to do with their locks: one on the real Redisson, one on redlatch. See `interop/PROTOCOL.md`.
#![forbid(unsafe_code)]

mod peer;

pub use peer::{Answer, Peer, Pending, Worker};

use std::path::{Path, PathBuf};
use std::process::Command;

/// Which library a peer is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The newest Redisson.
    Redisson,
    /// A late one of the line before, which many still run.
    Redisson3,
    /// An old one, of January 2022, which some still run.
    Redisson316,
    /// This one.
    Redlatch,
}

impl Library {
    /// How many there are: `library as usize` is below it.
    pub const COUNT: usize = 4;

    /// Starts a peer on it.
    ///
    /// # Panics
    ///
    /// When it has not been built, or does not come up.
    pub fn start(self, settings: &[&str], urls: &[String]) -> Peer {
        self.start_with(&[], settings, urls)
    }

    /// The same, with options for the Java machine.
    ///
    /// # Panics
    ///
    /// As [`Library::start`].
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

    /// Its version as it stands in `interop/java/versions`, of redlatch that of this workspace.
    ///
    /// # Panics
    ///
    /// When that file is not there.
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
            "{} is not there: `make interop` builds it",
            classes.display()
        );
        format!("{}:{}", classes.display(), built.join("lib/*").display())
    }
}

fn java() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("java")
}

/// Beside the test or benchmark that runs: cargo builds it with them.
fn rust_peer() -> PathBuf {
    let mut here = std::env::current_exe().expect("this program");
    here.pop();
    if here.ends_with("deps") {
        here.pop();
    }
    here.join("redlatch-peer")
}
