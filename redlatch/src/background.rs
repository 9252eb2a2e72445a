//! Background work of a client that no caller waits for: undo, release, clean-up.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::environment::task;
use crate::error::{Error, Result};
use crate::name::ObjectKeys;
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
    works: Mutex<Works>,
    /// Notified when work has ended, or no flush waits for it any more.
    changed: Notify,
}

/// The work that is running.
#[derive(Default)]
struct Works {
    /// Number of works that only pass something on. Most last for one poll, so they have no entry.
    passing: usize,
    entries: HashMap<u64, (Arc<ObjectKeys>, Need)>,
    /// Number of the latest entry.
    latest: u64,
}

/// Whether work is still of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// A flush waits for it.
    Awaited,
    /// The store refuses it. It is tried again, but no flush waits for it.
    Refused,
    /// The store has nothing of it any more, as far as is known, whether it succeeds or not.
    Needless,
}

impl Works {
    fn running(&self) -> usize {
        self.passing + self.entries.len()
    }

    /// Returns whether a flush has to wait for works up to this number.
    fn are_awaited(&self, latest: u64) -> bool {
        let mut entries = self.entries.iter();
        let awaited =
            |(number, (_, need)): (&u64, &(_, Need))| *number <= latest && *need == Need::Awaited;
        self.passing > 0 || entries.any(awaited)
    }

    /// Returns the names of the objects of which something is left to settle.
    fn unsettled(&self) -> BTreeSet<String> {
        let entries = self.entries.values();
        let needed = entries.filter(|(_, need)| *need != Need::Needless);
        needed.map(|(object, _)| object.name().to_owned()).collect()
    }
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

    /// Runs work for an object in the background. Never blocks, never panics. Without a live runtime it drops the work,
    /// which `work` can detect in its own `Drop`.
    pub(crate) fn spawn(
        &self,
        object: &Arc<ObjectKeys>,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.spawn_as(self.begin(object), work);
    }

    /// The same for a check of an object. It leaves nothing in the store, so no flush waits for it.
    pub(crate) fn spawn_check(
        &self,
        object: &Arc<ObjectKeys>,
        check: impl Future<Output = ()> + Send + 'static,
    ) {
        let running = self.begin(object);
        running.needless();
        self.spawn_as(running, check);
    }

    /// The same for work that has [begun](Background::begin), which ends with it.
    pub(crate) fn spawn_as(
        &self,
        running: RunningWork,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.spawn_counted(async move {
            let _running = running;
            work.await;
        });
    }

    /// The same for work that says itself when it ends.
    pub(crate) fn spawn_counted(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime() {
            runtime.spawn(task(work));
        }
    }

    /// Runs `work` in the calling task. If the future is dropped after its first poll, and `detaches` then
    /// returns true, the rest of `work` runs in the background. It serves steps that must be neither
    /// repeated nor abandoned: the answer determines how to undo them.
    pub(crate) fn detach_on_drop<T: Send + 'static>(
        &self,
        object: &Arc<ObjectKeys>,
        work: impl Future<Output = T> + Send + 'static,
        detaches: impl Fn() -> bool + Send + Unpin,
    ) -> impl Future<Output = T> + Send {
        DetachOnDrop {
            object: object.clone(),
            work: Some(Box::pin(work)),
            polled: false,
            detaches,
            background: self.clone(),
        }
    }

    /// Counts work that only passes something on, until the returned value is dropped.
    pub(crate) fn pass_on(&self) -> RunningWork {
        self.0.works.lock().passing += 1;
        RunningWork {
            inner: self.0.clone(),
            number: None,
        }
    }

    /// Counts work for an object, until the returned value is dropped.
    pub(crate) fn begin(&self, object: &Arc<ObjectKeys>) -> RunningWork {
        let works = &mut *self.0.works.lock();
        works.latest += 1;
        let entry = (object.clone(), Need::Awaited);
        works.entries.insert(works.latest, entry);
        RunningWork {
            inner: self.0.clone(),
            number: Some(works.latest),
        }
    }

    /// Waits until the work that runs now has ended, and what it has begun, except for what the store refuses, or has nothing of
    /// any more. Work that others begin meanwhile does not count: there may be some at any time.
    pub(crate) async fn flush(&self) {
        // An unanswered step, the undoing of its result, and the release that this needs.
        for _ in 0..3 {
            let latest = self.0.works.lock().latest;
            let is_done = || (!self.0.works.lock().are_awaited(latest)).then_some(());
            wait_for(&self.0.changed, is_done).await;
        }
    }

    /// Returns the names of the objects of which something is left to settle.
    pub(crate) fn unsettled(&self) -> BTreeSet<String> {
        self.0.works.lock().unsettled()
    }

    pub(crate) fn running(&self) -> usize {
        self.0.works.lock().running()
    }
}

/// Work that moves to the background when its caller drops it.
struct DetachOnDrop<T: Send + 'static, W: Fn() -> bool> {
    object: Arc<ObjectKeys>,
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
            let work = async move { drop(work.await) };
            self.background.spawn(&self.object, work);
        }
    }
}

/// Counts as running work until it is dropped.
pub(crate) struct RunningWork {
    inner: Arc<Inner>,
    number: Option<u64>,
}

impl RunningWork {
    /// Records that the store refuses it: from now on no flush waits for it.
    pub(crate) fn refused(&self) {
        self.set(Need::Refused);
    }

    /// Records that the store has nothing of it any more, as far as is known.
    pub(crate) fn needless(&self) {
        self.set(Need::Needless);
    }

    fn set(&self, need: Need) {
        if let Some(number) = &self.number
            && let Some((_, current)) = self.inner.works.lock().entries.get_mut(number)
        {
            *current = need;
        }
        self.inner.changed.notify_waiters();
    }
}

impl Drop for RunningWork {
    fn drop(&mut self) {
        {
            let mut works = self.inner.works.lock();
            match &self.number {
                None => works.passing -= 1,
                Some(number) => drop(works.entries.remove(number)),
            }
        }
        self.inner.changed.notify_waiters();
    }
}

/// The pause between two tries of work that the store could not do.
const PAUSE: Duration = Duration::from_millis(500);
/// After this many refusals the store is expected to refuse the work again: an error in its configuration that lasts longer
/// than five seconds, which is time enough to replace a password or a rule.
const REFUSALS: u32 = 10;
/// The pause between two tries from then on.
const PAUSE_REFUSED: Duration = Duration::from_secs(5);

/// The tries of one work, without a clock.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    refusals: u32,
}

impl Tries {
    /// Returns whether the store has refused the work so often that no flush waits for it.
    pub(crate) fn are_refused(&self) -> bool {
        self.refusals >= REFUSALS
    }

    /// Records a failure. Returns the pause before the next try.
    pub(crate) fn failed(&mut self, error: &Error) -> Duration {
        let is_refused = !error.is_outage();
        self.refusals = self.refusals.saturating_add(u32::from(is_refused));
        match self.are_refused() {
            true => PAUSE_REFUSED,
            false => PAUSE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::KeyLayout;

    fn object(name: &str) -> Arc<ObjectKeys> {
        Arc::new(ObjectKeys::new(KeyLayout::Lock, "", name))
    }

    #[test]
    fn works_are_awaited_until_they_end_are_refused_or_needless() {
        let background = Background::default();
        let state = || {
            let works = background.0.works.lock();
            (
                works.are_awaited(works.latest),
                Vec::from_iter(works.unsettled()).concat(),
            )
        };
        assert_eq!(state(), (false, String::new()));
        let passing = background.pass_on();
        assert_eq!(state(), (true, String::new()));
        drop(passing);
        let works = ["a", "b", "c"].map(|name| background.begin(&object(name)));
        assert_eq!(state(), (true, "abc".into()));
        works[0].refused();
        works[1].needless();
        assert_eq!(state(), (true, "ac".into()));
        works[2].refused();
        assert_eq!(state(), (false, "ac".into()));
        assert_eq!(background.running(), 3);
        drop(works);
        assert_eq!((state(), background.running()), ((false, String::new()), 0));
    }

    /// A busy client has work at any time. A flush waits for what ran before, and what that has begun.
    #[tokio::test]
    async fn flush_ends_beside_later_work() {
        let background = Background::default();
        let (first, child) = (
            background.begin(&object("a")),
            background.begin(&object("a")),
        );
        let mut flush = std::pin::pin!(background.flush());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(flush.as_mut().poll(&mut cx).is_pending());
        let mut latest = background.begin(&object("b"));
        drop(first);
        assert!(flush.as_mut().poll(&mut cx).is_pending());
        let grandchild = background.begin(&object("a"));
        drop(child);
        assert!(flush.as_mut().poll(&mut cx).is_pending());
        drop(grandchild);
        let ends = (0..3).any(|_| {
            latest = background.begin(&object("b"));
            flush.as_mut().poll(&mut cx).is_ready()
        });
        assert!(ends && background.running() == 1);
        drop(latest);
    }

    /// A check that is not answered delays no flush, and names no object that may be held.
    #[tokio::test]
    async fn flush_waits_for_no_check() {
        let background = Background::default();
        background.remember_runtime().unwrap();
        background.spawn_check(&object("a"), std::future::pending());
        let flush = tokio::time::timeout(Duration::from_secs(60), background.flush());
        flush.await.unwrap();
        assert!(background.unsettled().is_empty());
        assert_eq!(background.running(), 1);
    }

    #[test]
    fn refused_work_is_tried_a_few_times_and_then_seldom() {
        let (outage, refusal) = (
            Error::unavailable("down"),
            Error::NotPermitted {
                reason: String::new(),
            },
        );
        let mut tries = Tries::default();
        for _ in 0..100 {
            assert_eq!(tries.failed(&outage), PAUSE);
        }
        for n in 1..REFUSALS {
            assert_eq!(tries.failed(&refusal), PAUSE, "{n}");
            assert!(!tries.are_refused());
        }
        for error in [&refusal, &outage, &refusal] {
            assert_eq!(tries.failed(error), PAUSE_REFUSED);
            assert!(tries.are_refused());
        }
    }
}
