//! The real client on a simulated network, clock and servers: the same seed gives the same run.
//!
//! A run ([`run::run`]) is one thread on tokio's paused clock. A [`plan::Plan`] says what it is made of. Client
//! processes ([`process::Process`]) do what those of `robustness/` do, and are checked in the same way. The
//! [`network::Network`] between them and the servers delays, cuts and resets.
//! [`server::Server`] answers the real client's bytes as a Redis or a Sentinel does. It has no sockets, tasks
//! or clock: its caller delivers bytes and the time, and sends what it returns.

mod faults;
mod linearizability;
pub mod network;
pub mod plan;
pub mod process;
pub mod run;
pub mod server;
pub mod shrink;
pub mod site;
pub mod trace;
