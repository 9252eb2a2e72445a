//! The latch's own step; the others come from `counters`.

use crate::counters::read_number;
use crate::name::ObjectKeys;
use crate::step::{Step, args, script};

/// The message that is published when a latch opens or is deleted.
pub(super) const OPENED: u32 = 0;
/// The message that is published when a new count is set.
pub(super) const CHANGED: u32 = 1;

/// Decrements a latch's count; at zero it is open, and its key is deleted. Not idempotent: must be
/// executed at most once. Replies the new count.
pub(super) fn count_down(object: &ObjectKeys, by: u32) -> Step<'_, u64> {
    Step::new(
        script!("../counter.lua", "count_down.lua"),
        [object.key()],
        args![by, object.channel()],
        |reply| reply.integer().map(count),
        move |keyspace| {
            let value = read_number(keyspace, object.key())?.unwrap_or(0);
            let left = value.saturating_sub(by.into());
            if left > 0 {
                *keyspace.find_or_create::<i64>(object.key())? = left;
            } else {
                keyspace.remove(object.key());
                if value > 0 {
                    keyspace.publish(object.channel(), OPENED.into());
                }
            }
            Ok(count(left))
        },
    )
}

/// Converts a stored number to a count: a negative number counts as zero.
pub(super) fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
