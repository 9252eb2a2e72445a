//! A pair of connections through a proxy: one from the client, one to the server.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::{Fate, Shared, Way};

/// Two connections between which data is forwarded. Only the forwarding threads own them, so they
/// are closed when forwarding ends.
#[derive(Debug)]
pub(super) struct Pair {
    client: TcpStream,
    server: TcpStream,
    /// Closed or broken.
    over: AtomicBool,
    /// Ended by RST instead of a regular close.
    broken: AtomicBool,
}

/// Some bytes, and when to forward them.
type Late = (Instant, Vec<u8>);

impl Pair {
    /// Forwards incoming data according to the state of the proxy.
    pub(super) fn join(client: TcpStream, server: TcpStream, shared: &Arc<Shared>) -> Weak<Pair> {
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let pair = Arc::new(Pair {
            client,
            server,
            over: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        });
        for way in [Way::Requests, Way::Replies] {
            // Two threads, so that reading later data does not wait for the delay of earlier data.
            let (late, queue) = channel();
            let (reading, of_reader) = (pair.clone(), shared.clone());
            thread::spawn(move || reading.take_in(way, &of_reader, &late));
            let (writing, of_writer) = (pair.clone(), shared.clone());
            thread::spawn(move || writing.pass_on(way, &of_writer, &queue));
        }
        Arc::downgrade(&pair)
    }

    /// Returns whether it was closed or broken.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Ends the streams of both sides.
    pub(super) fn close(&self) {
        self.over.store(true, Ordering::Relaxed);
        if !self.broken.load(Ordering::Relaxed) {
            for stream in [&self.client, &self.server] {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Sends RST to both sides once no thread uses the connections any more.
    pub(super) fn reset(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.over.store(true, Ordering::Relaxed);
        for stream in [&self.client, &self.server] {
            let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
            // Sends nothing to the peer, but ends the reading here.
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    /// Ends the stream of one direction; the other direction continues.
    pub(super) fn end(&self, way: Way) {
        let _ = self.to(way).shutdown(Shutdown::Write);
    }

    fn from(&self, way: Way) -> &TcpStream {
        match way {
            Way::Requests => &self.client,
            Way::Replies => &self.server,
        }
    }

    fn to(&self, way: Way) -> &TcpStream {
        match way {
            Way::Requests => &self.server,
            Way::Replies => &self.client,
        }
    }

    fn take_in(&self, way: Way, shared: &Shared, late: &Sender<Late>) {
        let mut buffer = [0; 16 * 1024];
        while let Ok(read @ 1..) = self.from(way).read(&mut buffer) {
            let due = Instant::now() + shared.admit(self);
            if late.send((due, buffer[..read].to_vec())).is_err() {
                return;
            }
        }
    }

    fn pass_on(&self, way: Way, shared: &Shared, queue: &Receiver<Late>) {
        for (due, bytes) in queue {
            // A side that has stopped reading may still send, so errors are ignored.
            match shared.judge(self, way, due, bytes.len()) {
                Fate::Pass => drop(self.to(way).write_all(&bytes)),
                Fate::Vanish => {}
                Fate::Break(count) => {
                    let _ = self.to(way).write_all(&bytes[..count]);
                    return shared.change(|_| self.reset());
                }
                Fate::Late => return,
            }
        }
        shared.change(|_| self.close());
    }
}
