//! A client process: its tasks repeatedly acquire locks, stay in critical sections for a while and release the
//! locks, and report every event on standard output.
//!
//! After `end` on standard input the worker starts nothing new, and reports when everything is over. It exits at
//! the end of standard input.

mod flood;
mod jobs;
mod kinds;
mod limits;
mod options;
mod owners;
mod permanent_locks;
mod reporter;
mod section;
mod threads;
mod tickets;
mod tokens;

use std::io::BufRead;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use redlatch::{Client, ClientStatus, Owner, blocking};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::Result;
use crate::history::EventKind;
use crate::names::has_queue;
use crate::resource::ResourceClient;
use crate::stall_monitor;
use jobs::ScheduledJob;
pub use kinds::Handle;
use limits::LimitUse;
pub(crate) use options::LINGER;
use options::wait_to_reconnect;
pub use options::{Sync, WorkerOptions};
use owners::OwnerTask;
use reporter::StdoutSink;
pub use reporter::{EventSink, Reporter};
use section::SectionRunner;
use threads::Thread;
pub use tickets::TicketBox;
use tickets::TicketUse;
pub use tokens::{Tokens, USER};

/// Added to the number of a task, for its random numbers about tickets: no process has so many tasks.
const TICKET_TASKS: usize = 1 << 32;

/// Added for its random numbers about limits.
const LIMIT_TASKS: usize = 1 << 34;

/// Added for the random numbers of jobs.
const JOB_TASKS: usize = 1 << 35;

/// Number of tasks that share an owner.
const TASKS_PER_OWNER: usize = 2;

pub(crate) async fn run(worker: WorkerOptions) -> Result<()> {
    let worker = Arc::new(worker);
    let shutdown = Arc::new(AtomicBool::new(false));
    read_stdin(shutdown.clone());
    let mut clients = Vec::new();
    for number in 0..worker.clients.max(1) {
        clients.push(worker.connect(number).await);
    }
    // Created before all other owners of the process.
    let owners: Vec<Owner> = (0..worker.owners).map(|_| Owner::new()).collect();
    let for_threads = match worker.threads {
        0 => None,
        _ => Some(connect_blocking(&worker, clients.len()).await?),
    };
    let reporter = Reporter::new(Arc::new(StdoutSink));
    let stall_reporter = reporter.clone();
    stall_monitor::start(move |since, until| {
        stall_reporter.report_at(until, 0, EventKind::Stalled { since })
    });
    if worker.permanent_locks == 0 {
        reporter.report(EventKind::Ready);
    }
    let mut tasks = JoinSet::new();
    let worker_tasks = WorkerTasks {
        worker: worker.clone(),
        clients: clients.clone(),
        owners,
        reporter: reporter.clone(),
        resource: ResourceClient::Remote(worker.resource.clone(), None),
        tickets: TicketBox::default(),
        shutdown: shutdown.clone(),
    };
    for task in worker_tasks.task_futures()? {
        tasks.spawn(task);
    }
    let threads = for_threads.as_ref();
    let threads =
        threads.map(|client| spawn_threads(&worker, client, &clients, &reporter, &shutdown));
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    for thread in threads.into_iter().flatten() {
        while !thread.is_finished() {
            sleep(Duration::from_millis(5)).await;
        }
        thread.join().map_err(|_| "a thread panicked")??;
    }
    let statuses = clients
        .iter()
        .map(|client| -> Status { Box::new(|| client.status()) });
    let blocking = for_threads.iter();
    let statuses =
        statuses.chain(blocking.map(|client| -> Status { Box::new(|| client.status()) }));
    for (number, status) in statuses.enumerate() {
        report_leftovers(&reporter, number, status).await;
    }
    reporter.report(EventKind::Done);
    // A lock that is renewed now has no holder: the store is checked while the clients still run.
    std::future::pending().await
}

/// State that a client tracks.
type Status<'a> = Box<dyn Fn() -> ClientStatus + 'a>;

/// Waits until a client has finished its background work and its last subscription has lingered (a little longer
/// on an overloaded machine), and reports what remains.
pub async fn report_leftovers(
    reporter: &Reporter,
    client: usize,
    status: impl Fn() -> ClientStatus,
) {
    let end = Instant::now() + LINGER + Duration::from_secs(5);
    while !status().is_idle() && Instant::now() < end {
        sleep(Duration::from_millis(20)).await;
    }
    if !status().is_idle() {
        let status = format!("{:?}", status());
        reporter.report(EventKind::Leftover { client, status });
    }
}

/// The tasks of a process, and the state that they share.
pub struct WorkerTasks {
    pub worker: Arc<WorkerOptions>,
    pub clients: Vec<Client>,
    /// Owners that several tasks share.
    pub owners: Vec<Owner>,
    pub reporter: Reporter,
    pub resource: ResourceClient,
    /// The tickets that these tasks make and adopt.
    pub tickets: TicketBox,
    /// If set, tasks start nothing new.
    pub shutdown: Arc<AtomicBool>,
}

/// The future of one task.
pub type TaskFuture = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

impl WorkerTasks {
    /// Returns all tasks, to be spawned separately.
    pub fn task_futures(&self) -> Result<Vec<TaskFuture>> {
        let worker = &self.worker;
        let mut task_futures: Vec<TaskFuture> = Vec::new();
        if worker.permanent_locks > 0 {
            let (reporter, shutdown) = (self.reporter.clone(), self.shutdown.clone());
            let running =
                permanent_locks::run(worker.clone(), self.clients[0].clone(), reporter, shutdown);
            task_futures.push(Box::pin(async move {
                running.await;
                Ok(())
            }));
        }
        if worker.flood > 0 {
            let (client, reporter) = (self.clients[0].clone(), self.reporter.clone());
            let running = flood::run(worker.clone(), client, reporter, self.shutdown.clone());
            task_futures.push(Box::pin(async move {
                running.await;
                Ok(())
            }));
        }
        for (number, name) in worker.jobs.iter().enumerate() {
            let client = number % self.clients.len();
            let job = ScheduledJob {
                name: name.clone(),
                task: JOB_TASKS + number,
                client: (client, self.clients[client].clone()),
                reporter: self.reporter.clone(),
                worker: worker.clone(),
                shutdown: self.shutdown.clone(),
            };
            task_futures.push(Box::pin(job.run()));
        }
        for task in 0..worker.tasks {
            let client = task % self.clients.len();
            // From the last task, so that most fair tasks do not hold their locks for long.
            let is_fair = worker.tasks - task <= worker.fair;
            let handles = worker.names.iter();
            let handles = handles.filter(|name| is_fair || !has_queue(name));
            let lease = worker.lease();
            let handles = handles.map(|name| Handle::new(&self.clients[client], name, lease));
            let handles = handles.collect::<Result<Vec<_>>>()?;
            let runner = self.section_runner(task, client);
            let running =
                run_lock_task(worker.clone(), task, handles, runner, self.shutdown.clone());
            task_futures.push(Box::pin(async move {
                running.await;
                Ok(())
            }));
        }
        let names = worker
            .contended_names
            .iter()
            .filter(|name| !name.starts_with("red:"));
        let names: Vec<String> = names.cloned().collect();
        for (number, &owner) in self.owners.iter().enumerate() {
            let client = number % self.clients.len();
            for of_owner in 0..TASKS_PER_OWNER {
                let number = worker.tasks + number * TASKS_PER_OWNER + of_owner;
                let task = OwnerTask {
                    owner,
                    client: self.clients[client].clone(),
                    names: names.clone(),
                    lease: worker.lease(),
                    runner: self.section_runner(number, client).for_owner(owner),
                    random: worker.random(number),
                };
                let shutdown = self.shutdown.clone();
                task_futures.push(Box::pin(async move { task.run(&shutdown).await }));
            }
        }
        Ok(task_futures)
    }

    fn section_runner(&self, task: usize, client: usize) -> SectionRunner {
        let (reporter, resource) = (self.reporter.clone(), self.resource.clone());
        let ticket_use = self.worker.uses_tickets.then(|| TicketUse {
            tickets: self.tickets.clone(),
            random: self.worker.random(task + TICKET_TASKS),
            lease: self.worker.lease(),
        });
        let limit_use = self.worker.uses_limits.then(|| LimitUse {
            client: self.clients[client].clone(),
            random: self.worker.random(task + LIMIT_TASKS),
            lease: self.worker.lease(),
        });
        let shutdown = self.shutdown.clone();
        SectionRunner::new(
            task, client, reporter, resource, shutdown, ticket_use, limit_use,
        )
    }
}

/// Starts the threads of the blocking client, whose number follows those of the others.
fn spawn_threads(
    worker: &Arc<WorkerOptions>,
    client: &blocking::Client,
    others: &[Client],
    reporter: &Reporter,
    shutdown: &Arc<AtomicBool>,
) -> Vec<JoinHandle<Result<()>>> {
    let spawn = |number| {
        let number = worker.tasks + worker.owners * TASKS_PER_OWNER + number;
        let thread = Thread {
            number,
            client: client.clone(),
            client_number: others.len(),
            names: worker.contended_names.clone(),
            lease: worker.lease(),
            reporter: reporter.clone(),
            random: worker.random(number),
        };
        let shutdown = shutdown.clone();
        std::thread::spawn(move || thread.run(&shutdown))
    };
    (0..worker.threads).map(spawn).collect()
}

/// Runs one task.
async fn run_lock_task(
    worker: Arc<WorkerOptions>,
    task: usize,
    handles: Vec<Handle>,
    mut runner: SectionRunner,
    shutdown: Arc<AtomicBool>,
) {
    let mut random = worker.random(task);
    let lease = worker.lease();
    let holds_long = task < worker.long_holders;
    let (least, most) = if holds_long {
        // Long enough to be renewed, and to be affected by faults.
        (lease / 2, lease * 3)
    } else {
        (Duration::ZERO, Duration::from_millis(worker.max_hold_ms))
    };
    while !shutdown.load(Ordering::Relaxed) {
        // Tasks that hold locks for long use the first half of the names; of the others only every second uses
        // that half, too. Else all tasks would soon wait for the long ones, and nothing would progress.
        let half = handles.len().div_ceil(2);
        let queues = task % 2 == 1 && random.below(8) == 0;
        let at = match holds_long || queues {
            true => random.below(half),
            // A single name has no second half.
            false => (half + random.below(handles.len() - half)).min(handles.len() - 1),
        };
        let handle = &handles[at];
        let time = random.between(least, most);
        if handle
            .run_section(&mut runner, time, &mut random)
            .await
            .is_err()
        {
            // The error was reported; a pause avoids a busy loop.
            sleep(Duration::from_millis(20)).await;
        }
        let rest = if holds_long { lease / 6 } else { most / 2 };
        sleep(random.between(Duration::ZERO, rest)).await;
    }
}

/// Connects the client of the threads, as [`WorkerOptions::connect`] does.
async fn connect_blocking(worker: &Arc<WorkerOptions>, number: usize) -> Result<blocking::Client> {
    loop {
        let worker = worker.clone();
        let connect = move || blocking::Client::with(worker.builder(number), &worker.url);
        match tokio::task::spawn_blocking(connect).await? {
            Ok(client) => return Ok(client),
            Err(error) => wait_to_reconnect(&error).await,
        }
    }
}

fn read_stdin(shutdown: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            if line == "end" {
                shutdown.store(true, Ordering::Relaxed);
            }
        }
        std::process::exit(0);
    });
}
