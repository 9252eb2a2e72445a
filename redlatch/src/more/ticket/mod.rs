//! Tickets: the hold of a lock moves to another process, as a text. Redisson has nothing like it.
//!
//! The hold of a ticket has an owner of its own, which is derived from the text. Its steps are those of every lock:
//! [`handoff`](crate::locks::reentrant::handoff::handoff) makes and adopts it, and it is renewed and released like any
//! other owner. `session/handoff/ticket` describes the protocol and what must not happen.

mod text;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use self::text::{Ticket, TicketKind};
use self::text::{invalid, is_ticket};
use crate::error::{Error, Result, TicketRefusal};
use crate::hold::{Handoff, HandoffParams, Hold, ReleaseParams, Renewed, TicketHold, To};
use crate::lease::Lease;
use crate::locks::fair::Fair;
use crate::locks::fenced::Fenced;
use crate::locks::read_write::Write;
use crate::locks::spin::Spin;
use crate::locks::{Guard, HeldLock, Lock, OwnedKind, Reentrant};
use crate::owner::Owner;
use crate::session::{RequestedHold, Terms};
use crate::store::{Delivery, Progress};
use crate::watchdog::renew_holds;

/// A kind of lock whose holds can become [tickets](Ticket): re-entrant, fair, fenced and spin locks, and the write side of a
/// read-write lock that is not fair.
///
/// The others cannot:
///
/// - Readers, the writer of a fair read-write lock, permits of a fair semaphore, and values of a group: several owners share a
///   hash, whose expiry is not the lease of one of them.
/// - Permits have an id already, which another process may use
///   ([`ExpirableSemaphore::release`](crate::ExpirableSemaphore::release)); permits of a semaphore have no owner.
/// - Multi-locks and RedLocks: their members cannot be moved in one step.
/// - Leaderships: their term names the leader, and observers rely on it.
#[expect(private_bounds, reason = "sealed: only this crate implements it")]
pub trait HasTicket: OwnedKind + TicketRules {}

impl<K: OwnedKind + TicketRules> HasTicket for K {}

/// What a kind of lock puts into a ticket.
pub(crate) trait TicketRules {
    const TICKET_KIND: TicketKind;

    /// Whether each acquisition has a fencing token.
    const HAS_TOKEN: bool = matches!(Self::TICKET_KIND, TicketKind::Fenced);
}

macro_rules! ticket_rules {
    ($($kind:ty: $ticket:ident),*) => {
        $(impl TicketRules for $kind {
            const TICKET_KIND: TicketKind = TicketKind::$ticket;
        })*
    };
}

ticket_rules!(Reentrant: Lock, Fair: Fair, Spin: Spin, Write: Write, Fenced: Fenced);

/// A guard that did not become a ticket: [`Guard::into_ticket`]. If it is dropped, the lock is released, as by dropping the guard.
#[derive(Debug)]
pub struct IntoTicketError<G>(Box<(Option<G>, Error)>);

impl<G> IntoTicketError<G> {
    /// Returns why it did not become a ticket.
    pub fn error(&self) -> &Error {
        &self.0.1
    }

    /// Returns why it did not become a ticket, and drops the guard.
    pub fn into_error(self) -> Error {
        self.0.1
    }

    /// Returns the guard, which is as valid as before. `None` if the lock was lost, or if it is unknown whether the store has
    /// made the ticket; the lock is then released in the background.
    pub fn into_guard(self) -> Option<G> {
        self.0.0
    }

    /// Converts the guard.
    #[cfg(feature = "blocking")]
    pub(crate) fn map<H>(self, convert: impl FnOnce(G) -> H) -> IntoTicketError<H> {
        let (guard, error) = *self.0;
        IntoTicketError::new(guard.map(convert), error)
    }

    pub(crate) fn new(guard: Option<G>, error: Error) -> IntoTicketError<G> {
        IntoTicketError(Box::new((guard, error)))
    }
}

// There is no `From` for `Error`: it would be the only one, and async blocks whose error type is inferred from `?` would
// not compile any more.
impl<G> std::fmt::Display for IntoTicketError<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error().fmt(f)
    }
}

impl<G: std::fmt::Debug> std::error::Error for IntoTicketError<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error().source()
    }
}

/// Tickets: the hold moves to another process.
impl<K: HasTicket> Guard<Lock<K>> {
    /// Makes a [`Ticket`] of the hold. This process does not renew or release it any more: another one adopts the ticket
    /// ([`Lock::adopt`]), or the lock is free when the lease ends. The lease is that of the
    /// [watchdog](crate::ClientBuilder::watchdog_lease), or the rest of a fixed one. Limits of the hold
    /// ([`Acquire::at_most`](crate::Acquire::at_most)) end with the guard.
    ///
    /// In the store, the ticket takes the place of the owner. So nothing that this process has sent, or sends later, affects the
    /// hold of the ticket, and the lock is not free in between.
    ///
    /// # Errors
    ///
    /// With the guard ([`IntoTicketError::into_guard`]): [`Error::NotMovable`] if its owner has other guards of the lock,
    /// also reads, or holds it for a [minimum time](crate::Acquire::at_least); [`Error::Asked`] if another client has asked for the
    /// lock ([`Lock::ask`], [`Lock::revoke`]); an error of the store, if nothing was sent.
    ///
    /// Without it: [`Error::Lost`]; [`Error::NotReplicated`]; an error of the store. The lock is then released in the background.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the lock is released in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.fenced_lock("deploy");
    /// let guard = lock.lock().await?;
    /// let token = guard.token();
    /// let text = guard.into_ticket().await?.to_string();
    /// // … in another process:
    /// let ticket = text.parse()?;
    /// let guard = lock.adopt(&ticket).await?;
    /// assert_eq!(guard.token(), token);
    /// assert!(lock.adopt(&ticket).await.is_err(), "it has been used");
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn into_ticket(self) -> Result<Ticket, IntoTicketError<Self>> {
        let (terms, now) = (self.terms(), Instant::now());
        let lease = match terms.renewed {
            true => self.hold_ref().session.watchdog.lease(),
            // Without the limits of the guard, which end with it.
            false => Lease::from_remaining(self.hold_ref().hold.state().period.left(now)),
        };
        self.into_ticket_with(lease).await
    }

    /// The same with this lease, 1 ms to [`MAX_LEASE`](crate::MAX_LEASE). It replaces that of the guard, and may be shorter.
    ///
    /// # Errors
    ///
    /// As [`Guard::into_ticket`], and [`Error::InvalidLease`], with the guard.
    ///
    /// # Cancel safety
    ///
    /// As [`Guard::into_ticket`].
    pub async fn into_ticket_for(self, lease: Duration) -> Result<Ticket, IntoTicketError<Self>> {
        match Lease::new(lease) {
            Ok(lease) => self.into_ticket_with(lease).await,
            Err(error) => Err(IntoTicketError::new(Some(self), error)),
        }
    }

    async fn into_ticket_with(self, lease: Lease) -> Result<Ticket, IntoTicketError<Self>> {
        let (token, lock) = (K::HAS_TOKEN.then_some(self.held.token), self.handle());
        let ticket = Ticket::new(K::TICKET_KIND, self.name(), token, lease);
        let field = || lock.kind.object().field(ticket.owner_id().into());
        let kind = lock.erased().kind;
        let moved = match lock.session.hold_ref(Owner::anonymous(), field, &kind) {
            Ok(hold_ref) => self.move_to_ticket(hold_ref, lease).await,
            Err(error) => Err((Some(self), error)),
        };
        match moved {
            Ok(()) => Ok(ticket),
            Err((guard, error)) => Err(IntoTicketError::new(guard, error)),
        }
    }
}

/// Tickets: a hold that another process has moved.
impl<K: HasTicket> Lock<K> {
    /// Continues the hold of a ticket, with its fencing token if it has one. The watchdog renews it, and the guard reports its
    /// loss, as if this process had acquired the lock. A ticket can be adopted once.
    ///
    /// The owner is a new one, also in a scope ([`Owner::scope`]). To acquire the lock again use [`Guard::reenter`]. The client
    /// must have the same [prefix](crate::ClientBuilder::prefix) as the one that made the ticket.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTicket`]: it is the ticket of another name or kind. [`Error::TicketRefused`]: the store does not have
    /// the hold of this ticket, because the ticket has been used or its lease has ended. [`Error::Asked`]: another client has
    /// asked for the lock since the ticket was made ([`Lock::ask`], [`Lock::revoke`]); it can be released with
    /// [`Lock::unlock_ticket`]. Otherwise as [`Lock::is_locked`], and [`Error::NotReplicated`]. After an error other than a refusal, the ticket can be adopted again, by this
    /// client at once, by others as soon as this one has settled it in the background.
    ///
    /// # Cancel safety
    ///
    /// When dropped, the ticket gets the hold back in the background, with the lease with which it was made. A longer lease
    /// of [`Lock::renew_ticket`] is lost then. If the adopter was revoked meanwhile, the ticket is, with that limit.
    pub async fn adopt(&self, ticket: &Ticket) -> Result<Guard<Lock<K>>> {
        let (session, of_ticket) = (&self.session, self.ticket_hold(ticket)?);
        session.background.remember_runtime()?;
        self.kind.check()?;
        let mismatch = || invalid("it is the ticket of another kind of lock");
        if ticket.token().is_some() != K::HAS_TOKEN {
            return Err(mismatch());
        }
        let token = ticket.token().unwrap_or(0);
        // Never an owner of the caller. It could hold the lock otherwise when a used ticket is adopted, and the step would take
        // that for a repetition.
        let adopter = session.adopter(&of_ticket.object, &of_ticket.field);
        let adopter = adopter.unwrap_or_else(Owner::anonymous);
        let hold_ref = self.erased().hold_ref(adopter)?;
        let hold = &hold_ref.hold;
        let terms = session.terms(None, false);
        let step = of_ticket.kind.handoff(HandoffParams {
            from: &of_ticket,
            successor: &hold.field,
            lease: terms.lease,
            to: To::Adopter,
        });
        let step = step.ok_or_else(mismatch)?;
        let adopts = Box::new(TicketHold {
            field: of_ticket.field.clone(),
            lease: ticket.store_lease(),
        });
        let requested = [RequestedHold::without_waiting(
            &*hold.kind,
            &hold_ref,
            terms,
        )];
        let progress = Progress::default();
        let begin = move |_: &[u32]| {
            hold.state().adopts = Some(adopts);
            step
        };
        let blocked = |adopted: &Handoff| (*adopted == Handoff::NotHeld).then_some(0);
        let adopting = session.try_acquire(&requested, None, &progress, begin, blocked);
        match adopting.await {
            Ok(Handoff::Done { .. }) => {}
            // Another task of this client has adopted it at the same time.
            Ok(_) | Err(Error::AlreadyHeld { .. }) => return Err(self.refusal().await),
            Err(error) => return Err(error),
        }
        tracing::debug!(lock = self.kind.object().full_name(), owner = %hold.field, ticket = %of_ticket.field,
            "adopted a ticket");
        let terms = Terms {
            reentrant: self.reentrant,
            ..terms
        };
        let held = HeldLock::new(hold_ref, terms, self.kind.clone(), token);
        Ok(Guard { held })
    }

    /// Extends the lease of a ticket: it ends after this time at the earliest, 1 ms to [`MAX_LEASE`](crate::MAX_LEASE).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTicket`], [`Error::TicketRefused`], and [`Error::NotReplicated`] as [`Lock::adopt`]; [`Error::InvalidLease`].
    /// [`Error::Asked`]: the ticket was revoked ([`Lock::revoke`]), and its limit ends before this time. Then the lease
    /// ends at the limit, or later if it was longer before the request. After an error of the store, the lease may have been
    /// extended.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the lease may have been extended.
    pub async fn renew_ticket(&self, ticket: &Ticket, lease: Duration) -> Result<()> {
        let (of_ticket, lease) = (self.ticket_hold(ticket)?, Lease::new(lease)?);
        let script = of_ticket.kind.renewal(&of_ticket).script;
        let step = renew_holds(script, Some(lease), &[&of_ticket]);
        let (store, progress) = (&self.session.store, Progress::default());
        // A ticket may not be renewed again before a failover, so replicas have to confirm it, as an acquisition.
        let delivery = Delivery::acquisition(true);
        let answer = store.run(&step, None, delivery, &progress).await?;
        if !answer.reply.iter().all(|renewed| renewed.is_held()) {
            return Err(self.refusal().await);
        }
        if let Some(confirmation) = answer.confirmation {
            confirmation.confirmed(&progress).await?;
        }
        match answer.reply.first() {
            Some(&Renewed::Asked { limit: Some(left) }) if left < lease.duration() => {
                Err(Error::Asked {
                    name: self.name().to_owned(),
                    left: Some(left),
                })
            }
            _ => Ok(()),
        }
    }

    /// Releases the hold of a ticket, and wakes a waiter. As every release, it does not wait for replicas.
    ///
    /// # Errors
    ///
    /// As [`Lock::adopt`]. After an error of the store, the lock may have been released. If the release was sent again after
    /// the connection broke, a ticket that was not valid any more counts as released.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it started, it continues in the background.
    pub async fn unlock_ticket(&self, ticket: &Ticket) -> Result<()> {
        let (of_ticket, lock) = (self.ticket_hold(ticket)?, self.clone());
        let object = of_ticket.object.clone();
        let releasing = async move {
            let store = &lock.session.store;
            lock.session
                .waiting
                .record_release(of_ticket.object.channel());
            let step = of_ticket.kind.release(ReleaseParams {
                hold: &of_ticket,
                keep: 0,
                lease: None,
            });
            let progress = Progress::default();
            let answer = store.run(&step, None, Delivery::IMMEDIATE, &progress);
            let answer = answer.await?;
            if !answer.reply {
                // There may be no message.
                lock.session.waiting.wake(of_ticket.object.channel());
            }
            match answer.reply || progress.was_repeated() {
                true => Ok(()),
                false => Err(lock.refusal().await),
            }
        };
        self.session.run_to_completion(&object, releasing).await
    }

    /// Returns the hold of a ticket as the store has it, if the ticket is one of this lock.
    fn ticket_hold(&self, ticket: &Ticket) -> Result<Arc<Hold>> {
        let object = self.valid_kind()?.object();
        if ticket.kind() != K::TICKET_KIND {
            let kind = ticket.kind();
            return Err(invalid(format!(
                "it is the ticket of a lock of the kind `{kind}`"
            )));
        }
        if ticket.name() != object.name() {
            return Err(invalid(format!(
                "it is the ticket of the lock {:?}",
                ticket.name()
            )));
        }
        let metrics = self.session.metrics();
        let metrics = metrics.of(self.kind.spec().metric, Some(object.name()));
        let field = object.field(ticket.owner_id().into());
        let hold = Hold::new(Owner::anonymous(), field, self.kind.clone(), metrics);
        Ok(Arc::new(hold))
    }

    /// Returns the error for a ticket whose hold the store does not have.
    async fn refusal(&self) -> Error {
        let reason = match self.holder().await {
            Ok(None) => TicketRefusal::Free,
            Ok(Some(holder)) if is_ticket(&holder.owner) => TicketRefusal::OtherTicket,
            Ok(Some(holder)) => TicketRefusal::HeldBy {
                owner: holder.owner.into(),
            },
            Err(error) => return error,
        };
        Error::TicketRefused {
            name: self.name().to_owned(),
            reason,
        }
    }
}
