//! Requests the lock from all members, in rounds (the Redlock algorithm).
//!
//! 1. In each round, send the acquisition to all members concurrently. Each has `limit` to answer;
//!    a late or failed member counts as a refusal, and its attempt is undone in the background.
//! 2. If a quorum (N/2 + 1) granted the lock and remains valid, less the allowance for clock drift,
//!    the lock is acquired.
//! 3. Otherwise release the granted members. If so many members fail that the others cannot form a
//!    quorum, and waiting cannot fix it, return the error.
//! 4. If a quorum has been unreachable for longer than the outage limit, return that error.
//! 5. Otherwise pause for a random time and start the next round.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::guard::Majority;
use super::{quorum, too_slow};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::lease::Lease;
use crate::owner::Owner;
use crate::primitives::handle::Ask;
use crate::primitives::multi_lock::{Member, Share};
use crate::several::all;
use crate::step::Outcome;
use crate::store::{Sent, Word};
use crate::wait::{Attempt, Request};

/// One acquisition in progress.
pub(super) struct Rounds<'a> {
    pub(super) members: &'a [Member],
    pub(super) owner: Owner,
    pub(super) lease: Option<Lease>,
    /// How long one member may take to answer.
    pub(super) limit: Duration,
    pub(super) backoff: Backoff,
    /// Name of the local queue in which requests of the same clients wait for their turn. No
    /// messages arrive there.
    pub(super) line: String,
    pub(super) tries: u32,
    /// The error with which a majority of members failed in the latest round, if they did.
    pub(super) failure: Option<Error>,
    /// Whether callers may name the owner, and acquire for it concurrently.
    pub(super) known: bool,
    /// How long a majority of members may fail before waiting fails.
    pub(super) outage: Duration,
    pub(super) sent: &'a Sent,
}

/// The members that a quorum granted.
pub(super) type Won = (Vec<Share>, Arc<Majority>);

impl Rounds<'_> {
    /// Runs rounds with pauses in between.
    async fn go_on(&mut self, waits: bool) -> Result<Option<Won>> {
        loop {
            if let Some(won) = self.round().await? {
                return Ok(Some(won));
            }
            if !waits {
                return Ok(None);
            }
            let pause = self.backoff.pause(self.tries);
            self.tries = self.tries.saturating_add(1);
            sleep(pause).await;
        }
    }

    /// Requests all members once. Without a quorum that is valid for some time, releases what was acquired.
    async fn round(&mut self) -> Result<Option<Won>> {
        let begun = Instant::now();
        let mut asked = Vec::with_capacity(self.members.len());
        for member in self.members {
            // Claimed anew in each round, so that a hold that was lost meanwhile is not re-entered.
            asked.push((member, member.0.claim(self.owner)?));
        }
        let (lease, limit) = (self.lease, self.limit);
        let asking = asked.into_iter().map(|(member, claim)| async move {
            let terms = member.terms(lease);
            let step = |hold, count| {
                member.0.acquire(Ask {
                    hold,
                    count,
                    lease: terms.lease,
                    waits: false,
                })
            };
            // A member that does not answer in time may have granted the lock: dropping the attempt
            // undoes it in the background.
            let sent = Sent::default();
            let entered = timeout(limit, claim.enter(terms, None, &sent, step)).await;
            match entered {
                Ok(Ok(Outcome::Done(prize))) => Ok(Some(Share::new(claim, terms, prize))),
                Ok(Ok(Outcome::Wait(_))) => Ok(None),
                Ok(Err(error)) => Err(error),
                Err(_) => Err(too_slow(limit)),
            }
        });
        let mut shares = Vec::with_capacity(self.members.len());
        let mut errors = Vec::new();
        for answer in all(asking).await {
            match answer {
                Ok(share) => shares.extend(share),
                Err(error) => errors.push(error),
            }
        }
        let majority = Majority::new(&shares, self.members.len(), self.limit);
        if !majority.valid_for().is_zero() {
            return Ok(Some((shares, Arc::new(majority))));
        }
        tracing::debug!(had = shares.len(), of = self.members.len(), "no quorum");
        let giving = shares
            .into_iter()
            .map(|share| timeout(limit, share.give_back()));
        all(giving).await;
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
        let mut away = errors.iter().filter(|error| error.is_transient());
        let first = away.next();
        self.failure = first.filter(|_| decides(1 + away.count())).cloned();
        match &self.failure {
            Some(error) => self.sent.failed(begun, error.clone()),
            None => self.sent.answered(),
        }
        match self.sent.word() {
            Some(Word::Failed { since, error }) if since.elapsed() >= self.outage => Err(error),
            _ => Ok(None),
        }
    }
}

impl Request for Rounds<'_> {
    type Obtained = Won;

    async fn obtain(&mut self, waits: bool) -> Result<Option<Won>> {
        match (self.known, self.members.first()) {
            // An owner that may already hold the lock must not wait behind its waiters.
            (true, _) | (_, None) => self.go_on(waits).await,
            (false, Some(first)) => first.session().waiting.obtain(self, waits).await,
        }
    }
}

impl Attempt for Rounds<'_> {
    type Won = Won;

    fn channel(&self) -> &str {
        &self.line
    }

    fn object(&self) -> &str {
        &self.line
    }

    async fn ask(&mut self, _: bool) -> Result<Outcome<Won>> {
        Ok(match self.round().await? {
            Some(won) => Outcome::Done(won),
            None => Outcome::Wait(Duration::ZERO),
        })
    }

    fn sent(&self) -> &Sent {
        self.sent
    }

    fn keeps_others_out(&self) -> Option<Duration> {
        None
    }

    fn pause(&mut self) -> Option<Duration> {
        self.tries = self.tries.saturating_add(1);
        Some(self.backoff.pause(self.tries - 1))
    }
}
