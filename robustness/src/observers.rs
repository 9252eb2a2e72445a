//! Observers of the elections, outside of the processes that faults affect.
//!
//! 1. Each election is observed from the beginning of a run to its end.
//! 2. Epochs only grow ([`Rule::Tokens`]). A term that no candidate was granted does not count: it may be lost in a failover,
//!    because no replica has confirmed it.
//! 3. After the run, a candidate leads each election once more: its observer must report this leader, and after it has
//!    resigned, that there is none ([`Rule::Observer`]).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::{Client, Election};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch::{self, Receiver, Sender};
use tokio::time::{sleep, timeout};

use crate::Result;
use crate::checker::Rule;
use crate::history::History;
use crate::processes::lock;

/// What an observer has reported.
#[derive(Debug, Default)]
pub struct Observed {
    /// The epoch of the last report.
    current: Option<u64>,
    highest: u64,
    /// A violation.
    decreased: Option<String>,
}

/// An observed election.
#[derive(Debug)]
pub struct ObservedElection {
    name: String,
    observed: Receiver<Observed>,
}

/// Returns an election, and the future that observes it, which never ends.
pub fn observe(
    url: String,
    name: String,
    history: Arc<Mutex<History>>,
) -> (ObservedElection, impl Future<Output = ()> + Send) {
    let (sender, observed) = watch::channel(Observed::default());
    let observing = observe_forever(url, name.clone(), sender, history);
    (ObservedElection { name, observed }, observing)
}

async fn observe_forever(
    url: String,
    name: String,
    reports: Sender<Observed>,
    history: Arc<Mutex<History>>,
) {
    let lease = Duration::from_nanos(lock(&history).lease.unsigned_abs());
    // Without a leader, an observer looks again once in a lease.
    let builder = Client::builder().watchdog_lease(lease);
    let client = loop {
        match builder.clone().connect(&url).await {
            Ok(client) => break client,
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    };
    let mut observer = client.election(&name).observe();
    loop {
        // An outage ended the call; the next one continues.
        let Ok(leader) = observer.next().await else {
            sleep(Duration::from_millis(20)).await;
            continue;
        };
        reports.send_modify(|observed| {
            observed.current = leader.map(|leader| leader.epoch);
            let epoch = observed.current.unwrap_or(observed.highest);
            if epoch < observed.highest {
                let was_granted = lock(&history).sections.iter().any(|section| {
                    section.request.name == name && section.token == Some(observed.highest)
                });
                if was_granted {
                    let text = format!("{name}: epoch {epoch} after {}", observed.highest);
                    observed.decreased = Some(text);
                }
            }
            observed.highest = epoch;
        });
    }
}

/// Leads each election once. Returns the violations.
pub async fn check_observers(
    url: &str,
    elections: &mut [ObservedElection],
    limit: Duration,
) -> Result<Vec<(Rule, String)>> {
    let client = Client::connect(url).await?;
    let mut found = Vec::new();
    for one in elections {
        let election = client.election(&one.name);
        if let Some(text) = one.check(&election, limit).await? {
            found.push((Rule::Observer, text));
        }
        if let Some(text) = one.observed.borrow().decreased.clone() {
            found.push((Rule::Tokens, text));
        }
    }
    client.flush().await;
    Ok(found)
}

impl ObservedElection {
    /// Leads once. Returns what the observer did not report within the limit.
    async fn check(&mut self, election: &Election, limit: Duration) -> Result<Option<String>> {
        let leadership = election.campaign("last").await?;
        let epoch = leadership.epoch();
        let missed_leader = self.waits_for(Some(epoch), limit).await;
        leadership.resign().await?;
        let missed_vacancy = self.waits_for(None, limit).await;
        let current = self.observed.borrow().current;
        let text = format!(
            "{}: the observer did not report leader {epoch} ({missed_leader}) or its end \
             ({missed_vacancy}); its last report was {current:?}",
            self.name
        );
        Ok((missed_leader || missed_vacancy).then_some(text))
    }

    /// Waits until this is the last report. Returns whether the limit was reached first.
    async fn waits_for(&mut self, epoch: Option<u64>, limit: Duration) -> bool {
        let reported = self.observed.wait_for(|observed| observed.current == epoch);
        !matches!(timeout(limit, reported).await, Ok(Ok(_)))
    }
}

/// The observers of a run on real servers, in a runtime of their own.
pub(crate) struct Observers {
    runtime: Runtime,
    elections: Vec<ObservedElection>,
}

impl Observers {
    pub(crate) fn start(
        url: &str,
        names: &[String],
        history: &Arc<Mutex<History>>,
    ) -> Result<Observers> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let elections = names.iter().filter(|name| name.starts_with("election"));
        let start = |name: &String| {
            let (election, observing) = observe(url.to_owned(), name.clone(), history.clone());
            runtime.spawn(observing);
            election
        };
        Ok(Observers {
            elections: elections.map(start).collect(),
            runtime,
        })
    }

    /// As [`check_observers`]. Ends the observers.
    pub(crate) fn check(mut self, url: &str, limit: Duration) -> Result<Vec<(Rule, String)>> {
        self.runtime
            .block_on(check_observers(url, &mut self.elections, limit))
    }
}
