//! Results on standard output. Escapes everything, so that no caller can forget it. Each function
//! returns when all of it is written ([`streams`](crate::output::streams)).

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::stdio;
use serde::Serialize;
use tokio::sync::oneshot;

use super::escape;
use super::streams::STDOUT;
use crate::exit::{self, Failure};
use crate::threads::spawn_without_signals;

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

/// Returns what completes when standard output is a pipe or a terminal that is closed. Without it,
/// a watch would notice that only when it prints the next event.
pub(crate) fn reader_left() -> Result<oneshot::Receiver<()>, Failure> {
    let (sender, receiver) = oneshot::channel();
    let wait = move || {
        let stdout = io::stdout();
        // With no flags it waits only for errors and hang-ups.
        let mut polled = [PollFd::new(&stdout, PollFlags::empty())];
        loop {
            match poll(&mut polled, None) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                // It cannot be observed; writing reports errors.
                Err(_) => std::thread::park(),
            }
        }
        let _ = sender.send(());
    };
    spawn_without_signals("stdout", wait)
        .map_err(|error| Failure::system("cannot watch standard output", &error))?;
    Ok(receiver)
}

/// Returns whether standard output was closed when this process started. The standard library has
/// then opened `/dev/null` in its place, for reading and writing. Shells open it only for writing.
pub(crate) fn is_closed() -> bool {
    let is_null = || {
        let stdout = File::from(stdio::stdout().try_clone_to_owned()?).metadata()?;
        Ok::<_, io::Error>(stdout.rdev() == fs::metadata("/dev/null")?.rdev())
    };
    is_null().unwrap_or(false) && rustix::io::read(stdio::stdout(), &mut [0]).is_ok()
}
