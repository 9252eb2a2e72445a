//! Repeats a write with a greater token after Redis has lost its data.

use redlatch::FencedLock;

use crate::release_after;

/// The storage has refused a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stale {
    /// The greatest token that the storage has recorded.
    pub greatest: u64,
}

/// Runs `work` as [`release_after`] does, and once more if the storage has refused the token: with a greater one than the
/// storage has recorded. `work` begins a new transaction each time, and returns [`Stale`] after it has rolled back.
///
/// A token is refused because the lock was lost and a later holder has written, or because Redis has lost its data, so that
/// tokens began at 1 again. In both cases another acquisition is right, and raising the lock's token harms neither.
///
/// # Errors
///
/// If the lock cannot be acquired, or its token not be raised. The output is [`Stale`] if the second token was refused,
/// too: the lock was lost again.
pub async fn retry_stale<T, W>(
    lock: &FencedLock,
    work: impl Fn(u64) -> W + Clone + Send + 'static,
) -> redlatch::Result<Result<T, Stale>>
where
    T: Send + 'static,
    W: Future<Output = Result<T, Stale>> + Send + 'static,
{
    match release_after(lock, work.clone()).await? {
        Err(Stale { greatest }) => {
            lock.advance_token(greatest).await?;
            release_after(lock, work).await
        }
        written => Ok(written),
    }
}
