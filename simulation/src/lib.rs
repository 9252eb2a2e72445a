//! Simulated servers for redlatch's tests: the same seed gives the same run.
//!
//! [`server::Server`] answers the real client's bytes as a Redis or a Sentinel does. It has no sockets, tasks
//! or clock: its caller delivers bytes and the time, and sends what it returns.

pub mod server;
