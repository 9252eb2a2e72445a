//! The waiters of this client for one object: who asks the store, who is woken, and who takes what passes on in the client.
//! [`Queues`] decides. It has no lock, no waker and no clock: `waiter` has them, and does what it says.
//!
//! 1. The waiters of a queue stand in the order in which they joined. Only the *first* asks the store. It has the turn until
//!    it leaves.
//! 2. What the store has answered counts for the whole queue, until the object may have been released, or a request is in
//!    flight.
//! 3. The first waiter asks again when a message arrives, or one may have been missed, and when the remaining lease has
//!    passed. When it acquires the object, the next one asks nothing before that lease has ended.
//! 4. A release of this client offers the object, or permits, to the first waiter, which takes that instead of asking. If all
//!    waiters can be claimed, it claims the first one instead, and has the store put it in its place.
//! 5. Where the object passes on in the client, the next waiter has the turn but sleeps on, because the next offer is for it. If
//!    none is made within 10 ms, it is woken and watches the store itself. So the object passes on with one wakeup.
//!
//! Invariant: a waiter that has the turn asks, sleeps until a time that is known, is woken by each message of the
//! subscription, or will be looked after by [`Queues::tick`]. What must not happen:
//!
//! - *A waiter sleeps on a free object.* Each way to leave passes the turn on.
//! - *A hold is taken that the store may have given to another owner.* An offer of a whole object counts only while the
//!   store's latest answer does.
//! - *Two waiters ask, or take one offer.* Only the waiter that stands first does either.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::client_registry::REGISTERED_AFTER;
use crate::error::Error;
use crate::hold::{Share, Yielding, Yields};
use crate::store::LastContact;

/// Added to times of the store, which truncates them to whole milliseconds. Without it a waiter could be early and have to send
/// its request twice.
pub(super) const ROUNDING: Duration = Duration::from_millis(1);

/// How long an offer waits to be taken, and a waiter that has the turn to be woken.
const OFFERED_FOR: Duration = Duration::from_millis(10);

/// The queues of an object. A waiter that can share the object does not wait behind one that cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueKind {
    Exclusive,
    Shared,
}

/// The queues of one object. `W` wakes a waiter, `O` is an offer, and `C` is what a release must know to acquire the object
/// for a waiter.
#[derive(Debug, Clone)]
pub(super) struct Queues<W, O, C> {
    /// One for each [`QueueKind`].
    queues: [Queue<W, O, C>; 2],
    created: Instant,
    /// Number of the latest waiter.
    latest: u64,
    /// Since when the store cannot be reached, and why.
    outage: Option<(Instant, Error)>,
}

#[derive(Debug, Clone)]
struct Queue<W, O, C> {
    /// The waiters by their numbers.
    places: BTreeMap<u64, Place<W, C>>,
    /// Number of these that take offers of `share`.
    taking_offers: usize,
    /// Number of these that a release can claim.
    claimable: usize,
    /// How much of the object the first of these requests. Waiters that request another share take no offers.
    share: Option<Share>,
    /// The waiter that has the turn, once it knows that.
    first: Option<First>,
    /// What the next waiter relies on, from the one before.
    relies: Option<Relies>,
    /// Since when the foremost waiter sleeps although it has the turn.
    asleep_since: Option<Instant>,
    /// The oldest first: at most one of a whole object, or of permits at most one for each waiter.
    offers: VecDeque<Unclaimed<O>>,
    /// Whether the store has answered a request of the queue.
    answered: bool,
    /// Since when the latest answer is out of date: since the release that the unanswered request follows,
    /// or since that request was sent. The answer still counts for waiters that joined earlier.
    stale_since: Option<Instant>,
    /// Since when the step of a release that has claimed a waiter is in flight.
    transferred_since: Option<Instant>,
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
#[derive(Debug, Clone)]
struct Place<W, C> {
    /// Wakes it. `None` if it does not sleep: whoever wakes a waiter takes this.
    wake: Option<W>,
    /// Boxed: most waiters have none.
    claim: Option<Box<C>>,
    /// When it has joined, in milliseconds since the queues were created, modulo 2^32. (Smaller than an `Instant`.)
    joined_ms: u32,
    takes_offers: bool,
    /// Whether a release may claim it, or has done so.
    is_claimable: bool,
    /// Whether it must be the first when it has the turn, to watch the store.
    watches: bool,
    /// Whether the store could not be reached for it.
    failed: bool,
}

/// What a waiter need not ask: another owner holds the object until then, unless it is released before.
#[derive(Debug, Clone, Copy)]
struct Relies {
    until: Instant,
    /// For requests of this share.
    share: Share,
    /// Whether the object has passed on in the client.
    passes_on: bool,
}

/// The first waiter of a queue.
#[derive(Debug, Clone, Copy)]
struct First {
    number: u64,
    due: Due,
    phase: Phase,
    /// Whether clients that were counted go first before its request.
    yielded: bool,
    /// Whether it asks because the object may have been released, by another client if these went first.
    released: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waits,
    /// Lets other clients go first.
    YieldsUntil(Instant),
    /// Takes offers until there is none.
    Takes,
    Asks,
}

/// When the first waiter asks unless it is woken before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Now,
    At(Instant),
    OnMessage,
}

/// An offer that no waiter has taken.
#[derive(Debug, Clone)]
struct Unclaimed<O> {
    offer: O,
    share: Share,
    since: Instant,
}

/// What a waiter does next.
#[derive(Debug)]
pub(super) enum Next<O> {
    /// It sleeps until it is woken, or until then: see [`Queues::sleeper`]. `registers`: it has waited so long that its wait is
    /// registered.
    Sleep {
        until: Option<Instant>,
        registers: bool,
    },
    /// It is the first now. `relies`: it relies on the answer to the waiter before it.
    BeFirst {
        relies: bool,
    },
    /// It takes this offer, and [leaves](Queues::took), or asks again what to do.
    Take(O),
    /// It drops this offer: the object may have been released since.
    Drop(O),
    /// It accepts this message, if it is not 0, or sends a request.
    Ask {
        message: i64,
    },
    Fail {
        since: Instant,
        error: Error,
    },
}

impl<O> Next<O> {
    fn sleep(until: Option<Instant>) -> Next<O> {
        let registers = false;
        Next::Sleep { until, registers }
    }
}

/// What is left of a waiter. To be dropped without locks.
#[derive(Debug)]
pub(super) struct Left<W, O, C> {
    /// Wakes the next waiter.
    pub(super) wake: Option<W>,
    _place: Option<Place<W, C>>,
    _offers: VecDeque<Unclaimed<O>>,
}

impl<W, O, C> Queues<W, O, C> {
    pub(super) fn new(now: Instant) -> Queues<W, O, C> {
        Queues {
            queues: [Queue::new(), Queue::new()],
            created: now,
            latest: 0,
            outage: None,
        }
    }

    fn queue(&mut self, kind: QueueKind) -> &mut Queue<W, O, C> {
        &mut self.queues[kind as usize]
    }

    fn exclusive(&mut self) -> &mut Queue<W, O, C> {
        self.queue(QueueKind::Exclusive)
    }

    /// Returns whether all waiters for the object are in the exclusive queue, and there are some.
    fn are_exclusive(&self) -> bool {
        let [exclusive, shared] = &self.queues;
        !exclusive.places.is_empty() && shared.places.is_empty()
    }

    /// Returns the number of waiters.
    pub(super) fn waiters(&self) -> usize {
        self.queues.iter().map(|queue| queue.places.len()).sum()
    }

    /// Adds a waiter. `answered`: the store has answered its request. Returns its number.
    pub(super) fn join(&mut self, kind: QueueKind, answered: bool, now: Instant) -> u64 {
        self.latest += 1;
        let (number, joined_ms) = (self.latest, self.age_ms(now) as u32);
        let queue = self.queue(kind);
        queue.answered |= answered;
        let place = Place {
            wake: None,
            claim: None,
            joined_ms,
            takes_offers: false,
            is_claimable: false,
            watches: false,
            failed: false,
        };
        queue.places.insert(number, place);
        number
    }

    fn age_ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.created).as_millis() as u64
    }

    /// Returns when a waiter has joined.
    pub(super) fn joined(&self, kind: QueueKind, number: u64, now: Instant) -> Instant {
        let place = self.queues[kind as usize].places.get(&number);
        let age_ms = self.age_ms(now);
        let waited_ms = place.map_or(0, |place| (age_ms as u32).wrapping_sub(place.joined_ms));
        self.created + Duration::from_millis(age_ms - u64::from(waited_ms))
    }

    /// Records that a waiter takes offers of this share, if those before it do.
    pub(super) fn enable_offers(&mut self, kind: QueueKind, number: u64, share: Share) {
        let queue = self.queue(kind);
        if queue.taking_offers == 0 {
            queue.share = Some(share);
        }
        if queue.share == Some(share)
            && let Some(place) = queue.places.get_mut(&number)
        {
            place.takes_offers = true;
            queue.taking_offers += 1;
        }
    }

    /// Lets a release claim a waiter.
    pub(super) fn enable_claim(&mut self, kind: QueueKind, number: u64, claim: C) {
        let queue = self.queue(kind);
        queue.share.get_or_insert(Share::Whole);
        if let Some(place) = queue.places.get_mut(&number) {
            (place.claim, place.is_claimable) = (Some(Box::new(claim)), true);
            queue.claimable += 1;
        }
    }

    /// Returns where to put what wakes a waiter that sleeps. It is empty again when the waiter was woken.
    pub(super) fn sleeper(&mut self, kind: QueueKind, number: u64) -> Option<&mut Option<W>> {
        let place = self.queue(kind).places.get_mut(&number)?;
        Some(&mut place.wake)
    }

    /// Returns what a waiter does next. `is_subscribed`: whether the channel is subscribed to.
    pub(super) fn next(
        &mut self,
        kind: QueueKind,
        number: u64,
        share: Share,
        now: Instant,
        is_subscribed: bool,
    ) -> Next<O> {
        let age_ms = self.age_ms(now) as u32;
        let queue = &mut self.queues[kind as usize];
        if let Some(place) = queue.places.get_mut(&number)
            && std::mem::take(&mut place.failed)
            && let Some((since, error)) = self.outage.clone()
        {
            return Next::Fail { since, error };
        }
        if queue.foremost() != Some(number) {
            let registers = queue.has_waited_long(number, age_ms);
            return Next::Sleep {
                until: None,
                registers,
            };
        }
        if queue.first.is_some() {
            return queue.next_as_first(now);
        }
        if let Some(offered) = queue.next_offer() {
            return offered;
        }
        if queue.may_sleep(age_ms, now, is_subscribed) {
            queue.asleep_since.get_or_insert(now);
            return Next::sleep(None);
        }
        let relies = queue.become_first(number, share, now, is_subscribed);
        if relies {
            self.answered(kind, Some(LastContact::Answered));
        }
        Next::BeFirst { relies }
    }

    /// Records that the first waiter is about to send a request whose answer counts for the whole queue.
    pub(super) fn request_started(&mut self, kind: QueueKind, now: Instant) {
        self.queue(kind).stale_since.get_or_insert(now);
    }

    /// Records that this request has ended, with its last contact with the store.
    pub(super) fn answered(&mut self, kind: QueueKind, last: Option<LastContact>) {
        let queue = self.queue(kind);
        queue.stale_since = None;
        match last {
            Some(LastContact::Answered) => {
                queue.answered = true;
                self.outage = None;
            }
            Some(LastContact::Failed { since, error }) => self.outage = Some((since, error)),
            None => {}
        }
    }

    /// Records that the store has refused the request of the first waiter, which asks again then.
    pub(super) fn refused(&mut self, kind: QueueKind, due: Due) {
        if let Some(first) = &mut self.queue(kind).first {
            (first.due, first.phase) = (due, Phase::Waits);
        }
    }

    /// Records that the first waiter has acquired the object with a request. `until`: when its lease ends unless it is renewed;
    /// `None`: that excludes no other waiter, or is not known. Returns an offer that is out of date, and whether a message has
    /// arrived meanwhile, mostly of an earlier release: what was acquired is in doubt.
    pub(super) fn acquired(
        &mut self,
        kind: QueueKind,
        share: Share,
        until: Option<Instant>,
    ) -> (Option<O>, bool) {
        let queue = self.queue(kind);
        queue.relies = until.map(|until| Relies::new(until + ROUNDING, share));
        let Some(first) = queue.first.filter(|_| share == Share::Whole) else {
            return (None, false);
        };
        // A client that acquires permits meanwhile releases nothing.
        if first.yielded && !first.released {
            queue.yielding.in_vain();
        }
        // The store granted it, so an earlier holder that offers it has lost it.
        let outdated = queue.offers.pop_front().map(|unclaimed| unclaimed.offer);
        let place = queue.places.get(&first.number);
        let is_served = place.is_some_and(Place::is_served);
        (outdated, is_served && queue.discard_wakeups())
    }

    /// Records that the first waiter has acquired the object as a message said, until then.
    pub(super) fn granted(&mut self, kind: QueueKind, share: Share, until: Instant) {
        self.answered(kind, Some(LastContact::Answered));
        self.queue(kind).relies = Some(Relies::new(until + ROUNDING, share));
    }

    /// Records that the foremost waiter has taken an offer. `until`: when its lease ends unless it is renewed. `None`: the
    /// acquisition excludes no other waiter, so what the store has answered still counts.
    pub(super) fn took(&mut self, kind: QueueKind, share: Share, until: Option<Instant>) {
        let queue = self.queue(kind);
        let until = match until {
            Some(until) => Some(until + ROUNDING),
            None if !queue.is_current() => None,
            None => match queue.first {
                Some(first) => first.due.at(),
                None => queue.relies.map(|relies| relies.until),
            },
        };
        queue.relies = until.map(|until| Relies {
            passes_on: true,
            ..Relies::new(until, share)
        });
    }

    /// Removes a waiter, and passes its turn on.
    pub(super) fn leave(
        &mut self,
        kind: QueueKind,
        number: u64,
        now: Instant,
        is_subscribed: bool,
    ) -> Left<W, O, C> {
        let age_ms = self.age_ms(now) as u32;
        let queue = &mut self.queues[kind as usize];
        let had_turn = queue.foremost() == Some(number);
        let place = queue.places.remove(&number);
        if let Some(place) = &place {
            queue.taking_offers -= usize::from(place.takes_offers);
            queue.claimable -= usize::from(place.claim.is_some());
        }
        let mut left = Left {
            wake: None,
            _place: place,
            _offers: VecDeque::new(),
        };
        if queue.places.is_empty() {
            // Later requests must contact the store themselves.
            let idle = Queue {
                relies: queue.relies,
                transferred_since: queue.transferred_since,
                maybe_released_at: queue.maybe_released_at,
                ..Queue::new()
            };
            left._offers = std::mem::replace(queue, idle).offers;
        } else if had_turn {
            queue.first = None;
            match queue.may_sleep(age_ms, now, is_subscribed) {
                true => queue.asleep_since = Some(now),
                false => left.wake = queue.wake_foremost(),
            }
        }
        if self.waiters() == 0 {
            self.outage = None;
        }
        left
    }

    /// Has all waiters fail that have not had the turn, because the store cannot be reached. Returns what wakes them.
    pub(super) fn fail_all(&mut self) -> Vec<W> {
        let queues = self.queues.iter_mut();
        let waiting = queues.flat_map(Queue::without_turn);
        waiting
            .filter_map(|place| {
                place.failed = true;
                place.wake.take()
            })
            .collect()
    }

    /// Returns what wakes all waiters that have not had the turn, to remind them that they may have waited long. Not in an
    /// outage.
    pub(super) fn remind_all(&mut self) -> Vec<W> {
        if self.outage.is_some() {
            return Vec::new();
        }
        let queues = self.queues.iter_mut();
        let waiting = queues.flat_map(Queue::without_turn);
        waiting.filter_map(|place| place.wake.take()).collect()
    }

    /// Returns whether a release may offer this share to the first waiter: if all waiters take it. Of a whole object, the store's
    /// latest answer must count. Of permits, there must be a waiter for each offer, without the one whose request is in flight:
    /// it may need none.
    pub(super) fn takes_offer(&self, share: Share) -> bool {
        let queue = &self.queues[QueueKind::Exclusive as usize];
        // All others are offers of the same share, or refused soon.
        let (counts, unclaimed) = match share {
            Share::Whole => (queue.is_current(), 0),
            Share::Permits(_) => (true, queue.offers.len()),
        };
        counts
            && queue.places.len() > unclaimed + usize::from(queue.asks())
            && queue.taking_offers == queue.places.len()
            && queue.share == Some(share)
            && self.are_exclusive()
    }

    /// Offers the first waiter something. Returns what wakes it, and the earlier offers of the whole object: their hold is lost,
    /// because the store has granted another one since. To be dropped without locks. [`Queues::tick`] looks after it.
    pub(super) fn offer(&mut self, offer: O, share: Share, now: Instant) -> (Option<W>, Vec<O>) {
        let queue = self.exclusive();
        let outdated = match share {
            Share::Whole => queue.offers.drain(..).map(|one| one.offer).collect(),
            Share::Permits(_) => Vec::new(),
        };
        let since = now;
        queue.offers.push_back(Unclaimed {
            offer,
            share,
            since,
        });
        (queue.wake_foremost(), outdated)
    }

    /// Takes all offers.
    pub(super) fn take_offers(&mut self) -> impl Iterator<Item = O> + use<W, O, C> {
        let offers = std::mem::take(&mut self.exclusive().offers);
        offers.into_iter().map(|unclaimed| unclaimed.offer)
    }

    /// Claims the first waiter, if all waiters can be claimed, and the store's latest answer counts.
    pub(super) fn claim_first(&mut self) -> Option<C> {
        let are_exclusive = self.are_exclusive();
        let queue = self.exclusive();
        if !are_exclusive || !queue.is_current() || queue.claimable != queue.places.len() {
            return None;
        }
        let place = queue.places.values_mut().next()?;
        let claim = place.claim.take()?;
        queue.claimable -= 1;
        Some(*claim)
    }

    /// Records that the step is sent that acquires the object for a claimed waiter.
    pub(super) fn transfer_started(&mut self, now: Instant) {
        self.exclusive().transferred_since = Some(now);
    }

    /// Offers the object that was acquired for a claimed waiter by the step sent then. Returns what to wake and what to drop, as
    /// [`Queues::offer`] does; the offer itself if no waiter is left.
    pub(super) fn transferred(
        &mut self,
        sent_at: Option<Instant>,
        offer: O,
        now: Instant,
    ) -> (Option<W>, Vec<O>) {
        let queue = self.exclusive();
        if queue.places.is_empty() {
            return (None, vec![offer]);
        }
        queue.end_transfer(sent_at);
        queue.answered = true;
        self.offer(offer, Share::Whole, now)
    }

    /// Records that the step has ended in another way: the object may have been released, if it was sent.
    pub(super) fn transfer_ended(&mut self, sent_at: Option<Instant>) {
        let queue = self.exclusive();
        if queue.end_transfer(sent_at) {
            queue.maybe_released_at = queue.maybe_released_at.or(sent_at);
        }
    }

    /// Returns whether the step of a release that has claimed a waiter is in flight.
    pub(super) fn is_transferred(&self) -> bool {
        self.queues[QueueKind::Exclusive as usize]
            .transferred_since
            .is_some()
    }

    /// Lets other clients go first when the exclusive queue asks again after the release that follows.
    pub(super) fn yield_to(&mut self, yields: Yields, random: impl FnOnce() -> f64) {
        let queue = self.exclusive();
        if !queue.places.is_empty() {
            let of_permits = matches!(queue.share, Some(Share::Permits(_)));
            queue.yielding.released(yields, of_permits, random);
        }
    }

    /// Returns whether other clients waited lately.
    pub(super) fn is_crowded(&self) -> bool {
        self.queues[QueueKind::Exclusive as usize]
            .yielding
            .is_crowded()
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
            // The release of a write lock publishes another message, too, for waiters in Java. That of permits publishes
            // their number.
            if message == 0 || queue.share != Some(Share::Whole) {
                queue.yielding.message();
            }
            queue.wake_foremost()
        })
    }

    /// Records that the connection broke. Returns what wakes the first waiters.
    pub(super) fn disconnected(&mut self, now: Instant) -> [Option<W>; 2] {
        self.queues
            .iter_mut()
            .for_each(|queue| queue.disconnected = true);
        self.message(0, now)
    }

    /// Returns the last contact of a queue with the store, for a waiter that has waited since then. If a request was refused,
    /// the store has answered that another owner holds the object. That counts for every waiter, unless a request has been
    /// without an answer ever since, or the object was released before and no request was sent after that. There is no contact
    /// if all waiters have left.
    pub(super) fn contact_since(&self, kind: QueueKind, since: Instant) -> Option<LastContact> {
        if let Some((since, error)) = self.outage.clone() {
            return Some(LastContact::Failed { since, error });
        }
        let queue = &self.queues[kind as usize];
        let is_outdated = queue.outdated_at().is_some_and(|at| at <= since);
        (!is_outdated && queue.answered).then_some(LastContact::Answered)
    }

    /// Returns when [`Queues::tick`] has to be called.
    pub(super) fn next_tick(&self) -> Option<Instant> {
        let queue = &self.queues[QueueKind::Exclusive as usize];
        let oldest = queue.offers.front().map(|one| one.since + OFFERED_FOR);
        oldest.into_iter().chain(queue.asleep_until()).min()
    }

    /// Returns what wakes a waiter that has the turn and has slept so long, and the offers that were not taken in time. To be
    /// dropped without locks.
    pub(super) fn tick(&mut self, now: Instant) -> (Option<W>, Vec<O>) {
        let queue = self.exclusive();
        let is_expired = |one: &Unclaimed<O>| one.since + OFFERED_FOR <= now;
        let expired = queue.offers.partition_point(is_expired);
        let expired = queue.offers.drain(..expired).map(|one| one.offer).collect();
        let is_due = queue.asleep_until().is_some_and(|until| until <= now);
        (is_due.then(|| queue.watch()).flatten(), expired)
    }

    /// Returns what wakes a waiter that sleeps although it has the turn, so that it watches the store.
    pub(super) fn watch(&mut self) -> Option<W> {
        self.exclusive().watch()
    }
}

impl<W, O, C> Queue<W, O, C> {
    fn new() -> Queue<W, O, C> {
        Queue {
            places: BTreeMap::new(),
            taking_offers: 0,
            claimable: 0,
            share: None,
            first: None,
            relies: None,
            asleep_since: None,
            offers: VecDeque::new(),
            answered: false,
            stale_since: None,
            transferred_since: None,
            maybe_released_at: None,
            disconnected: false,
            message: 0,
            yielding: Yielding::default(),
        }
    }

    fn foremost(&self) -> Option<u64> {
        self.places.first_key_value().map(|(number, _)| *number)
    }

    fn wake_foremost(&mut self) -> Option<W> {
        self.asleep_since = None;
        self.places.first_entry()?.get_mut().wake.take()
    }

    /// Returns the waiters that do not know that they have the turn.
    fn without_turn(&mut self) -> impl Iterator<Item = &mut Place<W, C>> {
        let first = self.first.map(|first| first.number);
        let others = self.places.iter_mut();
        others
            .filter(move |(number, _)| Some(**number) != first)
            .map(|(_, place)| place)
    }

    /// Returns whether the wait of a waiter is to be registered.
    fn has_waited_long(&self, number: u64, age_ms: u32) -> bool {
        let place = self.places.get(&number);
        let waited_ms = place.map_or(0, |place| age_ms.wrapping_sub(place.joined_ms));
        u128::from(waited_ms) >= REGISTERED_AFTER.as_millis()
    }

    fn watch(&mut self) -> Option<W> {
        if let Some(mut place) = self.places.first_entry() {
            place.get_mut().watches = true;
        }
        self.wake_foremost()
    }

    /// Returns whether the foremost waiter may sleep although it has the turn: the object has passed on in the client, and will
    /// do so again, or a message wakes the waiter.
    fn may_sleep(&self, age_ms: u32, now: Instant, is_subscribed: bool) -> bool {
        let Some((number, place)) = self.places.first_key_value() else {
            return false;
        };
        let passes_on = |relies: Relies| {
            relies.passes_on && now < relies.until && self.share == Some(relies.share)
        };
        self.relies.is_some_and(passes_on)
            && is_subscribed
            && place.is_served()
            && !place.watches
            // The first one registers its wait then, and reminds the others.
            && !self.has_waited_long(*number, age_ms)
            && self.maybe_released_at.is_none()
            && self.offers.is_empty()
    }

    /// Returns until when the foremost waiter sleeps although it has the turn.
    fn asleep_until(&self) -> Option<Instant> {
        let until = self.asleep_since? + OFFERED_FOR;
        Some(self.relies.map_or(until, |relies| until.min(relies.until)))
    }

    /// Makes a waiter the first. Returns whether it relies on the answer to the one before.
    fn become_first(
        &mut self,
        number: u64,
        share: Share,
        now: Instant,
        is_subscribed: bool,
    ) -> bool {
        self.asleep_since = None;
        let relies = self.relies.take();
        let relies = relies.filter(|relies| relies.share == share && now < relies.until);
        let due = match relies {
            // No release has arrived since, so another owner still holds the object.
            Some(relies) if is_subscribed && !self.take_wakeups() => Due::At(relies.until),
            _ => Due::Now,
        };
        self.first = Some(First {
            number,
            due,
            phase: Phase::Waits,
            yielded: false,
            released: false,
        });
        due != Due::Now
    }

    fn next_as_first(&mut self, now: Instant) -> Next<O> {
        let has_offer = !self.offers.is_empty();
        let is_woken = has_offer || self.maybe_released_at.is_some();
        let Some(first) = &mut self.first else {
            return Next::sleep(None);
        };
        match first.phase {
            Phase::Waits if !is_woken && !first.due.has_come(now) => {
                return Next::sleep(first.due.at());
            }
            Phase::Waits => {
                first.yielded = false;
                if !has_offer && let Some((end, are_counted)) = self.yielding.until(now) {
                    first.phase = Phase::YieldsUntil(end);
                    first.yielded = are_counted;
                    // Wakeups from now on are of others.
                    self.take_wakeups();
                    return Next::sleep(Some(end));
                }
            }
            Phase::YieldsUntil(end) if !has_offer && now < end => return Next::sleep(Some(end)),
            Phase::YieldsUntil(_) | Phase::Takes | Phase::Asks => {}
        }
        first.phase = Phase::Takes;
        if let Some(offered) = self.next_offer() {
            return offered;
        }
        // The next answer already includes every release whose message has arrived.
        let released = self.take_wakeups();
        if let Some(first) = &mut self.first {
            (first.phase, first.released) = (Phase::Asks, released);
        }
        let message = std::mem::take(&mut self.message);
        Next::Ask { message }
    }

    /// Takes the oldest offer. That of a whole object counts only if that was not released since: the store then decides which
    /// owner holds it.
    fn next_offer(&mut self) -> Option<Next<O>> {
        let Unclaimed { offer, share, .. } = self.offers.pop_front()?;
        let counts = share != Share::Whole || self.is_current();
        Some(match counts {
            true => Next::Take(offer),
            false => Next::Drop(offer),
        })
    }

    /// Returns whether a request of the first waiter is in flight.
    fn asks(&self) -> bool {
        self.first.is_some_and(|first| first.phase == Phase::Asks)
    }

    /// Records that the transfer that was sent then has ended. Returns false if another one was sent, or none.
    fn end_transfer(&mut self, sent_at: Option<Instant>) -> bool {
        let ended = self
            .transferred_since
            .take_if(|since| Some(*since) == sent_at);
        ended.is_some()
    }

    /// Returns since when the latest answer is out of date, if it is: an object was released, or a request is in flight.
    fn outdated_at(&self) -> Option<Instant> {
        let since = [
            self.stale_since,
            self.transferred_since,
            self.maybe_released_at,
        ];
        since.into_iter().flatten().min()
    }

    /// Returns whether the object was not released since the latest answer, and no request is in flight.
    fn is_current(&self) -> bool {
        self.outdated_at().is_none()
    }

    /// Takes the pending wakeups, and makes answers from before them out of date. Returns whether there were any.
    fn take_wakeups(&mut self) -> bool {
        self.disconnected = false;
        let released = self.maybe_released_at.take();
        self.stale_since = self.stale_since.or(released);
        released.is_some()
    }

    /// Discards the pending wakeups, if the object was acquired after them. Returns whether there were any. If the connection
    /// broke, they are kept: only a request of the next waiter makes sure that there is one again, and that no message was
    /// missed.
    fn discard_wakeups(&mut self) -> bool {
        !self.disconnected && self.maybe_released_at.take().is_some()
    }
}

impl<W, C> Place<W, C> {
    /// Returns whether a release of this client may pass the object to the waiter.
    fn is_served(&self) -> bool {
        self.takes_offers || self.is_claimable
    }
}

impl Relies {
    fn new(until: Instant, share: Share) -> Relies {
        Relies {
            until,
            share,
            passes_on: false,
        }
    }
}

impl Due {
    fn has_come(self, now: Instant) -> bool {
        match self {
            Due::Now => true,
            Due::At(at) => at <= now,
            Due::OnMessage => false,
        }
    }

    fn at(self) -> Option<Instant> {
        match self {
            Due::At(at) => Some(at),
            Due::Now | Due::OnMessage => None,
        }
    }
}

#[cfg(test)]
mod tests;
