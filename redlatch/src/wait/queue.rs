//! The waiters of this client for one object: who asks the store, who is woken, and who takes what
//! passes on in the client. [`Queues`] decides. It has no lock, no waker and no clock: `waiter` has
//! them, and does what it says.
//!
//! 1. The waiters of a queue stand in the order in which they joined. The foremost one has the turn
//!    until it leaves. Once it knows that, it is the *first*. Only the first waiter asks the store.
//! 2. What the store has answered counts for the whole queue, until the object may have been
//!    released, or a request is in flight.
//! 3. The first waiter asks again when a message arrives, or one may have been missed, and when the
//!    remaining lease has passed. When it acquires the object, the next one asks nothing before
//!    that lease has ended.
//! 4. A release of this client offers the object, or permits, to the first waiter, which takes that
//!    instead of asking. If all waiters can be claimed, it claims the first one instead, and has
//!    the store put it in its place.
//!
//! Invariant: a waiter that has the turn asks, sleeps until a time that is known, or is woken by
//! each message of the subscription. What must not happen:
//!
//! - *A waiter sleeps on a free object.* Each way to leave passes the turn on.
//! - *A hold is taken that the store may have given to another owner.* An offer of a whole object
//!   counts only while the store's latest answer does.
//! - *Two waiters ask, or take one offer.* Only the waiter that stands first does either.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::client_registry::REGISTERED_AFTER;
use crate::error::Error;
use crate::hold::{QueueKind, Share, Yielding, Yields};
use crate::store::LastContact;

/// Added to times of the store, which truncates them to whole milliseconds. Without it a waiter
/// could be early and have to send its request twice.
pub(super) const ROUNDING: Duration = Duration::from_millis(1);

/// How long an offer waits to be taken.
const OFFERED_FOR: Duration = Duration::from_millis(10);

/// The queues of one object. `W` wakes a waiter, `O` is an offer, and `C` is what a release must
/// know to acquire the object for a waiter.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Queues<W, O, C> {
    /// One for each [`QueueKind`].
    queues: [Queue<W, O, C>; 2],
    /// Number of the latest waiter.
    latest: u64,
    /// Since when the store cannot be reached, and why.
    outage: Option<(Instant, Error)>,
}

/// See the [module](self).
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Queue<W, O, C> {
    /// The waiters by their numbers.
    places: BTreeMap<u64, Entry<W, C>>,
    /// The waiter that has the turn, once it knows that.
    first: Option<First>,
    /// What the next waiter need not ask, from the one before.
    relies: Option<HeldUntil>,
    /// The oldest first: at most one of a whole object, or of permits at most one for each waiter.
    offers: VecDeque<Offered<O>>,
    /// Number of waiters that take offers of `share`.
    taking_offers: usize,
    /// Number of waiters that a release can claim.
    claimable: usize,
    /// The share that the first of them requests. A waiter that joins with another share takes no
    /// offers.
    share: Option<Share>,
    /// Whether the store has answered a request of the queue.
    answered: bool,
    /// Since when the latest answer is out of date: since the release that the unanswered request
    /// follows, or since that request was sent. The answer still counts for waiters that joined
    /// earlier.
    stale_since: Option<Instant>,
    /// Since when the step of a release that has claimed a waiter is in flight.
    handoff_since: Option<Instant>,
    /// When the object was first released, or may have been, since the last request was sent.
    maybe_released_at: Option<Instant>,
    /// Whether the connection broke since then: the message of a later release may be missed, too.
    disconnected: bool,
    /// The latest message, until the first waiter takes it; 0 if there is none.
    message: i64,
    /// How long other clients go first.
    yielding: Yielding,
}

/// A waiter.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Entry<W, C> {
    /// Wakes it. `None` if it does not sleep: whoever wakes a waiter takes this.
    wake: Option<W>,
    served_by: ServedBy<C>,
    share: Share,
    joined: Instant,
    registration: Registration,
    /// Whether the waiter fails because the store could not be reached.
    failed: bool,
}

/// Whether a wait is registered, once it has lasted long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Registration {
    Due,
    /// Not before the next reminder.
    Refused,
    Done,
}

/// How a waiter gets the object from a release of this client.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) enum ServedBy<C> {
    /// It does not: it sends requests.
    RequestsOnly,
    /// It takes offers.
    Offers,
    /// A release may claim it. Boxed: most waiters have none.
    Claim(Box<C>),
    /// A release has claimed it.
    Claimed,
}

/// Until then another owner holds the object, unless a message reports a release. The next waiter
/// sends no request before.
#[derive(Debug, Clone, Copy)]
struct HeldUntil {
    until: Instant,
    /// For requests of this share.
    share: Share,
}

/// The first waiter of a queue.
#[derive(Debug, Clone, Copy)]
struct First {
    /// When it sends its next request unless it is woken before. `None`: only when it is woken.
    due: Option<Instant>,
    phase: Phase,
    /// When it was woken, before it was due.
    woken_at: Option<Instant>,
    /// Whether it has let clients go first that were counted, and none of them has released the
    /// object.
    in_vain: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waits,
    /// Lets other clients go first.
    YieldsUntil(Instant),
    /// Takes offers until there is none.
    Takes,
    /// Its request is in flight.
    Requests,
}

/// An offer that no waiter has taken.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Offered<O> {
    offer: O,
    share: Share,
    since: Instant,
}

/// What a waiter does until it is the first.
#[derive(Debug)]
pub(super) enum Turn {
    /// It sleeps until it is woken: see [`Queue::sleeper`].
    Sleep,
    /// The waiter registers its wait. Then [`Queues::turn`] is called again.
    Register,
    /// It is the first now. `relies`: it relies on the answer to the waiter before it.
    First {
        relies: bool,
    },
    Fail {
        since: Instant,
        error: Error,
    },
}

/// What the first waiter does next.
#[derive(Debug)]
pub(super) enum Next<O> {
    /// It sleeps until it is woken, or until then: see [`Queue::sleeper`].
    Sleep(Option<Instant>),
    /// The waiter takes this offer and [leaves](Queue::took). If it cannot use the offer,
    /// [`Queue::next`] is called again.
    Take(O),
    /// It drops this offer: the object may have been released since.
    Drop(O),
    /// It accepts this message, if it is not 0, or sends a request.
    Send {
        message: i64,
        woken_at: Option<Instant>,
    },
}

/// The parts of a waiter that has left, to be dropped without locks.
#[derive(Debug)]
pub(super) struct Left<W, O, C> {
    /// Wakes the next waiter.
    pub(super) wake: Option<W>,
    _place: Option<Entry<W, C>>,
    _offers: VecDeque<Offered<O>>,
}

impl<W, O, C> Queues<W, O, C> {
    pub(super) fn new() -> Queues<W, O, C> {
        Queues {
            queues: [Queue::new(), Queue::new()],
            latest: 0,
            outage: None,
        }
    }

    pub(super) fn queue(&mut self, kind: QueueKind) -> &mut Queue<W, O, C> {
        &mut self.queues[kind as usize]
    }

    pub(super) fn exclusive(&mut self) -> &mut Queue<W, O, C> {
        self.queue(QueueKind::Exclusive)
    }

    /// Returns whether all waiters for the object are in the exclusive queue, and there are some.
    fn are_exclusive(&self) -> bool {
        let [exclusive, shared] = &self.queues;
        !exclusive.places.is_empty() && shared.places.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queues.iter().all(|queue| queue.places.is_empty())
    }

    /// Adds a waiter that requests this share. Returns its number.
    pub(super) fn join(
        &mut self,
        kind: QueueKind,
        share: Share,
        served_by: ServedBy<C>,
        now: Instant,
    ) -> u64 {
        self.latest += 1;
        let number = self.latest;
        self.queue(kind).add(number, share, served_by, now);
        number
    }

    /// Returns what a waiter does that is not the first yet. `is_subscribed`: whether the channel
    /// is subscribed to.
    pub(super) fn turn(
        &mut self,
        kind: QueueKind,
        number: u64,
        now: Instant,
        is_subscribed: bool,
    ) -> Turn {
        let queue = &mut self.queues[kind as usize];
        let foremost = queue.foremost();
        let Some(place) = queue.places.get_mut(&number) else {
            return Turn::Sleep;
        };
        if std::mem::take(&mut place.failed)
            && let Some((since, error)) = self.outage.clone()
        {
            return Turn::Fail { since, error };
        }
        if foremost != Some(number) {
            return match place.must_register(now) {
                true => Turn::Register,
                false => Turn::Sleep,
            };
        }
        let relies = queue.become_first(now, is_subscribed);
        if relies {
            self.answered(kind, Some(LastContact::Answered));
        }
        Turn::First { relies }
    }

    /// Records that the request of the first waiter has ended, with its last contact with the
    /// store.
    pub(super) fn answered(&mut self, kind: QueueKind, last: Option<LastContact>) {
        match last {
            Some(LastContact::Answered) => {
                let queue = self.queue(kind);
                (queue.answered, queue.stale_since) = (true, None);
                self.outage = None;
            }
            Some(LastContact::Failed { since, error }) => self.outage = Some((since, error)),
            None => {}
        }
    }

    /// Removes a waiter, and passes its turn on.
    pub(super) fn leave(&mut self, kind: QueueKind, number: u64) -> Left<W, O, C> {
        let left = self.queue(kind).remove(number);
        if self.is_empty() {
            self.outage = None;
        }
        left
    }

    /// Has all waiters fail that do not know that they have the turn, because the store cannot be
    /// reached. Returns what wakes them.
    pub(super) fn fail_all(&mut self) -> Vec<W> {
        self.wake_all(|place| {
            place.failed = true;
            true
        })
    }

    /// Returns what wakes those of them whose waits are to be registered.
    pub(super) fn remind_all(&mut self, now: Instant) -> Vec<W> {
        self.wake_all(|place| {
            if place.registration == Registration::Refused {
                place.registration = Registration::Due;
            }
            place.must_register(now)
        })
    }

    fn wake_all(&mut self, mut is_woken: impl FnMut(&mut Entry<W, C>) -> bool) -> Vec<W> {
        let waiting = self.queues.iter_mut().flat_map(|queue| {
            // The first waiter finds out by itself.
            let skipped = usize::from(queue.first.is_some());
            queue.places.values_mut().skip(skipped)
        });
        let woken = waiting.filter_map(|place| match is_woken(place) {
            true => place.wake.take(),
            false => None,
        });
        woken.collect()
    }

    /// Returns whether a release may offer this share to the first waiter: if all waiters take it.
    /// Of a whole object, the store's latest answer must count. Of permits, there must be a waiter
    /// for each offer, without the one whose request is in flight: it may need none.
    pub(super) fn takes_offer(&self, share: Share) -> bool {
        let queue = &self.queues[QueueKind::Exclusive as usize];
        // All others are offers of the same share, or refused soon.
        let (counts, waiting_offers) = match share {
            Share::Whole => (queue.is_current(), 0),
            Share::Permits(_) => (true, queue.offers.len()),
        };
        counts
            && queue.places.len() > waiting_offers + usize::from(queue.has_request_in_flight())
            && queue.taking_offers == queue.places.len()
            && queue.share == Some(share)
            && self.are_exclusive()
    }

    /// Claims the first waiter, if all waiters can be claimed, and the store's latest answer
    /// counts.
    pub(super) fn claim_first(&mut self) -> Option<C> {
        let are_exclusive = self.are_exclusive();
        let queue = self.exclusive();
        if !are_exclusive || !queue.is_current() || queue.claimable != queue.places.len() {
            return None;
        }
        let mut place = queue.places.first_entry()?;
        match std::mem::replace(&mut place.get_mut().served_by, ServedBy::Claimed) {
            ServedBy::Claim(claim) => {
                queue.claimable -= 1;
                Some(*claim)
            }
            // All waiters can be claimed.
            _ => None,
        }
    }

    /// Records that this client is about to release the object.
    pub(super) fn released(&mut self, now: Instant) {
        for queue in &mut self.queues {
            queue.maybe_released_at.get_or_insert(now);
        }
    }

    /// Records a message, 0 if it has no number. Returns what wakes the first waiters.
    pub(super) fn message(&mut self, message: i64, now: Instant) -> [Option<W>; 2] {
        self.released(now);
        self.queues.each_mut().map(|queue| {
            queue.message = message;
            // The release of a write lock publishes another message, too, for waiters in Java. That
            // of permits publishes their number.
            if message == 0 || queue.share != Some(Share::Whole) {
                queue.yielding.message();
            }
            queue.wake_foremost()
        })
    }

    /// Records that the connection broke. Returns what wakes the first waiters.
    pub(super) fn disconnected(&mut self, now: Instant) -> [Option<W>; 2] {
        for queue in &mut self.queues {
            queue.disconnected = true;
        }
        self.message(0, now)
    }

    /// Returns the last contact of a queue with the store, for a waiter that has waited since then.
    /// If a request was refused, the store has answered that another owner holds the object. That
    /// counts for every waiter, unless a request has been without an answer ever since, or the
    /// object was released before and no request was sent after that. There is no contact if all
    /// waiters have left.
    pub(super) fn contact_since(&self, kind: QueueKind, joined: Instant) -> Option<LastContact> {
        if let Some((since, error)) = self.outage.clone() {
            return Some(LastContact::Failed { since, error });
        }
        let queue = &self.queues[kind as usize];
        let is_outdated = queue.outdated_at().is_some_and(|at| at <= joined);
        (!is_outdated && queue.answered).then_some(LastContact::Answered)
    }
}

impl<W, O, C> Queue<W, O, C> {
    fn new() -> Queue<W, O, C> {
        Queue {
            places: BTreeMap::new(),
            first: None,
            relies: None,
            offers: VecDeque::new(),
            taking_offers: 0,
            claimable: 0,
            share: None,
            answered: false,
            stale_since: None,
            handoff_since: None,
            maybe_released_at: None,
            disconnected: false,
            message: 0,
            yielding: Yielding::default(),
        }
    }

    fn add(&mut self, number: u64, share: Share, mut served_by: ServedBy<C>, now: Instant) {
        match &served_by {
            ServedBy::Offers => {
                if self.taking_offers == 0 {
                    self.share = Some(share);
                }
                match self.share == Some(share) {
                    true => self.taking_offers += 1,
                    false => served_by = ServedBy::RequestsOnly,
                }
            }
            ServedBy::Claim(_) => {
                self.share.get_or_insert(share);
                self.claimable += 1;
            }
            ServedBy::Claimed | ServedBy::RequestsOnly => {}
        }
        let place = Entry {
            wake: None,
            served_by,
            share,
            joined: now,
            registration: Registration::Due,
            failed: false,
        };
        self.places.insert(number, place);
    }

    fn remove(&mut self, number: u64) -> Left<W, O, C> {
        let had_turn = self.foremost() == Some(number);
        let place = self.places.remove(&number);
        match place.as_ref().map(|place| &place.served_by) {
            Some(ServedBy::Offers) => self.taking_offers -= 1,
            Some(ServedBy::Claim(_)) => self.claimable -= 1,
            _ => {}
        }
        let (mut wake, mut offers) = (None, VecDeque::new());
        if self.places.is_empty() {
            // Later requests must contact the store themselves. What the last request has not found
            // out, they have to.
            let idle = Queue {
                relies: self.relies,
                handoff_since: self.handoff_since,
                maybe_released_at: self.stale_since.or(self.maybe_released_at),
                disconnected: self.disconnected,
                ..Queue::new()
            };
            offers = std::mem::replace(self, idle).offers;
        } else if had_turn {
            self.first = None;
            wake = self.wake_foremost();
        }
        Left {
            wake,
            _place: place,
            _offers: offers,
        }
    }

    /// Records that the store has answered the request of a waiter before it joined.
    pub(super) fn record_answer(&mut self) {
        self.answered = true;
    }

    /// Records whether the wait of a waiter was registered.
    pub(super) fn registered(&mut self, number: u64, done: bool) {
        if let Some(place) = self.places.get_mut(&number) {
            place.registration = match done {
                true => Registration::Done,
                false => Registration::Refused,
            };
        }
    }

    /// Returns where to put what wakes a waiter that sleeps. It is empty again when the waiter was
    /// woken.
    pub(super) fn sleeper(&mut self, number: u64) -> Option<&mut Option<W>> {
        Some(&mut self.places.get_mut(&number)?.wake)
    }

    /// Records that the first waiter is about to send a request whose answer counts for the whole
    /// queue.
    pub(super) fn request_started(&mut self, now: Instant) {
        self.stale_since.get_or_insert(now);
    }

    /// Records that the store has refused the request of the first waiter. `due`: when the waiter
    /// sends the next one unless it is woken before; `None`: only when it is woken.
    pub(super) fn refused(&mut self, due: Option<Instant>) {
        if let Some(first) = &mut self.first {
            if std::mem::take(&mut first.in_vain) {
                self.yielding.used();
            }
            (first.due, first.phase) = (due, Phase::Waits);
        }
    }

    /// Records that the store has granted the object to the first waiter. `until`: when the lease
    /// ends unless it is renewed; `None`: that excludes no other waiter, or is not known. Returns
    /// an offer that is out of date, and whether a message has arrived meanwhile, mostly of an
    /// earlier release: what was acquired is in doubt.
    pub(super) fn acquired(&mut self, until: Option<Instant>) -> (Option<O>, bool) {
        let Some((first, place)) = self.first.zip(self.places.values().next()) else {
            return (None, false);
        };
        let (share, is_served) = (place.share, place.is_served());
        self.relies = until.map(|until| HeldUntil {
            until: until + ROUNDING,
            share,
        });
        if share != Share::Whole {
            return (None, false);
        }
        // A client that acquires permits meanwhile releases nothing.
        if first.in_vain {
            self.yielding.in_vain();
        }
        // The store granted it, so an earlier holder that offers it has lost it.
        let outdated = self.offers.pop_front().map(|offered| offered.offer);
        // If the connection broke, the wakeups are kept: only a request of the next waiter makes
        // sure that there is one again, and that no message was missed.
        let is_in_doubt =
            is_served && !self.disconnected && self.maybe_released_at.take().is_some();
        (outdated, is_in_doubt)
    }

    /// Records that the first waiter has taken an offer. `until`: when its lease ends unless it
    /// is renewed. `None`: the acquisition excludes no other waiter, so what the store has answered
    /// still counts.
    pub(super) fn took(&mut self, until: Option<Instant>) {
        let until = match until {
            Some(until) => Some(until + ROUNDING),
            None => self
                .first
                .and_then(|first| first.due)
                .filter(|_| self.is_current()),
        };
        let share = self.places.values().next().map(|place| place.share);
        self.relies = until
            .zip(share)
            .map(|(until, share)| HeldUntil { until, share });
    }

    /// Offers the first waiter something. Returns what wakes it, and the earlier offers of the
    /// whole object: their hold is lost, because the store has granted another one since. To be
    /// dropped without locks. [`Queue::expired_offers`] takes the offer if no waiter does.
    pub(super) fn offer(&mut self, offer: O, share: Share, now: Instant) -> (Option<W>, Vec<O>) {
        let outdated = match share {
            Share::Whole => self.take_offers(),
            Share::Permits(_) => Vec::new(),
        };
        let since = now;
        self.offers.push_back(Offered {
            offer,
            share,
            since,
        });
        (self.wake_foremost(), outdated)
    }

    /// Takes all offers.
    pub(super) fn take_offers(&mut self) -> Vec<O> {
        self.offers.drain(..).map(|one| one.offer).collect()
    }

    /// Records that the step is sent that acquires the object for a claimed waiter.
    pub(super) fn handoff_started(&mut self, now: Instant) {
        self.handoff_since = Some(now);
    }

    /// Offers the object that was acquired for a claimed waiter by the step sent then. Returns what
    /// to wake and what to drop, as [`Queue::offer`] does; the offer itself if no waiter is left.
    pub(super) fn handed_off(
        &mut self,
        sent_at: Option<Instant>,
        offer: O,
        now: Instant,
    ) -> (Option<W>, Vec<O>) {
        if self.places.is_empty() {
            self.handoff_ended(sent_at);
            return (None, vec![offer]);
        }
        self.take_handoff(sent_at);
        self.answered = true;
        self.offer(offer, Share::Whole, now)
    }

    /// Records that the handoff has ended without an offer. If it was sent, the object may have been
    /// released.
    pub(super) fn handoff_ended(&mut self, sent_at: Option<Instant>) {
        if self.take_handoff(sent_at) {
            self.maybe_released_at = self.maybe_released_at.or(sent_at);
        }
    }

    /// Ends this handoff. Returns whether it was in flight.
    fn take_handoff(&mut self, sent_at: Option<Instant>) -> bool {
        let handoff = &mut self.handoff_since;
        handoff.take_if(|since| Some(*since) == sent_at).is_some()
    }

    /// Returns whether the step of a release that has claimed a waiter is in flight.
    pub(super) fn has_handoff_in_flight(&self) -> bool {
        self.handoff_since.is_some()
    }

    /// Lets other clients go first before the next request, which follows a release of this client.
    pub(super) fn yield_to(&mut self, yields: Yields, random: impl FnOnce() -> f64) {
        if !self.places.is_empty() {
            let of_permits = matches!(self.share, Some(Share::Permits(_)));
            self.yielding.released(yields, of_permits, random);
        }
    }

    /// Returns whether other clients waited lately.
    pub(super) fn is_crowded(&self) -> bool {
        self.yielding.is_crowded()
    }

    /// Returns when [`Queue::expired_offers`] has to be called.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        Some(self.offers.front()?.since + OFFERED_FOR)
    }

    /// Takes the offers that were not taken in time. To be dropped without locks.
    pub(super) fn expired_offers(&mut self, now: Instant) -> Vec<O> {
        let is_expired = |one: &Offered<O>| one.since + OFFERED_FOR <= now;
        let expired = self.offers.partition_point(is_expired);
        self.offers.drain(..expired).map(|one| one.offer).collect()
    }

    fn foremost(&self) -> Option<u64> {
        self.places.first_key_value().map(|(number, _)| *number)
    }

    fn wake_foremost(&mut self) -> Option<W> {
        self.places.first_entry()?.get_mut().wake.take()
    }

    /// Makes the foremost waiter the first. Returns whether it relies on the answer to the one
    /// before.
    fn become_first(&mut self, now: Instant, is_subscribed: bool) -> bool {
        let share = self.places.values().next().map(|place| place.share);
        let counts =
            |relies: &HeldUntil| is_subscribed && share == Some(relies.share) && now < relies.until;
        let relies = self.relies.take().filter(counts);
        // If no release has arrived since, another owner still holds the object.
        let relies = relies.filter(|_| !self.take_wakeups());
        self.first = Some(First {
            due: Some(relies.map_or(now, |relies| relies.until)),
            phase: Phase::Waits,
            woken_at: None,
            in_vain: false,
        });
        relies.is_some()
    }

    /// Returns what the first waiter does next.
    pub(super) fn next(&mut self, now: Instant) -> Next<O> {
        let has_offer = !self.offers.is_empty();
        let is_woken = has_offer || self.maybe_released_at.is_some();
        let Some(first) = &mut self.first else {
            return Next::Sleep(None);
        };
        match first.phase {
            Phase::Waits => {
                let is_early = first.due.is_none_or(|due| now < due);
                if is_early && !is_woken {
                    return Next::Sleep(first.due);
                }
                first.woken_at = is_early.then_some(now);
                first.in_vain = false;
                if !has_offer && let Some((end, are_counted)) = self.yielding.until(now) {
                    (first.phase, first.in_vain) = (Phase::YieldsUntil(end), are_counted);
                    // Wakeups from now on are of others.
                    self.take_wakeups();
                    return Next::Sleep(Some(end));
                }
            }
            Phase::YieldsUntil(end) if !has_offer && now < end => return Next::Sleep(Some(end)),
            Phase::YieldsUntil(_) | Phase::Takes | Phase::Requests => {}
        }
        first.phase = Phase::Takes;
        let woken_at = first.woken_at;
        if let Some(offered) = self.next_offer() {
            return offered;
        }
        // The next answer already includes every release whose message has arrived.
        let released = self.take_wakeups();
        if let Some(first) = &mut self.first {
            first.phase = Phase::Requests;
            if released && std::mem::take(&mut first.in_vain) {
                self.yielding.used();
            }
        }
        let message = std::mem::take(&mut self.message);
        Next::Send { message, woken_at }
    }

    /// Takes the oldest offer. That of a whole object counts only if that was not released since:
    /// the store then decides which owner holds it.
    fn next_offer(&mut self) -> Option<Next<O>> {
        let Offered { offer, share, .. } = self.offers.pop_front()?;
        let counts = share != Share::Whole || self.is_current();
        Some(match counts {
            true => Next::Take(offer),
            false => Next::Drop(offer),
        })
    }

    /// Returns whether a request of the first waiter is in flight.
    fn has_request_in_flight(&self) -> bool {
        self.first
            .is_some_and(|first| first.phase == Phase::Requests)
    }

    /// Returns since when the latest answer is out of date, if it is: an object was released, or a
    /// request is in flight.
    fn outdated_at(&self) -> Option<Instant> {
        let since = [self.stale_since, self.handoff_since, self.maybe_released_at];
        since.into_iter().flatten().min()
    }

    /// Returns whether the object was not released since the latest answer, and no request is in
    /// flight.
    fn is_current(&self) -> bool {
        self.outdated_at().is_none()
    }

    /// Takes the pending wakeups, and makes answers from before them out of date. Returns whether
    /// there were any.
    fn take_wakeups(&mut self) -> bool {
        self.disconnected = false;
        let released = self.maybe_released_at.take();
        self.stale_since = self.stale_since.or(released);
        released.is_some()
    }
}

impl<W, C> Entry<W, C> {
    /// Returns whether a release of this client may pass the object to the waiter.
    fn is_served(&self) -> bool {
        !matches!(self.served_by, ServedBy::RequestsOnly)
    }

    fn must_register(&self, now: Instant) -> bool {
        self.registration == Registration::Due && self.joined + REGISTERED_AFTER <= now
    }
}

#[cfg(test)]
mod exploration;
#[cfg(test)]
mod tests;
