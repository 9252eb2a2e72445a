//! One of several locks that were taken.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::take::Prize;
use crate::error::{Error, Result};
use crate::hold::Hold;
use crate::lease::{Lease, MAX_LEASE};
use crate::primitives::handle::{Boxed, Held};
use crate::session::{Claim, Terms};

/// One lock that was taken. Given back in the background when dropped.
pub(crate) struct Share {
    held: Held,
    prize: Prize,
}

impl Share {
    pub(crate) fn new(claim: Claim, terms: Terms, prize: Prize) -> Share {
        Share {
            held: Held::new(claim, terms),
            prize,
        }
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.held.claim.hold
    }

    pub(crate) fn lease(&self) -> Lease {
        self.held.terms.lease
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.held.claim
    }

    pub(crate) fn prize(&self) -> &Prize {
        &self.prize
    }

    /// Gives it back: [`Held::give_back`].
    pub(crate) async fn give_back(self) -> Result<()> {
        self.held.give_back().await
    }
}

/// Gives all back at the same time. The errors, in order.
pub(crate) async fn give_back(shares: Vec<Share>) -> Vec<Error> {
    let giving = shares.into_iter().map(Share::give_back);
    let given = all(giving).await;
    given.into_iter().filter_map(Result::err).collect()
}

/// Does all of it at the same time; the outputs, in order.
pub(crate) async fn all<'a, F>(work: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future<Output: Send> + Send + 'a,
{
    // Never enough, so that it ends when all is done.
    let done = most(work, |_| false, Duration::MAX).await;
    done.into_iter().flatten().collect()
}

/// Does all of it at the same time, and returns when all is done; or after `limit`, or later when
/// what is done is enough. The outputs, in order; what was not done is dropped.
pub(crate) async fn most<'a, F>(
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
    let mut late = pin!(tokio::time::sleep(limit.min(MAX_LEASE)));
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

/// Returns when one of these holds is lost.
pub(crate) async fn any_lost(holds: impl IntoIterator<Item = Arc<Hold>>) {
    let losses = holds
        .into_iter()
        .map(|hold| async move { hold.lost().await });
    let mut losses: Vec<_> = losses.map(Box::pin).collect();
    poll_fn(|cx| {
        let mut lost = losses.iter_mut().map(|loss| loss.as_mut().poll(cx));
        match lost.any(|loss| loss.is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}
