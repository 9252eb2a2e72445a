//! What a client does without being waited for: undoing, giving back, tidying up.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::error::Result;
use crate::runtime;
use crate::surroundings::task;

/// Where a client's background work runs, and how much of it there is.
#[derive(Clone, Default)]
pub(crate) struct Background(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// The only runtime to work in, if the client brings one of its own.
    own: OnceLock<Handle>,
    /// The runtime that was worked in last.
    latest: Mutex<Option<Handle>>,
    running: AtomicUsize,
    idle: Notify,
}

impl Background {
    /// From now on all work is done in this runtime, wherever it comes from: whoever drops the guard
    /// of a blocking client may do so in a runtime that is about to end, or is not driven at all.
    pub(crate) fn stay_in(&self, own: Handle) {
        let _ = self.0.own.set(own);
    }

    /// Makes the runtime that this is called in the one to fall back on.
    pub(crate) fn bind(&self) -> Result<()> {
        if self.0.own.get().is_some() {
            return Ok(());
        }
        let current = runtime::current()?;
        let mut latest = self.lock();
        if latest
            .as_ref()
            .is_none_or(|known| known.id() != current.id())
        {
            *latest = Some(current);
        }
        Ok(())
    }

    /// The runtime that was worked in last; it may have ended since.
    pub(crate) fn latest(&self) -> Option<Handle> {
        let own = self.0.own.get().cloned();
        own.or_else(|| self.lock().clone())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.0.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runtime to work in. Unless there is one of its own, the current one is preferred: a client
    /// may outlive the runtime that it was made in (a static client in tests).
    pub(crate) fn handle(&self) -> Option<Handle> {
        let own = self.0.own.get().cloned();
        own.or_else(|| runtime::current().ok())
            .or_else(|| self.latest())
    }

    /// Runs `work` in the background. Never blocks, never panics; without a runtime that still
    /// runs, the work is dropped, which `work` can notice by its own means.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let Some(handle) = self.handle() else { return };
        let counted = Counted::new(self.0.clone());
        handle.spawn(task(async move {
            let _counted = counted;
            work.await;
        }));
    }

    /// Does `work` here; if it is dropped after it was begun, and `worth` says so then, the rest is
    /// done in the background. For steps that must be neither repeated nor left half-way: only who
    /// hears the answer knows what has to be undone.
    pub(crate) fn finish<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        worth: impl Fn() -> bool + Send + Unpin,
    ) -> impl Future<Output = T> + Send {
        Finish {
            work: Some(Box::pin(work)),
            begun: false,
            worth,
            background: self.clone(),
        }
    }

    /// Returns when nothing is running.
    pub(crate) async fn settled(&self) {
        loop {
            let mut idle = std::pin::pin!(self.0.idle.notified());
            idle.as_mut().enable();
            if self.running() == 0 {
                return;
            }
            idle.await;
        }
    }

    pub(crate) fn running(&self) -> usize {
        self.0.running.load(Ordering::SeqCst)
    }
}

/// Work that goes on without the one who waits for it.
struct Finish<T: Send + 'static, W: Fn() -> bool> {
    /// `None` when it is done.
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    begun: bool,
    worth: W,
    background: Background,
}

impl<T: Send + 'static, W: Fn() -> bool + Unpin> Future for Finish<T, W> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.begun = true;
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let output = std::task::ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static, W: Fn() -> bool> Drop for Finish<T, W> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take()
            && self.begun
            && (self.worth)()
        {
            // What it comes to is dropped as part of the work, which may be more work.
            self.background.spawn(async move { drop(work.await) });
        }
    }
}

struct Counted(Arc<Inner>);

impl Counted {
    fn new(inner: Arc<Inner>) -> Counted {
        inner.running.fetch_add(1, Ordering::SeqCst);
        Counted(inner)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
