//! Checks the requests that use a ticket ([`Rule::Ticket`]).
//!
//! 1. After the adoption or the release of a ticket has succeeded, no request uses it.
//! 2. A hold whose owner was asked for the lock does not become a ticket.
//! 3. A ticket whose lock was asked for is not adopted, and not renewed beyond the limit of a
//!    revocation.
//! 4. The renewal or the release of a ticket is not refused while the store must keep the ticket.
//!    Only checked without a fault since the request for the lock, without a request to release it,
//!    and without another request to adopt or to release the ticket.
//!
//! The request to release must be answered before the other one is sent, and nothing else may have
//! held the lock meanwhile: points 2 and 3 do not apply to an owner that several tasks share, nor
//! after another request to adopt the ticket. Lost data may restore a ticket, and lose requests. A failover in which
//! replicas have confirmed all acquisitions may lose requests, too. While
//! a slot moves, requests may not count.

use super::allowances::RECONNECT_ALLOWANCE;
use super::violation::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{History, MadeTicket, Mode, Section};

/// The store counts in whole milliseconds.
const ROUNDING: Time = 2_000_000;

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    if !history.data_losses.is_empty() {
        return found;
    }
    let succeeded = history.sections.iter().filter(|one| one.acquired.is_some());
    let (asks, others): (Vec<&Section>, Vec<_>) =
        succeeded.partition(|one| matches!(one.request.mode, Mode::Ask(_)));
    for maker in &others {
        let Some((made, ticket)) = maker.released.zip(maker.ticket.as_ref()) else {
            continue;
        };
        if ticket.text.is_none() {
            continue;
        }
        let (acquired, left) = (maker.acquired, maker.release_started);
        let was_asked = |ask: &&Section| {
            let is_of_maker =
                ask.request.name == maker.request.name && acquired <= Some(ask.requested);
            is_of_maker && ask.answered <= left && !may_not_count(history, ask, left, made)
        };
        if maker.request.owner.is_none() && asks.iter().any(was_asked) {
            found.push(violation(
                maker,
                "made a ticket of a hold that was asked for",
            ));
        }
        let of_ticket = history.sections.iter();
        let of_ticket: Vec<&Section> = of_ticket
            .filter(|one| one.request.ticket == ticket.text)
            .collect();
        let refused = of_ticket.iter().filter(|one| is_refusal(one));
        for one in refused.filter(|one| must_succeed(history, maker, &of_ticket, one)) {
            found.push(violation(one, "was refused the use of a valid ticket"));
        }
        let uses = others
            .iter()
            .filter(|one| one.request.ticket == ticket.text);
        let ends = |one: &&&Section| match one.request.mode {
            Mode::RenewTicket(_) => false,
            Mode::ReleaseTicket => !met_fault(history, one),
            _ => true,
        };
        let used_up = uses.clone().filter(ends);
        let used_up = used_up.filter_map(|one| one.answered).min();
        for one in uses {
            let is_repeated = one.request.mode == Mode::ReleaseTicket && met_fault(history, one);
            if used_up.is_some_and(|at| at < one.requested) && !is_repeated {
                found.push(violation(one, "used a ticket again"));
            }
            let asks = asks
                .iter()
                .filter(|ask| ask.request.name == maker.request.name);
            let mut asks = asks.filter(|ask| made <= ask.requested);
            let counts = |ask: &Section| {
                let counts_until = |at| !may_not_count(history, ask, Some(one.requested), at);
                forbids(history, ask, one) && one.answered.is_none_or(counts_until)
            };
            if is_first(ticket, one) && asks.any(|ask| counts(ask)) {
                found.push(violation(one, "used a ticket that was asked for"));
            }
        }
    }
    found
}

/// Returns whether a request to release may not count for a step in this time: a promoted replica may lack the request, for
/// which no replica is awaited, and while a slot moves, the script may run where the key of the requests is not.
fn may_not_count(history: &History, ask: &Section, from: Option<Time>, until: Time) -> bool {
    let mut failovers = history.failovers.iter();
    let mut moves = history.slot_moves.iter();
    failovers.any(|&(begun, ended)| begun <= until && ask.requested <= ended)
        || moves.any(|&(begun, ended)| begun <= until && from <= Some(ended))
}

/// Returns whether the renewal or the release of a ticket was refused.
fn is_refusal(one: &Section) -> bool {
    one.enters_none() && matches!(one.failed.as_deref(), Some("TicketRefused" | "Asked"))
}

/// Returns whether nothing explains that this use of the ticket was refused. `of_ticket`: all
/// requests that use the ticket.
fn must_succeed(history: &History, maker: &Section, of_ticket: &[&Section], one: &Section) -> bool {
    let Some(answered) = one.answered else {
        return false;
    };
    let renewals = of_ticket.iter().filter_map(|other| {
        let is_before = other.acquired.is_some() && other.answered <= Some(one.requested);
        match other.request.mode {
            Mode::RenewTicket(lease) if is_before => Some(other.requested + lease),
            _ => None,
        }
    });
    let made_until = maker.release_started.zip(maker.ticket_lease);
    let made_until = made_until.map(|(sent, lease)| sent + lease);
    let kept_until = renewals.chain(made_until).max();
    let may_use_up = |other: &&Section| {
        let is_renewal = matches!(other.request.mode, Mode::RenewTicket(_));
        !is_renewal && !std::ptr::eq(*other, one) && other.requested <= answered
    };
    let may_be_asked = |ask: &Section| {
        // Without an answer, or after an error, the store may execute it at any later time.
        let is_over = ask.failed.is_none() && ask.answered.is_some_and(|at| at < maker.requested);
        matches!(ask.request.mode, Mode::Ask(_))
            && ask.request.name == maker.request.name
            && ask.requested <= answered
            && !is_over
    };
    let is_in_fault = history.windows.iter().any(|window| {
        window.from <= answered && maker.requested <= window.until + RECONNECT_ALLOWANCE
    });
    Some(answered + ROUNDING) < kept_until
        && !is_in_fault
        && !of_ticket.iter().any(may_use_up)
        && !history.sections.iter().any(may_be_asked)
}

/// Returns whether a fault may have broken a connection during a request. A release that is sent
/// again then succeeds, also if the ticket was not valid.
fn met_fault(history: &History, one: &Section) -> bool {
    let mut windows = history.windows.iter();
    windows.any(|window| {
        one.answered.is_none_or(|at| window.from <= at)
            && one.requested <= window.until + RECONNECT_ALLOWANCE
    })
}

/// Returns whether no client requested to adopt or to release the ticket before this use of it, or
/// meanwhile.
fn is_first(ticket: &MadeTicket, one: &Section) -> bool {
    let adopted = ticket.requested;
    match one.enters_none() {
        true => adopted.is_none() || one.answered <= adopted,
        false => adopted == Some(one.requested),
    }
}

/// Returns whether a ticket must not be used after this request to release.
fn forbids(history: &History, ask: &Section, one: &Section) -> bool {
    if ask.answered > Some(one.requested) {
        return false;
    }
    match (one.request.mode, ask.request.mode, ask.answered) {
        (Mode::RenewTicket(lease), Mode::Ask(Some(limit)), Some(answered)) => {
            // The limit is a time of the store's clock, which may be set back.
            let renewed = one.answered.unwrap_or(one.requested);
            let behind = history.clock_behind(renewed) - history.clock_behind(ask.requested);
            answered + limit + behind.max(0) + ROUNDING < one.requested + lease
        }
        (Mode::RenewTicket(_) | Mode::ReleaseTicket, ..) => false,
        _ => true,
    }
}

fn violation(section: &Section, text: &str) -> Violation {
    let at = section.answered.unwrap_or(section.requested);
    let (requester, name) = (section.requester(), &section.request.name);
    let asked_after = millis(at - section.requested);
    let text = format!("{name}: {requester} {text}, {asked_after} ms after its request");
    Violation::at(at, Rule::Ticket, text)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, adopts, becomes_ticket, history, section};
    use super::*;

    /// A request that is sent at `from` and answered 10 ms later.
    fn request(mode: Mode, from: Time) -> Section {
        let mut one = section("a", from + 10, from + 10);
        (one.requested, one.request.mode) = (from * MS, mode);
        one
    }

    fn used(mode: Mode, from: Time) -> Section {
        adopts("one", request(mode, from))
    }

    /// Counts the violations if a hold from 0 to 100 ms becomes a ticket, whose first adoption is
    /// requested at this time.
    fn found(adopted: Option<Time>, others: &[Section]) -> usize {
        let mut maker = becomes_ticket(section("a", 0, 100), "one", 3000);
        let requested = adopted.map(|at| at * MS);
        maker.ticket.as_mut().unwrap().requested = requested;
        check(&history([&[maker], others].concat())).len()
    }

    #[test]
    fn ticket_that_is_used_again_is_found() {
        let (adopted, released) = (used(Mode::Exclusive, 200), used(Mode::ReleaseTicket, 200));
        let renewed = |at| used(Mode::RenewTicket(50 * MS), at);
        assert_eq!(found(Some(200), &[renewed(150), adopted.clone()]), 0);
        assert_eq!(found(Some(200), &[adopted.clone(), renewed(205)]), 0);
        assert_eq!(found(Some(200), &[adopted.clone(), renewed(211)]), 1);
        assert_eq!(found(Some(200), &[adopted, used(Mode::Exclusive, 211)]), 1);
        assert_eq!(found(None, &[released, renewed(211)]), 1);
    }

    #[test]
    fn refusal_of_valid_ticket_is_found() {
        let refused = |mode, from: Time| {
            let mut one = used(mode, from);
            (one.acquired, one.failed) = (None, Some("TicketRefused".to_owned()));
            one
        };
        let found = |others: &[Section]| {
            let mut maker = becomes_ticket(section("a", 0, 100), "one", 3000);
            maker.ticket_lease = Some(900 * MS);
            check(&history([&[maker], others].concat())).len()
        };
        let (renewal, release) = (Mode::RenewTicket(50 * MS), Mode::ReleaseTicket);
        for mode in [renewal, release] {
            assert_eq!(found(&[refused(mode, 200)]), 1);
            assert_eq!(found(&[refused(mode, 987)]), 1);
            assert_eq!(found(&[refused(mode, 988)]), 0);
            // It was renewed.
            let renewed = used(Mode::RenewTicket(900 * MS), 500);
            assert_eq!(found(&[renewed, refused(mode, 988)]), 1);
            for other in [Mode::Exclusive, release, Mode::Ask(None)] {
                assert_eq!(found(&[used(other, 205), refused(mode, 200)]), 0);
                assert_eq!(found(&[refused(mode, 200), used(other, 211)]), 1);
            }
        }
        let mut canceled = refused(release, 200);
        canceled.failed = None;
        assert_eq!(found(&[canceled]), 0);
    }

    #[test]
    fn hold_and_ticket_that_were_asked_for_are_not_passed_on() {
        let ask = |at| request(Mode::Ask(None), at);
        assert_eq!(found(None, &[ask(50)]), 1);
        assert_eq!(found(None, &[ask(95)]), 0);
        let adopted = used(Mode::Exclusive, 200);
        assert_eq!(found(Some(200), &[ask(150), adopted.clone()]), 1);
        assert_eq!(found(Some(200), &[ask(195), adopted.clone()]), 0);
        let with = |change: &dyn Fn(&mut History)| {
            let maker = becomes_ticket(section("a", 0, 100), "one", 3000);
            let mut history = history(vec![maker, ask(150), adopted.clone()]);
            history.sections[0].ticket.as_mut().unwrap().requested = Some(200 * MS);
            change(&mut history);
            check(&history).len()
        };
        // A promoted replica may lack the request.
        let failed_over = |from, until| with(&|all| all.failovers.push((from * MS, until * MS)));
        assert_eq!(failed_over(180, 205), 0);
        assert_eq!([failed_over(100, 149), failed_over(211, 300)], [1, 1]);
        // While a slot moves, it may not count.
        let moved = |from, until| with(&|all| all.slot_moves.push((from * MS, until * MS)));
        assert_eq!(moved(100, 205), 0);
        assert_eq!([moved(100, 199), moved(211, 300)], [1, 1]);
        // Its canceled adoption may have been asked for.
        assert_eq!(found(Some(120), &[ask(150), adopted]), 0);
    }

    #[test]
    fn ticket_is_not_renewed_beyond_limit_of_revocation() {
        let revoked = request(Mode::Ask(Some(100 * MS)), 150);
        let renewed = |lease| used(Mode::RenewTicket(lease * MS), 200);
        assert_eq!(found(None, &[revoked.clone(), renewed(62)]), 0);
        assert_eq!(found(None, &[revoked.clone(), renewed(63)]), 1);
        assert_eq!(found(Some(205), &[revoked.clone(), renewed(63)]), 0);
        // The clock of the store is set back, so the limit comes later.
        let set_back = |at, lease| {
            let maker = becomes_ticket(section("a", 0, 100), "one", 3000);
            let mut history = history(vec![maker, revoked.clone(), renewed(lease)]);
            history.clock_steps = vec![(at * MS, -30 * MS)];
            check(&history).len()
        };
        for at in [151, 205, 210] {
            assert_eq!([set_back(at, 92), set_back(at, 93)], [0, 1]);
        }
        assert_eq!([set_back(149, 63), set_back(211, 63)], [1, 1]);
    }
}
