//! What sentinels and a cluster have in common for a test: masters that fail, and replicas that take
//! their place.
#![allow(unreachable_pub, reason = "shared by the modules of one binary")]

use std::time::{Duration, Instant};

use redlatch::{Client, ClientBuilder};
use redlatch_testkit::{Ca, Cluster, ClusterPlan, SentinelPlan, Sentinels, Server, TlsPlan};

pub use crate::common::granted;
use crate::common::{LONG, risen};

pub mod failover;
pub mod steady;

/// A lease that outlasts a failover on a busy machine, and whose renewals can be waited for. After its
/// last renewal two thirds are left: a failover takes five seconds, and a client that hears nothing of a
/// master that hangs looks every five seconds.
pub const LASTING: Duration = Duration::from_secs(24);

/// Longer than any test takes, in milliseconds: nobody is taken for gone.
pub const NEVER: u32 = 600_000;

pub enum Deployment {
    Sentinel(Sentinels),
    Cluster(Cluster),
}

use Deployment::{Cluster as InCluster, Sentinel as BehindSentinels};

impl Deployment {
    /// Another master is chosen soon.
    pub fn sentinel() -> Deployment {
        BehindSentinels(Sentinels::start())
    }

    pub fn cluster() -> Deployment {
        InCluster(Cluster::start())
    }

    /// The same, and all of them speak nothing but TLS.
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

    /// No other master is ever chosen.
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

    /// Of their certificates, if they have some.
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
        // A sentinel has a second, in which a busy machine may not get through a handshake.
        granted(|| settings.clone().connect(&url)).await
    }

    /// The place of the master that has a key.
    pub fn master(&self, key: &str) -> usize {
        match self {
            BehindSentinels(all) => all.master(),
            InCluster(all) => all.owner_of(key),
        }
    }

    /// The places of its replicas.
    pub fn replicas(&self, master: usize) -> Vec<usize> {
        match self {
            BehindSentinels(all) => (0..all.servers().len())
                .filter(|&place| place != master)
                .collect(),
            InCluster(all) => vec![all.replica_of(master)],
        }
    }

    pub fn server(&self, place: usize) -> &Server {
        match self {
            BehindSentinels(all) => &all.servers()[place],
            InCluster(all) => &all.nodes()[place],
        }
    }

    pub fn await_new_master(&self, key: &str, old: usize) -> usize {
        match self {
            BehindSentinels(all) => all.await_new_master(old),
            InCluster(all) => all.await_owner_change(key, old),
        }
    }

    pub fn await_whole(&self) {
        match self {
            BehindSentinels(all) => all.await_whole(),
            InCluster(all) => all.await_whole(),
        }
    }

    pub fn kill(&mut self, place: usize) {
        match self {
            BehindSentinels(all) => all.kill(place),
            InCluster(all) => all.kill(place),
        }
    }

    pub fn restart(&mut self, place: usize) {
        match self {
            BehindSentinels(all) => all.restart(place),
            InCluster(all) => all.restart(place),
        }
    }
}

/// What rides out a failover.
pub fn patient() -> ClientBuilder {
    Client::builder().response_timeout(LONG)
}

/// What a server says. Asked again while a node takes the cluster for down, because it has not heard of
/// the others for a while.
pub async fn answered<T: redis::FromRedisValue>(server: &Server, command: &[&str]) -> T {
    let begun = Instant::now();
    loop {
        match server.try_ask(command) {
            Err(_) if begun.elapsed() < LONG => tokio::time::sleep(Duration::from_millis(5)).await,
            answer => return answer.unwrap(),
        }
    }
}

pub fn pttl(server: &Server, key: &str) -> i64 {
    server.ask(&["PTTL", key])
}

/// Waits until the key's lease is seen to rise.
pub async fn renewal(server: &Server, key: &str) {
    risen(key, || async {
        let left: i64 = answered(server, &["PTTL", key]).await;
        assert!(left > -2, "{key} is gone");
        left
    })
    .await;
}
