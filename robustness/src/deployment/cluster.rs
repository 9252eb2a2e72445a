//! A cluster: three masters with a replica each.

use redlatch_testkit::{Cluster, ClusterPlan, FailoverMode, Server};

use super::{DURABLE, Deployment, Needs};
use crate::Result;

/// A key in the slots of each master, in the order of the masters at the start.
const KEYS: [&str; 3] = ["b", "c", "a"];

/// Node timeout with which a silent node never counts as failed, in ms.
const NO_FAILOVER_TIMEOUT: u32 = 600_000;

pub(super) fn start(needs: Needs) -> Cluster {
    let plan = ClusterPlan {
        args: if needs.durable { &DURABLE } else { &[] },
        separate_addresses: needs.partitions,
        ..ClusterPlan::default()
    };
    Cluster::start_with(match needs.no_failover {
        true => ClusterPlan {
            replicas: 0,
            node_timeout_millis: NO_FAILOVER_TIMEOUT,
            ..plan
        },
        false => plan,
    })
}

impl Deployment for Cluster {
    fn url(&self) -> String {
        self.url()
    }

    fn masters(&self) -> Vec<usize> {
        let mut masters: Vec<usize> = KEYS.iter().map(|key| self.master_of_key(key)).collect();
        masters.sort_unstable();
        masters.dedup();
        masters
    }

    fn server(&self, place: usize) -> &Server {
        &self.nodes()[place]
    }

    fn servers(&self) -> Vec<&Server> {
        self.nodes().iter().collect()
    }

    fn kill(&mut self, place: usize) {
        self.kill(place);
    }

    fn restart(&mut self, place: usize) {
        self.restart(place);
    }

    fn await_successor(&self, place: usize) -> Result<()> {
        for key in KEYS {
            if self.master_of_key(key) == place {
                self.await_master_change(key, place);
            }
        }
        Ok(())
    }

    fn hand_over(&self, place: usize) -> Result<()> {
        self.fail_over(self.replica_of(place), FailoverMode::Graceful);
        Ok(())
    }

    fn await_healthy(&self) {
        self.await_healthy();
    }

    fn cluster(&mut self) -> Option<&mut Cluster> {
        Some(self)
    }
}
