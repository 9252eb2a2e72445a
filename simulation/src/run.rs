//! One run of a plan: runs the real clients while faults happen, and checks the history.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redlatch::Owner;
use redlatch::simulation::Inside;
use redlatch_robustness::checker::{self, Rule, Violation};
use redlatch_robustness::clock::{Time, nanos};
use redlatch_robustness::history::{Event, History, What};
use redlatch_robustness::random::Random;
use redlatch_robustness::resource::{Reach, Records};
use redlatch_robustness::visit::{set_permits, visit};
use redlatch_robustness::worker::{Crew, Ear, Sync, Teller, Worker, tell_left};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::linearizability;
use crate::network::{Network, ProcessId};
use crate::plan::Plan;
use crate::process::Process;
use crate::server::Server;
use crate::site::{Site, Topology};
use crate::trace::Trace;

/// The longest wait of a request for a free lock, in latencies.
const PROMPT: u32 = 40;

/// Time after which a request has joined the queue of a fair lock, in latencies.
const JOINS: u32 = 12;

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Violations that no documented limit explains.
    pub violations: Vec<Violation>,
    /// Number of violations that a documented limit explains.
    pub explained: usize,
    /// Number of critical sections that were entered.
    pub entered: usize,
    /// Simulated time of the run.
    pub simulated: Duration,
    /// Hash of the trace, the same for the same seed.
    pub hash: u64,
    /// Lines of the trace, if they are kept.
    pub trace: Vec<String>,
}

/// Runs a plan.
///
/// # Errors
///
/// The simulation does not support something that the client did.
pub fn run(plan: &Plan, keeps_trace: bool) -> Result<Outcome, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|error| error.to_string())?;
    runtime.block_on(Run::of(plan, keeps_trace))
}

pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) network: Network,
    pub(crate) site: Site,
    pub(crate) begun: Instant,
    /// Random numbers for the faults.
    pub(crate) random: Random,
    pub(crate) history: Arc<Mutex<History>>,
    records: Arc<Records>,
    ending: Arc<AtomicBool>,
    /// The running processes, each in its place.
    pub(crate) processes: Vec<Arc<Process>>,
    started: usize,
}

impl Run<'_> {
    async fn of(plan: &Plan, keeps_trace: bool) -> Result<Outcome, String> {
        let begun = Instant::now();
        let network = Network::new(plan.seed, plan.latency, Trace::new(keeps_trace));
        let site = Site::start(plan.topology, &network);
        let driver = tokio::spawn(network.clone().run());
        let mut run = Run {
            plan,
            site,
            random: Random::new(plan.seed ^ 0xfa17),
            begun,
            history: Arc::new(Mutex::new(History::new(plan.lease))),
            records: Arc::default(),
            ending: Arc::default(),
            processes: Vec::new(),
            started: 0,
            network,
        };
        for place in 0..plan.processes {
            let process = run.start(place);
            run.processes.push(process);
        }
        for scheduled in &plan.faults {
            sleep_until(begun + scheduled.from).await;
            run.fault(scheduled).await;
        }
        // Time to detect losses and free locks after the last fault.
        let end = (begun + plan.duration).max(Instant::now() + plan.lease / 2);
        sleep_until(end).await;
        let left = run.wind_up().await;
        driver.abort();
        if let Some(failure) = run.network.failure() {
            return Err(failure);
        }
        let mut history = lock(&run.history);
        history.end = now(begun);
        history.awaits_replicas = plan.topology != Topology::Single && plan.sync != Sync::Off;
        let tallies = run.records.tallies();
        let mut violations = checker::check(&history, plan.losses(), &tallies);
        if plan.is_gentle() {
            violations.extend(checker::left_waiting(&history, plan.latency * PROMPT));
            violations.extend(checker::overtaken(&history, plan.latency * JOINS));
        }
        violations.extend(linearizability::check(&history));
        violations.extend(left);
        let found = violations.len();
        violations.retain(|violation| checker::explain(violation, &history).is_none());
        let explained = found - violations.len();
        for violation in &violations {
            let text = format!("VIOLATION {violation}");
            run.network.note(&text, || text.clone());
        }
        let (hash, trace) = run.network.take_trace();
        Ok(Outcome {
            violations,
            explained,
            entered: history.entered(),
            simulated: begun.elapsed(),
            hash,
            trace,
        })
    }

    /// Starts the process with this index.
    pub(crate) fn start(&mut self, place: usize) -> Arc<Process> {
        let plan = self.plan;
        let number = self.started;
        self.started += 1;
        let seed = plan.seed.wrapping_mul(7919).wrapping_add(number as u64);
        let process = Process::start(number, seed, &self.network);
        let mut worker = Worker::of(plan.lease, plan.tasks, plan.names.clone(), seed);
        worker.url = self.site.url();
        worker.sync = plan.sync;
        worker.owners = plan.owners;
        worker.clients = plan.clients;
        worker.few = plan.few.clone();
        worker.held = plan.held;
        worker.inside = u64::try_from(plan.inside.as_millis()).unwrap_or(u64::MAX);
        worker.client_id = plan.chosen_ids.then(|| format!("chosen-{place}"));
        let ear = Arc::new(Listener {
            process: number,
            begun: self.begun,
            history: self.history.clone(),
            network: self.network.clone(),
            look_interval: plan.look_interval,
        });
        let (records, ending) = (self.records.clone(), self.ending.clone());
        let work = work(process.clone(), worker, ear, records, ending);
        process.spawn(work);
        process
    }

    /// Ends all processes, and checks whether anything is left.
    async fn wind_up(&mut self) -> Vec<Violation> {
        let mut found = Vec::new();
        self.ending.store(true, Ordering::Relaxed);
        let limit = self.plan.lease * 30 + Duration::from_secs(30);
        let end = Instant::now() + limit;
        while !self.is_done() && Instant::now() < end {
            sleep(Duration::from_millis(50)).await;
        }
        if !self.is_done() {
            let text = format!("the processes did not finish within {limit:?}");
            found.push(self.violation(Rule::Hang, text));
        }
        found.extend(self.visit().await);
        let (lease, network) = (self.plan.lease, self.network.clone());
        let keys = |site: &Site| {
            let mut keys = site.at_masters(Server::keys);
            keys.retain(|key| !checker::may_remain(key));
            keys
        };
        for key in self.left_over(keys, lease + checker::MARGIN).await {
            found.push(self.violation(Rule::LeftOver, format!("remaining key {key}")));
        }
        let channels = |site: &Site| site.at_masters(|server, _| server.channels());
        for channel in self.left_over(channels, checker::MARGIN).await {
            found.push(self.violation(
                Rule::LeftOver,
                format!("remaining subscription to {channel}"),
            ));
        }
        for process in &self.processes {
            process.kill();
        }
        let hosts = self.site.all_hosts();
        let connections = |_: &Site| {
            let count = |host| network.with_server(host, |server, _| server.connections());
            let counts = hosts.iter().map(|host| (host, count(*host).unwrap_or(0)));
            let left = counts.filter(|(_, count)| *count > 0);
            left.map(|(host, count)| format!("{count} at {}", network.address(*host).0))
                .collect()
        };
        for text in self.left_over(connections, checker::MARGIN).await {
            found.push(self.violation(Rule::LeftOver, format!("remaining connections: {text}")));
        }
        found
    }

    /// Polls until nothing is left or the limit has passed. Returns the rest.
    async fn left_over(&self, look: impl Fn(&Site) -> Vec<String>, limit: Duration) -> Vec<String> {
        let end = Instant::now() + limit;
        loop {
            let left = look(&self.site);
            if left.is_empty() || Instant::now() > end {
                return left;
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    fn is_done(&self) -> bool {
        let history = lock(&self.history);
        self.processes.iter().all(|process| {
            let process = history.processes.get(&process.id());
            process.is_some_and(|process| process.done)
        })
    }

    /// Sets the permits that the store has lost, as an operator would.
    pub(crate) async fn set_permits(&mut self) {
        let operator = Process::start(self.started, self.plan.seed ^ 2, &self.network);
        self.started += 1;
        let (url, names) = (self.site.url(), self.plan.all_names());
        let limit = self.plan.lease;
        let setting = operator.spawn(async move { set_permits(&url, &names, limit).await });
        // If it fails, the requests that wait for permits show it.
        let _ = setting.await;
        operator.kill();
    }

    /// Acquires and releases every lock with a last client. Returns a violation for each that it cannot acquire.
    async fn visit(&mut self) -> Vec<Violation> {
        let visitor = Process::start(self.started, self.plan.seed ^ 1, &self.network);
        let (url, mut names) = (self.site.url(), self.plan.all_names());
        names.retain(|name| !checker::may_lack_permits(&lock(&self.history), name));
        // If nothing is lost, everything has been released: no client waits for the end of a lease.
        let limit = match self.plan.is_gentle() {
            true => self.plan.latency * PROMPT,
            false => self.plan.lease + checker::MARGIN,
        };
        let lease = self.plan.lease;
        let visiting = visitor.spawn(async move { visit(&url, &names, lease, limit).await });
        let kept = match visiting.await {
            Ok(Ok(kept)) => kept,
            Ok(Err(error)) => vec![error.to_string()],
            Err(error) => vec![error.to_string()],
        };
        let text = |name| format!("cannot be acquired: {name}");
        let kept = kept.into_iter().map(text);
        kept.map(|text| self.violation(Rule::LeftOver, text))
            .collect()
    }

    /// Returns the current time of the history.
    pub(crate) fn now(&self) -> Time {
        now(self.begun)
    }

    fn violation(&self, rule: Rule, text: String) -> Violation {
        Violation::at(self.now(), rule, text)
    }
}

/// Runs the tasks of a process.
async fn work(
    process: Arc<Process>,
    worker: Worker,
    ear: Arc<Listener>,
    records: Arc<Records>,
    ending: Arc<AtomicBool>,
) {
    let teller = Teller::new(ear);
    let mut clients = Vec::new();
    for number in 0..worker.clients {
        clients.push(worker.connect(number).await);
    }
    teller.tell(What::Ready);
    let crew = Crew {
        owners: (0..worker.owners).map(|_| Owner::new()).collect(),
        worker: Arc::new(worker),
        clients: clients.clone(),
        teller: teller.clone(),
        resource: Reach::Here(records),
        ending,
    };
    let mut tasks = JoinSet::new();
    for life in crew.lives().unwrap_or_default() {
        tasks.spawn(Inside::new(Some(process.clone()), life));
    }
    while tasks.join_next().await.is_some() {}
    for (number, client) in clients.iter().enumerate() {
        tell_left(&teller, number, || client.status()).await;
    }
    teller.tell(What::Done);
}

/// Records the events of the tasks of a process.
#[derive(Debug)]
struct Listener {
    process: ProcessId,
    begun: Instant,
    history: Arc<Mutex<History>>,
    network: Network,
    look_interval: Duration,
}

impl Ear for Listener {
    fn now(&self) -> Time {
        now(self.begun)
    }

    fn look_interval(&self) -> Duration {
        self.look_interval
    }

    fn is_exact(&self) -> bool {
        true
    }

    fn hear(&self, event: Event) {
        if !matches!(event.2, What::Valid { .. }) {
            let (Event(_, section, what), process) = (&event, self.process);
            self.network.note((process, section, what), || {
                format!("process {process} section {section}: {what:?}")
            });
        }
        lock(&self.history).take(self.process, event);
    }
}

fn now(begun: Instant) -> Time {
    nanos(begun.elapsed())
}

pub(crate) fn lock(history: &Mutex<History>) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}
