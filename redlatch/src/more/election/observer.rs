//! Observes the leader of an election.
//!
//! 1. A call reads the current leader. If it differs from the last report, that is the next one.
//! 2. Otherwise it waits like a waiter for a lock: it subscribes to the lock's channel, and reads
//!    again after each message, after a broken connection, and when the leader's lease ends.
//!    Without a leader it also reads once in a watchdog lease.
//!
//! The wait queues let only the first waiter of an object read. Each call counts as waiting for an
//! object of its own, because observers have seen different leaders.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;

use super::rules;
use super::{Election, Leader};
use crate::error::Result;
use crate::join::Boxed;
use crate::lease::{Expiry, WaitLimit};
use crate::pending_request::PendingRequest;
use crate::step::Outcome;
use crate::store::{Delivery, Progress};
use crate::wait::{RequestLimits, private_object};

/// The leader of an election and its changes, as a [`Stream`] that never ends:
/// [`Election::observe`].
///
/// The current leader comes first, or `None` if there is none; then each other leader, value or
/// vacancy (`None`) that the observer finds. Leaders and values that follow each other faster than
/// it reads are left out, so its epochs only grow, with gaps. The latest state is never left out:
/// it is reported within a round trip of its change; the end of a leader that died, when its lease
/// ends.
///
/// It reports what the store knows. A leader that has been reported may have ended since. A term
/// that no replica has yet may be lost in a failover, before or after its candidate leads: then a
/// smaller epoch follows ([`ClientBuilder::replica_sync`](crate::ClientBuilder::replica_sync)).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// # let client = redlatch::Client::embedded();
/// let mut observer = client.election("scheduler").observe();
/// let leadership = client.election("scheduler").campaign("starting").await?;
/// assert_eq!(observer.next().await?.expect("a leader").value, "starting");
/// leadership.proclaim("ready").await?;
/// assert_eq!(observer.next().await?.expect("a leader").value, "ready");
/// # Ok(()) }
/// ```
pub struct Observer {
    election: Election,
    /// The last report; `None`: there was none.
    reported: Option<Option<Leader>>,
    request: PendingRequest<Result<Option<Leader>>>,
}

impl Observer {
    pub(super) fn new(election: Election) -> Observer {
        Observer {
            election,
            reported: None,
            request: PendingRequest::default(),
        }
    }

    /// Waits until the leader differs from the last one that this observer has returned. The first
    /// call returns the current one at once. `None`: there is no leader.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName),
    /// [`Error::WrongKind`](crate::Error::WrongKind),
    /// [`Error::NoRuntime`](crate::Error::NoRuntime).
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::ResponseTimeout`](crate::Error::ResponseTimeout): an outage of the store has lasted
    /// longer than [`ClientBuilder::outage_limit`](crate::ClientBuilder::outage_limit). The next
    /// call continues.
    ///
    /// # Cancel safety
    ///
    /// Loses nothing if it is dropped.
    pub async fn next(&mut self) -> Result<Option<Leader>> {
        poll_fn(|cx| self.poll_leader(cx)).await
    }

    fn poll_leader(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Leader>>> {
        let request = || {
            let (election, reported) = (self.election.clone(), self.reported.clone());
            Box::pin(async move { next_leader(&election, &reported).await }) as _
        };
        let leader = ready!(self.request.poll(cx, request))?;
        self.reported = Some(leader.clone());
        Poll::Ready(Ok(leader))
    }
}

impl Stream for Observer {
    type Item = Result<Option<Leader>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_leader(cx).map(Some)
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer")
            .field("election", &self.election)
            .field("reported", &self.reported)
            .finish_non_exhaustive()
    }
}

/// Waits until the leader differs from `reported`.
async fn next_leader(
    election: &Election,
    reported: &Option<Option<Leader>>,
) -> Result<Option<Leader>> {
    let session = &election.session;
    session.background.remember_runtime()?;
    election.keys.fair.object.check()?;
    let limits = RequestLimits::new(WaitLimit::Endless, session.outage_limit);
    let (store, progress) = (&session.store, Progress::default());
    let look = |channel| -> Boxed<'_, _> {
        let progress = &progress;
        Box::pin(async move {
            let step = rules::read(&election.keys);
            let delivery = Delivery::QUEUED_INSPECTION;
            let answer = store.run(&step, channel, delivery, progress).await?;
            let (leader, left) = match answer.reply {
                Some((leader, left)) => (Some(leader), left),
                None => (None, Expiry::In(session.watchdog.lease().duration())),
            };
            Ok(match reported.as_ref() == Some(&leader) {
                true => Outcome::Wait(left),
                false => Outcome::Done(leader),
            })
        })
    };
    let channel = election.keys.fair.object.channel();
    let (queues, private) = (&session.waiting, private_object(&election.keys.term));
    let observed = queues.observe(channel, &private, &limits, &progress, &look);
    // Without a wait limit it never returns `None`.
    Ok(observed.await?.flatten())
}
