//! The fair lock's steps: those of the lock, with a queue of waiters.
//!
//! State: the lock's hash; a list of the waiting owners, the oldest first; and two sets of dates by
//! owner: the timeouts until which a turn is kept, and the absent waiters.
//!
//! * Acquire: an owner that holds the lock re-enters it, regardless of the queue. Otherwise, first
//!   drop the heads whose timeout has passed. If the lock is free and the head is absent (no
//!   connection subscribes to its channel), note all absent waiters, and drop absent heads whose
//!   grace period has passed.
//! * If the lock is free and the owner is the head, or the queue is empty, take the lock. Shift the
//!   timeouts of the others, so that they count from the end of the new lease, and wake the new
//!   head, so that it learns that end.
//! * Otherwise a waiting owner joins the tail. Its timeout is that of the last waiter, or the
//!   lock's end, plus its wait time. The reply is the time after which it retries by itself.
//! * Release: wake the head. If it does not receive the message, wake the next waiter, until one
//!   does, note which waiters are absent, and shift the timeouts, so that they count from now
//!   instead of from the end of the lease.
//! * Giving up removes the owner from the queue, shifts the timeouts of the waiters behind it, and
//!   wakes the next waiter if the owner was the head.

use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::queue::{Queue, millis};
use crate::error::Result;
use crate::hold::Hold;
use crate::lease::Lease;
use crate::name::Place;
use crate::primitives::handle::Ask;
use crate::primitives::lock::rules::{
    self as lock, FOREIGN_HASH, give_back, held_or_wait, is_gone, is_held, take, wait, wrong_kind,
};
use crate::space::{Holds, Space};
use crate::step::{Args, Outcome, Script, Step, unexpected, yes_or_no};

/// Returns the script of a step, with the shared functions prepended.
macro_rules! script {
    ($file:literal) => {{
        static SCRIPT: Script =
            Script::new(concat!(include_str!("queue.lua"), include_str!($file)));
        &SCRIPT
    }};
}

/// The lock, the queue, the timeouts, the absent.
fn keys(place: &Place) -> impl ExactSizeIterator<Item = &str> + Send {
    [place.key(), place.queue(), place.timeouts(), place.absent()].into_iter()
}

/// Time in milliseconds after which a waiter checks again whether the head has taken its turn.
const TURN: i64 = 1000;

/// Additional sleep per position in the queue, in milliseconds, so that a long queue does not retry all at once.
const APART: i64 = 10;

/// Maximum sleep of the head of the queue, in milliseconds.
const LOOK: i64 = 5000;

/// Returns the lock's remaining lease in milliseconds; -1 if it never expires. `None` if it is free.
fn left(space: &mut Space, place: &Place, now: Instant) -> Option<i64> {
    match space.remaining(place.key(), now)? {
        Duration::MAX => Some(-1),
        left => Some(millis(left)),
    }
}

/// Acquires the lock for an owner whose turn it is, or returns when to retry. A waiting owner joins the queue.
pub(super) struct Acquire<'a> {
    pub(super) ask: Ask<'a>,
    /// How long the lock is kept for this owner when its turn has come.
    pub(super) wait_time: Lease,
    /// How long absent waiters keep their positions once the head is one of them.
    pub(super) grace: Lease,
}

/// The state of the queue after waiters were dropped.
struct Turn {
    head: Option<String>,
    /// Whether any waiter was dropped.
    dropped: bool,
    /// How long to leave the lock to the head, in milliseconds.
    lasts: i64,
    /// How many waiters before the requesting owner are absent.
    missing: usize,
}

impl Step for Acquire<'_> {
    type Reply = Outcome;

    fn script(&self) -> &'static Script {
        script!("acquire.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(&self.ask.hold.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(&self.ask.hold.field);
        args.number(self.ask.lease.millis());
        args.number(self.ask.count.into());
        args.number(if self.ask.waits {
            self.wait_time.millis()
        } else {
            0
        });
        args.text(self.ask.hold.place.channel());
        args.number(self.grace.millis());
    }

    fn reply(&self, raw: Value) -> Result<Outcome> {
        held_or_wait(&self.ask.hold.place, &raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Outcome> {
        let Ask {
            hold, count, lease, ..
        } = self.ask;
        let (place, owner) = (&*hold.place, &*hold.field);
        let ours = |holds: &Holds| holds.mode.is_some() || holds.counts.contains_key(owner);
        let held = space.find::<Holds>(place.key(), now)?;
        // Re-entered, lost meanwhile, or not a lock: the queue does not matter.
        if count > 1 || held.is_some_and(|held| ours(held.value)) {
            return take(space, place, owner, count, lease, now);
        }
        let left = left(space, place, now);
        if left == Some(-1) {
            return wait(place, -1);
        }
        let mut queue = Queue::new(space, place, now);
        let turn = self.turn(&mut queue, left.is_none())?;
        let (head, dropped) = (&turn.head, turn.dropped);
        if left.is_none() && head.as_deref().is_none_or(|head| head == owner) {
            if head.is_some() {
                let ends = queue.waited_for(owner)?;
                queue.remove(0)?;
                if let Some(ends) = ends {
                    let end = queue.today().saturating_add(millis(lease.duration()));
                    queue.shift(0, end.saturating_sub(ends))?;
                }
                // The next waiter is the head now: it must learn how long the lock is held.
                queue.call()?;
            }
            return take(space, place, owner, count, lease, now);
        }
        if dropped && head.as_deref() != Some(owner) {
            queue.call()?;
        }
        if !self.ask.waits {
            return wait(place, left.unwrap_or(0));
        }
        wait(place, self.stand(&mut queue, left, turn)?)
    }
}

impl Acquire<'_> {
    /// Drops the heads whose time has passed, and on a free lock those that were absent for their grace period.
    fn turn(&self, queue: &mut Queue<'_>, free: bool) -> Result<Turn> {
        let owner = &*self.ask.hold.field;
        let grace = millis(self.grace.duration());
        if queue.is_empty()? {
            return Ok(Turn {
                head: None,
                dropped: false,
                lasts: grace.min(TURN),
                missing: 0,
            });
        }
        // The requesting owner is connected.
        queue.is_present(owner)?;
        let (head, dropped) = queue.drop_given_up(Some(owner))?;
        let mut turn = Turn {
            head,
            dropped,
            lasts: grace.min(TURN),
            missing: 0,
        };
        let Some(head) = turn.head.as_deref().filter(|&head| free && head != owner) else {
            return Ok(turn);
        };
        if queue.is_connected(head) {
            return Ok(turn);
        }
        let now = queue.today();
        let absent = queue.note_absent(grace, Some(owner))?;
        let mut ends = None;
        turn.head = None;
        for waiter in absent.owners {
            let keeps = absent.keeps.get(&waiter).copied();
            let is_first = turn.head.is_none();
            if is_first && keeps.is_some_and(|keeps| keeps <= now) {
                ends = queue.waited_for(&waiter)?.or(ends);
                queue.remove(0)?;
                turn.dropped = true;
                continue;
            }
            if is_first && let Some(keeps) = keeps {
                turn.lasts = turn.lasts.min(keeps - now);
            }
            let asks = waiter == owner;
            turn.head.get_or_insert(waiter);
            if asks {
                break;
            }
            turn.missing += usize::from(keeps.is_some());
        }
        if turn.head.is_none() {
            turn.head = queue.at(0)?;
        }
        if let Some(ends) = ends.filter(|&ends| ends > now) {
            // Shift as if the dropped waiters had given up.
            queue.shift(0, now - ends)?;
        }
        Ok(turn)
    }

    /// Queues the owner. Returns in how many milliseconds it retries at the latest.
    fn stand(&self, queue: &mut Queue<'_>, left: Option<i64>, turn: Turn) -> Result<i64> {
        let owner = &*self.ask.hold.field;
        let wait = millis(self.wait_time.duration());
        let now = queue.today();
        let end = now.saturating_add(left.unwrap_or(0));
        let place = queue.place_of(owner)?;
        if let Some(head) = &turn.head
            && left.is_none()
            && place.is_some()
            && !turn.dropped
        {
            // A waiter retries while the head does not take its turn: the head may have missed its message.
            queue.call_one(head);
        }
        let mut place = match place {
            Some(0) => {
                // A waiter that retries is alive: it keeps its position, and those behind keep
                // their distance.
                match queue.waited_for(owner)? {
                    None => queue.wait_for(owner, end.saturating_add(wait))?,
                    Some(ends) if (ends - end).saturating_mul(2) < wait => {
                        queue.shift(0, end.saturating_add(wait) - ends)?;
                    }
                    Some(_) => {}
                }
                0
            }
            Some(place) => place,
            None => {
                let from = match queue.last()? {
                    Some(last) => queue.waited_for(&last)?.unwrap_or(end).max(end),
                    None => end,
                };
                queue.join(owner, from.saturating_add(wait))?
            }
        };
        // FLUSHALL deletes the queue as well, and then no step knows whom to wake. So waiters retry
        // from time to time, and later ones less often, so that a long queue causes as few requests
        // as a short one.
        let behind = i64::try_from(place).unwrap_or(i64::MAX);
        let look_again = LOOK.saturating_add(behind.saturating_mul(APART));
        if place == 0 {
            return Ok(left.unwrap_or(0).min(look_again));
        }
        // A waiter is woken when its turn comes. This covers the case that no client wakes it,
        // because the holder or the waiters before it died: it retries when the lease ends, or when
        // the head had time to take its turn.
        let apart = i64::try_from(place.saturating_sub(turn.missing)).unwrap_or(i64::MAX);
        let look = left.unwrap_or(turn.lasts);
        let again = wait.min(look.saturating_add(apart.saturating_mul(APART)));
        let mut again = again.min(look_again);
        let mut ends = None;
        while place > 0 && ends.is_none() {
            // If timeouts were lost, the timeout of the waiter before this one may be missing: then
            // use the one before that.
            place -= 1;
            if let Some(before) = queue.at(place)? {
                ends = queue.waited_for(&before)?;
            }
        }
        if let Some(ends) = ends.filter(|&ends| ends > now) {
            again = again.min(ends - now);
        }
        Ok(again)
    }
}

/// Sets an owner's hold count to the number of holds to keep. 0 releases the lock, and removes the
/// owner from the queue if it is still there from waiting.
pub(super) struct Release<'a> {
    pub(super) hold: &'a Hold,
    pub(super) keep: u32,
    /// The new lease; `None` leaves it unchanged.
    pub(super) lease: Option<Lease>,
    pub(super) grace: Lease,
}

impl Step for Release<'_> {
    /// Whether the owner held the lock.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("release.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(&self.hold.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(&self.hold.field);
        args.number(self.keep.into());
        args.number(self.lease.map_or(0, Lease::millis));
        args.text(self.hold.place.channel());
        args.number(self.grace.millis());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        yes_or_no(&raw)
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let (place, owner) = (&*self.hold.place, &*self.hold.field);
        let left = left(space, place, now);
        let waited = self.keep == 0 && leave(&mut Queue::new(space, place, now), owner, left)?;
        let held = give_back(space, place, owner, self.keep, self.lease, now)?;
        let mut queue = Queue::new(space, place, now);
        if held && self.keep == 0 {
            queue.call_after_release(left.unwrap_or(0), self.grace)?;
        } else if left.is_none() && !waited {
            queue.call_next()?;
        }
        Ok(held)
    }
}

/// Renews the leases of many locks.
pub(super) fn renew_script() -> &'static Script {
    static SCRIPT: Script = Script::new(concat!(
        // `wake.lua` assigns to KEYS.
        "local KEYS = KEYS\n",
        include_str!("queue.lua"),
        include_str!("wake.lua"),
        include_str!("../lock/renew.lua"),
    ));
    &SCRIPT
}

/// Renews one lock, as the script does.
pub(super) fn renew(
    space: &mut Space,
    hold: &Hold,
    lease: Option<Lease>,
    now: Instant,
) -> Result<bool> {
    let held = lock::renew(space, hold, lease, now)?;
    if is_gone(space, held, &hold.place, now) {
        Queue::new(space, &hold.place, now).call_next()?;
    }
    Ok(held)
}

/// Removes the owner from the queue and moves the timeouts of those behind it nearer. Returns
/// whether it was waiting.
fn leave(queue: &mut Queue<'_>, owner: &str, left: Option<i64>) -> Result<bool> {
    let Some(place) = queue.place_of(owner)? else {
        return Ok(false);
    };
    let ends = queue.waited_for(owner)?;
    let before = match place.checked_sub(1) {
        None => Some(queue.today().saturating_add(left.unwrap_or(0).max(0))),
        Some(before) => match queue.at(before)? {
            Some(before) => queue.waited_for(&before)?,
            None => None,
        },
    };
    queue.remove(place)?;
    if let (Some(before), Some(ends)) = (before, ends)
        && before < ends
    {
        queue.shift(place, before - ends)?;
    }
    if place == 0 {
        // The message that woke this owner is meant for the next one now.
        if left.is_none() && queue.is_empty()? {
            queue.call_others();
        } else {
            queue.call()?;
        }
    }
    Ok(true)
}

/// Releases the lock whichever owner holds it.
pub(super) struct Force<'a> {
    pub(super) place: &'a Place,
    pub(super) grace: Lease,
}

impl Step for Force<'_> {
    /// Whether it was held.
    type Reply = bool;

    fn script(&self) -> &'static Script {
        script!("force.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, args: &mut Args<'_>) {
        args.text(self.place.channel());
        args.number(self.grace.millis());
    }

    fn reply(&self, raw: Value) -> Result<bool> {
        match raw {
            Value::Int(-1) => Err(wrong_kind(self.place, FOREIGN_HASH)),
            other => yes_or_no(&other),
        }
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<bool> {
        let held = is_held(space, self.place, now)?;
        if held {
            let left = left(space, self.place, now).unwrap_or(0);
            space.remove(self.place.key());
            Queue::new(space, self.place, now).call_after_release(left, self.grace)?;
        }
        Ok(held)
    }
}

/// Returns the waiting owners, the next one first.
pub(super) struct Waiting<'a> {
    pub(super) place: &'a Place,
}

impl Step for Waiting<'_> {
    type Reply = Vec<String>;

    fn script(&self) -> &'static Script {
        script!("waiting.lua")
    }

    fn keys(&self) -> impl ExactSizeIterator<Item = &str> + Send {
        keys(self.place)
    }

    fn args(&self, _: &mut Args<'_>) {}

    fn reply(&self, raw: Value) -> Result<Vec<String>> {
        let Value::Array(owners) = raw else {
            return Err(unexpected(&raw));
        };
        let text = |owner| match owner {
            Value::BulkString(owner) => Ok(String::from_utf8_lossy(&owner).into_owned()),
            other => Err(unexpected(&other)),
        };
        owners.into_iter().map(text).collect()
    }

    fn apply(&self, space: &mut Space, now: Instant) -> Result<Vec<String>> {
        let mut queue = Queue::new(space, self.place, now);
        let now = queue.today();
        let mut waiting: Vec<_> = match queue.owners()? {
            Some(owners) => owners.iter().cloned().collect(),
            None => Vec::new(),
        };
        let mut given_up = 0;
        for owner in &waiting {
            if queue.waited_for(owner)?.is_some_and(|until| until > now) {
                break;
            }
            given_up += 1;
        }
        waiting.drain(..given_up);
        Ok(waiting)
    }
}
