//! One critical section: requested, acquired, watched from inside, released.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Error, Guard, LockKind, MultiGuard, Owner, RedGuard, SemaphorePermits};
use tokio::time::{Instant, sleep, timeout};

use super::kinds::locks_of;
use super::tell::Teller;
use crate::clock::Time;
use crate::history::{Ask, Mode, What};
use crate::resource::Reach;

/// Interval at which the guard is checked for validity.
pub(super) const LOOK: Duration = Duration::from_millis(5);

/// Time within which `lost()` must complete after the guard became invalid.
const TOLD_WITHIN: Duration = Duration::from_secs(3);

/// A task that enters and leaves critical sections.
#[derive(Debug)]
pub(crate) struct Inside {
    task: usize,
    client: usize,
    /// The owner that it acts for, if it shares one with others.
    owner: Option<Owner>,
    /// Its current section. Those of a multi-lock's members follow that of the whole.
    sections: Vec<u64>,
    /// Name of the requested lock.
    name: String,
    teller: Teller,
    /// If set, tasks leave their sections as soon as possible.
    ending: Arc<AtomicBool>,
    resource: Reach,
}

/// Way in which a guard is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveBack {
    /// By `unlock`, which is awaited.
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
            sections: Vec::new(),
            name: String::new(),
            teller,
            ending,
            resource,
        }
    }

    /// Returns the same task, acting for an owner that it shares with others.
    pub(crate) fn for_owner(self, owner: Owner) -> Inside {
        Inside {
            owner: Some(owner),
            ..self
        }
    }

    /// Returns the same task, for a section nested in the current one.
    pub(crate) fn nested(&self) -> Inside {
        Inside {
            task: self.task,
            client: self.client,
            owner: self.owner,
            sections: Vec::new(),
            name: String::new(),
            teller: self.teller.clone(),
            ending: self.ending.clone(),
            resource: self.resource.clone(),
        }
    }

    /// Requests a lock and reports the result.
    pub(crate) async fn ask<T>(
        &mut self,
        name: &str,
        mode: Mode,
        asking: impl Future<Output = Result<Option<T>, Error>>,
    ) -> Result<Option<T>, Error> {
        self.name = name.to_owned();
        self.sections.clear();
        self.begin(name, mode, false);
        if name.starts_with("multi:") {
            for member in locks_of(name) {
                self.begin(&member, mode, true);
            }
        }
        let answer = asking.await;
        match &answer {
            // Reported on entry, with the token.
            Ok(Some(_)) => {}
            Ok(None) => self.tell(What::GaveUp),
            Err(error) => self.tell(What::Failed { error: kind(error) }),
        }
        answer
    }

    fn begin(&mut self, name: &str, mode: Mode, part: bool) {
        let section = self.teller.section();
        self.sections.push(section);
        let ask = Ask {
            task: self.task,
            client: self.client,
            owner: self.owner.map(Owner::number),
            name: name.to_owned(),
            mode,
            part,
        };
        self.teller.tell_of(section, What::Asked(ask));
    }

    /// Runs one critical section without a token, from the request to the release.
    pub(crate) async fn pass<H: Holding>(
        &mut self,
        name: &str,
        mode: Mode,
        asking: impl Future<Output = Result<Option<H>, Error>>,
        time: Duration,
    ) -> Result<(), Error> {
        let guard = self.ask(name, mode, asking).await?;
        self.stay(guard, None, time).await
    }

    /// Stays inside for this long, or until the lock is lost, and releases it.
    pub(crate) async fn stay<H: Holding>(
        &mut self,
        guard: Option<H>,
        token: Option<u64>,
        time: Duration,
    ) -> Result<(), Error> {
        let Some(guard) = guard else { return Ok(()) };
        self.enter(token, None);
        self.hold(&guard, time).await;
        self.leave(guard, token, GiveBack::Unlock).await
    }

    /// Keeps permits for this long, and releases them.
    pub(crate) async fn keep(
        &mut self,
        permits: Option<SemaphorePermits>,
        time: Duration,
    ) -> Result<(), Error> {
        let Some(permits) = permits else {
            return Ok(());
        };
        self.enter(None, None);
        sleep(time).await;
        self.tell(What::Leaving);
        let freed = permits.release().await;
        let error = freed.as_ref().err().map(kind);
        self.tell(What::Freed { error });
        freed
    }

    /// Records that a latch was counted down.
    pub(crate) fn counted(&self, left: u64) {
        self.tell(What::Counted { left });
    }

    /// Records that the lock is held: the hold count is the last value read from the guard.
    pub(crate) fn enter(&self, token: Option<u64>, holds: Option<u32>) {
        self.tell(What::Got { token, holds });
    }

    /// Watches the guard for this long, or until it is lost. Returns whether it was lost.
    pub(crate) async fn hold<H: Holding>(&self, guard: &H, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut until = self.look(guard);
        let mut lost = std::pin::pin!(guard.lost());
        loop {
            // The last check is at the end.
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
                        self.lost(until);
                    }
                    self.tell(What::Told);
                    // A lost guard must never report that it is valid.
                    self.look(guard);
                    return true;
                }
                () = sleep(pause) => {}
            }
            let before = until;
            until = self.look(guard);
            if until.is_none() {
                if let Some(before) = before {
                    self.lost(before);
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

    /// Writes to the resource if there is a token, and releases the lock.
    pub(crate) async fn leave<H: Holding>(
        &mut self,
        guard: H,
        token: Option<u64>,
        how: GiveBack,
    ) -> Result<(), Error> {
        if let Some(token) = token {
            // Also after a loss: the resource has to refuse that write.
            self.write(token).await;
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

    /// Records whether the guard is valid, and until when.
    fn look<H: Holding>(&self, guard: &H) -> Option<Time> {
        let sections = self.sections.iter();
        let looks = sections.map(|section| self.teller.look(*section, || guard.valid_for()));
        looks.last().flatten()
    }

    /// Records that the guard, which was valid until `until` at the last check, is lost.
    fn lost(&self, until: Time) {
        for section in &self.sections {
            self.teller.lost(*section, until);
        }
    }

    /// Adds one to the number in the resource.
    async fn write(&mut self, token: u64) {
        let name = &self.name;
        let Some(read) = self
            .resource
            .exchange(&format!("read {name} {token}"))
            .await
        else {
            return;
        };
        let written = match read.parse::<u64>() {
            Ok(value) => {
                // Another writer may come in between: the token protects against that.
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
        for section in &self.sections {
            self.teller.tell_of(*section, what.clone());
        }
    }
}

/// Common interface of all guards.
pub(crate) trait Holding: Send {
    fn valid_for(&self) -> Duration;
    fn lost(&self) -> impl Future<Output = ()> + Send + 'static;
    fn unlock(self) -> impl Future<Output = Result<(), Error>> + Send;
}

macro_rules! holding {
    ($guard:ty $(, $kind:ident)?) => {
        impl$(<$kind: LockKind>)? Holding for $guard {
            fn valid_for(&self) -> Duration {
                <$guard>::valid_for(self)
            }

            fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
                <$guard>::lost(self)
            }

            async fn unlock(self) -> Result<(), Error> {
                <$guard>::unlock(self).await
            }
        }
    };
}

holding!(Guard<K>, K);
holding!(MultiGuard);
holding!(RedGuard);

/// Returns the name of an error, and how a lock was lost.
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
