//! Repeats a write with a greater token after Redis has lost its data.

use redlatch::{FencedLock, MAX_TOKEN};

use crate::release_after;

/// The storage has refused a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stale {
    /// The greatest token that the storage has recorded.
    pub greatest: u64,
}

/// More tokens than were acquired without a write since the storage has recorded its greatest one.
const UNRECORDED: u64 = 1 << 32;

/// Runs `work` as [`release_after`] does, and once more if the storage has refused the token: with a greater one than
/// the storage has recorded. `work` begins a new transaction each time, and returns [`Stale`] after it has rolled back.
///
/// A token is refused because the lock was lost and a later holder has written, or because Redis has lost its data, so that
/// tokens began at 1 again. In both cases another acquisition is right. After lost data, holders from before may not have
/// noticed it, and hold tokens that the storage does not know yet, so the new one is far greater, beyond all of those, too.
///
/// Not for tokens of the clock (`clock_tokens`), which grow by themselves: they would be ahead of the clock for an hour.
///
/// # Cancel safety
///
/// That of [`release_after`], for each of the two writes. Between them nothing has been written.
///
/// # Errors
///
/// If the lock cannot be acquired, or its token not be raised. The output is [`Stale`] if the second token was refused,
/// too: a greater one was recorded meanwhile.
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
            if lock.current_token().await? < greatest {
                let unused = greatest.saturating_add(UNRECORDED).min(MAX_TOKEN);
                lock.advance_token(unused).await?;
            }
            release_after(lock, work).await
        }
        written => Ok(written),
    }
}
