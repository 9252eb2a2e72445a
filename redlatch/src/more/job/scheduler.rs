//! Runs the firings of a job on this machine: what [`Plan`] and [`Firing`] decide.

use std::any::Any;
use std::fmt::{self, Display};
use std::future::{pending, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::cron::{Cron, utc};
use super::history::{MAX_OUTPUT, last_bytes};
use super::plan::{ASK_PAUSE, CatchUp, Due, Ending, Firing, Next, Plan, gap};
use super::rules::{Begin, Begun, KEPT, Overlap, attempt_key, finish, read};
use super::{History, Job, RunState};
use crate::client_registry::shortened;
use crate::environment::{random, random_fraction};
use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::lease::{self, Lease};
use crate::locks::read_write::ReadWriteLock;
use crate::locks::{Guard, Lock, Reentrant};
use crate::more::once::identity;
use crate::more::revocation::asked;
use crate::name::ReadWriteKeys;
use crate::owner::Owner;
use crate::session::Session;
use crate::store::{Delivery, Progress, Store};
use crate::{MAX_LEASE, ReadLock};

/// How long the record of a job remains after its latest run, in addition to two of its periods.
const REMEMBERED_FOR: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// How long a machine repeats the record of an end that the store refuses.
const REFUSED_FOR: Duration = Duration::from_secs(60);

/// What fired just before a process started counts as due: with a new schedule it may take the place
/// of a scheduler that has not done it.
const START_GRACE: Duration = Duration::from_secs(1);

/// A job and the times at which it fires: [`Job::schedule`].
///
/// [`run`](Scheduled::run) it on several machines, with the same settings. For each firing:
///
/// - One machine runs the work. The store decides which one: the firing is named by its scheduled
///   time, so the clocks may differ by up to half a period. A machine whose clock is ahead of the
///   server's by more than that, or by more than a minute, waits.
/// - The machine holds the lock with the name of the job meanwhile. If it loses the lock, it drops
///   the work. If it dies, the lock ends with its lease: then another machine repeats the firing if
///   [`retry`](Scheduled::retry) allows it. Otherwise the run is recorded as lost.
/// - The store keeps the last 20 runs: [`Job::history`].
///
/// A store that loses its data (a restart without persistence, a failover to a replica that missed
/// a record) allows the firings of that time once more.
#[derive(Clone)]
pub struct Scheduled {
    job: Job,
    cron: Cron,
    overlap: Overlap,
    catch_up: CatchUp,
    retries: u32,
    jitter: Duration,
    timeout: Option<Duration>,
    /// Since when the job has had its schedule. `None`: since it is run.
    since: Option<SystemTime>,
    clock: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

/// One run of a job, as its work sees it.
#[derive(Clone)]
pub struct Run {
    name: String,
    slot: SystemTime,
    attempt: u32,
    /// Its lock, if the holder of that can be asked to release it.
    hold: Option<(Arc<Session>, Arc<Hold>)>,
}

impl Run {
    /// Returns the name of the job.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the time for which the run was scheduled. The same on all machines, and in another
    /// attempt.
    pub fn slot(&self) -> SystemTime {
        self.slot
    }

    /// Returns 1, or more if the [run before has no end](Scheduled::retry).
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Completes when another client asks for the lock of the run: [`Lock::ask`](crate::Lock::ask),
    /// [`Lock::revoke`](crate::Lock::revoke). Never with [`Overlap::Allow`]. See
    /// [`Guard::asked`](crate::Guard::asked). Work that ends then is not repeated, and has the outcome
    /// that it returns. After the run it never completes.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again at any time.
    pub fn asked(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let hold = self.hold.as_ref();
        let asked = hold.map(|(session, hold)| asked(session.clone(), hold.clone()));
        async move {
            match asked {
                Some(asked) => asked.await,
                None => pending().await,
            }
        }
    }
}

/// How a run has ended. Work that returns `()` or `Ok(())` has succeeded. With `Err` or a panic it has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    state: &'static str,
    text: String,
    output: String,
}

impl Outcome {
    /// Returns the outcome of work that has succeeded, such as `42 pages`.
    pub fn success(text: impl Into<String>) -> Outcome {
        Outcome::new("ok", text.into())
    }

    /// Returns the outcome of work that has failed, such as `exit code 3`.
    pub fn failure(text: impl Into<String>) -> Outcome {
        Outcome::new("failed", text.into())
    }

    /// Adds the output of the work. The last [`MAX_OUTPUT`] bytes are kept.
    #[must_use]
    pub fn output(mut self, output: &str) -> Outcome {
        last_bytes(output, MAX_OUTPUT).clone_into(&mut self.output);
        self
    }

    fn new(state: &'static str, text: String) -> Outcome {
        Outcome {
            state,
            text,
            output: String::new(),
        }
    }

    /// Returns the lines that the store keeps.
    fn lines(&self) -> String {
        format!(
            "{}\n{}\n{}",
            self.state,
            line(shortened(&self.text)),
            self.output
        )
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Outcome {
        Outcome::success("")
    }
}

impl<E: Display> From<Result<(), E>> for Outcome {
    fn from(result: Result<(), E>) -> Outcome {
        match result {
            Ok(()) => Outcome::success(""),
            Err(error) => Outcome::failure(error.to_string()),
        }
    }
}

/// The lock of a run, which shows that its machine lives.
enum Held {
    Alone(Guard<Lock>),
    Shared(Guard<ReadLock>),
}

/// What the firings of a job on this machine have to know.
#[derive(Debug, Clone, Copy)]
struct Progressed {
    /// The latest slot that is due.
    latest: SystemTime,
    stops: bool,
}

impl Scheduled {
    pub(super) fn new(job: Job, cron: Cron) -> Scheduled {
        Scheduled {
            job,
            cron,
            overlap: Overlap::default(),
            catch_up: CatchUp::default(),
            retries: 0,
            jitter: Duration::ZERO,
            timeout: None,
            since: None,
            clock: Arc::new(SystemTime::now),
        }
    }

    /// Sets what happens when a firing is due while another run lasts. Default: it is
    /// [skipped](Overlap::Skip).
    #[must_use]
    pub fn overlap(mut self, overlap: Overlap) -> Scheduled {
        self.overlap = overlap;
        self
    }

    /// Sets what happens with firings that could not begin in time. Default: they are
    /// [missed](CatchUp::None).
    #[must_use]
    pub fn catch_up(mut self, catch_up: CatchUp) -> Scheduled {
        self.catch_up = catch_up;
        self
    }

    /// Sets how often a firing is repeated, by any machine of the job, if its run has no end: the machine
    /// has died, or the lock was lost, because the machine could not reach the store for longer than the
    /// lease, or because it was revoked or forced open. Default 0, because such a run may have done its
    /// work. Work that has ended is never repeated, also if it has failed (let the work itself try
    /// again), unless its end could not be recorded: the store could not be reached until the lease had ended,
    /// or refused it for a minute. If a later firing has begun meanwhile, the run is not repeated either. At
    /// most 19.
    #[must_use]
    pub fn retry(mut self, retries: u32) -> Scheduled {
        self.retries = retries;
        self
    }

    /// Sets by how much a machine may delay a firing at random, so that not the same machine runs
    /// all jobs, and not all jobs begin in one moment. At most half a period is used. Default 0.
    #[must_use]
    pub fn jitter(mut self, jitter: Duration) -> Scheduled {
        self.jitter = jitter;
        self
    }

    /// Sets how long a run may take. Then the work is dropped, and the run has failed. Default:
    /// without a limit.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Scheduled {
        self.timeout = Some(timeout);
        self
    }

    /// Sets since when the job has had this schedule, although with other settings: a firing since
    /// then that is due, and not late, is taken over. For the command, not part of the public
    /// interface.
    #[doc(hidden)]
    #[must_use]
    pub fn since(mut self, since: SystemTime) -> Scheduled {
        self.since = Some(since);
        self
    }

    /// Sets the clock, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Scheduled {
        self.clock = Arc::new(clock);
        self
    }

    /// Returns the job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Runs `work` at each firing that this machine gets, until an error. All of it is part of this
    /// future: several runs may take turns in it ([`Overlap::Allow`]), and none has a task of its
    /// own.
    ///
    /// A run whose work returns `Err` or panics has failed. That is logged and recorded, and the next
    /// firing runs as usual.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](Error::InvalidName), [`InvalidSetting`](Error::InvalidSetting),
    /// [`NoRuntime`](Error::NoRuntime), and what the store refuses for good at the beginning, such as
    /// [`AuthenticationFailed`](Error::AuthenticationFailed). Later it logs errors and continues,
    /// and waits through outages.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops the work that runs, and releases the locks in the background. Those
    /// runs count as lost, as if this process had died. [`run_until`](Scheduled::run_until) lets
    /// them end.
    pub async fn run<F, W>(&self, work: F) -> Result<()>
    where
        F: Fn(Run) -> W,
        W: Future<Output: Into<Outcome>>,
    {
        self.run_until(pending(), work).await
    }

    /// Does the same until `stop` completes. Then it begins no further run, and returns when those
    /// that it has begun have ended.
    ///
    /// # Errors
    ///
    /// As [`run`](Scheduled::run).
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Scheduled::run).
    pub async fn run_until<F, W>(&self, stop: impl Future<Output = ()>, work: F) -> Result<()>
    where
        F: Fn(Run) -> W,
        W: Future<Output: Into<Outcome>>,
    {
        self.check()?;
        crate::runtime::current()?;
        let begun = self.now() - START_GRACE;
        let mut plan = Plan::new(self.cron.clone(), self.catch_up, self.jitter, begun);
        let (progressed, _) = watch::channel(Progressed {
            latest: SystemTime::UNIX_EPOCH,
            stops: false,
        });
        let mut stop = pin!(stop);
        let known = tokio::select! {
            biased;
            () = &mut stop => return Ok(()),
            known = self.known() => known?,
        };
        let since = self.since.unwrap_or(begun);
        let unfinished = plan.resume(known.as_ref(), since, self.overlap);
        let mut firings = FuturesUnordered::new();
        let firing = |plan: &Plan, slot| {
            let jitter = plan.jitter(slot);
            Firing::new(slot, jitter, self.overlap, self.retries, self.catch_up)
        };
        let fire = |plan: &Plan, firing: Firing, after| {
            let ahead = plan.ahead(firing.slot);
            self.fire(firing, after, ahead, progressed.subscribe(), &work)
        };
        if let (Some(slot), 1..) = (unfinished, self.retries) {
            let watching = firing(&plan, slot).watch(self.now());
            firings.push(fire(&plan, watching, Duration::ZERO));
        }
        loop {
            let pause = match plan.due(self.now(), random_fraction()) {
                Due::Sleep(pause) => pause,
                Due::Fire(slot, after) => {
                    progressed.send_modify(|progressed| progressed.latest = slot);
                    firings.push(fire(&plan, firing(&plan, slot), after));
                    continue;
                }
                Due::Missed(first, last) => {
                    self.log_missed(first, last);
                    continue;
                }
            };
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(()) = firings.next() => {}
                () = sleep(pause) => {}
            }
        }
        progressed.send_modify(|progressed| progressed.stops = true);
        while firings.next().await.is_some() {}
        Ok(())
    }

    fn now(&self) -> SystemTime {
        (self.clock)()
    }

    /// Checks the name and the settings. For the command, not part of the public interface.
    #[doc(hidden)]
    pub fn check(&self) -> Result<()> {
        self.job.keys.object.check()?;
        for (setting, time) in [("jitter", Some(self.jitter)), ("timeout", self.timeout)] {
            if time.is_some_and(|time| time > MAX_LEASE) {
                let reason = "use up to ten years".to_owned();
                return Err(Error::InvalidSetting { setting, reason });
            }
        }
        if self.retries >= KEPT {
            let reason = format!("use fewer than {KEPT}");
            let setting = "retry";
            return Err(Error::InvalidSetting { setting, reason });
        }
        Ok(())
    }

    /// Returns what the store knows. Waits through an outage.
    async fn known(&self) -> Result<Option<History>> {
        let store = &self.job.session.store;
        loop {
            match store.run_idempotent(&read(&self.job.keys, false)).await {
                Ok(record) => return Ok(History::new(self.job.name(), &record, store)),
                Err(error) if error.is_transient() => sleep(Duration::from_secs(1)).await,
                Err(error) => return Err(error),
            }
        }
    }

    /// Does one firing, to the end of its run if this machine gets it.
    async fn fire<F, W>(
        &self,
        mut firing: Firing,
        mut after: Duration,
        ahead: Duration,
        progressed: watch::Receiver<Progressed>,
        work: &F,
    ) where
        F: Fn(Run) -> W,
        W: Future<Output: Into<Outcome>>,
    {
        let slot = firing.slot;
        loop {
            let deciding = self.decide(firing.clone(), after, ahead, progressed.clone());
            let (held, id, attempt) = match deciding.await {
                Ok(begun) => begun,
                Err(Ending::Missed) => {
                    let mut progressed = progressed.clone();
                    return tokio::select! {
                        biased;
                        _ = progressed.wait_for(|now| now.stops) => {}
                        () = self.missed(slot) => {}
                    };
                }
                Err(Ending::Skipped) => {
                    let (job, slot) = (self.job.keys.object.full_name(), utc(slot));
                    return tracing::info!(
                        job,
                        slot,
                        "a firing was skipped because another run lasts"
                    );
                }
                Err(Ending::Elsewhere) => return,
            };
            let run = Run {
                name: self.job.name().to_owned(),
                slot,
                attempt,
                hold: held.askable(),
            };
            let working = async {
                match self.timeout {
                    None => work(run).await.into(),
                    Some(limit) => match timeout(limit, work(run)).await {
                        Ok(output) => output.into(),
                        Err(_) => Outcome::failure(format!("timed out after {limit:?}")),
                    },
                }
            };
            let job = self.job.keys.object.full_name();
            let outcome = match held.run(fail_if_it_panics(working)).await {
                Ok(outcome) => {
                    if outcome.state == "failed" {
                        tracing::warn!(
                            job,
                            slot = utc(slot),
                            attempt,
                            outcome = shortened(&outcome.text),
                            "a run failed"
                        );
                    }
                    outcome
                }
                Err(loss) => {
                    let slot = utc(slot);
                    tracing::warn!(job, slot, attempt, %loss, "the lock of a run was lost");
                    if attempt <= self.retries {
                        // The machine that repeats the firing records the loss. It may be this one.
                        held.release().await;
                        (firing, after) = (firing.watch(self.now()), Duration::ZERO);
                        continue;
                    }
                    Outcome::new("lost", loss.to_string())
                }
            };
            let of = attempt_key(millis(slot), attempt);
            self.finish(&held, &id, &of, &outcome.lines()).await;
            return held.release().await;
        }
    }

    /// Records the end of a run, and repeats that while the lock is held: without an end the run would
    /// be taken for dead. A refusal may last, so the record is repeated for a limited time.
    async fn finish(&self, held: &Held, id: &str, of: &str, end: &str) {
        let Job { session, keys } = &self.job;
        let (object, ended) = (&keys.object, Instant::now());
        loop {
            let step = finish(keys, id, of, end);
            match session.store.run_urgent(&step).await {
                Ok(true) => return,
                Ok(false) => {
                    let job = object.full_name();
                    return tracing::warn!(job, "a run ended that is not kept or counts as lost");
                }
                Err(error)
                    if held.is_valid()
                        && (error.is_transient() || ended.elapsed() < REFUSED_FOR) =>
                {
                    sleep(Duration::from_secs(1)).await;
                }
                Err(error) => {
                    let job = object.full_name();
                    return tracing::warn!(job, %error, "the end of a run was not recorded");
                }
            }
        }
    }

    /// Acquires the lock and begins the run. Returns the lock, the id of the run and its attempt,
    /// or why this machine does not run it.
    async fn decide(
        &self,
        mut firing: Firing,
        after: Duration,
        ahead: Duration,
        mut progressed: watch::Receiver<Progressed>,
    ) -> Result<(Held, String, u32), Ending> {
        let (mut held, mut id, mut logged) = (None::<Held>, String::new(), false);
        tokio::select! {
            biased;
            _ = progressed.wait_for(|now| now.stops) => return Err(Ending::Elsewhere),
            () = sleep(after) => {}
        }
        let mut next = Next::Lock(Duration::ZERO);
        loop {
            let (slot, gives_way) = (firing.slot, firing.gives_way());
            let is_later = |now: &Progressed| gives_way.is_some() && now.latest > slot;
            let over = async {
                let now = progressed.wait_for(|now| now.stops || is_later(now));
                let stops = now.await.is_ok_and(|now| now.stops);
                gives_way.filter(|_| !stops).unwrap_or(Ending::Elsewhere)
            };
            next = match next {
                Next::Lock(wait) => {
                    let locked = tokio::select! {
                        biased;
                        ending = over => return Err(ending),
                        locked = self.lock(wait, slot) => locked,
                    };
                    match locked {
                        Ok(Some(guard)) => {
                            held = Some(guard);
                            id = format!("{}:{}", self.job.session.id.as_str(), random());
                            Next::Begin
                        }
                        Ok(None) => Next::Ask,
                        Err(error) => self.failed(&mut firing, &error, &mut logged),
                    }
                }
                Next::Begin | Next::Ask => {
                    match self.begin(&firing, held.as_ref(), &id, ahead).await {
                        Ok(reply) => {
                            logged = false;
                            firing.replied(reply, held.is_none(), self.now())
                        }
                        Err(error) => match self.failed(&mut firing, &error, &mut logged) {
                            // The same run may have begun: repeated with its id.
                            Next::Pause(pause)
                                if error.is_transient()
                                    && held.as_ref().is_some_and(Held::is_valid) =>
                            {
                                drop(over);
                                tokio::select! {
                                    biased;
                                    _ = progressed.wait_for(|now| now.stops) => {
                                        return Err(Ending::Elsewhere);
                                    }
                                    () = sleep(pause) => {}
                                }
                                // Without the lock, the run would be lost before its work began.
                                match held.as_ref().is_some_and(Held::is_valid) {
                                    true => Next::Begin,
                                    false => Next::Pause(Duration::ZERO),
                                }
                            }
                            other => other,
                        },
                    }
                }
                Next::Pause(pause) => {
                    if let Some(held) = held.take() {
                        held.release().await;
                    }
                    tokio::select! {
                        biased;
                        ending = over => return Err(ending),
                        () = sleep(pause) => {}
                    }
                    Next::Lock(Duration::ZERO)
                }
                Next::Run(attempt) => match held.take() {
                    Some(held) => return Ok((held, id, attempt)),
                    // Only what holds the lock begins.
                    None => return Err(Ending::Elsewhere),
                },
                Next::End(ending) => {
                    if let Some(held) = held.take() {
                        held.release().await;
                    }
                    return Err(ending);
                }
            };
        }
    }

    /// The store could not be reached, or has refused a request. Only the first refusal since it
    /// replied is logged: a run may be watched for hours.
    fn failed(&self, firing: &mut Firing, error: &Error, logged: &mut bool) -> Next {
        if !error.is_transient() && !std::mem::replace(logged, true) {
            let (job, slot) = (self.job.keys.object.full_name(), utc(firing.slot));
            tracing::warn!(job, slot, %error, "a firing was refused; retrying");
        }
        firing.failed(self.now())
    }

    /// Logs that a firing was missed. By then, a machine that had just acquired the lock for it has begun.
    async fn missed(&self, slot: SystemTime) {
        sleep(ASK_PAUSE).await;
        let history = self.job.history_without_outputs().await.ok().flatten();
        let mut runs = history.into_iter().flat_map(|history| history.runs);
        // A run that is lost may be this machine's: begun, and never started.
        if !runs.any(|run| run.slot == slot && run.state != RunState::Lost) {
            self.log_missed(slot, slot);
        }
    }

    fn log_missed(&self, slot: SystemTime, last: SystemTime) {
        let until = (last > slot).then(|| utc(last));
        let (job, slot) = (self.job.keys.object.full_name(), utc(slot));
        tracing::warn!(job, slot, until, "a firing was missed");
    }

    async fn lock(&self, wait: Duration, slot: SystemTime) -> Result<Option<Held>> {
        let (session, name) = (self.job.session.clone(), self.job.name());
        let note = format!("run of {}", utc(slot));
        // Not the owner of a scope: a run whose owner does not hold the lock is dead.
        let owner = Owner::new();
        Ok(match self.overlap {
            Overlap::Allow => {
                let lock = ReadWriteLock::new(session, name).read();
                let request = lock.try_lock().owner(owner).wait(wait).note(note);
                request.await?.map(Held::Shared)
            }
            Overlap::Skip | Overlap::Wait => {
                let lock = Lock::new(session, name, Reentrant::new);
                let request = lock.try_lock().owner(owner).wait(wait).note(note);
                request.await?.map(Held::Alone)
            }
        })
    }

    async fn begin(
        &self,
        firing: &Firing,
        held: Option<&Held>,
        id: &str,
        ahead: Duration,
    ) -> Result<Begun> {
        let Job { session, keys } = &self.job;
        let (host, by) = identity(session);
        let (owner, lock) = match held {
            None => Default::default(),
            Some(Held::Alone(guard)) => {
                (guard.owner_id().to_string(), keys.object.key().to_owned())
            }
            Some(Held::Shared(guard)) => {
                let owner = guard.owner_id().to_string();
                let keys = ReadWriteKeys::new(&session.prefix, self.job.name());
                (String::new(), keys.reader_timeouts_prefix(&owner) + ":1")
            }
        };
        let kept = REMEMBERED_FOR + 2 * gap(&self.cron, firing.slot);
        let runner = [
            &owner,
            &lock,
            &line(shortened(&host)),
            &line(shortened(&by)),
        ];
        let step = Begin {
            keys,
            run: if held.is_some() { id } else { "" },
            slot: millis(firing.slot),
            attempts: self.retries.saturating_add(1),
            ahead: match &*session.store {
                Store::Redis(_) => lease::millis(ahead),
                // Its times do not count from 1970.
                Store::Embedded(_) => 0,
            },
            overlap: firing.overlap,
            kept: KEPT,
            time_to_live: Lease::from_remaining(kept),
            runner: &runner.map(String::as_str).join("\n"),
            schedule: &format!("{} {}", self.cron.tz(), self.cron.expression()),
        };
        let (step, progress) = (step.step(), Progress::default());
        if held.is_none() {
            return session.store.run_idempotent(&step).await;
        }
        let delivery = Delivery::acquisition(false);
        let answer = session.store.run(&step, None, delivery, &progress).await?;
        if let Some(confirmation) = answer.confirmation {
            confirmation.confirmed(&progress).await?;
        }
        Ok(answer.reply)
    }
}

impl Held {
    async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        match self {
            Held::Alone(guard) => guard.run_while_held(work).await,
            Held::Shared(guard) => guard.run_while_held(work).await,
        }
    }

    /// Returns the lock, if its holder can be asked to release it.
    fn askable(&self) -> Option<(Arc<Session>, Arc<Hold>)> {
        match self {
            Held::Alone(guard) => {
                let held = guard.hold_ref();
                Some((held.session.clone(), held.hold.clone()))
            }
            Held::Shared(_) => None,
        }
    }

    fn is_valid(&self) -> bool {
        match self {
            Held::Alone(guard) => guard.is_valid(),
            Held::Shared(guard) => guard.is_valid(),
        }
    }

    /// Releases it. What the store does not answer is settled in the background.
    async fn release(self) {
        let _ = match self {
            Held::Alone(guard) => guard.release_unless_lost().await,
            Held::Shared(guard) => guard.release_unless_lost().await,
        };
    }
}

/// Runs the work. A panic ends it, and not the other runs nor the scheduler.
async fn fail_if_it_panics(work: impl Future<Output = Outcome>) -> Outcome {
    let mut work = pin!(work);
    let working = poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx)));
        polled.unwrap_or_else(|panic| {
            let text = format!("panicked: {}", panic_text(&*panic));
            Poll::Ready(Outcome::failure(text))
        })
    });
    working.await
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("not with a text")
}

/// Returns a time in milliseconds since 1970.
pub(super) fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    lease::millis(since.unwrap_or_default())
}

/// Returns a text in one line.
fn line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("name", &self.name)
            .field("slot", &self.slot)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Scheduled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduled")
            .field("name", &self.job.name())
            .field("cron", &self.cron)
            .field("overlap", &self.overlap)
            .field("catch_up", &self.catch_up)
            .field("retry", &self.retries)
            .field("jitter", &self.jitter)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
