//! How many commands a client sends while its tasks contend for the permits of one semaphore.

use redlatch::Result;

use crate::common::prelude::*;

const PERMITS: u32 = 4;
const TASKS: usize = 16;
const PAIRS_PER_TASK: usize = 200;

/// Returns the commands for each acquisition and release. `pair` acquires a permit and releases it.
async fn commands_per_pair<S, F>(server: &Server, semaphore: S, pair: fn(S) -> F) -> f64
where
    S: Clone + Send + 'static,
    F: Future<Output = Result<()>> + Send + 'static,
{
    // From here on, the server knows the scripts.
    pair(semaphore.clone()).await.unwrap();
    let mut monitor = Monitor::start(server);
    let tasks = [(); TASKS].map(|()| {
        let semaphore = semaphore.clone();
        tokio::spawn(async move {
            for _ in 0..PAIRS_PER_TASK {
                pair(semaphore.clone()).await.unwrap();
            }
        })
    });
    for task in tasks {
        task.await.unwrap();
    }
    monitor.count_sent(server) as f64 / (TASKS * PAIRS_PER_TASK) as f64
}

async fn pair(semaphore: Semaphore) -> Result<()> {
    let permit = semaphore.acquire().await?;
    tokio::task::yield_now().await;
    permit.release().await
}

async fn expirable_pair(semaphore: ExpirableSemaphore) -> Result<()> {
    let permit = semaphore.acquire().await?;
    tokio::task::yield_now().await;
    permit.release().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_pass_from_task_to_task_without_commands() {
    let server = Server::start();
    for (hand_over, limit) in [(true, 0.0..1.0), (false, 1.5..f64::MAX)] {
        // Otherwise steps of several tasks would be one command.
        let builder = Client::builder().local_hand_over(hand_over).batching(false);
        let client = builder.connect(&server.url()).await.unwrap();
        let semaphore = client.semaphore(&format!("a {hand_over}"));
        let expirable = client.expirable_semaphore(&format!("b {hand_over}"));
        assert!(semaphore.try_set_permits(PERMITS).await.unwrap());
        assert!(expirable.try_set_permits(PERMITS).await.unwrap());
        // Permits pass on for some time, in which a paused machine does little. So a measurement may be repeated.
        let mut tries = 0;
        let commands = loop {
            let commands = [
                commands_per_pair(&server, semaphore.clone(), pair).await,
                commands_per_pair(&server, expirable.clone(), expirable_pair).await,
            ];
            println!("hand-over {hand_over}: {commands:.3?} commands per pair");
            tries += 1;
            if commands.iter().all(|each| limit.contains(each)) || tries == 5 {
                break commands;
            }
        };
        let is_limited = commands.iter().all(|each| limit.contains(each));
        assert!(is_limited, "{commands:?}");
        client.flush().await;
        let available = (semaphore.available().await, expirable.available().await);
        assert_eq!(available.0.unwrap(), i64::from(PERMITS));
        assert_eq!(available.1.unwrap(), i64::from(PERMITS));
    }
}
