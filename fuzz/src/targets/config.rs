//! Configuration files of the command.

use std::path::PathBuf;
use std::sync::LazyLock;

use crate::args::config::Config;
use crate::store::args::StoreArgs;

/// The file that the command reads: in memory, if the system has such a file system.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let folder = match memory.is_dir() {
        true => memory,
        false => std::env::temp_dir(),
    };
    folder.join(format!("redlatch-fuzz-{}.toml", std::process::id()))
});

/// Reads a file with this content. An error names the file in one line, and its settings can be applied.
pub fn run(data: &[u8]) {
    if std::fs::write(&*FILE, data).is_err() {
        return;
    }
    let loaded = Config::load(Some(FILE.as_os_str()));
    let _ = std::fs::remove_file(&*FILE);
    match loaded {
        Ok(config) => StoreArgs::default().fill_from(config.store_args),
        Err(failure) => {
            let message = failure.message;
            assert!(message.contains(&*FILE.to_string_lossy()), "{message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }
}
