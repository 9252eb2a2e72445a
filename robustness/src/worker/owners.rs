//! Tasks that share an owner: they request the same few locks at the same time, re-enter them, cancel requests
//! at random points, and request a lost lock again at once.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Client, Error, Fair, Fenced, Guard, Lock, LockKind, OwnedKind, Owner};
use tokio::time::{Instant, sleep, timeout};

use super::section::{GiveBack, Inside};
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
    pub(super) inside: Inside,
    pub(super) random: Random,
}

impl OwnerTask {
    pub(super) async fn run(mut self, ending: &AtomicBool) -> Result<()> {
        // First every name once, for a moment: within the lease of the dead process that this one replaces.
        let mut first = self.names.clone();
        while !ending.load(Ordering::Relaxed) {
            let (name, longest) = match first.pop() {
                Some(name) => (name, self.lease / 32),
                None => {
                    let at = self.random.below(self.names.len());
                    (self.names[at].clone(), self.lease / 2)
                }
            };
            let patience = self.random.between(Duration::ZERO, longest);
            if self.request(&name, patience).await?.is_err() {
                sleep(PAUSE).await;
            }
            sleep(self.random.between(Duration::ZERO, self.lease / 20)).await;
        }
        Ok(())
    }

    async fn request(&mut self, name: &str, patience: Duration) -> Result<Result<(), Error>> {
        let kind = name.split(':').next().unwrap_or_default();
        Ok(match kind {
            "lock" => {
                let lock = self.client.lock(name);
                self.pass(&lock, Mode::Alone, patience, |_| None).await
            }
            "spin" => {
                let lock = self.client.spin_lock(name);
                self.pass(&lock, Mode::Alone, patience, |_| None).await
            }
            "fenced" => {
                let lock = self.client.fenced_lock(name);
                let token = |guard: &Guard<Fenced>| Some(guard.token());
                self.pass(&lock, Mode::Alone, patience, token).await
            }
            "fair" => {
                let lock: Lock<Fair> = self.client.fair_lock(name).wait_time(self.lease / 4);
                self.pass(&lock, Mode::Alone, patience, |_| None).await
            }
            "rw" if self.random.below(2) == 0 => {
                let lock = self.client.read_write_lock(name);
                self.pass(lock.write(), Mode::Alone, patience, |_| None)
                    .await
            }
            "rw" => {
                let lock = self.client.read_write_lock(name);
                self.pass(lock.read(), Mode::Shared, patience, |_| None)
                    .await
            }
            other => return Err(format!("owners do not support the kind {other}").into()),
        })
    }

    /// Runs one critical section, perhaps with a nested one.
    async fn pass<K: LockKind + OwnedKind>(
        &mut self,
        lock: &Lock<K>,
        mode: Mode,
        patience: Duration,
        token: fn(&Guard<K>) -> Option<u64>,
    ) -> Result<(), Error> {
        let asking = ask(lock, self.owner, patience, self.random.below(3));
        let Some(guard) = self.inside.ask(lock.name(), mode, asking).await? else {
            return Ok(());
        };
        let holds = guard.hold_count();
        let had = token(&guard);
        self.inside.enter(had, Some(holds));
        let time = time_inside(self.lease, &mut self.random);
        let mut random = Random::new(self.random.number());
        let (nested, is_left) = (self.inside.nested(), AtomicBool::new(false));
        let again = async {
            if random.below(2) == 0 {
                sleep(random.between(Duration::ZERO, time)).await;
                // Errors are recorded with the section.
                let _ = reenter(nested, lock, &guard, mode, token, time, &mut random).await;
            }
            is_left.store(true, Ordering::Relaxed);
        };
        let watch = async {
            let mut is_lost = self.inside.hold(&guard, time).await;
            while !is_lost && !is_left.load(Ordering::Relaxed) {
                is_lost = self.inside.hold(&guard, Duration::ZERO).await;
            }
            is_lost
        };
        let (is_lost, ()) = tokio::join!(watch, again);
        let keeps = self.random.below(2) == 0;
        if is_lost && keeps {
            // The guard of the lost hold still exists meanwhile.
            self.regain(lock, mode, token, self.lease / 2).await;
        }
        let how = give_back(&mut self.random);
        let freed = self.inside.leave(guard, had, how).await;
        if is_lost && !keeps {
            // Meanwhile the background release is sent.
            sleep(self.random.between(Duration::ZERO, PAUSE)).await;
            self.regain(lock, mode, token, self.lease / 16).await;
        }
        freed
    }

    /// Requests a lost lock until it is acquired or half a lease has passed. Each request is canceled within
    /// `longest`.
    async fn regain<K: LockKind + OwnedKind>(
        &mut self,
        lock: &Lock<K>,
        mode: Mode,
        token: fn(&Guard<K>) -> Option<u64>,
        longest: Duration,
    ) {
        let end = Instant::now() + self.lease / 2;
        while Instant::now() < end {
            let patience = self.random.between(Duration::ZERO, longest);
            let asking = ask(lock, self.owner, patience, self.random.below(3));
            let mut inside = self.inside.nested();
            if let Ok(Some(guard)) = inside.ask(lock.name(), mode, asking).await {
                let holds = guard.hold_count();
                let had = token(&guard);
                inside.enter(had, Some(holds));
                // Long enough to detect another holder.
                let time = self.random.between(self.lease / 10, self.lease / 2);
                inside.hold(&guard, time).await;
                let how = give_back(&mut self.random);
                // Errors are recorded with the section.
                let _ = inside.leave(guard, had, how).await;
                return;
            }
            sleep(self.random.between(Duration::ZERO, PAUSE)).await;
        }
    }
}

/// Runs a nested section of the same owner within the section of the guard.
async fn reenter<K: LockKind + OwnedKind>(
    mut inside: Inside,
    lock: &Lock<K>,
    guard: &Guard<K>,
    mode: Mode,
    token: fn(&Guard<K>) -> Option<u64>,
    time: Duration,
    random: &mut Random,
) -> Result<(), Error> {
    let patience = random.between(Duration::ZERO, time.max(PAUSE));
    let way = random.below(4);
    let asking = async {
        match way {
            0 => {
                let reenter = async { guard.reenter().await.map(Some) };
                timeout(patience, reenter).await.unwrap_or(Ok(None))
            }
            way => ask(lock, guard.owner(), patience, way - 1).await,
        }
    };
    let Some(inner) = inside.ask(lock.name(), mode, asking).await? else {
        return Ok(());
    };
    let holds = inner.hold_count();
    let had = token(&inner);
    inside.enter(had, Some(holds));
    let stay = random.between(Duration::ZERO, time);
    inside.hold(&inner, stay).await;
    inside.leave(inner, had, give_back(random)).await
}

/// Requests the lock in one of three ways. Two of them are canceled at the limit, at any await point.
async fn ask<K: LockKind + OwnedKind>(
    lock: &Lock<K>,
    owner: Owner,
    patience: Duration,
    way: usize,
) -> Result<Option<Guard<K>>, Error> {
    let canceled = |asking| async move { timeout(patience, asking).await.unwrap_or(Ok(None)) };
    let answer = match way {
        0 => canceled(boxed(async { lock.lock().owner(owner).await.map(Some) })).await,
        1 => canceled(boxed(owner.scope(async { lock.lock().await.map(Some) }))).await,
        _ => lock.try_lock().owner(owner).wait(patience).await,
    };
    match answer {
        // Another task of this owner reads: this is an expected answer.
        Err(Error::WriteWhileReading { .. }) => Ok(None),
        answer => answer,
    }
}

type Asking<'a, K> =
    std::pin::Pin<Box<dyn Future<Output = Result<Option<Guard<K>>, Error>> + Send + 'a>>;

fn boxed<'a, K: LockKind>(
    asking: impl Future<Output = Result<Option<Guard<K>>, Error>> + Send + 'a,
) -> Asking<'a, K> {
    Box::pin(asking)
}

/// Returns how long to stay inside: a third stays long enough to lose the lock in an outage.
pub(super) fn time_inside(lease: Duration, random: &mut Random) -> Duration {
    match random.below(3) {
        0 => random.between(lease / 2, lease * 5 / 2),
        _ => random.between(Duration::ZERO, PAUSE),
    }
}

fn give_back(random: &mut Random) -> GiveBack {
    match random.below(2) {
        0 => GiveBack::Unlock,
        _ => GiveBack::Drop,
    }
}
