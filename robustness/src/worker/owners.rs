//! Tasks that share an owner: they request the same few locks at the same time, re-enter them, cancel requests
//! at random points, and request a lost lock again at once.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::kind::{Fair, OwnedKind, Revocable};
use redlatch::{Client, Error, FencedLock, Guard, HasTicket, Lock, Owner};
use tokio::time::{Instant, sleep, timeout};

use super::section::{ReleaseMode, SectionRunner};
use super::tickets;
use crate::Result;
use crate::history::Mode;
use crate::random::Random;

/// Pause after an error, and the longest pause between two requests for a lost lock.
const PAUSE: Duration = Duration::from_millis(20);

/// One of the tasks of an owner.
pub(super) struct OwnerTask {
    pub(super) owner: Owner,
    pub(super) client: Client,
    pub(super) names: Vec<String>,
    pub(super) lease: Duration,
    pub(super) runner: SectionRunner,
    pub(super) random: Random,
}

impl OwnerTask {
    pub(super) async fn run(mut self, shutdown: &AtomicBool) -> Result<()> {
        // First every name once, for a moment: within the lease of the dead process that this one replaces.
        let mut first = self.names.clone();
        while !shutdown.load(Ordering::Relaxed) {
            let (name, longest) = match first.pop() {
                Some(name) => (name, self.lease / 32),
                None => {
                    let at = self.random.below(self.names.len());
                    (self.names[at].clone(), self.lease / 2)
                }
            };
            let wait_limit = self.random.between(Duration::ZERO, longest);
            if self.request(&name, wait_limit).await?.is_err() {
                sleep(PAUSE).await;
            }
            sleep(self.random.between(Duration::ZERO, self.lease / 20)).await;
        }
        Ok(())
    }

    async fn request(&mut self, name: &str, wait_limit: Duration) -> Result<Result<(), Error>> {
        let kind = name.split(':').next().unwrap_or_default();
        Ok(match kind {
            "lock" => {
                let lock = self.client.lock(name);
                self.run_exclusive(&lock, wait_limit, |_| None).await
            }
            "spin" => {
                let lock = self.client.spin_lock(name);
                self.run_exclusive(&lock, wait_limit, |_| None).await
            }
            "fenced" => {
                let lock = self.client.fenced_lock(name);
                let token = |guard: &Guard<FencedLock>| Some(guard.token());
                self.run_exclusive(&lock, wait_limit, token).await
            }
            "fair" => {
                let lock: Lock<Fair> = self.client.fair_lock(name).wait_time(self.lease / 4);
                self.run_exclusive(&lock, wait_limit, |_| None).await
            }
            "rw" if self.random.below(2) == 0 => {
                let lock = self.client.read_write_lock(name).write();
                self.run_exclusive(&lock, wait_limit, |_| None).await
            }
            "rw" => {
                let lock = self.client.read_write_lock(name);
                self.run_section(&lock.read(), Mode::Shared, wait_limit, |_| None)
                    .await
            }
            other => return Err(format!("owners do not support the kind {other}").into()),
        })
    }

    /// Runs one critical section, sometimes one whose hold may become a ticket.
    async fn run_exclusive<K: HasTicket + Revocable>(
        &mut self,
        lock: &Lock<K>,
        wait_limit: Duration,
        token: fn(&Guard<Lock<K>>) -> Option<u64>,
    ) -> Result<(), Error> {
        let mut ticket_use = self.runner.ticket_use();
        if ticket_use.as_mut().is_some_and(|one| one.random.one_in(4)) {
            let acquiring = request_lock(lock, self.owner, wait_limit, self.random.below(3));
            let time = random_hold_duration(self.lease, &mut self.random);
            return tickets::run_section(lock, acquiring, token, &mut self.runner, time).await;
        }
        tickets::ask_sometimes(lock, &mut self.runner).await;
        self.run_section(lock, Mode::Exclusive, wait_limit, token)
            .await
    }

    /// Runs one critical section, perhaps with a nested one.
    async fn run_section<K: OwnedKind>(
        &mut self,
        lock: &Lock<K>,
        mode: Mode,
        wait_limit: Duration,
        token: fn(&Guard<Lock<K>>) -> Option<u64>,
    ) -> Result<(), Error> {
        let acquiring = request_lock(lock, self.owner, wait_limit, self.random.below(3));
        let Some(guard) = self.runner.request(lock.name(), mode, acquiring).await? else {
            return Ok(());
        };
        let holds = guard.hold_count();
        let acquired_token = token(&guard);
        self.runner.report_acquired(acquired_token, Some(holds));
        let time = random_hold_duration(self.lease, &mut self.random);
        let mut random = Random::new(self.random.next_u64());
        let (nested, is_left) = (self.runner.nested(), AtomicBool::new(false));
        let again = async {
            if random.below(2) == 0 {
                sleep(random.between(Duration::ZERO, time)).await;
                // Errors are recorded with the section.
                let _ = reenter(nested, lock, &guard, mode, token, time, &mut random).await;
            }
            is_left.store(true, Ordering::Relaxed);
        };
        let watch = async {
            let mut is_lost = self.runner.watch(&guard, time).await;
            while !is_lost && !is_left.load(Ordering::Relaxed) {
                is_lost = self.runner.watch(&guard, Duration::ZERO).await;
            }
            is_lost
        };
        let (is_lost, ()) = tokio::join!(watch, again);
        let keeps = self.random.below(2) == 0;
        if is_lost && keeps {
            // The guard of the lost hold still exists meanwhile.
            self.reacquire(lock, mode, token, self.lease / 2).await;
        }
        let how = random_release(&mut self.random);
        let released = self.runner.release(guard, acquired_token, how).await;
        if is_lost && !keeps {
            // Meanwhile the background release is sent.
            sleep(self.random.between(Duration::ZERO, PAUSE)).await;
            self.reacquire(lock, mode, token, self.lease / 16).await;
        }
        released
    }

    /// Requests a lost lock until it is acquired or half a lease has passed. Each request is canceled within
    /// `longest`.
    async fn reacquire<K: OwnedKind>(
        &mut self,
        lock: &Lock<K>,
        mode: Mode,
        token: fn(&Guard<Lock<K>>) -> Option<u64>,
        longest: Duration,
    ) {
        let end = Instant::now() + self.lease / 2;
        while Instant::now() < end {
            let wait_limit = self.random.between(Duration::ZERO, longest);
            let acquiring = request_lock(lock, self.owner, wait_limit, self.random.below(3));
            let mut runner = self.runner.nested();
            if let Ok(Some(guard)) = runner.request(lock.name(), mode, acquiring).await {
                let holds = guard.hold_count();
                let acquired_token = token(&guard);
                runner.report_acquired(acquired_token, Some(holds));
                // Long enough to detect another holder.
                let time = self.random.between(self.lease / 10, self.lease / 2);
                runner.watch(&guard, time).await;
                let how = random_release(&mut self.random);
                // Errors are recorded with the section.
                let _ = runner.release(guard, acquired_token, how).await;
                return;
            }
            sleep(self.random.between(Duration::ZERO, PAUSE)).await;
        }
    }
}

/// Runs a nested section of the same owner within the section of the guard.
async fn reenter<K: OwnedKind>(
    mut runner: SectionRunner,
    lock: &Lock<K>,
    guard: &Guard<Lock<K>>,
    mode: Mode,
    token: fn(&Guard<Lock<K>>) -> Option<u64>,
    time: Duration,
    random: &mut Random,
) -> Result<(), Error> {
    let wait_limit = random.between(Duration::ZERO, time.max(PAUSE));
    let way = random.below(4);
    let acquiring = async {
        match way {
            0 => {
                let reenter = async { guard.reenter().await.map(Some) };
                timeout(wait_limit, reenter).await.unwrap_or(Ok(None))
            }
            way => request_lock(lock, guard.owner(), wait_limit, way - 1).await,
        }
    };
    let Some(inner) = runner.request(lock.name(), mode, acquiring).await? else {
        return Ok(());
    };
    let holds = inner.hold_count();
    let acquired_token = token(&inner);
    runner.report_acquired(acquired_token, Some(holds));
    let stay = random.between(Duration::ZERO, time);
    runner.watch(&inner, stay).await;
    runner
        .release(inner, acquired_token, random_release(random))
        .await
}

/// Requests the lock in one of three ways. Two of them are canceled at the limit, at any await point.
async fn request_lock<K: OwnedKind>(
    lock: &Lock<K>,
    owner: Owner,
    wait_limit: Duration,
    way: usize,
) -> Result<Option<Guard<Lock<K>>>, Error> {
    let canceled =
        |acquiring| async move { timeout(wait_limit, acquiring).await.unwrap_or(Ok(None)) };
    let answer = match way {
        0 => canceled(boxed(async { lock.lock().owner(owner).await.map(Some) })).await,
        1 => canceled(boxed(owner.scope(async { lock.lock().await.map(Some) }))).await,
        _ => lock.try_lock().owner(owner).wait(wait_limit).await,
    };
    match answer {
        // Another task of this owner reads: this is an expected answer.
        Err(Error::WriteWhileReading { .. }) => Ok(None),
        answer => answer,
    }
}

type BoxedAcquire<'a, K> =
    std::pin::Pin<Box<dyn Future<Output = Result<Option<Guard<Lock<K>>>, Error>> + Send + 'a>>;

fn boxed<'a, K: OwnedKind>(
    acquiring: impl Future<Output = Result<Option<Guard<Lock<K>>>, Error>> + Send + 'a,
) -> BoxedAcquire<'a, K> {
    Box::pin(acquiring)
}

/// Returns how long to hold the lock: in one of three sections long enough to lose it in an outage.
pub(super) fn random_hold_duration(lease: Duration, random: &mut Random) -> Duration {
    match random.below(3) {
        0 => random.between(lease / 2, lease * 5 / 2),
        _ => random.between(Duration::ZERO, PAUSE),
    }
}

fn random_release(random: &mut Random) -> ReleaseMode {
    match random.below(2) {
        0 => ReleaseMode::Unlock,
        _ => ReleaseMode::Drop,
    }
}
