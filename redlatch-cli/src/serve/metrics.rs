//! The metrics of `redlatch serve`, for Prometheus.
//!
//! Each scrape gets the result of the latest look. After a look that failed there is none, only
//! `redlatch_exporter_up 0`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use redlatch::inspect::ObjectKind;
use redlatch::job::{History, RunState};
use tokio::sync::watch;

use super::looks::Latest;
use crate::look::{Counts, Look};

/// Limit of names with series of their own. Further ones are only counted.
pub(super) const MAX_NAMES: usize = 1000;

/// The format that `prometheus-client` writes.
pub(super) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of the latest look.
#[derive(Debug)]
pub(super) struct Metrics(Registry);

#[derive(Debug)]
struct LatestMetrics {
    latest: watch::Receiver<Arc<Latest>>,
    with_names: bool,
}

impl Metrics {
    pub(super) fn new(latest: watch::Receiver<Arc<Latest>>, with_names: bool) -> Metrics {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(LatestMetrics { latest, with_names }));
        Metrics(registry)
    }

    pub(super) fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.0).map(|()| text)
    }
}

/// An object with series of its own.
struct Named<'a> {
    name: &'a str,
    kind: String,
    holders: usize,
    waiters: usize,
    /// The longest time until a hold ends unless it is renewed. `None` if there is no hold, or if
    /// all never end.
    remaining: Option<Duration>,
}

/// Returns objects of the latest look: locks by name, then semaphores and latches.
fn named(look: &Look) -> impl Iterator<Item = Named<'_>> {
    let locks = look.locks.iter().filter_map(|lock| {
        let leases = lock.holders.iter().map(|holder| holder.lease);
        Some(Named {
            name: &lock.name,
            kind: lock.object?.to_string(),
            holders: lock.holder_count,
            waiters: lock.waiter_count,
            remaining: leases.filter_map(|lease| lease.duration()).max(),
        })
    });
    let counters = look.counters.iter().map(|name| Named {
        name,
        kind: ObjectKind::Counter.to_string(),
        holders: 0,
        waiters: 0,
        remaining: None,
    });
    locks.chain(counters)
}

impl Collector for LatestMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let latest = self.latest.borrow().clone();
        let found = latest.current();
        let mut gauges = Gauges(&mut encoder);
        let up = f64::from(u8::from(found.is_some()));
        gauges.add(
            "redlatch_exporter_up",
            "Whether the latest look at the store succeeded",
            None,
            [([], up)],
        )?;
        let Some(found) = found else {
            return Ok(());
        };
        let look = &found.look;
        let seconds = Some(&Unit::Seconds);
        gauges.add(
            "redlatch_exporter_look",
            "How long the latest look took",
            seconds,
            [([], look.took.as_secs_f64())],
        )?;
        let ended = (look.time + look.took).duration_since(SystemTime::UNIX_EPOCH);
        gauges.add(
            "redlatch_exporter_looked_at",
            "When the latest look ended, since the beginning of 1970",
            seconds,
            [([], ended.unwrap_or_default().as_secs_f64())],
        )?;
        let kinds: [(_, _, Count); 3] = [
            ("redlatch_objects", "Number of objects", |of| of.objects),
            ("redlatch_holders", HOLDERS, |of| of.holders),
            ("redlatch_waiters", WAITERS, |of| of.waiters),
        ];
        // If the server does not show which owners wait, no number is better than 0.
        let known = kinds.len() - usize::from(look.waits_refused);
        for (name, help, count) in kinds.into_iter().take(known) {
            let series = look.kinds.iter();
            let series = series.map(|(kind, of)| ([("kind", &**kind)], count(of) as f64));
            gauges.add(name, help, None, series)?;
        }
        let names = if self.with_names { MAX_NAMES } else { 0 };
        let names: Vec<_> = named(look).take(names).collect();
        let counts: [(_, _, _, Value<Named>); 3] = [
            ("redlatch_object_holders", HOLDERS, None, |of| {
                Some(of.holders as f64)
            }),
            ("redlatch_object_waiters", WAITERS, None, |of| {
                Some(of.waiters as f64)
            }),
            ("redlatch_object_lease", LEASE, seconds, |of| {
                Some(of.remaining?.as_secs_f64())
            }),
        ];
        for (name, help, unit, value) in counts {
            let series = names.iter().filter_map(|of| {
                let labels = [("name", of.name), ("kind", &*of.kind)];
                Some((labels, value(of)?))
            });
            gauges.add(name, help, unit, series)?;
        }
        let jobs: [(_, _, _, Value<History>); 4] = [
            ("redlatch_job_last_success", JOB_SUCCESS, seconds, |job| {
                let since = job
                    .last_success?
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .ok()?;
                Some(since.as_secs_f64())
            }),
            ("redlatch_job_last_duration", JOB_DURATION, seconds, |job| {
                let took = job.runs.iter().find_map(|run| run.took)?;
                Some(took.as_secs_f64())
            }),
            ("redlatch_job_failures", JOB_FAILURES, None, |job| {
                let failed = |state| matches!(state, RunState::Failed | RunState::Lost);
                let failures = job.runs.iter().filter(|run| failed(run.state));
                Some(failures.count() as f64)
            }),
            ("redlatch_job_skipped", JOB_SKIPPED, None, |job| {
                Some(job.skipped as f64)
            }),
        ];
        for (name, help, unit, value) in jobs {
            let jobs = found.jobs.iter();
            let series = jobs.filter_map(|job| Some(([("name", &*job.name)], value(job)?)));
            gauges.add(name, help, unit, series)?;
        }
        let objects = look.kinds.values().map(|counts| counts.objects);
        let objects = if self.with_names { objects.sum() } else { 0 };
        let omitted = usize::saturating_sub(objects, names.len()) + found.omitted_jobs;
        gauges.add(
            "redlatch_exporter_omitted_names",
            "Number of objects and jobs without series of their own",
            None,
            [([], omitted as f64)],
        )
    }
}

/// Returns one of the numbers.
type Count = fn(&Counts) -> usize;

/// Returns the value of a series, if it has one.
type Value<T> = fn(&T) -> Option<f64>;

const HOLDERS: &str =
    "Number of owners that hold it, or of acquired permits of an expirable semaphore";
const WAITERS: &str =
    "Number of owners in the queue of a fair lock, or that have waited for more than a second";
const JOB_SUCCESS: &str =
    "Scheduled time of the latest run that succeeded, since the beginning of 1970";
const JOB_DURATION: &str = "How long the latest run took that has ended";
const JOB_FAILURES: &str = "Number of failed and lost runs among the latest 20";
const JOB_SKIPPED: &str = "Number of firings that were skipped because another run lasted";
const LEASE: &str = "Time until the last hold ends unless it is renewed";

/// Writes gauges.
struct Gauges<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Gauges<'_, '_> {
    /// Writes a gauge with a value for each set of labels, if there is any.
    fn add<'a, const LABELS: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        series: impl IntoIterator<Item = ([(&'a str, &'a str); LABELS], f64)>,
    ) -> fmt::Result {
        let mut series = series.into_iter().peekable();
        if series.peek().is_none() {
            return Ok(());
        }
        let mut family = self
            .0
            .encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for (labels, value) in series {
            if labels.is_empty() {
                family.encode_gauge(&value)?;
            } else {
                family.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }
}
