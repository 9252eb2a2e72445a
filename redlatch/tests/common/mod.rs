//! What the integration tests share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses a part of it"
)]

use std::future::Future;
use std::time::Duration;

use redlatch::{Client, ClientBuilder, Embedded};
use redlatch_testkit::{Server, shared};

/// Longer than anything takes that works, on the slowest machine.
pub const LONG: Duration = Duration::from_secs(60);

/// A watchdog lease that tests do not have to wait for, and that a busy machine does not break.
pub const WATCHDOG: Duration = Duration::from_secs(2);

/// Waits until something holds.
pub async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let begun = std::time::Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < LONG, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Fails instead of hanging.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LONG, work).await {
        Ok(done) => done,
        Err(_) => panic!("never happened: {what}"),
    }
}

/// Somewhere that clients can meet: the same tests run on every store.
pub enum Stand {
    Embedded(Embedded),
    Server(&'static Server),
}

impl Stand {
    pub fn embedded() -> Stand {
        Stand::Embedded(Embedded::new())
    }

    pub fn server() -> Stand {
        Stand::Server(shared())
    }

    pub async fn client(&self) -> Client {
        self.client_with(Client::builder()).await
    }

    pub async fn client_with(&self, settings: ClientBuilder) -> Client {
        match self {
            Stand::Embedded(store) => settings.connect_embedded(store).unwrap(),
            Stand::Server(server) => settings.connect(&server.url()).await.unwrap(),
        }
    }
}

/// Makes a test on every store out of each async function of the name.
#[macro_export]
macro_rules! on_every_store {
    ($($name:ident,)*) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(super::common::Stand::embedded()).await;
            })*
        }
        mod server {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(super::common::Stand::server()).await;
            })*
        }
    };
}
