//! Results on standard output. Escapes everything, so that no caller can forget it. Each function
//! returns when all of it is written ([`streams`](crate::streams)).

use std::io::ErrorKind;

use serde::Serialize;

use crate::escape;
use crate::exit::{self, Failure};
use crate::streams::STDOUT;

/// Writes lines of text.
pub(crate) async fn lines<L: AsRef<str>>(
    lines: impl IntoIterator<Item = L>,
) -> Result<u8, Failure> {
    lines_if_open(lines).await.map(|_| exit::OK)
}

/// Writes lines of text, and returns whether standard output is still read.
pub(crate) async fn lines_if_open<L: AsRef<str>>(
    lines: impl IntoIterator<Item = L>,
) -> Result<bool, Failure> {
    let lines = lines.into_iter();
    let text = lines.map(|line| escape::line(line.as_ref()) + "\n");
    raw(text.collect()).await
}

/// Writes one object a line.
pub(crate) async fn json(objects: &[impl Serialize]) -> Result<u8, Failure> {
    json_if_open(objects).await.map(|_| exit::OK)
}

/// Writes one object a line, and returns whether standard output is still read.
pub(crate) async fn json_if_open(objects: &[impl Serialize]) -> Result<bool, Failure> {
    let mut lines = String::new();
    for object in objects {
        let line = escape::to_json(object).map_err(|error| Failure {
            code: exit::SOFTWARE,
            message: error.to_string(),
        })?;
        lines.push_str(&line);
        lines.push('\n');
    }
    raw(lines).await
}

/// Writes text of this program alone, as it is. Returns whether standard output is still read.
pub(crate) async fn raw(text: String) -> Result<bool, Failure> {
    match STDOUT.write(text).await {
        Ok(()) => Ok(true),
        // `redlatch ls | head -1`: the reader has read enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::system("cannot write to standard output", &error)),
    }
}
