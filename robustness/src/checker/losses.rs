//! Checks that holders learn of every loss in time, and that no hold is lost that could have been renewed.
//!
//! 1. During an outage (the store answers no client) no renewal succeeds. A guard that was acquired before the outage
//!    must be invalid when the outage has lasted for one lease ([`Rule::ValidTooLong`]). Any guard must be invalid
//!    once its loss is reported; a violation has the same rule.
//! 2. When a lease ends, a running holder must learn of it within the [margin](History::margin) ([`Rule::LossReportedLate`]). A stopped
//!    process may learn of it when it continues. A killed process need not learn of it.
//! 3. The store keeps a hold until the end of its lease. An earlier loss is [`Rule::LostBeforeExpiry`].
//! 4. If the fault is too short to prevent renewal, or concerns another server, any loss is
//!    [`Rule::AvoidableLoss`], unless the process was stopped and could not renew.
//! 5. A hold that was revoked may be lost from the limit of the revocation on, for that reason
//!    only. Then points 3 and 4 do not apply. A revoked hold may also be the owner's next one, if a
//!    promoted replica lacks the release of the first, or a slot moved meanwhile; or one that the
//!    store had granted to a request of the same owner which gave up during a fault. Points 3 and 4
//!    do not apply either if the hold became a ticket whose lease has ended. The guard of a revoked
//!    hold must be invalid when the limit and a lease have both passed ([`Rule::ValidTooLong`]).
//! 6. A guard must be invalid after the first limit of its request ([`Rule::ValidTooLong`]): a
//!    fixed lease, `at_most`, or `fed_every` since it was fed. It may be lost at that limit, not
//!    before it: `valid_for` includes the limits, so point 3 applies. A loss at a limit that the
//!    request does not have is [`Rule::AvoidableLoss`].

use super::violation::{Rule, Violation};
use crate::clock::{Time, millis};
use crate::history::{History, Limits, Section};
use crate::names::{has_queue, locks_of};

/// Which holds may be lost during a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Losses {
    /// None: the fault ends before any lease does.
    None,
    /// Only holds on one server, which is unreachable for longer than a lease.
    Unreachable,
    /// Any: the fault lasts longer than a lease, or removes locks.
    Any,
}

pub(super) fn check(history: &History, losses: Losses) -> Vec<Violation> {
    let mut found = Vec::new();
    // The members of a multi-lock are lost together, and the multi-lock's own section reports the loss.
    let sections = history.sections.iter();
    for section in sections.filter(|section| !section.request.is_member) {
        found.extend(valid_too_long(history, section));
        found.extend(valid_after_revocation(history, section));
        found.extend(valid_after_limit(section));
        found.extend(lost_at_other_limit(history, section));
        found.extend(reported_late(history, section));
        if was_ended_ticket(section) || section.was_lost() && was_revoked(history, section) {
            continue;
        }
        found.extend(lost_before_expiry(section));
        let may_be_lost = match losses {
            Losses::None => false,
            Losses::Unreachable => history.unreachable_names.contains(&section.request.name),
            Losses::Any => true,
        };
        let is_explained = was_at_limit(history, section) || was_stopped(history, section, losses);
        if !may_be_lost && section.was_lost() && !is_explained {
            let at = section
                .loss_reported
                .or(section.released)
                .unwrap_or(history.end);
            found.push(violation(Rule::AvoidableLoss, section, at, at, "was lost"));
        }
    }
    found
}

/// Finds a guard that was valid although its loss was reported, or although no renewal was possible for a lease.
fn valid_too_long(history: &History, section: &Section) -> Option<Violation> {
    let (acquired, until) = section.valid_span()?;
    let found_at = if section.valid_after_loss {
        Some((
            section.loss_reported?,
            "was valid after its loss was reported",
        ))
    } else {
        let outages = history.windows.iter().filter(|window| window.is_outage);
        // One lease into the outage, every guard that was acquired until then must be invalid, for the rest of it.
        let mut limits = outages
            .map(|outage| (outage.from + history.lease, outage.until))
            .filter(|&(limit, outage_end)| acquired < limit && limit < until && limit < outage_end);
        limits
            .next()
            .map(|(limit, _)| (limit, "was valid although nothing could have renewed it"))
    };
    found_at.map(|(limit, text)| violation(Rule::ValidTooLong, section, limit, until, text))
}

/// Finds a guard that was valid although its hold was revoked, and the limit and the lease that it had have both passed.
///
/// Owners that several tasks share are not checked, because re-entries extend the lease. A fault may lose the request.
fn valid_after_revocation(history: &History, section: &Section) -> Option<Violation> {
    let (acquired, until) = section.valid_span()?;
    let mut limits = history.sections.iter().filter_map(|request| {
        let limit = request.revocation_limit()?;
        let (asked, answered) = (request.requested, request.acquired?);
        let end = answered + limit.max(history.lease);
        let mut windows = history.windows.iter();
        let is_of_section = request.request.name == section.request.name
            && acquired <= asked
            && section.request.owner.is_none()
            && !windows.any(|window| window.from <= until && asked <= window.until);
        (is_of_section && end < until).then_some(end)
    });
    let end = limits.next()?;
    let text = "was valid although it was revoked";
    Some(violation(Rule::ValidTooLong, section, end, until, text))
}

/// Finds a guard that was valid after the end of a limit of its request.
fn valid_after_limit(section: &Section) -> Option<Violation> {
    let (end, until) = (section.valid_after_limit?, section.valid_until?);
    let text = "was valid after a limit of its request";
    Some(violation(Rule::ValidTooLong, section, end, until, text))
}

/// Returns since when `at_most`, and `fed_every` before the first feed, count at the earliest.
///
/// The client starts them when it adds the guard. The simulated clock stands still while a task
/// runs, so the acquisition has the same time, unless the process was stopped in between. Only the
/// simulation uses limits.
fn limits_started(history: &History, section: &Section) -> Time {
    let Some(acquired) = section.acquired else {
        return section.requested;
    };
    let process = history.processes.get(&section.process);
    let stop_at = |at: Time| {
        let mut stops = process.iter().flat_map(|process| &process.stopped);
        stops.find(|&&(stopped, continued)| {
            stopped < at && continued.is_none_or(|continued| at <= continued)
        })
    };
    let mut since = acquired;
    while let Some(&(stopped, _)) = stop_at(since) {
        since = stopped;
    }
    since.max(section.requested)
}

/// Returns each limit of the request, since when it counts at the earliest, and the start of the
/// error if the hold is lost at it.
fn limits(history: &History, section: &Section) -> [(Option<Time>, Time, &'static str); 3] {
    let Limits {
        lease,
        at_most,
        fed_every,
        ..
    } = section.request.limits;
    let requested = section.requested;
    let started = limits_started(history, section);
    // A RedLock allows for the drift of clocks: 1 % of the lease and 2 ms.
    let drift = |lease: Time| match section.request.name.starts_with("red:") {
        true => lease / 100 + 2_000_000,
        false => 0,
    };
    [
        (lease, requested - lease.map_or(0, drift), "Lost("),
        (at_most, started, "Lost(HeldTooLong"),
        (fed_every, section.fed.unwrap_or(started), "Lost(NotFed"),
    ]
}

/// Returns whether the hold was lost at the end of a limit of its request, or later, and for that
/// reason.
fn was_at_limit(history: &History, section: &Section) -> bool {
    let Some(lost_at) = section.loss_reported.or(section.released) else {
        return false;
    };
    let error = section.unlock_error.as_ref();
    let mut limits = limits(history, section).into_iter();
    limits.any(|(limit, since, reason)| {
        limit.is_some_and(|limit| since + limit <= lost_at)
            && error.is_none_or(|error| !error.starts_with("Lost") || error.starts_with(reason))
    })
}

/// Finds a hold that was lost at a limit that its request does not have.
fn lost_at_other_limit(history: &History, section: &Section) -> Option<Violation> {
    let error = section.unlock_error.as_ref()?;
    let [_, others @ ..] = limits(history, section);
    let is_other = others
        .into_iter()
        .any(|(limit, _, reason)| limit.is_none() && error.starts_with(reason));
    let at = section.loss_reported.or(section.released)?;
    let text = "was lost at a limit that it does not have";
    is_other.then(|| violation(Rule::AvoidableLoss, section, at, at, text))
}

/// Returns whether the hold became a ticket whose lease ended before an answer arrived. A repetition of the step, after a
/// broken connection, finds neither the owner nor the ticket.
fn was_ended_ticket(section: &Section) -> bool {
    let lease_end = section.release_started.zip(section.ticket_lease);
    let lease_end = lease_end.map(|(sent, lease)| sent + lease);
    section.unlock_error.as_deref() == Some("Lost(NotHeld)")
        && lease_end <= section.released
        && lease_end.is_some()
}

/// Returns whether a lost hold was revoked, and is not lost before the limit.
fn was_revoked(history: &History, section: &Section) -> bool {
    let other_reason = |error: &String| error.starts_with("Lost") && error != "Lost(Revoked)";
    let lost_at = section.loss_reported.or(section.released);
    let Some(lost_at) =
        lost_at.filter(|_| !section.unlock_error.as_ref().is_some_and(other_reason))
    else {
        return false;
    };
    revoked_from(history, section).is_some_and(|from| from <= lost_at)
}

/// Returns when the hold of a section may be lost at the earliest because it was revoked, if it was.
pub(super) fn revoked_from(history: &History, section: &Section) -> Option<Time> {
    // The members of a multi-lock are asked one by one.
    let names = locks_of(&section.request.name);
    let requests_since = requests_since(history, section);
    let limits = history.sections.iter().filter_map(|request| {
        let limit = request.revocation_limit()?;
        let is_of_section = names.contains(&request.request.name)
            && request
                .acquired
                .is_none_or(|answered| requests_since <= answered);
        // The client counts the limit from when it sent its own request to the store.
        let earliest = request.requested + limit - history.lease / 3;
        is_of_section.then_some(earliest.max(request.requested))
    });
    limits.min()
}

/// Returns since when requests to release may concern the hold of a section.
///
/// A release removes the requests for its owner. If a promoted replica lacks that release, or a
/// slot moved meanwhile, they concern the owner's next hold, too, and those after it whose releases
/// are lost as well. (Of a read-write lock only holds of the writer: what the owner reads in between
/// changes nothing.) The store may also have granted the hold to an earlier request of the owner.
fn requests_since(history: &History, section: &Section) -> Time {
    let of_owner = history
        .sections
        .iter()
        .filter(|one| one.same_owner(section) && one.request.name == section.request.name)
        .filter(|one| one.request.mode == section.request.mode);
    let ends = of_owner
        .clone()
        .filter_map(|one| Some((one.held_span()?.1, one)));
    let mut ends: Vec<(Time, &Section)> = ends.collect();
    ends.sort_by_key(|&(end, _)| std::cmp::Reverse(end));
    let release_may_be_lost = |end: Time, before: &Section| {
        let losses = history.data_losses.iter();
        let losses = losses.map(|loss| (loss.from, loss.until));
        let mut losses = losses.chain(history.failovers.iter().copied());
        let mut moves = history.slot_moves.iter();
        // Without an answer, such as that of a dropped guard, the release follows later.
        let released = match before.is_release_answered() {
            true => end,
            false => end + history.margin,
        };
        losses.any(|(from, until)| from <= released && end <= until + history.margin)
            || moves.any(|&(from, until)| from <= end && end <= until)
    };
    let mut begun = hold_begun(history, section);
    let mut last_release = None;
    for (end, before) in ends {
        if end <= begun {
            if !release_may_be_lost(end, before) {
                last_release = Some(end);
                break;
            }
            begun = hold_begun(history, before);
        }
    }
    let of_others = history
        .sections
        .iter()
        .filter(|one| !one.same_owner(section) && one.request.name == section.request.name);
    let of_others = of_others.filter_map(|one| Some(one.valid_span()?.0));
    let other_held = of_others.filter(|&acquired| acquired <= begun).max();
    let granted = of_owner
        .filter(|one| may_have_been_granted(history, one, last_release, begun))
        .map(|one| one.requested.max(other_held.unwrap_or(one.requested)));
    granted.min().unwrap_or(begun).min(begun)
}

/// Returns whether the store may have granted to this request of an owner, which gave up, what the
/// next request of the owner got at `begun`.
///
/// A fair lock is granted to a waiting request that need not know it. If that gives up during a
/// fault, and its withdrawal does not reach the store before the owner's next request, that one
/// takes the hold as it is. `last_release`: of the owner, after which the store had nothing of it.
fn may_have_been_granted(
    history: &History,
    waiting: &Section,
    last_release: Option<Time>,
    begun: Time,
) -> bool {
    let gave_up = waiting.answered.filter(|_| waiting.acquired.is_none());
    let mut windows = history.windows.iter();
    gave_up.is_some_and(|at| {
        has_queue(&waiting.request.name)
            && last_release.is_none_or(|released| released <= at)
            && windows.any(|window| {
                (window.from..=window.until).contains(&at) && begun <= window.until + history.margin
            })
    })
}

/// Returns when the hold of a section was requested: by it, or by an earlier section of its owner, which it re-entered.
fn hold_begun(history: &History, section: &Section) -> Time {
    let name = &section.request.name;
    let same_hold = history
        .sections
        .iter()
        .filter(|one| one.same_owner(section) && one.request.name == *name);
    let mut same_hold: Vec<&Section> = same_hold.collect();
    same_hold.sort_by_key(|one| std::cmp::Reverse(one.requested));
    same_hold.iter().fold(section.requested, |begun, one| {
        // A lost hold was valid for longer than its guard was last seen to be, at most until the loss was reported.
        let overlaps = one.held_span().is_some_and(|(_, end)| {
            one.requested <= begun && begun <= one.loss_reported.map_or(end, |lost| lost.max(end))
        });
        if overlaps { one.requested } else { begun }
    })
}

/// Finds a loss before the end of the lease. The store must keep a hold until then, unless a fault removes its data.
fn lost_before_expiry(section: &Section) -> Option<Violation> {
    let kept_until = section.kept_until?;
    let not_held = section.unlock_error.as_deref() == Some("Lost(NotHeld)");
    let at = match section.loss_reported {
        Some(loss_reported) => loss_reported,
        None => section.released.filter(|_| not_held)?,
    };
    let text = "lost the lock before its lease ended";
    (at < kept_until).then(|| violation(Rule::LostBeforeExpiry, section, at, at, text))
}

/// Finds a running holder that did not learn of the end of its lease in time.
fn reported_late(history: &History, section: &Section) -> Option<Violation> {
    let deadline = section.deadline?;
    if section.ticket_lease.is_some() {
        // The guard is in a call that makes a ticket of it, and the answer tells of the loss.
        return None;
    }
    let process = history.processes.get(&section.process)?;
    // A process that is stopped when its lease ends learns of it when it continues.
    let mut latest = deadline + history.margin;
    for &(stopped, continued) in &process.stopped {
        let continued = continued.unwrap_or(history.end);
        if stopped < latest && deadline < continued {
            latest = latest.max(continued + history.margin);
        }
    }
    let hold_end = section
        .release_started
        .or(process.killed)
        .unwrap_or(history.end);
    if hold_end <= latest
        || section
            .loss_reported
            .is_some_and(|loss_reported| loss_reported <= latest)
    {
        return None;
    }
    let loss_reported = section.loss_reported.unwrap_or(hold_end);
    let text = match section.loss_reported {
        Some(_) => "detected the end of its lease late",
        None => "did not detect the end of its lease",
    };
    Some(violation(
        Rule::LossReportedLate,
        section,
        deadline,
        loss_reported,
        text,
    ))
}

/// Returns whether a stop of the process excuses a loss, because a stopped process cannot renew.
///
/// The stop may overlap the hold or its request. The request counts because the lease starts before it is sent: after
/// a stop it may end as soon as the answer is read.
///
/// In faults with [`Losses::Unreachable`] locks are held for the whole run, and any stop in the run would excuse
/// their losses. So only a stop within the last lease counts, and only if it is longer than a sixth of a lease: a
/// shorter one leaves time for another renewal.
fn was_stopped(history: &History, section: &Section, losses: Losses) -> bool {
    let from = section.requested;
    let until = section
        .loss_reported
        .or(section.released)
        .unwrap_or(history.end);
    let (from, min_length) = match losses {
        Losses::Unreachable => (from.max(until - history.lease), history.lease / 6),
        Losses::None | Losses::Any => (from, 0),
    };
    let process = history.processes.get(&section.process);
    let mut stops = process.iter().flat_map(|process| &process.stopped);
    stops.any(|&(stopped, continued)| {
        let continued = continued.unwrap_or(Time::MAX);
        stopped < until && continued > from && continued - stopped > min_length
    })
}

fn violation(rule: Rule, section: &Section, from: Time, until: Time, text: &str) -> Violation {
    let (requester, name) = (section.requester(), &section.request.name);
    let held_ms = section
        .acquired
        .map_or(0, |acquired| millis(from - acquired));
    let unlock_error = section.unlock_error.as_deref().unwrap_or("");
    let text =
        format!("{name}: {requester} {text}, {held_ms} ms after the acquisition {unlock_error}");
    Violation::at(from, rule, text).until(until)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MS, history, section};
    use super::*;
    use crate::history::{DataLoss, FaultWindow, Mode};

    fn rules(history: &History, losses: Losses) -> Vec<Rule> {
        let found = check(history, losses);
        found.iter().map(|violation| violation.rule).collect()
    }

    fn outage(from: Time, until: Time) -> FaultWindow {
        FaultWindow {
            from: from * MS,
            until: until * MS,
            is_outage: true,
        }
    }

    #[test]
    fn guard_that_outlives_its_last_possible_renewal_is_found() {
        let mut bad = history(vec![section("a", 0, 5000)]);
        bad.windows.push(outage(1000, 6000));
        assert_eq!(rules(&bad, Losses::Any), [Rule::ValidTooLong]);
        let mut good = history(vec![section("a", 0, 4000)]);
        good.windows.push(outage(1000, 6000));
        assert_eq!(rules(&good, Losses::Any), []);
        // The outage ended in time for a renewal.
        let mut short = history(vec![section("a", 0, 5000)]);
        short.windows.push(outage(1000, 3000));
        assert_eq!(rules(&short, Losses::Any), []);
    }

    #[test]
    fn guard_that_is_valid_after_its_reported_loss_is_found() {
        let mut one = section("a", 0, 100);
        (one.loss_reported, one.valid_after_loss) = (Some(50 * MS), true);
        one.kept_until = None;
        let bad = history(vec![one]);
        assert_eq!(rules(&bad, Losses::Any), [Rule::ValidTooLong]);
    }

    /// Creates a history of a holder whose lease ended at 3 s and that started its release at 9 s.
    fn lease_ended(loss_reported: Option<Time>) -> History {
        let mut one = section("a", 0, 10);
        one.deadline = Some(3000 * MS);
        (one.loss_reported, one.release_started, one.released) = (
            loss_reported.map(|t| t * MS),
            Some(9000 * MS),
            Some(9000 * MS),
        );
        history(vec![one])
    }

    #[test]
    fn loss_that_is_reported_late_or_never_is_found() {
        assert_eq!(rules(&lease_ended(Some(3100)), Losses::Any), []);
        let mut in_call = lease_ended(Some(8000));
        in_call.sections[0].ticket_lease = Some(500 * MS);
        assert_eq!(rules(&in_call, Losses::Any), []);
        let mut simulated = lease_ended(Some(3300));
        simulated.margin = 200 * MS;
        assert_eq!(rules(&simulated, Losses::Any), [Rule::LossReportedLate]);
        assert_eq!(
            rules(&lease_ended(Some(8000)), Losses::Any),
            [Rule::LossReportedLate]
        );
        assert_eq!(
            rules(&lease_ended(None), Losses::Any),
            [Rule::LossReportedLate]
        );
    }

    #[test]
    fn loss_before_the_lease_ends_is_found() {
        let mut early = lease_ended(Some(2900));
        early.sections[0].kept_until = Some(3000 * MS);
        assert_eq!(rules(&early, Losses::Any), [Rule::LostBeforeExpiry]);
        early.sections[0].kept_until = Some(2900 * MS);
        assert_eq!(rules(&early, Losses::Any), []);
        let mut unlocked = history(vec![section("a", 0, 10)]);
        unlocked.sections[0].unlock_error = Some("Lost(NotHeld)".into());
        assert_eq!(rules(&unlocked, Losses::Any), [Rule::LostBeforeExpiry]);
        // The lease ended before the release was answered.
        unlocked.sections[0].released = Some(3010 * MS);
        assert_eq!(rules(&unlocked, Losses::Any), []);
    }

    #[test]
    fn stopped_holder_learns_of_loss_when_it_continues() {
        let mut stopped = lease_ended(Some(8000));
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((1000 * MS, Some(7900 * MS)));
        assert_eq!(rules(&stopped, Losses::Any), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(1000 * MS, Some(4000 * MS))];
        assert_eq!(rules(&stopped, Losses::Any), [Rule::LossReportedLate]);
    }

    #[test]
    fn stop_before_the_last_lease_does_not_excuse_a_loss() {
        let mut stopped = lease_ended(Some(9000));
        stopped.sections[0].deadline = Some(9000 * MS);
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((5500 * MS, Some(6500 * MS)));
        assert_eq!(rules(&stopped, Losses::Unreachable), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(4500 * MS, Some(5500 * MS))];
        assert_eq!(rules(&stopped, Losses::Unreachable), [Rule::AvoidableLoss]);
        assert_eq!(rules(&stopped, Losses::None), []);
    }

    #[test]
    fn stop_during_the_request_excuses_a_loss() {
        let mut stopped = lease_ended(Some(3100));
        (stopped.sections[0].requested, stopped.sections[0].acquired) = (100 * MS, Some(3000 * MS));
        let process = stopped.processes.entry(0).or_default();
        process.stopped.push((110 * MS, Some(2999 * MS)));
        assert_eq!(rules(&stopped, Losses::None), []);
        let process = stopped.processes.entry(0).or_default();
        process.stopped = vec![(10 * MS, Some(90 * MS))];
        assert_eq!(rules(&stopped, Losses::None), [Rule::AvoidableLoss]);
    }

    #[test]
    fn killed_holder_need_not_learn_of_loss() {
        let mut killed = lease_ended(None);
        (
            killed.sections[0].release_started,
            killed.sections[0].released,
        ) = (None, None);
        killed.processes.entry(0).or_default().killed = Some(100 * MS);
        assert_eq!(rules(&killed, Losses::Any), []);
    }

    #[test]
    fn avoidable_loss_is_found() {
        let lost = lease_ended(Some(3100));
        assert_eq!(rules(&lost, Losses::None), [Rule::AvoidableLoss]);
        let mut unlocked = history(vec![section("a", 0, 10)]);
        unlocked.sections[0].unlock_error = Some("Lost(LeaseEnded)".into());
        assert_eq!(rules(&unlocked, Losses::None), [Rule::AvoidableLoss]);
        assert_eq!(rules(&unlocked, Losses::Unreachable), [Rule::AvoidableLoss]);
        unlocked.unreachable_names.insert("a".into());
        assert_eq!(rules(&unlocked, Losses::Unreachable), []);
        unlocked.sections[0].unlock_error = Some("ResponseTimeout".into());
        assert_eq!(rules(&unlocked, Losses::None), []);
    }

    /// A request to release `a` that is sent at `from` and answered 10 ms later.
    fn revocation(from: Time, limit: Time) -> Section {
        let mut one = section("a", from + 10, from + 10);
        one.requested = from * MS;
        one.request.mode = Mode::Ask(Some(limit * MS));
        (one.valid_until, one.deadline, one.kept_until) = (None, None, None);
        one
    }

    /// A hold that is acquired at 0 and lost at `at` for this reason, long before its lease ends.
    fn lost(at: Time, reason: &str) -> Section {
        let mut one = section("a", 0, at);
        (one.loss_reported, one.unlock_error) = (Some(at * MS), Some(reason.to_owned()));
        one
    }

    #[test]
    fn revoked_hold_may_be_lost_from_the_limit_on() {
        let rules = |section: Section, request: Section| {
            rules(&history(vec![section, request]), Losses::None)
        };
        let too_early = [Rule::LostBeforeExpiry, Rule::AvoidableLoss];
        assert_eq!(
            rules(lost(4505, "Lost(Revoked)"), revocation(500, 4000)),
            []
        );
        assert_eq!(
            rules(lost(3000, "Lost(Revoked)"), revocation(500, 4000)),
            too_early
        );
        assert_eq!(
            rules(lost(4505, "Lost(NotHeld)"), revocation(500, 4000)),
            too_early
        );
        // Another hold was revoked, or none.
        let mut later = lost(4505, "Lost(Revoked)");
        (later.requested, later.acquired) = (600 * MS, Some(600 * MS));
        assert_eq!(rules(later.clone(), revocation(500, 4000)), too_early);
        let mut free = revocation(700, 4000);
        free.acquired = None;
        assert_eq!(rules(later, free), too_early);
    }

    #[test]
    fn reentered_hold_may_have_been_revoked_before() {
        let of_owner = |mut one: Section| {
            one.request.owner = Some(7);
            one
        };
        let outer = of_owner(section("a", 0, 2000));
        let mut inner = of_owner(lost(5000, "Lost(Revoked)"));
        (inner.requested, inner.acquired) = (1000 * MS, Some(1000 * MS));
        let with = |outer: Section| {
            let sections = vec![outer, inner.clone(), revocation(500, 4000)];
            rules(&history(sections), Losses::None)
        };
        assert_eq!(with(outer.clone()), []);
        let ended = of_owner(section("a", 0, 900));
        assert_eq!(with(ended), [Rule::LostBeforeExpiry, Rule::AvoidableLoss]);
        // It was re-entered just before it was lost.
        let mut outer = of_owner(lost(5000, "Lost(Revoked)"));
        outer.valid_until = Some(900 * MS);
        assert_eq!(with(outer), []);
    }

    #[test]
    fn request_concerns_next_hold_of_owner_only_if_release_may_be_lost() {
        let of_owner = |mut one: Section| {
            one.request.owner = Some(7);
            one
        };
        let before = of_owner(lost(4505, "Lost(Revoked)"));
        let mut next = of_owner(lost(9003, "Lost(Revoked)"));
        (next.requested, next.acquired) = (8900 * MS, Some(9000 * MS));
        let with = |before: &Section, next: &Section, until: Time| {
            let sections = vec![before.clone(), next.clone(), revocation(500, 4000)];
            let mut history = history(sections);
            let (from, until) = (0, until * MS);
            let loss = DataLoss::UNCONFIRMED_WRITES;
            history.record_data_loss(from, until, loss);
            rules(&history, Losses::None)
        };
        let too_early = [Rule::LostBeforeExpiry, Rule::AvoidableLoss];
        assert_eq!(with(&before, &next, 4600), []);
        // A hold in between, whose release is lost as well.
        let mut between = of_owner(section("a", 4550, 8000));
        (between.requested, between.acquired) = (4550 * MS, Some(4550 * MS));
        for (until, explained) in [(8100, true), (4600, false)] {
            let sections = vec![
                before.clone(),
                between.clone(),
                next.clone(),
                revocation(500, 4000),
            ];
            let mut history = history(sections);
            let loss = DataLoss::UNCONFIRMED_WRITES;
            let (from, until) = (0, until * MS);
            history.record_data_loss(from, until, loss);
            assert_eq!(rules(&history, Losses::None).is_empty(), explained);
        }
        // The promoted replica had all acquisitions.
        let mut lossless = history(vec![before.clone(), next.clone(), revocation(500, 4000)]);
        assert_eq!(rules(&lossless, Losses::None), too_early);
        // A failover just after the loss may lack the release, too, which follows later.
        for (from, explained) in [(6005, true), (6006, false)] {
            lossless.failovers = vec![(from * MS, 7000 * MS)];
            assert_eq!(rules(&lossless, Losses::None).is_empty(), explained);
        }
        // So does that of a dropped guard. Replicas had time for one that was answered.
        for (was_dropped, from, explained) in [
            (false, 4505, true),
            (false, 4506, false),
            (true, 6005, true),
            (true, 6006, false),
        ] {
            let mut released = of_owner(section("a", 0, 4505));
            released.was_dropped = was_dropped;
            let mut history = history(vec![released, next.clone(), revocation(500, 4000)]);
            history.failovers = vec![(from * MS, 7000 * MS)];
            assert_eq!(rules(&history, Losses::None).is_empty(), explained);
        }
        lossless.failovers = vec![(0, 4600 * MS)];
        assert_eq!(rules(&lossless, Losses::None), []);
        // The new master had the release.
        assert_eq!(with(&before, &next, 1000), too_early);
        // The hold was lost for another reason.
        let mut not_held = next.clone();
        not_held.unlock_error = Some("Lost(NotHeld)".into());
        assert_eq!(with(&before, &not_held, 4600), too_early);
        // The owner reads in between: the request is for the writer.
        let mut read = of_owner(section("a", 4600, 8000));
        read.request.mode = Mode::Shared;
        lossless.sections.push(read.clone());
        assert_eq!(rules(&lossless, Losses::None), []);
        read.request.mode = next.request.mode;
        lossless.sections.pop();
        lossless.sections.push(read);
        assert_eq!(rules(&lossless, Losses::None), too_early);
        // Another owner was revoked.
        let mut other = before.clone();
        other.request.owner = Some(8);
        assert_eq!(with(&other, &next, 4600), too_early);
    }

    #[test]
    fn request_concerns_hold_that_was_granted_to_request_that_gave_up_in_fault() {
        let of_owner = |mut one: Section| {
            (one.request.name, one.request.owner) = ("fair:few".to_owned(), Some(7));
            one
        };
        // It waits from 1000 on, and gives up at 1900 although the store has granted the lock to it.
        let mut waiting = of_owner(Section::new(0, 1000 * MS, section("a", 0, 0).request));
        waiting.answered = Some(1900 * MS);
        let mut next = of_owner(lost(4505, "Lost(Revoked)"));
        (next.requested, next.acquired) = (3500 * MS, Some(3600 * MS));
        let mut request = revocation(1500, 1000);
        request.request.name = "fair:few".to_owned();
        let with = |fault: (Time, Time), others: &[&Section]| {
            let others = others.iter().copied().cloned();
            let sections = [next.clone(), request.clone()].into_iter().chain(others);
            let mut history = history(sections.collect());
            let window = FaultWindow {
                is_outage: false,
                ..outage(fault.0, fault.1)
            };
            history.windows.push(window);
            rules(&history, Losses::None)
        };
        let fault = (1200, 3400);
        let too_early = [Rule::LostBeforeExpiry, Rule::AvoidableLoss];
        assert_eq!(with(fault, &[&waiting]), []);
        assert_eq!(with(fault, &[]), too_early);
        // It gave up before the fault or after it, or the next request came long after it.
        for (fault, explained) in [
            ((1900, 3400), true),
            ((1901, 3400), false),
            ((1200, 1899), false),
            ((1200, 2000), true),
            ((1200, 1999), false),
        ] {
            assert_eq!(with(fault, &[&waiting]).is_empty(), explained, "{fault:?}");
        }
        // It was requested after the request to release was answered.
        let mut later = waiting.clone();
        for (requested, explained) in [(1510, true), (1511, false)] {
            later.requested = requested * MS;
            assert_eq!(with(fault, &[&later]).is_empty(), explained);
        }
        // The owner released the lock after it gave up: then the store had nothing of the owner.
        for (released, explained) in [(1900, true), (1901, false)] {
            let released = of_owner(section("a", 1200, released));
            assert_eq!(with(fault, &[&waiting, &released]).is_empty(), explained);
        }
        // Another owner held the lock after the answer.
        for (acquired, explained) in [(1510, true), (1511, false), (3500, false)] {
            let mut other = of_owner(section("a", acquired, acquired + 1));
            other.request.owner = None;
            assert_eq!(with(fault, &[&waiting, &other]).is_empty(), explained);
        }
        // Another owner gave up.
        let mut other = waiting.clone();
        other.request.owner = Some(8);
        assert_eq!(with(fault, &[&other]), too_early);
        // A lock without a queue is not granted to a waiting request.
        let mut sections = vec![next.clone(), request.clone(), waiting];
        for one in &mut sections {
            one.request.name = "lock:few".to_owned();
        }
        let mut plain = history(sections);
        plain.windows.push(outage(1200, 3400));
        assert_eq!(rules(&plain, Losses::None), too_early);
    }

    #[test]
    fn guard_that_outlives_limit_and_lease_of_revocation_is_found() {
        let valid_until = |until| history(vec![section("a", 0, until), revocation(500, 1000)]);
        assert_eq!(rules(&valid_until(3510), Losses::None), []);
        assert_eq!(
            rules(&valid_until(3520), Losses::None),
            [Rule::ValidTooLong]
        );
        let mut faulty = valid_until(3520);
        faulty.windows.push(outage(600, 700));
        assert_eq!(rules(&faulty, Losses::None), []);
        // A later hold.
        let mut later = valid_until(3520);
        later.sections[0].acquired = Some(505 * MS);
        assert_eq!(rules(&later, Losses::None), []);
    }

    /// A hold that is acquired at 0 with limits of 500 ms, fed at 300 ms, and lost at this time.
    fn limited(limits: Limits, at: Time, reason: &str) -> Section {
        let mut one = lost(at, reason);
        (one.request.limits, one.kept_until) = (limits, Some(at * MS));
        one.fed = limits.fed_every.map(|_| 300 * MS);
        one
    }

    #[test]
    fn limited_hold_is_lost_at_its_limit_for_that_reason() {
        let limit = Some(500 * MS);
        let lease = Limits {
            lease: limit,
            ..Limits::default()
        };
        let at_most = Limits {
            at_most: limit,
            ..Limits::default()
        };
        let fed_every = Limits {
            fed_every: limit,
            ..Limits::default()
        };
        let (too_long, not_fed) = ("Lost(HeldTooLong { limit: 500ms })", "Lost(NotFed)");
        let rules =
            |limits, at, reason| rules(&history(vec![limited(limits, at, reason)]), Losses::None);
        for (limits, at, reason) in [
            (lease, 500, "Lost(LeaseEnded)"),
            (at_most, 500, too_long),
            (fed_every, 800, not_fed),
        ] {
            assert_eq!(rules(limits, at, reason), [], "{limits:?}");
            assert_eq!(rules(limits, at, "Unsettled"), [], "{limits:?}");
            assert_eq!(rules(limits, at - 1, reason), [Rule::AvoidableLoss]);
        }
        assert_eq!(rules(at_most, 500, "Lost(NotHeld)"), [Rule::AvoidableLoss]);
        // Once because of the reason, and once because of the loss.
        let other = [Rule::AvoidableLoss; 2];
        assert_eq!(rules(at_most, 800, not_fed), other);
        assert_eq!(rules(Limits::default(), 500, too_long), other);
    }

    #[test]
    fn limit_counts_from_acquisition() {
        for limits in [
            Limits {
                at_most: Some(500 * MS),
                ..Limits::default()
            },
            Limits {
                fed_every: Some(500 * MS),
                ..Limits::default()
            },
        ] {
            let waited = |at, stops: &[(Time, Time)]| {
                let mut one = limited(limits, at, "Unsettled");
                (one.requested, one.acquired, one.fed) = (-1000 * MS, Some(0), None);
                let mut history = history(vec![one]);
                let process = history.processes.entry(0).or_default();
                let stops = stops.iter();
                process.stopped = stops.map(|(a, b)| (a * MS, Some(b * MS))).collect();
                was_at_limit(&history, &history.sections[0])
            };
            assert!(waited(500, &[]));
            assert!(!waited(499, &[]));
            assert!(!waited(499, &[(-100, -1)]));
            // The client may have acquired it before the stop.
            assert!(waited(400, &[(-100, 0)]));
            assert!(!waited(399, &[(-100, 0)]));
            assert!(waited(300, &[(-200, -100), (-100, 0)]));
        }
    }

    #[test]
    fn guard_that_outlives_limit_is_found() {
        let mut one = section("a", 0, 100);
        one.valid_after_limit = Some(90 * MS);
        assert_eq!(
            rules(&history(vec![one]), Losses::Any),
            [Rule::ValidTooLong]
        );
    }

    #[test]
    fn ticket_that_ended_before_its_answer_is_no_loss() {
        let mut one = section("a", 0, 10);
        (one.ticket_lease, one.unlock_error) = (Some(80 * MS), Some("Lost(NotHeld)".into()));
        one.released = Some(90 * MS);
        assert_eq!(rules(&history(vec![one.clone()]), Losses::None), []);
        one.released = Some(89 * MS);
        let found = rules(&history(vec![one]), Losses::None);
        assert_eq!(found, [Rule::LostBeforeExpiry, Rule::AvoidableLoss]);
    }
}
