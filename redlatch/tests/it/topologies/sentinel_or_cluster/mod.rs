//! Helpers for tests on sentinels and on a cluster: masters fail, and replicas replace them.
#![allow(unreachable_pub, reason = "shared by the modules of one binary")]

use std::time::Instant;

use redlatch_testkit::{Ca, TlsPlan};

pub mod failover;
pub mod steady;

/// A lease that outlasts a failover on a busy machine, but is short enough for tests to wait for a
/// renewal. At least two thirds are always left: a failover takes five seconds, and a client of a
/// hanging master checks the topology every five seconds.
pub const LASTING: Duration = Duration::from_secs(24);

/// Longer than any test takes, in milliseconds: no server ever counts as failed.
pub const NEVER: u32 = 600_000;

pub enum Deployment {
    Sentinel(Sentinels),
    Cluster(Cluster),
}

use Deployment::{Cluster as InCluster, Sentinel as BehindSentinels};

use crate::common::prelude::*;

impl Deployment {
    /// Starts a deployment that soon elects a new master.
    pub fn sentinel() -> Deployment {
        BehindSentinels(Sentinels::start())
    }

    pub fn cluster() -> Deployment {
        InCluster(Cluster::start())
    }

    /// Starts such a deployment whose servers speak only TLS.
    pub fn tls_sentinel() -> Deployment {
        BehindSentinels(Sentinels::start_with(SentinelPlan {
            tls: Some(TlsPlan::default()),
            ..SentinelPlan::default()
        }))
    }

    pub fn tls_cluster() -> Deployment {
        InCluster(Cluster::start_with(ClusterPlan {
            tls: Some(TlsPlan::default()),
            ..ClusterPlan::default()
        }))
    }

    /// Starts a deployment that never elects a new master.
    pub fn steady_sentinel() -> Deployment {
        BehindSentinels(Sentinels::start_with(SentinelPlan {
            replicas: 1,
            sentinels: 1,
            quorum: 1,
            down_after_millis: NEVER,
            ..SentinelPlan::default()
        }))
    }

    pub fn steady_cluster() -> Deployment {
        InCluster(Cluster::start_with(ClusterPlan {
            node_timeout_millis: NEVER,
            ..ClusterPlan::default()
        }))
    }

    pub fn url(&self) -> String {
        match self {
            BehindSentinels(all) => all.url(),
            InCluster(all) => all.url(),
        }
    }

    /// Returns the CA of their certificates, if they use TLS.
    fn ca(&self) -> Option<&Ca> {
        match self {
            BehindSentinels(all) => all.ca(),
            InCluster(all) => all.ca(),
        }
    }

    pub async fn client(&self, settings: ClientBuilder) -> Client {
        let settings = match self.ca() {
            Some(ca) => settings.tls_ca(ca.pem()),
            None => settings,
        };
        let url = self.url();
        // A sentinel has one second to answer, in which a busy machine may not complete a
        // handshake.
        retry_transient(|| settings.clone().connect(&url)).await
    }

    /// Returns the index of the master that owns a key.
    pub fn master(&self, key: &str) -> usize {
        match self {
            BehindSentinels(all) => all.master(),
            InCluster(all) => all.master_of_key(key),
        }
    }

    /// Returns the indexes of its replicas.
    pub fn replicas(&self, master: usize) -> Vec<usize> {
        match self {
            BehindSentinels(all) => (0..all.servers().len())
                .filter(|&index| index != master)
                .collect(),
            InCluster(all) => vec![all.replica_of(master)],
        }
    }

    pub fn server(&self, index: usize) -> &Server {
        match self {
            BehindSentinels(all) => &all.servers()[index],
            InCluster(all) => &all.nodes()[index],
        }
    }

    pub fn await_new_master(&self, key: &str, old: usize) -> usize {
        match self {
            BehindSentinels(all) => all.await_new_master(old),
            InCluster(all) => all.await_master_change(key, old),
        }
    }

    pub fn await_healthy(&self) {
        match self {
            BehindSentinels(all) => all.await_healthy(),
            InCluster(all) => all.await_healthy(),
        }
    }

    pub fn kill(&mut self, index: usize) {
        match self {
            BehindSentinels(all) => all.kill(index),
            InCluster(all) => all.kill(index),
        }
    }

    pub fn restart(&mut self, index: usize) {
        match self {
            BehindSentinels(all) => all.restart(index),
            InCluster(all) => all.restart(index),
        }
    }
}

/// Runs a command on a server. Retries while a cluster node considers the cluster down, because it
/// has not heard from the others for a while.
pub async fn answered<T: redis::FromRedisValue>(server: &Server, command: &[&str]) -> T {
    let begun = Instant::now();
    loop {
        match server.try_command(command) {
            Err(_) if begun.elapsed() < LONG => tokio::time::sleep(Duration::from_millis(5)).await,
            answer => return answer.unwrap(),
        }
    }
}

/// Waits until the key's time to live is seen to rise.
pub async fn until_renewed(server: &Server, key: &str) {
    until_rises(key, || async {
        let left: i64 = answered(server, &["PTTL", key]).await;
        assert!(left > -2, "{key} is gone");
        left
    })
    .await;
}
