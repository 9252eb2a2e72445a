//! Checks that the servers and the proxy do what the other tests rely on.

mod cluster;
mod proxy;
mod sentinels;
mod server;
