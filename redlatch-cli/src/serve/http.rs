//! The HTTP server of `redlatch serve` and `redlatch elect --http`: answers each GET with a function
//! of the request.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use http_body_util::channel::Channel;
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::exit::Failure;
use crate::output::escape;

/// Limit of open connections without a stream. A request is short, and Prometheus uses one
/// connection.
const MAX_CONNECTIONS: usize = 64;

/// Limit of connections with a stream: of open pages.
const MAX_STREAMS: usize = 128;

/// Time limit for the request line and the headers, which clients send at once.
const HEADER_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for a connection, which serves one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a stream lasts. It is short, so that none remains of a client that is gone.
pub(super) const STREAM_TIME: Duration = Duration::from_secs(60);

/// Either complete, or a stream.
pub(crate) type Response = hyper::Response<Either<Full<Bytes>, Channel<Bytes>>>;

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
    phase: Arc<AtomicU8>,
}

/// The phases of a connection.
const WITHOUT_REQUEST: u8 = 0;
const WITH_REQUEST: u8 = 1;
const STREAM: u8 = 2;

impl Connection {
    fn is(&self, phase: u8) -> bool {
        self.phase.load(Ordering::Relaxed) == phase
    }
}

/// Answers requests. `respond` is called for GET and HEAD.
///
/// A client with many connections does not keep those with few from an answer: if there are too
/// many connections, with or without a stream, closes one of the address with the most of them, the
/// oldest one without a request, else the oldest.
pub(crate) async fn serve(
    listener: TcpListener,
    respond: impl Fn(&Request<Incoming>) -> Response + Clone + Send + Sync + 'static,
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
        for (are_streams, limit) in [(false, MAX_CONNECTIONS), (true, MAX_STREAMS)] {
            while let Some(index) = superfluous(&connections, are_streams, limit) {
                connections.remove(index);
            }
        }
        let respond = respond.clone();
        let phase = Arc::new(AtomicU8::new(WITHOUT_REQUEST));
        let (reached, served) = (phase.clone(), phase.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let response = match *request.method() {
                Method::GET | Method::HEAD => respond(&request),
                _ => method_not_allowed(),
            };
            let now = match response.body() {
                Either::Left(_) => WITH_REQUEST,
                Either::Right(_) => STREAM,
            };
            reached.store(now, Ordering::Relaxed);
            async move { Ok::<_, Infallible>(response) }
        });
        let mut task = JoinSet::new();
        task.spawn(async move {
            let serving = http1::Builder::new()
                .keep_alive(false)
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            let mut serving = pin!(serving);
            // An error concerns only this client.
            let served_in_time = tokio::time::timeout(CONNECTION_TIMEOUT, &mut serving).await;
            if served_in_time.is_err() && served.load(Ordering::Relaxed) == STREAM {
                let _ = tokio::time::timeout(STREAM_TIME, serving).await;
            }
        });
        connections.push_back(Connection { peer, task, phase });
        // Requests that have arrived are read before the next connection.
        tokio::task::yield_now().await;
    }
}

/// Returns the index of the connection to close, of those from the oldest to the newest, if there
/// are too many with a stream, or too many without.
fn superfluous(
    connections: &VecDeque<Connection>,
    are_streams: bool,
    limit: usize,
) -> Option<usize> {
    let of_this_kind = || {
        let all = connections.iter().enumerate();
        all.filter(|(_, one)| one.is(STREAM) == are_streams)
    };
    let mut counts = HashMap::new();
    for (_, one) in of_this_kind() {
        *counts.entry(one.peer).or_insert(0) += 1;
    }
    if counts.values().sum::<usize>() < limit {
        return None;
    }
    let most = counts.values().max().copied();
    let candidates = || of_this_kind().filter(|(_, one)| counts.get(&one.peer).copied() == most);
    let idle = candidates().find(|(_, one)| one.is(WITHOUT_REQUEST));
    idle.or(candidates().next()).map(|(index, _)| index)
}

/// Returns a response with this status and type of content.
pub(crate) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response {
    with_body(status, content_type, Either::Left(Full::new(body.into())))
}

/// The same with a body that may be a stream.
pub(super) fn with_body(
    status: StatusCode,
    content_type: &'static str,
    body: Either<Full<Bytes>, Channel<Bytes>>,
) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let content_type = HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// Returns a response in JSON: 200 if `is_good`, else 503.
pub(super) fn json(value: &impl Serialize, is_good: bool) -> Response {
    let body = escape::to_json(value).unwrap_or_default() + "\n";
    response(status(is_good), "application/json", body)
}

/// Returns whether the store answers, as a response.
pub(super) fn health(failure: Option<&str>) -> Response {
    let body = failure.map_or("ok".into(), escape::line) + "\n";
    response(status(failure.is_none()), TEXT, body)
}

fn status(is_good: bool) -> StatusCode {
    match is_good {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn method_not_allowed() -> Response {
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
    async fn client_that_does_not_read_a_stream_is_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (streamed, mut streams) = tokio::sync::mpsc::unbounded_channel();
        let respond = move |_: &_| {
            let (sender, body) = Channel::new(1);
            let _ = streamed.send(sender);
            with_body(StatusCode::OK, TEXT, Either::Right(body))
        };
        tokio::spawn(serve(listener, respond));
        let mut client = std::net::TcpStream::connect(address).unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n";
        client.write_all(request).unwrap();
        let mut stream = streams.recv().await.unwrap();
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        let chunk = Bytes::from(vec![b'x'; LENGTH]);
        while stream.send_data(chunk.clone()).await.is_ok() {}
        assert!(begun.elapsed() < CONNECTION_TIMEOUT + 2 * STREAM_TIME);
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
        let connections = |list: &[(u8, u8)]| -> VecDeque<Connection> {
            let connection = |&(address, phase)| Connection {
                peer: IpAddr::from([127, 0, 0, address]),
                task: JoinSet::new(),
                phase: Arc::new(AtomicU8::new(phase)),
            };
            list.iter().map(connection).collect()
        };
        const IDLE: u8 = WITHOUT_REQUEST;
        const BUSY: u8 = WITH_REQUEST;
        for (list, closed, closed_stream) in [
            (&[(1, IDLE), (2, BUSY), (2, IDLE)][..], Some(2), None),
            (&[(1, IDLE), (2, BUSY), (2, BUSY)], Some(1), None),
            (&[(1, BUSY), (2, BUSY), (2, BUSY), (1, IDLE)], Some(3), None),
            (&[(1, STREAM), (1, BUSY), (1, IDLE)], None, None),
            (
                &[(1, STREAM), (2, STREAM), (2, IDLE), (2, STREAM)],
                None,
                Some(1),
            ),
        ] {
            let connections = connections(list);
            assert_eq!(superfluous(&connections, false, 3), closed, "{list:?}");
            assert_eq!(
                superfluous(&connections, true, 3),
                closed_stream,
                "{list:?}"
            );
        }
    }
}
