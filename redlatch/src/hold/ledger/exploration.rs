//! All orders in which one owner's steps are sent, executed, answered and given up, on two connections that break, with a
//! loss of the hold between any two events.

use std::collections::{BTreeSet, HashSet, VecDeque};

use super::Ledger;

/// Changes of each generation, guards, steps on each connection, and losses: with more, the same situations repeat.
const MAX_CHANGES: u64 = 7;
const MAX_GUARDS: u32 = 2;
const MAX_SENT: usize = 3;
const MAX_GENERATIONS: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Acquire { attempt: u64, count: u32 },
    Release { latest: u64, keep: u32 },
}

/// The step whose caller awaits its answer: steps of one owner are sent in turn.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Awaited {
    step: Step,
    route: usize,
    /// What the store has replied, once it has executed the step.
    reply: Option<bool>,
    /// Whether the step was sent again after its connection broke.
    repeated: bool,
    /// Whether the hold was lost since, and replaced.
    superseded: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    ledger: Ledger,
    guards: u32,
    /// Whether a guard was acquired whose release no caller knows of yet.
    owes: bool,
    lost: bool,
    awaited: Option<Awaited>,
    /// What two connections carry that the store has not executed: attempts, and other commands. A release that must follow
    /// an attempt goes the way of attempts.
    sent: [VecDeque<(Step, bool)>; 2],
    /// The count in the store.
    stored: u32,
    generations: u8,
}

const ATTEMPTS: usize = 0;
const COMMANDS: usize = 1;

impl State {
    fn first() -> State {
        State {
            ledger: Ledger::new(),
            guards: 0,
            owes: false,
            lost: false,
            awaited: None,
            sent: Default::default(),
            stored: 0,
            generations: 1,
        }
    }

    fn send(&mut self, step: Step, route: usize) {
        self.sent[route].push_back((step, true));
        self.awaited = Some(Awaited {
            step,
            route,
            reply: None,
            repeated: false,
            superseded: false,
        });
    }

    /// Returns the states that can follow, each with the event that leads to it.
    fn next(&self) -> Vec<(&'static str, State)> {
        let mut all = Vec::new();
        let mut add = |name, change: &dyn Fn(&mut State) -> bool| {
            let mut next = self.clone();
            if change(&mut next) {
                all.push((name, next));
            }
        };
        let has_room = self.ledger.latest() < MAX_CHANGES
            && self.sent.iter().all(|steps| steps.len() < MAX_SENT);
        if self.awaited.is_none() && has_room {
            add("acquires", &|state| {
                let may = !state.lost && state.ledger.is_settled() && state.guards < MAX_GUARDS;
                if may {
                    let attempt = state.ledger.begin_attempt();
                    let count = state.guards + 1;
                    state.send(Step::Acquire { attempt, count }, ATTEMPTS);
                }
                may
            });
            // Also if nothing is left to settle: the work in the background does not look first.
            add("settles", &|state| {
                state.settle();
                true
            });
        }
        if self.guards > 0 && has_room {
            add("drops a guard", &|state| {
                state.guards -= 1;
                state.ledger.guard_removed();
                true
            });
        }
        if !self.lost {
            add("is lost", &|state| {
                (state.lost, state.guards, state.owes) = (true, 0, false);
                true
            });
        } else if self.generations < MAX_GENERATIONS {
            add("acquires after a loss", &|state| {
                state.ledger = Ledger::after_loss(&state.ledger);
                state.lost = false;
                state.generations += 1;
                if let Some(awaited) = &mut state.awaited {
                    awaited.superseded = true;
                }
                true
            });
        }
        for route in [ATTEMPTS, COMMANDS] {
            for granted in [true, false] {
                add("is executed", &|state| state.execute(route, granted));
            }
            add("breaks", &|state| state.disconnect(route));
        }
        add("is answered", &State::answer);
        add("leaves", &|state| {
            let Some(awaited) = state.awaited.take() else {
                return false;
            };
            for steps in &mut state.sent {
                steps.iter_mut().for_each(|(_, awaited)| *awaited = false);
            }
            if let Step::Release { keep, .. } = awaited.step
                && !awaited.superseded
            {
                state.ledger.release_unanswered(keep);
            }
            true
        });
        all
    }

    fn settle(&mut self) {
        let route = match self.ledger.has_attempt_in_flight() {
            true => ATTEMPTS,
            false => COMMANDS,
        };
        self.ledger.begin_release();
        let (latest, keep) = (self.ledger.latest(), self.guards);
        self.send(Step::Release { latest, keep }, route);
    }

    /// The store executes the next step of a connection.
    fn execute(&mut self, route: usize, grants: bool) -> bool {
        let Some((step, is_awaited)) = self.sent[route].pop_front() else {
            return false;
        };
        let reply = match step {
            // An owner that holds the object gets it again.
            Step::Acquire { count, .. } => {
                let granted = grants || self.stored > 0;
                if granted {
                    self.stored = count;
                }
                granted
            }
            Step::Release { keep, .. } => {
                let held = self.stored > 0;
                if held {
                    self.stored = keep;
                }
                held
            }
        };
        if is_awaited && let Some(awaited) = &mut self.awaited {
            awaited.reply = Some(reply);
        }
        // Only an attempt has two outcomes.
        grants || !reply && matches!(step, Step::Acquire { .. })
    }

    /// A connection breaks: the store has closed it, so it executes nothing more of what was sent. An awaited step is
    /// sent again.
    fn disconnect(&mut self, route: usize) -> bool {
        let mut lost = !self.sent[route].is_empty();
        self.sent[route].clear();
        if let Some(awaited) = &mut self.awaited
            && awaited.route == route
            && !awaited.repeated
        {
            (awaited.reply, awaited.repeated) = (None, true);
            self.sent[route].push_back((awaited.step, true));
            lost = true;
        }
        lost
    }

    fn answer(&mut self) -> bool {
        let Some(awaited) = self.awaited.take_if(|awaited| awaited.reply.is_some()) else {
            return false;
        };
        if awaited.superseded {
            return true;
        }
        let reply = awaited.reply.expect("a reply");
        match awaited.step {
            Step::Acquire { attempt, .. } => {
                // A lost hold accepts no guard: what the store has granted must be released.
                if !(reply && self.lost) {
                    self.ledger.attempt_answered(attempt);
                    self.guards += u32::from(reply);
                    self.owes |= reply;
                }
            }
            Step::Release { latest, keep } => {
                let held = reply || keep == 0 && (awaited.repeated || self.ledger.maybe_released());
                self.ledger
                    .release_answered(latest, keep == 0 && held && !self.lost);
                if keep == 0 {
                    assert!(held || !self.owes, "a release is reported as a loss");
                    self.owes = false;
                }
            }
        }
        true
    }

    fn check(&self) {
        if self.ledger.is_settled() && !self.lost {
            assert_eq!(self.stored, self.guards, "settled");
            let changes = |(step, _): &(Step, bool)| match *step {
                Step::Acquire { .. } => true,
                Step::Release { keep, .. } => keep != self.guards,
            };
            assert!(!self.sent.iter().flatten().any(changes), "a step in flight");
        }
        if self.ledger.released_at() == self.ledger.latest() {
            assert_eq!((self.stored, self.guards), (0, 0), "released");
        }
    }
}

#[test]
fn settled_ledger_and_store_agree() {
    let mut seen = HashSet::from([State::first()]);
    let mut queue = VecDeque::from([State::first()]);
    let mut events = BTreeSet::new();
    while let Some(state) = queue.pop_front() {
        for (event, next) in state.next() {
            events.insert(event);
            if seen.insert(next.clone()) {
                let checked = std::panic::catch_unwind(|| next.check());
                assert!(checked.is_ok(), "after {event} of {state:#?}:\n{next:#?}");
                queue.push_back(next);
            }
        }
    }
    println!("{} states", seen.len());
    assert_eq!(events.len(), 9, "{events:?}");
    assert!(seen.len() > 10_000, "{} states", seen.len());
}
