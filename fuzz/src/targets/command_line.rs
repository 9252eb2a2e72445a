//! Command lines of the command. The environment variables of the options have the same parsers.

use clap::{CommandFactory as _, FromArgMatches as _};

use crate::args::Args;
use crate::duration;
use crate::store::args::has_password;

/// Parses a command line with one argument on each line of the input. The parts that are valid durations can be displayed.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let mut command = Args::command();
    let words = std::iter::once("redlatch").chain(text.lines());
    match command.try_get_matches_from_mut(words) {
        Ok(matches) => {
            if let Ok(args) = Args::from_arg_matches(&matches) {
                let _ = has_password(args.store_args.url());
            }
        }
        Err(error) => {
            let _ = error.to_string();
        }
    }
    for word in text.lines() {
        if let Ok(parsed) = duration::parse(word) {
            assert!(!duration::short(parsed).is_empty());
            assert!(!duration::rough(parsed).is_empty());
        }
    }
}
