//! What unit tests with several clients begin with.

use std::time::Duration;

use tokio::task::yield_now;

use crate::{Client, Embedded};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// Returns a store and clients that share it.
pub(crate) fn clients<const N: usize>() -> (Embedded, [Client; N]) {
    let store = Embedded::new();
    let clients = [(); N].map(|()| Client::builder().connect_embedded(&store).unwrap());
    (store, clients)
}

/// Lets all other tasks run as far as they can without time.
pub(crate) async fn run_others() {
    for _ in 0..20 {
        yield_now().await;
    }
}
