//! Tests of the view without a terminal and without a store: what keys do, and what is drawn.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use redlatch::Expiry;

use super::cells::width;
use super::draw::draw;
use super::view::{Action, Mode, Sort, View};
use crate::look::{Holder, Lock, Look, Party, Waiter};

/// 2025-11-24 16:00:13 UTC.
fn now() -> SystemTime {
    UNIX_EPOCH + seconds(1_764_000_013)
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn party(owner: &str, client: &str, age: u64, note: &str) -> Party {
    Party {
        owner: owner.to_owned(),
        client: (!client.is_empty()).then(|| client.to_owned()),
        age: (!client.is_empty()).then(|| seconds(age)),
        note: (!note.is_empty()).then(|| note.to_owned()),
    }
}

fn held(name: &str, kind: &str, party: Party) -> Lock {
    Lock {
        name: name.to_owned(),
        kind: kind.to_owned(),
        holders: vec![Holder {
            party,
            lease: Expiry::In(seconds(29)),
            side: None,
            holds: 1,
        }],
        holder_count: 1,
        ..Lock::default()
    }
}

fn with_waiters(mut lock: Lock, waiters: Vec<Party>) -> Lock {
    lock.waiter_count = waiters.len();
    lock.waiters = waiters
        .into_iter()
        .map(|party| Waiter {
            party,
            position: None,
        })
        .collect();
    lock
}

/// Returns a look that began `after` so many seconds.
fn look(start: Instant, after: u64, mut locks: Vec<Lock>) -> Look {
    locks.sort_by(|lock, other| lock.name.cmp(&other.name));
    let mut look = Look::new(start + seconds(after));
    look.locks = locks;
    look.time = now() + seconds(after);
    look
}

fn some_locks() -> Vec<Lock> {
    let mut fenced = held("orders:42", "fenced", party("c1:7", "", 0, ""));
    fenced.token = Some(5);
    vec![
        with_waiters(
            held(
                "nightly",
                "lock",
                party("c2:1", "report@db7 (pid 4711)", 245, "reindex 42"),
            ),
            vec![
                party("c3:1", "web@app1 (pid 6357)", 61, "export"),
                party("c4:1", "backup.sh@db8 (pid 6360)", 5, ""),
            ],
        ),
        fenced,
        held("cache", "read", party("c5:1", "web@app2 (pid 12)", 12, "")),
    ]
}

fn view_with(locks: Vec<Lock>) -> View {
    let mut view = View::new(
        "redis://127.0.0.1:6379".into(),
        "*".into(),
        seconds(1),
        true,
    );
    view.on_look(look(Instant::now(), 0, locks));
    view
}

fn press(view: &mut View, codes: impl IntoIterator<Item = KeyCode>) -> Action {
    let keys = codes
        .into_iter()
        .map(|code| KeyEvent::new(code, KeyModifiers::NONE));
    keys.fold(Action::None, |_, key| view.on_key(key))
}

fn typed(view: &mut View, text: &str) -> Action {
    press(view, text.chars().map(KeyCode::Char))
}

/// Draws the view on a screen of this size.
fn drawn(view: &mut View, columns: u16, rows: u16, now: SystemTime) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal
        .draw(|frame| draw(view, frame.buffer_mut(), now))
        .unwrap();
    terminal
}

/// Returns the lines on the screen, without spaces at their ends.
fn screen(view: &mut View, columns: u16, rows: u16) -> Vec<String> {
    lines(&drawn(view, columns, rows, now()))
}

fn lines(terminal: &Terminal<TestBackend>) -> Vec<String> {
    let buffer = terminal.backend().buffer();
    let cells: Vec<_> = buffer
        .content
        .chunks(buffer.area.width.into())
        .map(|cells| {
            let mut line = String::new();
            let mut skipped = 0;
            for cell in cells {
                if skipped == 0 {
                    line.push_str(cell.symbol());
                    skipped = width(cell.symbol()).saturating_sub(1);
                } else {
                    skipped -= 1;
                }
            }
            line.trim_end().to_owned()
        })
        .collect();
    cells
}

fn names(view: &View) -> Vec<&str> {
    let locks = view.rows.iter().filter_map(|row| view.lock_of(row));
    locks.map(|lock| &*lock.name).collect()
}

fn selected(view: &View) -> &str {
    names(view)[view.selected_row()]
}

#[test]
fn list_fills_80_columns() {
    let mut view = view_with(some_locks());
    let lines = screen(&mut view, 80, 24);
    assert_eq!(
        lines[..6],
        [
            "redlatch top  3 locks, 2 waiters  redis://127.0.0.1:6379            16:00:13 UTC",
            "sort: waiters, then age",
            "  NAME      KIND   HOLDER                             AGE WAITERS  LEASE TURNS/S",
            "> nightly   lock   report@db7 (pid 4711)            4m05s       2  29.0s       -",
            "  cache     read   web@app2 (pid 12)                12.0s       0  29.0s       -",
            "  orders:42 fenced c1:7                               0s+       0  29.0s       -",
        ]
    );
    assert!(lines[6..23].iter().all(String::is_empty), "{lines:#?}");
    assert!(lines[23].starts_with("q quit  ? help"), "{lines:#?}");
}

/// The column has six letters.
#[test]
fn election_is_shown_as_leader() {
    let mut view = view_with(vec![held("cleanup", "election", party("c1:7", "", 0, ""))]);
    let lines = screen(&mut view, 80, 24);
    assert!(
        lines[3].starts_with("> cleanup  leader c1:7 "),
        "{lines:#?}"
    );
}

#[test]
fn narrow_terminal_lacks_columns() {
    let mut view = view_with(some_locks());
    let lines = screen(&mut view, 40, 10);
    assert_eq!(
        lines[..6],
        [
            "redlatch top  3 locks, 2 wa 16:00:13 UTC",
            "sort: waiters, then age",
            "  NAME     HOLDER            AGE WAITERS",
            "> nightly  report@… 4711)  4m05s       2",
            "  cache    web@app…id 12)  12.0s       0",
            "  orde…:42 c1:7              0s+       0",
        ]
    );
    assert!(lines[9].starts_with("q quit"));
}

#[test]
fn wide_terminal_has_waits_and_notes() {
    let mut view = view_with(some_locks());
    let lines = screen(&mut view, 200, 50);
    assert!(lines[2].contains(" WAIT ") && lines[2].ends_with("NOTE"));
    assert!(lines[3].contains(" 1m01s ") && lines[3].ends_with("reindex 42"));
}

#[test]
fn every_size_and_mode_can_be_drawn() {
    let mut view = view_with(some_locks());
    let modes = ["", "/n", "\u{1b}", "\n", "u", "n", " ", "?"];
    for keys in modes {
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                key => KeyCode::Char(key),
            };
            press(&mut view, [code]);
        }
        for columns in [1, 2, 3, 7, 20, 33, 60, 80, 120, 300] {
            for rows in [1, 2, 3, 4, 5, 24] {
                screen(&mut view, columns, rows);
            }
        }
    }
}

#[test]
fn each_column_sorts() {
    let mut view = view_with(some_locks());
    let mut orders = Vec::new();
    for _ in 0..8 {
        orders.push((view.sort, names(&view).join(" ")));
        typed(&mut view, "s");
    }
    let order = |sort| {
        let found = orders.iter().find(|(one, _)| *one == sort);
        &*found.unwrap().1
    };
    assert_eq!(order(Sort::Waiters), "nightly cache orders:42");
    assert_eq!(order(Sort::Wait), "nightly cache orders:42");
    assert_eq!(order(Sort::Age), "nightly cache orders:42");
    assert_eq!(order(Sort::Name), "cache nightly orders:42");
    assert_eq!(order(Sort::Kind), "orders:42 nightly cache");
    assert_eq!(order(Sort::Holder), "orders:42 nightly cache");
    assert_eq!(view.sort, Sort::Waiters);
    typed(&mut view, "S");
    assert_eq!(view.sort, Sort::Holder);
    assert_eq!(screen(&mut view, 80, 24)[1], "sort: holder");
}

#[test]
fn the_sorted_column_is_always_shown() {
    let mut view = view_with(some_locks());
    typed(&mut view, "s");
    assert_eq!(view.sort, Sort::Wait);
    assert!(screen(&mut view, 80, 24)[2].contains(" WAIT "));
    assert!(screen(&mut view, 60, 24)[2].ends_with(" WAIT"));
}

#[test]
fn filter_matches_names_and_holders() {
    let mut view = view_with(some_locks());
    typed(&mut view, "/DB7");
    assert_eq!(names(&view), ["nightly"]);
    assert!(screen(&mut view, 80, 24)[23].starts_with("/DB7_"));
    press(&mut view, [KeyCode::Enter]);
    assert_eq!(view.mode, Mode::List);
    let lines = screen(&mut view, 80, 24);
    assert!(lines[1].ends_with("filter: DB7 (1)"), "{lines:#?}");
    press(&mut view, [KeyCode::Esc]);
    assert_eq!(names(&view).len(), 3);
    typed(&mut view, "/x");
    assert!(screen(&mut view, 80, 24)[3].contains("no lock matches"));
    press(&mut view, [KeyCode::Backspace]);
    assert_eq!(names(&view).len(), 3);
    view.on_paste("cach\nyuy");
    assert_eq!(names(&view), ["cache"]);
    press(&mut view, [KeyCode::Esc]);
    view.on_paste("q/u");
    assert_eq!((&view.mode, &*view.filter), (&Mode::List, ""));
}

#[test]
fn selection_follows_the_lock() {
    let start = Instant::now();
    let mut view = view_with(some_locks());
    press(&mut view, [KeyCode::Down]);
    assert_eq!(selected(&view), "cache");
    let mut locks = some_locks();
    locks.push(with_waiters(
        held("aaa", "lock", party("c9:1", "x@y (pid 1)", 1, "")),
        vec![party("c8:1", "", 0, "")],
    ));
    view.on_look(look(start, 1, locks));
    assert_eq!(names(&view), ["nightly", "aaa", "cache", "orders:42"]);
    assert_eq!(selected(&view), "cache");
    press(&mut view, [KeyCode::End]);
    assert_eq!(selected(&view), "orders:42");
    press(&mut view, [KeyCode::Home]);
    assert_eq!(selected(&view), "nightly");
    let rest = some_locks()
        .into_iter()
        .filter(|lock| lock.name != "nightly");
    view.on_look(look(start, 2, rest.collect()));
    assert_eq!(selected(&view), "cache", "the first row");
    for after in 3..14 {
        view.on_look(look(start, after, Vec::new()));
    }
    assert_eq!(
        press(
            &mut view,
            [KeyCode::Down, KeyCode::PageUp, KeyCode::End, KeyCode::Enter]
        ),
        Action::None
    );
    assert_eq!(view.mode, Mode::List);
    assert!(screen(&mut view, 80, 24)[3].contains("no locks are held"));
}

#[test]
fn long_lists_scroll() {
    let lock = |i: usize| held(&format!("lock:{i:05}"), "lock", party("c:1", "", 0, ""));
    let mut view = view_with((0..10_000).map(lock).collect());
    screen(&mut view, 80, 24);
    press(&mut view, [KeyCode::PageDown]);
    let lines = screen(&mut view, 80, 24);
    assert!(lines[22].starts_with("> lock:00020"), "{lines:#?}");
    press(&mut view, [KeyCode::End]);
    let lines = screen(&mut view, 80, 24);
    assert!(lines[22].starts_with("> lock:09999"), "{lines:#?}");
    press(&mut view, [KeyCode::Up]);
    let lines = screen(&mut view, 80, 24);
    assert!(lines[21].starts_with("> lock:09998"), "{lines:#?}");
    press(&mut view, [KeyCode::Home]);
    let lines = screen(&mut view, 80, 24);
    assert!(lines[3].starts_with("> lock:00000"), "{lines:#?}");
}

#[test]
fn details_show_holders_waiters_and_history() {
    let start = Instant::now();
    let mut view = view_with(some_locks());
    view.on_look(look(start, 5, some_locks()));
    let mut locks = some_locks();
    locks[0].holders[0].party = party("c3:1", "web@app1 (pid 6357)", 1, "export");
    locks[0].waiters.remove(0);
    locks[0].waiter_count = 1;
    view.on_look(look(start, 10, locks));
    press(&mut view, [KeyCode::Enter]);
    let lines = screen(&mut view, 80, 24);
    assert_eq!(
        lines[2..10],
        [
            "nightly: lock",
            "at least 0.1 turns per second",
            "held by web@app1 (pid 6357) since 16:00:22 UTC (1.0s), \"export\", lease 29.0s",
            "  left, owner c3:1",
            "1 waiter, the longest wait 5.0s",
            "  1. backup.sh@db8 (pid 6360) since 16:00:18 UTC (5.0s)",
            "earlier holders, the latest first",
            "  15:56:13 UTC report@db7 (pid 4711), for 4m10s, \"reindex 42\"",
        ]
    );
    let narrow = screen(&mut view, 40, 10);
    assert!(narrow.iter().all(|line| width(line) <= 40), "{narrow:#?}");
    press(&mut view, [KeyCode::End]);
    let narrow = screen(&mut view, 40, 10);
    assert!(narrow[8].contains("reindex 42"), "{narrow:#?}");
    press(&mut view, [KeyCode::Esc]);
    assert_eq!(view.mode, Mode::List);
}

/// Of very many holders, the store may list others at each look.
#[test]
fn holder_that_is_not_listed_has_not_ended() {
    let start = Instant::now();
    let mut view = view_with(vec![]);
    let readers = |owner, holder_count| Lock {
        holder_count,
        ..held("a", "read", party(owner, "", 0, ""))
    };
    view.on_look(look(start, 1, vec![readers("c:1", 1001)]));
    view.on_look(look(start, 2, vec![readers("c:2", 1001)]));
    assert_eq!(view.history.past("a").count(), 0);
    view.on_look(look(start, 3, vec![readers("c:3", 1)]));
    assert_eq!(view.history.past("a").count(), 1);
}

#[test]
fn turns_are_counted() {
    let start = Instant::now();
    let mut view = View::new("s".into(), "*".into(), seconds(1), true);
    let lock = |owner: &str| held("a", "lock", party(owner, "", 0, ""));
    let fenced = |token| Lock {
        token: Some(token),
        ..held("f", "fenced", party("c:1", "", 0, ""))
    };
    let turns = |view: &View, name| view.history.turns(name).map(|turns| turns.per_second);
    view.on_look(look(start, 0, vec![lock("c:1"), fenced(100)]));
    assert_eq!(turns(&view, "a"), None);
    view.on_look(look(start, 1, vec![lock("c:1"), fenced(103)]));
    assert_eq!(turns(&view, "a"), Some(0.0));
    assert_eq!(turns(&view, "f"), Some(3.0));
    view.on_look(look(start, 2, vec![lock("c:2"), fenced(103)]));
    assert_eq!(turns(&view, "a"), Some(0.5));
    assert_eq!(turns(&view, "f"), Some(1.5));
    // Free in between, and a lock that is new.
    view.on_look(look(start, 3, vec![]));
    view.on_look(look(
        start,
        4,
        vec![lock("c:2"), held("new", "lock", party("c:1", "", 0, ""))],
    ));
    assert_eq!(turns(&view, "a"), Some(0.5));
    assert_eq!(turns(&view, "new"), Some(1.0));
    assert!(!view.history.turns("a").unwrap().is_exact);
    assert!(view.history.turns("f").unwrap().is_exact);
    // The token of a store that has lost its data counts from 1 again.
    view.on_look(look(start, 5, vec![lock("c:2"), fenced(1)]));
    assert_eq!(turns(&view, "f"), Some(3.0 / 5.0));
    // Tokens that follow the clock are no counts.
    view.on_look(look(start, 6, vec![lock("c:2"), fenced(1 << 51)]));
    view.on_look(look(start, 7, vec![lock("c:2"), fenced((1 << 51) + 100)]));
    assert_eq!(turns(&view, "f"), Some(3.0 / 7.0));
    assert!(!view.history.turns("f").unwrap().is_exact);
    // Average of the last ten looks.
    for after in 8..20 {
        view.on_look(look(start, after, vec![lock("c:2")]));
    }
    assert_eq!(turns(&view, "a"), Some(0.0));
}

#[test]
fn free_lock_is_shown_for_ten_looks() {
    let start = Instant::now();
    let mut view = view_with(some_locks());
    for after in 1..=10 {
        let cache = some_locks().remove(2);
        view.on_look(look(start, after, vec![cache]));
        assert_eq!(names(&view).len(), 3);
    }
    let lines = screen(&mut view, 80, 24);
    assert!(lines[0].starts_with("redlatch top  1 lock,"), "{lines:#?}");
    let line = "  orders:42 fenced (free)                               -       0      -       0";
    assert_eq!(lines[5], line);
    view.on_look(look(start, 11, vec![]));
    assert_eq!(names(&view), ["cache"]);
}

#[test]
fn unlocking_needs_a_confirmation() {
    let mut view = view_with(some_locks());
    assert_eq!(typed(&mut view, "uy"), Action::None, "only in the details");
    press(&mut view, [KeyCode::Enter]);
    typed(&mut view, "u");
    let lines = screen(&mut view, 80, 24);
    assert!(
        lines[22].starts_with("Unlock nightly by force? report@db7 (pid 4711)"),
        "{lines:#?}"
    );
    assert_eq!(press(&mut view, [KeyCode::Enter]), Action::None);
    assert_eq!(typed(&mut view, "y"), Action::None);
    let action = typed(&mut view, "uy");
    let unlock = Action::Unlock {
        name: "nightly".into(),
        holders: vec!["c2:1".into()],
    };
    assert_eq!(action, unlock);
    assert_eq!(screen(&mut view, 80, 24)[23], "nightly: unlocking…");
    typed(&mut view, "u");
    view.on_paste("y");
    assert!(matches!(view.mode, Mode::Confirm { .. }));
    let narrow = screen(&mut view, 40, 10);
    assert!(narrow[9].ends_with("key: no"), "{narrow:#?}");
}

#[test]
fn paused_view_keeps_its_look() {
    let start = Instant::now();
    let mut view = view_with(some_locks());
    typed(&mut view, " ");
    view.on_look(look(start, 1, Vec::new()));
    assert_eq!(names(&view).len(), 3);
    assert!(screen(&mut view, 80, 24)[1].starts_with("PAUSED"));
    typed(&mut view, " ");
    assert!(screen(&mut view, 80, 24)[0].starts_with("redlatch top  0 locks"));
}

#[test]
fn stale_data_are_marked() {
    let mut view = view_with(some_locks());
    let later = now() + seconds(7);
    view.on_failure("the store cannot be reached".into(), later);
    view.on_failure("connection refused".into(), later);
    let terminal = drawn(&mut view, 80, 24, later);
    let stale = "STALE since 16:00:13 UTC (7 s): connection refused";
    assert_eq!(lines(&terminal)[2], stale);
    assert!(lines(&terminal)[4].starts_with("> nightly"));
    assert_eq!(terminal.backend().buffer()[(0, 2)].fg, Color::Red);
    view.on_look(look(Instant::now(), 8, some_locks()));
    assert!(screen(&mut view, 80, 24)[2].starts_with("  NAME"));
    let late = lines(&drawn(&mut view, 80, 24, now() + seconds(30)));
    assert_eq!(
        late[2],
        "STALE since 16:00:21 UTC (22 s): waiting for the store"
    );

    let mut view = View::new("s".into(), "*".into(), seconds(1), true);
    assert!(screen(&mut view, 80, 24)[3].contains("looking at the store"));
    view.on_failure("connection refused".into(), now());
    let lines = screen(&mut view, 80, 24);
    assert_eq!(
        lines[2],
        "NO DATA since 16:00:13 UTC (0 ms): connection refused"
    );
}

#[test]
fn nothing_is_colored_without_colors() {
    let mut view = view_with(some_locks());
    view.has_colors = false;
    view.on_failure("down".into(), now());
    press(&mut view, [KeyCode::Enter, KeyCode::Char('u')]);
    for _ in 0..2 {
        let terminal = drawn(&mut view, 80, 24, now());
        let cells = &terminal.backend().buffer().content;
        assert!(
            cells
                .iter()
                .all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset)
        );
        press(&mut view, [KeyCode::Esc, KeyCode::Esc]);
    }
}

#[test]
fn text_from_the_store_does_not_control_the_terminal() {
    let evil = "\u{1b}]0;x\u{7}\u{1b}[2J\u{202e}日本\n\u{9b}31m";
    let holder = party(evil, evil, 5, evil);
    let mut view = view_with(vec![with_waiters(
        held(evil, evil, holder.clone()),
        vec![holder],
    )]);
    view.on_failure(evil.into(), now());
    view.message = Some(evil.into());
    for size in [(80, 24), (40, 10), (200, 50)] {
        for keys in [vec![], vec![KeyCode::Enter], vec![KeyCode::Char('u')]] {
            press(&mut view, keys);
            let terminal = drawn(&mut view, size.0, size.1, now());
            let cells = &terminal.backend().buffer().content;
            let is_harmless = |c: char| !c.is_control() && c != '\u{202e}';
            assert!(
                cells
                    .iter()
                    .all(|cell| cell.symbol().chars().all(is_harmless))
            );
        }
        press(&mut view, [KeyCode::Esc, KeyCode::Esc]);
    }
    assert!(screen(&mut view, 200, 50)[4].contains(r"\u{1b}"));
}

#[test]
fn keys_with_control_have_their_own_meaning() {
    let mut view = view_with(some_locks());
    let mut control = |c| view.on_key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
    assert_eq!(control('c'), Action::Interrupt);
    assert_eq!(control('z'), Action::Suspend);
    assert_eq!(control('l'), Action::Redraw);
    assert_eq!(control('q'), Action::None);
    assert_eq!(typed(&mut view, "q"), Action::Leave);
    typed(&mut view, "?q");
    press(&mut view, [KeyCode::Enter]);
    assert_eq!(typed(&mut view, "q"), Action::Leave);
}
