//! The attribute [`locked`], and the function that its code calls.
//!
//! It acquires with the public requests, as does the layer in `tower`. Both run the rest with the
//! code of [`Guard::run`](crate::Guard::run). Invariant: the body of the function, or the future of
//! the inner service, is created and polled only while the lock is held. What must not happen, and
//! what prevents it:
//!
//! - *Work continues after a loss, beside that of the next owner.* The lock is checked before each
//!   poll, also right after a pause of the process. After a loss the work is dropped.
//! - *An inner service begins before the lock is held.* A service may begin in `call`, so `call` is
//!   a part of the work.
//! - *A service is called that is not ready.* The service that was polled handles the request, and
//!   its clone remains for the next one.
//! - *An argument outlives the lock*, such as a transaction. The body's block owns all arguments,
//!   also those of which it uses a part or nothing, so they are dropped before the release.

/// Runs an async function while it holds a lock.
///
/// ```
/// use redlatch::{Client, Error, Result};
///
/// struct Shop {
///     locks: Client,
/// }
///
/// impl Shop {
///     #[redlatch::locked(client = self.locks, name = "order:{id}")]
///     async fn pay(&self, id: u64) -> Result<String> {
///         Ok(format!("order {id} is paid")) // no other task or process pays or ships it meanwhile
///     }
///
///     #[redlatch::locked(client = self.locks, name = "order:{id}", wait = "2s", or = Ok(false))]
///     async fn ship(&self, id: u64) -> Result<bool> {
///         Ok(true)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<()> {
/// let shop = Shop { locks: Client::embedded() };
/// assert_eq!(shop.pay(7).await?, "order 7 is paid");
/// assert!(shop.ship(7).await?);
///
/// let _other = shop.locks.lock("order:7").lock().await?;
/// assert!(!shop.ship(7).await?); // after two seconds
/// # Ok(()) }
/// ```
///
/// # Arguments
///
/// All are expressions that may use the arguments of the function, and `self`. They are evaluated in each call.
///
/// | argument | value |
/// |---|---|
/// | `client` | the [`Client`](crate::Client) |
/// | `name` | a literal is a format string: `"order:{id}"` contains the value of the argument `id`, and `"{{order}}:{id}"` has a hash tag. Otherwise any expression that implements `AsRef<str>`: `format!("order:{}", order.id)` |
/// | `kind` (optional) | `fair`, `fenced`, `spin`, or `read` or `write` of a read-write lock; without it the lock is [`Client::lock`](crate::Client::lock) |
/// | `lease` (optional) | [`Acquire::lease`](crate::Acquire::lease): a [`Duration`](std::time::Duration), or a text such as `"300ms"`, `"2s"`, `"5m"`, `"1h"` |
/// | `wait` (optional) | [`TryAcquire::wait`](crate::TryAcquire::wait), written in the same way; zero makes one attempt. Without it the function waits without a limit |
/// | `or` (with `wait`) | what the function returns if another owner still holds the lock when `wait` has passed |
///
/// The function must be `async` and return a `Result` whose error type implements `From<redlatch::Error>`:
///
/// ```compile_fail,E0277
/// # use redlatch::Client;
/// #[redlatch::locked(client = client, name = "report")]
/// async fn report(client: &Client) -> Result<(), String> {
///     Ok(())
/// }
/// ```
///
/// Within a trait that `#[async_trait]` rewrites, functions are no longer `async` when this attribute sees them: call a
/// locked function from there.
///
/// # Re-entry
///
/// Each call has an owner of its own. So a locked function that calls another one with the same name waits for itself, unless
/// both run in the scope of an owner ([`Owner::scope`](crate::Owner::scope)).
///
/// # Errors
///
/// Those of [`Acquire`](crate::Acquire); the body was then not started. [`Error::Lost`](crate::Error::Lost) as soon as the lock
/// is lost: the body is dropped at its current await point, and is never polled after the lease has ended, as with
/// [`Acquire::run`](crate::Acquire::run). Tasks that the body has spawned continue. If the body returns an error, the lock is
/// released as after any other value.
///
/// # Cancel safety
///
/// When the future of the function is dropped, it drops the body and releases the lock in the background.
///
/// # When the arguments are dropped
///
/// Before the lock is released, however the function binds them (`_: Transaction`, `State { id, .. }`), in the order of an ordinary
/// function: the last argument first. Parts that no pattern binds are dropped after all bindings.
pub use redlatch_macros::locked;

/// Called by the code that [`locked`] generates; not part of the public interface.
#[doc(hidden)]
pub mod __private {
    use crate::{Acquirable, Guard, Result};

    /// Tells the compiler what a block returns.
    pub fn returns<T, F: Future<Output = T>>(block: F) -> F {
        block
    }

    /// Runs `work` while it is held.
    pub fn run<R: Acquirable, F: Future>(
        guard: &Guard<R>,
        work: F,
    ) -> impl Future<Output = Result<F::Output>> {
        guard.run_while_held(work)
    }

    /// Releases what was acquired. The error says that it was lost; a release that the store does not answer continues in the
    /// background.
    pub async fn release<R: Acquirable>(guard: Option<Guard<R>>) -> Result<()> {
        match guard {
            Some(guard) => guard.release_unless_lost().await,
            None => Ok(()),
        }
    }
}
