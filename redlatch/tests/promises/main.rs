//! Promises of the documentation that attacks and trials found broken: one module for each area.
//! Each test fails without the fix that it belongs to.

// Less than the default of 128: see `futures`.
#![recursion_limit = "100"]

#[path = "../common/mod.rs"]
mod common;

mod addresses;
mod crowds;
mod fair_queue;
mod futures;
mod generations;
mod limits;
mod local_queues;
mod losses;
mod nodes;
mod tokens;
