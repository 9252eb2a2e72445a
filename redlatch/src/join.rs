//! Runs several futures concurrently in one task.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use crate::lease::MAX_LEASE;
use crate::runtime::sleep_until;

/// A future with a hidden type. Rare paths are boxed like this, so that common futures stay small and types
/// are not nested too deeply for the compiler.
pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Runs all futures concurrently. Returns their outputs in order.
pub(crate) async fn join_all<'a, F>(futures: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future<Output: Send> + Send + 'a,
{
    let outputs = join_until(futures, |_| false, MAX_LEASE).await;
    outputs.into_iter().flatten().collect()
}

/// Runs all futures concurrently. Returns when all are done, or when `min_time` has passed and `enough`
/// accepts the outputs so far. Outputs are in order; unfinished futures are dropped and have `None`.
pub(crate) async fn join_until<'a, F>(
    futures: impl Iterator<Item = F>,
    enough: impl Fn(&[Option<F::Output>]) -> bool,
    min_time: Duration,
) -> Vec<Option<F::Output>>
where
    F: Future<Output: Send> + Send + 'a,
{
    let mut futures: Vec<Option<Boxed<'a, F::Output>>> = futures
        .map(|future| Some(Box::pin(future) as Boxed<'a, F::Output>))
        .collect();
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    let mut min_time = pin!(sleep_until(Instant::now() + min_time.min(MAX_LEASE)));
    let mut has_passed = false;
    poll_fn(|cx| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if let Some(pending) = future
                && let Poll::Ready(done) = pending.as_mut().poll(cx)
            {
                *future = None;
                *output = Some(done);
            }
        }
        has_passed = has_passed || min_time.as_mut().poll(cx).is_ready();
        match futures.iter().all(Option::is_none) || (has_passed && enough(&outputs)) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    outputs
}
