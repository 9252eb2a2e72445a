//! Requests the lock from all members, in rounds (the Redlock algorithm).
//!
//! 1. In each round, send the acquisition to all members concurrently. Each has `member_timeout` to
//!    answer; a late or failed member counts as a refusal, and its attempt is undone in the
//!    background.
//! 2. If two members are in one store, release the granted members and return the error. Of clients
//!    with two addresses of one server, this is known once they have answered.
//! 3. If a quorum (N/2 + 1) granted the lock and remains valid, less the allowance for clock drift,
//!    the lock is acquired.
//! 4. Otherwise release the granted members. If so many members fail that the others cannot form a
//!    quorum, and waiting cannot fix it, return the error.
//! 5. If a quorum has been unreachable for longer than the outage limit, return that error.
//! 6. Otherwise pause for a random time and start the next round.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::held::{Majority, MemberHold, quorum_valid_for, take_holds};
use super::{answer_within, quorum};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::join::join_all;
use crate::lease::{Expiry, Lease};
use crate::locks::{HoldGuard, Options};
use crate::owner::Owner;
use crate::session::{HoldRef, RequestedHold, Terms};
use crate::several::{Member, check_stores};
use crate::step::Outcome;
use crate::store::{LastContact, Progress};
use crate::wait::{Place, Request, RequestLimits, WaitQueues};

/// One acquisition in progress.
pub(super) struct RedLockRequest<'a> {
    pub(super) members: &'a [Member],
    pub(super) options: &'a Options,
    pub(super) owner: Owner,
    pub(super) lease: Option<Lease>,
    /// How long one member may take to answer.
    pub(super) member_timeout: Duration,
    pub(super) backoff: Backoff,
    /// Name of the local queue in which requests of the same clients wait for their turn. No
    /// messages arrive there.
    pub(super) queue_name: String,
    pub(super) tries: u32,
    /// The first error of the latest round, if so many members failed that the others could not
    /// form a quorum.
    pub(super) failure: Option<Error>,
    /// When waiting fails while no quorum can be reached.
    pub(super) limits: RequestLimits,
    pub(super) progress: &'a Progress,
}

/// Requests one member once, and again if the hold that its owner had turns out to be lost. `None`:
/// another owner holds it. The holds of a failed request, or of one that is dropped, are settled in
/// the background.
pub(super) async fn request_member(
    member: &Member,
    hold_ref: impl Fn() -> Result<HoldRef>,
    terms: Terms,
    member_timeout: Duration,
) -> Result<Option<HoldGuard>> {
    let attempts = async {
        loop {
            let hold_ref = hold_ref()?;
            hold_ref.hold.state().acquires_again = true;
            hold_ref.hold.mark_red_lock_member();
            // A read side of this owner that was released, but not settled, would block its own
            // request.
            hold_ref.settle_sibling().await;
            let progress = Progress::default();
            // The limits begin when a majority is held.
            let requested = RequestedHold::without_waiting(&*member.lock.kind, &hold_ref, terms);
            let mut tried = requested.try_acquire(None, &progress).await;
            if matches!(tried, Err(Error::WriteWhileReading { .. }))
                && !hold_ref.owner_reads().await?
            {
                tried = requested.try_acquire(None, &progress).await;
            }
            return match tried {
                Ok(Outcome::Done(_)) => Ok(Some(HoldGuard::new(hold_ref, terms))),
                Ok(Outcome::Wait(_)) => Ok(None),
                // The owner's previous hold was lost meanwhile: start again with a new one.
                Err(Error::Lost { .. }) if hold_ref.hold.loss().is_some() => continue,
                Err(error) => Err(error),
            };
        }
    };
    // A member that does not answer in time may have granted the lock: dropping the attempt
    // undoes it in the background.
    answer_within(member_timeout, attempts).await
}

impl RedLockRequest<'_> {
    fn next_pause(&mut self) -> Duration {
        self.tries = self.tries.saturating_add(1);
        self.backoff.pause(self.tries - 1)
    }

    /// Runs rounds with pauses in between.
    async fn repeat_rounds(&mut self, waits: bool) -> Result<Option<Arc<Majority>>> {
        loop {
            if let Some(grant) = self.round().await? {
                return Ok(Some(grant));
            }
            if !waits {
                return Ok(None);
            }
            sleep(self.next_pause()).await;
        }
    }

    /// Requests all members once. Without a quorum that is valid for some time, releases what was
    /// acquired.
    async fn round(&mut self) -> Result<Option<Arc<Majority>>> {
        let begun = Instant::now();
        let (owner, options, lease) = (self.owner, self.options, self.lease);
        let member_timeout = self.member_timeout;
        let attempts = self.members.iter().map(|member| async move {
            // Looked up anew for each attempt, so that a hold that was lost meanwhile is not
            // re-entered.
            let hold_ref = || {
                let hold_ref = member.lock.hold_ref(owner)?;
                options.set_note(&hold_ref.hold);
                Ok(hold_ref)
            };
            let terms = member.terms(lease);
            let requested = request_member(member, hold_ref, terms, member_timeout);
            (member, requested.await)
        });
        let mut members = Vec::with_capacity(self.members.len());
        let mut errors = Vec::new();
        for (member, answer) in join_all(attempts).await {
            let held = answer.unwrap_or_else(|error| {
                errors.push(error);
                None
            });
            members.push(MemberHold::new(member.clone(), held));
        }
        // Members at two addresses may be at one server, as is known now. One may refuse the other.
        let distinct = check_stores(self.members);
        if distinct.is_ok() && !quorum_valid_for(&members).is_zero() {
            let majority = Majority::new(self.owner, members, member_timeout);
            return Ok(Some(Arc::new(majority)));
        }
        let granted = take_holds(&mut members);
        tracing::debug!(had = granted.len(), of = members.len(), "no quorum");
        let releases = granted.into_iter();
        join_all(releases.map(|held| timeout(member_timeout, held.release()))).await;
        distinct?;
        // Whether so many members failed that the others cannot form a quorum.
        let members = self.members.len();
        let decides = |errors: usize| members - errors.min(members) < quorum(members);
        let lasting =
            |error: &&Error| !error.is_transient() && !matches!(error, Error::Lost { .. });
        if decides(errors.iter().filter(lasting).count()) {
            let first = errors.iter().find(lasting).cloned();
            return first.map_or(Ok(None), Err);
        }
        // (A grant that arrived too late is a refusal, not a failure.)
        let mut transient = errors.iter().filter(|error| error.is_transient());
        let first = transient.next();
        self.failure = first.filter(|_| decides(1 + transient.count())).cloned();
        match &self.failure {
            Some(error) => self.progress.record_failure(begun, error.clone()),
            None => self.progress.record_answer(),
        }
        match self.progress.last_contact() {
            Some(LastContact::Failed { since, error })
                if self.limits.waits() && Expiry::In(since.elapsed()) >= self.limits.outage =>
            {
                Err(error)
            }
            _ => Ok(None),
        }
    }
}

impl Request for RedLockRequest<'_> {
    type Acquired = Arc<Majority>;

    fn place(&self) -> Place<'_> {
        Place::new(&self.queue_name, &self.queue_name)
    }

    async fn acquire(&mut self, queues: &WaitQueues, waits: bool) -> Result<Option<Arc<Majority>>> {
        match self.owner.is_anonymous() {
            true => queues.acquire(self, waits).await,
            // An owner that may already hold the lock must not wait behind its waiters.
            false => self.repeat_rounds(waits).await,
        }
    }

    async fn send(&mut self, _: bool) -> Result<Outcome<Arc<Majority>>> {
        Ok(match self.round().await? {
            Some(grant) => Outcome::Done(grant),
            None => Outcome::Wait(Expiry::In(Duration::ZERO)),
        })
    }

    fn progress(&self) -> &Progress {
        self.progress
    }

    fn pause(&mut self) -> Option<Duration> {
        Some(self.next_pause())
    }
}
