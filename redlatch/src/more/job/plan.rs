//! Decides when a job fires, and what becomes of each firing. No clock, no tasks: the driver
//! (`scheduler`) says what the time is and what has happened, and does what it is told.
//!
//! [`Plan`], one for each job on each machine: the firings in their order. One that is noticed late
//! is missed, unless the job catches up. Of several that are late, only the latest counts. A firing is not late while
//! another machine may wait with it for its jitter.
//!
//! [`Firing`], one for each firing: acquire the lock of the job, then begin in the store, which
//! decides. If the lock is not free, ask the store what that means: this slot runs elsewhere, it is
//! skipped, or it must wait. Where a dead run may be repeated, a machine that did not get the run
//! looks again when its lease would end.

use std::time::{Duration, SystemTime};

use super::cron::Cron;
use super::history::{History, RunRecord, RunState};
use super::rules::{Begun, Overlap};

/// How late a firing may begin, if its job does not catch up: long enough for a failover of the
/// store, short enough that the work is still what was meant. Also the longest time that a machine
/// may be early by the clock of the store.
pub(super) const TOLERANCE: Duration = Duration::from_secs(60);

/// The longest sleep. Clocks are set now and then.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// How long a firing waits for a lock before it asks again which run has it.
pub(super) const ASK_PAUSE: Duration = Duration::from_secs(1);
/// The same for a firing that may wait for the other run to end.
const WAIT_PAUSE: Duration = Duration::from_secs(10);

/// What happens with firings that could not run in time, because no machine ran, the store could not
/// be reached, or another user held the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CatchUp {
    /// They are missed, if they cannot begin within a minute after the longest jitter.
    #[default]
    None,
    /// The latest of them runs as soon as possible, if the job has run with this schedule before.
    Last,
}

/// The firings of a job on one machine.
#[derive(Debug)]
pub(super) struct Plan {
    cron: Cron,
    catch_up: CatchUp,
    jitter: Duration,
    /// The latest firing that this machine has decided, or when it began.
    handled: SystemTime,
    /// A slot that has waited for another run until now: it is not late.
    waited: Option<SystemTime>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Due {
    Sleep(Duration),
    /// This slot fires after this time.
    Fire(SystemTime, Duration),
    /// No slot from this one to that one fires: they are too late.
    Missed(SystemTime, SystemTime),
}

impl Plan {
    pub(super) fn new(cron: Cron, catch_up: CatchUp, jitter: Duration, now: SystemTime) -> Plan {
        Plan {
            cron,
            catch_up,
            jitter,
            handled: now,
            waited: None,
        }
    }

    /// Takes what the store knows of the job, which has had this schedule since a time. A schedule that
    /// has never run has nothing to catch up. What fired after the last slot is due now, if the job
    /// catches up. Otherwise only the latest one, if it is not late yet: a process that has ended may
    /// have waited for its jitter, for the lock, or with [`Overlap::Wait`] for the latest run.
    ///
    /// Returns the slot of the latest run, if it is to be watched: its machine may have died. Later
    /// slots may have been skipped.
    pub(super) fn resume(
        &mut self,
        known: Option<&History>,
        since: SystemTime,
        overlap: Overlap,
    ) -> Option<SystemTime> {
        let run = known.and_then(|history| history.runs.first());
        let has_schedule = |history: &&History| history.schedule.as_ref() == Some(&self.cron);
        let history = known.filter(has_schedule);
        let handled = match (history, self.catch_up) {
            (Some(history), CatchUp::Last) => Some(history.last_slot),
            _ => {
                let last = history.map_or(since, |history| history.last_slot);
                let latest = self.cron.latest_until(self.handled);
                let latest = latest.filter(|slot| *slot > last);
                let waits = overlap == Overlap::Wait && run.is_some_and(|run| self.lasts(run));
                self.waited = latest.filter(|_| waits);
                let due = latest.filter(|slot| !self.late(*slot, self.handled));
                due.map(|slot| slot - Duration::from_secs(1))
            }
        };
        self.handled = handled.map_or(self.handled, |handled| self.handled.min(handled));
        let run = history?.runs.first()?;
        matches!(run.state, RunState::Running | RunState::Lost).then_some(run.slot)
    }

    /// Returns what is to be done at `now`. `random`: from 0 to 1.
    pub(super) fn due(&mut self, now: SystemTime, random: f64) -> Due {
        if late(now, self.handled) {
            // The clock was far ahead. The store knows which slots have run.
            self.handled = now;
        }
        let Some(mut slot) = self.cron.next_after(self.handled) else {
            return Due::Sleep(LONGEST_SLEEP);
        };
        let ahead = left(slot, now);
        if !ahead.is_zero() {
            return Due::Sleep(ahead.min(LONGEST_SLEEP));
        }
        if self.late(slot, now) {
            let latest = self.cron.latest_until(now).unwrap_or(slot).max(slot);
            if self.catch_up == CatchUp::None {
                let missed = match self.late(latest, now) {
                    true => Some(latest),
                    false => self.cron.latest_until(latest - Duration::from_secs(1)),
                };
                self.handled = missed.unwrap_or(slot);
                return Due::Missed(slot, self.handled);
            }
            slot = latest;
        }
        self.handled = slot;
        let delay = self.jitter(slot).mul_f64(random);
        match self.late(slot, now) {
            true => Due::Fire(slot, delay),
            false => Due::Fire(slot, left(slot + delay, now)),
        }
    }

    /// Returns by how much a machine may delay a firing.
    pub(super) fn jitter(&self, slot: SystemTime) -> Duration {
        self.jitter.min(self.half_gap(slot))
    }

    /// Returns whether a run lasts, or ended so short a time ago that what waited for it is not late.
    fn lasts(&self, run: &RunRecord) -> bool {
        let ended = run.took.and_then(|took| run.began.checked_add(took));
        run.state == RunState::Running || ended.is_some_and(|ended| !late(ended, self.handled))
    }

    fn late(&self, slot: SystemTime, now: SystemTime) -> bool {
        self.waited != Some(slot) && late(slot + self.jitter(slot), now)
    }

    /// Returns half of the time from a slot to the next one: by how much clocks may differ.
    fn half_gap(&self, slot: SystemTime) -> Duration {
        gap(&self.cron, slot) / 2
    }

    /// Returns how far a slot may be ahead of the clock of the store.
    pub(super) fn ahead(&self, slot: SystemTime) -> Duration {
        self.half_gap(slot).min(TOLERANCE)
    }
}

/// Returns the time from a slot to the next one.
pub(super) fn gap(cron: &Cron, slot: SystemTime) -> Duration {
    let next = cron.next_after(slot);
    next.and_then(|next| next.duration_since(slot).ok())
        .unwrap_or_default()
}

/// Returns whether a firing that was due at `time` is late.
pub(super) fn late(time: SystemTime, now: SystemTime) -> bool {
    left(now, time) > TOLERANCE
}

/// Returns how long it lasts until `time`.
fn left(time: SystemTime, now: SystemTime) -> Duration {
    time.duration_since(now).unwrap_or_default()
}

/// One firing on one machine.
#[derive(Debug, Clone)]
pub(super) struct Firing {
    pub(super) slot: SystemTime,
    /// When each machine has begun it, or this one may. Later, it is late.
    due: SystemTime,
    pub(super) overlap: Overlap,
    /// How often the slot may be repeated after its machine has died.
    pub(super) retries: u32,
    pub(super) catch_up: CatchUp,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Whether it runs here is undecided.
    Undecided,
    /// The same, and the store could not be reached or has refused it, or another user holds the
    /// lock.
    Blocked,
    /// A run of the slot lasts elsewhere or may be repeated.
    Watching,
    /// The slot is too early by the clock of the store.
    Early,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// Acquire the lock, and wait for it at most this long.
    Lock(Duration),
    /// Begin, while the lock is held.
    Begin,
    /// Ask the store, because the lock is not free.
    Ask,
    /// Release the lock, if it is held, and acquire it after this time.
    Pause(Duration),
    /// Run the work, as this attempt.
    Run(u32),
    End(Ending),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It runs or ran elsewhere, or a later firing has taken its place.
    Elsewhere,
    /// Another run lasts.
    Skipped,
    /// The store could not be reached or refused it, or another user held the lock, for too long.
    Missed,
}

impl Firing {
    pub(super) fn new(
        slot: SystemTime,
        jitter: Duration,
        overlap: Overlap,
        retries: u32,
        catch_up: CatchUp,
    ) -> Firing {
        Firing {
            slot,
            due: slot + jitter,
            overlap,
            retries,
            catch_up,
            state: State::Undecided,
        }
    }

    /// A run of the slot has been lost, or may have been: to be repeated, however long the store cannot be reached.
    pub(super) fn watch(mut self, now: SystemTime) -> Firing {
        self.state = State::Watching;
        self.due = now;
        self
    }

    /// Returns what becomes of it when a later firing of this machine takes its place. `None`: it
    /// goes on.
    pub(super) fn gives_way(&self) -> Option<Ending> {
        match (self.state, self.catch_up) {
            (State::Undecided, _) if self.overlap == Overlap::Allow => None,
            (State::Undecided, _) | (State::Blocked, CatchUp::Last) => Some(Ending::Elsewhere),
            (State::Blocked, CatchUp::None) => Some(Ending::Missed),
            // Later slots of a clock that is ahead are early, too.
            (State::Watching | State::Early, _) => None,
        }
    }

    /// The store has replied. `asked`: without the lock.
    pub(super) fn replied(&mut self, reply: Begun, asked: bool, now: SystemTime) -> Next {
        self.state = match reply {
            Begun::Lasts { attempt, .. } if attempt <= self.retries => State::Watching,
            // The holder of the lock may be a machine that dies before it repeats the run.
            Begun::Vacant if self.state == State::Watching => State::Watching,
            // Later slots are early, too, and one of them may have the lock to find that out.
            Begun::Vacant if self.state == State::Early && !late(self.due, now) => State::Early,
            // With `Allow` the firing continues beside those of later slots.
            Begun::Vacant
                if asked && (self.catch_up == CatchUp::Last || self.overlap != Overlap::Allow) =>
            {
                State::Blocked
            }
            Begun::Early(_) => State::Early,
            _ => State::Undecided,
        };
        self.due = match reply {
            // While it waits for another run, it is not late.
            Begun::Vacant if self.overlap == Overlap::Wait => now,
            Begun::Overlaps(_) => now,
            Begun::Early(time) => now + time,
            _ => self.due,
        };
        match reply {
            Begun::New(attempt) => Next::Run(attempt),
            // The lock has ended.
            Begun::Vacant if !asked => Next::Pause(Duration::ZERO),
            // The lock is free now, is held by a machine that has not begun yet, or by another user.
            Begun::Vacant if self.is_missed(now) => Next::End(Ending::Missed),
            Begun::Vacant => Next::Lock(ASK_PAUSE),
            Begun::Done => Next::End(Ending::Elsewhere),
            Begun::Lasts { left, .. } if self.state == State::Watching => {
                Next::Pause(left.max(Duration::from_millis(10)))
            }
            Begun::Lasts { .. } => Next::End(Ending::Elsewhere),
            Begun::Early(time) => Next::Pause(time),
            Begun::Skipped => Next::End(Ending::Skipped),
            Begun::Overlaps(_) if asked => Next::Lock(WAIT_PAUSE),
            // That run does not hold this lock.
            Begun::Overlaps(_) => Next::Pause(ASK_PAUSE),
        }
    }

    /// The store could not be reached, or has refused a request.
    pub(super) fn failed(&mut self, now: SystemTime) -> Next {
        if self.is_missed(now) {
            return Next::End(Ending::Missed);
        }
        self.state = match self.state {
            State::Early if !late(self.due, now) => State::Early,
            State::Watching => State::Watching,
            _ => State::Blocked,
        };
        Next::Pause(ASK_PAUSE)
    }

    fn is_missed(&self, now: SystemTime) -> bool {
        let is_firing = self.state != State::Watching;
        is_firing && self.catch_up == CatchUp::None && late(self.due, now)
    }
}
