//! The layer for HTTP services, mostly on the embedded store and the paused clock.

use std::future::{pending, ready};
use std::pin::Pin;
use std::sync::atomic::Ordering::SeqCst;
use std::task::Context;

use http::{Request, Response, StatusCode};
use redlatch::Busy;
use redlatch::tower::{FencingToken, LockLayer, LockService, status_code};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use crate::common::prelude::*;

/// Returns the name of the lock for a request.
type NameOf = fn(&Request<()>) -> Option<String>;
type Handled = Result<Response<String>, &'static str>;

/// What happens while requests are handled.
#[derive(Default)]
struct Record {
    running: AtomicU32,
    most: AtomicU32,
    completed: AtomicU32,
}

/// Counts a request that is handled, until it is dropped.
struct Running(Arc<Record>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
    }
}

/// An inner service. `/fail` fails and `/hang` never ends; other requests take a second. Panics if it is called without being ready.
#[derive(Default)]
struct Handler {
    record: Arc<Record>,
    is_ready: bool,
}

impl Clone for Handler {
    /// A clone is not ready.
    fn clone(&self) -> Handler {
        Handler {
            record: self.record.clone(),
            is_ready: false,
        }
    }
}

impl Service<Request<()>> for Handler {
    type Response = Response<String>;
    type Error = &'static str;
    type Future = Pin<Box<dyn Future<Output = Handled> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "not ready");
        let record = self.record.clone();
        // Counted in `call`, where a service may begin its work.
        let running = record.running.fetch_add(1, SeqCst) + 1;
        record.most.fetch_max(running, SeqCst);
        let running = Running(record);
        let token = request.extensions().get().copied();
        Box::pin(async move {
            match request.uri().path() {
                "/fail" => return Err("failed"),
                "/hang" => pending().await,
                _ => sleep(SECOND).await,
            }
            running.0.completed.fetch_add(1, SeqCst);
            Ok(Response::new(match token {
                Some(FencingToken(token)) => format!("done with {token}"),
                None => "done".to_owned(),
            }))
        })
    }
}

/// Returns the path as the name of the lock.
fn path(request: &Request<()>) -> Option<String> {
    Some(request.uri().path().to_owned())
}

/// Returns a layer with a client of its own.
fn by_path() -> LockLayer<NameOf> {
    LockLayer::new(Client::embedded(), path)
}

/// Sends a request, as a server does: on a clone that is ready.
async fn send<F>(service: &LockService<Handler, F>, path: &str) -> Handled
where
    F: Fn(&Request<()>) -> Option<String> + Clone,
{
    let mut service = service.clone();
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(Request::get(path).body(()).unwrap()).await
}

/// Asserts the status code and the header of an empty response. Returns its error.
#[track_caller]
fn assert_refused(handled: Handled, status: u16, retry_after: Option<&str>) -> Option<Error> {
    let mut response = handled.unwrap();
    assert_eq!(response.status(), status);
    let header = response.headers().get("retry-after");
    assert_eq!(header.map(|value| value.to_str().unwrap()), retry_after);
    assert_eq!(response.body(), "");
    response.extensions_mut().remove()
}

#[tokio::test(start_paused = true)]
async fn requests_of_fenced_layer_have_growing_tokens() {
    let client = Client::embedded();
    let name: NameOf = path;
    let layer = LockLayer::new(client.clone(), name).fenced();
    let service = layer.wait(HOUR).layer(Handler::default());
    for n in 1..4 {
        let response = send(&service, "/a").await.unwrap();
        assert_eq!(response.body(), &format!("done with {n}"));
    }
    // A plain lock has none. Of requests at the same time, each has its own.
    let plain = by_path().layer(Handler::default());
    assert_eq!(send(&plain, "/a").await.unwrap().body(), "done");
    let (one, other) = tokio::join!(send(&service, "/a"), send(&service, "/a"));
    let mut bodies = [one, other].map(|response| response.unwrap().into_body());
    bodies.sort();
    assert_eq!(bodies, ["done with 4", "done with 5"]);
    // It is the lock that other users of the name acquire.
    let guard = held(&client.fenced_lock("/a")).await;
    assert_eq!(guard.token(), 6);
    let busy = LockLayer::new(client, name)
        .fenced()
        .layer(Handler::default());
    assert_refused(send(&busy, "/a").await, 409, Some("30"));
}

#[tokio::test(start_paused = true)]
async fn one_request_for_a_name_is_handled_at_a_time() {
    let handler = Handler::default();
    let service = by_path().layer(handler.clone());
    let (first, second, other) = tokio::join!(
        send(&service, "/orders/1"),
        send(&service, "/orders/1"),
        send(&service, "/orders/2"),
    );
    assert_eq!(first.unwrap().body(), "done");
    assert_eq!(assert_refused(second, 409, Some("30")), None);
    assert_eq!(other.unwrap().status(), 200);
    assert_eq!(handler.record.most.load(SeqCst), 2);
    // The lock is free as soon as there is a response.
    send(&service, "/orders/1").await.unwrap();
    assert_eq!(handler.record.completed.load(SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn requests_of_one_scope_exclude_each_other() {
    let service = by_path().layer(Handler::default());
    let both = async { tokio::join!(send(&service, "/a"), send(&service, "/a")) };
    let (one, two) = Owner::new().scope(both).await;
    assert_eq!(one.unwrap().status(), 200);
    assert_refused(two, 409, Some("30"));
}

#[tokio::test(start_paused = true)]
async fn requests_wait_up_to_the_limit() {
    let handler = Handler::default();
    let service = by_path().wait(SECOND * 3 / 2).layer(handler.clone());
    let begun = Instant::now();
    let (first, second, third) = tokio::join!(
        send(&service, "/a"),
        send(&service, "/a"),
        send(&service, "/a"),
    );
    assert_eq!(first.and(second).unwrap().status(), 200);
    // The second one has the hold of the first, which is 1.5 s old.
    assert_refused(third, 409, Some("29"));
    assert_eq!(handler.record.most.load(SeqCst), 1);
    assert_eq!(begun.elapsed().as_secs(), 2);
}

/// `Retry-After` is the rest of the lease, unless the layer sets a time.
#[tokio::test(start_paused = true)]
async fn refusal_says_who_holds_the_lock_and_for_how_long() {
    for (lease, fixed, expected) in [
        (7, None, "7"),
        (1, None, "1"),
        (1000, None, "60"),
        (7, Some(3), "3"),
    ] {
        let client = Client::embedded();
        let other = client
            .lock("/a")
            .lock()
            .lease(lease * SECOND)
            .note("import");
        let other = other.await.unwrap();
        tokio::time::sleep(SECOND / 2 + SECOND / 4).await;
        let mut layer = LockLayer::new(client, path);
        if let Some(fixed) = fixed {
            layer = layer.retry_after(fixed * SECOND);
        }
        let mut response = send(&layer.layer(Handler::default()), "/a").await.unwrap();
        assert_eq!(response.status(), 409);
        assert_eq!(response.headers()["retry-after"], expected);
        let busy: Busy = response.extensions_mut().remove().unwrap();
        // The layer with a time of its own does not ask the store.
        let holder = fixed.is_none().then(|| other.owner_id());
        assert_eq!(busy.holder, holder);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_without_a_name_need_no_lock() {
    let handler = Handler::default();
    let client = Client::embedded();
    let writes = |request: &Request<()>| {
        let method = request.method();
        (method != http::Method::GET).then(|| "writes".to_owned())
    };
    let service = LockLayer::new(client.clone(), writes).layer(handler.clone());
    let _other = held(&client.lock("writes")).await;
    let (a, b) = tokio::join!(send(&service, "/a"), send(&service, "/a"));
    assert_eq!(a.and(b).unwrap().status(), 200);
    assert_eq!(handler.record.most.load(SeqCst), 2);
    let mut service = service;
    poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
    let write = Request::post("/a").body(()).unwrap();
    // The others took a second.
    assert_refused(service.call(write).await, 409, Some("29"));
}

/// The worst case would be an inner future that is polled while the next request is handled.
#[tokio::test(start_paused = true)]
async fn inner_future_is_dropped_when_the_lock_is_lost() {
    let limit = 10 * SECOND;
    for (layer, loss) in [
        (by_path().lease(limit), Loss::LeaseEnded),
        (by_path().at_most(limit), Loss::HeldTooLong { limit }),
    ] {
        let handler = Handler::default();
        let service = layer.wait(HOUR).layer(handler.clone());
        let begun = Instant::now();
        let next = async {
            // After the other one has the lock.
            sleep(SECOND).await;
            send(&service, "/hang").await
        };
        let both = async { tokio::join!(send(&service, "/hang"), next) };
        let (lost, next) = within_limit("lost", both).await;
        let error = assert_refused(lost, 500, None).unwrap();
        assert_matches!(error, Error::Lost { reason, .. } if reason == loss);
        // It was handled from then on, until its own limit.
        assert_refused(next, 500, None);
        assert_eq!(begun.elapsed().as_secs(), 20);
        assert_eq!(handler.record.most.load(SeqCst), 1);
        assert_eq!(handler.record.running.load(SeqCst), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_response_drops_the_inner_future_and_releases() {
    let handler = Handler::default();
    let client = Client::embedded();
    let service = LockLayer::new(client.clone(), path).layer(handler.clone());
    assert!(timeout(HOUR, send(&service, "/hang")).await.is_err());
    let record = &handler.record;
    assert_eq!(record.most.load(SeqCst), 1);
    assert_eq!(record.running.load(SeqCst), 0);
    client.flush().await;
    assert!(!client.lock("/hang").is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn inner_service_is_dropped_before_the_release() {
    /// Records the highest number of holds when an instance is dropped.
    #[derive(Clone)]
    struct Inner(Client, Arc<AtomicUsize>);
    impl Drop for Inner {
        fn drop(&mut self) {
            self.1.fetch_max(self.0.status().holds, SeqCst);
        }
    }
    impl Service<Request<()>> for Inner {
        type Response = Response<String>;
        type Error = &'static str;
        type Future = std::future::Ready<Handled>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: Request<()>) -> Self::Future {
            ready(Ok(Response::default()))
        }
    }
    let (client, holds) = (Client::embedded(), Arc::new(AtomicUsize::new(0)));
    let mut service = LockLayer::new(client.clone(), path).layer(Inner(client, holds.clone()));
    let request = Request::get("/a").body(()).unwrap();
    service.call(request).await.unwrap();
    assert_eq!(holds.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn errors_of_the_inner_service_pass_and_release() {
    let client = Client::embedded();
    let service = LockLayer::new(client.clone(), path).layer(Handler::default());
    assert_eq!(send(&service, "/fail").await.unwrap_err(), "failed");
    assert!(!client.lock("/fail").is_locked().await.unwrap());
}

/// Becomes ready only after a while, as a service behind a limit.
#[tokio::test(start_paused = true)]
async fn service_is_ready_when_the_inner_service_is() {
    #[derive(Clone)]
    struct Limited(Arc<AtomicBool>);
    impl Service<Request<()>> for Limited {
        type Response = Response<String>;
        type Error = &'static str;
        type Future = std::future::Ready<Handled>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            match self.0.load(SeqCst) {
                true => Poll::Ready(Err("closed")),
                false => Poll::Pending,
            }
        }
        fn call(&mut self, _: Request<()>) -> Self::Future {
            ready(Err("called"))
        }
    }
    let closed = Arc::new(AtomicBool::new(false));
    let mut service = by_path().layer(Limited(closed.clone()));
    let poll = poll_fn(|cx| Poll::Ready(service.poll_ready(cx))).await;
    assert!(poll.is_pending());
    closed.store(true, SeqCst);
    let poll = poll_fn(|cx| Poll::Ready(service.poll_ready(cx))).await;
    assert_eq!(poll, Poll::Ready(Err("closed")));
}

#[tokio::test(start_paused = true)]
async fn invalid_names_and_settings_have_their_status() {
    let invalid = |_: &Request<()>| Some(String::new());
    let service = LockLayer::new(Client::embedded(), invalid).layer(Handler::default());
    let error = assert_refused(send(&service, "/a").await, 400, None);
    assert_matches!(error, Some(Error::InvalidName { .. }));

    let service = by_path().lease(Duration::ZERO).layer(Handler::default());
    let error = assert_refused(send(&service, "/a").await, 500, None);
    assert_matches!(error, Some(Error::InvalidLease { .. }));
}

#[tokio::test]
async fn outage_of_the_store_is_temporary() {
    let mut server = Server::start();
    // Short, because the request fails when it ends.
    let connect = || async {
        let builder = Client::builder().response_timeout(SECOND);
        builder.connect(&server.url()).await
    };
    let client = retry_transient(connect).await;
    server.kill();
    let handler = Handler::default();
    let layer = LockLayer::new(client, path).retry_after(Duration::from_millis(2001));
    let service = layer.layer(handler.clone());
    let error = assert_refused(send(&service, "/a").await, 503, Some("3"));
    let error = error.unwrap();
    assert!(error.is_transient(), "{error}");
    assert_eq!(status_code(&error), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(handler.record.most.load(SeqCst), 0);
}
