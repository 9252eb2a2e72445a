//! What happened, for a person to read; and a hash of it, which is the same for the same seed.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

/// A trace that is hashed, and kept if somebody wants to read it.
#[derive(Debug, Default)]
pub struct Trace {
    hasher: DefaultHasher,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// A trace whose lines are kept, or only hashed.
    pub fn new(keeps: bool) -> Trace {
        Trace {
            hasher: DefaultHasher::new(),
            lines: keeps.then(Vec::new),
        }
    }

    /// Adds a line.
    pub fn line(&mut self, at: Duration, text: impl FnOnce() -> String) {
        let text = text();
        (at, &text).hash(&mut self.hasher);
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>9.3} s  {text}", at.as_secs_f64()));
        }
    }

    /// Adds bytes that have arrived.
    pub fn bytes(&mut self, at: Duration, from: &str, to: &str, bytes: &[u8]) {
        (at, from, to, bytes).hash(&mut self.hasher);
        if let Some(lines) = &mut self.lines {
            let text = String::from_utf8_lossy(bytes).replace("\r\n", " ");
            let text: String = text.chars().take(600).collect();
            lines.push(format!(
                "{:>9.3} s  {from} -> {to}: {text}",
                at.as_secs_f64()
            ));
        }
    }

    /// What identifies everything that was added.
    pub fn hash(&self) -> u64 {
        self.hasher.finish()
    }

    /// The lines, if they are kept.
    pub fn take_lines(&mut self) -> Vec<String> {
        self.lines.take().unwrap_or_default()
    }
}
