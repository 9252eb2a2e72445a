//! Runs several futures concurrently in one task.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use futures_core::Stream as _;
use futures_util::stream::FuturesUnordered;
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
    let futures = futures.enumerate().map(|(at, future)| {
        let numbered = async move { (at, future.await) };
        Box::pin(numbered) as Boxed<'a, (usize, F::Output)>
    });
    // Polls only those that were woken: thousands may be pending.
    let mut pending: FuturesUnordered<_> = futures.collect();
    let mut outputs: Vec<Option<F::Output>> = pending.iter().map(|_| None).collect();
    let mut min_time = pin!(sleep_until(Instant::now() + min_time.min(MAX_LEASE)));
    let mut has_passed = false;
    poll_fn(|cx| {
        while let Poll::Ready(done) = Pin::new(&mut pending).poll_next(cx) {
            match done {
                Some((at, output)) => outputs[at] = Some(output),
                None => return Poll::Ready(()),
            }
        }
        has_passed = has_passed || min_time.as_mut().poll(cx).is_ready();
        match has_passed && enough(&outputs) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    outputs
}
