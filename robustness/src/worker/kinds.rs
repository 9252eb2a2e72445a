//! The kinds of locks that workers use, selected by prefixes of the names.

use std::future::IntoFuture;
use std::time::Duration;

use redlatch::job::Overlap;
use redlatch::kind::Revocable;
use redlatch::{Acquire, FairReadWriteLock, FairSemaphore, GroupLock, Guard, HasLease, HasTicket};
use redlatch::{Client, Error, ExpirableSemaphore, FairLock, FencedLock, Lock};
use redlatch::{CountDownLatch, Election, Leadership, Member, MultiLock, OwnerId, RedLock};
use redlatch::{PermitGuard, PermitId, ReadWriteLock, TryAcquire};
use redlatch::{Semaphore, SpinLock};
use tokio::time::{Instant, sleep_until, timeout};

use super::limits::{Kept as _, Limited as _};
use super::section::{AsyncGuard, ReleaseMode, SectionRunner};
use super::tickets;
use crate::Result;
use crate::history::{Limits, Mode, PERMITS};
use crate::names::{COUNTERS, KINDS, follows_clock, job_settings, locks_of};
use crate::random::Random;

pub enum Handle {
    Lock(Lock),
    Fair(FairLock),
    Fenced(FencedLock),
    ReadWrite(ReadWriteLock),
    FairReadWrite(FairReadWriteLock),
    FairPermits(FairSemaphore, Duration),
    Permits(ExpirableSemaphore, Duration),
    Spin(SpinLock),
    Multi(MultiLock, String),
    Red(RedLock, String),
    Election(Election, Duration),
    /// The values of a group, and a lock of all of them.
    Group([(GroupLock, String); 2], MultiLock, String),
    Value(GroupLock),
    Semaphore(Semaphore, Duration),
    Latch(CountDownLatch, Duration),
}

impl Handle {
    pub fn new(client: &Client, name: &str, lease: Duration) -> Result<Handle> {
        let kind = name.split(':').next().unwrap_or_default();
        let members = || {
            let locks = locks_of(name).into_iter();
            locks.map(|name| member(client, &name, lease))
        };
        Ok(match kind {
            "job" if job_settings(name).is_some_and(|job| job.overlap == Overlap::Allow) => {
                Handle::ReadWrite(client.read_write_lock(name))
            }
            "lock" | "job" => Handle::Lock(client.lock(name)),
            "fair" => Handle::Fair(fair(client, name, lease)),
            "fenced" if follows_clock(name) => {
                Handle::Fenced(client.fenced_lock(name).clock_tokens())
            }
            "fenced" => Handle::Fenced(client.fenced_lock(name)),
            "rw" => Handle::ReadWrite(client.read_write_lock(name)),
            "fair-rw" => {
                let lock = client.fair_read_write_lock(name);
                Handle::FairReadWrite(lock.wait_time(lease))
            }
            "fair-permits" => {
                let semaphore = client.fair_semaphore(name, PERMITS);
                Handle::FairPermits(semaphore.wait_time(lease), lease)
            }
            "permits" => Handle::Permits(client.expirable_semaphore(name), lease),
            "spin" => Handle::Spin(client.spin_lock(name)),
            "multi" => Handle::Multi(MultiLock::new(members()), name.to_owned()),
            "red" => {
                let lock = RedLock::new(members()).member_timeout(lease / 10);
                Handle::Red(lock, name.to_owned())
            }
            "election" => Handle::Election(client.election(name), lease),
            "group" => match name.split_once('.') {
                Some((group, value)) => Handle::Value(client.group_lock(group, value)),
                None => {
                    let value = |value: &str| {
                        let lock = client.group_lock(name, value);
                        (lock, format!("{name}.{value}"))
                    };
                    let values = ["0", "1"];
                    let all = client.multi_lock(name, values);
                    Handle::Group(values.map(value), all, name.to_owned())
                }
            },
            "semaphore" => Handle::Semaphore(client.semaphore(name), lease),
            "latch" => Handle::Latch(client.count_down_latch(name), lease),
            other => {
                let kinds = [&KINDS[..], &COUNTERS].concat().join(", ");
                return Err(format!("unknown kind {other}; available: {kinds}").into());
            }
        })
    }

    /// Acquires the whole object and releases it, if it is free. Returns whether it was.
    pub async fn acquire_and_release(&self) -> Result<bool, Error> {
        match self {
            Handle::Lock(lock) => try_once(lock.try_lock()).await,
            Handle::Fair(lock) => try_once(lock.try_lock()).await,
            Handle::Fenced(lock) => try_once(lock.try_lock()).await,
            Handle::ReadWrite(lock) => try_once(lock.write().try_lock()).await,
            Handle::FairReadWrite(lock) => try_once(lock.write().try_lock()).await,
            Handle::FairPermits(semaphore, _) => {
                try_once(semaphore.try_acquire_many(PERMITS)).await
            }
            Handle::Permits(semaphore, _) => {
                semaphore.try_set_permits(PERMITS).await?;
                try_once(semaphore.try_acquire_many(PERMITS)).await
            }
            Handle::Spin(lock) => try_once(lock.try_lock()).await,
            // Their members are checked instead.
            Handle::Multi(..) | Handle::Red(..) | Handle::Group(..) => Ok(true),
            Handle::Election(election, lease) => {
                match timeout(*lease, election.campaign("").into_future()).await {
                    Ok(leadership) => leadership?.resign().await.map(|()| true),
                    Err(_) => Ok(false),
                }
            }
            Handle::Value(lock) => try_once(lock.try_lock()).await,
            // Exactly as many permits as were set.
            Handle::Semaphore(semaphore, _) => {
                semaphore.try_set_permits(PERMITS).await?;
                Ok(semaphore.available().await? == i64::from(PERMITS))
            }
            Handle::Latch(latch, _) => Ok(latch.count_down_by(MAX_COUNT).await? == 0),
        }
    }

    /// Runs one critical section, from the request to the release.
    pub(crate) async fn run_section(
        &self,
        runner: &mut SectionRunner,
        time: Duration,
        random: &mut Random,
    ) -> Result<(), Error> {
        let has_minimum = matches!(
            self,
            Handle::Lock(_) | Handle::Fair(_) | Handle::Fenced(_) | Handle::Spin(_)
        );
        let limits = runner.draw_limits(time, has_minimum);
        match self {
            // Some wait with a limit.
            Handle::Lock(lock) if random.below(4) == 0 => {
                let request = lock.try_lock().wait(time * 4).limited(limits).kept(limits);
                let acquiring = request.into_future();
                tickets::run_section(lock, acquiring, no_token, runner, time).await
            }
            Handle::Lock(lock) => {
                let request = lock.lock().kept(limits);
                lock_and_run(lock, request, no_token, limits, runner, time).await
            }
            Handle::Fair(lock) => {
                let request = lock.lock().kept(limits);
                lock_and_run(lock, request, no_token, limits, runner, time).await
            }
            Handle::Spin(lock) => {
                let request = lock.lock().kept(limits);
                lock_and_run(lock, request, no_token, limits, runner, time).await
            }
            Handle::Fenced(lock) => {
                let token = |guard: &Guard<FencedLock>| Some(guard.token());
                lock_and_run(lock, lock.lock().kept(limits), token, limits, runner, time).await
            }
            Handle::ReadWrite(lock) if random.below(3) == 0 => {
                let lock = lock.write();
                lock_and_run(&lock, lock.lock(), no_token, limits, runner, time).await
            }
            Handle::ReadWrite(lock) => {
                let lock = lock.read();
                let acquiring = async { lock.lock().limited(limits).await.map(Some) };
                runner
                    .run_section(lock.name(), Mode::Shared, acquiring, time)
                    .await
            }
            Handle::FairReadWrite(lock) if random.below(3) == 0 => {
                let lock = lock.write();
                let acquiring = async { lock.lock().limited(limits).await.map(Some) };
                runner
                    .run_section(lock.name(), Mode::Exclusive, acquiring, time)
                    .await
            }
            Handle::FairReadWrite(lock) => {
                let lock = lock.read();
                let acquiring = async { lock.lock().limited(limits).await.map(Some) };
                runner
                    .run_section(lock.name(), Mode::Shared, acquiring, time)
                    .await
            }
            // Only of every second group several values are locked together: promptness is checked
            // for the others.
            Handle::Group(_, lock, name) if name.ends_with('1') && random.below(3) == 0 => {
                let requests = (lock.lock().limited(limits), lock.try_lock().limited(limits));
                lock_many_and_run(name, requests, random.below(6), runner, time).await
            }
            Handle::Group(values, ..) => {
                let (lock, name) = random.pick(values);
                let acquiring = async { lock.lock().limited(limits).await.map(Some) };
                runner
                    .run_section(name, Mode::Exclusive, acquiring, time)
                    .await
            }
            // Only the final check has such a handle.
            Handle::Value(_) => Ok(()),
            // Some requests want all permits, so that those for one permit must not overtake them.
            Handle::FairPermits(semaphore, lease) => {
                let (permits, mode) = match random.below(3) {
                    0 => (PERMITS, Mode::Exclusive),
                    _ => (1, Mode::Permit),
                };
                let request = semaphore.try_acquire_many(permits).wait(*lease * 4);
                let acquiring = request.limited(limits).into_future();
                runner
                    .run_section(semaphore.name(), mode, acquiring, time)
                    .await
            }
            Handle::Permits(semaphore, lease) => {
                // A store that lost its data lost the permits, too; no other client sets them.
                semaphore.try_set_permits(PERMITS).await?;
                let takes_out = random.below(3) == 0;
                let limits = match takes_out {
                    true => runner.fix_lease(*lease),
                    false => limits,
                };
                let request = semaphore.try_acquire().wait(*lease * 4).limited(limits);
                let (name, acquiring) = (semaphore.name(), request.into_future());
                if takes_out {
                    let take_out = |guard| TakenOut::new(semaphore.clone(), guard);
                    let acquiring = async { acquiring.await?.map(take_out).transpose() };
                    return runner
                        .run_section(name, Mode::Permit, acquiring, time)
                        .await;
                }
                runner
                    .run_section(name, Mode::Permit, acquiring, time)
                    .await
            }
            Handle::Multi(lock, name) => {
                let requests = (lock.lock().limited(limits), lock.try_lock().limited(limits));
                lock_many_and_run(name, requests, random.below(6), runner, time).await
            }
            Handle::Red(lock, name) => {
                let requests = (lock.lock().limited(limits), lock.try_lock().limited(limits));
                lock_many_and_run(name, requests, random.below(6), runner, time).await
            }
            Handle::Election(election, _) => {
                runner.clear_limits();
                lead(election, runner, time, random).await
            }
            Handle::Semaphore(semaphore, lease) => {
                runner.clear_limits();
                semaphore.try_set_permits(PERMITS).await?;
                let request = semaphore.try_acquire().wait(*lease * 4);
                let acquiring =
                    runner.request(semaphore.name(), Mode::Semaphore, request.into_future());
                let permits = acquiring.await?;
                runner.hold_permits(permits, time).await
            }
            Handle::Latch(latch, lease) => {
                runner.clear_limits();
                use_latch(latch, *lease, runner, random).await
            }
        }
    }
}

/// A leadership that ends in favor of another candidate, if there was one.
struct Term {
    leadership: Leadership,
    successor: Option<OwnerId>,
}

impl AsyncGuard for Term {
    fn valid_for(&self) -> Duration {
        self.leadership.valid_for()
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        self.leadership.lost()
    }

    async fn unlock(self) -> Result<(), Error> {
        match self.successor {
            Some(successor) => self.leadership.resign_to(&successor).await,
            None => self.leadership.resign().await,
        }
    }
}

/// Permits that were taken out of their guard, and are released by their ids. Their lease is fixed.
struct TakenOut {
    semaphore: ExpirableSemaphore,
    ids: Vec<PermitId>,
    end: Instant,
}

impl TakenOut {
    fn new(semaphore: ExpirableSemaphore, guard: PermitGuard) -> Result<TakenOut, Error> {
        let end = Instant::now() + guard.valid_for();
        let ids = guard.into_ids()?;
        Ok(TakenOut {
            semaphore,
            ids,
            end,
        })
    }
}

impl AsyncGuard for TakenOut {
    const RELEASED_BY_DROP: bool = false;

    fn valid_for(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        sleep_until(self.end)
    }

    async fn unlock(self) -> Result<(), Error> {
        self.semaphore.release_many(&self.ids).await
    }
}

/// Longer than any outage of a run.
const LONGEST_OUTAGE: Duration = Duration::from_secs(3600);

/// Campaigns, leads for this time, and resigns, sometimes to the last candidate.
async fn lead(
    election: &Election,
    runner: &mut SectionRunner,
    time: Duration,
    random: &mut Random,
) -> Result<(), Error> {
    let campaign = async { election.campaign("first").await.map(Some) };
    let acquiring = runner.request(election.name(), Mode::Exclusive, campaign);
    let Some(leadership) = acquiring.await? else {
        return Ok(());
    };
    let epoch = leadership.epoch();
    let mut term = Term {
        leadership,
        successor: None,
    };
    runner.report_acquired(Some(epoch), None);
    let mut is_lost = runner.watch(&term, time).await;
    let (proclaims, names_successor) = (random.below(3) == 0, random.below(3) == 0);
    let last_candidate = async || {
        let candidates = election.candidates().await.unwrap_or_default();
        candidates.last().map(|last| last.owner.clone())
    };
    let mut successor = None;
    if !is_lost {
        // If it fails, the end of the term is the same. It may last as long as an outage, and the term may be lost meanwhile.
        let asking = async {
            if proclaims {
                let _ = term.leadership.proclaim("second").await;
            }
            if names_successor {
                successor = last_candidate().await;
            }
        };
        is_lost = runner.watch_until(&term, asking, LONGEST_OUTAGE).await;
    }
    if is_lost && names_successor {
        successor = last_candidate().await;
    }
    term.successor = successor;
    runner.release(term, Some(epoch), ReleaseMode::Unlock).await
}

/// The highest count of a latch.
const MAX_COUNT: u32 = 3;

/// Sets the count, counts down and waits, or does some of these.
async fn use_latch(
    latch: &CountDownLatch,
    lease: Duration,
    runner: &mut SectionRunner,
    random: &mut Random,
) -> Result<(), Error> {
    let name = latch.name();
    let highest = usize::try_from(MAX_COUNT).unwrap_or_default();
    if random.below(2) == 0 {
        let count = 1 + u32::try_from(random.below(highest)).unwrap_or_default();
        let set = async {
            latch
                .try_set_count(count)
                .await
                .map(|set| set.then_some(()))
        };
        let acquiring = runner.request(name, Mode::SetCount(count), set);
        if acquiring.await?.is_some() {
            runner.report_acquired(None, None);
        }
    }
    if random.below(4) > 0 {
        let counting = async { latch.count_down().await.map(Some) };
        if let Some(left) = runner.request(name, Mode::CountDown, counting).await? {
            runner.report_count(left);
        }
    }
    if random.below(2) == 0 {
        let limit = random.between(Duration::ZERO, lease * 4);
        let wait = async {
            latch
                .try_wait()
                .wait(limit)
                .await
                .map(|open| open.then_some(()))
        };
        if runner.request(name, Mode::AwaitZero, wait).await?.is_some() {
            runner.report_acquired(None, None);
        }
    }
    Ok(())
}

fn fair(client: &Client, name: &str, lease: Duration) -> FairLock {
    // A waiter that dies in the queue delays the others this long.
    client.fair_lock(name).wait_time(lease)
}

/// A member of a multi-lock or a RedLock.
fn member(client: &Client, name: &str, lease: Duration) -> Member {
    match name.split(':').next() {
        Some("fair") => fair(client, name, lease).into(),
        Some("rw") => client.read_write_lock(name).write().into(),
        _ => client.lock(name).into(),
    }
}

/// Acquires and releases the lock if it is free. Returns whether it was.
async fn try_once<R: HasLease>(request: TryAcquire<R>) -> Result<bool, Error> {
    match request.await? {
        Some(guard) => guard.unlock().await.map(|()| true),
        None => Ok(false),
    }
}

/// The token of a lock that has none.
fn no_token<G>(_: &G) -> Option<u64> {
    None
}

/// Runs one critical section whose request waits.
async fn lock_and_run<K: HasTicket + Revocable>(
    lock: &Lock<K>,
    request: Acquire<Lock<K>>,
    token: fn(&Guard<Lock<K>>) -> Option<u64>,
    limits: Limits,
    runner: &mut SectionRunner,
    time: Duration,
) -> Result<(), Error> {
    let acquiring = async { request.limited(limits).await.map(Some) };
    tickets::run_section(lock, acquiring, token, runner, time).await
}

/// Runs a section with several locks, which are requested in one of three ways: with a limit,
/// canceled at the limit, or without one.
async fn lock_many_and_run<R: HasLease>(
    name: &str,
    (lock, try_lock): (Acquire<R>, TryAcquire<R>),
    way: usize,
    runner: &mut SectionRunner,
    time: Duration,
) -> Result<(), Error>
where
    Guard<R>: AsyncGuard,
{
    let limit = time * 4;
    let acquiring = async {
        match way {
            0 => try_lock.wait(limit).await,
            1 => match timeout(limit, lock.into_future()).await {
                Ok(guard) => guard.map(Some),
                Err(_) => Ok(None),
            },
            _ => lock.await.map(Some),
        }
    };
    runner
        .run_section(name, Mode::Exclusive, acquiring, time)
        .await
}
