//! Handmade histories for tests.

use std::time::Duration;

use super::allowances::MARGIN;
use crate::clock::{Time, nanos};
use crate::history::{History, MadeTicket, Request, Section};

pub(super) const MS: Time = 1_000_000;

/// Creates a section that is requested and acquired at `from`, and valid and held until `until`, in milliseconds.
pub(super) fn section(name: &str, from: Time, until: Time) -> Section {
    let (from, until) = (from * MS, until * MS);
    let request = Request::exclusive(0, name.to_owned());
    Section {
        answered: Some(from),
        acquired: Some(from),
        valid_until: Some(until),
        deadline: Some(until + 3000 * MS),
        kept_until: Some(until + 3000 * MS),
        release_started: Some(until),
        released: Some(until),
        ..Section::new(0, from, request)
    }
}

/// Creates a history with a lease of 3 s that ends at 60 s.
pub(super) fn history(sections: Vec<Section>) -> History {
    let mut history = History::new(Duration::from_secs(3));
    history.margin = nanos(MARGIN);
    history.end = 60_000 * MS;
    history.processes.entry(0).or_default();
    history.sections = sections;
    history
}

/// Makes a ticket of the hold when the section is released, which the store keeps until `kept_until`, in milliseconds.
pub(super) fn becomes_ticket(one: Section, text: &str, kept_until: Time) -> Section {
    let kept_until = kept_until * MS;
    let ticket = MadeTicket {
        text: Some(text.to_owned()),
        kept_until,
        kept_first: kept_until,
        requested: None,
        adopted: None,
        may_get_back: false,
        free_at: kept_until,
    };
    Section {
        ticket: Some(ticket),
        ..one
    }
}

/// Makes the request of a section one that adopts a ticket.
pub(super) fn adopts(text: &str, mut one: Section) -> Section {
    one.request.ticket = Some(text.to_owned());
    one
}
