//! Standard output and standard error: everything that the command prints, except for the view of
//! `top`.
//!
//! 1. Lines are added to the queue of a stream ([`LineQueue`]), and a thread of that stream writes
//!    them. A reader that does not read, or a terminal whose output is stopped (Ctrl-S), delays
//!    only that thread. Renewals, losses and signals are handled on others.
//! 2. Nothing waits for a message. If too many are waiting, further ones are dropped.
//! 3. A command waits until its result is written, and learns of an error.
//! 4. At the end of the process the waiting lines are written, for at most [`END_LIMIT`]
//!    ([`WrittenAtEnd`]). The process then ends although a thread still waits for a reader.
//!
//! Not used: the locked handles of the standard library. A thread that waits for a reader would
//! keep their lock, and a panic of another thread would wait for it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::stdio;
use tokio::sync::oneshot;

use super::dropped_text;
use super::line_queue::{Line, LineQueue, Next};
use crate::threads::spawn_without_signals;

/// How long the end of the process waits for a reader that does not read.
const END_LIMIT: Duration = Duration::from_secs(1);

pub(crate) static STDOUT: Stream = Stream::new(stdio::stdout, false);
pub(crate) static STDERR: Stream = Stream::new(stdio::stderr, true);

pub(crate) struct Stream {
    fd: fn() -> BorrowedFd<'static>,
    /// Whether it also writes in the background of a terminal at which that would stop this
    /// process (`stty tostop`).
    writes_in_background: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

type Reply = oneshot::Sender<io::Result<()>>;

struct State {
    queue: LineQueue<Reply>,
    has_thread: bool,
    is_writing: bool,
}

impl Stream {
    const fn new(fd: fn() -> BorrowedFd<'static>, writes_in_background: bool) -> Stream {
        Stream {
            fd,
            writes_in_background: AtomicBool::new(writes_in_background),
            state: Mutex::new(State {
                queue: LineQueue::new(),
                has_thread: false,
                is_writing: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Starts the thread. Otherwise the first line starts it, when the system may have none left.
    pub(crate) fn start(&'static self) {
        self.start_thread(&mut self.lock());
    }

    /// Lets it write in the background, too. Before its first line.
    pub(crate) fn write_in_background(&self) {
        self.writes_in_background.store(true, Ordering::Relaxed);
    }

    /// Writes a message later, unless too many are waiting.
    pub(crate) fn send(&'static self, text: String) {
        self.add(Line { text, reply: None });
    }

    /// Writes a result. Returns when it has been written, or an error. If the future is dropped,
    /// the result may still be written.
    pub(crate) async fn write(&'static self, text: String) -> io::Result<()> {
        let (reply, written) = oneshot::channel();
        let has_thread = self.add(Line {
            text,
            reply: Some(reply),
        });
        if !has_thread {
            self.write_waiting();
        }
        // The thread reports everything that it takes.
        written.await.unwrap_or_else(|_| Err(Errno::IO.into()))
    }

    /// Adds a line. Returns whether a thread writes it: the system may have none left.
    fn add(&'static self, line: Line<Reply>) -> bool {
        let mut state = self.lock();
        state.queue.add(line);
        let has_thread = self.start_thread(&mut state);
        drop(state);
        self.changed.notify_all();
        has_thread
    }

    fn start_thread(&'static self, state: &mut State) -> bool {
        if !state.has_thread {
            let thread = spawn_without_signals("output", || self.write_forever());
            state.has_thread = thread.is_ok();
        }
        state.has_thread
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_forever(&self) {
        if !self.writes_in_background.load(Ordering::Relaxed) {
            let _ = SigSet::from(Signal::SIGTTOU).thread_unblock();
        }
        loop {
            self.write_waiting();
            let mut state = self.lock();
            while state.queue.is_empty() {
                let changed = self.changed.wait(state);
                state = changed.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn write_waiting(&self) {
        let mut state = self.lock();
        while let Some(next) = state.queue.next() {
            state.is_writing = true;
            drop(state);
            let line = match next {
                Next::Line(line) => line,
                Next::Dropped(lines) => Line {
                    text: dropped_text(lines),
                    reply: None,
                },
            };
            // Without a reader a message is lost. `redlatch` must not abandon CMD because of that.
            let result = write_all((self.fd)(), line.text.as_bytes());
            if let Some(reply) = line.reply {
                let _ = reply.send(result);
            }
            state = self.lock();
            state.is_writing = false;
            self.changed.notify_all();
        }
    }

    fn wait_until_written(&self, deadline: Instant) {
        let mut state = self.lock();
        if !state.has_thread {
            drop(state);
            return self.write_waiting();
        }
        while state.is_writing || !state.queue.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let changed = self.changed.wait_timeout(state, left);
            state = changed.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Writes a text with a single call if possible, so that lines of several processes do not mix.
fn write_all(fd: BorrowedFd<'_>, mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match rustix::io::write(fd, text) {
            Ok(written) => text = &text[written..],
            Err(Errno::INTR) => {}
            // Another process with this stream, such as CMD, has changed its mode.
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits when dropped, also by a panic: see [`END_LIMIT`].
pub(crate) struct WrittenAtEnd;

impl Drop for WrittenAtEnd {
    fn drop(&mut self) {
        let deadline = Instant::now() + END_LIMIT;
        for stream in [&STDOUT, &STDERR] {
            stream.wait_until_written(deadline);
        }
    }
}
