//! TLS behind sentinels and on a cluster, where no server speaks anything else.

mod common;
mod topology;

use topology::{Deployment, failover};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_is_followed_behind_sentinels() {
    failover::a_killed_master(&mut Deployment::tls_sentinel()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_master_is_followed_on_a_cluster() {
    failover::a_killed_master(&mut Deployment::tls_cluster()).await;
}
