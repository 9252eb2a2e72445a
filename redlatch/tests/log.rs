//! What the log tells (alone in its program: a log is everybody's).

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{WATCHDOG, soon, until};
use redlatch::Client;
use redlatch_testkit::Server;

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

/// F26: dropping a guard never blocks, and says in the log when the lock could not be given back.
/// The log also tells the life of a lock, with name and owner, and never a password.
#[test]
fn a_dropped_guard_that_cannot_be_given_back_is_in_the_log() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut server = Server::start_with(&["--requirepass", "sesame"]);
        let url = format!("redis://:sesame@127.0.0.1:{}", server.port());
        let client = Client::builder()
            .watchdog(WATCHDOG)
            .response_timeout(Duration::from_millis(300))
            .connect(&url)
            .await
            .unwrap();
        let guard = client.lock("journal").lock().await.unwrap();
        let owner = guard.owner_id().to_owned();
        assert!(
            client
                .lock("journal")
                .try_lock()
                .wait(Duration::from_millis(5))
                .await
                .unwrap()
                .is_none()
        );
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
        let guard = lock.lock().lease(Duration::from_millis(500)).await.unwrap();
        let lost = client
            .lock("lost")
            .lock()
            .lease(Duration::from_millis(500))
            .await
            .unwrap();
        server.kill();
        let begun = Instant::now();
        drop(guard);
        let took = begun.elapsed();
        assert!(
            took < Duration::from_millis(250),
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
