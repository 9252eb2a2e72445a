//! A TCP proxy in front of a server that breaks the network on demand.
//!
//! A listener thread accepts clients. For each of them another thread opens a connection to the
//! server; the two connections form a [`Pair`]. In each direction of a pair, a reader thread appends
//! data to a queue together with the time at which it is due, and a writer thread forwards it then.
//!
//! All faults are settings in one shared [`State`], which both threads consult:
//! - Stalled: they neither read nor write until the stall ends or the pair is closed.
//! - Requests held back: the writer waits, in that direction only.
//! - Delay: the reader adds it to the due time.
//! - Discard: the writer counts and drops the data.
//! - A cluster or RESP3 that is hidden: the reader changes what a node says about itself, or what a client asks.
//! - Byte limit: the writer forwards the remaining bytes, and then resets the pair.
//! - Lost answer: the writer forwards everything up to the next script (EVAL, EVALSHA), and then ends the stream towards the server.
//!   The server executes the script and closes the connection, so its end proves the execution. The client is not told.
//!
//! Closing and resetting act on all pairs and increment a counter, so that a client whose connection
//! to the server is still pending is dropped, too.

mod pair;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use pair::Pair;

use crate::server::Server;
use crate::until::TIMEOUT;

/// Interval at which a pending connection to the server is checked for whether it is still wanted.
const CONNECT_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// A proxy on a free loopback port. Ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Where new connections lead to instead.
    redirected: Option<SocketAddr>,
    /// Whether a node of a cluster says that it is none.
    hides_cluster: bool,
    /// Whether the server does not know HELLO.
    hides_resp3: bool,
    refusing: bool,
    stalled: bool,
    delay: Duration,
    /// Number of reads of what clients sent while it is held back.
    held_requests: Option<usize>,
    discarding_requests: bool,
    discarding_replies: bool,
    discarded: usize,
    /// The answer to the next script.
    answer: NextAnswer,
    /// Number of bytes that clients may still send.
    requests_left: Option<usize>,
    /// Number of bytes that the server may still answer.
    replies_left: Option<usize>,
    /// A word that breaks the connection on which a client sends it.
    breaks_on: Option<&'static str>,
    ended: bool,
    open: Vec<Weak<Pair>>,
    /// How often all existing connections have been ended in any way.
    ends: u64,
}

/// What happens to the answer to the next script.
#[derive(Debug, Default, PartialEq, Eq)]
enum NextAnswer {
    #[default]
    Forward,
    /// It will be lost. No client has sent the script yet.
    Lose,
    /// The script was forwarded.
    Sent,
    /// It is lost: the server has executed the script.
    Lost,
}

/// A direction of traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Requests,
    Replies,
}

/// What to do with some bytes.
enum Action {
    Forward,
    Discard,
    /// Pass this many bytes, then break the connection.
    ForwardThenReset(usize),
    /// The connection no longer exists.
    Close,
}

impl Proxy {
    /// Starts a proxy that forwards everything to `port`.
    ///
    /// # Panics
    ///
    /// If no port is free.
    pub fn to(port: u16) -> Proxy {
        Proxy::start(0, (Ipv4Addr::LOCALHOST, port).into())
    }

    /// The same for a server at another address.
    pub fn to_server(server: &Server) -> Proxy {
        Proxy::start(0, (server.address(), server.port()).into())
    }

    /// Starts a proxy at the port of a server that was killed: everyone who knows that address
    /// reaches the server at `port` instead.
    ///
    /// # Panics
    ///
    /// If the port is not free.
    pub fn in_place_of(killed: &Server, port: u16) -> Proxy {
        Proxy::start(killed.port(), (Ipv4Addr::LOCALHOST, port).into())
    }

    fn start(own: u16, target: SocketAddr) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, own)).expect("a free port");
        let own = listener.local_addr().expect("its address").port();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_listener = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let state = of_listener.lock();
                if state.ended {
                    return;
                }
                if !state.refusing {
                    let (shared, ends) = (of_listener.clone(), state.ends);
                    let target = state.redirected.unwrap_or(target);
                    thread::spawn(move || shared.connect_pair(client, target, ends));
                }
            }
        });
        Proxy { port: own, shared }
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Lets new connections lead to another server, as a name does after a failover. Existing
    /// connections stay open.
    pub fn redirect(&self, server: &Server) {
        let target = (server.address(), server.port()).into();
        self.change(|state| state.redirected = Some(target));
    }

    /// Sets whether a node of a cluster answers that it is no part of one, as endpoints of managed
    /// clusters do.
    pub fn hide_cluster(&self, hiding: bool) {
        self.change(|state| state.hides_cluster = hiding);
    }

    /// Makes HELLO unknown, as some proxies do: connections speak RESP2.
    pub fn hide_resp3(&self) {
        self.change(|state| state.hides_resp3 = true);
    }

    /// Closes all connections; new ones are accepted.
    pub fn cut(&self) {
        self.end_all(Pair::close);
    }

    /// Breaks all connections with RST, as a machine does that does not know them; new ones are
    /// accepted.
    pub fn reset(&self) {
        self.end_all(Pair::reset);
    }

    /// Passes this many bytes of the server's answers from now on, over all connections. The
    /// connection with the last of these bytes breaks (RST). Everything after that passes again.
    pub fn reset_after(&self, bytes: usize) {
        self.change(|state| state.replies_left = Some(bytes));
    }

    /// Passes this many bytes of what clients send. The connection then breaks, so the last command
    /// arrives cut off.
    pub fn reset_after_sent(&self, bytes: usize) {
        self.change(|state| state.requests_left = Some(bytes));
    }

    /// Breaks each connection (RST) on which a client sends this word, before the server receives it.
    pub fn reset_on(&self, word: Option<&'static str>) {
        self.change(|state| state.breaks_on = word);
    }

    /// Ends the server's stream towards the clients. What clients send still reaches the server
    /// until they also close the connection. New connections are accepted.
    pub fn end_replies(&self) {
        self.end_all(|pair| pair.end(Direction::Replies));
    }

    /// Ends the clients' stream towards the server. What the server answers still reaches the
    /// clients until it also closes the connection. New connections are accepted.
    pub fn end_requests(&self) {
        self.end_all(|pair| pair.end(Direction::Requests));
    }

    /// Sets whether new connections are closed immediately.
    pub fn refuse(&self, refusing: bool) {
        self.change(|state| state.refusing = refusing);
    }

    /// Delays everything from now on by this much, in both directions.
    pub fn delay(&self, delay: Duration) {
        self.change(|state| state.delay = delay);
    }

    /// Sets whether traffic stalls: nothing is forwarded and nothing is closed. When it resumes,
    /// data sent in the meantime is forwarded as well.
    pub fn stall(&self, stalled: bool) {
        self.change(|state| state.stalled = stalled);
    }

    /// Sets whether what clients send is held back, while the server's data is forwarded. When it
    /// resumes, all of it is forwarded: it is late.
    pub fn hold_requests(&self, holding: bool) {
        self.change(|state| state.held_requests = holding.then_some(0));
    }

    /// Returns how often clients have sent something since the latest
    /// [`hold_requests`](Proxy::hold_requests), if that is held back.
    pub fn held_requests(&self) -> usize {
        self.shared.lock().held_requests.unwrap_or_default()
    }

    /// Sets whether data from clients is discarded.
    pub fn discard_requests(&self, discarding: bool) {
        self.change(|state| {
            state.discarding_requests = discarding;
            state.discarded = 0;
        });
    }

    /// Sets whether data from the server is discarded.
    pub fn discard_replies(&self, discarding: bool) {
        self.change(|state| {
            state.discarding_replies = discarding;
            state.discarded = 0;
        });
    }

    /// Waits until some data has been discarded. If it was an answer, the server has executed the
    /// command.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn wait_until_discarded(&self) {
        let is_any = |state: &State| state.discarded > 0;
        self.shared.wait_until("discarded", is_any);
    }

    /// Loses the answer to the next script that a client sends, whatever else is sent and answered before. After that request its
    /// connection stays open without any traffic, until [`Proxy::cut`]. Scripts of the registry of clients do not count:
    /// a client sends them in the background at any time.
    pub fn lose_next_answer(&self) {
        self.change(|state| state.answer = NextAnswer::Lose);
    }

    /// Waits until the server has executed the script whose answer is lost.
    ///
    /// # Panics
    ///
    /// If it takes too long.
    pub fn wait_until_lost(&self) {
        let is_lost = |state: &State| state.answer == NextAnswer::Lost;
        self.shared.wait_until("the answer is lost", is_lost);
    }

    fn end_all(&self, end: impl Fn(&Pair)) {
        self.change(|state| {
            state.ends += 1;
            let open = state.open.iter().filter_map(Weak::upgrade);
            open.for_each(|pair| end(&pair));
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.shared.change(change);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.change(|state| state.ended = true);
        self.cut();
        // Wakes the listener, so that it notices the end.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Changes the state and wakes all threads that wait for it.
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until the state is such. Panics if that takes too long: nothing else ends a test in which a thread waits.
    fn wait_until(&self, what: &str, holds: impl Fn(&State) -> bool) {
        let lacks = |state: &mut State| !holds(state);
        let waited = self.changed.wait_timeout_while(self.lock(), TIMEOUT, lacks);
        let (state, _) = waited.unwrap_or_else(|e| e.into_inner());
        assert!(holds(&state), "never happened: {what}");
    }

    /// Connects a client with the server, unless all connections are ended first. The lock is not
    /// held meanwhile: connecting to a frozen server with a full backlog can take minutes.
    fn connect_pair(self: Arc<Self>, client: TcpStream, address: SocketAddr, ends: u64) {
        let server = loop {
            match TcpStream::connect_timeout(&address, CONNECT_CHECK_INTERVAL) {
                Ok(server) => break server,
                Err(error) if error.kind() == ErrorKind::TimedOut && self.lock().ends == ends => {}
                Err(_) => return,
            }
        };
        let mut state = self.lock();
        if state.ends == ends {
            let pair = Pair::join(client, server, &self);
            state.open.retain(|pair| pair.strong_count() > 0);
            state.open.push(pair);
        }
    }

    /// Returns whether the answer to a script is to be lost: once for each [`Proxy::lose_next_answer`].
    fn takes_answer(&self) -> bool {
        let mut state = self.lock();
        let takes = state.answer == NextAnswer::Lose;
        if takes {
            state.answer = NextAnswer::Sent;
        }
        takes
    }

    fn hides_cluster(&self) -> bool {
        self.lock().hides_cluster
    }

    fn hides_resp3(&self) -> bool {
        self.lock().hides_resp3
    }

    /// Waits until a pair is closed whose answer was lost, after the server has closed it.
    fn keep_open(&self, pair: &Pair) {
        self.change(|state| state.answer = NextAnswer::Lost);
        let mut state = self.lock();
        while !pair.is_closed() {
            state = self.wait(state);
        }
    }

    /// Waits until data may be read, and returns how long to delay it.
    fn await_read(&self, pair: &Pair, direction: Direction) -> Duration {
        let mut state = self.lock();
        if let (Direction::Requests, Some(held)) = (direction, &mut state.held_requests) {
            *held += 1;
        }
        while state.stalled && !pair.is_closed() {
            state = self.wait(state);
        }
        state.delay
    }

    /// Waits until data that is due at that time may be forwarded, and returns what to do with it.
    fn await_forward(
        &self,
        pair: &Pair,
        direction: Direction,
        due: Instant,
        data: &[u8],
    ) -> Action {
        let bytes = data.len();
        let mut state = self.lock();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            let is_held = direction == Direction::Requests && state.held_requests.is_some();
            if pair.is_closed() {
                return Action::Close;
            } else if state.stalled || is_held {
                state = self.wait(state);
            } else if !left.is_zero() {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(|e| e.into_inner()).0;
            } else {
                break;
            }
        }
        if let (Direction::Requests, Some(word)) = (direction, state.breaks_on)
            && data.windows(word.len()).any(|part| part == word.as_bytes())
        {
            return Action::ForwardThenReset(0);
        }
        let discarding = match direction {
            Direction::Requests => state.discarding_requests,
            Direction::Replies => state.discarding_replies,
        };
        if discarding {
            state.discarded += bytes;
            self.changed.notify_all();
            return Action::Discard;
        }
        let left = match direction {
            Direction::Requests => &mut state.requests_left,
            Direction::Replies => &mut state.replies_left,
        };
        match *left {
            Some(few) if few <= bytes => {
                *left = None;
                Action::ForwardThenReset(few)
            }
            Some(more) => {
                *left = Some(more - bytes);
                Action::Forward
            }
            None => Action::Forward,
        }
    }
}
