//! A pair of connections through a proxy: one from the client, one to the server.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::{Action, Direction, Shared};

/// Two connections between which data is forwarded. Only the forwarding threads own them, so they
/// are closed when forwarding ends.
#[derive(Debug)]
pub(super) struct Pair {
    client: TcpStream,
    server: TcpStream,
    /// Closed or broken.
    closed: AtomicBool,
    /// Ended by RST instead of a regular close.
    broken: AtomicBool,
    /// An answer was lost, and so is everything after it.
    lost: AtomicBool,
}

/// Some bytes, and when to forward them.
type Delayed = (Instant, Vec<u8>);

impl Pair {
    /// Forwards incoming data according to the state of the proxy.
    pub(super) fn join(client: TcpStream, server: TcpStream, shared: &Arc<Shared>) -> Weak<Pair> {
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let pair = Arc::new(Pair {
            client,
            server,
            closed: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        });
        for direction in [Direction::Requests, Direction::Replies] {
            // Two threads, so that reading later data does not wait for the delay of earlier data.
            let (sender, queue) = channel();
            let (reading, of_reader) = (pair.clone(), shared.clone());
            thread::spawn(move || reading.read_loop(direction, &of_reader, &sender));
            let (writing, of_writer) = (pair.clone(), shared.clone());
            thread::spawn(move || writing.write_loop(direction, &of_writer, &queue));
        }
        Arc::downgrade(&pair)
    }

    /// Returns whether it was closed or broken.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Ends the streams of both sides.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        if !self.broken.load(Ordering::Relaxed) {
            for stream in [&self.client, &self.server] {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Sends RST to both sides once no thread uses the connections any more.
    pub(super) fn reset(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.closed.store(true, Ordering::Relaxed);
        for stream in [&self.client, &self.server] {
            let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
            // Sends nothing to the peer, but ends the reading here.
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    /// Ends the stream of one direction; the other direction continues.
    pub(super) fn end(&self, direction: Direction) {
        let _ = self.to(direction).shutdown(Shutdown::Write);
    }

    fn from(&self, direction: Direction) -> &TcpStream {
        match direction {
            Direction::Requests => &self.client,
            Direction::Replies => &self.server,
        }
    }

    fn to(&self, direction: Direction) -> &TcpStream {
        match direction {
            Direction::Requests => &self.server,
            Direction::Replies => &self.client,
        }
    }

    fn read_loop(&self, direction: Direction, shared: &Shared, sender: &Sender<Delayed>) {
        let mut buffer = [0; 16 * 1024];
        while let Ok(read @ 1..) = self.from(direction).read(&mut buffer) {
            let due = Instant::now() + shared.await_read(self, direction);
            let bytes = match direction {
                Direction::Replies if shared.hides_cluster() => without_cluster(&buffer[..read]),
                Direction::Requests if shared.hides_resp3() => without_hello(&buffer[..read]),
                _ => buffer[..read].to_vec(),
            };
            if sender.send((due, bytes)).is_err() {
                return;
            }
        }
    }

    fn write_loop(&self, direction: Direction, shared: &Shared, queue: &Receiver<Delayed>) {
        let mut requests = Requests::default();
        for (due, bytes) in queue {
            // A side that has stopped reading may still send, so errors are ignored.
            match shared.await_forward(self, direction, due, &bytes) {
                Action::Forward if self.lost.load(Ordering::Relaxed) => {}
                Action::Forward if direction == Direction::Requests => {
                    let script_end = requests.script_end(&bytes);
                    match script_end.filter(|_| shared.takes_answer()) {
                        Some(end) => {
                            self.lost.store(true, Ordering::Relaxed);
                            let _ = self.to(direction).write_all(&bytes[..end]);
                            self.end(direction);
                        }
                        None => drop(self.to(direction).write_all(&bytes)),
                    }
                }
                Action::Forward => drop(self.to(direction).write_all(&bytes)),
                Action::Discard => {}
                Action::ForwardThenReset(count) => {
                    let _ = self.to(direction).write_all(&bytes[..count]);
                    return shared.change(|_| self.reset());
                }
                Action::Close => return,
            }
        }
        if direction == Direction::Replies && self.lost.load(Ordering::Relaxed) {
            shared.keep_open(self);
        }
        shared.change(|_| self.close());
    }
}

/// Returns the reply of a node of a cluster to HELLO as that of a server outside of one. The reply
/// is short, and the first one, so it arrives in one piece.
fn without_cluster(reply: &[u8]) -> Vec<u8> {
    const MODE: &[u8] = b"mode\r\n$7\r\ncluster";
    match reply.windows(MODE.len()).position(|part| part == MODE) {
        Some(at) => {
            let rest = &reply[at + MODE.len()..];
            [&reply[..at], b"mode\r\n$10\r\nstandalone", rest].concat()
        }
        None => reply.to_vec(),
    }
}

/// Returns the first request of a client with another command, which no server knows, in place of HELLO.
fn without_hello(request: &[u8]) -> Vec<u8> {
    const HELLO: &[u8] = b"\r\n$5\r\nHELLO\r\n";
    match request.windows(HELLO.len()).position(|part| part == HELLO) {
        Some(at) => {
            let rest = &request[at + HELLO.len()..];
            [&request[..at], b"\r\n$5\r\nOTHER\r\n", rest].concat()
        }
        None => request.to_vec(),
    }
}

/// Finds the scripts in what a client sends.
#[derive(Default)]
struct Requests {
    /// The begin of a request whose end has not arrived.
    begun: Vec<u8>,
}

impl Requests {
    /// Adds bytes. Returns how many of them there are up to the end of the first script that ends in them.
    fn script_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let before = self.begun.len();
        self.begun.extend(bytes);
        let (mut end, mut script_end) = (0, None);
        while let Some(len) = array_len(&self.begun[end..]) {
            let request = &self.begun[end..end + len];
            end += len;
            if script_end.is_none() && is_script(request) {
                script_end = Some(end - before);
            }
        }
        self.begun.drain(..end);
        // Not a request: TLS, or a test that writes something else.
        if self.begun.first().is_some_and(|first| *first != b'*') {
            self.begun.clear();
        }
        script_end
    }
}

/// Returns the length of an array of strings, as clients send requests, if all of it is there.
fn array_len(bytes: &[u8]) -> Option<usize> {
    let (count, mut len) = header(bytes, b'*')?;
    for _ in 0..count {
        let (text, start) = header(bytes.get(len..)?, b'$')?;
        len += start + text + 2;
    }
    (len <= bytes.len()).then_some(len)
}

/// Returns the number in a line that starts with `kind`, and the length of the line.
fn header(bytes: &[u8], kind: u8) -> Option<(usize, usize)> {
    let end = bytes.windows(2).position(|two| two == b"\r\n")?;
    let number = bytes[..end].strip_prefix(&[kind])?;
    let number = std::str::from_utf8(number).ok()?.parse().ok()?;
    Some((number, end + 2))
}

/// Returns whether a request runs a script, other than one of the registry of clients.
fn is_script(request: &[u8]) -> bool {
    let request = String::from_utf8_lossy(request);
    let command = request.split("\r\n").nth(2).unwrap_or_default();
    let is_script = ["EVAL", "EVALSHA"]
        .iter()
        .any(|name| command.eq_ignore_ascii_case(name));
    is_script && !request.contains("redlatch_client:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_found_wherever_the_requests_are_cut() {
        let evalsha = "*3\r\n$7\r\nEVALSHA\r\n$2\r\n\r\n\r\n$4\r\n*1\r\n\r\n";
        let registry = "*2\r\n$4\r\nEVAL\r\n$20\r\nredlatch_client:{me}\r\n";
        let ping = "*1\r\n$4\r\nPING\r\n";
        let all = [ping, registry, evalsha, ping].concat();
        let end = all.len() - ping.len();
        for cut in 0..all.len() {
            let mut requests = Requests::default();
            let (first, second) = all.as_bytes().split_at(cut);
            let found = match requests.script_end(first) {
                Some(found) => found,
                None => cut + requests.script_end(second).unwrap(),
            };
            assert_eq!(found, end, "{cut}");
        }
        let mut requests = Requests::default();
        for other in ["PING\r\n", "\x17\x03\x03", ping, ping] {
            assert_eq!(requests.script_end(other.as_bytes()), None, "{other:?}");
        }
        assert_eq!(requests.script_end(evalsha.as_bytes()), Some(evalsha.len()));
    }
}
