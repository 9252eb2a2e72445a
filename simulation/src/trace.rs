//! The trace of a run: a readable log, and a hash of it, which is the same for the same seed.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

/// A hashed trace. Its lines are created only if they are kept.
#[derive(Debug, Default)]
pub struct Trace {
    hasher: DefaultHasher,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// Creates a trace whose lines are kept, or only hashed.
    pub fn new(keeps: bool) -> Trace {
        Trace {
            hasher: DefaultHasher::new(),
            lines: keeps.then(Vec::new),
        }
    }

    /// Adds a fact, and the line that describes it.
    pub fn add(&mut self, at: Duration, fact: impl Hash, text: impl FnOnce() -> String) {
        (at, fact).hash(&mut self.hasher);
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>9.3} s  {}", at.as_secs_f64(), text()));
        }
    }

    /// Returns the hash of everything that was added.
    pub fn hash(&self) -> u64 {
        self.hasher.finish()
    }

    /// Returns the lines, if they are kept.
    pub fn take_lines(&mut self) -> Vec<String> {
        self.lines.take().unwrap_or_default()
    }
}
