//! Tests of the public API: on the embedded store, on real servers, and in virtual time.

// Lower than the default of 128: see `future_size`.
#![recursion_limit = "100"]

#[macro_use]
mod common;

mod docs;
mod every_store;
mod failures;
mod features;
mod topologies;
mod virtual_time;
