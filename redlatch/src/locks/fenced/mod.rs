//! The fenced lock (Redisson: `RFencedLock`, `RedissonFencedLock`): every acquisition returns a
//! token greater than all before it, for the resource to check.

#[cfg(test)]
mod differential;
#[cfg(test)]
mod exploration;
mod rules;
pub(crate) mod token;

use std::sync::Arc;

use self::token::Tokens;
use crate::error::{Error, Result};
use crate::hold::{AcquireParams, Spec};
use crate::lease::Lease;
use crate::locks::reentrant::ReentrantKind;
use crate::locks::{Guard, HasMinimum, Lock, OwnedKind};
use crate::metrics::Kind;
use crate::name::{FencedKeys, ObjectKeys};
use crate::step::{Outcome, Step};

/// A lock whose every acquisition returns a *fencing token*, a number greater than the tokens of
/// all earlier acquisitions (Redisson: `RFencedLock`).
///
/// A lock with a lease is never a guarantee: a holder that is stopped for longer than its lease can
/// resume and continue writing while the next holder works. With a token the resource can detect
/// this: it remembers the greatest token that it has seen and rejects requests with a smaller one.
/// Only that check guarantees that nothing is overwritten (M. Kleppmann, *How to do distributed
/// locking*, 2016).
///
/// The token is counted in a separate key that never expires, or [follows the
/// clock](Lock::clock_tokens). Re-entrant acquisitions increase it too.
///
/// # After lost data
///
/// A store that loses its data counts from 1 again (after a restart without persistence), or from
/// an older token (after a failover to a replica that missed writes). A resource that remembers a
/// greater token then rejects every holder. To recover, read the greatest token from the resource
/// and call [`advance_token`](Lock::advance_token) with it: the next acquisition returns a greater
/// one. Until then nothing is overwritten, because the resource rejects every request. With
/// [`clock_tokens`](Lock::clock_tokens) tokens grow also after lost data.
///
/// # After a failover
///
/// A release never waits for replicas, under any [`ReplicaSync`](crate::ReplicaSync) setting. A
/// replica that is promoted may still contain a hold that was released. If the same
/// [`Owner`](crate::Owner) acquires the lock again before that lease has ended, it continues this
/// hold and gets the same token again. Other owners wait until the lease has ended, so no token is
/// issued to two owners.
///
/// # A key for each name
///
/// The token's key remains after the release, so a name for each entity (`order:42`) leaves one key
/// for each entity forever. When an entity is permanently gone, and with it the resource that
/// remembers a token, delete its key with [`delete_token`](Lock::delete_token). If entities are
/// created and deleted all the time, use [`clock_tokens`](Lock::clock_tokens), whose key expires
/// after a day, or compare a version that the resource itself keeps.
///
/// # All clients must use it as a fenced lock
///
/// A holder that uses
/// [`Client::lock`](crate::Client::lock) with the same name is mutually exclusive with this lock
/// but has no token, so the resource cannot reject its late writes.
///
/// # When not to use it
///
/// If nothing checks the token, use a plain [`Lock`]: the token then has no effect. If the resource
/// can compare a version of its own on each write (a row's version, an `If-Match`), that check
/// alone is sufficient, and a lock only avoids duplicate work.
///
/// ```
/// # use std::sync::atomic::{AtomicU64, Ordering};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// struct Resource { greatest_token: AtomicU64 }
///
/// impl Resource {
///     fn write(&self, token: u64) -> Result<(), &'static str> {
///         match self.greatest_token.fetch_max(token, Ordering::SeqCst) {
///             greatest if greatest > token => Err("a later holder has written since"),
///             _ => Ok(()),
///         }
///     }
/// }
///
/// let client = redlatch::Client::embedded(); // or Client::connect("redis://127.0.0.1").await?
/// let resource = Resource { greatest_token: AtomicU64::new(0) };
/// let lock = client.fenced_lock("orders:42");
///
/// let stale = lock.lock().await?.token();   // the guard is dropped here, so this token is stale
/// let guard = lock.lock().await?;
/// assert!(guard.token() > stale);
/// assert!(resource.write(guard.token()).is_ok());
/// assert!(resource.write(stale).is_err());
/// # guard.unlock().await }
/// ```
pub type FencedLock = Lock<Fenced>;

/// The kind of a [`FencedLock`]: the type parameter of [`Lock`].
#[derive(Debug, Clone)]
pub struct Fenced {
    keys: Arc<FencedKeys>,
    /// See [`Tokens::grace`].
    grace: Option<Lease>,
}

/// The greatest token that [`Lock::advance_token`] accepts. The store counts in signed 64-bit
/// integers, and at least one acquisition must be possible after it.
pub const MAX_TOKEN: u64 = i64::MAX.unsigned_abs() - 1;

impl OwnedKind for Fenced {}
impl HasMinimum for Lock<Fenced> {}

impl Fenced {
    pub(crate) fn new(prefix: &str, name: &str) -> Fenced {
        Fenced {
            keys: Arc::new(FencedKeys::new(prefix, name)),
            grace: None,
        }
    }

    fn next_tokens(&self) -> Tokens<'_> {
        Tokens {
            key: &self.keys.token,
            grace: self.grace,
        }
    }
}

impl Lock<Fenced> {
    /// Makes the tokens of this handle follow the clock of the server: a token is the time in
    /// microseconds since 1970, or one more than the latest token if that is greater. All are below
    /// 2⁵³ until the year 2255, unless [`advance_token`](Lock::advance_token) sets a greater one.
    ///
    /// - *Tokens grow after lost data*: FLUSHALL, a restart without persistence, a failover to a
    ///   replica that missed writes. The storage accepts the next token at once.
    /// - *No key stays forever*: the key of the latest token expires a day after the clock has
    ///   passed it, which is a day after the last acquisition as a rule.
    ///   [`current_token`](Lock::current_token) then returns 0. A number that was set by
    ///   [`advance_token`](Lock::advance_token) has no expiry until the next acquisition.
    ///
    /// While the key exists, a token is never repeated, even if the clock is set back. If the key
    /// is lost, a token may be repeated or be too small only if the clock was set back, or that of
    /// the new master is behind, by more than the time since the latest acquisition.
    ///
    /// All clients must use this setting for the name, and not for that of an
    /// [`Election`](crate::Election), whose epochs are counted. A client without it, or Redisson,
    /// counts up from the latest token. Its tokens grow as well while the key exists, but it does
    /// not postpone the expiry, and begins at 1 if the key is missing.
    ///
    /// In an [embedded](crate::Client::embedded) store the clock is that of the machine when the
    /// store was created, and then the monotonic one: it is never set back while the process runs.
    ///
    /// An acquisition takes the server one command more: `TIME`, which its user needs permission
    /// for.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.fenced_lock("orders:42").clock_tokens();
    /// let first = lock.lock().await?.token();
    /// assert!(first > 1_700_000_000_000_000); // this was in November 2023
    /// assert!(lock.lock().await?.token() > first);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn clock_tokens(self) -> Lock<Fenced> {
        let kind = Fenced {
            grace: Some(Lease::TOKEN_GRACE),
            ..(*self.kind).clone()
        };
        self.with_kind(kind)
    }

    /// Returns the latest token: that of the latest acquisition by any owner, or the number to
    /// which [`advance_token`](Lock::advance_token) has raised it since. 0 if there is none. A
    /// request with a smaller token is too late.
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`].
    pub async fn current_token(&self) -> Result<u64> {
        let step = rules::read_token(&self.valid_kind()?.keys);
        self.session.store.run_idempotent(&step).await
    }

    /// Raises the token to at least `at_least`, so that the next acquisition gets a greater one.
    /// Never lowers it. Returns the resulting token.
    ///
    /// For a store that has lost its data, see [`FencedLock`](FencedLock#after-lost-data). It does
    /// not matter whether the lock is held; a holder keeps its token. Calling it twice has the
    /// effect of calling it once.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] above [`MAX_TOKEN`], because the store counts in signed 64-bit
    /// integers; [`Error::WrongKind`] if the token, or the epoch of an election with this name, is
    /// no number from which the store can count up; otherwise as [`Lock::is_locked`].
    ///
    /// # Cancel safety
    ///
    /// If this future is dropped, the token may or may not have been raised.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
    /// # let client = redlatch::Client::embedded();
    /// let lock = client.fenced_lock("orders:42");
    /// assert_eq!(lock.advance_token(7000).await?, 7000); // the greatest token that the resource has seen
    /// assert_eq!(lock.lock().await?.token(), 7001);
    /// assert_eq!(lock.advance_token(3).await?, 7001);
    /// # Ok(()) }
    /// ```
    pub async fn advance_token(&self, at_least: u64) -> Result<u64> {
        let keys = &self.valid_kind()?.keys;
        let at_least = match i64::try_from(at_least) {
            Ok(number) if at_least <= MAX_TOKEN => number,
            _ => {
                return Err(Error::InvalidSetting {
                    setting: "at_least",
                    reason: format!("{at_least} is too large; use a token of at most {MAX_TOKEN}"),
                });
            }
        };
        let step = rules::advance_token(keys, at_least);
        self.session.store.run_idempotent(&step).await
    }

    /// Deletes the key that counts the tokens, if the lock is free. Returns whether it was free;
    /// `false` means that the lock is held and its token remains.
    ///
    /// The next acquisition gets the token 1, unless tokens [follow the clock](Lock::clock_tokens).
    /// Call it only when no resource remembers a token of this lock, see
    /// [`FencedLock`](FencedLock#a-key-for-each-name).
    ///
    /// # Errors
    ///
    /// As [`Lock::is_locked`], and [`Error::OutcomeUnknown`]: the connection broke before the
    /// answer arrived. The deletion is not retried, because tokens may have been issued since.
    ///
    /// # Cancel safety
    ///
    /// If dropped after it started, it continues in the background.
    pub async fn delete_token(&self) -> Result<bool> {
        let keys = &self.valid_kind()?.keys;
        self.session
            .run_at_most_once(&keys.object, keys, rules::delete_token, "deleting a token")
            .await
    }
}

impl Guard<FencedLock> {
    /// Returns the fencing token of this acquisition, which is greater than that of every earlier
    /// one (exception: [after a failover](FencedLock#after-a-failover)).
    pub fn token(&self) -> u64 {
        self.held.token
    }
}

impl ReentrantKind for Fenced {
    fn keys(&self) -> &Arc<ObjectKeys> {
        &self.keys.object
    }

    fn spec(&self) -> Spec {
        Spec {
            store_handoff: true,
            ..Spec::of(Kind::FencedLock)
        }
    }

    fn acquire<'a>(&'a self, params: AcquireParams<'a>) -> Step<'a, Outcome> {
        rules::acquire(params, self.next_tokens())
    }

    fn tokens(&self) -> Option<Tokens<'_>> {
        Some(self.next_tokens())
    }
}
