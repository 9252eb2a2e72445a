//! One run of a plan: runs the real clients while faults happen, and checks the history.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use redlatch::Owner;
use redlatch::simulation::Inside;
use redlatch_robustness::checker::{self, Rule, Violation};
use redlatch_robustness::clock::{Time, nanos};
use redlatch_robustness::final_check::{check_all_free, set_permits};
use redlatch_robustness::history::{Event, EventKind, History};
use redlatch_robustness::observers::{ObservedElection, check_observers, observe};
use redlatch_robustness::random::Random;
use redlatch_robustness::resource::{Records, ResourceClient};
use redlatch_robustness::worker::{
    EventSink, Reporter, Sync, TicketBox, Tokens, WorkerOptions, WorkerTasks, report_leftovers,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::deployment::{Deployment, Topology};
use crate::linearizability;
use crate::network::{EPOCH, Network, ProcessId};
use crate::plan::{Plan, PlannedUser};
use crate::process::Process;
use crate::server::{Server, User};
use crate::trace::Trace;

/// Commands that a restricted user may not use.
const UNAVAILABLE: [&str; 4] = ["CLIENT", "INFO", "ROLE", "WAIT"];

/// The longest wait of a request for a free lock, in latencies.
const PROMPT_LATENCIES: u32 = 40;

/// Time after which a request has joined the queue of a fair lock, in latencies. The first request of a process takes 17: it asks
/// the Sentinels, opens a connection, and sends the script again because the server does not know it.
const QUEUE_JOIN_LATENCIES: u32 = 24;

/// How far the clock of a process is ahead of that of the servers, or behind it, at most. The clocks of two processes
/// may differ by half the shortest period of a job.
const CLOCK_SKEW: Duration = Duration::from_millis(200);

/// How late a report or an action may be. Clients run in no time: only the network and their own pauses delay them.
const SIMULATED_MARGIN: Duration = Duration::from_millis(200);

/// How long after its work a run may keep its job busy. The clocks of two processes differ by less.
const JOB_SETTLES: Duration = Duration::from_millis(500);

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Violations that no documented limit explains.
    pub violations: Vec<Violation>,
    /// Number of violations of each rule that a documented limit explains.
    pub explained: BTreeMap<Rule, usize>,
    /// Number of names whose linearizability was not decided within the limit of the search.
    pub abandoned: usize,
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
    runtime.block_on(Run::execute(plan, keeps_trace))
}

pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) network: Network,
    pub(crate) deployment: Deployment,
    pub(crate) begun: Instant,
    /// Random numbers for the faults.
    pub(crate) random: Random,
    pub(crate) history: Arc<Mutex<History>>,
    records: Arc<Records>,
    /// The tickets that the tasks of all processes make and adopt.
    tickets: TicketBox,
    /// The source of the passwords of the processes.
    tokens: Tokens,
    shutdown: Arc<AtomicBool>,
    /// When connections to sentinels broke, or queries failed, again and again. The pauses of clients grow with that.
    pub(crate) sentinels_failed: Option<(Time, Time)>,
    /// The running processes. A process that replaces another one has its index.
    pub(crate) processes: Vec<Arc<Process>>,
    started: usize,
    /// The process that observes all elections, and what it has observed.
    observer: Option<Arc<Process>>,
    elections: Vec<ObservedElection>,
}

impl Run<'_> {
    async fn execute(plan: &Plan, keeps_trace: bool) -> Result<Outcome, String> {
        let begun = Instant::now();
        let network = Network::new(plan.seed, plan.latency, Trace::new(keeps_trace));
        let deployment = Deployment::start(plan.topology, &network);
        let driver = tokio::spawn(network.clone().run());
        let mut history = History::new(plan.lease);
        history.margin = nanos(SIMULATED_MARGIN);
        history.awaits_replicas = match plan.sync {
            Sync::Off => false,
            Sync::One => true,
            // Behind a name, only clients that connected while the master had replicas.
            Sync::All => plan.topology.replicas() > 0 && plan.topology != Topology::Named,
        };
        let mut run = Run {
            plan,
            deployment,
            random: Random::new(plan.seed ^ 0xfa17),
            begun,
            history: Arc::new(Mutex::new(history)),
            records: Arc::default(),
            tickets: TicketBox::default(),
            tokens: Tokens::default(),
            shutdown: Arc::default(),
            sentinels_failed: None,
            processes: Vec::new(),
            started: 0,
            observer: None,
            elections: Vec::new(),
            network,
        };
        if plan.user != PlannedUser::Default {
            run.change_password();
        }
        if plan.lacks_resp3 {
            run.deployment.remove_resp3();
        }
        run.observe_elections();
        for index in 0..plan.processes {
            let process = run.start(index);
            run.processes.push(process);
        }
        for scheduled in &plan.faults {
            sleep_until(begun + scheduled.from).await;
            run.inject(scheduled).await;
        }
        // Time to detect losses and free locks after the last fault.
        let end = (begun + plan.duration).max(Instant::now() + plan.lease / 2);
        sleep_until(end).await;
        let left = run.shut_down_and_check().await;
        driver.abort();
        if let Some(failure) = run.network.failure() {
            return Err(failure);
        }
        let mut history = lock(&run.history);
        history.end = now(begun);
        let connected = run.network.take_connected().into_iter();
        history.connected = connected.map(nanos).collect();
        let tallies = run.records.tallies();
        let mut violations = checker::check(&history, plan.losses(), &tallies);
        violations.extend(checker::check_slots(&history, JOB_SETTLES));
        if plan.has_only_minor_faults() {
            violations.extend(checker::check_promptness(
                &history,
                plan.latency * PROMPT_LATENCIES,
            ));
            violations.extend(checker::check_order(
                &history,
                plan.latency * QUEUE_JOIN_LATENCIES,
            ));
        }
        let (unexplained, abandoned) = linearizability::check(&history);
        violations.extend(unexplained);
        violations.extend(left);
        let mut explained = BTreeMap::new();
        violations.retain(|violation| {
            let is_explained = checker::explain(violation, &history).is_some();
            if is_explained {
                *explained.entry(violation.rule).or_default() += 1;
            }
            !is_explained
        });
        for violation in &violations {
            let text = format!("VIOLATION {violation}");
            run.network.note(&text, || text.clone());
        }
        let (hash, trace) = run.network.take_trace();
        Ok(Outcome {
            violations,
            explained,
            abandoned,
            entered: history.entered(),
            simulated: begun.elapsed(),
            hash,
            trace,
        })
    }

    /// Changes the password of the processes.
    pub(crate) fn change_password(&mut self) {
        let mut user = User::unrestricted(Some(&self.tokens.change()));
        if self.plan.user == PlannedUser::Restricted {
            user.denied = UNAVAILABLE.map(str::to_owned).into();
        }
        self.deployment.set_user(user);
    }

    /// Starts the process that observes the elections, if there are any.
    fn observe_elections(&mut self) {
        let names = self.plan.names.iter();
        for name in names.filter(|name| name.starts_with("election")) {
            let process = self.observer.get_or_insert_with(|| {
                self.started += 1;
                Process::start(self.started - 1, self.plan.seed ^ 3, &self.network)
            });
            let (election, observing) =
                observe(self.deployment.url(), name.clone(), self.history.clone());
            process.spawn(observing);
            self.elections.push(election);
        }
    }

    /// Starts the process with this index.
    pub(crate) fn start(&mut self, index: usize) -> Arc<Process> {
        let plan = self.plan;
        let number = self.started;
        self.started += 1;
        let seed = plan.seed.wrapping_mul(7919).wrapping_add(number as u64);
        let process = Process::start(number, seed, &self.network);
        if plan.shuffles_tasks {
            process.shuffle_tasks(seed);
        }
        let mut worker = WorkerOptions::new(plan.lease, plan.tasks, plan.names.clone(), seed);
        worker.url = self.deployment.url();
        worker.sync = plan.sync;
        worker.uses_tickets = plan.uses_tickets;
        worker.uses_limits = plan.uses_limits;
        let has_password = plan.user != PlannedUser::Default;
        worker.tokens = has_password.then(|| self.tokens.clone());
        worker.owners = plan.owners;
        worker.clients = plan.clients;
        worker.contended_names = plan.contended_names.clone();
        worker.jobs = plan.jobs.clone();
        worker.permanent_locks = plan.permanent_locks;
        worker.flood = if index == 0 { plan.flood } else { 0 };
        worker.max_hold_ms = u64::try_from(plan.max_hold.as_millis()).unwrap_or(u64::MAX);
        worker.client_id = plan.chosen_ids.then(|| format!("chosen-{index}"));
        let sink = Arc::new(EventRecorder {
            process: number,
            begun: self.begun,
            history: self.history.clone(),
            network: self.network.clone(),
            check_interval: plan.check_interval,
            clock: EPOCH - CLOCK_SKEW
                + Random::new(seed ^ 4).between(Duration::ZERO, CLOCK_SKEW * 2),
        });
        let shared = (self.records.clone(), self.tickets.clone());
        let flushes = plan.has_only_minor_faults();
        let shutdown = self.shutdown.clone();
        let running = run_process(process.clone(), worker, sink, shared, shutdown, flushes);
        process.spawn(running);
        process
    }

    /// Ends all processes, and checks whether anything is left.
    async fn shut_down_and_check(&mut self) -> Vec<Violation> {
        let mut found = Vec::new();
        self.shutdown.store(true, Ordering::Relaxed);
        let limit = self.plan.lease * 30 + Duration::from_secs(30);
        let end = Instant::now() + limit;
        while !self.is_done() && Instant::now() < end {
            sleep(Duration::from_millis(50)).await;
        }
        if !self.is_done() {
            let text = format!("the processes did not finish within {limit:?}");
            found.push(self.violation(Rule::Hang, text));
        }
        found.extend(self.final_check().await);
        if let Some(observer) = self.observer.take() {
            observer.kill();
        }
        let (lease, network) = (self.plan.lease, self.network.clone());
        let keys = |deployment: &Deployment| {
            let mut keys = deployment.at_masters(Server::keys);
            keys.retain(|key| !checker::may_remain(key));
            keys
        };
        for key in self.leftovers(keys, lease + checker::MARGIN).await {
            found.push(self.violation(Rule::NotCleanedUp, format!("remaining key {key}")));
        }
        let channels =
            |deployment: &Deployment| deployment.at_masters(|server, _| server.channels());
        for channel in self.leftovers(channels, checker::MARGIN).await {
            found.push(self.violation(
                Rule::NotCleanedUp,
                format!("remaining subscription to {channel}"),
            ));
        }
        for process in &self.processes {
            process.kill();
        }
        let hosts = self.deployment.all_hosts();
        let connections = |_: &Deployment| {
            let count = |host| network.with_server(host, |server, _| server.connections());
            let counts = hosts.iter().map(|host| (host, count(*host).unwrap_or(0)));
            let left = counts.filter(|(_, count)| *count > 0);
            left.map(|(host, count)| format!("{count} at {}", network.address(*host).0))
                .collect()
        };
        for text in self.leftovers(connections, checker::MARGIN).await {
            found
                .push(self.violation(Rule::NotCleanedUp, format!("remaining connections: {text}")));
        }
        found
    }

    /// Waits until `find` finds nothing, at most until the limit. Returns what it finds then.
    async fn leftovers(
        &self,
        find: impl Fn(&Deployment) -> Vec<String>,
        limit: Duration,
    ) -> Vec<String> {
        let end = Instant::now() + limit;
        loop {
            let left = find(&self.deployment);
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
        let (url, names) = (self.deployment.url(), self.plan.all_names());
        let limit = self.plan.lease;
        let setting = operator.spawn(async move { set_permits(&url, &names, limit).await });
        // If it fails, requests for permits wait too long, and the checks report that.
        let _ = setting.await;
        operator.kill();
    }

    /// Acquires and releases every lock with a new client. Returns a violation for each that it cannot acquire.
    async fn final_check(&mut self) -> Vec<Violation> {
        let process = Process::start(self.started, self.plan.seed ^ 1, &self.network);
        let (url, mut names) = (self.deployment.url(), self.plan.all_names());
        names.retain(|name| !checker::may_lack_permits(&lock(&self.history), name));
        // If nothing is lost, everything has been released: no client waits for the end of a lease,
        // except for that of a ticket, or for that of a minimum time.
        let has_tickets = lock(&self.history).has_unused_tickets(self.now());
        let limit = match self.plan.has_only_minor_faults() && !has_tickets {
            true => self.plan.latency * PROMPT_LATENCIES,
            false => self.plan.lease + checker::MARGIN,
        };
        let lease = self.plan.lease;
        let mut elections = std::mem::take(&mut self.elections);
        let checking = process.spawn(async move {
            let kept = check_all_free(&url, &names, lease, limit).await?;
            let text = |name| (Rule::NotCleanedUp, format!("cannot be acquired: {name}"));
            let mut failures: Vec<_> = kept.into_iter().map(text).collect();
            if failures.is_empty() {
                failures = check_observers(&url, &mut elections, limit).await?;
            }
            Ok::<_, redlatch_robustness::Error>(failures)
        });
        let failures = match checking.await {
            Ok(Ok(failures)) => failures,
            Ok(Err(error)) => vec![(Rule::NotCleanedUp, error.to_string())],
            Err(error) => vec![(Rule::NotCleanedUp, error.to_string())],
        };
        let failures = failures.into_iter();
        failures
            .map(|(rule, text)| self.violation(rule, text))
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

/// Runs the tasks of a process. `flushes`: nothing prevents the clients from settling everything.
async fn run_process(
    process: Arc<Process>,
    worker: WorkerOptions,
    sink: Arc<EventRecorder>,
    (records, tickets): (Arc<Records>, TicketBox),
    shutdown: Arc<AtomicBool>,
    flushes: bool,
) {
    let reporter = Reporter::new(sink);
    let mut clients = Vec::new();
    for number in 0..worker.clients {
        clients.push(worker.connect(number).await);
    }
    reporter.report(EventKind::Ready);
    let worker_tasks = WorkerTasks {
        owners: (0..worker.owners).map(|_| Owner::new()).collect(),
        worker: Arc::new(worker),
        clients: clients.clone(),
        reporter: reporter.clone(),
        resource: ResourceClient::Local(records),
        tickets,
        shutdown,
    };
    let mut tasks = JoinSet::new();
    for task in worker_tasks.task_futures().unwrap_or_default() {
        tasks.spawn(Inside::new(Some(process.clone()), task));
    }
    while tasks.join_next().await.is_some() {}
    for (number, client) in clients.iter().enumerate() {
        if flushes {
            // The background also counts checks, for which no flush waits.
            let unsettled = client.flush_within(Duration::MAX).await;
            let holds = client.status().holds;
            if !unsettled.is_empty() || holds > 0 {
                let status = format!("{holds} holds, not settled after a flush: {unsettled}");
                let client = number;
                reporter.report(EventKind::Leftover { client, status });
            }
        }
        report_leftovers(&reporter, number, || client.status()).await;
    }
    reporter.report(EventKind::Done);
}

/// Records the events of the tasks of a process.
#[derive(Debug)]
struct EventRecorder {
    process: ProcessId,
    begun: Instant,
    history: Arc<Mutex<History>>,
    network: Network,
    check_interval: Duration,
    /// What the clock of the process showed when the run began.
    clock: Duration,
}

impl EventSink for EventRecorder {
    fn now(&self) -> Time {
        now(self.begun)
    }

    fn date(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.clock + self.begun.elapsed()
    }

    fn check_interval(&self) -> Duration {
        self.check_interval
    }

    fn is_exact(&self) -> bool {
        true
    }

    fn record(&self, event: Event) {
        let mut history = lock(&self.history);
        let of = history.processes.get(&self.process);
        if of.is_some_and(|process| process.killed.is_some()) {
            // Work that ends with its runtime.
            return;
        }
        if !matches!(event.2, EventKind::Valid { .. }) {
            let (Event(_, section, what), process) = (&event, self.process);
            self.network.note((process, section, what), || {
                format!("process {process} section {section}: {what:?}")
            });
        }
        history.record(self.process, event);
    }
}

fn now(begun: Instant) -> Time {
    nanos(begun.elapsed())
}

pub(crate) fn lock(history: &Mutex<History>) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}
