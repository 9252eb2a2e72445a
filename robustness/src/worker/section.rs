//! One critical section: asked for, had, watched from inside, given back.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Error, Guard, LockKind, Owner};
use tokio::time::{Instant, sleep, timeout};

use super::tell::Teller;
use crate::clock::Time;
use crate::history::{Ask, Mode, What};
use crate::resource::Reach;

/// How often the guard is asked whether it is valid.
pub(super) const LOOK: Duration = Duration::from_millis(5);

/// How long whoever is inside waits to be told what the guard has said already.
const TOLD_WITHIN: Duration = Duration::from_secs(3);

/// One task that goes in and out.
#[derive(Debug)]
pub(crate) struct Inside {
    task: usize,
    client: usize,
    /// The owner that it acts for, if it shares one with others.
    owner: Option<Owner>,
    /// The section that it is in.
    section: u64,
    teller: Teller,
    /// Nobody stays for longer than he has to.
    ending: Arc<AtomicBool>,
    resource: Reach,
}

/// How a guard is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveBack {
    /// By `unlock`, which is waited for.
    Unlock,
    /// In the background.
    Drop,
}

impl Inside {
    pub(crate) fn of_task(
        task: usize,
        client: usize,
        teller: Teller,
        resource: Reach,
        ending: Arc<AtomicBool>,
    ) -> Inside {
        Inside {
            task,
            client,
            owner: None,
            section: 0,
            teller,
            ending,
            resource,
        }
    }

    /// The same task, acting for an owner that it shares with others.
    pub(crate) fn for_owner(self, owner: Owner) -> Inside {
        Inside {
            owner: Some(owner),
            ..self
        }
    }

    /// The same task, in a section within the one that it is in.
    pub(crate) fn nested(&self) -> Inside {
        Inside {
            task: self.task,
            client: self.client,
            owner: self.owner,
            section: 0,
            teller: self.teller.clone(),
            ending: self.ending.clone(),
            resource: self.resource.clone(),
        }
    }

    /// Asks for a lock and tells what comes of it.
    pub(crate) async fn ask<K: LockKind>(
        &mut self,
        name: &str,
        mode: Mode,
        asking: impl Future<Output = Result<Option<Guard<K>>, Error>>,
    ) -> Result<Option<Guard<K>>, Error> {
        self.section = self.teller.section();
        self.tell(What::Asked(Ask {
            task: self.task,
            client: self.client,
            owner: self.owner.map(Owner::number),
            name: name.to_owned(),
            mode,
        }));
        let answer = asking.await;
        match &answer {
            // Told by who stays inside, with the token.
            Ok(Some(_)) => {}
            Ok(None) => self.tell(What::GaveUp),
            Err(error) => self.tell(What::Failed { error: kind(error) }),
        }
        answer
    }

    /// Stays inside for this long, as long as the lock is held, and gives it back.
    pub(crate) async fn stay<K: LockKind>(
        &mut self,
        guard: Option<Guard<K>>,
        token: Option<u64>,
        time: Duration,
    ) -> Result<(), Error> {
        let Some(guard) = guard else { return Ok(()) };
        self.enter(token, None);
        self.hold(&guard, time).await;
        self.leave(guard, token, GiveBack::Unlock).await
    }

    /// Records that the lock is held: the last thing that was asked of the guard is its hold count.
    pub(crate) fn enter(&self, token: Option<u64>, holds: Option<u32>) {
        self.tell(What::Got { token, holds });
    }

    /// Watches the guard for this long, or until it is lost. Returns whether it was lost.
    pub(crate) async fn hold<K: LockKind>(&self, guard: &Guard<K>, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut until = self.look(guard);
        let mut lost = std::pin::pin!(guard.lost());
        loop {
            // The last look is at the end.
            let left = end.saturating_duration_since(Instant::now());
            let interval = self.teller.look_interval();
            let pause = if left.is_zero() {
                LOOK
            } else {
                left.min(interval)
            };
            tokio::select! {
                biased;
                () = &mut lost => {
                    if let Some(until) = until {
                        self.teller.lost(self.section, until);
                    }
                    self.tell(What::Told);
                    // Never again valid, whoever asks.
                    self.look(guard);
                    return true;
                }
                () = sleep(pause) => {}
            }
            let before = until;
            until = self.look(guard);
            if until.is_none() {
                if let Some(before) = before {
                    self.teller.lost(self.section, before);
                }
                if timeout(TOLD_WITHIN, &mut lost).await.is_ok() {
                    self.tell(What::Told);
                }
                return true;
            }
            if Instant::now() >= end || self.ending.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    /// Writes to the resource if there is a token, and gives the lock back.
    pub(crate) async fn leave<K: LockKind>(
        &mut self,
        guard: Guard<K>,
        token: Option<u64>,
        how: GiveBack,
    ) -> Result<(), Error> {
        if let Some(token) = token {
            // Also when the lock was lost: the resource is there to refuse that.
            self.write(guard.name(), token).await;
        }
        self.tell(What::Leaving);
        let freed = match how {
            GiveBack::Unlock => guard.unlock().await,
            GiveBack::Drop => {
                drop(guard);
                Ok(())
            }
        };
        let error = freed.as_ref().err().map(kind);
        self.tell(What::Freed { error });
        freed
    }

    /// Asks the guard whether it is valid, and until when.
    fn look<K: LockKind>(&self, guard: &Guard<K>) -> Option<Time> {
        self.teller.look(self.section, || guard.valid_for())
    }

    /// Adds one to what the resource has.
    async fn write(&mut self, name: &str, token: u64) {
        let Some(read) = self
            .resource
            .exchange(&format!("read {name} {token}"))
            .await
        else {
            return;
        };
        let written = match read.parse::<u64>() {
            Ok(value) => {
                // Somebody may come in between: that is what the token is for.
                sleep(Duration::from_millis(1)).await;
                let line = format!("write {name} {token} {}", value + 1);
                self.resource.exchange(&line).await
            }
            Err(_) => Some(read),
        };
        let accepted = written.as_deref() == Some("ok");
        self.tell(What::Wrote { accepted });
    }

    fn tell(&self, what: What) {
        self.teller.tell_of(self.section, what);
    }
}

/// An error's name, and how a lock was lost.
pub(super) fn kind(error: &Error) -> String {
    match error {
        Error::Lost { reason, .. } => format!("Lost({reason:?})"),
        Error::Refused { reason, .. } => {
            let code = reason.split(' ').next().unwrap_or_default();
            format!("Refused({code})")
        }
        other => {
            let said = format!("{other:?}");
            let end = said.find([' ', '{', '(']).unwrap_or(said.len());
            said[..end].to_owned()
        }
    }
}
