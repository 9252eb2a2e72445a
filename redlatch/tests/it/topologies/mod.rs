//! Servers as users run them: Sentinel, Cluster, replicas, TLS, permissions, endpoints of services.

mod acl;
mod addresses;
mod changing_credentials;
mod cluster;
mod cluster_moving;
mod cluster_update;
mod literal_keys;
mod moved_endpoint;
mod redis_client;
mod replicas;
mod resp2;
mod sentinel;
pub(crate) mod sentinel_or_cluster;
mod sharded_endpoint;
mod tls;
mod tls_topologies;
