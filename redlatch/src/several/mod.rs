//! Several locks as one: the multi-lock and the RedLock. Here is what they share: their members,
//! and the loss of one of their holds.
//!
//! There is one hold for each member. The multi-lock runs the scripts of its members within one
//! script. The RedLock sends its requests to all members at the same time, and requests members
//! again that it has lost (`red/regain`).

mod any_lost;
mod member;
pub(crate) mod multi;
pub(crate) mod red;

pub(crate) use self::any_lost::any_lost;
pub use self::member::Member;
pub(crate) use self::member::{
    busy, check_stores, remember_runtime, request_metrics, shortest_outage_limit, span, validated,
};
