//! Passwords that are rotated and tokens that expire, while a client holds locks.

use std::io;
use std::path::PathBuf;

use redlatch::Credentials;

use crate::common::deployments::Rotating;
use crate::common::prelude::*;

async fn connect(rotating: &Rotating, settings: ClientBuilder) -> Client {
    let settings = patient(settings);
    settings.connect(&rotating.server.url()).await.unwrap()
}

/// A file that ends with the test.
struct File(PathBuf);

impl File {
    fn new(text: &str) -> File {
        let file = File(std::env::temp_dir().join(unique("password")));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Feared most: a hold ends at the first reconnection after the rotation, because the client has
/// only the password of before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_live_on_when_the_password_in_a_file_is_rotated() {
    let (rotating, file) = (Rotating::start(), File::new("first\n"));
    let settings = Client::builder().username("app").password_file(&file.0);
    let client = connect(&rotating, settings.watchdog_lease(WATCHDOG)).await;
    let guard = held(&client.lock("held")).await;
    rotating.rotate("second");
    file.write("second\n");
    rotating.end_connections();
    let other = within_limit("acquired", client.lock("other").lock()).await;
    free(other.unwrap()).await;
    let end = tokio::time::Instant::now() + WATCHDOG;
    tokio::time::sleep_until(end).await;
    free(guard).await;
}

/// The provider still has the old token when it is asked for the first time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_is_asked_for_each_connection_and_again_when_refused() {
    let (rotating, asked) = (Rotating::start(), Arc::new(AtomicUsize::new(0)));
    let counted = asked.clone();
    let provider = move || {
        let number = counted.fetch_add(1, Ordering::Relaxed);
        let password = if number == 0 { "expired" } else { "first" };
        async move { io::Result::Ok(Credentials::new(password).username("app")) }
    };
    let client = connect(&rotating, Client::builder().credentials(provider)).await;
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    rotating.end_connections();
    free(held(&client.lock("a")).await).await;
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_connections_log_in_again_before_the_token_ends() {
    let (rotating, asked) = (Rotating::start(), Arc::new(AtomicUsize::new(0)));
    let counted = asked.clone();
    let provider = move || {
        let number = counted.fetch_add(1, Ordering::Relaxed);
        async move {
            // For once the provider fails.
            match number {
                2 => Err(io::Error::other("no answer")),
                _ => Ok(Credentials::new("first")
                    .username("app")
                    .renewed_after(Duration::from_millis(20))),
            }
        }
    };
    let client = connect(&rotating, Client::builder().credentials(provider)).await;
    let ids = || -> Vec<String> {
        let clients: String = rotating.server.command(&["CLIENT", "LIST"]);
        let of_app = clients.lines().filter(|line| line.contains("user=app"));
        of_app
            .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
            .collect()
    };
    let before = ids();
    let again = async || rotating.server.calls("auth") >= 3;
    until("logged in again", again).await;
    free(held(&client.lock("a")).await).await;
    assert_eq!(ids(), before, "on the same connection");
    drop(client);
    until("the connection has ended", async || ids().is_empty()).await;
    // The task that asks has ended, too: it had the last reference.
    let dropped = async || Arc::strong_count(&asked) == 1;
    until("the provider is dropped", dropped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_that_fails_is_an_outage_with_its_reason() {
    let server = Rotating::start().server;
    let settings = || Client::builder().connect_timeout(Duration::from_millis(500));
    let failing =
        settings().credentials(|| async { Err::<Credentials, _>("the metadata service is down") });
    let error = failing.connect(&server.url()).await.unwrap_err();
    assert_matches!(error, Error::Unavailable { .. });
    let said = error.to_string();
    assert!(said.contains("metadata service is down"), "{said}");
    let hanging = settings().credentials(std::future::pending::<io::Result<Credentials>>);
    let error = within_limit("an answer", hanging.connect(&server.url())).await;
    assert_transient(error);
    let empty = settings().credentials(|| async { io::Result::Ok(Credentials::new("")) });
    let error = empty.connect(&server.url()).await.unwrap_err();
    assert_matches!(error, Error::AuthenticationFailed { .. });
    let missing = settings()
        .username("app")
        .password_file("/nowhere/password");
    let error = missing.connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/password"), "{error}");
}
