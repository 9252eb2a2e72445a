//! The HTTP server of `redlatch exporter` and `redlatch elect --http`: answers each GET with a
//! function of the request.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::exit::Failure;

/// Limit of open connections. A request is short, and Prometheus uses one connection.
const MAX_CONNECTIONS: usize = 64;

/// Time limit for the request line and the headers, which clients send at once.
const HEADER_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for a connection, which serves one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) const TEXT: &str = "text/plain; charset=utf-8";

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

/// An open connection. It is closed when dropped.
struct Connection {
    peer: IpAddr,
    task: JoinSet<()>,
    has_request: Arc<AtomicBool>,
}

/// Answers requests. `respond` is called for GET and HEAD.
///
/// A client with many connections does not keep those with few from an answer: if there are too
/// many connections, closes one of the address with the most of them, the oldest one without a
/// request, else the oldest.
pub(crate) async fn serve(
    listener: TcpListener,
    respond: impl Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Clone + Send + Sync + 'static,
) -> Infallible {
    // From the oldest to the newest.
    let mut connections = VecDeque::new();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok((stream, address)) => (stream, address.ip().to_canonical()),
            // Too many open files, for example. It may pass.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        connections
            .retain_mut(|connection: &mut Connection| connection.task.try_join_next().is_none());
        if connections.len() == MAX_CONNECTIONS {
            connections.remove(superfluous(&connections));
        }
        let respond = respond.clone();
        let has_request = Arc::new(AtomicBool::new(false));
        let requested = has_request.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            requested.store(true, Ordering::Relaxed);
            let response = match *request.method() {
                Method::GET | Method::HEAD => respond(&request),
                _ => method_not_allowed(),
            };
            async move { Ok::<_, Infallible>(response) }
        });
        let mut task = JoinSet::new();
        task.spawn(async move {
            // An error concerns only this client.
            let serving = http1::Builder::new()
                .keep_alive(false)
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(CONNECTION_TIMEOUT, serving).await;
        });
        connections.push_back(Connection {
            peer,
            task,
            has_request,
        });
        // Requests that have arrived are read before the next connection.
        tokio::task::yield_now().await;
    }
}

/// Returns the index of the connection to close, of those from the oldest to the newest.
fn superfluous(connections: &VecDeque<Connection>) -> usize {
    let mut counts = HashMap::new();
    for one in connections {
        *counts.entry(one.peer).or_insert(0) += 1;
    }
    let most = counts.values().max().copied();
    let candidates = || {
        let all = connections.iter().enumerate();
        all.filter(|(_, one)| counts.get(&one.peer).copied() == most)
    };
    let idle = candidates().find(|(_, one)| !one.has_request.load(Ordering::Relaxed));
    idle.or(candidates().next()).map_or(0, |(index, _)| index)
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::{TcpSocket, TcpStream};

    use super::*;

    /// The length of a response that is too long for the buffers of the system.
    const LENGTH: usize = 1 << 20;

    /// Starts a server of long responses.
    fn start() -> SocketAddr {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_send_buffer_size(4096).unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = socket.local_addr().unwrap();
        let body = Bytes::from(vec![b'x'; LENGTH]);
        let respond = move |_: &_| response(StatusCode::OK, TEXT, body.clone());
        tokio::spawn(serve(socket.listen(1024).unwrap(), respond));
        address
    }

    /// Sends a request. Returns when the response arrives, of which nothing is read.
    async fn request(address: SocketAddr) -> TcpStream {
        // Sent before the server accepts it, so that a pause does not delay its headers.
        let mut client = std::net::TcpStream::connect(address).unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n";
        client.write_all(request).unwrap();
        client.set_nonblocking(true).unwrap();
        let client = TcpStream::from_std(client).unwrap();
        client.readable().await.unwrap();
        client
    }

    /// Reads a response. Returns whether it is complete.
    async fn is_complete(mut client: TcpStream) -> bool {
        let mut received = Vec::new();
        let _ = client.read_to_end(&mut received).await;
        received.len() > LENGTH
    }

    #[tokio::test]
    async fn client_that_does_not_read_is_disconnected() {
        let client = request(start()).await;
        tokio::time::pause();
        tokio::time::advance(2 * CONNECTION_TIMEOUT).await;
        tokio::time::resume();
        assert!(!is_complete(client).await);
    }

    #[tokio::test]
    async fn oldest_of_too_many_clients_that_do_not_read_is_disconnected() {
        let address = start();
        let oldest = request(address).await;
        let mut others = Vec::new();
        for _ in 1..MAX_CONNECTIONS {
            others.push(request(address).await);
        }
        assert!(is_complete(request(address).await).await);
        assert!(!is_complete(oldest).await);
    }

    #[tokio::test]
    async fn connection_of_the_address_with_the_most_is_closed() {
        let connections = |list: &[(u8, bool)]| -> VecDeque<Connection> {
            let connection = |&(address, has_request)| Connection {
                peer: IpAddr::from([127, 0, 0, address]),
                task: JoinSet::new(),
                has_request: Arc::new(AtomicBool::new(has_request)),
            };
            list.iter().map(connection).collect()
        };
        for (list, closed) in [
            (&[(1, false), (2, true), (2, false)][..], 2),
            (&[(1, false), (2, true), (2, true)], 1),
            (&[(1, true), (2, true), (2, true), (1, false)], 3),
        ] {
            assert_eq!(superfluous(&connections(list)), closed, "{list:?}");
        }
    }
}
