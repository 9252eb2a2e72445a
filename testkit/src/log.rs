//! A log that is kept in memory.

use std::sync::{Arc, Mutex};

/// A log that can be looked into. Clones write to the same one.
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
    /// All that was written.
    ///
    /// # Panics
    ///
    /// When another thread panicked while it wrote.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// The lines with all of these words.
    pub fn lines(&self, words: &[&str]) -> Vec<String> {
        let text = self.text();
        let about = |line: &&str| words.iter().all(|word| line.contains(word));
        text.lines().filter(about).map(str::to_owned).collect()
    }
}
