//! Confirms that replicas have an acquisition before it counts (WAIT; Redisson: `checkLockSyncedSlaves`).
//!
//! 1. WAIT blocks its connection until the replicas have answered. So attempts have a connection of their
//!    own, and renewals and releases do not queue behind a WAIT.
//! 2. One WAIT confirms all steps that were sent before it. At most two are in flight ([`AT_ONCE`]),
//!    however many attempts there are and however long a replica does not answer.
//! 3. While those are in flight, later attempts share one further WAIT, which is sent when one of them is
//!    answered.
//! 4. The number of connected replicas comes from ROLE. It is read once per connection, and again in the
//!    background when it is old or when a WAIT was not fulfilled.

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

/// How many replicas must acknowledge an acquisition before it counts.
///
/// If too few do, the acquisition is released, and the error is
/// [`Error::NotReplicated`](crate::Error::NotReplicated). All settings but `Off` need a second connection.
/// It carries the attempts and waits for the replicas (Redis: WAIT), in the same round trip as the attempt.
///
/// With no setting does a lock survive every failover: the replica that becomes the master may not be one
/// that has the lock. For actions that must not happen twice, use the tokens of a
/// [`FencedLock`](crate::FencedLock), or a [`RedLock`](crate::RedLock) over independent servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReplicaSync {
    /// Waits for all connected replicas, and requires that at least one of them acknowledges, if any is
    /// connected (as Redisson does with `checkLockSyncedSlaves`). The default. With a single server it is
    /// off if no replica is connected when the client connects.
    #[default]
    All,
    /// Requires more than half of the group of the master and its connected replicas.
    Majority,
    /// Requires this number of replicas, even if fewer are connected: nothing can be acquired then. So a
    /// master that was cut off from its replicas grants no locks.
    AtLeast(usize),
    /// Does not wait for replicas.
    Off,
}

/// Number of WAITs in flight: a second one confirms later steps.
const AT_ONCE: usize = 2;

/// Age at which the number of replicas is refreshed.
const STALE: Duration = Duration::from_secs(1);

/// Requirements on the replicas.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub(super) sync: ReplicaSync,
    /// Time limit for the replicas.
    pub(super) timeout: Duration,
    /// Additional time limit for the master's answer.
    pub(super) patience: Duration,
}

impl Demand {
    /// Returns whether replicas have to be waited for at a server without sentinels or a cluster. If not,
    /// one connection is saved.
    pub(super) async fn applies_to(&self, link: &Arc<Link>) -> Result<bool> {
        if let ReplicaSync::AtLeast(_) = self.sync {
            return Ok(true);
        }
        let live = link.live().await.map_err(Fault::into_error)?;
        match connected(link, &live).await {
            Ok(connected) => Ok(connected > 0),
            Err(Fault::Final(Error::Refused { reason })) => {
                // Something that speaks the protocol but has no roles.
                tracing::debug!(reason, "not waiting for replicas");
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
    /// Number of connected replicas, the connection on which it was read, and when.
    connected: Option<(usize, Generation, Instant)>,
    under_way: usize,
    /// The next WAIT, which is sent when one in flight has been answered.
    next: Option<Waiting>,
}

/// A WAIT that is to be sent.
struct Waiting {
    live: Live,
    tell: Teller<Heard>,
}

/// Result of a WAIT: how many replicas were required, and how many acknowledged.
type Heard = Result<(usize, usize), Fault>;

/// Resolves when the replicas have confirmed an acquisition.
pub(crate) struct Confirmation {
    heard: Option<Listener<Heard>>,
    timeout: Duration,
}

impl Confirmation {
    /// No replica is waited for.
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

    /// Waits until enough replicas have acknowledged. Fails if too few did, or if that cannot be
    /// determined. Until then the request has no answer: it is unknown whether it has acquired anything.
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
                reason: "the connection broke before the replicas answered".into(),
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

    /// Reads how many replicas are connected to the master of this connection, if that is not known yet.
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

    /// Starts to wait for the replicas to have everything sent on this connection before.
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
                // Replacing a WAIT for a connection that has ended fails its listeners.
                state.next = Some(Waiting { live, tell });
                begins = state.under_way < AT_ONCE;
                state.under_way += usize::from(begins);
                heard
            }
        };
        // The lock is released first: the task may end at once if its runtime does.
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

    /// Returns the number of replicas to wait for on this connection. `None`: there is a newer connection,
    /// perhaps to another master, whose replicas do not have the steps that were sent on this one.
    fn to_ask(&self, state: &State, live: &Live) -> Option<usize> {
        if let ReplicaSync::AtLeast(some) = self.demand.sync {
            return Some(some);
        }
        let (connected, generation, _) = state.connected?;
        let same = generation == live.generation();
        same.then(|| self.demand.sync.waits_for(connected))
    }

    /// Sends WAIT. Returns the number of replicas that were waited for, and that acknowledged.
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
            other => Err(Fault::NotSent(format!("unexpected reply: {other:?}"))),
        }
    }

    /// Runs [`Replicas::count`] in the background.
    fn count_again(self: &Arc<Self>, link: Arc<Link>, live: Live) {
        if let Some((.., since)) = &mut self.state().connected {
            // Prevents another count meanwhile.
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

/// Sends WAITs, and is counted in `under_way`.
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

    /// Sends one WAIT after the other until none is left.
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

    /// Takes the next WAIT. If there is none, this sender leaves under the same lock, so that a later WAIT
    /// starts a new sender.
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

/// Ended with its runtime, perhaps before it has started.
impl Drop for Sender {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        let mut state = self.replicas.state();
        state.under_way -= 1;
        // No sender is left: dropping the WAIT fails its listeners.
        if state.under_way == 0 {
            state.next = None;
        }
    }
}

/// Returns how many replicas are connected (`ROLE`).
async fn connected(link: &Link, live: &Live) -> Result<usize, Fault> {
    match link.ask(&mut live.clone(), &redis::cmd("ROLE")).await? {
        // A master replies with its offset, and the address and offset of each replica.
        Value::Array(role) => match role.get(2) {
            Some(Value::Array(replicas)) => Ok(replicas.len()),
            // A replica.
            _ => Ok(0),
        },
        Value::ServerError(error) => Err(Fault::answered(&error, "")),
        other => Err(Fault::Final(unexpected(&other))),
    }
}

impl ReplicaSync {
    /// Returns how many of the connected replicas are waited for.
    fn waits_for(self, connected: usize) -> usize {
        match self {
            ReplicaSync::All => connected,
            ReplicaSync::Majority => connected.div_ceil(2),
            ReplicaSync::AtLeast(some) => some,
            ReplicaSync::Off => 0,
        }
    }

    /// Returns how many of the replicas that were waited for must acknowledge.
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
    fn all_waits_for_all_replicas_and_needs_one() {
        let all = ReplicaSync::All;
        assert_eq!([0, 1, 3].map(|n| all.waits_for(n)), [0, 1, 3]);
        assert_eq!([0, 1, 3].map(|n| all.needs(n)), [0, 1, 1]);
        assert_eq!(ReplicaSync::AtLeast(2).waits_for(0), 2);
        assert_eq!(ReplicaSync::Off.waits_for(3), 0);
    }
}
