//! What people are told: always on standard error, and never at the price of a panic. Standard error
//! may be a pipe whose reader has gone, and CMD must not be left alone because of that.

use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::sync::OnceLock;

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::args::Output;

/// Like `eprintln!`, with the program's name in front.
macro_rules! say {
    ($($what:tt)*) => { $crate::say::line(format_args!($($what)*)) };
}
pub(crate) use say;

/// As `say!`, unless --quiet.
macro_rules! note {
    ($($what:tt)*) => {
        if !$crate::say::output().quiet {
            $crate::say::line(format_args!($($what)*))
        }
    };
}
pub(crate) use note;

/// As `say!`, with --verbose only.
macro_rules! detail {
    ($($what:tt)*) => {
        if $crate::say::output().verbose {
            $crate::say::line(format_args!($($what)*))
        }
    };
}
pub(crate) use detail;

static OUTPUT: OnceLock<Output> = OnceLock::new();

/// How much is to be printed, once [`start_log`] knows.
pub(crate) fn output() -> Output {
    OUTPUT.get().copied().unwrap_or_default()
}

pub(crate) fn line(what: fmt::Arguments<'_>) {
    // In one write, so that lines of several processes do not mix.
    raw(&format!("redlatch: {what}\n"));
}

pub(crate) fn raw(what: &str) {
    let _ = std::io::stderr().write_all(what.as_bytes());
}

/// What somebody put into the store must not move the cursor of who looks at it.
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

/// The library's warnings are for the operator too. With REDLATCH_LOG or RUST_LOG set, it is a log
/// with everything that they ask for.
pub(crate) fn start_log(output: Output) {
    let _ = OUTPUT.set(output);
    let asked = ["REDLATCH_LOG", "RUST_LOG"]
        .into_iter()
        .filter_map(|variable| std::env::var(variable).ok())
        .find(|filter| !filter.is_empty());
    let base = || {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            // Or it would panic when standard error is closed.
            .log_internal_errors(false)
    };
    match asked {
        Some(filter) => base().with_env_filter(EnvFilter::new(filter)).init(),
        None => base()
            .with_env_filter(EnvFilter::new(match output {
                Output { quiet: true, .. } => ERRORS,
                Output { verbose: true, .. } => EVENTS,
                _ => WARNINGS,
            }))
            .with_ansi(false)
            .event_format(Short)
            .init(),
    }
}

/// `run` reports a loss itself, with its consequences. A lost connection is a warning, so its return is
/// shown, too.
const WARNINGS: &str = "warn,redlatch::hold=error,redlatch::store::redis::link=info";
const ERRORS: &str = "error";
const EVENTS: &str = "info,redlatch::hold=error";

/// `redlatch: warning: …`, like all else that is said.
struct Short;

impl<S, N> FormatEvent<S, N> for Short
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
            tracing::Level::ERROR => "error: ",
            tracing::Level::WARN => "warning: ",
            _ => "",
        };
        write!(writer, "redlatch: {level}")?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
