//! Tests of the real binary against a real server.

mod completions;
mod config;
mod deployments;
mod elect;
mod exit_codes;
mod exporter;
mod http;
mod inspect;
mod json_log;
mod kinds;
mod loss;
mod once;
mod outages;
mod passwords;
mod process_trees;
mod registry;
mod revocation;
mod signal_phases;
mod signals;
mod support;
mod terminal;
mod tickets;
mod tokens;
mod top;
mod usage;
mod watch;
