//! `redlatch show` and `ls`. They print tables or JSON to standard output.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, SystemTime};

use redlatch::inspect::{HeldPermit, Holder, ObjectState, RegistryEntry, Waiter};
use redlatch::{Client, Expiry};
use serde::Serialize;

use crate::args::show::{Ls, Show};
use crate::exit::{self, Failure};
use crate::output::{self, escape, stdout};
use crate::store::args::StoreArgs;
use crate::{duration, store, text};

/// An object in JSON. The first six fields are present for every object, the others where they
/// apply.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Object {
    name: String,
    kind: Option<String>,
    /// For people.
    #[serde(skip)]
    shown_kind: Option<String>,
    held: bool,
    owner: Option<String>,
    holds: u32,
    remaining_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    registered: Option<Registered>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    holders: Vec<OwnerEntry>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    queue: Vec<OwnerEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    available: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<Vec<PermitEntry>>,
}

/// A holder or a waiter.
#[derive(Debug, Default, Serialize)]
struct OwnerEntry {
    owner: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    side: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holds: Option<u32>,
    remaining_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    registered: Option<Registered>,
}

/// An acquired permit.
#[derive(Debug, Serialize)]
struct PermitEntry {
    id: String,
    remaining_ms: Option<u64>,
}

/// A holder or waiter that is in the registry, in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Registered {
    host: String,
    pid: u32,
    program: String,
    version: String,
    label: Option<String>,
    kind: String,
    since: String,
    age_ms: u64,
    note: Option<String>,
    /// For people.
    #[serde(skip)]
    pub(crate) text: String,
}

impl Registered {
    pub(crate) fn new(entry: &RegistryEntry) -> Registered {
        let client = &*entry.client;
        Registered {
            host: client.host.clone(),
            pid: client.pid,
            program: client.program.clone(),
            version: client.version.clone(),
            label: client.label.clone(),
            kind: entry.kind.clone(),
            since: text::utc_time(text::ago(SystemTime::now(), entry.age)),
            age_ms: whole_millis(entry.age),
            note: entry.note.clone(),
            text: text::client(entry),
        }
    }
}

pub(crate) async fn show(store_args: &StoreArgs, show: &Show) -> Result<u8, Failure> {
    let quiet = output::settings().quiet;
    if quiet && show.json {
        return Err(Failure::usage(
            "--quiet and --json cannot be used together: with --quiet, show prints nothing",
        ));
    }
    store::check_name(&show.name).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    let state = client.inspect(&show.name).await?;
    let sentences: Vec<String> = state.iter().flat_map(sentences).collect();
    let objects = [Object::new(show.name.clone(), state)];
    if quiet {
        return Ok(if objects[0].held {
            exit::OK
        } else {
            exit::FREE
        });
    }
    match show.json {
        true => stdout::json(&objects).await,
        false => stdout::lines(table(&objects, false).into_iter().chain(sentences)).await,
    }
}

/// Returns the table for one object.
pub(crate) fn table_of(name: &str, state: &Option<ObjectState>) -> Vec<String> {
    table(&[Object::new(name.to_owned(), state.clone())], false)
}

/// Returns a line for each holder and waiter that is in the registry, and why the holders of permits are unknown.
fn sentences(state: &ObjectState) -> Vec<String> {
    if let ObjectState::Counter { .. } = state {
        let unknown = "holders of permits without a lease are unknown: the store has only the number of free permits";
        return vec![unknown.to_owned()];
    }
    let holders = state.holders().into_iter();
    let holders = holders.filter(|holder| holder.registered.is_some());
    let holders = holders.map(|holder| format!("held by {}", text::holder(holder)));
    let waiters = state.queue().iter().enumerate().filter_map(|(at, waiter)| {
        let text = text::client(waiter.registered.as_ref()?);
        Some(format!("waiter {}: {text}", at + 1))
    });
    holders.chain(waiters).collect()
}

pub(crate) async fn ls(store_args: &StoreArgs, ls: &Ls) -> Result<u8, Failure> {
    let client = store::connect(store_args, Client::builder()).await?;
    let mut listing = client.list(&ls.pattern);
    // Sorted by name, because SCAN has no order and may return a name twice.
    let mut objects = BTreeMap::new();
    while let Some(found) = listing.next().await? {
        let object = Object::new(found.name.clone(), Some(found.state));
        objects.insert(found.name, object);
    }
    let objects: Vec<Object> = objects.into_values().collect();
    match ls.json {
        true => stdout::json(&objects).await,
        false => stdout::lines(table(&objects, ls.wide)).await,
    }
}

impl Object {
    pub(crate) fn new(name: String, state: Option<ObjectState>) -> Object {
        let mut object = Object {
            name,
            ..Object::default()
        };
        let Some(state) = state else { return object };
        object.kind = Some(state.kind().to_string());
        object.shown_kind = Some(text::kind(&state));
        if let Some(holder) = state.holders().first() {
            object.held = true;
            object.owner = Some(holder.owner.to_string());
            object.holds = holder.holds;
            object.remaining_ms = millis(holder.remaining);
            object.registered = holder.registered.as_ref().map(Registered::new);
        }
        let has_sides = matches!(state, ObjectState::FairReadWriteLock { .. });
        let holder_entry = |side| {
            move |holder: Holder| OwnerEntry {
                owner: holder.owner.into(),
                side,
                holds: Some(holder.holds),
                remaining_ms: millis(holder.remaining),
                registered: holder.registered.as_ref().map(Registered::new),
            }
        };
        let waiter_entry = |waiter: &Waiter| OwnerEntry {
            owner: waiter.owner.to_string(),
            side: has_sides.then_some(if waiter.writes { "write" } else { "read" }),
            holds: waiter.permits,
            remaining_ms: millis(waiter.remaining),
            registered: waiter.registered.as_ref().map(Registered::new),
        };
        object.queue = state.queue().iter().map(waiter_entry).collect();
        match state {
            ObjectState::Lock { token, .. } => object.token = token,
            ObjectState::ReadWriteLock {
                writer, readers, ..
            }
            | ObjectState::FairReadWriteLock {
                writer, readers, ..
            } => {
                let writer = writer.into_iter().map(holder_entry(Some("write")));
                object.holders = writer
                    .chain(readers.into_iter().map(holder_entry(Some("read"))))
                    .collect();
            }
            ObjectState::FairSemaphore { holders, .. } => {
                object.holders = holders.into_iter().map(holder_entry(None)).collect();
            }
            ObjectState::Counter {
                value, remaining, ..
            } => {
                object.value = Some(value);
                // A latch at zero is deleted, so this is a semaphore without available permits.
                object.held = value <= 0;
                object.remaining_ms = millis(remaining);
            }
            ObjectState::ExpirableSemaphore {
                available, held, ..
            } => {
                let taken = i64::try_from(held.len()).unwrap_or(i64::MAX);
                object.available = Some(available);
                object.total = Some(available.saturating_add(taken));
                object.held = available <= 0;
                let permit_entry = |permit: HeldPermit| PermitEntry {
                    id: permit.id.to_string(),
                    remaining_ms: millis(permit.remaining),
                };
                object.permits = Some(held.into_iter().map(permit_entry).collect());
            }
            _ => {}
        }
        object
    }

    /// Returns the object's rows of the table: its state or holders, then waiters or acquired
    /// permits.
    fn rows(&self) -> Vec<Row> {
        let row =
            |owner: String, holds: Option<u32>, remaining: String, who: &Option<Registered>| {
                [
                    self.name.clone(),
                    match (&self.shown_kind, self.token) {
                        (Some(kind), Some(token)) => format!("{kind}, token {token}"),
                        (Some(kind), None) => kind.clone(),
                        (None, _) => "-".into(),
                    },
                    owner,
                    holds.map_or("-".into(), |holds| holds.to_string()),
                    remaining,
                    who.as_ref().map_or(String::new(), |who| who.text.clone()),
                ]
            };
        let mut rows = Vec::new();
        if let Some(value) = self.value {
            let number = text::number(value);
            let owner = match self.held {
                true => format!("(held: {number})"),
                false => format!("({number})"),
            };
            let remaining = self
                .remaining_ms
                .map(Some)
                .map_or("-".into(), format_remaining);
            rows.push(row(owner, None, remaining, &None));
        } else if let (Some(available), Some(total)) = (self.available, self.total) {
            let owner = match self.held {
                true => format!("(held: {available} of {total} permits free)"),
                false => format!("({available} of {total} permits free)"),
            };
            rows.push(row(owner, None, "-".into(), &None));
        } else if self.holders.is_empty() {
            let remaining = match self.held {
                true => format_remaining(self.remaining_ms),
                false => "-".into(),
            };
            let owner = self.owner.clone().unwrap_or("(free)".into());
            rows.push(row(owner, Some(self.holds), remaining, &self.registered));
        }
        for entry in &self.holders {
            let owner = format!("{} ({})", entry.owner, entry.side.unwrap_or("hold"));
            rows.push(row(
                owner,
                entry.holds,
                format_remaining(entry.remaining_ms),
                &entry.registered,
            ));
        }
        for (at, entry) in self.queue.iter().enumerate() {
            let owner = format!("{} (waits, {})", entry.owner, at + 1);
            let remaining = format_remaining(entry.remaining_ms);
            rows.push(row(owner, None, remaining, &entry.registered));
        }
        for permit in self.permits.iter().flatten() {
            let owner = format!("permit {}", permit.id);
            let remaining = format_remaining(permit.remaining_ms);
            rows.push(row(owner, None, remaining, &None));
        }
        rows
    }
}

fn millis(remaining: Expiry) -> Option<u64> {
    remaining.duration().map(whole_millis)
}

pub(crate) fn whole_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn format_remaining(remaining_ms: Option<u64>) -> String {
    remaining_ms.map_or("forever".into(), |left| {
        duration::short(Duration::from_millis(left))
    })
}

/// The columns of the table. The last one is only in a wide table.
const HEAD: [&str; 6] = ["NAME", "KIND", "OWNER", "HOLDS", "REMAINING", "CLIENT"];

type Row = [String; HEAD.len()];

fn table(objects: &[Object], wide: bool) -> Vec<String> {
    let mut cells: Vec<_> = std::iter::once(HEAD.map(str::to_owned))
        .chain(objects.iter().flat_map(Object::rows))
        .collect();
    if !wide {
        cells.iter_mut().for_each(|[.., client]| client.clear());
    }
    // Also when they are printed, but then the columns would not be aligned.
    for cell in cells.iter_mut().flatten() {
        *cell = escape::line(cell);
    }
    // A wide table is for a pager.
    if let Some(columns) = terminal_columns().filter(|_| !wide) {
        fit_columns(&mut cells, columns);
    }
    let widths = widths(&cells);
    let line = |[name, kind, owner, holds, remaining, client]: &Row| {
        let [w_name, w_kind, w_owner, w_holds, w_remaining, _] = widths;
        let row = format!(
            "{name:w_name$}  {kind:w_kind$}  {owner:w_owner$}  {holds:>w_holds$}  \
             {remaining:>w_remaining$}  {client}"
        );
        row.trim_end().to_owned()
    };
    cells.iter().map(line).collect()
}

/// Returns the width of each column.
pub(crate) fn widths<const N: usize>(cells: &[[String; N]]) -> [usize; N] {
    let mut widths = [0; N];
    for row in cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    widths
}

/// Returns the width of the terminal to which the table is printed. In a file or a pipe nothing is
/// shortened.
fn terminal_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Shortens owners, then names, then kinds, to their minimum widths if necessary. JSON always
/// contains them in full.
fn fit_columns(cells: &mut [Row], columns: usize) {
    const SEPARATORS: usize = 4 * 2;
    // Owners remain distinguishable: they keep the beginning of the client id, and the number.
    for (column, min_width) in [(2, 16), (0, 12), (1, 8)] {
        let widths = widths(cells);
        let total = widths.iter().sum::<usize>() + SEPARATORS;
        let width = widths[column].saturating_sub(total.saturating_sub(columns));
        for row in cells.iter_mut() {
            row[column] = shortened(&row[column], width.max(min_width));
        }
    }
}

/// Shortens a text to this width by replacing its middle with `…`.
fn shortened(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let tail = (width - 1) / 2;
    let head = width - 1 - tail;
    let start = text.chars().take(head);
    let end = text.chars().skip(length - tail);
    start.chain(['…']).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::{fit_columns, shortened, widths};

    #[test]
    fn wide_tables_are_shortened_to_the_terminal() {
        let owner = "0195e3a2-4a4b-7c1d-9f3e-1234567890ab:1234567890 (waits, 12)";
        let row = [
            "orders:42",
            "fenced lock, token 12345",
            owner,
            "1",
            "29.3s",
            "",
        ];
        let mut cells = [row.map(str::to_owned)];
        for columns in [300, 110, 80, 60] {
            fit_columns(&mut cells, columns);
            assert!(
                widths(&cells).iter().sum::<usize>() + 8 <= columns,
                "{cells:?}"
            );
            let is_whole = cells[0][2] == owner;
            assert_eq!(is_whole, columns >= 110, "{cells:?}");
        }
    }

    #[test]
    fn shortened_text_keeps_both_ends() {
        assert_eq!(shortened("abcdef", 6), "abcdef");
        assert_eq!(shortened("abcdefg", 6), "abc…fg");
        assert_eq!(shortened("ü✓üü", 3), "ü…ü");
    }
}
