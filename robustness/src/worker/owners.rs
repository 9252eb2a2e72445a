//! Tasks that share an owner: they ask for the same few names at the same time, enter again what they hold,
//! give up at random points, and ask again at once for what they lost.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Client, Error, Fair, Fenced, Guard, Lock, LockKind, OwnedKind, Owner};
use tokio::time::{Instant, sleep, timeout};

use super::section::{GiveBack, Inside};
use crate::Result;
use crate::history::Mode;
use crate::random::Random;

/// Pause after an error, and at most between two requests of a task that wants back what it lost.
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

/// What came of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Failed,
    GivenUp,
    Held,
    Lost,
}

impl OwnerTask {
    pub(super) async fn run(mut self, ending: &AtomicBool) -> Result<()> {
        while !ending.load(Ordering::Relaxed) {
            let at = self.random.below(self.names.len());
            let name = self.names[at].clone();
            let mut patience = self.lease / 2;
            // Who has lost it asks for it again and again, and gives up soon each time.
            let mut eager_until = Instant::now();
            loop {
                let fate = self.request(&name, patience).await?;
                if fate == Fate::Lost {
                    eager_until = Instant::now() + self.lease;
                    patience = self.lease / 8;
                }
                if fate == Fate::Failed {
                    sleep(PAUSE).await;
                }
                let is_over = Instant::now() >= eager_until || ending.load(Ordering::Relaxed);
                if fate == Fate::Held || is_over {
                    break;
                }
                sleep(self.random.between(Duration::ZERO, PAUSE)).await;
            }
            sleep(self.random.between(Duration::ZERO, self.lease / 20)).await;
        }
        Ok(())
    }

    async fn request(&mut self, name: &str, patience: Duration) -> Result<Fate> {
        let patience = self.random.between(Duration::ZERO, patience);
        let kind = name.split(':').next().unwrap_or_default();
        let fate = match kind {
            "lock" => {
                let lock = self.client.lock(name);
                self.pass(&lock, Mode::Alone, patience, |_| None).await
            }
            "fenced" => {
                let lock = self.client.fenced_lock(name);
                let token = |guard: &Guard<Fenced>| Some(guard.token());
                self.pass(&lock, Mode::Alone, patience, token).await
            }
            "fair" => {
                let lock: Lock<Fair> = self.client.fair_lock(name).wait_time(self.lease);
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
            other => return Err(format!("no owner takes a {other}").into()),
        };
        Ok(fate.unwrap_or(Fate::Failed))
    }

    /// One critical section, perhaps with another one in it.
    async fn pass<K: LockKind + OwnedKind>(
        &mut self,
        lock: &Lock<K>,
        mode: Mode,
        patience: Duration,
        token: fn(&Guard<K>) -> Option<u64>,
    ) -> Result<Fate, Error> {
        let asking = ask(lock, self.owner, patience, self.random.below(3));
        let Some(guard) = self.inside.ask(lock.name(), mode, asking).await? else {
            return Ok(Fate::GivenUp);
        };
        let holds = guard.hold_count();
        let had = token(&guard);
        self.inside.enter(had, Some(holds));
        let longest = match self.random.below(3) {
            0 => self.lease,
            _ => PAUSE,
        };
        let time = self.random.between(Duration::ZERO, longest);
        let mut random = Random::new(self.random.next());
        let nested = self.inside.nested();
        let again = async {
            if random.below(2) == 0 {
                sleep(random.between(Duration::ZERO, time)).await;
                // What goes wrong is told there.
                let _ = reenter(nested, lock, &guard, mode, token, time, &mut random).await;
            }
        };
        let (is_lost, ()) = tokio::join!(self.inside.hold(&guard, time), again);
        if is_lost && self.random.below(2) == 0 {
            // The guard stays while other tasks of its owner ask.
            sleep(self.random.between(Duration::ZERO, self.lease / 3)).await;
        }
        let how = give_back(&mut self.random);
        let freed = self.inside.leave(guard, had, how).await;
        match is_lost {
            true => Ok(Fate::Lost),
            false => freed.map(|()| Fate::Held),
        }
    }
}

/// The same owner once more, within the section of the guard.
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

/// Asks in one of three ways. Two of them are canceled when patience has ended, wherever they are then.
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
        // Another task of this owner reads: that is an answer, and nothing went wrong.
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

fn give_back(random: &mut Random) -> GiveBack {
    match random.below(2) {
        0 => GiveBack::Unlock,
        _ => GiveBack::Drop,
    }
}
