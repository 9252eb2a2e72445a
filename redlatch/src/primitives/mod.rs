//! One folder per primitive: its rules, its Lua scripts, its handle and its guard. There are four
//! groups:
//!
//! 1. **Locks and expirable permits** are *kinds*: a type with the keys and settings of a handle
//!    that implements `Rules` (acquire, inspect, force, wait channel) and `HoldKind` (renew,
//!    release, undo). `Lock<K>` with `Acquire` and `Guard` in `lock` does the rest for all of them.
//!    Each kind has its own type of keys, so a step can name only keys that its kind has. Fenced
//!    and spin locks have the holds of the re-entrant lock (`ReentrantKind`). An election is a
//!    kind, too: its steps contain the scripts of the fair lock as functions, and a term. A value
//!    of a group is a kind although all values are fields of one hash: `ObjectKeys` has an identity
//!    besides the key, by which holds, queues and the order of a multi-lock distinguish them.
//! 2. **Several locks as one** (`multi_lock`, `red_lock`, over `lock_set`) have one hold for each
//!    member. The multi-lock runs the scripts of its members within one script. The RedLock sends
//!    its requests to all members at the same time, and requests members again that it has lost
//!    (`red_lock/regain`).
//! 3. **Jobs that run once** (`once`) are neither held nor waited for: two steps on a record.
//! 4. **Counters** (`semaphore`, `count_down_latch`, over `counter`) have no owner, so there is no
//!    hold to renew or lose. A step that changes one cannot be repeated. It is sent once, and if
//!    its caller drops it, a background task awaits the answer.
//!
//! `revocation` and `ticket` add methods to several kinds, and `inspect` reads the object under a
//! name, whatever its kind.

// First, so that the page of `Lock` begins with the methods that all locks have.
pub(crate) mod lock;

pub(crate) mod count_down_latch;
pub(crate) mod counter;
pub(crate) mod election;
pub(crate) mod expirable_semaphore;
pub(crate) mod fair_lock;
pub(crate) mod fenced_lock;
pub(crate) mod group_lock;
pub(crate) mod inspect;
pub(crate) mod lock_set;
pub(crate) mod multi_lock;
pub(crate) mod once;
pub(crate) mod read_write_lock;
pub(crate) mod red_lock;
pub(crate) mod reentrant;
pub(crate) mod revocation;
pub(crate) mod semaphore;
pub(crate) mod spin_lock;
pub(crate) mod ticket;

#[cfg(test)]
pub(crate) mod differential;
#[cfg(test)]
pub(crate) mod exploration;
#[cfg(test)]
mod refusals;
