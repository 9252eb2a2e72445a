//! What a client does without being waited for: undoing, giving back, tidying up.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::error::{Error, Result};

/// Where a client's background work runs, and how much of it there is.
#[derive(Clone, Default)]
pub(crate) struct Background(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// The runtime that was worked in last.
    latest: Mutex<Option<Handle>>,
    running: AtomicUsize,
    idle: Notify,
}

impl Background {
    /// Makes the runtime that this is called in the one to fall back on.
    pub(crate) fn bind(&self) -> Result<()> {
        let current = Handle::try_current().map_err(|_| Error::NoRuntime)?;
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
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.0.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runtime to work in. The current one is preferred: a client may outlive the runtime that
    /// it was made in (a static client in tests).
    pub(crate) fn handle(&self) -> Option<Handle> {
        Handle::try_current().ok().or_else(|| self.latest())
    }

    /// Runs `work` in the background. Never blocks, never panics; without a runtime that still
    /// runs, the work is dropped, which `work` can notice by its own means.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let Some(handle) = self.handle() else { return };
        let counted = Counted::new(self.0.clone());
        handle.spawn(async move {
            let _counted = counted;
            work.await;
        });
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
