//! A temporary directory.

use std::path::{Path, PathBuf};

use crate::child_guard::ChildGuard;

/// A temporary directory for the files of servers. It is removed with its contents when dropped,
/// and also when this process dies.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
    _guard: ChildGuard,
}

/// Removes the directory when standard input ends. Servers may write to it until they are killed,
/// so the script tries several times. It ignores signals: a Ctrl-C at the terminal is meant for the
/// tests.
const REMOVE_SCRIPT: &str = r#"
trap '' INT TERM HUP
read -r _
for attempt in 1 2 3 4 5; do
    rm -rf "$1" 2>/dev/null && exit
    sleep 1
done
"#;

impl Default for TempDir {
    fn default() -> TempDir {
        TempDir::new()
    }
}

impl TempDir {
    /// Creates an empty directory in the system's temporary directory.
    ///
    /// # Panics
    ///
    /// If it cannot be created.
    pub fn new() -> TempDir {
        let path = std::env::temp_dir().join(crate::unique("redlatch-testkit"));
        // A previous process with the same process id may have left it behind when the machine
        // stopped.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a directory for temporary files");
        let guard = ChildGuard::start(REMOVE_SCRIPT, &[path.to_string_lossy().into_owned()]);
        TempDir {
            path,
            _guard: guard,
        }
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
