//! The real client on a simulated network, clock and servers: the same seed gives the same run.
//!
//! 1. A [`plan::Plan`], drawn from a seed, describes a run: servers, client processes, timings and faults.
//! 2. The run ([`run::run`]) is one thread on tokio's paused clock.
//! 3. Client processes ([`process::Process`]) run the same tasks as those of `robustness/`.
//! 4. The [`network::Network`] between them and the servers delays, cuts and resets connections.
//! 5. [`server::Server`] answers the real client's bytes as a Redis or a Sentinel does. It has no sockets, tasks
//!    or clock: its caller delivers bytes and the time, and sends the bytes that it returns.
//! 6. In the end the history is checked, by the checker of `robustness/` and for linearizability
//!    (`linearizability`).
//! 7. A failing plan is shrunk to the smallest one that fails in the same way ([`shrink`]).

pub mod deployment;
mod faults;
mod linearizability;
pub mod network;
pub mod plan;
pub mod process;
pub mod run;
pub mod server;
pub mod shrink;
pub mod trace;
