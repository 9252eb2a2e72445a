//! All orders in which one owner's steps are sent, executed, answered and given up, on two connections that break, with a
//! loss of the hold between any two events.
//!
//! Left out, because a ledger cannot know it: the store loses a hold by itself, a lease ends, and a frozen server executes
//! later what a broken connection has carried. The end of settling without an answer is left out as well: then the store has
//! more than the client on purpose. So is the ledger of a ticket, which does the same as that of a waiter to which the object
//! is transferred.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use tokio::time::Instant;

use super::Ledger;
use crate::step::exploration::events::{Event, Events, explore};

/// Changes of each generation, guards, steps on each connection, and losses: with more, the same situations repeat.
const MAX_CHANGES: u64 = 7;
const MAX_GUARDS: u32 = 2;
const MAX_SENT: usize = 3;
const MAX_GENERATIONS: u8 = 3;

/// Maximum number of states of each feature, unless `REDLATCH_STATES` is set. There are 1,200,000 at most.
const MAX_STATES: u64 = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Acquire {
        attempt: u64,
        count: u32,
        /// Its number among the requests of all generations.
        number: i64,
    },
    /// The release of another owner, which acquires the object for this one.
    Transfer {
        attempt: u64,
    },
    /// Puts a ticket in the place of the owner.
    Ticket {
        attempt: u64,
    },
    Release {
        latest: u64,
        keep: u32,
    },
}

/// What is explored beside acquisitions, releases and losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Feature {
    Tickets,
    /// Only where attempts and other commands share a connection.
    Transfers,
    /// An attempt that fails joins the queue of a fair lock.
    Grants,
    /// One acquisition, whose guard may leave the hold to its lease (`detach`).
    Permits,
}

/// The step whose caller awaits its answer: steps of one owner are sent in turn.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Awaited {
    step: Step,
    route: usize,
    /// What the store has replied, once it has executed the step.
    reply: Option<bool>,
    /// Whether the store has refused a ticket, so that the owner still holds the object.
    refused: bool,
    /// Whether the step was sent again after its connection broke.
    repeated: bool,
    /// Whether the hold was lost since, and replaced.
    superseded: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    feature: Feature,
    ledger: Ledger,
    guards: u32,
    /// Whether a guard was acquired whose release no caller knows of yet.
    owes: bool,
    lost: bool,
    /// Whether it was lost at a limit, so that the store must release it.
    at_limit: bool,
    awaited: Option<Awaited>,
    /// The attempt for which the object was transferred, until the waiter takes it.
    offered: Option<u64>,
    /// Whether a step follows an attempt that waits. If it is not sent, it is repeated: the request tries again, or leaves.
    retries: bool,
    /// The latest attempt whose outcome its caller does not know, until it is acknowledged. The background settles it.
    unanswered: u64,
    /// The latest guard that was removed, or loss at a limit. The background settles it at any later time.
    removed: u64,
    /// Whether a request may have left the queue of the store. The background settles that at any later time.
    may_leave: bool,
    /// Whether a guard has left the hold to its lease.
    detached: bool,
    /// The message of the latest grant.
    message: Option<i64>,
    /// What two connections carry that the store has not executed: attempts, and other commands. A release that must follow
    /// an attempt goes the way of attempts.
    sent: [VecDeque<(Step, bool)>; 2],
    /// The count in the store.
    stored: u32,
    /// The number of the attempt that waits in the queue of the store.
    queued: Option<i64>,
    ticket: bool,
    /// Whether the other owner has released the object, for this one.
    transferred: bool,
    generations: u8,
    /// The end of each grant.
    end: Instant,
}

const ATTEMPTS: usize = 0;
const COMMANDS: usize = 1;

impl State {
    fn first(feature: Feature) -> State {
        State {
            feature,
            ledger: Ledger::new(),
            guards: 0,
            owes: false,
            lost: false,
            at_limit: false,
            awaited: None,
            offered: None,
            retries: false,
            unanswered: 0,
            removed: 0,
            may_leave: false,
            detached: false,
            message: None,
            sent: Default::default(),
            stored: 0,
            queued: None,
            ticket: false,
            transferred: false,
            generations: 1,
            end: Instant::now(),
        }
    }

    fn send(&mut self, step: Step, route: usize) {
        let route = match self.feature {
            Feature::Transfers => COMMANDS,
            _ => route,
        };
        self.sent[route].push_back((step, true));
        self.awaited = Some(Awaited {
            step,
            route,
            reply: None,
            refused: false,
            repeated: false,
            superseded: false,
        });
    }

    /// Returns the states that can follow, each with the event that leads to it.
    fn next(&self) -> Vec<(&'static str, State)> {
        let mut all = Vec::new();
        let mut add = |name, change: &dyn Fn(&mut State)| {
            let mut next = self.clone();
            change(&mut next);
            if next.ledger.has_acknowledged(next.unanswered) {
                next.unanswered = 0;
            }
            all.push((name, next));
        };
        let has_room = self.ledger.latest() < MAX_CHANGES
            && self.sent.iter().all(|steps| steps.len() < MAX_SENT);
        let is_idle = !self.lost && self.ledger.is_settled();
        if self.awaited.is_none() && has_room {
            let may_acquire = match self.feature {
                Feature::Permits => self.guards == 0 && self.removed == 0 && !self.detached,
                _ => self.guards < MAX_GUARDS,
            };
            if is_idle && may_acquire {
                add("acquires", &|state| {
                    state.retries |= state.ledger.expected_grant.is_some();
                    let attempt = state.ledger.begin_attempt();
                    let count = state.guards + 1;
                    let number = i64::from(state.generations) * 100 + attempt as i64;
                    let step = Step::Acquire {
                        attempt,
                        count,
                        number,
                    };
                    state.send(step, ATTEMPTS);
                });
            }
            if is_idle && self.guards == 0 && self.feature == Feature::Transfers {
                add("is transferred to", &|state| {
                    let attempt = state.ledger.begin_attempt();
                    state.transferred = false;
                    state.send(Step::Transfer { attempt }, COMMANDS);
                });
            }
            if is_idle && self.guards == 1 && self.feature == Feature::Tickets {
                add("becomes a ticket", &|state| {
                    let attempt = state.ledger.begin_attempt();
                    state.send(Step::Ticket { attempt }, ATTEMPTS);
                });
            }
            if self.has_to_settle() {
                add("settles", &State::settle);
            }
        }
        if self.awaited.is_none() && self.guards < MAX_GUARDS {
            if let Some(attempt) = self.offered
                && self.ledger.is_latest_attempt(attempt)
                && !self.lost
            {
                add("takes what is offered", &|state| {
                    state.ledger.attempt_answered(attempt);
                    state.offered = None;
                    (state.guards, state.owes) = (state.guards + 1, true);
                });
            }
            if let Some(number) = self.message {
                add("gets the message", &|state| {
                    if state.ledger.take_expected_grant(number).is_some() {
                        assert!(!state.lost, "an owner that waits has no hold to lose");
                        (state.guards, state.owes) = (state.guards + 1, true);
                    }
                    state.message = None;
                });
            }
        }
        if self.guards > 0 && !self.awaits_ticket() && has_room {
            add("drops a guard", &|state| {
                state.guards -= 1;
                state.removed = state.ledger.guard_removed();
            });
        }
        if self.guards > 0 && !self.lost && self.feature == Feature::Permits && has_room {
            add("leaves the hold to its lease", &|state| {
                (state.guards, state.owes, state.detached) = (0, false, true);
                let removal = state.ledger.guard_removed();
                state.ledger.kept_in_store(removal);
            });
        }
        if !self.lost && self.guards > 0 {
            for at_limit in [false, true] {
                if !at_limit || has_room {
                    add("is lost", &|state| state.lose(at_limit));
                }
            }
        }
        if self.lost && self.generations < MAX_GENERATIONS {
            add("acquires after a loss", &|state| {
                state.ledger = Ledger::after_loss(&state.ledger);
                (state.lost, state.at_limit) = (false, false);
                state.generations += 1;
                state.offered = None;
                (state.unanswered, state.removed) = (0, 0);
                if let Some(awaited) = &mut state.awaited {
                    awaited.superseded = true;
                }
            });
        }
        for route in [ATTEMPTS, COMMANDS] {
            if let Some((step, _)) = self.sent[route].front() {
                for grants in [true, false] {
                    let has_two_outcomes = match step {
                        Step::Acquire { .. } => self.stored == 0,
                        Step::Transfer { .. } => !self.transferred,
                        Step::Ticket { .. } => !self.ticket,
                        Step::Release { .. } => false,
                    };
                    if grants || has_two_outcomes {
                        add("is executed", &|state| state.execute(route, grants));
                    }
                }
            }
            if !self.sent[route].is_empty() || self.is_answered_on(route) {
                add("breaks", &|state| state.disconnect(route));
            }
        }
        if let Some(number) = self.queued {
            add("is granted", &|state| {
                (state.stored, state.queued, state.message) = (1, None, Some(number));
            });
        }
        if let Some(awaited) = &self.awaited {
            if awaited.reply.is_some() {
                add("is answered", &State::answer);
            }
            add("leaves", &State::leave);
            let is_unsent = self.sent[awaited.route]
                .back()
                .is_some_and(|(_, awaited)| *awaited);
            if is_unsent && !awaited.repeated {
                add("is not sent", &State::not_sent);
            }
        }
        all
    }

    /// Returns whether a release may be sent now: by the work in the background, by the next acquisition, or because nothing
    /// refers to the hold any more. What acquires after a loss settles the lost hold, too.
    fn has_to_settle(&self) -> bool {
        let ledger = &self.ledger;
        let removal = self.removed;
        let of_guard = removal > 0 && (self.guards > 0 || ledger.released_at() < removal);
        let is_needed = self.unanswered > 0 || of_guard || self.may_leave;
        is_needed || self.lost || !ledger.is_settled()
    }

    fn awaits_ticket(&self) -> bool {
        let awaited = self.awaited.as_ref();
        awaited.is_some_and(|awaited| matches!(awaited.step, Step::Ticket { .. }))
    }

    /// Returns whether the release is awaited that ends the place in the queue, or a grant that nobody has accepted.
    fn leaves_queue(&self) -> bool {
        let awaited = self.awaited.as_ref();
        let is_release =
            awaited.is_some_and(|awaited| matches!(awaited.step, Step::Release { .. }));
        is_release && self.feature == Feature::Grants
    }

    /// Returns whether the reply to the awaited step is on the way through this connection.
    fn is_answered_on(&self, route: usize) -> bool {
        let awaited = self.awaited.as_ref();
        awaited.is_some_and(|awaited| {
            awaited.route == route && awaited.reply.is_some() && !awaited.repeated
        })
    }

    fn lose(&mut self, at_limit: bool) {
        (self.lost, self.guards, self.owes) = (true, 0, false);
        self.at_limit = at_limit;
        if at_limit {
            self.ledger.lost_at_limit();
            self.removed = self.ledger.latest();
        }
    }

    fn settle(&mut self) {
        let route = match self.ledger.has_attempt_in_flight() {
            true => ATTEMPTS,
            false => COMMANDS,
        };
        self.retries |= self.ledger.expected_grant.is_some();
        self.ledger.begin_release();
        let (latest, keep) = (self.ledger.latest(), self.guards);
        self.send(Step::Release { latest, keep }, route);
    }

    /// The store executes the next step of a connection.
    fn execute(&mut self, route: usize, grants: bool) {
        let (step, is_awaited) = self.sent[route].pop_front().expect("a step");
        let held = self.stored > 0;
        let mut refused = false;
        let reply = match step {
            // An owner that holds the object gets it again.
            Step::Acquire { count, number, .. } => {
                let granted = grants || held;
                if granted {
                    self.stored = count;
                }
                let queues = !granted && self.feature == Feature::Grants;
                self.queued = queues.then_some(number);
                granted
            }
            // A repetition finds that the other owner does not hold it any more.
            Step::Transfer { .. } => {
                let hands_off = grants && !self.transferred;
                if hands_off {
                    (self.stored, self.transferred) = (1, true);
                }
                hands_off
            }
            // A repetition finds the ticket.
            Step::Ticket { .. } => {
                refused = !grants;
                if grants && held {
                    (self.stored, self.ticket) = (0, true);
                }
                self.ticket
            }
            Step::Release { keep, .. } => {
                if held {
                    self.stored = keep;
                }
                self.queued = None;
                held
            }
        };
        if is_awaited && let Some(awaited) = &mut self.awaited {
            (awaited.reply, awaited.refused) = (Some(reply), refused);
        }
    }

    /// A connection breaks: the store has closed it, so it executes nothing more of what was sent. An awaited step is
    /// sent again.
    fn disconnect(&mut self, route: usize) {
        self.sent[route].clear();
        if let Some(awaited) = &mut self.awaited
            && awaited.route == route
            && !awaited.repeated
        {
            (awaited.reply, awaited.refused, awaited.repeated) = (None, false, true);
            self.sent[route].push_back((awaited.step, true));
        }
    }

    fn answer(&mut self) {
        let awaited = self.awaited.take().expect("an awaited step");
        if awaited.superseded {
            return;
        }
        let reply = awaited.reply.expect("a reply");
        match awaited.step {
            Step::Acquire {
                attempt, number, ..
            } => {
                self.retries = false;
                // A lost hold accepts no guard: what the store has granted must be released.
                if reply && self.lost {
                    self.unanswered = attempt;
                } else {
                    self.ledger.attempt_answered(attempt);
                    self.guards += u32::from(reply);
                    self.owes |= reply;
                }
                if !reply && self.feature == Feature::Grants {
                    self.ledger.expect_grant(number, self.end);
                    self.may_leave = true;
                }
            }
            Step::Transfer { attempt } if reply => {
                (self.offered, self.unanswered) = (Some(attempt), attempt);
            }
            // The first one may have transferred it: a release follows.
            Step::Transfer { attempt } if awaited.repeated => self.unanswered = attempt,
            Step::Transfer { attempt } => self.ledger.attempt_answered(attempt),
            Step::Ticket { attempt } if awaited.refused => self.ledger.attempt_answered(attempt),
            Step::Ticket { .. } => {
                assert!(reply || self.lost, "the store has not lost the hold");
                self.ledger.guard_removed();
                self.ledger.release_answered(self.ledger.latest(), true);
                (self.guards, self.owes) = (0, false);
            }
            Step::Release { latest, keep } => {
                self.retries = false;
                let held = reply || keep == 0 && (awaited.repeated || self.ledger.maybe_released());
                self.ledger
                    .release_answered(latest, keep == 0 && held && !self.lost);
                if keep == 0 {
                    assert!(held || !self.owes, "a release is reported as a loss");
                    self.owes = false;
                }
            }
        }
    }

    /// The awaited step has not left the client.
    fn not_sent(&mut self) {
        let awaited = self.awaited.take().expect("an awaited step");
        self.sent[awaited.route].pop_back();
        match awaited.step {
            _ if awaited.superseded => {}
            Step::Acquire { attempt, .. }
            | Step::Transfer { attempt }
            | Step::Ticket { attempt } => self.ledger.attempt_answered(attempt),
            Step::Release { .. } => {}
        }
    }

    /// The caller of the awaited step does not wait for its answer any more.
    fn leave(&mut self) {
        let awaited = self.awaited.take().expect("an awaited step");
        for steps in &mut self.sent {
            steps.iter_mut().for_each(|(_, awaited)| *awaited = false);
        }
        if awaited.superseded {
            return;
        }
        match awaited.step {
            Step::Release { keep, .. } => self.ledger.release_unanswered(keep),
            // It consumes the guard, and counts as its release.
            Step::Ticket { .. } => {
                self.ledger.release_unanswered(0);
                self.removed = self.ledger.guard_removed();
                self.guards = 0;
            }
            Step::Acquire { attempt, .. } | Step::Transfer { attempt } => self.unanswered = attempt,
        }
    }

    fn check(&self) -> Result<(), &'static str> {
        let in_flight = || self.sent.iter().flatten().map(|(step, _)| *step);
        let released_too_much = |step: Step| match step {
            Step::Release { keep, .. } => keep < self.guards,
            _ => false,
        };
        let ledger = &self.ledger;
        let expects_grant = ledger.expected_grant.is_some();
        let has_guards = !self.lost && !self.awaits_ticket();
        if has_guards && self.stored < self.guards {
            return Err("a guard is valid that the store does not have");
        }
        if self.detached && self.stored == 0 {
            return Err("a hold was released that a guard has left to its lease");
        }
        if has_guards && in_flight().any(released_too_much) {
            return Err("a release is in flight that takes a guard's hold");
        }
        if ledger.is_settled() && !self.lost {
            let changes = |step: Step| match step {
                Step::Release { keep, .. } => keep != self.guards || expects_grant,
                _ => true,
            };
            if ledger.has_attempt_in_flight() {
                return Err("settled, but an attempt is in flight");
            }
            if in_flight().any(changes) {
                return Err("settled, but a step in flight changes the count");
            }
            if expects_grant && (self.guards > 0 || self.stored > 1) {
                return Err("an owner that holds the object expects a grant");
            }
            let may_wait = expects_grant || self.retries || self.leaves_queue() || self.detached;
            if !may_wait && (self.stored != self.guards || self.queued.is_some()) {
                return Err("settled, but the store has another count or waits");
            }
        }
        let is_quiet = self.awaited.is_none() && in_flight().next().is_none();
        if self.at_limit && is_quiet && !ledger.must_be_settled() && self.stored > 0 {
            return Err("lost at a limit, and the store keeps it");
        }
        if ledger.released_at() == ledger.latest() && (self.stored, self.guards) != (0, 0) {
            return Err("released, but held");
        }
        Ok(())
    }
}

impl Events for State {
    fn next(&self) -> Vec<(Event, Result<State, &'static str>)> {
        let next = State::next(self).into_iter();
        next.map(|(name, next)| ((name, 0), Ok(next))).collect()
    }

    fn check(&self) -> Result<(), &'static str> {
        State::check(self)
    }

    fn hash(&self, mut hasher: &mut impl Hasher) {
        Hash::hash(self, &mut hasher);
    }
}

#[test]
fn settled_ledger_and_store_agree() {
    for (feature, expected) in [
        (Feature::Tickets, 11),
        (Feature::Transfers, 12),
        (Feature::Grants, 12),
        (Feature::Permits, 11),
    ] {
        let name = format!("ledger with {feature:?}");
        let events = explore(&name, State::first(feature), MAX_STATES);
        assert_eq!(events.len(), expected, "{events:?}");
    }
}
