//! Standard output. Escapes everything, so that no caller can forget it.

use std::io::{self, ErrorKind, Write as _};

use serde::Serialize;

use crate::escape;
use crate::exit::{self, Failure};

/// Writes lines of text.
pub(crate) fn lines<L: AsRef<str>>(lines: impl IntoIterator<Item = L>) -> Result<u8, Failure> {
    lines_if_open(lines).map(|_| exit::OK)
}

/// Writes lines of text, and returns whether standard output is still read.
pub(crate) fn lines_if_open<L: AsRef<str>>(
    lines: impl IntoIterator<Item = L>,
) -> Result<bool, Failure> {
    let lines = lines.into_iter();
    raw(&lines
        .map(|line| escape::line(line.as_ref()) + "\n")
        .collect::<String>())
}

/// Writes one object a line.
pub(crate) fn json(objects: &[impl Serialize]) -> Result<u8, Failure> {
    json_if_open(objects).map(|_| exit::OK)
}

/// Writes one object a line, and returns whether standard output is still read.
pub(crate) fn json_if_open(objects: &[impl Serialize]) -> Result<bool, Failure> {
    let mut lines = String::new();
    for object in objects {
        let line = escape::to_json(object).map_err(|error| Failure {
            code: exit::SOFTWARE,
            message: error.to_string(),
        })?;
        lines.push_str(&line);
        lines.push('\n');
    }
    raw(&lines)
}

/// Writes text of this program alone, as it is.
pub(crate) fn raw(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        // `redlatch ls | head -1`: the reader has read enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::system("cannot write to standard output", &error)),
    }
}
