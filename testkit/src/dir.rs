//! A directory for as long as it is needed.

use std::path::{Path, PathBuf};

use crate::keeper::Keeper;

/// A directory of its own, for the files of servers. Removed with all that is in it when dropped,
/// and also when this process dies.
#[derive(Debug)]
pub(crate) struct Dir {
    path: PathBuf,
    _keeper: Keeper,
}

/// Removes the directory when standard input ends. Servers may be writing to it until they are
/// killed, so once may be too few. A Ctrl-C at the terminal is for the tests, not for this.
const REMOVER: &str = r#"
trap '' INT TERM HUP
read -r _
for attempt in 1 2 3 4 5; do
    rm -rf "$1" 2>/dev/null && exit
    sleep 1
done
"#;

impl Dir {
    /// An empty directory among the temporary files.
    pub(crate) fn new() -> Dir {
        let path = std::env::temp_dir().join(crate::unique("redlatch-testkit"));
        // One of an earlier process with the same number, which the machine's end left behind.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a place for temporary files");
        let keeper = Keeper::start(REMOVER, &[path.to_string_lossy().into_owned()]);
        Dir {
            path,
            _keeper: keeper,
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}
