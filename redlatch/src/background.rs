//! Background work of a client that no caller waits for: undo, release, clean-up.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::environment::task;
use crate::error::Result;
use crate::runtime;
use crate::sync::{Mutex, wait_for};

/// Runs a client's background work and counts it.
#[derive(Clone, Default)]
pub(crate) struct Background(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// The client's own runtime, if it has one. All work runs there.
    dedicated: OnceLock<Handle>,
    /// The runtime that was used last.
    latest: Mutex<Option<Handle>>,
    running: AtomicUsize,
    idle: Notify,
}

impl Background {
    /// Runs all later work in this runtime. The guard of a blocking client may be dropped in a runtime that
    /// is about to end or is not driven at all.
    #[cfg(feature = "blocking")]
    pub(crate) fn set_runtime(&self, dedicated: Handle) {
        let _ = self.0.dedicated.set(dedicated);
    }

    /// Remembers the current runtime as the fallback.
    pub(crate) fn remember_runtime(&self) -> Result<()> {
        if self.0.dedicated.get().is_some() {
            return Ok(());
        }
        let current = runtime::current()?;
        let mut latest = self.0.latest.lock();
        if latest
            .as_ref()
            .is_none_or(|known| known.id() != current.id())
        {
            *latest = Some(current);
        }
        Ok(())
    }

    /// Returns the runtime that was used last. It may have ended since.
    pub(crate) fn latest_runtime(&self) -> Option<Handle> {
        let dedicated = self.0.dedicated.get().cloned();
        dedicated.or_else(|| self.0.latest.lock().clone())
    }

    /// Returns the runtime for new work: the client's own, else the current one, else the one used last. A
    /// client may outlive the runtime in which it was created (a static client in tests).
    pub(crate) fn runtime(&self) -> Option<Handle> {
        let dedicated = self.0.dedicated.get().cloned();
        dedicated
            .or_else(|| runtime::current().ok())
            .or_else(|| self.latest_runtime())
    }

    /// Runs `work` in the background. Never blocks, never panics. Without a live runtime it drops the work,
    /// which `work` can detect in its own `Drop`.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = self.runtime() else {
            return;
        };
        let running = self.count();
        runtime.spawn(task(async move {
            let _running = running;
            work.await;
        }));
    }

    /// Runs `work` in the calling task. If the future is dropped after its first poll, and `detaches` then
    /// returns true, the rest of `work` runs in the background. It serves steps that must be neither
    /// repeated nor abandoned: the answer determines how to undo them.
    pub(crate) fn detach_on_drop<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        detaches: impl Fn() -> bool + Send + Unpin,
    ) -> impl Future<Output = T> + Send {
        DetachOnDrop {
            work: Some(Box::pin(work)),
            polled: false,
            detaches,
            background: self.clone(),
        }
    }

    /// Counts work that runs elsewhere, until the returned value is dropped.
    pub(crate) fn count(&self) -> RunningGuard {
        RunningGuard::new(self.0.clone())
    }

    /// Waits until no background work is running.
    pub(crate) async fn flush(&self) {
        wait_for(&self.0.idle, || (self.running() == 0).then_some(())).await;
    }

    pub(crate) fn running(&self) -> usize {
        self.0.running.load(Ordering::SeqCst)
    }
}

/// Work that moves to the background when its caller drops it.
struct DetachOnDrop<T: Send + 'static, W: Fn() -> bool> {
    /// `None` when it is done.
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    polled: bool,
    detaches: W,
    background: Background,
}

impl<T: Send + 'static, W: Fn() -> bool + Unpin> Future for DetachOnDrop<T, W> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.polled = true;
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let output = std::task::ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static, W: Fn() -> bool> Drop for DetachOnDrop<T, W> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take()
            && self.polled
            && (self.detaches)()
        {
            // Dropping the output is part of the work: it may start more work.
            self.background.spawn(async move { drop(work.await) });
        }
    }
}

/// Counts as running work until it is dropped.
pub(crate) struct RunningGuard(Arc<Inner>);

impl RunningGuard {
    fn new(inner: Arc<Inner>) -> RunningGuard {
        inner.running.fetch_add(1, Ordering::SeqCst);
        RunningGuard(inner)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
