//! Confirms that replicas have an acquisition before it counts (WAIT; Redisson:
//! `checkLockSyncedSlaves`).
//!
//! 1. WAIT blocks its connection until the replicas have answered. So attempts have a connection of
//!    their own, and renewals and releases do not queue behind a WAIT.
//! 2. One WAIT confirms all steps that were sent before it. At most two are in flight
//!    ([`MAX_WAITS_IN_FLIGHT`]), however many attempts there are and however long a replica does
//!    not answer.
//! 3. While those are in flight, later attempts share one further WAIT, which is sent when one of
//!    them is answered.
//! 4. The number of connected replicas comes from ROLE. It is read again with each WAIT, in the
//!    same round trip, so behind the steps that are confirmed. If more replicas are connected than
//!    the WAIT was for, another one follows. So a replica that is connected when an acquisition
//!    runs is never left out: without a replica at the last count, ROLE alone confirms the steps.
//!
//! **Must not happen:** an acquisition counts that no replica has, although one was connected.
//! Feared most: none was connected at the last count, replicas came since, and the master fails
//! right after the acquisition. An earlier count never decides that nothing is awaited; it only
//! saves a round trip.

use std::sync::Arc;

use tokio::time::timeout;

use super::capabilities::Capabilities;
use super::connection::{Generation, LiveConnection, ReconnectingConnection, connection_ended};
use super::exchange_error::ExchangeError;
use super::options::{RedisSettings, ReplicaSync};
use super::wire::Cmd;
use crate::environment::task;
use crate::error::{Error, Result};
use crate::step::{ScriptReply, unexpected_reply};
use crate::store::Confirmation;
use crate::store::shared_oneshot::{self, Sender};
use crate::sync::Mutex;

/// Limit of WAITs in flight: a second one confirms later steps.
const MAX_WAITS_IN_FLIGHT: usize = 2;

/// The replicas of one master.
pub(super) struct Replicas {
    settings: RedisSettings,
    state: Mutex<State>,
    capabilities: Arc<Capabilities>,
}

#[derive(Default)]
struct State {
    /// Number of connected replicas, and the connection on which it was read.
    connected: Option<(usize, Generation)>,
    waits_in_flight: usize,
    /// The next WAIT, which is sent when one in flight has been answered.
    next: Option<WaitRequest>,
}

/// A WAIT that is to be sent.
struct WaitRequest {
    live: LiveConnection,
    sender: Sender<Result<()>>,
}

impl Replicas {
    pub(super) fn new(settings: RedisSettings, capabilities: Arc<Capabilities>) -> Arc<Replicas> {
        Arc::new(Replicas {
            settings,
            state: Mutex::default(),
            capabilities,
        })
    }

    /// Starts to wait until the replicas have acknowledged everything that was sent on this
    /// connection before.
    pub(super) fn confirm(
        self: &Arc<Self>,
        connection: &Arc<ReconnectingConnection>,
        live: &LiveConnection,
    ) -> Box<Confirmation> {
        let mut state = self.state.lock();
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
        // The mutex is unlocked first: if the runtime is ending, the task is dropped at once, which
        // locks it.
        drop(state);
        if start_sender {
            let sender = WaitSender {
                replicas: self.clone(),
                finished: false,
            };
            tokio::spawn(task(sender.run(connection.clone())));
        }
        Confirmation::pending(outcome)
    }

    /// Returns whether enough replicas have acknowledged.
    fn confirmed(&self, outcome: Result<(usize, usize), ExchangeError>) -> Result<()> {
        let sync = self.settings.replica_sync;
        match outcome {
            Ok((awaited, in_sync)) if in_sync < sync.acks_required(awaited) => {
                Err(Error::NotReplicated {
                    needed: sync.acks_required(awaited),
                    in_sync,
                    within: self.settings.replica_timeout,
                })
            }
            Ok(_) => Ok(()),
            Err(failure) if failure.lacks_command() => {
                sync.unconfirmed(failure, &self.capabilities)
            }
            Err(failure) => Err(failure.into_error()),
        }
    }

    /// Waits for the replicas. Returns how many were waited for, and how many of them acknowledged.
    async fn await_replicas(&self, live: &LiveConnection) -> Result<(usize, usize), ExchangeError> {
        let counted = self.state.lock().connected;
        let counted = counted.filter(|(_, generation)| *generation == live.generation);
        let mut connected = counted.map_or(0, |(connected, _)| connected);
        loop {
            let awaited = self.settings.replica_sync.replicas_awaited(connected);
            // One connection keeps order: ROLE is answered before WAIT blocks it. Either is behind
            // the steps.
            let (counted, in_sync) = tokio::join!(
                biased;
                self.count(live),
                self.send_wait(live, awaited),
            );
            connected = counted?;
            if self.settings.replica_sync.replicas_awaited(connected) <= awaited {
                return Ok((awaited, in_sync?));
            }
        }
    }

    /// Sends WAIT, unless no replica is awaited. Returns how many replicas acknowledged.
    async fn send_wait(
        &self,
        live: &LiveConnection,
        awaited: usize,
    ) -> Result<usize, ExchangeError> {
        if awaited == 0 {
            return Ok(0);
        }
        let millis = self.settings.replica_timeout.as_millis().max(1);
        let mut wait = Cmd::of(&["WAIT"]);
        wait.number(awaited.try_into().unwrap_or(i64::MAX));
        wait.number(millis.try_into().unwrap_or(i64::MAX));
        match live.query(&wait).await? {
            ScriptReply::Integer(in_sync) => Ok(usize::try_from(in_sync).unwrap_or(0)),
            other => Err(ExchangeError::not_executed(format!(
                "unexpected reply: {other:?}"
            ))),
        }
    }

    /// Counts the connected replicas, unless a fixed number is awaited.
    async fn count(&self, live: &LiveConnection) -> Result<usize, ExchangeError> {
        if matches!(self.settings.replica_sync, ReplicaSync::AtLeast(_)) {
            return Ok(0);
        }
        let counted = connected_replicas(live).await?;
        let mut state = self.state.lock();
        match state.connected {
            // A newer connection may lead to another master, whose replicas do not have these
            // steps.
            Some((_, newest)) if newest > live.generation => Err(connection_ended()),
            _ => {
                state.connected = Some((counted, live.generation));
                Ok(counted)
            }
        }
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
        while let Some(WaitRequest { live, sender }) = self.next() {
            let settings = &self.replicas.settings;
            let limit = settings
                .replica_timeout
                .saturating_add(settings.response_timeout);
            let waiting = self.replicas.await_replicas(&live);
            let mut outcome = timeout(limit, waiting).await.unwrap_or_else(|_| {
                let reason = format!("no answer within {limit:?}");
                Err(ExchangeError::Unanswered(reason.into()))
            });
            // The client has left this master, and checked what it held there: this came too late for that.
            if outcome.is_ok() && !connection.is_live(live.generation) {
                outcome = Err(connection_ended());
            }
            // An attempt for a held lock writes nothing, so a replica does not refuse it. Its
            // waiter must not go on listening there.
            if let Err(ExchangeError::NotMaster(_)) = &outcome {
                connection.leave_replica(&live);
            }
            sender.send(self.replicas.confirmed(outcome));
        }
    }

    /// Takes the next WAIT. If there is none, this sender leaves under the same lock, so that a
    /// later WAIT starts a new sender.
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
async fn connected_replicas(live: &LiveConnection) -> Result<usize, ExchangeError> {
    replicas_in(&live.query(&Cmd::of(&["ROLE"])).await?)
}

/// Returns the number of replicas in a reply to ROLE.
pub(super) fn replicas_in(role: &ScriptReply) -> Result<usize, ExchangeError> {
    match role.elements() {
        // A master replies with its offset, and the address and offset of each replica.
        Some([_, _, ScriptReply::List(replicas), ..]) => Ok(replicas.len()),
        // Envoy replies with the roles of all servers behind it.
        Some([ScriptReply::List(_), ..]) => {
            let reason = "unsupported command ROLE: a proxy replied for its servers".into();
            Err(Error::Refused { reason }.into())
        }
        // The master of before: nobody knows how many replicas the next one has.
        Some(_) => Err(ExchangeError::NotMaster("the server is a replica".into())),
        None => Err(unexpected_reply(role).into()),
    }
}

impl ReplicaSync {
    /// Returns whether replicas have to be waited for at a server without sentinels or a cluster.
    /// If not, one connection is saved.
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
        match connected_replicas(&live).await {
            Ok(connected) => Ok(connected > 0),
            // The address may lead to its master later, which has a replica.
            Err(ExchangeError::NotMaster(_)) => Ok(true),
            // Also something that speaks the protocol but has no roles.
            Err(
                failure @ ExchangeError::Permanent(
                    Error::Refused { .. } | Error::NotPermitted { .. },
                ),
            ) => {
                self.unconfirmed(failure, &Capabilities::default())?;
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Handles a server without ROLE or WAIT, which cannot confirm anything. Only a user who asked
    /// for a number of replicas requires that.
    fn unconfirmed(self, failure: ExchangeError, capabilities: &Capabilities) -> Result<()> {
        let mut error = failure.into_error();
        let (Error::Refused { reason: refusal } | Error::NotPermitted { reason: refusal }) =
            &mut error
        else {
            return Err(error);
        };
        if self != ReplicaSync::All {
            refusal.push_str(" (the setting replica_sync requires ROLE and WAIT)");
            return Err(error);
        }
        capabilities.record_unconfirmed(refusal);
        Ok(())
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
    use redlatch_testkit::Server;

    use super::super::refusing_proxy::redis_of;
    use super::*;
    use crate::Client;

    /// The address may lead to its master later.
    #[tokio::test]
    async fn replica_at_the_address_means_that_replicas_are_waited_for() {
        let server = Server::start();
        let awaits = async || {
            let client = Client::connect(&server.url()).await.unwrap();
            redis_of(&client).topology.awaits_replicas
        };
        assert!(!awaits().await);
        let _: String = server.command(&["REPLICAOF", "127.0.0.1", "1"]);
        assert!(awaits().await);
    }

    #[test]
    fn a_majority_counts_the_master() {
        let needed = |replicas| ReplicaSync::Majority.replicas_awaited(replicas);
        // Of 1, 2, 3, 4, 5 and 6 servers: 1, 2, 2, 3, 3 and 4.
        assert_eq!([0, 1, 2, 3, 4, 5].map(needed), [0, 1, 1, 2, 2, 3]);
    }

    /// A master that becomes a replica behind an acquisition does not confirm it, although no
    /// replica was awaited.
    #[test]
    fn replica_confirms_nothing() {
        let replicas = |count| ScriptReply::List(vec![ScriptReply::Nil; count]);
        let port = || ScriptReply::Integer(6379);
        let replica = [
            "slave".into(),
            "host".into(),
            port(),
            "connect".into(),
            port(),
        ];
        let roles = [
            (vec!["master".into(), port(), replicas(2)], Some(2)),
            (vec!["master".into(), port(), replicas(0)], Some(0)),
            (replica.into(), None),
        ];
        for (role, connected) in roles {
            let counted = replicas_in(&ScriptReply::List(role));
            match connected {
                Some(connected) => assert_eq!(counted.unwrap(), connected),
                None => assert!(matches!(counted, Err(ExchangeError::NotMaster(_)))),
            }
        }
    }

    /// Envoy replies with a list of roles: the server may be a master, and confirms nothing.
    #[test]
    fn roles_of_several_servers_count_as_none() {
        let role = [ScriptReply::from("master"), ScriptReply::Integer(0)];
        let roles = ScriptReply::List(vec![ScriptReply::List(role.into())]);
        assert!(replicas_in(&roles).unwrap_err().lacks_command());
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
