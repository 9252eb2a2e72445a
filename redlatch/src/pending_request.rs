//! The request of a stream that has no task of its own: it is polled with the stream.

use std::task::{Context, Poll, ready};

use tokio::runtime::{Handle, Id};

use crate::join::Boxed;
use crate::sync::Mutex;

/// The request in flight, and the runtime to which its timers belong. Only locked to make the stream `Sync`.
pub(crate) struct PendingRequest<T>(Mutex<Option<(Option<Id>, Boxed<'static, T>)>>);

impl<T> Default for PendingRequest<T> {
    fn default() -> PendingRequest<T> {
        PendingRequest(Mutex::new(None))
    }
}

impl<T> PendingRequest<T> {
    /// Polls the request. `make` creates it if there is none, and again in another runtime. So a request that is
    /// dropped must have no effect.
    pub(crate) fn poll(
        &self,
        cx: &mut Context<'_>,
        make: impl FnOnce() -> Boxed<'static, T>,
    ) -> Poll<T> {
        let runtime = Handle::try_current().ok().map(|handle| handle.id());
        let mut pending = self.0.lock();
        pending.take_if(|(other, _)| *other != runtime);
        let (_, request) = pending.get_or_insert_with(|| (runtime, make()));
        let output = ready!(request.as_mut().poll(cx));
        *pending = None;
        Poll::Ready(output)
    }
}
