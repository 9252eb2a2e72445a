//! One critical section: requested, acquired, watched from inside, released.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlatch::{Error, Guard, HasLease, Owner, SemaphorePermits};
use tokio::time::{Instant, sleep, timeout};

use super::limits::{Feeding, LimitUse};
use super::reporter::{CHECK_INTERVAL, Reporter};
use super::tickets::TicketUse;
use crate::clock::{Time, nanos};
use crate::history::{EventKind, Limits, Mode, Request};
use crate::names::{locks_of, members_of};
use crate::random::Random;
use crate::resource::ResourceClient;

/// Time within which `lost()` must complete after the guard became invalid.
const LOSS_REPORT_LIMIT: Duration = Duration::from_secs(3);

/// A task that enters and leaves critical sections.
#[derive(Debug)]
pub(crate) struct SectionRunner {
    task: usize,
    client: usize,
    /// The owner that it acts for, if it shares one with others.
    owner: Option<Owner>,
    /// Its current section. Those of a multi-lock's members follow that of the whole.
    sections: Vec<u64>,
    /// Name of the requested lock.
    name: String,
    reporter: Reporter,
    /// If set, tasks leave their sections as soon as possible.
    shutdown: Arc<AtomicBool>,
    resource: ResourceClient,
    /// `None`: it does not use tickets, and asks for no lock.
    ticket_use: Option<TicketUse>,
    /// `None`: its requests have no limits.
    limit_use: Option<LimitUse>,
    /// The limits of its next request.
    limits: Limits,
    /// How it feeds the hold of its current section.
    feeding: Option<Feeding>,
}

/// Way in which a guard is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReleaseMode {
    /// By `unlock`, which is awaited.
    Unlock,
    /// In the background.
    Drop,
    /// In the background, which is then flushed for this time.
    Flush(Duration),
}

impl SectionRunner {
    pub(crate) fn new(
        task: usize,
        client: usize,
        reporter: Reporter,
        resource: ResourceClient,
        shutdown: Arc<AtomicBool>,
        ticket_use: Option<TicketUse>,
        limit_use: Option<LimitUse>,
    ) -> SectionRunner {
        SectionRunner {
            task,
            client,
            owner: None,
            sections: Vec::new(),
            name: String::new(),
            reporter,
            shutdown,
            resource,
            ticket_use,
            limit_use,
            limits: Limits::default(),
            feeding: None,
        }
    }

    /// Returns the same task, acting for an owner that it shares with others.
    pub(crate) fn for_owner(self, owner: Owner) -> SectionRunner {
        SectionRunner {
            owner: Some(owner),
            ..self
        }
    }

    /// Returns the same task, for a section nested in the current one.
    pub(crate) fn nested(&self) -> SectionRunner {
        SectionRunner {
            task: self.task,
            client: self.client,
            owner: self.owner,
            sections: Vec::new(),
            name: String::new(),
            reporter: self.reporter.clone(),
            shutdown: self.shutdown.clone(),
            resource: self.resource.clone(),
            ticket_use: None,
            limit_use: None,
            limits: Limits::default(),
            feeding: None,
        }
    }

    /// Returns what the task needs for tickets in its next section, with new random numbers.
    pub(super) fn ticket_use(&mut self) -> Option<TicketUse> {
        let ticket_use = self.ticket_use.as_mut()?;
        let random = Random::new(ticket_use.random.next_u64());
        Some(TicketUse {
            random,
            ..ticket_use.clone()
        })
    }

    /// The next request has no limits.
    pub(super) fn clear_limits(&mut self) {
        self.limits = Limits::default();
    }

    /// The next request has a fixed lease, and no other limit.
    pub(super) fn fix_lease(&mut self, lease: Duration) -> Limits {
        self.limits = Limits {
            lease: Some(nanos(lease)),
            ..Limits::default()
        };
        self.limits
    }

    /// Draws the limits of the next request, whose section lasts this long. `has_minimum`: they may
    /// include `at_least`.
    pub(super) fn draw_limits(&mut self, time: Duration, has_minimum: bool) -> Limits {
        let drawn = self.limit_use.as_mut();
        self.limits = drawn.map_or_else(Limits::default, |limit_use| limit_use.draw(time));
        self.limits.at_least = self.limits.at_least.filter(|_| has_minimum);
        self.limits
    }

    /// Requests a lock and reports the result.
    pub(crate) async fn request<T>(
        &mut self,
        name: &str,
        mode: Mode,
        acquiring: impl Future<Output = Result<Option<T>, Error>>,
    ) -> Result<Option<T>, Error> {
        self.request_with_ticket(name, None, mode, acquiring).await
    }

    /// Requests a lock, or adopts a ticket of it, and reports the result.
    pub(super) async fn request_with_ticket<T>(
        &mut self,
        name: &str,
        ticket: Option<String>,
        mode: Mode,
        acquiring: impl Future<Output = Result<Option<T>, Error>>,
    ) -> Result<Option<T>, Error> {
        self.name = name.to_owned();
        self.sections.clear();
        // Adopters of tickets, and requests that enter no section, have none.
        let limits = match (&ticket, mode) {
            (None, Mode::Ask(_)) => Limits::default(),
            (None, _) => std::mem::take(&mut self.limits),
            (Some(_), Mode::RenewTicket(_) | Mode::ReleaseTicket) => Limits::default(),
            (Some(_), _) => {
                self.clear_limits();
                Limits::default()
            }
        };
        self.feeding = limits
            .fed_every
            .zip(self.limit_use.as_mut())
            .map(|(interval, limit_use)| limit_use.feeding(interval));
        self.begin_section(name, ticket, limits, mode, false);
        for member in members_of(name) {
            self.begin_section(&member, None, limits, mode, true);
        }
        let answer = acquiring.await;
        match &answer {
            // Reported on entry, with the token.
            Ok(Some(_)) => {}
            Ok(None) => self.report(EventKind::NotAcquired),
            Err(error) => self.report(EventKind::Failed {
                error: error_name(error),
            }),
        }
        answer
    }

    fn begin_section(
        &mut self,
        name: &str,
        ticket: Option<String>,
        limits: Limits,
        mode: Mode,
        is_member: bool,
    ) {
        let section = self.reporter.section();
        self.sections.push(section);
        let request = Request {
            task: self.task,
            client: self.client,
            // The adopter of a ticket is a new owner.
            owner: self.owner.filter(|_| ticket.is_none()).map(Owner::number),
            name: name.to_owned(),
            mode,
            is_member,
            ticket,
            limits,
            run: None,
        };
        self.reporter
            .report_in(section, EventKind::Requested(request));
    }

    /// Runs one critical section without a token, from the request to the release.
    pub(crate) async fn run_section<H: AsyncGuard>(
        &mut self,
        name: &str,
        mode: Mode,
        acquiring: impl Future<Output = Result<Option<H>, Error>>,
        time: Duration,
    ) -> Result<(), Error> {
        let guard = self.request(name, mode, acquiring).await?;
        self.hold_and_release(guard, None, time).await
    }

    /// Holds the lock for this long, or until it is lost, and releases it.
    pub(crate) async fn hold_and_release<H: AsyncGuard>(
        &mut self,
        guard: Option<H>,
        token: Option<u64>,
        time: Duration,
    ) -> Result<(), Error> {
        let Some(guard) = guard else { return Ok(()) };
        self.report_acquired(token, None);
        self.watch(&guard, time).await;
        self.release(guard, token, ReleaseMode::Unlock).await
    }

    /// Keeps permits for this long, and releases them.
    pub(crate) async fn hold_permits(
        &mut self,
        permits: Option<SemaphorePermits>,
        time: Duration,
    ) -> Result<(), Error> {
        let Some(permits) = permits else {
            return Ok(());
        };
        self.report_acquired(None, None);
        sleep(time).await;
        self.report(EventKind::Releasing);
        let released = permits.release().await;
        let error = released.as_ref().err().map(error_name);
        self.report(EventKind::Released { error });
        released
    }

    /// Records that a latch was counted down.
    pub(crate) fn report_count(&self, left: u64) {
        self.report(EventKind::CountedDown { left });
    }

    /// Records that the lock is held: the hold count is the last value read from the guard.
    pub(crate) fn report_acquired(&self, token: Option<u64>, holds: Option<u32>) {
        self.report(EventKind::Acquired { token, holds });
    }

    /// Watches the guard for this long, or until it is lost. Returns whether it was lost.
    pub(crate) async fn watch<H: AsyncGuard>(&self, guard: &H, time: Duration) -> bool {
        let begun = Instant::now();
        let end = begun + time;
        let mut until = self.check_validity(guard);
        let mut lost = std::pin::pin!(guard.lost());
        loop {
            // The last check is at the end.
            let left = end.saturating_duration_since(Instant::now());
            let interval = self.reporter.check_interval();
            let pause = if left.is_zero() {
                CHECK_INTERVAL
            } else {
                left.min(interval)
            };
            let feeding = self
                .feeding
                .filter(|feeding| begun.elapsed() < feeding.lasts);
            let pause = feeding.map_or(pause, |feeding| pause.min(feeding.interval / 2));
            tokio::select! {
                biased;
                () = &mut lost => {
                    if let Some(until) = until {
                        self.report_loss(until);
                    }
                    self.report(EventKind::LossReported);
                    // A lost guard must never report that it is valid.
                    self.check_validity(guard);
                    return true;
                }
                () = sleep(pause) => {}
            }
            if feeding.is_some() {
                self.report(EventKind::Fed);
                guard.feed();
            }
            let before = until;
            until = self.check_validity(guard);
            if until.is_none() {
                if let Some(before) = before {
                    self.report_loss(before);
                }
                if timeout(LOSS_REPORT_LIMIT, &mut lost).await.is_ok() {
                    self.report(EventKind::LossReported);
                }
                return true;
            }
            if Instant::now() >= end || self.shutdown.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    /// Watches the guard as [`SectionRunner::watch`] does, but at most until `end` completes.
    pub(super) async fn watch_until<H: AsyncGuard>(
        &self,
        guard: &H,
        end: impl Future<Output = ()>,
        time: Duration,
    ) -> bool {
        tokio::select! {
            biased;
            is_lost = self.watch(guard, time) => is_lost,
            () = end => {
                self.check_validity(guard);
                false
            }
        }
    }

    /// Writes to the resource if there is a token, and releases the lock.
    pub(crate) async fn release<H: AsyncGuard>(
        &mut self,
        guard: H,
        token: Option<u64>,
        how: ReleaseMode,
    ) -> Result<(), Error> {
        if let Some(token) = token {
            // Also after a loss: the resource has to refuse that write.
            self.write(&guard, token).await;
        }
        self.report(EventKind::Releasing);
        let how = match (how, &mut self.limit_use) {
            // A dropped guard does not report that it was lost before.
            (ReleaseMode::Unlock, Some(limit_use))
                if H::RELEASED_BY_DROP && !guard.valid_for().is_zero() =>
            {
                limit_use.release_mode()
            }
            (how, _) => how,
        };
        let released = match how {
            ReleaseMode::Unlock => guard.unlock().await,
            ReleaseMode::Flush(limit) => {
                drop(guard);
                let error = self.flush(limit).await;
                self.report(EventKind::Released { error });
                return Ok(());
            }
            ReleaseMode::Drop => {
                drop(guard);
                self.report(EventKind::Dropped);
                return Ok(());
            }
        };
        let error = released.as_ref().err().map(error_name);
        self.report(EventKind::Released { error });
        released
    }

    /// Waits until the client has settled the dropped guard. Returns an error if it has not within
    /// this time.
    async fn flush(&self, limit: Duration) -> Option<String> {
        let unsettled = self.limit_use.as_ref()?.client.flush_within(limit).await;
        let names = locks_of(&self.name);
        let is_settled = !unsettled
            .names()
            .any(|name| names.iter().any(|own| own == name));
        (!is_settled).then(|| "Unsettled".to_owned())
    }

    /// Records whether the guard is valid, and until when.
    fn check_validity<H: AsyncGuard>(&self, guard: &H) -> Option<Time> {
        let sections = self.sections.iter();
        let checks = sections.map(|section| {
            self.reporter
                .report_validity(*section, || guard.valid_for())
        });
        checks.last().flatten()
    }

    /// Records that the guard, which was valid until `until` at the last check, is lost.
    fn report_loss(&self, until: Time) {
        for section in &self.sections {
            self.reporter.report_loss(*section, until);
        }
    }

    /// Adds one to the number in the resource. Reports a loss of the guard meanwhile, because a guard that is dropped
    /// afterwards does not.
    async fn write<H: AsyncGuard>(&mut self, guard: &H, token: u64) {
        let until = self.check_validity(guard);
        let (reporter, sections) = (&self.reporter, &self.sections);
        let accepted = {
            let mut lost = std::pin::pin!(guard.lost());
            let mut writing = std::pin::pin!(add_one(&mut self.resource, &self.name, token));
            tokio::select! {
                biased;
                () = &mut lost, if until.is_some() => {
                    for section in sections {
                        until.inspect(|until| reporter.report_loss(*section, *until));
                        reporter.report_in(*section, EventKind::LossReported);
                    }
                    writing.await
                }
                accepted = &mut writing => accepted,
            }
        };
        if let Some(accepted) = accepted {
            self.report(EventKind::Wrote { accepted });
        }
    }

    pub(super) fn report(&self, what: EventKind) {
        for section in &self.sections {
            self.reporter.report_in(*section, what.clone());
        }
    }
}

/// Adds one to a number in the resource. Returns whether it has accepted that; `None` without an answer to the first step.
async fn add_one(resource: &mut ResourceClient, name: &str, token: u64) -> Option<bool> {
    let read = resource.exchange(&format!("read {name} {token}")).await?;
    let written = match read.parse::<u64>() {
        Ok(value) => {
            // Another writer may come in between: the token protects against that.
            sleep(Duration::from_millis(1)).await;
            let line = format!("write {name} {token} {}", value + 1);
            resource.exchange(&line).await
        }
        Err(_) => Some(read),
    };
    Some(written.as_deref() == Some("ok"))
}

/// Common interface of all guards.
pub(crate) trait AsyncGuard: Send {
    /// Whether dropping it releases it in the background.
    const RELEASED_BY_DROP: bool = true;

    fn valid_for(&self) -> Duration;
    fn lost(&self) -> impl Future<Output = ()> + Send + 'static;
    /// Feeds the hold. If it was lost, that is reported elsewhere.
    fn feed(&self) {}
    fn unlock(self) -> impl Future<Output = Result<(), Error>> + Send;
}

impl<R: HasLease> AsyncGuard for Guard<R> {
    fn valid_for(&self) -> Duration {
        Guard::valid_for(self)
    }

    fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        Guard::lost(self)
    }

    fn feed(&self) {
        let _ = Guard::feed(self);
    }

    async fn unlock(self) -> Result<(), Error> {
        Guard::unlock(self).await
    }
}

/// Returns the name of an error, and how a lock was lost.
pub(super) fn error_name(error: &Error) -> String {
    match error {
        Error::Lost { reason, .. } => format!("Lost({reason:?})"),
        Error::Refused { reason, .. } => {
            let code = reason.split(' ').next().unwrap_or_default();
            format!("Refused({code})")
        }
        other => {
            let text = format!("{other:?}");
            let end = text.find([' ', '{', '(']).unwrap_or(text.len());
            text[..end].to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::history::Event;
    use crate::resource::Records;
    use crate::worker::reporter::EventSink;

    #[derive(Debug, Default)]
    struct Recorded(Mutex<Vec<EventKind>>);

    impl EventSink for Recorded {
        fn now(&self) -> Time {
            0
        }

        fn record(&self, Event(_, _, what): Event) {
            self.0.lock().unwrap().push(what);
        }

        fn is_exact(&self) -> bool {
            true
        }
    }

    /// A guard whose lease ends at this time.
    struct UntilThen(Instant);

    impl AsyncGuard for UntilThen {
        fn valid_for(&self) -> Duration {
            self.0.saturating_duration_since(Instant::now())
        }

        fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
            tokio::time::sleep_until(self.0)
        }

        async fn unlock(self) -> Result<(), Error> {
            Ok(())
        }
    }

    /// A process that is stopped during the write may lose the lock to another holder meanwhile.
    #[tokio::test(start_paused = true)]
    async fn loss_during_the_write_is_reported_although_the_guard_is_dropped() {
        for is_stopped in [false, true] {
            let events = Arc::new(Recorded::default());
            let mut runner = SectionRunner::new(
                0,
                0,
                Reporter::new(events.clone()),
                ResourceClient::Local(Arc::<Records>::default()),
                Arc::default(),
                None,
                None,
            );
            let lease = Duration::from_secs(1);
            let guard = async { Ok(Some(UntilThen(Instant::now() + lease))) };
            let guard = runner.request("a", Mode::Exclusive, guard).await;
            let releasing = runner.release(guard.unwrap().unwrap(), Some(1), ReleaseMode::Drop);
            let stopping = async {
                if is_stopped {
                    tokio::time::advance(2 * lease).await;
                }
            };
            let (released, ()) = tokio::join!(releasing, stopping);
            released.unwrap();
            let events = events.0.lock().unwrap();
            let position = |what| events.iter().position(|one| *one == what);
            let lost = position(EventKind::LossReported);
            assert_eq!(lost.is_some(), is_stopped, "{events:?}");
            assert!(lost < position(EventKind::Releasing));
            // How long it was valid is known, too.
            let valid = |one: &&EventKind| matches!(one, EventKind::Valid { .. });
            let validities = events.iter().filter(valid).count();
            assert_eq!(validities, 1 + usize::from(is_stopped));
        }
    }
}
