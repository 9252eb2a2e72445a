//! A step that replicas have to confirm writes also if it is repeated, because its answer was lost, and has nothing left to do:
//! WAIT counts the replicas that have what was written on its connection, and the first write was on another one. Otherwise
//! it confirms at once what no replica has.

use std::fmt::Debug;
use std::sync::Arc;

use redlatch_testkit::Server;

use super::Step;
use super::differential::lease;
use crate::Client;
use crate::hold::{AcquireParams, HandoffParams, Hold, HoldKind, To};
use crate::metrics::KindMetrics;
use crate::owner::Owner;
use crate::watchdog::renew_holds;

/// A server that no other test uses.
pub(crate) struct Repetitions {
    server: Server,
    pub(crate) client: Client,
}

impl Repetitions {
    pub(crate) async fn new() -> Repetitions {
        let server = Server::start();
        let client = Client::connect(&server.url()).await.unwrap();
        Repetitions { server, client }
    }

    /// Runs two steps, of which the second one has nothing left to do, and checks that it succeeds as the first one and writes.
    pub(crate) async fn assert_written_again<R: Debug + Send>(
        &self,
        [first, second]: [Step<'_, R>; 2],
    ) {
        let run = async |step| {
            let reply = self.client.session.store.run_idempotent(step).await;
            format!("{:?}", reply.unwrap())
        };
        // What a replica gets.
        let writes = || -> u64 {
            let writes = self.server.info("rdb_changes_since_last_save");
            writes.parse().unwrap()
        };
        let reply = run(&first).await;
        let before = writes();
        assert!(!reply.contains("Wait"), "{reply}");
        assert_eq!(run(&second).await, reply);
        assert!(writes() > before, "{reply}");
    }

    /// The same for an acquisition. Its lease is shorter when it is repeated, so that no end has to be moved.
    async fn of_acquisition(&self, kind: Arc<dyn HoldKind>) {
        let field = kind.field(&self.client.session.id, Owner::new());
        let hold = Hold::new(Owner::new(), field, kind, KindMetrics::default());
        let acquire = |units| AcquireParams::without_waiting(&hold, 1, lease(units));
        let steps = [2, 1].map(|units| hold.kind.acquire(acquire(units)));
        self.assert_written_again(steps).await;
    }
}

#[tokio::test]
async fn repeated_acquisitions_are_written_again() {
    let repetitions = Repetitions::new().await;
    let client = &repetitions.client;
    let permits = client.expirable_semaphore("permits");
    permits.try_set_permits(2).await.unwrap();
    let permit = permits.acquire().await.unwrap();
    let fair_semaphore = client.fair_semaphore("fair-semaphore", 4);
    let two = fair_semaphore.acquire_many(2).await.unwrap();
    let kinds: [Arc<dyn HoldKind>; 12] = [
        client.lock("plain").kind,
        client.spin_lock("spin").kind,
        client.fair_lock("fair").kind,
        client.fenced_lock("fenced").kind,
        client.fenced_lock("clock").clock_tokens().kind,
        client.group_lock("group", 1).kind,
        client.read_write_lock("read").read().kind,
        client.read_write_lock("write").write().kind,
        client.fair_read_write_lock("fair-read").read().kind,
        client.fair_read_write_lock("fair-write").write().kind,
        two.handle().kind,
        permit.handle().kind,
    ];
    for kind in kinds {
        repetitions.of_acquisition(kind).await;
    }
}

/// Of tickets, whose end replicas have to confirm.
#[tokio::test]
async fn repeated_handoffs_and_renewals_are_written_again() {
    let repetitions = Repetitions::new().await;
    let client = &repetitions.client;
    let kinds: [Arc<dyn HoldKind>; 4] = [
        client.lock("plain").kind,
        client.fair_lock("fair").kind,
        client.fenced_lock("fenced").kind,
        client.read_write_lock("write").write().kind,
    ];
    for kind in kinds {
        let [from, to] = [(); 2].map(|()| {
            let field = kind.field(&client.session.id, Owner::new());
            Hold::new(Owner::new(), field, kind.clone(), KindMetrics::default())
        });
        let acquire = kind.acquire(AcquireParams::without_waiting(&from, 1, lease(1)));
        let store = &client.session.store;
        store.run_idempotent(&acquire).await.unwrap();
        let handoff = |units| {
            let params = HandoffParams {
                from: &from,
                successor: &to.field,
                lease: lease(units),
                to: To::Ticket,
            };
            kind.handoff(params).unwrap()
        };
        repetitions
            .assert_written_again([handoff(2), handoff(1)])
            .await;
        let renew = |units| renew_holds(kind.renewal(&to).script, Some(lease(units)), &[&to]);
        repetitions.assert_written_again([renew(3), renew(1)]).await;
    }
}
