//! Logs a lock that a waiter has been waiting for a long time.

use std::sync::Arc;

use tokio::time::Instant;

use super::AnyLock;
use crate::hold::Hold;
use crate::join::Boxed;
use crate::lease::Expiry;
use crate::log::join_names;
use crate::metrics::Kind;

impl AnyLock {
    /// Reads which owners hold the lock, and logs them with the waiting owner and the time waited since
    /// `since`.
    ///
    /// Boxed: few waiters wait that long.
    pub(crate) fn report(self, waiting: Arc<Hold>, since: Instant) -> Boxed<'static, ()> {
        Box::pin(async move {
            // A standby waits as long as the leader lives.
            if self.kind.spec().metric == Kind::Election {
                return;
            }
            let holders = match self.holders().await {
                Ok(holders) => holders,
                Err(error) => {
                    tracing::debug!(lock = self.kind.object().full_name(), %error, "the holder could not be queried");
                    return;
                }
            };
            if holders.is_empty() {
                // Released just now.
                return;
            }
            let remaining = holders.iter().map(|holder| holder.remaining).max();
            let remaining_ms = remaining
                .and_then(Expiry::duration)
                .map(|left| left.as_millis());
            let client = self.session.id.as_str();
            let is_own = |owner: &str| {
                owner
                    .strip_prefix(client)
                    .is_some_and(|it| it.starts_with(':'))
            };
            let owners = holders.iter().map(|holder| holder.owner.as_str());
            let by_this_client = owners.clone().any(is_own);
            let holder = join_names(owners);
            let (lock, owner) = (self.kind.object().full_name(), &waiting.field);
            let elapsed_ms = since.elapsed().as_millis();
            match by_this_client {
                false => tracing::warn!(
                    lock,
                    %owner,
                    holder,
                    remaining_ms,
                    elapsed_ms,
                    "long wait for a lock"
                ),
                // Perhaps the caller waits for itself.
                true => tracing::warn!(
                    lock,
                    %owner,
                    holder,
                    remaining_ms,
                    elapsed_ms,
                    "long wait for a lock that this client holds for another owner; to acquire it \
                     again in the task that holds it, use Guard::reenter, Owner::scope or the \
                     request's owner setting"
                ),
            }
        })
    }
}
