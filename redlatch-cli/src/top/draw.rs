//! Draws the view into a buffer of cells.

use std::time::{Duration, SystemTime};

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};
use redlatch::Expiry;

use super::cells::{shortened, width, wrapped};
use super::view::{Mode, Row, Sort, View};
use crate::look::history::{Age, Turns};
use crate::look::{Holder, Lock, Waiter};
use crate::output::escape;
use crate::{duration, text};

/// Limit of lines of a message or a question.
const MAX_FOOTER: usize = 4;

/// Limit of past holds in the details of a lock.
const MAX_PAST: usize = 100;

/// The mark in front of the selected row, so that it does not depend on colors.
const MARK: &str = "> ";

const MAX_NAME: usize = 60;
/// The length of most ids of owners.
const MAX_HOLDER: usize = 54;
const MIN_NOTE: usize = 10;

/// The columns with numbers, from left to right. NAME and HOLDER share the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Kind,
    Age,
    Waiters,
    Wait,
    Lease,
    Turns,
}

impl Column {
    const ALL: [Column; 6] = [
        Column::Kind,
        Column::Age,
        Column::Waiters,
        Column::Wait,
        Column::Lease,
        Column::Turns,
    ];

    /// Which columns a narrow terminal lacks, the first ones first.
    const DROPPED: [Column; 5] = [
        Column::Wait,
        Column::Kind,
        Column::Turns,
        Column::Lease,
        Column::Age,
    ];

    fn head(self) -> &'static str {
        match self {
            Column::Kind => "KIND",
            Column::Age => "AGE",
            Column::Waiters => "WAITERS",
            Column::Wait => "WAIT",
            Column::Lease => "LEASE",
            Column::Turns => "TURNS/S",
        }
    }

    fn width(self) -> usize {
        match self {
            Column::Waiters | Column::Turns => 7,
            _ => 6,
        }
    }

    fn sort(self) -> Sort {
        match self {
            Column::Kind => Sort::Kind,
            Column::Age => Sort::Age,
            Column::Waiters => Sort::Waiters,
            Column::Wait => Sort::Wait,
            Column::Lease => Sort::Lease,
            Column::Turns => Sort::Turns,
        }
    }

    fn text(self, lock: &Lock, row: &Row) -> String {
        match self {
            Column::Kind => kind_text(lock).to_owned(),
            Column::Age => row.age.map_or("-".into(), age_text),
            Column::Waiters => lock.waiter_count.to_string(),
            Column::Wait => lock.longest_wait().map_or("-".into(), compact),
            Column::Lease => match lock.lease() {
                Some(Expiry::In(left)) => compact(left),
                Some(Expiry::Never) => "never".into(),
                None => "-".into(),
            },
            Column::Turns => row.turns.map_or("-".into(), turns_text),
        }
    }
}

/// Returns the kind of a lock, in at most six letters. The holder of an election is its leader.
fn kind_text(lock: &Lock) -> &str {
    match lock.kind.as_str() {
        "election" => "leader",
        kind => kind,
    }
}

/// The widths of the columns in a terminal.
#[derive(Debug, PartialEq, Eq)]
struct Widths {
    name: usize,
    holder: usize,
    columns: Vec<Column>,
    /// Zero if there is no space for it.
    note: usize,
}

impl Widths {
    fn new(total: usize, sort: Sort, name_width: usize) -> Widths {
        let mut columns = Column::ALL.to_vec();
        let rest = |columns: &[Column]| {
            let used: usize = columns.iter().map(|column| column.width() + 1).sum();
            // The mark, and the space between name and holder.
            total.saturating_sub(used + MARK.len() + 1)
        };
        for dropped in Column::DROPPED {
            if rest(&columns) < 39.min(total / 2) && dropped.sort() != sort {
                columns.retain(|column| *column != dropped);
            }
        }
        let rest = rest(&columns);
        let name = name_width.clamp(8, MAX_NAME).min(rest * 2 / 5);
        let holder = rest.saturating_sub(name).min(MAX_HOLDER);
        let name = name.max(name_width.min(rest - holder).min(MAX_NAME));
        let left = rest.saturating_sub(name + holder + 1);
        Widths {
            name,
            holder,
            columns,
            note: if left >= MIN_NOTE { left } else { 0 },
        }
    }
}

/// Draws the view. Also fits its scrolling to the size of the screen.
pub(super) fn draw(view: &mut View, buffer: &mut Buffer, now: SystemTime) {
    let mut canvas = Canvas::new(view.has_colors, buffer);
    if canvas.width == 0 || canvas.height == 0 {
        return;
    }
    let head = header(view, &mut canvas, now);
    let foot = footer(view, canvas.width);
    let rows = canvas.height.saturating_sub(head + foot.len());
    let body = Body {
        top: head,
        height: rows,
    };
    match view.mode.clone() {
        Mode::List | Mode::Filter => list(view, &mut canvas, body),
        Mode::Details(details) | Mode::Confirm { details, .. } => {
            let lines = details_lines(view, &details.name, canvas.width);
            text(view, &mut canvas, body, &lines);
        }
        Mode::Help { .. } => {
            let lines = help_lines(canvas.width);
            text(view, &mut canvas, body, &lines);
        }
    }
    let style = match view.mode {
        Mode::Confirm { .. } => canvas.alarm(),
        _ if view.message.is_some() => Style::new().add_modifier(Modifier::BOLD),
        _ => Style::new(),
    };
    let top = canvas.height.saturating_sub(foot.len());
    for (i, line) in foot.iter().enumerate() {
        canvas.put(0, top + i, canvas.width, line, style);
    }
}

/// Where the list or the text is.
#[derive(Debug, Clone, Copy)]
struct Body {
    top: usize,
    height: usize,
}

/// A buffer that escapes every text.
struct Canvas<'a> {
    buffer: &'a mut Buffer,
    has_colors: bool,
    width: usize,
    height: usize,
}

impl Canvas<'_> {
    fn new(has_colors: bool, buffer: &mut Buffer) -> Canvas<'_> {
        Canvas {
            has_colors,
            width: buffer.area.width.into(),
            height: buffer.area.height.into(),
            buffer,
        }
    }

    /// Writes a text into cells of one line, and cuts it at the limit.
    fn put(&mut self, x: usize, y: usize, limit: usize, text: &str, style: Style) {
        let limit = limit.min(self.width.saturating_sub(x));
        let (Ok(column), Ok(line)) = (u16::try_from(x), u16::try_from(y)) else {
            return;
        };
        if limit > 0 && y < self.height {
            self.buffer
                .set_stringn(column, line, escape::line(text), limit, style);
        }
    }

    /// The same, aligned to the right.
    fn put_right(&mut self, x: usize, y: usize, limit: usize, text: &str, style: Style) {
        let indent = limit.saturating_sub(width(text));
        self.put(x + indent, y, limit - indent, text, style);
    }

    /// Fills the rest of a line with a style.
    fn fill(&mut self, y: usize, style: Style) {
        self.put(0, y, self.width, &" ".repeat(self.width), style);
    }

    fn colored(&self, color: Color) -> Style {
        match self.has_colors {
            true => Style::new().fg(color),
            false => Style::new(),
        }
    }

    fn alarm(&self) -> Style {
        self.colored(Color::Red).add_modifier(Modifier::BOLD)
    }
}

/// Draws the first lines. Returns how many there are.
fn header(view: &View, canvas: &mut Canvas<'_>, now: SystemTime) -> usize {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let time = view.look.as_ref().map_or(String::new(), |look| {
        let [_, time] = text::utc(look.time);
        format!(" {time} UTC")
    });
    let time_at = canvas.width.saturating_sub(width(&time));
    let counts = view.look.as_ref().map_or(String::new(), |look| {
        let waiters: usize = look.locks.iter().map(|lock| lock.waiter_count).sum();
        let locks = text::counted(look.held(), "lock");
        format!("{locks}, {}", text::counted(waiters, "waiter"))
    });
    let pattern = match &*view.pattern {
        "*" => "",
        pattern => pattern,
    };
    let parts = ["redlatch top", &counts, pattern, &view.store];
    let title = parts.into_iter().filter(|part| !part.is_empty());
    let title = title.collect::<Vec<_>>().join("  ");
    canvas.put(0, 0, time_at, &title, bold);
    canvas.put(time_at, 0, width(&time), &time, Style::new());

    let mut facts = Vec::new();
    if view.is_paused {
        facts.push("PAUSED".to_owned());
    }
    facts.push(format!("sort: {}", view.sort.text()));
    if !view.filter.is_empty() {
        facts.push(format!("filter: {} ({})", view.filter, view.rows.len()));
    }
    if let Some(look) = &view.look {
        if look.omitted > 0 {
            facts.push(format!("{} not shown", text::counted(look.omitted, "lock")));
        }
        if look.waits_refused {
            facts.push("only waiters in queues (the server refuses the registry)".into());
        }
    }
    canvas.put(0, 1, canvas.width, &facts.join("  "), Style::new());
    let mut lines = 2;
    if let Some(outage) = view.outage(now) {
        let [_, since] = text::utc(outage.since);
        let age = now.duration_since(outage.since).unwrap_or_default();
        let age = duration::rough(Duration::from_secs(age.as_secs()));
        let what = match view.look {
            Some(_) => "STALE",
            None => "NO DATA",
        };
        let text = format!("{what} since {since} UTC ({age}): {}", outage.message);
        let alarm = canvas.alarm();
        for line in wrapped(&escape::line(&text), canvas.width, 2)
            .iter()
            .take(2)
        {
            canvas.put(0, lines, canvas.width, line, alarm);
            lines += 1;
        }
    }
    lines
}

/// Returns the last lines of the screen: a question, a message, or what keys do.
fn footer(view: &View, columns: usize) -> Vec<String> {
    if let Some(message) = &view.message {
        let mut lines = wrapped(&escape::line(message), columns, 2);
        lines.truncate(MAX_FOOTER);
        return lines;
    }
    let text = match &view.mode {
        Mode::List => {
            "q quit  ? help  Enter details  / filter  s sort  Space pause  Home End PgUp PgDn"
        }
        Mode::Filter => {
            let line = format!("/{}_  (Enter keeps, Esc clears)", view.filter);
            return vec![line];
        }
        Mode::Details(_) => "Esc back  u unlock by force  Space pause  ? help  q quit",
        Mode::Help { .. } => "any key: back  q quit",
        Mode::Confirm { details, .. } => {
            let holder = view.lock(&details.name).map(Lock::holder_text);
            let question = format!(
                "Unlock {} by force? {} may still be working, and continues until it notices. \
                 y: unlock, any other key: no",
                shortened(&escape::line(&details.name), columns.max(20) - 10),
                escape::line(&holder.unwrap_or("Its holder".into())),
            );
            // Always ends with what the keys do.
            let lines = wrapped(&question, columns, 2);
            let skipped = lines.len().saturating_sub(MAX_FOOTER);
            return lines.into_iter().skip(skipped).collect();
        }
    };
    vec![text.to_owned()]
}

fn list(view: &mut View, canvas: &mut Canvas<'_>, body: Body) {
    let widths = Widths::new(canvas.width, view.sort, view.name_width);
    let head_style = Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
    canvas.fill(body.top, head_style);
    let head = |sort: Sort, style: Style| match sort == view.sort {
        true => style.add_modifier(Modifier::REVERSED),
        false => style,
    };
    let mut x = MARK.len();
    let name_style = head(Sort::Name, head_style);
    canvas.put(x, body.top, widths.name, "NAME", name_style);
    x += widths.name + 1;
    let has_kind = widths.columns.contains(&Column::Kind);
    if has_kind {
        let style = head(Sort::Kind, head_style);
        canvas.put(x, body.top, Column::Kind.width(), "KIND", style);
        x += Column::Kind.width() + 1;
    }
    let holder_style = head(Sort::Holder, head_style);
    canvas.put(x, body.top, widths.holder, "HOLDER", holder_style);
    let numbers_at = x + widths.holder + 1;
    let numbers = || {
        let columns = widths.columns.iter().copied();
        columns.filter(|column| *column != Column::Kind)
    };
    x = numbers_at;
    for column in numbers() {
        let style = head(column.sort(), head_style);
        canvas.put_right(x, body.top, column.width(), column.head(), style);
        x += column.width() + 1;
    }
    if widths.note > 0 {
        canvas.put(x, body.top, widths.note, "NOTE", head_style);
    }

    let height = body.height.saturating_sub(1);
    view.set_page(height);
    if view.rows.is_empty() {
        let text = match (&view.look, &view.failure) {
            (None, None) => "looking at the store…",
            (None, Some(_)) => "",
            (Some(_), _) if view.filter.is_empty() => "no locks are held",
            (Some(_), _) => "no lock matches the filter; Esc clears it",
        };
        canvas.put(MARK.len(), body.top + 1, canvas.width, text, Style::new());
    }
    let shown = view.rows.iter().enumerate().skip(view.top).take(height);
    for (i, row) in shown {
        let Some(lock) = view.lock_of(row) else {
            continue;
        };
        let y = body.top + 1 + i - view.top;
        let is_selected = i == view.selected_row();
        let style = match is_selected {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        if is_selected {
            canvas.fill(y, style);
            canvas.put(0, y, MARK.len(), MARK, style);
        }
        let mut x = MARK.len();
        let name = shortened(&escape::line(&lock.name), widths.name);
        canvas.put(x, y, widths.name, &name, style);
        x += widths.name + 1;
        if has_kind {
            canvas.put(x, y, Column::Kind.width(), kind_text(lock), style);
            x += Column::Kind.width() + 1;
        }
        let holder = shortened(&escape::line(&lock.holder_text()), widths.holder);
        canvas.put(x, y, widths.holder, &holder, style);
        x = numbers_at;
        for column in numbers() {
            let is_waited_for = column == Column::Waiters && lock.waiter_count > 0;
            let cell_style = match is_waited_for {
                true => style
                    .patch(canvas.colored(Color::Yellow))
                    .add_modifier(Modifier::BOLD),
                false => style,
            };
            canvas.put_right(x, y, column.width(), &column.text(lock, row), cell_style);
            x += column.width() + 1;
        }
        let note = lock.holders.iter().find_map(|one| one.party.note.as_ref());
        if let Some(note) = note
            && widths.note > 0
        {
            let note = shortened(&escape::line(note), widths.note);
            canvas.put(x, y, widths.note, &note, style);
        }
    }
}

/// A line of text, and whether it is a heading.
type TextLine = (bool, String);

fn text(view: &mut View, canvas: &mut Canvas<'_>, body: Body, lines: &[TextLine]) {
    let top = view.limit_scroll(lines.len(), body.height);
    for (i, (is_heading, line)) in lines.iter().skip(top).take(body.height).enumerate() {
        let style = match is_heading {
            true => Style::new().add_modifier(Modifier::BOLD),
            false => Style::new(),
        };
        canvas.put(0, body.top + i, canvas.width, line, style);
    }
}

/// Appends a text, broken to the width of the screen.
fn push(lines: &mut Vec<TextLine>, columns: usize, is_heading: bool, text: &str) {
    let indent = text.len() - text.trim_start().len() + 2;
    let wrapped = wrapped(&escape::line(text), columns, indent.min(columns / 2));
    lines.extend(wrapped.into_iter().map(|line| (is_heading, line)));
}

/// Returns everything that is known of a lock.
fn details_lines(view: &View, name: &str, columns: usize) -> Vec<TextLine> {
    let mut lines = Vec::new();
    let mut add = |is_heading: bool, text: String| push(&mut lines, columns, is_heading, &text);
    let time = view
        .look
        .as_ref()
        .map_or(SystemTime::UNIX_EPOCH, |look| look.time);
    let lock = view.lock(name);
    let token = lock
        .and_then(|lock| lock.token)
        .map_or(String::new(), |token| format!(", token {token}"));
    match lock {
        None => add(true, format!("{name}: free")),
        Some(lock) if lock.holder_count == 0 => {
            add(true, format!("{name}: {}{token}, free", lock.kind));
        }
        Some(lock) => add(true, format!("{name}: {}{token}", lock.kind)),
    }
    if let Some(turns) = view.history.turns(name) {
        let at_least = match turns.is_exact || turns.per_second == 0.0 {
            true => "",
            false => "at least ",
        };
        let exact = Turns {
            is_exact: true,
            ..turns
        };
        add(
            false,
            format!("{at_least}{} turns per second", turns_text(exact)),
        );
    }
    if let Some(lock) = lock {
        for holder in &lock.holders {
            add(false, holder_line(view, lock, holder, time));
        }
        let omitted = lock.holder_count - lock.holders.len();
        if omitted > 0 {
            add(false, format!("and {omitted} more"));
        }
        match (lock.waiter_count, lock.longest_wait()) {
            (0, _) => add(true, "no waiters known".into()),
            (count, None) => add(true, text::counted(count, "waiter")),
            (count, Some(longest)) => {
                let count = text::counted(count, "waiter");
                let longest = duration::short(longest);
                add(true, format!("{count}, the longest wait {longest}"));
            }
        }
        for (i, waiter) in lock.waiters.iter().enumerate() {
            add(false, waiter_line(i, waiter, time));
        }
        let omitted = lock.waiter_count - lock.waiters.len();
        if omitted > 0 {
            add(false, format!("  and {omitted} more"));
        }
    }
    let mut past = view.history.past(name).peekable();
    match past.peek() {
        None => add(true, "no earlier holders since this view started".into()),
        Some(_) => add(true, "earlier holders, the latest first".into()),
    }
    for hold in past.take(MAX_PAST) {
        let [_, since] = text::utc(hold.since);
        let lasted = duration::short(hold.lasted);
        let (party, note) = (hold.party.name(), text::note(hold.party.note.as_deref()));
        add(false, format!("  {since} UTC {party}, for {lasted}{note}"));
    }
    lines
}

fn holder_line(view: &View, lock: &Lock, holder: &Holder, time: SystemTime) -> String {
    let party = &holder.party;
    let side = match holder.side {
        Some("write") => "for writing ",
        Some(_) => "for reading ",
        None => "",
    };
    let since = match party.age {
        Some(age) => since_text(age, time),
        None => match view.history.seen_for(&lock.name, &party.owner) {
            Some(seen) => format!(" for {} at least", duration::short(seen)),
            None => String::new(),
        },
    };
    let lease = match holder.lease {
        Expiry::In(left) => format!("lease {} left", duration::short(left)),
        Expiry::Never => "without a lease".into(),
    };
    let holds = match holder.holds {
        0 | 1 => String::new(),
        holds => format!(", {holds} times"),
    };
    let owner = match party.client {
        Some(_) => format!(", owner {}", party.owner),
        None => String::new(),
    };
    let (name, note) = (party.name(), text::note(party.note.as_deref()));
    format!("held {side}by {name}{since}{note}, {lease}{holds}{owner}")
}

fn waiter_line(i: usize, waiter: &Waiter, time: SystemTime) -> String {
    let party = &waiter.party;
    let since = party.age.map_or(String::new(), |age| since_text(age, time));
    let queued = waiter.position.map_or("", |_| ", in the queue");
    let (name, note) = (party.name(), text::note(party.note.as_deref()));
    format!("  {}. {name}{since}{note}{queued}", i + 1)
}

/// Tells when something began: ` since 02:00:13 UTC (4m05s)`.
fn since_text(age: Duration, time: SystemTime) -> String {
    let since = text::clock(text::ago(time, age), age);
    format!(" since {since} ({})", duration::short(age))
}

fn help_lines(columns: usize) -> Vec<TextLine> {
    let mut lines = Vec::new();
    for line in HELP.lines() {
        let is_heading = !line.starts_with(' ') && line.ends_with(':');
        push(&mut lines, columns, is_heading, line);
    }
    lines
}

const HELP: &str = "\
Keys:
  Up Down PgUp PgDn Home End  select a lock, or scroll
  Enter      details of the selected lock
  s, S       sort by the next or the previous column
  /          filter by a part of the name or the holder; Esc clears it
  Space      pause the refresh, or continue
  u          in the details: unlock by force, after a confirmation
  Esc        back
  q, Ctrl-C  quit

Columns:
  HOLDER   the client that holds the lock; the id of the owner if its client is not registered; (free) for ten looks after it
  AGE      how long the lock has been held
  WAITERS  waiters in the queue of a fair lock, and those that have waited for longer than a second
  WAIT     the longest wait
  LEASE    time until the hold ends unless it is renewed
  TURNS/S  how often the lock was acquired, on average of the last ten looks. Exact for fenced locks whose token counts. For \
others it counts looks with a new holder, so shorter holds are missing.
  +        means at least";

/// Formats a duration in up to six characters.
fn compact(time: Duration) -> String {
    const DAY: u64 = 24 * 60 * 60;
    match time.as_secs() {
        seconds if seconds < 4 * DAY => duration::short(time),
        seconds => format!("{}d", seconds / DAY),
    }
}

/// Formats the age of a hold in up to six characters.
fn age_text(age: Age) -> String {
    if age.is_exact {
        return compact(age.time);
    }
    match age.time.as_secs() {
        seconds @ 0..60 => format!("{seconds}s+"),
        seconds @ 60..3600 => format!("{}m+", seconds / 60),
        seconds => format!("{}h+", seconds / 3600),
    }
}

fn turns_text(turns: Turns) -> String {
    let at_least = match turns.is_exact {
        true => "",
        false => "+",
    };
    match turns.per_second {
        0.0 => "0".into(),
        few @ 0.0..9.95 => format!("{few:.1}{at_least}"),
        many => format!("{many:.0}{at_least}"),
    }
}
