//! Tickets, for threads.

use std::time::Duration;

use super::Lock;
use super::forward::forward;
use super::request::Guard;
use crate::error::Result;
use crate::{HasTicket, IntoTicketError, Ticket};

impl<K: HasTicket> Guard<crate::Lock<K>> {
    /// Makes a ticket of the hold: [`crate::Guard::into_ticket`].
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redlatch::blocking::Client::embedded()?; // or connect("redis://127.0.0.1")?
    /// let lock = client.lock("deploy");
    /// let text = lock.lock().block()?.into_ticket()?.to_string();
    /// // … in another process:
    /// let guard = lock.adopt(&text.parse()?)?;
    /// guard.unlock()?;
    /// # Ok(()) }
    /// ```
    pub fn into_ticket(self) -> Result<Ticket, IntoTicketError<Self>> {
        self.finish_or_keep(crate::Guard::into_ticket)
    }

    /// The same with this lease: [`crate::Guard::into_ticket_for`].
    pub fn into_ticket_for(self, lease: Duration) -> Result<Ticket, IntoTicketError<Self>> {
        self.finish_or_keep(move |guard| guard.into_ticket_for(lease))
    }
}

impl<K: HasTicket> Lock<K> {
    /// Continues the hold of a ticket: [`crate::Lock::adopt`]. The owner is not the thread. To
    /// acquire the lock again use [`Guard::reenter`]; a request of the thread would wait for this
    /// guard.
    pub fn adopt(&self, ticket: &Ticket) -> Result<Guard<crate::Lock<K>>> {
        let (lock, ticket) = (self.inner.clone(), ticket.clone());
        let inner = self
            .worker
            .run(async move { lock.adopt(&ticket).await })??;
        Ok(Guard::new(inner, self.worker.clone()))
    }

    /// Extends the lease of a ticket: [`crate::Lock::renew_ticket`].
    pub fn renew_ticket(&self, ticket: &Ticket, lease: Duration) -> Result<()> {
        let (lock, ticket) = (self.inner.clone(), ticket.clone());
        self.worker
            .run(async move { lock.renew_ticket(&ticket, lease).await })?
    }
}

forward! { [<K: HasTicket> Lock<K>] "crate::Lock" {
    run unlock_ticket(ticket: &Ticket) -> ();
} }
