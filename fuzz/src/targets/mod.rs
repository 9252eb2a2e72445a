//! The targets, and the servers that send the input.

pub mod command_line;
pub mod config;
pub mod crontab;
pub mod permit_id;
pub mod registry;
pub mod replies;
mod server;
pub mod ticket;
pub mod url;
pub mod wire;
