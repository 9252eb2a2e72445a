//! The lock or permit, of any kind, that `redlatch run` holds while CMD runs.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redlatch::inspect::ObjectState;
use redlatch::kind::{OwnedKind, Revocable};
use redlatch::{
    Acquire, Client, Error, FairLock, FencedLock, Guard, HasLease, HasMinimum, Leadership, Lock,
    Loss, MultiLock, PermitId, TryAcquire,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::args::run::Run;
use crate::output::stderr::note;
use crate::store::WaitLimits;

/// Default lease that the watchdog renews.
pub(crate) const DEFAULT_WATCHDOG_LEASE: Duration = Duration::from_secs(30);

pub(crate) struct HeldLock {
    guard: Box<dyn AnyGuard>,
    names: Vec<String>,
    /// The owner as the store records it, or the permit's id.
    owner: String,
    /// Its fencing token, and the variable of CMD for it.
    token: Option<(&'static str, u64)>,
    /// Completes when another client asks for the lock, if it can.
    asked: BoxFuture<'static, ()>,
}

pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A guard with its type erased.
trait AnyGuard {
    /// Completes when the hold is lost; returns the reason.
    fn lost(&self) -> BoxFuture<'_, Loss>;
    fn is_valid(&self) -> bool;
    fn unlock(self: Box<Self>) -> BoxFuture<'static, redlatch::Result<()>>;
}

fn reason(error: &Error) -> Loss {
    match error {
        Error::Lost { reason, .. } => *reason,
        _ => Loss::NotHeld,
    }
}

impl<R: HasLease> AnyGuard for Guard<R> {
    fn lost(&self) -> BoxFuture<'_, Loss> {
        Box::pin(async {
            // `run` returns only when the hold is lost, because `pending` never completes.
            let Err(lost) = self.run(pending::<Infallible>()).await;
            reason(&lost)
        })
    }

    fn is_valid(&self) -> bool {
        Guard::is_valid(self)
    }

    fn unlock(self: Box<Self>) -> BoxFuture<'static, redlatch::Result<()>> {
        Box::pin(Guard::unlock(*self))
    }
}

/// What the parent of this process holds for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OfParent {
    Held,
    /// Another client asks for it.
    Asked,
    /// The parent has closed its end of a pipe, also because it has died.
    Ended,
}

impl AnyGuard for watch::Receiver<OfParent> {
    fn lost(&self) -> BoxFuture<'_, Loss> {
        let mut state = self.clone();
        Box::pin(async move {
            // It fails only without a sender, which the thread drops at the end.
            let _ = state.wait_for(|state| *state == OfParent::Ended).await;
            Loss::NotHeld
        })
    }

    fn is_valid(&self) -> bool {
        *self.borrow() != OfParent::Ended
    }

    fn unlock(self: Box<Self>) -> BoxFuture<'static, redlatch::Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

impl AnyGuard for Arc<Leadership> {
    fn lost(&self) -> BoxFuture<'_, Loss> {
        Box::pin(async {
            let Err(lost) = self.run(pending::<Infallible>()).await;
            reason(&lost)
        })
    }

    fn is_valid(&self) -> bool {
        Leadership::is_valid(self)
    }

    fn unlock(self: Box<Self>) -> BoxFuture<'static, redlatch::Result<()>> {
        Box::pin(async {
            match Arc::into_inner(*self) {
                Some(leadership) => leadership.resign().await,
                // Dropped elsewhere, which resigns.
                None => Ok(()),
            }
        })
    }
}

pub(super) fn fenced_lock(client: &Client, name: &str, clock_tokens: bool) -> FencedLock {
    let lock = client.fenced_lock(name);
    match clock_tokens {
        true => lock.clock_tokens(),
        false => lock,
    }
}

impl HeldLock {
    /// Waits for the lock or permit that `run` requests. Returns `None` if it was not acquired
    /// within the wait limit, or immediately with `--no-wait`.
    pub(crate) async fn acquire(
        client: &Client,
        limits: &WaitLimits,
        run: &Run,
    ) -> redlatch::Result<Option<HeldLock>> {
        let kind = run.kind;
        let [name] = run.names.as_slice() else {
            return acquire_multi_lock(client, limits, run).await;
        };
        if let Some(permits) = kind.permits {
            return acquire_permit(client, name, permits, limits, run).await;
        }
        if kind.fenced {
            let lock = fenced_lock(client, name, run.clock_tokens);
            let requests = kept(&lock, run);
            let guard = request(requests, limits, run).await?;
            return Ok(guard.map(|guard| {
                let token = guard.token();
                HeldLock::from_revocable(guard, Some(token))
            }));
        }
        if kind.fair {
            return acquire_lock(kept(&fair_lock(client, name, run), run), limits, run).await;
        }
        if kind.read {
            let lock = client.read_write_lock(name).read();
            let guard = request((lock.lock(), lock.try_lock()), limits, run).await?;
            return Ok(guard.map(|guard| HeldLock::from_guard(guard, None)));
        }
        if kind.write {
            let lock = client.read_write_lock(name).write();
            return acquire_lock((lock.lock(), lock.try_lock()), limits, run).await;
        }
        if kind.spin {
            return acquire_lock(kept(&client.spin_lock(name), run), limits, run).await;
        }
        acquire_lock(kept(&client.lock(name), run), limits, run).await
    }

    /// Returns what a guard of one lock holds, with its fencing token, if it has one.
    pub(crate) fn from_guard<K: OwnedKind>(guard: Guard<Lock<K>>, token: Option<u64>) -> HeldLock {
        HeldLock {
            owner: guard.owner_id().into(),
            names: vec![guard.name().to_owned()],
            guard: Box::new(guard),
            token: token.map(|token| ("REDLATCH_FENCING_TOKEN", token)),
            asked: Box::pin(pending()),
        }
    }

    /// The same for a lock whose holder can be asked to release it.
    pub(crate) fn from_revocable<K: Revocable>(
        guard: Guard<Lock<K>>,
        token: Option<u64>,
    ) -> HeldLock {
        let asked = Box::pin(guard.asked());
        HeldLock {
            asked,
            ..HeldLock::from_guard(guard, token)
        }
    }

    /// Returns what the leader of an election holds. Releasing it resigns.
    pub(crate) fn from_leadership(name: &str, leadership: Arc<Leadership>) -> HeldLock {
        HeldLock {
            owner: leadership.owner_id().to_string(),
            names: vec![name.to_owned()],
            token: Some(("REDLATCH_EPOCH", leadership.epoch())),
            asked: Box::pin(leadership.asked()),
            guard: Box::new(leadership),
        }
    }

    /// Returns what the parent of this process holds.
    pub(crate) fn of_parent(name: String, state: watch::Receiver<OfParent>) -> HeldLock {
        let mut asked = state.clone();
        HeldLock {
            // That of the parent is not known here.
            owner: String::new(),
            names: vec![name],
            guard: Box::new(state),
            token: None,
            asked: Box::pin(async move {
                match asked.wait_for(|state| *state == OfParent::Asked).await {
                    Ok(_) => {}
                    // It has ended.
                    Err(_) => pending().await,
                }
            }),
        }
    }

    /// Returns whether the parent holds it. Then the parent reports a loss, and that it was asked for.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.owner.is_empty()
    }

    /// Returns the names, separated by spaces.
    pub(crate) fn names(&self) -> String {
        self.names.join(" ")
    }

    /// Returns the environment variables for CMD.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (&'static str, String)> {
        let token = self.token;
        let owner = (!self.is_of_parent()).then(|| ("REDLATCH_OWNER", self.owner.clone()));
        let lock = [("REDLATCH_LOCK", self.names())].into_iter().chain(owner);
        lock.chain(token.map(|(variable, token)| (variable, token.to_string())))
    }

    /// Completes when the hold is lost; returns the reason.
    pub(crate) async fn lost(&self) -> Loss {
        self.guard.lost().await
    }

    /// Returns a future that completes when another client asks for the lock. Further calls return
    /// one that never completes.
    pub(crate) fn take_asked(&mut self) -> BoxFuture<'static, ()> {
        std::mem::replace(&mut self.asked, Box::pin(pending()))
    }

    /// Returns its fencing token, if it has one.
    pub(crate) fn token(&self) -> Option<u64> {
        self.token.map(|(_, token)| token)
    }

    /// Returns the owner as the store records it, or the id of the permit.
    pub(crate) fn owner(&self) -> &str {
        &self.owner
    }

    /// Returns how the lock was lost, if it was lost while this process was stopped. Queries the
    /// store: after a forced unlock another owner may hold the lock although the local lease has
    /// not ended. If the store does not answer, the local lease decides.
    pub(crate) async fn check_loss(&self, client: &Client) -> Option<Loss> {
        let is_held = async {
            for name in &self.names {
                match client.inspect(name).await {
                    // The parent checks its lock.
                    _ if self.is_of_parent() => {}
                    Ok(Some(state)) if self.is_held_in(&state) => {}
                    Ok(_) => return false,
                    Err(_) => {}
                }
            }
            true
        };
        tokio::select! {
            biased;
            lost = self.lost() => Some(lost),
            is_held = is_held => match is_held {
                false => Some(Loss::NotHeld),
                // The lease or the limit may have ended while waiting for the answer.
                true => self.known_loss().await,
            },
        }
    }

    /// Returns how the lock was lost, if this process knows that it is. Sends nothing.
    pub(crate) async fn known_loss(&self) -> Option<Loss> {
        match self.guard.is_valid() {
            true => None,
            false => Some(self.lost().await),
        }
    }

    fn is_held_in(&self, state: &ObjectState) -> bool {
        match state {
            ObjectState::ExpirableSemaphore { held, .. } => held
                .iter()
                .any(|permit| permit.id.to_string() == self.owner),
            state => state
                .holders()
                .iter()
                .any(|holder| holder.owner == *self.owner),
        }
    }

    pub(crate) async fn unlock(self) -> redlatch::Result<()> {
        self.guard.unlock().await
    }
}

/// A request that waits without a limit, and one that does not. One of them is made.
type Requests<R> = (Acquire<R>, TryAcquire<R>);

/// Returns the requests for a lock that is kept for the time that `run` specifies.
fn kept<K: OwnedKind>(lock: &Lock<K>, run: &Run) -> Requests<Lock<K>>
where
    Lock<K>: HasMinimum,
{
    let (lock_request, try_request) = (lock.lock(), lock.try_lock());
    match run.at_least {
        Some(time) => (lock_request.at_least(time), try_request.at_least(time)),
        None => (lock_request, try_request),
    }
}

async fn acquire_lock<K: Revocable>(
    requests: Requests<Lock<K>>,
    limits: &WaitLimits,
    run: &Run,
) -> redlatch::Result<Option<HeldLock>> {
    let guard = request(requests, limits, run).await?;
    Ok(guard.map(|guard| HeldLock::from_revocable(guard, None)))
}

/// Requests the lock with or without waiting, as `run` specifies.
async fn request<R: HasLease>(
    (mut lock_request, mut try_request): Requests<R>,
    limits: &WaitLimits,
    run: &Run,
) -> redlatch::Result<Option<Guard<R>>> {
    (lock_request, try_request) = (
        lock_request.note(run.cmd.note()),
        try_request.note(run.cmd.note()),
    );
    if let Some(lease) = run.lease {
        lock_request = lock_request.lease(lease);
        try_request = try_request.lease(lease);
    }
    if let Some(limit) = run.at_most {
        lock_request = lock_request.at_most(limit);
        try_request = try_request.at_most(limit);
    }
    match limits.wait() {
        Some(wait) => try_request.wait(wait).await,
        None if run.waiting.no_wait => try_request.await,
        None => lock_request.await.map(Some),
    }
}

/// Returns a fair lock. A waiter that hangs delays the others for at most the watchdog lease, as a
/// holder that dies does.
fn fair_lock(client: &Client, name: &str, run: &Run) -> FairLock {
    client.fair_lock(name).wait_time(watchdog_lease(run))
}

/// Returns the lease that the watchdog renews.
fn watchdog_lease(run: &Run) -> Duration {
    run.cmd.watchdog.unwrap_or(DEFAULT_WATCHDOG_LEASE)
}

/// Sets the number of permits if the semaphore has none. If it has another number, changes that
/// number if `may_change`; otherwise returns it as the inner error.
pub(crate) async fn ensure_permits(
    client: &Client,
    name: &str,
    permits: u32,
    may_change: bool,
) -> redlatch::Result<Result<(), i64>> {
    let semaphore = client.expirable_semaphore(name);
    if semaphore.try_set_permits(permits).await? {
        return Ok(Ok(()));
    }
    let total = semaphore.total().await?;
    if total == i64::from(permits) {
        return Ok(Ok(()));
    }
    if !may_change {
        return Ok(Err(total));
    }
    semaphore.set_permits(permits).await?;
    note!("{name}: changed from {total} to {permits} permits");
    Ok(Ok(()))
}

/// Acquires one of `permits` permits, after [`ensure_permits`] has set their number.
async fn acquire_permit(
    client: &Client,
    name: &str,
    permits: u32,
    limits: &WaitLimits,
    run: &Run,
) -> redlatch::Result<Option<HeldLock>> {
    let semaphore = client.expirable_semaphore(name).permits(permits);
    let deadline = limits
        .wait()
        .and_then(|wait| Instant::now().checked_add(wait));
    // A store that loses its data also loses the number of permits, and sends no message: a waiter
    // would be woken only when a held permit would have expired. So this function waits in slices.
    // Each request sets the number again if it is lost.
    let slice = watchdog_lease(run).min(DEFAULT_WATCHDOG_LEASE);
    let guard = loop {
        // If a slice ends during an outage, `try_acquire` fails, although the outage limit has not
        // passed. So it is retried.
        let acquiring = limits.retry_through_outage(name, async || {
            let mut try_request = semaphore.try_acquire().note(run.cmd.note());
            if let Some(lease) = run.lease {
                try_request = try_request.lease(lease);
            }
            if let Some(limit) = run.at_most {
                try_request = try_request.at_most(limit);
            }
            if !run.waiting.no_wait {
                let left =
                    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                try_request = try_request.wait(left.map_or(slice, |left| left.min(slice)));
            }
            try_request.await
        });
        let guard = acquiring.await?;
        let is_last_attempt =
            run.waiting.no_wait || deadline.is_some_and(|deadline| deadline <= Instant::now());
        if guard.is_some() || is_last_attempt {
            break guard;
        }
    };
    Ok(guard.map(|guard| HeldLock {
        // One permit was requested, so there is one id.
        owner: guard.ids().iter().map(PermitId::to_string).collect(),
        names: vec![name.to_owned()],
        asked: Box::pin(guard.asked()),
        guard: Box::new(guard),
        token: None,
    }))
}

/// Acquires all locks or none.
async fn acquire_multi_lock(
    client: &Client,
    limits: &WaitLimits,
    run: &Run,
) -> redlatch::Result<Option<HeldLock>> {
    let kind = run.kind;
    let names = run.names.iter();
    let locks = if kind.fair {
        MultiLock::new(names.map(|name| fair_lock(client, name, run)))
    } else if kind.read {
        MultiLock::new(names.map(|name| client.read_write_lock(name).read()))
    } else if kind.write {
        MultiLock::new(names.map(|name| client.read_write_lock(name).write()))
    } else if kind.spin {
        MultiLock::new(names.map(|name| client.spin_lock(name)))
    } else {
        MultiLock::new(names.map(|name| client.lock(name)))
    };
    let guard = request((locks.lock(), locks.try_lock()), limits, run).await?;
    Ok(guard.map(|guard| HeldLock {
        owner: client.owner_id(guard.owner()).into(),
        names: run.names.clone(),
        guard: Box::new(guard),
        token: None,
        asked: Box::pin(pending()),
    }))
}
