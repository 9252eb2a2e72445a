//! The faults that a run injects.
//!
//! Each fault begins, lasts for a while, and is repaired. A row of the table and the soak differ only in how
//! often a fault happens and for how long. A fault declares what it may cost holders, so that the checker
//! can tell expected losses from violations.

mod clients;
mod data;
mod network;
mod partition;
mod replicas;
mod server;

use std::time::Duration;

use crate::Result;
use crate::checker::Losses;
use crate::scene::Scene;
use crate::site::{Needs, Topology};
use crate::worker::Sync;

#[derive(Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// Description for the output.
    pub(crate) what: &'static str,
    pub(crate) on: &'static [Topology],
    pub(crate) needs: Needs,
    /// Losses that holders may have in a row of the table.
    pub(crate) losses: Losses,
    pub(crate) lasts: Lasts,
    /// Factor for the lease, for faults that take long and must not cause a loss.
    pub(crate) lease: u32,
    /// Number of replicas that clients wait for.
    pub(crate) sync: Sync,
    /// Whether client ids are chosen, so that a process has those of the process that it replaces.
    pub(crate) chosen_ids: bool,
    /// Number of additional locks that one client holds during the whole run.
    pub(crate) held: usize,
    /// Number of repetitions in the table.
    pub(crate) times: u32,
    /// Whether the soak uses it. Faults that lose data are excluded, because they would excuse too many
    /// violations.
    pub(crate) soaks: bool,
    /// Whether it may begin during another fault: it needs no server.
    pub(crate) beside: bool,
    /// Whether a promoted replica has all data of its master.
    pub(crate) orderly: bool,
    pub(crate) act: fn(&mut Scene, Duration) -> Result<()>,
}

/// Duration in the table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lasts {
    /// A sixth of a lease: every failed renewal can be retried in time.
    Moment,
    /// 1.05 leases: it ends while the releases of lost locks are being retried.
    JustPastLease,
    /// One and a half leases.
    PastLease,
}

impl Lasts {
    pub(crate) fn of(self, lease: Duration) -> Duration {
        match self {
            Lasts::Moment => lease / 6,
            Lasts::JustPastLease => lease * 21 / 20,
            Lasts::PastLease => lease * 3 / 2,
        }
    }
}

/// Returns all faults.
pub(crate) fn all() -> Vec<Fault> {
    let mut all = vec![Fault {
        name: "nothing",
        what: "no fault",
        soaks: false,
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

/// Defaults of most faults.
const BASE: Fault = Fault {
    name: "",
    what: "",
    on: &Topology::ALL,
    needs: Needs::NOTHING,
    losses: Losses::None,
    lasts: Lasts::Moment,
    lease: 1,
    sync: Sync::All,
    chosen_ids: false,
    held: 0,
    times: 3,
    soaks: true,
    beside: false,
    orderly: false,
    act: |_, lasts| {
        std::thread::sleep(lasts);
        Ok(())
    },
};
