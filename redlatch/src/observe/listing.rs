//! Lists the objects in a store, page by page.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use tokio::time::Instant;

use crate::error::Result;
use crate::glob;
use crate::name::is_extra_key;
use crate::observe::inspect::{Inspected, ObjectState, inspect_keys, look_up};
use crate::pending_request::PendingRequest;
use crate::session::Session;
use crate::store::{Cursor, ScanType};

/// Keys inspected per round trip.
pub(crate) const PAGE: usize = 100;

/// The objects whose names match a pattern: [`Client::list`](crate::Client::list).
///
/// Uses SCAN, which does not block the server. An object that exists during the whole listing is listed at
/// least once. An object that is created or deleted meanwhile may be missing.
///
/// It is also a [`Stream`], which ends after the last object. After an error the listing can be continued: it
/// requests the same page again.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> redlatch::Result<()> {
/// let client = redlatch::Client::embedded();
/// let _guard = client.lock("orders:42").lock().await?;
/// let mut listing = client.list("orders:*");
/// while let Some(found) = listing.next().await? {
///     println!("{}: {}", found.name, found.state.kind());
/// }
/// # Ok(()) }
/// ```
pub struct Listing {
    found: VecDeque<Listed>,
    pages: Pages,
    /// Reads the next page. It returns the remaining pages with the result, so that a request that is dropped has no
    /// effect.
    request: PendingRequest<(Pages, Result<Page>)>,
}

/// The objects of a page; `None` after the last page.
type Page = Option<VecDeque<Listed>>;

/// The pages that remain.
#[derive(Clone)]
struct Pages {
    session: Arc<Session>,
    pattern: String,
    /// Position and kind of keys of the next page; `None` after the last.
    cursor: Option<(ScanType, Cursor)>,
    keys: VecDeque<String>,
    /// When the latest page was requested.
    read_at: Instant,
}

/// One object in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Name without the client's prefix.
    pub name: String,
    /// Kind and state of the object.
    pub state: ObjectState,
}

impl std::fmt::Debug for Listing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listing")
            .field("pattern", &self.pages.pattern)
            .finish_non_exhaustive()
    }
}

impl Listing {
    pub(crate) fn new(session: Arc<Session>, pattern: &str) -> Listing {
        let pattern = glob::escape(&session.prefix) + pattern;
        Listing::of_keys(session, pattern)
    }

    /// Takes a pattern of keys, which include the client's prefix.
    pub(crate) fn of_keys(session: Arc<Session>, pattern: String) -> Listing {
        let pages = Pages {
            pattern,
            session,
            cursor: Some((ScanType::Hashes, Cursor::default())),
            keys: VecDeque::new(),
            read_at: Instant::now(),
        };
        Listing {
            found: VecDeque::new(),
            pages,
            request: PendingRequest::default(),
        }
    }

    /// Returns when the latest object was requested from the store.
    pub(crate) fn read_at(&self) -> Instant {
        self.pages.read_at
    }

    /// Returns the next object, or `None` after the last.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::ResponseTimeout`](crate::Error::ResponseTimeout).
    ///
    /// # Cancel safety
    ///
    /// Loses nothing if it is dropped: the next call continues the request, or repeats it in another runtime.
    pub async fn next(&mut self) -> Result<Option<Listed>> {
        poll_fn(|cx| Pin::new(&mut *self).poll_next(cx))
            .await
            .transpose()
    }
}

impl Stream for Listing {
    type Item = Result<Listed>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Listed>>> {
        let listing = &mut *self;
        loop {
            if let Some(found) = listing.found.pop_front() {
                return Poll::Ready(Some(Ok(found)));
            }
            let request = || Box::pin(listing.pages.clone().read()) as _;
            let (pages, page) = ready!(listing.request.poll(cx, request));
            listing.pages = pages;
            match page {
                Ok(Some(found)) => listing.found = found,
                Ok(None) => return Poll::Ready(None),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }
}

impl Pages {
    async fn read(mut self) -> (Pages, Result<Page>) {
        let page = self.next().await;
        (self, page)
    }

    async fn next(&mut self) -> Result<Page> {
        loop {
            if !self.keys.is_empty() {
                return self.inspect_page().await.map(Some);
            } else if let Some((scan_type, cursor)) = self.cursor {
                let store = &self.session.store;
                let (keys, next) = store.scan(&self.pattern, scan_type, cursor).await?;
                self.keys
                    .extend(keys.into_iter().filter(|key| !is_extra_key(key)));
                self.cursor = match (next, scan_type) {
                    (Some(next), _) => Some((scan_type, next)),
                    (None, ScanType::Hashes) => Some((ScanType::Strings, Cursor::default())),
                    (None, ScanType::Strings | ScanType::Lists) => None,
                };
            } else {
                return Ok(None);
            }
        }
    }

    async fn inspect_page(&mut self) -> Result<VecDeque<Listed>> {
        let some = self.keys.len().min(PAGE);
        let keys = self.keys.iter().take(some).cloned();
        self.read_at = Instant::now();
        let session = &self.session;
        let inspected = inspect_keys(&session.store, keys).await?;
        let listed = |(key, seen): (String, Inspected)| {
            let state = seen.ok().flatten()?;
            key.starts_with(&session.prefix).then_some((key, state))
        };
        let mut objects: Vec<_> = inspected.into_iter().filter_map(listed).collect();
        look_up(
            session,
            objects.iter_mut().map(|(key, state)| (&**key, state)),
        )
        .await;
        let found = objects.into_iter().map(|(key, state)| Listed {
            name: key[session.prefix.len()..].to_owned(),
            state,
        });
        let found = found.collect();
        self.keys.drain(..some);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn polled(listing: &mut Listing) -> Option<String> {
        let found = poll_fn(|cx| Pin::new(&mut *listing).poll_next(cx)).await;
        found.map(|found| found.unwrap().name)
    }

    #[tokio::test]
    async fn listing_is_a_stream_that_ends() {
        let client = crate::Client::embedded();
        let _lock = client.lock("one").lock().await.unwrap();
        let _other = client.fenced_lock("two").lock().await.unwrap();
        let mut listing = client.list("*");
        let mut names = Vec::new();
        while let Some(name) = polled(&mut listing).await {
            names.push(name);
        }
        names.sort();
        assert_eq!(names, ["one", "two"]);
        assert_eq!(polled(&mut listing).await, None);
        assert_eq!(listing.next().await.unwrap(), None);
    }
}
