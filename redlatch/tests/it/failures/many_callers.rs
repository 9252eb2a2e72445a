//! Thousands of callers use a dead, frozen or slow server: each returns within its limit.

use std::pin::Pin;
use std::time::Instant;

use tokio::task::JoinSet;

use crate::common::prelude::*;

/// How much later than its limit a caller may return: the machine may be busy, or pause.
const SCHEDULING: Duration = Duration::from_secs(12);

/// Measures how late the timers of this runtime fire: callers return late by the same amount.
struct Lag {
    worst: Arc<Mutex<Duration>>,
    task: JoinHandle<()>,
}

impl Lag {
    fn measure() -> Lag {
        let worst = Arc::new(Mutex::new(Duration::ZERO));
        let measured = worst.clone();
        let task = tokio::spawn(async move {
            let pause = Duration::from_millis(20);
            loop {
                let begun = Instant::now();
                tokio::time::sleep(pause).await;
                let late = begun.elapsed().saturating_sub(pause);
                let mut worst = measured.lock().unwrap();
                *worst = late.max(*worst);
            }
        });
        Lag { worst, task }
    }

    /// Returns the latest time at which a caller with this limit may return.
    fn allowed(&self, limit: Duration) -> Duration {
        limit + SCHEDULING + 5 * *self.worst.lock().unwrap()
    }
}

impl Drop for Lag {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Maximum number of attempts that one client has in flight to one server.
const MAX_IN_FLIGHT: usize = 512;

type Call = Pin<Box<dyn Future<Output = Result<bool, Error>> + Send>>;

/// Makes a call for the name with this number, with this wait limit. Zero means no waiting.
type Caller = fn(&Client, usize, Duration) -> Call;

/// One caller of each kind.
const KINDS: [(&str, Caller); 4] = [
    ("lock", |client, n, wait| {
        let call = client.lock(&format!("lock-{n}")).try_lock().wait(wait);
        Box::pin(async move { Ok(call.await?.is_some()) })
    }),
    ("fair lock", |client, n, wait| {
        let call = client.fair_lock(&format!("fair-{n}")).try_lock().wait(wait);
        Box::pin(async move { Ok(call.await?.is_some()) })
    }),
    ("semaphore", |client, n, wait| {
        let semaphore = client.semaphore(&format!("semaphore-{n}"));
        let call = semaphore.try_acquire().wait(wait);
        Box::pin(async move { Ok(call.await?.is_some()) })
    }),
    ("expirable semaphore", |client, n, wait| {
        let semaphore = client.expirable_semaphore(&format!("expirable-{n}"));
        let call = semaphore.try_acquire().wait(wait);
        Box::pin(async move { Ok(call.await?.is_some()) })
    }),
];

/// Results of a crowd of callers.
#[derive(Default)]
struct Crowd {
    callers: JoinSet<(Duration, Result<bool, Error>)>,
    slowest: Duration,
    served: usize,
    refused: usize,
    failed: Vec<Error>,
}

impl Crowd {
    fn add(&mut self, call: Call) {
        self.callers.spawn(async move {
            let begun = Instant::now();
            let answer = call.await;
            (begun.elapsed(), answer)
        });
    }

    fn count(&mut self, (took, answer): (Duration, Result<bool, Error>)) {
        self.slowest = self.slowest.max(took);
        match answer {
            Ok(true) => self.served += 1,
            Ok(false) => self.refused += 1,
            Err(error) => self.failed.push(error),
        }
    }

    /// Counts the callers that have returned. Returns how many have not.
    fn pending(&mut self) -> usize {
        while let Some(ended) = self.callers.try_join_next() {
            self.count(ended.unwrap());
        }
        self.callers.len()
    }

    async fn end(mut self) -> Crowd {
        while let Some(ended) = self.callers.join_next().await {
            self.count(ended.unwrap());
        }
        self
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_at_a_frozen_server_fails_with_the_response_timeout() {
    for (kind, call) in KINDS {
        let server = Server::start();
        let timeout = Duration::from_secs(3);
        let client = connect(Client::builder().response_timeout(timeout), &server.url()).await;
        server.freeze();
        let lag = Lag::measure();
        let mut crowd = Crowd::default();
        for n in 0..5000 {
            crowd.add(call(&client, n, Duration::ZERO));
        }
        let crowd = crowd.end().await;
        server.thaw();
        assert_eq!(crowd.failed.len(), 5000, "{kind}");
        for error in &crowd.failed {
            assert!(error.is_transient(), "{kind}: {error}");
        }
        // One response timeout after the other would take ten of them.
        let slowest = crowd.slowest;
        assert!(slowest < lag.allowed(timeout), "{kind}: {slowest:?}");
        within_limit("all are settled", client.flush()).await;
    }
}

/// Callers are repeatedly canceled: those that still waited for their turn have sent nothing and
/// leave nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowds_at_a_frozen_server_leave_no_more_behind_than_was_sent() {
    for (kind, call) in KINDS {
        let server = Server::start();
        let client = connect(long_timeout(), &server.url()).await;
        server.freeze();
        let wait = Duration::from_millis(300);
        let lag = Lag::measure();
        for wave in 0..5 {
            let mut crowd = Crowd::default();
            for n in 0..1000 {
                crowd.add(call(&client, 1000 * wave + n, wait));
            }
            let crowd = crowd.end().await;
            let slowest = crowd.slowest;
            assert!(slowest < lag.allowed(wait), "{kind}: {slowest:?}");
            assert_eq!(crowd.failed.len(), 1000, "{kind}");
            let left = client.status().background;
            assert!(left <= MAX_IN_FLIGHT, "{kind}: {left} left behind");
        }
        server.thaw();
        within_limit("all are settled", client.flush()).await;
        let free = client.lock("afterwards").try_lock().await.unwrap();
        assert!(free.is_some(), "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_of_callers_at_a_dead_server_is_answered_at_its_limit() {
    let mut server = Server::start();
    // So long that only the wait limit explains a timely answer.
    let client = long_timeout();
    let client = client.connect(&server.url()).await.unwrap();
    server.kill();
    let wait = Duration::from_millis(500);
    let lag = Lag::measure();
    let mut crowd = Crowd::default();
    let begun = Instant::now();
    let mut most = 0;
    let mut n = 0;
    // Two thousand per second, as far as the machine can keep up.
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    while begun.elapsed() < Duration::from_secs(3) {
        tick.tick().await;
        for _ in 0..20 {
            let (_, call) = KINDS[n % KINDS.len()];
            crowd.add(call(&client, n, wait));
            n += 1;
        }
        most = most.max(crowd.pending());
    }
    let crowd = crowd.end().await;
    assert_eq!(crowd.failed.len(), n, "{} served", crowd.served);
    // Some attempts may have been sent before the client noticed the end of the connection; of these, those of
    // the semaphore cannot be repeated.
    let expected = |error: &Error| {
        matches!(
            error,
            Error::Unavailable { .. } | Error::OutcomeUnknown { .. }
        )
    };
    for error in &crowd.failed {
        assert!(expected(error), "{error}");
    }
    let slowest = crowd.slowest;
    let allowed = lag.allowed(wait);
    assert!(slowest < allowed, "{slowest:?} of {n}, {most} at once");
    let left = client.status().background;
    assert!(left <= MAX_IN_FLIGHT, "{left} left behind of {n}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_at_a_slow_server_is_answered_at_its_limit() {
    let (_server, proxy) = proxied_server();
    // Callers return at the wait limit, even on a machine that paused for a while.
    let client = connect(long_timeout(), &proxy.url()).await;
    let wait = Duration::from_millis(1500);
    let lag = Lag::measure();
    for (kind, call) in KINDS {
        proxy.delay(Duration::from_millis(200));
        let mut crowd = Crowd::default();
        for n in 0..4000 {
            crowd.add(call(&client, n, wait));
        }
        let crowd = crowd.end().await;
        let slowest = crowd.slowest;
        assert!(slowest < lag.allowed(wait), "{kind}: {slowest:?}");
        let left = client.status().background;
        // Each lock that was granted is released, and each attempt in flight leaves one task that settles it.
        let most = crowd.served + MAX_IN_FLIGHT;
        assert!(left <= most, "{kind}: {left} left behind");
        proxy.delay(Duration::ZERO);
        // So that the next kind is counted alone, and all turns are free for it.
        within_limit("all are settled", client.flush()).await;
    }
}
