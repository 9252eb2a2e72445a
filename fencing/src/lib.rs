//! The recipes of `docs/fencing.md`: storages that check fencing tokens. The page shows this code, and the tests run
//! it against a real Redis and real databases while holders are stopped for longer than their leases.
//!
//! All of them write to a ledger, whose entries also record the token of their writer.

pub mod http;
pub mod mariadb;
pub mod postgresql;
pub mod postgresql_sqlx;
mod release_after;
mod retry_stale;
pub mod sqlite;
mod storage;

pub use release_after::release_after;
pub use retry_stale::{Stale, retry_stale};
pub use storage::{Outcome, Storage, post};
