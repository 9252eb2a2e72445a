//! The lines that a stream has yet to write. The queue decides which lines are dropped.
//!
//! 1. Lines are written in the order in which they were added.
//! 2. A line that would exceed [`MAX_BYTES`] is dropped and counted. From then on all lines are
//!    dropped until the waiting ones have been written. So the missing lines are one gap, and the
//!    line that reports it stands in its place.
//! 3. A result is never dropped: its command waits until it has been written.

use std::collections::VecDeque;

/// Limit of the waiting lines: more than a thousand of them, four times what a pipe holds.
const MAX_BYTES: usize = 256 * 1024;

/// `R` is how the result of writing is reported.
#[derive(Debug)]
pub(crate) struct LineQueue<R> {
    waiting: VecDeque<Line<R>>,
    bytes: usize,
    dropped: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line<R> {
    pub(crate) text: String,
    /// Where to report that it was written. `None` for messages, for which no command waits.
    pub(crate) reply: Option<R>,
}

/// What a stream writes next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<R> {
    Line(Line<R>),
    /// A report that this number of lines is missing here.
    Dropped(usize),
}

impl<R> LineQueue<R> {
    pub(crate) const fn new() -> LineQueue<R> {
        LineQueue {
            waiting: VecDeque::new(),
            bytes: 0,
            dropped: 0,
        }
    }

    pub(crate) fn add(&mut self, line: Line<R>) {
        // A single line may be longer than the limit.
        let fits = self.waiting.is_empty() || self.bytes + line.text.len() <= MAX_BYTES;
        if line.reply.is_none() && (self.dropped > 0 || !fits) {
            self.dropped += 1;
            return;
        }
        self.bytes += line.text.len();
        self.waiting.push_back(line);
    }

    /// Removes what the stream writes next.
    pub(crate) fn next(&mut self) -> Option<Next<R>> {
        if let Some(line) = self.waiting.pop_front() {
            self.bytes -= line.text.len();
            return Some(Next::Line(line));
        }
        match std::mem::take(&mut self.dropped) {
            0 => None,
            dropped => Some(Next::Dropped(dropped)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.dropped == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> Line<u32> {
        Line {
            text: text.to_owned(),
            reply: None,
        }
    }

    fn result(text: &str) -> Line<u32> {
        Line {
            text: text.to_owned(),
            reply: Some(7),
        }
    }

    /// Returns the next line, or the number of dropped lines.
    fn next(queue: &mut LineQueue<u32>) -> Option<String> {
        queue.next().map(|next| match next {
            Next::Line(line) => line.text,
            Next::Dropped(dropped) => dropped.to_string(),
        })
    }

    /// Returns a queue that is full behind the line `first`.
    fn full() -> LineQueue<u32> {
        let mut queue = LineQueue::new();
        queue.add(message("first"));
        queue.add(message(&"x".repeat(MAX_BYTES - "first".len())));
        queue
    }

    #[test]
    fn lines_keep_their_order() {
        let mut queue = LineQueue::new();
        assert!(queue.is_empty());
        for text in ["a", "b"] {
            queue.add(message(text));
        }
        queue.add(result("c"));
        assert_eq!(next(&mut queue).as_deref(), Some("a"));
        queue.add(message("d"));
        for text in ["b", "c", "d"] {
            assert!(!queue.is_empty());
            assert_eq!(next(&mut queue).as_deref(), Some(text));
        }
        assert!(queue.is_empty());
        assert_eq!(next(&mut queue), None);
    }

    #[test]
    fn gap_is_reported_once_and_in_its_place() {
        let mut queue = full();
        queue.add(message("dropped"));
        assert_eq!(next(&mut queue).as_deref(), Some("first"));
        // It would fit, but then there would be two gaps.
        queue.add(message(""));
        queue.add(result("result"));
        assert_eq!(next(&mut queue).map(|line| line.len()), Some(MAX_BYTES - 5));
        assert_eq!(next(&mut queue).as_deref(), Some("result"));
        assert!(!queue.is_empty());
        assert_eq!(next(&mut queue).as_deref(), Some("2"));
        assert!(queue.is_empty());
        queue.add(message("later"));
        assert_eq!(next(&mut queue).as_deref(), Some("later"));
        assert_eq!(next(&mut queue), None);
    }

    #[test]
    fn results_and_single_long_lines_are_never_dropped() {
        let mut queue = full();
        queue.add(result("result"));
        let lines = std::iter::from_fn(|| next(&mut queue));
        assert_eq!(lines.last().as_deref(), Some("result"));
        queue.add(message(&"x".repeat(MAX_BYTES + 1)));
        assert_eq!(next(&mut queue).map(|line| line.len()), Some(MAX_BYTES + 1));
        assert_eq!(next(&mut queue), None);
    }
}
