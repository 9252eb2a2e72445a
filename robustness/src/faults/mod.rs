//! The faults that a run injects.
//!
//! Each fault begins, lasts for a while, and is repaired. A row of the table and the soak differ only in how
//! often a fault happens and for how long. A fault declares what it may cost holders, so that the checker
//! can tell expected losses from violations.

mod clients;
mod data;
mod fault;
mod network;
mod partition;
mod replicas;
mod server;

use fault::BASE;
pub(crate) use fault::{Fault, FaultDuration};

/// Returns all faults.
pub(crate) fn all() -> Vec<Fault> {
    let mut all = vec![Fault {
        name: "nothing",
        description: "no fault",
        in_soak: false,
        ..BASE
    }];
    all.extend(server::FAULTS);
    all.extend(network::FAULTS);
    all.extend(data::FAULTS);
    all.extend(clients::FAULTS);
    all.extend(replicas::FAULTS);
    all.extend(partition::FAULTS);
    all
}
