//! What the log tells (alone in its program: a log is everybody's).

mod common;

use std::future::IntoFuture;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use common::{LONG, SHORT, WATCHDOG, in_time, soon, until};
use redlatch::{Client, Error};
use redlatch_testkit::{Proxy, Server};

/// A log that can be looked into.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

/// The log of this program, which is begun with the first look at it.
fn log() -> Log {
    static LOG: LazyLock<Log> = LazyLock::new(|| {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_global_default(subscriber).unwrap();
        log
    });
    LOG.clone()
}

/// Permits that nobody gives back any more are in the log, unless the caller was told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_that_may_be_lost_are_in_the_log() {
    let log = log();
    let warned = |name: &str, what: &str| {
        let said = log.text();
        let words = ["WARN", name, what, "permits=2"];
        let about = |line: &str| words.iter().all(|word| line.contains(word));
        said.lines().any(about)
    };
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let direct = common::client(&server).await;
    let [hasty, client] = [Duration::from_millis(300), LONG]
        .map(|timeout| Client::builder().response_timeout(timeout));
    let hasty = hasty.connect(&proxy.url()).await.unwrap();
    let client = client.connect(&proxy.url()).await.unwrap();
    let set = async |client: &Client, name: &str| {
        let same = direct.semaphore(name);
        same.try_set_permits(9).await.unwrap();
        // Teaches the scripts: what is not answered is the step itself.
        same.acquire().await.unwrap().release().await.unwrap();
        // And this one is connected: no answer to that is lost.
        let semaphore = client.semaphore(name);
        in_time(|| semaphore.available()).await;
        semaphore
    };
    let cut = || {
        proxy.cut();
        proxy.swallow_replies(false);
    };

    // Who was told that there is no answer, and then the connection breaks.
    let semaphore = set(&hasty, "late-and-cut").await;
    proxy.swallow_replies(true);
    let error = semaphore.acquire_many(2).await.unwrap_err();
    assert!(matches!(error, Error::ResponseTimeout { .. }), "{error}");
    cut();
    soon("settled", hasty.settled()).await;
    assert!(warned("late-and-cut", "may have been taken"));

    // Who does not ask any more.
    let semaphore = set(&client, "dropped-and-cut").await;
    proxy.swallow_replies(true);
    let acquiring = tokio::spawn(semaphore.acquire_many(2).into_future());
    proxy.wait_until_swallowed();
    acquiring.abort();
    until("in the background", || async {
        client.status().background > 0
    })
    .await;
    cut();
    soon("settled", client.settled()).await;
    assert!(warned("dropped-and-cut", "may have been taken"));

    // The same when giving back.
    let semaphore = set(&client, "given-and-cut").await;
    let permits = semaphore.acquire_many(2).await.unwrap();
    proxy.swallow_replies(true);
    let releasing = tokio::spawn(permits.release());
    proxy.wait_until_swallowed();
    releasing.abort();
    until("in the background", || async {
        client.status().background > 0
    })
    .await;
    cut();
    soon("settled", client.settled()).await;
    assert!(warned("given-and-cut", "may not have been given back"));

    // Who hears it itself needs no log.
    let semaphore = set(&client, "told").await;
    proxy.swallow_replies(true);
    let acquiring = tokio::spawn(semaphore.acquire_many(2).into_future());
    proxy.wait_until_swallowed();
    cut();
    let error = acquiring.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
    assert!(!warned("told", ""));
}

/// The end of a runtime is the end of what was to be heard out in it.
#[test]
fn permits_that_a_runtime_takes_with_it_are_in_the_log() {
    let log = log();
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = Client::connect(&proxy.url()).await.unwrap();
        let semaphore = client.semaphore("ended");
        semaphore.try_set_permits(9).await.unwrap();
        semaphore.acquire().await.unwrap().release().await.unwrap();
        proxy.swallow_replies(true);
        let acquiring = tokio::spawn(semaphore.acquire().into_future());
        proxy.wait_until_swallowed();
        acquiring.abort();
        until("in the background", || async {
            client.status().background > 0
        })
        .await;
    });
    drop(runtime);
    let said = log.text();
    let warned = said.lines().any(|line| {
        line.contains("WARN") && line.contains("ended") && line.contains("may have been taken")
    });
    assert!(warned, "{said}");
}

/// F26: dropping a guard never blocks, and says in the log when the lock could not be given back.
/// The log also tells the life of a lock, with name and owner, and never a password.
#[test]
fn a_dropped_guard_that_cannot_be_given_back_is_in_the_log() {
    let log = log();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut server = Server::start_with(&["--requirepass", "sesame"]);
        let url = format!("redis://:sesame@127.0.0.1:{}", server.port());
        let client = Client::builder()
            .watchdog(WATCHDOG)
            .response_timeout(SHORT)
            .connect(&url)
            .await
            .unwrap();
        let guard = client.lock("journal").lock().await.unwrap();
        let owner = guard.owner_id().to_owned();
        let (lock, wait) = (client.lock("journal"), Duration::from_millis(5));
        let limited = in_time(|| lock.try_lock().wait(wait)).await;
        assert!(limited.is_none());
        until("renewed", || async { log.text().contains("renewed") }).await;
        guard.unlock().await.unwrap();
        let said = log.text();
        for word in [
            "acquire",
            "acquired",
            "waiting",
            "not obtained",
            "renewed",
            "released",
        ] {
            assert!(said.contains(word), "{word} is missing in\n{said}");
        }
        assert!(said.contains("journal") && said.contains(&owner), "{said}");

        let lock = client.lock("left");
        let guard = lock.lock().lease(SHORT).await.unwrap();
        let brief = client.lock("lost");
        let lost = in_time(|| brief.lock().lease(Duration::from_millis(500))).await;
        server.kill();
        let begun = Instant::now();
        drop(guard);
        let took = begun.elapsed();
        assert!(
            took < SHORT - Duration::from_secs(1),
            "dropping blocked for {took:?}"
        );
        soon("given up", client.settled()).await;
        soon("lost", lost.lost()).await;
    });
    let said = log.text();
    let warned = said.lines().any(|line| {
        line.contains("WARN") && line.contains("could not be given back") && line.contains("left")
    });
    assert!(warned, "{said}");
    let lost = said
        .lines()
        .any(|line| line.contains("WARN") && line.contains("lost"));
    assert!(lost, "{said}");
    assert!(!said.contains("sesame"), "{said}");
}
