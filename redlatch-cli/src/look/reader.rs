//! Looks at all objects in the store.

use std::time::{Duration, Instant};

use redlatch::{Client, Error};
use tokio::sync::watch;

use super::Look;
use crate::exit::Failure;
use crate::store;
use crate::store::args::StoreArgs;

/// The longest that an answer takes without an outage. Behind an outage another server may answer,
/// and a look that began before it would be a mixture of both.
const LONGEST_ANSWER: Duration = Duration::from_millis(500);

pub(crate) struct Reader {
    store_args: StoreArgs,
    pattern: String,
    /// `None` until it has connected.
    client: watch::Sender<Option<Client>>,
}

impl Reader {
    pub(crate) fn new(store_args: StoreArgs, pattern: String) -> Reader {
        let client = watch::Sender::new(None);
        Reader {
            store_args,
            pattern,
            client,
        }
    }

    /// Returns its client, as soon as it has connected.
    pub(crate) fn client(&self) -> watch::Receiver<Option<Client>> {
        self.client.subscribe()
    }

    /// Looks at all objects. After an outage in between it looks again, but only once: the store
    /// may always be slow.
    pub(crate) async fn look(&mut self) -> Result<Look, Failure> {
        let connected = self.client.borrow().clone();
        let client = match connected {
            Some(client) => client,
            None => {
                let client = store::connect(&self.store_args, Client::builder()).await?;
                self.client.send_replace(Some(client.clone()));
                client
            }
        };
        let (look, longest_answer) = look_once(&client, &self.pattern).await?;
        match longest_answer > LONGEST_ANSWER {
            true => Ok(look_once(&client, &self.pattern).await?.0),
            false => Ok(look),
        }
    }
}

/// Returns the pause behind a look. Looks that take long are at most half of the time, for the sake
/// of the store.
pub(crate) fn rest(interval: Duration, took: Duration) -> Duration {
    interval.saturating_sub(took).max(took)
}

/// Returns what it has found, and how long an answer took at most.
async fn look_once(client: &Client, pattern: &str) -> Result<(Look, Duration), Failure> {
    let mut look = Look::new(Instant::now());
    let mut listing = client.list(pattern);
    let mut longest_answer = Duration::ZERO;
    loop {
        let asked = Instant::now();
        let Some(found) = listing.next().await? else {
            break;
        };
        longest_answer = longest_answer.max(asked.elapsed());
        look.add(found);
    }
    let graph = match client.wait_graph().await {
        Err(Error::NotPermitted { .. }) => {
            look.waits_refused = true;
            Default::default()
        }
        graph => graph?,
    };
    look.complete(graph);
    Ok((look, longest_answer))
}
