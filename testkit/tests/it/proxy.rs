//! Tests of the proxy that breaks connections on demand.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use redlatch_testkit::{Proxy, Server, shared};

const PONG: &[u8] = b"+PONG\r\n";

fn through(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("the proxy");
    // Applies only to data that never arrives: a test that reaches this timeout has failed.
    let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
    stream
}

fn ping(stream: &mut TcpStream) {
    stream.write_all(b"PING\r\n").expect("an open connection");
}

fn read_pong(stream: &mut TcpStream) {
    let mut answer = [0; PONG.len()];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, PONG);
}

/// Returns the remaining data, and how the stream ends.
fn rest(stream: &mut TcpStream) -> (Vec<u8>, Option<ErrorKind>) {
    let mut rest = Vec::new();
    let end = stream.read_to_end(&mut rest);
    (rest, end.err().map(|error| error.kind()))
}

#[test]
fn delay_applies_to_both_directions() {
    let proxy = Proxy::to(shared().port());
    let mut stream = through(&proxy);
    let delay = Duration::from_millis(200);
    proxy.delay(delay);
    let begun = Instant::now();
    // Delays do not add up: the second answer is as fast as the first one.
    ping(&mut stream);
    ping(&mut stream);
    read_pong(&mut stream);
    read_pong(&mut stream);
    assert!(begun.elapsed() >= 2 * delay);
    proxy.delay(Duration::ZERO);
    ping(&mut stream);
    read_pong(&mut stream);
}

#[test]
fn cut_closes_connections() {
    let proxy = Proxy::to(shared().port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);
    proxy.cut();
    assert_eq!(rest(&mut stream), (vec![], None));
}

#[test]
fn reset_breaks_connections() {
    let proxy = Proxy::to(shared().port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);
    proxy.reset();
    let broken = Some(ErrorKind::ConnectionReset);
    assert_eq!(rest(&mut stream), (vec![], broken));

    proxy.reset_after(PONG.len() + 2);
    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);
    ping(&mut stream);
    assert_eq!(rest(&mut stream), (PONG[..2].to_vec(), broken));

    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);
}

#[test]
fn one_direction_can_be_discarded() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);

    proxy.discard_requests(true);
    stream
        .write_all(b"SET lost 1\r\n")
        .expect("an open connection");
    proxy.wait_until_discarded();
    proxy.discard_requests(false);
    proxy.discard_replies(true);
    stream
        .write_all(b"SET done 1\r\n")
        .expect("an open connection");
    proxy.wait_until_discarded();
    proxy.discard_replies(false);
    ping(&mut stream);
    read_pong(&mut stream);
    assert_eq!(server.command::<Vec<String>>(&["KEYS", "*"]), ["done"]);
}

/// Whatever else the client has sent before, and in the same packet.
#[test]
fn answer_to_a_script_can_be_lost() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let mut stream = through(&proxy);
    let set = |key: &str| {
        let script = "return redis.call('SET', KEYS[1], 1)";
        let (a, b) = (script.len(), key.len());
        format!("*4\r\n$4\r\nEVAL\r\n${a}\r\n{script}\r\n$1\r\n1\r\n${b}\r\n{key}\r\n")
    };
    proxy.lose_next_answer();
    ping(&mut stream);
    read_pong(&mut stream);
    let registry = "redlatch_client:{me}";
    let sent = [&*set(registry), &set("done"), &set("never")].concat();
    stream
        .write_all(sent.as_bytes())
        .expect("an open connection");
    proxy.wait_until_lost();
    let mut keys: Vec<String> = server.command(&["KEYS", "*"]);
    keys.sort();
    assert_eq!(keys, ["done", registry]);
    // Other connections are not affected.
    let mut other = through(&proxy);
    other
        .write_all(set("other").as_bytes())
        .expect("an open connection");
    let mut ok = [0; 5];
    other.read_exact(&mut ok).expect("an answer");
    assert_eq!(&ok, b"+OK\r\n");
    ping(&mut stream);
    proxy.cut();
    let (answered, _) = rest(&mut stream);
    // At most the answer to the first of the three.
    assert!(ok.starts_with(&answered), "{answered:?}");
}

#[test]
fn one_direction_can_end() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);

    proxy.end_replies();
    assert_eq!(rest(&mut stream), (vec![], None));
    stream
        .write_all(b"LPUSH list 1\r\n")
        .expect("an open connection");
    let () = server.command(&["BLPOP", "list", "0"]);

    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);
    // The server closes a connection that ended, so both directions end.
    proxy.end_requests();
    assert_eq!(rest(&mut stream), (vec![], None));
}

#[test]
fn frozen_server_does_not_prevent_cut() {
    // Its backlog fills immediately: connecting after that takes minutes.
    let server = Server::start_with(&["--tcp-backlog", "1"]);
    let proxy = Proxy::to(server.port());
    server.freeze();
    let mut streams: Vec<TcpStream> = (0..8).map(|_| through(&proxy)).collect();
    for stream in &mut streams {
        ping(stream);
    }
    let (stop, stopped) = channel();
    let ended = thread::spawn(move || {
        while stopped.try_recv().is_err() {
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
    stop.send(()).expect("a thread that closes connections");
    let proxy = ended.join().expect("the proxy");
    let mut stream = through(&proxy);
    ping(&mut stream);
    read_pong(&mut stream);
}
