//! The trace of a run: a readable log, and a hash of it, which is the same for the same seed.

use std::hash::{Hash, Hasher as _};
use std::time::Duration;

use rustc_hash::FxHasher;

/// A hashed trace. Its lines are created only if they are kept.
#[derive(Default)]
pub struct Trace {
    hasher: FxHasher,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// Creates a trace whose lines are kept, or only hashed.
    pub fn new(keeps: bool) -> Trace {
        Trace {
            hasher: FxHasher::default(),
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

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trace").finish_non_exhaustive()
    }
}
