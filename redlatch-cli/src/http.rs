//! The HTTP server of `redlatch exporter` and `redlatch elect --http`: answers each GET with a function of the request.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::exit::Failure;

/// Limit of open connections. A request is short, and Prometheus uses one connection.
const MAX_CONNECTIONS: usize = 64;

/// Time limit for a connection, which serves one request: connections that stay open would exclude others.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) const TEXT: &str = "text/plain; charset=utf-8";

/// Returns the address to listen on: only this machine unless the user names another.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let parsed = text.parse();
    parsed.map_err(|_| "use an address and a port, such as 127.0.0.1:9187 or [::1]:9187".to_owned())
}

/// Listens on an address. Returns the address with its port, too.
pub(crate) async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| Failure::system(&format!("cannot listen on {address}"), &error))?;
    let bound = listener
        .local_addr()
        .map_err(|error| Failure::system("cannot read the own address", &error))?;
    Ok((listener, bound))
}

/// Answers requests. `respond` is called for GET and HEAD.
pub(crate) async fn serve(
    listener: TcpListener,
    respond: impl Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Clone + Send + Sync + 'static,
) -> Infallible {
    let mut connections = JoinSet::new();
    loop {
        while connections.len() >= MAX_CONNECTIONS {
            connections.join_next().await;
        }
        let stream = tokio::select! {
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // Too many open files, for example. It may pass.
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let respond = respond.clone();
        connections.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let response = match *request.method() {
                    Method::GET | Method::HEAD => respond(&request),
                    _ => method_not_allowed(),
                };
                async move { Ok::<_, Infallible>(response) }
            });
            // An error concerns only this client.
            let serving = http1::Builder::new()
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(CONNECTION_TIMEOUT, serving).await;
        });
    }
}

/// Returns a response with this status and type of content.
pub(crate) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let content_type = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

fn method_not_allowed() -> Response<Full<Bytes>> {
    let mut response = response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "use GET\n");
    let allowed = HeaderValue::from_static("GET, HEAD");
    response.headers_mut().insert(ALLOW, allowed);
    response
}
