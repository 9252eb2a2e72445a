//! A temporary directory.

use std::path::{Path, PathBuf};

use crate::keeper::Keeper;

/// A temporary directory for the files of servers. It is removed with its contents when dropped,
/// and also when this process dies.
#[derive(Debug)]
pub(crate) struct Dir {
    path: PathBuf,
    _keeper: Keeper,
}

/// Removes the directory when standard input ends. Servers may write to it until they are killed,
/// so the script tries several times. It ignores signals: a Ctrl-C at the terminal is meant for the
/// tests.
const REMOVER: &str = r#"
trap '' INT TERM HUP
read -r _
for attempt in 1 2 3 4 5; do
    rm -rf "$1" 2>/dev/null && exit
    sleep 1
done
"#;

impl Dir {
    /// Creates an empty directory in the system's temporary directory.
    pub(crate) fn new() -> Dir {
        let path = std::env::temp_dir().join(crate::unique("redlatch-testkit"));
        // A previous process with the same process id may have left it behind when the machine
        // stopped.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a directory for temporary files");
        let keeper = Keeper::start(REMOVER, &[path.to_string_lossy().into_owned()]);
        Dir {
            path,
            _keeper: keeper,
        }
    }

    /// Returns its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}
