//! A fault: what it breaks, where, for how long, and which losses it may cause.

use std::time::Duration;

use crate::Result;
use crate::checker::Losses;
use crate::clock::now;
use crate::context::{Context, Inject};
use crate::deployment::{Needs, Topology};
use crate::history::DataLoss;
use crate::processes::lock;
use crate::worker::Sync;

#[derive(Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// Description for the output.
    pub(crate) description: &'static str,
    pub(crate) topologies: &'static [Topology],
    pub(crate) needs: Needs,
    /// Losses that holders may have in a row of the table.
    pub(crate) losses: Losses,
    pub(crate) duration: FaultDuration,
    /// Factor for the lease, for faults that take long and must not cause a loss.
    pub(crate) lease: u32,
    /// Number of replicas that clients wait for.
    pub(crate) sync: Sync,
    /// Whether client ids are chosen, so that a process has those of the process that it replaces.
    pub(crate) chosen_ids: bool,
    /// Number of additional locks that one client holds during the whole run.
    pub(crate) permanent_locks: usize,
    /// Number of repetitions in the table.
    pub(crate) times: u32,
    /// Whether the soak uses it. Faults that lose data are excluded, because they would excuse too many
    /// violations.
    pub(crate) in_soak: bool,
    /// Whether it may begin during another fault: it needs no server.
    pub(crate) can_overlap: bool,
    /// Whether a promoted replica has all data of its master.
    pub(crate) lossless_failover: bool,
    pub(crate) inject: Inject,
}

/// Duration in the table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FaultDuration {
    /// A sixth of a lease: every failed renewal can be retried in time.
    Moment,
    /// 1.05 leases: it ends while the releases of lost locks are being retried.
    JustPastLease,
    /// One and a half leases.
    PastLease,
}

impl FaultDuration {
    pub(crate) fn of(self, lease: Duration) -> Duration {
        match self {
            FaultDuration::Moment => lease / 6,
            FaultDuration::JustPastLease => lease * 21 / 20,
            FaultDuration::PastLease => lease * 3 / 2,
        }
    }
}

impl Fault {
    /// Runs a fault, and repairs it. If a replica was promoted meanwhile, intentionally or not, it may lack data.
    pub(crate) fn run(&self, context: &mut Context, duration: Duration) -> Result<()> {
        let (from, before) = (now(), context.deployment.masters());
        (self.inject)(context, duration).map_err(|error| format!("{}: {error}", self.name))?;
        if context.deployment.masters() == before {
            return Ok(());
        }
        lock(&context.history).failovers.push((from, now()));
        match self.lossless_failover {
            true => Ok(()),
            false => context.record_data_loss(from, DataLoss::UNREPLICATED),
        }
    }
}

/// Defaults of most faults.
pub(super) const BASE: Fault = Fault {
    name: "",
    description: "",
    topologies: &Topology::ALL,
    needs: Needs::NOTHING,
    losses: Losses::None,
    duration: FaultDuration::Moment,
    lease: 1,
    sync: Sync::All,
    chosen_ids: false,
    permanent_locks: 0,
    times: 3,
    in_soak: true,
    can_overlap: false,
    lossless_failover: false,
    inject: |_, duration| {
        std::thread::sleep(duration);
        Ok(())
    },
};
