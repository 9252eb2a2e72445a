//! Checks that fencing tokens grow, and that the resource that checks them loses no write.
//!
//! 1. A request that starts after another acquisition was answered must get a greater token.
//!    The adopter of a ticket has the token of its maker. No other acquisition may have a greater one by then, except a
//!    re-entry of the owner that made the first ticket of the hold.
//! 2. Acquisitions that overlap may get their tokens in any order, but no two have the same one.
//! 3. If an owner's new guard has the token of an earlier one, and the owner released a guard in between, the rule is
//!    [`Rule::SameToken`]: the store may have forgotten that release. All other violations are [`Rule::Tokens`].
//! 4. Where tokens follow the clock, lost data explains no violation ([`Rule::ClockTokens`]), unless the clock was set back
//!    further than the time between the two acquisitions, and not forward again. The token of an adopter is as old as its
//!    hold: after a loss, the other token may be that of a later hold beside it.
//! 5. Each write to the resource adds one to a number, so it must equal the count of accepted writes.

use super::violation::{Rule, Violation};
use crate::clock::Time;
use crate::history::{History, Section};
use crate::names::follows_clock;
use crate::resource::Tally;

pub(super) fn check(history: &History, tallies: &[Tally]) -> Vec<Violation> {
    let mut found = Vec::new();
    for (name, sections) in history.by_name() {
        found.extend(check_name(history, name, &sections));
    }
    for tally in tallies {
        if tally.value != tally.accepted {
            let text = format!(
                "{}: {} writes accepted, but the value is {}",
                tally.name, tally.accepted, tally.value
            );
            found.push(Violation::at(history.end, Rule::LostWrite, text));
        }
    }
    found
}

/// Finds acquisitions of one lock whose token is not greater than that of an earlier one, or is used twice.
fn check_name(history: &History, name: &str, sections: &[&Section]) -> Vec<Violation> {
    let has_token = |one: &&&Section| one.acquired.is_some() && one.token.is_some();
    let mut by_request: Vec<&Section> = sections.iter().filter(has_token).copied().collect();
    let mut by_acquisition = by_request.clone();
    by_request.sort_by_key(|one| one.requested);
    by_acquisition.sort_by_key(|one| one.acquired);
    let mut found = Vec::new();
    let mut before = by_acquisition.iter().peekable();
    let mut greatest: Option<&Section> = None;
    for one in &by_request {
        while let Some(other) = before.next_if(|other| other.acquired < Some(one.requested)) {
            if greatest.is_none_or(|greatest| greatest.token < other.token) {
                greatest = Some(other);
            }
        }
        if let Some(greatest) = greatest
            && one.token <= greatest.token
            && !continues_hold(sections, one, greatest)
        {
            found.push(token_violation(history, name, sections, one, greatest));
        }
    }
    let mut by_token = by_request;
    by_token.sort_by_key(|one| (one.token, one.acquired));
    for pair in by_token.windows(2) {
        if let [one, other] = pair
            && one.token == other.token
            && !other.adopts(one)
            && (other.requested <= one.acquired.unwrap_or(Time::MAX)
                || other.request.ticket.is_some())
        {
            found.push(token_violation(history, name, sections, other, one));
        }
    }
    found
}

/// Returns whether a section adopts a ticket of the hold that another section acquired or re-entered before.
fn continues_hold(sections: &[&Section], one: &Section, other: &Section) -> bool {
    let Some(maker) = sections.iter().find(|maker| one.adopts(maker)) else {
        return false;
    };
    let is_reentry = maker.same_owner(other)
        && maker.acquired < other.acquired
        && other.release_started <= maker.released;
    let is_maker = one.token == other.token && std::ptr::eq(*maker, other);
    is_maker || is_reentry || continues_hold(sections, maker, other)
}

/// Returns the section that got the token of another one: the first of its hold, which tickets pass on.
fn first_of_hold<'a>(sections: &[&'a Section], one: &'a Section) -> &'a Section {
    let maker = sections.iter().find(|maker| one.adopts(maker));
    maker.map_or(one, |maker| first_of_hold(sections, maker))
}

/// Returns whether the clock explains that the token of `one` is not greater than that of `other`, which was acquired before.
fn was_set_back(history: &History, one: &Section, other: &Section) -> bool {
    let acquired = other.acquired.unwrap_or(other.requested);
    let until = one.acquired.unwrap_or(one.requested);
    // While one of the two is requested, a step may come before its token or after it.
    let counts = |&&(at, forward): &&(Time, Time)| match forward > 0 {
        true => acquired < at && at < one.requested,
        false => (other.requested..=until).contains(&at),
    };
    let between = history.clock_steps.iter().filter(counts);
    let forward: Time = between.map(|step| step.1).sum();
    -forward >= one.requested.saturating_sub(acquired)
}

fn token_violation(
    history: &History,
    name: &str,
    sections: &[&Section],
    one: &Section,
    other: &Section,
) -> Violation {
    let at = one.acquired.unwrap_or(one.requested);
    let mut released = sections.iter().filter(|guard| guard.same_owner(one));
    let is_released = released.any(|guard| {
        // A lost one is released, too: at a revocation, the store may have the hold.
        let left = [guard.release_started, guard.loss_reported];
        let mut left = left.into_iter().flatten();
        left.any(|left| left <= at && Some(left) >= other.acquired)
    });
    // A token may be one more than the latest, which was that of the clock.
    let mut until_other = sections
        .iter()
        .filter(|first| first.acquired <= other.acquired && first.token >= one.token);
    let got_token = first_of_hold(sections, one);
    let is_explained = until_other.any(|first| was_set_back(history, got_token, first));
    let is_older = other.acquired < Some(got_token.requested);
    let rule = match one.same_owner(other) && is_released && one.token == other.token {
        true => Rule::SameToken,
        false if follows_clock(name) && is_older && !is_explained => Rule::ClockTokens,
        false => Rule::Tokens,
    };
    let token = |section: &Section| section.token.unwrap_or_default();
    let text = format!(
        "{name}: {} has token {}, but before it {} had {}",
        one.requester(),
        token(one),
        other.requester(),
        token(other)
    );
    Violation::at(at, rule, text)
}

#[cfg(test)]
mod tests {
    use super::super::explain;
    use super::super::fixtures::{MS, adopts, becomes_ticket, history, section};
    use super::*;
    use crate::history::DataLoss;

    fn with_tokens(tokens: &[u64]) -> History {
        let sections = tokens.iter().zip(0..).map(|(&token, at)| {
            let mut one = section("fenced", at * 10, at * 10 + 5);
            one.token = Some(token);
            one
        });
        history(sections.collect())
    }

    fn with_clock_tokens(tokens: &[u64]) -> History {
        let mut one = with_tokens(tokens);
        for section in &mut one.sections {
            section.request.name = "fenced:0".into();
        }
        one
    }

    #[test]
    fn growing_tokens_are_accepted() {
        assert!(check(&with_tokens(&[1, 2, 5, 9]), &[]).is_empty());
    }

    #[test]
    fn token_that_does_not_grow_is_found() {
        assert_eq!(check(&with_tokens(&[1, 2, 2, 3]), &[]).len(), 1);
        assert_eq!(check(&with_tokens(&[1, 7, 3, 8]), &[]).len(), 1);
    }

    #[test]
    fn equal_tokens_of_concurrent_requests_are_found() {
        let mut both = with_tokens(&[4, 4]);
        both.sections[1].requested = 0;
        assert_eq!(check(&both, &[]).len(), 1);
        both.sections[1].token = Some(5);
        assert!(check(&both, &[]).is_empty());
    }

    #[test]
    fn same_token_is_distinguished_from_other_violations() {
        let mut one = with_tokens(&[4, 4]);
        let rule = |one: &History| check(one, &[])[0].rule;
        assert_eq!(rule(&one), Rule::Tokens);
        for section in &mut one.sections {
            (section.request.owner, section.holds) = (Some(7), Some(1));
        }
        assert_eq!(rule(&one), Rule::SameToken);
        let left = one.sections[0].release_started.take();
        assert_eq!(rule(&one), Rule::Tokens);
        // Another guard of the owner was released.
        let mut third = one.sections[0].clone();
        (third.token, third.release_started) = (Some(3), left);
        one.sections.push(third);
        assert_eq!(rule(&one), Rule::SameToken);
        // Or the guard was lost.
        one.sections.pop();
        one.sections[0].loss_reported = left;
        assert_eq!(rule(&one), Rule::SameToken);
    }

    #[test]
    fn forgotten_release_explains_only_that_its_owner_continues() {
        let mut one = with_tokens(&[4, 4]);
        one.record_data_loss(4 * MS, 5 * MS, DataLoss::UNCONFIRMED_WRITES);
        let explains = |one: &History| explain(&check(one, &[])[0], one).is_some();
        assert!(!explains(&one));
        for section in &mut one.sections {
            (section.request.owner, section.holds) = (Some(7), Some(1));
        }
        assert!(explains(&one));
        (one.data_losses[0].from, one.data_losses[0].until) = (-9000 * MS, -5000 * MS);
        assert!(!explains(&one));
    }

    #[test]
    fn lost_data_does_not_explain_tokens_of_the_clock_unless_it_was_set_back() {
        let mut one = with_tokens(&[4, 3]);
        one.record_data_loss(5 * MS, 6 * MS, DataLoss::NO_DATA);
        let explains = |one: &History| explain(&check(one, &[])[0], one).is_some();
        assert!(explains(&one));
        for section in &mut one.sections {
            section.request.name = "fenced:0".into();
        }
        assert!(!explains(&one));
        let between = one.sections[1].requested - one.sections[0].acquired.unwrap();
        one.clock_steps.push((6 * MS, 1 - between));
        assert!(!explains(&one));
        one.clock_steps.push((7 * MS, -1));
        assert!(explains(&one));
        // It is set forward again, certainly between the two acquisitions.
        let first = one.sections[0].acquired.unwrap();
        let second = one.sections[1].requested;
        for (at, explained) in [
            (first, true),
            (first + 1, false),
            (second - 1, false),
            (second, true),
        ] {
            one.clock_steps.push((at, 1));
            assert_eq!(explains(&one), explained);
            one.clock_steps.pop();
        }
    }

    /// The clock was set back before the second token, which is therefore one more than the first.
    #[test]
    fn clock_that_was_set_back_explains_tokens_until_it_has_caught_up() {
        let explains = |step: Time, first: u64| {
            let mut one = with_clock_tokens(&[first, 5, 3]);
            one.record_data_loss(5 * MS, 6 * MS, DataLoss::NO_DATA);
            let [first, second, third] = &one.sections[..] else {
                panic!("three sections");
            };
            let at = (first.acquired.unwrap() + second.requested) / 2;
            let since = third.requested - first.acquired.unwrap();
            one.clock_steps.push((at, -since - step));
            explain(&check(&one, &[])[0], &one).is_some()
        };
        assert!(explains(0, 4) && !explains(-1, 4));
        // The first one was not that of the second.
        assert!(!explains(0, 2));
    }

    /// However long a hold lasts until its ticket is adopted, its token is as old as it.
    #[test]
    fn clock_that_was_set_back_explains_the_token_of_an_adopter() {
        let explains = |behind: Time| {
            let mut one = with_clock_tokens(&[5, 4, 4]);
            one.record_data_loss(5 * MS, 6 * MS, DataLoss::NO_DATA);
            one.sections[1] = becomes_ticket(one.sections[1].clone(), "one", 3000);
            one.sections[2] = adopts("one", one.sections[2].clone());
            let between = one.sections[1].requested - one.sections[0].acquired.unwrap();
            one.clock_steps.push((6 * MS, -between - behind));
            let found = check(&one, &[]);
            assert_eq!(found.len(), 2);
            found.iter().all(|found| explain(found, &one).is_some())
        };
        assert!(explains(0) && !explains(-1));
    }

    /// A lost release or acquisition lets a ticket and a later hold exist beside each other.
    #[test]
    fn lost_data_explains_an_older_token_of_the_clock_for_an_adopter() {
        let mut one = with_clock_tokens(&[4, 5, 4]);
        one.sections[0] = becomes_ticket(one.sections[0].clone(), "one", 3000);
        one.sections[2] = adopts("one", one.sections[2].clone());
        let rules = |one: &History| -> Vec<Rule> {
            check(one, &[]).iter().map(|found| found.rule).collect()
        };
        assert_eq!(rules(&one), [Rule::Tokens]);
        let first = one.sections[0].requested;
        one.sections[1].requested = first - 1;
        one.sections[1].acquired = Some(first);
        assert_eq!(rules(&one), [Rule::Tokens]);
        one.sections[1].acquired = Some(first - 1);
        assert!(rules(&one).contains(&Rule::ClockTokens));
    }

    #[test]
    fn lost_write_is_found() {
        let tally = |accepted, value| Tally {
            name: "fenced".into(),
            accepted,
            value,
        };
        let none = history(Vec::new());
        assert!(check(&none, &[tally(7, 7)]).is_empty());
        assert_eq!(check(&none, &[tally(7, 6)])[0].rule, Rule::LostWrite);
    }

    /// The token of a ticket is that of its maker, also for an adopter that made a ticket again.
    #[test]
    fn adopter_of_ticket_has_token_of_maker() {
        let mut one = with_tokens(&[4, 4, 4, 5]);
        let sections = std::mem::take(&mut one.sections);
        let [maker, adopter, last, next] = sections.try_into().unwrap();
        let maker = becomes_ticket(maker, "one", 3000);
        let adopter = becomes_ticket(adopts("one", adopter), "two", 3000);
        one.sections = vec![maker, adopter, adopts("two", last), next];
        assert!(check(&one, &[]).is_empty());
        // Another owner has acquired the lock before.
        one.sections[2].token = Some(5);
        one.sections[2].request.ticket = None;
        one.sections[3] = adopts("two", one.sections[3].clone());
        one.sections[3].token = Some(4);
        assert_eq!(check(&one, &[])[0].rule, Rule::Tokens);
        // Two clients adopt one ticket.
        let mut two = with_tokens(&[4, 4, 4]);
        two.sections[0] = becomes_ticket(two.sections[0].clone(), "one", 3000);
        for section in &mut two.sections[1..] {
            section.request.ticket = Some("one".into());
        }
        assert_eq!(check(&two, &[])[0].rule, Rule::Tokens);
    }

    #[test]
    fn ticket_of_outer_guard_has_older_token_than_inner_guard() {
        let mut one = with_tokens(&[4, 5, 4]);
        one.sections[0] = becomes_ticket(one.sections[0].clone(), "one", 3000);
        one.sections[0].released = Some(18 * MS);
        one.sections[2].request.ticket = Some("one".into());
        assert_eq!(check(&one, &[]).len(), 1);
        for section in &mut one.sections[..2] {
            section.request.owner = Some(7);
        }
        assert!(check(&one, &[]).is_empty());
        // Not released when the ticket was made.
        one.sections[1].release_started = Some(19 * MS);
        assert_eq!(check(&one, &[]).len(), 1);
    }
}
