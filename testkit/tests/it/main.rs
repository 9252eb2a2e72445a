//! The servers and the broken networks do what the other tests rely on.

mod cluster;
mod proxy;
mod sentinels;
mod server;
