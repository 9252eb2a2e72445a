//! One run of a plan: the real clients at work while faults come and go, and the check of what became of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redlatch::{Client, ClientStatus, Owner};
use redlatch_robustness::checker::{self, Losses, Rule, Violation};
use redlatch_robustness::clock::{Time, nanos};
use redlatch_robustness::history::{DataLost, Event, Forgetting, History, What, Window};
use redlatch_robustness::resource::{Reach, Records};
use redlatch_robustness::worker::{Crew, Ear, Handle, Teller, Worker};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::network::{Direction, HostId, Network, ProcessId};
use crate::plan::{Fault, Plan, Scheduled};
use crate::process::Process;
use crate::server::Server;
use crate::trace::Trace;

const NAME: &str = "redis-0";
const PORT: u16 = 6379;

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Violations that no documented limit explains.
    pub violations: Vec<Violation>,
    /// How many critical sections were entered.
    pub entered: usize,
    /// How much time went by.
    pub simulated: Duration,
    /// The same for the same seed.
    pub hash: u64,
    /// What happened, if it was to be kept.
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

struct Run<'a> {
    plan: &'a Plan,
    network: Network,
    host: HostId,
    begun: Instant,
    history: Arc<Mutex<History>>,
    records: Arc<Records>,
    ending: Arc<AtomicBool>,
    /// Those that run, by the number of the place that they have.
    processes: Vec<Arc<Process>>,
    started: usize,
}

impl Run<'_> {
    async fn of(plan: &Plan, keeps_trace: bool) -> Result<Outcome, String> {
        let begun = Instant::now();
        let network = Network::new(plan.seed, plan.latency, Trace::new(keeps_trace));
        let host = network.add_server(NAME, PORT);
        let driver = tokio::spawn(network.clone().run());
        let mut run = Run {
            plan,
            host,
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
        sleep_until(begun + plan.duration).await;
        let left = run.wind_up().await;
        driver.abort();
        if let Some(failure) = run.network.failure() {
            return Err(failure);
        }
        let mut history = lock(&run.history);
        history.end = now(begun);
        let losses = match plan.faults.is_empty() {
            true => Losses::None,
            false => Losses::Some,
        };
        let mut violations = checker::check(&history, losses, &run.records.tallies());
        violations.extend(left);
        violations.retain(|violation| checker::explain(violation, &history).is_none());
        for violation in &violations {
            run.network.note(|| format!("VIOLATION {violation}"));
        }
        let (hash, trace) = run.network.take_trace();
        Ok(Outcome {
            violations,
            entered: history.entered(),
            simulated: begun.elapsed(),
            hash,
            trace,
        })
    }

    /// Starts the process of a place.
    fn start(&mut self, place: usize) -> Arc<Process> {
        let plan = self.plan;
        let number = self.started;
        self.started += 1;
        let seed = plan.seed.wrapping_mul(7919).wrapping_add(number as u64);
        let process = Process::start(number, seed, &self.network);
        let mut worker = Worker::of(plan.lease, plan.tasks, plan.names.clone(), seed);
        worker.owners = plan.owners;
        worker.clients = plan.clients;
        worker.few = plan.few.clone();
        worker.inside = u64::try_from(plan.inside.as_millis()).unwrap_or(u64::MAX);
        worker.client_id = plan.chosen_ids.then(|| format!("chosen-{place}"));
        let ear = Arc::new(Listener {
            process: number,
            begun: self.begun,
            history: self.history.clone(),
            network: self.network.clone(),
        });
        let (records, ending) = (self.records.clone(), self.ending.clone());
        let work = work(process.clone(), worker, ear, records, ending);
        process.spawn(work);
        process
    }

    async fn fault(&mut self, scheduled: &Scheduled) {
        let Scheduled { until, fault, .. } = scheduled;
        let (network, host) = (self.network.clone(), self.host);
        network.note(|| format!("FAULT {fault:?} until {:.3} s", until.as_secs_f64()));
        let from = now(self.begun);
        let until = sleep_until(self.begun + *until);
        match *fault {
            Fault::Slow => {
                network.set_latency(self.plan.latency * 8);
                until.await;
                network.set_latency(self.plan.latency);
            }
            Fault::Cut(place, direction) => {
                let process = self.processes[place].id();
                let directions = match direction {
                    Some(direction) => vec![direction],
                    None => vec![Direction::Up, Direction::Down],
                };
                for direction in &directions {
                    network.set_cut(process, host, *direction, true);
                }
                until.await;
                for direction in &directions {
                    network.set_cut(process, host, *direction, false);
                }
            }
            Fault::Reset(place) => network.reset(self.processes[place].id(), host),
            Fault::Freeze => {
                network.set_frozen(host, true);
                until.await;
                network.set_frozen(host, false);
            }
            Fault::Restart | Fault::RestartEmpty => {
                let before = network.kill_server(host);
                until.await;
                let keeps = *fault == Fault::Restart;
                let before = before.as_ref().filter(|_| keeps);
                network.start_server(host, before.map(Server::snapshot));
                if !keeps {
                    self.data_lost(from, true, "a server that starts without its data");
                }
            }
            Fault::ForgetScripts => {
                network.with_server(host, |server, _| server.forget_scripts());
            }
            Fault::StepClock(by) => {
                network.step_clock(host, by);
                self.data_lost(
                    from,
                    false,
                    "a step of the server's clock ends leases early",
                );
            }
            Fault::Stop(place) => {
                let process = self.processes[place].clone();
                process.stop();
                until.await;
                lock(&self.history)
                    .processes
                    .entry(process.id())
                    .or_default()
                    .stopped
                    .push((from, Some(now(self.begun))));
                process.go_on();
            }
            Fault::Kill(place) => {
                let id = self.processes[place].id();
                self.processes[place].kill();
                lock(&self.history).processes.entry(id).or_default().killed = Some(from);
                until.await;
                self.processes[place] = self.start(place);
            }
        }
        let cut = matches!(fault, Fault::Freeze | Fault::Restart | Fault::RestartEmpty);
        let until = now(self.begun);
        lock(&self.history)
            .windows
            .push(Window { from, until, cut });
    }

    fn data_lost(&self, from: Time, tokens: bool, why: &'static str) {
        let until = now(self.begun);
        let forgetting = Forgetting { tokens, why };
        lock(&self.history).data_lost.push(DataLost {
            from,
            until,
            forgetting,
        });
    }

    /// Brings everything to an end, and looks whether anything is left.
    async fn wind_up(&mut self) -> Vec<Violation> {
        let mut found = Vec::new();
        self.ending.store(true, Ordering::Relaxed);
        let limit = self.plan.lease * 30 + Duration::from_secs(30);
        let is_done = |run: &Run<'_>| {
            let history = lock(&run.history);
            let done = |one: &Arc<Process>| {
                history
                    .processes
                    .get(&one.id())
                    .is_some_and(|process| process.done)
            };
            run.processes.iter().all(done)
        };
        let end = Instant::now() + limit;
        while !is_done(self) && Instant::now() < end {
            sleep(Duration::from_millis(50)).await;
        }
        if !is_done(self) {
            let text = format!("the processes have not come to an end within {limit:?}");
            found.push(self.violation(Rule::Hang, text));
        }
        found.extend(self.visit().await);
        let keys = self.network.with_server(self.host, Server::keys);
        for key in keys.into_iter().flatten() {
            let key = String::from_utf8_lossy(&key).into_owned();
            let stays = ["redisson_lock_token:", "permits:"];
            if !stays.iter().any(|prefix| key.starts_with(prefix)) {
                found.push(self.violation(Rule::LeftOver, format!("the key {key}")));
            }
        }
        found
    }

    /// A visitor takes every lock once. Returns those that it could not have.
    async fn visit(&mut self) -> Vec<Violation> {
        let visitor = Process::start(self.started, self.plan.seed ^ 1, &self.network);
        let names: Vec<String> = self
            .plan
            .names
            .iter()
            .chain(&self.plan.few)
            .cloned()
            .collect();
        let lease = self.plan.lease;
        let limit = lease * 2 + checker::MARGIN + checker::GRACE;
        let visiting = visitor.spawn(async move {
            let client = Client::connect(&url()).await.map_err(|e| e.to_string())?;
            let end = Instant::now() + limit;
            let mut kept = Vec::new();
            for name in names {
                let handle = Handle::new(&client, &name, lease).map_err(|e| e.to_string())?;
                while !matches!(handle.visit().await, Ok(true)) {
                    if Instant::now() > end {
                        kept.push(name);
                        break;
                    }
                    sleep(Duration::from_millis(20)).await;
                }
            }
            client.settled().await;
            Ok::<_, String>(kept)
        });
        let kept = match visiting.await {
            Ok(Ok(kept)) => kept,
            Ok(Err(error)) => vec![error],
            Err(error) => vec![error.to_string()],
        };
        let kept = kept
            .into_iter()
            .map(|name| format!("cannot be acquired: {name}"));
        kept.map(|text| self.violation(Rule::LeftOver, text))
            .collect()
    }

    fn violation(&self, rule: Rule, text: String) -> Violation {
        let at = now(self.begun);
        Violation {
            rule,
            from: at,
            until: at,
            text,
        }
    }
}

/// The work of a process.
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
        clients.push(loop {
            match worker.builder(number).connect(&url()).await {
                Ok(client) => break client,
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        });
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
        tasks.spawn(redlatch::simulation::Inside::new(
            Some(process.clone()),
            life,
        ));
    }
    while tasks.join_next().await.is_some() {}
    for (number, client) in clients.iter().enumerate() {
        client.settled().await;
        let end = Instant::now() + Duration::from_secs(1);
        while client.status() != ClientStatus::default() && Instant::now() < end {
            sleep(Duration::from_millis(20)).await;
        }
        if client.status() != ClientStatus::default() {
            teller.tell(What::Left {
                client: number,
                status: format!("{:?}", client.status()),
            });
        }
    }
    teller.tell(What::Done);
}

/// Takes down what the tasks of a process tell.
#[derive(Debug)]
struct Listener {
    process: ProcessId,
    begun: Instant,
    history: Arc<Mutex<History>>,
    network: Network,
}

impl Ear for Listener {
    fn now(&self) -> Time {
        now(self.begun)
    }

    fn hear(&self, event: Event) {
        if !matches!(event.2, What::Valid { .. }) {
            let Event(_, section, what) = &event;
            self.network
                .note(|| format!("process {} section {section}: {what:?}", self.process));
        }
        lock(&self.history).take(self.process, event);
    }
}

fn url() -> String {
    format!("redis://{NAME}:{PORT}")
}

fn now(begun: Instant) -> Time {
    nanos(begun.elapsed())
}

fn lock(history: &Mutex<History>) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}
