//! Streams of the asynchronous client, polled by the thread of the blocking one.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use futures_core::Stream;

use super::Worker;
use crate::error::Result;

/// A stream that the client's thread polls.
#[derive(Debug)]
pub(super) struct Polled<S> {
    /// `None` after an error of the client's thread.
    inner: Option<S>,
    worker: Arc<Worker>,
}

impl<S> Polled<S> {
    pub(super) fn new(inner: S, worker: &Arc<Worker>) -> Polled<S> {
        Polled {
            inner: Some(inner),
            worker: worker.clone(),
        }
    }

    pub(super) fn next<T: Send + 'static>(&mut self) -> Option<Result<T>>
    where
        S: Stream<Item = Result<T>> + Unpin + Send + 'static,
    {
        // Before the stream is moved: a later call may continue it.
        if let Err(error) = self.worker.check() {
            return Some(Err(error));
        }
        let mut stream = self.inner.take()?;
        let polled = async move {
            let next = poll_fn(|cx| Pin::new(&mut stream).poll_next(cx)).await;
            (next, stream)
        };
        match self.worker.run(polled) {
            Ok((next, stream)) => {
                self.inner = Some(stream);
                next
            }
            Err(error) => Some(Err(error)),
        }
    }
}
