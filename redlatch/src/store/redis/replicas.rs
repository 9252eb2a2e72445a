//! Confirms that replicas have an acquisition before it counts (WAIT; Redisson: `checkLockSyncedSlaves`).
//!
//! 1. WAIT blocks its connection until the replicas have answered. So attempts have a connection of their
//!    own, and renewals and releases do not queue behind a WAIT.
//! 2. One WAIT confirms all steps that were sent before it. At most two are in flight
//!    ([`MAX_WAITS_IN_FLIGHT`]), however many attempts there are and however long a replica does not answer.
//! 3. While those are in flight, later attempts share one further WAIT, which is sent when one of them is
//!    answered.
//! 4. The number of connected replicas comes from ROLE. It is read once per connection, and again in the
//!    background when it is old or when a WAIT was not fulfilled.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::{Instant, timeout};

use super::connection::{Generation, LiveConnection, ReconnectingConnection};
use super::exchange_error::ExchangeError;
use super::options::{RedisSettings, ReplicaSync};
use crate::environment::task;
use crate::error::Error;
use crate::step::unexpected_reply;
use crate::store::answer::{Confirmation, WaitResult};
use crate::store::shared_oneshot::{self, Sender};
use crate::sync::Mutex;

/// Limit of WAITs in flight: a second one confirms later steps.
const MAX_WAITS_IN_FLIGHT: usize = 2;

/// Age at which the number of replicas is refreshed.
const COUNT_MAX_AGE: Duration = Duration::from_secs(1);

/// The replicas of one master.
pub(super) struct Replicas {
    settings: RedisSettings,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of connected replicas, the connection on which it was read, and when.
    connected: Option<(usize, Generation, Instant)>,
    waits_in_flight: usize,
    /// The next WAIT, which is sent when one in flight has been answered.
    next: Option<WaitRequest>,
}

/// A WAIT that is to be sent.
struct WaitRequest {
    live: LiveConnection,
    sender: Sender<WaitResult>,
}

impl Replicas {
    pub(super) fn new(settings: RedisSettings) -> Arc<Replicas> {
        Arc::new(Replicas {
            settings,
            state: Mutex::default(),
        })
    }

    /// Reads how many replicas are connected to the master of this connection, if that is not known yet. If the number
    /// is old, it is read again in the background.
    pub(super) async fn ensure_counted(
        self: &Arc<Self>,
        connection: &Arc<ReconnectingConnection>,
        live: &LiveConnection,
    ) -> Result<(), ExchangeError> {
        if matches!(self.settings.replica_sync, ReplicaSync::AtLeast(_)) {
            return Ok(());
        }
        let known = self.state.lock().connected;
        match known {
            Some((.., generation, since)) if generation == live.generation => {
                if since.elapsed() > COUNT_MAX_AGE {
                    self.recount_in_background(connection.clone(), live.clone());
                }
                Ok(())
            }
            _ => self.count(connection, live).await,
        }
    }

    /// Starts to wait until the replicas have acknowledged everything that was sent on this connection before.
    pub(super) fn confirm(
        self: &Arc<Self>,
        connection: &Arc<ReconnectingConnection>,
        live: &LiveConnection,
    ) -> Option<Confirmation> {
        let (mut state, timeout) = (self.state.lock(), self.settings.replica_timeout);
        match self.replicas_to_await(&state, live) {
            Some(0) => return None,
            Some(_) => {}
            None => return Some(Confirmation::pending(shared_oneshot::channel().1, timeout)),
        }
        let same = |next: &&WaitRequest| next.live.generation == live.generation;
        let mut start_sender = false;
        let outcome = match state.next.as_ref().filter(same) {
            Some(next) => next.sender.subscribe(),
            None => {
                let (sender, outcome) = shared_oneshot::channel();
                let live = live.clone();
                // Replacing a WAIT for a connection that has ended fails its receivers.
                state.next = Some(WaitRequest { live, sender });
                start_sender = state.waits_in_flight < MAX_WAITS_IN_FLIGHT;
                state.waits_in_flight += usize::from(start_sender);
                outcome
            }
        };
        // The mutex is unlocked first: if the runtime is ending, the task is dropped at once, which locks it.
        drop(state);
        if start_sender {
            let sender = WaitSender {
                replicas: self.clone(),
                finished: false,
            };
            tokio::spawn(task(sender.run(connection.clone())));
        }
        Some(Confirmation::pending(outcome, timeout))
    }

    /// Returns the number of replicas to wait for on this connection. `None`: there is a newer connection,
    /// perhaps to another master, whose replicas do not have the steps that were sent on this one.
    fn replicas_to_await(&self, state: &State, live: &LiveConnection) -> Option<usize> {
        if let ReplicaSync::AtLeast(some) = self.settings.replica_sync {
            return Some(some);
        }
        let (connected, generation, _) = state.connected?;
        let same = generation == live.generation;
        same.then(|| self.settings.replica_sync.replicas_awaited(connected))
    }

    /// Sends WAIT. Returns how many replicas were waited for, and how many of them acknowledged.
    async fn send_wait(
        &self,
        connection: &ReconnectingConnection,
        live: &mut LiveConnection,
    ) -> Result<(usize, usize), ExchangeError> {
        let Some(awaited) = self.replicas_to_await(&self.state.lock(), live) else {
            return Err(ExchangeError::Unanswered("the connection has ended".into()));
        };
        let for_replicas = self.settings.replica_timeout;
        let millis = for_replicas.as_millis().max(1);
        let mut wait = redis::cmd("WAIT");
        wait.arg(awaited)
            .arg(u64::try_from(millis).unwrap_or(u64::MAX));
        let limit = for_replicas.saturating_add(self.settings.response_timeout);
        let answer = timeout(limit, connection.query(live, &wait)).await;
        let late = |_| ExchangeError::Unanswered(format!("no answer within {limit:?}").into());
        match answer.map_err(late)?? {
            Value::Int(in_sync) => Ok((awaited, usize::try_from(in_sync).unwrap_or(0))),
            other => Err(ExchangeError::not_executed(format!(
                "unexpected reply: {other:?}"
            ))),
        }
    }

    /// Runs [`Replicas::count`] in the background.
    fn recount_in_background(
        self: &Arc<Self>,
        connection: Arc<ReconnectingConnection>,
        live: LiveConnection,
    ) {
        if let Some((.., since)) = &mut self.state.lock().connected {
            // Prevents another count meanwhile.
            *since = Instant::now();
        }
        let replicas = self.clone();
        tokio::spawn(task(async move {
            let counting = replicas.count(&connection, &live);
            timeout(replicas.settings.response_timeout, counting).await
        }));
    }

    async fn count(
        &self,
        connection: &ReconnectingConnection,
        live: &LiveConnection,
    ) -> Result<(), ExchangeError> {
        let connected = connected_replicas(connection, live).await?;
        self.state.lock().connected = Some((connected, live.generation, Instant::now()));
        Ok(())
    }
}

/// A task that sends WAITs. It is counted in `waits_in_flight`.
struct WaitSender {
    replicas: Arc<Replicas>,
    finished: bool,
}

impl WaitSender {
    /// Sends one WAIT after the other until none is left.
    async fn run(mut self, connection: Arc<ReconnectingConnection>) {
        while let Some(WaitRequest { mut live, sender }) = self.next() {
            let replicas = &self.replicas;
            let outcome = replicas.send_wait(&connection, &mut live).await;
            let is_short = matches!(&outcome, Ok((awaited, in_sync)) if in_sync < awaited);
            let sync = replicas.settings.replica_sync;
            let outcome = outcome.map(|(awaited, in_sync)| (sync.acks_required(awaited), in_sync));
            sender.send(outcome.map_err(ExchangeError::into_error));
            if is_short {
                replicas.recount_in_background(connection.clone(), live);
            }
        }
    }

    /// Takes the next WAIT. If there is none, this sender leaves under the same lock, so that a later WAIT
    /// starts a new sender.
    fn next(&mut self) -> Option<WaitRequest> {
        let mut state = self.replicas.state.lock();
        let next = state.next.take();
        if next.is_none() {
            self.finished = true;
            state.waits_in_flight -= 1;
        }
        next
    }
}

/// Handles a task that ended with its runtime, perhaps before it started.
impl Drop for WaitSender {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let mut state = self.replicas.state.lock();
        state.waits_in_flight -= 1;
        // No sender is left: dropping the WAIT fails its receivers.
        if state.waits_in_flight == 0 {
            state.next = None;
        }
    }
}

/// Returns how many replicas are connected (`ROLE`).
async fn connected_replicas(
    connection: &ReconnectingConnection,
    live: &LiveConnection,
) -> Result<usize, ExchangeError> {
    let role = redis::cmd("ROLE");
    match connection.query(&mut live.clone(), &role).await? {
        // A master replies with its offset, and the address and offset of each replica.
        Value::Array(role) => match role.get(2) {
            Some(Value::Array(replicas)) => Ok(replicas.len()),
            // A replica.
            _ => Ok(0),
        },
        other => Err(unexpected_reply(&other).into()),
    }
}

impl ReplicaSync {
    /// Returns whether replicas have to be waited for at a server without sentinels or a cluster. If not,
    /// one connection is saved.
    pub(super) async fn applies_to(
        self,
        connection: &Arc<ReconnectingConnection>,
    ) -> Result<bool, ExchangeError> {
        match self {
            ReplicaSync::AtLeast(_) => return Ok(true),
            ReplicaSync::Off => return Ok(false),
            ReplicaSync::All | ReplicaSync::Majority => {}
        }
        let live = connection.get_or_connect().await?;
        match connected_replicas(connection, &live).await {
            Ok(connected) => Ok(connected > 0),
            Err(ExchangeError::Permanent(Error::Refused { reason })) => {
                // Something that speaks the protocol but has no roles.
                tracing::debug!(reason, "not waiting for replicas");
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Returns how many of the connected replicas are waited for.
    fn replicas_awaited(self, connected: usize) -> usize {
        match self {
            ReplicaSync::All => connected,
            ReplicaSync::Majority => connected.div_ceil(2),
            ReplicaSync::AtLeast(some) => some,
            ReplicaSync::Off => 0,
        }
    }

    /// Returns how many of the replicas that were waited for must acknowledge.
    fn acks_required(self, waited_for: usize) -> usize {
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
        let needed = |replicas| ReplicaSync::Majority.replicas_awaited(replicas);
        // Of 1, 2, 3, 4, 5 and 6 servers: 1, 2, 2, 3, 3 and 4.
        assert_eq!([0, 1, 2, 3, 4, 5].map(needed), [0, 1, 1, 2, 2, 3]);
    }

    #[test]
    fn all_waits_for_all_replicas_and_needs_one() {
        let all = ReplicaSync::All;
        assert_eq!([0, 1, 3].map(|n| all.replicas_awaited(n)), [0, 1, 3]);
        assert_eq!([0, 1, 3].map(|n| all.acks_required(n)), [0, 1, 1]);
        assert_eq!(ReplicaSync::AtLeast(2).replicas_awaited(0), 2);
        assert_eq!(ReplicaSync::Off.replicas_awaited(3), 0);
    }
}
