//! Messages for users, and log events: always on standard error. They delay nothing (see
//! [`streams`](crate::output::streams)).

use std::{fmt, io};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::streams::STDERR;
use super::{Output, is_json, json_text, line_text, settings, text_of};

/// Prints an error like `eprintln!`, with the name of the program as prefix.
macro_rules! stderr {
    ($($what:tt)*) => { $crate::output::stderr::line(tracing::Level::ERROR, format_args!($($what)*)) };
}
pub(crate) use stderr;

/// Like `stderr!`, for a warning, unless --quiet is set.
macro_rules! warning {
    ($($what:tt)*) => {
        if !$crate::output::settings().quiet {
            $crate::output::stderr::line(tracing::Level::WARN, format_args!($($what)*))
        }
    };
}
pub(crate) use warning;

/// Like `stderr!`, for information, unless --quiet is set.
macro_rules! note {
    ($($what:tt)*) => {
        if !$crate::output::settings().quiet {
            $crate::output::stderr::line(tracing::Level::INFO, format_args!($($what)*))
        }
    };
}
pub(crate) use note;

/// Like `note!`, but only with --verbose.
macro_rules! detail {
    ($($what:tt)*) => {
        if $crate::output::settings().verbose {
            $crate::output::stderr::line(tracing::Level::INFO, format_args!($($what)*))
        }
    };
}
pub(crate) use detail;

/// Prints one message of this level.
pub(crate) fn line(level: Level, what: fmt::Arguments<'_>) {
    STDERR.send(line_text(level, &what.to_string()));
}

/// Prints the explanation of wrong usage, which may have several lines.
pub(crate) fn usage_text(text: &str) {
    if is_json() {
        let text = text.strip_prefix("error: ").unwrap_or(text);
        return STDERR.send(json_text(Level::ERROR, text.trim_end()));
    }
    STDERR.send(text_of(text.lines()));
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
    let output = settings();
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
