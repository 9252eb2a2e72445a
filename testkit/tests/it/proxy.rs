//! A network that breaks to order.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use redlatch_testkit::{Proxy, Server, shared};

const PONG: &[u8] = b"+PONG\r\n";

fn through(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("the proxy");
    // Only for what never comes: a test that waits for it has failed.
    let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
    stream
}

fn ping(stream: &mut TcpStream) {
    stream.write_all(b"PING\r\n").expect("an open connection");
}

fn hear_pong(stream: &mut TcpStream) {
    let mut answer = [0; PONG.len()];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, PONG);
}

/// What still comes, and how it ends.
fn rest(stream: &mut TcpStream) -> (Vec<u8>, Option<ErrorKind>) {
    let mut rest = Vec::new();
    let end = stream.read_to_end(&mut rest);
    (rest, end.err().map(|error| error.kind()))
}

#[test]
fn both_ways_take_longer() {
    let proxy = Proxy::to(shared().port());
    let mut stream = through(&proxy);
    let delay = Duration::from_millis(200);
    proxy.delay(delay);
    let begun = Instant::now();
    // The second one is not later than the first one.
    ping(&mut stream);
    ping(&mut stream);
    hear_pong(&mut stream);
    hear_pong(&mut stream);
    assert!(begun.elapsed() >= 2 * delay);
    proxy.delay(Duration::ZERO);
    ping(&mut stream);
    hear_pong(&mut stream);
}

#[test]
fn connections_end() {
    let proxy = Proxy::to(shared().port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);
    proxy.cut();
    assert_eq!(rest(&mut stream), (vec![], None));
}

#[test]
fn connections_break() {
    let proxy = Proxy::to(shared().port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);
    proxy.reset();
    let broken = Some(ErrorKind::ConnectionReset);
    assert_eq!(rest(&mut stream), (vec![], broken));

    proxy.reset_after(PONG.len() + 2);
    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);
    ping(&mut stream);
    assert_eq!(rest(&mut stream), (PONG[..2].to_vec(), broken));

    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);
}

#[test]
fn one_way_is_lost() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);

    proxy.swallow_requests(true);
    stream
        .write_all(b"SET lost 1\r\n")
        .expect("an open connection");
    proxy.wait_until_swallowed();
    proxy.swallow_requests(false);
    proxy.swallow_replies(true);
    stream
        .write_all(b"SET done 1\r\n")
        .expect("an open connection");
    proxy.wait_until_swallowed();
    proxy.swallow_replies(false);
    ping(&mut stream);
    hear_pong(&mut stream);
    assert_eq!(server.ask::<Vec<String>>(&["KEYS", "*"]), ["done"]);
}

#[test]
fn one_side_ends() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);

    proxy.end_replies();
    assert_eq!(rest(&mut stream), (vec![], None));
    stream
        .write_all(b"LPUSH list 1\r\n")
        .expect("an open connection");
    let () = server.ask(&["BLPOP", "list", "0"]);

    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);
    // The server closes what has ended, and so everything.
    proxy.end_requests();
    assert_eq!(rest(&mut stream), (vec![], None));
}

#[test]
fn a_frozen_server_does_not_keep_connections_from_being_cut() {
    // Its backlog is full at once: whoever connects then waits for minutes.
    let server = Server::start_with(&["--tcp-backlog", "1"]);
    let proxy = Proxy::to(server.port());
    server.freeze();
    let mut streams: Vec<TcpStream> = (0..8).map(|_| through(&proxy)).collect();
    for stream in &mut streams {
        ping(stream);
    }
    let (tell, told) = channel();
    let ended = thread::spawn(move || {
        while told.try_recv().is_err() {
            proxy.cut();
            thread::sleep(Duration::from_millis(20));
        }
        proxy
    });
    for stream in &mut streams {
        assert!(!matches!(
            rest(stream).1,
            Some(ErrorKind::WouldBlock | ErrorKind::TimedOut)
        ));
    }
    server.thaw();
    tell.send(()).expect("somebody who cuts");
    let proxy = ended.join().expect("the proxy");
    let mut stream = through(&proxy);
    ping(&mut stream);
    hear_pong(&mut stream);
}
