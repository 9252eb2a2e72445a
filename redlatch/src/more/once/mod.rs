//! Jobs that run at most once for each slot, in the whole fleet. Redisson has nothing like it.

#[cfg(test)]
mod differential;
mod rules;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use self::rules::{Begin, Begun, Record, finish};
use crate::client_registry::shortened;
use crate::environment::{process_info, random};
use crate::error::{Error, Loss, Result};
use crate::hold::Validity;
use crate::lease::{self, Lease, MAX_LEASE};
use crate::locks::{Guard, HasLease, HeldForLease as _};
use crate::name::{MAX_NAME_BYTES, ObjectKeys, OnceKeys};
use crate::session::Session;
use crate::store::{Delivery, Progress, Store};

/// How long a record remains by default.
const REMEMBERED_FOR: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The outcome of a run that was dropped before it was finished.
const DROPPED: &str = "dropped";
/// The outcome of [`Once::run`].
const FINISHED: &str = "finished";

/// What a job may run once for: a length of time, or a text such as a planned time.
///
/// ```
/// # use std::time::Duration;
/// use redlatch::Slot;
///
/// let hourly = Slot::per(Duration::from_secs(3600)); // each full hour of the server's clock (UTC)
/// let planned = Slot::from("2026-11-22T02:00");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot(SlotKind);

#[derive(Debug, Clone, PartialEq, Eq)]
enum SlotKind {
    Per { length: Duration, offset: Duration },
    Named(String),
}

impl Slot {
    /// Slots of this length by the clock of the server: slot n begins n times this length after
    /// 1970-01-01T00:00:00Z. So those of a day begin at midnight UTC. 1 ms to
    /// [`MAX_LEASE`](crate::MAX_LEASE), truncated to whole milliseconds. The clocks of the clients
    /// do not matter. All users of a name must use the same length, because its slots share one
    /// record. (In an embedded store the first slot begins when the store is first used.)
    pub fn per(length: Duration) -> Slot {
        Slot(SlotKind::Per {
            length,
            offset: Duration::ZERO,
        })
    }

    /// Begins each slot this much later: `Slot::per(day).offset(2 * hour)` begins at 02:00 UTC, and in a place that
    /// is two hours ahead of UTC all year, `offset(22 * hour)` begins at midnight. Up to
    /// [`MAX_LEASE`](crate::MAX_LEASE), truncated to whole milliseconds. As the length, it must be the same for all users of
    /// a name. A slot with a name has no beginning, and does not change.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let hour = Duration::from_secs(3600);
    /// let at_two = redlatch::Slot::per(24 * hour).offset(2 * hour);
    /// assert!(client.once("backup", at_two).begin().await?.is_ok());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn offset(mut self, later: Duration) -> Slot {
        if let SlotKind::Per { offset, .. } = &mut self.0 {
            *offset = later;
        }
        self
    }
}

/// The slot with this name: 1 to 512 bytes. All processes must compute the same text, for example
/// from the planned time.
impl From<&str> for Slot {
    fn from(name: &str) -> Slot {
        Slot(SlotKind::Named(name.to_owned()))
    }
}

/// As from a `&str`.
impl From<String> for Slot {
    fn from(name: String) -> Slot {
        Slot(SlotKind::Named(name))
    }
}

/// A job that runs at most once for each slot, in all processes:
/// [`Client::once`](crate::Client::once).
///
/// One script of the server checks whether the slot has had a run, and records this one, before the
/// work starts. So the slot is never repeated: not by machines whose clocks differ, not if the work
/// takes a millisecond, and not if the process dies in the middle. Work that must be repeated until
/// it has succeeded needs a lock and a state of its own instead.
///
/// This is no lock: the run of one slot may last until those of the next ones. Use it while holding
/// a lock of the same name to prevent that, as `redlatch run --once-per` does.
///
/// The record contains the machine and process, the times and the outcome. It remains for [seven
/// days](Once::remembered_for). A store that loses it (a restart without persistence, a failover to
/// a replica that missed it) allows the slot once more. [`ReplicaSync`](crate::ReplicaSync) applies
/// to the beginning of a run as to an acquisition.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let once = client.once("nightly-report", "2026-11-22T02:00");
/// match once.begin().await? {
///     Ok(run) => {
///         // … the work …
///         run.finish("42 pages").await?;
///     }
///     Err(earlier) => println!("{} began it", earlier.by),
/// }
/// let earlier = once.begin().await?.unwrap_err();
/// assert_eq!(earlier.outcome.as_deref(), Some("42 pages"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Once {
    session: Arc<Session>,
    keys: Arc<OnceKeys>,
    slot: SlotKind,
    remembered_for: Duration,
    retry: Option<Retry>,
}

/// How often a slot may have a run in the place of one without an outcome.
#[derive(Clone)]
struct Retry {
    times: u32,
    is_held: Validity,
}

/// The only run of a slot, which has begun: [`Once::begin`]. If it is dropped, the outcome
/// `dropped` is recorded in the background.
#[must_use = "the slot cannot have another run"]
pub struct OnceRun {
    session: Arc<Session>,
    keys: Arc<OnceKeys>,
    id: String,
    attempt: u32,
    is_finished: bool,
}

/// The run that a slot has had already, or that lasts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlreadyRan {
    /// Name of the machine that ran it.
    pub host: String,
    /// The process: `label@host (pid 4711)`, with the name of the program if its client has no
    /// [label](crate::ClientBuilder::label).
    pub by: String,
    /// When it began, by the clock of the server.
    pub at: SystemTime,
    /// How long it took. `None`: it has not finished. It lasts, its process has died, or the store
    /// could not be reached.
    pub took: Option<Duration>,
    /// How it ended: the text of [`OnceRun::finish`], or `finished` ([`Once::run`]) or `dropped`.
    pub outcome: Option<String>,
    /// Which run of the slot it is: [`OnceRun::attempt`].
    pub attempt: u32,
}

impl Once {
    pub(crate) fn new(session: Arc<Session>, name: &str, slot: Slot) -> Once {
        let named = match &slot.0 {
            SlotKind::Named(name) => Some(&**name),
            SlotKind::Per { .. } => None,
        };
        Once {
            keys: Arc::new(OnceKeys::new(&session.prefix, name, named)),
            session,
            slot: slot.0,
            remembered_for: REMEMBERED_FOR,
            retry: None,
        }
    }

    /// Sets how long the record of a run remains, from its beginning; default seven days. 1 ms to
    /// ten years. That of a slot with a length remains for the length of a slot in addition. A
    /// process that asks for a slot with a name later than that runs it once more, so this must be
    /// longer than the longest delay of any machine.
    #[must_use]
    pub fn remembered_for(mut self, time: Duration) -> Once {
        self.remembered_for = time;
        self
    }

    /// Allows the slot this many further runs, each if the latest has no outcome: its process has died, or could not
    /// reach the store. Default: none.
    ///
    /// The record does not tell whether a run without an outcome lasts. A lock does: `held` is a guard of a lock that *every* run
    /// of this job holds until its end, of the same name or another. While this process holds it, no other run lasts. So a
    /// process that waits for the lock takes over when the runner dies. When `held` has been released or lost, this handle begins
    /// nothing any more. If it is lost while the store begins the run, [`begin`](Once::begin) fails, and that run counts as one of `times`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// # async fn report() {}
    /// let held = client.lock("nightly-report").lock().await?; // waits while another process runs it
    /// let once = client.once("nightly-report", "2026-11-22").retry_unfinished(2, &held);
    /// match held.run(once.run(report())).await?? {
    ///     Ok(()) => held.unlock().await?,
    ///     Err(earlier) => println!("{} ran it", earlier.by),
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn retry_unfinished<L: HasLease>(mut self, times: u32, held: &Guard<L>) -> Once {
        let is_held = held.held.validity();
        self.retry = Some(Retry { times, is_held });
        self
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.keys.object.name()
    }

    /// Begins the run of the current slot. If the slot has one already, returns that, as the inner
    /// error.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](Error::InvalidName), and [`InvalidSetting`](Error::InvalidSetting) for a
    /// slot or time that cannot be used. [`Lost`](Error::Lost): the guard of
    /// [`retry_unfinished`](Once::retry_unfinished) is not held any more. Otherwise as
    /// [`Lock::is_locked`](crate::Lock::is_locked), and [`NotReplicated`](Error::NotReplicated).
    /// After an error of the connection or of the replicas it is unknown whether the slot counts as
    /// used. Then a later call may return a run of this process that never started.
    ///
    /// # Cancel safety
    ///
    /// If this future is dropped, it continues in the background. If the run has begun, it ends
    /// with the outcome `dropped`: the slot counts as used.
    pub async fn begin(&self) -> Result<Result<OnceRun, AlreadyRan>> {
        let once = self.clone();
        let beginning = async move { once.begin_unless_dropped().await };
        let object = &self.keys.object;
        self.session.run_to_completion(object, beginning).await
    }

    async fn begin_unless_dropped(&self) -> Result<Result<OnceRun, AlreadyRan>> {
        let (host, by) = identity(&self.session);
        let id = format!("{}:{}", self.session.id.as_str(), random());
        let is_held = || self.retry.as_ref().is_none_or(|retry| (retry.is_held)());
        let mut replaces = None::<String>;
        let (attempt, confirmation, progress) = loop {
            let begin = Begin {
                run: is_held().then_some(&*id),
                host: shortened(&host),
                by: shortened(&by),
                replaces: replaces.as_deref(),
                ..self.look()?
            };
            let progress = Progress::default();
            let delivery = Delivery::acquisition(false);
            let store = &self.session.store;
            let answer = store.run(&begin.step(), None, delivery, &progress).await?;
            let record = match answer.reply {
                Begun::New { attempt } => break (attempt, answer.confirmation, progress),
                Begun::Vacant => return Err(self.lost()),
                Begun::Record(record) => record,
            };
            let is_retried = |retry: &Retry| record.attempt <= retry.times && (retry.is_held)();
            let is_dead = record.ended.is_none() && self.retry.as_ref().is_some_and(is_retried);
            if !is_dead || replaces.as_ref() == Some(&record.run) {
                return Ok(Err(self.already_ran(record)));
            }
            replaces = Some(record.run);
        };
        let mut run = OnceRun {
            session: self.session.clone(),
            keys: self.keys.clone(),
            id,
            attempt,
            is_finished: false,
        };
        if let Some(confirmation) = confirmation {
            // If it fails, dropping the run records that.
            confirmation.confirmed(&progress).await?;
        }
        if !is_held() {
            // Without an outcome: the next holder of the lock takes over.
            run.is_finished = true;
            return Err(self.lost());
        }
        Ok(Ok(run))
    }

    /// Returns the error that the lock of this handle is not held any more.
    fn lost(&self) -> Error {
        Error::Lost {
            name: self.name().to_owned(),
            reason: Loss::NotHeld,
        }
    }

    /// Runs `work` unless the current slot has had a run, which is returned as the inner error.
    ///
    /// # Errors
    ///
    /// As [`Once::begin`]; `work` was then not started. If only the outcome could not be recorded,
    /// that is no error.
    ///
    /// # Cancel safety
    ///
    /// When dropped, it drops `work`, and the outcome is `dropped`. The slot counts as used.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// use std::time::Duration;
    ///
    /// let hour = redlatch::Slot::per(Duration::from_secs(3600));
    /// let once = client.once("nightly-report", hour);
    /// assert_eq!(once.run(async { 6 * 7 }).await?, Ok(42));
    /// assert!(once.run(async { 6 * 7 }).await?.is_err());
    /// # Ok(()) }
    /// ```
    pub async fn run<F: Future>(&self, work: F) -> Result<Result<F::Output, AlreadyRan>> {
        let run = match self.begin().await? {
            Ok(run) => run,
            Err(earlier) => return Ok(Err(earlier)),
        };
        let output = work.await;
        run.finish_or_log().await;
        Ok(Ok(output))
    }

    /// Returns the run that the current slot has had, without beginning one. `None`: it has had
    /// none.
    ///
    /// # Errors
    ///
    /// As [`Once::begin`].
    pub async fn earlier_run(&self) -> Result<Option<AlreadyRan>> {
        let step = self.look()?.step();
        let reply = self.session.store.run_idempotent(&step).await?;
        Ok(match reply {
            Begun::Record(record) => Some(self.already_ran(record)),
            Begun::New { .. } | Begun::Vacant => None,
        })
    }

    /// Returns the step that only looks.
    fn look(&self) -> Result<Begin<'_>> {
        self.keys.object.check()?;
        let invalid = |setting, time| Error::InvalidSetting {
            setting,
            reason: format!("{time:?} is out of range; use 1 ms to ten years"),
        };
        let mut later = Duration::ZERO;
        let slot = match &self.slot {
            SlotKind::Per { length, offset } => {
                if *offset > MAX_LEASE {
                    return Err(Error::InvalidSetting {
                        setting: "slot",
                        reason: format!("the offset {offset:?} is longer than ten years"),
                    });
                }
                later = *offset;
                let length_of = Lease::new(*length).map_err(|_| invalid("slot", *length));
                Some(length_of?)
            }
            SlotKind::Named(name) if name.is_empty() || name.len() > MAX_NAME_BYTES => {
                return Err(Error::InvalidSetting {
                    setting: "slot",
                    reason: format!("it has {} bytes; use 1 to {MAX_NAME_BYTES}", name.len()),
                });
            }
            SlotKind::Named(_) => None,
        };
        let remembered = Lease::new(self.remembered_for);
        let remembered = remembered.map_err(|_| invalid("remembered_for", self.remembered_for))?;
        let length = slot.map(Lease::duration).unwrap_or_default();
        Ok(Begin {
            keys: &self.keys,
            run: None,
            slot,
            time_to_live: Lease::from_remaining(remembered.duration() + length),
            host: "",
            by: "",
            offset: lease::millis(later),
            replaces: None,
        })
    }

    fn already_ran(&self, record: Record) -> AlreadyRan {
        let Record { began, ended, .. } = record;
        AlreadyRan {
            host: shortened(&record.host).to_owned(),
            by: shortened(&record.by).to_owned(),
            at: time_of(&self.session.store, record.now, began),
            took: ended.map(|ended| millis(ended.saturating_sub(began))),
            outcome: ended.map(|_| shortened(&record.outcome).to_owned()),
            attempt: record.attempt,
        }
    }
}

impl OnceRun {
    /// Returns which run of the slot this is: 1, or more after [`Once::retry_unfinished`].
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Records how the run has ended: a text for people of up to 256 bytes, such as `exit code 0`;
    /// longer ones are cut. Returns whether the record is still that of this run: it may have
    /// expired, and in the next slot of the same length there may be another.
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`](crate::Lock::is_locked). The slot counts as used in any case.
    ///
    /// # Cancel safety
    ///
    /// If this future is dropped, it continues in the background.
    pub async fn finish(mut self, outcome: impl Into<String>) -> Result<bool> {
        self.is_finished = true;
        let finishing = self.finish_step(outcome.into());
        let object = self.keys.object.clone();
        self.session.run_to_completion(&object, finishing).await
    }

    /// Records that the work of [`Once::run`] is done. If that fails, logs it.
    pub(crate) async fn finish_or_log(self) {
        let object = self.keys.object.clone();
        log_failure(&object, self.finish(FINISHED).await);
    }

    fn finish_step(&self, outcome: String) -> impl Future<Output = Result<bool>> + Send + use<> {
        let (keys, run) = (self.keys.clone(), self.id.clone());
        let store = self.session.store.clone();
        async move {
            let step = finish(&keys, &run, shortened(&outcome));
            store.run_urgent(&step).await
        }
    }
}

/// Returns the name of the machine, and of the process: `label@host (pid 4711)`.
pub(crate) fn identity(session: &Session) -> (String, String) {
    let process = process_info();
    let label = session.registration.label();
    let program = label.unwrap_or(&process.program);
    let by = format!("{program}@{} (pid {})", process.host, process.pid);
    (process.host, by)
}

fn log_failure(object: &ObjectKeys, finished: Result<bool>) {
    if let Err(error) = finished {
        let once = object.full_name();
        tracing::warn!(once, %error, "the outcome of a run was not recorded");
    }
}

impl Drop for OnceRun {
    fn drop(&mut self) {
        if !self.is_finished {
            let finishing = self.finish_step(DROPPED.to_owned());
            let object = self.keys.object.clone();
            let background = &self.session.background;
            background.spawn(&self.keys.object, async move {
                log_failure(&object, finishing.await);
            });
        }
    }
}

impl std::fmt::Debug for Once {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Once")
            .field("name", &self.name())
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for OnceRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnceRun")
            .field("name", &self.keys.object.name())
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Converts milliseconds of the store. Another program may have written any number.
pub(crate) fn millis(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Converts a time of the store, at which it is `now`.
pub(crate) fn time_of(store: &Store, now: i64, at: i64) -> SystemTime {
    let time = match store {
        Store::Redis(_) => SystemTime::UNIX_EPOCH.checked_add(millis(at)),
        // Its times do not count from 1970.
        Store::Embedded(_) => SystemTime::now().checked_sub(millis(now.saturating_sub(at))),
    };
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}
