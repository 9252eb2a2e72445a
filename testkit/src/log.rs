//! A log in memory.

use std::sync::{Arc, Mutex};

/// A log that tests can inspect. All clones write to the same log.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Returns the whole text.
    ///
    /// # Panics
    ///
    /// If another thread panicked while writing.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// Returns the lines that contain all of these words.
    pub fn lines(&self, words: &[&str]) -> Vec<String> {
        let text = self.text();
        let about = |line: &&str| words.iter().all(|word| line.contains(word));
        text.lines().filter(about).map(str::to_owned).collect()
    }
}
