//! `redlatch show`, `ls` and `unlock`: what scripts and people read on standard output.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write as _};

use redlatch::{Client, Holder, ObjectKind};
use serde::Serialize;

use crate::args::{Ls, Show, Unlock};
use crate::exit::{self, Failure};
use crate::{duration, store};

/// One line of a table, and one JSON object.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    kind: String,
    held: bool,
    owner: Option<String>,
    holds: u32,
    remaining_ms: Option<u64>,
}

pub(crate) async fn show(url: &str, show: &Show) -> Result<u8, Failure> {
    store::check_name(&show.name).await?;
    let client = store::connect(url, Client::builder()).await?;
    let holder = client.lock(&show.name).holder().await?;
    let row = Row::new(show.name.clone(), ObjectKind::Lock, holder);
    print(&[row], show.json)
}

pub(crate) async fn ls(url: &str, ls: &Ls) -> Result<u8, Failure> {
    let client = store::connect(url, Client::builder()).await?;
    let mut listing = client.list(&ls.pattern);
    // By name, because SCAN has no order and may tell of one twice.
    let mut rows = BTreeMap::new();
    while let Some(found) = listing.next().await? {
        let row = Row::new(found.name.clone(), found.kind, Some(found.holder));
        rows.insert(found.name, row);
    }
    let rows: Vec<Row> = rows.into_values().collect();
    print(&rows, ls.json)
}

pub(crate) async fn unlock(url: &str, unlock: &Unlock) -> Result<u8, Failure> {
    if !unlock.force {
        return Err(Failure::usage(
            "unlocking takes the lock from a holder who may be at work and goes on beside the next \
             one until it notices; if that is what you want, say so with --force (`redlatch show` \
             tells who it is)",
        ));
    }
    store::check_name(&unlock.name).await?;
    let client = store::connect(url, Client::builder()).await?;
    let unlocked = client.lock(&unlock.name).force_unlock().await?;
    let what = if unlocked {
        "unlocked"
    } else {
        "was not locked"
    };
    write(&format!("{}: {what}\n", printable(&unlock.name)))
}

impl Row {
    fn new(name: String, kind: ObjectKind, holder: Option<Holder>) -> Row {
        let remaining = holder.as_ref().and_then(|holder| holder.remaining);
        Row {
            name,
            kind: kind.to_string(),
            held: holder.is_some(),
            holds: holder.as_ref().map_or(0, |holder| holder.holds),
            remaining_ms: remaining.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            owner: holder.map(|holder| holder.owner),
        }
    }

    fn cells(&self) -> [String; 5] {
        let remaining = match self.remaining_ms {
            Some(left) => duration::short(std::time::Duration::from_millis(left)),
            None if self.held => "for ever".into(),
            None => "-".into(),
        };
        [
            printable(&self.name),
            self.kind.clone(),
            self.owner.as_deref().map_or("(free)".into(), printable),
            self.holds.to_string(),
            remaining,
        ]
    }
}

/// What somebody put into the store must not move the cursor of who looks at it.
fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            printable.extend(c.escape_default());
        } else {
            printable.push(c);
        }
    }
    printable
}

fn print(rows: &[Row], json: bool) -> Result<u8, Failure> {
    let text = if json { lines(rows)? } else { table(rows) };
    write(&text)
}

fn lines(rows: &[Row]) -> Result<String, Failure> {
    let mut lines = String::new();
    for row in rows {
        let line = serde_json::to_string(row).map_err(|error| Failure {
            code: exit::SOFTWARE,
            message: error.to_string(),
        })?;
        lines.push_str(&line);
        lines.push('\n');
    }
    Ok(lines)
}

fn table(rows: &[Row]) -> String {
    let head = ["NAME", "KIND", "OWNER", "HOLDS", "REMAINING"].map(str::to_owned);
    let cells: Vec<_> = std::iter::once(head)
        .chain(rows.iter().map(Row::cells))
        .collect();
    let mut widths = [0; 5];
    for row in &cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut table = String::new();
    for [name, kind, owner, holds, remaining] in &cells {
        let [w_name, w_kind, w_owner, w_holds, w_remaining] = widths;
        table.push_str(&format!(
            "{name:w_name$}  {kind:w_kind$}  {owner:w_owner$}  {holds:>w_holds$}  \
             {remaining:>w_remaining$}\n"
        ));
    }
    table
}

fn write(text: &str) -> Result<u8, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(exit::OK),
        // `redlatch ls | head -1`: whoever reads has read enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(exit::OK),
        Err(error) => Err(Failure::system("cannot write to standard output", &error)),
    }
}
