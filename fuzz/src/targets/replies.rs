//! Replies to the scripts of all primitives, and what servers say about themselves.

use std::time::Duration;

use redlatch::job::Cron;
use redlatch::{Acquirable, Acquire, Client, HasLease, PermitId, Result, Slot};

use super::server::{Replies, in_process};

const LEASE: Duration = Duration::from_secs(5);
const WAIT: Duration = Duration::from_secs(10);

/// Runs the operation that the first line names, with the replies of the other lines.
pub fn run(data: &[u8]) {
    run_operation(data, |client, operation| async move {
        match &*operation {
            "fair" => acquire(client.fair_lock("x").lock()).await,
            "fenced" => {
                let lock = client.fenced_lock("x");
                let guard = lock.lock().await?;
                let _ = guard.token();
                guard.unlock().await?;
                lock.advance_token(7).await?;
                lock.delete_token().await.map(drop)
            }
            "read" => acquire(client.read_write_lock("x").read().lock()).await,
            "write" => acquire(client.read_write_lock("x").write().lock()).await,
            "spin" => acquire(client.spin_lock("x").lock()).await,
            "group" => acquire(client.group_lock("x", "value").lock()).await,
            "multi" => acquire(client.multi_lock("x", ["a", "b"]).lock()).await,
            "semaphore" => {
                let semaphore = client.semaphore("x");
                drop(semaphore.acquire_many(2).await?);
                semaphore.available().await?;
                semaphore.drain().await?;
                semaphore.release_if_exists(2).await?;
                semaphore.delete().await.map(drop)
            }
            "permits" => permits(&client).await,
            "latch" => {
                let latch = client.count_down_latch("x");
                latch.try_set_count(2).await?;
                latch.count_down().await?;
                latch.try_wait().wait(WAIT).await?;
                latch.count().await.map(drop)
            }
            "election" => {
                let election = client.election("x");
                election.leader().await?;
                election.candidates().await?;
                let leadership = election.campaign("me").await?;
                let _ = leadership.epoch();
                leadership.proclaim("again").await?;
                leadership.resign().await
            }
            "observe" => {
                let mut observer = client.election("x").observe();
                while let Ok(leader) = tokio::time::timeout(WAIT, observer.next()).await {
                    let _ = format!("{:?}", leader?);
                }
                Ok(())
            }
            "once" => {
                let once = client.once("x", Slot::per(LEASE));
                once.earlier_run().await?;
                match once.begin().await? {
                    Ok(run) => run.finish("done").await.map(drop),
                    Err(earlier) => {
                        let _ = format!("{earlier:?}");
                        Ok(())
                    }
                }
            }
            "job" => {
                let _ = format!("{:?}", client.job("x").history().await?);
                let job = client.job("x").schedule(Cron::parse("* * * * * *")?);
                let work = async |run: redlatch::job::Run| drop(format!("{run:?}"));
                job.run_until(tokio::time::sleep(WAIT), work).await
            }
            "inspect" => {
                let lock = client.lock("x");
                let _ = format!("{:?}", lock.holders().await?);
                lock.remaining_lease().await?;
                lock.force_unlock().await.map(drop)
            }
            "lease" => {
                let guard = client.lock("x").lock().lease(LEASE).await?;
                guard.lost().await;
                Ok(())
            }
            _ => acquire(client.lock("x").lock()).await,
        }
    });
}

async fn permits(client: &Client) -> Result<()> {
    let semaphore = client.expirable_semaphore("x");
    let _ = format!("{:?}", semaphore.held_permits().await?);
    acquire(semaphore.acquire_many(2)).await?;
    let id = PermitId::from_bytes([7; PermitId::BYTES]);
    semaphore.lease_of(id).await?;
    semaphore.update_lease(id, LEASE).await?;
    semaphore.try_release(id).await.map(drop)
}

/// Acquires, holds until the watchdog has renewed or lost the lease, and releases.
async fn acquire<R: Acquirable + HasLease>(request: Acquire<R>) -> Result<()> {
    let guard = request.await?;
    let _ = tokio::time::timeout(WAIT, guard.lost()).await;
    guard.unlock().await
}

/// Runs an operation of a client with the replies of an input. Its errors are expected: only a panic is a finding.
pub(super) fn run_operation<F>(
    data: &[u8],
    operation: impl FnOnce(Client, String) -> F + Send + 'static,
) where
    F: Future<Output = Result<()>> + Send,
{
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let mut lines = text.lines();
    let name = lines.next().unwrap_or_default().to_owned();
    // Operations that read the replies of the handshake, and where they connect to.
    let connecting = match &*name {
        "connect" => Some("redis://a"),
        "sentinel" => Some("redis+sentinel://a,b,c/master"),
        "cluster" => Some("redis+cluster://a,b"),
        _ => None,
    };
    let replies = Replies::new(lines, connecting.is_some());
    in_process(replies, async move {
        let client = Client::connect(connecting.unwrap_or("redis://a")).await?;
        let result = operation(client.clone(), name).await;
        client.flush().await;
        result
    });
}
