//! Acquires all members or none, and waits for the member that blocks while holding nothing.
//!
//! 1. Split the members, in their global order, into runs that one script can take. If a member
//!    already has a local queue of waiters, go to 4 with that member.
//! 2. Take the runs one after the other, without waiting for locks. If all succeed, return them.
//! 3. If a member is held by another owner, release everything that this attempt acquired.
//! 4. Wait in that member's queue. When it is this request's turn, start over at 2; from now on the
//!    attempt that reaches the member also subscribes to its channel and registers as its waiter.
//! 5. If another member blocks this time, leave the queue, pause unless this is the first time, and go to 4
//!    with that member.
//!
//! No deadlock: no request holds a lock *while waiting* for another, so waiters form no cycle.
//!
//! No livelock: during an attempt, a request may briefly hold some locks and thereby refuse another
//! attempt. All requests take the locks in the same order. Of all locks that are held so briefly,
//! consider the last one in that order: its holder can only be refused by an owner that has
//! acquired all of its locks. So attempts cannot make each other fail forever. They can refuse each other
//! many times while a later lock is held for long, and delay those that wait for an earlier one. So a
//! request that goes from queue to queue in a short time pauses in between, for longer each time.

use std::future::{Future as _, poll_fn};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::member::Member;
use super::share::{Share, give_back};
use super::take::{Part, Prize, Take};
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::error::Result;
use crate::hold::Tenure;
use crate::lease::Lease;
use crate::primitives::handle::Ask;
use crate::session::{Claim, Terms, Together};
use crate::step::Outcome;
use crate::store::Sent;
use crate::wait::{Attempt, Queue, Request};

/// Maximum number of locks that one script takes, so that it does not block the server.
const BATCH: usize = 100;

/// Pauses of a request that goes from queue to queue.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// A request that has been in a queue for longer than this has waited there.
const SHORTLY: Duration = Duration::from_secs(1);

/// One acquisition of several locks in progress.
pub(super) struct Entry<'a> {
    members: &'a [Member],
    claims: &'a [Claim],
    terms: Vec<Terms>,
    sent: &'a Sent,
    /// Adjacent members that one script takes.
    runs: Vec<Range<usize>>,
    /// The member that is waited for; the request is in its queue.
    waits_for: Option<usize>,
    /// Whether the store may remember this request as a waiter of that member.
    remembered: bool,
    /// Whether a step that requests that member is in flight.
    reaching: bool,
    /// Whether the latest attempt got as far as requesting that member.
    reached: bool,
    /// Whether the latest attempt acquired all members.
    had: bool,
    /// Number of pauses since the request has been waiting for that member.
    tries: u32,
    /// When the request last went on to another member's queue, and how often it did so shortly before.
    moved: Option<(Instant, u32)>,
    /// Set while an attempt runs: what the owner acquires then, it acquires through this request.
    trying: Arc<AtomicBool>,
}

/// The result of a turn in a member's queue.
pub(super) enum Turn {
    /// All members were acquired.
    Had(Vec<Share>),
    /// Another member blocks now.
    Elsewhere(usize),
}

impl<'a> Entry<'a> {
    /// Both slices list the same locks, in order.
    pub(super) fn new(
        members: &'a [Member],
        claims: &'a [Claim],
        lease: Option<Lease>,
        sent: &'a Sent,
    ) -> Entry<'a> {
        Entry {
            sent,
            members,
            claims,
            terms: members.iter().map(|member| member.terms(lease)).collect(),
            runs: runs(members, claims),
            waits_for: None,
            remembered: false,
            reaching: false,
            reached: false,
            had: false,
            tries: 0,
            moved: None,
            trying: Arc::default(),
        }
    }

    /// Returns the first member with a local queue of waiters, except members for which the owner
    /// must not wait behind them: see `Claim::tenure`.
    fn somebody_waits(&self) -> Option<usize> {
        let mut both = self.members.iter().zip(self.claims);
        both.position(|(member, claim)| {
            let (channel, object) = (member.0.channel(&claim.hold), claim.hold.place.key());
            member.session().waiting.has_line(channel, object) && claim.tenure().is_none()
        })
    }

    /// Waits for another member from now on, and removes the store's record of this waiter at the
    /// previous member. If an attempt is in flight, the step that settles it does so.
    fn wait_for(&mut self, other: Option<usize>) {
        let is_settled = self.reaching && self.sent.get();
        let remembered = self.remembered && !is_settled;
        let left = self.waits_for.take().filter(|_| remembered);
        (self.remembered, self.reaching) = (false, false);
        self.waits_for = other;
        self.tries = 0;
        let Some(i) = left else { return };
        if let (Some(member), Some(claim), Some(terms)) =
            (self.members.get(i), self.claims.get(i), self.terms.get(i))
            && let Some(lasts) = member.0.remembers_waiters()
        {
            claim.settle_in_background(terms.waiting(Some(lasts)).remembered);
        }
    }

    /// Pauses if the request has just come from another member's queue, too.
    async fn pause_before_moving(&mut self) {
        let before = self.moved.filter(|(at, _)| at.elapsed() < SHORTLY);
        let moves = before.map_or(0, |(_, moves)| moves + 1);
        if let Some(pauses) = moves.checked_sub(1) {
            let all = Backoff::exponential(FIRST_PAUSE, 2.0, LONGEST_PAUSE);
            tokio::time::sleep(all.pause(pauses)).await;
        }
        self.moved = Some((Instant::now(), moves));
    }

    /// Tries once. Returns all shares, or the blocking member and how long it may be held; then
    /// nothing is held.
    async fn try_all(
        &mut self,
        subscribe: bool,
    ) -> Result<std::result::Result<Vec<Share>, (usize, Duration)>> {
        let _trying = Trying::begin(&self.trying);
        self.reached = false;
        self.had = false;
        let mut shares = Vec::with_capacity(self.members.len());
        for run in self.runs.clone() {
            let waits_for = self.waits_for.filter(|i| run.contains(i));
            // Before the step is sent, the store cannot remember this request.
            self.reaching = waits_for.is_some();
            let taken = self.take(run.clone(), waits_for, subscribe).await;
            self.reaching = false;
            self.remembered |= waits_for.is_some() && self.sent.get();
            self.reached |= waits_for.is_some();
            let prizes = match taken {
                Ok(Together::Had(prizes)) => prizes,
                Ok(Together::InTheWay(i, left)) => {
                    give_back(shares).await;
                    return Ok(Err((run.start + i, left)));
                }
                Err(error) => {
                    give_back(shares).await;
                    return Err(error);
                }
            };
            let claims = self.claims.iter().zip(&self.terms).skip(run.start);
            for ((claim, terms), prize) in claims.zip(prizes) {
                shares.push(Share::new(claim.clone(), *terms, prize));
            }
        }
        self.remembered = false;
        self.had = true;
        Ok(Ok(shares))
    }

    /// Takes one run. If `subscribe` is set, subscribes first to the channel of the member that is waited for.
    async fn take(
        &self,
        run: Range<usize>,
        waits_for: Option<usize>,
        subscribe: bool,
    ) -> Result<Together<Prize>> {
        let each = || {
            let both = self.members.iter().zip(self.claims).zip(&self.terms);
            let all = both.enumerate().skip(run.start).take(run.len());
            all.map(|(i, ((member, claim), terms))| {
                let remembers = member.0.remembers_waiters();
                let remembers = remembers.filter(|_| waits_for == Some(i));
                (i, member, claim, terms.waiting(remembers))
            })
        };
        let channel = each()
            .find(|&(i, ..)| subscribe && waits_for == Some(i))
            .map(|(_, member, claim, _)| member.0.channel(&claim.hold));
        let ask = |i, hold, held, terms: Terms| Ask {
            hold,
            count: held,
            lease: terms.lease,
            waits: waits_for == Some(i),
        };
        if let (Some((i, member, claim, terms)), 1) = (each().next(), run.len()) {
            let step = |hold, count| member.0.acquire(ask(i, hold, count, terms));
            let entered = claim.enter(terms, channel, self.sent, step).await?;
            return Ok(match entered {
                Outcome::Done(prize) => Together::Had(vec![prize]),
                Outcome::Wait(left) => Together::InTheWay(0, left),
            });
        }
        let Some(session) = each().next().map(|(_, member, ..)| member.session()) else {
            return Ok(Together::Had(Vec::new()));
        };
        let claims: Vec<_> = each().map(|(_, _, claim, terms)| (claim, terms)).collect();
        let step = |held: &[u32]| {
            let parts = each()
                .zip(held)
                .filter_map(|((i, member, claim, terms), &held)| {
                    let hold = &*claim.hold;
                    Some(Part {
                        name: member.name(),
                        take: member.0.acquire(ask(i, hold, held + 1, terms)),
                        undo: member.0.undo(hold, held)?,
                    })
                });
            Take::new(parts.collect())
        };
        let blocked = |reply: &Together<Prize>| match reply {
            Together::Had(_) => None,
            Together::InTheWay(i, _) => Some(*i),
        };
        session
            .enter(&claims, channel, self.sent, step, blocked)
            .await
    }
}

/// Returns the runs of adjacent members that one script can take: of one client, so also in one
/// store, and of one slot there.
fn runs(members: &[Member], claims: &[Claim]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut before: Option<&Member> = None;
    for (i, (member, claim)) in members.iter().zip(claims).enumerate() {
        // A member without an undo step is taken by itself.
        let composes = member.0.undo(&claim.hold, 0).is_some();
        let joins = |last: &Member| {
            composes
                && Arc::ptr_eq(last.session(), member.session())
                && last.slot() == member.slot()
        };
        match runs.last_mut() {
            Some(run) if run.len() < BATCH && before.is_some_and(joins) => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
        before = composes.then_some(member);
    }
    runs
}

/// Returns when the owner of a claim has a tenure that began after `since`, through an acquisition
/// other than the current attempt.
async fn entered_by_another(claim: &Claim, since: Option<Tenure>, trying: &AtomicBool) {
    let mut entered = pin!(claim.entered_after(since));
    poll_fn(|cx| {
        if trying.load(Ordering::Relaxed) {
            // Polled again after the attempt has ended: it runs in the same task, before this.
            return Poll::Pending;
        }
        entered.as_mut().poll(cx)
    })
    .await;
}

/// Marks an attempt as running until it ends or is dropped.
struct Trying(Arc<AtomicBool>);

impl Trying {
    fn begin(trying: &Arc<AtomicBool>) -> Trying {
        trying.store(true, Ordering::Relaxed);
        Trying(trying.clone())
    }
}

impl Drop for Trying {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Request for Entry<'_> {
    type Obtained = Vec<Share>;

    async fn obtain(&mut self, waits: bool) -> Result<Option<Vec<Share>>> {
        for claim in self.claims {
            claim.settle_beside().await;
        }
        let mut asked = None;
        let mut in_the_way = self.somebody_waits().filter(|_| waits);
        loop {
            let Some(i) = in_the_way else {
                self.wait_for(None);
                asked = Some(Tenure::latest());
                match self.try_all(false).await? {
                    Ok(shares) => return Ok(Some(shares)),
                    Err(_) if !waits => return Ok(None),
                    Err((i, _)) => in_the_way = Some(i),
                }
                continue;
            };
            self.wait_for(Some(i));
            let (Some(member), Some(claim)) = (self.members.get(i), self.claims.get(i)) else {
                return Ok(None);
            };
            let trying = self.trying.clone();
            let turn = tokio::select! {
                biased;
                turn = member.session().waiting.obtain_in_line(self) => turn?,
                // Bypasses the queue: see `Claim::tenure`.
                () = entered_by_another(claim, asked, &trying) => {
                    in_the_way = None;
                    continue;
                }
            };
            match turn {
                Turn::Had(shares) => return Ok(Some(shares)),
                Turn::Elsewhere(i) => {
                    self.wait_for(None);
                    self.pause_before_moving().await;
                    in_the_way = Some(i);
                }
            }
        }
    }
}

impl Attempt for Entry<'_> {
    type Won = Turn;

    fn channel(&self) -> &str {
        let waits_for = self.waits_for.unwrap_or_default();
        match (self.members.get(waits_for), self.claims.get(waits_for)) {
            (Some(member), Some(claim)) => member.0.channel(&claim.hold),
            _ => "",
        }
    }

    fn object(&self) -> &str {
        let claim = self.waits_for.and_then(|i| self.claims.get(i));
        claim.map_or("", |claim| claim.hold.place.key())
    }

    fn queue(&self) -> Queue {
        let member = self.waits_for.and_then(|i| self.members.get(i));
        member.map_or(Queue::Exclusive, |member| member.0.queue())
    }

    async fn ask(&mut self, subscribe: bool) -> Result<Outcome<Turn>> {
        Ok(match self.try_all(subscribe).await? {
            Ok(shares) => Outcome::Done(Turn::Had(shares)),
            Err((i, left)) if self.waits_for == Some(i) => Outcome::Wait(left),
            Err((i, _)) => Outcome::Done(Turn::Elsewhere(i)),
        })
    }

    fn has_subscribed(&self) -> bool {
        self.reached
    }

    fn sent(&self) -> &Sent {
        self.sent
    }

    /// Members may be in other stores.
    fn asks_for_line(&self) -> bool {
        false
    }

    fn keeps_others_out(&self) -> Option<Duration> {
        let i = self.waits_for.filter(|_| self.had)?;
        let (member, terms) = (self.members.get(i)?, self.terms.get(i)?);
        // A spin lock publishes nothing when it is released.
        let tells = member.0.queue() == Queue::Exclusive && member.0.pause(0).is_none();
        tells.then(|| terms.lease.duration())
    }

    fn pause(&mut self) -> Option<Duration> {
        let member = self.members.get(self.waits_for?)?;
        self.tries = self.tries.saturating_add(1);
        member.0.pause(self.tries - 1)
    }

    fn report(&self, since: Instant) -> impl Future<Output = ()> + Send + 'static {
        let i = self.waits_for;
        let both = i.and_then(|i| self.members.get(i).zip(self.claims.get(i)));
        let both = both.map(|(member, claim)| (member.clone(), claim.hold.clone()));
        async move {
            if let Some((member, waiting)) = both {
                member.0.report(waiting, since).await;
            }
        }
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.wait_for(None);
    }
}
