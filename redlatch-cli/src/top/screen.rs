//! The terminal while the view is shown: raw, on the alternate screen. Restored when the view ends,
//! also by a panic.

use std::io::{self, Stdout};
use std::mem::ManuallyDrop;
use std::panic;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{DisableBracketedPaste, EnableBracketedPaste};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{cursor, execute};
use ratatui::layout::Rect;

use super::draw::draw;
use super::view::View;
use crate::exit::Failure;
use crate::process::{signals, terminal};

/// Whether the terminal is changed.
static IS_CHANGED: AtomicBool = AtomicBool::new(false);

/// Not dropped by ratatui, which writes to standard error if the terminal is gone, and panics if that is the terminal, too.
pub(super) struct Screen(ManuallyDrop<Terminal<CrosstermBackend<Stdout>>>);

impl Screen {
    pub(super) fn enter() -> Result<Screen, Failure> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let print = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                // So that the message is readable.
                restore();
                print(info);
            }));
        });
        change().map_err(failure)?;
        // Restores it if the next step fails.
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()));
        match terminal {
            Ok(terminal) => Ok(Screen(ManuallyDrop::new(terminal))),
            Err(error) => {
                restore();
                Err(failure(error))
            }
        }
    }

    pub(super) fn draw(&mut self, view: &mut View) -> Result<(), Failure> {
        let now = std::time::SystemTime::now();
        let drawn = self
            .0
            .draw(|frame| draw(view, frame.buffer_mut(), now))
            .map(drop);
        drawn.map_err(failure)
    }

    /// Draws every cell anew with the next `draw`.
    pub(super) fn clear(&mut self) -> Result<(), Failure> {
        // Unlike `Terminal::clear` it does not ask the terminal for the cursor; the thread that
        // reads keys would get the answer.
        let resized = self.0.size().and_then(|size| {
            let area = Rect::new(0, 0, size.width, size.height);
            self.0.resize(area)
        });
        resized.map_err(failure)
    }

    /// Stops this process, as Ctrl-Z does, until it is in the foreground again.
    pub(super) fn suspend(&mut self) -> Result<(), Failure> {
        if signals::can_stop() {
            restore();
            signals::stop_now();
        }
        self.resume()
    }

    /// Shows the view again after this process was stopped. The shell may have changed the
    /// terminal.
    pub(super) fn resume(&mut self) -> Result<(), Failure> {
        // In the background the system would stop this process when it changes the terminal.
        while terminal::is_in_background(io::stdout()) && signals::can_stop() {
            signals::stop_now();
        }
        // The settings of the shell are restored later.
        let _ = disable_raw_mode();
        change().map_err(failure)?;
        self.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn failure(error: io::Error) -> Failure {
    Failure::system("cannot use the terminal", &error)
}

fn change() -> io::Result<()> {
    enable_raw_mode()?;
    IS_CHANGED.store(true, Ordering::SeqCst);
    execute!(
        io::stdout(),
        EnterAlternateScreen,
        EnableBracketedPaste,
        cursor::Hide
    )
}

/// Restores the terminal if it is changed. Errors are ignored: the terminal may be gone.
fn restore() {
    if IS_CHANGED.swap(false, Ordering::SeqCst) {
        let _ = execute!(
            io::stdout(),
            DisableBracketedPaste,
            LeaveAlternateScreen,
            cursor::Show
        );
        let _ = disable_raw_mode();
    }
}
