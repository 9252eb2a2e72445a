//! `redlatch watch`: one line for each event.

use redlatch::inspect::{Change, Event, HeldBy};
use redlatch::{Client, OwnerId};
use serde::Serialize;

use crate::args::show::Watch;
use crate::exit::{self, Failure};
use crate::output::stderr::{note, warning};
use crate::output::{stdout, timestamp};
use crate::process::signals::Signals;
use crate::store;
use crate::store::args::StoreArgs;
use crate::text;

/// An event in JSON. The first two fields are present for every event, the others where they apply.
#[derive(Debug, Default, Serialize)]
struct Line {
    time: String,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    side: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    permit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(crate) async fn watch(store_args: &StoreArgs, watch: &Watch) -> Result<u8, Failure> {
    let mut signals = Signals::catch_ending()?;
    let mut reader_left = stdout::reader_left()?;
    let work = async {
        let client = store::connect(store_args, Client::builder()).await?;
        let mut events = client.watch(&watch.pattern);
        let mut interrupted = false;
        loop {
            let event = events.next().await?;
            if !watch.json {
                match &event {
                    Event::Interrupted { error, .. } => {
                        interrupted = true;
                        warning!("changes are not seen at present: {error}");
                        continue;
                    }
                    Event::Synchronized => {
                        match interrupted {
                            true => {
                                note!("watching again; what began and ended meanwhile is missing")
                            }
                            false => note!("watching {}", watch.pattern),
                        }
                        continue;
                    }
                    _ => {}
                }
            }
            let line = Line::new(event);
            let is_open = match watch.json {
                true => stdout::json_if_open(&[line]).await?,
                false => stdout::lines_if_open([line.text()]).await?,
            };
            if !is_open {
                return Ok(exit::OK);
            }
        }
    };
    tokio::select! {
        biased;
        code = signals.next_end() => Ok(code),
        _ = &mut reader_left => Ok(exit::OK),
        ended = work => ended,
    }
}

impl Line {
    fn new(event: Event) -> Line {
        match event {
            Event::Changed {
                name, kind, change, ..
            } => Line {
                name: Some(name),
                kind: Some(kind.to_string()),
                ..Line::of_change(change)
            },
            Event::Interrupted { error, .. } => Line {
                error: Some(error.to_string()),
                ..Line::named("interrupted")
            },
            Event::Synchronized => Line::named("synchronized"),
            _ => Line::named("unknown"),
        }
    }

    fn named(event: &'static str) -> Line {
        Line {
            time: timestamp(),
            event,
            ..Line::default()
        }
    }

    fn of_change(change: Change) -> Line {
        match change {
            Change::Held(by) => Line::of_holder("held", &by),
            Change::Acquired(by) => Line::of_holder("acquired", &by),
            Change::Released(by) => Line::of_holder("released", &by),
            Change::Expired(by) => Line::of_holder("expired", &by),
            Change::Waiting(owner) => Line::of_waiter("waiting", owner),
            Change::GaveUp(owner) => Line::of_waiter("gave-up", owner),
            Change::Counted(value) => Line {
                value: Some(value),
                ..Line::named("counted")
            },
            Change::Deleted => Line::named("deleted"),
            _ => Line::named("changed"),
        }
    }

    fn of_waiter(event: &'static str, owner: OwnerId) -> Line {
        Line {
            owner: Some(owner.into()),
            ..Line::named(event)
        }
    }

    fn of_holder(event: &'static str, by: &HeldBy) -> Line {
        Line {
            owner: by.owner().map(ToString::to_string),
            side: match by {
                HeldBy::Reader(_) => Some("read"),
                HeldBy::Writer(_) => Some("write"),
                _ => None,
            },
            permit: match by {
                HeldBy::Permit(permit) => Some(permit.to_string()),
                _ => None,
            },
            ..Line::named(event)
        }
    }

    /// Returns the event in columns that are separated by two spaces, as in a table. The columns of
    /// names and owners have no fixed width, because later names are not known.
    fn text(&self) -> String {
        let owner = match (&self.owner, self.side) {
            (Some(owner), Some(side)) => format!("{owner} ({side})"),
            (Some(owner), None) => owner.clone(),
            (None, _) => match (&self.permit, self.value) {
                (Some(permit), _) => format!("permit {permit}"),
                (None, Some(value)) => format!("({})", text::number(value)),
                (None, None) => "-".into(),
            },
        };
        let name = self.name.as_deref().unwrap_or("-");
        let kind = self.kind.as_deref().unwrap_or("-");
        format!("{}  {:8}  {name}  {owner}  {kind}", self.time, self.event)
    }
}
