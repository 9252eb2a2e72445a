//! The thread that runs a blocking client.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::background::Background;
use crate::environment::task;
use crate::error::{Error, Result};

/// How long a client's thread continues after its last handle, to release what was dropped.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// The thread that runs a blocking client.
pub(super) struct Worker {
    runtime: Handle,
    /// The background work that must finish before the thread ends.
    background: Arc<OnceLock<Background>>,
    /// Dropped with the worker, which ends the thread.
    _ends: oneshot::Sender<Infallible>,
}

impl Worker {
    pub(super) fn start() -> Result<Arc<Worker>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|_| Error::NoRuntime)?;
        let handle = runtime.handle().clone();
        let (ends, ended) = oneshot::channel();
        let background: Arc<OnceLock<Background>> = Arc::default();
        let unfinished = background.clone();
        let work = async move {
            let _ = ended.await;
            if let Some(background) = unfinished.get() {
                let _ = tokio::time::timeout(SHUTDOWN_LIMIT, background.flush()).await;
            }
        };
        std::thread::Builder::new()
            .name("redlatch".into())
            .spawn(move || runtime.block_on(work))
            .map_err(|_| Error::NoRuntime)?;
        Ok(Arc::new(Worker {
            runtime: handle,
            background,
            _ends: ends,
        }))
    }

    /// Runs the client's background work on this thread, which ends only after that work.
    pub(super) fn manage(&self, background: Background) {
        background.set_runtime(self.runtime.clone());
        let _ = self.background.set(background);
    }

    /// Runs an async method of `handle` on the thread and blocks until it is done.
    pub(super) fn call<H: Clone, T, F>(&self, handle: &H, work: impl FnOnce(H) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.run(work(handle.clone()))?
    }

    /// Runs `work` on the thread and blocks until it is done. Unlike `block_on`, it never panics,
    /// in any context.
    pub(super) fn run<F>(&self, work: F) -> Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let (sender, mut output) = oneshot::channel();
        // Carries no value, so that its code is compiled once and not for each type of output.
        let (ends, ended) = mpsc::channel::<Infallible>();
        self.runtime.spawn(task(async move {
            let _ = sender.send(work.await);
            drop(ends);
        }));
        let _ = ended.recv();
        output.try_recv().map_err(|_| Error::NoRuntime)
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
