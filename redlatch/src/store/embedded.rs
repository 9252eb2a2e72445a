//! The embedded store: runs the rules in process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::{Answer, Confirmation, Sent, SharedEar};
use crate::error::Result;
use crate::space::Space;
use crate::step::Step;

/// A store without a server: the same steps, keys and messages, in this process.
///
/// Clients with clones of one `Embedded` share its keys, like processes that share a server. Time is
/// tokio's, so tests can pause and advance it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let server = redlatch::Embedded::new();
/// let one = redlatch::Client::builder().connect_embedded(&server)?;
/// let two = redlatch::Client::builder().connect_embedded(&server)?;
/// let guard = one.lock("a").lock().await?;
/// assert!(two.lock("a").try_lock().await?.is_none());
/// # guard.unlock().await }
/// ```
#[derive(Clone, Default)]
pub struct Embedded(Arc<Mutex<Shared>>);

#[derive(Default)]
struct Shared {
    space: Space,
    ears: HashMap<String, HashMap<u64, SharedEar>>,
    attached: u64,
    #[cfg(test)]
    trouble: trouble::Trouble,
}

impl Embedded {
    /// Creates an empty store.
    pub fn new() -> Embedded {
        Embedded::default()
    }

    pub(crate) fn attach(&self, ear: SharedEar) -> Attached {
        let mut shared = self.shared();
        shared.attached += 1;
        Attached {
            id: shared.attached,
            store: self.clone(),
            ear,
        }
    }

    fn shared(&self) -> std::sync::MutexGuard<'_, Shared> {
        // Nothing under this lock can panic half-way, so a poisoned lock is consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedded").finish_non_exhaustive()
    }
}

/// One client's connection to an embedded store.
pub(crate) struct Attached {
    id: u64,
    store: Embedded,
    ear: SharedEar,
}

impl Attached {
    pub(crate) fn address(&self) -> String {
        format!("embedded:{:p}", Arc::as_ptr(&self.store.0))
    }

    pub(crate) fn run<S: Step>(&self, step: &S, sent: &Sent) -> Result<Answer<S::Reply>> {
        #[cfg(test)]
        if let Some(answer) = self.run_in_trouble(step, sent) {
            return answer;
        }
        sent.set();
        sent.answered();
        self.apply(step)
    }

    /// The embedded store answers immediately. A unit test can set another timeout.
    #[allow(clippy::unused_self, reason = "unit tests set it")]
    pub(crate) fn response_timeout(&self) -> Duration {
        #[cfg(test)]
        if let Some(timeout) = self.store.shared().trouble.response_timeout {
            return timeout;
        }
        Duration::MAX
    }

    fn apply<S: Step>(&self, step: &S) -> Result<Answer<S::Reply>> {
        let sent = Instant::now();
        let (reply, woken) = {
            let mut shared = self.store.shared();
            let reply = step.apply(&mut shared.space, sent)?;
            (reply, shared.published())
        };
        for (ear, channel) in woken {
            ear.heard(&channel);
        }
        Ok(Answer {
            reply,
            sent,
            repeated: false,
            confirmation: Confirmation::NOT_NEEDED,
            server: Default::default(),
        })
    }

    pub(crate) fn subscribe(&self, channel: &str) {
        let mut shared = self.store.shared();
        let ears = shared.ears.entry(channel.to_owned()).or_default();
        ears.insert(self.id, self.ear.clone());
        let listeners = ears.len();
        shared.space.listening(channel, listeners);
    }

    pub(crate) fn unsubscribe(&self, channel: &str) {
        let shared = &mut *self.store.shared();
        if let Some(ears) = shared.ears.get_mut(channel) {
            ears.remove(&self.id);
            shared.space.listening(channel, ears.len());
            if ears.is_empty() {
                shared.ears.remove(channel);
            }
        }
    }

    pub(crate) fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys = self.store.shared().space.keys(Instant::now());
        keys.retain(|key| super::glob::matches(pattern.as_bytes(), key.as_bytes()));
        keys
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let shared = &mut *self.store.shared();
        shared.ears.retain(|channel, ears| {
            if ears.remove(&self.id).is_some() {
                shared.space.listening(channel, ears.len());
            }
            !ears.is_empty()
        });
    }
}

#[cfg(test)]
pub(crate) mod trouble;

impl Shared {
    /// Returns the subscribers of the messages just published. They are called after the lock is released,
    /// because they may access the store at once.
    fn published(&mut self) -> Vec<(SharedEar, String)> {
        let mut woken = Vec::new();
        for message in self.space.take_published() {
            if let Some(ears) = self.ears.get(&message.channel) {
                let heard = |ear: &SharedEar| (ear.clone(), message.channel.clone());
                woken.extend(ears.values().map(heard));
            }
        }
        woken
    }
}
