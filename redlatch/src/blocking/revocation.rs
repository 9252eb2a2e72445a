//! Asking the holder of a lock to release it, for threads.

use std::time::Duration;

use super::forward::forward;
use super::{Acquirable, ExpirableSemaphore, Guard, Lock};
use crate::error::Result;
use crate::kind::{Askable, Revocable};
use crate::{OwnerId, PermitId};

forward! { [<K: Revocable> Lock<K>] "crate::Lock" {
    run ask() -> Option<OwnerId>;
    run revoke(limit: Duration) -> Option<OwnerId>;
    run released_by(owner: OwnerId, wait: Duration) -> bool;
} }

forward! { [ExpirableSemaphore] "crate::ExpirableSemaphore" {
    run ask(id: PermitId) -> bool;
    run revoke(id: PermitId, limit: Duration) -> bool;
    run released(id: PermitId, wait: Duration) -> bool;
} }

impl<K: Askable> Guard<crate::Lock<K>>
where
    crate::Lock<K>: Acquirable,
{
    /// Blocks until another client asks for the lock, at most this long: [`crate::Guard::asked`]. Returns whether it has asked.
    ///
    /// ```
    /// # fn main() -> redlatch::Result<()> {
    /// use std::time::Duration;
    ///
    /// let lock = redlatch::blocking::Client::embedded()?.lock("reindex");
    /// let guard = lock.lock().block()?;
    /// assert!(!guard.asked(Duration::from_millis(1))?);
    /// lock.ask()?; // in another process
    /// assert!(guard.asked(Duration::from_secs(1))?);
    /// guard.unlock()
    /// # }
    /// ```
    pub fn asked(&self, wait: Duration) -> Result<bool> {
        self.worker.completes_within(wait, self.inner.asked())
    }
}
