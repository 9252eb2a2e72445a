//! Runs clients in simulated processes. Only for the project's own simulation: the feature is not part of
//! the public interface and changes without notice.

use crate::sync::Mutex;
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite};

/// A simulated process: replaces the operating system.
pub trait Process: Send + Sync {
    /// Connects to a server over simulated TCP.
    fn connect(&self, host: &str, port: u16) -> Connecting;

    /// Returns a random number. The same seed gives the same numbers.
    fn random(&self) -> u128;

    /// Returns the number of the next owner. Numbers are unique.
    fn owner_number(&self) -> u64;

    /// Returns `Ready` if this process runs now. If it is stopped, wakes the task when it continues.
    fn poll_runs(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Receives a new task of this process.
    fn spawned(&self, task: Weak<dyn Task>);
}

/// A task of a simulated process.
pub trait Task: Send + Sync {
    /// Drops the work of the task, as a runtime does when it ends.
    fn end(&self);
}

pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

/// The transport of a connection.
pub trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static> Stream for S {}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn Process>>> = const { RefCell::new(None) };
}

/// Returns the process that runs now on this thread.
pub(crate) fn current() -> Option<Arc<dyn Process>> {
    CURRENT.with_borrow(Clone::clone)
}

/// A future that runs in a process. Everything that it spawns in the library runs in the same process.
pub struct Inside<F: Future + Send + 'static>(Arc<Shared<F>>);

impl<F: Future + Send + 'static> std::fmt::Debug for Inside<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}

struct Shared<F> {
    process: Option<Arc<dyn Process>>,
    /// `None` after it was dropped.
    work: Mutex<Option<Pin<Box<F>>>>,
}

impl<F: Future + Send + 'static> Inside<F> {
    pub fn new(process: Option<Arc<dyn Process>>, work: F) -> Inside<F> {
        let shared = Arc::new(Shared {
            process,
            work: Mutex::new(Some(Box::pin(work))),
        });
        if let Some(process) = &shared.process {
            let task: Weak<Shared<F>> = Arc::downgrade(&shared);
            process.spawned(task);
        }
        Inside(shared)
    }
}

impl<F: Future + Send + 'static> Future for Inside<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let shared = &self.0;
        if let Some(process) = &shared.process {
            ready!(process.poll_runs(cx));
        }
        let _entered = Entered::enter(shared.process.clone());
        match &mut *shared.work.lock() {
            Some(work) => work.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<F: Send> Task for Shared<F> {
    /// Dropping the work may spawn tasks, which belong to its process.
    fn end(&self) {
        let _entered = Entered::enter(self.process.clone());
        let work = self.work.lock().take();
        drop(work);
    }
}

impl<F: Future + Send + 'static> Drop for Inside<F> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Makes a process the current one for as long as this lives.
struct Entered(Option<Arc<dyn Process>>);

impl Entered {
    fn enter(process: Option<Arc<dyn Process>>) -> Entered {
        Entered(CURRENT.replace(process))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}
