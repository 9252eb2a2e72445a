//! The state of the view, and what each key does. No input and no output.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use redlatch::Expiry;

use super::cells::width;
use crate::look::history::{Age, History, Turns};
use crate::look::{Lock, Look};
use crate::output::escape;

/// Limit of the text of a filter.
const MAX_FILTER: usize = 512;

/// How much later than expected a look may end until the data are called stale.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct View {
    /// The source of the looks: the store, without secrets, and the pattern of names.
    pub(super) store: String,
    pub(super) pattern: String,
    pub(super) has_colors: bool,
    interval: Duration,
    /// The look that is shown. `None` before the first one.
    pub(super) look: Option<Look>,
    /// The latest look, while the refresh is paused.
    newer: Option<Look>,
    pub(super) is_paused: bool,
    /// Why the latest look failed.
    pub(super) failure: Option<Outage>,
    pub(super) history: History,
    /// The result of the latest action.
    pub(super) message: Option<String>,
    pub(super) sort: Sort,
    pub(super) filter: String,
    /// The locks that match the filter, in order.
    pub(super) rows: Vec<Row>,
    /// The widest name of a row, in cells.
    pub(super) name_width: usize,
    /// The selected lock. `None`: the first row.
    selected: Option<String>,
    /// Position of `selected`; of its former row if it is not listed any more.
    at: usize,
    /// The first row on the screen, and the number of rows there.
    pub(super) top: usize,
    page: usize,
    pub(super) mode: Mode,
}

/// An outage of the store, as this view sees it.
#[derive(Debug, Clone)]
pub(super) struct Outage {
    /// When the last look began that succeeded, or the first one that failed.
    pub(super) since: SystemTime,
    pub(super) message: String,
}

/// What the screen shows, and so what keys mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    List,
    /// The list, while a filter is typed.
    Filter,
    Details(Details),
    /// The details, while a question is asked. The holders are those that the user has seen.
    Confirm {
        details: Details,
        holders: Vec<String>,
    },
    Help {
        scroll: usize,
    },
}

/// The lock whose details are shown, and how many lines are scrolled away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Details {
    pub(super) name: String,
    pub(super) scroll: usize,
}

/// What the program does after a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    None,
    Leave,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
    /// Ctrl-L.
    Redraw,
    Unlock {
        name: String,
        /// The lock is unlocked only if no other owner holds it.
        holders: Vec<String>,
    },
}

/// A row of the list.
#[derive(Debug, Clone)]
pub(super) struct Row {
    /// Position in the look.
    pub(super) index: usize,
    pub(super) age: Option<Age>,
    pub(super) turns: Option<Turns>,
}

/// The column by which the list is sorted. Rows that are equal in it are sorted by the age of the
/// hold, then by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    Waiters,
    Wait,
    Age,
    Lease,
    Turns,
    Name,
    Kind,
    Holder,
}

impl Sort {
    const ALL: [Sort; 8] = [
        Sort::Waiters,
        Sort::Wait,
        Sort::Age,
        Sort::Lease,
        Sort::Turns,
        Sort::Name,
        Sort::Kind,
        Sort::Holder,
    ];

    pub(super) fn text(self) -> &'static str {
        match self {
            Sort::Waiters => "waiters, then age",
            Sort::Wait => "longest wait",
            Sort::Age => "age of the hold",
            Sort::Lease => "lease that ends first",
            Sort::Turns => "turns per second",
            Sort::Name => "name",
            Sort::Kind => "kind",
            Sort::Holder => "holder",
        }
    }

    /// Returns the order that is this many places further.
    fn moved(self, places: usize) -> Sort {
        let at = Sort::ALL.iter().position(|one| *one == self);
        let next = (at.unwrap_or(0) + places) % Sort::ALL.len();
        Sort::ALL.get(next).copied().unwrap_or(self)
    }
}

impl View {
    pub(super) fn new(
        store: String,
        pattern: String,
        interval: Duration,
        has_colors: bool,
    ) -> View {
        View {
            interval,
            store,
            pattern,
            has_colors,
            look: None,
            newer: None,
            is_paused: false,
            failure: None,
            history: History::default(),
            message: None,
            sort: Sort::Waiters,
            filter: String::new(),
            rows: Vec::new(),
            name_width: 0,
            selected: None,
            at: 0,
            top: 0,
            page: 1,
            mode: Mode::List,
        }
    }

    /// Shows a look, unless the refresh is paused.
    pub(super) fn on_look(&mut self, mut look: Look) {
        self.failure = None;
        self.history.add(&look);
        look.add_free(self.history.free_locks());
        if self.is_paused && self.look.is_some() {
            self.newer = Some(look);
        } else {
            self.look = Some(look);
            self.arrange();
        }
    }

    /// Keeps the latest look on the screen, and says why it is not current.
    pub(super) fn on_failure(&mut self, message: String, now: SystemTime) {
        let latest = self.newer.as_ref().or(self.look.as_ref());
        let since = match (&self.failure, latest) {
            (Some(failure), _) => failure.since,
            (None, Some(look)) => look.time,
            (None, None) => now,
        };
        self.failure = Some(Outage { since, message });
    }

    /// Returns since when the data are stale and why, if they are: after a look that failed, or
    /// during one that takes too long.
    pub(super) fn outage(&self, now: SystemTime) -> Option<Outage> {
        let late = || {
            let look = self.newer.as_ref().or(self.look.as_ref())?;
            let age = now.duration_since(look.time).ok()?;
            // As long as one look, the pause behind it and the next look may take.
            (age > self.interval + 3 * look.took + GRACE).then(|| Outage {
                since: look.time,
                message: "waiting for the store".into(),
            })
        };
        self.failure.clone().or_else(late)
    }

    /// Fits the list to a number of rows on the screen.
    pub(super) fn set_page(&mut self, rows: usize) {
        self.page = rows.max(1);
        let last_top = self.rows.len().saturating_sub(self.page);
        let lowest = (self.at + 1).saturating_sub(self.page);
        self.top = self.top.min(last_top).max(lowest).min(self.at);
    }

    /// Returns the position of the selected row.
    pub(super) fn selected_row(&self) -> usize {
        self.at
    }

    pub(super) fn lock_of(&self, row: &Row) -> Option<&Lock> {
        self.look.as_ref()?.locks.get(row.index)
    }

    /// Returns the lock of this name in the look that is shown.
    pub(super) fn lock(&self, name: &str) -> Option<&Lock> {
        self.look.as_ref()?.lock(name)
    }

    /// Filters and sorts the rows.
    fn arrange(&mut self) {
        let Some(look) = &self.look else { return };
        let wanted = self.filter.to_lowercase();
        let found = look.locks.iter().enumerate();
        let found = found.filter(|(_, lock)| lock.matches(&wanted));
        let mut rows: Vec<_> = found
            .map(|(index, lock)| Row {
                index,
                age: self.history.age(lock),
                turns: self.history.turns(&lock.name),
            })
            .collect();
        let lock = |row: &Row| &look.locks[row.index];
        let oldest = |row: &Row| Reverse(row.age.map(|age| age.time));
        match self.sort {
            Sort::Waiters => {
                rows.sort_by_key(|row| (Reverse(lock(row).waiter_count), oldest(row)));
            }
            Sort::Wait => rows.sort_by_cached_key(|row| {
                let lock = lock(row);
                (
                    Reverse(lock.longest_wait()),
                    Reverse(lock.waiter_count),
                    oldest(row),
                )
            }),
            Sort::Age => rows.sort_by_key(oldest),
            Sort::Lease => rows.sort_by_cached_key(|row| {
                let ends = match lock(row).lease() {
                    Some(Expiry::In(left)) => (0, left),
                    Some(Expiry::Never) => (1, Duration::ZERO),
                    None => (2, Duration::ZERO),
                };
                (ends, oldest(row))
            }),
            Sort::Turns => rows.sort_by(|row, other| {
                let turns = |row: &Row| row.turns.map_or(-1.0, |turns| turns.per_second);
                let order = turns(other).total_cmp(&turns(row));
                order.then_with(|| oldest(row).cmp(&oldest(other)))
            }),
            // The locks of a look are sorted by name.
            Sort::Name => {}
            Sort::Kind => rows.sort_by_cached_key(|row| (lock(row).kind.clone(), oldest(row))),
            Sort::Holder => {
                rows.sort_by_cached_key(|row| (lock(row).holder_text(), oldest(row)));
            }
        }
        let names = rows.iter().map(|row| width(&escape::line(&lock(row).name)));
        self.name_width = names.max().unwrap_or(0);
        let selected = self.selected.as_ref();
        let at = selected.and_then(|name| rows.iter().position(|row| lock(row).name == *name));
        self.at = match (at, &self.selected) {
            (Some(at), _) => at,
            (None, Some(_)) => self.at.min(rows.len().saturating_sub(1)),
            (None, None) => 0,
        };
        self.rows = rows;
    }

    /// Reacts to a key.
    pub(super) fn on_key(&mut self, key: KeyEvent) -> Action {
        self.message = None;
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => return Action::Interrupt,
                KeyCode::Char('z') => return Action::Suspend,
                KeyCode::Char('l') => return Action::Redraw,
                _ => {}
            }
        }
        let has_modifier = |modifier| key.modifiers.intersects(modifier);
        if has_modifier(KeyModifiers::CONTROL | KeyModifiers::ALT | KeyModifiers::SUPER) {
            return Action::None;
        }
        match std::mem::replace(&mut self.mode, Mode::List) {
            Mode::List => self.on_list_key(key.code),
            Mode::Filter => {
                self.on_filter_key(key.code);
                Action::None
            }
            Mode::Details(details) => self.on_details_key(key.code, details),
            Mode::Confirm { details, holders } => {
                let name = details.name.clone();
                self.mode = Mode::Details(details);
                match key.code {
                    KeyCode::Char('y' | 'Y') => {
                        self.message = Some(format!("{name}: unlocking…"));
                        Action::Unlock { name, holders }
                    }
                    _ => {
                        self.message = Some(format!("{name}: not unlocked"));
                        Action::None
                    }
                }
            }
            Mode::Help { scroll } => match scrolled(key.code, scroll, self.page) {
                Some(scroll) => {
                    self.mode = Mode::Help { scroll };
                    Action::None
                }
                None if key.code == KeyCode::Char('q') => Action::Leave,
                None => Action::None,
            },
        }
    }

    /// Adds pasted text to a filter that is being typed. Otherwise pasted text has no effect: it
    /// could contain `u` and `y`.
    pub(super) fn on_paste(&mut self, text: &str) {
        if self.mode == Mode::Filter {
            let line = text.lines().next().unwrap_or_default();
            self.set_filter(format!("{}{line}", self.filter));
        }
    }

    fn on_list_key(&mut self, code: KeyCode) -> Action {
        let last = self.rows.len().saturating_sub(1);
        match code {
            KeyCode::Char('q') => return Action::Leave,
            KeyCode::Char('s') => self.set_sort(self.sort.moved(1)),
            KeyCode::Char('S') => self.set_sort(self.sort.moved(Sort::ALL.len() - 1)),
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char(' ') => self.pause_or_continue(),
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help { scroll: 0 },
            KeyCode::Esc => self.set_filter(String::new()),
            KeyCode::Up | KeyCode::Char('k') => self.select(self.at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select((self.at + 1).min(last)),
            KeyCode::PageUp => self.select(self.at.saturating_sub(self.page)),
            KeyCode::PageDown => self.select((self.at + self.page).min(last)),
            KeyCode::Home | KeyCode::Char('g') => {
                self.select(0);
                self.selected = None;
            }
            KeyCode::End | KeyCode::Char('G') => self.select(last),
            KeyCode::Enter => {
                self.select(self.at);
                if let Some(name) = self.selected.clone() {
                    self.mode = Mode::Details(Details { name, scroll: 0 });
                }
            }
            _ => {}
        }
        Action::None
    }

    fn on_filter_key(&mut self, code: KeyCode) {
        self.mode = Mode::Filter;
        match code {
            KeyCode::Enter => self.mode = Mode::List,
            KeyCode::Esc => {
                self.mode = Mode::List;
                self.set_filter(String::new());
            }
            KeyCode::Backspace if self.filter.is_empty() => self.mode = Mode::List,
            KeyCode::Backspace => {
                let mut filter = self.filter.clone();
                filter.pop();
                self.set_filter(filter);
            }
            KeyCode::Char(c) => self.set_filter(format!("{}{c}", self.filter)),
            _ => {}
        }
    }

    fn on_details_key(&mut self, code: KeyCode, mut details: Details) -> Action {
        match code {
            KeyCode::Char('q') => return Action::Leave,
            KeyCode::Esc | KeyCode::Enter | KeyCode::Backspace | KeyCode::Left => {
                return Action::None;
            }
            KeyCode::Char('?' | 'h') => {
                self.mode = Mode::Help { scroll: 0 };
                return Action::None;
            }
            KeyCode::Char(' ') => self.pause_or_continue(),
            KeyCode::Char('u') => {
                let lock = self.lock(&details.name);
                let holders = lock.map_or(&[][..], |lock| &lock.holders);
                let holders = holders.iter().map(|holder| holder.party.owner.clone());
                let holders = holders.collect();
                self.mode = Mode::Confirm { details, holders };
                return Action::None;
            }
            _ => {
                let scroll = details.scroll;
                details.scroll = scrolled(code, scroll, self.page).unwrap_or(scroll);
            }
        }
        self.mode = Mode::Details(details);
        Action::None
    }

    fn pause_or_continue(&mut self) {
        self.is_paused = !self.is_paused;
        if let Some(newer) = self.newer.take() {
            self.look = Some(newer);
            self.arrange();
        }
    }

    fn set_sort(&mut self, sort: Sort) {
        self.sort = sort;
        self.arrange();
    }

    fn set_filter(&mut self, filter: String) {
        if filter.len() <= MAX_FILTER {
            self.filter = filter;
            self.arrange();
        }
    }

    fn select(&mut self, at: usize) {
        self.at = at;
        let row = self.rows.get(at);
        let lock = row.and_then(|row| self.lock_of(row));
        self.selected = lock.map(|lock| lock.name.clone());
    }
}

/// Returns how many lines are scrolled away after a key. `None` for other keys.
fn scrolled(code: KeyCode, scroll: usize, page: usize) -> Option<usize> {
    Some(match code {
        KeyCode::Up | KeyCode::Char('k') => scroll.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => scroll.saturating_add(1),
        KeyCode::PageUp => scroll.saturating_sub(page),
        KeyCode::PageDown => scroll.saturating_add(page),
        KeyCode::Home | KeyCode::Char('g') => 0,
        // As far as there are lines: see `View::limit_scroll`.
        KeyCode::End | KeyCode::Char('G') => usize::MAX,
        _ => return None,
    })
}

impl View {
    /// Limits scrolling to these lines of text.
    pub(super) fn limit_scroll(&mut self, lines: usize, rows: usize) -> usize {
        self.page = rows.max(1);
        let last = lines.saturating_sub(self.page);
        match &mut self.mode {
            Mode::Details(details) | Mode::Confirm { details, .. } => {
                details.scroll = details.scroll.min(last);
                details.scroll
            }
            Mode::Help { scroll } => {
                *scroll = (*scroll).min(last);
                *scroll
            }
            Mode::List | Mode::Filter => 0,
        }
    }
}
