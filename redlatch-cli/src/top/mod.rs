//! `redlatch top`: a view of the locks in the terminal, refreshed all the time.
//!
//! 1. A thread looks at the store again and again (`looks`), and sends each complete look.
//! 2. The view (`view`) keeps the latest look and what has changed, and reacts to keys. It is drawn into a
//!    buffer (`draw`). Neither does input or output.
//! 3. This loop waits for keys, looks and signals, and draws the view (`screen`).
//! 4. The terminal is restored whenever the program leaves it: at the end, if it is stopped, and
//!    after a panic.

mod cells;
mod draw;
mod looks;
mod screen;
#[cfg(test)]
mod tests;

mod view;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, SystemTime};

use ratatui::crossterm::event::{self, Event, KeyEventKind};
use rustix::process::{Signal, kill_current_process_group};
use tokio::sync::mpsc;

use self::looks::{Report, Unlock};
use self::screen::Screen;
use self::view::{Action, View};
use crate::args::show::Top;
use crate::exit::{self, Failure};
use crate::process::signals::{Caught, Signals};
use crate::store;
use crate::store::args::StoreArgs;
use crate::threads::spawn_without_signals;

/// How often the age of stale data is drawn.
const TICK: Duration = Duration::from_secs(1);

pub(crate) async fn top(store_args: StoreArgs, top: Top) -> Result<u8, Failure> {
    if !io::stdout().is_terminal() {
        return Err(Failure::usage(
            "top needs a terminal on standard output; for scripts, use `redlatch ls --json` or `redlatch watch --json`",
        ));
    }
    let mut signals = Signals::catch_for_terminal()?;
    let has_colors = !top.no_color && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    let shown_store = store::shown_url(&store_args)?;
    let mut view = View::new(shown_store, top.pattern.clone(), top.interval, has_colors);
    let mut looks = looks::start(store_args, top.pattern, top.interval)?;
    let mut screen = Screen::enter()?;
    let mut input = read_input()?;
    let mut tick = tokio::time::interval(TICK);
    loop {
        // Drawing may wait for the terminal for ever.
        signals.request();
        screen.draw(&mut view)?;
        tokio::select! {
            biased;
            caught = signals.next() => match caught {
                Caught::Stop => screen.suspend()?,
                Caught::Other(signal) if signal == Signal::CONT => screen.resume()?,
                Caught::End(signal) => return Ok(exit::by_signal(signal.as_raw())),
                Caught::Other(_) | Caught::Child => {}
            },
            event = input.recv() => {
                let mut next = Some(event.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into())));
                // Keys that are typed faster than the terminal draws are handled together.
                while let Some(event) = next {
                    let event = event.map_err(|error| Failure::system("cannot read the terminal", &error))?;
                    match react(&mut view, event) {
                        Action::None => {}
                        Action::Leave => return Ok(exit::OK),
                        Action::Interrupt => return Ok(exit::by_signal(Signal::INT.as_raw())),
                        // To the whole group, as the terminal does it.
                        Action::Suspend => drop(kill_current_process_group(Signal::TSTP)),
                        Action::Redraw => screen.clear()?,
                        Action::Unlock { name, holders } => {
                            let _ = looks.requests.send(Unlock { name, holders });
                        }
                    }
                    next = input.try_recv().ok();
                }
            }
            report = looks.reports.recv() => on_report(&mut view, report)?,
            _ = tick.tick() => {}
        }
    }
}

fn react(view: &mut View, event: Event) -> Action {
    match event {
        Event::Key(key) if key.kind != KeyEventKind::Release => view.on_key(key),
        Event::Paste(text) => {
            view.on_paste(&text);
            Action::None
        }
        _ => Action::None,
    }
}

fn on_report(view: &mut View, report: Option<Report>) -> Result<(), Failure> {
    match report {
        Some(Report::Look(look)) => view.on_look(look),
        Some(Report::Failed(message)) => view.on_failure(message, SystemTime::now()),
        Some(Report::Unlocked(message)) => view.message = Some(message),
        Some(Report::Ended(failure)) => return Err(failure),
        // It has panicked.
        None => {
            return Err(Failure {
                code: exit::SOFTWARE,
                message: "the thread that looks at the store has ended".into(),
            });
        }
    }
    Ok(())
}

/// Reads keys in a thread, because reading blocks.
fn read_input() -> Result<mpsc::Receiver<io::Result<Event>>, Failure> {
    let (sender, receiver) = mpsc::channel(64);
    let reading = move || {
        loop {
            let event = event::read();
            let is_error = event.is_err();
            if sender.blocking_send(event).is_err() || is_error {
                return;
            }
        }
    };
    spawn_without_signals("input", reading)
        .map_err(|error| Failure::system("cannot start a thread", &error))?;
    Ok(receiver)
}
