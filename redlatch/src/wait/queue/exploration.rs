//! All orders in which three callers of one client join, ask, are answered, get what passes on,
//! release and leave, while another client takes part, messages are late, and the connection
//! breaks.
//!
//! Left out: times for which other clients go first, which delay a request and decide nothing else,
//! and shared waiters, except that they stand in the way. A caller whose wait is long differs only
//! in that it registers.

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use super::*;
use crate::hold::QueueKind;
use crate::step::exploration::events::{Event, Events, explore};

use QueueKind::{Exclusive, Shared};

/// Maximum number of states of each kind of callers, unless `REDLATCH_STATES` is set.
const MAX_STATES: u64 = 10_000;

/// What the store says how long a holder still has the object. Everyone renews it.
const LEASE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Caller {
    Absent,
    Waits {
        number: u64,
        is_first: bool,
        mode: Mode,
    },
    /// `lost`: the store has lost its hold, which it does not know.
    Holds {
        lost: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Mode {
    Awake,
    Asleep(Option<Instant>),
    Sends {
        subscribes: bool,
        confirms: bool,
        stage: Stage,
    },
}

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    /// `granted`: it was executed before, and the answer was lost.
    Sent {
        granted: bool,
    },
    Granted {
        lost: bool,
    },
    Refused,
}

/// A hold that is passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Offered {
    /// The waiter that was claimed.
    to: Option<u64>,
    lost: bool,
    /// Whether the message of the loss has arrived.
    is_known_lost: bool,
}

/// The step that acquires the object for a claimed waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Transfer {
    to: u64,
    sent_at: Instant,
    /// Whether the store has executed it, and transferred the object.
    executed: Option<bool>,
    lost: bool,
}

/// How releases of the client serve the callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Offers,
    Claims,
    /// The third takes none.
    Mixed,
    /// The third shares the object.
    Shared,
    /// The object is a semaphore of two permits.
    Permits,
}

#[derive(Debug, Clone)]
struct State {
    kind: Kind,
    queues: Queues<usize, Offered, u64>,
    now: Instant,
    callers: [Caller; 3],
    /// How often the object can be acquired in the store, and how often this client has it.
    free: u8,
    ours: u8,
    /// How many releases of our holds are in flight, and whether a request is whose caller has
    /// left.
    releases: u8,
    has_stray: bool,
    transfer: Option<Transfer>,
    /// Messages on the way.
    messages: u8,
    is_connected: bool,
    /// Whether the server has a subscription of the client.
    is_subscribed: bool,
    /// Whether the client has asked for one, and knows that it has.
    subscribes: bool,
    is_confirmed: bool,
    /// Whether the object became free without a message since the store executed a request.
    silent: bool,
}

impl Kind {
    /// Returns how often the object can be acquired.
    fn total(self) -> u8 {
        match self {
            Kind::Permits => 2,
            _ => 1,
        }
    }

    fn share(self) -> Share {
        match self {
            Kind::Permits => Share::Permits(1),
            _ => Share::Whole,
        }
    }
}

impl State {
    fn first(kind: Kind) -> State {
        State {
            kind,
            queues: Queues::new(),
            now: Instant::now(),
            callers: [Caller::Absent; 3],
            free: kind.total(),
            ours: 0,
            releases: 0,
            has_stray: false,
            transfer: None,
            messages: 0,
            is_connected: true,
            is_subscribed: false,
            subscribes: false,
            is_confirmed: false,
            silent: false,
        }
    }

    /// Returns whether this caller is one that takes no offers.
    fn takes_none(&self, caller: usize) -> bool {
        caller == 2 && matches!(self.kind, Kind::Mixed | Kind::Shared)
    }

    fn queue_of(&self, caller: usize) -> QueueKind {
        match self.kind {
            Kind::Shared if caller == 2 => Shared,
            _ => Exclusive,
        }
    }

    /// Returns the events that are possible, those first that end something.
    fn ending_events(&self) -> Vec<Event> {
        let mut all = Vec::new();
        let mut add = |name, possible: bool| {
            if possible {
                all.push((name, 0));
            }
        };
        add("release is executed", self.releases > 0);
        let executed = self.transfer.map(|transfer| transfer.executed);
        add("transfer is executed", executed == Some(None));
        add("transfer is answered", executed.flatten().is_some());
        add("stray is executed", self.has_stray);
        add("message arrives", self.messages > 0);
        let expiry = self.queues.queues[0].next_expiry();
        add("offer expires", expiry.is_some_and(|at| at <= self.now));
        for (caller, at) in self.callers.iter().enumerate() {
            let mut add = |name, possible: bool| {
                if possible {
                    all.push((name, caller));
                }
            };
            add("polls", self.is_awake(*at));
            if let Caller::Waits {
                mode: Mode::Sends { stage, .. },
                ..
            } = at
            {
                let is_sent = matches!(stage, Stage::Sent { .. });
                add("request is executed", is_sent);
                add("request is answered", !is_sent);
            }
        }
        all
    }

    /// Returns whether a caller asks what to do next.
    fn is_awake(&self, caller: Caller) -> bool {
        let Caller::Waits { number, mode, .. } = caller else {
            return false;
        };
        let mut queues = self.queues.queues.iter();
        let place = queues.find_map(|queue| queue.places.get(&number));
        let is_woken = place.is_some_and(|place| place.wake.is_none());
        match mode {
            Mode::Awake => true,
            Mode::Asleep(until) => is_woken || until.is_some_and(|until| until <= self.now),
            Mode::Sends { .. } => false,
        }
    }

    /// Returns the other events that are possible.
    fn more_events(&self) -> Vec<Event> {
        let mut all = Vec::new();
        let mut add = |name, caller, possible: bool| {
            if possible {
                all.push((name, caller));
            }
        };
        let queue = &self.queues.queues[0];
        add("time passes", 0, self.next_time().is_some());
        let has_connection = self.is_connected && self.subscribes;
        add("breaks", 0, has_connection);
        add("breaks behind answers", 0, has_connection);
        add("subscription ends", 0, self.is_subscribed);
        add("another acquires", 0, self.free > 0);
        let another_holds = self.free + self.ours < self.kind.total();
        add("another releases", 0, another_holds);
        add("another dies", 0, another_holds);
        let can_be_lost = self.ours > 0 && self.kind != Kind::Permits;
        add("hold is lost", 0, can_be_lost);
        for (caller, at) in self.callers.iter().enumerate() {
            match *at {
                Caller::Absent => {
                    add("joins", caller, true);
                    add("asks", caller, self.queues.is_empty());
                }
                Caller::Waits { mode, .. } => {
                    let sends = matches!(mode, Mode::Sends { .. });
                    add("leaves", caller, !self.has_stray || !sends);
                    add("fails", caller, sends && !self.has_stray);
                    let has_offer = !queue.offers.is_empty();
                    add("refuses offer", caller, has_offer && self.is_awake(*at));
                }
                Caller::Holds { lost } => {
                    add("releases", caller, true);
                    let passes_on = !lost && self.transfer.is_none();
                    add("hands over", caller, passes_on && self.kind != Kind::Claims);
                    add("claims", caller, passes_on && self.kind == Kind::Claims);
                }
            }
        }
        all
    }

    /// Returns the next time at which something is due.
    fn next_time(&self) -> Option<Instant> {
        let timers = self.callers.iter().filter_map(|caller| match caller {
            Caller::Waits {
                mode: Mode::Asleep(until),
                ..
            } => *until,
            _ => None,
        });
        let all = timers.chain(self.queues.queues[0].next_expiry());
        all.filter(|at| *at > self.now).min()
    }

    fn happen(&mut self, name: &'static str, caller: usize) -> Result<(), &'static str> {
        match name {
            "release is executed" => {
                (self.releases, self.ours) = (self.releases - 1, self.ours - 1);
                self.becomes_free(true);
            }
            "transfer is executed" => {
                let transfer = self.transfer.as_mut().expect("a transfer");
                transfer.executed = Some(!transfer.lost);
            }
            "transfer is answered" => self.transfer_answered(),
            "stray is executed" => {
                self.has_stray = false;
                if self.acquires() {
                    self.releases += 1;
                }
            }
            "message arrives" => {
                self.messages -= 1;
                for one in &mut self.queues.exclusive().offers {
                    one.offer.is_known_lost = one.offer.lost;
                }
                self.queues.message(0, self.now);
            }
            "offer expires" => {
                let expired = self.queues.exclusive().expired_offers(self.now);
                expired
                    .into_iter()
                    .for_each(|offer| self.release(offer.lost));
            }
            "polls" => self.poll(caller, true)?,
            "refuses offer" => self.poll(caller, false)?,
            "request is executed" => self.execute(caller),
            "request is answered" => self.answer(caller),
            "time passes" => self.now = self.next_time().expect("a time"),
            "subscription ends" => {
                (self.is_subscribed, self.is_confirmed) = (false, false);
                self.messages = 0;
                // An answer from before an end confirms nothing.
                for caller in &mut self.callers {
                    if let Caller::Waits {
                        mode: Mode::Sends { confirms, .. },
                        ..
                    } = caller
                    {
                        *confirms = false;
                    }
                }
                self.queues.message(0, self.now);
            }
            "breaks" | "breaks behind answers" => {
                (self.is_connected, self.is_subscribed, self.messages) = (false, false, 0);
                for caller in &mut self.callers {
                    if let Caller::Waits {
                        mode: Mode::Sends { stage, .. },
                        ..
                    } = caller
                        && name == "breaks"
                    {
                        let granted = match stage {
                            Stage::Sent { granted } => *granted,
                            Stage::Granted { lost } => !*lost,
                            Stage::Refused => false,
                        };
                        *stage = Stage::Sent { granted };
                    }
                }
                self.queues.disconnected(self.now);
                // Nobody knows whether it was executed.
                if let Some(transfer) = self.transfer.take() {
                    self.queues
                        .exclusive()
                        .handoff_ended(Some(transfer.sent_at));
                    self.release(transfer.lost);
                }
            }
            "another acquires" => self.free -= 1,
            "another releases" => self.becomes_free(true),
            "another dies" => self.becomes_free(false),
            "hold is lost" => {
                self.lose();
                self.becomes_free(true);
            }
            "joins" => self.join(caller),
            "asks" if self.acquires() => self.callers[caller] = Caller::Holds { lost: false },
            "asks" => {
                self.join(caller);
                let kind = self.queue_of(caller);
                self.queues.queue(kind).record_answer();
            }
            "leaves" => self.leaves(caller),
            "fails" => {
                let (since, error) = (self.now, Error::ResponseTimeout { after: LEASE });
                let failed = LastContact::Failed { since, error };
                self.queues.answered(self.queue_of(caller), Some(failed));
                self.queues.fail_all();
                self.leaves(caller);
            }
            "releases" => {
                let held = std::mem::replace(&mut self.callers[caller], Caller::Absent);
                self.release(held == Caller::Holds { lost: true });
            }
            "hands over" => {
                if self.queues.takes_offer(self.kind.share()) {
                    let third = self.callers[2];
                    if self.takes_none(2) && matches!(third, Caller::Waits { .. }) {
                        return Err("it passes by a waiter that takes none");
                    }
                    self.callers[caller] = Caller::Absent;
                    self.offer(None, false);
                }
            }
            "claims" => {
                if let Some(to) = self.queues.claim_first() {
                    self.callers[caller] = Caller::Absent;
                    let sent_at = self.now;
                    self.queues.exclusive().handoff_started(sent_at);
                    self.transfer = Some(Transfer {
                        to,
                        sent_at,
                        executed: None,
                        lost: false,
                    });
                }
            }
            _ => unreachable!("{name}"),
        }
        Ok(())
    }

    /// The object becomes free in the store.
    fn becomes_free(&mut self, publishes: bool) {
        self.free += 1;
        if publishes && self.is_connected && self.is_subscribed {
            self.messages = 2.min(self.messages + 1);
        }
        // Without a connection, the client asks.
        self.silent |= !publishes;
    }

    /// Returns whether the store grants the object to this client.
    fn acquires(&mut self) -> bool {
        let grants = self.free > 0;
        self.free -= u8::from(grants);
        self.ours += u8::from(grants);
        grants
    }

    /// The store loses our hold.
    fn lose(&mut self) {
        (self.ours, self.releases) = (0, 0);
        for caller in &mut self.callers {
            match caller {
                Caller::Holds { lost } => *lost = true,
                Caller::Waits {
                    mode: Mode::Sends { stage, .. },
                    ..
                } => match stage {
                    Stage::Sent { granted } => *granted = false,
                    Stage::Granted { lost } => *lost = true,
                    Stage::Refused => {}
                },
                _ => {}
            }
        }
        for one in &mut self.queues.exclusive().offers {
            one.offer.lost = true;
        }
        if let Some(transfer) = &mut self.transfer {
            transfer.lost = true;
        }
    }

    /// The client releases a hold. A release that finds none wakes the waiters itself.
    fn release(&mut self, lost: bool) {
        self.queues.released(self.now);
        match lost {
            true => drop(self.queues.message(0, self.now)),
            false => self.releases += 1,
        }
    }

    fn offer(&mut self, to: Option<u64>, lost: bool) {
        let is_known_lost = false;
        let offer = Offered {
            to,
            lost,
            is_known_lost,
        };
        let (_, outdated) = self
            .queues
            .exclusive()
            .offer(offer, self.kind.share(), self.now);
        outdated
            .into_iter()
            .for_each(|offer| self.release(offer.lost));
    }

    fn transfer_answered(&mut self) {
        let transfer = self.transfer.take().expect("a transfer");
        let Transfer {
            to,
            sent_at,
            executed,
            lost,
        } = transfer;
        if executed == Some(true) {
            let is_known_lost = false;
            let offer = Offered {
                to: Some(to),
                lost,
                is_known_lost,
            };
            let queue = self.queues.exclusive();
            let (_, dropped) = queue.handed_off(Some(sent_at), offer, self.now);
            dropped
                .into_iter()
                .for_each(|offer| self.release(offer.lost));
        } else {
            self.queues.exclusive().handoff_ended(Some(sent_at));
            self.release(lost);
        }
    }

    fn join(&mut self, caller: usize) {
        let kind = self.queue_of(caller);
        let number = self.queues.latest + 1;
        let served_by = match self.kind {
            Kind::Claims => ServedBy::Claim(Box::new(number)),
            _ if self.takes_none(caller) => ServedBy::RequestsOnly,
            _ => ServedBy::Offers,
        };
        self.queues
            .join(kind, self.kind.share(), served_by, self.now);
        let mode = Mode::Awake;
        let is_first = false;
        self.callers[caller] = Caller::Waits {
            number,
            is_first,
            mode,
        };
    }

    /// A caller gives up.
    fn leaves(&mut self, caller: usize) {
        if let Caller::Waits {
            mode: Mode::Sends { stage, .. },
            ..
        } = self.callers[caller]
        {
            match stage {
                Stage::Sent { granted: false } => self.has_stray = true,
                Stage::Sent { .. } => self.release(false),
                Stage::Granted { lost } => self.release(lost),
                Stage::Refused => {}
            }
        }
        self.leave(caller, Caller::Absent);
    }

    fn leave(&mut self, caller: usize, next: Caller) {
        let Caller::Waits { number, .. } = self.callers[caller] else {
            unreachable!("it waits");
        };
        self.callers[caller] = next;
        let kind = self.queue_of(caller);
        let left = self.queues.leave(kind, number);
        for one in left._offers {
            self.release(one.offer.lost);
        }
    }

    /// Returns until when an acquisition excludes the other callers. A permit excludes none.
    fn excludes_until(&self) -> Option<Instant> {
        (self.kind != Kind::Permits).then_some(self.now + LEASE)
    }

    /// A caller asks what to do next.
    fn poll(&mut self, caller: usize, accepts: bool) -> Result<(), &'static str> {
        let Caller::Waits {
            number, is_first, ..
        } = self.callers[caller]
        else {
            return Err("an absent caller is polled");
        };
        match is_first {
            true => self.poll_first(caller, number, accepts),
            false => self.poll_turn(caller, number),
        }
    }

    fn poll_turn(&mut self, caller: usize, number: u64) -> Result<(), &'static str> {
        let kind = self.queue_of(caller);
        let is_released = self.queues.queue(kind).maybe_released_at.is_some();
        let turn = self.queues.turn(kind, number, self.now, self.is_confirmed);
        let (is_first, mode) = match turn {
            Turn::Sleep => (false, Mode::Asleep(None)),
            Turn::Register => {
                self.queues.queue(kind).registered(number, true);
                (false, Mode::Awake)
            }
            Turn::First { relies: true } if is_released => {
                return Err("it relies on an answer from before a release");
            }
            Turn::First { .. } => (true, Mode::Awake),
            Turn::Fail { .. } => {
                self.leave(caller, Caller::Absent);
                return Ok(());
            }
        };
        self.goes_on(caller, number, is_first, mode);
        Ok(())
    }

    fn goes_on(&mut self, caller: usize, number: u64, is_first: bool, mode: Mode) {
        let wake = matches!(mode, Mode::Asleep(_)).then_some(caller);
        let kind = self.queue_of(caller);
        let sleeper = self.queues.queue(kind).sleeper(number);
        *sleeper.expect("a waiter") = wake;
        self.callers[caller] = Caller::Waits {
            number,
            is_first,
            mode,
        };
    }

    fn poll_first(
        &mut self,
        caller: usize,
        number: u64,
        accepts: bool,
    ) -> Result<(), &'static str> {
        let kind = self.queue_of(caller);
        let mode = match self.queues.queue(kind).next(self.now) {
            Next::Sleep(until) => Mode::Asleep(until),
            Next::Take(offer) if offer.is_known_lost => {
                return Err("it takes a hold whose loss was reported");
            }
            Next::Take(offer) if accepts && offer.to.is_none_or(|to| to == number) => {
                let until = self.excludes_until();
                self.queues.queue(kind).took(until);
                self.leave(caller, Caller::Holds { lost: offer.lost });
                return Ok(());
            }
            Next::Take(offer) | Next::Drop(offer) => {
                self.release(offer.lost);
                Mode::Awake
            }
            Next::Send { .. } => {
                self.queues.queue(kind).request_started(self.now);
                let subscribes = !self.is_confirmed;
                self.subscribes = true;
                let stage = Stage::Sent { granted: false };
                let confirms = subscribes;
                Mode::Sends {
                    subscribes,
                    confirms,
                    stage,
                }
            }
        };
        self.goes_on(caller, number, true, mode);
        Ok(())
    }

    /// The store executes a request. The first one after a broken connection has it restored, with
    /// the subscription.
    fn execute(&mut self, caller: usize) {
        let Caller::Waits {
            number,
            is_first,
            mode:
                Mode::Sends {
                    subscribes,
                    confirms,
                    stage,
                },
        } = self.callers[caller]
        else {
            unreachable!("it sends");
        };
        self.is_subscribed |= subscribes || !self.is_connected && self.subscribes;
        (self.is_connected, self.silent) = (true, false);
        let stage = match stage == (Stage::Sent { granted: true }) || self.acquires() {
            true => Stage::Granted { lost: false },
            false => Stage::Refused,
        };
        let mode = Mode::Sends {
            subscribes,
            confirms,
            stage,
        };
        self.callers[caller] = Caller::Waits {
            number,
            is_first,
            mode,
        };
    }

    fn answer(&mut self, caller: usize) {
        let kind = self.queue_of(caller);
        let Caller::Waits {
            number,
            is_first,
            mode: Mode::Sends {
                confirms, stage, ..
            },
        } = self.callers[caller]
        else {
            unreachable!("it sends");
        };
        self.is_confirmed |= confirms;
        self.queues.answered(kind, Some(LastContact::Answered));
        if let Stage::Granted { lost } = stage {
            let until = self.excludes_until();
            let (outdated, is_in_doubt) = self.queues.queue(kind).acquired(until);
            self.leave(caller, Caller::Holds { lost });
            if let Some(offer) = outdated {
                self.release(offer.lost);
            }
            // It is checked, and the waiters are woken.
            if is_in_doubt && lost {
                self.callers[caller] = Caller::Absent;
                self.queues.message(0, self.now);
            }
        } else {
            self.queues
                .queue(kind)
                .refused(Some(self.now + LEASE + ROUNDING));
            let mode = Mode::Awake;
            self.callers[caller] = Caller::Waits {
                number,
                is_first,
                mode,
            };
        }
    }

    fn check_now(&self) -> Result<(), &'static str> {
        let guards = self.callers.iter().filter(|caller| match caller {
            Caller::Holds { lost } => !lost,
            Caller::Waits {
                mode: Mode::Sends { stage, .. },
                ..
            } => matches!(
                stage,
                Stage::Granted { lost: false } | Stage::Sent { granted: true }
            ),
            _ => false,
        });
        let offers = self.queues.queues[0].offers.iter();
        let offers = offers.filter(|one| !one.offer.lost).count();
        let transfers = self
            .transfer
            .iter()
            .filter(|transfer| !transfer.lost)
            .count();
        let references = guards.count() + offers + transfers + usize::from(self.releases);
        match references.cmp(&usize::from(self.ours)) {
            Ordering::Less => return Err("no release will follow"),
            Ordering::Greater => return Err("more have the object than the store knows"),
            Ordering::Equal => {}
        }
        let firsts = |kind| {
            let callers = self.callers.iter().enumerate();
            let of_queue = callers.filter(|(caller, _)| self.queue_of(*caller) == kind);
            of_queue
                .filter(|(_, at)| matches!(at, Caller::Waits { is_first: true, .. }))
                .count()
        };
        if firsts(Exclusive) > 1 || firsts(Shared) > 1 {
            return Err("two are the first");
        }
        if self.queues.queues[0].has_handoff_in_flight() != self.transfer.is_some() {
            return Err("a transfer is not ended");
        }
        for queue in &self.queues.queues {
            let is_empty = queue.places.is_empty();
            let grows = queue.first.is_some()
                || !queue.offers.is_empty()
                || queue.claimable + queue.taking_offers > 0;
            if is_empty && grows {
                return Err("something is left without waiters");
            }
        }
        Ok(())
    }

    /// Lets everything end that has begun, without the passing of a lease. Then no waiter sleeps on
    /// a free object.
    fn check_end(mut self) -> Result<(), &'static str> {
        for _ in 0..1000 {
            let event = self.ending_events().into_iter().next();
            let expiry = self.queues.queues[0].next_expiry();
            match (event, expiry) {
                (Some((name, caller)), _) => self.happen(name, caller)?,
                (None, Some(at)) => self.now = at,
                (None, None) => break,
            }
            self.check_now()?;
        }
        if !self.ending_events().is_empty() {
            return Err("it does not end");
        }
        let waits = |caller: &&Caller| matches!(caller, Caller::Waits { .. });
        if self.free == 0 || !self.callers.iter().any(|caller| waits(&caller)) {
            return Ok(());
        }
        match (self.silent, self.next_time()) {
            (true, Some(_)) => Ok(()),
            (true, None) => Err("a waiter sleeps for ever"),
            (false, _) => Err("a waiter sleeps on a free object"),
        }
    }
}

impl Events for State {
    fn next(&self) -> Vec<(Event, Result<State, &'static str>)> {
        let all = self.ending_events().into_iter().chain(self.more_events());
        all.map(|(name, caller)| {
            let mut next = self.clone();
            let happened = next.happen(name, caller);
            ((name, caller), happened.map(|()| next))
        })
        .collect()
    }

    fn check(&self) -> Result<(), &'static str> {
        self.check_now()?;
        self.clone().check_end()
    }

    /// All times are relative to now, and the numbers of callers count in order.
    fn hash(&self, hasher: &mut impl Hasher) {
        let relative = |at: Instant| at.saturating_duration_since(self.now);
        let age = |at: Instant| self.now.saturating_duration_since(at).min(LEASE);
        let rank = |number: u64| {
            let places = self
                .queues
                .queues
                .iter()
                .flat_map(|queue| queue.places.keys());
            places.filter(|other| **other < number).count()
        };
        for caller in &self.callers {
            match *caller {
                Caller::Waits {
                    number,
                    is_first,
                    mode,
                } => {
                    (rank(number), is_first).hash(hasher);
                    match mode {
                        Mode::Asleep(until) => until.map(relative).hash(hasher),
                        mode => mode.hash(hasher),
                    }
                }
                caller => caller.hash(hasher),
            }
        }
        for queue in &self.queues.queues {
            for place in queue.places.values() {
                let served_by = std::mem::discriminant(&place.served_by);
                let must_register = place.must_register(self.now);
                let registered = place.registration == Registration::Done;
                let flags = (place.failed, must_register, registered);
                (place.wake, served_by, flags).hash(hasher);
            }
            queue.first.is_some().hash(hasher);
            if let Some(First { due, phase, .. }) = queue.first {
                (due.map(relative), std::mem::discriminant(&phase)).hash(hasher);
            }
            let relies = queue.relies.map(|relies| relative(relies.until));
            relies.hash(hasher);
            for one in &queue.offers {
                let to = one.offer.to.map(rank);
                let lost = (one.offer.lost, one.offer.is_known_lost);
                (to, lost, age(one.since)).hash(hasher);
            }
            let since = [
                queue.stale_since,
                queue.handoff_since,
                queue.maybe_released_at,
            ];
            since.map(|since| since.is_some()).hash(hasher);
            (queue.answered, queue.disconnected).hash(hasher);
        }
        let transfer = self
            .transfer
            .map(|transfer| (rank(transfer.to), transfer.executed, transfer.lost));
        let flags = [
            self.queues.outage.is_some(),
            self.has_stray,
            self.is_connected,
            self.is_subscribed,
            self.subscribes,
            self.is_confirmed,
            self.silent,
        ];
        (transfer, flags, self.messages).hash(hasher);
        (self.free, self.ours, self.releases).hash(hasher);
    }
}

#[test]
fn no_waiter_sleeps_on_a_free_object_and_none_takes_that_of_another() {
    for (kind, expected) in [
        (Kind::Offers, 22),
        (Kind::Claims, 24),
        (Kind::Mixed, 22),
        (Kind::Shared, 22),
        (Kind::Permits, 21),
    ] {
        let name = format!("queue with {kind:?}");
        let events = explore(&name, State::first(kind), MAX_STATES);
        assert_eq!(events.len(), expected, "{events:?}");
    }
}
