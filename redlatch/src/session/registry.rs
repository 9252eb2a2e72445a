//! The holds of a client: each owner's hold on an object is found here while it is acquired, held or released.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::hold::Hold;
use crate::name::ObjectKeys;
use crate::owner::Owner;

/// All holds that are acquired, held or released, so that the same owner finds the same hold.
pub(super) type HoldRegistry =
    HashMap<(Owner, Arc<ObjectKeys>), RegisteredHold, BuildHasherDefault<MixHasher>>;

/// Mixes two numbers that are already well distributed or unique: an owner's number and the cached hash of
/// an object's key. Each acquisition looks up its hold several times.
#[derive(Default)]
pub(super) struct MixHasher(u64);

impl Hasher for MixHasher {
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29);
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// One owner's hold on one object, over all its generations. A hold that was lost, and the hold that
/// replaced it, act on the same field of the store.
///
/// Invariant: as long as a step of an earlier generation may still reach the store, the next generation
/// takes turns with it ([`Hold::step_lock`]). Otherwise a late full release of the earlier generation would
/// delete what the later one has acquired. Two rules keep it:
///
/// - The references to all generations are counted, and each step is sent through a reference. So the
///   registry entry, and with it the mutex that all generations share, outlives every step. Only renewals
///   are sent without a reference, but in turn; a late one only extends a lease.
/// - The entry is not removed while the store may keep another count than this client: the last reference
///   settles before it is dropped. Only settling that is abandoned removes the entry without an answer.
///
/// A step that was sent without an answer does not keep its turn. The next step for the same field is then
/// a release that must be answered before anything is acquired. It is sent on the same connection, behind
/// the unanswered step, or on the connection that replaced a broken one.
pub(super) struct RegisteredHold {
    /// The latest generation.
    pub(super) hold: Arc<Hold>,
    /// Number of references to all generations.
    pub(super) refs: usize,
}
