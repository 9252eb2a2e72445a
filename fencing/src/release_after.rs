//! Keeps the lock until the transaction has ended.

use redlatch::FencedLock;

/// Acquires the lock, runs `work` with its token, and releases the lock when the work has ended.
///
/// # Cancel safety
///
/// If dropped before the lock is acquired, the work does not start. If dropped later, work and release continue in a
/// task of the runtime: a COMMIT that was sent cannot be revoked, so the lock must outlast it.
///
/// # Errors
///
/// If the lock cannot be acquired.
///
/// # Panics
///
/// If the work panics. The lock is then released. If the runtime ends before the work, this never returns.
pub async fn release_after<W>(
    lock: &FencedLock,
    work: impl FnOnce(u64) -> W + Send + 'static,
) -> redlatch::Result<W::Output>
where
    W: Future<Output: Send> + Send + 'static,
{
    let guard = lock.lock().await?;
    let task = tokio::spawn(async move {
        let output = work(guard.token()).await;
        // If this fails, the lock is lost or its lease will end. The storage has decided about the write already.
        let _ = guard.unlock().await;
        output
    });
    match task.await {
        Ok(output) => Ok(output),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime has ended, and the work with it.
            Err(_) => std::future::pending().await,
        },
    }
}
