//! Documented promises that adversarial testing found broken: one module for each area. Each test
//! fails without the corresponding fix.

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
