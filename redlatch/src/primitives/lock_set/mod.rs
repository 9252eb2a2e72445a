//! What the multi-lock and the RedLock share: their members, and the loss of one of their holds.

mod any_lost;
mod member;

pub(crate) use self::any_lost::any_lost;
pub use self::member::Member;
pub(crate) use self::member::{request_metrics, shortest_outage_limit, validated};
