//! A client process: its tasks take locks, stay inside for a while and give them back, again and
//! again, and tell on standard output what becomes of them.
//!
//! `end` on standard input: begin nothing new, and say when everything is over. The end of standard
//! input is the end of the process.

mod kinds;
mod section;
mod tell;

use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use redlatch::{Client, ReplicaSync};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::Result;
use crate::history::What;
use crate::pulse;
use crate::random::Random;
pub(crate) use kinds::{Handle, KINDS};
use section::Inside;
use tell::Teller;

/// How long a subscription outlives its last waiter.
const LINGER: Duration = Duration::from_millis(200);

/// What a worker is told when it is started.
#[derive(Debug, Clone, Args)]
pub(crate) struct Worker {
    #[arg(long)]
    pub(crate) url: String,
    /// Where the resource is.
    #[arg(long)]
    pub(crate) resource: String,
    /// How many tasks want locks.
    #[arg(long)]
    pub(crate) tasks: usize,
    /// How many of them stay inside for long.
    #[arg(long)]
    pub(crate) sitters: usize,
    /// How many of them take fair locks. When they all die, those behind them wait for each.
    #[arg(long)]
    pub(crate) fair: usize,
    /// Clients that they share.
    #[arg(long)]
    pub(crate) clients: usize,
    /// The names, `kind:number` each, with commas between.
    #[arg(long, value_delimiter = ',')]
    pub(crate) names: Vec<String>,
    /// The watchdog's lease in ms.
    #[arg(long)]
    pub(crate) lease: u64,
    /// The response timeout in ms.
    #[arg(long)]
    pub(crate) timeout: u64,
    /// How long the others stay inside at most, in ms.
    #[arg(long)]
    pub(crate) inside: u64,
    #[arg(long)]
    pub(crate) sync: Sync,
    #[arg(long)]
    pub(crate) seed: u64,
}

/// How many replicas must have an acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sync {
    /// One of those that are connected, if any are: what clients do if nothing else is said.
    All,
    /// One.
    One,
    /// None.
    Off,
}

impl Sync {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Sync::All => "all",
            Sync::One => "one",
            Sync::Off => "off",
        }
    }

    fn replicas(self) -> ReplicaSync {
        match self {
            Sync::All => ReplicaSync::All,
            Sync::One => ReplicaSync::AtLeast(1),
            Sync::Off => ReplicaSync::Off,
        }
    }
}

impl Worker {
    /// With tasks that stay inside for a moment, but for every fourth.
    pub(crate) fn of(lease: Duration, tasks: usize, names: Vec<String>, seed: u64) -> Worker {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Worker {
            url: String::new(),
            resource: String::new(),
            tasks,
            sitters: tasks / 4,
            fair: tasks,
            clients: 2,
            names,
            lease: millis(lease),
            timeout: millis(lease / 3),
            inside: 20,
            sync: Sync::All,
            seed,
        }
    }
}

pub(crate) async fn work(worker: Worker) -> Result<()> {
    let ending = Arc::new(AtomicBool::new(false));
    listen(ending.clone());
    let mut clients = Vec::new();
    for _ in 0..worker.clients.max(1) {
        clients.push(connect(&worker).await);
    }
    let teller = Teller::start();
    let tells = teller.clone();
    pulse::watch(move |since, until| tells.say(until, 0, What::Stood { since }));
    teller.tell(What::Ready);
    let worker = Arc::new(worker);
    let mut tasks = JoinSet::new();
    for task in 0..worker.tasks {
        let client = task % clients.len();
        // From the last one, so that most of them do not sit.
        let is_fair = worker.tasks - task <= worker.fair;
        let handles = worker.names.iter();
        let handles = handles.filter(|name| is_fair || !name.starts_with("fair"));
        let lease = Duration::from_millis(worker.lease);
        let handles = handles.map(|name| Handle::new(&clients[client], name, lease));
        let handles = handles.collect::<Result<Vec<_>>>()?;
        let inside = Inside::of_task(&worker, task, client, teller.clone(), ending.clone());
        tasks.spawn(fight(worker.clone(), task, handles, inside, ending.clone()));
    }
    tasks.join_all().await;
    for (number, client) in clients.iter().enumerate() {
        let status = || format!("{:?}", client.status());
        // Nothing is left when what was in the background is done and the last subscription has
        // lingered; a little later on a machine that is short of time.
        let end = Instant::now() + LINGER + Duration::from_secs(5);
        while client.status() != redlatch::ClientStatus::default() && Instant::now() < end {
            sleep(Duration::from_millis(20)).await;
        }
        if client.status() != redlatch::ClientStatus::default() {
            teller.tell(What::Left {
                client: number,
                status: status(),
            });
        }
    }
    teller.tell(What::Done);
    // What is renewed now, nobody holds: the store is looked at while the clients are still there.
    std::future::pending().await
}

/// One task's life.
async fn fight(
    worker: Arc<Worker>,
    task: usize,
    handles: Vec<Handle>,
    mut inside: Inside,
    ending: Arc<AtomicBool>,
) {
    let mut random = Random::new(worker.seed.wrapping_mul(1009).wrapping_add(task as u64));
    let lease = Duration::from_millis(worker.lease);
    let sits = task < worker.sitters;
    let (least, most) = if sits {
        // Long enough to be renewed, and to be in the way of what breaks.
        (lease / 2, lease * 3)
    } else {
        (Duration::ZERO, Duration::from_millis(worker.inside))
    };
    while !ending.load(Ordering::Relaxed) {
        // Who sits has the first half of the names; only every other of the rest ever comes there. Else
        // everybody would soon stand in line behind him, and nothing would go on anywhere.
        let half = handles.len().div_ceil(2);
        let queues = task % 2 == 1 && random.below(8) == 0;
        let at = match sits || queues {
            true => random.below(half),
            // Of one name there is no second half.
            false => (half + random.below(handles.len() - half)).min(handles.len() - 1),
        };
        let handle = &handles[at];
        let time = random.between(least, most);
        if handle.pass(&mut inside, time, &mut random).await.is_err() {
            // Whatever it was, it is told; not at once again, or it would be all that is done.
            sleep(Duration::from_millis(20)).await;
        }
        let rest = if sits { lease / 6 } else { most / 2 };
        sleep(random.between(Duration::ZERO, rest)).await;
    }
}

/// However long it takes: the store may be broken just now.
async fn connect(worker: &Worker) -> Client {
    loop {
        let builder = Client::builder()
            .watchdog(Duration::from_millis(worker.lease))
            .response_timeout(Duration::from_millis(worker.timeout))
            .connect_timeout(Duration::from_millis(worker.timeout))
            .replica_sync(worker.sync.replicas())
            .subscription_linger(LINGER);
        match builder.connect(&worker.url).await {
            Ok(client) => return client,
            Err(error) if error.is_transient() => {}
            // A server that has too many clients says so in words of its own.
            Err(error) => eprintln!("a worker cannot connect yet: {error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

fn listen(ending: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            if line == "end" {
                ending.store(true, Ordering::Relaxed);
            }
        }
        std::process::exit(0);
    });
}
