//! Checks behind the last fault of a run that a client still uses everything that it could work without: reports of
//! changed locks, the registry of clients, grants, hand-overs, batches, messages. Without one of them no lock is lost, and every
//! other check passes, so a client that gave one up in an outage would not be noticed.
//!
//! 1. Two clients live through the whole run. One of them acquires a lock ten times a second and keeps it for a while, so that
//!    each fault interrupts all of this.
//! 2. Their watchdog's lease is so long that a loss, or a release, cannot be noticed in time by a renewal or the end of a lease.
//! 3. After the run each probe in [`PROBES`] must succeed once ([`Rule::Mechanism`]).

use std::pin::Pin;
use std::time::Duration;

use redlatch::{Client, Guard, Lock, ReplicaSync};
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use crate::Result;
use crate::deployment::Deployment;
use crate::worker::LINGER;

const LEASE: Duration = Duration::from_secs(90);

/// How long a mechanism that works may take: far less than a third of the lease.
const PROMPT: Duration = Duration::from_secs(8);

/// How long a probe is repeated. A busy machine may prevent a hand-over, and other clients may send commands meanwhile.
const LIMIT: Duration = Duration::from_secs(20);

/// A hold becomes a second old, is tracked, and is registered then.
const LONG_HELD: Duration = Duration::from_millis(2000);

/// Within this time a request is refused and waits. If not, the probe is repeated.
const JOINED: Duration = Duration::from_millis(3);

/// Interval at which locks are acquired during the run, and how long they are kept.
const INTERVAL: Duration = Duration::from_millis(100);
const KEPT: Duration = Duration::from_millis(1500);

pub(crate) struct Mechanisms {
    runtime: Runtime,
    holder: Client,
    other: Client,
    using: JoinHandle<()>,
}

impl Mechanisms {
    /// Connects, and uses everything until the check. `lease`: that of the locks in use.
    pub(crate) fn start(url: &str, lease: Duration) -> Result<Mechanisms> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        // Waiting for replicas excludes grants.
        let builder = Client::builder()
            .watchdog_lease(LEASE)
            .replica_sync(ReplicaSync::Off)
            .subscription_linger(LINGER);
        let connecting = async {
            let holder = builder.clone().connect(url).await?;
            Ok::<_, redlatch::Error>((holder, builder.connect(url).await?))
        };
        let (holder, other) = runtime.block_on(connecting)?;
        let using = runtime.spawn(use_locks(holder.clone(), lease));
        Ok(Mechanisms {
            runtime,
            holder,
            other,
            using,
        })
    }

    /// Returns the mechanisms that do not work any more.
    pub(crate) fn check(self, deployment: &dyn Deployment) -> Vec<String> {
        self.using.abort();
        let probed = Probed {
            holder: self.holder,
            other: self.other,
            deployment,
        };
        let has_slots = deployment.has_slots();
        let probes = PROBES.iter().filter(|probe| !has_slots || probe.in_cluster);
        let probing = async {
            let mut failed = Vec::new();
            for (number, probe) in probes.enumerate() {
                failed.extend(probed.repeat(probe, number).await);
            }
            for client in [&probed.holder, &probed.other] {
                client.flush().await;
            }
            failed
        };
        self.runtime.block_on(probing)
    }
}

/// Acquires locks until it is aborted, each in a task of its own, so that an outage concerns many.
async fn use_locks(client: Client, lease: Duration) {
    let mut tasks = JoinSet::new();
    for number in 0_u64.. {
        let lock = client.lock(&format!("mechanism:used-{number}"));
        tasks.spawn(async move {
            // A fixed lease, so that none remains in a failover.
            if let Ok(guard) = lock.lock().lease(lease).await {
                sleep(KEPT).await;
                drop(guard);
            }
        });
        while tasks.try_join_next().is_some() {}
        sleep(INTERVAL).await;
    }
}

/// Two clients that have lived through all faults.
struct Probed<'a> {
    holder: Client,
    other: Client,
    deployment: &'a dyn Deployment,
}

/// Returns whether a mechanism works, with locks of this name.
type Run = for<'a> fn(&'a Probed<'a>, &'a str) -> Running<'a>;
type Running<'a> = Pin<Box<dyn Future<Output = Result<bool>> + 'a>>;

struct Probe {
    mechanism: &'static str,
    in_cluster: bool,
    run: Run,
}

const PROBES: [Probe; 6] = [
    Probe {
        mechanism: "reports of changed locks: a forced release is a loss at once",
        in_cluster: true,
        run: |probed, name| Box::pin(probed.tracking(name)),
    },
    Probe {
        mechanism: "registry: another client knows the process of a holder",
        in_cluster: true,
        run: |probed, name| Box::pin(probed.registry(name)),
    },
    Probe {
        mechanism: "messages: a release wakes a waiter in another client",
        in_cluster: true,
        run: |probed, name| Box::pin(probed.messages(name)),
    },
    Probe {
        mechanism: "grants: a fair lock passes to another client without a request",
        in_cluster: true,
        run: |probed, name| Box::pin(probed.grants(name)),
    },
    Probe {
        mechanism: "hand-over: a lock passes on in the client under the same owner",
        in_cluster: true,
        run: |probed, name| Box::pin(probed.hand_over(name)),
    },
    Probe {
        mechanism: "batches: many steps are sent as few scripts",
        in_cluster: false,
        run: |probed, name| Box::pin(probed.batches(name)),
    },
];

impl Probed<'_> {
    /// Repeats a probe until it succeeds. Returns what does not work if it never does.
    async fn repeat(&self, probe: &Probe, number: usize) -> Option<String> {
        let end = Instant::now() + LIMIT;
        let mut tries = 0;
        loop {
            let name = format!("mechanism:{number}-{tries}");
            let result = (probe.run)(self, &name).await;
            tries += 1;
            match result {
                Ok(true) => return None,
                _ if Instant::now() < end => {}
                Ok(false) => return Some(format!("{} ({tries} tries)", probe.mechanism)),
                Err(error) => return Some(format!("{}: {error}", probe.mechanism)),
            }
        }
    }

    async fn tracking(&self, name: &str) -> Result<bool> {
        let guard = self.holder.lock(name).lock().await?;
        sleep(LONG_HELD).await;
        self.other.lock(name).force_unlock().await?;
        Ok(timeout(PROMPT, guard.lost()).await.is_ok())
    }

    async fn registry(&self, name: &str) -> Result<bool> {
        let guard = self.holder.lock(name).lock().await?;
        sleep(LONG_HELD).await;
        let state = self.other.inspect(name).await?;
        guard.unlock().await?;
        let holders = state.iter().flat_map(|state| state.holders());
        Ok(holders.filter(|one| one.registered.is_some()).count() == 1)
    }

    async fn messages(&self, name: &str) -> Result<bool> {
        let guard = self.holder.lock(name).lock().await?;
        let waiting = self.refused_waiter(self.other.lock(name)).await?;
        guard.unlock().await?;
        acquired_and_released(waiting).await
    }

    async fn grants(&self, name: &str) -> Result<bool> {
        let guard = self.holder.fair_lock(name).lock().await?;
        let fair = self.other.fair_lock(name);
        let waiting = tokio::spawn(fair.lock().into_future());
        while fair.queue().await?.is_empty() {
            sleep(Duration::from_millis(2)).await;
        }
        let before = self.scripts();
        guard.unlock().await?;
        let acquired = timeout(PROMPT, waiting).await??;
        let scripts = self.scripts() - before;
        acquired?.unlock().await?;
        // That of the release.
        Ok(scripts == 1)
    }

    async fn hand_over(&self, name: &str) -> Result<bool> {
        let lock = self.holder.lock(name);
        let guard = lock.lock().await?;
        let before = lock.holder().await?.map(|holder| holder.owner);
        let waiting = tokio::spawn(lock.lock().into_future());
        // The request joins the queue. A lock that is held for longer does not pass on in the client.
        sleep(JOINED).await;
        guard.unlock().await?;
        let guard = timeout(PROMPT, waiting).await???;
        let after = lock.holder().await?.map(|holder| holder.owner);
        guard.unlock().await?;
        Ok(before == after)
    }

    async fn batches(&self, name: &str) -> Result<bool> {
        const PAIRS: u64 = 200;
        let before = self.scripts();
        let mut tasks = JoinSet::new();
        for number in 0..PAIRS {
            let lock = self.holder.lock(&format!("{name}-{number}"));
            tasks.spawn(async move { lock.lock().await?.unlock().await });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(self.scripts() - before < PAIRS)
    }

    /// Starts a request for a held lock, and waits until the store has refused it.
    async fn refused_waiter(&self, lock: Lock) -> Result<JoinHandle<redlatch::Result<Guard>>> {
        let before = self.scripts();
        let waiting = tokio::spawn(lock.lock().into_future());
        let refused = async {
            while self.scripts() == before {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PROMPT, refused).await?;
        Ok(waiting)
    }

    /// Returns how many scripts all servers were sent.
    fn scripts(&self) -> u64 {
        let masters = self.deployment.masters().into_iter();
        let scripts = masters.map(|master| self.deployment.server(master).calls("evalsha:"));
        scripts.sum()
    }
}

async fn acquired_and_released(waiting: JoinHandle<redlatch::Result<Guard>>) -> Result<bool> {
    let Ok(acquired) = timeout(PROMPT, waiting).await else {
        return Ok(false);
    };
    acquired??.unlock().await?;
    Ok(true)
}
