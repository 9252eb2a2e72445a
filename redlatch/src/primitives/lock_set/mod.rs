//! What the multi-lock and the RedLock share: their members, and the locks that they hold.

mod held_member;
mod member;

pub(crate) use self::held_member::{HeldMember, any_lost, release_all};
pub use self::member::Member;
#[cfg(test)]
pub(crate) use self::member::erase_grant;
pub(crate) use self::member::{ErasedGrant, shortest_outage_limit, validated};
