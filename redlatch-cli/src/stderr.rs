//! Messages for users, and log events: always on standard error. They delay nothing (see
//! [`streams`](crate::streams)).

use std::fmt;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;

use clap::ValueEnum;
use serde::Serialize;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::escape;
use crate::streams::STDERR;

/// Prints an error like `eprintln!`, with the name of the program as prefix.
macro_rules! stderr {
    ($($what:tt)*) => { $crate::stderr::line(tracing::Level::ERROR, format_args!($($what)*)) };
}
pub(crate) use stderr;

/// Like `stderr!`, for a warning, unless --quiet is set.
macro_rules! warning {
    ($($what:tt)*) => {
        if !$crate::stderr::output().quiet {
            $crate::stderr::line(tracing::Level::WARN, format_args!($($what)*))
        }
    };
}
pub(crate) use warning;

/// Like `stderr!`, for information, unless --quiet is set.
macro_rules! note {
    ($($what:tt)*) => {
        if !$crate::stderr::output().quiet {
            $crate::stderr::line(tracing::Level::INFO, format_args!($($what)*))
        }
    };
}
pub(crate) use note;

/// Like `note!`, but only with --verbose.
macro_rules! detail {
    ($($what:tt)*) => {
        if $crate::stderr::output().verbose {
            $crate::stderr::line(tracing::Level::INFO, format_args!($($what)*))
        }
    };
}
pub(crate) use detail;

/// How much is printed on standard error, and in which format.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct Output {
    /// Print only errors and lost locks; the exit code reports everything else
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Also print when a lock is acquired and released, and changes of the connection. The variable
    /// REDLATCH_LOG (else RUST_LOG) selects log events in detail, such as `debug` or `redlatch=trace`
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,

    /// The format of messages and log events on standard error: `json` prints one object per line, with
    /// timestamp, level, message, target, and the fields of the event [default: text]
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

static OUTPUT: OnceLock<Output> = OnceLock::new();

/// Returns how much to print and how, as set by [`set_output`].
pub(crate) fn output() -> Output {
    OUTPUT.get().copied().unwrap_or_default()
}

/// Sets how much to print and how. Only the first call has an effect.
pub(crate) fn set_output(output: Output) {
    let _ = OUTPUT.set(output);
}

/// Returns whether messages are printed in JSON.
pub(crate) fn is_json() -> bool {
    output().log_format == Some(LogFormat::Json)
}

/// A message of the command in JSON. The library's log events have the same keys, and their fields.
#[derive(Serialize)]
struct JsonMessage<'a> {
    timestamp: String,
    level: &'static str,
    message: &'a str,
    target: &'static str,
}

/// Prints one message of this level.
pub(crate) fn line(level: Level, what: fmt::Arguments<'_>) {
    STDERR.send(line_text(level, &what.to_string()));
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

/// Prints the explanation of wrong usage, which may have several lines.
pub(crate) fn usage_text(text: &str) {
    if is_json() {
        let text = text.strip_prefix("error: ").unwrap_or(text);
        return STDERR.send(json_text(Level::ERROR, text.trim_end()));
    }
    STDERR.send(text_of(text.lines()));
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

/// Writes log events, each of them as one line.
struct LogWriter;

impl io::Write for LogWriter {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let line = String::from_utf8_lossy(event);
        STDERR.send(text_of([line.trim_end_matches('\n')]));
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints the library's warnings for the operator. If REDLATCH_LOG or RUST_LOG is set, prints a log
/// with all events that it selects.
pub(crate) fn start_log() {
    let output = output();
    let custom_filter = ["REDLATCH_LOG", "RUST_LOG"]
        .into_iter()
        .filter_map(|variable| Some((variable, std::env::var(variable).ok()?)))
        .find(|(_, filter)| !filter.is_empty());
    let filter = match &custom_filter {
        Some((variable, filter)) => custom_targets(variable, filter),
        None => targets(match output {
            Output { quiet: true, .. } => QUIET_FILTER,
            Output { verbose: true, .. } => VERBOSE_FILTER,
            _ => DEFAULT_FILTER,
        }),
    };
    let base = tracing_subscriber::fmt()
        .with_max_level(Level::TRACE)
        .with_writer(|| LogWriter)
        // Colors would be escaped.
        .with_ansi(false)
        // Otherwise it would print them by itself.
        .log_internal_errors(false);
    if is_json() {
        let json = base.json().flatten_event(true).with_span_list(false);
        json.finish().with(filter).init();
    } else if custom_filter.is_some() {
        base.finish().with(filter).init();
    } else {
        base.event_format(MessageFormat)
            .finish()
            .with(filter)
            .init();
    }
}

/// Parses a filter of the user. Instead of an invalid one, which may be meant for another program,
/// the default applies.
fn custom_targets(variable: &str, filter: &str) -> Targets {
    filter.parse().unwrap_or_else(|error| {
        warning!("the log filter in {variable} is invalid ({error}); using {DEFAULT_FILTER:?}");
        targets(DEFAULT_FILTER)
    })
}

/// Parses one of the filters below.
fn targets(filter: &str) -> Targets {
    filter.parse().unwrap_or_default()
}

/// `run` reports a loss itself, with its consequences. A lost connection is a warning, so its
/// restoration is shown, too.
const DEFAULT_FILTER: &str = "warn,redlatch::hold=error,redlatch::store::redis::connection=info";
const QUIET_FILTER: &str = "error";
const VERBOSE_FILTER: &str = "info,redlatch::hold=error";

/// Formats events like all other messages: `redlatch: warning: …`.
struct MessageFormat;

impl<S, N> FormatEvent<S, N> for MessageFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        };
        let mut fields = String::new();
        context.format_fields(Writer::new(&mut fields), event)?;
        writeln!(writer, "redlatch: {level}{fields}")
    }
}
