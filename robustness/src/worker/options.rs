//! Options of a worker process, and the clients that follow from them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use redlatch::{Client, ClientBuilder, Error, ReplicaSync};
use tokio::time::sleep;

use super::tokens::Tokens;
use crate::names::locks_of_all;
use crate::random::Random;

/// How long a subscription outlives its last waiter.
pub(crate) const LINGER: Duration = Duration::from_millis(200);

/// Options of a worker process.
#[derive(Debug, Clone, Args)]
pub struct WorkerOptions {
    #[arg(long)]
    pub url: String,
    /// File that has the password.
    #[arg(long)]
    pub password_file: Option<PathBuf>,
    /// Address of the resource.
    #[arg(long)]
    pub resource: String,
    /// Number of tasks that acquire locks.
    #[arg(long)]
    pub tasks: usize,
    /// Number of these tasks that hold their locks for long.
    #[arg(long)]
    pub long_holders: usize,
    /// Number of these tasks that acquire fair locks. If all of them die, the waiters behind them wait for each.
    #[arg(long)]
    pub fair: usize,
    /// Number of clients that the tasks share.
    #[arg(long)]
    pub clients: usize,
    /// Names of the locks, `kind:number` each, separated by commas.
    #[arg(long, value_delimiter = ',')]
    pub names: Vec<String>,
    /// Number of owners that several tasks share.
    #[arg(long)]
    pub owners: usize,
    /// Number of threads that acquire locks through a blocking client.
    #[arg(long)]
    pub threads: usize,
    /// Names of the locks that these owners and threads acquire: few, so that they compete.
    #[arg(long, value_delimiter = ',')]
    pub contended_names: Vec<String>,
    /// Names of the jobs that the process runs: see `names::JOBS`.
    #[arg(long, value_delimiter = ',')]
    pub jobs: Vec<String>,
    /// Number of additional locks that the first client holds during the whole run.
    #[arg(long)]
    pub permanent_locks: usize,
    /// Number of commands that the first client sends at once, from time to time. Only in simulations.
    #[arg(skip)]
    pub flood: usize,
    /// What the clients log in with. Only in simulations.
    #[arg(skip)]
    pub tokens: Option<Tokens>,
    /// Prefix of the client ids. Without it they are random.
    #[arg(long)]
    pub client_id: Option<String>,
    /// The watchdog's lease in ms.
    #[arg(long)]
    pub lease: u64,
    /// The response timeout in ms.
    #[arg(long)]
    pub timeout: u64,
    /// The longest time that the other tasks hold a lock, in ms.
    #[arg(long)]
    pub max_hold_ms: u64,
    /// Whether tasks make tickets of holds and adopt, renew or release them, ask for locks, and
    /// revoke holds.
    #[arg(long)]
    pub uses_tickets: bool,
    /// Whether requests have limits, and guards are dropped and flushed. Only in simulations.
    #[arg(skip)]
    pub uses_limits: bool,
    #[arg(long)]
    pub sync: Sync,
    #[arg(long)]
    pub seed: u64,
}

/// Number of replicas that must acknowledge an acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sync {
    /// One of the connected replicas, if there are any: the default of clients.
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

impl WorkerOptions {
    /// Creates the options of a worker. One task in four holds its locks for long.
    pub fn new(lease: Duration, tasks: usize, names: Vec<String>, seed: u64) -> WorkerOptions {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        WorkerOptions {
            url: String::new(),
            password_file: None,
            resource: String::new(),
            tasks,
            long_holders: tasks / 4,
            fair: tasks,
            clients: 2,
            names,
            owners: 3,
            threads: 2,
            contended_names: Vec::new(),
            jobs: Vec::new(),
            permanent_locks: 0,
            flood: 0,
            tokens: None,
            client_id: None,
            lease: millis(lease),
            timeout: millis(lease / 3),
            max_hold_ms: 20,
            uses_tickets: false,
            uses_limits: false,
            sync: Sync::All,
            seed,
        }
    }

    /// Returns the names of all locks that are acquired.
    pub fn all_names(&self) -> Vec<String> {
        let names = self.names.iter().chain(&self.contended_names);
        locks_of_all(names.chain(&self.jobs))
    }

    /// Returns the random numbers of one of the tasks.
    pub(super) fn random(&self, task: usize) -> Random {
        Random::new(self.seed.wrapping_mul(1009).wrapping_add(task as u64))
    }

    pub(super) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease)
    }

    /// Returns the settings of the client with this number.
    pub fn builder(&self, client: usize) -> ClientBuilder {
        let builder = Client::builder()
            .watchdog_lease(self.lease())
            .response_timeout(Duration::from_millis(self.timeout))
            .connect_timeout(Duration::from_millis(self.timeout))
            .replica_sync(self.sync.replicas())
            .client_tracking((self.seed ^ client as u64).is_multiple_of(2))
            .subscription_linger(LINGER);
        let builder = match self.tokens.clone() {
            Some(tokens) => builder.credentials(move || {
                let credentials = tokens.credentials();
                async { credentials }
            }),
            None => builder,
        };
        let builder = match &self.password_file {
            Some(file) => builder.password_file(file),
            None => builder,
        };
        match &self.client_id {
            Some(id) => builder.client_id(format!("{id}-{client}")),
            None => builder,
        }
    }

    /// Connects the client with this number. Retries without a limit, because the store may be broken.
    pub async fn connect(&self, client: usize) -> Client {
        loop {
            match self.builder(client).connect(&self.url).await {
                Ok(client) => return client,
                Err(error) => wait_to_reconnect(&error).await,
            }
        }
    }
}

pub(super) async fn wait_to_reconnect(error: &Error) {
    // A server with too many clients answers with an error of its own.
    if !error.is_transient() {
        eprintln!("a worker cannot connect yet: {error}");
    }
    sleep(Duration::from_millis(50)).await;
}
