//! A network that breaks to order: a TCP proxy in front of a server.

mod pair;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use pair::Pair;

/// How long the connection to the server may take before it is looked whether it is still wanted.
const PATIENCE: Duration = Duration::from_millis(500);

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
    refusing: bool,
    stalled: bool,
    delay: Duration,
    swallowing_requests: bool,
    swallowing_replies: bool,
    swallowed: usize,
    /// How many bytes clients may still send.
    requests_left: Option<usize>,
    /// How many bytes the server may still answer.
    replies_left: Option<usize>,
    ended: bool,
    open: Vec<Weak<Pair>>,
    /// How often all connections there were have been ended, one way or another.
    ends: u64,
}

/// In which direction something goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Requests,
    Replies,
}

/// What becomes of some bytes.
enum Fate {
    Pass,
    Vanish,
    /// So many of them pass, and then the connection breaks.
    Break(usize),
    /// There is no connection any more.
    Late,
}

impl Proxy {
    /// A proxy that passes everything on to `port`.
    ///
    /// # Panics
    ///
    /// When there is no free port.
    pub fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
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
                    thread::spawn(move || shared.let_in(client, port, ends));
                }
            }
        });
        Proxy { port: own, shared }
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Closes all connections; new ones are let through.
    pub fn cut(&self) {
        self.each(Pair::close);
    }

    /// Breaks all connections as a machine does that has forgotten them (RST); new ones are let
    /// through.
    pub fn reset(&self) {
        self.each(Pair::reset);
    }

    /// Of what the server answers from now on, on whichever connection, so many bytes pass. The
    /// connection with the last of them breaks (RST); what comes after that is let through again.
    pub fn reset_after(&self, bytes: usize) {
        self.change(|state| state.replies_left = Some(bytes));
    }

    /// The same for what clients send: the last command that gets there is half of one.
    pub fn reset_after_sent(&self, bytes: usize) {
        self.change(|state| state.requests_left = Some(bytes));
    }

    /// Clients see the end of what the server sends. What they send still gets there, until they
    /// close the connection, too. New connections are let through.
    pub fn end_replies(&self) {
        self.each(|pair| pair.end(Way::Replies));
    }

    /// The server sees the end of what clients send. What it answers still gets there, until it
    /// closes the connection, too. New connections are let through.
    pub fn end_requests(&self) {
        self.each(|pair| pair.end(Way::Requests));
    }

    /// From now on new connections are closed at once (or no longer).
    pub fn refuse(&self, refusing: bool) {
        self.change(|state| state.refusing = refusing);
    }

    /// From now on everything takes so much longer, in either direction.
    pub fn delay(&self, delay: Duration) {
        self.change(|state| state.delay = delay);
    }

    /// From now on nothing is passed on, and nothing is closed (or everything again, also what was
    /// sent meanwhile).
    pub fn stall(&self, stalled: bool) {
        self.change(|state| state.stalled = stalled);
    }

    /// From now on what clients send is thrown away (or no longer).
    pub fn swallow_requests(&self, swallowing: bool) {
        self.change(|state| {
            state.swallowing_requests = swallowing;
            state.swallowed = 0;
        });
    }

    /// From now on what the server answers is thrown away (or no longer).
    pub fn swallow_replies(&self, swallowing: bool) {
        self.change(|state| {
            state.swallowing_replies = swallowing;
            state.swallowed = 0;
        });
    }

    /// Returns when something has been thrown away. If it was an answer, the server has done its
    /// work.
    pub fn wait_until_swallowed(&self) {
        let mut state = self.shared.lock();
        while state.swallowed == 0 {
            state = self.shared.wait(state);
        }
    }

    fn each(&self, end: impl Fn(&Pair)) {
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
        // Lets the listener see that it has ended.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Changes something that others wait for.
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(|e| e.into_inner())
    }

    /// Connects a client with the server, unless all connections are ended first. Nothing is locked
    /// meanwhile: a frozen server whose backlog is full keeps whoever connects waiting for minutes.
    fn let_in(self: Arc<Self>, client: TcpStream, port: u16, ends: u64) {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let server = loop {
            match TcpStream::connect_timeout(&address, PATIENCE) {
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

    /// Returns when something may be taken in, and how long it is to be kept.
    fn admit(&self, pair: &Pair) -> Duration {
        let mut state = self.lock();
        while state.stalled && !pair.is_over() {
            state = self.wait(state);
        }
        state.delay
    }

    /// Returns when something may be passed on that is due at that time, and whether it is.
    fn judge(&self, pair: &Pair, way: Way, due: Instant, bytes: usize) -> Fate {
        let mut state = self.lock();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if pair.is_over() {
                return Fate::Late;
            } else if state.stalled {
                state = self.wait(state);
            } else if !left.is_zero() {
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(|e| e.into_inner()).0;
            } else {
                break;
            }
        }
        let swallowing = match way {
            Way::Requests => state.swallowing_requests,
            Way::Replies => state.swallowing_replies,
        };
        if swallowing {
            state.swallowed += bytes;
            self.changed.notify_all();
            return Fate::Vanish;
        }
        let left = match way {
            Way::Requests => &mut state.requests_left,
            Way::Replies => &mut state.replies_left,
        };
        match *left {
            Some(few) if few <= bytes => {
                *left = None;
                Fate::Break(few)
            }
            Some(more) => {
                *left = Some(more - bytes);
                Fate::Pass
            }
            None => Fate::Pass,
        }
    }
}
