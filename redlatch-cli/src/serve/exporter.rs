//! `redlatch exporter`: serves the state of all objects to Prometheus.
//!
//! 1. A loop looks at all matching objects, page by page, and pauses between two looks. So scrapes
//!    cost the store nothing, and a store with many keys delays no scrape.
//! 2. Each scrape gets the result of the latest look. After a look that failed there is none, only
//!    `redlatch_exporter_up 0`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use redlatch::inspect::{Listed, ObjectState};
use redlatch::{Client, Expiry};

use super::http;
use super::jobs::{self, JobMetrics};
use crate::args::Exporter;
use crate::exit::{self, Failure};
use crate::output::stderr::{note, warning};
use crate::process::signals::Signals;
use crate::store;
use crate::store::args::StoreArgs;

/// Limit of names with series of their own. Further ones are only counted.
const MAX_NAMES: usize = 1000;

/// The format that `prometheus-client` writes.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(crate) async fn exporter(store_args: &StoreArgs, exporter: &Exporter) -> Result<u8, Failure> {
    let mut signals = Signals::catch_ending()?;
    let (listener, bound) = http::listen(exporter.listen).await?;
    note!("serving http://{bound}/metrics");
    let latest = Latest::default();
    let registry = Arc::new({
        let mut registry = Registry::default();
        registry.register_collector(Box::new(latest.clone()));
        registry
    });
    let serving = http::serve(listener, move |request| respond(request, &registry));
    tokio::select! {
        biased;
        code = signals.next_end() => Ok(code),
        failure = look_repeatedly(store_args, exporter, &latest) => Err(failure),
        never = serving => match never {},
    }
}

/// The result of the latest look. `None` if it failed, or before the first one.
#[derive(Debug, Clone, Default)]
struct Latest(Arc<Mutex<Option<Look>>>);

impl Latest {
    fn lock(&self) -> MutexGuard<'_, Option<Look>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one look at all objects has found.
#[derive(Debug, Default)]
struct Look {
    kinds: BTreeMap<String, Counts>,
    /// Those with series of their own.
    names: BTreeMap<String, NamedObject>,
    omitted: u32,
    jobs: Vec<JobMetrics>,
    took: Duration,
    ended: Duration,
}

#[derive(Debug)]
struct NamedObject {
    kind: String,
    counts: Counts,
    /// The longest time until a hold ends unless it is renewed. `None` if there is no hold, or if
    /// all never end.
    remaining: Option<Duration>,
}

/// Numbers of objects, of their holders and of their waiters.
#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    objects: u32,
    holders: u32,
    waiters: u32,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        for (sum, more) in [
            (&mut self.objects, other.objects),
            (&mut self.holders, other.holders),
            (&mut self.waiters, other.waiters),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

/// Returns when each hold ends unless it is renewed.
fn holds(state: &ObjectState) -> Vec<Expiry> {
    match state {
        ObjectState::ExpirableSemaphore { held, .. } => {
            held.iter().map(|permit| permit.remaining).collect()
        }
        other => {
            let holders = other.holders().into_iter();
            holders.map(|holder| holder.remaining).collect()
        }
    }
}

impl Look {
    /// Adds an object that is not in `seen`, and its waiters, and takes these from `waiters`.
    fn add(
        &mut self,
        found: Listed,
        seen: &mut HashSet<String>,
        waiters: &mut HashMap<String, u32>,
        with_names: bool,
    ) {
        // SCAN may return a key several times.
        if !seen.insert(found.name.clone()) {
            return;
        }
        let (kind, holds) = (found.state.kind().to_string(), holds(&found.state));
        let counts = Counts {
            objects: 1,
            holders: u32::try_from(holds.len()).unwrap_or(u32::MAX),
            waiters: waiters.remove(&found.name).unwrap_or(0),
        };
        self.kinds.entry(kind.clone()).or_default().add(counts);
        if !with_names {
            return;
        }
        if self.names.len() == MAX_NAMES {
            self.omitted = self.omitted.saturating_add(1);
            return;
        }
        let object = NamedObject {
            kind,
            counts,
            remaining: holds.into_iter().filter_map(|end| end.duration()).max(),
        };
        self.names.insert(found.name, object);
    }
}

/// Looks at all objects again and again. Returns only if that can never succeed.
async fn look_repeatedly(store_args: &StoreArgs, exporter: &Exporter, latest: &Latest) -> Failure {
    let mut client = None;
    let mut is_failing = false;
    loop {
        let looked = async {
            let connected = match client.take() {
                Some(client) => client,
                None => store::connect(store_args, Client::builder()).await?,
            };
            look(client.insert(connected), exporter).await
        };
        let looked = looked.await;
        match &looked {
            Ok(_) if is_failing => note!("the store answers again"),
            Err(failure) if failure.code == exit::UNAVAILABLE && !is_failing => {
                warning!("no metrics: {}", failure.message);
            }
            _ => {}
        }
        is_failing = looked.is_err();
        *latest.lock() = match looked {
            Ok(look) => Some(look),
            Err(failure) if failure.code == exit::UNAVAILABLE => None,
            Err(failure) => return failure,
        };
        tokio::time::sleep(exporter.interval).await;
    }
}

async fn look(client: &Client, exporter: &Exporter) -> Result<Look, Failure> {
    let begun = Instant::now();
    let mut look = Look::default();
    // Those in the queues of fair locks, and those that their clients have registered.
    let mut waiters = HashMap::new();
    for wait in client.wait_graph().await?.waits {
        *waiters.entry(wait.name).or_default() += 1;
    }
    let mut listing = client.list(&exporter.pattern);
    let mut seen = HashSet::new();
    while let Some(found) = listing.next().await? {
        look.add(found, &mut seen, &mut waiters, exporter.names);
    }
    look.jobs = jobs::read(client, &exporter.pattern).await?;
    let surplus = look.jobs.split_off(look.jobs.len().min(MAX_NAMES)).len();
    look.omitted = look
        .omitted
        .saturating_add(u32::try_from(surplus).unwrap_or(u32::MAX));
    look.took = begun.elapsed();
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    look.ended = since.unwrap_or_default();
    Ok(look)
}

impl Collector for Latest {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let latest = self.lock();
        let mut gauges = Gauges(&mut encoder);
        let up = f64::from(u8::from(latest.is_some()));
        gauges.add(
            "redlatch_exporter_up",
            "Whether the latest look at the store succeeded",
            None,
            [([], up)],
        )?;
        let Some(look) = &*latest else {
            return Ok(());
        };
        let seconds = Some(&Unit::Seconds);
        gauges.add(
            "redlatch_exporter_look",
            "How long the latest look took",
            seconds,
            [([], look.took.as_secs_f64())],
        )?;
        gauges.add(
            "redlatch_exporter_looked_at",
            "When the latest look ended, since the beginning of 1970",
            seconds,
            [([], look.ended.as_secs_f64())],
        )?;
        let kinds: [(_, _, Count); 3] = [
            ("redlatch_objects", "Number of objects", |of| of.objects),
            ("redlatch_holders", HOLDERS, |of| of.holders),
            ("redlatch_waiters", WAITERS, |of| of.waiters),
        ];
        for (name, help, count) in kinds {
            let series = look.kinds.iter();
            let series = series.map(|(kind, of)| ([("kind", &**kind)], count(of).into()));
            gauges.add(name, help, None, series)?;
        }
        let names = look
            .names
            .iter()
            .map(|(name, object)| ([("name", &**name), ("kind", &*object.kind)], object));
        let counts: [(_, _, Count); 2] = [
            ("redlatch_object_holders", HOLDERS, |of| of.holders),
            ("redlatch_object_waiters", WAITERS, |of| of.waiters),
        ];
        for (name, help, count) in counts {
            let series = names.clone();
            let series = series.map(|(labels, object)| (labels, count(&object.counts).into()));
            gauges.add(name, help, None, series)?;
        }
        gauges.add(
            "redlatch_object_lease",
            "Time until the last hold ends unless it is renewed",
            seconds,
            names.filter_map(|(labels, object)| Some((labels, object.remaining?.as_secs_f64()))),
        )?;
        let jobs = || look.jobs.iter().map(|job| ([("name", &*job.name)], job));
        let times: [(_, _, Time); 2] = [
            ("redlatch_job_last_success", JOB_SUCCESS, |job| {
                job.last_success
            }),
            ("redlatch_job_last_duration", JOB_DURATION, |job| {
                job.last_duration
            }),
        ];
        for (name, help, time) in times {
            let series =
                jobs().filter_map(|(labels, job)| Some((labels, time(job)?.as_secs_f64())));
            gauges.add(name, help, seconds, series)?;
        }
        let failures = jobs().map(|(labels, job)| (labels, job.failures.into()));
        gauges.add("redlatch_job_failures", JOB_FAILURES, None, failures)?;
        let skipped = jobs().map(|(labels, job)| (labels, job.skipped as f64));
        gauges.add("redlatch_job_skipped", JOB_SKIPPED, None, skipped)?;
        gauges.add(
            "redlatch_exporter_omitted_names",
            "Number of objects without series of their own",
            None,
            [([], look.omitted.into())],
        )
    }
}

/// Returns one of the numbers.
type Count = fn(&Counts) -> u32;

/// Returns one of the times.
type Time = fn(&JobMetrics) -> Option<Duration>;

const JOB_SUCCESS: &str =
    "Scheduled time of the latest run that succeeded, since the beginning of 1970";
const JOB_DURATION: &str = "How long the latest run took that has ended";
const JOB_FAILURES: &str = "Number of failed and lost runs among the latest 20";
const JOB_SKIPPED: &str = "Number of firings that were skipped because another run lasted";

const HOLDERS: &str =
    "Number of owners that hold it, or of acquired permits of an expirable semaphore";
const WAITERS: &str =
    "Number of owners in the queue of a fair lock, or that have waited for more than a second";

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

/// Answers scrapes.
fn respond(request: &Request<Incoming>, registry: &Registry) -> Response<Full<Bytes>> {
    if request.uri().path() != "/metrics" {
        return http::response(
            StatusCode::NOT_FOUND,
            http::TEXT,
            "the metrics are at /metrics\n",
        );
    }
    let mut body = String::new();
    match text::encode(&mut body, registry) {
        Ok(()) => http::response(StatusCode::OK, OPEN_METRICS, body),
        Err(_) => http::response(
            StatusCode::INTERNAL_SERVER_ERROR,
            http::TEXT,
            "the metrics cannot be written\n",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn name_that_scan_returns_twice_is_counted_once() {
        let client = Client::embedded();
        let _guard = client.lock("a").lock().await.unwrap();
        let mut look = Look::default();
        let mut seen = HashSet::new();
        let mut waiters = HashMap::from([("a".to_owned(), 2)]);
        for _ in 0..2 {
            let found = client.list("*").next().await.unwrap().unwrap();
            look.add(found, &mut seen, &mut waiters, true);
        }
        for counts in [look.kinds["lock"], look.names["a"].counts] {
            let counts = (counts.objects, counts.holders, counts.waiters);
            assert_eq!(counts, (1, 1, 2));
        }
    }
}
