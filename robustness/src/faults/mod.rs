//! What is broken. Each fault is broken, lasts, and is whole again; the row of the table and the soak
//! differ only in how often and for how long.

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
    /// For people.
    pub(crate) what: &'static str,
    pub(crate) on: &'static [Topology],
    pub(crate) needs: Needs,
    /// What it may cost those who hold a lock, when it is one of the table.
    pub(crate) losses: Losses,
    pub(crate) lasts: Lasts,
    /// How many times as long the lease is as in the others, for what takes a while and must not take
    /// anything away.
    pub(crate) lease: u32,
    /// What clients ask of replicas.
    pub(crate) sync: Sync,
    /// Whether the ids of the clients are chosen, so that a process has those of the one whose place it
    /// takes.
    pub(crate) chosen_ids: bool,
    /// How many locks a client holds from the beginning to the end, beside all others.
    pub(crate) held: usize,
    /// How often, in the table.
    pub(crate) times: u32,
    /// Whether it has a place among others at random: what makes the store forget has not, because it
    /// would excuse too much.
    pub(crate) soaks: bool,
    /// Whether it may begin while something else is broken: it asks nothing of the servers.
    pub(crate) beside: bool,
    /// Who takes another's place knows everything that it knew.
    pub(crate) orderly: bool,
    pub(crate) act: fn(&mut Scene, Duration) -> Result<()>,
}

/// How long, in the table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lasts {
    /// A sixth of a lease: every renewal that it hinders can be tried again in time.
    Moment,
    /// A whole lease, and a twentieth: it ends while the releases of lost locks are being retried.
    JustPastLease,
    /// A whole lease, and half of one.
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

/// All that there are.
pub(crate) fn all() -> Vec<Fault> {
    let mut all = vec![Fault {
        name: "nothing",
        what: "nothing is broken",
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

/// What most have in common.
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
