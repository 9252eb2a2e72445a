//! The HTTP servers of `redlatch serve` and `elect --http`: no client keeps others from an
//! answer.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redlatch_testkit::{Server, shared, unique};

use crate::elect::serving_candidate;
use crate::exporter;
use crate::support::*;

/// How long Prometheus waits, if it is not configured.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(10);

const CLIENTS: usize = 300;

const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n";

/// What clients do that exclude others, if the server lets them.
struct Client {
    what: &'static str,
    /// What it sends at once.
    sends: &'static [u8],
    /// Whether it then sends one byte after the other.
    drips: bool,
}

#[rustfmt::skip]
const CLIENTS_THAT_HINDER: [Client; 6] = [
    Client { what: "idle", sends: b"", drips: false },
    Client { what: "slow", sends: b"GET /metrics HTTP/1.1\r\nX: ", drips: true },
    Client { what: "begins a request", sends: b"GET /metrics HTTP/1.1\r\nHost:", drips: false },
    Client { what: "never reads", sends: REQUEST, drips: false },
    Client { what: "never reads a stream", sends: b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n", drips: false },
    Client { what: "sends garbage", sends: b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n\0\xff", drips: true },
];

/// Asserts that a request is answered while the clients are there. They come back whenever the
/// server closes a connection.
fn assert_answered(address: &str, path: &str, client: &Client) {
    let connect = || {
        let mut stream = TcpStream::connect(address).unwrap();
        // The server may have closed it already.
        let _ = stream.write_all(client.sends);
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let ended = AtomicBool::new(false);
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| connect()).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for stream in &mut clients {
                    // `WouldBlock`, or an unread response.
                    let is_open = match stream.peek(&mut [0]) {
                        Ok(read) => read > 0,
                        Err(error) => error.kind() == ErrorKind::WouldBlock,
                    };
                    let is_sent = !client.drips || stream.write_all(b"x").is_ok();
                    if !is_open || !is_sent {
                        *stream = connect();
                    }
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        let begun = Instant::now();
        let mut last = answer(address, path);
        // On a busy machine, 64 of the clients may come between the connection and the request.
        while last.is_err() && begun.elapsed() < SCRAPE_TIMEOUT {
            last = answer(address, path);
        }
        ended.store(true, Ordering::Relaxed);
        let answer = last.unwrap_or_else(|error| panic!("{path}, {}: {error}", client.what));
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    });
}

/// Returns the answer to a request like that of Prometheus or of a readiness probe.
fn answer(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SCRAPE_TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    match stream.read_to_string(&mut answer)? {
        // The server closed the connection before the request arrived.
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(answer),
    }
}

#[test]
fn clients_do_not_keep_others_from_an_answer() {
    let server = Server::start();
    let (_exporter, metrics) = exporter::start(&server.url(), &[]);
    let (_candidate, leader) = serving_candidate(&server.url(), &[], &unique("elect"));
    until("it leads", || {
        request(&leader, "GET /leader").starts_with("HTTP/1.1 200 ")
    });
    until("the leader has been read", || {
        request(&leader, "GET /healthz").starts_with("HTTP/1.1 200 ")
    });
    for client in &CLIENTS_THAT_HINDER {
        assert_answered(&metrics, "/metrics", client);
        assert_answered(&leader, "/healthz", client);
    }
}

#[test]
fn connections_are_closed_after_one_request() {
    let (_candidate, address) = serving_candidate(&shared().url(), &[], &unique("elect"));
    until("a response, and the end of the connection", || {
        answer(&address, "/leader").is_ok_and(|answer| answer.contains("connection: close"))
    });
}

/// A readiness probe gets an answer, and not a refused connection, while the store is down.
#[test]
fn candidate_answers_before_it_has_reached_the_store() {
    let mut server = Server::start();
    server.kill();
    let (candidate, address) = serving_candidate(&server.url(), &[], &unique("elect"));
    let status_of = |path: &str| request(&address, &format!("GET {path}"));
    let leader = status_of("/leader");
    assert!(leader.starts_with("HTTP/1.1 503 "), "{leader}");
    assert!(leader.contains("\"leads\":false"), "{leader}");
    let health = status_of("/healthz");
    assert!(health.starts_with("HTTP/1.1 503 "), "{health}");
    assert!(status_of("/").starts_with("HTTP/1.1 404 "));
    candidate.until_stderr("waiting for the store");
    server.restart();
    until("it leads", || {
        status_of("/leader").starts_with("HTTP/1.1 200 ")
    });
    until("the leader has been read", || {
        status_of("/healthz").starts_with("HTTP/1.1 200 ")
    });
}
