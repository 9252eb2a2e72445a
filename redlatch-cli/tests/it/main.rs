//! Tests of the real binary against a real server.

mod deployments;
mod exit_codes;
mod inspect;
mod kinds;
mod loss;
mod outages;
mod passwords;
mod process_trees;
mod registry;
mod signals;
mod support;
mod terminal;
mod tokens;
mod usage;
