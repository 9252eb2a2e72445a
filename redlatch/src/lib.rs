//! Redisson's distributed locks, for Rust, on Redis and Valkey.
#![doc = include_str!("crate.md")]
#![forbid(unsafe_code)]

mod background;
mod client;
mod error;
mod hold;
mod lease;
mod listing;
mod name;
mod owner;
mod primitives;
mod session;
mod space;
mod step;
mod store;
mod wait;
mod watchdog;

pub mod blocking;

pub use client::{Client, ClientBuilder, ClientStatus};
pub use error::{Error, Loss, Result};
pub use lease::MAX_LEASE;
pub use listing::{Listed, Listing, ObjectKind};
pub use owner::Owner;
pub use primitives::fair_lock::{Fair, FairLock};
pub use primitives::fenced_lock::{Fenced, FencedLock};
pub use primitives::handle::{Acquire, Guard, Holder, Lock, LockKind, OwnedKind, TryAcquire};
pub use primitives::lock::Reentrant;
pub use primitives::spin_lock::{Backoff, Spin, SpinLock};
pub use store::embedded::Embedded;

/// The examples of the README are tests too.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
