//! Sentinels: find the current master and notice failovers.
//!
//! A sentinel may be down, slow, cut off or wrong. So:
//!
//! 1. All sentinels are asked, and the answer of most of them counts.
//! 2. The server that they name must confirm that it is a master ([`super::link`] asks it for its role).
//! 3. The sentinels publish failovers. A message, a broken connection or a missing answer is only a reason
//!    to repeat the query.
//! 4. A connection that leads to another server than the master is given up.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use redis::{ServerError, Value};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::access::{Access, Endpoint};
use super::dial::Dial;
use super::fault::Fault;
use super::link::{Finding, Guide, Link, Whereabouts};
use super::listening::Listening;
use super::lookout::{BRIEFLY, Lookout, PAUSE};
use crate::error::{Error, Result};
use crate::lease::MAX_LEASE;
use crate::several::most;
use crate::store::{Ear, SharedEar};

/// Published when another server has become the master.
const SWITCHED: &str = "+switch-master";

/// Time limit for one sentinel. A failover is followed even if some sentinels hang.
const PATIENCE: Duration = Duration::from_secs(1);

/// How soon the client reconnects to a sentinel whose connection broke.
const RETURN: Duration = Duration::from_secs(3);

pub(super) struct Sentinels {
    master: String,
    /// How to connect to the data servers.
    data: Access,
    sentinels: Vec<(Endpoint, Arc<Link>)>,
    changed: Arc<Changed>,
    /// The links that follow the master.
    followers: Mutex<Vec<Weak<Link>>>,
    /// The master at the last check.
    latest: Mutex<Option<Endpoint>>,
    lookout: Lookout,
}

/// One sentinel's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Opinion {
    endpoint: Endpoint,
    /// Increases with every failover.
    epoch: u64,
}

/// Receives what the sentinels publish.
#[derive(Default)]
struct Changed(Notify);

impl Sentinels {
    pub(super) fn new(
        sentinels: &[Endpoint],
        access: &Access,
        master: String,
        data: Access,
        connect_timeout: Duration,
    ) -> Result<Arc<Sentinels>> {
        let changed = Arc::new(Changed::default());
        let ear: SharedEar = changed.clone();
        let limit = connect_timeout.min(PATIENCE);
        let link = |endpoint: &Endpoint| {
            let dial = access.to_endpoint(endpoint).map_err(Fault::into_error)?;
            let whereabouts = Whereabouts::Fixed(dial);
            let link = Link::new(whereabouts, limit, ear.clone(), Listening::Restored, None);
            link.want(SWITCHED);
            Ok((endpoint.clone(), link))
        };
        Ok(Arc::new(Sentinels {
            master,
            data,
            sentinels: sentinels.iter().map(link).collect::<Result<_>>()?,
            changed,
            followers: Mutex::default(),
            latest: Mutex::default(),
            lookout: Lookout::default(),
        }))
    }

    /// Registers a link, which is given up when it leads to a server that is no longer the master.
    pub(super) fn lead(&self, link: &Arc<Link>) {
        let followers = &mut self
            .followers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        followers.push(Arc::downgrade(link));
    }

    /// Returns the name of the master, for messages.
    pub(super) fn name(&self) -> String {
        let mut all: Vec<String> = self
            .sentinels
            .iter()
            .map(|(at, _)| at.to_string())
            .collect();
        all.sort_unstable();
        format!("{}@{}/{}", self.master, all.join(","), self.data.db())
    }

    /// Handles a sign of a failover.
    pub(super) fn suspect(self: &Arc<Self>) {
        self.watch();
        self.changed.0.notify_one();
    }

    /// Watches for changes from now on, for as long as the runtime lives.
    fn watch(self: &Arc<Self>) {
        self.lookout
            .keep(|| keep_up(Arc::downgrade(self), self.changed.clone()));
    }

    /// Returns how to reach the master that most sentinels name.
    async fn master(self: &Arc<Self>) -> Result<(Dial, Endpoint), Fault> {
        let endpoint = self.ask_all().await?;
        let dial = self.data.to_endpoint(&endpoint)?;
        self.watch();
        Ok((dial, endpoint))
    }

    async fn ask_all(&self) -> Result<Endpoint, Fault> {
        let asking = self.sentinels.iter().map(|(at, link)| async move {
            let said = match timeout(PATIENCE, self.ask(at, link)).await {
                Ok(said) => said,
                Err(_) => {
                    let silence = link.silence().unwrap_or_default();
                    Err(Fault::NotSent(format!(
                        "no answer within {PATIENCE:?}{silence}"
                    )))
                }
            };
            said.map_err(|fault| (at, fault))
        });
        let agree = |said: &[Option<std::result::Result<Option<Opinion>, _>>]| {
            let votes = most_say(opinions(said)).map_or(0, |(_, votes)| votes);
            votes * 2 > said.len()
        };
        let said = most(asking, agree, BRIEFLY).await;
        if let Some((endpoint, _)) = most_say(opinions(&said)) {
            return Ok(endpoint);
        }
        let mut reasons = Vec::new();
        for said in said.into_iter().flatten() {
            reasons.push(match said {
                // Wrong credentials stay wrong.
                Err((_, fault @ Fault::Final(_))) => return Err(fault),
                Err((at, fault)) => format!("{at}: {}", fault.reason()),
                Ok(Some(Opinion { endpoint, .. })) => format!("one sentinel reports {endpoint}"),
                Ok(None) => format!("no sentinel knows a master called {:?}", self.master),
            });
        }
        reasons.dedup();
        Err(Fault::NotSent(reasons.join("; ")))
    }

    /// Asks one sentinel. `None`: it does not know that master.
    async fn ask(&self, at: &Endpoint, link: &Arc<Link>) -> Result<Option<Opinion>, Fault> {
        let mut live = link.live().await?;
        let address = redis::cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(&self.master)
            .take();
        // Flags and epoch. Its address is the old one until a failover is complete.
        let facts = redis::cmd("SENTINEL")
            .arg("MASTER")
            .arg(&self.master)
            .take();
        let address = link.ask(&mut live, &address).await?;
        if let Value::ServerError(error) = &address {
            return Err(refused(at, error));
        }
        let Some((host, port)) = redis::from_redis_value::<Option<(String, u16)>>(address)
            .map_err(|e| Fault::refused(&e.into()))?
        else {
            return Ok(None);
        };
        let facts = link.ask(&mut live, &facts).await?;
        Ok(Some(Opinion {
            endpoint: at.or_host(&host, port),
            epoch: epoch(facts),
        }))
    }

    /// Gives up the connections that do not lead to the master.
    async fn look(&self) {
        let Ok(master) = self.ask_all().await else {
            return;
        };
        let before = {
            let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
            latest.replace(master.clone())
        };
        let failed_over = before.is_some_and(|before| before != master);
        let followers = self
            .followers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for link in followers.iter().filter_map(Weak::upgrade) {
            let elsewhere = |endpoint: &Endpoint| *endpoint != master;
            if link.leads_to().as_ref().is_some_and(elsewhere) {
                tracing::info!(%master, name = self.master, "following a failover");
                link.give_up();
            }
            if failed_over {
                link.doubt();
            }
        }
    }
}

impl Guide for Sentinels {
    fn find(self: Arc<Self>) -> Finding {
        Box::pin(async move { self.master().await })
    }

    fn silence(&self) -> &'static str {
        self.data.silence()
    }
}

/// Asks again when there is a reason to. Also keeps the connections to the sentinels, on which such reasons
/// arrive.
async fn keep_up(sentinels: Weak<Sentinels>, changed: Arc<Changed>) {
    changed.0.notify_one();
    let mut rest = MAX_LEASE;
    loop {
        let _ = timeout(rest, changed.0.notified()).await;
        let Some(sentinels) = sentinels.upgrade() else {
            return;
        };
        sentinels.look().await;
        let deaf = sentinels
            .sentinels
            .iter()
            .any(|(_, link)| !link.is_connected());
        drop(sentinels);
        rest = if deaf { RETURN } else { MAX_LEASE };
        sleep(PAUSE).await;
    }
}

impl Ear for Changed {
    fn heard(&self, _: &str) {
        self.0.notify_one();
    }

    fn interrupted(&self) {
        self.0.notify_one();
    }

    fn ended(&self, _: &str) {
        self.0.notify_one();
    }
}

fn opinions<E>(
    said: &[Option<std::result::Result<Option<Opinion>, E>>],
) -> impl Iterator<Item = &Opinion> {
    said.iter().flatten().flatten().flatten()
}

/// Returns the address that most sentinels name, and their number. Of two addresses with equally many, the
/// one with the later failover counts, because a failover reaches some sentinels before others. Of three or
/// more, one is neither the old nor the new master, and it is unknown which.
fn most_say<'a>(opinions: impl Iterator<Item = &'a Opinion>) -> Option<(Endpoint, usize)> {
    let mut votes: BTreeMap<&Endpoint, (usize, u64)> = BTreeMap::new();
    for Opinion { endpoint, epoch } in opinions {
        let (count, latest) = votes.entry(endpoint).or_default();
        *count += 1;
        *latest = (*latest).max(*epoch);
    }
    let most = votes.values().map(|(count, _)| *count).max()?;
    votes.retain(|_, (count, _)| *count == most);
    if votes.len() > 2 {
        return None;
    }
    let latest = votes.into_iter().max_by_key(|(_, (_, epoch))| *epoch);
    latest.map(|(endpoint, _)| (endpoint.clone(), most))
}

/// Classifies the error reply of a sentinel.
fn refused(at: &Endpoint, error: &ServerError) -> Fault {
    let unknown = |details: &str| details.starts_with("unknown command");
    match error.details().is_some_and(unknown) {
        true => Fault::Final(Error::UnsupportedServer {
            reason: format!("{at} is not a sentinel"),
        }),
        false => Fault::answered(error, ""),
    }
}

/// Extracts the epoch from the reply to `SENTINEL MASTER`.
fn epoch(facts: Value) -> u64 {
    let facts: HashMap<String, String> = redis::from_redis_value(facts).unwrap_or_default();
    let epoch = facts.get("config-epoch").map(|epoch| epoch.parse());
    epoch.and_then(Result::ok).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opinion(port: u16, epoch: u64) -> Opinion {
        Opinion {
            endpoint: Endpoint::new("h", port),
            epoch,
        }
    }

    #[test]
    fn wrong_sentinel_is_outvoted() {
        let said = [opinion(1, 7), opinion(2, 3), opinion(2, 3)];
        assert_eq!(most_say(said.iter()), Some((Endpoint::new("h", 2), 2)));
        let in_doubt = [opinion(1, 3), opinion(2, 4)];
        assert_eq!(most_say(in_doubt.iter()), Some((Endpoint::new("h", 2), 1)));
        assert_eq!(most_say([].iter()), None);
        // A failover that only one of two knows, and a wrong sentinel.
        let in_doubt = [opinion(1, 3), opinion(2, 4), opinion(3, 7)];
        assert_eq!(most_say(in_doubt.iter()), None);
    }
}
