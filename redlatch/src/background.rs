//! Background work of a client that no caller waits for: undo, release, clean-up.
//!
//! Each work has a number. What a work begins while it is polled or dropped has the number of that
//! work as its *origin*: a flush waits for the works that had begun before, and for all that these
//! have led to, and for no other.
//!
//! A client may be used in several runtimes, and outlive them. What its runtime drops before it has begun begins in another one.
//! Tasks of which the client has one at most (the watchdog) start again in another one.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::environment::{Creator, task};
use crate::error::{Error, Result};
use crate::join::Boxed;
use crate::name::ObjectKeys;
use crate::runtime;
use crate::sync::{Mutex, wait_for};

/// Runs a client's background work and counts it.
#[derive(Clone, Default)]
pub(crate) struct Background(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// What is held belongs to this process: a child that it forks settles nothing.
    creator: Creator,
    /// The client's own runtime, if it has one. All work runs there.
    dedicated: OnceLock<Handle>,
    /// The runtimes that this client has used, the latest one last. It forgets those that have ended when it needs another
    /// one, or meets a new one.
    runtimes: Mutex<Vec<UsedRuntime>>,
    works: Mutex<Works>,
    /// Notified when work has ended, or no flush waits for it any more.
    changed: Notify,
}

/// The work that is running.
#[derive(Default)]
struct Works {
    running: BTreeMap<u64, Work>,
    /// Number of the latest one.
    latest: u64,
}

struct Work {
    object: Arc<ObjectKeys>,
    /// The number of the work that led to it, or its own.
    origin: u64,
    need: Need,
}

thread_local! {
    /// The work that this thread polls or drops: its client and its origin.
    static CURRENT: Cell<Option<(*const Inner, u64)>> = const { Cell::new(None) };
}

/// Whether work is still of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// A flush waits for it.
    Awaited,
    /// A flush waits for it, but it settles nothing.
    Unnamed,
    /// The store refuses it. It is tried again, but no flush waits for it.
    Refused,
    /// The store has nothing of it any more, as far as is known, whether it succeeds or not.
    Needless,
    /// It only asks the store.
    Check,
}

impl Works {
    /// Returns whether a flush has to wait for works up to this number, and what they led to.
    fn are_awaited(&self, latest: u64) -> bool {
        let is_awaited = |work: &Work| {
            work.origin <= latest && matches!(work.need, Need::Awaited | Need::Unnamed)
        };
        self.running.values().any(is_awaited)
    }

    /// Returns the names of the objects of which something is left to settle.
    fn unsettled(&self) -> BTreeSet<String> {
        let is_left = |work: &&Work| matches!(work.need, Need::Awaited | Need::Refused);
        let left = self.running.values().filter(is_left);
        left.map(|work| work.object.name().to_owned()).collect()
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
    ///
    /// # Errors
    ///
    /// [`Error::NoRuntime`] if no work can be done here.
    pub(crate) fn remember_runtime(&self) -> Result<()> {
        self.0.creator.check()?;
        if self.0.dedicated.get().is_some() {
            return Ok(());
        }
        let current = runtime::current()?;
        let runtimes = &mut *self.0.runtimes.lock();
        // Mostly the latest one.
        let is_current = |one: &UsedRuntime| one.handle.id() == current.id();
        match runtimes.iter().rposition(is_current) {
            Some(known) => runtimes[known..].rotate_left(1),
            None => {
                runtimes.retain(UsedRuntime::is_alive);
                runtimes.push(UsedRuntime::new(current));
            }
        }
        Ok(())
    }

    /// Returns a runtime, with a stopped clock, that the client has used.
    #[cfg(test)]
    pub(crate) fn runtime_for_test(&self) -> tokio::runtime::Runtime {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        let remembered = runtime.block_on(async { self.remember_runtime() });
        remembered.unwrap();
        runtime
    }

    /// Returns the runtime for new work: the client's own, else the current one, else the one used last that is alive. If one
    /// has `ended`: of the others, the one used last. A client may outlive the runtime in which it was created (a static client in
    /// tests).
    pub(crate) fn runtime(&self, ended: Option<Id>) -> Option<Handle> {
        self.0.creator.check().ok()?;
        let dedicated = self.0.dedicated.get().cloned();
        let preferred = || dedicated.or_else(|| runtime::current().ok());
        if let Some(runtime) = ended.is_none().then(preferred).flatten() {
            return Some(runtime);
        }
        let runtimes = &mut *self.0.runtimes.lock();
        runtimes.retain(|one| one.is_alive() && Some(one.handle.id()) != ended);
        runtimes.last().map(|last| last.handle.clone())
    }

    /// Runs work in a task. Without a [runtime](Background::runtime) the work is dropped.
    pub(crate) fn spawn_task(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.spawn_after(None, Box::pin(work), Box::new(|_| ()));
    }

    /// Starts a task of which there is one at most. If its runtime ends first, `restart` is called with that runtime. It starts
    /// the task again if there is something left to do.
    pub(crate) fn start(
        &self,
        ended: Option<Id>,
        work: impl Future<Output = ()> + Send + 'static,
        restart: impl FnOnce(Id) + Send + 'static,
    ) -> StartedTask {
        let runs = Arc::new(());
        let started = StartedTask(Arc::downgrade(&runs));
        let restart = move |ended| {
            restart(ended);
            drop(runs);
        };
        self.spawn_after(ended, Box::pin(work), Box::new(restart));
        started
    }

    fn spawn_after(&self, ended: Option<Id>, work: Boxed<'static, ()>, restart: Restart) {
        if let Some(runtime) = self.runtime(ended) {
            runtime.spawn(task(TaskWork {
                background: self.clone(),
                runtime: runtime.id(),
                work: Some((work, restart)),
                has_begun: false,
            }));
        }
    }

    /// Runs work for an object in the background. Never blocks, never panics. Without a live
    /// runtime it drops the work, which `work` can detect in its own `Drop`.
    pub(crate) fn spawn(
        &self,
        object: &Arc<ObjectKeys>,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.spawn_begun(self.begin(object), work);
    }

    /// The same for a check of an object. It leaves nothing in the store, so no flush waits for it, and it is not counted.
    pub(crate) fn spawn_check(
        &self,
        object: &Arc<ObjectKeys>,
        check: impl Future<Output = ()> + Send + 'static,
    ) {
        self.spawn_begun(self.begin_needed(object, Need::Check), check);
    }

    /// The same for work that has [begun](Background::begin).
    pub(crate) fn spawn_begun(
        &self,
        running: RunningWork,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.spawn_task(Counted::new(Box::pin(work), running));
    }

    /// Runs `work` in the calling task. If the future is dropped after its first poll, and `detaches` then
    /// returns true, the rest of `work` runs in the background, in the runtime that has its timers. It serves
    /// steps that must be neither repeated nor abandoned: the answer determines how to undo them.
    pub(crate) fn detach_on_drop<T: Send + 'static>(
        &self,
        object: &Arc<ObjectKeys>,
        work: impl Future<Output = T> + Send + 'static,
        detaches: impl Fn() -> bool + Send + Unpin,
    ) -> impl Future<Output = T> + Send {
        DetachOnDrop {
            object: object.clone(),
            work: Some(Box::pin(work)),
            polled_in: None,
            detaches,
            background: self.clone(),
        }
    }

    /// Counts work for an object, until the returned value is dropped.
    pub(crate) fn begin(&self, object: &Arc<ObjectKeys>) -> RunningWork {
        self.begin_needed(object, Need::Awaited)
    }

    fn begin_needed(&self, object: &Arc<ObjectKeys>, need: Need) -> RunningWork {
        let works = &mut *self.0.works.lock();
        works.latest += 1;
        let number = works.latest;
        let current = CURRENT.get();
        let current = current.filter(|(client, _)| *client == Arc::as_ptr(&self.0));
        let origin = current.map_or(number, |(_, origin)| origin);
        let work = Work {
            object: object.clone(),
            origin,
            need,
        };
        works.running.insert(number, work);
        RunningWork(WorkRef {
            inner: self.0.clone(),
            number,
            origin,
        })
    }

    /// Waits until the work that runs now has ended, and all that it leads to, except for what the
    /// store refuses, or has nothing of any more.
    pub(crate) async fn flush(&self) {
        if !self.0.creator.is_here() {
            return;
        }
        let latest = self.0.works.lock().latest;
        let is_done = || (!self.0.works.lock().are_awaited(latest)).then_some(());
        wait_for(&self.0.changed, is_done).await;
    }

    /// Returns the names of the objects of which something is left to settle.
    pub(crate) fn unsettled(&self) -> BTreeSet<String> {
        self.0.works.lock().unsettled()
    }

    /// Returns the number of works, not counting checks.
    pub(crate) fn running(&self) -> usize {
        let works = self.0.works.lock();
        let running = works.running.values();
        running.filter(|work| work.need != Need::Check).count()
    }
}

/// A runtime that the client has used.
struct UsedRuntime {
    handle: Handle,
    /// Closed once the runtime has dropped the task that receives. It is one task, because a runtime that is not driven keeps each
    /// that is spawned to find out.
    sentinel: oneshot::Sender<()>,
}

impl UsedRuntime {
    fn new(handle: Handle) -> UsedRuntime {
        let (sentinel, receiver) = oneshot::channel();
        handle.spawn(task(async { drop(receiver.await) }));
        UsedRuntime { handle, sentinel }
    }

    fn is_alive(&self) -> bool {
        !self.sentinel.is_closed()
    }
}

/// Called when the runtime of a task has ended before the task.
type Restart = Box<dyn FnOnce(Id) + Send>;

/// Refers to a task that was [started](Background::start).
#[derive(Debug, Default)]
pub(crate) struct StartedTask(Weak<()>);

impl StartedTask {
    /// Returns whether the task exists.
    pub(crate) fn is_running(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// The work of a task. If its runtime ends before it has begun, it begins in another one of the client. (Once it has begun, its
/// timers belong to its runtime.)
struct TaskWork {
    background: Background,
    runtime: Id,
    /// `None` when it is done.
    work: Option<(Boxed<'static, ()>, Restart)>,
    has_begun: bool,
}

impl Future for TaskWork {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.has_begun = true;
        if let Some((work, _)) = &mut self.work {
            ready!(work.as_mut().poll(cx));
        }
        self.work = None;
        Poll::Ready(())
    }
}

impl Drop for TaskWork {
    fn drop(&mut self) {
        let Some((work, restart)) = self.work.take() else {
            return;
        };
        if self.has_begun {
            drop(work);
            restart(self.runtime);
        } else {
            let ended = Some(self.runtime);
            self.background.spawn_after(ended, work, restart);
        }
    }
}

/// Work that moves to the background when its caller drops it.
struct DetachOnDrop<T: Send + 'static, W: Fn() -> bool> {
    object: Arc<ObjectKeys>,
    /// `None` when it is done.
    work: Option<Boxed<'static, T>>,
    /// The runtime of the latest poll, which has its timers.
    polled_in: Option<Handle>,
    detaches: W,
    background: Background,
}

impl<T: Send + 'static, W: Fn() -> bool + Unpin> Future for DetachOnDrop<T, W> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.polled_in = Handle::try_current().ok();
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let output = ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(output)
    }
}

impl<T: Send + 'static, W: Fn() -> bool> Drop for DetachOnDrop<T, W> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take()
            && let Some(runtime) = &self.polled_in
            && (self.detaches)()
            && self.background.0.creator.is_here()
        {
            // Dropping the output is part of the work: it may start more work.
            let work = Box::pin(async move { drop(work.await) });
            let running = self.background.begin(&self.object);
            runtime.spawn(task(Counted::new(work, running)));
        }
    }
}

/// Counts as running work until it is dropped.
pub(crate) struct RunningWork(WorkRef);

/// Refers to work, which may have ended.
#[derive(Clone)]
pub(crate) struct WorkRef {
    inner: Arc<Inner>,
    number: u64,
    origin: u64,
}

impl RunningWork {
    pub(crate) fn to_ref(&self) -> WorkRef {
        self.0.clone()
    }

    /// Runs a part of the work. What this begins has the same origin.
    fn enter<T>(&self, part: impl FnOnce() -> T) -> T {
        struct Restore(Option<(*const Inner, u64)>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let WorkRef { inner, origin, .. } = &self.0;
        let _restore = Restore(CURRENT.replace(Some((Arc::as_ptr(inner), *origin))));
        part()
    }
}

impl WorkRef {
    /// Records that a flush waits for it.
    pub(crate) fn awaited(&self) {
        self.set(Need::Awaited);
    }

    /// Records that a flush waits for it, although it settles nothing.
    pub(crate) fn unnamed(&self) {
        self.set(Need::Unnamed);
    }

    /// Records that the store refuses it: from now on no flush waits for it.
    pub(crate) fn refused(&self) {
        self.set(Need::Refused);
    }

    /// Records that the store has nothing of it any more, as far as is known.
    pub(crate) fn needless(&self) {
        self.set(Need::Needless);
    }

    fn set(&self, need: Need) {
        if let Some(work) = self.inner.works.lock().running.get_mut(&self.number) {
            work.need = need;
        }
        self.inner.changed.notify_waiters();
    }
}

impl Drop for RunningWork {
    fn drop(&mut self) {
        let WorkRef { inner, number, .. } = &self.0;
        let ended = inner.works.lock().running.remove(number);
        drop(ended);
        inner.changed.notify_waiters();
    }
}

/// A value that is part of running work until it is taken or dropped, such as a future.
pub(crate) struct Counted<T> {
    value: Option<T>,
    running: RunningWork,
}

impl<T> Counted<T> {
    pub(crate) fn new(value: T, running: RunningWork) -> Counted<T> {
        Counted {
            value: Some(value),
            running,
        }
    }

    /// Returns a value whose work no client knows.
    #[cfg(test)]
    pub(crate) fn for_test(value: T) -> Counted<T> {
        let object = ObjectKeys::new(crate::name::KeyLayout::Lock, "", "a");
        let background = Background::default();
        Counted::new(value, background.begin(&Arc::new(object)))
    }

    /// Hands the value on, or drops it, as the last part of the work.
    pub(crate) fn end<R>(mut self, end: impl FnOnce(T) -> Option<R>) -> Option<R> {
        let value = self.value.take()?;
        self.running.enter(|| end(value))
    }
}

impl<F: Future> Future for Counted<Pin<Box<F>>> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Counted { value, running } = &mut *self;
        running.enter(|| {
            let Some(work) = value else {
                return Poll::Pending;
            };
            let output = ready!(work.as_mut().poll(cx));
            *value = None;
            Poll::Ready(output)
        })
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        self.running.enter(|| drop(value));
    }
}

impl<T> std::fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counted").finish_non_exhaustive()
    }
}

/// The pause between two tries of work that the store could not do.
const PAUSE: Duration = Duration::from_millis(500);
/// After this many refusals the store is expected to refuse the work again: an error in its configuration that lasts longer
/// than five seconds, which is time enough to replace a password or a rule.
const REFUSALS: u32 = 10;
/// The pause between two tries from then on.
const PAUSE_REFUSED: Duration = Duration::from_secs(5);

/// The tries of one work.
pub(crate) struct Tries {
    work: WorkRef,
    deadline: Instant,
    refusals: u32,
}

impl Tries {
    /// Begins the tries of `work`. There is none after `deadline`.
    pub(crate) fn new(work: WorkRef, deadline: Instant) -> Tries {
        Tries {
            work,
            deadline,
            refusals: 0,
        }
    }

    /// Records a failure. Returns the pause before the next try, if there is one, and whether the store
    /// has now refused the work so often that no flush waits for it any more.
    pub(crate) fn failed(&mut self, error: &Error, now: Instant) -> Option<(Duration, bool)> {
        if now >= self.deadline {
            return None;
        }
        let refusals = self.refusals;
        if !error.is_outage() {
            self.refusals = refusals.saturating_add(1);
        }
        let gives_up_flush = refusals < REFUSALS && self.refusals >= REFUSALS;
        if gives_up_flush {
            self.work.refused();
        }
        let pause = match self.refusals {
            REFUSALS.. => PAUSE_REFUSED,
            _ => PAUSE,
        };
        Some((pause, gives_up_flush))
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
        let unnamed = background.begin(&object("a"));
        unnamed.to_ref().unnamed();
        assert_eq!(state(), (true, String::new()));
        drop(unnamed);
        let works = ["a", "b", "c"].map(|name| background.begin(&object(name)));
        assert_eq!(state(), (true, "abc".into()));
        works[0].to_ref().refused();
        works[1].to_ref().needless();
        assert_eq!(state(), (true, "ac".into()));
        works[2].to_ref().refused();
        assert_eq!(state(), (false, "ac".into()));
        assert_eq!(background.running(), 3);
        drop(works);
        assert_eq!((state(), background.running()), ((false, String::new()), 0));
    }

    /// A busy client has work at any time. A flush waits for what ran before, and what that leads
    /// to.
    #[tokio::test]
    async fn flush_ends_beside_later_work() {
        let background = Background::default();
        let mut flush = std::pin::pin!(background.flush());
        let mut is_done = || {
            let mut cx = Context::from_waker(std::task::Waker::noop());
            flush.as_mut().poll(&mut cx).is_ready()
        };
        let mut work = background.begin(&object("a"));
        assert!(!is_done());
        let _later = background.begin(&object("b"));
        for _ in 0..9 {
            let next = work.enter(|| background.begin(&object("a")));
            drop(work);
            assert!(!is_done(), "what it led to still runs");
            work = next;
        }
        drop(work);
        assert!(is_done());
    }

    /// What is polled, handed on or dropped as part of a work has the origin of that work, in the
    /// same client.
    #[tokio::test]
    async fn parts_of_a_work_lead_to_what_they_begin() {
        struct Part(Background, u64);
        impl Part {
            fn begin(&self) {
                assert_eq!(self.0.begin(&object("b")).0.origin, self.1);
            }
        }
        impl Drop for Part {
            fn drop(&mut self) {
                self.begin();
            }
        }
        let (background, other) = (Background::default(), Background::default());
        let part = |of: &Background| {
            let running = background.begin(&object("a"));
            let origin = match Arc::ptr_eq(&of.0, &background.0) {
                true => running.0.origin,
                false => of.0.works.lock().latest + 1,
            };
            Counted::new(Part(of.clone(), origin), running)
        };
        drop(part(&background));
        drop(part(&other));
        part(&background).end(|part| {
            drop(part);
            Some(())
        });
        let running = background.begin(&object("a"));
        let value = Part(background.clone(), running.0.origin);
        let work = Box::pin(async move {
            value.begin();
            tokio::task::yield_now().await;
            value.begin();
        });
        Counted::new(work, running).await;
        let later = background.begin(&object("c"));
        assert_eq!(later.0.origin, later.0.number);
    }

    /// A check that is not answered delays no flush, is not counted, and names no object that may be held.
    #[tokio::test]
    async fn flush_waits_for_no_check() {
        let background = Background::default();
        background.remember_runtime().unwrap();
        background.spawn_check(&object("a"), std::future::pending());
        let flush = tokio::time::timeout(Duration::from_secs(60), background.flush());
        flush.await.unwrap();
        assert!(background.unsettled().is_empty());
        assert_eq!(background.running(), 0);
    }

    /// The thread is in none of the runtimes.
    #[test]
    fn work_begins_in_the_latest_runtime_that_is_alive() {
        let background = Background::default();
        let [living, ended, ending] = [(); 3].map(|()| background.runtime_for_test());
        let work = || {
            let (sender, receiver) = tokio::sync::oneshot::channel();
            let work = async move { sender.send(Handle::current().id()).unwrap() };
            background.spawn(&object("a"), work);
            receiver
        };
        let queued = work();
        drop(ended);
        drop(ending);
        let later = work();
        living.block_on(async {
            for begun in [queued, later] {
                assert_eq!(begun.await.unwrap(), living.handle().id());
            }
        });
        drop(living);
        assert!(work().blocking_recv().is_err(), "there is no runtime");
        assert_eq!(background.running(), 0);
        for _ in 0..9 {
            drop(background.runtime_for_test());
        }
        assert_eq!(background.0.runtimes.lock().len(), 1);
    }

    /// Its timers belong to that runtime: polled in another one, they would panic.
    #[test]
    fn detached_work_ends_with_the_runtime_that_polled_it() {
        struct Ends(std::sync::mpsc::Sender<bool>);
        impl Drop for Ends {
            fn drop(&mut self) {
                let _ = self.0.send(std::thread::panicking());
            }
        }
        let background = Background::default();
        let [staying, ending] = [(); 2].map(|()| background.runtime_for_test());
        let (ends, panicked) = std::sync::mpsc::channel();
        let (client, ends) = (background.clone(), Ends(ends));
        ending.spawn(async move {
            let work = async move {
                tokio::time::sleep(Duration::from_secs(60)).await;
                drop(ends);
            };
            client.detach_on_drop(&object("a"), work, || true).await;
        });
        ending.block_on(tokio::task::yield_now());
        drop(ending);
        staying.block_on(background.flush());
        assert_eq!(panicked.recv(), Ok(false));
    }

    /// Such a runtime also keeps tasks that were aborted.
    #[test]
    fn runtime_that_is_not_driven_has_one_task() {
        let background = Background::default();
        let idle = background.runtime_for_test();
        let tasks = || idle.handle().metrics().num_alive_tasks();
        for _ in 0..9 {
            drop(background.runtime_for_test());
        }
        let runtime = background.runtime(None).unwrap();
        assert_eq!(runtime.id(), idle.handle().id());
        assert_eq!(tasks(), 1);
        drop(background);
        idle.block_on(tokio::task::yield_now());
        assert_eq!(tasks(), 0);
    }

    #[test]
    fn refused_work_is_tried_a_few_times_and_then_seldom() {
        let (outage, refusal) = (
            Error::unavailable("down"),
            Error::NotPermitted {
                reason: String::new(),
            },
        );
        let background = Background::default();
        let running = background.begin(&object("a"));
        let (now, time) = (Instant::now(), Duration::from_secs(60));
        let mut tries = Tries::new(running.to_ref(), now + time);
        let few = (0..100)
            .map(|_| &outage)
            .chain((1..REFUSALS).map(|_| &refusal));
        for error in few {
            assert_eq!(tries.failed(error, now), Some((PAUSE, false)));
            assert!(background.0.works.lock().are_awaited(1));
        }
        for (error, is_last) in [(&refusal, true), (&outage, false), (&refusal, false)] {
            assert_eq!(tries.failed(error, now), Some((PAUSE_REFUSED, is_last)));
            assert!(!background.0.works.lock().are_awaited(1));
        }
        assert!(tries.failed(&outage, now + time - PAUSE).is_some());
        assert_eq!(tries.failed(&outage, now + time), None);
    }
}
