//! Sections whose hold moves to another task as a ticket, and requests to release a lock.
//!
//! 1. Before a task acquires a lock, it sometimes asks the holder to release it, or revokes its hold.
//! 2. A holder sometimes releases the lock as soon as it is asked.
//! 3. A holder sometimes makes a ticket of its hold, and its section ends. It keeps the text, or puts it into a [`TicketBox`], or
//!    both. Several tasks may get the text. Some tickets are never adopted: the lock is free when their lease ends.
//! 4. A task that adopts a ticket has a section of its own, whose request names the ticket.
//! 5. A task that has the text sometimes renews the ticket, asks for its lock, or releases it
//!    instead of adopting it. These requests are no sections of the lock, but name the ticket, too.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlatch::kind::Revocable;
use redlatch::{Error, Guard, HasTicket, IntoTicketError, Lock};
use tokio::time::{sleep, timeout};

use super::section::{ReleaseMode, SectionRunner, error_name};
use crate::clock::nanos;
use crate::history::{EventKind, Mode};
use crate::processes::lock;
use crate::random::Random;

/// The longest time after which an adoption, or the making of a ticket, is canceled, if it is.
const CANCEL_TIME: Duration = Duration::from_millis(50);

/// The texts of tickets that tasks of a run pass to each other, each with the name of its lock.
#[derive(Debug, Clone, Default)]
pub struct TicketBox(Arc<Mutex<Vec<(String, String)>>>);

impl TicketBox {
    fn put(&self, name: &str, text: String) {
        lock(&self.0).push((name.to_owned(), text));
    }

    /// Returns the text of the oldest ticket of this lock. If it `stays`, other tasks get it, too.
    fn take(&self, name: &str, stays: bool) -> Option<String> {
        let mut all = lock(&self.0);
        let at = all.iter().position(|(other, _)| other == name)?;
        Some(match stays {
            true => all[at].1.clone(),
            false => all.remove(at).1,
        })
    }
}

/// What a task needs to use tickets and to ask for locks. Its random numbers are its own, so that those of the
/// sections do not depend on it.
#[derive(Debug, Clone)]
pub(crate) struct TicketUse {
    pub(super) tickets: TicketBox,
    pub(super) random: Random,
    pub(super) lease: Duration,
}

/// Runs one critical section of a lock, and those of the tickets that this task makes and adopts again.
pub(super) async fn run_section<K: HasTicket + Revocable>(
    lock: &Lock<K>,
    acquiring: impl Future<Output = Result<Option<Guard<Lock<K>>>, Error>>,
    token: fn(&Guard<Lock<K>>) -> Option<u64>,
    runner: &mut SectionRunner,
    time: Duration,
) -> Result<(), Error> {
    let name = lock.name();
    ask_sometimes(lock, runner).await;
    let Some(mut ticket_use) = runner.ticket_use() else {
        let guard = runner.request(name, Mode::Exclusive, acquiring).await?;
        let token = guard.as_ref().and_then(token);
        return runner.hold_and_release(guard, token, time).await;
    };
    let random = &mut ticket_use.random;
    let stays = random.one_in(3);
    let mut guard = match ticket_use.tickets.take(name, stays) {
        Some(text) => use_ticket(lock, text, runner, random, ticket_use.lease).await?,
        None => runner.request(name, Mode::Exclusive, acquiring).await?,
    };
    while let Some(held) = guard.take() {
        let token = token(&held);
        runner.report_acquired(token, Some(held.hold_count()));
        let is_lost = match random.one_in(3) {
            true => runner.watch_until(&held, held.asked(), time).await,
            false => runner.watch(&held, time).await,
        };
        if is_lost || !random.one_in(4) {
            return runner.release(held, token, ReleaseMode::Unlock).await;
        }
        let text = match make_ticket(held, runner, ticket_use.lease, random).await {
            Ok(Some(text)) => text,
            Ok(None) => return Ok(()),
            Err(failed) => {
                let failure = failed.error().clone();
                let Some(held) = failed.into_guard() else {
                    let error = Some(error_name(&failure));
                    runner.report(EventKind::Released { error });
                    return Err(failure);
                };
                // It must be as valid as before.
                runner.watch(&held, time).await;
                return runner.release(held, token, ReleaseMode::Unlock).await;
            }
        };
        match random.below(4) {
            // No task has the text.
            0 => {}
            1 => ticket_use.tickets.put(name, text),
            way => {
                if way == 2 {
                    ticket_use.tickets.put(name, text.clone());
                }
                sleep(random.between(Duration::ZERO, CANCEL_TIME)).await;
                guard = use_ticket(lock, text, runner, random, ticket_use.lease).await?;
            }
        }
    }
    Ok(())
}

/// Sometimes asks the holder of a lock to release it, or revokes its hold.
pub(super) async fn ask_sometimes<K: Revocable>(lock: &Lock<K>, runner: &mut SectionRunner) {
    let Some(mut ticket_use) = runner.ticket_use() else {
        return;
    };
    if ticket_use.random.one_in(4) {
        ask(lock, runner, &mut ticket_use.random, ticket_use.lease).await;
    }
}

/// Asks the holder of a lock to release it, or revokes its hold.
async fn ask<K: Revocable>(
    lock: &Lock<K>,
    runner: &mut SectionRunner,
    random: &mut Random,
    lease: Duration,
) {
    let limit = match random.below(3) {
        0 => None,
        _ => Some(random.between(Duration::ZERO, lease * 3 / 2)),
    };
    let asking = async {
        let asked = match limit {
            None => lock.ask().await,
            Some(limit) => lock.revoke(limit).await,
        };
        asked.map(|owner| owner.map(|_| ()))
    };
    let mode = Mode::Ask(limit.map(nanos));
    // An error is recorded with the request.
    if let Ok(Some(())) = runner.request(lock.name(), mode, asking).await {
        runner.report_acquired(None, None);
    }
}

/// Adopts a ticket or releases it. Sometimes asks for its lock, or renews it, before.
async fn use_ticket<K: HasTicket + Revocable>(
    lock: &Lock<K>,
    text: String,
    runner: &mut SectionRunner,
    random: &mut Random,
    lease: Duration,
) -> Result<Option<Guard<Lock<K>>>, Error> {
    if random.one_in(4) {
        ask(lock, runner, random, lease).await;
    }
    let ticket = text.parse()?;
    if random.one_in(3) {
        // In whole milliseconds, as in the store.
        let most = usize::try_from(lease.as_millis()).unwrap_or_default();
        let lease = Duration::from_millis(1 + random.below(most) as u64);
        let mode = Mode::RenewTicket(nanos(lease));
        manage_ticket(
            lock,
            &text,
            mode,
            lock.renew_ticket(&ticket, lease),
            runner,
            random,
        )
        .await;
        // The lock is free when the new lease ends.
        if random.one_in(3) {
            return Ok(None);
        }
    }
    if random.one_in(6) {
        let releasing = lock.unlock_ticket(&ticket);
        manage_ticket(lock, &text, Mode::ReleaseTicket, releasing, runner, random).await;
        return Ok(None);
    }
    adopt(lock, text, runner, random).await
}

/// Renews or releases a ticket, sometimes only until a random moment. An error, also a refusal, is
/// recorded with the request.
async fn manage_ticket<K: HasTicket>(
    lock: &Lock<K>,
    text: &str,
    mode: Mode,
    managing: impl Future<Output = Result<(), Error>>,
    runner: &mut SectionRunner,
    random: &mut Random,
) {
    let limit = match random.one_in(6) {
        true => random.between(Duration::ZERO, CANCEL_TIME),
        false => Duration::MAX,
    };
    let managing = async {
        match timeout(limit, managing).await {
            Ok(managed) => managed.map(Some),
            Err(_) => Ok(None),
        }
    };
    let text = Some(text.to_owned());
    let managing = runner.request_with_ticket(lock.name(), text, mode, managing);
    if let Ok(Some(())) = managing.await {
        runner.report_acquired(None, None);
    }
}

/// Adopts a ticket, sometimes only until a random moment. `None`: it was refused or canceled.
async fn adopt<K: HasTicket>(
    lock: &Lock<K>,
    text: String,
    runner: &mut SectionRunner,
    random: &mut Random,
) -> Result<Option<Guard<Lock<K>>>, Error> {
    let ticket = text.parse()?;
    let adopting = async {
        match lock.adopt(&ticket).await {
            Err(Error::TicketRefused { .. } | Error::Asked { .. }) => Ok(None),
            answer => answer.map(Some),
        }
    };
    let is_canceled = random.one_in(4);
    let limit = random.between(Duration::ZERO, CANCEL_TIME);
    let adopting = async {
        match is_canceled {
            true => timeout(limit, adopting).await.unwrap_or(Ok(None)),
            false => adopting.await,
        }
    };
    runner
        .request_with_ticket(lock.name(), Some(text), Mode::Exclusive, adopting)
        .await
}

/// Makes a ticket with a lease of up to `longest`, sometimes only until a random moment. Returns its text. `None`: it was
/// canceled, and the lock is released in the background.
async fn make_ticket<K: HasTicket>(
    guard: Guard<Lock<K>>,
    runner: &SectionRunner,
    longest: Duration,
    random: &mut Random,
) -> Result<Option<String>, IntoTicketError<Guard<Lock<K>>>> {
    let third = usize::try_from(longest.as_millis() / 3).unwrap_or_default();
    let lease = match random.below(2) {
        0 => longest,
        // Ends before most adoptions. In whole milliseconds, as in the store.
        _ => Duration::from_millis(1 + random.below(third) as u64),
    };
    let limit = match random.one_in(6) {
        true => random.between(Duration::ZERO, CANCEL_TIME),
        false => Duration::MAX,
    };
    runner.report(EventKind::MakingTicket {
        lease: nanos(lease),
    });
    let Ok(made) = timeout(limit, guard.into_ticket_for(lease)).await else {
        let error = Some("Canceled".to_owned());
        runner.report(EventKind::Released { error });
        return Ok(None);
    };
    let text = made?.to_string();
    runner.report(EventKind::BecameTicket { text: text.clone() });
    Ok(Some(text))
}
