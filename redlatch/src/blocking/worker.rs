//! Runs the calls of a blocking client: on a thread of its own, or in the runtime of an async client.

use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::background::Background;
use crate::environment::task;
use crate::error::{Error, Result};

/// How long a client's thread continues after its last handle, to release what was dropped.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// Where the calls of a client run.
#[derive(Default)]
pub(super) struct Worker {
    /// `None` only for several locks without members.
    runtime: Option<Handle>,
    /// The background work that must finish before the client's own thread ends.
    background: Arc<OnceLock<Background>>,
    /// Dropped with the worker, which ends the client's own thread.
    _ends: Option<oneshot::Sender<Infallible>>,
    /// The workers of the other members of several locks. They renew, and release what is dropped.
    _others: Vec<Arc<Worker>>,
}

impl Worker {
    /// Starts a thread.
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
            runtime: Some(handle),
            background,
            _ends: Some(ends),
            _others: Vec::new(),
        }))
    }

    /// Uses an existing runtime.
    pub(super) fn shared(runtime: Handle) -> Arc<Worker> {
        Arc::new(Worker {
            runtime: Some(runtime),
            ..Worker::default()
        })
    }

    /// Uses the first of these workers, and keeps all of them.
    pub(super) fn joined(workers: Vec<Arc<Worker>>) -> Arc<Worker> {
        Arc::new(Worker {
            runtime: workers.iter().find_map(|worker| worker.runtime.clone()),
            _others: workers,
            ..Worker::default()
        })
    }

    /// Runs the client's background work on this thread, which ends only after that work.
    pub(super) fn manage(&self, background: Background) {
        if let Some(runtime) = &self.runtime {
            background.set_runtime(runtime.clone());
        }
        let _ = self.background.set(background);
    }

    /// Runs `work` in the runtime and blocks until it is done. Unlike `block_on`, it works in the
    /// context of any other runtime.
    pub(super) fn run<F>(&self, work: F) -> Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let no_members = || Error::InvalidMembers {
            reason: "there are none; specify at least one".into(),
        };
        let runtime = self.runtime.as_ref().ok_or_else(no_members)?;
        if drives(runtime) {
            return Err(Error::BlockedRuntime);
        }
        let (sender, mut output) = oneshot::channel();
        // Carries no value, so that its code is compiled once and not for each type of output.
        let (ends, ended) = mpsc::channel::<Infallible>();
        runtime.spawn(task(async move {
            let _ = sender.send(work.await);
            drop(ends);
        }));
        let _ = ended.recv();
        output.try_recv().map_err(|_| Error::NoRuntime)
    }
}

/// Returns whether the calling thread drives async code of `runtime`, so that blocking it could block
/// the very work that it waits for. (Threads of `spawn_blocking` are in the runtime but drive nothing.)
///
/// tokio offers no query for this, but its `block_on` panics then. tokio's message appears on stderr.
fn drives(runtime: &Handle) -> bool {
    let is_current = Handle::try_current().is_ok_and(|current| current.id() == runtime.id());
    is_current && catch_unwind(AssertUnwindSafe(|| runtime.block_on(async {}))).is_err()
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
