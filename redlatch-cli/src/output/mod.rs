//! What the command prints, except for the view of `top`.
//!
//! This module has the settings and the format of messages. [`stderr`] prints messages and log
//! events, [`stdout`] results. [`streams`] writes both.

pub(crate) mod escape;
mod line_queue;
pub(crate) mod stderr;
pub(crate) mod stdout;
pub(crate) mod streams;

use std::io::IsTerminal;
use std::sync::OnceLock;

use clap::ValueEnum;
use serde::Serialize;
use tracing::Level;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};

/// How much is printed on standard error, and in which format.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct Output {
    /// Print only errors and lost locks; the exit code reports everything else
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Also print when a lock is acquired and released, and changes of the connection. The variable
    /// REDLATCH_LOG (else RUST_LOG) selects log events in detail, such as `debug` or
    /// `redlatch=trace`
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,

    /// The format of messages and log events on standard error: `json` prints one object per line,
    /// with timestamp, level, message, target, and the fields of the event [default: text]
    #[arg(
        long,
        global = true,
        env = "REDLATCH_LOG_FORMAT",
        hide_env_values = true,
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    pub(crate) log_format: Option<LogFormat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

static SETTINGS: OnceLock<Output> = OnceLock::new();

/// Returns how much to print and how, as set by [`set`].
pub(crate) fn settings() -> Output {
    SETTINGS.get().copied().unwrap_or_default()
}

/// Sets how much to print and how. Only the first call has an effect.
pub(crate) fn set(output: Output) {
    let _ = SETTINGS.set(output);
}

/// Returns whether messages are printed in JSON.
pub(crate) fn is_json() -> bool {
    settings().log_format == Some(LogFormat::Json)
}

/// A message of the command in JSON. The library's log events have the same keys, and their fields.
#[derive(Serialize)]
struct JsonMessage<'a> {
    timestamp: String,
    level: &'static str,
    message: &'a str,
    target: &'static str,
}

fn line_text(level: Level, what: &str) -> String {
    if is_json() {
        return json_text(level, what);
    }
    let prefix = match level {
        Level::WARN => "warning: ",
        _ => "",
    };
    text_of([&*format!("redlatch: {prefix}{what}")])
}

/// Returns the line that stands in place of dropped ones.
pub(crate) fn dropped_text(lines: usize) -> String {
    let what = format!("{lines} lines were dropped, because they were not read in time");
    line_text(Level::WARN, &what)
}

/// Returns the current time in UTC, as in the log.
pub(crate) fn timestamp() -> String {
    let mut timestamp = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    timestamp
}

fn json_text(level: Level, message: &str) -> String {
    let message = JsonMessage {
        timestamp: timestamp(),
        level: level.as_str(),
        message,
        target: "redlatch",
    };
    let line = serde_json::to_string(&message).unwrap_or_default();
    text_of([&*line])
}

/// Returns whether colors may be used at this stream.
pub(crate) fn has_colors(stream: &impl IsTerminal) -> bool {
    let refuses = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let lacks_them = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    stream.is_terminal() && !refuses && !lacks_them
}

/// Returns the text of lines, or of objects if messages are in JSON. Escapes them here, so that no
/// caller can forget it.
fn text_of<'a>(lines: impl IntoIterator<Item = &'a str>) -> String {
    let escape = match is_json() {
        true => escape::json,
        false => escape::line,
    };
    let lines = lines.into_iter();
    lines.map(|line| escape(line) + "\n").collect()
}
