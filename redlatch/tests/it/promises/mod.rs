//! Promises of the documentation that attacks and trials found broken: one module for each area.
//! Each test fails without the fix that it belongs to.

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
