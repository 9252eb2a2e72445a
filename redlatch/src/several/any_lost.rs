//! The loss of one of several holds.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;

use crate::hold::Hold;

/// Returns when one of these holds is lost.
pub(crate) fn any_lost(
    holds: impl IntoIterator<Item = Arc<Hold>>,
) -> impl Future<Output = ()> + Send + 'static {
    let losses = holds.into_iter().map(|hold| Box::pin(hold.lost()));
    let mut losses: Vec<_> = losses.collect();
    poll_fn(move |cx| {
        let mut lost = losses.iter_mut().map(|loss| loss.as_mut().poll(cx));
        match lost.any(|loss| loss.is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
}
