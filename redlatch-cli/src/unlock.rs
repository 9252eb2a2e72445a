//! `redlatch unlock`: asks the holder of a lock to release it, or releases the lock by force or
//! with a ticket.

use std::time::Duration;

use redlatch::inspect::{Holder, ObjectKind, ObjectState};
use redlatch::kind::Revocable;
use redlatch::{Client, Lock, PermitId};

use crate::args::change::Unlock;
use crate::exit::{self, Failure};
use crate::output::stderr::{stderr, warning};
use crate::output::stdout;
use crate::run::ticket;
use crate::store::args::StoreArgs;
use crate::{duration, store, text};

pub(crate) async fn unlock(store_args: &StoreArgs, unlock: &Unlock) -> Result<u8, Failure> {
    let asks = unlock.ask || unlock.revoke.is_some();
    let name = match (&unlock.name, &unlock.ticket) {
        (Some(_), Some(_)) if !unlock.force && !asks => {
            return Err(Failure::usage(
                "use either a ticket without NAME, or NAME with --ask, --revoke or --force",
            ));
        }
        (Some(name), _) => name,
        (None, ticket) => {
            let ticket = ticket.as_deref().unwrap_or_default();
            return ticket::unlock(store_args, ticket).await;
        }
    };
    if !unlock.force && !asks {
        return Err(Failure::usage(
            "unlocking takes the lock from a holder that may still be working, and that continues until it \
             detects the loss, concurrently with the next holder; to confirm, use --force (`redlatch show` \
             shows the holder); to let the holder release it, use --ask or --revoke",
        ));
    }
    store::check_name(name).await?;
    let client = store::connect(store_args, Client::builder()).await?;
    if asks {
        return ask(&client, name, unlock).await;
    }
    stdout::lines([force_unlock(&client, name, None).await?]).await
}

/// Asks the holder of a lock or permit to release it. With --wait, waits until it has.
async fn ask(client: &Client, name: &str, unlock: &Unlock) -> Result<u8, Failure> {
    if let Some(permit) = unlock.permit {
        return ask_for_permit(client, name, permit, unlock).await;
    }
    let state = client.inspect(name).await?;
    let holder = state.iter().flat_map(ObjectState::holders).next();
    match &state {
        Some(
            ObjectState::ReadWriteLock { writer: None, .. }
            | ObjectState::FairReadWriteLock { writer: None, .. },
        ) => Err(Failure::wrong_kind(format!(
            "{name}: readers cannot be asked: others would take their place"
        ))),
        Some(ObjectState::ReadWriteLock { .. }) => {
            ask_holder(&client.read_write_lock(name).write(), holder, unlock).await
        }
        Some(ObjectState::FairReadWriteLock { .. }) => {
            ask_holder(&client.fair_read_write_lock(name).write(), holder, unlock).await
        }
        // Locks of the other kinds have the same data.
        Some(ObjectState::Lock { .. }) | None => {
            ask_holder(&client.lock(name), holder, unlock).await
        }
        Some(ObjectState::ExpirableSemaphore { .. }) => Err(Failure::wrong_kind(format!(
            "{name}: a semaphore has several holders; name a permit with --permit (`redlatch show` \
             lists them)"
        ))),
        Some(state) => Err(Failure::wrong_kind(format!(
            "{name}: the holder of {} cannot be asked",
            text::with_article(&state.kind().to_string())
        ))),
    }
}

/// Asks the holder of a permit to release it.
async fn ask_for_permit(
    client: &Client,
    name: &str,
    permit: PermitId,
    unlock: &Unlock,
) -> Result<u8, Failure> {
    let semaphore = client.expirable_semaphore(name);
    let asked = match unlock.revoke {
        Some(limit) => semaphore.revoke(permit, limit).await?,
        None => semaphore.ask(permit).await?,
    };
    if !asked {
        return stdout::lines([format!("{name}: permit {permit} was not held")]).await;
    }
    let limit = limit(unlock);
    let written = stdout::lines([format!("{name}: asked for permit {permit}{limit}")]).await?;
    let Some(wait) = unlock.wait else {
        return Ok(written);
    };
    report(name, semaphore.released(permit, wait).await?, wait).await
}

/// Returns what --revoke means for the holder, as the end of a sentence.
fn limit(unlock: &Unlock) -> String {
    unlock.revoke.map_or(String::new(), |limit| {
        // Redisson and earlier versions continue to renew it.
        format!(
            "; a holder that knows requests loses it after {}",
            duration::short(limit)
        )
    })
}

/// Reports whether the holder has released it within --wait.
async fn report(name: &str, released: bool, wait: Duration) -> Result<u8, Failure> {
    if released {
        return stdout::lines([format!("{name}: released")]).await;
    }
    stderr!("{name}: not released within {}", duration::short(wait));
    Ok(exit::NOT_RELEASED)
}

/// Asks the holder to release the lock. `known`: the holder that the store named before.
async fn ask_holder<K: Revocable>(
    lock: &Lock<K>,
    known: Option<&Holder>,
    unlock: &Unlock,
) -> Result<u8, Failure> {
    let shown = lock.name();
    let asked = match unlock.revoke {
        Some(limit) => lock.revoke(limit).await?,
        None => lock.ask().await?,
    };
    let Some(owner) = asked else {
        return stdout::lines([format!("{shown}: was not locked")]).await;
    };
    let limit = limit(unlock);
    // Another owner may have acquired it since.
    let known = known.filter(|holder| holder.owner == owner);
    let asked = text::owner(&owner, known.and_then(|holder| holder.registered.as_ref()));
    let written = stdout::lines([format!("{shown}: asked {asked}{limit}")]).await?;
    if owner.as_str().starts_with("ticket-") {
        warning!(
            "{shown}: it is a ticket, which no process holds now; none can adopt it any more, and `redlatch unlock` with the ticket releases it"
        );
    }
    let Some(wait) = unlock.wait else {
        return Ok(written);
    };
    report(shown, lock.released_by(owner, wait).await?, wait).await
}

/// Unlocks a lock by force, whatever its kind. Returns what it did, as a sentence. With
/// `confirmed`, does nothing if an owner holds the lock that is not one of those.
pub(crate) async fn force_unlock(
    client: &Client,
    name: &str,
    confirmed: Option<&[String]>,
) -> Result<String, Failure> {
    let state = client.inspect(name).await?;
    let holders = state.iter().flat_map(ObjectState::holders);
    let is_confirmed = |holder: &Holder| {
        confirmed.is_none_or(|owners| owners.iter().any(|owner| *owner == holder.owner.as_str()))
    };
    if !holders.into_iter().all(is_confirmed) {
        return Ok(format!("{name}: not unlocked: another owner holds it now"));
    }
    let unlocked = match state {
        None => false,
        // The next waiter has been notified; if it does not respond, others skip it. Nothing to do.
        Some(state) if state.holders().is_empty() && !state.queue().is_empty() => {
            let waiting = match state.queue().len() {
                1 => "1 waits".to_owned(),
                n => format!("{n} wait"),
            };
            return Ok(format!("{name}: not held; {waiting} for it"));
        }
        // Its waiters are notified one by one, each on its own channel.
        Some(state) if state.kind() == ObjectKind::FairLock => {
            client.fair_lock(name).force_unlock().await?
        }
        Some(ObjectState::Lock { .. }) => client.lock(name).force_unlock().await?,
        Some(ObjectState::ReadWriteLock { writer: None, .. }) => {
            client.read_write_lock(name).read().force_unlock().await?
        }
        Some(ObjectState::ReadWriteLock { .. }) => {
            client.read_write_lock(name).write().force_unlock().await?
        }
        Some(ObjectState::FairReadWriteLock { writer: None, .. }) => {
            client
                .fair_read_write_lock(name)
                .read()
                .force_unlock()
                .await?
        }
        Some(ObjectState::FairReadWriteLock { .. }) => {
            let lock = client.fair_read_write_lock(name);
            // First what the writer also reads: while it holds, that serves no waiter.
            let readers = lock.read().force_unlock().await?;
            lock.write().force_unlock().await? || readers
        }
        Some(state) => {
            let kind = text::with_article(&state.kind().to_string());
            let why = match state {
                ObjectState::ExpirableSemaphore { .. } | ObjectState::FairSemaphore { .. } => {
                    "; its permits become available when their leases end"
                }
                _ => "",
            };
            return Err(Failure::wrong_kind(format!(
                "{name}: {kind} cannot be unlocked{why}"
            )));
        }
    };
    let what = match unlocked {
        true => "unlocked",
        false => "was not locked",
    };
    Ok(format!("{name}: {what}"))
}
