//! Replicas: that they have an acquisition before it counts (WAIT; Redisson: `checkLockSyncedSlaves`).
//!
//! WAIT holds its connection up until the replicas have answered, so attempts have a connection of
//! their own, where renewals and releases do not queue. One WAIT answers for all steps that were
//! sent before it: however many attempts there are, and however long a replica does not answer, two
//! are on their way at most.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Value;
use tokio::time::{Instant, timeout};

use super::fault::Fault;
use super::link::{Generation, Link, Live};
use super::told::{self, Listener, Teller};
use crate::error::{Error, Result};
use crate::step::unexpected;
use crate::store::Sent;
use crate::surroundings::task;

/// How many replicas must have an acquisition before it counts.
///
/// An acquisition that too few have is given back, and its error is
/// [`Error::NotReplicated`](crate::Error::NotReplicated). All but `Off` cost a connection more, on
/// which attempts are sent and replicas waited for (Redis: WAIT), in the same round trip as the
/// attempt.
///
/// No setting makes a lock survive every failover: a replica that has the lock may not be the one
/// that is chosen. For what must not be done twice, take the tokens of a
/// [`FencedLock`](crate::FencedLock), or a [`RedLock`](crate::RedLock) over independent servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReplicaSync {
    /// All that are connected are waited for, and one of them at least must have it, if any are
    /// connected (as Redisson does with `checkLockSyncedSlaves`). The default. With a single server
    /// it is off if no replica is connected to it when the client connects.
    #[default]
    All,
    /// More than half of the master and the replicas that are connected to it.
    Majority,
    /// So many replicas, also if fewer are connected: then nothing can be acquired. With this a
    /// master that was cut off from its replicas gives out no locks.
    AtLeast(usize),
    /// None are asked.
    Off,
}

/// How many WAITs may be on their way at once: a second one answers for what is sent meanwhile.
const AT_ONCE: usize = 2;

/// How old the number of replicas may be.
const STALE: Duration = Duration::from_secs(1);

/// What is to be asked of replicas.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub(super) sync: ReplicaSync,
    /// How long the replicas may take.
    pub(super) timeout: Duration,
    /// How long the master may take to answer besides.
    pub(super) patience: Duration,
}

impl Demand {
    /// Whether there is anybody to ask behind a server that no sentinel and no cluster watches. If
    /// not, a connection is saved.
    pub(super) async fn applies_to(&self, link: &Arc<Link>) -> Result<bool> {
        if let ReplicaSync::AtLeast(_) = self.sync {
            return Ok(true);
        }
        let live = link.live().await.map_err(Fault::into_error)?;
        match connected(link, &live).await {
            Ok(connected) => Ok(connected > 0),
            Err(Fault::Final(Error::Refused { reason })) => {
                // Something that speaks like a server, and has no roles.
                tracing::debug!(reason, "replicas are not waited for");
                Ok(false)
            }
            Err(fault) => Err(fault.into_error()),
        }
    }
}

/// The replicas of one master.
pub(super) struct Replicas {
    demand: Demand,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many are connected, on which connection that was found out, and when.
    connected: Option<(usize, Generation, Instant)>,
    under_way: usize,
    /// The WAIT that is sent when one of those has been answered.
    next: Option<Waiting>,
}

/// One WAIT that is to be sent.
struct Waiting {
    live: Live,
    tell: Teller<Heard>,
}

/// What a WAIT was answered with: what was demanded and how many have it.
type Heard = Result<(usize, usize), Fault>;

/// Whether the replicas have what was sent, as soon as that is known.
pub(crate) struct Confirmation {
    heard: Option<Listener<Heard>>,
    timeout: Duration,
}

impl Confirmation {
    /// Nothing was asked.
    pub(crate) const NOT_NEEDED: Confirmation = Confirmation {
        heard: None,
        timeout: Duration::ZERO,
    };

    /// The connection breaks before the replicas have answered.
    #[cfg(test)]
    pub(crate) fn connection_lost() -> Confirmation {
        Confirmation {
            heard: Some(told::channel().1),
            timeout: Duration::ZERO,
        }
    }

    /// Returns when the replicas have it; an error if too few do, or if that cannot be found out. Until then the
    /// request has no answer: it is not known whether it has acquired anything.
    pub(crate) async fn confirmed(self, sent: &Sent) -> Result<()> {
        let Some(heard) = self.heard else {
            return Ok(());
        };
        sent.unanswered();
        match heard.heard().await {
            Some(Ok((needed, in_sync))) if in_sync < needed => Err(Error::NotReplicated {
                needed,
                in_sync,
                within: self.timeout,
            }),
            Some(Ok(_)) => Ok(()),
            Some(Err(fault)) => Err(fault.into_error()),
            None => Err(Error::Unavailable {
                reason: "the connection broke before the replicas had answered".into(),
            }),
        }
    }
}

impl Replicas {
    pub(super) fn new(demand: Demand) -> Arc<Replicas> {
        Arc::new(Replicas {
            demand,
            state: Mutex::default(),
        })
    }

    /// Finds out how many replicas are connected to the master that this connection leads to, if that
    /// is not known yet.
    pub(super) async fn know(self: &Arc<Self>, link: &Arc<Link>, live: &Live) -> Result<(), Fault> {
        if matches!(self.demand.sync, ReplicaSync::AtLeast(_)) {
            return Ok(());
        }
        let known = self.state().connected;
        match known {
            Some((.., generation, since)) if generation == live.generation() => {
                if since.elapsed() > STALE {
                    self.count_again(link.clone(), live.clone());
                }
                Ok(())
            }
            _ => self.count(link, live).await,
        }
    }

    /// Waits for the replicas to have what was sent on this connection before.
    pub(super) fn confirm(self: &Arc<Self>, link: &Arc<Link>, live: &Live) -> Confirmation {
        let mut state = self.state();
        match self.to_ask(&state, live) {
            Some(0) => return Confirmation::NOT_NEEDED,
            Some(_) => {}
            None => return self.confirmation(told::channel().1),
        }
        let same = |next: &&Waiting| next.live.generation() == live.generation();
        let mut begins = false;
        let heard = match state.next.as_ref().filter(same) {
            Some(next) => next.tell.listener(),
            None => {
                let (tell, heard) = told::channel();
                let live = live.clone();
                // One that was to be sent on a connection that has ended hears of it so.
                state.next = Some(Waiting { live, tell });
                begins = state.under_way < AT_ONCE;
                state.under_way += usize::from(begins);
                heard
            }
        };
        // The task may end at once, if its runtime does.
        drop(state);
        if begins {
            tokio::spawn(task(Sender::new(self).send(link.clone())));
        }
        self.confirmation(heard)
    }

    fn confirmation(&self, heard: Listener<Heard>) -> Confirmation {
        Confirmation {
            heard: Some(heard),
            timeout: self.demand.timeout,
        }
    }

    /// How many are asked on this connection. `None`: there is a newer one, perhaps to another master,
    /// whose replicas have nothing to do with what was sent on this.
    fn to_ask(&self, state: &State, live: &Live) -> Option<usize> {
        if let ReplicaSync::AtLeast(some) = self.demand.sync {
            return Some(some);
        }
        let (connected, generation, _) = state.connected?;
        let same = generation == live.generation();
        same.then(|| self.demand.sync.waits_for(connected))
    }

    /// How many were asked, and how many have it.
    async fn ask(&self, link: &Link, live: &mut Live) -> Result<(usize, usize), Fault> {
        let Some(asked) = self.to_ask(&self.state(), live) else {
            return Err(Fault::Unanswered("the connection has ended".into()));
        };
        let millis = self.demand.timeout.as_millis().max(1);
        let mut wait = redis::cmd("WAIT");
        wait.arg(asked)
            .arg(u64::try_from(millis).unwrap_or(u64::MAX));
        let patience = self.demand.timeout.saturating_add(self.demand.patience);
        let Ok(answer) = timeout(patience, link.ask(live, &wait)).await else {
            return Err(Fault::Unanswered(format!("no answer within {patience:?}")));
        };
        match answer? {
            Value::Int(have) => Ok((asked, usize::try_from(have).unwrap_or(0))),
            Value::ServerError(error) => Err(Fault::answered(&error, "")),
            other => Err(Fault::NotSent(format!(
                "an answer of an unknown form: {other:?}"
            ))),
        }
    }

    /// The same as [`Replicas::count`], in the background.
    fn count_again(self: &Arc<Self>, link: Arc<Link>, live: Live) {
        if let Some((.., since)) = &mut self.state().connected {
            // Not once more meanwhile.
            *since = Instant::now();
        }
        let replicas = self.clone();
        tokio::spawn(task(async move {
            let counting = replicas.count(&link, &live);
            timeout(replicas.demand.patience, counting).await
        }));
    }

    async fn count(&self, link: &Link, live: &Live) -> Result<(), Fault> {
        let connected = connected(link, live).await?;
        self.state().connected = Some((connected, live.generation(), Instant::now()));
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who sends WAITs, and is counted as under way.
struct Sender {
    replicas: Arc<Replicas>,
    left: bool,
}

impl Sender {
    fn new(replicas: &Arc<Replicas>) -> Sender {
        Sender {
            replicas: replicas.clone(),
            left: false,
        }
    }

    /// Sends one WAIT after the other, until there is none to be sent.
    async fn send(mut self, link: Arc<Link>) {
        while let Some(Waiting { mut live, tell }) = self.next() {
            let replicas = &self.replicas;
            let heard = replicas.ask(&link, &mut live).await;
            let short = matches!(&heard, Ok((asked, have)) if have < asked);
            let heard = heard.map(|(asked, have)| (replicas.demand.sync.needs(asked), have));
            tell.tell(heard);
            if short {
                replicas.count_again(link.clone(), live);
            }
        }
    }

    /// The next one to be sent. If there is none, who asks has left in the same moment: what is noted
    /// later is for somebody else to send.
    fn next(&mut self) -> Option<Waiting> {
        let mut state = self.replicas.state();
        let next = state.next.take();
        if next.is_none() {
            self.left = true;
            state.under_way -= 1;
        }
        next
    }
}

/// Ended with its runtime, perhaps before it has begun.
impl Drop for Sender {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        let mut state = self.replicas.state();
        state.under_way -= 1;
        // Who waits for what nobody is left to send hears so.
        if state.under_way == 0 {
            state.next = None;
        }
    }
}

/// How many replicas are connected and follow (`ROLE`).
async fn connected(link: &Link, live: &Live) -> Result<usize, Fault> {
    match link.ask(&mut live.clone(), &redis::cmd("ROLE")).await? {
        // Of a master: its offset, and each replica's address and offset.
        Value::Array(role) => match role.get(2) {
            Some(Value::Array(replicas)) => Ok(replicas.len()),
            // A replica itself.
            _ => Ok(0),
        },
        Value::ServerError(error) => Err(Fault::answered(&error, "")),
        other => Err(Fault::Final(unexpected(&other))),
    }
}

impl ReplicaSync {
    /// How many replicas are waited for, of those that are connected.
    fn waits_for(self, connected: usize) -> usize {
        match self {
            ReplicaSync::All => connected,
            ReplicaSync::Majority => connected.div_ceil(2),
            ReplicaSync::AtLeast(some) => some,
            ReplicaSync::Off => 0,
        }
    }

    /// How many of those that were waited for must have it.
    fn needs(self, waited_for: usize) -> usize {
        match self {
            ReplicaSync::All => waited_for.min(1),
            ReplicaSync::Majority | ReplicaSync::AtLeast(_) => waited_for,
            ReplicaSync::Off => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_counts_the_master() {
        let needed = |replicas| ReplicaSync::Majority.waits_for(replicas);
        // Of 1, 2, 3, 4, 5 and 6 servers: 1, 2, 2, 3, 3 and 4.
        assert_eq!([0, 1, 2, 3, 4, 5].map(needed), [0, 1, 1, 2, 2, 3]);
    }

    #[test]
    fn all_are_waited_for_and_one_must_have_it() {
        let all = ReplicaSync::All;
        assert_eq!([0, 1, 3].map(|n| all.waits_for(n)), [0, 1, 3]);
        assert_eq!([0, 1, 3].map(|n| all.needs(n)), [0, 1, 1]);
        assert_eq!(ReplicaSync::AtLeast(2).waits_for(0), 2);
        assert_eq!(ReplicaSync::Off.waits_for(3), 0);
    }
}
