//! A cluster: three masters with a replica each.

use redlatch_testkit::{Cluster, ClusterPlan, Server, Takeover};

use super::{DURABLE, Needs, Site};
use crate::Result;

/// A key in the slots of each master, in the order of the masters at the start.
const KEYS: [&str; 3] = ["b", "c", "a"];

/// Node timeout with which a silent node never counts as failed, in ms.
const NEVER_GONE: u32 = 600_000;

pub(super) fn cluster(needs: Needs) -> Cluster {
    let plan = ClusterPlan {
        args: if needs.durable { &DURABLE } else { &[] },
        apart: needs.partitions,
        ..ClusterPlan::default()
    };
    Cluster::start_with(match needs.unreplaced {
        true => ClusterPlan {
            replicas: 0,
            node_timeout_millis: NEVER_GONE,
            ..plan
        },
        false => plan,
    })
}

impl Site for Cluster {
    fn url(&self) -> String {
        self.url()
    }

    fn masters(&self) -> Vec<usize> {
        let mut masters: Vec<usize> = KEYS.iter().map(|key| self.owner_of(key)).collect();
        masters.sort_unstable();
        masters.dedup();
        masters
    }

    fn server(&self, place: usize) -> &Server {
        &self.nodes()[place]
    }

    fn kill(&mut self, place: usize) {
        self.kill(place);
    }

    fn restart(&mut self, place: usize) {
        self.restart(place);
    }

    fn await_successor(&self, place: usize) -> Result<()> {
        for key in KEYS {
            if self.owner_of(key) == place {
                self.await_owner_change(key, place);
            }
        }
        Ok(())
    }

    fn hand_over(&self, place: usize) -> Result<()> {
        self.fail_over(self.replica_of(place), Takeover::Orderly);
        Ok(())
    }

    fn await_whole(&self) {
        self.await_whole();
    }

    fn cluster(&mut self) -> Option<&mut Cluster> {
        Some(self)
    }
}
