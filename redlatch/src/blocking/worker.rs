//! Runs the calls of a blocking client: on a thread of its own, or in the runtime of an async client.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::coop::poll_proceed;
use tokio::task::yield_now;

use crate::background::Background;
use crate::environment::{Creator, task};
use crate::error::{Error, Result};

/// How long a client's thread continues after its last handle, to release what was dropped.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// Where the calls of a client run.
pub(super) struct Worker {
    /// The process of the threads that do the work. A child that it forks has none of them.
    process: Creator,
    /// `None` only for several locks without members.
    runtime: Option<Handle>,
    /// The background work that must finish before the client's own thread ends.
    background: Arc<OnceLock<Background>>,
    /// Dropped with the worker, which ends the client's own thread.
    _ends: Option<oneshot::Sender<Infallible>>,
    /// The workers of the members of several locks. They renew, and release what is dropped.
    members: Vec<Arc<Worker>>,
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
            background,
            _ends: Some(ends),
            ..Worker::new(Some(handle))
        }))
    }

    /// Uses an existing runtime.
    pub(super) fn shared(runtime: Handle) -> Arc<Worker> {
        Arc::new(Worker::new(Some(runtime)))
    }

    fn new(runtime: Option<Handle>) -> Worker {
        Worker {
            process: Creator::this_process(),
            runtime,
            background: Arc::default(),
            _ends: None,
            members: Vec::new(),
        }
    }

    /// Uses one of these workers, and keeps all of them. Prefers the runtime of an async client: its client
    /// moves its background work to the runtime that it was used in last, and a thread of a blocking client
    /// may end before.
    pub(super) fn joined(mut members: Vec<Arc<Worker>>) -> Arc<Worker> {
        members.retain(|worker| worker.runtime.is_some());
        let shared = members.iter().find(|worker| worker.has_async_client());
        let chosen = shared.or(members.first());
        let runtime = chosen.and_then(|worker| worker.runtime.clone());
        Arc::new(Worker {
            members,
            ..Worker::new(runtime)
        })
    }

    /// Returns whether the runtime is that of an async client, not a thread of a blocking one.
    fn has_async_client(&self) -> bool {
        match self.members.is_empty() {
            true => self._ends.is_none(),
            false => self.members.iter().any(|worker| worker.has_async_client()),
        }
    }

    /// Runs the client's background work on this thread, which ends only after that work.
    pub(super) fn manage(&self, background: Background) {
        if let Some(runtime) = &self.runtime {
            background.set_runtime(runtime.clone());
        }
        let _ = self.background.set(background);
    }

    /// Returns the runtime, unless the calling thread must not wait for it.
    pub(super) fn check(&self) -> Result<&Handle> {
        // What the thread knows may be from before a fork, in the context of the runtime of the parent.
        if self.process != Creator::this_process() {
            return Err(Error::NoRuntime);
        }
        for member in &self.members {
            member.check()?;
        }
        let no_members = || Error::InvalidMembers {
            reason: "there are none; specify at least one".into(),
        };
        let runtime = self.runtime.as_ref().ok_or_else(no_members)?;
        match drives(runtime) {
            true => Err(Error::BlockedRuntime),
            false => Ok(runtime),
        }
    }

    /// Blocks until `event` completes, at most this long. Returns whether it has completed.
    pub(super) fn completes_within(
        &self,
        wait: Duration,
        event: impl Future<Output = ()> + Send + 'static,
    ) -> Result<bool> {
        let waiting = async move { tokio::time::timeout(wait, event).await };
        Ok(self.run(waiting)?.is_ok())
    }

    /// Runs `work` in the runtime and blocks until it is done. Unlike `block_on`, it works in the
    /// context of any other runtime.
    pub(super) fn run<F>(&self, work: F) -> Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let runtime = self.check()?;
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
/// Async code has a budget of polls, except inside of `unconstrained`. There the scheduler tells, which polls it. (It does not poll
/// what `block_on` of a multi-threaded runtime runs: the other threads of that runtime do the work.)
fn drives(runtime: &Handle) -> bool {
    let is_current = Handle::try_current().is_ok_and(|current| current.id() == runtime.id());
    is_current && (has_budget() || is_scheduled())
}

/// Returns whether a scheduler of tokio polls the calling code: only then a yield is not woken at once.
fn is_scheduled() -> bool {
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(woken.clone());
    let _ = pin!(yield_now()).poll(&mut Context::from_waker(&waker));
    !woken.0.load(Ordering::Relaxed)
}

/// Returns whether tokio limits how often the calling code may poll: it uses up the budget, and restores it.
fn has_budget() -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    let mut used = Vec::new();
    // The budget is a byte.
    let is_limited = (0..=u8::MAX).any(|_| match poll_proceed(&mut cx) {
        Poll::Ready(restore) => {
            used.push(restore);
            false
        }
        Poll::Pending => true,
    });
    // In reverse, because each restores the budget as it was before.
    while used.pop().is_some() {}
    is_limited
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::{LocalSet, block_in_place, spawn_blocking, unconstrained};

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn code_that_drives_a_runtime_is_recognized() {
        let runtime = Handle::current();
        let is_driving = || (has_budget(), drives(&runtime));
        // Checking does not use up the budget.
        for _ in 0..3 {
            assert_eq!(is_driving(), (true, true));
        }
        let here = runtime.clone();
        let spawned = tokio::spawn(async move { drives(&here) });
        assert!(spawned.await.unwrap());
        assert!(LocalSet::new().run_until(async { has_budget() }).await);
        assert_eq!(block_in_place(is_driving), (false, false));
        let here = runtime.clone();
        let blocking = spawn_blocking(move || (has_budget(), drives(&here)));
        assert_eq!(blocking.await.unwrap(), (false, false));
        let here = runtime.clone();
        let thread = std::thread::spawn(move || (has_budget(), drives(&here)));
        assert_eq!(thread.join().unwrap(), (false, false));
        let other = tokio::runtime::Builder::new_current_thread().build();
        let other = other.unwrap();
        assert!(!drives(other.handle()));
        other.shutdown_background();
    }

    /// The check causes no panic, which would end a program that is compiled with `panic = "abort"`.
    #[test]
    fn code_without_budget_is_recognized_without_panic() {
        async fn is_driving() -> (bool, bool) {
            let here = Handle::current();
            unconstrained(async { (has_budget(), drives(&here)) }).await
        }
        let single = tokio::runtime::Builder::new_current_thread().build();
        let multi = tokio::runtime::Builder::new_multi_thread().build();
        let (single, multi) = (single.unwrap(), multi.unwrap());
        for runtime in [&single, &multi] {
            let spawned = runtime.spawn(is_driving());
            assert_eq!(runtime.block_on(spawned).unwrap(), (false, true));
        }
        assert_eq!(single.block_on(is_driving()), (false, true));
        // The threads of the runtime answer the calls of this one.
        assert_eq!(multi.block_on(is_driving()), (false, false));
        let here = multi.handle().clone();
        let waits = async move { Worker::shared(here).run(async { 7 }).unwrap() };
        assert_eq!(multi.block_on(unconstrained(waits)), 7);
        let in_place =
            async { unconstrained(async { block_in_place(|| drives(&Handle::current())) }).await };
        assert!(!multi.block_on(multi.spawn(in_place)).unwrap());
    }

    /// A child that `fork` creates has a copy of the client, and no thread that would answer.
    #[test]
    fn client_of_another_process_has_no_runtime() {
        let worker = Worker::start().unwrap();
        let forked = || {
            Arc::new(Worker {
                process: Creator::other_process(),
                ..Worker::new(worker.runtime.clone())
            })
        };
        assert_eq!(worker.run(async { 7 }).unwrap(), 7);
        for worker in [forked(), Worker::joined(vec![worker.clone(), forked()])] {
            let answered = worker.run(async { 7 });
            assert!(matches!(answered, Err(Error::NoRuntime)), "{answered:?}");
        }
    }
}
