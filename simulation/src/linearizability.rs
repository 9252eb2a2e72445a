//! Checks that some sequential order, each operation between its call and its answer, explains all answers.
//!
//! 1. Each section of the history becomes operations with a call time and an answer time: acquire, refuse, release,
//!    or a step of a latch.
//! 2. A release happens between its call and its answer, too. If no answer is known, it happens at any later time.
//! 3. A lost hold ends when it was last valid, or later. A hold that the store lost may end from that moment on.
//!    A hold that became a ticket is that of the ticket until a client has adopted it, or until its lease has ended. An
//!    adoption that failed gives it back, with the limit of a request for the adopter.
//! 4. An operation without an answer may have had an effect or not.
//! 5. The search for an order that explains all answers is that of Wing and Gong with Lowe's improvements, in the
//!    crate `todc-utils`. If there is none, the first operation that no order explains is reported.
//! 6. The search may take exponential time. After [`MAX_STEPS`] it ends without a result, as if there were an order.

use std::cell::Cell;
use std::collections::BTreeMap;

use redlatch_robustness::checker::{Rule, Violation};
use redlatch_robustness::clock::Time;
use redlatch_robustness::history::{History, Mode, PERMITS, Section};
use redlatch_robustness::names::{COUNTERS, job_settings, locks_of};
use todc_utils::linearizability::{WGLChecker, history as wgl};
use todc_utils::specifications::Specification;

/// Maximum number of operations that a search tries, a few seconds. One run in about 10,000 needs more.
const MAX_STEPS: u64 = if cfg!(test) { 20_000 } else { 500_000 };

thread_local! {
    /// Of the current search.
    static STEPS_LEFT: Cell<u64> = const { Cell::new(MAX_STEPS) };
}

/// Returns a violation for each name whose history no order explains, and the number of names whose search ended
/// without a result.
pub(crate) fn check(history: &History) -> (Vec<Violation>, usize) {
    let mut names = history.by_name();
    if history.leaseless_losses().next().is_some() {
        // Counters have no lease, so after lost data they are not checked.
        names.retain(|name, _| !COUNTERS.iter().any(|kind| name.starts_with(kind)));
    }
    // A run begins later than it acquired the lock, and reports no refusals: exclusion is all that can be checked.
    names.retain(|name, _| job_settings(name).is_none());
    let (mut violations, mut abandoned) = (Vec::new(), 0);
    for (name, sections) in &names {
        let operations = operations(history, sections);
        STEPS_LEFT.set(MAX_STEPS);
        if let Some(end) = first_unexplained(&operations) {
            let (who, step) = (&end.requester, end.invocation.step);
            let text = format!("{name}: no order of the operations explains {step:?} of {who}");
            violations.push(Violation::at(end.answered, Rule::Linearizability, text));
        } else if STEPS_LEFT.get() == 0 {
            abandoned += 1;
        }
    }
    (violations, abandoned)
}

/// An operation, and its owner.
#[derive(Debug, Clone)]
struct Operation {
    called: Time,
    /// `Time::MAX`: unknown.
    answered: Time,
    invocation: Invocation,
    requester: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Invocation {
    owner: usize,
    mode: Mode,
    step: Step,
    /// Whether the owner requested the same before without an answer. Delivered late, that lets an owner that
    /// reads also write; it excludes all other owners.
    is_repeated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    /// With this fencing token, if it has one.
    Acquire(Option<u64>),
    Release,
    /// Another owner continues the hold: a ticket, or its adopter.
    PassTo(usize),
    /// The lock was not acquired because others hold it.
    Refuse,
    /// A latch was closed, if it was open. `None`: there was no answer.
    Close(u32, Option<bool>),
    /// A latch was counted down to this.
    CountDown(Option<u64>),
    /// A latch was open.
    Pass,
}

/// The holds of a lock (hold counts by owner and mode), its last fencing token, and the count of a latch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct LockModel {
    holds: BTreeMap<(usize, Mode), u32>,
    token: Option<u64>,
    count: u32,
}

impl LockModel {
    fn admits(&self, owner: usize, mode: Mode) -> bool {
        let mut others = self.holds.keys().filter(|(other, _)| *other != owner);
        let writes = self.holds.contains_key(&(owner, Mode::Exclusive));
        match mode {
            Mode::Permit | Mode::Semaphore => {
                let is_permit = |(_, other): &(usize, Mode)| *other == mode;
                self.holds.len() < PERMITS as usize && self.holds.keys().all(is_permit)
            }
            Mode::Shared => others.all(|(_, mode)| *mode == Mode::Shared),
            Mode::Exclusive => others.next().is_none() && (writes || self.holds.is_empty()),
            Mode::SetCount(_) | Mode::CountDown | Mode::AwaitZero => false,
            Mode::Ask(_) | Mode::RenewTicket(_) | Mode::ReleaseTicket => false,
        }
    }
}

impl Specification for LockModel {
    type State = LockModel;
    type Operation = Invocation;

    fn init() -> LockModel {
        LockModel::default()
    }

    fn apply(invocation: &Invocation, lock: &LockModel) -> (bool, LockModel) {
        let left = STEPS_LEFT.get();
        if left == 0 {
            return (true, lock.clone());
        }
        STEPS_LEFT.set(left - 1);
        let (mut next, hold) = (lock.clone(), (invocation.owner, invocation.mode));
        let is_valid = match invocation.step {
            Step::Acquire(token) => {
                *next.holds.entry(hold).or_default() += 1;
                // The guards of one hold have the same token.
                let is_new = !lock.holds.contains_key(&hold);
                let grows = token.is_none() || token > lock.token || !is_new && token == lock.token;
                next.token = token.max(lock.token);
                let mut owners = lock.holds.keys().map(|(owner, _)| *owner);
                let is_alone = owners.all(|owner| owner == invocation.owner);
                let admits = lock.admits(invocation.owner, invocation.mode);
                grows && (admits || invocation.is_repeated && is_alone)
            }
            Step::Release => match next.holds.get_mut(&hold) {
                Some(1) => next.holds.remove(&hold).is_some(),
                Some(count) => {
                    *count -= 1;
                    true
                }
                None => false,
            },
            Step::PassTo(other) => {
                let holds = next.holds.remove(&hold);
                next.holds.insert((other, invocation.mode), 1);
                holds == Some(1)
            }
            Step::Refuse => !lock.admits(invocation.owner, invocation.mode),
            Step::Close(count, closed) => {
                let was_open = lock.count == 0;
                if was_open {
                    next.count = count;
                }
                closed.is_none_or(|closed| closed == was_open)
            }
            Step::CountDown(left) => {
                next.count = lock.count.saturating_sub(1);
                left.is_none_or(|left| left == u64::from(next.count))
            }
            Step::Pass => lock.count == 0,
        };
        (is_valid, next)
    }
}

fn operations(history: &History, sections: &[&Section]) -> Vec<Operation> {
    let mut owners = BTreeMap::new();
    let forgets_tokens = history.leaseless_losses().next().is_some();
    // A request without a clear answer may have acquired the lock for a while, and so may an attempt to acquire
    // several. A request that gave up may be settled later.
    let is_alone = |one: &Section| locks_of(&one.request.name) == [one.request.name.as_str()];
    let is_clear = |one: &&Section| {
        let gave_up = one.answered.is_some() && one.failed.is_none();
        is_alone(one)
            && !one.request.is_member
            && (one.acquired.is_some() || one.request.owner.is_none() && gave_up)
    };
    let all_clear = sections.iter().all(is_clear) && history.data_losses.is_empty();
    // An attempt that lost its answer in a fault may have acquired it, too, until the request settled that.
    let met_fault = |one: &Section| {
        let until = one.acquired.unwrap_or(Time::MAX);
        let mut windows = history.windows.iter();
        windows.any(|fault| one.requested <= fault.until && fault.from <= until)
    };
    let gave_up_before = |section: &Section, answered: Time| {
        sections.iter().any(|one| {
            let may_have_held = one.acquired.is_none() || met_fault(one);
            let others = !std::ptr::eq(*one, section) && may_have_held;
            others
                && one.requested <= answered
                && one
                    .answered
                    .is_none_or(|at| section.requested <= at + history.lease)
        })
    };
    // Lost data may end the hold of a ticket that a client has adopted at a former master.
    let adopts =
        |one: &Section, other: &Section| history.data_losses.is_empty() && one.adopts(other);
    let ticket_owner = |number: usize| sections.len() + number;
    let mut operations = Vec::new();
    for (number, section) in sections.iter().enumerate() {
        let request = &section.request;
        let owner = match request.owner {
            Some(owner) => {
                let named = (section.process, request.client, owner);
                *owners.entry(named).or_insert(number)
            }
            None => number,
        };
        let is_same = |one: &Section| {
            let same = one.same_owner(section) && one.request.mode == request.mode;
            same && one.acquired.is_none() && one.requested < section.requested
        };
        let is_repeated = sections
            .iter()
            .any(|one| is_same(one) && one.failed.is_some());
        let mut add = |owner, called, answered, step| {
            operations.push(Operation {
                called,
                answered,
                invocation: Invocation {
                    owner,
                    mode: request.mode,
                    step,
                    is_repeated,
                },
                requester: section.requester(),
            });
        };
        match (request.mode, section.acquired, section.answered) {
            (Mode::SetCount(count), acquired, answered) => {
                let answered = answered.filter(|_| section.failed.is_none());
                let closed = answered.map(|_| acquired.is_some());
                add(
                    owner,
                    section.requested,
                    answered.unwrap_or(Time::MAX),
                    Step::Close(count, closed),
                );
            }
            (Mode::CountDown, acquired, _) => {
                add(
                    owner,
                    section.requested,
                    acquired.unwrap_or(Time::MAX),
                    Step::CountDown(section.count),
                );
            }
            (Mode::AwaitZero, Some(acquired), _) => {
                add(owner, section.requested, acquired, Step::Pass)
            }
            (Mode::AwaitZero, None, _) => {}
            (_, Some(acquired), _) => {
                let token = section.token.filter(|_| !forgets_tokens);
                let maker = sections.iter().position(|other| adopts(section, other));
                match maker {
                    Some(maker) => {
                        let step = Step::PassTo(owner);
                        add(ticket_owner(maker), section.requested, acquired, step);
                    }
                    None => {
                        // After lost data, the token of an adopter is not a new one.
                        let token = token.filter(|_| request.ticket.is_none());
                        add(owner, section.requested, acquired, Step::Acquire(token));
                    }
                }
                let (called, answered) = release_interval(history, section, acquired);
                let Some(ticket) = section.ticket.as_ref() else {
                    add(owner, called, answered, Step::Release);
                    continue;
                };
                if !history.data_losses.is_empty() {
                    add(owner, called, Time::MAX, Step::Release);
                    continue;
                }
                let of_ticket = ticket_owner(number);
                add(owner, called, answered, Step::PassTo(of_ticket));
                if ticket.adopted.is_none() {
                    let limits = limits(history, section).filter(|_| ticket.may_get_back);
                    let kept_until = limits.fold(ticket.kept_until, Time::min);
                    add(of_ticket, kept_until, Time::MAX, Step::Release);
                }
            }
            (_, None, Some(_)) if request.ticket.is_some() => {}
            (_, None, Some(answered)) if all_clear && !gave_up_before(section, answered) => {
                add(owner, section.requested, answered, Step::Refuse);
            }
            (_, None, _) => {}
        }
    }
    operations
}

/// Returns when a hold can have ended: the earliest and the latest time.
fn release_interval(history: &History, section: &Section, acquired: Time) -> (Time, Time) {
    let last_valid = section.valid_until.unwrap_or_else(|| {
        // One of several locks may be lost before all of them are acquired: when its fixed lease ends, or by a request to
        // release it.
        let lease = section.request.limits.lease;
        let lease_end = lease.map(|lease| section.requested + lease);
        let early_ends = lease_end.into_iter().chain(asked(history, section));
        early_ends.fold(acquired, Time::min)
    });
    let process = history.processes.get(&section.process);
    let is_dead = process.is_some_and(|process| process.killed.is_some());
    let earliest = match section.release_started {
        _ if section.was_lost() => last_valid,
        Some(left) => left,
        None if is_dead => section.kept_until.unwrap_or(acquired).max(last_valid),
        None => last_valid,
    };
    let forgotten = history.data_losses.iter().filter(|lost| {
        // Without a release that was lost, its owner continues the hold within the lease.
        let after = match lost.loss.holds {
            true => history.margin,
            false => history.lease + history.margin,
        };
        lost.from <= earliest && acquired <= lost.until + after
    });
    let ends = forgotten.map(|lost| match section.requested <= lost.until {
        // The store may forget a hold before its acquisition is answered.
        true => lost.from.max(section.requested),
        false => lost.from.max(acquired),
    });
    let earliest = ends.min().unwrap_or(earliest);
    let is_answered = section.unlock_error.is_none() && !section.was_lost();
    let latest = section.released.filter(|_| is_answered);
    (
        earliest,
        latest.map_or(Time::MAX, |released| released.max(earliest)),
    )
}

/// Returns when the holder of one of several locks may first have been asked to release it, if it has lost it since.
fn asked(history: &History, section: &Section) -> Option<Time> {
    let lost = section
        .loss_reported
        .filter(|_| section.request.is_member)?;
    let asks = history.sections.iter().filter(|ask| {
        let is_ask = matches!(ask.request.mode, Mode::Ask(_));
        is_ask && ask.request.name == section.request.name && ask.requested <= lost
    });
    asks.map(|ask| ask.requested.max(section.requested)).min()
}

/// Returns the earliest ends of holds that revocations of this object allow, from the first adoption of the section's ticket
/// until the client has given the hold back.
fn limits(history: &History, section: &Section) -> impl Iterator<Item = Time> {
    let adopted = section.ticket.as_ref().and_then(|ticket| ticket.requested);
    let returned = history
        .held_span(section)
        .map(|(_, end)| end - history.lease);
    let meanwhile = history.sections.iter().filter(move |ask| {
        ask.request.name == section.request.name
            && ask.answered.is_none_or(|at| Some(at) >= adopted)
            && Some(ask.requested) <= returned
    });
    meanwhile.filter_map(|ask| Some(ask.requested + ask.revocation_limit()?))
}

/// Returns the first operation whose answer no order explains.
fn first_unexplained(operations: &[Operation]) -> Option<&Operation> {
    if is_linearizable(operations, Time::MAX) {
        return None;
    }
    let mut answers: Vec<&Operation> = operations.iter().collect();
    answers.sort_by_key(|one| one.answered);
    let explained = answers.partition_point(|one| is_linearizable(operations, one.answered));
    answers.get(explained).copied()
}

/// Returns whether some order explains all answers until this time.
fn is_linearizable(operations: &[Operation], until: Time) -> bool {
    let mut actions = Vec::new();
    for (number, one) in operations.iter().enumerate() {
        // Without an answer, an acquisition may have had no effect; a step that changes a latch may have had one.
        let has_effect = matches!(
            one.invocation.step,
            Step::Release | Step::PassTo(..) | Step::Close(..) | Step::CountDown(_)
        );
        if one.answered > until && !has_effect || one.called > until {
            continue;
        }
        // Simultaneous actions may happen in any order.
        actions.push((one.called, false, number, one.invocation));
        actions.push((one.answered, true, number, one.invocation));
    }
    if actions.is_empty() {
        return true;
    }
    actions.sort_by_key(|&(at, is_answer, ..)| (at, is_answer));
    STEPS_LEFT.set(MAX_STEPS);
    let action = |(_, is_answer, number, invocation)| match is_answer {
        false => (number, wgl::Action::Call(invocation)),
        true => (number, wgl::Action::Response(invocation)),
    };
    let actions = actions.into_iter().map(action).collect();
    WGLChecker::<LockModel>::is_linearizable(wgl::History::from_actions(actions))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redlatch_robustness::clock::nanos;
    use redlatch_robustness::history::{FaultWindow, Limits, MadeTicket, Request};

    use super::*;

    /// Creates an operation of an owner with its call time and its answer time.
    fn operation(
        owner: usize,
        mode: Mode,
        step: Step,
        (called, answered): (Time, Time),
    ) -> Operation {
        Operation {
            called,
            answered,
            invocation: Invocation {
                owner,
                mode,
                step,
                is_repeated: false,
            },
            requester: format!("owner {owner}"),
        }
    }

    /// Creates an acquisition and a release, each with its call time and its answer time.
    fn hold(
        owner: usize,
        mode: Mode,
        acquired: (Time, Time),
        released: (Time, Time),
    ) -> [Operation; 2] {
        [
            operation(owner, mode, Step::Acquire(None), acquired),
            operation(owner, mode, Step::Release, released),
        ]
    }

    fn unexplained<const N: usize>(holds: [[Operation; 2]; N]) -> Option<String> {
        let operations = holds.concat();
        first_unexplained(&operations).map(|one| one.requester.clone())
    }

    #[test]
    fn order_is_found_if_one_exists() {
        let one = hold(1, Mode::Exclusive, (0, 5), (10, 20));
        // Its interval begins before the other one's release and ends within it.
        let two = hold(2, Mode::Exclusive, (1, 16), (30, Time::MAX));
        let three = hold(3, Mode::Exclusive, (32, 90), (91, 92));
        assert_eq!(unexplained([three, one, two]), None);
    }

    #[test]
    fn two_holders_are_found() {
        let one = hold(1, Mode::Exclusive, (0, 5), (10, 20));
        let two = hold(2, Mode::Exclusive, (1, 9), (30, 40));
        assert_eq!(unexplained([one, two]).as_deref(), Some("owner 2"));
    }

    #[test]
    fn permitted_overlaps_are_distinguished() {
        let overlapping = |first, second, owner| {
            let one = hold(1, first, (0, 5), (10, 20));
            unexplained([one, hold(owner, second, (6, 9), (9, 20))]).is_none()
        };
        assert!(overlapping(Mode::Shared, Mode::Shared, 2));
        assert!(!overlapping(Mode::Exclusive, Mode::Shared, 2));
        assert!(!overlapping(Mode::Shared, Mode::Exclusive, 2));
        // An owner re-enters its lock, and a writer reads.
        assert!(overlapping(Mode::Exclusive, Mode::Exclusive, 1));
        assert!(overlapping(Mode::Exclusive, Mode::Shared, 1));
        assert!(!overlapping(Mode::Shared, Mode::Exclusive, 1));
        assert!(overlapping(Mode::Permit, Mode::Permit, 2));
        assert!(!overlapping(Mode::Permit, Mode::Exclusive, 2));
        assert!(!overlapping(Mode::Exclusive, Mode::Permit, 2));
        let permits = [1, 2, 3].map(|owner| hold(owner, Mode::Permit, (0, 5), (10, 20)));
        let [one, two, _] = permits.clone();
        assert_eq!(unexplained([one, two]), None);
        assert!(unexplained(permits).is_some());
    }

    #[test]
    fn a_refusal_needs_a_holder() {
        let refused = |at| {
            let refusal = operation(2, Mode::Exclusive, Step::Refuse, at);
            let [acquired, released] = hold(1, Mode::Exclusive, (0, 5), (10, 20));
            first_unexplained(&[acquired, released, refusal]).is_none()
        };
        assert!(refused((19, 30)));
        assert!(!refused((21, 30)));
    }

    fn section(process: usize, requested: Time, answered: Time, acquired: Option<Time>) -> Section {
        let request = Request {
            task: 0,
            client: 0,
            owner: None,
            name: "lock:0".into(),
            mode: Mode::Exclusive,
            is_member: false,
            ticket: None,
            limits: Limits::default(),
            run: None,
        };
        let mut section = Section::new(process, requested, request);
        (section.answered, section.acquired) = (Some(answered), acquired);
        section
    }

    fn asks(process: usize, at: Time) -> Section {
        let mut ask = section(process, at, at, Some(at));
        ask.request.mode = Mode::Ask(None);
        ask
    }

    /// One of several locks may be acquired long before the last one, and its fixed lease may end, or its owner be asked to
    /// release it.
    #[test]
    fn one_of_several_locks_may_be_lost_before_all_are_acquired() {
        let explained = |lease, loses: bool, asked: Option<Time>| {
            let mut slow = section(0, 0, 50, Some(50));
            (slow.request.limits.lease, slow.request.is_member) = (lease, true);
            (slow.loss_reported, slow.release_started) = (loses.then_some(50), Some(55));
            let mut other = section(1, 20, 40, Some(40));
            other.release_started = Some(60);
            let sections = [slow, other];
            let mut history = History::new(Duration::from_secs(1));
            history.sections = asked.map(|at| asks(3, at)).into_iter().collect();
            first_unexplained(&operations(&history, &sections.each_ref())).is_none()
        };
        assert!(explained(Some(30), true, None) && explained(None, true, Some(25)));
        assert!(!explained(Some(45), true, None) && !explained(None, true, None));
        assert!(!explained(Some(30), false, None) && !explained(None, false, Some(25)));
        assert!(!explained(None, true, Some(45)) && !explained(None, true, Some(55)));
    }

    /// An adoption begins at 20, and is undone by 30. Another owner acquires the lock at 60 at the latest, and the lease of the
    /// ticket ends at 100.
    #[test]
    fn ticket_that_gets_its_hold_back_has_the_limit_of_its_adopter() {
        let lease = Duration::from_secs(1);
        let explained = |may_get_back, asks: Vec<Section>| {
            let mut maker = section(0, 0, 5, Some(5));
            (maker.release_started, maker.released) = (Some(10), Some(15));
            maker.ticket = Some(MadeTicket {
                text: Some("one".to_owned()),
                kept_until: 100,
                kept_first: 100,
                requested: Some(20),
                adopted: None,
                may_get_back,
                free_at: 30 + nanos(lease),
            });
            let mut other = section(1, 40, 60, Some(60));
            other.release_started = Some(70);
            let sections = [maker, other];
            let mut history = History::new(lease);
            history.sections = asks;
            first_unexplained(&operations(&history, &sections.each_ref())).is_none()
        };
        let ask = |at, limit| {
            let mut ask = asks(3, at);
            ask.request.mode = Mode::Ask(limit);
            ask
        };
        let revoked = |at, limit| explained(true, vec![ask(at, Some(limit))]);
        assert!(!explained(true, Vec::new()) && !explained(true, vec![ask(25, None)]));
        assert!(explained(true, vec![ask(25, None), ask(25, Some(30))]));
        assert!(!explained(false, vec![ask(25, Some(30))]));
        assert!(revoked(25, 35) && !revoked(25, 36));
        // That was for the owner before the ticket, or for the ticket: before the adoption, or behind it.
        assert!(!revoked(9, 30) && !revoked(19, 30) && revoked(20, 30));
        assert!(revoked(30, 25) && !revoked(31, 25));
        // The store may execute a request without an answer later. It refused this one because nothing was held.
        let mut early = ask(9, Some(30));
        early.acquired = None;
        let mut refused = ask(25, Some(30));
        refused.acquired = None;
        assert!(!explained(true, vec![refused]) && !explained(true, vec![early.clone()]));
        early.answered = None;
        assert!(explained(true, vec![early]));
    }

    /// In a fault, an attempt may acquire the lock, lose its answer, and be undone before the request acquires it.
    #[test]
    fn refusal_beside_request_that_met_a_fault_is_not_checked() {
        let sections = [section(0, 0, 50, Some(50)), section(1, 20, 30, None)];
        let mut history = History::new(Duration::from_secs(1));
        let checks_refusal = |history: &History| {
            let steps = operations(history, &sections.iter().collect::<Vec<_>>());
            steps
                .iter()
                .any(|one| matches!(one.invocation.step, Step::Refuse))
        };
        assert!(checks_refusal(&history));
        let (from, until, is_outage) = (5, 10, false);
        history.windows.push(FaultWindow {
            from,
            until,
            is_outage,
        });
        assert!(!checks_refusal(&history));
        (history.windows[0].from, history.windows[0].until) = (60, 70);
        assert!(checks_refusal(&history));
    }

    #[test]
    fn a_latch_is_passed_when_it_is_open() {
        let step = |step, at| operation(1, Mode::AwaitZero, step, at);
        let passed = |at| {
            let steps = [
                step(Step::Close(2, Some(true)), (0, 5)),
                step(Step::CountDown(Some(1)), (10, 15)),
                step(Step::CountDown(Some(0)), (20, 25)),
                step(Step::Pass, at),
            ];
            first_unexplained(&steps).is_none()
        };
        assert!(passed((16, 21)) && passed((0, 1)));
        assert!(!passed((16, 19)));
        // A step without an answer explains it, too.
        let unknown = step(Step::CountDown(None), (6, Time::MAX));
        let closed = step(Step::Close(1, Some(true)), (0, 5));
        let passed = step(Step::Pass, (8, 9));
        assert!(first_unexplained(&[unknown, closed.clone(), passed.clone()]).is_none());
        assert!(first_unexplained(&[closed, passed]).is_some());
    }

    #[test]
    fn tokens_that_do_not_grow_are_found() {
        let with_token = |owner, token, at| {
            let [mut acquired, released] =
                hold(owner, Mode::Exclusive, (at, at + 1), (at + 2, at + 3));
            acquired.invocation.step = Step::Acquire(Some(token));
            [acquired, released]
        };
        let second = |token| unexplained([with_token(1, 7, 0), with_token(2, token, 10)]);
        assert_eq!(second(8), None);
        assert!(second(7).is_some());
        assert!(second(6).is_some());
    }

    /// Each of forty releases without an answer may come before or after every other one.
    #[test]
    fn search_without_end_is_abandoned() {
        let unanswered = |owner| hold(owner, Mode::Shared, (10, 11), (100, Time::MAX));
        let wrong = operation(99, Mode::Exclusive, Step::Release, (200, 201));
        let with = |owners| {
            let mut all: Vec<Operation> = (0..owners).flat_map(unanswered).collect();
            all.push(wrong.clone());
            is_linearizable(&all, Time::MAX)
        };
        assert!(!with(2));
        assert!(with(40));
    }

    /// The hold of a ticket passes to its adopter, and refuses others, until it is released or may have ended.
    #[test]
    fn ticket_holds_until_it_is_adopted_or_its_lease_ends() {
        let mode = Mode::Exclusive;
        let made = [
            operation(1, mode, Step::Acquire(None), (0, 5)),
            operation(1, mode, Step::PassTo(9), (10, 20)),
        ];
        let explained = |steps: &[Operation]| first_unexplained(&[&made, steps].concat()).is_none();
        let adopted = |owner| operation(9, mode, Step::PassTo(owner), (30, 40));
        let released = |owner| operation(owner, mode, Step::Release, (50, 60));
        let refused = operation(4, mode, Step::Refuse, (25, 45));
        assert!(explained(&[adopted(2), released(2), refused.clone()]));
        assert!(!explained(&[
            adopted(2),
            adopted(3),
            released(2),
            released(3)
        ]));
        let ended = |at| operation(9, mode, Step::Release, (at, Time::MAX));
        let other = operation(4, mode, Step::Acquire(None), (25, 45));
        assert!(explained(&[ended(40), other.clone()]));
        assert!(!explained(&[ended(46), other]));
        assert!(explained(&[ended(46), refused]));
    }
}
