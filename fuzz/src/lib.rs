//! Fuzz targets for everything that parses data from outside: `make fuzz`.
//!
//! A target is a function that must not panic on any input. The tests of this crate run each target on its corpus, without
//! libFuzzer. So the input of a crash becomes a test when it is added there.
//!
//! A new parser gets a line in [`TARGETS`] and a folder in `corpus/`, with at least one valid input.

pub mod targets;

// The parsers of the command, which is a program and no library. Their paths begin with `crate`, so they are modules here.
#[path = "../../redlatch-cli/src/args/mod.rs"]
#[allow(dead_code)]
mod args;
#[path = "../../redlatch-cli/src/cron/crontab.rs"]
#[allow(dead_code)]
mod crontab;
#[path = "../../redlatch-cli/src/duration.rs"]
#[allow(dead_code)]
mod duration;
#[path = "../../redlatch-cli/src/exit.rs"]
#[allow(dead_code)]
mod exit;
#[path = "../../redlatch-cli/src/output/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
mod output;
#[path = "../../redlatch-cli/src/process/mod.rs"]
#[allow(dead_code, unused_imports)]
mod process;
#[path = "../../redlatch-cli/src/store/mod.rs"]
#[allow(dead_code)]
mod store;
#[path = "../../redlatch-cli/src/text.rs"]
#[allow(dead_code)]
mod text;
#[path = "../../redlatch-cli/src/threads.rs"]
#[allow(dead_code)]
mod threads;

/// The name of a target, which is also its folder in `corpus/`, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 10] = [
    ("command-line", targets::command_line::run),
    ("config", targets::config::run),
    ("crontab", targets::crontab::run),
    ("permit-id", targets::permit_id::run),
    ("registry", targets::registry::run),
    ("replies", targets::replies::run),
    ("ticket", targets::ticket::run),
    ("url", targets::url::run),
    ("wire-interleaved", targets::wire::run_interleaved),
    ("wire-replies", targets::wire::run_replies),
];

/// Returns the function of a target.
pub fn target(name: &str) -> Option<fn(&[u8])> {
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    found.map(|(_, run)| *run)
}
