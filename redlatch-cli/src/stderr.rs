//! Messages for users: always on standard error, and never a panic. Standard error may be a pipe
//! whose reader has gone, and `redlatch` must not abandon CMD because of that.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::sync::OnceLock;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Like `eprintln!`, with the name of the program as prefix.
macro_rules! stderr {
    ($($what:tt)*) => { $crate::stderr::line(format_args!($($what)*)) };
}
pub(crate) use stderr;

/// Like `stderr!`, unless --quiet is set.
macro_rules! note {
    ($($what:tt)*) => {
        if !$crate::stderr::output().quiet {
            $crate::stderr::line(format_args!($($what)*))
        }
    };
}
pub(crate) use note;

/// Like `stderr!`, but only with --verbose.
macro_rules! detail {
    ($($what:tt)*) => {
        if $crate::stderr::output().verbose {
            $crate::stderr::line(format_args!($($what)*))
        }
    };
}
pub(crate) use detail;

/// How much is printed on standard error.
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
}

static OUTPUT: OnceLock<Output> = OnceLock::new();

/// Returns how much to print, as set by [`start_log`].
pub(crate) fn output() -> Output {
    OUTPUT.get().copied().unwrap_or_default()
}

pub(crate) fn line(what: fmt::Arguments<'_>) {
    // A single write, so that lines of several processes do not mix.
    raw(&format!("redlatch: {what}\n"));
}

pub(crate) fn raw(what: &str) {
    let _ = std::io::stderr().write_all(what.as_bytes());
}

/// Escapes control characters: text from the store must not control the reader's terminal.
pub(crate) fn printable(text: &str) -> String {
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

/// Prints the library's warnings for the operator. If REDLATCH_LOG or RUST_LOG is set, prints a log
/// with all events that it selects.
pub(crate) fn start_log(output: Output) {
    let _ = OUTPUT.set(output);
    let custom_filter = ["REDLATCH_LOG", "RUST_LOG"]
        .into_iter()
        .filter_map(|variable| std::env::var(variable).ok())
        .find(|filter| !filter.is_empty());
    let base = || {
        tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            // Otherwise it would panic when standard error is closed.
            .log_internal_errors(false)
    };
    match custom_filter {
        Some(filter) => base().finish().with(targets(&filter)).init(),
        None => base()
            .with_ansi(false)
            .event_format(MessageFormat)
            .finish()
            .with(targets(match output {
                Output { quiet: true, .. } => QUIET_FILTER,
                Output { verbose: true, .. } => VERBOSE_FILTER,
                _ => DEFAULT_FILTER,
            }))
            .init(),
    }
}

/// Parses a filter. Instead of an invalid one, which may be meant for another program, the default applies.
fn targets(filter: &str) -> Targets {
    filter.parse().unwrap_or_else(|error| {
        stderr!("the log filter {filter:?} is invalid ({error}); using {DEFAULT_FILTER:?}");
        targets(DEFAULT_FILTER)
    })
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
        write!(writer, "redlatch: {level}")?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
