//! The handles of a client's metrics. They are registered when the client is created, those of a
//! kind when its first handle is used. So the program installs its recorder before that, and
//! measuring costs no look-up.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ::metrics::{
    Counter, Gauge, Histogram, Label, Unit, counter, describe_counter, describe_gauge,
    describe_histogram, gauge, histogram,
};
use tokio::time::Instant;

use super::Kind;
use crate::error::{Loss, Result};
use crate::sync::Mutex;

impl Kind {
    const COUNT: usize = Kind::FairSemaphore as usize + 1;

    fn attribute(self) -> &'static str {
        match self {
            Kind::Lock => "lock",
            Kind::FairLock => "fair_lock",
            Kind::Election => "election",
            Kind::FencedLock => "fenced_lock",
            Kind::SpinLock => "spin_lock",
            Kind::GroupLock => "group_lock",
            Kind::ReadLock => "read_lock",
            Kind::WriteLock => "write_lock",
            Kind::MultiLock => "multi_lock",
            Kind::RedLock => "red_lock",
            Kind::Semaphore => "semaphore",
            Kind::ExpirableSemaphore => "expirable_semaphore",
            Kind::FairReadLock => "fair_read_lock",
            Kind::FairWriteLock => "fair_write_lock",
            Kind::FairSemaphore => "fair_semaphore",
        }
    }
}

/// Returns the attribute `name` of the metrics of an object with this name, if they have it.
type ChooseName = dyn Fn(&str) -> Option<&str> + Send + Sync;

/// What the user has chosen as the attribute `name`.
#[derive(Clone)]
pub(crate) struct NameAttribute(pub(crate) Arc<ChooseName>);

impl std::fmt::Debug for NameAttribute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NameAttribute").finish_non_exhaustive()
    }
}

/// The metrics of one client. The default records nothing.
#[derive(Clone, Default)]
pub(crate) struct Metrics(Option<Arc<ClientHandles>>);

struct ClientHandles {
    kinds: [OnceLock<KindMetrics>; Kind::COUNT],
    name_attribute: Option<NameAttribute>,
    /// Those with the attribute `name`.
    named: Mutex<BTreeMap<(Kind, Box<str>), KindMetrics>>,
    renewal_duration: Histogram,
    renewal_failures: Counter,
    renewal_margin: Histogram,
    wake_latency: Histogram,
    handoff_turns: Histogram,
    batch_size: Histogram,
    subscriptions: Gauge,
    reconnects: Counter,
    tracking_refusals: Counter,
}

/// The metrics of one kind, or of one name. The default records nothing.
#[derive(Clone, Default)]
pub(crate) struct KindMetrics(Option<Arc<KindHandles>>);

struct KindHandles {
    acquired: Histogram,
    timeout: Histogram,
    canceled: Histogram,
    error: Histogram,
    waiting: Gauge,
    released: Histogram,
    lost: Histogram,
    dropped: Histogram,
    held: Gauge,
    lease_ended: Counter,
    not_held: Counter,
    held_too_long: Counter,
    not_fed: Counter,
    revoked: Counter,
}

impl Metrics {
    /// Describes all metrics, and registers those without a kind.
    pub(crate) fn register(name_attribute: Option<NameAttribute>) -> Metrics {
        describe();
        Metrics(Some(Arc::new(ClientHandles {
            kinds: [const { OnceLock::new() }; Kind::COUNT],
            name_attribute,
            named: Mutex::default(),
            renewal_duration: histogram!("redlatch.renewal.duration"),
            renewal_failures: counter!("redlatch.renewal.failures"),
            renewal_margin: histogram!("redlatch.renewal.margin"),
            wake_latency: histogram!("redlatch.wake.latency"),
            handoff_turns: histogram!("redlatch.hand_over.turns"),
            batch_size: histogram!("redlatch.batch.size"),
            subscriptions: gauge!("redlatch.client.subscriptions"),
            reconnects: counter!("redlatch.client.reconnects"),
            tracking_refusals: counter!("redlatch.client.tracking_refusals"),
        })))
    }

    /// Returns the metrics of an object, or of several as one without a name. Registers those of
    /// its kind with their first use.
    pub(crate) fn of(&self, kind: Kind, name: Option<&str>) -> KindMetrics {
        let Some(handles) = &self.0 else {
            return KindMetrics::default();
        };
        let register = |name| KindMetrics(Some(Arc::new(KindHandles::register(kind, name))));
        if let (Some(attribute), Some(name)) = (&handles.name_attribute, name)
            && let Some(value) = (attribute.0)(name)
        {
            let mut named = handles.named.lock();
            let of_name = named.entry((kind, value.into()));
            return of_name.or_insert_with(|| register(Some(value))).clone();
        }
        let of_kind = &handles.kinds[kind as usize];
        of_kind.get_or_init(|| register(None)).clone()
    }

    /// Records that a batch of renewals was answered, or failed.
    pub(crate) fn renewal_ended(&self, began: Timer, succeeded: bool) {
        self.record(|handles| match succeeded {
            true => handles.renewal_duration.record(began.elapsed()),
            false => handles.renewal_failures.increment(1),
        });
    }

    /// Records how much of its lease a hold had left when its renewal was confirmed.
    pub(crate) fn renewed(&self, margin: impl FnOnce() -> Duration) {
        self.record(|handles| handles.renewal_margin.record(margin()));
    }

    /// Records that a waiter has acquired what it waited for, if a message had woken it.
    pub(crate) fn acquired_after_wake(&self, woken: Option<Instant>) {
        if let Some(woken) = woken {
            self.record(|handles| handles.wake_latency.record(woken.elapsed()));
        }
    }

    /// Records the release of a hold that has passed on this many times since it was acquired.
    pub(crate) fn chain_ended(&self, turns: u32) {
        if turns > 0 {
            self.record(|handles| handles.handoff_turns.record(turns));
        }
    }

    /// Records that so many steps are sent as one script.
    pub(crate) fn batch_sent(&self, steps: usize) {
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        self.record(|handles| handles.batch_size.record(steps));
    }

    /// Records that a lost connection was restored.
    pub(crate) fn reconnected(&self) {
        self.record(|handles| handles.reconnects.increment(1));
    }

    /// Records that a server refuses to report changed locks.
    pub(crate) fn tracking_refused(&self) {
        self.record(|handles| handles.tracking_refusals.increment(1));
    }

    /// Returns the count of one subscription, which does not exist yet.
    pub(crate) fn subscription(&self) -> SubscriptionCount {
        SubscriptionCount {
            gauge: self.0.as_ref().map(|handles| handles.subscriptions.clone()),
            exists: AtomicBool::new(false),
        }
    }

    fn record(&self, record: impl FnOnce(&ClientHandles)) {
        if let Some(handles) = &self.0 {
            record(handles);
        }
    }
}

fn describe() {
    let histograms = [
        (
            "redlatch.lock.wait.duration",
            Unit::Seconds,
            "Time from a request to its outcome",
        ),
        (
            "redlatch.lock.hold.duration",
            Unit::Seconds,
            "Time from an acquisition to its release",
        ),
        (
            "redlatch.renewal.duration",
            Unit::Seconds,
            "Time from a batch of renewals to its answer",
        ),
        (
            "redlatch.renewal.margin",
            Unit::Seconds,
            "Lease that was left when a renewal was confirmed",
        ),
        (
            "redlatch.wake.latency",
            Unit::Seconds,
            "Time from the wake-up of a waiter to its acquisition",
        ),
        (
            "redlatch.hand_over.turns",
            Unit::Count,
            "How often a lock passed on until it was released",
        ),
        (
            "redlatch.batch.size",
            Unit::Count,
            "Number of steps that were sent as one script",
        ),
    ];
    for (name, unit, text) in histograms {
        describe_histogram!(name, unit, text);
    }
    let gauges = [
        ("redlatch.lock.held", "Number of guards"),
        (
            "redlatch.lock.waiting",
            "Number of requests without an outcome",
        ),
        (
            "redlatch.client.subscriptions",
            "Number of subscribed channels",
        ),
    ];
    for (name, text) in gauges {
        describe_gauge!(name, Unit::Count, text);
    }
    let counters = [
        ("redlatch.lock.lost", "Number of lost holds"),
        (
            "redlatch.renewal.failures",
            "Number of batches of renewals that failed",
        ),
        (
            "redlatch.client.reconnects",
            "Number of restored connections",
        ),
        (
            "redlatch.client.tracking_refusals",
            "Number of server processes that refused to report changed locks",
        ),
    ];
    for (name, text) in counters {
        describe_counter!(name, Unit::Count, text);
    }
}

impl KindHandles {
    fn register(kind: Kind, name: Option<&str>) -> KindHandles {
        let labels = |outcome: Option<(&'static str, &'static str)>| {
            let kind = Label::from_static_parts("kind", kind.attribute());
            let name = name.map(|name| Label::new("name", name.to_owned()));
            let outcome = outcome.map(|(key, value)| Label::from_static_parts(key, value));
            let all = [Some(kind), name, outcome].into_iter().flatten();
            all.collect::<Vec<_>>()
        };
        let duration = |name, outcome| histogram!(name, labels(Some(("outcome", outcome))));
        let wait = |outcome| duration("redlatch.lock.wait.duration", outcome);
        let hold = |outcome| duration("redlatch.lock.hold.duration", outcome);
        let lost = |reason| counter!("redlatch.lock.lost", labels(Some(("reason", reason))));
        KindHandles {
            acquired: wait("acquired"),
            timeout: wait("timeout"),
            canceled: wait("canceled"),
            error: wait("error"),
            waiting: gauge!("redlatch.lock.waiting", labels(None)),
            released: hold("released"),
            lost: hold("lost"),
            dropped: hold("dropped"),
            held: gauge!("redlatch.lock.held", labels(None)),
            lease_ended: lost("lease_ended"),
            not_held: lost("not_held"),
            held_too_long: lost("held_too_long"),
            not_fed: lost("not_fed"),
            revoked: lost("revoked"),
        }
    }
}

impl KindMetrics {
    /// Counts and measures a request, which begins now.
    pub(crate) fn request(self) -> RequestTimer {
        if let Some(handles) = &self.0 {
            handles.waiting.increment(1);
        }
        RequestTimer {
            began: Timer::start(),
            metrics: self,
        }
    }

    /// Counts and measures a guard, which is created now.
    pub(crate) fn guard(&self) -> GuardTimer {
        if let Some(handles) = &self.0 {
            handles.held.increment(1);
        }
        GuardTimer {
            began: Timer::start(),
            metrics: self.clone(),
        }
    }

    /// Counts a lost hold.
    pub(crate) fn lost(&self, loss: Loss) {
        if let Some(handles) = &self.0 {
            match loss {
                Loss::LeaseEnded => handles.lease_ended.increment(1),
                Loss::NotHeld => handles.not_held.increment(1),
                Loss::HeldTooLong { .. } => handles.held_too_long.increment(1),
                Loss::NotFed { .. } => handles.not_fed.increment(1),
                Loss::Revoked => handles.revoked.increment(1),
            }
        }
    }
}

/// A point in time, in nanoseconds since the first one: half as large as an `Instant`, because each
/// request has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timer(u64);

impl Timer {
    pub(crate) fn start() -> Timer {
        static FIRST: OnceLock<std::time::Instant> = OnceLock::new();
        let first = *FIRST.get_or_init(std::time::Instant::now);
        let since = Instant::now().into_std().saturating_duration_since(first);
        Timer(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }

    fn elapsed(self) -> Duration {
        Duration::from_nanos(Timer::start().0.saturating_sub(self.0))
    }
}

/// A request that has no outcome yet. Dropping it records that it was canceled.
pub(crate) struct RequestTimer {
    began: Timer,
    metrics: KindMetrics,
}

impl RequestTimer {
    pub(crate) fn ended<T>(mut self, outcome: &Result<Option<T>>) {
        self.record(|handles| match outcome {
            Ok(Some(_)) => &handles.acquired,
            Ok(None) => &handles.timeout,
            Err(_) => &handles.error,
        });
    }

    fn record(&mut self, histogram: impl FnOnce(&KindHandles) -> &Histogram) {
        if let Some(handles) = self.metrics.0.take() {
            histogram(&handles).record(self.began.elapsed());
            handles.waiting.decrement(1);
        }
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        self.record(|handles| &handles.canceled);
    }
}

/// A guard. Dropping it records that it was dropped instead of released.
pub(crate) struct GuardTimer {
    began: Timer,
    metrics: KindMetrics,
}

impl GuardTimer {
    /// Records the result of its release.
    pub(crate) fn released(&mut self, result: &Result<()>) {
        self.record(|handles| match result {
            Err(crate::Error::Lost { .. }) => &handles.lost,
            // Without an answer the release continues in the background.
            _ => &handles.released,
        });
    }

    fn record(&mut self, histogram: impl FnOnce(&KindHandles) -> &Histogram) {
        if let Some(handles) = self.metrics.0.take() {
            histogram(&handles).record(self.began.elapsed());
            handles.held.decrement(1);
        }
    }
}

impl Drop for GuardTimer {
    fn drop(&mut self) {
        self.record(|handles| &handles.dropped);
    }
}

/// Counts a subscription while it exists.
pub(crate) struct SubscriptionCount {
    gauge: Option<Gauge>,
    exists: AtomicBool,
}

impl SubscriptionCount {
    /// Sets whether the subscription may exist.
    pub(crate) fn set(&self, exists: bool) {
        let Some(gauge) = &self.gauge else {
            return;
        };
        match (self.exists.swap(exists, Ordering::Relaxed), exists) {
            (false, true) => gauge.increment(1),
            (true, false) => gauge.decrement(1),
            _ => {}
        }
    }
}

impl Drop for SubscriptionCount {
    fn drop(&mut self) {
        self.set(false);
    }
}
