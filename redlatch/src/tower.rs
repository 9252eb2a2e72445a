//! A layer for HTTP services of [`tower`](https://docs.rs/tower) and [`axum`](https://docs.rs/axum), which holds a lock while
//! a request is handled.
//!
//! 1. The layer's function returns the name of the lock for a request, or `None`: then the request needs no lock.
//! 2. The service acquires the lock, and only then calls the inner service.
//! 3. It releases the lock when the inner service has returned its response, and then passes the response on. If the lock is lost before, it drops the
//!    future of the inner service at its current await point, and never polls it again.
//! 4. A request for which the lock was not acquired, or whose lock was lost, gets an empty response with one of these status codes:
//!
//! | status | `Retry-After` | what happened | the inner service |
//! |---|---|---|---|
//! | 409 | yes | another owner holds the lock | was not called |
//! | 503 | yes | the store or its replicas are down or slow ([`Error::is_transient`], or [`Error::Lost`] before the lock was acquired) | was not called |
//! | 400 | no | the name is invalid ([`Error::InvalidName`]) | was not called |
//! | 500 | no | the lock was lost ([`Error::Lost`]) | may have done a part of its work, or all of it |
//! | 500 | no | another error, such as missing permissions | was not called |
//!
//! These responses contain the [`Error`], if there is one, or with 409 a [`Busy`], in their extensions, so that an outer layer can log it
//! or write a body.
//!
//! By default it makes one attempt, as `try_lock`; [`LockLayer::wait`] sets a limit. With [`LockLayer::fenced`] the inner service finds a
//! [`FencingToken`] in the extensions of the request, for the resource that it writes to.
//!
//! # The name comes from what was parsed
//!
//! Two requests exclude each other only if their names are equal. So make the name from the same parsed values that the inner service
//! uses, not from the text of the request: `/orders/7`, `/orders/%37` and `/orders/07` are one order with three paths. A layer around
//! this one parses the values and adds them to the extensions of the request; with axum this is one function
//! ([docs/http.md](https://github.com/redlatch/redlatch/blob/main/docs/http.md)).
//!
//! ```
//! use std::convert::Infallible;
//! use http::{Request, Response};
//! use redlatch::{Client, tower::LockLayer};
//! # use std::task::{Context, Poll};
//! # use tower_layer::Layer;
//! # use tower_service::Service;
//! # #[derive(Clone)] struct Pay;
//! # impl Service<Request<()>> for Pay {
//! #     type Response = Response<String>;
//! #     type Error = Infallible;
//! #     type Future = std::future::Ready<Result<Response<String>, Infallible>>;
//! #     fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> { Poll::Ready(Ok(())) }
//! #     fn call(&mut self, _: Request<()>) -> Self::Future { std::future::ready(Ok(Response::new("paid".into()))) }
//! # }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! /// The number of an order, which the router has parsed.
//! #[derive(Clone, Copy)]
//! struct OrderId(u64);
//!
//! let client = Client::embedded();
//! // At most one request for an order at a time, in the whole fleet.
//! let layer = LockLayer::new(client.clone(), |request: &Request<()>| {
//!     let OrderId(id) = request.extensions().get()?;
//!     Some(format!("order:{id}"))
//! });
//! let mut service = layer.layer(Pay);
//!
//! let request = || Request::get("/orders/7").extension(OrderId(7)).body(());
//! let response = service.call(request()?).await?;
//! assert_eq!((response.status().as_u16(), response.body().as_str()), (200, "paid"));
//!
//! let _other = client.lock("order:7").lock().await?;
//! let response = service.call(request()?).await?;
//! assert_eq!(response.status(), 409);
//! // When the lock is free if its holder dies: its watchdog renews it every ten seconds.
//! assert_eq!(response.headers()["retry-after"], "30");
//! # Ok(()) }
//! ```

use std::fmt::Debug;
use std::mem::replace;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use tower_layer::Layer;
use tower_service::Service;

use crate::join::Boxed;
use crate::kind::{Fenced, OwnedKind, Reentrant};
use crate::{Busy, Client, Error, Guard, Lock, Owner, TryAcquire, TryLockError};

/// The shortest time that `Retry-After` can have, and the time in it if it is not known when the next attempt could succeed.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// The longest time in `Retry-After` of a lock that is held: a caller should not wait for hours because a lease is that long.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Adds a lock to a service: see the [module](self).
#[derive(Clone)]
pub struct LockLayer<F> {
    client: Client,
    name: F,
    wait: Duration,
    lease: Option<Duration>,
    at_most: Option<Duration>,
    is_fenced: bool,
    /// `None`: what is known.
    retry_after: Option<Duration>,
}

/// A service that holds a lock while another service handles a request: see the [module](self).
///
/// It is ready when the inner service is. A request that waits for its lock keeps what the inner service has reserved for
/// it when it became ready, such as a permit of a concurrency limit.
///
/// # Cancel safety
///
/// When the future of a response is dropped (as servers do when the connection breaks), it drops that of the inner service and
/// releases the lock in the background. Tasks that the inner service has spawned continue.
#[derive(Clone)]
pub struct LockService<S, F> {
    inner: S,
    layer: LockLayer<F>,
}

impl<F> LockLayer<F> {
    /// Creates a layer. `name` returns the name of the [lock](Client::lock) that a request needs, or `None` if it needs none. Make it
    /// from parsed values, not from the path ([why](self#the-name-comes-from-what-was-parsed)).
    ///
    /// Each request has an owner of its own, also within [`Owner::scope`], so requests with the same name exclude each other. The lock is renewed by the
    /// watchdog, and covers the future of the inner service: the body of its response may be sent later.
    pub fn new<B>(client: Client, name: F) -> LockLayer<F>
    where
        F: Fn(&Request<B>) -> Option<String>,
    {
        LockLayer {
            client,
            name,
            wait: Duration::ZERO,
            lease: None,
            at_most: None,
            is_fenced: false,
            retry_after: None,
        }
    }

    /// Waits at most this long for the lock: [`TryAcquire::wait`]. Default: zero, one attempt.
    pub fn wait(mut self, wait: Duration) -> LockLayer<F> {
        self.wait = wait;
        self
    }

    /// Holds the lock for exactly this long unless the request ends earlier: [`Acquire::lease`](crate::Acquire::lease).
    /// Default: the watchdog renews it.
    pub fn lease(mut self, lease: Duration) -> LockLayer<F> {
        self.lease = Some(lease);
        self
    }

    /// Holds the lock at most this long, although it is renewed: [`Acquire::at_most`](crate::Acquire::at_most). So a request
    /// that hangs is dropped at this limit, with status code 500. Default: no limit.
    pub fn at_most(mut self, limit: Duration) -> LockLayer<F> {
        self.at_most = Some(limit);
        self
    }

    /// Sets the time in the header `Retry-After`, rounded up to whole seconds. Default: 1 s if the store is down or slow; if another
    /// owner holds the lock, the rest of its lease ([`Busy::remaining`]), 1 to 60 s, for which the layer asks the store.
    ///
    /// The default is right for long sections. A lock that its watchdog renews is mostly free earlier than the rest of its lease: set
    /// the time that a request usually takes.
    pub fn retry_after(mut self, time: Duration) -> LockLayer<F> {
        self.retry_after = Some(time);
        self
    }

    /// Holds a [fenced lock](Client::fenced_lock), whose token is a [`FencingToken`] in the extensions of the request. A holder
    /// that was stopped for longer than its lease may write once more when it resumes: only a resource that checks the
    /// token refuses that ([docs/fencing.md](https://github.com/redlatch/redlatch/blob/main/docs/fencing.md)).
    ///
    /// ```
    /// # use http::Request;
    /// # use redlatch::{Client, tower::{FencingToken, LockLayer}};
    /// # let client = Client::embedded();
    /// let layer = LockLayer::new(client, |_: &Request<()>| Some("ledger".into())).fenced();
    ///
    /// async fn book(request: Request<()>) -> Option<u64> {
    ///     let FencingToken(token) = *request.extensions().get()?;
    ///     // … `redlatch_fence('ledger', token)` in the transaction of the write
    ///     Some(token)
    /// }
    /// # drop((layer, book));
    /// ```
    pub fn fenced(mut self) -> LockLayer<F> {
        self.is_fenced = true;
        self
    }

    /// Returns the request for the lock.
    fn acquire<K: OwnedKind>(&self, lock: &Lock<K>) -> TryAcquire<Lock<K>> {
        let mut request = lock.try_lock().wait(self.wait);
        if let Some(lease) = self.lease {
            request = request.lease(lease);
        }
        if let Some(limit) = self.at_most {
            request = request.at_most(limit);
        }
        request
    }
}

impl<S, F: Clone> Layer<S> for LockLayer<F> {
    type Service = LockService<S, F>;

    fn layer(&self, inner: S) -> LockService<S, F> {
        let layer = self.clone();
        LockService { inner, layer }
    }
}

/// The responses of the service itself are empty, so the type of the body must implement `Default`, as those of axum and
/// hyper do.
impl<S, F, B, ResponseBody> Service<Request<B>> for LockService<S, F>
where
    S: Service<Request<B>, Response = Response<ResponseBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    F: Fn(&Request<B>) -> Option<String>,
    B: Send + 'static,
    ResponseBody: Default + Send,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Boxed<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The service that is ready handles this request. A clone need not be ready.
        let clone = self.inner.clone();
        let mut inner = replace(&mut self.inner, clone);
        let layer = &self.layer;
        let Some(name) = (layer.name)(&request) else {
            return Box::pin(async move { inner.call(request).await });
        };
        let retry_after = layer.retry_after;
        if layer.is_fenced {
            let acquire = layer.acquire(&layer.client.fenced_lock(&name));
            let with_token = |guard: &Guard<Lock<Fenced>>, request: &mut Request<B>| {
                let token = FencingToken(guard.token());
                request.extensions_mut().insert(token);
            };
            return handle(inner, request, acquire, with_token, retry_after);
        }
        let acquire = layer.acquire(&layer.client.lock(&name));
        let unchanged = |_: &Guard<Lock<Reentrant>>, _: &mut Request<B>| {};
        handle(inner, request, acquire, unchanged, retry_after)
    }
}

/// The token of the fenced lock that is held for a request: [`LockLayer::fenced`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FencingToken(pub u64);

/// Acquires the lock, changes the request, and calls `inner` while the lock is held.
fn handle<S, K, B, ResponseBody>(
    mut inner: S,
    mut request: Request<B>,
    acquire: TryAcquire<Lock<K>>,
    change: impl FnOnce(&Guard<Lock<K>>, &mut Request<B>) + Send + 'static,
    retry_after: Option<Duration>,
) -> Boxed<'static, Result<S::Response, S::Error>>
where
    S: Service<Request<B>, Response = Response<ResponseBody>> + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    K: OwnedKind,
    B: Send + 'static,
    ResponseBody: Default + Send,
{
    Box::pin(async move {
        // Another request may be handled in the same scope.
        let acquire = match Owner::current() {
            Some(_) => acquire.owner(Owner::new()),
            None => acquire,
        };
        let acquired = match retry_after {
            None => acquire.or_busy().await,
            Some(_) => {
                let acquired = acquire.await.map_err(TryLockError::Failed);
                acquired.and_then(|guard| guard.ok_or(TryLockError::Busy(Busy::default())))
            }
        };
        let was_called = AtomicBool::new(false);
        let handled = match acquired {
            Ok(guard) => {
                change(&guard, &mut request);
                // `call` is within the work: a service may begin in it, before its future is polled. `move`: the service ends before the
                // lock is released.
                let was_called = &was_called;
                let work = async move {
                    was_called.store(true, Ordering::Relaxed);
                    inner.call(request).await
                };
                let handled = guard.run_and_release(work).await;
                handled.map_err(TryLockError::Failed)
            }
            Err(refused) => Err(refused),
        };
        match handled {
            Ok(response) => response,
            Err(TryLockError::Busy(busy)) => {
                let left = busy.remaining.unwrap_or(SHORTEST_RETRY);
                let left = left.clamp(SHORTEST_RETRY, LONGEST_RETRY);
                let mut response = refusal(StatusCode::CONFLICT, retry_after.unwrap_or(left));
                response.extensions_mut().insert(busy);
                Ok(response)
            }
            Err(TryLockError::Failed(error)) => {
                let status = match error {
                    // The lease ended before the lock was acquired, so the request can be repeated.
                    Error::Lost { .. } if !was_called.load(Ordering::Relaxed) => {
                        StatusCode::SERVICE_UNAVAILABLE
                    }
                    _ => status_code(&error),
                };
                let mut response = refusal(status, retry_after.unwrap_or(SHORTEST_RETRY));
                response.extensions_mut().insert(error);
                Ok(response)
            }
        }
    })
}

/// Returns the status code of a response to a request that failed with this error: see the [module](self).
///
/// For services that use locks without this layer.
pub fn status_code(error: &Error) -> StatusCode {
    match error {
        transient if transient.is_transient() => StatusCode::SERVICE_UNAVAILABLE,
        Error::InvalidName { .. } => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Returns an empty response. With a status code that invites the caller to try again, it says when.
fn refusal<B: Default>(status: StatusCode, retry_after: Duration) -> Response<B> {
    let mut response = Response::new(B::default());
    *response.status_mut() = status;
    if matches!(
        status,
        StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE
    ) {
        let part = u64::from(retry_after.subsec_nanos() > 0);
        let seconds = retry_after.as_secs().saturating_add(part);
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

impl<F> Debug for LockLayer<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockLayer")
            .field("wait", &self.wait)
            .field("lease", &self.lease)
            .field("at_most", &self.at_most)
            .field("is_fenced", &self.is_fenced)
            .field("retry_after", &self.retry_after)
            .finish_non_exhaustive()
    }
}

impl<S: Debug, F> Debug for LockService<S, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}
