//! The last known state of an object, and what has changed since. Without I/O and without a clock.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::event::{Change, HeldBy};
use crate::lease::Expiry;
use crate::locks::Holder;
use crate::observe::inspect::{ObjectKind, ObjectState};
use crate::owner::OwnerId;

/// When something ends, unless it is renewed before; `None`: never.
type End = Option<Instant>;

/// The state of an object at the latest look.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// `None` if the object does not exist.
    pub(super) kind: Option<ObjectKind>,
    holds: BTreeMap<HeldBy, End>,
    waiters: BTreeMap<OwnerId, End>,
    /// The number of a semaphore or latch, and when it expires.
    value: Option<(i64, End)>,
}

/// What is known about the time of a look at an object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    /// Until when the object had surely not been changed since the look before, if that is known. A
    /// hold that ended before has expired.
    pub(super) unchanged_until: Option<Instant>,
    /// Whether objects are seen for the first time because the watch has just started.
    pub(super) first: bool,
}

impl Known {
    pub(super) fn new(state: Option<ObjectState>, at: Instant) -> Known {
        let end = |remaining: Expiry| at.checked_add(remaining.duration()?);
        let mut known = Known {
            kind: state.as_ref().map(ObjectState::kind),
            ..Known::default()
        };
        let queue = state.as_ref().map_or(&[][..], ObjectState::queue);
        let waiters = queue.iter().map(|it| (it.owner.clone(), end(it.remaining)));
        known.waiters = waiters.collect();
        let mut hold = |held_by: fn(OwnerId) -> HeldBy, holder: Holder| {
            let ends = end(holder.remaining);
            known.holds.insert(held_by(holder.owner), ends);
        };
        match state {
            None => {}
            Some(ObjectState::Lock { holder, .. }) => {
                holder.into_iter().for_each(|it| hold(HeldBy::Owner, it));
            }
            Some(
                ObjectState::ReadWriteLock { writer, readers }
                | ObjectState::FairReadWriteLock {
                    writer, readers, ..
                },
            ) => {
                writer.into_iter().for_each(|it| hold(HeldBy::Writer, it));
                readers.into_iter().for_each(|it| hold(HeldBy::Reader, it));
            }
            Some(ObjectState::FairSemaphore { holders, .. }) => {
                holders.into_iter().for_each(|it| hold(HeldBy::Owner, it));
            }
            Some(ObjectState::Counter { value, remaining }) => {
                known.value = Some((value, end(remaining)));
            }
            Some(ObjectState::ExpirableSemaphore { held, .. }) => {
                let permits = held.into_iter();
                let permits = permits.map(|it| (HeldBy::Permit(it.id), end(it.remaining)));
                known.holds = permits.collect();
            }
        }
        known
    }

    /// Returns when something of it ends next. The store does not report all of that, and not at
    /// once.
    pub(super) fn next_end(&self) -> End {
        #[cfg(test)]
        LOOKS_AT_ENDS.with(|looks| looks.set(looks.get() + 1));
        let holds = self.holds.values().chain(self.waiters.values());
        let ends = holds.chain(self.value.iter().map(|(_, end)| end));
        ends.flatten().min().copied()
    }

    /// Returns what has changed until `now`, with the kind of object. What ended comes first.
    pub(super) fn changes_until(&self, now: &Known, look: Look) -> Vec<(ObjectKind, Change)> {
        let (Some(before_kind), Some(after_kind)) =
            (self.kind.or(now.kind), now.kind.or(self.kind))
        else {
            return Vec::new();
        };
        let has_expired = |end: &End| end.is_some_and(|end| look.unchanged_until >= Some(end));
        let mut changes = Vec::new();
        for (held_by, end) in missing(&self.holds, &now.holds) {
            let ended = match has_expired(end) {
                true => Change::Expired,
                false => Change::Released,
            };
            changes.push((before_kind, ended(held_by.clone())));
        }
        for (waiter, _) in missing(&self.waiters, &now.waiters) {
            let forms = [HeldBy::Owner, HeldBy::Reader, HeldBy::Writer];
            let holds = |held_by: &fn(_) -> _| now.holds.contains_key(&held_by(waiter.clone()));
            if !forms.iter().any(holds) {
                changes.push((before_kind, Change::GaveUp(waiter.clone())));
            }
        }
        let acquired = match look.first {
            true => Change::Held,
            false => Change::Acquired,
        };
        for (held_by, _) in missing(&now.holds, &self.holds) {
            changes.push((after_kind, acquired(held_by.clone())));
        }
        for (waiter, _) in missing(&now.waiters, &self.waiters) {
            changes.push((after_kind, Change::Waiting(waiter.clone())));
        }
        // An expirable semaphore is a counter while no permit is held. Its permits tell more than
        // its number.
        let was_counter = self.kind.is_none() || self.value.is_some();
        let value = |known: &Known| known.value.map(|(value, _)| value);
        match value(now) {
            Some(now) if was_counter && value(self) != Some(now) => {
                changes.push((after_kind, Change::Counted(now)));
            }
            None if self.value.is_some() && now.kind.is_none() => {
                changes.push((before_kind, Change::Deleted));
            }
            _ => {}
        }
        changes
    }
}

/// Returns those of `one` that are not in `other`.
fn missing<'a, K: Ord>(
    one: &'a BTreeMap<K, End>,
    other: &'a BTreeMap<K, End>,
) -> impl Iterator<Item = (&'a K, &'a End)> {
    one.iter().filter(|(key, _)| !other.contains_key(key))
}

/// How long after its end something has ended for the store, too: ends are rounded to milliseconds.
pub(super) const ROUNDING: Duration = Duration::from_millis(1);

#[cfg(test)]
thread_local! {
    static LOOKS_AT_ENDS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Returns how often this thread has read when something of an object ends.
#[cfg(test)]
pub(super) fn looks_at_ends() -> usize {
    LOOKS_AT_ENDS.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn holder(owner: &str) -> Holder {
        Holder::new(owner.into(), 1, Expiry::In(LEASE))
    }

    fn lock(owner: Option<&str>) -> Option<ObjectState> {
        Some(ObjectState::Lock {
            holder: owner.map(holder),
            queue: Vec::new(),
            token: Some(1),
        })
    }

    fn number(value: i64) -> Option<ObjectState> {
        let remaining = Expiry::Never;
        Some(ObjectState::Counter { value, remaining })
    }

    fn permits(available: i64) -> Option<ObjectState> {
        let held = Vec::new();
        Some(ObjectState::ExpirableSemaphore { available, held })
    }

    /// Returns what changes between two states. The second is looked at after so long; the first is
    /// unchanged until then.
    fn changes(
        before: Option<ObjectState>,
        now: Option<ObjectState>,
        unchanged: Option<Duration>,
    ) -> Vec<Change> {
        let start = Instant::now();
        let look = Look {
            unchanged_until: unchanged.map(|unchanged| start + unchanged),
            first: false,
        };
        let (before, now) = (Known::new(before, start), Known::new(now, start + LEASE));
        let changes = before.changes_until(&now, look);
        changes.into_iter().map(|(_, change)| change).collect()
    }

    /// Otherwise it may have been renewed before its end, and released later.
    #[test]
    fn hold_has_expired_only_if_nothing_changed_until_its_end() {
        let held_by = HeldBy::Owner("c:1".into());
        let ended = |unchanged| changes(lock(Some("c:1")), None, unchanged);
        assert_eq!(ended(Some(LEASE)), [Change::Expired(held_by.clone())]);
        let earlier = LEASE - Duration::from_millis(1);
        for unchanged in [Some(earlier), None] {
            assert_eq!(ended(unchanged), [Change::Released(held_by.clone())]);
        }
    }

    #[test]
    fn end_of_a_hold_comes_before_the_next() {
        let [first, second] = ["c:2", "c:1"].map(|owner| HeldBy::Owner(owner.into()));
        assert_eq!(
            changes(lock(Some("c:2")), lock(Some("c:1")), None),
            [Change::Released(first), Change::Acquired(second)]
        );
        // A fenced lock keeps its token.
        assert_eq!(changes(lock(Some("c:1")), lock(Some("c:1")), None), []);
        assert_eq!(changes(lock(None), None, None), []);
    }

    #[test]
    fn number_of_an_expirable_semaphore_is_no_event() {
        assert_eq!(changes(None, number(2), None), [Change::Counted(2)]);
        assert_eq!(changes(number(2), number(1), None), [Change::Counted(1)]);
        assert_eq!(changes(number(1), None, None), [Change::Deleted]);
        assert_eq!(changes(number(2), permits(1), None), []);
        assert_eq!(changes(permits(1), number(2), None), []);
    }
}
