//! Renewals: their order, their pauses and their size.

use super::waiting::monitor;
use crate::common::prelude::*;

/// A renewal that is chosen before a re-entry with a longer lease, and sent after it.
#[tokio::test(start_paused = true)]
async fn renewal_never_shortens_a_longer_lease() {
    let second = Duration::from_secs(1);
    for yields in 0..8 {
        let store = Embedded::new();
        let client = Client::builder().connect_embedded(&store).unwrap();
        let due = tokio::time::Instant::now() + 10 * second;
        let outer = held(&client.lock("a")).await;
        for _ in 0..yields {
            // When both timers are due, the one that was registered first fires first: the
            // watchdog's or that of the re-entry.
            tokio::task::yield_now().await;
        }
        let entering = tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            let inner = outer.reenter().lease(600 * second).await.unwrap();
            (outer, inner)
        });
        let (outer, inner) = entering.await.unwrap();
        tokio::time::sleep(60 * second).await;
        assert!(inner.is_valid() && outer.is_valid());
        let left = client.lock("a").remaining_lease().await.unwrap();
        let is_kept = left > Some(Expiry::In(500 * second));
        assert!(is_kept, "{left:?} left in the store");
    }
}

/// Failed renewals are retried after a pause, not as fast as the machine can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_renewals_are_retried_with_pauses() {
    let mut server = Server::start();
    let watchdog = Duration::from_secs(3);
    let client = connect(Client::builder().watchdog_lease(watchdog), &server.url()).await;
    let lock = client.lock("a");
    let guard = retry_if_late(|| lock.lock()).await;
    server.kill();
    // Counts the connections at the address where the server was.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", server.port()))
        .await
        .unwrap();
    let counting = async {
        let mut tries = 0;
        loop {
            drop(listener.accept().await.unwrap());
            tries += 1;
            // Two seconds of retries, one every tenth of a second.
            assert!(tries < 200, "renewed without a pause");
        }
    };
    tokio::select! {
        () = guard.lost() => {}
        never = counting => never,
    }
}

/// The number of permits in a batch is limited, so that no renewal script blocks the server for
/// long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_permits_are_renewed_in_small_batches() {
    let server = Server::start();
    let client = renewing();
    let client = client.connect(&server.url()).await.unwrap();
    let semaphore = client.expirable_semaphore("a");
    semaphore.set_permits(5000).await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..5 {
        guards.push(semaphore.acquire_many(500).await.unwrap());
    }
    let commands = monitor(&server);
    let scripts = || {
        let commands = commands.lock().unwrap();
        let renewals = commands.iter().filter(|line| line.contains("\"EVALSHA\""));
        renewals.cloned().collect::<Vec<_>>()
    };
    for guard in &guards {
        let id = guard.ids()[0].to_string();
        let renewed = async || scripts().iter().any(|line| line.contains(&id));
        until("it is renewed", renewed).await;
    }
    // At most two guards in one script: 1000 ids of 32 digits.
    let longest = scripts().iter().map(String::len).max();
    assert!(longest < Some(40_000), "{longest:?}");
}

/// A thousand waiters that are dropped at the same time leave the queue without delaying the
/// holder's renewal. (Their cost on the server is quadratic in their number.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_leaving_waiters_do_not_delay_renewal() {
    const CROWD: usize = 1000;
    let (server, client) = server_and_client().await;
    let lock = client.fair_lock("a");
    let guard = lock.lock().lease(10 * LONG).await.unwrap();
    let crowd = spawn_each(0..CROWD, |_| lock.lock());
    let queue = "redisson_lock_queue:{a}";
    until("all wait", async || {
        tokio::time::sleep(Duration::from_millis(200)).await;
        server.command::<i64>(&["LLEN", queue]) == CROWD as i64
    })
    .await;
    let scripts = || server.calls("evalsha:");
    let before = scripts();
    for waiter in &crowd {
        waiter.abort();
    }
    for waiter in crowd {
        let _ = waiter.await;
    }
    // Stands for a renewal: counts how often another request gets through while they leave.
    let other = client.lock("b");
    let inspections = AtomicUsize::new(0);
    let inspecting = async {
        loop {
            other.is_locked().await.unwrap();
            inspections.fetch_add(1, Ordering::SeqCst);
        }
    };
    tokio::select! {
        biased;
        () = within_limit("settled", client.flush()) => {}
        () = inspecting => {}
    }
    assert_eq!(server.command::<i64>(&["EXISTS", queue]), 0);
    // Counted here: a monitor would have to receive all commands that the scripts call, millions of
    // them.
    let inspections = inspections.into_inner();
    let left = scripts() - before - inspections as u64;
    // Some waiters were just asking.
    assert!(left >= CROWD as u64, "only {left} have left");
    // The last one may have been answered after all waiters had left.
    let between = inspections.saturating_sub(1);
    assert!(between >= 5, "only {between} times: they leave all at once");
    free(guard).await;
}
