//! Looks at the store for `redlatch serve`: often while a page is open, else seldom.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, future, stream};
use hyper::body::Bytes;
use redlatch::job::History;
use redlatch::{Client, Error, Leader};
use tokio::sync::watch;

use super::metrics::MAX_NAMES;
use crate::args::Serve;
use crate::exit::{self, Failure};
use crate::jobs::{self, READS};
use crate::look::history::{Age, History as Changes};
use crate::look::reader::{self, Reader};
use crate::look::{Lock, Look};
use crate::output::stderr::{note, warning};
use crate::store::args::StoreArgs;
use crate::why::{self, Deadlock};

/// Limit of elections whose leaders are read at each look.
const MAX_ELECTIONS: usize = 100;

/// What the latest looks have found.
#[derive(Debug)]
pub(super) struct Latest {
    /// The store, without secrets, and the pattern of names.
    pub(super) store: String,
    pub(super) pattern: String,
    /// What the latest look that succeeded has found.
    pub(super) found: Option<Arc<Found>>,
    /// Why there is none, or why a later look failed.
    pub(super) failure: Option<String>,
    /// The event of pages without a filter, and when the first one was sent.
    pub(super) event: OnceLock<(Instant, Bytes)>,
}

/// What a look has found.
#[derive(Debug)]
pub(super) struct Found {
    /// With locks that were held until recently.
    pub(super) look: Look,
    /// The locks as indices, those with the longest wait first, and for how long they have been
    /// held.
    pub(super) order: Vec<(usize, Option<Age>)>,
    pub(super) deadlocks: Vec<Deadlock>,
    /// The leaders by the names of their elections.
    pub(super) leaders: HashMap<String, Leader>,
    /// The jobs by name, up to [`MAX_NAMES`].
    pub(super) jobs: Vec<History>,
    /// Number of further jobs.
    pub(super) omitted_jobs: usize,
}

impl Latest {
    pub(super) fn new(store: String, pattern: String) -> Latest {
        Latest {
            store,
            pattern,
            found: None,
            failure: Some("the store has not answered yet".into()),
            event: OnceLock::new(),
        }
    }

    /// Returns what the latest look has found, unless it failed.
    pub(super) fn current(&self) -> Option<&Found> {
        self.found.as_deref().filter(|_| self.failure.is_none())
    }

    fn with(&self, looked: Result<Found, String>) -> Latest {
        let (found, failure) = match looked {
            Ok(found) => (Some(Arc::new(found)), None),
            Err(message) => (self.found.clone(), Some(message)),
        };
        Latest {
            store: self.store.clone(),
            pattern: self.pattern.clone(),
            found,
            failure,
            event: OnceLock::new(),
        }
    }
}

impl Found {
    pub(super) fn new(mut look: Look, changes: &mut Changes) -> Found {
        changes.add(&look);
        look.add_free(changes.free_locks());
        let locks = look.locks.iter().enumerate();
        let mut order: Vec<_> = locks.map(|(i, lock)| (i, changes.age(lock))).collect();
        order.sort_by_cached_key(|(i, age)| {
            let lock = &look.locks[*i];
            Reverse((
                lock.longest_wait(),
                lock.waiter_count,
                age.map(|age| age.time),
            ))
        });
        Found {
            look,
            order,
            deadlocks: Vec::new(),
            leaders: HashMap::new(),
            jobs: Vec::new(),
            omitted_jobs: 0,
        }
    }
}

/// The results of looks, and who reads them.
#[derive(Debug, Clone)]
pub(super) struct Looks {
    latest: watch::Sender<Arc<Latest>>,
    viewers: watch::Sender<usize>,
}

/// An open page. The store is looked at often until all are dropped.
pub(super) struct Viewer {
    viewers: watch::Sender<usize>,
    pub(super) latest: watch::Receiver<Arc<Latest>>,
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.viewers.send_modify(|viewers| *viewers -= 1);
    }
}

impl Looks {
    pub(super) fn new(latest: Latest) -> Looks {
        Looks {
            latest: watch::Sender::new(Arc::new(latest)),
            viewers: watch::Sender::new(0),
        }
    }

    pub(super) fn latest(&self) -> watch::Receiver<Arc<Latest>> {
        self.latest.subscribe()
    }

    pub(super) fn viewer(&self) -> Viewer {
        self.viewers.send_modify(|viewers| *viewers += 1);
        Viewer {
            viewers: self.viewers.clone(),
            latest: self.latest(),
        }
    }

    /// Looks at all objects again and again. Returns only if that can never succeed.
    pub(super) async fn repeat(&self, store_args: StoreArgs, serve: &Serve) -> Failure {
        let mut reader = Reader::new(store_args, serve.pattern.clone());
        let mut changes = Changes::default();
        let mut viewers = self.viewers.subscribe();
        let mut is_failing = false;
        loop {
            let begun = Instant::now();
            let looked = look(&mut reader, &serve.pattern, &mut changes).await;
            match &looked {
                Ok(_) if is_failing => note!("the store answers again"),
                Err(failure) if failure.code == exit::UNAVAILABLE && !is_failing => {
                    warning!("no metrics: {}", failure.message);
                }
                _ => {}
            }
            is_failing = looked.is_err();
            let looked = match looked {
                Err(failure) if failure.code != exit::UNAVAILABLE => return failure,
                looked => looked.map_err(|failure| failure.message),
            };
            let latest = self.latest.borrow().with(looked);
            self.latest.send_replace(Arc::new(latest));
            let ended = Instant::now();
            loop {
                let rest = rest(serve, *viewers.borrow_and_update(), ended - begun);
                tokio::select! {
                    () = tokio::time::sleep_until((ended + rest).into()) => break,
                    _ = viewers.changed() => {}
                }
            }
        }
    }
}

/// Returns the pause behind a look, while so many pages are open.
fn rest(serve: &Serve, viewers: usize, took: Duration) -> Duration {
    let interval = match viewers {
        0 => serve.interval,
        _ => serve.refresh.min(serve.interval),
    };
    reader::rest(interval, took)
}

async fn look(reader: &mut Reader, pattern: &str, changes: &mut Changes) -> Result<Found, Failure> {
    let mut look = reader.look().await?;
    let connected = reader.client().borrow().clone();
    let Some(client) = connected else {
        return Ok(Found::new(look, changes));
    };
    why::confirm(&client, &mut look.graph).await?;
    let mut found = Found::new(look, changes);
    found.deadlocks = why::in_json(&found.look.graph);
    let (leaders, jobs) = tokio::join!(leaders(&client, &found.look), jobs(&client, pattern));
    found.leaders = leaders;
    (found.jobs, found.omitted_jobs) = jobs?;
    Ok(found)
}

/// Returns the leaders of the elections. Those that cannot be read are left out: the next look
/// reports an outage.
async fn leaders(client: &Client, look: &Look) -> HashMap<String, Leader> {
    let read = async |lock: &Lock| {
        let leader = client.election(&lock.name).leader().await;
        Some((lock.name.clone(), leader.ok()??))
    };
    let elections = stream::iter(look.elections().take(MAX_ELECTIONS));
    let read = elections.map(read).buffered(READS);
    read.filter_map(future::ready).collect().await
}

/// Returns the first jobs whose names match a pattern, without the outputs of their runs, if they can
/// be read, and the number of the others.
async fn jobs(client: &Client, pattern: &str) -> Result<(Vec<History>, usize), Error> {
    let read = async {
        let mut names = client.jobs(pattern).await?;
        let omitted = names.len().saturating_sub(MAX_NAMES);
        names.truncate(MAX_NAMES);
        Ok((jobs::read_all(client, names, false).await?, omitted))
    };
    match read.await {
        Err(Error::NotPermitted { .. }) => Ok((Vec::new(), 0)),
        jobs => jobs,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use redlatch::job::Cron;
    use tokio::sync::Notify;

    use super::*;
    use crate::args::{Args, Command};
    use crate::look::{Holder, Party, Waiter};

    fn found(locks: Vec<Lock>) -> Found {
        let mut look = Look::new(Instant::now());
        look.locks = locks;
        Found::new(look, &mut Changes::default())
    }

    fn lock(name: &str, held_for: Option<u64>, waits: &[u64]) -> Lock {
        let party = |age| Party {
            age: Some(Duration::from_secs(age)),
            ..Party::default()
        };
        let waiters = waits.iter().map(|age| Waiter {
            party: party(*age),
            position: None,
        });
        let holders = held_for.map(|age| Holder {
            party: party(age),
            lease: redlatch::Expiry::Never,
            side: None,
            holds: 1,
        });
        Lock {
            name: name.into(),
            holders: holders.into_iter().collect(),
            waiter_count: waits.len(),
            waiters: waiters.collect(),
            ..Lock::default()
        }
    }

    #[test]
    fn store_is_looked_at_often_only_while_a_page_is_open() {
        let args = ["redlatch", "serve", "--interval", "15s", "--refresh", "2s"];
        let Command::Serve(serve) = Args::parse_from(args).command else {
            panic!("another command");
        };
        let looks = Looks::new(Latest::new("store".into(), "*".into()));
        let rest = |took| rest(&serve, *looks.viewers.borrow(), Duration::from_secs(took));
        assert_eq!(rest(1), Duration::from_secs(14));
        let viewers = [looks.viewer(), looks.viewer()];
        assert_eq!(rest(1), Duration::from_secs(1));
        // Not more than half of the time.
        assert_eq!(rest(3), Duration::from_secs(3));
        drop(viewers);
        assert_eq!(rest(20), Duration::from_secs(20));
    }

    #[tokio::test]
    async fn jobs_beyond_the_limit_are_only_counted() {
        let client = Client::embedded();
        let each_second = Cron::parse("* * * * * *").unwrap();
        let run = |number: usize| {
            let job = client.job(&number.to_string());
            let job = job.schedule(each_second.clone());
            async move {
                let ran = Notify::new();
                let work = async |_| ran.notify_one();
                job.run_until(ran.notified(), work).await.unwrap();
            }
        };
        future::join_all((0..=MAX_NAMES).map(run)).await;
        let (jobs, omitted) = jobs(&client, "*").await.unwrap();
        assert_eq!((jobs.len(), omitted), (MAX_NAMES, 1));
    }

    #[test]
    fn longest_wait_is_first() {
        let found = found(vec![
            lock("free", None, &[]),
            lock("held for long", Some(60), &[]),
            lock("just held", Some(1), &[]),
            lock("three waiters", Some(5), &[2, 2, 2]),
            lock("two waiters", Some(9), &[2, 1]),
            lock("waits for long", Some(7), &[1, 3]),
        ]);
        let order = found.order.iter();
        let names: Vec<_> = order.map(|(i, _)| &*found.look.locks[*i].name).collect();
        assert_eq!(
            names,
            [
                "waits for long",
                "three waiters",
                "two waiters",
                "held for long",
                "just held",
                "free"
            ]
        );
    }

    #[test]
    fn outage_keeps_the_last_reading() {
        let latest = Latest::new("store".into(), "*".into());
        assert!(latest.current().is_none() && latest.failure.is_some());
        let latest = latest.with(Ok(found(vec![lock("a", None, &[])])));
        assert!(latest.current().is_some());
        let latest = latest.with(Err("down".into()));
        assert!(latest.current().is_none() && latest.found.is_some());
        assert_eq!(latest.failure.as_deref(), Some("down"));
        assert!(latest.with(Ok(found(Vec::new()))).current().is_some());
    }
}
