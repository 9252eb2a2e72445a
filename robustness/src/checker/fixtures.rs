//! Handmade histories for tests.

use std::time::Duration;

use crate::clock::Time;
use crate::history::{History, Mode, Request, Section};

pub(super) const MS: Time = 1_000_000;

/// Creates a section that is requested and acquired at `from`, and valid and held until `until`, in milliseconds.
pub(super) fn section(name: &str, from: Time, until: Time) -> Section {
    let (from, until) = (from * MS, until * MS);
    let request = Request {
        task: 0,
        client: 0,
        owner: None,
        name: name.to_owned(),
        mode: Mode::Exclusive,
        is_member: false,
        ticket: None,
    };
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
    history.end = 60_000 * MS;
    history.processes.entry(0).or_default();
    history.sections = sections;
    history
}
