//! Fencing tokens of redlatch, checked by PostgreSQL, MariaDB, SQLite or an HTTP service. A late write of a former holder is refused.
//!
//! [docs/fencing.md](https://github.com/redlatch/redlatch/blob/main/docs/fencing.md) has the rules that a writer must keep. The tests run
//! this code against a real Redis and real databases while holders are stopped for longer than their leases.
//!
//! In the order of one write: [`release_after`] acquires the [`FencedLock`](redlatch::FencedLock) and keeps it until the transaction
//! has ended; `fence` of the database's module records the token as the first statement of the transaction;
//! `is_stale` recognizes a refused token. [`retry_stale`] repeats the write after Redis has lost its data. A service
//! that receives tokens reads them with [`http::fencing_token`].

#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "mariadb")]
pub mod mariadb;
#[cfg(feature = "postgresql")]
pub mod postgresql;
#[cfg(feature = "postgresql-sqlx")]
pub mod postgresql_sqlx;
mod release_after;
mod retry_stale;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "testing")]
mod storage;

pub use release_after::release_after;
pub use retry_stale::{Stale, retry_stale};
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use storage::{Outcome, Storage, post};
