//! Joins several futures concurrently in one task.

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
pub(crate) async fn join_all<'a, F>(work: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future<Output: Send> + Send + 'a,
{
    // `enough` is never true, so this returns when all are done.
    let done = join_until(work, |_| false, Duration::MAX).await;
    done.into_iter().flatten().collect()
}

/// Runs all futures concurrently. Returns when all are done, or, once `limit` has passed, as soon as
/// `enough` accepts the outputs so far. Outputs are in order; unfinished futures are dropped and have
/// `None`.
pub(crate) async fn join_until<'a, F>(
    work: impl Iterator<Item = F>,
    enough: impl Fn(&[Option<F::Output>]) -> bool,
    limit: Duration,
) -> Vec<Option<F::Output>>
where
    F: Future<Output: Send> + Send + 'a,
{
    let mut work: Vec<Option<Boxed<'a, F::Output>>> = work
        .map(|one| Some(Box::pin(one) as Boxed<'a, F::Output>))
        .collect();
    let mut done: Vec<Option<F::Output>> = work.iter().map(|_| None).collect();
    let mut late = pin!(sleep_until(Instant::now() + limit.min(MAX_LEASE)));
    let mut is_late = false;
    poll_fn(|cx| {
        for (one, done) in work.iter_mut().zip(&mut done) {
            if let Some(rest) = one
                && let Poll::Ready(output) = rest.as_mut().poll(cx)
            {
                *one = None;
                *done = Some(output);
            }
        }
        is_late = is_late || late.as_mut().poll(cx).is_ready();
        if work.iter().all(Option::is_none) || (is_late && enough(&done)) {
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
    done
}
