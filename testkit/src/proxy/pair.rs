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
            let due = Instant::now() + shared.await_read(self);
            if sender.send((due, buffer[..read].to_vec())).is_err() {
                return;
            }
        }
    }

    fn write_loop(&self, direction: Direction, shared: &Shared, queue: &Receiver<Delayed>) {
        for (due, bytes) in queue {
            // A side that has stopped reading may still send, so errors are ignored.
            match shared.await_forward(self, direction, due, &bytes) {
                Action::Forward => drop(self.to(direction).write_all(&bytes)),
                Action::Discard => {}
                Action::ForwardThenReset(count) => {
                    let _ = self.to(direction).write_all(&bytes[..count]);
                    return shared.change(|_| self.reset());
                }
                Action::Close => return,
            }
        }
        shared.change(|_| self.close());
    }
}
