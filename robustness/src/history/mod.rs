//! The history of a run: events that workers report, and the critical sections built from them.
//!
//! A worker reports one event per line. Events of one section are collected in a [`Section`]: when it was
//! requested, acquired, known to be valid, lost and released. The run adds the times in which something was
//! broken ([`FaultWindow`]) or in which the store may have lost data ([`DataLossWindow`]); the checker uses both to
//! tell expected violations from others.

mod event;
mod section;

pub use event::{Event, EventKind, JobRun, Limits, Mode, Request};
pub use section::{MadeTicket, Section};

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::clock::{Time, nanos};

/// Number of permits of each semaphore that the workers use.
pub const PERMITS: u32 = 2;

/// Time in which a client gives a hold back to its ticket.
const GIVE_BACK_TIME: Time = 500_000_000;

/// The events of one run.
#[derive(Debug, Default)]
pub struct History {
    pub sections: Vec<Section>,
    /// Index of each section that may not have ended, by process and number.
    open: BTreeMap<(usize, u64), usize>,
    /// Index of the section that made each ticket, by the text of the ticket.
    tickets: BTreeMap<String, usize>,
    pub processes: BTreeMap<usize, Process>,
    pub schedulers: Vec<Scheduler>,
    /// Times in which something was broken.
    pub windows: Vec<FaultWindow>,
    /// Times in which the store lost data.
    pub data_losses: Vec<DataLossWindow>,
    /// When the clock of the servers was set, and how far forward; negative: back. In this order.
    pub clock_steps: Vec<(Time, Time)>,
    /// When a replica was promoted, at some moment of each time. It has all acquisitions that replicas confirmed, but may
    /// lack releases.
    pub failovers: Vec<(Time, Time)>,
    /// When servers and sentinels accepted connections, of any process, if that was recorded.
    pub connected: Vec<Time>,
    /// Names of locks on a server that could not be reached.
    pub unreachable_names: BTreeSet<String>,
    /// Times in which slots moved.
    pub slot_moves: Vec<(Time, Time)>,
    pub lease: Time,
    /// How late a report or an action may be. On a simulated clock nothing delays the clients but the network.
    pub margin: Time,
    /// Whether the servers tell who listens to a channel. Else each dead waiter of a fair lock has its turn.
    pub tells_listeners: bool,
    /// Whether acquisitions wait for replicas.
    pub awaits_replicas: bool,
    /// End of the run.
    pub end: Time,
}

/// One worker process.
#[derive(Debug, Default)]
pub struct Process {
    pub ready: bool,
    /// Whether it will report nothing more.
    pub done: bool,
    pub killed: Option<Time>,
    /// When it was stopped, and when it was continued.
    pub stopped: Vec<(Time, Option<Time>)>,
    /// The longest time that it did not run without having been stopped.
    pub stalled: Time,
    /// State that its clients still tracked at the end.
    pub leftovers: Vec<String>,
}

/// A process that runs a job.
#[derive(Debug, Clone)]
pub struct Scheduler {
    pub process: usize,
    pub job: String,
    pub from: Time,
    /// When it was told to begin no further runs.
    pub until: Option<Time>,
    /// How far its clock is ahead of the time of the history: nanoseconds since 1970.
    pub clock: Time,
}

/// A time in which something was broken.
#[derive(Debug, Clone, Copy)]
pub struct FaultWindow {
    pub from: Time,
    pub until: Time,
    /// Whether the store answered no client in this time.
    pub is_outage: bool,
}

/// A time in which the store lost holds, at some moment of it.
#[derive(Debug, Clone, Copy)]
pub struct DataLossWindow {
    pub from: Time,
    pub until: Time,
    pub loss: DataLoss,
}

/// Which data the store lost, and how the docs explain it.
#[derive(Debug, Clone, Copy)]
pub struct DataLoss {
    /// Whether holds were lost, too; else only releases, renewals, and counts of semaphores and latches.
    pub holds: bool,
    /// Whether another server process answers from then on, so that clients check their holds at once. Else they notice at
    /// the next renewal.
    pub shows: bool,
    /// Whether fencing tokens were lost, too.
    pub tokens: bool,
    pub why: &'static str,
}

impl DataLoss {
    /// All data is gone.
    pub const NO_DATA: DataLoss = DataLoss {
        holds: true,
        shows: true,
        tokens: true,
        why: "a store that lost its data grants held locks again, and its tokens restart; holders \
              detect it when another server process answers, else at their next renewal, at most a \
              third of the lease later",
    };

    /// The keys of some locks are gone.
    pub const KEYS_DELETED: DataLoss = DataLoss {
        holds: true,
        shows: false,
        tokens: false,
        why: "after a lock's key is deleted, the held lock is granted again; its holder detects it \
              at its next renewal, at most a third of the lease later",
    };

    /// The latest writes are gone.
    pub const UNREPLICATED: DataLoss = DataLoss {
        holds: true,
        shows: true,
        tokens: true,
        why: "a promoted replica lacks the locks and tokens that were not replicated to it; \
              holders detect it when their client has connected again",
    };

    /// A master that has been replaced still grants acquisitions.
    pub const MASTER_PARTITIONED: DataLoss = DataLoss {
        holds: true,
        shows: false,
        tokens: true,
        why: "a master that is cut off from its replicas still grants locks and tokens until \
              clients detect the new master (ReplicaSync::AtLeast prevents it); holders detect it \
              at their next renewal there",
    };

    /// A master that has been replaced grants nothing any more, but still accepts releases and renewals.
    pub const UNCONFIRMED_WRITES: DataLoss = DataLoss {
        holds: false,
        shows: false,
        tokens: true,
        why: "releases and renewals do not wait for replicas: a promoted replica may still have a \
              hold that was released, and if its owner acquires the lock again within the lease, \
              it continues that hold, has its token and is asked to release it as before; and it ends the hold of a dead process \
              when the lease before the last renewal ends",
    };
}

impl Process {
    /// Records that the process did not run in this time, for any reason.
    pub fn record_stall(&mut self, from: Time, until: Time) {
        let stopped =
            |&(stop, on): &(Time, Option<Time>)| stop < until && on.is_none_or(|on| on > from);
        if !self.stopped.iter().any(stopped) {
            self.stalled = self.stalled.max(until - from);
            self.stopped.push((from, Some(until)));
        }
    }
}

impl History {
    pub fn new(lease: Duration) -> History {
        History {
            lease: nanos(lease),
            tells_listeners: true,
            end: Time::MAX,
            ..History::default()
        }
    }

    /// Records an event of a worker.
    pub fn record(&mut self, process: usize, event: Event) {
        let Event(t, number, what) = event;
        let lease = self.lease;
        let of = self.processes.entry(process).or_default();
        let what = match what {
            EventKind::Ready => {
                of.ready = true;
                return;
            }
            EventKind::Stalled { since } => {
                of.record_stall(since, t);
                return;
            }
            EventKind::Done => {
                of.done = true;
                return;
            }
            EventKind::Scheduled { job, date } => {
                self.schedulers.push(Scheduler {
                    process,
                    job,
                    from: t,
                    until: None,
                    clock: date - t,
                });
                return;
            }
            EventKind::Unscheduled { job } => {
                let mut schedulers = self.schedulers.iter_mut();
                let of_job = schedulers.rfind(|one| one.process == process && one.job == job);
                if let Some(scheduler) = of_job {
                    scheduler.until = Some(t);
                }
                return;
            }
            EventKind::Leftover { client, status } => {
                of.leftovers
                    .push(format!("client {client} of process {process}: {status}"));
                return;
            }
            EventKind::Requested(request) => {
                if let Some(ticket) = self.made_ticket(request.ticket.as_deref()) {
                    match request.mode {
                        // The store may execute a request without an answer later.
                        Mode::RenewTicket(lease) => ticket.may_end_at(t + 2 * lease),
                        Mode::ReleaseTicket => {
                            ticket.requested.get_or_insert(t);
                            ticket.kept_until = ticket.kept_until.min(t);
                        }
                        _ => _ = ticket.requested.get_or_insert(t),
                    }
                }
                self.open.insert((process, number), self.sections.len());
                self.sections.push(Section::new(process, t, request));
                return;
            }
            what => what,
        };
        let key = (process, number);
        let Some(&at) = self.open.get(&key) else {
            return;
        };
        let Some(section) = self.sections.get_mut(at) else {
            return;
        };
        let is_answer = section.answered.is_none();
        if section.record(t, what) {
            self.open.remove(&key);
        }
        let is_acquired = section.acquired.is_some();
        if let Some(ticket) = &section.ticket {
            self.tickets
                .extend(ticket.text.clone().map(|text| (text, at)));
        }
        let (requested, mode) = (section.requested, section.request.mode);
        let used = section.request.ticket.clone().filter(|_| is_answer);
        if let Some(ticket) = self.made_ticket(used.as_deref()) {
            match (mode, is_acquired) {
                (Mode::RenewTicket(lease), is_renewed) => {
                    ticket.may_end_at(t + lease);
                    if is_renewed && ticket.requested.is_none() {
                        ticket.kept_until = ticket.kept_until.max(requested + lease);
                    }
                }
                (Mode::ReleaseTicket, true) if !ticket.may_get_back => ticket.free_at = t,
                (Mode::ReleaseTicket, _) => {}
                (_, true) => _ = ticket.adopted.get_or_insert(t),
                // If the adoption had an effect, the client gives the hold back to the ticket, with a new lease.
                (_, false) => {
                    ticket.free_at = t + lease + GIVE_BACK_TIME;
                    ticket.may_get_back = true;
                    ticket.kept_until = ticket.kept_until.min(ticket.kept_first);
                }
            }
        }
    }

    /// Returns the ticket with this text.
    fn made_ticket(&mut self, text: Option<&str>) -> Option<&mut MadeTicket> {
        let maker = self.tickets.get(text?)?;
        self.sections.get_mut(*maker)?.ticket.as_mut()
    }

    /// Returns the time in which a section kept its object from others: see [`Section::held_span`]. While a fault lasts, a
    /// client cannot give a hold back to its ticket.
    pub fn held_span(&self, section: &Section) -> Option<(Time, Time)> {
        let (from, mut until) = section.held_span()?;
        let returned = section.ticket.as_ref();
        if returned.is_some_and(|ticket| ticket.may_get_back && ticket.adopted.is_none()) {
            for window in &self.windows {
                let given_back = until - self.lease;
                if window.from < given_back && given_back - GIVE_BACK_TIME < window.until {
                    until = until.max(window.until + GIVE_BACK_TIME + self.lease);
                }
            }
        }
        Some((from, until))
    }

    /// Returns how far the clock of the servers is behind at this time, because it was set.
    pub fn clock_behind(&self, at: Time) -> Time {
        let steps = self.clock_steps.iter().filter(|step| step.0 <= at);
        -steps.map(|step| step.1).sum::<Time>()
    }

    /// Returns when a lease that the store has renewed at this time ends. A clock that is set meanwhile changes that.
    pub fn lease_end(&self, renewed: Time) -> Time {
        let steps = self.clock_steps.iter().filter(|step| step.0 >= renewed);
        steps.fold(renewed + self.lease, |end, &(at, forward)| {
            if at < end { at.max(end - forward) } else { end }
        })
    }

    /// Returns since when the store may have renewed a lease that ends at this time.
    pub fn lease_begin(&self, end: Time) -> Time {
        let (mut lease, mut begin) = (self.lease, end - self.lease);
        let steps = self.clock_steps.iter().filter(|step| step.0 <= end);
        for &(at, forward) in steps.rev() {
            lease -= forward;
            if end - lease <= at {
                begin = begin.min(end - lease);
            }
        }
        begin
    }

    /// Returns how many critical sections were entered.
    pub fn entered(&self) -> usize {
        self.sections
            .iter()
            .filter(|one| one.acquired.is_some() && !one.enters_none())
            .count()
    }

    /// Returns how many of them were entered while something was broken.
    pub fn entered_during_faults(&self) -> usize {
        let meanwhile = |at| self.windows.iter().any(|w| w.from <= at && at <= w.until);
        let entered = self.sections.iter().filter_map(|one| one.acquired);
        entered.filter(|&at| meanwhile(at)).count()
    }

    /// Returns whether a ticket that was left to the end of its lease, or a minimum time, may still
    /// keep a lock at this time.
    pub fn has_unused_tickets(&self, now: Time) -> bool {
        let kept_until = |one: &Section| match &one.ticket {
            Some(ticket) => Some(ticket.free_at).filter(|_| ticket.adopted.is_none()),
            // The minimum time of a release that was settled later may end later, too.
            None => {
                let settled_late = one.released.filter(|_| one.unlock_error.is_some());
                Some(settled_late? + one.request.limits.at_least? + self.lease)
            }
        };
        self.sections.iter().any(|one| kept_until(one) > Some(now))
    }

    /// Returns the sections, grouped by name.
    pub fn by_name(&self) -> BTreeMap<&str, Vec<&Section>> {
        let mut names: BTreeMap<&str, Vec<&Section>> = BTreeMap::new();
        for section in self.sections.iter().filter(|one| !one.enters_none()) {
            names
                .entry(&section.request.name)
                .or_default()
                .push(section);
        }
        names
    }

    /// Records that the store lost data at some time in this window.
    pub fn record_data_loss(&mut self, from: Time, until: Time, loss: DataLoss) {
        self.data_losses.push(DataLossWindow { from, until, loss });
    }

    /// Returns the times in which the store may have lost objects without a lease, too.
    pub fn leaseless_losses(&self) -> impl Iterator<Item = &DataLossWindow> {
        self.data_losses.iter().filter(|lost| lost.loss.tokens)
    }

    /// Returns the longest time that the machine did not schedule a process.
    pub fn stalled(&self) -> Time {
        let stalled = self.processes.values().map(|process| process.stalled);
        stalled.max().unwrap_or_default()
    }

    /// Returns how often requests and releases failed, by kind of error.
    pub fn errors(&self) -> BTreeMap<&str, usize> {
        let mut errors = BTreeMap::new();
        for section in &self.sections {
            for error in section.failed.iter().chain(&section.unlock_error) {
                *errors.entry(error.as_str()).or_default() += 1;
            }
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Time = 1_000_000;

    fn record(history: &mut History, at: Time, section: u64, what: EventKind) {
        history.record(0, Event(at * MS, section, what));
    }

    fn request(history: &mut History, at: Time, section: u64, ticket: Option<&str>) {
        let request = Request {
            ticket: ticket.map(str::to_owned),
            ..Request::exclusive(0, "a".to_owned())
        };
        record(history, at, section, EventKind::Requested(request));
    }

    #[test]
    fn ticket_is_free_when_its_lease_ends_or_its_adopter_releases_it() {
        let (token, holds) = (None, None);
        let acquired = || EventKind::Acquired { token, holds };
        let mut history = History::new(Duration::from_secs(3));
        request(&mut history, 0, 1, None);
        record(&mut history, 1, 1, acquired());
        let lease = 1000 * MS;
        record(&mut history, 5, 1, EventKind::MakingTicket { lease });
        let text = "one".to_owned();
        record(&mut history, 7, 1, EventKind::BecameTicket { text });
        let ticket = |history: &History| history.sections[0].ticket.clone().unwrap();
        let made = ticket(&history);
        assert_eq!((made.kept_until, made.requested), (1005 * MS, None));
        assert_eq!(history.sections[0].held_span(), Some((MS, 1007 * MS)));
        assert!(history.has_unused_tickets(1006 * MS));
        assert!(!history.has_unused_tickets(1007 * MS));

        // An adoption that is canceled gives the hold back.
        request(&mut history, 10, 2, Some("one"));
        record(&mut history, 20, 2, EventKind::NotAcquired);
        assert_eq!(ticket(&history).requested, Some(10 * MS));
        assert_eq!(history.sections[0].held_span(), Some((MS, 3520 * MS)));
        for (from, until, free_at) in [
            (0, 19, 3520),
            (0, 60, 3560),
            (519, 900, 4400),
            (520, 900, 3520),
        ] {
            history.windows = vec![FaultWindow {
                from: from * MS,
                until: until * MS,
                is_outage: true,
            }];
            let span = history.held_span(&history.sections[0]);
            assert_eq!(
                span,
                Some((MS, free_at * MS)),
                "a fault from {from} to {until} ms"
            );
        }
        history.windows.clear();

        request(&mut history, 30, 3, Some("one"));
        record(&mut history, 40, 3, acquired());
        request(&mut history, 50, 4, Some("one"));
        record(&mut history, 60, 4, EventKind::NotAcquired);
        assert_eq!(ticket(&history).adopted, Some(40 * MS));
        assert_eq!(history.sections[0].held_span(), Some((MS, 40 * MS)));
        assert!(!history.has_unused_tickets(60 * MS));
    }

    /// Makes a ticket from 5 to 7 ms, with a lease of 1 s.
    fn with_ticket() -> History {
        let (token, holds) = (None, None);
        let mut history = History::new(Duration::from_secs(3));
        request(&mut history, 0, 1, None);
        record(&mut history, 1, 1, EventKind::Acquired { token, holds });
        let lease = 1000 * MS;
        record(&mut history, 5, 1, EventKind::MakingTicket { lease });
        let text = "one".to_owned();
        record(&mut history, 7, 1, EventKind::BecameTicket { text });
        history
    }

    /// Records a request that uses the ticket, and its answer 10 ms later.
    fn use_ticket(history: &mut History, at: Time, mode: Mode, succeeds: bool) {
        let section = u64::try_from(at).unwrap();
        let request = Request {
            mode,
            ticket: Some("one".to_owned()),
            ..Request::exclusive(0, "a".to_owned())
        };
        record(history, at, section, EventKind::Requested(request));
        let (token, holds) = (None, None);
        let answer = match succeeds {
            true => EventKind::Acquired { token, holds },
            false => EventKind::NotAcquired,
        };
        record(history, at + 10, section, answer);
    }

    fn ticket_times(history: &History) -> (Time, Time) {
        let ticket = history.sections[0].ticket.as_ref().unwrap();
        (ticket.kept_until / MS, ticket.free_at / MS)
    }

    #[test]
    fn renewal_extends_lease_of_ticket() {
        let mut history = with_ticket();
        let renewed = Mode::RenewTicket(1500 * MS);
        use_ticket(&mut history, 100, renewed, true);
        assert_eq!(ticket_times(&history), (1600, 3100));
        // It may have been extended.
        use_ticket(&mut history, 2000, renewed, false);
        assert_eq!(ticket_times(&history), (1600, 5000));
        // An adoption that fails gives the hold back with the first lease.
        use_ticket(&mut history, 2100, Mode::Exclusive, false);
        assert_eq!(ticket_times(&history), (1005, 5610));
        use_ticket(&mut history, 2200, renewed, true);
        assert_eq!(ticket_times(&history), (1005, 5610));
    }

    #[test]
    fn ticket_is_free_when_its_release_is_answered() {
        let mut history = with_ticket();
        use_ticket(&mut history, 100, Mode::ReleaseTicket, true);
        assert_eq!(ticket_times(&history), (100, 110));
        assert_eq!(history.sections[0].held_span(), Some((MS, 110 * MS)));
    }

    #[test]
    fn lock_stays_held_for_minimum_time() {
        let mut history = with_ticket();
        let mut section = Section::new(0, 0, history.sections[0].request.clone());
        section.request.limits.at_least = Some(500 * MS);
        let (token, holds, error) = (None, None, None);
        section.record(10 * MS, EventKind::Acquired { token, holds });
        section.record(100 * MS, EventKind::Releasing);
        assert!(section.record(120 * MS, EventKind::Released { error }));
        history.sections = vec![section];
        assert_eq!(ticket_times(&history), (509, 530));
        assert_eq!(history.sections[0].held_span(), Some((10 * MS, 530 * MS)));

        // It was revoked.
        let one = &mut history.sections[0];
        one.ticket = None;
        (one.valid_until, one.unlock_error) = (Some(100 * MS), Some("Lost(Revoked)".to_owned()));
        assert_eq!(one.held_span(), Some((10 * MS, 510 * MS)));
        assert!(history.has_unused_tickets(3619 * MS));
        assert!(!history.has_unused_tickets(3620 * MS));
    }

    #[test]
    fn guard_that_is_valid_after_limit_is_recorded() {
        let history = with_ticket();
        let mut section = Section::new(0, 0, history.sections[0].request.clone());
        section.request.limits.fed_every = Some(50 * MS);
        let (token, holds) = (None, None);
        section.record(10 * MS, EventKind::Acquired { token, holds });
        let valid = |section: &mut Section, at: Time| {
            let (until, at_least) = (at * MS, at * MS);
            section.record(at * MS, EventKind::Valid { until, at_least });
            section.valid_after_limit
        };
        assert_eq!(valid(&mut section, 60), None);
        section.record(60 * MS, EventKind::Fed);
        assert_eq!(valid(&mut section, 110), None);
        assert_eq!(valid(&mut section, 111), Some(110 * MS));
    }

    #[test]
    fn request_to_release_is_no_section_of_the_lock() {
        let mut history = History::new(Duration::from_secs(3));
        request(&mut history, 0, 1, None);
        history.sections[0].request.mode = Mode::Ask(None);
        history.sections[0].acquired = Some(0);
        assert!(history.by_name().is_empty());
        assert_eq!(history.entered(), 0);
    }
}
